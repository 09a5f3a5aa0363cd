"""Elements that go down columns, where those have much of their own: which kernels, and the numbers
they give.
"""

import ctypes
import re

import emulator
import pytest
import torch

import fusegen
from fusegen.describe import Situation, modules, sources
from fusegen.emission import make_entry

_TRAINED = "batch_norm(m, v, w, b, training=True)"
_EVALUATED = "batch_norm(m, v, w, b)"
_IMAGES = (8, 64, 14, 14)


def families(chain: str, target: str = "cuda", **more: object) -> list[str]:
    """The families of the forward's kernels but those that merge partials."""
    (module,) = modules(fusegen.chain(chain), target, Situation(**more), grad=False)
    (program,) = module.programs
    kernels = make_entry(program, module.signature).kernels
    return [k.family for k in kernels if k.family != "finalise"]


@pytest.mark.parametrize(
    ("chain", "shape", "more", "family"),
    [
        (_EVALUATED, _IMAGES, {}, "outer"),
        (_EVALUATED, _IMAGES, {"dtype": "float16"}, "outer"),
        (_EVALUATED, _IMAGES, {"dtype": "float32"}, "pointwise"),
        (_EVALUATED, _IMAGES, {"layout": "contiguous"}, "pointwise"),
        (_EVALUATED, (512, 64), {"layout": "contiguous"}, "outer"),
        (_EVALUATED, (8, 60, 14, 14), {}, "pointwise"),  # channels that are no whole packs
        ("mul_channel | add_channel | relu", _IMAGES, {}, "pointwise"),  # little of a column's own
        # What samples have of their own, and what rows of each have.
        (f"{_EVALUATED} | mul(s)", _IMAGES, {"operands": {"s": (8, 64, 1, 1)}}, "outer"),
        (f"{_EVALUATED} | mul(s)", _IMAGES, {"operands": {"s": (8, 1, 1, 1)}}, "outer"),
        (f"{_EVALUATED} | mul(s)", _IMAGES, {"operands": {"s": (64, 14, 1)}}, "pointwise"),
        ("mul(s) | relu", _IMAGES, {"operands": {"s": (8, 64, 1, 1)}}, "pointwise"),
        (f"{_EVALUATED} | dropout(0.5)", _IMAGES, {}, "pointwise"),
    ],
)
def test_elements_go_down_columns_that_have_much_of_their_own(chain, shape, more, family):
    more = {"dtype": "bfloat16", "layout": "channels_last", **more}
    assert families(chain, shape=shape, **more) == [family]


def test_a_cpu_goes_element_by_element():
    assert families(_EVALUATED, "cpp", shape=(512, 64), dtype="bfloat16") == ["pointwise"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(5, 64, 14, 14), (3, 24, 7, 7), (2, 2056, 3, 3), (4, 20, 9, 9), (300, 8, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize(
    "chain",
    [
        f"{_TRAINED} | relu",
        f"{_TRAINED} | add(residual) | relu",
        f"{_EVALUATED} | silu",
        f"{_EVALUATED} | mul(s) | tanh",
    ],
)
def test_a_batch_norm_with_channels_innermost_is_eagers(chain, shape, dtype, gpu):
    fused = fusegen.compile(chain)
    last = {"memory_format": torch.channels_last}
    x = torch.randn(shape, device=gpu).to(dtype).contiguous(**last).requires_grad_()
    c = shape[1]
    given = {
        "m": torch.randn(c, device=gpu),
        "v": torch.rand(c, device=gpu) + 0.5,
        "w": torch.randn(c, device=gpu, requires_grad=True),
        "b": torch.randn(c, device=gpu, requires_grad=True),
        "s": torch.randn(shape[0], c, 1, 1, device=gpu, requires_grad=True),
        "residual": torch.randn(shape, device=gpu).to(dtype).contiguous(**last).requires_grad_(),
    }
    operands = [given[name] for name in fused.chain.operands]
    # In the layout in which torch's own batch_norm is right on a CPU, and in doubles.
    doubles = [t.detach().double().contiguous().requires_grad_(t.requires_grad) for t in operands]
    exact = x.detach().double().contiguous().requires_grad_()
    expected, found = fused.reference(exact, *doubles), fused(x, *operands)
    assert found.stride() == x.stride()
    # Two units in the last place: one for rounding, one for what functions are off by in 16 bits;
    # in fp32, sums of thousands that nearly cancel.
    close = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    cotangent = torch.randn_like(found)
    pairs = [(x, exact), *zip(operands, doubles, strict=True)]
    wanted = [pair for pair in pairs if pair[0].requires_grad]
    ours = torch.autograd.grad(found, [a for a, _ in wanted], cotangent)
    theirs = torch.autograd.grad(expected, [b for _, b in wanted], cotangent.double())
    # Where fp32 and fp64 find another sign for relu, single elements differ.
    for a, b in zip(ours, theirs, strict=True):
        off = (a.double() - b).abs()
        assert (off > close * (1 + b.abs().max())).float().mean() < 0.02


def test_strips_leave_no_more_blocks_idle_than_usual_ones(tmp_path) -> None:
    """Of a device that has room for 528 blocks; where it matters, they leave few."""
    (source,) = sources(
        fusegen.chain("add(p)"), "cuda", Situation((64, 197, 768), {"p": (197, 768)}), grad=True
    )
    wrapper = 'extern "C" int64_t width(int64_t packs, int64_t usual, int64_t most, int64_t room)'
    text = f"{source.text}\n{wrapper} {{ return strip_width(packs, usual, most, room); }}\n"
    call = emulator.build(text, tmp_path).width
    call.argtypes, call.restype = [ctypes.c_int64] * 4, ctypes.c_int64
    room = 528

    def idle(strips: int) -> float:
        blocks = strips * max(1, room // strips)
        return 1 - blocks / (-(-blocks // room) * room)

    for packs in (1, 32, 40, 1000, 9600, 16000, 18912, 25000, 33000, 50000, 10**6):
        width = call(packs, 32, 256, room)
        strips, usual = -(-packs // width), -(-packs // 32)
        assert 1 <= width <= 48
        assert idle(strips) <= max(0.1, idle(usual)), packs
        assert idle(usual) > 0.1 or width == -(-packs // usual)
    assert call(18912, 32, 256, room) == 36  # 526 strips for 528 blocks, where 591 took two turns
    assert call(8, 32, 256, 0) == 8


def test_sums_over_samples_are_sums_of_what_each_sample_leaves() -> None:
    situation = Situation(
        (8, 64, 9, 7), {"b": (64, 1, 1), "t": (8, 64, 1, 1)}, layout="channels_last"
    )
    chain = fusegen.chain("add(b) | add(t) | silu")
    (module,) = sources(chain, "cuda", situation, grad=True)
    reading = re.findall(r"^// Reads .*\bd_out\b.*$", module.text, re.M)
    assert len(reading) == 1


def test_a_sum_that_waits_for_another_has_a_pass_of_its_own() -> None:
    chain = fusegen.chain("keep(y) | sum((0, 2, 3), True) | add(y) | tanh | sum((2, 3))")
    situation = Situation((8, 64, 80, 80), layout="channels_last")
    (module,) = sources(chain, "cuda", situation, grad=False)
    assert module.text.count("__global__ void") == 4  # two passes, and what merges their partials
