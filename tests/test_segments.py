"""Where chains are cut, and that what passes the cuts is right."""

import re

import pytest
import torch
from numeric import has_right_second_derivatives

import fusegen
from fusegen.dsl import chain
from fusegen.errors import UnsupportedError
from fusegen.segments import bind_all, segments


def texts(text: str) -> list[str]:
    return [segment.chain.text for segment in segments(chain(text))]


@pytest.mark.parametrize(
    "text",
    [
        "gelu",
        "keep(y) | sigmoid | mul(y)",
        "keep(y) | layernorm(w) | add(y) | gelu",
        "mul(w) | max_pool2d(2)",
        "relu | max_pool2d(3, 2, 1) | add_channel | gelu",
        "gelu | adaptive_avg_pool2d(1) | sigmoid | mul_channel",
        "tanh | avg_pool2d(2) | mul(other)",
        "relu | max_pool2d(3, 1, 1)",
        # A mean of whole axes is no pooling by windows.
        "keep(y) | adaptive_avg_pool2d(1) | sigmoid | mul(y)",
        "mean((2, 3), keepdim=True) | adaptive_avg_pool2d(1) | softmax(1)",
        "squeeze(1) | max_pool2d(2) | unsqueeze(0)",
    ],
)
def test_what_can_be_one_kernel_is_one_segment(text: str) -> None:
    assert texts(text) == [chain(text).text]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("layernorm(w) | gelu | max_pool2d(2)", ["layernorm(w) | gelu", "max_pool2d(2)"]),
        ("max_pool2d(2) | gelu | layernorm", ["max_pool2d(2) | gelu", "layernorm"]),
        ("max_pool2d(2) | relu | avg_pool2d(2)", ["max_pool2d(2) | relu", "avg_pool2d(2)"]),
        # Nine times a function: it is computed once, and written.
        ("gelu | max_pool2d(3, 1, 1)", ["gelu", "max_pool2d(3, 1, 1)"]),
        # The same operand before and after would be of two shapes.
        ("mul(w) | max_pool2d(2) | mul(w)", ["mul(w) | max_pool2d(2)", "mul(w)"]),
        ("max_pool2d(2) | adaptive_avg_pool2d(1)", ["max_pool2d(2)", "adaptive_avg_pool2d(1)"]),
        ("adaptive_avg_pool2d(1) | avg_pool2d(1)", ["adaptive_avg_pool2d(1)", "avg_pool2d(1)"]),
        ("rms_norm | max_pool2d(2)", ["rms_norm", "max_pool2d(2)"]),
        ("group_norm(2) | max_pool2d(2)", ["group_norm(2)", "max_pool2d(2)"]),
        ("max_pool2d(2) | batch_norm(m, v)", ["max_pool2d(2) | batch_norm(m, v)"]),
        (
            "batch_norm(m, v, training=True) | max_pool2d(2)",
            ["batch_norm(m, v, training=True)", "max_pool2d(2)"],
        ),
        ("max_pool2d(2) | softmax(1)", ["max_pool2d(2)", "softmax(1)"]),
        # Groups within groups go together, those that cross do not.
        ("group_norm(2) | relu | group_norm(4)", ["group_norm(2) | relu | group_norm(4)"]),
        ("group_norm(3) | relu | group_norm(2)", ["group_norm(3) | relu", "group_norm(2)"]),
        # The value is in memory already, as x.
        (
            "keep(y) | max_pool2d(3, 1, 1) | sigmoid | mul(y)",
            ["keep(y) | max_pool2d(3, 1, 1) | sigmoid", "mul(y)"],
        ),
        # It has to be put there.
        (
            "tanh | keep(y) | gelu | layernorm | max_pool2d(3, 1, 1) | add(y)",
            ["tanh", "gelu | layernorm", "max_pool2d(3, 1, 1) | add(y)"],
        ),
        (
            "keep(y) | max_pool2d(2) | layernorm | recall(y) | avg_pool2d(2) | gelu",
            ["keep(y) | max_pool2d(2)", "layernorm", "avg_pool2d(2) | gelu"],
        ),
    ],
)
def test_a_chain_is_cut_where_it_must_be(text: str, parts: list[str]) -> None:
    assert texts(text) == parts


