"""A chain meets shapes: every operand's axes are found and mistakes are told.

Only shapes and element types are needed, no tensors, so a chain can be checked, printed and
scheduled on a machine without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

from fusegen.axes import Atlas, Axes, CrossedAxesError, Shape, Value, flat
from fusegen.bound import Bound, Given, Operand, Place, Update
from fusegen.errors import ArgumentError, EmptyReductionError, UnsupportedError
from fusegen.fitting import (
    broadcast,
    broadcasts,
    crossed,
    dims_of,
    holds_labels,
    labels_shape,
    placed_along,
    rearranged,
    require_axis,
    require_counter,
    require_statistics,
    windows_of,
    with_leftovers,
)
from fusegen.ops import COUNTER, RUNNING, Chain, Definition, Step
from fusegen.promotion import FLOATING, INTEGERS, MOST, Typed, kind_of, met_in, result_type
from fusegen.stacking import require_alike, stacked
from fusegen.takingup import course_of, taken_up
from fusegen.typechecks import check_element_type, check_type, refuse_final
from fusegen.viewing import are_views, made_of_operands, seen_behind, seen_first, seen_shapes
from fusegen.windowing import Window, windows_along

Kinds = Mapping[str, tuple[Shape, str]]


def bind(chain: Chain, x: tuple[Shape, str], operands: Kinds, called: str = "x") -> Bound:
    """Check shapes and element types of a call step by step, as eager would meet them.

    x and operands are (shape, dtype name). Raises ArgumentError with the argument, what it got and
    what was wanted.
    """
    check_element_type(called, x[1])
    for name, (_, dtype) in operands.items():
        is_counter = any(parameter.name == COUNTER for _, parameter in chain.uses(name))
        if not is_counter and name not in chain.drawn and not holds_labels(chain, name):
            check_element_type(name, dtype)
    return _Binding(chain, x, operands).bound()


class _Binding:
    """A chain, as far as it is bound."""

    def __init__(self, chain: Chain, x: tuple[Shape, str], operands: Kinds) -> None:
        self.chain = chain
        self.views_of_x = chain.steps[: seen_first(chain.steps)]
        shape, views = seen_shapes(self.views_of_x, x[0])
        self.atlas = Atlas(shape)
        self.running, self.dtype = self.atlas.x, x[1]
        # Kept values with their types; where the elements of a view lie among x's is not known.
        self.kept = {n: (Value(s, ((),) * len(s), ()), x[1]) for n, s in views.items()}
        last = takewhile(lambda s: s.op == "keep", reversed(self.views_of_x))
        self.kept |= {s.names[0]: (self.running, self.dtype) for s in last}
        self.is_final, self.final = False, set[str]()  # what can be a result alone: kept values
        self.given_x, self.given = x, operands
        self.found: dict[str, Axes] = {}
        self.places: list[Place | None] = []
        self.windows: dict[int, Window] = {}  # of each axis that is pooled
        self.unpooled: set[str] = set()  # the operands that are met before the pooling
        self.updates: list[Update] = []
        self.main = self.running  # the last value that was made of x
        self.is_aside = made_of_operands(chain.steps)
        self.new: dict[int, tuple[int, ...]] = {}  # where new axes of an operand lie, by their step

    def bound(self) -> Bound:
        steps = self.chain.steps
        for i, step in enumerate(steps):
            if self.is_final and not step.is_structural:
                refuse_final(step, self.dtype)
            if i < len(self.views_of_x):
                axes = self.running.axes
                self.places.append(None if step.is_structural else Place(axes, axes, (), ""))
            elif self._names_only(i, step):
                self.places.append(None)
            elif step.is_view:
                self.places.append(self._view(step, is_last=are_views(steps[i:])))
            else:
                self.places.append(self._step(step))
                if i in self.new:
                    (dim,) = dims_of(step, self.running.shape[1:])
                    self.running = self.running.with_former(dim, self.new.pop(i))
        atlas, result = self.atlas, self.running
        given = [self.kept[name] for name in self.chain.gives]
        windows = {atlas.numbers((axis,))[0]: window for axis, window in self.windows.items()}
        read = [name for name in self.chain.operands if name in self.found]
        domain = tuple(atlas.sizes[i] for i in atlas.order)
        if 0 in domain and 0 not in result.shape:
            raise EmptyReductionError(
                f"{self.chain.text}: reduces an axis without elements of a value of shape "
                f"{self.given_x[0]}; leave such tensors out"
            )
        return Bound(
            self.chain,
            domain,
            Operand("x", frozenset(atlas.numbers(flat(atlas.x.axes))), kind_of(self.given_x[1])),
            tuple(map(self._lying, read)),
            self.dtype,
            tuple(sorted(windows.items())),
            self._settled({self.dtype, *(dtype for _, dtype in given)}),
            ((),) * len(self.given_x[0]) if self.views_of_x else atlas.memory_order(),
            self._all_numbers(result.axes),
            result.shape,
            tuple(self.updates),
            tuple(Given(self._all_numbers(v.axes), v.shape, dtype) for v, dtype in given),
        )

    def _lying(self, name: str) -> Operand:
        return Operand(
            name,
            frozenset(self.atlas.numbers(flat(self.found[name]))),
            "index" if holds_labels(self.chain, name) else kind_of(self.given[name][1]),
            is_pooled=bool(self.windows) and name not in self.unpooled,
            is_noise=name in self.chain.drawn,
        )

    def _all_numbers(self, axes: Axes) -> Axes:
        return tuple(map(self.atlas.numbers, axes))

    def _settled(self, results: set[str]) -> tuple[Place | None, ...]:
        """Where values lie, by the graph's axes; if integers are wanted, long sums are doubles."""
        is_wide = not results.isdisjoint(INTEGERS)

        def settled(place: Place) -> Place:
            operands = tuple((name, self._all_numbers(axes)) for name, axes in place.operands)
            axes, x = self._all_numbers(place.axes), self._all_numbers(place.x)
            met_in = "float64" if is_wide and place.is_long else place.met_in
            return replace(place, axes=axes, x=x, operands=operands, met_in=met_in)

        return tuple(None if place is None else settled(place) for place in self.places)

    def _names_only(self, at: int, step: Step) -> bool:
        """Whether a step only names a value or takes up a named one, which is then done."""
        if step.is_naming:
            self.kept[step.names[0]] = (self.running, self.dtype)
            self.final |= {*step.names} if self.is_final else set()
        elif step.op == "recall":
            self.running, self.dtype = self._known(step, step.names[0])
            self.is_final = step.names[0] in self.final
        elif step.taken_up is not None:
            self._take_up(at, step.taken_up)
        return step.is_structural

    def _take_up(self, at: int, name: str) -> None:
        """Go on with an operand, along the axes of the value before, or of x."""
        step, (shape, self.dtype), self.is_final = self.chain.steps[at], self.given[name], False
        self.main = self.main if at and self.is_aside[at - 1] else self.running
        before = self.running if broadcasts(self.running.shape, shape) else self.atlas.x
        rank = len(self.atlas.x.shape)
        course = course_of(self.chain, at, shape, before.shape, rank)
        if course is not None and name not in self.found:
            is_mains = broadcasts(self.main.shape, course.shape)
            fits = is_mains or broadcasts(self.atlas.x.shape, course.shape)
            course = course if fits or not broadcasts(before.shape, shape) else None
        if course is not None and name not in self.found:
            before = self.main if is_mains else self.atlas.x
            broadcast(step, name, before.shape, course.shape)
            self.running = before
            axes = self._meet(step, name, course.shape, None)
            try:
                self.running, new = taken_up(course, shape, before, axes, self.atlas)
            except CrossedAxesError:
                raise crossed(step, name, shape, before.shape, is_kept=False) from None
            self.new |= new
            self.found[name] = self.running.axes
            return
        if name not in self.found:
            broadcast(step, name, before.shape, shape)
            self.running = before
            self.found[name] = self._meet(step, name, shape, None)
        former = ((),) * (len(shape) - len(before.shape)) + before.axes
        self.running = Value(shape, self.found[name], former)

    def _step(self, step: Step) -> Place:
        definition = step.definition
        assert definition is not None
        attributes = dict(step.attributes)
        require_axis(step, self.running.shape)
        before, dtype = self.running, self.dtype
        aligned: list[tuple[str, Axes]] = []
        met: dict[str, tuple[Shape, str]] = {}
        updated: list[tuple[str, str]] = []
        for parameter, name in step.operands:
            given = self._kind(name)
            if name in self.final:
                refuse_final(step, given[1])
            if parameter != COUNTER and name not in self.chain.drawn:  # a seed
                check_type(step, parameter, name, given[1], self.dtype)
            if definition.is_updated(parameter, attributes):
                updated.append((parameter, name))
            else:
                met[parameter] = given
                if not definition.parameter(parameter).is_type:
                    aligned.append((parameter, self._operand(step, definition, parameter, name)))
        if "normalized_shape" in attributes:
            placed_along(step, "trailing", "", self.running.shape, None)
        if definition.statistics is not None:
            self._update(step, definition, updated)
        axes, x = self.running.axes, before.axes
        is_alone = (definition.same_dtype or definition.keeps_dtype) and dtype in FLOATING
        typed = Typed(dtype) if is_alone else result_type(step, (before.shape, dtype), met)
        self.dtype, self.is_final = typed.dtype, self.is_final if is_alone else typed.is_final
        if definition.groups:
            axes, x, aligned = self._grouped(step, definition, aligned)
        if definition.shaping == "stack":
            self.running, x, aligned = stacked(step, self.running, x, aligned, self.atlas)
            axes = self.running.axes
        elif definition.window_axes:
            axes = x = self._pool(step, definition)
        else:
            self.running = rearranged(step, definition, self.running)
        types = tuple((p, met[p][1]) for p in met if definition.parameter(p).is_type)
        kinds = (dtype, *(t for _, t in met.values()))
        whole_as = met_in(self.dtype, kinds, is_sum=typed.is_sum)
        added = [before.shape[d] for d in dims_of(step, before.shape)] if typed.is_sum else []
        is_long = typed.is_sum and (dtype != "bool" or math.prod(added) > MOST)
        made = (dtype, types, whole_as, self.dtype, typed.counts, is_long)
        return Place(axes, x, tuple(aligned), *made)

    def _view(self, step: Step, *, is_last: bool) -> Place:
        """See the running value in another shape; is_last says that only views follow."""
        before = self.running
        require_axis(step, before.shape)
        self.running = seen_behind(
            step, before, self.atlas, is_last=is_last, is_pooled=bool(self.windows)
        )
        return Place(before.axes, before.axes, (), "")

    def _known(self, step: Step, name: str) -> tuple[Value, str]:
        """A kept value, whose axes are known."""
        value, dtype = self.kept[name]
        if any(n != 1 and not along for n, along in zip(value.shape, value.axes, strict=True)):
            raise UnsupportedError(
                f"{step.text}: {name!r} was kept before x was seen in another shape, where its "
                "axes cannot be followed; compile what stands behind that as a chain of its own"
            )
        return value, dtype

    def _kind(self, name: str) -> tuple[Shape, str]:
        """The shape and the element type of an operand."""
        if name not in self.kept:
            return self.given[name]
        value, dtype = self.kept[name]
        return value.shape, dtype

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
        if any(before.reduces for before in self.chain.steps[: len(self.places)]):
            windows = with_leftovers(windows, self.running)
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
        shape, _ = self._kind(name)
        met = definition.parameter(parameter)
        if not met.broadcasts:
            return self._placed(step, met.placement, name, shape)
        if definition.shaping == "stack":
            require_alike(step, name, self.running.shape, shape)
        if name in self.kept:
            broadcast(step, name, self.running.shape, shape)
            return self._meet(step, name, shape, self._known(step, name)[0].axes)
        broadcast(step, name, self.running.shape, shape)
        axes = self.found[name] = self._meet(step, name, shape, self.found.get(name))
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
            raise crossed(step, name, shape, before.shape, is_kept=name in self.kept) from None
        return axes

    def _is_pooled(self, axes: tuple[int, ...]) -> bool:
        return any(a in self.windows for a in self.atlas.resolve(axes))

    def _placed(self, step: Step, placement: str, name: str, shape: Shape) -> Axes:
        """The axes of a per-channel or trailing operand, or of noise."""
        running = self.running
        if placement == "labels":
            seen = self.given_x[0] if self.views_of_x else ()
            shape = labels_shape(step, shape, running, self.atlas, seen)
        axes = placed_along(step, placement, name, running.shape, shape)
        aligned = tuple(
            running.along(a) if a in axes else () for a in range(-len(running.shape), 0)
        )
        wanted = self.atlas.resolve(flat(aligned))
        is_kept = name in self.kept
        known = self._known(step, name)[0].axes if is_kept else self.found.get(name)
        if known is not None:
            have = self.atlas.resolve(flat(known))
            wide = [[a for a in ids if self.atlas.sizes[a] != 1] for ids in (have, wanted)]
            if wide[0] != wide[1]:
                raise crossed(step, name, shape, running.shape, is_kept=name in self.kept)
            common = (tuple(i for i in self.atlas.resolve(a) if i in have) for a in aligned)
            return aligned if have == wanted else tuple(common)
        if name in self.chain.drawn:
            self.found[name] = aligned
            return aligned
        is_bare = len(shape) == len(axes)  # without ones for the axes around them
        bare = tuple(running.along(a) for a in sorted(axes))
        self.found[name] = bare if is_bare else aligned[len(aligned) - len(shape) :]
        return aligned

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
        parts = self.atlas.split(self.running.axes[1], groups) if shape[1] else ((), ())

        def apart(axes: Axes) -> Axes:
            two = parts if axes[1] else ((), ())
            return (*axes[:1], *two, *axes[2:])

        axes = apart(self.running.axes)
        return axes, axes, [(name, apart(along)) for name, along in operands]

    def _update(self, step: Step, definition: Definition, updated: list[tuple[str, str]]) -> None:
        """Note the running statistics that a step updates, their shapes checked."""
        attributes, names = dict(step.attributes), dict(step.operands)
        is_training = definition.is_updating(attributes)
        require_statistics(step, definition, self.running.shape)
        for parameter, name in updated:
            if name in self.kept:
                raise ArgumentError(
                    f"{step.text}: {name!r} is a kept value, and {parameter} is updated in place; "
                    "give it a tensor of its own"
                )
            given, dtype = self.given[name]
            if parameter == COUNTER:
                require_counter(step, name, given, dtype)
            else:
                self._placed(step, "channel", name, given)
        if not is_training or RUNNING[0] not in names:
            return
        momentum = attributes["momentum"]
        if momentum is None and COUNTER not in names:
            raise ArgumentError(
                f"{step.text}: momentum is None, so the average is over all batches; give their "
                f"number too, {COUNTER}={COUNTER}"
            )
        if momentum is None:
            self.found.setdefault(names[COUNTER], ())
        factor = float(momentum) if isinstance(momentum, float | int) else None
        running = (names[RUNNING[0]], names[RUNNING[1]])
        self.updates.append(Update(len(self.places), running, factor))
