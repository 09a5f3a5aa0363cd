import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from evaluator import (
    DOMAIN,
    HARD,
    KINKS,
    LEAVES,
    OPERATIONS,
    Domain,
    Recipe,
    build,
    evaluate,
    evaluate_all,
    numbers,
    recipes,
    shape_of,
)
from hypothesis import given, settings

from fusegen import arity, ir
from fusegen.autodiff import RULES, place, vjp, winners
from fusegen.ir import Expr, count, primitive, reduce, tensor
from fusegen.simplify import simplification

X, Y, CHANNEL, ROW, COLUMN, SCALAR = LEAVES
many = settings(max_examples=350, deadline=None, derandomize=True)
torch.set_num_threads(1)

Tensors = Mapping[str, torch.Tensor]


# --- the same graphs in torch ---


def in_torch(roots: Sequence[Expr], values: Tensors, domain: Domain) -> dict[Expr, Any]:
    """Every node below the roots by torch's own operations, which know their derivatives."""
    known: dict[Expr, Any] = {}
    for node in ir.topological(roots):
        args = [known[a] for a in node.args]
        if node.op == "input":
            known[node] = values[ir.name_of(node)]
        elif node.op in ("const", "count", "position"):
            (array,) = evaluate([node], {}, domain)
            known[node] = torch.from_numpy(array)
        elif node.op == "reduce":
            known[node] = _reduced(node, args, domain)
        elif node.op in arity.CASTS:
            known[node] = args[0].to(getattr(torch, arity.CASTS[node.op])).double()
        elif node.op == "pow" and (number := ir.constant(node.args[1])) is not None:
            known[node] = args[0] ** number
        else:
            name = {"div": "true_divide"}.get(node.op, node.op)
            known[node] = getattr(torch, name)(*args)
    return known


def _reduced(node: Expr, args: list[torch.Tensor], domain: Domain) -> torch.Tensor:
    kind, axes = ir.reduction(node)
    order = list(domain)
    dims = [order.index(a) for a in axes]
    value = args[0]
    if kind == "sum":
        return value.sum(dims, keepdim=True)
    if kind == "mean":
        return value.mean(dims, keepdim=True)
    if kind == "variance":
        return value.var(dims, correction=0, keepdim=True)
    # One gathered index, the first maximum's, as in max-pooling.
    if kind == "pick":
        where = args[1]
    else:
        leaf = tensor("value", node.args[0].extent, 0)
        found = evaluate([reduce("argmax", axes, leaf)], {"value": value.detach().numpy()}, domain)
        where = torch.from_numpy(found[0])
    if kind == "argmax":
        return where
    (positions,) = evaluate([ir.position(axes, 0)], {}, domain)
    shape = np.broadcast_shapes(value.shape, where.shape, positions.shape)
    outermost_first = [order.index(a) for a in ir.axes_of(ir.position(axes, 0))]
    others = [d for d in range(len(order)) if d not in outermost_first]
    flat = value.expand(shape).permute(others + outermost_first).flatten(len(others))
    narrow = [1 if d in outermost_first else shape[d] for d in range(len(order))]
    chosen = where.expand(narrow).permute(others + outermost_first).flatten(len(others))
    return flat.gather(-1, chosen).reshape(narrow)


def tensors(seed: int, extra: Sequence[float] = KINKS) -> dict[str, torch.Tensor]:
    arrays = numbers(seed, extra)
    return {name: torch.from_numpy(a).requires_grad_() for name, a in arrays.items()}


