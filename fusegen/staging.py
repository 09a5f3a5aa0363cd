"""Staging: which reductions are ready, and the leaves that stand for them once they are computed.

The state of scheduling one graph is here too: what is still to be computed, and where what has been
computed lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusegen import arity, ir
from fusegen.grouping import ordered
from fusegen.hoisting import shared
from fusegen.ir import Expr, Extent
from fusegen.kernel import Buffer, Gaps, Kernel, Reduction
from fusegen.lower import Mark, remarked
from fusegen.ways import Strips


@dataclass
class Pass:
    """The state of scheduling one graph."""

    dtypes: Mapping[str, str]
    sum_dtype: str
    pending: dict[str, Expr]
    buffers: dict[Expr, Buffer]
    marks: tuple[Mark, ...]
    kernels: list[Kernel] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    prefix: str = ""
    is_sliding: bool = False  # whether windows are no tiles
    is_exact: bool = False  # whether a value is the same to the last bit in every kernel
    has_columns: bool = False  # whether packs are whole down columns
    short: int | None = None  # the innermost group, where its rows are to go side by side
    strips: Strips | None = None
    underway: tuple[Expr, ...] = ()  # reductions that kernels to come next are made for
    passing: dict[str, Buffer] = field(default_factory=dict)  # pending, but no output
    gaps: Mapping[str, Gaps] = field(default_factory=dict)  # of the tensors that have some

    def fresh(self, stem: str) -> str:
        """stem, or stem_2, stem_3 ...: a name not used before in this graph."""
        name, n = stem, 1
        while name in self.taken:
            n += 1
            name = f"{stem}_{n}"
        self.taken.add(name)
        return name

    def resolve(self, known: Mapping[Expr, Expr]) -> None:
        """Put leaves in the place of reductions that have been computed."""
        names = list(self.pending)
        exprs = ir.substitute([self.pending[n] for n in names], known)
        self.pending = dict(zip(names, exprs, strict=True))
        self.marks = self.marks_over(known)

    def read_back(self, stores: Iterable[tuple[Buffer, Expr]]) -> None:
        """Put what a kernel has written in the place of how it was computed, where fewer tensors
        as large are read then.
        """
        for buffer, expr in stores:
            is_exact = buffer.dtype == self.sum_dtype or self._is_of_type(expr, buffer.dtype)
            if not is_exact or expr.op in ("input", "const"):
                continue
            leaf = ir.tensor(self.fresh(f"written_{buffer.name}"), expr.extent, 0)
            after = ir.substitute(self.pending.values(), {expr: leaf})
            read = (ir.inputs(exprs) for exprs in (self.pending.values(), after))
            before, then = ([i for i in leaves if i.extent == expr.extent] for leaves in read)
            if len(then) < len(before):
                self.buffers[leaf] = buffer
                self.resolve({expr: leaf})

    def _is_of_type(self, expr: Expr, dtype: str) -> bool:
        """Whether a value is one that was read from memory in this type, or nothing."""
        if expr.op == "where":
            return all(self._is_of_type(side, dtype) for side in expr.args[1:])
        is_read = expr in self.buffers and self.buffers[expr].dtype == dtype
        return is_read or (expr.op == "const" and expr.attrs[0] == 0)

    def marks_over(self, known: Mapping[Expr, Expr]) -> tuple[Mark, ...]:
        """The marks where reductions have become leaves."""
        nodes = [m.node for m in self.marks]
        return remarked(self.marks, dict(zip(nodes, ir.substitute(nodes, known), strict=True)))

    def inputs_of(
        self, exprs: Iterable[Expr], own: Iterable[Expr] = ()
    ) -> tuple[tuple[Expr, Buffer], ...]:
        """What a kernel reads from memory: not the results of its own reductions."""
        read = [i for i in ir.inputs(exprs) if i not in set(own)]
        return tuple((leaf, self.buffers[leaf]) for leaf in read)

    def scratch(self, leaf: Expr) -> Buffer:
        """Memory for a reduction's result between two kernels."""
        name = f"{ir.name_of(leaf)}_scratch"
        return Buffer(name, self.sum_dtype, ordered(leaf.extent), "scratch")

    def scratches(self, nodes: Iterable[Expr]) -> dict[Expr, Expr]:
        """Leaves for what one kernel computes for others."""
        leaves = {node: ir.tensor(self.fresh("common"), node.extent, 0) for node in nodes}
        self.buffers |= {leaf: self.scratch(leaf) for leaf in leaves.values()}
        return leaves

    def find_ahead(self, nodes: Iterable[Expr]) -> dict[Expr, Expr]:
        """Leaves for those of some nodes whose reductions are known, put in their place."""
        known = [n for n in nodes if all(i in self.buffers for i in ir.inputs([n]))]
        leaves = self.scratches(n for n in known if not reduces_below([n]))
        self.resolve(leaves)
        return leaves

    def output(self, name: str, expr: Expr) -> Buffer:
        if name in self.passing:
            return self.passing[name]
        gaps = self.gaps.get(name)
        return Buffer(name, self.dtypes[name], ordered(expr.extent), "output", gaps)

    def eased(self, exprs: Iterable[Expr], unknown: Collection[Expr], domain: Extent) -> list[Expr]:
        """Expressions of elements and what is still unknown of their rows, in an order of
        operations that takes fewer of them, and fewer values to wait; as they are, where the last
        bits matter.
        """
        if self.is_exact:
            return [*exprs]
        return ir.rewrite(ir.rewrite(exprs, _by_inverse_count), _ready_first(unknown, domain))


