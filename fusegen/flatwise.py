"""Reductions over all of the pooled axes, of what is still to be pooled or what has been: elements
as they lie.

Such a reduction takes no notice of windows, which fill their axes, or counts each element once
however many windows have it. Where the pooled axes lie beside each other, a kernel goes over them
as over one: in packs, like any that reduces along rows, where they are the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen import arity, ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.kernel import Kernel
from fusegen.staging import Pass, finalise, left_by_extent, reduces_below
from fusegen.ways import Way, way_of


def _elements(node: Expr) -> Expr:
    """What is reduced."""
    (value,) = node.args
    return value.args[0] if value.op == "once" else value


def _lies_flat(node: Expr, window: Extent, pooled: Sequence[int], *, is_sliding: bool) -> bool:
    """Whether a reduction can go over its elements as they lie."""
    kind, axes = ir.reduction(node)
    if kind not in arity.SUMS or reduces_below(node.args):
        return False
    is_once = node.args[0].op == "once"
    if is_once != (is_sliding and bool(window)):
        return False  # by windows, an element may be in many, or in none
    split = window | set(pooled)
    below = ir.topological([_elements(node)])
    counts = [n for n in below if n.op == "count"]
    domain = ordered(frozenset[int]().union(*(n.extent for n in below)) - window)
    first = domain.index(min(pooled)) if min(pooled) in domain else 0
    beside = domain[first : first + len(pooled)] == tuple(sorted(pooled))
    return (
        split <= axes
        and beside
        and all(n.extent & split in (frozenset(), split) for n in below)
        and min(domain, default=0) >= 0
        and all(n.op in arity.ARITY or n.op in ("input", "const", "count") for n in below)
        and all(n.kind != "noise" for n in below)
        and all(split <= set(ir.axes_of(n)) or not set(pooled) & set(ir.axes_of(n)) for n in counts)
    )


def take_flat(state: Pass, ready: Sequence[Expr], window: Extent, pooled: Sequence[int]) -> bool:
    """A kernel for each domain of the reductions that can go over elements as they lie; whether
    there are any. window has the groups of places within windows, where elements have such.
    """
    is_sliding = state.is_sliding
    nodes = [r for r in ready if _lies_flat(r, window, pooled, is_sliding=is_sliding)]
    flat = ordered(frozenset(pooled))
    others = window | set(flat[1:])

    def flattened(node: Expr) -> Expr:
        if node.op == "input":
            extent = node.extent - others
            return ir.make(node.op, (), node.attrs, extent=extent, rank=0, kind=node.kind)
        axes = frozenset(ir.axes_of(node))
        return ir.count(axes - others) if others <= axes else node

    elements = [_elements(n) for n in nodes]
    ends = [n for n in ir.topological(elements) if n.op in ("input", "count")]
    leaf_of = {n: flattened(n) for n in ends}
    by_way: dict[tuple[tuple[int, ...], Way], dict[Expr, Expr]] = {}
    for node, value in zip(nodes, ir.substitute(elements, leaf_of), strict=True):
        kind, axes = ir.reduction(node)
        alike = ir.reduce(kind, axes - others, value)
        by_way.setdefault((ordered(value.extent), way_of(alike, state.strips)), {})[node] = alike
    state.underway = tuple(nodes)
    for (domain, way), alike_of in by_way.items():
        totals, known = left_by_extent(state, dict.fromkeys(alike_of.values()), way.within)
        sums = [pair for members in totals.values() for pair in members]
        read = ir.inputs(r.value for r, _ in sums)
        buffers = {
            leaf_of[leaf]: buffer for leaf, buffer in state.buffers.items() if leaf in leaf_of
        }
        state.kernels.append(
            Kernel(
                way.family,
                state.fresh(f"{state.prefix}_{way.family}"),
                domain,
                tuple(g for g in domain if g not in way.kept),
                tuple((n, replace(buffers[n], extent=ordered(n.extent))) for n in read),
                (),
                sums=tuple(sums),
                kept=way.kept,
                columns=way.columns,
                flat=flat,
                is_unpooled=bool(window),
            )
        )
        state.resolve({node: known[alike] for node, alike in alike_of.items()})
        for extent, mine in totals.items():
            finalise(state, extent, mine, way.beside)
    state.underway = ()
    return bool(nodes)
