"""Tensors that are dense but for gaps, such as the halves of a projection: read where they lie, and
the same numbers as from a copy.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from numeric import outcome
from sanitized import FAMILIES

import fusegen
from fusegen.layouts import memory_order
from fusegen.strides import Pitch, dense_strides, pitch_of


def halves(shape, dtype, device):
    """The first half of each row of a tensor twice as wide."""
    return torch.randn(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype).chunk(2, -1)[0]


def second_halves(shape, dtype, device):
    return torch.randn(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype).chunk(2, -1)[1]


def some_channels(shape, dtype, device):
    whole = torch.randn(shape[0], shape[1] + 16, *shape[2:], device=device, dtype=dtype)
    return whole[:, 16:]


def some_channels_last(shape, dtype, device):
    whole = torch.randn(shape[0], shape[1] + 16, *shape[2:], device=device, dtype=dtype)
    return whole.contiguous(memory_format=torch.channels_last)[:, :-16]


def heads_in_front(shape, dtype, device):
    """Of a projection to three times as many heads, the middle ones, in front of the positions."""
    batch, heads, length, width = shape
    whole = torch.randn(batch, length, 3 * heads, width, device=device, dtype=dtype)
    return whole[:, :, heads : 2 * heads].transpose(1, 2)


def without_the_first(shape, dtype, device):
    """All positions but the first, as a class token's."""
    whole = torch.randn(shape[0], shape[1] + 1, *shape[2:], device=device, dtype=dtype)
    return whole[:, 1:]


def repeated(shape, dtype, device):
    return torch.randn(1, *shape[1:], device=device, dtype=dtype).expand(shape)


def off_by_one(shape, dtype, device):
    """Apt, but for where it begins."""
    whole = torch.randn(*shape[:-1], 2 * shape[-1], device=device, dtype=dtype)
    return whole[..., 1 : shape[-1] + 1]


VIEWS = [halves, second_halves, some_channels, heads_in_front, without_the_first, repeated]
VIEWS += [off_by_one, some_channels_last]
SHAPE = (4, 16, 8, 32)
CHAINS = {
    "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu": [(16,)],
    "silu | mul(second)": [SHAPE],
    "rms_norm(weight) | mul(second)": [(32,), SHAPE],
    "layernorm(weight, bias, axis=1) | add(second)": [(16,), (16,), SHAPE],
    "batch_norm(weight=weight, bias=bias, training=True) | relu": [(16,), (16,)],
    "group_norm(2, weight, bias) | silu": [(16,), (16,)],
    "add(second) | softmax(-1) | dropout(0.5)": [SHAPE],
    "mul(second) | max_pool2d(2)": [SHAPE],
    "mul(second) | max_pool2d(3, 2, 1)": [SHAPE],
    "gelu | mean((2, 3))": [],
    "add(shift) | gelu": [(4, 1, 1, 32)],
}


def same(tensor):
    """A copy without gaps whose axes lie in the same order."""
    order, _ = memory_order(tensor.shape, tensor.stride())
    strides = dense_strides(tensor.shape, order)
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def lies(tensor):
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def seeded(fused, tensors, cotangent=None):
    torch.manual_seed(0)
    return outcome(fused, tensors, cotangent)


