"""Fitting: whether shapes fit the step that they meet, or the error."""

from __future__ import annotations

import math

from fusegen import ir
from fusegen.axes import Atlas, Shape, Value
from fusegen.errors import ArgumentError, OtherAxesError
from fusegen.ops import RUNNING, Chain, Definition, Step
from fusegen.ops.reducing import class_axis
from fusegen.ops.schema import integers
from fusegen.windowing import Slide, Window, size_of, windows_along

Windows = tuple[tuple[int, Window], ...]  # of an axis each


def require_axis(step: Step, running: Shape) -> None:
    """Raise ArgumentError for an axis, or a dim of several, that a value of this shape lacks."""
    axis = dict(step.attributes).get("axis")
    if isinstance(axis, int) and not -len(running) <= axis < len(running):
        raise ArgumentError(
            f"{step.text}: axis {axis} is out of range for a tensor of shape {running} "
            f"({len(running)} axes)"
        )
    if "dim" in dict(step.attributes):
        dims = dims_of(step, running)
        index = dict(step.attributes).get("index")
        at = index if isinstance(index, int) else 0
        short = [d for d in dims if at and not -running[d] <= at < running[d]]
        if short:
            raise ArgumentError(
                f"{step.text}: index {index} is out of range for axis {short[0]} of a value of "
                f"shape {running}"
            )


def dims_of(step: Step, running: Shape) -> tuple[int, ...]:
    """The axes that the step's dim names, from the front, or that a loss reduces; all where it is
    left out.
    """
    rank = len(running)
    if step.definition is not None and step.definition.is_loss:
        is_each = dict(step.attributes)["reduction"] == "none"
        has_classes = step.definition.shaping == "class_loss"
        own = (rank + class_axis(rank),) if has_classes else ()
        return own if is_each else tuple(range(rank))
    dim = dict(step.attributes)["dim"]
    if dim is None:
        return tuple(range(rank))
    dims = integers(dim)
    shaping = step.definition.shaping if step.definition is not None else "same"
    if rank == 0 and shaping in ("same", "reduce") and {*dims} <= {-1, 0}:
        return ()  # as torch takes it
    room = rank + (shaping in ("unsqueeze", "stack"))
    if not all(-room <= d < room for d in dims):
        raise ArgumentError(
            f"{step.text}: dim {dim} is out of range for a value of shape {running} ({rank} axes)"
        )
    found = tuple(d % room for d in dims)
    if len(set(found)) < len(found):
        raise ArgumentError(
            f"{step.text}: dim {dim} names an axis of a value of shape {running} twice"
        )
    return found


def rearranged(step: Step, definition: Definition, value: Value) -> Value:
    """The value behind a step, with the axes that the step leaves it."""
    if definition.shaping == "same":
        return value
    rank = len(value.shape)
    dims = dims_of(step, value.shape)
    sources: list[int | None] = list(range(rank))
    if definition.shaping == "stack":
        (dim,) = dims
        sources.insert(dim, None)
        return value.rearranged(sources).resized({dim - rank - 1: 1 + len(step.operands)})
    if definition.shaping == "unsqueeze":
        (dim,) = dims
        sources.insert(dim, None)
        return value.rearranged(sources)
    if definition.shaping == "squeeze":
        return value.rearranged([i for i in range(rank) if value.shape[i] != 1 or i not in dims])
    is_kept = bool(dict(step.attributes).get("keepdim"))
    return value.rearranged([i for i in range(rank) if is_kept or i not in dims], dims)


def holds_labels(chain: Chain, name: str) -> bool:
    """Whether a tensor tells classes, and nothing else."""
    is_taken_up = any(step.taken_up == name for step in chain.steps)
    kinds = {parameter.kind for _, parameter in chain.uses(name)}
    return kinds == {"index"} and not is_taken_up


def values_per_statistic(definition: Definition, shape: Shape) -> int:
    """How many values each of an operation's running statistics is taken of."""
    assert definition.statistics is not None
    x = ir.tensor("x", range(-len(shape), 0), len(shape))
    nodes = ir.topological(definition.statistics(x))
    found = [ir.reduction(n)[1] for n in nodes if n.op == "reduce" and n.attrs[0] == "variance"]
    return math.prod(shape[a] for axes in found[:1] for a in axes)