def cotangent(node: Expr, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = shape_of(node.extent, DOMAIN)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def assert_gradients(
    ours: Mapping[Expr, Expr],
    wrt: Sequence[Expr],
    values: Tensors,
    theirs: Sequence[torch.Tensor | None],
    domain: Domain = DOMAIN,
) -> None:
    """Where torch's gradients are finite, ours are those; terms that cancel set the tolerance."""
    known = in_torch([ours[leaf] for leaf in wrt if leaf in ours], values, domain)
    size = max((_largest(v) for v in known.values()), default=0.0)
    for leaf, expected in zip(wrt, theirs, strict=True):
        if leaf not in ours:
            assert expected is None or not expected[expected.isfinite()].any(), leaf
            continue
        if expected is None:
            continue
        finite = expected.isfinite()
        result = known[ours[leaf]].expand(expected.shape)
        torch.testing.assert_close(
            result[finite], expected[finite], rtol=1e-9, atol=1e-12 * size, msg=lambda m: m
        )


def _largest(value: torch.Tensor) -> float:
    numeric = value.detach().double().abs()
    return float(torch.where(numeric.isfinite(), numeric, 0.0).max())


# Without what overflows at once when it is differentiated twice.
GENTLE = tuple(op for op in OPERATIONS if op not in ("expm1", "exp", "pow", "variance"))


@many
@given(recipes)
def test_gradients_of_random_graphs_are_those_of_autograd(recipe: Recipe) -> None:
    (root,) = build(recipe)[-1:]
    seed = tensor("g", root.extent, 3)
    ours = vjp([root], [seed], LEAVES)
    values = tensors(recipe.seed)
    g = cotangent(root, recipe.seed)
    result = in_torch([root], values, DOMAIN)[root]
    if not result.requires_grad:
        assert not [leaf for leaf in LEAVES if leaf in ours]
        return
    leaves = [values[ir.name_of(leaf)] for leaf in LEAVES]
    theirs = torch.autograd.grad(result, leaves, g, allow_unused=True)
    assert_gradients(ours, LEAVES, {**values, "g": g}, theirs)


@many
@given(recipes)
def test_second_gradients_of_random_graphs_are_those_of_autograd(recipe: Recipe) -> None:
    (root,) = build(recipe, GENTLE)[-1:]
    seed = tensor("g", root.extent, 3)
    first = vjp([root], [seed], LEAVES)
    reached = [leaf for leaf in LEAVES if leaf in first]
    if not reached:
        return
    wrt = [*LEAVES, seed]
    # As the library does it: the gradient is simplified before it is differentiated.
    short = simplification(tuple(first[leaf] for leaf in reached))
    outputs = [short[first[leaf]] for leaf in reached]
    again = [tensor(f"h_{ir.name_of(leaf)}", leaf.extent, 3) for leaf in reached]
    ours = vjp(outputs, again, wrt)
    values: dict[str, torch.Tensor] = tensors(recipe.seed)
    values["g"] = cotangent(root, recipe.seed)
    values |= {ir.name_of(h): cotangent(h, i) for i, h in enumerate(again)}
    result = in_torch([root], values, DOMAIN)[root]
    leaves = [values[ir.name_of(leaf)] for leaf in reached]
    grads = torch.autograd.grad(
        result, leaves, values["g"], create_graph=True, materialize_grads=True
    )
    pairs = [
        (grad, values[ir.name_of(h)])
        for grad, h in zip(grads, again, strict=True)
        if grad.requires_grad
    ]
    if not pairs:
        return
    theirs = torch.autograd.grad(
        [grad for grad, _ in pairs],
        [values[ir.name_of(leaf)] for leaf in wrt],
        [h for _, h in pairs],
        allow_unused=True,
    )
    assert_gradients(ours, wrt, values, theirs)


@many
@given(recipes)
def test_a_cotangent_may_be_narrower_than_its_output(recipe: Recipe) -> None:
    (root,) = build(recipe)[-1:]
    narrow = tensor("narrow", root.extent & {-2}, 3)
    wide = tensor("wide", root.extent, 3)
    values = numbers(recipe.seed)
    values["narrow"] = np.random.default_rng(0).normal(size=shape_of(narrow.extent, DOMAIN))
    values["wide"] = np.broadcast_to(values["narrow"], shape_of(root.extent, DOMAIN))
    by_narrow = vjp([root], [narrow], LEAVES)
    by_wide = vjp([root], [wide], LEAVES)
    reached = [leaf for leaf in LEAVES if leaf in by_wide]
    assert reached == [leaf for leaf in LEAVES if leaf in by_narrow]
    known = evaluate_all([by_wide[leaf] for leaf in reached], values, DOMAIN)
    size = max((np.abs(v[np.isfinite(v)]).max(initial=0) for v in known.values()), default=0)
    for leaf, result in zip(
        reached, evaluate([by_narrow[leaf] for leaf in reached], values, DOMAIN), strict=True
    ):
        expected = known[by_wide[leaf]]
        finite = np.isfinite(expected)
        result = np.broadcast_to(result, expected.shape)
        np.testing.assert_allclose(result[finite], expected[finite], 1e-9, 1e-12 * size)


# --- kinks and NaN ---


def slopes(op: str, *others: float, swapped: bool = False) -> tuple[list[float], list[float]]:
    """(ours, torch's) gradients of op(x, *others) at kinks, zeros, NaN and infinities."""
    points = np.array([*HARD, 0.3, -0.7])
    domain = {-1: len(points)}
    x, g = tensor("x", {-1}, 1), tensor("g", {-1}, 1)
    root = primitive(op, *others, x) if swapped else primitive(op, x, *others)
    values = {"x": torch.from_numpy(points).requires_grad_(), "g": torch.ones(len(points))}
    (theirs,) = torch.autograd.grad(in_torch([root], values, domain)[root].sum(), values["x"])
    ours = in_torch([vjp([root], [g], [x])[x]], values, domain)
    # What is the same everywhere, such as no share at all, has one value.
    return list(ours.values())[-1].expand(len(points)).tolist(), theirs.tolist()


DIFFERENTIABLE = sorted(set(RULES) - {"where", "detach"})


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if arity.ARITY[op] == 1])
def test_a_function_has_torchs_gradient_everywhere(op: str) -> None:
    ours, theirs = slopes(op)
    np.testing.assert_allclose(ours, theirs, rtol=1e-15)


