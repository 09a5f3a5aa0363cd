"""A chain beside eager torch on random values: how far off each is, forward and gradients.

Both are compared with eager torch in float64 on the same values. In float32, fusegen may be as far
off as twice eager's own error and 8 ulp of the largest value: eager's error may happen to be zero.
In float64 that reference is eager's own result, so eager's error can only be estimated: from the
one in float32, which the same operations made, by the ratio of the types' precision. A single
rounding near a pole moves such an estimate much, so there it is 8 times that, and the 8 ulp. In 16
bits, where eager rounds after each step, it is twice eager's error and one ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusegen.describe import (
    Situation,
    assumed_shapes,
    classes,
    element_type,
    has_gradient,
    is_positive,
)
from fusegen.errors import ArgumentError
from fusegen.layouts import dtype_name
from fusegen.lower import GIVEN
from fusegen.ops import Chain
from fusegen.promotion import QUANTISED
from fusegen.runtime import Fused
from fusegen.segments import bind_any

_NARROW = ("float16", "bfloat16")
# How often eager's error is allowed, and how many ulp of the largest value beside it.
_ALLOWED = {torch.float32: (2, 8), torch.float64: (8, 8)} | {
    getattr(torch, dtype): (2, 1) for dtype in _NARROW
}
# Further than rounding takes a result, as a part of the largest; and how few may be there.
_BEYOND_ROUNDING = {4: 1e-3, 2: 1e-1}  # by the bytes of an element
_FEW = 1e-3


@dataclass(frozen=True)
class Comparison:
    """One result in one type: the largest error of fusegen and of eager, and what is allowed."""

    dtype: str
    result: str  # "out", "given_1" for what is given beside it, "d_x" for the gradient of x
    fused_error: float
    eager_error: float
    allowed_error: float

    @property
    def is_good(self) -> bool:
        """Whether fusegen is within what is allowed."""
        return self.fused_error <= self.allowed_error


def compare(
    chain: Chain, situation: Situation, device: str, seed: int, dtype: str | None = None
) -> list[Comparison]:
    """Every result in one type, or in float32 and float64. Builds the chain; situation's dtype is
    not used.

    Raises ArgumentError for shapes that do not fit and for a device that is not there.
    """
    if chain.drawn:
        raise ArgumentError(
            f"the chain {chain.text!r} draws noise, and eager draws other noise; compare it with "
            "training=False"
        )
    fused = Fused(chain)
    shape, shapes = assumed_shapes(chain, situation)
    kinds = {n: (s, element_type(chain, n, "float32")) for n, s in shapes.items()}
    bounds = bind_any(chain, (shape, "float32"), kinds)
    seed %= 1 << 63  # whatever integer it is
    generator = torch.Generator().manual_seed(seed)
    low: torch.dtype = getattr(torch, dtype) if dtype in _NARROW else torch.float32

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(low).float().to(device)

    try:
        tensors = {"x": _laid_out(random(shape), situation.layout)}
        for name in chain.operands:
            operand = random(shapes[name])
            if is_positive(chain, name):
                operand = operand.abs() + 0.5
            if number := classes(bounds, name):
                operand = operand.abs() * 1e6 % number
            wanted = getattr(torch, element_type(chain, name, "float32"))
            rounded = operand.to(low) if wanted == torch.float32 else operand
            tensors[name] = operand > 0 if wanted == torch.bool else rounded.to(wanted)
    except (RuntimeError, AssertionError) as error:  # torch's ways to say: no such device, no room
        raise ArgumentError(f"device {device!r}: {str(error).splitlines()[0]}") from error

    def results(
        function: Callable[..., Tensor], of: torch.dtype, *, is_exact: bool = False
    ) -> dict[str, Tensor]:
        # What a call updates in place, the next one is to find as it was.
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        if is_exact:
            copies = {name: tensor.cpu().contiguous() for name, tensor in copies.items()}
        cotangents = torch.Generator().manual_seed(seed + 1)
        found = _results(chain, function, copies, of, low, cotangents)
        return {name: result.to(device) for name, result in found.items()}

    ours = results(fused, low)  # the first, as it tells of a mistake in the shapes
    # On a GPU torch's hardswish takes a sixth in single precision, of doubles too, and avg_pool2d's
    # gradient is another one in channels_last (pytorch/pytorch#188344).
    exact = results(fused.reference, torch.float64, is_exact=True)
    eager = results(fused.reference, low)
    rows = []
    for name, reference in exact.items():
        eager_error = _distance(eager[name], reference, eager[name])
        rows.append(_comparison(low, name, ours, reference, eager_error, eager[name]))
    if dtype in (None, "float64"):
        ours64 = results(fused, torch.float64)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        for row in rows[: len(exact)]:
            name, eager_error = row.result, row.eager_error * ratio
            rows.append(_comparison(torch.float64, name, ours64, exact[name], eager_error))
    return [row for row in rows if dtype in (None, row.dtype)]


def _laid_out(x: Tensor, layout: str) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if layout == "contiguous":
        return x
    if x.dim() not in formats:
        raise ArgumentError(f"layout: got {layout!r} and {x.dim()} axes, wanted 4 or 5 axes")
    return x.contiguous(memory_format=formats[x.dim()])


def _results(
    chain: Chain,
    function: Callable[..., Tensor],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    low: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """A function's results in a type, on a cotangent that is one of the type `low` too."""
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    with torch.no_grad():
        outs = _named(function(*inputs.values()))
    if dtype_name(outs["out"].dtype) in QUANTISED:
        return {n: out.double() for n, out in outs.items()}
    names = ["x", *(name for name in chain.operands if has_gradient(chain, name))]
    leaves = {n: inputs[n].requires_grad_() for n in names}
    outs = _named(function(*inputs.values()))
    results = {n: out.detach() for n, out in outs.items()}
    if ends := [out for out in outs.values() if out.requires_grad]:
        cotangents = [torch.randn(e.shape, generator=generator).to(low).to(e) for e in ends]
        gradients = torch.autograd.grad(
            ends, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True
        )
        results |= {f"d_{n}": g for n, g in zip(leaves, gradients, strict=True)}
    return results