def test_every_cut_says_why() -> None:
    found = segments(chain("layernorm | max_pool2d(2) | gelu | avg_pool2d(2)"))
    assert found[0].reason == ""
    assert found[1].reason == "max_pool2d(2) takes its windows over the result of layernorm"
    assert found[2].reason == "avg_pool2d(2) takes its windows over the result of max_pool2d(2)"


def test_shapes_are_told_through_all_segments() -> None:
    parts = segments(chain("keep(y) | layernorm | max_pool2d(3, 2, 1) | layernorm(w)"))
    bounds = bind_all(parts, ((2, 3, 8, 9), "float32"), {"w": ((5,), "float32")})
    assert [b.result_shape for b in bounds] == [(2, 3, 8, 9), (2, 3, 4, 5), (2, 3, 4, 5)]


def test_a_later_segment_has_the_types_that_earlier_ones_leave() -> None:
    text = "to(float16) | avg_pool2d(3, 1) | keep(y) | max_pool2d(3, 1, 1) | add(y)"
    for target in ("cuda", "cpp"):
        source = fusegen.compile(text).source(target, "float32", grad=True, shape=(1, 1, 8, 8))
        banners = [line for line in source.splitlines() if "signature" in line]
        kinds = [re.findall(r"\bx (\w+)", line)[-1] for line in banners]
        assert kinds[0] == "float32"
        assert set(kinds[1:]) == {"float16"}


def test_a_mistake_in_a_later_segment_is_told_before_anything_runs() -> None:
    fused = fusegen.compile("layernorm | max_pool2d(2) | layernorm(w)")
    with pytest.raises(fusegen.ArgumentError, match=r"operand 'w' got shape \(9,\), wanted \(4,\)"):
        fused(torch.ones(2, 3, 8, 8), torch.ones(9))
    assert all(not part.plans for way in fused._parts for part in way)


def test_what_was_checked_once_is_not_checked_again(monkeypatch) -> None:
    fused = fusegen.compile("layernorm(w) | max_pool2d(2)")
    x, w = torch.randn(2, 3, 4, 8), torch.randn(8)
    trained = x.clone().requires_grad_()
    first = fused(x, w)
    fused(trained, w)

    def fail(*_: object) -> None:
        raise AssertionError("a call like one before looks into the chain again")

    with monkeypatch.context() as patch:
        patch.setattr("fusegen.runtime.check_all", fail)
        patch.setattr("fusegen.execution.Part.__call__", fail)
        torch.testing.assert_close(fused(x, w), first, rtol=0, atol=0)
        assert fused(trained, w).requires_grad
    # Another kind of tensor is looked at.
    with pytest.raises(fusegen.ArgumentError, match="wanted"):
        fused(x, w[:5])
    with pytest.raises(fusegen.ArgumentError, match="got ndarray"):
        fused(x.numpy(), w)
    with pytest.raises(fusegen.ArgumentError, match="argument 'out'"):
        fused(x, w, out=torch.empty(3))


def test_a_chain_that_throws_its_last_segment_away_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="leave out the steps that follow that value"):
        fusegen.compile("tanh | keep(y) | layernorm | max_pool2d(2) | recall(y)")


def test_what_follows_a_pooling_cannot_widen_its_axes() -> None:
    fused = fusegen.compile("max_pool2d(2) | add(other)")
    with pytest.raises(UnsupportedError, match="compile what follows as a chain of its own"):
        fused(torch.ones(1, 2, 2, 2), torch.ones(1, 2, 5, 5))


