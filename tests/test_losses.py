"""Losses of classes against labels: torch's values and gradients, and what is no label."""

import functools

import pytest
import torch
import torch.nn.functional as F
from numeric import assert_as_accurate, has_right_second_derivatives, outcome

import fusegen
from fusegen.describe import Situation, modules
from fusegen.emission import make_entry
from fusegen.errors import ArgumentError, ChainError

# x's shape, and of which axis its classes are
SHAPES = [((37, 10), 1), ((6, 5, 9), 1), ((3, 7, 4, 5), 1), ((11,), 0)]
WAYS = [
    "cross_entropy(target)",
    "cross_entropy(target, reduction='sum')",
    "cross_entropy(target, reduction='none')",
    "cross_entropy(target, label_smoothing=0.1)",
    "cross_entropy(target, ignore_index=2)",
    "cross_entropy(target, ignore_index=2, reduction='none', label_smoothing=0.3)",
    "log_softmax({axis}) | nll_loss(target)",
    "log_softmax({axis}) | nll_loss(target, ignore_index=0, reduction='sum')",
]
WEIGHTED = [
    "cross_entropy(target, weight)",
    "cross_entropy(target, weight, ignore_index=1, label_smoothing=0.2)",
    "log_softmax(1) | nll_loss(target, weight)",
    "cross_entropy(target, weight, reduction='none')",
]


def labels_of(shape, axis, device):
    """A label for each index of all other axes; each class is named by some."""
    others = [*shape[:axis], *shape[axis + 1 :]]
    return torch.randint(shape[axis], others, device=device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=[str(s) for s, _ in SHAPES])
@pytest.mark.parametrize("text", WAYS)
def test_a_loss_of_labels_is_torchs(text, shape, axis, dtype, device):
    fused = fusegen.compile(text.format(axis=axis))
    x = torch.randn(shape, dtype=torch.float64).mul(3).to(device, dtype).requires_grad_()
    tensors = [x, labels_of(shape, axis, device)]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(ours, eager, exact)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("text", WEIGHTED)
def test_classes_may_have_weights(text, layout, device):
    fused = fusegen.compile(text)
    shape = (4, 9, 5, 6)
    x = torch.randn(shape, device=device)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    tensors = [x.requires_grad_(), labels_of(shape, 1, device), torch.rand(9, device=device)]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert_as_accurate(ours, eager, outcome(fused.reference, tensors, dtype=torch.float64))


def test_the_weights_have_a_gradient_which_torch_refuses(device):
    x = torch.randn(12, 5, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.rand(5, dtype=torch.float64, device=device, requires_grad=True)
    target = labels_of((12, 5), 1, device)

    def by_hand(x, target, weight):
        shares = weight[target]
        return -(x.log_softmax(1).gather(1, target[:, None])[:, 0] * shares).sum() / shares.sum()

    fused = fusegen.compile("cross_entropy(target, weight)")
    ours, eager = (outcome(f, [x, target, weight]) for f in (fused, by_hand))
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b)


def test_labels_that_are_ignored_count_for_nothing(device):
    x = torch.randn(8, 6, device=device, requires_grad=True)
    target = torch.tensor([0, -100, 5, -100, 1, 2, -100, 3], device=device)
    fused = fusegen.compile("cross_entropy(target)")
    ours = outcome(fused, [x, target])
    eager = outcome(F.cross_entropy, [x, target])
    torch.testing.assert_close(ours.result, eager.result)
    torch.testing.assert_close(ours.gradients[0], eager.gradients[0])
    assert torch.equal(ours.gradients[0][1], torch.zeros(6, device=device))


def test_of_no_label_at_all_the_mean_is_not_a_number_as_in_torch(device):
    target = torch.full((4,), -100, device=device)
    x = torch.randn(4, 3, device=device)
    assert fusegen.compile("cross_entropy(target)")(x, target).isnan()
    assert fusegen.compile("cross_entropy(target, reduction='sum')")(x, target) == 0


