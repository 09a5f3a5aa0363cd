"""Integers and places as values of a chain: counted, compared, used as labels, and given back."""

import functools

import pytest
import torch
import torch.nn.functional as F
from numeric import assert_as_accurate, outcome

import fusegen


def _log_probabilities(logits, labels):
    is_there = labels != -100
    labels = labels.masked_fill(~is_there, 0)
    found = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (found * is_there).sum(-1)


def _mean_log_probability(logits, labels):
    is_there = labels != -100
    index = labels.clamp(min=0).unsqueeze(2)
    found = torch.gather(logits.log_softmax(-1), 2, index).squeeze(2)
    return (found * is_there).sum(-1) / is_there.sum(-1)


def _where_labels(logits, labels):
    labels = torch.where(labels == -100, 0, labels)
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)


def _loss_without_padding(logits, labels):
    labels = labels.masked_fill(labels == 3, -100)
    return F.cross_entropy(logits.transpose(1, 2), labels)


def _loss_of_rows(logits, labels):
    labels = labels.masked_fill(labels == 3, -100)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def _smoothed(logits, labels):
    labels = labels.unsqueeze(-1)
    is_padding = labels.eq(-100)
    found = logits.log_softmax(-1)
    loss = -found.gather(dim=-1, index=labels.clamp(min=0))
    return loss.masked_fill(is_padding, 0.0).sum() / (~is_padding).sum()


def _polynomial_loss(logits, labels):
    rows, classes = logits.flatten(0, 1), labels.clamp(min=0).flatten()
    chosen = (F.one_hot(classes, rows.shape[-1]) * rows.softmax(-1)).sum(-1)
    return (F.cross_entropy(rows, classes, reduction="none") + (1 - chosen)).mean()


def _straight_through(logits, labels):
    hard = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    soft = logits.softmax(-1)
    return hard - soft.detach() + soft


LEARNING = [
    _log_probabilities,
    _mean_log_probability,
    _where_labels,
    _loss_without_padding,
    _loss_of_rows,
    _smoothed,
    _polynomial_loss,
    _straight_through,
]


@pytest.fixture
def logits(device):
    return torch.randn(3, 5, 11, device=device)


@pytest.fixture
def labels(device):
    labels = torch.arange(15, device=device).view(3, 5) % 11
    labels[0, :2] = -100
    return labels


@pytest.mark.parametrize("function", LEARNING)
def test_labels_are_made_in_the_chain(function, logits, labels, device):
    if function in (_loss_without_padding, _loss_of_rows):
        labels = labels.clamp(min=0)
    for dtype in (torch.float32, torch.bfloat16):
        x = logits.to(dtype).requires_grad_()
        ours = outcome(functools.partial(fusegen.compile(function), labels=labels), [x])
        eager = outcome(functools.partial(function, labels=labels), [x])
        exact = outcome(functools.partial(function, labels=labels), [x], dtype=torch.float64)
        assert_as_accurate(ours, eager, exact)


COUNTED = {
    "all that are positive": lambda x, t: (x > 0).sum(),
    "those of a row": lambda x, t: (x > 0).sum(-1),
    "with the axis": lambda x, t: (x > 0).sum((0, 2), keepdim=True),
    "of another tensor": lambda x, t: (t != -100).sum(),
    "and more": lambda x, t: (x > 0).sum(-1) + 1,
    "and compared": lambda x, t: (x > 0).sum(-1) > t,
    "accuracy": lambda x, t: (x.argmax(-1) == t).float().mean(),
    "the right ones": lambda x, t: (x.argmax(-1) == t).sum(),
    "without padding": lambda x, t: ((x.argmax(-1) == t) & (t != -100)).sum(),
    "a share of them": lambda x, t: ((x.argmax(-1) == t) & (t != -100)).sum() / (t != -100).sum(),
    "a place and one": lambda x, t: x.argmax(-1) + 1,
    "a place as a number": lambda x, t: x.argmin(-1).float() / 10,
    "places that are chosen": lambda x, t: torch.where(t < 0, t, x.argmax(-1)),
    "one of two": lambda x, t: torch.where(x > 0, 1, 0),
    "one of two, times x": lambda x, t: torch.where(x > 0, 1, -1) * x,
    "confusion": lambda x, t: ((x > 0).long() * t.unsqueeze(-1).clamp(0, 1)).sum(),
    "the integers themselves": lambda x, t: (x, t * 2 + 1),
    "cut off": lambda x, t: (x * 10).int(),
    "cut off and wrapped": lambda x, t: (x.abs() * 300).to(torch.uint8),
    "rounded and back": lambda x, t: (x / 0.1).round().clamp(-8, 7).to(torch.int8).float() * 0.1,
    "a condition as integers": lambda x, t: (x > 0).to(torch.int16),
    "the least integers": lambda x, t: t.clamp(min=0).to(torch.uint8) + (x > 0).byte().sum(-1),
    "a pair": lambda x, t: x.softmax(-1).max(-1),
    "nothing of x": lambda x, t: t.float().mean(-1),
    "a union": lambda x, t: ((x > 0) | (t > 3).unsqueeze(-1)).sum((1, 2)),
}