def _pad(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape


def broadcast(step: Step, name: str, running: Shape, shape: Shape) -> None:
    """Raise ArgumentError where an operand's shape does not broadcast with the value's."""
    if not broadcasts(running, shape):
        raise ArgumentError(
            f"{step.text}: operand {name!r} got shape {shape}, which does not broadcast with "
            f"the value's {running}; sizes must match from the last axis on, or be 1"
        )


def broadcasts(running: Shape, shape: Shape) -> bool:
    """Whether a tensor's shape broadcasts with a value's."""
    rank = max(len(running), len(shape))
    pairs = zip(_pad(running, rank), _pad(shape, rank), strict=True)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def crossed(
    step: Step, name: str, shape: Shape, running: Shape, *, is_kept: bool
) -> OtherAxesError:
    """The error for a tensor that would meet a value along other axes than it lies along."""
    if is_kept:
        return OtherAxesError(
            f"{step.text}: the kept value {name!r} of shape {shape} would meet a value of "
            f"shape {running} along other axes than it was kept with; where a step between them "
            "reduces, give it keepdim=True; a tensor that lies along two sets of axes has to be "
            "passed twice, under two names; else compile what stands behind as a chain of its own"
        )
    return OtherAxesError(
        f"{step.text}: operand {name!r} of shape {shape} is used along other axes by an "
        "earlier step; pass the tensor twice, and give the two steps operands of two names"
    )


def require_statistics(step: Step, definition: Definition, shape: Shape) -> None:
    """Raise ArgumentError where a step lacks running statistics that it needs, or its value has no
    channels, or in training one element in each.
    """
    given = [p for p in RUNNING if p in dict(step.operands)]
    is_training = definition.is_updating(dict(step.attributes))
    if len(given) == 1 or (not is_training and not given):
        why = "" if is_training else f", since {definition.training} is False"
        raise ArgumentError(
            f"{step.text}: got {' and '.join(given) or 'no running statistics'}, wanted "
            f"{' and '.join(RUNNING)}{why}"
        )
    if len(shape) < 2:
        raise ArgumentError(
            f"{step.text}: got a value of shape {shape}, wanted at least two axes: samples and "
            "channels"
        )
    if is_training and values_per_statistic(definition, shape) == 1:
        raise ArgumentError(
            f"{step.text}: got a value of shape {shape}, wanted more than one value for each "
            "statistic"
        )


def require_counter(step: Step, name: str, shape: Shape, dtype: str) -> None:
    """Raise ArgumentError where what counts batches is not one integer."""
    if shape != () or dtype != "int64":
        raise ArgumentError(
            f"{step.text}: operand {name!r} got shape {shape} of {dtype}, wanted one integer: a "
            "tensor of shape () of int64"
        )


def placed_along(
    step: Step, placement: str, name: str, running: Shape, shape: Shape | None
) -> ir.Extent:
    """The axes along which a per-channel, slope or trailing operand, or noise, lies; where shape is
    None, only those that the step normalises.
    """
    if placement == "noise":
        return frozenset(range(-len(running), 0))
    if placement == "channel_noise":
        return _samples_channels(step, running)
    if placement == "channel":
        assert shape is not None
        return _channel_extent(step, name, running, shape)
    if placement == "labels":
        assert shape is not None
        return _labelled_extent(step, name, running, shape)
    if placement == "slope":
        assert shape is not None
        return _slope_extent(step, name, running, shape)
    axes = _normalised_axes(step, running)
    return axes if shape is None else _trailing_extent(step, name, running, shape)


def _channel_extent(step: Step, name: str, running: Shape, shape: Shape) -> ir.Extent:
    axis = dict(step.attributes).get("axis", 1)
    assert isinstance(axis, int)
    if not -len(running) <= axis < len(running):
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted one with channels, as axis {axis}"
        )
    axis = axis if axis < 0 else axis - len(running)
    channels = running[axis]
    wanted = (1,) * (len(running) + axis) + (channels,) + (1,) * (-1 - axis)
    if shape != (channels,) and _pad(shape, len(running)) != wanted:
        raise ArgumentError(
            f"{step.text}: operand {name!r} got shape {shape}, wanted ({channels},) or {wanted}: "
            "one value for "
            f"each of the {channels} channels (axis {axis + len(running)}) of a value of shape "
            f"{running}"
        )
    return frozenset({axis})


def labels_shape(step: Step, shape: Shape, value: Value, atlas: Atlas, before: Shape) -> Shape:
    """The shape of labels: that of a value beside its classes, where they lie in the shape of the
    axes that its own were made of, or in that of all axes but one before they were seen as others.
    """
    rank = len(value.shape)
    axis = class_axis(rank, dict(step.attributes)) if rank else 0
    others = [a for a in range(-rank, 0) if a != axis]
    wanted = tuple(value.size(axis) for axis in others)
    made_of = tuple(atlas.sizes[a] for axis in others for a in atlas.resolve(value.axes[axis]))
    is_apt = shape == made_of or any(
        shape == (*before[:i], *before[i + 1 :]) and math.prod(shape) == math.prod(wanted)
        for i in range(len(before))
    )
    return wanted if is_apt else shape


def _labelled_extent(step: Step, name: str, running: Shape, shape: Shape) -> ir.Extent:
    if not running:
        raise ArgumentError(
            f"{step.text}: got a value of shape (), wanted one with classes along axis 1"
        )
    attributes, rank = dict(step.attributes), len(running)
    axis = class_axis(rank, attributes)
    others = [a for a in range(-rank, 0) if a != axis]
    wanted = tuple(running[a] for a in others)
    spread = tuple(running[a] if a in others else 1 for a in range(-rank, 0))
    if shape != wanted and not (shape == spread and "dim" in attributes):
        raise ArgumentError(
            f"{step.text}: operand {name!r} got shape {shape}, wanted {wanted}: one label for each "
            f"index of all axes but that of the {running[axis]} classes (axis "
            f"{rank + axis}) of a value of shape {running}"
        )
    return frozenset(others)


