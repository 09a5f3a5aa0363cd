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

from fusegen import ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent, Graph
from fusegen.kernel import Buffer, Family, Kernel, Reduction
from fusegen.lower import Mark, remarked
from fusegen.rowwise import rowwise_kernel
from fusegen.staging import Pass, finalise, means_as_sums, partials, reduces_below, staged
from fusegen.tiers import Tier


def schedule(
    graph: Graph,
    dtypes: Mapping[str, str],
    sum_dtype: str,
    marks: Iterable[Mark] = (),
    *,
    prefix: str,
    allow_fused: bool = True,
    tier: Tier | None = None,
) -> tuple[Kernel, ...]:
    """The kernels that compute a collapsed graph's outputs, in launch order.

    dtypes names each input's and output's element type; sums and statistics pass through memory as
    sum_dtype. With allow_fused False, reductions that elements use again take a pass each, over
    many blocks: for rows that are too long to be worked on as a whole. With a tier, rows are held
    on the chip.
    """
    ir.verify(graph)
    leaves = {
        leaf: Buffer(ir.name_of(leaf), dtypes[ir.name_of(leaf)], ordered(leaf.extent), "input")
        for leaf in graph.inputs
    }
    outputs = dict(graph.outputs)
    marks = tuple(marks)
    nodes = [*outputs.values(), *(m.node for m in marks)]
    new = dict(zip(nodes, means_as_sums(nodes), strict=True))
    outputs = {name: new[expr] for name, expr in outputs.items()}
    state = Pass(dtypes, sum_dtype, outputs, leaves, remarked(marks, new), prefix=prefix)
    state.taken |= set(dtypes)
    touched = [n.extent for n in ir.topological(outputs.values())]
    touched += [ir.reduction(r)[1] for r in reduces_below(outputs.values())]
    window = frozenset(g for extent in touched for g in extent if g < 0)
    if window:
        _window_kernel(state, window)
    elif allow_fused:
        rowwise_kernel(state, tier)
    while state.pending:
        _level(state)
    return tuple(state.kernels)


def _window_kernel(state: Pass, window: Extent) -> None:
    """One kernel, a thread a window, for all that varies within windows or is reduced over them.

    What goes on from there in another way, such as a sum over one of a window's axes, is written
    out window by window for the kernels after.
    """
    state.resolve(_windows_first(state.pending.values(), window))

    def axes_of(node: Expr) -> Extent:
        return ir.reduction(node)[1]

    def is_local(expr: Expr) -> bool:
        nodes = ir.topological([expr])
        reduces = [n for n in nodes if n.op == "reduce"]
        return any(n.extent & window for n in nodes) and all(axes_of(r) == window for r in reduces)

    chosen = [n for n, e in state.pending.items() if is_local(e)]
    others = {n: e for n, e in state.pending.items() if n not in chosen}
    below = reduces_below(others.values())
    needed = [r for r in below if axes_of(r) == window and is_local(r)]
    terms = dict.fromkeys(
        arg
        for node in ir.topological(others.values())
        for arg in node.args
        if is_local(arg) and arg.extent & window and not is_local(node)
    )
    roots = [state.pending[n] for n in chosen] + needed + [*terms]
    domain = frozenset[int]().union(*(e.extent for e in ir.topological(roots))) - window
    stages, leaf_of, finals = staged(state, roots)
    known = {node: leaf_of[node] for node in needed}
    known |= {t: ir.tensor(state.fresh("terms"), t.extent, 0) for t in terms}
    stores = [(state.output(n, e), e) for n, e in zip(chosen, finals, strict=False)]
    finished = [leaf_of[node] for node in needed] + finals[len(chosen) + len(needed) :]
    exprs = [
        e for stage in stages for r in stage for e in (r.value, r.index) if e is not None
    ] + finals
    read = state.inputs_of(exprs, leaf_of.values())
    for leaf, expr in zip(known.values(), finished, strict=True):
        state.buffers[leaf] = state.scratch(leaf)
        stores.append((state.buffers[leaf], expr))
    state.kernels.append(
        Kernel(
            "window",
            state.fresh(f"{state.prefix}_window"),
            ordered(domain),
            ordered(window),
            read,
            tuple(stores),
            tuple(stages),
            marks=state.marks_over(leaf_of),
        )
    )
    state.pending = others
    state.resolve(known)


def _windows_first(exprs: Iterable[Expr], window: Extent) -> dict[Expr, Expr]:
    """What a window's kernel can do of a reduction, moved inside it.

    A sum over more than whole windows has the window's own as its inner one. A pick acts index by
    index, so it reaches through what has to wait for other reductions.
    """

    def reach(value: Expr, index: Expr) -> Expr:
        waits = any(ir.reduction(r)[1] != window for r in reduces_below([value]))
        if not value.extent & window or not waits or value.op not in ir.ARITY:
            return ir.reduce("pick", window, value, index)
        return ir.rebuild(value, tuple(reach(a, index) for a in value.args))

    def rule(node: Expr) -> Expr:
        kind, axes = ir.reduction(node) if node.op == "reduce" else ("", frozenset())
        if kind == "sum" and axes > window:
            return ir.reduce_sum(ir.reduce_sum(node.args[0], window), axes - window)
        return reach(*node.args) if kind == "pick" else node

    reduces = reduces_below(exprs)
    return dict(zip(reduces, ir.rewrite(reduces, rule), strict=True))


def _level(state: Pass) -> None:
    """One level of the general way: every reduction that is ready, with the elementwise outputs
    riding along.
    """
    ready = [n for n in reduces_below(state.pending.values()) if not reduces_below(n.args)]
    elementwise = {n: e for n, e in state.pending.items() if not reduces_below([e])}
    batches: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Expr]] = {}
    for node in ready:
        _, axes = ir.reduction(node)
        domain = ordered(node.args[0].extent)
        is_inner = domain[-1] in axes
        kept = () if is_inner else tuple(g for g in domain[:-1] if g not in axes)
        batches.setdefault(("inner" if is_inner else "outer", domain, kept), []).append(node)
    for (family, domain, kept), nodes in batches.items():
        is_dense = all(g >= 0 for g in domain)
        riders = {n: e for n, e in elementwise.items() if is_dense and ordered(e.extent) == domain}
        for name in riders:
            del elementwise[name], state.pending[name]
        _reducing_kernel(state, family, domain, kept, nodes, riders)
    by_domain: dict[tuple[int, ...], dict[str, Expr]] = {}
    for name, expr in elementwise.items():
        del state.pending[name]
        by_domain.setdefault(ordered(expr.extent), {})[name] = expr
    for domain, exprs in by_domain.items():
        stores = tuple((state.output(n, e), e) for n, e in exprs.items())
        within = tuple(g for g in domain if g < 0)
        outside = tuple(g for g in domain if g >= 0)
        kind: Family = "window" if within else "pointwise"
        name = state.fresh(f"{state.prefix}_{kind}")
        read = state.inputs_of(exprs.values())
        state.kernels.append(Kernel(kind, name, outside, within, read, stores, marks=state.marks))


def _reducing_kernel(
    state: Pass,
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
        mine, known = partials(state, members, extent)
        all_known |= known
        sums += mine
        finals.append((extent, mine))
    exprs = [r.value for r, _ in sums] + list(riders.values())
    columns = domain[-1:] if family == "outer" else ()
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
            columns=columns,
            marks=state.marks,
        )
    )
    state.resolve(all_known)
    for extent, mine in finals:
        finalise(state, extent, mine, columns)
