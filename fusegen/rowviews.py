"""Views of the kernels that take packs of neighbours row by row: with a tier, and column sums.

How a tensor is reached follows from its extent: by the flat index, by the index along the row, or
by the row; whatever is none of these goes element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fusegen import ir
from fusegen.indexing import Read
from fusegen.statements import ElementFunction
from fusegen.target import ITEM_BYTES
from fusegen.tiers import MOST_BLOCKS, MOST_SHARED_BYTES
from fusegen.views import KernelView, ReductionView, StageView

# What a block may hold and add up in registers, of 65,536 that a multiprocessor has.
_REGISTERS = 32768
_MOST_AT_ONCE = 16  # elements
_MOST_KEPT = 40960  # registers, where what every row reads is kept too
# Kinds of reductions whose accumulators are merged in one call: where they are, and their number.
_MERGED = ((("sum", "moments"), "sums", "total"), (("peak",), "peaks", "best"))


@dataclass(frozen=True)
class Merged:
    """Reductions of a stage that are merged in one call: the type and the name of their
    accumulators, and the name of the number that each holds.
    """

    type: str
    name: str
    number: str
    reductions: list[ReductionView]


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
    def reads_here(self) -> list[Read]:
        """What asks for a row's indices in the turn of the row, rather than ahead of it."""
        return self.single_reads + self.row_stores + ([] if self.is_sent_ahead else self.row_reads)

    def locate_all(self, index: str, groups: Sequence[int], tensors: Sequence[Read]) -> list[str]:
        """Lines that take an index apart as far as some tensors ask for it."""
        return self.taken_apart(index, groups, {g for r in tensors for g in r.extent})

    @property
    def has_moments(self) -> bool:
        """Whether a mean and a variance are among the reductions."""
        return any(self.moments_of(s) for s in self.stages)

    @property
    def flat_row(self) -> str:
        """In column sums: the index of a row among all."""
        return self.compact(self.domain[:-1]) if self.kept else "row"

    @property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return self.full_reads + self.along_reads + self.full_stores

    @property
    def adds_products(self) -> bool:
        """Whether a sum takes the factors of a product, and joins them with its addition."""
        return self.kernel.tier is not None

    @property
    def keeps_along(self) -> bool:
        """Whether a block that goes from row to row keeps what every row reads in registers."""
        if self.family != "row" or not self.sums or self.has_shared_sums:
            return False
        kept = sum(ITEM_BYTES[r.buffer.dtype] for r in self.full_reads + self.along_reads) / 4
        held = self.elements * (kept + len(self.sums) * self._words)
        return held * self.threads * self.least_blocks <= _MOST_KEPT

    def held(self, function: ElementFunction) -> list[str]:
        """What a function reads of the values that earlier stages left."""
        return [name for s in self.stages for name in s.held if function.reads(name)]

    # How rows lie in a block.

    @property
    def threads(self) -> int:
        """Threads in a block, at most."""
        tier = self.kernel.tier
        if tier is None or self.family != "row":
            return tier.threads if tier else 256
        return min(tier.threads, max(256, -(-tier.longest // self.elements)))

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
    def is_team(self) -> bool:
        """Whether a row may be longer than a block can hold, so that several blocks share it."""
        tier = self.kernel.tier
        if tier is None or self.family != "row":
            return False
        return self.elements * tier.threads < tier.longest

    @property
    def is_skewed(self) -> bool:
        """Whether a block finishes a row a turn after it added it up: where the next stage is the
        last, and all that it reads is still in shared memory.
        """
        fits = 3 * self._bytes_a_turn <= MOST_SHARED_BYTES and self.is_sent_ahead
        is_held = any(f.reads(n) for f in (self.values, self.row_values) for n in self.carried)
        return self.is_team and fits and len(self.stages) == 1 and not is_held

    most_blocks = MOST_BLOCKS  # of a team

    def team_number(self, reduction: ReductionView, result: str) -> int:
        """Where a reduction's result stands among those of its stage."""
        (stage,) = self.stages
        names = [r.name for r in stage.reductions]
        before = sum(_numbers(r) for r in stage.reductions[: names.index(reduction.name)])
        return before + (result == "variance")

    def team_place(self, reduction: ReductionView, result: str) -> int:
        """The same, in words."""
        return self.team_number(reduction, result) * self._words

    def kinds_of(self, stage: StageView) -> list[Merged]:
        """A stage's reductions by the kind of their accumulators."""
        place = self.stages.index(stage) + 1
        return [
            Merged(
                self.target.accumulators[kinds[0]].format(compute=self.compute),
                f"{name}_{place}",
                number,
                found,
            )
            for kinds, name, number in _MERGED
            if (found := [r for r in stage.reductions if r.kind in kinds])
        ]

    def moments_of(self, stage: StageView) -> list[ReductionView]:
        """A stage's means and variances, whose values are gone over twice."""
        return [r for r in stage.reductions if r.kind == "moments"]

    @property
    def team_numbers(self) -> int:
        """How many numbers a block of a team gives for a row."""
        return sum(_numbers(r) for s in self.stages for r in s.reductions)

    def share_squares(self, reduction: ReductionView) -> str:
        """The squared distances of a block's share from its own mean."""
        moments = self.moments_of(self.stages[0])
        place = [r.name for r in moments].index(reduction.name)
        squares = self._cell("distances", 0, place)
        drift = self._cell("distances", 0, len(moments) + place)
        return f"{squares} - {drift} * {drift} * inverse_length"

    @property
    def column(self) -> str:
        """The index along the row of the first element of a thread's pack."""
        return "begin + i" if self.is_team else "i"

    @property
    def reach(self) -> str:
        """How many elements of a row a block has."""
        return "reach" if self.is_team else "length"

    @property
    def cells_a_block(self) -> int:
        """How many 64-bit words a block of a team leaves for the others at each merge."""
        numbers = self.team_numbers if self.is_skewed else self.most_reductions
        return numbers * self._words

    @property
    def meetings(self) -> int:
        """How many merges a team has cells for."""
        return 4 if self.is_skewed else 2

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
        """Whether packs are worked on one by one: so many at once would not fit in registers.

        What is carried takes the place of what was read, but only where no branch is between.
        """
        if self.family == "column":
            return False
        is_dear = self.is_team and self._words > 1
        return is_dear or (self.is_crowded and not self.carried)

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
        if self.is_team:
            words = self.elements * (len(self.full_reads) + len(self.sums)) * self._words
            most = _MOST_AT_ONCE * (2 if len(self.stages) == 1 else 1)
            fits = words <= most and self.lanes > 1 and not self.carried
            return 2 if fits and self._words == 1 else 1
        if self.sums:
            return max(1, 512 // self.threads)
        words = self.elements * len(self.full_reads) * self._words
        fits = (words <= _MOST_AT_ONCE and self.lanes > 1) or (
            self.is_guarded and words <= 2 * _MOST_AT_ONCE and len(self.stages) == 1
        )
        return max(1, (1024 if fits and self._carries_little else 512) // self.threads)

    @property
    def _carries_little(self) -> bool:
        """Whether what passes from stage to stage fits beside the rest in few registers."""
        if not self.carried or len(self.stages) == 1:
            return True
        is_small = self.elements * self._words <= _MOST_AT_ONCE and len(self.stages) == 2
        return is_small and self.family == "row"

    @property
    def has_shared_sums(self) -> bool:
        """Whether the sums by column would crowd the registers."""
        if not self.kernel.tier or not self.sums:
            return False
        held = self.elements * len(self.full_reads) + self.sums_a_thread * len(self.sums)
        return held * self._words * self.threads > _REGISTERS

    @property
    def is_sent_ahead(self) -> bool:
        """Whether a block that goes from row to row has the next one's packs on their way.

        It pays where a multiprocessor has room for few blocks; else they hide each other's waits.
        """
        if not self.kernel.tier:
            return False
        is_alone = self.least_blocks * self.threads < 1024 or bool(self.sums) or self.is_team
        widths = [ITEM_BYTES[r.buffer.dtype] * self.lanes for r in self.full_reads]
        fits = (
            self._sums_bytes + self._bytes_a_turn <= MOST_SHARED_BYTES
            and min(widths, default=4) >= 4
        )
        return fits and (self.is_crowded if self.family == "column" else is_alone)

    @property
    def _sums_bytes(self) -> int:
        each = self.sums_a_thread * self.threads * 4 * self._words
        return each * len(self.sums) if self.has_shared_sums else 0

    @property
    def _bytes_a_turn(self) -> int:
        return sum(self._bytes_ahead(r) for r in self.full_reads)

    def _bytes_ahead(self, read: Read) -> int:
        return self.elements * self.threads * ITEM_BYTES[read.buffer.dtype]

    @property
    def turns_ahead(self) -> int:
        """How many turns of the loop ahead packs are sent for: two where there is room."""
        if self.is_skewed:
            return 3
        if self.family == "column":
            return 1
        room = MOST_SHARED_BYTES // self.least_blocks - self._sums_bytes
        return 2 if 2 * self._bytes_a_turn <= room else 1

    @property
    def room_bytes(self) -> int:
        """Dynamic shared memory: what threads have of their own there."""
        ahead = self.turns_ahead * self._bytes_a_turn if self.is_sent_ahead else 0
        return self._sums_bytes + ahead

    def ahead(self, read: Read) -> str:
        """Where the pack that a tensor has at p was sent, counted in packs."""
        turn = self._bytes_a_turn // (ITEM_BYTES[read.buffer.dtype] * self.lanes)
        at = f"p * {self.threads}"
        return f"slot * {turn} + {at}" if self.turns_ahead > 1 else at

    def place_ahead(self, read: Read) -> int:
        """Where a tensor's packs are sent, in 16 bytes from the start."""
        before = self.full_reads[: [r.name for r in self.full_reads].index(read.name)]
        return (self._sums_bytes + sum(self._bytes_ahead(r) for r in before)) // 16

    @property
    def most_reductions(self) -> int:
        """The most accumulators that are merged at once."""
        counts = [len(kind.reductions) for s in self.stages for kind in self.kinds_of(s)]
        counts += [2 * len(self.moments_of(s)) for s in self.stages]
        return max(counts, default=0)

    def result(self, stage: int, reduction: ReductionView, result: str) -> str:
        """A reduction's result from its sums; a mean is mended by what its distances add up to."""
        if reduction.kind != "moments":
            return self._total(stage, reduction)
        moments = self.moments_of(self.stages[stage])
        place = [r.name for r in moments].index(reduction.name)
        drift = self._cell("distances", stage, len(moments) + place)
        if result == "mean":
            return f"{self.centre(stage, reduction)} + {drift} * inverse_length"
        squares = self._cell("distances", stage, place)
        return f"({squares} - {drift} * {drift} * inverse_length) * inverse_length"

    def centre(self, stage: int, reduction: ReductionView) -> str:
        """A mean as the sum has it, about as exact as its rounding."""
        return f"{self._total(stage, reduction)} * inverse_length"

    def _total(self, stage: int, reduction: ReductionView) -> str:
        kinds = self.kinds_of(self.stages[stage])
        (kind,) = [kind for kind in kinds if reduction in kind.reductions]
        place = kind.reductions.index(reduction)
        return f"{kind.name}[{place}]{self._lane}.{kind.number}"

    def _cell(self, cells: str, stage: int, place: int) -> str:
        return f"{cells}_{stage + 1}[{place}]{self._lane}.total"

    @property
    def _lane(self) -> str:
        return "[lane]" if self.family == "column" else ""

    @property
    def accumulated(self) -> list[ReductionView]:
        """The reductions that have an accumulator of their kind: on the chip, moments are sums."""
        return [r for r in self.reductions if r.kind != "moments"]

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


def _numbers(reduction: ReductionView) -> int:
    return 2 if reduction.kind == "moments" else 1
