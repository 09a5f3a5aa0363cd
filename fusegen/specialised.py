"""Specialised: a function that asks what only a call tells, as a chain for each answer.

A function is traced once, before anything is known of the tensors that it will be given. One that
computes with their sizes, counts their axes or asks for their types has to wait: it is traced again
for each combination of shapes and types that it is called with. Where the chain comes out the same,
so is what is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import update_wrapper
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusegen import ir
from fusegen.arguments import check_tensor
from fusegen.dsl import chain
from fusegen.errors import ArgumentError, ChainError
from fusegen.ir import Expr
from fusegen.ops import Chain
from fusegen.plan import remember
from fusegen.reference import run_eagerly
from fusegen.runtime import Fused
from fusegen.standing import View, current, stand_in
from fusegen.trace import Traced, chain_to, traced
from fusegen.unsaid import NotKnownYet, Told, told_by


class Chosen(NamedTuple):
    """A compiled chain, with the tensors that its function makes for it, and those that are views
    of others.
    """

    fused: Fused
    made: Mapping[str, Tensor] = {}
    views: Mapping[str, View] = {}

    def operands(self, tensor: Callable[[str], Tensor]) -> list[Tensor]:
        """The chain's operands, where those that it neither makes nor sees in others are told."""

        def found(name: str) -> Tensor:
            if name in self.views:
                of, index = self.views[name]
                return found(of)[index]
            return self.made[name] if name in self.made else tensor(name)

        return [found(name) for name in self.fused.chain.given]


class _Call:
    """What tensors tell of themselves, and of what is computed of them, by the names that stand for
    them.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._given = tensors
        self._known: dict[Expr, Told] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._given

    def tensors(self) -> dict[Expr, Told]:
        """What is given, by what stands for it."""
        return {stand_in(name): tensor for name, tensor in self._given.items()}

    def part(self, value: Expr, axis: int, key: slice) -> Expr | None:
        """What stands for a part of a tensor behind the first."""
        tracing = current()
        assert tracing is not None
        name = ir.name_of(value) if value.op == "input" else next(iter(self._given))
        if name == next(iter(self._given)):
            return None
        whole = tracing.held[name] if name in tracing.held else self._given[name]
        index = (*[slice(None)] * (axis % whole.dim()), key)
        return tracing.hold(whole[index], f"{name}_part", View(name, index))

    def of(self, value: Expr) -> Told:
        """The value's sizes, type and device."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: Expr) -> Told:
        tracing = current()
        assert tracing is not None
        every = {**self._given, **tracing.held}
        names = [ir.name_of(n) for n in ir.topological([value]) if n.op == "input"]
        x, *operands = sorted(names, key=[*every].index)
        if value.op == "input":
            return tracing.held[x] if x in tracing.held else self._given[x]
        fused = Fused(chain_to(value, stand_in(x), operands))
        given = [every[name] for name in fused.chain.given]
        found = (fused.under_autocast(every[x], given, {}) or fused).chain
        shapes = {n: torch.empty_like(t, device="meta") for n, t in every.items()}
        told = run_eagerly(found, shapes[x], {name: shapes[name] for name in found.given})
        return _Shape(told.shape, told.dtype, every[x].device)


class _Shape(NamedTuple):
    """What is told of a value that is not there."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any


class _Making(TorchFunctionMode):
    """Notes which tensors a function makes while it is traced: of numbers, and of each other."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and (tracing := current()) is not None:
            told = [*args, *(kwargs or {}).values()]
            told += [a for each in told if isinstance(each, tuple | list) for a in each]
            if all(id(t) in tracing.made for t in told if isinstance(t, Tensor)):
                tracing.made[id(found)] = found
        return found


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to draw for a tensor that is made while a function is traced."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_seeded = torch.Tag.nondeterministic_seeded in function.tags
        if is_seeded and not any(isinstance(t, Tensor) and t.is_meta for t in args):
            raise ChainError(
                f"{function}: the function draws numbers, which would be the same in every call; "
                "pass them, or use dropout, which draws new ones"
            )
        return function(*args, **(kwargs or {}))


def while_noting(trace: Callable[[], Traced]) -> Traced:
    """What is traced, where tensors that the function makes are constants of the chain."""
    with _Making(), _Drawing():  # type: ignore[no-untyped-call]
        return trace()


def chosen_of(found: Traced, fused: Fused, whose: Container[str]) -> Chosen:
    """What is traced, compiled: of the tensors that it holds those are made that are nobody's."""
    used = {*found.chain.given}
    made = {n: t for n, t in found.held.items() if n in used and n not in whose}
    made = {n: t for n, t in made.items() if n not in found.views}
    return Chosen(fused, made, found.views)


