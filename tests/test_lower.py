"""A chain meets shapes: no tensor, no torch and no compiler is needed for it."""

import subprocess
import sys

import pytest

from fusegen import chain, ir
from fusegen.bind import bind
from fusegen.errors import ArgumentError
from fusegen.lower import lower
from fusegen.promotion import FLOATING, promote


def bound(text, x, *operands, dtype="float32", dtypes=()):
    """The chain bound to shapes; operands are float32 unless dtypes says otherwise."""
    parsed = chain(text)
    kinds = [*dtypes, *["float32"] * (len(operands) - len(dtypes))]
    given = dict(zip(parsed.operands, zip(operands, kinds, strict=True), strict=True))
    return bind(parsed, (x, dtype), given)


def extents(text, x, *operands):
    found = bound(text, x, *operands)
    return [set(o.extent) for o in found.operands]


# Where operands lie.


@pytest.mark.parametrize(
    ("text", "operand", "extent"),
    [
        ("add_channel", (3,), {-3}),
        ("add_channel", (3, 1, 1), {-3}),
        ("add_channel", (1, 3, 1, 1), {-3}),
        ("add_channel(axis=-1)", (5,), {-1}),
        ("add_channel(axis=0)", (2,), {-4}),
        ("add(other)", (5,), {-1}),
        ("add(other)", (4, 1), {-2}),
        ("add(other)", (2, 1, 4, 1), {-4, -2}),
        ("add(other)", (2, 3, 4, 5), {-4, -3, -2, -1}),
        ("add(other)", (), set()),
        ("layernorm(weight)", (5,), {-1}),
        ("layernorm(weight, normalized_shape=(4, 5))", (4, 5), {-2, -1}),
        ("layernorm(weight, axis=1)", (3,), {-3}),
        ("layernorm(weight, axis=1)", (3, 1, 1), {-3}),
    ],
)
def test_an_operand_varies_along_the_axes_that_its_step_gives_it(text, operand, extent):
    assert extents(text, (2, 3, 4, 5), operand) == [extent]


def test_an_operand_may_widen_x():
    found = bound("mul(other) | neg", (3, 1), (2, 3, 4))
    assert found.domain == found.result_shape == (2, 3, 4)
    assert found.x.extent == {-2}


def test_an_axis_of_one_value_may_be_widened_later():
    found = bound("layernorm(weight) | add(other)", (1,), (1,), (7, 3))
    assert (found.x.extent, found.operands[0].extent) == (set(), set())
    assert bound("add(other)", (1, 3), (0, 3)).result_shape == (0, 3)


def test_an_operand_may_meet_values_that_differ_only_in_axes_of_one_value():
    found = bound("add(t) | mul(other) | add(t)", (1, 5), (1, 5), (3, 1))
    assert found.operands[0].extent == {-1}


def test_an_operand_of_dropped_steps_alone_changes_nothing():
    found = bound("keep(y) | add(other) | recall(y) | neg", (3, 4), (2, 3, 4))
    assert found.result_shape == (3, 4)
    assert found.result == ((-2,), (-1,))


def test_an_operand_has_the_same_axes_everywhere():
    with pytest.raises(ArgumentError, match=r"layernorm\(t\): operand 't' of shape \(6,\) is used"):
        bound("add_channel(t) | layernorm(t)", (2, 6, 4, 6), (6,))


def test_an_axis_is_counted_among_those_that_its_step_meets():
    # Axis 1 is the last of x, which only later gets a third axis in front.
    lowered = lower(bound("layernorm(axis=1) | add(other)", (3, 4), (2, 3, 4)))
    reduced = {ir.reduction(n)[1] for n in ir.topological(lowered.graph.roots) if n.op == "reduce"}
    assert reduced == {frozenset({-1})}


def test_a_pooled_axis_is_halved_and_its_edge_dropped():
    found = bound("max_pool2d((2, 3))", (2, 3, 5, 8))
    assert found.windows == ((-2, 2), (-1, 3))
    assert found.result_shape == (2, 3, 2, 2)


def test_sizes_do_not_matter_to_the_graph():
    text = "add_channel(bias) | mul(scale) | max_pool2d(2)"
    one = bound(text, (2, 3, 4, 6), (3,), (6,))
    other = bound(text, (7, 9, 8, 2), (9, 1, 1), (2,))
    assert one.pattern == other.pattern
    assert lower(one).graph == lower(other).graph


def test_what_broadcasts_does():
    text = "mul(other)"
    assert bound(text, (2, 3), (3,)).pattern != bound(text, (2, 3), (2, 3)).pattern
    assert bound(text, (2, 3), (3,)).pattern != bound(text, (4, 2, 3), (3,)).pattern


# Element types.


def test_types_are_promoted_as_torch_does():
    torch = pytest.importorskip("torch")
    for a in FLOATING:
        for b in FLOATING:
            expected = torch.promote_types(getattr(torch, a), getattr(torch, b))
            assert promote(a, b) == str(expected).removeprefix("torch.")


@pytest.mark.parametrize(
    ("x", "operand", "shape", "result"),
    [
        ("float16", "float32", (5,), "float32"),
        ("float16", "float64", (), "float16"),  # a tensor without axes does not widen
        ("bfloat16", "float16", (5,), "float32"),
        ("float64", "float32", (5,), "float64"),
    ],
)
def test_the_result_has_the_promoted_type(x, operand, shape, result):
    assert bound("add(other)", (4, 5), shape, dtype=x, dtypes=[operand]).dtype == result


def test_a_mix_that_torch_refuses_is_refused():
    for other in ("float64", "bfloat16"):
        with pytest.raises(ArgumentError, match=r"weight.to\(torch.float16\)"):
            bound("layernorm(weight)", (4, 5), (5,), dtype="float16", dtypes=[other])


def test_fp32_parameters_of_a_narrower_value_leave_it_narrow():
    for narrow in ("float16", "bfloat16"):
        found = bound("layernorm(weight)", (4, 5), (5,), dtype=narrow, dtypes=["float32"])
        assert found.dtype == narrow


# The graph.


def test_every_step_has_a_mark():
    lowered = lower(bound("leaky_relu(0.2) | keep(y) | gelu | mul(y)", (4, 5)))
    assert [(m.name, m.comment) for m in lowered.marks] == [
        ("after_leaky_relu", "leaky_relu(0.2)"),
        ("after_gelu", "gelu"),
        ("after_mul", "mul(y)"),
    ]
    assert lowered.graph.roots == (lowered.marks[-1].node,)


def test_a_recalled_value_goes_on_where_it_was_kept():
    recalled = lower(bound("neg | keep(y) | gelu | recall(y) | abs", (4, 5)))
    plain = lower(bound("neg | abs", (4, 5)))
    assert recalled.graph == plain.graph


def test_a_result_may_be_a_condition():
    lowered = lower(bound("gt(0)", (4, 5)))
    assert [root.kind for root in lowered.graph.roots] == ["truth"]


def test_no_torch_is_imported():
    code = (
        "import sys; from fusegen import chain; from fusegen.bind import bind;"
        "from fusegen.lower import lower;"
        "lower(bind(chain('gelu'), ((2, 3), 'float32'), {}));"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
