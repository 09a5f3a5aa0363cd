"""Long rows, which have blocks as large as can be: one for each, whose shared memory has the next
row on its way; or few that share it, in gradients, and where they meet more than once before a row
is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen import ir
from fusegen.program import Program
from fusegen.target import BRIEF, DEAR
from fusegen.tiers import ANY_LENGTH, Tier, most_blocks

_NARROW_BYTES, _FLOAT_BYTES = 2, 4
_LONGER_THAN = 16384  # elements; shorter rows have blocks of fewer threads
_MOST_THREADS = 1024
_MOST_COMPUTING, _MUCH = 768, 3  # where rows take more registers than 64; of what is dear
# Rows that begin anywhere, share tensors and are longer than this have such blocks as well, of so
# many elements a thread and threads, which keep what some tensors at most have for all rows.
_LONGER_BESIDE, _KEPT, _MOST_KEEPING, _MOST_KEPT = 12288, 16, 832, 2
# Elements of a thread, by the bytes of the widest and how many tensors are held: where a row has a
# block to itself, and where several share it.
_ALONE: Mapping[tuple[int, int], tuple[int, ...]] = {
    (2, 1): (32, 64, 104),
    (2, 2): (32, 56),
    (4, 1): (32, 52),
    (4, 2): (28,),
}
# The same of rows that fall into stretches, of which what tensors have one value takes registers.
_STRETCHED: Mapping[tuple[int, int], tuple[int, ...]] = {(2, 1): (40, 72), (4, 1): (36, 52)}
_SHARED: Mapping[tuple[int, int], int] = {(2, 1): 104, (2, 2): 56, (4, 1): 52, (4, 2): 28}
# Packs of a thread, how many of those it asks for as their row begins, as shared memory has no room
# for as much of the next row, and the same where results have one of each row: in the place of
# several blocks where those would meet twice in a row, or hold two tensors.
_ASKED: Mapping[tuple[int, int], tuple[int, int, int]] = {
    (2, 1): (16, 7, 7),
    (2, 2): (8, 3, 3),
    (4, 1): (16, 6, 5),
    (4, 2): (8, 2, 2),
}
# Of the longest rows, which only such blocks hold, a device has so many at once at least: with one
# or two, most of it waits for them. Measured on an H200: rows of 884,736 and 1,048,576 floats gain,
# a gradient's of 2,097,152 and forward ones of 8,388,608 of two bytes lose.
_LEAST_TEAMS = 3
# Elements of a thread, and threads, of blocks that share rows and add up their stretches, none of
# which is shorter than a share: the first of which there are not too many for a row. Measured on an
# H200 for floats; two passes are faster for two bytes.
_SUMMING = ((16, 256), (16, 128), (16, 64), (8, 64), (16, 512))
_LEAST_LANES = 4  # of packs that are sent ahead whatever their elements are
_EDGE_BYTES = 2 << 10  # of what stands before and behind packs, at most


@dataclass(frozen=True)
class RowsToHold:
    """Rows that programs hold, by which blocks for them are chosen."""

    axes: ir.Extent
    programs: Sequence[Program]
    length: int  # elements of a row
    widest: int  # bytes of the widest element
    tensors: int  # of which rows are held
    processors: int  # of a device
    may_ask: bool = True  # that a thread asks for packs as their row begins

    @property
    def width(self) -> int:
        """Bytes of the widest element, as tables have them."""
        return max(self.widest, _NARROW_BYTES)

    @property
    def is_forward(self) -> bool:
        """Whether a forward program holds them; else they are a gradient's."""
        return self.programs[0].name == "forward"

    @property
    def meets_once(self) -> bool:
        """Whether no reduction waits for another."""
        return all(turns(program) < 2 for program in self.programs)

    @property
    def roots(self) -> list[ir.Expr]:
        """All results."""
        return [root for program in self.programs for root in program.graph.roots]


