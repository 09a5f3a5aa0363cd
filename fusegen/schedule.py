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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen import ir
from fusegen.autodiff import NO_SHARE, without_ends_of_gradients
from fusegen.bundlewise import bundlewise_kernel
from fusegen.downcolumns import kept_down_columns
from fusegen.flatwise import take_flat
from fusegen.grouping import ordered
from fusegen.hoisting import shared
from fusegen.ir import Expr, Extent, Graph
from fusegen.kernel import Buffer, Family, Gaps, Kernel, input_buffers
from fusegen.lower import Mark, remarked
from fusegen.rowaxes import domain_of, reduces_at_once
from fusegen.rowwise import rowwise_kernel
from fusegen.selecting import read_at_places
from fusegen.sharing import apart, shares_and_own, without_factors
from fusegen.slidewise import slidewise_kernels
from fusegen.spreading import put_off_spread
from fusegen.staging import (
    Pass,
    finalise,
    left_by_extent,
    means_as_sums,
    positions_as_numbers,
    reduces_below,
)
from fusegen.stripwise import part_columns, part_runs, take_strips
from fusegen.target import FUNCTIONS
from fusegen.tiers import Tier
from fusegen.verification import verify
from fusegen.ways import Way, way_of
from fusegen.windowwise import (
    awaited,
    is_windowed,
    sums_first,
    windows_first,
    windowwise_kernel,
)

# Families whose blocks can start with the last elements.
_TURNING = ("pointwise", "inner", "outer", "column", "window", "slide", "cover")


@dataclass(frozen=True)
class HeldRows:
    """Rows that are held on the chip: how, along which groups, and those of all rows together."""

    tier: Tier
    axes: Extent
    domain: Extent


def schedule(
    graph: Graph,
    dtypes: Mapping[str, str],
    sum_dtype: str,
    marks: Iterable[Mark] = (),
    *,
    prefix: str,
    in_cache: Sequence[str],
    held: Sequence[HeldRows] = (),
    is_sliding: bool = False,
    pooled: Sequence[int] = (),
    is_exact: bool = False,
    has_strips: bool = False,
    has_columns: bool = False,
    gaps: Mapping[str, Gaps] | None = None,
    reads_places: bool = False,
    has_packs: bool = False,
    short: int | None = None,
) -> tuple[Kernel, ...]:
    """The kernels that compute a collapsed graph's outputs, in launch order.

    dtypes names each input's and output's element type; sums and statistics pass through memory as
    sum_dtype. Where rows are held on the chip, of elements and of what is left of those, no others
    have a kernel; elsewhere those of the families in_cache are worked on as a whole, and what is
    dear of them is held in cache, but reductions of others that elements use again take a pass
    each, over many blocks. is_sliding says that windows are no tiles, is_exact that a value must be
    the same to the last bit in whatever kernel it is computed, has_strips that what reductions take
    lies in short runs, far from each other, has_columns that packs are whole down columns; the
    tensors with gaps are dense but for those, reads_places that what is selected is read where it
    is, has_packs that elements come several at a time; short is the innermost group, where its rows
    are short.
    """
    verify(graph)
    leaves = input_buffers(graph, dtypes, gaps or {})
    outputs = dict(graph.outputs)
    marks = tuple(marks)
    nodes = [*outputs.values(), *(m.node for m in marks)]
    state = Pass(dtypes, sum_dtype, outputs, leaves, marks, prefix=prefix)
    # No value is called as a function that the lines may call, such as maximum.
    state.taken |= {*dtypes, *(node.op for node in ir.topological(graph.roots))}
    state.is_sliding, state.is_exact, state.has_columns = is_sliding, is_exact, has_columns
    state.gaps, state.short = gaps or {}, short
    images = without_ends_of_gradients(nodes)
    images = read_at_places(state, images, has_packs=has_packs) if reads_places else images
    images = positions_as_numbers(state, apart(means_as_sums(images), pooled))
    new = dict(zip(nodes, images, strict=True))
    state.pending = outputs = {name: new[expr] for name, expr in outputs.items()}
    state.marks = remarked(marks, new)
    order = ir.topological(outputs.values())
    touched = [frozenset(ir.axes_of(n)) if n.op == "covered" else n.extent for n in order]
    touched += [ir.reduction(r)[1] for r in reduces_below(outputs.values())]
    window = frozenset(g for extent in touched for g in extent if g < 0)
    if window and has_strips:
        part_runs(state)
    if window and is_sliding:
        _slides(state, window, pooled)
    elif window and held:
        (along,) = held[0].axes
        bundlewise_kernel(state, held[0].tier, along, window, pooled)
    elif window:
        _sums_first(state, window, pooled)
        windowwise_kernel(state, window)
    elif has_strips:
        take_strips(state)
    elif all(rows.domain != domain_of(state) for rows in held):
        part_columns(state)
    spread = {} if window or has_strips else put_off_spread(state)
    _all_pending(state, held, in_cache, window, pooled, is_sliding=is_sliding)
    if spread:
        state.pending = spread
        _level(state, pooled)
    assert not state.pending, f"nothing computes {', '.join(state.pending)}"
    return tuple(_to_and_fro(state.kernels))


