"""Quotients that a choice keeps within bounds: spelled without what a division does for divisors
whose inverse is no normal number, and without the branch that goes with it.

The gradient of softplus, for one, divides by 1 + exp(x) only where x is at most 20.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from fusegen import ir
from fusegen.ir import Expr, constant
from fusegen.kernel import Kernel
from fusegen.powers import users_of
from fusegen.rewriting import operation, rewritten
from fusegen.target import Target

Bounds = tuple[float, float]

_SPELLED = {"div": "bounded_div", "narrow_div": "narrow_bounded_div"}
_LEAST, _MOST = 2.0**-125, 2.0**125
_ANY: Bounds = (-math.inf, math.inf)


def guarded(kernels: Iterable[Kernel], target: Target) -> tuple[Kernel, ...]:
    """The kernels with such quotients, where the target has them."""
    has_them = target.spellings.keys() >= set(_SPELLED.values())
    return tuple(rewritten(k, _respelled) if has_them else k for k in kernels)


def _respelled(roots: Sequence[Expr], named: Sequence[Expr]) -> dict[Expr, Expr]:
    users = users_of(roots)
    found: set[Expr] = set()
    for node in ir.topological(roots):
        for branch, guard in _guards(node):
            found |= _bounded_in(branch, guard, users, frozenset(named))
    images: dict[Expr, Expr] = {}
    for node in ir.topological(roots):
        args = tuple(images[a] for a in node.args)
        is_found = node in found
        images[node] = operation(_SPELLED[node.op], *args) if is_found else ir.rebuild(node, args)
    return images


def _guards(node: Expr) -> list[tuple[Expr, Mapping[Expr, Bounds]]]:
    """A branch of a choice with what is known there of a value that was compared with a number."""
    if node.op != "where" or len(node.args[0].args) != 2:
        return []
    condition, yes, no = node.args
    value, limit = condition.args[0], constant(condition.args[1])
    if limit is None or condition.op not in ("gt", "ge", "lt", "le"):
        return []
    return [(no if condition.op in ("gt", "ge") else yes, {value: (-math.inf, limit)})]


def _bounded_in(
    branch: Expr, guard: Mapping[Expr, Bounds], users: Counter[Expr], named: Collection[Expr]
) -> set[Expr]:
    """The quotients that only this branch asks for, whose divisors are normal there, and so are
    their inverses.
    """
    known = dict(guard)
    found: set[Expr] = set()
    waiting = [branch]
    while waiting:
        node = waiting.pop()
        if users[node] > 1 or node in named:
            continue
        if node.op in _SPELLED:
            least, most = _bounds(node.args[1], known)
            found |= {node} if least >= _LEAST and most <= _MOST else set()
        waiting += node.args
    return found


def _bounds(node: Expr, known: dict[Expr, Bounds]) -> Bounds:
    """Between what a number is, where it is one."""
    for n in ir.topological([node]):
        if n not in known:
            known[n] = _bounds_of(n, [known.get(a, _ANY) for a in n.args])
    return known[node]


def _bounds_of(node: Expr, args: Sequence[Bounds]) -> Bounds:
    if (number := constant(node)) is not None:
        return number, number
    if node.op == "add":
        return _sum(*args)
    if node.op == "mul":
        return _square(args[0]) if node.args[0] is node.args[1] else _product(*args)
    if node.op == "fma":
        is_square = node.args[0] is node.args[1]
        return _sum(_square(args[0]) if is_square else _product(*args[:2]), args[2])
    if node.op in ("exp", "exp2_flushed"):
        scale = 1.0 if node.op == "exp2_flushed" else 1.0 / math.log(2.0)
        least, most = (min(end * scale, 1024.0) for end in args[0])
        return 2.0**least if least < 1024 else math.inf, 2.0**most if most < 1024 else math.inf
    return _ANY


def _sum(a: Bounds, b: Bounds) -> Bounds:
    return a[0] + b[0], a[1] + b[1]


def _product(a: Bounds, b: Bounds) -> Bounds:
    # An infinite end stands for what is finite, so that 0 times it is 0.
    ends = [0.0 if 0.0 in (x, y) else x * y for x in a for y in b]
    return min(ends), max(ends)


def _square(a: Bounds) -> Bounds:
    ends = [end * end for end in a]
    return 0.0 if a[0] < 0.0 < a[1] else min(ends), max(ends)
