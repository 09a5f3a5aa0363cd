"""Reductions and softmax inside chains: shapes, ties, values that are no numbers, any layout."""

import math
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from numeric import assert_as_accurate, has_right_second_derivatives, outcome
from strategies import reductions

import fusegen
from fusegen import ArgumentError, ChainError, UnsupportedError
from fusegen.describe import Situation, sources

SHAPE = (3, 4, 2, 5)
# chain, shapes of the operands
DROPPED = [
    ("sum", []),
    ("mean(1)", []),
    ("gelu | mean((2, 3)) | tanh", []),
    ("mean((2, 3)) | mul(w) | add(b)", [(4,), (3, 4)]),
    ("mul(w) | sum(1) | add(b)", [(4, 1, 5), (2, 1)]),
    ("mean(-1, keepdim=True) | add(other)", [(3, 4, 2, 7)]),
    ("mean(-1) | unsqueeze(1) | add(b)", [(3, 9, 4, 2)]),
    ("unsqueeze(1) | sum(-1)", []),
    ("mean(1, keepdim=True) | squeeze(1) | tanh", []),
    ("keep(y) | mean(1, keepdim=True) | sub(y)", []),
    ("keep(y) | amax((1, 3), keepdim=True) | rsub(y) | exp", []),
    ("sum(1) | mul(p) | sum(1) | mul(q)", [(2, 5), (5,)]),
    ("var((0, 2))", []),
    ("std(-1, correction=0.5)", []),
    ("max(2) | min(0)", []),
    ("norm(3, (1, 2)) | log", []),
    ("logsumexp((2, 3)) | gelu", []),
    ("softmax(1) | mul_channel | log_softmax(-1) | max(1)", [(4,)]),
    ("layernorm(w) | sum(1) | softmax(-1)", [(5,)]),
    ("softmin(0) | sum((0, 2))", []),
    # Gradients of elements that have a sum in common, over more axes than it was found along.
    ("log_softmax(-1) | sum(0)", []),
    ("log_softmax(1) | add(b) | mean((0, 2, 3))", [(3, 1, 1, 5)]),
    ("log_softmax(1) | adaptive_avg_pool2d(1) | mul(w)", [(4, 1, 1)]),
    ("log_softmax(2) | mean((0, 1)) | tanh", []),
]


@pytest.mark.parametrize(("text", "operands"), DROPPED, ids=[c[0] for c in DROPPED])
def test_its_source_for_cuda_is_there_with_gradients(text, operands):
    chain = fusegen.chain(text)
    shapes = dict(zip(chain.operands, operands, strict=True))
    fused = fusegen.compile(chain)
    source = fused.source("cuda", "float32", grad=True, shape=SHAPE, operands=shapes)
    assert "run_forward" in source
    assert "run_backward" in source


@pytest.mark.unoptimised
@pytest.mark.parametrize(("text", "operands"), DROPPED, ids=[c[0] for c in DROPPED])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_chain_goes_on_with_the_axes_that_a_reduction_leaves(text, operands, layout, device):
    x = torch.randn(SHAPE, dtype=torch.float64, device=device).contiguous(memory_format=layout)
    others = [torch.randn(s, dtype=torch.float64, device=device) for s in operands]
    tensors = [t.requires_grad_() for t in (x, *others)]
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert ours.result.shape == eager.result.shape
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        out = torch.empty_like(eager.result)
        assert fused(*tensors, out=out) is out
        torch.testing.assert_close(out, eager.result, rtol=1e-9, atol=1e-9)


