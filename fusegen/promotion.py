"""Promotion: the element type that torch gives a step's result.

Of a step's tensors those with axes decide; one without axes has a say only where none has some, and
a number none. The rules are applied to the expressions of the step's body, so an operation needs no
word about types: a comparison gives bool, a choice the type of what it chooses among, a cast its
own. Integers are read as numbers of a floating type, and nothing is computed in their own.
"""

from __future__ import annotations

import functools
import math
import struct
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from fusegen import ir
from fusegen.errors import ArgumentError, ChainError, UnsupportedError
from fusegen.ir import Expr
from fusegen.ops import Chain, Step
from fusegen.target import EPSILON

FLOATING = tuple(ir.CASTS.values())
QUANTISED = tuple(ir.QUANTISING_CASTS.values())
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
WHOLE = "int64"  # the type of labels, and of places along an axis, as in torch
Shape = tuple[int, ...]

_WIDTH = {"bool": 0, "float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
_DEFAULT = "float32"
_EXACT = 2.0**24  # below it, every integer is a number of the default type
# The numbers with which a type's values are compared; torch wraps what is out of its range.
_RANGES: Mapping[str | None, tuple[float, float]] = {
    **dict.fromkeys(("int32", "int64"), (1.0 - _EXACT, _EXACT - 1.0)),
    "int16": (-(2.0**15), 2.0**15 - 1.0),
    "int8": (-128.0, 127.0),
    "uint8": (0.0, 255.0),
}


class Kind(NamedTuple):
    """An element type, and whether a tensor of it has axes; a number written in a chain has no
    type.
    """

    dtype: str | None
    has_axes: bool


_NUMBER = Kind(None, False)


def promote(a: str, b: str) -> str:
    """The element type that torch promotes two floating types, or one and bool, to."""
    if a == b:
        return a
    if _WIDTH[a] == _WIDTH[b]:
        return "float32"
    return max(a, b, key=_WIDTH.__getitem__)


def type_of(root: Expr, leaves: Mapping[Expr, Kind]) -> str:
    """The type of an expression over tensors of these kinds.

    Raises ArgumentError for a difference of bools, which torch refuses.
    """
    if _meets_part(root, leaves):
        return _DEFAULT
    kinds = dict(leaves)
    for node in ir.topological([root]):
        if node not in kinds:
            kinds[node] = _kind(node, [kinds[a] for a in node.args])
    return kinds[root].dtype or _DEFAULT


def _kind(node: Expr, args: list[Kind]) -> Kind:
    has_axes = any(a.has_axes for a in args)
    if node.op == "detach" or (node.op == "reduce" and node.attrs[0] == "pick"):
        return args[0]
    if node.op == "reduce":
        _promoted(args)  # not of integers alone
        return Kind(WHOLE, has_axes) if node.kind == "index" else args[0]
    if not args:
        return _NUMBER
    cast = ir.CASTS.get(node.op) or ir.QUANTISING_CASTS.get(node.op)
    if cast:
        return Kind(cast, has_axes)
    if node.op in ir.COMPARISONS or node.op in ir.CONNECTIVES:
        _refuse_inexact(node, args)
        return Kind("bool", has_axes)
    if node.op == "div" and any(a.dtype in INTEGERS for a in args) and not _floating(args):
        return Kind(_DEFAULT, has_axes)
    if node.op == "sub" and any(a.dtype == "bool" for a in args):
        raise ArgumentError(
            "torch refuses a difference with a tensor of bool; use logical_not on it, or convert "
            "it first, for example mask.float()"
        )
    if node.op == "where" and node.args[1] is node.args[2]:
        return Kind(args[1].dtype, has_axes)
    return Kind(_promoted(args[1:] if node.op == "where" else args), has_axes)


def _meets_part(root: Expr, leaves: Mapping[Expr, Kind]) -> bool:
    """Whether integers alone meet a number that is none, such as 0.5, and nothing else happens."""
    found = [leaves[a].dtype in INTEGERS for a in root.args if a in leaves]
    numbers = [n for a in root.args if (n := ir.constant(a)) is not None]
    is_one = found == [True] and root.op in ("add", "sub", "mul", "pow")
    return is_one and any(n % 1 != 0 for n in numbers)


def _floating(args: Iterable[Kind]) -> list[Kind]:
    return [a for a in args if a.dtype in FLOATING]


def _refuse_inexact(node: Expr, args: Sequence[Kind]) -> None:
    """Raise ArgumentError where integers are compared with a number that no float may be."""
    found = [a.dtype in INTEGERS for a in args]
    is_of_labels = any(a.kind == "index" for a in node.args)
    if is_of_labels or _floating(args) or not any(found) or all(found):
        return
    numbers = [ir.constant(a) for a, kind in zip(node.args, args, strict=True) if not kind.dtype]
    least, most = min(_RANGES[a.dtype] for a in args if a.dtype in INTEGERS)
    if len(numbers) != 1 or numbers[0] is None or not least <= numbers[0] <= most:
        raise ArgumentError(
            "integers are compared with tensors, or with a number that their type has, below "
            "2**24; convert them first, for example ids.float(), or pass the condition"
        )


def _promoted(args: Sequence[Kind]) -> str | None:
    """Floating beats integers and bool, then axes beat none, then the wider wins."""
    found: str | None = None
    floating = _floating(args)
    if not floating and any(a.dtype in INTEGERS for a in args):
        raise ArgumentError(
            "nothing is computed of integers alone, but for a quotient, a comparison, a cast, and "
            "x * 0.5 or the like; convert them first, as mask.float() or in text to('float32')"
        )
    for group in (floating, list(args)):
        for has_axes in (True, False):
            for kind in group:
                if kind.dtype is not None and kind.has_axes == has_axes:
                    found = kind.dtype if found is None else promote(found, kind.dtype)
            if found is not None:
                # A number beside bools alone makes them numbers of the default type.
                is_mixed = found == "bool" and any(a.dtype is None for a in args)
                return _DEFAULT if is_mixed else found
    return None


def check_element_type(name: str, dtype: str) -> None:
    """Raise ArgumentError for a tensor of a type that no kernel reads."""
    if dtype not in (*FLOATING, *INTEGERS, "bool"):
        raise ArgumentError(
            f"argument {name!r}: got a tensor of {dtype}, wanted one of {', '.join(FLOATING)}, of "
            f"bool for conditions, or of integers; convert it first, for example {name}.float()"
        )


def check_mask(step: Step, name: str, dtype: str) -> None:
    """Raise ArgumentError where conditions are wanted and something else is given."""
    if dtype != "bool":
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {dtype}, wanted bool: it says where a condition "
            f"holds; compare it with a number first, for example {name} != 0"
        )


