"""Shares of short rows: how many elements of one a thread holds, so that none is left without any.

Threads of a warp are to read beside each other, too: where each has a row to itself, an access
takes as many pieces of memory as there are threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.target import PACK_BYTES

SHORT = 512
# Of short rows the shares are to come out even; the first of equals is taken.
_SHARES = {  # by whether rows begin anywhere and have two bytes: elements, and for sums
    (False, False): ((16, 12, 20, 24, 32, 8), (8, 4)),
    (False, True): ((16, 24, 32, 8), (8, 16)),
    (True, False): ((24,), (8,)),
    (True, True): ((32, 16, 24, 8), (8, 16)),
}
# The same of light kernels whose packs are whole: elements, and threads resident; by whether they
# have two bytes, and tensors are several. Registers allow no more threads.
_LIGHT = {
    (False, True): {8: 1280, 12: 1024, 16: 768},
    (True, False): {24: 1536, 32: 1280, 40: 1024},
    (True, True): dict.fromkeys((24, 32), 1024),
}
_LEAST_BESIDE = 4  # threads of a row of those: with fewer, an access of a warp has too many rows
# The same of others, where their shares come out as even, by whether they have two bytes. On an
# H100, softmax over 16 floats takes 1.00 copies with two threads a row where one takes 1.28.
_APT_BESIDE = {False: 4, True: 2}
_SINGLE_SHARES = {  # of rows whose elements come one by one, by whether they have two bytes
    False: ((8, 9, 10, 6, 7), (8, 9, 10, 6, 7)),
    True: ((16, 17, 18, 20, 13, 14, 12, 10, 9, 8, 7, 6), (8, 9, 10, 6, 7)),
}
_RESIDENT_NARROW = 1024  # threads of a multiprocessor, of light kernels of those


def short_shares(
    length: int, lanes: int, most: tuple[int, int], *, is_narrow: bool, is_shifted: bool
) -> tuple[int, int]:
    """How many elements of a short row a thread holds, and where it adds up columns too; `most`
    are as many as it has registers for.
    """
    is_single = lanes == 1
    options = _SINGLE_SHARES[is_narrow] if is_single else _SHARES[is_shifted, is_narrow]
    least = 2 * lanes if is_shifted else 1
    apt = 1 if is_single or is_shifted else _APT_BESIDE[is_narrow]
    elements, summing = (
        _fitted(length // lanes * lanes, least, shares, count, apt)
        for shares, count in zip(options, most, strict=True)
    )
    return elements, summing


def light_share(
    length: int,
    lanes: int,
    widest: int,
    elements: int,
    most: int,
    *,
    is_several: bool,
    is_shifted: bool,
) -> tuple[int, int] | None:
    """The same of light kernels, elements of up to `widest` bytes, and how many threads a
    multiprocessor is to have, 0 for no such kernels; None where they hold as many elements as
    others, and have as many threads as those of longer rows.
    """
    is_narrow = widest <= 2
    options = _LIGHT.get((is_narrow, is_several), {})
    if options and lanes * widest == PACK_BYTES and not is_shifted:
        least = _LEAST_BESIDE if is_narrow else 1
        found = _fitted(length, least, tuple(options), most, _APT_BESIDE[is_narrow])
        return found, options.get(found, 0) if found < length else 0
    return (elements, _RESIDENT_NARROW) if lanes == 1 and is_narrow else None


def _fitted(length: int, least: int, shares: Sequence[int], most: int, apt: int) -> int:
    """How many elements a thread holds of a short row, `most` at most: as many as leave the fewest
    threads without any, where a row has a power of two of them, and no fewer than `least`; of
    equals, within a warp, and by as many as are `apt` side by side, two of which there are if they
    can be.
    """

    def idle(elements: int) -> tuple[bool, int, bool, int]:
        sharing = -(-length // elements)
        wanted = max(least, sharing)
        held = elements << (wanted - 1).bit_length()
        return sharing < min(apt, 2), held, wanted > 32, max(0, apt - sharing)

    return min((e for e in shares if e <= most), key=idle, default=most // 8 * 8 or 8)
