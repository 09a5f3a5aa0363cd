"""Views of the kernels that take packs of neighbours row by row: with a tier, and column sums.

How a tensor is reached follows from its extent: by the flat index, by the index along the row, or
by the row; whatever is none of these goes element by element.
"""

from __future__ import annotations

from functools import cached_property

from fusegen import ir
from fusegen.indexing import Read
from fusegen.statements import ElementFunction
from fusegen.target import ITEM_BYTES
from fusegen.tiers import MOST_SHARED_BYTES
from fusegen.views import KernelView, ReductionView

# What a block may hold and add up in registers, of 65,536 that a multiprocessor has.
_REGISTERS = 32768
_MOST_AT_ONCE = 16  # elements


class RowView(KernelView):
    """A kernel whose blocks go from row to row, or down columns."""

    @property
    def full_reads(self) -> list[Read]:
        """What varies along every group: reached by the flat index."""
        return [r for r in self._loaded if r.extent == self._all]

    @property
    def full_stores(self) -> list[Read]:
        """What is written by the flat index."""
        return self.stores if self.family == "outer" else self.element_stores

    @cached_property
    def _all(self) -> frozenset[int]:
        return frozenset(self.domain) | frozenset(self.reduced)

    @property
    def _along(self) -> frozenset[int]:
        return frozenset({self.last} if self.family == "outer" else self.reduced)

    @property
    def along_reads(self) -> list[Read]:
        """What varies along the row only: the same for every row."""
        if self.family == "column":
            return []
        along = [r for r in self.partial_reads if r.extent == self._along]
        return [r for r in along if not r.buffer.is_computed]

    @property
    def row_reads(self) -> list[Read]:
        """What does not vary along the row."""
        if self.family == "column":
            return []
        return [r for r in self.partial_reads if not r.extent & self._along]

    @property
    def single_reads(self) -> list[Read]:
        """What is reached by its own offset at every element."""
        known = {r.name for r in self.full_reads + self.along_reads + self.row_reads}
        return [r for r in self.reads if r.name not in known]

    @property
    def partial_reads(self) -> list[Read]:
        """What is broadcast along some group."""
        return [r for r in self.reads if r.extent != self._all or r.buffer.is_computed]

    @property
    def needed(self) -> set[int]:
        """The groups whose indices something asks for."""
        groups = {g for r in (*self.row_reads, *self.single_reads) for g in r.extent}
        groups |= {g for s in self.row_stores for g in s.extent}
        return groups | (set(self.domain[:-1]) if self.kept else set())

    @property
    def flat_row(self) -> str:
        """In column sums: the index of a row among all."""
        return self.compact(self.domain[:-1]) if self.kept else "row"

    @property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return self.full_reads + self.along_reads + self.full_stores

    def held(self, function: ElementFunction) -> list[str]:
        """What a function reads of the values that earlier stages left."""
        return [name for s in self.stages for name in s.held if function.reads(name)]

    # How rows lie in a block.

    @property
    def threads(self) -> int:
        """Threads in a block, at most."""
        return self.kernel.tier.threads if self.kernel.tier else 256

    @property
    def elements(self) -> int:
        """How many elements of a row a thread holds."""
        assert self.kernel.tier is not None
        tier = self.kernel.tier
        return tier.summing_elements if self.sums else tier.elements

    @property
    def lanes(self) -> int:
        """How many elements one access takes."""
        lanes = super().lanes
        return min(lanes, self.kernel.tier.lanes) if self.kernel.tier else lanes

    @property
    def packs(self) -> int:
        """How many packs of each tensor a thread holds."""
        return self.elements // self.lanes

    @property
    def _words(self) -> int:
        return 2 if self.compute == "double" else 1

    @property
    def sums_a_thread(self) -> int:
        """How many columns a thread adds up for each of the sums."""
        return self.packs if self.family == "column" else self.elements

    @property
    def is_guarded(self) -> bool:
        """Whether packs are worked on one by one: so many at once would not fit in registers."""
        return self.family == "row" and self.is_crowded

    @property
    def is_crowded(self) -> bool:
        """Whether a thread holds more than the compiler should have in its hands at once."""
        return self.elements > _MOST_AT_ONCE

    @property
    def least_blocks(self) -> int:
        """How many blocks of its threads a multiprocessor must have room for, which says how many
        registers a thread may have.
        """
        if not self.kernel.tier:
            wide = self.rows_in_flight * self.lanes * len(self.full_reads) * self._words
            return 4 if wide <= 16 and self._words == 1 else 2
        words = self.elements * len(self.full_reads) * self._words
        if self.sums:
            return 768 // self.threads if words <= 16 else 512 // self.threads
        fits = (words <= _MOST_AT_ONCE and self.lanes > 1) or self.is_guarded
        return (1024 if fits else 512) // self.threads

    @property
    def has_shared_sums(self) -> bool:
        """Whether the sums by column would crowd the registers."""
        if not self.kernel.tier or not self.sums:
            return False
        held = self.elements * len(self.full_reads) + self.sums_a_thread * len(self.sums)
        return held * self._words * self.threads >= _REGISTERS

    @property
    def is_sent_ahead(self) -> bool:
        """Whether a block that goes from row to row has the next one's packs on their way.

        It pays where a multiprocessor has room for few blocks; else they hide each other's waits.
        """
        if not self.kernel.tier:
            return False
        is_alone = self.least_blocks * self.threads < 1024
        widths = [ITEM_BYTES[r.buffer.dtype] * self.lanes for r in self.full_reads]
        fits = self._all_bytes <= MOST_SHARED_BYTES and all(w >= 4 for w in widths)
        return fits and (self.family == "column" or is_alone)

    @property
    def _sums_bytes(self) -> int:
        each = self.sums_a_thread * self.threads * 4 * self._words
        return each * len(self.sums) if self.has_shared_sums else 0

    @property
    def _all_bytes(self) -> int:
        return self._sums_bytes + sum(self._bytes_ahead(r) for r in self.full_reads)

    def _bytes_ahead(self, read: Read) -> int:
        return self.elements * self.threads * ITEM_BYTES[read.buffer.dtype]

    @property
    def room_bytes(self) -> int:
        """Dynamic shared memory: what threads have of their own there."""
        return self._all_bytes if self.is_sent_ahead else self._sums_bytes

    def place_ahead(self, read: Read) -> int:
        """Where a tensor's packs are sent, in 16 bytes from the start."""
        before = self.full_reads[: [r.name for r in self.full_reads].index(read.name)]
        return (self._sums_bytes + sum(self._bytes_ahead(r) for r in before)) // 16

    @property
    def most_reductions(self) -> int:
        """The most sums that are merged at once."""
        counts = [len(s.reductions) for s in self.stages]
        counts += [2 * sum(r.kind == "moments" for r in s.reductions) for s in self.stages]
        return max(counts, default=0)

    def result(self, stage: int, reduction: ReductionView, result: str) -> str:
        """A reduction's result from its sums; a mean is mended by what its distances add up to."""
        if reduction.kind != "moments":
            return self._total("sums", stage, reduction)
        moments = [r for r in self.stages[stage].reductions if r.kind == "moments"]
        place = [r.name for r in moments].index(reduction.name)
        drift = self._cell("distances", stage, len(moments) + place)
        if result == "mean":
            return f"{self.centre(stage, reduction)} + {drift} * inverse_length"
        squares = self._cell("distances", stage, place)
        return f"({squares} - {drift} * {drift} * inverse_length) * inverse_length"

    def centre(self, stage: int, reduction: ReductionView) -> str:
        """A mean as the sum has it, about as exact as its rounding."""
        return f"{self._total('sums', stage, reduction)} * inverse_length"

    def _total(self, cells: str, stage: int, reduction: ReductionView) -> str:
        names = [r.name for r in self.stages[stage].reductions]
        return self._cell(cells, stage, names.index(reduction.name))

    def _cell(self, cells: str, stage: int, place: int) -> str:
        lane = "[lane]" if self.family == "column" else ""
        return f"{cells}_{stage + 1}[{place}]{lane}.total"

    @property
    def accumulated(self) -> list[ReductionView]:
        """The reductions that have an accumulator of their kind: on the chip, all are sums."""
        return self.sums

    def operand(self, reduction: ReductionView) -> str:
        """What a reduction accumulates, once more: held, or as it was read."""
        if reduction.operand:
            return f"{reduction.operand}[p][lane]"
        return f"widen({ir.name_of(reduction.reduction.value)}_in[p], lane)"

    def sum_at(self, reduction: ReductionView) -> str:
        """A thread's sum of one column."""
        if self.has_shared_sums:
            place = "p" if self.family == "column" else "(p * kLanes + lane)"
            return f"{reduction.name}_sum[{place} * {self.threads}]"
        return f"{reduction.name}_sum[p]" + ("" if self.family == "column" else "[lane]")

    @property
    def rows_in_flight(self) -> int:
        """In column sums: how many rows a thread loads before it uses the first."""
        return 2
