import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from evaluator import (
    DOMAIN,
    HARD,
    KINKS,
    LEAVES,
    OPERATIONS,
    Recipe,
    build,
    evaluate,
    evaluate_all,
    numbers,
    recipes,
)
from hypothesis import given, settings

from fusegen import arity, ir
from fusegen.autodiff import NO_SHARE, vjp, winners
from fusegen.ir import Expr, Graph, const, primitive, reduce, show
from fusegen.simplify import simplify
from fusegen.verification import verify

WITHOUT_SUMS = tuple(op for op in OPERATIONS if op != "sum")
EXACT = tuple(op for op in WITHOUT_SUMS if op != "mean")
X, Y, CHANNEL, ROW, *_ = LEAVES
APART = X - Y
AFFINE_SUM = reduce("sum", {-1}, APART) * 2 + reduce("sum", {-1}, CHANNEL)
many = settings(max_examples=600, deadline=None, derandomize=True)


def where(condition: Expr, yes: Expr | float, no: Expr | float) -> Expr:
    return primitive("where", condition, yes, no)


def short(*roots: Expr) -> tuple[Expr, ...]:
    return simplify(Graph(tuple(ir.inputs(roots)), numbered(roots))).roots


def numbered(roots: tuple[Expr, ...]) -> tuple[tuple[str, Expr], ...]:
    return tuple((f"out_{i}", root) for i, root in enumerate(roots))


def gradients(roots: list[Expr]) -> list[Expr]:
    """The cotangents of the leaves, for a cotangent of each root."""
    seeds: list[Expr | None] = [ir.tensor(f"g{i}", r.extent, 3) for i, r in enumerate(roots)]
    total = vjp(roots, seeds, LEAVES)
    return [total[leaf] for leaf in LEAVES if leaf in total]


def with_seeds(roots: list[Expr], seed: int, extra: tuple[float, ...]) -> dict[str, np.ndarray]:
    values = numbers(seed, extra)
    random = np.random.default_rng(seed + 1)
    for leaf in ir.inputs(roots):
        name = ir.name_of(leaf)
        if name not in values:
            shape = [DOMAIN[a] if a in leaf.extent else 1 for a in sorted(DOMAIN)]
            values[name] = random.normal(size=shape)
    return values


def assert_same_where_finite(before: list[Expr], after: list[Expr], values: dict) -> None:
    known = evaluate_all(before, values, DOMAIN)
    # Terms may cancel, so what rounding can do is told by the largest of them.
    sizes = [np.abs(v[np.isfinite(v)]).max(initial=0) for v in known.values()]
    results = evaluate(after, values, DOMAIN)
    for root, result in zip(before, results, strict=True):
        expected = np.broadcast_to(
            known[root], np.broadcast_shapes(known[root].shape, result.shape)
        )
        result = np.broadcast_to(result, expected.shape)
        finite = np.isfinite(expected)
        np.testing.assert_allclose(
            result[finite], expected[finite], rtol=1e-9, atol=1e-12 * max(sizes), err_msg=show(root)
        )
        assert not np.isfinite(result[np.isinf(expected)]).any(), show(root)


# --- what every graph keeps ---


@many
@given(recipes)
def test_forward_values_stay_to_the_last_bit(recipe: Recipe) -> None:
    roots = build(recipe, EXACT)[-3:]
    values = numbers(recipe.seed, HARD)
    before = evaluate(roots, values, DOMAIN, np.float32)
    after = evaluate(short(*roots), values, DOMAIN, np.float32)
    for root, old, new in zip(roots, before, after, strict=True):
        new = np.broadcast_to(new, old.shape)
        same = (old.view(np.int32) == new.view(np.int32)) | (np.isnan(old) & np.isnan(new))
        assert same.all(), f"{show(root)} became {show(short(root)[0])}"


@many
@given(recipes)
def test_sums_and_means_stay_up_to_rounding(recipe: Recipe) -> None:
    terms = build(recipe, WITHOUT_SUMS)[-2:]
    roots = [reduce("sum", {-1}, terms[0]), reduce("sum", {-3, -2}, terms[-1])]
    roots += [reduce("sum", {-3, -2}, -roots[0]), reduce("mean", {-2}, terms[0] * CHANNEL + 0.5)]
    assert_same_where_finite(roots, short(*roots), numbers(recipe.seed, HARD))


@many
@given(recipes)
def test_gradients_stay_up_to_rounding_wherever_they_are_finite(recipe: Recipe) -> None:
    before = gradients(build(recipe, WITHOUT_SUMS)[-2:])
    values = with_seeds(before, recipe.seed, HARD if recipe.seed % 2 else KINKS)
    assert_same_where_finite(before, short(*before), values)


