"""Promotion: the element type that torch gives a step's result.

Of a step's tensors those with axes decide; one without axes has a say only where none has some, and
a number none. The rules are applied to the expressions of the step's body, so an operation needs no
word about types: a comparison gives bool, a choice the type of what it chooses among, a cast its
own. Integers that meet a floating type are read as numbers of that; sums and products of integers
alone are integers, and what they are added up to along axes is counted in floats.
"""

from __future__ import annotations

import functools
import math
import struct
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fusegen import arity, ir
from fusegen.errors import ArgumentError, ChainError
from fusegen.ir import Expr
from fusegen.ops import Step
from fusegen.target import EPSILON
from fusegen.unsaid import default_type

FLOATING = tuple(arity.CASTS.values())
NARROW = ("float16", "bfloat16")
QUANTISED = tuple(arity.QUANTISING_CASTS.values())
INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
WHOLE = "int64"  # the type of labels, and of places along an axis, as in torch
Shape = tuple[int, ...]

_WIDTH = {"bool": 0, "float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
_WIDTH |= {"uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4}
_DEFAULT = "float32"
MOST = 2**24  # up to it, every integer is a number of the default type
_EXACT = float(MOST)
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


class Typed(NamedTuple):
    """What a step gives: its element type; whether that can be nothing but a result, as what is
    quantised is; whether integers are added up; and whether conditions that it works on are the
    numbers 1 and 0.
    """

    dtype: str
    is_final: bool = False
    is_sum: bool = False
    counts: bool = False


_NUMBER = Kind(None, False)


def promote(a: str, b: str) -> str:
    """The element type that torch promotes two floating types, two of integers, or one and bool,
    to.
    """
    if a == b:
        return a
    if {a, b} == {"uint8", "int8"}:
        return "int16"
    if _WIDTH[a] == _WIDTH[b]:
        return "float32"
    return max(a, b, key=_WIDTH.__getitem__)


def type_of(root: Expr, leaves: Mapping[Expr, Kind]) -> str:
    """The type of an expression over tensors of these kinds.

    Raises ArgumentError for a difference of bools, which torch refuses.
    """
    if _meets_part(root, leaves):
        return default_type()
    kinds = dict(leaves)
    for node in ir.topological([root]):
        if node not in kinds:
            kinds[node] = _kind(node, [kinds[a] for a in node.args])
    return kinds[root].dtype or default_type()


def _kind(node: Expr, args: list[Kind]) -> Kind:
    has_axes = any(a.has_axes for a in args)
    if node.op == "detach" or (node.op == "reduce" and node.attrs[0] == "pick"):
        return args[0]
    if node.op == "reduce":
        is_given = node.args[0].op == "input"  # and nothing that a norm, say, makes of it
        if node.attrs[0] == "sum" and is_given and args[0].dtype in (*INTEGERS, "bool"):
            return Kind(WHOLE, has_axes)
        _promoted(args)  # nothing else of integers alone
        return Kind(WHOLE, has_axes) if node.kind == "index" else args[0]
    if not args:
        return _NUMBER
    if node.op == "to_int64":
        return Kind(WHOLE, has_axes)
    cast = (
        arity.CASTS.get(node.op) or arity.QUANTISING_CASTS.get(node.op) or arity.WRAPS.get(node.op)
    )
    if cast:
        return Kind(cast, has_axes)
    if node.op in arity.COMPARISONS or node.op in arity.CONNECTIVES:
        _refuse_inexact(node, args)
        return Kind("bool", has_axes)
    if node.op == "div" and any(a.dtype in INTEGERS for a in args) and not _floating(args):
        return Kind(default_type(), has_axes)
    if node.op == "sub" and any(a.dtype == "bool" for a in args):
        raise ArgumentError(
            "torch refuses a difference with a tensor of bool; use logical_not on it, or convert "
            "it first, for example mask.float()"
        )
    if node.op == "where" and node.args[1] is node.args[2]:
        return Kind(args[1].dtype, has_axes)
    chosen = slice(node.op == "where", None)
    is_of_wholes = node.op in arity.OF_WHOLES and all(
        a.dtype in (*INTEGERS, "bool") or ir.is_integer(arg)
        for arg, a in zip(node.args[chosen], args[chosen], strict=True)
    )
    if is_of_wholes:
        _refuse_wide(node, args)
    return Kind(_promoted(args[chosen], is_of_wholes=is_of_wholes), has_axes)


def _refuse_wide(node: Expr, args: Sequence[Kind]) -> None:
    """Raise ArgumentError where integers meet a number that a float is not, or divide by one, or
    are chosen beside one, that their type has not: torch wraps it, or refuses it.
    """
    numbers = [n for a in node.args if (n := ir.constant(a)) is not None]
    types = [kind.dtype for kind in args if kind.dtype in INTEGERS]
    bits = max((int(dtype.lstrip("uint")) for dtype in types), default=64)
    least = 0 if types == ["uint8"] else -(2 ** (bits - 1))
    is_wrapped = node.op not in (arity.QUOTIENT, "where")
    if any(abs(n) >= 2**53 or not (is_wrapped or least <= n < least + 2**bits) for n in numbers):
        raise ArgumentError(
            "integers meet a number of the chain below 2**53, and are divided by one that their "
            "type has, or chosen beside it; pass others as tensors"
        )


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


def _promoted(args: Sequence[Kind], *, is_of_wholes: bool = False) -> str | None:
    """Floating beats integers and bool, then axes beat none, then the wider wins."""
    found: str | None = None
    floating = _floating(args)
    if not floating and any(a.dtype in INTEGERS for a in args) and not is_of_wholes:
        raise ArgumentError(
            "nothing is computed of integers alone but sums, differences, products, quotients, "
            "remainders, comparisons, casts, and x * 0.5 or the like; convert them first, as "
            "mask.float() or in text to('float32')"
        )
    for group in (floating, list(args)):
        for has_axes in (True, False):
            for kind in group:
                if kind.dtype is not None and kind.has_axes == has_axes:
                    found = kind.dtype if found is None else promote(found, kind.dtype)
            if found is not None:
                # A number beside bools alone makes them integers, or of the default type.
                is_mixed = found == "bool" and any(a.dtype is None for a in args)
                return (WHOLE if is_of_wholes else default_type()) if is_mixed else found
    return None


def rounded(number: float, dtype: str) -> float:
    """The nearest number that a value of this type can have: what torch compares one with."""
    try:
        if dtype == "float16":
            (number,) = struct.unpack("e", struct.pack("e", number))
        elif dtype == "bfloat16" and math.isfinite(number):
            (bits,) = struct.unpack("I", struct.pack("f", number))
            nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            (number,) = struct.unpack("f", struct.pack("I", nearest))
        elif dtype == "float32":
            (number,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return math.copysign(math.inf, number)
    return number


def kind_of(dtype: str) -> arity.Kind:
    """What the values of a type are: conditions, integers, or numbers."""
    return "truth" if dtype == "bool" else "whole" if dtype in INTEGERS else "number"


def met_in(result: str, kinds: Iterable[str], *, is_sum: bool) -> str:
    """The type in which a step meets integers, from those of its result and of all that it is
    applied to, and whether it adds them up; "" where none are among them, or all stay integers.
    """
    found = [*kinds]
    if is_sum:
        return _DEFAULT
    if not any(dtype in INTEGERS for dtype in found):
        return ""
    floating = [dtype for dtype in found if dtype in FLOATING]
    if result in FLOATING:
        return result
    return functools.reduce(promote, floating) if floating else ""


def as_integer(value: Expr) -> Expr:
    """Places along an axis as integers; all else as it is."""
    return ir.primitive("to_int64", value) if value.kind == "index" else value


def as_number(value: Expr, dtype: str) -> Expr:
    """Integers as numbers of the type in which a step meets them; all else as it is."""
    if not dtype or value.kind != "whole":
        return value
    is_made = value.op == "to_int64" and _is_whole(value.args[0])
    if is_made and dtype == _DEFAULT:
        return value.args[0]  # which is that already
    return ir.primitive(f"to_{dtype}", value.args[0] if is_made else value)


def _is_whole(number: Expr) -> bool:
    """Whether a number is one of integers, or of conditions, that were added up; or such itself."""
    if number.op == "reduce":
        return number.attrs[0] == "sum" and _is_whole(number.args[0])
    if number.op in arity.CASTS:
        return number.args[0].kind == "whole" or _is_whole(number.args[0])
    if number.op == "where":
        return all(map(ir.is_integer, number.args[1:]))
    return number.op == "mul" and all(a.op == "count" or _is_whole(a) for a in number.args)


def as_wanted(
    step: Step, parameter: str, operand: Expr | None, dtype: str, result: str
) -> Expr | None:
    """Conditions where numbers are wanted, as the numbers 0 and 1, which are integers where the
    result is; integers as numbers of a type, if one is given.
    """
    assert step.definition is not None
    wanted = step.definition.parameter(parameter).kind
    if operand is None or operand.kind == wanted:
        return operand
    if wanted == "index":
        return ir.primitive("to_index", operand)
    if operand.kind == "truth":
        found = ir.primitive("where", operand, 1.0, 0.0)
        return ir.primitive("to_int64", found) if result in INTEGERS and not dtype else found
    return as_number(as_integer(operand), dtype)


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
    except ZeroDivisionError as error:
        raise ArgumentError(f"{step.text}: {error}") from error
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
) -> Typed:
    """What a step gives, from the shapes and types of what it is applied to. Conditions are 1 and 0
    where they are added up, and where they meet integers or numbers of a floating type.
    """
    try:
        return _result_type(step, before, operands, kind_of(before[1]))
    except ArgumentError:
        meets = any(dtype in FLOATING for _, dtype in operands.values())
        if before[1] != "bool":
            raise
        try:
            found = _result_type(step, before, operands, "number")
        except ArgumentError:
            found = None
        is_whole = found is not None and found.dtype == WHOLE and not found.is_final
        if found is None or not (is_whole or (meets and found.dtype in FLOATING)):
            raise
        return found._replace(counts=True)


def _result_type(
    step: Step,
    before: tuple[Shape, str],
    operands: Mapping[str, tuple[Shape, str]],
    kind_of_x: arity.Kind,
) -> Typed:
    assert step.definition is not None
    kinds: dict[Expr, Kind] = {}
    # A body sees two axes in the place of one, or one more.
    parts = bool(step.definition.groups) or step.definition.shaping == "stack"

    def leaf(name: str, shape: Shape, dtype: str, kind: arity.Kind) -> Expr:
        rank = max(len(before[0]), len(shape)) + parts
        node = ir.tensor(name, range(-rank, 0), rank, kind)
        kinds[node] = Kind(dtype, len(shape) > 0)
        return node

    x = leaf("x", *before, kind_of_x)
    named: dict[str, Expr | str] = {}
    for parameter, (shape, dtype) in operands.items():
        # Where numbers are wanted, bool is a type like any other.
        wanted = step.definition.parameter(parameter)
        if wanted.is_type:
            named[parameter] = dtype
            continue
        is_whole = wanted.kind == "number" and dtype in INTEGERS
        node = leaf(f"operand {parameter}", shape, dtype, "whole" if is_whole else wanted.kind)
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
        dtype = type_of(root, kinds)
    except ArgumentError as error:
        raise ArgumentError(f"{step.text}: {error}") from error
    is_sum = root.op == "reduce" and root.attrs[0] == "sum" and root.args == (x,)
    is_counting = before[1] == "bool" and kind_of_x == "number" and not is_sum
    if is_counting and any(n.op == "reduce" for n in ir.topological([root])):
        raise ArgumentError(f"{step.text}: conditions are added up along axes, and nothing else")
    is_final = root.op in arity.QUANTISING_CASTS
    return Typed(dtype, is_final, is_sum and dtype == WHOLE)
