"""Views of what rows and columns on the chip reduce: accumulators by kind, and results as text."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen import ir
from fusegen.reductionviews import ReductionView, StageView
from fusegen.views import KernelView

# Kinds of reductions whose accumulators are merged in one call: where they are, and their number.
_MERGED = ((("sum", "moments"), "sums", "total"), (("peak",), "peaks", "best"))


@dataclass(frozen=True)
class Merged:
    """Reductions of a stage that are merged in one call: the type and the name of their
    accumulators, and the name of the number that each holds.
    """

    type: str
    name: str
    number: str
    reductions: list[ReductionView]


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
            Merged(
                self.target.accumulators[kinds[0]].format(compute=self.compute),
                f"{name}_{place}",
                number,
                found,
            )
            for kinds, name, number in _MERGED
            if (found := [r for r in stage.reductions if r.kind in kinds])
        ]

    def moments_of(self, stage: StageView) -> list[ReductionView]:
        """A stage's means and variances, whose values are gone over twice."""
        return [r for r in stage.reductions if r.kind == "moments"]

    @property
    def most_reductions(self) -> int:
        """The most accumulators that are merged at once."""
        counts = [len(kind.reductions) for s in self.stages for kind in self.kinds_of(s)]
        counts += [2 * len(self.moments_of(s)) for s in self.stages]
        return max(counts, default=0)

    @property
    def accumulated(self) -> list[ReductionView]:
        """The reductions that have an accumulator of their kind: on the chip, moments are sums."""
        staged = [r for s in self.stages for r in s.reductions if r.kind != "moments"]
        return staged + self.left

    def result(self, stage: int, reduction: ReductionView, result: str) -> str:
        """A reduction's result from its sums; a mean is mended by what its distances add up to."""
        if reduction.kind != "moments":
            return self._total(stage, reduction)
        moments = self.moments_of(self.stages[stage])
        place = [r.name for r in moments].index(reduction.name)
        drift = self._cell("distances", stage, len(moments) + place)
        if result == "mean":
            return f"{self.centre(stage, reduction)} + {drift} * inverse_length"
        squares = self._cell("distances", stage, place)
        return f"({squares} - {drift} * {drift} * inverse_length) * inverse_length"

    def centre(self, stage: int, reduction: ReductionView) -> str:
        """A mean as the sum has it, about as exact as its rounding."""
        return f"{self._total(stage, reduction)} * inverse_length"

    def operand(self, reduction: ReductionView) -> str:
        """What a reduction accumulates, once more: held, or as it was read."""
        if reduction.operand:
            return f"{reduction.operand}[p][lane]"
        return f"widen({ir.name_of(reduction.reduction.value)}_in[p], lane)"

    def _total(self, stage: int, reduction: ReductionView) -> str:
        kinds = self.kinds_of(self.stages[stage])
        (kind,) = [kind for kind in kinds if reduction in kind.reductions]
        place = kind.reductions.index(reduction)
        return f"{kind.name}[{place}]{self._lane}.{kind.number}"

    def _cell(self, cells: str, stage: int, place: int) -> str:
        return f"{cells}_{stage + 1}[{place}]{self._lane}.total"

    @property
    def _lane(self) -> str:
        return "[lane]" if self.family == "column" else ""

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

    def share_squares(self, reduction: ReductionView) -> str:
        """The squared distances of a block's share from its own mean."""
        moments = self.moments_of(self.stages[0])
        place = [r.name for r in moments].index(reduction.name)
        squares = self._cell("distances", 0, place)
        drift = self._cell("distances", 0, len(moments) + place)
        return f"{squares} - {drift} * {drift} * inverse_length"


def _numbers(reduction: ReductionView) -> int:
    return 2 if reduction.kind == "moments" else 1