def _all_pending(
    state: Pass,
    held: Sequence[HeldRows],
    in_cache: Sequence[str],
    window: Extent,
    pooled: Sequence[int],
    *,
    is_sliding: bool,
) -> None:
    """Kernels for all that is still to be computed."""
    while state.pending:
        here = [] if window else [rows for rows in held if rows.domain == domain_of(state)]
        before = len(state.kernels)
        if here:
            rowwise_kernel(state, here[0].tier, here[0].axes)
        elif in_cache and not window and not held:
            rowwise_kernel(state, None, frozenset(), in_cache)
        left = domain_of(state) if here and state.pending else frozenset()
        if len(state.kernels) > before and any(r.domain == left for r in held if r != here[0]):
            continue
        if not window and _rows_left(state, held):
            continue
        if here and not state.kernels:  # no rows are held after all
            part_columns(state)
        if state.pending:
            _level(state, pooled)
        if window and is_sliding:
            _slides(state, window, pooled)


def _rows_left(state: Pass, held: Sequence[HeldRows]) -> bool:
    """Whether rows of what reductions have left, which is small, now have kernels of their own."""
    before = len(state.kernels)
    ready = [n for n in reduces_below(state.pending.values()) if not reduces_below(n.args)]
    over = {(n.args[0].extent, ir.reduction(n)[1]) for n in ready}
    for tier, axes, domain in ((r.tier, r.axes, r.domain) for r in held):
        is_apt = not tier.is_full and reduces_at_once(tier, axes, domain)
        if is_apt and domain != domain_of(state) and (domain, axes) in over:
            rowwise_kernel(state, tier, axes, left=domain)
    return len(state.kernels) > before


