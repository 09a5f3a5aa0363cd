import copy
import gc
import math
import pickle
import threading

import numpy as np
import pytest
from evaluator import (
    DOMAIN,
    LEAVES,
    NAMES,
    NUMPY,
    Recipe,
    build,
    evaluate,
    evaluate_all,
    numbers,
    recipes,
    shape_of,
)
from hypothesis import given, settings

from fusegen import arity, ir, windowing
from fusegen.errors import ChainError
from fusegen.ir import Expr, Graph, const, count, position, primitive, reduce, show, tensor
from fusegen.verification import verify

X, Y, CHANNEL, ROW, COLUMN, SCALAR = LEAVES
many = settings(max_examples=250, deadline=None, derandomize=True)


# --- nodes ---


def test_equal_expressions_are_one_object() -> None:
    assert (X + Y) * 2 is (X + Y) * 2
    assert X + Y is not Y + X
    assert tensor("x", NAMES["x"], 3) is X
    assert tensor("x", NAMES["x"], 4) is not X
    assert tensor("x", NAMES["x"], 3, "index") is not X


def test_constants_are_told_apart_by_their_bits() -> None:
    assert const(0.0) is not const(-0.0)
    assert const(math.nan) is const(math.nan)
    assert const(1) is const(1.0)
    assert str(ir.constant(const(-0.0))) == "-0.0"


def test_an_expression_outlives_nothing_that_uses_it() -> None:
    def alive() -> int:
        while gc.collect():  # what a test before has left may take several rounds
            pass
        return len(ir.interned)

    start = alive()
    node = X
    for i in range(50):
        node = node * float(1000 + i)
    assert alive() == start + 100
    del node
    assert alive() == start


def test_threads_that_build_one_expression_get_one_object() -> None:
    found: list[list[Expr]] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        found.append([(X + float(i)) * Y for i in range(2000)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for same in zip(*found, strict=True):
        assert len(set(same)) == 1


def test_copies_and_pickles_are_the_expression_itself() -> None:
    node = reduce("sum", {-1}, X * 2.5) + count({-2})
    assert copy.copy(node) is node
    assert copy.deepcopy([node])[0] is node
    assert pickle.loads(pickle.dumps(node)) is node


def test_an_expression_is_immutable() -> None:
    with pytest.raises(AttributeError):
        X.op = "y"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        X.note = "y"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (X + 1, "add(x, 1)"),
        (1 + X, "add(1, x)"),
        (X - 1, "sub(x, 1)"),
        (1 - X, "sub(1, x)"),
        (X * Y, "mul(x, y)"),
        (2 * X, "mul(2, x)"),
        (X / Y, "div(x, y)"),
        (1 / X, "div(1, x)"),
        (X**2, "pow(x, 2)"),
        (2**X, "pow(2, x)"),
        (-X, "neg(x)"),
        (abs(X), "abs(x)"),
        (X < 0, "lt(x, 0)"),
        (X <= Y, "le(x, y)"),
        (X > 0, "gt(x, 0)"),
        (X >= 0, "ge(x, 0)"),
        ((X > 0) & (Y > 0), "logical_and(gt(x, 0), gt(y, 0))"),
        ((X > 0) | ~(Y > 0), "logical_or(gt(x, 0), logical_not(gt(y, 0)))"),
        (reduce("sum", {-1, -2}, X), "sum[-2, -1](x)"),
        (count({-1, -3}), "count[-3, -1]"),
        (position({1, 2}, 3), "position[2, 1]"),
        (const(0.1), "0.1"),
    ],
)
def test_operators_build_primitives(node: Expr, text: str) -> None:
    assert show(node) == text
    assert repr(node) == text


def test_a_large_graph_is_not_shown_whole() -> None:
    node = X
    for _ in range(100):
        node = node * node
    assert len(show(node)) < 10_000
    assert "..." in show(node)


# --- extents, ranks and kinds ---


def test_broadcasting_unites_extents() -> None:
    assert (CHANNEL + ROW).extent == {-2, -1}
    assert (SCALAR * 2).extent == frozenset()
    assert ir.primitive("where", CHANNEL > 0, ROW, COLUMN).extent == {-3, -2, -1}
    assert (CHANNEL + 1).rank == 3
    assert (const(2) + 1).rank == 0


