"""Quotients that a choice keeps within bounds."""

import math

import numpy as np
import pytest

import fusegen
from fusegen import ir
from fusegen.describe import Situation, sources
from fusegen.guarding import _bounds, _respelled
from fusegen.ir import Expr


def text_of(chain: str, dtype: str = "float32", target: str = "cuda") -> str:
    situation = Situation((4, 64), dtype=dtype)
    found = sources(fusegen.chain(chain), target, situation, grad=True)
    return "".join(module.text for module in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("chain", ["mish", "softplus", "mish | layernorm", "softplus | mean(-1)"])
def test_a_quotient_that_a_choice_bounds_takes_an_inverse(chain: str, dtype: str) -> None:
    assert "bounded_div(" in text_of(chain, dtype)


@pytest.mark.parametrize(
    "chain",
    [
        "softsign",  # nothing bounds |x|
        "exp | keep(e) | add(1) | reciprocal | mul(e)",  # no choice
    ],
)
def test_other_quotients_stay(chain: str) -> None:
    assert "bounded_div(" not in text_of(chain)


@pytest.mark.parametrize(("limit", "is_bounded"), [(20.0, True), (86.0, True), (87.0, False)])
def test_a_choice_has_to_keep_the_inverse_normal(limit: float, is_bounded: bool) -> None:
    x = ir.tensor("x", (0,), 1)
    quotient = x / (ir.primitive("exp", x) + 1.0)
    for chosen in (
        ir.primitive("where", x > limit, x, quotient),
        ir.primitive("where", x <= limit, quotient, x),
    ):
        (root,) = _images([chosen])
        found = "bounded_div" in {n.op for n in ir.topological([root])}
        assert found == is_bounded
    (other,) = _images([ir.primitive("where", x > limit, quotient, x)])
    assert "bounded_div" not in {n.op for n in ir.topological([other])}


def test_no_other_target_or_type_has_them() -> None:
    assert "bounded_div(" not in text_of("mish", "float64")
    assert "bounded_div(" not in text_of("mish", target="cpp")


def test_what_is_used_elsewhere_too_has_to_be_right_there() -> None:
    x = ir.tensor("x", (0,), 1)
    quotient = 1.0 / (ir.primitive("exp", x) + 1.0)
    chosen = ir.primitive("where", x > 20.0, 1.0, quotient)
    (inside,) = _images([chosen])
    assert "bounded_div" in {n.op for n in ir.topological([inside])}
    for roots in ([chosen, quotient], [chosen + quotient]):
        assert "bounded_div" not in {n.op for n in ir.topological(_images(roots))}


def _images(roots: list[Expr]) -> list[Expr]:
    images = _respelled(roots, [])
    return [images[root] for root in roots]


EXPRESSIONS = {
    "exp(x)": lambda x: ir.primitive("exp", x),
    "exp(x) + 1": lambda x: ir.primitive("exp", x) + 1.0,
    "exp(-2 x)": lambda x: ir.primitive("exp", x * -2.0),
    "x^2 + 0.5": lambda x: x * x + 0.5,
    "e (e + 2) + 2": lambda x: (e := ir.primitive("exp", x)) * (e + 2.0) + 2.0,
    "x exp(x)": lambda x: x * ir.primitive("exp", x),
    "x + x": lambda x: x + x,
}


@pytest.mark.parametrize("least", [-math.inf, -3.0, 0.0, 2.0])
@pytest.mark.parametrize("most", [2.0, 40.0])
@pytest.mark.parametrize("what", EXPRESSIONS)
def test_bounds_hold(what: str, least: float, most: float) -> None:
    x = ir.tensor("x", (0,), 1)
    root = EXPRESSIONS[what](x)
    low, high = _bounds(root, {x: (least, most)})
    values = np.linspace(max(least, -200.0), most, 1001)
    known = {x: values}
    for node in ir.topological([root]):
        if node.op == "const":
            known[node] = np.float64(ir.constant(node))
        elif node.args:
            numbers = [known[a] for a in node.args]
            known[node] = {"add": np.add, "mul": np.multiply, "exp": np.exp}[node.op](*numbers)
    assert np.all(known[root] >= low - 1e-12 * abs(low) - 1e-300)
    assert np.all(known[root] <= high + 1e-12 * abs(high))


def test_what_nothing_is_known_of_may_be_anything() -> None:
    x = ir.tensor("x", (0,), 1)
    assert _bounds(ir.primitive("sin", x), {}) == (-math.inf, math.inf)
    assert _bounds(ir.primitive("exp", x), {}) == (0.0, math.inf)
