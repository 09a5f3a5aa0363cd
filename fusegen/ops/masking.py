"""Operations on masks, which are tensors of bool, and those that find them."""

from __future__ import annotations

import math
from typing import Any

from fusegen.ir import Expr, primitive
from fusegen.ops.eager import function_of
from fusegen.ops.registry import op
from fusegen.ops.schema import Mask


def _filled(x: Any, mask: Any, value: Any) -> Any:
    if not hasattr(value, "dim") or value.dim() == 0:
        return x.masked_fill(mask, value)
    return function_of("torch.where")(mask, value, x)


@op(reference=_filled, samples=[(0.75,), (-math.inf,), ()], ulp=0, equal="torch.masked_fill")
def masked_fill(x: Expr, mask: Mask, value: Expr | float) -> Expr:
    """x, but value where mask, a bool tensor, is true; a number in x's type, as torch takes it."""
    if x.kind == "truth" and not isinstance(value, Expr):
        apart = primitive("logical_not", mask)
        return primitive("logical_or", x, mask) if value else primitive("logical_and", x, apart)
    if x.kind == "whole" and not isinstance(value, Expr):
        value = float(math.trunc(value))
    return primitive("where", mask, value, x)


@op(reference="torch.isnan", ulp=0)
def isnan(x: Expr) -> Expr:
    """Whether x is NaN."""
    return primitive("ne", x, x)


@op(reference="torch.isinf", ulp=0)
def isinf(x: Expr) -> Expr:
    """Whether x is an infinity."""
    return primitive("eq", primitive("abs", x), math.inf)


@op(reference="torch.isfinite", ulp=0)
def isfinite(x: Expr) -> Expr:
    """Whether x is neither NaN nor an infinity."""
    return primitive("lt", primitive("abs", x), math.inf)
