"""Sizes that a call tells: `x.shape` and `x.size()` where code asks for them to see a value in
another shape, as in `x.view(*x.shape[:-1], 2, -1)`, or for a part of an axis, as in
`x[..., : x.shape[-1] // 2]`. They are none that one can compute with.
"""

from __future__ import annotations

import dis
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NoReturn

from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import Op, lookup
from fusegen.unsaid import NotKnownYet

_OF_ANOTHER = (
    "x.view: got the sizes of another value than the one that is seen in another shape; ask that "
    "one, as in y.view(*y.shape[:-1], 2, -1)"
)
_UNTOLD = (
    "x.shape: its axes are not known before a call; a size may stand where a value is seen in "
    "another shape, as in x.view(x.shape[0], -1), and x.shape[-1] // 2 where an axis is cut; mean "
    "and the like need no sizes"
)


class Untold:
    """What has no value before a call."""

    def refuse(self, *_: object) -> NoReturn:
        """Raise NotKnownYet: what is asked for is not told yet."""
        raise NotKnownYet(_UNTOLD)

    def product(self, other: object) -> Untold:
        """A size that is made of others: what is left where all others are known."""
        return Untold() if isinstance(other, int | Untold) else self.refuse()

    __mul__ = __rmul__ = __floordiv__ = product
    __add__ = __radd__ = __sub__ = __rsub__ = __pow__ = __rpow__ = refuse
    __truediv__ = __rtruediv__ = __rfloordiv__ = __mod__ = __neg__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = refuse
    __bool__ = __int__ = __float__ = __index__ = refuse
    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise TypeError(_UNTOLD)  # which Python passes over where it only asks for a hint


@dataclass(frozen=True, eq=False)
class SizeOf(Untold):
    """The size of an axis of a value, or a fraction of it; rank is how many axes it has, where the
    code says so.
    """

    value: Expr
    axis: int
    part: Fraction = Fraction(1)
    rank: int = 0

    def is_axis(self, axis: int, rank: int) -> bool:
        """Whether it is the whole size of that axis of so many."""
        return self.axis == axis and self.part == 1 and self.rank == rank

    def __floordiv__(self, number: object) -> SizeOf:
        if not isinstance(number, int) or number < 1:
            self.refuse()
        return replace(self, part=self.part / number)


@dataclass(frozen=True, eq=False)
class Leading(Untold):
    """The sizes of a value's axes up to one; all where that is None."""

    value: Expr
    stop: int | None

    def __iter__(self) -> Iterator[Leading]:
        yield self

    def __add__(self, others: object) -> tuple[object, ...]:  # type: ignore[override]
        if not isinstance(others, tuple | list):
            self.refuse()
        return (self, *others)


@dataclass(frozen=True, eq=False)
class ShapeOf(Untold):
    """The sizes of all axes of a value."""

    value: Expr

    def __getitem__(self, key: object) -> SizeOf | Leading:
        if isinstance(key, slice) and key.start in (None, 0) and key.step is None:
            if isinstance(key.stop, int | None):
                return Leading(self.value, key.stop)
        elif isinstance(key, int):
            return SizeOf(self.value, key)
        self.refuse()

    def __iter__(self) -> Iterator[SizeOf | Leading]:
        """One by one, where code takes apart a number of them that it says: `b, c, h, w = x.shape`;
        else all together.
        """
        asking = sys._getframe(1)
        code = asking.f_code.co_code
        if dis.opname[code[asking.f_lasti]] == "UNPACK_SEQUENCE":
            rank = code[asking.f_lasti + 1]
            return iter([SizeOf(self.value, i, rank=rank) for i in range(rank)])
        return iter([Leading(self.value, None)])


def size_of(x: Expr, dim: int | None = None) -> ShapeOf | SizeOf | Leading:
    """x.size(), or of one axis."""
    return ShapeOf(x) if dim is None else ShapeOf(x)[dim]


def are_told_by_call(shape: Sequence[object]) -> bool:
    """Whether some of the sizes are."""
    return any(isinstance(size, Untold) for size in shape)


