"""Spellings: torch's functions and a tensor's methods that are several operations of a chain, or
one with other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fusegen import ir
from fusegen.asked import ASKED
from fusegen.composed import COMPOSED
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.moving import looked_up
from fusegen.ops import lookup
from fusegen.ops.cast import QUANTISED
from fusegen.ops.schema import show_value
from fusegen.overwriting import copied
from fusegen.parting import chunk, narrowed, split, tensor_split, unbound
from fusegen.shaping import seen_in
from fusegen.sizes import (
    Leading,
    SizeOf,
    are_told_by_call,
    shape_of,
    with_numbers,
)
from fusegen.standing import current
from fusegen.uniting import joined
from fusegen.unsaid import (
    TYPES,
    TypeOf,
    current_call,
    is_device_of,
    leaves_joining,
    tells_all,
    told_of,
)

_EXPANDED = (
    "x.expand: where x meets a value it is as large as that one by itself; so leave it out, or "
    "write x.expand_as(y), or x.expand(y.shape)"
)

# Other names for an argument of an operation; and what is filled with a number.
RENAMED = {"axis": "dim", "ord": "p", "x2": "other"}
FILLED = ("full_like", "zeros_like", "ones_like")


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


def _chosen(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    """One of two, where a condition holds and where not; of two integers, one of int64."""
    found = lookup("where")(x, *args, **kwargs)
    both = (*args, *kwargs.values())
    return lookup("to")(found, "int64") if all(type(value) is int for value in both) else found


def _gathered(x: Expr, dim: int, index: Any) -> Expr:
    """What stands where an index says that is one wide along dim; where that is any index of a
    tensor that is given, as the call takes it.
    """
    call = current_call()
    if call is not None and tells_all() and isinstance(index, Expr) and x.op == "input":
        own, told = call.of(x).shape, call.of(index).shape
        is_apt = len(own) == len(told) and all(
            told[i] == (1 if i == dim % len(own) else own[i]) for i in range(len(own))
        )
        view = None if is_apt else call.view(x, "gather", dim, index)
        if view is not None:
            return view
    made = index.attrs[0] if isinstance(index, Expr) and index.op == "call" else None
    if getattr(made, "name", "") == "unsqueeze" and dict(index.attrs[2])["dim"] == dim:
        (index,) = index.args
    return lookup("gather")(x, dim, index)


def _embedded(x: Expr, weight: Expr, *args: Any, **kwargs: Any) -> Expr:
    """Rows of a table, which the call takes."""
    if any(value not in (None, False, 2.0) for value in (*args, *kwargs.values())):
        raise ChainError(
            "torch's embedding: of what it may be told a chain knows indices and table"
        )
    return looked_up(weight, (x,))


def _filled(x: Expr, fill_value: float, dtype: object = None, memory_format: Any = None) -> Expr:
    """A number in x's shape and type, or another: in the place of x where that is less than itself;
    of conditions, what always or never holds.
    """
    x = x if dtype is None else cast(x, dtype)
    fill_value = int(fill_value) if "int" in str(dtype) else fill_value
    if x.kind == "truth":
        op = "logical_or" if fill_value else "logical_and"
        return copied(ir.primitive(op, x, ir.primitive("logical_not", x)))
    found = lookup("where")(ir.primitive("lt", x, x), x, fill_value)
    found = copied(found if dtype is None else cast(found, dtype))
    return found if memory_format is None else _contiguous(found, memory_format)


def _expanded_as(x: Expr, other: Expr) -> Expr:
    """x along all of another one's axes."""
    if tells_all() and (call := current_call()) is not None:
        view = call.view(x, "expand", *call.of(other).shape)
        if view is not None:
            return view
    return ir.primitive("where", ir.primitive("lt", other, other), x, x)


def _expanded(x: Expr, *sizes: Any) -> Expr:
    one, *others = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if not others and isinstance(one, Leading) and one.stop is None:
        return _expanded_as(x, one.value)
    whole = [s for s in (one, *others) if isinstance(s, SizeOf) and s.rank == 1 + len(others)]
    if [s.axes for s in whole] == [(i,) for i in range(1 + len(others))]:
        return _expanded_as(x, whole[0].value)
    own = told_of(x, _EXPANDED).shape
    wanted = with_numbers((one, *others))
    beyond = len(wanted) - len(own)
    shape = tuple(own[i - beyond] if n == -1 else n for i, n in enumerate(wanted))
    if shape == own:
        return x
    call = current_call()
    assert call is not None
    view = call.view(x, "expand", *wanted, is_last_resort=leaves_joining())
    if view is not None:
        return view
    as_large = [t for t, seen in call.tensors().items() if seen.shape == shape]
    if not as_large:
        raise ChainError(_EXPANDED)
    return _expanded_as(x, as_large[0])


