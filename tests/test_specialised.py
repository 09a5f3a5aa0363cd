"""Functions and modules that ask for sizes and types: traced as they are called."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

import fusegen
from fusegen import ArgumentError, ChainError, Fused, Layer, plan
from fusegen.specialised import Specialised


def rows_one_by_one(x):
    best = x[0]
    for i in range(1, len(x)):
        best = torch.maximum(best, x[i])
    return best


def halves_one_by_one(x):
    total = 0
    for part in x.split(4, -1):
        total = total + part.relu()
    return total


def by_pattern(x):
    match x.shape:
        case (_, _):
            return x * 3
        case (_, _, _, 8):
            return x * 2


def remembered(x, known={}):  # noqa: B006
    size = x.size(-1)
    if size not in known:
        known[size] = torch.ones(size, size, device=x.device).triu(1)
    return x * known[size]


def by_axes(x):
    return x.mean((2, 3)) if x.dim() == 4 else x.mean(1)


def causal(x):
    count = x.size(-1)
    later = torch.ones(count, count, dtype=torch.bool, device=x.device).triu(1)
    return x.masked_fill(later, torch.finfo(x.dtype).min).softmax(-1)


# What is written, beside the shapes of its operands.
ASKING = {
    "root of a size": (lambda x: (x / math.sqrt(x.size(-1))).softmax(-1), ()),
    "power of a size": (lambda x: x * x.shape[-1] ** -0.5, ()),
    "sum by a size": (lambda x: x.sum(-1) / x.shape[-1], ()),
    "product of sizes": (lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3]), ()),
    "all elements": (lambda x: x.sum() / x.numel(), ()),
    "size of a value": (lambda x: (lambda h: h * h.size(1) + h.shape[0])(x.mean(-1)), ()),
    "size of an operand": (lambda x, t: x * t.size(0) + t, ((6, 1, 8),)),
    "only its size": (lambda x, t: x * t.size(0), ((5,),)),
    "axes": (by_axes, ()),
    "ndim": (lambda x: x.flatten(x.ndim - 2), ()),
    "length": (rows_one_by_one, ()),
    "parts": (halves_one_by_one, ()),
    "places": (lambda x: sum(x.unbind(1)), ()),
    "least number": (lambda x, m: x.masked_fill(m > 0, torch.finfo(x.dtype).min), ((8,),)),
    "type": (lambda x: x * (2 if x.dtype == torch.float32 else 3), ()),
    "type of a value": (lambda x: (lambda h: h * torch.finfo(h.dtype).eps)(x.double()), ()),
    "which type": (lambda x: x * (2 if x.dtype is torch.float32 else 3), ()),
    "a type's name": (lambda x: x * (2 if f"{x.dtype}" == "torch.float32" else 3), ()),
    "a kind of type": (lambda x: x * (2 if isinstance(x.dtype, torch.dtype) else 3), ()),
    "a device's name": (lambda x: x * (2 if str(x.device).startswith("c") else 3), ()),
    "a size's name": (lambda x: x * (2 if f"{x.shape[1]}, {x.size(2)}" == "6, 8" else 3), ()),
    "a pattern": (by_pattern, ()),
    "a remembered tensor": (remembered, ()),
    "a size's tensor": (lambda x: x / torch.sqrt(torch.tensor(x.size(-1)).float()), ()),
    "a tensor of sizes": (lambda x: x * torch.ones(x.size(2), 1, device=x.device), ()),
    "like x": (lambda x: x + x.new_ones(8) * x.new_full((1,), 0.5), ()),
    "as another": (lambda x, t: x.view_as(t) * t, ((4, 6, 64),)),
    "in other words": (lambda x: x * divmod(x.size(-1), 3)[1] * (x.size(1) & 3), ()),
    "any part": (
        lambda x, t: x * t[None, x.size(3) - 3 : x.size(3), 1 : 1 + x.size(2)].sum(),
        ((9, 9),),
    ),
    "parts in turn": (lambda x, t: x * t[::2][1:][..., : x.size(3)], ((13, 8, 8),)),
    "axes in turn": (lambda x, t: x * t.t()[: x.size(2)] + t.permute(1, 0)[:8], ((8, 9),)),
    "as large as": (lambda x, t: x * t.expand(x.size(1), -1, 8), ((1, 8, 1),)),
    "a number's tensor": (lambda x: x * torch.tensor(1.0) / x.size(0), ()),
    "places of an axis": (lambda x: x + torch.arange(x.shape[-1], device=x.device), ()),
    "a mask": (causal, ()),
    "sizes as they are": (lambda x: F.layer_norm(x, x.shape[1:]), ()),
    "sizes of another": (lambda x, t: t.sum() + x.view(t.size(0), -1), ((4,),)),
    "a part of an operand": (lambda x, t: x * t[..., : x.shape[-1]], ((6, 1, 11),)),
    "all of an operand": (lambda x, t: x * t[: x.shape[1], :, : x.shape[-1]], ((9, 1, 8),)),
    "a block": (lambda x: x[..., 4:] * x[..., :4], ()),
    "expanded": (lambda x: x.mean(1, keepdim=True).expand(*x.shape[:1], 6, 8, 8) - x, ()),
    "expanded as it is": (lambda x: x.expand(-1, 6, 8, -1).relu(), ()),
    "neighbours": (lambda x: (x[:, 1:] - x[:, :-1]).abs().mean((1, 2)), ()),
    "inner places": (lambda x: x[..., 1:-1, 1:-1] * 2 + x[..., 2:, 2:], ()),
    "all but one, and all": (lambda x: x[:, :-1].sum(1) + x.amax(1), ()),
    "axes exchanged": (lambda x: x.transpose(1, 3).softmax(-1), ()),
    "uneven parts": (
        lambda x: (lambda a, b: a.sigmoid().sum(1) + b.exp().sum(1))(*x.split((2, 4), 1)),
        (),
    ),
    "a triangle": (lambda x: x.tril() * 2 + torch.triu(x, 1), ()),
    "sizes compared": (lambda x: x.relu() if x.shape[1] > 2 * x.shape[0] else -x, ()),
    "shape taken apart": (lambda x: x.view(math.prod(list(x.shape)[:2]), -1).amax(1), ()),
}


@pytest.mark.parametrize("name", ASKING)
def test_what_is_computed_of_sizes_and_types_is_eagers(name, device):
    function, shapes = ASKING[name]
    fused = fusegen.compile(function)
    assert isinstance(fused, Specialised)
    for batch in (4, 2, 4):
        x = torch.randn(batch, 6, 8, 8, device=device, requires_grad=True)
        if name in ("sizes of another", "as another"):
            x = torch.randn(4, 6, 8, 8, device=device, requires_grad=True)
        operands = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
        got, wanted = fused(x, *operands), function(x, *operands)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        probe = torch.randn_like(wanted)
        learning = [x, *operands]
        ours = torch.autograd.grad(got, learning, probe, allow_unused=True)
        eagers = torch.autograd.grad(wanted, learning, probe, allow_unused=True)
        for mine, theirs in zip(ours, eagers, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_same_chain_is_compiled_once_for_all_shapes(device):
    fused = fusegen.compile(lambda x: x.view(x.shape[0], -1) / math.sqrt(x.size(-1)))
    found = {
        fused.compiled_for(torch.randn(n, m, 16, device=device)) for n in (2, 3) for m in (1, 5)
    }
    assert [f.chain.text for f in found] == ["flatten(1) | div(4)"]
    other = fused.compiled_for(torch.randn(2, 3, 4, device=device))
    assert other.chain.text == "flatten(1) | div(2)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("other", [torch.float32, torch.float64])
@pytest.mark.parametrize("axes", [(), (4,)])
def test_a_tensor_that_is_one_number_has_a_type_as_in_eager(axes, dtype, other, device):
    x = torch.randn(axes, dtype=dtype, device=device)
    functions = [
        lambda x: (x * 3).sum() * torch.tensor(0.5, dtype=other),
        lambda x: x * torch.full((), 0.5, dtype=other) + torch.tensor(2),
    ]
    if axes:
        functions.append(lambda x: x.masked_fill(x > 0, torch.tensor(-1e9)))
    for function in functions:
        got, wanted = fusegen.compile(function)(x), function(x)
        assert got.dtype == wanted.dtype
        # Eager rounds each step to bf16, and a chain the last one.
        torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.05)


def test_it_is_called_as_any_compiled_function(device):
    def scaled(x, weight, bias=None, factor=2.0):
        x = x * weight / x.size(-1) * factor
        return x if bias is None else x + bias

    fused = fusegen.compile(scaled)
    x, weight, bias = (torch.randn(3, 8, device=device) for _ in range(3))
    for args, named in (
        ((x, weight), {}),
        ((x, weight, bias), {}),
        ((x, weight, None), {}),
        ((x,), {"weight": weight, "bias": bias}),
        ((), {"bias": bias, "x": x, "weight": weight}),
    ):
        torch.testing.assert_close(fused(*args, **named), scaled(*args, **named))
        torch.testing.assert_close(fused.reference(*args, **named), scaled(*args, **named))
    out = torch.empty_like(x)
    assert fused(x, weight, out=out) is out
    torch.testing.assert_close(out, scaled(x, weight))
    assert copy.deepcopy(fused) is fused
    assert fused.__name__ == "scaled"
    assert repr(fused) == "fusegen.compile(scaled)"


@fusegen.compile
def decorated(x):
    return x / x.size(-1)


def test_it_is_pickled_by_its_function():
    fused = pickle.loads(pickle.dumps(fusegen.compile(causal)))
    x = torch.randn(2, 5, 5)
    torch.testing.assert_close(fused(x), causal(x))
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_a_module_without_tensors_is_a_function_too():
    class Masked(nn.Module):
        def forward(self, x, y, mask=None):
            x = x / x.shape[-1] + y
            return x if mask is None else x * mask

    fused, x = fusegen.compile(Masked()), torch.randn(3, 4)
    torch.testing.assert_close(fused(x, x), Masked()(x, x))
    torch.testing.assert_close(fused(x, x, mask=x), Masked()(x, x, x))
    assert repr(fused) == "fusegen.compile(Masked)"


def test_a_function_is_a_part_of_another(device):
    scaled = fusegen.compile(lambda x: x / x.size(-1))
    activated = fusegen.compile("add(b) | gelu | give(y) | mul(2)")

    def both(x, y):
        first, second = activated(scaled(x), y)
        return first + second

    x, y = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    fused = fusegen.compile(both)
    torch.testing.assert_close(fused(x, y), both(x, y))
    text = "div(8) | add(y) | gelu | keep(y_2) | mul(2) | add(y_2)"
    assert fused.compiled_for(x, y).chain.text == text


def test_what_is_seen_first_without_gradients_has_them_later(device):
    fused = fusegen.compile(lambda x: x * torch.arange(x.shape[-1], device=x.device))
    with torch.inference_mode():
        fused(torch.randn(2, 8, device=device))
    x = torch.randn(2, 8, device=device, requires_grad=True)
    fused(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.arange(8.0, device=device).expand(2, 8))


def test_what_it_makes_has_the_type_that_torch_gives_it_by_then():
    fused, x = fusegen.compile(lambda x: x * torch.ones(x.shape[-1])), torch.ones(3)
    assert fused(x).dtype == torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert fused(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_is_outside_of_what_torch_compiles(device):
    fused = fusegen.compile(causal)
    x = torch.randn(2, 5, 5, device=device)
    compiled = torch.compile(lambda x: fused(x * 2) + 1, backend="eager")
    torch.testing.assert_close(compiled(x), causal(x * 2) + 1)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_values_type_is_that_which_it_has_under_autocast(narrow, device):
    def function(x):
        h = x.sum(-1)
        return h * (2.0 if h.dtype == torch.float32 else 3.0)

    fused, x = fusegen.compile(function), torch.randn(4, 8, device=device, dtype=narrow)
    torch.testing.assert_close(fused(x), function(x))
    with torch.autocast(device, dtype=narrow):
        torch.testing.assert_close(fused(x), function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_no_number_becomes_the_types_largest(dtype, device):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.5], dtype=dtype, device=device)
    fused = fusegen.compile(lambda x: torch.nan_to_num(x, neginf=-1.0))
    assert torch.equal(fused(x), torch.nan_to_num(x, neginf=-1.0))
    assert fused(x).tolist() == [0.0, torch.finfo(dtype).max, -1.0, 1.5]


def test_dropout_is_drawn_anew_where_the_function_asks_behind_it(device):
    fused = fusegen.compile(lambda x: (lambda h: h / h.size(-1))(F.dropout(x, 0.5)))
    x = torch.ones(16, 64, device=device)
    torch.manual_seed(3)
    first, second = fused(x), fused(x)
    torch.manual_seed(3)
    assert torch.equal(first, fused(x))
    assert not torch.equal(first, second)
    assert {*first.unique().tolist()} == {0.0, 2 / 64}


def dropped_paths(x):
    keep = 0.7
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    mask.div_(keep)
    return x * mask


def reparametrised(x):
    mean, log_variance = x.chunk(2, dim=1)
    return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)


def several_draws(x):
    noise = torch.rand(x.shape[-1], device=x.device, dtype=x.dtype)
    order = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype).cumsum(0)
    first, second = torch.randn(2, x.shape[-1], device=x.device, dtype=x.dtype).unbind(0)
    return x * (noise + order) + torch.cat([first[:3], second[3:]]) + torch.rand_like(x)


@pytest.mark.parametrize("function", [dropped_paths, reparametrised, several_draws])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_function_draws_is_what_it_draws_alone(function, dtype, device):
    fused = fusegen.compile(function)
    for shape in ((6, 4, 8), (3, 6, 5, 8)):
        x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        for seed in range(3):
            torch.manual_seed(seed)
            got, then = fused(x), torch.rand(3, device=device)
            torch.manual_seed(seed)
            wanted, eagers_then = function(x), torch.rand(3, device=device)
            torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)
            assert torch.equal(then, eagers_then)
            probe = torch.randn_like(wanted)
            ours, eagers = (torch.autograd.grad(y, x, probe)[0] for y in (got, wanted))
            torch.testing.assert_close(ours, eagers, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_a_graph_that_is_replayed_draws_anew(gpu):
    fused, x = fusegen.compile(dropped_paths), torch.ones(512, 4, device=gpu)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            fused(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused(x)
    found = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        found.append(result.clone())
    assert not torch.equal(*found)
    assert 300 < (found[0][:, 0] > 0).sum() < 420


def test_noise_like_a_value_lies_in_memory_as_it_does(device):
    x = torch.randn(2, 6, 4, 5, device=device).contiguous(memory_format=torch.channels_last)

    def noisy(x):
        return x * 2 + torch.randn_like(x)

    fused = fusegen.compile(noisy)
    torch.manual_seed(1)
    got = fused(x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, noisy(x))

    def laid_out(x):
        y = x.transpose(1, 2).contiguous()
        return y * torch.rand_like(y)

    with pytest.raises(ChainError, match="in which order a value lies in memory is not follow"):
        fusegen.compile(laid_out)(x)
    fused = fusegen.compile(reparametrised)
    torch.manual_seed(1)
    got = fused(x)
    torch.manual_seed(1)
    torch.testing.assert_close(got, reparametrised(x))
    assert got.is_contiguous(memory_format=torch.channels_last)


def sized(x):
    noise = torch.rand(x.shape[1])
    return x * noise[noise > 0.5].numel()


def by_a_generator(x):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3))


def seeded(x):
    torch.manual_seed(7)
    return x + torch.randn_like(x)


def forked(x):
    with torch.random.fork_rng(devices=[]):
        return x * torch.randn_like(x)


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))

    def forward(self, x):
        return x + self.table[torch.randperm(9)[: x.shape[1]]]


def test_what_would_not_be_drawn_as_by_the_function_is_refused():
    x, w = torch.randn(3, 5, 8), torch.randn(8)
    asked, own = "draws numbers and asks which", "by a generator of its own, or sets torch's"
    for function, message in (
        (sized, asked),
        (lambda x: x * torch.randint(0, 9, (5,)).unique().shape[0], asked),
        (by_a_generator, own),
        (lambda x: x + torch.empty(8).normal_(generator=torch.Generator()), own),
        (seeded, own),
        (forked, own),
    ):
        before = torch.get_rng_state()
        with pytest.raises(ChainError, match=message):
            fusegen.compile(function)(x)
        assert function in (seeded, forked) or torch.equal(before, torch.get_rng_state())
    for function in (
        lambda x, w: x * w[torch.randperm(w.shape[0])],
        lambda x, w: x / x.dim() * w[torch.rand(8) < 0.5].sum(),
    ):
        with pytest.raises(ChainError, match=asked):
            fusegen.compile(function)(x, w)
    with pytest.raises(ChainError, match=asked):
        Layer(Shuffled())(x)


def test_what_is_drawn_and_not_used_is_drawn_all_the_same(device):
    def wasteful(x):
        torch.rand(3, device=x.device)
        return x * 2

    def plain(x):
        torch.rand(3)
        return x * 2

    x = torch.randn(3, 8, device=device)
    for function in (wasteful, plain):
        fused = fusegen.compile(function)
        for _ in range(2):
            torch.manual_seed(5)
            fused(x)
            after = torch.rand(3)
            torch.manual_seed(5)
            function(x)
            assert torch.equal(after, torch.rand(3))


def test_a_view_of_a_view_of_the_first_parameter_is_one(device):
    x = torch.randn(3, 5, 8, device=device, requires_grad=True)
    for function in (
        lambda x: x[:, 1:][:, 1:] * 2,
        lambda x: x[:, 1:].transpose(1, 2).softmax(-1),
        lambda x: x.transpose(-1, -2)[:, 1:].exp(),
        lambda x: x.narrow(1, 1, 3) + x[:, :3],
    ):
        found, wanted = fusegen.compile(function)(x), function(x)
        torch.testing.assert_close(found, wanted)
        probe = torch.randn_like(wanted)
        ours, eagers = (torch.autograd.grad(y, x, probe)[0] for y in (found, wanted))
        torch.testing.assert_close(ours, eagers)


def test_a_layer_draws_as_its_module_does(device):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 1e-1))

        def forward(self, x):
            x = x * self.scale
            return dropped_paths(x) if self.training else x

    module = Dropping().to(device)
    layer, x = Layer(module), torch.randn(16, 8, device=device)
    for seed in range(2):
        torch.manual_seed(seed)
        got = layer(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(got, module(x))
    layer.eval()
    torch.testing.assert_close(layer(x), x * module.scale)


def changed(x):
    mask = torch.ones(x.shape[-1])
    y = x * mask
    mask.mul_(2)
    return y * mask


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (changed, "the function changes a tensor that it makes"),
        (lambda x: x.cumsum(-1) / x.size(-1), "x.cumsum: no step does it"),
        (lambda x: x.mean(1, keepdim=True).expand(3, 4, x.size(-1)) + 1, "x.expand: The expanded"),
    ],
)
def test_what_no_chain_does_is_told_by_the_call(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(function)(torch.randn(2, 5, 8))


def pairs(x):
    a, b = x.shape
    return x / (a * b)


def test_what_the_function_itself_says_comes_through():
    for shape, message in (((2,), "not enough values"), ((2, 3, 4), "too many values")):
        with pytest.raises(ValueError, match=message):
            fusegen.compile(pairs)(torch.randn(shape))

    def checked(x):
        assert x.size(1) == 3, f"got {x.shape}, {x.dtype}"
        return x * 2

    with pytest.raises(AssertionError, match=r"got torch.Size\(\[2, 4\]\), torch.float32"):
        fusegen.compile(checked)(torch.randn(2, 4))
    for function in (
        lambda x: x * torch.rand(1).item(),
        lambda x: x * 2 if torch.rand(3).flip(0).sum() > 1 else x * 3,
        lambda x: x * torch.randint(3, (2,)).tolist()[0],
        lambda x: x * float(torch.zeros(3)[1:].uniform_().max()),
    ):
        with pytest.raises(ChainError, match="the function draws numbers and asks which"):
            fusegen.compile(function)(torch.ones(2))
    with pytest.raises(ArgumentError, match="got a tensor on meta"):
        fusegen.compile(pairs)(torch.ones(2, 2, device="meta"))


def test_a_mistake_in_the_arguments_is_told():
    fused = fusegen.compile(lambda x, w, k=2: x / x.size(-1) * w * k)
    x = torch.randn(3, 4)
    for args, named, message in (
        ((x,), {}, "missing a required argument: 'w'"),
        ((x, x), {"v": x}, "unexpected keyword argument 'v'"),
        ((x, x, x, x), {}, "too many positional arguments"),
        ((2.0, x), {}, r"argument 'x': got float, wanted a torch.Tensor; pass torch.tensor\(2.0\)"),
        ((x, [2.0]), {}, "argument 'w': got list, wanted a torch.Tensor"),
        ((None, x), {}, "argument 'x': got NoneType"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fused(*args, **named)


def preferred(chosen, rejected, beta: float, label_smoothing: float = 0.0):
    margin = beta * (chosen - rejected)
    loss = F.logsigmoid(margin) * (1 - label_smoothing) + F.logsigmoid(-margin) * label_smoothing
    return -loss


def warmed(x, temperature, how="softmax"):
    if temperature != 1.0:
        x = x / max(temperature, 1e-5)
    return x.softmax(-1) if how == "softmax" else x.log_softmax(-1)


def clipped(x, y, eps):
    return torch.min(x * y, torch.clamp(x, 1 - eps, 1 + eps) * y)


@pytest.mark.parametrize(
    ("function", "numbers", "named"),
    [
        (preferred, (0.1,), {}),
        (preferred, (), {"beta": 0.3, "label_smoothing": 0.1}),
        (preferred, (0.1, 0.2), {}),
        (clipped, (0.2,), {}),
        (clipped, (), {"eps": 1}),
        (warmed, (0.7,), {}),
        (warmed, (1.0,), {"how": "log"}),
        (warmed, (1.0, "log"), {}),
    ],
)
def test_a_call_gives_numbers(function, numbers, named, device):
    count = 1 if function is warmed else 2
    tensors = [torch.randn(3, 5, device=device, requires_grad=True) for _ in range(count)]
    fused = fusegen.compile(function)
    for _ in range(2):
        found, wanted = (f(*tensors, *numbers, **named) for f in (fused, function))
        torch.testing.assert_close(found, wanted)
        ours, eager = (torch.autograd.grad(r.square().sum(), tensors) for r in (found, wanted))
        torch.testing.assert_close(ours, eager)
    if isinstance(fused, fusegen.Specialised):
        assert isinstance(fused.compiled_for(*tensors, *numbers, **named), Fused)


def test_numbers_and_tensors_may_take_turns():
    fused, (x, y) = fusegen.compile(clipped), torch.randn(2, 4)
    for eps in (0.1, torch.tensor(0.2), 0.3, 1, True, torch.tensor(0.1)):
        torch.testing.assert_close(fused(x, y, eps), clipped(x, y, eps))
    for i in range(11):
        fused(x, y, 0.4 + i / 100)
    with pytest.warns(UserWarning, match="16 different numbers, each of which is a chain"):
        fused(x, y, 0.9)


def test_there_is_a_chain_for_a_call_and_none_before():
    fused = fusegen.compile(lambda x: x / x.size(-1))
    assert isinstance(fused.compiled_for(torch.randn(2, 8)), Fused)
    for ask in (lambda: fused.chain, fused.source, fused.explain):
        with pytest.raises(ChainError, match=r"a chain for each shape and type .* compiled_for"):
            ask()
    with pytest.raises(ChainError, match=r"fusegen\.compile takes a function that asks"):
        fusegen.chain(lambda x: x / x.size(-1))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 32, 16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.table[:, : x.size(1)])


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x, mask=None):
        count = x.size(-1)
        x = x.masked_fill(self.seen[:, :, :count, :count] == 0, float("-inf"))
        x = x / math.sqrt(count) if mask is None else x / math.sqrt(count) + mask
        return F.softmax(x, dim=-1)


class Optional(nn.Module):
    def forward(self, x, scale=None):
        return x.relu() if scale is None else x.relu() * scale


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x):
        return x * self.weight[:16] + self.weight[16:]


class Growing(nn.Module):
    """Has a table that grows with what it is given, and keeps sizes."""

    def __init__(self):
        super().__init__()
        self.build(4)

    def build(self, length):
        self.length = length
        table = torch.arange(length).float()[:, None].cos() * torch.ones(16)
        self.register_buffer("table", table)

    def forward(self, x):
        self.seen = x.shape, x.dtype
        if x.size(1) > self.length:
            self.build(x.size(1))
        scaled = x * self.table[: x.size(1)].to(x.device)
        return scaled / scaled.size(-1)


class ByRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.token = nn.Parameter(torch.randn(1, 8))

    def forward(self, x):
        if x.dim() == 2:
            return x.relu() + self.token.expand(x.size(0), -1)
        return self.norm(x) * self.token.t()[:, :, None]


class OfLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Layer("layernorm(w) | mul(0.5)", w=nn.Parameter(torch.randn(16)))
        self.table = Layer(Positions())
        self.tanh = fusegen.compile("tanh")

    def forward(self, x):
        return self.tanh(self.table(self.norm(x)))


MODULES = {
    "growing": (Growing, [(2, 3, 16), (2, 9, 16), (2, 5, 16), (2, 12, 16), (2, 3, 16)]),
    "by rank": (ByRank, [(4, 8), (4, 8, 3, 5), (4, 8), (2, 8)]),
    "of layers": (OfLayers, [(2, 3, 16), (2, 9, 16)]),
    "positions": (Positions, [(2, 8, 16), (3, 7, 16), (3, 32, 16)]),
    "causal": (Causal, [(2, 3, 8, 8), (1, 2, 5, 5)]),
    "halves": (Halves, [(3, 16), (2, 5, 16)]),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_may_ask_and_take_parts_of_its_tensors(name, device):
    kind, shapes = MODULES[name]
    module = kind().to(device)
    layer = Layer(module)
    for shape in shapes:
        x = torch.randn(shape, device=device, requires_grad=True)
        got, wanted = layer(x), module(x)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        learning, probe = [x, *module.parameters()], torch.randn_like(wanted)
        ours = torch.autograd.grad(got, learning, probe, allow_unused=True)
        eagers = torch.autograd.grad(wanted, learning, probe, allow_unused=True)
        for mine, theirs in zip(ours, eagers, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    with torch.no_grad():  # each call takes the parts anew
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.ones_like(tensor))
    torch.testing.assert_close(layer(x), module(x), atol=1e-5, rtol=1e-5)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), module(x), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for tensor in twin.module.parameters():
            tensor.mul_(0.5)
    torch.testing.assert_close(twin(x), twin.module(x), atol=1e-5, rtol=1e-5)
    assert kind.__name__ in repr(layer)


def test_a_module_that_asks_is_given_what_its_forward_takes():
    module = Causal()
    layer, x, mask = Layer(module), torch.randn(2, 3, 5, 5), torch.randn(5, 5)
    for got in (layer(x, mask), layer(x, mask=mask), Layer(module, mask=mask)(x)):
        torch.testing.assert_close(got, module(x, mask))
    optional = Layer(Optional(), scale=mask)  # which asks for nothing
    torch.testing.assert_close(optional(x), x.relu() * mask)
    torch.testing.assert_close(layer(x), module(x))
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))
    assert layer.compiled_for(x).chain.text.endswith("softmax(-1)")
    for args, named, message in (
        ((x, mask, mask), {}, "got 3 tensors by position"),
        ((), {}, "got 0 tensors by position"),
        ((x,), {"msk": mask}, r"by name, wanted x, as Causal takes them"),
        ((2,), {}, "argument 'x': got int, wanted a torch.Tensor"),
    ):
        with pytest.raises(ArgumentError, match=message):
            layer(*args, **named)
    with pytest.raises(ChainError, match="asks for sizes or types, and has a chain for each"):
        _ = layer.chain
    with pytest.raises(ArgumentError, match="no operand is called 'msk'"):
        Layer(module, msk=mask)


def test_a_module_that_asks_is_saved_with_what_it_knows(tmp_path):
    layer, x = Layer(Positions()), torch.randn(2, 8, 16)
    wanted = layer(x)
    torch.save(layer, tmp_path / "layer.pt")
    loaded = torch.load(tmp_path / "layer.pt", weights_only=False)
    torch.testing.assert_close(loaded(x), wanted)


def normalised(h):
    return F.layer_norm(h, (8,))


def without_gradients(x, y):
    with torch.no_grad():
        scale, shift = (-y).abs().max() * 2, y[:1].exp()
    return x * scale + shift * y


def elbo(recon, mu, x):
    return ((recon - x) ** 2).mean() + (mu * mu).mean()


RETURNING = {
    "the stream first": lambda x, y: (x + y, normalised(x + y)),
    "all three": lambda x, y: (lambda h: (h, normalised(h), h.sum()))(x + y),
    "an operand": lambda x, y: (normalised(x) * 2, y),
    "its input": lambda x, y: (x, normalised(x) * y),
    "one twice": lambda x, y: (lambda h: (h, h))(normalised(x) * y),
    "of each input": lambda x, y: (x.relu() * 2, y.tanh() + 1),
    "of each, and more": lambda x, y: (y.exp(), x, normalised(x) * y, y.tanh() + 1),
    "what it makes": lambda x, y: (x * y, y[:, :3], torch.ones(x.size(0), device=x.device)),
    "what has no gradient": without_gradients,
}


def rotated(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotated(q) * sin), (k * cos) + (rotated(k) * sin)


def test_rotary_embeddings_of_queries_and_keys_are_a_kernel_for_each(device):
    fused = fusegen.compile(rotary)
    shapes = ((2, 4, 5, 8), (2, 2, 5, 8), (2, 5, 8), (2, 5, 8))
    q, k, cos, sin = (torch.randn(s, device=device, requires_grad=True) for s in shapes)
    ours, eagers = fused(q, k, cos, sin), rotary(q, k, cos, sin)
    torch.testing.assert_close(ours, eagers, atol=1e-5, rtol=1e-5)
    probes = [torch.randn_like(e) for e in eagers]
    mine, theirs = (torch.autograd.grad(r, (q, k, cos, sin), probes) for r in (ours, eagers))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    with pytest.raises(ArgumentError, match="out receives one result, and it has several"):
        fused(q, k, cos, sin, out=torch.empty_like(q))


@pytest.mark.parametrize("name", RETURNING)
def test_results_come_in_the_functions_order(name, device):
    function = RETURNING[name]
    x, y = (torch.randn(3, 8, device=device, requires_grad=True) for _ in range(2))
    for fused in (fusegen.compile(function), fusegen.compile(function).reference):
        ours, eagers = fused(x, y), function(x, y)
        if not isinstance(eagers, tuple):
            ours, eagers = (ours,), (eagers,)
        assert len(ours) == len(eagers)
        torch.testing.assert_close(ours, eagers, atol=1e-5, rtol=1e-5)
        learning = [i for i, e in enumerate(eagers) if e.requires_grad]
        ours, eagers = ([r[i] for i in learning] for r in (ours, eagers))
        probes = [torch.randn_like(e) for e in eagers]
        mine, theirs = (torch.autograd.grad(r, (x, y), probes) for r in (ours, eagers))
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_an_operand_may_be_called_x(device):
    recon, mu, x = (torch.randn(3, 8, device=device) for _ in range(3))
    fused = fusegen.compile(elbo)
    torch.testing.assert_close(fused(recon, mu, x), elbo(recon, mu, x))
    torch.testing.assert_close(fused(recon, x=x, mu=mu), elbo(recon, mu, x))


class PreNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, residual):
        stream = x + residual
        return stream, self.norm(stream)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, gate, scale=2.0):
        return gate, self.norm(x) * scale, x


def test_a_module_returns_what_it_is_given(device):
    module = Gated().to(device)
    layer, x, gate = Layer(module), *(torch.randn(3, 8, device=device) for _ in range(2))
    for ours in (layer(x, gate), layer(x, gate=gate)):
        torch.testing.assert_close(ours, module(x, gate), atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError, match="got 'scale', but a parameter of forward with a def"):
        layer(x, gate, scale=3.0)
    with pytest.raises(ArgumentError, match="wanted x, gate"):
        layer(x)


def test_a_module_returns_in_its_own_order(device):
    module = PreNorm().to(device)
    layer, x = Layer(module), torch.randn(3, 8, device=device)
    for ours in (layer(x, x * 2), layer(residual=x * 2, x=x)):
        torch.testing.assert_close(ours, module(x, x * 2), atol=1e-5, rtol=1e-5)


def pooled(h, m):
    m = m.unsqueeze(-1).expand(h.size()).float()
    return (h * m).sum(1) / m.sum(1).clamp(min=1e-9)


def excited(x, y):
    batch = x.shape[0]
    return x * y.view(batch, -1, 1)


# What a chain that is traced before the call does not take, but one that is traced for it does;
# with the shapes and the kinds of the operands.
TRACED_ANEW = {
    "literal sizes": (lambda x, b: x + b.view(1, 3, 1), ((3,), "number")),
    "own sizes": (lambda x, b: x + b.reshape(1, b.shape[0], 1), ((3,), "number")),
    "own numbers": (lambda x, b: x * b.view(2, 3, 1), ((6,), "number")),
    "another's sizes": (excited, ((2, 3), "number")),
    "a part": (lambda x, b: x * b[..., :3].sum() + b[0, :3, None], ((2, 7), "number")),
    "whole floats": (lambda x, m: x + (1.0 - m[:, :, None]) * -10000.0, ((2, 3), "whole")),
    "a sum of floats": (lambda x, m: x / (m + 1.0).unsqueeze(-1), ((2, 3), "whole")),
}


# And what one takes as it is.
TRACED_ONCE = {
    "unequal labels": (
        lambda x, m: x.mean(-1, keepdim=True) * (m[:, :, None] != m[:, None, :]),
        ((2, 3), "whole"),
    ),
    "one label": (lambda x, m: F.cross_entropy(x[0], m[0]), ((2, 3), "whole")),
    "a mean of tokens": (pooled, ((2, 3), "whole")),
    "a mask's size": (lambda x, m: x + m.unsqueeze(-1).expand_as(x), ((2, 3), "truth")),
    "a mask's new axis": (lambda x, m: x * m.unsqueeze(-1), ((2, 3), "truth")),
    "a mask's new axes": (lambda x, m: m[..., None] * x, ((2, 3), "truth")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*TRACED_ANEW, *TRACED_ONCE])
def test_what_a_chain_does_not_take_is_traced_for_the_call(name, dtype, device):
    function, (shape, kind) = {**TRACED_ANEW, **TRACED_ONCE}[name]
    fused = fusegen.compile(function)
    operand = torch.randn(shape, device=device)
    operand = {"truth": operand > 0, "whole": (operand > 0).long()}.get(kind, operand.to(dtype))
    operand = operand.requires_grad_(kind == "number")
    # Eager rounds each step to bf16, and a chain the last one.
    near = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for _ in range(2):  # the second time it is known
        x = torch.randn(2, 3, 5, device=device, dtype=dtype, requires_grad=True)
        got, wanted = fused(x, operand), function(x, operand)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, **near)
        learning, probe = [x, operand] if kind == "number" else [x], torch.randn_like(wanted)
        ours, eagers = (torch.autograd.grad(r, learning, probe) for r in (got, wanted))
        torch.testing.assert_close(ours, eagers, **near)
    if isinstance(fused, Fused):
        assert len(fused._refused) == (name in TRACED_ANEW)


def test_what_no_chain_takes_is_told_as_of_the_first():
    fused = fusegen.compile(lambda x, b: x + b.view(1, 5))
    with pytest.raises(ArgumentError, match="does not broadcast"):
        fused(torch.randn(2, 3), torch.randn(4))
    with pytest.raises(ArgumentError, match="does not broadcast"):
        fusegen.compile(lambda x, b: x + b)(torch.randn(2, 3), torch.randn(4))


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.channels = 3
        self.bias, self.scale = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.scale.reshape(self.scale.shape[0], 1) + self.bias.view(1, self.channels, 1)


def test_a_module_that_its_chain_does_not_take_is_traced_for_the_call(device):
    module = Biased().to(device)
    layer = Layer(module)
    for batch in (2, 4, 2):
        x = torch.randn(batch, 3, 5, device=device, requires_grad=True)
        got, wanted = layer(x), module(x)
        torch.testing.assert_close(got, wanted)
        learning, probe = [x, *module.parameters()], torch.randn_like(wanted)
        ours, eagers = (torch.autograd.grad(r, learning, probe) for r in (got, wanted))
        torch.testing.assert_close(ours, eagers, atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError):
        layer(torch.randn(2, 4, 5, device=device))
    torch.testing.assert_close(layer(x), module(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return x * min(1.0, self.step / 10)


def test_a_module_that_counts_is_refused_and_left_as_it_was():
    module = Counting()
    with pytest.raises(ChainError, match=r"Counting\.step: forward changes it in each call"):
        Layer(module)
    assert module.step == 0


def of_weights(x, m):
    m = m.type_as(x)
    return (x * m.unsqueeze(2)).sum(dim=1) / m.sum(dim=1).unsqueeze(1)


def within(x, lengths):
    mask = torch.arange(x.size(1), device=x.device)[None, :] < lengths[:, None]
    return x * mask.unsqueeze(-1)


def of_lengths(x, lengths):
    places = torch.arange(x.size(1), device=x.device).expand(x.size(0), -1)
    mask = places < lengths.unsqueeze(1)
    return (x * mask[..., None]).sum(1) / lengths[:, None].to(x.dtype)


def ones_and_lengths(x, lengths):
    mask = torch.arange(x.size(1), device=x.device)[None, :] < lengths[:, None]
    return (x * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [of_weights, within, of_lengths, ones_and_lengths])
def test_a_tensor_of_the_first_axes_lies_along_those(function, dtype, device):
    fused = fusegen.compile(function)
    for _ in range(2):
        x = torch.randn(3, 6, 8, device=device, dtype=dtype, requires_grad=True)
        other = torch.tensor([6, 2, 3], device=device)
        if function is of_weights:
            other = torch.rand(3, 6, device=device, dtype=dtype, requires_grad=True)
        got, wanted = fused(x, other), function(x, other)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, atol=0.03, rtol=0.03)
        learning = [t for t in (x, other) if t.requires_grad]
        probe = torch.randn_like(wanted)
        ours, eagers = (torch.autograd.grad(y, learning, probe) for y in (got, wanted))
        torch.testing.assert_close(ours, eagers, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_masks_of_pairs_are_products_of_masks(kind, device):
    def paired(x, mask):
        return x * (mask[:, :, None] * mask[:, None, :])

    def either(x, mask):
        return x.masked_fill((mask[:, :, None] + mask[:, None, :]) > 0, -1.0)

    x = torch.randn(3, 6, 6, device=device)
    mask = torch.randint(0, 2, (3, 6), device=device).to(kind)
    for function in (paired, either):
        found, wanted = fusegen.compile(function)(x, mask), function(x, mask)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def kept_off(x, mask):
    return x + (1.0 - mask) * -1000.0


def test_floats_that_meet_integers_are_floats_wherever_the_function_goes(device):
    x = torch.randn(4, 8, device=device, dtype=torch.bfloat16)
    mask = torch.randint(0, 2, (4, 8), device=device)
    wanted, fused = kept_off(x, mask), fusegen.compile(kept_off)
    assert wanted.dtype == torch.float32
    around = fusegen.compile(lambda x, mask: fused(x * 2, mask) / 2)
    asked = fusegen.compile(lambda x, mask: fused(x, mask) * (x.dim() - 1))
    for found, expected in (
        (fused(x, mask), wanted),
        (around(x, mask), kept_off(x * 2, mask) / 2),
        (asked(x, mask), wanted),
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected)
    known = pickle.loads(pickle.dumps(fused))  # as the function, of which it is made
    torch.testing.assert_close(known(x, mask), wanted)
    floats = mask.to(torch.bfloat16)
    compiled = torch.compile(lambda x, mask: fused(x, mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, floats), kept_off(x, floats))
    with pytest.raises(Exception, match=r"has torch\.int64, which meets"):
        compiled(x, mask)


class Kept(nn.Module):
    def forward(self, x, mask=None):
        return x * 2.0 if mask is None else x + (1.0 - mask) * -1000.0


def test_a_layer_of_floats_takes_integers_too(device):
    layer, x = Layer(Kept()), torch.randn(4, 8, device=device, dtype=torch.bfloat16)
    mask = torch.randint(0, 2, (4, 8), device=device)
    for args in ((x, mask), (x,), (x, mask.to(x.dtype)), (mask,)):
        found, wanted = layer(*args), Kept()(*args)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_what_is_made_under_fake_tensors_is_not_kept():
    fused = fusegen.compile(lambda x: x / x.size(0) + torch.ones(x.size(-1)))
    x = torch.randn(4, 6)
    for _ in range(2):
        with FakeTensorMode() as mode:
            assert fused(mode.from_tensor(x)).shape == (4, 6)
        torch.testing.assert_close(fused(x), x / 4 + 1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, m: torch.cat([x[:, 0], x[:, 1:].mean(1)], -1),
        lambda x, m: torch.cat([(x * 2)[:, 0], (x * 2)[:, 1:].mean(1)], -1),
        lambda x, m: torch.where(torch.cat([m[:1], m[:1]]), x, 0.0),
        lambda x, m: torch.where(m[:1].expand_as(x), x, 0),
        lambda x, m: x.masked_fill(~m[:, :1].expand_as(x), 0.0),
        lambda x, m: torch.where((m.float() > 0).expand_as(x), x, -x),
        lambda x, m: torch.where(torch.where(x > 0, m, ~m), x, -x),
        lambda x, m: torch.cat([x, x.std(0).mean().expand(x.shape[0], 1, x.shape[2])], 1),
        lambda x, m: torch.hstack([x * 2, x]),
        lambda x, m: x[:, [2, 0]] * 2,
        lambda x, m: (x[:, [0, 2]].amin(-1), ((x > 0) * m.int()).sum())[0],
        lambda x, m: (x * 2).round(decimals=1) + (x * 30).round(decimals=-1),
        lambda x, m: (x * 2).to(str(x.device)).to(x.device, torch.float64),
    ],
)
def test_conditions_and_parts_are_as_in_eager(function, device):
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    m = torch.rand(2, 3, 4, device=device) > 0.5
    found, wanted = fusegen.compile(function)(x, m), function(x, m)
    torch.testing.assert_close(found, wanted)
    d = torch.randn_like(wanted)
    torch.testing.assert_close(torch.autograd.grad(found, x, d), torch.autograd.grad(wanted, x, d))


def test_another_device_is_refused():
    fused = fusegen.compile(lambda x: (x * 2).to("meta"))
    with pytest.raises(ChainError, match=r"x.to: got 'meta', but x is on 'cpu', where all that"):
        fused(torch.randn(3))


def conditioned(x, emb):
    scale, shift = emb.to(x.dtype).chunk(2, 1)
    return torch.addcmul(shift, F.group_norm(x, 4), scale + 1)


def frozen(x, v, w):
    return x * (w * (v + 1e-5).rsqrt()).reshape(1, -1, 1, 1)


def rotated_in_pairs(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


def turned(q, emb):
    sin, cos = emb.tensor_split(2, -1)
    t = q[:, :, 1:]
    return torch.cat([q[:, :, :1], t * cos + rotated_in_pairs(t) * sin], 2)


def modulated(x, t, table):
    shift, scale = (table[None] + t.reshape(x.shape[0], 2, -1)).chunk(2, 1)
    return x * scale + shift


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (conditioned, [(2, 16, 5, 5), (2, 32, 1, 1)]),
        (frozen, [(2, 6, 3, 3), (6,), (6,)]),
        (turned, [(2, 3, 6, 16), (5, 32)]),
        (modulated, [(2, 5, 8), (2, 16), (2, 8)]),
        (lambda x, a: x * a.sum().view(-1), [(2, 3), (4, 3)]),
        (lambda x, a, b: x * (a * b)[None, :, None, None], [(2, 6, 3, 3), (6,), (6,)]),
        (lambda x, a: x * a.exp().view(1, 6, 1, 1), [(2, 6, 3, 3), (6,)]),
        (lambda x, a, b: x * torch.exp((a * b).sum(-1)), [(2, 2, 5, 5), (8,), (8,)]),
    ],
)
def test_what_is_made_of_operands_alone_may_be_a_chain_of_its_own(function, shapes, device):
    tensors = [torch.rand(s, device=device, dtype=torch.float64).requires_grad_() for s in shapes]
    found, wanted = fusegen.compile(function)(*tensors), function(*tensors)
    torch.testing.assert_close(found, wanted)
    d = torch.randn_like(wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, tensors, d), torch.autograd.grad(wanted, tensors, d)
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x + F.embedding(i.clamp(min=0), x[:, :4]),
        lambda x, i: x * torch.zeros(x.shape, device=x.device).scatter(1, i.long()[:, None], 1),
        lambda x, i: x.softmax(-1).scatter(-1, x.argmax(-1, keepdim=True), 0.0),
    ],
)
def test_places_that_are_computed_are_no_numbers_while_it_is_traced(function, device):
    x, i = torch.randn(4, 4, device=device), torch.tensor([1, 2, 3, 0], device=device)
    for _ in range(5):  # what is not there yet had any value
        found, wanted = fusegen.compile(function)(x, i), function(x, i)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tanh().permute(0, 2, 1).contiguous(),
        lambda x: ((x + x.detach()).transpose(0, 1).contiguous(), x.square().mean()),
        lambda x: (x.transpose(1, 2) * 2).contiguous().view(2, -1),
    ],
)
def test_a_result_that_is_asked_to_be_contiguous_is(function, device):
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    found, wanted = fusegen.compile(function)(x), function(x)
    torch.testing.assert_close(found, wanted)
    one, other = (r[0] if isinstance(r, tuple) else r for r in (found, wanted))
    assert one.stride() == other.stride()


def test_an_operand_may_have_a_name_that_a_call_has_for_something_else(device):
    def skip(x, out):
        return x.sigmoid() * out

    def gated(h, x=None):
        return h.sigmoid() if x is None else h.sigmoid() * x

    a, b = torch.randn(2, 2, 3, device=device)
    fused = fusegen.compile(skip)
    torch.testing.assert_close(fused(a, b), skip(a, b))
    torch.testing.assert_close(fused(a, out=b), skip(a, b))
    fused = fusegen.compile(gated)
    for args, named in [((a,), {}), ((a, b), {}), ((a,), {"x": b}), ((), {"h": a, "x": b})]:
        torch.testing.assert_close(fused(*args, **named), gated(*args, **named))


def test_two_parameters_may_not_become_one_operand():
    fused = fusegen.compile(lambda h, x, x_: h.exp() * x - x_)
    with pytest.raises(ChainError, match="'x_' and another one have nearly one name"):
        fused(*torch.randn(3, 4))


def test_numbers_are_given_beside_tensors(device):
    def found(x, y):
        return x.exp(), {"sum": (x + y).sum(), "count": x.numel(), "more": (None, 0.5, "mean")}

    x, y = torch.randn(2, 3, device=device)
    ours, eager = fusegen.compile(found)(x, y), found(x, y)
    torch.testing.assert_close(ours[0], eager[0])
    torch.testing.assert_close(ours[1].pop("sum"), eager[1].pop("sum"))
    assert ours[1] == eager[1]


def test_what_lies_otherwise_is_traced_again(device):
    def noisy(x):
        return x.exp() + torch.randn_like(x)

    relaid = [
        lambda x: (x.exp() * x.size(1)).contiguous(),
        lambda x: x.exp().contiguous(),
        lambda x: x.exp().contiguous(memory_format=torch.channels_last),
        lambda x: x.exp().clone(memory_format=torch.channels_last),
        lambda x: x.exp().to(torch.bfloat16, memory_format=torch.channels_last),
        lambda x: x.exp().to(memory_format=torch.preserve_format),
    ]
    usual = torch.randn(2, 8, 5, 4, device=device)
    last = usual.contiguous(memory_format=torch.channels_last)
    for function in (noisy, *relaid):
        fused = fusegen.compile(function)
        for x in (last, usual, last):
            torch.manual_seed(0)
            expected = function(x)
            torch.manual_seed(0)
            torch.testing.assert_close(fused(x), expected)
            assert fused(x).stride() == expected.stride()


def test_how_a_value_lies_is_told_by_the_call(device):
    def function(x):
        return (x.exp() if x.is_contiguous() else x.sin()) * x.stride(0)

    fused = fusegen.compile(function)
    x = torch.randn(2, 3, 4, 5, device=device)
    for z in (x, x.transpose(0, 1), x.contiguous(memory_format=torch.channels_last), x):
        torch.testing.assert_close(fused(z), function(z))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.chunk(2, 0)[1].exp(),
        lambda x: [part.exp() for part in (x * 2).chunk(4, -1)],
        lambda x: [part.exp() for part in x.tensor_split(4, -1)],
        lambda x: x.chunk(2, dim=0)[0].flip(-1).sin(),
        lambda x: torch.hstack([x.exp(), x * x.size(0)]),
        lambda x: torch.stack([part.exp() for part in x.unbind(0)][:1], -1),
        lambda x: torch.cat([part.exp() for part in x.unbind(0)][:1], -1),
        lambda x: x.exp().ravel() * x.numel(),
        lambda x: sum(part.exp() for part in x),
        lambda x: (lambda first, *rest: first * rest[-1].exp())(*x.permute(1, 0)),
    ],
)
def test_parts_that_are_no_equal_ones_and_few_values_are_torchs(function, device):
    fused = fusegen.compile(function)
    for shape in [(4, 8), (5, 7), (3, 10)]:
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(fused(x), function(x))


def test_values_with_one_axis_are_put_along_that(device):
    x, y = torch.randn(2, 5, device=device)
    fused = fusegen.compile(lambda x, y: torch.hstack([x.exp(), y * 2]))
    torch.testing.assert_close(fused(x, y), torch.hstack([x.exp(), y * 2]))


def drawn_or_not(x, mask=None):
    return x * 1 if mask is None else x * mask * torch.rand(()).item()


def sized_if_given(x, mask=None):
    return x.sigmoid() if mask is None else x.sigmoid() * mask * x.size(0)


def filled(x, mask=None):
    x = x.sigmoid()
    return x if mask is None else x * mask * torch.full((8,), 0.5, device=x.device)


def parted(x, mask=None):
    return x.sigmoid() if mask is None else x.sigmoid() * mask[:4].repeat(2)


def kept_off_if_given(x, mask=None, bias=None):
    x = x.sigmoid()
    x = x if mask is None else x * (1.0 - mask)
    return x if bias is None else x + bias


def given_back(x, mask=None):
    return x.sigmoid() if mask is None else (x.sigmoid() * mask, mask)


def with_axes(x, b, mask=None):
    y = x + b.view(1, 8, 1)
    return y if mask is None else y * mask


def test_an_optional_tensor_takes_nothing_from_what_functions_may_do(device):
    x, b = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    deep, whole = torch.randn(2, 8, 5, device=device), torch.arange(8, device=device)
    cases = [
        (f, (x, b), {}) for f in (sized_if_given, filled, parted, given_back, kept_off_if_given)
    ]
    cases += [(with_axes, (deep, b), {}), (with_axes, (deep, b, deep), {})]
    cases += [
        (kept_off_if_given, (x,), named)
        for named in ({"mask": whole}, {"bias": b}, {"mask": whole, "bias": b}, {"mask": None})
    ]
    for function, given, named in cases:
        fused, wanted = fusegen.compile(function), function(*given, **named)
        for _ in range(2):
            torch.testing.assert_close(fused(*given, **named), wanted)
    with pytest.raises(ChainError, match="draws numbers and asks which"):
        fusegen.compile(drawn_or_not)(x, b)


def scaled(scores, b, scale=2.0, mask=None):
    return scores * b * scale if mask is None else scores * b + mask


@fusegen.compile
def decorated_chain(x, b, scale=2.0):
    return x * b * scale


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda f: pickle.loads(dumped(f))])
def test_a_copy_of_what_is_compiled_takes_all_that_it_does(copied, device):
    x, b = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    again = copied(fusegen.compile(scaled))
    for given, named in (((x, b), {}), ((x, b, 3.0), {}), ((x, b), {"mask": x})):
        torch.testing.assert_close(again(*given, **named), scaled(*given, **named))
    torch.testing.assert_close(again(scores=x, b=b), scaled(x, b))
    assert copied(decorated_chain) is decorated_chain
    nameless = copied(fusegen.compile(lambda x, b: x * b))  # pickled as its chain
    torch.testing.assert_close(nameless(x, b), x * b)


def dumped(what) -> bytes:
    return pickle.dumps(what)


def test_what_a_function_makes_and_gives_is_each_calls_own(device):
    def counted(x):
        zeros = torch.zeros(x.size(-1), device=x.device)
        return x + zeros, zeros, zeros[1:]

    fused, x = fusegen.compile(counted), torch.randn(3, 5, device=device)
    for _ in range(3):
        found, zeros, part = fused(x)
        assert torch.equal(found, x)
        assert not zeros.any()
        assert not part.any()
        zeros += 1
        part += 1


def test_shapes_that_a_chain_does_not_take_are_forgotten(device, monkeypatch):
    monkeypatch.setattr(plan, "_MOST_PLANS", 8)
    fused, b = fusegen.compile(lambda x, b: x + b.view(1, 8, 1)), torch.randn(8, device=device)
    for n in range(1, 40):
        x = torch.randn(2, 8, n, device=device)
        assert torch.equal(fused(x, b), x + b.view(1, 8, 1))
    assert len(fused._refused) <= 8


FILLED = {
    "zeros": lambda x: (x + 1, torch.zeros_like(x)),
    "numbers": lambda x: (x + 1, torch.full_like(x, 2.5)),
    "integers": lambda x: (x + 1, torch.full_like(x, 2.7, dtype=torch.int64)),
    "of a part": lambda x: (x + 1, torch.ones_like(x[:, 0])),
    "conditions": lambda x: (x + 1, torch.ones_like(x, dtype=torch.bool)),
    "of conditions": lambda x: (x + 1, torch.zeros_like(x > 0)),
    "chosen by": lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, 0.0),
    "masked by": lambda x: x.masked_fill(~torch.zeros_like(x, dtype=torch.bool), 1.0),
}


@pytest.mark.parametrize("name", FILLED)
def test_what_is_filled_is_a_tensor_of_its_own(name, device):
    x = torch.randn(4, 6, device=device)
    found, wanted = fusegen.compile(FILLED[name])(x), FILLED[name](x)
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for have, want in pairs:
        assert have.dtype == want.dtype
        assert have.stride() == want.stride()
        assert torch.equal(have, want)
        have.view(-1)[0] = 7
        assert torch.equal(have.view(-1)[1:], want.view(-1)[1:])


def test_the_gradient_of_a_sum_is_one_number(device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fusegen.compile("mul(2) | sum")(x), x)
    assert gradient.stride() == (0, 0)  # as eager's, without memory for each element
    assert torch.equal(gradient, torch.full_like(x, 2.0))


def test_what_pickle_cannot_name_is_not_pickled_by_halves():
    for function in (
        lambda x, mask=None: x * 2 if mask is None else x * mask,
        lambda x, scale=2.0: x * scale,
        lambda x, mask: x * (1.0 - mask),
    ):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(fusegen.compile(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[..., ::2, :] * 2,
        lambda x: x[..., ::2, ::2] * 2,
        lambda x: x[..., 1::2, :4].relu(),
        lambda x: x[..., ::3, 1::2] * x.shape[1],
        lambda x: x.exp()[..., ::2, ::2, ::2],
        lambda x: x[..., ::2, None] * 2,
        lambda x: torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2]), 1) * 2,
    ],
)
@pytest.mark.parametrize("shape", [(2, 8, 6, 8), (2, 4, 12, 4)])
def test_every_so_manieth_place_is_taken_along_any_axis(function, shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    found, wanted = fusegen.compile(function)(x), function(x)
    torch.testing.assert_close(found, wanted)
    ours, eager = (torch.autograd.grad(r.square().sum(), x) for r in (found, wanted))
    torch.testing.assert_close(ours, eager)
