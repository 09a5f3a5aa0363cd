"""What a stage of a kernel over rows keeps for later ones."""

import pytest

from fusegen import ir
from fusegen.carrying import Staged, carry
from fusegen.ir import primitive
from fusegen.kernel import Reduction

ELEMENTS = frozenset((0, 1))
x = ir.tensor("x", ELEMENTS, 0)
y = ir.tensor("y", ELEMENTS, 0)
total = ir.tensor("total", frozenset((0,)), 0)


def names():
    taken = []

    def fresh(stem):
        taken.append(stem)
        return f"{stem}_{len(taken)}"

    return fresh


def carried(term, *values, is_on_chip=False, spares_dear=None, kind="sum", **more):
    work = Staged(((Reduction(kind, term, ((kind, total),)),),), values)
    ways = {
        "is_on_chip": is_on_chip,
        "spares_dear": not is_on_chip if spares_dear is None else spares_dear,
    }
    return carry(work, [1] * len(values), ELEMENTS, names(), **ways, **more)


@pytest.mark.parametrize("is_on_chip", [False, True])
def test_what_is_dear_is_computed_once(is_on_chip):
    power = primitive("exp", x)
    found = carried(power, power / total, is_on_chip=is_on_chip)
    (((leaf, value),),) = found.held
    assert value is power
    assert found.values == (leaf / total,)


@pytest.mark.parametrize("is_on_chip", [False, True])
def test_what_is_cheap_is_computed_again(is_on_chip):
    found = carried(x * x, x * x / total, is_on_chip=is_on_chip)
    assert found.held == ((),)
    assert found.values == (x * x / total,)


def test_two_tensors_are_carried_as_one_value_on_the_chip_and_read_again_elsewhere():
    both = x + y
    assert [value for _, value in carried(both, both * total, is_on_chip=True).held[0]] == [both]
    assert carried(both, both * total).held == ((),)


@pytest.mark.parametrize("is_on_chip", [False, True])
def test_nothing_is_carried_for_a_variance_which_goes_over_its_values_once(is_on_chip):
    assert carried(x * x, x * total, is_on_chip=is_on_chip, kind="moments").held == ((),)


def test_one_value_is_carried_where_two_dear_ones_meet():
    both = primitive("exp", x) + primitive("erf", x)
    found = carried(both, both * total, both - total)
    assert [value for _, value in found.held[0]] == [both]


@pytest.mark.parametrize(("few", "is_carried"), [(0, True), (1, False)])
def test_what_follows_from_much_that_is_read_one_by_one_is_carried(few, is_carried):
    beside = x + ir.tensor("p", frozenset((1,)), 0)
    ways = {"apart": frozenset((1,)), "few_apart": few}
    found = carried(beside, beside * total, is_on_chip=True, **ways)
    assert [value for _, value in found.held[0]] == [beside] * is_carried


def test_what_no_stage_computes_is_not_carried():
    later = primitive("exp", x) * total
    assert carried(x, later).values == (later,)


def test_where_there_is_room_what_is_dear_is_carried_beside_what_was_read():
    power = primitive("exp", x)
    values = (power * total, x * total)
    assert carried(power, *values, is_on_chip=True).held == ((),)
    (((_, value),),) = carried(power, *values, is_on_chip=True, spares_dear=True).held
    assert value is power


def test_what_is_dear_is_not_carried_where_another_value_stands_for_it():
    both = primitive("exp", x) + y
    found = carried(both, both * total, is_on_chip=True, spares_dear=True)
    assert [value for _, value in found.held[0]] == [both]
