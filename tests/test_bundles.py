"""Rows along one axis and windows across it, whichever come first: when one kernel holds both, and
that it is right.
"""

import itertools
import random
import re
import subprocess

import pytest
import torch
from numeric import has_right_second_derivatives, home_of_eager, outcome

import fusegen
from fusegen import registers, toolchain
from fusegen.describe import Situation, sources
from fusegen.dsl import chain
from fusegen.explain import explain
from fusegen.joining import chosen, ways

SHAPE = (2, 6, 8, 12)
LAST, FULL, POOLED = (12,), SHAPE, (2, 6, 4, 6)
# chain, the operands' shapes
BUNDLED = {
    "layernorm(v, u) | avg_pool2d(2)": {"v": LAST, "u": LAST},
    "add(s) | layernorm(v, u) | gelu | max_pool2d(2)": {"s": (), "v": LAST, "u": LAST},
    "softmax(-1) | max_pool2d(2) | add(t)": {"t": POOLED},
    "mul(r) | rms_norm(v) | silu | avg_pool2d((4, 2))": {"r": FULL, "v": LAST},
    "keep(y) | layernorm(v) | mul(y) | avg_pool2d((2, 1))": {"v": LAST},
    "mul_channel(p) | log_softmax(-1) | avg_pool2d(2) | mul(q) | tanh": {"p": (6,), "q": (6,)},
    "layernorm | layernorm(v) | sigmoid | max_pool2d((2, 4))": {"v": LAST},
    "normalize(2.0, -1) | max_pool2d(2) | sub(q)": {"q": (4, 1)},
    "masked_fill(m, 0.5) | layernorm | avg_pool2d(2)": {"m": FULL},
    "tanh | layernorm | adaptive_avg_pool2d((4, 3))": {},
    "keep(y) | mean(-1, True) | mul(s) | rsub(y) | avg_pool2d(2)": {"s": ()},
    # Rows that are strided.
    "layernorm(c, d, axis=1) | gelu | avg_pool2d(2) | mul(s)": {"c": (6,), "d": (6,), "s": ()},
    "add(r) | softmax(1) | max_pool2d(2) | mul_channel(p)": {"r": FULL, "p": (6,)},
    "keep(y) | mean(1, True) | mul(s) | rsub(y) | avg_pool2d((2, 1))": {"s": ()},
    # Rows of what windows leave.
    "max_pool2d(2) | logsumexp(1, True) | relu": {},
    "max_pool2d(2) | mean(1)": {},
    "max_pool2d((4, 2)) | layernorm(c, d, axis=1) | gelu | add(t)": {
        "c": (6,),
        "d": (6,),
        "t": (2, 6, 2, 6),
    },
    "add(r) | gelu | max_pool2d(2) | softmax(1) | mul(s)": {"r": FULL, "s": ()},
    "mul_channel(p) | avg_pool2d((2, 4)) | log_softmax(1) | tanh": {"p": (6,)},
    "avg_pool2d((4, 1)) | normalize | amax(1)": {},
    "avg_pool2d(2) | keep(y) | var(1, keepdim=True) | add(1) | rsub(y)": {},
}


def way_of(text: str, shape, order=None, dtype="float32", target="cuda", **operands) -> int:
    """Which of the chain's ways goes, and that there are others."""
    found = ways(chain(text))
    assert len(found) > 1
    kinds = {n: (s, "bool" if n == "m" else dtype) for n, s in operands.items()}
    kinds |= dict.fromkeys(chain(text).drawn, ((1,), "int64"))
    return chosen(found, (shape, dtype), kinds, target, order)[0]


@pytest.mark.parametrize("text", BUNDLED)
def test_rows_are_held_with_the_windows_across_them(text) -> None:
    assert way_of(text, SHAPE, **BUNDLED[text]) == 0


CHANNELS_LAST = (-4, -2, -1, -3)


