"""Sizes that a call tells: `x.shape` and `x.size()` where code asks for them to see a value in
another shape, as in `x.view(*x.shape[:-1], 2, -1)`, or for a part of an axis, as in
`x[..., : x.shape[-1] // 2]`. They are none that one can compute with.
"""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import FrameType
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


Splits = tuple[tuple[int, int], ...]  # of each: the axis, and how many it has become


def what_asks(code: FrameType) -> tuple[str, int]:
    """The instruction at which code is, and its number: of what takes apart, how many parts."""
    instructions, at = code.f_code.co_code, code.f_lasti
    return dis.opname[instructions[at]], instructions[at + 1]


class Untold:
    """What has no value before a call."""

    def refuse(self, *_: object) -> NoReturn:
        """Raise NotKnownYet: what is asked for is not told yet."""
        raise NotKnownYet(_UNTOLD)

    __add__ = __radd__ = __sub__ = __rsub__ = __pow__ = __rpow__ = refuse
    __truediv__ = __rtruediv__ = __rfloordiv__ = __mod__ = __neg__ = refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = refuse
    __bool__ = __int__ = __float__ = __index__ = refuse
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "a part of x.shape"

    def __len__(self) -> int:
        raise TypeError(_UNTOLD)  # which Python passes over where it only asks for a hint


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

    def __mul__(self, other: object) -> SizeOf:
        if self.part.denominator > 1:  # which was rounded
            self.refuse()
        if isinstance(other, SizeOf) and other.value is self.value and other.part == 1:
            return replace(self, axes=self.axes + other.axes)
        if not isinstance(other, int) or other < 1:
            self.refuse()
        return replace(self, part=self.part * other)

    __rmul__ = __mul__

    def __floordiv__(self, number: object) -> SizeOf:
        if not isinstance(number, int) or number < 1:
            self.refuse()
        return replace(self, part=self.part / number)


@dataclass(frozen=True, eq=False, repr=False)
class Leading(Untold):
    """The sizes of a value's axes up to one; all where that is None."""

    value: Expr
    stop: int | None

    __mul__ = __rmul__ = __floordiv__ = Untold.refuse

    def __iter__(self) -> Iterator[SizeOf | Leading]:
        """One by one, where code takes apart a number of them that it says: `b, c, h, w = x.shape`;
        all together where they stand among other sizes, as in `x.view(*x.shape[:-1], 2, -1)`.
        """
        (asked, count), stop = what_asks(sys._getframe(1)), self.stop
        if asked in ("LIST_EXTEND", "CALL_FUNCTION_EX"):
            return iter([self])
        if asked != "UNPACK_SEQUENCE" or (stop is not None and stop >= 0 and stop != count):
            raise NotKnownYet(
                "x.shape: how many axes x has is not known before a call; name them all, as in "
                "b, c, h, w = x.shape, or let them stand in a view, as in x.view(*x.shape[:-1], -1)"
            )
        rank = count - (stop or 0) if stop is None or stop < 0 else 0
        return iter([SizeOf(self.value, (i,), rank=rank) for i in range(count)])

    def __add__(self, others: object) -> tuple[object, ...]:  # type: ignore[override]
        if not isinstance(others, tuple | list):
            self.refuse()
        return (self, *others)


class ShapeOf(Leading):
    """The sizes of all axes of a value."""

    def __init__(self, value: Expr) -> None:
        super().__init__(value, None)

    def __getitem__(self, key: object) -> Any:
        if isinstance(key, slice) and key.start in (None, 0) and key.step is None:
            if isinstance(key.stop, int | None):
                return Leading(self.value, key.stop)
        elif isinstance(key, slice) and isinstance(key.start, int) and key.start < 0:
            if key.stop is key.step is None:  # the last ones, whose number is told
                return tuple(SizeOf(self.value, (i,)) for i in range(key.start, 0))
        elif isinstance(key, int) and not isinstance(key, bool):
            return SizeOf(self.value, (key,))
        self.refuse()


def size_of(x: Expr, dim: int | None = None) -> Any:
    """x.size(), or of one axis."""
    return ShapeOf(x) if dim is None else ShapeOf(x)[dim]


def says_last(shape: object) -> bool:
    """Whether it is the shape of a value's last axis, as `x.shape[-1:]` is."""
    sizes = shape if isinstance(shape, tuple | list) else ()
    return len(sizes) == 1 and isinstance(sizes[0], SizeOf) and sizes[0].is_of(-1)


def are_told_by_call(shape: Sequence[object]) -> bool:
    """Whether some of the sizes are."""
    return any(isinstance(size, Untold) for size in shape)


