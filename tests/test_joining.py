"""Norms that are pooled, and sums of what is pooled: when one segment holds both, and that it is
right.
"""

import random
from dataclasses import replace

import pytest
import torch
from numeric import has_right_second_derivatives, home_of_eager, outcome

import fusegen
from fusegen.describe import Situation
from fusegen.dsl import chain
from fusegen.explain import explain
from fusegen.joining import chosen, ways
from fusegen.target import TARGETS

_TRAINED = "batch_norm(weight=w, bias=b, training=True)"
SHAPE = (3, 6, 8, 12)
CHANNELS = {"w": (6,), "b": (6,)}
# chain, the operands' shapes
JOINED = {
    f"{_TRAINED} | relu | max_pool2d(2)": CHANNELS,
    f"silu | {_TRAINED} | tanh | max_pool2d(2) | group_norm(2)": CHANNELS,
    f"{_TRAINED} | add(r) | relu | max_pool2d(2) | mean((2, 3))": CHANNELS | {"r": SHAPE},
    f"{_TRAINED} | relu | batch_norm(training=True) | avg_pool2d(2)": CHANNELS,
    "group_norm(3, w, b) | mul_channel(p) | max_pool2d(4)": CHANNELS | {"p": (6,)},
    "instance_norm | relu | avg_pool2d((2, 3)) | gelu": {},
    "gelu | rms_norm(normalized_shape=(6, 8, 12)) | max_pool2d(2)": {},
    "normalize(2.0, (1, 2, 3)) | dropout(0.5) | adaptive_avg_pool2d(2)": {},
    "layernorm(normalized_shape=(6, 8, 12)) | gelu | max_pool2d((4, 1))": {},
    # Windows that share elements, or leave some out.
    f"{_TRAINED} | relu | max_pool2d(3, 2, 1)": CHANNELS,
    f"{_TRAINED} | relu | max_pool2d((3, 5))": CHANNELS,
    f"{_TRAINED} | add(r) | max_pool2d(3, 1, 1, 2)": CHANNELS | {"r": SHAPE},
    f"{_TRAINED} | sigmoid | adaptive_avg_pool2d((3, 5))": CHANNELS,
    "group_norm(3, w, b) | silu | avg_pool2d(3, 2, 1, count_include_pad=False)": CHANNELS,
    f"instance_norm | relu | {_TRAINED} | max_pool2d(3, 2, 1) | gelu": CHANNELS,
    f"gelu | group_norm(2) | tanh | {_TRAINED} | avg_pool2d(3, 2, 1)": CHANNELS,
    "keep(y) | rms_norm(normalized_shape=(6, 8, 12)) | mul(y) | max_pool2d(2, 3)": {},
    f"{_TRAINED} | dropout(0.5) | max_pool2d((1, 2), (1, 1))": CHANNELS,
    # Sums of what is pooled.
    "max_pool2d(2) | hardtanh | mean((2, 3), keepdim=True) | tanh": {},
    "div(2) | max_pool2d(2) | adaptive_avg_pool2d(1) | add(p) | sum(1)": {"p": (6, 1, 1)},
    "avg_pool2d(4) | sigmoid | sum((1, 2, 3))": {},
    "mul(r) | max_pool2d(2) | keep(z) | mul(z) | mul_channel(p) | mean((2, 3)) | abs": {
        "r": SHAPE,
        "p": (6,),
    },
    f"{_TRAINED} | relu | max_pool2d(2) | mean((2, 3))": CHANNELS,
    "gelu | max_pool2d((3, 5)) | sum(-1) | square": {},
    "max_pool2d(2) | gelu | mean((1, 2))": {},
    "dropout(0.5) | max_pool2d(2) | mean(3, keepdim=True) | sum((0, 2))": {},
}


