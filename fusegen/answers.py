"""Answers: the chains of what is traced for each call, by what the calls tell of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusegen import ir
from fusegen.arguments import check_all, count_modes, require_floats
from fusegen.arranging import chain_to
from fusegen.drawing import Drawing, Drawn
from fusegen.errors import ArgumentError, ChainError, EmptyReductionError, OtherAxesError
from fusegen.ir import Expr
from fusegen.joining import ways, with_anew
from fusegen.modules import target_of
from fusegen.ops import Chain, lookup
from fusegen.overwriting import every
from fusegen.plan import remember
from fusegen.reference import run_eagerly
from fusegen.runtime import Fused
from fusegen.standing import current, is_assigned, making, stand_in
from fusegen.taking import Other, View, is_elementwise, put_together
from fusegen.tensorlike import of_torch
from fusegen.trace import Traced
from fusegen.unsaid import ADDING, NotKnownYet, Telling, Told, aligned, current_call, told_by

T = TypeVar("T")


@dataclass(frozen=True)
class Chosen:
    """A compiled chain, with the tensors that its function makes for it, those that are views of
    others, and what checks the input.

    order says which of the results of all its chains each of the function's is, or which tensor it
    is as it was given; it is empty where the function gives what the chain gives.
    """

    fused: Fused
    made: Mapping[str, Tensor] = field(default_factory=dict)
    views: Mapping[str, View] = field(default_factory=dict)
    wanted: Any = None
    order: tuple[int | str, ...] = ()
    # Chains for other results, by what stands for the input of each.
    rest: tuple[tuple[str, Fused], ...] = ()
    main: str = ""  # the view of the input that the chain begins with, where it is not that itself
    drawn: Drawn | None = None  # what each call makes anew of what is made
    # Chains of which the results are seen otherwise: the name of each, and of its input.
    before: tuple[tuple[str, str, Fused], ...] = ()
    form: Any = None  # of what the function gives, where that is no tuple of tensors
    seen_as: str = ""  # the name by which the first chain's result is seen otherwise
    # The tensors that it neither makes nor sees in others, but for the input.
    wants: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = [*self.fused.chain.given, *(n for n in self.order if isinstance(n, str))]
        for main, fused in (*self.rest, *[(main, fused) for _, main, fused in self.before]):
            names += [main, *fused.chain.given]
        found = {*self.made, *self.views, *[name for name, *_ in self.before], self.seen_as, ""}
        wants = tuple(n for n in dict.fromkeys(names) if n not in found)
        object.__setattr__(self, "wants", wants)  # and no cached property: dynamo reads it

    @property
    def is_plain(self) -> bool:
        """Whether it is one chain of the tensors that are given, as they are given."""
        return not (self.views or self.order or self.drawn or self.before)

    def called(
        self, x: str, tensor: Callable[[str], Tensor], run: Callable[..., Any] = Fused.__call__
    ) -> Any:
        """What the function gives, where the tensors that it neither makes nor sees in others are
        told.
        """
        if self.drawn is not None:
            made = {**self.made, **self.drawn.again()}
            return replace(self, made=made, drawn=None).called(x, tensor, run)
        if self.before:
            tensor = self._seen(x, tensor, run)
        found = run(
            self.fused, self.taken(self.main or x, tensor), *self.operands(self.fused, tensor)
        )
        if not self.order:
            return found
        if self.seen_as:  # the first chain's result, of which some results are views
            first = found[0] if isinstance(found, tuple) else found
            tensor = _beside({self.seen_as: first}, tensor)
        results = [*found] if isinstance(found, tuple) else [found]
        for main, fused in self.rest:
            found = run(fused, self.taken(main, tensor), *self.operands(fused, tensor))
            results += found if isinstance(found, tuple) else [found]
        given = [results[i] if isinstance(i, int) else self._handed(i, tensor) for i in self.order]
        return put_together(self.form, given)

    def _handed(self, name: str, tensor: Callable[[str], Tensor]) -> Tensor:
        """A tensor that is given as a result: what is made is kept, and another one is given."""
        found = self.taken(name, tensor)
        while name in self.views:
            name = self.views[name].of
        return found.clone() if name in self.made else found

    def _seen(
        self, x: str, tensor: Callable[[str], Tensor], run: Callable[..., Any]
    ) -> Callable[[str], Tensor]:
        """The tensors, with the results of the chains that go before."""
        known: dict[str, Tensor] = {}
        run = run if run is Fused.reference else Fused.__call__  # and to no out
        found = _beside(known, tensor)
        for name, main, fused in self.before:
            known[name] = run(fused, self.taken(main or x, found), *self.operands(fused, found))
        return found

    def operands(self, fused: Fused, tensor: Callable[[str], Tensor]) -> list[Tensor]:
        """The operands of one of its chains."""
        return [self.taken(name, tensor) for name in fused.chain.given]

    def taken(self, name: str, tensor: Callable[[str], Tensor]) -> Tensor:
        """The tensor of this name."""
        if name in self.views:
            view: Tensor = self.views[name].taken(lambda other: self.taken(other, tensor))
            return view
        return self.made[name] if name in self.made else tensor(name)


def _beside(
    known: Mapping[str, Tensor], tensor: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """Tensors by their names, of which some are known otherwise."""
    return lambda name: known[name] if name in known else tensor(name)


class _Shape(NamedTuple):
    """What is told of a value that is not there."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any
    like: Tensor  # without memory


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

    def view(
        self, value: Expr, method: str, /, *args: Any, is_last_resort: bool = False, **named: Any
    ) -> Expr | None:
        """What stands for a view of a tensor; None for what is computed, and of the first tensor,
        whose views are steps of the chain, if that is not the last resort. It is taken of what a
        value is computed of where that is the same, else of the result of a chain to it.
        """
        is_computed = value.op != "input"
        tracing = current()
        assert tracing is not None
        if not is_last_resort and (is_computed or ir.name_of(value) == self._input):
            return None
        if is_computed and method not in ADDING and is_elementwise(value):
            (leaf,) = ir.inputs([value])
            if self.of(leaf).shape == self.of(value).shape:
                part = self.view(leaf, method, *args, is_last_resort=True, **named)
                assert part is not None
                return ir.substitute([value], {leaf: part})[0]
        name = ir.name_of(self.there(value))
        told = {word: self._others(each) for word, each in named.items()}
        view = View(name, method, self._others(args), told)
        try:
            part = view.taken(self._tensor)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise ChainError(f"x.{method}: {error}") from error
        return aligned(tracing.hold(part, f"{name}_part", view))

    def _others(self, told: Any) -> Any:
        """What a view is told, with names of tensors."""
        if isinstance(told, tuple | list):
            return type(told)(map(self._others, told))
        return Other(ir.name_of(self.there(told))) if isinstance(told, Expr) else told

    def there(self, value: Expr) -> Expr:
        """A tensor; of a value that is computed, what stands for the result of a chain to it."""
        tracing = current()
        assert tracing is not None
        if value.op == "input":
            return value
        if value not in tracing.before:
            own = self.of(value)  # of which no element is there yet; 0 is an index of all
            like = torch.zeros((), dtype=own.dtype, device=own.device).expand(own.shape)
            tracing.before[value] = tracing.hold(like, "computed")
        return tracing.before[value]

    def aligned(self, value: Expr) -> Expr:
        """What stands for a tensor; where that has the input's first axes, or is one wide there,
        for it along those: as a view with new axes behind its own, which are dropped again.
        """
        shape, own = self._given[self._input].shape, self._tensor(ir.name_of(value)).shape
        beyond = len(shape) - len(own)
        are_first = all(n in (1, m) for n, m in zip(own, shape, strict=False))
        if beyond < 1 or not are_first or all(n == 1 for n in own):
            return value
        found = self.view(value, "__getitem__", (..., *[None] * beyond))
        tracing = current()
        assert found is not None
        assert tracing is not None
        tracing.aligned.add(ir.name_of(found))
        for _ in range(beyond):
            found = lookup("squeeze")(found, -1)
        return found

    def of(self, value: Expr) -> Told:
        """The value's sizes, type and device."""
        if value.op == "input":
            return self._tensor(ir.name_of(value))
        if value not in self._known:
            with torch._C.DisableTorchFunction():  # of modes that look on
                self._known[value] = self._computed(value)
        return self._known[value]

    def require_floats(self, loose: Container[str]) -> None:
        """Raise ArgumentError where what has to be numbers for a chain is integers."""
        x, others = self._given[self._input], {**self._own, **self._given}
        require_floats(loose, [*others], [x, *others.values()])

    def require_fit(self, chosen: Chosen, held: Mapping[str, Tensor]) -> None:
        """Raise what a call would, where a chain does not take the tensors; held has what is like
        those that other chains give.
        """
        tensor = _beside({name: held[name] for name, *_ in chosen.before}, self.__getitem__)
        before = [(main or self._input, fused) for _, main, fused in chosen.before]
        for name, fused in (*before, (chosen.main or self._input, chosen.fused), *chosen.rest):
            chain, x = fused.chain, chosen.taken(name, tensor)
            found = chosen.operands(fused, tensor)
            operands = dict(zip(chain.given, found, strict=True))
            seed = torch.zeros(1, dtype=torch.int64, device=x.device)
            tensors = [x, *[operands.get(name, seed) for name in chain.operands]]
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
        # Operations' bodies are run meanwhile, which are no part of what is traced.
        cast = Context().run(fused.under_autocast, given[x], [given[n] for n in fused.chain.given])
        empty = {n: torch.empty_like(t, device="meta") for n, t in given.items()}
        try:
            told = run_eagerly((cast or fused).chain, empty[x], empty)
        except (RuntimeError, IndexError, ValueError) as error:
            raise ChainError(f"{fused.chain.text}: {error}") from error
        return _Shape(told.shape, told.dtype, given[x].device, told)


