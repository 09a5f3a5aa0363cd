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
from typing import Any

import torch
from torch import Tensor

from fusegen import ir
from fusegen.errors import ArgumentError
from fusegen.grouping import collapse
from fusegen.lower import Bound
from fusegen.modules import target_of
from fusegen.program import Program
from fusegen.target import TARGETS

Shape = tuple[int, ...]
_pointer = Tensor.data_ptr
_ALIGNMENT = 16  # bytes; the widest access of a kernel


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

    def hand_over(self, result: Tensor) -> Tensor:
        """The result in its final shape."""
        if self.shape != self.whole_shape:
            result = result.expand(self.whole_shape)
            return result.reshape(self.final_shape)
        return result.view(self.final_shape)


class Plan:
    """One program on one combination of shapes, strides and types, on one device."""

    def __init__(
        self,
        launch: Callable[..., int],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        sizes: Sequence[int],
        device: torch.device,
        *,
        is_empty: bool,
        is_like_first: bool,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.launch = launch
        self.sizes = tuple(sizes)
        self.device = device
        self.is_empty = is_empty
        self.is_ready = all(i.is_ready for i in inputs)
        self.changes_shape = any(o.shape != o.final_shape for o in outputs)
        # The last argument says where to run: the device's current stream, or how many threads.
        self.where: Callable[[], int] = torch.get_num_threads
        if device.type == "cuda":
            self.sizes = (*self.sizes, device.index)
            self.where = partial(torch._C._cuda_getCurrentRawStream, device.index)
        self.scratch_bytes = 0
        if not is_empty:
            blank = (0,) * (len(inputs) + len(outputs))
            self.scratch_bytes = launch(*blank, -1, *self.sizes, self.where())
        # Most calls: nothing to arrange, one output, no scratch. Half their time would be Python's.
        self.is_simple = self.is_ready and len(outputs) == 1 and not self.scratch_bytes
        self.is_simple &= bool(inputs) and not (
            is_empty or self.changes_shape or outputs[0].is_zeroed
        )
        self.layout = (outputs[0].shape, outputs[0].strides)
        self.dtype = outputs[0].dtype
        # The cheapest allocation there is, where the result lies in memory as the first input does.
        self.is_like_first = is_like_first

    def run(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Launch on tensors of the planned combination; out, where given, is ready to be
        written.
        """
        if self.is_simple and out is None:
            if self.is_like_first:
                result = torch.empty_like(tensors[0])
            else:
                result = tensors[0].new_empty_strided(*self.layout, dtype=self.dtype)
            pointers = map(_pointer, tensors)
            if not self.launch(*pointers, result.data_ptr(), 0, *self.sizes, self.where()):
                return (result,)
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


def make_plan(
    program: Program,
    bound: Bound,
    order: Sequence[int],
    metas: Sequence[Meta],
    targets: Sequence[Target],
    device: torch.device,
    launch: Callable[..., int],
) -> Plan:
    """The plan of a program. metas are its inputs'; targets say what each output must be."""
    domain, windows = bound.domain, dict(bound.windows)
    pooled = {a: domain[a] // w if domain[a] >= w else 0 for a, w in windows.items()}
    inputs, outputs = [], []
    for leaf, meta in zip(program.graph.inputs, metas, strict=True):
        shape = _shape(leaf.extent, domain, pooled)
        strides = dense_strides(shape, order)
        inputs.append(Input(shape, strides, _lies_alike(meta.shape, meta.stride, shape, strides)))
        if math.prod(meta.shape) != math.prod(shape):
            raise ArgumentError(f"{leaf}: got shape {meta.shape}, wanted {shape}")
    is_empty = math.prod(domain) == 0
    fills_edges = TARGETS[target_of(device)].fills_edges
    for (_, expr), target in zip(program.graph.outputs, targets, strict=True):
        shape = _shape(expr.extent, domain, pooled)
        has_edge = any(-a in expr.extent and domain[a] % windows[a] for a in windows)
        if fills_edges and frozenset(range(-len(domain), 0)) <= expr.extent:
            has_edge = False
        strides = dense_strides(shape, order)
        whole = _shape(target.extent, domain, pooled)
        final = whole if target.shape is None else target.shape
        outputs.append(Output(shape, strides, target.dtype, whole, final, is_empty or has_edge))
    grouping = collapse(program.graph, order, windows)[2]
    sizes = [math.prod(pooled.get(a, domain[a]) for a in axes) for axes in grouping.axes]
    sizes += [domain[grouping.axes[g][0]] for g in grouping.pooled]
    first = metas[0] if metas else None
    is_like_first = first == Meta(outputs[0].shape, outputs[0].strides, outputs[0].dtype)
    return Plan(
        launch, inputs, outputs, sizes, device, is_empty=is_empty, is_like_first=is_like_first
    )


def _shape(extent: ir.Extent, domain: Shape, pooled: Mapping[int, int]) -> Shape:
    """The shape over the domain's axes of a tensor that varies along `extent`."""
    rank = len(domain)
    sizes = []
    for axis in range(-rank, 0):
        whole = axis not in pooled or -axis in extent
        size = domain[axis] if whole else pooled[axis]
        sizes.append(size if axis in extent else 1)
    return tuple(sizes)


def _lies_alike(shape: Shape, stride: Shape, other: Shape, strides: Shape) -> bool:
    """Whether two descriptions of a tensor, axes of size one aside, are of the same memory."""
    have = [pair for pair in zip(shape, stride, strict=True) if pair[0] != 1]
    want = [pair for pair in zip(other, strides, strict=True) if pair[0] != 1]
    return have == want or math.prod(other) == 0


def check_tensor(name: str, value: Any) -> None:
    """Raise ArgumentError for anything but a strided tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"argument {name!r}: got {type(value).__name__}, wanted a torch.Tensor")
    if value.layout != torch.strided:
        raise ArgumentError(
            f"argument {name!r}: got a tensor of layout {value.layout}, wanted a strided one; use "
            f"{name}.to_dense()"
        )
