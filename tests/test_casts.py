"""`to` anywhere in a chain, `quantize` at its end, and the type of every mix of operands."""

import itertools
import math

import pytest
import torch
from numeric import EPSILON, outcome

import fusegen
from fusegen.errors import ArgumentError, ChainError, UnsupportedError

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=lambda t: str(t).removeprefix("torch."))
SHAPE = (2, 3, 5, 8)


def randn(shape, dtype, device):
    return torch.randn(shape, dtype=torch.float64).to(device, dtype)


# to


@each_type
@pytest.mark.parametrize("wanted", TYPES, ids=lambda t: str(t).removeprefix("torch."))
def test_a_cast_gives_torchs_bits_and_its_type(dtype, wanted, device):
    x = randn(SHAPE, dtype, device).mul_(1e3).requires_grad_()
    fused = fusegen.compile(fusegen.to(wanted))
    ours, eager = outcome(fused, [x]), outcome(lambda t: t.to(wanted), [x])
    assert ours.result.dtype == wanted
    assert torch.equal(ours.result, eager.result)
    assert ours.gradients[0].dtype == dtype
    assert torch.equal(ours.gradients[0], eager.gradients[0])


MIDDLE = (
    ("mul(2.5) | to(bfloat16) | to(float32) | add(c)", 0),
    ("add(1) | to(float16) | to(float32) | mul(c)", 0),
    ("to(float32) | add(1) | to(bfloat16) | to(float64) | mul(c)", 0),
    ("tanh | to(bfloat16) | to(float32) | mul(c) | gelu", 4),
    ("keep(y) | to(bfloat16) | to(float32) | sub(y) | mul(c)", 0),
    ("to(bfloat16) | to(float32) | layernorm | mul(c)", 4),
)


@pytest.mark.parametrize(("text", "slack"), MIDDLE)
def test_a_cast_in_the_middle_rounds_as_eager_does(text, slack, device):
    tensors = [randn(SHAPE, torch.float32, device), randn((8,), torch.float32, device)]
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert ours.result.dtype == eager.result.dtype
    close = slack * EPSILON[torch.float32]
    torch.testing.assert_close(ours.result, eager.result, rtol=close, atol=close)
    # Rounded on the way: what rounds at a tie may go either way by a last digit before it.
    step = 0.0 if not slack else 2.0**-8
    torch.testing.assert_close(ours.gradients[0], eager.gradients[0], rtol=step, atol=step)


@each_type
@pytest.mark.parametrize("wanted", TYPES, ids=lambda t: str(t).removeprefix("torch."))
def test_a_value_is_cast_to_the_type_of_another(dtype, wanted, device):
    x = randn(SHAPE, dtype, device).mul_(1e3).requires_grad_()
    like = torch.ones(
        1, dtype=wanted, device=device
    )  # of no shape that broadcasts with what is kept
    fused = fusegen.compile("type_as(like)")
    ours, eager = outcome(lambda t: fused(t, like), [x]), outcome(lambda t: t.type_as(like), [x])
    assert ours.result.dtype == wanted
    assert torch.equal(ours.result, eager.result)
    assert ours.gradients[0].dtype == dtype
    assert torch.equal(ours.gradients[0], eager.gradients[0])


def test_a_type_is_asked_for_anew_by_every_call(device):
    fused = fusegen.compile("mul(2) | type_as(like)")
    x = randn(SHAPE, torch.float32, device)
    for wanted in (torch.float32, torch.float16, torch.float64, torch.float16):
        like = torch.ones(3, dtype=wanted, device=device, requires_grad=True)
        result = fused(x, like)
        assert result.dtype == wanted
        assert not result.requires_grad
        assert torch.equal(result, (x * 2).to(wanted))
    with pytest.raises(ArgumentError, match=r"type_as\(like\): 'like' is bool, wanted one of"):
        fused(x, torch.ones(3, dtype=torch.bool, device=device))
    with pytest.raises(ArgumentError, match=r"type_as\(like\): 'like' is int64, wanted one of"):
        fused(x, torch.ones((), dtype=torch.int64, device=device))


