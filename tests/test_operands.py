"""Chains that compute from operands alone too, as gates and masks are made: against eager torch."""

import pytest
import torch
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen import (
    Mask,
    clamp,
    exp,
    gelu,
    group_norm,
    layernorm,
    log_softmax,
    logical_not,
    masked_fill,
    max_pool2d,
    mean,
    norm,
    select,
    sigmoid,
    silu,
    softmax,
    square,
    sum,
    tanh,
    unflatten,
    where,
)


def modulated(x, scale, shift):
    return layernorm(x) * (1 + scale) + shift


def film(x, scale, shift):
    return silu(group_norm(x, 4) * (1 + scale) + shift)


def gated(x, gate):
    return x * sigmoid(gate)


def noisy(x, noise, strength):
    return x + noise * strength


def kept_out(x, mask: Mask):
    return masked_fill(x, logical_not(mask), 0)


def chosen(x, mask: Mask):
    return where(mask, x, 0.0)


def averaged(x, mask):
    return sum(x * mask, 1) / sum(mask, 1)


def cosine(x, other):
    return sum(x * other, -1) / (norm(x, 2, -1) * norm(other, 2, -1))


def divergence(x, target):
    return sum(softmax(target, -1) * (log_softmax(target, -1) - log_softmax(x, -1)), -1)


def dice(x, target):
    both = sum(sigmoid(x) * target, (1, 2, 3))
    return (2 * both + 1) / (sum(sigmoid(x), (1, 2, 3)) + sum(target, (1, 2, 3)) + 1)


def latent(x, log_variance, noise):
    return x + exp(0.5 * log_variance) * noise


def latent_divergence(x, log_variance):
    return -0.5 * sum(1 + log_variance - square(x) - exp(log_variance), -1)


def generalised_mean(x, power):
    return mean(clamp(x, 1e-6) ** power, (2, 3)) ** (1 / power)


def recurrent(x, hidden, before):
    x, hidden = unflatten(x, 1, (3, -1)), unflatten(hidden, 1, (3, -1))
    reset = sigmoid(select(x, 1, 0) + select(hidden, 1, 0))
    update = sigmoid(select(x, 1, 1) + select(hidden, 1, 1))
    new = tanh(select(x, 1, 2) + reset * select(hidden, 1, 2))
    return (1 - update) * new + update * before


def added(x, other):
    return x + layernorm(gelu(other))


def both_pooled(x, other):
    return max_pool2d(x, 2) + max_pool2d(other, 2)


def gated_pooled(x, gate):
    return max_pool2d(x, 2) * sigmoid(gate)


def widened(x, other):
    return x * exp(other)


def biased(x, bias, mask):
    return softmax(x * 0.2 + 16 * sigmoid(bias) + mask, -1)


def gate_of_means(x, gate):
    return sigmoid(gate) * mean(x, 1)


FUNCTIONS = [
    (modulated, (4, 6, 32), [(4, 1, 32), (4, 1, 32)]),
    (film, (2, 8, 6, 6), [(2, 8, 1, 1), (2, 8, 1, 1)]),
    (gated, (2, 8, 6, 6), [(2, 8, 1, 1)]),
    (noisy, (2, 8, 6, 6), [(2, 1, 6, 6), (8, 1, 1)]),
    (noisy, (2, 8, 6, 6), [(8, 1, 1), (2, 1, 6, 6)]),
    (kept_out, (4, 5), [(4, 5)]),
    (chosen, (4, 5, 3), [(5, 1)]),
    (averaged, (4, 7, 5), [(4, 7, 1)]),
    (cosine, (4, 16), [(4, 16)]),
    (divergence, (4, 9), [(4, 9)]),
    (dice, (3, 2, 4, 4), [(3, 2, 4, 4)]),
    (latent, (4, 8), [(4, 8), (4, 8)]),
    (latent_divergence, (4, 8), [(4, 8)]),
    (generalised_mean, (2, 3, 4, 4), [(1,)]),
    (recurrent, (4, 24), [(4, 24), (4, 8)]),
    (added, (4, 8), [(4, 8)]),
    (added, (4, 8), [(8,)]),
    (both_pooled, (2, 3, 8, 8), [(2, 3, 8, 8)]),
    (gated_pooled, (2, 3, 8, 8), [(2, 3, 4, 4)]),
    (widened, (8, 1), [(8, 16)]),
    (biased, (2, 3, 8, 8), [(3, 8, 8), (2, 1, 8, 8)]),
    (gate_of_means, (4, 7, 5), [(4, 5)]),
    (gate_of_means, (5, 5, 5), [(5, 5)]),
]


@pytest.mark.parametrize("kind", ["fp64", "fp32", "channels_last", "bf16"])
@pytest.mark.parametrize(
    ("function", "shape", "operands"), FUNCTIONS, ids=[f"{f.__name__}-{o}" for f, _, o in FUNCTIONS]
)
def test_a_function_computes_from_its_operands_too(function, shape, operands, kind, device):
    torch.manual_seed(1)
    fused = fusegen.compile(function)
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(kind, torch.float32)
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    if kind == "channels_last":
        if x.dim() != 4:
            pytest.skip("has no channels_last")
        x = x.contiguous(memory_format=torch.channels_last)
    tensors = [x.requires_grad_()]
    for name, size in zip(fused.chain.operands, operands, strict=True):
        values = torch.randn(size, dtype=torch.float64).to(device, dtype)
        is_mask = name == "mask" and function is not averaged and function is not biased
        values = values > 0 if is_mask else values
        # Weights of what is averaged, and exponents, are not near 0.
        values = values.abs() + 1 if name in ("power", "mask") and not is_mask else values
        tensors.append(values if is_mask else values.requires_grad_())
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert ours.result.shape == eager.result.shape
    assert ours.result.dtype == eager.result.dtype
    assert_as_accurate(ours, eager, exact)


