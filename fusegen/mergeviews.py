"""Views of what rows and columns on the chip reduce: accumulators by kind, and results as text."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.reductionviews import ReductionView, StageView
from fusegen.views import KernelView

# Kinds of reductions whose accumulators are merged in one call: where they are, and their number.
MERGED = (
    ("sum", "Sum", "sums", "total"),
    ("moments", "Spread", "spreads", "centre"),
    ("peak", "Peak", "peaks", "best"),
)


@dataclass(frozen=True)
class Merged:
    """Reductions of a stage that are merged in one call: the type and the name of their
    accumulators, and the name of the number that each holds.
    """

    type: str
    name: str
    number: str
    reductions: list[ReductionView]

    @property
    def is_spread(self) -> bool:
        """Whether they are means and squared distances from them."""
        return self.number == "centre"


class MergingView(KernelView):
    """A kernel whose threads merge what they accumulated, stage by stage."""

    @property
    def has_moments(self) -> bool:
        """Whether a mean and a variance are among the reductions."""
        return any(self.moments_of(s) for s in self.stages)

    def kinds_of(self, stage: StageView) -> list[Merged]:
        """A stage's reductions by the kind of their accumulators."""
        place = self.stages.index(stage) + 1
        return [
            Merged(f"{kind}<{self.compute}>", f"{name}_{place}", number, found)
            for of, kind, name, number in MERGED
            if (found := [r for r in stage.reductions if r.kind == of])
        ]

    def moments_of(self, stage: StageView) -> list[ReductionView]:
        """A stage's means and variances, whose values are gone over twice."""
        return [r for r in stage.reductions if r.kind == "moments"]

    @property
    def most_reductions(self) -> int:
        """The most numbers that a warp gives where accumulators are merged, and their count."""
        kinds = [kind for s in self.stages for kind in self.kinds_of(s)]
        counts = [(2 if kind.is_spread else 1) * len(kind.reductions) for kind in kinds]
        return max(counts, default=0) + self.has_moments

    @property
    def accumulated(self) -> list[ReductionView]:
        """The reductions that have an accumulator of their kind: on the chip, moments are sums."""
        staged = [r for s in self.stages for r in s.reductions if r.kind != "moments"]
        return staged + self.left

    def result(self, stage: int, reduction: ReductionView, result: str) -> str:
        """A reduction's result from what was merged."""
        if result == "variance":
            squares = self.squares(stage, reduction)
            is_strided = self.family == "column"
            by = "* inverse_length" if is_strided else f"/ static_cast<{self.compute}>(length)"
            return f"{squares} {by}"
        kind, accumulator = self._accumulator(stage, reduction)
        return f"{accumulator}.{kind.number}"

    def squares(self, stage: int, reduction: ReductionView) -> str:
        """The squared distances from a mean, added up."""
        return f"{self._accumulator(stage, reduction)[1]}.squares"

    def _accumulator(self, stage: int, reduction: ReductionView) -> tuple[Merged, str]:
        kinds = self.kinds_of(self.stages[stage])
        (kind,) = [kind for kind in kinds if reduction in kind.reductions]
        lane = "[lane]" if self.family == "column" else ""
        return kind, f"{kind.name}[{kind.reductions.index(reduction)}]{lane}"

    @property
    def _words(self) -> int:
        return 2 if self.compute == "double" else 1

    def team_number(self, reduction: ReductionView, result: str) -> int:
        """Where a reduction's result stands among those of its stage."""
        (stage,) = self.stages
        names = [r.name for r in stage.reductions]
        before = sum(_numbers(r) for r in stage.reductions[: names.index(reduction.name)])
        return before + (result == "variance")

    def team_place(self, reduction: ReductionView, result: str) -> int:
        """The same, in words."""
        return self.team_number(reduction, result) * self._words

    @property
    def team_numbers(self) -> int:
        """How many numbers a block of a team gives for a row."""
        return sum(_numbers(r) for s in self.stages for r in s.reductions)


def _numbers(reduction: ReductionView) -> int:
    return 2 if reduction.kind == "moments" else 1