def costs(roots: Iterable[Expr]) -> tuple[int, int]:
    """(reductions, operations at every element)."""
    nodes = ir.topological(roots)
    at_elements = [n for n in nodes if n.extent == X.extent and n.op in arity.ARITY]
    return sum(n.op == "reduce" for n in nodes), len(at_elements)


@many
@given(recipes)
def test_no_graph_grows(recipe: Recipe) -> None:
    roots = build(recipe)[-3:]
    before = [*roots, *gradients(roots[:2])]
    after = short(*before)
    for new, old in zip(costs(after), costs(before), strict=True):
        assert new <= old, f"{before} became {after}"
    # A factor that leaves a sum which others need as it was costs one product of sums.
    of_sums = Counter(n.op for n in ir.topological(before))["reduce"] * 3
    # Constants cost nothing: 0 may become -0 where a sign goes into it.
    count = [sum(n.op != "const" for n in ir.topological(roots)) for roots in (after, before)]
    assert count[0] <= count[1] + of_sums


@many
@given(recipes)
def test_simplifying_twice_changes_nothing(recipe: Recipe) -> None:
    roots = build(recipe)[-3:]
    after = short(*roots, *gradients(roots[:2]))
    assert short(*after) == after
    verify(Graph(tuple(ir.inputs(after)), numbered(after)))


def test_the_result_does_not_depend_on_hash_seeds() -> None:
    program = (
        "import random; from evaluator import *; from fusegen.autodiff import vjp\n"
        "from fusegen.ir import *; from fusegen.simplify import simplify\n"
        "for seed in range(40):\n"
        "    r = random.Random(seed)\n"
        "    steps = tuple(tuple(r.randrange(256) for _ in range(5)) for _ in range(12))\n"
        "    root = build(Recipe(steps, 0))[-1]\n"
        "    total = vjp([root], [tensor('g', root.extent, 3)], LEAVES)\n"
        "    for leaf in LEAVES:\n"
        "        if leaf in total:\n"
        "            graph = Graph((), (('d', total[leaf]),))\n"
        "            nodes = topological(simplify(graph).roots)\n"
        "            place = {n: i for i, n in enumerate(nodes)}\n"
        "            print([(n.op, n.attrs, [place[a] for a in n.args]) for n in nodes])\n"
    )
    here = Path(__file__).parent
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": f"{here}{os.pathsep}{here.parent}",
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) > 20


def test_a_long_chain_takes_time_in_proportion() -> None:
    value: Expr = X
    for i in range(600):
        value = where(value > i, value, value * 0.2) + CHANNEL
    (gradient,) = (vjp([value], [Y], [X])[X],)
    (after,) = short(gradient)
    assert Counter(n.op for n in ir.topological([after]))["where"] == 600 + 599


