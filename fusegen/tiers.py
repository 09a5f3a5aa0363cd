"""Tiers: how many elements of its row a thread holds in registers, by the length of the row.

A kernel whose elements are needed again after a reduction over them keeps them on the chip, so that
memory is read once. How many a thread holds, and in packs of how many neighbours they come, is
fixed when the kernel is compiled; the tiers are few so that a new shape seldom needs a new build.
"""

from __future__ import annotations

from dataclasses import dataclass

# (elements a thread, threads a block), for rows that lie together
_ROWS = ((8, 256), (16, 512), (32, 512))
# (packs a thread, threads along the row), for strided rows; more along leave fewer side by side
_COLUMNS = ((4, 32), (8, 128))
_THREADS = 512
_WORDS = 64  # registers of a thread for what it holds, half of what 512 threads may have
_PACK_WORDS = 4
LARGEST_CLUSTER = 16  # blocks; more than 8 must be asked for


@dataclass(frozen=True)
class Tier:
    """How rows are held on the chip: elements a thread, in packs of so many neighbours; threads a
    block at most; and whether a row takes several blocks.
    """

    elements: int
    lanes: int
    threads: int
    is_clustered: bool = False


def lanes_of(length: int, widest: int) -> int:
    """The most neighbours of up to `widest` bytes each in 16 bytes that divide a length."""
    lanes = 16 // widest
    while length % lanes:
        lanes //= 2
    return lanes


def row_tier(length: int, widest: int, words: int, *, has_clusters: bool) -> Tier | None:
    """The tier of rows that lie together; None where they do not fit on the chip.

    widest is the size of the widest element in bytes, words the registers that one element takes
    in all the tensors of which a row is held.
    """
    lanes = lanes_of(length, widest)
    # Single elements need an address each.
    most = max(_WORDS // (2 if lanes == 1 else 1) // words, _ROWS[0][0])
    fitting = [row for row in _ROWS if row[0] <= most]
    for elements, threads in fitting:
        if length <= elements * threads:
            return Tier(elements, lanes, threads)
    elements, _ = fitting[-1]
    if has_clusters and length <= elements * _THREADS * LARGEST_CLUSTER:
        return Tier(elements, lanes, _THREADS, is_clustered=True)
    return None


def column_tier(length: int, behind: int, widest: int, words: int) -> Tier | None:
    """The tier of strided rows, of which neighbours lie `behind` each other in memory."""
    lanes = min(lanes_of(behind, widest), _PACK_WORDS)
    for packs, along in _COLUMNS:
        while lanes > 1 and packs * lanes * words > _WORDS:
            lanes //= 2
        if length <= packs * along:
            return Tier(packs * lanes, lanes, _THREADS)
    return None
