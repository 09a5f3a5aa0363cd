"""Op: an operation, callable on expressions and as a step of a chain; and the table of them all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, overload

from fusegen import ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops.chain import Chain
from fusegen.ops.eager import function_of, is_tensor
from fusegen.ops.matching import match
from fusegen.ops.schema import (
    Attribute,
    BadArgument,
    Parameter,
    canonical,
    nearest,
    show_value,
    signature_text,
)
from fusegen.ops.step import STRUCTURAL, UNNAMED, Definition, Step

_calls = count()
OPS: dict[str, Op] = {}
ALIASES: dict[str, str] = {}


def lookup(name: str) -> Op:
    """The op of this name or alias; ChainError, with the nearest name, where there is none."""
    found = OPS.get(ALIASES.get(name, name))
    if found is None:
        guess = nearest(name, [*OPS, *ALIASES, *STRUCTURAL])
        hint = f"did you mean {guess!r}?" if guess else "`fusegen ops` lists them all"
        raise ChainError(f"no operation is called {show_value(name)}; {hint}")
    return found


def _as_given(labels: Expr) -> Expr:
    """Labels without the views of them, which may have x's axes in the shape that x was given."""
    found = labels
    while found.op == "call" and isinstance(found.attrs[0], Op) and found.attrs[0].is_view:
        found = found.args[0]
    return found if found.op == "input" else labels


def _restore(name: str, module: str) -> Op:
    """An op where it is unpickled: importing the module that defines a user's own registers it."""
    if name not in OPS:
        importlib.import_module(module)
    return lookup(name)


