"""Expressions where code expects tensors: torch's functions and a tensor's methods are operations.

So that a function which was written for tensors, such as a module's forward, is traced as it is:
`torch.sigmoid(x)`, `F.layer_norm(x, (64,), weight)`, `x.mean(1)`, `x[:, None]`. torch asks an
argument that is no tensor of its own for `__torch_function__`; nothing here imports torch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from fusegen import ir
from fusegen.asked import ASKED, axes_of
from fusegen.assigning import assign, replacing
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.meeting import apart, beside, conditions_beside_integers
from fusegen.moving import looked_up, moved
from fusegen.ops import ALIASES, OPS, lookup, nearest
from fusegen.refused import refuse_products, refuse_truth
from fusegen.shaping import as_numbers, is_part, part_of, selected
from fusegen.sizes import says_last, shape_of, with_numbers
from fusegen.spellings import FILLED, OF_SIZES, RENAMED, SPELLED, cast
from fusegen.standing import current, given_out, is_assigned, is_given, known, note
from fusegen.unsaid import (
    FILLING,
    MOVING,
    PLACING,
    PRODUCTS,
    SEEING,
    UNKNOWN,
    current_call,
    device_of,
    is_type,
    leaves_joining,
    tells_all,
    type_of,
)

# What torch's functions may be told beside an operation's parameters, where it is not asked for.
_SWITCHES = ("inplace", "return_indices")
# What a tensor has of its own, and only a call tells.
_OWN: Mapping[str, Callable[[Expr], Any]] = {
    "dtype": type_of,
    "device": device_of,
    "shape": shape_of,
    "ndim": axes_of,
}
# Torch's own names for what Python calls otherwise, and the other way round.
_PYTHONS = {"__rdiv__": "__rtruediv__", "__div__": "__truediv__"}
_PYTHONS |= {"__iand__": "logical_and_", "__ior__": "logical_or_"}
_COMPARING = {"__eq__": "eq", "__ne__": "ne"}
# Norms over the last axis, if no shape is told.
_OVER_LAST = ("layer_norm", "rms_norm")
# What is told a type itself, and does not compute in it.
_CASTING = ("to", "type")
# What torch's functions call the value that they work on, in that order.
_FIRST = ("condition", "input", "self", "tensors", "x1")


def of_torch(
    cls: type, function: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """A function of torch's on arguments of which one is an expression: torch's protocol."""
    name = getattr(function, "__name__", str(function)).removeprefix("special_")
    name = _PYTHONS.get(name, name)
    return given_out(name, args, lambda: _of_torch(name, args, kwargs or {}), kwargs)


def _of_torch(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in _COMPARING:
        x, other = (known(value, f"x.{name}") for value in args)
        x, other = (x, other) if isinstance(x, Expr) else (other, x)
        return ir.primitive(_COMPARING[name], x, _number(other))
    if name in ("__getitem__", "__setitem__"):
        return getattr(Expr, name)(*(known(value, "x[...]") for value in args[:1]), *args[1:])
    if name.startswith("__") and callable(method := getattr(Expr, name, None)):
        return method(*[known(value, f"x.{name}") for value in args])
    if name == "linalg_vector_norm":  # and not linalg_norm, which is a matrix's where it is of two
        name = "vector_norm"
    return _called(f"torch's {name}", name, args, kwargs)


def attribute_of(x: Expr, name: str) -> Any:
    """What x has by this name, as a tensor would: a method that is an operation."""
    if name in (*_OWN, *ASKED):
        note(f"x.{name}")
    if name in _OWN:
        return _OWN[name](x)
    if name.startswith("_") or not (name in UNKNOWN or _is_operation(name)):
        is_own = name.startswith("_")
        if not is_own and hasattr(getattr(sys.modules.get("torch"), "Tensor", None), name):
            raise AttributeError(f"x.{name} is no operation of a chain; `fusegen ops` lists them")
        guess = None if is_own else nearest(name, [*OPS, *ALIASES])
        hint = f"; did you mean {guess!r}?" if guess else ""
        raise AttributeError(f"'Expr' object has no attribute {name!r}{hint}")
    if name in ("T", "mT", "data"):
        return given_out(name, (x,), lambda: _method(x, name, (), {}))
    if name in UNKNOWN and name not in (*MOVING, *PLACING) and not (name in SEEING and tells_all()):
        raise ChainError(f"x.{name}: {UNKNOWN[name]}")
    return lambda *args, **kwargs: given_out(
        name, (x, *args), lambda: _method(x, name, args, kwargs), kwargs
    )


def _method(x: Expr, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A tensor's method of this name, called."""
    x = known(x, f"x.{name}")
    if name == "data":
        return lookup("detach")(x)
    if name in (*MOVING, *PLACING):
        return moved(x, name, args, kwargs)
    if name in SEEING and tells_all():
        return _seen(x, name, args, kwargs)
    if name == "where":  # of a tensor's, the condition comes first of the arguments
        condition, other = (known(value, "x.where") for value in args)
        return lookup("where")(condition, x, other)
    return _called(f"x.{name}", name, (x, *args), kwargs)


