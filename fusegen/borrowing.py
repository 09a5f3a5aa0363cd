"""Borrowing: an nn.Module's forward as a chain, whose operands are the module's own tensors."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from fusegen import trace
from fusegen.errors import ArgumentError, ChainError
from fusegen.ir import Expr, inputs, name_of
from fusegen.ops import COUNTER, RESERVED, RUNNING, lookup
from fusegen.overwriting import every
from fusegen.parameters import operand_of
from fusegen.shaping import as_numbers, is_part
from fusegen.sizes import Untold
from fusegen.standing import current, known
from fusegen.taking import Other, View
from fusegen.tensorlike import of_torch
from fusegen.trace import Traced
from fusegen.unsaid import (
    MOVING,
    SEEING,
    DeviceOf,
    NotKnownYet,
    TypeOf,
    current_call,
    is_device,
    tells_all,
)

# What a forward may ask of the module's tensors, which are there as it is traced: all but values.
_TOLD = [
    "__get__",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "__len__",
    "get_device",
    "element_size",
    "__repr__",
    "__format__",
    "__hash__",
    "requires_grad_",
]
# What is a view of one of the module's tensors, taken anew by each call; other indices than parts,
# and views in other shapes, are steps of the chain.
VIEWS = ("__getitem__", "narrow", "expand", *MOVING)
_BAKED = ["item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__"]
Place = tuple[nn.Module, str]  # the module that has a tensor, and what it calls it
# How many axes norms want of what they are given.
_AXES: Mapping[type, tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.InstanceNorm1d: (3,),
    nn.InstanceNorm2d: (4,),
    nn.InstanceNorm3d: (5,),
}


class Wanted(NamedTuple):
    """How many axes a module's input must have, as a norm says that is given it, or what is
    computed of it elementwise.
    """

    norm: str
    axes: tuple[int, ...]

    def check(self, x: Tensor) -> None:
        """Raise ArgumentError where it has another number of axes."""
        if x.dim() not in self.axes:
            raise ArgumentError(
                f"x has {x.dim()} axes, {tuple(x.shape)}, but {self.norm} wants "
                f"{' or '.join(map(str, self.axes))}, the batch first; without one give x[None]"
            )


def lent_by(module: nn.Module) -> dict[str, Place]:
    """Each parameter and buffer of a module, once, by a name for an operand: `weight_0_norm` for
    that of module[0].norm.
    """
    found: dict[str, Place] = {}
    parameters = inspect.signature(module.forward).parameters
    taken = {*RESERVED, *parameters, *map(operand_of, parameters)}
    for path, owner in module.named_modules():
        for attribute in (*owner._parameters, *owner._buffers):
            if getattr(owner, attribute) is not None:
                name = "_".join((attribute, *path.split("."))).rstrip("_")
                name = name if name.isidentifier() else f"p_{name}"
                while name in found or name in taken:
                    name += "_"
                found[name] = owner, attribute
    return found


def ties_of(module: nn.Module) -> tuple[tuple[Place, Place], ...]:
    """The places of tensors that a module has in several, each with the first one."""
    first: dict[int, Place] = {}
    found = []
    for owner in module.modules():
        for attribute in (*owner._parameters, *owner._buffers):
            tensor, place = getattr(owner, attribute), (owner, attribute)
            if tensor is not None and first.setdefault(id(tensor), place) != place:
                found.append((first[id(tensor)], place))
    return tuple(found)


@contextmanager
def in_mode(module: nn.Module, *, is_training: bool) -> Iterator[None]:
    """With the module in training or in evaluation, and as it was behind it."""
    modes = {part: part.training for part in module.modules()}
    module.train(is_training)
    try:
        yield
    finally:
        for part, was_training in modes.items():
            part.training = was_training


def traced(module: nn.Module, lent: Mapping[str, Place], also: Container[str] = ()) -> Traced:
    """The chain that the module's forward is in the modes in which its parts are, given tensors for
    some parameters that are None else, and what is wanted of its input.
    """
    before = _settings_of(module)
    result = _traced(module, lent, also)
    if (changed := _settings_of(module)) != before:
        # What grows with the first of its kind stays as it is behind it; what counts does not.
        result = _traced(module, lent, also)
        if (now := _settings_of(module)) != changed:
            name = next(name for name in now if now[name] != changed.get(name))
            for (part, attribute), value in before.items():
                setattr(part, attribute, value)
            raise ChainError(
                f"{type(name[0]).__name__}.{name[1]}: forward changes it in each call, and a chain "
                "would have it as it is now; count outside of forward, and pass a tensor"
            )
    return result


Setting = tuple[nn.Module, str]


def _settings_of(module: nn.Module) -> dict[Setting, object]:
    """What a module's parts have as numbers and the like."""
    return {
        (part, name): value
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float | str | None)
    }