@pytest.mark.parametrize(
    ("text", "shape", "more"),
    [
        ("layernorm | avg_pool2d(2)", SHAPE, {"order": CHANNELS_LAST}),  # pooled along, strided
        ("softmax(1) | max_pool2d(4)", SHAPE, {}),  # four rows, which are strided
        ("softmax(1) | max_pool2d(2)", SHAPE, {"dtype": "bfloat16"}),
        ("softmax(1) | max_pool2d(2)", (2, 600, 8, 12), {}),
        ("layernorm | avg_pool2d(2)", SHAPE, {"target": "cpp"}),
        ("layernorm | avg_pool2d(2)", (2, 6, 9, 12), {}),  # a row is left over
        ("layernorm | max_pool2d(3, 2, 1)", SHAPE, {}),  # windows share elements
        ("layernorm | avg_pool2d(3)", (2, 6, 9, 12), {}),  # no pack has whole windows
        ("layernorm | avg_pool2d(2)", (2, 6, 8, 4096), {}),  # rows too long
        ("layernorm | avg_pool2d((8, 4))", SHAPE, {}),  # windows too large
        ("layernorm | avg_pool2d(4)", SHAPE, {"dtype": "float64"}),
        ("dropout(0.5) | layernorm | avg_pool2d(2)", SHAPE, {}),  # drawn window by window
        ("group_norm(2) | layernorm | avg_pool2d(2)", SHAPE, {}),  # other statistics
        ("layernorm(normalized_shape=(8, 12)) | amax(-1, True) | avg_pool2d((2, 1))", SHAPE, {}),
        ("mul(h) | layernorm | avg_pool2d(2)", SHAPE, {"h": (8, 1)}),  # from row to row
        ("mul(c) | layernorm | avg_pool2d(2)", SHAPE, {"c": (6, 1, 12)}),
        ("layernorm | avg_pool2d(2) | mul(c)", SHAPE, {"c": (4, 6)}),
        # What is reduced behind windows.
        ("max_pool2d(2) | softmax(1)", SHAPE, {"order": CHANNELS_LAST}),
        ("max_pool2d(2) | softmax(1)", SHAPE, {"dtype": "float64"}),
        ("gelu | max_pool2d(2) | softmax(1)", SHAPE, {"dtype": "bfloat16"}),  # more than read
        ("max_pool2d(2) | softmax(1)", (2, 2000, 8, 12), {}),
        ("max_pool2d(2) | softmax(1)", (2, 6, 9, 12), {}),  # a row is left over
        ("max_pool2d(3, 2, 1) | softmax(1)", SHAPE, {}),  # windows share elements
        ("avg_pool2d((1, 3)) | softmax(1)", SHAPE, {}),  # no pack has whole windows
        ("max_pool2d(2) | softmax(-1)", SHAPE, {}),  # windows along the rows
        ("max_pool2d(2) | max(1)", SHAPE, {}),  # where it stands, in training
        ("mul(h) | max_pool2d(2) | softmax(1)", SHAPE, {"h": (8, 1)}),  # from row to row
        ("max_pool2d(2) | softmax(1) | mean(2)", SHAPE, {}),  # other rows
    ],
)
def test_others_end_before_the_pooling(text, shape, more) -> None:
    assert way_of(text, shape, **more) == len(ways(chain(text))) - 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("text", [*BUNDLED, "softmax(1) | max_pool2d(2)"])
def test_there_is_a_way_for_any_layout_and_type(text, dtype) -> None:
    for order in itertools.permutations((-4, -3, -2, -1)):
        way_of(text, SHAPE, order, dtype, **BUNDLED.get(text, {}))  # it raised once


def test_channels_are_rows_wherever_they_lie() -> None:
    assert way_of("softmax(1) | max_pool2d(2)", (2, 8, 8, 12)) == 0
    assert way_of("softmax(1) | max_pool2d(2)", (2, 8, 8, 12), CHANNELS_LAST) == 0


def test_statistics_and_what_is_pooled_are_one_kernel() -> None:
    text = "layernorm(v) | avg_pool3d(2)"
    told = explain(chain(text), "cuda", Situation((8, 64, 32, 64, 64)), 4290.0)
    assert "segment" not in told
    assert "forward_bundle: rows on the chip, with the windows across them" in told
    assert "forward in all: 310 MB" in told  # x, what is pooled, and two numbers a row


def test_what_is_pooled_and_reduced_is_one_kernel() -> None:
    text = "max_pool3d(2) | logsumexp(1, keepdim=True)"
    told = explain(chain(text), "cuda", Situation((2, 64, 32, 128, 128)), 4290.0)
    assert "segment" not in told
    assert "forward_bundle: rows on the chip, with the windows across them" in told
    assert "backward_window: pooling windows side by side" in told  # which asks no other channel
    assert "keeps  none of its inputs" in told
    # x, or its gradient, beside what is pooled, its places, and three numbers a row
    assert told.count(" in all: 312 MB") == 2


def tensors_for(text, shapes, device, dtype, x) -> list[torch.Tensor]:
    """x and the operands, random; a mask for `m`."""
    operands = [torch.randn(s) for s in shapes.values()]
    found = [t.to(device, dtype).requires_grad_() for t in (x, *operands)]
    return [t > 0 if n == "m" else t for n, t in zip(["x", *shapes], found, strict=True)]


