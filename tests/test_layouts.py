"""However x, an operand or the incoming gradient lies in memory, and whatever its size: the same
numbers as eager.
"""

import math

import pytest
import torch
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen.layouts import memory_order

SHAPE = (2, 6, 8, 10)

# One chain for each kernel family, forward and backward.
CHAINS = {
    "pointwise": "leaky_relu(0.2) | add_channel | mul(other) | gelu",
    "row": "add(other) | layernorm(weight, bias) | gelu",
    "row of two axes": "layernorm(weight, bias, normalized_shape=(8, 10)) | add(other)",
    "column": "layernorm(weight, bias, axis=1) | mul(other)",
    "window": "add_channel | mul(other) | leaky_relu(0.2) | max_pool2d((2, 3))",
    "row, then window": "layernorm(weight, bias) | mul(other) | max_pool2d(2)",
}
_SHAPES = {"bias": (6,), "other": SHAPE}
OPERANDS = {
    "row": {"weight": (10,), "bias": (10,)},
    "row of two axes": {"weight": (8, 10), "bias": (8, 10)},
    "column": {"weight": (6,), "bias": (6,)},
    "row, then window": {"weight": (10,), "bias": (10,)},
}


def sliced(shape, device):
    return torch.randn(*shape[:1], 2 * shape[1], *shape[2:], dtype=torch.float64, device=device)[
        :, ::2
    ]


LAYOUTS = {
    "contiguous": lambda s, d: torch.randn(s, dtype=torch.float64, device=d),
    "channels_last": lambda s, d: LAYOUTS["contiguous"](s, d).contiguous(
        memory_format=torch.channels_last
    ),
    "permuted": lambda s, d: torch.randn(
        s[1], s[3], s[0], s[2], dtype=torch.float64, device=d
    ).permute(2, 0, 3, 1),
    "transposed": lambda s, d: torch.randn(
        *s[:2], s[3], s[2], dtype=torch.float64, device=d
    ).transpose(2, 3),
    "every other channel": sliced,
    "every other element": lambda s, d: torch.randn(
        *s[:-1], 2 * s[-1], dtype=torch.float64, device=d
    )[..., ::2],
    "a window of a larger one": lambda s, d: torch.randn(
        [n + 3 for n in s], dtype=torch.float64, device=d
    )[tuple(slice(1, n + 1) for n in s)],
    "expanded": lambda s, d: torch.randn(s[0], 1, *s[2:], dtype=torch.float64, device=d).expand(s),
    "offset by one": lambda s, d: torch.randn(math.prod(s) + 1, dtype=torch.float64, device=d)[
        1:
    ].view(s),
    "one number": lambda s, d: torch.randn((), dtype=torch.float64, device=d).expand(s),
}


def assert_equal(ours, eager):
    for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def tensors_for(name, layout, device):
    """x and the operands of a chain: those of x's rank in the layout, leaves all of them."""
    fused = fusegen.compile(CHAINS[name])
    shapes = {**_SHAPES, **OPERANDS.get(name, {})}
    x = LAYOUTS[layout](SHAPE, device)
    others = [
        LAYOUTS[layout](SHAPE, device)
        if shapes[operand] == SHAPE
        else torch.randn(shapes[operand], dtype=torch.float64, device=device)
        for operand in fused.chain.operands
    ]
    return fused, [t.requires_grad_() for t in (x, *others)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHAINS)
def test_x_and_operands_may_lie_anyhow(name, layout, device):
    fused, tensors = tensors_for(name, layout, device)
    assert_equal(outcome(fused, tensors), outcome(fused.reference, tensors))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHAINS)
def test_the_incoming_gradient_may_lie_anyhow(name, layout, device):
    fused, tensors = tensors_for(name, "contiguous", device)
    shape = fused(*tensors).shape
    cotangent = LAYOUTS[layout](shape, device)
    assert_equal(outcome(fused, tensors, cotangent), outcome(fused.reference, tensors, cotangent))


@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last", "every other element"])
@pytest.mark.parametrize("layout", ["channels_last", "permuted", "every other element", "expanded"])
def test_x_and_an_operand_may_lie_differently(x_layout, layout, device):
    fused = fusegen.compile("mul(other) | add(per_row) | gelu")
    x = LAYOUTS[x_layout](SHAPE, device).requires_grad_()
    other = LAYOUTS[layout](SHAPE, device).requires_grad_()
    per_row = torch.randn(8, 1, dtype=torch.float64, device=device).expand(8, 10).requires_grad_()
    cotangent = LAYOUTS[layout](SHAPE, device)
    tensors = [x, other, per_row]
    assert_equal(outcome(fused, tensors, cotangent), outcome(fused.reference, tensors, cotangent))


