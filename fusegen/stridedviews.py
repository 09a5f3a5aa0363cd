"""Views of bundles whose rows are strided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusegen.bundlestages import Over
from fusegen.bundleviews import BundleView
from fusegen.indexing import Read
from fusegen.reductionviews import ReductionView


class StridedBundleView(BundleView):
    """The same where rows are strided: threads beside each other have packs of neighbouring rows,
    and those along a row take turns at its elements. What a thread has of one element of all of
    these rows is a pack here.
    """

    is_strided = True
    most_beside = 32  # threads beside each other

    @property
    def side(self) -> int:
        """The innermost group, along which packs lie."""
        return self.domain[-1]

    @property
    def packs(self) -> int:
        """How many elements of a row a thread has."""
        return self.elements

    def over_of(self, groups: Iterable[int]) -> Over:
        """What a value of an extent varies along; all but tensors are there for each window."""
        extent = set(groups)
        by_row = bool(extent.intersection(self.reduced[1:]))
        return Over(by_row, self.along in extent, "lane" if by_row else "beside")

    def over_of_tensor(self, tensor: Read) -> Over:
        """What a tensor varies along."""
        found = self.over_of(tensor.extent)
        is_beside = tensor.extent & {self.side, self.inner_group}
        return found if is_beside else replace(found, lane="")

    def sum_over(self, reduction: ReductionView) -> Over:
        """The columns of which a thread adds up each."""
        return Over(False, self.along in reduction.extent, "")

    def place_of(self, tensor: Read) -> str:
        """Where a thread's part of a tensor is."""
        return self.offset(tensor)

    def words(self, over: Over, at: str = "i") -> list[str]:
        """Lines for the indices that offsets are made of, beside those of the bundle."""
        lines = super().words(over, at)
        if over.by_row and self.inner_group is not None:
            lines.append(f"const int {self.word(self.inner_group)} = 0;")
        if over.by_pack:
            lines.append(f"const Index {self.word(self.along)} = {at};")
        return lines

    def _index(self, over: Over) -> str:
        return "i"
