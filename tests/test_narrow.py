"""Arithmetic for results of 16 bits: every spelling over every value of bf16 and fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from evaluator import DOMAIN, NUMPY, Recipe, build, evaluate_all, numbers, recipes
from hypothesis import HealthCheck, assume, given, settings

import fusegen
from fusegen import ir
from fusegen.autodiff import NO_SHARE
from fusegen.bind import bind
from fusegen.choices import joined
from fusegen.describe import Situation, sources
from fusegen.ir import Expr, primitive
from fusegen.narrow import narrow_type, respelled
from fusegen.program import derivative, forward
from fusegen.tails import LOG2_ERFC, LOG2_ERFC_IN_ERF, LOG2_ERFC_WIDE
from fusegen.target import CPP, CUDA, Target

Array = np.ndarray[Any, Any]
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HALF_ULP = {"bfloat16": 2.0**-9, "float16": 2.0**-12}  # relative, at most
# At most this part of half an ulp may be lost before the result is rounded.
SHARE = 1 / 16
each_type = pytest.mark.parametrize("dtype", TYPES)


def every_value(dtype: str) -> torch.Tensor:
    """All finite values, a multiple of no vector's length of them."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(TYPES[dtype])
    return values[torch.isfinite(values)][:-1]


# --- what is right ---

_erfc = np.frompyfunc(math.erfc, 1, 1)
_erf = np.frompyfunc(math.erf, 1, 1)


def normal_tail(x: Array) -> Array:
    return 0.5 * _erfc(-x / math.sqrt(2)).astype(float)


def density(x: Array) -> Array:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def logistic(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1.0 + small)


def gelu_by_tanh(x: Array) -> Array:
    return x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def slope_of_gelu_by_tanh(x: Array) -> Array:
    k = 2 * math.sqrt(2 / math.pi)
    s = logistic(k * (x + 0.044715 * x**3))
    return s + x * k * (1 + 3 * 0.044715 * x * x) * s * (1 - s)


@dataclass(frozen=True)
class Case:
    """A chain with its function and slope in float64, and what they may be off by besides a SHARE
    of half an ulp: where terms cancel, and in tails where eager has no digit left.
    """

    text: str
    function: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    lost: float = 0.0  # in ulp of single precision, times 1 + |x|
    lost_of_slope: float = 0.0
    size_of_slope: Callable[[Array], Array] | None = None  # of its terms, where they cancel
    largest: float = math.inf  # beyond this, x to the third power overflows


def slope_of_mish_tail(x: Array) -> Array:
    return logistic(x) * (1 - np.tanh(np.logaddexp(0, x)) ** 2)


def slope_of_hardswish(x: Array) -> Array:
    return np.where(x <= -3, 0.0, np.where(x < 3, x / 3 + 0.5, 1.0))