# --- single rules ---


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (X + -0.0, X),
        (X - 0.0, X),
        (X + 0.0, X + 0.0),  # turns -0.0 into 0.0
        (0.0 - X, 0.0 - X),
        (X * 1, X),
        (1 * X, X),
        (X / 1, X),
        (X * -1, -X),
        (X / -1, -X),
        (X / 2, X * 0.5),
        (X / -0.25, X * -4),
        (X / 3, X / 3),
        (X / 2.0**126, X / 2.0**126),  # times an inverse of no full precision
        (X**1, X),
        (X * 0, X * 0),  # NaN stays NaN
        (primitive("neg", -X), X),
        (X + -Y, X - Y),
        (-X + Y, Y - X),
        (X - -Y, X + Y),
        (-X * -Y, X * Y),
        (-X / -Y, X / Y),
        (-X / Y + CHANNEL, CHANNEL - X / Y),
        (X * -CHANNEL, X * -CHANNEL),  # fewer channels than elements
        (-X * 0.2, X * -0.2),
        (-(0.2 * X), X * -0.2),
        (const(2) * 3 + X, 6 + X),
        (const(0.1) * 3 + X, const(0.1) * 3 + X),  # rounds differently in single precision
        (const(2.0**24) + 1 + X, const(2.0**24) + 1 + X),  # no such number in single precision
        ((X + 1) + 1, (X + 1) + 1),
        (where(X > 0, Y, Y), Y),
        (where(~(X > 0), X, Y), where(X > 0, Y, X)),
        (where(~~(X > 0), X, Y), where(X > 0, X, Y)),
        (where(X > 0, where(X > 0, X, 1), Y), where(X > 0, X, Y)),
        (where(X > 0, Y, where(X > 0, 1, X)), where(X > 0, Y, X)),
        (where(X > 0, X, 0) + where(X > 0, 0, Y), where(X > 0, X, 0) + where(X > 0, 0, Y)),
        (where(X > 0, X, 0) * Y + where(X > 0, Y, 0), where(X > 0, X, 0) * Y + where(X > 0, Y, 0)),
        (where(X > 0, 0, X) * Y + where(X > 0, 0, Y), where(X > 0, 0, X) * Y + where(X > 0, 0, Y)),
        (reduce("sum", {-1}, -X), -reduce("sum", {-1}, X)),
        (reduce("sum", {-1}, 0.5 * X), 0.5 * reduce("sum", {-1}, X)),
        (reduce("sum", {-1}, X * CHANNEL), reduce("sum", {-1}, X) * CHANNEL),
        (reduce("sum", {-1}, X / CHANNEL), reduce("sum", {-1}, X) / CHANNEL),
        (reduce("sum", {-1}, CHANNEL / X), reduce("sum", {-1}, CHANNEL / X)),
        (reduce("sum", {-1}, (X * CHANNEL) * Y), reduce("sum", {-1}, X * Y) * CHANNEL),
        (reduce("sum", {-1}, Y * (X / CHANNEL)), reduce("sum", {-1}, X * Y) / CHANNEL),
        (reduce("sum", {-1}, reduce("sum", {-2}, X)), reduce("sum", {-2, -1}, X)),
        (reduce("sum", {-2, -1}, X * CHANNEL), reduce("sum", {-2, -1}, X * CHANNEL)),
        (reduce("mean", {-1}, X * CHANNEL), reduce("mean", {-1}, X) * CHANNEL),
        (reduce("mean", {-1}, -X), -reduce("mean", {-1}, X)),
        (reduce("mean", {-1}, APART * CHANNEL + 1), reduce("mean", {-1}, APART) * CHANNEL + 1),
        (
            reduce("mean", {-1}, APART * 2 + 1 + CHANNEL),
            reduce("mean", {-1}, APART) * 2 + 1 + CHANNEL,
        ),
        (reduce("sum", {-1}, CHANNEL + APART * 2), AFFINE_SUM),
        # What is no difference may be large, and the shift cancel it.
        (reduce("mean", {-1}, X * CHANNEL + 1), reduce("mean", {-1}, X * CHANNEL + 1)),
        (reduce("mean", {-1}, X + CHANNEL), reduce("mean", {-1}, X + CHANNEL)),  # may cancel
        (reduce("mean", {-1}, X * Y + CHANNEL), reduce("mean", {-1}, X * Y + CHANNEL)),
        (reduce("max", {-1}, X * CHANNEL), reduce("max", {-1}, X * CHANNEL)),
    ],
    ids=str,
)
def test_a_rule_gives(before: Expr, after: Expr) -> None:
    assert short(before) == (after,)


SHIFTED = X - reduce("bound", {-1}, X)
POWERS = primitive("exp", SHIFTED)
TOTAL = reduce("sum", {-1}, POWERS)
LOG_SOFTMAX = SHIFTED - primitive("log", TOTAL)


def test_exp_of_a_log_softmax_is_the_softmax() -> None:
    assert short(primitive("exp", LOG_SOFTMAX)) == (POWERS / TOTAL,)
    unbounded = X - primitive("log", reduce("sum", {-1}, primitive("exp", X)))  # may overflow
    # The largest of all rows may be so far above a row that its powers vanish.
    bounded = X - reduce("bound", {-2, -1}, X)
    of_rows = bounded - primitive("log", reduce("sum", {-1}, primitive("exp", bounded)))
    others = X - primitive("log", TOTAL), SHIFTED - primitive("log", CHANNEL), unbounded, of_rows
    for other in others:
        assert short(primitive("exp", other)) == (primitive("exp", other),)


def test_a_sum_of_products_with_a_log_softmax_waits_for_no_other() -> None:
    weighted = LOG_SOFTMAX * Y
    total = reduce("sum", {-1}, SHIFTED * Y)
    apart = total - primitive("log", TOTAL) * reduce("sum", {-1}, Y)
    assert short(reduce("sum", {-1}, weighted)) == (apart,)
    # Along other axes the logarithm varies.
    assert short(reduce("sum", {-2}, weighted)) == (reduce("sum", {-2}, weighted),)
    unbounded = (X - CHANNEL - primitive("log", TOTAL)) * Y
    assert short(reduce("sum", {-1}, unbounded)) == (reduce("sum", {-1}, unbounded),)


