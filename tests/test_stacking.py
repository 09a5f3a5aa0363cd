"""Values put side by side, and parts of an axis: as text, and as functions written for tensors."""

import random

import pytest
import torch
import torch.nn.functional as F
from emulator import run
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen.errors import ArgumentError, ChainError

HALVES = "unflatten(-1, (2, -1)) | keep(h) | select(-2, 0) | keep(a) | recall(h) | select(-2, 1)"
TURNED = f"{HALVES} | neg | stack(a, dim=-2) | flatten(-2)"
ROTARY = f"keep(y) | {TURNED} | mul(sin) | keep(r) | recall(y) | mul(cos) | add(r)"


def rotate_half(x):
    """As Hugging Face's models have it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary(x, cos, sin):
    return (x * cos) + (rotate_half(x) * sin)


def rotary_of_norm(x, weight, cos, sin):
    return rotary(F.rms_norm(x, (16,), weight, 1e-6), cos, sin)


def rotate_every_two(x, cos, sin):
    """As GPT-J has it."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack((-x2, x1), dim=-1).flatten(-2) * sin


def rotate_pairs(x, cos, sin):
    """As LLaMA's first code has it, without complex numbers."""
    a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3).type_as(x)


def rotate_a_part(x, cos, sin):
    """As GPT-NeoX has it, of half of a head."""
    rotated, passed = x[..., :8], x[..., 8:16]
    a, b = rotated.chunk(2, -1)
    return torch.cat([rotated * cos + torch.cat((-b, a), -1) * sin, passed], -1)


def attended(x, weight):
    """The largest and the mean of the channels, as convolutional attention has them."""
    found = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], dim=1)
    return (found * weight).sum(1, keepdim=True).sigmoid() * x


def of_images(x):
    b, c, h, w = x.shape
    return F.silu(x).reshape(b, c, h * w).mean(-1)


