"""What an op's Python signature says: its parameters, what each accepts, what arguments fill."""

from __future__ import annotations

import difflib
import inspect
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fusegen.arity import Kind
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops.eager import is_torchs

Role = Literal["operand", "attribute", "either"]
Placement = Literal[
    "broadcast", "channel", "trailing", "slope", "mask", "labels", "type", "noise", "channel_noise"
]
Attribute = float | int | str | tuple[int | None, ...] | None

# Annotations of operands. Plain Expr is any tensor that broadcasts; these say how it lies, Mask
# that it holds conditions, Labels that it holds the numbers of classes, and Typed that nothing
# counts but its element type.
Channel = Annotated[Expr, "channel"]
Trailing = Annotated[Expr, "trailing"]
Slope = Annotated[Expr, "slope"]
Mask = Annotated[Expr, "mask"]
Labels = Annotated[Expr, "labels"]
Typed = Annotated[Expr, "type"]
# What a call draws itself: uniform in [0, 1), for every element or for every channel of a sample.
Noise = Annotated[Expr, "noise"]
ChannelNoise = Annotated[Expr, "channel_noise"]

# What a signature calls an operand of each placement.
_SPELLED: Mapping[Placement, str] = {
    "broadcast": "Expr",
    "channel": "Channel",
    "trailing": "Trailing",
    "slope": "Slope",
    "mask": "Mask",
    "labels": "Labels",
    "type": "Typed",
    "noise": "Noise",
    "channel_noise": "ChannelNoise",
}
# Names that an annotation written as a string may use wherever the function stands.
_KNOWN_NAMES = {name: globals()[name] for name in (*_SPELLED.values(), "Literal")}
_PLACEMENTS: Mapping[object, Placement] = {_KNOWN_NAMES[n]: p for p, n in _SPELLED.items()}
_HELD: Mapping[Placement, Kind] = {"mask": "truth", "labels": "index"}


class BadArgument(ChainError):
    """An argument that an op does not accept: its position or the parameter it is for."""

    def __init__(self, message: str, argument: int | str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class BadStep(ChainError):
    """A step that does not fit the ones before it: its position in the chain."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Parameter:
    """One parameter of an op, after x.

    An operand is a tensor named in the chain, an attribute a constant of it, and either takes both.
    placement says where an operand's values lie: "channel", one for each index of the op's `axis`;
    "trailing", along the axes that the op normalises; "slope", one, or one for each index of axis
    1; "broadcast", as torch broadcasts; "mask", the same, of a bool tensor's conditions; "labels",
    one for each index of all axes but that of the classes; "type", anywhere, as no value of it is
    read. "noise" and "channel_noise" are drawn by each call, one for each element, or channel of a
    sample.
    """

    name: str
    role: Role
    placement: Placement
    accepts: tuple[
        object, ...
    ]  # the alternatives for a constant: float, int, bool, None, a Literal ...
    default: Attribute
    required: bool
    keyword_only: bool

    @property
    def takes_tensor(self) -> bool:
        """Whether the name of a tensor fits."""
        return self.role != "attribute"

    @property
    def broadcasts(self) -> bool:
        """Whether its shape may be any that broadcasts, and so may widen the running value."""
        return self.placement in ("broadcast", "mask")

    @property
    def kind(self) -> Kind:
        """What a tensor in its place holds: conditions, places, or numbers."""
        return _HELD.get(self.placement, "number")

    @property
    def is_type(self) -> bool:
        """Whether it is an element type, which a tensor is named for."""
        return self.placement == "type"

    @property
    def is_drawn(self) -> bool:
        """Whether a call draws it, and is not given it."""
        return self.placement in ("noise", "channel_noise")

    @property
    def takes_constant(self) -> bool:
        """Whether a number or another constant fits."""
        return self.role != "operand"

    @property
    def signature(self) -> str:
        """The parameter as `fusegen ops` shows it: `negative_slope: float = 0.01`."""
        spelled = _SPELLED[self.placement].removeprefix("Channel" * self.is_drawn)
        kinds = [spelled] if self.takes_tensor else []
        kinds += [_type_name(a) for a in self.accepts]
        if self.role == "operand" and not self.required:
            kinds.append("None")
        default = "" if self.required else f" = {spell(self.default)}"
        return f"{self.name}: {' | '.join(kinds)}{default}"


def signature_text(op_name: str, parameters: Sequence[Parameter]) -> str:
    """The op as `fusegen ops` lists it: `leaky_relu(negative_slope: float = 0.01)`."""
    positional = [p.signature for p in parameters if not p.keyword_only]
    by_keyword = [p.signature for p in parameters if p.keyword_only]
    return f"{op_name}({', '.join(positional + ['*'] * bool(by_keyword) + by_keyword)})"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that word was probably meant to be, if any comes close."""
    close = difflib.get_close_matches(word.lower(), list(candidates), n=1, cutoff=0.7)
    return close[0] if close else None


# Attribute values.


def spell(value: Attribute) -> str:
    """An attribute in a chain's text: the shortest that reads back as the same value."""
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})"
    if not isinstance(value, float):
        return repr(value)
    text = repr(value)
    # -0.0 stays as it is: -0 would read back as the integer 0.
    return text.removesuffix(".0") if value != 0 or text == "0.0" else text


def integers(value: Attribute) -> tuple[int, ...]:
    """An integer, or a tuple of integers, as a tuple."""
    numbers = value if isinstance(value, tuple) else (value,)
    found = tuple(n for n in numbers if isinstance(n, int))
    assert len(found) == len(numbers)
    return found


