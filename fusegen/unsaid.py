"""What a chain does not say: tensors' methods and functions that it lacks, each with what to write.

Nothing of a tensor is known before a call, so what it has of its own is told as not known yet; its
type and its device may be asked for where another value is cast to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fusegen.errors import ChainError
from fusegen.ir import Expr

TYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
# What a tensor knows of itself, and what to write where a chain asks for it.
UNKNOWN: Mapping[str, str] = {
    **dict.fromkeys(
        ("dim", "ndim", "numel"),
        "its axes are not known before a call; flatten(1), unflatten, mean and the like need no "
        "sizes",
    ),
    **dict.fromkeys(("item", "tolist", "numpy", "cpu"), "it has no values before a call"),
    **dict.fromkeys(("requires_grad", "is_leaf", "grad_fn"), "it is not known before a call"),
    **dict.fromkeys(
        ("permute", "transpose", "t", "T", "mT", "movedim"),
        "no step exchanges axes; pass such a view of the tensor, which is read where it lies",
    ),
    **dict.fromkeys(
        ("matmul", "mm", "bmm", "linear", "conv1d", "conv2d", "conv3d", "einsum"),
        "a chain follows a product or a convolution: call it with what that gives",
    ),
    **dict.fromkeys(
        ("pad", "gather", "cumsum", "sort", "topk"),
        "no step does it; compile what stands before and behind it as chains of their own",
    ),
}
PARTS = "how many parts it has is not known; they are x.select(dim, 0), x.select(dim, 1), ..."
# What to write in a chain's text for what only a function can say, or nothing can.
UNSAID: Mapping[str, str] = {
    **UNKNOWN,
    "glu": "write a function, def f(x): return F.glu(x, dim); of the last axis it is unflatten(-1, "
    "(2, -1)) | keep(y) | select(-2, 1) | sigmoid | keep(gate) | recall(y) | select(-2, 0) | "
    "mul(gate)",
    "unbind": f"{PARTS}, which select does in text as well",
    "chunk": "its parts are unflatten(-1, (2, -1)) | select(-2, 0), and select(-2, 1)",
    "split": "of equal parts, one is unflatten(-1, (2, -1)) | select(-2, 0)",
    "cat": "of parts of one shape, it is stack(y, dim=-2) | flatten(-2)",
    "clamp_min": "write clamp(min)",
    "clamp_max": "write clamp(max=max)",
    **{name: f"write to('{dtype}')" for name, dtype in TYPES.items()},
}


class NotKnownYet(ChainError):
    """What a tensor has, and an expression has not before a call."""


@dataclass(frozen=True, eq=False)
class TypeOf:
    """x.dtype, which a call tells: what another value may be cast to."""

    REASON: ClassVar[str] = (
        "x.dtype is not known before a call; another value may be cast to it, as in "
        "h.to(x.dtype), and what a step gives has the type that eager gives it"
    )
    value: Expr

    def __eq__(self, other: object) -> bool:
        raise NotKnownYet(self.REASON)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class DeviceOf:
    """x.device, where all that a call is given is."""

    value: Expr

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceOf):
            raise NotKnownYet("x.device is not known before a call, which has one for all")
        return True

    __hash__ = None  # type: ignore[assignment]