@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "permuted", "transposed", "offset by one"]
)
@pytest.mark.parametrize("name", ["pointwise", "window"])
def test_a_dense_layout_is_kept_as_eager_keeps_it(name, layout, device):
    if name == "window" and layout in ("permuted", "transposed"):
        pytest.skip("torch's pooling knows two layouts and makes other ones contiguous")
    fused, tensors = tensors_for(name, layout, device)
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert ours.result.stride() == eager.result.stride()
    assert ours.gradients[0].stride() == eager.gradients[0].stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "transposed"])
@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("size", [(6, 1, 1), (1, 6, 1, 1), ()])
def test_what_x_is_spread_over_keeps_its_layout(size, batch, layout, device):
    fused = fusegen.compile("sigmoid | mul(other) | add(bias) | silu")
    x = torch.randn(size, dtype=torch.float64, device=device)
    other = LAYOUTS[layout]((batch, *SHAPE[1:]), device)
    bias = torch.randn(6, 1, 1, dtype=torch.float64, device=device)
    tensors = [t.requires_grad_() for t in (x, other, bias)]
    cotangent = torch.randn_like(other)
    ours, eager = (outcome(f, tensors, cotangent) for f in (fused, fused.reference))
    assert_equal(ours, eager)
    for mine, theirs in ((ours.result, eager.result), (ours.gradients[1], eager.gradients[1])):
        pairs = zip(mine.shape, mine.stride(), theirs.stride(), strict=True)
        assert all(size == 1 or a == b for size, a, b in pairs)


@pytest.mark.parametrize("stride", [480, 1, 0, 7])
def test_the_stride_of_an_axis_of_one_does_not_change_the_order(stride):
    # It says nothing, but would move the axis, and so ask for another build at batch size one.
    found = memory_order((1, 6, 8, 10), (stride, 1, 60, 6))
    assert found == ((-4, -2, -1, -3), True)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_volumes_keep_their_layout(memory_format, device):
    x = torch.randn(2, 5, 4, 6, 7, dtype=torch.float64, device=device).contiguous(
        memory_format=memory_format
    )
    bias = torch.randn(5, 1, 1, 1, dtype=torch.float64, device=device)
    for text in (
        "leaky_relu(0.2) | add_channel",
        "leaky_relu(0.2) | mul_channel | max_pool3d((2, 2, 3))",
    ):
        fused = fusegen.compile(text)
        tensors = [x.requires_grad_(), bias.requires_grad_()]
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        assert_equal(ours, eager)
        assert ours.result.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("name", CHAINS)
def test_the_gradient_of_a_plain_sum_is_accepted(name, device):
    # torch hands a scalar expanded to the result's shape.
    fused, tensors = tensors_for(name, "contiguous", device)
    fused(*tensors).sum().backward()
    ours = [t.grad for t in tensors]
    for t in tensors:
        t.grad = None
    fused.reference(*tensors).sum().backward()
    for a, t in zip(ours, tensors, strict=True):
        torch.testing.assert_close(a, t.grad, rtol=1e-11, atol=1e-11)


# Sizes: no build depends on one, so these cost a launch each.

SIZES = [1, 2, 3, 7, 8, 15, 31, 32, 33, 63, 64, 65, 127, 255, 257, 1023, 1024, 1025, 4097]
LARGE = [16383, 16384, 16385, 65537, 100003]


