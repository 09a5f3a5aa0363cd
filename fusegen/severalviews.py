"""Several sliding windows, or several elements that they cover, a thread: what they share is read
and computed once, and which positions they have is known when the kernel is compiled.

A slide kernel has them along an innermost group that windows split. A cover kernel has a block of
elements, as long along each pooled group as windows are apart: those have their windows alike.
Along an innermost group that windows split, a block is as long as a pack; along another one,
neighbours go together in packs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from fusegen.indexing import Read
from fusegen.slideviews import SlideView
from fusegen.target import ITEM_BYTES, PACK_BYTES
from fusegen.windowing import Slide

_STRIDES = (1, 2, 4)
_MOST_WINDOWS = 4  # along a line, of a thread: in a slide kernel each has its accumulators
_LARGEST = 27  # elements of a window, or windows of a block, for loops that are unrolled
_MOST_FOUND_AFTER = 9  # elements of a window that are gone through twice
_MANY_SUMS, _MOST_SUMS = 16, 32  # of a thread of a cover kernel, each in a register
_LONGEST = 12  # a line of what is read around a pack


@dataclass(frozen=True)
class Block:
    """A thread's part of a pooled group: so many elements, and the windows from `first` to before
    `past` of the one that begins there, for a slide kernel elements.
    """

    window: int
    group: int
    slide: Slide
    size: int
    first: int
    past: int

    @property
    def windows(self) -> int:
        """How many windows begin among its elements."""
        return self.size // self.slide.stride


class SeveralView(SlideView):
    """A slide or cover kernel in its form for several windows or elements a thread, if it has
    that.
    """

    def is_element(self, read: Read) -> bool:
        """Whether a tensor lies by elements, rather than by windows."""
        return read.buffer.is_windowed

    @cached_property
    def blocks(self) -> list[Block]:
        """A thread's part of each pooled group, innermost last; none where there is no such form.
        Of a slide kernel, that of the innermost alone.
        """
        slides = [self.grouping.slides[-1 - w] for w in self.reduced]
        is_apt = self.target.is_flat and self.goes_by_lines and bool(slides)
        is_apt &= not any(t.buffer.dtype == "noise" or t.buffer.is_computed for t in self.reads)
        is_apt &= all(self.is_element(t) or self.step(t) == 1 for t in self.beside)
        if not is_apt or any(s.parts or s.stride not in _STRIDES for s in slides):
            return []
        if self.inner_window is not None and self.inner_window != self.reduced[-1]:
            return []  # a window's elements would not be met in order
        return self._slide_blocks() if self.family == "slide" else self._cover_blocks()

    def _size_along(self, slide: Slide) -> int:
        """How many elements a thread has of a line that windows split: a pack of each tensor at
        most, and the windows that begin there are one, too; 0 where not even one does.
        """
        width = {True: 1, False: 1}
        for t in self.beside:
            is_element = self.is_element(t)
            width[is_element] = max(width[is_element], ITEM_BYTES[t.buffer.dtype])
        windows = min(PACK_BYTES // width[False], _MOST_WINDOWS)
        size = min(PACK_BYTES // width[True], windows * slide.stride)
        return size if size >= slide.stride else 0

    def _slide_blocks(self) -> list[Block]:
        is_read = any(self.is_element(t) for t in self.beside)
        if self.inner_window is None or not is_read or self.window_size > _LARGEST:
            return []
        slide = self.grouping.slides[-1 - self.inner_window]
        size = self._size_along(slide)
        reach = (slide.size - 1) * slide.dilation
        first, past = -slide.padding, size - slide.stride + reach - slide.padding + 1
        if size <= slide.stride or past - first > _LONGEST:
            return []
        return [Block(self.inner_window, self.last, slide, size, first, past)]

    def _cover_blocks(self) -> list[Block]:
        if any(self.is_element(r) and self.values.reads(r.name) for r in self.reads):
            return []
        found: list[Block] = []
        for window in self.reduced:
            slide = self.grouping.slides[-1 - window]
            size = slide.stride
            if window == self.inner_window:
                size = self._size_along(slide)
                beside = math.prod(b.size for b in found) * len(self.stores)
                while size > slide.stride and size * beside > _MANY_SUMS:
                    size //= 2
            if not size:
                return []
            reach = (slide.size - 1) * slide.dilation
            first = -((reach - slide.padding) // slide.stride)
            past = (size - 1 + slide.padding) // slide.stride + 1
            found.append(Block(window, self.pooled_by(window), slide, size, first, past))
        sums = math.prod(b.size for b in found) * len(self.stores)
        sums *= self.lanes if self.inner_window is None else 1
        is_small = sums <= _MOST_SUMS and math.prod(b.past - b.first for b in found) <= _LARGEST
        is_packed = self.inner_window is not None or self.is_packed
        return found if is_small and is_packed else []

    @property
    def is_several(self) -> bool:
        """Whether the kernel has this form."""
        return bool(self.blocks)

    @property
    def has_winners(self) -> bool:
        """Whether it finds maxima first, and where they stand and what is picked there after."""
        is_apt = self.family == "slide" and (self.is_several or self.is_packed)
        return is_apt and self.window_size <= _MOST_FOUND_AFTER

    @property
    def outer_blocks(self) -> list[Block]:
        """The blocks along which nothing is read in packs."""
        return [b for b in self.blocks if b.window != self.inner_window]

    @property
    def inner_block(self) -> Block | None:
        """The block along which packs are read."""
        return next((b for b in self.blocks if b.window == self.inner_window), None)

    @property
    def block_size(self) -> int:
        """How many elements a thread has."""
        return math.prod(b.size for b in self.blocks)

    @property
    def block_sizes(self) -> list[tuple[str, str]]:
        """(name, how many) of the blocks along each pooled group, where the launch is set up."""
        found = []
        for b in self.blocks:
            name = self.grouping.names[b.group]
            whole = f"sizes.{name}_unpooled.value"
            if self.family == "slide":
                found.append((f"{name}_blocks", f"ceil_divide(sizes.{name}.value, {b.windows})"))
            else:
                found.append((f"{name}_blocks", f"ceil_divide({whole}, {b.size})"))
        return found

    @property
    def block_places(self) -> list[tuple[str, str]]:
        """(index, size) for each group of the domain, where blocks are counted."""
        along = {b.group for b in self.blocks}
        names = self.grouping.names
        return [
            (f"{self.word(g)}_block", f"{names[g]}_blocks")
            if g in along
            else (self.word(g), f"sizes.{names[g]}")
            for g in self.domain
        ]

    def block_lines(self, index: str) -> list[str]:
        """Lines that take the index of a block apart."""
        return self._element_lines(index, self.block_places)

    @property
    def tasks(self) -> str:
        """How many blocks there are, or elements of them along the innermost group."""
        blocks = dict(self.block_sizes)
        sizes = [f"{s}.value" for _, s in self.block_places if s not in blocks]
        sizes += [f"{name}.value" for name in blocks]
        return " * ".join(f"static_cast<int64_t>({size})" for size in sizes)

    @property
    def is_vector(self) -> str:
        """Whether lines are whole packs, where the launch is set up."""
        inner = self.inner_block
        if inner is None:
            return f"{self.size_of(self.last)} % {self.lanes} == 0"
        whole = f"sizes.{self.grouping.names[inner.group]}_unpooled.value"
        pooled = f"sizes.{self.grouping.names[inner.group]}.value"
        starts = " | ".join(f"reinterpret_cast<uintptr_t>({t.buffer.name})" for t in self.beside)
        return (
            f"{whole} % {inner.size} == 0 && {whole} == {pooled} * {inner.slide.stride} && "
            f"({starts}) % {PACK_BYTES} == 0"
        )

    # Of a slide kernel.

    @property
    def lined(self) -> list[Read]:
        """What is read along a line around a thread's pack: what lies by elements."""
        return [r for r in self.together(self.reads) if self.is_element(r)]

    @cached_property
    def own_reads(self) -> list[Read]:
        """What is read along a line for a thread's own windows alone."""
        return [r for r in self.together(self.reads) if not self.is_element(r)]

    def outer_lines(self, index: str) -> list[str]:
        """Lines that take the index of a position along the other groups together apart."""
        return self.taken_apart(index, self.outer_windows, set(self.outer_windows))

    @property
    def outer_size(self) -> int:
        """How many positions a window has along the other groups together, at most."""
        return math.prod(self.grouping.windows[-1 - w] for w in self.outer_windows)

    # Of a cover kernel.

    @property
    def steady_reads(self) -> list[Read]:
        """What the shares read that is the same for all windows of a block."""
        pooled = {b.group for b in self.blocks}
        return [r for r in self.reads_of(self.values) if not r.extent & pooled]

    @property
    def window_reads(self) -> list[Read]:
        """What the shares read of each window."""
        return [r for r in self.reads_of(self.values) if r not in self.steady_reads]

    @property
    def end_reads(self) -> list[Read]:
        """What the ends read that the shares do not."""
        return [r for r in self.reads_of(self.row_values) if r not in self.reads_of(self.values)]

    @property
    def block_index(self) -> str:
        """Which of a block's elements one is at."""
        text = ""
        for b in self.blocks:
            at = f"at_{-b.window}"
            text = at if not text else f"({text}) * {b.size} + {at}"
        return text

    @property
    def covered_beside(self) -> list[tuple[str, str]]:
        """(name, how many positions a window has) at `beside` of a line."""
        return self.covered_at("beside") if self.inner_block else self.covered
