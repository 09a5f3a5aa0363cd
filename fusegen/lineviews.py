"""Views of the kernels that go through their elements by lines, each a plain loop over an array."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusegen import ir
from fusegen.indexing import Read
from fusegen.kernel import Entry, Kernel, Reduction
from fusegen.reductionviews import ReductionView
from fusegen.statements import ElementFunction
from fusegen.target import Target
from fusegen.views import KernelView


class LineView(KernelView):
    """A kernel that works on lines of neighbours; where its rows are short, of rows side by side,
    as if these lay across memory.
    """

    def __init__(self, kernel: Kernel, entry: Entry, target: Target) -> None:
        *outer, inner = range(len(entry.grouping.axes)) or (0,)
        is_short = entry.has_short_rows and kernel.family == "row" and not kernel.sums
        self.is_turned = is_short and (kernel.domain, kernel.reduced) == ((*outer,), (inner,))
        turned = replace(kernel, family="column") if self.is_turned else kernel
        super().__init__(turned, entry, target)

    @property
    def groups_before(self) -> tuple[int, ...]:
        """The groups outside the reduced ones."""
        return () if self.is_turned else super().groups_before

    @property
    def groups_behind(self) -> tuple[int, ...]:
        """The groups inside the reduced ones."""
        return self.domain if self.is_turned else super().groups_behind

    def takes_plain(self, reduction: Reduction) -> bool:
        """Whether the lines that are read are added up as they are."""
        is_read = reduction.value in {leaf for leaf, _ in self.kernel.inputs}
        is_full = reduction.value.extent == {*self.domain, *self.reduced}
        return is_read and is_full and self.family in ("row", "column", "inner", "outer")

    @property
    def row_groups(self) -> tuple[int, ...]:
        """The groups that tell the rows which leave partials."""
        return self.domain if self.family in ("row", "column") else super().row_groups

    @property
    def varying(self) -> tuple[int, ...]:
        """The groups from one of whose lines to the next a function is called again."""
        return self.reduced if self.family == "column" else ()

    def sizes_of(self, groups: Iterable[int]) -> list[str]:
        """How many index values each of the groups has."""
        return [self.size_of(group) for group in groups]

    def steps_of(self, read: Read, groups: Iterable[int]) -> list[str]:
        """How far apart a tensor's neighbours along each group lie; 0 where one stands for all."""
        own = read.buffer.extent
        behind = {g: self.size(own[own.index(g) + 1 :]) for g in own if g in read.extent}
        return [behind.get(group, "0") for group in groups]

    def start_of(self, read: Read, groups: Iterable[int]) -> str:
        """Where what a tensor has along a line begins, at the first index along the groups."""
        offset = self.offset(read, frozenset(groups) & read.extent)
        return read.name if offset == "0" else f"{read.name} + {offset}"

    def lines_of(self, function: ElementFunction, added: Iterable[ReductionView]) -> list[Read]:
        """The tensors that a function reads itself, and what is added up as it is read."""
        lines = {ir.name_of(r.reduction.value) for r in added if r.is_plain}
        lines |= {name for _, name in function.leaves}
        return [r for r in self.reads if r.name in lines]

    @property
    def joins_rows(self) -> bool:
        """Whether a line has several rows, which are short: elements are on their own, and so are
        their results.
        """
        whole = self.domain == tuple(range(len(self.grouping.axes)))
        return self.has_short_rows and self.family == "pointwise" and whole

    @property
    def staying_reads(self) -> list[Read]:
        """Down columns of several groups: what is the same for all rows that pass by, and does not
        lie in memory as it is wanted.
        """
        columns = self.kernel.columns
        if self.family != "outer" or len(columns) < 2:
            return []
        found = self.lines_of(self.values, [*self.reductions, *self.sums])
        found = [
            r for r in found if not r.buffer.is_computed and r.extent <= {*self.kept, *columns}
        ]
        found = [r for r in found if r.extent & frozenset(columns) and r.buffer.dtype != "noise"]
        return [
            r
            for r in found
            if not r.extent >= frozenset(columns) or r.type != self.value_type(r.name)
        ]

    @property
    def in_lines(self) -> set[str]:
        """The kinds of reductions that go on at each place of a line."""
        is_beside = self.family in ("outer", "column")
        return {r.kind for r in (*self.reductions, *self.sums) if is_beside}
