"""Arithmetic for results of 16 bits: kernels rewritten to what such results can tell apart.

Everything here is computed in single precision still, and rounded once, at the end. What is left
out is precision beyond that rounding: an error that stays under a sixteenth of half an ulp of the
stored type is spent on fewer instructions (at the memory's pace an H200 has 28 for an element of 16
bits, where erff alone takes 24). Products gather their constants, sums their common factors, and
the constants go into the coefficients of polynomials and exponents, where they cost nothing.

Where a gradient crosses zero, as gelu's does at -0.75, its error is so small beside the terms that
cancel there, and not beside what is left of them.

Tails keep their relative precision: 1 + erf(a) becomes erfc, which for a < 0 is one power of two
and no difference of two ones. Exponentials of erf and of its derivative that are below 2^-126 are
zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen import ir
from fusegen.choices import bounded, joined
from fusegen.ir import Expr, Graph, const, constant, primitive
from fusegen.kernel import Kernel
from fusegen.powers import MOST_EXPONENT, halved, users_of, whole_power
from fusegen.program import STATISTIC
from fusegen.promotion import FLOATING
from fusegen.rewriting import joined_products, operation, rewritten
from fusegen.tails import (
    ERF_SERIES,
    ERF_SERIES_END,
    LOG2_ERFC,
    LOG2_ERFC_IN_ERF,
    LOG2_ERFC_WIDE,
    erfc_of_size,
    polynomial,
)
from fusegen.target import COMPUTE, Target

_LOG2_E = 1.0 / math.log(2.0)
# Constants beyond these stay where they are written: moved, they could overflow what they did not.
_GATHERED = 2.0**20
_LARGEST = _GATHERED**5  # of several together
_IN_POWERS = 2.0**6  # what goes into coefficients does so to the tenth power


def narrow_type(graph: Graph, dtypes: Mapping[str, str]) -> str | None:
    """The 16-bit type that every floating tensor of a graph has, or None.

    Tensors without axes have no say among others that have some, as in torch's promotion, nor do
    saved statistics; but none may be of double precision, nor is anything where a step asks for
    single precision.
    """
    if any(node.op == "to_float32" for node in ir.topological(graph.roots)):
        return None
    tensors = [(ir.name_of(leaf), leaf) for leaf in graph.inputs] + [*graph.outputs]
    tensors = [(n, t) for n, t in tensors if dtypes[n] in FLOATING and not n.startswith(STATISTIC)]
    spread = [(n, t) for n, t in tensors if t.extent] or tensors
    found = {dtypes[name] for name, _ in spread}
    is_single = all(COMPUTE[dtypes[name]] == "float" for name, _ in tensors)
    return found.pop() if is_single and len(found) == 1 and found <= set(LOG2_ERFC) else None


def narrowed(kernels: Iterable[Kernel], dtype: str, target: Target) -> tuple[Kernel, ...]:
    """The kernels with their arithmetic rewritten for results of a 16-bit type."""

    def respelled_in(kernel: Kernel) -> Kernel:
        along = kernel.reduced if kernel.tier else kernel.domain[-1:]
        return rewritten(kernel, lambda r, named: respelled(r, named, dtype, target, along))

    return tuple(map(respelled_in, kernels))


def shorter(kernels: Iterable[Kernel], target: Target) -> tuple[Kernel, ...]:
    """The kernels with 1 + erf(a), erf's derivative and quotients in fewer instructions, at single
    precision: for elements that depend on sums, which are not the same to the last bit as eager's
    either.
    """

    def shortened_in(kernel: Kernel) -> Kernel:
        along = frozenset(kernel.reduced if kernel.tier else kernel.domain[-1:])
        return rewritten(kernel, lambda r, named: _Algebra(r, named, _WIDE, target, along).images)

    return tuple(map(shortened_in, kernels))


def respelled(
    roots: Sequence[Expr],
    named: Collection[Expr],
    dtype: str,
    target: Target,
    along: Collection[int] = (),
) -> dict[Expr, Expr]:
    """What every node below the roots becomes; nodes in `named` stay nodes of their own, and so do
    products that do not vary along the groups `along`, if there are such.
    """
    algebra = _Algebra(roots, named, Precision(LOG2_ERFC[dtype], _RULES, "narrow_"), target)
    new = algebra.images
    if not target.is_contracted:
        return new
    images = [new[root] for root in roots]
    fused = joined_products(images, {new[node] for node in named if node in new}, along)
    return {node: fused[image] for node, image in new.items() if image in fused}


def _below_steps(roots: Iterable[Expr]) -> set[Expr]:
    """What is computed before it is cut off or rounded to integers: 2 is not to be less there."""
    return set(ir.topological(a for n in ir.topological(roots) if n.op in _STEPS for a in n.args))


def _plain(node: Expr) -> float | None:
    """The value of a constant that may be moved."""
    number = constant(node)
    is_plain = number is not None and 1.0 / _GATHERED <= abs(number) <= _GATHERED
    return number if is_plain else None


@dataclass(frozen=True)
class Precision:
    """What results can tell apart: how log2(erfc) is found, what is rewritten, and what the cheap
    spellings of primitives begin with, if there are such.
    """

    log2_erfc: Sequence[float]
    rules: Mapping[str, Callable[[_Algebra, Expr], Expr | None]]
    cheap: str = ""


class _Algebra:
    """One walk over a kernel's expressions, arguments first; `images` has what each becomes. What
    varies along the groups `along` is found for each element.
    """

    def __init__(
        self,
        roots: Sequence[Expr],
        named: Collection[Expr],
        precision: Precision,
        target: Target,
        along: frozenset[int] = frozenset(),
    ) -> None:
        self.images: dict[Expr, Expr] = {}
        self.scaled: dict[Expr, Callable[[float], Expr]] = {}  # the image, times a number
        self.users = users_of(roots)
        self.named = frozenset(named)
        self.precision = precision
        self.target = target
        self.along = along
        self.halved = halved(roots, self.named) if precision.cheap else {}
        self.exact = _below_steps(roots)
        for node in ir.topological(roots):
            self.images[node] = self.image(node)

    def is_inner(self, node: Expr) -> bool:
        """Whether it is a part of one other expression and nothing else."""
        return self.users[node] == 1 and node not in self.named

    def image(self, node: Expr) -> Expr:
        """What a node becomes, whose arguments have images."""
        if node in self.exact:
            return ir.rebuild(node, tuple(self.images[a] for a in node.args))
        rule = self.precision.rules.get(node.op)
        found = rule(self, node) if rule else None
        return self.rebuilt(node) if found is None else found

    def rebuilt(self, node: Expr) -> Expr:
        """The node on the images of its arguments."""
        args = tuple(self.images[a] for a in node.args)
        return ir.rebuild(node, args) if node.attrs else self.spelled(node.op, *args)

    def spelled(self, op: str, *args: Expr) -> Expr:
        """An operation in the target's cheap spelling if it has one."""
        cheap = self.precision.cheap + op
        is_cheap = bool(self.precision.cheap) and cheap in self.target.spellings
        return operation(cheap, *args) if is_cheap else primitive(op, *args)

    # Products.

    def factors(self, node: Expr, *, is_top: bool = True) -> tuple[float, list[Expr], int]:
        """The node as a number times others, and how many numbers that took."""
        number = _plain(node)
        if number is not None:
            return number, [], 1
        if is_top or self.is_inner(node):
            if node.op == "neg":
                number, others, count = self.factors(node.args[0], is_top=False)
                return -number, others, count
            if node.op == "mul":
                return self.joined(node, *node.args)
            if node.op == "div" and (divisor := _plain(node.args[1])) is not None:
                number, others, count = self.joined(node, node.args[0])
                return number / divisor, others, count + 1
        return 1.0, [node], 0

    def joined(self, node: Expr, *parts: Expr) -> tuple[float, list[Expr], int]:
        total, count = 1.0, 0
        others: list[Expr] = []
        for part in parts:
            # What varies along fewer axes is computed once for many elements: it stays whole.
            is_alike = part.op == "const" or part.extent == node.extent
            found = self.factors(part, is_top=False) if is_alike else (1.0, [part], 0)
            total, others, count = total * found[0], others + found[1], count + found[2]
        return total, others, count

    def product(self, number: float, parts: Sequence[Expr]) -> Expr:
        """The number times the images of the parts; one of them may take the number in."""
        images = [self.images[part] for part in parts]
        sign, size = math.copysign(1.0, number), abs(number)
        for i, part in enumerate(parts):
            if size != 1.0 and images[i] in self.scaled and self.is_inner(part):
                images[i], size = self.scaled[images[i]](size), 1.0
        if not images:
            return const(number)
        if size != 1.0:
            images[0], sign = primitive("mul", images[0], const(size * sign)), 1.0
        result = images[0]
        for image in images[1:]:
            result = primitive("mul", result, image)
        return primitive("neg", result) if sign < 0 else result

    def of_product(self, node: Expr) -> Expr | None:
        """A product whose numbers become one, or go into a factor."""
        number, parts, count = self.factors(node)
        if parts == [node] or not 1.0 / _LARGEST <= abs(number) <= _LARGEST:
            return None
        takes = any(self.images[p] in self.scaled and self.is_inner(p) for p in parts)
        is_shorter = count > 1 or (count == 1 and (takes or node.op == "div"))
        return self.product(number, parts) if is_shorter else None

    def of_quotient(self, node: Expr) -> Expr | None:
        """A product with the inverse of a number; of elements, a quotient within 2 ulp."""
        found = self.of_product(node)
        if found is not None or constant(node.args[1]) is not None or not node.extent & self.along:
            return found
        return operation("narrow_div", *(self.images[a] for a in node.args))

    # Sums.

    def of_sum(self, node: Expr) -> Expr | None:
        """1 + erf(a), 1 + tanh(a), 1 - tanh(a)^2, or a sum of products with a common factor."""
        sign = -1.0 if node.op == "sub" else 1.0
        if node in self.halved:
            return self.of_sigmoid(node, self.halved[node])
        for one, other in (node.args, node.args[::-1]):
            if constant(one) == 1.0 and other.op == "erf" and self.is_inner(other):
                return None if one is not node.args[0] and sign < 0 else self.erfc(other, -sign)
        if any(a.extent != node.extent or not self.is_inner(a) for a in node.args):
            return None
        (a, left, _), (b, right, _) = (self.factors(arg, is_top=False) for arg in node.args)
        common = list((Counter(left) & Counter(right)).elements())
        if not common:
            return None
        for factor in common:
            left.remove(factor)
            right.remove(factor)
        total = primitive("add", self.product(a, left), self.product(sign * b, right))
        return primitive("mul", self.product(1.0, common), total)

    # Exponentials.

    def multiple(self, node: Expr, most: float = _GATHERED**2) -> tuple[float, Expr]:
        """The node as a number times the image of another; the number is 1 where it would be larger
        than `most`, or smaller than its inverse.
        """
        number, base = self._multiple(node)
        return (number, base) if 1.0 / most <= abs(number) <= most else (1.0, self.images[node])

    def _multiple(self, node: Expr) -> tuple[float, Expr]:
        number, parts, _ = self.factors(node)
        if len(parts) == 1 and parts[0] is not node:
            inner, base = self.multiple(parts[0])
            return number * inner, base
        if len(parts) == 2:
            (a, left), (b, right) = map(self.multiple, parts)
            return number * a * b, primitive("mul", left, right)
        return 1.0, self.images[node]

    def erfc(self, erf: Expr, sign: float) -> Expr:
        """erfc(sign * a), for erf(a)."""
        factor, base = self.multiple(erf.args[0], _IN_POWERS)
        size = abs(factor)

        def scaled(scale: float) -> Expr:
            low = erfc_of_size(base, size, scale, self.precision.log2_erfc)
            high = primitive("sub", const(2.0 * scale), low)
            sides = (high, low) if sign * factor > 0 else (low, high)
            return primitive("where", base < 0, *sides)

        result = scaled(1.0)
        self.scaled[result] = scaled
        return result

    def of_sigmoid(self, node: Expr, tanh: Expr) -> Expr:
        """2 * s for 1 + tanh(a), with s = sigmoid(2 * a), and 4 * s * (1 - s) for 1 - tanh(a)^2."""
        factor, base = self.multiple(tanh.args[0])
        s = self.spelled("sigmoid", base * (2.0 * factor))

        def scaled(scale: float) -> Expr:
            return s * (2.0 * scale) if node.op == "add" else s * (4.0 * scale) * (1.0 - s)

        result = scaled(1.0)
        self.scaled[result] = scaled
        return result

    def of_pow(self, node: Expr) -> Expr:
        """Products for a whole exponent, or a power of two; as it is where the base may be negative
        or the exponent large.
        """
        base, exponent = (self.images[a] for a in node.args)
        number, root = constant(exponent), constant(base)
        if number is None and root is not None and root > 0.0 != math.log2(root):
            return self.power_of_two(exponent, math.log2(root))
        if number is None or not 0 < abs(number) <= MOST_EXPONENT:
            return primitive("pow", base, exponent)
        if number != int(number):
            return self.spelled("pow", base, exponent)
        factor = base if number > 0 else self.spelled("div", const(1.0), base)
        return whole_power(factor, int(abs(number)))

    def of_erf(self, node: Expr) -> Expr:
        """erf alone: its series near 0, where 1 - erfc would lose all digits."""
        factor, base = self.multiple(node.args[0], _IN_POWERS)
        low = erfc_of_size(base, abs(factor), 1.0, LOG2_ERFC_IN_ERF)
        high = primitive("sub", const(1.0), low)
        far = primitive("where", base < 0, primitive("neg", high), high)
        if factor < 0:
            far = primitive("neg", far)
        series = [c * factor ** (2 * i + 1) for i, c in enumerate(ERF_SERIES)]
        near = primitive("mul", base, polynomial(primitive("mul", base, base), series))
        is_near = primitive("abs", base) < ERF_SERIES_END / abs(factor)
        return primitive("where", is_near, near, far)

    def of_exp(self, node: Expr) -> Expr:
        """The square of a power of two, which is in range where its root's square is not: it takes
        three instructions, and a power of two down to the least numbers five.
        """
        bell = self.of_bell(node)
        if bell is not None:
            return bell
        factor, base = self.multiple(node.args[0])
        return self.power_of_two(base, factor * _LOG2_E)

    def power_of_two(self, base: Expr, factor: float) -> Expr:
        """2 to the power base * factor."""
        root = operation("exp2_flushed", primitive("mul", base, const(0.5 * factor)))
        return primitive("mul", root, root)

    def of_bell(self, node: Expr) -> Expr | None:
        """An exponential of minus a square, as erf's derivative has it: a power of two that takes
        factors in.
        """
        factor, base = self.multiple(node.args[0])
        is_square = base.op == "mul" and base.args[0] is base.args[1]
        if factor >= 0 or not is_square:
            return None

        def scaled(scale: float) -> Expr:
            exponent = primitive("mul", base, const(factor * _LOG2_E))
            if scale != 1.0:
                exponent = primitive("add", exponent, const(math.log2(scale)))
            return operation("exp2_flushed", exponent)

        result = scaled(1.0)
        self.scaled[result] = scaled
        return result

    # Choices.

    def of_where(self, node: Expr) -> Expr | None:
        """A bound as a minimum or maximum; a choice within a choice as one."""
        condition, *branches = (self.images[a] for a in node.args)
        inner = [self.is_inner(a) for a in node.args[1:]]
        bound = bounded(condition, *branches)
        return joined(condition, branches, inner) if bound is None else bound


_STEPS = ("floor", "ceil", "round", "trunc", "fmod", "to_int64")
_RULES: Mapping[str, Callable[[_Algebra, Expr], Expr | None]] = {
    "mul": _Algebra.of_product,
    "div": _Algebra.of_product,
    "add": _Algebra.of_sum,
    "sub": _Algebra.of_sum,
    "erf": _Algebra.of_erf,
    "exp": _Algebra.of_exp,
    "pow": _Algebra.of_pow,
    "where": _Algebra.of_where,
}
_WIDE = Precision(
    LOG2_ERFC_WIDE,
    {
        "mul": _Algebra.of_product,
        "div": _Algebra.of_quotient,
        "add": _Algebra.of_sum,
        "sub": _Algebra.of_sum,
        "exp": _Algebra.of_bell,
    },
)
