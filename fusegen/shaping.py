"""Values in other shapes, and parts of them, where that is said by sizes that a call tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import Op, lookup
from fusegen.sizes import Leading, SizeOf, Untold, with_numbers
from fusegen.unsaid import NotKnownYet, current_call, tells_all

_OF_ANOTHER = (
    "x.view: got the sizes of another value than the one that is seen in another shape; ask that "
    "one, as in y.view(*y.shape[:-1], 2, -1)"
)
Splits = tuple[tuple[int, int], ...]  # of each: the axis, and how many it has become


def seen_in(x: Expr, shape: Sequence[Any]) -> Expr:
    """x in a shape of which the call tells sizes, so that the chain is the same for all sizes, if
    that can be.
    """
    try:
        return _seen_in(x, shape)
    except NotKnownYet:
        if current_call() is None:
            raise
        return lookup("reshape")(x, *with_numbers(shape))


def _seen_in(x: Expr, shape: Sequence[Any]) -> Expr:
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
        raise NotKnownYet("x.view: behind all of x's sizes only 1 can stand")
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
        return selected(apart, axis + 1 if axis >= 0 else axis, start or 0)
    if step in (None, 1):
        is_cut = any(isinstance(k, SizeOf) for k in (start, stop)) and all(
            isinstance(k, SizeOf | None) or k == 0 for k in (start, stop)
        )
        if is_cut and (found := _fraction_of(x, axis, start, stop)) is not None:
            return found
        if (found := _block(x, axis, key)) is not None:
            return found
    raise (ChainError if current_call() else NotKnownYet)(
        f"x[{':'.join(map(_spelled, (start, stop, step))).removesuffix(':')}]: a slice is one of "
        "equal parts, as x[..., :64], x[..., 64:128], x[..., -64:] and, of halves, "
        "x[..., : x.shape[-1] // 2] are, or x[..., ::2]; another slice is taken before the call"
    )


def _block(x: Expr, axis: int, key: slice) -> Expr | None:
    """x[key] for bounds that are numbers, where that is one of equal parts, or the call takes it of
    what it is given.
    """
    start, stop = key.start or 0, key.stop
    if (call := current_call()) is None:
        if isinstance(start, int) and start < 0 and stop is None:
            return _block_of(x, axis, (-1, -start), -1)
        if isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop:
            width = stop - start
            return None if start % width else _block_of(x, axis, (-1, width), start // width)
        return None
    shape = call.of(x).shape
    begin, end, _ = slice(with_numbers(start), with_numbers(stop)).indices(shape[axis])
    width = end - begin
    if width == shape[axis]:
        return x
    index = (*[slice(None)] * (axis % len(shape)), slice(begin, end))
    if (view := call.view(x, "__getitem__", index)) is not None:
        return view
    is_apt = width > 0 and shape[axis] % width == begin % width == 0
    return _block_of(x, axis, (-1, width), begin // width) if is_apt else None


def _spelled(bound: object) -> str:
    return "" if bound is None else "n" if isinstance(bound, Untold) else str(bound)


def _fraction_of(x: Expr, axis: int, start: Any, stop: Any) -> Expr | None:
    """One of equal parts, whatever the axis's size; None where the call has to tell that."""
    try:
        for size in (start, stop):
            if isinstance(size, SizeOf):
                _require_alike(x, size.value)
                if not size.is_of(axis):
                    raise NotKnownYet(
                        f"x[...]: axis {axis} is cut by the size of axis {size.axes[0]}; count "
                        "both from the same end, as in x[..., : x.shape[-1] // 2]"
                    )
    except NotKnownYet:
        if current_call() is None:
            raise
        return None
    begin = start.part if isinstance(start, SizeOf) else Fraction(0)
    end = stop.part if isinstance(stop, SizeOf) else Fraction(1)
    width = end - begin
    if width <= 0 or 1 % width or begin % width:
        raise ChainError("x[...]: of an axis equal parts can be taken, as x[..., : n // 2] is")
    return _block_of(x, axis, (int(1 / width), -1), int(begin / width))


def selected(x: Expr, axis: int, place: int) -> Expr:
    """What stands at one place along an axis; of conditions, of which no step has one, as the call
    takes it of the result of a chain.
    """
    call = current_call()
    if call is not None and tells_all() and str(call.of(x).dtype) == "torch.bool":
        view = call.view(x, "select", axis, place, is_last_resort=True)
        assert view is not None
        return view
    return lookup("select")(x, axis, place)


def _block_of(x: Expr, axis: int, sizes: tuple[int, int], place: int) -> Expr:
    apart = lookup("unflatten")(x, axis, sizes)
    return selected(apart, axis if axis >= 0 else axis - 1, place)


def as_numbers(index: Any) -> Any:
    """An index of a tensor, with numbers for the sizes in it."""
    if isinstance(index, tuple):
        return tuple(map(as_numbers, index))
    if isinstance(index, slice):
        return slice(*map(with_numbers, (index.start, index.stop, index.step)))
    return with_numbers(index)


def is_part(index: Any) -> bool:
    """Whether an index takes a slice, and is none that needs more than a view."""
    every = index if isinstance(index, tuple) else (index,)
    is_view = all(k is None or k is Ellipsis or isinstance(k, int | slice) for k in every)
    return is_view and any(isinstance(k, slice) and k != slice(None) for k in every)
