"""The fewest values between sources and sinks, by a second way that tries every set."""

import itertools
import random

import pytest

from fusegen import ir
from fusegen.cut import minimum_cut
from fusegen.ir import Expr, primitive

X, Y, Z = (ir.tensor(name, {0}, 0) for name in "xyz")


def is_input(node: Expr) -> bool:
    return node.op == "input"


def anything(node: Expr) -> bool:
    return node.op != "const"


def separates(cut: tuple[Expr, ...], sinks: list[Expr]) -> bool:
    return not any(is_input(n) for n in ir.topological(sinks, stop=set(cut)) if n not in cut)


def test_one_value_of_two_tensors_is_carried_instead_of_both() -> None:
    total = X + Y
    assert minimum_cut([total * 2.0, primitive("exp", total)], is_input, anything) == [total]


def test_of_equal_cuts_the_one_nearest_to_the_sinks_is_taken() -> None:
    dear = primitive("erf", primitive("exp", X))
    assert minimum_cut([dear + 1.0, dear * 2.0], is_input, anything) == [dear]


def test_a_sink_may_be_a_source() -> None:
    assert minimum_cut([X, X * Y], is_input, anything) == [X, X * Y]


def test_what_cannot_be_cut_is_passed_by() -> None:
    is_above = X > Y
    cut = minimum_cut([primitive("where", is_above, Z, -Z)], is_input, lambda n: n.op == "input")
    assert cut == [X, Y, Z]


def test_a_source_that_cannot_be_cut_is_refused() -> None:
    """Such paths would have no end."""
    with pytest.raises(ValueError, match="there is no cut between the sinks and x"):
        minimum_cut([X * 2.0], is_input, lambda node: False)


def test_nothing_is_carried_where_nothing_is_read() -> None:
    assert minimum_cut([ir.const(2.0)], is_input, anything) == []


@pytest.mark.parametrize("seed", range(40))
def test_no_smaller_set_separates_them(seed: int) -> None:
    choose = random.Random(seed)
    nodes: list[Expr] = [X, Y, Z]
    for _ in range(6):
        op = choose.choice(["add", "mul", "sub", "exp"])
        arguments = choose.sample(nodes, 1 if op == "exp" else 2)
        nodes.append(primitive(op, *arguments))
    sinks = nodes[-3:]
    cut = minimum_cut(sinks, is_input, anything)
    assert separates(tuple(cut), sinks)
    candidates = [n for n in ir.topological(sinks) if anything(n)]
    smaller = itertools.combinations(candidates, len(cut) - 1) if cut else ()
    assert not any(separates(other, sinks) for other in smaller)
