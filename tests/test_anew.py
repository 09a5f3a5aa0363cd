"""Tensors that are used again along other axes: in a segment of their own."""

import pytest
import torch
import torch.nn.functional as F
from numeric import assert_as_accurate, outcome

import fusegen

IMAGES, SAMPLES = (4, 3, 5, 5), (4,)
LOGITS = (4, 8)


def wide(t):
    return t[:, None, None, None]


# what is computed, and the shapes of its tensors; "labels" and "mask" are what they say
FUNCTIONS = {
    "noised": (
        lambda x, e, a: wide(a.sigmoid().sqrt()) * x + wide((1 - a.sigmoid()).sqrt()) * e,
        [IMAGES, IMAGES, SAMPLES],
    ),
    "noised, by view": (
        lambda x, e, a: a.exp().view(-1, 1, 1, 1) * x - (1 - a).exp().view(-1, 1, 1, 1) * e,
        [IMAGES, IMAGES, SAMPLES],
    ),
    "two losses of one target": (
        lambda a, b, y: F.mse_loss(a, y) + F.mse_loss(b, y),
        [LOGITS] * 3,
    ),
    "three losses of three": (
        lambda a, b, y: F.mse_loss(a, y) + F.l1_loss(b, y) + F.smooth_l1_loss(a, b),
        [LOGITS] * 3,
    ),
    "two losses of one label": (
        lambda a, b, t: F.cross_entropy(a, t) + F.cross_entropy(b, t),
        [LOGITS, LOGITS, "labels"],
    ),
    "both ways": (lambda x: x.logsumexp(0) + x.logsumexp(1), [(6, 6)]),
    "each with each": (lambda x: x.unsqueeze(-1) - x.unsqueeze(-2).tanh(), [LOGITS]),
    "a bias by row and by column": (
        lambda x, c: x + c[:, :, :, None] - c[:, :, None, :],
        [IMAGES, IMAGES[:3]],
    ),
    "a mask by row and by column": (
        lambda x, m: x.masked_fill(~(m[:, None, :, None] & m[:, None, None, :]), -9.0).softmax(-1),
        [IMAGES, "mask"],
    ),
    "a mean, and what it is of": (lambda x: x.mean(-1) + x.sigmoid(), [(6, 6)]),
    "a kept value, several times": (
        lambda x, w: (x.exp() * w).sum(-1) * x.exp() + w * x.exp().mean(0),
        [(6, 6), (6,)],
    ),
}


def tensors_of(shapes, dtype, device):
    found = []
    for shape in shapes:
        if shape == "labels":
            found.append(torch.randint(LOGITS[1], LOGITS[:1], device=device))
        elif shape == "mask":
            found.append(torch.randn(IMAGES[0], IMAGES[2], device=device) > -0.5)
        else:
            found.append(torch.randn(shape, device=device, dtype=dtype).requires_grad_())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_may_be_used_again_along_other_axes(name, dtype, device):
    function, shapes = FUNCTIONS[name]
    fused = fusegen.compile(function)
    tensors = tensors_of(shapes, dtype, device)
    ours, eager = outcome(fused, tensors), outcome(function, tensors)
    assert_as_accurate(ours, eager, outcome(function, tensors, dtype=torch.float64))
    again = outcome(fused, tensors)
    assert all(map(torch.equal, ours.tensors, again.tensors))


def test_one_callable_meets_both(device):
    fused = fusegen.compile("keep(y) | mean(-1) | add(y)")
    for shape in ((1, 4), (4, 4), (1, 7), (4, 4)):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(fused(x), x.mean(-1) + x)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("keep(k) | sum((0, 1, 3)) | keep(s) | recall(k) | add_channel(s)", [(2, 4, 4, 6)]),
        ("add_channel(t) | layernorm(t)", [(2, 6, 4, 6), (6,)]),
        ("add(t) | avg_pool2d(2) | sum(1) | add(t)", [(3, 3, 6, 6), (3, 1, 1)]),
    ],
)
def test_a_chain_does_what_its_steps_do_one_by_one(text, shapes, device):
    fused = fusegen.compile(text)
    tensors = tensors_of(shapes, torch.float32, device)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert_as_accurate(ours, eager, outcome(fused.reference, tensors, dtype=torch.float64))


def test_it_is_told_where_a_chain_is_cut_for_it():
    fused = fusegen.compile(FUNCTIONS["two losses of one target"][0])
    told = fused.explain("cuda", shape=LOGITS, operands={"b": LOGITS, "y": LOGITS})
    assert "segment 2 of 2" in told
    assert "cut here: mse_loss(y) uses 'y' again, along other axes" in told


def test_it_works_under_autocast_and_into_a_given_tensor_and_recorded(device):
    a, b, y = tensors_of([LOGITS] * 3, torch.float32, device)
    losses = FUNCTIONS["two losses of one target"][0]
    with torch.autocast(a.device.type, dtype=torch.bfloat16):
        ours, eager = fusegen.compile(losses)(a, b, y), losses(a, b, y)
    assert ours.dtype == eager.dtype
    torch.testing.assert_close(ours, eager)
    fused = fusegen.compile(lambda x: x.unsqueeze(-1) - x.unsqueeze(-2))
    with torch.no_grad():
        out = torch.empty(*LOGITS, LOGITS[1], device=device)
        assert torch.equal(fused(a, out=out), a.unsqueeze(-1) - a.unsqueeze(-2))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fused(x) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a), (a.unsqueeze(-1) - a.unsqueeze(-2)) * 2)


def test_second_derivatives_pass_the_cut():
    fused = fusegen.compile(lambda x: (x.exp().sum(-1) * x.tanh()).sigmoid())
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, (x,))
    assert torch.autograd.gradgradcheck(fused, (x,))


def test_integers_lie_along_two_sets_of_axes(device):
    def function(x, s):
        return x * (s[:, :, None] == s[:, None])

    fused = fusegen.compile(function)
    x, s = torch.ones(2, 5, 5, device=device), torch.randint(3, (2, 5), device=device)
    assert torch.equal(fusegen.compile(fused.chain)(x, s), function(x, s))
    assert torch.equal(fused(x, s), function(x, s))
