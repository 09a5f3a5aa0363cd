"""Axes: which axes of a chain's graph each axis of each of its values is made of.

A graph counts its axes from the end of the widest value. An axis of a value is one of them, as a
rule; none, where it is one wide and stands for nothing, as after a reduction that keeps it; or
several, where a step splits it. So a step that drops, adds or splits axes moves no data: only the
names by which the values before and behind it know the same axes differ.

Names are settled at the end, for a later step may widen or split an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

Shape = tuple[int, ...]
Axes = tuple[tuple[int, ...], ...]  # of each axis of a value: the graph's axes that it is made of


class CrossedAxesError(Exception):
    """Two axes that would have to be one, and are not."""


@dataclass(frozen=True)
class Value:
    """A tensor on its way through a chain.

    former has, for each axis that a reduction left one wide, the axes it was made of before: what
    is as wide as it was lies along those again. Where the value is an operand that the chain goes
    on with, they are those of x, and go on before the value's own axes.
    """

    shape: Shape
    axes: Axes
    former: Axes

    @property
    def _own_former(self) -> Axes:
        return self.former[len(self.former) - len(self.shape) :]

    def along(self, axis: int) -> tuple[int, ...]:
        """The axes that one axis, counted from the end, is made of; none where there is no such."""
        return self.axes[axis] if -axis <= len(self.axes) else ()

    def size(self, axis: int) -> int:
        """The size of one axis, counted from the end; 1 where there is no such."""
        return self.shape[axis] if -axis <= len(self.shape) else 1

    def rearranged(self, sources: Sequence[int | None], reduced: Iterable[int] = ()) -> Value:
        """The value with other axes: each the axis it was, from the front, or None for a new one.

        Axes of `reduced` that stay are one wide from here on.
        """
        gone = set(reduced)
        shape, axes, former = [], [], []
        formers = self._own_former
        for source in sources:
            is_new = source is None
            shape.append(1 if source is None or source in gone else self.shape[source])
            axes.append(() if source is None or source in gone else self.axes[source])
            before = () if source is None else formers[source]
            former.append(self.axes[source] if not is_new and source in gone else before)
        return Value(tuple(shape), tuple(axes), tuple(former))

    def merged(self, start: int, end: int) -> Value:
        """The value with its axes from start to before end, from the front, as one; a new one where
        that is none.
        """
        size = math.prod(self.shape[start:end])
        formers = self._own_former
        former = flat(formers[start:end]) if size == 1 else ()
        return Value(
            (*self.shape[:start], size, *self.shape[end:]),
            (*self.axes[:start], flat(self.axes[start:end]), *self.axes[end:]),
            (*formers[:start], former, *formers[end:]),
        )

    def parted(self, axis: int, sizes: Shape, parts: Axes) -> Value:
        """The value with several axes of these sizes in the place of one, from the front."""
        formers = self._own_former
        return Value(
            (*self.shape[:axis], *sizes, *self.shape[axis + 1 :]),
            (*self.axes[:axis], *parts, *self.axes[axis + 1 :]),
            (*formers[:axis], *((),) * len(sizes), *formers[axis + 1 :]),
        )

    def seen_as(self, shape: Shape) -> Value:
        """The value in another shape, of which no single axis is known any more."""
        nothing: Axes = ((),) * (len(shape) - 1)
        return Value(shape, (flat(self.axes), *nothing), ((),) * len(shape))

    def with_former(self, axis: int, former: tuple[int, ...]) -> Value:
        """The value, one axis of which, from the front, is one wide and lay along others before."""
        at = len(self.former) - len(self.shape) + axis
        return replace(self, former=(*self.former[:at], former, *self.former[at + 1 :]))

    def resized(self, sizes: Mapping[int, int]) -> Value:
        """The value with other sizes along some axes, counted from the end."""
        shape = list(self.shape)
        for axis, size in sizes.items():
            shape[axis] = size
        return replace(self, shape=tuple(shape))


class Atlas:
    """All axes of a graph while a chain is bound: their order, and how wide they are."""

    def __init__(self, shape: Shape) -> None:
        self.order = list(range(len(shape)))
        self.sizes = dict(enumerate(shape))
        self.parts: dict[int, tuple[int, ...]] = {}  # what an axis has become
        # The axes in the place of each of x's, where x is one wide but the graph is not, too.
        self.slots = [[i] for i in self.order]
        self.x = Value(shape, tuple((i,) for i in self.order), ((),) * len(shape))

    def resolve(self, axes: Iterable[int]) -> tuple[int, ...]:
        """What some axes have become."""
        found: list[int] = []
        for axis in axes:
            found += self.resolve(self.parts[axis]) if axis in self.parts else (axis,)
        return tuple(found)

    def numbers(self, axes: Iterable[int]) -> tuple[int, ...]:
        """Some axes as the graph counts them, from the end; once all are known."""
        place = {axis: i - len(self.order) for i, axis in enumerate(self.order)}
        return tuple(place[axis] for axis in self.resolve(axes))

    def width(self, axes: Iterable[int]) -> int:
        """The size of some axes together."""
        return math.prod(self.sizes[axis] for axis in self.resolve(axes))

    def meet(self, value: Value, shape: Shape, known: Axes | None) -> tuple[Value, Axes]:
        """The value broadcast with a tensor, and the axes of each of the tensor's.

        known are those that the tensor has already, where it was met before. Raises
        CrossedAxesError where it lies along other axes than the value.
        """
        rank = max(len(value.shape), len(shape))
        tensor = Value(shape, known or ((),) * len(shape), ())
        is_alike = shape == value.shape
        behind = len(self.order)  # where a new axis goes: before its neighbour
        result: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        own: list[tuple[int, ...]] = []
        for axis in range(-1, -rank - 1, -1):
            size, other = value.size(axis), tensor.size(axis)
            have, theirs = self.resolve(value.along(axis)), self.resolve(tensor.along(axis))
            former = value.former[axis] if -axis <= len(value.former) else ()
            if known is None:
                theirs = self._fresh(size, other, have, former, behind, is_alike=is_alike)
            if size == other != 1 and have != theirs:
                raise CrossedAxesError
            if size == other == 1 and have and theirs and have != theirs:
                self._drop(a for a in theirs if a not in have)
            if size != other:  # one of them is as wide as the other's
                narrow, wide = (have, theirs) if size == 1 else (theirs, have)
                self._drop(a for a in narrow if a not in wide)
            together = theirs if size == 1 and (other != 1 or not have) else have
            behind = self.order.index(together[0]) if together else behind
            result.insert(0, (other if size == 1 else size, together, former))
            own.insert(0, theirs)
        joined = Value(*(tuple(part) for part in zip(*result, strict=True))) if result else value
        if result and len(value.former) > rank:
            joined = replace(joined, former=value.former[:-rank] + joined.former)
        self._require_order(joined)
        return joined, tuple(own[rank - len(shape) :])

    def _fresh(
        self,
        size: int,
        other: int,
        have: tuple[int, ...],
        former: tuple[int, ...],
        behind: int,
        *,
        is_alike: bool,
    ) -> tuple[int, ...]:
        """The axes of one axis of a tensor that is met for the first time."""
        if other == 1 and size != 1:
            return ()
        if other == size:
            return have if size != 1 or is_alike else ()
        was = self.resolve(former)
        if was and self.width(was) == other:
            return was
        if have:  # one wide so far
            at = self.order.index(have[0])
        else:
            at = self.order.index(was[-1]) + 1 if was else behind
        new = len(self.sizes)
        self.sizes[new] = other
        self.order.insert(at, new)
        for slot in self.slots:
            if have and have[0] in slot:
                slot.append(new)
        return (new,)

    def beside(
        self, size: int, following: Sequence[int], leading: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """A new axis of this size, before some others, else behind those; none where it is one
        wide.
        """
        if size == 1:
            return ()
        new = len(self.sizes)
        self.sizes[new] = size
        self.order.insert(self._room(leading, following)[1], new)
        return (new,)

    def free(self, size: int, leading: Sequence[int], following: Sequence[int]) -> tuple[int, ...]:
        """The last axis of this size between some and others; none where there is no such."""
        start, end = self._room(leading, following)
        found = [axis for axis in self.order[start:end] if self.sizes[axis] == size]
        return tuple(found[-1:])

    def _room(self, leading: Sequence[int], following: Sequence[int]) -> tuple[int, int]:
        """From where to where in the order axes lie between some and others."""
        first, last = self.resolve(leading), self.resolve(following)
        start = self.order.index(first[-1]) + 1 if first else 0
        return start, self.order.index(last[0]) if last else len(self.order)

    def _drop(self, axes: Iterable[int]) -> None:
        """Axes of one value that a wider one takes the place of."""
        for axis in axes:
            self.parts[axis] = ()
            self.order.remove(axis)

    def _require_order(self, value: Value) -> None:
        places = [self.order.index(a) for axes in value.axes for a in self.resolve(axes)]
        if places != sorted(set(places)):
            raise CrossedAxesError

    def whole(self, value: Value, axis: int) -> tuple[Value, int]:
        """The value, and the one axis that its own, counted from the end, is made of; a new one
        where it stood for nothing.

        Raises CrossedAxesError where it is made of several.
        """
        found = self.resolve(value.along(axis))
        if len(found) > 1:
            raise CrossedAxesError
        if found:
            return value, found[0]
        new = len(self.sizes)
        self.sizes[new] = value.size(axis)
        behind = self.resolve(a for members in value.axes[axis:] for a in members)
        self.order.insert(self.order.index(behind[0]) if behind else len(self.order), new)
        axes = list(value.axes)
        axes[axis] = (new,)
        return replace(value, axes=tuple(axes)), new

    def split(self, axes: Iterable[int], groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """An axis in so many groups of equal size: the axes that count groups, and those within.

        Raises CrossedAxesError where it is split in another way already, or not known.
        """
        rest = list(self.resolve(axes))
        outer: list[int] = []
        while groups > 1:
            if not rest:
                raise CrossedAxesError
            axis = rest.pop(0)
            size = self.sizes[axis]
            if groups % size and size % groups:
                raise CrossedAxesError
            if groups % size:
                first, second = len(self.sizes), len(self.sizes) + 1
                self.sizes |= {first: groups, second: size // groups}
                at = self.order.index(axis)
                self.order[at : at + 1] = [first, second]
                self.parts[axis] = (first, second)
                rest.insert(0, second)
                axis, size = first, groups
            outer.append(axis)
            groups //= size
        return tuple(outer), tuple(rest)

    def parts_of(self, axes: Iterable[int], sizes: Shape) -> Axes:
        """An axis in parts of these sizes, outermost first: the axes of each.

        Raises CrossedAxesError where it is split in another way already.
        """
        rest = self.resolve(axes)
        if 0 in sizes:  # nothing is computed: it suffices that the sizes are told
            first = len(self.sizes)
            new = tuple(range(first, first + len(sizes)))
            self.sizes |= dict(zip(new, sizes, strict=True))
            at = self.order.index(rest[0])
            self._drop(rest)
            self.order[at:at] = new
            self.parts[rest[0]] = new
            return tuple((axis,) for axis in new)
        found = []
        for size in sizes[:-1]:
            outer, rest = self.split(rest, size)
            found.append(outer)
        return (*found, rest)

    def memory_order(self) -> tuple[tuple[int, ...], ...]:
        """The graph's axes in the place of each axis of x."""
        return tuple(self.numbers(slot) for slot in self.slots)


def flat(axes: Axes) -> tuple[int, ...]:
    """All axes of a value."""
    return tuple(a for members in axes for a in members)
