"""Bundles: rows of which each has statistics of its own, tied together by the windows they share.

Where a norm goes along one axis and a pooling behind it has windows across others, as layernorm
over the last axis and avg_pool3d have, a norm's statistics differ within a window. The rows that
windows span are a bundle, which depends on no other: threads that hold all of it find the
statistics of each row and then pool across them, and nothing of x's size is written between.
Where what is pooled is reduced along another axis, as by a softmax over channels behind
max_pool2d, the windows of a row are found first, and elements need not be held. Whether that can be
is a matter of shapes, of types and of how x lies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusegen import arity, ir
from fusegen.bound import Bound
from fusegen.ir import Expr
from fusegen.lower import lower
from fusegen.tiers import Tier, lanes_of
from fusegen.windowing import Slide

_THREADS = 256  # of a block, and of a row at most
_LEAST_BYTES = 64  # that threads beside each other read at once, each of a row of its own
# Strided rows: measured, two kernels are faster of other types, and with more rows to merge.
_STRIDED_BYTES, _MOST_STRIDED = 4, 2
# Where windows come first, measured: threads along a row, unless they have to hold more of it;
# bytes beside each other; windows of a thread, what it reads of them, and bytes that it writes.
_ALONG, _LEAST_POOLED_BYTES = 16, 128
_MOST_KEPT, _MOST_POOLED, _MOST_LEFT_BYTES = 16, 64, 128
_MOST_HELD, _MOST_DERIVED = 32, 16  # elements of a thread in one tensor, and for gradients


@dataclass(frozen=True)
class Bundle:
    """The axis along rows and how many elements they have; the axis that is innermost in memory,
    and how long it is; how many elements of a window lie side by side along that, and how many of
    such lines a window has; whether what rows reduce is what windows leave, and those take
    elements as they are.
    """

    axis: int
    length: int
    side: int
    beside: int
    inner: int
    rows: int
    is_pooled_first: bool = False
    is_plain: bool = False

    def tier(self, widest: int, words: int) -> Tier | None:
        """How threads hold it, where the widest element has so many bytes, and one element takes
        so many registers in all tensors; None where they cannot.
        """
        if self.is_pooled_first:
            return self._tier_of_windows(widest)
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

    def _tier_of_windows(self, widest: int) -> Tier | None:
        """The same where threads have strided rows of windows, and keep what those leave."""
        lanes = lanes_of(self.beside, widest)
        most = min(_MOST_KEPT * self.inner // lanes, _MOST_POOLED // (self.rows * lanes))
        is_apt = widest == _STRIDED_BYTES or (widest < _STRIDED_BYTES and self.is_plain)
        if self.side == self.axis or lanes % self.inner or not most or not is_apt:
            return None

        def beside(packs: int) -> int:
            return _THREADS // -(-self.length // packs) * lanes * widest

        packs = 1
        while (packs == 1 or self.length > _ALONG * packs) and 2 * packs <= most:
            packs *= 2
        if beside(packs) < _LEAST_POOLED_BYTES:
            return None
        fewer = packs
        while self.rows * lanes * fewer * widest > _MOST_LEFT_BYTES and fewer > 1:
            if beside(fewer // 2) < _LEAST_BYTES:
                break
            fewer //= 2
        forward, derivative = (Tier(n, n, lanes, _THREADS, _THREADS * n) for n in (packs, fewer))
        return replace(forward, derivative=derivative)

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
    found = [ir.reduction(n) for n in nodes if reduces_along(n)]
    along = {axes for _, axes in found}
    outside = [a for axes in along for a in axes if a < 0]
    is_behind = all(not n.args[0].extent & within for n in nodes if reduces_along(n))
    kinds = (*arity.SUMS, "bound", *(("amax",) if is_behind else ()))
    if len(outside) != 1 or any(kind not in kinds for kind, _ in found):
        return None
    (axis,) = outside
    row = frozenset({axis}) | (within & {-axis})
    is_apt = graph.inputs[0].extent == full and along == {row}
    is_apt = is_apt and (axis not in windows or (axis == order[-1] and not is_behind))
    if not is_apt or not all(_is_apt(leaf, full, row) for leaf in graph.inputs):
        return None
    inner = windows.get(order[-1], 1)
    assert isinstance(inner, int)
    rows = math.prod(sizes) // inner
    side = order[-1]
    taken = [n.args[0].op for n in nodes if n.op == "reduce" and min(ir.reduction(n)[1]) > 0]
    is_plain = all(op == "input" for op in taken)
    return Bundle(
        axis, bound.domain[axis], side, bound.domain[side], inner, rows, is_behind, is_plain
    )


def reduces_along(node: Expr) -> bool:
    """Whether a node reduces along axes, and not over windows."""
    return node.op == "reduce" and min(ir.reduction(node)[1]) < 0


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
