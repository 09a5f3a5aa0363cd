"""Strips: what a reduction takes lies in short runs far from each other, such as the channels of a
group in a tensor whose channels are innermost.

Run by run, each would leave a partial of its own. Instead threads stay in their columns while rows
pass by, each column is reduced on its own, and what is left of them, which is small, in a second
step. Elements are written so too: what depends on a column is then found once for all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fusegen import arity, ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.rowaxes import domain_of
from fusegen.staging import Pass, reduces_below
from fusegen.ways import Strips, way_of


def take_strips(state: Pass) -> None:
    """Find the strips, and part each reduction over more than what passes by."""
    state.strips = _strips_of(state)
    if state.strips is not None:
        _part(state, state.strips)


def part_runs(state: Pass) -> None:
    """The same where windows pool: columns are all that lies behind what passes by."""
    state.strips = Strips()
    _part(state, state.strips)


def part_columns(state: Pass) -> None:
    """Part each reduction down columns that is over all that another one is over, and more: one
    pass serves both then, and what it leaves for the rest is small. Rows that are reduced as well
    take columns along.
    """
    reduces = reduces_below(state.pending.values())
    domain = domain_of(state)
    rows = [n for n in reduces if n.args[0].extent == domain]
    if any(way_of(n, None).family == "inner" for n in rows):
        return
    found = ((n.args[0].extent, ir.reduction(n)[1], _waits(n, ir.reduction(n)[1])) for n in reduces)
    over = tuple(dict.fromkeys(found))

    def first_of(node: Expr) -> Extent:
        extent, axes = node.args[0].extent, ir.reduction(node)[1]
        fewer = [a for e, a, waits in over if (e, waits) == (extent, _waits(node, a)) and a < axes]
        if fewer:
            return max(fewer, key=len)
        # What is first is written as what it is to serve.
        return axes if any((e, a > axes) == (extent, True) for e, a, _ in over) else frozenset()

    _part_at(state, first_of)


def _waits(node: Expr, axes: Extent) -> bool:
    """Whether what varies along some of its axes, of what a node reduces, waits for others."""
    above, below = _factors(node.args[0])
    return bool(reduces_below(f for f in above + below if f.extent & axes))


def _part(state: Pass, strips: Strips) -> None:
    """Part reductions over more than what passes by, but for moments: what merges those takes the
    ones of all columns of a result.
    """
    _part_at(state, lambda n: strips.passing_of(ordered(n.args[0].extent), ir.reduction(n)[1]))


def _part_at(state: Pass, first_of: Callable[[Expr], Extent]) -> None:
    """Part sums and maxima: along what comes first, and then along the rest."""
    place = {n: i for i, n in enumerate(ir.topological(state.pending.values()))}

    def rule(node: Expr) -> Expr:
        if node.op != "reduce":
            return node
        kind, axes = ir.reduction(node)
        first = first_of(node)
        if not first or kind not in ("sum", *arity.MAXIMA):
            return node
        return _in_two_steps(kind, node.args[0], first, axes - first, place)

    reduces = reduces_below(state.pending.values())
    state.resolve(dict(zip(reduces, ir.rewrite(reduces, rule), strict=True)))


def _strips_of(state: Pass) -> Strips | None:
    """The strips of everything of full size, if what reductions there take comes in runs: the
    groups before the last that is not reduced pass by.
    """
    domain = ordered(domain_of(state))
    passing: Extent = frozenset(domain)
    is_in_runs = False
    for node in reduces_below(state.pending.values()):
        _, axes = ir.reduction(node)
        kept = [g for g in domain if g not in axes]
        if ordered(node.args[0].extent) == domain and domain[-1] in axes and kept:
            before = {g for g in axes if g < kept[-1]}
            is_in_runs = is_in_runs or bool(before)
            passing &= before or passing
    if not is_in_runs or not passing:
        return None
    return Strips(domain, passing, tuple(g for g in domain if g > max(passing)))


def _in_two_steps(
    kind: str, value: Expr, first: Extent, rest: Extent, place: Mapping[Expr, int]
) -> Expr:
    """A sum or a maximum along `first`, and of what that leaves along the rest, if any."""
    if kind != "sum":
        once = ir.reduce(kind, first, value)
        return ir.reduce(kind, rest, once) if rest else once
    once = _sum(value, first, place)
    return ir.reduce_sum(once, rest) if rest else once


def _sum(value: Expr, axes: Extent, place: Mapping[Expr, int]) -> Expr:
    """The sum along some axes, with every factor outside that does not vary along them, and the
    others in one order: so that sums of which only such factors differ are one.
    """
    above, below = _factors(value)
    inside = [f for f in above if f.extent & axes]
    inverse = [f for f in below if f.extent & axes]
    inside.sort(key=lambda f: place.get(f, len(place)))
    found = _product(inside)
    for factor in inverse:
        found = found / factor
    outside = [f for f in above if not f.extent & axes]
    found = _product([ir.reduce_sum(found, axes), *outside])
    for factor in (f for f in below if not f.extent & axes):
        found = found / factor
    return found


def _factors(value: Expr) -> tuple[list[Expr], list[Expr]]:
    """What a value is the product of, and what that is divided by."""
    if value.op == "neg":
        above, below = _factors(value.args[0])
        return [ir.const(-1.0), *above], below
    if value.op == "mul":
        (a, under_a), (b, under_b) = map(_factors, value.args)
        return a + b, under_a + under_b
    if value.op == "div":
        above, below = _factors(value.args[0])
        return above, [*below, value.args[1]]
    return [value], []


def _product(factors: Iterable[Expr]) -> Expr:
    found = None
    for factor in factors:
        found = factor if found is None else found * factor
    return ir.const(1.0) if found is None else found
