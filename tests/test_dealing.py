"""Rows dealt out over memory, a run of each after the other, as channels of images are: which
programs go over them, and the numbers they give.
"""

import pytest
import torch

import fusegen
from fusegen.dealing import Deal, deal_of
from fusegen.describe import Situation, modules
from fusegen.explain import explain
from fusegen.signature import Signature

_TRAINED = "batch_norm(m, v, w, b, training=True)"
_RESIDUAL = f"{_TRAINED} | add(residual) | relu"
_IMAGES = (8, 64, 28, 28)


def signature_of(chain: str, target: str = "cuda", **more: object) -> Signature:
    """The signature of a chain of one segment, with its gradient."""
    (module,) = modules(fusegen.chain(chain), target, Situation(**more), grad=True)
    return module.signature


@pytest.mark.parametrize(
    ("chain", "more", "is_dealt"),
    [
        (f"{_TRAINED} | relu", {}, True),
        (_RESIDUAL, {}, True),
        (_RESIDUAL, {"dtype": "bfloat16"}, True),
        (_TRAINED, {"shape": (8, 64, 784)}, True),
        (_TRAINED, {"shape": (8, 64, 4, 14, 14)}, True),
        # Rows that lie together, and channels innermost.
        (_TRAINED, {"shape": (1, 64, 28, 28)}, False),
        (_TRAINED, {"shape": (512, 64)}, False),
        (_TRAINED, {"layout": "channels_last"}, False),
        # Runs that are no whole packs, and rows that no number of blocks holds.
        (_TRAINED, {"shape": (8, 64, 7, 7)}, False),
        (_TRAINED, {"shape": (128, 64, 256, 256)}, False),
        # What varies along rows but not over all of them, or along other rows, or by place.
        (f"{_TRAINED} | mul(s)", {"operands": {"s": (8, 64, 1, 1)}}, False),
        (f"{_TRAINED} | softmax(1)", {}, False),
        (f"{_TRAINED} | dropout(0.5)", {}, False),
        (f"{_TRAINED} | relu | max_pool2d(2)", {}, False),
        # Offsets of 64 bits.
        (_TRAINED, {"shape": (64, 65536, 32, 32)}, False),
        # What has gaps of its own, and nothing at all.
        (_TRAINED, {"gaps": ("x",)}, True),
        (_TRAINED, {"shape": (0, 64, 28, 28)}, False),
        # Nothing is used again of what is reduced.
        ("mean((0, 2, 3))", {}, False),
        ("std((0, 2, 3))", {}, False),
        ("batch_norm(m, v, w, b)", {}, False),
    ],
)
def test_rows_are_dealt_out_where_all_that_varies_along_them_is(chain, more, is_dealt):
    assert signature_of(chain, **{"shape": _IMAGES, **more}).is_dealt == is_dealt


def test_explain_tells_of_rows_in_runs():
    told = explain(fusegen.chain(_RESIDUAL), "cuda", Situation(shape=_IMAGES), 4000.0)
    assert told.count("rows on the chip, which lie in runs far apart") == 2


def test_a_cpu_goes_over_memory_as_it_lies():
    assert not signature_of(_TRAINED, "cpp", shape=_IMAGES).is_dealt


def test_rows_that_would_leave_many_multiprocessors_idle_are_shared():
    """A row each for 64 of 132, or several blocks for each of them."""
    for channels, is_full in ((64, False), (512, True)):
        ((_, rows), *_) = signature_of(_TRAINED, shape=(128, channels, 14, 14)).rows
        assert (rows.tier.forward is not None) == is_full


