"""Running a chain beside eager torch, and what "as accurate as eager" means."""

from dataclasses import dataclass

import torch

EPSILON = {
    d: torch.finfo(d).eps for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


@dataclass
class Outcome:
    """A result, what is given beside it, and the gradients of the inputs, None for those that have
    none.
    """

    results: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]

    @property
    def result(self):
        return self.results[0]

    @property
    def tensors(self):
        return [*self.results, *(g for g in self.gradients if g is not None)]

    @property
    def names(self):
        return [
            "result",
            *(f"result {i}" for i in range(1, len(self.results))),
            *(f"gradient of input {i}" for i, g in enumerate(self.gradients) if g is not None),
        ]


def home_of_eager(text, device, dtype):
    """Where eager is exact: torch's GPU kernel of hardswish takes a sixth in single precision, of
    doubles too; and that of avg_pool2d takes a gradient in channels_last for another.
    """
    is_off = "hardswish" in text or "avg_pool2d" in text
    return "cpu" if dtype == torch.float64 and is_off else device


def leaves(tensors, dtype=None, device=None):
    """The same tensors, with the same strides, as leaves of a graph of their own."""
    copies = []
    for t in tensors:
        keeps = dtype is None or not t.is_floating_point()
        copy = t.detach() if keeps else t.detach().to(dtype)
        copy = copy if device is None else copy.to(device)
        copies.append(copy.requires_grad_(t.requires_grad))
    return copies


def outcome(function, tensors, cotangent=None, dtype=None, device=None):
    """Run forward and backward, where any result has a gradient; without a cotangent, fixed random
    ones for every such. With a device, there, and the outcome is where the tensors are.
    """
    inputs = leaves(tensors, dtype, device)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [t for t in inputs if t.requires_grad]
    ends = [r for r in results if r.requires_grad]
    if not ends:
        return Outcome(results, (None,) * len(inputs))
    seeds = [cotangent_for(r) if cotangent is None else cotangent.to(r.dtype) for r in ends]
    found = iter(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
    back = tensors[0].device
    gradients = (next(found) if t.requires_grad else None for t in inputs)
    return Outcome(
        tuple(r.detach().to(back) for r in results),
        tuple(None if g is None else g.to(back) for g in gradients),
    )


def cotangent_for(result):
    """Random numbers of the result's shape, the same in every element type."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(result.shape, generator=generator).to(result.device, result.dtype)


def assert_as_accurate(ours, eager, exact, slack=8.0):
    """Neither the largest absolute error nor the typical relative one exceeds twice eager's plus
    some roundings.

    exact is eager in fp64 on the same inputs. Both measures are needed: an absolute bound says
    nothing of small values (expm1 near 0), and where terms cancel (gelu far to the left) no element
    has relative accuracy, eager's neither; so of the relative errors the upper quartile is
    compared. slack counts roundings of the result's type: libmvec's functions are within 4 ulp, and
    eager's own error may happen to be zero.
    """
    if not eager.result.is_floating_point():
        assert torch.equal(ours.result, eager.result)
        return
    if eager.result.dtype == torch.float64:
        slack *= 16  # exact is eager itself, so its roundings count as ours
    for name, a, b, c in zip(ours.names, ours.tensors, eager.tensors, exact.tensors, strict=True):
        assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)}, eager's {tuple(b.shape)}"
        assert a.dtype == b.dtype, f"{name}: {a.dtype}, eager's {b.dtype}"
        # Where a narrow type overflows on the way in eager, we who compute in fp32 may still be
        # right.
        like_exact = c.to(a.dtype)
        for kind, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
            is_odd = (test(a) != test(b)) & (test(a) != test(like_exact))
            assert not is_odd.any(), f"{name}: {kind} at other places than eager's"
        a, b, c = (t[torch.isfinite(a) & torch.isfinite(b)].double() for t in (a, b, c))
        if not a.numel():
            continue
        epsilon = EPSILON[eager.result.dtype]
        (mine, mine_relative), (its, its_relative) = (_errors(t, c) for t in (a, b))
        bound = 2 * its + slack * epsilon * c.abs().max().item()
        assert mine <= bound, f"{name}: largest error {mine:.3g}, eager's {its:.3g}"
        bound = 2 * its_relative + slack * epsilon
        text = f"{name}: typical relative error {mine_relative:.3g}, eager's {its_relative:.3g}"
        # Of a few elements one that cancels is a quarter: nothing is typical of them.
        assert mine_relative <= bound or a.numel() < 32, text


def _errors(found, exact):
    """The largest absolute error and the upper quartile of the relative ones."""
    error = (found - exact).abs()
    relative = (error / exact.abs().clamp(min=1e-300)).nan_to_num(0.0)
    # quantile takes at most 2^24 values.
    sample = relative.flatten()[:: max(1, relative.numel() >> 20)]
    return error.max().item(), sample.quantile(0.75).item()


def assert_same_bits(ours, eager):
    """Equal to the last bit, NaN equal to NaN."""
    for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


def has_right_second_derivatives(function, tensors):
    """torch's gradgradcheck, with every cotangent there: that any may be missing is shown in
    test_gradients.py, and each set of them is a build.
    """
    return torch.autograd.gradgradcheck(function, tensors, check_undefined_grad=False)
