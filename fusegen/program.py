"""Programs: what one launch computes, and its derivative as another program.

A forward program that is to be differentiated may give more than its result: the values its
derivative wants in place of an input (a pooling window's winner for the whole window) or would have
to find again (a row's statistics). Those are outputs like any other, so that second derivatives
find their way back through them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusegen import arity, ir
from fusegen.autodiff import is_differentiable, vjp, winners
from fusegen.bound import Bound
from fusegen.ir import Expr, Extent, Graph
from fusegen.lower import GIVEN, NEW, Mark, lower, remarked
from fusegen.patterns import told_by_result
from fusegen.picking import Piece, picked_first
from fusegen.promotion import NARROW
from fusegen.simplify import simplification
from fusegen.windowing import Window, windows_along

Places = tuple[tuple[int, int], ...]  # (axis, where along it, from its end if below 0)
WINNER = "winner_index"
STATISTIC = "saved_"  # how the names of saved statistics begin
_LEAST_SPARED = 4  # elements for each value that is saved in their place, and may be twice as wide


@dataclass(frozen=True)
class Program:
    """A graph to launch and the same values in the form that is differentiated.

    values has, for each output, its expression over inputs and saved outputs, or None where it has
    no derivative. saved maps the nodes that an output stands for to that output's leaf.
    """

    name: str
    graph: Graph
    marks: tuple[Mark, ...]
    values: tuple[Expr | None, ...]
    saved: tuple[tuple[Expr, Expr], ...] = ()
    windows: tuple[tuple[int, Window], ...] = ()
    # The axes of each output as a tensor, where it may be the same all along some; () for its own.
    spans: tuple[Extent, ...] = ()
    # Of each input, where along some axes it is read, and nowhere else; () if all of each is.
    places: tuple[Places, ...] = ()
    pieces: tuple[Piece, ...] = ()  # inputs and outputs that are each a part of a tensor

    def places_of(self, i: int) -> Places:
        """Where alone an input is read."""
        return self.places[i] if self.places else ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The tensors it takes, in order."""
        return tuple(map(ir.name_of, self.graph.inputs))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The tensors it gives, in order."""
        return tuple(name for name, _ in self.graph.outputs)

    @property
    def updates(self) -> tuple[tuple[int, int], ...]:
        """The last outputs, on which nothing depends, each with the input whose place it takes."""
        place = {name: i for i, name in enumerate(self.input_names)}
        new = [(i, name) for i, name in enumerate(self.output_names) if name.startswith(NEW)]
        return tuple((i, place[name.removeprefix(NEW)]) for i, name in new)

    @property
    def results(self) -> tuple[int, ...]:
        """Those of a chain's outputs that a call gives and that have a derivative."""
        given = (i for i, name in enumerate(self.output_names) if name.startswith(GIVEN))
        return tuple(i for i in (0, *given) if self.values[i] is not None)

    @property
    def of_results(self) -> tuple[Expr, ...]:
        """What those are, as they are launched."""
        return tuple(self.graph.roots[i] for i in self.results)


@dataclass(frozen=True)
class Derivative:
    """The program of a vector-Jacobian product, and where its tensors come from.

    sources gives ("input" | "output" | "cotangent", position in the differentiated program) for
    each input; targets the position of the input whose cotangent each output is; shared gives
    (input, output) where an input has the cotangent of another one, such as both terms of a sum;
    passed gives (input, position in the differentiated program) where an input has the cotangent of
    a result as it comes, such as what is added last: for that nothing is launched.
    """

    program: Program
    sources: tuple[tuple[str, int], ...]
    targets: tuple[int, ...]
    shared: tuple[tuple[int, int], ...] = ()
    passed: tuple[tuple[int, int], ...] = ()


