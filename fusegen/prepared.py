"""Prepared calls: the program that a call runs and what its outputs will be, told by shapes, types
and layouts alone.

Neither a module nor a tensor's memory is needed, so this is also how a tracer's stand-ins for
tensors are answered.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusegen.arguments import bound_of
from fusegen.bound import Bound
from fusegen.errors import ArgumentError
from fusegen.holding import signature
from fusegen.layouts import (
    Meta,
    Output,
    Target,
    dtype_name,
    inputs_of,
    memory_order,
    outputs_of,
)
from fusegen.modules import limits, target_of
from fusegen.ops import Chain
from fusegen.program import Derivative, Program, derivative, forward
from fusegen.selecting import at_places
from fusegen.signature import (
    Signature,
    element_types,
    reads_gaps,
    result_shapes,
    with_derivative,
    with_gaps,
)
from fusegen.strides import Lie
from fusegen.typechecks import refuse_gradients


@dataclass(frozen=True)
class Prepared:
    """A program bound to the tensors of a call: metas are those of its inputs, targets what its
    outputs must be, order the axes of the graph from outermost in memory to innermost.
    """

    program: Program
    bound: Bound
    order: tuple[int, ...]
    metas: tuple[Meta, ...]
    targets: tuple[Target, ...]
    dtypes: dict[str, str]
    device: torch.device

    def inputs(self, *, may_have_gaps: bool) -> list[Lie]:
        """How the program's inputs lie: with gaps where they are, if they may."""
        place = (self.program, self.bound, self.order, self.metas)
        return inputs_of(*place, may_have_gaps=may_have_gaps)

    @property
    def is_near(self) -> bool:
        """Whether an offset of 32 bits reaches all elements of an input, whatever its gaps."""
        return max((m.span for m in self.metas), default=0) <= 1 << 32

    @property
    def outputs(self) -> list[Output]:
        """How the program's outputs are allocated and handed over."""
        return outputs_of(self.program, self.bound, self.order, self.targets, self.device)

    def derived(self, found: Derivative, tensors: Sequence[Tensor]) -> Prepared:
        """A derivative of the program, on these tensors; its outputs are gradients of inputs.
        Raises ArgumentError where they are not of the types and where the program left them.
        """
        leaves, metas = self.program.graph.inputs, self.metas
        dtypes = with_derivative(self.program, found, self.dtypes)
        for name, t in zip(found.program.input_names, tensors, strict=True):
            dtype = getattr(torch, dtypes[name], t.dtype)  # a seed's is none of torch's
            if t.dtype != dtype or t.device != self.device:
                raise ArgumentError(
                    f"the backward got {t.dtype} on {t.device} for what was {dtype} on "
                    f"{self.device}; a saved-tensor hook has to give back what it was given"
                )
        targets = [Target(leaves[i].extent, metas[i].shape, metas[i].dtype) for i in found.targets]
        return Prepared(
            found.program,
            self.bound,
            self.order,
            tuple([Meta.of(t) for t in tensors]),
            tuple(targets),
            dtypes,
            self.device,
        )


@dataclass(frozen=True)
class Launch:
    """What is launched: a program in the form that a module holds, with others; how its inputs lie,
    and what the module depends on.
    """

    found: Prepared
    programs: tuple[Program, ...]
    inputs: list[Lie]
    built_with: Signature


def whole(
    found: Prepared,
    programs: Sequence[Program],
    dtypes: Mapping[str, str],
    built_with: Signature | None,
    modules: Container[tuple[int, Signature]],
) -> Launch:
    """The first of the programs, which is found's, as it stands, for a module of all. built_with is
    the signature of one of the modules that may hold it already.
    """
    program, device = found.program, found.device
    if built_with is None or (id(program), built_with) not in modules:
        facts = (found.order, programs, dtypes, found.bound, limits(device))
        built_with = signature(target_of(device), *facts, may_deal=found.is_near)
    inputs = found.inputs(may_have_gaps=reads_gaps(built_with, program))
    named = zip(program.input_names, inputs, strict=True)
    apart = {name for name, i in named if i.pitch}
    known = {name for entry, name in built_with.gaps if entry == program.name}
    if apart != known:
        built_with = with_gaps(built_with, programs, apart)
    if apart and not found.is_near:
        built_with = replace(built_with, index_bits=64)
    return Launch(found, tuple(programs), inputs, built_with)


