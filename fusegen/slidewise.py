"""Windows that overlap, leave gaps or cross the edge, as kernels.

Two families. A slide kernel goes from window to window: it reads what is inside the tensor, and
computes what stands before the pooling again for every window that shares an element. A cover
kernel is its transpose, and goes from element to element of a tensor: it takes the windows that
cover the element, in order, and adds up their shares. So nothing is scattered, there are no
atomics, and the same inputs give the same bits. Each goes on its own, or a line of them together:
the skeletons decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fusegen import arity, ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.kernel import Kernel
from fusegen.staging import Pass, reduces_below, staged
from fusegen.target import FUNCTIONS
from fusegen.windowwise import is_local, leaf_for, passed_on, windows_first


def slidewise_kernels(state: Pass, window: Extent) -> None:
    """A kernel for all that is reduced over windows and for what else each window needs once.

    What is left pending varies within windows, and is for cover kernels; or goes on from the
    results in other ways.
    """
    state.resolve(windows_first(state.pending.values(), window))
    chosen = [n for n, e in state.pending.items() if is_local(e, window) and not e.extent & window]
    own = {n: state.pending.pop(n) for n in chosen}
    passed = [
        *passed_on(state, window),
        *_once_per_window(state, window),
        *_counts_elsewhere(state, window),
    ]
    by_extent: dict[tuple[int, ...], tuple[dict[str, Expr], list[Expr]]] = {}
    for name, expr in own.items():
        by_extent.setdefault(ordered(expr.extent), ({}, []))[0][name] = expr
    for expr in dict.fromkeys(passed):
        by_extent.setdefault(ordered(expr.extent - window), ({}, []))[1].append(expr)
    known: dict[Expr, Expr] = {}
    for domain, (results, values) in by_extent.items():
        known |= _slide(state, domain, window, results, values)
    state.resolve(known)


def _slide(
    state: Pass,
    domain: tuple[int, ...],
    window: Extent,
    results: Mapping[str, Expr],
    passed: Sequence[Expr],
) -> dict[Expr, Expr]:
    """A kernel with a thread for each window, and leaves for what it passes on through memory."""
    roots = [*results.values(), *passed]
    stages, leaf_of, finals = staged(state, roots)
    stores = [(state.output(n, e), e) for n, e in zip(results, finals, strict=False)]
    known = {}
    for node, final in zip(passed, finals[len(results) :], strict=True):
        leaf, known[node], written = leaf_for(state, node, final)
        state.buffers[leaf] = state.scratch(leaf)
        stores.append((state.buffers[leaf], written))
    reductions = [r for stage in stages for r in stage]
    exprs = [e for r in reductions for e in (r.value, r.index) if e is not None] + finals
    nodes = ir.topological(roots)
    within = {g for n in nodes for g in n.extent & window}
    within |= {g for n in nodes if n.op == "reduce" for g in ir.reduction(n)[1] & window}
    state.kernels.append(
        Kernel(
            "slide",
            state.fresh(f"{state.prefix}_slide"),
            domain,
            ordered(frozenset(within)),
            state.inputs_of(exprs, leaf_of.values()),
            tuple(stores),
            tuple(stages),
            marks=state.marks_over(leaf_of),
        )
    )
    return known


def _counts_elsewhere(state: Pass, window: Extent) -> list[Expr]:
    """How many positions windows have, where kernels want to know that do not go by windows."""
    others = [e for e in state.pending.values() if not (e.extent & window and is_local(e, window))]
    return [n for n in ir.topological(others) if n.op == "covered"]


def _once_per_window(state: Pass, window: Extent) -> list[Expr]:
    """What cover kernels would compute again for every element of a window, and is dear."""
    covers = [e for e in state.pending.values() if e.extent & window and is_local(e, window)]
    found = []
    for node in ir.topological(covers):
        for arg in node.args:
            is_fixed = arg.op in arity.ARITY and not arg.extent & window and arg.kind == "number"
            if node.extent & window and is_fixed and _is_dear(arg):
                found.append(arg)
    return found


def _is_dear(expr: Expr) -> bool:
    return not reduces_below([expr]) and any(n.op in FUNCTIONS for n in ir.topological([expr]))


def with_winners(kernel: Kernel) -> Kernel:
    """The kernel where a maximum that is asked where it stands has what is picked there, so that
    nothing is read for that again.
    """
    leaves = {leaf for stage in kernel.stages for r in stage for _, leaf in r.results}
    stages = list(kernel.stages)
    for i, stage in enumerate(kernel.stages):
        places = {leaf for r in stage for result, leaf in r.results if result == "argmax"}
        if len(stage) > 1 or not places or stage[0].kind != "max":
            continue
        found = [
            r
            for later in kernel.stages[i + 1 :]
            for r in later
            if r.kind == "pick" and r.index in places and leaves.isdisjoint(ir.inputs([r.value]))
        ]
        results = [(f"template picked<{j}>", r.results[0][1]) for j, r in enumerate(found)]
        picks = tuple(r.value for r in found)
        own = (*stage[0].results, *results)
        stages[i] = (replace(stage[0], kind="winner", results=own, picks=picks),)
        stages[i + 1 :] = [tuple(r for r in s if r not in found) for s in stages[i + 1 :]]
    return replace(kernel, stages=tuple(filter(None, stages)))