def check_labels(step: Step, name: str, dtype: str, *, is_alone: bool) -> None:
    """Raise ArgumentError where the numbers of classes are wanted and something else is given, or
    what other steps take as numbers.
    """
    if dtype == WHOLE and not is_alone:
        raise ArgumentError(
            f"{step.text}: operand {name!r} has labels, of which other steps compute something; "
            "pass them a second time, by another name"
        )
    if dtype != WHOLE:
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {dtype}, wanted {WHOLE}: it says which class is "
            f"right; convert it first, for example {name}.long(), or of probabilities write "
            f"log_softmax(1) | mul({name}) | sum(1) | neg"
        )


def check_named_type(step: Step, name: str, dtype: str) -> None:
    """Raise ArgumentError where a type is wanted that numbers are computed in."""
    if dtype not in FLOATING:
        raise ArgumentError(
            f"{step.text}: {name!r} is {dtype}, wanted one of {', '.join(FLOATING)}, since it says "
            "what x is rounded to; name a tensor of such a type, or write to('float32')"
        )


def check_same_type(step: Step, name: str, dtype: str, other: str) -> None:
    """Raise ArgumentError for two types that are not mixed in this operation.

    fp32 is, with a narrower type: parameters are fp32 where activations are narrow. torch does so
    in layer_norm on CPUs, and under autocast.
    """
    is_mixed = "float32" in (other, dtype) and {other, dtype} <= {*FLOATING} - {"float64"}
    if other != dtype and not is_mixed:
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {other} but the value it meets is {dtype}, a mix "
            f"that is not taken here; convert one of them, for example {name}.to(torch.{dtype})"
        )


