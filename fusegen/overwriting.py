"""Overwriting: what a function does to values in place. A chain's steps give new values, so the new
one goes by the old one's name from then on; where something else has the old one's memory, that is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.unsaid import MOVING, SEEING, TYPES, NotKnownYet, current_call

T = TypeVar("T")

# What gives parts of a value's memory, and all of it in other words.
_PARTS: tuple[str, ...] = (
    "__getitem__",
    "select",
    "chunk",
    "split",
    "tensor_split",
    "unbind",
    "narrow",
)
_PARTS += ("diagonal", "unfold")
_WHOLES = (*(name for name in SEEING if name != "select"), *MOVING, "view_as", "reshape_as")
_WHOLES += ("expand_as", "detach", "data")
# What gives the value itself where it has the type already.
_CASTS = (*TYPES, "to", "type", "type_as")
# What shares its memory with what it is made of, among operations.
_VIEWS = ("squeeze", "unsqueeze", "flatten", "unflatten", "reshape", "select", "detach")


class Overwritten(NamedTuple):
    """A value in whose place another came."""

    where: str
    way: str  # what to write instead
    before: Expr
    after: Expr
    shared: frozenset[Expr]  # what has the value's memory, or some of it
    users: frozenset[Expr]  # what had been computed by then

    def check(self, results: Sequence[Expr]) -> None:
        """Raise ChainError where the value, or what shares its memory, is used later."""
        allowed = {*ir.topological([self.after]), *self.users}
        later = [n for n in ir.topological(results) if n not in allowed]
        is_used = any(not self.shared.isdisjoint(n.args) for n in later)
        if is_used or not self.shared.isdisjoint(results):
            raise ChainError(f"{self.where} changes a value that is used elsewhere too; {self.way}")


@dataclass
class Overwriting:
    """The values that a traced function has been given so far, and what it has made of them in
    place.
    """

    done: list[Overwritten] = field(default_factory=list)
    _given: dict[Expr, None] = field(default_factory=dict)
    # Of these the function may have two, which are equal, and only one of them was overwritten.
    _twice: set[Expr] = field(default_factory=set)
    _after: dict[Expr, Expr] = field(default_factory=dict)
    _seen_of: dict[Expr, tuple[Expr, bool]] = field(default_factory=dict)  # and whether a part
    _cast: set[Expr] = field(default_factory=set)
    _depth: int = 0

    def now(self, value: Expr) -> Expr:
        """The value that goes by this one's name."""
        while value in self._after and value not in self._twice:
            value = self._after[value]
        return value

    def is_past(self, value: Expr) -> bool:
        """Whether another value goes by this one's name."""
        return self.now(value) is not value

    def giving(self, name: str, args: Sequence[Any], compute: Callable[[], T]) -> T:
        """What is computed by torch's function of this name, noted if the traced function gets it
        itself.
        """
        given = [self.now(a) for a in args if isinstance(a, Expr)]
        self._depth += 1
        try:
            found = compute()
        finally:
            self._depth -= 1
        if self._depth == 0:
            for value in found if isinstance(found, tuple | list) else (found,):
                if isinstance(value, Expr) and value.rank is None and value not in given:
                    self._note(name, given, value)
        return found

    def _note(self, name: str, given: Sequence[Expr], value: Expr) -> None:
        if value in self._given:
            self._twice.add(value)
        self._given[value] = None
        if given and (name in _PARTS or name in _WHOLES):
            self._seen_of[value] = (given[0], name in _PARTS)
        if given and name in _CASTS:
            call = current_call()
            if call is None:
                self._cast.add(value)
            if call is None or call.of(value).dtype == call.of(given[0]).dtype:
                self._seen_of[value] = (given[0], False)

    def is_cast(self, x: Expr) -> bool:
        """Whether only a call tells if x is what it is made of, or a copy in another type."""
        return not self._cast.isdisjoint(self.seen_through(x))

    def seen_through(self, x: Expr) -> list[Expr]:
        """x and what it is a view of, which shares its memory: last what was made itself."""
        return [value for value, _ in self._path(x)]

    def _path(self, x: Expr) -> list[tuple[Expr, bool]]:
        """The same, each with whether x is a part of it."""
        found, is_part = [(x, False)], False
        while True:
            if x in self._seen_of:
                x, is_one = self._seen_of[x]
                is_part |= is_one
            elif (getattr(x.attrs[0], "name", "") if x.op == "call" else x.op) in _VIEWS:
                is_part |= x.op == "call" and getattr(x.attrs[0], "name", "") == "select"
                x = x.args[0]
            else:
                return found
            found.append((x, is_part))

    def replacing(self, where: str, way: str, before: Expr, compute: Callable[[], Expr]) -> Expr:
        """What is computed in a value's place, which goes by its name from then on. Parts of one
        value are taken to be apart from each other.
        """
        users = frozenset(ir.topological([*self._given]))
        mine = self._path(before)
        shared = {value for value, _ in mine}
        parts = {value for value, is_part in mine if is_part}
        for value in self._given:
            own = self._path(value)
            if any(v in shared and not (is_part and v in parts) for v, is_part in own):
                shared.add(value)
        after = compute()
        if after is not before:
            self.done.append(Overwritten(where, way, before, after, frozenset(shared), users))
            self._after[before] = after
        return after

    def put_back(self, value: object, x: Expr) -> None:
        """Forget that a part of x was overwritten, where what came of it is put there: the two
        halves of `x[i] += y`.
        """
        last = self.done[-1] if self.done else None
        if last and last.after is value and x in self.seen_through(last.before)[1:]:
            self.done.pop()

    def check(self, results: Sequence[Expr]) -> None:
        """Raise ChainError where what was overwritten is used elsewhere."""
        for each in self.done:
            try:
                each.check(results)
            except ChainError as error:
                if any(map(self.is_cast, each.shared)):
                    raise NotKnownYet(str(error)) from None
                raise


def without_copies(values: Sequence[Expr]) -> tuple[Expr, ...]:
    """The values without the copies in them, which only what is changed in place needs; but for
    those of tensors that are values themselves.
    """
    clone = lookup("clone")

    def rule(node: Expr) -> Expr:
        return node.args[0] if node.op == "call" and node.attrs[0] is clone else node

    found = zip(values, ir.rewrite(values, rule), strict=True)
    return tuple([value if new.op == "input" else new for value, new in found])
