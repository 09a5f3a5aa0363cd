"""Sliding windows: which positions of an axis each window takes, as data.

Windows that lie side by side and fill the axis without gaps are just their size, an int; all others
are a `Slide`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusegen import ir
from fusegen.ir import Expr, Extent


@dataclass(frozen=True)
class Slide:
    """Windows along one axis: window i takes the positions i * stride - padding + j * dilation for
    j < size, as far as they are in the axis.

    With parts, there are as many windows, which divide the axis evenly as torch's adaptive pooling
    does: window i goes from floor(i * length / parts) to ceil((i + 1) * length / parts), and size
    is the longest one's.
    """

    size: int
    stride: int
    padding: int = 0
    dilation: int = 1
    is_ceil: bool = False
    parts: int = 0

    def count(self, length: int) -> int:
        """How many windows an axis of this length has, as torch counts them."""
        if self.parts:
            return self.parts
        span = self.dilation * (self.size - 1) + 1
        free = length + 2 * self.padding - span
        found = (free + (self.stride - 1 if self.is_ceil else 0)) // self.stride + 1
        # A window that would begin in the padding behind the axis is left out.
        if self.is_ceil and (found - 1) * self.stride >= length + self.padding:
            found -= 1
        return found


Window = int | Slide


def windows_along(window: Window, length: int) -> int:
    """How many windows an axis of this length has; none where not even one fits."""
    if isinstance(window, Slide):
        return max(0, window.count(length))
    return length // window


def size_of(window: Window) -> int:
    """How many positions a window has at most."""
    return window.size if isinstance(window, Slide) else window


def sliding(
    length: int,
    size: int,
    stride: int | None = None,
    padding: int = 0,
    dilation: int = 1,
    *,
    is_ceil: bool = False,
) -> Window:
    """The windows of a pooling along an axis of this length: an int where they are tiles."""
    is_tiled = stride in (None, size) and padding == 0 and dilation == 1
    if is_tiled and (not is_ceil or length % size == 0):
        return size
    return Slide(size, size if stride is None else stride, padding, dilation, is_ceil)


def adaptive(length: int, parts: int) -> Window:
    """The windows that divide an axis into parts as evenly as torch does; they may overlap."""
    if length % parts == 0:
        return length // parts
    ends = [(i * length // parts, -(-(i + 1) * length // parts)) for i in range(parts)]
    return Slide(max(end - begin for begin, end in ends), 0, parts=parts)


def windows(x: Expr, axes: Iterable[int]) -> Extent:
    """The positions within the windows of `axes`, which only a chain that pools has."""
    return frozenset(ir.SLIDING - a if ir.SLIDING - a in x.extent else -a for a in axes)


def covered(x: Expr, axes: Iterable[int], *, is_padded: bool = False) -> Expr:
    """How many positions a window of `axes` has: inside the tensor, or is_padded, in its padding
    too.
    """
    within = windows(x, axes)
    sliding = {w for w in within if w > ir.SLIDING}
    plain = within - sliding
    found = ir.covered_by(sliding, x.rank, is_padded=is_padded) if sliding else ir.const(1.0)
    return found * ir.count(plain) if plain else found
