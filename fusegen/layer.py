"""Layer: a chain as an nn.Module, which holds operands and knows whether it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fusegen.borrowing import lent_by, traced
from fusegen.dsl import chain
from fusegen.errors import ArgumentError
from fusegen.ops import RUNNING, Chain, Op, Step
from fusegen.runtime import Fused


class Layer(nn.Module):
    """A chain as a module: `Layer("add_channel(bias) | gelu", bias=nn.Parameter(...))`.

    What is passed by the name of an operand is held: an nn.Parameter as a parameter, any other
    tensor as a buffer. The operands that are left over are passed to forward, behind x, in the
    chain's order or by name. Instead of a chain the source may be a module: its forward is traced
    once, as it is in training, and its parameters and buffers stay its own; `layer.module` is it.
    After `eval()` dropout passes everything, and norms use their running statistics, where they
    have any. Raises ChainError for a mistake in the chain and ArgumentError for a name that is no
    operand's, or that a module cannot hold.
    """

    def __init__(
        self, source: str | Chain | Op | nn.Module | Callable[..., Any], /, **held: Tensor
    ) -> None:
        super().__init__()
        self._lent: dict[str, tuple[nn.Module, str]] = {}
        if isinstance(source, nn.Module) and not isinstance(getattr(source, "chain", None), Chain):
            self.module, self.training = source, source.training
            self._lent = lent_by(source)
            found = traced(source, self._lent)
            self._lent = {n: place for n, place in self._lent.items() if n in found.given}
        else:
            found = chain(source)
        self._in_training, self._in_evaluation = Fused(found), Fused(_in_evaluation(found))
        self._takes = tuple(n for n in found.given if n not in held and n not in self._lent)
        self._given = found.given
        for name, tensor in held.items():
            if name in self._lent:
                raise ArgumentError(f"operand {name!r} is a tensor of the module itself")
            self._hold(name, tensor)

    def _hold(self, name: str, tensor: Tensor) -> None:
        if name not in self._given:
            raise ArgumentError(
                f"no operand is called {name!r}: the chain {self.chain.text!r} takes "
                f"{', '.join(('x', *self._given))}"
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
        """The chain, as it trains."""
        return self._in_training.chain

    def forward(self, x: Tensor, *operands: Tensor, **named: Tensor) -> Any:
        """What the compiled chain gives for x, the operands that are held and those passed here."""
        takes = [name for name in self._takes if name not in named] if named else self._takes
        if len(operands) != len(takes) or not named.keys() <= {*self._takes}:
            wanted = ", ".join(("x", *self._takes))
            raise ArgumentError(
                f"got {len(operands)} operands by position and {[*named]} by name, wanted "
                f"{wanted}: the layer holds the others of {self.chain.text!r}"
            )
        given = {**dict(zip(takes, operands, strict=True)), **named}
        given |= {n: getattr(owner, attribute) for n, (owner, attribute) in self._lent.items()}
        values = [given[n] if n in given else getattr(self, n) for n in self._given]
        return (self._in_training if self.training else self._in_evaluation)(x, *values)

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