def item_of(x: Expr, key: object) -> Expr:
    """x[key]: places along axes are selected, None is a new axis, and a whole slice stays."""
    return given_out("__getitem__", (x, key), lambda: _item_of(known(x, "x[...]"), key))


def _item_of(x: Expr, key: object) -> Expr:
    keys = tuple(
        known(k, "x[...]") if isinstance(k, Expr) or is_assigned(k) else k
        for k in (key if isinstance(key, tuple) else (key,))
    )
    call = current_call()
    if any(isinstance(k, Expr | list) for k in keys):
        return looked_up(x, keys)
    if call is not None and (is_part(index := as_numbers(keys)) or tells_all()):
        is_last = is_part(index) and leaves_joining()
        view = call.view(x, "__getitem__", index, is_last_resort=is_last)
        if view is not None:
            return view
    try:
        return _indexed(x, keys)
    except ChainError:
        if call is None or not is_part(index := as_numbers(keys)):
            raise
        view = call.view(x, "__getitem__", index, is_last_resort=True)
        if view is None:
            raise
        return view


def _indexed(x: Expr, keys: tuple[object, ...]) -> Expr:
    """x[keys] in steps of its own."""
    if sum(k is Ellipsis for k in keys) > 1:
        raise ChainError("x[..., ...]: an index has one Ellipsis at most")
    cut = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    # Behind the dots axes are counted from the end, and so the last is taken first.
    axis = -1
    for k in reversed(keys[cut + 1 :]):
        x, is_left = _item(x, k, axis)
        axis -= is_left
    axis = 0
    for k in keys[:cut]:
        x, is_left = _item(x, k, axis)
        axis += is_left
    return x


def _item(x: Expr, key: object, axis: int) -> tuple[Expr, bool]:
    """x indexed along one axis, and whether that is there behind it."""
    key = with_numbers(key)
    if key is None:
        return lookup("unsqueeze")(x, axis), True
    if isinstance(key, slice) and key.start is key.stop is key.step is None:
        return x, True
    if isinstance(key, int) and not isinstance(key, bool):
        return selected(x, axis, key), False
    if isinstance(key, slice):
        return part_of(x, axis, key), True
    raise ChainError(f"x[{key!r}]: an index is an integer, None, ... or a slice of equal parts")


def _is_operation(name: str) -> bool:
    plain = name.removesuffix("_")
    tables = (OPS, ALIASES, SPELLED, PLACING, FILLING)
    return any(n in table for n in (name, plain) for table in tables)