def forward(bound: Bound, *, is_training: bool) -> Program:
    """The chain itself; when training, also what its derivative wants of it."""
    lowered = lower(bound)
    images = picked_first(lowered.graph, [m.node for m in lowered.marks], dict(bound.windows))
    outputs = tuple((name, images[expr]) for name, expr in lowered.graph.outputs)
    graph = Graph(lowered.graph.inputs, outputs)
    graph, marks = _simplified(graph, remarked(lowered.marks, images))
    there = set(ir.topological(graph.roots))
    marks = tuple(replace(m, node=_left_of(m.node, there)) for m in marks)
    count = 1 + len(bound.gives)
    results, new = graph.roots[:count], graph.roots[count:]
    of_result = frozenset(a for axes in bound.result for a in axes)
    of_operands = {f"{NEW}{ir.name_of(leaf)}": leaf.extent for leaf in graph.inputs}
    of_new = (of_operands[name] for name, _ in graph.outputs[count:])
    spans = (of_result, *(g.extent for g in bound.gives), *of_new)
    values = [r if is_differentiable(r) else None for r in results] + [None for _ in new]
    plain = Program("forward", graph, marks, tuple(values), (), bound.windows, spans)
    if not is_training or not plain.results:
        return plain
    pooled = _with_winners(plain) if plain.windows else None
    plain = plain if plain.windows else _told_by_result(plain)
    if pooled is None and _elements_a_window(bound) >= _LEAST_SPARED:
        pooled = _with_averages(plain)
    found = _with_statistics(pooled or plain) or pooled or plain
    return _updates_last(_reading_results(found, [g.dtype in NARROW for g in bound.gives]))


def _updates_last(plain: Program) -> Program:
    """The program with what takes the place of operands behind all that a call keeps."""
    new = [i for i, _ in plain.updates]
    order = [i for i in range(len(plain.values)) if i not in new] + new
    return replace(
        plain,
        graph=Graph(plain.graph.inputs, tuple(plain.graph.outputs[i] for i in order)),
        values=tuple(plain.values[i] for i in order),
        spans=tuple(plain.spans[i] for i in order),
    )


def _left_of(node: Expr, there: Container[Expr]) -> Expr:
    """What the algebra has left of a step's result: it, or the largest of what it was made of."""
    while node not in there and node.args:
        node = max(node.args, key=lambda a: len(a.extent))
    return node


def _with_winners(plain: Program) -> Program | None:
    """The program that also gives what a pooled value is made of, if it pools."""
    through, index, picks = winners(plain.of_results)
    if index is None:
        return None
    if any(pick.args[0].op != "input" for pick in picks):
        picks = ()  # statistics differ within windows, and their gradient reads all of x
    rank, (_, index_axes) = index.rank, ir.reduction(index)
    index_leaf = ir.tensor(WINNER, index.extent, rank, "index")
    derived, outputs, saved = [*through], [], []
    for pick in picks:
        name = f"picked_{ir.name_of(pick.args[0])}"
        saved.append((pick, ir.tensor(name, pick.extent, rank, pick.kind)))
        is_largest = pick.args[:1] == index.args  # itself, and not what it is computed of
        outputs.append((name, ir.reduce("max", index_axes, *index.args) if is_largest else pick))
        derived.append(pick)
    over_leaf = ir.substitute(derived, {index: index_leaf})
    picked = over_leaf[len(through) :]
    saved = [(node, leaf) for node, (_, leaf) in zip(picked, saved, strict=True)]
    outputs.append((WINNER, index))
    values = [*plain.values, *(v if v.kind == "number" else None for v in picked), None]
    for i, value in zip(plain.results, over_leaf, strict=False):
        values[i] = value
    return _saving(plain, outputs, tuple(values), ((index_leaf, index_leaf), *saved))


def _elements_a_window(bound: Bound) -> float:
    """How many elements there are for each window; 1 where nothing is pooled."""
    pooled = ((bound.domain[a], windows_along(w, bound.domain[a])) for a, w in bound.windows)
    return math.prod(elements / max(1, windows) for elements, windows in pooled)


def _with_averages(plain: Program) -> Program | None:
    """The program that also gives the sums of windows, where its derivative reads nothing then that
    varies within windows.
    """
    nodes = ir.topological(plain.of_results)
    found = [n for n in nodes if n.op == "reduce" and min(ir.reduction(n)[1]) > 0]
    if any(ir.reduction(n)[0] not in arity.SUMS for n in found):
        return None
    taken = {*plain.input_names, *plain.output_names}
    found = [n for n in found if n not in plain.of_results]
    outputs = [(_fresh(f"{STATISTIC}sum_of_window", taken), n) for n in found]
    saved = tuple((n, ir.tensor(name, n.extent, n.rank)) for name, n in outputs)
    values = (*plain.values, *(n for _, n in outputs))
    full = _saving(plain, outputs, values, saved)
    read = derivative(full, range(len(full.graph.inputs)), full.results).program.graph.inputs
    is_spared = outputs and not any(a > 0 for leaf in read for a in leaf.extent)
    return full if is_spared else None


