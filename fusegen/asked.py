"""What a tensor tells of itself, or what is made like it, where a call tells it: `x.dim()`,
`x.new_zeros(3)`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.sizes import size_of
from fusegen.standing import current
from fusegen.unsaid import UNTOLD, told_of


def axes_of(x: Expr) -> int:
    """How many axes x has."""
    return len(told_of(x, f"x.dim: {UNTOLD}").shape)


def _count_of(x: Expr) -> int:
    return math.prod(told_of(x, f"x.numel: {UNTOLD}").shape)


def _is_floating(x: Expr) -> bool:
    found: bool = told_of(x, "x.is_floating_point: x.dtype is not known").dtype.is_floating_point
    return found


def _lying(method: str) -> Callable[..., Any]:
    """How x lies in memory."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> Any:
        own = told_of(x, f"x.{method}: how x lies in memory is not known before a call")
        return getattr(getattr(own, "like", own), method)(*args, **kwargs)

    return found


def _new(method: str) -> Callable[..., Any]:
    """A tensor like x, of numbers: x's type and device, which the call tells."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> Any:
        own = told_of(x, f"x.{method}: x.dtype is not known before a call")
        like = sys.modules["torch"].empty(0, dtype=own.dtype, device=own.device)
        return getattr(like, method)(*args, **kwargs)

    return found


def _is_relaid() -> bool:
    """Whether code has asked for a value that is contiguous."""
    tracing = current()
    return tracing is not None and "x.contiguous" in tracing.asked


def _drawn_like(name: str) -> Callable[..., Any]:
    """A tensor of random numbers, of x's shape, type and device, for each call another."""

    def found(x: Expr, **kwargs: Any) -> Expr:
        own = told_of(x, f"torch.{name}: x.shape is not known before a call")
        like: Any = getattr(own, "like", own)
        torch = sys.modules["torch"]
        is_usual = torch.empty_like(like, device="meta").is_contiguous()
        if not is_usual and _is_relaid():
            raise ChainError(
                f"torch.{name}: in which order a value lies in memory is not followed here, but of "
                f"what is contiguous; draw torch.{name.removesuffix('_like')}(x.shape, "
                "device=x.device)"
            )
        drawn = getattr(torch, name)(like, **{"device": own.device, **kwargs})
        return held(drawn)

    return found


def _triangle(name: str) -> Callable[..., Any]:
    """x with zeros on one side of a diagonal of its last two axes."""

    def found(x: Expr, diagonal: int = 0) -> Expr:
        own = told_of(x, f"torch.{name}: {UNTOLD}")
        torch = sys.modules["torch"]
        whole = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device)
        return lookup("masked_fill")(x, held(~getattr(whole, name)(diagonal)), 0.0)

    return found


def _one_hot(x: Expr, num_classes: int = -1) -> Expr:
    """Of each class 1 if it is the one that x says, else 0."""
    own = told_of(x, "torch.one_hot: the axes of what tells classes are not known before a call")
    if num_classes < 0:
        raise ChainError("torch.one_hot: give num_classes, which no call tells")
    torch = sys.modules["torch"]
    numbers = torch.arange(num_classes, device=own.device)
    chosen = ir.primitive("eq", lookup("unsqueeze")(x, -1), held(numbers))
    return ir.primitive("mul", chosen, 1.0)  # which makes integers of conditions


def held(tensor: Any) -> Expr:
    """What stands for a tensor that is made for a call."""
    tracing = current()
    assert tracing is not None  # since there is a call
    return tracing.hold(tensor, "constant")


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


def _empty_like(x: Expr, **kwargs: Any) -> Any:
    """Memory like x, for the function to fill."""
    own = told_of(x, "torch.empty_like: x.shape is not known before a call")
    like: Any = getattr(own, "like", own)
    return sys.modules["torch"].empty_like(like, **{"device": own.device, **kwargs})


_NEW = ("zeros", "ones", "full", "tensor", "empty")
ASKED: Mapping[str, Callable[..., Any]] = {
    "size": size_of,
    **dict.fromkeys(("dim", "ndimension"), axes_of),
    **dict.fromkeys(("numel", "nelement"), _count_of),
    "is_floating_point": _is_floating,
    **{name: _lying(name) for name in ("is_contiguous", "stride")},
    "nan_to_num": _finite,
    **{f"new_{name}": _new(f"new_{name}") for name in _NEW},
    **{name: _triangle(name) for name in ("tril", "triu")},
    "one_hot": _one_hot,
    "empty_like": _empty_like,
    **{f"{name}_like": _drawn_like(f"{name}_like") for name in ("rand", "randn")},
}