@pytest.mark.unoptimised
@pytest.mark.parametrize(("text", "operands"), DROPPED, ids=[c[0] for c in DROPPED])
def test_second_derivatives_are_right(text, operands, device):
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in (SHAPE, *operands)]
    assert has_right_second_derivatives(
        fusegen.compile(text), [t.requires_grad_() for t in tensors]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_how_many_are_not_zero_is_of_their_type(dtype, device):
    x = torch.tensor([[0.0, 1.0, 2.0], [0.0, -0.0, float("nan")]], dtype=dtype, device=device)
    found, wanted = fusegen.compile("norm(0, -1)")(x), torch.linalg.vector_norm(x, 0, -1)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_a_count_of_what_is_not_zero_has_a_gradient_of_zeros(device):
    x = torch.tensor([[0.0, 1.0, float("nan")]], device=device, requires_grad=True)
    for norm in (torch.linalg.vector_norm, fusegen.compile("norm(0, -1)")):
        found = norm(x, 0, -1) if norm is torch.linalg.vector_norm else norm(x)
        assert found.item() == 2
        found.sum().backward()  # which leaves x without one in eager
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_the_gradient_of_a_sum_is_expanded_as_eagers_is(device):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fusegen.compile("sum(1)")(x).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


# Ties and values that are no numbers.

TIED = [
    [0.0, 0.0, 0.0, 0.0],
    [1.0, 2.0, 2.0, -1.0],
    [-1.0, -1.0, 3.0, 3.0],
    [-math.inf, -math.inf, -math.inf, -math.inf],
    [math.inf, 1.0, math.inf, 0.0],
    [-math.inf, 1.0, 2.0, 3.0],
    [1.0, math.nan, 2.0, math.nan],
    [math.nan, math.inf, 2.0, -math.inf],
]


@pytest.mark.parametrize("is_strided", [False, True], ids=["row", "column"])
@pytest.mark.parametrize(
    "name", ["max({})", "min({})", "amax({})", "amin({})", "relu | max({})", "neg | amin({})"]
)
def test_ties_and_odd_values_come_out_as_in_eager(name, is_strided, device):
    x = torch.tensor(TIED, device=device)
    x = (x.T.contiguous() if is_strided else x).requires_grad_()
    fused = fusegen.compile(name.format(1 - is_strided))
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("is_strided", [False, True], ids=["row", "column"])
@pytest.mark.parametrize(
    "name", ["softmax({})", "log_softmax({})", "logsumexp({})", "sum({})", "norm(2, {})"]
)
def test_rows_with_values_that_are_no_numbers_come_out_as_in_eager(name, is_strided, device):
    x = torch.tensor(TIED, device=device)
    x = x.T.contiguous() if is_strided else x
    fused = fusegen.compile(name.format(1 - is_strided))
    torch.testing.assert_close(fused(x), fused.reference(x), equal_nan=True)


TWO_LARGEST = (
    "keep(y) | {0}({1}, keepdim=True) | keep(a) | recall(y) | mul(2) | {0}({1}, keepdim=True)"
    " | mul(a)"
)


@pytest.mark.parametrize("name", ["amax", "max"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_several_maxima_of_what_is_negative(name, dim, dtype, device):
    # nvcc 13.0 begins with 0 where an array of arrays is to begin with minus infinity.
    x = torch.randn(24, 7, 40, device=device).abs().neg().to(dtype).requires_grad_()
    fused = fusegen.compile(TWO_LARGEST.format(name, dim))
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=0)


# The loop that finds a maximum and those that look for it again become vector code or not, each for
# itself, and vector variants of these functions differ from the plain ones in the last bit.
BEFORE_A_MAXIMUM = [
    "logsigmoid | elu | amax({}, True) | add(t) | hardswish | hardswish | silu",
    "tanh | gelu | amin({}, True) | mul(t) | mish",
    "exp | sin | neg | amax({}) | sigmoid",
    "gelu | layernorm | softplus | amax({}, True) | rsub(t) | gelu",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("text", BEFORE_A_MAXIMUM)
def test_a_maximum_is_found_again_behind_functions(text, axis, dtype, device):
    x = torch.randn(36, 37, dtype=dtype)
    operands = [torch.randn_like(x)] if "(t)" in text else []
    fused = fusegen.compile(text.format(axis))
    # Eager on the CPU: torch's hardswish rounds a sixth to fp32 on GPUs, in fp64 too.
    tensors = [t.requires_grad_() for t in (x, *operands)]
    ours, eager = outcome(fused, tensors, device=device), outcome(fused.reference, tensors)
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        # A maximum that is not found again is a NaN; the rest is rounding of a few operations.
        tolerance = 1e-4 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("tanh | amax(1) | log1p", {"log1p"}),
        ("tanh | softmax(1) | log1p", {"exp", "log1p", "tanh"}),
        ("tanh | max(1) | log1p", {"log1p", "tanh"}),
    ],
)
def test_no_vector_code_stands_before_a_maximum_that_is_looked_for(text, names):
    source = fusegen.compile(text).source("cpp", "float64", grad=True, shape=(3, 4))
    declared = re.findall(r"simd\(.*\)\)\) double (\w+)\(", source)
    assert set(declared) == names


def test_a_maximum_of_all_is_shared_by_equal_ones(device):
    x = torch.tensor([[1.0, 3.0], [3.0, 0.0]], device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fusegen.compile("max")(x), x)
    assert gradient.tolist() == [[0.0, 0.5], [0.5, 0.0]]


def test_a_softmax_of_large_numbers_does_not_overflow(device):
    x = torch.tensor([[1e4, 1e4 - 1, -1e4]], device=device)
    for text in ("softmax(1)", "log_softmax(1)", "logsumexp(1)"):
        fused = fusegen.compile(text)
        torch.testing.assert_close(fused(x), fused.reference(x))


@pytest.mark.parametrize("text", ["norm(2, 1)", "std(1)", "norm(3, 1)", "norm(inf, 1)"])
def test_a_norm_of_zeros_has_no_gradient_as_in_eager(text, device):
    x = torch.zeros(3, 5, device=device)
    x[1] = torch.randn(5)
    x.requires_grad_()
    fused = fusegen.compile(text)
    for a, b in zip(
        outcome(fused, [x]).tensors, outcome(fused.reference, [x]).tensors, strict=True
    ):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_of_one_value_is_unknown_as_in_eager(device):
    fused = fusegen.compile("var(1)")
    x = torch.randn(4, 1, device=device)
    torch.testing.assert_close(fused(x), fused.reference(x), equal_nan=True)


@pytest.mark.parametrize("shape", [(3, 70001), (70001, 3), (2, 9001, 7), (1, 1), (1, 300, 1)])
@pytest.mark.parametrize("text", ["softmax(1)", "max(1)", "logsumexp(0)", "mean(0)"])
def test_long_and_short_rows_are_as_accurate_as_eager(text, shape, device):
    x = torch.randn(shape, device=device).requires_grad_()
    fused = fusegen.compile(text)
    exact = outcome(fused.reference, [x], dtype=torch.float64)
    assert_as_accurate(outcome(fused, [x]), outcome(fused.reference, [x]), exact)


@pytest.mark.parametrize("shape", [(2, 7, 70, 33), (3, 130, 5, 90), (2, 24, 1, 3)], ids=str)
@pytest.mark.parametrize(
    ("text", "extents"),
    [
        ("softmax(1) | mul_channel(p) | sigmoid", [(1,)]),
        ("softmax(1) | mul(p) | add_channel(q) | sigmoid", [(0, 1), (1,)]),
        ("gelu | softmax(1) | mean((2, 3))", []),
        ("layernorm(w, b, axis=1) | gelu", [(1,), (1,)]),
        ("min(1, keepdim=True) | tanh | tanh", []),
        ("layernorm | mul(p) | add(q)", [(0, 3), (3,)]),
    ],
)
def test_rows_add_up_their_columns_and_are_alike_every_time(text, extents, shape, device):
    operands = [
        [n if d in kept else 1 for d, n in enumerate(shape)] if len(kept) > 1 else [shape[kept[0]]]
        for kept in extents
    ]
    tensors = [torch.randn(s, device=device).requires_grad_() for s in (shape, *operands)]
    fused = fusegen.compile(text)
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    ours = outcome(fused, tensors)
    assert_as_accurate(ours, outcome(fused.reference, tensors), exact)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 3)
        for a, b in zip(outcome(fused, tensors).tensors, ours.tensors, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("channels", [70, 64])
def test_strided_rows_of_which_nothing_is_reduced_come_in_pieces(channels, device):
    x = torch.randn(9, channels, 20, 33, device=device).to(memory_format=torch.channels_last)
    running = [torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.1]
    affine = [torch.randn(channels, device=device) for _ in range(2)]
    tensors = [x.requires_grad_(), *running, *(t.requires_grad_() for t in affine)]
    fused = fusegen.compile("batch_norm(mean, var, weight, bias) | gelu")
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(outcome(fused, tensors), outcome(fused.reference, tensors), exact)


@pytest.mark.parametrize(
    "chain",
    [
        "tanh | sum(0) | max(0)",  # x alone has both axes, and it is the first that was summed
        "amax(0) | sum(0) | max(0)",
        "logsumexp(2) | sum(1) | min(0)",
        "amax(0, True) | sum(1, True) | max(2, True) | tanh",
    ],
)
def test_the_gradient_of_a_maximum_of_sums_goes_to_all_that_was_summed(chain, device):
    x = torch.randn(3, 2, 4, device=device, dtype=torch.float64).requires_grad_()
    fused = fusegen.compile(chain)
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    for have, want in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=reductions())
def test_random_reductions_are_eagers(case):
    x = torch.randn(case.x, dtype=torch.float64).requires_grad_()
    fused = fusegen.compile(case.text)
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize(
    "step",
    ["var(-1, keepdim=True)", "std(-1, keepdim=True)", "var(-1, correction=0.0, keepdim=True)"],
)
def test_a_single_value_varies_as_in_eager(step, device):
    x = torch.tensor([[[1.0, 2.0], [math.nan, 0.0], [math.inf, 1.0]]], device=device)
    fused = fusegen.compile(f"mean(-1, keepdim=True) | {step}")
    torch.testing.assert_close(fused(x), fused.reference(x), equal_nan=True)


