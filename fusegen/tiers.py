"""Tiers: how many elements of its row a thread holds in registers, by the length of the row.

A kernel whose elements are needed again after a reduction over them keeps them on the chip, so that
memory is read once. How many a thread holds, and in packs of how many neighbours they come, is
fixed when the kernel is compiled; the tiers are few so that a new shape seldom needs a new build.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fusegen.shortshares import SHORT, light_share, short_shares
from fusegen.target import PACK_BYTES


class _Rows(NamedTuple):
    """Rows of up to so many elements: how many a thread holds, the same where it adds up columns
    too, threads a block, and what a Tier has of light kernels.
    """

    longest: int
    elements: int
    summing_elements: int
    threads: int
    light_elements: int = 0
    resident: int = 0


# Measured on an H200: forward kernels gain from fewer and longer shares, as long as enough blocks
# are there at once to wait for each other; sums by column from more threads.
_ROWS = (
    _Rows(512, 16, 8, 256),
    _Rows(768, 24, 8, 256),
    _Rows(896, 28, 8, 256),
    _Rows(4096, 16, 8, 512),
    _Rows(8192, 16, 8, 1024, 32, 768),
    _Rows(8192, 16, 16, 512, 32, 768),
    _Rows(16384, 32, 8, 512),
)
_ROWS_OF_SEVERAL = (  # of two and more tensors
    _Rows(512, 16, 8, 256),
    _Rows(768, 24, 8, 256, 12, 1024),
    _Rows(768, 16, 8, 512, 12, 1024),
    _Rows(4096, 16, 8, 512, 16, 768),
    _Rows(8192, 16, 8, 1024),
    _Rows(8192, 16, 16, 512),
    _Rows(16384, 32, 8, 512),
)
_NARROW_ROWS = (  # elements of two bytes
    _Rows(512, 16, 8, 256),
    _Rows(4096, 32, 16, 256, 32, 1536),
    _Rows(8192, 32, 16, 512, 32, 1536),
    _Rows(12288, 32, 24, 512, 32, 1536),
    _Rows(16384, 32, 32, 512, 32, 1536),
    _Rows(16384, 32, 16, 512, 32, 1536),
)
_NARROW_ROWS_OF_SEVERAL = (
    _Rows(512, 16, 8, 256),
    _Rows(1024, 32, 16, 256, 32, 1024),
    _Rows(4096, 16, 16, 256, 32, 1024),
    _Rows(8192, 32, 16, 512, 32, 1024),
    _Rows(16384, 32, 16, 512, 32, 1024),
)
_SINGLE_ROWS = (  # where neighbours come one by one
    _Rows(128, 8, 8, 256, 8, 1280),
    _Rows(2048, 16, 8, 256, 20, 768),
    _Rows(4096, 16, 8, 512, 20, 768),
    _Rows(8192, 16, 8, 1024, 22, 768),
    _Rows(8192, 16, 16, 512, 22, 768),
    _Rows(16384, 32, 8, 512),
)
# Where rows begin anywhere, what is taken one by one at their edges takes registers too.
_SHIFTED_ROWS = (
    *_ROWS[:2],
    _Rows(4096, 16, 8, 512),
    _Rows(8192, 16, 16, 512, 32, 768),
    _Rows(16384, 32, 8, 448, 40, 896),
)
_SHIFTED_ROWS_OF_SEVERAL = (
    *_ROWS_OF_SEVERAL[:4],
    _Rows(8192, 16, 16, 512),
    _Rows(16384, 32, 8, 448, 40, 896),
)
_SHIFTED_NARROW_ROWS = tuple(r._replace(resident=min(r.resident, 1024)) for r in _NARROW_ROWS)
_TABLES = {  # by whether rows begin anywhere, elements have two bytes, and tensors are several
    (False, False, False): _ROWS,
    (False, False, True): _ROWS_OF_SEVERAL,
    (False, True, False): _NARROW_ROWS,
    (False, True, True): _NARROW_ROWS_OF_SEVERAL,
    (True, False, False): _SHIFTED_ROWS,
    (True, False, True): _SHIFTED_ROWS_OF_SEVERAL,
    (True, True, False): _SHIFTED_NARROW_ROWS,
    (True, True, True): _NARROW_ROWS_OF_SEVERAL,
}
# Rows of two bytes up to so long, whose threads hold so many elements: of a row of 768 a quarter of
# those would be none.
_LONGEST_EVEN, _LONG_SHARE, _WARP = 4096, 32, 32
_TEAM_ELEMENTS, _TEAM_THREADS = 16, 512  # of a block that has a share of a row
_NARROW_TEAM_ELEMENTS = 32
# The same where rows begin anywhere, by the size of the widest element, and length.
_SHIFTED_SHARES = {
    2: ((4 * 24 * 512, 24, 512), (1 << 30, 16, 512)),
    4: ((1 << 30, 12, 448),),
}
# The same of rows that fall into stretches, which gain from smaller blocks, and from longer shares
# where a team would have too many of those.
_STRETCHED_SHARES = {
    2: ((1 << 17, 32, 256), (1 << 30, 48, 256)),
    4: ((1 << 16, 16, 256), (1 << 18, 24, 256), (1 << 30, 32, 256)),
    8: ((1 << 30, 16, 256),),
}
ANY_LENGTH = 1 << 30
MOST_BLOCKS = 160  # of a team
WORDS = 64  # registers of a thread for what it holds, half of what 512 threads may have
_SUM_BYTES, USUAL_SUMS = 4, 16  # of a sum by column, and how many a thread has where few fit
_MOST_DEAR = 24  # sums by column of a thread, beside what it computes of a row and keeps
_FEW_WORDS = 16  # of a thread that has 1,023 beside it, and as many sums to keep
MOST_SHARED_BYTES = 156 << 10  # of a block, beside its fixed share, where a device has as many
_STRETCH_BYTES = 24 << 10  # of those, for sums of stretches
_MOST_LONG_SUMS = 4  # of stretches no shorter than a block's share, of one kernel
# Of rows whose packs begin somewhere behind them; shorter ones are mostly edges.
_LEAST_SHIFTED, _LEAST_SHIFTED_NARROW = 128, 96
# More than two sums of each column do not fit in registers: rows of two bytes up to so long have a
# pack a thread then.
_LONGEST_ADDED, MANY_LANES = 4096, 8
_FEW_LANES = 4  # packs of so many, and doubles, are as fast where each row begins with one
# Rows up to so long of single elements are moved by way of shared memory, as a block's whole; and
# packs of two, which gain less than they cost there.
LONGEST_STAGED, _PAIRS = 128, 2
LEAST_STRETCH = 64  # elements; neighbouring packs lie in two stretches at most


@dataclass(frozen=True)
class Tier:
    """How rows are held on the chip: elements a thread, fewer where it adds up columns too, in
    packs of so many neighbours; threads a block at most; and the longest row, for which a team of
    blocks may be needed. has_stretches says that rows fall into stretches of equal length, and not
    too short ones: what tensors and gradients have one value of, such as the channels of a group;
    has_whole_stretches that they are whole packs long; has_long_stretches that a block's share lies
    in two of them at most; stretch_threads is how many threads add one up. holds_derivatives says
    that rows are held for gradients too, and not gone over twice; derivative_elements is how many a
    thread holds there, where they are not as many.
    Forward kernels that hold little are light: light_elements a thread, and so many threads
    resident, which is how many a multiprocessor is to have at once; 0 where there are none such.
    is_shifted says that rows are not whole packs long, so that packs begin somewhere behind their
    row's start. Rows are longer than shortest. is_alone says that each thread has strided rows to
    itself, all as long as the longest; is_whole that of the threads which share strided rows each
    has as many packs as it can hold. is_full says that blocks are as large as can be, for long
    rows, with no room for sums by column; forward and derivative are such tiers of forward kernels
    and of gradients, where there are. is_longest says that no others hold such rows: blocks of this
    tier's own shares would be too many for a team. asks_again says that forward kernels ask for
    what some rows share at each of them. at_use names what is neither sent ahead nor held as rows
    are: noise that is drawn where it is used, and what is wanted only behind a row's reductions.
    asked is how many packs of each tensor a thread asks for as their row begins, where shared
    memory has no room for more of it than the others. alike says by how many neighbours all have
    the same of what varies along a row, but not along all of it. is_streamed says that rows of any
    length are read turn by turn, of so many elements a thread, and not held. room is how many bytes
    of shared memory a block may have.
    """

    elements: int
    summing_elements: int
    lanes: int
    threads: int
    longest: int
    has_stretches: bool = False
    has_whole_stretches: bool = False
    has_long_stretches: bool = False
    stretch_threads: int = 32
    holds_derivatives: bool = True
    derivative_elements: int = 0
    light_elements: int = 0
    resident: int = 0
    is_shifted: bool = False
    shortest: int = 0
    is_alone: bool = False
    is_whole: bool = False
    is_full: bool = False
    is_longest: bool = False
    forward: Tier | None = None
    derivative: Tier | None = None
    asks_again: bool = False
    at_use: tuple[str, ...] = ()
    asked: int = 0
    alike: int = 1
    is_streamed: bool = False
    room: int = 2 * MOST_SHARED_BYTES

    @property
    def for_forward(self) -> Tier:
        """The tier of forward kernels."""
        return self.forward or self

    @property
    def for_derivatives(self) -> Tier:
        """The tier of gradients, which hold more of each element."""
        elements = self.derivative_elements or self.elements
        fewer = replace(self, elements=elements, resident=0, asks_again=False)
        return self.derivative or fewer

    @property
    def is_shared(self) -> bool:
        """Whether several blocks share a row in every kernel."""
        return self.longest == ANY_LENGTH

    @property
    def may_be_shared(self) -> bool:
        """Whether several blocks may share a row in kernels that add up for a gradient."""
        return self.summing_elements * self.threads < self.longest

    @property
    def keeps_alike(self) -> bool:
        """Whether a block can be given rows of which each has as many before it, by a multiple of
        anything, and add them up.
        """
        return not (self.is_shifted or self.may_be_shared)

    def most_stretches(self, width: int) -> int:
        """How many sums of stretches, of `width` bytes each, a block has room for."""
        if self.has_long_stretches:
            return _MOST_LONG_SUMS
        pairs = self.summing_elements // self.lanes * self.threads // 2
        return _STRETCH_BYTES // (max(pairs, 1) * width)

    def has_room_for(self, values: int) -> bool:
        """Whether a thread that has whole rows has registers for so many values of each element."""
        return self.is_alone and values * self.elements <= WORDS

    def most_sums(self, width: int) -> int:
        """How many sums by column, of `width` bytes each, a block has room for."""
        each = self.summing_elements * self.threads * width
        return 0 if self.is_full else min(self.room, MOST_SHARED_BYTES) // each


def lanes_of(length: int, widest: int) -> int:
    """The most neighbours of up to `widest` bytes each in 16 bytes that divide a length."""
    lanes = PACK_BYTES // widest
    while length % lanes:
        lanes //= 2
    return lanes


def row_tier(
    length: int,
    widest: int,
    words: int,
    forward_words: int,
    processors: int,
    *,
    gradients: int = 0,
    has_stretches: bool = False,
    is_dear: bool = False,
    room: int = 2 * MOST_SHARED_BYTES,
    run: int = 0,
) -> Tier | None:
    """The tier of rows that lie together; None where they do not fit on the chip.

    widest is the size of the widest element in bytes, words the registers that one element takes
    in all the tensors of which a row is held, forward_words the same where there are no gradients,
    processors how many a device has. gradients is how many sums by column there are; has_stretches
    says that rows fall into stretches of equal length, and not too short ones; is_dear that
    gradients call functions for each element before they reduce a row. room is how many bytes of
    shared memory a block may have; run is how many elements of a row lie together, if not all.
    """
    kind: dict[str, Any] = {"has_stretches": has_stretches, "is_dear": is_dear, "room": room}
    kind |= {"gradients": gradients}
    sizes = (widest, words, forward_words, processors)
    lanes, whole = lanes_of(run or length, widest), PACK_BYTES // widest
    least = _LEAST_SHIFTED_NARROW if widest <= 2 else _LEAST_SHIFTED * lanes
    is_apt = widest <= 4 and lanes < _FEW_LANES and lanes < whole and not has_stretches
    if is_apt and length >= least:
        tier = _tier_of(length, whole, *sizes, is_shifted=True, **kind)
        if tier is not None:
            return tier
    is_paired = lanes == _PAIRS < whole and length <= LONGEST_STAGED and not has_stretches
    return _tier_of(length, 1 if is_paired else lanes, *sizes, **kind)


def _tier_of(
    length: int,
    lanes: int,
    widest: int,
    words: int,
    forward_words: int,
    processors: int,
    *,
    gradients: int,
    has_stretches: bool = False,
    is_shifted: bool = False,
    is_dear: bool = False,
    room: int,
) -> Tier | None:
    """The tier of rows whose packs have so many elements, in packs of so many lanes."""
    # Single elements need an address each.
    most = WORDS // 2 if lanes == 1 else WORDS
    is_narrow = widest <= 2
    table = _SINGLE_ROWS if lanes == 1 else _TABLES[is_shifted, is_narrow, forward_words > 1]
    kind: dict[str, Any] = {"has_stretches": has_stretches, "is_shifted": is_shifted, "room": room}
    longest_team = most_blocks(processors, lanes if is_shifted else 1)
    shortest = 0
    span = length // lanes * lanes  # in packs, at most
    for row in table:
        if row.longest < span:
            shortest = row.longest
            continue
        longest, elements, summing, threads, *light = row
        if gradients > 2 and is_narrow and lanes == MANY_LANES and SHORT < span <= _LONGEST_ADDED:
            summing, threads = lanes, 256 if span <= 256 * lanes else 512
            longest = summing * threads
        is_apart = is_narrow and (lanes > 1 or longest <= SHORT)
        held_words = forward_words if is_apart else words
        if longest <= SHORT and not has_stretches:
            each = most // held_words, most // words
            elements, summing = short_shares(
                length, lanes, each, is_narrow=is_narrow, is_shifted=is_shifted
            )
            size, is_several = (length, lanes, widest, elements), forward_words > 1
            lighter = light_share(*size, each[0], is_several=is_several, is_shifted=is_shifted)
            light = [elements, *light[1:]] if lighter is None else [*lighter]
        fits = elements * held_words <= most
        fits = fits and summing * words <= (most if threads <= 512 else _FEW_WORDS)
        fits = fits and not (is_dear and summing > _MOST_DEAR)
        # With wider shares, sums of two tensors would not be added up with their rows at all.
        two_sums = 2 * _SUM_BYTES * summing * threads
        fits = fits and (summing <= USUAL_SUMS or two_sums <= min(room, MOST_SHARED_BYTES))
        if not fits or (is_shifted and length > summing * threads * longest_team):
            continue
        if is_narrow and lanes == MANY_LANES and not (is_shifted or has_stretches):
            elements, light = (
                _even(span, elements),
                [*(_even(span, e) for e in light[:1]), *light[1:]],
            )
        # Three tensors in shares take longer than two passes over memory.
        is_held = not is_narrow or words < 3 or length <= summing * threads
        fewer = elements if elements * words <= most else summing
        light_elements, resident = light if light[1:] and not has_stretches else (0, 0)
        return Tier(
            *(elements, summing, lanes, threads, longest),
            holds_derivatives=is_held,
            derivative_elements=fewer,
            light_elements=light_elements,
            resident=resident,
            shortest=shortest,
            **kind,
        )
    # Many tensors, wide elements or long rows: shares for a team of blocks.
    whole = _NARROW_TEAM_ELEMENTS if is_narrow and lanes > 1 else _TEAM_ELEMENTS
    elements, threads = whole, _TEAM_THREADS
    by_width = _SHIFTED_SHARES if is_shifted else _STRETCHED_SHARES
    if is_shifted or (has_stretches and lanes > 1):
        found = (s for s in by_width[max(widest, 2)] if length <= s[0])
        _, elements, threads = next(found)
    # Gradients of stretches are not added up in shares, nor in one block where they do not fit.
    held_words, fitting = forward_words if has_stretches else words, min(2 * whole, most)
    while elements * held_words > fitting and elements > lanes:
        elements = elements - lanes if is_shifted else elements // 2
    summing = elements if has_stretches else max(min(elements, whole // 2), lanes)
    blocks = -(-length // (summing * threads))
    is_longest = blocks > longest_team
    may_be = not is_longest or (lanes > 1 and not is_shifted and not has_stretches)
    if elements * held_words > most or not may_be:
        return None
    if blocks <= 1:
        is_held = elements * words <= fitting
        longest = summing * threads
        return Tier(elements, summing, lanes, threads, longest, holds_derivatives=is_held, **kind)
    kind |= {"shortest": shortest, "is_longest": is_longest}
    return Tier(elements, summing, lanes, threads, ANY_LENGTH, **kind)


def _even(span: int, elements: int) -> int:
    """How many elements of a row a thread holds: fewer than these by a quarter where whole warps
    then have less without work by a seventh.
    """
    fewer = _LONG_SHARE * 3 // 4
    taken, otherwise = (-(-span // (each * _WARP)) * each for each in (fewer, elements))
    is_apt = elements == _LONG_SHARE and SHORT < span <= _LONGEST_EVEN
    return fewer if is_apt and 7 * taken <= 6 * otherwise else elements


def most_blocks(processors: int, teams: int) -> int:
    """How many blocks may share a row where a device is to have so many teams at least: as many as
    there are lanes, where rows begin anywhere, have rows that begin alike, each its own. Longer
    teams would have most processors in one, and the rest without work.
    """
    return min(processors, MOST_BLOCKS) // teams
