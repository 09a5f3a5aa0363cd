from collections.abc import Callable

import pytest
import torch

from fusegen import ir
from fusegen.dsl import chain
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import OPS, Chain, Channel, Trailing

add_channel, clamp, exp, gelu = (OPS[n] for n in ("add_channel", "clamp", "exp", "gelu"))
layernorm, leaky_relu, max_pool3d = (OPS[n] for n in ("layernorm", "leaky_relu", "max_pool3d"))
maximum, minimum, power = (OPS[n] for n in ("maximum", "minimum", "pow"))
sigmoid, silu, where = (OPS[n] for n in ("sigmoid", "silu", "where"))


def straight(x: Expr, bias: Channel) -> Expr:
    return gelu(clamp(leaky_relu(x, 0.2) + bias, -1, 1))


def gated(x: Expr, scale: Channel) -> Expr:
    return x * sigmoid(x) * scale


def gated_on_the_left(x: Expr, scale: Channel) -> Expr:
    return scale * (sigmoid(x) * x)


def explicit(x: Expr, b: Channel) -> Expr:
    return add_channel(x, b)


def affine(x: Expr, weight: Trailing, bias: Trailing) -> Expr:
    return layernorm(x, weight, bias, axis=1)


def trailing_by_operator(x: Expr, weight: Trailing) -> Expr:
    return x * weight


def same_twice(x: Expr, b: Channel) -> Expr:
    return (x + b).__mul__(2) + b


def constant_by_default(x: Expr, slope: float = 0.1) -> Expr:
    return leaky_relu(x, slope)


TEXT_OF: list[tuple[Callable[..., object], str]] = [
    (straight, "leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1) | gelu"),
    (gated, "keep(y) | sigmoid | mul(y) | mul_channel(scale)"),
    (gated_on_the_left, "keep(y) | sigmoid | mul(y) | mul_channel(scale)"),
    (explicit, "add_channel(b)"),
    (affine, "layernorm(weight, bias, axis=1)"),
    (trailing_by_operator, "mul(weight)"),
    (same_twice, "add_channel(b) | mul(2) | add_channel(b)"),
    (constant_by_default, "leaky_relu(0.1)"),
    (lambda x: 1 - x, "rsub(1)"),
    (lambda x: x - 1, "sub(1)"),
    (lambda x, b: b - x, "rsub(b)"),
    (lambda x: 2 / x, "rdiv(2)"),
    (lambda x: power(2, x), "rpow(2)"),
    (lambda x: -(x**2) / 3, "pow(2) | neg | div(3)"),
    (lambda x: abs(x), "abs"),
    (lambda x: minimum(0, maximum(x, -1)), "maximum(-1) | minimum(0)"),
    (lambda x: x * x, "keep(y) | mul(y)"),
    (lambda x: (x + 1) * (x - 1), "keep(y) | add(1) | keep(y_2) | recall(y) | sub(1) | mul(y_2)"),
    (lambda x: x - silu(x), "keep(y) | silu | rsub(y)"),
    (lambda x, y: x * sigmoid(x) + y, "keep(y_2) | sigmoid | mul(y_2) | add(y)"),
    (lambda x: where(x > 0, x, 0), "keep(y) | gt(0) | where(y, 0)"),
    (lambda x: where(x > 0, 1, x), "keep(y) | gt(0) | where(1, y)"),
    (
        lambda x: where(x > 0, x, 0.1 * x),
        "keep(y) | mul(0.1) | keep(y_2) | recall(y) | gt(0) | where(y, y_2)",
    ),
    (
        lambda x: where((x > 0) & ~(x > 1), x, 0),
        "keep(y) | gt(0) | keep(y_2) | recall(y) | gt(1) | logical_not | logical_and(y_2) "
        "| where(y, 0)",
    ),
    (
        lambda x: max_pool3d(gelu(x, approximate="tanh"), 2),
        "gelu(approximate='tanh') | max_pool3d(2)",
    ),
]


@pytest.mark.parametrize(("function", "text"), TEXT_OF, ids=[text for _, text in TEXT_OF])
def test_a_function_gives_the_chain_that_its_text_gives(
    function: Callable[..., object], text: str
) -> None:
    traced = chain(function)
    assert traced.text == text
    assert traced == chain(text)
    assert traced.hash == chain(text).hash


