"""What elements have in common that do not lie beside each other, to be computed once, ahead.

A kernel that goes element by element finds what a whole row shares once for each pack. What is the
same for elements that lie apart, such as all channels of a position, it would compute for each of
them: a logarithm and a quotient where a gradient needs a product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fusegen import ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.target import DEAR


def shared(
    exprs: Iterable[Expr], dear: Collection[str] = DEAR, below: Collection[Expr] = ()
) -> dict[tuple[int, ...], list[Expr]]:
    """By extent, the numbers that elements along the innermost group have apart but others have in
    common, where they take one of the operations `dear`, or more tensors are read for them than
    they are. Nothing within windows, nor what waits for a reduction, nor what some nodes are to
    find `below` them as it is.
    """
    found: dict[tuple[int, ...], list[Expr]] = {}
    waits: set[Expr] = set()
    for node in ir.topological(exprs, stop=below):
        if node.op == "reduce" or any(a in waits or a in below for a in node.args):
            waits.add(node)
        if not node.extent or min(node.extent) < 0:
            continue
        for arg in dict.fromkeys(node.args):
            is_apart = max(node.extent) in arg.extent and arg.extent < node.extent
            is_number = arg.kind == "number" and arg.op != "input"
            if is_apart and is_number and arg not in waits:
                members = found.setdefault(ordered(arg.extent), [])
                members += [] if arg in members else [arg]
    return {extent: nodes for extent, nodes in found.items() if _is_worth(nodes, dear)}


def shared_by_rows(exprs: Iterable[Expr], domain: Extent, rest: Extent) -> list[Expr]:
    """The numbers that elements of a row have in common below sums over rows: a row's own kernel
    finds them once, one that goes down columns at each element. None where none is dear.
    """
    found: dict[Expr, None] = {}
    reduces = [n for n in ir.topological(exprs) if n.op == "reduce" and n.args[0].extent == domain]
    for node in ir.topological(n.args[0] for n in reduces):
        if node.extent == domain:
            rows = [a for a in node.args if a.extent == rest and a.kind == "number"]
            found |= dict.fromkeys(a for a in rows if a.op not in ("input", "reduce"))
    is_dear = any(n.op in DEAR and n.extent == rest for n in ir.topological(found))
    return list(found) if is_dear else []


def reduced_over_rows(exprs: Iterable[Expr], rest: Extent) -> list[Expr]:
    """The numbers of which rows have one each, and which are reduced over rows, where they are
    fewer than the numbers that they are made of.
    """
    reduces = [n for n in ir.topological(exprs) if n.op == "reduce" and n.args[0].extent == rest]
    found = [*dict.fromkeys(n.args[0] for n in reduces if n.args[0].op not in ("input", "reduce"))]
    read = [leaf for leaf in ir.inputs(found) if leaf.extent == rest]
    return found if len(found) < len(read) else []


def _is_worth(nodes: list[Expr], dear: Collection[str]) -> bool:
    below = ir.topological(nodes)
    read = [n for n in below if n.op == "input" and n.extent == nodes[0].extent]
    return len(read) > len(nodes) or any(n.op in dear for n in below)
