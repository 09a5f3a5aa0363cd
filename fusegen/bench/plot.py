"""A report as pictures, PNG and SVG: bars in multiples of a copy for each mode, and the sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fusegen.bench.sweeps import series
from fusegen.bench.table import target
from fusegen.bench.works import MODES

_RIVALS = (
    ("eager", "eager", "#c9ccd1"),
    ("compile", "torch.compile", "#e0953a"),
    ("max_autotune", "torch.compile, max-autotune", "#a8631c"),
    ("fusegen", "fusegen", "#2458c5"),
)
_DTYPE_COLOURS = {"float32": "#2458c5", "bfloat16": "#b3365e"}
# Text as text, and the same bytes each time, so that a committed picture has a readable diff.
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "fusegen",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_BEYOND = 1.35  # the axis ends at so many times the slowest of the compiled; eager may be beyond


def write_plots(report: Mapping[str, Any], directory: Path, stem: str) -> list[Path]:
    """Write `<stem>-<what>.svg` and `.png` for each mode and for the sweeps; the SVGs' paths."""
    directory.mkdir(parents=True, exist_ok=True)
    found = []
    with matplotlib.rc_context(_STYLE):
        figures = {mode: _bars(report, mode) for mode in MODES}
        figures["sweep"] = _sweeps(report.get("sweep", []))
        for what, figure in figures.items():
            if figure is None:
                continue
            path = directory / f"{stem}-{what.replace('+', '-')}.svg"
            figure.savefig(path, metadata={"Date": None})
            figure.savefig(path.with_suffix(".png"), dpi=130, metadata={"Software": None})
            found.append(path)
    return found


def _bars(report: Mapping[str, Any], mode: str) -> Figure | None:
    """Horizontal bars, a group for each work, with its limit and its target marked."""
    rows = [row for row in report["rows"] if row["mode"] == mode]
    if not rows:
        return None
    rivals = [r for r in _RIVALS if any(row.get(r[0]) is not None for row in rows)]
    compiled = [row.get(name) or 0.0 for row in rows for name, _, _ in _RIVALS[1:]]
    end = _BEYOND * max(compiled)
    height = 0.8 / len(rivals)
    figure = Figure(figsize=(9, 1.4 + 0.17 * len(rows) * (len(rivals) + 0.8)), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, label, colour) in enumerate(rivals):
        places = [y - 0.4 + (i + 0.5) * height for y in range(len(rows))]
        values = [row.get(name) or 0.0 for row in rows]
        axes.barh(places, [min(v, end) for v in values], height * 0.92, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            if value:
                text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
                if value > end:
                    text += " \N{RIGHTWARDS ARROW}"
                is_inside = value > 0.93 * end
                axes.annotate(
                    text, (min(value, end), place), (-3 if is_inside else 3, 0),
                    textcoords="offset points", va="center", ha="right" if is_inside else "left",
                    fontsize=6.5, zorder=4,
                    bbox=None if is_inside else {"facecolor": "white", "linewidth": 0, "pad": 0.6},
                )  # fmt: skip
    for y, row in enumerate(rows):
        is_first = y == 0
        axes.plot(
            [row["limit"]] * 2, [y - 0.46, y + 0.46], color="black", linewidth=1.4,
            label="limit: the bytes alone" if is_first else None,
        )  # fmt: skip
        aim = target(row)
        if aim is not None:
            axes.plot(
                [aim] * 2, [y - 0.46, y + 0.46], color="#1c8a4c", linewidth=1.2, linestyle=":",
                label="target" if is_first else None,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.set_xlabel("time in multiples of a copy of x; shorter is better")
    said = "forward and backward, every gradient" if mode == MODES[1] else "forward, no gradient"
    axes.set_title(f"{said}: {report['device']}, torch {report['torch']}", loc="left")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _label(row: Mapping[str, Any]) -> str:
    name: str = row["work"]
    return name if len(name) <= 40 else name[:37] + "..."


def _sweeps(entries: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Bandwidth over what is varied: a row of panels for each sweep, a panel for each mode."""
    if not entries:
        return None
    figure = Figure(figsize=(9, 3.2 * len(entries)), layout="constrained")
    grid = figure.subplots(len(entries), len(MODES), squeeze=False, sharey=True)
    for panels, entry in zip(grid, entries, strict=True):
        lines = series(entry["points"])
        for axes, mode in zip(panels, MODES, strict=True):
            for dtype, colour in _DTYPE_COLOURS.items():
                line = lines.get((mode, dtype), [])
                if not line:
                    continue
                sizes = [p["at"] for p in line]
                axes.plot(
                    sizes, [p["copy_gbps"] for p in line], color=colour, alpha=0.45, linewidth=1,
                    linestyle="--", label=f"a copy, {dtype}",
                )  # fmt: skip
                axes.plot(
                    sizes, [p["gbps"] for p in line], color=colour, linewidth=1.4, marker="o",
                    markersize=3, label=f"fusegen, {dtype}",
                )  # fmt: skip
            axes.set_xscale("log", base=2 if entry["varied"] == "elements" else 10)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(entry["varied"])
            axes.set_title(f"{entry['sweep'].removeprefix('sweep-')}, {mode}", loc="left")
            axes.grid(visible=True, alpha=0.25)
        panels[0].set_ylabel("GB/s of what must move")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure
