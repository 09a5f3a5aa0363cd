"""Chains that people really write, small: the result and every gradient against eager torch."""

import pytest
import torch
from numeric import assert_as_accurate, home_of_eager, outcome

import fusegen

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

_GATE = (
    "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(gate) | recall(y) | "
    "select(-2, 1) | mul(gate)"
)

_ROTARY = (
    "keep(y) | unflatten(-1, (2, -1)) | keep(h) | select(-2, 0) | keep(a) | recall(h) | "
    "select(-2, 1) | neg | stack(a, dim=-2) | flatten(-2) | mul(sin) | keep(r) | recall(y) | "
    "mul(cos) | add(r)"
)

# chain, the shape of x, the shapes of the operands
CHAINS = [
    ("leaky_relu(0.2) | add(p) | clamp(-1, 1) | gelu", (4, 8, 3, 5, 6), [(8, 1, 1, 1)]),
    ("layernorm(weight, bias) | gelu | mul(0.5)", (3, 6, 4, 5, 16), [(16,), (16,)]),
    (
        "leaky_relu(0.2) | mul(p) | leaky_relu(0.2) | max_pool3d(2)",
        (3, 6, 4, 6, 5),
        [(6, 1, 1, 1)],
    ),
    ("relu | add(p)", (4, 8, 7, 6), [(8, 1, 1)]),
    ("add(p) | clamp(0, 1) | mul(2) | clamp(0, 1) | div(2)", (4, 8, 7, 6), [(8, 1, 1)]),
    ("mish | mish", (4, 8, 7, 6), []),
    (_GATE, (3, 5, 24), []),
    (f"add(p) | {_GATE}", (3, 5, 64), [(64,)]),
    (f"{_GATE} | rms_norm(weight)", (3, 5, 64), [(32,)]),
    (f"layernorm(weight, bias) | {_GATE}", (3, 5, 64), [(64,), (64,)]),
    (_ROTARY, (2, 3, 7, 32), [(7, 32), (7, 32)]),
    ("layernorm(weight, bias) | select(1, 0)", (3, 5, 24), [(24,), (24,)]),
    ("log_softmax(-1) | mul(t) | sum(-1) | neg | mean", (7, 50), [(7, 50)]),
    ("cross_entropy(target)", (3, 7, 6, 5), [(3, 6, 5)]),
    ("log_softmax(-1) | keep(y) | exp | mul(y) | sum(-1) | neg", (7, 50), []),
    (
        "add(residual) | give(sum) | layernorm(weight, bias)",
        (3, 5, 24),
        [(3, 5, 24), (24,), (24,)],
    ),
    ("add(residual) | give(sum) | rms_norm(weight)", (3, 5, 24), [(3, 5, 24), (24,)]),
    ("relu | leaky_relu(0.01) | gelu | sigmoid | add(p)", (4, 8, 3, 5, 6), [(8, 1, 1, 1)]),
    (
        "add(p) | layernorm(weight, bias) | avg_pool3d(2) | gelu",
        (2, 6, 4, 6, 8),
        [(8,), (8,), (8,)],  # a p of one value would have the gradient 0: all of it cancels
    ),
    ("keep(y) | add(p) | add(y) | mul(y) | add(y)", (3, 6, 4, 5, 6), [(6, 1, 1, 1)]),
    ("add(second) | keep(y) | hardswish | mul(y)", (3, 6, 4, 5, 6), [(3, 6, 4, 5, 6)]),
    ("mul(p) | tanh | mul(q) | sigmoid", (4, 8, 3, 5, 6), [(8, 1, 1, 1)] * 2),
    ("gelu | group_norm(8, weight, bias)", (4, 16, 7, 6), [(16,), (16,)]),
    (
        "add(p) | mul(q) | sigmoid | group_norm(8, weight, bias)",
        (4, 16, 7, 6),
        [(16, 1, 1), (16, 1, 1), (16,), (16,)],
    ),
    ("silu | group_norm(4, weight, bias) | hardswish", (3, 8, 3, 5, 6), [(8,), (8,)]),
    (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | gelu | relu",
        (33, 20),
        [(20,)] * 4,
    ),
    (
        "softplus | tanh | keep(y) | mul(y) "
        "| batch_norm(running_mean, running_var, weight, bias, training=True)",
        (4, 8, 7, 6),
        [(8,)] * 4,
    ),
    (
        "keep(y) | tanh | mul(y) "
        "| batch_norm(running_mean, running_var, weight, bias, training=True)",
        (4, 8, 7, 6),
        [(8,)] * 4,
    ),
    ("instance_norm | div(2)", (4, 8, 7, 6), []),
    ("softmax(1) | add(p) | mul(2) | sigmoid", (4, 8, 7, 6), [(8, 1, 1)]),
    ("min(1, keepdim=True) | tanh | tanh", (4, 8, 7, 6), []),
    ("gelu | mean((2, 3))", (4, 8, 7, 6), []),
    ("gelu | mean((2, 3), keepdim=True)", (4, 8, 7, 6), []),
    ("logsumexp(1, keepdim=True) | leaky_relu | leaky_relu | gelu | gelu", (9, 130), []),
    (
        "keep(y) | sub(p) | mean(1, keepdim=True) | logsumexp(1, keepdim=True) | gelu | add(y)",
        (9, 130),
        [(130,)],
    ),
    ("max_pool3d(2) | logsumexp(1, keepdim=True) | relu", (2, 5, 4, 6, 6), []),
    (
        "keep(y) | group_norm(16, weight, bias) | tanh | hardswish | add(y) | logsumexp(1)",
        (3, 32, 4, 5),
        [(32,), (32,)],
    ),
    (
        "keep(y) | group_norm(16, weight, bias) | tanh | add(y) | logsumexp(1, keepdim=True)",
        (3, 32, 4, 5),
        [(32,), (32,)],
    ),
    ("max_pool2d(2) | hardtanh | mean((2, 3), keepdim=True) | tanh", (2, 8, 9, 8), []),
    ("min(2) | softmax(1)", (2, 8, 3, 5, 7), []),
    ("layernorm(weight, bias) | mean(1)", (3, 9, 64), [(64,), (64,)]),
    ("add(p) | layernorm(weight, bias)", (5, 7, 64), [(7, 64), (64,), (64,)]),
    (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | add(residual) | relu",
        (4, 8, 7, 6),
        [(8,)] * 4 + [(4, 8, 7, 6)],
    ),
    ("softmax(-1)", (9, 130), []),
    ("layernorm(weight, bias, axis=1)", (3, 8, 7, 6), [(8,), (8,)]),
    ("add(residual) | layernorm(weight, bias)", (3, 5, 64), [(3, 5, 64), (64,), (64,)]),
    ("rms_norm(weight) | silu | mul(second)", (3, 5, 64), [(64,), (3, 5, 64)]),
    (
        "batch_norm(running_mean, running_var, weight, bias) | add(residual) | relu",
        (4, 8, 7, 6),
        [(8,)] * 4 + [(4, 8, 7, 6)],
    ),
    ("silu | add(p) | group_norm(64, weight, bias)", (9, 512), [(512,)] * 3),
    ("layernorm | mul(scale) | add(shift)", (3, 9, 64), [(3, 1, 64)] * 2),
    ("hardswish | relu | softmax(1) | mean((2, 3, 4))", (2, 5, 3, 4, 6), []),
    (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | relu | max_pool2d(2)",
        (4, 8, 6, 8),
        [(8,)] * 4,
    ),
    (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | relu "
        "| max_pool2d(3, 2, 1)",
        (4, 8, 7, 12),
        [(8,)] * 4,
    ),
]
# Others, of several families each.
MIXED = [
    # What follows a maximum has no gradient, but its value is read in the backward.
    ("max_pool1d(2) | sign | mul(p)", (2, 3, 8), [(3, 4)]),
    ("max_pool2d(2) | gt(0) | where(a, 0)", (2, 3, 8, 8), [(4, 4)]),
    ("max(-1) | gt(0) | where(a, b)", (2, 3, 4), [(2, 3), (2, 3)]),
    ("layernorm | amax(-1) | gt(0) | where(a, b)", (2, 3, 4), [(2, 3), (2, 3)]),
    ("mean(2) | softmax(1)", (2, 3, 4, 3, 5), []),
    ("max(1) | add(wider)", (2, 5, 3, 1), [(4,)]),
    ("mul(0.125) | add(mask) | softmax(-1)", (3, 4, 5, 40), [(3, 1, 1, 40)]),
    ("softmax(1) | max_pool3d(2) | max_pool3d(2)", (2, 5, 4, 9, 8), []),
    (
        "div(2) | max_pool3d(2) | adaptive_avg_pool3d(1) | add(p) | sum(1)",
        (2, 3, 4, 6, 8),
        [(3, 1, 1, 1)],
    ),
    (
        "batch_norm(running_mean, running_var, weight, bias, training=True) | tanh | max_pool2d(2) "
        "| group_norm(4, w, b)",
        (3, 8, 9, 8),
        [(8,)] * 6,
    ),
    (
        "batch_norm(running_mean, running_var, weight, training=True) | keep(y) "
        "| mean((2, 3, 4), keepdim=True) | keep(m) | recall(y) | sub(m)",
        (3, 5, 2, 4, 6),
        [(5,)] * 3,  # a bias would have the gradient 0
    ),
    (
        "mean(2, keepdim=True) | add(p) | softmax(1) | tanh | mul(2)",
        (2, 5, 4, 6, 7),
        [(5, 1, 1, 1)],
    ),
    # Of more minima, the sums would be so far from 0 that gelu's gradient is mostly their rounding.
    ("min(1, keepdim=True) | sum(2, keepdim=True) | gelu | add(p)", (2, 8, 3, 6), [(1, 1, 1)]),
    ("group_norm(3, weight, bias) | silu | mul(p) | silu", (9, 36), [(36,)] * 3),
    ("avg_pool3d(2) | clamp(0, 1) | flatten(2) | softmax(2) | mul(p)", (2, 3, 4, 6, 8), [(3, 1)]),
    (
        "group_norm(8, weight, bias) | min(1, keepdim=True) | add(p)",
        (9, 64),
        [(64,), (64,), (1, 64, 1, 1)],
    ),
    ("mul(p) | instance_norm | clamp(-1, 1) | mul(p) | max(1)", (2, 8, 3, 5, 6), [(8, 1, 1, 1)]),
    ("group_norm(4, weight, bias) | mul(p) | max_pool2d(4)", (2, 8, 9, 8), [(8,), (8,), (8, 1, 1)]),
    ("group_norm(4, weight, bias) | relu | max_pool2d(3, 2, 1)", (3, 16, 11, 9), [(16,), (16,)]),
    (
        "group_norm(4) | gelu | max_pool2d(2) | group_norm(2, weight, bias)",
        (2, 8, 16, 18),
        [(8,)] * 2,
    ),
    (
        "group_norm(4, weight, bias) | silu | avg_pool2d(2) | mean(1)",
        (3, 16, 12, 10),
        [(16,), (16,)],
    ),
    ("layernorm(axis=1) | group_norm(4, weight, bias) | gelu", (3, 16, 9, 7), [(16,), (16,)]),
    ("softmax(1) | group_norm(2)", (3, 8, 9, 7), []),
    ("max_pool3d(2) | softmax(1) | sub(p) | silu | max(1)", (2, 8, 4, 6, 8), [(8, 1, 1, 1)]),
]
KINDS = {
    "fp64": (torch.float64, False),
    "fp32": (torch.float32, False),
    "fp32 channels_last": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
}
_KINDS = [pytest.param(k, marks=[pytest.mark.unoptimised] * (k != "fp32")) for k in KINDS]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    ("text", "shape", "operands"), CHAINS + MIXED, ids=[c[0] for c in CHAINS + MIXED]
)
def test_a_chain_is_as_accurate_as_eager(text, shape, operands, kind, device):
    fused = fusegen.compile(text)
    dtype, is_channels_last = KINDS[kind]
    if "avg_pool3d" in text and device == "cpu" and dtype in (torch.float16, torch.bfloat16):
        pytest.skip("torch has no avg_pool3d of 16 bits on CPUs to compare with")
    if is_channels_last and len(shape) not in _FORMATS:
        pytest.skip("has no channels_last")
    x = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    if is_channels_last:
        x = x.contiguous(memory_format=_FORMATS[len(shape)])
    tensors = [x.requires_grad_()]
    for name, size in zip(fused.chain.operands, operands, strict=True):
        values = torch.randn(size, dtype=torch.float64).to(device, dtype)
        made = {
            "running_mean": torch.zeros_like,
            "running_var": torch.ones_like,
            "target": lambda values: values.mul(1e3).long().abs() % shape[1],
        }
        tensors.append(made[name](values) if name in made else values.requires_grad_())
    home = home_of_eager(text, device, dtype)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors, device=home)
    exact = outcome(fused.reference, tensors, dtype=torch.float64, device=home)
    assert ours.result.shape == eager.result.shape
    assert ours.result.dtype == eager.result.dtype
    assert_as_accurate(ours, eager, exact)
