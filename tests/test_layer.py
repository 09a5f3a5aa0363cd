"""A chain as an nn.Module: what it holds, what it is passed, training and evaluation."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import fusegen
from fusegen import ArgumentError, ChainError, Layer

NORM = "batch_norm(running_mean, running_var, weight, bias, training=True) | add(res) | relu"


def normalised(width: int, device: str) -> Layer:
    statistics = {"running_mean": torch.zeros(width), "running_var": torch.ones(width)}
    weights = {name: nn.Parameter(torch.rand(width)) for name in ("weight", "bias")}
    return Layer(NORM, **statistics, **weights).to(device)


def test_it_is_a_module_among_others(device):
    bias = nn.Parameter(torch.randn(8))
    block = nn.Sequential(nn.Conv2d(3, 8, 3), Layer("add_channel(bias) | gelu", bias=bias))
    block = block.to(device)
    x = torch.randn(2, 3, 9, 9, device=device)
    expected = F.gelu(block[0](x) + block[1].bias[:, None, None])
    torch.testing.assert_close(block(x), expected)
    assert set(block.state_dict()) == {"0.weight", "0.bias", "1.bias"}
    block(x).sum().backward()
    assert block[1].bias.grad is not None
    assert repr(block[1]) == "Layer('add_channel(bias) | gelu')"


def test_it_trains_and_evaluates_as_its_twin_of_torch(device):
    ours, eager = normalised(8, device), nn.BatchNorm2d(8).to(device)
    eager.load_state_dict(ours.state_dict(), strict=False)
    for training in (True, True, False):
        x, res = (torch.randn(2, 8, 5, 4, device=device) for _ in range(2))
        ours.train(training)
        eager.train(training)
        expected = F.relu(eager(x) + res)
        torch.testing.assert_close(ours(x, res), expected)
    torch.testing.assert_close(ours(x, res=res), expected)
    torch.testing.assert_close(ours.running_mean, eager.running_mean)


def test_in_evaluation_nothing_is_dropped(device):
    layer = Layer("dropout(0.5) | gelu | alpha_dropout(0.25) | mul(2)").to(device)
    x = torch.randn(64, 64, device=device)
    assert not torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer.eval()(x), 2 * F.gelu(x))


@pytest.mark.parametrize("text", ["instance_norm | relu", "batch_norm(training=True) | relu"])
def test_a_norm_without_running_statistics_has_none_in_evaluation_either(text, device):
    layer = Layer(text).to(device)
    x = torch.randn(4, 3, 8, device=device)
    trained = layer(x)
    assert torch.equal(layer.eval()(x), trained)


def test_a_norm_of_instances_with_running_statistics_uses_them_in_evaluation(device):
    text = "instance_norm(running_mean, running_var)"
    layer = Layer(text, running_mean=torch.ones(3), running_var=torch.full((3,), 4.0)).to(device)
    x = torch.randn(4, 3, 8, device=device)
    torch.testing.assert_close(layer.eval()(x), (x - 1) / (4 + 1e-5) ** 0.5)


def test_it_is_copied_and_pickled_with_what_it_holds(device):
    layer = normalised(8, device).eval()
    x, res = (torch.randn(2, 8, 5, 4, device=device) for _ in range(2))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, res), layer(x, res))
        assert twin.weight is not layer.weight


@pytest.mark.parametrize("how", ["compile", "fx"])
def test_it_is_recorded_whole(how, device):
    layer = Layer("mul_channel(scale) | gelu", scale=nn.Parameter(torch.randn(8))).to(device)
    block = nn.Sequential(nn.Conv2d(3, 8, 3).to(device), layer)
    x = torch.randn(2, 3, 9, 9, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    recorded = compiled if how == "compile" else torch.fx.symbolic_trace(block)
    assert torch.equal(recorded(x), block(x))


def test_an_order_that_is_listed_holds_in_evaluation(device):
    layer = Layer("takes(a, b) | dropout(0.5) | mul(b) | add(a)").to(device).eval()
    x, a, b = (torch.randn(5, device=device) for _ in range(3))
    torch.testing.assert_close(layer(x, a, b), x * b + a)
    torch.testing.assert_close(layer(x, b, a=a), x * b + a)


def test_what_is_compiled_already_is_a_chain_too():
    layer = Layer("mul(a) | gelu")
    for compiled in (layer, fusegen.compile("mul(a) | gelu")):
        assert fusegen.compile(compiled).chain == layer.chain


class Epilogue(nn.Module):
    """What follows a product in a transformer, with a buffer and an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x + residual)) * self.scale + self.shift * residual


