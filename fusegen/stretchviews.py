"""Views of rows that fall into stretches of equal length, such as the channels of a group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusegen import ir
from fusegen.indexing import Read
from fusegen.mergeviews import MergingView
from fusegen.reductionviews import ReductionView
from fusegen.shortshares import SHORT
from fusegen.statements import ElementFunction
from fusegen.target import DEAR, ITEM_BYTES
from fusegen.tiers import LEAST_STRETCH

_MOST_HELD = 36864  # registers of a multiprocessor for light kernels' elements
_JOINED_PACKS = 2  # of a row, of a thread that joins what it reads
_FEWER_LIGHT = 768  # threads, where elements of two bytes leave no room for more
MOST_AT_ONCE = 16  # elements of a row in the hands of a thread


class StretchingView(MergingView):
    """A kernel whose rows may have stretches."""

    @property
    def kept_own(self) -> list[Read]:
        """What a thread keeps of what rows have of their own all along, but share with others."""
        return []

    @property
    def elements(self) -> int:
        """How many elements of a row a thread holds."""
        assert self.kernel.tier is not None
        tier = self.kernel.tier
        if self.sums or self.stretches or self.kept_own:
            return tier.summing_elements
        if self.joins_reads:
            return _JOINED_PACKS * tier.lanes
        return tier.light_elements if self.is_light else tier.elements

    @cached_property
    def joins_reads(self) -> bool:
        """Whether threads compute one value from each element of several tensors, which is all that
        they keep past the first reduction, and have no registers for a light kernel's shares.
        """
        tier = self.kernel.tier
        if tier is None or self.family != "row" or self._words > 1 or tier.lanes == 1:
            return False
        if self.is_light or self.sums or self.stretches or self.kept_own:
            return False
        held = [name for pairs in self.kernel.held for name, _ in pairs]
        is_apt = SHORT < tier.longest <= _JOINED_PACKS * tier.lanes * tier.threads
        return is_apt and len(held) == 1 < len(self.full_reads)

    @property
    def is_light(self) -> bool:
        """Whether a thread holds so little that many fit on a multiprocessor."""
        return self.light_threads > 0

    @cached_property
    def light_threads(self) -> int:
        """How many those are; 0 where it holds more."""
        tier = self.kernel.tier
        if (
            tier is None
            or not tier.resident
            or self._words > 1
            or self.sums
            or self.stretches
            or self.kept_own
        ):
            return 0
        # One by one, each takes a register, and an address.
        sizes = [ITEM_BYTES[r.buffer.dtype] for r in self.full_reads]
        words = sum(sizes) / 4 if tier.lanes > 1 else len(sizes) + 1
        for _, value in (pair for pairs in self.kernel.held for pair in pairs):
            # What is dear to compute takes registers of its own.
            words += 2 if any(n.op in DEAR for n in ir.topological([value])) else 1
        words += len(self.stages) > 1 and bool(self.element_stores)
        room = _MOST_HELD / (words * tier.light_elements)
        fewer = _FEWER_LIGHT if max(sizes, default=4) <= 2 else tier.resident
        return next((n for n in (tier.resident, fewer) if n <= room), 0)

    @property
    def is_crowded(self) -> bool:
        """Whether a thread holds more than the compiler should have in its hands at once."""
        return self.elements > MOST_AT_ONCE

    @property
    def stretch_reads(self) -> list[Read]:
        """What is the same all along each stretch of a row; none where there is no room for it."""
        lead = self.kernel.lead
        if lead is None:
            return []
        is_full = self.kernel.tier is not None and self.kernel.tier.is_full
        has_room = not self.is_crowded or bool(self.stretches) or is_full
        if not has_room and not self.has_long_stretches and not self.has_a_stretch_a_pack:
            return []
        found = [r for r in self._loaded if r.extent & frozenset(self.reduced) == {lead}]
        return [r for r in found if r.buffer.dtype != "noise"]

    @property
    def long_reads(self) -> list[Read]:
        """What of that is asked for a turn ahead, for both stretches of a block's share: what is
        wanted before rows are reduced. Forward kernels are slower so.
        """
        if not (self.has_long_stretches and self.stretches):
            return []
        functions = [s.function for s in self.stages]
        return [r for r in self.stretch_reads if any(self.reads_of(f, [r]) for f in functions)]

    @property
    def has_whole_stretches(self) -> bool:
        """Whether a pack lies in one stretch."""
        return self.kernel.tier is not None and self.kernel.tier.has_whole_stretches

    @property
    def has_a_stretch_a_pack(self) -> bool:
        """Whether each pack asks for what is of its stretch alone."""
        is_apart = not self.stretches and not self.has_long_stretches
        return self.has_whole_stretches and is_apart

    @property
    def has_long_stretches(self) -> bool:
        """Whether the share that a block has of each row lies in two stretches at most."""
        tier = self.kernel.tier
        is_apt = self.kernel.lead is not None and self.is_team
        return tier is not None and tier.has_long_stretches and is_apt

    @property
    def stretches_by_stage(self) -> list[list[ReductionView]]:
        """The sums of stretches that are known at each stage, and behind the last; without those
        stages that have none.
        """
        found = [*(s.stretches for s in self.stages), self.last_stretches]
        return [sums for sums in found if sums]

    def sums_of_share(self, sums: Sequence[ReductionView]) -> int:
        """How many sums a thread has of its block's share, two of each, as a power of two."""
        return 1 << (2 * len(sums) - 1).bit_length()

    def stretched(self, sums: Sequence[ReductionView]) -> str:
        """The accumulators of a share's two stretches, by the stage that adds them up."""
        before = (n for n, s in enumerate(self.stages, start=1) if s.stretches is sums)
        return f"stretched_{next(before, len(self.stages) + 1)}"

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The groups that tell the rows which leave partials."""
        return self.domain if self.kernel.stretches else super().row_groups

    def has_stretches(self, function: ElementFunction, sums: Sequence[ReductionView]) -> bool:
        """Whether it matters to what is done at each element in which stretch that lies."""
        return bool(sums or self.reads_of(function, self.stretch_reads))

    @property
    def lead(self) -> int:
        """The group that tells the stretches of a row."""
        assert self.kernel.lead is not None
        return self.kernel.lead

    @property
    def stretch_length(self) -> str:
        """How many elements a stretch has."""
        return self.word(max(self.reduced))

    def stretch_place(self, reduction: ReductionView) -> str:
        """Where the sums of a row's stretches lie, counted in rows of stretches."""
        kept, summed = self.compact(reduction.kept), self.compact(reduction.summed)
        return f"(({kept}) * {self.size(reduction.summed)} + {summed})"

    @property
    def domain_groups(self) -> set[int]:
        """The groups that tell the rows."""
        return set(self.domain)

    @property
    def pairs(self) -> int:
        """How many pairs of neighbouring packs a block has."""
        return self.packs * self.threads // 2

    @property
    def most_edges(self) -> int:
        """How many stretches a block's rows can have, and one behind the last."""
        return self.elements * self.threads // LEAST_STRETCH + 2
