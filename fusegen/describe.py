"""A chain as source text without tensors: shapes and types are told, or assumed where they are not.

What a module depends on is decided here from plain data, by the rules that the runtime follows for
tensors; so the text is the one that a call on such tensors builds.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fusegen import ir
from fusegen.axes import Shape, Value
from fusegen.bound import Bound
from fusegen.codegen import Source
from fusegen.emission import source
from fusegen.errors import ArgumentError
from fusegen.fitting import holds_labels, pooled_shape, rearranged
from fusegen.holding import signature
from fusegen.joining import chosen_anew
from fusegen.ops import COUNTER, RUNNING, Chain, Step, lookup, nearest
from fusegen.ops.reducing import class_axis
from fusegen.program import Program, derivative, forward
from fusegen.promotion import FLOATING, INTEGERS
from fusegen.segments import Segment
from fusegen.selecting import at_places
from fusegen.signature import (
    Signature,
    element_types,
    result_shapes,
    with_derivative,
    with_gaps,
)
from fusegen.strides import dense_strides, lie_of
from fusegen.target import H200, ITEM_BYTES, TARGETS, Limits, code_name
from fusegen.typechecks import refuse_gradients
from fusegen.viewing import shape_behind

Kind = tuple[Shape, tuple[int, ...]]  # a tensor's shape; its axes, outermost in memory first
LAYOUTS = ("contiguous", "channels_last")
_FEWEST_AXES, _MOST_AXES = 4, 8
_ASSUMED_SIZES = (2, 3, 8, 10, 12, 12, 12, 12)


@dataclass(frozen=True)
class Situation:
    """What a chain is called with; shapes that are None or left out are assumed. And what the GPU
    has that it is called on. What is named in gaps, x or operands, is dense but for those.
    """

    shape: Shape | None = None
    operands: Mapping[str, Shape] = field(default_factory=dict)
    dtype: str = "float32"
    layout: str = "contiguous"
    limits: Limits = H200
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """What one segment is built from, and why the chain is cut before it."""

    segment: Segment
    bound: Bound
    programs: tuple[Program, ...]
    signature: Signature
    order_of_x: tuple[int, ...]  # the axes of what it begins with, outermost in memory first
    order: tuple[int, ...]  # of the graph's axes, as the kernels go
    # An input, and the result whose cotangent is its own, as it comes.
    passed: tuple[tuple[str, str], ...] = ()


def sources(chain: Chain, target: str, situation: Situation, *, grad: bool) -> tuple[Source, ...]:
    """The modules that a call builds: one for each segment of the chain.

    With grad they hold the forward that saves what its backward wants, and the backward for x and
    every operand. Raises ArgumentError for a situation that the chain does not fit, and
    UnsupportedError for gradients of a quantised result.
    """
    found = modules(chain, target, situation, grad=grad)
    if grad:
        refuse_gradients(chain, found[-1].bound.dtype)
    return tuple(source(m.segment.chain, m.programs, m.signature) for m in found)


def modules(chain: Chain, target: str, situation: Situation, *, grad: bool) -> tuple[Module, ...]:
    """What each module is made from; the same, before it is text.

    There is no backward where a result that is no floating-point number would be differentiated.
    """
    _require("target", target, TARGETS)
    _require("dtype", situation.dtype, (*FLOATING, *INTEGERS))
    _require("layout", situation.layout, LAYOUTS)
    for name in situation.gaps:
        _require("gaps", name, ("x", *chain.operands))
    shape, operands = assumed_shapes(chain, situation)
    dtype = situation.dtype
    types = {name: element_type(chain, name, dtype) for name in operands}
    given_kinds = {n: (s, types[n]) for n, s in operands.items()}
    order_of_x = axes_in_memory(shape, situation.layout)
    parts, bounds = chosen_anew(chain, (shape, dtype), given_kinds, target, order_of_x)
    kept: dict[str, Kind] = {n: (s, axes_in_memory(s, LAYOUTS[0])) for n, s in operands.items()}
    running: Kind = (shape, order_of_x)
    found: list[Module] = []
    for part, bound in zip(parts, bounds, strict=True):
        kept |= dict.fromkeys(part.before, running)
        types |= dict.fromkeys(part.before, dtype)
        running = running if part.source is None else kept[part.source]
        dtype = dtype if part.source is None else types[part.source]
        kept |= dict.fromkeys(part.entering, running)
        types |= dict.fromkeys(part.entering, dtype)
        is_training = grad and {bound.dtype, bounds[-1].dtype} <= {*FLOATING}
        order = bound.memory_order(running[1])
        program = forward(bound, is_training=is_training)
        input_count = len(program.graph.inputs)
        given = [dtype, *(types[operand.name] for operand in bound.operands)]
        found_types = element_types(program, bound, given)
        programs = [program]
        passed: tuple[tuple[str, str], ...] = ()
        if is_training:
            shapes = [running[0], *(kept[operand.name][0] for operand in bound.operands)]
            alike = list(zip(shapes, given, strict=True))
            given_shapes = result_shapes(bound)
            results = [(given_shapes.get(n), found_types[n]) for n in program.output_names]
            needs = range(input_count)
            backward = derivative(program, needs, program.results, alike, results)
            programs += [backward.program] if backward.targets else []
            inputs, outputs = program.input_names, program.output_names
            passed = tuple((inputs[i], outputs[result]) for i, result in backward.passed)
            found_types = with_derivative(program, backward, found_types)
        gaps = [code_name(n) for n in situation.gaps if n in part.chain.operands]
        gaps += ["x"] if "x" in situation.gaps and not found else []
        kinds = [running, *(kept[operand.name] for operand in bound.operands)]
        programs, pitched = _at_places(programs, kinds, found_types, bound, order, gaps)
        facts = (order, programs, found_types, bound, situation.limits)
        built_with = with_gaps(signature(target, *facts), programs, {*gaps, *pitched})
        made = (part, bound, tuple(programs), built_with, running[1], order, passed)
        found.append(Module(*made))
        running = (bound.result_shape, _order_behind(bound, order))
        dtype = bound.dtype
        kept |= dict.fromkeys(part.leaving, running)
        types |= dict.fromkeys(part.leaving, dtype)
    return tuple(found)


def _at_places(
    programs: list[Program],
    kinds: Sequence[Kind],
    dtypes: Mapping[str, str],
    bound: Bound,
    order: Sequence[int],
    gaps: Container[str],
) -> tuple[list[Program], list[str]]:
    """The programs as they are launched on such tensors, and those inputs that have gaps then, of
    others than are said to have some.
    """
    placed = [at_places(program) for program in programs]
    first, pitched = placed[0], []
    for i, (leaf, (shape, axes)) in enumerate(zip(first.graph.inputs, kinds, strict=True)):
        name, places = ir.name_of(leaf), first.places_of(i)
        if not places:
            continue
        kind = (shape, dense_strides(shape, axes), ITEM_BYTES[dtypes[name]])
        lie = lie_of(leaf.extent, places, kind, bound, order, may_have_gaps=True)
        if name in gaps or not lie.is_ready:
            return programs, []
        pitched += [name] if lie.pitch else []
    return placed, pitched


def is_mask(chain: Chain, operand: str) -> bool:
    """Whether an operand holds conditions: where the chain goes on with it, as far as the next step
    has no body for numbers.
    """
    followers = [after for step, after in pairwise(chain.steps) if step.taken_up == operand]
    is_condition = any(step.definition is not None and not step.body for step in followers)
    return is_condition or any(p.kind == "truth" for _, p in chain.uses(operand))


def has_gradient(chain: Chain, operand: str) -> bool:
    """Whether torch gives an operand a gradient, which conditions, types and running statistics
    have not, nor what says places along an axis, nor what a loss is told of classes.
    """
    uses = [(p, s.definition is not None and s.definition.is_loss) for s, p in chain.uses(operand)]
    is_told = any(p.kind == "index" or (loss and p.name.endswith("weight")) for p, loss in uses)
    is_statistic = bool(_parameters(chain, operand) & {*RUNNING, COUNTER})
    is_told = is_told or operand in chain.typed
    return not (is_told or is_statistic or is_mask(chain, operand))


def is_positive(chain: Chain, operand: str) -> bool:
    """Whether an operand is a variance."""
    return RUNNING[1] in _parameters(chain, operand)


def classes(bounds: Iterable[Bound], operand: str) -> int:
    """How many classes the labels of an operand tell apart, where a chain's segments are bound so;
    0 of other operands.
    """
    for bound in bounds:
        for step, place in zip(bound.chain.steps, bound.places, strict=True):
            if place is None or not holds_labels(bound.chain, operand):
                continue
            if operand in dict(step.operands).values():
                shape = tuple(math.prod(bound.domain[a] for a in axes) for axes in place.axes)
                return shape[class_axis(len(shape), dict(step.attributes))]
    return 0


def _parameters(chain: Chain, operand: str) -> set[str]:
    return {parameter.name for _, parameter in chain.uses(operand)}


def element_type(chain: Chain, name: str, dtype: str) -> str:
    """An operand's element type: x's, of integers float32, but for conditions, labels and seeds."""
    is_counter = any(parameter.name == COUNTER for _, parameter in chain.uses(name))
    is_whole = is_counter or name in chain.drawn or holds_labels(chain, name)
    dtype = dtype if dtype in FLOATING else "float32"
    return "int64" if is_whole else "bool" if is_mask(chain, name) else dtype


def _require(what: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ArgumentError(f"argument {what!r}: got {value!r}, wanted {' or '.join(allowed)}")


# The rules of a signature, for tensors and for plain data alike.


def axes_in_memory(shape: Shape, layout: str) -> tuple[int, ...]:
    """The axes, outermost first, of a dense x in a layout; axes of size one move nothing."""
    rank = len(shape)
    logical = tuple(range(-rank, 0))
    channels_last = (-rank, *range(-rank + 2, 0), -rank + 1)
    if layout == "contiguous" or rank < 3:
        return logical
    moved = [axis for axis in channels_last if shape[axis] != 1]
    return logical if moved == sorted(moved) else channels_last


def _order_behind(bound: Bound, order: Sequence[int]) -> tuple[int, ...]:
    """The axes of a result, outermost in memory first; its axes of size one move nothing."""
    shape = bound.result_shape
    found = bound.order_of_result(order)
    moved = [axis for axis in found or () if shape[axis] != 1]
    for layout in LAYOUTS:
        known = axes_in_memory(shape, layout)
        if found is None or moved == [axis for axis in known if shape[axis] != 1]:
            return known
    assert found is not None
    return found


# The shapes of a chain of which only the text is known.


def named_shapes(pairs: Iterable[tuple[str, Shape]]) -> dict[str, Shape]:
    """Shapes by name. Raises ArgumentError where one is given twice."""
    found: dict[str, Shape] = {}
    for name, shape in pairs:
        if name in found:
            raise ArgumentError(f"operand {name!r} is given two shapes, {found[name]} and {shape}")
        found[name] = shape
    return found


def assumed_shapes(chain: Chain, situation: Situation) -> tuple[Shape, dict[str, Shape]]:
    """x's shape and every operand's: as given, else the plainest that the chain accepts.

    That is one value a channel for a per-channel operand, the normalised axes for layernorm's, and
    for any other the shape of the value that it meets.
    """
    for name in situation.operands:
        if name not in chain.operands:
            guess = nearest(name, chain.operands)
            known = f"did you mean {guess!r}?" if guess else f"it takes {_listed(chain.operands)}"
            raise ArgumentError(f"the chain {chain.text!r} has no operand {name!r}; {known}")
    shape = _assumed_shape(chain) if situation.shape is None else situation.shape
    found = dict(situation.operands)
    running = shape
    kept: dict[str, Shape] = {}
    for step in chain.steps:
        if step.is_structural:
            if step.is_naming:
                kept[step.names[0]] = running
            if step.taken_up is not None:
                running = found.setdefault(step.taken_up, running)
            else:
                running = kept.get(step.names[0], running)
            continue
        definition = lookup(step.op)
        for parameter, name in step.operands:
            if name not in chain.operands:
                is_type = definition.parameter(parameter).is_type
                running = running if is_type else _broadcast(running, kept.get(name, running))
                continue
            if parameter == COUNTER:
                found.setdefault(name, ())
            if name not in found:
                is_drawn = name in chain.drawn
                found[name] = (1,) if is_drawn else _assumed_operand(chain, name, running)
            if definition.parameter(parameter).broadcasts:
                running = _broadcast(running, found[name])
        if definition.is_view:
            running = shape_behind(step, running)
        elif definition.window_axes:
            running = pooled_shape(step, definition, running)
        elif definition.shaping != "same":
            value = Value(running, ((),) * len(running), ((),) * len(running))
            running = rearranged(step, definition, value).shape
    return shape, {name: found[name] for name in chain.operands}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _broadcast(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return tuple(n if m == 1 else m for m, n in pairs)


def _assumed_shape(chain: Chain) -> Shape:
    rank = _FEWEST_AXES
    channels = _ASSUMED_SIZES[1]
    trailing: Shape = ()
    windows: Shape = ()
    viewed: list[Step] = []
    for step in chain.steps:
        attributes = dict(step.attributes)
        named = (attributes.get("axis"), *_sizes(attributes.get("dim")))
        for axis in named:
            if isinstance(axis, int):
                rank = max(rank, axis + 1 if axis >= 0 else -axis)
        definition = None if step.is_structural else lookup(step.op)
        if definition is not None and definition.groups:
            channels = math.lcm(channels, 2 * _sizes(attributes[definition.groups])[0])
        trailing = max(trailing, _sizes(attributes.get("normalized_shape")), key=len)
        pooled = 0 if definition is None else definition.window_axes
        if definition is not None and definition.is_view:
            viewed.append(step)
        if pooled:
            size = _sizes(attributes.get("kernel_size"))
            windows = size * pooled if len(size) == 1 else size
            rank = pooled + 2
    rank = min(max(rank, len(trailing)), _MOST_AXES)  # bind tells of an axis that is out of range
    sizes = list(_ASSUMED_SIZES[:rank])
    sizes[1] = channels
    for i, window in enumerate(reversed(windows), start=1):
        sizes[-i] = max(sizes[-i], window + 1)
    shape = (*sizes[: rank - len(trailing)], *trailing)
    for step in viewed:
        shape = _divisible(step, shape)
    return shape


def _divisible(step: Step, shape: Shape) -> Shape:
    """A shape that a view step fits, where it is the first; bind tells of one that it does not."""
    attributes = dict(step.attributes)
    wanted = _sizes(attributes.get("sizes", attributes.get("shape")))
    known, dim = math.prod(size for size in wanted if size != -1), attributes.get("dim", 0)
    if not wanted or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return shape
    if "shape" in attributes:
        if -1 not in wanted:
            return wanted
        return shape if math.prod(shape) % known == 0 else (shape[0] * known, *shape[1:])
    dim %= len(shape)
    size = known if -1 not in wanted else math.lcm(shape[dim], known)
    return (*shape[:dim], size, *shape[dim + 1 :])


def _sizes(attribute: object) -> Shape:
    if isinstance(attribute, tuple):
        return attribute
    return (attribute,) if isinstance(attribute, int) else ()


def _assumed_operand(chain: Chain, name: str, running: Shape) -> Shape:
    uses = chain.uses(name)
    placed = [step for step, p in uses if not (p.broadcasts or p.is_type)]
    if not placed:
        return running
    if any(parameter.placement == "slope" for _, parameter in uses):
        return running[1:2] or (1,)
    if holds_labels(chain, name):
        of_classes = len(running) + class_axis(len(running), dict(placed[0].attributes))
        return running[:of_classes] + running[of_classes + 1 :]
    attributes = dict(placed[0].attributes)
    axis = attributes.get("axis", None if "normalized_shape" in attributes else 1)
    if not isinstance(axis, int):
        return _sizes(attributes.get("normalized_shape")) or running[-1:]
    if not -len(running) <= axis < len(running):
        return ()  # bind tells of it
    # Where another step broadcasts the same operand, ones keep it along the same axis.
    behind = len(running[axis:]) - 1 if len(placed) < len(uses) else 0
    return (running[axis], *(1,) * behind)
