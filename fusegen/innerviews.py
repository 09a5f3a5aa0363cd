"""Views of the kernels that pass over rows once, and add up along them."""

from __future__ import annotations

from fusegen.views import KernelView


class InnerView(KernelView):
    """A kernel with the sums along its rows, and over some of them."""

    @property
    def joins_rows(self) -> bool:
        """Whether a block takes several rows that no sum tells apart, where they are short and
        nothing else is asked of them, such as a batch's statistics.
        """
        is_one = len({s.extent for s in self.sums}) == 1
        return is_one and bool(self.sums[0].summed) and not self.stores

    @property
    def rows_needed(self) -> set[int]:
        """The groups that tell the rows apart."""
        return set(self.row_groups)
