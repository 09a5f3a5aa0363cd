"""Chains that reduce along several axes: which rows each program holds, and what comes of it."""

import pytest
import torch
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen.describe import Situation, modules, sources
from fusegen.emission import make_entry
from fusegen.holding import signature
from fusegen.traffic import moved

_GATE = "keep(y) | mean(1, keepdim=True) | sigmoid | mul(y)"
# With how often forward and backward go over memory as long as x.
ROWS_BEFORE_SUMS = {
    "layernorm(w, b) | mean(1)": (1, 2),
    "normalize(2, -1) | abs | sum((0, 1)) | log1p": (1, 2),
    "layernorm(w, b) | amax((1, 2))": (1, 4),
    "layernorm(w, b) | keep(y) | amax((1, 2), True) | rdiv(y)": (3, 5),
    f"layernorm(w, b) | {_GATE}": (3, 5),
    f"{_GATE} | rms_norm(w)": (3, 5),
    "softmax(-1) | keep(y) | mean(1, keepdim=True) | rsub(y)": (3, 4),
    "rms_norm(w) | gelu | softmax(1)": (3, 5),
}
SHAPE = (16, 128, 768)


@pytest.mark.parametrize("chain", ROWS_BEFORE_SUMS)
def test_rows_are_held_so_that_memory_is_gone_over_least(chain: str) -> None:
    (module,) = modules(fusegen.chain(chain), "cuda", Situation((64, 1024, 768)), grad=True)
    times = []
    for program in module.programs:
        found = moved(make_entry(program, module.signature), module.bound)
        times.append(round(found / (64 * 1024 * 768 * 4), 1))
    # What is smaller than x does not count.
    assert times == pytest.approx(ROWS_BEFORE_SUMS[chain], abs=0.15)


@pytest.mark.parametrize(
    ("chain", "operands"),
    [
        ("add(p) | layernorm(w, b)", {"p": (1024, 768)}),
        ("layernorm(w, b) | mul(s) | add(t)", dict.fromkeys("st", (64, 1, 768))),
    ],
)
def test_sums_over_all_rows_are_those_over_rows_that_are_alike(chain: str, operands: dict) -> None:
    situation = Situation((64, 1024, 768), operands=operands)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    backward = make_entry(module.programs[1], module.signature)
    # Reads x and the incoming gradient, writes x's.
    assert moved(backward, module.bound) / (64 * 1024 * 768 * 4) == pytest.approx(3, abs=0.15)


