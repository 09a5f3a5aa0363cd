"""Several sliding windows a thread, along an innermost group that they split, as the templates see
them.

Where a line has as many windows as its length is strides, and whole packs of elements, a thread has
a pack of them and the windows that begin there: what those share is read and computed once, and
which positions they have is known when it is compiled.
"""

from __future__ import annotations

from fusegen.indexing import Read
from fusegen.slideviews import SlideView
from fusegen.target import ITEM_BYTES
from fusegen.windowing import Slide

_VECTOR_BYTES = 16
_MOST_WINDOWS = 4  # of a thread: each has accumulators of its own
_LONGEST, _LARGEST = 12, 27  # a line of what is read around a pack; a window that is unrolled


class SeveralView(SlideView):
    """A slide or cover kernel that has a second form, for several windows a thread."""

    @property
    def _slide(self) -> Slide | None:
        """How windows lie along the innermost group, where they split it."""
        is_last = self.inner_window is not None and self.inner_window == self.reduced[-1]
        if not is_last or not self.target.is_flat or not self.goes_by_lines:
            return None  # in other orders, a window's elements are not met in order
        assert self.inner_window is not None
        return self.grouping.slides[-1 - self.inner_window]

    def is_element(self, read: Read) -> bool:
        """Whether a tensor lies by elements along the innermost group, rather than by windows."""
        return read.buffer.is_windowed and self.last in read.extent

    @property
    def wide(self) -> int:
        """How many elements of a line a thread has; 0 where there is no such form."""
        slide, tensors = self._slide, self.beside
        elements = [ITEM_BYTES[t.buffer.dtype] for t in tensors if self.is_element(t)]
        is_plain = not any(t.buffer.dtype == "noise" or t.buffer.is_computed for t in self.reads)
        is_plain &= all(self.is_element(t) or self.step(t) == 1 for t in tensors)
        if slide is None or not elements or not is_plain:
            return 0
        wide = min(_VECTOR_BYTES // max(elements), _MOST_WINDOWS * slide.stride)
        if wide % slide.stride or wide <= slide.stride or self.window_size > _LARGEST:
            return 0
        first, past = self._around(slide, wide)
        return wide if past - first <= _LONGEST else 0

    @property
    def each(self) -> int:
        """How many windows begin among a thread's elements."""
        return self.wide // self.inner_stride

    def _around(self, slide: Slide, wide: int) -> tuple[int, int]:
        """From where to where a thread reads along a line, from its first: a slide kernel elements,
        a cover kernel windows.
        """
        reach = (slide.size - 1) * slide.dilation
        if self.family == "slide":
            return -slide.padding, wide - slide.stride + reach - slide.padding + 1
        first = -((reach - slide.padding) // slide.stride)
        return first, (wide - 1 + slide.padding) // slide.stride + 1

    @property
    def around(self) -> tuple[int, int]:
        """From where to where a thread reads along a line, from its first."""
        assert self._slide is not None
        return self._around(self._slide, self.wide)

    @property
    def core(self) -> int:
        """How many of those lie in one pack."""
        return self.wide if self.family == "slide" else self.each

    @property
    def along_size(self) -> str:
        """How many elements a line has."""
        return f"sizes.{self.grouping.names[self.last]}_unpooled.value"

    @property
    def pooled_size(self) -> tuple[int, int, int]:
        """(size, padding, dilation) of the windows along the innermost group."""
        assert self._slide is not None
        return self._slide.size, self._slide.padding, self._slide.dilation

    @property
    def lined(self) -> list[Read]:
        """What is read along a line beyond a thread's own: in a slide kernel what lies by elements,
        in a cover kernel what lies by windows.
        """
        by_elements = self.family == "slide"
        return [r for r in self.together(self.reads) if self.is_element(r) == by_elements]

    @property
    def own_reads(self) -> list[Read]:
        """What is read along a line for a thread's own windows or elements alone."""
        return [r for r in self.together(self.reads) if r not in self.lined]

    @property
    def element_reads(self) -> list[Read]:
        """In a cover kernel: what is read of elements, and of what is the same for all windows that
        cover them.
        """
        own = self.reads_of(self.row_values)
        return [r for r in self.reads if r in own or self.is_element(r)]

    @property
    def window_reads(self) -> list[Read]:
        """In a cover kernel: what is read of each of those windows."""
        return [r for r in self.reads if r not in self.element_reads]

    def outer_lines(self, index: str) -> list[str]:
        """Lines that take the index of a position along the other groups together apart."""
        return self.taken_apart(index, self.outer_windows, set(self.outer_windows))

    @property
    def outer_size(self) -> int:
        """How many positions a window has along the other groups together, at most."""
        return self.window_size // self.pooled_size[0]
