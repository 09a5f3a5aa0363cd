"""Places along an axis: what is selected is right before and behind all else, and read where it is
on a CPU.
"""

import re

import pytest
import torch
from numeric import home_of_eager, outcome
from test_emulation import GLU, SWIGLU

import fusegen
from fusegen.describe import Situation, sources
from fusegen.explain import explain

TWO = "keep(y) | select(1, 2) | gelu | keep(a) | recall(y) | select(1, -1) | mul(a) | mean(1)"
THREE = "tanh | select(1, -1) | select(2, -1) | select(1, -1)"
CHAINS = {
    SWIGLU: [(4, 6, 32)],
    GLU: [(4, 6, 8, 5)],
    "gelu | select(1, 2)": [(4, 6, 8)],
    "add(p) | select(-1, 7) | tanh": [(4, 6, 8), (6, 8)],
    "select(0, 1, keepdim=True) | mul(p)": [(4, 6), (1, 6)],
    "select(1, 2) | select(1, 3)": [(4, 6, 8)],
    THREE: [(3, 5, 1, 16)],
    # Behind reductions over that axis, which go over all of it.
    "layernorm(axis=1) | select(1, 0)": [(4, 6, 8)],
    "softmax(0) | select(0, 1) | softmax(0)": [(4, 8)],
    "batch_norm(training=True) | select(0, 1, keepdim=True) | add_channel(p)": [(4, 6, 8), (6,)],
    "group_norm(2) | select(2, 3) | gelu": [(4, 6, 8)],
    "gelu | rms_norm | select(-1, 5) | give(g)": [(4, 6, 8)],
    # Beside what has all of the axis.
    "tanh | give(whole) | select(1, 2) | gelu": [(4, 6, 8)],
    "keep(y) | select(1, 2, keepdim=True) | mul(y)": [(4, 6, 8)],
    "select(1, 2) | mean(1)": [(4, 6, 8)],
    "max_pool2d(2) | select(1, 2) | tanh": [(4, 6, 8, 8)],
    "select(1, 2) | softmax(1) | avg_pool2d(2)": [(4, 6, 8, 8)],
    "max(2) | select(1, 2)": [(4, 6, 8)],
    # With all of the axis in the kernel: two places are read, or packs would begin anywhere.
    TWO: [(4, 6, 8)],
    "rms_norm | select(1, 2)": [(4, 6, 7)],
    # Of rows that are otherwise not looked at.
    "layernorm(w, b) | select(1, 0)": [(4, 6, 8), (8,), (8,)],
    "add(p) | rms_norm(w) | select(1, -1) | gelu": [(4, 6, 8), (4, 6, 8), (8,)],
    "masked_fill(m, 2) | softmax(-1) | select(1, 3, keepdim=True) | mul(q)": [
        (4, 6, 8),
        (4, 6, 8),
        (4, 1, 8),
    ],
    "masked_fill(m, 0.5) | softmax(-1) | select(1, 3)": [(4, 6, 16), (4, 6, 16)],
    "instance_norm | select(0, 1) | select(0, 3)": [(4, 6, 8, 8)],
    # From the end.
    "gelu | select(1, -1)": [(4, 6, 8)],
    "add(p) | select(-1, -8) | tanh": [(4, 6, 8), (6, 8)],
    "layernorm(axis=1) | select(1, -2, keepdim=True) | gelu": [(4, 6, 8)],
    "tanh | give(whole) | select(0, -1) | gelu": [(4, 6, 8)],
    "max_pool2d(2) | select(2, -1)": [(4, 6, 8, 8)],
    "avg_pool2d(3, 2, 1) | select(1, -2)": [(4, 6, 8, 8)],
    SWIGLU.replace("-2, 0)", "-2, -2)").replace("-2, 1)", "-2, -1)"): [(4, 6, 32)],
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "gaps"])
@pytest.mark.parametrize("chain", CHAINS)
def test_what_is_selected_is_right(chain, layout, device):
    fused = fusegen.compile(chain)
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in CHAINS[chain]]
    tensors = [t > 0 if "(m" in chain and i == 1 else t for i, t in enumerate(tensors)]
    if layout == "channels_last":
        if tensors[0].dim() != 4:
            pytest.skip("has no channels_last")
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    if layout == "gaps":
        tensors[0] = torch.cat([tensors[0]] * 2, 1)[:, : tensors[0].shape[1]]
    tensors = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    home = home_of_eager(chain, device, torch.float64)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors, device=home)
    assert ours.names == eager.names
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_what_is_selected_of_a_dropout_is_a_part_of_it(device):
    x = torch.randn(4, 6, 8, device=device)
    torch.manual_seed(0)
    whole = fusegen.compile("dropout(0.5)")(x)
    torch.manual_seed(0)
    assert torch.equal(fusegen.compile("dropout(0.5) | select(1, 2)")(x), whole[:, 2])


