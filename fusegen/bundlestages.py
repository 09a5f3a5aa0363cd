"""Stages of bundle kernels as loops: what each goes through, and how its reductions end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusegen.reductionviews import ReductionView, StageView


@dataclass(frozen=True)
class Over:
    """What a value varies along in what a thread holds: from row to row, from pack to pack, and
    among the lanes of a pack, or the windows beside each other in one.
    """

    by_row: bool
    by_pack: bool
    lane: Literal["lane", "beside", ""]

    @property
    def dims(self) -> str:
        """How many of it a thread has."""
        lanes = {"lane": "[kLanes]", "beside": "[kWindows]", "": ""}[self.lane]
        return "[kRows]" * self.by_row + "[kPacks]" * self.by_pack + lanes

    def at(self, through: Over) -> str:
        """The one that belongs to where a loop is that goes through as much or more."""
        lane = "lane / kInner" if (self.lane, through.lane) == ("beside", "lane") else through.lane
        return "[r]" * self.by_row + "[p]" * self.by_pack + (f"[{lane}]" if self.lane else "")


@dataclass(frozen=True)
class Merge:
    """Accumulators of one kind that the threads of a row merge in one call: their type and name,
    how many there are, and for each reduction where its first is.
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
        return any(r.kind == "max" or r.indices for r in self.alone) or (
            self.stage.function.reads("position")
        )

    @property
    def asks_whether_here(self) -> bool:
        """Whether what lies behind a row's end is left out of something."""
        return self.over.by_pack and bool(self.merges or self.stage.sums)