def _called(where: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation of this name, with arguments as torch has them."""
    if name in PRODUCTS:
        raise ChainError(f"{where}: {UNKNOWN[name]}")
    first, *_ = args or [kwargs.get("input")]
    first = first if isinstance(first, Expr) else known(first, where)
    args = apart([known(value, where) for value in args])
    kwargs = {word: known(value, where) for word, value in kwargs.items()}
    if name in (*MOVING, *PLACING) and args and isinstance(args[0], Expr):
        return moved(args[0], name, args[1:], kwargs)
    if name in UNKNOWN:
        raise ChainError(f"{where}: {UNKNOWN[name]}")
    if name in FILLING:
        assign(first, Ellipsis, next(iter((*args[1:], *kwargs.values())), 0.0))
        return known(first, where)
    name = name.lstrip("_")
    if name.endswith("_"):
        way = f"x = x.{name.rstrip('_')}(...)"
        return _overwriting(where, name.rstrip("_"), first, args, kwargs, way)
    if kwargs.pop("inplace", False):
        return _overwriting(where, name, first, args, kwargs)
    if kwargs.get("out") is not None:
        raise ChainError(f"{where}: got out=, but a chain's steps give new values; leave it out")
    if "condition" in kwargs or not args:
        args = [*(kwargs.pop(word) for word in [w for w in _FIRST if w in kwargs][:1]), *args]
    if not args:
        raise ChainError(f"{where}: the value that it works on is missing")
    x, *others = args
    if name not in OF_SIZES:
        others = [v if says_last(v) else with_numbers(v) for v in others]
        kwargs = {word: v if says_last(v) else with_numbers(v) for word, v in kwargs.items()}
    if name in _OVER_LAST:
        others = [None if says_last(value) else value for value in others]
        kwargs = {word: value for word, value in kwargs.items() if not says_last(value)}
    if name not in _CASTING and (types := [v for v in others if is_type(v)]):
        others = [v for v in others if not is_type(v)]
        kwargs = {**kwargs, "dtype": types[0]}
    typed = (*_CASTING, "sum", *(FILLED if kwargs.get("dtype") is not None else ()))
    if kwargs.get("dtype") is not None and name not in typed:
        x = cast(x, kwargs["dtype"])
        kwargs = {**kwargs, "dtype": None}
    if floats := [v for v in (*others, *kwargs.values()) if type(v) is float]:
        if name == "where":
            others = [beside(floats[0], value) for value in others]
        elif name not in (*typed, "embedding"):
            x = beside(floats[0], x)
    if name in SPELLED:
        told = {RENAMED.get(k, k): v for k, v in kwargs.items() if v is not None}
        return SPELLED[name](x, *others, **told)
    if name not in (*OPS, *ALIASES):
        raise ChainError(f"{where} is no operation of a chain; `fusegen ops` lists them")
    op = lookup(name)
    own = {p.name for p in op.parameters}
    if any(value is None for value in others):  # where torch has positions for what is left out
        named = zip((p.name for p in op.parameters), others, strict=False)
        kwargs, others = {**{n: v for n, v in named if v is not None}, **kwargs}, []
    renamed = {k if k in own else RENAMED.get(k, k): v for k, v in kwargs.items()}
    given = {k: v for k, v in renamed.items() if k in own}
    others_given = ((k, v) for k, v in renamed.items() if k not in own and v is not None)
    left = [k for k, v in others_given if not (k.startswith("_") or (k in _SWITCHES and not v))]
    if left:
        raise ChainError(f"{where}: a chain has no {left[0]}= there; it is {op.signature}")
    return op(x, *others, **given)


def _seen(x: Expr, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Expr:
    """x in another shape: of a tensor behind the first a view, which the call takes."""
    call = current_call()
    assert call is not None
    view = call.view(x, method, *as_numbers(args)) if not kwargs else None
    found: Expr = _called(f"x.{method}", method, (x, *args), kwargs) if view is None else view
    return found


def _overwriting(
    where: str,
    name: str,
    first: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    instead: str = "",
) -> Any:
    """The same with a new value, where it is the only one who has the old one."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, Expr) or is_given(first):
        changes = f"changes x in place, but a chain's steps give new values; write {instead}"
        wants = "inplace=True would change what the chain is given; leave it out, or give "
        raise ChainError(
            f"{where} {changes}" if instead else f"{where}: {wants}the module inplace=False"
        )
    way = f"write {instead}" if instead else "leave it out, or give the module inplace=False"
    what = where if instead else f"{where}: inplace=True"
    others = [*args[1:], *kwargs.values()]
    return replacing(what, way, first, others, lambda: _called(where, name, args, kwargs))


# What torch makes of conditions alone by an operator.
_OF_CONDITIONS = {"mul": "logical_and", "add": "logical_or"}


def _are_conditions(*values: Expr) -> bool:
    """Whether the call says that of all."""
    call = current_call()
    if call is None or not tells_all():
        return False
    return all(str(call.of(value).dtype) == "torch.bool" for value in values)


def _with_tensors(op: str, method: Callable[[Expr, Any], Expr]) -> Callable[[Expr, Any], Expr]:
    def computed(x: Expr, other: Any) -> Expr:
        x, other = apart([known(x, op), known(with_numbers(other), op)])
        if type(other) is float:
            x = beside(other, x)
        if op in ("mul", "add", "sub") and isinstance(other, Expr):
            x, other = conditions_beside_integers(x, other)
        if op in _OF_CONDITIONS and isinstance(other, Expr) and _are_conditions(x, other):
            return ir.primitive(_OF_CONDITIONS[op], x, other)
        return method(x, other)

    def found(x: Expr, other: Any) -> Expr:
        if current() is None:
            return method(x, other)
        return given_out(op, (x, other), lambda: computed(x, other))

    return found


def _alone(op: str, method: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    return lambda x: given_out(op, (x,), lambda: method(known(x, op)))


def _assigning(sign: str, method: Callable[[Expr, Any], Expr]) -> Callable[[Expr, Any], Expr]:
    """x += y and the like: a new value by x's name, and no other's."""

    def computed(x: Expr, other: Any) -> Expr:
        where, way = f"x {sign}= y", f"write x = x {sign} y"
        if is_given(x):
            changed = f"{where}: what the function is given is left as it is, but torch changes it"
            warnings.warn(f"{changed}; {way}", stacklevel=6)
        return replacing(where, way, x, (other,), lambda: method(x, other))

    def found(x: Expr, other: Any) -> Expr:
        if current() is None or not _is_outside():
            return method(x, other)
        return given_out(sign, (x, other), lambda: computed(x, other))

    return found


def _compared(op: str) -> Callable[[Expr, object], Any]:
    """Whether x equals something is a condition. For all but a traced function, two expressions are
    equal if they are one object, as tables of them need it.
    """

    def computed(x: Expr, other: object) -> Any:
        return ir.primitive(op, known(x, op), _number(known(other, op)))

    def found(x: Expr, other: object) -> Any:
        if isinstance(other, Expr):
            if current() is None or not _is_outside():
                return NotImplemented
            return given_out(op, (x, other), lambda: computed(x, other))
        if not isinstance(other := with_numbers(other), Real):
            return NotImplemented
        return given_out(op, (x,), lambda: computed(x, other))

    return found


def _number(value: Any) -> Any:
    """A number as a primitive takes it, True as 1; all else as it is."""
    return float(value) if isinstance(value, Real) else value


def _is_outside() -> bool:
    """Whether who asks, behind a method of this module, is none of fusegen's own."""
    asking: str = sys._getframe(2).f_globals.get("__name__", "")
    return asking.split(".")[0] != "fusegen"


def be_like_tensors() -> None:
    """Let expressions have what is here."""
    for word in ("add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge", "and", "or"):
        for name in (f"__{word}__", f"__r{word}__"):
            if (method := vars(Expr).get(name)) is not None:
                setattr(Expr, name, _with_tensors(word, method))
    signs = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "and": "&", "or": "|"}
    for word, sign in signs.items():
        setattr(Expr, f"__i{word}__", _assigning(sign, getattr(Expr, f"__{word}__")))
    for word, op in (("mod", "remainder"), ("floordiv", "floor_divide")):
        setattr(Expr, f"__{word}__", _with_tensors(word, lookup(op)))
    for name in ("__neg__", "__abs__", "__invert__"):
        setattr(Expr, name, _alone(name.strip("_"), getattr(Expr, name)))
    for name, function in {
        "__pos__": lambda x: x,
        "__torch_function__": classmethod(of_torch),
        "__getattr__": attribute_of,
        "__getitem__": item_of,
        "__iter__": lambda x: iter(x.unbind()),
        "__bool__": refuse_truth,
        "__setitem__": assign,
        "__xor__": SPELLED["logical_xor"],
        "__rxor__": SPELLED["logical_xor"],
        "__len__": lambda x: int(shape_of(x)[0]),
        "__matmul__": refuse_products,
        "__rmatmul__": refuse_products,
        "__eq__": _compared("eq"),
        "__ne__": _compared("ne"),
    }.items():
        setattr(Expr, name, function)
