"""Tiers of forward kernels that read rows and add them up by column, such as a norm and a mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.program import Program
from fusegen.shortshares import SHORT
from fusegen.target import PACK_BYTES
from fusegen.tiers import MANY_LANES, USUAL_SUMS, Tier

_WARP = 32
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
    if is_whole and length <= longest and any(_has_moments(p) for p in programs):
        return replace(tier, summing_elements=min(shares, key=lambda n: n * _threads(length, n)))
    is_apt = tier.lanes == MANY_LANES and length > SHORT
    if not is_apt or tier.summing_elements != USUAL_SUMS:
        return None
    usual, more = (-(-length // (_WARP * n)) * n for n in (USUAL_SUMS, _MORE_SUMS))
    return replace(tier, summing_elements=_MORE_SUMS) if usual > _LEAST_MORE * more else None


def _has_moments(program: Program) -> bool:
    reduces = [n for n in ir.topological(program.graph.roots) if n.op == "reduce"]
    return any(ir.reduction(n)[0] == "variance" for n in reduces)


def _threads(length: int, elements: int) -> int:
    """How many threads a row of so many elements a thread has: a part of a warp, or whole ones."""
    wanted = -(-length // elements)
    return 1 << (wanted - 1).bit_length() if wanted <= _WARP else -(-wanted // _WARP) * _WARP