def _traced(module: nn.Module, lent: Mapping[str, Place], also: Container[str]) -> Traced:
    held = {name: getattr(*place) for name, place in lent.items()}
    lending = _Lending({id(tensor): name for name, tensor in held.items()})
    given: list[tuple[Any, Expr]] = []
    with _steps_for_norms(module, given), _left_as_it_was(module), _hooked(module), lending:
        result = trace.traced(module, held, also)
    found = [
        (norm, a) for norm, x in given if _is_like_input(x, lent) for a in [_axes_of(norm)] if a
    ]
    wanted = next((Wanted(type(norm).__name__, axes) for norm, axes in found), None)
    return result._replace(wanted=wanted)


def _axes_of(norm: nn.Module) -> tuple[int, ...]:
    return next((axes for kind, axes in _AXES.items() if isinstance(norm, kind)), ())


def _is_like_input(x: Expr, lent: Mapping[str, Place]) -> bool:
    """Whether a value has as many axes as the module's input: computed of it elementwise, with
    numbers and the module's own tensors.
    """
    while x.args:
        first, *others = x.args
        is_plain = x.op != "call" or getattr(x.attrs[0], "shaping", "") == "same"
        own = all(a.op == "const" or (a.op == "input" and name_of(a) in lent) for a in others)
        if not (is_plain and own):
            return False
        x = first
    return x.op == "input" and name_of(x) not in lent


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """With nothing of the chain left in a module whose forward keeps something of what it computes;
    ChainError for that.
    """
    before = [(part, {**vars(part)}, {**part._buffers}) for part in module.modules()]
    kept: list[str] = []
    has_values = False
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            now = {**vars(part), **part._buffers}
            found = [name for name, value in now.items() if _stands_for(value)]
            # What a hook in front of forward computes there, it computes in each call.
            is_hooks = part._forward_pre_hooks
            computed = [n for n in found if is_hooks and isinstance(attributes.get(n), Tensor)]
            for name in computed:
                vars(part)[name] = attributes[name]
            found = [name for name in found if name not in computed]
            kept += [f"{type(part).__name__}.{name}" for name in found]
            has_values |= any(_has(now[name], Expr) for name in found)
            if found:
                vars(part).clear()
                vars(part).update(attributes)
                part._buffers.clear()
                part._buffers.update(buffers)
    if kept and not has_values:
        raise NotKnownYet(f"{kept[0]}: forward keeps there what is not known before a call")
    if kept:
        raise ChainError(
            f"{kept[0]}: forward keeps a value there, and a chain has none before a call; return "
            "it beside the result"
        )


