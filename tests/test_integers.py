"""Tensors of integers in a chain: pictures, quantised weights, masks that are numbers."""

import inspect
import operator

import pytest
import torch
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen.describe import Situation, sources
from fusegen.errors import ArgumentError
from fusegen.promotion import INTEGERS

X = (3, 4, 6, 10)
CHANNELS = (4,)
# x first: its type, and then those of the operands; where nothing is said, that of the test
CASES = {
    "a picture": (
        "to('float32') | div(255) | sub_channel(mean) | div_channel(std)",
        [(X, "uint8"), (CHANNELS, None), (CHANNELS, None)],
    ),
    "a picture, divided": ("div(255) | gelu", [(X, "uint8")]),
    "a picture in half precision": ("to('float16') | mul(0.5) | max_pool2d(2)", [(X, "uint8")]),
    "a picture in rows": ("to('float32') | layernorm(w)", [(X, "int16"), ((10,), None)]),
    "long integers": ("to('float64') | mul(3) | add(1)", [(X, "int64")]),
    "quantised weights": ("mul(scale) | add(x2)", [(X, "int8"), ((4, 1, 1), None), (X, None)]),
    "quantised to the type of a scale": (
        "type_as(scale) | mul_channel(scale)",
        [(X, "int8"), (CHANNELS, None)],
    ),
    "cast and quantised again": ("div(0.5) | quantize(0.25)", [(X, "int8")]),
    "a mask": ("mul(mask) | gelu", [(X, None), ((3, 1, 6, 10), "int64")]),
    "a mask by position": ("gelu | mul(mask) | sum(-1)", [(X, None), ((6, 1), "int32")]),
    "a mask by row": (
        "layernorm(w) | mul(mask)",
        [(X, None), ((10,), None), ((*X[:-1], 1), "uint8")],
    ),
    "a mask by channel": (
        "mul_channel(mask) | add(b)",
        [(X, None), (CHANNELS, "int16"), ((), None)],
    ),
    "a number": ("add(n) | sigmoid", [(X, None), ((), "int32")]),
    "a mask that is compared": (
        "keep(y) | operand(mask) | ne(0) | keep(c) | recall(y) | masked_fill(c, -1)",
        [(X, None), ((6, 10), "int64")],
    ),
    "x that is compared": ("keep(y) | gt(3) | where(a, b)", [(X, "int32"), (X, None), ((), None)]),
    "compared with x": ("keep(y) | gt(n) | where(y, 0.5)", [(X, None), (X, "int16")]),
    "positions that are compared": (
        "keep(y) | operand(q) | lt(k) | keep(c) | recall(y) | masked_fill(c, -1e4) | softmax(-1)",
        [(X, None), ((6, 1), "int64"), ((10,), "int32")],
    ),
    "compared, and added": (
        "add(n) | keep(y) | operand(n) | eq(m) | keep(c) | recall(y) | masked_fill(c, 0.5)",
        [(X, None), (X, "int64"), (X, "uint8")],
    ),
    "halved": ("mul(0.5) | add_channel(b)", [(X, "int64"), (CHANNELS, None)]),
    "alone": (
        "keep(y) | operand(mask) | to('float32') | sum(-1, keepdim=True) | keep(n) | recall(y) | "
        "mul(mask) | sum(-1, keepdim=True) | div(n)",
        [(X, None), (X, "uint8")],
    ),
    "beside windows": ("mul(mask) | avg_pool2d(2)", [(X, None), ((6, 10), "int64")]),
    "behind windows": ("max_pool2d(2) | mul(mask)", [(X, None), ((3, 5), "int64")]),
    "sliding windows": ("mul(mask) | max_pool2d(3, 1, 1)", [(X, None), (X, "int8")]),
    "over channels": ("mul(mask) | softmax(1)", [(X, None), (X, "int64")]),
    "over all": ("sub(n) | square | mean", [(X, None), (X, "int32")]),
}
LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
}