@pytest.mark.parametrize("other", [0.0, 1.0, 0.5, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "minimum", "maximum"])
def test_an_operation_with_a_number_has_torchs_gradient_everywhere(op: str, other: float) -> None:
    ours, theirs = slopes(op, other)
    np.testing.assert_allclose(ours, theirs, rtol=1e-15)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0, 0.5, -0.5, -1.0, 0.3])
def test_a_power_has_torchs_gradient_everywhere(exponent: float) -> None:
    ours, theirs = slopes("pow", exponent)
    np.testing.assert_allclose(ours, theirs, rtol=1e-15)


@pytest.mark.parametrize("base", [0.0, 1.0, 2.0, 0.5, -1.0, math.inf])
def test_a_numbers_power_has_torchs_gradient_everywhere(base: float) -> None:
    ours, theirs = slopes("pow", base, swapped=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-15)


def test_a_power_of_nought_has_a_gradient_of_nought() -> None:
    x = tensor("x", {-1}, 1)
    found = vjp([x**0.0], [tensor("g", {-1}, 1)], [x])
    assert ir.constant(found[x]) == 0.0


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if arity.ARITY[op] == 2])
def test_both_arguments_have_torchs_gradient_everywhere(op: str) -> None:
    points = torch.tensor([*HARD, 0.3, -0.7], dtype=torch.float64)
    first, second = torch.meshgrid(points, points, indexing="ij")
    domain = {-2: len(points), -1: len(points)}
    x, y, g = (tensor(name, {-2, -1}, 2) for name in "xyg")
    leaves = {"x": first.clone().requires_grad_(), "y": second.clone().requires_grad_()}
    values = {**leaves, "g": torch.ones_like(first)}
    root = primitive(op, x, y)
    result = in_torch([root], values, domain)[root]
    theirs = torch.autograd.grad(result, list(leaves.values()), values["g"])
    ours = vjp([root], [g], [x, y])
    known = in_torch([ours[x], ours[y]], values, domain)
    for leaf, expected in zip((x, y), theirs, strict=True):
        np.testing.assert_allclose(known[ours[leaf]].detach(), expected, rtol=1e-15)


def test_a_leaky_slope_rules_at_zero() -> None:
    x, g = tensor("x", {-1}, 1), tensor("g", {-1}, 1)
    gradient = vjp([primitive("where", x > 0, x, 0.2 * x)], [g], [x])[x]
    values = {"x": np.array([0.0, -0.0, 1.0, -1.0, math.nan]), "g": np.ones(5)}
    (result,) = evaluate([gradient], values, {-1: 5})
    assert result.tolist() == [0.2, 0.2, 1.0, 0.2, 0.2]  # eager's, for NaN too


