"""Plans: for one program on tensors of known shapes, strides and types, everything a call needs but
the pointers.

A plan is made once for each combination and looked up ever after. It says which inputs must be
copied into the layout that the kernels walk (none, for a dense x with contiguous operands), how the
outputs lie, and the sizes to pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from fusegen import ir
from fusegen.bound import Bound
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.grouping import collapse
from fusegen.modules import target_of
from fusegen.program import Program
from fusegen.target import TARGETS
from fusegen.windowing import windows_along

Shape = tuple[int, ...]
_pointer = Tensor.data_ptr
_MOST_PLANS = 4096
_ALIGNMENT = 16  # bytes; the widest access of a kernel
_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may mean more by an allocation than memory


@dataclass(frozen=True)
class Meta:
    """What a plan needs to know of a tensor."""

    shape: Shape
    stride: Shape
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        """A tensor's."""
        return Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class Target:
    """What an output must be: the axes it varies along, its final shape (None: over the domain's
    axes), its type.
    """

    extent: ir.Extent
    shape: Shape | None
    dtype: torch.dtype


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> float32."""
    return str(dtype).removeprefix("torch.")


def memory_order(shape: Shape, stride: Shape) -> tuple[tuple[int, ...], bool]:
    """(axes from outermost to innermost in memory, whether the tensor is dense in that order).

    Axes of size one have no place of their own; they stay beside their logical neighbours.
    """
    rank = len(shape)
    logical = tuple(range(-rank, 0))
    if _is_dense(shape, stride, logical):
        return logical, True
    last = (-rank, *range(-rank + 2, 0), -rank + 1) if rank > 2 else logical
    if _is_dense(shape, stride, last):
        return last, True
    by_stride = tuple(sorted(logical, key=lambda a: (-stride[a], a)))
    if _is_dense(shape, stride, by_stride):
        return by_stride, True
    return logical, False


def _is_dense(shape: Shape, stride: Shape, order: Sequence[int]) -> bool:
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1:
            if stride[axis] != expected:
                return False
            expected *= shape[axis]
    return True


def dense_strides(shape: Shape, order: Sequence[int]) -> Shape:
    """The strides of a dense tensor whose axes lie in this order."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


@dataclass(frozen=True)
class Input:
    """How one input is brought into place: seen as `shape`, copied to `strides` where it lies
    otherwise.
    """

    shape: Shape
    strides: Shape
    is_ready: bool

    def arrange(self, tensor: Tensor) -> Tensor:
        """The tensor as the kernels want it; itself where it is ready."""
        if self.is_ready:
            return tensor
        seen = tensor.reshape(self.shape)
        matches = all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, seen.stride(), self.strides, strict=True)
        )
        if matches:
            return seen
        return torch.empty_strided(
            self.shape, self.strides, dtype=tensor.dtype, device=tensor.device
        ).copy_(seen)


