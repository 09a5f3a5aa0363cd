"""The expression graph: immutable, hash-consed nodes over about thirty scalar primitives and `reduce`.

An `Expr` is a number for every index of its extent, the set of axes it varies along. Axes count from the end, as
torch's do: -1 is the last. A pooled axis a is split in two: a itself counts windows, and its positive twin -a counts
positions within one. Broadcasting is the union of extents, so a per-channel bias is a node of extent {-4} and nothing else.

Why hash-consing: equal expressions are one object, so common subexpressions vanish as they are built, identity is
equality, and graphs of derivatives stay as small as hand-written ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from weakref import WeakValueDictionary

Extent = frozenset[int]
Number = float | int
Kind = Literal["number", "truth", "index"]

EVERYWHERE_EQUAL: Extent = frozenset()

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
CONNECTIVES = ("logical_and", "logical_or", "logical_not")
# Scalar primitives and how many arguments each takes. Everything a chain computes is made of these.
ARITY: Mapping[str, int] = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "neg": 1,
    "abs": 1,
    "exp": 1,
    "expm1": 1,
    "log": 1,
    "log1p": 1,
    "sqrt": 1,
    "rsqrt": 1,
    "erf": 1,
    "tanh": 1,
    "sigmoid": 1,
    "sin": 1,
    "cos": 1,
    "pow": 2,
    "minimum": 2,
    "maximum": 2,
    "where": 3,
    **dict.fromkeys(COMPARISONS, 2),
    "logical_and": 2,
    "logical_or": 2,
    "logical_not": 1,
}
# What `reduce` can do along axes. argmax gives the position, in index order, of the first maximum (a NaN counts as one).
REDUCE_KINDS = ("sum", "mean", "variance", "max", "argmax", "pick")


class Expr:
    """A node: an operation, its arguments, its constants, and what follows from them (extent, rank, kind).

    rank is the number of axes of the tensor that the node stands for; None while a chain's function is being traced,
    when no tensor is known yet.
    """

    __slots__ = ("__weakref__", "args", "attrs", "extent", "kind", "op", "rank")

    op: str
    args: tuple[Expr, ...]
    attrs: tuple[object, ...]
    extent: Extent
    rank: int | None
    kind: Kind

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an Expr is immutable; build another")

    @property
    def axes(self) -> tuple[int, ...]:
        """Every axis of the tensor this node stands for, first to last: (-rank, ..., -1)."""
        if self.rank is None:
            raise TypeError("axes are known only once the chain meets a tensor")
        return tuple(range(-self.rank, 0))

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value while the chain is built; use where(condition, a, b)")

    def __add__(self, other: Expr | Number) -> Expr:
        return primitive("add", self, other)

    def __radd__(self, other: Number) -> Expr:
        return primitive("add", other, self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return primitive("sub", self, other)

    def __rsub__(self, other: Number) -> Expr:
        return primitive("sub", other, self)

    def __mul__(self, other: Expr | Number) -> Expr:
        return primitive("mul", self, other)

    def __rmul__(self, other: Number) -> Expr:
        return primitive("mul", other, self)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return primitive("div", self, other)

    def __rtruediv__(self, other: Number) -> Expr:
        return primitive("div", other, self)

    def __pow__(self, exponent: Expr | Number) -> Expr:
        return primitive("pow", self, exponent)

    def __neg__(self) -> Expr:
        return primitive("neg", self)

    def __abs__(self) -> Expr:
        return primitive("abs", self)

    def __lt__(self, other: Expr | Number) -> Expr:
        return primitive("lt", self, other)

    def __le__(self, other: Expr | Number) -> Expr:
        return primitive("le", self, other)

    def __gt__(self, other: Expr | Number) -> Expr:
        return primitive("gt", self, other)

    def __ge__(self, other: Expr | Number) -> Expr:
        return primitive("ge", self, other)

    def __and__(self, other: Expr) -> Expr:
        return primitive("logical_and", self, other)

    def __or__(self, other: Expr) -> Expr:
        return primitive("logical_or", self, other)

    def __invert__(self) -> Expr:
        return primitive("logical_not", self)

    def __repr__(self) -> str:
        return show(self)


_interned: WeakValueDictionary[tuple[object, ...], Expr] = WeakValueDictionary()


def make(
    op: str,
    args: tuple[Expr, ...] = (),
    attrs: tuple[object, ...] = (),
    *,
    extent: Extent = EVERYWHERE_EQUAL,
    rank: int | None = 0,
    kind: Kind = "number",
) -> Expr:
    """The one node with these parts; every Expr is born here."""
    exact = tuple(struct.pack("d", a) if isinstance(a, float) else a for a in attrs)
    key = (op, tuple(map(id, args)), exact, extent, rank)
    node = _interned.get(key)
    if node is None:
        node = object.__new__(Expr)
        for name, value in (
            ("op", op),
            ("args", args),
            ("attrs", attrs),
            ("extent", extent),
            ("rank", rank),
            ("kind", kind),
        ):
            object.__setattr__(node, name, value)
        _interned[key] = node
    return node


# Leaves.


def const(value: Number) -> Expr:
    """A number written in the chain."""
    return make("const", attrs=(float(value),))


def tensor(name: str, extent: Iterable[int], rank: int | None, kind: Kind = "number") -> Expr:
    """A tensor passed at call time, which varies along `extent`."""
    return make("input", attrs=(name,), extent=frozenset(extent), rank=rank, kind=kind)


def count(axes: Iterable[int]) -> Expr:
    """The number of index values along `axes`, known at run time, as a number."""
    return make("count", attrs=(tuple(sorted(axes)),))


def position(axes: Iterable[int], rank: int | None) -> Expr:
    """Where in the index order of `axes` one stands: 0 for the first."""
    ordered = tuple(sorted(axes, reverse=True))  # window axes: the larger is the outer
    return make("position", attrs=(ordered,), extent=frozenset(axes), rank=rank, kind="index")


# Inner nodes.


def primitive(op: str, *operands: Expr | Number) -> Expr:
    """A scalar primitive applied index by index; extents are united."""
    args = tuple(a if isinstance(a, Expr) else const(a) for a in operands)
    if len(args) != ARITY[op]:
        raise TypeError(f"{op} takes {ARITY[op]} arguments, got {len(args)}")
    ranks = [a.rank for a in args]
    known = [r for r in ranks if r is not None]
    rank = None if None in ranks else max(known, default=0)
    kind: Kind = "truth" if op in COMPARISONS or op in CONNECTIVES else "number"
    if op == "where" and all(a.kind == "index" for a in args[1:]):
        kind = "index"
    extent = frozenset[int]().union(*(a.extent for a in args))
    return make(op, args, extent=extent, rank=rank, kind=kind)


def reduce(kind: str, axes: Iterable[int], *args: Expr) -> Expr:
    """Combine along `axes`, which stay as axes of size one. `pick` takes (value, index) and gives the value there.

    Axes along which the argument does not vary cost nothing: a mean over them is the argument, a sum counts them.
    """
    if kind not in REDUCE_KINDS:
        raise ValueError(f"no such reduction: {kind}")
    value, wanted = args[0], frozenset(axes)
    present = wanted & value.extent
    absent = wanted - value.extent
    if not present and kind in ("sum", "mean", "max", "pick"):
        reduced = value
    elif not present and kind == "variance":
        return const(0.0)
    else:
        kind_of_result: Kind = "index" if kind == "argmax" else "number"
        reduced = make(
            "reduce",
            args,
            (kind, tuple(sorted(present))),
            extent=value.extent - present,
            rank=value.rank,
            kind=kind_of_result,
        )
    return primitive("mul", reduced, count(absent)) if kind == "sum" and absent else reduced


def reduce_sum(x: Expr, axes: Iterable[int]) -> Expr:
    """The sum of x along axes."""
    return reduce("sum", axes, x)


def reduce_mean(x: Expr, axes: Iterable[int]) -> Expr:
    """The mean of x along axes."""
    return reduce("mean", axes, x)


def reduce_variance(x: Expr, axes: Iterable[int]) -> Expr:
    """The variance of x along axes, divided by the count (torch's correction=0)."""
    return reduce("variance", axes, x)


def reduce_max(x: Expr, axes: Iterable[int]) -> Expr:
    """The maximum of x along axes; the gradient goes to the first index that has it, as max-pooling's does."""
    return reduce("max", axes, x)


def windows(x: Expr, axes: Iterable[int]) -> Extent:
    """The positions within the pooling windows of `axes`; only a chain whose last step pools them has these."""
    return frozenset(-a for a in axes)


# Walking and rewriting.


def topological(roots: Iterable[Expr]) -> list[Expr]:
    """Every node below the roots, arguments before users, in an order that depends only on the graph."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(tuple(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args) if a not in seen)
    return order


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other arguments, its extent worked out anew."""
    if args == node.args:
        return node
    if node.op in ARITY:
        return primitive(node.op, *args)
    if node.op == "reduce":
        kind, axes = reduction(node)
        return reduce(kind, axes, *args)
    return make(node.op, args, node.attrs, extent=node.extent, rank=node.rank, kind=node.kind)


def rewrite(roots: Iterable[Expr], rule: Callable[[Expr], Expr]) -> list[Expr]:
    """The roots with `rule` applied to every node, arguments first."""
    roots = tuple(roots)
    new: dict[Expr, Expr] = {}
    for node in topological(roots):
        new[node] = rule(rebuild(node, tuple(new[a] for a in node.args)))
    return [new[r] for r in roots]


def substitute(roots: Iterable[Expr], replacements: Mapping[Expr, Expr]) -> list[Expr]:
    """The roots with some nodes replaced; what stands below a replaced node is not visited."""
    new = dict(replacements)

    def visit(node: Expr) -> Iterator[Expr]:
        if node not in new:
            yield from (a for a in node.args if a not in new)

    out = []
    for root in roots:
        stack = [root]
        while stack:
            node = stack[-1]
            pending = list(visit(node))
            if pending:
                stack.extend(pending)
                continue
            stack.pop()
            if node not in new:
                new[node] = rebuild(node, tuple(new[a] for a in node.args))
        out.append(new[root])
    return out


def reduction(node: Expr) -> tuple[str, Extent]:
    """(kind, axes) of a reduce node."""
    kind, axes = node.attrs
    assert isinstance(kind, str)
    assert isinstance(axes, tuple)
    return kind, frozenset(axes)


def constant(node: Expr) -> float | None:
    """The value of a const node, None for any other."""
    if node.op != "const":
        return None
    value = node.attrs[0]
    assert isinstance(value, float)
    return value


def name_of(node: Expr) -> str:
    """The name of an input node."""
    name = node.attrs[0]
    assert isinstance(name, str)
    return name


def axes_of(node: Expr) -> tuple[int, ...]:
    """The axes of a count or position node."""
    axes = node.attrs[0]
    assert isinstance(axes, tuple)
    return axes


def inputs(roots: Iterable[Expr]) -> list[Expr]:
    """The input nodes below the roots, in the order they are met."""
    return [node for node in topological(roots) if node.op == "input"]


@dataclass(frozen=True)
class Graph:
    """Named outputs over named inputs: what is differentiated, scheduled and built."""

    inputs: tuple[Expr, ...]
    outputs: tuple[tuple[str, Expr], ...]

    @property
    def roots(self) -> tuple[Expr, ...]:
        """The output expressions, in order."""
        return tuple(expr for _, expr in self.outputs)


def show(root: Expr) -> str:
    """One line of nested calls, for messages and tests."""
    if root.op == "const":
        return format(root.attrs[0], "g")
    if root.op == "input":
        return name_of(root)
    if root.op in ("count", "position"):
        return f"{root.op}{list(axes_of(root))}"
    inside = ", ".join(show(a) for a in root.args)
    if root.op == "reduce":
        kind, axes = reduction(root)
        return f"{kind}{sorted(axes)}({inside})"
    return f"{root.op}({inside})"


def verify(graph: Graph) -> None:
    """Raise AssertionError where a graph breaks the rules that every later stage relies on."""
    declared = set(graph.inputs)
    for node in topological(graph.roots):
        if node.op == "input":
            assert node in declared, f"{node} is not among the graph's inputs"
        elif node.op in ARITY:
            assert node.extent == frozenset[int]().union(*(a.extent for a in node.args))
            wants_truth = node.op in CONNECTIVES
            assert all((a.kind == "truth") == wants_truth for a in node.args) or node.op == "where"
        elif node.op == "reduce":
            kind, axes = reduction(node)
            assert axes, f"{node} reduces nothing"
            assert axes <= node.args[0].extent
            assert not axes & node.extent
            assert (kind == "pick") == (len(node.args) == 2)
        else:
            assert node.op in ("const", "count", "position"), f"{node.op} cannot be scheduled"