def test_a_tie_is_split_and_both_get_all_where_one_is_nan() -> None:
    ours, theirs = slopes("maximum", 1.0)
    assert ours == theirs
    assert 0.5 in ours
    (nan_at,) = [i for i, v in enumerate(HARD) if math.isnan(v)]
    assert ours[nan_at] == 1.0


# --- reductions ---


def test_every_primitive_with_a_number_for_a_result_has_a_rule() -> None:
    without = {
        *arity.COMPARISONS,
        *arity.CONNECTIVES,
        *arity.QUANTISING_CASTS,
        *arity.WRAPS,
        *arity.MADE,
        arity.QUOTIENT,
    }
    assert set(RULES) == set(arity.ARITY) - without


def test_a_broadcast_arguments_gradient_is_summed() -> None:
    g = tensor("g", X.extent, 3)
    total = vjp([X * CHANNEL + SCALAR], [g], [X, CHANNEL, SCALAR])
    assert total[X] is g * CHANNEL
    assert total[CHANNEL] is reduce("sum", {-3, -1}, g * X)
    assert total[SCALAR] is reduce("sum", {-3, -2, -1}, g)


def test_a_broadcast_cotangent_is_counted() -> None:
    total = vjp([X + ROW], [SCALAR], [X, ROW])
    assert total[X] is SCALAR
    assert total[ROW] is SCALAR * count({-3, -2})


def test_a_cotangent_wider_than_its_output_is_summed() -> None:
    assert vjp([CHANNEL * 2], [X], [CHANNEL])[CHANNEL] is reduce("sum", {-3, -1}, X) * 2


def test_an_input_that_is_also_an_output_gets_both_shares() -> None:
    g, h = tensor("g", X.extent, 3), tensor("h", X.extent, 3)
    assert vjp([X], [g], [X]) == {X: g}
    total = vjp([X * 2, X], [g, h], [X])
    assert total[X] is h + g * 2
    assert vjp([X, X], [g, h], [X])[X] is g + h


def test_an_inner_node_may_be_asked_for_beside_what_is_below_it() -> None:
    g = tensor("g", X.extent, 3)
    middle = X * 2
    total = vjp([middle * Y], [g], [X, middle])
    assert total[middle] is g * Y
    assert total[X] is (g * Y) * 2
    assert Y not in total


def test_what_no_output_depends_on_has_no_cotangent() -> None:
    g = tensor("g", X.extent, 3)
    assert vjp([X * 2], [g], [Y]) == {}
    assert vjp([X * 2, Y], [None, g], [X, Y]) == {Y: g}
    assert X not in vjp([primitive("where", X > 0, Y, 0)], [g], [X, Y])


# --- pooling ---

WINDOWED: Domain = {-3: 2, -2: 2, -1: 3, 2: 2, 1: 2}
WINDOW = frozenset({1, 2})
WX = tensor("x", {-3, -2, -1, 1, 2}, 3)
SLOPE, ALONG = tensor("slope", {-3}, 3), tensor("along", {-1, 1}, 3)
G = tensor("g", {-3, -2, -1}, 3)


def pooled_chain() -> tuple[Expr, Expr]:
    value = primitive("where", WX > 0, WX, WX * 0.2) * SLOPE + ALONG
    return primitive("tanh", reduce("max", WINDOW, value)), value


def split(x: torch.Tensor) -> torch.Tensor:
    """(C, H, W) as (C, H / 2, W / 2, 2, 2)."""
    c, h, w = x.shape
    return x.reshape(c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 2, 4)


def pooling_values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Few different values: most windows have a tie.
    x = torch.randint(-2, 2, (2, 4, 6), generator=generator).double().requires_grad_()
    slope = torch.randn(2, 1, 1, generator=generator, dtype=torch.float64, requires_grad=True)
    along = torch.zeros(1, 1, 6, dtype=torch.float64, requires_grad=True)
    return {"plain_x": x, "plain_slope": slope, "plain_along": along}


