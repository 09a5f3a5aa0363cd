"""Layouts: how the tensors of a program must lie in memory, and the shapes they are handed over in.

All of it is told by shapes, strides and types alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fusegen import ir
from fusegen.axes import Shape
from fusegen.bound import Bound
from fusegen.errors import ArgumentError
from fusegen.modules import target_of
from fusegen.program import Program
from fusegen.strides import Lie, dense_strides, lie_of, shape_over, windows_of
from fusegen.target import TARGETS


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

    def zeros(self, device: torch.device) -> Tensor:
        """A tensor of its shape and type."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

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


def stored(tensor: Tensor) -> Tensor:
    """The tensor with its elements in memory, where torch keeps in mind alone that they are negated
    or zero.
    """
    if tensor._is_zerotensor():
        return Meta.of(tensor).blank(tensor.device).zero_()
    return tensor.resolve_neg()


def arranged(tensor: Tensor, lie: Lie) -> Tensor:
    """The tensor as the kernels want it; itself where it is ready."""
    if lie.is_ready:
        return tensor
    if lie.cut is not None:
        whole, places = lie.cut
        tensor = tensor.reshape(whole)
        for axis, place in places:
            tensor = tensor.narrow(axis, place, 1)
    seen = tensor.reshape(lie.shape)
    matches = all(
        size == 1 or have == want
        for size, have, want in zip(lie.shape, seen.stride(), lie.strides, strict=True)
    )
    if matches:
        return seen
    home = torch.empty_strided(lie.shape, lie.strides, dtype=tensor.dtype, device=tensor.device)
    return home.copy_(seen)


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
        """Memory for it, in its final shape where that takes no copy: from an input, where there is
        one, which takes half as long.
        """
        final = None if self.shape == self.final_shape else self.final_strides
        lie = (self.shape, self.strides) if final is None else (self.final_shape, final)
        if tensors:
            out = tensors[0].new_empty_strided(*lie, dtype=self.dtype)
        else:
            out = torch.empty_strided(*lie, dtype=self.dtype, device=device)
        return out.zero_() if self.is_zeroed else out

    @cached_property
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
        is_apart = all(t.untyped_storage().data_ptr() != own for t in tensors)
        return is_laid_out and is_apart and not out.is_neg()

    def hand_over(self, result: Tensor, *, is_own: bool) -> Tensor:
        """The result in its final shape: a copy, where that joins axes that do not lie as one, or
        one number is in all places of what is the caller's own, and may be written to.
        """
        if result.shape == self.final_shape:
            return result
        found = result.expand(self.whole_shape).reshape(self.final_shape)
        return found.contiguous() if is_own and result.numel() == 1 else found


def inputs_of(
    program: Program,
    bound: Bound,
    order: Sequence[int],
    metas: Sequence[Meta],
    *,
    may_have_gaps: bool,
) -> list[Lie]:
    """How the inputs of a program lie that walks the graph's axes in this order."""
    found = []
    for i, (leaf, meta) in enumerate(zip(program.graph.inputs, metas, strict=True)):
        if leaf.kind == "noise":
            found.append(Lie(meta.shape, meta.stride, True))
            continue
        places = program.places_of(i)
        whole = shape_over(leaf.extent.union(dict(places)), bound.domain, windows_of(bound))
        if math.prod(meta.shape) != math.prod(whole):
            raise ArgumentError(f"{leaf}: got shape {meta.shape}, wanted {whole}")
        kind = (meta.shape, meta.stride, meta.dtype.itemsize)
        facts = (leaf.extent, places, kind, bound, order)
        found.append(lie_of(*facts, may_have_gaps=may_have_gaps))
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
        shape = shape_over(expr.extent, domain, pooled)
        tiles = {a: w for a, w in windows.items() if isinstance(w, int)}
        has_edge = any(-a in expr.extent and domain[a] % tiles[a] for a in tiles)
        if fills_edges and frozenset(range(-len(domain), 0)) <= expr.extent:
            has_edge = False
        strides = dense_strides(shape, order)
        whole = shape_over(target.extent, domain, pooled)
        final = whole if target.shape is None else target.shape
        outputs.append(Output(shape, strides, target.dtype, whole, final, is_empty or has_edge))
    return outputs
