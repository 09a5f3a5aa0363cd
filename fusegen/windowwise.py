"""Window kernels: what varies within pooling windows, what is reduced over them, and the sums over
all of them, in one kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fusegen import arity, ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.kernel import Kernel
from fusegen.staging import Pass, Sums, finalise, left_by_extent, reduces_below, staged


def windowwise_kernel(state: Pass, window: Extent) -> None:
    """One kernel for all that varies within windows or is reduced over them, and for the sums over
    all windows, which leave partials while their terms are at hand.

    What goes on from there in another way, such as a sum over one of a window's axes, is written
    out window by window for the kernels after.
    """
    state.resolve(windows_first(state.pending.values(), window))
    chosen = [n for n, e in state.pending.items() if is_local(e, window)]
    own = {n: state.pending.pop(n) for n in chosen}
    if not own and not passed_on(state, window):
        return  # all of it waits for other reductions
    nodes = ir.topological([*own.values(), *passed_on(state, window)])
    domain = frozenset[int]().union(*(n.extent for n in nodes)) - window
    totals, known = left_by_extent(state, _sums_of_windows(state, domain, window))
    state.resolve(known)
    _window_kernel(state, window, domain, own, totals, passed_on(state, window))


def sums_first(state: Pass, window: Extent, nodes: Sequence[Expr]) -> None:
    """Kernels for sums over all windows that others wait for, such as a norm's statistics before
    its result is pooled: one for each domain, and way to go through it.

    Sums that keep the innermost group and others as well are left to other kernels, with what each
    window gives to them in memory.
    """
    batches: dict[tuple[Extent, Extent], list[Expr]] = {}
    passed: dict[Extent, list[Expr]] = {}
    for node in nodes:
        domain = node.args[0].extent
        last = frozenset({max(domain)})
        if last < node.extent:
            inside = (r for r in reduces_below(node.args) if ir.reduction(r)[1] == window)
            passed.setdefault(domain, []).extend(inside)
        else:
            batches.setdefault((domain, last & node.extent), []).append(node)
    for (domain, _), members in batches.items():
        totals, known = left_by_extent(state, members)
        state.resolve(known)
        _window_kernel(state, window, domain, {}, totals, ())
    for domain, found in passed.items():
        _window_kernel(state, window, domain, {}, {}, tuple(dict.fromkeys(found)))


def _window_kernel(
    state: Pass,
    window: Extent,
    domain: Extent,
    own: Mapping[str, Expr],
    totals: Mapping[tuple[int, ...], Sums],
    passed: Sequence[Expr],
) -> None:
    """A kernel for results, sums over all windows and what is passed on; and the sums' end."""
    columns = ordered(domain)[-1:] if any(max(domain) in extent for extent in totals) else ()
    (kept,) = {extent[:-1] for extent in totals} if columns else {()}
    sums = [pair for members in totals.values() for pair in members]
    roots = [*own.values(), *(reduction.value for reduction, _ in sums), *passed]
    stages, leaf_of, finals = staged(state, roots)
    stores = [(state.output(n, e), e) for n, e in zip(own, finals, strict=False)]
    terms = finals[len(own) : len(own) + len(sums)]
    sums = [(replace(r, value=term), b) for (r, b), term in zip(sums, terms, strict=True)]
    known = {}
    for node, final in zip(passed, finals[len(own) + len(sums) :], strict=True):
        leaf, known[node], written = leaf_for(state, node, final)
        state.buffers[leaf] = state.scratch(leaf)
        stores.append((state.buffers[leaf], written))
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
            sums=tuple(sums),
            kept=kept,
            columns=columns,
            marks=state.marks_over(leaf_of),
        )
    )
    state.resolve(known)
    for extent, members in totals.items():
        finalise(state, extent, members, columns)


def is_local(expr: Expr, window: Extent) -> bool:
    """Whether something below varies within windows, and nothing is reduced but over them."""
    nodes = ir.topological([expr])
    reduces = [n for n in nodes if n.op == "reduce"]
    is_windowed = any(n.extent & window for n in nodes)
    return is_windowed and all(ir.reduction(r)[1] == window for r in reduces)


def passed_on(state: Pass, window: Extent) -> list[Expr]:
    """What the kernels after want of this one: what is reduced over windows, and terms within; of
    windows that overlap, those of reductions alone, since others can be had again.
    """
    nodes = ir.topological(state.pending.values())
    local = {n for n in nodes if is_local(n, window)}
    reduced = [n for n in nodes if n in local and n.op == "reduce" and not n.extent & window]
    terms = dict.fromkeys(
        arg
        for node in nodes
        if node not in local and (node.op == "reduce" or not state.is_sliding)
        for arg in node.args
        if arg in local and arg.extent & window and _has_inputs(arg)
    )
    return [*reduced, *terms]


