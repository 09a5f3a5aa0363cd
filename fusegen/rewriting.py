"""Kernels with their arithmetic rewritten; and what is shorter at any type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.ir import Expr, constant, primitive
from fusegen.kernel import Kernel, Reduction
from fusegen.lower import remarked

# From here on tanh(x) is 1 even in double precision; from here on exp(x)^2 is too large a float.
_TANH_IS_1, _SQUARE_OVERFLOWS = 20.0, 44.0


def rewritten(
    kernel: Kernel, rewrite: Callable[[Sequence[Expr], Sequence[Expr]], dict[Expr, Expr]]
) -> Kernel:
    """The kernel with what `rewrite` makes of every node below its roots; it is told those, and
    the nodes that stay nodes of their own.
    """
    reductions = [r for stage in kernel.stages for r in stage]
    reductions += [r for r, _ in (*kernel.sums, *kernel.stretches)]
    roots = [expr for _, expr in kernel.stores]
    roots += [e for r in reductions for e in (r.value, r.index) if e is not None]
    roots += [value for pairs in kernel.held for _, value in pairs]
    new = rewrite(roots, [m.node for m in kernel.marks])

    def again(r: Reduction) -> Reduction:
        return replace(r, value=new[r.value], index=None if r.index is None else new[r.index])

    return replace(
        kernel,
        stores=tuple((buffer, new[expr]) for buffer, expr in kernel.stores),
        stages=tuple(tuple(map(again, stage)) for stage in kernel.stages),
        sums=tuple((again(r), buffer) for r, buffer in kernel.sums),
        stretches=tuple((again(r), buffer) for r, buffer in kernel.stretches),
        marks=remarked(kernel.marks, new),
        held=tuple(tuple((leaf, new[v]) for leaf, v in pairs) for pairs in kernel.held),
    )


def shortened(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """The kernels where the tanh of a softplus takes an exponential and a quotient, at any type:
    with e = exp(x), tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1).
    """

    def new(roots: Sequence[Expr], named: Sequence[Expr]) -> dict[Expr, Expr]:
        images: dict[Expr, Expr] = {}
        for node in ir.topological(roots):
            images[node] = _shorter(ir.rebuild(node, tuple(images[a] for a in node.args)))
        return images

    return tuple(rewritten(kernel, new) for kernel in kernels)


def _shorter(node: Expr) -> Expr:
    if node.op != "tanh" or node.args[0].op != "where":
        return node
    condition, same, softplus = node.args[0].args
    limit = constant(condition.args[1]) if condition.op == "gt" else None
    is_softplus = softplus.op == "log1p" and softplus.args[0].op == "exp"
    if (
        limit is None
        or not is_softplus
        or not same is condition.args[0] is softplus.args[0].args[0]
    ):
        return node
    if not _TANH_IS_1 <= limit <= _SQUARE_OVERFLOWS:
        return node
    grown = softplus.args[0]
    square = grown * (grown + 2)
    return primitive("where", condition, 1.0, square / (square + 2))
