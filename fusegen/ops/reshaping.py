"""Steps that say in what shape a value is seen, and move no data."""

from __future__ import annotations

import math

from fusegen.ir import Expr
from fusegen.ops.registry import op


def _check_dims(start_dim: int, end_dim: int) -> str | None:
    if (start_dim < 0) == (end_dim < 0) and start_dim > end_dim:
        return f"start_dim {start_dim} is behind end_dim {end_dim}; name the first axis first"
    return None


def _check_sizes(sizes: tuple[int, ...]) -> str | None:
    if any(size < -1 for size in sizes):
        return f"got the sizes {sizes}, wanted none below 0 but one -1 for what is left"
    if sizes.count(-1) > 1:
        return f"got the sizes {sizes}, wanted -1 once at most; write the others out"
    if -1 in sizes and not math.prod(sizes):
        return f"got the sizes {sizes}, where -1 may be anything; write it out"
    return None


@op(
    reference="torch.flatten",
    samples=[(), (1,), (1, -2), (2, 2)],
    ulp=0,
    shaping="merge",
    check=_check_dims,
)
def flatten(x: Expr, start_dim: int = 0, end_dim: int = -1) -> Expr:
    """x with its axes from start_dim to end_dim as one."""
    return x


@op(
    reference="torch.unflatten",
    samples=[(-2, (2, -1)), (1, (1, -1)), (0, (-1, 1, 2))],
    ulp=0,
    shaping="split",
    check=lambda dim, sizes: _check_sizes(sizes),
)
def unflatten(x: Expr, dim: int, sizes: tuple[int, ...]) -> Expr:
    """x with its axis dim as several, of these sizes; one may be -1, for what is left."""
    return x


@op(
    reference="torch.reshape",
    samples=[((6, -1),), ((-1,),), ((-1, 3, 1, 5),)],
    ulp=0,
    aliases=["view"],
    shaping="view",
    check=lambda shape: _check_sizes(shape),
)
def reshape(x: Expr, shape: tuple[int, ...]) -> Expr:
    """x's elements in another shape; one size may be -1, for what is left."""
    return x
