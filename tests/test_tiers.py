"""Which rows fit on the chip, and how."""

import re

import pytest

from fusegen.columntiers import column_tier
from fusegen.describe import Situation, modules, sources
from fusegen.dsl import chain as parse
from fusegen.summedrows import adding_tier
from fusegen.tiers import MOST_SHARED_BYTES, lanes_of, row_tier

_FRAMES = "layernorm(normalized_shape=(8, 48)) | mul(s)"


@pytest.mark.parametrize(
    ("length", "widest", "lanes"),
    [
        (64, 4, 4),
        (66, 4, 2),
        (65, 4, 1),
        (64, 2, 8),
        (100, 2, 4),
        (63, 2, 1),
        (64, 8, 2),
        (0, 4, 4),
    ],
)
def test_packs_divide_a_row(length: int, widest: int, lanes: int) -> None:
    assert lanes_of(length, widest) == lanes


@pytest.mark.parametrize("length", [1, 63, 512, 513, 4096, 4097, 8192, 8193, 16384, 65536, 262143])
@pytest.mark.parametrize(("widest", "words"), [(4, 1), (4, 2), (4, 3), (2, 2), (4, 4), (8, 6)])
def test_a_row_that_has_a_tier_fits_its_blocks(length: int, widest: int, words: int) -> None:
    tier = row_tier(length, widest, words, words, 132)
    assert tier is not None or length > 16384
    if tier is None:
        return
    # What is in no whole pack, at the edges of rows that begin anywhere, comes beside the packs.
    span = length // tier.lanes * tier.lanes if tier.is_shifted else length
    for elements in (tier.elements, tier.summing_elements):
        blocks = -(-span // (elements * tier.threads))
        assert blocks <= 132
        assert elements % tier.lanes == 0
        assert span <= tier.longest
        # Blocks of other sizes are for single rows only.
        assert blocks == 1 or elements * tier.threads < tier.longest
    assert tier.elements * words <= 64
    assert tier.most_sums(4) >= 1


def test_a_row_of_another_length_seldom_has_another_tier() -> None:
    # But for short ones, whose threads would be half without work.
    for lengths, most in ((range(516, 1 << 19, 4), 6), (range(4, 513, 4), 6)):
        assert len({row_tier(length, 4, 2, 1, 132) for length in lengths}) <= most
    assert len({row_tier(length, 2, 2, 1, 132) for length in range(513, 1 << 19)}) <= 20


def test_threads_hold_fewer_elements_where_fewer_are_without_work_then() -> None:
    for words in (1, 2):
        fewer = (640, 768, 1152, 1280, 1536, 2304)
        for length in (*fewer, 1024, 2048, 2560, 4096):
            tier = row_tier(length, 2, words, 1, 132)
            assert tier is not None
            assert tier.elements == tier.light_elements == (24 if length in fewer else 32)
        shifted = row_tier(769, 2, words, 1, 132)
        assert shifted is not None
        assert shifted.elements == 32


def test_narrow_rows_with_many_sums_by_column_have_a_pack_a_thread() -> None:
    found = {n: row_tier(n, 2, 2, 1, 132, gradients=3) for n in range(520, 4097, 8)}
    assert len({*found.values()}) <= 8
    for length, tier in found.items():
        assert tier is not None
        assert tier.summing_elements == tier.lanes == 8
        assert not tier.may_be_shared
        assert length <= tier.longest
        # Forward nothing is added up.
        assert tier.elements == row_tier(length, 2, 2, 1, 132, gradients=2).elements
    assert row_tier(5000, 2, 2, 1, 132, gradients=3) == row_tier(5000, 2, 2, 1, 132)
    assert row_tier(1024, 4, 2, 1, 132, gradients=3) == row_tier(1024, 4, 2, 1, 132)


@pytest.mark.parametrize(
    ("length", "widest", "plain", "with_moments"),
    [
        *((384, 2, None, 24), (640, 2, 24, 24), (768, 2, 24, 24), (1024, 2, None, 32)),
        *((1152, 2, None, 24), (2304, 2, 24, 24), (4096, 2, None, 32), (8192, 2, None, None)),
        *((384, 4, None, 12), (512, 4, None, 16), (768, 4, None, 12), (1024, 4, None, 16)),
        *((2048, 4, None, None), (1023, 2, None, None), (1023, 4, None, None)),
    ],
)
def test_rows_that_are_summed_up_leave_few_threads_without_work(
    length: int, widest: int, plain: int | None, with_moments: int | None
) -> None:
    tier = row_tier(length, widest, 1, 1, 132, gradients=1)
    assert tier is not None
    dtype = "bfloat16" if widest == 2 else "float32"
    for chain, elements in (("relu | mean(0)", plain), ("layernorm | mean(0)", with_moments)):
        situation = Situation(shape=(64, length), dtype=dtype)
        (module,) = modules(parse(chain), "cuda", situation, grad=False)
        found = adding_tier(tier, length, widest, module.programs)
        assert (found and found.summing_elements) == elements


def test_a_row_too_long_for_a_team_is_left_to_larger_blocks() -> None:
    for processors in (132, 66):
        most = processors * 4096
        for length, is_longest in ((most, False), (most + 4, True)):
            tier = row_tier(length, 4, 2, 1, processors)
            assert tier is not None
            assert tier.is_longest == is_longest
        assert row_tier(most + 1, 4, 2, 1, processors) is None
        assert row_tier(2 * most + 4, 4, 2, 1, processors, has_stretches=True) is None


def test_sums_by_column_are_limited_by_shared_memory() -> None:
    tier = row_tier(8192, 4, 2, 1, 132)
    assert tier is not None
    taken = tier.most_sums(4) * tier.summing_elements * tier.threads * 4
    assert taken <= MOST_SHARED_BYTES


@pytest.mark.parametrize(("length", "behind", "lanes"), [(96, 3136, 4), (96, 49, 1), (512, 784, 4)])
def test_a_strided_row_is_taken_with_its_neighbours(length: int, behind: int, lanes: int) -> None:
    tier = column_tier(length, behind, 4, 2, holds_little=True)
    assert tier is not None
    assert tier.lanes == lanes
    packs = tier.elements // tier.lanes
    assert packs * tier.threads >= length


def test_a_strided_row_of_many_elements_has_no_tier() -> None:
    assert column_tier(1024, 64, 4, 2, holds_little=True) is not None
    assert column_tier(1025, 64, 4, 2, holds_little=True) is None


def test_rows_of_three_narrow_tensors_are_not_shared_for_gradients() -> None:
    long, short = (row_tier(length, 2, 3, 2, 132) for length in (16384, 8192))
    assert long is not None
    assert short is not None
    assert not long.holds_derivatives
    assert short.holds_derivatives
    assert long.elements > long.summing_elements


def test_gradients_hold_fewer_elements_of_a_strided_row() -> None:
    tier = column_tier(128, 4096, 4, 2, holds_little=True)
    assert tier is not None
    assert tier.for_derivatives.elements < tier.elements
    assert tier.for_derivatives.elements % tier.lanes == 0


@pytest.mark.parametrize(
    ("length", "holds_little", "packs"),
    [(64, True, 8), (96, True, 16), (96, False, 8), (512, True, 16), (1024, True, 8)],
)
def test_a_thread_has_more_of_strided_rows_of_two_bytes(
    length: int, holds_little: bool, packs: int
) -> None:
    tier = column_tier(length, 3136, 2, 2, holds_little=holds_little)
    assert tier is not None
    assert tier.lanes == 4
    assert tier.elements == packs * tier.lanes
    assert tier.for_derivatives.elements <= 32


_NORM = "layernorm(w, b, axis=1)"


@pytest.mark.parametrize(
    ("chain", "packs"),
    [
        (_NORM, (16, 8)),
        (f"{_NORM} | gelu", (16, 8)),
        (f"add(c) | {_NORM}", (16, 8)),
        (f"add(r) | {_NORM}", (4, 4)),  # rows of two tensors
        (f"{_NORM} | mul(g)", (8, 4)),  # what samples have of their own in each channel
        (f"{_NORM} | {_NORM}", (8, 4)),  # reduced four times
        (f"silu | {_NORM}", (8, 4)),  # whose functions are kept for the second time
    ],
)
def test_how_much_of_a_channels_row_a_thread_has(chain: str, packs: tuple[int, int]) -> None:
    shapes = {"w": (96,), "b": (96,), "c": (96, 1, 1), "r": (8, 96, 56, 56), "g": (8, 96, 1, 1)}
    made = parse(chain)
    situation = Situation((8, 96, 56, 56), {n: shapes[n] for n in made.operands}, "bfloat16")
    (source,) = sources(made, "cuda", situation, grad=True)
    kernels = re.findall(r"\n(forward|backward)_column\(.*?kPacks = (\d+)", source.text, re.DOTALL)
    assert tuple(int(n) for _, n in kernels) == packs


def test_gradients_hold_no_more_than_registers_have() -> None:
    for length in (64, 1000, 1023, 4096, 8192, 16384):
        tier = row_tier(length, 2, 3, 2, 132)
        assert tier is not None
        assert tier.for_derivatives.elements * 3 <= 64
        assert tier.elements * 2 <= 64


def test_rows_of_stretches_are_held_for_gradients_only_where_they_fit() -> None:
    for words, is_held in ((2, True), (6, False)):
        tier = row_tier(4096, 4, words, 2, 132, has_stretches=True)
        assert tier is not None
        assert not tier.is_shared
        assert tier.holds_derivatives == is_held


@pytest.mark.parametrize(
    ("length", "widest", "elements"),
    [(16, 4, 8), (24, 4, 12), (32, 4, 8), (64, 4, 16), (16, 2, 8), (24, 2, 16), (32, 2, 16)],
)
def test_threads_of_short_rows_read_beside_each_other(
    length: int, widest: int, elements: int
) -> None:
    """Two of a row at least where packs are whole, four of floats where shares come out even."""
    tier = row_tier(length, widest, 1, 1, 132)
    assert tier is not None
    assert tier.elements == elements


@pytest.mark.parametrize(
    ("chain", "shape", "more", "alike"),
    [
        ("group_norm(16) | logsumexp(1)", (8, 64, 14, 14), {"layout": "channels_last"}, 4),
        ("group_norm(4) | logsumexp(1)", (8, 40, 14, 14), {"layout": "channels_last"}, 2),
        ("group_norm(8) | logsumexp(1)", (8, 24, 14, 14), {"layout": "channels_last"}, 1),
        (_FRAMES, (9, 8, 48), {"operands": {"s": (8, 1)}}, 8),
        (_FRAMES, (9, 8, 48), {"operands": {"s": (48,)}}, 1),
        ("layernorm(weight, bias)", (9, 384), {}, 1),
    ],
)
def test_neighbours_that_have_the_same_of_a_group_are_known(chain, shape, more, alike) -> None:
    (module,) = modules(parse(chain), "cuda", Situation(shape=shape, **more), grad=False)
    ((_, rows),) = module.signature.rows
    assert rows.tier.alike == alike
