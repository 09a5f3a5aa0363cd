"""The axes of rows: along which of them something is worked on as a whole."""

from __future__ import annotations

from fusegen import arity, ir
from fusegen.columntiers import LONGEST_REDUCED
from fusegen.ir import Expr, Extent
from fusegen.staging import Pass, reduces_below
from fusegen.target import DEAR
from fusegen.tiers import Tier


def domain_of(state: Pass) -> Extent:
    """All groups along which something varies that is still to be computed; or, where nothing
    varies along all of them, those of what is reduced first.
    """
    nodes = ir.topological(state.pending.values())
    every = frozenset[int]().union(*(n.extent for n in nodes))
    reduced = [r.args[0].extent for r in nodes if r.op == "reduce"]
    if any(n.extent == every for n in nodes) or not reduced:
        return every
    return max(reduced, key=len)


def axes_to_hold(
    state: Pass, domain: Extent, tier: Tier | None, tier_axes: Extent
) -> Extent | None:
    """The axes of the rows that are worked on as a whole; None where nothing is gained by that."""
    axes = _axes_of_rows(state, domain)
    if tier is not None:
        is_team = tier.may_be_shared and not tier.is_full
        if is_team and _takes_two_passes(state, domain, tier_axes):
            return None
        if axes is None and (
            _reduces_packs(state, domain, tier, tier_axes)
            or (tier.is_alone and _shares_dear(state, domain, tier_axes))
            or _are_awaited(state, domain, tier_axes)
        ):
            return tier_axes
        return axes if axes == tier_axes else None
    return _short_rows(state, domain) if axes is None else axes


def _short_rows(state: Pass, domain: Extent) -> Extent | None:
    """The innermost axes, where rows along them are short, and all that is reduced next is along
    them.
    """
    if state.short is None:
        return None
    inner = frozenset({state.short})
    nodes = reduces_below(state.pending.values())
    found = {ir.reduction(r)[1] for r in nodes if r.args[0].extent == domain}
    return inner if found == {inner} else None


def _takes_two_passes(state: Pass, domain: Extent, axes: Extent) -> bool:
    """Whether elements are only reduced, as far as rows along some axes go, and in two steps: two
    passes over many blocks are faster than blocks that meet as often.
    """
    turns: dict[Expr, int] = {}
    for node in ir.topological(state.pending.values()):
        turns[node] = max((turns[a] for a in node.args), default=0) + (node.op == "reduce")
    for expr in state.pending.values():
        if expr.extent == domain and {ir.reduction(r)[1] for r in reduces_below([expr])} <= {axes}:
            return False  # it is written while its row is held
    found = [turns[n] for n in turns if n.op == "reduce" and n.args[0].extent == domain]
    return max(found, default=0) == 2


def _axes_of_rows(state: Pass, domain: Extent) -> Extent | None:
    """The axes of the reductions from which something of full size is computed, if they are the
    same and lie together.
    """
    used: set[Expr] = set()
    for node in ir.topological(state.pending.values()):
        if node.extent == domain:
            small = [a for a in node.args if a.extent != domain]
            used |= {n for n in ir.topological(small) if n.op == "reduce"}
    found = {ir.reduction(r)[1] for r in used}
    if len(found) != 1:
        return None
    (axes,) = found
    return axes if _lie_together(axes) else None


def _lie_together(axes: Extent) -> bool:
    return max(axes) - min(axes) == len(axes) - 1


def reduces_at_once(tier: Tier, axes: Extent, domain: Extent) -> bool:
    """Whether rows along these axes, of which nothing is used again, are reduced faster by a block
    that holds them than in parts whose sums are added up.
    """
    if not axes or not _lie_together(axes) or tier.is_shared:
        return False
    return max(axes) == max(domain) or tier.longest <= LONGEST_REDUCED


def _reduces_packs(state: Pass, domain: Extent, tier: Tier, axes: Extent) -> bool:
    """Whether rows of which nothing is used again are reduced at once by a block that holds them,
    in packs.
    """
    found = [r for r in reduces_below(state.pending.values()) if r.args[0].extent == domain]
    if not (found and reduces_at_once(tier, axes, domain)):
        return False
    if tier.is_full and not any(reduces_below(r.args) for r in found):
        return False  # one pass with many blocks
    reductions = set(map(ir.reduction, found))
    # A maximum over more than a row is over each row first.
    return all(a == axes or (a > axes and kind in arity.MAXIMA) for kind, a in reductions)


def _shares_dear(state: Pass, domain: Extent, axes: Extent) -> bool:
    """Whether strided rows of which nothing is reduced have something dear of their own: threads
    that have whole rows compute it once, and pass nothing on through memory.
    """
    nodes = ir.topological(state.pending.values())
    if not (axes and axes < domain) or any(n.op == "reduce" for n in nodes):
        return False
    is_strided = _lie_together(axes) and max(axes) != max(domain)
    return is_strided and any(n.op in DEAR and n.extent == domain - axes for n in nodes)


def _are_awaited(state: Pass, domain: Extent, axes: Extent) -> bool:
    """Whether sums or moments of elements over other axes, or maxima over more, wait for reductions
    over rows, and for no others.
    """
    for node in reduces_below(state.pending.values()):
        kind, along = ir.reduction(node)
        is_apt = along != axes if kind in arity.SUMS else along > axes and kind in arity.MAXIMA
        below = {ir.reduction(r)[1] for r in reduces_below(node.args)}
        if is_apt and node.args[0].extent == domain and below == {axes}:
            return _lie_together(axes)
    return False