CASES = (
    Case(
        "gelu",
        lambda x: x * normal_tail(x),
        lambda x: normal_tail(x) + x * density(x),
        0.06,  # 6e-9: erfc is right to a SHARE down to 1e-4
        0.06,
        lambda x: normal_tail(x) + np.abs(x) * density(x),
    ),
    Case("erf", lambda x: _erf(x).astype(float), lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    # 1 + tanh has no more digits in the left tail than tanh, eager's neither.
    Case("gelu(approximate='tanh')", gelu_by_tanh, slope_of_gelu_by_tanh, 4, 64, None, 1e4),
    Case("exp", np.exp, np.exp),
    Case("sigmoid", logistic, lambda x: logistic(x) * logistic(-x), 0, 2),
    Case("silu", lambda x: x * logistic(x), lambda x: logistic(x) * (1 + x * logistic(-x)), 0, 4),
    Case("tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2, 0, 4),
    Case("softplus", lambda x: np.logaddexp(0, x), logistic, 4, 4),
    Case("expm1", np.expm1, np.exp),
    Case("log1p", np.log1p, lambda x: 1 / (1 + x)),
    Case("softplus(2.0)", lambda x: np.logaddexp(0, 2 * x) / 2, lambda x: logistic(2 * x), 4, 4),
    Case("pow(1.75)", lambda x: x**1.75, lambda x: 1.75 * x**0.75),
    Case("pow(-1.5)", lambda x: x**-1.5, lambda x: -1.5 * x**-2.5),
    Case("pow(7)", lambda x: x**7, lambda x: 7 * x**6),
    Case("pow(-3)", lambda x: x**-3, lambda x: -3 * x**-4),
    Case("pow(0.5)", np.sqrt, lambda x: 0.5 / np.sqrt(x)),
    Case("pow(20)", lambda x: x**20, lambda x: 20 * x**19),
    Case("pow(17)", lambda x: x**17, lambda x: 17 * x**16),
    Case("pow(-20)", lambda x: x**-20.0, lambda x: -20 * x**-21.0),
    Case("pow(0)", np.ones_like, np.zeros_like),
    Case(
        "rpow(0.75)",
        lambda x: 0.75**x,
        lambda x: 0.75**x * math.log(0.75),
        largest=300,  # beyond, the power may overflow that the slope is a part of
    ),
    Case("rpow(-2)", lambda x: (-2.0) ** x, lambda x: np.full_like(x, math.nan)),
    # Factors whose powers are beyond single precision.
    Case(
        "mul(1e4) | mul(1e4) | gelu | mul(1e-8)",
        lambda x: x * normal_tail(1e8 * x),
        lambda x: normal_tail(1e8 * x) + 1e8 * x * density(1e8 * x),
        4,
        4,
        lambda x: normal_tail(1e8 * x) + 1e8 * np.abs(x) * density(1e8 * x),
        1e29,
    ),
    Case(
        "mul(1e-5) | mul(1e-5) | erf",
        lambda x: _erf(1e-10 * x).astype(float),
        lambda x: 2e-10 / math.sqrt(math.pi) * np.exp(-((1e-10 * x) ** 2)),
    ),
    Case("elu", lambda x: np.where(x > 0, x, np.expm1(x)), lambda x: np.exp(np.minimum(x, 0))),
    Case(
        "mish",
        lambda x: x * np.tanh(np.logaddexp(0, x)),
        lambda x: np.tanh(np.logaddexp(0, x)) + x * slope_of_mish_tail(x),
        4,
        4,
        lambda x: np.tanh(np.logaddexp(0, x)) + np.abs(x) * slope_of_mish_tail(x),
    ),
    Case("logsigmoid", lambda x: -np.logaddexp(0, -x), lambda x: logistic(-x), 4, 4),
    Case(
        "softsign",
        lambda x: x / (1 + np.abs(x)),
        lambda x: (1 + np.abs(x)) ** -2.0,
        0,
        4,
        lambda x: 1 / (1 + np.abs(x)),
        1e4,
    ),
    Case("hardswish", lambda x: x * np.clip(x + 3, 0, 6) / 6, slope_of_hardswish, 4, 4),
    Case("sqrt", np.sqrt, lambda x: 0.5 / np.sqrt(x)),
    Case("rdiv(0.75)", lambda x: 0.75 / x, lambda x: -0.75 / x / x),
    Case("div(0.3)", lambda x: x / 0.3, lambda x: np.full_like(x, 1 / 0.3)),
    Case("relu", lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 1.0, 0.0)),
    Case("clamp(-1, 1)", lambda x: np.clip(x, -1, 1), lambda x: np.where(np.abs(x) <= 1, 1.0, 0.0)),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)


@pytest.mark.parametrize("text", ["pow(e)", "pow(20)", "pow(17.5)", "pow(0)"])
def test_a_power_of_what_may_be_negative_has_no_cheap_spelling(text):
    (module,) = sources(fusegen.chain(text), "cuda", Situation(dtype="bfloat16"), grad=True)
    assert "narrow_pow(" not in module.text


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("layernorm | mul(100000) | gelu", "float32"),
        ("mul(1e4) | mul(1e4) | gelu", "float16"),
    ],
)
def test_no_constant_that_is_gathered_is_beyond_single_precision(text, dtype):
    (module,) = sources(fusegen.chain(text), "cuda", Situation(dtype=dtype), grad=True)
    bodies = module.text[module.text.index("forward_") :]
    assert "INFINITY" not in bodies


def values_for(case: Case, dtype: str) -> torch.Tensor:
    values = every_value(dtype)
    return values[values.abs() <= case.largest]