@dataclass(frozen=True, eq=False, repr=False)
class Op(Definition):
    """An operation: its mathematics, and what the tests and the documentation need to know of it.

    reference is torch's equal, as a dotted name or as a callable on tensors that takes x and then
    everything by keyword; None means that the body itself, evaluated with torch, is the reference.
    samples are values of its attributes to test it with, in their order. ulp is how far an fp32
    result may be from eager's on the same device: 0 is bitwise equal, None is not promised.
    equal is what torch calls it, where the reference is a callable; "" where torch has no such.
    check takes all attributes by keyword and returns what is wrong with them, if anything. draws
    takes them too, and tells whether the noise that the op may take is drawn.
    """

    doc: str = ""
    reference: str | Callable[..., Any] | None = None
    samples: tuple[tuple[Attribute, ...], ...] = ((),)
    ulp: int | None = None
    aliases: tuple[str, ...] = ()
    is_primitive: bool = False
    equal: str = ""
    check: Callable[..., str | None] | None = None
    draws: Callable[..., bool] | None = None

    def __post_init__(self) -> None:
        # So that help and inspect.signature tell what the function would, were it called alone.
        for name, value in (("__doc__", self.doc), ("__wrapped__", self.function)):
            object.__setattr__(self, name, value)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.partition("\n")[0]

    @property
    def signature(self) -> str:
        """The op as `fusegen ops` lists it: `leaky_relu(negative_slope: float = 0.01)`."""
        return signature_text(self.name, self.parameters)

    @property
    def torch_name(self) -> str:
        """What torch calls the operation; "" where it has none."""
        return self.reference if isinstance(self.reference, str) else self.equal

    @property
    def examples(self) -> tuple[Chain, ...]:
        """A one-step chain for each sample, without optional operands and with all of them."""
        constants = [p.name for p in self.parameters if p.takes_constant]
        tensors = [p.name for p in self.parameters if p.takes_tensor and not p.is_drawn]
        tensors = [name for name in tensors if not self.parameter(name).required]
        found = []
        for sample in self.samples:
            values = dict(zip(constants, sample, strict=False))
            optional = {name: name for name in tensors if not self.is_updated(name, values)}
            found += [self(**values, **named) for named in ({}, optional)[: 1 + len(optional)]]
        return tuple(found)

    def resolve_reference(self) -> Callable[..., Any] | None:
        """The reference as a callable on tensors; resolving a dotted name imports torch."""
        if isinstance(self.reference, str):
            found: Callable[..., Any] = function_of(self.reference)
            return found
        return self.reference

    @overload
    def __call__(self, x: Expr, *args: Any, **kwargs: Any) -> Expr: ...
    @overload
    def __call__(
        self, *args: float | str | tuple[int, ...] | list[int] | None, **kwargs: Any
    ) -> Chain: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Expr | Chain:
        """On an expression: the result. Otherwise: a chain of this one step."""
        if args and is_tensor(args[0]):
            raise BadArgument(
                f"{self.name}: got a tensor, but an operation makes a chain and computes nothing; "
                f"compile it and call that, as in fusegen.compile('{self.name}')(x)"
            )
        on_expression = isinstance(args[0], Expr) if args else False
        if self.is_primitive and any(isinstance(a, Expr) for a in (*args, *kwargs.values())):
            return self.function(*args, **kwargs)
        if on_expression:
            return self._apply(args[0], match(self.name, self.parameters, args[1:], kwargs))
        return Chain((self.step(args, kwargs),))

    def __or__(self, other: Chain | Op) -> Chain:
        return self() | other

    def __ror__(self, other: Chain) -> Chain:
        return other | self()

    def step(self, args: Iterable[object], kwargs: Mapping[str, object]) -> Step:
        """The step that these arguments make, its unnamed operands still to be named."""
        given = match(self.name, self.parameters, tuple(args), kwargs)
        operands = []
        for p in self.parameters:
            name = given.get(p.name)
            if p.takes_tensor and isinstance(name, str):
                operands.append((p.name, name))
            elif p.role == "operand" and name is not None:
                raise BadArgument(
                    f"{self.name}: {p.name} wants the name of a tensor, got {show_value(name)}; "
                    f"the tensor itself is passed when the chain is called",
                    p.name,
                )
            elif name is None and p.takes_tensor and p.required:
                operands.append((p.name, UNNAMED))
        attributes = self._attributes(given)
        if all(p != name for p, _ in self.drawn(attributes) for name, _ in operands):
            operands += self.drawn(attributes)
        return Step(self.name, attributes, tuple(operands), definition=self)

    def drawn(self, attributes: Iterable[tuple[str, Attribute]]) -> list[tuple[str, str]]:
        """The operand for the noise that a step with these attributes draws, still without name."""
        if self.draws is None or not self.draws(**dict(attributes)):
            return []
        return [(p.name, UNNAMED) for p in self.parameters if p.is_drawn]

    def _attributes(self, given: Mapping[str, object]) -> tuple[tuple[str, Attribute], ...]:
        attributes: list[tuple[str, Attribute]] = []
        for p in self.parameters:
            value = given.get(p.name)
            if p.role == "attribute" and p.name not in given:
                if p.required:
                    raise BadArgument(f"{self.name}: {p.name} is missing; {self.signature}", p.name)
                attributes.append((p.name, p.default))
            elif p.role == "attribute" or (
                p.role == "either" and not isinstance(value, str | Expr | None)
            ):
                attributes.append((p.name, self._constant(p, value)))
        problem = self.check(**dict(attributes)) if self.check else None
        if problem:
            raise BadArgument(f"{self.name}: {problem}")
        return tuple(attributes)

    def _constant(self, parameter: Parameter, value: object) -> Attribute:
        try:
            return canonical(self.name, parameter, value)
        except BadArgument as error:
            others = [n for n in OPS if n.startswith(self.name) and n != self.name]
            others = [n for n in others if any(p.takes_tensor for p in OPS[n].parameters)]
            if not others or not isinstance(value, str | float):
                raise
            raise BadArgument(f"{error}; did you mean {others[0]}?", error.argument) from None

    def _apply(self, x: Expr, given: Mapping[str, object]) -> Expr:
        attributes = self._attributes(given)
        operands: list[tuple[str, Expr]] = []
        for p in self.parameters:
            value = given.get(p.name)
            if isinstance(value, Expr) and p.takes_tensor:
                operands.append((p.name, _as_given(value) if p.placement == "labels" else value))
            elif p.takes_tensor and isinstance(value, str):
                raise BadArgument(f"{self.name}: {p.name} wants an expression, got {value!r}")
            elif p.takes_tensor and value is None and p.required:
                raise BadArgument(f"{self.name}: {p.name} is missing; {self.signature}")
        if any(e.rank is None for e in (x, *dict(operands).values())):
            # A chain's function is being traced: the call itself becomes a step.
            slots = tuple(name for name, _ in operands)
            exact = repr(attributes)  # tells 0.0 from -0.0, which compare equal
            if self.drawn(attributes) or self.is_updating(dict(attributes)):
                exact += f" {next(_calls)}"  # no two are the same
            return ir.make(
                "call",
                (x, *dict(operands).values()),
                (self, slots, attributes, exact),
                rank=None,
            )
        self._require_axes_alike(dict(attributes))
        result: object = self.function(x, **dict(operands), **dict(attributes))
        if not isinstance(result, Expr):
            raise ChainError(
                f"{self.name}: its body must return an expression, got {show_value(result)}"
            )
        return result

    def _require_axes_alike(self, attributes: Mapping[str, Attribute]) -> None:
        """Raise where the op, in another one's body, would change what the axes of a value are."""
        if self.shaping == "reduce" and not attributes.get("keepdim"):
            raise ChainError(
                f"{self.name}: in an operation's body axes cannot be dropped; give keepdim=True"
            )
        if "eps" in attributes and attributes["eps"] is None:
            raise ChainError(f"{self.name}: in an operation's body, give eps")
        if self.groups or self.training or self.shaping not in ("same", "reduce"):
            raise ChainError(
                f"{self.name}: works as a step of a chain only, not in an operation's body"
            )

    def __repr__(self) -> str:
        return f"<fusegen op {self.signature}>"

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: object) -> Op:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.name, self.function.__module__)
