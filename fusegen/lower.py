"""The op bodies are run on expressions: a chain that has met its shapes becomes a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusegen import arity, ir
from fusegen.axes import Axes
from fusegen.bound import Bound, Operand, Place
from fusegen.ir import Expr, Graph
from fusegen.ops import Step
from fusegen.promotion import INTEGERS, as_integer, as_number, as_wanted, rounded, run_body
from fusegen.target import code_name
from fusegen.windowing import Slide

GIVEN = "given_"  # how the names of results begin that are given beside the chain's own
NEW = "new_"  # and of what takes the place of an operand that is updated

_COMPARING = (*arity.COMPARISONS, "minimum", "maximum")


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
    """A chain as a graph from x and the operands to out, with a mark on each step's result. Behind
    what a call gives stand the new values of the operands that are updated.
    """

    graph: Graph
    marks: tuple[Mark, ...]


def lower(bound: Bound) -> Lowered:
    """Run the op bodies: the graph from x and the operands to y."""
    rank = len(bound.domain)
    within = {a: ir.SLIDING - a if isinstance(w, Slide) else -a for a, w in bound.windows}

    def leaf(name: str, operand: Operand) -> Expr:
        twins = {t for a, t in within.items() if a in operand.extent and not operand.is_pooled}
        kind: arity.Kind = "noise" if operand.is_noise else operand.kind
        return ir.tensor(name, operand.extent | twins, rank, kind)

    x = leaf("x", bound.x)
    tensors = {operand.name: leaf(code_name(operand.name), operand) for operand in bound.operands}
    running, kept = x, {}
    marks: list[Mark] = []
    updates = {update.step: update for update in bound.updates}
    is_double = any(place is not None and place.is_wide for place in bound.places)
    updated: dict[str, Expr] = {}
    batches: Counter[str] = Counter()
    for i, (step, place) in enumerate(zip(bound.chain.steps, bound.places, strict=True)):
        if step.is_naming:
            kept[step.names[0]] = running
            continue
        if step.op == "recall":
            running = kept[step.names[0]]
            continue
        if step.taken_up is not None:
            running = tensors[step.taken_up]
            continue
        assert place is not None
        assert step.definition is not None
        names = dict(step.operands)
        named = {p: kept.get(names[p], tensors.get(names[p])) for p, _ in place.operands}
        types = (place.met_in, place.result)
        named = {p: as_wanted(step, p, operand, *types) for p, operand in named.items()}
        running = as_integer(running)
        if place.counts and running.kind == "truth":
            running = ir.primitive("to_int64", ir.primitive("where", running, 1.0, 0.0))
        met = as_number(running, place.met_in)
        body = _Body(step, place, met, named, within, is_double=is_double)
        if i in updates:
            assert step.definition.statistics is not None
            share: Expr | float | None = updates[i].momentum
            if share is None:
                assert step.counter is not None
                batches[step.counter] += 1
                share = 1.0 / (tensors[step.counter] + float(batches[step.counter]))
            found = body.placed(step.definition.statistics(body.x))
            for name, value in zip(updates[i].running, found, strict=True):
                before = updated.get(name, tensors[name])
                updated[name] = value * share + before * (1.0 - share)
        running = body.result()
        is_quantised = running.op in arity.QUANTISING_CASTS
        if place.is_wide:
            running = ir.primitive("to_float64", running)
        if running.kind == "number" and place.result in INTEGERS and not is_quantised:
            running = ir.primitive("to_int64", running)
        if running.kind == "number" and place.result == "bool":  # a choice among conditions
            running = ir.primitive("ne", running, 0.0)
        if running.kind == "whole" and (wrap := f"wrap_{place.result}") in arity.WRAPS:
            running = ir.primitive(wrap, running)
        marks.append(Mark(running, f"after_{step.op}", step.text))
    outputs = [("out", running)]
    outputs += [(f"{GIVEN}{i}", kept[n]) for i, n in enumerate(bound.chain.gives, start=1)]
    outputs += [(f"{NEW}{code_name(name)}", value) for name, value in updated.items()]
    return Lowered(Graph((x, *tensors.values()), tuple(outputs)), tuple(marks))


class _Body:
    """A step's body: run on stand-ins for its values, which count axes as the step does, then
    laid along the axes of the graph.
    """

    def __init__(
        self,
        step: Step,
        place: Place,
        running: Expr,
        operands: Mapping[str, Expr | None],
        within: Mapping[int, int],
        *,
        is_double: bool,
    ) -> None:
        assert step.definition is not None
        self.step, self.definition = step, step.definition
        self.rank = running.rank
        self.within = within  # for each axis of the graph that is pooled: the places in its windows
        self.axes = place.axes
        self.dtype, self.is_double = place.dtype, is_double
        self.types = dict(place.types)
        self.real: dict[Expr, Expr] = {}
        self.is_pooling = self.definition.window_axes > 0
        self.x = self._stand_in("x", running, place.x)
        self.operands = {
            name: self._stand_in(f"operand {name}", real, axes)
            for (name, axes), real in zip(place.operands, operands.values(), strict=True)
            if real is not None
        }

    def _stand_in(self, name: str, real: Expr, axes: Axes) -> Expr:
        extent = set()
        for axis in range(-len(axes), 0):
            if real.extent.intersection(axes[axis]):
                extent.add(axis)
            for place in (self.within[a] for a in axes[axis] if a in self.within):
                if place in real.extent or (name == "x" and self.is_pooling):
                    extent.add(ir.SLIDING - axis if place > ir.SLIDING else -axis)
        found = ir.tensor(name, extent, len(axes), real.kind)
        self.real[found] = real
        return found

    def result(self) -> Expr:
        """What the step gives, over the graph's axes."""
        found = run_body(self.step, self.x, {**self.operands, **self.types}, self.dtype)
        return self.placed((found,))[0]

    def placed(self, roots: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Expressions over the stand-ins, as expressions over the values themselves."""
        new = dict(self.real)
        for node in ir.topological(roots, stop=new):
            new[node] = self._rebuilt(node, tuple(new[a] for a in node.args))
        return tuple(new[root] for root in roots)

    def _rebuilt(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        if node.op == "reduce":
            kind, axes = ir.reduction(node)
            places = self._with_windows(self._places(axes))
            if any(p > ir.SLIDING for p in places) and not self.is_pooling:
                shared = {a for pair in self.within.items() for a in pair}
                args = tuple(ir.once(a, shared) for a in args)
            return ir.reduce(kind, places, *args)
        if node.op == "position":
            return ir.position(self._places(ir.axes_of(node)), self.rank)
        if node.op == "count":
            places = self._with_windows(self._places(ir.axes_of(node)))
            return ir.count(places) if places else ir.const(1.0)
        if node.op == "covered":
            _, is_padded = node.attrs
            within = self._places(ir.axes_of(node))
            return ir.covered_by(within, self.rank, is_padded=bool(is_padded))
        if node.op in _COMPARING and self.x in node.args and not self.definition.exact_bounds:
            args = tuple(map(self._as_met, args))
        return ir.rebuild(node, args)

    def _as_met(self, argument: Expr) -> Expr:
        """A number that x is compared with: the nearest that x can have, as torch compares."""
        number = ir.constant(argument)
        if number is None or (self.dtype == "float32" and not self.is_double):
            return argument  # a literal of that type is rounded as it is written
        return ir.const(rounded(number, self.dtype))

    def _with_windows(self, places: set[int]) -> set[int]:
        """Axes, and where they are still to be pooled, the places in their windows."""
        if self.is_pooling:
            return places
        running = self.real[self.x].extent
        return places | {p for a in places if (p := self.within.get(a)) in running}

    def _places(self, axes: Iterable[int]) -> set[int]:
        found: set[int] = set()
        for axis in axes:
            if axis < 0:
                found.update(self.axes[axis])
            else:
                of = ir.SLIDING - axis if axis > ir.SLIDING else -axis
                found.update(self.within[p] for p in self.axes[of])
        return found
