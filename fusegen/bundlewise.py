"""Bundle kernels: rows that windows tie together, held by threads that go through all of them.

What is computed of a bundle varies along its rows, from row to row, along the windows of a row, or
along none of these. Each value is found in a stage that goes through just that: what a window has
one of is found once for it, and what a row has one of, once for the row. A stage leaves what later
ones need of it; what it reduces is known behind it. Sums over all bundles are added up by column as
blocks go from one to the next; what has to be summed otherwise is written, one number a bundle, for
the kernels after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fusegen import arity, ir
from fusegen.carrying import cut_before
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.kernel import Buffer, Kernel, Reduction
from fusegen.lower import Mark, remarked
from fusegen.staging import Pass, finalise, gather, partials, reduces_below
from fusegen.target import FUNCTIONS
from fusegen.tiers import Tier


@dataclass(frozen=True)
class _Places:
    """The groups of a bundle: along its rows, the places there within windows, and those that tell
    its rows apart.
    """

    along: int
    inner: Extent
    rows: Extent

    @property
    def row(self) -> Extent:
        """All groups along a row."""
        return self.inner | {self.along}

    @property
    def every(self) -> Extent:
        """All groups of a bundle."""
        return self.row | self.rows

    def over(self, extent: Extent) -> Extent:
        """The groups to go through for what varies so: rows are gone through as a whole."""
        by_row = self.rows if extent & self.rows else frozenset[int]()
        if extent & self.inner:
            return by_row | self.row
        return by_row | (extent & {self.along})


@dataclass
class _Stage:
    over: Extent
    reductions: list[Reduction] = field(default_factory=list)
    held: list[tuple[Expr, Expr]] = field(default_factory=list)
    sums: list[tuple[Reduction, Buffer]] = field(default_factory=list)


def bundlewise_kernel(
    state: Pass, tier: Tier, along: int, window: Extent, pooled: Sequence[int]
) -> None:
    """One kernel for all that is computed of bundles, whose rows go along one group.

    pooled has the group that each group of places within windows splits.
    """
    inner = frozenset(g for g in window if pooled[-1 - g] == along)
    places = _Places(along, inner, window - inner)
    nodes = ir.topological(state.pending.values())
    rest = frozenset(g for n in nodes for g in n.extent) - places.every
    _moments_as_sums(state, places)
    state.resolve(_bundles_first(reduces_below(state.pending.values()), places))

    def is_local(expr: Expr) -> bool:
        return all(ir.reduction(r)[1] <= places.every for r in reduces_below([expr]))

    chosen = {
        n: e
        for n, e in state.pending.items()
        if is_local(e) and e.extent >= rest and (e.extent & places.every or reduces_below([e]))
    }
    for name in chosen:
        del state.pending[name]
    left = [r for r in reduces_below(state.pending.values()) if not is_local(r)]
    left = [r for r in left if is_local(r.args[0]) and r.args[0].extent >= rest]
    columns = [r for r in left if r.extent <= places.row]
    others = [r.args[0] for r in left if r not in columns and reduces_below(r.args)]
    assert not any(value.extent & places.every for value in others)
    work = _Work(state, places, window)
    known: dict[Expr, Expr] = {}
    sums: dict[tuple[int, ...], list[tuple[Reduction, Buffer]]] = {}
    for node in columns:
        found, leaves = partials(state, [node], ordered(node.extent))
        sums.setdefault(ordered(node.extent), []).extend(found)
        known |= leaves
    every = [pair for pairs in sums.values() for pair in pairs]
    work.reduce([*chosen.values(), *others, *(r.value for r, _ in every)])
    stores = [(state.output(n, e), work.leaf_for(e)) for n, e in chosen.items()]
    for value in dict.fromkeys(others):
        known[value] = ir.tensor(state.fresh("of_bundle"), value.extent, 0)
        state.buffers[known[value]] = state.scratch(known[value])
        stores.append((state.buffers[known[value]], work.leaf_for(value)))
    for reduction, buffer in every:
        work.add_up(reduction, buffer)
    work.hold_dear()
    state.kernels.append(work.kernel(tier, ordered(rest), stores))
    state.resolve(known)
    for extent, pairs in sums.items():
        finalise(state, extent, tuple(pairs), extent)


def _moments_as_sums(state: Pass, places: _Places) -> None:
    """The mean of a row as a sum, and its variance as the sum of what is off by that, squared: all
    of it is at hand to go over twice.
    """

    def rule(node: Expr) -> Expr:
        if node.op != "reduce" or ir.reduction(node)[1] != places.row:
            return node
        kind, axes = ir.reduction(node)
        if kind not in ("mean", "variance"):
            return node
        (value,) = node.args
        inverse = 1.0 / ir.count(axes)
        mean = ir.reduce_sum(value, axes) * inverse
        off = value - mean
        return mean if kind == "mean" else ir.reduce_sum(off * off, axes) * inverse

    nodes = [*state.pending.values(), *(m.node for m in state.marks)]
    new = dict(zip(nodes, ir.rewrite(nodes, rule), strict=True))
    state.pending = {name: new[expr] for name, expr in state.pending.items()}
    state.marks = remarked(state.marks, new)


def _bundles_first(reduces: Iterable[Expr], places: _Places) -> dict[Expr, Expr]:
    """Sums over some bundles and all that is in them, that of what is in them first."""
    new = {}
    for node in reduces:
        kind, axes = ir.reduction(node)
        inside = node.args[0].extent & places.every
        if axes - places.every and inside and inside <= axes and node.extent:
            assert kind == "sum", f"the {kind} over bundles"
            new[node] = ir.reduce_sum(ir.reduce_sum(node.args[0], inside), axes - inside)
    return new


class _Work:
    """The stages so far, and the leaves for what they leave."""

    def __init__(self, state: Pass, places: _Places, window: Extent) -> None:
        self.state = state
        self.places = places
        self.window = window
        self.stages: list[_Stage] = []
        self.leaves: dict[Expr, Expr] = {}  # for what is known, the leaf that stands for it
        self.known_at: dict[Expr, int] = {}  # for each such leaf the stage that leaves it
        self.names = {m.node: m.name for m in state.marks}
        self.numbers: dict[Expr, Expr] = {}  # for places along some of a window's groups

    def reduce(self, roots: Sequence[Expr]) -> None:
        """Stages for all reductions below the roots, level by level."""
        while missing := [r for r in reduces_below(roots) if r not in self.leaves]:
            ready = [r for r in missing if all(b in self.leaves for b in reduces_below(r.args))]
            for axes in dict.fromkeys(ir.reduction(r)[1] for r in ready):
                self._reduce_along(axes, [r for r in ready if ir.reduction(r)[1] == axes])

    def _reduce_along(self, axes: Extent, nodes: Sequence[Expr]) -> None:
        reductions, known = gather(self.state, nodes)
        self.leaves |= known
        for reduction in reductions:
            extent = ir.union(_of(reduction))
            if reduction.kind in ("max", "pick"):
                extent |= axes  # the position counts
            over = self.places.over(extent)
            settled = _mapped(reduction, partial(self._settled, over=over))
            at = self._place(_of(settled), over)
            self.stages[at].reductions.append(settled)
            self.known_at |= {leaf: at for _, leaf in reduction.results}

    def leaf_for(self, expr: Expr) -> Expr:
        """The leaf for a value, which a stage leaves."""
        if expr not in self.leaves:
            over = self.places.over(expr.extent)
            value = self._settled(expr, over)
            if value in self.known_at:
                return value
            self._hold(expr, value, over)
        return self.leaves[expr]

    def add_up(self, reduction: Reduction, buffer: Buffer) -> None:
        """Have a sum by column taken as soon as its term is known."""
        over = self.places.over(reduction.value.extent | frozenset(buffer.extent))
        value = self._settled(reduction.value, over)
        at = self._place([value], over)
        self.stages[at].sums.append((replace(reduction, value=value), buffer))

    def hold_dear(self) -> None:
        """Where several stages call the same functions, the first of them leaves the fewest values
        that spare the others these calls.
        """
        first: dict[Expr, int] = {}
        for i, stage in enumerate(self.stages):
            again = [n for n in self._dear(stage) if n in first]
            if again:
                at = max(first[n] for n in again)
                unknown = {leaf for leaf, behind in self.known_at.items() if behind >= at}
                is_element = partial(self._is_of, stage)
                cut = cut_before(_exprs(stage), is_element, unknown, set(again).__contains__)
                leaves = {node: self._leaf(node) for node in cut}
                self.stages[at].held += [(leaf, node) for node, leaf in leaves.items()]
                self.known_at |= dict.fromkeys(leaves.values(), at)
                for later in self.stages[at + 1 :]:
                    _substitute(later, leaves)
            first |= {n: i for n in self._dear(stage) if n not in first}

    def _dear(self, stage: _Stage) -> list[Expr]:
        nodes = ir.topological(_exprs(stage))
        return [n for n in nodes if n.op in FUNCTIONS and self._is_of(stage, n)]

    def _is_of(self, stage: _Stage, node: Expr) -> bool:
        return self.places.over(node.extent) == stage.over

    def kernel(
        self, tier: Tier, domain: tuple[int, ...], stores: Sequence[tuple[Buffer, Expr]]
    ) -> Kernel:
        """The kernel of the stages."""
        exprs = [e for stage in self.stages for e in _exprs(stage)]
        own = {leaf for s in self.stages for r in s.reductions for _, leaf in r.results}
        own |= {leaf for s in self.stages for leaf, _ in s.held}
        every = [(pair, i) for i, stage in enumerate(self.stages) for pair in stage.sums]
        return Kernel(
            "bundle",
            self.state.fresh(f"{self.state.prefix}_bundle"),
            domain,
            ordered(self.places.every),
            self.state.inputs_of(exprs, own),
            tuple(stores),
            tuple(tuple(stage.reductions) for stage in self.stages),
            sums=tuple(pair for pair, _ in every),
            columns=ordered(self.places.row),
            marks=self._marks(),
            tier=tier,
            held=tuple(tuple(stage.held) for stage in self.stages),
            placed=tuple(at for _, at in every),
            over=tuple(ordered(stage.over) for stage in self.stages),
        )

    def _marks(self) -> tuple[Mark, ...]:
        def image(node: Expr) -> Expr:
            if node.op == "reduce" and node in self.leaves:
                return self.leaves[node]
            return ir.rebuild(node, tuple(ir.substitute(node.args, self.leaves)))

        return tuple(replace(m, node=image(m.node)) for m in self.state.marks)

    def _settled(self, expr: Expr, over: Extent) -> Expr:
        """A value over leaves, where what varies along less than it goes through is found apart."""
        (expr,) = ir.rewrite(ir.substitute([expr], self.leaves), self._with_numbers)
        apart: dict[Expr, Expr] = {}
        waiting, seen = [expr], set[Expr]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            less = self.places.over(node.extent)
            if node.op in arity.ARITY and less < over and self._is_found_apart(node, less):
                if node not in self.leaves:
                    self._hold(node, self._settled(node, less), less)
                apart[node] = self.leaves[node]
            else:
                waiting.extend(node.args)
        return ir.substitute([expr], apart)[0]

    def _is_found_apart(self, node: Expr, over: Extent) -> bool:
        """Whether a value that is alike for some of the elements gone through is found before: of
        what varies all along rows, what is dear, and what windows have one of, where those take one
        element of a row.
        """
        if over != self.places.row:
            return True
        if any(n.op in FUNCTIONS for n in ir.topological([node])):
            return True
        return not self.places.inner and node.extent != over

    def _hold(self, node: Expr, value: Expr, over: Extent) -> None:
        leaf = self.leaves[node] = self._leaf(node)
        at = self._place([value], over)
        self.stages[at].held.append((leaf, value))
        self.known_at[leaf] = at

    def _leaf(self, node: Expr) -> Expr:
        name = f"held_{self.names[node]}" if node in self.names else "held"
        return ir.tensor(self.state.fresh(name), node.extent, 0, node.kind)

    def _place(self, exprs: Sequence[Expr], over: Extent) -> int:
        """The first stage that goes through `over` when all that expressions read is known."""
        read = ir.inputs(exprs)
        ready = max((self.known_at[leaf] + 1 for leaf in read if leaf in self.known_at), default=0)
        for at in range(ready, len(self.stages)):
            if self.stages[at].over == over:
                return at
        self.stages.append(_Stage(over))
        return len(self.stages) - 1

    def _with_numbers(self, node: Expr) -> Expr:
        """Places along some of a window's groups as numbers that lie nowhere."""
        if node.op != "position" or frozenset(ir.axes_of(node)) == self.window:
            return node
        if node not in self.numbers:
            leaf = ir.tensor(self.state.fresh("position_along"), node.extent, 0)
            buffer = Buffer(
                ir.name_of(leaf), self.state.sum_dtype, ordered(node.extent), "position"
            )
            self.numbers[node], self.state.buffers[leaf] = leaf, buffer
        return self.numbers[node]


def _of(reduction: Reduction) -> list[Expr]:
    """What is reduced, and where it is picked."""
    return [e for e in (reduction.value, reduction.index) if e is not None]


def _mapped(reduction: Reduction, new: Callable[[Expr], Expr]) -> Reduction:
    index = None if reduction.index is None else new(reduction.index)
    return replace(reduction, value=new(reduction.value), index=index)


def _exprs(stage: _Stage) -> list[Expr]:
    reductions = [*stage.reductions, *(r for r, _ in stage.sums)]
    return [e for r in reductions for e in _of(r)] + [value for _, value in stage.held]


def _substitute(stage: _Stage, known: Mapping[Expr, Expr]) -> None:
    def new(expr: Expr) -> Expr:
        return ir.substitute([expr], known)[0]

    stage.reductions = [_mapped(r, new) for r in stage.reductions]
    stage.sums = [(_mapped(r, new), buffer) for r, buffer in stage.sums]
    stage.held = [(leaf, new(value)) for leaf, value in stage.held]