def is_joined(text: str, shape: tuple[int, ...] = SHAPE, target: str = "cuda", **operands) -> bool:
    """Whether the chain goes another way than the last, which has more cuts."""
    found = ways(chain(text))
    assert len(found) > 1
    kinds = {n: (s, "bool" if n == "mask" else "float32") for n, s in operands.items()}
    kinds |= dict.fromkeys(chain(text).drawn, ((1,), "int64"))
    return chosen(found, (shape, "float32"), kinds, target)[0] < len(found) - 1


@pytest.fixture
def joining(monkeypatch):
    """On the CPU, too, whatever the size."""
    monkeypatch.setitem(TARGETS, "cpp", replace(TARGETS["cpp"], joins_from=0))


@pytest.mark.parametrize("text", JOINED)
def test_windows_that_fill_their_axes_join_a_norm(text: str) -> None:
    assert is_joined(text, **JOINED[text])


@pytest.mark.parametrize(
    ("text", "shape", "operands"),
    [
        # Noise is drawn window by window, and windows share elements.
        (f"dropout(0.5) | {_TRAINED} | max_pool2d(3, 2, 1)", SHAPE, CHANNELS),
        # Statistics differ within a window.
        ("layernorm(v) | avg_pool2d(3, 2)", SHAPE, {"v": (12,)}),
        ("softmax(1) | max_pool2d(4)", SHAPE, {}),
        # The gradient of v keeps places within windows.
        ("layernorm(v, normalized_shape=(6, 8, 12)) | max_pool2d(2)", SHAPE, {"v": SHAPE[1:]}),
        ("mul(v) | instance_norm | max_pool2d(2)", SHAPE, {"v": (8, 12)}),
        # What is pooled is used again, or is not added up along what lies together; and windows
        # share elements.
        ("max_pool2d(2) | keep(z) | mean((2, 3), keepdim=True) | mul(z)", SHAPE, {}),
        ("max_pool2d(3, 2) | mean((2, 3))", SHAPE, {}),
        # Elements as they lie have one index for the pooled axes, and the mask is by one of them.
        ("masked_fill(mask, 0) | instance_norm | max_pool2d(3, 2)", SHAPE, {"mask": (12,)}),
        # A maximum over windows and more knows no windows.
        ("keep(y) | amax((2, 3), True) | rsub(y) | max_pool2d(2)", SHAPE, {}),
    ],
)
def test_other_norms_end_before_the_pooling(text, shape, operands) -> None:
    assert not is_joined(text, shape, **operands)


def test_chains_without_such_a_norm_have_one_way() -> None:
    for text in (
        "relu | max_pool2d(2)",
        "batch_norm(m, v) | max_pool2d(2)",
        "max_pool2d(2) | gelu",
    ):
        assert len(ways(chain(text))) == 1


def test_on_the_cpu_what_fits_a_cache_is_cut() -> None:
    text = "instance_norm | max_pool2d(2)"
    assert not is_joined(text, (8, 64, 56, 56), "cpp")
    assert is_joined(text, (32, 64, 112, 112), "cpp")
    assert is_joined(text, (32, 64, 113, 111), "cpp")
    # Windows that share elements would have what is before them computed again.
    assert not is_joined("instance_norm | max_pool2d(3, 2, 1)", (32, 64, 112, 112), "cpp")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", [t for t in JOINED if "dropout" not in t])
def test_a_joined_norm_computes_what_eager_does(text, dtype, layout, device, joining) -> None:
    memory_format = getattr(torch, f"{layout}_format" if layout == "contiguous" else layout)
    # Far apart, so that rounding does not choose another winner.
    x = torch.randperm(3 * 6 * 8 * 12).reshape(SHAPE) * 0.01 - 8
    tensors = [x, *(torch.randn(s) for s in JOINED[text].values())]
    tensors = [t.to(device, dtype).requires_grad_() for t in tensors]
    tensors[0] = tensors[0].detach().contiguous(memory_format=memory_format).requires_grad_()
    assert is_joined(text, target="cuda" if device == "cuda" else "cpp", **JOINED[text])
    fused = fusegen.compile(text)
    done = outcome(fused, tensors)
    home = home_of_eager(text, device, torch.float64)
    wanted = outcome(fused.reference, tensors, None, torch.float64, home)
    # Rounding of a few steps and of sums, relative to the largest value; in bf16, of what is
    # saved too.
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2.0**-6}[dtype]
    for have, want in zip(done.tensors, wanted.tensors, strict=True):
        scale = want.abs().max().clamp(min=1.0)
        assert ((have.double() - want).abs().max() / scale).item() < tolerance


