"""Rows of few elements on a CPU: several of them are in a line."""

import pytest
import torch
from numeric import outcome

import fusegen
from fusegen import holding

_GATE = "unflatten(-1, (-1, 2)) | keep(y) | select(-1, 0) | keep(a) | recall(y) | select(-1, 1)"
# chain, the shape of x, the operands' shapes
CASES = [
    ("mul(c) | gelu", (5, 7, 3, 2), [(7, 3, 1)]),
    ("mul(c) | add(d) | tanh", (5, 7, 3, 2), [(7, 3, 1), (5, 1, 1, 2)]),
    ("add(a) | mul(b)", (37, 3), [(3,), (37, 1)]),
    ("keep(y) | mul(a) | exp | sub(y)", (11, 13, 5), [(11, 1, 5)]),
    ("mul(c)", (700, 15), [(15,)]),
    ("softmax(-1)", (211, 3), []),
    ("log_softmax(-1) | mul(t)", (5, 61, 4), [(5, 61, 4)]),
    ("layernorm(weight, bias) | gelu", (301, 7), [(7,), (7,)]),
    ("rms_norm(weight) | mul(a)", (5, 61, 4), [(4,), (61, 1)]),
    ("amax(-1)", (613, 4), []),
    ("sum(-1) | sigmoid", (5, 123, 2), []),
    ("var(-1, keepdim=True) | add(a)", (5, 123, 3), [(123, 1)]),
    ("keep(y) | mean(-1, keepdim=True) | keep(m) | recall(y) | sub(m) | mul(a)", (99, 6), [(6,)]),
    ("max(-1) | mul(2)", (5, 123, 3), []),
    ("logsumexp(-1) | mean", (5, 123, 3), []),
    ("norm(2, -1, keepdim=True) | add(a)", (123, 3), [(123, 1)]),
    (f"{_GATE} | mul(a)", (7, 9, 8), []),
    (f"{_GATE} | mul(sin) | rsub(a) | stack(a, dim=-1) | flatten(-2)", (7, 9, 8), [(9, 4)]),
]


@pytest.fixture(autouse=True)
def few_suffice(monkeypatch):
    """As if there were many of such rows."""
    monkeypatch.setattr(holding, "_LEAST_SHORT", 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("text", "shape", "operands"), CASES, ids=[c[0] for c in CASES])
def test_short_rows_come_out_as_in_eager(text, shape, operands, dtype):
    fused = fusegen.compile(text)
    torch.manual_seed(7)
    wide = [torch.randn(s, dtype=torch.float64) for s in (shape, *operands)]
    tensors = [t.to(dtype).requires_grad_() for t in wide]
    found, wanted = outcome(fused, tensors), outcome(fused.reference, tensors)
    tolerance = 1e-11 if dtype == torch.float64 else 64 * torch.finfo(dtype).eps
    pairs = zip(
        (*found.results, *found.gradients), (*wanted.results, *wanted.gradients), strict=True
    )
    for own, theirs in pairs:
        scale = theirs.abs().max().clamp_min(1).item()
        torch.testing.assert_close(own, theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("grad", [False, True])
def test_short_rows_go_side_by_side(grad):
    few = fusegen.compile("softmax(-1) | mul(c)").source(
        "cpp", shape=(64, 300, 4), operands={"c": (300, 1)}, grad=grad
    )
    assert "gather<" in few
    assert "scatter<" in few
    many = fusegen.compile("softmax(-1) | mul(c)").source(
        "cpp", shape=(64, 300, 40), operands={"c": (300, 1)}, grad=grad
    )
    assert "gather<" not in many
