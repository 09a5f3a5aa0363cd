"""Which long rows have blocks as large as can be."""

from dataclasses import replace

import pytest
import torch
from numeric import assert_as_accurate, outcome

import fusegen
from fusegen.codegen import EntryView
from fusegen.describe import Situation, modules
from fusegen.emission import make_entry
from fusegen.longrows import RowsToHold, full_tier
from fusegen.rowviews import RowView
from fusegen.target import GPUS, H200, TARGETS, Limits
from fusegen.tiers import Tier, row_tier


def tier_of(
    chain: str,
    length: int,
    dtype: str = "float32",
    gpu: Limits = H200,
    before: tuple[int, ...] = (600,),
) -> Tier:
    situation = Situation((*before, length), dtype=dtype, limits=gpu)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    return dict(module.signature.rows)["forward"].tier


@pytest.mark.parametrize(
    ("length", "dtype", "elements"),
    [
        (32000, "float32", 32),
        (50257, "float32", 52),
        (53248, "float32", 52),
        (32001, "bfloat16", 32),
        (50257, "bfloat16", 64),
        (106496, "bfloat16", 104),
    ],
)
def test_a_long_row_has_a_block_that_holds_it(length: int, dtype: str, elements: int) -> None:
    full = tier_of("softmax(-1)", length, dtype).for_forward
    assert full.is_full
    assert full.elements == full.summing_elements == elements
    assert length <= full.longest == elements * full.threads
    assert full.most_sums(4) == 0


