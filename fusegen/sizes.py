"""Sizes that a call tells: `x.shape` and `x.size()`. They may say in which shape a value is seen,
as in `x.view(*x.shape[:-1], 2, -1)`, or which part of an axis is taken, as in
`x[..., : x.shape[-1] // 2]`, whatever they are. Where code computes with them they are numbers, for
which it has to be traced when it is called.
"""

from __future__ import annotations

import dis
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import FrameType
from typing import Any

from fusegen.ir import Expr
from fusegen.unsaid import UNTOLD, NotKnownYet, asks_by, current_call, tells_at_once, told_of

_SHAPE = f"x.shape: {UNTOLD}"


def what_asks(code: FrameType) -> tuple[str, int]:
    """The instruction at which code is, and its number: of what takes apart, how many parts."""
    instructions, at = code.f_code.co_code, code.f_lasti
    return dis.opname[instructions[at]], instructions[at + 1]


def _of_numbers(name: str, *, is_reflected: bool = False) -> Callable[..., Any]:
    """Python's operator on what the call has in the place of its arguments."""
    own = getattr(operator, name)

    def found(x: Untold, *others: Any) -> Any:
        numbers = (x.told(), *map(with_numbers, others))
        return own(*(reversed(numbers) if is_reflected else numbers))

    return found


class Untold:
    """What has no value before a call."""

    def told(self) -> Any:
        """What the call has in its place; NotKnownYet before there is one."""
        raise NotImplementedError

    __add__, __radd__ = _of_numbers("add"), _of_numbers("add", is_reflected=True)
    __sub__, __rsub__ = _of_numbers("sub"), _of_numbers("sub", is_reflected=True)
    __mul__, __rmul__ = _of_numbers("mul"), _of_numbers("mul", is_reflected=True)
    __pow__, __rpow__ = _of_numbers("pow"), _of_numbers("pow", is_reflected=True)
    __mod__, __rmod__ = _of_numbers("mod"), _of_numbers("mod", is_reflected=True)
    __truediv__, __floordiv__ = _of_numbers("truediv"), _of_numbers("floordiv")
    __rtruediv__ = _of_numbers("truediv", is_reflected=True)
    __rfloordiv__ = _of_numbers("floordiv", is_reflected=True)
    __lt__, __le__ = _of_numbers("lt"), _of_numbers("le")
    __gt__, __ge__ = _of_numbers("gt"), _of_numbers("ge")
    __eq__, __ne__ = _of_numbers("eq"), _of_numbers("ne")
    __neg__, __index__ = _of_numbers("neg"), _of_numbers("index")

    def __bool__(self) -> bool:
        return bool(self.told())

    def __float__(self) -> float:
        return float(self.told())

    def __int__(self) -> int:
        return int(self.told())

    __hash__ = None  # type: ignore[assignment]  # a table would keep it longer than the call

    def __repr__(self) -> str:
        return repr(self.told())


def with_numbers(value: Any) -> Any:
    """The value, with numbers for the sizes in it."""
    if isinstance(value, Untold):
        return value.told()
    if not isinstance(value, tuple | list) or not are_told_by_call(value):
        return value
    found: list[Any] = []
    for each in value:
        found += each.told() if isinstance(each, Leading) else [with_numbers(each)]
    return found


@dataclass(frozen=True, eq=False, repr=False)
class SizeOf(Untold):
    """The size of an axis of a value, or of several together, a part of it or a multiple; rank is
    how many axes the value has, where the code says so.
    """

    value: Expr
    axes: tuple[int, ...]
    part: Fraction = Fraction(1)
    rank: int = 0

    def is_of(self, axis: int) -> bool:
        """Whether it is that axis's alone, counted from either end."""
        first, *others = self.axes
        return not others and axis in (first, first - self.rank if self.rank else first)

    def told(self) -> int:
        """The number."""
        shape = told_of(self.value, _SHAPE).shape
        return math.floor(math.prod(shape[i] for i in self.axes) * self.part)

    def __mul__(self, other: object) -> Any:
        if self.part.denominator == 1:  # else it was rounded
            if isinstance(other, SizeOf) and other.value is self.value and other.part == 1:
                return replace(self, axes=self.axes + other.axes)
            if isinstance(other, int) and other > 0:
                return replace(self, part=self.part * other)
        return self.told() * with_numbers(other)

    __rmul__ = __mul__

    def __floordiv__(self, number: object) -> Any:
        if isinstance(number, int) and number > 0:
            return replace(self, part=self.part / number)
        return self.told() // with_numbers(number)