@pytest.mark.parametrize(
    ("text", "dtype"),
    # In bf16 two values of a window round to one, and another is the largest.
    [
        (t, d)
        for t in BUNDLED
        for d in (torch.float64, torch.float32, torch.bfloat16)
        if d != torch.bfloat16 or not re.search("max_pool|amax", t)
    ],
)
def test_a_bundle_computes_what_eager_does(text, dtype, device) -> None:
    # Far apart, so that rounding does not choose another winner.
    x = torch.randperm(2 * 6 * 8 * 12).reshape(SHAPE) * 0.01 - 5
    tensors = tensors_for(text, BUNDLED[text], device, dtype, x)
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


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 2, 1, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
@pytest.mark.parametrize(
    "text",
    [
        "softmax(1) | max_pool2d(2)",
        "layernorm | gelu | avg_pool2d(2)",
        "max_pool2d(2) | layernorm(axis=1) | gelu",
    ],
)
def test_any_layout_is_right(text, order, device) -> None:
    shape = (2, 8, 8, 12)
    places = [order.index(i) for i in range(4)]
    x = torch.randn([shape[i] for i in order], device=device).permute(places).requires_grad_()
    fused = fusegen.compile(text)
    done, wanted = outcome(fused, [x]), outcome(fused.reference, [x])
    for have, want in zip(done.tensors, wanted.tensors, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)  # both round in fp32


