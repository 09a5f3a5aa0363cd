"""Views of the kernels that take packs of neighbours row by row: with a tier, and column sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusegen import ir
from fusegen.columntiers import MOST_ADDED_ALONE, resident_alone
from fusegen.indexing import Read
from fusegen.passingviews import FEW_LANES
from fusegen.reductionviews import ReductionView, StageView
from fusegen.stretchviews import MOST_AT_ONCE
from fusegen.summingviews import SummingView, words_of
from fusegen.target import BRIEF, DEAR, ITEM_BYTES

# What a block may hold and add up in registers, of 65,536 that a multiprocessor has.
_REGISTERS, _NARROW_REGISTERS = 32768, 49152
_MOST_ALONG_BYTES = 32 << 10  # of a block, for what every row reads; more where packs are long
_FEW_SINGLY = 2  # tensors that elements read one by one
_MOST_KEEPING = 1024  # threads of a multiprocessor, of kernels that are light but for that
_MOST_JOINING = 1024  # the same of those that join what they read
_MUCH_BESIDE = 12  # elements of a row, where two tensors stand beside it
_MOST_BESIDE = 36  # of what strided rows hold, and have beside it for all of their elements
_MANY_SUMS = 48  # registers of a thread, for sums, or for rows and what they share in large blocks
_FEW_REGISTERS, _FEW_KEPT = 64, 40  # of a thread, and of those for what is kept
_MANY_KEPT_NARROW = 54  # of single elements of two bytes, with fewer threads
_MANY_KEPT, _MANY_THREADS = 80, 768  # of a thread that has more; of a multiprocessor
_MOST_EARLY, _MOST_HELD_ALONG = 0.65, 0.45  # of a thread's registers, with what it holds beside
# Threads of a multiprocessor that keep what some rows share, by the registers of what one holds.
_RESIDENT_KEEPING = ((36, 1024), (48, 768), (72, 512))
_MOST_OWN = _RESIDENT_KEEPING[-1][0]
_MOST_KEPT, _MOST_KEPT_SHIFTED = 40960, 28672  # registers, where what every row reads is kept too


class RowView(SummingView):
    """A kernel whose blocks go from row to row, or down columns."""

    def stands_apart(self, reduction: ReductionView, stage: Sequence[ReductionView]) -> bool:
        """Whether it has a place of its own among packs, and the others read all that it does."""
        tier = self.kernel.tier
        if not reduction.place or self.family != "row" or tier is None or tier.lanes == 1:
            return False
        along = set(self.reduced)
        others = [v.reduction.value for v in stage if not v.place]
        read = {leaf for leaf in ir.inputs(others) if leaf.extent & along}
        _, value, _ = reduction.reduction.value.args
        return read.issuperset(leaf for leaf in ir.inputs([value]) if leaf.extent & along)

    @cached_property
    def keeps_along(self) -> bool:
        """Whether a block that goes from row to row keeps what every row reads in registers."""
        if self.family != "row" or self.has_shared_sums:
            return False
        if self.kept_own:
            return bool(self.along_reads)
        if not self.sums:
            # From memory they would come element by element, and shared memory is full.
            words = self.elements * (len(self.full_reads) + len(self.along_reads)) * self._words
            tier = self.kernel.tier
            is_full = tier is not None and tier.is_full
            is_apt = self.lanes == 1 or (self.is_shifted and (self.is_team or is_full))
            if tier and self._shares_many and not self.is_narrow:
                has_room = tier.resident - self.threads < _MANY_THREADS
                return has_room and bool(self.along_reads) and words <= _MANY_KEPT
            most = _MANY_KEPT_NARROW if self.is_staged and self.is_narrow else _FEW_KEPT
            most = _MANY_SUMS if is_full else most
            return is_apt and bool(self.along_reads) and words <= most
        kept = words_of(self.full_reads + self.along_reads)
        kept += (self._most_held - len(self.full_reads)) * self._words
        held = self.elements * (kept + len(self.sums) * self._words)
        most = _MOST_KEPT_SHIFTED if self.is_shifted else _MOST_KEPT
        return held * self.threads * self.apt_blocks <= most

    @cached_property
    def kept_own(self) -> list[Read]:
        """What a thread keeps of what some rows share, where it can go to such rows alone: those
        with the same indices in the innermost groups.
        """
        tier = self.kernel.tier
        if not self.own_reads or tier is None or not tier.keeps_alike or tier.asks_again:
            return []
        groups = self.own_groups
        is_apt = bool(groups) and groups == self.domain[-len(groups) :] != self.domain
        fits = self._own_words <= _MOST_OWN and self._words == 1 and not self.stretches
        return self.own_reads if is_apt and fits and not self.sums else []

    @property
    def own_groups(self) -> tuple[int, ...]:
        """The groups that tell apart what rows have of their own; none where that differs."""
        found = {tuple(g for g in r.buffer.extent if g not in self.reduced) for r in self.own_reads}
        return found.pop() if len(found) == 1 else ()

    @property
    def _own_words(self) -> float:
        """The registers of a thread that keeps that, for what it holds."""
        assert self.kernel.tier is not None
        words = words_of(self.full_reads + self.along_reads + self.own_reads)
        wide = 2 * self.lanes if self.is_narrow else 0  # where a pack of narrow ones is worked on
        return self.kernel.tier.summing_elements * (words + len(self.carried)) + wide

    @property
    def alike(self) -> tuple[int, ...]:
        """The groups whose indices all rows of a thread have in common."""
        return self.own_groups if self.kept_own else self.kept if self.sums else ()

    @property
    def is_persistent(self) -> bool:
        """Whether there are as many blocks as work at once, which go from task to task."""
        if self.is_alone:
            return bool(self.sums) and not self.kept
        is_kept = self.keeps_along or self.stages_along or bool(self.kept_own) or self.is_staged
        return bool(self.sums) or self.is_sent_ahead or self.is_team or is_kept

    @property
    def has_two_turns(self) -> bool:
        """Whether others take two turns: what rows share is in the cache then."""
        shared = [r for r in self.own_reads if self.domain[-1] not in r.extent]
        return self.family == "row" and bool(shared) and not self.is_persistent

    @cached_property
    def stages_along(self) -> bool:
        """Whether a block has what every row reads in shared memory, in packs that lie as its rows'
        do: from memory they would come element by element, or keep few threads waiting.
        """
        if not (self.is_shifted or self.adds_many) or self.keeps_along:
            return False
        most = self._most_room - self._bytes_with_sums
        most = min(most, _MOST_ALONG_BYTES) if self.lanes <= FEW_LANES else most
        return 0 < self._most_along_bytes <= most

    @property
    def varying(self) -> tuple[int, ...]:
        """The groups from one of whose elements to the next a function is called again."""
        if self.kernel.tier is None:
            return super().varying
        # There, what a thread's rows side by side have each of its own would not fit in registers.
        is_full = self.family == "column" and self.is_crowded and bool(self.kernel.sums)
        return () if is_full else self.reduced

    # How rows lie in a block.

    @cached_property
    def is_skewed(self) -> bool:
        """Whether a block finishes a row a turn after it added it up: where the next stage is the
        last, and all that it reads is still in shared memory.
        """
        bytes_taken = 3 * self._bytes_of(self._awaited_reads) + self._along_bytes + self._sums_bytes
        fits = bytes_taken <= self._most_room and self.is_sent_ahead
        held = [name for name in self.carried if name not in self.in_place]
        is_held = any(f.reads(n) for f in (self.values, self.row_values) for n in held)
        return self.is_team and fits and len(self.stages) == 1 and not is_held

    def in_registers(self, stage: StageView) -> list[str]:
        """What a stage leaves in registers of its own: all but what is in place."""
        return [name for name in stage.held if not self.is_placed(name)]

    def is_placed(self, name: str) -> bool:
        """Whether a value that a stage leaves takes the place of what was read."""
        is_apt = self.is_skewed or (self.kernel.tier and self.kernel.tier.is_full)
        return bool(is_apt) and name in self.in_place

    def placed_reads(self, stage: StageView) -> list[Read]:
        """The tensors in whose places in shared memory a stage leaves something."""
        has_places = self.is_skewed or self.has_rest
        placed = {self.in_place[n] for n in stage.held if has_places and self.is_placed(n)}
        return [r for r in self.full_reads if r.name in placed]

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
    def _asked_again(self) -> list[Read]:
        """What varies along a row and is asked for at each: all rows share it, or some."""
        is_at_hand = self.family != "row" or bool(self.sums or self.kept_own) or self.is_team
        if is_at_hand or self.keeps_along or self.stages_along:
            return []
        return self.along_reads + self.own_reads

    @property
    def early_reads(self) -> list[Read]:
        """What is asked for at the end of a row alone, each pack of it while the one before is
        worked on: no load passes the stores between them by itself.
        """
        # Measured: narrow ones gain nothing, and beside what is carried there is no room.
        is_apart = self.is_shifted or self.is_sent_ahead or self.is_staged
        if is_apart or self.is_narrow or self.carried:
            return []
        before = self._asked_before_sums
        found = [r for r in self.reads_of(self.values, self._asked_again) if r not in before]
        coming = 2 * len(found) + sum(r in self.own_reads for r in found) + len(self.row_stores)
        held = self.elements * len(self.full_reads + self.held_along) + self.lanes * coming
        fits = len(found) <= 2 and held * self._words <= _MOST_EARLY * self._registers
        return found if fits else []

    @property
    def held_along(self) -> list[Read]:
        """What is asked for with the row, and held as long: else the compiler puts off the loads
        of the row until it has use for them, behind these.
        """
        found = self._asked_before_sums
        if not found or self.is_shifted or self.is_sent_ahead or self.is_narrow:
            return []
        if self._is_tight or self._asks_much:
            return []
        held = self.elements * len(self.full_reads + found) * self._words
        return found if held <= _MOST_HELD_ALONG * self._registers else []

    @property
    def _asked_before_sums(self) -> list[Read]:
        again = self._asked_again
        return [r for r in again if any(self.reads_of(s.function, [r]) for s in self.stages)]

    @property
    def _asks_much(self) -> bool:
        """Whether two tensors, one of them not for all rows, want more registers beside a row."""
        asked = self._asked_before_sums
        is_long = self.elements >= _MUCH_BESIDE and not self.is_narrow
        return is_long and len(asked) == 2 and any(r in self.own_reads for r in asked)

    @cached_property
    def _shares_many(self) -> bool:
        """Whether a light kernel is to have a block less, for packs of what rows share."""
        if not (tier := self.kernel.tier) or not self.is_light:
            return False
        is_full = self.is_narrow or bool(self.carried) or tier.resident > _MOST_KEEPING
        # Beside narrow rows, packs of wider elements are several; and where a row's best stands is
        # sought by a stage of its own.
        wide = [r for r in self.own_reads if self.is_narrow and ITEM_BYTES[r.buffer.dtype] >= 4]
        found = self.along_reads + self.own_reads + self.single_reads + self.drawn_reads + wide
        # So does what functions take, beside what is kept for the gradient.
        stored = ir.topological(value for _, value in self.kernel.stores)
        calls = any(n.op in DEAR for n in stored if n.extent == self._all)
        calls = calls and bool(self.row_stores) and tier.resident > _MOST_KEEPING
        many = len(found) + calls
        return many > (2 if is_full else 4) or (self.is_narrow and bool(self.positions))

    @property
    def is_guarded(self) -> bool:
        """Whether a branch stands before each pack: there is no room for more at once, or for what
        rows share beside them.
        """
        asks = len(self._asked_before_sums) > len(self.held_along)
        return self._is_tight or (asks and (not self.carried or self._registers <= _FEW_REGISTERS))

    @property
    def _registers(self) -> int:
        """How many a thread may have."""
        return 2 * _REGISTERS // (self.apt_blocks * self.threads)

    @property
    def _is_tight(self) -> bool:
        """Whether packs are worked on one by one: so many at once would not fit in registers.

        What is carried takes the place of what was read, but only where no branch is between.
        """
        if self.family == "column":
            return False
        is_dear = (self.is_team and self._words > 1) or (self.is_crowded and not self.carried)
        # Neighbours join what they have of a stretch, so all of them must be there.
        return is_dear and not self.stretches

    @property
    def is_branching(self) -> bool:
        """Whether a mean's elements are left out of packs by a branch rather than one by one."""
        return self.is_team or self.is_crowded

    @cached_property
    def apt_blocks(self) -> int:
        """How many blocks of its threads a multiprocessor is to have, which says how many registers
        a thread may have, where shared memory has room for as many.
        """
        if not self.kernel.tier:
            return self.blocks_passing
        if self.is_team:
            words = self.elements * (len(self.full_reads) + len(self.sums)) * self._words
            most = MOST_AT_ONCE * (2 if len(self.stages) <= 1 else 1)
            held = [name for name in self.carried if name not in self.in_place]
            asked = self.own_reads + self.single_reads if len(self.stages) > 1 else []
            fits = words <= most and self.lanes > 1 and not (held or asked or self.stretches)
            most_threads = 1024 if fits and self._words == 1 else 512
            return max(1, most_threads // self.threads)
        if self.kept_own:
            most = next(n for words, n in _RESIDENT_KEEPING if self._own_words <= words)
            return max(1, most // self.threads)
        if self.joins_reads:
            return max(1, _MOST_JOINING // self.threads)
        if self.is_light:
            keeping = _MANY_THREADS if self.is_staged and self.is_narrow else _MOST_KEEPING
            resident = min(self.light_threads, keeping if self.keeps_along else 1 << 30)
            return max(1, resident // self.threads - self._shares_many)
        if self.is_alone:
            # Of sums in shared memory some are on their way there.
            taken = self.sums_a_thread * (0.5 if self.has_shared_sums else len(self.sums))
            taken += self.elements * (len(self.full_reads) + len(self.carried))
            return resident_alone(taken * self._words) // self.threads
        if self.only_reads_rows:
            return max(1, self.most_reading // self.threads)
        # Doubles take two registers each; and what many stages leave, more than one.
        few_threads = (256 if self.leaves_much else 512) // self._words
        if self.sums:
            most_threads = _MANY_THREADS if self.adds_little else few_threads
            return max(1, most_threads // self.threads)
        words = self.elements * len(self.full_reads) * self._words
        is_crowded = self._is_tight and len(self.stages) <= 1
        most = MOST_AT_ONCE * (2 if is_crowded else 1)
        asks_singly = len(self.single_reads) > _FEW_SINGLY
        if self.family == "column" and self.lanes == 1 and words <= most:
            # Means and variances of wide elements would not fit in four blocks, nor much of each.
            is_full = (self.has_moments and not self.is_narrow) or asks_singly
            return max(1, min(1024 // self._words // self.threads, 3 if is_full else 4))
        if self.family == "column":
            once = self.values.once.results if self.values.once else ()
            beside = self.lanes * (len(once) + len(self.reads_beside)) * self._words
            most = min(most, _MOST_BESIDE - beside)
        fits = words <= most and (self.lanes > 1 or is_crowded)
        fits = fits and self._leaves_little and not self._asks_much and not asks_singly
        fits = fits and not (self.stretches and self._words > 1)
        is_full = bool(self.carried) or any(r.is_dear for s in self.stages for r in s.reductions)
        has_much = bool(self.called_again) or (is_full and bool(self.stretches))
        most_threads = (_MANY_THREADS if has_much else 1024) // self._words
        return max(1, (most_threads if fits else few_threads) // self.threads)

    @property
    def _leaves_little(self) -> bool:
        """Whether what stages leave for each other fits beside the rest in few registers."""
        if len(self.stages) <= 1:
            return True
        if self.family == "column":
            return not self.carried and self._words == 1
        is_small = self.elements * self._words <= MOST_AT_ONCE and len(self.stages) == 2
        return (is_small or not self.carried) and BRIEF.issuperset(self.called_again)

    @cached_property
    def _most_held(self) -> int:
        """The most values of an element that are at hand at once: read, or left by a stage."""
        functions = [*(s.function for s in self.stages), self.values]
        names = [r.name for r in self.full_reads]
        most = len(names)
        for i, stage in enumerate(self.stages, start=1):
            names += stage.held
            most = max(most, sum(any(f.reads(n) for f in functions[i:]) for n in names))
        return most

    @cached_property
    def has_shared_sums(self) -> bool:
        """Whether the sums by column would crowd the registers."""
        if not self.kernel.tier or not self.sums or self.is_staged:
            return False
        held = self.elements * self._most_held + self.sums_a_thread * len(self.sums)
        if self.is_alone:
            return held * self._words > MOST_ADDED_ALONE
        if self.is_narrow and self.elements > MOST_AT_ONCE and not self.carried:
            # Until they are worked on, packs of two bytes take half as many.
            packed = self.elements * words_of(self.full_reads) + self.sums_a_thread * len(self.sums)
            return packed * self.threads > _NARROW_REGISTERS
        taken = held * self._words * self.threads
        if len(self.stages) > 1:  # what a stage leaves for another is there twice for a while
            taken *= 2 * self.apt_blocks
        elif self.sums_a_thread * len(self.sums) >= _MANY_SUMS:  # and so are their terms
            taken *= 2
        return taken > _REGISTERS

    @cached_property
    def is_sent_ahead(self) -> bool:
        """Whether a block that goes from row to row has the next one's packs on their way: where a
        multiprocessor has room for few blocks; else those hide each other's waits.
        """
        if not self.kernel.tier or self.is_alone or self.is_staged:
            return False
        is_few = self.apt_blocks * self.threads < _MANY_THREADS and not self._asks_much
        is_few = is_few and not (self.apt_blocks > 1 and self.waits_much)
        is_few |= self.kernel.tier.is_full or bool(self.sums or self.kept_own) or self.is_team
        is_few |= self.joins_reads
        widths = [ITEM_BYTES[r.buffer.dtype] * self.lanes for r in self.full_reads]
        taken = self._sums_bytes + self._along_bytes + self._bytes_of(self.full_reads)
        fits = taken <= self._most_room and min(widths, default=4) >= 4
        is_strided = self.family == "column"
        return fits and (self.is_crowded and not self._passes_by if is_strided else is_few)
