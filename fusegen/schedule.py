"""From an expression graph to kernels: what is computed together, in which order, and what passes
between.

The axes are first collapsed into groups that every tensor and reduction treats alike, outermost
first in memory, so that a kernel knows neither rank nor sizes. Then each reduction finds its place:
in a `row`, `column` or `window` kernel, where its result is used again at every element; or at the
end of an `inner` or `outer` kernel, which passes once over the elements, writes what is
elementwise, and leaves partial sums for a small `finalise`. Whatever fits nowhere is computed level
by level through scratch memory: correct for every graph, and never with atomics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusegen import ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent, Graph
from fusegen.kernel import Buffer, Family, Kernel, Reduction
from fusegen.lower import Mark, remarked


@dataclass
class _Pass:
    """The state of scheduling one graph."""

    dtypes: Mapping[str, str]
    sum_dtype: str
    pending: dict[str, Expr]
    buffers: dict[Expr, Buffer]
    marks: tuple[Mark, ...]
    kernels: list[Kernel] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    prefix: str = ""

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

    def output(self, name: str, expr: Expr) -> Buffer:
        return Buffer(name, self.dtypes[name], ordered(expr.extent), "output")


def schedule(
    graph: Graph,
    dtypes: Mapping[str, str],
    sum_dtype: str,
    marks: Iterable[Mark] = (),
    *,
    prefix: str,
    allow_fused: bool = True,
) -> tuple[Kernel, ...]:
    """The kernels that compute a collapsed graph's outputs, in launch order.

    dtypes names each input's and output's element type; sums and statistics pass through memory as
    sum_dtype. With allow_fused False, reductions that elements use again take a pass each, over
    many blocks: for few, very long rows.
    """
    ir.verify(graph)
    leaves = {
        leaf: Buffer(ir.name_of(leaf), dtypes[ir.name_of(leaf)], ordered(leaf.extent), "input")
        for leaf in graph.inputs
    }
    outputs = dict(graph.outputs)
    marks = tuple(marks)
    nodes = [*outputs.values(), *(m.node for m in marks)]
    new = dict(zip(nodes, _means_as_sums(nodes), strict=True))
    outputs = {name: new[expr] for name, expr in outputs.items()}
    state = _Pass(dtypes, sum_dtype, outputs, leaves, remarked(marks, new), prefix=prefix)
    state.taken |= set(dtypes)
    if any(g < 0 for node in ir.topological(outputs.values()) for g in node.extent):
        _window_kernel(state)
    elif allow_fused:
        _axis_kernel(state)
    while state.pending:
        _level(state)
    return tuple(state.kernels)


def _means_as_sums(roots: list[Expr]) -> list[Expr]:
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


def _reduces(exprs: Iterable[Expr]) -> list[Expr]:
    return [n for n in ir.topological(exprs) if n.op == "reduce"]


def _gather(state: _Pass, nodes: Sequence[Expr]) -> tuple[tuple[Reduction, ...], dict[Expr, Expr]]:
    """Reductions for ready reduce nodes, those over one value joined, and the leaf for each
    node.
    """
    reductions: list[Reduction] = []
    known: dict[Expr, Expr] = {}
    moments: dict[tuple[Expr, Extent], list[tuple[str, Expr]]] = {}
    maxima: dict[Expr, list[tuple[str, Expr]]] = {}
    for node in nodes:
        kind, axes = ir.reduction(node)
        leaf = ir.tensor(state.fresh(_result_stem(kind, node)), node.extent, 0, node.kind)
        known[node] = leaf
        if kind in ("mean", "variance"):
            moments.setdefault((node.args[0], axes), []).append((kind, leaf))
        elif kind in ("max", "argmax"):
            maxima.setdefault(node.args[0], []).append((kind, leaf))
        elif kind == "pick":
            reductions.append(Reduction("pick", node.args[0], (("pick", leaf),), node.args[1]))
        else:
            reductions.append(Reduction("sum", node.args[0], (("sum", leaf),)))
    reductions += [Reduction("moments", value, tuple(r)) for (value, _), r in moments.items()]
    reductions += [Reduction("max", value, tuple(r)) for value, r in maxima.items()]
    return tuple(reductions), known


def _result_stem(kind: str, node: Expr) -> str:
    value = node.args[0]
    stems = {"sum": "total", "pick": "winner", "argmax": "winner_index", "max": "maximum"}
    return (
        f"picked_{ir.name_of(value)}"
        if kind == "pick" and value.op == "input"
        else stems.get(kind, kind)
    )


def _staged(
    state: _Pass, roots: Sequence[Expr]
) -> tuple[list[tuple[Reduction, ...]], dict[Expr, Expr], list[Expr]]:
    """Every reduction below the roots, level by level; the leaf for each; and the roots over
    those leaves.
    """
    stages: list[tuple[Reduction, ...]] = []
    leaf_of: dict[Expr, Expr] = {}
    while missing := [r for r in _reduces(roots) if r not in leaf_of]:
        ready = [r for r in missing if all(below in leaf_of for below in _reduces(r.args))]
        images = [ir.rebuild(r, tuple(ir.substitute(r.args, leaf_of))) for r in ready]
        stage, known = _gather(state, images)
        stages.append(stage)
        leaf_of |= {r: known[image] for r, image in zip(ready, images, strict=True)}
    return stages, leaf_of, ir.substitute(roots, leaf_of)


def _axis_kernel(state: _Pass) -> None:
    """One kernel for every full-size output whose reductions share their axes: a row, or a
    column of strided rows.
    """
    domain = frozenset[int]().union(*(e.extent for e in ir.topological(state.pending.values())))
    full = [n for n, e in state.pending.items() if e.extent == domain and _reduces([e])]
    full = [n for n, e in state.pending.items() if e.extent == domain] if full else []
    axes_used = {ir.reduction(r)[1] for r in _reduces([state.pending[n] for n in full])}
    if len(axes_used) != 1:
        return
    (axes,) = axes_used
    groups = sorted(axes)
    if groups != list(range(groups[0], groups[-1] + 1)):
        return
    rest = domain - axes

    def belongs(expr: Expr) -> bool:
        inside = _reduces([expr])
        return expr.extent == rest and all(
            ir.reduction(r)[1] == axes and r.extent == rest for r in inside
        )

    chosen = [n for n in state.pending if n in full or belongs(state.pending[n])]
    if any(r.extent != rest for r in _reduces([state.pending[n] for n in chosen])):
        return
    stages, leaf_of, finals = _staged(state, [state.pending[n] for n in chosen])
    others = {n: e for n, e in state.pending.items() if n not in chosen}
    needed = [r for r in leaf_of if r in set(_reduces(others.values()))]
    stores = [(state.output(n, e), e) for n, e in zip(chosen, finals, strict=True)]
    for node in needed:
        leaf = leaf_of[node]
        state.buffers[leaf] = state.scratch(leaf)
        stores.append((state.buffers[leaf], leaf))
    exprs = [r.value for stage in stages for r in stage] + finals
    family: Family = "row" if groups[-1] == max(domain) else "column"
    state.kernels.append(
        Kernel(
            family,
            state.fresh(f"{state.prefix}_{family}"),
            ordered(rest),
            ordered(axes),
            state.inputs_of(exprs, leaf_of.values()),
            tuple(stores),
            tuple(stages),
            marks=state.marks_over(leaf_of),
        )
    )
    state.pending = others
    state.resolve({node: leaf_of[node] for node in needed})


def _window_kernel(state: _Pass) -> None:
    """One kernel, a thread a window, for everything that varies within windows or is reduced
    over them.
    """
    window = frozenset(
        g for node in ir.topological(state.pending.values()) for g in node.extent if g < 0
    )

    def uses_window(expr: Expr) -> bool:
        return any(g in node.extent for node in ir.topological([expr]) for g in window)

    inner = [r for r in _reduces(state.pending.values()) if ir.reduction(r)[1] == window]
    chosen = [
        n
        for n, e in state.pending.items()
        if uses_window(e) and all(ir.reduction(r)[1] == window for r in _reduces([e]))
    ]
    others = {n: e for n, e in state.pending.items() if n not in chosen}
    needed = [r for r in inner if r in set(_reduces(others.values())) and not _reduces(r.args)]
    roots = [state.pending[n] for n in chosen] + needed
    domain = frozenset[int]().union(*(e.extent for e in ir.topological(roots))) - window
    stages, leaf_of, finals = _staged(state, roots)
    stores = [(state.output(n, e), e) for n, e in zip(chosen, finals, strict=False)]
    for node in needed:
        leaf = leaf_of[node]
        state.buffers[leaf] = state.scratch(leaf)
        stores.append((state.buffers[leaf], leaf))
    exprs = [
        e for stage in stages for r in stage for e in (r.value, r.index) if e is not None
    ] + finals
    state.kernels.append(
        Kernel(
            "window",
            state.fresh(f"{state.prefix}_window"),
            ordered(domain),
            ordered(window),
            state.inputs_of(exprs, leaf_of.values()),
            tuple(stores),
            tuple(stages),
            marks=state.marks_over(leaf_of),
        )
    )
    state.pending = others
    state.resolve({node: leaf_of[node] for node in needed})


def _level(state: _Pass) -> None:
    """One level of the general way: every reduction that is ready, with the elementwise outputs
    riding along.
    """
    ready = [n for n in _reduces(state.pending.values()) if not _reduces(n.args)]
    elementwise = {n: e for n, e in state.pending.items() if not _reduces([e])}
    batches: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Expr]] = {}
    for node in ready:
        _, axes = ir.reduction(node)
        domain = ordered(node.args[0].extent)
        is_inner = domain[-1] in axes
        kept = () if is_inner else tuple(g for g in domain[:-1] if g not in axes)
        batches.setdefault(("inner" if is_inner else "outer", domain, kept), []).append(node)
    for (family, domain, kept), nodes in batches.items():
        riders = {n: e for n, e in elementwise.items() if ordered(e.extent) == domain}
        for name in riders:
            del elementwise[name], state.pending[name]
        _reducing_kernel(state, family, domain, kept, nodes, riders)
    by_domain: dict[tuple[int, ...], dict[str, Expr]] = {}
    for name, expr in elementwise.items():
        del state.pending[name]
        by_domain.setdefault(ordered(expr.extent), {})[name] = expr
    for domain, exprs in by_domain.items():
        stores = tuple((state.output(n, e), e) for n, e in exprs.items())
        name = state.fresh(f"{state.prefix}_pointwise")
        read = state.inputs_of(exprs.values())
        state.kernels.append(Kernel("pointwise", name, domain, (), read, stores, marks=state.marks))


def _reducing_kernel(
    state: _Pass,
    family: str,
    domain: tuple[int, ...],
    kept: tuple[int, ...],
    nodes: Sequence[Expr],
    riders: Mapping[str, Expr],
) -> None:
    """A pass that leaves partials, then a finalise for each extent among the results."""
    by_extent: dict[tuple[int, ...], list[Expr]] = {}
    for node in nodes:
        by_extent.setdefault(ordered(node.extent), []).append(node)
    sums: list[tuple[Reduction, Buffer]] = []
    finals: list[tuple[tuple[int, ...], tuple[tuple[Reduction, Buffer], ...]]] = []
    all_known: dict[Expr, Expr] = {}
    for extent, members in by_extent.items():
        reductions, known = _gather(state, members)
        all_known |= known
        mine = tuple(
            (
                r,
                Buffer(
                    f"{ir.name_of(r.results[0][1])}_partials", state.sum_dtype, extent, "scratch"
                ),
            )
            for r in reductions
        )
        sums += mine
        finals.append((extent, mine))
    exprs = [r.value for r, _ in sums] + list(riders.values())
    state.kernels.append(
        Kernel(
            "inner" if family == "inner" else "outer",
            state.fresh(f"{state.prefix}_{family}"),
            domain,
            tuple(g for g in domain if g not in kept),
            state.inputs_of(exprs),
            tuple((state.output(n, e), e) for n, e in riders.items()),
            sums=tuple(sums),
            kept=kept,
            by_column=family == "outer",
            marks=state.marks,
        )
    )
    state.resolve(all_known)
    for extent, mine in finals:
        _finalise(state, extent, mine, by_column=family == "outer")


def _finalise(
    state: _Pass,
    extent: tuple[int, ...],
    sums: tuple[tuple[Reduction, Buffer], ...],
    *,
    by_column: bool,
) -> None:
    """Add partials up in a fixed order, and finish the outputs that need nothing else; other
    results go to scratch.
    """
    leaves = {leaf for r, _ in sums for _, leaf in r.results}

    def is_finished(expr: Expr) -> bool:
        own = ordered(expr.extent) == extent and not _reduces([expr])
        return own and all(i in leaves or i in state.buffers for i in ir.inputs([expr]))

    done = {
        n: e for n, e in state.pending.items() if is_finished(e) and leaves & set(ir.inputs([e]))
    }
    for name in done:
        del state.pending[name]
    stores = [(state.output(n, e), e) for n, e in done.items()]
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
            by_column=by_column,
            marks=state.marks,
        )
    )
