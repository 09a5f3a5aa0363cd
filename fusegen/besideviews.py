"""Views of what lies beside each other for the rows, or the elements, of a thread's pack."""

from __future__ import annotations

import math
from functools import cached_property

from fusegen.indexing import Read
from fusegen.placeviews import PlacedView
from fusegen.target import ITEM_BYTES, PACK_BYTES


class BesideView(PlacedView):
    """A kernel whose threads may read as neighbours what their rows do not have alone."""

    @cached_property
    def reads_beside(self) -> list[Read]:
        """What strided rows have of their own that lies beside each other as they do."""
        if self.family != "column" or not self.groups_behind:
            return []
        behind = set(self.groups_behind)
        return [r for r in self.row_reads if behind <= r.extent and r in self._plain_reads]

    @property
    def stores_beside(self) -> list[Read]:
        """What strided rows leave that lies beside each other as they do."""
        if self.family != "column" or not self.groups_behind:
            return []
        return [s for s in self.row_stores if s.extent.issuperset(self.groups_behind)]

    @property
    def line_reads(self) -> list[Read]:
        """What some rows share, of which one address tells where it is for all of a thread's pack:
        beside strided rows that a thread has to itself, or along rows that are no whole packs. It
        is slower where others have a part of such rows, and beside sums by column.
        """
        single = self.single_reads
        if self.is_alone and self.groups_behind:
            behind = set(self.groups_behind)
            return [r for r in self._plain_reads if behind < r.extent and r in single]
        if not self.is_shifted or self.sums:
            return []
        return [r for r in self._plain_reads if r.extent > self._along and r in single]

    @property
    def early_along(self) -> list[Read]:
        """What strided rows beside each other have in common, but not all along them: asked for
        while the rows are on their way. Only where nothing else waits for them.
        """
        if self.family != "column" or not self.is_sent_ahead or len(self.stages) != 1:
            return []
        found = [] if self.values.results or self.sums else self.single_reads
        behind = set(self.groups_behind)
        return [r for r in found if r in self._plain_reads and behind.isdisjoint(r.extent)]

    @property
    def lane_reads(self) -> list[Read]:
        """What is reached by its own offset at every element of a pack, too."""
        return [r for r in self.single_reads if r not in self.line_reads + self.early_along]

    @property
    def alike_lane(self) -> str:
        """Along a row, the first lane of those for which that is the same."""
        tier = self.kernel.tier
        is_apt = tier is not None and not self.is_shifted and not self.is_dealt
        is_apart = all(self.reduced[-1] not in r.extent for r in self.lane_reads)
        alike = math.gcd(tier.alike, self.lanes) if tier and is_apt and is_apart else 1
        return "lane" if alike == 1 else f"lane / {alike} * {alike}"

    @property
    def packs_beside(self) -> list[Read]:
        """Of what lies beside strided rows, what one access moves: as many neighbours as are whole
        packs of the rows. Asking each where it begins would keep its load waiting.
        """
        found = self.reads_beside + (self.line_reads if self.family == "column" else [])
        found += self.stores_beside
        return [r for r in found if self.lanes * ITEM_BYTES[r.buffer.dtype] <= PACK_BYTES]
