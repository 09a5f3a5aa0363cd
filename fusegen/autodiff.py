"""Reverse-mode differentiation: one table of derivative rules, and `vjp`, whose output is again a graph to differentiate.

No operation of the DSL appears here, only primitives: a new op brings its gradient with it. A broadcast edge's gradient is
summed over the axes that the argument lacks, which is how parameter gradients arise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fusegen import ir
from fusegen.ir import Expr, const, primitive, reduce

# (cotangent, arguments, the node) -> the cotangent's share for each argument; None where there is none.
Rule = Callable[[Expr, tuple[Expr, ...], Expr], tuple[Expr | None, ...]]

_ZERO = const(0.0)


def _select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return primitive("where", condition, yes, no)


def _tie_split(g: Expr, wins: Expr, a: Expr, b: Expr) -> Expr:
    """The whole cotangent to the winner, half to each at a tie, as torch does."""
    return _select(wins, g, _select(primitive("eq", a, b), 0.5 * g, _ZERO))


def _no_gradient(g: Expr, args: tuple[Expr, ...], out: Expr) -> tuple[Expr | None, ...]:
    return (None,) * len(args)


RULES: Mapping[str, Rule] = {
    "add": lambda g, a, out: (g, g),
    "sub": lambda g, a, out: (g, -g),
    "mul": lambda g, a, out: (g * a[1], g * a[0]),
    "div": lambda g, a, out: (g / a[1], -(g * (out / a[1]))),
    "neg": lambda g, a, out: (-g,),
    "abs": lambda g, a, out: (_select(a[0] > 0, g, _select(a[0] < 0, -g, _ZERO)),),
    "exp": lambda g, a, out: (g * out,),
    "expm1": lambda g, a, out: (g * (out + 1.0),),
    "log": lambda g, a, out: (g / a[0],),
    "log1p": lambda g, a, out: (g / (a[0] + 1.0),),
    "sqrt": lambda g, a, out: (g / (2.0 * out),),
    "rsqrt": lambda g, a, out: (-0.5 * g * (out * out * out),),
    "erf": lambda g, a, out: (g * (2.0 / math.sqrt(math.pi) * primitive("exp", -(a[0] * a[0]))),),
    "tanh": lambda g, a, out: (g * (1.0 - out * out),),
    "sigmoid": lambda g, a, out: (g * ((1.0 - out) * out),),
    "sin": lambda g, a, out: (g * primitive("cos", a[0]),),
    "cos": lambda g, a, out: (-(g * primitive("sin", a[0])),),
    "pow": lambda g, a, out: _power(g, a, out),
    "minimum": lambda g, a, out: (
        _tie_split(g, a[0] < a[1], *a),
        _tie_split(g, a[1] < a[0], *a),
    ),
    "maximum": lambda g, a, out: (
        _tie_split(g, a[0] > a[1], *a),
        _tie_split(g, a[1] > a[0], *a),
    ),
    "where": lambda g, a, out: (None, _select(a[0], g, _ZERO), _select(a[0], _ZERO, g)),
    **dict.fromkeys((*ir.COMPARISONS, *ir.CONNECTIVES), _no_gradient),
}


def _power(g: Expr, args: tuple[Expr, ...], out: Expr) -> tuple[Expr | None, ...]:
    """A constant exponent of 0 has no gradient anywhere, also at a base of 0, where the formula would give 0 * inf."""
    base, exponent = args
    number = ir.constant(exponent)
    if number is not None:
        slope = g * (number * primitive("pow", base, number - 1.0)) if number != 0.0 else None
        return slope, None
    to_base = g * (exponent * primitive("pow", base, exponent - 1.0))
    is_flat = primitive("logical_and", primitive("eq", base, 0.0), exponent >= 0)
    to_exponent = _select(is_flat, _ZERO, g * (out * primitive("log", base)))
    return _select(primitive("eq", exponent, 0.0), _ZERO, to_base), to_exponent


def _reduction_rule(g: Expr, node: Expr) -> tuple[Expr | None, ...]:
    kind, axes = ir.reduction(node)
    value = node.args[0]
    if kind == "sum":
        return (g,)
    if kind == "mean":
        return (g / ir.count(axes),)
    if kind == "variance":
        centred = value - reduce("mean", axes, value)
        return (centred * (2.0 * g / ir.count(axes)),)
    if kind == "pick":
        return place(g, node.args[1], axes), None
    if kind == "argmax":
        return (None,)
    raise AssertionError(f"{kind} is rewritten by winners() before it is differentiated")


def place(value: Expr, index: Expr, axes: ir.Extent) -> Expr:
    """value where the position along axes is index, zero elsewhere: the transpose of `pick`."""
    here = primitive("eq", ir.position(axes, index.rank), index)
    return primitive("where", here, value, 0.0)


def vjp(
    outputs: Sequence[Expr], cotangents: Sequence[Expr | None], wrt: Sequence[Expr]
) -> dict[Expr, Expr]:
    """The cotangent of every node between wrt and the outputs, given the outputs' own; absent means zero.

    outputs and cotangents go in pairs. The result holds wrt's nodes and all in between, so that a caller can name them.
    """
    order = ir.topological(outputs)
    moving = _descendants(order, set(wrt))
    arrived: dict[Expr, list[Expr]] = {}
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if cotangent is not None:
            arrived.setdefault(output, []).append(cotangent)
    total: dict[Expr, Expr] = {}
    for node in reversed(order):
        if node not in arrived or node not in moving:
            continue
        g = arrived[node][0]
        for more in arrived[node][1:]:
            g = g + more
        total[node] = g
        if not any(a in moving for a in node.args):
            continue
        shares = (
            _reduction_rule(g, node) if node.op == "reduce" else RULES[node.op](g, node.args, node)
        )
        for argument, share in zip(node.args, shares, strict=True):
            if share is not None and argument in moving:
                surplus = node.extent - argument.extent
                arrived.setdefault(argument, []).append(reduce("sum", surplus, share))
    return total


def _descendants(order: Sequence[Expr], roots: set[Expr]) -> set[Expr]:
    """The nodes of `order` that depend on any of the roots, roots included."""
    found: set[Expr] = set()
    for node in order:
        if node in roots or any(a in found for a in node.args):
            found.add(node)
    return found


def winners(value: Expr) -> tuple[Expr, Expr | None, tuple[Expr, ...]]:
    """(value with each `max` written through its winner, the winner's index, the picked inputs).

    max(f(x)) is f(x at the first maximum), and f acts index by index, so the maximum needs no more of x than that: its
    gradient is f's there, and nothing of the unpooled tensor has to be kept.
    """
    pooled = [n for n in ir.topological([value]) if n.op == "reduce" and n.attrs[0] == "max"]
    if not pooled:
        return value, None, ()
    assert len(pooled) == 1, "one pooling step a graph; the chain is split before"
    node = pooled[0]
    _, axes = ir.reduction(node)
    index = reduce("argmax", axes, node.args[0])
    varying = [leaf for leaf in ir.inputs([node.args[0]]) if leaf.extent & axes]
    picked = {leaf: reduce("pick", axes, leaf, index) for leaf in varying}
    (at_winner,) = ir.substitute([node.args[0]], picked)
    (through,) = ir.substitute([value], {node: at_winner})
    return through, index, tuple(picked.values())
