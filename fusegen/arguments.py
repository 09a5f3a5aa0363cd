"""Arguments: what a call may be given, and the error that tells what else it got."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from fusegen.bind import bind
from fusegen.bound import Bound
from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ir import Expr
from fusegen.joining import Way, chosen
from fusegen.layouts import Meta, dtype_name, memory_order
from fusegen.modules import target_of
from fusegen.ops import Chain


def check_tensor(name: str, value: Any) -> None:
    """Raise ArgumentError for anything but a strided tensor."""
    if not isinstance(value, Tensor):
        hint = ""
        if isinstance(value, int | float):
            hint = f"; pass torch.tensor({value}), or make it a number of the chain, which is a "
            hint += "parameter with a default, or in text the number itself"
        raise ArgumentError(
            f"argument {name!r}: got {type(value).__name__}, wanted a torch.Tensor{hint}"
        )
    if value.is_nested:
        raise ArgumentError(
            f"argument {name!r}: got a nested tensor, wanted one of a single shape; use "
            f"{name}.to_padded_tensor(0), or {name}.values() where the rows are one after the other"
        )
    if value.layout != torch.strided:
        raise ArgumentError(
            f"argument {name!r}: got a tensor of layout {value.layout}, wanted a strided one; use "
            f"{name}.to_dense()"
        )


def check_tensors(chain: Chain, tensors: Sequence[Any]) -> None:
    """Raise ArgumentError where x or an operand is no tensor that fusegen takes."""
    for name, value in zip(("x", *chain.operands), tensors, strict=True):
        check_tensor(name, value)


def bound_of(chain: Chain, tensors: Sequence[Tensor]) -> Bound:
    """The chain bound to these tensors, or the ArgumentError that tells which of them is wrong."""
    check_devices(chain, tensors)
    x, *operands = tensors
    kinds = [_kind(t) for t in operands]
    return bind(chain, _kind(x), dict(zip(chain.operands, kinds, strict=True)))


def check_all(chain: Chain, found: Sequence[Way], tensors: Sequence[Tensor]) -> tuple[int, Bound]:
    """Which of a chain's ways goes for these tensors, and its last segment bound to what they make
    of it.

    Raises ArgumentError where one of them does not fit.
    """
    check_devices(chain, tensors)
    kinds = [_kind(t) for t in tensors]
    operands = dict(zip(chain.operands, kinds[1:], strict=True))
    order, is_dense = memory_order(kinds[0][0], tensors[0].stride())
    target = target_of(tensors[0].device)
    way, bounds = chosen(found, kinds[0], operands, target, order if is_dense else None)
    return way, bounds[-1]


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), dtype_name(tensor.dtype)


def check_devices(chain: Chain, tensors: Sequence[Tensor]) -> None:
    """Raise ArgumentError where x or an operand is no tensor that fusegen takes, or elsewhere."""
    check_tensors(chain, tensors)
    x, *operands = tensors
    target_of(x.device)
    for name, t in zip(chain.operands, operands, strict=True):
        if t.device != x.device:
            raise ArgumentError(
                f"argument {name!r}: got a tensor on {t.device}, wanted one on {x.device}, where x "
                "is"
            )


def may_count(value: Any, x: Any) -> bool:
    """Whether something may be what counts batches beside x."""
    is_number = isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 0
    return is_number and isinstance(x, Tensor) and value.device == x.device


def is_symbolic(given: Iterable[Any]) -> bool:
    """Whether something stands for a tensor: in torch.fx, which records what is done to it, or in a
    function that is traced.
    """
    return any(isinstance(value, Proxy | Expr) for value in given)


def refuse_learning(chain: Chain, operands: Sequence[Any]) -> None:
    """Raise ArgumentError where a tensor that is updated in place needs a gradient."""
    if torch.is_grad_enabled():
        for name, operand in zip(chain.operands, operands, strict=True):
            if chain.updates(name) and getattr(operand, "requires_grad", False):
                raise ArgumentError(
                    f"argument {name!r}: it is updated in place, and needs a gradient, which it "
                    f"cannot have; pass {name}.detach()"
                )


def check_apart(names: Sequence[str], tensors: Sequence[Tensor], updated: Sequence[int]) -> None:
    """Raise ArgumentError where a tensor that is updated in place has memory in common with
    another one, or elements with each other.
    """
    ends = [(t.data_ptr(), t.data_ptr() + Meta.of(t).span * t.element_size()) for t in tensors]
    for mine in updated:
        if _is_expanded(tensors[mine]):
            raise ArgumentError(
                f"argument {names[mine]!r}: it is updated in place, and expanded: one place in "
                "memory stands for more than one element; pass one that torch.empty gives"
            )
        for other, (begin, end) in enumerate(ends):
            if other != mine and ends[mine][0] < end and begin < ends[mine][1]:
                raise ArgumentError(
                    f"argument {names[mine]!r}: it is updated in place, and lies in the memory of "
                    f"{names[other]!r}; give it a tensor of its own"
                )


def _is_expanded(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


def check_out(out: Any, chain: Chain, bound: Bound, tensors: Sequence[Tensor]) -> None:
    """Raise ArgumentError where a result cannot be written into `out`."""
    for name, t in zip(("x", *chain.operands), tensors, strict=True):
        if t.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"out= was given, but {name!r} needs a gradient, which a result written in place "
                "cannot have; call without out=, or under torch.no_grad()"
            )
    if chain.gives:
        raise ArgumentError(
            f"out= was given, which takes one result, but the chain gives {', '.join(chain.gives)} "
            "beside it; call without out="
        )
    check_tensor("out", out)
    have = (tuple(out.shape), dtype_name(out.dtype), out.device)
    if have != (bound.result_shape, bound.dtype, tensors[0].device):
        raise ArgumentError(
            f"argument 'out': got shape {have[0]}, {have[1]} on {have[2]}; wanted shape "
            f"{bound.result_shape}, {bound.dtype} on {tensors[0].device}"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "argument 'out' needs a gradient, which a tensor that is written in place cannot have; "
            "pass out.detach(), or call under torch.no_grad()"
        )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            "argument 'out' was made under torch.inference_mode(), outside of which nothing may be "
            "written to it; pass out.clone(), or call under it"
        )
    if _is_expanded(out):
        raise ArgumentError(
            f"argument 'out': got an expanded tensor of shape {have[0]}, where one place in memory "
            "stands for more than one element; pass one that torch.empty gives"
        )


# What stands for tensors while torch.compile or torch.export records operators.
_STAND_INS = (FakeTensor, FunctionalTensor)


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether some are a tracer's stand-ins, which have no memory, or a mode asks for each operator
    that is called.
    """
    return bool(count_modes()) or any(isinstance(t, _STAND_INS) for t in tensors)