def _to_and_fro(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """The kernels, each turned round that reads what the one before it went over: it begins with
    what that one touched last, which is still in a cache.
    """
    before: set[str] = set()
    is_from_end = False
    for kernel in kernels:
        if kernel.family == "finalise":
            yield kernel
            continue
        buffers = [buffer for _, buffer in kernel.inputs]
        whole = max((len(b.extent) for b in buffers), default=0)
        touched = {b.name for b in buffers if len(b.extent) == whole}
        is_from_end = bool(touched & before) and not is_from_end and kernel.family in _TURNING
        yield replace(kernel, is_from_end=is_from_end)
        before = touched | {b.name for b, _ in kernel.stores if len(b.extent) == whole}


def _sums_first(state: Pass, window: Extent, pooled: Sequence[int]) -> None:
    """The reductions that something of windows waits for, level by level."""
    while ready := awaited(state, window):
        if any(take_flat(state, ready, within, pooled) for within in (window, frozenset[int]())):
            continue
        state.resolve(windows_first(ready, window))
        ready = awaited(state, window)
        inside = [r for r in ready if is_windowed(r, window)]
        if inside:
            sums_first(state, window, inside)
        else:
            _reduce(state, ready, {})


def _slides(state: Pass, window: Extent, pooled: Sequence[int]) -> None:
    """The reductions over elements that windows share, level by level, as far as they are ready;
    then all that is reduced over windows.
    """
    while ready := [n for n in reduces_below(state.pending.values()) if n.args[0].op == "once"]:
        if not take_flat(state, ready, window, pooled):
            break
        # What columns leave is reduced on, before windows are gone through.
        beyond = window.union(pooled)
        left = [r for r in awaited(state, window) if beyond.isdisjoint(r.args[0].extent)]
        if left:
            _reduce(state, left, {})
    slidewise_kernels(state, window)


def _level(state: Pass, pooled: Sequence[int]) -> None:
    """One level of the general way: every reduction that is ready, with the elementwise outputs
    riding along.
    """
    ready = [n for n in reduces_below(state.pending.values()) if not reduces_below(n.args)]
    # What only small outputs wait for goes with the last pass over the elements, or with one that
    # reduces in the same way.
    largest = max((len(e.extent) for e in state.pending.values()), default=0)
    elements = [e for e in state.pending.values() if len(e.extent) == largest]
    first = set(reduces_below(elements))
    ways = {(n.args[0].extent, ir.reduction(n)) for n in ready if n in first}
    ready = [n for n in ready if (n.args[0].extent, ir.reduction(n)) in ways] or ready
    elementwise = {n: e for n, e in state.pending.items() if not reduces_below([e])}
    _reduce(state, ready, elementwise)
    by_domain: dict[tuple[int, ...], dict[str, Expr]] = {}
    for name, expr in elementwise.items():
        del state.pending[name]
        by_domain.setdefault(ordered(expr.extent), {})[name] = expr
    for domain, exprs in by_domain.items():
        within = tuple(g for g in domain if g < 0)
        if not within:
            exprs = _shared_first(state, exprs)
        stores, ends = _with_ends(state, exprs, pooled)
        outside = tuple(g for g in domain if g >= 0)
        kind: Family = "pointwise" if not within else "cover" if state.is_sliding else "window"
        strips = state.strips if state.strips and state.strips.domain == domain else None
        read = state.inputs_of(exprs.values())
        kept = strips.kept if strips else None
        columns = strips.columns if strips else domain[-1:]
        if state.has_columns and kind == "pointwise" and not strips:
            buffers = [buffer for _, buffer in read] + [buffer for buffer, _ in stores]
            kept = kept_down_columns(domain, buffers)
        kind = kind if kept is None else "outer"
        name = state.fresh(f"{state.prefix}_{kind}")
        kernel = Kernel(kind, name, outside, within, read, stores, marks=state.marks, ends=ends)
        if kept is not None:
            kernel = replace(kernel, kept=kept, columns=columns)
        state.kernels.append(kernel)


def _shared_first(state: Pass, exprs: Mapping[str, Expr]) -> dict[str, Expr]:
    """The outputs over what a kernel ahead of theirs computes for many of their elements, where
    that calls functions; less is not worth a kernel.
    """
    known: dict[Expr, Expr] = {}
    for extent, nodes in shared(exprs.values(), FUNCTIONS).items():
        leaves = state.scratches(nodes)
        stores = tuple((state.buffers[leaf], node) for node, leaf in leaves.items())
        name = state.fresh(f"{state.prefix}_pointwise")
        read = state.inputs_of(nodes)
        state.kernels.append(Kernel("pointwise", name, extent, (), read, stores, marks=state.marks))
        known |= leaves
    state.resolve(known)
    return dict(zip(exprs, ir.substitute(exprs.values(), known), strict=True))


def _with_ends(
    state: Pass, exprs: Mapping[str, Expr], pooled: Sequence[int]
) -> tuple[tuple[tuple[Buffer, Expr], ...], tuple[tuple[str, Expr, Expr], ...]]:
    """What a kernel stores; of elements that windows share, the shares, and what becomes of their
    sums.
    """
    stores, ends = [], []
    for name, expr in exprs.items():
        stored = expr
        if state.is_sliding and min(expr.extent, default=0) < 0:
            shares, own = shares_and_own(expr)
            leaf = ir.tensor(state.fresh(f"{name}_shares"), expr.extent, 0)
            stored, end = (
                (NO_SHARE, None) if shares is None else without_factors(shares, leaf, pooled)
            )
            end = own if end is None else end if own is None else end + own
            assert end is not None
            ends += [] if end is leaf else [(name, leaf, end)]
        stores.append((state.output(name, expr), stored))
    return tuple(stores), tuple(ends)


def _reduce(state: Pass, ready: Iterable[Expr], elementwise: dict[str, Expr]) -> None:
    """A pass for each domain of some reductions, and way to go through it; of the elementwise
    outputs it takes those along that lie in the same domain.
    """
    before = len(state.kernels)
    batches: dict[tuple[tuple[int, ...], Way], list[Expr]] = {}
    for node in ready:
        domain = ordered(node.args[0].extent)
        batches.setdefault((domain, way_of(node, state.strips)), []).append(node)
    state.underway = tuple(node for nodes in batches.values() for node in nodes)
    for number, ((domain, way), nodes) in enumerate(batches.items(), start=1):
        is_dense = all(g >= 0 for g in domain)
        riders = {n: e for n, e in elementwise.items() if is_dense and ordered(e.extent) == domain}
        for name in riders:
            del elementwise[name], state.pending[name]
        is_last = number == len(batches)
        _reducing_kernel(state, domain, way, nodes, riders, is_last=is_last)
    state.underway = ()
    for kernel in state.kernels[before:]:
        state.read_back(kernel.stores)


def _reducing_kernel(
    state: Pass,
    domain: tuple[int, ...],
    way: Way,
    nodes: Sequence[Expr],
    riders: Mapping[str, Expr],
    *,
    is_last: bool,
) -> None:
    """A pass that leaves partials, then a finalise for each extent among the results. Behind the
    last one what it has written is read before a finalise puts other names into how it was made.
    """
    totals, known = left_by_extent(state, nodes, way.within)
    sums = [pair for members in totals.values() for pair in members]
    exprs = [r.value for r, _ in sums] + list(riders.values())
    state.kernels.append(
        Kernel(
            way.family,
            state.fresh(f"{state.prefix}_{way.family}"),
            domain,
            tuple(g for g in domain if g not in way.kept),
            state.inputs_of(exprs),
            tuple((state.output(n, e), e) for n, e in riders.items()),
            sums=tuple(sums),
            kept=way.kept,
            columns=way.columns,
            marks=state.marks,
        )
    )
    state.resolve(known)
    if is_last:
        state.read_back(state.kernels[-1].stores)
    for extent, mine in totals.items():
        finalise(state, extent, mine, way.beside)
