"""Reductions: values of a chain along some of its axes, which are dropped or stay one wide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusegen.errors import ChainError
from fusegen.ir import (
    Expr,
    const,
    count,
    primitive,
    reduce,
    reduce_sum,
)
from fusegen.ops.eager import function_of
from fusegen.ops.registry import op
from fusegen.ops.schema import Labels

Dim = int | tuple[int, ...] | None

_DIMS: tuple[tuple[Any, ...], ...] = ((1,), ((2, 3), True), (None,), (-1, True))
# A second constant is refused: to torch it would be unbiased, and not keepdim.
_SPREADS: tuple[tuple[Any, ...], ...] = ((1,), ((2, 3), 1.0, True), (None,), (1, 0.0))


def axes_of(x: Expr, dim: Dim) -> tuple[int, ...]:
    """The axes that torch's argument dim names: one, several, or all where it is None."""
    if dim is None or x.rank == 0:
        return x.axes
    return tuple(x.axes[d] for d in ((dim,) if isinstance(dim, int) else dim))


def _axis_of(name: str, x: Expr, dim: int) -> tuple[int, ...]:
    """The axis of which the places are asked for."""
    if x.rank == 0:
        raise ChainError(f"{name}: got a value without axes, which has no places")
    return axes_of(x, dim)


def _torch(name: str, *, all_of: bool = False) -> Callable[..., Any]:
    """torch's function of this name; all_of says all axes where dim is None, which it refuses."""

    def reference(x: Any, dim: Dim = None, keepdim: bool = False, **others: Any) -> Any:
        dim = tuple(range(x.dim())) if dim is None and all_of else dim
        return function_of(f"torch.{name}")(x, dim, keepdim=keepdim, **others)

    return reference


@op(reference=_torch("sum"), samples=_DIMS, shaping="reduce", equal="torch.sum")
def sum(x: Expr, dim: Dim = None, keepdim: bool = False) -> Expr:
    """The sum along dim, all axes where it is left out."""
    axes = axes_of(x, dim)
    if axes or x.kind not in ("truth", "whole"):
        return reduce_sum(x, axes)
    return primitive("to_int64", primitive("where", x, 1.0, 0.0) if x.kind == "truth" else x)


@op(reference=_torch("mean"), samples=_DIMS, shaping="reduce", equal="torch.mean")
def mean(x: Expr, dim: Dim = None, keepdim: bool = False) -> Expr:
    """The mean along dim, all axes where it is left out."""
    return reduce("mean", axes_of(x, dim), x)


@op(reference=_torch("var"), samples=_SPREADS, shaping="reduce", equal="torch.var")
def var(x: Expr, dim: Dim = None, *, correction: float = 1.0, keepdim: bool = False) -> Expr:
    """The variance along dim: squared distances from the mean over the count less correction."""
    return _variance(x, axes_of(x, dim), correction)


def _variance(x: Expr, axes: tuple[int, ...], correction: float) -> Expr:
    variance = reduce("variance", axes, x)
    if not correction:
        return variance
    number = count(axes)
    return variance * (number / primitive("maximum", number - correction, 0.0))


@op(reference=_torch("std"), samples=_SPREADS, shaping="reduce", equal="torch.std")
def std(x: Expr, dim: Dim = None, *, correction: float = 1.0, keepdim: bool = False) -> Expr:
    """The square root of var; no gradient where it is 0."""
    return _root(_variance(x, axes_of(x, dim), correction))


def _root(total: Expr) -> Expr:
    """The square root, without a gradient at 0, where the formula's is infinite."""
    is_flat = primitive("eq", total, 0.0)
    return primitive(
        "where", is_flat, 0.0, primitive("sqrt", primitive("where", is_flat, 1.0, total))
    )


