"""The callable as a citizen of PyTorch: what it can be part of, and what never changes a result."""

import copy
import pickle
import resource
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from numeric import outcome

import fusegen
from fusegen import ArgumentError, UnsupportedError, execution, modules, plan, toolchain

CHAIN = "leaky_relu(0.2) | add_channel(bias) | clamp(-1, 1) | gelu"


@pytest.fixture
def builds(monkeypatch):
    """The modules that are asked for from here on, built or from the cache."""
    asked = []
    real = toolchain.load

    def load(source, *arguments):
        asked.append(source.module_name)
        return real(source, *arguments)

    monkeypatch.setattr(toolchain, "load", load)
    monkeypatch.setattr(modules, "_modules", {})  # what earlier tests have loaded
    return asked


def inputs(device, *, dtype=torch.float32, needs=False):
    x = torch.randn(2, 3, 4, 5, device=device, dtype=dtype)
    bias = torch.randn(3, device=device, dtype=dtype)
    return [x.requires_grad_(needs), bias.requires_grad_(needs)]


# Arguments.


def test_operands_go_by_position_or_by_name(device):
    fused = fusegen.compile("add_channel(bias) | mul(scale)")
    x, bias = inputs(device)
    scale = torch.randn(5, device=device)
    expected = (x + bias.view(3, 1, 1)) * scale
    for found in (
        fused(x, bias, scale),
        fused(x, bias, scale=scale),
        fused(x, scale=scale, bias=bias),
        fused.reference(x, scale=scale, bias=bias),
    ):
        assert torch.equal(found, expected)


# out=


def test_out_receives_the_result_and_is_returned(device):
    fused = fusegen.compile(CHAIN)
    x, bias = inputs(device)
    out = torch.full_like(x, 7)
    assert fused(x, bias, out=out) is out
    assert torch.equal(out, fused(x, bias))


def test_out_may_lie_anyhow(device):
    fused = fusegen.compile(CHAIN)
    x, bias = inputs(device)
    for out in (
        torch.zeros(2, 3, 4, 10, device=device)[..., ::2],
        torch.zeros(2, 3, 5, 4, device=device).transpose(2, 3),
        torch.zeros(x.numel() + 1, device=device)[1:].view_as(x),
    ):
        fused(x, bias, out=out)
        assert torch.equal(out, fused(x, bias))


def test_out_may_be_x_or_overlap_it(device):
    fused = fusegen.compile("mul(2) | layernorm(axis=1)")
    memory = torch.randn(3, 4, 5, device=device)
    expected = fused(memory[:2])
    assert torch.equal(fused(memory[:2], out=memory[1:]), expected)
    x = torch.randn(2, 4, 5, device=device)
    expected = fused(x)
    assert torch.equal(fused(x, out=x), expected)


def test_out_of_a_chain_in_two_stages(device):
    fused = fusegen.compile("layernorm | max_pool2d(2)")
    x = torch.randn(2, 3, 4, 6, device=device)
    out = torch.empty(2, 3, 2, 3, device=device)
    assert fused(x, out=out) is out
    assert torch.equal(out, fused(x))


def test_out_is_allowed_without_gradients(device):
    fused = fusegen.compile(CHAIN)
    x, bias = inputs(device, needs=True)
    out = torch.empty_like(x)
    with torch.no_grad():
        fused(x, bias, out=out)
    assert not out.requires_grad
    assert torch.equal(out, fused(x, bias))


# What it can be part of.


def test_a_pickled_copy_gives_the_same(device):
    fused = fusegen.compile(CHAIN)
    x, bias = inputs(device)
    before = fused(x, bias)
    again = pickle.loads(pickle.dumps(fused))
    assert again.chain == fused.chain
    assert torch.equal(again(x, bias), before)


def test_a_copy_of_a_model_shares_nothing_that_matters(device):
    fused = copy.deepcopy(fusegen.compile(CHAIN))
    x, bias = inputs(device)
    assert torch.equal(fused(x, bias), fused.reference(x, bias)) or device == "cpu"
    assert fused.chain.text == fusegen.compile(CHAIN).chain.text


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.bias = torch.nn.Parameter(torch.randn(3))
        self.fused = fusegen.compile(CHAIN)

    def forward(self, x):
        return self.fused(self.conv(x), self.bias)


