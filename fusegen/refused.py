"""Refused: what code does with tensors and cannot do with an expression, and what to write."""

from __future__ import annotations

from typing import Any

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.standing import current
from fusegen.unsaid import UNKNOWN, NotKnownYet, current_call


def refuse_truth(x: Expr) -> bool:
    """Raise for `if` on a value; where a call may have numbers there, only that tells."""
    told = "an Expr has no truth value while the chain is built; use where(condition, a, b)"
    tracing = current()
    if tracing is not None and current_call() is None:
        others = [n for n in ir.inputs([x]) if n is not tracing.main]
        if any(ir.name_of(n) not in tracing.held for n in others):
            raise NotKnownYet(f"{told}, or call the function with a number")
    raise TypeError(told)


def refuse_products(x: Expr, other: object) -> Any:
    """Raise for x @ other."""
    raise ChainError(f"x @ y: {UNKNOWN['matmul']}")
