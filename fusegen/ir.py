"""The expression graph: immutable, hash-consed nodes over scalar primitives and `reduce`.

An `Expr` is a number for every index of its extent, the set of axes it varies along. Axes count
from the end, as torch's do: -1 is the last. A pooled axis a is split in two: a itself counts
windows, and its positive twin -a counts positions within one. Broadcasting is the union of extents,
so a per-channel bias is a node of extent {-4} and nothing else.

Why hash-consing: equal expressions are one object, so common subexpressions vanish as they are
built, identity is equality, and graphs of derivatives stay as small as hand-written ones.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from weakref import WeakValueDictionary

from fusegen.arity import (
    ARITY,
    COMPARISONS,
    CONNECTIVES,
    MADE,
    OF_WHOLES,
    QUOTIENT,
    REDUCE_KINDS,
    Kind,
)
from fusegen.errors import ChainError
from fusegen.locking import open_lock

Extent = frozenset[int]
Number = float | int

# Where windows of an axis a overlap or cross the edge, the positions within them are SLIDING - a.
# Reductions along them skip what is outside the tensor; outputs add up the windows on an element.
SLIDING = 1000


def _unary(op: str) -> Callable[[Expr], Expr]:
    return lambda x: primitive(op, x)


def _binary(op: str) -> Callable[[Expr, Expr | Number], Expr]:
    return lambda x, other: primitive(op, x, other)


def _reflected(op: str) -> Callable[[Expr, Number], Expr]:
    return lambda x, other: primitive(op, other, x)


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Expr:
    """A node: an operation, its arguments, its constants, and what follows from them.

    rank is the number of axes of the tensor that the node stands for; None while a chain's function
    is being traced, when no tensor is known yet. Nodes are made by the functions below, never by
    calling the class.
    """

    op: str
    args: tuple[Expr, ...]
    attrs: tuple[object, ...]
    extent: Extent
    rank: int | None
    kind: Kind

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __pow__, __rpow__ = _binary("pow"), _reflected("pow")
    __neg__, __abs__ = _unary("neg"), _unary("abs")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __and__, __or__ = _binary("logical_and"), _binary("logical_or")
    __invert__ = _unary("logical_not")

    @property
    def axes(self) -> tuple[int, ...]:
        """Every axis of the tensor this node stands for, first to last: (-rank, ..., -1)."""
        if self.rank is None:
            raise TypeError("axes are known only once the chain meets a tensor")
        return tuple(range(-self.rank, 0))

    def __bool__(self) -> bool:
        raise TypeError(
            "an Expr has no truth value while the chain is built; use where(condition, a, b)"
        )

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> tuple[object, ...]:
        again = partial(make, extent=self.extent, rank=self.rank, kind=self.kind)
        return again, (self.op, self.args, self.attrs)


interned: WeakValueDictionary[tuple[object, ...], Expr] = WeakValueDictionary()
interning = open_lock()


def make(
    op: str,
    args: tuple[Expr, ...] = (),
    attrs: tuple[object, ...] = (),
    *,
    extent: Extent = frozenset(),
    rank: int | None = 0,
    kind: Kind = "number",
) -> Expr:
    """The one node with these parts; every Expr is born here."""
    # By their bits, since 0.0 equals -0.0, and a NaN does not equal itself.
    exact = tuple(struct.pack("d", a) if isinstance(a, float) else a for a in attrs)
    key = (op, args, exact, extent, rank, kind)
    with interning:
        node = interned.get(key)
        if node is None:
            node = interned[key] = Expr(op, args, attrs, extent, rank, kind)
    return node


def const(value: object, kind: Kind = "number") -> Expr:
    """A number written in the chain, or a position."""
    if not isinstance(value, Real):  # a tensor of one element too, which would not train
        raise TypeError(
            f"got a {type(value).__name__}, wanted an expression, a parameter or a number"
        )
    return make("const", attrs=(float(value),), kind=kind)


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


def primitive(op: str, *operands: Expr | Number) -> Expr:
    """A scalar primitive applied index by index; extents are united."""
    if any(isinstance(a, bool) for a in operands):
        raise TypeError(f"{op}: got True or False; write fusegen.eq(a, b): a == b compares objects")
    args = tuple(a if isinstance(a, Expr) else const(a) for a in operands)
    if len(args) != ARITY[op]:
        raise TypeError(f"{op} takes {ARITY[op]} arguments, got {len(args)}")
    ranks = [a.rank for a in args if a.rank is not None]
    is_traced = len(ranks) < len(args)
    if not is_traced:
        check_kinds(op, args)
    kind = MADE.get(op, "truth" if op in COMPARISONS or op in CONNECTIVES else "number")
    same = {a.kind for a in args[op == "where" :] if not is_integer(a)}
    if same == {"whole"} and op in _WHOLES_ALIKE:
        return _WHOLES_ALIKE[op](*args)
    if op == "detach" and args[0].kind not in ("number", "noise"):
        return args[0]  # which has no gradient anyway
    if (same == {"index"} and op == "where") or (same == {"whole"} and op in OF_WHOLES):
        (kind,) = same
    rank = None if is_traced else max(ranks, default=0)
    return make(op, args, extent=union(args), rank=rank, kind=kind)


def quotient(a: Expr, b: Expr | Number) -> Expr:
    """How often an integer has a written one in it, cut off behind the point."""
    number = constant(b) if isinstance(b, Expr) else b
    if not number:
        raise ZeroDivisionError("integers are divided by a number other than 0, and by no tensor")
    return -a if number == -1 else primitive(QUOTIENT, a, number)


# Of integers, what is made of that which gives integers.
_WHOLES_ALIKE: Mapping[str, Callable[..., Expr]] = {
    "minimum": lambda a, b: primitive("where", primitive("lt", a, b), a, b),
    "maximum": lambda a, b: primitive("where", primitive("gt", a, b), a, b),
    "abs": lambda a: primitive("maximum", a, -a),
    "sign": lambda a: primitive(
        "where", primitive("lt", a, 0), a * 0 - 1, primitive("minimum", a, 1)
    ),
    "fmod": lambda a, b: a - quotient(a, b) * b,
    **dict.fromkeys(("floor", "ceil", "round", "trunc"), lambda a: a),
}


def is_integer(node: Expr) -> bool:
    """Whether it is a written number, and an integer."""
    return node.op == "const" and node.kind == "number" and node.attrs[0] % 1 == 0  # type: ignore[operator]


def union(args: Iterable[Expr]) -> Extent:
    """All axes that any of some values varies along."""
    return frozenset[int]().union(*(a.extent for a in args))


def check_kinds(op: str, args: Sequence[Expr]) -> None:
    """Raise ChainError for a condition in the place of a number, or the other way round."""
    for i, arg in enumerate(args):
        wants_truth = op in CONNECTIVES or (op == "where" and i == 0)
        if (arg.kind == "truth") != wants_truth:
            wanted = "a condition such as x > 0" if wants_truth else "numbers, as where(it, 1, 0)"
            got = "a condition" if arg.kind == "truth" else "numbers"
            raise ChainError(f"{op}: got {got}, {arg}, wanted {wanted}")


def reduce(kind: str, axes: Iterable[int], *args: Expr) -> Expr:
    """Combine along `axes`; `pick` takes (value, index) and gives the value there.

    Axes along which the argument does not vary cost nothing: a mean over them is the argument, a
    sum counts them. Only argmax and pick keep such axes: an index is a position among all of them.
    """
    if kind not in REDUCE_KINDS:
        raise ValueError(f"no such reduction: {kind}")
    value, wanted = args[0], frozenset(axes)
    present = wanted & value.extent
    beyond = {a for a in wanted - present if a > SLIDING}
    if beyond and kind == "sum":  # windows differ in how many of their positions are inside
        return reduce(kind, wanted - beyond, value * covered_by(beyond, value.rank))
    if not present and kind == "variance":
        return primitive("sub", value, value)  # 0, but for what is not finite
    if not present and kind == "argmax":
        return const(0, "index")
    if not present:
        return primitive("mul", value, count(wanted)) if kind == "sum" and wanted else value
    kept = wanted if kind in ("argmax", "pick") else present
    reduced = make(
        "reduce",
        args,
        (kind, tuple(sorted(kept))),
        extent=union(args) - wanted,
        rank=value.rank,
        kind="index" if kind == "argmax" else value.kind if kind == "pick" else "number",
    )
    absent = wanted - present
    return primitive("mul", reduced, count(absent)) if kind == "sum" and absent else reduced


def reduce_sum(x: Expr, axes: Iterable[int]) -> Expr:
    """The sum of x along axes."""
    return reduce("sum", axes, x)


def repeated(value: Expr, axes: Iterable[int]) -> Expr:
    """A number, said to vary along `axes`, so that a tensor of it has them."""
    extent = value.extent.union(axes)
    if extent == value.extent:
        return value
    return make("repeated", (value,), (tuple(sorted(axes)),), extent=extent, rank=value.rank)


def once(value: Expr, axes: Iterable[int]) -> Expr:
    """A value of the elements that windows along `axes` share: one that counts once for each
    element, not once for each window that has it. axes are the sliding axes and their twins.
    """
    ordered = tuple(sorted(axes))
    extent = value.extent.union(ordered)
    return make("once", (value,), (ordered,), extent=extent, rank=value.rank, kind=value.kind)


def covered_by(within: Iterable[int], rank: int | None, *, is_padded: bool = False) -> Expr:
    """How many positions windows have along `within`: in the tensor, or in its padding too."""
    ordered = tuple(sorted(within))
    extent = frozenset(SLIDING - w for w in ordered)
    return make("covered", attrs=(ordered, is_padded), extent=extent, rank=rank)


def topological(roots: Iterable[Expr], stop: Container[Expr] = ()) -> list[Expr]:
    """Every node below the roots, arguments before users; the order depends only on the graph.

    What is in `stop` is left out, with what only it needs.
    """
    order: dict[Expr, None] = {}
    entered: set[Expr] = set()
    stack = [*roots][::-1]
    while stack:
        node = stack.pop()
        if node in entered:  # now its arguments are there, or it is met again
            order[node] = None
        elif node not in stop:
            entered.add(node)
            stack.append(node)
            stack += [a for a in node.args[::-1] if a not in entered]
    return [*order]


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other arguments, its extent worked out anew."""
    if args == node.args:
        return node
    if node.op in ARITY:
        return primitive(node.op, *args)
    if node.op == "reduce":
        kind, axes = reduction(node)
        return reduce(kind, axes, *args)
    if node.op == "repeated":
        return repeated(args[0], axes_of(node))
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
    roots = tuple(roots)
    new = dict(replacements)
    for node in topological(roots, stop=replacements):
        new[node] = rebuild(node, tuple(new[a] for a in node.args))
    return [new[r] for r in roots]


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
    """The axes of a count, position, covered, once or repeated node."""
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


_LONGEST_SHOWN = 500  # nodes: a shared one is written wherever it is used, perhaps without end


def show(root: Expr) -> str:
    """One line of nested calls, for messages and tests; "..." where it would be very long."""
    left = iter(range(_LONGEST_SHOWN))

    def text(node: Expr) -> str:
        if next(left, None) is None:
            return "..."
        if node.op == "const":
            return format(node.attrs[0], "g")
        if node.op == "input":
            return name_of(node)
        if node.op in ("count", "position", "covered"):
            return f"{node.op}{list(axes_of(node))}"
        name = f"{node.attrs[0]}{sorted(reduction(node)[1])}" if node.op == "reduce" else node.op
        return f"{name}({', '.join(map(text, node.args))})"

    return text(root)
