"""Rows that are read turn by turn, where what is added up follows their largest number."""

import math
from pathlib import Path

import pytest
import torch
from emulator import run

import fusegen
from fusegen.describe import Situation, modules, sources
from fusegen.explain import explain
from fusegen.target import Limits

FEW = {"processors": 2}
SOFT = "softmax(-1) | mul(v) | sum(-1)"
CASES = [
    ("cross_entropy(t)", (5, 40000), [(5,)], {}),
    ("cross_entropy(t, w)", (4, 20001), [(4,), (20001,)], {"dtype": "bfloat16"}),
    ("cross_entropy(t, reduction='none')", (5, 9001), [(5,)], {"dtype": "float16"}),
    # What is computed of an element is computed again; what all rows have lies anywhere in memory.
    ("add(b) | logsumexp(-1)", (5, 16391), [(16391,)], {}),
    ("add(b) | logsumexp(-1)", (5, 16400), [(16400,)], {"dtype": "bfloat16"}),
    # Many rows for each multiprocessor, which have smaller turns.
    (SOFT, (24, 9000), [(24, 9000)], {"dtype": "float16"}),
    # What each row has, and groups of rows.
    ("mul(s) | logsumexp(-1) | tanh", (2, 3, 8193), [(3, 1)], {}),
    ("masked_fill(mask, -inf) | logsumexp(-1)", (4, 9000), [(4, 9000)], {}),
]


def rows_of(chain: str, shape: tuple[int, ...], dtype: str = "float32", **shapes):
    situation = Situation(shape, shapes, dtype=dtype)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=False)
    return dict(module.signature.rows).get("forward")


def is_streamed(chain: str, shape: tuple[int, ...], dtype: str = "float32", **shapes) -> bool:
    found = rows_of(chain, shape, dtype, **shapes)
    return found is not None and found.tier.is_streamed


@pytest.mark.parametrize(("chain", "shape", "operands", "more"), CASES)
def test_nothing_of_a_row_is_kept(chain, shape, operands, more, tmp_path: Path) -> None:
    torch.manual_seed(0)
    done = run(chain, shape, operands, tmp_path, **FEW, **more)
    assert "const auto rescale" in done.text
    # Roundings of a few operations, relative to the largest value.
    tolerance = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(more.get("dtype"), 3e-6)
    for have, want in zip(done.results, done.expected, strict=True):
        error = (have.double() - want).abs().max() / (want.abs().max() + 0.1)
        assert error < tolerance


def test_a_row_may_have_gaps_before_and_behind_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    done = run(SOFT, (5, 3, 9000), [(5, 3, 9000)], tmp_path, has_gaps=True, **FEW)
    assert "Pitched<" in done.text
    assert "const auto rescale" in done.text
    for have, want in zip(done.results, done.expected, strict=True):
        assert (have.double() - want).abs().max() / (want.abs().max() + 0.1) < 3e-6