VALUES = {
    "tanh | keep(y) | layernorm(w) | max_pool2d(3, 1, 1) | add(y)": ((2, 3, 4, 5), [(5,)]),
    "keep(y) | avg_pool2d(2) | layernorm | keep(z) | recall(y) | max_pool2d(2) | mul(z)": (
        (2, 3, 4, 6),
        [],
    ),
    "keep(y) | gelu | adaptive_avg_pool2d(1) | sigmoid | mul(y)": ((2, 3, 4, 5), []),
    "mul(w) | max_pool2d(2) | mul(w)": ((2, 3, 4, 4), [(3, 1, 1)]),
    "layernorm(w, axis=1) | keep(y) | max_pool2d(2) | gelu | layernorm(v) | tanh": (
        (2, 3, 4, 6),
        [(3,), (3,)],
    ),
    "squeeze(1) | max_pool2d(2) | gelu | unsqueeze(0)": ((3, 1, 4, 6), []),
    "unsqueeze(2) | avg_pool2d((3, 2), 2, 1)": ((2, 3, 6), []),
    "max_pool2d(4) | squeeze((2, 3)) | mul(w) | tanh": ((2, 3, 4, 4), [(3,)]),
    "adaptive_avg_pool2d(1) | squeeze((2, 3)) | add(b) | softmax(1)": ((2, 3, 4, 5), [(3,)]),
    "group_norm(2, w) | gelu | max_pool2d(3, 2, 1) | softmax(1)": ((2, 4, 3, 3), [(4,)]),
    "group_norm(3, w) | gelu | group_norm(2, v) | tanh": ((2, 6, 3, 3), [(6,), (6,)]),
    "mean(1, keepdim=True) | avg_pool2d(2) | add(other)": ((2, 3, 4, 4), [(2, 5, 2, 2)]),
    "batch_norm(weight=w, bias=b, training=True) | max_pool2d(2) | amax(1)": (
        (2, 3, 4, 4),
        [(3,), (3,)],
    ),
}


@pytest.mark.parametrize("text", VALUES)
def test_values_and_gradients_pass_the_cuts(text: str) -> None:
    shape, operand_shapes = VALUES[text]
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, dtype=torch.float64) for s in (shape, *operand_shapes)]
    tensors = [t.requires_grad_() for t in tensors]
    result, wanted = fused(*tensors), fused.reference(*tensors)
    torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(wanted)
    found = torch.autograd.grad(result, tensors, cotangent)
    expected = torch.autograd.grad(wanted, tensors, cotangent)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert has_right_second_derivatives(fused, tensors)


def test_the_last_segment_writes_into_out() -> None:
    fused = fusegen.compile("max_pool2d(2) | layernorm | avg_pool2d(2) | relu")
    x = torch.randn(2, 3, 8, 8)
    out = torch.empty(2, 3, 2, 2)
    assert fused(x, out=out) is out
    torch.testing.assert_close(out, fused.reference(x))


def test_noise_and_running_statistics_go_with_segments() -> None:
    running = "running_mean, running_var, weight, bias, training=True, num_batches_tracked=n"
    fused = fusegen.compile(
        f"dropout(0.5) | batch_norm({running}) | max_pool2d(3, 2, 1) | dropout(0.5) | softmax(1)"
    )
    ours, eager = torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4)
    x = torch.randn(3, 4, 5, 6, requires_grad=True)
    torch.manual_seed(1)
    dropped = fusegen.compile("dropout(0.5)")(x)
    pooled = torch.nn.functional.max_pool2d(eager(dropped), 3, 2, 1)
    expected = torch.softmax(fusegen.compile("dropout(0.5)")(pooled), 1)
    torch.manual_seed(1)
    operands = (ours.running_mean, ours.running_var, ours.weight, ours.bias)
    result = fused(x, *operands, n=ours.num_batches_tracked)
    torch.testing.assert_close(result, expected)
    for name, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(name))
    cotangent = torch.randn_like(expected)
    (found,) = torch.autograd.grad(result, [x], cotangent)
    (wanted,) = torch.autograd.grad(expected, [x], cotangent)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_groups_of_channels_change_no_mask() -> None:
    x = torch.randn(2, 8, 5, 7)
    both, first = fusegen.compile("dropout(0.4) | group_norm(2)"), fusegen.compile("dropout(0.4)")
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(2)
        found = both(x.contiguous(memory_format=layout))
        torch.manual_seed(2)
        torch.testing.assert_close(found, torch.nn.functional.group_norm(first(x), 2))
