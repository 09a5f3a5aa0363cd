"""What an operation's body reduces with, along axes that are counted from the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr


def reduce_sum(x: Expr, axes: int | Iterable[int]) -> Expr:
    """The sum of x along axes, which stay one wide; -1 is the last, x.axes are all of them."""
    return ir.reduce_sum(x, _checked("reduce_sum", x, axes))


def reduce_mean(x: Expr, axes: int | Iterable[int]) -> Expr:
    """The mean of x along axes, as for reduce_sum."""
    return ir.reduce("mean", _checked("reduce_mean", x, axes), x)


def reduce_variance(x: Expr, axes: int | Iterable[int]) -> Expr:
    """The variance of x along axes, divided by their number, as for reduce_sum."""
    return ir.reduce("variance", _checked("reduce_variance", x, axes), x)


def reduce_max(x: Expr, axes: int | Iterable[int]) -> Expr:
    """The largest of x along axes, as for reduce_sum; the first that is has the gradient."""
    return ir.reduce("max", _checked("reduce_max", x, axes), x)


def class_axis(rank: int, attributes: Mapping[str, object] | None = None) -> int:
    """The axis along which labels name places in a value of so many axes, from the end: what dim
    says where a step has that; else 1, or its only one.
    """
    dim = (attributes or {}).get("dim")
    if isinstance(dim, int):
        return dim % rank - rank
    return 1 - rank if rank > 1 else -1


def _checked(name: str, x: Expr, axes: int | Iterable[int]) -> tuple[int, ...]:
    found = (axes,) if isinstance(axes, int) else tuple(axes)
    for axis in found:
        # A positive one is that of the places within a pooling operation's windows.
        if x.rank is not None and axis not in x.axes and (axis < 0 or axis not in x.extent):
            raise ChainError(
                f"{name}: got axis {axis} of a value of {x.rank} axes, wanted {-x.rank} to -1: in "
                "an operation's body axes count from the end; x.axes[1] is torch's axis 1"
            )
    return found