def full_tier(tier: Tier, rows: RowsToHold) -> Tier | None:
    """The tier of blocks as large as can be, if such rows gain from them; tier is that of smaller
    ones.
    """
    if not rows.programs:
        return None
    if tier.is_shifted and rows.tensors == 1 and _keeps_shared(rows):
        threads = -(-rows.length // (_KEPT * 32)) * 32
        if rows.length > _LONGER_BESIDE and threads <= _MOST_KEEPING:
            return _full(tier, _KEPT, threads, _KEPT * threads)
    is_long = tier.is_shared and rows.length > _LONGER_THAN and tier.lanes > 1
    if not (is_long and _fits(tier, rows)):
        return None
    is_computed = rows.is_forward and not tier.has_stretches and _computes(rows)
    if is_computed and rows.width > _NARROW_BYTES and _shares(rows):
        return None  # beside what rows share, even short shares have no registers
    found = _alone(tier, rows, is_computed=is_computed)
    if found or tier.has_stretches:
        return found
    if is_computed and not any(root.extent & rows.axes for root in rows.roots):
        return None  # what is only read takes two passes
    asking = None if is_computed else _asking(tier, rows)
    return asking or _in_teams(tier, rows, is_computed=is_computed)


def _alone(tier: Tier, rows: RowsToHold, *, is_computed: bool) -> Tier | None:
    """The tier of a block for each row, if one holds it; is_computed says that what is computed of
    elements is kept, for which longer shares have no registers.
    """
    table = _STRETCHED if tier.has_stretches else _ALONE
    for elements in table.get((rows.width, rows.tensors), ())[: 1 if is_computed else None]:
        threads = _threads(tier, rows, elements)
        if rows.length <= elements * threads:
            return _full(tier, elements, threads, elements * threads)
    return None


def _asking(tier: Tier, rows: RowsToHold) -> Tier | None:
    """The same, where its threads ask for some of their packs as their row begins."""
    counts = _ASKED.get((rows.width, rows.tensors))
    is_apt = rows.may_ask and tier.lanes >= _LEAST_LANES
    if counts is None or not is_apt or (rows.tensors == 1 and rows.meets_once):
        return None
    packs, *counted = counts
    asked = counted[any(not root.extent & rows.axes for root in rows.roots)]
    elements = packs * tier.lanes
    threads = _threads(tier, rows, elements - asked * tier.lanes)
    if rows.length > elements * threads:
        return None
    return replace(_full(tier, elements, threads, elements * threads), asked=asked)


def _in_teams(tier: Tier, rows: RowsToHold, *, is_computed: bool) -> Tier | None:
    """The tier of several blocks for each row, if few of them hold it and it gains from that."""
    size = rows.width, rows.tensors
    elements = _ALONE.get(size, (0,))[0] if is_computed else _SHARED.get(size, 0)
    if not elements or (rows.is_forward and rows.meets_once and not tier.is_longest):
        return None
    if tier.is_longest and not (rows.is_forward or rows.meets_once):
        return None  # two passes took 4.0 copies where a gradient whose teams meet twice took 4.4
    threads = _threads(tier, rows, elements)
    if not threads:
        return None
    blocks = -(-rows.length // (elements * threads))
    teams = _LEAST_TEAMS if tier.is_longest else tier.lanes if tier.is_shifted else 1
    has_room = blocks <= most_blocks(rows.processors, teams)
    return _full(tier, elements, threads, ANY_LENGTH) if has_room else None


def derivative_tier(tier: Tier, rows: RowsToHold) -> Tier | None:
    """The tier of gradients of long rows: full_tier's, unless several blocks share a row of two
    tensors of floats that is reduced once, and add up no columns. Their shares are as large as
    where they do, of half as many threads: shared memory has room for three rows, so that one is
    finished a turn after it was added up.
    """
    full = full_tier(tier, rows)
    is_alone = full is not None and full.longest != ANY_LENGTH
    is_apt = tier.is_shared and tier.lanes > 1 and not (tier.is_shifted or tier.is_longest)
    is_apt = is_apt and (rows.widest, rows.tensors) == (_FLOAT_BYTES, 2) and not is_alone
    is_apt = is_apt and bool(rows.programs) and rows.meets_once
    if not is_apt or any(adds_columns(p, rows.axes) for p in rows.programs):
        return full
    elements, threads = 2 * tier.summing_elements, tier.threads // 2
    fewer = replace(tier, elements=elements, summing_elements=elements, threads=threads)
    return replace(fewer, resident=0)


def shared_tier(tier: Tier, rows: RowsToHold, stretch: int, *, is_dear: bool) -> Tier | None:
    """The tier of gradients whose rows are shared by blocks that add up stretches too, where a
    block's share lies in two of them at most; None where two passes over memory are faster.

    tier is the one of rows that lie in stretches, stretch how many elements a stretch has. is_dear
    says that functions are called for each element before a row is reduced.
    """
    is_apt = rows.widest == _FLOAT_BYTES and (tier.may_be_shared or not tier.holds_derivatives)
    is_apt = is_apt and not any(waits_twice(p, rows.axes) for p in rows.programs)
    if not is_apt or tier.lanes == 1 or (is_dear and not tier.has_whole_stretches):
        return None
    for elements, threads in _SUMMING:
        blocks = -(-rows.length // (elements * threads))
        if elements * threads <= stretch and blocks <= most_blocks(rows.processors, 1):
            fewer = replace(tier, elements=elements, summing_elements=elements, threads=threads)
            held = replace(fewer, holds_derivatives=True, derivative_elements=0, resident=0)
            return replace(held, longest=ANY_LENGTH, has_long_stretches=True, asks_again=False)
    return None


def waits_twice(program: Program, axes: ir.Extent) -> bool:
    """Whether a reduction over rows, or over all of them, waits for another over rows."""
    below = set[ir.Expr]()
    for node in ir.topological(program.graph.roots):
        is_over_rows = node.op == "reduce" and ir.reduction(node)[1] >= axes
        waits = not below.isdisjoint(node.args)
        if is_over_rows and waits:
            return True
        if is_over_rows or waits:
            below.add(node)
    return False


def _keeps_shared(rows: RowsToHold) -> bool:
    """Whether these are forward programs of which a thread has room for what rows share, beside its
    elements of a row: packs that begin anywhere would bring it element by element.
    """
    inputs = [leaf.extent for p in rows.programs for leaf in p.graph.inputs]
    shared = [extent for extent in inputs if extent & rows.axes and extent != max(inputs, key=len)]
    is_apt = all(p.name == "forward" and reduced_axes(p) == {rows.axes} for p in rows.programs)
    is_apt = is_apt and not any(n.op in DEAR for n in terms(rows.programs))
    return is_apt and 0 < len(shared) <= _MOST_KEPT and all(e == rows.axes for e in shared)


def _threads(tier: Tier, rows: RowsToHold, elements: int) -> int:
    """Of a block, where shared memory has so many elements for each, of the next row."""
    computes = not tier.has_stretches and _takes_registers(rows)
    room = (tier.room - _EDGE_BYTES) // (elements * rows.tensors * rows.widest)
    return min(_MOST_COMPUTING if computes else _MOST_THREADS, room // 32 * 32)


def _full(tier: Tier, elements: int, threads: int, longest: int) -> Tier:
    full = replace(tier, elements=elements, summing_elements=elements, threads=threads)
    return replace(full, longest=longest, resident=0, is_full=True)


def turns(program: Program) -> int:
    """How many reductions wait for each other."""
    found: dict[ir.Expr, int] = {}
    for node in ir.topological(program.graph.roots):
        before = max((found[a] for a in node.args), default=0)
        found[node] = before + (node.op == "reduce")
    return max(found.values(), default=0)


def _fits(tier: Tier, rows: RowsToHold) -> bool:
    """Whether such a block has room for all that programs do: no sums over rows, and no elements
    that wait for sums of all rows; nothing that rows share, where packs begin anywhere; and of what
    tensors have of stretches, nothing where a pack may lie in two.
    """
    axes = rows.axes
    reduced = [along for p in rows.programs for along in _reduced_of_rows(p, axes)]
    if not reduced or not all(along >= axes for along in reduced):
        return False
    written = [root for root in rows.roots if root.extent & axes]
    if any(n.op == "reduce" and ir.reduction(n)[1] > axes for n in ir.topological(written)):
        return False
    if tier.has_stretches:
        parts = [n.extent & axes for n in terms(rows.programs) if n.op == "input"]
        return tier.has_whole_stretches or not any(frozenset() < part < axes for part in parts)
    is_beside = tier.is_shifted or (not rows.is_forward and bool(_dear(rows)))
    return not (is_beside and _shares(rows))


def _shares(rows: RowsToHold) -> bool:
    """Whether rows share something that varies along them."""
    inputs = (leaf.extent for p in rows.programs for leaf in p.graph.inputs)
    return len({extent for extent in inputs if extent & rows.axes}) > 1


def _computes(rows: RowsToHold) -> bool:
    """Whether more is computed of each element before a reduction than one value that takes few
    registers on its way.
    """
    dear = _dear(rows)
    return len(dear) > 1 or not BRIEF.issuperset(dear)


def _dear(rows: RowsToHold) -> list[str]:
    """What is dear of all that is computed of each element before a reduction."""
    below = terms(rows.programs)
    full = max((n.extent for n in below if n.extent & rows.axes), key=len, default=frozenset())
    return [n.op for n in below if n.extent == full and n.op in DEAR]


def _takes_registers(rows: RowsToHold) -> bool:
    """Whether more than rows and one value of each element stays in registers from turn to turn: in
    gradients what is computed of elements, where that is much, of several results, or of several
    turns, and of several turns sums over all rows beside floats; in forward programs of several
    turns what is computed, beside moments.
    """
    programs, axes = rows.programs, rows.axes
    if rows.is_forward:
        return not rows.meets_once and _computes(rows) and any(map(has_moments, programs))
    if rows.meets_once:
        full = widest_extent(programs[0], axes)
        results = sum(root.extent == full for root in rows.roots)
        return _computes(rows) and (results > 1 or len(_dear(rows)) > _MUCH)
    sums = any(along > axes for p in programs for along in _reduced_of_rows(p, axes))
    return (sums and rows.width > _NARROW_BYTES) or _computes(rows)


def terms(programs: Sequence[Program]) -> list[ir.Expr]:
    """All that is computed before a reduction."""
    nodes = (n for p in programs for n in ir.topological(p.graph.roots))
    return ir.topological(a for n in nodes if n.op == "reduce" for a in n.args)


def reduces_of(program: Program) -> list[ir.Expr]:
    """All reductions."""
    return [n for n in ir.topological(program.graph.roots) if n.op == "reduce"]


def has_moments(program: Program) -> bool:
    """Whether it finds variances."""
    return any(ir.reduction(n)[0] == "variance" for n in reduces_of(program))


def reduced_axes(program: Program) -> set[ir.Extent]:
    """The axes of all reductions."""
    return {ir.reduction(n)[1] for n in reduces_of(program)}


def _reduced_of_rows(program: Program, axes: ir.Extent) -> set[ir.Extent]:
    """The axes of reductions, but for those of what rows along some axes have one of."""
    return {ir.reduction(n)[1] for n in reduces_of(program) if n.args[0].extent & axes}


def adds_columns(program: Program, axes: ir.Extent) -> bool:
    """Whether results vary along rows, but not along all of them together."""
    full = widest_extent(program, axes)
    return any(root.extent & axes and root.extent < full for root in program.graph.roots)


def widest_extent(program: Program, axes: ir.Extent) -> ir.Extent:
    """The extent of the largest values that it reduces, or where it reduces nothing along these
    axes, of the largest tensors that it reads or writes: results may be spread over more.
    """
    found = [*program.graph.inputs, *program.graph.roots]
    if any(along & axes for along in reduced_axes(program)):
        found = [n.args[0] for n in reduces_of(program)]
    return max((expr.extent for expr in found), key=len, default=frozenset())