def check_parameter_type(step: Step, name: str, dtype: str, other: str) -> None:
    """Raise ArgumentError for a parameter that is neither of the value's type nor, where that has
    16 bits, of fp32.
    """
    if other not in (dtype, "float32" if _WIDTH[dtype] == 1 else dtype):
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {other} but the value it meets is {dtype}, a mix "
            f"that torch refuses here; convert one of them, for example {name}.to(torch.{dtype})"
        )


def refuse_integers(dtypes: Iterable[str]) -> None:
    """Raise ArgumentError where results are integers that the chain was given."""
    for dtype in dtypes:
        if dtype in INTEGERS:
            raise ArgumentError(
                f"a result has the integers of {dtype} that the chain is given; take them from the "
                "tensor itself, or let the chain convert them, for example to('float32')"
            )


def refuse_final(step: Step, dtype: str) -> NoReturn:
    """Raise ArgumentError for a step that works on what a quantising one gives, or on places."""
    raise ArgumentError(
        f"{step.text}: got a value of {dtype}, which only a result can be; let the step that "
        "makes it be the last of the chain"
    )


def refuse_gradients(chain: Chain, dtype: str) -> None:
    """Raise UnsupportedError where a result of this type is to be differentiated."""
    if dtype in QUANTISED:
        raise UnsupportedError(
            f"{chain.steps[-1].text}: a result of {dtype} has no gradient, but some argument needs "
            "one; call it under torch.no_grad(), or detach the arguments"
        )


def rounded(number: float, dtype: str) -> float:
    """The nearest number that a value of this type can have: what torch compares one with."""
    try:
        if dtype == "float16":
            (number,) = struct.unpack("e", struct.pack("e", number))
        elif dtype == "bfloat16" and math.isfinite(number):
            (bits,) = struct.unpack("I", struct.pack("f", number))
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            (number,) = struct.unpack("f", struct.pack("I", nearest))
    except OverflowError:
        return math.copysign(math.inf, number)
    return number


def kind_of(dtype: str) -> ir.Kind:
    """What the values of a type are: conditions, integers, or numbers."""
    return "truth" if dtype == "bool" else "whole" if dtype in INTEGERS else "number"


def met_in(result: str, kinds: Iterable[str]) -> str:
    """The type in which a step meets integers, from those of its result and of all that it is
    applied to; "" where none are among them, or all are compared with a number.
    """
    found = [*kinds]
    if not any(dtype in INTEGERS for dtype in found):
        return ""
    floating = [dtype for dtype in found if dtype in FLOATING]
    if result in FLOATING:
        return result
    return functools.reduce(promote, floating) if floating else ""


def as_number(value: Expr, dtype: str) -> Expr:
    """Integers as numbers of the type in which a step meets them; all else as it is."""
    return ir.primitive(f"to_{dtype}", value) if dtype and value.kind == "whole" else value


def as_wanted(step: Step, parameter: str, operand: Expr | None, dtype: str) -> Expr | None:
    """Conditions where numbers are wanted, as the numbers 0 and 1; integers as numbers of a type,
    if one is given.
    """
    assert step.definition is not None
    wanted = step.definition.parameter(parameter).kind
    if operand is None or operand.kind == wanted:
        return operand
    if operand.kind == "truth":
        return ir.primitive("where", operand, 1.0, 0.0)
    return as_number(operand, dtype)


