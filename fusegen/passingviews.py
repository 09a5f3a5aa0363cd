"""Views of what every skeleton by rows reads, and of sums down columns, which rows pass by."""

from __future__ import annotations

from functools import cached_property

from fusegen.indexing import Read
from fusegen.stretchviews import StretchingView

FEW_LANES = 4  # of a pack; there are more only where all it has takes two bytes or less
MOST_IN_PAIRS = 16  # elements of a row that a thread has in column sums, where rows come in twos
_MOST_ROWS = 8  # that it loads first where columns of one tensor come one by one


class PassingView(StretchingView):
    """A kernel that goes by rows, or by which rows pass."""

    least_rows = 8  # of those that pass by a thread, where there are as many

    @cached_property
    def full_reads(self) -> list[Read]:
        """What varies along every group: reached by the flat index."""
        at_use = self._read_at_use
        return [r for r in self._loaded if r.extent == self._all and r.name not in at_use]

    @property
    def asked_reads(self) -> list[Read]:
        """What of that is asked for as its row begins, wanted only behind a reduction, and neither
        sent ahead nor held: it takes the registers of what is.
        """
        at_use = self._read_at_use
        return [r for r in self._loaded if r.name in at_use and r.buffer.dtype != "noise"]

    @property
    def drawn_reads(self) -> list[Read]:
        """Noise that is drawn where it is used: nothing of it lies in memory."""
        at_use = self._read_at_use
        return [r for r in self._loaded if r.name in at_use and r.buffer.dtype == "noise"]

    @property
    def _read_at_use(self) -> tuple[str, ...]:
        tier = self.kernel.tier if self.family == "row" else None
        return tier.at_use if tier else ()

    @cached_property
    def _all(self) -> frozenset[int]:
        return frozenset(self.domain) | frozenset(self.reduced)

    @property
    def _along(self) -> frozenset[int]:
        return frozenset(self.kernel.columns if self.family == "outer" else self.reduced)

    @cached_property
    def partial_reads(self) -> list[Read]:
        """What is broadcast along some group."""
        return [r for r in self.reads if r.extent != self._all or r.buffer.is_computed]

    @cached_property
    def _plain_reads(self) -> list[Read]:
        """What of that lies in memory, number by number."""
        found = [r for r in self.partial_reads if not r.buffer.is_computed]
        return [r for r in found if r.buffer.dtype != "noise"]

    @property
    def has_strips(self) -> bool:
        """Whether threads stay in columns of several groups, and find what those have once."""
        return self.family == "outer" and len(self.kernel.columns) > 1

    @property
    def varying(self) -> tuple[int, ...]:
        """The groups from one of whose elements to the next a function is called again."""
        return self.passing if self.has_strips else ()

    @property
    def column_reads(self) -> list[Read]:
        """What a thread that stays in its columns reads once, besides packs."""
        if not self.has_strips:
            return []
        staying = {*self.kept, *self.kernel.columns}
        found = [r for r in self.partial_reads if r.extent <= staying]
        return [r for r in found if r.extent != self._along or r.buffer.is_computed]

    @property
    def staying(self) -> list[tuple[str, str]]:
        """(type, name) of what is found once for a column, and asked for at each element."""
        once = self.values.once if self.has_strips else None
        found = {r.name for r in self.column_reads} | {n for _, n in (once.results if once else ())}
        return [pair for pair in self.values.leaves if pair[1] in found]

    @property
    def flat_row(self) -> str:
        """In column sums: the index of a row among all."""
        return self.compact(self.row_groups) if self.kept else "row"

    @property
    def rows_in_flight(self) -> int:
        """Down columns: how many rows a thread loads before it uses the first."""
        few = 2 if self.lanes * len(self.full_reads) <= MOST_IN_PAIRS else 1
        is_light = not self.sums and (not self.has_strips or len(self.full_reads) == 1)
        return few * 2 if is_light or self.reads_little else few

    @property
    def reads_little(self) -> bool:
        """Whether threads that add up read one tensor alone, in packs of elements of two bytes."""
        is_one = len(self.reads) == 1 == len(self.full_reads)
        return is_one and bool(self.sums) and not self.has_strips and self.lanes > FEW_LANES

    @property
    def turns(self) -> int:
        """Down columns: how often a thread does so, where it leaves no partial; 0 for as often as
        there are more rows than the device works on at once.
        """
        return 0 if self.sums or self.has_strips else 4

    @property
    def rows_of_one(self) -> int:
        """The same where columns come one by one."""
        if self.has_strips:
            return self.rows_in_flight
        return _MOST_ROWS if len(self.full_reads) == 1 else self.rows_in_flight
