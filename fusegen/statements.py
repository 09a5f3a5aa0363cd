"""Expressions as statements: one function of scalars, a comment a step, and names that tell what
a value is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from fusegen import arity, ir
from fusegen.ir import Expr
from fusegen.lower import Mark, remarked
from fusegen.target import STORAGE, Target

# What a value is called that no step named.
_NOUNS = {
    "add": "sum",
    "sub": "difference",
    "mul": "product",
    "div": "quotient",
    "neg": "negated",
    "where": "chosen",
    "exp": "exponential",
    "log": "logarithm",
    "sqrt": "root",
    "rsqrt": "inverse_root",
    "pow": "power",
    "exp2": "power",
    "exp2_flushed": "power",
    "polynomial": "series",
    "fma": "sum",
    "narrow_div": "quotient",
    "bounded_div": "quotient",
    "narrow_bounded_div": "quotient",
    "narrow_sqrt": "root",
    "narrow_sigmoid": "sigmoid_value",
    "narrow_pow": "power",
    "lt": "is_below",
    "le": "is_at_most",
    "gt": "is_above",
    "ge": "is_at_least",
    "eq": "is_equal",
    "ne": "is_other",
    "logical_and": "both_hold",
    "logical_or": "either_holds",
    "logical_not": "fails",
}
# How tightly C binds each; what is not here is a call or a name.
_BINDING = {
    "where": 1,
    "logical_or": 2,
    "logical_and": 3,
    "eq": 4,
    "ne": 4,
    **dict.fromkeys(("lt", "le", "gt", "ge"), 5),
    "add": 6,
    "sub": 6,
    "mul": 7,
    **dict.fromkeys(("div", arity.QUOTIENT), 7),
    "sigmoid": 7,
    "rsqrt": 7,
    "neg": 8,
    "logical_not": 8,
}
_TIGHTEST = 9
_LONGEST_INLINE = 64
_NOISE_BITS, _DROPPED_BITS = 32, 8  # of the former, those that its number in [0, 1) has not


@dataclass(frozen=True)
class ElementFunction:
    """A function of scalars in the target's language: its parameters are leaves, its results are
    passed by reference.
    """

    name: str
    leaves: tuple[tuple[str, str], ...]  # (type, name)
    results: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    once: ElementFunction | None = None  # what it takes that is the same for many of its calls

    @property
    def parameters(self) -> str:
        """The parameter list."""
        taken = [f"const {kind} {name}" for kind, name in self.leaves]
        return ", ".join(taken + [f"{kind}& {name}" for kind, name in self.results])

    @property
    def call(self) -> str:
        """A call over locals that are named after the parameters, with _value behind."""
        return (
            f"{self.name}({', '.join(f'{name}_value' for _, name in self.leaves + self.results)})"
        )

    @property
    def alone(self) -> ElementFunction:
        """The function without what is found once for it."""
        return replace(self, once=None)

    def reads(self, name: str) -> bool:
        """Whether a leaf of this name is a parameter, of this or of what it takes."""
        is_mine = any(name == leaf for _, leaf in self.leaves)
        return is_mine or (self.once is not None and self.once.reads(name))


def leaf_name(node: Expr, group_names: Sequence[str]) -> str:
    """What a leaf is called in a kernel."""
    if node.op == "input":
        return ir.name_of(node)
    if node.op == "position":
        return "position"
    stem = "count_of_" if node.op == "count" else "padded_" if node.attrs[1] else "covered_"
    return stem + "_".join(group_names[g] if g >= 0 else f"window_{-g}" for g in ir.axes_of(node))


def found_once(
    name: str,
    results: Sequence[tuple[str, Expr]],
    varying: Collection[int],
    taken: set[str],
    target: Target,
    compute: str,
    marks: Iterable[Mark],
    group_names: Sequence[str],
) -> ElementFunction:
    """The same, where what does not vary along some groups is a function of its own: its results
    get names that are not taken, and are from then on.
    """
    marks = tuple(marks)
    order = ir.topological(expr for _, expr in results)
    steady = {n for n in order if n.args and not n.extent & set(varying)}
    steady = {n for n in steady if ir.constant(n) is None and n.kind != "whole"}
    asked = {a for n in order if n not in steady for a in n.args} | {e for _, e in results}
    names = {m.node: m.name for m in marks}
    leaf_of: dict[Expr, Expr] = {}
    for node in (n for n in order if n in steady and n in asked):
        is_inverse = node.op == "div" and ir.constant(node.args[0]) == 1
        noun = "inverse" if is_inverse else _NOUNS.get(node.op, f"{node.op}_of_row")
        stem = names.get(node, noun)
        found = next(n for n in chain([stem], (f"{stem}_{i}" for i in count(2))) if n not in taken)
        taken.add(found)
        leaf_of[node] = ir.tensor(found, node.extent, node.rank, node.kind)
    exprs = ir.substitute([e for _, e in results], leaf_of)
    nodes = [m.node for m in marks]
    seen = dict(zip(nodes, ir.substitute(nodes, leaf_of), strict=True))
    rest = [(result, e) for (result, _), e in zip(results, exprs, strict=True)]
    function = element_function(name, rest, target, compute, remarked(marks, seen), group_names)
    if not leaf_of:
        return function
    before = [(ir.name_of(leaf), node) for node, leaf in leaf_of.items()]
    once = element_function(f"{name}_once", before, target, compute, marks, group_names)
    return replace(function, once=once)


def element_function(
    name: str,
    results: Sequence[tuple[str, Expr]],
    target: Target,
    compute: str,
    marks: Iterable[Mark],
    group_names: Sequence[str],
) -> ElementFunction:
    """The function that computes `results` from the leaves below them."""
    writer = _Writer(target, compute, group_names)
    roots = [expr for _, expr in results]
    nodes = ir.topological(roots)
    writer.uses.update(a for node in nodes for a in node.args)
    writer.taken.update(n for n, _ in results)
    writer.exact |= _exact(nodes, roots)
    leaves = _leaves(nodes)
    for leaf in leaves:
        writer.name(leaf, leaf_name(leaf, group_names))
    inside = set(nodes)
    for mark in marks:
        if mark.node in inside and mark.node not in writer.text and mark.node.op != "const":
            writer.lines.append(f"// {mark.comment}")
            if mark.node not in roots or writer.uses[mark.node]:
                writer.statement(mark.node, mark.name)
            else:
                writer.prepare(mark.node)
    for result, expr in results:
        writer.prepare(expr)
        writer.lines.append(f"{result} = {writer.spelled(expr)};")
        if expr.op != "const":
            writer.text.setdefault(expr, result)
    return ElementFunction(
        name,
        tuple((writer.type_of(leaf), writer.text[leaf]) for leaf in leaves),
        tuple((writer.type_of(expr), result) for result, expr in results),
        tuple(writer.lines),
    )


def _leaves(nodes: Iterable[Expr]) -> list[Expr]:
    return [n for n in nodes if n.op in ("input", "count", "position", "covered")]


def _exact(nodes: Iterable[Expr], roots: Iterable[Expr]) -> set[Expr]:
    """The integers that are compared with others, computed with, or given as they are: all of
    their digits matter.
    """
    met = [n for n in nodes if n.op in arity.COMPARISONS and {a.kind for a in n.args} == {"whole"}]
    waiting = [a for n in met for a in n.args]
    waiting += [n for n in nodes if n.kind == "whole" and n.args]
    waiting += [n for n in roots if n.kind == "whole"]
    found = set[Expr]()
    while waiting:
        node = waiting.pop()
        found.add(node)
        waiting += [a for a in node.args if a.kind == "whole"]
    return found


def _needed(op: str, place: int) -> int:
    """How tightly an argument must bind to stand without parentheses; order of rounding
    included.
    """
    if op == "where":
        return 3 if place == 0 else 6
    if op in ("sigmoid", "neg"):
        return _BINDING["neg"]
    if op not in _BINDING or op == "rsqrt":
        return 0  # a call brings its own
    return _BINDING[op] + (place > 0)


def _least_bits(node: Expr) -> int | None:
    """Of noise that is compared with a number of 24 bits, the least of its own 32 that are no less;
    None of anything else.
    """
    if node.op != "ge" or node.args[0].kind != "noise":
        return None
    bits = (ir.constant(node.args[1]) or 0.0) * 2.0**_NOISE_BITS
    is_apt = 0 < bits < 2.0**_NOISE_BITS and bits % 2.0**_DROPPED_BITS == 0
    return int(bits) if is_apt else None


class _Writer:
    """Lines so far, and the text by which each finished node is referred to."""

    def __init__(self, target: Target, compute: str, group_names: Sequence[str]) -> None:
        self.target = target
        self.compute = compute
        self.group_names = group_names
        self.lines: list[str] = []
        self.text: dict[Expr, str] = {}
        self.uses: Counter[Expr] = Counter()
        self.taken: set[str] = set()
        self.exact: set[Expr] = set()

    def type_of(self, node: Expr) -> str:
        """The type in which a node takes part in arithmetic."""
        others = {"truth": "bool", "index": "int", "noise": STORAGE["noise"]}
        return STORAGE["int64"] if node in self.exact else others.get(node.kind, self.compute)

    def name(self, node: Expr, wanted: str) -> str:
        name, n = wanted, 1
        while name in self.taken:
            n += 1
            name = f"{wanted}_{n}"
        self.taken.add(name)
        self.text[node] = name
        return name

    def statement(self, node: Expr, wanted: str) -> None:
        """A line that gives the node a name."""
        self.prepare(node)
        if node.op == "const":
            return
        spelled = self.spelled(node)
        name = self.name(node, wanted)
        self.lines.append(f"const {self.type_of(node)} {name} = {spelled};")

    def prepare(self, root: Expr) -> None:
        """Lines for everything below the root that is used twice or would make a line too long."""
        for node in ir.topological([root]):
            if node is root or node in self.text or node.op == "const":
                continue
            if self.uses[node] > 1 or len(self.spelled(node)) > _LONGEST_INLINE:
                self.statement(node, _NOUNS.get(node.op, node.op + "_value"))

    def spelled(self, node: Expr) -> str:
        """The node as an expression over names."""
        if node in self.text:
            return self.text[node]
        number = ir.constant(node)
        if number is not None:
            return self.target.literal(number, self.compute)
        if (least := _least_bits(node)) is not None:
            return f"{self.spelled(node.args[0])} >= {least}u"
        args = []
        for place, arg in enumerate(node.args):
            text = self.spelled(arg)
            binding = _TIGHTEST if arg in self.text else _BINDING.get(arg.op, _TIGHTEST)
            is_bare = binding >= _needed(node.op, place)
            if arg.kind == "noise":
                text, is_bare = f"uniform({text})", True
            if arg in self.exact and node.kind == "number":
                text, is_bare = f"static_cast<{self.compute}>({text})", True
            if node in self.exact and ir.is_integer(arg):
                text = f"{ir.constant(arg):.0f}"
            if text.startswith("-") and node.op in ("neg", "sigmoid"):
                is_bare = False  # two minus signs would be one operator
            args.append(text if is_bare else f"({text})")
        return self.target.spell(node.op, self.compute, *args)
