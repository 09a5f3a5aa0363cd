"""Step: one use of an operation, with its attributes and the names of its operands."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fusegen import arity, ir
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops.schema import Attribute, Parameter, integers, parameters_of, spell
from fusegen.windowing import Slide, Window, size_of, sliding

Shaping = Literal[
    "same",
    "reduce",
    "squeeze",
    "unsqueeze",
    "merge",
    "split",
    "view",
    "stack",
    "loss",
    "class_loss",
]
VIEWS = ("merge", "split", "view")

# The parameters that an operation with statistics of its own updates.
RUNNING = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"

NAMING = ("keep", "give")  # they name the running value
STRUCTURAL = (*NAMING, "recall", "operand", "takes")
# Tiles of more elements are not held by one thread, but walked as sliding windows are.
_LARGEST_TILE = 256
MOST_AXES = 8  # of a tensor
Windowing = Callable[..., tuple[Window, ...] | None]
UNNAMED = ""  # stands for the name of an operand that the chain will name


@dataclass(frozen=True, eq=False, repr=False)
class Definition:
    """What a step needs to know of its operation: the mathematics and the parameters after x.

    window_axes is how many trailing axes the operation pools. windowing takes their lengths, and
    the attributes by keyword, and gives the windows along each; or None where it is whole axes
    that are reduced. Without it they are tiles of the attribute kernel_size. shaping says what
    becomes of the axes: "reduce" leaves one wide or drops those of its attribute dim, "squeeze" and
    "unsqueeze" drop and add axes of one value, "merge" makes those from start_dim to end_dim one,
    "split" makes dim several of the given sizes, "view" lays all out in another shape, "stack" puts
    operands beside x along a new axis dim, which the body sees, "loss" reduces all axes, unless its
    attribute reduction is "none", and "class_loss" then that of the
    classes. groups names the attribute that says into how many groups axis 1 is split: the body
    then sees two axes there.
    keeps_dtype is for an operation whose result has x's type, whatever its parameters have, and
    exact_bounds for one that compares x with its numbers as they are, where torch does, and not
    with the nearest of x's type.
    statistics gives the mean and the variance that update running_mean and running_var while the
    attribute that `training` names is true.
    """

    name: str
    function: Callable[..., Expr]
    declared: tuple[Parameter, ...] | None = None  # in place of what the function's signature says
    window_axes: int = 0
    windowing: Windowing | None = None
    same_dtype: bool = False
    keeps_dtype: bool = False
    exact_bounds: bool = False
    shaping: Shaping = "same"
    groups: str = ""
    training: str = ""
    statistics: Callable[[Expr], tuple[Expr, Expr]] | None = None
    channel_axes: int = 0  # how many axes a channel has that is dropped as a whole; 0 if any number

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters after x."""
        return parameters_of(self.function) if self.declared is None else self.declared

    @property
    def is_view(self) -> bool:
        """Whether a step only says in what shape a value is seen."""
        return self.shaping in VIEWS

    @property
    def is_loss(self) -> bool:
        """Whether a step's attribute reduction says what becomes of the axes."""
        return self.shaping in ("loss", "class_loss")

    @property
    def is_builtin(self) -> bool:
        """Whether fusegen brings the operation, so that its name alone says what it computes."""
        return (self.function.__module__ or "").startswith("fusegen.")

    def is_updating(self, attributes: Mapping[str, Attribute]) -> bool:
        """Whether a step updates running statistics, those that it has."""
        return bool(self.training) and bool(attributes.get(self.training))

    def is_updated(self, parameter: str, attributes: Mapping[str, Attribute]) -> bool:
        """Whether a step updates the tensor in place, rather than reads it."""
        return parameter == COUNTER or (parameter in RUNNING and self.is_updating(attributes))

    def parameter(self, name: str) -> Parameter:
        """The parameter of this name."""
        return next(p for p in self.parameters if p.name == name)


