"""Inside torch.autocast a fused chain has the types that the eager chain has there."""

import pytest
import torch
from numeric import EPSILON, outcome
from test_numbers import EXAMPLES, of_kind, operand_shapes, shape_of
from torch._subclasses.fake_tensor import FakeTensorMode

import fusegen
from fusegen.autocasting import _NARROWED, _WIDENED, is_sensitive, under_autocast
from fusegen.bind import bind
from fusegen.layouts import dtype_name
from fusegen.ops import OPS

NARROW = (torch.bfloat16, torch.float16)
EACH = [(name, example) for name, i, example in EXAMPLES if i == 0]


def tensors_of(name, example, dtype, device):
    torch.manual_seed(2)
    found = [torch.rand(shape_of(name)).to(device, dtype).mul_(0.8).add_(0.1)]
    for operand, shape in zip(example.operands, operand_shapes(name, example), strict=True):
        # Parameters are fp32, as in a model that is trained under autocast.
        is_parameter = len(shape) == 1
        tensor = torch.rand(shape).to(device, torch.float32 if is_parameter else dtype)
        found.append(of_kind(example, operand, tensor))
    return [t.requires_grad_(t.is_floating_point()) for t in found]


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "example"), EACH, ids=[e.text for _, e in EACH])
def test_every_operation_has_eagers_type_under_autocast(name, example, dtype, device):
    if name == "rms_norm" and device == "cuda" and torch.__version__ < "2.13":
        pytest.skip("autocast's table is that of torch 2.13, where rms_norm is in fp32")
    tensors = tensors_of(name, example, dtype, device)
    narrow = torch.bfloat16 if dtype == torch.float32 else dtype
    with torch.no_grad(), torch.autocast(device, narrow):
        try:
            eager = fusegen.compile(example).reference(*tensors)
        except RuntimeError as error:
            pytest.skip(f"torch refuses it: {error}")
    # Without a build: what is built for these types, tests of the operations cover.
    x, *others = [(tuple(t.shape), dtype_name(t.dtype)) for t in tensors]
    operands = dict(zip(example.operands, others, strict=True))
    chain = under_autocast(example, x, operands, device, dtype_name(narrow))
    assert bind(chain, x, operands).dtype == dtype_name(eager.dtype)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "example"), EACH, ids=[e.text for _, e in EACH])
def test_every_operation_has_the_type_that_autocast_gives_on_a_gpu(name, example, dtype):
    """On tensors that have no values, so that no GPU is needed."""
    real = tensors_of(name, example, dtype, "cpu")
    narrow = torch.bfloat16 if dtype == torch.float32 else dtype
    was_on, was_narrow = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", narrow)
    try:
        with torch.no_grad(), FakeTensorMode():
            tensors = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in real]
            eager = fusegen.compile(example).reference(*tensors).dtype
    finally:
        torch.set_autocast_enabled("cuda", was_on)
        torch.set_autocast_dtype("cuda", was_narrow)
        torch.clear_autocast_cache()
    x, *others = [(tuple(t.shape), dtype_name(t.dtype)) for t in real]
    operands = dict(zip(example.operands, others, strict=True))
    chain = under_autocast(example, x, operands, "cuda", dtype_name(narrow))
    assert bind(chain, x, operands).dtype == dtype_name(eager)


CHAINS = {
    "norm": ("gelu | layernorm(weight, bias) | mul(0.5)", (3, 5, 8), [(8,), (8,)]),
    "volumes": ("leaky_relu(0.2) | mul_channel | max_pool3d(2)", (1, 3, 4, 4, 4), [(3,)]),
    "slopes": ("add(b) | prelu(w) | tanh", (2, 3, 5), [(5,), (3,)]),
    "slopes first": ("takes(w, b) | add(b) | prelu(w) | tanh", (2, 3, 5), [(3,), (5,)]),
    "exponentials": ("exp | log1p | mul(b) | softplus", (3, 8), [(8,)]),
    "a kept value": ("keep(y) | rsqrt | mul(y) | reciprocal | add(y)", (3, 8), []),
}


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_has_eagers_types_and_gradients_under_autocast(case, dtype, device):
    text, shape, others = CHAINS[case]
    torch.manual_seed(1)
    tensors = [torch.rand(shape).to(device, dtype) + 0.2]
    tensors = [t.requires_grad_() for t in (*tensors, *(torch.rand(s).to(device) for s in others))]
    fused = fusegen.compile(text)
    narrow = torch.bfloat16 if dtype == torch.float32 else dtype
    with torch.autocast(device, narrow):
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        again = outcome(fused, tensors)
    assert ours.result.dtype == eager.result.dtype
    assert [g.dtype for g in ours.gradients] == [t.dtype for t in tensors]
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    for a, b, c, d in zip(ours.tensors, eager.tensors, exact.tensors, again.tensors, strict=True):
        assert torch.equal(a, d)
        bound = 2 * (b.double() - c).abs().max() + 8 * EPSILON[narrow] * c.abs().max()
        assert (a.double() - c).abs().max() <= bound


