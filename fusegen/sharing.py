"""What windows share and what elements have once, taken apart.

Where windows overlap, a value that varies within them stands for a share of each window that has an
element, of which the element gets the sum; unless it is inside `once`, which counts once for each
element, in a window or in none. A norm before a pooling has both: its statistics are of elements,
and so is what their gradients give to an element, beside the shares that the pooling hands back.
All that is done to such a sum is linear, so it can be done to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fusegen import arity, ir
from fusegen.autodiff import NO_SHARE
from fusegen.ir import Expr

Parts = tuple[Expr | None, Expr | None]  # the shares of windows, and what elements have once


def apart(roots: Iterable[Expr], pooled: Sequence[int]) -> list[Expr]:
    """The roots as shares, `once` of something, or the sum of both; and reductions of either.
    pooled has the group that each group of places within windows splits.
    """
    roots = tuple(roots)
    axes = next((ir.axes_of(n) for n in ir.topological(roots) if n.op == "once"), None)
    if axes is None:
        return list(roots)
    parts: dict[Expr, Parts] = {}
    for node in ir.topological(roots):
        args = [parts[a] for a in node.args]
        parts[node] = _parts(node, args, axes, pooled)
    return [_whole(parts[root], axes) for root in roots]


def shares_and_own(expr: Expr) -> Parts:
    """The two parts of what `apart` gives."""
    if expr.op == "once":
        return None, expr.args[0]
    if expr.op == "add" and expr.args[1].op == "once":
        return expr.args[0], expr.args[1].args[0]
    return expr, None


def _whole(parts: Parts, axes: Sequence[int]) -> Expr:
    shares, own = parts
    if own is None:
        assert shares is not None
        return shares
    return ir.once(own, axes) if shares is None else shares + ir.once(own, axes)


def _at_element(parts: Parts) -> Expr:
    """Both parts of what is an element's value, not the shares of windows in one."""
    plain, own = parts
    if plain is None or own is None:
        found = own if plain is None else plain
        assert found is not None
        return found
    return plain + own


def _parts(node: Expr, args: Sequence[Parts], axes: Sequence[int], pooled: Sequence[int]) -> Parts:
    if node.op == "once":
        return None, _at_element(args[0])
    if all(own is None for _, own in args):
        return ir.rebuild(node, tuple(_whole(pair, axes) for pair in args)), None
    if node.op == "reduce":
        return _reduced(node, args, axes, pooled), None
    assert node.op in _PLACES, f"{node.op} of what elements have once"
    places = _PLACES[node.op]
    mixed = [i for i, (_, own) in enumerate(args) if own is not None]
    if node.op == "mul" and len(mixed) == 2:
        assert any(shares is None for shares, _ in args), "a product of two sums of shares"
        return None, ir.primitive("mul", *map(_at_element, args))
    assert places.issuperset(mixed), f"{node.op} by what elements have once"

    def part(which: int) -> Expr | None:
        taken = [pair[which] if i in linear else _whole(pair, axes) for i, pair in enumerate(args)]
        there = [i for i in linear if taken[i] not in (None, NO_SHARE)]
        if not there:
            return None
        if node.op in ("add", "sub") and len(there) == 1:
            (term,) = (taken[i] for i in there)
            assert term is not None
            return -term if node.op == "sub" and there == [1] else term
        return ir.primitive(node.op, *(NO_SHARE if t is None else t for t in taken))

    linear = set(mixed) if node.op == "mul" else places
    return part(0), part(1)


# The arguments in which an operation is linear together; of a product, it is one of the two.
_PLACES = {
    **{op: frozenset({0, 1}) for op in ("add", "sub", "mul")},
    **dict.fromkeys(("neg", "div", *arity.CASTS), frozenset({0})),
    "where": frozenset({1, 2}),
}


def _reduced(node: Expr, args: Sequence[Parts], axes: Sequence[int], pooled: Sequence[int]) -> Expr:
    """A reduction over elements, and over windows and what is within them."""
    kind, along = ir.reduction(node)
    assert along.issuperset(axes), "what elements have once is reduced over whole axes"
    ((shares, own),) = args
    assert own is not None
    is_varying = bool(own.extent.intersection(axes))
    total = ir.reduce(kind, along, ir.once(own, axes) if is_varying else own)
    if shares is None:
        return total
    assert kind == "sum", f"the {kind} of shares"
    # Windows differ in how many of their positions are inside.
    for within in (g for g in along if g < 0 and g not in shares.extent):
        counted = frozenset({pooled[-1 - within]})
        shares = shares * ir.make("covered", attrs=((within,), False), extent=counted)
        along -= {within}
    return ir.reduce(kind, along, shares) + total


def without_factors(shares: Expr, leaf: Expr, pooled: Sequence[int]) -> tuple[Expr, Expr]:
    """Shares without the factors that an element has for each of its windows; and what leaf, their
    sum, becomes with them. pooled has the group that each group of places within windows splits.
    """
    node, ends = shares, list[Callable[[Expr], Expr]]()
    while (found := _factor(node, pooled)) is not None:
        node, end = found
        ends.append(end)
    whole = leaf
    for end in reversed(ends):
        whole = end(whole)
    return node, whole


def _factor(node: Expr, pooled: Sequence[int]) -> tuple[Expr, Callable[[Expr], Expr]] | None:
    """A linear operation on what windows differ in, taken off; None where there is none."""
    if node.op not in _PLACES or node.op in arity.CASTS:
        return None
    differing = [i for i, arg in enumerate(node.args) if not _is_of_element(arg, pooled)]
    if node.op == "where" and differing and differing[0] == 0:
        # Whether there is a share is for each window to say, how large it is for the element too.
        condition, *sides = node.args
        i = 0 if sides[1] is NO_SHARE else 1
        if sides[1 - i] is not NO_SHARE or (found := _factor(sides[i], pooled)) is None:
            return None
        sides[i], end = found
        return ir.primitive("where", condition, *sides), end
    if len(differing) != 1 or differing[0] not in _PLACES[node.op]:
        return None
    if node.op in ("add", "sub") or (node.op == "where" and NO_SHARE not in node.args):
        return None
    (at,) = differing
    args = node.args
    return args[at], lambda total: ir.primitive(node.op, *args[:at], total, *args[at + 1 :])


def _is_of_element(expr: Expr, pooled: Sequence[int]) -> bool:
    """Whether a value is the same in all windows that have an element."""
    for node in ir.topological([expr]):
        split = {g for g in node.extent if g in pooled}
        within = {pooled[-1 - g] for g in node.extent if g < 0}
        is_known = node.op in arity.ARITY or node.op in ("input", "const", "count")
        if not is_known or node.kind == "noise" or (node.op == "input" and split != within):
            return False
    return True
