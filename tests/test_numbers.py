"""Every operation of the table against eager torch: result and gradients, in every element type."""

import math
from dataclasses import replace

import pytest
import torch
from numeric import (
    assert_as_accurate,
    assert_same_bits,
    cotangent_for,
    home_of_eager,
    outcome,
)

import fusegen
from fusegen import OPS, Chain, chain, ir
from fusegen.describe import has_gradient
from fusegen.ops import lookup

SHAPE = (2, 3, 4, 6, 5)
EVERYWHERE = frozenset(range(-len(SHAPE), 0))
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def kind_of(example: Chain) -> tuple[bool, bool]:
    """Whether a one-step chain wants conditions instead of numbers, and whether it gives one."""
    (step,) = example.steps
    for wants_truth in (False, True):
        x = ir.tensor("x", EVERYWHERE | {1, 2, 3}, len(SHAPE), "truth" if wants_truth else "number")
        parameters = [lookup(step.op).parameter(p) for p, _ in step.operands]
        operands = {
            p.name: "float16" if p.is_type else ir.tensor(p.name, EVERYWHERE, len(SHAPE), p.kind)
            for p in parameters
        }
        try:
            result = lookup(step.op).function(x, **operands, **dict(step.attributes))
        except Exception:
            continue
        return wants_truth, result.kind == "truth"
    raise AssertionError(f"{example} works on neither numbers nor conditions")


def whole(example: Chain) -> Chain:
    """The example between steps that make a condition of its input, and numbers of its result."""
    (step,) = example.steps
    wants_truth, gives_truth = kind_of(example)
    text = example.text
    if wants_truth and gives_truth and step.operands:
        # Operands are numbers, so the second condition is made from x as well.
        text = f"keep(y) | lt(0.3) | keep(is_low) | recall(y) | gt(-0.4) | {step.op}(is_low)"
    elif wants_truth:
        text = f"gt(0) | {text}"
    return chain(f"{text} | where(yes, no)" if gives_truth else text)


# What quantises has no gradient, and tests of its own.
EXAMPLES = [
    (name, i, whole(e))
    for name, op in OPS.items()
    for i, e in enumerate(op.examples)
    if name != "quantize"
]


# Attributes do not change how a type is read, computed in and written, nor what the compiler makes
# of it: one sample of each op shows that.
CASES = [
    pytest.param(
        *(name, example, DTYPES[dtype]),
        id=f"{example.text}-{dtype}",
        # fp16 is read and written as bf16 is; what is optimised of fp64 chains at random show.
        marks=[pytest.mark.unoptimised] * (dtype in ("fp16", "fp64") or i > 0),
    )
    for name, i, example in EXAMPLES
    for dtype in DTYPES
    if dtype == "fp32" or i == 0
]
each_case = pytest.mark.parametrize(("name", "example", "dtype"), CASES)


def shape_of(name: str) -> tuple[int, ...]:
    axes = OPS[name].window_axes or OPS[name].channel_axes
    return (*SHAPE[:2], *SHAPE[-axes:]) if axes else SHAPE


def operand_shapes(name: str, example: Chain) -> list[tuple[int, ...]]:
    shapes = []
    for operand in example.operands:
        step, parameter = example.uses(operand)[0]
        axis = dict(step.attributes).get("axis")
        sizes = {
            "broadcast": shape_of(name),
            "mask": shape_of(name),
            "slope": (SHAPE[1],),
            "channel": (SHAPE[1 if axis is None else axis],),
            "trailing": (SHAPE[-1 if axis is None else axis],),
            "labels": SHAPE[:1] + SHAPE[2:],
            "type": (7,),
        }
        shapes.append(sizes[parameter.placement])
    return shapes


def of_kind(example: Chain, operand: str, values: torch.Tensor) -> torch.Tensor:
    """The values as an operand holds such: themselves, conditions, or some of the classes."""
    kind = example.uses(operand)[0][1].kind
    if kind == "index":
        return values.detach().nan_to_num().abs().mul(1e3).long() % SHAPE[1]
    return values > 0 if kind == "truth" else values


def is_pointwise(name: str) -> bool:
    found = OPS[name]
    is_plain = found.shaping == "same" and found.window_axes == found.channel_axes == 0
    return found.ulp is not None and is_plain


def steps_apart(dtype: torch.dtype, name: str, device: str) -> float:
    """How far a result may be from eager's, in units of its type's epsilon.

    On the GPU both use CUDA's own functions, and what the table calls exact is equal to the last
    bit. On the CPU torch has vector functions of its own, even a square root that is not correctly
    rounded, and we have libmvec's, each within 4 ulp.
    """
    is_exact = OPS[name].ulp == 0 and dtype in (torch.float32, torch.float64)
    return 0.0 if is_exact and (device == "cuda" or name != "sqrt") else 8.0


