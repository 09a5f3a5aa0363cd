"""Strides: how tensors lie over a graph's axes, told by plain numbers.

A program wants its inputs dense over those, reads some of them where there are gaps, and of some
just what stands at one place along an axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegen import ir
from fusegen.axes import Shape
from fusegen.bound import Bound
from fusegen.program import Places
from fusegen.windowing import windows_along

ALIGNMENT = 16  # bytes; the widest access of a kernel


def dense_strides(shape: Shape, order: Sequence[int]) -> Shape:
    """The strides of a dense tensor whose axes lie in this order."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


@dataclass(frozen=True)
class Pitch:
    """How a tensor lies that is dense but for gaps: so many elements one after the other, a run,
    and where the next one begins, counted from its beginning.
    """

    run: int
    step: int

    def is_apt(self, itemsize: int) -> bool:
        """Whether packs of 16 bytes, or of 8 elements, lie within one run."""
        is_whole = self.run % 8 == 0 and self.run * itemsize % ALIGNMENT == 0
        return is_whole and self.step * itemsize % ALIGNMENT == 0


def pitch_of(shape: Shape, stride: Shape, other: Shape, strides: Shape) -> Pitch | None:
    """How a tensor lies, if it is dense but for gaps, where the same tensor in other axes, joined
    or split, would be dense with other strides; None if it is anything else.
    """
    mine, its = _joined(shape, stride), _joined(other, strides)
    if 0 in shape:
        return None
    pairs = []  # of strides: where it is dense, and here
    while mine and its:
        (size, have), (count, want) = mine.pop(), its.pop()
        least = min(size, count)
        if size % least or count % least:
            return None
        pairs.append((want, have))
        mine += [(size // least, have * least)] if size > least else []
        its += [(count // least, want * least)] if count > least else []
    run, step = min(((want, have) for want, have in pairs if have != want), default=(0, 0))
    is_even = all(have == want if want < run else have * run == step * want for want, have in pairs)
    return Pitch(run, step) if run and is_even else None


@dataclass(frozen=True)
class Lie:
    """How a tensor lies for a program: shape and strides are as it is wanted, offset is how many
    elements before the first that is read. It is ready if it lies so, or so but for gaps. Where it
    is not, cut has how it is narrowed first: its shape, and (axis, where along it).
    """

    shape: Shape
    strides: Shape
    is_ready: bool
    pitch: Pitch | None = None
    offset: int = 0
    cut: tuple[Shape, Places] | None = None


def lie_of(
    extent: ir.Extent,
    places: Places,
    kind: tuple[Shape, Shape, int],
    bound: Bound,
    order: Sequence[int],
    *,
    may_have_gaps: bool,
) -> Lie:
    """How a tensor lies, of which a program wants what varies along `extent`, at these places along
    other axes, dense in an order of the graph's axes. kind is the tensor's shape, its strides and
    the bytes of an element.
    """
    shape, stride, itemsize = kind
    pooled, offset, cut = windows_of(bound), 0, None
    wanted = shape_over(extent, bound.domain, pooled)
    strides = dense_strides(wanted, order)
    if places:
        over = shape_over(extent.union(dict(places)), bound.domain, pooled)
        lead = len(over) - len(shape)
        if (1,) * lead + shape != over:
            return Lie(wanted, strides, False)
        stride = (0,) * lead + stride
        offset = sum(place % over[axis] * stride[axis] for axis, place in places)
        shape, cut = wanted, (over, tuple((axis, place % over[axis]) for axis, place in places))
        if offset * itemsize % ALIGNMENT:
            return Lie(wanted, strides, False, cut=cut)
    if lies_alike(shape, stride, wanted, strides):
        return Lie(wanted, strides, True, None, offset)
    pitch = pitch_of(shape, stride, wanted, strides) if may_have_gaps else None
    pitch = pitch if pitch and pitch.is_apt(itemsize) else None
    if pitch is None:
        return Lie(wanted, strides, False, cut=cut)
    return Lie(wanted, strides, True, pitch, offset)


def windows_of(bound: Bound) -> dict[int, int]:
    """How many windows each pooled axis has."""
    return {a: windows_along(w, bound.domain[a]) for a, w in bound.windows}


def most_elements(bound: Bound) -> int:
    """How many elements its largest tensor can have: padding and adaptive windows add some."""
    pooled = windows_of(bound)
    sizes = zip(range(-len(bound.domain), 0), bound.domain, strict=True)
    return math.prod(max(n, pooled[a]) if a in pooled else n for a, n in sizes)


def shape_over(extent: ir.Extent, domain: Shape, pooled: Mapping[int, int]) -> Shape:
    """The shape over the domain's axes of a tensor that varies along `extent`."""
    rank = len(domain)
    sizes = []
    for axis in range(-rank, 0):
        whole = axis not in pooled or -axis in extent or ir.SLIDING - axis in extent
        size = domain[axis] if whole else pooled[axis]
        sizes.append(size if axis in extent else 1)
    return tuple(sizes)


def lies_alike(shape: Shape, stride: Shape, other: Shape, strides: Shape) -> bool:
    """Whether two descriptions of a tensor, whose axes may be joined or split, are of the same
    memory.
    """
    return _joined(shape, stride) == _joined(other, strides) or math.prod(other) == 0


def _joined(shape: Shape, stride: Shape) -> list[tuple[int, int]]:
    """(size, stride) of each axis that is wider than one, neighbours that lie as one joined."""
    found: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size != 1 and found and found[-1][1] == size * step:
            found[-1] = (found[-1][0] * size, step)
        elif size != 1:
            found.append((size, step))
    return found