@pytest.mark.parametrize(
    ("length", "dtype", "blocks"),
    [
        (24000, "float32", 1),
        (24001, "float32", 1),
        (27776, "float32", 1),
        (32768, "float32", 1),
        (50257, "float32", 2),
        (50257, "bfloat16", 1),
        (55552, "bfloat16", 1),
        (65536, "bfloat16", 1),
        (65544, "bfloat16", 2),
    ],
)
def test_gradients_have_such_blocks_where_those_hold_two_tensors(
    length: int, dtype: str, blocks: int
) -> None:
    full = tier_of("softmax(-1)", length, dtype).for_derivatives
    assert full.is_full
    assert full.is_shared == (blocks > 1)
    assert -(-length // (full.elements * full.threads)) == blocks


@pytest.mark.parametrize(
    ("chain", "length", "dtype"),
    [
        ("softmax(-1)", 16384, "float32"),  # smaller blocks hold it
        ("softmax(-1)", 32000, "float64"),
        ("softmax(-1) | sum(0)", 32000, "float32"),  # rows share the incoming gradient
        ("layernorm(w)", 32001, "float32"),  # w's packs begin elsewhere
        ("add_channel | gelu | layernorm(w)", 20000, "float32"),  # spills
        ("gelu | logsumexp(-1)", 60000, "float32"),  # only read, and no block holds it
    ],
)
def test_other_rows_have_smaller_blocks(chain: str, length: int, dtype: str) -> None:
    tier = tier_of(chain, length, dtype)
    assert not tier.for_forward.is_full
    assert not tier.for_derivatives.is_full


@pytest.mark.parametrize(
    ("chain", "length", "dtype", "elements", "blocks"),
    [
        ("gelu | softmax(-1)", 32000, "float32", 32, 1),
        ("gelu | softmax(-1)", 50304, "float32", 32, 2),
        ("div(30) | tanh | mul(30) | log_softmax(-1)", 50304, "bfloat16", 32, 2),
        ("div(0.7) | softmax(-1)", 32000, "bfloat16", 32, 1),
        ("add_channel | gelu | layernorm(w)", 20000, "bfloat16", 32, 1),
        # One exponential takes few registers.
        ("add_channel | log_softmax(-1)", 50304, "float32", 52, 1),
        ("mul(0.5) | softmax(-1)", 50304, "bfloat16", 64, 1),
    ],
)
def test_what_is_computed_of_each_element_has_room(
    chain: str, length: int, dtype: str, elements: int, blocks: int
) -> None:
    full = tier_of(chain, length, dtype).for_forward
    assert full.is_full
    assert full.elements == elements
    assert -(-length // (elements * full.threads)) == blocks


def test_a_sum_over_rows_and_all_before_them_is_added_up_by_row() -> None:
    weighted, plain = (
        tier_of(f"{norm} | relu", 131072, "bfloat16", before=(8, 75))
        for norm in ("instance_norm(weight=w, bias=b)", "instance_norm")
    )
    assert weighted.for_derivatives == plain.for_derivatives
    assert weighted.for_derivatives.is_full


@pytest.mark.parametrize(
    ("length", "dtype", "is_held", "holds_derivatives"),
    [
        (540672, "float32", True, True),  # by blocks of smaller shares
        (884736, "float32", True, True),
        (1222148, "float32", True, False),  # a gradient would take 45 blocks, and two teams
        (2342912, "float32", True, False),
        (2342916, "float32", False, False),
        (2097152, "bfloat16", True, True),
        (8388608, "bfloat16", False, False),
    ],
)
def test_the_longest_rows_have_three_teams_at_least(
    length: int, dtype: str, is_held: bool, holds_derivatives: bool
) -> None:
    situation = Situation((40, length), dtype=dtype)
    (module,) = modules(fusegen.chain("layernorm | relu"), "cuda", situation, grad=True)
    rows = dict(module.signature.rows)
    assert ("forward" in rows) == is_held
    assert (is_held and rows["forward"].tier.holds_derivatives) == holds_derivatives


def test_few_of_the_longest_rows_leave_nothing_without_work() -> None:
    for count, is_held in ((5, True), (4, False)):  # of twenty blocks each
        situation = Situation((count, 1 << 20))
        (module,) = modules(fusegen.chain("layernorm | relu"), "cuda", situation, grad=False)
        assert bool(module.signature.rows) == is_held


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_longest_rows_are_right(dtype: torch.dtype) -> None:
    fused = fusegen.compile("add_channel | instance_norm(weight=w, bias=b) | leaky_relu(0.01)")
    shapes = [(2, 5, 1 << 20), *[(5,)] * 3]
    inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    eager = outcome(fused.reference, inputs)
    exact = outcome(fused.reference, inputs, dtype=torch.float64)
    found, again = outcome(fused, inputs), outcome(fused, inputs)
    assert_as_accurate(found, eager, exact)
    assert all(map(torch.equal, found.tensors, again.tensors))


@pytest.mark.parametrize(
    ("chain", "length", "dtype", "is_in_turn"),
    [
        ("softmax(-1)", 32772, "float32", True),
        ("layernorm | gelu", 60000, "float32", True),
        ("layernorm", 540672, "float32", True),
        # One block holds it; packs begin elsewhere in each row.
        ("layernorm", 32768, "float32", False),
        ("layernorm", 60001, "float32", False),
        # Columns are added up, three tensors held, rows reduced twice, elements narrow.
        ("layernorm(w)", 60000, "float32", False),
        ("add(r) | softmax(-1) | gelu", 60000, "float32", False),
        ("layernorm | gelu | layernorm", 60000, "float32", False),
        ("softmax(-1)", 60000, "bfloat16", False),
    ],
)
def test_gradients_of_two_tensors_leave_room_for_three_rows(
    chain: str, length: int, dtype: str, is_in_turn: bool
) -> None:
    situation = Situation((600, length), {"r": (600, length)} if "(r)" in chain else {}, dtype)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    tier = dict(module.signature.rows)["forward"].tier.for_derivatives
    assert ((tier.elements, tier.threads) == (16, 256)) == is_in_turn


@pytest.mark.parametrize(
    ("length", "dtype", "blocks"),
    [(65540, "float32", 2), (128256, "float32", 3), (151936, "bfloat16", 2)],
)
def test_a_row_too_long_for_one_has_few_of_them_where_they_meet_twice(
    length: int, dtype: str, blocks: int
) -> None:
    full = tier_of("softmax(-1)", length, dtype).for_forward
    assert full.is_full
    assert full.is_shared
    assert -(-length // (full.elements * full.threads)) == blocks


@pytest.mark.parametrize(
    ("length", "dtype", "packs", "asked", "saving"),
    [
        (53252, "float32", 16, 6, 5),
        (65536, "float32", 16, 6, 5),
        (106504, "bfloat16", 16, 7, 7),
        (128257, "bfloat16", 16, 7, 7),
    ],
)
def test_one_block_asks_for_what_has_no_place_ahead(
    length: int, dtype: str, packs: int, asked: int, saving: int
) -> None:
    """Where blocks would meet twice; of fewer packs beside what is saved of each row."""
    for chain, count in (("log_softmax(-1) | neg", saving), ("softmax(-1)", asked)):
        full = tier_of(chain, length, dtype).for_forward
        assert (full.elements, full.asked) == (packs * full.lanes, count)
        assert full.is_full
        assert not full.is_shared
    assert not tier_of("layernorm", length, dtype).for_forward.asked


@pytest.mark.parametrize(
    ("chain", "length", "dtype", "late"),
    [
        ("log_softmax(-1) | mul(r) | mul(q) | sum(-1)", 32000, "float32", ["q", "r"]),
        ("log_softmax(-1) | mul(r) | sum(-1)", 32000, "float32", ["r"]),
        ("layernorm | add(r) | mul(r)", 32000, "float32", ["r"]),
        ("layernorm | mul(m) | add(r)", 32000, "float32", ["r"]),
        ("softmax(-1) | mul(r)", 102400, "bfloat16", ["r"]),
        ("softmax(-1) | mul(r)", 128256, "bfloat16", ["r"]),
        ("log_softmax(-1) | mul(r) | sum(-1)", 65536, "float32", ["r"]),
        ("softmax(-1) | mul(r)", 32000, "float32", ["r"]),
        ("softmax(-1) | mul(r)", 65536, "float32", ["r"]),
        # Wanted at once, or twice; what one block holds in any case; no whole packs; too long.
        ("add(r) | softmax(-1)", 32000, "float32", []),
        ("softmax(-1) | mul(r) | sum(-1, True) | mul(r)", 32000, "float32", []),
        ("softmax(-1) | mul(r)", 24000, "float32", []),
        ("softmax(-1) | mul(r)", 32001, "float32", []),
        ("add(q) | softmax(-1) | mul(r)", 32000, "float32", []),
        ("log_softmax(-1) | mul(r) | sum(-1)", 65540, "float32", []),
    ],
)
def test_what_is_wanted_late_is_not_held(
    chain: str, length: int, dtype: str, late: list[str]
) -> None:
    operands = {"r": (600, length), "q": (600, length), "m": (length,)}
    given = {name: operands[name] for name in fusegen.chain(chain).operands}
    (module,) = modules(
        fusegen.chain(chain), "cuda", Situation((600, length), given, dtype), grad=False
    )
    tier = dict(module.signature.rows)["forward"].tier.for_forward
    assert [name.removesuffix("_operand") for name in tier.at_use] == late


def test_a_row_too_long_for_a_team_has_none() -> None:
    tier = row_tier(132 * 4096, 4, 1, 1, 132)
    assert tier is not None
    (module,) = modules(fusegen.chain("softmax(-1)"), "cuda", Situation((2, 132 << 12)), grad=False)
    axes = dict(module.signature.rows)["forward"].axes

    def full(processors: int) -> Tier | None:
        return full_tier(tier, RowsToHold(axes, module.programs, 132 << 12, 4, 1, processors))

    assert full(11) is not None  # of 53,248 elements each
    assert full(10) is None


def test_blocks_have_the_shared_memory_that_a_device_has() -> None:
    for gpu in (*GPUS.values(), Limits(16, 64 << 10)):
        checked = 0
        for length in (17000, 24000, 32000, 50257):
            for dtype, width in (("float32", 4), ("bfloat16", 2)):
                full = tier_of("softmax(-1)", length, dtype, gpu).for_forward
                if full.is_full:
                    ahead = full.elements - full.asked * full.lanes
                    assert ahead * full.threads * width < gpu.shared_bytes - (7 << 10)
                    assert full.threads % 32 == 0
                    checked += 1
        assert checked


_GROUPED = "group_norm(8, w, b) | silu"


@pytest.mark.parametrize(
    ("chain", "channels", "length", "dtype", "share"),
    [
        (_GROUPED, 64, 64 * 64, "float32", (16, 256)),
        (_GROUPED, 64, 56 * 56, "float32", (16, 128)),
        (_GROUPED, 128, 32 * 32, "float32", (16, 64)),
        (_GROUPED, 128, 28 * 28, "float32", (8, 64)),
        (_GROUPED, 32, 512 * 512, "float32", (16, 512)),  # no more blocks than a device has
        (_GROUPED, 1024, 14 * 14, "float32", None),  # channels shorter than any share
        (_GROUPED, 16, 1024, "float32", None),  # rows that one block holds
        (_GROUPED, 64, 64 * 64, "bfloat16", None),
        (_GROUPED, 64, 64 * 64, "float64", None),
        (f"silu | {_GROUPED}", 64, 66 * 66, "float32", (16, 256)),
        (f"silu | {_GROUPED}", 64, 63 * 64 + 2, "float32", None),  # dear, and no whole packs
        ("group_norm(8, w, b) | relu | mean(2)", 64, 64 * 64, "float32", None),  # reads x alone
        ("group_norm(8, w, b) | dropout(0.5)", 64, 64 * 64, "bfloat16", None),
        ("group_norm(8, w, b) | tanh | group_norm(8)", 64, 64 * 64, "float32", None),
    ],
)
def test_gradients_of_long_channels_are_shared_by_blocks_where_one_pass_is_faster(
    chain: str, channels: int, length: int, dtype: str, share: tuple[int, int] | None
) -> None:
    given = {"w": (channels,), "b": (channels,)}
    situation = Situation((40, channels, length), given, dtype)
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    tier = dict(module.signature.rows)["forward"].tier
    found = tier.for_derivatives
    if share is None:
        assert tier.derivative is None
    else:
        assert (found.elements, found.threads) == share
        assert found.is_shared
        assert found.has_long_stretches
        assert found.elements * found.threads <= length


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("chain", "shape", "operands"),
    [
        ("group_norm(8, w, b) | silu", (40, 64, 66, 66), [(64,)] * 2),
        (
            "add(t) | mul_channel | group_norm(8, w, b) | relu",
            (40, 64, 56, 56),
            [(40, 64, 1, 1), *[(64,)] * 3],
        ),
        ("group_norm(16, w, b) | gelu", (60, 512, 28, 28), [(512,)] * 2),
        ("group_norm(1, w, b) | relu", (60, 16, 63, 62), [(16,)] * 2),
        ("group_norm(2, w, b) | silu", (3, 8, 512, 512), [(8,)] * 2),
    ],
)
def test_gradients_of_long_channels_are_right_and_alike_every_time(
    chain: str, shape: tuple[int, ...], operands: list
) -> None:
    fused = fusegen.compile(chain)
    inputs = [torch.randn(s, device="cuda").requires_grad_() for s in (shape, *operands)]
    cotangent = torch.randn(shape, device="cuda")
    eager = outcome(fused.reference, inputs, cotangent)
    exact = outcome(fused.reference, inputs, cotangent, dtype=torch.float64)
    found = outcome(fused, inputs, cotangent)
    assert_as_accurate(found, eager, exact)
    for _ in range(5):
        again = outcome(fused, inputs, cotangent)
        assert all(map(torch.equal, again.tensors, found.tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("chain", ["softmax(-1)", "log_softmax(-1)", "layernorm | mul(2)"])
@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        *((n, "float32") for n in (24001, 28001, 32000, 33000, 50257, 53248, 53252, 60001, 128256)),
        *(
            (n, "bfloat16")
            for n in (9216, 50257, 55552, 60001, 64000, 65544, 106496, 128257, 151936)
        ),
        (40003, "float16"),
    ],
)
def test_long_rows_are_right_and_alike_every_time(chain: str, length: int, dtype: str) -> None:
    fused = fusegen.compile(chain)
    # More rows than blocks.
    x, cotangent = torch.randn(2, 140, length, device="cuda", dtype=getattr(torch, dtype))
    inputs = [x.requires_grad_()]
    eager = outcome(fused.reference, inputs, cotangent)
    exact = outcome(fused.reference, inputs, cotangent, dtype=torch.float64)
    found = outcome(fused, inputs, cotangent)
    assert_as_accurate(found, eager, exact)
    for _ in range(5):
        again = outcome(fused, inputs, cotangent)
        assert all(map(torch.equal, again.tensors, found.tensors))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "chain",
    [
        "add(r) | layernorm(w, b)",
        "add(r) | softmax(-1)",
        "log_softmax(-1) | mul(r) | sum(-1)",
        "softmax(-1) | mul(r)",
        "layernorm(w, b) | add(r)",
        "rms_norm | mul(m) | mul(r)",
    ],
)
@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        *((n, "float32") for n in (32000, 32001, 50304)),
        *((n, "bfloat16") for n in (64000, 60001, 102400, 128256)),
    ],
)
def test_long_rows_of_two_tensors_are_right_and_alike_every_time(
    chain: str, length: int, dtype: str
) -> None:
    fused = fusegen.compile(chain)
    shapes = {"r": (140, length), "m": (140, 1), "w": (length,), "b": (length,)}
    shapes = {name: shapes[name] for name in fused.chain.operands}
    inputs = [
        torch.randn(s, device="cuda", dtype=getattr(torch, dtype)).requires_grad_()
        for s in ((140, length), *shapes.values())
    ]
    cotangent = torch.randn_like(fused.reference(*inputs))
    eager = outcome(fused.reference, inputs, cotangent)
    exact = outcome(fused.reference, inputs, cotangent, dtype=torch.float64)
    found = outcome(fused, inputs, cotangent)
    assert_as_accurate(found, eager, exact)
    again = outcome(fused, inputs, cotangent)
    assert all(map(torch.equal, again.tensors, found.tensors))
    with torch.no_grad():
        alone = fused(*inputs)
        torch.testing.assert_close(alone, found.result)
        assert torch.equal(fused(*inputs), alone)