class _Making(TorchFunctionMode):
    """Notes which tensors a function makes while it is traced: of numbers, and of each other."""

    def __init__(self, made: MutableMapping[int, Tensor], drawing: Drawing) -> None:
        super().__init__()
        self.made, self.drawing = made, drawing

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.tolist, Tensor.numpy):
            self.drawing.refuse_numbers(args)
        tensors = [t for t in every(args, kwargs) if isinstance(t, Tensor)]
        if any(map(is_assigned, tensors)) and getattr(function, "__name__", "") != "__get__":
            return of_torch(Expr, function, types, args, kwargs)
        found = function(*args, **(kwargs or {}))
        if all(id(t) in self.made for t in tensors):
            results = found if isinstance(found, tuple | list) else (found,)
            self.made.update({id(t): t for t in results if isinstance(t, Tensor)})
        return found


def chosen_of(
    found: Traced, whose: Container[str], compile: Callable[..., Fused] = Fused
) -> Chosen:
    """What is traced, compiled: of the tensors that it holds those are made that are nobody's."""
    before = tuple((name, main, compile(chain)) for name, main, chain in found.before)
    others = {*found.views, *[name for name, *_ in before], found.seen_as}
    made = {n: t for n, t in found.held.items() if n not in whose and n not in others}
    rest = tuple((main, compile(chain)) for main, chain in found.rest)
    parts = (found.views, found.wanted, found.order, rest, found.main, found.drawn, before)
    form, seen_as = found.form, found.seen_as
    return Chosen(compile(found.chain, found.loose), made, *parts, form=form, seen_as=seen_as)