@dataclass(frozen=True)
class Output:
    """How one output is allocated, and the shape in which it is handed over."""

    shape: Shape
    strides: Shape
    dtype: torch.dtype
    whole_shape: (
        Shape  # over the domain's axes, with those along which the value happens not to vary
    )
    final_shape: Shape
    is_zeroed: bool  # a kernel leaves a dropped edge, or there is nothing to do

    def allocate(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Memory for it: from an input, where there is one, which takes half as long."""
        if tensors:
            out = tensors[0].new_empty_strided(self.shape, self.strides, dtype=self.dtype)
        else:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return out.zero_() if self.is_zeroed else out

    @property
    def final_strides(self) -> Shape | None:
        """The strides of the result in its final shape; None where that takes a copy."""
        if self.shape != self.whole_shape:
            return None
        own = [pair for pair in zip(self.shape, self.strides, strict=True) if pair[0] != 1]
        found: list[int] = []
        following = 1
        for size in reversed(self.final_shape):
            if size != 1:
                number, following = own.pop() if own else (1, 1)
                found.insert(0, following)
                # An axis that the kernels see as several.
                while number < size and own and own[-1][1] == found[0] * number:
                    number *= own.pop()[0]
                if number != size:
                    return None
                following *= size
            else:
                found.insert(0, following)
        return None if own else tuple(found)

    def can_fill(self, out: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether the kernels can write straight into out while they read the tensors."""
        strides = self.final_strides
        if strides is None:
            return False
        pairs = zip(out.shape, out.stride(), strides, strict=True)
        own = out.untyped_storage().data_ptr()
        is_laid_out = all(size == 1 or have == want for size, have, want in pairs)
        return is_laid_out and all(t.untyped_storage().data_ptr() != own for t in tensors)

    def hand_over(self, result: Tensor) -> Tensor:
        """The result in its final shape: a copy, where that joins axes that do not lie as one."""
        return result.expand(self.whole_shape).reshape(self.final_shape)


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
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        sizes: Sequence[int],
        device: torch.device,
        *,
        is_empty: bool,
        needs: tuple[bool, ...] | None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.launch = partial(module.launch, name)
        self.sizes = tuple(sizes)
        self.device = device
        self.is_empty = is_empty
        self.is_ready = all(i.is_ready for i in inputs)
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
        if self.is_ready and not is_empty and is_plain:
            pairs = zip(outputs, strides, strict=True)
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
        )
        self.attempt, self.run_planned = module.plan(name, tuple(tensors), facts)

    def run(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Launch on tensors of the planned combination; out, where given, is ready to be
        written.
        """
        if out is None:
            planned: tuple[Tensor, ...] | None = self.run_planned(tuple(tensors))
            if planned is not None:
                return planned
        for t in tensors:
            # It stands for something else, such as a shape alone, and may have no memory.
            if type(t).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                raise UnsupportedError(
                    f"got a {type(t).__name__}, which says itself what operations do to it; a "
                    "fused chain is none that it knows of, fused.reference is made of such"
                )
        if not self.is_ready:
            tensors = [i.arrange(t) for i, t in zip(self.inputs, tensors, strict=True)]
        if out is None:
            results = tuple([o.allocate(tensors, self.device) for o in self.outputs])
        else:
            results = (out,)
        if not self.is_empty:
            self._launch(tensors, results)
        if self.changes_shape and out is None:
            return tuple([o.hand_over(r) for r, o in zip(results, self.outputs, strict=True)])
        return results

    def _launch(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        scratch = 0
        if self.scratch_bytes:
            memory = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)
            scratch = memory.data_ptr()
        pointers = map(_pointer, (*tensors, *results))
        if self.launch(*pointers, scratch, *self.sizes, self.where()) == 1:
            # Some view begins off a 16-byte boundary: give the kernels aligned copies.
            aligned = [t if t.data_ptr() % _ALIGNMENT == 0 else t.clone() for t in tensors]
            homes = [r if r.data_ptr() % _ALIGNMENT == 0 else torch.empty_like(r) for r in results]
            self._launch(aligned, homes)
            for result, home in zip(results, homes, strict=True):
                if home is not result:
                    result.copy_(home)


def _not_planned(*_: object) -> None:
    """What stands for the functions of C where there is no input to know a plan by."""


def make_plan(
    program: Program,
    bound: Bound,
    order: Sequence[int],
    tensors: Sequence[Tensor],
    targets: Sequence[Target],
    device: torch.device,
    module: ModuleType,
    needs: tuple[bool, ...] | None,
) -> Plan:
    """The plan of a program that the module holds. tensors are such as it will run on; needs tells
    which of them get a gradient, None that none does; targets say what each output must be.
    """
    domain, windows = bound.domain, dict(bound.windows)
    pooled = {a: windows_along(w, domain[a]) for a, w in windows.items()}
    inputs, outputs = [], []
    for leaf, tensor in zip(program.graph.inputs, tensors, strict=True):
        meta = Meta.of(tensor)
        if leaf.kind == "noise":
            inputs.append(Input(meta.shape, meta.stride, True))
            continue
        shape = _shape(leaf.extent, domain, pooled)
        strides = dense_strides(shape, order)
        inputs.append(Input(shape, strides, _lies_alike(meta.shape, meta.stride, shape, strides)))
        if math.prod(meta.shape) != math.prod(shape):
            raise ArgumentError(f"{leaf}: got shape {meta.shape}, wanted {shape}")
    is_empty = math.prod(domain) == 0
    fills_edges = TARGETS[target_of(device)].fills_edges
    for (_, expr), target in zip(program.graph.outputs, targets, strict=True):
        shape = _shape(expr.extent, domain, pooled)
        tiles = {a: w for a, w in windows.items() if isinstance(w, int)}
        has_edge = any(-a in expr.extent and domain[a] % tiles[a] for a in tiles)
        if fills_edges and frozenset(range(-len(domain), 0)) <= expr.extent:
            has_edge = False
        strides = dense_strides(shape, order)
        whole = _shape(target.extent, domain, pooled)
        final = whole if target.shape is None else target.shape
        outputs.append(Output(shape, strides, target.dtype, whole, final, is_empty or has_edge))
    grouping = collapse(program.graph, order, windows)[2]
    sizes = [math.prod(pooled.get(a, domain[a]) for a in axes) for axes in grouping.axes]
    sizes += [domain[grouping.axes[g][0]] for g in grouping.pooled]
    return Plan(
        module,
        program.name,
        tensors,
        inputs,
        outputs,
        sizes,
        device,
        is_empty=is_empty,
        needs=needs,
    )


def _shape(extent: ir.Extent, domain: Shape, pooled: Mapping[int, int]) -> Shape:
    """The shape over the domain's axes of a tensor that varies along `extent`."""
    rank = len(domain)
    sizes = []
    for axis in range(-rank, 0):
        whole = axis not in pooled or -axis in extent or ir.SLIDING - axis in extent
        size = domain[axis] if whole else pooled[axis]
        sizes.append(size if axis in extent else 1)
    return tuple(sizes)


def _lies_alike(shape: Shape, stride: Shape, other: Shape, strides: Shape) -> bool:
    """Whether two descriptions of a tensor, whose axes may be joined or split, are of the same
    memory.
    """
    return _joined(shape, stride) == _joined(other, strides) or math.prod(other) == 0


def _joined(shape: Shape, stride: Shape) -> list[tuple[int, int]]:
    """(size, stride) of each axis that is wider than one, neighbours that lie as one joined."""
    found: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size != 1 and found and found[-1][1] == size * step:
            found[-1] = (found[-1][0] * size, step)
        elif size != 1:
            found.append((size, step))
    return found


def remember(plans: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a plan; with every shape seen only once, the oldest go."""
    if len(plans) >= _MOST_PLANS:
        for old in list(plans)[: _MOST_PLANS // 2]:
            del plans[old]
    plans[key] = value
