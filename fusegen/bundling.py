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
from fusegen.tiers import Tier, lanes_of
from fusegen.windowing import Slide

_THREADS = 256  # of a block, and of a row at most
_LEAST_BYTES = 64  # that threads beside each other read at once, each of a row of its own
# Strided rows: measured, two kernels are faster of other types, and with more rows to merge.
_STRIDED_BYTES, _MOST_STRIDED = 4, 2
_MOST_HELD, _MOST_DERIVED = 32, 16  # elements of a thread in one tensor, and for gradients


@dataclass(frozen=True)
class Bundle:
    """The axis along rows and how many elements they have; the axis that is innermost in memory,
    and how long it is; how many elements of a window lie side by side along that, and how many of
    such lines a window has.
    """

    axis: int
    length: int
    side: int
    beside: int
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
        lanes = lanes_of(self.beside, widest)
        while lanes and lanes % self.inner == 0:
            each = self.rows * lanes * words
            found = self._strided if self.side != self.axis else self._innermost
            if self.rows * lanes <= most and (elements := found(lanes, widest, most // each)):
                along = 32 if self.length <= 32 * elements else _THREADS
                return Tier(elements, elements, lanes, _THREADS, along * elements)
            lanes //= 2
        return None

    def _innermost(self, lanes: int, widest: int, most: int) -> int:
        """How many elements of a row a thread has, in so many packs at most; 0 where too few."""
        packs = 1
        while self.length > 32 * lanes * packs and 2 * packs <= most:
            packs *= 2
        return lanes * packs if self.length <= _THREADS * lanes else 0

    def _strided(self, lanes: int, widest: int, most: int) -> int:
        """The same where a thread has single elements, each of as many rows as there are lanes."""
        if widest != _STRIDED_BYTES or self.rows > _MOST_STRIDED:
            return 0
        elements = 1
        while self.length > 32 * elements and 2 * elements <= most:
            elements *= 2
        along = max(32, -(-self.length // elements))
        return elements if _THREADS // along * lanes * widest >= _LEAST_BYTES else 0


def bundle(bound: Bound, order: Sequence[int]) -> Bundle | None:
    """The rows that a chain's windows tie together, where axes lie in this order in memory; None
    where there are none such, or more ties them: other windows than tiles, other reductions, an
    operand that has a value for some places in a window, or for some rows of a window and not for
    others.
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
    found = [ir.reduction(n) for n in nodes if n.op == "reduce"]
    found = [(kind, axes) for kind, axes in found if min(axes) < 0]
    along = {axes for _, axes in found}
    outside = [a for axes in along for a in axes if a < 0]
    if len(outside) != 1 or any(kind not in (*ir.SUMS, "bound") for kind, _ in found):
        return None
    (axis,) = outside
    row = frozenset({axis}) | (within & {-axis})
    is_apt = graph.inputs[0].extent == full and along == {row}
    is_apt = is_apt and (axis == order[-1] or axis not in windows)
    if not is_apt or not all(_is_apt(leaf, full, row) for leaf in graph.inputs):
        return None
    inner = windows.get(order[-1], 1)
    assert isinstance(inner, int)
    rows = math.prod(sizes) // inner
    return Bundle(axis, bound.domain[axis], order[-1], bound.domain[order[-1]], inner, rows)


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
