"""Rows dealt out over memory: such as a channel's elements, of which each sample has a run.

What is reduced over the samples and the positions of images, and used again there, lies in as many
runs as there are samples. Kernels go over it as over rows that lie together, where everything that
varies along the rows is dealt out alike, and find the place of each pack. That takes a division,
which is long where offsets have 64 bits: such tensors go in two passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from fusegen import ir
from fusegen.bound import Bound
from fusegen.grouping import ordered
from fusegen.kernel import Entry, Kernel
from fusegen.longrows import reduced_axes
from fusegen.program import Program
from fusegen.tiers import Tier, most_blocks

_LEAST_PACK = 4  # elements that lie together: an access of fewer takes as long to find
# Threads of a block that holds as much as can be, where elements have more than two bytes, and of
# a multiprocessor: more would leave no registers to find places with.
_MOST_THREADS, _MOST_RESIDENT = 896, 1280
# Elements and threads of blocks that share rows of gradients where `longrows` has none for them: by
# the bytes of the widest element, whether rows of more than two tensors are held, and whether
# functions are called for elements. They leave shared memory for three rows, so that one is
# finished a turn after it was added up. On an H100 three tensors take 2.63 copies in fp32 where 8
# elements of 512 threads take 3.04.
_SMALL: Mapping[tuple[int, bool, bool], tuple[tuple[int, int], ...]] = {
    (2, True, False): ((32, 128),),
    (4, True, False): ((8, 256),),
    (4, False, True): ((8, 512),),
    (4, True, True): ((8, 256), (8, 512)),
}
# The same where elements have two bytes, functions are called, and a row has a block to itself: of
# longer ones gelu's gradient takes 4 copies.
_DEAR = (16, 512)
_NARROW_BYTES = 2
_LEAST_FILLED = 0.75  # of the multiprocessors, where a row has a block to itself


class Deal(NamedTuple):
    """Where a row's elements lie: so many one after the other, a run; and how far behind its end
    the row's next one begins.
    """

    run: int
    gap: int


def dealt_order(programs: Sequence[Program], bound: Bound, order: Sequence[int]) -> tuple[int, ...]:
    """The axes in the order in which dealt out rows go, for axes that lie in memory in another,
    outermost first; none where the programs reduce no such rows, or others too, where something
    varies along them otherwise, or where runs are no whole packs.
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
    run = math.prod(bound.domain[a] for a in inner)
    if run % _LEAST_PACK or 0 in bound.domain:
        return ()
    domain = frozenset(wide)
    if all(root.extent & domain != domain for root in programs[0].graph.roots):
        return ()  # what is only read takes one pass in any case
    for program in programs:
        inputs = program.graph.inputs
        extents = [t.extent & domain for t in (*inputs, *program.graph.roots)]
        is_apart = any(e != domain and e & axes for e in extents)
        if is_apart or any(leaf.kind == "noise" for leaf in inputs):
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


def with_room(
    tier: Tier, rows: int, length: int, processors: int, widest: int, tensors: int, *, is_dear: bool
) -> Tier | None:
    """The tier of dealt out rows, with registers for finding places; None where two passes over
    memory are faster.

    widest is the size of the widest element in bytes, tensors how many a program holds rows of at
    most; is_dear says that gradients call functions for each element before they reduce a row.
    """
    is_narrow = widest <= _NARROW_BYTES
    is_filled = rows >= _LEAST_FILLED * -(-rows // processors) * processors

    def apt(full: Tier | None) -> Tier | None:
        if full is None or (full.is_shared and (is_narrow or not full.is_full)):
            return full
        if full.is_shared:
            return None
        threads = full.threads if is_narrow else min(full.threads, _MOST_THREADS)
        longest = full.elements * threads
        is_held = is_filled and length <= longest
        return replace(full, threads=threads, longest=longest) if is_held else None

    tier = replace(tier, resident=min(tier.resident, _MOST_RESIDENT))
    found = replace(tier, forward=apt(tier.forward), derivative=apt(tier.derivative))
    if is_narrow and is_dear:
        elements, threads = _DEAR
        of_block = replace(_with_shares(tier, elements, threads), longest=elements * threads)
        return replace(found, derivative=of_block) if length <= of_block.longest else None
    is_found = found.derivative is not None and (found.derivative.is_shared or not is_dear)
    if is_found or not tier.is_shared:
        return found
    for elements, threads in _SMALL.get((widest, tensors > 2, is_dear), ()):
        if length <= elements * threads * most_blocks(processors, 1):
            return replace(found, derivative=_with_shares(tier, elements, threads))
    return found


def _with_shares(tier: Tier, elements: int, threads: int) -> Tier:
    fewer = replace(tier, elements=elements, summing_elements=elements, threads=threads)
    return replace(fewer, resident=0)


def dealt_out(kernels: Iterable[Kernel], whole: ir.Extent) -> tuple[Kernel, ...]:
    """Kernels whose tensors that vary along all of an extent lie in rows that are dealt out."""
    extent = ordered(whole)
    return tuple(replace(k, is_dealt=any(b.extent == extent for b in k.buffers)) for k in kernels)


def goes_by_rows(entry: Entry) -> bool:
    """Whether rows that a block or several hold are all that goes over dealt out tensors."""
    dealt = [k for k in entry.kernels if k.is_dealt]
    return len(entry.grouping.axes) == 2 and all(k.family == "row" and k.tier for k in dealt)
