"""Tensors of bool in a chain: masks, conditions and, where numbers are wanted, 0 and 1."""

import pytest
import torch
from numeric import assert_same_bits, outcome

import fusegen
from fusegen.errors import ArgumentError

X = (3, 4, 5, 6)
# chain, shapes of the operands after x, and whether each is a mask
CASES = {
    "filled with a number": ("gelu | masked_fill(mask, -1.5) | mul(2)", [X], "m"),
    "filled with infinity": ("masked_fill(mask, -inf)", [X], "m"),
    "filled with a tensor": ("masked_fill(mask, value) | tanh", [X, ()], "mt"),
    "a mask by channel": ("masked_fill(mask, 0) | add(b)", [(4, 1, 1), (4, 1, 1)], "mt"),
    "a mask by position": ("mul_channel(c) | masked_fill(mask, 0)", [(4,), (5, 6)], "tm"),
    "a mask by sample": ("masked_fill(mask, 0.5)", [(3, 1, 1, 1)], "m"),
    "a mask of one": ("masked_fill(mask, 0.5) | gelu", [()], "m"),
    "a mask that widens x": ("masked_fill(mask, 0.5) | sigmoid", [(2, *X)], "m"),
    "a condition met by a mask": ("keep(y) | gt(0) | logical_and(m) | where(y, b)", [X, X], "mt"),
    "a condition or a mask": ("keep(y) | lt(0) | logical_or(m) | where(y, 0.5)", [X], "m"),
    "times a mask": ("mul(mask) | tanh", [X], "m"),
    "times a mask by channel": ("mul_channel(mask)", [(4,)], "m"),
    "plus a mask": ("add(mask) | relu", [(5, 6)], "m"),
    "at least a mask": ("maximum(mask)", [X], "m"),
    "compared with a mask": ("keep(y) | gt(mask) | where(y, 0)", [X], "m"),
    "a mask that is 0": (
        "keep(y) | operand(mask) | eq(0) | keep(c) | recall(y) | masked_fill(c, -1)",
        [(5, 6)],
        "m",
    ),
    "a condition that equals a mask": ("keep(y) | gt(0) | ne(mask) | where(y, b)", [X, X], "mt"),
    "masked rows": ("masked_fill(mask, 0) | layernorm(w)", [X, (6,)], "mt"),
    "masked windows": ("masked_fill(mask, 0) | max_pool2d(2)", [X], "m"),
    "a mask after rows": ("layernorm(w) | masked_fill(mask, 0)", [(6,), X], "tm"),
    "a mask behind a sum": (
        "rms_norm(normalized_shape=(3, 4, 5, 6)) | keep(y) | sum((0, 1, 2), True) | add(y)"
        " | masked_fill(mask, 0.5) | add(b)",
        [(1, 1), (6,)],
        "mt",
    ),
    "windows of a mask by column": ("masked_fill(mask, -1) | max_pool2d((2, 3))", [(6,)], "m"),
}
LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
}


def tensors_of(case, layout, dtype, device):
    text, shapes, kinds = CASES[case]
    torch.manual_seed(5)
    found = [torch.randn(X, dtype=torch.float64)]
    for shape, kind in zip(shapes, kinds, strict=True):
        found.append(torch.randn(shape, dtype=torch.float64))
        if kind == "m":
            found[-1] = found[-1] > 0.3
    found = [LAYOUTS[layout](t).to(device) for t in found]
    return text, [t if t.dtype == torch.bool else t.to(dtype).requires_grad_() for t in found]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_mask_does_what_it_does_in_eager(case, layout, device):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        text, tensors = tensors_of(case, layout, dtype, device)
        fused = fusegen.compile(text)
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        assert ours.result.dtype == eager.result.dtype
        slack = 8 * torch.finfo(dtype).eps
        for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
            size = b[torch.isfinite(b)].abs().max().item()
            torch.testing.assert_close(
                a, b, rtol=slack, atol=slack * (1 + size), msg=lambda m, n=name: f"{n}: {m}"
            )


