"""Arranging: a traced graph as the steps of a chain.

A graph becomes a line by choosing, for every operation, which argument is the running value: the
one computed last, wherever the operation has a form that takes it there (`1 - x` is `rsub(1)`).
Any other value computed from x is kept when it is made, and named where it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

from fusegen import arity, ir
from fusegen.arity import ARITY
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import Chain, Op, Placement, Step, lookup, operand
from fusegen.unsaid import NotKnownYet, current_call

# The same operation with its two arguments exchanged.
_SYMMETRIC = ("add", "mul", "minimum", "maximum", "eq", "ne", "logical_and", "logical_or")
_EXCHANGED: Mapping[str, str] = {
    **dict(zip(_SYMMETRIC, _SYMMETRIC, strict=True)),
    "lt": "gt",
    "gt": "lt",
    "le": "ge",
    "ge": "le",
    "sub": "rsub",
    "div": "rdiv",
    "pow": "rpow",
}
_PER_CHANNEL: Mapping[str, str] = {
    "add": "add_channel",
    "sub": "sub_channel",
    "mul": "mul_channel",
    "div": "div_channel",
}

BY_CALL = "; fusegen.compile and fusegen.Layer take it where it is called"
ALONE = (
    "does not depend on the first parameter; make a chain of what is computed of one tensor, and "
    f"call it for each{BY_CALL}"
)
ORDER = (
    "of what a function returns, the first value is the one that is computed last, and the others, "
    "each of them once, are in the order in which they are computed; fusegen.compile and "
    "fusegen.Layer take any other order"
)


def by_input(
    name: str, first: Sequence[Expr], computed: tuple[Expr, ...]
) -> Iterator[tuple[Expr, tuple[Expr, ...]]]:
    """The results that depend on the first parameter, or else on one of its views; then those that
    depend on another input, and on none of the ones before.
    """
    inputs = {each: [n for n in ir.topological([each]) if n.op == "input"] for each in computed}
    met = [n for found in inputs.values() for n in found]  # a call has the other tensors too
    x = next((v for v in (*first, *(met if current_call() else [])) if v in met), first[0])
    mine = tuple(each for each in computed if x in inputs[each])
    if not mine:
        which = f"result 1 of {len(computed)}" if len(computed) > 1 else "the result"
        raise NotKnownYet(f"{name}: {which} {ALONE}")
    while mine:
        yield x, mine
        computed = tuple(each for each in computed if each not in mine)
        x = inputs[computed[0]][0] if computed and inputs[computed[0]] else x
        mine = tuple(each for each in computed if x in inputs[each])


def arranged(
    name: str,
    x: Expr,
    placements: Mapping[str, Placement | None],
    computed: tuple[Expr, ...],
    aligned: Container[str],
) -> tuple[Chain, tuple[Expr, ...]]:
    """The chain to some results, and these in the order in which it gives them."""
    problem: ChainError | None = None
    for found in itertools.islice(itertools.permutations(computed), 24):
        try:
            return _Line(name, x, placements, aligned).through(found), found
        except OrderError as error:
            problem = problem or error
    assert problem is not None
    raise problem


class OrderError(ChainError):
    """Results in an order in which a chain does not give them."""


def chain_to(value: Expr, x: Expr, operands: Sequence[str]) -> Chain:
    """The steps from an input, with others beside it, to a value that is computed of it."""
    return _Line("the function", x, dict.fromkeys(operands)).through((value,))


class _Line:
    """Lays a traced graph out as steps."""

    def __init__(
        self,
        name: str,
        x: Expr,
        placements: Mapping[str, Placement | None],
        aligned: Container[str] = (),
    ) -> None:
        self.name, self.aligned = name, aligned
        self.x = x
        self.placements = placements
        self.kept: dict[Expr, str] = {}
        self.given: tuple[Expr, ...] = ()

    def through(self, results: tuple[Expr, ...]) -> Chain:
        """The steps from x to the first of the results, by way of the others."""
        live, of_x = self._live(results)
        if alone := [i for i, r in enumerate(results, start=1) if r not in of_x]:
            which = f"result {alone[0]} of {len(results)}" if len(results) > 1 else "the result"
            raise ChainError(f"{self.name}: {which} {ALONE}")
        order = _in_order(results, live, of_x)
        self.given = tuple(n for n in order if n in results[1:])
        if self.given != results[1:] or order[-1] is not results[0]:
            raise OrderError(f"{self.name}: {ORDER}")
        running, plan = self.x, []
        for node in order:
            places = [i for i in _running_places(node) if node.args[i] in live]
            places = places or [i for i in _running_places(node) if node.args[i].op == "input"]
            if not places:
                raise ChainError(
                    f"{self.name}: the first argument of {_called(node)} is a number; it must be "
                    "a tensor"
                )
            numbers = [i for i in _running_places(node) if _is_number(node.args[i], live)]
            places = numbers or places  # a condition counts as a number beside one, and not before
            place = next((i for i in places if node.args[i] is running), places[0])
            for i, arg in enumerate(node.args):
                if arg in live and (i != place or arg is not running):
                    self.kept.setdefault(arg, self._unused_name())
            if node in self.given:
                self.kept.setdefault(node, self._unused_name())
            if node.args[place].op == "input" and ir.name_of(node.args[place]) in self.aligned:
                self.kept.setdefault(self.x, self._unused_name())
            plan.append((node, place, node.args[place] is running))
            running = node
        return self._written(plan)

    def _written(self, plan: list[tuple[Expr, int, bool]]) -> Chain:
        steps: list[Step] = []
        if self.x in self.kept:
            steps.append(Step("keep", names=(self.kept[self.x],)))
        for node, place, follows in plan:
            if not follows:
                steps += self._taking_up(node.args[place], is_past_x=node is not plan[0][0])
            steps.append(self._call(node) if node.op == "call" else self._primitive(node, place))
            if node in self.kept:
                op = "give" if node in self.given else "keep"
                steps.append(Step(op, names=(self.kept[node],)))
        return Chain(tuple(steps))

    def _taking_up(self, value: Expr, *, is_past_x: bool) -> list[Step]:
        """The step that goes on with a value that was kept, or with an operand: behind x, if that
        lies along its axes.
        """
        if value in self.kept:
            return [Step("recall", names=(self.kept[value],))]
        name = ir.name_of(value)
        if self.placements.get(name) == "channel":
            raise ChainError(
                f"{self.name}: {name!r} is annotated as channel, but something is computed from it "
                "alone; annotate it as Expr and pass it in a shape that broadcasts, such as "
                "(C, 1, 1)"
            )
        is_behind_x = name in self.aligned and is_past_x
        before = [Step("recall", names=(self.kept[self.x],))] if is_behind_x else []
        return [*before, operand(name).written[0]]

    def _live(self, results: Sequence[Expr]) -> tuple[set[Expr], set[Expr]]:
        """What is computed, and x; and of that what depends on x."""
        live, of_x = {self.x}, {self.x}
        for node in ir.topological(results):
            if node.op in ("input", "const"):
                continue
            live.add(node)
            if not of_x.isdisjoint(node.args):
                of_x.add(node)
            if node.op not in (*ARITY, "call"):
                raise ChainError(
                    f"{self.name}: {node.op} needs a tensor's axes; it belongs in an @op function"
                )
        return live, of_x

    def _call(self, node: Expr) -> Step:
        definition, slots, attributes, _ = node.attrs
        assert isinstance(definition, Op)
        assert isinstance(slots, tuple)
        assert isinstance(attributes, tuple)
        operands = tuple(
            (slot, str(self._argument(arg))) for slot, arg in zip(slots, node.args[1:], strict=True)
        )
        for slot, name in operands:
            asked, given = self.placements.get(name), definition.parameter(slot).placement
            if (asked, given) in (("channel", "broadcast"), ("trailing", "channel")):
                raise ChainError(
                    f"{self.name}: {name!r} is annotated as {asked}, but {definition.name} takes "
                    f"{slot} as {given}"
                )
        operands += tuple(definition.drawn(attributes))
        return Step(definition.name, attributes, operands, definition=definition)

    def _primitive(self, node: Expr, place: int) -> Step:
        op = node.op if place == 0 else _EXCHANGED[node.op]
        arguments = [self._argument(arg) for i, arg in enumerate(node.args) if i != place]
        channels = [a for a in arguments if self.placements.get(str(a)) == "channel"]
        if channels:
            if op not in _PER_CHANNEL:
                raise ChainError(
                    f"{self.name}: {op} has no form that takes {channels[0]!r} per channel; "
                    f"annotate it as Expr and pass it in a shape that broadcasts, such as (C, 1, 1)"
                )
            op = _PER_CHANNEL[op]
        return lookup(op).step(arguments, {})

    def _argument(self, node: Expr) -> str | float:
        """A node where it is not the running value: the name it goes by, or its number."""
        if node in self.kept:
            return self.kept[node]
        number = ir.constant(node)
        return ir.name_of(node) if number is None else number

    def _unused_name(self) -> str:
        name = f"kept_{len(self.kept)}"
        while name in self.placements:
            name += "_"
        return name


def _is_number(node: Expr, live: Container[Expr]) -> bool:
    """Whether a value that is computed is none that holds or does not."""
    return node in live and node.op not in (*arity.COMPARISONS, *arity.CONNECTIVES)


def _called(node: Expr) -> str:
    called = node.attrs[0] if node.op == "call" else None
    return called.name if isinstance(called, Op) else node.op


def _running_places(node: Expr) -> tuple[int, ...]:
    """The arguments that may be the running value when the node becomes a step."""
    return (0, 1) if node.op in _EXCHANGED else (0,)


def _in_order(results: Sequence[Expr], live: set[Expr], of_x: set[Expr]) -> list[Expr]:
    """The operations, arguments first, the one that must be running last of all; what is computed
    from operands alone just before it is used; the first of the results after the others.
    """
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack = [(results[0], False), *((r, False) for r in reversed(results[1:]))]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen and node.args and node in live:
            seen.add(node)
            stack.append((node, True))
            # The stack is read from its end: what is pushed first is computed last.
            args = node.args if len(_running_places(node)) == 1 else node.args[::-1]
            args = tuple(sorted(args, key=of_x.__contains__)) if live.issuperset(args) else args
            stack.extend((arg, False) for arg in args)
    return order
