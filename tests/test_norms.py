"""Norms inside chains: groups, instances, batches with running statistics, norms of vectors."""

import copy

import pytest
import torch
from numeric import has_right_second_derivatives, outcome
from torch.nn import functional

import fusegen
from fusegen import ArgumentError, ChainError

SHAPE = (4, 6, 3, 5)
_BATCH = "batch_norm(running_mean, running_var, weight, bias"
# chain, shapes of the operands
NORMS = [
    ("group_norm(3, weight, bias) | tanh", [(6,), (6,)]),
    ("gelu | group_norm(2)", []),
    ("group_norm(1, weight) | mul(w)", [(6,), (6, 1, 1)]),
    ("group_norm(6, weight)", [(6,)]),
    ("group_norm(2) | group_norm(6) | logsumexp(1)", []),
    ("group_norm(3, weight) | add_channel | max(1)", [(6,), (6,)]),
    ("instance_norm(weight=w, bias=b) | tanh", [(6,), (6,)]),
    ("mul(s) | batch_norm(weight=w, bias=b, training=True) | gelu", [(5,), (6,), (6,)]),
    ("batch_norm(training=True) | tanh | batch_norm(weight=w, training=True)", [(6,)]),
    ("batch_norm(training=True) | layernorm(weight, bias) | group_norm(2)", [(5,), (5,)]),
    ("rms_norm(weight) | silu | mul(second)", [(5,), SHAPE]),
    ("rms_norm(weight, axis=1)", [(6,)]),
    ("rms_norm(weight, (3, 5), eps=0.01)", [(3, 5)]),
    ("normalize | mul(2)", []),
    ("tanh | normalize(1, (2, 3))", []),
    ("keep(y) | normalize(3, -1, eps=0.5) | add(y)", []),
]
each_norm = pytest.mark.parametrize(("text", "operands"), NORMS, ids=[c[0] for c in NORMS])
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
}


def tensors_of(operands, device, layout="contiguous", shape=SHAPE):
    x = LAYOUTS[layout](torch.randn(shape, dtype=torch.float64, device=device))
    others = [torch.randn(s, dtype=torch.float64, device=device) for s in operands]
    return [t.requires_grad_() for t in (x, *others)]


