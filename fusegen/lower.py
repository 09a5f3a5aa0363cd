"""A chain meets shapes: every operand's axes are found, mistakes are told, and the op bodies are
run on expressions.

`bind` needs only shapes and element types, no tensors, so a chain can be checked, printed and
scheduled on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fusegen import ir
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir import Expr, Graph
from fusegen.ops import Chain, Definition, Parameter, Step
from fusegen.pooled import Shape, pooled, pooled_axes, unpooled
from fusegen.target import code_name
from fusegen.windowing import Slide, Window

FLOATING = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Operand:
    """How one operand lies on the chain's axes."""

    name: str
    extent: ir.Extent
    shape: Shape  # over the domain's axes, 1 where it does not vary
    rank: int  # of the values it first meets: axes counted from the front are counted among these
    is_pooled: bool = False  # whether it first meets a value that has been pooled
    is_noise: bool = False  # whether it is drawn


@dataclass(frozen=True)
class Bound:
    """A chain with everything that shapes decide: what lower() needs, and the result's shape and
    type.
    """

    chain: Chain
    domain: Shape  # the shape that every value broadcasts to, before pooling
    x: Operand
    operands: tuple[Operand, ...]
    dtype: str  # of the result, as eager promotes
    windows: tuple[tuple[int, Window], ...]  # (axis, windows), of a pooling step
    collapsed: ir.Extent = frozenset()  # the axes that a pooling step reduces to one value

    @property
    def result_shape(self) -> Shape:
        """The shape of the chain's result."""
        return pooled(self.domain, self.windows, self.collapsed)

    @property
    def pattern(self) -> tuple[object, ...]:
        """All that lower() depends on: equal patterns give equal graphs."""
        return (
            len(self.domain),
            tuple((o.extent, o.rank, o.is_pooled, o.is_noise) for o in (self.x, *self.operands)),
            self.windows,
            self.collapsed,
        )


@dataclass(frozen=True)
class Mark:
    """A node worth a name in the generated code: the result of a step, or its cotangent, under a
    comment.
    """

    node: Expr
    name: str
    comment: str


def remarked(marks: Iterable[Mark], new: Mapping[Expr, Expr]) -> tuple[Mark, ...]:
    """The marks on the nodes that theirs have become."""
    return tuple(Mark(new[m.node], m.name, m.comment) for m in marks if m.node in new)


@dataclass(frozen=True)
class Lowered:
    """A chain as a graph from x and the operands to out, with a mark on each step's result."""

    graph: Graph
    marks: tuple[Mark, ...]


def bind(chain: Chain, x: tuple[Shape, str], operands: Mapping[str, tuple[Shape, str]]) -> Bound:
    """Check shapes and element types of a call step by step, as eager would meet them.

    x and operands are (shape, dtype name). Raises ArgumentError with the argument, what it got and
    what was wanted.
    """
    _check_floating("x", x[1])
    drawn = {*chain.drawn}
    for name, (_, dtype) in operands.items():
        if name not in drawn:
            _check_floating(name, dtype)
    running, dtype = x
    found: dict[str, dict[int, int]] = {}  # the size along each axis that an operand varies along
    ranks: dict[str, int] = {}
    kept: dict[str, Shape] = {}
    windows: tuple[tuple[int, Window], ...] = ()
    collapsed: ir.Extent = frozenset()
    whole: Shape | None = None  # the shape that is pooled
    before: set[str] = set()  # the operands that are met before
    for step in chain.steps:
        if step.op == "keep":
            kept[step.names[0]] = running
            continue
        if step.op == "recall":
            running = kept[step.names[0]]
            continue
        definition = step.definition
        assert definition is not None
        _check_axis(step, running)
        for parameter, name in step.operands:
            if name in kept:
                running = _broadcast(step, name, running, kept[name])
                continue
            shape, operand_dtype = operands[name]
            extent = _extent(step, definition.parameter(parameter), name, running, shape)
            is_broadcast = definition.parameter(parameter).placement == "broadcast"
            sizes = {a: shape[a] if is_broadcast else running[a] for a in extent}
            if name in found:
                sizes = _common(step, name, shape, found[name], sizes)
            found[name] = sizes
            ranks.setdefault(name, len(shape) if is_broadcast else len(running))
            if name in drawn:
                continue
            if is_broadcast:
                running = _broadcast(step, name, running, shape)
            dtype = _promote(step, definition, name, dtype, running, operand_dtype, shape)
        if "normalized_shape" in dict(step.attributes):
            _normalised_axes(step, running)
        if definition.window_axes:
            windows, collapsed = pooled_axes(step, definition, running)
            whole, before = running, {*found}
            running = pooled(running, windows, collapsed)
    domain = running
    if whole is not None:
        domain = unpooled(chain.text, running, whole, windows, collapsed)
    places = [_place("x", {axis: x[0][axis] for axis in range(-len(x[0]), 0)}, len(x[0]), domain)]
    for name in chain.operands:
        is_pooled = whole is not None and name not in before
        place = _place(name, found[name], ranks[name], running if is_pooled else domain)
        places.append(replace(place, is_pooled=is_pooled, is_noise=name in drawn))
    return Bound(chain, domain, places[0], tuple(places[1:]), dtype, windows, collapsed)


