"""What stands for tensors while a function is traced, and what that function does to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops.eager import is_tensor
from fusegen.overwriting import Overwriting, copied
from fusegen.taking import View
from fusegen.unsaid import NotKnownYet, aligned, current_call

T = TypeVar("T")

# Which axes a traced value has is not known; that it varies along all keeps a reduction over any
# of them from vanishing as one over nothing.
_ANY_AXIS = frozenset(range(-64, 65)) - {0}


def stand_in(name: str) -> Expr:
    """What stands for the tensor that the chain calls so."""
    return ir.tensor(name, _ANY_AXIS, None)


@dataclass(frozen=True)
class Tracing:
    """What holds while a function is traced."""

    held: dict[str, Any]  # tensors that the function has, by the names of operands
    others: dict[str, Expr]  # what stands for those, by the same names
    by_id: dict[int, Expr]  # the same, by the ids of the tensors
    main: Expr | None = None  # what stands for the first parameter
    taken: Container[str] = ()  # names that mean something else
    has_gradients: bool = True  # whether torch records gradients where the function begins
    views: dict[str, View] = field(default_factory=dict)  # of those that it has, by name
    # What is computed and then seen otherwise, with what stands for the result of a chain to it.
    before: dict[Expr, Expr] = field(default_factory=dict)
    overwriting: Overwriting = field(init=False)
    made: Mapping[int, Any] = field(default_factory=lambda: _made.get({}))  # of numbers, by id
    used: list[tuple[Any, int]] = field(default_factory=list)  # those of them, as they were
    asked: list[str] = field(default_factory=list)  # what it wanted to know of values
    # Tensors that meet a written float such as 1.0, which of integers makes other than 1 does.
    loose: set[str] = field(default_factory=set)
    # Copies in the usual order of memory, or in the one that is told.
    relaid: dict[Expr, dict[str, Any]] = field(default_factory=dict)
    aligned: set[str] = field(default_factory=set)  # views that lie along the first one's axes

    def __post_init__(self) -> None:
        object.__setattr__(self, "overwriting", Overwriting(self.before, self.by_id))

    def check(self, results: Sequence[Expr]) -> None:
        """Raise ChainError where what was overwritten is used elsewhere."""
        self.overwriting.check(results)
        if any(tensor._version != version for tensor, version in self.used):
            raise ChainError(
                "the function changes a tensor that it makes, and has used before; make another "
                "one, as in m = m * 2"
            )

    def stands_for(self, name: str) -> Expr:
        """What stands for the tensor of this name."""
        return self.others[name] if name in self.others else stand_in(name)

    def origin(self, leaf: Expr) -> Expr | None:
        """What a tensor is a view of, or the value that a chain gives there."""
        view = self.views.get(ir.name_of(leaf))
        if view is not None:
            return self.stands_for(view.of)
        return next((value for value, there in self.before.items() if there is leaf), None)

    def is_number(self, leaf: Expr) -> bool:
        """Whether it is a tensor of numbers that the function makes, or of what has no gradient."""
        if self.origin(leaf) is not None:
            return False
        own = self.held.get(ir.name_of(leaf))
        is_made = own is not None and id(own) in self.made
        return is_made or (own is not None and not own.is_floating_point())

    def is_of_main(self, value: Expr) -> bool:
        """Whether it is computed of the first tensor, or of a view of it."""
        waiting = ir.inputs([value])
        while waiting:
            leaf = waiting.pop()
            if leaf is self.main:
                return True
            origin = self.origin(leaf)
            waiting += ir.inputs([origin]) if origin is not None else []
        return False

    def is_without_gradients(self) -> bool:
        """Whether it is traced under torch.no_grad(), where the function began without that."""
        return self.has_gradients != _has_gradients()

    def contiguous(self, x: Expr, memory_format: Any = None) -> Expr:
        """x, or where the call says that it does not lie in the usual order, or in this one of
        torch's, a copy that does if it is a result.
        """
        if str(memory_format) == "torch.preserve_format":
            return x
        told = {} if memory_format is None else {"memory_format": memory_format}
        if (call := current_call()) is None:
            self.overwriting.unclear.add(x)
            self.relaid[x] = told  # or may be
            return x
        self.asked.append("x.contiguous")
        own: Any = call.of(x)
        if getattr(own, "like", own).is_contiguous(**told):
            return x
        found = copied(x)
        self.relaid[found] = told
        return found

    def hold(self, tensor: Any, name: str, view: View | None = None) -> Expr:
        """What stands for one tensor more, by such a name; of a view, whose it is."""
        if view is not None and (refuse := _refusing.get(None)) is not None:
            refuse(view.args)  # which would be the same in every call
        while name in self.others or name in self.taken:
            name += "_"
        self.held[name], self.others[name] = tensor, stand_in(name)
        self.by_id[id(tensor)] = self.others[name]
        if view is not None:
            self.views[name] = view
        return self.others[name]


_made: ContextVar[Mapping[int, Any]] = ContextVar("_made")
_refusing: ContextVar[Callable[[Any], None]] = ContextVar("_refusing")
_tracing: ContextVar[Tracing | None] = ContextVar("_tracing", default=None)


def current() -> Tracing | None:
    """What holds for the function that is traced now, if there is one."""
    return _tracing.get()


@contextmanager
def making(made: Mapping[int, Any], refuse: Callable[[Any], None]) -> Iterator[None]:
    """With these as the tensors that a function has made, by their ids, and makes; and what raises
    for arguments of a view that are not the same in every call.
    """
    token, other = _made.set(made), _refusing.set(refuse)
    try:
        yield
    finally:
        _made.reset(token)
        _refusing.reset(other)


def _has_gradients() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


@contextmanager
def standing_for(
    held: Mapping[str, Any], main: Expr | None = None, taken: Container[str] = ()
) -> Iterator[Tracing]:
    """For tensors, by the names of operands, take expressions."""
    others = {name: stand_in(name) for name in held}
    by_id = {id(tensor): others[name] for name, tensor in held.items()}
    tracing = Tracing({**held}, others, by_id, main, taken, _has_gradients())
    token = _tracing.set(tracing)
    try:
        yield tracing
    finally:
        _tracing.reset(token)


def given_out(
    name: str,
    args: Sequence[Any],
    compute: Callable[[], T],
    named: Mapping[str, Any] | None = None,
) -> T:
    """What is computed by torch's function of this name; a traced function's notes have it."""
    tracing = current()
    return compute() if tracing is None else tracing.overwriting.giving(name, args, compute, named)


def is_assigned(tensor: Any) -> bool:
    """Whether a tensor that the function makes has got a value that is computed."""
    tracing = current()
    own = tracing.by_id.get(id(tensor)) if tracing is not None else None
    return tracing is not None and own is not None and tracing.overwriting.is_past(own)


def is_given(x: Expr) -> bool:
    """Whether x is, or is a view of, a tensor that the function does not make."""
    tracing = current()
    if tracing is None:
        return x.op == "input"
    made = tracing.overwriting.seen_through(x)[-1]
    if tracing.overwriting.is_unclear(x):
        raise NotKnownYet("whether a value in a type is a copy only a call tells")
    if made.op != "input" or made in tracing.before.values():
        return False
    name = ir.name_of(made)
    if (view := tracing.views.get(name)) is not None:
        return not view.is_copy and is_given(tracing.stands_for(view.of))
    if name not in tracing.held or id(tracing.held[name]) not in tracing.made:
        return True
    own = tracing.held[name]
    place = own.untyped_storage()._cdata
    others = [t for t in tracing.made.values() if t is not own]
    if any(other.untyped_storage()._cdata == place for other in others):
        raise ChainError(
            "a tensor that the function makes is changed by what is computed, and another one has "
            "the same memory; begin with torch.zeros_like(x), or change it by an index of its own"
        )
    return False


def note(asked: str) -> None:
    """Note that the function wants to know something of a value."""
    if (tracing := current()) is not None:
        tracing.asked.append(asked)


def _without_gradient(value: Expr, where: str) -> Expr:
    """A value under torch.no_grad(), where the function began without that."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.autograd.function":
            raise ChainError(
                f"{where}: in a torch.autograd.Function, whose backward no chain has; of what has "
                "no gradient write x.detach(), as in x + (q - x).detach()"
            )
        frame = frame.f_back
    return ir.primitive("detach", value)


