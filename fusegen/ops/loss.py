"""Losses: how far a value is from what it should be, of each element or of all together."""

from __future__ import annotations

import math
from typing import Any, Literal

from fusegen.ir import Expr, const, count, primitive, reduce, reduce_sum
from fusegen.ops.activation import logsigmoid
from fusegen.ops.eager import function_of
from fusegen.ops.piecewise import hardtanh
from fusegen.ops.registry import op
from fusegen.ops.schema import Channel, Labels

Reduction = Literal["mean", "sum", "none"]
_REDUCED = (("mean",), ("sum",), ("none",))

_MOST = 1 << 24  # a float holds every integer up to here


def _problem(ignore_index: int, label_smoothing: float = 0.0, **others: object) -> str | None:
    if abs(ignore_index) > _MOST:
        return f"ignore_index is {ignore_index}, wanted one from {-_MOST} to {_MOST}"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing is {label_smoothing:g}, wanted one from 0 to 1"
    return None


def _bad_beta(beta: float, **others: object) -> str | None:
    return f"beta is {beta:g}, wanted one of at least 0" if beta < 0 else None


def _bad_delta(delta: float, **others: object) -> str | None:
    return f"delta is {delta:g}, wanted one above 0" if delta <= 0 else None


@op(reference="torch.nn.functional.mse_loss", samples=_REDUCED, shaping="loss")
def mse_loss(x: Expr, target: Expr, *, reduction: Reduction = "mean") -> Expr:
    """The mean of (x - target)^2, their sum, or each of them."""
    distance = x - target
    return _of_all(distance * distance, reduction)


@op(reference="torch.nn.functional.l1_loss", samples=_REDUCED, shaping="loss")
def l1_loss(x: Expr, target: Expr, *, reduction: Reduction = "mean") -> Expr:
    """The mean of |x - target|, their sum, or each of them."""
    return _of_all(primitive("abs", x - target), reduction)


@op(
    reference="torch.nn.functional.smooth_l1_loss",
    samples=[("mean",), ("sum", 0.5), ("none", 0.0)],
    shaping="loss",
    check=_bad_beta,
)
def smooth_l1_loss(
    x: Expr, target: Expr, *, reduction: Reduction = "mean", beta: float = 1.0
) -> Expr:
    """l1_loss, but of distances below beta a parabola that meets it there."""
    distance = x - target
    loss = _rounded(distance, beta) / beta if beta else primitive("abs", distance)
    return _of_all(loss, reduction)


@op(
    reference="torch.nn.functional.huber_loss",
    samples=[("mean",), ("sum", 0.5), ("none", 2.0)],
    shaping="loss",
    check=_bad_delta,
)
def huber_loss(x: Expr, target: Expr, *, reduction: Reduction = "mean", delta: float = 1.0) -> Expr:
    """Half of mse_loss, but of distances above delta a line that goes on from there."""
    return _of_all(_rounded(x - target, delta), reduction)


def _rounded(distance: Expr, until: float) -> Expr:
    """Half of the square up to there, then the line that goes on; of infinity too."""
    inner = hardtanh.function(distance, -until, until)
    return inner * (distance - inner * 0.5)


@op(
    reference="torch.nn.functional.binary_cross_entropy_with_logits",
    samples=_REDUCED,
    shaping="loss",
)
def binary_cross_entropy_with_logits(
    x: Expr,
    target: Expr,
    weight: Expr | None = None,
    *,
    reduction: Reduction = "mean",
    pos_weight: Expr | None = None,
) -> Expr:
    """-(target * log(sigmoid(x)) + (1 - target) * log(1 - sigmoid(x))), where nothing overflows.

    weight is a factor of each loss, pos_weight of the first term alone; both broadcast.
    """
    log_p = logsigmoid.function(x)
    share = log_p if pos_weight is None else log_p * ((pos_weight - 1.0) * target + 1.0)
    loss = (1.0 - target) * x - share
    return _of_all(loss if weight is None else loss * weight, reduction)


@op(
    reference="torch.nn.functional.kl_div",
    samples=[("batchmean",), ("sum", True), ("none",)],  # with "mean", torch warns
    shaping="loss",
)
def kl_div(
    x: Expr,
    target: Expr,
    *,
    reduction: Literal["mean", "sum", "batchmean", "none"] = "mean",
    log_target: bool = False,
) -> Expr:
    """target * (log(target) - x), x being logarithms; of all, "batchmean" is the sum a sample.

    With log_target, target is logarithms too.
    """
    if log_target:
        loss = primitive("exp", target) * (target - x)
    else:
        is_zero = primitive("eq", target, 0.0)
        log_target_ = primitive("log", primitive("where", is_zero, 1.0, target))
        loss = target * log_target_ - target * x
    if reduction != "batchmean":
        return _of_all(loss, reduction)
    return reduce_sum(loss, loss.axes) / count(x.axes[:1])


def _by_soft_margin(x: Any, target: Any, **more: Any) -> Any:
    if target.requires_grad:  # torch's has no gradient of it
        x, target = x * target, target.new_ones(())
    return function_of("torch.nn.functional.soft_margin_loss")(x, target, **more)


@op(
    reference=_by_soft_margin,
    samples=_REDUCED,
    shaping="loss",
    equal="torch.nn.functional.soft_margin_loss",
)
def soft_margin_loss(x: Expr, target: Expr, *, reduction: Reduction = "mean") -> Expr:
    """log(1 + exp(-target * x)), target being 1 or -1."""
    return _of_all(primitive("log1p", primitive("exp", -target * x)), reduction)