@pytest.mark.parametrize("label", [-1, 6, 100, -(1 << 20)])
def test_a_label_that_is_no_class_makes_the_loss_not_a_number(label, device):
    # torch stops: on a CPU with an error, on a GPU with the process's use of it.
    x = torch.randn(5, 6, device=device)
    target = torch.tensor([0, 1, label, 3, 4], device=device)
    each = fusegen.compile("cross_entropy(target, reduction='none')")(x, target)
    assert each.isnan().tolist() == [False, False, True, False, False]
    assert fusegen.compile("log_softmax(1) | nll_loss(target)")(x, target).isnan()


@pytest.mark.parametrize("value", [1e4, float("inf"), float("-inf"), float("nan")])
def test_large_and_infinite_values_have_torchs_losses(value, device):
    x = torch.randn(6, 5, device=device)
    x[2, 1] = value
    x[3, 4] = value
    target = torch.tensor([0, 1, 1, 2, 3, 4], device=device)
    tensors = [x.requires_grad_(), target]
    fused = fusegen.compile("cross_entropy(target, reduction='none')")
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize(
    "text",
    [
        "cross_entropy(target)",
        "cross_entropy(target, label_smoothing=0.1, reduction='none')",
        "tanh | log_softmax(1) | nll_loss(target, ignore_index=1)",
    ],
)
def test_second_derivatives_are_right(text, device):
    fused = fusegen.compile(text)
    x = torch.randn(3, 4, 2, dtype=torch.float64, device=device, requires_grad=True)
    target = labels_of(x.shape, 1, device)
    assert torch.autograd.gradcheck(fused, (x, target))
    assert has_right_second_derivatives(fused, (x, target))


def test_a_loss_stands_behind_a_whole_chain(device):
    """A language model's: positions and samples are one axis, logits are capped."""
    fused = fusegen.compile("flatten(0, 1) | mul(0.1) | tanh | mul(10) | cross_entropy(target)")

    def by_hand(x, target):
        return F.cross_entropy(10 * torch.tanh(0.1 * x.flatten(0, 1)), target)

    x = torch.randn(2, 7, 33, device=device, requires_grad=True)
    tensors = [x, labels_of((14, 33), 1, device)]
    ours, eager = (outcome(f, tensors) for f in (fused, by_hand))
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b)


def test_labels_may_lie_anyhow_and_losses_go_on(device):
    fused = fusegen.compile("cross_entropy(target, reduction='none') | square | mean")
    target = labels_of((3, 8, 10), 1, device)[:, ::2]
    x = torch.randn(3, 8, 5, device=device).requires_grad_()
    ours, eager = (outcome(f, [x, target]) for f in (fused, fused.reference))
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(8192, 32000), (4096, 50257), (2048, 128256)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_vocabulary_is_read_once_each_way(shape, dtype):
    chain = fusegen.chain("cross_entropy(target)")
    (module,) = modules(chain, "cuda", Situation(shape, dtype=dtype), grad=True)
    entries = [make_entry(program, module.signature) for program in module.programs]
    families = [[kernel.family for kernel in entry.kernels] for entry in entries]
    # What is left of each row is added up, however many there are.
    assert families == [["row", "finalise"], ["pointwise"]]


