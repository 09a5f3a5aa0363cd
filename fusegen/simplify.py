"""The algebra that makes derived gradients as good as hand-written ones.

Every rule keeps the value bit for bit in the forward direction, except the ones on sums, which move a factor out of a
reduction along whose axes it does not vary. A masked zero is never pushed through a multiplication by something that
might be infinite: eager's NaN there is ours too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fusegen import ir
from fusegen.ir import Expr, Graph, constant, primitive, reduce

_FOLD: Mapping[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
}


def simplify(graph: Graph) -> Graph:
    """The same outputs, written shorter, over the inputs that they still need."""
    mapping = simplification(graph.roots)
    outputs = tuple((name, mapping[expr]) for name, expr in graph.outputs)
    used = set(ir.inputs(expr for _, expr in outputs))
    return Graph(tuple(i for i in graph.inputs if i in used), outputs)


def simplification(roots: tuple[Expr, ...]) -> dict[Expr, Expr]:
    """Every node below the roots with what it becomes."""
    new: dict[Expr, Expr] = {}
    for node in ir.topological(roots):
        current = ir.rebuild(node, tuple(new[a] for a in node.args))
        new[node] = _settle(current)
    return new


def _settle(node: Expr) -> Expr:
    """Rules applied at the top of a node whose arguments are settled already."""
    for _ in range(8):
        better = _step(node)
        if better is node:
            return node
        node = _settle_arguments(better)
    return node


def _settle_arguments(node: Expr) -> Expr:
    return ir.rebuild(node, tuple(_step(a) for a in node.args))


def _step(node: Expr) -> Expr:
    rule = _RULES.get(node.op)
    return rule(node) if rule is not None else node


def _folded(node: Expr) -> Expr | None:
    values = [constant(a) for a in node.args]
    if node.op in _FOLD and all(v is not None for v in values):
        return ir.const(_FOLD[node.op](*values))
    return None


def _mask(node: Expr) -> tuple[Expr, Expr, bool] | None:
    """(condition, value, whether the value stands where the condition holds) of a where that is zero on one side."""
    if node.op != "where":
        return None
    condition, yes, no = node.args
    if constant(no) == 0.0:
        return condition, yes, True
    if constant(yes) == 0.0:
        return condition, no, False
    return None


def _masked(condition: Expr, value: Expr, holds: bool) -> Expr:
    return primitive("where", condition, value if holds else 0.0, 0.0 if holds else value)


def _add(node: Expr) -> Expr:
    if (folded := _folded(node)) is not None:
        return folded
    a, b = node.args
    if constant(a) == 0.0:
        return b
    if constant(b) == 0.0:
        return a
    left, right = _mask(a), _mask(b)
    if left and right and left[0] is right[0]:
        condition, u, u_holds = left
        _, v, v_holds = right
        if u_holds == v_holds:
            return _masked(condition, _settle(u + v), u_holds)
        yes, no = (u, v) if u_holds else (v, u)
        return _settle(primitive("where", condition, yes, no))
    if b.op == "neg":
        return a - b.args[0]
    return node


def _sub(node: Expr) -> Expr:
    if (folded := _folded(node)) is not None:
        return folded
    a, b = node.args
    if constant(b) == 0.0:
        return a
    return a + b.args[0] if b.op == "neg" else node


def _mul(node: Expr) -> Expr:
    if (folded := _folded(node)) is not None:
        return folded
    a, b = node.args
    for factor, other in ((a, b), (b, a)):
        number = constant(factor)
        if number == 1.0:
            return other
        if number == -1.0:
            return _settle(-other)
        mask = _mask(other)
        if number is not None and mask is not None and math.isfinite(number):
            condition, value, holds = mask
            return _masked(condition, _settle(primitive("mul", factor, value)), holds)
    if a.op == "neg" and b.op == "neg":
        return a.args[0] * b.args[0]
    return node


def _div(node: Expr) -> Expr:
    a, b = node.args
    return a if constant(b) == 1.0 else node


def _neg(node: Expr) -> Expr:
    if (folded := _folded(node)) is not None:
        return folded
    (a,) = node.args
    if a.op == "neg":
        return a.args[0]
    if (mask := _mask(a)) is not None:
        return _masked(mask[0], _settle(-mask[1]), mask[2])
    return node


def _where(node: Expr) -> Expr:
    condition, yes, no = node.args
    if yes is no:
        return yes
    if yes.op == "where" and yes.args[0] is condition:
        return primitive("where", condition, yes.args[1], no)
    if no.op == "where" and no.args[0] is condition:
        return primitive("where", condition, yes, no.args[2])
    return node


def _reduce(node: Expr) -> Expr:
    kind, axes = ir.reduction(node)
    value = node.args[0]
    if kind == "sum":
        if value.op == "neg":
            return -_settle(reduce("sum", axes, value.args[0]))
        if value.op == "mul":
            a, b = value.args
            for factor, other in ((a, b), (b, a)):
                if not factor.extent & axes:
                    return factor * _settle(reduce("sum", axes, other))
        if value.op == "div" and not value.args[1].extent & axes:
            return _settle(reduce("sum", axes, value.args[0])) / value.args[1]
        # Exactly one position of a window is the winner's, so a sum over the window is the value there.
        guard = _mask(value)
        if guard is not None and guard[2] and (window := _window_of(guard[0])) <= axes and window:
            picked = reduce("pick", window, guard[1], guard[0].args[1])
            return reduce("sum", axes - window, picked)
        if value.op == "reduce" and ir.reduction(value)[0] == "sum":
            return reduce("sum", axes | ir.reduction(value)[1], value.args[0])
    if kind == "pick":
        guard = _mask(value)
        if guard is not None and guard[2] and _window_of(guard[0]) == axes:
            if guard[0].args[1] is node.args[1]:
                return reduce("pick", axes, guard[1], node.args[1])
    return node


def _window_of(condition: Expr) -> ir.Extent:
    """The axes of a condition that reads "the position along axes is the winner's"; none for any other."""
    if condition.op != "eq" or condition.args[0].op != "position":
        return frozenset()
    return frozenset(ir.axes_of(condition.args[0]))


_RULES: Mapping[str, Callable[[Expr], Expr]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "where": _where,
    "reduce": _reduce,
}
