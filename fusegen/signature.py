"""Signatures: what a module depends on beyond its programs, from plain data.

The rules are the same for tensors and for a chain of which only the text is known.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fusegen import ir
from fusegen.bound import Bound
from fusegen.lower import GIVEN
from fusegen.program import STATISTIC, Derivative, Program
from fusegen.promotion import NARROW
from fusegen.tiers import Tier
from fusegen.windowing import Slide, Window, size_of


@dataclass(frozen=True)
class Rows:
    """Rows that are held on the chip: how, along which axes, and those of all rows together."""

    tier: Tier
    axes: ir.Extent
    domain: ir.Extent


@dataclass(frozen=True)
class Signature:
    """What a module depends on beyond its programs."""

    target: str
    order: tuple[int, ...]  # axes, outermost in memory first
    dtypes: tuple[tuple[str, str], ...]  # of every input and output by name
    index_bits: int
    in_cache: tuple[str, ...]  # families of rows that are worked on as a whole, where none are held
    rows: tuple[tuple[str, Rows], ...]  # by the name of the program that holds them
    strips: tuple[str, ...] = ()  # the programs whose reductions take short runs far apart
    short_rows: tuple[str, ...] = ()  # the programs of which a line has several rows
    has_columns: bool = False  # whether packs are whole down columns, if elements go down those
    gaps: tuple[tuple[str, str], ...] = ()  # (program, input) where it is dense but for gaps
    is_dealt: bool = False  # whether `order` is that of rows whose runs lie in another
    # (program, axis, how many places) where tensors are worked on in pieces, one for each place.
    unrolled: tuple[tuple[str, int, int], ...] = ()

    def text(self, programs: Sequence[Program]) -> str:
        """A line for the banner."""
        apart = {name for _, name in self.gaps}
        kinds = ", ".join(f"{n} {t}{' with gaps' * (n in apart)}" for n, t in self.dtypes)
        return f"{'+'.join(p.name for p in programs)}: {kinds}; {self.index_bits}-bit offsets"


def with_gaps(plain: Signature, programs: Iterable[Program], names: Container[str]) -> Signature:
    """The signature where inputs of these names are dense but for gaps, as far as programs read
    such where they lie.
    """
    programs = [p for p in programs if reads_gaps(plain, p)]
    gaps = [(p.name, name) for p in programs for name in p.input_names if name in names]
    return replace(plain, gaps=tuple(gaps))


def reads_gaps(built_with: Signature, program: Program) -> bool:
    """Whether a program's kernels go over gaps: not where they look beside an element, for others
    of its windows, nor where long rows that lie together leave no register for it, nor where they
    are in pieces.
    """
    is_sliding = any(isinstance(w, Slide) for _, w in program.windows)
    is_full = any(r.tier.is_full for name, r in built_with.rows if name == program.name)
    is_in_pieces = any(name == program.name for name, *_ in built_with.unrolled)
    return not (is_sliding or is_in_pieces or (is_full and not built_with.is_dealt))


def index_dtype(windows: Sequence[tuple[int, Window]]) -> str:
    """The smallest element type that holds a position in the window."""
    return "uint8" if math.prod(size_of(window) for _, window in windows) <= 256 else "int32"


def selected_integers(roots: Sequence[ir.Expr]) -> Literal["", "read", "added up"]:
    """Whether integers are selected along an axis, and whether kernels can read all of them at
    their place: where nothing else is reduced, and of those at one place alone that no result has
    beside others of the axis.
    """
    reduced = [n for n in ir.topological(roots) if n.op == "reduce"]
    picks = [n for n in reduced if n.kind == "whole" and min(ir.reduction(n)[1]) < 0]
    if not picks:
        return ""
    along = frozenset[int]().union(*(root.extent for root in roots))
    alone = [n for n in picks if not ir.reduction(n)[1] & along]
    return "read" if len(picks) == len(reduced) and len(alone) < 2 else "added up"


def is_double(programs: Iterable[Program], dtypes: Mapping[str, str]) -> bool:
    """Whether programs over tensors of these types are computed in double precision, as integers
    are, beside no numbers of 16 bits, that kernels find at their place by adding up.
    """
    programs = tuple(programs)
    roots = [root for program in programs for root in program.graph.roots]
    if "float64" in dtypes.values() or any(n.op == "to_float64" for n in ir.topological(roots)):
        return True
    is_narrow = any(dtype in NARROW for dtype in dtypes.values())
    return not is_narrow and any(
        selected_integers(program.graph.roots) == "added up" for program in programs
    )


def result_shapes(bound: Bound) -> dict[str, tuple[int, ...]]:
    """The shape of each result of a forward program, by name."""
    shapes = {"out": bound.result_shape}
    return shapes | {f"{GIVEN}{i}": given.shape for i, given in enumerate(bound.gives, start=1)}


def element_types(program: Program, bound: Bound, input_types: Sequence[str]) -> dict[str, str]:
    """The element type of each tensor of a forward program, by name."""
    types = dict(zip(program.input_names, input_types, strict=True))
    statistic = "float64" if is_double([program], types) else "float32"
    types |= {ir.name_of(i): "noise" for i in program.graph.inputs if i.kind == "noise"}
    types |= {program.output_names[o]: input_types[i] for o, i in program.updates}
    for name in program.output_names:
        if name in types:
            continue
        if name == "out":
            types[name] = bound.dtype
        elif name.startswith(GIVEN):
            types[name] = bound.gives[int(name.removeprefix(GIVEN)) - 1].dtype
        elif name.startswith(STATISTIC):
            types[name] = statistic
        else:
            picked = types.get(name.removeprefix("picked_"))
            picked = "float32" if picked == "noise" else picked
            types[name] = picked or index_dtype(bound.windows)
    return types


def with_derivative(
    program: Program, found: Derivative, dtypes: Mapping[str, str]
) -> dict[str, str]:
    """With the derivative's tensors: a cotangent has the type of what it belongs to."""
    result = dict(dtypes)
    for leaf, (pool, i) in zip(found.program.graph.inputs, found.sources, strict=True):
        name = program.input_names[i] if pool == "input" else program.output_names[i]
        result[ir.name_of(leaf)] = dtypes[name]
    for name, i in zip(found.program.output_names, found.targets, strict=True):
        result[name] = dtypes[program.input_names[i]]
    return result
