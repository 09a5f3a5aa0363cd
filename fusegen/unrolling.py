"""Unrolling: a short axis of which a chain selects, such as the two halves of a gate. What is at
each place along it is worked on as a tensor of its own, so that what is left has one axis fewer.

Such a piece lies in the whole tensor dense but for gaps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace

from fusegen import arity, ir
from fusegen.bound import Bound
from fusegen.grouping import Grouping, collapse
from fusegen.ir import Expr, Graph
from fusegen.lower import Mark
from fusegen.picking import Piece, pick_of, standing
from fusegen.program import Program
from fusegen.signature import Signature
from fusegen.simplify import simplification

_MOST_PLACES = 4
_WHOLE = 16  # elements: no pack is longer, so none crosses the end of a piece's run

Axis = tuple[int, int]  # and how many places it has


def candidates(programs: Iterable[Program], bound: Bound) -> list[Axis]:
    """The axes that may be unrolled: short ones of which something is selected."""
    nodes = ir.topological(root for p in programs for root in p.graph.roots)
    if bound.windows:
        return []
    found = dict.fromkeys(axis for node in nodes for axis in _selected(node))
    return [(a, bound.domain[a]) for a in found if 1 < bound.domain[a] <= _MOST_PLACES]


def _selected(node: Expr) -> tuple[int, ...]:
    """The axis of which a node takes one place, or asks which it is."""
    if node.op == "position" and len(ir.axes_of(node)) == 1:
        return ir.axes_of(node)
    pick = pick_of(node)
    return () if pick is None else pick[:1]


def are_apt(pieces: Iterable[Piece], bound: Bound) -> bool:
    """Whether packs lie within the pieces of tensors; a single element is one too."""
    runs = (math.prod(bound.domain[a] for a in piece.behind) for piece in pieces if piece.behind)
    return all(run % _WHOLE == 0 for run in runs) and all(p.behind or not p.pitch for p in pieces)


def grouped(
    program: Program, signature: Signature
) -> tuple[Program, Graph, dict[Expr, Expr], Grouping]:
    """The program, in pieces where the signature says so; its graph over groups, old node by new,
    and the groups.
    """
    for name, axis, count in signature.unrolled:
        if name == program.name and not program.pieces:
            program = unrolled(program, (axis, count), signature.order) or program
    alone = [frozenset(p.behind) for p in program.pieces]
    return program, *collapse(program.graph, signature.order, dict(program.windows), alone)


@functools.lru_cache(maxsize=256)
def unrolled(program: Program, along: Axis, order: tuple[int, ...]) -> Program | None:
    """The program with a tensor for each place along an axis; None where it does not come apart."""
    axis, count = along
    pieces: dict[Expr, list[Expr]] = {}
    named: list[Piece] = []
    pitches: dict[tuple[int, ...], str] = {}

    def taken_apart(name: str, extent: ir.Extent) -> list[str]:
        """The names of a tensor's pieces."""
        at = order.index(axis)
        behind = tuple(a for a in order[at + 1 :] if a in extent)
        pitch = ""
        if extent.intersection(order[:at]):
            pitch = pitches.setdefault(behind, f"pieces_{len(pitches) + 1}_pitch")
        names = [f"{name}_at_{k}" for k in range(count)]
        named.extend(Piece(n, name, k, count, behind, pitch) for k, n in enumerate(names))
        return names

    leaves: list[Expr] = []
    for leaf in program.graph.inputs:
        if axis not in leaf.extent:
            leaves.append(leaf)
            continue
        if leaf.kind == "noise":
            return None
        names = taken_apart(ir.name_of(leaf), leaf.extent)
        less = leaf.extent - {axis}
        pieces[leaf] = [ir.tensor(name, less, leaf.rank, leaf.kind) for name in names]
        leaves += pieces[leaf]
    roots = [*program.graph.roots, *(m.node for m in program.marks)]
    for node in ir.topological(roots):
        if node not in pieces:
            found = _pieces(node, [pieces[a] for a in node.args], axis, count)
            if found is None:
                return None
            pieces[node] = found
    outputs: list[tuple[str, Expr]] = []
    for name, root in program.graph.outputs:
        if axis not in root.extent:
            outputs += [(name, pieces[root][0])]
            continue
        names = taken_apart(name, root.extent)
        # A piece is written where it is the same throughout, too.
        outputs += [
            (n, ir.repeated(piece, root.extent - {axis}))
            for n, piece in zip(names, pieces[root], strict=True)
        ]
    marks = [Mark(piece, m.name, m.comment) for m in program.marks for piece in pieces[m.node]]
    new = simplification((*(e for _, e in outputs), *(m.node for m in marks)))
    return replace(
        program,
        graph=Graph(tuple(leaves), tuple((name, new[e]) for name, e in outputs)),
        marks=tuple(replace(m, node=new[m.node]) for m in marks),
        pieces=tuple(named),
        spans=(),
    )


