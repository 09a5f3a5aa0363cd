"""What a chain does not say: tensors' methods and functions that it lacks, each with what to write.

Nothing of a tensor is known before a call, so what it has of its own is told as not known yet; its
type and its device may be asked for where another value is cast to them. A function that asks for
more is traced when it is called, and then the call tells.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from types import CodeType, FrameType
from typing import Any, ClassVar, Protocol

from fusegen.errors import ChainError
from fusegen.ir import Expr

TYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
TYPES |= {"byte": "uint8", "char": "int8", "short": "int16", "int": "int32", "long": "int64"}
UNTOLD = (
    "its axes are not known before a call; fusegen.compile takes a function that asks, and traces "
    "it when it is called; flatten(1), unflatten, mean and the like need no sizes"
)
SEEING = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "select")
MOVING = ("permute", "transpose", "t", "movedim", "swapaxes", "swapdims", "T", "mT")
# What puts elements in other places: no step does it, but a call.
PLACING: tuple[str, ...] = ("flip", "roll", "repeat", "repeat_interleave", "tile", "unfold")
PLACING += ("index_select", "diagonal", "diag", "pad", "rot90", "flipud", "fliplr")
# And what puts others there, beside a value's own.
_SCATTERING: tuple[str, ...] = (
    "index_fill",
    "index_copy",
    "scatter",
    "masked_scatter",
    "slice_scatter",
)
_SCATTERING += ("select_scatter", "diagonal_scatter")
ADDING = ("pad", "cat", "stack", "assigned", *_SCATTERING)
PLACING += ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "interpolate", *_SCATTERING)
FILLING = ("copy_", "fill_", "zero_")  # what puts something in the place of all of a value
# Of what moves elements, what gives a tensor of its own.
COPYING = tuple(name for name in (*PLACING, *ADDING) if name not in ("diagonal", "unfold"))
PRODUCTS = ("matmul", "mm", "bmm", "linear", "conv1d", "conv2d", "conv3d", "einsum")
# What a tensor knows of itself, and what to write where a chain asks for it.
UNKNOWN: Mapping[str, str] = {
    **dict.fromkeys(("item", "tolist", "numpy"), "it has no values before a call"),
    **dict.fromkeys(
        ("requires_grad", "is_leaf", "grad_fn"),
        "it is not known before a call; leave the question out, for one chain serves both answers",
    ),
    **dict.fromkeys(
        MOVING,
        "no step exchanges axes; pass such a view of the tensor, which is read where it lies",
    ),
    **dict.fromkeys(
        PLACING,
        "no step puts elements elsewhere; fusegen.compile takes a function that does, whose calls "
        "have torch do it",
    ),
    **dict.fromkeys(
        PRODUCTS,
        "a chain follows a product or a convolution: call it with what that gives",
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk", "median", "kthvalue"),
        "no step does it; compile what stands before and behind it as chains of their own",
    ),
    **{
        f"max_pool{n}d_with_indices": "of max pooling a chain gives the values, not their indices"
        for n in (1, 2, 3)
    },
}
PARTS = "how many parts it has is not known; they are x.select(dim, 0), x.select(dim, 1), ..."
# What to write in a chain's text for what only a function can say, or nothing can.
UNSAID: Mapping[str, str] = {
    **UNKNOWN,
    **dict.fromkeys(("dim", "ndim", "numel", "size", "shape"), UNTOLD),
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


class Told(Protocol):
    """What a call tells of a value: its sizes, torch's type and its device."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...


class Call(Protocol):
    """A call for which a function is traced."""

    def of(self, value: Expr) -> Told:
        """What it tells of a value."""

    def tensors(self) -> Mapping[Expr, Told]:
        """What it gives to the function, by what stands for it."""

    def view(
        self, value: Expr, method: str, /, *args: Any, is_last_resort: bool = False, **named: Any
    ) -> Expr | None:
        """What stands for a view of a tensor, which the call takes of it by a method; None for what
        is computed, and of the first tensor, if it is not the last resort.
        """

    def there(self, value: Expr) -> Expr:
        """A tensor; of a value that is computed, what stands for the result of a chain to it."""

    def aligned(self, value: Expr) -> Expr:
        """What stands for a tensor; where that has the first one's first axes, or is one wide, for
        it along those.
        """

    def moved(self, tensor: Any) -> Any:
        """The tensor on the device of what it gives."""


class Telling(IntEnum):
    """How much a call tells."""

    AS_ASKED = 0  # what chains cannot do without, so that they are the same for many calls
    AT_ONCE = 1  # sizes and types are the call's own from the beginning
    ALL = 2  # and the types of what operators meet; what is a view of an operand, the call takes
    ALIGNED = 3  # and that a tensor of the first one's first axes lies along those
    JOINED = 4  # and what is put side by side, the call puts there


