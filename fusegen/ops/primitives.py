"""The scalar primitives of the expression graph as operations: one row each.

As a step, the running value is the first argument; on expressions, they take expressions and
numbers in any place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fusegen.arity import ARITY, COMPARISONS
from fusegen.errors import ChainError
from fusegen.ir import Expr, Number, primitive
from fusegen.ops.definition import Op
from fusegen.ops.eager import function_of
from fusegen.ops.registry import register
from fusegen.ops.schema import Attribute, Parameter


def _as_tensor(x: Any, other: Any) -> Any:
    return other if hasattr(other, "dtype") else x.new_full((), other)


def _tensor(name: str) -> Parameter:
    return Parameter(name, "either", "broadcast", (float,), None, required=True, keyword_only=False)


def _mask(name: str) -> Parameter:
    return Parameter(name, "operand", "mask", (), None, required=True, keyword_only=False)


_OTHER = (_tensor("other"),)
_WITH_NUMBER: tuple[tuple[Attribute, ...], ...] = ((), (0.75,))

# name: (docstring, parameters after the first, reference, ulp, samples)
_ROWS: dict[
    str,
    tuple[
        str,
        tuple[Parameter, ...],
        str | Callable[..., Any],
        int | None,
        tuple[tuple[Attribute, ...], ...],
    ],
] = {
    "add": ("x + other, a number or a tensor.", _OTHER, "torch.add", 0, _WITH_NUMBER),
    "sub": ("x - other, a number or a tensor.", _OTHER, "torch.sub", 0, _WITH_NUMBER),
    "mul": ("x * other, a number or a tensor.", _OTHER, "torch.mul", 0, _WITH_NUMBER),
    # By a number, torch multiplies with the reciprocal on some devices.
    "div": ("x / other, a number or a tensor.", _OTHER, "torch.div", 1, _WITH_NUMBER),
    "neg": ("-x.", (), "torch.neg", 0, ((),)),
    "abs": ("The absolute value; gradient 0 at 0.", (), "torch.abs", 0, ((),)),
    "exp": ("e to the power x.", (), "torch.exp", 2, ((),)),
    "expm1": ("exp(x) - 1, exact near 0.", (), "torch.expm1", 2, ((),)),
    "log": ("The natural logarithm.", (), "torch.log", 2, ((),)),
    "log1p": ("log(1 + x), exact near 0.", (), "torch.log1p", 2, ((),)),
    "sqrt": ("The square root.", (), "torch.sqrt", 0, ((),)),
    "rsqrt": ("1 / sqrt(x).", (), "torch.rsqrt", 2, ((),)),
    "erf": ("The error function.", (), "torch.erf", 2, ((),)),
    "erfc": ("1 - erf(x), which keeps its digits on the right.", (), "torch.erfc", 4, ((),)),
    "tanh": ("The hyperbolic tangent.", (), "torch.tanh", 2, ((),)),
    "sigmoid": ("1 / (1 + exp(-x)).", (), "torch.sigmoid", 2, ((),)),
    "sin": ("The sine.", (), "torch.sin", 2, ((),)),
    "cos": ("The cosine.", (), "torch.cos", 2, ((),)),
    "sign": (
        "-1, 0 or 1; 0 for NaN, as in torch; gradient 0.",
        (),
        "torch.sign",
        0,
        ((),),
    ),
    "floor": ("The integer at or below x; gradient 0.", (), "torch.floor", 0, ((),)),
    "ceil": ("The integer at or above x; gradient 0.", (), "torch.ceil", 0, ((),)),
    "round": (
        "The nearest integer, halves to the even one; gradient 0.",
        (),
        "torch.round",
        0,
        ((),),
    ),
    "trunc": ("The integer part; gradient 0.", (), "torch.trunc", 0, ((),)),
    "detach": ("x, of which no gradient goes on.", (), "torch.Tensor.detach", 0, ((),)),
    "exp2": ("2 to the power x.", (), "torch.exp2", 2, ((),)),
    "log2": ("The logarithm to base 2.", (), "torch.log2", 2, ((),)),
    "log10": ("The logarithm to base 10.", (), "torch.log10", 2, ((),)),
    "tan": ("The tangent.", (), "torch.tan", 4, ((),)),
    "asin": ("The angle whose sine is x.", (), "torch.asin", 4, ((),)),
    "acos": ("The angle whose cosine is x.", (), "torch.acos", 4, ((),)),
    "atan": ("The angle whose tangent is x.", (), "torch.atan", 4, ((),)),
    "sinh": ("The hyperbolic sine.", (), "torch.sinh", 4, ((),)),
    "cosh": ("The hyperbolic cosine.", (), "torch.cosh", 4, ((),)),
    "asinh": ("The inverse of sinh.", (), "torch.asinh", 4, ((),)),
    "acosh": ("The inverse of cosh, of x >= 1.", (), "torch.acosh", 4, ((),)),
    "atanh": ("The inverse of tanh.", (), "torch.atanh", 4, ((),)),
    "pow": (
        "x to the power of exponent, a number or a tensor.",
        (_tensor("exponent"),),
        "torch.pow",
        2,
        ((2.0,), (3.0,)),
    ),
    "fmod": (
        "What is left of x by other, a number or a tensor; it has x's sign.",
        _OTHER,
        "torch.fmod",
        0,
        _WITH_NUMBER,
    ),
    "atan2": (
        "The angle of the point (other, x), from -pi to pi.",
        _OTHER,
        lambda x, other: x.atan2(_as_tensor(x, other)),
        4,
        _WITH_NUMBER,
    ),
    "minimum": (
        "The smaller of x and other; NaN if either is; a tie splits the gradient.",
        _OTHER,
        lambda x, other: x.minimum(_as_tensor(x, other)),
        0,
        _WITH_NUMBER,
    ),
    "maximum": (
        "The larger of x and other; NaN if either is; a tie splits the gradient.",
        _OTHER,
        lambda x, other: x.maximum(_as_tensor(x, other)),
        0,
        _WITH_NUMBER,
    ),
    "where": (
        "input where the running value is true, other elsewhere.",
        (_tensor("input"), _tensor("other")),
        lambda x, input, other: function_of("torch.where")(x, input, other),
        0,
        ((), (1.0,)),
    ),
    "lt": ("Whether x < other.", _OTHER, "torch.lt", 0, _WITH_NUMBER),
    "le": ("Whether x <= other.", _OTHER, "torch.le", 0, _WITH_NUMBER),
    "gt": ("Whether x > other.", _OTHER, "torch.gt", 0, _WITH_NUMBER),
    "ge": ("Whether x >= other.", _OTHER, "torch.ge", 0, _WITH_NUMBER),
    "eq": ("Whether x == other.", _OTHER, "torch.eq", 0, _WITH_NUMBER),
    "ne": ("Whether x != other.", _OTHER, "torch.ne", 0, _WITH_NUMBER),
    "logical_and": (
        "Whether the running value and other are both true.",
        (_mask("other"),),
        "torch.logical_and",
        0,
        ((),),
    ),
    "logical_or": (
        "Whether the running value or other is true.",
        (_mask("other"),),
        "torch.logical_or",
        0,
        ((),),
    ),
    "logical_not": ("Whether the running value is false.", (), "torch.logical_not", 0, ((),)),
}

# torch's other names for the same.
_ALIASES: dict[str, tuple[str, ...]] = {
    "sub": ("subtract",),
    "mul": ("multiply",),
    "div": ("divide", "true_divide"),
    "neg": ("negative",),
    "abs": ("absolute",),
    **{f"a{name}": (f"arc{name}",) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "atan2": ("arctan2",),
    "lt": ("less",),
    "le": ("less_equal",),
    "gt": ("greater",),
    "ge": ("greater_equal",),
    "ne": ("not_equal",),
    "sign": ("sgn",),
    "trunc": ("fix",),
    "sigmoid": ("expit",),
}


def _apply(name: str, x: Expr | Number, *args: Expr | Number, **kwargs: Expr | Number) -> Expr:
    by_keyword = [kwargs.pop(p.name) for p in _ROWS[name][1][len(args) :] if p.name in kwargs]
    operands = (x, *args, *by_keyword)
    if kwargs or len(operands) != ARITY[name]:
        raise ChainError(f"{name} takes {ARITY[name]} expressions or numbers, got {len(operands)}")
    for operand in operands:
        if not isinstance(operand, Expr | float | int):
            raise ChainError(f"{name}: got {operand!r} among expressions, wanted one or a number")
    return primitive(name, *map(_number, operands) if name in COMPARISONS else operands)


def _number(operand: Expr | Number) -> Expr | Number:
    """What is compared: of a condition 1 or 0, as torch has it."""
    is_condition = isinstance(operand, Expr) and operand.kind == "truth"
    return primitive("where", operand, 1.0, 0.0) if is_condition else operand


def _register(name: str) -> Op:
    doc, parameters, reference, ulp, samples = _ROWS[name]
    function = partial(_apply, name)
    function.__module__ = __name__
    return register(
        Op(
            name=name,
            function=function,
            declared=parameters,
            doc=doc,
            aliases=_ALIASES.get(name, ()),
            reference=reference,
            samples=samples,
            ulp=ulp,
            is_primitive=True,
            equal=f"torch.{name}",
        )
    )


for _name in _ROWS:
    _register(_name)