def test_a_filled_tensor_is_the_same_to_the_last_bit(device):
    text, tensors = tensors_of("filled with a number", "contiguous", torch.float32, device)
    fused = fusegen.compile(text.replace("gelu", "leaky_relu(0.1)"))
    assert_same_bits(outcome(fused, tensors), outcome(fused.reference, tensors))


def test_second_derivatives_go_past_a_mask(device):
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.rand(4, device=device) > 0.5
    fused = fusegen.compile("tanh | masked_fill(mask, 0.5) | sigmoid")
    assert torch.autograd.gradcheck(fused, (x, mask))
    assert torch.autograd.gradgradcheck(fused, (x, mask))


def test_x_itself_may_hold_conditions(device):
    x = torch.rand(3, 4, device=device) > 0.5
    yes = torch.randn(3, 4, device=device, requires_grad=True)
    fused = fusegen.compile("logical_not | where(yes, 0.5) | gelu")
    ours, eager = outcome(fused, [x, yes]), outcome(fused.reference, [x, yes])
    torch.testing.assert_close(ours.result, eager.result)
    torch.testing.assert_close(ours.gradients[1], eager.gradients[1])
    numbers = fusegen.compile("where(1, 0.5)")(x)
    assert torch.equal(numbers, torch.where(x, 1.0, 0.5))
    assert numbers.dtype == torch.float32


@pytest.mark.parametrize("kind", ["int64", "float32", "uint8"])
def test_a_mask_of_numbers_is_refused(kind, device):
    mask = torch.ones(3, 4, device=device).to(getattr(torch, kind))
    with pytest.raises(ArgumentError) as caught:
        fusegen.compile("masked_fill(mask, 0)")(torch.randn(3, 4, device=device), mask)
    assert kind in str(caught.value)
    assert "bool" in str(caught.value)


@pytest.mark.parametrize("text", ["sub(mask)", "rsub(mask)", "sub_channel(mask, axis=0)"])
def test_a_difference_with_a_mask_is_refused_as_by_torch(text, device):
    x, mask = torch.randn(3, device=device), torch.ones(3, dtype=torch.bool, device=device)
    fused = fusegen.compile(text)
    with pytest.raises(RuntimeError):
        fused.reference(x, mask)
    with pytest.raises(ArgumentError, match="a difference with a tensor of bool; use logical_not"):
        fused(x, mask)


def test_numbers_of_bool_are_refused_and_told_what_to_do(device):
    x = torch.ones(3, dtype=torch.bool, device=device)
    with pytest.raises(ArgumentError, match=r"gelu: got conditions .*mask.float\(\)"):
        fusegen.compile("gelu")(x)


