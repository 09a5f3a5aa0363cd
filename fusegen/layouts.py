"""Layouts: how the tensors of a program must lie in memory, and the shapes they are handed over in.

All of it is told by shapes, strides and types alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusegen import ir
from fusegen.bound import Bound
from fusegen.errors import ArgumentError
from fusegen.modules import target_of
from fusegen.program import Program
from fusegen.target import TARGETS
from fusegen.windowing import windows_along

Shape = tuple[int, ...]


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

    @property
    def span(self) -> int:
        """How many elements there are from its first to its last, with what lies between."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    def blank(self, device: torch.device) -> Tensor:
        """A tensor that lies so, whatever is in it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


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
    """(axes from outermost to innermost in memory, whether the tensor is dense in that order, but
    for gaps that are all alike).

    Axes of size one have no place of their own; they stay beside their logical neighbours.
    """
    for gaps in range(2):
        for order in _orders(stride):
            if _is_dense(shape, stride, order, gaps):
                return order, True
    return tuple(range(-len(shape), 0)), False


def _orders(stride: Shape) -> Iterator[tuple[int, ...]]:
    """Orders in which axes may lie, likeliest first; sizes that a tracer does not know are compared
    for the last one alone.
    """
    rank = len(stride)
    logical = tuple(range(-rank, 0))
    yield logical
    if rank > 2:
        yield (-rank, *range(-rank + 2, 0), -rank + 1)
    yield tuple(sorted(logical, key=lambda a: (-stride[a], a)))


def _is_dense(shape: Shape, stride: Shape, order: Sequence[int], gaps: int) -> bool:
    """Whether a tensor is dense in an order, but for so many kinds of gaps."""
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1:
            if stride[axis] != expected:
                expected, gaps = stride[axis], gaps - 1
            if gaps < 0:
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
class Pitch:
    """How a tensor lies that is dense but for gaps: so many elements one after the other, a run,
    and where the next one begins, counted from its beginning.
    """

    run: int
    step: int

    def is_apt(self, itemsize: int) -> bool:
        """Whether packs of 16 bytes, or of 8 elements, lie within one run."""
        is_whole = self.run % 8 == 0 and self.run * itemsize % 16 == 0
        return is_whole and self.step * itemsize % 16 == 0


def pitch_of(shape: Shape, stride: Shape, other: Shape, strides: Shape) -> Pitch | None:
    """How a tensor lies, if it is dense but for gaps, where the same tensor in other axes, joined
    or split, would be dense with other strides; None if it is anything else.
    """
    mine, its = _joined(shape, stride), _joined(other, strides)
    if 0 in shape:
        return None
    pairs = []  # of strides: where it is dense, and here
    while mine and its:
        (size, have), (count, want) = mine.pop(), its.pop()
        least = min(size, count)
        if size % least or count % least:
            return None
        pairs.append((want, have))
        mine += [(size // least, have * least)] if size > least else []
        its += [(count // least, want * least)] if count > least else []
    run, step = min(((want, have) for want, have in pairs if have != want), default=(0, 0))
    is_even = all(have == want if want < run else have * run == step * want for want, have in pairs)
    return Pitch(run, step) if run and is_even else None


@dataclass(frozen=True)
class Input:
    """How one input is brought into place: seen as `shape`, copied to `strides` where it lies
    otherwise, or read as it lies, with gaps.
    """

    shape: Shape
    strides: Shape
    is_ready: bool
    pitch: Pitch | None = None

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

    def can_fill(self, out: Tensor, tensors: Sequence[Tensor] = ()) -> bool:
        """Whether the kernels can write straight into out, which has the final shape, while they
        read the tensors.
        """
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


def inputs_of(
    program: Program,
    bound: Bound,
    order: Sequence[int],
    metas: Sequence[Meta],
    *,
    may_have_gaps: bool,
) -> list[Input]:
    """How the inputs of a program are brought into place that walks the graph's axes in this
    order.
    """
    found = []
    for leaf, meta in zip(program.graph.inputs, metas, strict=True):
        if leaf.kind == "noise":
            found.append(Input(meta.shape, meta.stride, True))
            continue
        shape = _shape(leaf.extent, bound.domain, windows_of(bound))
        if math.prod(meta.shape) != math.prod(shape):
            raise ArgumentError(f"{leaf}: got shape {meta.shape}, wanted {shape}")
        strides = dense_strides(shape, order)
        is_ready = _lies_alike(meta.shape, meta.stride, shape, strides)
        pitch = None
        if may_have_gaps and not is_ready:
            pitch = pitch_of(meta.shape, meta.stride, shape, strides)
            pitch = pitch if pitch and pitch.is_apt(meta.dtype.itemsize) else None
        found.append(Input(shape, strides, is_ready or pitch is not None, pitch))
    return found


def outputs_of(
    program: Program,
    bound: Bound,
    order: Sequence[int],
    targets: Sequence[Target],
    device: torch.device,
) -> list[Output]:
    """How the outputs of a program are allocated that walks the graph's axes in this order."""
    domain, windows = bound.domain, dict(bound.windows)
    pooled, outputs = windows_of(bound), []
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
    return outputs


def windows_of(bound: Bound) -> dict[int, int]:
    """How many windows each pooled axis has."""
    return {a: windows_along(w, bound.domain[a]) for a, w in bound.windows}


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
