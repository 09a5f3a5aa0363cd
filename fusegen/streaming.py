"""Rows that are read once, turn by turn, though they are reduced twice: where all that waits for a
row's largest number is sums of exp(a - largest), times whatever else. What has been added up beside
a smaller largest number is rescaled beside a larger one, so nothing of a row is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fusegen import ir
from fusegen.ir import Expr, constant, primitive
from fusegen.kernel import Kernel, Reduction, Rescaling
from fusegen.target import DEAR


def rescaling(
    stages: Sequence[Sequence[Reduction]], fresh: Callable[[str], str]
) -> Rescaling | None:
    """How what the second of two stages adds up follows the largest number that the first has
    found so far; None where it cannot be told of some sum, or where there is more to find.
    """
    if len(stages) != 2 or [r.kind for r in stages[0]] != ["peak"]:
        return None
    (first,) = stages[0]
    if [result for result, _ in first.results] != ["max"]:
        return None
    ((_, largest),) = first.results
    before = ir.tensor(fresh(f"{ir.name_of(largest)}_before"), largest.extent, largest.rank)
    factors: list[tuple[Expr, Expr]] = []
    for reduction in stages[1]:
        if reduction.kind != "sum":
            return None
        factor = _factor(reduction.value, first.value, largest, before)
        if factor is None:
            return None
        if constant(factor) != 1:
            factors += [(leaf, factor) for _, leaf in reduction.results]
    return Rescaling(largest, before, tuple(factors)) if factors else None


def _factor(term: Expr, a: Expr, largest: Expr, before: Expr) -> Expr | None:
    """What a term that was found with `before` is multiplied by to be what it is with `largest`;
    None where that is not the same for every element.
    """
    if largest not in ir.inputs([term]):
        return ir.const(1.0)
    if term.op == "exp" and term.args[0].op == "sub":
        taken, shift = term.args[0].args
        # With anything else than what is compared, an exponential might be infinite meanwhile.
        if taken is not a or not is_largest(shift, (largest,)):
            return None
        (old,) = ir.substitute([shift], {largest: before})
        return primitive("exp", primitive("sub", old, shift))
    if term.op == "mul":
        one, other = (_factor(arg, a, largest, before) for arg in term.args)
        return None if one is None or other is None else _product(one, other)
    if term.op == "neg":
        return _factor(term.args[0], a, largest, before)
    if term.op == "div" and largest not in ir.inputs(term.args[1:]):
        return _factor(term.args[0], a, largest, before)
    if term.op == "where" and largest not in ir.inputs(term.args[:1]):
        sides = [s for s in term.args[1:] if constant(s) != 0]
        found = {_factor(side, a, largest, before) for side in sides}
        return found.pop() if len(found) == 1 else None
    return None


def _product(one: Expr, other: Expr) -> Expr:
    if constant(one) == 1:
        return other
    return one if constant(other) == 1 else primitive("mul", one, other)


def is_largest(shift: Expr, largest: Collection[Expr]) -> bool:
    """Whether it is one of these largest numbers, or a constant where that is infinite: not
    something that is computed from it.
    """
    options = shift.args[1:] if shift.op == "where" else (shift,)
    is_any = any(o in largest for o in options)
    return is_any and all(o in largest or o.op == "const" for o in options)


def may_stream(kernel: Kernel) -> bool:
    """Whether a kernel that holds rows could read them turn by turn as well: nothing of their size
    is written or added up by column, and all that is read lies along rows or has one number of
    each.
    """
    if kernel.family != "row" or kernel.rescaling is None or len(kernel.reduced) != 1:
        return False
    # What is computed of an element is computed again beside the largest number.
    terms = ir.topological(r.value for r in kernel.stages[0])
    if kernel.sums or kernel.stretches or any(n.op in DEAR for n in terms):
        return False
    if any(set(buffer.extent) & set(kernel.reduced) for buffer, _ in kernel.stores):
        return False
    return all(_is_plain(leaf, kernel) for leaf, _ in kernel.inputs)


def _is_plain(leaf: Expr, kernel: Kernel) -> bool:
    buffer = dict(kernel.inputs)[leaf]
    if buffer.has_gaps or buffer.at or buffer.pieces > 1 or buffer.dtype == "noise":
        return False
    along = frozenset(kernel.reduced)
    return leaf.extent in (along, along | frozenset(kernel.domain)) or not leaf.extent & along
