"""Arithmetic by number, tensor or per-channel tensor; add, sub, mul and div are primitives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusegen.ir import Expr, primitive, quotient
from fusegen.ops.eager import function_of
from fusegen.ops.registry import op
from fusegen.ops.schema import Channel


def _along(x: Any, values: Any, axis: int) -> Any:
    """A per-channel tensor of any accepted shape, laid along its axis of x."""
    shape = [1] * x.dim()
    shape[axis] = -1
    return values.reshape(shape)


@op(reference=lambda x, bias, axis: x + _along(x, bias, axis), ulp=0, equal="torch.add")
def add_channel(x: Expr, bias: Channel, *, axis: int = 1) -> Expr:
    """x + bias, one value for each channel."""
    return x + bias


@op(reference=lambda x, bias, axis: x - _along(x, bias, axis), ulp=0, equal="torch.sub")
def sub_channel(x: Expr, bias: Channel, *, axis: int = 1) -> Expr:
    """x - bias, one value for each channel."""
    return x - bias


@op(reference=lambda x, scale, axis: x * _along(x, scale, axis), ulp=0, equal="torch.mul")
def mul_channel(x: Expr, scale: Channel, *, axis: int = 1) -> Expr:
    """x * scale, one value for each channel."""
    return x * scale


@op(reference=lambda x, scale, axis: x / _along(x, scale, axis), ulp=0, equal="torch.div")
def div_channel(x: Expr, scale: Channel, *, axis: int = 1) -> Expr:
    """x / scale, one value for each channel."""
    return x / scale


@op(reference="torch.clone", ulp=0)
def clone(x: Expr) -> Expr:
    """x as it is, as a tensor of its own."""
    return x


@op(reference=lambda x, other: other - x, samples=[(), (0.75,)], ulp=0, equal="torch.rsub")
def rsub(x: Expr, other: Expr | float) -> Expr:
    """other - x, a number or a tensor."""
    return primitive("sub", other, x)


@op(reference=lambda x, other: other / x, samples=[(), (0.75,)], ulp=1, equal="torch.div")
def rdiv(x: Expr, other: Expr | float) -> Expr:
    """other / x, a number or a tensor."""
    return primitive("div", other, x)


@op(reference=lambda x, other: other**x, samples=[(0.75,)], ulp=2, equal="torch.pow")
def rpow(x: Expr, other: Expr | float) -> Expr:
    """other to the power x, a number or a tensor."""
    return primitive("pow", other, x)


def _left_by(x: Expr, other: Expr | float) -> tuple[Expr, Expr]:
    """What is left of x by other with x's sign, and whether other has another one."""
    left = primitive("fmod", x, other)
    if isinstance(other, Expr):
        return left, (other > 0) & (left < 0) | (other < 0) & (left > 0)
    return left, left > 0 if other < 0 else left < 0


@op(reference="torch.remainder", samples=[(0.75,), (-0.5,), ()], ulp=0)
def remainder(x: Expr, other: Expr | float) -> Expr:
    """What is left of x by a number or a tensor, with the sign of that, as Python's %."""
    left, differs = _left_by(x, other)
    return primitive("where", differs, left + other, left)


def _floored(x: Any, other: Any) -> Any:
    return function_of("torch.div")(x, other, rounding_mode="floor")


@op(reference=_floored, samples=[(0.75,), (-0.5,), ()], ulp=1, equal="torch.floor_divide")
def floor_divide(x: Expr, other: Expr | float) -> Expr:
    """x by a number or a tensor, rounded down; gradient 0."""
    left, differs = _left_by(x, other)
    if _are_integers(x, other):
        cut = quotient(x, other)
        return primitive("where", differs, cut - 1, cut)
    exact = (x - left) / other
    exact = primitive("where", differs, exact - 1.0, exact)
    whole = primitive("floor", exact)
    whole = primitive("where", exact - whole > 0.5, whole + 1.0, whole)
    as_divided = primitive("detach", x / other)
    whole = primitive("where", primitive("eq", exact, 0.0), as_divided * 0.0, whole)
    if isinstance(other, Expr):
        return primitive("where", primitive("eq", other, 0.0), as_divided, whole)
    return whole if other else as_divided


def _are_integers(x: Expr, other: Expr | float) -> bool:
    return x.kind == "whole" and not (isinstance(other, Expr) and other.kind == "number")


def _cut(x: Any, other: Any) -> Any:
    return function_of("torch.div")(x, other, rounding_mode="trunc")


@op(reference=_cut, samples=[(0.75,), (-0.5,)], ulp=1, equal="torch.div")
def trunc_divide(x: Expr, other: Expr | float) -> Expr:
    """x by a number or a tensor, cut off behind the point; gradient 0."""
    if _are_integers(x, other):
        return quotient(x, other)
    return primitive("trunc", x / other)


def _number_beside(name: str) -> Callable[..., Any]:
    def reference(x: Any, other: Any) -> Any:
        other = other if hasattr(other, "dtype") else x.new_full((), other)
        return function_of(f"torch.{name}")(x, other)

    return reference


@op(reference=_number_beside("fmax"), samples=[(), (0.75,)], ulp=0, equal="torch.fmax")
def fmax(x: Expr, other: Expr | float) -> Expr:
    """The larger of x and other, a number or a tensor; of NaN and a number the number."""
    return _of_numbers(x >= other, x, other)


@op(reference=_number_beside("fmin"), samples=[(), (0.75,)], ulp=0, equal="torch.fmin")
def fmin(x: Expr, other: Expr | float) -> Expr:
    """The smaller of x and other, a number or a tensor; of NaN and a number the number."""
    return _of_numbers(x <= other, x, other)


