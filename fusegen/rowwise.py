"""Row kernels: reductions over a row whose results its elements use again, all in one kernel.

The sums over all rows that a gradient of a parameter is made of are taken on the way, by columns,
and end as partials; a sum over rows and columns is a sum over each row first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fusegen import arity, ir
from fusegen.carrying import Staged, carry
from fusegen.grouping import ordered
from fusegen.hoisting import reduced_over_rows, shared_by_rows
from fusegen.ir import Expr, Extent
from fusegen.kernel import Buffer, Family, Kernel, Reduction
from fusegen.lower import remarked
from fusegen.rowaxes import axes_to_hold, domain_of
from fusegen.staging import Pass, finalise, partials, reduces_below, staged
from fusegen.streaming import rescaling
from fusegen.target import ITEM_BYTES
from fusegen.tiers import Tier

_MOST_CARRIED = 32  # elements of a thread of 1,024, in all tensors, with room for what is carried


def rowwise_kernel(
    state: Pass,
    tier: Tier | None,
    tier_axes: Extent,
    in_cache: Sequence[str] = (),
    left: Extent | None = None,
) -> None:
    """One kernel for every full-size output whose reductions share their axes, and for the sums
    over rows: a row, or a column of strided rows. A tier is for rows along certain axes; without
    one, rows are of the families that are worked on in cache. left is the extent of what other
    reductions have left, if rows of that are reduced and elements wait.
    """
    domain = domain_of(state) if left is None else left
    axes = axes_to_hold(state, domain, tier, tier_axes) if left is None else tier_axes
    if axes is None:
        return
    rest = domain - axes
    family: Family = "row" if max(axes) == max(domain) else "column"
    reduces = reduces_below(state.pending.values())
    if tier is None and reduces and family not in in_cache:
        return
    lead = _lead(state, domain, axes) if tier is not None and tier.has_stretches else None

    fixed = set(reduces)
    if tier is not None and not state.is_exact:
        fixed.intersection_update(state.pending.values())

    def is_local(expr: Expr) -> bool:
        """Whether the kernel can compute it: every reduction below is one of its own, and what is
        read lies in memory. A reduction that several rows on the chip have in common, each has for
        itself, where its last bits do not matter and it is no output.
        """
        inside = reduces_below([expr])
        is_known = all(leaf in state.buffers for leaf in ir.inputs([expr]))
        own = all(r.extent == rest or (r.extent < rest and r not in fixed) for r in inside)
        return is_known and own and all(ir.reduction(r)[1] == axes for r in inside)

    def is_stretch(node: Expr) -> bool:
        return lead is not None and _is_stretch_sum(node, domain, axes, lead)

    def is_total(node: Expr) -> bool:
        """Whether it sums over all rows what each of them has once."""
        (value,) = node.args
        return ir.reduction(node) == ("sum", rest) and value.extent == rest and is_local(value)

    is_long = tier is not None and tier.has_long_stretches
    whole = [r for r in reduces if is_local(r.args[0]) and not (is_long and is_stretch(r))]
    state.resolve(_rows_first(whole, domain, axes))
    chosen = {
        n: e
        for n, e in state.pending.items()
        if is_local(e) and (e.extent == domain or (e.extent == rest and reduces_below([e])))
    }
    state.pending = {n: e for n, e in state.pending.items() if n not in chosen}
    found = [r for r in reduces_below(state.pending.values()) if is_local(r.args[0])]
    kept, columns = _column_sums(state, tier, found, domain, axes)
    kept = kept if columns else frozenset()
    summed_by = ordered(axes | kept)
    mine, known = partials(state, columns, summed_by)
    state.resolve(known)
    stretches: list[tuple[Reduction, Buffer]] = []
    if tier is not None and (is_long or not tier.may_be_shared):
        below = reduces_below(state.pending.values())
        found = [r for r in below if is_stretch(r) and is_local(r.args[0])]
        for node in found[: tier.most_stretches(ITEM_BYTES[state.sum_dtype])]:
            more, known = partials(state, [node], ordered(node.extent))
            stretches += more
            state.resolve(known)
    below = reduces_below(state.pending.values())
    is_alone = tier is not None and (family == "column" or tier.is_streamed)
    is_apt = is_alone and left is None and not kept
    totals, known = partials(state, [r for r in below if is_apt and is_total(r)], ())
    state.resolve(known)
    below = reduces_below(state.pending.values())
    results = [r for r in below if r.extent == rest and is_local(r)]
    summed = [r.value for r, _ in (*mine, *stretches)]
    roots = [*summed, *chosen.values(), *(r.value for r, _ in totals), *results]
    if not roots:
        return
    stages, leaf_of, values = staged(state, roots)
    stages = _alike_together(stages)
    is_found = tier is not None and family == "row" and not state.is_exact
    rescaled = rescaling(stages, state.fresh) if is_found else None
    values = values[: len(roots) - len(results)]
    late = [len(stages)] * (len(values) - len(summed))
    levels = [_level_of(v, stages) for v in values[: len(summed)]] + late
    marks = state.marks_over(leaf_of)
    in_place: dict[Expr, Expr] | None = None
    terms = [r.value for stage in stages for r in stage]
    nodes = [m.node for m in marks]
    unknown = {leaf for stage in stages for r in stage for _, leaf in r.results}
    images = iter(state.eased([*terms, *values, *nodes], unknown, domain))
    stages = [tuple(replace(r, value=next(images)) for r in stage) for stage in stages]
    values = [next(images) for _ in values]
    marks = remarked(marks, dict(zip(nodes, images, strict=True)))
    alone = Staged(tuple(stages), tuple(values), marks=marks)
    narrow = {i for i, b in state.buffers.items() if ITEM_BYTES[b.dtype] <= 2}
    narrow = narrow if tier is not None and tier.resident and tier.lanes > 1 else set()
    read = sum(leaf.extent == domain for leaf in ir.inputs([*terms, *values]))
    spares_dear = tier is None or tier.has_room_for(read + 1)
    is_single = tier is not None and tier.lanes == 1 and family == "row"
    apart = axes if is_single or family == "column" else frozenset()
    work = (
        alone
        if tier is not None and tier.is_streamed
        else carry(
            *(alone, levels, domain, state.fresh),
            is_on_chip=tier is not None,
            spares_dear=spares_dear,
            narrow=narrow,
            apart=apart,
            few_apart=0 if is_single else 1,
        )
    )
    is_shared = tier is not None and tier.is_shared and len(stages) == 1
    is_full = tier is not None and tier.is_full and read * tier.elements > _MOST_CARRIED
    if is_shared or is_full:
        # Beside packs that are asked for, what is carried would spill.
        is_asking = tier is not None and bool(tier.asked or tier.at_use)
        in_place = None if is_asking else _in_place(work, levels, domain, state)
        if in_place is None:  # what was read is at hand for the next stage
            work = alone
    stages, values, held, marks = [*work.stages], [*work.values], work.held, work.marks
    accumulated = [
        (replace(r, value=value), b)
        for (r, b), value in zip((*mine, *stretches), values, strict=False)
    ]
    sums, stretches = accumulated[: len(mine)], accumulated[len(mine) :]
    outputs = values[len(summed) : len(values) - len(totals)]
    terms = values[len(values) - len(totals) :]
    totals = tuple((replace(r, value=v), b) for (r, b), v in zip(totals, terms, strict=True))
    stores = [(state.output(n, e), e) for n, e in zip(chosen, outputs, strict=True)]
    stored = {expr: buffer for buffer, expr in stores if buffer.dtype == state.sum_dtype}
    known = {node: leaf_of[node] for node in results}
    for leaf in known.values():
        state.buffers[leaf] = stored.get(leaf) or state.scratch(leaf)
    state.resolve(known)
    written = zip((b for b, _ in stores), ir.substitute(chosen.values(), known), strict=False)
    state.read_back(written)
    is_row = tier is not None and family == "row"
    shared = shared_by_rows(state.pending.values(), domain, rest) if is_row else []
    ahead = state.find_ahead(shared or reduced_over_rows(state.pending.values(), rest))
    needed = set(ir.inputs(state.pending.values()))
    stores += [(state.buffers[r], r) for r in known.values() if r in needed and r not in stored]
    stores += [(state.buffers[leaf], node) for node, leaf in ahead.items()]
    exprs = [r.value for stage in stages for r in stage] + values + list(ahead)
    exprs += [value for pairs in held for _, value in pairs]
    own = [*leaf_of.values(), *(leaf for pairs in held for leaf, _ in pairs)]
    state.kernels.append(
        Kernel(
            family,
            state.fresh(f"{state.prefix}_{family}"),
            ordered(rest),
            ordered(axes),
            state.inputs_of(exprs, own),
            tuple(stores),
            tuple(stages),
            sums=tuple(sums),
            kept=ordered(kept),
            columns=summed_by if sums else (),
            marks=marks,
            tier=tier,
            held=held,
            placed=tuple(levels[: len(summed)]),
            lead=lead,
            stretches=tuple(stretches),
            totals=totals,
            in_place=tuple((in_place or {}).items()),
            rescaling=rescaled,
        )
    )
    if sums:
        finalise(state, summed_by, tuple(sums), summed_by)
    if totals:
        finalise(state, (), totals, ())
    for extent in dict.fromkeys(b.extent for _, b in stretches):
        alike = tuple((r, b) for r, b in stretches if b.extent == extent)
        assert lead is not None
        finalise(state, extent, alike, (lead,))


def _alike_together(stages: Sequence[tuple[Reduction, ...]]) -> list[tuple[Reduction, ...]]:
    """The stages with what could be reduced at once put off to a later one where that reduces in
    the same way: each way takes a merge of its own.
    """
    found = [*stages]
    for i, stage in enumerate(stages[:-1]):
        for kind in dict.fromkeys(r.kind for r in stage):
            mine = [r for r in found[i] if r.kind == kind]
            leaves = {leaf for r in mine for _, leaf in r.results}
            until = next((j for j in range(i + 1, len(found)) if _reads(found[j], leaves)), None)
            there = [j for j in range(i + 1, until or len(found)) if _has_kind(found[j], kind)]
            if there and len(mine) < len(found[i]):
                found[i] = tuple(r for r in found[i] if r.kind != kind)
                found[there[0]] += tuple(mine)
    return found


def _reads(stage: Iterable[Reduction], leaves: Collection[Expr]) -> bool:
    exprs = [e for r in stage for e in (r.value, r.index, *r.picks) if e is not None]
    return not set(ir.inputs(exprs)).isdisjoint(leaves)


def _has_kind(stage: Iterable[Reduction], kind: str) -> bool:
    return any(r.kind == kind for r in stage)


def _rows_first(reduces: Sequence[Expr], domain: Extent, axes: Extent) -> dict[Expr, Expr]:
    """Sums over more than a row, or over more than all rows, taken in two steps; maxima over more
    than a row too.
    """
    new = {}
    for node in reduces:
        kind, along = ir.reduction(node)
        if node.args[0].extent != domain or kind not in ("sum", *arity.MAXIMA):
            continue
        for first in (axes, domain - axes) if kind == "sum" else (axes,):
            if along > first and node not in new:
                inner = ir.reduce(kind, first, node.args[0])
                new[node] = ir.reduce(kind, along - first, inner)
    return new


def _column_sums(
    state: Pass, tier: Tier | None, found: Sequence[Expr], domain: Extent, axes: Extent
) -> tuple[Extent, list[Expr]]:
    """The sums over other groups than the rows' that a kernel adds up on the way, as many as it has
    room for, and the groups that tell rows apart which they keep.
    """
    rest = domain - axes
    columns = [r for r in found if _is_column_sum(r, domain, rest)]
    most = len(found) if tier is None else tier.most_sums(ITEM_BYTES[state.sum_dtype])
    kept, alike = frozenset[int](), list[Expr]()
    if max(axes) == max(domain) and (tier is None or tier.keeps_alike):
        kept, alike = _sums_of_alike(found, domain, rest, is_outermost=tier is None)
    elif not columns and (tier is None or tier.is_alone):
        kept, alike = _sums_behind(found, domain, axes)
    if not columns:
        return kept, alike[:most]
    if not alike or len(alike) + len(columns) > most:
        return frozenset(), columns[:most]
    # Over all rows is over those that are alike, and then over what tells these apart.
    first = {r: ir.reduce_sum(r.args[0], rest - kept) for r in columns}
    state.resolve({r: ir.reduce_sum(inner, kept) for r, inner in first.items()})
    return kept, [*dict.fromkeys((*alike, *first.values()))]


def _is_column_sum(node: Expr, domain: Extent, rest: Extent) -> bool:
    return ir.reduction(node) == ("sum", rest) and node.args[0].extent == domain


def _sums_of_alike(
    reduces: Sequence[Expr], domain: Extent, rest: Extent, *, is_outermost: bool
) -> tuple[Extent, list[Expr]]:
    """The groups that tell rows apart which sums over the other rows keep, and these sums; those
    that keep the fewest. They are the outermost of such groups, or else the innermost ones, where
    those may be kept too.
    """
    found: dict[Extent, list[Expr]] = {}
    for node in reduces:
        kind, axes = ir.reduction(node)
        kept = rest - axes
        is_apt = kind == "sum" and node.args[0].extent == domain and axes < rest
        is_innermost = is_apt and not is_outermost and min(kept) > max(axes)
        if is_apt and (is_innermost or kept == {min(rest)}):
            found.setdefault(kept, []).append(node)
    return min(found.items(), key=lambda pair: len(pair[0]), default=(frozenset(), []))


def _sums_behind(
    reduces: Sequence[Expr], domain: Extent, axes: Extent
) -> tuple[Extent, list[Expr]]:
    """The groups before strided rows, and the sums over all that lies behind."""
    kept = frozenset(g for g in domain if g < min(axes))
    along = domain - axes - kept
    of_all = [r for r in reduces if r.args[0].extent == domain]
    return kept, [r for r in of_all if kept and ir.reduction(r) == ("sum", along)]


def _lead(state: Pass, domain: Extent, axes: Extent) -> int | None:
    """The first of two groups of a row, if it is all that anything in part along the row has."""
    if len(axes) != 2:
        return None
    extents = {leaf.extent & axes for leaf in state.buffers}
    extents |= {e.extent & axes for e in state.pending.values()}
    lead = min(axes)
    return lead if extents - {frozenset(), axes} == {frozenset({lead})} else None


def _is_stretch_sum(node: Expr, domain: Extent, axes: Extent, lead: int) -> bool:
    """Whether a node sums over the stretches of rows, and over any rows."""
    kind, along = ir.reduction(node)
    return kind == "sum" and node.args[0].extent == domain and along & axes == axes - {lead}


def _level_of(expr: Expr, stages: Sequence[Sequence[Reduction]]) -> int:
    """The first stage before whose reductions everything in expr is known."""
    leaves = set(ir.inputs([expr]))
    used = [i for i, s in enumerate(stages) for r in s for _, leaf in r.results if leaf in leaves]
    return max(used, default=-1) + 1


def _in_place(
    work: Staged, levels: Sequence[int], domain: Extent, state: Pass
) -> dict[Expr, Expr] | None:
    """For each value that the last stage leaves, what was read and is not needed behind it, of
    whose size the value is; None where there are no stages, those before leave any, or there is
    not enough.
    """
    if not work.held or any(work.held[:-1]):
        return None
    stage, held = work.stages[-1], work.held[-1]
    later = set(ir.inputs([v for v, level in zip(work.values, levels, strict=True) if level > 0]))
    read = ir.inputs([*(r.value for r in stage), *(value for _, value in held)])
    free = [i for i in read if i.extent == domain and i not in later]
    free = [i for i in free if state.buffers[i].dtype == state.sum_dtype]
    left = [leaf for leaf, _ in held if leaf in later]
    return dict(zip(left, free, strict=False)) if len(left) <= len(free) else None
