"""Views of the kernels that read rows turn by turn, and keep nothing of them."""

from __future__ import annotations

from functools import cached_property

from fusegen import ir
from fusegen.indexing import Read
from fusegen.kernel import Entry, Kernel
from fusegen.reductionviews import ReductionView, StageView
from fusegen.rowviews import RowView
from fusegen.statements import ElementFunction, element_function
from fusegen.target import Target


class StreamedView(RowView):
    """A kernel of which each block takes a row."""

    is_team = is_shifted = is_persistent = is_staged = has_two_turns = False
    is_sent_ahead = keeps_along = stages_along = has_shared_sums = False
    light_threads = 0
    is_wide = "true"
    varying = ()  # what depends on the largest number changes from turn to turn

    def __init__(self, kernel: Kernel, entry: Entry, target: Target) -> None:
        super().__init__(kernel, entry, target)
        assert kernel.rescaling is not None
        scaling = kernel.rescaling
        self.largest = ir.name_of(scaling.largest)
        self.before = ir.name_of(scaling.before)
        named = {leaf: s.name for s in self.stages[1].reductions for _, leaf in s.reduction.results}
        factors = [(f"{named[leaf]}_scale", factor) for leaf, factor in scaling.factors]
        spelling = (target, self.compute, kernel.marks, self.grouping.names)
        self.rescale = element_function(f"{self.name}_rescale", factors, *spelling)
        self.expressions += [factor for _, factor in scaling.factors]
        self._scales = {named[leaf] for leaf, _ in scaling.factors}

    @property
    def first(self) -> StageView:
        """What finds a row's largest number."""
        return self.stages[0]

    @property
    def second(self) -> StageView:
        """What adds up beside it."""
        return self.stages[1]

    def is_rescaled(self, reduction: ReductionView) -> bool:
        """Whether a sum depends on the largest number."""
        return reduction.name in self._scales

    @property
    def functions(self) -> list[ElementFunction]:
        """The element functions, in the order they run."""
        return [*super().functions, self.rescale]

    @property
    def along(self) -> list[Read]:
        """What a lane is told: what it has of the row, and of what all rows have."""
        return self.full_reads + self.along_reads

    @cached_property
    def packed(self) -> list[Read]:
        """What is moved in packs, and so must be aligned."""
        return self.full_reads

    @cached_property
    def apt_blocks(self) -> int:
        """How many blocks a multiprocessor is to have, as far as registers go."""
        assert self.kernel.tier is not None
        return self.kernel.tier.resident // self.threads