def test_what_autocast_changes_is_forgotten_outside_of_it(device):
    fused = fusegen.compile("gelu | max_pool3d(2)")
    x = torch.randn(1, 2, 4, 4, 4, device=device).bfloat16()
    for _ in range(2):
        assert fused(x).dtype == torch.bfloat16
        with torch.autocast(device, torch.bfloat16):
            assert fused(x).dtype == fused.reference(x).dtype
            with torch.autocast(device, enabled=False):
                assert fused(x).dtype == torch.bfloat16
            out = torch.empty_like(fused(x))
            assert fused(x, out=out) is out


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("gelu | exp | mul(a) | layernorm", "gelu | to(float32) | exp | mul(a) | layernorm"),
        ("tanh | mul(a) | relu", "tanh | mul(a) | relu"),
        ("softplus | rdiv(2)", "to(float32) | softplus | rdiv(2)"),
        ("rdiv(2) | rdiv(a)", "to(float32) | rdiv(2) | rdiv(a)"),
        (
            "keep(y) | exp | mul(y) | recall(y) | tan",
            "keep(y) | to(float32) | exp | mul(y) | recall(y) | to(float32) | tan",
        ),
        ("to(float32) | prelu(w)", "to(float32) | to(float16) | prelu(w)"),
        ("to(float64) | exp", "to(float64) | exp"),
        (
            "max_pool1d(2, 1) | softmax(0) | max_pool1d(2, 1)",
            "max_pool1d(2, 1) | to(float32) | softmax(0) | max_pool1d(2, 1)",
        ),
        (
            "keep(y) | to(float32) | max_pool1d(2, 1) | recall(y) | exp",
            "keep(y) | to(float32) | max_pool1d(2, 1) | recall(y) | to(float32) | exp",
        ),
    ],
)
def test_casts_stand_where_autocast_has_them_on_a_gpu(text, wanted):
    chain = fusegen.chain(text)
    shapes = {name: ((3,) if name == "w" else (2, 3), "float16") for name in chain.operands}
    found = under_autocast(chain, ((2, 3), "float16"), shapes, "cuda", "float16")
    assert found == fusegen.chain(wanted)


def test_every_name_in_the_tables_is_an_operation():
    assert set(OPS) >= set().union(*_WIDENED.values(), _NARROWED)


def test_noise_and_segments_go_through_autocast(device):
    fused = fusegen.compile("max_pool3d(2) | layernorm | dropout(0.5) | max_pool3d(2)")
    x = torch.randn(1, 2, 8, 8, 8, device=device).bfloat16().requires_grad_()
    wanted = fusegen.compile(
        "to(float32) | max_pool3d(2) | layernorm | dropout(0.5) | to(float32) | max_pool3d(2)"
    )
    found = []
    for each in (fused, wanted):
        torch.manual_seed(4)
        with torch.autocast(device, torch.bfloat16, enabled=each is fused):
            found.append(outcome(each, [x]))
    if device == "cpu":  # whose autocast has pooling of volumes in fp32
        assert found[0].result.dtype == torch.float32
        assert torch.equal(found[0].result, found[1].result)
    assert found[0].gradients[0].dtype == torch.bfloat16


def test_only_what_autocast_may_change_asks_for_it():
    assert is_sensitive(fusegen.chain("gelu | exp"))
    assert is_sensitive(fusegen.chain("prelu"))
    assert not is_sensitive(fusegen.chain("gelu | add_channel | clamp(-1, 1)"))


def test_fp16_with_a_scaler_learns(device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, device=device)
    norm = torch.nn.LayerNorm(8, device=device)
    slope = torch.nn.Parameter(torch.full((1,), 0.25, device=device))
    fused = fusegen.compile("layernorm(weight, bias) | prelu(slope) | softplus")
    parameters = [*layer.parameters(), *norm.parameters(), slope]
    optimiser = torch.optim.SGD(parameters, lr=0.05)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=2.0**10)
    x = torch.randn(32, 8, device=device)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        with torch.autocast(torch.device(device).type, torch.float16):
            loss = (fused(layer(x), norm.weight, norm.bias, slope) - 0.5).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
    assert all(p.grad.dtype == torch.float32 for p in parameters)
    assert losses[-1] < 0.7 * losses[0]


def attention_pool(h, scores, mask):
    weights = torch.softmax(scores.masked_fill(~mask, -1e4), 1).unsqueeze(-1)
    return (h * weights).sum(1)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda x, n: x.exp() * n, lambda r: (r(2, 5), 3)),
        (lambda x, m: x.softmax(-1) * (1.0 - m), lambda r: (r(2, 5), r(5).long())),
        (attention_pool, lambda r: (r(2, 5, 16), r(2, 5), r(2, 5) > 0)),
    ],
    ids=["number", "integers", "axes"],
)
def test_a_function_is_traced_for_a_call_inside_too(function, given, device):
    given = given(lambda *shape: torch.randn(shape, device=device))
    kind = torch.device(device).type
    for fused in (fusegen.compile(function), used := fusegen.compile(function)):
        if fused is used:
            fused(*given)
        for _ in range(2):
            with torch.autocast(kind, torch.bfloat16):
                found, expected = fused(*given), function(*given)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(fused(*given), function(*given), rtol=1e-5, atol=1e-5)