def case(text, shapes, dtype, device):
    fused = fusegen.compile(text)
    tensors = [
        torch.randn(s, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes
    ]
    return fused, tensors


def assert_accurate(fused, tensors):
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(outcome(fused, tensors), outcome(fused.reference, tensors), exact, slack=32)


@pytest.mark.parametrize("size", SIZES + LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_vector_of_any_size(size, dtype, device):
    assert_accurate(*case("leaky_relu(0.2) | mul(other) | gelu", [(size,), (size,)], dtype, device))


@pytest.mark.parametrize("size", SIZES + LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_channels_of_any_inner_size(size, dtype, device):
    for channels in (1, 3):
        shapes = [(2, channels, size), (channels,)]
        assert_accurate(*case("leaky_relu(0.2) | add_channel | gelu", shapes, dtype, device))


@pytest.mark.parametrize("channels", SIZES + LARGE)
def test_any_number_of_innermost_channels(channels, device):
    for rows in (1, 5, 70) if channels < 5000 else (3,):
        shapes = [(rows, channels), (channels,)]
        assert_accurate(
            *case("leaky_relu(0.2) | add_channel(axis=-1) | gelu", shapes, torch.float32, device)
        )


# A row of one or two has the same result whatever its values: its gradient is rounding alone.
LONG_ENOUGH = [size for size in SIZES if size > 2]


@pytest.mark.parametrize("size", LONG_ENOUGH + LARGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_any_length(size, dtype, device):
    shapes = [(3, size), (size,), (size,)]
    assert_accurate(*case("layernorm(weight, bias) | gelu", shapes, dtype, device))


@pytest.mark.parametrize("size", LONG_ENOUGH)
def test_columns_of_any_length_and_distance(size, device):
    for shape in ((2, 5, size), (2, size, 1), (2, size, 3)):
        operand = (shape[1],)
        tensors = [shape, operand, operand]
        assert_accurate(
            *case("layernorm(weight, bias, axis=1) | gelu", tensors, torch.float32, device)
        )


@pytest.mark.parametrize("size", [2, 3, 7, 31, 32, 33, 65, 257])
def test_windows_of_any_image(size, device):
    for shape in ((2, 3, size, 4), (2, 3, 5, size)):
        fused, tensors = case(
            "add_channel | leaky_relu(0.2) | max_pool2d(2)", [shape, (3,)], torch.float32, device
        )
        assert_accurate(fused, tensors)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(8, 8), (7, 8), (8, 9), (5, 7)])
def test_the_edge_that_windows_leave_has_a_gradient_of_zero(size, layout, device):
    x = torch.randn(2, 4, *size, device=device).contiguous(memory_format=layout).requires_grad_()
    scale = torch.randn(4, device=device)
    result = fusegen.compile("mul_channel | max_pool2d(2)")(x, scale)
    torch.full_like(x, torch.nan)  # whoever is given this memory next finds it so
    (gradient,) = torch.autograd.grad(result.sum(), x)
    height, width = (n // 2 * 2 for n in size)
    assert torch.isfinite(gradient).all()
    assert not gradient[:, :, height:].any()
    assert not gradient[:, :, :, width:].any()
    assert gradient.count_nonzero() == result.numel()


@pytest.mark.parametrize("rows", [1, 2, 1000, 70001])
def test_many_short_rows(rows, device):
    shapes = [(rows, 3), (3,), (3,)]
    assert_accurate(*case("layernorm(weight, bias)", shapes, torch.float32, device))
    assert_accurate(*case("add_channel(axis=-1) | gelu", shapes[:2], torch.float32, device))


@pytest.mark.parametrize("rows", [1, 3])
def test_few_very_long_rows(rows, device):
    # More than one block's share on the GPU: these go over many blocks, in passes.
    length = (1 << 17) + 3
    shapes = [(rows, length), (length,), (length,)]
    assert_accurate(*case("layernorm(weight, bias) | gelu", shapes, torch.float32, device))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_empty_tensor_gives_an_empty_result_and_gradients(name, zero, device):
    shape = list(SHAPE)
    shape[zero] = 0
    if "window" in name and zero > 0:
        pytest.skip("torch pools empty batches only, and no window fits an empty image")
    if name == "row of two axes" and zero == 2:
        pytest.skip("normalized_shape is written in the chain")
    fused = fusegen.compile(CHAINS[name])
    shapes = {**_SHAPES, "other": tuple(shape), **OPERANDS.get(name, {})}
    if zero == 1 and name in ("pointwise", "column"):
        shapes |= {"bias": (0,), "weight": (0,)}
    tensors = [torch.randn(shape, device=device).requires_grad_()]
    tensors += [
        torch.randn(shapes[n], device=device).requires_grad_() for n in fused.chain.operands
    ]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    for name_, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        assert a.shape == b.shape, name_
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("text", ["gelu", "mul(other) | gelu", "add(1) | clamp(-1, 1)"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_one_element_and_no_axes_at_all(text, shape, device):
    fused = fusegen.compile(text)
    shapes = [shape] + [shape] * len(fused.chain.operands)
    assert_accurate(*case(text, shapes, torch.float32, device))


@pytest.mark.parametrize(
    ("x", "other"),
    [
        ((), (3,)),
        ((3,), ()),
        ((4, 1), (1, 5)),
        ((1,), (2, 3)),
        ((2, 3), (4, 1, 1)),
        ((1, 3), (0, 3)),
        ((5, 1, 2), (3, 1)),
    ],
)
def test_x_and_an_operand_broadcast_either_way(x, other, device):
    fused, tensors = case("mul(other) | gelu | add(other)", [x, other], torch.float64, device)
    assert_equal(outcome(fused, tensors), outcome(fused.reference, tensors))


def test_a_value_may_get_more_axes_after_a_row(device):
    # Axis 1 is x's last here, although the result has three.
    fused, tensors = case(
        "layernorm(axis=1, eps=0.1) | add(other)", [(3, 4), (2, 3, 4)], torch.float64, device
    )
    assert_equal(outcome(fused, tensors), outcome(fused.reference, tensors))


# Only the GPU has the room.


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(gpu):
    channels, inner = 3, (1 << 30) // 3 + 5  # 2 * 3 * inner exceeds 2**31
    shape = (2, channels, inner)
    try:
        x = torch.empty(shape, dtype=torch.bfloat16, device=gpu).normal_().requires_grad_()
        bias = torch.randn(channels, dtype=torch.bfloat16, device=gpu).requires_grad_()
        cotangent = torch.empty(shape, dtype=torch.bfloat16, device=gpu).normal_()
        fused = fusegen.compile("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu")
        result = fused(x, bias)
        d_x, d_bias = torch.autograd.grad(result, (x, bias), cotangent)
        exact = torch.zeros(channels, dtype=torch.float64, device=gpu)
        step = 1 << 24
        for begin in range(0, inner, step):
            part = [t[..., begin : begin + step] for t in (x.detach(), cotangent)]
            wide = [part[0].double().requires_grad_(), bias.detach().double().requires_grad_()]
            expected = fused.reference(*wide)
            d_part, d_share = torch.autograd.grad(expected, wide, part[1].double())
            exact += d_share
            for found, wanted in ((result, expected), (d_x, d_part)):
                found = found.detach()[..., begin : begin + step].double()
                assert (found - wanted).abs().max() <= 0.02 * wanted.abs().max()
        torch.testing.assert_close(d_bias.double(), exact, rtol=0.01, atol=1.0)
    finally:
        del x, bias, cotangent
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 262144), (4, 1 << 22), (1, (1 << 24) + 5)])
def test_rows_too_long_for_one_block(shape, gpu):
    sizes = [shape, shape[1:], shape[1:]]
    assert_accurate(*case("layernorm(weight, bias) | gelu", sizes, torch.float32, gpu))


@pytest.mark.parametrize(
    ("text", "x", "operands"),
    [
        ("mul(2) | reshape((-1, 2))", torch.zeros(2, 4), []),
        (
            "unflatten(1, (2, -1)) | select(1, 0) | mul(o)",
            torch.zeros(3, 8),
            [torch.ones(3, 8).chunk(2, 1)[0]],
        ),
        ("mul(g) | sum(0)", torch.zeros(4, 5, 8).transpose(0, 1), [torch.ones(5, 4, 1)]),
        ("flatten(1) | mul(2)", torch.zeros(2, 3, 4).transpose(1, 2), []),
    ],
)
def test_a_result_in_another_shape_may_be_written_to(text, x, operands, device):
    """Autograd lets nobody write to a view that a node of its graph gives."""
    fused = fusegen.compile(text)
    x, operands = x.to(device).requires_grad_(), [o.to(device) for o in operands]
    result = fused(x, *operands)
    result.mul_(2)
    result.sum().backward()
    eager = x.detach().clone().requires_grad_()
    fused.reference(eager, *operands).mul(2).sum().backward()
    assert torch.equal(x.grad, eager.grad)


LYING = {
    "parts of an operand": lambda x, e: x * (1 + e.chunk(2, 1)[0]) + e.chunk(2, 1)[1],
    "a bound for each sample": lambda x, e: x / x.abs().flatten(1).amax(1)[:, None, None, None],
    "a norm of each sample": lambda x, e: x / (x.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 1),
    "side by side": lambda x, e: torch.cat([torch.relu(x), torch.sigmoid(x)], 1),
    "the first part": lambda x, e: x.chunk(2, 1)[0] * 2,
}


@pytest.mark.parametrize("case", LYING)
def test_results_lie_in_memory_as_eagers_do(case, device):
    function = LYING[case]
    x, e = torch.randn(2, 8, 6, 5, device=device), torch.randn(2, 16, 1, 1, device=device)
    fused = fusegen.compile(function)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = x.detach().contiguous(memory_format=memory_format).requires_grad_()
        found, wanted = fused(x, e), function(x, e)
        torch.testing.assert_close(found, wanted)
        assert found.is_contiguous(memory_format=memory_format)
        ours, eager = (torch.autograd.grad(r.square().sum(), x)[0] for r in (found, wanted))
        # Of sums of squares, which are added up in another order.
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
