"""Masks, casts and mixed types around reductions and norms: values, gradients and types."""

import pytest
import torch
from numeric import outcome

import fusegen
from fusegen.errors import ArgumentError

X = (4, 6, 5)
# chain, shapes of the operands after x; m is a mask, and the types of the others are as in training
CASES = {
    "a masked softmax": ("masked_fill(m, -inf) | softmax(1)", [X]),
    "a masked sum": ("masked_fill(m, 0) | sum(1) | relu6", [X]),
    "a mask by position": ("masked_fill(m, 0) | mean((0, 2)) | mish", [(6, 1)]),
    "a kept value and a mask": (
        "keep(y) | mean(1, keepdim=True) | rsub(y) | masked_fill(m, 0) | norm(2, 1)",
        [X],
    ),
    "a condition reduced": ("keep(y) | gt(0) | where(y, 0.1) | logsumexp(1)", []),
    "a condition with one more axis": ("gt(0) | unsqueeze(1) | where(y, 0.5) | sum(0)", [X]),
    "a sum in double": ("to(float64) | sum(1) | tanh", []),
    "statistics in double": ("to(float64) | layernorm | to(float32) | mul(2)", []),
    "softmax between casts": ("to(float32) | softmax(-1) | to(bfloat16)", []),
    "groups and slopes": ("group_norm(2) | prelu(s)", [(6,)]),
    "a batch and a cast": ("batch_norm(training=True) | to(float32) | amax(1) | mul(o)", [(5,)]),
}


def tensors_of(case, dtype, device):
    text, shapes = CASES[case]
    torch.manual_seed(5)
    found = [torch.randn(X, dtype=torch.float64)]
    for name, shape in zip(fusegen.chain(text).operands, shapes, strict=True):
        drawn = torch.randn(shape, dtype=torch.float64)
        if name == "m":
            drawn = drawn > 0.3
            if shape == X:
                drawn[:, 0] = False  # softmax of nothing but -inf is NaN
        found.append(drawn)
    kinds = [t if t.dtype == torch.bool else t.to(dtype).requires_grad_() for t in found]
    return text, [t.to(device).detach().requires_grad_(t.requires_grad) for t in kinds]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 4e-2)],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_types_are_eagers(case, dtype, tolerance, device):
    text, tensors = tensors_of(case, dtype, device)
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    # A result that is rounded on its way is no better than that.
    tolerance = max(tolerance, 4e-2 if "bfloat16" in text else 2e-5 if "to(float32)" in text else 0)
    for mine, theirs in zip(ours.tensors, eager.tensors, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_statistics_of_a_double_are_kept_in_double(device):
    torch.manual_seed(3)
    x = torch.randn(3, 400, device=device).requires_grad_()
    x = (x * 1e-6 + 1000).detach().requires_grad_()
    fused = fusegen.compile("to(float64) | layernorm(eps=1e-20) | sin")
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    torch.testing.assert_close(ours.result, eager.result)
    torch.testing.assert_close(ours.gradients, eager.gradients)


@pytest.mark.parametrize(
    "text",
    [
        "mean",
        "var(1)",
        "amax(1)",
        "max(1)",
        "softmax(1)",
        "norm",
        "rms_norm",
        "group_norm(2)",
        "batch_norm(training=True)",
        "instance_norm",
        "normalize",
        "logsumexp(1)",
    ],
)
@pytest.mark.parametrize("before", ["", "gt(0) | "])
def test_conditions_are_counted_and_not_reduced_else(text, before, device):
    x = torch.randn(X, device=device)
    with pytest.raises(ArgumentError, match="got conditions"):
        fusegen.compile(before + text)(x if before else x > 0)


@pytest.mark.parametrize(
    "text",
    ["batch_norm(m, v)", "batch_norm(m, v, training=True)", "instance_norm(m, v)"],
)
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float64], ids=str)
def test_running_statistics_have_the_values_type_or_fp32(text, kind, device):
    x = torch.randn(X, device=device)
    statistics = [torch.ones(6, device=device).to(kind) for _ in range(2)]
    with pytest.raises(ArgumentError):
        fusegen.compile(text)(x, *statistics)