@pytest.mark.parametrize("layout", LAYOUTS)
@each_norm
def test_a_chain_of_norms_is_eagers(text, operands, layout, device):
    tensors = tensors_of(operands, device, layout)
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(130, 33, 7, 7), (70, 64, 2, 24), (129, 40, 3, 11)])
@pytest.mark.parametrize(
    "text", ["batch_norm(weight=w, bias=b, training=True) | gelu", "tanh | var((0, 2, 3))"]
)
def test_many_short_rows_that_no_sum_tells_apart_are_taken_together(text, shape, device):
    operands = [shape[1:2]] * text.count("=w") * 2
    tensors = tensors_of(operands, device, shape=shape)
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# chain, length of the rows, operands along them: that all rows share ("row"), that those of a
# sample share ("sample"), or of full size ("all")
SHARING = [
    ("add(p) | layernorm(weight, bias)", 64, ["row", "row", "row"]),
    ("add(p) | layernorm(weight, bias) | gelu", 1024, ["row", "row", "row"]),
    ("add(p) | layernorm(weight, bias)", 8192, ["row", "row", "row"]),
    ("add(p) | add(r) | layernorm(weight, bias)", 768, ["row", "all", "row", "row"]),
    ("add(p) | add(r) | layernorm(weight, bias)", 4096, ["row", "all", "row", "row"]),
    ("add(r) | layernorm(weight, bias) | mul(q)", 4096, ["all", "row", "row", "sample"]),
    ("mul(p) | add(q) | layernorm(weight, bias) | gelu", 4096, ["row", "row", "row", "row"]),
    ("layernorm | mul(scale) | add(shift)", 1024, ["sample", "sample"]),
    ("add(mask) | softmax(-1)", 1000, ["sample"]),
    ("add(mask) | softmax(-1) | mul(p)", 48, ["sample", "row"]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("text", "length", "along"), SHARING)
def test_what_rows_share_is_read_along_each(text, length, along, dtype, device):
    shapes = {"row": (length,), "sample": (5, 1, length), "all": (5, 7, length)}
    made = [torch.randn(s, device=device) for s in (shapes["all"], *(shapes[a] for a in along))]
    tensors = [t.to(dtype) for t in made]
    fused = fusegen.compile(text)
    exact = fused.reference(*(t.double() for t in tensors))
    # Arithmetic is in fp32, a few roundings of values of some units; bf16 rounds the result too.
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(fused(*tensors).double(), exact, rtol=tolerance, atol=tolerance)


@each_norm
def test_second_derivatives_are_right(text, operands, device):
    operands = [(2, *s[1:]) if s == SHAPE else s for s in operands]
    tensors = tensors_of(operands, device, shape=(2, *SHAPE[1:]))
    assert has_right_second_derivatives(fusegen.compile(text), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "group_norm(2, weight, bias)",
        "instance_norm(weight=weight, bias=bias)",
        "batch_norm(weight=weight, bias=bias, training=True)",
    ],
)
def test_parameters_of_float32_leave_the_type_of_the_value(text, dtype, device):
    x = torch.randn(SHAPE, device=device).to(dtype).requires_grad_()
    weight, bias = (torch.randn(6, device=device).requires_grad_() for _ in range(2))
    fused = fusegen.compile(text)
    ours = outcome(fused, [x, weight, bias])
    wide = outcome(fused.reference, [x, weight, bias], dtype=torch.float64)
    assert [t.dtype for t in ours.tensors] == [dtype, dtype, torch.float32, torch.float32]
    for a, b in zip(ours.tensors, wide.tensors, strict=True):
        # The incoming gradient is rounded to the narrow type, of which d_bias is a sum of 60.
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=1e-1)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_groups_are_found_in_memory_without_a_copy(layout, device):
    fused = fusegen.compile("group_norm(2, weight, bias) | gelu")
    tensors = tensors_of([(6,), (6,)], device, layout)
    result = fused(*tensors)
    assert result.stride() == tensors[0].stride()
    (call,) = fused._single.recent
    assert call.plan.is_ready
    assert call.attempt(tensors[0], tuple(tensors[1:])) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("text", "shape", "operands"),
    [
        ("group_norm(4, weight, bias) | silu", (2, 32, 28, 25), [(32,), (32,)]),
        (
            "add(r) | group_norm(3, weight, bias) | gelu",
            (3, 9, 16, 13),
            [(3, 9, 16, 13), (9,), (9,)],
        ),
        ("gelu | group_norm(2) | mul(s)", (3, 8, 21, 9), [(3, 1, 1, 1)]),
        # Groups of which a pack has parts.
        ("group_norm(4, w, b) | tanh | logsumexp(1)", (3, 40, 9, 11), [(40,), (40,)]),
        ("group_norm(6, w, b) | softmax(1)", (3, 24, 9, 11), [(24,), (24,)]),
        ("batch_norm(weight=w, bias=b, training=True) | relu", (400, 6, 2, 2), [(6,), (6,)]),
        ("tanh | std((0, 2, 3))", (90, 3, 2, 2), []),
        ("mul(p) | amin((0, 2, 3), keepdim=True) | gelu", (90, 3, 2, 2), [(2,)]),
        # Strided rows as long as their threads have packs, with threads beyond, columns beside.
        ("layernorm(weight, bias, axis=1) | gelu", (3, 40, 5, 4), [(40,), (40,)]),
        ("layernorm(weight, bias, axis=1)", (2, 96, 9, 11), [(96,), (96,)]),
        ("layernorm(weight, bias, axis=1)", (2, 384, 7, 7), [(384,), (384,)]),
        ("add(r) | softmax(1) | add_channel", (2, 208, 5, 1), [(2, 208, 5, 1), (208,)]),
    ],
)
def test_what_lies_across_memory_is_reduced_as_in_torch(text, shape, operands, dtype, device):
    is_grouped = "group_norm" in text
    tensors = [torch.randn(s, device=device).to(dtype) for s in (shape, *operands)]
    if is_grouped:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    tensors = [t.requires_grad_() for t in tensors]
    fused = fusegen.compile(text)
    ours = outcome(fused, tensors)
    wide = outcome(fused.reference, tensors, dtype=torch.float64)
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 2**-6}[dtype]
    for a, b in zip(ours.tensors, wide.tensors, strict=True):
        # Sums of as many terms as d_weight has lose in proportion to what is added up.
        torch.testing.assert_close(
            a.double(), b, rtol=tolerance, atol=tolerance * max(1.0, float(b.abs().max()))
        )