def seen_in(x: Expr, shape: Sequence[Any]) -> Expr:
    """x in a shape whose first or last sizes are those of its own axes, or parts of those."""
    rest = [*shape]
    if isinstance(shape[0], Leading):
        first = rest.pop(0)
        if first.stop is None:
            return _with_last(_back_to(x, first.value), rest)
        _require_alike(x, first.value)
        return _with_rest(x, first.stop, rest, 0)
    if _are_first(rest):
        count = sum(size != 1 for size in map(_number, rest))
        return _with_last(lookup("flatten")(x, count - 1), rest[count:])
    if all(isinstance(s, SizeOf) and s.is_axis(i, len(rest)) for i, s in enumerate(rest)):
        return _back_to(x, rest[0].value)
    place, given = 0, x
    for axis in itertools.count():
        parts = _parts_of(given, rest, axis)
        if not parts:
            break
        x = lookup("unflatten")(x, place, parts) if len(parts) > 1 else x
        place, rest = place + len(parts), rest[len(parts) :]
    trailing = 0
    while rest and _parts_of(given, rest[-1:], -1 - trailing):
        rest.pop()
        trailing += 1
    if not (rest or trailing) and all(s.rank == axis for s in shape if isinstance(s, SizeOf)):
        return x
    return _with_rest(x, place, rest, trailing)


def _with_rest(x: Expr, leading: int, rest: Sequence[Any], trailing: int) -> Expr:
    """x, of whose axes so many stay, in other sizes between those."""
    if sum(isinstance(size, Untold) for size in rest) == 1 and -1 not in map(_number, rest):
        rest = [-1 if isinstance(size, Untold) else size for size in rest]  # which is what is left
    is_told = bool(rest) and all(isinstance(size, int) for size in rest)
    if not is_told or (trailing and (leading < 0 or len(rest) > 1)):
        raise NotKnownYet(
            "x.view: what is not the size of one of x's first axes has to be a number, with one -1 "
            f"for what is left, as in x.view(*x.shape[:-1], 2, -1); {_UNTOLD}"
        )
    if leading != -1:
        x = lookup("flatten")(x, leading, -1 - trailing)
    at = leading if leading >= 0 else -1
    return x if [*rest] == [-1] else lookup("unflatten")(x, at, (*rest,))


def _number(size: object) -> int:
    return size if isinstance(size, int) else 0


def _are_first(sizes: Sequence[object]) -> bool:
    """Whether these are sizes of a value's first axes, and ones: the shape of what has been reduced
    along all others, whatever value was asked.
    """
    sized = [s for s in sizes if isinstance(s, SizeOf)]
    are_whole = all(s.axis == i and s.part == 1 != s.rank for i, s in enumerate(sized))
    others = sizes[len(sized) :]
    is_all = any(s.rank == len(sized) for s in sized) and not others
    return are_whole and bool(sized) and not is_all and all(_number(s) == 1 for s in others)


def _parts_of(x: Expr, sizes: Sequence[Any], axis: int) -> tuple[int, ...]:
    """Of the first sizes those of an axis of x, or of parts of it, with -1 for what x's own size
    says; () where none are.
    """
    own: list[SizeOf] = []
    for count, size in enumerate(sizes, start=1):
        if not isinstance(size, SizeOf) and _number(size) < 1:
            return ()
        own += [size] if isinstance(size, SizeOf) else []
        if len(own) > 1 or any(axis not in (o.axis, o.axis - (o.rank or o.axis)) for o in own):
            return ()
        numbers = [_number(s) or -1 for s in sizes[:count]]
        if own and own[0].part * abs(math.prod(numbers)) == 1:
            _require_alike(x, own[0].value)
            return tuple(numbers)
    return ()


def _with_last(x: Expr, sizes: Sequence[Any]) -> Expr:
    """x with axes that are one wide behind its own."""
    if any(size != 1 for size in sizes):
        raise NotKnownYet(f"x.view: behind all of x's sizes only 1 can stand; {_UNTOLD}")
    for _ in sizes:
        x = lookup("unsqueeze")(x, -1)
    return x


