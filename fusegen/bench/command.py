"""Measure fusegen beside eager torch and torch.compile, in multiples of a copy of x.

Works go by name, patterns such as 'LN-*' included; or give a chain and its --shape. Without either,
everything that --list names is measured. Each result is compared with float64 before it is timed.
Times are medians of the device's own time, the rivals taking turns in one process, on data in
rotation and with the cache flushed between. `limit` is what must move through memory, and `of bw`
the part of the copy's bandwidth that fusegen reaches on it; `tuned` is torch.compile with
max-autotune.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fusegen.bench import markdown, table
from fusegen.bench.works import Item, Work, listing, select
from fusegen.describe import LAYOUTS, Situation, assumed_shapes, named_shapes
from fusegen.dsl import parse
from fusegen.errors import ArgumentError
from fusegen.promotion import FLOATING

OK, WRONG_RESULT = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options; those of a chain's situation come with the parser."""
    add = parser.add_argument
    add("works", nargs="*", metavar="WORK", help="names or patterns, or a chain with its --shape")
    add("--list", action="store_true", help="name the works, with shape, limit -> target, chain")
    add("--dtype", choices=FLOATING, help="of a chain's x and operands (default: float32)")
    add("--device", choices=("cpu", "cuda"), help="the GPU where there is one")
    add("--quick", action="store_true", help="few works, short, without torch.compile")
    compiling = parser.add_mutually_exclusive_group()
    compiling.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    compiling.add_argument(
        "--max-autotune",
        action="store_true",
        help="torch.compile with max-autotune-no-cudagraphs as well",
    )
    add("--time", type=_seconds, metavar="SECONDS", help="begin no further work after so long")
    add("--json", type=Path, metavar="FILE", help="write the report there, work by work")
    add("--commit", metavar="HASH", help="what is measured, where there is no git to ask")
    add("--plot", type=Path, metavar="DIR", help="draw the report there; needs matplotlib")
    add("--read", type=Path, metavar="FILE", help="show a report again instead of measuring")
    add("--table", action="store_true", help="with --read: print README's block instead")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted a number of seconds above 0")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Do what was asked for; 1 where a result is wrong or a work failed."""
    if options.list:
        print(listing())
        return OK
    if options.table and options.read is None:
        raise ArgumentError("--table makes README's block of a report; name it with --read FILE")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise ArgumentError("--plot needs matplotlib; pip install 'fusegen[bench]'")
    if options.read is not None:
        return _show(options)
    chosen = _chosen(options)
    # Here, because it imports torch.
    from fusegen.bench import session

    modes: tuple[str, ...] = () if options.no_compile or options.quick else ("compile",)
    if options.max_autotune:
        modes = ("compile", "max_autotune")
    settings = session.Settings(
        options.device,
        options.quick,
        modes,
        options.commit,
        options.json,
        options.time,
        tuple(options.imports or ()),
    )
    report = session.run(chosen, settings)
    print("\n".join(table.closing_lines(report)))
    if options.plot is not None:
        _plot(report, options.plot, _stem(report, options.json))
    return OK if session.is_right(report) else WRONG_RESULT


def _chosen(options: argparse.Namespace) -> Sequence[Item]:
    if options.shape is not None:
        if len(options.works) != 1:
            raise ArgumentError(f"--shape goes with one chain, got {len(options.works)}")
        return [_own_work(options)]
    described = (options.dtype, options.operand or None, options.layout != LAYOUTS[0] or None)
    if any(value is not None for value in described):
        raise ArgumentError(
            "--dtype, --operand and --layout go with a chain and its --shape; a named work has its "
            "own, as --list shows"
        )
    return select(options.works, quick=options.quick)


def _own_work(options: argparse.Namespace) -> Work:
    chain = parse(options.works[0])
    if chain.drawn:
        raise ArgumentError(
            f"the chain {chain.text!r} draws noise, and eager draws other noise, so no result can "
            "be compared; leave the steps out that draw, or give them training=False"
        )
    dtype = options.dtype or "float32"
    situation = Situation(options.shape, named_shapes(options.operand), dtype, options.layout)
    shape, operands = assumed_shapes(chain, situation)
    if 0 in shape:
        raise ArgumentError(f"--shape: got {shape}, which holds nothing that could be timed")
    placements = tuple(operands[name] for name in chain.operands)
    return Work(
        chain.text, chain.text, None, shape, shape, placements, None, None, dtype, options.layout
    )


def _show(options: argparse.Namespace) -> int:
    """A report that exists: its table, README's block, or its plots."""
    if options.works:
        raise ArgumentError(f"--read shows a whole report; got {options.works[0]!r} beside it")
    path: Path = options.read
    try:
        report: dict[str, Any] = json.loads(path.read_text("utf-8"))
        report["rows"], report["host_us"], report["build_s"], report["device"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path}: not a report of `fusegen bench`: {error!r}") from error
    if options.plot is not None:
        _plot(report, options.plot, _stem(report, path))
    if options.table:
        print(markdown.readme_block(path, path.as_posix()), end="")
    elif options.plot is None:
        print(table.whole(report))
    return OK


def _stem(report: dict[str, Any], path: Path | None) -> str:
    """The plots' name: the report's own, else its date."""
    return path.stem if path is not None else report["date"][:10]


def _plot(report: dict[str, Any], directory: Path, stem: str) -> None:
    # Here, because it imports matplotlib, which only the extra `bench` brings.
    from fusegen.bench.plot import write_plots

    for path in write_plots(report, directory, stem):
        print(path)
