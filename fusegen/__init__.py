"""A code-generating kernel fuser for PyTorch.

Every operation is an attribute as well, a user's own included: `fusegen.gelu`, `fusegen.where`,
`fusegen.exp`. `import fusegen` does not import torch; compiling does.
"""

__version__ = "0.1.0"

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import isfunction
from inspect import signature as signature_of
from typing import TYPE_CHECKING, Any

from fusegen.dsl import chain
from fusegen.errors import (
    ArgumentError,
    BuildError,
    CacheError,
    ChainError,
    FusegenError,
    UnsupportedError,
)
from fusegen.ir import Expr
from fusegen.ops import (
    ALIASES,
    OPS,
    Chain,
    Channel,
    Labels,
    Mask,
    Op,
    Trailing,
    Typed,
    give,
    keep,
    op,
    operand,
    recall,
    takes,
)
from fusegen.ops.reducing import reduce_max, reduce_mean, reduce_sum, reduce_variance
from fusegen.optional import Optionals
from fusegen.trace import traced
from fusegen.unsaid import NotKnownYet
from fusegen.windowing import windows

if TYPE_CHECKING:
    from fusegen.layer import Layer
    from fusegen.runtime import Fused
    from fusegen.specialised import Specialised

# Operations are not in it: a star import must not hide Python's abs and pow.
__all__ = [
    "OPS",
    "ArgumentError",
    "BuildError",
    "CacheError",
    "Chain",
    "ChainError",
    "Channel",
    "Expr",
    "Fused",
    "FusegenError",
    "Labels",
    "Layer",
    "Mask",
    "Op",
    "Specialised",
    "Trailing",
    "Typed",
    "UnsupportedError",
    "__version__",
    "chain",
    "compile",
    "give",
    "keep",
    "op",
    "operand",
    "recall",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "reduce_variance",
    "takes",
    "windows",
]


def compile(source: str | Chain | Op | Callable[..., Any]) -> "Fused | Specialised":
    """The chain as a differentiable function of tensors: text, a Chain, an op or a function.

    Nothing is built before its first call. Raises ChainError for a mistake in the chain; of a
    function that asks for sizes or types, which only a call tells, the call does.
    """
    if isfunction(source):
        return _of_function(source)
    # Here, because they import torch.
    from fusegen.answers import Answers
    from fusegen.runtime import Fused  # the same

    try:
        return Fused(Answers().noting(lambda: chain(source)))
    except (NotKnownYet, UnsupportedError) as error:
        if isinstance(source, str | Chain):
            raise
        return _specialised(source, str(error))


def _of_function(
    source: Callable[..., Any], given: frozenset[str] = frozenset()
) -> "Fused | Specialised":
    """A function, compiled for tensors in the place of these of its parameters, which have a
    default.
    """
    # Here, because they import torch.
    from fusegen.answers import Answers
    from fusegen.runtime import Fused  # the same

    try:
        found = Answers().noting(lambda: traced(source, given=given))
        fused = Fused(found.alone(), found.loose)
    except (NotKnownYet, UnsupportedError) as error:
        return _specialised(source, str(error))
    update_wrapper(fused, source, updated=())  # so that help and inspect.signature tell of it
    fused._input = next(iter(signature_of(source).parameters))
    fused._instead = partial(_called_instead, fused, source, bool(given))
    if not given:
        fused._optionals = Optionals(source, partial(_of_function, source))
        fused._made_of = (compile, (source,))
        if fused._optionals.names or fused._optionals.numbers or found.loose:
            fused._otherwise = fused._made_of  # its chain is not all of it
    return fused


def _specialised(function: Callable[..., Any], reason: str) -> "Specialised":
    # Here, because it imports torch's compiler, which takes a second.
    from fusegen.specialised import Specialised

    return Specialised(function, reason)


def _called_instead(
    fused: "Fused", function: Callable[..., Any], by_name: bool, *args: Any, **named: Any
) -> Any:
    """The function traced for a call whose tensors its chain does not take."""
    specialised = _specialised(function, "its chain does not take some tensors")

    def called(x: Any, *operands: Any, **named: Any) -> Any:
        return specialised(x, **dict(zip(fused._given, operands, strict=True)), **named)

    fused._instead = called if by_name else specialised
    return fused._instead(*args, **named)


def __getattr__(name: str) -> Op:
    if name == "Fused":
        # Here, because it imports torch.
        from fusegen.runtime import Fused

        return Fused  # type: ignore[return-value]  # to a type checker it is the import above
    if name == "Specialised":
        # Here, because it imports torch.
        from fusegen.specialised import Specialised

        return Specialised  # type: ignore[return-value]  # the same
    if name == "Layer":
        # Here, because it imports torch.
        from fusegen.layer import Layer

        return Layer  # type: ignore[return-value]  # the same
    found = OPS.get(ALIASES.get(name, name))
    if found is None:
        raise AttributeError(f"module 'fusegen' has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *OPS, *ALIASES})
