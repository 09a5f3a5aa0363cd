"""Overwriting: what a function does to values in place. A chain's steps give new values, so the new
one goes by the old one's name from then on; where something else has the old one's memory, that is
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn, TypeVar

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.unsaid import MOVING, SEEING, TYPES, NotKnownYet, current_call

T = TypeVar("T")

# What gives parts of a value's memory that are apart, any parts, and all of it in other words.
_APART = ("chunk", "split", "tensor_split", "unbind")
_PARTS = (*_APART, "__getitem__", "select", "narrow", "diagonal", "unfold")
_WHOLES = (*(name for name in SEEING if name != "select"), *MOVING, "view_as", "reshape_as")
_WHOLES += ("expand_as", "detach", "data")
# What gives the value itself where it has the type already.
_CASTS = (*TYPES, "to", "type", "type_as")
# What shares its memory with what it is made of, among operations.
_VIEWS = ("squeeze", "unsqueeze", "flatten", "unflatten", "reshape", "select", "detach")


def every(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """All that a function is given, and what is in a list of those."""
    told = [*args, *(kwargs or {}).values()]
    return told + [a for each in told if isinstance(each, tuple | list) for a in each]


class Overwritten(NamedTuple):
    """A value in whose place another came."""

    where: str
    way: str  # what to write instead
    before: Expr
    after: Expr
    shared: frozenset[Expr]  # what has the value's memory, or some of it
    users: frozenset[Expr]  # what had been computed by then
    moved: frozenset[Expr]  # what had been given to torch to move
    parts: Mapping[Expr, Any]  # of what the value is a view of, which part

    def refuse(self) -> NoReturn:
        """Raise ChainError for a later use."""
        raise ChainError(f"{self.where} changes a value that is used elsewhere too; {self.way}")

    def check_use(self, name: str, told: Sequence[Expr], args: Sequence[Any]) -> None:
        """Raise ChainError where a function of this name is given what shares the value's memory,
        but for another part of what that is a part of.
        """
        key = args[1] if name == "__getitem__" else None
        keys = key if isinstance(key, tuple) else (key,)
        for value in told:
            is_other = value is told[0] and _are_apart(keys, self.parts.get(value))
            if value in self.shared and not is_other:
                self.refuse()

    def check(self, results: Sequence[Expr], moved: Iterable[Expr]) -> None:
        """Raise ChainError where the value, or what shares its memory, is used later."""
        roots = [*results, *(value for value in moved if value not in self.moved)]
        allowed = {*ir.topological([self.after]), *self.users}
        later = [n for n in ir.topological(roots) if n not in allowed]
        is_used = any(not self.shared.isdisjoint(n.args) for n in later)
        if is_used or not self.shared.isdisjoint(roots):
            self.refuse()


class Seen(NamedTuple):
    """What a view is of, and which part: an index, the number of a call that gives several, or
    None for all of it.
    """

    base: Expr
    part: tuple[Any, ...] | int | None


_UNTOLD = -1  # of a part


@dataclass
class Overwriting:
    """The values that a traced function has been given so far, and what it has made of them in
    place. moved has what is computed and given to torch to move.
    """

    moved: Mapping[Expr, Expr] = field(default_factory=dict)
    by_id: Mapping[int, Expr] = field(default_factory=dict)  # what stands for tensors
    done: list[Overwritten] = field(default_factory=list)
    _given: dict[Expr, None] = field(default_factory=dict)
    # Of these the function may have two, which are equal, and only one of them was overwritten.
    _twice: set[Expr] = field(default_factory=set)
    _after: dict[Expr, Expr] = field(default_factory=dict)
    _seen_of: dict[Expr, Seen] = field(default_factory=dict)
    # Of these only a call tells if they are what they are made of, or copies.
    unclear: set[Expr] = field(default_factory=set)
    _depth: int = 0
    _calls: int = 0

    def now(self, value: Expr) -> Expr:
        """The value that goes by this one's name."""
        while value in self._after and value not in self._twice:
            value = self._after[value]
        return value

    def named(self, value: Expr) -> Expr:
        """The value that the function has, where this is it without its gradient, as values are
        known under torch.no_grad().
        """
        own = value.args[0] if value.op == "detach" else value
        return own if own in self._given and value not in self._given else value

    def is_past(self, value: Expr) -> bool:
        """Whether another value goes by this one's name."""
        return self.now(value) is not value

    def giving(
        self,
        name: str,
        args: Sequence[Any],
        compute: Callable[[], T],
        named: Mapping[str, Any] | None = None,
    ) -> T:
        """What is computed by torch's function of this name, noted if the traced function gets it
        itself.
        """
        given = self._standing(args)
        if self._depth == 0 and name != "__setitem__":  # which first puts back what it has
            self.check_use(name, args, named)
        self._depth += 1
        try:
            found = compute()
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._calls += 1
            for value in found if isinstance(found, tuple | list) else (found,):
                if isinstance(value, Expr) and value.rank is None and value not in given:
                    whose = args[0] if args else None
                    is_tensor = not isinstance(whose, Expr) and id(whose) in self.by_id
                    own = self._standing([whose]) if is_tensor else given
                    self._note(name, args, own, value)
        return found

    def _standing(self, values: Iterable[Any]) -> list[Expr]:
        """What stands for values, now."""
        found = (v if isinstance(v, Expr) else self.by_id.get(id(v)) for v in values)
        return [self.now(value) for value in found if value is not None]

    def _note(self, name: str, args: Sequence[Any], given: Sequence[Expr], value: Expr) -> None:
        if value in self._given:
            self._twice.add(value)
        self._given[value] = None
        if not given:
            return
        if name == "__getitem__":
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            self._seen_of[value] = Seen(given[0], key)
        elif name in _PARTS:
            self._seen_of[value] = Seen(given[0], self._calls if name in _APART else _UNTOLD)
        elif name in _WHOLES or "dropout" in name:  # which gives its input where it drops nothing
            self._seen_of[value] = Seen(given[0], None)
        elif name in _CASTS:
            call = current_call()
            if call is None:
                self.unclear.add(value)
            if call is None or call.of(value).dtype == call.of(given[0]).dtype:
                self._seen_of[value] = Seen(given[0], None)

    def is_unclear(self, x: Expr) -> bool:
        """Whether only a call tells if x is what it is made of, or a copy."""
        return current_call() is None and not self.unclear.isdisjoint(self.seen_through(x))

    def seen_through(self, x: Expr) -> list[Expr]:
        """x and what it is a view of, which shares its memory: last what was made itself."""
        return [x, *(seen.base for seen in self._path(x))]

    def _path(self, x: Expr) -> list[Seen]:
        """What x is a view of, and what that is a view of, and so on."""
        found: list[Seen] = []
        while True:
            name = getattr(x.attrs[0], "name", "") if x.op == "call" else x.op
            if x in self._seen_of:
                found.append(self._seen_of[x])
            elif name in _VIEWS:
                found.append(Seen(x.args[0], _UNTOLD if name == "select" else None))
            else:
                return found
            x = found[-1].base

    def _sharing(self, x: Expr) -> frozenset[Expr]:
        """The values that have x's memory, or some of it."""
        mine = self._path(x)
        shared = {x, *(seen.base for seen in mine)}
        parts = {seen.base: seen.part for seen in mine}
        for value in self._given:
            for seen in self._path(value):
                if seen.base in shared:
                    is_below = seen.base not in parts or value in shared
                    if is_below or not _are_apart(seen.part, parts[seen.base]):
                        shared.add(value)
                    break
        return frozenset(shared)

    def replacing(self, where: str, way: str, before: Expr, compute: Callable[[], Expr]) -> Expr:
        """What is computed in a value's place, which goes by its name from then on."""
        if self.is_unclear(before):
            raise NotKnownYet(f"{where}: whether that is a copy only a call tells")
        users, shared = frozenset(ir.topological([*self._given])), self._sharing(before)
        parts = {seen.base: seen.part for seen in self._path(before)}
        after = compute()
        moved = frozenset(self.moved)
        if after is not before:
            told = (shared, users, moved, parts)
            self.done.append(Overwritten(where, way, before, after, *told))
            self._after[before] = after
        return after

    def put_back(self, value: object, x: Expr, key: object) -> None:
        """Forget that a part of x was overwritten, where what came of it is put there: the two
        halves of `x[i] += y`.
        """
        last = self.done[-1] if self.done else None
        seen = self._seen_of.get(last.before) if last is not None else None
        if last is None or seen is None or last.after is not value or seen.base is not x:
            return
        keys = key if isinstance(key, tuple) else (key,)
        if isinstance(seen.part, tuple) and _is_same(seen.part, keys):
            self.done.pop()

    def check_use(
        self, name: str, args: Sequence[Any], named: Mapping[str, Any] | None = None
    ) -> None:
        """Raise ChainError where a function is given what shares the memory of a changed value."""
        told = self._standing(every(args, named))
        self._told(lambda each: each.check_use(name, told, args))

    def check(self, results: Sequence[Expr]) -> None:
        """Raise ChainError where what was overwritten is used elsewhere."""
        self._told(lambda each: each.check(results, self.moved))

    def _told(self, check: Callable[[Overwritten], None]) -> None:
        for each in self.done:
            try:
                check(each)
            except ChainError as error:
                if any(map(self.is_unclear, each.shared)):
                    raise NotKnownYet(str(error)) from None
                raise


