"""Window kernels as the templates see them: what a thread takes side by side.

Windows that are neighbours along the innermost group have their elements side by side in memory:
one line of them for each index of a window's other groups. A thread with as many windows as fill
the widest access moves whole lines at once; a thread with one window goes element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fusegen import ir
from fusegen.indexing import Read
from fusegen.reductionviews import StageView
from fusegen.statements import ElementFunction
from fusegen.target import FUNCTIONS, ITEM_BYTES, PACK_BYTES
from fusegen.views import KernelView

# What a thread may hold of its windows in registers, a quarter of the most it can have: beyond, it
# goes back to memory for every use.
_HELD_BYTES = 256
_MOST_AT_ONCE = 16  # positions of a window that are gone through at each place of a line


class WindowView(KernelView):
    """A window kernel as its template sees it.

    Its tensors are lined (they vary within windows and along the innermost group), beside (they
    have neighbours for neighbouring windows), uniform (the same for those), or single: whatever
    lies otherwise, and is reached element by element.
    """

    @property
    def varying(self) -> tuple[int, ...]:
        """The groups within windows: what an element does not differ in is found once for each."""
        return self.reduced if self.target.is_flat else ()

    @property
    def inner_window(self) -> int | None:
        """The window group that splits the innermost group, where one does."""
        pooled = self.grouping.pooled
        group = -1 - pooled.index(self.last) if self.last in pooled else None
        return group if group in self.reduced else None

    @property
    def inner_size(self) -> int:
        """How many elements of a window lie side by side."""
        return 1 if self.inner_window is None else self.grouping.windows[-1 - self.inner_window]

    @property
    def line_groups(self) -> tuple[int, ...]:
        """The window's groups that tell its lines."""
        return tuple(g for g in self.reduced if g != self.inner_window)

    @property
    def lines(self) -> int:
        """How many lines a window has."""
        return self.window_size // self.inner_size

    @property
    def place_of_position(self) -> tuple[str, str]:
        """The line in which a position of a window lies, and where in it."""
        size, p = self.inner_size, "position_value"
        behind = (
            self.reduced[self.reduced.index(self.inner_window) + 1 :]
            if self.inner_window is not None
            else ()
        )
        step = math.prod(self.grouping.windows[-1 - g] for g in behind)
        if step == 1:
            return f"{p} / {size}", f"{p} % {size}"
        # What is innermost in memory is not the last axis, as in an x that was transposed.
        return f"{p} / {step * size} * {step} + {p} % {step}", f"{p} / {step} % {size}"

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The groups that tell the rows which leave partials: down to the last that a sum keeps."""
        kept = {g for _, buffer in self.kernel.sums for g in buffer.extent}
        depth = max((self.domain.index(g) + 1 for g in kept), default=0)
        return self.domain[: min(depth, len(self.domain) - 1)]

    @property
    def task_groups(self) -> tuple[int, ...]:
        """The groups that tell the windows of one row of partials."""
        return self.domain[len(self.row_groups) :]

    def lined(self, tensors: Iterable[Read]) -> list[Read]:
        """Those of which a thread holds whole lines."""
        return [t for t in tensors if self._is_lined(t)] if self._held_bytes else []

    def beside(self, tensors: Iterable[Read]) -> list[Read]:
        """Those with one element for each window, side by side."""
        return [t for t in tensors if self.last in t.extent and min(t.extent) >= 0]

    def uniform(self, tensors: Iterable[Read]) -> list[Read]:
        """Those that are the same for neighbouring windows, and within each."""
        return [t for t in tensors if self.last not in t.extent and min(t.extent, default=0) >= 0]

    def single(self, tensors: Iterable[Read]) -> list[Read]:
        """Those that are reached element by element."""
        tensors = list(tensors)
        others = self.lined(tensors) + self.beside(tensors) + self.uniform(tensors)
        return [t for t in tensors if t not in others]

    def within(self, function: ElementFunction) -> list[Read]:
        """What a function reads that differs from element to element of a window."""
        lined, single = self.lined(self.reads), self.single(self.reads)
        return [r for r in self.reads_of(function) if r in lined or r in single]

    def _is_lined(self, tensor: Read) -> bool:
        is_along = self.last in tensor.extent and tensor.buffer.is_windowed
        return is_along and (self.last not in self.grouping.pooled or self.inner_window is not None)

    def is_split(self, tensor: Read) -> bool:
        """Whether neighbours in memory are neighbours in a window, one position after the other."""
        is_last = self.inner_window is not None and self.inner_window == self.reduced[-1]
        return (
            is_last
            and tensor.buffer.is_windowed
            and {self.last, self.inner_window} <= tensor.extent
        )

    @property
    def _held_bytes(self) -> int:
        """What lines of one window take; 0 where that is too much."""
        tensors = [t for t in self.reads + self.stores if self._is_lined(t)]
        held = sum(self.window_size * ITEM_BYTES[t.buffer.dtype] for t in tensors)
        return held if held <= _HELD_BYTES else 0

    @property
    def edged(self) -> list[Read]:
        """What is written as a whole, with the edges that no window covers."""
        whole = {*self.domain, *self.reduced}
        return [s for s in self.element_stores if s.buffer.is_windowed and s.extent == whole]

    @property
    def rooms(self) -> list[tuple[str, str, str]]:
        """For each of a window's groups its word, the elements that a thread takes along it, and
        those with the edge behind the last window.
        """
        found = []
        for group in self.reduced:
            pooled = self.grouping.pooled[-1 - group]
            word, size = self.word(pooled), self.grouping.windows[-1 - group]
            windows = "kWindows" if group == self.inner_window else "1"
            taken = f"{windows} * {size}" if group == self.inner_window else str(size)
            behind = f"sizes.{word}_unpooled.value - {word} * {size}"
            is_last = f"{word} + {windows} == {self.size_of(pooled)}"
            found.append((self.word(group), taken, f"{is_last} ? {behind} : {taken}"))
        return found

    @property
    def leaves_columns(self) -> bool:
        """Whether each block leaves sums of columns that lie beside each other."""
        return self.is_by_column and bool(self.sums)

    @property
    def is_by_column(self) -> bool:
        """Whether a sum has a result for each index of the innermost group."""
        return any(self.last in buffer.extent for _, buffer in self.kernel.sums)

    @property
    def moved_wide(self) -> list[Read]:
        """What goes in wide accesses, where it can."""
        tensors = self.reads + self.stores
        wide = self.lined(tensors) + self.beside(tensors)
        return [t for t in wide if t.buffer.dtype != "noise"]

    @property
    def windows(self) -> int:
        """How many windows side by side make a line a whole number of the widest accesses."""
        tensors = self.reads + self.stores
        dtypes = [t.buffer.dtype for t in self.lined(tensors) or self.beside(tensors)]
        lanes = PACK_BYTES // max((ITEM_BYTES[d] for d in dtypes), default=PACK_BYTES)
        return lanes // math.gcd(lanes, self.inner_size)

    @property
    def beside_each_other(self) -> list[int]:
        """How many windows go side by side, widest first: half as many too, more than one."""
        return [n for n in (self.windows, self.windows // 2) if n > 1]

    @property
    def has_even_lines(self) -> bool:
        """Whether a line of one window alone makes accesses of several elements."""
        return self.inner_window is not None and self.inner_size % 2 == 0

    @property
    def is_wide(self) -> bool:
        """Whether neighbouring windows can go together, where sizes and alignment allow."""
        written_once = self.uniform(self.stores)
        is_alone = written_once or self.single(self.reads + self.stores)
        return not is_alone and self._held_bytes * self.windows <= _HELD_BYTES

    @property
    def line_size(self) -> str:
        """How many elements lie along the innermost group, as the lined tensors have it."""
        if self.inner_window is None:
            return self.size_of(self.last)
        return f"sizes.{self.grouping.names[self.last]}_unpooled.value"

    def is_at_once(self, stage: StageView) -> bool:
        """Where windows go by lines: whether a stage goes through all of a window at each place,
        and nothing of it through memory; or along a line for each position.
        """
        nodes = ir.topological([r.reduction.value for r in stage.reductions])
        return self.window_size <= _MOST_AT_ONCE and not any(n.op in FUNCTIONS for n in nodes)

    @property
    def at_once(self) -> set[str]:
        """The kinds of reductions of such stages."""
        return {r.kind for s in self.stages if self.is_at_once(s) for r in s.reductions}

    @property
    def in_lines(self) -> set[str]:
        """The kinds of reductions that go on at each place of a line."""
        found = [r for s in self.stages if not self.is_at_once(s) for r in s.reductions]
        return {r.kind for r in (*found, *(self.sums if self.is_by_column else ()))}