def test_a_shift_leaves_the_sum_of_products_with_what_is_summed_as_well() -> None:
    along = {-1}
    shift = reduce("sum", along, ROW)
    shifted, total = (APART * CHANNEL + shift) * Y, reduce("sum", along, Y)
    apart = reduce("sum", along, APART * Y) * CHANNEL + shift * total
    assert short(reduce("sum", along, shifted), total) == (apart, total)
    # One more sum, along axes where the shift varies, what is asked for itself, what may cancel.
    for value, beside in (
        (shifted, X),
        ((APART * CHANNEL + ROW) * Y, total),
        ((X * CHANNEL + shift) * Y, total),
        (shifted, shifted + total),
        ((X + shift) * Y, total),
    ):
        assert short(reduce("sum", along, value), beside)[0] is reduce("sum", along, value)


def test_a_factor_that_waits_leaves_the_sum_of_what_is_asked_for_too() -> None:
    softmax = POWERS / TOTAL
    total = reduce("sum", {-1}, POWERS * Y) / TOTAL
    assert short(reduce("sum", {-1}, softmax * Y), softmax * Y) == (total, softmax * Y)
    halves = X * 0.5 * Y
    assert short(reduce("sum", {-1}, halves), halves)[0].op == "reduce"


def test_a_mean_stays_with_the_variance_that_is_found_along_with_it() -> None:
    scaled = APART * CHANNEL + 1
    both = reduce("mean", {-1}, scaled), reduce("variance", {-1}, scaled)
    assert short(*both) == both


def test_a_share_that_does_not_arrive_vanishes_whatever_it_meets() -> None:
    is_positive = X > 0
    yes, no = where(is_positive, Y, NO_SHARE), where(is_positive, NO_SHARE, Y)
    assert short(yes + no) == (Y,)
    assert short(yes + no * 0.2) == (where(is_positive, Y, Y * 0.2),)
    assert short(no / CHANNEL + yes) == (where(is_positive, Y, Y / CHANNEL),)
    assert short(yes - no * 2) == (where(is_positive, Y, Y * -2),)
    also = where(is_positive, CHANNEL, NO_SHARE)
    assert short(yes + also * 2) == (where(is_positive, Y + CHANNEL * 2, NO_SHARE),)
    assert short(yes + X + no) == (X + Y,)
    assert short(NO_SHARE * X + Y) == (Y,)
    assert short(yes + where(Y > 0, NO_SHARE, X)) == (yes + where(Y > 0, NO_SHARE, X),)


def test_a_mask_that_others_need_is_left_to_them() -> None:
    yes, also = where(X > 0, Y, NO_SHARE), where(X > 0, X, NO_SHARE)
    roots = (yes + also, yes, also)
    assert short(*roots) == roots


def test_inputs_that_are_no_longer_needed_are_left_out() -> None:
    graph = simplify(Graph((X, Y, CHANNEL), (("out", where(X > 0, Y, Y) * CHANNEL),)))
    assert graph.inputs == (Y, CHANNEL)


# --- gradients as one would write them by hand ---


def test_the_gradient_of_a_leaky_slope_is_one_choice() -> None:
    is_positive = X > 0
    total = vjp([where(is_positive, X, X * 0.2)], [Y], [X])
    assert short(total[X]) == (where(is_positive, Y, Y * 0.2),)


def test_the_gradient_of_a_learnt_slope_is_one_choice() -> None:
    is_positive = X > 0
    total = vjp([where(is_positive, X, CHANNEL * X)], [Y], [X, CHANNEL])
    dx, dslope = short(total[X], total[CHANNEL])
    assert dx is where(is_positive, Y, Y * CHANNEL)
    assert dslope is reduce("sum", {-3, -1}, where(is_positive, NO_SHARE, Y) * X)


def test_the_gradient_of_a_piecewise_cubic_is_one_choice_a_piece() -> None:
    is_low, is_high = X < -3, X > 3
    value = where(is_low, 0.0, where(is_high, X, X * (X + 3) / 6))
    (dx,) = short(vjp([value], [Y], [X])[X])
    assert Counter(n.op for n in ir.topological([dx]))["where"] <= 3