def _is_same(keys: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether two indices are one."""
    pairs = zip(keys, others, strict=False)
    return len(keys) == len(others) and all(
        a is b or (type(a) is type(b) and isinstance(a, int | slice) and a == b) for a, b in pairs
    )


def _are_apart(part: object, other: object) -> bool:
    """Whether parts of one value have nothing in common, for sure."""
    if isinstance(part, int) and isinstance(other, int):
        return part == other != _UNTOLD  # of one call
    if not (isinstance(part, tuple) and isinstance(other, tuple)):
        return False
    fronts = [list(takewhile(_is_plain, keys)) for keys in (part, other)]
    pairs = [*zip(*fronts, strict=False)]
    if all(any(k is Ellipsis for k in keys) for keys in (part, other)):
        backs = [list(takewhile(_is_plain, reversed(keys))) for keys in (part, other)]
        pairs += zip(*backs, strict=False)
    return any(_differ(a, b) for a, b in pairs)


def _is_plain(key: object) -> bool:
    return isinstance(key, slice) or (isinstance(key, int) and not isinstance(key, bool))


def _differ(a: Any, b: Any) -> bool:
    """Whether two places or slices along an axis have none in common, for sure."""
    if isinstance(a, int) and isinstance(b, int):
        return a != b and (a < 0) == (b < 0)
    a, b = (slice(k, k + 1) if isinstance(k, int) and k >= 0 else k for k in (a, b))
    if not (isinstance(a, slice) and isinstance(b, slice)):
        return False
    if a.step == b.step and isinstance(a.step, int) and a.step > 1:
        starts = [0 if k.start is None else k.start for k in (a, b)]
        if all(isinstance(n, int) and n >= 0 for n in starts):
            return bool((starts[0] - starts[1]) % a.step)
    return _ends_before(a, b) or _ends_before(b, a)


def _ends_before(a: slice, b: slice) -> bool:
    """Whether a slice ends where another one begins, or before."""
    end, begin = a.stop, b.start
    if end is None or begin is None or any(k.step not in (None, 1) for k in (a, b)):
        return False
    are_numbers = isinstance(end, int) and isinstance(begin, int)
    return end is begin or (are_numbers and (end < 0) == (begin < 0) and end <= begin)


_copies = itertools.count()


def copied(x: Expr) -> Expr:
    """x as a value of its own, of which no two are the same."""
    return ir.make("call", (x,), (lookup("clone"), (), (), f"() {next(_copies)}"), rank=None)


def without_copies(values: Sequence[Expr]) -> tuple[Expr, ...]:
    """The values without the copies in them, which only what is changed in place needs; but for
    those of tensors that are values themselves.
    """
    clone = lookup("clone")

    def rule(node: Expr) -> Expr:
        return node.args[0] if node.op == "call" and node.attrs[0] is clone else node

    found = zip(values, ir.rewrite(values, rule), strict=True)
    return tuple([value if new.op == "input" else new for value, new in found])
