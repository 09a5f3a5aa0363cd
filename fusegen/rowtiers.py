"""Row tiers: how the programs of a module hold rows along given axes on the chip.

What a forward program wants only behind a row's reductions is read where it is used, if the rest of
the row then fits into a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.bound import Bound
from fusegen.columntiers import column_tier
from fusegen.emission import make_entry
from fusegen.kernel import Kernel
from fusegen.longrows import (
    RowsToHold,
    adds_columns,
    derivative_tier,
    full_tier,
    has_moments,
    shared_tier,
)
from fusegen.program import Program
from fusegen.rowfacts import (
    alike_of,
    asked_again,
    calls_functions,
    holds_little,
    reads_floats,
    stretch_of,
    summed_over_rows,
    widest_of,
    words_of,
)
from fusegen.shortruns import lie_together
from fusegen.signature import Rows, Signature
from fusegen.streaming import may_stream
from fusegen.summedrows import adding_derivative, adding_tier
from fusegen.target import PACK_BYTES, Limits
from fusegen.tiers import LEAST_STRETCH, MANY_LANES, Tier, row_tier

_FIXED_BYTES = 7 << 10  # of a block's shared memory, of a size known to the compiler
_NARROW_BYTES, _FLOAT_BYTES = 2, 4
_LEAST_PACK_BYTES = 8
# Noise is drawn where it is used in packs of so many elements at least, of rows up to so long:
# beside longer shares of them a hash has no registers.
_DRAWN, _LONGEST_DRAWN = 4, 8192
_WARP = 32
# Rows of one tensor of two bytes, where a thread holds so many elements and a multiprocessor has so
# many threads: rms_norm over 128 takes 1.03 copies on an H200 where shares of 32 take 1.05.
_SHORT_ROWS, _SHORT_SHARE, _SHORT_RESIDENT = (64, 128, 256), 16, 1024

# Rows that are read turn by turn are longer than this, so many for each multiprocessor. Packs of
# a thread's turn, and threads of a multiprocessor, by the bytes of the widest element, and whether
# rows are so many that blocks of few turns keep it at work. Measured on an H200: cross entropy over
# 9,000 to 50,257 in bf16 takes 0.61 to 0.70 of a copy, where rows that are held take 0.75 to 1.07;
# over 8,192 and less these are as fast or faster.
_LONGEST_NOT_STREAMED, _FEW_STREAMED, _MANY_STREAMED = 8192, 2, 12
_STREAMED_THREADS = 256
_PACKS_OF_SEVERAL, _RESIDENT_OF_SEVERAL = 4, 1024  # where several tensors vary along a row
_STREAMED: Mapping[tuple[int, bool], tuple[int, int]] = {
    (2, True): (2, 2048),
    (2, False): (4, 1024),
    (4, True): (3, 1280),
    (4, False): (3, 1280),
}


def held_tier(
    axes: ir.Extent,
    programs: Sequence[Program],
    dtypes: Mapping[str, str],
    bound: Bound,
    order: Sequence[int],
    limits: Limits,
    *,
    is_left: bool = False,
    run: int = 0,
) -> Tier | None:
    """How rows along these axes are held on the chip, in the first program and the others.

    order lists the axes of all rows together, outermost in memory first; is_left says that they are
    of what reductions leave, in floats or doubles; run is how many elements lie together where rows
    are dealt out, else 0. A forward's noise is drawn where it is used, if it can be.
    """
    facts = (dtypes, bound, order, limits)
    tier = _tier_of(axes, programs, *facts, is_left=is_left, run=run)
    own = [p for p in programs if p.name == "forward"]
    length = math.prod(bound.domain[a] for a in axes)
    is_together = set(order[-len(axes) :]) == axes and length <= _LONGEST_DRAWN
    noise = {ir.name_of(i) for p in own for i in p.graph.inputs if i.kind == "noise"}
    if tier is None or not (noise and is_together):
        return tier
    drawn = _tier_of(axes, own, *facts, is_left=is_left, run=run, at_use=tuple(sorted(noise)))
    if drawn is None or drawn.lanes < _DRAWN or drawn.is_shifted:
        return tier
    return replace(tier, forward=drawn.for_forward)


def _tier_of(
    axes: ir.Extent,
    programs: Sequence[Program],
    dtypes: Mapping[str, str],
    bound: Bound,
    order: Sequence[int],
    limits: Limits,
    *,
    is_left: bool = False,
    run: int = 0,
    at_use: tuple[str, ...] = (),
) -> Tier | None:
    """The tier of these programs, where at_use takes no part in rows."""
    room = limits.shared_bytes - _FIXED_BYTES
    domain = frozenset(order)
    length = math.prod(bound.domain[a] for a in axes)
    # Noise is in no memory; but of long rows it takes as much of shared memory as floats do.
    is_short = set(order[-len(axes) :]) == axes and length <= _LONGEST_DRAWN
    leaves = [i for p in programs for i in p.graph.inputs if i.kind == "noise" and is_short]
    apart = {*at_use, *map(ir.name_of, leaves)}
    widest = max(widest_of(p, axes, dtypes, domain, at_use=apart) for p in programs)
    widest = max(widest, _FLOAT_BYTES) if is_left else widest
    words = [words_of(p, axes, dtypes, at_use=at_use) for p in programs]
    if set(order[-len(axes) :]) != axes:
        inner = max(order.index(a) for a in axes)
        behind = math.prod(bound.domain[a] for a in order[inner + 1 :])
        is_little = holds_little(programs, axes)
        columns = column_tier(length, behind, widest, max(words), holds_little=is_little)
        return columns and replace(columns, room=room)
    forward = [n for n, p in zip(words, programs, strict=True) if p.name == "forward"]
    stretch = stretch_of(programs, axes, bound, order)
    has_stretches = stretch >= LEAST_STRETCH
    each = max(words), max(forward or words)
    asked = asked_again(programs, axes, dtypes, bound)
    is_dear = calls_functions(programs, axes)
    tier = row_tier(
        *(length, widest, each[0], each[1] + asked, limits.processors),
        gradients=max(summed_over_rows(p, axes, bound) for p in programs),
        has_stretches=has_stretches,
        is_dear=is_dear,
        room=room,
        run=run,
    )
    if tier is None:
        return None
    if widest == _NARROW_BYTES and any(p.pieces for p in programs):
        # Beside its sums by column, a thread has what it computes of several pieces.
        tier = replace(tier, summing_elements=min(tier.summing_elements, max(tier.lanes, 4)))
    is_whole = has_stretches and stretch % tier.lanes == 0
    tier = replace(tier, asks_again=asked > 0, has_whole_stretches=is_whole, at_use=at_use)
    tier = replace(tier, alike=alike_of(programs, axes, bound, order))
    own = [p for p in programs if p.name == "forward"]
    others = [p for p in programs if p.name != "forward"]
    rows = RowsToHold(axes, own, length, widest, each[1], limits.processors, may_ask=not run)
    derived = replace(rows, programs=others, tensors=each[0])
    full = full_tier(tier, rows)
    if full is None and any(adds_columns(p, axes) for p in own):
        full = None if tier.is_longest else adding_tier(tier, length, widest, own)
    elif full is None and each[1] == 1 and not any(has_moments(p) for p in own):
        full = _in_short_shares(tier, length, widest)
    if has_stretches:
        # Two passes over memory are faster than teams that add up stretches, but for these.
        may_share = all(reads_floats(p, axes, dtypes) for p in others)
        shared = shared_tier(tier, derived, stretch, is_dear=is_dear) if may_share else None
        is_held = tier.holds_derivatives and not tier.may_be_shared
        return replace(
            tier,
            forward=full or _in_whole_stretches(tier, stretch, widest),
            derivative=shared,
            has_long_stretches=tier.is_shared and stretch >= tier.elements * tier.threads,
            stretch_threads=_power_of_two(stretch // (tier.derivative_elements or tier.elements)),
            holds_derivatives=is_held or shared is not None,
        )
    derivative = derivative_tier(tier, derived)
    if tier.is_longest:
        count = math.prod(bound.domain[a] for a in order) // length
        full, derivative = (_filling(t, rows, count) for t in (full, derivative))
        is_held = derivative is not None
        if run or (full is None if own else not is_held):
            return None
        return replace(tier, forward=full, derivative=derivative, holds_derivatives=is_held)
    if derivative is None and not run and not tier.holds_derivatives:
        derivative = adding_derivative(tier, length, widest, others, axes, limits)
        tier = replace(tier, holds_derivatives=derivative is not None)
    return replace(tier, forward=full, derivative=derivative)


def _filling(tier: Tier | None, rows: RowsToHold, count: int) -> Tier | None:
    """The tier, unless rows are so few that their teams leave a quarter of a device without work:
    then two passes by all of it are faster.
    """
    if tier is None or not tier.is_shared:
        return tier
    blocks = count * -(-rows.length // (tier.elements * tier.threads))
    return tier if 4 * blocks >= 3 * rows.processors else None


def _in_whole_stretches(tier: Tier, stretch: int, widest: int) -> Tier | None:
    """The tier of forward kernels of two bytes in packs half as wide, where that has each of them
    in one stretch. Gradients, which add up stretches, are a tenth slower so.
    """
    half = tier.lanes // 2
    is_apt = widest == _NARROW_BYTES and half * widest >= _LEAST_PACK_BYTES and not tier.is_shared
    if not is_apt or tier.has_whole_stretches or stretch % half:
        return None
    return replace(tier, lanes=half, has_whole_stretches=True)


def _in_short_shares(tier: Tier, length: int, widest: int) -> Tier | None:
    """The tier of short forward rows of one tensor of two bytes that find no means and variances:
    merging those takes so long that a thread is to hold more elements, where there are any.
    """
    is_apt = widest == _NARROW_BYTES and tier.lanes == MANY_LANES and tier.resident > 0
    if not is_apt or tier.has_stretches or length not in _SHORT_ROWS:
        return None
    return replace(tier, light_elements=_SHORT_SHARE, resident=_SHORT_RESIDENT)


def _power_of_two(most: int) -> int:
    """The largest of a warp's parts that is no more."""
    return 1 << min(max(most, 1), _WARP).bit_length() - 1


