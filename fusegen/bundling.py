"""Bundles: rows of which each has statistics of its own, tied together by the windows they share.

Where a norm goes along one axis and a pooling behind it has windows across others, as layernorm
over the last axis and avg_pool3d have, a norm's statistics differ within a window. The rows that
windows span are a bundle, which depends on no other: threads that hold all of it find the
statistics of each row and then pool across them, and nothing of x's size is written between.
Whether that can be is a matter of shapes, of types and of how x lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen import ir
from fusegen.bound import Bound
from fusegen.ir import Expr
from fusegen.lower import lower
from fusegen.target import TARGETS
from fusegen.tiers import Tier, lanes_of
from fusegen.windowing import Slide

_THREADS = 256  # of a block, and of a row at most
_MOST_HELD, _MOST_DERIVED = 32, 16  # elements of a thread in one tensor, and for gradients


@dataclass(frozen=True)
class Bundle:
    """The axis along rows, how many elements they have, how many of those a window takes side by
    side, and how many rows it spans.
    """

    axis: int
    length: int
    inner: int
    rows: int

    def tier(self, widest: int, words: int) -> Tier | None:
        """How threads hold it, where the widest element has so many bytes, and one element takes
        so many registers in all tensors; None where they cannot.
        """
        found = self._tier(widest, words, _MOST_HELD)
        derivative = self._tier(widest, words, _MOST_DERIVED)
        return found and derivative and replace(found, derivative=derivative)

    def _tier(self, widest: int, words: int, most: int) -> Tier | None:
        lanes = lanes_of(self.length, widest)
        while self.rows * lanes > most and lanes > self.inner:
            lanes //= 2
        if lanes % self.inner or self.rows * lanes > most or self.length > _THREADS * lanes:
            return None
        elements = lanes
        while self.length > 32 * elements and 2 * elements * self.rows * words <= most:
            elements *= 2
        threads = 32 if self.length <= 32 * elements else _THREADS
        return Tier(elements, elements, lanes, _THREADS, threads * elements)


def bundle(bound: Bound) -> Bundle | None:
    """The rows that a chain's windows tie together; None where there are none such, or more ties
    them: other windows than tiles, other reductions, an operand that has a value for some places in
    a window, or for some rows of a window and not for others.
    """
    windows = dict(bound.windows)
    sizes = [w for w in windows.values() if not isinstance(w, Slide)]
    if not sizes or len(sizes) < len(windows) or not _has_norm(bound):
        return None
    if any(bound.domain[a] % size for a, size in zip(windows, sizes, strict=True)):
        return None
    graph = lower(bound).graph
    nodes = ir.topological(graph.roots)
    full = max((n.extent for n in nodes), key=len)
    within = frozenset(a for a in full if a > 0)
    kinds = [ir.reduction(n) for n in nodes if n.op == "reduce" and n.args[0].extent & within]
    along = {axes for _, axes in kinds if min(axes) < 0}
    outside = [a for axes in along for a in axes if a < 0]
    if len(outside) != 1 or any(
        kind not in (*ir.SUMS, "bound") for kind, axes in kinds if axes in along
    ):
        return None
    (axis,) = outside
    row = frozenset({axis}) | (within & {-axis})
    is_apt = graph.inputs[0].extent == full and along == {row}
    if not is_apt or not all(_is_apt(leaf, full, row) for leaf in graph.inputs):
        return None
    inner = windows.pop(axis, 1)
    assert isinstance(inner, int)
    return Bundle(axis, bound.domain[axis], inner, math.prod(sizes) // inner)


def _has_norm(bound: Bound) -> bool:
    """Whether some step reduces, beside the pooling."""
    definitions = [s.definition for s in bound.chain.steps if s.reduces]
    return any(d is not None and not d.window_axes for d in definitions)


def _is_apt(leaf: Expr, full: ir.Extent, row: ir.Extent) -> bool:
    """Whether an input varies along all there is, as elements or windows do; along rows alone, or
    not along them; and not from one row of a window to the next.
    """
    if leaf.kind == "noise":
        return False  # it is drawn window by window
    within = {a for a in leaf.extent if a > 0}
    is_whole = leaf.extent in (full, frozenset(a for a in full if a < 0))
    is_along = leaf.extent in (row, frozenset(a for a in row if a < 0))
    return is_whole or is_along or not (within or leaf.extent & row)


def memory_order(bound: Bound, order_of_x: Sequence[int] | None, target: str) -> tuple[int, ...]:
    """The graph's axes, outermost in memory first, from x's; with the rows of a bundle innermost
    where a target holds such.
    """
    order = bound.memory_order(order_of_x)
    found = bundle(bound) if TARGETS[target].holds_rows else None
    if found is None or order[-1] == found.axis:
        return order
    return (*(a for a in sorted(order) if a != found.axis), found.axis)
