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
    # Here, because they import torch.
    from fusegen.answers import Answers
    from fusegen.runtime import Fused  # the same

    try:
        if isfunction(source):
            found = Answers().noting(lambda: traced(source))
            fused = Fused(found.alone(), found.loose)
        else:
            fused = Fused(Answers().noting(lambda: chain(source)))
    except (NotKnownYet, UnsupportedError) as error:
        if isinstance(source, str | Chain):
            raise
        return _specialised(source, str(error))
    if isfunction(source):  # so that help and inspect.signature tell what the function would
        update_wrapper(fused, source, updated=())
        fused._input = next(iter(signature_of(source).parameters))
        fused._optionals = Optionals(source)
        fused._instead = partial(_called_instead, fused, source)
    return fused


def _specialised(function: Callable[..., Any], reason: str) -> "Specialised":
    # Here, because it imports torch's compiler, which takes a second.
    from fusegen.specialised import Specialised

    return Specialised(function, reason)


def _called_instead(fused: "Fused", function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The function traced for a call whose tensors its chain does not take."""
    fused._instead = _specialised(function, "its chain does not take some tensors")
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