def expected(case: Case, x: Array, dtype: str) -> list[tuple[str, Array, Array]]:
    """(name, what is right, how far off it may be before it is rounded) of result and slope."""
    with np.errstate(all="ignore"):
        result, slope = case.function(x), case.slope(x)
        sizes = (
            np.abs(result),
            np.abs(slope) if case.size_of_slope is None else case.size_of_slope(x),
        )
    allowed = []
    for size, lost in zip(sizes, (case.lost, case.lost_of_slope), strict=True):
        # Powers of two below 2^-126 are zero; eager's sigmoid is, too, where its exp overflows.
        several = (lost * 2.0**-23 + 4 * 2.0**-126) * (1 + np.abs(x))
        allowed.append(SHARE * HALF_ULP[dtype] * size + several)
    return [("result", result, allowed[0]), ("slope", slope, allowed[1])]


def assert_within(what: str, x: Array, found: Array, exact: Array, allowed: Array) -> None:
    with np.errstate(all="ignore"):
        wrong = ~((np.abs(found - exact) <= allowed) | (found == exact))
    wrong &= ~(np.isnan(found) & np.isnan(exact))
    worst = [
        f"x = {a:g}: {b:g}, not {c:g}"
        for a, b, c in zip(*(v[wrong] for v in (x, found, exact)), strict=True)
    ]
    assert not worst, f"{what}: {len(worst)} values, {'; '.join(worst[:4])}"


# --- the sequence of instructions, in numpy ---

# Documented relative errors of the approximate instructions; of lg2 between 0.5 and 2, absolute.
EX2, RCP, LG2 = 2.0**-22, 2.0**-23, 2.0**-22


def single(x: Any) -> Array:
    return np.asarray(x, np.float64).astype(np.float32)


def fma(a: Array, b: Array, c: Array) -> Array:
    return single(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))


def horner(x: Array, *coefficients: Array) -> Array:
    total = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = fma(x, total, coefficient)
    return total


def instructions(error: float) -> Mapping[str, Callable[..., Array]]:
    """What CUDA computes, each approximate instruction off by `error` of its largest error."""

    def exp2(x: Array) -> Array:
        return single(np.exp2(x.astype(np.float64)) * (1 + error * EX2))

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)

    def reciprocal(x: Array) -> Array:
        """Of a power of two it is exact, as the devices show."""
        off = np.where(np.frexp(x)[0] == 0.5, 0.0, error * RCP)
        return flushed(single(1.0 / x.astype(np.float64) * (1 + off)))

    def sigmoid(x: Array) -> Array:
        grown = flushed(exp2(fma(x, single(-1.44269504), single(-24.0))))
        return single(reciprocal(grown + single(2.0**-24)) * single(2.0**-24))

    def log2(x: Array) -> Array:
        exact = np.log2(x.astype(np.float64))
        is_near = (x > 0.5) & (x < 2)
        off = np.where(is_near, LG2, LG2 * np.where(np.isinf(exact), 0, exact))
        return single(exact + error * off)

    def tanh(x: Array) -> Array:
        inverse = reciprocal(flushed(exp2(x * single(2.88539008))) + single(1))
        near = x * fma(x * x, single(-1 / 3), single(1))
        return np.where(np.abs(x) < 0.0625, near, fma(inverse, single(-2), single(1)))

    def expm1(x: Array) -> Array:
        near = x * fma(x, fma(x, single(1 / 6), single(0.5)), single(1))
        far = flushed(exp2(x * single(1.44269504))) - single(1)
        return np.where(np.abs(x) < 0.0625, near, far)

    def log1p(x: Array) -> Array:
        near = x * fma(x, fma(x, single(1 / 3), single(-0.5)), single(1))
        return np.where(np.abs(x) < 0.03125, near, log2(x + single(1)) * single(0.693147182))

    def power(base: Array, exponent: Array) -> Array:
        return flushed(exp2(log2(np.where(base == -math.inf, math.inf, base)) * exponent))

    return {
        **NUMPY,
        "fma": fma,
        "polynomial": horner,
        "exp2": exp2,
        "exp2_flushed": lambda x: flushed(exp2(x)),
        "narrow_sigmoid": sigmoid,
        "narrow_div": lambda a, b: single(a.astype(np.float64) / b * (1 + error * 2 * RCP)),
        "narrow_sqrt": lambda x: single(np.sqrt(x.astype(np.float64)) * (1 + error * RCP)),
        "narrow_tanh": tanh,
        "narrow_expm1": expm1,
        "narrow_log1p": log1p,
        "narrow_pow": power,
    }