class Programs:
    """The programs of a chain, each made once."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.forwards: dict[Any, Program] = {}
        self.derivatives: dict[Any, Derivative] = {}
        self.placed: dict[int, Program] = {}

    def at_places(
        self,
        found: Prepared,
        programs: Sequence[Program],
        dtypes: Mapping[str, str],
        built_with: Signature | None,
        modules: Container[tuple[int, Signature]],
    ) -> Launch | None:
        """The same, with inputs of which each program reads what is at one place along an axis read
        there; None where there is none, or it does not lie so that kernels can. Integers are copied
        then: found at their place by adding up, large ones lose digits.
        """
        placed = [
            self.placed.get(id(p)) or self.placed.setdefault(id(p), at_places(p)) for p in programs
        ]
        if not placed[0].places:
            return None
        launch = whole(replace(found, program=placed[0]), placed, dtypes, built_with, modules)
        leaves = placed[0].graph.inputs
        lies = zip(launch.inputs, leaves, placed[0].places, strict=True)
        is_apt = all(
            lie.is_ready or (leaf.kind == "whole" and lie.cut is not None)
            for lie, leaf, at in lies
            if at
        )
        return launch if is_apt else None

    def forward(
        self, given: Sequence[Tensor], tensors: Sequence[Tensor], wanted: tuple[bool, ...] | None
    ) -> Prepared:
        """The forward program for what is given, of which it reads `tensors`.

        wanted tells which of those get a gradient; None is for none. Raises ArgumentError where
        something given does not fit.
        """
        bound = bound_of(self.chain, given)
        if wanted is not None:
            refuse_gradients(self.chain, bound.dtype)
        metas = tuple([Meta.of(t) for t in tensors])
        leader, slots = bound.leading
        order, is_dense = memory_order(metas[leader].shape, metas[leader].stride)
        order = bound.memory_order(order if is_dense else None, slots)
        key = (bound.pattern, wanted is not None)
        program = self.forwards.get(key) or self.forwards.setdefault(
            key, forward(bound, is_training=wanted is not None)
        )
        dtypes = element_types(program, bound, [dtype_name(m.dtype) for m in metas])
        shapes = result_shapes(bound)
        shapes |= {program.output_names[o]: metas[i].shape for o, i in program.updates}
        targets = [
            Target(span, shapes.get(name), getattr(torch, dtypes[name]))
            for name, span in zip(program.output_names, program.spans, strict=True)
        ]
        return Prepared(program, bound, order, metas, tuple(targets), dtypes, tensors[0].device)

    def derivative(
        self, found: Prepared, wanted: Iterable[bool], present: Iterable[int]
    ) -> Derivative:
        """The derivative of a program on inputs of its kinds, made once."""
        needs = tuple(i for i, w in enumerate(wanted) if w)
        # Ranks first, so that sizes of different ones are not compared: each such test is a guard.
        kept: list[Meta | Target] = [*found.metas, *found.targets]
        kinds = [t.shape if t.shape is None else (len(t.shape), t.dtype, t.shape) for t in kept]
        alike = tuple([kinds.index(kind) for kind in kinds])
        key = (id(found.program), needs, tuple(present), alike)
        if key not in self.derivatives:
            count = len(found.metas)
            facts = (alike[:count], alike[count:])
            self.derivatives.setdefault(key, derivative(found.program, needs, key[2], *facts))
        return self.derivatives[key]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while a graph is made: a full one walks all of torch, for 100 ms."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
