"""Reverse-mode differentiation: a table of rules, and `vjp`, whose output is again a graph.

No operation of the DSL appears here, only primitives: a new op brings its gradient with it. A
broadcast edge's gradient is summed over the axes that the argument lacks, which is how parameter
gradients arise. The formulas are torch's own (derivatives.yaml), in the same order of operations,
so that rounding, kinks and NaN come out as they do there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

from fusegen import arity, ir
from fusegen.ir import Expr, Extent, primitive, reduce

# (cotangent, arguments, the node) -> the cotangent's share for each argument; None where there is
# none.
Rule = Callable[[Expr, tuple[Expr, ...], Expr], tuple[Expr | None, ...]]

# What reaches an argument that was not chosen: a zero whose sign means nothing, unlike that of a
# zero written in a chain, so that adding it to anything leaves that unchanged to the last bit.
NO_SHARE = ir.make("const", attrs=(0.0, "no share"))


def _select(condition: Expr, yes: Expr, no: Expr) -> Expr:
    return primitive("where", condition, yes, no)


def _extremum_share(g: Expr, loses: Expr, a: Expr, b: Expr) -> Expr:
    """Nothing to the loser, half to each at a tie, all to both where either is NaN, as torch."""
    return _select(loses, NO_SHARE, _select(primitive("eq", a, b), 0.5 * g, g))


def _steep(g: Expr, slope: Expr) -> Expr:
    """g times a slope that may be infinite, which leaves nothing of what was not chosen, as torch's
    own derivatives of its functions do.
    """
    found = _chosen(g)
    if found is None or not slope.extent <= found[0].extent:  # chosen of each
        return g * slope
    condition, value, holds = found
    share = value * slope
    return _select(condition, share, NO_SHARE) if holds else _select(condition, NO_SHARE, share)


def _chosen(g: Expr) -> tuple[Expr, Expr, bool] | None:
    """A condition, what is there where it holds or does not, and which; if it is nothing else."""
    if g.op == "where" and NO_SHARE in g.args[1:]:
        condition, yes, no = g.args
        return (condition, yes, True) if no is NO_SHARE else (condition, no, False)
    if g.op in ("neg", "mul", "div"):
        for i, arg in enumerate(g.args[:1] if g.op == "div" else g.args):
            if (found := _chosen(arg)) is not None:
                condition, value, holds = found
                return condition, primitive(g.op, *g.args[:i], value, *g.args[i + 1 :]), holds
    if g.op in ("add", "sub"):
        a, b = map(_chosen, g.args)
        if a is not None and b is not None and (a[0], a[2]) == (b[0], b[2]):
            return a[0], primitive(g.op, a[1], b[1]), a[2]
    return None


def _same_cast(op: str) -> Rule:
    return lambda g, a, out: (primitive(op, g),)


RULES: Mapping[str, Rule] = {
    "add": lambda g, a, out: (g, g),
    "sub": lambda g, a, out: (g, -g),
    "mul": lambda g, a, out: (g * a[1], g * a[0]),
    "div": lambda g, a, out: (g / a[1], -(g * (out / a[1]))),
    "neg": lambda g, a, out: (-g,),
    # Of 0 and NaN g * 0, as in torch: a gradient that is no number stays none.
    "abs": lambda g, a, out: (_select(a[0] > 0, g, _select(a[0] < 0, -g, g * 0.0)),),
    **dict.fromkeys(("sign", "floor", "ceil", "round", "trunc"), lambda g, a, out: (NO_SHARE,)),
    "detach": lambda g, a, out: (None,),
    "exp": lambda g, a, out: (_steep(g, out),),
    "exp2": lambda g, a, out: (_steep(g, out) * math.log(2.0),),
    # Not torch's out + 1, which far to the left has no digit left.
    "expm1": lambda g, a, out: (_steep(g, primitive("exp", a[0])),),
    "log": lambda g, a, out: (g / a[0],),
    "log2": lambda g, a, out: (g / (a[0] * math.log(2.0)),),
    "log10": lambda g, a, out: (g / (a[0] * math.log(10.0)),),
    "log1p": lambda g, a, out: (g / (a[0] + 1.0),),
    "sqrt": lambda g, a, out: (g / (2.0 * out),),
    # Not torch's out to the third power, which is 0 or infinite where a norm's gradient is neither.
    "rsqrt": lambda g, a, out: (-0.5 * (g * out) * (out * out),),
    "erf": lambda g, a, out: (g * (2.0 / math.sqrt(math.pi) * primitive("exp", -(a[0] * a[0]))),),
    "erfc": lambda g, a, out: (g * (-2.0 / math.sqrt(math.pi) * primitive("exp", -(a[0] * a[0]))),),
    "tanh": lambda g, a, out: (g * (1.0 - out * out),),
    "sigmoid": lambda g, a, out: (g * (1.0 - out) * out,),
    "sin": lambda g, a, out: (g * primitive("cos", a[0]),),
    "cos": lambda g, a, out: (g * -primitive("sin", a[0]),),
    "tan": lambda g, a, out: (g * (1.0 + out * out),),
    "asin": lambda g, a, out: (g * primitive("rsqrt", 1.0 - a[0] * a[0]),),
    "acos": lambda g, a, out: (-(g * primitive("rsqrt", 1.0 - a[0] * a[0])),),
    "atan": lambda g, a, out: (g / (a[0] * a[0] + 1.0),),
    "sinh": lambda g, a, out: (g * primitive("cosh", a[0]),),
    "cosh": lambda g, a, out: (g * primitive("sinh", a[0]),),
    "asinh": lambda g, a, out: (g * primitive("rsqrt", a[0] * a[0] + 1.0),),
    "acosh": lambda g, a, out: (g * primitive("rsqrt", a[0] * a[0] - 1.0),),
    "atanh": lambda g, a, out: (g / (1.0 - a[0] * a[0]),),
    # What a narrower value is told is as narrow, as a tensor's gradient has its type.
    **{op: _same_cast(op) for op in arity.CASTS},
    "pow": lambda g, a, out: (_to_base(g, a[0], a[1]), _to_exponent(g, a[0], a[1], out)),
    "fmod": lambda g, a, out: (g, -(g * primitive("trunc", primitive("detach", a[0] / a[1])))),
    "atan2": lambda g, a, out: _to_coordinates(g, *a),
    "minimum": lambda g, a, out: (
        _extremum_share(g, a[0] > a[1], *a),
        _extremum_share(g, a[0] < a[1], *a),
    ),
    "maximum": lambda g, a, out: (
        _extremum_share(g, a[0] < a[1], *a),
        _extremum_share(g, a[0] > a[1], *a),
    ),
    "where": lambda g, a, out: (None, _select(a[0], g, NO_SHARE), _select(a[0], NO_SHARE, g)),
}


def _to_coordinates(g: Expr, y: Expr, x: Expr) -> tuple[Expr, Expr]:
    total = y * y + x * x
    is_none = primitive("eq", total, 0.0)
    share = _select(is_none, NO_SHARE, g / _select(is_none, ir.const(1.0), total))
    return share * x, -(share * y)


def _to_base(g: Expr, base: Expr, exponent: Expr) -> Expr:
    """An exponent of 0 has no gradient, also at a base of 0, where the formula gives 0 * inf."""
    number = ir.constant(exponent)
    if number is None:
        slope = exponent * primitive("pow", base, exponent - 1.0)
        return _select(primitive("eq", exponent, 0.0), NO_SHARE, g * slope)
    if number == 0.0:
        return NO_SHARE
    slope = base if number == 2.0 else primitive("pow", base, number - 1.0)
    return g * (number * slope)


def _to_exponent(g: Expr, base: Expr, exponent: Expr, out: Expr) -> Expr:
    """0 to a power of at least 0 is flat, where the formula gives 0 * -inf."""
    slope = g * (out * primitive("log", base))
    if ir.constant(base):
        return slope
    is_flat = primitive("logical_and", primitive("eq", base, 0.0), exponent >= 0)
    return _select(is_flat, NO_SHARE, slope)


def _reduction_shares(g: Expr, node: Expr) -> tuple[Expr | None, ...]:
    kind, axes = ir.reduction(node)
    value = node.args[0]
    if kind == "sum":
        return (g,)
    if kind == "mean":
        return (g / ir.count(axes),)
    if kind == "variance":
        centred = value - reduce("mean", axes, value)
        return (centred * (2.0 * g / ir.count(axes)),)
    if kind == "max":
        return (place(g, reduce("argmax", axes, value), axes),)
    if kind == "amax":
        is_largest = _select(primitive("eq", value, node), ir.const(1.0), ir.const(0.0))
        return (is_largest * (g / reduce("sum", axes, is_largest)),)
    if kind == "pick":
        return place(g, node.args[1], axes), None
    return (None,)


def place(value: Expr, index: Expr, axes: Extent) -> Expr:
    """value where the position along axes is index, zero elsewhere: the transpose of `pick`."""
    here = primitive("eq", ir.position(axes, index.rank), index)
    return _select(here, value, NO_SHARE)


def vjp(
    outputs: Sequence[Expr], cotangents: Sequence[Expr | None], wrt: Sequence[Expr]
) -> dict[Expr, Expr]:
    """The cotangent of every node between wrt and the outputs; a node that is absent has none.

    outputs and cotangents go in pairs; a cotangent, given or found, that lacks an axis of its node
    is the same all along it. The result holds wrt's nodes and all between, so that a caller can
    name them. A wrt node may lie below another one, or be an output itself.
    """
    order = ir.topological(outputs)
    moving = _descendants(order, set(wrt))
    arrived: dict[Expr, Expr] = {}

    def send(node: Expr, share: Expr | None, along: Extent) -> None:
        """Add a share that stands for every index of `along`, summed over what the node lacks."""
        if share is not None and node.op == "once":
            send(node.args[0], ir.once(share, ir.axes_of(node)), along)
        elif share is not None and node in moving:
            share = reduce("sum", (share.extent | along) - node.extent, share)
            arrived[node] = arrived[node] + share if node in arrived else share

    for output, cotangent in zip(outputs, cotangents, strict=True):
        send(output, cotangent, output.extent)
    for node in reversed(order):
        if node not in arrived or not any(a in moving for a in node.args):
            continue
        g = arrived[node]
        if node.op == "reduce":
            shares = _reduction_shares(g, node)
        elif node.op == "repeated":
            shares = (g,)
        else:
            shares = RULES[node.op](g, node.args, node) if node.op in RULES else ()
        for argument, share in zip(node.args, shares, strict=bool(shares)):
            send(argument, share, node.extent)
    return arrived


def is_differentiable(value: Expr) -> bool:
    """Whether some gradient is asked for below a value: conditions and integers have none, nor has
    what is computed of such alone, nor what is detached.
    """
    return any(True for _ in _learning(value))


def learns(value: Expr | None, leaves: Container[Expr]) -> bool:
    """Whether a value, if it has a gradient, gives one to any of these leaves."""
    return value is not None and any(leaf in leaves for leaf in _learning(value))


def depends(value: Expr | None, leaves: Container[Expr]) -> bool:
    """Whether a value, if it has a gradient, is computed of any of these leaves: as in eager, where
    what a backward only asks about has a derivative of zero.
    """
    return value is not None and any(leaf in leaves for leaf in ir.inputs([value]))


def _learning(value: Expr) -> Iterator[Expr]:
    """The inputs that get a gradient of a value."""
    waiting, met = [value], set[Expr]()
    while waiting:
        node = waiting.pop()
        if node in met or node.kind != "number":
            continue
        met.add(node)
        if node.op == "input":
            yield node
        elif node.op == "reduce":
            waiting += node.args[: ir.reduction(node)[0] not in ("argmax", "bound")]
        elif node.op in ("repeated", "once") or (node.op in RULES and node.op != "detach"):
            waiting += node.args[node.op == "where" :]


def without_ends_of_gradients(values: Sequence[Expr]) -> list[Expr]:
    """The same values, of which no derivative is taken any more."""
    return ir.rewrite(values, lambda node: node.args[0] if node.op == "detach" else node)


def _descendants(order: Sequence[Expr], roots: set[Expr]) -> set[Expr]:
    """The nodes of `order` that depend on any of the roots, roots included."""
    found: set[Expr] = set()
    for node in order:
        if node in roots or any(a in found for a in node.args):
            found.add(node)
    return found


def winners(values: Sequence[Expr]) -> tuple[list[Expr], Expr | None, tuple[Expr, ...]]:
    """(values with each `max` written through its winner, the winner's index, the picked inputs).

    max(f(x)) is f(x at the first maximum), and f acts index by index, so the maximum needs no more
    of x than that: its gradient is f's there, and nothing of the unpooled tensor has to be kept.
    """
    pooled = [
        n
        for n in ir.topological(values)
        if n.op == "reduce" and n.attrs[0] == "max" and max(ir.reduction(n)[1]) > 0
    ]
    if not pooled:
        return [*values], None, ()
    assert len(pooled) == 1, "one pooling step a graph; the chain is split before"
    (node,) = pooled
    _, axes = ir.reduction(node)
    index = reduce("argmax", axes, node.args[0])
    # Below a reduction, f does not act index by index: its result is picked, not what it reduces.
    ends = {n for n in ir.topological(node.args) if n.op not in arity.ARITY}
    reached = [n for n in ir.topological(node.args, stop=ends) for n in n.args if n in ends]
    varying = [n for n in dict.fromkeys((*node.args, *reached)) if n in ends and n.extent & axes]
    picked = {n: reduce("pick", axes, n, index) for n in varying}
    (at_winner,) = ir.substitute(node.args, {n: n for n in ends} | picked)
    through = ir.substitute(values, {node: at_winner})
    return through, index, tuple(picked.values())