def test_a_reduction_leaves_out_the_axes_it_reduces() -> None:
    assert reduce("mean", {-1}, X).extent == {-3, -2}
    assert ir.reduction(reduce("mean", {-1, -2}, CHANNEL)) == ("mean", frozenset({-2}))


def test_axes_without_variation_cost_nothing() -> None:
    for kind in ("mean", "max"):
        assert reduce(kind, {-1}, CHANNEL) is CHANNEL
    assert reduce("variance", {-1}, CHANNEL) is CHANNEL - CHANNEL  # 0, or NaN
    assert reduce("sum", {-1}, CHANNEL) is CHANNEL * count({-1})
    assert reduce("sum", (), X) is X
    assert reduce("sum", {-1, -2}, CHANNEL) is reduce("sum", {-2}, CHANNEL) * count({-1})
    index = tensor("index", {-3, -2, -1}, 3, "index")
    assert reduce("pick", {1}, CHANNEL, index) is CHANNEL


def test_an_index_is_a_position_among_all_axes_even_where_the_value_varies_along_some() -> None:
    value = tensor("value", {-1, 1}, 2)
    index = reduce("argmax", {1, 2}, tensor("x", {-2, -1, 1, 2}, 2))
    assert ir.reduction(reduce("argmax", {1, 2}, value)) == ("argmax", frozenset({1, 2}))
    picked = reduce("pick", {1, 2}, value, index)
    assert ir.reduction(picked) == ("pick", frozenset({1, 2}))
    assert picked.extent == {-2, -1}  # the index varies along more than the value does
    domain = {-2: 1, -1: 1, 2: 2, 1: 3}
    x = np.array([[0.0, 0, 0], [0, 9, 0]]).reshape(1, 1, 2, 3)
    values = {"x": x, "value": np.array([5.0, 6, 7]).reshape(1, 1, 1, 3)}
    assert evaluate([index, picked], values, domain) == [[[[[4]]]], [[[[6]]]]]


def test_kinds_follow_from_operations() -> None:
    assert (X > 0).kind == "truth"
    assert ((X > 0) & (Y > 0)).kind == "truth"
    index = reduce("argmax", {-1}, X)
    assert index.kind == position({1}, 1).kind == "index"
    assert primitive("where", CHANNEL > 0, index, index).kind == "index"
    assert primitive("where", X > 0, X, Y).kind == "number"
    assert reduce("argmax", {-1}, CHANNEL).kind == "index"


@pytest.mark.parametrize(
    "build_it",
    [
        lambda: (X > 0) * Y,
        lambda: primitive("where", X, X, Y),
        lambda: primitive("where", X > 0, X > 0, Y),
        lambda: X & Y,
        lambda: ~X,
        lambda: (X > 0) < (Y > 0),
    ],
)
def test_a_condition_is_no_number_and_a_number_no_condition(build_it) -> None:
    with pytest.raises(ChainError, match=r"got .*, wanted "):
        build_it()


def test_the_slips_of_python_syntax_are_told() -> None:
    with pytest.raises(TypeError, match=r"where\(condition, a, b\)"):
        bool(X > 0)
    with pytest.raises(TypeError, match=r"where\(condition, a, b\)"):
        _ = 0 < X < 1
    with pytest.raises(TypeError, match=r"eq\(a, b\)"):
        primitive("where", X == Y, X, Y)
    with pytest.raises(TypeError, match="takes 2 arguments, got 1"):
        primitive("add", X)
    with pytest.raises(ValueError, match="no such reduction: median"):
        reduce("median", {-1}, X)


def test_axes_need_a_tensor() -> None:
    assert X.axes == (-3, -2, -1)
    with pytest.raises(TypeError, match="meets a tensor"):
        _ = tensor("x", {-1}, None).axes


def test_windows_are_the_twins_of_their_axes() -> None:
    assert windowing.windows(X, (-2, -1)) == {1, 2}


# --- walking and rewriting ---


def test_arguments_come_before_their_users_and_each_node_once() -> None:
    shared = X * Y
    order = ir.topological([shared + X, shared])
    assert order == [X, Y, shared, shared + X]
    assert ir.topological([shared + X], stop={shared}) == [X, shared + X]
    assert ir.inputs([ROW + X * ROW]) == [ROW, X]