def test_chain_decorates_a_function() -> None:
    @chain
    def block(x: Expr, scale: Channel) -> Expr:
        return x * sigmoid(x) * scale

    assert isinstance(block, Chain)
    assert block.operands == ("scale",)


def test_a_function_takes_its_operands_in_the_order_of_its_parameters() -> None:
    def last_first(x: Expr, scale: Expr, bias: Expr) -> Expr:
        return (x + bias) * scale

    traced = chain(last_first)
    assert traced.given == ("scale", "bias")
    assert traced.text == "takes(scale, bias) | add(bias) | mul(scale)"
    assert traced == chain(traced.text)


def test_a_long_function_does_not_exhaust_the_stack() -> None:
    def long(x: Expr) -> Expr:
        for _ in range(3000):
            x = x + 1.5
        return x

    assert len(chain(long).steps) == 3000


def branching(x: Expr) -> Expr:
    return x if x > 0 else -x


def unused(x: Expr, scale: Expr) -> Expr:
    return x + 1


def number_first(x: Expr) -> Expr:
    return where(ir.const(1.0), x, 0)


def per_channel_alone(x: Expr, scale: Channel) -> Expr:
    return x * exp(scale)


def without_x(x: Expr, scale: Expr) -> Expr:
    return scale


def per_channel_maximum(x: Expr, scale: Channel) -> Expr:
    return maximum(x, scale)


def per_channel_in_trailing_place(x: Expr, bias: Trailing) -> Expr:
    return add_channel(x, bias)


def a_constant_operand(x: Expr, slope: float) -> Expr:
    return x * slope


def needs_axes(x: Expr) -> Expr:
    return ir.reduce_sum(x, (-1,))


def asks_for_axes(x: Expr) -> Expr:
    return ir.reduce_sum(x, x.axes)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branching, "branching: an Expr has no truth value"),
        (unused, "unused: the parameter 'scale' is never used"),
        (number_first, "number_first: the first argument of where is a number"),
        (per_channel_alone, "'scale' is annotated as channel, but something is computed from it"),
        (without_x, "without_x: computes nothing, but gives what it is given"),
        (per_channel_maximum, "maximum has no form that takes 'scale' per channel"),
        (per_channel_in_trailing_place, "'bias' is annotated as trailing, but add_channel takes"),
        (a_constant_operand, "for a constant give it a default, slope=0.1"),
        (needs_axes, "needs_axes: reduce needs a tensor's axes"),
        (asks_for_axes, "asks_for_axes: axes are known only once"),
        (lambda x: x, "returns its first parameter unchanged"),
        (lambda x: 3, "must return an expression, got 3"),
        (lambda x: gelu(), "must return an expression, got a Chain"),
        (lambda x: x.sinus(), "'Expr' object has no attribute 'sinus'; did you mean 'sin'?"),
        (lambda x: x if x == 0 else -x, "an Expr has no truth value"),
        (
            lambda x: x * torch.ones(1),
            "mul: got a Tensor, wanted an expression or a number; give the function a parameter",
        ),
        (
            lambda x: torch.ones(3) + x,
            "torch's add: got a Tensor, wanted an expression or a number; give the function a",
        ),
        (lambda x, self: x + self, "no operand can be called 'self'; put it first, or call it"),
        (lambda self, x: gelu(x), "a function of tensors alone, not a method; leave out self, and"),
        (lambda x: x * "a", "got a str, wanted an expression, a parameter or a number"),
        (lambda: 0, "the first parameter of a chain's function is its input"),
        (lambda *x: x, "the first parameter of a chain's function is its input"),
        (lambda x, *others: x, "lists its operands by name"),
        (lambda a, x: a + x, "the first parameter is the input, whatever its name, and no operand"),
        (max, "not a function that can be traced"),
    ],
)
def test_a_function_that_is_no_chain_is_told_why(
    function: Callable[..., object], message: str
) -> None:
    with pytest.raises(ChainError) as caught:
        chain(function)
    assert message in str(caught.value)
