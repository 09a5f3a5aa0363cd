"""Views of how kernels that go by rows reach a tensor, and where a row's packs lie.

How a tensor is reached follows from its extent: by the flat index, along the row, or by the row;
whatever is none of these goes element by element. Packs lie from a row's start on, or shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusegen import ir
from fusegen.indexing import Read
from fusegen.mergeviews import Merged
from fusegen.passingviews import PassingView
from fusegen.statements import ElementFunction
from fusegen.stretchviews import MOST_AT_ONCE
from fusegen.target import FUNCTIONS, ITEM_BYTES
from fusegen.tiers import LONGEST_STAGED, MOST_BLOCKS, MOST_SHARED_BYTES

_MOST_ASKED = 5  # packs at a place, of all tensors, by kernels that send none ahead


class PlacedView(PassingView):
    """A kernel whose threads take packs of a row, or of a block's share of it, or of a column."""

    most_blocks = MOST_BLOCKS  # of a team
    most_reading = 1280  # threads of a multiprocessor that only reduce rows
    strips = 16  # of rows beside each other, whose sums a thread leaves

    @cached_property
    def _most_room(self) -> int:
        """How many bytes of shared memory a block may have beside what is not sent there."""
        if self.kernel.tier is None:
            return 0
        taken = (self.pairs + self.most_edges) * len(self.stretches) if self.stretches else 0
        if self.family == "column":
            taken += (16 + 1) * self.most_beside * self.most_reductions * self.lanes
        room = self.kernel.tier.room - 4 * self._words * taken
        # Measured: sums of wide rows gain from packs two turns ahead, of others they do not.
        is_wide = self.family == "row" and bool(self.sums) and not self.is_narrow
        is_wide |= self.is_team and bool(self.stretches)
        is_wide |= self.adds_many and not self.is_shifted
        return room if self.kernel.tier.is_full or is_wide else min(MOST_SHARED_BYTES, room)

    @cached_property
    def adds_many(self) -> bool:
        """Whether a thread adds up more columns of narrow rows than others do."""
        is_apt = self.kernel.tier is not None and self.family == "row" and not self.is_team
        return is_apt and bool(self.sums) and self.is_narrow and self.elements > MOST_AT_ONCE

    @property
    def most_beside(self) -> int:
        """How many threads a block has beside each other, at most, where rows are strided."""
        is_small = self.most_reductions * self._words <= 2
        is_wide = is_small and self.kernel.only_reads_columns and not self._passes_by
        return 32 if self.lanes == 1 or is_wide else 16

    @property
    def _passes_by(self) -> bool:
        """Whether strided rows are reduced in so few instructions that blocks hide each other's
        waits.
        """
        is_short = len(self.stages) == 1 and self.threads <= 256
        if not (is_short and self.kernel.only_reads_columns):
            return False
        found = self.stages[0].reductions
        return all(r.kind in ("sum", "peak") and not r.is_costly for r in found)

    @property
    def is_alone(self) -> bool:
        """Whether a thread has strided rows to itself."""
        tier = self.kernel.tier
        return tier is not None and tier.is_alone and self.family == "column"

    @property
    def is_whole(self) -> bool:
        """Whether threads that share strided rows have all their packs, or none; the tier knows so
        of packs as long as its own.
        """
        tier = self.kernel.tier
        if tier is None or self.family != "column":
            return False
        return tier.is_whole and self.lanes == tier.lanes

    @property
    def reads_anyway(self) -> bool:
        """Whether threads without a part of a row read what others do, which for packs is faster
        than a branch around all loads, and not for single elements of rows.
        """
        is_apt = self.is_whole and self.lanes > 1 and not self.is_sent_ahead
        return is_apt or self.family == "outer"

    @property
    def full_stores(self) -> list[Read]:
        """What is written by the flat index."""
        return self.stores if self.family == "outer" else self.element_stores

    @cached_property
    def along_reads(self) -> list[Read]:
        """What varies along the row only: the same for every row."""
        if self.family == "column":
            return []
        along = [r for r in self.partial_reads if r.extent == self._along]
        return [r for r in along if not r.buffer.is_computed]

    @cached_property
    def row_reads(self) -> list[Read]:
        """What does not vary along the row."""
        found = [r for r in self.partial_reads if not r.extent & self._along]
        return [r for r in found if r not in self.column_reads]

    @cached_property
    def own_reads(self) -> list[Read]:
        """What rows have of their own all along, but share with some others."""
        tier = self.kernel.tier
        is_held = self.family == "row" and tier is not None and tier.lanes > 1
        is_passing = self.family == "outer" and not self.has_strips
        if not (is_held or is_passing) or self.is_shifted:
            return []
        return [r for r in self._plain_reads if r.extent > self._along]

    @property
    def staying_reads(self) -> list[Read]:
        """Of sums down columns: what of that is the same for all that a thread adds up."""
        staying = {*self.kept, *self.kernel.columns}
        return [r for r in self.own_reads if r.extent <= staying]

    @cached_property
    def single_reads(self) -> list[Read]:
        """What is reached by its own offset at every element."""
        known = {r.name for r in self.full_reads + self.along_reads + self.row_reads}
        known |= {r.name for r in self.stretch_reads + self.own_reads + self.column_reads}
        known |= {r.name for r in self.drawn_reads + self.asked_reads}
        return [r for r in self.reads if r.name not in known]

    @property
    def needed(self) -> set[int]:
        """The groups whose indices something asks for."""
        tensors = (*self.row_reads, *self.single_reads, *self.stretch_reads, *self.own_reads)
        groups = {g for r in tensors for g in r.extent}
        groups |= {g for s in self.row_stores for g in s.extent}
        return groups | (set(self.row_groups) if self.kept and self.family == "outer" else set())

    @property
    def outermost_kept(self) -> int | None:
        """The group that sums keep of those of a row, where others are further in."""
        is_outer = bool(self.kept) and self.kept != self.domain[-len(self.kept) :]
        return self.kept[0] if is_outer and self.family == "row" else None

    @property
    def reads_here(self) -> list[Read]:
        """What asks for a row's indices in the turn of the row, rather than ahead of it."""
        own = [] if self.is_sent_ahead else self.row_reads
        others = [] if self.kept_own else self.own_reads
        stores = [s for s in self.row_stores if s.extent]
        return self.single_reads + others + self.stretch_reads + stores + own

    def locate_all(self, index: str, groups: Sequence[int], tensors: Sequence[Read]) -> list[str]:
        """Lines that take an index apart as far as some tensors ask for it."""
        return self.taken_apart(index, groups, {g for r in tensors for g in r.extent})

    @cached_property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        along = [] if self.is_shifted else self.along_reads
        own = [] if self.family == "outer" else self.own_reads
        return self.full_reads + along + own + self.full_stores

    @cached_property
    def is_narrow(self) -> bool:
        """Whether some of what is moved in packs has elements of less than 32 bits."""
        return any(ITEM_BYTES[r.buffer.dtype] < 4 for r in self.packed)

    @property
    def is_shifted(self) -> bool:
        """Whether packs begin at multiples of their size in memory, not where their row does."""
        tier = self.kernel.tier
        return tier is not None and tier.is_shifted and self.family == "row"

    @property
    def is_team(self) -> bool:
        """Whether a row may be longer than a block can hold, so that several blocks share it."""
        tier = self.kernel.tier
        if tier is None or self.family != "row":
            return False
        return self.elements * tier.threads < tier.longest

    @property
    def is_staged(self) -> bool:
        """Whether a block moves its rows as a whole, by way of shared memory: where they are short,
        and their elements come one by one. A thread's are neighbours there.
        """
        tier = self.kernel.tier
        if tier is None or self.family != "row" or self.is_shifted or self.is_team:
            return False
        widths = [ITEM_BYTES[t.buffer.dtype] for t in self.full_reads + self.element_stores]
        # So that blocks begin at whole packs of 16 bytes: rows in their order, no single bytes.
        lie_apt = self.outermost_kept is None and min(widths, default=0) > 1
        is_short = tier.longest <= LONGEST_STAGED and not self.stretches
        return lie_apt and is_short and self.lanes == 1

    @property
    def base(self) -> str:
        """Where the packs of a row, or of a block's share of it, begin in memory."""
        return "row * length" + self._offset

    @property
    def in_rows(self) -> list[Read]:
        """The tensors in pieces of which each row is one, where a block goes from row to row."""
        if self.family != "row" or self.is_team or self.is_dealt:
            return []
        found = [(r, r.buffer.gaps) for r in self.full_reads + self.element_stores]
        return [r for r, gaps in found if gaps and gaps.run == self.kernel.reduced]

    @property
    def is_dealt(self) -> bool:
        """Whether they are found one by one, as rows are dealt out over memory."""
        return self.kernel.is_dealt

    def offset_along(self, read: Read, index: str = "i") -> str:
        """Where a thread's pack lies in what all rows share, or in what some do."""
        rows = [g for g in read.buffer.extent if g not in self._along]
        length = "columns" if self.family == "outer" else "length"
        return (f"({self.compact(rows)}) * {length} + " if rows else "") + index + self._offset

    def offset_of_line(self, read: Read) -> str:
        """The same for what lies along a row, added to its address piece by piece."""
        rows = self.compact([g for g in read.buffer.extent if g not in self._along])
        return f"({rows}) * length + (is_here ? {self.column} : 0)"

    @property
    def column(self) -> str:
        """The index along the row of the first element of a thread's pack."""
        return "i" + self._offset

    @property
    def _offset(self) -> str:
        return (" + begin" if self.is_team else "") + (" + head" if self.is_shifted else "")

    @property
    def span(self) -> str:
        """How many elements a row's packs have."""
        return "whole" if self.is_shifted else "length"

    @property
    def host_span(self) -> str:
        """span at most, where the launch is set up."""
        length = f"{self.name}_length"
        return f"{length} / {self.lanes} * {self.lanes}" if self.is_shifted else length

    @property
    def only_reads_rows(self) -> bool:
        """Whether rows of a few floats a thread are reduced, and nothing of their size is kept."""
        if self.family != "row" or self.element_stores or self.left or self.carried:
            return False
        is_costly = len(self.stages) > 1 or any(r.is_costly for r in self.reductions)
        if self.has_moments and is_costly:
            return False
        is_plain = self.compute == "float" and not self.is_shifted and not self.partial_reads
        dtypes = [r.buffer.dtype for r in self.full_reads]
        return is_plain and dtypes == ["float32"] and self.elements <= MOST_AT_ONCE

    @property
    def leaves_much(self) -> bool:
        """Whether many stages of reductions leave values of more elements than are held else."""
        if self.family != "row" or self.elements <= MOST_AT_ONCE:
            return False
        # Of narrow ones more elements are held, and what is left of two tensors takes whole words.
        if all(ITEM_BYTES[r.buffer.dtype] <= 2 for r in self.full_reads):
            return bool(self.carried) and len(self.stages) > 1 and len(self.full_reads) > 1
        return len(self.stages) > 2 and len(self.full_reads) + len(self.carried) > 2

    @property
    def waits_much(self) -> bool:
        """Whether forward rows wait for one reduction after another, so that blocks hide each
        other's waits as long as little is asked for beside them: by rows of what all of them read.
        """
        if self.family != "row" or self.entry_name != "forward" or len(self.stages) < 2:
            return False
        functions = [*(s.function for s in self.stages), self.values]
        asked = sum(len(self.reads_of(f, self.along_reads + self.own_reads)) for f in functions)
        return asked + len(self.full_reads) <= _MOST_ASKED

    @property
    def called_again(self) -> frozenset[str]:
        """The functions that are called for the elements of a row before a reduction over them,
        and behind it once more.
        """
        if self.family != "row" or len(self.stages) < 2 or self.carried:
            return frozenset()
        terms = ir.topological(r.value for r in self.kernel.stages[0] if r.value is not None)
        return FUNCTIONS.intersection(n.op for n in terms if n.extent == self._all)

    @property
    def most_edges_beside(self) -> int:
        """How many elements at edges a block has at most, those of all its rows beside each other;
        fewer where rows are longer.
        """
        tier = self.kernel.tier
        if tier is None or not self.is_shifted:
            return 0
        edges = 2 * self.lanes
        along = max(edges, tier.shortest // self.elements)
        return edges * max(1, 256 // (1 << along.bit_length() - 1))

    @property
    def reach(self) -> str:
        """How many elements a block's packs have."""
        return "reach" if self.is_team else self.span

    @property
    def own(self) -> str:
        """How many elements of a row a block has."""
        if not self.is_team:
            return "length"
        return "own" if self.is_shifted else "reach"

    @property
    def threads(self) -> int:
        """Threads in a block, at most."""
        tier = self.kernel.tier
        if tier is None or self.family != "row":
            return tier.threads if tier else 256
        return min(tier.threads, max(256, -(-tier.longest // (32 * self.elements)) * 32))

    @cached_property
    def lanes(self) -> int:
        """How many elements one access takes."""
        lanes = super().lanes
        return min(lanes, self.kernel.tier.lanes) if self.kernel.tier else lanes

    @property
    def packs(self) -> int:
        """How many packs of each tensor a thread holds."""
        tier = self.kernel.tier
        return tier.longest if tier and self.is_alone else self.elements // self.lanes

    @property
    def sums_a_thread(self) -> int:
        """How many columns a thread adds up for each of the sums."""
        return self.packs if self.family == "column" else self.elements

    @property
    def warps(self) -> str:
        """Warps in a block at most, as a power of two; whether a row always has more than one."""
        return f"{1 << (self.threads // 32 - 1).bit_length()}, {self.is_wide}"

    @property
    def is_wide(self) -> str:
        """Whether a row always has more threads than a warp."""
        tier = self.kernel.tier
        if tier is None or tier.is_shared:
            return str(tier is not None).lower()
        beyond = 32 * self.elements + (2 * self.lanes if self.is_shifted else 0)
        # Measured: where registers are short, and in forward kernels, it is better not to know.
        gains = bool(self.sums) and self.packs <= 2 and self.threads <= 512
        return str(gains and tier.shortest >= beyond).lower()

    def held(self, function: ElementFunction) -> list[str]:
        """What a function reads of the values that earlier stages left."""
        return [name for s in self.stages for name in s.held if function.reads(name)]

    @property
    def in_place(self) -> dict[str, str]:
        """By name, what a stage leaves in shared memory in the place of what was read."""
        return {ir.name_of(leaf): ir.name_of(read) for leaf, read in self.kernel.in_place}

    @property
    def finishing_reads(self) -> list[Read]:
        """The full-size tensors that a row is finished from, and what is held in their place."""
        held = {read for leaf, read in self.in_place.items() if self.values.reads(leaf)}
        return [r for r in self.full_reads if self.values.reads(r.name) or r.name in held]

    def counts_of(self, kind: Merged, place: str) -> str:
        """What means need beside their accumulators, in a block or over those of a team."""
        if not kind.is_spread:
            return ""
        if place == "team":
            mine = "own" if self.is_shifted else "end"
            return f"static_cast<{self.compute}>({mine}), static_cast<{self.compute}>(length), "
        return f"counts, static_cast<{self.compute}>({self.own}), "
