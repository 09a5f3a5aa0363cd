"""A chain inside of a function that is traced itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusegen.ir import Expr
from fusegen.ops import Chain, Op


def applied(chain: Chain, x: Expr, operands: Mapping[str, Any]) -> Any:
    """What a chain's steps make of expressions, where it is part of a function that is traced."""
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
            own = {p: values[n] for p, n in step.operands if p not in drawn}
            running = step.definition(running, **own, **dict(step.attributes))
    return (running, *[values[n] for n in chain.gives]) if chain.gives else running