X, LABELS = torch.zeros(8, 10), torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("text", "tensors", "message"),
    [
        ("cross_entropy(t)", (X, LABELS.int()), "'t' is int32, wanted int64.* t.long()"),
        ("cross_entropy(t)", (X, X), "'t' is float32, wanted int64.*log_softmax"),
        ("nll_loss(t)", (X, LABELS > 0), "'t' is bool, wanted int64"),
        ("nll_loss(t)", (X, LABELS[:4]), r"'t' got shape \(4,\), wanted \(8,\)"),
        ("nll_loss(t)", (X, LABELS[:, None]), r"'t' got shape \(8, 1\), wanted \(8,\)"),
        ("nll_loss(t)", (X[0, 0], LABELS[0]), r"value of shape \(\), wanted one with classes"),
        ("nll_loss(t, w)", (X, LABELS, X[0, :4]), r"'w' got shape \(4,\), wanted \(10,\)"),
        ("nll_loss(t, w)", (X, LABELS, X[0].double()), "'w' is float64 but the value"),
    ],
)
def test_what_is_no_label_is_told(text, tensors, message):
    with pytest.raises(ArgumentError, match=message):
        fusegen.compile(text)(*tensors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cross_entropy(t, ignore_index=100000000)", "ignore_index is 100000000"),
        ("cross_entropy(t, label_smoothing=1.5)", "label_smoothing is 1.5, wanted one from 0 to 1"),
        ("smooth_l1_loss(t, beta=-1)", "beta is -1, wanted one of at least 0"),
        ("huber_loss(t, delta=0)", "delta is 0, wanted one above 0"),
        ("nll_loss(t, reduction='avg')", "wants 'mean' or 'sum' or 'none', got 'avg'"),
    ],
)
def test_what_a_loss_cannot_do_is_told(text, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(text)


@pytest.mark.parametrize(
    "text", ["huber_loss(t, delta=0.7)", "smooth_l1_loss(t, beta=0.7)", "l1_loss(t)"]
)
def test_a_distance_that_is_infinite_has_torchs_gradient(text, device):
    fused = fusegen.compile(text)
    x = torch.tensor([float("inf"), 0.7, -0.7, 0.1, -3.0, 0.0], device=device)
    tensors = [x.requires_grad_(), torch.zeros(6, device=device)]
    ours, eager = (outcome(f, tensors) for f in (fused, fused.reference))
    torch.testing.assert_close(ours.gradients[0], eager.gradients[0])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_weights_of_logits_have_no_part_in_what_is_differentiated_twice(reduction, device):
    text = f"binary_cross_entropy_with_logits(t, w, reduction='{reduction}', pos_weight=p)"
    fused = fusegen.compile(text)
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    t, w, p = (torch.rand(s, dtype=torch.float64, device=device) for s in ((3, 4), (4,), (4,)))
    torch.testing.assert_close(fused(x, t, w, p), fused.reference(x, t, w, p))
    assert torch.autograd.gradcheck(fused, (x, t, w, p))
    assert has_right_second_derivatives(fused, (x, t, w, p))


def of_tokens(logits, labels):
    """As a language model has it."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def of_many_tokens(logits, labels):
    logits = 30 * torch.tanh(logits.float() / 30)
    return F.cross_entropy(logits.view(-1, 12), labels.reshape(-1), reduction="sum")


def of_log_p(logits, labels):
    return F.nll_loss(F.log_softmax(logits, -1).reshape(-1, 12), labels.flatten())


def of_pixels(logits, labels):
    return F.cross_entropy(logits.unflatten(-1, (4, 3)).flatten(2), labels)


LABELS_ELSEWHERE = [
    (of_tokens, (3, 5, 12), (3, 5)),
    (of_tokens, (1, 5, 12), (1, 5)),
    (of_tokens, (2, 3, 2, 12), (2, 3, 2)),
    (of_many_tokens, (3, 5, 12), (3, 5)),
    (of_many_tokens, (3, 5, 12), (15,)),
    (of_log_p, (3, 5, 12), (3, 5)),
    (lambda x, t: F.cross_entropy(x.view(-1, 12), t.view(-1)), (3, 5, 12), (3, 5)),
    (lambda x, t: F.cross_entropy(x.flatten(2), t.flatten(1)), (3, 12, 4, 5), (3, 4, 5)),
    (of_pixels, (3, 4, 12), (3, 12)),
]


@pytest.mark.parametrize(
    ("function", "shape", "labels"), LABELS_ELSEWHERE, ids=[f"{c[1:]}" for c in LABELS_ELSEWHERE]
)
def test_labels_may_be_seen_in_the_shape_that_x_is_seen_in(function, shape, labels, device):
    x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    t = torch.randint(4, labels, device=device)
    t.view(-1)[1] = -100
    fused = fusegen.compile(function)
    ours, wanted, other = fused(x, t), function(x, t), fused.reference(x, t)
    # One of these computes in floats, whose gradient is one of doubles here.
    within = {"rtol": 1e-5, "atol": 1e-6} if function is of_many_tokens else {}
    torch.testing.assert_close(ours, wanted, **within)
    torch.testing.assert_close(other, wanted)
    mine, theirs = (torch.autograd.grad(r, x) for r in (ours, wanted))
    torch.testing.assert_close(mine, theirs, **within)
    assert [len(way) for way in fused._parts if way[0].plans] == [1]


def test_labels_of_another_shape_than_that_are_told():
    x, fused = torch.randn(3, 5, 12), fusegen.compile(of_tokens)
    for shape in ((5, 3), (3, 5, 1)):  # which the call sees in the wanted one
        labels = torch.randint(12, shape)
        torch.testing.assert_close(fused(x, labels), of_tokens(x, labels))
    chain = fusegen.compile(fused.chain)
    for compiled, shapes in ((fused, ((16,),)), (chain, ((5, 3), (3, 5, 1), (16,)))):
        for shape in shapes:
            with pytest.raises(ArgumentError, match=r"'labels' got shape .*, wanted \(15,\)"):
                compiled(x, torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_probabilities_of_0_and_1_have_torchs_loss_and_gradient(dtype, reduction, device):
    # Where the target is what is certain already, torch has no gradient, and ours is the limit.
    probable = torch.rand(16, 33).clamp(0.01, 0.99)
    probable[0, :2], probable[0, 2:4] = 0.0, 1.0
    probable[1] = 1e-14
    target = torch.rand(16, 33)
    target[0, :4] = torch.tensor([1.0, 0.5, 0.0, 0.5])
    x, t = (v.to(dtype).to(device).requires_grad_(v is probable) for v in (probable, target))
    function = functools.partial(F.binary_cross_entropy, reduction=reduction)
    fused = fusegen.compile(lambda x, t: function(x, t))
    ours, wanted = fused(x, t), function(x, t)
    # In bf16 torch rounds each of its steps; a sum of 500 is left to fp32's order otherwise.
    near = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, wanted, **near)
    probe = torch.randn_like(wanted)
    mine, theirs = (torch.autograd.grad(r, x, probe)[0] for r in (ours, wanted))
    torch.testing.assert_close(mine, theirs, **near)


def test_a_loss_of_no_probability_is_nan(device):
    x = torch.tensor([-0.5, 1.5, 0.5], device=device)
    found = fusegen.compile("binary_cross_entropy(t, reduction='none')")(x, torch.full_like(x, 0.5))
    assert found.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(6, 5), (6, 1)])
def test_a_gaussian_loss_is_torchs_where_that_takes_the_variance(shape, reduction, full, device):
    x, target = (torch.randn(6, 5, device=device, dtype=torch.float64) for _ in range(2))
    var = torch.rand(shape, device=device, dtype=torch.float64)
    var[0, 0] = 1e-9  # below eps
    tensors = [t.requires_grad_() for t in (x, target, var)]
    function = functools.partial(F.gaussian_nll_loss, full=full, reduction=reduction)
    ours, wanted = fusegen.compile(lambda x, t, v: function(x, t, v))(*tensors), function(*tensors)
    torch.testing.assert_close(ours, wanted)
    probe = torch.randn_like(wanted)
    mine, theirs = (torch.autograd.grad(r, tensors, probe) for r in (ours, wanted))
    torch.testing.assert_close(mine, theirs)


def log_probabilities(x, t):
    return x.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def selective(x, t):
    return torch.gather(x, 2, t.unsqueeze(2)).squeeze(2) - x.logsumexp(-1)


def along_another(x, t):
    return torch.take_along_dim(x.log_softmax(-1), t.unsqueeze(2), dim=-1) * 2


def shifted(x, t):
    chosen = x[:, :-1].log_softmax(-1).gather(dim=-1, index=t[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen, x[:, :-1].softmax(-1).amax(-1)


def shifted_loss(x, t):
    logits = x[..., :-1, :].contiguous().view(-1, x.size(-1))
    return F.cross_entropy(logits, t[..., 1:].contiguous().view(-1))


def by_one_hot(x, t):
    return -(F.one_hot(t, x.size(-1)) * x.log_softmax(-1)).sum(-1).mean()


def smoothed(x, t):
    wanted = (1 - F.one_hot(t, x.size(-1))) * 0.125 + F.one_hot(t, x.size(-1)) * 0.5
    return (x.softmax(-1) - F.one_hot(t, x.size(-1))) * wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "function",
    [smoothed, log_probabilities, selective, along_another, shifted, shifted_loss, by_one_hot],
)
def test_what_labels_name_is_taken_as_code_has_it(function, dtype, device):
    x = torch.randn(3, 5, 70, dtype=dtype, device=device, requires_grad=True)
    t = torch.randint(70, (3, 5), device=device)
    exact = x.detach().double().requires_grad_()

    def results(f, x):
        found = f(x, t)
        return found if isinstance(found, tuple) else (found,)

    ours, eagers = results(fusegen.compile(function), x), results(function, x)
    doubles = results(function, exact)
    assert [y.dtype for y in ours] == [y.dtype for y in eagers]
    probes = [torch.randn_like(y) for y in doubles]
    (a,) = torch.autograd.grad(ours, x, [p.to(dtype) for p in probes])
    (b,) = torch.autograd.grad(eagers, x, [p.to(dtype) for p in probes])
    (c,) = torch.autograd.grad(doubles, exact, [p.to(dtype).double() for p in probes])
    for mine, theirs, wanted in zip((*ours, a), (*eagers, b), (*doubles, c), strict=True):
        off, usual = ((y.double() - wanted).abs().max() for y in (mine, theirs))
        close = 8 * torch.finfo(dtype).eps * (1 + wanted.abs().max())
        assert off <= torch.maximum(2 * usual, close)


@pytest.mark.parametrize("text", ["gather({0}, t)", "log_softmax({0}) | gather({0}, t, False)"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_places_may_lie_along_any_axis(dim, layout, text, device):
    x = torch.randn(4, 6, 5, 7, device=device).contiguous(memory_format=layout).requires_grad_()
    wide = [1 if a == dim % 4 else n for a, n in enumerate(x.shape)]
    t = torch.randint(x.shape[dim], wide, device=device)
    fused = fusegen.compile(text.format(dim))
    found = fused(x, t)
    wanted = (x.log_softmax(dim) if "soft" in text else x).gather(dim, t)
    wanted = wanted.squeeze(dim) if "False" in text else wanted
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(fused(x, t.squeeze(dim)), wanted)
    torch.testing.assert_close(fused.reference(x, t.squeeze(dim)), wanted)
    probe = torch.randn_like(wanted)
    ours, eagers = (torch.autograd.grad(y, x, probe)[0] for y in (found, wanted))
    torch.testing.assert_close(ours, eagers)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(2, 5, 1, 1, dtype=torch.int64), r"got shape \(2, 5, 1, 1\), wanted \(2, 5\)"),
        (torch.zeros(2, 5, 3, dtype=torch.int64), r"got shape \(2, 5, 3\), wanted \(2, 5\): one"),
        (torch.zeros(2, 5, dtype=torch.int32), "is int32, wanted int64"),
        (torch.zeros(5, 2, dtype=torch.int64), r"got shape \(5, 2\), wanted \(2, 5\)"),
    ],
)
def test_what_names_no_place_is_told(labels, message):
    with pytest.raises(ArgumentError, match=message):
        fusegen.compile("gather(-1, t)")(torch.randn(2, 5, 7), labels)
    with pytest.raises(ArgumentError, match="dim 3 is out of range"):
        fusegen.compile("gather(3, t)")(torch.randn(2, 5, 7), labels)


def test_a_place_that_there_is_not_gives_no_number(device):
    t = torch.tensor([0, 7, -1, 6], device=device)
    found = fusegen.compile("gather(-1, t)")(torch.ones(4, 7, device=device), t)
    assert found.isnan().flatten().tolist() == [False, True, True, False]


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4), (5,)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.1}], ids=str
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_function_may_be_given_probabilities_of_the_classes(shape, options, is_weighted, device):
    def function(x, target, weight):
        return F.cross_entropy(x * 2, target, weight if is_weighted else None, **options)

    axis = min(len(shape) - 1, 1)
    x, other = torch.randn(2, *shape, device=device)
    tensors = [x, other.softmax(axis), torch.rand(shape[axis], device=device)]
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile(function)
    labels = torch.randint(shape[axis], shape[:axis] + shape[axis + 1 :], device=device)
    for target in (tensors[1], labels)[: len(shape)]:  # labels want an axis 1 for their weights
        given = (x, target, tensors[2] if target is not labels else tensors[2].detach())
        found, expected = fused(*given), function(*given)
        torch.testing.assert_close(found, expected)
        wanted = [t for t in given if t.requires_grad]
        pairs = (torch.autograd.grad(y.sum(), wanted, allow_unused=True) for y in (found, expected))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)
