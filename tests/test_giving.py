"""Chains with several results: what is given from their middle beside the last value."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from numeric import assert_as_accurate, has_right_second_derivatives, home_of_eager, outcome
from torch.utils.checkpoint import checkpoint

import fusegen
from fusegen import ArgumentError, ChainError, UnsupportedError
from fusegen.describe import Situation, modules, sources
from fusegen.dsl import parse
from fusegen.explain import explain

PRENORM = "add(residual) | give(sum) | rms_norm(weight)"
TRAINED = "batch_norm(weight=w, bias=b, training=True)"
# chain, the shape of x, the operands' shapes
CHAINS = [
    (PRENORM, (3, 5, 64), [(3, 5, 64), (64,)]),
    ("add(r) | give(h) | layernorm(w, b)", (7, 1025), [(7, 1025), (1025,), (1025,)]),
    ("add(r) | give(h) | layernorm(w, b)", (3, 20001), [(3, 20001), (20001,), (20001,)]),
    ("gelu | give(h) | mul(s) | give(k) | layernorm", (3, 5, 8), [(8,)]),
    ("add(b) | give(h) | add(h) | add_channel(c) | give(u)", (2, 3, 4), [(4,), (3,)]),
    ("gelu | give(h)", (2, 3), []),
    ("add_channel | give(h) | softmax(1) | mul(2)", (2, 5, 4, 6), [(5,)]),
    ("mul(p) | give(h) | mean((2, 3)) | give(m) | tanh", (2, 3, 6, 7), [(7,)]),
    ("max(1) | give(i) | tanh", (4, 5, 3), []),
    # Around a pooling, in one segment and in several.
    ("relu | give(h) | max_pool2d(2) | give(p) | sigmoid", (2, 3, 6, 7), []),
    ("tanh | max_pool2d(3, 2, 1) | give(p) | mul_channel", (2, 3, 8, 9), [(3,)]),
    ("tanh | avg_pool2d(2) | give(p) | sigmoid | mul(p)", (2, 3, 6, 8), []),
    (f"{TRAINED} | give(h) | relu | max_pool2d(3, 2, 1) | give(k)", (4, 3, 8, 9), [(3,), (3,)]),
    ("group_norm(2) | give(h) | silu | give(k) | avg_pool2d(3, 1, 1)", (2, 4, 5, 6), []),
    # In another shape.
    ("gelu | give(h) | flatten(1) | give(k) | softmax(1)", (2, 3, 4), []),
    ("gelu | unflatten(1, (2, 2)) | give(k) | mean(2)", (3, 4, 5), []),
    # A sum over what x is widened along.
    ("add(wide) | give(h) | sum(0, keepdim=True) | mul(0.5)", (1, 4), [(5, 4)]),
]
IDS = [text for text, *_ in CHAINS]


def tensors_of(shape, operands, device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for s in (shape, *operands)
    ]


@pytest.mark.parametrize(("text", "shape", "operands"), CHAINS, ids=IDS)
def test_results_and_gradients_are_eagers(text, shape, operands, device):
    fused = fusegen.compile(text)
    tensors = tensors_of(shape, operands, device)
    home = home_of_eager(text, device, torch.float64)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors, device=home)
    assert len(ours.results) == 1 + len(fused.chain.gives)
    for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        for a, b in zip(fused(*tensors), ours.results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("text", "shape", "operands"), CHAINS[:6], ids=IDS[:6])
def test_results_are_as_accurate_as_eagers(text, shape, operands, dtype, device):
    fused = fusegen.compile(text)
    tensors = tensors_of(shape, operands, device, dtype)
    ours, eager = (outcome(f, tensors) for f in (fused, fused.reference))
    assert_as_accurate(ours, eager, outcome(fused.reference, tensors, dtype=torch.float64))


@pytest.mark.parametrize("wanted", [[0], [1], [1, 2]])
def test_a_loss_may_be_of_some_of_the_results(wanted, device):
    fused = fusegen.compile("add(b) | give(h) | gelu | give(k) | layernorm(w)")
    tensors = tensors_of((3, 5, 8), [(8,), (8,)], device)

    def gradients(function):
        results = function(*tensors)
        loss = sum((results[i] * (i + 2)).square().sum() for i in wanted)
        return torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)

    for a, b in zip(gradients(fused), gradients(fused.reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_results_lie_as_eagers_do(device):
    fused = fusegen.compile("add_channel | give(h) | silu | mean(1) | give(m) | tanh")
    x = torch.randn(2, 4, 5, 6, device=device).to(memory_format=torch.channels_last)
    bias = torch.randn(4, device=device)
    for a, b in zip(fused(x, bias), fused.reference(x, bias), strict=True):
        assert a.stride() == b.stride()


def test_what_is_given_stands_in_for_what_it_was_made_of():
    """Backward reads the residual stream, not both of its terms; and one gradient is both's."""
    situation = Situation((8, 64), {"residual": (8, 64)})
    (module,) = modules(parse(PRENORM), "cuda", situation, grad=True)
    _, backward = module.programs
    assert backward.input_names[:3] == ("weight", "given_1", "saved_mean")
    assert backward.output_names == ("d_x", "d_weight")
    # But where its own derivative needs x, one tensor less is read without it.
    chain = parse("gelu | give(h) | softmax(-1)")
    (module,) = modules(chain, "cuda", Situation((8, 64)), grad=True)
    assert "x" in module.programs[1].input_names