def test_running_statistics_are_eagers(device, joining) -> None:
    text = "batch_norm(m, v, w, b, training=True) | relu | max_pool2d(2)"
    fused = fusegen.compile(text)
    x, w, b = (torch.randn(s, device=device) for s in (SHAPE, (6,), (6,)))
    ours = [torch.zeros(6, device=device), torch.ones(6, device=device)]
    torchs = [t.clone() for t in ours]
    for _ in range(3):
        fused(x, *ours, w, b)
        fused.reference(x, *torchs, w, b)
    for have, want in zip(ours, torchs, strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(
    "text",
    [
        "group_norm(2, w, b) | tanh | max_pool2d(2)",
        "instance_norm | silu | avg_pool2d(2)",
        "batch_norm(weight=w, bias=b, training=True) | tanh | max_pool2d(3, 2, 1)",
        "group_norm(2, w, b) | silu | avg_pool2d(3, 2, 1)",
        "instance_norm | tanh | group_norm(2, w, b) | avg_pool2d((3, 2))",
        # Shares that are the same all over a window; and a mean of squares.
        "add_channel(b) | group_norm(2, w) | avg_pool2d(2, 2, 1, count_include_pad=False)",
        "instance_norm | instance_norm | avg_pool2d(2, 2, 1)",
        "rms_norm(normalized_shape=(4, 4, 4)) | tanh | avg_pool2d(3, 2)",
    ],
)
def test_second_derivatives_are_right(text, device, joining) -> None:
    operands = [(4,)] * len(chain(text).operands)
    tensors = [
        torch.randn(s, dtype=torch.float64, device=device, requires_grad=True)
        for s in ((2, 4, 4, 4), *operands)
    ]
    assert has_right_second_derivatives(fusegen.compile(text), tensors)


_STEPS = {
    "before": "relu gelu tanh square mul_channel(p) add_channel(p) add(r) clamp(-1,1)",
    "norm": "batch_norm(weight=p,training=True) group_norm(2,p) group_norm(3) instance_norm "
    "rms_norm(normalized_shape=(6,8,7)) normalize(2.0,(1,2,3)) layernorm(normalized_shape=(6,8,7))",
    "pool": "max_pool2d(3,2,1) avg_pool2d(3,2,1) avg_pool2d(2,2,1,count_include_pad=False) "
    "max_pool2d(2) avg_pool2d((3,1),(3,1)) max_pool2d(2,3) max_pool2d(2,1,0,2) "
    "adaptive_avg_pool2d((3,2)) max_pool2d(3,2,1,ceil_mode=True)",
    "after": "gelu mul_channel(p) mean((2,3)) flatten(1) sigmoid",
}


@pytest.mark.parametrize("seed", range(8))
def test_random_norms_and_poolings_have_eagers_gradients_of_both_orders(
    seed, device, joining
) -> None:
    draw = random.Random(seed)
    steps = []
    for kind in ("before", "norm", "before", "norm", "before", "pool", "after"):
        found = _STEPS[kind].split()
        is_there = kind == "pool" or (kind == "norm" and len(steps) < 2) or draw.random() < 0.5
        steps += [draw.choice(found)] if is_there else []
    crossing = {"group_norm(2,p)", "group_norm(3)"}
    steps = [s for i, s in enumerate(steps) if not crossing & {s} or not crossing & set(steps[:i])]
    texts = [s.replace("p)", f"p{i})").replace("=p", f"=p{i}") for i, s in enumerate(steps)]
    texts = [t.replace("p,", f"p{i},") if "=" in t else t for i, t in enumerate(texts)]
    text = " | ".join(texts)
    shapes = [(2, 6, 8, 7) if n == "r" else (6,) for n in chain(text).operands]
    torch.manual_seed(seed)
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((2, 6, 8, 7), *shapes)]
    tensors = [t.to(device).requires_grad_() for t in tensors]
    fused = fusegen.compile(text)
    weights, found = None, []
    for function in (fused, fused.reference):
        out = function(*tensors)
        cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device)
        first = torch.autograd.grad(out, tensors, cotangent.view(out.shape), create_graph=True)
        weights = weights or [torch.randn_like(g) for g in first]
        total = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
        second = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
        found.append([out, *first, *second])
    # Rounding of fp64, which two norms and two derivatives of them magnify.
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-8, atol=1e-8)