def _require_alike(x: Expr, other: Expr) -> None:
    """Raise where it is not sure that two values have one shape."""
    if _splits_since(x, other):
        raise NotKnownYet(_OF_ANOTHER)


def _splits_since(x: Expr, other: Expr) -> list[tuple[int, int]]:
    """Which axes of other have been parted, and in how many, the last first, until it was x, if
    nothing else could change its axes step by step; else it raises.
    """
    found: list[tuple[int, int]] = []
    while x is not other:
        made = x.attrs[0] if x.op == "call" else None
        is_split = isinstance(made, Op) and made.shaping == "split"
        if is_split:
            told: dict[str, Any] = dict(x.attrs[2])  # type: ignore[call-overload]
            found.append((told["dim"], len(told["sizes"])))
        is_same = not isinstance(made, Op) or (made.shaping == "same" and not made.window_axes)
        values = [arg for arg in x.args if arg.op != "const"]
        if isinstance(made, Op) and not any(p.broadcasts for p in made.parameters):
            values = values[:1]
        if not (is_same or is_split) or len(values) != 1:
            raise NotKnownYet(_OF_ANOTHER)
        (x,) = values
    return found


def _back_to(x: Expr, other: Expr) -> Expr:
    """x in the shape that another value had when it was not parted yet."""
    for dim, count in _splits_since(x, other):
        x = lookup("flatten")(x, *((dim, dim + count - 1) if dim >= 0 else (dim - count + 1, dim)))
    return x


def part_of(x: Expr, axis: int, key: slice) -> Expr:
    """x[key] along an axis: one of equal parts, or every so many-th place."""
    start, stop, step = key.start, key.stop, key.step
    if isinstance(step, int) and step > 1 and stop is None and start in (None, *range(step)):
        apart = lookup("unflatten")(x, axis, (-1, step))
        return lookup("select")(apart, axis + 1 if axis >= 0 else -1, start or 0)
    if step in (None, 1):
        own = [k for k in (start, stop) if isinstance(k, SizeOf)]
        if own and all(isinstance(k, SizeOf | None) or k == 0 for k in (start, stop)):
            return _fraction_of(x, axis, start, stop)
        whole = (start or 0, stop)
        if all(isinstance(k, int) and k >= 0 for k in whole):
            width = stop - whole[0]
            if width > 0 and whole[0] % width == 0:
                return _block_of(x, axis, (-1, width), whole[0] // width)
        if isinstance(start, int) and start < 0 and stop is None:
            return _block_of(x, axis, (-1, -start), -1)
    raise ChainError(
        f"x[{':'.join(map(_spelled, (start, stop, step))).removesuffix(':')}]: a slice is one of "
        "equal parts, as x[..., :64], x[..., 64:128], x[..., -64:] and, of halves, "
        "x[..., : x.shape[-1] // 2] are, or x[..., ::2]; for another slice what the call is "
        "given"
    )


def _spelled(bound: object) -> str:
    return "" if bound is None else "n" if isinstance(bound, Untold) else str(bound)


def _fraction_of(x: Expr, axis: int, start: Any, stop: Any) -> Expr:
    for size in (start, stop):
        if isinstance(size, SizeOf):
            _require_alike(x, size.value)
            if size.axis != axis:
                raise NotKnownYet(
                    f"x[...]: axis {axis} is cut by the size of axis {size.axis}; count both from "
                    "the same end, as in x[..., : x.shape[-1] // 2]"
                )
    begin = start.part if isinstance(start, SizeOf) else Fraction(0)
    end = stop.part if isinstance(stop, SizeOf) else Fraction(1)
    width = end - begin
    if width <= 0 or 1 % width or begin % width:
        raise ChainError("x[...]: of an axis equal parts can be taken, as x[..., : n // 2] is")
    return _block_of(x, axis, (int(1 / width), -1), int(begin / width))


def _block_of(x: Expr, axis: int, sizes: tuple[int, int], place: int) -> Expr:
    apart = lookup("unflatten")(x, axis, sizes)
    return lookup("select")(apart, axis if axis >= 0 else axis - 1, place)