def graphs(text: str, dtype: str, shape: tuple[int, ...] = (64,)) -> tuple[list[Expr], list[Expr]]:
    """A chain's result and its slope, as they are before anything is respelled."""
    chain = fusegen.chain(text)
    bound = bind(chain, (shape, dtype), {})
    program = forward(bound, is_training=True)
    return [*program.graph.roots], [*derivative(program, [0], [0]).program.graph.roots]


def computed(
    roots: Sequence[Expr], x: Array, out: Array, operations: Mapping[str, Callable[..., Array]]
) -> Array:
    (root,) = roots
    leaves = {"x": x, "d_out": np.ones_like(x), "out": out}
    known: dict[Expr, Array] = {}
    with np.errstate(all="ignore"):
        for node in ir.topological(roots):
            if node.op == "input":
                known[node] = leaves[ir.name_of(node)]
            elif node.op == "const":
                known[node] = np.float32(ir.constant(node))
            else:
                value = operations[node.op](*(known[a] for a in node.args))
                known[node] = (
                    np.asarray(value).astype(np.float32) if node.kind == "number" else value
                )
    return np.broadcast_to(known[root], x.shape)


@each_type
@each_case
@pytest.mark.parametrize("error", [-1.0, 1.0])
def test_the_instructions_lose_little_before_they_round(
    case: Case, dtype: str, error: float
) -> None:
    x = values_for(case, dtype).float().numpy()
    wanted = expected(case, x.astype(np.float64), dtype)
    out = x  # until it is known
    for roots, (what, exact, allowed) in zip(graphs(case.text, dtype), wanted, strict=True):
        new = respelled(roots, [], dtype, CUDA)
        out = computed([new[r] for r in roots], x, out, instructions(error))
        found = out.astype(np.float64)
        # Who is just below the largest number is as good as who is beyond it.
        found, exact = (np.clip(v, -3.4e38, 3.4e38) for v in (found, exact))
        assert_within(what, x, found, exact, allowed)


def half_ulp(exact: Array, dtype: str) -> Array:
    limits = torch.finfo(TYPES[dtype])
    with np.errstate(all="ignore"):
        power = np.floor(np.log2(np.maximum(np.abs(exact), limits.smallest_normal)))
    return 0.5 * limits.eps * 2.0**power


@each_type
@each_case
def test_a_result_of_16_bits_is_off_by_half_an_ulp_and_a_share_of_it(
    case: Case, dtype: str, device: str
) -> None:
    values = values_for(case, dtype)
    x = values.clone().to(device).requires_grad_()
    result = fusegen.compile(case.text)(x)
    (slope,) = torch.autograd.grad(result, x, torch.ones_like(result))
    wide = values.double().numpy()
    for found, (what, exact, allowed) in zip(
        (result, slope), expected(case, wide, dtype), strict=True
    ):
        rounded = torch.from_numpy(exact).to(values.dtype).double().numpy()
        nearest = np.where(np.isinf(rounded), rounded, exact)
        given_up = half_ulp(nearest, dtype) + allowed
        assert_within(what, wide, found.detach().cpu().double().numpy(), nearest, given_up)


# --- the algebra ---

_EXACT = ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", *("where",) * 4)


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(recipes)
def test_what_is_exact_stays_the_same(recipe: Recipe) -> None:
    roots = build(recipe, _EXACT)[-2:]
    exact = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, math.nan)
    values = numbers(recipe.seed, exact)
    values = {
        name: np.where(np.isin(v, exact) | np.isnan(v), v, 0.25) for name, v in values.items()
    }
    known = evaluate_all(roots, values, DOMAIN)
    numeric = [v for node, v in known.items() if node.kind == "number"]
    # Nothing is rounded, so another order of operations gives the same numbers.
    assume(all(np.all(np.isnan(v) | (v * 2.0**20 % 1 == 0)) for v in numeric))
    new = respelled(roots, [], "bfloat16", CPP)
    after = evaluate_all([new[r] for r in roots], values, DOMAIN)
    for root in roots:
        np.testing.assert_array_equal(*np.broadcast_arrays(known[root], after[new[root]]))


X, D = (ir.tensor(name, {-1}, 1) for name in ("x", "d"))
IS_NUMBER = primitive("eq", X, X)


def where(condition: Expr, yes: Expr | float, no: Expr | float) -> Expr:
    return primitive("where", condition, yes, no)


