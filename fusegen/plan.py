"""Plans: for one program on tensors of known shapes, strides and types, everything a call needs but
the pointers.

A plan is made once for each combination and looked up ever after. It says which inputs must be
copied into the layout that the kernels walk (none, for a dense x with contiguous operands), how the
outputs are allocated, and the sizes to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from fusegen.dealing import deal_of
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.layouts import Meta, Output, arranged, stored
from fusegen.prepared import Prepared
from fusegen.signature import Signature
from fusegen.strides import ALIGNMENT, Lie, windows_of
from fusegen.unrolling import grouped

_pointer = Tensor.data_ptr
_MOST_PLANS = 4096
_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may mean more by an allocation than memory

Attempt = Callable[[Tensor, Sequence[Tensor]], Any]


class Plan:
    """One program on one combination of shapes, strides and types, on one device.

    attempt takes the first tensor and a tuple of the others. It gives None where they are not what
    the plan is for, True where they are, but the call is not for C alone, and else the outputs.
    """

    def __init__(
        self,
        module: ModuleType,
        name: str,
        tensors: Sequence[Tensor],
        inputs: Sequence[Lie],
        outputs: Sequence[Output],
        updates: Sequence[tuple[int, int]],
        sizes: Sequence[int],
        device: torch.device,
        *,
        is_empty: bool,
        needs: tuple[bool, ...] | None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.updates = tuple(updates)
        self.given = len(outputs) - len(updates)  # of the outputs: those that a call gets
        self.launch = partial(module.launch, name)
        self.is_forward = name == "forward"
        # Of each input with gaps: its run, and how far behind its end the next one begins.
        pitches = [i.pitch for i in inputs if i.pitch]
        self.sizes = (*sizes, *(n for p in pitches for n in (p.run, p.step - p.run)))
        self.device = device
        self.is_empty = is_empty
        self.is_ready = all(i.is_ready for i in inputs)
        sizes_of = [t.element_size() for t in tensors]
        # In bytes, how far behind its beginning each input is read.
        self.offsets = tuple(i.offset * n for i, n in zip(inputs, sizes_of, strict=True))
        self.changes_shape = any(o.shape != o.final_shape for o in outputs)
        # The last argument says where to run: the device's current stream, or how many threads.
        where: tuple[Callable[..., int], tuple[int, ...]] = (torch.get_num_threads, ())
        allocate = guards._empty_strided_cpu  # type: ignore[attr-defined]
        if device.type == "cuda":
            self.sizes = (*self.sizes, device.index)
            where = (torch._C._cuda_getCurrentRawStream, (device.index,))
            allocate = guards._empty_strided_cuda  # type: ignore[attr-defined]
        self.where = partial(where[0], *where[1])
        self.scratch_bytes = 0
        if not is_empty:
            blank = (0,) * (len(inputs) + len(outputs))
            self.scratch_bytes = self.launch(*blank, -1, *self.sizes, self.where())
        self.attempt: Attempt = _not_planned
        self.run_planned: Callable[[Sequence[Tensor]], Any] = _not_planned
        if not tensors:
            return
        layouts = None
        strides = [o.final_strides for o in outputs]
        is_plain = None not in strides and not any(o.is_zeroed for o in outputs)
        is_plain &= all(outputs[o].can_fill(tensors[i]) for o, i in updates)
        if self.is_ready and not is_empty and is_plain:
            pairs = zip(outputs[: self.given], strides[: self.given], strict=True)
            layouts = tuple((o.final_shape, s, o.dtype) for o, s in pairs)
        scratch = ((self.scratch_bytes,), (1,), torch.uint8) if self.scratch_bytes else None
        facts = (
            Tensor.__dlpack_c_exchange_api__,
            _PLAIN,
            needs,
            allocate,
            layouts,
            scratch,
            self.sizes,
            torch.is_grad_enabled,
            *where,
            tuple(i for _, i in updates),
            torch._C._increment_version,
            self.offsets,
        )
        self.attempt, self.run_planned = module.plan(name, tuple(tensors), facts)

    def run(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Launch on tensors of the planned combination, some of which may be updated; out, where
        given, is where the first output goes.
        """
        if out is None:
            planned: tuple[Tensor, ...] | None = self.run_planned(tuple(tensors))
            if planned is not None:
                return planned
        homes = {o: tensors[i].detach() for o, i in self.updates}
        filled = {o: home for o, home in homes.items() if self.outputs[o].can_fill(home)}
        if out is not None:
            homes[0] = out
            if self.outputs[0].can_fill(out, tensors):
                filled[0] = out
        results = self.run_on_new(tensors, filled)
        # Written behind torch's back: its version check must know.
        torch._C._increment_version(filled.values())
        for o, home in homes.items():
            if o not in filled:
                home.copy_(results[o])
        return results[: self.given]

    def run_on_new(
        self, tensors: Sequence[Tensor], homes: Mapping[int, Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """Launch, and give all outputs: new tensors, but for those that have a home, where they are
        written as the kernels would lay out new ones.
        """
        homes = homes or {}
        for t in tensors:
            # It stands for something else, such as a shape alone, and may have no memory.
            if type(t).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                raise UnsupportedError(
                    f"got a {type(t).__name__}, which says itself what operations do to it; a "
                    "fused chain is none that it knows of, fused.reference is made of such"
                )
        tensors = [stored(t) for t in tensors]
        for t in tensors:
            if t.numel() and not t.data_ptr():
                raise ArgumentError(f"got a tensor of {tuple(t.shape)} whose memory has been freed")
        if not self.is_ready:
            tensors = [arranged(t, i) for t, i in zip(tensors, self.inputs, strict=True)]
        results = [
            homes[i] if i in homes else o.allocate(tensors, self.device)
            for i, o in enumerate(self.outputs)
        ]
        if not self.is_empty:
            self._launch(tensors, results)
        for i, output in enumerate(self.outputs):
            if self.changes_shape and i not in homes:
                results[i] = output.hand_over(results[i], is_own=self.is_forward)
        return tuple(results)

    def _launch(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        scratch = 0
        if self.scratch_bytes:
            memory = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            scratch = memory.data_ptr()
        pairs = zip(map(_pointer, tensors), self.offsets, strict=True)
        pointers = (*[pointer + offset for pointer, offset in pairs], *map(_pointer, results))
        if self.launch(*pointers, scratch, *self.sizes, self.where()) == 1:
            # Some view begins off a 16-byte boundary: give the kernels aligned copies.
            aligned = [t if t.data_ptr() % ALIGNMENT == 0 else _moved(t) for t in tensors]
            homes = [r if r.data_ptr() % ALIGNMENT == 0 else torch.empty_like(r) for r in results]
            self._launch(aligned, homes)
            for result, home in zip(results, homes, strict=True):
                if home is not result:
                    result.copy_(home)


def _moved(tensor: Tensor) -> Tensor:
    """The tensor, and what lies in its gaps, elsewhere in memory."""
    memory = tensor.as_strided((Meta.of(tensor).span,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


def _not_planned(*_: object) -> None:
    """What stands for the functions of C where there is no input to know a plan by."""


def make_plan(
    found: Prepared,
    tensors: Sequence[Tensor],
    inputs: Sequence[Lie],
    module: ModuleType,
    needs: tuple[bool, ...] | None,
    built_with: Signature,
) -> Plan:
    """The plan of a program that the module holds. tensors are such as it will run on, brought into
    place as inputs say; needs tells which of them get a gradient, None that none does.
    """
    program, bound = found.program, found.bound
    domain, pooled = bound.domain, windows_of(bound)
    *_, grouping = grouped(program, built_with)
    sizes = [math.prod(pooled.get(a, domain[a]) for a in axes) for axes in grouping.axes]
    sizes += [domain[grouping.axes[g][0]] for g in grouping.pooled]
    sizes += deal_of(found.order, built_with.order, domain) if built_with.is_dealt else ()
    return Plan(
        module,
        program.name,
        tensors,
        inputs,
        found.outputs,
        program.updates,
        sizes,
        found.device,
        is_empty=math.prod(domain) == 0,
        needs=needs,
    )


def remember(plans: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a plan; with every shape seen only once, the oldest go, which two threads may do."""
    if len(plans) >= _MOST_PLANS:
        for old in list(plans)[: _MOST_PLANS // 2]:
            plans.pop(old, None)
    plans[key] = value
