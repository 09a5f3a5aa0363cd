"""Axes as groups: that a graph over groups means what it meant over axes. Nothing is compiled."""

import math
from dataclasses import dataclass

import numpy as np
from evaluator import evaluate, shape_of
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from strategies import Case, chains, reductions

from fusegen import ir
from fusegen.bind import bind
from fusegen.describe import axes_in_memory
from fusegen.dsl import parse
from fusegen.errors import ArgumentError
from fusegen.grouping import collapse
from fusegen.ir import Graph
from fusegen.program import derivative, forward
from fusegen.segments import segments
from fusegen.windowing import Slide


@dataclass(frozen=True)
class Space:
    """Where graphs of a chain are evaluated: sizes, the order in memory, and windows."""

    domain: dict[int, int]  # the tensor's axes, then windows, outermost first
    order: tuple[int, ...]
    windows: dict[int, int]

    def over_axes(self, graph, values):
        return evaluate(graph.roots, values, self.domain)

    def over_groups(self, graph, values):
        """The same by way of groups, back in arrays over axes."""
        new, _, grouping = collapse(graph, self.order, self.windows)
        members = [*grouping.axes, *((-a,) for a in sorted(self.windows) if grouping.windows)]
        apart = [a for a in self.domain if not any(a in m for m in members)]
        lie = [a for m in members for a in m]
        groups = [*range(len(grouping.axes)), *range(-1, -1 - len(grouping.windows), -1)]
        sizes = [math.prod(self.domain[a] for a in m) for m in members]
        domain = dict(zip(groups, sizes, strict=True))
        axes = list(self.domain)

        def grouped(leaf, array):
            moved = array.transpose([axes.index(a) for a in (*lie, *apart)])
            return moved.reshape(shape_of(leaf.extent, domain))

        leaves = {ir.name_of(leaf): grouped(leaf, values[ir.name_of(leaf)]) for leaf in new.inputs}
        results = evaluate(new.roots, leaves, domain)
        by_axis = {a: self.domain[a] for a in lie}
        whole = []
        for node, array in zip(graph.roots, results, strict=True):
            spread = array.reshape((*shape_of(node.extent, by_axis), *(1,) * len(apart)))
            whole.append(spread.transpose([[*lie, *apart].index(a) for a in axes]))
        return whole


def random_values(graph, domain, random):
    values = {}
    for leaf in graph.inputs:
        found = random.normal(size=shape_of(leaf.extent, domain))
        values[ir.name_of(leaf)] = found > 0 if leaf.kind == "truth" else found
    return values


def is_plain(graph: Graph) -> bool:
    """Whether the evaluator knows all of it."""
    return not any(n.op in ("once", "repeated", "covered") for n in ir.topological(graph.roots))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@example(case=Case("tanh | sum(0) | max(0)", (3, 5, 8), ()), channels_last=False)
@given(case=st.one_of(reductions(), chains(longest=4)), channels_last=st.booleans())
def test_groups_mean_what_axes_did(case, channels_last):
    chain = parse(case.text)
    assume(len(segments(chain)) == 1)
    kinds = {name: (shape, "float64") for name, shape in case.operands}
    try:
        bound = bind(chain, (case.x, "float64"), kinds)
    except ArgumentError:
        assume(False)
    windows = dict(bound.windows)
    assume(not any(isinstance(w, Slide) for w in windows.values()))
    sizes = dict(zip(range(-len(bound.domain), 0), bound.domain, strict=True))
    domain = {a: sizes[a] // windows.get(a, 1) for a in sizes}
    domain |= {-a: windows[a] for a in sorted(windows)}
    layout = "channels_last" if channels_last else "contiguous"
    space = Space(domain, bound.memory_order(axes_in_memory(case.x, layout)), windows)
    random = np.random.default_rng(0)

    program = forward(bound, is_training=True)
    assume(is_plain(program.graph))
    inputs = random_values(program.graph, domain, random)
    outputs = space.over_axes(program.graph, inputs)
    ours = space.over_groups(program.graph, inputs)
    for (name, node), array, wanted in zip(program.graph.outputs, ours, outputs, strict=True):
        if node.kind != "index":
            np.testing.assert_allclose(array, wanted, rtol=1e-9, atol=1e-9, err_msg=name)

    found = derivative(program, range(len(program.graph.inputs)), program.results, case.shapes)
    assume(is_plain(found.program.graph))

    def read(made):
        """What the derivative reads, of the same inputs, and of outputs that were made so."""
        pools = {"input": list(inputs.values()), "output": made, "cotangent": cotangents}
        leaves = found.program.graph.inputs
        return {
            ir.name_of(leaf): pools[p][i]
            for leaf, (p, i) in zip(leaves, found.sources, strict=True)
        }

    cotangents = [random.normal(size=shape_of(span, domain)) for span in program.spans]
    wanted = space.over_axes(found.program.graph, read(outputs))
    for array, expected in zip(
        space.over_groups(found.program.graph, read(ours)), wanted, strict=True
    ):
        np.testing.assert_allclose(array, expected, rtol=1e-9, atol=1e-9)