# What is cut off tells whether a value was rounded before, which a chain does not do in between.
CUT_OFF = ("cut off", "cut off and wrapped", "rounded and back")


@pytest.mark.parametrize("case", COUNTED)
def test_integers_are_results_and_values(case, logits, labels):
    function = COUNTED[case]
    for dtype in (torch.float32, torch.float64, torch.bfloat16)[: 2 if case in CUT_OFF else 3]:
        x = logits.to(dtype).requires_grad_()
        found, wanted = fusegen.compile(function)(x, labels), function(x, labels)
        several = isinstance(wanted, tuple)
        for ours, eager in zip(
            found if several else (found,), wanted if several else (wanted,), strict=True
        ):
            assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
            assert ours.requires_grad == eager.requires_grad or ours is x
            if eager.is_floating_point():
                torch.testing.assert_close(ours, eager)
            else:
                assert torch.equal(ours, eager)


def test_what_is_added_up_is_exact_whatever_its_size(device):
    ones = torch.ones(5, 2**22 + 3, dtype=torch.bool, device=device)
    assert fusegen.compile("sum")(ones).item() == 5 * (2**22 + 3)
    assert fusegen.compile(lambda x: (x > 0.1).sum())(ones.float() * 0.1).item() == 0
    large = torch.randint(2**40, (3, 1000), device=device)
    assert torch.equal(fusegen.compile("sum(1)")(large), large.sum(1))
    assert torch.equal(fusegen.compile("mul(3) | sum")(large), (large * 3).sum())


def test_what_is_made_of_conditions_or_detached_alone_requires_no_gradient(device):
    x, y = torch.randn(3, 8, device=device, requires_grad=True), torch.randn(3, 8, device=device)
    for function in (
        lambda x, y: (x > y).float().mean(),
        lambda x, y: x.detach() * y,
        lambda x, y: torch.where(x > 0, y, -y),
        lambda x, y: (x > y) * y,
        lambda x, y: x.eq(0).to(x.dtype).sum(-1),
        lambda x, y: (x * y).detach() * y,
    ):
        found, wanted = fusegen.compile(function)(x, y), function(x, y)
        assert found.requires_grad == wanted.requires_grad is False
        torch.testing.assert_close(found, wanted)


def test_conditions_and_integers_are_detached_as_they_are(logits, labels):
    def clipped(x, t):
        with torch.no_grad():
            share = (x.exp().sub(1).abs() > 0.2).float().mean()
        return (x * (x > 0.1).detach()).sum(), share, (t.detach() + 1).sum()

    x = logits.requires_grad_()
    for ours, eager in zip(fusegen.compile(clipped)(x, labels), clipped(x, labels), strict=True):
        torch.testing.assert_close(ours, eager)
        assert ours.requires_grad == eager.requires_grad


def test_text_says_the_same(logits, labels):
    accuracy = fusegen.compile("argmax(-1) | eq(t) | to('float32') | mean")
    wanted = (logits.argmax(-1) == labels).float().mean()
    torch.testing.assert_close(accuracy(logits, t=labels), wanted)
    counted = fusegen.compile("gt(0) | sum(-1)")(logits)
    assert torch.equal(counted, (logits > 0).sum(-1))
    assert torch.equal(fusegen.compile("mul(10) | to('int32')")(logits), (logits * 10).int())


def test_integers_go_from_kernel_to_kernel(device):
    def counted(x, t):
        places = x.argmax(1)
        return F.max_pool2d(x, 2) * (places == t).sum((1, 2))[:, None, None, None]

    x = torch.randn(2, 5, 6, 8, device=device, requires_grad=True)
    t = torch.randint(5, (2, 6, 8), device=device)
    torch.testing.assert_close(fusegen.compile(counted)(x, t), counted(x, t))


SMALL = [torch.uint8, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda i: i.long(),
        lambda i: i.long() * 1000000,
        lambda i: (i.to(torch.int64) * 100).float(),
        lambda i: i.to(torch.int64) * i,
        lambda i: i.to(torch.int32).long() * 100000,
        lambda i: i.sum(-1, dtype=torch.int32),
        lambda i: i.masked_fill(i > 2, 2.7),
        lambda i: (i > 2).masked_fill(i > 3, 0),
        lambda i: (i > 2).masked_fill(i < 3, 1),
        lambda i: (i > 2).sum(-1, dtype=torch.int32),
        lambda i: (i > 2).triu(1) & (i < 100),
        lambda i: (i.sum() > 0).sum(),
        lambda i: i.sum().sum(0),
    ],
)
def test_integers_have_torchs_types_and_values(function, dtype, device):
    i = torch.tensor([[100, 3, 2], [1, 0, 120], [7, 2, 5]], dtype=dtype, device=device)
    found, expected = fusegen.compile(function)(i), function(i)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_a_value_without_axes_has_no_places():
    for function in (lambda x: x.argmax(0), lambda x: x.max(0).indices):
        with pytest.raises(fusegen.ChainError, match="argmax: got a value without axes"):
            fusegen.compile(function)(torch.tensor(1.0))
