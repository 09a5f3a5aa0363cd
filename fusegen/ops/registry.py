"""`op`, the decorator that makes an operation of a function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, overload

from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops.chain import RESERVED
from fusegen.ops.definition import ALIASES, OPS, Op
from fusegen.ops.schema import Attribute, show_value
from fusegen.ops.step import STRUCTURAL, Shaping, Windowing


@overload
def op(function: Callable[..., Expr]) -> Op: ...
@overload
def op(
    *,
    reference: str | Callable[..., Any] | None = None,
    samples: Iterable[tuple[Attribute, ...]] = ((),),
    ulp: int | None = None,
    aliases: Iterable[str] = (),
    window_axes: int = 0,
    windowing: Windowing | None = None,
    same_dtype: bool = False,
    keeps_dtype: bool = False,
    exact_bounds: bool = False,
    shaping: Shaping = "same",
    groups: str = "",
    training: str = "",
    statistics: Callable[[Expr], tuple[Expr, Expr]] | None = None,
    equal: str = "",
    channel_axes: int = 0,
    check: Callable[..., str | None] | None = None,
    draws: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., Expr]], Op]: ...
def op(
    function: Callable[..., Expr] | None = None,
    *,
    reference: str | Callable[..., Any] | None = None,
    samples: Iterable[tuple[Attribute, ...]] = ((),),
    ulp: int | None = None,
    aliases: Iterable[str] = (),
    window_axes: int = 0,
    windowing: Windowing | None = None,
    same_dtype: bool = False,
    keeps_dtype: bool = False,
    exact_bounds: bool = False,
    shaping: Shaping = "same",
    groups: str = "",
    training: str = "",
    statistics: Callable[[Expr], tuple[Expr, Expr]] | None = None,
    equal: str = "",
    channel_axes: int = 0,
    check: Callable[..., str | None] | None = None,
    draws: Callable[..., bool] | None = None,
) -> Op | Callable[[Callable[..., Expr]], Op]:
    """Register a function of expressions as an operation under its own name.

    Its first parameter is the value it works on. After it, a parameter annotated Expr, Channel,
    Trailing, Mask or Labels is a tensor operand (optional where `= None`), one annotated Typed an
    operand of whose element type the body is told the name, one annotated float, int, bool or
    Literal an attribute, and `Expr | float` takes both. The arguments are Op's fields.
    Defining a function of the same name again replaces the op.
    """

    def decorate(function: Callable[..., Expr]) -> Op:
        name = getattr(function, "__name__", None)
        if name is None or not callable(function):
            raise ChainError(f"an operation is a function with a name, got {show_value(function)}")
        if not (reference is None or isinstance(reference, str) or callable(reference)):
            raise ChainError(
                f"{name}: reference is the dotted name of a function of torch's or a callable, got "
                f"{show_value(reference)}"
            )
        return register(
            Op(
                name=name,
                function=function,
                doc=inspect.getdoc(function) or "",
                reference=reference,
                samples=tuple(samples),
                ulp=ulp,
                aliases=tuple(aliases),
                window_axes=window_axes,
                windowing=windowing,
                same_dtype=same_dtype,
                keeps_dtype=keeps_dtype,
                exact_bounds=exact_bounds,
                shaping=shaping,
                groups=groups,
                training=training,
                statistics=statistics,
                equal=equal,
                channel_axes=channel_axes,
                check=check,
                draws=draws,
            )
        )

    return decorate(function) if function is not None else decorate


def register(new: Op) -> Op:
    """Put an op into OPS."""
    if not new.is_builtin:
        _ = new.parameters  # a mistake in them is told here; fusegen's own are read when used
    for name in (new.name, *new.aliases):
        is_taken = name in vars(sys.modules["fusegen"]) and not new.is_builtin
        if (
            is_taken
            or name in (*STRUCTURAL, *RESERVED)
            or not name.isidentifier()
            or not name.isascii()
        ):
            raise ChainError(f"an operation cannot be called {name!r}; choose another name")
        holder = OPS.get(ALIASES.get(name, name))
        if holder is not None and (holder.is_builtin or holder.name != new.name):
            raise ChainError(
                f"{name!r} is already an operation of fusegen's own or another's alias; "
                f"give your function another name"
            )
    for alias in [a for a, target in ALIASES.items() if target == new.name]:
        del ALIASES[alias]
    OPS[new.name] = new
    ALIASES.update(dict.fromkeys(new.aliases, new.name))
    return new