@pytest.mark.parametrize(
    ("chain", "operands", "dtype", "elements"),
    [
        # Two results as large as x beside a sum by column; one, for both.
        ("silu | mul(u) | rms_norm(w)", {"u": (8, 64, 1024)}, "bfloat16", 8),
        ("add(r) | layernorm(w, b)", {"r": (8, 64, 1024)}, "bfloat16", 16),
        ("silu | mul(u) | rms_norm(w)", {"u": (8, 64, 1024)}, "float32", 8),
        # What a sample has for all of its rows, beside one tensor.
        ("layernorm(w, b) | mean(1)", {}, "bfloat16", 8),
        ("layernorm(w, b)", {}, "bfloat16", 16),
    ],
)
def test_what_takes_registers_beside_sums_leaves_fewer_elements_a_thread(
    chain: str, operands: dict, dtype: str, elements: int
) -> None:
    situation = Situation((8, 64, 1024), operands=operands, dtype=dtype)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    (rows,) = (r for name, r in module.signature.rows if name == "backward" and r.axes == {-1})
    assert rows.tier.for_derivatives.summing_elements == elements


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_share_something_are_right_where_a_block_has_two_of_them(
    dtype: torch.dtype, gpu: torch.device
) -> None:
    # 33,147 rows, two to a block at a time: the last has one.
    x = torch.randn(127, 261, 512, device=gpu).to(dtype)
    scale, shift = (torch.randn(127, 1, 512, device=gpu).to(dtype) for _ in range(2))
    result = fusegen.compile("layernorm | mul(s) | add(t)")(x, scale, shift)
    wide = torch.nn.functional.layer_norm(x.double(), (512,)) * scale.double() + shift.double()
    error = (result.double() - wide).abs() / (1 + wide.abs())
    # The result's own rounding, and that of a sum over 512 elements; a row that is not its own is
    # off by more than 1.
    assert error.max().item() < (1e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(
    ("chain", "shape", "dtype", "is_asked"),
    [
        ("add(p) | layernorm(w, b)", (8, 197, 768), "float32", True),
        ("add(p) | layernorm(w, b)", (8, 197, 768), "bfloat16", True),
        ("add(p) | layernorm(w, b)", (8, 2048, 1024), "float32", False),  # 8 MB of it
        ("add(p) | layernorm(w, b)", (8, 197, 2048), "bfloat16", False),
        ("add(p) | layernorm(w, b)", (8, 197, 256), "float32", False),
        ("add(p) | softmax(-1)", (8, 197, 768), "float32", False),  # gone over twice
        ("layernorm | mul(p)", (8, 197, 768), "float32", False),  # behind the sums
    ],
)
def test_what_some_rows_share_is_asked_for_again_where_that_is_cheap(
    chain: str, shape: tuple[int, ...], dtype: str, is_asked: bool
) -> None:
    situation = Situation(shape, {"p": shape[1:]}, dtype)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    for name, rows in module.signature.rows:
        assert rows.tier.asks_again == is_asked
        assert not rows.tier.for_derivatives.asks_again, name


@pytest.mark.parametrize(
    ("positions", "elements"), [((), 8), ((256,), 8), ((257,), 16)], ids=["all", "few", "many"]
)
def test_gradients_of_few_positions_take_a_pack_a_thread(
    positions: tuple[int, ...], elements: int
) -> None:
    shape = (8, *(positions or (16,)), 768)
    situation = Situation(shape, {"p": (*positions, 768)}, "bfloat16")
    chain = fusegen.chain("add(p) | layernorm(w, b)")
    (module,) = modules(chain, "cuda", situation, grad=True)
    rows = dict(module.signature.rows)
    assert rows["backward"].tier.for_derivatives.summing_elements == elements


def test_programs_of_a_module_may_hold_different_rows() -> None:
    chain = f"layernorm(w, b) | {_GATE}"
    (module,) = modules(fusegen.chain(chain), "cuda", Situation((64, 1024, 768)), grad=True)
    rows = dict(module.signature.rows)
    assert rows["forward"].axes != rows["backward"].axes


# With the kernels of forward and backward.
LEFT = {
    "mean(2, keepdim=True) | softmax(1) | tanh": ("column column", "column"),
    "amin(2) | softmax(1)": ("column column", "column column column"),
    "mean((2, 3), keepdim=True) | logsumexp(1)": ("row row", "pointwise"),
    "square | mean((2, 3), True) | keep(g) | mean(1, True) | rdiv(g)": (
        "row row",
        "row pointwise",
    ),
    "softmax(-1) | log | sum(-1) | mean((0, 1, 2))": ("row inner finalise", "row"),
    "softmax(-1) | log | sum(-1) | mean((1, 2)) | mean": ("row row row", "row"),
}


@pytest.mark.parametrize("chain", LEFT)
def test_rows_of_what_reductions_leave_have_a_kernel_too(chain: str) -> None:
    (module,) = modules(fusegen.chain(chain), "cuda", Situation((16, 32, 24, 96)), grad=True)
    entries = (make_entry(p, module.signature) for p in module.programs)
    assert tuple(" ".join(k.family for k in entry.kernels) for entry in entries) == LEFT[chain]


@pytest.mark.parametrize(
    "chain", ["cross_entropy(t)", "log_softmax(-1) | mul(0.5) | sum(-1) | mean"]
)
def test_how_many_samples_a_loss_is_of_makes_no_other_module(chain: str) -> None:
    found = {
        part.text
        for count in (1025, 3001, 8192, 12_001, 65_537)
        for part in sources(fusegen.chain(chain), "cuda", Situation((count, 320)), grad=True)
    }
    assert len(found) == 1


def test_a_chain_with_one_way_to_hold_rows_is_not_scheduled_to_choose(monkeypatch) -> None:
    (module,) = modules(fusegen.chain("layernorm(w, b)"), "cuda", Situation((64, 768)), grad=True)
    monkeypatch.setattr("fusegen.holding.make_entry", None)
    dtypes = dict(module.signature.dtypes)
    again = signature("cuda", module.order, module.programs, dtypes, module.bound)
    assert again == module.signature


# A count of equal maxima is of the very bits that the forward had, whatever rows each one holds.
AMAX = (
    "keep(x1) | norm(2, 2, keepdim=True) | keep(n) | mean(1, keepdim=True) | add(1e-6) | reciprocal"
    " | mul(n) | mul(x1) | amax(1, keepdim=True) | layernorm(w, b)"
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("chain", [*ROWS_BEFORE_SUMS, AMAX, *LEFT])
def test_they_are_right(chain: str, dtype: str, device: str) -> None:
    torch.manual_seed(4)
    shape = SHAPE if device == "cuda" else (5, 40, 72)
    shape = (6, 8, 24, 96) if chain in LEFT else shape
    kind = {"device": device, "dtype": getattr(torch, dtype)}
    fused = fusegen.compile(chain)
    inputs = [torch.randn(shape, **kind)]
    inputs += [torch.rand(shape[-1], **kind) + 0.5 for _ in fused.chain.operands]
    inputs = [t.requires_grad_() for t in inputs]
    found, eager = outcome(fused, inputs), outcome(fused.reference, inputs)
    exact = outcome(fused.reference, inputs, dtype=torch.float64)
    assert_as_accurate(found, eager, exact)