def _with_statistics(plain: Program) -> Program | None:
    """The program that also gives the results of its reductions, if it has any but pooling, and
    where the maxima stand: their gradients go there, and need no more of what was reduced.
    """
    taken = {*plain.input_names, *plain.output_names}
    found: list[Expr] = []
    for node in ir.topological(plain.of_results):
        if node.op != "reduce" or node.kind != "number":
            continue
        kind, axes = ir.reduction(node)
        if min(axes) > 0 or (kind == "pick" and not ir.inputs([node.args[1]])):
            continue  # of a window, or read again where it is as soon as saved
        found += [node] if node not in plain.of_results else []
        found += [ir.reduce("argmax", axes, node.args[0])] if kind == "max" else []
    outputs = [(_fresh(f"{STATISTIC}{n.attrs[0]}", taken), n) for n in found]
    # What is pooled is differentiated through its winner.
    images = ir.substitute(found, _at_winners(plain))
    values = [image if image.kind == "number" else None for image in images]
    saved = [
        (image, ir.tensor(name, image.extent, image.rank))
        for image, (name, _) in zip(images, outputs, strict=True)
    ]
    if not outputs:
        return None
    return _saving(plain, outputs, (*plain.values, *values), (*plain.saved, *saved))


def _told_by_result(plain: Program) -> Program:
    """The program whose derivative asks its result, which whoever goes on with it keeps, as torch's
    does behind a relu or a softmax; where it reads no more for that.
    """
    value, name = plain.values[0], plain.output_names[0]
    if value is None:
        return plain
    leaf = ir.tensor(f"{name}_found", value.extent, value.rank)
    told = told_by_result(value, leaf)
    if told is None or value.extent != plain.spans[0]:  # which is larger in memory
        return plain
    saved = (*plain.saved, (leaf, ir.tensor(name, value.extent, value.rank)))
    return min(replace(plain, values=(told, *plain.values[1:]), saved=saved), plain, key=_most_read)


def _reading_results(plain: Program, are_narrow: Sequence[bool]) -> Program:
    """The program, differentiated by way of what it gives, which lies in memory anyway: where that
    reads no more of the largest tensors, and is no rounded maximum, which is found by comparing.
    """
    for i in filter(None, plain.results):  # of the chain's last value nobody else has need
        value, name = plain.values[i], plain.output_names[i]
        if value is None or value.op == "input" or value.extent != plain.spans[i]:
            continue
        if are_narrow[i - 1] and value.op == "reduce" and value.attrs[0] in arity.MAXIMA:
            continue
        saved = (*plain.saved, (value, ir.tensor(name, value.extent, value.rank)))
        plain = min((replace(plain, saved=saved), plain), key=_most_read)
    return plain


def _most_read(program: Program) -> int:
    """How many tensors of the largest extent the derivative reads."""
    found = derivative(program, range(len(program.graph.inputs)), program.results)
    extents = [leaf.extent for leaf in found.program.graph.inputs]
    return extents.count(max(extents, key=len, default=frozenset()))


def _at_winners(plain: Program) -> dict[Expr, Expr]:
    """For each maximum of windows whose winner is saved, the same as the value that is there."""
    known = {}
    for node in ir.topological(plain.of_results):
        through, index, _ = winners([node]) if node.op == "reduce" else ([node], None, ())
        if index is not None and WINNER in plain.output_names:
            leaf = ir.tensor(WINNER, index.extent, node.rank, "index")
            (known[node],) = ir.substitute(through, {index: leaf})
    return known


def _saving(
    plain: Program,
    more: Sequence[tuple[str, Expr]],
    values: tuple[Expr | None, ...],
    saved: tuple[tuple[Expr, Expr], ...],
) -> Program:
    """The program with more outputs, as far as derivatives of the results, and of them, use any."""
    outputs = (*plain.graph.outputs, *more)
    spans = (*plain.spans, *(expr.extent for _, expr in more))
    graph = Graph(plain.graph.inputs, outputs)
    full = replace(plain, graph=graph, values=values, saved=saved, spans=spans)
    keep, present, new = [*range(len(plain.graph.outputs))], [*plain.results], [0]
    while new:
        used = set(derivative(full, range(len(plain.graph.inputs)), present).program.input_names)
        new = [i for i, (name, _) in enumerate(outputs) if name in used and i not in keep]
        keep, present = sorted([*keep, *new]), [*present, *new]
    return replace(
        full,
        graph=Graph(plain.graph.inputs, tuple(outputs[i] for i in keep)),
        values=tuple(values[i] for i in keep),
        spans=tuple(spans[i] for i in keep),
    )