def _broadcast(*values: Expr) -> tuple[Expr, ...]:
    """Values, each along all axes that any of them has."""
    shapes = [tuple(told_of(value, _EXPANDED).shape) for value in values]
    if len({*shapes}) == 1:
        return values
    whole = sum(values[1:], values[0])
    full = tuple(told_of(whole, _EXPANDED).shape)
    pairs = zip(values, shapes, strict=True)
    return tuple(v if shape == full else _expanded_as(v, whole) for v, shape in pairs)


def _holding(name: str) -> Callable[..., Expr]:
    """Whether any or all that is not 0 along axes."""

    def found(x: Expr, dim: Any = None, keepdim: bool = False) -> Expr:
        numbers = lookup("where")(ir.primitive("ne", x, 0.0), 1.0, 0.0)
        return lookup("amax" if name == "any" else "amin")(numbers, dim, keepdim) > 0

    return found


def _glu(x: Expr, dim: int = -1) -> Expr:
    value, gate = chunk(x, 2, dim)
    return value * lookup("sigmoid")(gate)


class Extremes(NamedTuple):
    """What torch gives for both extremes of an axis."""

    min: Expr
    max: Expr


def _extremes(x: Expr, *, dim: int | None = None, keepdim: bool = False) -> Extremes:
    return Extremes(*(lookup(name)(x, dim, keepdim) for name in ("amin", "amax")))


def _either(x: Expr, other: Expr) -> Expr:
    """Which of two conditions holds, and not both."""
    return (x & ~other) | (~x & other)


def _norm(x: Expr, p: float | str = 2.0, dim: Any = None, keepdim: bool = False) -> Expr:
    return lookup("norm")(x, 2.0 if p == "fro" else p, dim, keepdim=keepdim)


def _told_of_spread(args: tuple[Any, ...]) -> dict[str, Any]:
    """What torch's var and std are told by position: along which axes may be left out."""
    names = ["dim", "unbiased", "keepdim"]
    is_left_out = bool(args) and isinstance(args[0], bool)
    return dict(zip(names[is_left_out:], args, strict=False))


def _spread(name: str) -> Callable[..., Expr]:
    """var or std, which torch lets say too whether one is taken from the count."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> Expr:
        told = _told_of_spread(args) | kwargs
        if (is_unbiased := told.pop("unbiased", None)) is not None:
            told["correction"] = 1 if is_unbiased else 0
        return lookup(name)(x, **told)

    return found


def _spread_and_mean(name: str) -> Callable[..., tuple[Expr, Expr]]:
    """var or std, and the mean along the same axes."""

    def found(x: Expr, *args: Any, **kwargs: Any) -> tuple[Expr, Expr]:
        told = _told_of_spread(args) | kwargs
        mean = lookup("mean")(x, told.get("dim"), keepdim=told.get("keepdim", False))
        return _spread(name)(x, *args, **kwargs), mean

    return found


def _vector_norm(x: Expr, p: float | None = None, dim: Any = None, keepdim: bool = False) -> Expr:
    if not isinstance(dim, int) or isinstance(p, str):
        raise ChainError("torch.linalg.norm: that of matrices is no operation; give one axis, dim")
    return lookup("norm")(x, 2.0 if p is None else p, dim, keepdim=keepdim)


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


def _scaled(op: str) -> Callable[..., Expr]:
    """A sum whose second term may have a factor."""

    def found(x: Any, other: Any, alpha: float = 1) -> Expr:
        return ir.primitive(op, x, other if alpha == 1 else other * alpha)

    return found


def cast(x: Expr, dtype: object) -> Expr:
    """x in a type, or in that of another value; of bool, whether it is not 0."""
    if isinstance(dtype, TypeOf | Expr):
        return lookup("type_as")(x, dtype.value if isinstance(dtype, TypeOf) else dtype)
    name = str(dtype).removeprefix("torch.")
    if name == "bool":
        return ir.primitive("ne", x, 0.0)
    return _quantised(x, name) if name.startswith("float8") else lookup("to")(x, dtype)


def _quantised(x: Expr, dtype: str) -> Expr:
    """x in a quantised type, where that holds it for sure: torch's own conversion of anything else
    differs from device to device.
    """
    bounded = x
    while bounded.op in ("round", "trunc", "floor", "ceil"):
        (bounded,) = bounded.args
    told: dict[str, Any] = {}
    if bounded.op == "call" and bounded.attrs[0] is lookup("clamp"):
        told = dict(bounded.attrs[2])  # type: ignore[call-overload]
    below, above, (least, most) = told.get("min"), told.get("max"), QUANTISED[dtype]
    if below is None or above is None or not least <= below <= above <= most:
        raise ChainError(
            f"x.to({dtype}): x may lie beyond what that holds; let it be what clamp gives, as in "
            f"x.clamp({least:g}, {most:g}).to(torch.{dtype}), or round of that"
        )
    return lookup("quantize")(x, 1.0, dtype)


def _moved(x: Expr, *args: Any, **kwargs: Any) -> Expr:
    """x.to(...), where x and what it is moved to are on one device."""
    named = (kwargs.get(word) for word in ("dtype", "device", "other"))
    told = [v for v in (*args, *named) if not (isinstance(v, bool | None) or is_device_of(x, v))]
    if len(told) > 1:
        raise ChainError(f"x.to: got {show_value(told[1])} too, wanted one type, and a device")
    x = cast(x, *told) if told else x
    return _contiguous(x, kwargs["memory_format"]) if kwargs.get("memory_format") else x


def _contiguous(x: Expr, memory_format: object = None) -> Expr:
    return x if (tracing := current()) is None else tracing.contiguous(x, memory_format)


def _copied(x: Expr, memory_format: object = None) -> Expr:
    """A value of its own, which may be changed in place."""
    found = copied(x)
    return found if memory_format is None else _contiguous(found, memory_format)


def _summed(x: Expr, *args: Any, dtype: Any = None, **kwargs: Any) -> Expr:
    """The sum, in a type if one is told, which integers may overflow."""
    found = lookup("sum")(x if dtype is None else cast(x, dtype), *args, **kwargs)
    is_narrow = dtype is not None and not isinstance(dtype, TypeOf) and "int" in str(dtype)
    return cast(found, dtype) if is_narrow else found


def _place(name: str) -> Callable[..., Expr]:
    """Where the largest or the smallest stands, among all where no axis is told."""

    def found(x: Expr, dim: int | None = None, keepdim: bool = False) -> Expr:
        if dim is None and not keepdim:
            x, dim = lookup("flatten")(x), 0
        return lookup(name)(x, dim, keepdim)

    return found


def _masked(x: Expr, mask: Expr, value: Any) -> Expr:
    """masked_fill, of which the value may be a condition's."""
    return lookup("masked_fill")(x, mask, int(value) if isinstance(value, bool) else value)


