"""Kernels with their arithmetic rewritten; and what is shorter at any type."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.ir import Expr, const, constant, primitive
from fusegen.kernel import Kernel, Reduction
from fusegen.lower import remarked
from fusegen.powers import power, users_of
from fusegen.program import STATISTIC
from fusegen.streaming import is_largest
from fusegen.target import Target

# From here on tanh(x) is 1 even in double precision; from here on exp(x)^2 is too large a float.
_TANH_IS_1, _SQUARE_OVERFLOWS = 20.0, 44.0
# Divisors beyond which inverses are scaled, and by how much; powers of two, for exact products.
_LARGE, _SHIFT = 2.0**100, 2.0**64
_LOG2_E = 1.0 / math.log(2.0)


def rewritten(
    kernel: Kernel, rewrite: Callable[[Sequence[Expr], Sequence[Expr]], dict[Expr, Expr]]
) -> Kernel:
    """The kernel with what `rewrite` makes of every node below its roots; it is told those, and
    the nodes that stay nodes of their own.
    """
    reductions = [r for stage in kernel.stages for r in stage]
    reductions += [r for r, _ in kernel.left]
    roots = [expr for _, expr in kernel.stores]
    roots += [e for r in reductions for e in (r.value, r.index) if e is not None]
    roots += [value for pairs in kernel.held for _, value in pairs]
    roots += [value for *_, value in kernel.ends]
    scaling = kernel.rescaling
    roots += [factor for _, factor in scaling.factors] if scaling else []
    new = rewrite(roots, [m.node for m in kernel.marks])

    def again(r: Reduction) -> Reduction:
        return replace(r, value=new[r.value], index=None if r.index is None else new[r.index])

    return replace(
        kernel,
        stores=tuple((buffer, new[expr]) for buffer, expr in kernel.stores),
        stages=tuple(tuple(map(again, stage)) for stage in kernel.stages),
        sums=tuple((again(r), buffer) for r, buffer in kernel.sums),
        stretches=tuple((again(r), buffer) for r, buffer in kernel.stretches),
        totals=tuple((again(r), buffer) for r, buffer in kernel.totals),
        marks=remarked(kernel.marks, new),
        held=tuple(tuple((leaf, new[v]) for leaf, v in pairs) for pairs in kernel.held),
        ends=tuple((name, leaf, new[value]) for name, leaf, value in kernel.ends),
        rescaling=scaling
        and replace(scaling, factors=tuple((r, new[f]) for r, f in scaling.factors)),
    )


def with_inverses(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """The kernels where a quotient by what does not vary along a row on the chip, or along the last
    axis, is a product with its inverse, which is found once for many.
    """

    def inverted(kernel: Kernel) -> Kernel:
        along = set(kernel.reduced if kernel.tier else kernel.domain[-1:])

        def new(roots: Sequence[Expr], named: Sequence[Expr]) -> dict[Expr, Expr]:
            images: dict[Expr, Expr] = {}
            for node in ir.topological(roots):
                image = ir.rebuild(node, tuple(images[a] for a in node.args))
                if node.op in ("div", "narrow_div") and constant(node.args[1]) is None:
                    number, divisor = node.args
                    if number.extent & along and not divisor.extent & along:
                        image = _times_inverse(*image.args)
                images[node] = image
            return images

        return rewritten(kernel, new)

    return tuple(map(inverted, kernels))


def with_summed_powers(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """The kernels where exp(a - b), with b the largest of a, is a power of two if it is only added
    up: what is far below the largest loses digits that the sum does not have.
    """

    def shortened_in(kernel: Kernel) -> Kernel:
        full = {*kernel.domain, *kernel.reduced}
        written = [value for buffer, value in kernel.stores if full <= {*buffer.extent}]
        kept = set(ir.topological([*written, *(value for *_, value in kernel.ends)]))
        for leaf, value in (pair for pairs in kernel.held[::-1] for pair in pairs):
            kept |= set(ir.topological([value])) if leaf in kept else set()
        stages = (r for stage in kernel.stages for r in stage if r.kind == "peak")
        largest = {leaf for r in stages for _, leaf in r.results}
        largest |= {i for i, _ in kernel.inputs if ir.name_of(i).startswith(STATISTIC + "bound")}

        def is_shifted(node: Expr) -> bool:
            if node.op != "exp" or node in kept or node.args[0].op != "sub":
                return False
            return is_largest(node.args[0].args[1], largest)

        def new(roots: Sequence[Expr], named: Sequence[Expr]) -> dict[Expr, Expr]:
            images: dict[Expr, Expr] = {}
            for node in ir.topological(roots):
                args = tuple(images[a] for a in node.args)
                short = operation("exp2_flushed", args[0] * _LOG2_E) if is_shifted(node) else None
                images[node] = ir.rebuild(node, args) if short is None else short
            return images

        return rewritten(kernel, new)

    return tuple(map(shortened_in, kernels))


def _times_inverse(number: Expr, divisor: Expr) -> Expr:
    """Within 2 ulp of the quotient. The inverse of what is very small would overflow, and that of
    what is very large lose digits.
    """
    if divisor.op == "count":
        return number * (1.0 / divisor)
    size = primitive("abs", divisor)
    scale = primitive("where", primitive("gt", size, _LARGE), _SHIFT**-1, 1.0)
    scale = primitive("where", primitive("lt", size, 1 / _LARGE), _SHIFT, scale)
    return number * (1.0 / (divisor * scale)) * scale


def shortened(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """The kernels where the tanh of a softplus takes an exponential and a quotient, at any type:
    with e = exp(x), tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1). And those powers that
    torch has no call for either are products, roots and quotients.
    """

    def new(roots: Sequence[Expr], named: Sequence[Expr]) -> dict[Expr, Expr]:
        images: dict[Expr, Expr] = {}
        for node in ir.topological(roots):
            images[node] = _shorter(ir.rebuild(node, tuple(images[a] for a in node.args)))
        return images

    return tuple(rewritten(kernel, new) for kernel in kernels)


def _shorter(node: Expr) -> Expr:
    if node.op == "pow":
        return power(node)
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


def contracted(kernels: Iterable[Kernel], target: Target, *, is_short: bool) -> tuple[Kernel, ...]:
    """The kernels, products joined with the sums they go into where rows are held on the chip, or
    everywhere.

    Those are not the same to the last bit as eager's in any case, which adds in another order; and
    they wait for arithmetic, unlike kernels without reductions.
    """

    def joined(kernel: Kernel) -> Kernel:
        # What a row has one of is found once, and has no part in that.
        along = kernel.reduced or kernel.domain[-1:]
        return rewritten(kernel, lambda roots, named: joined_products(roots, set(named), along))

    if not target.is_contracted:
        return tuple(kernels)
    return tuple(joined(k) if k.tier or is_short else k for k in kernels)


def operation(op: str, *args: Expr) -> Expr:
    """An operation that stands only behind the scheduler, on numbers."""
    extent = frozenset[int]().union(*(a.extent for a in args))
    return ir.make(op, args, extent=extent, rank=args[0].rank)


def joined_products(
    roots: Sequence[Expr], named: Collection[Expr], along: Collection[int] = ()
) -> dict[Expr, Expr]:
    """Every node below the roots, a product that only a sum uses joined with it into one fma; with
    `along`, if it varies along one of those groups.
    """
    users = users_of(roots)
    new: dict[Expr, Expr] = {}
    for node in ir.topological(roots):
        args = tuple(new[a] for a in node.args)
        new[node] = ir.rebuild(node, args)
        if node.op not in ("add", "sub"):
            continue
        for i, product in enumerate(node.args):
            if product.op != "mul" or users[product] > 1 or product in named:
                continue
            if along and not product.extent & set(along):
                continue
            a, b = (new[factor] for factor in product.args)
            other = args[1 - i]
            if node.op == "sub":
                a, other = (a, _minus(other)) if i == 0 else (_minus(a), other)
            new[node] = operation("fma", a, b, other)
            break
    return new


def _minus(node: Expr) -> Expr:
    number = constant(node)
    return primitive("neg", node) if number is None else const(-number)