def of_heads(x):
    b, s, d = x.shape
    return F.silu(x).view(b, s, 4, d // 4).softmax(-1).flatten(0, 1)


def in_heads_and_back(x):
    b, s, d = x.shape
    return (F.silu(x).view(b, s, 4, d // 4).softmax(-1) * 2).view(b, s, d) * x


def of_groups(x):
    b, c, h, w = x.shape
    return F.silu(x).view(b, 2, c // 2, h, w).softmax(2).reshape(b, c, h, w)


def of_patches(x):
    b, c, h, w = x.shape
    return F.gelu(x).view(b, c, h // 2, 2, w // 2, 2).mean((3, 5))


def rotate_as_timm(x, cos, sin):
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape) * sin


def rotary_of_frequencies(x, freqs):
    angles = torch.cat((freqs, freqs), dim=-1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


def embedded(t, freqs):
    """Times, as diffusion models have them."""
    angles = t[:, None] * freqs[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def rotate_pairs_of_heads(x):
    b, s, d = x.shape
    r, i = x.view(b, s, d // 2, 2).unbind(-1)
    return torch.stack([r - i, i * r], -1).view(b, s, d)


def half_of_width(x):
    b, c = x.shape[:2]
    _, _, _, w = x.shape
    return F.silu(x[..., : w // 2]).flatten(2) + x.view(b, c, -1).mean(-1, True)


def gated_channels(x, weight):
    b, c, _, _ = x.size()
    gate = torch.sigmoid(F.adaptive_avg_pool2d(x, 1).view(b, c) * weight)
    return x * gate.view(b, c, 1, 1)


def of_tokens(x):
    b, s, d = x.shape
    return F.silu(x).view(b * s, d)


def in_groups(x):
    return F.silu(x).view(-1, 4).softmax(-1).view(3, -1, 2).sum(-1)


X = (2, 3, 4, 16)
ANGLES = [(4, 16), (4, 16)]
FUNCTIONS = [
    (rotary, X, ANGLES),
    (rotary, (2, 3, 4, 64), [(4, 64), (4, 64)]),
    (rotary_of_norm, X, [(16,), *ANGLES]),
    (rotate_every_two, X, ANGLES),
    (rotate_pairs, X, [(4, 8), (4, 8)]),
    (rotate_a_part, X, [(4, 8), (4, 8)]),
    (attended, (2, 6, 4, 5), [(2, 1, 1)]),
    (lambda x: F.relu(torch.cat([x, -x], 1)), (2, 3, 4, 5), []),
    (lambda x, y: torch.cat([x, y.tanh()], 1).sigmoid(), (2, 3, 4), [(2, 3, 4)]),
    (lambda x, y, z: torch.concat((x, y, z, x), -1) * 2, (2, 3), [(2, 3), (2, 3)]),
    (lambda x, y: torch.stack([x, y]).softmax(0), (3, 5), [(3, 5)]),
    (lambda x: torch.stack((x, x.exp(), x * x), 1).mean((0, 2)), (3, 5), []),
    (lambda x: torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1), (2, 3, 4, 5), []),
    (lambda x: x[..., : x.size(-1) // 2] * F.gelu(x[..., x.size(-1) // 2 :]), (3, 12), []),
    (lambda x: x[:, 4:8] - x[:, -4:].exp(), (3, 12, 2), []),
    (lambda x: x[1::2] / x[::2].exp(), (4, 6), []),
    (lambda x: F.relu(x).view(x.size(0), -1), (2, 3, 4, 5), []),
    (lambda x: x.tanh().view(-1, x.shape[-1]), (2, 3, 4, 5), []),
    (lambda x: x.view(*x.shape[:-1], 2, -1).softmax(-1).flatten(-2), (3, 5, 12), []),
    (lambda x: F.gelu(x).view((*x.shape[:-2], -1)), (2, 3, 4), []),
    (of_images, (2, 3, 4, 5), []),
    (of_heads, (2, 3, 16), []),
    (of_tokens, (2, 3, 16), []),
    (in_heads_and_back, (2, 3, 16), []),
    (of_groups, (2, 6, 4, 5), []),
    (of_patches, (2, 3, 4, 6), []),
    (gated_channels, (2, 3, 4, 6), [(3,)]),
    (rotate_as_timm, X, ANGLES),
    # Operands that are put side by side before they meet x.
    (rotary_of_frequencies, (2, 3, 5, 8), [(5, 4)]),
    (lambda x, p, q: x * torch.cat((p, q)).exp(), (3, 8), [(4,), (4,)]),
    (lambda x, y, z: x + torch.cat([y, z], -1), (3, 8), [(3, 4), (3, 4)]),
    (lambda x, f: x * torch.stack((f, f.exp()), -1).flatten(-2), (2, 3, 8), [(3, 4)]),
    (lambda x, f: x * torch.stack((f, f)), (2, 8), [(8,)]),
    (lambda x, f: x * torch.cat((f.sin(), f.cos()), -1)[:, None], (3, 5, 8), [(3, 4)]),
    (lambda x, p, q: x * torch.cat((p, q)) * torch.cat((q, p)), (3, 8), [(4,), (4,)]),
    (lambda x, p: x.softmax(-1) * torch.cat((p, p), 0), (4, 4), [(2, 4)]),
    (lambda x, p: x.unflatten(-1, (4, 2)).sum(-1) + torch.cat([p, p], -1), (3, 8), [(2,)]),
    (embedded, (5,), [(4,)]),
    (lambda x, w: F.layer_norm(x, x.shape[-1:], w) + F.rms_norm(x, (x.size(-1),)), (3, 8), [(8,)]),
    (rotate_pairs_of_heads, (2, 3, 16), []),
    (half_of_width, (2, 3, 4, 6), []),
    (lambda x: x.tanh().view(*x.shape[:1], x.shape[1] // 2, 2, -1), (2, 4, 6), []),
    (lambda x: torch.cat(tensors=[x, x.exp()], dim=-1).sum(0), (2, 4), []),
    # Axes of one place, which another value is as wide as.
    (lambda x: x.tanh().flatten(1) * x[..., :1].flatten(1), (1, 1, 2), []),
    (in_groups, (6, 2, 8), []),
    (lambda x: (x * 2).view(*x.shape, 1) * x.view(x.shape).unsqueeze(-1), (3, 4), []),
]


def ids(cases):
    return [f"{i} {case[0].__name__}" for i, case in enumerate(cases)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "shape", "operands"), FUNCTIONS, ids=ids(FUNCTIONS))
def test_code_that_puts_parts_together_is_one_kernel(function, shape, operands, dtype, device):
    fused = fusegen.compile(function)
    tensors = [torch.randn(s, dtype=torch.float64) for s in (shape, *operands)]
    tensors = [t.to(device, dtype).requires_grad_() for t in tensors]
    assert fused(*tensors).shape == function(*tensors).shape
    ours, eager = outcome(fused, tensors), outcome(function, tensors)
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(ours, eager, exact)
    assert [len(way) for way in fused._parts if way[0].plans] == [1]


TEXTS = [
    (ROTARY, (2, 3, 7, 64), [(7, 64), (7, 64)], {}),
    (ROTARY, (2, 3, 7, 64), [(7, 64), (7, 64)], {"dtype": "bfloat16"}),
    (f"rms_norm(weight) | {ROTARY}", (2, 3, 7, 64), [(64,), (7, 64), (7, 64)], {}),
    (ROTARY, (2, 3, 6), [(6,), (6,)], {}),
    (f"{TURNED} | layernorm(w, b)", (5, 96), [(96,), (96,)], {}),
    ("keep(y) | amax(1, keepdim=True) | keep(a) | recall(y) | sub(a) | stack(y, dim=1)", X, [], {}),
    ("stack(b, c, dim=1) | softmax(1)", (5, 32), [(5, 32)] * 2, {}),
    ("stack(b, c, d) | mul(w)", (5, 7), [(5, 7)] * 3 + [(4, 1, 1)], {}),
    ("tanh | keep(a) | exp | stack(a, dim=2) | flatten(1, 2) | sum(0)", (3, 4, 6), [], {}),
    ("add_channel(b) | keep(y) | neg | keep(n) | recall(y) | stack(n, dim=2) | flatten(1, 2)"
     " | relu", (2, 8, 4, 4), [(8,)], {"layout": "channels_last"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shape", "operands", "more"), TEXTS, ids=[f"{c[0][:30]} {c[1:]}" for c in TEXTS]
)
def test_cuda_puts_values_side_by_side(text, shape, operands, more, tmp_path):
    torch.manual_seed(0)
    done = run(text, shape, operands, tmp_path, **more)
    tolerance = {"bfloat16": 2.0**-7}.get(more.get("dtype"), 4e-6)  # two roundings, sums of floats
    for have, want in zip(done.results, done.expected, strict=True):
        assert have.shape == want.shape
        assert (have.double() - want).abs().max() / (want.abs().max() + 0.1) < tolerance


def test_what_is_there_before_its_axes_are_parted_meets_what_is_joined_again():
    """Without a cut: the parts lie along the axes that x has parts of, and not along others."""
    fused = fusegen.compile(ROTARY)
    fused(torch.ones(8, 16, 64), torch.ones(16, 64), torch.ones(16, 64))
    assert [len(way) for way in fused._parts if way[0].plans] == [1]


def beside_itself(x):
    return torch.stack([x, x.tanh()], -1)


CUT = [
    (lambda x: x[:1, :1] * beside_itself(x), (2, 2)),
    (lambda x: x[:1, :1] * x.tanh(), (4, 3)),
    (lambda x: x[:1, :1, :1] + beside_itself(x), (2, 2, 2)),
    (lambda x: x.unflatten(0, (-1, 2)).unflatten(1, (2, -1)) * x, (2,)),
    (lambda x: x.reshape(-1, 2) * x.tanh()[1].unsqueeze(1), (4, 2, 2)),
    (lambda x: x[:1, :1] * x.unsqueeze(-1), (2, 2)),
]


@pytest.mark.parametrize(("function", "shape"), CUT, ids=[f"{i}" for i in range(len(CUT))])
def test_what_cannot_be_followed_is_cut(function, shape, device):
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    ours, wanted = fusegen.compile(function)(x), function(x)
    torch.testing.assert_close(ours, wanted)
    seed = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(r, x, seed) for r in (ours, wanted)))


def test_a_cut_may_begin_with_an_operand_of_fewer_axes(device):
    def function(x, p):
        parts, own = x.unflatten(0, (2, -1)), p.unflatten(0, (2, -1)).unsqueeze(0)
        return parts[:, ::2] * own * (parts + own)

    shapes = ((4, 2, 4, 2), (2, 4, 1))
    x, p = (torch.randn(s, dtype=torch.float64, device=device) for s in shapes)
    torch.testing.assert_close(fusegen.compile(function)(x, p), function(x, p))


def test_second_derivatives_are_eagers(device):
    fused = fusegen.compile(f"tanh | {ROTARY} | sigmoid")
    tensors = [torch.randn(s, dtype=torch.float64) for s in ((3, 4, 8), (4, 8), (4, 8))]
    tensors = [t.to(device).requires_grad_() for t in tensors]

    def seconds(function):
        first = torch.autograd.grad(function(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.cos().sum() for g in first), tensors)

    for ours, theirs in zip(seconds(fused), seconds(fused.reference), strict=True):
        torch.testing.assert_close(ours, theirs)


def random_step(rng, values):
    """A value made of those, with one of the steps that put together and take apart."""
    x = rng.choice(values)
    axis = rng.randrange(x.dim()) if x.dim() else 0
    alike = [v for v in values if v.shape == x.shape]
    kind = rng.choice(["stack", "cat", "half", "block", "every", "sum", "tanh", "mul"])
    if kind in ("stack", "cat") and x.dim() < 5 and x.numel() < 4000:
        others = [x, *rng.choices(alike, k=rng.randrange(1, 3))]
        if kind == "stack":
            return lambda get: torch.stack([get(v) for v in others], axis)
        return lambda get: torch.cat([get(v) for v in others], axis) if x.dim() else get(x) + 1
    if kind == "half" and x.dim() and x.shape[axis] % 2 == 0:
        which = rng.randrange(2)
        return lambda get: get(x).chunk(2, axis)[which]
    if kind == "every" and x.dim() and x.shape[axis] % 2 == 0 and axis == x.dim() - 1:
        which = rng.randrange(2)
        return lambda get: get(x)[..., which::2]
    if kind == "block" and x.dim() and x.shape[axis] % 3 == 0 and axis == x.dim() - 1:
        width = x.shape[axis] // 3
        return lambda get: get(x)[..., width : 2 * width]
    if kind == "sum" and x.dim():
        return lambda get: get(x).softmax(axis)
    if kind == "mul":
        other = rng.choice(alike)
        return lambda get: get(x) * get(other)
    return lambda get: torch.tanh(get(x))


def random_function(seed):
    """A function that takes parts and puts them together, what is made of x's shape on its way."""
    rng = random.Random(seed)
    shape = [rng.choice([2, 3, 4, 6, 12]) for _ in range(rng.randrange(1, 4))]
    values = [torch.zeros(shape)]
    steps = []
    for _ in range(rng.randrange(2, 8)):
        step = random_step(rng, values)
        steps.append(step)
        values.append(step(lambda v: v))

    def function(x):
        known = {id(values[0]): x}
        for value, step in zip(values[1:], steps, strict=True):
            known[id(value)] = step(lambda v: known[id(v)])
        return known[id(values[-1])]

    return function, shape


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_put_together_as_torch_does(seed):
    function, shape = random_function(seed)
    fused = fusegen.compile(function)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours, wanted = fused(x), function(x)
    torch.testing.assert_close(ours, wanted)
    seed = torch.randn_like(wanted)
    (mine,), (theirs,) = (torch.autograd.grad(r, x, seed) for r in (ours, wanted))
    torch.testing.assert_close(mine, theirs)


def test_values_of_other_shapes_are_refused():
    fused = fusegen.compile("stack(b, dim=1)")
    with pytest.raises(ArgumentError, match=r"'b' has shape \(3, 1\), wanted the value's \(3, 4\)"):
        fused(torch.ones(3, 4), torch.ones(3, 1))
    with pytest.raises(ArgumentError, match="dim 1 is out of range for a value of shape"):
        fused(torch.ones(()), torch.ones(()))
    with pytest.raises(ArgumentError, match="wanted its axis 0 to hold a multiple of 2"):
        fusegen.compile(lambda x: x[: x.shape[0] // 2])(torch.ones(5))
    with pytest.raises(ChainError, match="dim is 70, wanted an axis of the result"):
        fusegen.chain("stack(y, dim=70)")


UNTOLD = "its axes are not known before a call"


def split_off(x):
    *rest, d = x.shape
    return x.view(*rest, 2, d // 2)


WRONG = [
    (lambda x: x[1:], "a slice is one of equal parts"),
    (lambda x: x[..., :3:2], r"x\[:3:2\]: a slice is one of equal parts"),
    (lambda x: x[..., 64:], r"x\[64:\]: a slice is one of equal parts"),
    (lambda x: x[..., 2 : x.shape[-1] // 2], r"x\[2:n\]: a slice is one of equal parts"),
    (lambda x: x[..., x.shape[-1] :], "of an axis equal parts can be taken"),
    (lambda x: x[:, : x.shape[-1] // 2], "axis 1 is cut by the size of axis -1; count both"),
    (lambda x: x + x[..., : x.shape[0] // 2], "axis -1 is cut by the size of axis 0"),
    (lambda x: x.sum(-1)[:, : x.shape[1] // 2], "the sizes of another value"),
    (lambda x: x.flatten(1).view(x.shape), "the sizes of another value"),
    (lambda x, y: (x + y).view(x.shape[0], -1), "the sizes of another value"),
    (lambda x: x.view(*x.shape, 2), "behind all of x's sizes only 1"),
    (lambda x: x.view(x.shape[0], x.shape[-1] + 2), UNTOLD),
    *(
        (f, "what is not the size of one of x's first")
        for f in (
            lambda x: x.view(x.shape[0] * 2, x.shape[1] * 2),
            lambda x: x.view(x.shape[1], -1),
            lambda x: x.view(x.shape[-1], -1),
            lambda x: x.view(x.shape[1], x.shape[0]),
            lambda x: x.view(1, *x.shape),
            lambda x: x.view(x.shape[0], x.shape[0]),
            lambda x: x.view(x.shape[0] // 2, 8),
            lambda x: x.view(x.shape[0] * x.shape[0], 8),
            lambda x: x.view(x.shape[0] * x.shape[1]),
            lambda x: x.view(*x.shape[:2], 2, x.shape[2] // 3),
        )
    ),
    *(
        (f, "how many axes x has is not known before a call; name them all")
        for f in (
            lambda x: x.view([*list(x.shape)[:-1], 2, -1]),
            lambda x: x.view((*tuple(x.shape)[:-1], 2, -1)),
            lambda x: x.view(list(x.shape)),
            split_off,
        )
    ),
    (lambda x: x.view(x.shape[0], -1, 2, x.shape[-1]), "what is not the size of one of x's first"),
    (lambda x: x[..., : x.shape[-1] // 2 * 2], UNTOLD),
    (lambda x: x / x.shape[-1], UNTOLD),
    (lambda x: x * x.size(-1) ** -0.5, UNTOLD),
    (lambda x: x * len(x.shape), UNTOLD),
    (lambda x: x if x.shape[0] == 3 else -x, UNTOLD),
    (lambda x: x * (x.shape[1] // 0), UNTOLD),
    (lambda x: x * x.shape[1:][0], UNTOLD),
    (lambda x: x + x.shape[:2] + 1, UNTOLD),
    (lambda x: torch.stack([x] * 5), "torch.stack: got 5 values; of more than 4 fusegen.compile"),
    (lambda x: torch.cat([x, torch.ones(3)]), "torch's cat: got a Tensor, .* pass it in the call"),
]


@pytest.mark.parametrize(("function", "message"), WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_what_only_a_call_can_tell_is_told(function, message):
    with pytest.raises(ChainError, match=message):
        fusegen.chain(function)