def _by_inverse_count(node: Expr) -> Expr:
    """A division by a count as a multiplication: the inverse is found once for all rows."""
    if node.op == "div" and node.args[1].op == "count":
        return node.args[0] * (1.0 / node.args[1])
    return node


def _ready_first(unknown: Collection[Expr], domain: Extent) -> Callable[[Expr], Expr]:
    """A rule for sums: of elements, those that need not wait for the unknown are added up before
    any that do, and so are carried as one.
    """
    waiting: dict[Expr, bool] = {}

    def waits(node: Expr) -> bool:
        if node not in waiting:
            waiting[node] = node in unknown or any(map(waits, node.args))
        return waiting[node]

    def parts(node: Expr) -> tuple[Expr, Expr] | None:
        """What is ready of a sum that waits, and the rest."""
        if node.op != "add" or not waits(node):
            return None
        ready = [a for a in node.args if not waits(a) and a.extent == domain]
        return (ready[0], node.args[node.args[0] is ready[0]]) if ready else None

    def rule(node: Expr) -> Expr:
        # Asked of each node, arguments first, so that no answer takes many others.
        if not waits(node) or node.op not in ("add", "sub"):
            return node
        a, b = node.args
        if (found := parts(a)) and not waits(b) and b.extent == domain:
            return ir.primitive("add", ir.primitive(node.op, found[0], b), found[1])
        if node.op == "add" and (found := parts(b)) and not waits(a) and a.extent == domain:
            return (a + found[0]) + found[1]
        return node

    return rule


def means_as_sums(roots: list[Expr]) -> list[Expr]:
    """A mean whose variance nobody asks for is a sum divided by its count."""
    nodes = ir.topological(roots)
    with_variance = {
        (n.args, n.attrs[1]) for n in nodes if n.op == "reduce" and n.attrs[0] == "variance"
    }

    def rule(node: Expr) -> Expr:
        is_mean = node.op == "reduce" and node.attrs[0] == "mean"
        if is_mean and (node.args, node.attrs[1]) not in with_variance:
            _, axes = ir.reduction(node)
            return ir.reduce_sum(node.args[0], axes) / ir.count(axes)
        return node

    return ir.rewrite(roots, rule)