def _slope_extent(step: Step, name: str, running: Shape, shape: Shape) -> ir.Extent:
    if shape in ((), (1,)):
        return frozenset()
    channels = running[1] if len(running) > 1 else 1
    if shape != (channels,):
        raise ArgumentError(
            f"{step.text}: operand {name!r} got shape {shape}, wanted (1,) or ({channels},): one "
            f"value, or one for each of the {channels} channels (axis 1) of a value of shape "
            f"{running}"
        )
    return frozenset({1 - len(running)})


def _samples_channels(step: Step, running: Shape) -> ir.Extent:
    """The axes of samples and channels, where a channel is dropped as a whole."""
    assert step.definition is not None
    number = step.definition.channel_axes
    wanted = (number + 1, number + 2) if number else tuple(range(2, 6))
    if len(running) not in wanted:
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted {wanted[0]} to {wanted[-1]} "
            "axes, the last of which make up a channel"
        )
    is_batched = number in (0, 2) or len(running) == number + 2
    return frozenset({-len(running), 1 - len(running)} if is_batched else {-len(running)})


def _normalised_axes(step: Step, running: Shape) -> ir.Extent:
    """The axes that a normalising step reduces, checked against the value's shape."""
    attributes = dict(step.attributes)
    axis, wanted = attributes.get("axis"), attributes.get("normalized_shape")
    if isinstance(axis, int):
        axis = axis if axis < 0 else axis - len(running)
        if wanted not in (None, running[axis], (running[axis],)):
            raise ArgumentError(
                f"{step.text}: normalized_shape is {wanted}, but axis {axis} of a value of shape "
                f"{running} "
                f"has {running[axis]}; they must be equal"
            )
        return frozenset({axis})
    if not running:
        raise ArgumentError(
            f"{step.text}: got a value of shape (), wanted one with at least one axis to normalise"
        )
    sizes = (wanted,) if isinstance(wanted, int) else tuple(wanted or running[-1:])  # type: ignore[arg-type]
    if len(running) < len(sizes) or running[len(running) - len(sizes) :] != sizes:
        raise ArgumentError(
            f"{step.text}: normalized_shape is {sizes}, but the value's shape is {running}, whose "
            "last "
            f"{len(sizes)} axes are {running[-len(sizes) :]}; they must be equal"
        )
    return frozenset(range(-len(sizes), 0))


def _trailing_extent(step: Step, name: str, running: Shape, shape: Shape) -> ir.Extent:
    axes = _normalised_axes(step, running)
    ordered = sorted(axes)
    wanted = tuple(running[a] for a in ordered)
    spread = wanted + (1,) * (-1 - ordered[-1])
    if shape != wanted and _pad(shape, len(running)) != _pad(spread, len(running)):
        raise ArgumentError(
            f"{step.text}: operand {name!r} got shape {shape}, wanted {wanted}, the sizes of the "
            "axes that are "
            f"normalised in a value of shape {running}"
        )
    return axes


def windows_of(step: Step, definition: Definition, running: Shape) -> Windows | None:
    """The windows along each axis that a pooling step pools, checked against the value's shape;
    None where it reduces those axes as a whole.
    """
    number = definition.window_axes
    if len(running) not in (number + 1, number + 2):
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted {number + 1} or {number + 2} "
            "axes, "
            f"the last {number} of which are pooled"
        )
    lengths = running[-number:]
    if 0 in lengths:
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted elements along the axes that it "
            "pools"
        )
    found = step.windows(lengths)
    if found is None:
        return None
    for length, window in zip(lengths, found, strict=True):
        if windows_along(window, length) < 1:
            raise ArgumentError(
                f"{step.text}: a window of {tuple(map(size_of, found))} does not fit in a value of "
                f"shape {running}; the result would be empty"
            )
    return tuple(zip(range(-number, 0), found, strict=True))


def with_leftovers(windows: Windows, value: Value) -> Windows:
    """The same, as sliding ones where they leave elements over: which are told apart then."""
    sizes = [(value.size(axis), window) for axis, window in windows]
    if all(isinstance(window, int) and size % window == 0 for size, window in sizes):
        return windows
    return tuple((a, Slide(w, w) if isinstance(w, int) else w) for a, w in windows)


def pooled_shape(step: Step, definition: Definition, running: Shape) -> Shape:
    """The shape that a pooling step leaves a value of this one."""
    number = definition.window_axes
    windows = windows_of(step, definition, running)
    if windows is None:
        return (*running[:-number], *(1,) * number)
    return (*running[:-number], *(windows_along(w, running[axis]) for axis, w in windows))