def test_the_type_of_a_value_is_no_reason_to_cut(device):
    for text in (
        "keep(y) | to(float32) | flatten(1) | layernorm | type_as(y)",
        "keep(y) | to(float32) | max_pool2d(2) | add(1) | type_as(y)",
        "keep(y) | to(float32) | unflatten(1, (3, 1)) | gelu | type_as(y)",
    ):
        fused = fusegen.compile(text)
        x = randn((2, 3, 4, 8), torch.bfloat16, device)
        torch.testing.assert_close(fused(x), fused.reference(x))  # to 16 bits, as what both give
        assert len(fused._ways[0]) == 1, text


def test_an_operation_of_ones_own_may_ask_for_a_type(device):
    @fusegen.op
    def squared_in_type(x, other: fusegen.Typed):
        return fusegen.to.function(x * x, other)

    fused = fusegen.compile("keep(y) | to(float32) | squared_in_type(y)")
    x = randn(SHAPE, torch.bfloat16, device)
    assert torch.equal(fused(x), (x.float() * x.float()).bfloat16())
    assert torch.equal(fused.reference(x), fused(x))


def test_a_cast_of_a_condition_is_a_number(device):
    x = randn(SHAPE, torch.float32, device)
    fused = fusegen.compile("gt(0) | to(bfloat16)")
    assert torch.equal(fused(x), (x > 0).bfloat16())
    assert fused(x).dtype == torch.bfloat16


def test_second_derivatives_go_through_a_cast(device):
    x = randn((3, 4), torch.float32, device).requires_grad_()
    fused = fusegen.compile("tanh | to(float64) | sigmoid")

    def twice(function):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), x)[0]

    for ours, eager in zip(twice(fused), twice(fused.reference), strict=True):
        assert ours.dtype == eager.dtype
        torch.testing.assert_close(ours, eager, rtol=2e-6, atol=1e-7)


def test_a_cast_is_written_in_any_of_its_forms():
    wanted = fusegen.chain("gelu | to(bfloat16)")
    assert wanted == fusegen.chain("gelu | to('bfloat16')") == fusegen.chain(wanted.text)
    assert wanted == fusegen.gelu() | fusegen.to(torch.bfloat16)
    assert wanted == fusegen.gelu() | fusegen.to(dtype="bfloat16")
    assert wanted == fusegen.chain(lambda x: fusegen.to(fusegen.gelu(x), torch.bfloat16))
    assert wanted.operands == ()


@pytest.mark.parametrize("dtype", ["uint16", "half", "float8_e4m3fn"])
def test_a_type_that_a_chain_cannot_have_is_told(dtype):
    with pytest.raises(ChainError, match="dtype wants 'float16' or 'bfloat16' or 'float32'"):
        fusegen.chain(f"to({dtype})")


# Promotion.


@pytest.mark.parametrize(("first", "second"), list(itertools.product(TYPES, TYPES)), ids=str)
@pytest.mark.parametrize("shapes", [(SHAPE, SHAPE), (SHAPE, (3, 1, 1)), (SHAPE, ()), ((), SHAPE)])
def test_every_mix_of_types_promotes_as_in_eager(first, second, shapes, device):
    tensors = [randn(s, t, device) for s, t in zip(shapes, (first, second), strict=True)]
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile("mul(other) | tanh | add(other)")
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert ours.result.dtype == eager.result.dtype
    assert [g.dtype for g in ours.gradients] == [g.dtype for g in eager.gradients]
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    narrowest = max(EPSILON[first], EPSILON[second])
    for a, b in zip(ours.tensors, exact.tensors, strict=True):
        size = b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=16 * narrowest * size)