@each_case
def test_an_op_is_as_accurate_as_eager(name, example, dtype, device):
    is_narrow = dtype in (torch.float16, torch.bfloat16)
    if name in ("avg_pool3d", "lp_pool3d") and device == "cpu" and is_narrow:
        pytest.skip("torch has no avg_pool3d of 16 bits on CPUs to compare with")
    tensors = [
        torch.randn(s, dtype=torch.float64)
        for s in (shape_of(name), *operand_shapes(name, example))
    ]
    # Half of x is small, so that a loss of relative accuracy near zero is seen.
    tensors[0].view(-1)[::2] *= 1e-3
    tensors = [t.to(device, dtype).requires_grad_() for t in tensors]
    for i, operand in enumerate(example.operands, start=1):
        has_none = not has_gradient(example, operand)
        tensors[i] = of_kind(example, operand, tensors[i].detach() if has_none else tensors[i])
    if name == "nll_loss":  # of logarithms of probabilities, whose sum does not cancel
        tensors[0] = tensors[0].detach().abs().neg().requires_grad_()
    fused = fusegen.compile(example)
    ours = outcome(fused, tensors)
    home = home_of_eager(name, device, dtype)
    eager = outcome(fused.reference, tensors, device=home)
    exact = outcome(fused.reference, tensors, dtype=torch.float64, device=home)
    if example.text == "norm(0, 1)":  # of which eager gives none, where it may be asked for
        assert not ours.gradients[0].any()
        eager, exact = (replace(o, gradients=ours.gradients) for o in (eager, exact))
    assert_as_accurate(ours, eager, exact)
    if is_pointwise(name):
        close = steps_apart(dtype, name, device) * torch.finfo(dtype).eps
        torch.testing.assert_close(
            ours.result, eager.result, rtol=close, atol=close, equal_nan=True
        )


