"""Optional tensors: parameters of a function whose default is None, which a call may give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


class Optionals:
    """Which parameters of a function, behind its first, are None unless a call gives a tensor; of
    a chain that is no function, which is None, none. compile gives what the function is compiled
    to for tensors in the place of some of them.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None,
        compile: Callable[[frozenset[str]], Any] | None = None,
    ) -> None:
        signature = inspect.Signature() if function is None else inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        self.order = tuple(p.name for p in parameters if p.kind != p.KEYWORD_ONLY)
        self.names = frozenset(p.name for p in parameters if p.default is None)
        self.required = tuple(p.name for p in parameters if p.default is p.empty)
        self.numbers = frozenset(self.order) - self.names - {*self.required}
        self.compile = compile
        self.found: dict[frozenset[str], Any] = {}

    def by_name(
        self, operands: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments behind the first by position and by name: all by name where one of these
        parameters is among them, and those that are None left out.
        """
        given = dict(zip(self.order, operands, strict=False))
        is_plain = self.names.isdisjoint({*given, *named})
        if is_plain or len(operands) > len(self.order) or not given.keys().isdisjoint(named):
            return operands, dict(named)
        told = {**given, **named}
        return (), {n: v for n, v in told.items() if v is not None or n not in self.names}

    def chosen(
        self, own: Any, operands: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """What the function is compiled to for these arguments, own where none of these parameters
        is given, and the arguments.
        """
        operands, named = self.by_name(operands, named)
        also = self.names.intersection(named)
        if also and also not in self.found:
            assert self.compile is not None
            self.found[also] = self.compile(also)
        return (self.found[also] if also else own), operands, named
