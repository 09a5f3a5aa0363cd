"""Fused calls under torch.compile, in exported programs and on tensors without memory."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fusegen
from fusegen import operators
from fusegen.errors import ArgumentError, UnsupportedError

# chain, the shape of x but for its first axis, the shapes of the operands (None: that of x)
CHAINS = [
    ("leaky_relu(0.2) | add_channel | gelu", (6, 5, 7), [(6,)]),
    ("add(p) | layernorm(w, b)", (6, 16), [None, (16,), (16,)]),
    ("batch_norm(running_mean, running_var, w, b, training=True) | relu", (6, 5, 7), [(6,)] * 4),
    ("gelu | max_pool2d(3, 2, 1) | mul(0.5)", (6, 8, 9), []),
    ("layernorm(w, b) | avg_pool2d(2) | gelu", (6, 8, 16), [(16,), (16,)]),  # two segments
    ("softmax(1) | flatten(1) | add(b)", (6, 8, 9), [(432,)]),
    ("gelu | dropout(0.5)", (6, 8), []),
    ("mul(2) | sum", (6, 8), []),
    ("floor", (6, 8), []),  # a gradient that is made of nothing
    ("mul(g) | add(r)", (6, 8), [(8,), None]),  # one that is the incoming one
    ("add(r)", (6, 8), [None]),  # and no other
]
UPDATED = ("running_mean", "running_var")


def inputs(fused, shape, operands, device, layout=torch.contiguous_format):
    """x and the operands; all but running statistics need a gradient."""
    x = torch.randn(shape).to(device=device, memory_format=layout).requires_grad_()
    others = [torch.rand(shape if s is None else s, device=device) for s in operands]
    for name, t in zip(fused.chain.given, others, strict=True):
        t.requires_grad_(name not in UPDATED)
    return [x, *others]


def twins(tensors):
    return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]


def run(function, tensors):
    """The result and the gradients, from one seed."""
    torch.manual_seed(1)
    result = function(*tensors)
    torch.manual_seed(2)
    wanted = [t for t in tensors if t.requires_grad]
    return [result, *torch.autograd.grad(result, wanted, torch.randn_like(result))]


def assert_same(ours, eager):
    for have, want in zip(ours, eager, strict=True):
        assert have.stride() == want.stride()
        assert torch.equal(have, want)


@pytest.mark.parametrize(("text", "rest", "operands"), CHAINS, ids=[c[0] for c in CHAINS])
def test_a_compiled_function_holds_the_call_whole_for_any_batch(text, rest, operands, device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fused = fusegen.compile(text)

    def function(*tensors):
        return fused(*tensors).sin()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for batch in (4, 5, 7):
        tensors = inputs(fused, (batch, *rest), operands, device)
        others = twins(tensors)
        assert_same(run(compiled, tensors), run(function, others))
        assert_same(tensors, others)  # what is updated is, once
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one, then one for all


def test_inductor_runs_it_between_kernels_of_its_own(device):
    torch._dynamo.reset()
    fused = fusegen.compile("add_channel | gelu | layernorm(w, b, axis=1)")

    def network(x, *operands):
        return fused(x * 2, *operands).relu() + 1

    compiled = torch.compile(network, fullgraph=True)
    tensors = inputs(fused, (4, 6, 5, 7), [(6,), (6,), (6,)], device, torch.channels_last)
    for have, want in zip(run(compiled, tensors), run(network, twins(tensors)), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("gelu | add_channel(b) | maximum(0.5) | lerp(b, 0.3)", [(4, 3, 3), (3,)]),
        ("batch_norm(m, v, training=True) | hardsigmoid | softmax(1)", [(4, 3, 5), (3,), (3,)]),
        ("keep(y) | threshold(0.1, 2) | mul(y) | mean(-1) | dropout(0.5)", [(4, 8)]),
        ("adaptive_avg_pool2d(1) | flatten(1) | to(bfloat16)", [(2, 3, 4, 4)]),
    ],
)
def test_the_eager_equal_is_compiled_whole(text, shapes, device):
    """So that a chain is compared with what torch.compile makes of it."""
    fused = fusegen.compile(text)
    tensors = [torch.rand(shape, device=device) for shape in shapes]
    compiled = torch.compile(fused.reference, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    found = compiled(*[t.clone() for t in tensors])
    torch.manual_seed(0)
    assert torch.equal(found, fused.reference(*[t.clone() for t in tensors]))


def test_a_compiled_call_writes_into_out(device):
    torch._dynamo.reset()
    fused = fusegen.compile("add(p) | gelu")
    x, p, out = torch.randn(3, 4, 6, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, p, out):
        return fused(x, p, out=out) + 1

    assert torch.equal(compiled(x, p, out), fused(x, p) + 1)
    assert torch.equal(out, fused(x, p))
    with pytest.raises(RuntimeError, match="argument 'out': got shape"):
        compiled(x, p, out[:, :3][0])


def test_autocast_and_names_reach_a_compiled_call(device):
    torch._dynamo.reset()
    fused = fusegen.compile("add(p) | layernorm(w, b) | gelu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, p, w, b):
        with torch.autocast(device, torch.bfloat16):
            return fused(x, b=b, p=p, w=w)

    tensors = inputs(fused, (4, 16), [(4, 16), (16,), (16,)], device)
    tensors[0] = tensors[0].detach().bfloat16()
    with torch.autocast(device, torch.bfloat16):
        expected = fused(*tensors)
    found = compiled(*tensors)
    assert found.dtype == expected.dtype == torch.float32
    assert torch.equal(found, expected)


# Of what is normalised behind a pooling, a GPU's kernel joins other products with sums where it
# saves nothing for a gradient: an ulp or two of values of a few units.
ALIKE = {"rtol": 1e-5, "atol": 2e-6}


class Block(torch.nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, channels, 3)
        self.fused = fusegen.compile("relu | max_pool2d(2) | layernorm(w, b, axis=1)")
        self.weight = torch.nn.Parameter(torch.rand(channels))
        self.bias = torch.nn.Parameter(torch.rand(channels))

    def forward(self, x):
        return self.fused(self.conv(x), self.weight, self.bias)


@pytest.mark.parametrize("strict", [False, True], ids=["run", "read"])
def test_an_exported_program_computes_and_trains_for_any_batch(strict, device, tmp_path):
    block = Block().to(device)
    x = torch.randn(4, 3, 10, 12, device=device)
    sizes = {"x": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(block, (x,), dynamic_shapes=sizes, strict=strict)
    torch.export.save(exported, tmp_path / "block.pt2")
    loaded = torch.export.load(tmp_path / "block.pt2")
    other = torch.randn(7, 3, 10, 12, device=device)
    for program in (exported, exported.run_decompositions(), loaded):
        torch.testing.assert_close(program.module()(other), block(other), **ALIKE)
    module = loaded.module()
    gradients = torch.autograd.grad(module(other).sin().sum(), list(module.parameters()))
    found = dict(zip([n for n, _ in module.named_parameters()], gradients, strict=True))
    expected = torch.autograd.grad(block(other).sin().sum(), list(block.parameters()))
    for (name, _), gradient in zip(block.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, **ALIKE)


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("add_channel(b) | relu", {"b": (4,)}),
        ("max_pool2d(2) | gelu | avg_pool2d(2)", {}),
        ("dropout(0.5) | relu", {}),
        ("batch_norm(mean, var, training=True) | relu", {"mean": (4,), "var": (4,)}),
        ("sigmoid | give(g) | mul(b) | relu", {"b": (4, 1, 1)}),
        ("add(b)", {"b": (4, 10, 10)}),
    ],
)
def test_a_graph_of_torch_fx_holds_the_call(text, operands, device):
    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)
            self.fused = fusegen.compile(text)
            for name, size in operands.items():
                value = torch.ones(size)
                if name == "b":
                    self.b = torch.nn.Parameter(value)
                else:
                    self.register_buffer(name, value)

        def forward(self, x):
            x = self.conv(x)
            if text == "add(b)":  # what is recorded may be an operand, too
                return self.fused(self.b, x)
            result = self.fused(x, *[getattr(self, name) for name in operands])
            return result[0] + result[1] if "give" in text else result

    eager = Traced().to(device)
    graph = torch.fx.symbolic_trace(copy.deepcopy(eager))
    found = []
    for module in (eager, graph):
        torch.manual_seed(1)
        result = module(torch.randn(2, 3, 12, 12, device=device))
        gradients = torch.autograd.grad(result.square().sum(), list(module.parameters()))
        found.append([result, *gradients, *module.buffers()])
    for ours, traced in zip(*found, strict=True):
        assert torch.equal(ours, traced)


def test_an_exported_program_runs_where_no_chain_was_compiled(tmp_path):
    block, x = Block(), torch.randn(4, 3, 10, 12)
    with torch.no_grad():
        torch.export.save(torch.export.export(block, (x,)), tmp_path / "block.pt2")
        torch.save((x, block(x)), tmp_path / "values.pt")
    script = """if True:
        import sys, torch
        from fusegen import Fused
        x, expected = torch.load(sys.argv[2])
        assert torch.equal(torch.export.load(sys.argv[1]).module()(x), expected)
    """
    files = [str(tmp_path / name) for name in ("block.pt2", "values.pt")]
    subprocess.run([sys.executable, "-c", script, *files], check=True)


_OWN = """
import sys, torch, fusegen
squares = sys.argv[1] == "1"

