"""Values side by side along an axis of their own."""

from __future__ import annotations

from typing import Any

from fusegen.ir import Expr, const, position, primitive
from fusegen.ops.eager import function_of
from fusegen.ops.registry import op


def _stacked(x: Any, second: Any, third: Any = None, fourth: Any = None, dim: int = 0) -> Any:
    values = [value for value in (x, second, third, fourth) if value is not None]
    return function_of("torch.stack")(values, dim)


def _bad_dim(dim: int) -> str | None:
    return None if -64 < dim < 64 else f"dim is {dim}, wanted an axis of the result"


@op(
    reference=_stacked,
    samples=[(), (1,), (-1,)],
    ulp=0,
    shaping="stack",
    equal="torch.stack",
    check=_bad_dim,
)
def stack(
    x: Expr, second: Expr, third: Expr | None = None, fourth: Expr | None = None, *, dim: int = 0
) -> Expr:
    """x and up to three values of its shape as one, along a new axis at dim."""
    values = [value for value in (x, second, third, fourth) if value is not None]
    place = position({x.axes[dim]}, x.rank)
    *others, found = values
    for i in reversed(range(len(others))):
        found = primitive("where", primitive("eq", place, const(i, "index")), others[i], found)
    return found