@pytest.mark.parametrize(
    "shape", [(1, 1, 2, 4), (3, 1, 6, 4), (2, 1, 1, 2, 64), (5, 7, 2, 300), (2, 2, 4, 1000)]
)
def test_rows_of_any_length_are_right(shape, device) -> None:
    pool = "avg_pool3d((1, 2, 4))" if len(shape) == 5 else "avg_pool2d((2, 4))"
    fused = fusegen.compile(f"layernorm(v, u) | {pool} | relu")
    # A mean far from zero, and wide steps.
    x = torch.randn(shape, device=device) * 3 + 100
    tensors = [x, *(torch.randn(shape[-1:], device=device) for _ in "vu")]
    tensors = [t.requires_grad_() for t in tensors]
    done = outcome(fused, tensors)
    wanted = outcome(fused.reference, tensors, None, torch.float64)
    for have, want in zip(done.tensors, wanted.tensors, strict=True):
        # At 100 an ulp is 8e-6, a deviation of 3; sums over up to 70 rows make more of it.
        torch.testing.assert_close(have.double(), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [(1, 1, 2, 4), (3, 37, 6, 8), (2, 300, 2, 12), (5, 64, 4, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_what_is_pooled_are_right_at_any_length(shape, dtype, device) -> None:
    fused = fusegen.compile("max_pool2d(2) | logsumexp(1) | tanh")
    count = torch.Size(shape).numel()
    # No two are equal, or are so once they are rounded, within a window.
    x = (torch.arange(count) % 23).reshape(shape).to(device, dtype) / 8
    x = (x + torch.arange(shape[-1], device=device, dtype=dtype) / 4).requires_grad_()
    done = outcome(fused, [x])
    wanted = outcome(fused.reference, [x], None, torch.float64)
    # Rounding of a few steps; of the result, in bf16, and of what is saved.
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    for have, want in zip(done.tensors, wanted.tensors, strict=True):
        torch.testing.assert_close(have.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("add(s) | layernorm(v, u) | gelu | avg_pool2d(2) | tanh", [(), (4,), (4,)]),
        ("layernorm(v) | silu | max_pool2d(2) | mul_channel(p)", [(4,), (3,)]),
        ("mul(r) | softmax(-1) | avg_pool2d((2, 1)) | mul(q)", [(2, 3, 4, 4), (4,)]),
        ("rms_norm(v) | avg_pool2d(2) | mul(q)", [(4,), (2,)]),
        ("layernorm(c, axis=1) | tanh | avg_pool2d(2)", [(3,)]),
        ("mul(r) | max_pool2d(2) | softmax(1) | mul(q)", [(2, 3, 4, 4), (2,)]),
        ("tanh | avg_pool2d((1, 2)) | layernorm(c, axis=1) | silu", [(3,)]),
    ],
)
def test_second_derivatives_are_right(text, operands, device) -> None:
    tensors = [
        torch.randn(s, dtype=torch.float64, device=device, requires_grad=True)
        for s in ((2, 3, 4, 4), *operands)
    ]
    assert has_right_second_derivatives(fusegen.compile(text), tensors)


_STEPS = {
    "before": "relu gelu tanh mul_channel(p) add_channel(p) add(r) clamp(-1,1) mul(v) add(s)",
    "norm": "layernorm layernorm(v) softmax(-1) log_softmax(-1) rms_norm(v) normalize(2.0,-1)",
    "pool": "max_pool2d(2) avg_pool2d(2) avg_pool2d((4,1)) max_pool2d((2,4)) avg_pool2d((1,2))",
    "after": "gelu mul_channel(p) add(t) sigmoid mul(q)",
}
_SHAPES = {"p": (6,), "v": (8,), "r": (2, 6, 8, 8), "s": ()}


@pytest.mark.parametrize("seed", range(10))
def test_random_bundles_have_eagers_gradients_of_both_orders(seed, device) -> None:
    draw = random.Random(seed)
    steps = []
    for kind in ("before", "norm", "before", "norm", "before", "pool", "after", "after"):
        is_there = kind == "pool" or (kind == "norm" and len(steps) < 2) or draw.random() < 0.5
        steps += [draw.choice(_STEPS[kind].split())] if is_there else []
    texts = [re.sub(r"\b([prsvqt])\)", rf"\g<1>{i})", s) for i, s in enumerate(steps)]
    text = " | ".join(texts)
    x = torch.randn(2, 6, 8, 8, dtype=torch.float64, device=device)
    pooled = fusegen.compile(next(s for s in steps if "pool" in s))(x).shape
    shapes = _SHAPES | {"t": pooled, "q": pooled[-1:]}
    torch.manual_seed(seed)
    tensors = [torch.randn(shapes[n[0]], dtype=x.dtype) for n in chain(text).operands]
    tensors = [t.to(device).requires_grad_() for t in (x, *tensors)]
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


_ALL = ("float32", "bfloat16", "float64")
_COMPILED = [
    ("add(p) | layernorm(v, u) | avg_pool3d(2) | gelu", (2, 3, 4, 4, 64), "contiguous", _ALL),
    ("layernorm(v, u) | gelu | max_pool2d(2)", (2, 3, 4, 128), "contiguous", _ALL),
    ("softmax(1) | max_pool2d(2)", (2, 64, 6, 10), "channels_last", _ALL),
    ("add(r) | layernorm(v, u) | silu | avg_pool2d(2)", (2, 3, 4, 400), "contiguous", _ALL),
    ("layernorm(v, u) | tanh | avg_pool2d((8, 1))", (1, 2, 16, 64), "contiguous", _ALL),
    ("avg_pool2d(2) | layernorm(c, d, axis=1) | gelu", (2, 64, 8, 16), "contiguous", _ALL[:2]),
    ("max_pool2d(2) | rms_norm(c, axis=1)", (2, 128, 8, 32), "contiguous", _ALL[:2]),
    ("gelu | max_pool2d(2) | softmax(1)", (2, 64, 8, 16), "contiguous", _ALL[:1]),
    ("avg_pool3d((4, 4, 2)) | softmax(1)", (2, 16, 8, 8, 16), "contiguous", _ALL[:1]),
    # Strided rows, which are held in 32 bits alone.
    ("softmax(1) | max_pool2d(2)", (2, 64, 6, 16), "contiguous", _ALL[:1]),
    ("layernorm(c, d, axis=1) | gelu | avg_pool2d(2)", (2, 64, 6, 16), "contiguous", _ALL[:1]),
]


@pytest.mark.skipif(toolchain.nvcc_path() is None, reason=f"no nvcc; {toolchain.INSTALL_NVCC}")
@pytest.mark.parametrize(
    ("text", "shape", "layout", "dtype"),
    [(text, shape, layout, d) for text, shape, layout, dtypes in _COMPILED for d in dtypes],
)
def test_bundles_do_not_spill(text, shape, layout, dtype, tmp_path) -> None:
    sizes = {"p": (), "r": shape, "c": shape[1:2], "d": shape[1:2]}
    operands = {n: sizes.get(n, shape[-1:]) for n in chain(text).operands}
    (found,) = sources(chain(text), "cuda", Situation(shape, operands, dtype, layout), grad=True)
    file = tmp_path / "bundle.cu"
    file.write_text(found.text)
    flags = [*toolchain.FLAGS["cuda"].nvcc, registers.gencode_flag("sm_90"), "-Xptxas", "-v"]
    command = [toolchain.nvcc_path(), "-cubin", *flags, "-o", str(tmp_path / "bundle.cubin")]
    told = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True).stderr
    assert "backward_bundle" in told
    assert set(re.findall(r"(\d+) bytes spill", told)) == {"0"}
    assert "warning" not in told
