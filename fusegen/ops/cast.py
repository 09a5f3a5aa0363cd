"""Casts: to another type anywhere in a chain, to a quantised one at its end."""

from __future__ import annotations

import math
from typing import Any, Literal

from fusegen.arity import WRAPS
from fusegen.ir import Expr, primitive
from fusegen.ops.eager import function_of
from fusegen.ops.registry import op
from fusegen.ops.schema import Typed

# The smallest and the largest finite value.
QUANTISED = {
    "int8": (-128.0, 127.0),
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e5m2": (-57344.0, 57344.0),
}


def _torch_type(name: str) -> Any:
    return function_of(f"torch.{name}")


@op(
    reference=lambda x, dtype: x.to(_torch_type(dtype)),
    samples=[("bfloat16",), ("float16",), ("float32",), ("float64",)],
    ulp=0,
    equal="torch.Tensor.to",
)
def to(
    x: Expr,
    dtype: Literal[
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
    ],
) -> Expr:
    """x rounded to another type, which what follows has too; its gradient is rounded likewise.

    To an integer type it is cut off behind the point, and has no gradient; what the type does not
    hold wraps, where torch leaves open what becomes of it.
    """
    numbers = primitive("where", x, 1, 0) if x.kind == "truth" else x
    if "int" not in dtype:
        return primitive(f"to_{dtype}", numbers)
    if numbers.kind == "whole" and f"wrap_{dtype}" in WRAPS:
        return primitive(f"wrap_{dtype}", numbers)
    whole = primitive("to_int64", numbers)
    return primitive(f"wrap_{dtype}", whole) if f"wrap_{dtype}" in WRAPS else whole


@op(
    reference=lambda x, other: x.to(other.dtype),
    ulp=0,
    equal="torch.Tensor.type_as",
)
def type_as(x: Expr, other: Typed) -> Expr:
    """x rounded to the element type that other has, of which nothing else counts.

    other may be a kept value, x among them, or an operand; it gets no gradient. In a body other is
    the name of the type.
    """
    found: Expr = to.function(x, other)
    return found


def _quantised(x: Any, scale: Any, dtype: str) -> Any:
    low, high = QUANTISED[dtype]
    scaled = x / scale
    if dtype == "int8":
        scaled = scaled.round().nan_to_num(0.0, math.inf, -math.inf)
    return scaled.clamp(low, high).to(_torch_type(dtype))


def _scale_problem(dtype: str, scale: float = 1.0) -> str | None:
    is_fit = math.isfinite(scale) and scale > 0
    return None if is_fit else f"scale must be above 0 and finite, got {scale:g}"


@op(
    reference=_quantised,
    samples=[(0.05, "int8"), (0.01, "float8_e4m3fn"), (0.001, "float8_e5m2")],
    check=_scale_problem,
    equal="torch.clamp and torch.Tensor.to",
)
def quantize(
    x: Expr,
    scale: Expr | float,
    dtype: Literal["int8", "float8_e4m3fn", "float8_e5m2"] = "int8",
) -> Expr:
    """x / scale in an 8-bit type, as the last step: to the nearest, halves to even, no overflow.

    What lies beyond the type's range becomes its largest or smallest finite value; NaN is 0 in
    int8 and NaN in the others. scale is a number or a tensor that broadcasts, such as one value a
    channel. There is no gradient: asked for one, a call is refused.
    """
    low, high = QUANTISED[dtype]
    scaled = x / scale
    if dtype == "int8":
        whole = primitive("round", scaled)
        scaled = primitive("where", primitive("eq", whole, whole), whole, 0)
    above = primitive("where", scaled < low, low, scaled)
    return primitive(f"to_{dtype}", primitive("where", scaled > high, high, above))
