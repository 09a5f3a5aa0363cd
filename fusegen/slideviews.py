"""Sliding windows as the templates see them: where a window's elements lie, and which windows
cover an element.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import cached_property

from fusegen import ir
from fusegen.indexing import Read
from fusegen.reductionviews import ReductionView, StageView
from fusegen.statements import ElementFunction, leaf_name
from fusegen.views import KernelView

_MOST_UNROLLED = 9
_MOST_PACKED = 4  # packs from as many windows


class SlideView(KernelView):
    """A slide or cover kernel as its template sees it.

    Along a pooled group, <word> is the window's index and <word>_at the element's.
    """

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return 256

    @property
    def least_blocks(self) -> int:
        """How many blocks a multiprocessor must have room for: where it is not said, a compiler
        seeks more of them than registers allow, and spills.
        """
        return 2

    @property
    def unrolled(self) -> int:
        """How many positions of a window are on their way at once."""
        return min(self.window_size, _MOST_UNROLLED)

    @property
    def alongs(self) -> list[tuple[str, str, str, str]]:
        """For each pooled group with a window here: a name for its geometry, the type, and the
        sizes of the whole and of the pooled axis.
        """
        found = []
        for i, (slide, group) in enumerate(
            zip(self.grouping.slides, self.grouping.pooled, strict=True)
        ):
            if -1 - i in self._windows:
                kind = f"Slide<{slide.size}, {slide.stride}, {slide.padding}, {slide.dilation}>"
                kind = f"Parts<{slide.size}>" if slide.parts else kind
                whole = f"sizes.{self.grouping.names[group]}_unpooled.value"
                found.append((self.along(-1 - i), kind, whole, self.size_of(group)))
        return found

    @property
    def _windows(self) -> set[int]:
        """The window groups that anything here is about."""
        counted = (n for n in ir.topological(self.expressions) if n.op == "covered")
        return {*self.reduced, *(w for n in counted for w in ir.axes_of(n))}

    def along(self, window: int) -> str:
        """What the geometry of a window group is called."""
        return f"along_{self.word(self.pooled_by(window))}"

    def pooled_by(self, window: int) -> int:
        """The group that a window group splits."""
        return self.grouping.pooled[-1 - window]

    def element_word(self, group: int) -> str:
        """The index of an element along a pooled group."""
        return f"{self.word(group)}_at"

    @property
    def unroll(self) -> bool:
        """Whether the target's compiler wants to be told to unroll."""
        return self.target.is_flat

    @property
    def covered(self) -> list[tuple[str, str]]:
        """(name, how many positions a window has) of every such number."""
        return self.covered_at("")

    def covered_at(self, ahead: str) -> list[tuple[str, str]]:
        """The same of a window so many ahead along the innermost group."""
        nodes = [n for n in ir.topological(self.expressions) if n.op == "covered"]
        found = {}
        for node in nodes:
            call = "padded" if node.attrs[1] else "covered"
            parts = []
            for window in ir.axes_of(node):
                group = self.pooled_by(window)
                is_ahead = ahead and group == self.last
                index = f"{self.word(group)} + {ahead}" if is_ahead else self.word(group)
                parts.append(f"{self.along(window)}.{call}({index})")
            found[leaf_name(node, self.grouping.names)] = " * ".join(parts)
        return sorted(found.items())

    def fixed(self, function: ElementFunction) -> list[Read]:
        """What a function reads that is the same all over a window."""
        return [r for r in self.reads_of(function) if not r.is_within]

    def within(self, function: ElementFunction) -> list[Read]:
        """What a function reads that differs within a window."""
        return [r for r in self.reads_of(function) if r.is_within]

    @property
    def fixed_reads(self) -> list[Read]:
        """What is the same all over a window."""
        return [r for r in self.reads if not r.is_within]

    def inside(self, windows: Sequence[int] | None = None) -> str:
        """Whether the current position of the current window is in the tensor."""
        tests = [
            f"{self.along(w)}.has({self.word(self.pooled_by(w))}, {self.word(w)})"
            for w in (self.reduced if windows is None else windows)
        ]
        return " && ".join(tests) or "true"

    def windows_in(self, store: Read) -> tuple[int, ...]:
        """The window groups along which a store varies."""
        return tuple(w for w in self.reduced if w in store.extent)

    @property
    def elements(self) -> str:
        """In a cover kernel: how many elements there are, where the launch is set up."""
        return " * ".join(f"static_cast<int64_t>({size}.value)" for _, size in self._places) or "1"

    @property
    def _places(self) -> list[tuple[str, str]]:
        """(index, size) for each group of a cover kernel's domain."""
        covered = {self.pooled_by(w) for w in self.reduced}
        return [
            (self.element_word(g), f"sizes.{self.grouping.names[g]}_unpooled")
            if g in covered
            else (self.word(g), f"sizes.{self.grouping.names[g]}")
            for g in self.domain
        ]

    def element_lines(self, index: str) -> list[str]:
        """Lines that take the index of an element apart."""
        return self._element_lines(index, self._places)

    def _element_lines(self, index: str, places: Sequence[tuple[str, str]]) -> list[str]:
        lines: list[str] = []
        for depth in range(len(places) - 1, -1, -1):
            word, size = places[depth]
            if depth == 0:
                lines.append(f"const Index {word} = {index};")
                break
            above = f"above_{word}"
            lines.append(f"const Index {above} = divide({index}, {size});")
            lines.append(f"const Index {word} = {index} - {above} * {size}.value;")
            index = above
        return lines

    def task_lines(self, index: str) -> list[str]:
        """Lines that take the index of a window apart."""
        return self.taken_apart(index, self.domain, set(self.domain))

    def window_lines(self) -> list[str]:
        """Lines that take position_value, a position in a window, apart."""
        return self.taken_apart("position_value", self.reduced, set(self.reduced))

    @property
    def window_size(self) -> int:
        """The number of positions in a window, at most."""
        return math.prod(self.grouping.windows[-1 - g] for g in self.reduced)

    def offset(self, read: Read, at_first: Container[int] = ()) -> str:
        """A tensor's element offset from the indices, which are locals by then."""
        if not read.buffer.is_windowed:
            return super().offset(read, at_first)
        text = ""
        for group in (g for g in read.buffer.extent if g >= 0):
            coordinate, size = self.word(group), self.size_of(group)
            if group in self.grouping.pooled:
                coordinate = self.element_word(group)
                size = f"sizes.{self.grouping.names[group]}_unpooled.value"
            text = coordinate if not text else f"({text}) * {size} + {coordinate}"
        return text or "0"

    def accumulator(self, reduction: ReductionView) -> str:
        """The struct that a reduction over a window goes on in."""
        is_peak = self.target.is_flat and [r for r, _ in reduction.results] == ["max"]
        names = {"sum": "Sum", "max": "Peak" if is_peak else "Maximum", "pick": "Pick"}
        return f"Window{names.get(reduction.kind, 'Winner')}"

    def accumulator_type(self, reduction: ReductionView) -> str:
        """The same with its parameters."""
        picks = f", {len(reduction.picks)}" if reduction.kind == "winner" else ""
        return f"{self.accumulator(reduction)}<{self.compute}{picks}>"

    def takes_twice(self, stage: StageView) -> bool:
        """Whether an element may be taken twice, as a maximum does not tell: then the nearest one
        that is there, which the window has too, stands for each that is not.
        """
        slides = [self.grouping.slides[-1 - w] for w in self.reduced]
        is_close = not any(s.parts or s.dilation > 1 for s in slides)
        found = {self.accumulator(r) for r in stage.reductions}
        return is_close and found <= {"WindowPeak", "WindowWinner"}

    # Elements, each from the windows that cover it.

    @property
    def is_unrolled(self) -> bool:
        """Whether all windows that may cover an element are on their way at once, so that none
        waits for another.
        """
        slides = [self.grouping.slides[-1 - w] for w in self.reduced]
        if not self.target.is_flat or any(s.parts for s in slides):
            return False
        most = math.prod(((s.size - 1) * s.dilation + s.stride) // s.stride for s in slides)
        return most <= (_MOST_PACKED if self.is_packed else _MOST_UNROLLED)

    def nth(self, window: int) -> str:
        """Which of the windows that cover an element along one group."""
        return f"nth_{self.word(self.pooled_by(window))}"

    @property
    def ends(self) -> list[tuple[str, str]]:
        """(store, leaf) where the sum of an element's shares, the leaf, is not yet the result."""
        return [(name, ir.name_of(leaf)) for name, leaf, _ in self.kernel.ends]

    def finished(self, store: Read) -> str:
        """What becomes of an element's shares is called."""
        is_sum = store.name not in [name for name, _ in self.ends]
        return f"{store.name}_sum" if is_sum else f"{store.name}_finished_value"

    @property
    def share_reads(self) -> list[Read]:
        """What the shares of windows read, as far as it is not read before for the element."""
        return [r for r in self.reads_of(self.values) if r not in self.reads_of(self.row_values)]

    @property
    def is_covering(self) -> str:
        """Whether the current window is there, and covers the current element."""
        tests = []
        for w in self.reduced:
            element = self.element_word(self.pooled_by(w))
            tests.append(f"{self.along(w)}.has_nth({element}, {self.nth(w)})")
            if self.grouping.slides[-1 - w].dilation > 1:
                tests.append(f"{self.word(w)} >= 0")
        return " && ".join(tests)

    # Side by side along an innermost group that no window splits.

    @property
    def is_packed(self) -> bool:
        """Whether neighbours go together, by accesses as wide as can be: they have their windows
        alike.
        """
        if not self.target.is_flat or not self.goes_by_lines or not self.beside:
            return False
        is_plain = not any(r.buffer.dtype == "noise" or r.buffer.is_computed for r in self.reads)
        tensors = self.reads + self.stores
        is_split = self.last in self.grouping.pooled or any(self.step(t) > 1 for t in tensors)
        return is_plain and not is_split

    @property
    def beside(self) -> list[Read]:
        """What varies along the innermost group."""
        return self.together(self.reads + self.stores)

    def apart(self, tensors: Sequence[Read]) -> list[Read]:
        """Those that are the same all along the innermost group."""
        return [t for t in tensors if self.last not in t.extent]

    def together(self, tensors: Sequence[Read]) -> list[Read]:
        """Those that vary along it."""
        return [t for t in tensors if self.last in t.extent]

    @cached_property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return self.beside if self.is_packed else []

    # By lines along the innermost group.

    @property
    def inner_window(self) -> int | None:
        """The window group that splits the innermost group, where one does."""
        return next((w for w in self.reduced if self.pooled_by(w) == self.last), None)

    @property
    def outer_windows(self) -> list[int]:
        """The other window groups."""
        return [w for w in self.reduced if w != self.inner_window]

    @property
    def inner_stride(self) -> int:
        """How many elements lie between those of neighbouring windows of a line."""
        if self.inner_window is None:
            return 1
        return self.grouping.slides[-1 - self.inner_window].stride

    @property
    def in_lines(self) -> set[str]:
        """The kinds of reductions that go on at each place of a line."""
        found = [r for s in self.stages for r in s.reductions]
        return {r.kind for r in found} if self.goes_by_lines else set()

    @property
    def goes_by_lines(self) -> bool:
        """Whether windows that are neighbours have their elements at one distance."""
        is_uneven = self.inner_window is not None and (
            self.grouping.slides[-1 - self.inner_window].parts > 0
        )
        writes_elements = self.family == "slide" and bool(self.element_stores)
        return bool(self.domain) and not is_uneven and not writes_elements

    def step(self, read: Read) -> int:
        """The distance in memory from a window of a line to the next; 0 for what they share."""
        if self.last not in read.extent:
            return 0
        if read.buffer.is_windowed:
            return self.inner_stride if self.last in self.grouping.pooled else 1
        # A window's own groups lie behind all others.
        return math.prod(self.grouping.windows[-1 - g] for g in read.buffer.extent if g < 0)

    def row_lines(self, index: str) -> list[str]:
        """Lines that take the index of a row of windows apart."""
        return self.taken_apart(index, self.domain[:-1], set(self.domain[:-1]))

    @property
    def last_place(self) -> tuple[str, str]:
        """(index, size) of the innermost group of a cover kernel's domain."""
        return self._places[-1]

    @property
    def rows_of_elements(self) -> str:
        """How many rows of elements there are."""
        return " * ".join(f"{size}.value" for _, size in self._places[:-1]) or "1"

    def element_row_lines(self, index: str) -> list[str]:
        """Lines that take the index of a row of elements apart."""
        return self._element_lines(index, self._places[:-1])