# What is told sizes, and works on them whatever they are.
OF_SIZES = ("reshape", "view", "split", "narrow", "expand")
SPELLED: Mapping[str, Callable[..., Any]] = {
    "max": _largest("max"),
    "min": _largest("min"),
    "chunk": chunk,
    "split": split,
    "narrow": narrowed,
    "expand": _expanded,
    "expand_as": _expanded_as,
    "broadcast_tensors": _broadcast,
    "gather": _gathered,
    "where": _chosen,
    "embedding": _embedded,
    "take_along_dim": lambda x, indices, dim: _gathered(x, dim, indices),
    "full_like": _filled,
    "zeros_like": partial(_filled, fill_value=0.0),
    "ones_like": partial(_filled, fill_value=1.0),
    "tensor_split": tensor_split,
    "unbind": unbound,
    "glu": _glu,
    **dict.fromkeys(("clamp", "clip"), _clamped),
    "clamp_min": lambda x, min: _clamped(x, min),
    "clamp_max": lambda x, max: _clamped(x, None, max),
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "norm": _norm,
    "linalg_norm": _vector_norm,
    "var": _spread("var"),
    "std": _spread("std"),
    "var_mean": _spread_and_mean("var"),
    "std_mean": _spread_and_mean("std"),
    "aminmax": _extremes,
    **dict.fromkeys(("logical_xor", "bitwise_xor"), _either),
    "any": _holding("any"),
    "all": _holding("all"),
    **dict.fromkeys(("reshape", "view"), _reshaped),
    **dict.fromkeys(("cat", "concat", "concatenate"), joined("cat")),
    "hstack": joined("hstack"),
    "stack": joined("stack"),
    "sum": _summed,
    **{name: _place(name) for name in ("argmax", "argmin")},
    "masked_fill": _masked,
    "ravel": lambda x: lookup("flatten")(x),
    **dict.fromkeys(("view_as", "reshape_as"), lambda x, other: _reshaped(x, shape_of(other))),
    **ASKED,
    **COMPOSED,
    "to": _moved,
    "type": cast,
    "bool": partial(cast, dtype="bool"),
    "logical_not": lambda x: ~x if x.kind == "truth" else ir.primitive("eq", x, 0.0),
    "contiguous": _contiguous,
    "clone": _copied,
    "cpu": lambda x, *_: _moved(x, "cpu"),
    **{name: partial(cast, dtype=dtype) for name, dtype in TYPES.items()},
}
