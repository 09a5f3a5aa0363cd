"""Tensors in pieces: chains that select of a short axis, on the emulator and on a GPU."""

import pytest
import torch
from emulator import run
from numeric import assert_as_accurate, outcome

import fusegen

HALVES = (
    "unflatten({dim}, (2, -1)) | keep(y) | select({at}, 0) | keep(a) | recall(y) | select({at}, 1)"
)
GLU = f"{HALVES.format(dim=-1, at=-2)} | sigmoid | mul(a)"
GLU_OF_CHANNELS = f"{HALVES.format(dim=1, at=1)} | gelu | mul(a)"
QKV = (
    "unflatten(-1, (3, -1)) | keep(y) | select(-2, 2) | keep(v) | recall(y) | select(-2, 0) | tanh"
    " | mul(v)"
)
LAST = "unflatten(-1, (2, -1)) | keep(y) | select(-2, -1) | sigmoid | keep(a) | recall(y)"
IN_16 = {"dtype": "bfloat16"}

# A chain, the shapes of x and the operands, and which programs work in pieces.
CASES = [
    (f"add(b) | {GLU}", (37, 64), [(64,)], {}, ("backward",)),
    (f"add(b) | {GLU}", (37, 64), [(64,)], IN_16, ("backward",)),
    (f"add(b) | {GLU} | add(c)", (5, 7, 96), [(96,), (48,)], {}, ("backward",)),
    (f"{GLU} | rms_norm(weight)", (11, 128), [(64,)], {}, ("forward", "backward")),
    (f"{GLU} | rms_norm(weight)", (11, 1024), [(512,)], IN_16, ("forward", "backward")),
    (f"{GLU} | layernorm(weight, bias)", (3, 5, 256), [(128,)] * 2, {}, ("forward", "backward")),
    (f"layernorm(weight, bias) | {GLU}", (9, 256), [(256,)] * 2, {}, ("forward", "backward")),
    (f"layernorm(weight, bias) | {GLU}", (9, 1024), [(1024,)] * 2, IN_16, ("forward", "backward")),
    (f"rms_norm(weight) | add(r) | {GLU}", (9, 96), [(96,), (9, 96)], {}, ("forward", "backward")),
    (f"softmax(-1) | {GLU}", (9, 96), [], {}, ("forward", "backward")),
    (f"amax(1, keepdim=True) | {GLU}", (5, 7, 96), [], {}, ("forward", "backward")),
    (f"{GLU} | sum(-1)", (9, 96), [], {}, ("forward",)),
    (f"{GLU} | mean((0, 1))", (5, 9, 96), [], {}, ("forward",)),
    (f"add(b) | {QKV}", (9, 96), [(96,)], {}, ("backward",)),
    (f"{QKV} | rms_norm", (9, 192), [], {}, ("forward", "backward")),
    (f"add(b) | {LAST} | select(-2, -2) | mul(a)", (9, 96), [(96,)], {}, ("backward",)),
    (f"add_channel(b) | {GLU_OF_CHANNELS}", (3, 32, 5, 7), [(32,)], {}, ("backward",)),
    (
        f"add_channel(b) | {GLU_OF_CHANNELS}",
        (3, 32, 6, 6),
        [(32,)],
        {"layout": "channels_last"},
        ("backward",),
    ),
    (f"{GLU} | to(bfloat16) | to(float32) | mul(c)", (9, 96), [(48,)], {}, ("backward",)),
    (f"add(b) | {GLU}", (37, 64), [(64,)], {"dtype": "float64"}, ("backward",)),
    # Scales and shifts that are halves of an operand.
    (
        "layernorm | keep(h) | operand(c) | unflatten(-1, (2, -1)) | keep(y) | select(-2, 0)"
        " | add(1) | unsqueeze(1) | keep(a) | recall(y) | select(-2, 1) | unsqueeze(1) | keep(s)"
        " | recall(h) | mul(a) | add(s)",
        (3, 5, 64),
        [(3, 128)],
        {},
        None,
    ),
    (
        f"batch_norm(weight=w, bias=b, training=True) | {GLU_OF_CHANNELS}",
        (3, 32, 4, 5),
        [(32,), (32,)],
        {},
        ("backward",),
    ),
    (f"layernorm(w, b, axis=1) | {GLU_OF_CHANNELS}", (3, 32, 5, 7), [(32,)] * 2, {}, None),
    # A rotation, whose angles have gradients, and of three parts one.
    (
        f"{HALVES.format(dim=-1, at=-2)} | mul(sin) | keep(b) | recall(a) | mul(cos) | sub(b)",
        (2, 3, 7, 64),
        [(7, 32), (7, 32)],
        {},
        ("backward",),
    ),
    (
        "unflatten(-1, (3, 2, -1)) | select(2, 0) | rms_norm(weight)",
        (2, 7, 192),
        [(32,)],
        {},
        ("backward",),
    ),
    # Packs of floats, as wide as those of what has two bytes.
    (
        f"keep(z) | softmax(0) | rsub(z) | {HALVES.format(dim=2, at=2)} | silu | mul(a) | amax(-1)",
        (3, 7, 64),
        [],
        IN_16,
        None,
    ),
    # Gradients that go to what equals a maximum, which is found as it was.
    (
        "unflatten(2, (2, -1)) | gelu | keep(z) | amax(2, keepdim=True) | add(z) | keep(y)"
        " | select(2, 0) | silu | keep(a) | recall(y) | select(2, 1) | mul(a) | softmax(-1)",
        (3, 7, 64),
        [],
        {},
        ("forward", "backward"),
    ),
    # Halves of no whole packs, and elements that alternate.
    (f"{GLU} | rms_norm(weight)", (9, 42), [(21,)], {}, ()),
    ("unflatten(-1, (-1, 2)) | select(-1, 1) | rms_norm", (9, 64), [], {}, ()),
]


