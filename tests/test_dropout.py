"""Dropout: what is drawn, that it comes back, and that gradients see the same mask."""

import copy
import itertools
import math

import pytest
import torch

import fusegen
from fusegen.errors import ArgumentError, ChainError
from fusegen.ir import primitive
from fusegen.ops.dropout import _SATURATION
from fusegen.ops.schema import Noise


def seeded(fused, *tensors, seed=0):
    torch.manual_seed(seed)
    return fused(*tensors)


def mixed(seed: int, places: torch.Tensor) -> torch.Tensor:
    """The generator again, in Python's integers."""
    whole = (1 << 64) - 1
    found = []
    for place in places.flatten().tolist():
        bits = (seed + (place // 2 + 1) * 0x9E3779B97F4A7C15) & whole
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & whole
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & whole
        bits ^= bits >> 31
        half = bits >> 32 if place % 2 else bits & 0xFFFFFFFF
        found.append((half >> 8) / (1 << 24))
    return torch.tensor(found, dtype=torch.float64).reshape(places.shape)


def test_the_mask_is_a_function_of_the_drawn_seed_and_the_place():
    x = torch.ones(3, 5, 7)
    result = seeded(fusegen.compile("dropout(0.25)"), x, seed=5)
    torch.manual_seed(5)
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64).item()
    kept = mixed(seed, torch.arange(x.numel()).reshape(x.shape)) >= 0.25
    assert torch.equal(result != 0, kept)
    torch.testing.assert_close(result[kept], torch.full_like(result[kept], 1 / 0.75))


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
def test_so_many_are_dropped(p):
    count = 1 << 20
    dropped = seeded(fusegen.compile(f"dropout({p})"), torch.ones(count)).eq(0).sum().item()
    # Five standard deviations.
    assert abs(dropped - p * count) < 5 * math.sqrt(p * (1 - p) * count)


def test_neighbours_and_calls_are_independent():
    fused = fusegen.compile("dropout(0.5)")
    x = torch.ones(1 << 20)
    torch.manual_seed(0)
    one, two = fused(x) != 0, fused(x) != 0
    pairs = (one[0::2], one[1::2])  # whose numbers are halves of one hash
    for a, b in ((one, two), pairs, (one[1:], one[:-1]), (one[64:], one[:-64])):
        assert abs((a == b).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(len(a))


def test_a_seed_brings_the_mask_back_and_another_call_has_another():
    fused = fusegen.compile("gelu | dropout(0.3)")
    x = torch.randn(4, 100)
    one = seeded(fused, x)
    other = fused(x)
    assert torch.equal(one, seeded(fused, x))
    assert not torch.equal(one, other)
    assert torch.equal(one, seeded(copy.deepcopy(fused), x))


def test_two_steps_draw_on_their_own_unless_they_share_a_name():
    x = torch.ones(1 << 16)
    twice = seeded(fusegen.compile("dropout(0.5) | dropout(0.5)"), x)
    assert abs((twice != 0).double().mean().item() - 0.25) < 0.02
    shared = seeded(fusegen.compile("dropout(0.5, noise=mask) | dropout(0.5, noise=mask)"), x)
    assert abs((shared != 0).double().mean().item() - 0.5) < 0.02


LAYOUTS = [
    "dropout(0.4)",
    "tanh | dropout(0.4) | mul_channel",
    "dropout2d(0.4) | gelu",
    "dropout(0.4) | layernorm(axis=1)",
    "dropout(0.4) | layernorm | dropout(0.1)",
    "dropout(0.4) | max_pool2d(2) | dropout(0.4)",
    "dropout(0.4) | max_pool2d(3, 2, 1) | dropout(0.4)",
]


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_mask_is_the_same_in_every_layout_and_type(text):
    fused = fusegen.compile(text)
    x = torch.randn(2, 6, 8, 10, dtype=torch.float64)
    operands = [torch.randn(6, dtype=torch.float64)] * len(fused.chain.given)
    plain = seeded(fused, x, *operands)
    last = seeded(fused, x.contiguous(memory_format=torch.channels_last), *operands)
    turned = seeded(fused, x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0), *operands)
    torch.testing.assert_close(last, plain)
    torch.testing.assert_close(turned, plain)
    single = seeded(fused, x.float(), *(o.float() for o in operands))
    torch.testing.assert_close(single.double(), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", LAYOUTS)
def test_gradients_of_both_orders_see_the_same_mask(text):
    fused = fusegen.compile(text)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    operands = [torch.randn(3, dtype=torch.float64, requires_grad=True)] * len(fused.chain.given)

    def again(*tensors):
        return seeded(fused, *tensors)

    assert torch.autograd.gradcheck(again, (x, *operands))
    assert torch.autograd.gradgradcheck(again, (x, *operands))


def test_dropout_then_softmax_over_the_row_is_eagers_with_the_same_mask():
    x = torch.randn(9, 130, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(9, 130, dtype=torch.float64)
    mask = seeded(fusegen.compile("dropout(0.2)"), torch.ones_like(x)).detach()
    ours = seeded(fusegen.compile("dropout(0.2) | softmax(-1)"), x)
    eager = torch.softmax(x * mask, -1)
    torch.testing.assert_close(ours, eager)
    for a, b in zip(
        torch.autograd.grad(ours, x, cotangent),
        torch.autograd.grad(eager, x, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_nothing_but_the_seed_is_kept():
    fused = fusegen.compile("dropout(0.3)")
    x = torch.randn(100, 100, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused(x)
    assert sorted(t.numel() for t in saved) == [1]


def test_checkpointing_finds_the_mask_again():
    fused = fusegen.compile("gelu | dropout(0.5)")
    x = torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(1)
    fused(x).square().sum().backward()
    plain, x.grad = x.grad, None
    torch.manual_seed(1)
    kept = torch.utils.checkpoint.checkpoint(fused, x, use_reentrant=False)
    torch.rand(3)  # the generator goes on between
    kept.square().sum().backward()
    assert torch.equal(plain, x.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["dropout(0.25)", "layernorm | dropout(0.25) | gelu"])
def test_a_gpu_has_the_mask_of_the_drawn_seed(text, gpu):
    x = torch.rand(300, 1023, device=gpu) + 1
    fused = fusegen.compile(text)
    first, again = seeded(fused, x), seeded(fused, x)
    assert torch.equal(first, again)
    assert not torch.equal(first == 0, fused(x) == 0)
    torch.manual_seed(0)
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=gpu).item()
    kept = mixed(seed, torch.arange(2000)) >= 0.25
    assert torch.equal(first.flatten()[:2000].cpu() != 0, kept)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "text", ["dropout(0.25)", "dropout(0.25) | layernorm(w)", "dropout2d(0.5)"]
)
def test_every_replay_of_a_cuda_graph_drops_anew_in_both_directions(text, gpu):
    fused = fusegen.compile(text)
    tensors = [torch.rand(64, 33, 257, device=gpu) + 1]
    tensors += [torch.rand(257, device=gpu) + 1] * text.count("w")
    x = tensors[0].requires_grad_()

    def step():
        result = fused(*tensors)
        return result, *torch.autograd.grad(result, x, torch.ones_like(result))

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        step()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, gradient = step()
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(gradient == 0)
        if "norm" not in text:
            assert torch.equal(result == 0, masks[-1])
    dropped = [mask.double().mean().item() for mask in masks]
    # Of 540,000 elements, or 2,112 channels: more than four standard deviations.
    expected = 0.5 if "2d" in text else 0.25
    assert all(abs(d - expected) < (0.05 if "2d" in text else 0.01) for d in dropped)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))


@pytest.mark.parametrize(
    "name",
    ["dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"],
)
def test_without_training_nothing_is_dropped_or_drawn(name):
    fused = fusegen.compile(f"{name}(0.7, False)")
    x = torch.randn(2, 3, 4) if name == "dropout1d" else torch.randn(2, 3, 4, 5, 6)
    x = x[0] if name == "dropout2d" else x
    before = torch.get_rng_state()
    assert torch.equal(fused(x), x)
    assert torch.equal(torch.get_rng_state(), before)


def test_p_of_0_and_1_are_torchs():
    x = torch.tensor([1.0, -2.0, math.inf, math.nan], requires_grad=True)
    for p in (0.0, 1.0):
        fused = fusegen.compile(f"dropout({p})")
        torch.testing.assert_close(fused(x), fused.reference(x), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "shape", "per_channel"),
    [
        ("dropout1d", (50, 40, 6), True),
        ("dropout1d", (400, 6), True),
        ("dropout2d", (50, 40, 2, 3), True),
        ("dropout3d", (400, 2, 3, 2), True),
        ("dropout", (50, 40, 6), False),
    ],
)
def test_channels_are_dropped_as_a_whole(name, shape, per_channel):
    result = seeded(fusegen.compile(f"{name}(0.4)"), torch.ones(shape))
    count = 2000 if shape[0] == 50 else 400
    kept = (result.reshape(count, -1) != 0).double().mean(1)
    assert bool(((kept == 0) | (kept == 1)).all()) == per_channel
    assert abs(kept.mean().item() - 0.6) < 5 * math.sqrt(0.24 / count)


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.nn.functional.selu(torch.randn(1 << 20))
    for name, given in (("alpha_dropout", x), ("feature_alpha_dropout", x.reshape(1 << 10, -1, 4))):
        result = seeded(fusegen.compile(f"{name}(0.3)"), given)
        assert abs(result.mean() - x.mean()) < 0.02
        assert abs(result.var() - x.var()) < 0.04
        scale = 1 / math.sqrt((_SATURATION**2 * 0.3 + 1) * 0.7)
        wanted = torch.tensor(_SATURATION * scale * (0.3 - 1))
        assert torch.isclose(result, wanted).float().mean() == pytest.approx(0.3, abs=0.03)


def test_dropout_in_a_function_is_a_step():
    @fusegen.chain
    def traced(x, w):
        return fusegen.dropout(fusegen.gelu(x) * w, 0.2)

    assert traced.given == ("w",)
    assert traced == fusegen.chain("gelu | mul(w) | dropout(0.2)")


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_step_may_count_with_the_numbers_that_are_drawn(gpu, restore_registry):
    @fusegen.op(draws=lambda: True)
    def jitter(x: fusegen.Expr, noise: Noise | None = None) -> fusegen.Expr:
        """x with as much of it taken away as is drawn, where that is less than a third."""
        assert noise is not None
        return primitive("where", primitive("lt", noise, 1 / 3), x - x * noise, x)

    x = torch.ones(6, 35, device="cuda" if gpu else "cpu")
    torch.manual_seed(3)
    found = fusegen.compile("jitter")(x).cpu().double()
    torch.manual_seed(3)
    (seed,) = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=x.device)
    drawn = mixed(seed.item(), torch.arange(x.numel()).reshape(x.shape))
    expected = torch.where(drawn < torch.tensor(1 / 3).double(), 1 - drawn, 1.0)
    assert torch.equal(found, expected)


def test_mistakes_are_told():
    with pytest.raises(ChainError, match=r"p wants a probability between 0 and 1, got 1\.5"):
        fusegen.compile("dropout(1.5)")
    fused = fusegen.compile("dropout(0.5)")
    with pytest.raises(ArgumentError, match="got 1 operands, wanted 0"):
        fused(torch.ones(3), torch.ones(1))
    with pytest.raises(ArgumentError, match="no operand is called 'noise'"):
        fused(torch.ones(3), noise=torch.ones(1))
    with pytest.raises(ArgumentError, match="wanted 3 to 4 axes"):
        fusegen.compile("dropout2d")(torch.ones(3, 4))
    with pytest.raises(ArgumentError, match=r"wanted a torch\.Tensor"):
        fused([1.0])


@pytest.mark.parametrize(
    "text",
    [
        "dropout(0.5, noise=n) | add(n)",
        "add(n) | dropout(0.5, noise=n)",
        "dropout(0.5, noise=n) | operand(n) | add(1)",
    ],
)
def test_what_is_drawn_is_no_tensor(text):
    with pytest.raises(ChainError, match="'n' is the name of noise that a step draws"):
        fusegen.compile(text)
