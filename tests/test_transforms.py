"""torch.func and forward mode: refused, with what to do instead."""

import pytest
import torch

import fusegen
from fusegen.errors import UnsupportedError

REVERSE = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of vmap": lambda f, x: torch.func.vmap(torch.func.vmap(f))(x),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("needs", [False, True], ids=["plain", "with a gradient"])
@pytest.mark.parametrize("name", REVERSE)
def test_a_transform_is_refused_and_told_what_to_do(name, needs, device):
    x = torch.randn(3, 4, device=device, requires_grad=needs)
    fused = fusegen.compile("gelu | mul(2)")
    for _ in range(2):  # also where the shape has been met before
        with pytest.raises(UnsupportedError) as caught:
            REVERSE[name](fused, x)
        assert "call it on the whole batch" in str(caught.value)
        assert "fused.reference" in str(caught.value)
        fused(x[0])
        fused(x)
    torch.func.vmap(fused.reference)(x)


def test_forward_mode_is_refused_and_told_what_to_do(device):
    x = torch.randn(3, 4, device=device)
    fused = fusegen.compile("gelu | mul(2)")
    with pytest.raises(UnsupportedError, match=r"use fused.reference under forward_ad and"):
        torch.func.jvp(fused, (x,), (x,))
    value, slope = torch.func.jvp(fused.reference, (x,), (x,))
    assert value.shape == slope.shape


def test_what_a_transform_does_not_touch_is_computed_within_one(device):
    x, other = torch.randn(3, 4, device=device), torch.randn(5, device=device)
    fused = fusegen.compile("gelu | mul(2)")
    found = torch.func.vmap(lambda t: t.sum() + fused(other).sum())(x)
    torch.testing.assert_close(found, x.sum(1) + fused(other).sum())


def test_gradients_in_batches_are_refused(device):
    x = torch.randn(3, device=device)
    fused = fusegen.compile("gelu")
    with pytest.raises(UnsupportedError, match=r"gradients in batches .* ask for one at a time"):
        torch.autograd.functional.jacobian(fused, x, vectorize=True)
    ours, eager = (torch.autograd.functional.jacobian(f, x) for f in (fused, fused.reference))
    torch.testing.assert_close(ours, eager)
