"""A minimum cut: the fewest values that must be carried from one part of a computation to the next.

Every path from a source to a sink passes through a value of the cut, and there are as many values
as paths that share no node (Menger). Among the smallest cuts it is the one nearest to the sinks, so
that the least is computed again behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise

from fusegen import ir
from fusegen.ir import Expr

_SOURCE, _SINK = "source", "sink"
_UNLIMITED = 1 << 30


def minimum_cut(
    sinks: Sequence[Expr], is_source: Callable[[Expr], bool], can_cut: Callable[[Expr], bool]
) -> list[Expr]:
    """The smallest set of nodes between the sources below the sinks and the sinks.

    A sink may be cut itself. Every source must be a node that can be cut (ValueError).
    """
    order = ir.topological(sinks)
    # Each node is an entry and an exit; the edge between them carries one path if it can be cut.
    room: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def connect(a: Hashable, b: Hashable, capacity: int) -> None:
        room[a][b] = capacity
        room[b].setdefault(a, 0)

    for node in order:
        connect((node, "entry"), (node, "exit"), 1 if can_cut(node) else _UNLIMITED)
        for arg in node.args:
            connect((arg, "exit"), (node, "entry"), _UNLIMITED)
        if is_source(node):
            if not can_cut(node):
                raise ValueError(f"there is no cut between the sinks and {node}, a source")
            connect(_SOURCE, (node, "entry"), _UNLIMITED)
    for node in sinks:
        connect((node, "exit"), _SINK, _UNLIMITED)
    while path := _path(room):
        for a, b in pairwise(path):
            room[a][b] -= 1
            room[b][a] += 1
    beyond = _reaching_sink(room)
    return [n for n in order if (n, "exit") in beyond and (n, "entry") not in beyond]


def _path(room: Mapping[Hashable, Mapping[Hashable, int]]) -> list[Hashable]:
    """A shortest path from source to sink along edges with room left, or nothing."""
    came: dict[Hashable, Hashable] = {_SOURCE: _SOURCE}
    queue: list[Hashable] = [_SOURCE]
    for vertex in queue:
        for following, left in room.get(vertex, {}).items():
            if left and following not in came:
                came[following] = vertex
                queue.append(following)
    if _SINK not in came:
        return []
    path: list[Hashable] = [_SINK]
    while path[-1] != _SOURCE:
        path.append(came[path[-1]])
    return path[::-1]


def _reaching_sink(room: Mapping[Hashable, Mapping[Hashable, int]]) -> set[Hashable]:
    """The vertices from which more could still flow into the sink."""
    found: set[Hashable] = {_SINK}
    queue: list[Hashable] = [_SINK]
    for vertex in queue:
        for before in room.get(vertex, {}):
            if room[before][vertex] and before not in found:
                found.add(before)
                queue.append(before)
    return found
