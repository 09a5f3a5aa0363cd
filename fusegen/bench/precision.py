"""Correctness of a work against float64, at the very shape that is timed.

The float64 reference runs on slices of the batch, so that a tensor of gigabytes has room; gradients
of parameters are added up over the slices. An error is the largest difference in units of the
largest value of its tensor.

A few elements stand so near a kink that rounding puts them on its other side, where the gradient is
another: there eager's own answer is as right as the reference's. A sum does not tell its elements
apart: where its error is too large, eager's is found for x an ulp away too, where other elements
cross a kink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusegen import dsl
from fusegen.bench.rivals import (
    Function,
    dtype_of,
    gradients_of,
    inputs,
    is_batched,
    leaves_of,
    results_of,
)
from fusegen.bench.works import Work
from fusegen.lower import GIVEN

_SLICE_ELEMENTS = 1 << 25
_TIMES_EAGER, _ULP = 2, 8  # as `fusegen check` allows
# In ulp of the largest value: further than rounding takes a result; and how few may be there.
_BEYOND_ROUNDING = {torch.float32: 8192, torch.bfloat16: 8, torch.float16: 8, torch.float64: 1e12}
_FEW = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float64: 0.0}


@dataclass(frozen=True)
class Precision:
    """The errors of each result, ours and eager's, as fractions of its largest value."""

    ours: dict[str, float]
    eager: dict[str, float]
    is_right: bool  # whether ours are no larger than what is allowed


def precision(work: Work, ours: Function, eager: Function, device: str) -> Precision:
    """Result and every gradient of both, compared with eager in float64."""
    tensors = inputs(work, device, 0)
    x = tensors[0]
    with torch.no_grad():
        cotangents = [torch.randn_like(r) for r in results_of(ours, tensors)]
    needs = [t.requires_grad for t in leaves_of(work, tensors)]
    of = ("x", *dsl.chain(work.chain).operands)
    given = [f"{GIVEN}{i}" for i in range(1, len(cotangents))]
    names = ["out", *given, *(f"d_{name}" for name, n in zip(of, needs, strict=True) if n)]
    found = {"ours": _outcome(work, ours, tensors, cotangents)}
    found["eager"] = _outcome(work, eager, tensors, cotangents)

    count = x.shape[0] if x.dim() and is_batched(work, device) else 1
    step = max(1, count * _SLICE_ELEMENTS // max(x.numel(), 1)) if count > 1 else 1
    # Of fewer axes than x, only what names places or classes has its first.
    in_slices = [
        x.dim() > 0
        and t.shape[:1] == x.shape[:1]
        and (t.dim() == x.dim() or not t.is_floating_point())
        for t in tensors
    ]
    is_sliced = [
        *(True for _ in cotangents),
        *(s for s, n in zip(in_slices, needs, strict=True) if n),
    ]
    largest = [0.0] * len(names)
    differences = {who: [0.0] * len(names) for who in found}
    sums: list[Tensor | None] = [None] * len(names)
    for start in range(0, count, step):
        part = slice(start, start + step) if count > 1 else ...
        slices = [t[part] if s else t for t, s in zip(tensors, in_slices, strict=True)]
        doubles = [t.double() if t.is_floating_point() else t for t in slices]
        exact = _outcome(work, eager, doubles, [c[part].double() for c in cotangents])
        for i, value in enumerate(exact):
            if is_sliced[i]:
                largest[i] = max(largest[i], _largest(value))
                both = found["ours"][i][part], found["eager"][i][part]
                for who, error in zip(differences, _distances(*both, value), strict=True):
                    differences[who][i] = max(differences[who][i], error)
            else:
                total = sums[i]
                sums[i] = value if total is None else total + value
    for i, total in enumerate(sums):
        if total is not None:
            largest[i] = _largest(total)
            for who, values in found.items():
                differences[who][i] = _largest(values[i].double() - total)
    slack = _ULP * torch.finfo(dtype_of(work)).eps
    unsure = {
        i: total
        for i, total in enumerate(sums)
        if total is not None
        and differences["ours"][i] > _TIMES_EAGER * differences["eager"][i] + slack * largest[i]
    }
    for ulps in (1, -1) if unsure else ():
        nudged = tensors[0] * (1 + ulps * torch.finfo(dtype_of(work)).eps)
        again = _outcome(work, eager, [nudged, *tensors[1:]], cotangents)
        for i, total in unsure.items():
            error = _largest(again[i].double() - total)
            differences["eager"][i] = max(differences["eager"][i], error)
    errors = {
        who: {
            name: difference / scale if scale else difference
            for name, difference, scale in zip(names, by_result, largest, strict=True)
        }
        for who, by_result in differences.items()
    }
    is_right = all(
        error <= _TIMES_EAGER * errors["eager"][name] + slack
        for name, error in errors["ours"].items()
    )
    return Precision(errors["ours"], errors["eager"], is_right)


def _outcome(
    work: Work, function: Function, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    return [t.detach() for t in gradients_of(function, leaves_of(work, tensors), cotangents)]


def _largest(values: Tensor) -> float:
    """The largest magnitude; infinite where something is NaN, 0 where there is nothing."""
    if not values.numel():
        return 0.0
    return torch.nan_to_num(values.abs(), nan=torch.inf, posinf=torch.inf).max().item()


def _distances(ours: Tensor, eager: Tensor, exact: Tensor) -> tuple[float, float]:
    """The largest difference from the exact values, ours and eager's, but for kinks."""
    dtype = ours.dtype
    ours, eager = ours.double(), eager.double()
    mine, other = (ours - exact).abs(), (eager - exact).abs()
    rounding = _BEYOND_ROUNDING[dtype] * torch.finfo(dtype).eps * _largest(exact)
    at_kink = other > rounding
    if at_kink.double().mean().item() <= _FEW[dtype]:
        mine = torch.where(at_kink, mine.minimum((ours - eager).abs()), mine)
        other = torch.where(at_kink, 0.0, other)
    return _largest(mine), _largest(other)
