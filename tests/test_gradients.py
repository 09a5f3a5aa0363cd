"""Gradients of any order: which there are, that they are right, and what is kept for them."""

import pytest
import torch
from numeric import outcome

import fusegen
from fusegen import execution, prepared

# One chain for each way a derivative is scheduled: (chain, shape of x, shapes of the operands).
FAMILIES = {
    "pointwise": ("leaky_relu(0.2) | clamp(-1, 1) | gelu", (2, 3, 5), []),
    "pointwise of two tensors": ("mul(other) | tanh", (2, 3, 5), [(2, 3, 5)]),
    "inner sum": ("add_channel | gelu", (2, 3, 5), [(3,)]),
    "outer sum": ("mul_channel(axis=-1) | sigmoid", (4, 3, 5), [(5,)]),
    "sum of everything": ("mul(scale) | tanh", (2, 3, 5), [()]),
    "sums of several extents": (
        "mul(a) | add(b) | tanh | mul(c)",
        (2, 3, 4, 5),
        [(5,), (3, 1, 1), (4, 1)],
    ),
    "operand that widens x": ("mul(other) | sigmoid", (3, 1), [(2, 3, 4)]),
    "row": ("layernorm(weight, bias) | tanh", (3, 4, 5), [(5,), (5,)]),
    "row without parameters": ("layernorm | gelu", (3, 5), []),
    "row of two axes": ("layernorm(weight, normalized_shape=(4, 5)) | tanh", (3, 4, 5), [(4, 5)]),
    "column": ("layernorm(weight, bias, axis=1) | tanh", (2, 5, 3), [(5,), (5,)]),
    "two rows": ("layernorm(weight) | tanh | layernorm(scale)", (3, 5), [(5,), (5,)]),
    "row and column": ("layernorm(weight) | layernorm(axis=1)", (2, 4, 5), [(5,)]),
    "window": ("tanh | mul_channel | max_pool2d(2)", (2, 3, 4, 6), [(3,)]),
    "window with dropped edges": ("mul_channel | tanh | max_pool2d((2, 3))", (2, 3, 5, 7), [(3,)]),
    "window of a full operand": ("add(other) | tanh | max_pool2d(2)", (2, 2, 4, 5), [(2, 2, 4, 5)]),
    "window of an operand along one pooled axis": (
        "mul(other) | max_pool2d(2)",
        (2, 2, 4, 5),
        [(4, 1)],
    ),
    "window of volumes": ("leaky_relu(0.2) | mul_channel | max_pool3d(2)", (1, 2, 4, 4, 5), [(2,)]),
    "row, then window": (
        "layernorm(weight, bias) | tanh | max_pool2d(2)",
        (2, 2, 4, 5),
        [(5,), (5,)],
    ),
    "kept value": ("keep(y) | sigmoid | mul(y)", (2, 3, 5), []),
    "kept value around a row": ("keep(y) | layernorm(weight) | add(y) | tanh", (3, 5), [(5,)]),
    "one operand twice": ("mul(a) | tanh | add(a)", (2, 3, 5), [(5,)]),
}
each_family = pytest.mark.parametrize("family", FAMILIES)


def tensors_of(family, device, dtype=torch.float64):
    text, shape, others = FAMILIES[family]
    tensors = [
        torch.randn(s, dtype=dtype, device=device).requires_grad_() for s in (shape, *others)
    ]
    return fusegen.compile(text), tensors


@each_family
def test_gradcheck(family, device):
    fused, tensors = tensors_of(family, device)
    assert torch.autograd.gradcheck(fused, tensors)


@each_family
def test_gradgradcheck(family, device):
    fused, tensors = tensors_of(family, device)
    assert torch.autograd.gradgradcheck(fused, tensors)


