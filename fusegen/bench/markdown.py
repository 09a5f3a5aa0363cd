"""A report as README's block: what was run, its plots, a table with every row."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from fusegen.bench.sweeps import CLIFF, cliffs
from fusegen.bench.table import host_verdict, misses, target
from fusegen.bench.works import BY_NAME, MODES, Work

_WIDTH = 105  # README's own


def readme_block(path: Path, link: str) -> str:
    """The block of the report in a file that README links to as `link`; plots lie beside it."""
    plots = sorted(path.parent.glob(f"{path.stem}-*.svg"), key=_order)
    folder = PurePosixPath(link).parent
    links = [(folder / plot.name).as_posix() for plot in plots]
    told = path.parent.parent / "reasons.toml"
    reasons = tomllib.loads(told.read_text("utf-8"))["reason"] if told.exists() else []
    return block(json.loads(path.read_text("utf-8")), link, links, reasons)


def reason_of(row: Mapping[str, Any], reasons: Sequence[Mapping[str, Any]]) -> str:
    """Why a row misses what is aimed at, by the first entry of reasons.toml that is for it; nothing
    where there is none.
    """
    for reason in reasons:
        is_meant = any(fnmatchcase(row["work"], pattern) for pattern in reason["works"])
        if is_meant and reason.get("mode", row["mode"]) == row["mode"]:
            return str(reason["why"])
    return ""


def _order(plot: Path) -> tuple[bool, int]:
    return "sweep" in plot.name, len(plot.name)


def block(
    report: Mapping[str, Any],
    path: str,
    plots: Sequence[str] = (),
    reasons: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text between README's markers. `path` and `plots` are as README links to them; reasons
    are entries of reasons.toml.

    Rows of one work stand in one line, forward / forward and backward; a figure that misses what is
    aimed at is followed by a star, and the reasons stand below.
    """
    head = (
        f"On one {report['device']} (torch {report['torch']}, {report['date'][:10]}), in multiples "
        "of a copy of x in the same run, forward / forward and backward with every gradient. The "
        "limit is what the bytes alone would take, the target what is aimed at; a star is a target "
        "missed, or torch.compile not beaten as far as it should be."
    )
    lines = [
        *textwrap.wrap(head, _WIDTH),
        f"The run is [{path}]({path}).",
        "",
        *(f"![{_caption(plot)}]({plot})" for plot in plots),
        *([""] if plots else []),
        "| work | limit | target | fusegen | torch.compile | eager |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_work: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        by_work.setdefault(row["work"], []).append(row)
    chain_above = ""
    for work, rows in by_work.items():
        rows = sorted(rows, key=lambda row: MODES.index(row["mode"]))
        chain = _chain(rows[0])
        ours = [f"{row['fusegen']:.2f}{'*' if misses(row) else ''}" for row in rows]
        cells = [
            _cell(work, chain if chain != chain_above else ""),
            _figures([row["limit"] for row in rows]),
            _figures([target(row) for row in rows]),
            " / ".join(ours),
            _figures([row.get("compile") for row in rows]),
            _figures([row["eager"] for row in rows], 1),
        ]
        chain_above = chain
        lines.append(f"| {' | '.join(cells)} |")
    lines += _missed(report["rows"], reasons)
    notes = [
        *_left_out(report),
        *_host(report["host_us"]),
        *_build(report["build_s"]),
        *_sweeps(report),
    ]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _cell(work: str, chain: str) -> str:
    """A work with its chain, where that is not the one above's, nor the very name."""
    text = f"{work}: `{chain}`" if chain not in ("", work) else work
    return text.replace("|", r"\|")


def _chain(row: Mapping[str, Any]) -> str:
    """The row's chain; of an older report, which does not hold it, the table's."""
    item = BY_NAME.get(row["work"])
    known = item.chain if isinstance(item, Work) else ""
    return str(row.get("chain", known))


def _figures(values: Sequence[float | None], digits: int = 2) -> str:
    return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def _caption(plot: str) -> str:
    if "sweep" in plot:
        return "Bandwidth over the size of x and over the length of a row"
    mode = "forward and backward" if "backward" in plot else "forward"
    return f"Every work, {mode}, in multiples of a copy of x"


def _missed(rows: Sequence[Mapping[str, Any]], reasons: Sequence[Mapping[str, Any]]) -> list[str]:
    told = []
    for row in rows:
        if found := misses(row):
            why = reason_of(row, reasons)
            told.append(f"- {row['work']}, {row['mode']}: {'; '.join(found)}{why and f': {why}'}.")
    if not told:
        return []
    summary = f"<summary>{len(told)} of {len(rows)} figures miss</summary>"
    return ["", "<details>", summary, "", *told, "", "</details>"]


def _left_out(report: Mapping[str, Any]) -> list[str]:
    """What the run has not, and which of its results are less accurate than they should be."""
    wrong = sorted({row["work"] for row in report["rows"] if not row.get("is_right", True)})
    notes = []
    if report.get("left_out"):
        notes.append(f"Left out of this run, for want of time: {', '.join(report['left_out'])}.")
    if wrong:
        notes.append(f"Less accurate than eager by more than is allowed: {', '.join(wrong)}.")
    return notes


def _host(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{entry['work']}, {entry['mode']}: {entry['fusegen']:.1f} us of host time a call"
        f"{' (a miss)' if host_verdict(entry).startswith('MISS') else ''}, where one eager "
        f"operation takes {entry['one eager operation']:.1f}."
        for entry in entries
    ]


def _build(build: Mapping[str, Any]) -> list[str]:
    if "cold" not in build:
        return []
    return [
        f"A first call builds forward and backward of {build.get('work', 'A')} in "
        f"{build['cold']:.1f} s; from the cache it takes {build['warm'] * 1e3:.0f} ms in a new "
        "process, beyond `import torch`."
    ]


def _sweeps(report: Mapping[str, Any]) -> list[str]:
    notes = []
    for entry in report.get("sweep", []):
        if not entry["worst"]:
            continue
        found = cliffs(entry["points"], entry["varied"])
        if found:
            told = (
                f"{c['at']} ({c['dtype']}, {c['mode']}) {c['of_neighbours']:.0%}" for c in found
            )
            notes.append(
                f"Over {entry['varied']}, cliffs, points under {CLIFF:.0%} of their neighbours' "
                f"bandwidth: {'; '.join(told)}."
            )
            continue
        least = min(entry["worst"], key=lambda worst: worst["of_neighbours"])
        notes.append(
            f"Over {entry['varied']}, no cliff: the worst point, {least['at']} ({least['dtype']}, "
            f"{least['mode']}), has {least['of_neighbours']:.0%} of its neighbours' bandwidth."
        )
    return notes