def test_a_model_with_a_fused_chain_is_an_ordinary_model(device):
    model = Model().to(device)
    assert set(model.state_dict()) == {"conv.weight", "conv.bias", "bias"}
    x = torch.randn(2, 2, 6, 6, device=device)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))
    assert torch.equal(model(x), pickle.loads(pickle.dumps(model))(x))
    model.double()
    assert model(x.double()).dtype == torch.float64
    model(x.double()).sum().backward()
    assert model.bias.grad.shape == (3,)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_gradients_can_be_switched_off(context, device):
    fused = fusegen.compile(CHAIN)
    tensors = inputs(device, needs=True)
    with context():
        result = fused(*tensors)
        assert not result.requires_grad
        assert torch.equal(fused(result, tensors[1]), fused(result, tensors[1]))
    assert torch.equal(result, fused(*tensors))


def test_an_inference_tensor_is_an_operand_like_any_other(device):
    fused = fusegen.compile("mul(scale)")
    with torch.inference_mode():
        scale = torch.randn(5, device=device)
    x = torch.randn(2, 5, device=device)
    assert torch.equal(fused(x, scale), x * scale)


def test_a_call_inside_backward_is_a_call(device):
    # A hook that runs a fused chain while autograd is in another one.
    fused = fusegen.compile(CHAIN)
    x, bias = inputs(device, needs=True)
    value = x * 1
    value.register_hook(lambda g: fused(g, bias.detach()))
    fused(value, bias).sum().backward()
    plain = outcome(fused, [x, bias], torch.ones_like(x)).gradients[0]
    assert torch.equal(x.grad, fused(plain, bias.detach()))


# A call is recognised by what its tensors are.

PLAIN = "mul(2) | add_channel(bias) | tanh"


