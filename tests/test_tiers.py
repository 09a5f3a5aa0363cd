"""Which rows fit on the chip, and how."""

import pytest

from fusegen.tiers import MOST_SHARED_BYTES, column_tier, lanes_of, row_tier


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


@pytest.mark.parametrize("length", [1, 63, 512, 513, 4096, 4097, 8192, 8193, 16384])
@pytest.mark.parametrize(("widest", "words"), [(4, 1), (4, 2), (2, 2), (4, 4), (8, 6)])
def test_a_row_that_has_a_tier_fits_a_block(length: int, widest: int, words: int) -> None:
    tier = row_tier(length, widest, words)
    if tier is None:
        assert length > 4096
        return
    for elements in (tier.elements, tier.summing_elements):
        assert elements * tier.threads >= length
        assert elements % tier.lanes == 0
    assert tier.elements * words <= 64
    assert tier.most_sums(4) >= 1


def test_a_row_too_long_for_a_block_has_no_tier() -> None:
    assert row_tier(16384, 4, 2) is not None
    assert row_tier(16388, 4, 2) is None
    assert row_tier(16383, 4, 2) is None  # single elements need an address each


def test_sums_by_column_are_limited_by_shared_memory() -> None:
    tier = row_tier(16384, 4, 2)
    assert tier is not None
    taken = tier.most_sums(4) * tier.summing_elements * tier.threads * 4
    assert taken <= MOST_SHARED_BYTES


@pytest.mark.parametrize(("length", "behind", "lanes"), [(96, 3136, 4), (96, 49, 1), (512, 784, 4)])
def test_a_strided_row_is_taken_with_its_neighbours(length: int, behind: int, lanes: int) -> None:
    tier = column_tier(length, behind, 4, 2)
    assert tier is not None
    assert tier.lanes == lanes
    packs = tier.elements // tier.lanes
    assert packs * tier.threads >= length


def test_a_strided_row_of_many_elements_has_no_tier() -> None:
    assert column_tier(1024, 64, 4, 2) is not None
    assert column_tier(1025, 64, 4, 2) is None
