"""Operators: a fused call as torch.compile and torch.export record it.

Where a call meets a tracer's stand-ins for tensors, it becomes the operator `fusegen::forward`,
whose gradients are `fusegen::backward`; both name their chain by its text, and by what stands for
the user's own operations in it. What they give is told from shapes alone, and what they do is what
an ordinary call does. Dynamo, which reads Python instead of running it, is shown `fusegen::call`
and `fusegen::call_`, for the call as a whole.

A process that runs an exported program without compiling a chain itself imports `fusegen.Fused`
first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fusegen.dsl import chain
from fusegen.errors import ChainError, UnsupportedError
from fusegen.execution import Part
from fusegen.layouts import Meta, dtype_name
from fusegen.ops import Chain, text_of
from fusegen.prepared import Prepared
from fusegen.program import Derivative, Program

LIBRARY: Any = torch.library.Library("fusegen", "DEF")  # type: ignore[no-untyped-call]
# What torch.compile keeps on disk goes by the graph: another generator's is not to be taken for it.
LIBRARY.define("call(Tensor x, Tensor[] operands, str chain, str generator) -> Tensor[]")
LIBRARY.define(  # for what updates operands, or writes into out
    "call_(Tensor x, Tensor(a!)[] operands, str chain, str generator, Tensor(b!)? out) -> Tensor[]"
)
LIBRARY.define("forward(Tensor[] tensors, str chain, bool[] wanted) -> Tensor[]")
LIBRARY.define(
    "backward(Tensor[] d_results, Tensor[] saved, str chain, bool[] wanted, SymInt[] sizes, "
    "int[] ranks, str[] dtypes) -> Tensor[]"
)


@functools.cache
def _part(name: str) -> Part:
    return Part(recorded(name))


def recorded(name: str) -> Chain:
    """The chain that a recorded graph calls so.

    Raises ChainError where an operation of the user's own is another one now.
    """
    found = chain(text_of(name))
    if found.recorded_name != name:
        raise ChainError(
            f"{found.text}: an operation of your own computes something else now than when this "
            "was recorded; record it again"
        )
    return found


def _prepared(name: str, given: Sequence[Tensor], wanted: Sequence[bool]) -> Prepared:
    part = _part(name)
    return part.programs.forward(given, part.read_of(given), tuple(wanted) or None)


def _stand_ins(found: Prepared) -> list[Tensor]:
    """What a program gives, in shape, type and layout."""
    is_own = found.program.name == "forward"
    return [o.hand_over(o.allocate((), found.device), is_own=is_own) for o in found.outputs]


@torch.library.impl(LIBRARY, "forward", "CompositeExplicitAutograd")
def _forward(tensors: list[Tensor], name: str, wanted: list[bool]) -> list[Tensor]:
    """What a chain's forward program gives: the result, and what a derivative wants."""
    part = _part(name)
    plan = part.planned(tensors, tuple(wanted) or None).plan
    return list(plan.run_on_new(part.read_of(tensors)))


def _forward_of_stand_ins(tensors: list[Tensor], name: str, wanted: list[bool]) -> list[Tensor]:
    return _stand_ins(_prepared(name, tensors, wanted))


@torch.library.impl(LIBRARY, "backward", "CompositeExplicitAutograd")
def _backward(
    d_results: list[Tensor],
    saved: list[Tensor],
    name: str,
    wanted: list[bool],
    sizes: list[int],
    ranks: list[int],
    dtypes: list[str],
) -> list[Tensor]:
    """The gradients of a call of `forward` whose tensors had these sizes, strides and types."""
    metas = _metas(sizes, ranks, dtypes)
    call = _part(name).find(metas, d_results[0].device, tuple(wanted))
    step = call.backward_step(call.program.results, tuple(wanted))
    tensors = _inputs(step.found, call.program, d_results, saved)
    with torch.no_grad():
        return list(call.next_call(step, tensors).run(tensors))


def _backward_of_stand_ins(
    d_results: list[Tensor],
    saved: list[Tensor],
    name: str,
    wanted: list[bool],
    sizes: list[int],
    ranks: list[int],
    dtypes: list[str],
) -> list[Tensor]:
    given = [m.blank(d_results[0].device) for m in _metas(sizes, ranks, dtypes)]
    forward = _prepared(name, given, wanted)
    found = _derivative(name, forward, wanted)
    inputs = _inputs(found, forward.program, d_results, saved)
    return _stand_ins(forward.derived(found, inputs))


def _inputs(
    found: Derivative, forward: Program, d_results: Sequence[Tensor], saved: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """What a derivative reads, in its order; of some it reads nothing, as of a step function's."""
    rest, cotangents = iter(saved), dict(zip(forward.results, d_results, strict=True))
    return tuple([cotangents[i] if p == "cotangent" else next(rest) for p, i in found.sources])


def _derivative(name: str, forward: Prepared, wanted: Sequence[bool]) -> Derivative:
    return _part(name).programs.derivative(forward, wanted, forward.program.results)


def _metas(sizes: list[int], ranks: list[int], dtypes: list[str]) -> list[Meta]:
    """Shape and strides of each tensor, one after the other in sizes."""
    found = []
    ends = pairwise(accumulate((2 * r for r in ranks), initial=0))
    for rank, (begin, end), dtype in zip(ranks, ends, dtypes, strict=True):
        middle = begin + rank
        found.append(
            Meta(tuple(sizes[begin:middle]), tuple(sizes[middle:end]), getattr(torch, dtype))
        )
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save what the derivative reads, and how the forward was called."""
    given, name, wanted = inputs
    tensors = _part(name).read_of(given)
    ctx.name, ctx.wanted = name, wanted
    foreseen = wanted or [False] * len(tensors)
    ctx.is_foreseen = all(w or not t.requires_grad for t, w in zip(tensors, foreseen, strict=True))
    if not ctx.is_foreseen:
        return
    ctx.sizes = [n for t in given for n in (*t.shape, *t.stride())]
    ctx.ranks, ctx.dtypes = [t.dim() for t in given], [dtype_name(t.dtype) for t in given]
    forward = _prepared(name, given, wanted)
    ctx.found, ctx.results = _derivative(name, forward, wanted), forward.program.results
    pools = {"input": tensors, "output": output}
    ctx.save_for_backward(*[pools[pool][i] for pool, i in ctx.found.sources if pool in pools])


def _differentiate(ctx: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
    if not ctx.is_foreseen:
        raise UnsupportedError(
            f"{text_of(ctx.name)}: it was recorded without a gradient for a tensor that needs one "
            "now; export it with gradients enabled and requires_grad set as it will be"
        )
    saved = list(ctx.saved_tensors)
    d_results = [cotangents[i] for i in ctx.results]
    gradients = []
    if ctx.found.targets:
        gradients = torch.ops.fusegen.backward(
            d_results, saved, ctx.name, ctx.wanted, ctx.sizes, ctx.ranks, ctx.dtypes
        )
    shares: list[Tensor | None] = [None] * len(ctx.ranks)
    place = _part(ctx.name).read
    for i, gradient in zip(ctx.found.targets, gradients, strict=True):
        shares[place[i]] = gradient
    for i, output in ctx.found.shared:
        shares[place[i]] = gradients[output]
    for i, result in ctx.found.passed:
        shares[place[i]] = cotangents[result]
    return shares, None, None


torch.library.register_fake("fusegen::forward", _forward_of_stand_ins, lib=LIBRARY)
torch.library.register_fake("fusegen::backward", _backward_of_stand_ins, lib=LIBRARY)
torch.library.register_autograd(
    "fusegen::forward", _differentiate, setup_context=_keep, lib=LIBRARY
)
