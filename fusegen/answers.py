"""Answers: the chains of what is traced for each call, by what the calls tell of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusegen import ir
from fusegen.arguments import check_all
from fusegen.errors import ArgumentError, ChainError, EmptyReductionError, OtherAxesError
from fusegen.inlining import in_order
from fusegen.ir import Expr
from fusegen.joining import ways, with_anew
from fusegen.modules import target_of
from fusegen.ops import Chain
from fusegen.plan import remember
from fusegen.reference import run_eagerly
from fusegen.runtime import Fused
from fusegen.standing import View, current, making, stand_in
from fusegen.trace import Traced, chain_to
from fusegen.unsaid import Telling, Told, told_by

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen:
    """A compiled chain, with the tensors that its function makes for it, those that are views of
    others, and what checks the input.
    """

    fused: Fused
    made: Mapping[str, Tensor] = field(default_factory=dict)
    views: Mapping[str, View] = field(default_factory=dict)
    wanted: Any = None
    order: tuple[int | str, ...] = ()
    # The tensors that it neither makes nor sees in others, but for the input.
    wants: tuple[str, ...] = field(init=False)

    def results(self, found: Any, tensor: Callable[[str], Tensor]) -> Any:
        """What the chain gives, as the function returns it."""
        return in_order(found, self.order, tensor) if self.order else found

    def __post_init__(self) -> None:
        returned = (n for n in self.order if isinstance(n, str))
        names = dict.fromkeys((*self.fused.chain.given, *returned))
        wants = tuple(n for n in names if n not in self.made and n not in self.views)
        object.__setattr__(self, "wants", wants)  # and no cached property: dynamo reads it

    def arguments(self, x: str, tensor: Callable[[str], Tensor]) -> list[Tensor]:
        """What the compiled chain is called with."""
        return [tensor(x), *self.operands(tensor)]

    def operands(self, tensor: Callable[[str], Tensor]) -> list[Tensor]:
        """The chain's operands, where those that it neither makes nor sees in others are told."""

        def found(name: str) -> Tensor:
            if name in self.views:
                view: Tensor = self.views[name].taken(found(self.views[name].of))
                return view
            return self.made[name] if name in self.made else tensor(name)

        return [found(name) for name in self.fused.chain.given]


class _Shape(NamedTuple):
    """What is told of a value that is not there."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any


class _Call:
    """What tensors tell of themselves, and of what is computed of them, by the names that stand for
    them: those given, of which the first is the input, and those that the function has itself.
    """

    def __init__(self, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        self._given, self._own = given, own
        self._input = next(iter(given))
        self._known: dict[Expr, Told] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._given or name in self._own

    def __getitem__(self, name: str) -> Tensor:
        return self._given[name] if name in self._given else self._own[name]

    def tensors(self) -> dict[Expr, Told]:
        """What is given, by what stands for it."""
        return {stand_in(name): self[name] for name in (*self._given, *self._own)}

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the input's device."""
        return tensor.to(self._given[self._input].device)

    def view(self, value: Expr, method: str, *args: Any) -> Expr | None:
        """What stands for a view of a tensor behind the first; None for what is none."""
        name = ir.name_of(value) if value.op == "input" else self._input
        tracing = current()
        assert tracing is not None
        if name == self._input:
            return None
        view = View(name, method, args)
        return tracing.hold(view.taken(self._tensor(name)), f"{name}_part", view)

    def of(self, value: Expr) -> Told:
        """The value's sizes, type and device."""
        if value.op == "input":
            return self._tensor(ir.name_of(value))
        if value not in self._known:
            with torch._C.DisableTorchFunction():  # of modes that look on
                self._known[value] = self._computed(value)
        return self._known[value]

    def require_fit(self, chosen: Chosen) -> None:
        """Raise what a call would, where the chain does not take the tensors."""
        x = self._given[self._input]
        chain = chosen.fused.chain
        operands = dict(zip(chain.given, chosen.operands(self.__getitem__), strict=True))
        seeds = dict.fromkeys(chain.drawn, torch.zeros(1, dtype=torch.int64, device=x.device))
        tensors = [x, *[(operands | seeds)[name] for name in chain.operands]]
        with suppress(EmptyReductionError):
            try:
                check_all(chain, ways(chain), tensors)
            except OtherAxesError:
                check_all(chain, with_anew(chain, ways(chain)), tensors)

    def _tensor(self, name: str) -> Tensor:
        tracing = current()
        assert tracing is not None
        tensor: Tensor = tracing.held[name] if name in tracing.held else self[name]
        return tensor

    def _computed(self, value: Expr) -> Told:
        """What is told of a value that is computed, by torch's own operations without memory."""
        names = [ir.name_of(n) for n in ir.topological([value]) if n.op == "input"]
        x, *operands = sorted(names, key=lambda name: name != self._input)
        fused = Fused(chain_to(value, stand_in(x), operands))
        given = {name: self._tensor(name) for name in (x, *fused.chain.given)}
        cast = fused.under_autocast(given[x], [given[n] for n in fused.chain.given], {})
        empty = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in given.items()}
        told = run_eagerly((cast or fused).chain, empty[x], empty)
        return _Shape(told.shape, told.dtype, given[x].device)