def positions_as_numbers(state: Pass, roots: list[Expr]) -> list[Expr]:
    """Positions along whole groups as numbers that lie nowhere, whole ones where memory has what
    they meet; the first of the largest as the least of their positions, and what stands at one as a
    sum.
    """
    places: dict[tuple[Extent, arity.Kind], Expr] = {}

    def is_whole(index: Expr) -> bool:
        return index.op == "input" and index.kind == "index"

    whole = {n.args[0] for n in ir.topological(roots) if n.op == "eq" and is_whole(n.args[1])}

    def place(axes: Extent, kind: arity.Kind = "number") -> Expr:
        key = axes, kind
        if key not in places:
            places[key] = ir.tensor(state.fresh("position_along"), axes, 0, kind)
            dtype = "int32" if kind == "index" else state.sum_dtype
            name = ir.name_of(places[key])
            state.buffers[places[key]] = Buffer(name, dtype, ordered(axes), "position")
        return places[key]

    def rule(node: Expr) -> Expr:
        if node.op == "position" and min(ir.axes_of(node)) >= 0:
            return place(frozenset(ir.axes_of(node)), "index" if node in whole else "number")
        if node.op != "reduce" or min(ir.reduction(node)[1]) < 0:
            return node
        kind, axes = ir.reduction(node)
        value = node.args[0]
        if kind == "argmax":
            largest = ir.reduce("bound", axes, value)
            is_largest = (value >= largest) | ir.primitive("ne", value, value)
            candidates = ir.primitive("where", is_largest, -place(axes), -math.inf)
            return -ir.reduce("bound", axes, candidates)
        if kind == "pick":
            kind_of_place: arity.Kind = "index" if is_whole(node.args[1]) else "number"
            is_there = ir.primitive("eq", place(axes, kind_of_place), node.args[1])
            if value.kind != "truth":
                return ir.reduce_sum(ir.primitive("where", is_there, value, 0.0), axes)
            number = ir.primitive("where", is_there & value, ir.const(1.0), 0.0)
            return ir.primitive("ne", ir.reduce_sum(number, axes), 0.0)
        return node

    return ir.rewrite(roots, rule)


def reduces_below(exprs: Iterable[Expr]) -> list[Expr]:
    """The reduce nodes of some expressions, inner ones first."""
    return [n for n in ir.topological(exprs) if n.op == "reduce"]


def gather(state: Pass, nodes: Sequence[Expr]) -> tuple[tuple[Reduction, ...], dict[Expr, Expr]]:
    """Reductions for ready reduce nodes, those over one value joined, and the leaf for each
    node.
    """
    reductions: list[Reduction] = []
    known: dict[Expr, Expr] = {}
    moments: dict[tuple[Expr, Extent], list[tuple[str, Expr]]] = {}
    maxima: dict[tuple[Expr, Extent], list[tuple[str, Expr]]] = {}
    for node in nodes:
        kind, axes = ir.reduction(node)
        leaf = ir.tensor(state.fresh(_result_stem(kind, node)), node.extent, 0, node.kind)
        known[node] = leaf
        if kind in ("mean", "variance"):
            moments.setdefault((node.args[0], axes), []).append((kind, leaf))
        elif kind in (*arity.MAXIMA, "argmax"):
            maxima.setdefault((node.args[0], axes), []).append(
                ("max" if kind in arity.MAXIMA else kind, leaf)
            )
        elif kind == "pick":
            reductions.append(Reduction("pick", node.args[0], (("pick", leaf),), node.args[1]))
        else:
            reductions.append(Reduction("sum", node.args[0], (("sum", leaf),)))
    reductions += [Reduction("moments", value, tuple(r)) for (value, _), r in moments.items()]
    for (value, axes), results in maxima.items():
        is_window = max(axes) < 0
        reductions.append(Reduction("max" if is_window else "peak", value, tuple(results)))
    return tuple(reductions), known


def _result_stem(kind: str, node: Expr) -> str:
    value = node.args[0]
    stems = {"sum": "total", "pick": "winner", "argmax": "winner_index"}
    # Not maximum, which is a function of two, by which narrow arithmetic spells bounds.
    stems |= dict.fromkeys(arity.MAXIMA, "peak")
    return (
        f"picked_{ir.name_of(value)}"
        if kind == "pick" and value.op == "input"
        else stems.get(kind, kind)
    )