@pytest.mark.parametrize("rows", [48, 3000])
@pytest.mark.parametrize(
    "text",
    [
        "batch_norm(weight=w, bias=b, training=True) | softmax(-1)",
        "mul(w) | add(b) | log_softmax(0) | layernorm(normalized_shape=130)",
    ],
)
def test_what_columns_leave_for_rows_is_wider_than_their_elements(text, rows, device):
    tensors = [torch.randn(s, device=device).to(torch.bfloat16) for s in ((rows, 130), 130, 130)]
    fused = fusegen.compile(text)
    with torch.no_grad():
        result = fused(*tensors)
    tensors = [t.requires_grad_() for t in tensors]
    ours, wide = outcome(fused, tensors), outcome(fused.reference, tensors, dtype=torch.float64)
    # Rounding to bf16 of the results and of the incoming gradient, relative to the largest value.
    for a, b in zip((result, *ours.tensors), (wide.result, *wide.tensors), strict=True):
        assert (a.double() - b).abs().max() < 2**-6 * max(b.abs().max(), 2**-6)


# Running statistics.


def batch_norm(momentum, device, dtype=torch.float32):
    """torch's layer with random parameters, and tensors that begin like its own."""
    layer = torch.nn.BatchNorm2d(6, momentum=momentum, device=device, dtype=dtype)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return layer, copy.deepcopy(layer)


def arguments(layer):
    return layer.running_mean, layer.running_var, layer.weight, layer.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_running_statistics_are_torchs_over_many_steps(momentum, dtype, device):
    layer, own = batch_norm(momentum, device, torch.promote_types(dtype, torch.float32))
    more = f"training=True, momentum={momentum}, num_batches_tracked=number"
    fused = fusegen.compile(f"{_BATCH}, {more}) | gelu")
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for step in range(6):
        x = (3 * torch.randn(SHAPE, device=device) + step).to(dtype)
        with torch.set_grad_enabled(step % 3 != 1):
            expected = functional.gelu(layer(x.requires_grad_(step % 3 == 0)))
            out = torch.empty_like(expected) if step % 3 == 1 else None
            found = fused(x, *arguments(own), own.num_batches_tracked, out=out)
        torch.testing.assert_close(found, expected, **close)
        for name, buffer in own.named_buffers():
            torch.testing.assert_close(buffer, layer.get_buffer(name), msg=name)
    found.sum().backward()