# Mistakes.


@pytest.mark.parametrize(
    ("text", "shape", "operands", "message"),
    [
        ("sum(4)", SHAPE, [], r"sum\(4\): dim 4 is out of range for a value of shape \(3, 4, 2, 5"),
        ("softmax(-5)", SHAPE, [], r"softmax\(-5\): dim -5 is out of range"),
        ("mean((1, -3))", SHAPE, [], r"dim \(1, -3\) names an axis .* twice"),
        ("sum(1) | max(3)", SHAPE, [], r"max\(3\): dim 3 is out of range for a value of shape \(3"),
        ("unsqueeze(6)", SHAPE, [], r"unsqueeze\(6\): dim 6 is out of range"),
        (
            "mean(-1) | add(b)",
            (3, 4),
            [(5,)],
            r"add\(b\): operand 'b' got shape \(5,\), which does",
        ),
        ("max(1)", (3, 0), [], "reduces an axis without elements"),
        ("select(1, 4)", (3, 4), [], r"index 4 is out of range for axis 1 of a value of shape \(3"),
        (
            "select(1, -5)",
            (3, 4),
            [],
            r"index -5 is out of range for axis 1 of a value of shape \(3",
        ),
        ("select(2, 0)", (3, 4), [], r"select\(2, 0\): dim 2 is out of range"),
    ],
)
def test_a_mistake_is_told(text, shape, operands, message):
    with pytest.raises(ArgumentError, match=message):
        fusegen.compile(text)(torch.ones(shape), *[torch.ones(s) for s in operands])