@fusegen.op
def own(x: fusegen.Expr, other: fusegen.Expr) -> fusegen.Expr:
    return x * x + other if squares else x + other * other

fused = fusegen.compile("own(b)")
compiled = torch.compile(lambda x, b: fused(x, b) + 1, fullgraph=True)
results = []
for function in (compiled, lambda x, b: fused(x, b) + 1):
    x, b = torch.arange(1.0, 5).requires_grad_(), torch.full((4,), 10.0).requires_grad_()
    y = function(x, b)
    results.append([y, *torch.autograd.grad(y.sum(), (x, b))])
assert all(map(torch.equal, *results)), results
"""


def test_an_operation_that_changed_is_not_taken_for_what_was_recorded(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for turn in "12":
        subprocess.run([sys.executable, "-c", _OWN, turn], check=True, env=environment)


def test_an_operation_that_is_defined_again_is_seen_by_what_is_compiled_again():
    def own(x):
        return x * 2.0

    def own_again(x):
        return x * 3.0

    own_again.__name__ = "own"
    torch._dynamo.reset()
    x = torch.ones(3)
    try:
        for function, expected in ((own, 2.0), (own_again, 3.0)):
            fusegen.op(function)
            fused = fusegen.compile("own")
            compiled = torch.compile(lambda x, f=fused: f(x), backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x), x * expected)
        first = fused.chain.recorded_name
        fusegen.op(own)
        with pytest.raises(fusegen.ChainError, match="own: an operation of your own computes some"):
            operators.recorded(first)
    finally:
        fusegen.OPS.pop("own", None)


@pytest.mark.parametrize("strict", [False, True], ids=["run", "read"])
def test_an_exported_program_updates_running_statistics(strict):
    class Normalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(6)
            self.fused = fusegen.compile(
                "batch_norm(mean, var, w, b, num_batches_tracked=count, training=True) | relu"
            )

        def forward(self, x):
            n = self.norm
            return self.fused(
                x, n.running_mean, n.running_var, n.weight, n.bias, n.num_batches_tracked
            )

    x = torch.randn(5, 6)
    module = Normalised()
    exported = torch.export.export(copy.deepcopy(module), (x,), strict=strict)
    program = exported.run_decompositions().module()
    assert torch.equal(program(x), module(x))
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, dict(program.named_buffers())[name])
    assert module.norm.num_batches_tracked == 1


def test_a_program_recorded_without_gradients_gives_none(device):
    block, x = Block().to(device), torch.randn(4, 3, 10, 12, device=device)
    with torch.no_grad():
        program = torch.export.export(block, (x,)).module()
    result = program(x)
    torch.testing.assert_close(result, block(x), **ALIKE)
    with pytest.raises(UnsupportedError, match=r"recorded without a gradient .* export it with"):
        result.sum().backward()


def test_the_operators_keep_torchs_rules(device):
    """Of schemas, of stand-ins, and of gradients that are recorded with sizes left open."""
    fused = fusegen.compile("add(p) | layernorm(w, b) | gelu")
    tensors = inputs(fused, (4, 6, 16), [None, (16,), (16,)], device)
    operator = torch.ops.fusegen.forward.default
    torch.library.opcheck(operator, (tensors, fused.chain.text, [True] * 4))
    plain = [t.detach() for t in tensors]
    torch.library.opcheck(operator, (plain, fused.chain.text, []))


def test_a_stand_in_of_one_number_lies_as_the_result(device):
    fused = fusegen.compile(lambda x: (x + 1, torch.zeros_like(x)))
    compiled = torch.compile(lambda x: fused(x), backend="eager", fullgraph=True)
    x = torch.randn(4, 6, device=device)
    assert [t.stride() for t in compiled(x)] == [t.stride() for t in fused(x)] == [(6, 1)] * 2
    operator = torch.ops.fusegen.forward.default
    torch.library.opcheck(operator, ([x], fused.chain.text, []))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("text", "rest", "operands"), CHAINS, ids=[c[0] for c in CHAINS])
def test_a_stand_in_has_the_results_shape_type_and_layout(text, rest, operands, layout, device):
    if len(rest) != 3 and layout != torch.contiguous_format:
        pytest.skip("has no channels_last")
    fused = fusegen.compile(text)
    tensors = [t.detach() for t in inputs(fused, (4, *rest), operands, device, layout)]
    real = fused(*tensors)
    with FakeTensorMode() as mode:
        found = fused(*[mode.from_tensor(t) for t in tensors])
        into = fused(*[mode.from_tensor(t) for t in tensors], out=mode.from_tensor(real))
    for stand_in in (found, into):
        assert (stand_in.shape, stand_in.dtype) == (real.shape, real.dtype)
        assert stand_in.stride() == real.stride()


def test_a_mistake_is_told_when_it_is_recorded(device):
    fused = fusegen.compile("add_channel | gelu")
    x, bias = torch.randn(4, 6, 5, device=device), torch.randn(7, device=device)
    mode = FakeTensorMode()
    with pytest.raises(ArgumentError, match=r"wanted \(6,\)"):
        fused(mode.from_tensor(x), mode.from_tensor(bias))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"wanted \(6,\)"):
        torch.compile(fused, fullgraph=True, backend="aot_eager")(x, bias)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_call_as_an_operator(mode, device):
    fused = fusegen.compile("mul(w) | gelu")

    def gradients(x, w):
        return torch.autograd.grad(fused(x, w).sum(), (x, w))

    def tensors():
        return [torch.randn(4, device=device, requires_grad=True) for _ in range(2)]

    for function in (fused, gradients):
        graph = make_fx(function, tracing_mode=mode)(*tensors())
        given = tensors()
        torch.testing.assert_close(graph(*given), function(*given))


def test_a_mode_that_watches_operators_sees_the_call(device):
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    fused = fusegen.compile("gelu | mul(2)")
    x = torch.randn(4, device=device, requires_grad=True)
    wanted = fused(x)  # it is known from then on
    with Watching():
        found = fused(x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
    assert {"fusegen.forward.default", "fusegen.backward.default"} <= {*seen}
    assert torch.equal(found, wanted)
    assert torch.equal(gradient, torch.autograd.grad(wanted.sum(), x)[0])
    del seen[:]
    fused(x)
    assert not seen