def ids(cases):
    return [f"{'-'.join(map(str, shape))} {text[:40]} {more}" for text, shape, _, more, _ in cases]


@pytest.mark.parametrize(("text", "shape", "operands", "more", "programs"), CASES, ids=ids(CASES))
def test_what_is_worked_on_in_pieces_is_right(text, shape, operands, more, programs, tmp_path):
    torch.manual_seed(0)
    done = run(text, shape, operands, tmp_path, **more)
    if programs is not None:
        entries = done.text.split('extern "C" int64_t run_')[1:]
        found = [e.split("(")[0] for e in entries if "_at_1 = " in e or "_at_0 = " in e]
        assert tuple(found) == programs
    # Of the largest: two roundings of bf16, or what sums of some hundred floats are off by.
    tolerance = {"bfloat16": 2.0**-7}.get(more.get("dtype"), 4e-6)
    for have, want in zip(done.results, done.expected, strict=True):
        assert have.shape == want.shape
        assert (have.double() - want).abs().max() / (want.abs().max() + 0.1) < tolerance


@pytest.mark.parametrize(
    ("text", "shape", "operands", "more"), [case[:4] for case in CASES], ids=ids(CASES)
)
def test_a_chain_that_selects_of_a_short_axis_is_as_accurate_as_eager(
    text, shape, operands, more, device
):
    dtype = getattr(torch, more.get("dtype", "float32"))
    layout = torch.channels_last if "layout" in more else torch.contiguous_format
    tensors = [torch.randn(s, dtype=torch.float64) for s in (shape, *operands)]
    tensors = [t.to(device, dtype) for t in tensors]
    tensors[0] = tensors[0].to(memory_format=layout)
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile(text)
    ours = outcome(fused, tensors)
    eager = outcome(fused.reference, tensors)
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(ours, eager, exact)


@pytest.mark.parametrize("text", [f"add(b) | {GLU}", f"layernorm(b) | {GLU}", f"{GLU} | mul(b)"])
def test_second_derivatives_of_pieces_are_eagers(text, device):
    width = 32 if text.endswith("mul(b)") else 64
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in ((5, 64), (width,))]
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile(text)

    def twice(function):
        first = torch.autograd.grad(function(*tensors).sin().sum(), tensors, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    for ours, eager in zip(twice(fused), twice(fused.reference), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-8, atol=1e-10)


def test_a_tensor_in_pieces_is_not_told_apart_where_it_need_not_be():
    def unrolled(text, **shapes):
        operands = {name: shape for name, shape in shapes.items() if name != "shape"}
        text = fusegen.compile(text).source(
            "cuda", grad=True, shape=shapes["shape"], operands=operands
        )
        return "_at_0 = " in text

    assert not unrolled(GLU, shape=(64, 128))  # one kernel reads both halves as they lie
    assert unrolled(f"add(b) | {GLU}", shape=(64, 128), b=(128,))
    assert not unrolled(f"add(b) | {GLU}", shape=(64, 136), b=(136,))  # of no whole packs
    assert not unrolled(f"dropout(0.1) | add(b) | {GLU}", shape=(64, 128), b=(128,))