class Answers:
    """The chains of what has to be traced for each call, by what the calls tell."""

    def __init__(self) -> None:
        self._chosen: dict[Any, Chosen] = {}
        self._fused: dict[Chain, Fused] = {}

    def chosen(
        self,
        trace: Callable[[], Traced],
        given: Mapping[str, Tensor],
        own: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> Chosen:
        """The chain for a call with these tensors, by the names of the function's parameters, and
        with those that the function has itself.
        """
        device = next(iter(given.values())).device.type
        is_cast = torch.is_autocast_enabled(device)
        mode = torch.get_autocast_dtype(device) if is_cast else None
        key = (mode, *given, *[(t.shape, t.dtype, t.device) for t in given.values()])
        found = self._chosen.get(key)
        if found is None:
            found = self._find(trace, _Call({**given, **own()}))
            remember(self._chosen, key, found)
        return found

    def _find(self, trace: Callable[[], Traced], call: _Call) -> Chosen:
        found = _traced_for(call, trace)
        if found.chain not in self._fused:
            remember(self._fused, found.chain, Fused(found.chain))
        return chosen_of(found, self._fused[found.chain], call)

    def __reduce__(self) -> tuple[Any, ...]:
        return Answers, ()  # it holds no state but caches, and those are one module's


def _traced_for(call: _Call, trace: Callable[[], Traced]) -> Traced:
    """Traced with sizes as all chains have them, which are the same for all sizes; and if that is
    not enough, with the call's.
    """
    with suppress(ChainError), told_by(call, at_once=False):
        return while_noting(trace)
    with told_by(call, at_once=True):
        return while_noting(trace)


class Specialised:
    """A function that asks for sizes or types, compiled: `fusegen.compile` gives it in the place of
    a `Fused`, and it is called as one.

    Each combination of shapes and types is traced when it is first seen, and what the function
    computes of sizes is a number in its chain, so that other numbers are other chains, and built
    anew. Tensors that the function makes, such as a mask, are made then too. `compiled_for` gives
    the compiled chain for some tensors. Under torch.compile a call of it is outside of the graph.
    """

    def __init__(self, function: Callable[..., Any], reason: str) -> None:
        self._function, self._reason = function, reason
        self.__name__: str = getattr(function, "__name__", "the function")
        parameters = [*inspect.signature(function).parameters.values()]
        self._wanted = [p.name for p in parameters if p.default is p.empty]
        self._optional = [p.name for p in parameters if p.default is None]
        self._signature = inspect.signature(function)
        self._answers: dict[tuple[str, ...], Answers] = {}
        # What was called before with just the operands of its chain is known again by that.
        self._known: dict[Any, Fused] = {}
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, out: Tensor | None = None, **named: Any) -> Any:
        """The function of these tensors, as `Fused` gives it."""
        if is_dynamo_compiling():
            return self._outside(args, out, named)
        return self._called(args, out, named)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside(self, args: Any, out: Any, named: Any) -> Any:
        return self._called(args, out, named)

    def _called(self, args: tuple[Any, ...], out: Tensor | None, named: Mapping[str, Any]) -> Any:
        key = _kinds_of(args) if not named else None
        if key in self._known:
            return self._known[key](*args, out=out)
        given = self._given(args, named)
        chosen = self._chosen(given)
        x, *operands = given
        if key is not None and chosen.fused.chain.given == (*operands,) and not chosen.views:
            remember(self._known, key, chosen.fused)
        return chosen.fused(given[x], *chosen.operands(given.__getitem__), out=out)

    def _given(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors by the names of the parameters."""
        if not named and len(args) == len(self._wanted):
            given = dict(zip(self._wanted, args, strict=True))
        else:
            try:
                given = self._signature.bind(*args, **named).arguments
            except TypeError as error:
                raise ArgumentError(f"{self.__name__}{self._signature}: {error}") from None
            given = {n: v for n, v in given.items() if v is not None or n not in self._optional}
            if numbers := [n for n in given if n not in (*self._wanted, *self._optional)]:
                raise ArgumentError(
                    f"{self.__name__}: got {numbers[0]!r}, but a parameter with a default is a "
                    "number of the chain; give the function another default, or none for a tensor"
                )
        for name, value in given.items():
            check_tensor(name, value)
        return given

    def _chosen(self, given: Mapping[str, Tensor]) -> Chosen:
        also = tuple([name for name in self._optional if name in given])
        answers = self._answers.setdefault(also, Answers())
        return answers.chosen(lambda: traced(self._function, given=also), given)

    def compiled_for(self, *args: Tensor, **named: Tensor) -> Fused:
        """The compiled chain for a call with these tensors, of which shapes and types count; what
        the function makes is an operand of it, behind the function's own.
        """
        return self._chosen(self._given(args, named)).fused

    def reference(self, *args: Tensor, **named: Tensor) -> Any:
        """The same chain run with torch's own operations, one by one."""
        given = self._given(args, named)
        chosen = self._chosen(given)
        x = next(iter(given.values()))
        return chosen.fused.reference(x, *chosen.operands(given.__getitem__))

    @property
    def chain(self) -> Chain:
        """Raises ChainError: there is one for each answer."""
        self._refuse()

    def source(self, *_: Any, **__: Any) -> str:
        """Raises ChainError: `compiled_for(x).source()` has it."""
        self._refuse()

    def explain(self, *_: Any, **__: Any) -> str:
        """Raises ChainError: `compiled_for(x).explain()` tells it."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ChainError(
            f"{self.__name__} has a chain for each shape and type that it is called with; ask "
            f"compiled_for(x, ...) for one ({self._reason})"
        )

    def __repr__(self) -> str:
        return f"fusegen.compile({self.__name__})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Specialised, (self._function, self._reason)

    def __deepcopy__(self, memo: object) -> Specialised:
        return self  # it holds no state but caches


def _kinds_of(args: tuple[Any, ...]) -> Any:
    """What decides for a chain, of arguments that are all tensors and are not cast; else None."""
    if torch._C._is_any_autocast_enabled() or not all(isinstance(t, Tensor) for t in args):
        return None
    return tuple([(t.shape, t.dtype, t.device) for t in args])


def compiled(source: Any) -> Fused | Specialised:
    """The chain of a source as a function of tensors; of a function that asks what only a call
    tells, all its chains.
    """
    try:
        with _Making():
            return Fused(chain(source))
    except NotKnownYet as error:
        if isinstance(source, str | Chain):
            raise
        return Specialised(source, str(error))
