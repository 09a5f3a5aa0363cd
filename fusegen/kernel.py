"""Kernels as data: what one launch loops over, reads, accumulates and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusegen import ir
from fusegen.grouping import Grouping, ordered
from fusegen.ir import Expr, Graph
from fusegen.lower import NEW, Mark
from fusegen.picking import Piece
from fusegen.tiers import Tier

Family = Literal[
    "pointwise",
    "row",
    "column",
    "window",
    "slide",
    "cover",
    "bundle",
    "inner",
    "outer",
    "finalise",
]
Role = Literal["input", "output", "scratch", "position"]


@dataclass(frozen=True)
class Gaps:
    """What tells a tensor's gaps, and the groups that make a run between two, where some do."""

    pitch: str
    run: tuple[int, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: dense, its groups in memory order; strided along windows where it
    varies within them.
    """

    name: str
    dtype: str
    extent: tuple[int, ...]
    role: Role
    gaps: Gaps | None = None  # all of a size, between runs of one length
    at: tuple[tuple[int, int], ...] = ()  # (group, the one index along it, or from its end)
    pieces: int = 1  # how many such there are of it, one behind the other

    @property
    def has_gaps(self) -> bool:
        """Whether it is dense but for gaps."""
        return self.gaps is not None

    @property
    def varying(self) -> tuple[int, ...]:
        """The groups along which it varies as it is read."""
        return tuple(g for g in self.extent if g not in dict(self.at))

    @property
    def is_computed(self) -> bool:
        """Whether it lies nowhere: its values are positions along its groups."""
        return self.role == "position"

    @property
    def is_windowed(self) -> bool:
        """Whether it is addressed through the split of a pooled axis; scratch lies window by
        window.
        """
        return self.role in ("input", "output") and any(g < 0 for g in self.extent)


@dataclass(frozen=True)
class Reduction:
    """One accumulation: its kind, what is accumulated, and the leaf that stands for each result. A
    winner is a max with what is picked where it stands.
    """

    kind: Literal["sum", "moments", "max", "peak", "pick", "winner"]
    value: Expr
    results: tuple[
        tuple[str, Expr], ...
    ]  # (result, leaf): ("mean", ...), ("variance", ...) of moments
    index: Expr | None = None  # where to pick
    picks: tuple[Expr, ...] = ()  # what a winner picks


@dataclass(frozen=True)
class Rescaling:
    """What becomes of sums when a larger number is found than `before`: for each result of those
    that depend on it, a factor.
    """

    largest: Expr
    before: Expr
    factors: tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel: its loop over `domain`, what it reads, accumulates and writes.

    stages are the reductions of one level each, over `reduced`; sums are the reductions that go to
    partials, one array of (kept, slot, column) each, where in a row kernel what sums keep of the
    groups of rows is part of the column; stores are the finished values by buffer. A
    kernel with a tier holds its rows on the chip: held are the values that each stage computes and
    later ones use, stretches the sums over what is alike in `lead`, the first of the groups of a
    row, which go to partials of their own; and placed says at which stage the term of each of its
    sums, and then of its stretches, is known.
    """

    family: Family
    name: str
    domain: tuple[int, ...]
    reduced: tuple[int, ...]
    inputs: tuple[tuple[Expr, Buffer], ...]
    stores: tuple[tuple[Buffer, Expr], ...]
    stages: tuple[tuple[Reduction, ...], ...] = ()
    sums: tuple[tuple[Reduction, Buffer], ...] = ()
    kept: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()  # the groups whose partials lie side by side in each slot
    marks: tuple[Mark, ...] = ()
    tier: Tier | None = None
    held: tuple[tuple[tuple[Expr, Expr], ...], ...] = ()  # (leaf, value) by stage
    placed: tuple[int, ...] = ()
    lead: int | None = None
    stretches: tuple[tuple[Reduction, Buffer], ...] = ()
    # Of strided rows: sums over all of them of what each has once; a partial of each block.
    totals: tuple[tuple[Reduction, Buffer], ...] = ()
    # (store, leaf, what an element becomes of its windows' shares, for whose sum leaf stands)
    ends: tuple[tuple[str, Expr, Expr], ...] = ()
    # In a bundle kernel: the groups of its rows and windows that each stage goes through.
    over: tuple[tuple[int, ...], ...] = ()
    in_place: tuple[tuple[Expr, Expr], ...] = ()  # (leaf, input): what is held where that was read
    flat: tuple[int, ...] = ()  # the groups that the last of the domain stands for,
    is_unpooled: bool = False  # with the places within their windows
    is_from_end: bool = False  # whether blocks start with the last elements, which a cache may have
    is_dealt: bool = False  # whether its rows lie in runs, one of every row after the other
    rescaling: Rescaling | None = None  # of what its second stage adds up, where that can be told

    @property
    def buffers(self) -> list[Buffer]:
        """What it reads and writes, but for partials."""
        return [*(b for _, b in self.inputs), *(b for b, _ in self.stores)]

    @property
    def left(self) -> tuple[tuple[Reduction, Buffer], ...]:
        """What goes to partials."""
        return (*self.sums, *self.stretches, *self.totals)

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read turn by turn, and nothing of them is kept."""
        return self.tier is not None and self.tier.is_streamed

    @property
    def has_gaps(self) -> bool:
        """Whether some tensor has: where it lies takes a division."""
        return any(buffer.has_gaps for buffer in self.buffers)

    @property
    def updated(self) -> set[str]:
        """What lies where something else does: a tensor updated in place, and the new one."""
        new = {buffer.name for buffer, _ in self.stores if buffer.name.startswith(NEW)}
        return new | {name.removeprefix(NEW) for name in new}

    @property
    def only_reads_columns(self) -> bool:
        """Whether strided rows are reduced, and nothing of their size is written or added up."""
        is_written = any(set(buffer.extent) & set(self.reduced) for buffer, _ in self.stores)
        return self.family == "column" and not self.sums and not is_written


@dataclass(frozen=True)
class Entry:
    """One callable of a module: its kernels in launch order, and the tensors it is called with,
    in order. What the operations in `alike` give has to be the same to the last bit in every loop.
    """

    name: str
    kernels: tuple[Kernel, ...]
    arguments: tuple[Buffer, ...]  # inputs, then outputs
    grouping: Grouping
    compute: str
    alike: frozenset[str]
    pieces: tuple[Piece, ...] = ()  # of arguments, as kernels take them
    has_short_rows: bool = False  # whether lines are to have several rows

    @property
    def sizes_type(self) -> str:
        """The struct of its sizes."""
        return f"{self.name.title().replace('_', '')}Sizes"


def input_buffers(
    graph: Graph, dtypes: Mapping[str, str], gaps: Mapping[str, Gaps]
) -> dict[Expr, Buffer]:
    """The buffers of a collapsed graph's inputs, with their gaps, if they have some."""
    named = {leaf: ir.name_of(leaf) for leaf in graph.inputs}
    return {
        leaf: Buffer(name, dtypes[name], ordered(leaf.extent), "input", gaps.get(name))
        for leaf, name in named.items()
    }
