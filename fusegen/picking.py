"""Picking: what a chain selects at one place along an axis, taken of its inputs first, so that no
more is computed than what is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from functools import partial

from fusegen import arity, ir
from fusegen.ir import Expr, Graph

Pick = tuple[int, Expr]  # the axis, and where along it


@dataclass(frozen=True)
class Piece:
    """A tensor at one place along an axis: what it goes by, of which tensor, where, and of how many
    places; behind has the axes that the tensor has behind that one in memory, and pitch is what
    tells its gaps, if there are axes in front.
    """

    name: str
    of: str
    place: int
    count: int
    behind: tuple[int, ...]
    pitch: str


def pick_of(node: Expr) -> Pick | None:
    """Along which axis a node takes what is where, if that is all it does and the place stands in
    the chain.
    """
    if node.op != "reduce":
        return None
    kind, axes = ir.reduction(node)
    if kind != "pick" or len(axes) != 1 or min(axes) > 0 or standing(node.args[1]) is None:
        return None
    return min(axes), node.args[1]


def standing(index: Expr) -> int | None:
    """The place along an axis that an index is, from its end if it is below 0, where the chain
    says so.
    """
    found = ir.constant(index)
    if found is None and index.op == "add" and index.args[0].op == "count":
        found = ir.constant(index.args[1])
    return None if found is None else int(found)


def picked_first(graph: Graph, others: Iterable[Expr], fixed: Container[int]) -> dict[Expr, Expr]:
    """What the roots, and others, become where each selection at a place is one of inputs. All stay
    what they are if an input is read elsewhere along the axis too, or an output has it, or it is
    one of the fixed axes.
    """
    others = tuple(others)
    nodes = ir.topological((*graph.roots, *others))
    same = {node: node for node in nodes}
    new: dict[Expr, Expr] = {}
    picks: list[Pick] = []
    for node in nodes:
        pick = pick_of(node)
        if pick is None:
            new[node] = ir.rebuild(node, tuple(new[a] for a in node.args))
            continue
        image = None if pick[0] in fixed else _there(new[node.args[0]], pick)
        if image is None:
            return same
        new[node] = image
        picks.append(pick)
    if not _are_apart([new[root] for root in graph.roots], {axis for axis, _ in picks}):
        return same
    for pick in picks:
        found_there = {node: _there(new[node], pick) for node in others}
        new |= {node: found for node, found in found_there.items() if found is not None}
    return new


def at_place(
    root: Expr, axis: int, taken: Callable[[Expr], Expr], through: Container[str]
) -> Expr | None:
    """A node at one place along an axis, of inputs as they are `taken` there, through such
    operations; None where there are others.
    """
    new: dict[Expr, Expr] = {}
    for node in ir.topological([root]):
        args = tuple(new[arg] for arg in node.args)
        if axis not in node.extent:
            new[node] = node
        elif node.op == "input" and node.kind != "noise":
            new[node] = taken(node)
        elif node.op == "repeated":
            new[node] = ir.repeated(args[0], set(ir.axes_of(node)) - {axis})
        elif node.op in through:
            new[node] = ir.rebuild(node, args)
        else:
            return None
    return new[root]


def _there(root: Expr, pick: Pick) -> Expr | None:
    """A node at that place along an axis, of inputs there, if it can be told from those."""
    axis, index = pick
    taken = partial(_picked, axis=axis, index=index)
    return at_place(root, axis, taken, {*arity.ARITY, "reduce"})


def _picked(leaf: Expr, axis: int, index: Expr) -> Expr:
    return ir.reduce("pick", {axis}, leaf, index)


def _are_apart(roots: list[Expr], axes: set[int]) -> bool:
    """Whether these axes are met in inputs alone, each of which is read at one place along them."""
    users: dict[Expr, set[Expr]] = {root: set() for root in roots}
    order = ir.topological(roots)
    for node in order:
        for arg in node.args:
            users.setdefault(arg, set()).add(node)
    along = [node for node in order if node.extent & axes]
    return all(
        node not in roots and len(users[node]) == 1 and all(map(pick_of, users[node]))
        for node in along
    )