def _common(
    step: Step, name: str, shape: Shape, earlier: Mapping[int, int], sizes: Mapping[int, int]
) -> dict[int, int]:
    """The axes of both uses of an operand; an axis of one value alone may be in either."""
    if {a: n for a, n in earlier.items() if n != 1} != {a: n for a, n in sizes.items() if n != 1}:
        raise ArgumentError(
            f"{step.text}: operand {name!r} of shape {shape} is used along other axes by an "
            "earlier step; give the two steps operands of different names"
        )
    return {a: n for a, n in earlier.items() if a in sizes}


def _place(name: str, sizes: Mapping[int, int], rank: int, domain: Shape) -> Operand:
    if any(-a > len(domain) or n not in (1, domain[a]) for a, n in sizes.items()):
        raise ArgumentError(
            f"operand {name!r} is wider than the result, whose shape before pooling is {domain}: a "
            "recall drops the steps that use it; leave them out"
        )
    # Where a later step widens an axis of size one, its only value is the same all along it.
    extent = frozenset(a for a, n in sizes.items() if n != 1 or domain[a] == 1)
    shape = tuple(size if i - len(domain) in extent else 1 for i, size in enumerate(domain))
    return Operand(name, extent, shape, rank)


def _pad(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape


def _check_floating(name: str, dtype: str) -> None:
    if dtype not in FLOATING:
        raise ArgumentError(
            f"argument {name!r}: got a tensor of {dtype}, wanted one of {', '.join(FLOATING)}; "
            f"convert it first, for example {name}.float()"
        )


def _check_axis(step: Step, running: Shape) -> None:
    axis = dict(step.attributes).get("axis")
    if isinstance(axis, int) and not -len(running) <= axis < len(running):
        raise ArgumentError(
            f"{step.text}: axis {axis} is out of range for a tensor of shape {running} "
            f"({len(running)} axes)"
        )


def _broadcast(step: Step, name: str, running: Shape, shape: Shape) -> Shape:
    rank = max(len(running), len(shape))
    sizes = []
    for a, b in zip(_pad(running, rank), _pad(shape, rank), strict=True):
        if a != b and 1 not in (a, b):
            raise ArgumentError(
                f"{step.text}: operand {name!r} got shape {shape}, which does not broadcast with "
                "the value's "
                f"{running}; sizes must match from the last axis on, or be 1"
            )
        sizes.append(b if a == 1 else a)
    return tuple(sizes)


def _extent(step: Step, parameter: Parameter, name: str, running: Shape, shape: Shape) -> ir.Extent:
    if parameter.placement == "channel":
        return _channel_extent(step, name, running, shape)
    if parameter.placement == "trailing":
        return _trailing_extent(step, name, running, shape)
    if parameter.placement == "noise":
        return frozenset(range(-len(running), 0))
    if parameter.placement == "channel_noise":
        return _samples_channels(step, running)
    if shape == running:
        return frozenset(range(-len(shape), 0))
    return frozenset(axis for axis in range(-len(shape), 0) if shape[axis] != 1)


def _channel_extent(step: Step, name: str, running: Shape, shape: Shape) -> ir.Extent:
    axis = dict(step.attributes).get("axis")
    assert isinstance(axis, int)
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


_WIDTH = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}


def promote(a: str, b: str) -> str:
    """The element type that torch promotes two floating types to."""
    if a == b:
        return a
    if _WIDTH[a] == _WIDTH[b]:
        return "float32"
    return max(a, b, key=_WIDTH.__getitem__)


def _promote(
    step: Step,
    definition: Definition,
    name: str,
    dtype: str,
    running: Shape,
    other: str,
    shape: Shape,
) -> str:
    if definition.same_dtype and other != dtype:
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {other} but the value it meets is {dtype}, a mix "
            "that torch "
            f"refuses here; convert one of them, for example {name}.to(torch.{dtype})"
        )
    if not shape and running:
        return dtype  # a tensor without axes does not widen one that has some
    if shape and not running:
        return other
    return promote(dtype, other)


def lower(bound: Bound) -> Lowered:
    """Run the op bodies: the graph from x and the operands to y."""
    twin = {a: ir.SLIDING - a if isinstance(w, Slide) else -a for a, w in bound.windows}

    def leaf(name: str, operand: Operand) -> Expr:
        twins = {t for a, t in twin.items() if a in operand.extent and not operand.is_pooled}
        kind: ir.Kind = "noise" if operand.is_noise else "number"
        return ir.tensor(name, operand.extent | twins, operand.rank, kind)

    x = leaf("x", bound.x)
    tensors = {operand.name: leaf(code_name(operand.name), operand) for operand in bound.operands}
    running, kept = x, {}
    marks: list[Mark] = []
    for step in bound.chain.steps:
        if step.op == "keep":
            kept[step.names[0]] = running
            continue
        if step.op == "recall":
            running = kept[step.names[0]]
            continue
        named = {p: kept.get(name, tensors.get(name)) for p, name in step.operands}
        running = _run_body(step, running, named)
        marks.append(Mark(running, f"after_{step.op}", step.text))
    if running.kind != "number":
        raise UnsupportedError(
            f"{bound.chain.text}: the chain ends in a condition, wanted numbers; end it with "
            "where(a, b), for example"
        )
    inputs = (x, *tensors.values())
    return Lowered(Graph(inputs, (("out", running),)), tuple(marks))


def _run_body(step: Step, running: Expr, operands: Mapping[str, Expr | None]) -> Expr:
    assert step.definition is not None
    try:
        return step.definition.function(running, **operands, **dict(step.attributes))
    except TypeError as error:
        raise ArgumentError(f"{step.text}: its body does not work here: {error}") from error