def test_it_is_one_kernel_forward_and_one_pass_backward():
    told = explain(parse(PRENORM), "cuda", Situation((4096, 4096)), 4000.0)
    assert "writes out 67.1 MB, given_1 67.1 MB" in told
    assert "keeps  weight 16.4 kB, given_1 67.1 MB" in told
    assert told.count("rows on the chip") == 2


def test_what_is_kept_is_told_in_one_order():
    """Whatever the hashes of names are in this process."""
    chain = parse("add(a) | give(h) | rms_norm | add(b) | give(k) | rms_norm")
    told = explain(chain, "cuda", Situation((512, 256)), 4000.0)
    kept = next(line for line in told.splitlines() if "keeps" in line)
    assert "given_1" in kept
    assert "given_2" in kept
    assert kept.index("given_1") < kept.index("given_2")


def test_a_pooling_begins_behind_what_is_given_before_it():
    told = explain(parse("relu | give(h) | max_pool2d(2)"), "cuda", Situation((2, 3, 8, 8)), 4000.0)
    assert "max_pool2d(2) takes its windows over what give(y) has in memory" in told


@pytest.mark.parametrize("text", [PRENORM, "gelu | give(h) | max_pool1d(2) | give(k) | tanh"])
def test_second_derivatives(text, device):
    fused = fusegen.compile(text)
    operands = [(2, 3, 4), (4,)] if text == PRENORM else []
    assert has_right_second_derivatives(fused, tensors_of((2, 3, 4), operands, device))