def test_a_deep_graph_needs_no_deep_stack() -> None:
    node = X
    for _ in range(5000):
        node = node * 1.5
    assert len(ir.topological([node])) == 5002
    (moved,) = ir.substitute([node], {X: Y})
    assert ir.inputs([moved]) == [Y]


def test_substitution_does_not_look_below_what_it_replaces() -> None:
    mean = reduce("mean", {-1}, X)
    root = (X - mean) * mean
    leaf = tensor("mean", mean.extent, 3)
    assert ir.substitute([root, mean, leaf], {mean: leaf}) == [(X - leaf) * leaf, leaf, leaf]
    assert ir.substitute([root], {X: CHANNEL}) == [(CHANNEL - CHANNEL) * CHANNEL]


def test_rebuilding_works_the_extent_out_anew() -> None:
    total = reduce("sum", {-1}, X)
    assert ir.rebuild(total, (X,)) is total
    assert ir.rebuild(total, (CHANNEL,)) is CHANNEL * count({-1})
    assert ir.rewrite([total * 2], lambda n: Y if n is X else n) == [reduce("sum", {-1}, Y) * 2]


@many
@given(recipes)
def test_every_graph_that_is_built_passes_the_verifier(recipe: Recipe) -> None:
    roots = build(recipe)
    verify(Graph(LEAVES, tuple((f"out_{i}", root) for i, root in enumerate(roots))))
    assert ir.rewrite(roots, lambda node: node) == roots


INDEX = tensor("index", {-3, -2}, 3, "index")


@pytest.mark.parametrize(
    "graph",
    [
        Graph((Y,), (("out", X),)),
        Graph((X,), (("x", X + 1),)),
        Graph((X,), (("out", X + 1), ("out", X + 2))),
        Graph((X,), (("out", ir.make("add", (X, X), extent=frozenset(), rank=3)),)),
        Graph((X,), (("out", ir.make("add", (X, X > 0), extent=X.extent, rank=3)),)),
        Graph((X,), (("out", ir.make("call", (X,), extent=X.extent, rank=3)),)),
        Graph((CHANNEL,), (("out", ir.make("reduce", (CHANNEL,), ("sum", (-1,)), rank=3)),)),
        Graph((X,), (("out", ir.make("reduce", (X,), ("sum", ()), extent=X.extent, rank=3)),)),
        Graph((X, Y), (("out", ir.make("reduce", (X, Y), ("pick", (-1,)), rank=3)),)),
    ],
)
def test_the_verifier_refuses_a_broken_graph(graph: Graph) -> None:
    with pytest.raises((AssertionError, ChainError)):
        verify(graph)


# --- the evaluator ---


def test_the_evaluator_knows_every_primitive() -> None:
    assert set(NUMPY) == set(arity.ARITY)


@many
@given(recipes)
def test_an_array_has_the_shape_that_its_extent_says(recipe: Recipe) -> None:
    known = evaluate_all(build(recipe), numbers(recipe.seed), DOMAIN)
    for node, array in known.items():
        assert array.shape == shape_of(node.extent, DOMAIN)


def test_extrema_hand_nan_on() -> None:
    values = {"x": np.array([math.nan, 1, -1]), "y": np.array([0, math.nan, 0])}
    x, y = tensor("x", {-1}, 1), tensor("y", {-1}, 1)
    roots = [primitive("minimum", x, y), primitive("maximum", x, y)]
    roots += [reduce("max", {-1}, x), reduce("argmax", {-1}, y)]
    low, high, top, where_top = evaluate(roots, values, {-1: 3})
    np.testing.assert_array_equal(low, [math.nan, math.nan, -1])
    np.testing.assert_array_equal(high, [math.nan, math.nan, 0])
    np.testing.assert_array_equal(top, [math.nan])
    np.testing.assert_array_equal(where_top, [1])


def test_positions_in_a_window_count_from_its_outermost_axis() -> None:
    (found,) = evaluate([position({1, 2}, 2)], {}, {-2: 5, -1: 7, 2: 2, 1: 3})
    assert found.shape == (1, 1, 2, 3)
    assert found.ravel().tolist() == [0, 1, 2, 3, 4, 5]
