"""Choices in fewer comparisons: bounds as minimum and maximum, a choice within a choice as one.

Every value stays what it was, NaN included, up to the sign of a zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fusegen.ir import Expr, constant, primitive

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
_LOWER, _UPPER = ("lt", "le"), ("gt", "ge")
_Literal = tuple[Expr, bool]  # a condition, and whether it holds


def joined(condition: Expr, branches: Sequence[Expr], inner: Sequence[bool]) -> Expr | None:
    """where(condition, *branches) as one choice, if one of the branches is a choice that nothing
    else uses (`inner` says so) and they have a branch in common.
    """
    for holds, is_inner in zip((True, False), inner, strict=True):
        choice, other = branches if holds else reversed(branches)
        if choice.op != "where" or other not in choice.args[1:] or not is_inner:
            continue
        is_first = choice.args[2] is other
        chosen = choice.args[1] if is_first else choice.args[2]
        mine = _literals(condition, holds=holds)
        its = _literals(choice.args[0], holds=is_first)
        if mine and its:
            return primitive("where", _conjunction([*mine, *its]), chosen, other)
    return None


def bounded(condition: Expr, yes: Expr, no: Expr) -> Expr | None:
    """Choices that are a minimum or a maximum with a number, NaN handed on."""
    if condition.op == "eq" and condition.args == (yes, yes):
        number = constant(no)
        return yes if number is not None and not _is_number(no) else None
    limit = constant(yes)
    if limit is None or not _is_number(yes) or condition.op not in (*_LOWER, *_UPPER):
        return None
    x, against = condition.args
    if against is not yes:
        return None
    op, opposite = ("maximum", "minimum") if condition.op in _LOWER else ("minimum", "maximum")
    if no is x:
        return primitive(op, x, yes)
    if no.op == opposite and no.args[0] is x and (other := constant(no.args[1])) is not None:
        is_ordered = limit <= other if op == "maximum" else other <= limit
        return primitive(op, no, yes) if is_ordered else None
    return None


def _is_number(node: Expr) -> bool:
    number = constant(node)
    return number is not None and not math.isnan(number)


def _literals(condition: Expr, *, holds: bool) -> list[_Literal]:
    """What must all hold for a condition to hold, or to fail; none where it is not as simple."""
    if condition.op == "logical_not":
        return _literals(condition.args[0], holds=not holds)
    if condition.op in ("logical_and", "logical_or"):
        if (condition.op == "logical_and") != holds:
            return []
        sides = [_literals(a, holds=holds) for a in condition.args]
        return [literal for side in sides for literal in side] if all(sides) else []
    return [(condition, holds)]


def _conjunction(literals: Iterable[_Literal]) -> Expr:
    """All of them at once; of a number, not above is at most, and what is compared is a number."""
    found = dict.fromkeys(literals)
    numbers = {c.args[0] for c, holds in found if holds and c.op == "eq" and c.args[0] is c.args[1]}
    turned: dict[_Literal, None] = {}
    for condition, holds in found:
        is_turned = not holds and condition.op in _NEGATED and condition.args[0] in numbers
        if is_turned and _is_number(condition.args[1]):
            turned[primitive(_NEGATED[condition.op], *condition.args), True] = None
        else:
            turned[condition, holds] = None
    compared = {c.args[0] for c, holds in turned if holds and c.op in _NEGATED}
    result: Expr | None = None
    for condition, holds in turned:
        is_number = condition.op == "eq" and holds and condition.args[0] is condition.args[1]
        if is_number and condition.args[0] in compared:
            continue
        literal = condition if holds else primitive("logical_not", condition)
        result = literal if result is None else primitive("logical_and", result, literal)
    assert result is not None
    return result