def new_of(root: Expr, target: Target = CUDA) -> Expr:
    return respelled([root], [], "bfloat16", target)[root]


def test_bounds_are_a_minimum_and_a_maximum_only_where_nan_passes() -> None:
    clamped = where(X < -1, -1, where(X > 1, 1, where(IS_NUMBER, X, math.nan)))
    assert new_of(clamped) is primitive("maximum", primitive("minimum", X, 1), -1)
    assert new_of(where(X <= 0, 0, X)) is primitive("maximum", X, 0)
    for kept in (
        where(X > 0, X, 0),
        where(X > D, D, X),
        where(X < 1, -1, primitive("minimum", X, -1)),
    ):
        assert new_of(kept) is kept


def test_the_gradient_of_clamp_is_one_choice() -> None:
    slope = where(IS_NUMBER, where(X > 1, NO_SHARE, where(X < -1, NO_SHARE, D)), NO_SHARE)
    inside = primitive("logical_and", X <= 1, X >= -1)
    assert new_of(slope) is where(inside, D, NO_SHARE)


def test_without_a_test_for_nan_not_above_stays_as_it_is() -> None:
    found = new_of(where(X > 1, NO_SHARE, where(X < -1, NO_SHARE, D)))
    assert found.args[0].args[0].op == "logical_not"
    never = where(IS_NUMBER, where(primitive("gt", X, math.nan), NO_SHARE, D), NO_SHARE)
    assert new_of(never).args[0].args[1].op == "logical_not"


def test_a_choice_that_is_used_elsewhere_is_not_joined() -> None:
    assert joined(X > 1, [where(X < 3, D, X), X], [False, False]) is None


@each_type
def test_the_series_of_erfc_falls_for_ever(dtype: str) -> None:
    z = np.linspace(0, 50, 200_001)
    for coefficients in (LOG2_ERFC[dtype], LOG2_ERFC_IN_ERF, LOG2_ERFC_WIDE):
        assert coefficients[-1] < 0
        assert np.all(np.diff(sum(c * z**i for i, c in enumerate(coefficients))) < 0)


@pytest.mark.parametrize("error", [-1.0, 1.0])
def test_erfc_in_single_precision_is_as_exact_as_1_plus_erf(error: float) -> None:
    """Rounded as fma rounds; error is that of ex2.approx, in units of what it may be off by."""
    z = np.linspace(0, 10, 1_000_001).astype(np.float32)
    exponent = np.zeros_like(z)
    for c in LOG2_ERFC_WIDE[::-1]:
        exponent = (exponent.astype(np.float64) * z + np.float32(c)).astype(np.float32)
    found = np.exp2(exponent.astype(np.float64)) * (1 + error * 2.0**-22.5)
    exact = _erfc(z.astype(np.float64)).astype(float)
    off = np.abs(found - exact)
    assert off.max() < 2.5e-7  # two ulp of 1; erff is within two of erf
    assert (off / exact)[exact > 1e-8].max() < 4e-4


def test_what_depends_on_sums_takes_the_shorter_erf() -> None:
    for text, has_erf in (
        ("add_channel | gelu", True),
        ("gelu | layernorm", False),
        ("layernorm | gelu", False),
        ("gelu | batch_norm(training=True)", False),
        ("layernorm | to(float64) | gelu", True),
    ):
        modules = sources(fusegen.chain(text), "cuda", Situation(shape=(4, 8)), grad=True)
        assert any("erf" in m.text.replace("erfc", "") for m in modules) == has_erf


@pytest.mark.parametrize(
    ("chain", "is_short"),
    [("layernorm | div(p)", True), ("sigmoid | div(p)", False), ("layernorm | div(3)", False)],
)
def test_quotients_of_elements_that_depend_on_sums_take_few_instructions(
    chain: str, is_short: bool
) -> None:
    for target in ("cuda", "cpp"):
        shapes = {"p": (4, 6)} if "(p)" in chain else {}
        (module,) = sources(fusegen.chain(chain), target, Situation((4, 6), shapes), grad=False)
        assert ("narrow_div(" in module.text) == (is_short and target == "cuda")


