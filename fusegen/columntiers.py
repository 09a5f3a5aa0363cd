"""Tiers of strided rows: how much of one a thread holds, and when it has whole ones."""

from __future__ import annotations

from fusegen.tiers import WORDS, Tier, lanes_of

# (packs a thread, the same for gradients, longest row, threads a block), for strided rows; more
# threads along a row leave fewer side by side
_COLUMNS = ((8, 4, 128, 256), (4, 4, 128, 256), (8, 8, 512, 512), (8, 8, 1024, 512))
# Of two bytes, packs take half as many registers, and merging rows takes longest: a thread has
# more of each, where it has little beside.
_NARROW_COLUMNS = ((8, 8, 64, 256), (16, 8, 128, 256), (16, 8, 512, 512), (8, 8, 1024, 512))
# Where neighbours come one by one, more packs are in flight, as far as registers allow; and as many
# threads as leave the most side by side.
_SINGLE_COLUMNS = (
    (16, 16, 128, 256),
    (8, 8, 128, 256),
    (4, 4, 128, 512),
    (16, 16, 192, 384),
    (16, 16, 256, 512),
    (16, 16, 384, 384),
    (16, 16, 512, 512),
    (8, 8, 512, 512),
    (16, 16, 768, 384),
    (16, 16, 1024, 512),
    (8, 8, 1024, 512),
    (4, 4, 512, 512),
)
_SINGLE_WORDS = 32
# Longer rows have few threads beside each other: those of which nothing is used again are summed up
# by threads that stay in their columns.
LONGEST_REDUCED = 512
# Elements of a thread that has whole rows, the registers they may take, and threads a block.
MOST_ALONE, _ALONE_WORDS, _ALONE_THREADS = 24, 48, 128
# For up to so many registers of what such a thread holds and adds up, so many are resident; sums
# that take more are in shared memory.
_RESIDENT_ALONE = ((64, 512), (85, 384), (1 << 30, 256))
MOST_ADDED_ALONE = 48
_MOST_LANES = 4


def resident_alone(words: float) -> int:
    """How many threads that have whole rows a multiprocessor is to have, by the registers that one
    takes for what it holds and adds up.
    """
    return next(resident for most, resident in _RESIDENT_ALONE if words <= most)


def column_tier(
    length: int, behind: int, widest: int, words: int, *, holds_little: bool
) -> Tier | None:
    """The tier of strided rows, of which neighbours lie `behind` each other in memory.

    widest is the size of the widest element in bytes, words the registers that one element takes
    in all the tensors of which a row is held. holds_little says that a thread has nearly nothing
    beside those.
    """
    lanes = lanes_of(behind, widest)
    if 0 < length <= MOST_ALONE and length * words <= _ALONE_WORDS:
        while length * lanes > MOST_ALONE or length * lanes * words > _ALONE_WORDS:
            lanes //= 2
        elements = length * lanes
        sizes = (elements, elements, lanes, _ALONE_THREADS, length)
        return Tier(*sizes, derivative_elements=elements, is_alone=True)
    lanes = min(lanes, _MOST_LANES)
    is_single, is_narrow = lanes == 1, lanes > 1 and widest <= 2 and holds_little
    most = 2 * WORDS if is_narrow else WORDS
    table = _NARROW_COLUMNS if is_narrow else _SINGLE_COLUMNS if is_single else _COLUMNS
    for packs, fewer, longest, threads in table:
        if fewer < packs and packs * lanes * words > most:
            continue
        while lanes > 1 and packs * lanes * words > most:
            lanes //= 2
        fits = not is_single or packs * words <= _SINGLE_WORDS
        if length <= longest and fits:
            sizes = (packs * lanes, fewer * lanes, lanes, threads, longest)
            is_whole = length > 0 and length % packs == 0 == length % fewer
            return Tier(*sizes, derivative_elements=fewer * lanes, is_whole=is_whole)
    return None
