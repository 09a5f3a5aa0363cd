"""Losses of classes: what a value says of each class, against the one that a label names."""

from __future__ import annotations

import math
from typing import Literal

from fusegen.ir import Expr, const, count, primitive, reduce, reduce_sum
from fusegen.ops.registry import op
from fusegen.ops.schema import Channel, Labels

Reduction = Literal["mean", "sum", "none"]

_MOST = 1 << 24  # a float holds every integer up to here


def _problem(ignore_index: int, label_smoothing: float = 0.0, **others: object) -> str | None:
    if abs(ignore_index) > _MOST:
        return f"ignore_index is {ignore_index}, wanted one from {-_MOST} to {_MOST}"
    if not 0 <= label_smoothing <= 1:
        return f"label_smoothing is {label_smoothing:g}, wanted one from 0 to 1"
    return None


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
    """The axis of the classes: 1, or a value's only one."""
    return x.axes[:2][-1:]


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