@op(
    reference="torch.nn.functional.hinge_embedding_loss",
    samples=[("mean",), ("sum", 0.5), ("none", 2.0)],
    shaping="loss",
)
def hinge_embedding_loss(
    x: Expr, target: Expr, *, reduction: Reduction = "mean", margin: float = 1.0
) -> Expr:
    """x where target is 1, and how far it is below the margin where target is -1."""
    below = margin - x
    below = primitive("where", primitive("ge", below, 0.0), below, 0.0)
    mine = primitive("where", primitive("eq", target, -1.0), 0.0, x)
    others = primitive("where", primitive("eq", target, 1.0), 0.0, below)
    return _of_all(others + mine, reduction)


def _by_ranking(x: Any, other: Any, target: Any, **more: Any) -> Any:
    return function_of("torch.nn.functional.margin_ranking_loss")(x, other, target, **more)


@op(
    reference=_by_ranking,
    samples=[("mean",), ("sum", 0.5), ("none", 2.0)],
    shaping="loss",
    equal="torch.nn.functional.margin_ranking_loss",
)
def margin_ranking_loss(
    x: Expr, other: Expr, target: Expr, *, reduction: Reduction = "mean", margin: float = 0.0
) -> Expr:
    """How far x is from above other by the margin, or from below it where target is -1."""
    distance = -target * (x - other) + margin
    return _of_all(primitive("where", primitive("ge", distance, 0.0), distance, 0.0), reduction)


@op(
    reference="torch.nn.functional.poisson_nll_loss",
    samples=[("mean",), ("sum", True), ("none", True, True)],
    shaping="loss",
)
def poisson_nll_loss(
    x: Expr,
    target: Expr,
    *,
    reduction: Reduction = "mean",
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
) -> Expr:
    """exp(x) - target * x, or x - target * log(x + eps) where x is no logarithm.

    full adds Stirling's approximation of log(target!), where target is above 1.
    """
    if log_input:
        loss = primitive("exp", x) - target * x
    else:
        loss = x - target * primitive("log", x + eps)
    if full:
        is_large = primitive("gt", target, 1.0)
        stirling = target * primitive("log", target) - target
        stirling = stirling + primitive("log", target * (2 * math.pi)) * 0.5
        loss = loss + primitive("where", is_large, stirling, 0.0)
    return _of_all(loss, reduction)


def _of_all(loss: Expr, reduction: Reduction) -> Expr:
    """Of the losses of all elements what is wanted."""
    if reduction == "none":
        return loss
    return reduce("mean" if reduction == "mean" else "sum", loss.axes, loss)


@op(
    reference="torch.nn.functional.nll_loss",
    samples=[(), (2, "sum"), (0, "none")],
    shaping="class_loss",
    same_dtype=True,
    check=_problem,
)
def nll_loss(
    x: Expr,
    target: Labels,
    weight: Channel | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Expr:
    """What x has at each label's class, negated; times weight, if given, over the mean weight.

    The classes lie along axis 1; target is of int64 and has all other axes of x. Labels equal to
    ignore_index count for nothing; any other that is no class makes the loss NaN, where torch stops
    the program.
    """
    axes = _classes(x)
    share = _weights(weight, target, axes)
    loss = -reduce("pick", axes, x, target) * share
    return _together(loss, share, target, axes, x, ignore_index, reduction)


@op(
    reference="torch.nn.functional.cross_entropy",
    samples=[(), (2, "sum"), (0, "none"), (-100, "mean", 0.1)],
    shaping="class_loss",
    same_dtype=True,
    check=_problem,
)
def cross_entropy(
    x: Expr,
    target: Labels,
    weight: Channel | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Expr:
    """nll_loss of log_softmax over the classes; with label_smoothing, of all of them in part.

    As for nll_loss, the classes lie along axis 1, and target is of int64.
    """
    axes = _classes(x)
    share = _weights(weight, target, axes)
    shifted = x - reduce("bound", axes, x)
    log_total = primitive("log", reduce_sum(primitive("exp", shifted), axes))
    loss = (log_total - reduce("pick", axes, shifted, target)) * share
    if label_smoothing:
        log_p = shifted - log_total
        of_all = reduce_sum(log_p if weight is None else log_p * weight, axes)
        loss = loss * (1.0 - label_smoothing) - of_all * (const(label_smoothing) / count(axes))
    return _together(loss, share, target, axes, x, ignore_index, reduction)


def class_axis(rank: int) -> int:
    """The axis of the classes in a value of so many axes, from the end: 1, or its only one."""
    return 1 - rank if rank > 1 else -1


def _classes(x: Expr) -> tuple[int, ...]:
    return (class_axis(len(x.axes)),)


def _weights(weight: Expr | None, target: Expr, axes: tuple[int, ...]) -> Expr:
    return const(1.0) if weight is None else reduce("pick", axes, weight, target)


def _together(
    loss: Expr,
    share: Expr,
    target: Expr,
    axes: tuple[int, ...],
    x: Expr,
    ignore_index: int,
    reduction: Reduction,
) -> Expr:
    """Of the losses of all labels what is wanted; share is what each counts in a mean."""
    is_class = (target >= 0.0) & (target < count(axes))
    is_ignored = primitive("eq", target, float(ignore_index))
    loss = primitive("where", is_ignored, 0.0, primitive("where", is_class, loss, math.nan))
    if reduction == "none":
        return loss
    others = tuple(a for a in x.axes if a not in axes)
    total = reduce_sum(loss, others)
    if reduction == "sum":
        return total
    return total / reduce_sum(primitive("where", is_ignored, 0.0, share), others)