def _values(name: str) -> Callable[..., Any]:
    def reference(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        function = function_of(f"torch.{name}")
        if dim is None:
            found = function(x)
            return found.reshape((1,) * x.dim()) if keepdim else found
        return function(x, dim, keepdim).values

    return reference


@op(reference=_values("max"), samples=[(1,), (-1, True), ()], shaping="reduce", equal="torch.max")
def max(x: Expr, dim: int | None = None, keepdim: bool = False) -> Expr:
    """The largest value along dim; the first of equal ones gets the gradient, NaN wins.

    The values of torch.max: of all, where dim is left out, with the gradient in equal shares.
    """
    return reduce("amax" if dim is None else "max", axes_of(x, dim), x)


@op(reference=_values("min"), samples=[(1,), (-1, True), ()], shaping="reduce", equal="torch.min")
def min(x: Expr, dim: int | None = None, keepdim: bool = False) -> Expr:
    """The smallest value along dim; the first of equal ones gets the gradient, NaN wins.

    The values of torch.min: of all, where dim is left out, with the gradient in equal shares.
    """
    return -reduce("amax" if dim is None else "max", axes_of(x, dim), -x)


@op(reference="torch.argmax", samples=[(1,), (-1, True)], shaping="reduce")
def argmax(x: Expr, dim: int, keepdim: bool = False) -> Expr:
    """Where along dim the largest value stands, as int64; the first of equal ones, NaN wins.

    It is the last step of a chain, or given, as whole numbers are no values of one.
    """
    return reduce("argmax", _axis_of("argmax", x, dim), x)


@op(reference="torch.argmin", samples=[(1,), (-1, True)], shaping="reduce")
def argmin(x: Expr, dim: int, keepdim: bool = False) -> Expr:
    """Where along dim the smallest value stands, as int64; the first of equal ones, NaN wins."""
    return reduce("argmax", _axis_of("argmin", x, dim), -x)


@op(reference=_torch("amax", all_of=True), samples=_DIMS, shaping="reduce", equal="torch.amax")
def amax(x: Expr, dim: Dim = None, keepdim: bool = False) -> Expr:
    """The largest value along dim; equal ones share the gradient, NaN wins."""
    return reduce("amax", axes_of(x, dim), x)


@op(reference=_torch("amin", all_of=True), samples=_DIMS, shaping="reduce", equal="torch.amin")
def amin(x: Expr, dim: Dim = None, keepdim: bool = False) -> Expr:
    """The smallest value along dim; equal ones share the gradient, NaN wins."""
    return -reduce("amax", axes_of(x, dim), -x)


def _selected(x: Any, dim: int, index: int, keepdim: bool = False) -> Any:
    found = x.select(dim, index)
    return found.unsqueeze(dim) if keepdim else found


@op(
    reference=_selected,
    samples=[(1, 0), (-1, 2, True), (1, -1)],
    shaping="reduce",
    equal="torch.select",
)
def select(x: Expr, dim: int, index: int, keepdim: bool = False) -> Expr:
    """What stands at one place along dim, from its end if index is below 0."""
    axes = axes_of(x, dim)
    return reduce("pick", axes, x, const(index, "index") if index >= 0 else count(axes) + index)


def _gathered(x: Any, dim: int, index: Any, keepdim: bool = True) -> Any:
    index = index if index.dim() == x.dim() else index.unsqueeze(dim)
    found = x.gather(dim, index)
    return found if keepdim else found.squeeze(dim)


@op(reference=_gathered, samples=[(1,), (1, False)], shaping="reduce", equal="torch.gather")
def gather(x: Expr, dim: int, index: Labels, keepdim: bool = True) -> Expr:
    """What stands along dim where index says: one place for each index of all other axes of x.

    index is of int64, and one wide along dim or without that axis. What it says that is no place
    gives NaN, where torch stops the program.
    """
    axes = axes_of(x, dim)
    is_place = (index >= 0.0) & (index < count(axes))
    return primitive("where", is_place, reduce("pick", axes, x, index), math.nan)


def _vector_norm(x: Any, p: float, dim: Dim, keepdim: bool) -> Any:
    return function_of("torch.linalg.vector_norm")(x, p, dim, keepdim)


_ORDERS = ((2.0, 1), (1.0, (2, 3), True), (math.inf, -1), (-math.inf, 1), (3.0,), (0.0, 1))


@op(
    reference=_vector_norm,
    samples=_ORDERS,
    aliases=["vector_norm"],
    shaping="reduce",
    equal="torch.linalg.vector_norm",
)
def norm(x: Expr, p: float = 2.0, dim: Dim = None, keepdim: bool = False) -> Expr:
    """The p-norm along dim, as torch.linalg.vector_norm; p may be any number, inf too."""
    return norm_along(x, p, axes_of(x, dim))


def norm_along(x: Expr, p: float, axes: tuple[int, ...]) -> Expr:
    """The p-norm along axes, without a gradient where it is 0, or for p < 0 infinite."""
    size = primitive("abs", x)
    if math.isinf(p):
        return reduce("amax", axes, size) if p > 0 else -reduce("amax", axes, -size)
    if p == 0:
        zero = primitive("sign", x)  # where it is that, of x's type, and with a gradient of zeros
        return reduce_sum(primitive("where", primitive("eq", x, 0.0), zero, 1.0), axes)
    if p == 1:
        return reduce_sum(size, axes)
    if p == 2:
        return _root(reduce_sum(x * x, axes))
    power = primitive("pow", size, p)
    if p < 1:  # which is steep at 0, where torch has no gradient
        is_zero = primitive("eq", x, 0.0)
        safe = primitive("pow", primitive("where", is_zero, 1.0, size), p)
        power = primitive("where", is_zero, 0.0 if p > 0 else math.inf, safe)
    total = reduce_sum(power, axes)
    is_flat = primitive("eq", total, 0.0)
    safe = primitive("where", is_flat, 1.0, total)
    flat = 0.0 if p > 0 else math.inf
    return primitive("where", is_flat, flat, primitive("pow", safe, 1.0 / p))


@op(
    reference=_torch("logsumexp"),
    samples=[(1,), ((2, 3), True), (-1,)],
    shaping="reduce",
    equal="torch.logsumexp",
)
def logsumexp(x: Expr, dim: int | tuple[int, ...], keepdim: bool = False) -> Expr:
    """log(sum(exp(x))) along dim, where no exponential overflows."""
    axes = axes_of(x, dim)
    largest = reduce("bound", axes, x)
    is_infinite = primitive("eq", primitive("abs", largest), math.inf)
    shift = primitive("where", is_infinite, 0.0, largest)
    return primitive("log", reduce_sum(primitive("exp", x - shift), axes)) + shift


@op(reference="torch.softmax", samples=[(1,), (-1,), (2,)])
def softmax(x: Expr, dim: int) -> Expr:
    """exp(x) over its sum along dim."""
    axes = axes_of(x, dim)
    power = primitive("exp", x - reduce("bound", axes, x))
    return power / reduce_sum(power, axes)


@op(reference="torch.log_softmax", samples=[(1,), (-1,)])
def log_softmax(x: Expr, dim: int) -> Expr:
    """The logarithm of softmax."""
    axes = axes_of(x, dim)
    shifted = x - reduce("bound", axes, x)
    return shifted - primitive("log", reduce_sum(primitive("exp", shifted), axes))


@op(reference="torch.nn.functional.softmin", samples=[(1,)])
def softmin(x: Expr, dim: int) -> Expr:
    """softmax of -x."""
    return softmax.function(-x, dim)


def _squeezed(x: Any, dim: Dim) -> Any:
    return x.squeeze() if dim is None else x.squeeze(dim)


@op(
    reference=_squeezed,
    samples=[(), (1,), ((0, 1),)],
    ulp=0,
    shaping="squeeze",
    equal="torch.squeeze",
)
def squeeze(x: Expr, dim: Dim = None) -> Expr:
    """x without those of its axes dim, or of all, that are one wide."""
    return x


@op(reference="torch.unsqueeze", samples=[(0,), (-1,)], ulp=0, shaping="unsqueeze")
def unsqueeze(x: Expr, dim: int) -> Expr:
    """x with one more axis, one wide, at dim."""
    return x
