"""Tiers of kernels that read rows and add them up by column: forward ones, such as a norm and a
mean, and gradients of long rows of several tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.longrows import has_moments, waits_twice, widest_extent
from fusegen.program import Program
from fusegen.shortshares import SHORT
from fusegen.target import PACK_BYTES, Limits
from fusegen.tiers import MANY_LANES, USUAL_SUMS, Tier

_WARP, _NARROW_BYTES, _SUM_BYTES = 32, 2, 4
# Of those gradients: elements a thread, threads, and what a block has of its own beside them.
_LONG_SHARE, _LONG_THREADS, _FIXED_BYTES = 32, (384, 512), 1 << 10
# By the bytes of an element, measured on an H200: rows up to so long whose means and variances are
# found, which takes as many instructions however many elements a thread has, have as many of
# these a thread as leave the fewest threads without work.
_SHARES_OF_MOMENTS: Mapping[int, tuple[int, Sequence[int]]] = {
    2: (4096, (32, 24)),
    4: (1024, (16, 12)),
}
# The same of others that have two bytes, instead of as many as usual, where that gives so much
# more of a block's threads work.
_MORE_SUMS, _LEAST_MORE = 24, 1.08


def adding_tier(tier: Tier, length: int, widest: int, programs: Sequence[Program]) -> Tier | None:
    """The tier of these programs' rows that are added up by column, if it is another.

    tier is the one of other rows of that length, widest the size of their widest element in bytes.
    """
    if tier.is_shifted or tier.may_be_shared:
        return None
    longest, shares = _SHARES_OF_MOMENTS.get(widest, (0, ()))
    is_whole = tier.lanes * widest == PACK_BYTES and not tier.has_stretches
    if is_whole and length <= longest and any(has_moments(p) for p in programs):
        return replace(tier, summing_elements=min(shares, key=lambda n: n * _threads(length, n)))
    is_apt = tier.lanes == MANY_LANES and length > SHORT
    if not is_apt or tier.summing_elements != USUAL_SUMS:
        return None
    usual, more = (-(-length // (_WARP * n)) * n for n in (USUAL_SUMS, _MORE_SUMS))
    return replace(tier, summing_elements=_MORE_SUMS) if usual > _LEAST_MORE * more else None


def adding_derivative(
    tier: Tier,
    length: int,
    widest: int,
    programs: Sequence[Program],
    axes: ir.Extent,
    limits: Limits,
) -> Tier | None:
    """The tier of gradients of rows of several tensors of two bytes that are too long for other
    tiers, where shared memory has room for their sums by column beside the next row: two passes
    over memory take half as long again.

    tier is the one of shares for several blocks, widest the size of the widest element in bytes.
    """
    room = limits.shared_bytes - _FIXED_BYTES
    is_whole = tier.lanes == MANY_LANES and not (tier.is_shifted or tier.has_stretches)
    threads = next((n for n in _LONG_THREADS if length <= _LONG_SHARE * n), 0)
    if not (is_whole and widest == _NARROW_BYTES and threads and programs):
        return None
    span = _LONG_SHARE * threads
    if not all(0 < _bytes_of_columns(program, axes) * span <= room for program in programs):
        return None
    held = replace(tier, elements=_LONG_SHARE, summing_elements=_LONG_SHARE, threads=threads)
    held = replace(held, longest=span, holds_derivatives=True, derivative_elements=0)
    return replace(held, resident=0, room=room)


def _bytes_of_columns(program: Program, axes: ir.Extent) -> int:
    """What a column's element of each tensor and its sums take; 0 where there are none of those, or
    where a row's elements leave a thread no registers: with several reductions that wait for each
    other, or several results.
    """
    full = widest_extent(program, axes)
    roots = [root.extent for root in program.graph.roots]
    sums = sum(bool(extent & axes) and extent < full for extent in roots)
    if waits_twice(program, axes) or roots.count(full) > 1:
        return 0
    tensors = sum(leaf.extent == full for leaf in program.graph.inputs)
    return _NARROW_BYTES * tensors + _SUM_BYTES * sums if sums else 0


def _threads(length: int, elements: int) -> int:
    """How many threads a row of so many elements a thread has: a part of a warp, or whole ones."""
    wanted = -(-length // elements)
    return 1 << (wanted - 1).bit_length() if wanted <= _WARP else -(-wanted // _WARP) * _WARP
