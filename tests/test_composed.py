"""torch's functions that are several operations of a chain, in functions that are compiled."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical, Normal, kl_divergence

import fusegen
from fusegen.errors import ChainError

# Gradients of squares of sums, added up in another order than eager's, in single precision.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def of(*shape):
    return torch.randn(shape, requires_grad=True)


def with_nan(*shape):
    x = torch.randn(shape)
    return x.masked_fill(x > 1, math.nan).requires_grad_()


def _focal(x, t):
    below = t.long()
    share = t - below
    losses = (F.cross_entropy(x, place, reduction="none") for place in (below, below + 1))
    near, far = losses
    return (near * (1 - share) + far * share).mean()


def _balanced(x):
    chosen = F.one_hot(x.argmax(-1), x.shape[-1]).float().mean(0)
    return (chosen * x.softmax(-1).mean(0)).sum()


CASES = {
    "nansum": (lambda x: torch.nansum(x, -1), [with_nan(5, 7)]),
    "nanmean": (lambda x: x.nanmean(1, keepdim=True) + x.nansum(), [with_nan(5, 7)]),
    "count_nonzero": (lambda x: x * torch.count_nonzero(x > 0, 1)[:, None], [of(5, 7)]),
    "triplets": (lambda a, p, n: F.triplet_margin_loss(a, p, n), [of(4, 6), of(4, 6), of(4, 6)]),
    "triplets, swapped": (
        lambda a, p, n: F.triplet_margin_loss(a, p, n, margin=0.5, swap=True, reduction="none"),
        [of(4, 6), of(4, 6), of(4, 6)],
    ),
    "cosines": (
        lambda a, b, t: F.cosine_embedding_loss(a, b, t, margin=0.2),
        [of(3, 6), of(3, 6), torch.tensor([1.0, -1.0, 1.0])],
    ),
    "margins": (
        lambda x, t: F.multi_margin_loss(x, t) + F.multi_margin_loss(x, t, 2, 0.5, reduction="sum"),
        [of(4, 6), torch.tensor([0, 5, 2, 2])],
    ),
    "margins beside large values": (
        lambda x, t: F.multi_margin_loss(x * 1e8, t, reduction="none"),
        [of(4, 6), torch.tensor([0, 5, 2, 2])],
    ),
    "many labels": (
        lambda x, t, w: F.multilabel_soft_margin_loss(x, t, w),
        [of(4, 6), torch.rand(4, 6).round(), torch.rand(6)],
    ),
    "near each other": (lambda x, y: torch.isclose(x, x + y).float() * x, [of(9), torch.zeros(9)]),
    "remainders": (
        lambda x, y: torch.remainder(x, y) + x % y + x.detach() // y.detach(),
        [of(40), of(40)],
    ),
    "neighbours": (lambda x: F.local_response_norm(x, 5), [of(2, 9, 4, 3)]),
    "neighbours of rows": (lambda x: F.local_response_norm(x, 3, 0.5, 0.6, 2.0), [of(2, 5, 4)]),
    "neighbours of volumes": (lambda x: F.local_response_norm(x, 3, 0.1), [of(2, 5, 2, 3, 2)]),
    "signs": (
        lambda x, y: torch.copysign(x, y) + torch.copysign(y, -0.0) * torch.signbit(x),
        [of(9), torch.tensor([1.0, -1.0, 0.0, -0.0, 2.0, -2.0, math.inf, -math.inf, 3.0])],
    ),
    "hypotenuses": (lambda x, y: torch.hypot(x, y), [of(5, 7), of(7)]),
    "large and small hypotenuses": (
        lambda x, y: torch.hypot(x, y),
        [
            torch.tensor([3e30, 3e-30, math.inf, -math.inf, 0.0]),
            torch.tensor([-4e30, 4e-30, 1.0, math.nan, -2.0]),
        ],
    ),
    "steps": (
        lambda x, y, z: torch.heaviside(x, y) * z,
        [torch.tensor([1.0, 0.0, -0.0, -2.0, math.nan]), torch.rand(5), of(5)],
    ),
    "sine by angle": (
        lambda x: torch.sinc(x),
        [torch.tensor([0.0, 0.3, -2.0, 1.5], requires_grad=True)],
    ),
    "logarithms": (
        lambda x, y: torch.special.xlog1py(x, y) + torch.logaddexp2(x, y),
        [torch.tensor([0.0, 0.5, -2.0], requires_grad=True), torch.rand(3, requires_grad=True)],
    ),
    "tails": (
        lambda x: torch.special.ndtr(x) + x.erfc() + torch.special.erfc(x),
        [torch.tensor([-9.0, -0.5, 0.0, 0.5, 5.0, 12.0], requires_grad=True)],
    ),
    "doubles": (lambda x: torch.float_power(x.abs(), 1.5), [of(6)]),
    "infinities": (
        lambda x, y: (x.isposinf() ^ torch.isneginf(x)) * y,
        [torch.tensor([math.inf, -math.inf, math.nan, 0.0]), of(4)],
    ),
    "a distance": (lambda x, y: torch.dist(x, y) + torch.dist(x, y, 1), [of(5, 7), of(7)]),
    "every product": (lambda x, y: torch.outer(x.exp(), y) * 2, [of(5), of(3)]),
    "differences": (
        lambda x: torch.diff(x, dim=1).sum(-1) + x.diff(dim=-2)[..., 0],
        [of(3, 4, 5)],
    ),
    "as if quantised": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 3, -8, 7) * 2,
        [of(9, 7)],
    ),
    "as if quantised by tensors": (
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x * 1.0, s, z, 0, 255),
        [of(9, 7), torch.tensor(0.02), torch.tensor(120, dtype=torch.int32)],
    ),
    "as large, another layout": (
        lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format) + x.cos(),
        [of(4, 3)],
    ),
    "an angle": (lambda x, y: torch.arctan2(x, y), [of(6), of(6)]),
    "a normal": (
        lambda m, s, y: Normal(m, s.exp(), validate_args=False).log_prob(y).sum(-1),
        [of(4, 6), of(4, 6), of(4, 6)],
    ),
    "two normals": (
        lambda m, s: kl_divergence(
            Normal(m, s.exp(), validate_args=False), Normal(m * 0.5, 1.0, validate_args=False)
        ).mean(),
        [of(4, 6), of(4, 6)],
    ),
    "made as large": (
        lambda x, y: sum(v.sum(-1) for v in torch.broadcast_tensors(x, y)),
        [of(4, 1), of(6)],
    ),
    "entropy": (lambda x: Categorical(logits=x, validate_args=False).entropy(), [of(4, 6)]),
    "a choice": (
        lambda x, a: Categorical(logits=x, validate_args=False).log_prob(a),
        [of(4, 6), torch.arange(4)],
    ),
    "degrees": (lambda x: torch.deg2rad(x) + torch.rad2deg(x.sin()), [of(9)]),
    "data": (lambda x: x.data * x, [of(9)]),
    "rounded down": (lambda x: torch.div(x, 0.3, rounding_mode="floor") + x, [of(9)]),
    "rounded to zero": (lambda x: torch.div(x, 0.3, rounding_mode="trunc") + x, [of(9)]),
    "by operators": (lambda x: x % 0.3 + (x.detach() // 0.7) * x, [of(9)]),
    "angles": (lambda x: torch.atan2(x[:, 0], x[:, 1]), [of(9, 2)]),
    "the larger number": (lambda x, y: torch.fmax(x, y) * torch.fmin(x, 0.5 * y), [of(9), of(9)]),
    "between labels": (_focal, [of(6, 5), torch.rand(6) * 3]),
    "balanced": (_balanced, [of(6, 5)]),
    "enlarged": (lambda x, y: F.interpolate(x, scale_factor=2.0) + y, [of(1, 2, 3, 3), of(6, 6)]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_composed_function_is_torchs(case, device):
    function, tensors = CASES[case]
    tensors = [t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]
    found, wanted = fusegen.compile(function)(*tensors), function(*tensors)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    needing = [t for t in tensors if t.requires_grad]
    if needing:
        ours, eager = (torch.autograd.grad(r.square().sum(), needing) for r in (found, wanted))
        torch.testing.assert_close(ours, eager, equal_nan=True, **NEAR)


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_draws_as_torch_does(hard, is_turned, device):
    x = torch.randn(50, 6, device=device)
    x = (x.t().contiguous().t() if is_turned else x).requires_grad_()

    def function(x):
        return F.gumbel_softmax(x * 2, tau=0.5, hard=hard)

    fused, found = fusegen.compile(function), []
    for f in (fused, fused, function, function):
        if f is not (found[-1][0] if found else None):
            torch.manual_seed(3)
        result = f(x)
        found.append((f, result, *torch.autograd.grad(result.square().sum(), x)))
    for (_, ours, mine), (_, eager, its) in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(mine, its, **NEAR)
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: Normal(x, x.exp(), validate_args=True).log_prob(x),
            "give the distribution validate_args=False",
        ),
        (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), "takes nearest, which only mo"),
        (
            lambda x: F.triplet_margin_loss(x, x * 2, x * 3, size_average=False),
            "unexpected keyword argument 'size_average'",
        ),
        (lambda x: F.max_pool2d(x, 2, return_indices=True), "values, not their indices"),
        (lambda x: F.local_response_norm(x, 4), "got size=4, wanted an odd one"),
    ],
)
def test_what_is_not_composed_is_told(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(function)(torch.rand(1, 2, 3))