@each_family
def test_second_derivatives_equal_eagers(family, device):
    fused, tensors = tensors_of(family, device)

    def twice(function):
        result = function(*tensors)
        first = torch.autograd.grad(result.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(
            sum(g.sin().sum() for g in first), tensors, allow_unused=True, materialize_grads=True
        )
        return [*first, *second]

    for ours, eager in zip(twice(fused), twice(fused.reference), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-9)


def test_third_derivatives_equal_those_of_the_formula(device):
    # torch 2.13's own layer_norm has a wrong third derivative, so the formula is spelled out.
    fused = fusegen.compile("mul(a) | tanh | layernorm(eps=0.1)")

    def formula(x, a):
        value = torch.tanh(x * a)
        centred = value - value.mean(-1, keepdim=True)
        return centred * torch.rsqrt(value.var(-1, correction=0, keepdim=True) + 0.1)

    tensors = [
        torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in ((3, 5), (5,))
    ]

    def third(function):
        found = [function(*tensors)]
        for _ in range(3):
            total = sum(t.sin().sum() for t in found)
            found = torch.autograd.grad(total, tensors, create_graph=True)
        return found

    for ours, eager in zip(third(fused), third(formula), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-8, atol=1e-8)


# Only for those that need one.


@each_family
def test_each_input_alone_may_need_a_gradient(family, device):
    fused, tensors = tensors_of(family, device)
    for i in range(len(tensors)):
        for j, t in enumerate(tensors):
            t.requires_grad_(i == j)
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        assert [g is None for g in ours.gradients] == [j != i for j in range(len(tensors))]
        torch.testing.assert_close(ours.gradients[i], eager.gradients[i], rtol=1e-9, atol=1e-9)


def test_a_gradient_that_nobody_needs_is_not_computed(device, monkeypatch):
    made = []
    real = prepared.derivative

    def noted(*arguments):
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(prepared, "derivative", noted)
    fused = fusegen.compile("add_channel | mul(other) | tanh")
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    bias, other = torch.randn(3, device=device), torch.randn(4, device=device, requires_grad=True)
    fused(x, bias, other).sum().backward()
    assert {found.targets for found in made} == {(0, 2)}
    assert all(len(found.program.output_names) == 2 for found in made)
    assert bias.grad is None


def test_both_terms_of_a_sum_get_one_gradient(device):
    fused = fusegen.compile("add(residual) | mul(gate) | tanh")
    shapes = ((5, 7), (5, 7), (5, 1))
    tensors = [torch.randn(s, device=device, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(fused, tensors)
    assert torch.autograd.gradgradcheck(fused, tensors)
    result = fused(*tensors)
    first, second, _ = torch.autograd.grad(result.sum(), tensors)
    assert first.data_ptr() == second.data_ptr()
    fused(*tensors).sum().backward()
    x, residual, _ = tensors
    x.grad.zero_()  # what a parameter keeps is its own
    assert residual.grad.abs().sum() > 0


def test_what_is_added_last_gets_the_incoming_gradient_itself(device):
    fused = fusegen.compile("mul(gate) | add(residual)")
    tensors = [
        torch.randn(s, device=device, dtype=torch.float64).requires_grad_()
        for s in ((5, 7), (7,), (5, 7))
    ]
    assert torch.autograd.gradcheck(fused, tensors)
    assert torch.autograd.gradgradcheck(fused, tensors)
    x, gate, residual = tensors
    cotangent = torch.randn(7, 5, device=device, dtype=torch.float64).t()
    found = torch.autograd.grad(fused(*tensors), tensors, cotangent)
    assert found[2].data_ptr() == cotangent.data_ptr()
    torch.testing.assert_close(found[0], cotangent * gate)
    torch.testing.assert_close(found[1], (cotangent * x).sum(0))
    (only,) = torch.autograd.grad(fused(*tensors), residual, cotangent)
    assert only.data_ptr() == cotangent.data_ptr()
    # What parameters keep is their own.
    leaf = residual.detach().requires_grad_()
    fused(x, gate, leaf).backward(cotangent)
    leaf.grad.zero_()
    assert cotangent.abs().sum() > 0


def test_a_sum_alone_has_nothing_to_launch_for_its_gradient(device, monkeypatch):
    fused = fusegen.compile("add(residual)")
    x, residual = (torch.randn(5, 7, device=device).requires_grad_() for _ in range(2))
    result = fused(x, residual)
    monkeypatch.setattr(execution, "launch", None)
    found = torch.autograd.grad(result, [x, residual], cotangent := torch.randn_like(result))
    assert {t.data_ptr() for t in found} == {cotangent.data_ptr()}


@pytest.mark.parametrize(
    ("text", "residual"),
    [
        ("mul(2) | add(residual) | flatten(1)", (3, 4, 5)),
        ("mul(2) | add(residual)", (4, 5)),
        ("mul(2) | add(residual)", (1, 4, 5)),
        ("mul(2) | add(residual) | to('float32')", (3, 4, 5)),
        ("mul(2) | sub(residual)", (3, 4, 5)),
        ("mul(2) | add(residual) | give(sum) | tanh", (3, 4, 5)),
    ],
)
def test_a_gradient_that_differs_from_the_incoming_one_is_its_own(text, residual, device):
    """By its shape, its type, its sign, or by what else comes in."""
    fused = fusegen.compile(text)
    tensors = [
        torch.randn(s, device=device, dtype=torch.float64).requires_grad_()
        for s in ((3, 4, 5), residual)
    ]
    results = fused(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    cotangents = [torch.randn_like(r) for r in results]
    found = torch.autograd.grad(results, tensors, cotangents)
    for gradient, tensor in zip(found, tensors, strict=True):
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        assert gradient.data_ptr() not in {c.data_ptr() for c in cotangents}
    if "to(" not in text:
        assert torch.autograd.gradcheck(fused, tensors)


def test_each_result_passes_its_own_gradient_on(device):
    fused = fusegen.compile("mul(2) | give(double) | add(residual)")
    x, residual = (torch.randn(5, 7, device=device).requires_grad_() for _ in range(2))
    results = fused(x, residual)
    cotangents = [torch.randn_like(r) for r in results]
    d_x, d_residual = torch.autograd.grad(results, [x, residual], cotangents)
    assert d_residual.data_ptr() == cotangents[0].data_ptr()
    torch.testing.assert_close(d_x, 2 * (cotangents[0] + cotangents[1]))


def test_terms_of_different_types_get_gradients_of_their_own(device):
    fused = fusegen.compile("add(residual) | tanh")
    x = torch.randn(5, 7, device=device).requires_grad_()
    residual = torch.randn(5, 7, device=device, dtype=torch.float16).requires_grad_()
    first, second = torch.autograd.grad(fused(x, residual).sum(), [x, residual])
    assert (first.dtype, second.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(first, second.float(), rtol=1e-3, atol=1e-3)


def test_without_a_need_there_is_no_graph(device):
    x = torch.randn(3, 4, device=device)
    fused = fusegen.compile("gelu")
    assert fused(x).grad_fn is None
    x.requires_grad_()
    with torch.no_grad():
        assert fused(x).grad_fn is None
    assert fused(x).grad_fn is not None


def test_an_operand_used_twice_gets_the_sum(device):
    a = torch.randn(5, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    result = fusegen.compile("mul(a) | add(a)")(x, a)
    (gradient,) = torch.autograd.grad(result.sum(), a)
    torch.testing.assert_close(gradient, x.sum(0) + 3)


def test_the_same_tensor_under_two_names_gets_both_shares(device):
    a = torch.randn(5, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    result = fusegen.compile("mul(a) | add(b)")(x, a, a)
    (gradient,) = torch.autograd.grad(result.sum(), a)
    torch.testing.assert_close(gradient, x.sum(0) + 3)


def test_x_itself_as_an_operand_gets_both_shares(device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fusegen.compile("mul(other)")(x, x).sum(), x)
    torch.testing.assert_close(gradient, 2 * x)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (1, 3, 1, 1)])
@pytest.mark.parametrize(
    "text", ["add_channel | gelu", "mul_channel | max_pool2d(2)", "layernorm(w, axis=1)"]
)
def test_a_per_channel_gradient_has_the_parameters_shape(text, shape, device):
    fused = fusegen.compile(text)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device).requires_grad_()
    operand = torch.randn(shape, dtype=torch.float64, device=device).requires_grad_()
    ours, eager = outcome(fused, [x, operand]), outcome(fused.reference, [x, operand])
    assert ours.gradients[1].shape == shape
    torch.testing.assert_close(ours.gradients, eager.gradients)


def test_an_fp32_operand_of_an_fp16_value_keeps_its_type(device):
    x = torch.randn(4, 6, dtype=torch.float16, device=device, requires_grad=True)
    other = torch.randn(6, device=device, requires_grad=True)
    result = fusegen.compile("mul(other) | gelu")(x, other)
    assert result.dtype == torch.float32
    d_x, d_other = torch.autograd.grad(result.sum(), (x, other))
    assert (d_x.dtype, d_other.dtype) == (torch.float16, torch.float32)


# What is kept for backward.


def saved_by(function):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = function()
    return result, saved


def test_a_pooled_chain_keeps_the_winners_alone(device):
    x = torch.randn(2, 3, 4, 6, 8, device=device, requires_grad=True)
    scale = torch.randn(3, device=device, requires_grad=True)
    fused = fusegen.compile("leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)")
    result, saved = saved_by(lambda: fused(x, scale))
    kept = {t.data_ptr(): t for t in saved if t.data_ptr() != scale.data_ptr()}.values()
    assert sorted(str(t.dtype) for t in kept) == ["torch.float32", "torch.uint8"]
    assert all(t.numel() == result.numel() for t in kept)
    assert x.data_ptr() not in {t.data_ptr() for t in saved}


@pytest.mark.parametrize(
    ("text", "keeps_x", "keeps_operand"),
    [
        ("add_channel", False, False),
        ("mul_channel(axis=1)", True, True),
        ("add_channel | gelu", True, True),
        ("mul(2) | add_channel | neg", False, False),
        ("gelu | add_channel", True, False),
    ],
)
def test_only_what_a_gradient_reads_is_kept(text, keeps_x, keeps_operand, device):
    x = torch.randn(2, 3, 4, device=device, requires_grad=True)
    operand = torch.randn(3, device=device, requires_grad=True)
    _, saved = saved_by(lambda: fusegen.compile(text)(x, operand))
    pointers = {t.data_ptr() for t in saved}
    assert (x.data_ptr() in pointers, operand.data_ptr() in pointers) == (keeps_x, keeps_operand)
    assert len(pointers) == keeps_x + keeps_operand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("add(a) | relu", ""),
        ("add_channel(b) | add(a) | relu", ""),
        ("add(a) | relu", "flatten(1)"),
        ("mul(0.5) | add(a) | softmax(-1)", ""),
        ("add(a) | softmax(1)", "flatten(1)"),
    ],
)
def test_behind_a_relu_or_softmax_the_result_is_kept_as_in_torch_and_nothing_else(
    text, tail, dtype, device
):
    torch.manual_seed(0)
    fused = fusegen.compile(f"{text} | {tail}" if tail else text)
    shapes = {"a": (2, 3, 5), "b": (3,)}
    tensors = [torch.randn(2, 3, 5, device=device, dtype=dtype, requires_grad=True)]
    tensors += [
        torch.randn(shapes[n], device=device, dtype=dtype, requires_grad=True)
        for n in fused.chain.operands
    ]
    result, saved = saved_by(lambda: fused(*tensors))
    assert {t.data_ptr() for t in saved} == {result.data_ptr()}
    torch.testing.assert_close(result, fused.reference(*tensors))
    seed = torch.randn_like(result)
    found = torch.autograd.grad(result, tensors, seed)
    wanted = torch.autograd.grad(fused.reference(*tensors), tensors, seed)
    for a, b in zip(found, wanted, strict=True):
        # Of narrow ones, differences of what nearly cancels, of rounded results.
        close = {"rtol": 0.02, "atol": 2e-3} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(a, b, **close)
    result = fused(*tensors)
    result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result, tensors, seed)


@pytest.mark.parametrize("text", ["layernorm | relu", "layernorm | softmax(-1)"])
def test_what_is_read_anyway_is_kept_in_place_of_the_result(text, device):
    x = torch.randn(4, 6, device=device, requires_grad=True)
    result, saved = saved_by(lambda: fusegen.compile(text)(x))
    pointers = {t.data_ptr() for t in saved}
    assert x.data_ptr() in pointers
    assert result.data_ptr() not in pointers


def test_changing_what_is_kept_is_torchs_own_error(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    value = x * 1
    result = fusegen.compile("gelu")(value)
    value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_writing_through_out_is_a_change_that_torch_sees(device):
    x = torch.randn(3, 4, device=device)
    kept = torch.randn(3, 4, device=device, requires_grad=True) * 1
    result = fusegen.compile("gelu")(kept)
    fusegen.compile("relu")(x, out=kept.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# Autograd's other ways.


def test_backward_twice_needs_retain_graph(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    result = fusegen.compile("gelu")(x).sum()
    result.backward(retain_graph=True)
    once = x.grad.clone()
    result.backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


def test_a_checkpoint_computes_it_again(device):
    fused = fusegen.compile("layernorm(weight, bias) | gelu")
    tensors = [torch.randn(s, device=device).requires_grad_() for s in ((4, 6), (6,), (6,))]

    def checkpointed(*inputs):
        return torch.utils.checkpoint.checkpoint(fused, *inputs, use_reentrant=False)

    ours, plain = outcome(checkpointed, tensors), outcome(fused, tensors)
    for a, b in zip(ours.tensors, plain.tensors, strict=True):
        assert torch.equal(a, b)


def test_a_gradient_hook_runs(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    value = x * 1
    seen = []
    value.register_hook(lambda g: seen.append(g.shape))
    fusegen.compile("gelu")(value).sum().backward()
    assert seen == [(3, 4)]


def test_a_result_may_be_changed_in_place(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    result = fusegen.compile("gelu")(x)
    result.mul_(2)
    result.sum().backward()
    expected = x.detach().requires_grad_()
    (2 * torch.nn.functional.gelu(expected)).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_gradients_accumulate_into_parameters(device):
    scale = torch.nn.Parameter(torch.ones(3, device=device))
    fused = fusegen.compile("mul_channel")
    for _ in range(2):
        fused(torch.ones(2, 3, 4, device=device), scale).sum().backward()
    assert torch.equal(scale.grad, torch.full((3,), 16.0, device=device))


def test_scaled_training_in_half_precision(device):
    # What a GradScaler does: a large factor on the loss, gradients divided by it, a step skipped on
    # overflow.
    layer = torch.nn.Linear(8, 8, device=device)
    bias = torch.nn.Parameter(torch.zeros(8, device=device))
    fused = fusegen.compile("add(bias) | gelu")
    optimiser = torch.optim.SGD([*layer.parameters(), bias], lr=0.1)
    scaler = torch.amp.GradScaler(torch.device(device).type)
    x = torch.randn(16, 8, device=device)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        with torch.autocast(torch.device(device).type, torch.float16):
            loss = (fused(layer(x), bias) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("keep(y) | add(p) | detach | mul(y) | gelu", [(4,)]),
        ("keep(y) | detach | keep(o) | recall(y) | add(p) | add(o) | mul(o) | add(o)", [(4,)]),
        ("detach | mul(p)", [(4,)]),
        ("softmax(-1) | keep(y) | max(-1, keepdim=True) | detach | rsub(y) | exp", []),
        ("keep(y) | sigmoid | detach | mul(y) | sum(-1)", []),
        ("keep(y) | operand(p) | detach | mul(y)", [(4,)]),
        ("sigmoid | detach | mul(2)", []),
    ],
)
def test_no_gradient_goes_through_what_is_detached(text, others, device):
    fused = fusegen.compile(text)
    tensors = [torch.randn(s, dtype=torch.float64, device=device) for s in ((3, 4), *others)]
    tensors = [t.requires_grad_() for t in tensors]
    ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
    assert fused(*tensors).requires_grad == fused.reference(*tensors).requires_grad
    assert [g is None for g in ours.gradients] == [g is None for g in eager.gradients]
    for mine, theirs in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_what_is_detached_is_constant_to_the_second_derivative_too(device):
    fused = fusegen.compile("keep(y) | sin | detach | mul(y) | exp")
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    found = []
    for function in (fused, fused.reference):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), x)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("sign | avg_pool2d(3, 1)", (2, 3, 9, 8)),
        ("avg_pool2d(3, 1) | floor", (2, 3, 9, 8)),
        ("adaptive_avg_pool2d(3) | floor | gelu", (2, 3, 11, 8)),
        ("keep(y) | avg_pool2d(3, 1, 1) | sign | mul(y)", (2, 3, 5, 8)),
        ("avg_pool1d(3, 1) | sign", (2, 3, 17)),
        ("avg_pool2d(2) | floor", (2, 3, 8, 8)),
    ],
)
def test_a_gradient_that_is_zero_everywhere_is_one(text, shape, device):
    fused = fusegen.compile(text)
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    torch.testing.assert_close(ours.result, eager.result)
    torch.testing.assert_close(ours.gradients[0], eager.gradients[0])


@pytest.mark.parametrize(
    "text", ["round | mul(s)", "sign | softmax(-1) | mul(s)", "floor | rms_norm(s, eps=1e-05)"]
)
def test_the_second_derivative_may_have_nothing_to_read(text, device):
    """As of a scale behind a step that quantises, with a penalty on its gradient."""
    x = torch.randn(4, 8, dtype=torch.float64, device=device, requires_grad=True)
    s = torch.rand(8, dtype=torch.float64, device=device, requires_grad=True)
    fused = fusegen.compile(text)
    found = []
    for function in (fused, fused.reference):
        (gradient,) = torch.autograd.grad(function(x, s).sum(), s, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*found)
    assert torch.equal(found[0], torch.zeros_like(x))


@pytest.mark.parametrize(
    ("text", "shape"), [("keep(y) | operand(p) | gelu", (4, 8)), ("to(float32) | operand(p)", (8,))]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_x_may_be_of_a_type_that_nothing_else_has(text, shape, dtype, device):
    fused = fusegen.compile(text)
    x, p = torch.randn(4, 8, device=device).to(dtype), torch.randn(shape, device=device)
    torch.testing.assert_close(fused(x, p), fused.reference(x, p))


@pytest.mark.parametrize(
    "text", ["abs | square | mean", "abs", "norm(3, 0)", "abs | add(1) | rdiv(2)"]
)
def test_what_is_no_number_has_torchs_gradient_behind_a_magnitude(text, device):
    fused = fusegen.compile(text)
    x = torch.tensor([float("nan"), 1.0, -2.0, 0.0], device=device, requires_grad=True)
    ours, eager = (torch.autograd.grad(f(x).sum(), x)[0] for f in (fused, fused.reference))
    torch.testing.assert_close(ours, eager, equal_nan=True)
