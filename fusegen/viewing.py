"""Viewing: steps that only say in what shape a value is seen, and what shape that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fusegen.axes import Atlas, CrossedAxesError, Shape, Value, flat
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.fitting import dims_of, require_axis
from fusegen.ops import Step


def shape_behind(step: Step, running: Shape) -> Shape:
    """The shape that a view step gives a value of this one, checked to hold as many elements."""
    attributes = dict(step.attributes)
    assert step.definition is not None
    if step.definition.shaping == "merge":
        start, end = merged_span(step, running)
        return (*running[:start], math.prod(running[start:end]), *running[end:])
    if step.definition.shaping == "split":
        (dim,) = dims_of(step, running)
        sizes = _filled(step, attributes["sizes"], running[dim], f"its axis {dim}", running)
        return (*running[:dim], *sizes, *running[dim + 1 :])
    return _filled(step, attributes["shape"], math.prod(running), "it", running)


def seen_behind(
    step: Step, before: Value, atlas: Atlas, *, is_last: bool, is_pooled: bool
) -> Value:
    """A value behind a view step, along the axes that it was along; where only views follow, the
    result may be one whose axes are not known any more.

    Raises UnsupportedError where they have to be, and cannot be followed.
    """
    assert step.definition is not None
    shape = shape_behind(step, before.shape)
    if step.definition.shaping == "merge":
        return before.merged(*merged_span(step, before.shape))
    is_split = step.definition.shaping == "split"
    try:
        if is_pooled or (is_last and not is_split):
            raise CrossedAxesError
        if not is_split:
            return Value(shape, atlas.parts_of(flat(before.axes), shape), ((),) * len(shape))
        (dim,) = dims_of(step, before.shape)
        sizes = shape[dim : len(shape) - len(before.shape) + dim + 1]
        return before.parted(dim, sizes, atlas.parts_of(before.axes[dim], sizes))
    except CrossedAxesError:
        if is_last:
            return before.seen_as(shape)
    raise UnsupportedError(
        f"{step.text}: the axes of a value of shape {before.shape} cannot be followed into "
        f"{shape}; compile what stands behind it as a chain of its own"
    )


def merged_span(step: Step, running: Shape) -> tuple[int, int]:
    """The axes that a step makes one: the first of them, and the one behind the last."""
    attributes, rank = dict(step.attributes), len(running)
    found = []
    for name in ("start_dim", "end_dim"):
        dim = attributes[name]
        assert isinstance(dim, int)
        room = max(rank, 1)
        if not -room <= dim < room:
            raise ArgumentError(
                f"{step.text}: {name} {dim} is out of range for a value of shape {running} "
                f"({rank} axes)"
            )
        found.append(dim % room)
    start, end = found
    if start > end:
        raise ArgumentError(
            f"{step.text}: start_dim {attributes['start_dim']} is behind end_dim "
            f"{attributes['end_dim']} in a value of shape {running}; name the first axis first"
        )
    return start, min(end + 1, rank)


def _filled(step: Step, wanted: object, count: int, what: str, running: Shape) -> Shape:
    """The sizes that are wanted for so many elements, with the one that is left open."""
    assert isinstance(wanted, tuple)
    known = math.prod(size for size in wanted if size != -1)
    if known != count if -1 not in wanted else count % known:
        has = "a multiple of" if -1 in wanted else "exactly"
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted {what} to hold {has} {known} "
            f"elements for the sizes {wanted}; there are {count}"
        )
    return tuple(count // known if size == -1 else size for size in wanted)


def seen_first(steps: Sequence[Step]) -> int:
    """How many steps at a chain's beginning only say in what shape x is seen, before anything else
    looks at it: none where its axes can be followed, so that x may lie as it likes.
    """
    number = next((i for i, s in enumerate(steps) if not (s.is_view or s.is_naming)), len(steps))
    views = [step for step in steps[:number] if step.is_view]
    if len(views) != 1 or views[0].definition is None or views[0].definition.shaping == "view":
        return number if views else 0
    return number if any(map(_wants_whole_axes, steps[number:])) else 0


def seen_shapes(steps: Iterable[Step], shape: Shape) -> tuple[Shape, dict[str, Shape]]:
    """The shape behind such steps, and that of each value that is kept between them."""
    kept = {}
    for step in steps:
        if step.op == "give":
            told = f"{step.text}: gives what is only seen in another shape; put it before that"
            raise UnsupportedError(told)
        if step.op == "keep":
            kept[step.names[0]] = shape
        else:
            require_axis(step, shape)
            shape = shape_behind(step, shape)
    return shape, kept


def _wants_whole_axes(step: Step) -> bool:
    definition = step.definition
    if definition is None:
        return False
    is_parting = step.is_view and definition.shaping != "merge"
    return is_parting or bool(definition.window_axes or definition.groups)


def made_of_operands(steps: Sequence[Step], before: Iterable[str] = ()) -> list[bool]:
    """For each step, whether the value behind it is made of operands alone; of what is named before
    the steps, nothing is.
    """
    named = dict.fromkeys(before, False)
    found: list[bool] = []
    is_apart = False
    for step in steps:
        if step.op == "recall":
            is_apart = named.get(step.names[0], False)
        elif step.taken_up is not None:
            is_apart = True
        else:
            is_apart = is_apart and all(named.get(name, True) for _, name in step.operands)
        named |= dict.fromkeys(step.names if step.is_naming else (), is_apart)
        found.append(is_apart)
    return found


def are_views(steps: Iterable[Step]) -> bool:
    """Whether steps only say in what shape a value is seen, or name it."""
    return all(step.is_view or step.is_naming for step in steps)
