"""Tensors of bool in a chain: masks, conditions and, where numbers are wanted, 0 and 1."""

import pytest
import torch
from numeric import assert_same_bits, outcome

import fusegen
from fusegen.errors import ArgumentError, ChainError

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
    "masked rows": ("masked_fill(mask, 0) | layernorm(w)", [X, (6,)], "mt"),
    "masked windows": ("masked_fill(mask, 0) | max_pool2d(2)", [X], "m"),
    "a mask after rows": ("layernorm(w) | masked_fill(mask, 0)", [(6,), X], "tm"),
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
    with pytest.raises(ArgumentError, match=r"gelu: got a value of bool .*x.float\(\)"):
        fusegen.compile("gelu")(x)


def test_a_chain_that_ends_in_a_condition_is_refused(device):
    x = torch.ones(3, dtype=torch.bool, device=device)
    with pytest.raises((ArgumentError, ChainError, fusegen.UnsupportedError), match="condition"):
        fusegen.compile("logical_not")(x)


def test_a_function_may_take_a_mask():
    @fusegen.chain
    def masked(x, mask: fusegen.Mask):
        return fusegen.masked_fill(fusegen.gelu(x), mask, 0.5)

    assert masked == fusegen.chain("gelu | masked_fill(mask, 0.5)")
    assert "const bool* " in fusegen.compile(masked).source("cpp", grad=True)
    assert "const bool* " in fusegen.compile(masked).source("cuda", grad=True)
