"""A chain meets shapes: every operand's axes are found and mistakes are told.

Only shapes and element types are needed, no tensors, so a chain can be checked, printed and
scheduled on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegen import ir
from fusegen.axes import Atlas, Axes, CrossedAxesError, Shape, Value, flat
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.fitting import (
    broadcast,
    check_floating,
    placed_along,
    promoted,
    rearranged,
    require_axis,
    values_per_statistic,
    windows_of,
)
from fusegen.ops import COUNTER, RUNNING, Chain, Definition, Step
from fusegen.windowing import Window, windows_along

Kinds = Mapping[str, tuple[Shape, str]]


@dataclass(frozen=True)
class Operand:
    """How one operand lies on the graph's axes."""

    name: str
    extent: ir.Extent
    is_pooled: bool = False  # whether it first meets a value that has been pooled
    is_noise: bool = False  # whether it is drawn


@dataclass(frozen=True)
class Place:
    """Where a step's values lie: for each axis that its body sees, the graph's axes.

    axes are those of the value that the step works on, after its operands have widened it; x and
    operands (by parameter) are lined up with them from the end.
    """

    axes: Axes
    x: Axes
    operands: tuple[tuple[str, Axes], ...]
    dtype: str  # of the value before the step, where the step asks for it; else nothing


@dataclass(frozen=True)
class Update:
    """A step that updates running statistics: the names of its tensors, by parameter, and the
    share of the new in them; None where that is one part in num_batches_tracked.
    """

    step: int
    tensors: tuple[tuple[str, str], ...]
    momentum: float | None


@dataclass(frozen=True)
class Bound:
    """A chain with everything that shapes decide: what lower() needs, and the result's shape and
    type.
    """

    chain: Chain
    domain: Shape  # the size of each of the graph's axes, before pooling
    x: Operand
    operands: tuple[Operand, ...]  # those that are read, in the chain's order
    dtype: str  # of the result, as eager promotes
    windows: tuple[tuple[int, Window], ...]  # (axis, windows), of a pooling step
    places: tuple[Place | None, ...]  # by step; None for those that only name a value
    slots: Axes  # the graph's axes in the place of each of x's
    result: Axes
    result_shape: Shape
    updates: tuple[Update, ...] = ()

    @property
    def pattern(self) -> tuple[object, ...]:
        """All that lower() depends on: equal patterns give equal graphs."""
        lie = tuple((o.extent, o.is_pooled, o.is_noise) for o in (self.x, *self.operands))
        return len(self.domain), lie, self.windows, self.places, self.result

    def memory_order(self, order_of_x: Sequence[int] | None) -> tuple[int, ...]:
        """The graph's axes, outermost in memory first, from x's; as they are counted where x, or
        what is known of its order, does not say.
        """
        logical = tuple(range(-len(self.domain), 0))
        order = tuple(a for axis in order_of_x or () for a in self.slots[axis])
        return order if sorted(order) == list(logical) else logical


def bind(chain: Chain, x: tuple[Shape, str], operands: Kinds) -> Bound:
    """Check shapes and element types of a call step by step, as eager would meet them.

    x and operands are (shape, dtype name). Raises ArgumentError with the argument, what it got and
    what was wanted.
    """
    check_floating("x", x[1])
    for name, (_, dtype) in operands.items():
        is_counter = any(parameter.name == COUNTER for _, parameter in chain.uses(name))
        if not is_counter and name not in chain.drawn:
            check_floating(name, dtype)
    return _Binding(chain, x, operands).bound()


