"""Assigning: x[key] = value, of which x is a new value from then on."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from fusegen import arity, ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.ops.eager import is_tensor
from fusegen.shaping import as_numbers
from fusegen.sizes import with_numbers
from fusegen.spellings import cast
from fusegen.standing import Tracing, current, given_out, is_given, known
from fusegen.unsaid import Call, NotKnownYet, current_call

_WAY = "write x = torch.where(condition, y, x)"


def replacing(
    where: str, way: str, x: Expr, others: Sequence[Any], compute: Callable[[], Expr]
) -> Expr:
    """What is computed of x and others in x's place, in x's type, which goes by x's name then."""
    tracing, call = current(), current_call()
    if tracing is None:
        return compute()
    x = tracing.overwriting.named(tracing.overwriting.now(x))
    _refuse_history(tracing, x, where)

    def computed() -> Expr:
        found = compute()
        if call is not None:
            wanted = call.of(x).dtype
            if tuple(call.of(found).shape) != tuple(call.of(x).shape):
                raise ChainError(
                    f"{where}: the result would have shape {tuple(call.of(found).shape)}, and x "
                    f"has {tuple(call.of(x).shape)}; {way}"
                )
            return found if call.of(found).dtype == wanted else cast(found, wanted)
        return cast(found, x) if any(isinstance(other, Expr) for other in others) else found

    return tracing.overwriting.replacing(where, way, x, computed)


def _refuse_history(tracing: Tracing, x: Expr, where: str) -> None:
    """Raise where x is changed under torch.no_grad() and has a gradient, which eager would go on
    with as if it had not been changed.
    """
    if not tracing.is_without_gradients():
        return
    waiting = [x]
    while waiting:
        node = waiting.pop()
        is_step = node.op == "detach" or node.op in (*arity.COMPARISONS, *arity.CONNECTIVES)
        waiting += [] if is_step else node.args
        if node.op == "input" and not tracing.is_number(node):
            origin = tracing.origin(node)
            if origin is None:
                raise ChainError(
                    f"{where}: under torch.no_grad() it changes a value that has a gradient; write "
                    "x = x.detach() before it"
                )
            waiting.append(origin)


def assign(x: Any, key: object, value: object) -> None:
    """x[key] = value: what stands for x stands for the new value from then on."""
    given_out("__setitem__", (x,), lambda: _assigned(x, key, value))


def _assigned(x: Any, key: object, value: object) -> Expr:
    tracing, call = current(), current_call()
    x = known(x, "x[...] = y") if tracing is None or is_tensor(x) else tracing.overwriting.now(x)
    if tracing is None or is_given(x):
        raise ChainError(
            "x[...] = y changes what the chain is given in place; write x = x.clone() before it, "
            "and change what outlives the call, as a module's buffer does, outside of the chain"
        )
    _refuse_history(tracing, x, "x[...] = y")
    if call is None:
        raise NotKnownYet("x[...] = y: where that is only a call tells")
    keys = tuple(known(k, "x[...] = y") for k in (key if isinstance(key, tuple) else (key,)))
    tracing.overwriting.put_back(value, x, key)
    tracing.overwriting.check_use("__setitem__", (x, value))
    new = known(with_numbers(value), "x[...] = y")
    if not isinstance(new, Expr | Real):
        raise ChainError(f"x[...] = y: y is a {type(new).__name__}, wanted a tensor or a number")
    return tracing.overwriting.replacing(
        "x[...] = y", _WAY, x, lambda: _with(call, known(x, "x"), as_numbers(keys), new)
    )


def _with(call: Call, x: Expr, keys: tuple[Any, ...], value: Any) -> Expr:
    """x with a value at an index."""
    indices = [key for key in keys if isinstance(key, Expr)]
    if len(keys) == len(indices) == 1 and str(call.of(indices[0]).dtype) == "torch.bool":
        return _where(call, x, indices[0], value)
    if any(str(call.of(index).dtype) == "torch.bool" for index in indices):
        raise ChainError(f"x[...] = y: got a condition among other indices; {_WAY}")
    if all(_is_place(key) for key in keys):
        found = _in_place(call, x, keys, value)
        if found is not None:
            return found
    view = call.view(x, "assigned", keys, value, is_last_resort=True)
    assert view is not None
    return view