def _pieces(node: Expr, args: list[list[Expr]], axis: int, count: int) -> list[Expr] | None:
    """What a node is at each place along an axis, or everywhere; None where that is not told."""
    if node.op == "count":
        rest = set(ir.axes_of(node)) - {axis}
        if axis not in ir.axes_of(node):
            return [node]
        return [ir.count(rest) * float(count) if rest else ir.const(count)]
    if node.op == "position" and axis in ir.axes_of(node):
        alone = len(ir.axes_of(node)) == 1
        return [ir.const(k, "index") for k in range(count)] if alone else None
    if node.op == "reduce" and axis in ir.reduction(node)[1]:
        found = _reduced(node, args, axis, count)
        return None if found is None else [found]
    if all(len(a) == 1 for a in args) and axis not in node.extent:
        return [_settled(node, tuple(a[0] for a in args))]
    if node.op == "repeated":
        axes = set(ir.axes_of(node)) - {axis}
        return [ir.repeated(p, axes) for p in _everywhere(args[0], count)]
    if node.op not in arity.ARITY and node.op != "reduce":
        return None
    spread = [_everywhere(a, count) for a in args]
    return [_settled(node, tuple(a[k] for a in spread)) for k in range(count)]


def _settled(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other arguments, where it is told by places that are known now."""
    if node.op == "where" and args[0].op == "eq":
        place, wanted = map(ir.constant, args[0].args)
        if place is not None and wanted is not None:
            return args[1] if place == wanted else args[2]
    if node.op == "add" and (found := _sum_of(args)) is not None:
        return found
    return ir.rebuild(node, args)


def _sum_of(args: tuple[Expr, ...]) -> Expr | None:
    """The place that is so far from an axis's end."""
    a, b = map(ir.constant, args)
    return None if a is None or b is None else ir.const(a + b)


def _everywhere(pieces: list[Expr], count: int) -> list[Expr]:
    """One for each place, where there may be one for all."""
    return pieces if len(pieces) == count else pieces * count


def _reduced(node: Expr, args: list[list[Expr]], axis: int, count: int) -> Expr | None:
    """What reducing along an axis, and perhaps others, gives, of the pieces along it."""
    kind, axes = ir.reduction(node)
    rest = axes - {axis}
    values = _everywhere(args[0], count)
    if kind == "pick":
        place = None if pick_of(node) is None else standing(node.args[1])
        return None if place is None else values[place]
    if kind == "argmax":
        return None
    parts = [ir.reduce("mean" if kind == "variance" else kind, rest, v) for v in values]
    if kind in arity.MAXIMA:
        return functools.reduce(lambda a, b: ir.primitive("maximum", a, b), parts)
    total = functools.reduce(lambda a, b: a + b, parts)
    if kind == "sum":
        return total
    mean = total * (1.0 / count)
    if kind == "mean":
        return mean
    within = [ir.reduce("variance", rest, v) for v in values] if rest else []
    apart = [(part - mean) * (part - mean) for part in parts]
    return functools.reduce(lambda a, b: a + b, [*within, *apart]) * (1.0 / count)
