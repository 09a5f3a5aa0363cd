"""What binding a chain to shapes gives: where its values and operands lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusegen import arity, ir
from fusegen.axes import Axes, Shape
from fusegen.ops import Chain
from fusegen.windowing import Slide, Window


@dataclass(frozen=True)
class Operand:
    """How one operand lies on the graph's axes."""

    name: str
    extent: ir.Extent
    kind: arity.Kind = "number"  # or "truth", of a tensor of bool, or "whole", of integers
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
    dtype: str  # of the value before the step; of a view nothing
    types: tuple[tuple[str, str], ...] = ()  # of what a step is told the element type, by parameter
    met_in: str = ""  # the type that integers are converted to there
    result: str = ""  # of the value behind it
    counts: bool = False  # whether conditions that it works on are the numbers 1 and 0
    is_long: bool = False  # whether it adds up integers, or more conditions than a float counts

    @property
    def is_wide(self) -> bool:
        """Whether it adds them up in double precision."""
        return self.is_long and self.met_in == "float64"


@dataclass(frozen=True)
class Given:
    """A value that is a result beside the chain's own: where it lies, its shape and its type."""

    axes: Axes
    shape: Shape
    dtype: str

    @property
    def extent(self) -> ir.Extent:
        """The graph's axes that it has."""
        return frozenset(a for axes in self.axes for a in axes)


@dataclass(frozen=True)
class Update:
    """A step that updates running statistics: the operands that have their mean and variance, and
    the share of the new in them; None where that is one part in the number of batches.
    """

    step: int
    running: tuple[str, str]
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
    gives: tuple[Given, ...] = ()

    @property
    def pattern(self) -> tuple[object, ...]:
        """All that lower() depends on: equal patterns give equal graphs."""
        operands = (self.x, *self.operands)
        lie = tuple((o.extent, o.kind, o.is_pooled, o.is_noise) for o in operands)
        given = tuple(g.axes for g in self.gives)
        return len(self.domain), lie, self.windows, self.places, self.result, given

    @property
    def leading(self) -> tuple[int, Axes]:
        """The tensor in whose order in memory a program goes, by its number, and the graph's axes
        in the place of each of its own: x, or where x lacks axes, the first operand that has all
        that are wider than one.
        """
        if len(self.x.extent) == len(self.domain) or self.windows:
            return 0, self.slots
        logical = range(-len(self.domain), 0)
        met = {
            dict(step.operands)[parameter]: axes
            for step, place in zip(self.chain.steps, self.places, strict=True)
            for parameter, axes in (place.operands if place is not None else ())
        }
        for i, operand in enumerate(self.operands, start=1):
            missing = tuple(a for a in logical if a not in operand.extent)
            if met.get(operand.name) and all(self.domain[a] == 1 for a in missing):
                first, *rest = met[operand.name]
                return i, ((*missing, *first), *rest)
        return 0, self.slots

    def memory_order(
        self, order_of_x: Sequence[int] | None, slots: Axes | None = None
    ) -> tuple[int, ...]:
        """The graph's axes, outermost in memory first, from x's, or from those of a tensor with
        these slots; as they are counted where x, or what is known of its order, does not say, where
        a step for which it counts sees axes as one that do not lie as one, or where axes whose
        windows share elements do not lie beside each other. An axis that x lacks lies before the
        next one, unless the result has it by itself.
        """
        slots = self.slots if slots is None else slots
        logical = tuple(range(-len(self.domain), 0))
        order = [a for axis in order_of_x or () for a in slots[axis]]
        alone = {axes[0] for axes in self.result if len(axes) == 1}
        for missing in reversed([a for a in logical if a not in order and a not in alone]):
            following = [order.index(a) for a in range(missing + 1, 0) if a in order]
            order.insert(following[0] if following else len(order), missing)
        if not order_of_x or sorted(order) != list(logical):
            return logical
        sliding = sorted(order.index(a) for a, w in self.windows if isinstance(w, Slide))
        if sliding != list(range(sliding[0], sliding[-1] + 1) if sliding else []):
            return logical
        steps = zip(self.chain.steps, self.places, strict=True)
        ordered = [p for step, p in steps if step.is_ordered and p is not None]
        for members in {members for place in ordered for members in place.axes}:
            along = [order.index(a) for a in members if self.domain[a] != 1]
            if along != sorted(along):
                return logical
        return tuple(order)

    def order_of_result(self, order: Sequence[int]) -> tuple[int, ...] | None:
        """The result's axes, outermost in memory first, where the graph's lie in this order; None
        where it has to be copied, since axes that it sees as one do not lie as one.
        """
        present = {a for axes in self.result for a in axes if self.domain[a] != 1}
        place = {a: i for i, a in enumerate(a for a in order if a in present)}
        spans = [[place[a] for a in axes if a in present] for axes in self.result]
        if any(span != list(range(span[0], span[-1] + 1)) for span in spans if span):
            return None
        return tuple(sorted(range(-len(spans), 0), key=lambda axis: (spans[axis] or [-1], axis)))
