"""Parts of an axis, as code takes a tensor apart: equal ones, which are steps of a chain, and
others, which a call takes of what it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.ops.schema import show_value
from fusegen.shaping import part_of, selected
from fusegen.sizes import SizeOf, what_asks, with_numbers
from fusegen.standing import given_out
from fusegen.unsaid import PARTS, NotKnownYet, current_call, tells_at_once, told_of


def chunk(x: Expr, chunks: int, dim: int = 0) -> tuple[Expr, ...]:
    """Equal parts of an axis."""
    if not isinstance(chunks, int) or chunks < 1:
        raise ChainError(f"x.chunk: got {show_value(chunks)}, wanted how many parts, an integer")
    call = current_call()
    if call is not None and tells_at_once() and (size := call.of(x).shape[dim]) % chunks:
        return _parted_unevenly(x, _lengths(size, -(-size // chunks)), dim)
    return parted(x, dim, (chunks, -1))


def tensor_split(x: Expr, sections: int, dim: int = 0) -> tuple[Expr, ...]:
    """Parts of an axis, of which the first are longer by one where they are not equal."""
    call = current_call()
    if call is not None and tells_at_once() and isinstance(sections, int) and sections > 0:
        least, more = divmod(call.of(x).shape[dim], sections)
        if more:
            return _parted_unevenly(x, [least + 1] * more + [least] * (sections - more), dim)
    return chunk(x, sections, dim)


def _lengths(size: int, each: int) -> list[int]:
    """The lengths of parts of an axis that are as long as told, but for a shorter last one."""
    return [min(each, size - start) for start in range(0, size, each)]


def parted(x: Expr, dim: int, sizes: tuple[int, int]) -> tuple[Expr, ...]:
    """The parts of an axis: how many, and how long each is."""
    apart = lookup("unflatten")(x, dim, sizes)
    axis = dim - 1 if dim < 0 else dim
    return tuple(selected(apart, axis, i) for i in range(sizes[0]))


def unbound(x: Expr, dim: int = 0) -> tuple[Expr, ...]:
    """What stands at each place along an axis, where the chain says how many it has."""
    count = _places_along(x, dim)
    if count is None:
        count = told_of(x, f"x.unbind: {PARTS}").shape[dim]
    return tuple(selected(x, dim, i) for i in range(count))


class _Parts:
    """Parts of an axis, as long as code says each is, and as many as it takes apart."""

    def __init__(self, x: Expr, size: int, dim: int) -> None:
        self.x, self.size, self.dim = x, size, dim

    def __iter__(self) -> Iterator[Expr]:
        asked, count = what_asks(sys._getframe(1))
        if asked != "UNPACK_SEQUENCE":
            reason = f"x.split: {PARTS}; or take them apart, as in a, b = x.split(n, dim)"
            count = told_of(self.x, reason).shape[self.dim] // self.size
        parts = (self.x, self.dim, (count, self.size))
        return iter(given_out("split", (self.x,), lambda: [*parted(*parts)]))

    def __getitem__(self, place: int) -> Expr:
        dim = self.dim - 1 if self.dim < 0 else self.dim
        is_told = isinstance(self.size, int) and place >= 0
        key = slice(place * self.size, (place + 1) * self.size) if is_told else None
        behind = [slice(None)] * (-self.dim - 1)
        keys = (..., key, *behind) if self.dim < 0 else (*[slice(None)] * dim, key)

        def part() -> Expr:
            apart = lookup("unflatten")(self.x, self.dim, (-1, self.size))
            return selected(apart, dim, place)

        return given_out("__getitem__", (self.x, keys), part)


def split(x: Expr, sizes: Any, dim: int = 0) -> Sequence[Expr] | _Parts:
    """Parts of an axis that are as long as each other."""
    if isinstance(sizes, SizeOf) and sizes.is_of(dim) and sizes.part.numerator == 1:
        return chunk(x, sizes.part.denominator, dim)
    sizes = with_numbers(sizes)
    if isinstance(sizes, int):
        return _Parts(x, sizes, dim)
    if not isinstance(sizes, tuple | list) or not all(isinstance(n, int) for n in sizes):
        raise ChainError(f"x.split: got {show_value(sizes)}, wanted integers")
    if len({*sizes}) != 1:
        return _parted_unevenly(x, sizes, dim)
    return parted(x, dim, (len(sizes), sizes[0]))


def _parted_unevenly(x: Expr, sizes: Sequence[int], dim: int) -> tuple[Expr, ...]:
    """Parts of other lengths than each other, which the call takes of what it is given."""
    reason = (
        f"x.split: got {show_value(sizes)}, wanted parts that are as long as each other, as in "
        "x.split(64, dim) or x.chunk(2, dim), or to split what the call is given"
    )
    if (call := current_call()) is None:
        raise NotKnownYet(reason)
    starts = accumulate(sizes, initial=0)
    found = [
        call.view(x, "narrow", dim, start, n, is_last_resort=True)
        for start, n in zip(starts, sizes, strict=False)
    ]
    parts = tuple(part for part in found if part is not None)
    if len(parts) < len(sizes):
        raise ChainError(reason)
    return parts


def narrowed(x: Expr, dim: int, start: int, length: int) -> Expr:
    """So many places along an axis, from one on."""
    try:
        return part_of(x, dim, slice(start, start + length if start else length))
    except ChainError:
        call = current_call()
        view = call.view(x, "narrow", dim, start, length, is_last_resort=True) if call else None
        if view is None:
            raise
        return view


def _places_along(x: Expr, dim: int) -> int | None:
    """The size of an axis, if an unflatten has just made it."""
    if x.op != "call" or x.attrs[0] is not lookup("unflatten"):
        return None
    _, _, attributes, _ = x.attrs
    assert isinstance(attributes, tuple)
    told: dict[str, Any] = dict(attributes)
    sizes, at = told["sizes"], told["dim"]
    place = dim - (at if at >= 0 else at - len(sizes) + 1)
    is_there = (dim < 0) == (at < 0) and 0 <= place < len(sizes) and sizes[place] >= 0
    return int(sizes[place]) if is_there else None