@pytest.mark.parametrize(
    "text",
    [
        "keep(y) | mul(a) | gt(0) | where(y, b)",
        "gt(0) | where(a, b)",
        "gt(0) | where(a, 0.5)",
        "gt(0) | where(1, 0.5) | mul(a) | add(b)",
        "keep(y) | mul(a) | recall(y) | add(b)",
        "keep(y) | mul(a) | add(b) | recall(y) | neg",
        "maximum(a) | minimum(b)",
        "addcmul(a, b)",
        "to(bfloat16) | mul(a) | add(b)",
        "mul(a) | to(float16) | add(b)",
    ],
)
def test_the_result_has_the_type_that_eager_gives(text, device):
    chain = fusegen.chain(text)
    for kinds in itertools.product(TYPES, repeat=3):
        x, a, b = (randn((2, 3), t, device) for t in kinds)
        given = {"a": a, "b": b}
        given = {name: given[name] for name in chain.operands}
        eager = fusegen.compile(chain).reference(x, **given)
        bound = fusegen.bind.bind(
            chain,
            ((2, 3), str(kinds[0]).removeprefix("torch.")),
            {n: ((2, 3), str(t.dtype).removeprefix("torch.")) for n, t in given.items()},
        )
        assert f"torch.{bound.dtype}" == str(eager.dtype), (text, kinds)


@pytest.mark.parametrize("other", TYPES, ids=str)
def test_numbers_and_tensors_without_axes_do_not_widen(other, device):
    x = randn(SHAPE, torch.bfloat16, device).requires_grad_()
    scale = randn((), other, device).requires_grad_()
    fused = fusegen.compile("mul(scale) | add(0.1) | gelu")
    ours, eager = outcome(fused, [x, scale]), outcome(fused.reference, [x, scale])
    assert ours.result.dtype == eager.result.dtype == torch.bfloat16
    assert ours.gradients[1].dtype == other
    torch.testing.assert_close(ours.result, eager.result, rtol=2e-2, atol=2e-2)


def test_fp32_operands_of_bf16_activations_are_read_as_they_are(device):
    source = fusegen.compile("mul_channel | gelu").source("cpp", "bfloat16")
    assert "bfloat16" in source
    x = randn(SHAPE, torch.bfloat16, device).requires_grad_()
    scale = randn((3,), torch.float32, device).requires_grad_()
    fused = fusegen.compile("mul_channel | gelu")
    ours, eager = outcome(fused, [x, scale]), outcome(fused.reference, [x, scale])
    assert ours.result.dtype == eager.result.dtype == torch.float32
    assert [g.dtype for g in ours.gradients] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(ours.result, eager.result, rtol=1e-5, atol=1e-5)


# quantize

QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")
LIMIT = {"int8": 128.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def same(ours, eager):
    return torch.equal(ours.double().nan_to_num(7e7), eager.double().nan_to_num(7e7))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("scale", [0.05, 1.0, 1e-3, 7.0])
def test_quantising_gives_the_bits_of_eager(dtype, scale, device):
    limit = LIMIT[dtype] * scale
    values = torch.cat(
        (
            torch.linspace(-1.2 * limit, 1.2 * limit, 5003),
            torch.randn(1001) * scale,
            torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-30]),
            (torch.arange(-130, 131) + 0.5) * scale,  # halves go to the even number
            # Every value of the type and the middle of neighbours.
            torch.arange(0x7F, dtype=torch.uint8).view(getattr(torch, dtype)).float() * scale,
        )
    )
    for kind in (torch.float32, torch.float64):
        x = values.to(device, kind)
        fused = fusegen.compile(f"quantize({scale}, {dtype})")
        # By a number, torch's GPU kernel multiplies with the reciprocal; its CPU kernel divides.
        ours, eager = fused(x), fused.reference(x.cpu()).to(device)
        assert ours.dtype == eager.dtype == getattr(torch, dtype)
        assert same(ours, eager)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_whole_chain_may_end_quantised(dtype, device):
    x = randn((2, 3, 6, 17), torch.float32, device).to(memory_format=torch.channels_last)
    bias = randn((3,), torch.float32, device)
    scale = randn((3, 1, 1), torch.float32, device).abs_() * 0.01 + 0.01
    fused = fusegen.compile(f"leaky_relu(0.1) | add_channel | quantize(scale, {dtype})")
    ours, eager = fused(x, bias, scale), fused.reference(x, bias, scale)
    assert ours.dtype == eager.dtype
    assert ours.stride() == x.stride()
    assert same(ours, eager)
    again = torch.empty_like(ours)
    assert same(fused(x, bias, scale, out=again), eager)
    rows = fusegen.compile(f"layernorm | quantize(0.05, {dtype})")
    near = (rows(x).double() - rows.reference(x).double()).abs()
    assert (near > 0).double().mean() < 0.01  # where a rounding goes the other way


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_activations_are_quantised_without_a_rounding_between(dtype, kind, device):
    x = randn((3, 1000), kind, device)
    fused = fusegen.compile(f"quantize(0.05, {dtype})")
    near = fused.reference(x.float()).double() - fused(x).double()
    # bf16's arithmetic is cut short where bf16 could not tell: seldom, a tie goes the other way.
    assert (near != 0).double().mean() < 0.01


def test_a_gradient_of_a_quantised_result_is_refused_before_anything_runs(device):
    x = randn((3, 4), torch.float32, device).requires_grad_()
    fused = fusegen.compile("gelu | quantize(0.1)")
    with pytest.raises(UnsupportedError, match=r"\(0.1\): a result of int8 has no gradient"):
        fused(x)
    with pytest.raises(UnsupportedError, match=r"torch.no_grad\(\)"):
        fused(x)
    with torch.no_grad():
        assert same(fused(x), fused.reference(x))
    assert same(fused(x.detach()), fused.reference(x.detach()))
    with pytest.raises(UnsupportedError, match="has no gradient"):
        fused.source("cpp", grad=True)
    assert "int8_t" in fused.source("cuda")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantize(0.1) | gelu", "gelu: got a value of int8, which only a result can be"),
        ("quantize(0.1) | keep(y) | recall(y) | neg", "neg: got a value of int8"),
    ],
)
def test_a_step_behind_quantising_is_told(text, message, device):
    with pytest.raises(ArgumentError, match=message):
        fusegen.compile(text)(randn((3, 4), torch.float32, device))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quantize(0)", "scale must be above 0 and finite, got 0"),
        ("quantize(-1)", "scale must be above 0"),
        ("quantize(inf)", "scale must be above 0 and finite, got inf"),
        ("quantize(0.1, dtype='int4')", "dtype wants 'int8' or 'float8_e4m3fn'"),
    ],
)
def test_a_wrong_scale_or_type_is_told(text, message):
    with pytest.raises(ChainError, match=message):
        fusegen.chain(text)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: torch.clamp(torch.round(x / s), -128, 127).to(torch.int8),
        lambda x, s: (x * s).clamp(-100, 100).to(dtype=torch.int8),
        lambda x, s: (x * s).clamp(-100, 100).round().to(torch.int8),
        lambda x, s: (x / s).clamp(-448, 448).to(torch.float8_e4m3fn),
        lambda x, s: (x / s).clamp(-57344, 57344).type(torch.float8_e5m2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_clamped_becomes_a_quantised_type_as_in_eager(function, dtype, device):
    x = torch.randn(37, 41, device=device, dtype=dtype) * 60
    scale = torch.tensor(0.25, device=device, dtype=dtype)  # by which each step is exact in bf16
    found, wanted = fusegen.compile(function)(x, scale), function(x, scale)
    assert found.dtype == wanted.dtype
    assert torch.equal(found.float(), wanted.float())