def test_one_callable_goes_both_ways(device, joining) -> None:
    fused = fusegen.compile("instance_norm | max_pool2d(2)")
    for size in (12, 13, 12, 15):
        x = torch.randn(2, 3, 8, size, device=device)
        torch.testing.assert_close(fused(x), fused.reference(x))


def test_dynamo_records_a_joined_norm(device, joining) -> None:
    fused = fusegen.compile(f"{_TRAINED} | relu | max_pool2d(2)")
    tensors = [torch.randn(s, device=device) for s in (SHAPE, (6,), (6,))]
    tensors = [t.requires_grad_() for t in tensors]
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    ours, plain = outcome(compiled, tensors), outcome(fused, tensors)
    for have, want in zip(ours.tensors, plain.tensors, strict=True):
        assert torch.equal(have, want)


def test_a_mistake_is_told_as_without_joining() -> None:
    fused = fusegen.compile(f"{_TRAINED} | max_pool2d(2)")
    with pytest.raises(fusegen.ArgumentError, match=r"operand 'w' got shape \(5,\)"):
        fused(torch.randn(SHAPE), torch.randn(5), torch.randn(6))
    with pytest.raises(fusegen.ArgumentError, match="sparse"):
        fused(torch.randn(SHAPE).to_sparse(), torch.randn(6), torch.randn(6))


def test_a_norms_result_is_not_written_before_it_is_pooled() -> None:
    text = f"{_TRAINED} | relu | max_pool2d(2)"
    told = explain(chain(text), "cuda", Situation((64, 64, 56, 56)), 4290.0)
    assert "segment" not in told
    assert "forward in all: 132 MB" in told  # x twice, and what is pooled, with what is saved of it
    assert "backward in all: 157 MB" in told  # what is saved, then x and its gradient


def test_windows_that_share_elements_are_told_apart_from_them() -> None:
    text = f"{_TRAINED} | relu | max_pool2d(3, 2, 1)"
    told = explain(chain(text), "cuda", Situation((64, 64, 56, 56)), 4290.0)
    assert "segment" not in told
    assert "forward in all: 132 MB" in told
    assert "backward in all: 157 MB" in told


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_any_layout_is_pooled_behind_a_norm(order, device, joining) -> None:
    places = [order.index(i) for i in range(4)]
    x = torch.randn([SHAPE[i] for i in order], device=device).permute(places).requires_grad_()
    w, b = (torch.randn(6, device=device, requires_grad=True) for _ in "wb")
    fused = fusegen.compile(f"{_TRAINED} | relu | max_pool2d(3, 2, 1)")
    done, wanted = outcome(fused, [x, w, b]), outcome(fused.reference, [x, w, b])
    # Both round in fp32, and add 288 elements a channel up in orders of their own.
    for have, want in zip(done.tensors, wanted.tensors, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_elements_are_summed_as_they_lie() -> None:
    fused = fusegen.compile("instance_norm | avg_pool2d(2)")
    text = fused.source("cuda", shape=(2, 3, 8, 12))
    assert "length = (sizes.middle_unpooled.value * sizes.inner_unpooled.value)" in text