@pytest.mark.parametrize(
    ("chain", "length", "threads"),
    [
        ("add(r) | layernorm(w, b) | gelu", 16384, 512),
        ("add(r) | layernorm(w, b) | gelu", 9000, 384),
        ("add(c) | add(r) | layernorm(w, b)", 12288, 384),
        ("add(c) | add(r) | rms_norm(w)", 16384, 512),
        # Three sums of so many columns take more than a block has; two results, or what waits for
        # other sums, more registers.
        ("add(c) | add(r) | layernorm(w, b)", 16384, 0),
        ("mul(r) | layernorm(w, b)", 16384, 0),
        ("layernorm(w, b) | add(r) | layernorm(v, c)", 16384, 0),
        # Other lengths are held by other tiers, or have no whole packs.
        ("add(r) | layernorm(w, b) | gelu", 8192, 0),
        ("add(r) | layernorm(w, b) | gelu", 9001, 0),
    ],
)
def test_gradients_of_three_tensors_of_two_bytes_are_held_where_there_is_room(
    chain: str, length: int, threads: int
) -> None:
    situation = Situation((600, length), _operands(chain, (600, length)), "bfloat16")
    (module,) = modules(fusegen.chain(chain), "cuda", situation, grad=True)
    tier = dict(module.signature.rows)["backward"].tier
    held = tier.for_derivatives
    # Such a tier has all but a little of the shared memory.
    assert (held.room > tier.room) == bool(threads)
    if threads:
        assert tier.holds_derivatives
        assert (held.elements, held.threads) == (32, threads)
        assert held.elements * held.threads >= length
    small = replace(situation, limits=GPUS["A100"])
    (module,) = modules(fusegen.chain(chain), "cuda", small, grad=True)
    tier = dict(module.signature.rows)["backward"].tier
    assert tier.for_derivatives.room == tier.room


