"""The op bodies are run on expressions: a chain that has met its shapes becomes a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusegen import ir
from fusegen.bind import Bound, Operand
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir import Expr, Graph
from fusegen.ops import Chain, Step
from fusegen.target import code_name


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
    tensors = {name: ir.tensor(f"operand {name}", range(-5, 0), 5) for name, _ in step.operands}
    try:
        body = step.definition.function(x, **tensors, **dict(step.attributes))
    except TypeError:  # a condition that meets a number here: no reduction has one
        return False
    return any(node.op == "reduce" for node in ir.topological([body]))


def lower(bound: Bound) -> Lowered:
    """Run the op bodies: the graph from x and the operands to y."""
    pooled = [axis for axis, _ in bound.windows]

    def leaf(name: str, operand: Operand) -> Expr:
        twins = {-axis for axis in pooled if axis in operand.extent}
        return ir.tensor(name, operand.extent | twins, operand.rank)

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
