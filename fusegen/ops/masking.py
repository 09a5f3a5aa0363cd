"""Operations on masks, which are tensors of bool."""

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
    """x, but value where mask, a bool tensor, is true."""
    return primitive("where", mask, value, x)
