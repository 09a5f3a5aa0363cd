"""A chain meets shapes: every operand's axes are found, mistakes are told, and the op bodies are
run on expressions.

`bind` needs only shapes and element types, no tensors, so a chain can be checked, printed and
scheduled on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen import ir
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir import Expr, Graph
from fusegen.ops import Chain, Definition, Parameter, Step
from fusegen.promotion import (
    as_wanted,
    check_element_type,
    check_mask,
    check_not_quantised,
    check_same_type,
    kind_of,
    result_type,
    run_body,
)
from fusegen.target import code_name

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """How one operand lies on the chain's axes."""

    name: str
    extent: ir.Extent
    shape: Shape  # over the domain's axes, 1 where it does not vary
    rank: int  # of the values it first meets: axes counted from the front are counted among these
    kind: ir.Kind = "number"  # or "truth", of a tensor of bool


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
    windows: tuple[tuple[int, int], ...]  # (axis, window size), of a pooling last step

    @property
    def result_shape(self) -> Shape:
        """The shape of the chain's result."""
        sizes = list(self.domain)
        for axis, window in self.windows:
            sizes[axis] //= window
        return tuple(sizes)

    @property
    def pattern(self) -> tuple[object, ...]:
        """All that lower() depends on: equal patterns give equal graphs."""
        return (
            len(self.domain),
            tuple((o.extent, o.rank, o.kind) for o in (self.x, *self.operands)),
            self.windows,
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


def stages(chain: Chain) -> tuple[Chain, ...]:
    """The chain, cut before a pooling step that follows a reduction: its windows must not reach
    into the statistics.
    """
    pooling = [i for i, step in enumerate(chain.steps) if _pools(step)]
    if not pooling:
        return (chain,)
    if pooling != [len(chain.steps) - 1]:
        text = chain.steps[pooling[0]].text
        raise UnsupportedError(
            f"{text}: pooling must be the last step of a chain; compile what follows as a chain "
            "of its own"
        )
    before = chain.steps[:-1]
    if any(_is_reducing(step) for step in before):
        return Chain(before), Chain(chain.steps[-1:])
    return (chain,)


def _pools(step: Step) -> bool:
    return step.definition is not None and step.definition.window_axes > 0


def _is_reducing(step: Step) -> bool:
    if step.definition is None:
        return False
    x = ir.tensor("x", range(-5, 0), 5)
    tensors = {
        name: ir.tensor(f"operand {name}", range(-5, 0), 5, step.definition.parameter(name).kind)
        for name, _ in step.operands
    }
    try:
        body = step.definition.function(x, **tensors, **dict(step.attributes))
    except TypeError:  # a condition that meets a number here: no reduction has one
        return False
    return any(node.op == "reduce" for node in ir.topological([body]))


def bind(chain: Chain, x: tuple[Shape, str], operands: Mapping[str, tuple[Shape, str]]) -> Bound:
    """Check shapes and element types of a call step by step, as eager would meet them.

    x and operands are (shape, dtype name). Raises ArgumentError with the argument, what it got and
    what was wanted.
    """
    for name, (_, dtype) in {"x": x, **operands}.items():
        check_element_type(name, dtype)
    running, dtype = x
    found: dict[str, dict[int, int]] = {}  # the size along each axis that an operand varies along
    ranks: dict[str, int] = {}
    kept: dict[str, tuple[Shape, str]] = {}
    windows: tuple[tuple[int, int], ...] = ()
    for step in chain.steps:
        check_not_quantised(step, dtype)
        if step.op == "keep":
            kept[step.names[0]] = (running, dtype)
            continue
        if step.op == "recall":
            running, dtype = kept[step.names[0]]
            continue
        definition = step.definition
        assert definition is not None
        _check_axis(step, running)
        before = (running, dtype)
        met: dict[str, tuple[Shape, str]] = {}
        for parameter, name in step.operands:
            met[parameter] = kept[name] if name in kept else operands[name]
            if definition.parameter(parameter).kind == "truth":
                check_mask(step, name, met[parameter][1])
            if name in kept:
                running = _broadcast(step, name, running, kept[name][0])
                continue
            shape, operand_dtype = operands[name]
            extent = _extent(step, definition.parameter(parameter), name, running, shape)
            is_broadcast = definition.parameter(parameter).broadcasts
            sizes = {a: shape[a] if is_broadcast else running[a] for a in extent}
            if name in found:
                sizes = _common(step, name, shape, found[name], sizes)
            found[name] = sizes
            ranks.setdefault(name, len(shape) if is_broadcast else len(running))
            if is_broadcast:
                running = _broadcast(step, name, running, shape)
            if definition.same_dtype:
                check_same_type(step, name, dtype, operand_dtype)
        if "normalized_shape" in dict(step.attributes):
            _normalised_axes(step, running)
        if definition.window_axes:
            windows = _windows(step, definition, running)
        is_alone = definition.same_dtype and before[1] != "bool"
        dtype = dtype if is_alone else result_type(step, before, met)
    domain = running
    return Bound(
        chain,
        domain,
        _place("x", {axis: x[0][axis] for axis in range(-len(x[0]), 0)}, len(x[0]), domain, x[1]),
        tuple(
            _place(name, found[name], ranks[name], domain, operands[name][1])
            for name in chain.operands
        ),
        dtype,
        windows,
    )


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


def _place(name: str, sizes: Mapping[int, int], rank: int, domain: Shape, dtype: str) -> Operand:
    if any(-a > len(domain) or n not in (1, domain[a]) for a, n in sizes.items()):
        raise ArgumentError(
            f"operand {name!r} is wider than the result, whose shape before pooling is {domain}: a "
            "recall drops the steps that use it; leave them out"
        )
    # Where a later step widens an axis of size one, its only value is the same all along it.
    extent = frozenset(a for a, n in sizes.items() if n != 1 or domain[a] == 1)
    shape = tuple(size if i - len(domain) in extent else 1 for i, size in enumerate(domain))
    return Operand(name, extent, shape, rank, kind_of(dtype))


def _pad(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape


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
    if parameter.placement == "slope":
        return _slope_extent(step, name, running, shape)
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


def _windows(step: Step, definition: Definition, running: Shape) -> tuple[tuple[int, int], ...]:
    number = definition.window_axes
    if len(running) not in (number + 1, number + 2):
        raise ArgumentError(
            f"{step.text}: got a value of shape {running}, wanted {number + 1} or {number + 2} "
            "axes, "
            f"the last {number} of which are pooled"
        )
    size = dict(step.attributes)["kernel_size"]
    sizes: Sequence[int] = (size,) * number if isinstance(size, int) else size  # type: ignore[assignment]
    for axis, window in zip(range(-number, 0), sizes, strict=True):
        if running[axis] < window:
            raise ArgumentError(
                f"{step.text}: a window of {tuple(sizes)} does not fit in a value of shape "
                f"{running}; "
                f"the result would be empty"
            )
    return tuple(zip(range(-number, 0), sizes, strict=True))


def lower(bound: Bound) -> Lowered:
    """Run the op bodies: the graph from x and the operands to y."""
    pooled = [axis for axis, _ in bound.windows]

    def leaf(name: str, operand: Operand) -> Expr:
        twins = {-axis for axis in pooled if axis in operand.extent}
        return ir.tensor(name, operand.extent | twins, operand.rank, operand.kind)

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
        named = {p: as_wanted(step, p, operand) for p, operand in named.items()}
        running = run_body(step, running, named)
        marks.append(Mark(running, f"after_{step.op}", step.text))
    if running.kind != "number":
        raise UnsupportedError(
            f"{bound.chain.text}: the chain ends in a condition, wanted numbers; end it with "
            "where(a, b), for example"
        )
    inputs = (x, *tensors.values())
    return Lowered(Graph(inputs, (("out", running),)), tuple(marks))