class Answers:
    """The chains of one function, or of one module, which is traced for each call that differs, and
    the tensors that it makes meanwhile.
    """

    def __init__(self) -> None:
        self._chosen: dict[Any, Chosen] = {}
        self._fused: dict[Chain, Fused] = {}
        self._made: MutableMapping[int, Tensor] = WeakValueDictionary()  # which some remember

    def noting(self, trace: Callable[[], T], drawing: Drawing | None = None) -> T:
        """What is traced, with notes of what is made and drawn meanwhile."""
        drawing = drawing or Drawing()
        with making(self._made, drawing.refuse_numbers), _Making(self._made, drawing), drawing:
            found = trace()
        if drawing.has_drawn and current_call() is None:
            raise NotKnownYet("the function draws numbers, which each call does")
        return found

    def traced(self, trace: Callable[[], Traced]) -> Traced:
        """The same of what holds tensors, with what has to be drawn of those."""
        drawing = Drawing()
        found = self.noting(trace, drawing)
        return found._replace(drawn=drawing.drawn(found.held))

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
        tensors = (*given.values(), *own.values())
        kinds = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        key = (mode, torch.get_default_dtype(), *given, *kinds)
        if count_modes():  # of which one may have other tensors for those that are made
            return self._find(_Call(given, own), trace)
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
                    traced = self.traced(trace)
                if telling < Telling.ALL:
                    call.require_floats(traced.loose)
                found = chosen_of(traced, call, self._compiled)
                call.require_fit(found, traced.held)
                return found
            except Exception as error:
                problems.append(error)
        raise next((p for p in problems if isinstance(p, ArgumentError)), problems[-1])

    def _compiled(self, chain: Chain, loose: object = None) -> Fused:
        """The chain, compiled once; what is loose was found not to be integers."""
        if (found := self._fused.get(chain)) is None:
            remember(self._fused, chain, found := Fused(chain))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Answers, ()  # it holds no state but caches, and those are one module's