def known(value: Any, where: str) -> Any:
    """The value; of a tensor, the expression that stands for it."""
    tracing = current()
    if isinstance(value, Expr) and tracing is not None:
        value = tracing.overwriting.now(value)
        is_without = tracing.is_without_gradients()
        return _without_gradient(value, where) if is_without else value
    if isinstance(value, list | tuple) and any(is_tensor(v) or isinstance(v, Expr) for v in value):
        return [known(each, where) for each in value]
    if not is_tensor(value):
        return value
    if tracing is not None and id(value) in tracing.by_id:
        return tracing.overwriting.now(tracing.by_id[id(value)])
    if tracing is not None and id(value) in tracing.made:
        if (call := current_call()) is None:
            raise NotKnownYet(f"{where}: got a tensor that the function makes; {_MADE}")
        tracing.used.append((value, value._version))
        number = call.moved(value) if value.dim() == 0 else value
        tracing.by_id[id(value)] = aligned(tracing.hold(number, "constant"))
        return tracing.by_id[id(value)]
    raise ChainError(
        f"{where}: got a {type(value).__name__}, wanted an expression or a number; give the "
        "function a parameter for it and pass it in the call, or make a fusegen.Layer of a module"
    )


_MADE = "fusegen.compile takes such a function, and traces it when it is called"
