"""What a tensor tells of itself, or what is made like it, where a call tells it: `x.dim()`,
`x.new_zeros(3)`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.sizes import size_of
from fusegen.unsaid import UNTOLD, told_of


def axes_of(x: Expr) -> int:
    """How many axes x has."""
    return len(told_of(x, f"x.dim: {UNTOLD}").shape)


def _count_of(x: Expr) -> int:
    return math.prod(told_of(x, f"x.numel: {UNTOLD}").shape)


def _is_floating(x: Expr) -> bool:
    found: bool = told_of(x, "x.is_floating_point: x.dtype is not known").dtype.is_floating_point
    return found


def _new(method: str) -> Callable[..., Any]:
    """A tensor like x, of numbers: x's type and device, which the call tells."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> Any:
        own = told_of(x, f"x.{method}: x.dtype is not known before a call")
        like = sys.modules["torch"].empty(0, dtype=own.dtype, device=own.device)
        return getattr(like, method)(*args, **kwargs)

    return found


def _finite(
    x: Expr, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Expr:
    """Numbers for NaN and infinities, the largest of x's type where none is told."""
    if posinf is None or neginf is None:
        dtype = told_of(x, "torch.nan_to_num: x.dtype is not known before a call").dtype
        limits = sys.modules["torch"].finfo(dtype)
        posinf = limits.max if posinf is None else posinf
        neginf = limits.min if neginf is None else neginf
    return lookup("nan_to_num")(x, 0.0 if nan is None else nan, posinf, neginf)


_NEW = ("zeros", "ones", "full", "tensor", "empty")
ASKED: Mapping[str, Callable[..., Any]] = {
    "size": size_of,
    **dict.fromkeys(("dim", "ndimension"), axes_of),
    **dict.fromkeys(("numel", "nelement"), _count_of),
    "is_floating_point": _is_floating,
    "nan_to_num": _finite,
    **{f"new_{name}": _new(f"new_{name}") for name in _NEW},
}
