"""Uniting: values that code puts side by side, along an axis or a new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusegen.asked import axes_of
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.ops.schema import show_value
from fusegen.overwriting import copied
from fusegen.unsaid import Call, NotKnownYet, current_call, leaves_joining, tells_at_once


def joined(name: str) -> Callable[..., Expr]:
    """Values of one shape behind each other along an axis, or along a new one."""
    stack, flatten = lookup("stack"), lookup("flatten")
    most = 1 + sum(p.takes_tensor for p in stack.parameters)

    def found(values: Any, dim: int = 0) -> Expr:
        if not isinstance(values, tuple | list):
            raise ChainError(f"torch.{name}: wants a list of expressions, got {show_value(values)}")
        if not values or not all(isinstance(v, Expr) for v in values):
            raise ChainError(f"torch.{name}: got {show_value(values)}, wanted expressions")
        first, *others = values
        call = current_call()
        if name == "hstack":  # of values with one axis along that
            dim = 1 if call is None else min(1, axes_of(first) - 1)
        if not others:
            return lookup("unsqueeze")(first, dim) if name == "stack" else copied(first)
        if len(values) > most and call is None:
            raise NotKnownYet(
                f"torch.{name}: got {len(values)} values; of more than {most} fusegen.compile "
                "takes a function whose calls have torch put them side by side"
            )
        is_apart = tells_at_once() and not _are_alike(call, values) if call else False
        if call and (len(values) > most or is_apart or leaves_joining()):
            method = "stack" if name == "stack" else "cat"
            view = call.view(first, method, others, dim, is_last_resort=True)
            assert view is not None
            return view
        if name == "stack":
            return stack(first, *others, dim=dim)
        apart = stack(first, *others, dim=dim - 1 if dim < 0 else dim)
        return flatten(apart, *((dim - 1, dim) if dim < 0 else (dim, dim + 1)))

    return found


def _are_alike(call: Call, values: Sequence[Expr]) -> bool:
    """Whether values have one shape."""
    return len({tuple(call.of(value).shape) for value in values}) == 1
