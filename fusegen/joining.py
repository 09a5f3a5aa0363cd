"""Norms and the pooling of their results, and sums of what is pooled, in one segment, where shapes
allow it.

A norm over all of the pooled axes has its statistics from one pass over x, and its result is pooled
in the next one, without a tensor of x's size between them. Where windows lie side by side and fill
their axes, what is reduced over those axes is reduced over the windows and what is within them;
where they overlap or leave something out, over elements, each once. Whether that can be done is a
matter of shapes. A norm along one axis, with windows across others, is pooled row by row where
rows and windows are such that a bundle of them is held on the chip; and so is what is reduced along
one axis behind such windows. Sums of what is pooled are added up window by window, where nothing
else is computed of that. Axes are followed through views where what each joins or parts ends where
an axis or a part of one does, so that what was there before may meet what is behind. Else the chain
is cut there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from fusegen import arity, ir
from fusegen.axes import Shape
from fusegen.bound import Bound
from fusegen.bundling import bundle
from fusegen.errors import FusegenError, OtherAxesError, UnsupportedError
from fusegen.ir import Expr
from fusegen.lower import lower
from fusegen.ops import Chain
from fusegen.segments import Segment, bind_all, segments
from fusegen.target import ITEM_BYTES, TARGETS
from fusegen.windowing import Slide

Way = tuple[Segment, ...]


def ways(chain: Chain) -> tuple[Way, ...]:
    """The segments that a chain can be cut into; of several, those are the best that come first.
    The last fit any shape.
    """
    may_part = (True, False) if any(s.is_view for s in chain.steps) else (False,)
    may_be_aside = (True, False) if any(s.taken_up for s in chain.steps) else (False,)
    may_reduce = (True, False) if _reduces_what_it_pools(chain) else (False,)
    either = (True, False)
    found: dict[Way, None] = {}
    for flags in itertools.product(may_be_aside, may_part, either, may_reduce, either):
        aside, parts, joins, rows, sums = flags
        may = {"parts": parts, "joins": joins, "rows": rows, "sums": sums, "aside": aside}
        try:
            found[segments(chain, **may)] = None
        except UnsupportedError:
            if not found:
                raise
    return tuple(found)


def _reduces_what_it_pools(chain: Chain) -> bool:
    """Whether a step reduces behind one that pools."""
    pooling = [i for i, s in enumerate(chain.steps) if s.definition and s.definition.window_axes]
    return any(s.reduces for s in chain.steps[pooling[0] + 1 :]) if pooling else False


def with_anew(chain: Chain, found: Sequence[Way]) -> tuple[Way, ...]:
    """The same ways, and behind them the one in which no segment uses a tensor twice, so that it
    may lie along other axes of the next.
    """
    try:
        return tuple(dict.fromkeys((*found, segments(chain, anew=True))))
    except UnsupportedError:
        return tuple(found)


def chosen_anew(
    chain: Chain,
    x: tuple[Shape, str],
    operands: Mapping[str, tuple[Shape, str]],
    target: str,
    order_of_x: Sequence[int] | None,
) -> tuple[Way, tuple[Bound, ...]]:
    """The way that goes for such tensors, and its segments bound."""
    found = ways(chain)
    try:
        way, bounds = chosen(found, x, operands, target, order_of_x)
    except OtherAxesError:
        found = with_anew(chain, found)
        way, bounds = chosen(found, x, operands, target, order_of_x)
    return found[way], bounds


def chosen(
    found: Sequence[Way],
    x: tuple[Shape, str],
    operands: Mapping[str, tuple[Shape, str]],
    target: str,
    order_of_x: Sequence[int] | None = None,
) -> tuple[int, tuple[Bound, ...]]:
    """Which of a chain's ways its shapes allow on a target, and its segments bound. order_of_x has
    the axes of x, outermost in memory first, where they lie so.

    Raises ArgumentError for the first step that does not fit, UnsupportedError for what fits, and
    cannot be done.
    """
    *others, last = found
    failure = None
    try:
        bounds = bind_all(last, x, operands)
    except FusegenError as error:
        if not others:
            raise
        failure = error
    for i, way in enumerate(others):
        try:
            joined = bind_all(way, x, operands)
        except FusegenError as error:
            if failure is not None and isinstance(error, OtherAxesError):
                failure = error  # which is why there is the last one
            continue
        widest = max(ITEM_BYTES.get(dtype, 0) for _, dtype in (x, *operands.values()))
        order = order_of_x
        for segment, bound in zip(way, joined, strict=True):
            lies = bound.memory_order(order if segment.source is None else None)
            if not _is_allowed(bound, widest, lies, target):
                break
            order = bound.order_of_result(lies)
        else:
            return i, joined
    if failure is not None:
        raise failure
    return len(others), bounds


def _is_allowed(bound: Bound, widest: int, order: Sequence[int], target: str) -> bool:
    """Whether a segment whose axes lie in this order can be one."""
    if not bound.windows:
        return True
    rows = bundle(bound, order) if TARGETS[target].holds_rows else None
    size = max(widest, ITEM_BYTES.get(bound.dtype, 0))
    tier = None if rows is None else rows.tier(size, 1)
    graph = lower(bound).graph
    behind = [n for n in ir.topological(graph.roots) if _is_behind(n)]
    if not behind:
        return tier is not None or _is_apt(graph, bound, TARGETS[target].joins_from)
    if any(isinstance(w, Slide) for _, w in bound.windows):
        return False  # no kernel of those adds windows up along an axis
    is_pooled_first = rows is not None and rows.is_pooled_first
    if _is_added_up(graph, behind, order) and (tier is None or is_pooled_first):
        return _is_apt(graph, bound, TARGETS[target].joins_from)
    return tier is not None and is_pooled_first


def _is_behind(node: Expr) -> bool:
    """Whether a node reduces what is pooled, over windows."""
    if node.op != "reduce" or min(ir.reduction(node)[1]) > 0:
        return False
    return any(_is_of_window(n) for n in ir.topological(node.args))


def _is_of_window(node: Expr) -> bool:
    return node.op == "reduce" and min(ir.reduction(node)[1]) > 0


def _is_added_up(graph: ir.Graph, behind: Sequence[Expr], order: Sequence[int]) -> bool:
    """Whether what is pooled is added up and nothing else: over the innermost axis in memory too,
    or for each index of that and of the outermost ones.
    """
    first = [n for n in behind if not any(map(_is_behind, ir.topological(n.args)))]
    sums = {n: ir.tensor(f"sum {i}", n.extent, n.rank) for i, n in enumerate(first)}
    rest = ir.topological(ir.substitute(graph.roots, sums))
    axes = [a for a in order if any(a in n.args[0].extent for n in first)]
    along = {ir.reduction(n)[1] for n in first}
    is_along = all(axes[-1] in a for a in along)
    outer = [a for a in axes[:-1] if all(a not in summed for summed in along)]
    is_apt = is_along or (len(along) == 1 and outer == axes[: len(outer)])
    are_sums = all(ir.reduction(n)[0] in ("sum", "mean") for n in behind)
    return are_sums and is_apt and not any(map(_is_of_window, rest))


def _is_apt(graph: ir.Graph, bound: Bound, least: int) -> bool:
    """Whether what a segment reduces before its pooling can be reduced beside it: over all of the
    pooled axes, and by sums, as others know no windows. Nor may an operand's gradient be a sum that
    keeps places within windows. Where there are to be so many elements at least, fewer are in a
    cache for the kernel that comes next, and arithmetic counts.
    """
    nodes = ir.topological(graph.roots)
    within = frozenset(a for n in nodes for a in n.extent if a > 0)
    before = [n for n in nodes if n.op == "reduce" and n.args[0].extent & within]
    before = [n for n in before if min(ir.reduction(n)[1]) < 0]
    if not before:
        return True
    if least and math.prod(bound.domain) < least:  # no guard on sizes where all will do
        return False
    slides = [w for _, w in bound.windows if isinstance(w, Slide)]
    if least and any(w.parts or w.size > w.stride for w in slides):
        return False  # so much is computed again for windows that share elements
    pooled = within.union(a for a, _ in bound.windows)
    full = max((n.extent for n in nodes), key=len)
    for leaf in ir.inputs(before) if slides else ():
        # Noise is drawn window by window; and elements as they lie have one index for these axes.
        if leaf.kind == "noise" or leaf.extent & pooled not in (frozenset(), full & pooled):
            return False
    operands = [n for n in graph.inputs if n.extent & within and n.kind == "number"]
    is_apt = all(n.attrs[0] in arity.SUMS and ir.reduction(n)[1] >= pooled for n in before)
    return is_apt and all(n.extent == full for n in operands)
