"""Bundle kernels as the templates see them: what a thread holds of rows that windows tie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from fusegen import ir
from fusegen.bundlestages import Merge, Over, Sweep
from fusegen.indexing import Read
from fusegen.mergeviews import MERGED, MergingView
from fusegen.reductionviews import ReductionView
from fusegen.statements import ElementFunction
from fusegen.target import ITEM_BYTES

_MOST_KEPT = 32  # registers of a thread, for what every bundle reads
# Blocks of 256 threads of a multiprocessor, by the registers of what a thread holds: with more
# blocks nvcc would spill.
_BLOCKS = ((44, 4), (64, 3), (160, 2), (1 << 30, 1))
_OF_DOUBLE = 2.6  # registers of a double, with those of its arithmetic
_NUMBERS = {"max": 2}  # of an accumulator that has a place beside its number


class BundleView(MergingView):
    """A kernel whose threads hold the rows of a bundle, and go from one bundle to the next. Rows
    are innermost in memory: a thread has packs of each.
    """

    is_strided = False
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

    @property
    def accumulated(self) -> list[ReductionView]:
        """The reductions that have an accumulator of their kind."""
        return self.reductions

    # What a thread has.

    @property
    def along(self) -> int:
        """The group along the rows."""
        return self.reduced[0]

    @property
    def side(self) -> int:
        """The innermost group, along which packs lie."""
        return self.along

    @property
    def inner_group(self) -> int | None:
        """The places within windows along the innermost group, where it has any."""
        pooled = self.grouping.pooled
        found = [g for g in self.reduced if g < 0 and pooled[-1 - g] == self.side]
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

    @cached_property
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
        found = [self.over_of(extent) for extent in held]
        found += [self.over_of_tensor(r) for r in self._loaded if r not in self.late_reads]
        found += [over for s in self.sums for over in 2 * [self.sum_over(s)]]
        for r in (r for s in self.stages for r in s.reductions):
            found += [self.result_of(r)] * _NUMBERS.get(r.kind, 1)
        registers = sum(map(self._count, found)) * (1 if self._words == 1 else _OF_DOUBLE)
        # Of what is read late, two packs are on their way.
        late = [ITEM_BYTES[r.buffer.dtype] for r in self.late_reads]
        registers += sum(late) * 2 * self.rows * self.lanes // 4
        return next(blocks for most, blocks in _BLOCKS if registers <= most)

    def _count(self, over: Over) -> int:
        """How many numbers of a kind a thread has."""
        lanes = {"lane": self.lanes, "beside": self.lanes // self.inner, "": 1}[over.lane]
        return (self.rows if over.by_row else 1) * (self.packs if over.by_pack else 1) * lanes

    def over_of(self, groups: Iterable[int]) -> Over:
        """What a value of an extent varies along."""
        extent = set(groups)
        by_row = bool(extent.intersection(self.row_groups))
        if self.inner_group in extent or (self.inner_group is None and self.along in extent):
            return Over(by_row, True, "lane")
        is_along = self.along in extent
        return Over(by_row, is_along, "beside" if is_along else "")

    def over_of_tensor(self, tensor: Read) -> Over:
        """What a tensor varies along."""
        return self.over_of(tensor.extent)

    @property
    def leaves_columns(self) -> bool:
        """Whether each block leaves sums of columns that lie beside each other."""
        return not self.is_strided and any(s.extent for s in self.sums)

    def sum_over(self, reduction: ReductionView) -> Over:
        """The columns of which a thread adds up each."""
        return self.over_of(reduction.extent)

    # Tensors.

    @cached_property
    def late_reads(self) -> list[Read]:
        """What is read where it is pooled, pack by pack, as no stage but that asks for it: of
        strided rows, where there is something at any place.
        """
        found = [r for r in self._loaded if self.over_of_tensor(r).by_row]
        are_packs = all(self.over_of_tensor(r) == Over(True, True, "lane") for r in found)
        uses = [sum(s.function.reads(r.name) for s in self.stages) for r in found]
        return found if self.is_strided and are_packs and all(n == 1 for n in uses) else []

    def late_in(self, sweep: Sweep) -> list[Read]:
        """Those that a stage pools."""
        return [r for r in self.late_reads if sweep.stage.function.reads(r.name)]

    @property
    def fetched(self) -> list[Read]:
        """What is read bundle by bundle before anything is computed, whole rows first."""
        apart = self.kept_reads + self.late_reads
        found = [r for r in self._loaded if r not in apart]
        return sorted(found, key=lambda r: -len(self.over_of_tensor(r).dims))

    @cached_property
    def kept_reads(self) -> list[Read]:
        """What all bundles read along their rows, in registers for all of them."""
        mine = {self.along, self.inner_group if self.side == self.along else None}
        found = [r for r in self._loaded if r.extent and r.extent <= mine]
        words = sum(self._count(self.over_of_tensor(r)) * self._words for r in found)
        return found if words <= _MOST_KEPT else []

    @cached_property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return [t for t in self._loaded + self.stores if self.over_of_tensor(t).lane]

    def pack_of(self, tensor: Read) -> str:
        """The type in which a thread has its part of a tensor: a pack where it has lanes."""
        lane = self.over_of_tensor(tensor).lane
        lanes = "kLanes" if lane == "lane" else "kWindows"
        return f"Pack<{tensor.type}, {lanes}>" if lane else tensor.type

    def load_of(self, read: Read) -> str:
        """That, from memory."""
        lane = self.over_of_tensor(read).lane
        lanes = "kLanes" if lane == "lane" else "kWindows"
        place = self.place_of(read)
        return f"load<{lanes}>({read.name} + {place})" if lane else f"{read.name}[{place}]"

    def place_of(self, tensor: Read) -> str:
        """Where a thread's part of a tensor is."""
        over = self.over_of_tensor(tensor)
        extent = tuple(g for g in tensor.buffer.extent if g not in (self.along, self.inner_group))
        before = self.offset(replace(tensor, buffer=replace(tensor.buffer, extent=extent)))
        if not over.by_pack:
            return before
        by_element = over.lane == "lane" or self.inner == 1
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

    def words(self, over: Over, at: str = "i") -> list[str]:
        """Lines for the indices that offsets are made of, beside those of the bundle, at a place
        of the row.
        """
        return [f"const int {word} = {text};" for word, text in self.row_words if over.by_row]

    @property
    def late_words(self) -> list[str]:
        """Those of what is read late, which is there for any thread."""
        return self.words(self.over_of_tensor(self.late_reads[0]), "min(i, length - 1)")

    def places(self, sweep: Sweep) -> list[str]:
        """Lines that say where an element is, as far as a stage asks."""
        function = sweep.stage.function
        asks = {g for r in self.positions if function.reads(r.name) for g in r.extent}
        asks |= set(self.reduced[1:]) if sweep.counts_places else set()
        lines = []
        if asks.intersection(self.row_groups):
            lines += [f"const int {word} = {text};" for word, text in self.row_words]
        if self.along in asks:
            lines.append(f"const Index {self.word(self.along)} = {self._index(sweep.over)};")
        if self.inner_group in asks:
            assert self.inner_group is not None
            lines.append(f"const int {self.word(self.inner_group)} = lane % kInner;")
        if sweep.counts_places:
            place = self.compact([g for g in self.reduced if g < 0])
            lines.append(f"const int position_value = {place};")
        return lines

    def _index(self, over: Over) -> str:
        return "(i + lane) / kInner" if over.lane == "lane" else "i / kInner + beside"

    # Stages.

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """The stages as loops."""
        found = []
        pairs = zip(self.stages, self.kernel.over, strict=True)
        for number, (stage, groups) in enumerate(pairs, start=1):
            over = self.over_of(groups)
            merges = self._merges(number, over, stage.reductions)
            merged = [r for m in merges for r, _ in m.reductions]
            alone = [r for r in stage.reductions if r not in merged]
            found.append(Sweep(stage, over, merges, alone))
        return found

    def _merges(self, number: int, over: Over, reductions: Sequence[ReductionView]) -> list[Merge]:
        found = []
        mine = [r for r in reductions if over.by_pack and not self.result_of(r).by_pack]
        for kind, accumulator, name, of_each in MERGED:
            for lane in ("lane", "beside", ""):
                alike = [r for r in mine if r.kind == kind and self.result_of(r).lane == lane]
                if not alike:
                    continue
                placed, numbers, rows = [], 0, 0
                for r in alike:
                    placed.append((r, _sum_of(numbers, rows)))
                    numbers += not self.result_of(r).by_row
                    rows += self.result_of(r).by_row
                type_ = f"{accumulator}<{self.compute}>"
                name_ = f"{name}_{number}" + ("" if lane != "beside" else "_windows")
                dims = f"[{_sum_of(numbers, rows)}]{Over(False, False, lane).dims}"
                found.append(Merge(type_, name_, of_each, dims, tuple(placed)))
        return found

    def result_of(self, reduction: ReductionView) -> Over:
        """What the results of a reduction vary along."""
        return self.over_of(reduction.reduction.results[0][1].extent)

    def accumulator(self, reduction: ReductionView, merge: Merge, at: str, over: Over) -> str:
        """Where a row's threads accumulate a reduction that they merge."""
        mine = self.result_of(reduction)
        place = " + ".join(t for t in (at, "r" if mine.by_row else "") if t not in ("", "0"))
        return f"{merge.name}[{place or '0'}]{replace(mine, by_row=False).at(over)}"

    @property
    def most_reductions(self) -> int:
        """The most numbers that a warp gives where accumulators are merged."""
        counts = [
            sum(self._count(self.result_of(r)) for r, _ in m.reductions)
            for s in self.sweeps
            for m in s.merges
        ]
        return max([*counts, *(1 for s in self.sums if not s.extent)], default=0)

    def value_of(self, name: str, over: Over) -> str:
        """A value that a stage left, where a loop is."""
        for sweep, held in zip(self.sweeps, self.kernel.held, strict=True):
            for leaf, _ in held:
                if ir.name_of(leaf) == name:
                    return f"{name}_here{self.over_of(leaf.extent).at(over)}"
            for merge in sweep.merges:
                for r, at in merge.reductions:
                    if any(leaf_name == name for _, leaf_name in r.results):
                        return f"{self.accumulator(r, merge, at, over)}.{merge.number}"
            for r in sweep.alone:
                for result, leaf_name in r.results:
                    if leaf_name == name:
                        return f"{r.name}_sum{self.result_of(r).at(over)}.{result}()"
        raise AssertionError(name)

    def held_in(self, sweep: Sweep) -> list[str]:
        """The declarations of what a stage leaves."""
        held = self.kernel.held[self.sweeps.index(sweep)]
        kinds = {name: kind for kind, name in sweep.stage.function.results}
        names = [(ir.name_of(leaf), self.over_of(leaf.extent).dims) for leaf, _ in held]
        return [f"{kinds[name]} {name}_here{dims}" for name, dims in names]

    def left_for(self, store: Read, over: Over) -> str:
        """What is stored, where a loop is."""
        found = {b.name: leaf for b, leaf in self.kernel.stores}
        return self.value_of(ir.name_of(found[store.name]), over)

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
        mine = self.over_of_tensor(read)
        by_pack = mine.by_pack and read not in self.late_reads
        pack = f"{read.name}_in{replace(mine, by_pack=by_pack, lane='').at(over)}"
        lane = replace(mine, by_row=False, by_pack=False).at(over)[1:-1]
        return f"widen({pack}, {lane})" if lane else f"widen({pack})"

    @property
    def length(self) -> str:
        """How many elements a row has."""
        return self.size(self._of_row)

    @property
    def host_length(self) -> str:
        """The same, where the launch is set up."""
        return self.host_size(self._of_row)

    @property
    def _of_row(self) -> tuple[int, ...]:
        inner = self.inner_group if self.side == self.along else None
        return (self.along,) if inner is None else (self.along, inner)


def _sum_of(numbers: int, rows: int) -> str:
    """So many numbers, and so many for each row, together."""
    by_row = "kRows" if rows == 1 else f"{rows} * kRows"
    if not rows:
        return str(numbers)
    return f"{numbers} + {by_row}" if numbers else by_row