def special_rows(length: int) -> torch.Tensor:
    """Rows whose numbers are infinite, all or in part: at first, at last, in turns of their own."""
    x = torch.randn(9, length)
    x[0] = -math.inf
    x[1, : length // 2] = -math.inf
    x[2, length // 2 :] = -math.inf
    x[3, :-1] = -math.inf
    x[4, 5] = math.inf
    x[5, -1] = math.nan
    x[6], x[6, :4000] = -300.0, -math.inf  # exp(300) is infinite
    x[7, 1:] = -3e38
    x[8] = torch.linspace(-3e4, 3e4, length)
    return x


@pytest.mark.parametrize("chain", ["logsumexp(-1)", SOFT, "cross_entropy(t, reduction='none')"])
@pytest.mark.parametrize("length", [9000, 8195])
def test_infinite_numbers_are_as_in_torch(chain: str, length: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    operands = {"logsumexp(-1)": [], SOFT: [(9, length)]}.get(chain, [(9,)])
    x = special_rows(length)
    done = run(chain, x.shape, operands, tmp_path, x=x, has_gradients=False, **FEW)
    assert "const auto rescale" in done.text
    # In fp32, of numbers up to 3e38: a few roundings of the largest, and of exponents up to 3e4.
    torch.testing.assert_close(
        done.results[0].double(), done.expected[0], rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_long_rows_of_every_device_are_read_so_where_they_are_many() -> None:
    assert is_streamed("logsumexp(-1)", (264, 8193))
    assert not is_streamed("logsumexp(-1)", (263, 8193))
    assert not is_streamed("logsumexp(-1)", (264, 8192))
    assert not is_streamed("logsumexp(-1)", (264, 8193), "float64")
    few = Situation((8, 8193), limits=Limits(4, 99 << 10))
    (module,) = modules(fusegen.chain("logsumexp(-1)"), "cuda", few, grad=False)
    assert dict(module.signature.rows)["forward"].tier.is_streamed


@pytest.mark.parametrize(
    "chain",
    [
        "softmax(-1)",  # written
        "log_softmax(-1) | mul(v) | sum(-1)",  # differs by more than a factor
        "softmax(-1) | square | keep(s) | log | mul(s) | sum(-1)",
        "gelu | logsumexp(-1)",  # functions would be called twice
        "layernorm | amax(-1)",
        "cross_entropy(t, label_smoothing=0.1)",
    ],
)
def test_rows_are_held_where_what_is_added_up_is_not_rescaled(chain: str) -> None:
    assert not is_streamed(chain, (1000, 32000))


def test_it_is_told_how_rows_are_read() -> None:
    told = explain(fusegen.chain("cross_entropy(t)"), "cuda", Situation((1000, 32000)), 4290.0)
    assert "forward_row: rows turn by turn;" in told


def test_losses_are_added_up_by_who_merges_partials() -> None:
    situation = Situation((1000, 32000))
    (source,) = sources(fusegen.chain("cross_entropy(t)"), "cuda", situation, grad=False)
    assert source.text.count("__global__") == 2


def test_rows_of_other_lengths_need_no_other_module() -> None:
    texts = {
        sources(fusegen.chain("cross_entropy(t)"), "cuda", Situation((600, n)), grad=False)[0].text
        for n in (8193, 32000, 50257, 300000)
    }
    assert len(texts) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "length"), [(300, 32000), (2000, 8193), (265, 131072)])
def test_losses_and_gradients_are_torchs(rows: int, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(rows, length, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(length, (rows,), device="cuda")
    labels[::7] = -100
    fused = fusegen.compile("cross_entropy(t)")
    found = fused(x, labels)
    (slope,) = torch.autograd.grad(found, x)
    exact = x.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact, labels)
    (wanted,) = torch.autograd.grad(want, exact)
    width = torch.finfo(dtype).eps  # a rounding is half of it; the sums take some more in fp32
    assert (found.double() - want).abs() <= 2 * width * want
    assert (slope.double() - wanted).abs().max() <= 4 * width * wanted.abs().max()
    again = [fused(x, labels) for _ in range(20)]
    assert all(torch.equal(found, one) for one in again)


@pytest.mark.gpu
@pytest.mark.parametrize("chain", ["logsumexp(-1)", SOFT, "cross_entropy(t, reduction='none')"])
@pytest.mark.parametrize("length", [9000, 8195])
def test_infinite_numbers_are_as_in_torch_on_a_gpu(chain: str, length: int) -> None:
    torch.manual_seed(0)
    x = special_rows(length).repeat(40, 1).cuda()
    operands = {"logsumexp(-1)": [], SOFT: [torch.randn_like(x)]}
    given = operands.get(chain, [torch.randint(length, (x.shape[0],), device="cuda")])
    fused = fusegen.compile(chain)
    with torch.no_grad():
        found = fused(x, *given)
        wide = [g.double() if g.is_floating_point() else g for g in given]
        want = fused.reference(x.double(), *wide)
    # As above.
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
