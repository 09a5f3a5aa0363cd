"""Execution: a chain's programs, planned for what they are called with and run as nodes of
autograd.

A backward is a program like any other, made when first needed, and can be differentiated too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusegen.arguments import (
    check_apart,
    check_out,
    check_tensors,
    is_recorded,
    is_watched,
    may_count,
    refuse_batches,
    refuse_what_looks_inside,
)
from fusegen.autodiff import depends, learns
from fusegen.layouts import Meta
from fusegen.modules import load
from fusegen.ops import Chain
from fusegen.plan import Plan, make_plan, remember
from fusegen.prepared import Prepared, Programs, no_collection, whole
from fusegen.program import Derivative, Program
from fusegen.signature import Signature, with_derivative

Result = Tensor | tuple[Tensor, ...]


class Part:
    """A chain, or one segment of it, with its plans."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.plans: dict[Any, Call] = {}
        self.programs = Programs(chain)
        self.modules: dict[torch.device, dict[Any, ModuleType]] = {}
        # Which of x and the operands the programs read: all but what counts batches.
        operands = [i for i, name in enumerate(chain.operands, start=1) if chain.reads(name)]
        self.read = (0, *operands)
        self.reads_all = len(operands) == len(chain.operands)
        given = [chain.operands[i - 1] for i in operands]
        self.has_gradient = (True, *[not chain.updates(name) for name in given])
        self.unread = tuple(i for i in range(1 + len(chain.operands)) if i not in self.read)
        self.counters = tuple(1 + chain.operands.index(name) for name in chain.counters)
        self.count = 1 + len(chain.gives)  # of results: the first of what a forward program gives
        self.recent: tuple[Call, ...] = ()  # asked first, for they recognise their tensors in C

    def __call__(self, x: Tensor, operands: Sequence[Tensor], out: Tensor | None) -> Result:
        tensors = given = (x, *operands)
        wanted = None
        try:
            parts = _key(given)
            if not self.reads_all:
                tensors = self.read_of(given)
            if _is_grad_enabled():
                pairs = zip(tensors, self.has_gradient, strict=True)
                needs = tuple([t.requires_grad and may for t, may in pairs])
                if True in needs:
                    wanted = needs
        except (AttributeError, RuntimeError):
            check_tensors(self.chain, given)
            raise
        if is_watched():
            refuse_what_looks_inside(tensors)
        if is_recorded(given):
            return self._recorded(given, wanted, out)
        call = self._planned(parts, given, tensors, wanted)
        counters = self.counters_of(given)
        if out is not None:
            check_out(out, self.chain, call.bound, given)
            call.run(tensors, out)
            count_batch(counters)
            return out
        # Two threads may both be here; what one of them puts first is lost, and found again.
        self.recent = (call, *[c for c in self.recent if c is not call][: _MOST_RECENT - 1])
        return self.results(launch(call, tensors, counters))

    def recognised(self, x: Tensor, operands: tuple[Tensor, ...]) -> Result | None:
        """The result, if the tensors are like those of a recent call; else None, and nothing is
        done. Nothing may watch.
        """
        counters: tuple[Tensor, ...] = ()
        if self.counters or not self.reads_all:
            given = (x, *operands)
            # Of these C sees nothing.
            if self.chain.typed or not all(may_count(given[i], x) for i in self.unread):
                return None
            counters, operands = self.counters_of(given), self.read_of(given)[1:]
        for call in self.recent:
            results = call.attempt(x, operands)
            if results is True:
                results = launch(call, (x, *operands), counters)
            elif results is not None:
                count_batch(counters)
            if results is not None:
                return results[0] if self.count == 1 else self.results(results)
        return None

    def counters_of(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Those of the operands that count batches."""
        return tuple([given[i] for i in self.counters])

    def read_of(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Those of x and the operands that the programs read."""
        return tuple(given) if self.reads_all else tuple([given[i] for i in self.read])

    def planned(self, given: Sequence[Tensor], wanted: tuple[bool, ...] | None) -> Call:
        """The call for these tensors, of which those wanted get a gradient."""
        return self._planned(_key(given), given, self.read_of(given), wanted)

    def find(self, metas: Sequence[Meta], device: torch.device, wanted: tuple[bool, ...]) -> Call:
        """The same for tensors that would be like these, of which some get a gradient."""
        parts = [(m.dtype, m.shape, m.stride, device) for m in metas]
        call = self.plans.get((*parts, wanted))
        # Forgotten for other shapes, or it ran elsewhere.
        return call or self.planned([m.blank(device) for m in metas], wanted)

    def _planned(
        self,
        parts: list[Any],
        given: Sequence[Tensor],
        tensors: Sequence[Tensor],
        wanted: tuple[bool, ...] | None,
    ) -> Call:
        key = (*parts, wanted)
        call = self.plans.get(key)
        if call is None:
            with no_collection():
                call = self.prepare(self.programs.forward(given, tensors, wanted), tensors, wanted)
            remember(self.plans, key, call)
        return call

    def _recorded(
        self, given: Sequence[Tensor], wanted: tuple[bool, ...] | None, out: Tensor | None
    ) -> Result:
        """The call as an operator, for what records operators. It is registered by then."""
        tensors = self.read_of(given)
        found = self.programs.forward(given, tensors, wanted)
        if out is not None:
            check_out(out, self.chain, found.bound, given)
        results = torch.ops.fusegen.forward(list(given), self.chain.recorded_name, wanted or ())
        for output, i in found.program.updates:
            tensors[i].detach().copy_(results[output].detach())
        count_batch(self.counters_of(given))
        return self.results(results) if out is None else out.copy_(results[0])

    def results(self, outputs: Sequence[Tensor]) -> Result:
        """Of a program's outputs, what a call gives: the result, or a tuple of several."""
        return outputs[0] if self.count == 1 else tuple(outputs[: self.count])

    def prepare(
        self,
        found: Prepared,
        tensors: Sequence[Tensor],
        wanted: tuple[bool, ...] | None,
        built_with: Signature | None = None,
    ) -> Call:
        """The call of a program: its module loaded, its plan made, and its derivative foreseen
        where it is wanted.

        built_with is the signature of a module that may hold the program already.
        """
        program, dtypes, device = found.program, found.dtypes, found.device
        programs = [program]
        derive = self.programs.derivative
        foreseen = None
        present = _differentiable(program)
        if wanted is not None and present:
            foreseen = derive(found, wanted, present)
            if program.name == "forward":
                first = derive(found, wanted, program.results)
                programs += [first.program] if first.targets else []
                dtypes = with_derivative(program, first, dtypes)
        facts = (programs, dtypes, built_with, self.modules.setdefault(device, {}))
        launch = self.programs.at_places(found, *facts) or whole(found, *facts)
        module = self.module(launch.programs, launch.built_with, device)
        plan = make_plan(launch.found, tensors, launch.inputs, module, wanted, launch.built_with)
        return Call(self, replace(found, dtypes=dtypes), plan, foreseen, launch.built_with, wanted)

    def module(
        self, programs: Sequence[Program], signature: Signature, device: torch.device
    ) -> ModuleType:
        """The module that holds these programs."""
        key, modules = (id(programs[0]), signature), self.modules.setdefault(device, {})
        if key not in modules:
            module = load(self.chain, programs, signature, device)
            for p in programs:
                modules.setdefault((id(p), signature), module)
        return modules[key]


class Call:
    """A program planned for one combination of arguments, and what its derivative will want."""

    __slots__ = (
        "attempt",
        "bound",
        "fixed",
        "foreseen",
        "found",
        "keeps_inputs",
        "kept",
        "part",
        "plan",
        "program",
        "run",
        "run_planned",
        "signature",
        "steps",
    )

    def __init__(
        self,
        part: Part,
        found: Prepared,
        plan: Plan,
        foreseen: Derivative | None,
        signature: Signature,
        wanted: tuple[bool, ...] | None,
    ) -> None:
        self.part = part
        self.found = found
        self.program = program = found.program
        self.plan = plan
        self.run: Callable[..., tuple[Tensor, ...]] = plan.run
        if plan.updates:
            self.run = self.run_apart
        self.run_planned = plan.run_planned
        self.attempt = plan.attempt
        self.bound = found.bound
        self.foreseen = foreseen
        self.signature = signature
        shift = {"input": 0, "output": (count := len(program.graph.inputs))}
        sources = foreseen.sources if foreseen is not None else ()
        # What the derivative reads, as positions among inputs and outputs together; and the outputs
        # that have none.
        self.kept = tuple(shift[pool] + i for pool, i in sources if pool in shift)
        self.keeps_inputs = self.kept == tuple(range(count))
        some = set(compress(program.graph.inputs, wanted or ()))
        returned = enumerate(program.values[: plan.given])
        reaches = learns if program.name == "forward" else depends
        self.fixed = tuple(i for i, value in returned if not reaches(value, some))
        self.steps: dict[tuple[tuple[int, ...], tuple[bool, ...]], Step] = {}

    def run_apart(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run, where what is updated has no memory in common with what is read."""
        names = ("x", *self.part.chain.operands)
        updated = [i for _, i in self.program.updates]
        check_apart([names[i] for i in self.part.read], tensors, updated)
        return self.plan.run(tensors, out)

    def backward_step(self, present: tuple[int, ...], needs: tuple[bool, ...]) -> Step:
        """The derivative for these cotangents and these inputs."""
        step = self.steps.get((present, needs))
        if step is None:
            found = self.part.programs.derivative(self.found, needs, present)
            count = len(self.program.graph.inputs)
            sources = []
            for pool, i in found.sources:
                if pool == "cotangent":
                    sources.append(len(self.kept) + i)
                else:
                    sources.append(self.kept.index(i if pool == "input" else count + i))
            step = self.steps.setdefault((present, needs), Step(found, tuple(sources), needs))
        return step

    def next_call(self, step: Step, tensors: tuple[Tensor, ...]) -> Call:
        """The derivative, planned for its inputs."""
        again = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        wanted = tuple([t.requires_grad for t in tensors]) if again else None
        key = (wanted, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        if (call := step.calls.get(key)) is None:
            found = self.found.derived(step.found, tensors)
            with no_collection():
                call = self.part.prepare(found, tensors, wanted, self.signature)
            remember(step.calls, key, call)
        return call


class Step:
    """One derivative of a call: where its inputs stand among what the call kept and the cotangents,
    and its plans.
    """

    __slots__ = ("calls", "found", "last", "sources", "unreached")

    def __init__(
        self, found: Derivative, sources: tuple[int, ...], needs: tuple[bool, ...]
    ) -> None:
        self.found = found
        self.sources = sources
        reached = {*found.targets, *(i for i, _ in (*found.shared, *found.passed))}
        self.unreached = [i for i, need in enumerate(needs) if need and i not in reached]
        self.calls: dict[Any, Call] = {}
        self.last: Call | None = None  # asked first, for it recognises its tensors in C


class _Launch(torch.autograd.Function):
    """A planned program as a node of autograd's graph; its backward is another."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, counters: tuple[Tensor, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results = call.run_planned(tensors) or call.run(tensors)
        if call.plan.changes_shape and call.program.name == "forward":  # no view may be written to
            results = tuple([r.clone() if r._is_view() else r for r in results])
        # Before anything is kept, where a checkpoint stops when it runs this again.
        count_batch(counters)
        ctx.call = call
        if call.keeps_inputs:
            ctx.save_for_backward(*tensors)
        else:
            both = tensors + results
            ctx.save_for_backward(*[both[i] for i in call.kept])
        ctx.set_materialize_grads(False)
        if call.fixed:
            ctx.mark_non_differentiable(*[results[i] for i in call.fixed])
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        present = tuple([i for i, g in enumerate(cotangents) if g is not None])
        refuse_batches(cotangents)
        needs = ctx.needs_input_grad[2:]
        step = call.backward_step(present, needs)
        shares: list[Tensor | None] = [None] * (2 + len(needs))
        for i, result in step.found.passed:
            shares[2 + i] = cotangents[result]
        if call.program.name != "forward":  # of what a backward asks for alone, zeros, as in eager
            for i in step.unreached:
                shares[2 + i] = call.found.metas[i].zeros(call.found.device)
        if not step.found.targets:
            return tuple(shares)
        pool = (*ctx.saved_tensors, *cotangents)
        inputs = tuple([pool[i] for i in step.sources])
        gradients: Any = None
        following = step.last
        if following is not None and inputs:
            gradients = following.attempt(inputs[0], inputs[1:])
        if following is None or gradients is None:
            following, gradients = call.next_call(step, inputs), True
            step.last = following
        if gradients is True:
            gradients = launch(following, inputs)
        for i, gradient in zip(step.found.targets, gradients, strict=True):
            shares[2 + i] = gradient
        for i, output in step.found.shared:
            shares[2 + i] = gradients[output]
        return tuple(shares)


# torch's own Function.apply is Python around this, and takes longer than it.
_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Launch).apply


def launch(
    call: Call, tensors: tuple[Tensor, ...], counters: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """Launch, as a node of autograd's graph where a derivative is foreseen. Under a transform of
    torch.func, torch says what it thinks of that.
    """
    if call.foreseen is None:
        results = call.run(tensors)
        count_batch(counters)
        return results
    if torch._C._are_functorch_transforms_active():
        result: tuple[Tensor, ...] = _Launch.apply(call, counters, *tensors)  # type: ignore[no-untyped-call]
        return result
    return _apply(call, counters, *tensors)


def count_batch(counters: Sequence[Tensor]) -> None:
    """Count a batch."""
    for counter in counters:
        counter.add_(1)


def _key(given: Sequence[Tensor]) -> list[Any]:
    return [(t.dtype, t.shape, t.stride(), t.device) for t in given]


_MOST_RECENT = 4  # to be asked in vain takes 0.1 us
_is_grad_enabled = torch.is_grad_enabled


def _differentiable(program: Program) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(program.values) if value is not None)