def test_evaluation_reads_the_running_statistics(device):
    layer, own = batch_norm(0.1, device)
    layer(torch.randn(SHAPE, device=device))
    own.load_state_dict(layer.state_dict())
    layer.eval()
    x, residual = (torch.randn(SHAPE, device=device).requires_grad_() for _ in range(2))
    fused = fusegen.compile(f"{_BATCH}) | add(residual) | relu")
    expected = functional.relu(layer(x) + residual)
    versions = [b._version for b in own.buffers()]
    found = fused(x, *arguments(own), residual)
    assert [b._version for b in own.buffers()] == versions
    torch.testing.assert_close(found, expected)
    wanted = [x, residual, *layer.parameters()]
    gradients = torch.autograd.grad(expected.square().sum(), wanted)
    wanted = [x, residual, *own.parameters()]
    for a, b in zip(torch.autograd.grad(found.square().sum(), wanted), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_updates_again_as_in_torch(device):
    layer, own = batch_norm(0.1, device)
    fused = fusegen.compile(f"{_BATCH}, training=True)")
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    checkpoint(lambda t: fused(t, *arguments(own)), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(own.running_mean, layer.running_mean)
    torch.testing.assert_close(own.running_var, layer.running_var)


def test_an_update_is_a_change_that_torch_sees(device):
    _, own = batch_norm(0.1, device)
    kept = own.running_mean * torch.ones(6, device=device, requires_grad=True)
    versions = [own.running_mean._version, own.running_var._version]
    fusegen.compile(f"{_BATCH}, training=True)")(torch.randn(SHAPE, device=device), *arguments(own))
    assert [own.running_mean._version, own.running_var._version] == [v + 1 for v in versions]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_the_same_inputs_give_the_same_bits(device):
    fused = fusegen.compile(f"{_BATCH}, training=True) | gelu")
    x = torch.randn(33, 6, 40, 41, device=device)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        _, own = batch_norm(0.1, device)
        inputs = [x.clone().requires_grad_(), *arguments(own)]
        result = fused(*inputs)
        gradients = torch.autograd.grad(result.sum(), [inputs[0], *own.parameters()])
        results.append([result, *gradients, *own.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("uses_input", [True, False])
def test_instances_have_running_statistics_too(uses_input, device):
    layer = torch.nn.InstanceNorm2d(6, track_running_stats=True, affine=True, device=device)
    layer.running_mean.normal_()
    layer.train(uses_input)
    own = copy.deepcopy(layer)
    fused = fusegen.compile(
        f"instance_norm(running_mean, running_var, weight, bias, use_input_stats={uses_input})"
    )
    for _ in range(3):
        x = torch.randn(SHAPE, device=device)
        torch.testing.assert_close(fused(x, *arguments(own)), layer(x))
        torch.testing.assert_close(own.running_mean, layer.running_mean)
        torch.testing.assert_close(own.running_var, layer.running_var)


def test_two_batch_norms_update_their_own(device):
    fused = fusegen.compile(
        "batch_norm(m, v, training=True) | tanh | batch_norm(m2, v2, training=True, momentum=0.5)"
    )
    x = torch.randn(SHAPE, device=device)
    ours = [torch.zeros(6, device=device), torch.ones(6, device=device)] * 1
    ours += [t.clone() for t in ours]
    eagers = [t.clone() for t in ours]
    torch.testing.assert_close(fused(x, *ours), fused.reference(x, *eagers))
    for a, b in zip(ours, eagers, strict=True):
        torch.testing.assert_close(a, b)


def test_a_module_trains_as_its_twin(device):
    class Twin(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.fused = fusegen.compile(
                f"{_BATCH}, training=True, momentum=None, num_batches_tracked=number) | relu"
            )

        def forward(self, x):
            return self.fused(x, *arguments(self.layer), self.layer.num_batches_tracked)

    layer, own = batch_norm(None, device)
    models = torch.nn.Sequential(layer, torch.nn.ReLU()), Twin(own)
    for _ in range(5):
        x = torch.randn(SHAPE, device=device)
        for model in models:
            model.zero_grad()
            (model(x) - 1).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    for a, b in zip(layer.state_dict().values(), own.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 6), (2048, 6), (128, 6, 7, 7), (3, 6, 90, 90)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_statistics_are_updated_by_every_kind_of_kernel(layout, shape, dtype, device):
    layer, own = batch_norm(0.1, device, dtype)
    fused = fusegen.compile(f"{_BATCH}, training=True) | relu")
    for step in range(3):
        x = torch.randn(shape, device=device, dtype=dtype)
        if layout == "channels_last" and len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        functional.batch_norm(x, *arguments(layer), training=True)
        fused(x.requires_grad_(step == 1), *arguments(own))
        for name, buffer in own.named_buffers():
            expected, close = layer.get_buffer(name), {}
            if dtype == torch.bfloat16:  # three updates, each rounded to eight bits by both
                close = {"rtol": 2e-2, "atol": 1e-2}
            torch.testing.assert_close(buffer, expected, msg=f"{name} at {step}", **close)


def test_a_layer_may_stand_twice_in_a_chain(device):
    more = "training=True, momentum=None, num_batches_tracked=number"
    fused = fusegen.compile(f"{_BATCH}, {more}) | tanh | {_BATCH}, {more})")
    layer, own = batch_norm(None, device)
    for _ in range(3):
        x = torch.randn(SHAPE, device=device)
        found = fused(x, *arguments(own), own.num_batches_tracked)
        torch.testing.assert_close(found, layer(torch.tanh(layer(x))))
        for name, buffer in own.named_buffers():
            torch.testing.assert_close(buffer, layer.get_buffer(name), msg=name)


def placed(tensor, layout):
    """The same numbers elsewhere: with gaps between them, or off a boundary of 16 bytes."""
    room = tensor.new_full((2 * len(tensor) + 1,), 7.0)
    view = room[1 : 1 + 2 * len(tensor) : 2] if layout == "gaps" else room[1 : 1 + len(tensor)]
    return view.copy_(tensor), room


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["gaps", "misaligned"])
def test_statistics_are_updated_where_they_lie(layout, grad, device):
    fused = fusegen.compile(f"{_BATCH}, training=True) | relu")
    layer, own = batch_norm(0.1, device)
    mean, room = placed(own.running_mean, layout)
    for _ in range(3):
        x = torch.randn(SHAPE, device=device, requires_grad=grad)
        fused(x, mean, *arguments(own)[1:])
        layer(x)
        torch.testing.assert_close(mean, layer.running_mean)
        torch.testing.assert_close(own.running_var, layer.running_var)
    assert (room == 7.0).sum() == len(mean) + 1


def test_what_counts_batches_counts_in_training_alone(device):
    counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)]
    x = torch.randn(SHAPE, device=device)
    statistics = torch.zeros(6, device=device), torch.ones(6, device=device)
    for training in ("True", "False"):
        more = f"training={training}, num_batches_tracked=n"
        chains = f"batch_norm({more})", f"batch_norm(m, v, {more})"
        for text, count in zip(chains, counts, strict=True):
            given = statistics if "(m" in text else ()
            if given or training == "True":
                fusegen.compile(text)(x, *given, n=count)
                fusegen.compile(text)(x, *given, count)
    assert [int(count) for count in counts] == [2, 2]


def test_a_checkpoint_counts_again_as_in_torch(device):
    layer, own = batch_norm(0.1, device)
    fused = fusegen.compile(f"{_BATCH}, training=True, num_batches_tracked=n)")
    x = torch.randn(SHAPE, device=device, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    for _ in range(2):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        given = (*arguments(own), own.num_batches_tracked)
        checkpoint(lambda t, given=given: fused(t, *given), x, use_reentrant=False).sum().backward()
    for name, buffer in own.named_buffers():
        torch.testing.assert_close(buffer, layer.get_buffer(name), msg=name)


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        *((t, 1e16) for t in ("layernorm", "group_norm(2)", "instance_norm", "rms_norm")),
        ("batch_norm(training=True)", 1e16),
        ("layernorm(eps=1e-30)", 1e-13),
        ("group_norm(2, eps=1e-30)", 1e-13),
        ("rms_norm(eps=1e-30)", 1e-13),
    ],
)
def test_gradients_of_very_large_and_small_values_lose_nothing(text, scale, device):
    x = (scale * torch.randn(7, 4, 96, device=device)).requires_grad_()
    fused = fusegen.compile(text)
    ours, exact = outcome(fused, [x]), outcome(fused.reference, [x], dtype=torch.float64)
    for mine, right in zip(ours.tensors, exact.tensors, strict=True):
        assert (mine.double() - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("text", ["layernorm", "group_norm(2)", "softmax(1) | sub(0.25)"])
def test_a_large_factor_behind_a_norm_does_no_harm(text, device):
    x = torch.randn(7, 4, 96, device=device, requires_grad=True)
    fused = fusegen.compile(f"{text} | mul(100000) | gelu | mul(1e-5)")
    ours, exact = outcome(fused, [x]), outcome(fused.reference, [x], dtype=torch.float64)
    for mine, right in zip(ours.tensors, exact.tensors, strict=True):
        assert (mine.double() - right).abs().max() <= 1e-3 * right.abs().max()


def test_statistics_that_need_a_gradient_are_refused(device):
    fused = fusegen.compile(f"{_BATCH}, training=True) | relu")
    mean, variance, weight, bias = (torch.ones(6, device=device) for _ in range(4))
    tensors = (mean.requires_grad_(), variance, weight, bias)
    with pytest.raises(ArgumentError, match="'running_mean': it is updated in place, and needs"):
        fused(torch.randn(SHAPE, device=device), *tensors)
    assert torch.equal(mean, torch.ones_like(mean))
    with torch.no_grad():
        fused(torch.randn(SHAPE, device=device), *tensors)


def test_statistics_in_the_memory_of_something_else_are_refused(device):
    fused = fusegen.compile(f"{_BATCH}, training=True) | relu")
    x = torch.randn(SHAPE, device=device)
    room = torch.ones(32, device=device)
    fused(x, *room.view(4, 8)[:, :6])  # side by side is well
    before = room.clone()
    with pytest.raises(ArgumentError, match=r"'running_mean': .* lies in the memory of 'runni"):
        fused(x, room[:6], room[:6], room[8:14], room[16:22])
    with pytest.raises(ArgumentError, match=r"'running_var': .* lies in the memory of 'weight'"):
        fused(x, room[:6], room[8:14], room[13:19].requires_grad_(), room[24:30])
    assert torch.equal(room, before)


def test_expanded_statistics_are_refused(device):
    fused = fusegen.compile(f"{_BATCH}, training=True) | relu")
    _, own = batch_norm(0.1, device)
    before = [b.clone() for b in own.buffers()]
    mean = torch.zeros((), device=device).expand(6)
    with pytest.raises(ArgumentError, match="'running_mean': it is updated in place, and expanded"):
        fused(torch.randn(SHAPE, device=device), mean, *arguments(own)[1:])
    assert all(torch.equal(a, b) for a, b in zip(before, own.buffers(), strict=True))


@pytest.mark.parametrize("training", ["True", "False"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(()), "wanted one integer"),
        (torch.zeros(3, dtype=torch.int64), "wanted one integer"),
        (0, "wanted a torch.Tensor"),
        (torch.zeros((), dtype=torch.int64, device="meta"), "on meta, wanted one on"),
    ],
)
def test_a_wrong_counter_is_told_in_a_later_call_too(wrong, message, training, device):
    fused = fusegen.compile(f"{_BATCH}, training={training}, num_batches_tracked=n) | relu")
    _, own = batch_norm(0.1, device)
    x = torch.randn(SHAPE, device=device)
    with torch.no_grad():
        for _ in range(2):
            fused(x, *arguments(own), own.num_batches_tracked)
        before = [b.clone() for b in own.buffers()]
        on_device = isinstance(wrong, torch.Tensor) and wrong.device.type == "cpu"
        with pytest.raises(ArgumentError, match=message):
            fused(x, *arguments(own), wrong.to(device) if on_device else wrong)
    assert all(torch.equal(a, b) for a, b in zip(before, own.buffers(), strict=True))


def test_inference_tensors_are_updated_in_inference_mode(device):
    fused = fusegen.compile(f"{_BATCH}, training=True) | relu")
    layer, own = batch_norm(0.1, device)
    with torch.inference_mode():
        x = torch.randn(SHAPE, device=device)
        given = [t.clone() for t in arguments(own)]
        for _ in range(2):
            fused(x, *given)
            layer(x)
        torch.testing.assert_close(given[0], layer.running_mean)


# Mistakes.


@pytest.mark.parametrize(
    ("text", "shape", "operands", "message"),
    [
        ("group_norm(4)", SHAPE, [], r"group_norm\(4\): got a value of shape \(4, 6, 3, 5\), want"),
        ("group_norm(2)", (6,), [], r"group_norm\(2\): got a value of shape \(6,\)"),
        ("group_norm(2, w)", SHAPE, [(5,)], r"operand 'w' got shape \(5,\), wanted \(6,\)"),
        (
            "batch_norm",
            SHAPE,
            [],
            "got no running statistics, wanted running_mean and running_var, since training is Fa",
        ),
        ("batch_norm(m, training=True)", SHAPE, [(6,)], "got running_mean, wanted running_mean an"),
        ("batch_norm(training=True)", (1, 6), [], "wanted more than one value for each statistic"),
        ("batch_norm(training=True)", (6,), [], "wanted at least two axes: samples and channels"),
        ("instance_norm", (4, 6, 1, 1), [], "wanted more than one value for each statistic"),
        ("instance_norm", (4, 6), [], "wanted more than one value for each statistic"),
        (
            "batch_norm(m, v, training=True, momentum=None)",
            SHAPE,
            [(6,), (6,)],
            "momentum is None.*num_batches_tracked=num_batches_tracked",
        ),
        ("batch_norm(m, v, training=True)", SHAPE, [(6,), (5,)], r"operand 'v' got shape \(5,\)"),
        (
            "keep(y) | batch_norm(y, v, training=True)",
            SHAPE,
            [(6,)],
            "'y' is a kept value, and running_mean is updated in place",
        ),
        (
            "batch_norm(m, v, training=True, num_batches_tracked=n)",
            SHAPE,
            [(6,), (6,), ()],
            r"operand 'n' got shape \(\) of float32, wanted one integer",
        ),
        ("rms_norm((4, 5))", SHAPE, [], r"normalized_shape is \(4, 5\), but the value's shape is"),
        ("normalize(dim=7)", SHAPE, [], "dim 7 is out of range"),
    ],
)
def test_a_mistake_is_told(text, shape, operands, message):
    with pytest.raises(ArgumentError, match=message):
        fusegen.compile(text)(torch.ones(shape), *[torch.ones(s) for s in operands])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group_norm(0)", "num_groups wants at least 1, got 0"),
        ("normalize(eps=-1)", "eps wants a number of at least 0, got -1"),
    ],
)
def test_a_constant_out_of_range_is_refused(text, message):
    with pytest.raises(ChainError, match=message):
        fusegen.compile(text)


def test_a_step_with_axes_of_its_own_is_refused_in_a_body():
    @fusegen.op
    def own_groups(x: fusegen.Expr) -> fusegen.Expr:
        """Groups."""
        return fusegen.group_norm(x, 2)

    with pytest.raises(ChainError, match="group_norm: works as a step of a chain only"):
        fusegen.compile("own_groups")(torch.randn(SHAPE))
