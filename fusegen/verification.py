"""The rules that every stage behind the graph relies on."""

from __future__ import annotations

from fusegen.arity import ARITY
from fusegen.ir import (
    Expr,
    Graph,
    axes_of,
    check_kinds,
    inputs,
    name_of,
    reduction,
    topological,
    union,
)


def verify(graph: Graph) -> None:
    """Raise AssertionError where a graph breaks the rules that every later stage relies on."""
    declared = set(graph.inputs)
    names = [name_of(leaf) for leaf in graph.inputs] + [name for name, _ in graph.outputs]
    assert len(set(names)) == len(names), f"two of {names} have one name"
    for node in topological(graph.roots):
        if node.op == "input":
            assert node in declared, f"{node} is not among the graph's inputs"
        elif node.op in ARITY:
            assert node.extent == union(node.args)
            check_kinds(node.op, node.args)
        elif node.op == "reduce":
            kind, axes = reduction(node)
            assert kind in ("argmax", "pick") or axes <= node.args[0].extent
            assert axes & node.args[0].extent, f"{node} reduces nothing"
            assert not axes & node.extent
            assert (kind == "pick") == (len(node.args) == 2)
            assert kind != "pick" or _is_index(node.args[1])
        elif node.op in ("once", "repeated"):
            assert node.extent == node.args[0].extent.union(axes_of(node))
        else:
            assert node.op in ("const", "count", "position", "covered"), f"{node.op} is left"


def _is_index(node: Expr) -> bool:
    """Whether it says where something stands; what another program saved of that is a number, and
    so is what counts from the end, which no tensor tells.
    """
    is_saved = node.op == "input" and name_of(node).startswith("saved_argmax")
    return node.kind == "index" or is_saved or not inputs([node])