def special_values(example: Chain, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, NaN, infinities, the largest and the smallest, and every kink of the
    attributes.
    """
    limits = torch.finfo(dtype)
    # A quarter of the range is left for factors: x times the incoming gradient must not overflow,
    # since where that happens depends on the order of multiplications.
    values = [0.0, math.nan, math.inf, limits.max / 16, limits.tiny, limits.eps, 3.0, 100.0, 1e-3]
    values += [1 - limits.eps, 1.0, 1 + limits.eps]
    for step in example.steps:
        for _, value in step.attributes:
            if isinstance(value, float):
                values += [value, 1 / value if value else 1.0]
    values += [-v for v in values]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("name", "example", "dtype"), [case for case in CASES if is_pointwise(case.values[0])]
)
def test_special_values_come_out_as_in_eager(name, example, dtype, device):
    values = special_values(example, dtype)
    n = len(values)
    x = values.repeat_interleave(n).reshape(1, 1, n, n)
    tensors = [x]
    for i, shape in enumerate(operand_shapes(name, example)):
        # The first operand meets every value of x with every special value of its own.
        operand = torch.randn(x.shape).to(dtype) if i else values.repeat(n).reshape(x.shape)
        operand = operand if len(shape) == len(SHAPE) else torch.tensor([0.75]).to(dtype)
        tensors.append(of_kind(example, example.operands[i], operand))
    tensors = [t.to(device).requires_grad_(t.is_floating_point()) for t in tensors]
    fused = fusegen.compile(example)
    ours = outcome(fused, tensors)
    home = home_of_eager(name, device, dtype)
    eager = outcome(fused.reference, tensors, device=home)
    wide = outcome(fused.reference, tensors, dtype=torch.float64, device=home)
    close = steps_apart(dtype, name, device) * torch.finfo(dtype).eps
    assert [g is None for g in ours.gradients] == [g is None for g in eager.gradients]
    for what, a, b, c in zip(ours.names, ours.tensors, eager.tensors, wide.tensors, strict=True):
        if a.shape != x.shape:
            continue  # a sum over all of them is NaN
        slack = close if what == "result" else 8 * torch.finfo(dtype).eps
        a, b, c = a.cpu(), b.cpu(), c.cpu()
        is_like = torch.isclose(a, b, rtol=slack, atol=slack, equal_nan=True)
        # A narrow type overflows in eager on the way, and torch's CPU erf gives NaN at infinity:
        # fp64 knows better.
        excused = (
            ~torch.isfinite(b)
            if dtype in (torch.float32, torch.float64)
            else torch.ones_like(is_like)
        )
        is_like |= excused & torch.isclose(a, c.to(a.dtype), rtol=slack, atol=slack, equal_nan=True)
        if name in ("fmod", "remainder"):  # NaN in torch's vector code for CPUs, of large quotients
            is_like |= b.isnan() & a.isfinite() & x.isfinite()
        if name == "remainder" and what == "gradient of input 1":  # of what is left there is none
            is_like |= b.isnan() & x.isinf()
        if what == "gradient of input 0" and len(tensors) == 1:
            # At NaN torch's vector code and its scalar code differ: the latter, as on the GPU.
            alone = torch.tensor([math.nan], dtype=dtype, device=device, requires_grad=True)
            (slope,) = outcome(fused.reference, [alone], torch.ones(1, device=device)).gradients
            share = slope.cpu() * cotangent_for(eager.result).cpu().to(dtype)
            is_like |= x.isnan() & torch.isclose(a, share, rtol=slack, atol=slack, equal_nan=True)
        wrong = [
            f"x = {v:g}: {p:g}, eager's {q:g}"
            for v, p, q in zip(
                x[~is_like].tolist(), a[~is_like].tolist(), b[~is_like].tolist(), strict=True
            )
        ]
        assert not wrong, f"{what}: {'; '.join(wrong[:5])}"


# Gradients at kinks, written out: torch's choices, whatever the reference says.


@pytest.mark.parametrize(
    ("text", "at", "slope"),
    [
        ("leaky_relu(0.2)", 0.0, 0.2),
        ("relu", 0.0, 0.0),
        ("abs", 0.0, 0.0),
        ("clamp(-1, 1)", -1.0, 1.0),
        ("clamp(-1, 1)", 1.0, 1.0),
        ("clamp(-1, 1)", math.nan, 0.0),
        ("clamp(max=1)", math.nan, 0.0),
        ("relu", math.nan, 1.0),
        ("maximum(0.5)", 0.5, 0.5),
        ("minimum(0.5)", 0.5, 0.5),
        ("sqrt", 0.0, math.inf),
        ("pow(2)", 0.0, 0.0),
    ],
)
def test_the_slope_at_a_kink_is_torchs(text, at, slope, device):
    x = torch.full((33,), at, device=device, requires_grad=True)
    result = fusegen.compile(text)(x)
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    torch.testing.assert_close(gradient, torch.full_like(x, slope), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "text",
    [
        "hardshrink(0.1)",
        "softshrink(0.1)",
        "threshold(0.1, 2.3)",
        "clamp(-0.1, 0.1)",
        "hardtanh(-0.1, 0.1)",
        "minimum(0.1)",
        "maximum(0.1)",
        *(f"keep(y) | {op}(0.1) | where(y, 0.5)" for op in ("lt", "le", "gt", "ge", "eq", "ne")),
    ],
)
def test_numbers_are_compared_as_the_type_of_x_has_them(text, dtype, device):
    # 0.1 is none of a narrow type's numbers: x can equal what is nearest, and not what is written.
    if device == "cpu" and text.startswith(("softshrink", "threshold")):
        pytest.skip("torch compares with the number itself on a CPU, on a GPU with the nearest")
    at = torch.tensor(0.1).to(dtype)
    around = [torch.nextafter(at, torch.tensor(to, dtype=dtype)) for to in (0.0, 1.0)]
    x = torch.stack([s * v for v in (at, *around) for s in (-1, 1)]).to(device)
    fused = fusegen.compile(text)
    ours, eager = (outcome(f, [x.clone().requires_grad_()]) for f in (fused, fused.reference))
    assert torch.equal(ours.gradients[0], eager.gradients[0])
    if text.startswith("softshrink"):  # torch subtracts the nearest, too, and not the number
        assert torch.equal(ours.result == 0, eager.result == 0)
    else:
        assert torch.equal(ours.result, eager.result)


def test_a_tie_is_shared_by_both_operands(device):
    x, other = (torch.zeros(33, device=device, requires_grad=True) for _ in range(2))
    result = fusegen.compile("maximum(other)")(x, other)
    for gradient in torch.autograd.grad(result.sum(), (x, other)):
        assert torch.equal(gradient, torch.full_like(x, 0.5))


def test_the_two_gelus_are_told_apart(device):
    # They differ by 4.7e-4 at most: 1e-5 tells them apart, 1e-3 does not.
    x = torch.linspace(-6, 6, 4001, device=device)
    exact, by_tanh = fusegen.compile("gelu")(x), fusegen.compile("gelu(approximate='tanh')")(x)
    gelu = torch.nn.functional.gelu
    torch.testing.assert_close(exact, gelu(x), rtol=0, atol=2e-6)
    torch.testing.assert_close(by_tanh, gelu(x, approximate="tanh"), rtol=0, atol=2e-6)
    assert 4e-4 < (exact - by_tanh).abs().max() < 5e-4


@pytest.mark.parametrize(("name", "ulp"), [("erf", 2.0), ("exp", 1.1)])
def test_a_function_of_our_own_is_right_over_all_floats(name, ulp):
    # Every 4,099th bit pattern: both signs, all exponents, subnormal numbers and results.
    bits = torch.arange(-(1 << 31), 1 << 31, 4099).to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat((x[torch.isfinite(x)], torch.tensor([0.0, -0.0, math.inf, -math.inf])))
    found, exact = fusegen.compile(name)(x), getattr(torch, name)(x.double())
    nearest = exact.float()
    assert torch.equal(torch.isinf(found), torch.isinf(nearest))
    magnitude = nearest.abs().clamp(max=torch.finfo(torch.float32).max / 2)
    spacing = torch.nextafter(magnitude, torch.tensor(math.inf)).double() - magnitude.double()
    error = (found.double() - exact).abs() / spacing
    assert error[torch.isfinite(nearest)].max() <= ulp
    assert torch.equal(torch.signbit(found), torch.signbit(nearest))
    assert torch.isnan(fusegen.compile(name)(torch.tensor([math.nan]))).all()


@pytest.mark.gpu
def test_chain_a_is_bitwise_equal_to_eager_on_the_gpu(gpu):
    # MEASURED.md: torch's own kernels of these steps are reproducible, so rounding step by step
    # gives its bits.
    x = torch.randn(4, 16, 6, 30, 31, device=gpu)
    bias = torch.randn(16, device=gpu)
    fused = fusegen.compile("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu")
    assert torch.equal(fused(x, bias), fused.reference(x, bias))


# Rows and windows: a NaN or an infinity stays within its own.


@pytest.mark.parametrize("text", ["layernorm", "layernorm(axis=1)", "max_pool2d(2)"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_stays_in_its_row_or_window(text, value, device):
    x = torch.randn(2, 3, 4, 6, device=device)
    x[0, 1, 2, 3] = value
    x.requires_grad_()
    fused = fusegen.compile(text)
    ours, eager = outcome(fused, [x]), outcome(fused.reference, [x])
    for name, a, b in zip(ours.names, ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_first_of_equal_maxima_gets_the_gradient(device):
    x = torch.zeros(1, 2, 5, 6, device=device, requires_grad=True)
    fused = fusegen.compile("max_pool2d(2)")
    assert_same_bits(outcome(fused, [x]), outcome(fused.reference, [x]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0.0, 100.0, 3e4])
def test_statistics_are_stable_far_from_zero(dtype, offset, device):
    # E[x^2] - E[x]^2 would lose every digit of the variance here.
    x = (torch.randn(40, 700, dtype=torch.float64) + offset).to(device, dtype).requires_grad_()
    weight, bias = (
        torch.randn(700, dtype=torch.float64).to(device, dtype).requires_grad_() for _ in range(2)
    )
    fused = fusegen.compile("layernorm(weight, bias)")
    tensors = [x, weight, bias]
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(outcome(fused, tensors), outcome(fused.reference, tensors), exact, slack=16)


def test_a_constant_row_is_normalised_to_zero(device):
    x = torch.full((3, 257), 7.1, device=device)
    assert torch.equal(fusegen.compile("layernorm")(x), torch.zeros_like(x))


@pytest.mark.parametrize(
    "shape", [(1 << 20, 2), (2, 2, 1 << 19), (1 << 14, 2, 64), (1 << 18, 2, 3)]
)
def test_long_sums_of_gradients_keep_their_digits(shape, device):
    # A running fp32 sum of a million ones and a bit would be off by thousands of roundings.
    x = torch.zeros(shape, device=device)
    bias = torch.zeros(2, device=device, requires_grad=True)
    result = fusegen.compile("add_channel")(x, bias)
    cotangent = torch.full_like(x, 1.1)
    (gradient,) = torch.autograd.grad(result, bias, cotangent)
    exact = cotangent.double().sum([axis for axis in range(x.dim()) if axis != 1])
    assert ((gradient - exact) / exact).abs().max() <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_what_is_an_integer_is_not_cut_off_below(dtype, device):
    """Of elements of 16 bits quotients and roots may be shorter ones, but not there."""
    y = torch.arange(1, 17, device=device, dtype=dtype).repeat(16)
    q = y.sort().values
    x = y * q  # up to 256, which all of these types hold
    for text in ("div(y) | floor", "div(y) | trunc", "div(y) | ceil", "div(y) | to('int32')"):
        assert torch.equal(fusegen.compile(text)(x, y=y).to(dtype), q), text
    halves = fusegen.compile("div(y) | add(0.5) | round")(x, y=y)
    assert torch.equal(halves, (q + 0.5).round())
    assert torch.equal(
        fusegen.compile("quantize(y)")(x.clamp(max=100) // y * y, y=y).to(dtype),
        (x.clamp(max=100) // y),
    )
    assert torch.equal(fusegen.compile("mul(y) | sqrt | floor")(y, y=y), y)
    assert torch.equal(fusegen.compile("fmod(y)")(x, y=y), torch.zeros_like(x))
