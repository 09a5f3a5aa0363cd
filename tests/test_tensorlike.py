"""Functions that were written for tensors, traced: torch's functions, methods, indices, modules."""

import math
from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusegen
from fusegen.errors import ArgumentError, ChainError


# A function, and the chain that it is.
def without_gradients(x):
    with torch.no_grad():
        size = x.abs().amax(-1, keepdim=True)
    return x / size


def scaled_without_gradients(x):
    with torch.no_grad():
        half = x * 0.5
    return x + half


FUNCTIONS: list[tuple[Callable[..., object], str]] = [
    (lambda x: torch.relu(x), "relu"),
    (lambda x: F.gelu(x, approximate="tanh"), "gelu(approximate='tanh')"),
    (lambda x: x.mean(dim=(2, 3), keepdim=True), "mean((2, 3), keepdim=True)"),
    (lambda x: x.sum(1), "sum(1)"),
    (lambda x: x.sum(axis=1), "sum(1)"),
    (lambda x: x.sum(1, dtype=torch.float32), "to('float32') | sum(1)"),
    (lambda x: F.softmax(x, dim=-1), "softmax(-1)"),
    (lambda x: F.softmin(x, dim=1), "softmin(1)"),
    (lambda x: x.log_softmax(1), "log_softmax(1)"),
    (lambda x: x.float() * 2, "to('float32') | mul(2)"),
    (lambda x: x.to(torch.bfloat16), "to('bfloat16')"),
    (lambda x: x.to(dtype=torch.float32, copy=True).type(torch.half), None),
    (lambda x: x.float().square().to(x.dtype), "keep(y) | to('float32') | square | type_as(y)"),
    (lambda x: (x * 2).double().type_as(x), "keep(y) | mul(2) | to('float64') | type_as(y)"),
    (
        lambda x: (x.double() + 1).to(x).to(x.device),
        "keep(y) | to('float64') | add(1) | type_as(y)",
    ),
    (lambda x: x.double().sum(-1, dtype=x.dtype), "keep(y) | to('float64') | type_as(y) | sum(-1)"),
    (lambda x: x.clamp_min(0), "clamp(0)"),
    (lambda x: torch.clamp(x, max=1), "clamp(max=1)"),
    (lambda x: torch.where(x > 0, x, 0.1 * x), None),
    (lambda x: torch.where(x == 0, 1.0, x), "keep(y) | eq(0) | where(1, y)"),
    (lambda x: torch.where(x != 0, 1.0, x), "keep(y) | ne(0) | where(1, y)"),
    (lambda x: x.masked_fill(torch.isnan(x), 0), None),
    (lambda x: torch.where(torch.isfinite(x) & ~torch.isinf(x), x, 0), None),
    (lambda x: x / (1 + x.abs()), None),
    (lambda x: 2**x - torch.pow(x, 2) + torch.rsub(x, 1), None),
    (lambda x: F.leaky_relu(x, 0.2), "leaky_relu(0.2)"),
    (lambda x: F.hardtanh(x, -2, 2), "hardtanh(-2, 2)"),
    (lambda x: F.relu6(x), "relu6"),
    (lambda x: F.threshold(x, 0.1, 2), "threshold(0.1, 2)"),
    (lambda x: F.logsigmoid(x), "logsigmoid"),
    (lambda x: F.glu(x, dim=1), None),
    (lambda x: F.normalize(x, dim=-1), "normalize(dim=-1)"),
    (lambda x: torch.norm(x, dim=1), "norm(dim=1)"),
    (lambda x: x.norm(1, 1), "norm(1, 1)"),
    (lambda x: torch.linalg.vector_norm(x, ord=3, dim=1), "norm(3, 1)"),
    (lambda x: torch.special.expit(x), "sigmoid"),
    (lambda x: x.max(1)[0], "max(1)"),
    (lambda x: torch.min(x, dim=1, keepdim=True).values, "min(1, keepdim=True)"),
    (lambda x: x.max(), "max"),
    (lambda x: x.max(1).indices, "argmax(1)"),
    (lambda x: torch.argmin(x, dim=-1, keepdim=True), "argmin(-1, keepdim=True)"),
    (lambda x: x.amax((1, 2)), "amax((1, 2))"),
    (lambda x: x.std(1, keepdim=True), "std(1, keepdim=True)"),
    (lambda x: x.var(1, False), "var(1, correction=0)"),
    (lambda x: x.std(unbiased=False), "std(correction=0)"),
    (lambda x: torch.var(x, (1, 2), unbiased=True, keepdim=True), "var((1, 2), keepdim=True)"),
    (lambda x: torch.std(x, dim=1, correction=0), "std(1, correction=0)"),
    (lambda x: torch.std(x, False), "std(correction=0)"),
    (lambda x: F.layer_norm(x, (6,), None, None, 1e-6), "layernorm((6,), eps=1e-06)"),
    (lambda x: F.instance_norm(x), "instance_norm"),
    (lambda x: F.max_pool2d(x, 2), "max_pool2d(2)"),
    (lambda x: F.max_pool2d(x, 3, stride=2, padding=1), "max_pool2d(3, 2, 1)"),
    (lambda x: F.avg_pool2d(x, 3, 2, 1), "avg_pool2d(3, 2, 1)"),
    (lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), "adaptive_avg_pool2d(1) | flatten(1)"),
    (lambda x: F.adaptive_max_pool2d(x, (2, None)), "adaptive_max_pool2d((2, None))"),
    (lambda x: F.lp_pool2d(x, 2, 2), "lp_pool2d(2, 2)"),
    (lambda x: F.dropout(x, 0.5, training=False), "dropout(training=False)"),
    (lambda x: x.unflatten(1, (2, 2)).flatten(1, 2), "unflatten(1, (2, 2)) | flatten(1, 2)"),
    (lambda x: x.view(3, -1), "reshape((3, -1))"),
    (lambda x: x[:, None] * 1, "unsqueeze(1) | mul(1)"),
    (lambda x: x[:, 2], "select(1, 2)"),
    (lambda x: x[..., -1], "select(-1, -1)"),
    (lambda x: x[0, ..., 1, :], "select(-2, 1) | select(0, 0)"),
    (lambda x: x[:, :, None, 1], "unsqueeze(2) | select(3, 1)"),
    (lambda x: x[..., None, 0], "select(-1, 0) | unsqueeze(-1)"),
    (lambda x: x * x.detach(), "keep(y) | detach | mul(y)"),
    (lambda x: x.contiguous().clone() * 2, "mul(2)"),
    (lambda x: x * (x > 0), "keep(y) | gt(0) | keep(y_2) | recall(y) | mul(y_2)"),
    (lambda x: (x > 0) * x + (x.abs() < 1), None),
    (lambda x: x.where(x > 0, 0.5), None),
    (lambda x: torch.where(x == x.amax(-1, True), 0.0, x), None),
    (lambda x: x * (x == x.amax(-1, True)), None),
    (lambda x: x - (x != x.amax(-1, True)).float(), None),
    (lambda x: F.dropout(F.relu(F.silu(x * 2, inplace=True), True), 0.5, False, True), None),
    (nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.ReLU(inplace=True)), None),
    (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm(training=True)"),
    (lambda x: torch.sigmoid(input=x), "sigmoid"),
    (lambda x: torch.max(x, axis=1)[0], "max(1)"),
    (lambda x: F.smooth_l1_loss(x, x * 2, reduction="none"), None),
    (lambda x: torch.add(x, 1, alpha=2) - torch.sub(x, x, alpha=3), None),
    (lambda x: (lambda a, b: F.silu(a) * b)(*x.chunk(2, 1)), None),
    (lambda x: (lambda a, b: a * b)(*torch.chunk(x, 2, dim=-1)), None),
    (lambda x: x.tensor_split(2, -1)[1], None),
    (lambda x: (lambda q, k, v: q * k - v)(*x.unflatten(-1, (3, 2)).unbind(-2)), None),
    (lambda x: (lambda a, b: a / b.exp())(*torch.unbind(x.unflatten(1, (2, 2)), 1)), None),
    (lambda x: (lambda v, m: (x - m) / v)(*torch.std_mean(x, -1, keepdim=True)), None),
    (lambda x: (lambda v, m: x * v + m)(*torch.var_mean(x, (1, 2), False, True)), None),
    (lambda x: (lambda v, m: v + m)(*torch.var_mean(x, dim=1, correction=0)), None),
    (lambda x: x.var(1, False, True) + x, None),
    (lambda x: (lambda a, b: (x - a) / (b - a))(*torch.aminmax(x, dim=-1, keepdim=True)), None),
    (lambda x: torch.softmax(x, -1, torch.float32), "to('float32') | softmax(-1)"),
    (lambda x: x.sum(-1, dtype=torch.float64), "to('float64') | sum(-1)"),
    (lambda x: (x > 0) ^ (x < 1), None),
    (lambda x: torch.logical_xor(x > 0, x < 1), None),
    (lambda x: torch.special.logit(x.sigmoid()), "sigmoid | logit"),
    (lambda x: torch.logit(x.sigmoid(), eps=0.1), "sigmoid | logit(0.1)"),
    (lambda x: x.frac(), "frac"),
    (lambda x: x.nan_to_num(1.0, 2.0, 3.0), "nan_to_num(1, 2, 3)"),
    (without_gradients, None),
    (scaled_without_gradients, None),
    (lambda x: x.narrow(1, 0, x.shape[1] // 2), "unflatten(1, (2, -1)) | select(1, 0)"),
    (lambda x: x.narrow(1, 2, 2), "unflatten(1, (-1, 2)) | select(1, 1)"),
    (lambda x: x.split([2, 2], 1)[1] * 2, None),
    (lambda x: torch.split(x, x.shape[-1] // 2, -1)[1] * 2, None),
    (lambda x: x.split(2, 1)[1], "unflatten(1, (-1, 2)) | select(1, 1)"),
    (lambda x: torch.where(x > 0.3, x, torch.zeros_like(x)), None),
    (lambda x: torch.zeros_like(x).masked_fill(x > 0, -math.inf) + x, None),
    (lambda x: torch.full_like(x, 0.5) * torch.ones_like(x), None),
    (lambda x: torch.zeros_like(x, dtype=torch.float64) + x, None),
    (lambda x: x.mean(1, keepdim=True).expand_as(x).sum(1) + x.amax(1), None),
    (lambda x: x.mean((1, 2), keepdim=True).expand(x.shape).sum((1, 2)), None),
    (lambda x: x.mean(1, keepdim=True).expand(*x.size()) - x, None),
    (lambda x: x * torch.any(x > 1, dim=1, keepdim=True), None),
    (lambda x: (x > -1).all(-1), None),
    (lambda x: torch.where(condition=x > 0, input=x, other=0.5), None),
    (lambda x: torch.linalg.norm(x, dim=-1), "norm(dim=-1)"),
    (lambda x: torch.linalg.norm(x, ord=1, dim=1, keepdim=True), "norm(1, 1, keepdim=True)"),
    (nn.GELU(), "gelu"),
    (nn.Sequential(nn.LeakyReLU(0.2), nn.LayerNorm(6, elementwise_affine=False)), None),
]
WITH_OPERANDS: list[tuple[Callable[..., object], list[tuple[int, ...]], str]] = [
    (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(6,), (6,)], "layernorm((6,), w, b)"),
    (lambda x, w: F.rms_norm(x, (6,), w, 1e-6), [(6,)], "rms_norm((6,), w, eps=1e-06)"),
    (lambda x, w, b: F.group_norm(x, 2, w, b), [(4,), (4,)], "group_norm(2, w, b)"),
    (lambda x, w: F.prelu(x, w), [(4,)], "prelu(w)"),
    (lambda x, y: torch.max(x, y), [(6,)], "maximum(y)"),
    (lambda x, y: torch.lerp(x, y, 0.3), [(6,)], "lerp(y, 0.3)"),
    (lambda x, y: torch.addcmul(x, y, y, value=0.5), [(6,)], "addcmul(y, y, value=0.5)"),
    (lambda x, y: F.mse_loss(x, y), [(3, 4, 5, 6)], "mse_loss(y)"),
    (lambda x, y: torch.logaddexp(x, y), [(6,)], "logaddexp(y)"),
    (lambda x, y: torch.xlogy(x, y), [(6,)], "xlogy(y)"),
    (
        lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True),
        [(3, 4, 5, 6), (3, 4, 5, 1)],
        "gaussian_nll_loss(y, v, full=True)",
    ),
    (lambda x, y: F.soft_margin_loss(x, y), [(3, 4, 5, 6)], "soft_margin_loss(y)"),
    (
        lambda x, y: F.poisson_nll_loss(x, y, True, True),
        [(3, 4, 5, 6)],
        "poisson_nll_loss(y, full=True)",
    ),
    (
        lambda x, y: F.hinge_embedding_loss(x, y, 0.5),
        [(3, 4, 5, 6)],
        "hinge_embedding_loss(y, margin=0.5)",
    ),
    (
        lambda x, y: F.margin_ranking_loss(x, y, y, 0.5),
        [(3, 4, 5, 6)],
        "margin_ranking_loss(y, y, margin=0.5)",
    ),
    (lambda x, y: F.cosine_similarity(x, y), [(3, 4, 5, 6)], "cosine_similarity(y)"),
    (lambda x, y: F.cosine_similarity(x1=x, x2=y), [(3, 4, 5, 6)], "cosine_similarity(y)"),
    (
        lambda x, y: F.pairwise_distance(x, y, 1.0),
        [(3, 4, 5, 6)],
        "sub(y) | add(1e-06) | norm(1, -1)",
    ),
    (lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), [(3, 4, 5, 6)], "smooth_l1_loss(y, beta=0.5)"),
]


def modulated(x, c):
    scale, shift = c.chunk(2, dim=-1)
    return F.layer_norm(x, (8,)) * (1 + scale[:, None]) + shift[:, None]


def filmed(x, c):
    scale, shift = c.chunk(2, -1)
    return x * scale + shift


# What is of fewer axes than x, or more, until it meets it: in one kernel, too.
ASIDE: list[tuple[Callable[..., object], list[tuple[int, ...]]]] = [
    (lambda x, s, t: x * (1 + s.unsqueeze(1)) + t.unsqueeze(1), [(3, 5, 8), (3, 8), (3, 8)]),
    (lambda x, s: x * s[:, None], [(9, 9, 8), (9, 8)]),  # where it fits elsewhere as well
    (lambda x, y: y.expand_as(x).sum(0) + x.amax(0), [(3, 4, 5), (4, 1)]),
    (lambda x, y: torch.zeros_like(x) + y.expand(x.shape), [(3, 4, 5), (4, 1)]),
    (lambda x, t: F.silu(x + t[:, :, None, None]), [(2, 8, 5, 6), (2, 8)]),
    (lambda x, s, r: x * s[:, None, :, None, None] + r, [(2, 3, 4, 5, 6), (2, 4), (2, 3, 4, 5, 6)]),
    (modulated, [(3, 5, 8), (3, 16)]),
    (filmed, [(3, 5, 8), (3, 1, 16)]),
    (filmed, [(3, 5, 8), (16,)]),
    (lambda x, s: x * s.unflatten(0, (-1,))[:, None], [(3, 5, 8), (3, 8)]),
    (lambda x, s: x * s.unflatten(1, (1, -1)), [(3, 1, 8), (3, 8)]),
    (lambda x, c: x * c[0] + c[1], [(2, 5, 8), (3, 8)]),
    (lambda x, c: x * c[..., 0], [(3, 5), (3, 5, 4)]),
    (lambda x, w: w.softmax(0)[0] * x, [(2, 5, 8), (3, 8)]),
    (lambda x, m: (x * m.sum(-1)[:, None]).tanh(), [(3, 5), (3, 7)]),
    (
        lambda x, w, b: F.group_norm(x.float(), 4, w.float(), b.float()),
        [(3, 16, 6, 6), (16,), (16,)],
    ),
    (lambda x, w, b: F.group_norm(x, 4, 1 + w, b), [(3, 16, 6, 6), (16,), (16,)]),
    (lambda x, w: F.prelu(x, w.abs()), [(3, 8, 5), (8,)]),
    (lambda x, w: x * w.view(1, -1, 1, 1), [(2, 3, 4, 5), (3,)]),
    (lambda x, w: x.mean((2, 3)) * w.view(-1), [(2, 3, 4, 5), (1, 3)]),
    (lambda x, t: x.mean((2, 3)) + t[:, None], [(8, 8, 8, 8), (8,)]),
    (
        lambda x, m: x.masked_fill((m == 0)[:, None, None, :], -10.0).softmax(-1),
        [(3, 2, 4, 5), (3, 5)],
    ),
    (lambda x, s: (x * s[:, None] + s[:, None]).sum(-1), [(3, 5, 8), (3, 8)]),
]


@pytest.mark.parametrize(
    ("function", "shapes"), ASIDE, ids=[f"{i} {c[1]}" for i, c in enumerate(ASIDE)]
)
def test_operands_may_take_another_shape_before_they_meet_x(function, shapes, device):
    fused = fusegen.compile(function)
    tensors = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
    found, wanted = fused(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    given = [t for t in tensors if t.grad_fn is None]
    gradients = (torch.autograd.grad(f, given, seed, allow_unused=True) for f in (found, wanted))
    for a, b in zip(*gradients, strict=True):
        # A condition has no gradient; sums are in another order.
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(fused.reference(*tensors), wanted)
    assert [len(way) for way in fused._parts if way[0].plans] == [1]


def ids(cases):
    return [f"{i} {case[-1]}" for i, case in enumerate(cases)]


@pytest.mark.parametrize(("function", "text"), FUNCTIONS, ids=ids(FUNCTIONS))
def test_a_function_of_a_tensor_is_a_chain(function, text):
    fused = fusegen.compile(function)
    assert text is None or fused.chain.text == text
    x = torch.randn(3, 4, 5, 6)
    torch.testing.assert_close(fused.reference(x), function(x), equal_nan=True)


@pytest.mark.parametrize(("function", "shapes", "text"), WITH_OPERANDS, ids=ids(WITH_OPERANDS))
def test_a_function_of_tensors_is_a_chain(function, shapes, text):
    fused = fusegen.compile(function)
    assert fused.chain.text == text
    tensors = [torch.randn(3, 4, 5, 6), *(torch.rand(shape) for shape in shapes)]
    torch.testing.assert_close(fused.reference(*tensors), function(*tensors))


def test_what_is_traced_computes_what_the_function_does(device):
    def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a, b = F.layer_norm(x + residual, (64,), weight).chunk(2, dim=-1)
        return F.gelu(a) * b.sigmoid()

    fused = fusegen.compile(block)
    shapes = ((3, 5, 64), (3, 5, 64), (64,))
    tensors = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
    found, wanted = fused(*tensors), block(*tensors)
    torch.testing.assert_close(found, wanted)
    seed = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(f, tensors, seed) for f in (found, wanted))
    # Norms' gradients are differences of sums, which are in another order.
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_loss_is_written_with_torchs_functions():
    def loss(x, target):
        return F.cross_entropy(10 * torch.tanh(x / 10), target, label_smoothing=0.1)

    fused = fusegen.compile(loss)
    assert (
        fused.chain.text == "div(10) | tanh | mul(10) | cross_entropy(target, label_smoothing=0.1)"
    )
    x, target = torch.randn(5, 7), torch.randint(7, (5,))
    torch.testing.assert_close(fused.reference(x, target), loss(x, target))


def test_each_call_draws_on_its_own():
    fused = fusegen.compile(lambda x: F.dropout(x) + F.dropout(x))
    assert fused(torch.ones(999)).unique().tolist() == [0, 2, 4]


def test_dropout_draws_as_it_does_in_text():
    assert fusegen.chain(lambda x: F.dropout(x, 0.1)) == fusegen.chain("dropout(0.1)")
    assert fusegen.chain(nn.Sequential(nn.Dropout(0.3)).train()) == fusegen.chain("dropout(0.3)")


WRONG: list[tuple[Callable[..., object], str]] = [
    (lambda x: x / x.shape[-1], r"x.shape: its axes are not known before a call"),
    (lambda x: x * (2 if x.dtype == torch.float16 else 1), r"x.dtype is not known before a call"),
    (lambda x: x * (1 if x.dtype in (torch.half,) else 2), r"x.dtype is not known before a call"),
    (lambda x: x.to("cuda", torch.float32), r"x.to\('cuda'\): where x is only a call"),
    (lambda x: x * torch.finfo(x.dtype).min, r"x.dtype is not known before a call, and fusegen"),
    (lambda x: x.unbind(1)[0], r"x.unbind: how many parts it has is not known"),
    (lambda x: x.unflatten(1, (2, -1)).unbind(2)[0], r"x.unbind: how many parts it has"),
    (lambda x: x.to("floaty"), r"to: dtype wants 'float16' or"),
    (lambda x: x if x.item() else -x, r"x.item: it has no values before a call"),
    (lambda x: x.T + 1, r"x.T: no step exchanges axes; pass such a view"),
    (lambda x, w: x @ w, r"x @ y: a chain follows a product or a convolution: call it with what"),
    (lambda x, w: torch.matmul(x, w), r"torch's matmul: a chain follows a product"),
    (lambda x, w: F.linear(x, w), r"torch's linear: a chain follows a product"),
    (lambda x: F.pad(x, (1, 1)), r"x.pad: no step puts elements elsewhere; fusegen.compile"),
    (lambda x: x.cumsum(1), r"x.cumsum: no step does it"),
    (lambda x: x.add_(1), r"x.add_ changes x in place, .* write x = x.add\(...\)"),
    (lambda x: F.relu(x, inplace=True), "torch's relu: inplace=True would change what the chain"),
    (lambda x: x + 2 if x == x.abs() else x, "no truth value while the chain is built"),
    (lambda x: torch.exp(x, out=x), r"torch's exp: got out=, but a chain's steps"),
    (lambda x: F.interpolate(x, scale_factor=2), r"x.interpolate: no step puts elements elsewhere"),
    (lambda x: x[[0, 1]], r"x\[i\]: what an index tensor picks only a call takes"),
    (lambda x: x[..., ...], r"an index has one Ellipsis at most"),
    (lambda x: x[True], r"x\[True\]: an index is an integer"),
    (lambda x: x.sigmod(), r"'Expr' object has no attribute 'sigmod'; did you mean 'sigmoid'"),
    (lambda x: x.chunk(0), r"x.chunk: got 0, wanted how many parts"),
    (lambda x: F.mse_loss(x, x * 2, size_average=False), r"a chain has no size_average= there"),
    (lambda x: torch.rsub(x, 2.0, alpha=0), r"a chain has no alpha= there"),
    (lambda x: x.flip(1), r"x.flip: no step puts elements elsewhere"),
    (lambda x: x.expand(3, 4, 5, 6), "write x.expand_as"),
    (lambda x: x.split([1, 3], 1)[0], "parts that are as long as each other"),
    (lambda x: torch.stack([*x.split(2, 1)]), "or take them apart, as in a, b = x.split"),
    (lambda x: torch.linalg.norm(x, 1), r"torch.linalg.norm: that of matrices is no operation"),
    (lambda x: torch.add(x, torch.ones(3)), r"torch's add: got a Tensor.*pass it in the call"),
    (nn.LayerNorm(8), r"torch's layer_norm: got a Parameter, wanted an expression or a number"),
    (lambda x: x if x == 0 else -x, r"an Expr has no truth value"),
    (lambda x: fusegen.gelu(torch.ones(3)), r"gelu: got a tensor, but an operation makes a chain"),
]


@pytest.mark.parametrize(("function", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_a_chain_cannot_do_is_told(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.chain(function)


def added_to_a_view(x):
    y = x * 2
    seen = y.view(-1, 4)
    seen += 1
    return y * 3


def added_behind_a_view(x):
    y = x * 2
    seen = y.flatten(1)
    y += 1
    return y.sum(1) + seen.sum(1)


def one_of_two_that_are_equal(x):
    y, z = x * 2, x * 2
    y += 1
    return y * z


def one_made_again(x):
    y = x * 2
    y.add_(1)
    return y * (x * 2)


OVERWRITTEN = [
    (added_to_a_view, r"x \+= y changes a value that is used elsewhere too; write x = x \+ y"),
    (added_behind_a_view, r"x \+= y changes a value that is used elsewhere"),
    (one_of_two_that_are_equal, r"x \+= y changes a value that is used elsewhere"),
    (one_made_again, r"x.add_ changes a value that .* write x = x.add\(...\)"),
    (lambda x: x.detach().add_(1) * x, r"x.add_ changes x in place"),
    (lambda x: x * 2 if x.device == torch.device("cpu") else x, r"x.device is not known before"),
    (lambda x: x * 2 if getattr(x, "requires_grad", False) else x, r"x.requires_grad: it is not"),
    (lambda x: x * 2 if x == True else x, r"an Expr has no truth value"),  # noqa: E712
]


@pytest.mark.parametrize(("function", "message"), OVERWRITTEN)
def test_what_eager_would_compute_otherwise_is_told(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.chain(function)


def used_before_it_changes(x, b):
    y = x * 2
    z = y.sigmoid()
    y += b
    y *= z
    y = y.relu_() * 3
    return +y if x.device == b.device else x


@pytest.mark.parametrize(
    "function",
    [
        used_before_it_changes,
        lambda x, b: torch.clamp(x, b, b + 1),
        lambda x, b: torch.clip(x * b, max=b),
        lambda x, b: x.clamp_min(b).clamp_max(b.abs()),
        lambda x, b: x.clamp(-1, 1) * b,
    ],
)
def test_a_value_is_overwritten_or_clamped_as_in_eager(function, device):
    tensors = [torch.randn(3, 4, dtype=torch.float64, device=device) for _ in range(2)]
    tensors[1][0, 0] = float("nan")
    tensors = [t.requires_grad_() for t in tensors]
    found, wanted = fusegen.compile(function)(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    d = torch.randn_like(wanted)
    for own, theirs in zip(
        torch.autograd.grad(found, tensors, d), torch.autograd.grad(wanted, tensors, d), strict=True
    ):
        torch.testing.assert_close(own[1:], theirs[1:])


def attended(x, y, mask: torch.Tensor | None = None, factor=2.0, bias=None):
    scores = x * y * factor
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1)


@pytest.mark.parametrize(
    ("names", "by_name"),
    [
        ("y", ""),
        ("y mask", ""),
        ("y none", ""),
        ("y", "mask"),
        ("y", "bias"),
        ("y mask", "bias"),
        ("", "bias y mask"),
    ],
)
def test_a_function_has_tensors_that_a_call_may_give(names, by_name):
    told = {"y": torch.randn(3, 4), "mask": torch.rand(4) > 0.5, "bias": torch.randn(3, 1)}
    told |= {"none": None}
    x = torch.randn(3, 4)
    operands, named = [told[n] for n in names.split()], {n: told[n] for n in by_name.split()}
    fused = fusegen.compile(attended)
    for _ in range(2):  # a variant is found again
        found = fused(x, *operands, **named)
        torch.testing.assert_close(found, attended(x, *operands, **named))
        torch.testing.assert_close(fused.reference(x, *operands, **named), found)
    chosen = {"mask", "bias"} & {*names.split(), *by_name.split()}
    assert [*fused._optionals.found] == [frozenset(chosen)] * bool(chosen)


@pytest.mark.parametrize(
    ("names", "by_name", "message"),
    [
        ("y mask y", "", "no operand is called 'factor'"),
        ("y mask", "mask", "operand 'mask' is given twice"),
        ("", "mask", "operand 'y' is missing"),
        ("y", "msk", "no operand is called 'msk'"),
        ("y mask y y y", "", "got 5 operands, wanted 1"),
    ],
)
def test_a_tensor_that_a_call_may_not_give_is_told(names, by_name, message):
    x = torch.randn(3, 4)
    with pytest.raises(ArgumentError, match=message):
        fusegen.compile(attended)(x, *[x] * len(names.split()), **dict.fromkeys(by_name.split(), x))


def test_an_expression_is_none_of_what_a_tensor_is_not():
    with pytest.raises(ChainError, match="must return an expression, got False"):
        fusegen.chain(lambda x: hasattr(x, "no_such"))
    with pytest.raises(ChainError, match=r"x\.dim: its axes are not known before a call"):
        fusegen.chain(lambda x: x * 2 if hasattr(x, "ndim") else x * 3)
    with pytest.raises(ChainError, match=r"no attribute .__array__."):
        fusegen.chain(lambda x: x.__array__())
    with pytest.raises(ChainError, match="no attribute 'relux'"):
        fusegen.chain(lambda x: x.relux())


def test_the_input_may_be_passed_by_its_own_name():
    @fusegen.compile
    def block(hidden_states, residual):
        return F.relu(hidden_states + residual)

    x = torch.randn(3, 4)
    assert torch.equal(block(hidden_states=x, residual=x), F.relu(2 * x))
    assert torch.equal(block(residual=x, hidden_states=x), block(x, x))
    for arguments, named in (((), {}), ((), {"residual": x}), ((None, x), {})):
        with pytest.raises(
            ArgumentError, match=r"'hidden_states' is missing, or None: .* takes hid"
        ):
            block(*arguments, **named)
    with pytest.raises(ArgumentError, match="no operand is called 'hidden_states'"):
        block(x, hidden_states=x)


@pytest.mark.parametrize("function", [torch.tanh, torch.relu, F.gelu, torch.special.expit, F.silu])
def test_functions_of_torchs_without_a_signature_are_the_operations_of_their_names(function):
    x = torch.randn(3, 4)
    torch.testing.assert_close(fusegen.compile(function)(x), function(x))


def test_mistakes_of_a_function_are_told_with_what_to_do():
    for function, message in (
        (lambda x: x.clamp(max=100).to(torch.float8_e4m3fn), "x may lie beyond what that holds"),
        (lambda x: x.to(torch.complex64), "got torch.complex64"),
    ):
        with pytest.raises(ChainError, match=message):
            fusegen.compile(function)
    with pytest.raises(ChainError, match="a result of the function does not depend on the first"):
        fusegen.chain(lambda x, y: (x * 2, y * 2))


def torn(s: torch.Tensor, views: list[tuple]) -> torch.Tensor:
    for op, *rest in views:
        if op == "chunk":
            axis, which = rest
            s = s.chunk(2, dim=axis)[which]
        else:
            s = getattr(s, op)(*rest)
    return s


def views_backwards(random: Random, shape: list[int]) -> tuple[list[int], list[tuple]]:
    """A shape from which some views lead to this one, and they."""
    views: list[tuple] = []
    shape = [*shape]
    for _ in range(random.randrange(1, 4)):
        op = random.choice(["unsqueeze", "select", "chunk", "tanh"])
        axis = random.randrange(len(shape) + (op == "select")) if shape else 0
        if op == "unsqueeze" and len(shape) > 1 and shape[axis] == 1:
            views.insert(0, (op, axis))
            del shape[axis]
        elif op == "select" and len(shape) < 5:
            size = random.randrange(2, 4)
            views.insert(0, (op, axis, random.randrange(size)))
            shape.insert(axis, size)
        elif op == "chunk" and shape:
            views.insert(0, (op, axis, random.randrange(2)))
            shape[axis] *= 2
        elif op == "tanh":
            views.insert(0, (op,))
    return shape, views


def llamas_norm(x, weight):
    before = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * x.to(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_value_goes_back_to_the_type_that_another_has(dtype, device):
    fused = fusegen.compile(llamas_norm)
    x = torch.randn(6, 64, device=device).to(dtype).requires_grad_()
    weight = torch.randn(64, device=device).to(dtype).requires_grad_()
    found, eager = fused(x, weight), llamas_norm(x, weight)
    assert found.dtype == eager.dtype == dtype
    step = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(dtype, 1e-5)
    torch.testing.assert_close(found, eager, rtol=step, atol=step)
    incoming = torch.randn_like(eager)
    ours = torch.autograd.grad(found, (x, weight), incoming)
    theirs = torch.autograd.grad(eager, (x, weight), incoming)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, rtol=8 * step, atol=8 * step)


@pytest.mark.parametrize("seed", range(8))
def test_operands_of_random_shapes_meet_x_where_they_are_seen_to(seed, device):
    random = Random(seed)
    x_shape = [random.randrange(1, 5) for _ in range(random.randrange(2, 5))]
    shapes, views = [x_shape], []
    for _ in range(2):
        seen = [size if random.random() < 0.6 else 1 for size in x_shape][random.randrange(2) :]
        shape, found = views_backwards(random, seen)
        shapes.append(shape)
        views.append(found)

    def function(x, s, t):
        return torn(s, views[0]) * x.exp() - torn(t, views[1])

    fused = fusegen.compile(function)
    kind = {"device": device, "dtype": torch.float64, "requires_grad": True}
    tensors = [torch.randn(shape, **kind) for shape in shapes]
    found, wanted = fused(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted)
    seed_of = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(f, tensors, seed_of) for f in (found, wanted))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    assert [len(way) for way in fused._parts if way[0].plans] == [1]