@pytest.mark.parametrize("text", ["norm(-1, 1)", "norm(-2, 1)", "normalize(-2, 1)", "norm(-3, 1)"])
@pytest.mark.parametrize("value", [math.inf, 1e30, 0.0, 3.0])
def test_a_negative_order_is_torchs(text, value, device):
    x = torch.full((2, 3), value, device=device)
    fused = fusegen.compile(text)
    torch.testing.assert_close(fused(x), fused.reference(x), equal_nan=True)


@pytest.mark.parametrize(
    ("text", "shape", "operands"),
    [
        ("square | sum", (0, 4), []),
        ("mul(p) | sum(1)", (2, 0, 5), [(5,)]),
        ("sum(0) | add(b)", (0, 3), [(3,)]),
        ("mean(-1)", (3, 0), []),
        ("logsumexp(1)", (3, 0), []),
        ("max_pool2d(2) | sum", (0, 3, 4, 4), []),
    ],
)
def test_what_reduces_nothing_is_torchs(text, shape, operands, device):
    """A loss of no positives is 0, and trains."""
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, device=device).requires_grad_() for s in (shape, *operands)]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    for mine, theirs in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(torch.isnan(fused(*tensors)), torch.isnan(fused.reference(*tensors)))
    with torch.no_grad(), pytest.raises(ArgumentError, match="reduces an axis without elements"):
        fused(*tensors, out=torch.empty_like(eager.result))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf], ids=["nan", "infinity", "minus infinity"]
)
def test_what_is_not_selected_does_not_matter(value, device):
    x = torch.randn(3, 4, 5, device=device)
    x[:, 1] = value
    x.requires_grad_()
    y = fusegen.compile("select(1, 2) | tanh")(x)
    assert torch.isfinite(y).all()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient[:, [0, 1, 3]], torch.zeros(3, 3, 5, device=device))