def test_the_backward_of_chain_a_is_as_short_as_by_hand() -> None:
    everywhere = range(-5, 0)
    x, g = ir.tensor("x", everywhere, 5), ir.tensor("g", everywhere, 5)
    bias = ir.tensor("bias", {-4}, 5)
    is_positive = x > 0
    summed = where(is_positive, x, x * 0.2) + bias
    is_low, is_high = summed < -1, summed > 1
    clamped = where(is_low, -1, where(is_high, 1, summed))
    argument = clamped * 0.5**0.5
    total = vjp([clamped * 0.5 * (1 + primitive("erf", argument))], [g], [x, bias])
    dx, dbias = short(total[x], total[bias])
    assert dbias.op == "reduce"
    assert ir.reduction(dbias) == ("sum", frozenset({-5, -3, -2, -1}))
    (inside,) = dbias.args
    # The cotangent is clipped once, and the same node serves both gradients.
    assert dx is where(is_positive, inside, inside * 0.2)
    assert inside is where(is_high, NO_SHARE, where(is_low, NO_SHARE, inside.args[2].args[2]))
    operations = Counter(n.op for n in ir.topological([dx, dbias]))
    assert operations["where"] == 6
    assert sum(n for op, n in operations.items() if op in arity.ARITY) == 26


def test_the_backward_of_layernorm_has_two_sums_a_row_and_one_for_each_parameter() -> None:
    g, weight, bias = Y, ROW, ir.tensor("bias", {-1}, 3)
    mean, variance = ir.reduce("mean", {-1}, X), ir.reduce("variance", {-1}, X)
    inverse = primitive("rsqrt", variance + 1e-5)
    total = vjp([(X - mean) * inverse * weight + bias], [g], [X, weight, bias])
    dx, dweight, dbias = short(total[X], total[weight], total[bias])
    along_rows = [n for n in ir.topological([dx]) if n.op == "reduce"]
    assert set(along_rows) == {
        mean,
        variance,
        reduce("sum", {-1}, g * weight),
        reduce("sum", {-1}, g * weight * (X - mean)),
    }
    assert dweight is reduce("sum", {-3, -2}, g * ((X - mean) * inverse))
    assert dbias is reduce("sum", {-3, -2}, g)


def test_scales_and_shifts_behind_each_other_take_one_sum_of_products() -> None:
    names = ("weight", "bias", "scale", "gate")
    weight, bias, scale, gate = leaves = [ir.tensor(name, {-1}, 3) for name in names]
    total = vjp([((APART * weight + bias) * scale + CHANNEL) * gate], [Y], leaves)
    columns = {-3, -2}
    sums = [n for n in ir.topological(short(*total.values())) if n.op == "reduce"]
    full = {n for n in sums if n.args[0].extent == X.extent}
    assert {reduce("sum", columns, Y), reduce("sum", columns, APART * Y)} < full
    assert len(full) == 3  # the third is of what varies along other axes


def test_the_backward_of_pooling_reads_winners_only() -> None:
    window = {1, 2}
    x = ir.tensor("x", {-3, -2, -1, 1, 2}, 3)
    slope, column = ir.tensor("slope", {-3}, 3), ir.tensor("column", {-1, 1}, 3)
    value = where(x > 0, x, x * 0.2) * slope + column
    (through,), index, picked = winners([ir.reduce("max", window, value)])
    assert index is reduce("argmax", window, value)
    assert picked == (reduce("pick", window, x, index), reduce("pick", window, column, index))
    winner = ir.tensor("winner", index.extent, 3, "index")
    (over_index,) = ir.substitute([through], {index: winner})
    g = ir.tensor("g", {-3, -2, -1}, 3)
    total = vjp([over_index], [g], [x, slope, column])
    dx, dslope, dcolumn = short(total[x], total[slope], total[column])
    at_winner = reduce("pick", window, x, winner)
    scaled = g * slope
    here = primitive("eq", ir.position(window, 3), winner)
    assert dx is where(here, where(at_winner > 0, scaled, scaled * 0.2), NO_SHARE)
    assert ir.reduction(dslope) == ("sum", frozenset({-2, -1}))
    assert not [n for n in ir.topological([dslope]) if n.op == "reduce" and 1 in n.extent]
    # Along rows the operand does not vary: each row's winner adds to its column.
    assert ir.reduction(dcolumn)[0] == "sum"


def test_summing_what_was_placed_gives_what_was_picked() -> None:
    window = {1}
    x = ir.tensor("x", {-1, 1}, 1)
    index = ir.tensor("index", {-1}, 1, "index")
    here = primitive("eq", ir.position(window, 1), index)
    placed = where(here, x, NO_SHARE)
    assert short(reduce("sum", window, placed)) == (reduce("pick", window, x, index),)
    assert short(reduce("pick", window, placed, index)) == (reduce("pick", window, x, index),)
    g = ir.tensor("g", {-1}, 1)
    spread = where(here, g, NO_SHARE)
    assert short(reduce("sum", {-1, 1}, spread)) == (reduce("sum", {-1}, g),)
    other = ir.tensor("other", {-1}, 1, "index")
    kept = reduce("pick", window, placed, other)
    assert short(kept) == (kept,)