def _is_place(key: object) -> bool:
    """Whether it takes a place or a slice along an axis."""
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return is_number or isinstance(key, slice) or key is Ellipsis


def _where(call: Call, x: Expr, condition: Expr, value: Any) -> Expr:
    """x with a value where a condition on its first axes holds."""
    if isinstance(value, Expr) and math.prod(call.of(value).shape) != 1:
        raise ChainError(
            "x[condition] = y: how many elements of y that takes the condition's values alone "
            f"tell; {_WAY}"
        )
    for _ in range(len(call.of(x).shape) - len(call.of(condition).shape)):
        condition = lookup("unsqueeze")(condition, -1)
    if isinstance(value, Expr):
        value = _without_axes(call, value)
    return _chosen(call, condition, value, x)


def _without_axes(call: Call, value: Expr) -> Expr:
    for _ in call.of(value).shape:
        value = lookup("squeeze")(value, -1)
    return value


def _chosen(call: Call, condition: Expr, value: Any, x: Expr) -> Expr:
    """The value where the condition holds, of x's type."""
    dtype = call.of(x).dtype
    is_truth = str(dtype) == "torch.bool"
    if isinstance(value, Expr):
        value = value if call.of(value).dtype == dtype else cast(value, dtype)
        if is_truth:
            here, there = ir.primitive("logical_and", condition, value), ~condition
            return ir.primitive("logical_or", here, ir.primitive("logical_and", there, x))
        return ir.primitive("where", condition, value, x)
    if is_truth:
        if value:
            return ir.primitive("logical_or", condition, x)
        return ir.primitive("logical_and", ~condition, x)
    if value != value:
        torch, tracing = sys.modules["torch"], current()
        assert tracing is not None
        nan = tracing.hold(call.moved(torch.tensor(math.nan, dtype=dtype)), "constant")
        return ir.primitive("where", condition, nan, x)
    number = float(value) if dtype.is_floating_point else float(int(value))
    found: Expr = lookup("masked_fill")(x, condition, number)
    return found


def _in_place(call: Call, x: Expr, keys: Sequence[Any], value: Any) -> Expr | None:
    """x with a value at places that do not depend on other tensors: a choice by a mask, if the
    value is the same along the axes of which a part is taken; else None.
    """
    torch = sys.modules["torch"]
    shape = tuple(call.of(x).shape)
    try:
        target = tuple(torch.empty(shape, device="meta")[tuple(keys)].shape)
    except (IndexError, TypeError, ValueError) as error:
        raise ChainError(f"x[...] = y: of x of shape {shape}: {error}") from None
    dots = next((i for i, key in enumerate(keys) if key is Ellipsis), len(keys))
    behind = keys[dots + 1 :]
    every = [*keys[:dots], *[slice(None)] * (len(shape) - dots - len(behind)), *behind]
    is_whole = [isinstance(key, slice) and key == slice(None) for key in every]
    if isinstance(value, Expr):
        own = tuple(call.of(value).shape)
        beyond = own[: max(len(own) - len(target), 0)]
        fits = zip(reversed(own), reversed(target), strict=False)
        if any(n != 1 for n in beyond) or any(n not in (1, m) for n, m in fits):
            raise ChainError(
                f"x[...] = y: got y of shape {own}, wanted one that broadcasts to {target}"
            )
        for _ in beyond:
            value = lookup("squeeze")(value, 0)
        own = own[len(beyond) :]
        left = [whole for key, whole in zip(every, is_whole, strict=True) if isinstance(key, slice)]
        varies = zip(reversed(own), reversed(left), strict=False)
        if any(n != 1 and not whole for n, whole in varies):
            return None
        axis = -1
        for key in reversed(every):  # of what is taken at one place, the value has no axis
            if -axis > len(own) and not isinstance(key, slice):
                break
            if not isinstance(key, slice):
                value = lookup("unsqueeze")(value, axis)
                own = (*own[: len(own) + axis + 1], 1, *own[len(own) + axis + 1 :])
            axis -= 1
    small = [1 if whole else n for n, whole in zip(shape, is_whole, strict=True)]
    mask = torch.zeros(small, dtype=torch.bool)
    mask[tuple(every)] = True
    tracing = current()
    assert tracing is not None
    return _chosen(call, tracing.hold(call.moved(mask), "places"), value, x)