def test_the_text_says_where_a_chain_goes_on_with_an_operand() -> None:
    chain = fusegen.chain(modulated)
    assert chain.text == "layernorm | keep(y) | operand(scale) | add(1) | mul(y) | add(shift)"
    assert chain.given == ("scale", "shift")
    assert fusegen.chain(chain.text) == chain
    written = fusegen.layernorm() | fusegen.keep("a") | fusegen.operand("scale") | fusegen.add(1)
    assert written | fusegen.mul("a") | fusegen.add("shift") == chain


def test_what_is_computed_from_operands_has_their_type() -> None:
    fused = fusegen.compile("keep(y) | operand(g) | sigmoid | mul(y)")
    x = torch.randn(4, 6).bfloat16()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert fused(x, torch.randn(4, 1, dtype=dtype)).dtype == torch.promote_types(x.dtype, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        result = fusegen.compile("keep(y) | operand(g) | max_pool3d(1) | mul(y)")
        g = torch.randn(1, 2, 2, 2).bfloat16()
        assert result(g, g).dtype == torch.float32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep(y) | operand(y) | mul(y)", "operand(y): y is a kept value; go on with it by recall"),
        ("operand | gelu", "operand takes one name, as in operand(y)"),
        ("takes | add", "takes takes names, as in takes(weight, bias)"),
        ("takes(3) | add", "takes takes names, as in takes(weight, bias)"),
        ("takes(a) | add(b)", "takes(a): no step uses an operand a"),
        ("keep(y) | takes(y) | mul(y)", "takes(y): no step uses an operand y"),
        ("takes(x) | gelu", "an operand cannot be called 'x'"),
        ("operand(x) | gelu", "an operand cannot be called 'x'"),
    ],
)
def test_what_an_operand_step_cannot_name_is_told(text: str, message: str) -> None:
    with pytest.raises(fusegen.ChainError) as caught:
        fusegen.chain(text)
    assert message in str(caught.value)


def test_an_operand_that_fits_nowhere_is_told_before_anything_is_launched() -> None:
    fused = fusegen.compile("keep(y) | operand(g) | sigmoid | mul(y)")
    with pytest.raises(fusegen.ArgumentError) as caught:
        fused(torch.randn(4, 6), torch.randn(5, 1))
    assert "operand 'g' got shape (5, 1), which does not broadcast" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "takes(scale, shift) | add(shift) | layernorm | mul(scale)",
        "takes(scale, shift) | add(shift) | max_pool2d(2) | gelu | avg_pool2d(2) | mul(scale)",
        "takes(scale, shift) | keep(y) | operand(shift) | sigmoid | mul(y) | mul(scale)",
    ],
)
def test_operands_come_in_the_order_that_is_listed(text: str, device: str) -> None:
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, device=device) for s in ((2, 3, 8, 8), (3, 1, 1), (1, 8, 8))]
    tensors = [t.requires_grad_() for t in tensors]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert_as_accurate(ours, eager, outcome(fused.reference, tensors, dtype=torch.float64))
    x, scale, shift = (t.detach() for t in tensors)
    assert torch.equal(fused(x, shift=shift, scale=scale), fused(x, scale, shift))


@pytest.mark.parametrize("target", ["cpp", "cuda"])
@pytest.mark.parametrize(
    "text",
    [
        "keep(y) | operand(g) | sigmoid | mul(y)",
        "keep(y) | operand(m) | where(y, 0)",
        "keep(y) | operand(m) | logical_not | keep(k) | recall(y) | masked_fill(k, 0)",
    ],
)
def test_a_text_alone_tells_what_its_operands_are(text: str, target: str) -> None:
    """As the command has nothing but that."""
    assert fusegen.compile(text).source(target, grad=True)


@pytest.mark.parametrize(
    "text",
    [
        "keep(y) | mean((0, 2, 3)) | keep(m) | recall(y) | sub_channel(m)",
        "keep(y) | amax((0, 2, 3), keepdim=True) | keep(m) | recall(y) | div_channel(m)",
        "keep(y) | mean((0, 1, 2)) | keep(m) | recall(y) | layernorm(m)",
    ],
)
def test_a_kept_value_may_be_one_for_each_channel(text: str, device: str) -> None:
    fused = fusegen.compile(text)
    x = [torch.randn(2, 3, 4, 5, device=device).add(2).requires_grad_()]
    exact = outcome(fused.reference, x, dtype=torch.float64)
    assert_as_accurate(outcome(fused, x), outcome(fused.reference, x), exact)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep(y) | add_channel(y)", r"'y' got shape \(2, 4, 4, 6\), wanted \(4,\)"),
        ("keep(k) | div_channel(k, axis=2)", r"'y' got shape \(2, 4, 4, 6\), wanted \(4,\)"),
        ("keep(k) | prelu(k)", r"'y' got shape \(2, 4, 4, 6\), wanted \(1,\)"),
    ],
)
def test_a_kept_value_that_is_none_for_each_channel_is_told(text: str, message: str) -> None:
    with pytest.raises(fusegen.ArgumentError, match=message):
        fusegen.compile(text)(torch.randn(2, 4, 4, 6))