def test_a_value_kept_behind_a_first_view_is_taken_up_again(device):
    """Where another view follows, too."""
    text = "unflatten(-1, (2, -1)) | keep(y) | sum(-2, keepdim=True) | keep(s) | recall(y) | "
    fused = fusegen.compile(text + "mul(s) | flatten(-2)")
    x = torch.randn(2, 3, 8, device=device)
    torch.testing.assert_close(fused(x), fused.reference(x))


def test_a_maximum_of_too_many_values_has_no_gradient_to_the_first():
    situation = Situation(shape=((1 << 24) + 1,))
    assert sources(fusegen.chain("max(0)"), "cpp", situation, grad=False)
    with pytest.raises(UnsupportedError, match="found among 16777216 at most, got 16777217"):
        sources(fusegen.chain("max(0)"), "cpp", situation, grad=True)
    assert sources(fusegen.chain("amax(0)"), "cpp", situation, grad=True)


def test_a_body_of_ones_own_must_keep_its_axes():
    @fusegen.op
    def own_mean(x: fusegen.Expr) -> fusegen.Expr:
        """The mean."""
        return fusegen.mean(x, 1)

    with pytest.raises(ChainError, match="mean: in an operation's body axes cannot be dropped"):
        fusegen.compile("own_mean")(torch.ones(3, 4))


def test_a_reduction_works_in_a_body_of_ones_own(device):
    @fusegen.op
    def own_centred(x: fusegen.Expr) -> fusegen.Expr:
        """x less its mean along axis 1."""
        return x - fusegen.mean(x, 1, keepdim=True)

    x = torch.randn(3, 4, device=device)
    expected = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(fusegen.compile("own_centred")(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("argmax(1)", (5, 7)),
        ("argmax(1)", (3, 19, 6, 5)),
        ("relu | argmax(1)", (3, 8, 6, 4)),  # many are equal: the first
        ("mul(2) | argmin(-1, keepdim=True)", (4, 100)),
        ("argmin(0)", (40, 3)),
        ("argmax(2)", (3, 4, 5000)),
    ],
)
def test_where_the_largest_stands_is_torchs(text, shape, dtype, device):
    fused = fusegen.compile(text)
    x = torch.randn(shape, device=device).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
    found, wanted = fused(x), fused.reference(x)
    assert found.dtype == torch.int64
    assert torch.equal(found, wanted)
    assert not fused(x.requires_grad_()).requires_grad


def test_where_the_largest_stands_beside_infinities_and_nan(device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1, nan, 3, nan], [2, 2, 1, 2], [-inf] * 4, [inf, 1, inf, 0]], device=device)
    for name in ("argmax", "argmin"):
        assert torch.equal(fusegen.compile(f"{name}(1)")(x), getattr(torch, name)(x, 1))


def test_places_are_given_beside_values_that_train(device):
    @fusegen.compile
    def confident(x):
        p, place = x.softmax(1).max(1)
        return p, place

    assert (
        confident.chain.text == "softmax(1) | keep(y) | argmax(1) | give(y_2) | recall(y) | max(1)"
    )
    x = torch.randn(6, 5, device=device, requires_grad=True)
    p, place = confident(x)
    values, indices = x.softmax(1).max(1)
    assert torch.equal(place, indices)
    assert not place.requires_grad
    for a, b in zip(*(torch.autograd.grad(v.sum(), x) for v in (p, values)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("argmax(1) | add(1)", lambda x: x.argmax(1) + 1),
        ("argmax(1) | sum", lambda x: x.argmax(1).sum()),
        ("argmax(1) | unsqueeze(0)", lambda x: x.argmax(1).unsqueeze(0)),
    ],
)
def test_places_are_integers_like_others(text, function, device):
    x = torch.randn(3, 4, device=device)
    assert torch.equal(fusegen.compile(text)(x), function(x))


@pytest.mark.parametrize(
    "text", ["softmax(-1)", "exp | sum(0)", "logsumexp(-1)", "amax(-1)", "mean(0)"]
)
def test_a_value_without_axes_has_a_last_one_as_in_torch(text):
    fused = fusegen.compile(text)
    x = torch.tensor(2.0, requires_grad=True)
    found, wanted = fused(x), fused.reference(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(wanted, x))