class _Making(TorchFunctionMode):
    """Notes which tensors a function makes while it is traced: of numbers, and of each other."""

    def __init__(self, made: MutableMapping[int, Tensor]) -> None:
        super().__init__()
        self.made = made

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            told = [*args, *(kwargs or {}).values()]
            told += [a for each in told if isinstance(each, tuple | list) for a in each]
            if all(id(t) in self.made for t in told if isinstance(t, Tensor)):
                self.made[id(found)] = found
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


def chosen_of(found: Traced, fused: Fused, whose: Container[str]) -> Chosen:
    """What is traced, compiled: of the tensors that it holds those are made that are nobody's."""
    made = {n: t for n, t in found.held.items() if n not in whose and n not in found.views}
    return Chosen(fused, made, found.views, found.wanted, found.order)


class Answers:
    """The chains of one function, or of one module, which is traced for each call that differs, and
    the tensors that it makes meanwhile.
    """

    def __init__(self) -> None:
        self._chosen: dict[Any, Chosen] = {}
        self._fused: dict[Chain, Fused] = {}
        self._made: MutableMapping[int, Tensor] = WeakValueDictionary()  # which some remember

    def noting(self, trace: Callable[[], T]) -> T:
        """What is traced, with notes of what is made meanwhile."""
        with making(self._made), _Making(self._made), _Drawing():  # type: ignore[no-untyped-call]
            return trace()

    def chosen(
        self,
        trace: Callable[[], Traced],
        given: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
    ) -> Chosen:
        """The chain for a call with these tensors, by the names of the function's parameters, and
        with those that the function has itself, which to trace it may renew.
        """
        device = next(iter(given.values())).device
        target_of(device)
        is_cast = torch.is_autocast_enabled(device.type)
        mode = torch.get_autocast_dtype(device.type) if is_cast else None
        kinds = [(t.shape, t.dtype, t.device) for t in (*given.values(), *own.values())]
        key = (mode, torch.get_default_dtype(), *given, *kinds)
        found = self._chosen.get(key)
        if found is None:
            found = self._find(_Call(given, own), trace)
            remember(self._chosen, key, found)
        return found

    def _find(self, call: _Call, trace: Callable[[], Traced]) -> Chosen:
        """What is traced for a call: with sizes as all chains have them, which are the same for all
        sizes, and if the chain does not take the tensors, with more and more of what the call
        tells.
        """
        problems: list[Exception] = []
        for telling in Telling:
            try:
                # What is made may be wanted in training too.
                with torch.inference_mode(False), told_by(call, telling):
                    traced = self.noting(trace)
                if traced.chain not in self._fused:
                    remember(self._fused, traced.chain, Fused(traced.chain))
                found = chosen_of(traced, self._fused[traced.chain], call)
                call.require_fit(found)
                return found
            except Exception as error:
                problems.append(error)
        raise next((p for p in problems if isinstance(p, ArgumentError)), problems[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Answers, ()  # it holds no state but caches, and those are one module's
