"""A report as lines for the terminal, and the verdict on each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.bench.sweeps import CLIFF
from fusegen.bench.works import BY_NAME, MODES, Work

_LEVEL = 1.02  # as fast as: within what a repetition may differ by
_AHEAD = 1.3  # how far training is to be ahead of torch.compile, where the limit leaves the room
_NAME_WIDTH = 28


def target(row: Mapping[str, Any]) -> float | None:
    """The row's target, or the table's where an older report does not hold it."""
    if "target" in row:
        found: float | None = row["target"]
        return found
    item = BY_NAME.get(row["work"])
    if not isinstance(item, Work) or item.targets is None:
        return None
    return item.targets[MODES.index(row["mode"])]


def misses(row: Mapping[str, Any]) -> list[str]:
    """By how much a row misses what is aimed at; empty where it is met.

    That is its target, and to be level with torch.compile, to 2 %; where there is a target,
    training is to be ahead by 1.3 times wherever the limit leaves that room.
    """
    found = []
    aim, ours, theirs = target(row), row["fusegen"], row.get("compile")
    if aim is not None and ours > aim:
        found.append(f"{ours / aim - 1:.1%} over the target")
    if theirs:
        is_training = aim is not None and row["mode"] == MODES[1]
        if ours > theirs * _LEVEL:
            found.append(f"{ours / theirs - 1:.1%} behind torch.compile")
        elif is_training and theirs >= _AHEAD * row["limit"] and ours > theirs / _AHEAD:
            found.append(f"{theirs / ours:.2f} times as fast as torch.compile, not {_AHEAD}")
    return found


def verdict(row: Mapping[str, Any]) -> str:
    """OK, MISS with its reasons, WRONG, or nothing where nothing is aimed at."""
    if not row["is_right"]:
        return "WRONG"
    found = misses(row)
    if found:
        return f"MISS: {'; '.join(found)}"
    return "OK" if target(row) is not None or row.get("compile") else ""


def heading(report: Mapping[str, Any]) -> str:
    """On what the run was made."""
    driver = f", driver {report['driver']}" if report.get("driver") else ""
    hash_, dash, dirty = (report.get("commit") or "").partition("-")
    commit = f", commit {hash_[:12]}{dash}{dirty}" if hash_ else ""
    threads = f", {report['threads']} threads" if not report.get("driver") else ""
    return f"{report['device']}{driver}{threads}, torch {report['torch']}{commit}"


def header() -> str:
    """The columns; times are multiples of a copy of x."""
    return (
        f"{'work':{_NAME_WIDTH}} {'mode':16} {'copy ms':>8} {'limit':>6} {'target':>6} "
        f"{'eager':>6} {'compile':>7} {'tuned':>6} {'fusegen':>7} {'of bw':>5} {'spread':>6} "
        f"{'GiB':>5} {'host us':>7} {'error':>7} {'eager':>7}"
    )


def line(row: Mapping[str, Any]) -> str:
    """One row, with its verdict."""
    return (
        f"{_short(row['work'])} {row['mode']:16} {row['copy_ms']:8.3f} {row['limit']:6.2f} "
        f"{_number(target(row), 6)} {row['eager']:6.2f} {_number(row.get('compile'), 7)} "
        f"{_number(row.get('max_autotune'), 6)} {row['fusegen']:7.2f} "
        f"{row['limit'] / row['fusegen']:5.0%} {row['spread']:6.1%} "
        f"{_number(row.get('peak_gib', {}).get('fusegen'), 5, 2)} "
        f"{_number(row.get('host_us', {}).get('fusegen'), 7, 1)} "
        f"{row['max_error']:7.0e} {row['eager_error']:7.0e}  {verdict(row)}"
    ).rstrip() + "".join(f"\n  {name}: {why}" for name, why in row.get("refused", {}).items())


def host_line(entry: Mapping[str, Any]) -> str:
    """Host microseconds of one call on a small tensor."""
    rivals = {k: v for k, v in entry.items() if k not in ("work", "mode", "target")}
    told = ", ".join(f"{name} {value:.1f}" for name, value in rivals.items())
    aim = entry.get("target")
    said = "" if aim is None else f"; target {aim:g}: {host_verdict(entry)}"
    return f"{_short(entry['work'])} {entry['mode']}: host us {told}{said}"


def host_verdict(entry: Mapping[str, Any]) -> str:
    """Whether a call's host time is below its target."""
    aim = entry.get("target")
    if aim is None:
        return ""
    over = entry["fusegen"] - aim
    return "OK" if over < 0 else f"MISS: {over:.1f} us over the target"


def sweep_lines(entry: Mapping[str, Any]) -> list[str]:
    """A sweep's points in short, and where each series falls furthest under its neighbours."""
    points = entry["points"]
    wrong = [str(p["at"]) for p in points if not p["is_right"]]
    lines = [f"{_short(entry['sweep'])} {len(points)} points over {entry['varied']}"]
    lines[0] += f"; WRONG at {', '.join(wrong)}" if wrong else ""
    for worst in entry["worst"]:
        said = "OK" if worst["of_neighbours"] >= CLIFF else "MISS: a cliff"
        lines.append(
            f"  {worst['mode']:16} {worst['dtype']:8} least at {worst['at']}: "
            f"{worst['of_neighbours']:.0%} of its neighbours' bandwidth, a copy "
            f"{worst['copy_of_neighbours']:.0%}  {said}"
        )
    return lines


def failure_line(name: str, why: str) -> str:
    """A work that raised."""
    return f"{_short(name)} FAILED: {why}"


def closing_lines(report: Mapping[str, Any]) -> list[str]:
    """What stands below the rows: first calls, kernels, what is missing, the sum of it."""
    lines = []
    build = report.get("build_s", {})
    if "failed" in build:
        lines.append(f"first calls were not timed: {build['failed']}")
    elif build:
        lines.append(
            f"first call of {build.get('work', 'A')}, forward + backward: cold {build['cold']:.2f} "
            f"s; from the cache {build['warm'] * 1e3:.0f} ms, {build['warm_import'] * 1e3:.0f} ms "
            "of it import fusegen"
        )
    kernels = report.get("kernels", [])
    if kernels:
        lines.append(f"\n{'registers':>9} {'shared':>6} {'stack':>5}  kernel")
    for kernel in kernels:
        lines.append(
            f"{kernel['registers']:9} {kernel['shared_bytes']:6} "
            f"{kernel['stack_bytes'] + kernel['local_bytes']:5}  "
            f"{kernel['kernel']} of {kernel['chain']} ({kernel['work']})"
        )
    if report.get("left_out"):
        lines.append(f"left out, for want of time: {', '.join(report['left_out'])}")
    rows = report["rows"]
    if any(target(row) is not None for row in rows):
        good = sum(verdict(row) == "OK" for row in rows)
        lines.append(f"\n{good} of {len(rows)} rows meet their targets and torch.compile")
    wrong = sorted({row["work"] for row in rows if not row["is_right"]})
    if wrong:
        lines.append(f"less accurate than eager: {', '.join(wrong)}")
    return lines


def whole(report: Mapping[str, Any]) -> str:
    """A finished report, as its run printed it."""
    lines = [heading(report), header(), *map(line, report["rows"])]
    lines += map(host_line, report["host_us"])
    for entry in report.get("sweep", []):
        lines += sweep_lines(entry)
    lines += [failure_line(name, why) for name, why in report.get("failed", {}).items()]
    return "\n".join([*lines, *closing_lines(report)])


def _short(name: str) -> str:
    cut = name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."
    return f"{cut:{_NAME_WIDTH}}"


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
