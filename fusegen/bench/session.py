"""A run: everything that was chosen, measured in one process; its report grows work by work."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusegen.bench import builds, table
from fusegen.bench.machine import facts
from fusegen.bench.measure import Effort, host, points, rows
from fusegen.bench.sweeps import worst_points
from fusegen.bench.timing import timer_of
from fusegen.bench.works import HostWork, Item, Sweep, Work
from fusegen.errors import ArgumentError, FusegenError

Report = dict[str, Any]

_TIMED_BUILDS = 8  # works whose first calls are timed; they build one after the other
_CACHES = ("FUSEGEN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Settings:
    """What a run is asked for."""

    device: str | None = None  # None: the GPU where there is one
    is_quick: bool = False
    compile_modes: tuple[str, ...] = ("compile",)
    commit: str | None = None
    json_path: Path | None = None
    budget_s: float | None = None  # after it no further work is begun
    modules: tuple[str, ...] = ()  # the user's, which register operations


def run(chosen: Sequence[Item], settings: Settings) -> Report:
    """Measure what was chosen, print it as it is found, and return the report.

    Where a path is given, the report is written after every work, so that a run that is stopped
    leaves what it has, marked as not complete. A work that raises is reported and left out.
    """
    started = time.perf_counter()
    device = _device(settings.device)
    works = [item for item in chosen if isinstance(item, Work)]
    report = facts(device, settings.commit) | {
        "is_complete": False,
        "copy_gbps": 0.0,
        "rows": [],
        "host_us": [],
        "build_s": {},
        "kernels": [],
        "sweep": [],
        "failed": {},
        "left_out": [],
    }
    timer = timer_of(device)
    effort = Effort(0.25, 7, settings.compile_modes)
    if settings.is_quick:
        effort = Effort(0.1, 4, settings.compile_modes)
    sweep_effort = Effort(0.04, 5)
    print(table.heading(report), flush=True)
    with _own_cache():
        built_by: dict[str, str] = {}
        beforehand: set[str] = set()
        if works:
            timed = works[: 1 if settings.is_quick else _TIMED_BUILDS]
            try:
                report["build_s"], built_by = builds.build_times(timed, device, settings.modules)
            except FusegenError as error:
                report["build_s"] = {"failed": str(error)}
        if not settings.is_quick:
            others = works[_TIMED_BUILDS:]
            swept = [w for s in chosen if isinstance(s, Sweep) for _, w in s.points(device)]
            orders = builds.Orders(
                [*others, *swept], device, settings.modules, others, effort.compile_modes
            )
            built_by |= builds.prebuild(orders)
            beforehand = {work.name for work in others}
        print(table.header(), flush=True)
        for item in chosen:
            if settings.budget_s and time.perf_counter() - started > settings.budget_s:
                report["left_out"].append(item.name)
                continue
            before = builds.keys()
            try:
                if isinstance(item, Work):
                    is_cold = item.name not in beforehand
                    found = rows(item, device, timer, replace(effort, times_builds=is_cold))
                    report["rows"] += found
                    lines = [table.line(row) for row in found]
                elif isinstance(item, HostWork):
                    found = host(item, device, effort)
                    report["host_us"] += found
                    lines = [table.host_line(entry) for entry in found]
                else:
                    found = points(item, device, timer, sweep_effort)
                    entry = {
                        "sweep": item.name,
                        "varied": item.varied,
                        "chain": item.chain,
                        "points": found,
                        "worst": worst_points(found, item.varied),
                    }
                    report["sweep"].append(entry)
                    lines = table.sweep_lines(entry)
            except (FusegenError, RuntimeError) as error:  # torch says no memory with the latter
                report["failed"][item.name] = f"{type(error).__name__}: {error}"
                lines = [table.failure_line(item.name, report["failed"][item.name])]
            built_by |= dict.fromkeys(builds.keys() - before, item.name)
            print("\n".join(lines), flush=True)
            _write(report, settings.json_path)
        report["kernels"] = builds.kernels(built_by)
    report["copy_gbps"] = max((row["copy_gbps"] for row in report["rows"]), default=0.0)
    report["is_complete"] = not report["left_out"]
    report["seconds"] = time.perf_counter() - started
    _write(report, settings.json_path)
    return report


def is_right(report: Report) -> bool:
    """Whether nothing failed and every result was as accurate as it must be."""
    points = [point for entry in report["sweep"] for point in entry["points"]]
    return not report["failed"] and all(row["is_right"] for row in (*report["rows"], *points))


def _device(named: str | None) -> str:
    has_gpu = torch.cuda.is_available()
    if named == "cuda" and not has_gpu:
        raise ArgumentError("argument 'device': got cuda, but torch sees no GPU here")
    return named or ("cuda" if has_gpu else "cpu")


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Caches of the run's own, empty at first: a cold build is cold, and torch.compile's too."""
    before = {name: os.environ.get(name) for name in _CACHES}
    with tempfile.TemporaryDirectory(prefix="fusegen-bench-") as directory:
        os.environ |= {name: str(Path(directory, name.lower())) for name in _CACHES}
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _write(report: Report, path: Path | None) -> None:
    if path is None:
        return
    path = path.resolve()  # of a link, what it leads to
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # such as a terminal, whose place no file may take
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
