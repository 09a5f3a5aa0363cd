"""What a function draws when it is called, such as `torch.randn_like(x)` or timm's masks of whole
samples: torch's own operations on what it makes, noted while it is traced and run again by each
call, so that its numbers are those of the function itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from fusegen.errors import ChainError
from fusegen.modules import random_generators
from fusegen.unsaid import NotKnownYet

_OWN = (
    "the function draws by a generator of its own, or sets torch's; draw before the call and pass "
    "it, or let torch's generators be"
)


@dataclass(frozen=True)
class _Slot:
    """A tensor that another operation gives, by its number."""

    number: int


def _filled(value: Any, known: Sequence[Tensor]) -> Any:
    """An argument, with tensors in the place of slots."""
    if isinstance(value, _Slot):
        return known[value.number]
    if isinstance(value, list | tuple):
        return [_filled(each, known) for each in value]
    return value


class _Operation(NamedTuple):
    """One of torch's, with slots for arguments that others give, and the slots of what it gives."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gives: tuple[int, ...]

    def run(self, known: list[Any]) -> None:
        """Run it on what is in the slots, and leave there what it gives."""
        found = self.function(*[_filled(a, known) for a in self.args], **self.kwargs)
        results = (found,) if isinstance(found, Tensor) else found
        for slot, result in zip(self.gives, results, strict=True):
            known[slot] = result


@dataclass(frozen=True)
class Drawn:
    """Operations of which some draw, and in which of their slots the tensors of some names are."""

    operations: tuple[_Operation, ...]
    names: Mapping[str, int]
    slots: int

    def again(self) -> dict[str, Tensor]:
        """The tensors by name, drawn anew from torch's generators."""
        known: list[Any] = [None] * self.slots
        with torch.no_grad():
            for operation in self.operations:
                operation.run(known)
        return {name: known[slot] for name, slot in self.names.items()}


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that are run while a function is traced, and leaves torch's generators
    as they were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []
        self._drawn: set[int] = set()
        self._places: set[int] = set()  # where in memory there is what is drawn, or made of such
        # Generators, with their states when tracing began, and as the last operation left them.
        self._before: list[tuple[torch.Generator, Tensor]] = []
        self._last: list[Tensor] = []
        self._seeds: list[int] = []

    def __enter__(self) -> Any:
        self._before = [(g, g.get_state()) for g in random_generators()]
        self._last = [state for _, state in self._before]
        self._seeds = [generator.initial_seed() for generator, _ in self._before]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_seeded = torch.Tag.nondeterministic_seeded in function.tags
        if is_seeded:
            self._require_torchs_own((args, kwargs))
        if function is torch.ops.aten._local_scalar_dense.default or _has_unknown_size(
            function, args
        ):
            self.refuse_numbers(args)
        found = function(*args, **(kwargs or {}))
        results, _ = tree_flatten(found)
        tensors = _tensors((args, kwargs, results))
        if not any(t.is_meta for t in _tensors(results)):  # that is asked for a shape alone
            self._noted.append((function, args, kwargs or {}, results))
            if is_seeded:
                self._drawn.update(map(id, tensors))
                self._last = [g.get_state() for g, _ in self._before]
            if is_seeded or self._are_drawn(tensors):
                self._places.update(map(_place, tensors))
        return found

    @property
    def has_drawn(self) -> bool:
        """Whether anything was."""
        return bool(self._drawn)

    def _require_torchs_own(self, given: Any) -> None:
        """Raise ChainError where other numbers would be drawn than those of torch's generators, one
        after the other.
        """
        own = {id(generator) for generator, _ in self._before}
        others = [v for v in tree_flatten(given)[0] if isinstance(v, torch.Generator)]
        states = [generator.get_state() for generator, _ in self._before]
        is_apt = all(map(torch.equal, states, self._last))
        if not is_apt or any(id(generator) not in own for generator in others):
            raise ChainError(_OWN)

    def _are_drawn(self, tensors: Iterable[Tensor]) -> bool:
        return any(_place(t) in self._places for t in tensors if not t.is_meta)

    def refuse_numbers(self, values: Any) -> None:
        """Raise ChainError where values that are drawn become numbers of Python's."""
        if self._places and self._are_drawn(_tensors(values)):
            raise ChainError(
                "the function draws numbers and asks which, which would be the same in every call; "
                "compute with the tensor, or draw before the call and pass it"
            )

    def __exit__(self, *args: Any) -> Any:
        found = super().__exit__(*args)  # type: ignore[no-untyped-call]
        if not self.has_drawn:  # what other threads draw meanwhile is theirs
            is_traced = args[0] in (None, NotKnownYet)  # or will be, when it is called
            if is_traced and self._seeds != [g.initial_seed() for g, _ in self._before]:
                raise ChainError(_OWN)
            return found
        try:
            if args[0] is None:
                self._require_torchs_own(())
        finally:
            for generator, state in self._before:
                generator.set_state(state)
        return found

    def drawn(self, made: Mapping[str, Tensor]) -> Drawn | None:
        """What has to be run again for those of the tensors that are drawn, or made of such, and
        for the numbers that come behind; None where nothing is drawn.
        """
        touched, before = set(self._drawn), 0
        while len(touched) > before:
            before = len(touched)
            for _, args, kwargs, results in self._noted:
                ids = {id(t) for t in _tensors((args, kwargs, results))}
                if not touched.isdisjoint(ids):
                    touched |= ids
        names = {name: tensor for name, tensor in made.items() if id(tensor) in touched}
        if not self._drawn:
            return None
        slots: dict[int, _Slot] = {}  # by the ids of tensors
        operations = []
        for function, args, kwargs, results in self._noted:
            if not any(id(t) in touched for t in _tensors((args, kwargs, results))):
                continue
            args = tree_map_only(Tensor, lambda t: slots.get(id(t), t), args)
            gives = [slots.setdefault(id(r), _Slot(len(slots))).number for r in results]
            operations.append(_Operation(function, args, kwargs, tuple(gives)))
        found = {name: slots[id(tensor)].number for name, tensor in names.items()}
        return Drawn(tuple(operations), found, len(slots))


def _has_unknown_size(function: Any, args: Any) -> bool:
    """Whether how large a result is depends on values."""
    if torch.Tag.dynamic_output_shape not in function.tags:
        return False
    is_index = function is torch.ops.aten.index.Tensor
    return not is_index or any(t.dtype is torch.bool for t in _tensors(args[1]))


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata  # which a stand-in without memory has too
    return place


def _tensors(values: Any) -> list[Tensor]:
    return [v for v in tree_flatten(values)[0] if isinstance(v, Tensor)]
