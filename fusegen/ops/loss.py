"""Losses: how far a value is from what it should be, of each element or of all together."""

from __future__ import annotations

import math
from typing import Any, Literal

from fusegen.ir import Expr, const, count, primitive, reduce, reduce_sum
from fusegen.ops.activation import logsigmoid
from fusegen.ops.eager import function_of
from fusegen.ops.piecewise import hardtanh
from fusegen.ops.reducing import class_axis
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


def _by_probability(
    x: Any, target: Any, weight: Any = None, *, reduction: str = "mean"
) -> Any:  # torch's own stops the program for what is no probability
    if x.device.type == "cpu" and function_of("torch.is_autocast_enabled")("cpu"):
        x, target = x.float(), target.float()  # as torch's own
    log, where = function_of("torch.log"), function_of("torch.where")

    def bounded(p: Any) -> Any:
        found = log(where(p == 0, 1.0, p))
        found = where((p == 0) | (found < -100), -100.0, found)
        return where(p.abs() < 1e-12, (p - p.detach()) * 1e12 + found.detach(), found)

    losses = -target * bounded(x) - (1 - target) * bounded(1 - x)
    losses = losses if weight is None else losses * weight
    return losses if reduction == "none" else getattr(losses, reduction)()


@op(
    reference=_by_probability,
    samples=_REDUCED,
    shaping="loss",
    equal="torch.nn.functional.binary_cross_entropy",
)
def binary_cross_entropy(
    x: Expr, target: Expr, weight: Expr | None = None, *, reduction: Reduction = "mean"
) -> Expr:
    """-(target * log(x) + (1 - target) * log(1 - x)), logarithms being at least -100.

    x is from 0 to 1; of what is not, the loss is NaN, where torch stops the program. weight is a
    factor of each loss, and broadcasts. Gradients of the logarithms are at most 1e12, as torch's.
    """
    loss = -target * _bounded_log(x) - (1.0 - target) * _bounded_log(1.0 - x)
    return _of_all(loss if weight is None else loss * weight, reduction)


def _bounded_log(p: Expr) -> Expr:
    """log(p), at least -100, with a gradient of at most 1e12: that of a line up to 1e-12."""
    is_zero = primitive("eq", p, 0.0)
    log = primitive("log", primitive("where", is_zero, 1.0, p))
    log = primitive("where", is_zero | (log < -100.0), -100.0, log)
    line = (p - primitive("detach", p)) * 1e12 + primitive("detach", log)
    return primitive("where", primitive("abs", p) < 1e-12, line, log)


def _by_variance(x: Any, target: Any, var: Any, **more: Any) -> Any:
    full, eps, reduction = more["full"], more["eps"], more["reduction"]
    var = (
        var + (var.clamp(min=eps) - var).detach()
    )  # torch's stops the program where one is negative
    losses = 0.5 * (function_of("torch.log")(var) + (x - target) ** 2 / var)
    losses = losses + 0.5 * math.log(2 * math.pi) if full else losses
    return losses if reduction == "none" else getattr(losses, reduction)()


def _bad_eps(eps: float, **others: object) -> str | None:
    return f"eps is {eps:g}, wanted one above 0" if eps <= 0 else None


@op(
    reference=_by_variance,
    samples=[("mean",), ("sum", True), ("none", False, 1e-3)],
    shaping="loss",
    equal="torch.nn.functional.gaussian_nll_loss",
    check=_bad_eps,
)
def gaussian_nll_loss(
    x: Expr,
    target: Expr,
    var: Expr,
    *,
    reduction: Reduction = "mean",
    full: bool = False,
    eps: float = 1e-6,
) -> Expr:
    """Half of log(var) + (x - target)^2 / var, var being at least eps; full adds log(2 pi) / 2.

    The gradient of var is as if it was not bounded, as torch's is.
    """
    bounded = var + primitive("detach", primitive("where", var < eps, eps - var, 0.0))
    distance = x - target
    loss = (primitive("log", bounded) + distance * distance / bounded) * 0.5
    return _of_all(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


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
    return _of_all(-logsigmoid.function(target * x), reduction)


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
