"""Bundle kernels as the templates see them: what a thread holds of rows that windows tie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fusegen import ir
from fusegen.indexing import Read
from fusegen.mergeviews import MERGED, MergingView
from fusegen.reductionviews import ReductionView, StageView
from fusegen.statements import ElementFunction

_MOST_KEPT = 32  # registers of a thread, for what every bundle reads
# Blocks of 256 threads of a multiprocessor, by the registers of what a thread holds.
_BLOCKS = ((36, 4), (50, 3), (200, 2), (1 << 30, 1))


@dataclass(frozen=True)
class Over:
    """What a value varies along in a bundle: whether from row to row, and along each row by element
    or by window, or not.
    """

    by_row: bool
    along: Literal["element", "window", ""]

    @property
    def dims(self) -> str:
        """What a thread has of it."""
        inner = {"element": "[kPacks][kLanes]", "window": "[kPacks][kWindows]", "": ""}
        return "[kRows]" * self.by_row + inner[self.along]

    def at(self, through: Over) -> str:
        """The one that belongs to where a loop is that goes through as much or more."""
        lane = "beside" if through.along == "window" else "lane"
        if self.along == "window" and through.along == "element":
            lane = "lane / kInner"
        return "[r]" * self.by_row + (f"[p][{lane}]" if self.along else "")


@dataclass(frozen=True)
class Merge:
    """Accumulators of one kind that a row's threads merge in one call: their type and name, how
    many there are, and for each reduction where its first is.
    """

    type: str
    name: str
    number: str
    count: str
    reductions: tuple[tuple[ReductionView, str], ...]


@dataclass(frozen=True)
class Sweep:
    """A stage, what it goes through, and how its reductions end: merged over the row's threads, or
    each thread on its own.
    """

    stage: StageView
    over: Over
    merges: list[Merge]
    alone: list[ReductionView]

    @property
    def counts_places(self) -> bool:
        """Whether places within windows are told apart."""
        return any(r.kind == "max" or r.has_index for r in self.alone) or (
            self.stage.function.reads("position")
        )

    @property
    def asks_whether_here(self) -> bool:
        """Whether what lies behind a row's end is left out of something."""
        return bool(self.merges or self.stage.sums)