def test_running_statistics_are_updated_beside_other_results(device):
    text = "batch_norm(mean, var, w, b, training=True) | give(h) | relu | sum(0) | give(s) | tanh"
    fused = fusegen.compile(text)
    x, w, b = tensors_of((6, 3, 4), [(3,), (3,)], device)
    state = [[torch.zeros(3, device=device), torch.ones(3, device=device)] for _ in range(2)]
    for function, (mean, var) in zip((fused, fused.reference), state, strict=True):
        assert len(function(x, mean.double(), var.double(), w, b)) == 3
        function(x.float(), mean, var, w.float(), b.float())
    for a, b in zip(*state, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_drops_the_same_in_both(device):
    fused = fusegen.compile("dropout(0.5) | give(h) | mul(2)")
    x = torch.randn(64, 33, device=device, requires_grad=True)
    torch.manual_seed(5)
    result, given = fused(x)
    torch.testing.assert_close(result, 2 * given)
    torch.manual_seed(5)
    again, _ = checkpoint(fused, x, use_reentrant=False)
    assert torch.equal(again, result)
    assert 0.4 < (given == 0).double().mean() < 0.6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_eagers_types(dtype, device):
    fused = fusegen.compile("add(r) | give(h) | layernorm(w) | give(k) | gelu")
    x, r = (torch.randn(4, 16, device=device).to(dtype) for _ in range(2))
    w = torch.randn(16, device=device)
    with torch.autocast(device, dtype=dtype):
        if device == "cpu":
            w = w.to(dtype)  # whose autocast leaves layernorm in the narrow type
        ours, eager = fused(x, r, w), fused.reference(x, r, w)
    assert [t.dtype for t in ours] == [t.dtype for t in eager]


def test_torch_compile_records_it_as_one_operator(device):
    fused = fusegen.compile(PRENORM)
    tensors = tensors_of((3, 5, 8), [(3, 5, 8), (8,)], device)

    def block(x, residual, weight):
        y, total = fused(x.sin(), residual, weight)
        return y.cos(), total * 2

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        outcome(compiled, tensors).tensors, outcome(block, tensors).tensors, strict=True
    ):
        torch.testing.assert_close(a, b)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def first(x, residual, weight):
        return fused(x, residual, weight)[0].cos()

    for a, b in zip(
        outcome(first, tensors).tensors,
        outcome(lambda *t: fused(*t)[0].cos(), tensors).tensors,
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_an_exported_program_gives_all_results(device, tmp_path):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fused = fusegen.compile(PRENORM)

        def forward(self, x, residual, weight):
            return self.fused(x, residual, weight)

    tensors = [t.detach() for t in tensors_of((3, 8), [(3, 8), (8,)], device)]
    torch.export.save(torch.export.export(Block(), tuple(tensors)), tmp_path / "block.pt2")
    found = torch.export.load(tmp_path / "block.pt2").module()(*tensors)
    for a, b in zip(found, Block()(*tensors), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_cuda_graph_captures_all_results(gpu):
    fused = fusegen.compile(PRENORM)
    tensors = tensors_of((64, 256), [(64, 256), (256,)], gpu, torch.float32)

    def step():
        y, total = fused(*tensors)
        return y, total, *torch.autograd.grad(y.sum() + total.square().sum(), tensors)

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        tensors[0].normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_empty_and_single_elements(device):
    fused = fusegen.compile("add(b) | give(h) | gelu")
    for shape in ((0, 4), (1, 4)):
        x, b = torch.ones(shape, device=device), torch.ones(4, device=device)
        y, h = fused(x, b)
        assert y.shape == h.shape == shape
        torch.testing.assert_close(h, x + b)


# Writing it.


def test_a_function_returns_a_tuple():
    def block(x, residual, weight):
        total = x + residual
        return fusegen.rms_norm(total, weight), total

    assert fusegen.chain(block).text == "add(residual) | give(y) | rms_norm(weight)"

    def apart(x, r):
        return x * 2, x + r

    assert fusegen.chain(apart).text == "keep(y) | add(r) | give(y_2) | recall(y) | mul(2)"


def test_chains_are_joined_and_copied():
    joined = fusegen.gelu() | fusegen.give("h") | fusegen.tanh()
    assert joined.text == "gelu | give(y) | tanh"
    assert joined.gives == ("y",)
    fused = fusegen.compile(joined)
    x = torch.randn(3)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert all(map(torch.equal, other(x), fused(x)))


def test_the_text_of_a_chain_with_results_is_dumped():
    (source,) = sources(parse(PRENORM), "cuda", Situation((8, 64)), grad=True)
    assert "writes out, given_1" in source.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("give(h) | gelu", r"give\(y\): no step has computed what it would give"),
        ("flatten(1) | give(h) | gelu", r"give\(y\): no step has computed"),
        ("keep(y) | gelu | recall(y) | give(h)", r"it stands for a keep as well"),
        ("gelu | give", r"give takes one name, as in give\(y\)"),
        ("gelu | give(3)", r"give takes one name"),
        ("add(h) | give(h)", r"give\(h\): h is the name of an operand"),
    ],
)
def test_a_mistake_in_the_chain_is_told(text, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(text)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (fusegen.gelu(x), fusegen.tanh(fusegen.gelu(x))), "is computed last"),
        (lambda x: (fusegen.gelu(x), x), r"fusegen\.compile and fusegen\.Layer take any"),
        (lambda x: (x, x), "returns its first parameter unchanged"),
        (lambda x: (fusegen.gelu(x), b"3"), "must return an expression, got a bytes"),
        (lambda x: (), r"must return an expression, got \(\)"),
        (lambda x: (fusegen.exp(fusegen.tanh(x)), *(fusegen.tanh(x),) * 2), "each of them once"),
    ],
)
def test_a_mistake_in_a_function_is_told(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.chain(function)


def test_out_takes_one_result():
    fused = fusegen.compile("gelu | give(h) | tanh")
    with pytest.raises(ArgumentError, match="takes one result, but the chain gives y beside it"):
        fused(torch.ones(3), out=torch.ones(3))


def test_a_shape_of_its_own_is_not_given():
    text = "softmax(1) | reshape((2, 6)) | give(h) | softmax(1)"
    with pytest.raises(UnsupportedError, match=r"only seen in another shape; put it before"):
        fusegen.compile(text)(torch.ones(3, 4))


@pytest.mark.parametrize("learning", [(True, False), (False, True), (True, True)])
def test_what_is_given_needs_a_gradient_where_eagers_does(learning, device):
    fused = fusegen.compile("cos | give(h) | mul(w) | give(k) | sum")
    tensors = [torch.randn(s, device=device) for s in ((3, 4), (4,))]
    tensors = [t.requires_grad_(needs) for t, needs in zip(tensors, learning, strict=True)]
    ours, eager = fused(*tensors), fused.reference(*tensors)
    assert [t.requires_grad for t in ours] == [t.requires_grad for t in eager]
    wanted = [t for t in tensors if t.requires_grad]
    for a, b in zip(
        *(torch.autograd.grad(r[0] + r[2].sum(), wanted) for r in (ours, eager)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.sum(-1), (x * 0.3).amax(-1)),
        lambda x: (x.sum((-1, -2)), x.flatten(-2).softmax(-1).amax(-1)),
        lambda x: (x.sum(-1), (x * 0.3).amin(-1), (x * 0.3).exp().max(-1)[0]),
    ],
)
def test_a_maximum_that_is_given_in_16_bits_is_found_again(function, dtype, device):
    x = torch.randn(2, 3, 4, 5, dtype=dtype, device=device, requires_grad=True)
    found = fusegen.compile(function)(x)
    exact = x.detach().double().requires_grad_()
    wanted = function(exact)
    ds = [torch.randn_like(f) for f in found]
    (own,) = torch.autograd.grad(found, x, ds)
    (theirs,) = torch.autograd.grad(wanted, exact, [d.double() for d in ds])
    # A gradient is a sum of three below 8 in all, rounded to 8 bits.
    torch.testing.assert_close(own.double(), theirs, rtol=2**-7, atol=2**-5)


def test_the_first_result_may_be_of_labels(device):
    def function(x, t):
        return (x * F.one_hot(t, 4)).sum(1), x.sum(1)

    x = torch.randn(5, 4, device=device, requires_grad=True)
    t = torch.tensor([0, 1, 2, 3, 1], device=device)
    found, wanted = fusegen.compile(function)(x, t), function(x, t)
    torch.testing.assert_close(found, wanted)
    ds = [torch.randn_like(f) for f in found]
    torch.testing.assert_close(
        torch.autograd.grad(found, x, ds), torch.autograd.grad(wanted, x, ds)
    )
