"""Layer: a chain as an nn.Module, which holds operands and knows whether it trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from fusegen.answers import Answers, Chosen, chosen_of
from fusegen.arguments import check_tensor
from fusegen.borrowing import Place, in_mode, lent_by, ties_of, traced
from fusegen.dsl import chain
from fusegen.errors import ArgumentError, ChainError, UnsupportedError
from fusegen.inlining import applied
from fusegen.ir import Expr
from fusegen.ops import RUNNING, Chain, Op, Step
from fusegen.optional import Optionals
from fusegen.parameters import operand_of
from fusegen.runtime import Fused
from fusegen.standing import known
from fusegen.target import H200_GB_PER_S
from fusegen.trace import Traced
from fusegen.unsaid import NotKnownYet

# What a recipe may change of a module's parts, as torch's `update_bn` does the momentum.
_SETTINGS = ("momentum", "eps", "p")


class Layer(nn.Module):
    """A chain as a module: `Layer("add_channel(bias) | gelu", bias=nn.Parameter(...))`.

    What is passed by the name of an operand is held: an nn.Parameter as a parameter, any other
    tensor as a buffer. The operands that are left over are passed to forward, behind x, in the
    chain's order or by name. After `eval()` dropout passes everything, and norms use their running
    statistics, where they have any.

    Instead of a chain the source may be a module: its forward is traced, once for each combination
    of what its parts' `training` is, and its parameters and buffers stay its own; `layer.module` is
    it. Raises ChainError for a mistake in the chain, or for a module whose forward is none, and
    ArgumentError for a name that is no operand's, or that a module cannot hold.
    """

    def __init__(
        self, source: str | Chain | Op | nn.Module | Callable[..., Any], /, **held: Tensor
    ) -> None:
        super().__init__()
        if isinstance(source, torch.jit.ScriptModule):
            raise ArgumentError(
                f"got a {type(source).__name__}, whose forward is no Python that could be traced; "
                "give the module that it was made from"
            )
        self._lent: dict[str, Place] = {}
        self._ties: tuple[tuple[Place, Place], ...] = ()  # places of one tensor of the module
        self._parts: tuple[nn.Module, ...] = (self,)
        self._settings: tuple[Place, ...] = ()  # of its parts, that something may change
        self._by_mode: dict[tuple[Any, ...], Chosen | Answers] = {}
        self._optionals: Optionals | None = None  # of a module's forward
        self._input = "x"  # what x may be called
        if isinstance(source, nn.Module) and not isinstance(getattr(source, "chain", None), Chain):
            self.module, self.training = source, source.training
            self._parts = tuple(source.modules())
            self._settings = tuple(
                (part, name)
                for part in self._parts
                for name in _SETTINGS
                if isinstance(vars(part).get(name, ""), int | float | None)
            )
            self._lend()
            self._input = next(iter(inspect.signature(source.forward).parameters), "x")
            self._optionals = Optionals(source.forward)
            self._find_usual()
        else:
            found = chain(source)
            fused = Fused(found), Fused(_in_evaluation(found))
            self._by_mode = {(True,): Chosen(fused[0]), (False,): Chosen(fused[1])}
        self._held = frozenset(held)
        for name, tensor in held.items():
            if name in self._lent:
                raise ArgumentError(f"operand {name!r} is a tensor of the module itself")
            self._hold(name, tensor)

    def _lend(self) -> None:
        """Find the module's tensors; of one that is in several places, the chains take one."""
        self._lent, self._ties = lent_by(self.module), ties_of(self.module)
        self._by_mode.clear()

    def _find_usual(self) -> None:
        """Find the chains for the usual modes, for tracers that will not look into this. What is
        wrong in another than the module's is told when it is called in that.
        """
        self._find()
        for is_training in (True, False):
            with in_mode(self.module, is_training=is_training), suppress(Exception):
                self._find()

    def _apply(self, *args: Any, **kwargs: Any) -> Layer:
        """What `to`, `half` and the like do; a module may do otherwise with tensors of new types,
        as one does that casts to its weight's.
        """
        before = self._types()
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self._types() != before:
            self._by_mode.clear()
            self._find_usual()
        return self

    def _types(self) -> list[torch.dtype]:
        """The types of the module's tensors."""
        return [self._own(name).dtype for name in self._lent]

    def _find(self, also: Collection[str] = ()) -> Chosen | Answers:
        """The compiled chain for the modes in which the parts are, and for parameters that are
        given although they have a default; or one for each answer to what forward asks.
        """
        modes: tuple[Any, ...] = tuple([part.training for part in self._parts])
        if self._settings:
            modes += tuple([getattr(*setting) for setting in self._settings])
        modes = (*modes, *sorted(also)) if also else modes
        if self._ties and any(getattr(*a) is not getattr(*b) for a, b in self._ties):
            self._lend()
        found = self._by_mode.get(modes)
        return self._trace(modes, also) if found is None else found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _trace(self, modes: tuple[Any, ...], also: Collection[str]) -> Chosen | Answers:
        answers = Answers()
        try:
            found = answers.traced(partial(traced, self.module, self._lent, also))
            self._by_mode[modes] = chosen_of(found, self._lent)
        except (NotKnownYet, UnsupportedError):  # of which a call may make another chain
            self._by_mode[modes] = answers
        return self._by_mode[modes]

    def _hold(self, name: str, tensor: Tensor) -> None:
        takes = self._takes()
        if name not in takes:
            which = f"the chain {self.extra_repr()}" if self.extra_repr() else "forward"
            raise ArgumentError(
                f"no operand is called {name!r}: {which} takes {', '.join(('x', *takes))}"
            )
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"operand {name!r}: got a {type(tensor).__name__}, wanted an nn.Parameter or a "
                "tensor; leave it out to pass it in each call"
            )
        try:
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        except KeyError as error:
            raise ArgumentError(
                f"operand {name!r} cannot be held: {error.args[0]}; call it something else"
            ) from error

    def _takes(self) -> tuple[str, ...]:
        """The operands that are held or passed, behind the input."""
        found, optionals = self._usual(), self._optionals
        if isinstance(found, Answers):
            assert optionals is not None
            return optionals.order
        optional = () if optionals is None else sorted(optionals.names)
        return tuple(dict.fromkeys((*found.fused.chain.given, *optional)))

    def _usual(self) -> Chosen | Answers:
        """Of a module, what it is in the modes in which its parts are; else as it trains."""
        return self._find() if "module" in self._modules else self._by_mode[True,]

    @property
    def chain(self) -> Chain:
        """The chain: of a module, in the modes in which its parts are; else as it trains. Raises
        ChainError where the module's forward has one for each shape or type.
        """
        found = self._usual()
        if isinstance(found, Answers):
            raise ChainError(
                f"{type(self.module).__name__} asks for sizes or types, and has a chain for each; "
                "compiled_for(x, ...) gives one"
            )
        return found.fused.chain

    def compiled_for(self, x: Tensor, *operands: Tensor, **named: Tensor) -> Fused:
        """The compiled chain for a call with these tensors."""
        return self._prepared(x, operands, named)[0].fused

    def explain(
        self,
        x: Tensor,
        *operands: Tensor,
        target: str | None = None,
        bandwidth: float = H200_GB_PER_S,
        **named: Tensor,
    ) -> str:
        """What a call with these tensors does: what torch takes of tensors and moves, and the
        kernels of each chain as `Fused.explain` tells of them, for a target, at a bandwidth in
        GB/s.
        """
        from fusegen.telling import explained  # here, because a call needs no text

        def told(chosen: Chosen, given: Mapping[str, Tensor]) -> str:
            return explained(chosen, self._input, self._among(given), target, bandwidth)

        found: str = self._tried(told, x, operands, named)
        return found

    def forward(self, x: Tensor | None = None, /, *operands: Tensor, **named: Tensor) -> Any:
        """What the compiled chain gives for x, the operands that are held and those passed here."""
        others = (*operands, *named.values())
        if isinstance(x, Expr) or (others and any(isinstance(t, Expr) for t in others)):
            return self._in_another(x, operands, named)
        if x is None:
            x = named.pop(self._input, None)
        return self._tried(self._called, x, operands, named)

    def _tried(
        self,
        asked: Callable[[Chosen, Mapping[str, Tensor]], Any],
        x: Any,
        operands: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        """What is asked of the chain for these tensors: of one traced for the call, where the
        module's own chain does not take them.
        """
        chosen, given = self._prepared(x, operands, named)
        try:
            return asked(chosen, given)
        except (ArgumentError, UnsupportedError) as error:
            modes = next((m for m, other in self._by_mode.items() if other is chosen), None)
            if self._optionals is None or modes is None:
                raise
            self._by_mode[modes] = Answers()
            try:
                return asked(*self._prepared(x, operands, named))
            except Exception:
                self._by_mode[modes] = chosen
                raise error from None

    def _called(self, chosen: Chosen, given: Mapping[str, Tensor]) -> Any:
        return chosen.called(self._input, self._among(given))

    def _among(self, given: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
        """A call's tensors by their names: those that it is given, and the layer's own."""
        return lambda name: given[name] if name in given else self._own(name)

    def _in_another(self, x: Any, operands: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a function that is traced itself computes by this."""
        if "module" in self._modules:
            return self.module(*([] if x is None else [x]), *operands, **named)
        chosen, given = self._prepared(x, operands, named)
        chain = chosen.fused.chain
        tensors = {n: given[n] if n in given else self._own(n) for n in chain.given}
        return applied(chain, given[self._input], {n: known(t, n) for n, t in tensors.items()})

    def _prepared(
        self, x: Tensor | None, operands: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> tuple[Chosen, dict[str, Any]]:
        """The compiled chain for a call, and the tensors that it is given, by name."""
        also: Collection[str] = ()
        if self._optionals is not None and (operands or named or self._held):
            operands, named = self._optionals.by_name(operands, named)
            also = self._optionals.names.intersection({*named, *self._held})
        found = self._find(also)
        if isinstance(found, Answers):
            answered = self._answered_outside if is_dynamo_compiling() else self._answered
            result: tuple[Chosen, dict[str, Any]] = answered(found, also, x, operands, named)
            return result
        if found.wanted is not None and isinstance(x, Tensor):
            found.wanted.check(x)
        own = (self._input, *self._held)
        wanted = [n for n in found.wants if n not in self._lent and n not in own]
        takes = [n for n in wanted if n not in named] if named else wanted
        if len(operands) != len(takes) or not named.keys() <= {*wanted}:
            raise ArgumentError(self._mistaken(found.fused.chain, wanted, operands, named))
        return found, {self._input: x, **dict(zip(takes, operands, strict=True)), **named}

    def _mistaken(
        self,
        chain: Chain,
        wanted: Sequence[str],
        operands: Sequence[Tensor],
        named: Mapping[str, Tensor],
    ) -> str:
        """What is wrong with the arguments."""
        optionals = self._optionals
        numbers = [n for n in named if optionals is not None and n in optionals.numbers]
        if numbers:
            return (
                f"got {numbers[0]!r}, but a parameter of forward with a default is a number of the "
                "chain; make it an attribute of the module, or give it no default and pass a tensor"
            )
        return (
            f"got {len(operands)} operands by position and {[*named]} by name, wanted "
            f"{', '.join(('x', *wanted))}: the layer holds the others of {chain.text!r}"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _answered_outside(self, *args: Any) -> tuple[Chosen, dict[str, Any]]:
        return self._answered(*args)

    def _answered(
        self,
        answers: Answers,
        also: Collection[str],
        x: Tensor | None,
        operands: tuple[Tensor, ...],
        named: Mapping[str, Tensor],
    ) -> tuple[Chosen, dict[str, Any]]:
        """The same for a module whose forward asks what only a call tells."""
        assert self._optionals is not None
        held: dict[str, Any] = {n: self._own(n) for n in self._held}
        order = (self._input, *self._optionals.order)
        passed = [n for n in order if n not in held]
        given = {**dict(zip(passed, (x, *operands), strict=False)), **held, **named}
        wanted = (self._input, *self._optionals.required)
        is_whole = all(given.get(n) is not None for n in wanted)
        if not is_whole or not given.keys() <= {*order} or len(operands) >= len(passed):
            count = len(operands) + (x is not None)
            raise ArgumentError(
                f"got {count} tensors by position and {[*named]} by name, wanted "
                f"{', '.join(n for n in wanted if n not in self._held)}, as "
                f"{type(self.module).__name__} takes them"
            )
        for name, tensor in given.items():
            check_tensor(name, tensor)
        own = {name: getattr(*place) for name, place in self._lent.items()}

        def trace() -> Traced:
            found = traced(self.module, self._lent, also)
            own.update({name: getattr(*place) for name, place in self._lent.items()})
            return found

        given = {n if n == self._input else operand_of(n): given[n] for n in given}
        found = answers.chosen(trace, given, own)
        if found.wanted is not None:
            found.wanted.check(given[self._input])
        return found, given

    def _own(self, name: str) -> Tensor:
        owner, attribute = self._lent.get(name, (self, name))
        tensor: Tensor = getattr(owner, attribute)
        return tensor

    def extra_repr(self) -> str:
        """The chain's text."""
        found = self._usual()
        return "" if isinstance(found, Answers) else repr(found.fused.chain.text)


def _in_evaluation(found: Chain) -> Chain:
    return Chain(tuple(map(_evaluating, found.settled)))


def _evaluating(step: Step) -> Step:
    """The step as it is outside of training; a norm without running statistics stays as it is."""
    definition = step.definition
    if definition is None or (definition.training and not _has_statistics(step)):
        return step
    name = definition.training or "training"
    drawn = {p.name for p in definition.parameters if p.is_drawn}
    return replace(
        step,
        attributes=tuple((n, False if n == name else value) for n, value in step.attributes),
        operands=tuple((p, n) for p, n in step.operands if p not in drawn),
    )


def _has_statistics(step: Step) -> bool:
    return not {*RUNNING}.isdisjoint(dict(step.operands))