def test_a_deal_says_where_every_element_lies():
    domain, order, dealt = (3, 4, 1, 10), (-4, -3, -2, -1), (-3, -2, -4, -1)
    deal = deal_of(order, dealt, domain)
    assert deal == Deal(run=10, gap=30)
    memory = torch.arange(120).view(domain)
    rows, length = 4, 30
    for at, place in enumerate(memory.permute(dealt).flatten().tolist()):
        # As a kernel finds it.
        further = at // length * (deal.run - rows * length)
        assert place == further + at + at // deal.run * deal.gap


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (9, 5, 14, 14),
        (5, 48, 64),
        (64, 150, 8, 8),
        (3, 2, 4, 20, 8),
        (128, 140, 14, 14),  # in one block as large as can be
        (32, 40, 32, 32),  # in several blocks
    ],
    ids=str,
)
@pytest.mark.parametrize("chain", [f"{_TRAINED} | relu", _RESIDUAL, f"{_TRAINED} | gelu"])
def test_a_batch_norm_of_images_is_eagers(chain, shape, dtype, gpu):
    fused = fusegen.compile(chain)
    c = shape[1]
    given = {
        "m": torch.randn(c, device=gpu),
        "v": torch.rand(c, device=gpu) + 0.5,
        "w": torch.randn(c, device=gpu, requires_grad=True),
        "b": torch.randn(c, device=gpu, requires_grad=True),
        "residual": torch.randn(shape, device=gpu).to(dtype).requires_grad_(),
    }
    x = (torch.randn(shape, device=gpu) * 2 + 1).to(dtype).requires_grad_()
    operands = [given[name] for name in fused.chain.operands]
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in operands]
    exact = x.detach().double().requires_grad_()
    expected, found = fused.reference(exact, *doubles), fused(x, *operands)
    assert found.is_contiguous()
    # Two units in the last place: one for rounding, one for what functions are off by in 16 bits;
    # in fp32, sums of thousands that nearly cancel.
    close = {torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)
    for have, want in zip(operands[:2], doubles[:2], strict=True):  # what is updated in place
        torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    cotangent = torch.randn_like(found)
    leaves = [t for t in (x, *operands) if t.requires_grad]
    slopes = torch.autograd.grad(
        expected, [exact, *(t for t in doubles if t.requires_grad)], cotangent.double()
    )
    for have, want in zip(torch.autograd.grad(found, leaves, cotangent), slopes, strict=True):
        assert have.is_contiguous()
        # By the largest: at a kink, rounding decides which side an element is on.
        error = (have.double() - want).abs()
        limit = 8 * close * (want.abs().max() + 1)
        assert (error > limit).double().mean() < 2e-3


@pytest.mark.parametrize("layout", ["transposed", "with gaps", "channels_last", "off 16 bytes"])
def test_a_tensor_may_lie_otherwise(layout, device):
    """In another order, in part of another tensor, or beside a contiguous residual."""
    fused = fusegen.compile(_RESIDUAL)
    shape = (8, 20, 12, 16)
    x = {
        "transposed": lambda: torch.randn(8, 20, 16, 12, device=device).transpose(2, 3),
        "with gaps": lambda: torch.randn(8, 40, 12, 16, device=device)[:, :20],
        "channels_last": lambda: torch.randn(shape, device=device).contiguous(
            memory_format=torch.channels_last
        ),
        "off 16 bytes": lambda: torch.randn(8 * 20 * 192 + 1, device=device)[1:].view(shape),
    }[layout]()
    operands = [
        torch.zeros(20, device=device),
        torch.ones(20, device=device),
        torch.randn(20, device=device),
        torch.randn(20, device=device),
        torch.randn(shape, device=device),
    ]
    doubles = [t.double() for t in operands]
    expected, found = fused.reference(x.double(), *doubles), fused(x, *operands)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(operands[1].double(), doubles[1], rtol=1e-5, atol=1e-5)


def test_every_batch_is_told_where_its_rows_lie(device):
    fused = fusegen.compile(f"{_TRAINED} | relu")
    for batch in (8, 12, 9):
        x = torch.randn(batch, 6, 8, 12, device=device)
        operands = [torch.rand(6, device=device) for _ in range(4)]
        expected = fused.reference(x.double(), *(t.double() for t in operands))
        torch.testing.assert_close(fused(x, *operands).double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients_are_right(device):
    x = torch.randn(3, 2, 4, 4, device=device, dtype=torch.float64, requires_grad=True)
    fused = fusegen.compile("batch_norm(weight=w, training=True) | silu")
    w = torch.rand(2, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, (x, w))
    assert torch.autograd.gradgradcheck(fused, (x, w))
