"""Taking up an operand: along which axes of the value before an operand lies with which a chain
goes on, by what becomes of it.

As a rule its axes are the value's last ones. But a step behind it may give it an axis between two
others, as `scale[:, None]` does, part one, as `chunk` does, take one away, or put values side by
side, as `cat` does; or it may be meant for the channels, or as labels. Then its own axes lie where
they are behind those steps.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from fusegen.axes import Atlas, Axes, Shape, Value, flat
from fusegen.fitting import broadcasts, dims_of
from fusegen.ops import Chain, Step
from fusegen.ops.reducing import class_axis
from fusegen.viewing import merged_span, shape_behind


@dataclass(frozen=True, eq=False)
class _Axis:
    """An axis on its way, or a part of one; and which ones it is made of, where those have become
    one. step is the one that makes it, where it is a new one: -1 is the operand's own, -2 stands
    behind channels, or for the classes, and along -3 values are put side by side.
    """

    size: int
    step: int = -1
    of: tuple[_Axis, ...] = ()


@dataclass(frozen=True)
class Course:
    """What becomes of an operand's axes: the parts of each, and what axes there are behind the
    steps that are known.
    """

    own: tuple[tuple[_Axis, ...], ...]
    last: tuple[_Axis, ...]

    @property
    def shape(self) -> Shape:
        """The shape behind the steps."""
        return tuple(axis.size for axis in self.last)


def course_of(chain: Chain, at: int, shape: Shape, before: Shape, rank: int) -> Course | None:
    """What becomes of the operand that the step at this place takes up, where it does not lie along
    the last axes of the value before; rank is x's. If that is not to be seen there, where the chain
    takes it up again.
    """
    name = chain.steps[at].taken_up
    again = (i for i, step in enumerate(chain.steps) if i >= at and step.taken_up == name)
    found = (_course(chain, i, shape, before, rank) for i in again)
    return next((course for course in found if course is not None), None)


def _course(chain: Chain, at: int, shape: Shape, before: Shape, rank: int) -> Course | None:
    alike = _alike(chain, at)
    axes = as_given = [_Axis(size) for size in shape]
    own: list[tuple[_Axis, ...]] = [(axis,) for axis in axes]
    kept, is_torn = "", False  # whether axes are parted, or something is selected along them
    joined = -1  # where it is put beside another value
    for i, step in enumerate(chain.steps[at + 1 :], start=at + 1):
        if i < joined:
            continue
        if step.is_naming:
            kept = step.names[0]
            continue
        if step.is_structural and (joined := _joined(chain, kept, i)) > i:
            continue
        found = _behind(step, axes, i, alike)
        if found is None:
            break
        is_torn |= step.is_view or _is_joining(step) or "index" in dict(step.attributes)
        if step.is_view and len(found) >= len(axes) and found is not axes:
            # One of them is in parts, or in one part.
            new = [axis for axis in found if axis not in axes]
            parted = [axis for axis in axes if axis not in found]
            if not parted:  # a value without axes has none that are parted
                break
            own = [_with_parts(parts, parted[0], new) for parts in own]
        axes, kept = found, ""
    if len(axes) == 1 and kept and _is_of_channels(chain, kept):
        axes = [*axes, *(_Axis(1, -2) for _ in range(rank - 2))]
    if kept and (labelled := _labelled(chain, kept)) is not None:
        place = 1 + len(axes) + class_axis(1 + len(axes), dict(labelled.attributes))
        is_wide = "dim" in dict(labelled.attributes) and len(axes) == rank
        axes = axes if is_wide else [*axes[:place], _Axis(1, -2), *axes[place:]]
    firsts = [axis.step == -1 for axis in axes]
    is_between = any(firsts[i] and not all(firsts[i:]) for i in range(len(axes)))
    if axes == as_given or (broadcasts(before, shape) and not is_between and not is_torn):
        return None
    return Course(tuple(own), tuple(axes))


def _with_parts(parts: tuple[_Axis, ...], parted: _Axis, new: Sequence[_Axis]) -> tuple[_Axis, ...]:
    return tuple(a for axis in parts for a in (new if axis is parted else (axis,)))


def _is_joining(step: Step) -> bool:
    """Whether a step puts values side by side."""
    return step.definition is not None and step.definition.shaping == "stack"


def _joined(chain: Chain, kept: str, at: int) -> int:
    """The step behind this one that puts the value of that name beside another; -1 if none does."""
    others = enumerate(chain.steps[at:], start=at)
    uses = (i for i, s in others if _is_joining(s) and kept in [name for _, name in s.operands])
    return next(uses, -1) if kept else -1


def _alike(chain: Chain, at: int) -> set[str]:
    """The kept values that lie as the operand does that a step takes up, which they are made of."""
    name, found, is_made = chain.steps[at].taken_up, set[str](), False
    for step in chain.steps:
        if step.is_naming:
            found |= {*step.names} if is_made else set()
        elif step.is_structural:
            is_made = step.taken_up == name or not found.isdisjoint(step.names)
        else:
            others = {name for _, name in step.operands}
            is_made &= step.definition is not None and step.definition.shaping == "same"
            is_made &= others <= found
    return found


def _behind(step: Step, axes: list[_Axis], i: int, alike: Container[str]) -> list[_Axis] | None:
    """The axes behind a step; None where it is not for it alone to say."""
    definition = step.definition
    if definition is None or definition.window_axes or definition.groups:
        return None
    shape = tuple(axis.size for axis in axes)
    if _is_joining(step):
        (dim,) = dims_of(step, shape)
        return [*axes[:dim], _Axis(1 + len(step.operands), -3), *axes[dim:]]
    if any(name not in alike for _, name in step.operands):
        return None
    if definition.shaping == "same":
        return axes
    if definition.shaping == "merge":
        start, end = merged_span(step, shape)
        whole = _Axis(math.prod(shape[start:end]), of=tuple(axes[start:end]))
        return axes if end - start == 1 else [*axes[:start], whole, *axes[end:]]
    if definition.shaping not in ("split", "unsqueeze", "squeeze", "reduce"):
        return None
    dims = dims_of(step, shape)
    if definition.shaping == "split":
        (dim,) = dims
        if axes[dim].of:
            return None
        behind = shape_behind(step, shape)
        sizes = behind[dim : len(behind) - len(shape) + dim + 1]
        return [*axes[:dim], *map(_Axis, sizes), *axes[dim + 1 :]]
    if definition.shaping == "unsqueeze":
        (dim,) = dims
        return [*axes[:dim], _Axis(1, i), *axes[dim:]]
    if definition.shaping == "reduce" and dict(step.attributes).get("keepdim"):
        return axes
    is_any = definition.shaping == "reduce"
    return [a for d, a in enumerate(axes) if d not in dims or not (is_any or a.size == 1)]


def _labelled(chain: Chain, kept: str) -> Step | None:
    """The step for which a kept value tells classes."""
    uses = ((s, s.definition, p) for s in chain.steps for p, name in s.operands if name == kept)
    return next((s for s, d, p in uses if d and d.parameter(p).kind == "index"), None)


def _is_of_channels(chain: Chain, kept: str) -> bool:
    uses = [(s.definition, p) for s in chain.steps for p, name in s.operands if name == kept]
    placements = {d.parameter(p).placement for d, p in uses if d is not None}
    return bool(placements) and placements <= {"channel", "slope"}


def taken_up(
    course: Course, shape: Shape, before: Value, met: Axes, atlas: Atlas
) -> tuple[Value, dict[int, tuple[int, ...]]]:
    """The operand as a value whose axes lie as they meet those of the value before; and what axes
    that has in the place of each new one, by the step that makes it.
    """
    count = len(course.last)
    former = ((),) * (count - len(before.axes)) + before.axes
    met_by: dict[_Axis, tuple[int, ...]] = {}
    for axis, found in zip(course.last, met, strict=True):
        met_by |= _apart(axis, found, atlas)
    former_by = dict(zip(course.last, former[len(former) - count :], strict=True))
    axes: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for parts in reversed(course.own):
        along: list[tuple[int, ...]] = []
        for axis in reversed(parts):
            # One that is gone behind the steps is met by nothing.
            found = met_by[axis] if axis in met_by else atlas.beside(axis.size, following)
            found = () if axis.size == 1 and len(parts) > 1 else found  # as a step parts axes
            along.insert(0, found)
            following = found or following
        axes.insert(0, flat(tuple(along)))
    own = [former_by.get(parts[0], ()) if len(parts) == 1 else () for parts in course.own]
    value = Value(shape, tuple(axes), (*former[: len(former) - count], *own))
    return value, {axis.step: former_by[axis] for axis in course.last if axis.step >= 0}


def _apart(axis: _Axis, along: tuple[int, ...], atlas: Atlas) -> dict[_Axis, tuple[int, ...]]:
    """Along which axes an axis lies, or those that it is made of.

    Raises CrossedAxesError where these end at other places.
    """
    if not axis.of:
        return {axis: along}
    sizes = tuple(part.size for part in axis.of)
    parts = atlas.parts_of(along, sizes) if along else ((),) * len(sizes)
    found: dict[_Axis, tuple[int, ...]] = {}
    for part, each in zip(axis.of, parts, strict=True):
        found |= _apart(part, each, atlas)
    return found