def run_body(
    step: Step, running: Expr, operands: Mapping[str, Expr | str | None], dtype: str = ""
) -> Expr:
    """What a step computes from these expressions, and types where it asks for such; an eps of
    None is dtype's own.
    """
    assert step.definition is not None
    attributes = dict(step.attributes)
    if dtype and attributes.get("eps", 0.0) is None:
        attributes["eps"] = EPSILON[dtype]
    try:
        found: object = step.definition.function(running, **operands, **attributes)
    except (TypeError, AttributeError, OverflowError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        code = getattr(step.definition.function, "__code__", None)
        own = [f for f in frames if code is not None and f.filename == code.co_filename]
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise ArgumentError(f"{step.text}: its body does not work here: {error}{place}") from error
    if not isinstance(found, Expr):
        raise ChainError(
            f"{step.text}: its body returns a {type(found).__name__}, wanted an expression; is a "
            "return missing?"
        )
    return found


def _refuse_conditions(step: Step, dtype: str, root: Expr) -> None:
    assert step.definition is not None
    is_pooled = step.definition.window_axes > 0 and dtype == "bool"
    reduced = [n.args[0] for n in ir.topological([root]) if n.op == "reduce"]
    if is_pooled or any(a.kind == "truth" for a in reduced):
        raise ChainError("conditions have no sum and no maximum; make numbers of them first")


def result_type(
    step: Step, before: tuple[Shape, str], operands: Mapping[str, tuple[Shape, str]]
) -> tuple[str, bool]:
    """The type of a step's result, from the shapes and types of what it is applied to; and whether
    it can be nothing but a result: places along an axis, or what is quantised.
    """
    assert step.definition is not None
    kinds: dict[Expr, Kind] = {}
    # A body sees two axes in the place of one, or one more.
    parts = bool(step.definition.groups) or step.definition.shaping == "stack"

    def leaf(name: str, shape: Shape, dtype: str, kind: ir.Kind) -> Expr:
        rank = max(len(before[0]), len(shape)) + parts
        node = ir.tensor(name, range(-rank, 0), rank, kind)
        kinds[node] = Kind(dtype, len(shape) > 0)
        return node

    x = leaf("x", *before, kind_of(before[1]))
    named: dict[str, Expr | str] = {}
    for parameter, (shape, dtype) in operands.items():
        # Where numbers are wanted, bool is a type like any other.
        wanted = step.definition.parameter(parameter)
        if wanted.is_type:
            named[parameter] = dtype
            continue
        node = leaf(f"operand {parameter}", shape, dtype, wanted.kind)
        named[parameter] = node
        if wanted.is_drawn:  # numbers like those that are written in a chain
            kinds[node] = _NUMBER
    try:
        root = run_body(step, x, named)
        _refuse_conditions(step, before[1], root)
    except ChainError as error:
        if before[1] != "bool":
            raise
        raise ArgumentError(
            f"{step.text}: got conditions (argument 'x' of bool, or a mask), wanted one of "
            f"{', '.join(FLOATING)}; convert them first, with mask.float() or where(1, 0)"
        ) from error
    try:
        return type_of(root, kinds), root.kind == "index" or root.op in ir.QUANTISING_CASTS
    except ArgumentError as error:
        raise ArgumentError(f"{step.text}: {error}") from error


def check_type(
    step: Step, parameter: str, name: str, dtype: str, running: str, *, has_labels: bool
) -> None:
    """Raise ArgumentError for an operand of a type that its parameter does not take, or not beside
    a value of the running one; has_labels says that it tells classes and nothing else.
    """
    definition = step.definition
    assert definition is not None
    if definition.parameter(parameter).is_type:
        check_named_type(step, name, dtype)
        return
    wanted = definition.parameter(parameter).kind
    if wanted == "index":
        check_labels(step, name, dtype, is_alone=has_labels)
        return
    check_element_type(name, dtype)
    if wanted == "truth":
        check_mask(step, name, dtype)
    if running not in FLOATING:
        return  # refused, or made numbers, by the body
    if definition.keeps_dtype:
        check_parameter_type(step, name, running, dtype)
    elif definition.same_dtype:
        check_same_type(step, name, running, dtype)
