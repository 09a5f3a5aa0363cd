"""Activation functions. tanh and sigmoid are primitives and stand with those."""

from __future__ import annotations

import math
from typing import Literal

from fusegen.ir import Expr, primitive
from fusegen.ops.registry import op

_SQRT_1_2 = math.sqrt(0.5)
_BETA = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5
_KAPPA = 0.044715


@op(reference="torch.nn.functional.leaky_relu", samples=[(0.2,), ()], ulp=0)
def leaky_relu(x: Expr, negative_slope: float = 0.01) -> Expr:
    """x where x > 0, else negative_slope * x."""
    return primitive("where", x > 0, x, x * negative_slope)


@op(reference="torch.nn.functional.relu", ulp=0)
def relu(x: Expr) -> Expr:
    """x where x > 0, else 0; NaN stays NaN."""
    return primitive("where", x <= 0, 0, x)


@op(reference="torch.nn.functional.gelu", samples=[("none",), ("tanh",)], ulp=2)
def gelu(x: Expr, approximate: Literal["none", "tanh"] = "none") -> Expr:
    """x times the normal distribution function, exact or by torch's tanh formula."""
    # The order of operations is torch's own, so that rounding is too.
    if approximate == "none":
        return x * 0.5 * (1 + primitive("erf", x * _SQRT_1_2))
    cube = x * x * x
    inner = _BETA * (x + _KAPPA * cube)
    return 0.5 * x * (1 + primitive("tanh", inner))


@op(reference="torch.nn.functional.silu", ulp=2)
def silu(x: Expr) -> Expr:
    """x * sigmoid(x)."""
    return x * primitive("sigmoid", x)