def integers(shape, dtype, device, *, most=100):
    info = torch.iinfo(dtype)
    bounds = max(info.min, -most), min(info.max, most)
    return torch.randint(*bounds, shape, dtype=dtype, device=device)


def tensors_of(kinds, dtype, device, lay=lambda t: t):
    found = []
    for shape, name in kinds:
        if name is None:
            found.append(lay(torch.rand(shape, device=device, dtype=dtype) + 0.5).requires_grad_())
        else:
            found.append(lay(integers(shape, getattr(torch, name), device)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_integers_are_met_as_eager_meets_them(case, layout, device):
    text, kinds = CASES[case]
    fused = fusegen.compile(text)
    is_fixed = "float32" in text or layout != "contiguous"
    for dtype in (torch.float32, torch.float64, torch.bfloat16)[: 1 if is_fixed else None]:
        tensors = tensors_of(kinds, dtype, device, LAYOUTS[layout])
        ours, eager = outcome(fused, tensors), outcome(fused.reference, tensors)
        exact = eager
        if "float32" not in text:
            exact = outcome(fused.reference, tensors, dtype=torch.float64)
        assert ours.result.dtype == eager.result.dtype
        assert_as_accurate(ours, eager, exact)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_integer_becomes_what_eager_makes_of_it(name, dtype, device):
    kind = getattr(torch, name)
    info = torch.iinfo(kind)
    some = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 257, 2049, 16777217]
    some = torch.tensor([n for n in some if n <= info.max], dtype=kind, device=device)
    whole = torch.cat((some, integers((5000,), kind, device, most=info.max)))
    text = str(dtype).removeprefix("torch.")
    cast = fusegen.compile(f"to({text!r})")
    assert torch.equal(cast(whole), whole.to(dtype))
    ones = torch.ones(whole.shape, dtype=dtype, device=device)
    product = fusegen.compile("mul(n)")
    assert torch.equal(product(ones, n=whole), ones * whole)
    assert torch.equal(fusegen.compile("mul(n)")(whole, n=ones), whole * ones)


@pytest.mark.parametrize("compare", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_integers_are_compared_with_a_number(compare, device):
    x = torch.arange(-50, 51, device=device)
    for number in (0.0, 3.0, 2.5, -7.0, 16777215.0):
        found = fusegen.compile(f"{compare}({number})")(x)
        assert torch.equal(found, getattr(operator, compare)(x, number))


@pytest.mark.parametrize("compare", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("other", INTEGERS)
def test_integers_are_compared_with_others_by_all_of_their_digits(compare, other, device):
    kind = getattr(torch, other)
    many = [0, 1, -1, 2**24 + 1, 2**24, 2**53 + 1, 2**53, -(2**62) - 1, 127, 255]
    x = torch.tensor(many, device=device)
    n = x.roll(1).to(kind).repeat(2)
    x = torch.cat((x, x))
    assert torch.equal(fusegen.compile(f"{compare}(n)")(x, n), getattr(operator, compare)(x, n))


def test_a_function_makes_causal_and_segment_masks_of_integers(device):
    def scores(x, query, key, mine, others):
        x = x.masked_fill(key[None] > query[:, None], float("-inf"))
        return torch.where(mine[:, :, None] == others[:, None], x, -1e4).softmax(-1)

    x = torch.randn(3, 7, 7, device=device)
    places = torch.arange(7, device=device)
    segments = integers((3, 7), torch.int64, device, most=2)
    given = x, places, places.clone(), segments, segments.clone()
    torch.testing.assert_close(fusegen.compile(scores)(*given), scores(*given))


def test_a_model_that_pools_tokens_by_its_mask(device):
    def pooled(x, mask):
        weights = mask.unsqueeze(-1).float()
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)

    x = torch.randn(3, 7, 16, device=device, requires_grad=True)
    mask = integers((3, 7), torch.int64, device, most=1).abs()
    fused = fusegen.compile(pooled)
    ours, eager = outcome(fused, [x, mask]), outcome(pooled, [x, mask])
    for a, b in zip(ours.tensors, eager.tensors, strict=True):
        torch.testing.assert_close(a, b)


def test_a_function_makes_conditions_of_integers(device):
    def hidden(x, mask):
        return x.masked_fill(~mask.bool(), -1e4).softmax(-1)

    x = torch.randn(3, 7, 16, device=device)
    mask = integers((16,), torch.int64, device, most=1).abs()
    torch.testing.assert_close(fusegen.compile(hidden)(x, mask), hidden(x, mask))
    held = mask > 0
    torch.testing.assert_close(fusegen.compile(hidden)(x, held), hidden(x, held))


# Computed of integers, and of conditions, before they meet what is none.
ALONE = {
    "one less": lambda x, m: x + (1 - m) * -1000,
    "a product": lambda x, m, n: x * (m * n + 2),
    "a distance": lambda x, m, n: x + (m - n).abs(),
    "a difference as numbers": lambda x, m, n: (m - n).float() * x,
    "negated": lambda x, m: x * -m,
    "bounded": lambda x, m, n: x * m.clamp(1, 3) + n.clamp(max=2),
    "the larger": lambda x, m, n: x * torch.maximum(m, n) - torch.minimum(m, n),
    "rectified": lambda x, m: x * torch.nn.functional.relu(m - 2),
    "squared": lambda x, m, n: x * torch.square(m - n),
    "chosen": lambda x, m, n: x * torch.where(m > n, m, n * 2),
    "masked": lambda x, m, n: x * m.masked_fill(n > 2, 5),
    "sums compared": lambda x, m, n: x.masked_fill(m + n > 4, 0.0) * (m + 1 == n),
    "a mean": lambda x, m: (x * m).sum(-1) / m.sum(-1).clamp(min=1),
    "added up": lambda x, m, n: x * (m * n).sum(-1, keepdim=True) - n.sum(),
    "a type's smallest": lambda x, m, n: x + (m - m - 100) * (n - n + 2),
    "beside floats": lambda x, m, n: x + (1.0 - m) * -1000.0 + n * 2.0,
    "floats and a bound": lambda x, m, n: x * m.clamp(min=2.0) + torch.where(n > 1, n, 1.0),
    "counted": lambda x: x / (x > 0).sum(-1, keepdim=True).clamp(min=1),
    "where it holds": lambda x, m: (x * (m > 1)).sum(-1) / (m > 1).sum(-1).clamp(min=1e-6),
}


# How integers are read is the same whatever they meet.
MET = [(torch.float32, whole) for whole in INTEGERS]
MET += [(dtype, w) for dtype in (torch.bfloat16, torch.float64) for w in ("uint8", "int64")]


@pytest.mark.parametrize(("dtype", "whole"), MET, ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_what_is_computed_of_integers_alone_is_eagers(name, whole, dtype, device):
    function, kind = ALONE[name], getattr(torch, whole)
    fused = fusegen.compile(function)
    for shape in ((6, 40), (3, 5, 17)):
        x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        count = len(inspect.signature(function).parameters) - 1
        others = [torch.randint(0, 5, shape, dtype=kind, device=device) for _ in range(count)]
        got, wanted = fused(x, *others), function(x, *others)
        assert got.dtype == wanted.dtype
        exact = function(x.detach().double(), *others)
        close = 16 * torch.finfo(dtype).eps * exact.abs().max()
        assert ((got - exact).abs().max() <= close).item()
        (ours,), (eagers,) = (torch.autograd.grad(y.sum(), x) for y in (got, wanted))
        torch.testing.assert_close(ours, eagers, rtol=0.05, atol=0.05)


# Conditions that meet numbers.
CONDITIONS = {
    "an integer": lambda x, c: x + c * 2,
    "a float": lambda x, c: x + c * 2.0,
    "one more": lambda x, c: x * (c + 1) - (c * 3 - 1),
    "one more, a float": lambda x, c: x * (c + 1.0),
    "each other": lambda x, c: x * (c * c) + (c + c),
    "as integers": lambda x, c: x + (1 - c.long()) * -1000,
    "compared": lambda x, c: x + (x > 0) * 2 + c * (x > 0),
    "compared, a float": lambda x, c: x + (x > 0) * 2.0 * c,
    "compared, a part": lambda x, c: c * x + (x > 0) * 0.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_meet_numbers_as_in_eager(name, dtype, device):
    function = CONDITIONS[name]
    x = torch.randn(6, 40, dtype=dtype, device=device)
    held = torch.rand(6, 40, device=device) > 0.5
    found, wanted = fusegen.compile(function)(x, held), function(x, held)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)


def test_no_digit_of_large_integers_is_lost(device):
    m = torch.tensor([2**53 + 1, -(2**60) + 3, 2**24 + 1], device=device)
    n = torch.tensor([2**53, -(2**60), 2**24], device=device)
    x = torch.ones(3, device=device)
    fused = fusegen.compile("keep(y) | operand(m) | sub(n) | mul(3) | mul(y)")
    assert fused(x, m, n).tolist() == [3.0, 9.0, 3.0]


BIG = 2**24 + 1  # which float32 has not
# Moved, met by itself, or by conditions: no digit is lost.
MOVED = {
    "copied": lambda m: m.clone(),
    "in a row": lambda m: m.flatten(),
    "with an axis": lambda m: m.unsqueeze(1),
    "one column": lambda m: m[:, 0],
    "a part": lambda m: m.chunk(3, 1)[0],
    "beside itself": lambda m: torch.cat([m, m], 1),
    "alike": lambda m: m[:, None, :] == m[:, :, None],
    "off each other": lambda m: m[:, None] - m[:, :, None],
    "where positive": lambda m: (m > 0) * m,
    "one more where positive": lambda m: m + (m > 0),
    "a product where large": lambda m: (m * m > 100) * m,
}


@pytest.mark.parametrize("whole", ["int32", "int64"])
@pytest.mark.parametrize("name", MOVED)
def test_integers_keep_all_of_their_digits(name, whole, device):
    function = MOVED[name]
    m = torch.tensor([[BIG, -7, 3], [5, -BIG, 2 * BIG - 1]], dtype=getattr(torch, whole))
    m = m.to(device)
    found, wanted = fusegen.compile(function)(m), function(m)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_the_largest_integers_are_moved_as_they_are(device):
    m = torch.tensor([2**63 - 1, -(2**63), 2**62 + 1], device=device)
    kept = torch.tensor([True, False, True], device=device)
    for text in ("clone", "flatten", "unsqueeze(0)"):
        fused = fusegen.compile(text)
        assert torch.equal(fused(m), fused.reference(m))
    assert torch.equal(fusegen.compile("mul(c)")(m, kept), m * kept)


# By a number that is written: // and % round down, fmod and div(rounding_mode="trunc") cut off.
DIVIDED = {
    "//": lambda m, n: m // n,
    "%": lambda m, n: m % n,
    "fmod": lambda m, n: m.fmod(n),
    "trunc": lambda m, n: torch.div(m, n, rounding_mode="trunc"),
    "floor": lambda m, n: torch.div(m, n, rounding_mode="floor"),
}


@pytest.mark.parametrize("whole", INTEGERS)
@pytest.mark.parametrize("name", DIVIDED)
def test_integers_are_divided_by_integers(name, whole, device):
    kind, limits = getattr(torch, whole), torch.iinfo(getattr(torch, whole))
    m = torch.tensor([limits.min, limits.max, limits.max - 1, 0, 1, 7, 8], dtype=kind)
    m = torch.cat([m, -m[4:]]).to(device)
    for number in (1, 2, 3, 7, *(() if whole == "uint8" else (-1, -2, -3))):
        given = m[1:] if number == -1 else m  # the least has no opposite; torch dies of it
        found = fusegen.compile(lambda m, n=number: DIVIDED[name](m, n))(given)
        wanted = DIVIDED[name](given, number)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_an_integer_is_rounded_to_itself_and_has_a_sign(device):
    for whole in INTEGERS:
        m = torch.tensor([0, 1, 100, 3], dtype=getattr(torch, whole), device=device)
        m = m if whole == "uint8" else torch.cat([m, -m])
        for name in ("floor", "ceil", "round", "trunc", "sign"):
            found = fusegen.compile(lambda m, name=name: getattr(m, name)())(m)
            assert found.dtype == m.dtype
            assert torch.equal(found, getattr(m, name)())


def test_places_are_told_apart_by_their_remainders(device):
    def striped(x, places):
        return torch.where(places // 4 % 2 == 0, x, -x) * (places % 3 != 1)

    x, places = torch.randn(5, 40, device=device), torch.arange(40, device=device)
    assert torch.equal(fusegen.compile(striped)(x, places), striped(x, places))


@pytest.mark.parametrize("whole", INTEGERS)
def test_integers_wrap_where_their_type_ends(whole, device):
    kind = getattr(torch, whole)
    limits = torch.iinfo(kind)
    m = torch.tensor([limits.min, limits.max, 1, 0], dtype=kind, device=device)
    x = torch.ones(4, dtype=torch.float64, device=device)
    for function in (lambda x, m: x + (m + 1), lambda x, m: x - m * 3, lambda x, m: x * (-m)):
        if whole != "int64":  # where C has no such promise
            assert torch.equal(fusegen.compile(function)(x, m), function(x, m))
    absolute = fusegen.compile(lambda x, m: x + m.abs())
    if whole != "int64":
        assert torch.equal(absolute(x, m), x + m.abs())


@pytest.mark.parametrize("whole", ["uint8", "int64"])
def test_a_picture_meets_floats_and_integers_as_in_eager(whole, device):
    x = torch.randint(0, 200, (2, 3, 8, 9), dtype=getattr(torch, whole), device=device)
    for function in (
        lambda x: x * 2.0 - 1.0,
        lambda x: (x * 2 + 1) / 3,
        lambda x: (x - 100).float(),
        lambda x: x / 255.0 * 2 - 1,
        lambda x: torch.add(x, 1.0),
    ):
        got, wanted = fusegen.compile(function)(x), function(x)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)


REFUSED = {
    "measured": ("norm(1, 1)", torch.int64, {}, "nothing is computed of integers alone"),
    "averaged": ("mean(1)", torch.int64, {}, "nothing is computed of integers alone"),
    "to a power": ("pow(2)", torch.int64, {}, "nothing is computed of integers alone"),
    "the largest": ("amax(1)", torch.int64, {}, "nothing is computed of integers alone"),
    "where it is": ("argmax(1)", torch.int64, {}, "nothing is computed of integers alone"),
    "normalised": ("layernorm", torch.uint8, {}, "nothing is computed of integers alone"),
    "compared with conditions": ("eq(n)", torch.int8, {"n": torch.bool}, "compared with tensors"),
    "bounded": ("minimum(2.5)", torch.int64, {}, "nothing is computed of integers alone"),
    "in an activation": ("leaky_relu(0.1)", torch.uint8, {}, "nothing is computed of integers"),
    "out of range": ("eq(200)", torch.int8, {}, "with a number that their type has"),
    "compared with much": ("lt(16777216)", torch.int64, {}, "that their type has, below 2..24"),
    "divided by more": ("floor_divide(-3)", torch.uint8, {}, "that their type has"),
    "left by more": ("remainder(200)", torch.int8, {}, "that their type has"),
    "beside more": ("add(9007199254740993)", torch.int64, {}, "a number of the chain below 2..53"),
    "divided by 0": ("floor_divide(0)", torch.int64, {}, "divided by a number other than 0"),
    "left by 0": ("remainder(0)", torch.int64, {}, "divided by a number other than 0"),
    "divided by others": ("fmod(n)", torch.int64, {"n": torch.int64}, "and by no tensor"),
    "cut off": ("trunc_divide(n)", torch.int64, {"n": torch.int64}, "and by no tensor"),
    "as parameters": ("layernorm(n)", torch.float32, {"n": torch.int8}, "operand 'n' is int8"),
    "as conditions": (
        "masked_fill(n, 1)",
        torch.float32,
        {"n": torch.int64},
        "operand 'n' is int64, wanted bool.*n != 0",
    ),
    "as a type": ("type_as(n)", torch.float32, {"n": torch.int64}, "'n' is int64, wanted one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_equal_is_refused(case):
    text, dtype, kinds, told = REFUSED[case]
    x = torch.ones(4, 4, dtype=dtype)
    operands = {name: torch.ones(4, dtype=kind) for name, kind in kinds.items()}
    with pytest.raises(ArgumentError, match=told):
        fusegen.compile(text)(x, **operands)


def test_a_type_without_a_kernel_is_told():
    with pytest.raises(ArgumentError, match=r"argument 'x': got a tensor of complex64, wanted one"):
        fusegen.compile("gelu")(torch.ones(3, dtype=torch.complex64))


SMALL, LARGE = torch.arange(250, 600), 2**24 + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["eq", "lt", "add", "sub", "mul", "div", "maximum"])
def test_integers_are_rounded_to_the_type_of_what_they_meet(name, dtype, device):
    n = torch.cat((SMALL, SMALL + 2000)).to(device)
    values = (n - 1).to(dtype)
    for text, given in ((f"{name}(n)", (values, n)), (f"{name}(x2)", (n, -values))):
        fused = fusegen.compile(text)
        assert torch.equal(fused(*given), fused.reference(*given)), text


def test_integers_of_more_digits_are_what_eager_makes_of_them(device):
    n = torch.full((4,), LARGE, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    for text, given in (
        ("div(2) | add(z)", (n, zero)),
        ("add(n)", (zero, n)),
        ("operand(n) | to('float64') | add(z)", (zero.float(), n, zero)),
    ):
        fused = fusegen.compile(text)
        assert torch.equal(fused(*given), fused.reference(*given)), text


def test_parts_of_integers_are_taken(device):
    def weighed(x, m):
        first, second = m.chunk(2, -1)
        a, b = x.chunk(2, -1)
        return (a * first + b * second) * m[:, 0].float().unsqueeze(1) + m.detach()[:, 1:2].float()

    def chosen(x, m):
        return x * m.to(torch.bool) - torch.logical_not(m).float()

    x, m = torch.rand(4, 8, device=device), integers((4, 8), torch.int64, device, most=2)
    for function in (weighed, chosen):
        torch.testing.assert_close(fusegen.compile(function)(x, m), function(x, m))


def test_explain_tells_of_a_chain_without_gradients():
    assert "no backward: x has no gradient" in fusegen.compile("div(255)").explain(dtype="uint8")


def test_what_is_read_once_is_read_in_its_own_type():
    (source,) = sources(
        fusegen.compile("to('bfloat16') | div(255)").chain,
        "cuda",
        Situation((64, 3, 224, 224), dtype="uint8"),
        grad=False,
    )
    assert "const uint8_t*" in source.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_integers_become_numbers_of_the_default_type(dtype):
    i = torch.arange(6).view(2, 3)
    torch.set_default_dtype(dtype)
    try:
        for function in (
            lambda i: i / 255,
            lambda i: i * 0.5,
            lambda i: (i > 2) * 0.5,
            lambda i: torch.where(i > 2, 0.5, 0.1),
        ):
            found, wanted = fusegen.compile(function)(i), function(i)
            torch.testing.assert_close(found, wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_reference_computes_with_integers_too():
    i = torch.arange(6).view(2, 3)
    for text in ("mul(2)", "add(1) | clamp(0, 4)", "mul(0.5)", "gt(2) | where(1, 0)"):
        fused = fusegen.compile(text)
        torch.testing.assert_close(fused.reference(i), fused(i))
