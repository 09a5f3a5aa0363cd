"""Normalisation over axes of the tensor."""

from __future__ import annotations

import pkgutil
from typing import Any

from fusegen.ir import Expr, primitive, reduce_mean, reduce_variance
from fusegen.ops.registry import op
from fusegen.ops.schema import Trailing


def _axes_problem(
    normalized_shape: int | tuple[int, ...] | None, axis: int | None, eps: float
) -> str | None:
    sizes = normalized_shape if isinstance(normalized_shape, tuple) else (normalized_shape or 1,)
    if axis is not None and len(sizes) > 1:
        return "axis is one axis, so normalized_shape must be one number or be left out"
    if any(size < 1 for size in sizes) or normalized_shape == 0:
        return f"normalized_shape wants sizes of at least 1, got {normalized_shape}"
    return None


def _reference(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    normalized_shape: int | tuple[int, ...] | None = None,
    axis: int | None = None,
    eps: float = 1e-5,
) -> Any:
    layer_norm = pkgutil.resolve_name("torch.nn.functional.layer_norm")
    if axis is None:
        shape = normalized_shape or x.shape[-1]
        return layer_norm(x, (shape,) if isinstance(shape, int) else shape, weight, bias, eps)
    last = x.movedim(axis, -1)
    flat = (None if t is None else t.reshape(-1) for t in (weight, bias))
    return layer_norm(last, last.shape[-1:], *flat, eps).movedim(-1, axis)


@op(
    reference=_reference,
    samples=[(), (None, 1)],
    aliases=["layer_norm"],
    same_dtype=True,
    equal="torch.nn.functional.layer_norm",
    check=_axes_problem,
)
def layernorm(
    x: Expr,
    weight: Trailing | None = None,
    bias: Trailing | None = None,
    normalized_shape: int | tuple[int, ...] | None = None,
    *,
    axis: int | None = None,
    eps: float = 1e-5,
) -> Expr:
    """(x - mean) / sqrt(variance + eps), times weight, plus bias.

    Over the last axes, of sizes normalized_shape (just the last where it is left out), as torch's
    layer_norm; or over the one axis that `axis` gives, as torch counts axes. weight and bias lie
    along the axes that are normalised.
    """
    trailing = len(normalized_shape) if isinstance(normalized_shape, tuple) else 1
    axes = x.axes[-trailing:] if axis is None else (x.axes[axis],)
    centred = x - reduce_mean(x, axes)
    result = centred * primitive("rsqrt", reduce_variance(x, axes) + eps)
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias
