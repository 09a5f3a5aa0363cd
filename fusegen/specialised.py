"""Specialised: a function that asks what only a call tells, as a chain for each answer.

A function is traced once, before anything is known of the tensors that it will be given. One that
computes with their sizes, counts their axes or asks for their types has to wait: it is traced again
for each combination of shapes and types that it is called with. Where the chain comes out the same,
so is what is built.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fusegen.answers import Answers, Chosen
from fusegen.arguments import check_tensor, kinds_of
from fusegen.errors import ArgumentError, ChainError
from fusegen.ir import Expr
from fusegen.ops import Chain
from fusegen.optional import Optionals
from fusegen.parameters import operand_of
from fusegen.plan import remember
from fusegen.runtime import Fused
from fusegen.trace import traced


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
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        forward = getattr(function, "forward", function)
        self._signature = inspect.signature(forward)
        optionals = Optionals(forward)
        self._wanted = [next(iter(self._signature.parameters)), *optionals.required]
        self._optional = sorted(optionals.names)
        self._answers = Answers()
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
        key = kinds_of(args) if not named else None
        if key in self._known:
            return self._known[key](*args, out=out)
        if any(isinstance(value, Expr) for value in (*args, *named.values())):
            return self._function(*args, **named)  # in a function that is traced itself
        given = self._given(args, named)
        chosen = self._chosen(given)
        x, *operands = given
        if key is not None and chosen.is_plain and chosen.fused.chain.given == (*operands,):
            remember(self._known, key, chosen.fused)
        if out is not None and chosen.order:
            raise ArgumentError(f"{self.__name__}: out receives one result, and it has several")
        run = Fused.__call__ if out is None else partial(Fused.__call__, out=out)
        return chosen.called(x, given.__getitem__, run)

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
        x, *operands = given
        return {x: given[x], **{operand_of(name): given[name] for name in operands}}

    def _chosen(self, given: Mapping[str, Tensor]) -> Chosen:
        also = tuple([name for name in self._optional if name in given])
        return self._answers.chosen(partial(traced, self._function, given=also), given, {})

    def compiled_for(self, *args: Tensor, **named: Tensor) -> Fused:
        """The compiled chain for a call with these tensors, of which shapes and types count; what
        the function makes is an operand of it, behind the function's own.
        """
        return self._chosen(self._given(args, named)).fused

    def reference(self, *args: Tensor, **named: Tensor) -> Any:
        """The same chain run with torch's own operations, one by one."""
        given = self._given(args, named)
        return self._chosen(given).called(next(iter(given)), given.__getitem__, Fused.reference)

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

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = getattr(self, "__qualname__", "")
        try:
            is_decorated = pkgutil.resolve_name(f"{self.__module__}:{name}") is self
        except (AttributeError, ImportError, ValueError):
            is_decorated = False
        return name if is_decorated else (Specialised, (self._function, self._reason))

    def __deepcopy__(self, memo: object) -> Specialised:
        return self  # it holds no state but caches