class BundleView(MergingView):
    """A kernel whose threads hold the rows of a bundle, and go from one bundle to the next."""

    is_persistent = True
    is_shifted = False
    alike: tuple[int, ...] = ()
    host_room = most_room_bytes = "0"

    @property
    def adds_products(self) -> bool:
        """Whether a sum takes the factors of a product, and joins them with its addition."""
        return True

    @property
    def functions(self) -> list[ElementFunction]:
        """The element functions, in the order they run: what is stored, stages have left."""
        return [s.function for s in self.stages if s.function.results]

    # What a thread has.

    @property
    def along(self) -> int:
        """The group along the rows."""
        return self.reduced[0]

    @property
    def inner_group(self) -> int | None:
        """The places within windows along a row, where those have any."""
        pooled = self.grouping.pooled
        found = [g for g in self.reduced if g < 0 and pooled[-1 - g] == self.along]
        return found[0] if found else None

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The groups that tell the rows of a bundle."""
        return tuple(g for g in self.reduced[1:] if g != self.inner_group)

    @property
    def inner(self) -> int:
        """How many elements of a window lie side by side."""
        return self.grouping.windows[-1 - self.inner_group] if self.inner_group is not None else 1

    @property
    def rows(self) -> int:
        """How many rows a bundle has."""
        return math.prod(self.grouping.windows[-1 - g] for g in self.row_groups)

    @property
    def lanes(self) -> int:
        """How many elements one access takes."""
        assert self.kernel.tier is not None
        return self.kernel.tier.lanes

    @property
    def packs(self) -> int:
        """How many packs of a row a thread has."""
        return self.elements // self.lanes

    @property
    def elements(self) -> int:
        """How many elements of a row a thread has."""
        assert self.kernel.tier is not None
        return self.kernel.tier.elements

    @property
    def least_blocks(self) -> int:
        """How many blocks a multiprocessor must have room for."""
        held = [leaf.extent for pairs in self.kernel.held for leaf, _ in pairs]
        found = [self.over_of(extent) for extent in (*held, *(r.extent for r in self._loaded))]
        registers = self.rows * sum(self.elements if o.along else 1 for o in found if o.by_row)
        registers += self.elements * (len(self.kept_reads) + 2 * len(self.sums))
        registers *= 1 if self._words == 1 else 3  # their arithmetic takes more
        return next(blocks for most, blocks in _BLOCKS if registers <= most)

    def over_of(self, groups: Iterable[int]) -> Over:
        """What a value of an extent varies along."""
        extent = set(groups)
        by_row = bool(extent.intersection(self.row_groups))
        if self.inner_group in extent or (self.inner_group is None and self.along in extent):
            return Over(by_row, "element")
        return Over(by_row, "window" if self.along in extent else "")

    # Tensors.

    @property
    def fetched(self) -> list[Read]:
        """What is read bundle by bundle, whole rows first."""
        found = [r for r in self._loaded if r not in self.kept_reads]
        return sorted(found, key=lambda r: -len(self.over_of(r.extent).dims))

    @cached_property
    def kept_reads(self) -> list[Read]:
        """What all bundles read along their rows, in registers for all of them."""
        found = [r for r in self._loaded if r.extent and r.extent <= {self.along, self.inner_group}]
        words = sum(self.elements * self._words for _ in found)
        return found if words <= _MOST_KEPT else []

    @property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return [t for t in self._loaded + self.stores if self.over_of(t.extent).along]

    def pack_of(self, tensor: Read) -> str:
        """The pack in which a thread has its part of a row."""
        lanes = "kLanes" if self.over_of(tensor.extent).along == "element" else "kWindows"
        return f"Pack<{tensor.type}, {lanes}>"

    def load_of(self, read: Read) -> str:
        """A pack from memory."""
        lanes = "kLanes" if self.over_of(read.extent).along == "element" else "kWindows"
        return f"load<{lanes}>({read.name} + {self.place_of(read)})"

    def place_of(self, tensor: Read) -> str:
        """Where a thread's part of a tensor is: of what varies along rows, a pack."""
        along = self.over_of(tensor.extent).along
        extent = tuple(g for g in tensor.buffer.extent if g not in (self.along, self.inner_group))
        before = self.offset(replace(tensor, buffer=replace(tensor.buffer, extent=extent)))
        if not along:
            return before
        by_element = along == "element" or self.inner == 1
        length, index = ("length", "i") if by_element else ("(length / kInner)", "i / kInner")
        return f"({before}) * {length} + {index}" if extent else index

    @property
    def needed(self) -> set[int]:
        """The groups whose indices something asks for."""
        return {g for t in (*self.reads, *self.stores) for g in t.extent}

    @property
    def row_words(self) -> list[tuple[str, str]]:
        """The places within windows that tell a row r of a bundle."""
        found, behind = list[tuple[str, str]](), 1
        for group in reversed(self.row_groups):
            size = self.grouping.windows[-1 - group]
            quotient = "r" if behind == 1 else f"r / {behind}"
            is_first = group == self.row_groups[0]
            found.insert(0, (self.word(group), quotient if is_first else f"{quotient} % {size}"))
            behind *= size
        return found

    def places(self, sweep: Sweep) -> list[str]:
        """Lines that say where an element is, as far as a stage asks."""
        over, function = sweep.over, sweep.stage.function
        asks = {g for r in self.positions if function.reads(r.name) for g in r.extent}
        asks |= set(self.reduced[1:]) if sweep.counts_places else set()
        lines = []
        if asks.intersection(self.row_groups):
            lines += [f"const int {word} = {text};" for word, text in self.row_words]
        if self.along in asks:
            place = {"element": "(i + lane) / kInner", "window": "i / kInner + beside"}[over.along]
            lines.append(f"const Index {self.word(self.along)} = {place};")
        if self.inner_group in asks:
            assert self.inner_group is not None
            lines.append(f"const int {self.word(self.inner_group)} = lane % kInner;")
        if sweep.counts_places:
            place = self.compact([g for g in self.reduced if g < 0])
            lines.append(f"const int position_value = {place};")
        return lines

    # Stages.

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """The stages as loops."""
        found = []
        for number, (stage, groups) in enumerate(
            zip(self.stages, self.kernel.over, strict=True), start=1
        ):
            over = self.over_of(groups)
            merges = self._merges(number, over, stage.reductions)
            merged = [r for m in merges for r, _ in m.reductions]
            alone = [r for r in stage.reductions if r not in merged]
            found.append(Sweep(stage, over, merges, alone))
        return found

    def _merges(self, number: int, over: Over, reductions: Sequence[ReductionView]) -> list[Merge]:
        found = []
        for kind, accumulator, name, of_each in MERGED:
            mine = [r for r in reductions if r.kind == kind and over.along]
            mine = [r for r in mine if not self._result_of(r).along]
            if not mine:
                continue
            rows = sum(self._result_of(r).by_row for r in mine)
            placed, before = [], [0, 0]
            for r in mine:
                placed.append((r, _sum_of(*before)))
                before[self._result_of(r).by_row] += 1
            count = _sum_of(len(mine) - rows, rows)
            type_ = f"{accumulator}<{self.compute}>"
            found.append(Merge(type_, f"{name}_{number}", of_each, count, tuple(placed)))
        return found

    def _result_of(self, reduction: ReductionView) -> Over:
        return self.over_of(reduction.reduction.results[0][1].extent)

    def accumulator(self, merge: Merge, reduction: ReductionView, at: str) -> str:
        """Where a row's threads accumulate a reduction that they merge."""
        row = self._result_of(reduction).by_row
        return f"{merge.name}[{_sum_of_text(at, 'r' if row else '')}]"

    def alone_dims(self, reduction: ReductionView) -> str:
        """How many accumulators a thread has of what it does not share."""
        return self._result_of(reduction).dims

    def alone_at(self, reduction: ReductionView, over: Over) -> str:
        """Which of them an element goes to."""
        return self._result_of(reduction).at(over)

    def sum_dims(self, reduction: ReductionView) -> str:
        """How many columns a thread adds up."""
        return self.over_of(reduction.extent).dims

    def sum_at(self, reduction: ReductionView, over: Over) -> str:
        """Which of them an element goes to."""
        return self.over_of(reduction.extent).at(over)

    def columns_of(self, reduction: ReductionView) -> str:
        """What a sum has a column for: each element of a row, each window, or all there is."""
        return self.over_of(reduction.extent).along

    @property
    def most_reductions(self) -> int:
        """The most numbers that a warp gives where accumulators are merged."""
        counts = [self._count(m) for s in self.sweeps for m in s.merges]
        return max([*counts, *(1 for s in self.sums if not s.extent)], default=0)

    def _count(self, merge: Merge) -> int:
        return sum(self.rows if self._result_of(r).by_row else 1 for r, _ in merge.reductions)

    def value_of(self, name: str, over: Over) -> str:
        """A value that a stage left, where a loop is."""
        for sweep in self.sweeps:
            for leaf, _ in self.kernel.held[self.sweeps.index(sweep)]:
                if ir.name_of(leaf) == name:
                    return f"{name}_here{self.over_of(leaf.extent).at(over)}"
            for merge in sweep.merges:
                for r, at in merge.reductions:
                    for _, leaf_name in r.results:
                        if leaf_name == name:
                            return f"{self.accumulator(merge, r, at)}.{merge.number}"
            for r in sweep.alone:
                for result, leaf_name in r.results:
                    if leaf_name == name:
                        return f"{r.name}_sum{self.alone_at(r, over)}.{result}()"
        raise AssertionError(name)

    def asks_where(self, sweep: Sweep) -> bool:
        """Whether a stage asks where a thread's pack is in its row."""
        by_row = f"const Index {self.word(self.along)} = "
        return sweep.asks_whether_here or any(x.startswith(by_row) for x in self.places(sweep))

    def declared(self, sweep: Sweep) -> list[str]:
        """Lines for all that a stage's function reads, where its loop is."""
        reads = {r.name: r for r in self.reads}
        lines = self.places(sweep)
        apart = {"position", *(name for name, _ in self.counts)}
        for kind, name in sweep.stage.function.leaves:
            if name in apart:
                continue
            if name not in reads:
                text = self.value_of(name, sweep.over)
            elif reads[name].buffer.is_computed:
                text = f"widen({name}[{self.offset(reads[name])}])"
            else:
                text = self._read_text(reads[name], sweep.over)
            lines.append(f"const {kind} {name}_value = {text};")
        return lines

    def _read_text(self, read: Read, over: Over) -> str:
        mine = self.over_of(read.extent)
        if not mine.along:
            return f"widen({read.name}_in{mine.at(over)})"
        *before, lane = mine.at(over)[1:-1].split("][")
        return f"widen({read.name}_in[{']['.join(before)}], {lane})"

    def left_for(self, store: Read, over: Over) -> str:
        """What is stored, where a loop is."""
        found = {b.name: leaf for b, leaf in self.kernel.stores}
        return self.value_of(ir.name_of(found[store.name]), over)

    @property
    def length(self) -> str:
        """How many elements a row has."""
        return self.size(g for g in (self.along, self.inner_group) if g is not None)

    @property
    def host_length(self) -> str:
        """The same, where the launch is set up."""
        return self.host_size(g for g in (self.along, self.inner_group) if g is not None)


def _sum_of(numbers: int, rows: int) -> str:
    """So many numbers, and so many for each row, together."""
    by_row = "kRows" if rows == 1 else f"{rows} * kRows"
    if not rows:
        return str(numbers)
    return f"{numbers} + {by_row}" if numbers else by_row


def _sum_of_text(*terms: str) -> str:
    return " + ".join(t for t in terms if t not in ("", "0")) or "0"
