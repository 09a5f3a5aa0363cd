"""Segments: a chain cut where one part must be finished before the next can begin.

Between two cuts, everything is one graph and, as far as the scheduler can, one kernel. A chain is
cut before a pooling step whose windows would otherwise reach into another reduction's result or
another pooling's; behind a pooling, before whatever is more than a function of each window's result
alone; and where a value is kept that is used beyond a cut, since it has to be in memory there. What
stands before a pooling is computed again for every window that reads it, where that is cheap; else
it is written once, and there is a cut.

A step that only says in what shape a value is seen is no cut where it stands first or last, or
where it joins or parts axes that can be followed. Else it begins a segment, which sees its x so. A
value from before such a step that is used again behind it comes from memory.

Everything here is told by the chain alone, without shapes. Where a reduction's result is pooled, or
what is pooled is added up, there are several answers, of which `joining` takes one for each shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from fusegen import ir
from fusegen.axes import Shape
from fusegen.bind import bind
from fusegen.bound import Bound
from fusegen.errors import OtherAxesError, UnsupportedError
from fusegen.ops import MOST_AXES, Chain, Step
from fusegen.target import FUNCTIONS
from fusegen.viewing import are_views, made_of_operands, seen_first
from fusegen.windowing import Slide

# How often one element's value may be computed for the windows that share it, without and with
# calls of mathematical functions: beyond, it is written once and read again.
_MOST_TIMES, _MOST_TIMES_DEAR = 16, 4


@dataclass(frozen=True)
class Segment:
    """A chain between two cuts.

    It begins with the value or operand named source, or where that is None with what the segment
    before ends with; later ones need the latter by the names in before. entering and leaving are
    the names under which its first and its last value are needed by later segments. gives is how
    often its last value is given as a result beside the chain's own.
    reason says why it does not run together with the segment before.
    """

    chain: Chain
    source: str | None = None
    before: tuple[str, ...] = ()
    entering: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    reason: str = ""
    gives: int = 0


def segments(
    chain: Chain,
    *,
    joins: bool = False,
    sums: bool = False,
    rows: bool = False,
    parts: bool = False,
    aside: bool = False,
    anew: bool = False,
) -> tuple[Segment, ...]:
    """The chain in segments: one, where nothing demands more. With `joins`, what is reduced may be
    pooled in its segment; with `sums`, what is pooled may be added up there, and with `rows`
    reduced whichever way; with `parts`, axes
    are followed through all views; with `aside`, operands that a chain goes on with may
    change their shape beside a value that is kept. With `anew`, a tensor that is used again is so
    in another segment, where it may lie along other axes.
    """
    steps = chain.steps
    is_whole = not any(s.is_view or (s.definition and s.definition.window_axes) for s in steps)
    if is_whole and not anew and len({s.groups for s in steps if s.groups}) < 2:
        return (Segment(chain),)  # nothing else cuts a chain
    cuts: dict[int, str] = {}
    facts = [_facts(step) for step in steps]
    may = {"joins": joins, "sums": sums, "rows": rows, "parts": parts, "aside": aside, "anew": anew}
    while (cut := _next_cut(steps, facts, cuts, **may)) is not None:
        at, reason = cut
        takes_up = steps[at - 1].taken_up is not None  # what is taken up is what a part begins with
        cuts[at - takes_up] = reason
    if not cuts:
        return (Segment(chain),)
    bounds = [0, *sorted(cuts), len(steps)]
    kept_at = {s.names[0]: i for i, s in enumerate(steps) if s.is_naming}
    crossing = {
        name
        for begin, end in pairwise(bounds)
        for name in _mentioned(steps[begin:end])
        if name in kept_at and kept_at[name] < begin
    }
    found = []
    for begin, end in pairwise(bounds):
        inner = [*steps[begin:end]]
        source = None
        while inner and (taken := _source(inner[0], crossing)) is not None:
            source = taken
            del inner[0]
        before = [s.names[0] for s in takewhile(lambda s: s.is_naming, inner)]
        behind = inner[len(before) :]
        is_other = bool(anew and behind and behind[0].taken_up)
        if is_other and source is None and not set(before).intersection(_mentioned(behind)):
            source, inner = behind[0].taken_up, behind[1:]
        else:
            before = []
        if all(s.is_structural for s in inner):
            raise UnsupportedError(
                f"{chain.text}: it ends in a value from before {steps[begin - 1].text}; leave out "
                "the steps that follow that value"
            )
        entering = [s.names[0] for s in takewhile(_is_of_x, inner)]
        last = [*takewhile(lambda s: s.is_naming, reversed(inner))]
        leaving = [s.names[0] for s in last]
        part = Chain(tuple(inner[: len(inner) - len(last)]))
        found.append(
            Segment(
                part,
                source,
                tuple(n for n in before if n in crossing),
                tuple(n for n in entering if n in crossing),
                tuple(n for n in leaving if n in crossing),
                cuts.get(begin, ""),
                sum(s.op == "give" for s in last),
            )
        )
    return tuple(found)


def bind_all(
    found: Iterable[Segment], x: tuple[Shape, str], operands: Mapping[str, tuple[Shape, str]]
) -> tuple[Bound, ...]:
    """Each segment bound to what it is called with: (shape, dtype name) of x and the operands.

    Raises ArgumentError for the first step that does not fit, UnsupportedError for a condition that
    would have to pass a cut.
    """
    known = dict(operands)
    bounds: list[Bound] = []
    for segment in found:
        known |= dict.fromkeys(segment.before, x)
        x = x if segment.source is None else known[segment.source]
        known |= dict.fromkeys(segment.entering, x)
        given = {n: known[n] for n in segment.chain.operands}
        bound = bind(segment.chain, x, given, segment.source or "x")
        bounds.append(bound)
        x = (bound.result_shape, bound.dtype)
        known |= dict.fromkeys(segment.leaving, x)
    return tuple(bounds)


def bind_any(
    chain: Chain, x: tuple[Shape, str], operands: Mapping[str, tuple[Shape, str]]
) -> tuple[Bound, ...]:
    """The segments that a chain has at least, bound; where some tensor lies along other axes when
    it is used again, those that it has then.
    """
    try:
        return bind_all(segments(chain), x, operands)
    except OtherAxesError:
        return bind_all(segments(chain, anew=True), x, operands)


@dataclass(frozen=True)
class _Facts:
    """What cutting needs to know of a step."""

    is_pooling: bool = False
    is_reducing: bool = False
    is_summing: bool = False  # it reduces by sums and means alone
    is_dear: bool = False  # it calls functions
    times: float = 1.0  # how often a pooling reads an element
    is_view: bool = False


def _facts(step: Step) -> _Facts:
    definition = step.definition
    if definition is None:
        return _Facts()
    if step.is_view:
        return _Facts(is_view=True)
    is_dear = any(node.op in FUNCTIONS for node in step.body)
    kinds = {ir.reduction(node)[0] for node in step.body if node.op == "reduce"}
    is_summing = bool(kinds) and kinds <= {"sum", "mean"}
    if definition.window_axes:
        found = step.windows((1 << 20,) * definition.window_axes)
        if found is None:  # of whole axes: a reduction like any other
            return _Facts(is_reducing=True, is_summing=is_summing, is_dear=is_dear)
        slides = [w for w in found if isinstance(w, Slide)]
        times = math.prod(w.size / w.stride if w.stride else 2.0 for w in slides)
        return _Facts(is_pooling=True, is_dear=is_dear, times=times)
    return _Facts(is_reducing=step.reduces, is_summing=is_summing, is_dear=is_dear)


def _source(step: Step, crossing: Collection[str]) -> str | None:
    """What a segment begins with whose first step takes up what lies in memory."""
    if step.op == "recall" and step.names[0] in crossing:
        return step.names[0]
    return step.taken_up


def _is_of_x(step: Step) -> bool:
    """Whether a step where a segment begins leaves its first value the running one."""
    return step.is_structural and step.taken_up is None


def _mentioned(steps: Iterable[Step]) -> list[str]:
    """The names that steps use."""
    names: list[str] = []
    for step in steps:
        names += step.names if step.op == "recall" else [name for _, name in step.operands]
    return names


def _read(step: Step) -> list[str]:
    """The names whose values a step uses, and not their type alone."""
    definition = step.definition
    types = [n for p, n in step.operands if definition and definition.parameter(p).is_type]
    return [name for name in _mentioned([step]) if name not in types]


def _next_cut(
    steps: Sequence[Step],
    facts: Sequence[_Facts],
    cuts: Mapping[int, str],
    *,
    joins: bool,
    sums: bool,
    rows: bool,
    parts: bool,
    aside: bool,
    anew: bool,
) -> tuple[int, str] | None:
    """A cut that is still needed: the step to begin with, and why."""
    kept_at: dict[str, int] = {}
    start = 0
    before = pool = None  # the steps that reduce and pool, in this segment
    is_dear = is_begun = False
    met: set[str] = set()  # names used before the pooling
    used: set[str] = set()  # in this segment
    given = ""  # what is given in this segment
    views = _Views(steps, 0, parts=parts, aside=aside)
    for i, (step, fact) in enumerate(zip(steps, facts, strict=True)):
        if i in cuts:
            start, before, pool, is_dear, is_begun, met = i, None, None, False, False, set()
            given, used = "", set()
            views = _Views(steps, i, parts=parts, aside=aside)
        if step.is_naming:
            kept_at[step.names[0]] = i
            given = step.text if step.op == "give" else given
            continue
        reason = ""
        for name in _mentioned([step]):
            at = kept_at.get(name, i)
            if at < start and (cut := _cut_at_keep(steps, cuts, at)):
                return cut, f"{steps[at].text} is used again by {step.text}, from memory"
            if step.op == "recall" and at < start:
                reason = f"{step.text} goes on with a value that an earlier kernel left"
                is_begun = is_begun or views.last is not None
            if name not in _read(step):
                continue
            if pool is not None and (start <= at < pool or name in met):
                reason = f"{step.text} uses what is there before the pooling at each window"
            if anew and (name in used or start <= kept_at.get(name, -1)):
                reason = f"{step.text} uses {name!r} again, along other axes"
            if (cut := views.cut_for(name, at, i)) is not None:
                return cut, f"{step.text} uses {name!r}, which is there before the shape changes"
        if fact.is_pooling and pool is not None:
            reason = f"{step.text} takes its windows over the result of {steps[pool].text}"
        elif fact.is_pooling and given:
            reason = f"{step.text} takes its windows over what {given} has in memory"
        elif fact.is_pooling and before is not None and not joins:
            reason = f"{step.text} takes its windows over the result of {steps[before].text}"
        elif fact.times > (_MOST_TIMES_DEAR if is_dear else _MOST_TIMES):
            reason = f"{step.text} reads each element {fact.times:g} times, too often to compute it"
        elif pool is not None and fact.is_reducing and not (rows or (sums and fact.is_summing)):
            reason = f"{step.text} reduces the result of {steps[pool].text}"
        reason = reason or views.hinders(i, is_begun=is_begun, is_pooled=pool is not None)
        if reason and is_begun:
            return i, reason
        views.note(i, is_begun=is_begun)
        used.update(_read(step))
        if step.taken_up is not None:
            is_begun = i > start
            met.update(_read(step))
        if step.is_structural or fact.is_view:
            continue
        is_begun = True
        is_dear = is_dear or fact.is_dear
        if fact.is_pooling:
            pool = i
        elif fact.is_reducing:
            before = i
        if pool is None or pool == i:
            met.update(_read(step))
    return None


class _Views:
    """What a segment sees in other shapes than it began with, as far as it is read."""

    def __init__(self, steps: Sequence[Step], start: int, *, parts: bool, aside: bool) -> None:
        self.steps, self.start, self.parts, self.may_be_aside = steps, start, parts, aside
        self.last: int | None = None  # the last step that changed the shape
        self.is_first = True  # whether nothing but views stands before that
        self.parted: Step | None = None  # the last that joined or parted axes of the graph
        self.from_axis = MOST_AXES  # the first axis that is not one of the graph's
        self.groups: list[int] = []  # into how many the channels are split
        self.named: set[str] = set()
        self.named_before: set[str] = set()  # before the last change of shape
        # What a segment begins with is its x, if it is an operand too.
        first = start + (start < len(steps) and steps[start].taken_up is not None)
        kept = (s.names[0] for s in steps[:first] if s.is_naming)
        self.is_aside = [False] * first + made_of_operands(steps[first:], kept)

    def note(self, i: int, *, is_begun: bool) -> None:
        """Take in a step that is in the segment."""
        step = self.steps[i]
        definition = step.definition
        is_other = self.is_aside[i] and self.may_be_aside  # than what a kept value is seen with
        if step.is_view and not is_other:
            self.last, self.is_first = i, not is_begun
            self.named_before |= self.named
            if is_begun or not seen_first(self.steps[self.start :]):
                self.parted = step
                self.from_axis = min(self.from_axis, _first_axis(step))
        elif definition is not None and definition.groups:
            self.parted, self.from_axis = step, min(self.from_axis, 1)
            self.groups.append(step.groups)
        self.named.update(_read(step))

    def cut_for(self, name: str, kept_at: int, i: int) -> int | None:
        """Where to cut so that step i finds a value, kept or used before, in its own shape."""
        if self.last is None or self.parts:
            return None
        if self.start <= kept_at < self.last or name in self.named_before:
            return i if self.is_first else self.last
        return None

    def hinders(self, i: int, *, is_begun: bool, is_pooled: bool) -> str:
        """Why a step cannot follow in the segment; nothing where it can."""
        step = self.steps[i]
        definition = step.definition
        if step.groups and any(step.groups % n and n % step.groups for n in self.groups):
            return f"{step.text} has groups that cross those of an earlier step"
        if definition is None or (not definition.is_view and self.last is None):
            return ""
        if definition.is_view:
            is_followed = definition.shaping == "merge" or are_views(self.steps[i:])
            if not is_begun or is_followed:
                return ""
            is_parted = self.parted is not None or definition.shaping == "view"
            if is_pooled or (is_parted and not self.parts):
                return f"{step.text} sees what is there in a shape of its own"
            return ""
        if self.parted is not None:
            is_pooling = bool(definition.window_axes)
            if is_pooling or (definition.groups and self.from_axis < 2):
                return f"{step.text} wants whole axes, which {self.parted.text} has made others of"
        return ""


def _first_axis(step: Step) -> int:
    """The first axis that a view step changes, as far as that can be told without a shape."""
    attributes = dict(step.attributes)
    first = attributes.get("start_dim", attributes.get("dim"))
    return first if isinstance(first, int) and first >= 0 else 0


def _cut_at_keep(steps: Sequence[Step], cuts: Collection[int], at: int) -> int | None:
    """Where to cut so that a kept value is in memory; None where it is already."""
    begin = max((c for c in cuts if c <= at), default=0)
    end = min((c for c in cuts if c > at), default=len(steps))
    is_first = all(map(_is_of_x, steps[begin:at]))
    behind = at + len([*takewhile(lambda s: s.is_naming, steps[at:end])])
    return None if is_first or behind == end else behind