def staged(
    state: Pass, roots: Sequence[Expr]
) -> tuple[list[tuple[Reduction, ...]], dict[Expr, Expr], list[Expr]]:
    """Every reduction below the roots, level by level; the leaf for each; and the roots over
    those leaves.
    """
    stages: list[tuple[Reduction, ...]] = []
    leaf_of: dict[Expr, Expr] = {}
    while missing := [r for r in reduces_below(roots) if r not in leaf_of]:
        ready = [r for r in missing if all(below in leaf_of for below in reduces_below(r.args))]
        images = [ir.rebuild(r, tuple(ir.substitute(r.args, leaf_of))) for r in ready]
        stage, known = gather(state, images)
        stages.append(stage)
        leaf_of |= {r: known[image] for r, image in zip(ready, images, strict=True)}
    return stages, leaf_of, ir.substitute(roots, leaf_of)


def partials(
    state: Pass, members: Sequence[Expr], extent: tuple[int, ...]
) -> tuple[tuple[tuple[Reduction, Buffer], ...], dict[Expr, Expr]]:
    """The accumulations of some reduce nodes of one extent, with memory for their partials, and
    the leaf for each node.
    """
    reductions, known = gather(state, members)
    return tuple(
        (
            r,
            Buffer(f"{ir.name_of(r.results[0][1])}_partials", state.sum_dtype, extent, "scratch"),
        )
        for r in reductions
    ), known


Sums = tuple[tuple[Reduction, Buffer], ...]


def left_by_extent(
    state: Pass, nodes: Iterable[Expr], within: Extent = frozenset()
) -> tuple[dict[tuple[int, ...], Sums], dict[Expr, Expr]]:
    """The accumulations of some reduce nodes by the extent of their results, with memory for their
    partials, of which there are some `within` a result, and the leaf for each node.
    """
    by_extent: dict[tuple[int, ...], list[Expr]] = {}
    for node in nodes:
        by_extent.setdefault(ordered(node.extent), []).append(node)
    totals: dict[tuple[int, ...], Sums] = {}
    known: dict[Expr, Expr] = {}
    for extent, members in by_extent.items():
        totals[extent], found = partials(state, members, ordered(within.union(extent)))
        known |= found
    return totals, known


def finalise(
    state: Pass,
    extent: tuple[int, ...],
    sums: Sums,
    columns: tuple[int, ...],
) -> None:
    """Add partials up in a fixed order, and finish the outputs that need nothing else; other
    results go to scratch.
    """
    leaves = {leaf for r, _ in sums for _, leaf in r.results}

    def is_finished(expr: Expr) -> bool:
        own = ordered(expr.extent) == extent and not reduces_below([expr])
        if state.is_sliding and min(expr.extent, default=0) < 0:
            return False  # an element may lie in many windows, or in none
        return own and all(i in leaves or i in state.buffers for i in ir.inputs([expr]))

    done = {
        n: e for n, e in state.pending.items() if is_finished(e) and leaves & set(ir.inputs([e]))
    }
    for name in done:
        del state.pending[name]
    stores = [(state.output(n, e), e) for n, e in done.items()]
    ahead = shared(state.pending.values(), below=state.underway).get(extent, ())
    known = state.scratches(filter(is_finished, ahead))
    state.resolve({**{r: r for r in state.underway}, **known})
    stores += [(state.buffers[leaf], node) for node, leaf in known.items()]
    still_needed = set(ir.inputs(state.pending.values()))
    for leaf in sorted(leaves & still_needed, key=ir.name_of):
        state.buffers[leaf] = state.scratch(leaf)
        stores.append((state.buffers[leaf], leaf))
    state.kernels.append(
        Kernel(
            "finalise",
            state.fresh(f"{state.prefix}_finalise"),
            extent,
            (),
            state.inputs_of((expr for _, expr in stores), leaves),
            tuple(stores),
            sums=sums,
            columns=columns,
            marks=state.marks,
        )
    )