def _named(results: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    """A call's results by name."""
    given = results if isinstance(results, tuple) else (results,)
    return {f"{GIVEN}{i}" if i else "out": result for i, result in enumerate(given)}


def _comparison(
    dtype: torch.dtype,
    name: str,
    ours: Mapping[str, Tensor],
    reference: Tensor,
    eager_error: float,
    eager: Tensor | None = None,
) -> Comparison:
    fused_error = _distance(ours[name], reference, eager) if name in ours else math.inf
    finite = reference[torch.isfinite(reference)].double().abs()
    largest = finite.max().item() if finite.numel() else 0.0
    times, ulp = _ALLOWED[dtype]
    allowed = times * eager_error + ulp * torch.finfo(dtype).eps * largest
    return Comparison(str(dtype).removeprefix("torch."), name, fused_error, eager_error, allowed)


def _distance(result: Tensor, reference: Tensor, eager: Tensor | None = None) -> float:
    """The largest difference; infinite where only one is NaN or infinite, or of another kind.

    A few elements may stand so near a kink that rounding falls on its other side, where the
    gradient is another: there eager's own answer is as right as the reference's.
    """
    kinds = (result.shape, result.is_floating_point())
    if kinds != (reference.shape, reference.is_floating_point()):
        return math.inf
    if not result.numel():
        return 0.0
    found, exact = result.double(), reference.double()
    same = (found == exact) | (found.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (found - exact).abs())
    if eager is not None and eager.shape == reference.shape:
        other = eager.double()
        part = _BEYOND_ROUNDING.get(eager.element_size(), 0.0)
        beyond = (other - exact).abs() > part * exact.abs().nan_to_num(posinf=0.0).max()
        if beyond.double().mean() < _FEW:
            difference = torch.where(beyond, difference.minimum((found - other).abs()), difference)
    return torch.nan_to_num(difference, nan=math.inf, posinf=math.inf).max().item()