@dataclass(frozen=True, eq=False, repr=False)
class Leading(Untold):
    """The sizes of a value's axes up to one; all where that is None."""

    value: Expr
    stop: int | None

    def told(self) -> tuple[int, ...]:
        """The numbers."""
        return told_of(self.value, _SHAPE).shape[: self.stop]

    def __len__(self) -> int:
        if current_call() is None:
            raise TypeError(_SHAPE)  # which Python passes over where it only asks for a hint
        return len(self.told())

    def __iter__(self) -> Iterator[SizeOf | Leading]:
        """One by one, where code takes apart a number of them that it says: `b, c, h, w = x.shape`;
        all together where they stand among other sizes, as in `x.view(*x.shape[:-1], 2, -1)`.
        """
        (asked, count), stop = what_asks(sys._getframe(1)), self.stop
        if asked in ("LIST_EXTEND", "CALL_FUNCTION_EX"):
            return iter([self])
        if current_call() is not None and (asked != "UNPACK_SEQUENCE" or len(self) != count):
            return iter([SizeOf(self.value, (i,)) for i in range(len(self))])
        if asked != "UNPACK_SEQUENCE" or (stop is not None and stop >= 0 and stop != count):
            raise NotKnownYet(
                "x.shape: how many axes x has is not known before a call; name them all, as in "
                "b, c, h, w = x.shape, or let them stand in a view, as in x.view(*x.shape[:-1], -1)"
            )
        rank = count - (stop or 0) if stop is None or stop < 0 else 0
        return iter([SizeOf(self.value, (i,), rank=rank) for i in range(count)])

    def __add__(self, others: object) -> tuple[object, ...]:
        return (
            (self, *others)
            if isinstance(others, tuple | list)
            else self.told() + with_numbers(others)
        )


class ShapeOf(Leading):
    """The sizes of all axes of a value."""

    def __init__(self, value: Expr) -> None:
        super().__init__(value, None)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.start in (None, 0) and key.step is None:
            if isinstance(key.stop, int | None):
                return Leading(self.value, key.stop)
        elif isinstance(key, slice) and isinstance(key.start, int) and key.start < 0:
            if key.stop is key.step is None:  # the last ones, whose number is told
                return tuple(SizeOf(self.value, (i,)) for i in range(key.start, 0))
        elif isinstance(key, int) and not isinstance(key, bool):
            return SizeOf(self.value, (key,))
        return self.told()[key]


def shape_of(x: Expr) -> Any:
    """x.shape; where code matches it with patterns, the numbers."""
    return ShapeOf(x).told() if tells_at_once() or asks_by("MATCH_SEQUENCE") else ShapeOf(x)


def size_of(x: Expr, dim: int | None = None) -> Any:
    """x.size(), or of one axis."""
    return shape_of(x) if dim is None else shape_of(x)[dim]


def says_last(shape: object) -> bool:
    """Whether it is the shape of a value's last axis, as `x.shape[-1:]` is."""
    sizes = shape if isinstance(shape, tuple | list) else ()
    return len(sizes) == 1 and isinstance(sizes[0], SizeOf) and sizes[0].is_of(-1)


def are_told_by_call(shape: Sequence[object]) -> bool:
    """Whether some of the sizes are."""
    return any(isinstance(size, Untold) for size in shape)