@dataclass(frozen=True)
class Step:
    """An op with attributes and operands; keep, give or recall of a name, which have neither; or
    operand, which has one, or takes, which lists them.
    """

    op: str
    attributes: tuple[tuple[str, Attribute], ...] = ()
    operands: tuple[tuple[str, str], ...] = ()  # (parameter, name of an operand or a kept value)
    names: tuple[str, ...] = ()
    definition: Definition | None = field(default=None, compare=False, repr=False)

    @property
    def is_structural(self) -> bool:
        """Whether the step only names a value or takes up a named one, or an operand."""
        return self.op in STRUCTURAL

    @property
    def is_naming(self) -> bool:
        """Whether the step names the running value."""
        return self.op in NAMING

    @property
    def is_view(self) -> bool:
        """Whether the step only says in what shape its value is seen."""
        return self.definition is not None and self.definition.is_view

    @property
    def taken_up(self) -> str | None:
        """The operand that it goes on with, if it does."""
        return self.operands[0][1] if self.op == "operand" else None

    @property
    def groups(self) -> int:
        """Into how many groups it splits the channels; 0 if it does not."""
        number = dict(self.attributes).get(self.definition.groups) if self.definition else None
        return number if isinstance(number, int) else 0

    @property
    def counter(self) -> str | None:
        """The operand that it counts batches with, if it does."""
        is_updating = self.definition and self.definition.is_updating(dict(self.attributes))
        return dict(self.operands).get(COUNTER) if is_updating else None

    @property
    def averages(self) -> bool:
        """Whether its running statistics are averages over all batches, for which it reads how many
        there were.
        """
        return self.counter is not None and dict(self.attributes).get("momentum") is None

    @property
    def text(self) -> str:
        """The step as canonical text has it."""
        inside = [*self.names, *(name for _, name in self.operands)]
        if self.definition is not None:
            inside = _arguments(self, self.definition.parameters)
        return f"{self.op}({', '.join(inside)})" if inside else self.op

    def windows(self, lengths: tuple[int, ...]) -> tuple[Window, ...] | None:
        """A pooling step's windows along axes of these lengths; None for whole axes."""
        attributes = dict(self.attributes)
        if self.definition is not None and self.definition.windowing is not None:
            found = self.definition.windowing(lengths, **attributes)
        else:
            sizes = integers(attributes["kernel_size"])
            sizes = sizes * len(lengths) if len(sizes) == 1 else sizes
            found = tuple(sliding(n, k) for n, k in zip(lengths, sizes, strict=True))
        if found is None:
            return None
        is_large = math.prod(map(size_of, found)) > _LARGEST_TILE
        if is_large or any(isinstance(w, Slide) for w in found):
            return tuple(w if isinstance(w, Slide) else Slide(w, w) for w in found)
        return found

    @cached_property
    def body(self) -> tuple[Expr, ...]:
        """The nodes of what it computes, on as many axes as any tensor has; () where that cannot be
        told without a tensor.
        """
        definition = self.definition
        if definition is None:
            return ()

        def leaf(name: str, kind: arity.Kind = "number") -> Expr:
            return ir.tensor(name, range(-MOST_AXES, 0), MOST_AXES, kind)

        attributes = dict(self.attributes)
        read = [name for name, _ in self.operands if not definition.is_updated(name, attributes)]
        operands = {n: _stand_in(leaf, definition.parameter(n)) for n in read}
        if "eps" in attributes and attributes["eps"] is None:
            attributes["eps"] = 1.0  # that of an element type, which is not known here
        try:
            root = definition.function(leaf("x"), **operands, **attributes)
        # A condition that meets a number here, which no reduction has; or an axis that no tensor
        # has.
        except (TypeError, ChainError, IndexError):
            return ()
        return tuple(ir.topological([root]))

    @property
    def reduces(self) -> bool:
        """Whether it reduces its value, windows aside."""
        return any(node.op == "reduce" for node in self.body)

    @property
    def is_ordered(self) -> bool:
        """Whether it counts in which order the places along its axes are, or where operands lie."""
        kinds = ("max", "argmax", "pick")
        counts = any(
            n.op == "position" or (n.op == "reduce" and n.attrs[0] in kinds) for n in self.body
        )
        return counts or bool(self.operands)

    @cached_property
    def fingerprint(self) -> str:
        """For an op of the user's own, a digest of what the step computes; else nothing.

        Taken from the expressions that the body gives, not from its code: so it covers what the
        code refers to, and is the same under every version of Python.
        """
        if self.definition is None or self.definition.is_builtin:
            return ""
        lines = [line for rank in range(1, 7) for line in _body(self, self.definition, rank)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _arguments(step: Step, parameters: tuple[Parameter, ...]) -> list[str]:
    """The arguments as text: positional until one is left out, then by keyword."""
    attributes, operands = dict(step.attributes), dict(step.operands)
    # Constants and names fill different places, so constants stand first - unless one takes both.
    mixed = any(p.role == "either" for p in parameters)
    ordered = parameters if mixed else sorted(parameters, key=lambda p: p.takes_tensor)
    positional: list[str] = []
    by_keyword: list[str] = []
    skipped: set[bool] = set()
    for p in ordered:
        named = p.name in operands
        if not named and (p.name not in attributes or spell(attributes[p.name]) == _default(p)):
            skipped.update((True, False) if mixed else (p.takes_tensor,))
            continue
        value = attributes.get(p.name)
        text = operands[p.name] or "?" if named else spell(value)
        is_word = isinstance(value, bool) or (isinstance(value, str) and not p.required)
        told_by_name = p.keyword_only or is_word
        if told_by_name or (mixed or p.takes_tensor) in skipped:
            by_keyword.append(f"{p.name}={text}")
        else:
            positional.append(text)
    return positional + by_keyword


def _stand_in(leaf: Callable[[str, arity.Kind], Expr], parameter: Parameter) -> Expr | str:
    """What a body is given for a parameter when no tensor is known."""
    if parameter.is_type:
        return "float32"
    return leaf(f"operand {parameter.name}", parameter.kind)


def _default(parameter: Parameter) -> str | None:
    return None if parameter.required else spell(parameter.default)


def _body(step: Step, definition: Definition, rank: int) -> list[str]:
    """Each operation of the op's body on a tensor of this many axes."""
    everywhere = frozenset(range(-rank, 0))
    pooled = {a for a in range(1, definition.window_axes + 1) if a <= rank}

    def leaf(name: str, kind: arity.Kind) -> Expr:
        return ir.tensor(name, everywhere, rank, kind)

    operands = {p: _stand_in(leaf, definition.parameter(p)) for p, _ in step.operands}
    x = ir.tensor("x", everywhere | pooled, rank)
    try:
        root = definition.function(x, **operands, **dict(step.attributes))
        order = ir.topological([root])
    except Exception as error:  # the user's code, which may well need another number of axes
        return [f"rank {rank}: {type(error).__name__}"]
    number = {node: i for i, node in enumerate(order)}
    return [
        f"{node.op} {node.attrs!r} {sorted(node.extent)} {[number[a] for a in node.args]}"
        for node in order
    ]
