"""Non-overlapping pooling of last axes; edges that no window fills are dropped, as in torch."""

from __future__ import annotations

from collections.abc import Callable

from fusegen.ir import Expr, reduce_max, windows
from fusegen.ops.registry import op


def _window_problem(axis_count: int) -> Callable[..., str | None]:
    def problem(
        kernel_size: int | tuple[int, ...], stride: int | tuple[int, ...] | None
    ) -> str | None:
        sizes = _sizes(kernel_size, axis_count)
        if len(sizes) != axis_count or min(sizes) < 1:
            return f"kernel_size wants one size or {axis_count}, each at least 1, got {kernel_size}"
        if stride is not None and _sizes(stride, axis_count) != sizes:
            return f"windows cannot overlap: leave stride out or equal to kernel_size, got {stride}"
        return None

    return problem


def _sizes(size: int | tuple[int, ...], axis_count: int) -> tuple[int, ...]:
    return (size,) * axis_count if isinstance(size, int) else size


@op(
    reference="torch.nn.functional.max_pool2d",
    samples=[(2,), ((3, 2),)],
    ulp=0,
    window_axes=2,
    check=_window_problem(2),
)
def max_pool2d(
    x: Expr, kernel_size: int | tuple[int, ...], stride: int | tuple[int, ...] | None = None
) -> Expr:
    """The maximum of each window of the last two axes; NaN wins.

    The first of equal maxima gets the gradient.
    """
    return reduce_max(x, windows(x, x.axes[-2:]))


@op(
    reference="torch.nn.functional.max_pool3d",
    samples=[(2,), ((1, 2, 3),)],
    ulp=0,
    window_axes=3,
    check=_window_problem(3),
)
def max_pool3d(
    x: Expr, kernel_size: int | tuple[int, ...], stride: int | tuple[int, ...] | None = None
) -> Expr:
    """The maximum of each window of the last three axes; NaN wins.

    The first of equal maxima gets the gradient.
    """
    return reduce_max(x, windows(x, x.axes[-3:]))