def derivative(
    program: Program,
    needs: Iterable[int],
    present: Iterable[int],
    alike: Sequence[object] = (),
    results: Sequence[object] = (),
) -> Derivative:
    """The cotangents of the inputs at `needs`, given those of the outputs at `present`.

    alike has, for each input, what is equal for tensors of one shape and type: those may share.
    results has the same for each output, where cotangents may be passed on.
    """
    taken = {*program.input_names, *program.output_names}
    cotangents: dict[int, Expr] = {}
    for i in present:
        value = program.values[i]
        if value is not None:
            name = _fresh(f"d_{program.output_names[i]}", taken)
            out = program.graph.roots[i]
            extent = program.spans[i] if program.spans else out.extent
            cotangents[i] = ir.tensor(name, extent, out.rank)
    wanted = [i for i in needs if program.graph.inputs[i].kind == "number"]
    wrt = [program.graph.inputs[i] for i in wanted]
    values = [v for v in program.values if v is not None]
    seeds = [cotangents.get(i) for i, v in enumerate(program.values) if v is not None]
    total = vjp(values, seeds, wrt)
    outputs: list[tuple[str, Expr]] = []
    targets: list[int] = []
    shared: list[tuple[int, int]] = []
    passed: list[tuple[int, int]] = []
    first: dict[object, int] = {}
    coming = {(leaf, leaf.extent, results[i]): i for i, leaf in cotangents.items() if results}
    for i, leaf in zip(wanted, wrt, strict=True):
        if leaf not in total:
            continue
        kind = (total[leaf], leaf.extent, alike[i] if alike else i)
        if kind in coming:
            passed.append((i, coming[kind]))
        elif kind in first:
            shared.append((i, first[kind]))
        else:
            first[kind] = len(outputs)
            share = _over_windows(total[leaf], leaf)
            outputs.append((_fresh(f"d_{ir.name_of(leaf)}", taken), share))
            targets.append(i)
    marks = [*program.marks, *_backward_marks(program, total)]
    nodes = [expr for _, expr in outputs] + [m.node for m in marks]
    saved = dict(program.saved)
    new = dict(zip(nodes, ir.substitute(nodes, saved), strict=True))
    graph = Graph((), tuple((name, new[expr]) for name, expr in outputs))
    graph, marks_here = _simplified(graph, remarked(marks, new))
    candidates = {leaf: ("input", i) for i, leaf in enumerate(program.graph.inputs)}
    leaves = {ir.name_of(leaf): leaf for _, leaf in program.saved}
    candidates |= {
        leaves[name]: ("output", i) for i, name in enumerate(program.output_names) if name in leaves
    }
    candidates |= {leaf: ("cotangent", i) for i, leaf in cotangents.items()}
    used = set(ir.inputs(graph.roots))
    inputs = tuple(leaf for leaf in candidates if leaf in used)
    assert len(inputs) == len(used), "a derivative reads only inputs, saved outputs and cotangents"
    name = "backward" if program.name == "forward" else f"{program.name}_of_backward"
    result = Program(
        name,
        Graph(inputs, graph.outputs),
        marks_here,
        graph.roots,
        windows=program.windows,
        spans=tuple(program.graph.inputs[i].extent for i in targets),
    )
    sources = tuple(candidates[leaf] for leaf in inputs)
    return Derivative(result, sources, tuple(targets), tuple(shared), tuple(passed))


def _over_windows(share: Expr, leaf: Expr) -> Expr:
    """The share, said to vary over windows where the leaf does, so that its tensor is whole."""
    within = {a for a in leaf.extent if a > 0}
    windows = {ir.SLIDING - a if a > ir.SLIDING else -a for a in within}
    return ir.repeated(share, within | (leaf.extent & windows))


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _backward_marks(program: Program, total: Mapping[Expr, Expr]) -> list[Mark]:
    """The cotangent that arrives at each step's result, last step first."""
    found = []
    for mark in reversed(program.marks):
        if mark.node in total and total[mark.node].op not in ("input", "const"):
            found.append(
                Mark(total[mark.node], f"d_{mark.name}", f"backward, down to {mark.comment}")
            )
    return found


def _simplified(graph: Graph, marks: Sequence[Mark]) -> tuple[Graph, tuple[Mark, ...]]:
    new = simplification((*graph.roots, *(m.node for m in marks)))
    outputs = tuple((name, new[expr]) for name, expr in graph.outputs)
    return Graph(graph.inputs, outputs), remarked(marks, new)
