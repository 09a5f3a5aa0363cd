"""A chain's steps one after the other: on tensors, or on the expressions of another function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusegen.ir import Expr
from fusegen.ops import Chain, Op, Step


def walked(
    chain: Chain,
    x: Any,
    operands: Mapping[str, Any],
    run: Callable[[Step, Any, dict[str, Any]], Any],
) -> Any:
    """What the steps make of x, where run does one of them: the result, or a tuple of it and what
    is given. What a step draws itself is not among the operands that run is given.
    """
    values, running = dict(operands), x
    for step in chain.steps:
        if step.is_naming:
            values[step.names[0]] = running
        elif step.op == "recall":
            running = values[step.names[0]]
        elif step.taken_up is not None:
            running = values[step.taken_up]
        else:
            assert isinstance(step.definition, Op)
            drawn = {p.name for p in step.definition.parameters if p.is_drawn}
            running = run(step, running, {p: values[n] for p, n in step.operands if p not in drawn})
    return (running, *[values[name] for name in chain.gives]) if chain.gives else running


def applied(chain: Chain, x: Expr, operands: Mapping[str, Any]) -> Any:
    """What a chain's steps make of expressions, where it is part of a function that is traced."""

    def run(step: Step, running: Expr, own: dict[str, Any]) -> Any:
        assert isinstance(step.definition, Op)
        return step.definition(running, **own, **dict(step.attributes))

    return walked(chain, x, operands, run)