_call: ContextVar[tuple[Call | None, Telling]] = ContextVar("_call", default=(None, Telling(0)))


@contextmanager
def told_by(call: Call, telling: Telling) -> Iterator[None]:
    """With a call that tells what is asked for."""
    token = _call.set((call, telling))
    try:
        yield
    finally:
        _call.reset(token)


def current_call() -> Call | None:
    """The call for which is traced, if there is one."""
    return _call.get()[0]


def tells_at_once() -> bool:
    """Whether sizes and types are the call's own from the beginning."""
    return _call.get()[1] >= Telling.AT_ONCE


def tells_all() -> bool:
    """Whether the call tells the types of all that operators meet."""
    return _call.get()[1] >= Telling.ALL


def leaves_joining() -> bool:
    """Whether the call puts side by side what is, so that it is no part of a chain."""
    return _call.get()[1] >= Telling.JOINED


def aligned(value: Expr) -> Expr:
    """What stands for a tensor, along the axes of the first one that the call says it has."""
    call, telling = _call.get()
    return value if call is None or telling < Telling.ALIGNED else call.aligned(value)


def told_of(value: Expr, reason: str) -> Told:
    """What the call tells of a value; NotKnownYet, for this reason, where there is none."""
    if (call := current_call()) is None:
        raise NotKnownYet(reason)
    return call.of(value)


@dataclass(frozen=True, eq=False, repr=False)
class TypeOf:
    """x.dtype, which a call tells: what another value may be cast to."""

    REASON: ClassVar[str] = (
        "x.dtype is not known before a call; another value may be cast to it, as in "
        "h.to(x.dtype), and what a step gives has the type that eager gives it"
    )
    value: Expr

    def __eq__(self, other: object) -> bool:
        other = other.told() if isinstance(other, TypeOf) else other
        return bool(self.told() == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.told())

    def told(self) -> Any:
        """Torch's type."""
        return told_of(self.value, self.REASON).dtype


@dataclass(frozen=True, eq=False, repr=False)
class DeviceOf:
    """x.device, where all that a call is given is."""

    value: Expr

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeviceOf):
            return True
        return bool(self.told() == other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.told())

    def __str__(self) -> str:
        return str(self.told())

    def told(self) -> Any:
        """Torch's device."""
        reason = "x.device is not known before a call, which has one for all"
        return told_of(self.value, reason).device


def type_of(x: Expr) -> Any:
    """x.dtype; where code may ask which object it is, that is it."""
    found = TypeOf(x)
    return found.told() if tells_at_once() or asks_by("IS_OP", "isinstance") else found


def device_of(x: Expr) -> Any:
    """x.device."""
    found = DeviceOf(x)
    return found.told() if tells_at_once() else found


def asks_by(*instructions: str) -> bool:
    """Whether the code that asks, behind what is fusegen's own, has one of these instructions, or
    names.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "fusegen":
        frame = frame.f_back
    return frame is not None and not _words_of(frame.f_code).isdisjoint(instructions)


@functools.cache
def _words_of(code: CodeType) -> frozenset[str]:
    return frozenset((*(i.opname for i in dis.get_instructions(code)), *code.co_names))


_asked = [0]  # how often somebody wanted to know the default type


def default_type() -> str:
    """The type that integers become where they meet nothing that has one."""
    _asked[0] += 1
    torch = sys.modules.get("torch")
    return "float32" if torch is None else str(torch.get_default_dtype()).removeprefix("torch.")


def times_asked() -> int:
    """How often somebody wanted to know that."""
    return _asked[0]


def is_type(value: object) -> bool:
    """Whether it is one of torch's types of elements, or stands for one."""
    return isinstance(value, TypeOf) or type(value).__name__ == "dtype"


def is_device(value: object) -> bool:
    """Whether it is the device of a value, which is that of all."""
    is_told = current_call() is not None and type(value).__name__ == "device"
    return isinstance(value, DeviceOf) or is_told


def is_device_of(x: Expr, value: object) -> bool:
    """Whether it is a device, and x is there, since what a chain gives stays where its input is."""
    if isinstance(value, DeviceOf | Expr):
        return isinstance(value, DeviceOf)
    try:
        device = sys.modules["torch"].device(value)
    except (KeyError, RuntimeError, TypeError):
        return False  # a type, say
    own = told_of(x, f"x.to({str(device)!r}): where x is only a call tells").device
    if device.type != own.type or device.index not in (None, own.index):
        raise ChainError(
            f"x.to: got {str(device)!r}, but x is on {str(own)!r}, where all that a chain gives "
            "stays; leave it out, and move the result"
        )
    return True
