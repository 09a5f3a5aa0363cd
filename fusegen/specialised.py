"""Specialised: a function that asks what only a call tells, as a chain for each answer.

A function is traced once, before anything is known of the tensors that it will be given. One that
computes with their sizes, counts their axes or asks for their types has to wait: it is traced again
for each combination of shapes and types that it is called with. Where the chain comes out the same,
so is what is built.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusegen.answers import Answers, Chosen
from fusegen.arguments import check_tensor, kinds_of
from fusegen.copying import Cached
from fusegen.errors import ArgumentError, ChainError
from fusegen.ir import Expr
from fusegen.ops import Chain
from fusegen.optional import Optionals
from fusegen.parameters import NUMBERS, operand_of
from fusegen.plan import remember
from fusegen.runtime import Fused
from fusegen.target import H200_GB_PER_S
from fusegen.trace import traced

_MANY = 16
_TOO_MANY = (
    "{} was called with {} different numbers, each of which is a chain of its own, that is built; "
    "pass what changes from call to call as a tensor, such as torch.tensor(0.5)"
)


class Specialised(Cached):
    """A function that asks for sizes or types, compiled: `fusegen.compile` gives it in the place of
    a `Fused`, and it is called as one.

    Each combination of shapes, types and numbers is traced when it is first seen, and what the
    function computes of sizes is a number in its chain, so that other numbers are other chains, and
    built anew. Tensors that the function makes, such as a mask, are made then too. `compiled_for`
    gives the compiled chain for some tensors. Under torch.compile a call of it is outside of the
    graph.
    """

    def __init__(self, function: Callable[..., Any], reason: str) -> None:
        self._function, self._reason = function, reason
        self._made_of = self._otherwise = (Specialised, (function, reason))
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self._forward = forward = getattr(function, "forward", function)
        self._signature = inspect.signature(forward)
        optionals = Optionals(forward)
        self._wanted = [next(iter(self._signature.parameters)), *optionals.required]
        self._optional = sorted(optionals.names)
        self._answers = Answers()
        self._by_numbers: dict[Any, Answers] = {}  # what is traced with numbers that calls give
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
        if out is not None and "out" in self._signature.parameters:  # which is the function's own
            out, named = None, {**named, "out": out}
        key = kinds_of(args) if not named else None
        if key in self._known:
            return self._known[key](*args, out=out)
        if any(isinstance(value, Expr) for value in (*args, *named.values())):
            return self._function(*args, **named)  # in a function that is traced itself
        given, numbers = self._given(args, named)
        chosen = self._chosen(given, numbers)
        x, *operands = given
        if key is not None and chosen.is_plain and chosen.fused.chain.given == (*operands,):
            remember(self._known, key, chosen.fused)
        if out is not None and chosen.order:
            raise ArgumentError(f"{self.__name__}: out receives one result, and it has several")
        run = Fused.__call__ if out is None else partial(Fused.__call__, out=out)
        return chosen.called(x, given.__getitem__, run)

    def _given(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors, and the numbers, by the names of the parameters."""
        if not named and len(args) == len(self._wanted):
            given = dict(zip(self._wanted, args, strict=True))
        else:
            try:
                given = self._signature.bind(*args, **named).arguments
            except TypeError as error:
                raise ArgumentError(f"{self.__name__}{self._signature}: {error}") from None
            given = {n: v for n, v in given.items() if v is not None or n not in self._optional}
        x, *others = given
        of_functions = others if self._function is self._forward else []
        numbers = {n: given.pop(n) for n in of_functions if isinstance(given[n], NUMBERS)}
        for name, value in given.items():
            check_tensor(name, value)
        x, *operands = given
        return {x: given[x], **{operand_of(name): given[name] for name in operands}}, numbers

    def _chosen(self, given: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Chosen:
        known = (*self._wanted, *self._optional)
        also = tuple([name for name in given if name not in known or name in self._optional])
        if not numbers:
            return self._answers.chosen(partial(traced, self._function, given=also), given, {})
        key = tuple([(name, type(value), value) for name, value in sorted(numbers.items())])
        if key not in self._by_numbers:
            remember(self._by_numbers, key, Answers())
            if len(self._by_numbers) == _MANY:
                warnings.warn(_TOO_MANY.format(self.__name__, _MANY), stacklevel=4)
        function: Any = partial(self._function, **numbers)
        function.__name__ = self.__name__
        return self._by_numbers[key].chosen(partial(traced, function, given=also), given, {})

    def compiled_for(self, *args: Tensor, **named: Tensor) -> Fused:
        """The compiled chain for a call with these tensors, of which shapes and types count; what
        the function makes is an operand of it, behind the function's own.
        """
        return self._chosen(*self._given(args, named)).fused

    def reference(self, *args: Tensor, **named: Tensor) -> Any:
        """The same chain run with torch's own operations, one by one."""
        given, numbers = self._given(args, named)
        chosen = self._chosen(given, numbers)
        return chosen.called(next(iter(given)), given.__getitem__, Fused.reference)

    @property
    def chain(self) -> Chain:
        """Raises ChainError: there is one for each answer."""
        self._refuse()

    def source(self, *_: Any, **__: Any) -> str:
        """Raises ChainError: `compiled_for(x).source()` has it."""
        self._refuse()

    def explain(
        self,
        *args: Any,
        target: str | None = None,
        bandwidth: float = H200_GB_PER_S,
        **named: Any,
    ) -> str:
        """What a call with these tensors does: what torch takes of tensors and moves, and the
        kernels of each chain as `Fused.explain` tells of them, for a target, at a bandwidth in
        GB/s. Raises ChainError where no tensors are given.
        """
        if not (args or named):
            self._refuse()
        given, numbers = self._given(args, named)
        chosen = self._chosen(given, numbers)
        from fusegen.telling import explained  # here, because a call needs no text

        return explained(chosen, next(iter(given)), given.__getitem__, target, bandwidth)

    def _refuse(self) -> NoReturn:
        raise ChainError(
            f"{self.__name__} has a chain for each shape and type that it is called with; ask "
            f"compiled_for(x, ...) for one ({self._reason})"
        )

    def __repr__(self) -> str:
        return f"fusegen.compile({self.__name__})"
