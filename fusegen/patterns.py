"""Patterns: what simplification looks for, beyond a node's own operation."""

from __future__ import annotations

from fusegen import arity, ir
from fusegen.ir import Expr, Extent, constant, primitive


def is_log_softmax(node: Expr) -> bool:
    """Whether it is a difference of what is nowhere positive and the logarithm of the sum of its
    powers, which is never negative.
    """
    if node.op != "sub" or node.args[0].op != "sub" or node.args[1].op != "log":
        return False
    exponent, (total,) = node.args[0], node.args[1].args
    value, bound = exponent.args
    if bound.op != "reduce" or total.op != "reduce" or total.args[0].op != "exp":
        return False
    kinds, axes = zip(ir.reduction(bound), ir.reduction(total), strict=True)
    is_alike = kinds == ("bound", "sum") and axes[0] == axes[1]
    return is_alike and bound.args[0] is value and total.args[0].args[0] is exponent


def unshifted(node: Expr, axes: Extent) -> tuple[Expr, Expr] | None:
    """(part, shift) of a sum, or of a log_softmax, whose shift does not vary along the axes, and
    whose part is not likely to cancel it at each element: a difference, such as that from a mean,
    times what does not vary either, shifted or not.
    """
    pairs = {"add": (node.args, node.args[::-1]), "sub": (node.args,)}.get(node.op, ())
    for part, shift in pairs:
        is_apt = _is_scaled(part, axes) if node.op == "add" else is_log_softmax(node)
        if is_apt and not shift.extent & axes:
            return part, shift
    return None


def _is_scaled(node: Expr, axes: Extent) -> bool:
    """Whether it is a difference times what does not vary along the axes, shifted or not."""
    if node.op == "add":
        steady = [a for a in node.args if not a.extent & axes]
        return len(steady) == 1 and any(_is_scaled(a, axes) for a in node.args)
    is_scaled = node.op == "mul" and any(not a.extent & axes for a in node.args)
    return is_scaled and any(map(_is_difference, node.args))


def _is_difference(node: Expr) -> bool:
    """Whether it is one, times or divided by anything."""
    if node.op in ("mul", "div"):
        return any(map(_is_difference, node.args[: 1 if node.op == "div" else 2]))
    return node.op == "sub"


def placed(node: Expr) -> tuple[Expr, Expr, Extent] | None:
    """(value, index, axes) of a value that stands at the index along the axes, zero elsewhere."""
    if node.op != "where" or constant(node.args[2]) != 0.0:
        return None
    condition, value, _ = node.args
    if condition.op != "eq" or condition.args[0].op != "position":
        return None
    here, index = condition.args
    return value, index, frozenset(ir.axes_of(here))


def told_by_result(value: Expr, result: Expr) -> Expr | None:
    """What has the value's derivative, and asks for its result instead of how it was made, as
    torch's own do: of a relu, and of a softmax; None of others.
    """
    if value.op == "where" and value.args[0].op == "le":
        condition, zero, rest = value.args
        bounds = constant(zero), constant(condition.args[1])
        if condition.args[0] is rest and bounds == (0.0, 0.0):
            return primitive("where", result <= 0.0, zero, rest)
    softened = softmax_of(value)
    if softened is None or softened[0].op in arity.CASTS:  # whose result is wider than it
        return None
    x, axes = softened
    # Straight, as the softmax is there: the result's own share of this is its derivative's.
    return result * (x - ir.reduce_sum(result * x, axes))


def softmax_of(node: Expr) -> tuple[Expr, Extent] | None:
    """(x, axes) of a softmax of x along the axes."""
    if node.op != "div" or node.args[0].op != "exp" or node.args[1].op != "reduce":
        return None
    power, total = node.args
    kind, axes = ir.reduction(total)
    difference = power.args[0]
    if (kind, total.args) != ("sum", (power,)) or difference.op != "sub":
        return None
    x, bound = difference.args
    return (x, axes) if bound is ir.reduce("bound", axes, x) else None