def holding_less(program: Program, trial: Signature, bound: Bound, limits: Limits) -> Rows:
    """The only rows of a signature, of a forward program: without what they want late, if blocks
    shared them, or had no room for as much of the next, and now each row has its own.
    """
    ((name, rows),) = trial.rows
    tier = rows.tier.for_forward
    if name != "forward" or not (tier.is_shared or tier.asked):
        return rows
    around = [a for a in trial.order if a in rows.domain]
    dtypes = dict(trial.dtypes)
    kernels = make_entry(program, trial).kernels
    late = tuple(sorted({name for k in kernels for name in _wanted_late(k)}))
    if not late:
        return rows
    found = _tier_of(rows.axes, [program], dtypes, bound, around, limits, at_use=late)
    less = found and found.for_forward
    if less is None or not less.is_full or less.is_shared or less.is_shifted:
        return rows
    if less.asked and words_of(program, rows.axes, dtypes, at_use=late) > 1:
        return rows
    return replace(rows, tier=replace(rows.tier, forward=less))


def streamed(
    program: Program,
    plain: Signature,
    along: tuple[ir.Extent, ir.Extent],
    bound: Bound,
    limits: Limits,
) -> Rows | None:
    """The rows along some axes, of what varies along others too, as a forward program reads them
    turn by turn; None where it may not, and where they are short, or too few for a device.
    """
    axes, domain = along
    length = math.prod(bound.domain[a] for a in axes)
    count = math.prod(bound.domain[a] for a in domain - axes)
    is_apt = length > _LONGEST_NOT_STREAMED and count >= _FEW_STREAMED * limits.processors
    if program.name != "forward" or not is_apt or not lie_together(axes, plain.order):
        return None
    widest = max(widest_of(program, axes, dict(plain.dtypes), domain), _NARROW_BYTES)
    if widest > _FLOAT_BYTES:
        return None
    tensors = sum(bool(leaf.extent & axes) for leaf in program.graph.inputs)
    has_many = count >= _MANY_STREAMED * limits.processors
    packs, resident = _STREAMED[widest, has_many]
    if tensors > 1:
        packs, resident = max(1, _PACKS_OF_SEVERAL // tensors), _RESIDENT_OF_SEVERAL
    lanes = PACK_BYTES // widest
    elements, threads = packs * lanes, _STREAMED_THREADS
    tier = Tier(elements, elements, lanes, threads, elements * threads, resident=resident)
    rows = Rows(replace(tier, is_streamed=True), axes, domain)
    entry = make_entry(program, replace(plain, rows=((program.name, rows),)))
    kernels = [k for k in entry.kernels if k.tier is not None]
    return rows if kernels and all(map(may_stream, kernels)) else None


def _wanted_late(kernel: Kernel) -> set[str]:
    """The tensors of whole rows that one stage wants, or what follows the last, but not the
    first.
    """
    if kernel.family != "row" or kernel.sums:
        return set()
    held = (*kernel.held, *((),) * len(kernel.stages))
    stages = [
        [*(r.value for r in stage), *(value for _, value in left)]
        for stage, left in zip(kernel.stages, held, strict=False)
    ]
    first, *others = (set(ir.inputs(e)) for e in (*stages, [value for _, value in kernel.stores]))
    whole = [(i, b) for i, b in kernel.inputs if set(b.extent) == {*kernel.domain, *kernel.reduced}]
    late = [(i, b) for i, b in whole if b.role == "input" and i not in first]
    return {b.name for i, b in late if sum(i in used for used in others) == 1}