def _operands(chain: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of residuals, called r, and of what every row has, called c."""
    names = fusegen.chain(chain).operands
    return {n: shape if n == "r" else shape[1:] for n in names if n in ("r", "c")}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "chain",
    [
        "add(r) | layernorm(w, b) | gelu",
        "add(c) | add(r) | layernorm(w, b)",
        "add(c) | layernorm(w, b) | gelu",
        "softmax(-1) | mul(c) | mul(r)",
    ],
)
def test_no_kernel_wants_more_shared_memory_than_a_block_may_have(chain: str, gpu: str) -> None:
    limits, most = GPUS[gpu], 0
    for length in (768, 4096, 8192, 12288, 12289, 16384, 32000, 65536, 128256):
        for dtype in ("float32", "bfloat16"):
            shape = (600, length)
            situation = Situation(shape, _operands(chain, shape), dtype, limits=limits)
            for module in modules(fusegen.chain(chain), "cuda", situation, grad=True):
                for program in module.programs:
                    entry = EntryView(make_entry(program, module.signature), TARGETS["cuda"])
                    kernels = [k for k in entry.kernels if isinstance(k, RowView) and k.kernel.tier]
                    # Partials meet in a place of their own, of floats, if they do not where packs
                    # were sent.
                    apart = [k.leaves_columns and not k.leaves_where_sent for k in kernels]
                    cells = [
                        4 * k.cells_of_sums * is_apart
                        for k, is_apart in zip(kernels, apart, strict=True)
                    ]
                    wanted = max(
                        (k.most_room_bytes + n for k, n in zip(kernels, cells, strict=True)),
                        default=0,
                    )
                    most = max(most, wanted)
                    assert wanted <= limits.shared_bytes - (1 << 10), (length, dtype, program.name)
    assert most > limits.shared_bytes // 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("chain", "length"),
    [
        ("add(r) | layernorm(w, b) | gelu", 16384),
        ("add(r) | rms_norm(w)", 12288),
        ("add(r) | layernorm(w, b)", 9000),
        ("add(c) | add(r) | layernorm(w, b)", 12288),
        ("add(c) | add(r) | rms_norm(w) | silu", 16384),
        ("add(c) | layernorm(w, b) | gelu", 12288),
        ("add(c) | add(r) | layernorm(w, b)", 8192),
        # By teams of blocks.
        ("add(c) | add(r) | layernorm(w, b)", 32000),
        ("add(c) | add(r) | layernorm(w, b)", 65536),
    ],
)
def test_long_rows_whose_columns_are_added_up_are_right_and_alike_every_time(
    chain: str, length: int, dtype: torch.dtype
) -> None:
    fused = fusegen.compile(chain)
    shape = (280, length)
    shapes = dict.fromkeys(fused.chain.operands, (length,)) | _operands(chain, shape)
    tensors = [torch.randn(s, device="cuda", dtype=dtype) for s in (shape, *shapes.values())]
    inputs = [t.requires_grad_() for t in tensors]
    cotangent = torch.randn(shape, device="cuda", dtype=dtype)
    eager = outcome(fused.reference, inputs, cotangent)
    exact = outcome(fused.reference, inputs, cotangent, dtype=torch.float64)
    found = outcome(fused, inputs, cotangent)
    assert_as_accurate(found, eager, exact)
    for _ in range(5):
        again = outcome(fused, inputs, cotangent)
        assert all(map(torch.equal, again.tensors, found.tensors))


@pytest.mark.gpu
def test_a_long_row_of_the_least_numbers_is_as_in_eager() -> None:
    x = torch.full((200, 50257), -float("inf"), device="cuda")
    x[:100, 7] = 1
    for chain in ("softmax(-1)", "log_softmax(-1)", "logsumexp(-1)"):
        fused = fusegen.compile(chain)
        torch.testing.assert_close(fused(x), fused.reference(x), equal_nan=True)