def canonical(where: str, parameter: Parameter, value: object) -> Attribute:
    """The value as the parameter holds it (2 as 2.0 for a float), or BadArgument."""
    for kind in parameter.accepts:
        accepted, found = _accept(kind, value)
        if accepted:
            return found
    wanted = " or ".join(_describe(kind) for kind in parameter.accepts)
    raise BadArgument(
        f"{where}: {parameter.name} wants {wanted}, got {show_value(value)}", parameter.name
    )


def _accept(kind: object, value: object) -> tuple[bool, Attribute]:
    is_bool = isinstance(value, bool)
    if kind is None:
        return value is None, None
    if kind is bool and isinstance(value, bool):
        return True, value
    if kind is int and isinstance(value, Integral) and not is_bool:
        return True, int(value)
    if kind is float and isinstance(value, Real) and not is_bool:
        try:
            number = float(value)
        except OverflowError:
            return False, None
        return not math.isnan(number), number
    if get_origin(kind) is tuple and isinstance(value, tuple | list):
        lacks = [None] if _may_lack(kind) else []
        fits = all(
            v in lacks or (isinstance(v, Integral) and not isinstance(v, bool)) for v in value
        )
        numbers = tuple(v if v is None else int(v) for v in value) if fits else None
        return fits and len(value) > 0, numbers
    if get_origin(kind) is Literal:
        word = word_of(value)
        return word in get_args(kind), word
    return False, None


def word_of(value: object) -> str | None:
    """A word as it is; of torch's element types, which have no literals, the name."""
    if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str) else None


def _describe(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(v) for v in get_args(kind))
    if get_origin(kind) is tuple:
        return "a tuple of integers or None" if _may_lack(kind) else "a tuple of integers"
    return {float: "a number", int: "an integer", bool: "True or False", None: "None"}[kind]  # type: ignore[index]


def _type_name(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(repr(v) for v in get_args(kind))
    if get_origin(kind) is tuple:
        return "tuple[int | None, ...]" if _may_lack(kind) else "tuple[int, ...]"
    return "None" if kind is None else str(getattr(kind, "__name__", kind))


def show_value(value: object) -> str:
    """A value for a message: itself where it is short, its type where it is not."""
    if value is None or isinstance(value, bool | int | float | str | tuple | list | Expr):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    name = str(value)
    return name if name.startswith("torch.") else f"a {type(value).__name__}"  # one of its types


# From a Python signature to parameters.


def annotations_of(function: Callable[..., Any]) -> dict[str, object]:
    """The function's annotations, with those written as strings evaluated."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isfunction(function):
        function = getattr(function, "__func__", type(function).__call__)
    names = {**_KNOWN_NAMES, **getattr(function, "__globals__", {})}
    if inspect.isfunction(function):
        names.update(inspect.getclosurevars(function).nonlocals)
    try:
        return get_type_hints(function, None, names, include_extras=True)
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise ChainError(f"{function.__name__}: cannot read its annotations: {error}") from error


def alternatives(annotation: object) -> tuple[Placement | None, tuple[object, ...]]:
    """An annotation as (the placement of a tensor, or None; the kinds of constants besides)."""
    members = (
        get_args(annotation)
        if get_origin(annotation) in (Union, types.UnionType)
        else (annotation,)
    )
    placement: Placement | None = None
    constants: list[object] = []
    for member in members:
        if member in _PLACEMENTS or is_torchs(member):
            placement = _PLACEMENTS.get(member, "broadcast")
        elif member in (None, type(None)):
            constants.append(None)
        elif _is_constant(member):
            constants.append(member)
        else:
            raise ValueError(member)
    return placement, tuple(constants)


def _is_constant(kind: object) -> bool:
    if get_origin(kind) is Literal:
        return all(isinstance(v, str) for v in get_args(kind))
    return kind in (float, int, bool) or get_args(kind) in ((int, ...), (int | None, ...))


def _may_lack(kind: object) -> bool:
    """Whether a tuple's places may be None instead of an integer."""
    return get_args(kind) == (int | None, ...)


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters after x that a function's signature declares."""
    name = function.__name__
    try:
        declared = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ChainError(f"{name}: an operation is a function of expressions: {error}") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not declared or declared[0].kind not in positional:
        raise ChainError(f"{name}: the first parameter of an op is the value it works on")
    hints = annotations_of(function)
    return tuple(_parameter(name, p, hints.get(p.name)) for p in declared[1:])


def _parameter(op_name: str, declared: inspect.Parameter, annotation: object) -> Parameter:
    where = f"{op_name}: parameter {declared.name!r}"
    if declared.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise ChainError(f"{where}: an op lists its parameters one by one, without * or **")
    required = declared.default is inspect.Parameter.empty
    if annotation is None:  # not annotated: a constant where its default is one, else a tensor
        annotation = Expr if required or declared.default is None else type(declared.default)
    try:
        placement, constants = alternatives(annotation)
    except (ValueError, TypeError):
        raise ChainError(
            f"{where}: cannot tell what {annotation!r} takes; use Expr, Channel, Trailing or "
            f"Mask for a tensor; float, int, bool, Literal['a', 'b'] or tuple[int, ...] for a "
            f"constant"
        ) from None
    if placement is None:
        role: Role = "attribute"
    else:
        constants = tuple(c for c in constants if c is not None)
        role = "either" if constants else "operand"
    parameter = Parameter(
        declared.name,
        role,
        placement or "broadcast",
        constants,
        None,
        required,
        declared.kind is inspect.Parameter.KEYWORD_ONLY,
    )
    if required or (placement and declared.default is None):
        return parameter
    if role == "operand":
        raise ChainError(f"{where}: a tensor's default can only be None")
    default = canonical(f"{op_name}: the default", parameter, declared.default)
    return Parameter(**{**vars(parameter), "default": default})
