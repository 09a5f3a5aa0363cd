"""Activation functions in straight pieces: what holds at each kink, and for NaN, is torch's."""

from __future__ import annotations

import math
from typing import Any

from fusegen.ir import Expr, primitive
from fusegen.ops.eager import function_of
from fusegen.ops.registry import op
from fusegen.ops.schema import Slope


@op(reference="torch.nn.functional.relu", ulp=0)
def relu(x: Expr) -> Expr:
    """x where x > 0, else 0; NaN stays NaN."""
    return primitive("where", x <= 0, 0, x)


@op(reference="torch.nn.functional.leaky_relu", samples=[(0.2,), ()], ulp=0)
def leaky_relu(x: Expr, negative_slope: float = 0.01) -> Expr:
    """x where x > 0, else negative_slope * x."""
    return primitive("where", x > 0, x, x * negative_slope)


@op(reference="torch.nn.functional.prelu", ulp=0, same_dtype=True)
def prelu(x: Expr, weight: Slope) -> Expr:
    """x where x > 0, else weight * x; weight has one value, or one for each channel (axis 1)."""
    return primitive("where", x > 0, x, weight * x)


def _slopes_problem(lower: float, upper: float, training: bool) -> str | None:
    if lower > upper:
        return f"lower must not be above upper, got {lower:g} and {upper:g}"
    if training:
        return (
            "training=True draws random slopes, which a chain cannot; leave it out, or use "
            "torch.nn.functional.rrelu before the chain"
        )
    return None


@op(
    reference="torch.nn.functional.rrelu",
    samples=[(), (0.25, 0.5)],
    ulp=0,
    check=_slopes_problem,
)
def rrelu(x: Expr, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False) -> Expr:
    """x where x > 0, else x times the middle of lower and upper, as torch's in evaluation."""
    return primitive("where", x > 0, x, x * ((lower + upper) / 2))


@op(reference="torch.nn.functional.relu6", ulp=0)
def relu6(x: Expr) -> Expr:
    """x, at least 0 and at most 6; flat at both."""
    return _between(x, 0.0, 6.0)


def _hardtanh_problem(min_val: float, max_val: float) -> str | None:
    if min_val > max_val:
        return f"min_val must not be above max_val, got {min_val:g} and {max_val:g}"
    return None


@op(
    reference="torch.nn.functional.hardtanh",
    samples=[(), (-0.5, 2.0)],
    ulp=0,
    exact_bounds=True,
    check=_hardtanh_problem,
)
def hardtanh(x: Expr, min_val: float = -1.0, max_val: float = 1.0) -> Expr:
    """x, at least min_val and at most max_val; flat at both, unlike clamp."""
    return _between(x, min_val, max_val)


def _between(x: Expr, low: float, high: float) -> Expr:
    return primitive("where", x <= low, low, primitive("where", x >= high, high, x))


def _hardsigmoid(x: Any) -> Any:
    """torch's own has no second derivative, and a sixth in single precision for the first."""
    between = function_of("torch.nn.functional.hardtanh")(x + 3, 0.0, 6.0) / 6
    return function_of("torch.where")(x.isnan(), x.detach(), between)


@op(reference=_hardsigmoid, ulp=1, equal="torch.nn.functional.hardsigmoid")
def hardsigmoid(x: Expr) -> Expr:
    """(x + 3) / 6, at least 0 and at most 1."""
    # NaN is written as a constant: it passes, and has no gradient, as in torch.
    sloped = primitive("where", primitive("eq", x, x), (x + 3) / 6, math.nan)
    return primitive("where", x <= -3, 0, primitive("where", x >= 3, 1, sloped))


@op(reference="torch.nn.functional.hardswish", ulp=2)
def hardswish(x: Expr) -> Expr:
    """x * hardsigmoid(x)."""
    # A factor on the left too, which is 0 there: an infinity is NaN in torch. Of NaN it is 1.
    rising = primitive("where", x > -3, (x + 3) / 6, 0)
    return x * primitive("where", x < 3, rising, 1)


@op(reference="torch.nn.functional.hardshrink", samples=[(), (0.25,)], ulp=0)
def hardshrink(x: Expr, lambd: float = 0.5) -> Expr:
    """x, but 0 where it is between -lambd and lambd, both included."""
    is_small = primitive("logical_and", x >= -lambd, x <= lambd)
    return primitive("where", is_small, 0, x)


def _lambd_problem(lambd: float) -> str | None:
    return f"lambd must be at least 0, got {lambd:g}" if lambd < 0 else None


@op(
    reference="torch.nn.functional.softshrink",
    samples=[(), (0.25,)],
    ulp=0,
    check=_lambd_problem,
)
def softshrink(x: Expr, lambd: float = 0.5) -> Expr:
    """x, nearer to 0 by lambd, and 0 where it is no further away than that."""
    middle = primitive("where", primitive("eq", x, x), 0, x)
    left = primitive("where", x < -lambd, x + lambd, middle)
    return primitive("where", x > lambd, x - lambd, left)


def _threshold(x: Any, threshold: float, value: float) -> Any:
    return function_of("torch.nn.functional.threshold")(x, threshold, value)


@op(
    reference=_threshold,
    samples=[(0.5, 2.0), (-0.25, 0.0)],
    ulp=0,
    equal="torch.nn.functional.threshold",
)
def threshold(x: Expr, threshold: float, value: float) -> Expr:
    """x where it is above threshold, else value."""
    return primitive("where", x <= threshold, value, x)
