"""Normalisation over axes of the tensor."""

from __future__ import annotations

import math
from typing import Any

from fusegen.ir import Expr, count, primitive, reduce, reduce_sum
from fusegen.ops.eager import function_of
from fusegen.ops.reduction import norm_along
from fusegen.ops.registry import op
from fusegen.ops.schema import Channel, Trailing

_SINGLE_EPSILON = 2.0**-23


def _axes_problem(
    normalized_shape: int | tuple[int, ...] | None, axis: int | None, eps: float | None
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
    layer_norm = function_of("torch.nn.functional.layer_norm")
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
    axes = _trailing_axes(x, normalized_shape, axis)
    return _scaled(_standardised(x, axes, eps), weight, bias)


def _trailing_axes(
    x: Expr, normalized_shape: int | tuple[int, ...] | None, axis: int | None
) -> tuple[int, ...]:
    trailing = len(normalized_shape) if isinstance(normalized_shape, tuple) else 1
    return x.axes[-trailing:] if axis is None else (x.axes[axis],)


def _standardised(x: Expr, axes: tuple[int, ...], eps: float) -> Expr:
    centred = x - reduce("mean", axes, x)
    return centred * primitive("rsqrt", reduce("variance", axes, x) + eps)


def _scaled(x: Expr, weight: Expr | None, bias: Expr | None) -> Expr:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _rms_reference(
    x: Any,
    weight: Any = None,
    normalized_shape: int | tuple[int, ...] | None = None,
    axis: int | None = None,
    eps: float | None = None,
) -> Any:
    rms_norm = function_of("torch.nn.functional.rms_norm")
    if axis is None:
        shape = normalized_shape or x.shape[-1]
        return rms_norm(x, (shape,) if isinstance(shape, int) else shape, weight, eps)
    last = x.movedim(axis, -1)
    flat = None if weight is None else weight.reshape(-1)
    return rms_norm(last, last.shape[-1:], flat, eps).movedim(-1, axis)


@op(
    reference=_rms_reference,
    samples=[(), (None, 1), (None, -1, 1e-3)],
    same_dtype=True,
    check=_axes_problem,
    equal="torch.nn.functional.rms_norm",
)
def rms_norm(
    x: Expr,
    weight: Trailing | None = None,
    normalized_shape: int | tuple[int, ...] | None = None,
    *,
    axis: int | None = None,
    eps: float | None = None,
) -> Expr:
    """x / sqrt(mean of squares + eps), times weight.

    Over the axes that layernorm would take. eps, where it is left out, is the epsilon of the type
    that x is computed in.
    """
    axes = _trailing_axes(x, normalized_shape, axis)
    eps = _SINGLE_EPSILON if eps is None else eps
    return _scaled(x * primitive("rsqrt", reduce("mean", axes, x * x) + eps), weight, None)


def _eps_problem(p: float, dim: int | tuple[int, ...], eps: float) -> str | None:
    return None if eps >= 0 else f"eps wants a number of at least 0, got {eps}"


@op(
    reference="torch.nn.functional.normalize",
    samples=[(), (1.0, -1), (math.inf, 1, 0.5), (2.0, (2, 3))],
    check=_eps_problem,
)
def normalize(x: Expr, p: float = 2.0, dim: int | tuple[int, ...] = 1, eps: float = 1e-12) -> Expr:
    """x over its p-norm along dim, which counts as eps where it is smaller."""
    axes = tuple(x.axes[d] for d in ((dim,) if isinstance(dim, int) else dim))
    size = norm_along(x, p, axes)
    return x / primitive("where", size < eps, eps, size)


def _similarity_problem(dim: int, eps: float) -> str | None:
    return None if eps >= 0 else f"eps wants a number of at least 0, got {eps}"


def _similarity(x: Any, other: Any, dim: int, eps: float) -> Any:
    return function_of("torch.nn.functional.cosine_similarity")(x, other, dim, eps)


@op(
    reference=_similarity,
    samples=[(), (-1, 0.5)],
    shaping="reduce",
    check=_similarity_problem,
    equal="torch.nn.functional.cosine_similarity",
)
def cosine_similarity(x: Expr, other: Expr, dim: int = 1, eps: float = 1e-8) -> Expr:
    """The cosine of the angle between x and other along dim.

    The sum of products of what each is over its norm. That counts as eps where it is smaller, but
    has the gradient of the norm there too, as in torch.
    """
    axes = (x.axes[dim],)

    def length(value: Expr) -> Expr:
        size = norm_along(value, 2.0, axes)
        return size + primitive("detach", primitive("where", size < eps, eps - size, 0.0))

    return reduce_sum((x / length(x)) * (other / length(other)), axes)


def _groups_problem(num_groups: int, eps: float) -> str | None:
    return None if num_groups >= 1 else f"num_groups wants at least 1, got {num_groups}"


@op(
    reference="torch.nn.functional.group_norm",
    samples=[(3,), (1,)],
    keeps_dtype=True,
    groups="num_groups",
    check=_groups_problem,
)
def group_norm(
    x: Expr,
    num_groups: int,
    weight: Channel | None = None,
    bias: Channel | None = None,
    *,
    eps: float = 1e-5,
) -> Expr:
    """Each sample's groups of channels with mean 0 and variance 1, times weight, plus bias.

    Channels are axis 1, which the body sees as two: groups, and channels within one.
    """
    return _scaled(_standardised(x, x.axes[2:], eps), weight, bias)


def _unbiased(x: Expr, axes: tuple[int, ...]) -> Expr:
    number = count(axes)
    return reduce("variance", axes, x) * (number / (number - 1.0))


def _batch_statistics(x: Expr) -> tuple[Expr, Expr]:
    axes = (x.axes[0], *x.axes[2:])
    return reduce("mean", axes, x), _unbiased(x, axes)


def _instance_statistics(x: Expr) -> tuple[Expr, Expr]:
    inside, batch = x.axes[2:], x.axes[:1]
    mean, variance = reduce("mean", inside, x), _unbiased(x, inside)
    return reduce("mean", batch, mean), reduce("mean", batch, variance)


def _normalised(
    x: Expr,
    axes: tuple[int, ...],
    running: tuple[Expr | None, Expr | None],
    eps: float,
) -> Expr:
    mean, variance = running
    if mean is None or variance is None:
        return _standardised(x, axes, eps)
    return (x - mean) * primitive("rsqrt", variance + eps)


def _batch_reference(x: Any, num_batches_tracked: Any = None, **others: Any) -> Any:
    batch_norm = function_of("torch.nn.functional.batch_norm")
    if others.get("training") and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if others["momentum"] is None:
            others["momentum"] = 1.0 / float(num_batches_tracked)
    others = {"running_mean": None, "running_var": None, **others}
    return batch_norm(x, **{**others, "momentum": others["momentum"] or 0.0})


@op(
    reference=_batch_reference,
    samples=[(True,)],
    keeps_dtype=True,
    training="training",
    statistics=_batch_statistics,
    equal="torch.nn.functional.batch_norm",
)
def batch_norm(
    x: Expr,
    running_mean: Channel | None = None,
    running_var: Channel | None = None,
    weight: Channel | None = None,
    bias: Channel | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    num_batches_tracked: Channel | None = None,
) -> Expr:
    """Each channel with mean 0 and variance 1 over the batch, times weight, plus bias.

    In training by the batch's statistics, with which running_mean and running_var are updated in
    place, as torch's batch_norm does; else by the running ones. momentum None is the average over
    all batches, whose number num_batches_tracked counts: each call in training adds one.
    """
    running = (running_mean, running_var)
    return _scaled(_normalised(x, (x.axes[0], *x.axes[2:]), running, eps), weight, bias)


def _instance_reference(x: Any, **others: Any) -> Any:
    return function_of("torch.nn.functional.instance_norm")(x, **others)


@op(
    reference=_instance_reference,
    samples=[(True,)],
    keeps_dtype=True,
    training="use_input_stats",
    statistics=_instance_statistics,
    equal="torch.nn.functional.instance_norm",
)
def instance_norm(
    x: Expr,
    running_mean: Channel | None = None,
    running_var: Channel | None = None,
    weight: Channel | None = None,
    bias: Channel | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Expr:
    """Each channel of each sample with mean 0 and variance 1, times weight, plus bias.

    By the input's own statistics, with which running_mean and running_var are updated in place
    where they are given; or by those, where use_input_stats is False.
    """
    return _scaled(_normalised(x, x.axes[2:], (running_mean, running_var), eps), weight, bias)
