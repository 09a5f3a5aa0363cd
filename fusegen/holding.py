"""Holding: which rows each program of a module holds on the chip, and so the module's signature.

Where rows along several axes could be, a program is scheduled with each, and those are taken with
which its kernels take the least time, by a model: their bytes, and a while for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fusegen import ir
from fusegen.bound import Bound
from fusegen.bundling import bundle, reduces_along
from fusegen.dealing import deal_of, dealt_order, goes_by_rows, with_room
from fusegen.downcolumns import has_whole_columns
from fusegen.emission import make_entry
from fusegen.ir import Expr
from fusegen.kernel import Entry
from fusegen.longrows import reduced_axes
from fusegen.program import Program
from fusegen.rowfacts import calls_functions, widest_of, words_of
from fusegen.rowtiers import held_tier, holding_less, streamed
from fusegen.selecting import require_exact_positions
from fusegen.shortruns import in_short_runs, leaves_lines_empty, lie_together
from fusegen.signature import Rows, Signature
from fusegen.strides import most_elements
from fusegen.target import H200, TARGETS, Limits
from fusegen.traffic import moved
from fusegen.unrolling import are_apt, candidates, grouped, unrolled

# Where rows are not held on the chip, one longer than this that shares the machine with too few
# others is divided among all threads, in passes.
_LONG_ROW = 1 << 16
_FEW_ROWS = 512
_MOST_IN_CACHE = 4096  # elements of a strided row, of which a thread has 64 beside each other
_NARROW_BYTES, _FLOAT_BYTES = 2, 4
# Elements of rows that gradients are summed over, and nothing else, by whether they have two bytes.
_LONGEST_SUMMED = {True: 200, False: 60}
_KERNEL_BYTES = 4 << 20  # what memory moves while a kernel begins and ends
_ROW_BYTES = 256  # while a row of sums along it, as many as 16 elements in fp32 take on an H100
_MOST_SAMPLES = 1024  # of which a block has what rows leave of each, whatever their number
_LEAST_OF_LINE = 16  # elements, which vectors are filled up to
_LEAST_SHORT = 1 << 14  # elements in all, below which short rows are worth no build of their own
_LEAST_GAIN = 0.97  # of what is taken otherwise: below, the likelier rows are as good


def signature(
    target: str,
    order: tuple[int, ...],
    programs: Sequence[Program],
    dtypes: Mapping[str, str],
    bound: Bound,
    limits: Limits = H200,
    *,
    may_deal: bool = True,
) -> Signature:
    """What their module depends on, on such a device; may_deal: that 32 bits go past all gaps."""
    found = _signature(target, order, programs, dtypes, bound, limits, may_deal=may_deal)
    if not TARGETS[target].holds_rows or found.is_dealt:
        return found
    for program, along in itertools.product(programs, candidates(programs, bound)):
        if all(name != program.name for name, *_ in found.unrolled):
            found = _in_pieces(program, along, found, bound, limits)
    return found


def _in_pieces(
    program: Program, along: tuple[int, int], plain: Signature, bound: Bound, limits: Limits
) -> Signature:
    """The signature where a program has tensors in pieces along an axis, if that takes less."""
    axis, _ = along
    apart = unrolled(program, along, plain.order)
    if apart is None or not are_apt(apart.pieces, bound):
        return plain
    known = dict(plain.dtypes)
    dtypes = {**known, **{p.name: known[p.of] for p in apart.pieces}}
    sizes = [*bound.domain]
    sizes[axis] = 1
    narrower = replace(bound, domain=tuple(sizes))
    found = _signature(plain.target, plain.order, [apart], dtypes, narrower, limits, may_deal=False)
    found = replace(
        found, index_bits=plain.index_bits, has_columns=plain.has_columns, in_cache=plain.in_cache
    )
    if any(rows.tier.is_full for _, rows in found.rows):
        return plain
    if _cost(apart, found, narrower) >= _LEAST_GAIN * _cost(program, plain, bound):
        return plain
    return replace(
        plain,
        rows=(*(r for r in plain.rows if r[0] != program.name), *found.rows),
        strips=(*(name for name in plain.strips if name != program.name), *found.strips),
        unrolled=(*plain.unrolled, (program.name, *along)),
    )


def _signature(
    target: str,
    order: tuple[int, ...],
    programs: Sequence[Program],
    dtypes: Mapping[str, str],
    bound: Bound,
    limits: Limits,
    *,
    may_deal: bool,
) -> Signature:
    """The same, where every program works on tensors as they are."""
    mentioned = {name for p in programs for name in (*p.input_names, *p.output_names)}
    dtypes = {name: dtype for name, dtype in dtypes.items() if name in mentioned}
    require_exact_positions(programs, dtypes, bound)
    is_wide = TARGETS[target].is_wide or most_elements(bound) >= 1 << 31
    index_bits = 64 if is_wide else 32
    kinds = tuple(sorted(dtypes.items()))
    in_cache = _in_cache(TARGETS[target].in_cache, programs, bound, order)
    plain = Signature(target, order, kinds, index_bits, in_cache, ())
    if not TARGETS[target].holds_rows:
        lined = [] if bound.windows else programs
        strips = [p.name for p in lined if leaves_lines_empty(p, bound, order)]
        short = [p.name for p in lined if _fills_no_line(p, plain, bound)]
        return replace(plain, strips=tuple(strips), short_rows=tuple(short))
    plain = replace(plain, has_columns=has_whole_columns(bound, order))
    if bound.windows:
        found = _bundled(programs, dtypes, bound, order)
        if found is not None:
            mine = [p for p in programs if any(map(reduces_along, ir.topological(p.graph.roots)))]
            return replace(plain, rows=_of_all(mine, found))
        none = frozenset[int]()
        strips = [p.name for p in programs if in_short_runs(p, none, bound, order, dtypes)]
        return replace(plain, strips=tuple(strips))
    dealt = _dealt(plain, programs, bound, limits) if may_deal and index_bits == 32 else None
    if dealt is not None:
        return dealt
    options = _options(programs[0], bound) or _short_sums(programs, bound, order, dtypes)
    lie = options[0][0] if options else frozenset[int]()
    strips = [p.name for p in programs if in_short_runs(p, lie, bound, order, dtypes)]
    plain = replace(plain, strips=tuple(strips))
    held = []
    for axes, domain in options:
        around = [a for a in order if a in domain]
        # What goes down columns holds no rows across them.
        is_together = lie_together(axes, order)
        mine = [p for p in programs if is_together or p.name not in strips]
        tier = held_tier(axes, mine, dtypes, bound, around, limits) if axes and mine else None
        held.append(None if tier is None else Rows(tier, axes, domain))
    rows: list[tuple[str, Rows]] = []
    for program in programs:
        is_stripped = program.name in strips
        apt = [r for r in held if r is None or not is_stripped or lie_together(r.axes, order)]
        if is_stripped and not any(apt):
            apt = [None]
        found = streamed(program, plain, options[0], bound, limits) if options else None
        if found is None:
            found = apt[0] if len(apt) == 1 else _cheapest(program, plain, apt, bound)
            if found is not None:
                trial = replace(plain, rows=((program.name, found),))
                found = holding_less(program, trial, bound, limits)
        every = () if found is None else ((program.name, found),)
        tried = {domain for _, domain in options}
        rows += _with_smaller(program, replace(plain, rows=every), tried, bound, limits)
    return replace(plain, rows=tuple(rows))


def _fills_no_line(program: Program, plain: Signature, bound: Bound) -> bool:
    """Whether the elements that all tensors treat alike are so few, and such rows so many, that
    arithmetic by lines is to have several of them in each.
    """
    if math.prod(bound.domain) < _LEAST_SHORT:
        return False
    *outer, inner = grouped(program, plain)[-1].axes or ((),)
    return bool(outer) and math.prod(bound.domain[a] for a in inner) < _LEAST_OF_LINE


def _dealt(
    plain: Signature, programs: Sequence[Program], bound: Bound, limits: Limits
) -> Signature | None:
    """The signature where every program holds rows that are dealt out over memory; None where some
    program would go over such tensors otherwise.
    """
    order = dealt_order(programs, bound, plain.order)
    if not order:
        return None
    (axes, domain), *others = _options(programs[0], bound)
    dtypes, run = dict(plain.dtypes), deal_of(plain.order, order, bound.domain).run
    tier = held_tier(axes, programs, dtypes, bound, order, limits, run=run) if axes else None
    if tier is None or others:
        return None
    length = math.prod(bound.domain[a] for a in axes)
    size = (math.prod(bound.domain) // length, length, limits.processors)
    widest = max(widest_of(p, axes, dtypes) for p in programs)
    tensors = max(words_of(p, axes, dtypes) for p in programs)
    is_dear = calls_functions(programs, axes)
    tier = with_room(tier, *size, widest, tensors, is_dear=is_dear)
    if tier is None:
        return None
    held = _of_all(programs, Rows(tier, axes, domain))
    found = replace(plain, order=order, rows=held, is_dealt=True)
    return found if all(goes_by_rows(make_entry(p, found)) for p in programs) else None


def _of_all(programs: Iterable[Program], rows: Rows) -> tuple[tuple[str, Rows], ...]:
    return tuple((p.name, rows) for p in programs)


def _cheapest(
    program: Program, plain: Signature, held: Iterable[Rows | None], bound: Bound
) -> Rows | None:
    """Of some rows, likeliest first, those with which a program takes least."""
    best, least = None, math.inf
    for rows in dict.fromkeys(held):
        every = () if rows is None else ((program.name, rows),)
        cost = _cost(program, replace(plain, rows=every), bound)
        if cost < _LEAST_GAIN * least:
            best, least = rows, cost
    return best


def _cost(program: Program, trial: Signature, bound: Bound) -> int:
    """What a program takes, in bytes that memory would move meanwhile."""
    entry = make_entry(program, trial)
    sizes = [math.prod(bound.domain[a] for a in axes) for axes in entry.grouping.axes]
    inner = (k.domain[:-1] for k in entry.kernels if k.family == "inner")
    rows = sum(math.prod(sizes[g] for g in domain if g >= 0) for domain in inner)
    return moved(entry, bound) + _KERNEL_BYTES * len(entry.kernels) + _ROW_BYTES * rows


def _with_smaller(
    program: Program,
    plain: Signature,
    tried: Collection[ir.Extent],
    bound: Bound,
    limits: Limits,
) -> tuple[tuple[str, Rows], ...]:
    """The rows that a program holds of elements, and those of what reductions leave of them, along
    other axes than have been tried, as far as these spare it something.
    """
    dtypes = dict(plain.dtypes)
    reduces = [n for n in ir.topological(program.graph.roots) if n.op == "reduce"]
    every = frozenset(range(-len(bound.domain), 0))
    smaller = [n for n in reduces if n.args[0].extent < every and n.args[0].extent not in tried]
    smaller.sort(key=lambda n: -math.prod(bound.domain[a] for a in n.args[0].extent))
    options = dict.fromkeys((ir.reduction(n)[1], n.args[0].extent) for n in smaller)
    # What is reduced over more than a row is reduced over each row first.
    for _, rows in plain.rows:
        more = [n for n in reduces if ir.reduction(n)[1] > rows.axes and n.args[0].extent == every]
        options |= dict.fromkeys((ir.reduction(n)[1] - rows.axes, every - rows.axes) for n in more)
    reduces_twice = not plain.rows and len(reduced_axes(program)) > 1
    # Sizes of channels, unlike those of samples and images, are a model's: no other is built.
    channels = frozenset(a for axis in bound.slots[1:2] for a in axis)
    if program.name in plain.strips or reduces_twice:
        found = _left(make_entry(program, plain))
        options |= dict.fromkeys(option for option in found if option[0] <= channels)
    least = _cost(program, plain, bound) if options else 0
    for axes, domain in options:
        around = [a for a in plain.order if a in domain]
        if axes == domain and not axes <= channels:
            length = math.prod(bound.domain[a] for a in axes)
            if length > _MOST_SAMPLES:
                continue
        tier = held_tier(axes, [program], dtypes, bound, around, limits, is_left=True)
        is_new = all((axes, domain) != (rows.axes, rows.domain) for _, rows in plain.rows)
        if is_new and tier is not None and not tier.is_shared:
            trial = replace(plain, rows=(*plain.rows, (program.name, Rows(tier, axes, domain))))
            cost = _cost(program, trial, bound)
            if cost < least:
                plain, least = trial, cost
    return plain.rows


def _left(entry: Entry) -> Iterator[tuple[ir.Extent, ir.Extent]]:
    """The axes of rows that are reduced in several kernels though they are small, and what those
    vary along: what reductions have left of elements.
    """

    def axes_of(groups: Iterable[int]) -> ir.Extent:
        return frozenset(a for g in groups for a in entry.grouping.axes[g])

    most = max((len(kernel.domain) for kernel in entry.kernels), default=0)
    for kernel in entry.kernels:
        is_small = 0 < len(kernel.domain) < most and min(kernel.domain) >= 0
        if kernel.family == "inner" and is_small:
            for kept in dict.fromkeys(buffer.extent for _, buffer in kernel.sums):
                yield axes_of(g for g in kernel.domain if g not in kept), axes_of(kernel.domain)


def _bundled(
    programs: Sequence[Program], dtypes: Mapping[str, str], bound: Bound, order: Sequence[int]
) -> Rows | None:
    """The rows of bundles, where a chain has such."""
    found = bundle(bound, order)
    if found is None:
        return None
    axes = frozenset({found.axis})
    domain = bound.x.extent.union(a for a, _ in bound.windows)
    widest = max(widest_of(p, axes | {found.side}, dtypes) for p in programs)
    if found.is_pooled_first:  # what windows have one of is not as wide as what they pool
        within = frozenset(-a for a, _ in bound.windows)
        widest = max(-(-widest // found.inner), *(widest_of(p, within, dtypes) for p in programs))
    words = max(words_of(p, axes, dtypes) for p in programs)
    # A derivative's tensors may be narrower than those by which the segment was chosen.
    other = max(widest, _FLOAT_BYTES) if found.is_pooled_first else _FLOAT_BYTES
    tier = found.tier(widest, words) or found.tier(other, words)
    return None if tier is None else Rows(tier, axes, domain)


def _options(program: Program, bound: Bound) -> list[tuple[ir.Extent, ir.Extent]]:
    """The axes along which rows may be held on the chip, and those of all rows together, likeliest
    first: those of the reductions over most elements. () comes first where none are likelier.

    Likely are those which are reduced last: none over others depends on those.
    """
    nodes = ir.topological(program.graph.roots)

    def elements(node: Expr) -> int:
        return math.prod(bound.domain[a] for a in node.extent if a < 0)

    reduces = [n for n in nodes if n.op == "reduce"]
    most = max((elements(r.args[0]) for r in reduces), default=0)
    largest = [r for r in reduces if elements(r.args[0]) == most]
    domains: dict[ir.Extent, set[ir.Extent]] = {}
    for node in largest:
        domains.setdefault(ir.reduction(node)[1], set()).add(node.args[0].extent)
    found = {axes: d.pop() for axes, d in domains.items() if len(d) == 1}
    last, none = _last(largest), frozenset[int]()
    first = last if last in found else none
    return [(first, found.pop(first, none)), *found.items()] if reduces else []


def _short_sums(
    programs: Iterable[Program], bound: Bound, order: Sequence[int], dtypes: Mapping[str, str]
) -> list[tuple[ir.Extent, ir.Extent]]:
    """The short rows that gradients are summed over, of a chain that reduces nothing itself: the
    kernel that writes a row's elements has its sums too, with nothing to merge.
    """
    for program in programs:
        found = _options(program, bound)
        for axes, _ in found:
            longest = _LONGEST_SUMMED[widest_of(program, axes, dtypes) <= _NARROW_BYTES]
            is_row = bool(axes) and axes == set(order[-len(axes) :])
            if is_row and math.prod(bound.domain[a] for a in axes) <= longest:
                return found if len(found) == 1 else []
    return []


def _last(reduces: Sequence[Expr]) -> ir.Extent:
    """The axes reduced last; () where those are none, or differ."""
    before = set[ir.Extent]()
    for node in reduces:
        below = (n for n in ir.topological(node.args) if n.op == "reduce")
        before |= {ir.reduction(n)[1] for n in below} - {ir.reduction(node)[1]}
    last = {ir.reduction(n)[1] for n in reduces} - before
    return last.pop() if len(last) == 1 else frozenset()


def _in_cache(
    families: Sequence[str], programs: Sequence[Program], bound: Bound, order: Sequence[int]
) -> tuple[str, ...]:
    """Of some families of rows, those that are worked on as a whole: none where a row is too long
    for that, and not strided ones of which no more than a few are in cache.
    """
    if _has_few_long_rows(programs[0], bound):
        return ()
    nodes = ir.topological([root for p in programs for root in p.graph.roots])
    wider = [a for n in nodes if n.op != "reduce" for a in n.args if a.extent < n.extent]
    rows = {ir.reduction(n)[1] for n in ir.topological(wider) if n.op == "reduce"}
    strided = [row for row in rows if order[-1] not in row]
    longest = max((math.prod(bound.domain[a] for a in row if a < 0) for row in strided), default=0)
    return tuple(f for f in families if f != "column" or longest <= _MOST_IN_CACHE)


def _has_few_long_rows(program: Program, bound: Bound) -> bool:
    for axes in reduced_axes(program):
        length = math.prod(bound.domain[a] for a in axes if a < 0)
        rows = math.prod(bound.domain) // max(1, length)
        if length > _LONG_ROW and rows < _FEW_ROWS:
            return True
    return False
