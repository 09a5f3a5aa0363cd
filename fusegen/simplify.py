"""The algebra that makes derived gradients as good as hand-written ones.

Forward, every value is kept to the last bit: nothing is reassociated, and a constant is folded only
where single precision holds it exactly. Three things hold up to rounding instead. exp of a
log_softmax is the softmax. A factor leaves a sum along whose axes it does not vary. It leaves a
mean as well, and what is added to such a product leaves both, where that is of a difference and
nothing else uses their elements, and a sum of its products with others where the sum of those is
asked for as well; but not what is added to anything else, as the two may cancel at each element,
unless it is the logarithm in a log_softmax. And autodiff's NO_SHARE stays zero whatever it is
multiplied with, so a branch that was not taken gives its derivative no NaN through 0 * inf.

Why passes: most rules put one node in the place of one, which never makes a graph larger. A rule
that needs more may spend only what dies with its node, nodes that have no other user; and these are
known for the graph as it stood before the pass. Passes end because each rule takes a node away, or
moves a factor, a sign or a condition one way only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fusegen import arity, ir
from fusegen.autodiff import NO_SHARE
from fusegen.ir import Expr, Extent, Graph, const, constant, primitive
from fusegen.patterns import is_log_softmax, placed, unshifted


def simplify(graph: Graph) -> Graph:
    """The same outputs, written shorter, over the inputs that they still need."""
    mapping = simplification(graph.roots)
    outputs = tuple((name, mapping[expr]) for name, expr in graph.outputs)
    used = set(ir.inputs(expr for _, expr in outputs))
    return Graph(tuple(i for i in graph.inputs if i in used), outputs)


def simplification(roots: tuple[Expr, ...]) -> dict[Expr, Expr]:
    """Every node below the roots with what it becomes."""
    mapping = {node: node for node in ir.topological(roots)}
    current = roots
    while True:
        step = _Pass(current).images
        if all(step[root] is root for root in current):
            return mapping
        mapping = {node: step.get(image, image) for node, image in mapping.items()}
        current = tuple(step[root] for root in current)


class _Mask(NamedTuple):
    """A value that is there only where a condition holds, or only where it does not."""

    condition: Expr
    value: Expr
    holds: bool
    choice: Expr  # the `where` that makes it so


class _Pass:
    """One walk over a graph, arguments first; `images` has what each node becomes."""

    def __init__(self, roots: tuple[Expr, ...]) -> None:
        self.images: dict[Expr, Expr] = {}
        self.settled: dict[Expr, Expr] = {}
        self.users: Counter[Expr] = Counter()
        self.using: Counter[Expr] = Counter()
        order = ir.topological(roots)
        self.before = set(order)
        using = Counter(a for node in order for a in dict.fromkeys(node.args))
        users = Counter(roots) + using
        for node in order:
            image = self.again(node, tuple(self.images[a] for a in node.args))
            self.images[node] = image
            self.users[image] += users[node]
            self.using[image] += using[node]

    def again(self, node: Expr, args: tuple[Expr, ...]) -> Expr:
        """The node on other arguments, settled."""
        if node.op == "reduce":
            return self.reduce(*ir.reduction(node), *args)
        return self.settle(ir.rebuild(node, args))

    def build(self, op: str, *args: Expr) -> Expr:
        """A primitive on settled arguments, settled: no rule applies to it or below it."""
        return self.settle(primitive(op, *args))

    def reduce(self, kind: str, axes: Extent, *args: Expr) -> Expr:
        """A reduction of settled arguments, settled."""
        node = ir.reduce(kind, axes, *args)
        if node.op == "mul" and node not in args:  # a sum, counted along what does not vary
            return self.build("mul", self.settle(node.args[0]), node.args[1])
        return self.settle(node)

    def settle(self, node: Expr) -> Expr:
        """What a node on settled arguments becomes."""
        if node not in self.settled:
            rule = _RULES.get(node.op)
            result = rule(self, node) if rule else node
            self.settled[node] = self.settled[result] = result
        return self.settled[node]

    def dies_with_its_user(self, node: Expr) -> bool:
        """Whether at most one node uses it."""
        return self.users[node] <= 1

    def is_for_one(self, node: Expr) -> bool:
        """Whether at most one node uses it, whatever is asked for besides."""
        return self.using[node] <= 1

    def mask(self, node: Expr) -> _Mask | None:
        """The node as a mask, a product's or quotient's drawn into its value."""
        if node.op == "where":
            condition, yes, no = node.args
            if no is NO_SHARE:
                return _Mask(condition, yes, True, node)
            return _Mask(condition, no, False, node) if yes is NO_SHARE else None
        if node.op in ("neg", "mul", "div") and self.dies_with_its_user(node):
            for i, arg in enumerate(node.args[:1] if node.op == "div" else node.args):
                if (found := self.mask(arg)) is not None:
                    args = (*node.args[:i], found.value, *node.args[i + 1 :])
                    return found._replace(value=self.build(node.op, *args))
        return None

    def united(self, a: Expr, b: Expr) -> Expr | None:
        """a + b where both are masks by one condition."""
        left, right = self.mask(a), self.mask(b)
        if left is None or right is None or left.condition is not right.condition:
            return None
        if left.holds != right.holds:
            yes, no = (left, right) if left.holds else (right, left)
            return self.build("where", left.condition, yes.value, no.value)
        if any(self.dies_with_its_user(m.choice) for m in (left, right)):
            both = self.build("add", left.value, right.value)
            sides = (both, NO_SHARE) if left.holds else (NO_SHARE, both)
            return self.build("where", left.condition, *sides)
        return None


def _is_single(value: float) -> bool:
    mantissa, exponent = math.frexp(value)
    return (mantissa * 2**24).is_integer() and abs(exponent) < 120


_FOLDS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def _folded(node: Expr) -> Expr | None:
    """The result of constants, where rounding it to single precision changes nothing."""
    a, b = (constant(arg) for arg in node.args)
    if a is None or b is None or not (_is_single(a) and _is_single(b)):
        return None
    result = _FOLDS[node.op](a, b)
    return const(result) if _is_single(result) else None


# Adding it changes nothing, while adding 0.0 turns -0.0 into 0.0; subtracting is the reverse.
_NEUTRAL_TO_ADD = (NO_SHARE, const(-0.0))
_NEUTRAL_TO_SUBTRACT = (NO_SHARE, const(0.0))


def _add(this: _Pass, node: Expr) -> Expr:
    a, b = node.args
    for term, other in ((a, b), (b, a)):
        if term in _NEUTRAL_TO_ADD:
            return other
    if (result := _folded(node)) is not None or (result := this.united(a, b)) is not None:
        return result
    for total, term in ((a, b), (b, a)):
        if total.op == "add" and this.dies_with_its_user(total):
            for part, rest in (total.args, total.args[::-1]):
                # Exact: at every index, one of the two that are united is no share at all.
                if (union := this.united(part, term)) is not None:
                    return this.build("add", rest, union)
    for term, other in ((b, a), (a, b)):
        if term.op == "neg":
            return this.build("sub", other, term.args[0])
    return node


def _sub(this: _Pass, node: Expr) -> Expr:
    a, b = node.args
    if b in _NEUTRAL_TO_SUBTRACT:
        return a
    if (result := _folded(node)) is not None:
        return result
    if a in _NEUTRAL_TO_ADD:
        return this.build("neg", b)
    if b.op == "neg":
        return this.build("add", a, b.args[0])
    mask = this.mask(b)
    if mask is not None and this.dies_with_its_user(mask.choice) and this.dies_with_its_user(b):
        union = this.united(a, this.build("neg", b))
        return node if union is None else union
    return node


def _mul(this: _Pass, node: Expr) -> Expr:
    if NO_SHARE in node.args:
        return NO_SHARE
    if (result := _folded(node)) is not None:
        return result
    a, b = node.args
    for factor, other in ((a, b), (b, a)):
        number = constant(factor)
        if number == 1.0:
            return other
        if number == -1.0:
            return this.build("neg", other)
        if number is not None and other.op == "neg":
            return this.build("mul", other.args[0], const(-number))
    swapped = primitive("mul", b, a)
    if swapped in this.settled:  # the same to the last bit
        return this.settled[swapped]
    return _without_signs(this, node)


def _div(this: _Pass, node: Expr) -> Expr:
    a, b = node.args
    number = constant(b)
    if number == 1.0 or a is NO_SHARE:
        return a
    if number == -1.0:
        return this.build("neg", a)
    if a.op == "neg" and number is not None:
        return this.build("div", a.args[0], const(-number))
    if number is not None and _has_exact_inverse(number):
        return this.build("mul", a, const(1.0 / number))
    return _without_signs(this, node)


def _has_exact_inverse(number: float) -> bool:
    """Whether it is a power of two whose inverse single precision holds as well."""
    return abs(math.frexp(number)[0]) == 0.5 and _is_single(number)


def _without_signs(this: _Pass, node: Expr) -> Expr:
    """A product or quotient with the signs of its arguments cancelled, or outside."""
    bare = [arg.args[0] if arg.op == "neg" else arg for arg in node.args]
    signs = [arg for arg in node.args if arg.op == "neg"]
    if len(signs) == 2:
        return this.build(node.op, *bare)
    if signs and signs[0].extent == node.extent and this.dies_with_its_user(signs[0]):
        return this.build("neg", this.build(node.op, *bare))
    return node


def _neg(this: _Pass, node: Expr) -> Expr:
    (a,) = node.args
    number = constant(a)
    if number is not None:
        return a if a is NO_SHARE else const(-number)
    if a.op == "neg":
        return a.args[0]
    if a.op == "mul":
        for i, other in enumerate(reversed(a.args)):
            number = constant(a.args[i])
            if number is not None:
                return this.build("mul", other, const(-number))
    return node


def _where(this: _Pass, node: Expr) -> Expr:
    condition, yes, no = node.args
    if yes is no:
        return yes
    if condition.op in ("lt", "gt") and condition.args[0] is condition.args[1]:
        return no
    if condition.op == "logical_not":
        return this.build("where", condition.args[0], no, yes)
    if yes.op == "where" and yes.args[0] is condition:
        return this.build("where", condition, yes.args[1], no)
    if no.op == "where" and no.args[0] is condition:
        return this.build("where", condition, yes, no.args[2])
    return node


def _logical_not(this: _Pass, node: Expr) -> Expr:
    (a,) = node.args
    return a.args[0] if a.op == "logical_not" else node


def _exp(this: _Pass, node: Expr) -> Expr:
    """That of a log_softmax is the softmax."""
    (difference,) = node.args
    if is_log_softmax(difference):
        (total,) = difference.args[1].args
        return this.build("div", total.args[0], total)
    return node


def _pow(this: _Pass, node: Expr) -> Expr:
    base, exponent = node.args
    return base if constant(exponent) == 1.0 else node


def _cast(this: _Pass, node: Expr) -> Expr:
    (a,) = node.args
    return a if a is NO_SHARE or a.op == node.op else node


def _reduce(this: _Pass, node: Expr) -> Expr:
    kind, axes = ir.reduction(node)
    total: Expr | None = None
    if kind == "sum":
        total = _sum(this, node.args[0], axes)
    elif kind == "mean" and this.is_for_one(node.args[0]):
        total = _without_invariants(this, kind, node.args[0], axes)
    if total is not None:
        return total
    found = placed(node.args[0])
    if kind == "pick" and found is not None:
        value, index, window = found
        if index is node.args[1] and window == axes:
            return this.reduce("pick", axes, value, index)
    first, *where = node.args
    varying = [a for a in first.args if a.extent & axes]
    is_named = kind == "pick" and where[0].op == "input" and max(axes) < 0
    # Of a linear map of one value: the map of what is picked of it, and 0 where that is nothing.
    if is_named and len(varying) == 1 and first.op in (*arity.CASTS, "neg", "add", "sub", "mul"):
        picked = {varying[0]: this.reduce("pick", axes, varying[0], *where)}
        return this.build(first.op, *(picked.get(a, a) for a in first.args))
    return node


def _sum(this: _Pass, value: Expr, axes: Extent) -> Expr | None:
    """The sum with a sign or an invariant factor outside, or of the winners alone."""
    if value.op == "reduce" and ir.reduction(value)[0] == "sum":
        return this.reduce("sum", axes | ir.reduction(value)[1], value.args[0])
    if value.op == "repeated":
        total = this.reduce("sum", axes, value.args[0])
        return this.settle(ir.repeated(total, value.extent - axes))
    if (less := _without_invariants(this, "sum", value, axes)) is not None:
        return less
    if value.op == "mul" and this.is_for_one(value):
        for inner, other in (value.args, value.args[::-1]):
            if (less := _of_products(this, value, inner, other, axes)) is not None:
                return less
    if (found := placed(value)) is not None:
        # Exactly one position of a window is the winner's, so its sum is the value there.
        placed_value, index, window = found
        if window <= axes:
            picked = this.reduce("pick", window, placed_value, index)
            return this.reduce("sum", axes - window, picked)
    return None


def _of_products(this: _Pass, value: Expr, inner: Expr, other: Expr, axes: Extent) -> Expr | None:
    """The sum of inner * other, with an invariant factor of inner outside, or what it is shifted
    by.
    """
    if inner.op in ("neg", "mul", "div"):
        for i, part in enumerate(inner.args[:1] if inner.op == "div" else inner.args):
            outside = [a for j, a in enumerate(inner.args) if j != i]
            # A number is no reason to compute elements again that are asked for.
            is_worth = this.dies_with_its_user(value) or any(a.extent for a in outside)
            if is_worth and not any(a.extent & axes for a in outside):
                total = this.reduce("sum", axes, this.build("mul", part, other))
                return this.build(inner.op, total, *outside)
    is_asked = ir.reduce("sum", axes, other) in this.before
    found = unshifted(inner, axes) if is_asked or is_log_softmax(inner) else None
    if found is None:
        return None
    total = this.reduce("sum", axes, this.build("mul", found[0], other))
    shift = this.build("mul", found[1], this.reduce("sum", axes, other))
    return this.build(inner.op, total, shift)


def _without_invariants(this: _Pass, kind: str, value: Expr, axes: Extent) -> Expr | None:
    """The sum or mean with a sign, an invariant factor or an affine map's shift outside."""
    if value.op == "neg":
        return this.build("neg", this.reduce(kind, axes, value.args[0]))
    if value.op in ("mul", "div"):
        a, b = value.args
        if not b.extent & axes:
            return this.build(value.op, this.reduce(kind, axes, a), b)
        if not a.extent & axes and value.op == "mul":
            return this.build("mul", a, this.reduce(kind, axes, b))
    found = unshifted(value, axes) if value.op == "add" and this.is_for_one(value) else None
    return found and this.build("add", *(this.reduce(kind, axes, part) for part in found))


_RULES: Mapping[str, Callable[[_Pass, Expr], Expr]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "exp": _exp,
    "pow": _pow,
    "where": _where,
    "logical_not": _logical_not,
    "reduce": _reduce,
    **dict.fromkeys(arity.CASTS, _cast),
}
