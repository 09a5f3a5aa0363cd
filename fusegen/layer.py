"""Layer: a chain as an nn.Module, which holds operands and knows whether it trains."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fusegen.borrowing import Wanted, in_mode, lent_by, traced
from fusegen.dsl import chain
from fusegen.errors import ArgumentError
from fusegen.ops import RUNNING, Chain, Op, Step
from fusegen.optional import Optionals
from fusegen.runtime import Fused


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
        self._lent: dict[str, tuple[nn.Module, str]] = {}
        self._parts: tuple[nn.Module, ...] = (self,)
        self._by_mode: dict[tuple[bool | str, ...], Fused] = {}
        self._optionals: Optionals | None = None  # of a module's forward
        self._input = "x"  # what x may be called
        self._wanted: Wanted | None = None  # of x
        if isinstance(source, nn.Module) and not isinstance(getattr(source, "chain", None), Chain):
            self.module, self.training = source, source.training
            self._lent, self._parts = lent_by(source), tuple(source.modules())
            self._input = next(iter(inspect.signature(source.forward).parameters), "x")
            self._optionals = Optionals(source.forward)
            self._find_usual()
        else:
            found = chain(source)
            self._by_mode = {(True,): Fused(found), (False,): Fused(_in_evaluation(found))}
        self._held = frozenset(held)
        for name, tensor in held.items():
            if name in self._lent:
                raise ArgumentError(f"operand {name!r} is a tensor of the module itself")
            self._hold(name, tensor)

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

    def _find(self, also: Collection[str] = ()) -> Fused:
        """The compiled chain for the modes in which the parts are, and for parameters that are
        given although they have a default.
        """
        modes: tuple[bool | str, ...] = tuple([part.training for part in self._parts])
        modes = (*modes, *sorted(also)) if also else modes
        found = self._by_mode.get(modes)
        return self._trace(modes, also) if found is None else found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _trace(self, modes: tuple[bool | str, ...], also: Collection[str]) -> Fused:
        chain, self._wanted = traced(self.module, self._lent, also)
        found = self._by_mode[modes] = Fused(chain)
        return found

    def _hold(self, name: str, tensor: Tensor) -> None:
        if name not in self.chain.given:
            raise ArgumentError(
                f"no operand is called {name!r}: the chain {self.chain.text!r} takes "
                f"{', '.join(('x', *self.chain.given))}"
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

    @property
    def chain(self) -> Chain:
        """The chain: of a module, in the modes in which its parts are; else as it trains."""
        return (self._find() if "module" in self._modules else self._by_mode[True,]).chain

    def forward(self, x: Tensor | None = None, *operands: Tensor, **named: Tensor) -> Any:
        """What the compiled chain gives for x, the operands that are held and those passed here."""
        if x is None:
            x = named.pop(self._input, None)
        also: Collection[str] = ()
        if self._optionals is not None and (operands or named):
            operands, named = self._optionals.by_name(operands, named)
            also = self._optionals.names.intersection(named)
        fused = self._find(also)
        if self._wanted is not None and isinstance(x, Tensor) and x.dim() not in self._wanted.axes:
            norm, axes = self._wanted
            raise ArgumentError(
                f"x has {x.dim()} axes, {tuple(x.shape)}, but {norm} wants "
                f"{' or '.join(map(str, axes))}, the batch first; without one give x[None]"
            )
        names = fused.chain.given
        passed = [n for n in names if n not in self._lent and n not in self._held]
        takes = [n for n in passed if n not in named] if named else passed
        if len(operands) != len(takes) or not named.keys() <= {*passed}:
            wanted = ", ".join(("x", *passed))
            raise ArgumentError(
                f"got {len(operands)} operands by position and {[*named]} by name, wanted "
                f"{wanted}: the layer holds the others of {self.chain.text!r}"
            )
        given = {**dict(zip(takes, operands, strict=True)), **named}
        return fused(x, *[given[n] if n in given else self._own(n) for n in names])

    def _own(self, name: str) -> Tensor:
        owner, attribute = self._lent.get(name, (self, name))
        tensor: Tensor = getattr(owner, attribute)
        return tensor

    def extra_repr(self) -> str:
        """The chain's text."""
        return repr(self.chain.text)


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
