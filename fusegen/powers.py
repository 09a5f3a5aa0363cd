"""What powers and tanh are as well had from: products, roots and quotients, and sigmoids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from fusegen import ir
from fusegen.ir import Expr, constant, primitive

# Those for which torch calls no function either.
_POWERS: Mapping[float, Callable[[Expr], Expr]] = {
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    0.5: lambda x: primitive("sqrt", x),
    -0.5: lambda x: primitive("rsqrt", x),
    -1.0: lambda x: 1.0 / x,
    -2.0: lambda x: 1.0 / (x * x),
}
# Powers beyond it would lose digits by the error of a logarithm, or of many products.
MOST_EXPONENT = 16.0


def users_of(roots: Sequence[Expr]) -> Counter[Expr]:
    """How often each node below the roots is an argument or a root."""
    order = ir.topological(roots)
    return Counter((*dict.fromkeys(roots), *(a for node in order for a in node.args)))


def power(node: Expr) -> Expr:
    """A power as torch computes it, at any type."""
    base, exponent = node.args
    found = _POWERS.get(constant(exponent) or 0.0)
    return node if found is None else found(base)


def whole_power(base: Expr, exponent: int) -> Expr:
    """The product of so many, one at least, by squares."""
    if exponent == 1:
        return base
    half = whole_power(base, exponent // 2)
    return half * half * base if exponent % 2 else half * half


def halved(roots: Sequence[Expr], named: Collection[Expr]) -> dict[Expr, Expr]:
    """1 + tanh(a) and 1 - tanh(a)^2, each with tanh(a), wherever nothing else asks for that: with
    sigmoids they keep their digits where tanh(a) is nearly -1.
    """
    users, takers = users_of(roots), dict[Expr, list[Expr]]()
    for node in ir.topological(roots):
        for arg in dict.fromkeys(node.args):
            takers.setdefault(arg, []).append(node)
    found: dict[Expr, Expr] = {}
    for tanh in (n for n in takers if n.op == "tanh" and n not in named):
        sums = [n for n in takers[tanh] if n.op == "add" and 1.0 in map(constant, n.args)]
        squares = [n for n in takers[tanh] if n.op == "mul" and n.args == (tanh, tanh)]
        gaps = [n for square in squares for n in takers.get(square, ())]
        gaps = [n for n in gaps if n.op == "sub" and constant(n.args[0]) == 1.0]
        is_all = users[tanh] == len(sums) + 2 * len(squares)
        is_all &= sum(users[n] for n in squares) == len(gaps)
        if is_all and not any(n in named for n in squares):
            found |= dict.fromkeys((*sums, *gaps), tanh)
    return found
