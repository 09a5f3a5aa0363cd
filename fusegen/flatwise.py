"""Reductions over all of the pooled axes, of what is still to be pooled or what has been: elements
as they lie.

Such a reduction takes no notice of windows, which fill their axes. Where the pooled axes are the
innermost, a kernel goes over them as over one, in packs, like any that reduces along rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.kernel import Kernel
from fusegen.staging import Pass, finalise, left_by_extent, reduces_below


def _lies_flat(node: Expr, window: Extent, pooled: Sequence[int]) -> bool:
    """Whether a reduction can go over its elements as they lie."""
    kind, axes = ir.reduction(node)
    split = window | set(pooled)
    below = ir.topological(node.args)
    counts = [n for n in below if n.op == "count"]
    domain = frozenset[int]().union(*(n.extent for n in below))
    inner = ordered(domain - window)[-len(pooled) :]
    return (
        kind in ir.SUMS
        and split <= axes
        and set(inner) == set(pooled)
        and not reduces_below(node.args)
        and all(n.extent & split in (frozenset(), split) for n in below)
        and min(domain - window, default=0) >= 0
        and all(n.op in ir.ARITY or n.op in ("input", "const", "count") for n in below)
        and all(n.kind != "noise" for n in below)
        and all(split <= set(ir.axes_of(n)) or not set(pooled) & set(ir.axes_of(n)) for n in counts)
    )


def take_flat(state: Pass, ready: Sequence[Expr], window: Extent, pooled: Sequence[int]) -> bool:
    """A kernel for each domain of the reductions that can go over elements as they lie; whether
    there are any. window has the groups of places within windows, where elements have such.
    """
    nodes = [r for r in ready if _lies_flat(r, window, pooled)]
    flat = ordered(frozenset(pooled))
    others = window | set(flat[1:])

    def flattened(node: Expr) -> Expr:
        if node.op == "input":
            extent = node.extent - others
            return ir.make(node.op, (), node.attrs, extent=extent, rank=0, kind=node.kind)
        axes = frozenset(ir.axes_of(node))
        return ir.count(axes - others) if others <= axes else node

    ends = [n for n in ir.topological(nodes) if n.op in ("input", "count")]
    leaf_of = {n: flattened(n) for n in ends}
    by_domain: dict[tuple[int, ...], dict[Expr, Expr]] = {}
    for node in nodes:
        (value,) = ir.substitute(node.args, leaf_of)
        kind, axes = ir.reduction(node)
        alike = ir.reduce(kind, axes - others, value)
        by_domain.setdefault(ordered(value.extent), {})[node] = alike
    for domain, alike_of in by_domain.items():
        totals, known = left_by_extent(state, dict.fromkeys(alike_of.values()))
        sums = [pair for members in totals.values() for pair in members]
        read = ir.inputs(r.value for r, _ in sums)
        buffers = {
            leaf_of[leaf]: buffer for leaf, buffer in state.buffers.items() if leaf in leaf_of
        }
        state.kernels.append(
            Kernel(
                "inner",
                state.fresh(f"{state.prefix}_inner"),
                domain,
                domain,
                tuple((n, replace(buffers[n], extent=ordered(n.extent))) for n in read),
                (),
                sums=tuple(sums),
                flat=flat,
                is_unpooled=bool(window),
            )
        )
        state.resolve({node: known[alike] for node, alike in alike_of.items()})
        for extent, mine in totals.items():
            finalise(state, extent, mine, ())
    return bool(nodes)
