"""What programs do with rows along given axes: what a tier of rows is chosen by."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

from fusegen import ir
from fusegen.bound import Bound
from fusegen.longrows import reduces_of, terms, turns, widest_extent
from fusegen.program import Program
from fusegen.shortshares import SHORT
from fusegen.target import DEAR, ITEM_BYTES, PACK_BYTES

_FEW_ALONG = 3  # tensors that every row reads, for which no register is set aside
# What some rows share is asked for by each of them up to so long, by the bytes of an element, and
# as far as it takes no more in all: what others read and write would drive more out of the cache.
_LONGEST_ASKING: Mapping[int, int] = {2: 1024, 4: 4096}
_MOST_ASKED_BYTES = 4 << 20
_NARROW_BYTES = 2
_MOST_KEPT_ROWS = 256  # whose sums are told apart, where each is to have several blocks
# Rows of one tensor up to so long, beside which what some rows share counts as a sum does.
_LONGEST_SHARING = 3072


def calls_functions(programs: Sequence[Program], axes: ir.Extent) -> bool:
    """Whether gradients call functions for each element of a row before they reduce it."""
    others = [p for p in programs if p.name != "forward"]
    return any(n.op in DEAR and n.extent & axes for n in terms(others))


def holds_little(programs: Sequence[Program], axes: ir.Extent) -> bool:
    """Whether rows along these axes are of one tensor, in gradients of two, reduced twice at most,
    by forward kernels before any function is called for an element; and beside them there is only
    what all rows have, or what each has one of.
    """
    for program in programs:
        is_forward, full = program.name == "forward", widest_extent(program, axes)
        extents = [leaf.extent for leaf in program.graph.inputs]
        if extents.count(full) > (1 if is_forward else 2):
            return False
        if any(e != full and not e <= axes and e & axes for e in extents):
            return False
        if sum(ir.reduction(n)[1] == axes for n in reduces_of(program)) > 2:
            return False
    return not any(n.op in DEAR for n in terms([p for p in programs if p.name == "forward"]))


def widest_of(
    program: Program,
    axes: ir.Extent,
    dtypes: Mapping[str, str],
    domain: ir.Extent = frozenset(),
    *,
    at_use: Container[str] = (),
) -> int:
    """The size in bytes of the widest element of a tensor that varies along the rows; where there
    are elements that vary along `domain`, of one that is read or written with those. Noise is
    none of them where it is drawn at its use.
    """
    inputs, outputs = program.graph.inputs, program.graph.outputs
    order = ir.topological(program.graph.roots)
    if domain and (whole := [n for n in order if n.extent == domain]):
        met = ir.topological(whole, stop={n for n in order if n.op == "reduce"})
        inputs = tuple(leaf for leaf in inputs if leaf in met)
        outputs = tuple((name, expr) for name, expr in outputs if expr.extent == domain)
    named = [(ir.name_of(leaf), leaf) for leaf in inputs]
    tensors = [(n, i.extent) for n, i in named if i.kind != "noise" or n not in at_use]
    tensors += [(name, expr.extent) for name, expr in outputs]
    return max((ITEM_BYTES[dtypes[name]] for name, extent in tensors if extent & axes), default=1)


def words_of(
    program: Program, axes: ir.Extent, dtypes: Mapping[str, str], *, at_use: Container[str] = ()
) -> int:
    """The registers that one element takes in all tensors of full size, with one where there are
    many tensors that every row along these axes reads; but for those that are read at their use.
    """
    full = widest_extent(program, axes)
    held = [ir.name_of(leaf) for leaf in program.graph.inputs if leaf.extent == full]
    found = [dtypes[name] for name in held if name not in at_use]
    # Doubles take two, and so does what is computed from them.
    along = sum(leaf.extent == axes != full for leaf in program.graph.inputs)
    return max(1, sum(3 if dtype == "float64" else 1 for dtype in found) + (along > _FEW_ALONG))


def summed_over_rows(program: Program, axes: ir.Extent, bound: Bound) -> int:
    """The results that vary along rows but not along all of them together, sums by column; 0 where
    some are told apart by more than so many rows as a device works on at once. What some rows share
    counts too, where little else is read, and so do two registers where several results are whole.
    """
    full = widest_extent(program, axes)
    found = [r.extent - axes for r in program.graph.roots if r.extent & axes and r.extent < full]
    kept = max((math.prod(bound.domain[a] for a in extent) for extent in found), default=1)
    if not found or kept > _MOST_KEPT_ROWS:
        return 0
    read = [leaf.extent for leaf in program.graph.inputs]
    length = math.prod(bound.domain[a] for a in axes)
    is_alone = read.count(full) == 1 and length <= _LONGEST_SHARING
    shared = sum(bool(axes < extent < full) for extent in read)
    is_written_twice = sum(root.extent == full for root in program.graph.roots) > 1
    return len(found) + is_alone * shared + 2 * is_written_twice


def asked_again(
    programs: Sequence[Program], axes: ir.Extent, dtypes: Mapping[str, str], bound: Bound
) -> int:
    """How many tensors that forward rows along these axes share with some others each of them asks
    for: those wanted before the rows are reduced, where that is done once, if rows are short and
    the tensors so small that they stay in the cache.
    """
    own = [p for p in programs if p.name == "forward"]
    length = math.prod(bound.domain[a] for a in axes)
    widest = max((widest_of(p, axes, dtypes) for p in own), default=8)
    if not SHORT < length <= _LONGEST_ASKING.get(widest, 0) or any(turns(p) > 1 for p in own):
        return 0
    full = max((leaf.extent for p in own for leaf in p.graph.inputs), key=len, default=axes)
    shared = {n for n in terms(own) if n.op == "input" and axes < n.extent < full}
    sizes = (math.prod(bound.domain[a] for a in n.extent) * widest for n in shared)
    return len(shared) if sum(sizes) <= _MOST_ASKED_BYTES else 0


def reads_floats(program: Program, axes: ir.Extent, dtypes: Mapping[str, str]) -> bool:
    """Whether several tensors of full size are read, none of them with elements of two bytes."""
    full = widest_extent(program, axes)
    found = [dtypes[ir.name_of(leaf)] for leaf in program.graph.inputs if leaf.extent == full]
    return len(found) > 1 and not any(ITEM_BYTES[dtype] == _NARROW_BYTES for dtype in found)


def alike_of(
    programs: Sequence[Program], axes: ir.Extent, bound: Bound, order: Sequence[int]
) -> int:
    """By how many neighbours in a row, from its start on, all have the same of whatever varies
    along it, but not along all of it: a power of two, and no more than a pack has of them. 1 where
    nothing does, so that rows of other lengths are no others.
    """
    nodes = ir.topological([root for p in programs for root in p.graph.roots])
    apart = frozenset[int]().union(*(n.extent & axes for n in nodes if not axes <= n.extent))
    count = 1
    for axis in reversed(order):
        if axis in apart or axis not in axes:
            break
        count *= bound.domain[axis]
    return math.gcd(count, PACK_BYTES // _NARROW_BYTES) if apart else 1


def stretch_of(
    programs: Sequence[Program], axes: ir.Extent, bound: Bound, order: Sequence[int]
) -> int:
    """How many neighbours in a row are alike to all tensors that vary along it, but not along all
    of it; 0 where that differs, or where those that are alike do not lie together.
    """
    tensors = [leaf.extent for p in programs for leaf in p.graph.inputs]
    tensors += [expr.extent for p in programs for expr in p.graph.roots]
    found = {extent & axes for extent in tensors} - {frozenset(), axes}
    if len(found) != 1:
        return 0
    (lead,) = found
    if {a for a in order if a in axes and a not in lead} != set(order[-len(axes - lead) :]):
        return 0
    return math.prod(bound.domain[a] for a in axes - lead)