def test_whatever_differs_from_the_last_call_is_noticed(device):
    fused = fusegen.compile(PLAIN)
    memory = torch.randn(2, 4, 4, 4, device=device)
    bias = torch.randn(4, device=device)
    calls = [
        (memory, bias),
        (memory.transpose(2, 3), bias),
        (memory.permute(0, 3, 1, 2), bias),
        (memory[:, :, :2], bias),
        (memory[:1], bias),
        (memory.flatten(2), bias),
        (memory.double(), bias.double()),
        (memory.half(), bias.half()),
        (memory.bfloat16(), bias.bfloat16()),
        (memory, bias.view(1, 4, 1, 1)),
        (memory, torch.randn(8, device=device)[::2]),
        (torch.randn(2 * 64 + 1, device=device)[1:].view(2, 4, 4, 4), bias),
        (memory.requires_grad_(False), bias.detach().requires_grad_()),
        (memory.detach().requires_grad_(), bias),
    ]
    for _ in range(3):
        for x, b in [call for call in calls for _ in range(2)]:
            found, wanted = fused(x, b), fused.reference(x, b)
            torch.testing.assert_close(found, wanted)
            assert found.stride() == wanted.stride()
            assert found.requires_grad == wanted.requires_grad
            with torch.no_grad():
                assert not fused(x, b).requires_grad


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_a_backward_is_recognised_by_its_cotangent(needs, device):
    fused = fusegen.compile(PLAIN)
    x, bias = inputs(device)
    leaves = [t.requires_grad_(n) for t, n in zip((x, bias), needs, strict=True)]
    dense = torch.randn(2, 3, 4, 5, device=device)
    for cotangent in (
        dense,
        dense,
        dense.transpose(2, 3).contiguous().transpose(2, 3),
        dense[:1].expand(2, 3, 4, 5),
        torch.randn(121, device=device)[1:].view(2, 3, 4, 5),
        dense,
    ):
        for a, b in zip(
            outcome(fused, leaves, cotangent).gradients,
            outcome(fused.reference, leaves, cotangent).gradients,
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_a_subclass_of_a_tensor_stays_one(device):
    class Tagged(torch.Tensor):
        pass

    fused = fusegen.compile(PLAIN)
    x, bias = inputs(device)
    for _ in range(2):
        assert type(fused(x, bias)) is torch.Tensor
        assert type(fused(x.as_subclass(Tagged), bias)) is Tagged
        assert type(fused(torch.nn.Parameter(x), bias)) is torch.Tensor


class Wrapper(torch.Tensor):
    """Stands for another tensor, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def test_a_tensor_that_is_negated_in_torchs_mind_alone_is_read_as_it_is(device):
    add, scale, size = map(fusegen.compile, ("add(1)", "mul(s)", "square | sum"))
    for _ in range(2):  # the second call is recognised
        z = torch.complex(torch.ones(1, device=device), torch.full((1,), 5.0, device=device)).conj()
        assert z.imag.is_neg()
        assert add(z.imag).item() == -4
        assert scale(torch.ones(4, device=device), z.imag[0]).tolist() == [-5.0] * 4
        out = z.imag
        assert add(torch.ones_like(out), out=out) is out
        assert out.item() == 2
        x = torch.arange(1.0, 5, device=device, requires_grad=True)
        z = torch.complex(torch.zeros((), device=device), size(x)).conj()
        (gradient,) = torch.autograd.grad((z * (2 + 3j)).real, x)
        assert torch.equal(gradient, 6 * x.detach())


def test_a_tensor_of_zeros_without_memory_is_one_of_zeros(device):
    fused = fusegen.compile("add(1) | square")
    zeros = torch._efficientzerotensor((4,), device=device)
    x = torch.ones(4, device=device, requires_grad=True)
    for _ in range(2):
        assert torch.equal(fused(zeros), torch.ones(4, device=device))
        assert torch.equal(torch.autograd.grad(fused(x), x, zeros)[0], torch.zeros_like(x))


def test_each_device_has_modules_of_its_own(monkeypatch):
    loaded = []
    monkeypatch.setattr(execution, "load", lambda *a: loaded.append(a[3]) or object())
    part, programs = execution.Part(fusegen.chain("gelu")), [object()]
    devices = [torch.device("cuda", i) for i in (0, 1, 0)]
    first, second, again = (part.module(programs, "signature", d) for d in devices)
    assert first is again
    assert first is not second
    assert loaded == devices[:2]


def test_a_tensor_that_stands_for_another_is_refused(device):
    fused = fusegen.compile(PLAIN)
    x, bias = inputs(device)
    for _ in range(2):
        fused(x, bias)
        with pytest.raises(UnsupportedError, match="got a Wrapper, which"):
            fused(Wrapper(x), Wrapper(bias))


def test_a_plan_keeps_no_tensor_alive(device):
    fused = fusegen.compile(PLAIN)
    x, bias = inputs(device, needs=True)
    for _ in range(2):
        fused(x, bias).sum().backward()
    watched = [weakref.ref(t) for t in (x, bias)]
    del x, bias
    assert [w() for w in watched] == [None, None]


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_calls_leave_no_memory_behind(device):
    fused = fusegen.compile(PLAIN)
    leaves = inputs(device, needs=True)
    x, bias = (t.detach() for t in leaves)
    unaligned = torch.randn(x.numel() + 1, device=device)[1:].view_as(x)

    def work():
        for _ in range(2000):
            fused(x, bias)
            fused(unaligned, bias)
            torch.autograd.grad(fused(*leaves), leaves, x)

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    work()
    before = resident_bytes()
    for _ in range(3):
        work()
    assert resident_bytes() - before < 1 << 20  # one reference lost in a call would be 300 KB


# Builds.


def test_a_new_shape_builds_nothing(builds, device):
    fused = fusegen.compile(CHAIN)

    def run(*shape):
        x = torch.randn(shape, device=device, requires_grad=True)
        bias = torch.randn(shape[1], device=device, requires_grad=True)
        fused(x, bias).sum().backward()

    run(2, 3, 4, 5)
    first = len(builds)
    assert first == 1
    for shape in ((4, 3, 4, 5), (2, 7, 4, 5), (2, 3, 9, 33), (128, 64, 20, 20)):
        run(*shape)
    assert len(builds) == first
    # Many small images are gone through in another way: on a CPU those of less than 16 elements.
    for shape in ((128, 64, 2, 2), (256, 32, 7, 7), (64, 64, 3, 5)):
        run(*shape)
    assert len(builds) == first + 1


@pytest.mark.parametrize(
    "shape", [(1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 1, 1), (0, 3, 4, 5)]
)
@pytest.mark.parametrize(
    "text", [CHAIN, "mul(other) | gelu", "layernorm(w, axis=1)", "mul_channel | max_pool2d(1)"]
)
def test_a_size_of_one_or_none_builds_nothing(text, shape, builds, device):
    fused = fusegen.compile(text)

    def run(*shape):
        x = torch.randn(shape, device=device, requires_grad=True)
        operands = [
            torch.randn(shape if name == "other" else shape[1], device=device, requires_grad=True)
            for name in fused.chain.operands
        ]
        fused(x, *operands).sum().backward()

    run(2, 3, 4, 5)
    first = len(builds)
    run(*shape)
    # Rows held on the chip are moved in packs whose width divides them and is known when built.
    others = device == "cuda" and text.startswith("layernorm")
    assert first <= len(builds) <= first + others


def test_forward_and_backward_are_one_build(builds, device):
    tensors = inputs(device, needs=True)
    fusegen.compile(CHAIN)(*tensors).sum().backward()
    assert len(builds) == 1


def test_nothing_is_built_before_the_first_call(builds):
    fused = fusegen.compile(CHAIN)
    repr(fused), pickle.dumps(fused), copy.deepcopy(fused)
    assert builds == []


def test_two_threads_may_make_the_first_call(device):
    fused = fusegen.compile("keep(y) | sigmoid | mul(y) | add_channel(bias)")
    tensors = inputs(device, needs=True)
    expected = outcome(fused.reference, tensors)
    found, failures = [], []
    gate = threading.Barrier(4)

    def work():
        try:
            gate.wait()
            for _ in range(20):
                found.append(outcome(fused, tensors))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert len(found) == 80
    for result in found:
        for a, b, c in zip(result.tensors, found[0].tensors, expected.tensors, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)


# The same bits.

BITWISE = {
    CHAIN: (4, 3, 60, 70),
    "layernorm(weight, bias, axis=1) | gelu": (4, 3, 60, 70),
    "mul_channel(bias, axis=-1) | tanh": (4, 60, 70, 3),
    "add_channel(bias) | tanh | max_pool2d(2)": (4, 3, 60, 70),
}


@pytest.mark.parametrize("text", BITWISE)
def test_the_same_input_gives_the_same_bits(text, device):
    fused = fusegen.compile(text)
    tensors = [torch.randn(BITWISE[text], device=device).requires_grad_()]
    tensors += [torch.randn(3, device=device).requires_grad_() for _ in fused.chain.operands]
    first = outcome(fused, tensors)
    for _ in range(5):
        again = outcome(fused, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first.tensors, again.tensors, strict=True))


@pytest.mark.parametrize("text", BITWISE)
def test_the_number_of_threads_changes_no_bit(text):
    before = torch.get_num_threads()
    tensors = [torch.randn(BITWISE[text]).requires_grad_()]
    tensors += [torch.randn(3).requires_grad_() for _ in fusegen.chain(text).operands]
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(outcome(fusegen.compile(text), tensors))
    finally:
        torch.set_num_threads(before)
    for again in results[1:]:
        assert all(
            torch.equal(a, b) for a, b in zip(results[0].tensors, again.tensors, strict=True)
        )


_FAMILIES = [
    (CHAIN, (8, 3, 33, 65), [(3,)]),
    ("layernorm(weight, bias) | gelu", (300, 96), [(96,)] * 2),
    ("layernorm(weight, bias)", (40, 5000), [(5000,)] * 2),
    ("layernorm(weight, bias)", (3, 20001), [(20001,)] * 2),
    ("layernorm(weight, bias, axis=1)", (4, 70, 9, 12), [(70,)] * 2),
    # Rows dealt out over memory, in a block each and shared by several.
    ("batch_norm(weight=w, bias=b, training=True) | relu", (8, 70, 9, 12), [(70,)] * 2),
    (
        "batch_norm(weight=w, bias=b, training=True) | add(r) | relu",
        (40, 3, 24, 28),
        [(3,), (3,), (40, 3, 24, 28)],
    ),
    ("add(bias) | gelu", (999, 64), [(64,)]),
    ("leaky_relu(0.2) | mul_channel | max_pool2d(2)", (4, 6, 18, 16), [(6,)]),
]


@pytest.mark.parametrize(("text", "shape", "operands"), _FAMILIES, ids=[f[0] for f in _FAMILIES])
def test_the_same_inputs_give_the_same_bits_a_hundred_times(text, shape, operands, device):
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, device=device).requires_grad_() for s in (shape, *operands)]
    cotangent = torch.randn_like(fused(*tensors))
    is_cuda = device.startswith("cuda")
    streams = [torch.cuda.Stream() for _ in range(3)] if is_cuda else [None]

    def once():
        result = fused(*tensors)
        return result.detach(), *torch.autograd.grad(result, tensors, cotangent)

    expected = once()
    for turn in range(100):
        with torch.cuda.stream(streams[turn % len(streams)]):
            if is_cuda:
                torch.cuda.synchronize()
            found = once()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Streams, devices, graphs.


@pytest.mark.gpu
def test_the_current_stream_is_used(gpu):
    fused = fusegen.compile(CHAIN)
    x, bias = torch.randn(64, 3, 256, 256, device=gpu), torch.randn(3, device=gpu)
    expected = fused(x, bias)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # On any other stream the chain would overtake this, and read zeros.
        late = torch.zeros_like(x)
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        found = fused(late, bias)
    stream.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "shape", "operands"), _FAMILIES, ids=[f[0] for f in _FAMILIES])
def test_any_device_index_works(text, shape, operands, gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    fused = fusegen.compile(text)
    first = [torch.randn(s, device="cuda:0").requires_grad_() for s in (shape, *operands)]
    second = [t.detach().to("cuda:1").requires_grad_() for t in first]
    assert torch.cuda.current_device() == 0
    for a, b in zip(outcome(fused, first).tensors, outcome(fused, second).tensors, strict=True):
        assert b.device.index == 1
        assert torch.equal(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "shape", "operands"), _FAMILIES, ids=[f[0] for f in _FAMILIES])
def test_a_cuda_graph_captures_forward_and_backward(text, shape, operands, gpu):
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, device=gpu).requires_grad_() for s in (shape, *operands)]

    def step():
        return torch.autograd.grad(fused(*tensors).sum(), tensors)

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
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_kernel_behind_what_is_no_kernel_waits_for_it(is_captured, gpu):
    """Copies by other engines, fills and other streams, in a stream and in a graph."""
    fused = fusegen.compile("mul(b) | relu")
    given = torch.empty(1 << 22).pin_memory()
    x, b, other = (torch.randn(1 << 22, device=gpu) for _ in range(3))
    aside = torch.cuda.Stream()

    def step():
        x.copy_(given, non_blocking=True)
        found = [fused(x, b)]
        x.fill_(0)
        found.append(fused(x, b))
        here = torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            x.copy_(other)
        here.wait_stream(aside)
        found.append(fused(x, b))
        return [*found, fused(other.clone(), b.clone())]

    graph = torch.cuda.CUDAGraph()
    given.normal_()
    step()
    torch.cuda.synchronize()
    if is_captured:
        with torch.cuda.graph(graph):
            found = step()
    for seed in range(20):
        torch.cuda.synchronize()
        given.normal_(generator=torch.Generator().manual_seed(seed))
        if is_captured:
            graph.replay()
        else:
            found = step()
        expected = [(t.to(gpu) * b).relu() for t in (given, torch.zeros(1), other, other)]
        for have, want in zip(found, expected, strict=True):
            assert torch.equal(have, want.expand_as(have))


@pytest.mark.parametrize(
    "unpack", [lambda t: t.half(), lambda t: t.double(), lambda t: t.to("meta")]
)
def test_a_hook_that_gives_back_another_type_or_device_is_told(unpack, device):
    fused = fusegen.compile("gelu | mul(0.5)")
    x = torch.randn(3, 8, device=device, requires_grad=True)
    fused(x).sum().backward()  # so that the plan is there
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = fused(x)
    with pytest.raises(ArgumentError, match=r"the backward got .* for what was torch\.float32 on"):
        y.sum().backward()


def test_memory_that_has_been_freed_is_told(device):
    fused = fusegen.compile("gelu | mul(w)")
    x, w = torch.randn(40, 8, device=device), torch.randn(8, device=device)
    fused(x, w)
    for tensor in (w, x):
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match="whose memory has been freed"):
            fused(x, w)


def test_the_default_type_is_that_of_each_call(device):
    halved, both = fusegen.compile("div(2)"), fusegen.compile("add(0.5) | mul(b)")
    chosen = fusegen.compile(lambda b: torch.where(b > 0, 1.0, 0.0))
    layer = fusegen.Layer(_Halved())
    x, b = torch.arange(4, device=device), torch.ones(4, device=device)
    for _ in range(2):
        for default in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(default)
            try:
                wanted = x / 2, (x + 0.5) * b, torch.where(b > 0, 1.0, 0.0)
                for halve in (halved, layer):
                    found = halve(x), both(x, b), chosen(b)
                    for have, want in zip(found, wanted, strict=True):
                        assert have.dtype == want.dtype
                        torch.testing.assert_close(have, want)
            finally:
                torch.set_default_dtype(torch.float32)


class _Halved(torch.nn.Module):
    def forward(self, x):
        return x / 2


def test_plans_that_two_threads_forget_are_no_error(monkeypatch):
    monkeypatch.setattr(plan, "_MOST_PLANS", 4)

    class Raced(dict):
        def __iter__(self):
            found = [*super().__iter__()]
            self.pop(found[0], None)  # what another thread does meanwhile
            return iter(found)

    known = Raced()
    for n in range(20):
        plan.remember(known, n, n)
    assert known[19] == 19
