"""Activation functions. tanh and sigmoid are primitives and stand with those; what bends at a
number, or is flat beyond one, is in `piecewise`.
"""

from __future__ import annotations

import math
from typing import Literal

from fusegen.ir import Expr, primitive
from fusegen.ops.registry import op

_SQRT_1_2 = math.sqrt(0.5)
_BETA = math.sqrt(2) * (2 / math.sqrt(math.pi)) * 0.5
_KAPPA = 0.044715
# Where exp(-x) is below half an ulp of x even in double precision, softplus(x) is x.
_SOFTPLUS_IS_X = 40.0
# "Self-Normalizing Neural Networks", Klambauer and others, 2017.
_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946


@op(reference="torch.nn.functional.gelu", samples=[("none",), ("tanh",)], ulp=2)
def gelu(x: Expr, approximate: Literal["none", "tanh"] = "none") -> Expr:
    """x times the normal distribution function, exact or by torch's tanh formula."""
    # The order of operations is torch's own, so that rounding is too.
    if approximate == "none":
        return x * 0.5 * (1 + primitive("erf", x * _SQRT_1_2))
    cube = x * x * x
    inner = _BETA * (x + _KAPPA * cube)
    return 0.5 * x * (1 + primitive("tanh", inner))


@op(reference="torch.nn.functional.silu", ulp=2, aliases=["swish"])
def silu(x: Expr) -> Expr:
    """x * sigmoid(x)."""
    return x * primitive("sigmoid", x)


@op(reference="torch.nn.functional.elu", samples=[(), (0.5,)], ulp=2)
def elu(x: Expr, alpha: float = 1.0) -> Expr:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    return primitive("where", x <= 0, alpha * primitive("expm1", x), x)


@op(reference="torch.nn.functional.selu", ulp=2)
def selu(x: Expr) -> Expr:
    """The elu that keeps mean 0 and variance 1: scale * elu(x, alpha), with selu's own two."""
    left = primitive("expm1", x) * (_SELU_ALPHA * _SELU_SCALE)
    return primitive("where", x <= 0, left, x * _SELU_SCALE)


def _celu_problem(alpha: float) -> str | None:
    return "alpha must not be 0, which the formula divides by" if alpha == 0 else None


@op(reference="torch.nn.functional.celu", samples=[(), (0.5,)], ulp=2, check=_celu_problem)
def celu(x: Expr, alpha: float = 1.0) -> Expr:
    """x where x > 0, else alpha * (exp(x / alpha) - 1)."""
    return primitive("where", x <= 0, primitive("expm1", x * (1 / alpha)) * alpha, x)


@op(reference="torch.nn.functional.mish", ulp=4)
def mish(x: Expr) -> Expr:
    """x * tanh(softplus(x))."""
    return x * primitive("tanh", _softplus(x, _SOFTPLUS_IS_X))


def _softplus(x: Expr, threshold: float) -> Expr:
    grown = primitive("log1p", primitive("exp", x))
    return primitive("where", x > threshold, x, grown)


def _beta_problem(beta: float, threshold: float) -> str | None:
    return "beta must not be 0, which the formula divides by" if beta == 0 else None


@op(
    reference="torch.nn.functional.softplus",
    samples=[(), (2.0, 3.0), (0.5, 20.0)],
    ulp=4,
    check=_beta_problem,
)
def softplus(x: Expr, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    """log(1 + exp(beta * x)) / beta, a smooth relu; x where beta * x > threshold."""
    scaled = x * beta
    grown = primitive("log1p", primitive("exp", scaled)) / beta
    # A threshold beyond the least that changes nothing would only let exp overflow.
    return primitive("where", scaled > min(threshold, _SOFTPLUS_IS_X), x, grown)


@op(reference="torch.nn.functional.softsign", ulp=1)
def softsign(x: Expr) -> Expr:
    """x / (1 + |x|)."""
    return x / (1 + primitive("abs", x))


@op(reference="torch.nn.functional.logsigmoid", ulp=4, aliases=["log_sigmoid"])
def logsigmoid(x: Expr) -> Expr:
    """log(sigmoid(x)), exact far on both sides."""
    distance = primitive("where", x < 0, x, -x)
    return primitive("where", x < 0, x, 0) - primitive("log1p", primitive("exp", distance))


@op(reference="torch.nn.functional.tanhshrink", ulp=4)
def tanhshrink(x: Expr) -> Expr:
    """x - tanh(x)."""
    return x - primitive("tanh", x)
