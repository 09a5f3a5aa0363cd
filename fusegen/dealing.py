"""Rows dealt out over memory: such as a channel's elements, of which each sample has a run.

What is reduced over the samples and the positions of images, and used again there, lies in as many
runs as there are samples. Kernels go over it as over rows that lie together, where everything that
varies along the rows is dealt out alike, and find the place of each pack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from fusegen import ir
from fusegen.bound import Bound
from fusegen.grouping import ordered
from fusegen.kernel import Entry, Kernel
from fusegen.longrows import reduced_axes
from fusegen.program import Program
from fusegen.tiers import Tier

_LEAST_PACK = 4  # elements; an access of fewer takes as long to find
# Threads of a block that holds as much as can be, where elements have more than two bytes, and of
# a multiprocessor: more would leave no registers to find places with.
_MOST_THREADS, _MOST_RESIDENT = 896, 1280
_LEAST_FILLED = 0.75  # of the multiprocessors, where a row has a block to itself


class Deal(NamedTuple):
    """Where a row's elements lie: so many one after the other, a run; and how far behind its end
    the row's next one begins.
    """

    run: int
    gap: int


def dealt_order(programs: Sequence[Program], bound: Bound, order: Sequence[int]) -> tuple[int, ...]:
    """The axes in the order in which dealt out rows go, for axes that lie in memory in another,
    outermost first; none where the programs reduce no such rows, or others too.
    """
    reduced = {axes for program in programs for axes in reduced_axes(program)}
    if len(reduced) != 1 or any(not reduced_axes(program) for program in programs):
        return ()
    (axes,) = reduced
    wide = [a for a in order if bound.domain[a] != 1]
    outer = [*takewhile(axes.__contains__, wide)]
    inner = [*takewhile(axes.__contains__, reversed(wide))][::-1]
    between = wide[len(outer) : len(wide) - len(inner)]
    if not (outer and inner and between) or not axes.isdisjoint(between):
        return ()
    domain = frozenset(wide)
    for program in programs:
        tensors = [*program.graph.inputs, *program.graph.roots]
        extents = (t.extent & domain for t in tensors)
        if any(e != domain and e & axes for e in extents):
            return ()
        if any(leaf.kind == "noise" for leaf in program.graph.inputs):
            return ()
    narrow = [a for a in order if a not in domain]
    return (
        *(a for a in narrow if a not in axes),
        *between,
        *(a for a in narrow if a in axes),
        *outer,
        *inner,
    )


def deal_of(order: Sequence[int], dealt: Sequence[int], domain: Sequence[int]) -> Deal:
    """How rows whose axes go in one order are dealt out in memory, where they lie in another."""
    lying = [a for a in order if domain[a] != 1]
    going = [a for a in dealt if domain[a] != 1]
    between = [*takewhile(lambda a: a != lying[0], going)]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(lying[::-1], going[::-1], strict=True))
    rows = math.prod(domain[a] for a in between)
    run = math.prod(domain[a] for a, _ in alike)
    return Deal(run, (rows - 1) * run)


def is_apt(deal: Deal) -> bool:
    """Whether runs are long enough, and of whole packs."""
    return deal.run % _LEAST_PACK == 0


def with_room(tier: Tier, rows: int, length: int, processors: int, *, is_wide: bool) -> Tier:
    """The tier of dealt out rows: of blocks as large as can be only where there are rows for all
    multiprocessors, or several of them share one, and with registers for finding places.
    """
    turns = -(-rows // processors)
    is_filled = rows >= _LEAST_FILLED * turns * processors

    def apt(full: Tier | None) -> Tier | None:
        if full is None or full.is_shared:
            return full
        threads = min(full.threads, _MOST_THREADS) if is_wide else full.threads
        longest = full.elements * threads
        is_held = is_filled and length <= longest
        return replace(full, threads=threads, longest=longest) if is_held else None

    fewer = replace(tier, resident=min(tier.resident, _MOST_RESIDENT))
    return replace(fewer, forward=apt(tier.forward), derivative=apt(tier.derivative))


def dealt_out(kernels: Iterable[Kernel], whole: ir.Extent) -> tuple[Kernel, ...]:
    """Kernels whose tensors that vary along all of an extent lie in rows that are dealt out."""
    extent = ordered(whole)
    return tuple(replace(k, is_dealt=any(b.extent == extent for b in k.buffers)) for k in kernels)


def goes_by_rows(entry: Entry) -> bool:
    """Whether rows that a block or several hold are all that goes over dealt out tensors."""
    dealt = [k for k in entry.kernels if k.is_dealt]
    return len(entry.grouping.axes) == 2 and all(k.family == "row" and k.tier for k in dealt)
