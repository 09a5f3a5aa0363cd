"""Ways: how a kernel that leaves partials goes over the elements that it reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fusegen import arity, ir
from fusegen.grouping import ordered
from fusegen.ir import Expr, Extent
from fusegen.kernel import Family


@dataclass(frozen=True)
class Strips:
    """How a domain is gone through by threads that stay in their columns: those are the innermost
    groups, along `passing` rows pass by, and the other groups are kept apart. Without a domain,
    rows pass by along what is reduced before the last group that is not.
    """

    domain: tuple[int, ...] | None = None
    passing: Extent = frozenset()
    columns: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """The groups that tell apart what a thread goes through."""
        stays = self.passing.union(self.columns)
        return tuple(g for g in self.domain or () if g not in stays)

    def passing_of(self, domain: tuple[int, ...], axes: Extent) -> Extent:
        """The groups along which rows pass by, where some axes of a domain are reduced."""
        if self.domain is None:
            last = max((g for g in domain if g not in axes), default=-1)
            before = frozenset(g for g in axes if g < last)
            return before if max(before, default=-1) >= 0 else frozenset()  # not windows alone
        is_strip = domain == self.domain and self.passing <= axes
        return self.passing if is_strip else frozenset()


class Way(NamedTuple):
    """How a kernel goes over elements that it reduces: its family; the groups that it keeps apart
    and those whose sums lie beside each other; and which of these a result has in common.
    """

    family: Family
    kept: tuple[int, ...]
    columns: tuple[int, ...]
    within: Extent

    @property
    def beside(self) -> tuple[int, ...]:
        """The groups whose results lie beside each other."""
        return tuple(g for g in self.columns if g not in self.within)


def way_of(node: Expr, strips: Strips | None) -> Way:
    """The way in which a kernel reduces, where there are strips or none: what merges moments takes
    those of all columns that a result has beside each other, others are over whole columns.
    """
    kind, axes = ir.reduction(node)
    domain = ordered(node.args[0].extent)
    passing = frozenset[int]() if strips is None else strips.passing_of(domain, axes)
    # Of what windows leave in memory, the elements of each lie innermost: behind all groups.
    if passing and min(domain) >= 0:
        columns = tuple(g for g in domain if g > max(passing))
        within = tuple(g for g in columns if g in axes)
        is_beside = within == columns[len(columns) - len(within) :] != columns
        if is_beside and (not within or kind in arity.MOMENTS):
            kept = tuple(g for g in domain if g not in axes and g not in columns)
            return Way("outer", kept, columns, frozenset(within))
    if domain[-1] in axes:
        return Way("inner", (), (), frozenset())
    return Way("outer", tuple(g for g in domain[:-1] if g not in axes), domain[-1:], frozenset())