def equal(ours, theirs):
    assert ours.names == theirs.names
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert torch.equal(a, b)
        assert lies(a) == lies(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_view_has_the_bits_of_its_copy(chain, view, dtype, device):
    fused = fusegen.compile(chain)
    operands = [
        (view if s == SHAPE else torch.randn)(s, dtype=dtype, device=device) for s in CHAINS[chain]
    ]
    tensors = [t.requires_grad_() for t in (view(SHAPE, dtype, device), *operands)]
    copies = [same(t.detach()).requires_grad_() for t in tensors]
    equal(seeded(fused, tensors), seeded(fused, copies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_view_may_be_as_narrow_as_a_pack(chain, dtype, device):
    fused = fusegen.compile(chain)
    shapes = [(3, 16, 5, 24), *CHAINS[chain]]
    shapes = [(3, 16, 5, 24) if s == SHAPE else s for s in shapes]
    shapes = [tuple({4: 3, 32: 24}.get(n, n) for n in s) for s in shapes]
    tensors = [
        halves(s, dtype, device) if len(s) > 1 else torch.rand(s, dtype=dtype) for s in shapes
    ]
    tensors = [t.to(device).requires_grad_() for t in tensors]
    copies = [t.detach().contiguous().requires_grad_() for t in tensors]
    equal(seeded(fused, tensors), seeded(fused, copies))


@pytest.mark.parametrize("view", VIEWS)
def test_an_incoming_gradient_may_have_gaps(view, device):
    fused = fusegen.compile("rms_norm(weight) | gelu")
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    weight = torch.randn(32, device=device, requires_grad=True)
    cotangent = view(SHAPE, torch.float32, device)
    ours = outcome(fused, [x, weight], cotangent)
    equal(ours, outcome(fused, [x, weight], cotangent.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("view", [v for v in VIEWS if v is not off_by_one])
def test_nothing_is_copied(view):
    fused = fusegen.compile("silu | mul(second)")
    x, second = (view(SHAPE, torch.bfloat16, "cuda") for _ in range(2))
    fused(x, second)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        fused(x, second)
        torch.cuda.synchronize()
    kernels = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


@pytest.mark.gpu
def test_a_view_may_span_more_than_32_bits_can_say():
    fused = fusegen.compile("gelu")
    step = (1 << 32) + 64
    memory = torch.empty(step + 4096, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided((2, 4096), (step, 1))
    x.copy_(torch.randn(2, 4096))
    assert torch.equal(fused(x), fused(x.clone()))
    # In two passes, where the copy takes one: statistics differ by roundings, results by a bf16's.
    normed = fusegen.compile("batch_norm(training=True) | relu")
    images = x.unflatten(1, (16, 16, 16))
    ours, copied = (normed(t).float() for t in (images, images.clone()))
    torch.testing.assert_close(ours, copied, rtol=2.0**-7, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("chain", "shape", "operands"),
    [f for f in FAMILIES if len(f[1]) > 1 and math.prod(f[1][1:]) % 8 == 0],
)
def test_every_family_reads_views(chain, shape, operands):
    """With gaps behind each index of the first axis, in x and in operands whose shapes allow it."""
    fused = fusegen.compile(chain)
    torch.manual_seed(0)

    def spread(shape):
        whole = torch.randn(shape[0], math.prod(shape[1:]) + 16, device="cuda")
        return whole[:, :-16].unflatten(1, shape[1:]) if len(shape) > 1 else whole[:, 0]

    x = spread(shape)
    others = [spread(s) if len(s) > 1 else torch.rand(s, device="cuda") for s in operands]
    tensors = [t.requires_grad_() for t in (x, *others)]
    copies = [t.detach().contiguous().requires_grad_() for t in tensors]
    equal(seeded(fused, tensors), seeded(fused, copies))


@settings(max_examples=300)
@given(st.data())
def test_a_pitch_says_where_elements_lie(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    order = tuple(data.draw(st.permutations(range(-len(shape), 0))))
    dense = dense_strides(shape, order)
    steps = {s for n, s in zip(shape, dense, strict=True) if n > 1}
    run = data.draw(st.sampled_from(sorted(steps or {1})))
    step = data.draw(st.integers(0, 3 * run))
    strides = tuple(s if s < run else s // run * step for s in dense)
    # Seen in other axes: the graph may know some as one, or one as several.
    found = pitch_of(shape, strides, shape, dense)
    places = torch.arange(20_000).as_strided(shape, strides)
    flat = torch.arange(math.prod(shape)).as_strided(shape, dense)
    if found is None:
        assert torch.equal(places, flat) or run == 1
    else:
        assert torch.equal(places, flat + flat // found.run * (found.step - found.run))


def test_axes_may_be_joined_or_split():
    half = torch.empty(4, 6, 64)[..., :32]
    strides = dense_strides((2, 2, 6, 8, 4), range(-5, 0))
    assert pitch_of(half.shape, half.stride(), (2, 2, 6, 8, 4), strides) == Pitch(32, 64)
    assert pitch_of(half.shape, half.stride(), (24, 32), (32, 1)) == Pitch(32, 64)
    crossing = dense_strides((4, 3, 64), range(-3, 0))
    assert pitch_of(half.shape, half.stride(), (4, 3, 64), crossing) == Pitch(32, 64)
    window = torch.empty(4, 8, 64)[:, 1:-1, :32]
    strides = dense_strides(window.shape, range(-3, 0))
    assert pitch_of(window.shape, window.stride(), window.shape, strides) is None


@pytest.mark.parametrize("chain", ["gelu | mul(second)", "rms_norm | mul(second)"])
def test_second_derivatives_read_views(chain, device):
    fused = fusegen.compile(chain)
    x, second = (halves((2, 3, 16), torch.float64, device).requires_grad_() for _ in range(2))
    assert torch.autograd.gradgradcheck(fused, (x, second))


def test_what_is_given_beside_a_view_is_right(device):
    fused = fusegen.compile("add(second) | give(sum) | rms_norm(weight)")
    tensors = [heads_in_front(SHAPE, torch.float32, device) for _ in range(2)]
    tensors.append(torch.rand(32, device=device))
    tensors = [t.requires_grad_() for t in tensors]
    copies = [same(t.detach()).requires_grad_() for t in tensors]
    equal(seeded(fused, tensors), seeded(fused, copies))


def test_autocast_and_out_take_views(device):
    fused = fusegen.compile("layernorm(weight, bias) | gelu")
    x = second_halves(SHAPE, torch.bfloat16, device)
    weight, bias = (torch.rand(32, device=device) for _ in range(2))
    with torch.autocast(device, torch.bfloat16):
        ours, copied = fused(x, weight, bias), fused(x.contiguous(), weight, bias)
    assert ours.dtype == copied.dtype
    assert torch.equal(ours, copied)
    gelu = fusegen.compile("gelu")
    room = torch.zeros(*SHAPE[:-1], 64, dtype=torch.bfloat16, device=device)
    gelu(x, out=room[..., 32:])
    assert torch.equal(room[..., 32:], gelu(x.contiguous()))
    assert not room[..., :32].any()


def test_torch_compile_hands_views_on(device):
    fused = fusegen.compile("silu | mul(second)")

    @torch.compile(fullgraph=True)
    def gate(whole):
        a, b = whole.chunk(2, -1)
        return fused(a, b)

    whole = torch.randn(4, 8, 64, device=device, requires_grad=True)
    result = gate(whole)
    result.square().sum().backward()
    a, b = whole.detach().chunk(2, -1)
    again = [t.contiguous().requires_grad_() for t in (a, b)]
    expected = fused.reference(*again)
    expected.square().sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(whole.grad, torch.cat([t.grad for t in again], -1))


@pytest.mark.gpu
def test_a_graph_replays_on_views():
    fused = fusegen.compile("silu | mul(second)")
    whole = torch.randn(64, 256, device="cuda")
    a, b = whole.chunk(2, -1)
    fused(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused(a, b)
    whole.normal_()
    graph.replay()
    assert torch.equal(result, fused(a.contiguous(), b.contiguous()))


class Gate(torch.nn.Module):
    """Halves that meet in a fused call."""

    def __init__(self):
        super().__init__()
        self.fused = fusegen.compile("silu | mul(second)")

    def forward(self, whole):
        a, b = whole.chunk(2, -1)
        return self.fused(a, b)


def test_a_program_with_views_is_exported_for_any_batch():
    dimensions = {"whole": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(Gate(), (torch.randn(4, 8, 64),), dynamic_shapes=dimensions)
    whole = torch.randn(7, 8, 64)
    a, b = whole.chunk(2, -1)
    torch.testing.assert_close(program.module()(whole), torch.nn.functional.silu(a) * b)


def test_one_graph_serves_views_of_all_sizes():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    gate = torch.compile(Gate(), fullgraph=True, dynamic=True, backend=counter)
    for shape in ((4, 8, 64), (5, 9, 64), (6, 3, 96)):
        whole = torch.randn(shape, requires_grad=True)
        gate(whole).sum().backward()
        a, b = whole.detach().chunk(2, -1)
        torch.testing.assert_close(gate(whole), torch.nn.functional.silu(a) * b)
    assert counter.frame_count == 1


def test_the_source_for_views_is_printed():
    fused = fusegen.compile("silu | mul(row)")
    plain = fused.source("cuda", grad=True)
    assert "Pitched<" not in plain
    text = fused.source("cuda", grad=True, gaps=("x", "row"))
    assert text.count("const Pitched<const float> x{") == 2
    assert text.count("const Pitched<const float> row_operand{") == 2
    with pytest.raises(fusegen.ArgumentError, match="'gaps': got 'second', wanted x or row"):
        fused.source("cuda", gaps=("second",))
    # Windows that overlap look beside an element: such a tensor is copied first.
    pooled = fusegen.compile("max_pool2d(3, 2, 1)")
    assert pooled.source("cuda", gaps=("x",)) == pooled.source("cuda")