def _of_numbers(is_first: Expr, x: Expr, other: Expr | float) -> Expr:
    """One of two, all of whose gradient goes to it."""
    is_none = primitive("ne", other, other)
    return primitive("where", is_first | is_none, x, other)


def _bounds_problem(min: float | None, max: float | None) -> str | None:
    return "give min, max or both" if min is None and max is None else None


@op(
    reference="torch.clamp",
    aliases=["clip"],
    samples=[(-1.0, 1.0), (0.0, None), (None, 0.5), (1.0, -1.0)],
    ulp=0,
    check=_bounds_problem,
)
def clamp(x: Expr, min: float | None = None, max: float | None = None) -> Expr:
    """x, at least min and at most max; both bounds let the gradient through, a NaN does not."""
    # NaN is written as a constant: it passes, as in torch, and has no gradient, as in torch.
    result = x
    if x.kind != "whole":
        result = primitive("where", primitive("eq", x, x), x, math.nan)
    if max is not None:
        result = primitive("where", x > max, max, result)
    if min is not None:
        # Where the bounds are crossed the upper one wins, as in torch.
        result = primitive("where", x < min, min if max is None or min <= max else max, result)
    return result


@op(reference="torch.square", ulp=0)
def square(x: Expr) -> Expr:
    """x * x."""
    return x * x


@op(reference="torch.reciprocal", ulp=1)
def reciprocal(x: Expr) -> Expr:
    """1 / x."""
    return 1 / x


def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return function_of("torch.lerp")(x, end, weight)


@op(reference=_lerp, samples=[(), (0.25,), (0.75,)], same_dtype=True, equal="torch.lerp")
def lerp(x: Expr, end: Expr, weight: Expr | float) -> Expr:
    """x + weight * (end - x), by the formula that is exact at the nearer end, as torch's."""
    way = end - x
    if isinstance(weight, Expr):
        is_near = primitive("abs", weight) < 0.5
        nearer = primitive("where", is_near, x, end)
        return nearer + primitive("where", is_near, weight, weight - 1) * way
    return x + way * weight if abs(weight) < 0.5 else end + way * (weight - 1)


@op(reference="torch.addcmul", samples=[(), (0.5,)])
def addcmul(x: Expr, tensor1: Expr, tensor2: Expr, *, value: float = 1.0) -> Expr:
    """x + value * tensor1 * tensor2."""
    return x + value * tensor1 * tensor2


@op(reference="torch.addcdiv", samples=[(), (0.5,)])
def addcdiv(x: Expr, tensor1: Expr, tensor2: Expr, *, value: float = 1.0) -> Expr:
    """x + value * tensor1 / tensor2."""
    return x + value * tensor1 / tensor2


def _logaddexp(x: Any, other: Any) -> Any:
    return function_of("torch.logaddexp")(x, other)


@op(reference=_logaddexp, equal="torch.logaddexp", same_dtype=True)
def logaddexp(x: Expr, other: Expr) -> Expr:
    """log(exp(x) + exp(other)), where nothing overflows."""
    # Infinities that are equal have no distance.
    distance = primitive("where", primitive("eq", x, other), 0.0, primitive("abs", x - other))
    return primitive("maximum", x, other) + primitive("log1p", primitive("exp", -distance))


def _xlogy(x: Any, other: Any) -> Any:
    return function_of("torch.xlogy")(x, other)


@op(reference=_xlogy, equal="torch.xlogy")
def xlogy(x: Expr, other: Expr) -> Expr:
    """x * log(other), which is 0 where x is, whatever the logarithm, but for that of NaN."""
    has_no_log = (other <= 0.0) | primitive("eq", other, math.inf)
    is_nothing = primitive("eq", x, 0.0) & has_no_log
    return x * primitive("log", primitive("where", is_nothing, 1.0, other))


def _logit_problem(eps: float) -> str | None:
    return None if eps <= 0.5 else f"eps is {eps:g}, wanted one up to 0.5, or below 0 for none"


@op(reference="torch.logit", samples=[(), (1e-3,)], ulp=8, check=_logit_problem)
def logit(x: Expr, eps: float = -1.0) -> Expr:
    """log(x / (1 - x)), the inverse of sigmoid; x is kept eps from 0 and 1, if that is not < 0."""
    if eps < 0:  # NaN outside, and its gradient too
        inner = x * primitive("where", (x < 0.0) | (x > 1.0), math.nan, 1.0)
    else:
        inner = primitive("where", x > 1.0 - eps, 1.0 - eps, primitive("where", x < eps, eps, x))
    return primitive("log", inner) - primitive("log", 1.0 - inner)


@op(reference="torch.frac", ulp=0)
def frac(x: Expr) -> Expr:
    """What x has behind the point, with its sign."""
    return x - primitive("trunc", x)


@op(
    reference=lambda x, nan, posinf, neginf: x.nan_to_num(nan, posinf, neginf),
    samples=[(0.0, 5.0, -5.0)],
    ulp=0,
    equal="torch.nan_to_num",
)
def nan_to_num(x: Expr, nan: float, posinf: float, neginf: float) -> Expr:
    """x with numbers for NaN and the infinities; in a function these have torch's defaults."""
    finite = primitive("where", primitive("eq", x, math.inf), posinf, x)
    finite = primitive("where", primitive("eq", x, -math.inf), neginf, finite)
    return primitive("where", primitive("ne", x, x), nan, finite)
