"""Spellings: torch's functions and a tensor's methods that are several operations of a chain, or
one with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.ops.schema import show_value
from fusegen.sizes import are_told_by_call, seen_in, size_of
from fusegen.unsaid import PARTS, TYPES, DeviceOf, TypeOf


class Largest(NamedTuple):
    """What torch gives for a maximum along an axis: its value, and where it stands."""

    values: Expr
    indices: Expr


def _largest(name: str) -> Callable[..., Any]:
    """max or min as torch has it: of all, of two, or along an axis with its index."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Expr) for a in (*args, *kwargs.values())):
            return lookup(f"{name}imum")(x, *args, **kwargs)
        values = lookup(name)(x, *args, **kwargs)
        if not (args or kwargs):
            return values
        return Largest(values, lookup(f"arg{name}")(x, *args, **kwargs))

    return found


def _clamped(x: Expr, min: Any = None, max: Any = None) -> Expr:
    """Between two numbers, or tensors, of which NaN is taken as torch does."""
    bounds = {word: bound for word, bound in (("min", min), ("max", max)) if bound is not None}
    if not any(isinstance(bound, Expr) for bound in bounds.values()):
        return lookup("clamp")(x, **bounds)
    for word, bound in bounds.items():
        beyond = ir.primitive("lt" if word == "min" else "gt", x, bound)
        if isinstance(bound, Expr):
            beyond = beyond | ir.primitive("ne", bound, bound)
        x = lookup("where")(beyond, bound, x)
    return x


def _chunk(x: Expr, chunks: int, dim: int = 0) -> tuple[Expr, ...]:
    """Equal parts of an axis."""
    if not isinstance(chunks, int) or chunks < 1:
        raise ChainError(f"x.chunk: got {show_value(chunks)}, wanted how many parts, an integer")
    apart = lookup("unflatten")(x, dim, (chunks, -1))
    axis = dim - 1 if dim < 0 else dim
    return tuple(lookup("select")(apart, axis, i) for i in range(chunks))


def _unbound(x: Expr, dim: int = 0) -> tuple[Expr, ...]:
    """What stands at each place along an axis, where the chain says how many it has."""
    count = _places_along(x, dim)
    if count is None:
        raise ChainError(f"x.unbind: {PARTS}")
    return tuple(lookup("select")(x, dim, i) for i in range(count))


def _places_along(x: Expr, dim: int) -> int | None:
    """The size of an axis, if an unflatten has just made it."""
    if x.op != "call" or x.attrs[0] is not lookup("unflatten"):
        return None
    _, _, attributes, _ = x.attrs
    assert isinstance(attributes, tuple)
    told: dict[str, Any] = dict(attributes)
    sizes, at = told["sizes"], told["dim"]
    place = dim - (at if at >= 0 else at - len(sizes) + 1)
    is_there = (dim < 0) == (at < 0) and 0 <= place < len(sizes) and sizes[place] >= 0
    return int(sizes[place]) if is_there else None


def _distance(
    x: Expr, other: Expr, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Expr:
    return lookup("norm")(x - other + eps, p, -1, keepdim=keepdim)


def _glu(x: Expr, dim: int = -1) -> Expr:
    value, gate = _chunk(x, 2, dim)
    return value * lookup("sigmoid")(gate)


def _norm(x: Expr, p: float | str = 2.0, dim: Any = None, keepdim: bool = False) -> Expr:
    return lookup("norm")(x, 2.0 if p == "fro" else p, dim, keepdim=keepdim)


def _spread(name: str) -> Callable[..., Expr]:
    """var or std, which torch lets say too whether one is taken from the count."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> Expr:
        *dims, last = args or (None,)
        if isinstance(last, bool):
            args, kwargs = tuple(dims), {**kwargs, "unbiased": last}
        if (is_unbiased := kwargs.pop("unbiased", None)) is not None:
            kwargs["correction"] = 1 if is_unbiased else 0
        return lookup(name)(x, *args, **kwargs)

    return found


def _reshaped(x: Expr, *sizes: Any, **kwargs: Any) -> Expr:
    """In another shape; where that is one axis among others of one index, of any tensor."""
    is_one = len(sizes) == 1 and isinstance(sizes[0], tuple | list)
    shape = tuple(sizes[0] if is_one else sizes)
    if are_told_by_call(shape):
        return seen_in(x, shape)
    if kwargs or [n for n in shape if n != 1] != [-1]:
        return lookup("reshape")(x, *sizes, **kwargs)
    x = lookup("flatten")(x)
    for i, _ in enumerate(shape):
        x = x if shape[i] == -1 else lookup("unsqueeze")(x, i)
    return x


def _joined(name: str) -> Callable[..., Expr]:
    """Values of one shape behind each other along an axis, or along a new one."""

    stack, flatten = lookup("stack"), lookup("flatten")
    most = 1 + sum(p.takes_tensor for p in stack.parameters)

    def found(values: Any, dim: int = 0) -> Expr:
        if not isinstance(values, tuple | list):
            raise ChainError(f"torch.{name}: wants a list of expressions, got {show_value(values)}")
        is_apt = 1 < len(values) <= most and all(isinstance(v, Expr) for v in values)
        if not is_apt:
            raise ChainError(
                f"torch.{name}: got {len(values)} values, wanted from two to {most} "
                "expressions of one shape"
            )
        first, *others = values
        if name == "stack":
            return stack(first, *others, dim=dim)
        apart = stack(first, *others, dim=dim - 1 if dim < 0 else dim)
        return flatten(apart, *((dim - 1, dim) if dim < 0 else (dim, dim + 1)))

    return found


def _scaled(op: str) -> Callable[..., Expr]:
    """A sum whose second term may have a factor."""

    def found(x: Any, other: Any, alpha: float = 1) -> Expr:
        return ir.primitive(op, x, other if alpha == 1 else other * alpha)

    return found


def cast(x: Expr, dtype: object) -> Expr:
    """x in a type, or in that of another value."""
    if isinstance(dtype, TypeOf | Expr):
        return lookup("type_as")(x, dtype.value if isinstance(dtype, TypeOf) else dtype)
    return lookup("to")(x, dtype)


def _moved(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    """x.to(...), where x and what it is moved to are on one device."""
    named = (kwargs.get(word) for word in ("dtype", "device", "other"))
    told = [v for v in (*args, *named) if not isinstance(v, DeviceOf | bool | None)]
    if len(told) > 1:
        raise ChainError("x.to: got a device, but all that a call is given is on one; leave it out")
    return cast(x, *told) if told else x


def _itself(x: Expr) -> Expr:
    return x


SPELLED: Mapping[str, Callable[..., Any]] = {
    "max": _largest("max"),
    "min": _largest("min"),
    "chunk": _chunk,
    "tensor_split": _chunk,
    "unbind": _unbound,
    "pairwise_distance": _distance,
    "glu": _glu,
    **dict.fromkeys(("clamp", "clip"), _clamped),
    "clamp_min": lambda x, min: _clamped(x, min),
    "clamp_max": lambda x, max: _clamped(x, None, max),
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "norm": _norm,
    "var": _spread("var"),
    "std": _spread("std"),
    **dict.fromkeys(("reshape", "view"), _reshaped),
    **dict.fromkeys(("cat", "concat", "concatenate"), _joined("cat")),
    "stack": _joined("stack"),
    "size": size_of,
    "to": _moved,
    "type": cast,
    "bool": lambda x: ir.primitive("ne", x, 0.0),
    "contiguous": _itself,
    "clone": _itself,
    **{name: partial(cast, dtype=dtype) for name, dtype in TYPES.items()},
}