# chain, and shapes of the operands after x
CONDITIONS = {
    "element by element": ("tanh | gt(0.1)", []),
    "of a mask": ("gt(0) | logical_and(mask)", [(5, 6)]),
    "of rows": ("softmax(-1) | ge(threshold)", [(4, 1, 1)]),
    "of channels": ("softmax(1) | lt(0.2)", []),
    "of windows": ("max_pool2d(2) | gt(0.5)", []),
    "of windows that overlap": ("avg_pool2d(3, 1, 1) | le(threshold)", [(4, 1, 1)]),
    "of groups": ("group_norm(2, w, b) | gt(0)", [(4,), (4,)]),
    "of sums": ("sum((0, 2, 3)) | gt(0)", []),
    "of one number": ("mean | gt(0)", []),
    "wider than x": ("gt(other)", [(2, *X)]),
    "seen in another shape": ("gt(0) | flatten(1)", []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CONDITIONS)
def test_a_result_may_be_a_condition(case, layout, device):
    text, shapes = CONDITIONS[case]
    fused = fusegen.compile(text)
    names = ("x", *fused.chain.operands)
    # In bf16, eager compares what it has rounded; here nothing is computed before.
    narrow = [torch.bfloat16] if case == "of a mask" else []
    for dtype in (torch.float64, torch.float32, *narrow):
        torch.manual_seed(5)
        tensors = [torch.randn(shape, dtype=dtype) for shape in (X, *shapes)]
        tensors = [LAYOUTS[layout](t).to(device) for t in tensors]
        tensors = [t > 0 if n == "mask" else t for n, t in zip(names, tensors, strict=True)]
        wanted = fused.reference(*tensors)
        assert torch.equal(fused(*tensors), wanted)
        out = torch.empty_like(wanted)
        assert fused(*tensors, out=out) is out
        assert torch.equal(out, wanted)
        # As in eager, nothing goes back through it.
        found = fused(*[t.clone().requires_grad_(t.is_floating_point()) for t in tensors])
        assert torch.equal(found, wanted)
        assert not found.requires_grad


# Chains that are cut where a condition passes, and shapes of the operands after x.
CUT = {
    "kept before a pooling": (
        "keep(y) | gt(0) | keep(m) | recall(y) | max_pool2d(3, 1, 1) | masked_fill(m, 0.5) "
        "| softmax(1)",
        [],
    ),
    "kept before a change of shape": (
        "keep(y) | gt(0) | keep(m) | recall(y) | sigmoid | reshape(3, 4, 30) | softmax(-1) "
        "| reshape(3, 4, 5, 6) | keep(z) | recall(m) | where(z, -1)",
        [],
    ),
    "the value itself": ("gt(b) | reshape(12, 30) | where(1, 0.5) | mul(c)", [X, (30,)]),
}


@pytest.mark.parametrize("case", CUT)
def test_a_condition_passes_a_cut(case, device):
    text, shapes = CUT[case]
    fused = fusegen.compile(text)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        torch.manual_seed(5)
        tensors = [torch.randn(shape, dtype=dtype).to(device) for shape in (X, *shapes)]
        tensors = [t.requires_grad_() for t in tensors]
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        close = 8 * torch.finfo(dtype).eps
        for a, b in zip(ours.tensors, eager.tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close)


@pytest.mark.parametrize(
    "pool", ["max_pool2d(2)", "avg_pool2d(2)", "adaptive_avg_pool2d(1)", "amax", "mean"]
)
def test_conditions_are_neither_pooled_nor_averaged(pool, device):
    fused = fusegen.compile(f"gt(0) | {pool}")
    with pytest.raises(ArgumentError, match=r"got conditions .*where\(1, 0\)"):
        fused(torch.randn(X, device=device))


def test_a_function_may_take_a_mask():
    @fusegen.chain
    def masked(x, mask: fusegen.Mask):
        return fusegen.masked_fill(fusegen.gelu(x), mask, 0.5)

    assert masked == fusegen.chain("gelu | masked_fill(mask, 0.5)")
    assert "const bool* " in fusegen.compile(masked).source("cpp", grad=True)
    assert "const bool* " in fusegen.compile(masked).source("cuda", grad=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: (~m)[:, 0].sum(),
        lambda x, m: m[:, 0],
        lambda x, m: (x > 0).chunk(2, -1)[0] & (x > 0).chunk(2, -1)[1],
        lambda x, m: torch.where((x > 0)[:, :2], x[:, :2], x[:, 2:]),
        lambda x, m: x * (m[..., 0:1] | m[..., 1:2]),
        lambda x, m: (x > 0)[..., ::2].sum(-1),
        lambda x, m: x.masked_fill((x > 0)[0], 0.0),
        lambda x, m: torch.stack([part.float() for part in (x > 0).unbind(0)]),
        lambda x, m: m.masked_fill(~m, True),
        lambda x, m: torch.masked_fill(x, m, False),
        lambda x, m: x.exp().argmax(),
        lambda x, m: torch.argmin(x * x.size(0)),
    ],
)
def test_parts_of_conditions_and_places_among_all_are_torchs(function, device):
    x = torch.randn(3, 4, device=device)
    m = torch.rand(3, 4, device=device) > 0.5
    found, expected = fusegen.compile(function)(x, m), function(x, m)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