def test_it_is_made_of_a_module_and_trains_its_parameters(device):
    eager = Epilogue().to(device)
    fused = Layer(eager)
    assert fused.module is eager
    assert {*fused.state_dict()} == {f"module.{name}" for name in eager.state_dict()}
    x, residual = (torch.randn(3, 16, device=device, requires_grad=True) for _ in range(2))
    inputs = (x, residual, *eager.parameters())
    found = [f(x, residual=residual) for f in (fused, eager)]
    torch.testing.assert_close(*found)
    # Of three rows, sums in another order and parts that cancel.
    for a, b in zip(*(torch.autograd.grad(f.square().sum(), inputs) for f in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    eager.scale = nn.Parameter(torch.ones(16, device=device))  # what it has when it is called
    torch.testing.assert_close(fused(x, residual), eager(x, residual))


SEQUENCES = {
    "batch norm": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
    "batch norm, averaged": lambda: nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.SiLU()),
    "batch norm, frozen": lambda: nn.Sequential(nn.BatchNorm2d(4).eval(), nn.ReLU()),
    "batch norm without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "instance norm without statistics": lambda: nn.InstanceNorm2d(4),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Dropout(0.0)),
    "slopes": lambda: nn.Sequential(nn.PReLU(4), nn.Softmax(1), nn.Flatten()),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_module_trains_and_evaluates_as_its_twin(name, device):
    eager = SEQUENCES[name]().to(device)
    ours = copy.deepcopy(eager)
    fused = Layer(ours)
    for training in (True, True, False):
        if not training:
            fused.eval()
            eager.eval()
        x = torch.randn(2, 4, 6, 6, device=device)
        torch.testing.assert_close(fused(x), eager(x), rtol=1e-5, atol=1e-5)
    for a, b in zip(ours.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_module_keeps_its_modes_and_its_methods_while_it_is_traced():
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.5))).eval()
    module[0].train()
    fused = Layer(module)
    assert [part.training for part in module.modules()] == [False, True, False, False]
    assert "forward" not in vars(module[0])
    assert module[0].num_batches_tracked == 0
    assert "dropout" in fused.chain.text


def test_a_layer_starts_in_the_mode_of_its_module():
    module = nn.BatchNorm1d(8).eval()
    before = module.running_mean.clone()
    fused = Layer(module)
    assert not fused.training
    fused(torch.randn(4, 8))
    assert torch.equal(module.running_mean, before)


