"""Views of sums by column: where a thread has its own, and how a block leaves them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from fusegen import arity, ir
from fusegen.aheadviews import AheadView
from fusegen.indexing import Read
from fusegen.passingviews import FEW_LANES, MOST_IN_PAIRS
from fusegen.reductionviews import ReductionView
from fusegen.target import ITEM_BYTES

_BANKS = 32
_MOST_STAGED, _MOST_SIMPLE = 45, 16  # registers of a thread, and operations on each element
# Blocks where rows pass by, by the registers of what a thread keeps of its columns beside them.
_BLOCKS_PASSING = ((12, 4), (32, 3), (48, 2), (1 << 30, 1))
_LITTLE_ALONG = 16  # registers that each of four blocks' threads has anyway, for what all rows read
_MOST_BESIDE_OTHERS = 128  # threads of a row that shares a block with others


def words_of(reads: Iterable[Read]) -> float:
    """The registers that an element of each takes."""
    return sum(ITEM_BYTES[r.buffer.dtype] for r in reads) / 4


class SummingView(AheadView):
    """A kernel whose threads may add up columns while rows pass by."""

    @property
    def adds_products(self) -> bool:
        """Whether a sum takes the factors of a product, and joins them with its addition."""
        return self.kernel.tier is not None

    @property
    def adds_anyway(self) -> bool:
        """Whether elements are added up without a condition at each: behind those of a team's
        blocks, which also count turns, nvcc puts a branch around each element.
        """
        return self.is_team

    @property
    def sums_anyway(self) -> bool:
        """Whether columns are, those beyond a row's end too, for which nobody asks: where a block
        has no rows side by side, of which some may be none.
        """
        tier = self.kernel.tier
        if tier is None or self.family != "row":
            return False
        return self.is_team or tier.shortest >= _MOST_BESIDE_OTHERS * self.elements

    @cached_property
    def adds_little(self) -> bool:
        """Whether short rows of single elements leave room for a third block beside their sums."""
        held = self.elements * len(self.full_reads + self.along_reads + self.sums)
        nodes = ir.topological(self.expressions)
        many = sum(n.op in arity.ARITY and n.extent == self._all for n in nodes)
        fits = held <= _MOST_STAGED and many <= _MOST_SIMPLE
        return self.is_staged and self._words == 1 and fits

    def sum_at(self, reduction: ReductionView) -> str:
        """A thread's sum of one column."""
        if self.packs_sums:
            return f"{reduction.name}_sum[{self.pack_of_sums}].at[lane % {self.sums_a_pack}]"
        if self.has_shared_sums:
            place = "p" if self.family == "column" else "(p * kLanes + lane)"
            return f"{reduction.name}_sum[{place} * {self.threads}]"
        return f"{reduction.name}_sum[p]" + ("" if self.family == "column" else "[lane]")

    @property
    def sums_a_pack(self) -> int:
        """How many neighbours' sums an access takes to shared memory: as many as to their partials,
        but one where elements have four bytes, or packs begin anywhere: nvcc spills for more.
        """
        return self.sums_at_once if self.family == "row" and self.is_narrow else 1

    @property
    def packs_sums(self) -> bool:
        """Whether sums by column are in shared memory, in packs of neighbours."""
        return self.has_shared_sums and self.sums_a_pack > 1

    @property
    def type_of_sums(self) -> str:
        """What a thread has there at a place."""
        kind = f"Sum<{self.compute}>"
        return f"Pack<{kind}, {self.sums_a_pack}>" if self.packs_sums else kind

    @property
    def pack_of_sums(self) -> str:
        """Which of them has the sum of one column."""
        return f"(p * kLanes + lane) / {self.sums_a_pack} * {self.threads}"

    @property
    def leaves_columns(self) -> bool:
        """Whether each block leaves sums of columns that lie beside each other."""
        by_row = self.family == "row" and not self.kept
        return bool(self.sums) and (by_row or self.family == "outer")

    @property
    def cells_of_sums(self) -> int:
        """How many sums by column a block leaves at once, with what keeps them in other banks."""
        return self.threads * (self.packs if self.is_staged else self.lanes) + _BANKS

    @property
    def leaves_where_sent(self) -> bool:
        """Whether they fit where packs were sent ahead."""
        wanted = self.cells_of_sums * 4 * self._words
        return self.is_sent_ahead and wanted <= self.turns_ahead * self._bytes_a_turn

    @property
    def sums_at_once(self) -> int:
        """How many neighbours' sums an access takes to their partials."""
        return 1 if self.is_shifted else min(self.lanes, 4 // self._words)

    @property
    def _kept_words(self) -> float:
        """Of sums down columns: the registers of what stands beside rows that pass by, beyond the
        few of tensors that every row reads where columns have nothing of their own.
        """
        kept, along = len(self.staying) + words_of(self.own_reads), words_of(self.along_reads)
        if not kept:
            return self.lanes * along + 2 * len(self.row_reads) - _LITTLE_ALONG
        kept += along + len(self.single_reads) / 2
        if not self.own_reads:
            return self.lanes * (kept + (len(self.sums) > 1))
        kept += sum(3 if s.kind == "moments" else 1 for s in self.sums)
        return self.lanes * kept + 2 * len(self.row_reads)

    @property
    def blocks_passing(self) -> int:
        """Of columns that rows pass by: how many blocks a multiprocessor is to have."""
        if self._words > 1:
            return 1 if self._kept_words > 0 else 2
        wide = self.lanes * len(self.full_reads)
        # What long packs of columns have, nvcc widens and finds more ahead from.
        is_wide = self.lanes > FEW_LANES and bool(self.along_reads) and not self.staying
        has_much = (is_wide or self.own_reads) and not self.sums
        has_some = self.staying or self.kernel.has_gaps or self.reads_little
        few = 2 if has_much else 3 if has_some else 4
        most = few if wide <= 8 else 2 if wide <= MOST_IN_PAIRS else 3
        return min(most, next(n for words, n in _BLOCKS_PASSING if self._kept_words <= words))
