"""Views of what kernels accumulate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fusegen import arity, ir
from fusegen.ir import Expr
from fusegen.kernel import Buffer, Kernel, Reduction
from fusegen.statements import ElementFunction
from fusegen.target import DEAR, Target

_FEW = 4  # instructions that a compiler puts under a condition without a branch


class Holder(Protocol):
    """What a view of a reduction asks of its kernel's."""

    target: Target
    compute: str
    kernel: Kernel

    @property
    def adds_products(self) -> bool: ...
    @property
    def row_groups(self) -> tuple[int, ...]: ...
    def takes_plain(self, reduction: Reduction) -> bool: ...
    def size(self, groups: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class StageView:
    """One level of reductions, the function that gives their terms, and what else it gives: values
    to hold and terms of sums.
    """

    function: ElementFunction
    reductions: list[ReductionView]
    held: list[str]
    sums: list[ReductionView]
    stretches: list[ReductionView]
    # What is added up at the one place that something names, of each a function of its own.
    places: dict[ReductionView, ElementFunction]


class ReductionView:
    """A Reduction as a template sees it.

    is_dear says that a branch around a term would have elements wait for each other.
    """

    def __init__(self, reduction: Reduction, buffer: Buffer | None, kernel: Holder) -> None:
        self.reduction = reduction
        self.kind = reduction.kind
        self.type = kernel.target.accumulators[reduction.kind].format(compute=kernel.compute)
        # Many partials of float lose digits when they are added up as floats.
        self.wide_type = kernel.target.accumulators[reduction.kind].format(compute="double")
        self.name = ir.name_of(reduction.results[0][1])
        self.results = [(result, ir.name_of(leaf)) for result, leaf in reduction.results]
        self.term = f"{self.name}_term"
        self.is_plain = kernel.takes_plain(reduction)
        value = reduction.value
        is_product = reduction.kind == "sum" and value.op == "mul" and kernel.adds_products
        # What the accumulator is given, as (name, value); of a product both factors, to be joined.
        factors = zip((self.term, f"{self.term}_by"), value.args, strict=False)
        self.terms = [*factors] if is_product else [(self.term, value)]
        picked = [leaf for result, leaf in self.results if "picked" in result]
        self.picks = [f"{leaf}_term" for leaf in picked]
        self.terms += zip(self.picks, reduction.picks, strict=True)
        given = [f"{name}_value" for name, _ in self.terms]
        is_strided = kernel.adds_products and kernel.kernel.family == "column"
        self.addends = ", ".join(["p == 0"] * (is_strided and self.kind == "moments") + given)
        along = set(kernel.kernel.reduced)
        inside = [n for n in ir.topological([value]) if n.op in arity.ARITY and n.extent & along]
        self.is_costly = len(inside) > _FEW or any(n.op in DEAR for n in inside)
        # Beside sums by column there are no registers for the terms of many elements at once.
        is_dear = self.is_costly and not kernel.kernel.sums
        is_dear |= buffer is None and kernel.kernel.only_reads_columns
        self.is_dear = is_dear or reduction.kind == "peak"
        # What stands at one place needs no wider type: all else that is added up is zero.
        places = _places(reduction, kernel.kernel)
        self.place_type = kernel.compute if places else ""
        # What names that place, where a tensor does: the same all along what is reduced.
        named = [e for e in places if e.op == "input" and e.kind == "index"]
        self.place = ir.name_of(named[0]) if named else ""
        self.line = f"{ir.name_of(reduction.value) if self.is_plain else self.term}_line"
        self.indices = [reduction.index] if reduction.index is not None else []
        self.partials = buffer.name if buffer else ""
        self.extent = buffer.extent if buffer else ()
        # Of merged partials: the groups of which a result has some beside each other.
        self.within = tuple(g for g in self.extent if g not in kernel.kernel.domain)
        rows = kernel.row_groups
        self.kept = tuple(g for g in rows if g in self.extent)
        self.summed = tuple(g for g in rows if g not in self.extent)
        self.columns = kernel.size(kernel.kernel.columns)


def _places(reduction: Reduction, kernel: Kernel) -> list[Expr]:
    """Where along what is reduced all stands that is added up, if that is zero but at one place."""
    value, zero = reduction.value, ir.const(0.0)
    if reduction.kind != "sum" or value.op != "where" or value.args[2] != zero:
        return []
    is_there = value.args[0]
    along = frozenset(kernel.reduced)
    positions = [e for e, buffer in kernel.inputs if buffer.is_computed and e.extent == along]
    if is_there.op != "eq" or not any(e in is_there.args for e in positions):
        return []
    return [e for e in is_there.args if e not in positions and not e.extent & along]
