"""Chain: the steps that the user writes, and the names that their operands and kept values get.

A step's operand may be left unnamed until its chain is put together, because the name it gets
(`bias`, then `bias_2`) depends on the steps before it. So a Chain keeps the steps as they were
written, and its `steps` are those with every name settled; joining two chains settles the names
anew, and gives what the text of both, read at once, would give.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from fusegen.errors import ChainError
from fusegen.ops.schema import BadStep, Parameter, show_value
from fusegen.ops.step import COUNTER, UNNAMED, Step

# Names that an operand cannot have: arguments of the compiled callable, and numbers in the text.
RESERVED = ("x", "out", "self", "inf", "nan")

_OWN = " @ "  # in no text


@dataclass(frozen=True, eq=False, repr=False)
class Chain:
    """Steps in order, immutable. Equal chains have equal text and equal hashes."""

    written: tuple[
        Step, ...
    ]  # as written: operands may be unnamed, kept values have their writer's names

    def __post_init__(self) -> None:
        if not self.written or not all(isinstance(step, Step) for step in self.written):
            raise ChainError("Chain takes steps, at least one; write fusegen.chain('gelu')")
        object.__setattr__(self, "written", tuple(self.written))
        assert self.settled

    @cached_property
    def settled(self) -> tuple[Step, ...]:
        """The steps as written, with every operand named, and kept values called y, y_2 and so
        on.
        """
        return _settle(self.written)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps that do something: all but those that only list operands."""
        return tuple(step for step in self.settled if step.op != "takes")

    @cached_property
    def drawn(self) -> tuple[str, ...]:
        """The operands that each call draws: the seeds of noise."""
        names = _operands(self.steps)
        return tuple(n for n in names if any(p.is_drawn for _, p in self.uses(n)))

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The tensors that a call takes after x, in the order in which the chain names them, where
        it lists them or uses them first.
        """
        drawn = set(self.drawn)
        return tuple(name for name in self.operands if name not in drawn)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The tensors that the chain works on after x: those given, and those drawn."""
        listed, used, drawn = _operands(self.settled), _operands(self.steps), {*self.drawn}
        orders = ([name for name in names if name not in drawn] for names in (listed, used))
        return used if next(orders) == next(orders) else listed

    @cached_property
    def head(self) -> tuple[Step, ...]:
        """The step that lists the operands, where a call takes them in another order than that of
        their first use.
        """
        return () if self.operands == _operands(self.steps) else takes(*self.given).written

    @cached_property
    def gives(self) -> tuple[str, ...]:
        """The kept values that are results too, behind the last one."""
        return tuple(step.names[0] for step in self.steps if step.op == "give")

    def uses(self, operand: str) -> tuple[tuple[Step, Parameter], ...]:
        """Every place where an operand is used: the step and the parameter that it fills."""
        return tuple(
            (step, step.definition.parameter(parameter))
            for step in self.steps
            for parameter, name in step.operands
            if name == operand and step.definition
        )

    def reads(self, operand: str) -> bool:
        """Whether a launch reads an operand: all but what merely counts batches, or has a type."""
        uses = ((s, p) for s, p in self.uses(operand) if not p.is_type)
        is_read = any(p.name != COUNTER or step.averages for step, p in uses)
        return is_read or any(step.taken_up == operand for step in self.steps)

    def updates(self, operand: str) -> bool:
        """Whether some step updates an operand in place."""
        return any(
            step.definition.is_updated(parameter.name, dict(step.attributes))
            for step, parameter in self.uses(operand)
            if step.definition
        )

    @cached_property
    def typed(self) -> tuple[str, ...]:
        """The operands of which a launch reads nothing, and that are named for their type."""
        unread = [name for name in self.operands if not self.reads(name)]
        return tuple(name for name in unread if any(p.is_type for _, p in self.uses(name)))

    @cached_property
    def counters(self) -> tuple[str, ...]:
        """The operands that count batches, once for each step that does."""
        return tuple(step.counter for step in self.steps if step.counter is not None)

    @cached_property
    def text(self) -> str:
        """The one text that all ways of writing this chain come to."""
        return " | ".join(step.text for step in (*self.head, *self.steps))

    @cached_property
    def hash(self) -> str:
        """sha256, in hex, of the text and of what the user's own ops compute."""
        return hashlib.sha256("\n".join((self.text, *self._own)).encode()).hexdigest()

    @cached_property
    def _own(self) -> tuple[str, ...]:
        return tuple(sorted({f"{s.op} {s.fingerprint}" for s in self.steps if s.fingerprint}))

    @cached_property
    def recorded_name(self) -> str:
        """What a recorded graph calls the chain by: its text; behind it, where the user's own ops
        take part, what stands for what they compute.
        """
        return f"{self.text}{_OWN}{self.hash[:32]}" if self._own else self.text

    def require_complete(self) -> None:
        """Raise BadStep where a part of a chain, such as recall(y) alone, stands for it all; where
        one step reads what another one updates; where something is given that was not computed just
        before; and where an operand is listed that no step uses.
        """
        used = _operands(self.steps)
        drawn = {*self.drawn}
        kept: set[str] = set()
        updated: set[str] = set()
        read: set[str] = set()
        is_computed = False
        for position, step in enumerate(self.settled):
            if step.op == "takes":
                if unused := [name for _, name in step.operands if name not in used]:
                    raise BadStep(f"{step.text}: no step uses an operand {unused[0]}", position)
                continue
            for parameter, name in step.operands:
                is_noise = step.definition and step.definition.parameter(parameter).is_drawn
                if name in drawn and not is_noise:
                    raise BadStep(
                        f"{step.text}: {name!r} is the name of noise that a step draws, and no "
                        "tensor; choose another",
                        position,
                    )
            if step.definition is not None:
                attributes = dict(step.attributes)
                mine = {n for p, n in step.operands if step.definition.is_updated(p, attributes)}
                others = {n for _, n in step.operands} - mine
                for met, what in ((others & updated, "updates"), (mine & read, "reads")):
                    if met:
                        raise BadStep(
                            f"{step.text}: a step before it {what} {min(met)!r}, and one tensor is "
                            "not both read and updated in a chain; give it a tensor of another "
                            "name, or a chain of its own",
                            position,
                        )
                updated |= mine
                read |= others
            elif step.taken_up is not None:
                read.add(step.taken_up)
            if step.op == "recall" and not kept.issuperset(step.names):
                raise BadStep(f"{step.text}: no step before it keeps this value", position)
            if step.op == "give" and not is_computed:
                raise BadStep(
                    f"{step.text}: no step has computed what it would give; write it behind the "
                    "step that does, where it stands for a keep as well",
                    position,
                )
            is_renamed = step.is_naming or step.is_view
            is_computed = is_computed if is_renamed else not step.is_structural
            kept.update(step.names)

    def __or__(self, other: Chain) -> Chain:
        if isinstance(other, str):
            raise ChainError(f"cannot join a chain and text; write fusegen.chain({other!r})")
        return Chain(self.written + other.written) if isinstance(other, Chain) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return self.hash == other.hash if isinstance(other, Chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"fusegen.chain({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Chain, (self.written,)


def text_of(recorded_name: str) -> str:
    """The text of the chain that goes by this name."""
    return recorded_name.partition(_OWN)[0]


def keep(name: str) -> Chain:
    """Name the running value, so that a later step may use it as an operand."""
    return Chain((Step("keep", names=(name,)),))


def give(name: str) -> Chain:
    """Name the running value, as keep does, and return it too: the call gives a tuple, of the
    chain's result and of what is given, in the chain's order.
    """
    return Chain((Step("give", names=(name,)),))


def recall(name: str) -> Chain:
    """Go on with a kept value in place of the running one."""
    return Chain((Step("recall", names=(name,)),))


def operand(name: str) -> Chain:
    """Go on with an operand in place of the running value, as with a second input: the steps that
    follow compute from it, until recall goes back.
    """
    return Chain((Step("operand", operands=(("", name),)),))


def takes(*names: str) -> Chain:
    """List the operands, which a call then takes in this order, whichever is used first."""
    if not names:
        raise ChainError("takes takes names, as in takes('weight', 'bias')")
    return Chain((Step("takes", operands=tuple(("", name) for name in names)),))


def _operands(steps: Iterable[Step]) -> tuple[str, ...]:
    """The operands that steps name, each once."""
    steps = tuple(steps)
    kept = {name for step in steps for name in step.names}
    named = (name for step in steps for _, name in step.operands if name not in kept)
    return tuple(dict.fromkeys(named))


def _settle(written: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps with every name settled, read from left to right."""
    operands: dict[str, None] = {}
    kept: set[str] = set()
    named: list[Step] = []
    for position, step in enumerate(written):
        if step.op == "takes":  # its names are those of the steps that use them
            for _, name in step.operands:
                _check_name(name, RESERVED, position)
            named.append(step)
            continue
        pairs = []
        for parameter, name in step.operands:
            if name == UNNAMED:
                name = _fresh(parameter, {*operands, *kept, *RESERVED})
            if name not in kept:
                _check_name(name, RESERVED, position)
                operands[name] = None
            elif step.taken_up is not None:
                raise BadStep(
                    f"operand({name}): {name} is a kept value; go on with it by recall({name})",
                    position,
                )
            pairs.append((parameter, name))
        for name in step.names:
            _check_name(name, (), position)
            if step.is_naming and name in operands:
                raise BadStep(
                    f"{step.op}({name}): {name} is the name of an operand of this chain; choose "
                    "another",
                    position,
                )
            kept.add(name)  # of a recall too: the keep may be in a chain that this one is joined to
        named.append(replace(step, operands=tuple(pairs)))
    return tuple(_rename_kept(named, {*operands}))


def _rename_kept(steps: list[Step], taken: set[str]) -> Iterator[Step]:
    current: dict[str, str] = {}  # the writer's name of a kept value -> the canonical one
    for step in steps:
        if step.is_naming:
            fresh = _fresh("y", taken)
            taken.add(fresh)
            current[step.names[0]] = fresh
        yield replace(
            step,
            names=tuple(current.get(name, name) for name in step.names),
            operands=tuple((p, current.get(name, name)) for p, name in step.operands),
        )


def _fresh(base: str, taken: set[str]) -> str:
    if base not in taken:
        return base
    return next(name for n in count(2) if (name := f"{base}_{n}") not in taken)


def _check_name(name: object, reserved: tuple[str, ...], position: int) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise BadStep(f"{show_value(name)} is not a name; use letters, digits and _", position)
    if keyword.iskeyword(name):
        raise BadStep(f"{name!r} cannot be a name: it is a word of Python's", position)
    if name in reserved:
        hint = " (to use the chain's input again, begin with keep(y))" if name == "x" else ""
        raise BadStep(
            f"an operand cannot be called {name!r}, which means something else{hint}", position
        )
