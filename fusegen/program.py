"""Programs: what one launch computes, its derivative as another program, and the entry point that
codegen prints.

A forward program that is to be differentiated may give more than its result: the values its
derivative wants in place of an input (a pooling window's winner for the whole window). Those are
outputs like any other, so that second derivatives find their way back through them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusegen import ir
from fusegen.autodiff import vjp, winners
from fusegen.codegen import Source, emit
from fusegen.grouping import Grouping, collapse, ordered
from fusegen.ir import Expr, Graph
from fusegen.kernel import Buffer, Entry
from fusegen.lower import Bound, Mark, lower, remarked
from fusegen.ops import Chain
from fusegen.schedule import schedule
from fusegen.simplify import simplification
from fusegen.target import COMPUTE, TARGETS

WINNER = "winner_index"


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
    windows: tuple[tuple[int, int], ...] = ()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The tensors it takes, in order."""
        return tuple(map(ir.name_of, self.graph.inputs))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The tensors it gives, in order."""
        return tuple(name for name, _ in self.graph.outputs)


@dataclass(frozen=True)
class Derivative:
    """The program of a vector-Jacobian product, and where its tensors come from.

    sources gives ("input" | "output" | "cotangent", position in the differentiated program) for
    each input; targets the position of the input whose cotangent each output is.
    """

    program: Program
    sources: tuple[tuple[str, int], ...]
    targets: tuple[int, ...]


def forward(bound: Bound, *, is_training: bool) -> Program:
    """The chain itself; when training, also what its derivative wants instead of whole windows."""
    lowered = lower(bound)
    graph, marks = _simplified(lowered.graph, lowered.marks)
    (out,) = graph.roots
    plain = Program("forward", graph, marks, (out,), (), bound.windows)
    through, index, picks = winners(out)
    if index is None or not is_training:
        return plain
    rank = out.rank
    index_leaf = ir.tensor(WINNER, index.extent, rank, "index")
    values, outputs, saved = [through], [("out", out)], []
    for pick in picks:
        name = f"picked_{ir.name_of(pick.args[0])}"
        saved.append((pick, ir.tensor(name, pick.extent, rank)))
        outputs.append((name, pick))
        values.append(pick)
    over_leaf = ir.substitute(values, {index: index_leaf})
    saved = [(over_leaf[1 + i], leaf) for i, (_, leaf) in enumerate(saved)]
    outputs.append((WINNER, index))
    full = Program(
        "forward",
        Graph(graph.inputs, tuple(outputs)),
        marks,
        (*over_leaf, None),
        ((index_leaf, index_leaf), *saved),
        bound.windows,
    )
    used = set(derivative(full, range(len(graph.inputs)), [0]).program.input_names)
    keep = [i for i, (name, _) in enumerate(outputs) if i == 0 or name in used]
    return Program(
        "forward",
        Graph(graph.inputs, tuple(outputs[i] for i in keep)),
        marks,
        tuple(full.values[i] for i in keep),
        full.saved,
        bound.windows,
    )


def derivative(program: Program, needs: Iterable[int], present: Iterable[int]) -> Derivative:
    """The cotangents of the inputs at `needs`, given those of the outputs at `present`."""
    taken = {*program.input_names, *program.output_names}
    cotangents: dict[int, Expr] = {}
    for i in present:
        value = program.values[i]
        if value is not None:
            name = _fresh(f"d_{program.output_names[i]}", taken)
            out = program.graph.roots[i]
            cotangents[i] = ir.tensor(name, out.extent, out.rank)
    wanted = [i for i in needs if program.graph.inputs[i].kind == "number"]
    wrt = [program.graph.inputs[i] for i in wanted]
    values = [v for v in program.values if v is not None]
    seeds = [cotangents.get(i) for i, v in enumerate(program.values) if v is not None]
    total = vjp(values, seeds, wrt)
    outputs, targets = [], []
    for i, leaf in zip(wanted, wrt, strict=True):
        if leaf in total:
            outputs.append((_fresh(f"d_{ir.name_of(leaf)}", taken), total[leaf]))
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
        name, Graph(inputs, graph.outputs), marks_here, graph.roots, (), program.windows
    )
    return Derivative(result, tuple(candidates[leaf] for leaf in inputs), tuple(targets))


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


@dataclass(frozen=True)
class Signature:
    """What a module depends on beyond its programs."""

    target: str
    order: tuple[int, ...]  # axes, outermost in memory first
    dtypes: tuple[tuple[str, str], ...]  # of every input and output by name
    index_bits: int
    allow_fused: bool

    def text(self, programs: Sequence[Program]) -> str:
        """A line for the banner."""
        kinds = ", ".join(f"{name} {dtype}" for name, dtype in self.dtypes)
        return f"{'+'.join(p.name for p in programs)}: {kinds}; {self.index_bits}-bit offsets"


def index_dtype(windows: Sequence[tuple[int, int]]) -> str:
    """The smallest element type that holds a position in the window."""
    return "uint8" if math.prod(size for _, size in windows) <= 256 else "int32"


def make_entry(program: Program, signature: Signature) -> Entry:
    """The program scheduled for one layout and one set of element types."""
    dtypes = dict(signature.dtypes)
    compute = "double" if "float64" in dtypes.values() else "float"
    windows = dict(program.windows)
    graph, new, grouping = collapse(program.graph, signature.order, windows)
    kernels = schedule(
        graph,
        dtypes,
        "float64" if compute == "double" else "float32",
        remarked(program.marks, new),
        prefix=program.name,
        allow_fused=signature.allow_fused,
    )
    arguments = [
        Buffer(ir.name_of(leaf), dtypes[ir.name_of(leaf)], ordered(leaf.extent), "input")
        for leaf in graph.inputs
    ]
    arguments += [
        Buffer(name, dtypes[name], ordered(expr.extent), "output") for name, expr in graph.outputs
    ]
    return Entry(program.name, kernels, tuple(arguments), grouping, compute)


def grouping_of(program: Program, order: Sequence[int]) -> Grouping:
    """The groups that a program's sizes are told by."""
    return collapse(program.graph, order, dict(program.windows))[2]


def source(chain: Chain, programs: Sequence[Program], signature: Signature) -> Source:
    """The text of one module."""
    entries = [make_entry(p, signature) for p in programs]
    return emit(
        chain,
        entries,
        TARGETS[signature.target],
        index_bits=signature.index_bits,
        signature=signature.text(programs),
    )


def compute_type(dtypes: Iterable[str]) -> str:
    """The C type of the arithmetic among these element types."""
    return "double" if any(COMPUTE.get(d) == "double" for d in dtypes) else "float"