def test_parts_are_in_the_modes_in_which_they_are_put():
    """As a norm that is frozen, before the layer is made of it or later."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.0))
    ours = copy.deepcopy(eager)
    fused = Layer(ours)
    ours[0].eval()
    eager[0].eval()
    for step in range(3):
        x = torch.randn(2, 4, 5, 5) * 3 + 2
        torch.testing.assert_close(fused(x), eager(x))
        assert torch.equal(ours[0].running_mean, eager[0].running_mean)
        if step == 1:
            fused.train()
            eager.train()
    assert ours[0].num_batches_tracked == 1
    assert "training=True" in fused.chain.text


def test_what_a_module_always_drops_it_drops_in_evaluation():
    class Always(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x.exp(), 0.5, training=True)

    fused = Layer(Always()).eval()
    assert 300 < (fused(torch.ones(1000)) == 0).sum() < 700


class Ahead(nn.Module):
    """Much is computed from its own tensors before they meet x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.slope, self.gate = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(3, 5, 4))
        self.register_buffer("mask", torch.tensor([True, False, True, False]))
        self.register_buffer("zeros", torch.tensor([0.0, 1.0, 2.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.group_norm(x, 2, 1 + self.weight, self.bias * 2) * self.slope.exp()
        x = x + self.bias[:, None, None] / self.weight.shape[0] + self.weight.view(1, -1, 1, 1)
        x = x.masked_fill(~self.mask, -1.0).masked_fill(self.zeros == 0, 2.0)
        return x * torch.sigmoid(self.gate[0]) - torch.exp(-self.gate).mean(0)


def test_what_a_module_computes_from_its_own_tensors_is_in_the_chain(device):
    module = Ahead().to(device)
    fused = Layer(module)
    x = torch.randn(2, 6, 5, 4, device=device, requires_grad=True)
    inputs = [x, *module.parameters()]
    found, wanted = fused(x), module(x)
    # A norm of few elements, and its gradients' sums, in another order than eager's.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    seed = torch.randn_like(wanted)
    gradients = (torch.autograd.grad(f, inputs, seed) for f in (found, wanted))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Rotary(nn.Module):
    """Whose frequencies are put side by side from the module's own, in a list."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("freqs", torch.rand(5, 4))

    def forward(self, x):
        angles = torch.cat((self.freqs, self.freqs), dim=-1)
        a, b = x.chunk(2, -1)
        return (x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()) * self.scale


def test_a_module_puts_its_own_tensors_side_by_side(device):
    module = Rotary().to(device)
    x = torch.randn(2, 3, 5, 8, device=device)
    fused, wanted = Layer(copy.deepcopy(module)), module(x)
    torch.testing.assert_close(fused(x), wanted)
    seed = torch.randn_like(wanted)
    (mine,) = torch.autograd.grad(fused(x), fused.module.scale, seed)
    (theirs,) = torch.autograd.grad(wanted, module.scale, seed)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)  # sums in another order


class Doing(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.what, self.t = what, nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self, x)


CLOSED_OVER = torch.ones(3)


def scaled_by_what_it_changes(m, x):
    t = m.t
    t += 1
    return x * t


def masked_by_what_it_changes(m, x):
    t = m.t
    t &= x > 0
    return x.masked_fill(t, 0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda m, x: x * m.t.item(), "item of 't': a tensor of the module has no values before"),
        (lambda m, x: x * float(m.t), "'t': a tensor of the module has no values before a call"),
        (lambda m, x: x * 2 if m.t > 0 else x, "no truth value while the chain is built"),
        (lambda m, x: x * m.t.detach().add_(1), "add_ changes x in place"),
        (lambda m, x: x * CLOSED_OVER, "got a Tensor, wanted an expression or a number"),
        (scaled_by_what_it_changes, "add_ changes x in place"),
        (masked_by_what_it_changes, "logical_and_ changes x in place"),
        (lambda m, x: x * 2 if m.t == 1 else x, "no truth value while the chain is built"),
        (lambda m, x: setattr(m, "kept", x * 2) or x * 3, "kept: forward keeps a value there"),
    ],
)
def test_what_no_chain_does_with_a_modules_tensors_is_told(what, message):
    with pytest.raises(ChainError, match=message):
        Layer(Doing(what))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 3.0))
        self.others = nn.ParameterList([nn.Parameter(torch.full((8,), 0.5))])

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.weight + self.others[0]


def test_names_of_arguments_and_of_tensors_are_told_apart():
    x = torch.randn(4, 8)
    torch.testing.assert_close(Layer(Named())(x), x * 3 + 0.5)
    torch.testing.assert_close(Layer(Named())(weight=x), x * 3 + 0.5)  # as its forward calls it
    with pytest.raises(ArgumentError, match="argument 'x' is missing, or None"):
        Layer("relu")()


class Activated(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_a_norm_with_a_forward_of_its_own_is_not_taken_for_torchs():
    module, x = Activated(8), torch.randn(2, 8, 4)
    layer = Layer(module.eval())
    torch.testing.assert_close(layer(x), module(x))
    with pytest.raises(ChainError, match="add_ changes x in place"):
        layer.train()(x)


def test_a_tensor_that_two_parts_share_is_one_operand():
    slope = nn.PReLU()
    assert Layer(nn.Sequential(slope, nn.Tanh(), slope)).chain.operands == ("weight_0",)


class CastToItsWeight(nn.Module):
    """A norm as T5 has it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, hidden):
        variance = hidden.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden = hidden.to(self.weight.dtype)
        return self.weight * hidden


@pytest.mark.parametrize("is_within", [False, True])
def test_a_module_that_asks_the_type_of_its_weight_is_asked_again_when_that_changes(
    is_within, device
):
    module = CastToItsWeight()
    layer = Layer(module)
    owner = nn.Sequential(layer) if is_within else layer
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        owner = owner.to(device, dtype)
        x = torch.randn(5, 64, device=device).to(dtype)
        found, wanted = owner(x), module(x)
        assert found.dtype == wanted.dtype
        step = max(4 * torch.finfo(wanted.dtype).eps, 1e-6)  # its sums are of float32 in any case
        torch.testing.assert_close(found, wanted, rtol=step, atol=step)
        assert owner.eval()(x).dtype == owner.train()(x).dtype == wanted.dtype


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_layer_of_a_module_has_one_of_its_own_when_it_is(how, device):
    fused = Layer(nn.Sequential(nn.LayerNorm(6), nn.GELU())).to(device)
    other = copy.deepcopy(fused) if how == "copied" else pickle.loads(pickle.dumps(fused))
    x = torch.randn(3, 6, device=device)
    torch.testing.assert_close(other(x), fused(x))
    with torch.no_grad():
        other.module[0].weight.zero_()
    assert (other(x) == other(x * 0)).all()
    assert not (fused(x) == fused(x * 0)).all()


def test_what_a_module_does_that_no_chain_does_is_told():
    with pytest.raises(ChainError, match="torch's linear: a chain follows a product"):
        Layer(nn.Sequential(nn.Linear(3, 3), nn.GELU()))
    with pytest.raises(ArgumentError, match="operand 'scale' is a tensor of the module itself"):
        Layer(Epilogue(), scale=torch.ones(16))
    with pytest.raises(ChainError, match=r"or make a fusegen\.Layer of a module"):
        fusegen.compile(nn.LayerNorm(3))


def test_mistakes_are_told():
    layer = Layer("mul(a) | add(b)", b=torch.ones(3))
    x = torch.ones(3)
    for arguments, named in (((), {}), ((x, x), {}), ((x,), {"a": x}), ((), {"b": x})):
        with pytest.raises(ArgumentError, match=r"wanted x, a: .* of 'mul\(a\) \| add\(b\)'"):
            layer(x, *arguments, **named)
    for held, message in (
        ({"c": x}, "no operand is called 'c': the chain 'mul(a) | add(b)' takes x, a, b"),
        ({"a": 3}, "operand 'a': got a int, wanted an nn.Parameter or a tensor"),
        ({"a": None}, "operand 'a': got a NoneType, wanted an nn.Parameter or a tensor"),
    ):
        with pytest.raises(ArgumentError) as caught:
            Layer("mul(a) | add(b)", **held)
        assert message in str(caught.value)
    with pytest.raises(ArgumentError, match="'training' cannot be held: attribute 'training' alre"):
        Layer("mul(training)", training=x)
    assert torch.equal(Layer("add(source)", source=x)(x), 2 * x)
    with pytest.raises(ChainError, match="no operation is called 'gelo'"):
        fusegen.Layer("gelo")


def test_nothing_is_left_in_a_module_that_fails_behind_it():
    def failing(m, x):
        m.kept = x * 2
        return m.no_such

    module = Doing(failing)
    with pytest.raises(ChainError, match="no_such"):
        fusegen.Layer(module)
    assert not hasattr(module, "kept")
    assert [*module.state_dict()] == ["t"]


def test_a_module_divides_by_its_tensors_and_compares_with_them():
    own = Doing(lambda m, x: 1 / m.t * x + (x == m.t).float() + x * (m.t != x))
    x = torch.tensor([0.3, 2.0])
    assert torch.equal(fusegen.Layer(own)(x), own(x))


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (nn.InstanceNorm2d(4), (4, 6, 5), r"x has 3 axes, \(4, 6, 5\), but InstanceNorm2d wants 4"),
        (nn.InstanceNorm1d(4), (4, 6), r"InstanceNorm1d wants 3, .* without one give x\[None\]"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)), (3, 4, 6, 6), "BatchNorm1d wants 2 or 3"),
    ],
)
def test_a_norm_says_how_many_axes_it_wants(module, shape, message):
    with pytest.raises(ArgumentError, match=message):
        fusegen.Layer(module)(torch.randn(shape))