@pytest.mark.parametrize(
    "chain",
    [SWIGLU, GLU, TWO],
)
def test_on_a_cpu_two_places_are_read_where_they_are(chain):
    text = fusegen.compile(chain).source("cpp", shape=CHAINS[chain][0])
    assert "x_at_" in text
    assert "position_along" not in text


def test_on_a_cpu_what_stands_at_one_place_is_added_up_as_it_is():
    """Beside it there are only zeros: a double is for sums of many."""
    (source,) = sources(fusegen.chain(SWIGLU), "cpp", Situation((4, 512)), grad=True)
    assert source.text.count("SumLanes<kLine, float>") == 2
    (source,) = sources(fusegen.chain("softmax(1)"), "cpp", Situation((4, 6, 8)), grad=True)
    assert "SumLanes<kLine>" in source.text


def test_a_reduction_of_the_axis_goes_over_all_of_it():
    text = fusegen.compile("layernorm(axis=1) | select(1, 2)").source("cpp", shape=(4, 6, 8))
    assert "x_at_2" in text
    assert "moments" in text.lower()


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("chain", ["gelu | select(1, -1)", "layernorm | select(1, -1) | relu"])
def test_of_an_input_that_is_read_at_one_place_no_more_is_read(chain, is_aligned, device):
    memory = torch.full((4 * 6 * 64 + 1,), torch.nan, device=device)
    x = memory[0 if is_aligned else 1 :][: 4 * 6 * 64].view(4, 6, 64)
    x[:, -1] = torch.randn(4, 64, device=device)
    fused = fusegen.compile(chain)
    alone = x[:, -1:].clone()
    ours, eager = (
        outcome(f, [t.requires_grad_()]) for f, t in ((fused, x), (fused.reference, alone))
    )
    torch.testing.assert_close(ours.result, eager.result)
    torch.testing.assert_close(ours.gradients[0][:, -1:], eager.gradients[0])
    assert not ours.gradients[0][:, :-1].any()
    with torch.no_grad():
        torch.testing.assert_close(fused(x.detach()), eager.result)
        home = torch.empty_like(eager.result)
        torch.testing.assert_close(fused(x.detach(), out=home), eager.result)


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_its_source_is_that_of_a_tensor_with_gaps(target):
    text = fusegen.compile("layernorm | select(1, -1)").source(target, shape=(4, 6, 64))
    assert "Pitched" in text
    assert "position_along" not in text


def test_rows_of_one_pack_have_places_too():
    text = fusegen.compile(THREE).source("cuda", shape=(3, 5, 1, 16))
    assert re.search(r"^forward_row\(", text, re.MULTILINE)


@pytest.mark.parametrize("target", ["cpp", "cuda"])
@pytest.mark.parametrize("chain", ["layernorm(w, b) | select(1, 0)", "rms_norm | select(1, -1)"])
def test_its_gradient_is_that_of_its_rows_and_then_spread(chain, target):
    told = explain(fusegen.chain(chain), target, Situation((4, 6, 64)), 1.0)
    back = re.findall(r"^  backward_(\w+):", told, re.MULTILINE)
    assert back == ["row", *["finalise"] * ("(w" in chain), "pointwise"]


def test_the_last_of_any_number_builds_nothing_anew(device, monkeypatch):
    fused = fusegen.compile("gelu | select(1, -1)")
    fused(torch.randn(2, 5, 8, device=device))
    monkeypatch.setattr("fusegen.execution.load", None)
    for length in (3, 7, 9):
        x = torch.randn(2, length, 8, device=device)
        torch.testing.assert_close(fused(x), torch.nn.functional.gelu(x[:, -1]))


@pytest.mark.parametrize("index", [-1, 1 << 24])
def test_a_place_that_a_float_cannot_count_is_refused(index):
    x = torch.ones(1).expand((1 << 24) + 9)
    fused = fusegen.compile(f"keep(y) | select(0, {index}, keepdim=True) | mul(y)")
    with pytest.raises(fusegen.UnsupportedError, match=r"select.*found among the first 16777216"):
        fused(x)
    assert fusegen.compile(f"select(0, {index})")(x) == 1
