"""What is selected, read at its place: a tensor that is read nowhere else by where that is in
memory, others as element-wise reads of one tensor, without a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fusegen import arity, ir
from fusegen.bound import Bound
from fusegen.errors import UnsupportedError
from fusegen.ir import Expr, Graph
from fusegen.picking import Pick, at_place, pick_of, standing
from fusegen.program import Places, Program
from fusegen.signature import is_double
from fusegen.staging import Pass

_MOST_POSITIONS = 1 << 24  # a float holds every integer up to here


def read_at_places(state: Pass, roots: list[Expr], *, has_packs: bool) -> list[Expr]:
    """The roots with what is selected of elements along an axis read at its place, where no output
    varies along that, or integers are, which lose digits where they are added up. With packs, not
    what lies apart from its neighbours then.
    """
    wanted = frozenset[int]().union(*(expr.extent for expr in state.pending.values()))
    known: dict[tuple[Expr, int, int], Expr] = {}

    def taken(leaf: Expr, group: int, place: int) -> Expr:
        """An input there."""
        key = (leaf, group, place)
        if key not in known:
            where = place if place >= 0 else f"end_{-place}"
            name = state.fresh(f"{ir.name_of(leaf)}_at_{where}")
            known[key] = ir.tensor(name, leaf.extent - {group}, leaf.rank, leaf.kind)
            buffer = state.buffers[leaf]
            state.buffers[known[key]] = replace(buffer, at=(*buffer.at, (group, place)))
        return known[key]

    def rule(node: Expr) -> Expr:
        kind, axes = ir.reduction(node) if node.op == "reduce" else ("", frozenset[int]())
        place = standing(node.args[1]) if kind == "pick" else None
        if place is None or len(axes) != 1 or min(axes) < 0:
            return node
        if axes & wanted and node.kind != "whole":
            return node
        (group,) = axes
        inputs = ir.inputs([node.args[0]])
        if (
            has_packs
            and not axes & wanted
            and any(group == max(n.extent, default=None) for n in inputs)
        ):
            return node
        there = partial(taken, group=group, place=place)
        found = at_place(node.args[0], group, there, arity.ARITY)
        return node if found is None else found

    return ir.rewrite(roots, rule)


def at_places(program: Program) -> Program:
    """The program with each input that is read at one place along an axis as a tensor without that
    axis, and where that is.
    """
    leaves = [*program.graph.inputs]
    places: list[Places] = [() for _ in leaves]
    roots = [*program.graph.roots]
    nodes = [m.node for m in program.marks]
    for i in range(len(leaves)):
        while (found := _only_pick(leaves[i], roots)) is not None:
            node, (axis, index) = found
            leaf = leaves[i]
            leaves[i] = ir.tensor(ir.name_of(leaf), leaf.extent - {axis}, leaf.rank, leaf.kind)
            place = standing(index)
            assert place is not None, "what picks at a place has one"
            places[i] = (*places[i], (axis, place))
            images = ir.substitute([*roots, *nodes], {node: leaves[i]})
            roots, nodes = images[: len(roots)], images[len(roots) :]
    if not any(places):
        return program
    outputs = zip(program.output_names, roots, strict=True)
    known = set(leaves)
    marks = tuple(
        replace(mark, node=node)
        for mark, node in zip(program.marks, nodes, strict=True)
        if known.issuperset(ir.inputs([node]))
    )
    graph = Graph(tuple(leaves), tuple(outputs))
    return replace(program, graph=graph, marks=marks, places=tuple(places))


def _only_pick(leaf: Expr, roots: Sequence[Expr]) -> tuple[Expr, Pick] | None:
    """The node that takes what is somewhere in an input, where nothing else reads it."""
    users = [node for node in ir.topological(roots) if leaf in node.args]
    pick = pick_of(users[0]) if len(users) == 1 and leaf not in roots else None
    return None if pick is None else (users[0], pick)


def require_exact_positions(
    programs: Sequence[Program], dtypes: Mapping[str, str], bound: Bound
) -> None:
    """Raise where the first of the largest, or what is selected, stands further along than a float
    can count.
    """
    if is_double(programs, dtypes):
        return
    for node in ir.topological(root for p in programs for root in p.graph.roots):
        kind, axes = ir.reduction(node) if node.op == "reduce" else ("", frozenset[int]())
        if not axes or max(axes) >= 0:
            continue
        length = math.prod(bound.domain[a] for a in axes)
        place = standing(node.args[1]) if kind == "pick" else None
        if kind == "argmax" and length > _MOST_POSITIONS:
            raise UnsupportedError(
                f"{bound.chain.text}: the gradient of a maximum goes to the first of equal "
                f"values, found among {_MOST_POSITIONS} at most, got {length}; use amax or "
                "amin, whose gradient is shared, or float64"
            )
        if place is not None and place % length >= _MOST_POSITIONS:
            raise UnsupportedError(
                f"{bound.chain.text}: what is selected is found among the first "
                f"{_MOST_POSITIONS} along its axis, got place {place % length}; use x.select in "
                "front of the chain, or float64"
            )
