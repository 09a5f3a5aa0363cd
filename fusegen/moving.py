"""Moving: axes in another order, and elements in other places, as a call takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.shaping import as_numbers
from fusegen.standing import current
from fusegen.unsaid import UNKNOWN, NotKnownYet, current_call


def moved(x: Expr, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expr:
    """A value with its axes in another order, or its elements elsewhere, as the call takes it."""
    if current() is None:
        raise ChainError(f"x.{method}: {UNKNOWN[method]}")
    if (call := current_call()) is None:
        raise NotKnownYet(f"x.{method}: {UNKNOWN[method]}")
    if method == "interpolate" and not str(kwargs.get("mode", "nearest")).startswith("nearest"):
        raise ChainError("torch's interpolate: of its modes a call takes nearest, which only moves")
    told = {word: as_numbers(value) for word, value in kwargs.items()}
    view = call.view(x, method, *as_numbers(tuple(args)), is_last_resort=True, **told)
    assert view is not None
    return view


def looked_up(x: Expr, keys: tuple[object, ...]) -> Expr:
    """x where other tensors say, as the call takes it."""
    if (call := current_call()) is None:
        raise NotKnownYet("x[i]: what an index tensor picks only a call takes")
    for key in keys:
        if isinstance(key, Expr) and str(call.of(key).dtype) == "torch.bool":
            raise ChainError(
                "x[condition]: how many elements that picks its values alone tell; write "
                "torch.where(condition, x, 0), or x.masked_fill"
            )
    view = call.view(x, "__getitem__", as_numbers(keys), is_last_resort=True)
    assert view is not None
    return view