@pytest.mark.parametrize(
    ("chain", "is_short"),
    [
        ("logsumexp(1)", True),
        ("log_softmax(1)", True),
        ("softmax(1) | mean(0)", True),
        ("softmax(1)", False),
        ("keep(y) | mean(1, True) | keep(m) | rsub(y) | exp | sum(1)", False),
    ],
)
def test_exponentials_below_the_largest_take_few_instructions_if_only_added_up(
    chain: str, is_short: bool
) -> None:
    situation = Situation(shape=(64, 64))
    (forward_only,) = sources(fusegen.chain(chain), "cuda", situation, grad=False)
    assert ("expf(" in forward_only.text) == (not is_short)
    assert ("exp2_flushed(" in forward_only.text) == is_short


def test_exponentials_above_a_part_of_the_largest_are_as_exact_as_any() -> None:
    """What exceeds what is taken off has an exponent of any size, whose rounding would count."""
    chain = fusegen.chain("keep(y) | logsumexp(1, True) | mul(0.1) | rsub(y) | exp | sum(1)")
    (module,) = sources(chain, "cuda", Situation(shape=(64, 64)), grad=False)
    assert "expf(" in module.text
    assert module.text.count(" = exp2_flushed(") == 1  # logsumexp's own


@pytest.mark.parametrize("chain", ["gelu | mean((0, 1))", "gelu | sum(1) | mul(2)"])
def test_what_is_only_added_up_takes_the_shorter_erf(chain: str) -> None:
    alone, with_gradients = (
        sources(fusegen.chain(chain), "cuda", Situation(shape=(4, 6)), grad=grad)
        for grad in (False, True)
    )
    assert not any("erff(" in m.text for m in alone)
    assert any("erff(" in m.text for m in with_gradients)  # the gradient of each element


@pytest.mark.parametrize("chain", ["gelu | max_pool2d(2) | relu", "gelu | amax(1, True) | relu"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_maximum_is_no_sum(chain: str, grad: bool) -> None:
    """A call gives the same with and without gradients."""
    for module in sources(fusegen.chain(chain), "cuda", Situation(shape=(2, 4, 6, 8)), grad=grad):
        assert "erff(" in module.text
        assert "polynomial(" not in module.text


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_only_results_of_16_bits_are_respelled(target: str) -> None:
    chain = fusegen.chain("add_channel | gelu")
    for dtype, calls in (
        ("float32", "erff("),
        ("bfloat16", "polynomial("),
        ("float16", "polynomial("),
    ):
        (module,) = sources(chain, target, Situation(dtype=dtype), grad=True)
        assert calls in module.text
        assert ("erff(" in module.text) == (dtype == "float32")


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("bfloat16", "bfloat16", "bfloat16"), "bfloat16"),
        (("float16", "float16", "float16"), "float16"),
        (("bfloat16", "float32", "bfloat16"), "bfloat16"),  # a number in single precision
        (("bfloat16", "float16", "bfloat16"), "bfloat16"),
        (("bfloat16", "float64", "bfloat16"), None),
        (("bfloat16", "bfloat16", "float32"), None),
        (("float32", "bfloat16", "float32"), None),
    ],
)
def test_tensors_with_axes_decide(types: tuple[str, str, str], expected: str | None) -> None:
    number = ir.tensor("number", (), 1)
    graph = ir.Graph((X, number), (("out", X + number),))
    assert narrow_type(graph, dict(zip(("x", "number", "out"), types, strict=True))) == expected


def test_without_any_axes_all_decide() -> None:
    a, b = (ir.tensor(name, (), 0) for name in "ab")
    graph = ir.Graph((a, b), (("out", a + b),))
    assert narrow_type(graph, {"a": "bfloat16", "b": "bfloat16", "out": "bfloat16"}) == "bfloat16"
    assert narrow_type(graph, {"a": "bfloat16", "b": "float32", "out": "float32"}) is None


@pytest.mark.parametrize(
    "text", ["div(y) | floor", "div(y) | to('int32')", "quantize(y)", "sqrt | round"]
)
def test_what_is_cut_off_is_as_exact_as_in_single_precision(text: str) -> None:
    (found,) = sources(
        fusegen.chain(text), "cuda", Situation((64, 64), dtype="bfloat16"), grad=False
    )
    assert "narrow_" not in found.text
    plain = text.split(" | ")[0] if "quantize" not in text else "div(y) | exp"
    (found,) = sources(
        fusegen.chain(plain), "cuda", Situation((64, 64), dtype="bfloat16"), grad=False
    )
    assert "narrow_" in found.text
