"""Running a chain beside eager torch, and what "as accurate as eager" means."""

from dataclasses import dataclass

import torch

from fusegen.dsl import chain
from fusegen.runtime import Fused

EPSILON = {d: torch.finfo(d).eps for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def compiled(text):
    """The chain of this text, fused."""
    return Fused(chain(text))


@dataclass
class Outcome:
    """A result and the gradients of the inputs, None for those that have none."""

    result: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]

    @property
    def tensors(self):
        return [self.result, *(g for g in self.gradients if g is not None)]

    @property
    def names(self):
        return ["result", *(f"gradient of input {i}" for i, g in enumerate(self.gradients) if g is not None)]


def leaves(tensors, dtype=None):
    """The same tensors, with the same strides, as leaves of a graph of their own."""
    copies = []
    for t in tensors:
        copy = t.detach() if dtype is None else t.detach().to(dtype)
        copies.append(copy.requires_grad_(t.requires_grad))
    return copies


def outcome(function, tensors, cotangent=None, dtype=None):
    """Run forward and backward; without a cotangent, a fixed random one."""
    inputs = leaves(tensors, dtype)
    result = function(*inputs)
    wanted = [t for t in inputs if t.requires_grad]
    if not wanted:
        return Outcome(result, (None,) * len(inputs))
    if cotangent is None:
        cotangent = cotangent_for(result)
    found = iter(torch.autograd.grad(result, wanted, cotangent.to(result.dtype)))
    return Outcome(result.detach(), tuple(next(found) if t.requires_grad else None for t in inputs))


def cotangent_for(result):
    """Random numbers of the result's shape, the same in every element type."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(result.shape, generator=generator).to(result.device, result.dtype)


def assert_as_accurate(ours, eager, exact, slack=8.0):
    """Neither the largest absolute nor the largest relative error exceeds twice eager's plus some roundings.

    exact is eager in fp64 on the same inputs. Both measures are needed: where terms cancel (gelu far to the left) eager
    itself has no relative accuracy, and for small values (expm1 near 0) an absolute bound says nothing. slack counts
    roundings of the result's type: libmvec's functions are within 4 ulp, and eager's own error may happen to be zero.
    """
    for name, a, b, c in zip(ours.names, ours.tensors, eager.tensors, exact.tensors, strict=True):
        assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)}, eager's {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"{name}: {a.dtype}, eager's {b.dtype}"
        assert torch.equal(a.isnan(), b.isnan()), f"{name}: NaN at other places than eager's"
        assert torch.equal(a.isinf(), b.isinf()), f"{name}: infinite at other places than eager's"
        a, b, c = (t[torch.isfinite(b)].double() for t in (a, b, c))
        if not a.numel():
            continue
        size = c.abs()
        for measure, scale in (("absolute", size.max().clamp(1e-30)), ("relative", size + 1e-30)):
            mine, its = ((t - c).abs().div(scale).max().item() for t in (a, b))
            bound = 2 * its + slack * EPSILON[eager.result.dtype]
            assert mine <= bound, f"{name}: {measure} error {mine:.3g}, eager's {its:.3g}"


def assert_same_bits(ours, eager):
    """Equal to the last bit, NaN equal to NaN."""
    for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
