"""What stages of reductions over rows leave for each other.

Between two reductions a kernel carries a minimum cut of the graph, so that nothing dear is computed
twice and no more is kept than must be. Where rows fit on the chip it cuts what was read, and memory
is read once. Where they are in cache it cuts what is dear: to keep what was merely read would cost
time. Where a thread has whole rows it cuts both, for it has the room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from fusegen import ir
from fusegen.cut import minimum_cut
from fusegen.ir import Expr, Extent
from fusegen.kernel import Reduction
from fusegen.lower import Mark, remarked
from fusegen.target import DEAR, FUNCTIONS

Stage = tuple[Reduction, ...]
Held = tuple[tuple[tuple[Expr, Expr], ...], ...]


@dataclass(frozen=True)
class Staged:
    """Stages and values over what earlier stages leave; what that is, by stage; and the marks."""

    stages: tuple[Stage, ...]
    values: tuple[Expr, ...]
    held: Held = ()
    marks: tuple[Mark, ...] = ()


def carry(
    work: Staged,
    levels: Sequence[int],
    domain: Extent,
    fresh: Callable[[str], str],
    *,
    is_on_chip: bool,
    spares_dear: bool,
    narrow: Collection[Expr] = (),
    apart: Extent = frozenset(),
    few_apart: int = 0,
) -> Staged:
    """The same work, where each stage leaves for later ones what they need of it: on the chip, all
    but what was read, or follows in a few instructions from two tensors that are narrow, which
    take no more room; and where dear values are to be spared, those too. Each value is computed at
    its level. Along the groups `apart` little is read in packs: what follows from more tensors that
    stand beside the elements than few_apart is kept too, as each would be read again for every one.
    """
    # Every expression with its level: a stage's terms at its own.
    exprs = [(r.value, i) for i, stage in enumerate(work.stages) for r in stage]
    exprs += zip(work.values, levels, strict=True)
    names = {m.node: m.name for m in work.marks}
    held: list[tuple[tuple[Expr, Expr], ...]] = []

    def is_element(node: Expr) -> bool:
        return node.extent == domain

    new_marks, marks = work.marks, list(work.marks)
    for i in range(len(work.stages)):
        unknown = {leaf for s in work.stages[i:] for r in s for _, leaf in r.results}
        later = [e for e, level in exprs if level > i]
        cut = (
            _values_to_carry(later, domain, unknown, narrow, apart, few_apart) if is_on_chip else []
        )
        if spares_dear:
            now = set(ir.topological([e for e, level in exprs if level == i]))
            dear = {n for n in now if n.op in FUNCTIONS}
            cut += cut_before(later, is_element, unknown, dear.__contains__)
        leaf_of = {
            node: ir.tensor(
                fresh("carried" + (f"_{names[node]}" if node in names else "")),
                node.extent,
                0,
            )
            for node in dict.fromkeys(cut)
        }
        seen = ir.substitute(later, leaf_of)
        used = set(ir.inputs(seen))
        held.append(tuple((leaf, node) for node, leaf in leaf_of.items() if leaf in used))
        images = iter(seen)
        exprs = [(next(images) if level > i else e, level) for e, level in exprs]
        nodes = [m.node for m in new_marks]
        known = dict(zip(nodes, ir.substitute(nodes, leaf_of), strict=True))
        new_marks = remarked(new_marks, known)
        marks += new_marks
    results = iter([e for e, _ in exprs])
    stages = tuple(tuple(replace(r, value=next(results)) for r in s) for s in work.stages)
    return Staged(stages, tuple(results), tuple(held), tuple(dict.fromkeys(marks)))


def _values_to_carry(
    later: Sequence[Expr],
    domain: Extent,
    unknown: set[Expr],
    narrow: Collection[Expr],
    apart: Extent,
    few_apart: int,
) -> list[Expr]:
    """What has to be kept of the elements until the unknown is known, apart from what was read."""

    def is_read(node: Expr) -> bool:
        return node.op == "input" and node.extent == domain

    kept: list[Expr] = []

    def is_element(node: Expr) -> bool:
        return node.extent == domain

    for node in cut_before(later, is_element, unknown, is_read):
        below = ir.topological([node])
        sources = [n for n in below if is_read(n)]
        is_dear = any(n.op in DEAR for n in below if n.extent == domain)
        # What follows from one tensor, or two narrow ones, in a few instructions is had again.
        is_small = len(sources) == 1 or (len(sources) == 2 and all(n in narrow for n in sources))
        others = [n for n in below if n.op == "input" and n.extent & apart and n.extent < domain]
        is_small &= len(others) <= few_apart
        kept += [node] if is_dear or not is_small else sources
    return [n for n in dict.fromkeys(kept) if n.op != "input"]


def cut_before(
    later: Sequence[Expr],
    is_element: Callable[[Expr], bool],
    unknown: Collection[Expr],
    is_source: Callable[[Expr], bool],
) -> list[Expr]:
    """The fewest elements that spare the later expressions their sources, of those that need not
    wait for the unknown.
    """
    order = ir.topological(later)
    waits: set[Expr] = set()
    for node in order:
        if node in unknown or any(a in waits for a in node.args):
            waits.add(node)
    ready = {a for n in order if n in waits for a in n.args} | set(later)
    sinks = [n for n in order if n in ready and n not in waits and is_element(n)]
    return minimum_cut(
        sinks,
        lambda node: is_element(node) and is_source(node),
        # What was read is at hand, whatever it is; conditions and positions are not carried.
        lambda node: is_element(node) and (node.op == "input" or node.kind in ("number", "noise")),
    )