class _Binding:
    """A chain, as far as it is bound."""

    def __init__(self, chain: Chain, x: tuple[Shape, str], operands: Kinds) -> None:
        self.chain = chain
        self.atlas = Atlas(x[0])
        self.running, self.dtype = self.atlas.x, x[1]
        self.given = operands
        self.kept: dict[str, Value] = {}
        self.found: dict[str, Axes] = {}
        self.places: list[Place | None] = []
        self.windows: dict[int, Window] = {}  # of each axis that is pooled
        self.unpooled: set[str] = set()  # the operands that are met before the pooling
        self.updates: list[Update] = []

    def bound(self) -> Bound:
        for step in self.chain.steps:
            self.places.append(None if self._names_only(step) else self._step(step))
        atlas, result = self.atlas, self.running
        windows = {self._numbers((axis,))[0]: window for axis, window in self.windows.items()}
        read = [name for name in self.chain.operands if name in self.found]
        domain = tuple(atlas.sizes[i] for i in atlas.order)
        if 0 in domain and 0 not in result.shape:
            raise ArgumentError(
                f"{self.chain.text}: reduces an axis without elements of a value of shape "
                f"{self.atlas.x.shape}; leave such tensors out"
            )
        return Bound(
            self.chain,
            domain,
            Operand("x", frozenset(self._numbers(flat(atlas.x.axes)))),
            tuple(map(self._lying, read)),
            self.dtype,
            tuple(sorted(windows.items())),
            tuple(None if place is None else self._settled(place) for place in self.places),
            atlas.memory_order(),
            self._all_numbers(result.axes),
            result.shape,
            tuple(self.updates),
        )

    def _lying(self, name: str) -> Operand:
        return Operand(
            name,
            frozenset(self._numbers(flat(self.found[name]))),
            is_pooled=bool(self.windows) and name not in self.unpooled,
            is_noise=name in self.chain.drawn,
        )

    def _numbers(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return self.atlas.numbers(axes)

    def _all_numbers(self, axes: Axes) -> Axes:
        return tuple(map(self._numbers, axes))

    def _settled(self, place: Place) -> Place:
        operands = tuple((name, self._all_numbers(axes)) for name, axes in place.operands)
        axes, x = self._all_numbers(place.axes), self._all_numbers(place.x)
        return Place(axes, x, operands, place.dtype)

    def _names_only(self, step: Step) -> bool:
        """Whether a step only names a value or takes up a named one, which is then done."""
        if step.op == "keep":
            self.kept[step.names[0]] = self.running
        elif step.op == "recall":
            self.running = self.kept[step.names[0]]
        return step.is_structural

    def _step(self, step: Step) -> Place:
        definition = step.definition
        assert definition is not None
        attributes = dict(step.attributes)
        require_axis(step, self.running.shape)
        before, dtype = self.running, self.dtype
        aligned: list[tuple[str, Axes]] = []
        updated: list[tuple[str, str]] = []
        for parameter, name in step.operands:
            if definition.is_updated(parameter, attributes):
                updated.append((parameter, name))
            else:
                aligned.append((parameter, self._operand(step, definition, parameter, name)))
        if "normalized_shape" in attributes:
            placed_along(step, "trailing", "", self.running.shape, None)
        if definition.statistics is not None:
            self._update(step, definition, updated)
        axes, x = self.running.axes, before.axes
        if definition.groups:
            axes, x, aligned = self._grouped(step, definition, aligned)
        if definition.window_axes:
            axes = x = self._pool(step, definition)
        else:
            self.running = rearranged(step, definition, self.running)
        return Place(axes, x, tuple(aligned), dtype if attributes.get("eps", 0.0) is None else "")

    def _pool(self, step: Step, definition: Definition) -> Axes:
        """Pool the running value; the axes of what is pooled."""
        windows = windows_of(step, definition, self.running.shape)
        rank = len(self.running.shape)
        if windows is None:
            axes = self.running.axes
            whole = range(rank - definition.window_axes, rank)
            self.running = self.running.rearranged(range(rank), whole)
            return axes
        assert not self.windows, "a segment pools once"
        sizes = {}
        for axis, window in windows:
            try:
                self.running, place = self.atlas.whole(self.running, axis)
            except CrossedAxesError:
                raise UnsupportedError(
                    f"{step.text}: pools an axis that an earlier step splits into groups; compile "
                    "the pooling and what follows as a chain of its own"
                ) from None
            self.windows[place] = window
            sizes[axis] = windows_along(window, self.running.size(axis))
        self.unpooled = set(self.found)
        axes = self.running.axes
        self.running = self.running.resized(sizes)
        return axes

    def _operand(self, step: Step, definition: Definition, parameter: str, name: str) -> Axes:
        """The axes of one operand, lined up with those of the running value."""
        if name in self.kept:
            value = self.kept[name]
            broadcast(step, name, self.running.shape, value.shape)
            return self._meet(step, name, value.shape, value.axes)
        shape, dtype = self.given[name]
        placement = definition.parameter(parameter).placement
        if placement == "broadcast":
            broadcast(step, name, self.running.shape, shape)
            axes = self.found[name] = self._meet(step, name, shape, self.found.get(name))
        else:
            axes = self._placed(step, placement, name, shape)
        if name in self.chain.drawn:
            return axes
        running = self.running.shape
        self.dtype = promoted(step, definition, name, self.dtype, running, dtype, shape)
        return axes

    def _meet(self, step: Step, name: str, shape: Shape, known: Axes | None) -> Axes:
        before = self.running
        pooled = [a for a in range(-len(before.shape), 0) if self._is_pooled(before.along(a))]
        if any(before.size(a) == 1 < shape[a] for a in pooled if -a <= len(shape)):
            raise UnsupportedError(
                f"{self.chain.text}: what follows the pooling widens its result of shape "
                f"{before.shape} by {name!r} of shape {shape}; compile what follows as a chain of "
                "its own"
            )
        try:
            self.running, axes = self.atlas.meet(before, shape, known)
        except CrossedAxesError:
            raise self._crossed(step, name, shape) from None
        return axes

    def _is_pooled(self, axes: tuple[int, ...]) -> bool:
        return any(a in self.windows for a in self.atlas.resolve(axes))

    def _crossed(self, step: Step, name: str, shape: Shape) -> ArgumentError:
        if name in self.kept:
            return ArgumentError(
                f"{step.text}: the kept value {name!r} of shape {shape} would meet a value of "
                f"shape {self.running.shape} along other axes than it was kept with; where a step "
                "between them reduces, give it keepdim=True"
            )
        return ArgumentError(
            f"{step.text}: operand {name!r} of shape {shape} is used along other axes by an "
            "earlier step; give the two steps operands of different names"
        )

    def _placed(self, step: Step, placement: str, name: str, shape: Shape) -> Axes:
        """The axes of a per-channel or trailing operand, or of noise."""
        running = self.running
        axes = placed_along(step, placement, name, running.shape, shape)
        aligned = tuple(
            running.along(a) if a in axes else () for a in range(-len(running.shape), 0)
        )
        wanted = self.atlas.resolve(flat(aligned))
        if name in self.found:
            have = self.atlas.resolve(flat(self.found[name]))
            wide = [[a for a in ids if self.atlas.sizes[a] != 1] for ids in (have, wanted)]
            if wide[0] != wide[1]:
                raise self._crossed(step, name, shape)
            return aligned if have == wanted else tuple(self._common(a, have) for a in aligned)
        if name in self.chain.drawn:
            self.found[name] = aligned
            return aligned
        is_bare = len(shape) == len(axes)  # without ones for the axes around them
        bare = tuple(running.along(a) for a in sorted(axes))
        self.found[name] = bare if is_bare else aligned[len(aligned) - len(shape) :]
        return aligned

    def _common(self, axes: tuple[int, ...], have: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a for a in self.atlas.resolve(axes) if a in have)

    def _grouped(
        self, step: Step, definition: Definition, operands: list[tuple[str, Axes]]
    ) -> tuple[Axes, Axes, list[tuple[str, Axes]]]:
        """The axes as a body sees them to which axis 1 is two: groups, and what is within one."""
        shape = self.running.shape
        groups = dict(step.attributes)[definition.groups]
        assert isinstance(groups, int)
        if len(shape) < 2 or shape[1] % groups:
            raise ArgumentError(
                f"{step.text}: got a value of shape {shape}, wanted one whose axis 1 is divisible "
                f"by {groups}, the number of groups"
            )
        try:
            parts = self.atlas.split(self.running.axes[1], groups) if shape[1] else ((), ())
        except CrossedAxesError:
            raise UnsupportedError(
                f"{step.text}: {groups} groups of {shape[1]} channels cross those of an earlier "
                "step; compile what follows as a chain of its own"
            ) from None

        def apart(axes: Axes) -> Axes:
            two = parts if axes[1] else ((), ())
            return (*axes[:1], *two, *axes[2:])

        axes = apart(self.running.axes)
        return axes, axes, [(name, apart(along)) for name, along in operands]

    def _update(self, step: Step, definition: Definition, updated: list[tuple[str, str]]) -> None:
        """Note the running statistics that a step updates, their shapes checked."""
        attributes = dict(step.attributes)
        names = dict(updated)
        shape = self.running.shape
        given_statistics = [p for p in RUNNING if p in dict(step.operands)]
        is_training = bool(attributes[definition.training])
        if len(given_statistics) == 1 or (not is_training and not given_statistics):
            why = "" if is_training else f", since {definition.training} is False"
            raise ArgumentError(
                f"{step.text}: got {' and '.join(given_statistics) or 'no running statistics'}, "
                f"wanted {' and '.join(RUNNING)}{why}"
            )
        if len(shape) < 2:
            raise ArgumentError(
                f"{step.text}: got a value of shape {shape}, wanted at least two axes: samples and "
                "channels"
            )
        for parameter, name in updated:
            given, dtype = self.given[name]
            if parameter == COUNTER:
                if given != () or dtype != "int64":
                    raise ArgumentError(
                        f"{step.text}: operand {name!r} got shape {given} of {dtype}, wanted one "
                        "integer: a tensor of shape () of int64"
                    )
            else:
                placed_along(step, "channel", name, shape, given)
        if not is_training:
            return
        if values_per_statistic(definition, shape) == 1:
            raise ArgumentError(
                f"{step.text}: got a value of shape {shape}, wanted more than one value for each "
                "statistic"
            )
        momentum = attributes.get("momentum")
        if not given_statistics:
            return
        if momentum is None and COUNTER not in names:
            raise ArgumentError(
                f"{step.text}: momentum is None, so the average is over all batches; give their "
                f"number too, {COUNTER}={COUNTER}"
            )
        factor = float(momentum) if isinstance(momentum, float | int) else None
        self.updates.append(Update(len(self.places), tuple(updated), factor))