def test_a_norm_behind_a_view_has_axes_of_its_own():
    module = nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(24))
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(fusegen.Layer(module)(x), module(x))


def test_a_scripted_module_is_refused():
    with pytest.raises(ArgumentError, match="whose forward is no Python that could be traced"):
        fusegen.Layer(torch.jit.script(nn.ReLU()))


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.randn(4)), nn.Dropout(0.5)

    def forward(self, x, mask=None, residual=None):
        x = self.dropout(x * self.weight)
        if mask is not None:
            x = x.masked_fill(~mask, 0)
        return x.relu() if residual is None else x.relu() + residual


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    ("given", "named"), [("", ""), ("m", ""), ("-r", ""), ("mr", ""), ("", "r")]
)
def test_a_layer_has_tensors_that_a_call_may_give(given, named, is_training):
    module = Masking().train(is_training)
    module.dropout.p = 0.0
    told = {"m": torch.rand(3, 4) > 0.5, "r": torch.randn(4), "-": None}
    x, operands = torch.randn(3, 4), [told[g] for g in given]
    by_name = {"residual": told["r"]} if named else {}
    wanted = module(x, *operands, **by_name)
    torch.testing.assert_close(fusegen.Layer(module)(x, *operands, **by_name), wanted)


def test_a_refused_call_leaves_a_layer_as_it_was():
    layer = fusegen.Layer(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())).eval()
    x = torch.randn(4, 8, 6, 6)
    text = layer.chain.text
    with pytest.raises(fusegen.UnsupportedError, match=r"cannot be transformed by torch.func"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    assert layer.chain.text == text


class TwoNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm(8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


def test_tensors_that_were_one_may_become_two():
    module = TwoNorms()
    layer = fusegen.Layer(module)
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer(x), module(x))
    module.load_state_dict(
        {k: torch.rand_like(v) for k, v in module.state_dict().items()}, assign=True
    )
    torch.testing.assert_close(layer(x), module(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), module(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        return torch.tanh(x * self.w)


class OfProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        return x * (self.a @ self.b) + torch.outer(self.a[:, 0], self.b[0]).sigmoid()


def pruned():
    norm = nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    prune.l1_unstructured(norm, "weight", 0.5)
    return nn.Sequential(norm, nn.GELU())


def pruned_itself():
    module = Scaled()
    prune.l1_unstructured(module, "w", 0.5)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(Scaled(), "w"),
        OfProducts,
        pruned,
        pruned_itself,
    ],
)
def test_what_torch_computes_of_a_modules_tensors_is_computed_in_each_call(make):
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    layer = fusegen.Layer(make())
    x = torch.randn(8, 4)
    optimisers = [torch.optim.SGD(m.parameters(), 0.01) for m in (eager, layer)]
    for _ in range(3):
        found, wanted = layer(x), eager(x)
        torch.testing.assert_close(found, wanted)
        for optimiser, loss in zip(optimisers, (wanted, found), strict=True):
            optimiser.zero_grad()
            loss.square().sum().backward()
            optimiser.step()
    for own, theirs in zip(layer.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own, theirs)


class Skip(nn.Module):
    """Names that a chain has for something else, of a parameter, an argument and an optional."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), 2.0))
        self.out = nn.Parameter(torch.full((3,), 3.0))

    def forward(self, h, x, out=None):
        y = h.sigmoid() * self.x + x
        return y if out is None else y * out + self.out


def test_names_that_a_chain_has_for_itself_are_taken_too(device):
    module = Skip().to(device)
    layer = Layer(module)
    a, b, c = torch.randn(3, 2, 3, device=device)
    for args, named in [((a, b), {}), ((a, b, c), {}), ((a,), {"x": b, "out": c})]:
        torch.testing.assert_close(layer(*args, **named), module(*args, **named))
    torch.testing.assert_close(layer(x=b, h=a), module(a, b))
    assert {*layer.state_dict()} == {"module.x", "module.out"}
    (gradient,) = torch.autograd.grad(layer(a, b).sum(), module.x)
    torch.testing.assert_close(gradient, a.sigmoid().sum(0))


def test_a_setting_that_a_recipe_changes_is_seen(device):
    batches = [torch.randn(16, 8, device=device) for _ in range(3)]
    ours, eager = (nn.BatchNorm1d(8).to(device) for _ in range(2))
    torch.optim.swa_utils.update_bn(batches, Layer(ours))
    torch.optim.swa_utils.update_bn(batches, eager)
    torch.testing.assert_close(ours.running_mean, eager.running_mean)
    torch.testing.assert_close(ours.running_var, eager.running_var)
    dropout = nn.Sequential(nn.ReLU(), nn.Dropout(0.0))
    dropout[0].p = [1, 2]  # of whatever code has by that name
    layer = Layer(dropout)
    x = torch.ones(1000, device=device)
    assert torch.equal(layer(x), x)
    dropout[1].p = 1.0
    assert torch.equal(layer(x), torch.zeros_like(x))
