"""Groups: axes that every tensor and reduction treats alike, collapsed into one.

Outermost in memory first. So a kernel knows neither rank nor sizes, and a new shape needs no build.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen import arity, ir
from fusegen.ir import Expr, Extent, Graph
from fusegen.windowing import Slide, Window, size_of

# Besides reductions, the operations that name axes.
_KNOW_AXES = ("count", "covered", "once", "position", "repeated")


@dataclass(frozen=True)
class Grouping:
    """Which axes form which group: group g is axes[g], outermost in memory first; windows are
    groups -1, -2, ...
    """

    axes: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...] = ()  # window sizes, outermost first; group -1 is the first
    pooled: tuple[int, ...] = ()  # the group that each window splits
    slides: tuple[Slide, ...] = ()  # how each lies, where they are not tiles

    @property
    def names(self) -> tuple[str, ...]:
        """A word for each group's index and size."""
        return group_names(len(self.axes))


def group_names(number: int) -> tuple[str, ...]:
    """Words for a kernel's group indices: element; outer, inner; outer, middle, inner; then
    numbered ones between.
    """
    fixed = {0: (), 1: ("element",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}
    if number in fixed:
        return fixed[number]
    return ("outer", *(f"axis_{i}" for i in range(1, number - 1)), "inner")


def collapse(
    graph: Graph,
    order: Sequence[int],
    windows: Mapping[int, Window],
    alone: Iterable[Extent] = (),
) -> tuple[Graph, dict[Expr, Expr], Grouping]:
    """The graph over groups instead of axes, old node by new, and the grouping.

    order lists the axes outermost in memory first; windows gives each pooled axis's window size.
    Neighbours join when every tensor and every reduction has both or neither, and so has each of
    the extents in alone.
    """
    nodes = ir.topological(graph.roots)
    # All other extents are made of these, by unions and differences.
    touched: set[Extent] = {n.extent for n in (*nodes, *graph.inputs) if n.op == "input"}
    touched |= {*alone}
    touched |= {ir.reduction(n)[1] for n in nodes if n.op == "reduce"}
    touched |= {frozenset(ir.axes_of(n)) for n in nodes if n.op in _KNOW_AXES}
    if not any(axis > 0 for extent in touched for axis in extent):
        windows = {}  # all is of the pooled size
    # A pooled axis has a group of its own even where nothing varies along it: windows count it.
    present = [a for a in order if a in windows or any(a in e for e in touched)]
    # Noise goes by the logical index, so a group of its axes must be in the logical order.
    is_ordered = any(leaf.kind == "noise" for leaf in graph.inputs)
    groups: list[list[int]] = []
    for axis in present:
        joins = groups and not (axis in windows or groups[-1][-1] in windows)
        if joins and is_ordered:
            joins = axis == groups[-1][-1] + 1
        if joins and all((axis in e) == (groups[-1][-1] in e) for e in touched):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    place = {axis: g for g, members in enumerate(groups) for axis in members}
    pooled_axes = sorted(windows)
    place |= {-axis: -1 - i for i, axis in enumerate(pooled_axes)}
    place |= {ir.SLIDING - axis: -1 - i for i, axis in enumerate(pooled_axes)}
    slides = [w for w in (windows[a] for a in pooled_axes) if isinstance(w, Slide)]
    grouping = Grouping(
        # Where nothing varies at all, one group of no axes: its size is 1, as an empty product is.
        tuple(map(tuple, groups)) or ((),),
        tuple(size_of(windows[a]) for a in pooled_axes),
        tuple(place[a] for a in pooled_axes),
        tuple(slides),
    )
    new: dict[Expr, Expr] = {}
    for node in nodes:
        new[node] = _regroup(node, tuple(new[a] for a in node.args), place)
    for leaf in graph.inputs:
        new.setdefault(leaf, _regroup(leaf, (), place))
    outputs = tuple((name, new[expr]) for name, expr in graph.outputs)
    return Graph(tuple(new[i] for i in graph.inputs), outputs), new, grouping


def _regroup(node: Expr, args: tuple[Expr, ...], place: Mapping[int, int]) -> Expr:
    extent = frozenset(place[a] for a in node.extent)
    if node.op in arity.ARITY:
        return ir.primitive(node.op, *args)
    if node.op == "reduce":
        kind, axes = ir.reduction(node)
        return ir.reduce(kind, {place[a] for a in axes}, *args)
    if node.op == "once":
        return ir.once(args[0], {place[a] for a in ir.axes_of(node)})
    if node.op == "repeated":
        return ir.repeated(args[0], {place[a] for a in ir.axes_of(node)})
    if node.op in ("count", "position"):
        axes = frozenset(place[a] for a in ir.axes_of(node))
        return ir.count(axes) if node.op == "count" else ir.position(axes, 0)
    if node.op == "covered":
        within = tuple(sorted(place[a] for a in ir.axes_of(node)))
        return ir.make("covered", attrs=(within, *node.attrs[1:]), extent=extent, rank=0)
    return ir.make(node.op, args, node.attrs, extent=extent, rank=0, kind=node.kind)


def ordered(extent: Extent) -> tuple[int, ...]:
    """Groups in memory order: outer to inner, then the windows, outermost first."""
    return (
        *sorted(g for g in extent if g >= 0),
        *sorted((g for g in extent if g < 0), reverse=True),
    )
