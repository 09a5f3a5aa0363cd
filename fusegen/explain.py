"""A chain told as kernels: what each holds, reads and writes, what is saved, and what it must cost.

The limit of a kernel is what its bytes take at a given bandwidth. A tensor that one kernel writes
and the next reads counts twice, as if no cache were there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusegen import ir
from fusegen.describe import Module, Situation, assumed_shapes, modules
from fusegen.emission import make_entry
from fusegen.kernel import Entry, Kernel
from fusegen.ops import Chain
from fusegen.program import Program
from fusegen.promotion import FLOATING
from fusegen.target import H200_GB_PER_S
from fusegen.traffic import bytes_of, tensors

_WHAT = {
    "pointwise": "element by element",
    "row": "rows on the chip",
    "column": "strided rows on the chip",
    "window": "pooling windows side by side",
    "bundle": "rows on the chip, with the windows across them",
    "slide": "pooling windows that overlap, cross the edge or leave elements over",
    "cover": "elements, each from the windows that cover it",
    "inner": "one pass, sums along it",
    "outer": "one pass, sums down columns",
    "finalise": "partial sums added up",
}


def explain(chain: Chain, target: str, situation: Situation, bandwidth: float) -> str:
    """The kernels of a chain, forward and backward; bandwidth is in GB/s.

    Raises ArgumentError for a situation that the chain does not fit.
    """
    found = modules(chain, target, situation, grad=True)
    lines = [chain.text]
    if situation.shape is None:
        lines.append(f"x is assumed to be of shape {assumed_shapes(chain, situation)[0]}")
    totals: dict[str, float] = {}
    for number, module in enumerate(found, start=1):
        if len(found) > 1:
            reason = f", cut here: {module.segment.reason}" if number > 1 else ""
            lines += ["", f"segment {number} of {len(found)}: {module.segment.chain.text}{reason}"]
        for program in module.programs:
            told, moved = _program(module, program, bandwidth)
            lines += ["", *told]
            if program.name == "forward":
                lines += _copies(module, program)
            totals[program.name] = totals.get(program.name, 0.0) + moved
        if module.passed:
            lines += [""]
            lines += [f"d_{name} is d_{result}, as it comes" for name, result in module.passed]
        elif len(module.programs) == 1:
            fixed = {module.bound.dtype, found[-1].bound.dtype}.difference(FLOATING)
            why = f"a result of {min(fixed)} has no gradient" if fixed else "x has no gradient"
            lines += ["", f"no backward: {why}"]
    lines.append("")
    for name, moved in totals.items():
        lines.append(f"{name} in all: {_bytes(moved)}, {_limit(moved, bandwidth)}")
    of_whom = ", a copy on an H200" if bandwidth == H200_GB_PER_S else ""
    lines.append(f"at {bandwidth:g} GB/s{of_whom}")
    return "\n".join(lines)


def _program(module: Module, program: Program, bandwidth: float) -> tuple[list[str], float]:
    entry = make_entry(program, module.signature)
    lines = [program.name]
    total = 0.0
    for kernel in entry.kernels:
        read, written = tensors(kernel, entry, module.bound)
        size = sum((*read.values(), *written.values()))
        total += size
        what = _WHAT[kernel.family]
        if kernel.family == "outer" and not kernel.sums:
            what = "element by element, down columns"
        if kernel.is_streamed:
            what = "rows turn by turn"
        if kernel.is_dealt:
            what += ", which lie in runs far apart"
        lines.append(f"  {kernel.name}: {what}; {_limit(size, bandwidth)}")
        steps = _steps(kernel)
        if steps:
            lines.append(f"    holds  {' | '.join(steps)}")
        lines.append(f"    reads  {_listed(read)}")
        lines.append(f"    writes {_listed(written)}")
        if kernel.left:
            lines.append(f"    sums   {', '.join(b.name for _, b in kernel.left)}, small")
    if program.name == "forward":
        lines += _saved(module, program, entry)
    return lines, total


def _copies(module: Module, program: Program) -> list[str]:
    """What is copied so that axes lie as one that a step sees as one, in passes not counted."""
    bound, entry = module.bound, make_entry(program, module.signature)
    size = {b.name: bytes_of(b, entry, bound) for b in entry.arguments}
    lines = []
    is_plain = list(module.order) == sorted(module.order)
    if is_plain and list(module.order_of_x) != sorted(module.order_of_x):
        x = entry.arguments[0].name
        lines.append(f"  copies {x} {_bytes(size[x])} into contiguous memory first")
    if bound.order_of_result(module.order) is None:
        step = next(s.text for s in reversed(bound.chain.steps) if s.is_view)
        lines.append(f"  copies out {_bytes(size['out'])} into contiguous memory, for {step}")
    return lines


def _steps(kernel: Kernel) -> list[str]:
    """The steps whose result, or whose cotangent, a kernel computes."""
    roots = [e for _, e in kernel.stores]
    reductions = [r for stage in kernel.stages for r in stage]
    roots += [e for r in reductions for e in (r.value, r.index) if e is not None]
    roots += [value for pairs in kernel.held for _, value in pairs]
    roots += [value for *_, value in kernel.ends]
    if kernel.family != "finalise":  # whose terms another kernel has computed
        roots += [r.value for r, _ in kernel.left]
    own = {leaf for r in reductions for _, leaf in r.results}
    inside = {n for n in ir.topological(roots) if n.op not in ("input", "const")} | own
    return list(dict.fromkeys(m.comment for m in kernel.marks if m.node in inside))


def _saved(module: Module, program: Program, entry: Entry) -> list[str]:
    """What the backward reads of the forward; the rest it computes again."""
    if len(module.programs) < 2:
        return []
    backward = module.programs[1]
    wanted = set(backward.input_names)
    buffers = {b.name: b for b in entry.arguments}
    results = [program.output_names[i] for i in program.results]
    own = {n: bytes_of(buffers[n], entry, module.bound) for n in program.output_names}
    saved = {n: size for n, size in own.items() if n in wanted and n not in results}
    lines = [f"  saves  {_listed(saved)}"] if saved else []
    again = [n for n in (*program.input_names, *results) if n in wanted]
    kept = {n: bytes_of(buffers[n], entry, module.bound) for n in again}
    # Of an input that is read at one place, all is kept.
    for name, places in zip(program.input_names, program.places, strict=False):
        if name in kept:
            kept[name] *= math.prod(module.bound.domain[a] for a, _ in places)
    lines.append(f"  keeps  {_listed(kept)}" if kept else "  keeps  none of its inputs")
    inside = {n for n in ir.topological(backward.graph.roots) if n.op not in ("input", "const")}
    steps = {m.comment for m in program.marks}
    recomputed = dict.fromkeys(
        m.comment for m in backward.marks if m.comment in steps and m.node in inside
    )
    if recomputed:
        lines.append(f"  recomputes in the backward: {' | '.join(recomputed)}")
    return lines


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_bytes(size)}" for name, size in sizes.items()) or "nothing"


def _bytes(count: float) -> str:
    units: Iterable[tuple[str, float]] = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    for unit, size in units:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{math.floor(count)} B"


def _limit(count: float, bandwidth: float) -> str:
    return f"at least {count / bandwidth / 1e3:.3g} us"
