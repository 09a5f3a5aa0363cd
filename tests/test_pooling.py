"""Pooling of every kind against torch's own: values, shapes, ties, NaN, gradients."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numeric import EPSILON, has_right_second_derivatives, outcome

import fusegen
from fusegen.errors import ArgumentError
from fusegen.windowing import Slide, adaptive, sliding

# chain, x's shape, the operands' shapes
CASES = [
    # Tiles, with work before and after in one kernel.
    ("max_pool2d(2) | gelu", (2, 3, 4, 6), []),
    ("mul_channel | max_pool2d(2) | tanh | add_channel", (2, 3, 4, 7), [(3,), (3,)]),
    ("avg_pool2d(2)", (2, 3, 4, 6), []),
    (
        "tanh | mul_channel | avg_pool2d(2) | sigmoid | mul(other)",
        (2, 3, 5, 6),
        [(3,), (2, 3, 2, 3)],
    ),
    ("avg_pool3d((1, 2, 3)) | mul(other)", (1, 2, 3, 4, 7), [(2, 2, 1, 1, 1)]),
    ("sigmoid | avg_pool1d(3) | exp", (2, 3, 8), []),
    ("max_pool1d(2) | exp", (3, 8), []),
    # Gradients that are the same for all windows, and none where no window is.
    ("avg_pool2d(2) | mean((2, 3))", (2, 3, 5, 7), []),
    ("avg_pool2d(2) | mean((2, 3))", (2, 3, 4, 6), []),
    ("avg_pool2d(2) | sum(2)", (2, 3, 5, 6), []),
    ("add_channel | avg_pool2d(2) | mean(3, True)", (2, 3, 4, 7), [(3,)]),
    ("add(w) | avg_pool2d(2) | mean((0, 2, 3)) | tanh", (2, 3, 5, 4), [(5, 4)]),
    ("avg_pool3d(2) | mean", (1, 2, 5, 4, 5), []),
    # Windows that overlap, leave gaps or cross the edge.
    ("max_pool2d(2) | maximum(w)", (2, 3, 4, 6), [(3, 1, 1)]),
    ("max_pool2d(3, 2, 1)", (2, 3, 7, 8), []),
    ("max_pool2d(3, 2, 1) | maximum(w)", (2, 3, 7, 8), [(3, 1, 1)]),
    ("tanh | max_pool2d(3, 2, 1)", (2, 3, 7, 8), []),
    ("mul_channel | max_pool2d(3, 2, 1) | gelu | add_channel", (2, 3, 7, 8), [(3,), (3,)]),
    ("mul(w) | max_pool2d(3, 2, 1)", (2, 2, 5, 6), [(5, 6)]),
    ("mul(w) | max_pool2d(3, 2, 1)", (2, 2, 5, 6), [(5, 1)]),
    ("mul(w) | avg_pool2d(3, 2, 1, count_include_pad=False)", (2, 2, 5, 6), [(5, 1)]),
    ("mul(w) | avg_pool2d(3, 2, 1, count_include_pad=False)", (1, 2, 5, 6), [(2, 2, 5, 6)]),
    ("tanh | avg_pool2d(3, 2, 1, True, False) | gelu | mul(other)", (2, 2, 6, 6), [(2, 2, 4, 4)]),
    ("avg_pool2d(3, 2, 1, True, True) | gelu", (2, 2, 6, 6), []),
    ("avg_pool2d(2, 3) | tanh", (2, 2, 7, 8), []),
    ("addcmul(u, v) | avg_pool2d((2, 1), None, (1, 0))", (2, 8, 3), [(2, 8, 1), (2, 8, 3)]),
    ("max_pool2d((2, 3), (1, 2), (1, 0), (2, 1), True)", (2, 2, 6, 6), []),
    ("max_pool3d(3, 2, 1) | layernorm", (1, 2, 4, 5, 9), []),
    ("max_pool1d(3, 2, 1)", (2, 3, 7), []),
    # Parts.
    ("adaptive_avg_pool2d((3, 2)) | tanh", (2, 2, 7, 5), []),
    ("adaptive_avg_pool2d(5)", (2, 2, 3, 4), []),
    ("adaptive_max_pool2d((3, 2)) | tanh", (2, 2, 7, 5), []),
    ("adaptive_avg_pool1d(4) | exp", (2, 2, 6), []),
    ("adaptive_max_pool3d((1, 2, 2))", (1, 2, 3, 4, 3), []),
    ("adaptive_avg_pool2d(1) | tanh", (2, 2, 7, 5), []),
    ("adaptive_avg_pool2d((None, 2)) | tanh", (2, 2, 7, 5), []),
    ("adaptive_avg_pool2d((1, None)) | tanh", (2, 2, 7, 5), []),
    ("adaptive_max_pool3d((None, 1, 2))", (1, 2, 3, 4, 3), []),
    (
        "gelu | mul_channel | adaptive_avg_pool2d(1) | sigmoid | add_channel",
        (2, 2, 7, 5),
        [(2,), (2,)],
    ),
    ("layernorm(w) | adaptive_avg_pool3d(1)", (1, 2, 3, 4, 3), [(3,)]),
    # Without a batch: channels_last makes the first pooled axis the innermost.
    ("relu | mul(w) | max_pool3d(2)", (3, 4, 4, 6), [(4, 1, 1)]),
    # Powers.
    ("lp_pool2d(2, 2)", (2, 2, 4, 5), []),
    ("lp_pool2d(2, 3, 2, True) | tanh", (2, 2, 4, 5), []),
    ("abs | lp_pool1d(3, 3, 1)", (2, 2, 6), []),
    ("lp_pool3d(2, 2) | tanh", (2, 2, 4, 5, 4), []),
    # One after the other.
    ("avg_pool1d(2) | gelu | max_pool1d(2)", (2, 3, 9), []),
]
each_case = pytest.mark.parametrize(("text", "shape", "operands"), CASES)


def compared(fused, tensors, tolerance, device="cpu"):
    """The result and every gradient, compared with eager on the CPU, which takes fewer layouts."""
    result = fused(*[t.to(device) for t in tensors]).cpu()
    wanted = fused.reference(*[t.contiguous() for t in tensors])
    assert result.shape == wanted.shape
    assert result.dtype == wanted.dtype
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(result, wanted, **close)
    cotangent = torch.randn_like(wanted)
    found = torch.autograd.grad(result, tensors, cotangent)
    expected = torch.autograd.grad(wanted, tensors, cotangent)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **close)


@each_case
def test_pooling_is_torchs(text, shape, operands):
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, *operands)]
    compared(fused, tensors, 1e-11)
    assert has_right_second_derivatives(fused, tensors)


@each_case
def test_pooling_is_torchs_in_any_layout(text, shape, operands, device):
    tensors = [torch.randn(s) for s in (shape, *operands)]
    rank = len(shape)
    if rank > 3:
        last = torch.channels_last if rank == 4 else torch.channels_last_3d
        tensors[0] = tensors[0].contiguous(memory_format=last)
    else:
        tensors[0] = tensors[0].transpose(0, -1).contiguous().transpose(0, -1)
    fused = fusegen.compile(text)
    compared(fused, [t.requires_grad_() for t in tensors], 2e-5, device)


@pytest.mark.parametrize(
    ("text", "shape", "operand"),
    [
        ("sub(p) | abs | avg_pool2d(2)", (200, 40, 4), (40, 1)),
        ("mul(p) | gelu | avg_pool2d(2)", (40, 6, 24, 4), (24, 1)),
        ("mul(p) | gelu | max_pool2d(2)", (600, 24, 6), (1, 6)),
        ("add(p) | silu | max_pool2d(2)", (300, 64, 4), (64, 4)),
    ],
)
def test_what_varies_along_an_axis_that_is_pooled_has_its_gradient(text, shape, operand, device):
    tensors = [torch.randn(s, requires_grad=True) for s in (shape, operand)]
    compared(fusegen.compile(text), tensors, 2e-5, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pooling_of_16_bits_adds_up_in_fp32(dtype):
    x = torch.randn(2, 8, 9, 10).to(dtype)
    for text in (
        "relu | max_pool2d(3, 2, 1)",
        "relu | avg_pool2d(3, 2, 1)",
        "avg_pool2d(2) | relu",
    ):
        fused = fusegen.compile(text)
        exact = fused.reference(x.double())
        error = (fused(x).double() - exact).abs().max()
        # One rounding of a result below 4.
        assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("channels", [16, 5])
@pytest.mark.parametrize(
    "text",
    [
        "relu | max_pool2d(3, 2, 1)",
        "mul_channel | max_pool2d(3, 2, 1) | gelu",
        "add_channel | avg_pool2d(3, 1, 1, count_include_pad=False)",
        "tanh | adaptive_avg_pool2d((3, 4))",
        "max_pool2d(3, 2, 0, 2, ceil_mode=True) | sigmoid",
    ],
)
def test_channels_beside_each_other_are_pooled_together(text, channels, device):
    operands = [(channels,)] if "channel" in text else []
    fused = fusegen.compile(text)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2**-6)):
        # Multiples of a 64th, so that every type agrees on the largest.
        x = torch.randint(-128, 128, (2, channels, 9, 11), device=device) / 64
        tensors = [x, *(torch.rand(s, device=device) + 1 for s in operands)]
        tensors[0] = x.contiguous(memory_format=torch.channels_last)
        tensors = [t.to(dtype).requires_grad_() for t in tensors]
        ours = outcome(fused, tensors)
        # Eager on the CPU, which takes fewer layouts: see compared.
        plain = [t.detach().contiguous().requires_grad_() for t in tensors]
        wide = outcome(fused.reference, plain, dtype=torch.float64, device="cpu")
        for a, b in zip(ours.tensors, wide.tensors, strict=True):
            close = tolerance * max(1.0, float(b.abs().max()))
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=close)


def test_ties_go_to_the_first_and_nan_wins():
    x = torch.tensor([[1.0, 1.0, 0.0, 1.0, math.nan, 2.0, 2.0, -math.inf, -math.inf]])
    for text in ("max_pool1d(3, 2, 1)", "max_pool1d(2)", "adaptive_max_pool1d(4)"):
        fused = fusegen.compile(text)
        tensors = [x.clone().requires_grad_()]
        compared(fused, tensors, 0)


def test_what_no_window_covers_gets_no_gradient():
    x = torch.randn(2, 3, 8, requires_grad=True)
    fusegen.compile("avg_pool1d(2, 3)")(x).sum().backward()
    assert x.grad[:, :, 2].eq(0).all()
    assert x.grad[:, :, 1].eq(0.5).all()


def test_the_backward_is_the_same_bits_every_time():
    fused = fusegen.compile("tanh | avg_pool2d(3, 1, 1)")
    x = torch.randn(2, 3, 40, 40, requires_grad=True)
    first, second = (torch.autograd.grad(fused(x).square().sum(), x)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_pooling_keeps_winners_and_not_the_input():
    fused = fusegen.compile("relu | max_pool2d(3, 2, 1)")
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused(x)
    assert all(t.numel() == 2 * 3 * 8 * 8 for t in saved)


@given(
    kind=st.sampled_from(("max", "avg")),
    length=st.integers(1, 12),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 4),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    is_ceil=st.booleans(),
    counts_padding=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_windows_lie_where_torch_has_them(
    kind, length, kernel, stride, padding, dilation, is_ceil, counts_padding
):
    """On the geometry alone, which needs no build."""
    dilation = dilation if kind == "max" else 1
    padding = min(padding, (dilation * (kernel - 1) + 1) // 2, kernel // 2)
    window = sliding(length, kernel, stride, padding, dilation, is_ceil=is_ceil)
    x = torch.arange(1.0, length + 1)[None]
    try:
        if kind == "max":
            wanted = torch.nn.functional.max_pool1d(x, kernel, stride, padding, dilation, is_ceil)
        else:
            wanted = torch.nn.functional.avg_pool1d(
                x, kernel, stride, padding, is_ceil, counts_padding
            )
    except RuntimeError:
        return
    if isinstance(window, int):
        assert wanted.shape[-1] == length // window
        return
    assert wanted.shape[-1] == window.count(length)
    for i in range(window.count(length)):
        begin = i * window.stride - window.padding
        inside = [j for j in range(begin, begin + kernel * dilation, dilation) if 0 <= j < length]
        if kind == "max":
            assert wanted[0, i] == (max(inside) + 1 if inside else -math.inf)
            continue
        end = min(begin + kernel, length + padding)
        divisor = end - begin if counts_padding else len(inside)
        assert wanted[0, i] == pytest.approx(sum(j + 1 for j in inside) / divisor)


def test_parts_that_come_out_even_are_tiles():
    assert adaptive(12, 3) == 4
    assert adaptive(7, 3) == Slide(3, 0, parts=3)
    assert sliding(8, 2) == 2
    assert sliding(8, 2, 2, is_ceil=True) == 2
    assert isinstance(sliding(7, 2, 2, is_ceil=True), Slide)


@pytest.mark.parametrize(
    ("text", "shape", "parts"),
    [
        ("max_pool2d(3, 2, 1)", (4, 6), ["max_pool2d(3, 2, 1)", "(4, 6)", "3 or 4 axes"]),
        ("avg_pool2d(5)", (2, 3, 4, 4), ["a window of (5, 5) does not fit", "(2, 3, 4, 4)"]),
        ("max_pool1d(3, 2, 0, 3)", (2, 3, 6), ["does not fit", "would be empty"]),
    ],
)
def test_a_shape_that_does_not_fit_is_told(text, shape, parts):
    with pytest.raises(ArgumentError) as caught:
        fusegen.compile(text)(torch.ones(shape))
    for part in parts:
        assert part in str(caught.value)


# Lines of windows and of elements that fill whole vectors, that do not, and that are more than one.
@pytest.mark.parametrize("width", [16, 31, 32, 64, 512, 700])
@pytest.mark.parametrize(
    "text",
    [
        "mul(w) | max_pool2d(3, 1, 1)",
        "relu | max_pool2d(3, 2, 1)",
        "avg_pool2d(3, 1, 1, count_include_pad=False) | gelu",
        "gelu | avg_pool2d((2, 3), (1, 2), (0, 1))",
    ],
)
def test_windows_go_by_lines_of_any_width(text, width, device):
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(3)
        fused = fusegen.compile(text)
        shapes = [(2, 3, 5, width), *[(5, width)] * len(fused.chain.operands)]
        tensors = [torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in shapes]
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        close = 32 * EPSILON[dtype]  # sums of up to 18 terms, and a gelu
        for a, b in zip(ours.tensors, eager.tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close)


@pytest.mark.parametrize(
    "text", ["adaptive_avg_pool2d(2)", "adaptive_max_pool2d(1)", "max_pool2d(2)"]
)
def test_nothing_to_pool_is_told(text):
    with pytest.raises(ArgumentError, match="wanted elements along the axes that it pools"):
        fusegen.compile(text)(torch.randn(2, 3, 0, 4))