count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


tracing_state = torch._C._get_tracing_state
# Whether it stands for a batch of gradients, where autograd is asked for many at once.
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_are_transforms_active = torch._C._are_functorch_transforms_active


def refuse_batches(gradients: Iterable[Tensor | None]) -> None:
    """Raise where gradients come in batches, as single operations take them."""
    if any(g is not None and _is_batched(g) for g in gradients):
        raise UnsupportedError(
            "a fused chain cannot take gradients in batches (is_grads_batched=True, or "
            "vectorize=True of torch.autograd.functional); ask for one at a time, or use "
            "fused.reference"
        )


def is_watched() -> bool:
    """Whether something of torch's that watches single operations is at work."""
    is_forward_mode = forward_ad._current_level >= 0
    return is_forward_mode or _are_transforms_active() or tracing_state() is not None


def refuse_what_looks_inside(tensors: Sequence[Tensor]) -> None:
    """Raise where torch would watch single operations and see none, and go on without a word."""
    if tracing_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace cannot record a fused chain; trace fused.reference instead"
        )
    duals = [forward_ad.unpack_dual(t) for t in tensors]  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        raise UnsupportedError(
            "a fused chain has no forward-mode derivative yet; use fused.reference under "
            "forward_ad and torch.func.jvp, or reverse mode"
        )
    if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise UnsupportedError(
            "a fused chain cannot be transformed by torch.func (vmap, grad, jacrev ...); call it "
            "on the whole batch instead of under vmap, differentiate it with torch.autograd, or "
            "transform fused.reference"
        )


def sizes_of(what: str, given: Sequence[int]) -> tuple[int, ...]:
    """Sizes as a caller gave them. Raises ArgumentError for what is none."""
    try:
        found = tuple(map(operator.index, given))
    except TypeError:
        found = (-1,)
    if min(found, default=0) < 0:
        raise ArgumentError(f"{what}: got {given!r}, wanted sizes such as (8, 64, 14, 14)")
    return found


def require_floats(
    loose: Container[str], operands: Sequence[str], tensors: Sequence[Tensor]
) -> None:
    """Raise ArgumentError for integers among x and the operands, of those that meet written floats
    and are not followed by their types.
    """
    for name, tensor in zip(("x", *operands), tensors, strict=True):
        if name not in loose or not isinstance(tensor, Tensor):
            continue
        if not tensor.dtype.is_floating_point:
            raise ArgumentError(
                f"argument {name!r} has {tensor.dtype}, which meets a float such as 1.0 in the "
                f"function; write 1, or convert them first, for example {name}.float()"
            )


def in_order(
    names: Sequence[str], operands: Sequence[Tensor], named: Mapping[str, Tensor], expected: str
) -> tuple[Tensor, ...]:
    """The operands of these names, given by position and by name."""
    given = dict(zip(names, operands, strict=False))
    if len(operands) > len(names):
        raise ArgumentError(f"got {len(operands)} operands, wanted {len(names)}: {expected}")
    for name in named:
        if name not in names:
            raise ArgumentError(f"no operand is called {name!r}: {expected}")
        if name in given:
            raise ArgumentError(f"operand {name!r} is given twice, by position and by name")
    given |= named
    missing = [n for n in names if n not in given]
    if missing:
        raise ArgumentError(f"operand {missing[0]!r} is missing: {expected}")
    return tuple(given[n] for n in names)


_default = torch.get_default_dtype


def kinds_of(args: tuple[Any, ...]) -> Any:
    """What decides for a chain, of arguments that are all dense tensors; else None."""
    if not all(isinstance(t, Tensor) and t.layout == torch.strided for t in args):
        return None
    kinds = (_default(), *[(t.shape, t.stride(), t.dtype, t.device) for t in args])
    if not torch._C._is_any_autocast_enabled():
        return kinds
    device = args[0].device.type
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), kinds
