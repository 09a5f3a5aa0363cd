"""Spreading: results in which many elements have what was computed of a few in common.

The gradient of what was selected is such a result: zero but where the selection was. What is
reduced lies along fewer axes then, so those kernels are made as if there were no others, and the
result is written by one behind them.
"""

from __future__ import annotations

from fusegen import ir
from fusegen.ir import Expr
from fusegen.staging import Pass, reduces_below


def put_off_spread(state: Pass) -> dict[str, Expr]:
    """Take the results that are spread over more axes than anything that is reduced out of what is
    pending, and have what they share pending instead; they are given over leaves for that. Nothing
    is taken where something is reduced over axes as many.
    """
    reduced = [r.args[0].extent for r in reduces_below(state.pending.values())]
    if not reduced:
        return {}
    domain = frozenset[int]().union(*reduced)
    spread = {n: e for n, e in state.pending.items() if e.extent > domain and reduces_below([e])}
    shared = dict.fromkeys(
        arg
        for node in ir.topological(spread.values())
        for arg in node.args
        if not node.extent <= domain and arg.extent <= domain and reduces_below([arg])
    )
    if any(expr.kind != "number" for expr in shared):
        return {}
    leaves = state.scratches(shared)
    known = dict(zip(spread, ir.substitute(spread.values(), leaves), strict=True))
    for name in spread:
        del state.pending[name]
    for expr, leaf in leaves.items():
        state.pending[ir.name_of(leaf)] = expr
        state.passing[ir.name_of(leaf)] = state.buffers[leaf]
    return known
