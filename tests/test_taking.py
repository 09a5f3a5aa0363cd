"""What a call takes of tensors by torch's own functions, for functions that move what they compute:
axes in another order, parts of any length, elements elsewhere; and results of any form.
"""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusegen
from fusegen.errors import ChainError

# Gradients of squares of sums, added up in another order than eager's, in single precision.
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def of(*shape):
    return torch.randn(shape, requires_grad=True)


def below(most, *shape):
    return torch.randint(most, shape)


def _token_shift(x, mix):
    shifted = F.pad(x, (0, 0, 1, -1))
    return x * mix + shifted * (1 - mix)


def _noised(x, noise, alphas, t):
    return alphas[t].sqrt().view(-1, 1, 1, 1) * x + (1 - alphas[t]).sqrt().view(-1, 1, 1, 1) * noise


def _causal_loss(logits, labels):
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.float().view(-1, 11), labels.reshape(-1), ignore_index=-100)


def _both_ways(similarity, scale):
    right = torch.arange(similarity.shape[0], device=similarity.device)
    scores = similarity * scale
    return F.cross_entropy(scores, right) + F.cross_entropy(scores.t(), right)


def _distances(x):
    b, c, n = x.shape
    places = torch.arange(c // 4, dtype=x.dtype, device=x.device).view(1, -1, 1, 1)
    return (x.view(b, 4, c // 4, n).transpose(2, 1).softmax(1) * places).sum(1)


def _turned(q):
    b, s, h, d = q.shape
    return (q * 2).view(b, s, h, d // 2, 2).transpose(4, 3).reshape(b, s, h, d)


def _with_sinks(scores, sinks):
    sinks = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
    joined = torch.cat([scores, sinks], dim=-1)
    return F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]


def _dice(x, t):
    x, right = x.softmax(1), F.one_hot(t, 4).permute(0, 3, 1, 2)
    return 1 - (2 * (x * right).sum((2, 3)) / (x + right).sum((2, 3))).mean()


def _encoded(x):
    return torch.cat([f(x * k) for k in (1, 2, 4, 8) for f in (torch.sin, torch.cos)], -1)


CASES = {
    "heads": (lambda x, s: (x * 2).view(2, 5, 4, 3).transpose(1, 2) + s, [of(2, 5, 12), of(3)]),
    "unequal parts": (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1) * 2, [of(2, 5, 4)]),
    "padded": (_token_shift, [of(2, 5, 4), of(4)]),
    "rolled": (lambda x: x - torch.roll(x, 1, 1), [of(2, 5, 4)]),
    "channels last": (
        lambda x, w: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w).permute(0, 3, 1, 2),
        [of(2, 4, 3, 3), of(4)],
    ),
    "channels last, and added": (
        lambda x, w: x + F.layer_norm(x.permute(0, 2, 3, 1), (4,), w).permute(0, 3, 1, 2),
        [of(2, 4, 3, 3), of(4)],
    ),
    "a schedule": (_noised, [of(2, 3, 4, 4), of(2, 3, 4, 4), torch.rand(10), below(10, 2)]),
    "gathered": (
        lambda x, a, t: a.gather(-1, t).sqrt().view(-1, 1, 1, 1) * x,
        [of(2, 3, 4, 4), torch.rand(10), below(10, 2)],
    ),
    "selected": (
        lambda x, a, t: a.index_select(0, t).view(-1, 1) * x,
        [of(2, 3), of(10), below(10, 2)],
    ),
    "embedded": (lambda x, w, t: x + F.embedding(t, w), [of(2, 5, 8), of(10, 8), below(10, 2, 5)]),
    "shifted": (
        lambda x, t: F.cross_entropy(
            x.float()[..., :-1, :].reshape(-1, 11), t[..., 1:].reshape(-1)
        ),
        [of(2, 5, 11), below(11, 2, 5)],
    ),
    "padded labels": (_causal_loss, [of(2, 5, 11), below(11, 2, 5)]),
    "behind a temperature": (
        lambda x, t: (x / 0.7)[:, :-1].log_softmax(-1).gather(-1, t[:, 1:].unsqueeze(-1)),
        [of(2, 5, 11), below(11, 2, 5)],
    ),
    "both ways": (_both_ways, [of(6, 6), of()]),
    "a diagonal": (lambda s: -(s / 0.07).log_softmax(-1).diag().mean(), [of(6, 6)]),
    "distances": (_distances, [of(2, 16, 5)]),
    "repeated": (lambda r: r.view(-1, 3).mean(1).repeat_interleave(3, dim=0) * r, [of(12)]),
    "turned": (_turned, [of(2, 5, 3, 8)]),
    "partly turned": (
        lambda x, c: torch.cat([x[..., :2] * c, x[..., 2:]], -1),
        [of(2, 3, 8), of(2)],
    ),
    "sinks": (_with_sinks, [of(2, 4, 6, 6), of(4)]),
    "boxes": (lambda d, b: d * (b[:, 2] - b[:, 0])[:, None], [of(6, 8), of(6, 4)]),
    "shuffled": (lambda x: F.pixel_shuffle(F.relu(x), 2) * 2, [of(2, 8, 3, 3)]),
    "encoded": (_encoded, [of(4, 3)]),
    "mixed": (lambda x, share: x * share + x.flip(0) * (1 - share), [of(4, 3), of()]),
    "in another order": (lambda x, p: 0.3 * x + 0.7 * x[p], [of(4, 3), torch.randperm(4)]),
    "without the first": (lambda x, w: F.layer_norm(x, (8,), w)[:, 1:], [of(2, 5, 8), of(8)]),
    "dice": (_dice, [of(2, 4, 5, 5), below(4, 2, 5, 5)]),
    "twice": (lambda x: x.exp().t().softmax(-1).t() + x, [of(3, 5)]),
    "transposed at last": (lambda x: (x.sigmoid() * 2).T, [of(3, 5)]),
}


def _compared(function, tensors, fused):
    wanted, found = function(*tensors), fused(*tensors)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.requires_grad == wanted.requires_grad
    torch.testing.assert_close(found, wanted)
    needing = [t for t in tensors if t.requires_grad]
    grads = (torch.autograd.grad(r.square().sum(), needing) for r in (found, wanted))
    for ours, eager in zip(*grads, strict=True):
        torch.testing.assert_close(ours, eager, **NEAR)


@pytest.mark.parametrize("case", CASES)
def test_what_a_function_moves_is_taken_by_the_call(case, device):
    function, tensors = CASES[case]
    needs = [t.requires_grad for t in tensors]
    tensors = [t.detach().to(device) for t in tensors]
    fused = fusegen.compile(function)
    for _ in range(2):
        tensors = [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
        _compared(function, tensors, fused)
    with torch.no_grad():
        assert not fused(*tensors).requires_grad
    torch.testing.assert_close(fused.reference(*tensors), fused(*tensors), **NEAR)


class ChannelsLast(nn.Module):
    """A norm over channels, as ConvNeXt has it, and what is behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.rand(10))

    def forward(self, x, t):
        y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + y * self.scale[:, None, None] * self.table[t][:, None, None, None]


def test_a_layer_moves_what_it_computes(device):
    torch.manual_seed(0)
    module = ChannelsLast().to(device)
    layer = fusegen.Layer(module)
    for shape in ((2, 4, 3, 5), (3, 4, 6, 6)):
        x = torch.randn(shape, device=device, requires_grad=True)
        t = torch.randint(10, shape[:1], device=device)
        torch.testing.assert_close(layer(x, t), module(x, t))
        needing = [x, *module.parameters()]
        ours, eager = (
            torch.autograd.grad(m(x, t).square().sum(), needing) for m in (layer, module)
        )
        torch.testing.assert_close(ours, eager, **NEAR)


Pair = namedtuple("Pair", "first, second")
FORMS = {
    "none": lambda x, y: (x * y, None),
    "none first": lambda x, y: (None, x * y),
    "a list": lambda x, y: [x * y, x + y],
    "a dict": lambda x, y: {"loss": (x * y).sum(), "logits": x + y},
    "one in a list": lambda x, y: [x * y],
    "in each other": lambda x, y: (x * y, [x + y, (x - y, None)], {"y": y.exp()}),
    "a named tuple": lambda x, y: Pair(x * y, y.exp()),
}


@pytest.mark.parametrize("form", FORMS)
def test_results_are_in_the_form_in_which_the_function_gives_them(form):
    x, y = torch.randn(2, 3, 4, requires_grad=True), torch.randn(3, 4)
    wanted, found = FORMS[form](x, y), fusegen.compile(FORMS[form])(x, y)
    assert type(found) is type(wanted)
    torch.testing.assert_close(found, wanted)


def test_a_loss_is_given_where_labels_are():
    def forward(x, labels=None):
        loss = None
        if labels is not None:
            loss = F.cross_entropy(x, labels)
        return x * 2, loss

    x, labels = torch.randn(5, 7), torch.randint(7, (5,))
    fused = fusegen.compile(forward)
    for given in ((x,), (x, labels), (x, None)):
        torch.testing.assert_close(fused(*given), forward(*given))


def test_parameters_that_are_not_used_may_be_there():
    def function(x, positions, y, cache=None):
        return x * y

    x, y = torch.randn(2, 3)
    fused = fusegen.compile(function)
    torch.testing.assert_close(fused(x, torch.arange(3), y), x * y)
    torch.testing.assert_close(fused(x, positions=torch.arange(3), y=y), x * y)


@pytest.mark.parametrize(
    ("function", "tensors", "message"),
    [
        (
            lambda x, m: (x * 2)[m],
            [torch.ones(3), torch.ones(3).bool()],
            r"x\[condition\]: how many",
        ),
        (lambda x: x.cumsum(0), [torch.ones(3)], "x.cumsum: no step does it"),
        (lambda x: (x, b"3"), [torch.ones(3)], "must return an expression, got a bytes"),
        (
            lambda x: x[1:],
            [torch.ones(3)],
            "computes nothing, but gives what it is given, or parts",
        ),
        (
            lambda x, y: (x.flip(0), y),
            [torch.ones(3)] * 2,
            "computes nothing, but gives what it is",
        ),
    ],
)
def test_what_is_not_taken_is_told(function, tensors, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(function)(*tensors)