def _has(value: object, *kinds: type) -> bool:
    """Whether something is of one of these kinds, or has something that is."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, tuple | list):
        return any(_has(each, *kinds) for each in value)
    return isinstance(value, kinds)


def _stands_for(value: object) -> bool:
    """Whether something stands for a value, a size or a type, or has something that does."""
    return _has(value, Expr, Untold, TypeOf, DeviceOf)


class _Lending(TorchFunctionMode):
    """What a forward computes from the module's tensors alone becomes part of the chain as well."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        told = [a for a in every(args, kwargs) if isinstance(a, Tensor | Expr)]
        own = [a for a in told if id(a) in self.names]
        if name in _TOLD or not (own or any(isinstance(a, Expr) for a in told)):
            return function(*args, **(kwargs or {}))
        is_view = own and (name in VIEWS or (name in SEEING and tells_all()))
        if is_view and (name != "__getitem__" or tells_all() or is_part(as_numbers(args[1]))):
            return self._view(args[0], name, as_numbers((*args[1:], *(kwargs or {}).values())))
        if own and name == "to" and current_call() and all(map(is_device, args[1:])):
            (device,) = (a.told() if isinstance(a, DeviceOf) else a for a in args[1:])
            is_there = device == args[0].device
            return args[0] if is_there else self._view(args[0], name, (device,))
        if own and name in _BAKED:
            raise ChainError(
                f"{name} of {self.names[id(own[0])]!r}: a tensor of the module has no values "
                "before a call; what is computed from it stays a tensor"
            )
        try:
            return of_torch(Expr, function, types, args, kwargs)
        except ChainError as error:
            if name.endswith("_") or (kwargs or {}).get("out") is not None:
                raise
            computed = [n for a in told if isinstance(a, Expr) for n in inputs([a])]
            is_ours = len(own) + sum(isinstance(a, Expr) for a in told) == len(told)
            if not is_ours or not {*map(name_of, computed)} <= {*self.names.values()}:
                raise
            if computed and not tells_all():  # which takes views of what it is computed of
                raise NotKnownYet(str(error)) from error
            if computed or own[0] is not args[0] or not isinstance(own[0], Tensor):
                raise
            return self._view(own[0], name, tuple(args[1:]), kwargs or {})

    def _view(
        self,
        tensor: Tensor,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Tensor:
        """A view of one of the module's tensors, or what torch computes of those alone, which each
        call takes of them.
        """
        tracing, whose = current(), self.names[id(tensor)]
        assert tracing is not None
        view = View(
            whose, method, self._named(args), {w: self._named(v) for w, v in kwargs.items()}
        )
        tensors = {
            self.names[id(t)]: t for t in every((tensor, *args), kwargs) if id(t) in self.names
        }
        part: Tensor = view.taken(tensors.__getitem__)
        self.names[id(part)] = name_of(tracing.hold(part, f"{whose}_part", view))
        return part

    def _named(self, told: Any) -> Any:
        """What a function is told, with the names of tensors."""
        if isinstance(told, tuple | list):
            return type(told)(map(self._named, told))
        return Other(self.names[id(told)]) if id(told) in self.names else told


@contextmanager
def _hooked(module: nn.Module) -> Iterator[None]:
    """With the module's forward behind those of its hooks that compute parameters, as pruning has
    them; its parts have their own.
    """
    hooks = [
        hook
        for hook in module._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils.")
    ]
    if not hooks or "forward" in vars(module):
        yield
        return
    forward = module.forward

    @wraps(forward)
    def behind(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            hook(module, ())
        return forward(*args, **kwargs)

    module.forward = behind
    try:
        yield
    finally:
        del module.forward


@contextmanager
def _steps_for_norms(module: nn.Module, given: list[tuple[Any, Expr]]) -> Iterator[None]:
    """For norms that ask for shapes, or count batches as they run, the steps that they are; what
    each is given is noted.
    """

    def forward(norm: Any, x: Expr) -> Any:
        given.append((norm, x))
        return _batch_norm(norm, x) if isinstance(norm, _BatchNorm) else _instance_norm(norm, x)

    own = (_BatchNorm.forward, _InstanceNorm.forward)  # and nobody's who has changed it
    norms = [part for part in module.modules() if type(part).forward in own]
    norms = [part for part in norms if "forward" not in vars(part)]
    for part in norms:
        part.forward = partial(forward, part)
    try:
        yield
    finally:
        for part in norms:
            del part.forward


def _batch_norm(norm: Any, x: Expr) -> Any:
    has_statistics = norm.running_mean is not None
    counts = has_statistics and norm.training
    names = (*RUNNING, "weight", "bias", *[COUNTER] * counts)
    in_training = norm.training or not has_statistics
    how = {"training": in_training, "momentum": norm.momentum, "eps": norm.eps}
    return lookup("batch_norm")(x, **_tensors_of(norm, names), **how)


def _instance_norm(norm: Any, x: Expr) -> Any:
    by_input = norm.training or not norm.track_running_stats
    how = {"use_input_stats": by_input, "momentum": norm.momentum or 0.0, "eps": norm.eps}
    return lookup("instance_norm")(x, **_tensors_of(norm, (*RUNNING, "weight", "bias")), **how)


def _tensors_of(norm: Any, names: Sequence[str]) -> dict[str, Expr]:
    """What stands for those of the norm's tensors that it has."""
    tensors = {name: getattr(norm, name) for name in names}
    return {n: known(tensor, n) for n, tensor in tensors.items() if tensor is not None}