def seen_in(x: Expr, shape: Sequence[Any]) -> Expr:
    """x in a shape whose sizes are, first or last, those of its own axes, or parts of those."""
    given, rest = x, [*shape]
    place = axis = 0  # of x as it is seen, and as it was given
    if isinstance(rest[0], Leading):
        first = rest.pop(0)
        if first.stop is None:
            return _with_last(_back_to(x, first.value), rest)
        _require_alike(x, first.value)
        place = axis = first.stop
        if first.stop == -1 and len(parts := _parts_of(x, rest, -1)) == len(rest):
            return lookup("unflatten")(x, -1, parts) if len(parts) > 1 else x
        if first.stop < 0:
            return _with_rest(x, first.stop, rest, 0)
    elif _are_first(rest):
        count = sum(isinstance(size, SizeOf) for size in rest)
        return _with_last(lookup("flatten")(x, count - 1), rest[count:])
    elif all(
        isinstance(s, SizeOf) and s.rank == len(rest) and _is_whole(s, i)
        for i, s in enumerate(rest)
    ):
        return _back_to(x, rest[0].value)
    while rest:
        if (joined := _joined(given, rest[0], axis)) > 1:
            x, parts, taken = lookup("flatten")(x, place, place + joined - 1), (-1,), joined
        else:
            parts, taken = _parts_of(given, rest, axis), 1
            rank = max((s.rank for s in rest[: len(parts)] if isinstance(s, SizeOf)), default=0)
            if len(parts) > 1:
                x = lookup("unflatten")(x, axis - rank if rank else place, parts)
        if not parts:
            break
        place, axis, rest = place + len(parts), axis + taken, rest[len(parts) :]
    trailing = 0
    while rest and len(_parts_of(given, rest[-1:], -1 - trailing)) == 1:
        rest.pop()
        trailing += 1
    if not (rest or trailing) and all(s.rank == axis for s in shape if isinstance(s, SizeOf)):
        return x
    return _with_rest(x, place, rest, trailing)


def _with_rest(x: Expr, leading: int, rest: Sequence[Any], trailing: int) -> Expr:
    """x, of whose axes so many stay, in other sizes between those."""
    is_told = bool(rest) and all(isinstance(size, int) for size in rest)
    if not is_told or (trailing and (leading < 0 or len(rest) > 1)):
        raise NotKnownYet(
            "x.view: what is not the size of one of x's first axes, or equal parts of it, has to "
            "be a number, with one -1 for what is left, as in x.view(*x.shape[:-1], 2, -1); more "
            "is told where code names all axes, as in b, c, h, w = x.shape"
        )
    if leading != -1:
        x = lookup("flatten")(x, leading, -1 - trailing)
    at = leading if leading >= 0 else -1
    return x if [*rest] == [-1] else lookup("unflatten")(x, at, (*rest,))


def _number(size: object) -> int:
    return size if isinstance(size, int) else 0


def _is_whole(size: object, axis: int) -> bool:
    """Whether it is the size of that axis, from the front."""
    return isinstance(size, SizeOf) and size.axes == (axis,) and size.part == Fraction(1)


def _are_first(sizes: Sequence[object]) -> bool:
    """Whether these are sizes of a value's first axes, and ones: the shape of what has been reduced
    along all others, whatever value was asked.
    """
    sized = [s for s in sizes if isinstance(s, SizeOf)]
    others = sizes[len(sized) :]
    is_all = any(s.rank == len(sized) for s in sized) and not others
    are_whole = all(_is_whole(s, i) for i, s in enumerate(sized))
    return are_whole and bool(sized) and not is_all and all(_number(s) == 1 for s in others)


def _joined(x: Expr, size: object, axis: int) -> int:
    """Of how many axes of x, from this one on, it is the size; 0 where it is none such."""
    if not isinstance(size, SizeOf) or size.part != 1:
        return 0
    if size.axes != tuple(range(axis, axis + len(size.axes))):
        return 0
    _require_alike(x, size.value)
    return len(size.axes)


def _parts_of(x: Expr, sizes: Sequence[Any], axis: int) -> tuple[int, ...]:
    """Of the first sizes those of an axis of x, or of parts of it, with -1 for what x's own size
    says; () where none are.
    """
    own: list[SizeOf] = []
    for count, size in enumerate(sizes, start=1):
        if not isinstance(size, SizeOf) and _number(size) < 1:
            return ()
        own += [size] if isinstance(size, SizeOf) else []
        if len(own) > 1 or not all(o.is_of(axis) for o in own):
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


def _splits_since(x: Expr, other: Expr) -> Splits:
    """Which axes of other have been parted, and in how many, the last first, until it was x, if
    nothing else could change its axes step by step; else it raises.
    """
    found = _splits(x, other, (), {})
    if found is None:
        raise NotKnownYet(_OF_ANOTHER)
    return found


def _splits(
    x: Expr, other: Expr, stacked: tuple[int, ...], known: dict[object, Splits | None]
) -> Splits | None:
    """The same, or None; of parts that are put together again, along `stacked`."""
    if x is other:
        return None if stacked else ()
    key = x, stacked
    if key not in known:
        made = x.attrs[0] if x.op == "call" else None
        told: dict[str, Any] = dict(x.attrs[2]) if made else {}  # type: ignore[call-overload]
        values = [arg for arg in x.args if arg.op != "const"]
        own: Splits = ()
        is_apt = bool(values)
        if isinstance(made, Op):
            if not any(p.broadcasts for p in made.parameters):
                values = values[:1]
            if made.shaping == "split":
                own = ((told["dim"], len(told["sizes"])),)
            elif made.shaping == "stack":
                stacked = (*stacked, told["dim"])
            elif stacked and "index" in told and told["dim"] == stacked[-1]:
                is_apt, stacked = not told["keepdim"], stacked[:-1]
            else:
                is_apt = made.shaping == "same" and not made.window_axes
        paths = {_splits(value, other, stacked, known) for value in values} if is_apt else {None}
        (path,) = paths if len(paths) == 1 else (None,)
        known[key] = None if path is None else (*own, *path)
    return known[key]


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
            if not size.is_of(axis):
                raise NotKnownYet(
                    f"x[...]: axis {axis} is cut by the size of axis {size.axes[0]}; count both "
                    "from the same end, as in x[..., : x.shape[-1] // 2]"
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