def by_torch(values: Tensors) -> torch.Tensor:
    x = values["plain_x"]
    y = torch.where(x > 0, x, x * 0.2) * values["plain_slope"] + values["plain_along"]
    return torch.tanh(torch.nn.functional.max_pool2d(y[None], 2)[0])


def windowed(values: Tensors) -> dict[str, torch.Tensor]:
    along = values["plain_along"].reshape(1, 1, 3, 1, 2)
    slope = values["plain_slope"].reshape(2, 1, 1, 1, 1)
    return {"x": split(values["plain_x"]), "slope": slope, "along": along}


def as_windowed(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    names = ("plain_x", "plain_slope", "plain_along")
    found = windowed(dict(zip(names, grads, strict=True)))
    return [found[name] for name in ("x", "slope", "along")]


@pytest.mark.parametrize("through_winners", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_pooling_has_torchs_gradients_also_at_ties(seed: int, through_winners: bool) -> None:
    root, _ = pooled_chain()
    plain = pooling_values(seed)
    g = torch.randn(2, 2, 3, dtype=torch.float64)
    values = {**windowed(plain), "g": g.reshape(2, 2, 3, 1, 1)}
    wrt = [WX, SLOPE, ALONG]
    ours = vjp(winners([root])[0] if through_winners else [root], [G], wrt)
    theirs = torch.autograd.grad(by_torch(plain), list(plain.values()), g)
    assert_gradients(ours, wrt, values, as_windowed(theirs), WINDOWED)


@pytest.mark.parametrize("seed", range(8))
def test_pooling_has_torchs_second_gradients(seed: int) -> None:
    root, value = pooled_chain()
    (through,), index, picked = winners([root])
    assert index is reduce("argmax", WINDOW, value)
    assert [node.args[0] for node in picked] == [WX, ALONG]
    wrt = [WX, SLOPE, ALONG]
    first = vjp([through], [G], wrt)
    again = [tensor(f"h_{ir.name_of(leaf)}", leaf.extent, 3) for leaf in wrt]
    ours = vjp([first[leaf] for leaf in wrt], again, [*wrt, G])
    short = simplification(tuple(ours[leaf] for leaf in (*wrt, G)))
    plain = pooling_values(seed)
    g = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    hs = [torch.randn_like(t) for t in plain.values()]
    values = {**windowed(plain), "g": g.reshape(2, 2, 3, 1, 1)}
    names = [ir.name_of(h) for h in again]
    values |= dict(zip(names, as_windowed(hs), strict=True))
    leaves = list(plain.values())
    grads = torch.autograd.grad(by_torch(plain), leaves, g, create_graph=True)
    *theirs, by_g = torch.autograd.grad(grads, [*leaves, g], hs)
    expected = [*as_windowed(theirs), by_g.reshape(2, 2, 3, 1, 1)]
    assert_gradients(ours, [*wrt, G], values, expected, WINDOWED)
    shorter = {leaf: short[ours[leaf]] for leaf in (*wrt, G)}
    assert_gradients(shorter, [*wrt, G], values, expected, WINDOWED)


def test_a_chain_without_pooling_has_no_winners() -> None:
    assert winners([X * 2]) == ([X * 2], None, ())


def test_the_winner_of_a_normalised_value_is_picked_after_the_statistics() -> None:
    centred = WX - reduce("mean", {-3}, WX)
    (through,), index, picked = winners([reduce("max", WINDOW, centred)])
    values = {"x": np.random.default_rng(0).normal(size=shape_of(WX.extent, WINDOWED))}
    direct, indirect = evaluate([reduce("max", WINDOW, centred), through], values, WINDOWED)
    np.testing.assert_array_equal(direct, indirect)
    assert index is not None
    assert picked == tuple(reduce("pick", WINDOW, n, index) for n in (WX, centred.args[1]))


def test_placing_is_zero_elsewhere() -> None:
    index = tensor("index", {-1}, 1, "index")
    placed = place(tensor("v", {-1}, 1), index, frozenset({1}))
    values = {"index": np.array([[1], [0]]), "v": np.array([[5.0], [6.0]])}
    (result,) = evaluate([placed], values, {-1: 2, 1: 3})
    assert result.tolist() == [[0, 5, 0], [6, 0, 0]]