def _has_inputs(expr: Expr) -> bool:
    """Whether it depends on tensors; where it does not, any kernel can compute it again."""
    return expr.kind != "truth" or bool(ir.inputs([expr]))


def leaf_for(state: Pass, node: Expr, final: Expr) -> tuple[Expr, Expr, Expr]:
    """A leaf for what is passed on through memory, what stands for the node then, and what to
    write. A condition goes as a number.
    """
    if node.op == "reduce":
        return final, final, final
    leaf = ir.tensor(state.fresh("terms"), node.extent, 0)
    if node.kind != "truth":
        return leaf, leaf, final
    return leaf, ir.primitive("ne", leaf, 0.0), ir.primitive("where", final, 1.0, 0.0)


def _sums_of_windows(state: Pass, domain: Extent, window: Extent) -> list[Expr]:
    """The sums over all windows, with a column for each index of the innermost group, and perhaps
    of the outermost ones; or else, those along it.
    """

    def is_one(node: Expr) -> bool:
        kind, _ = ir.reduction(node)
        inside = reduces_below(node.args)
        is_whole = node.args[0].extent == domain
        return kind == "sum" and is_whole and all(ir.reduction(r)[1] == window for r in inside)

    found = [r for r in reduces_below(state.pending.values()) if is_one(r)]
    first = ordered(domain)
    for depth in range(len(domain)):
        by_column = [r for r in found if r.extent == {*first[:depth], first[-1]}]
        if by_column:
            return by_column
    return [r for r in found if max(domain) not in r.extent]


def awaited(state: Pass, window: Extent) -> list[Expr]:
    """The reductions beyond windows that what is computed of elements of windows waits for, as far
    as they are ready to be taken.
    """

    def is_beyond(node: Expr) -> bool:
        return ir.reduction(node)[1] != window and not node.extent & window

    of_elements: dict[Expr, None] = {}  # in a fixed order
    for node in ir.topological(state.pending.values()):
        is_read = node.op == "input" and bool(node.extent & window)
        is_inside = bool(node.extent & window) or node.op == "reduce"
        if is_read or (is_inside and any(a in of_elements for a in node.args)):
            of_elements[node] = None
    pooled = [n for n in of_elements if n.op != "reduce" or ir.reduction(n)[1] == window]
    wait = reduces_below(pooled)
    ready = [r for r in wait if is_beyond(r) and not any(map(is_beyond, reduces_below(r.args)))]
    # A mean and a variance of the same are found at once, whoever waits for which of them.
    moments = {(r.args, ir.reduction(r)[1]) for r in ready if ir.reduction(r)[0] in arity.MOMENTS}
    every = [
        r for r in reduces_below(state.pending.values()) if ir.reduction(r)[0] in arity.MOMENTS
    ]
    both = [r for r in every if (r.args, ir.reduction(r)[1]) in moments]
    return [*dict.fromkeys([*ready, *both])]


def is_windowed(expr: Expr, window: Extent) -> bool:
    """Whether something below varies within windows."""
    return any(n.extent & window for n in ir.topological([expr]))


def windows_first(exprs: Iterable[Expr], window: Extent) -> dict[Expr, Expr]:
    """What a window's kernel can do of a reduction, moved inside it.

    A sum or a mean over more than whole windows has the window's own as its inner one, and a
    variance is the mean of the windows' own and the variance of their means. A pick acts index by
    index, so it reaches through what has to wait for other reductions.
    """
    size = ir.count(window)

    def mean(value: Expr) -> Expr:
        return ir.reduce_sum(value, window) / size

    def reach(value: Expr, index: Expr) -> Expr:
        waits = any(ir.reduction(r)[1] != window for r in reduces_below([value]))
        if not value.extent & window or not waits or value.op not in arity.ARITY:
            return ir.reduce("pick", window, value, index)
        return ir.rebuild(value, tuple(reach(a, index) for a in value.args))

    def rule(node: Expr) -> Expr:
        kind, axes = ir.reduction(node) if node.op == "reduce" else ("", frozenset())
        if kind and node.args[0].op == "once":
            return node
        if kind == "sum" and axes > window:
            return ir.reduce_sum(ir.reduce_sum(node.args[0], window), axes - window)
        if kind == "mean" and axes > window:
            return ir.reduce("mean", axes - window, mean(node.args[0]))
        if kind == "variance" and axes > window:
            value, outside = node.args[0], axes - window
            off = value - mean(value)
            within = ir.reduce_sum(ir.reduce_sum(off * off, window), outside)
            return within / ir.count(axes) + ir.reduce("variance", outside, mean(value))
        return reach(*node.args) if kind == "pick" else node

    reduces = reduces_below(exprs)
    return dict(zip(reduces, ir.rewrite(reduces, rule), strict=True))
