"""Parameters: a function's input, and its operands with what their annotations ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

from fusegen.errors import ChainError
from fusegen.ops import RESERVED, Placement
from fusegen.ops.schema import alternatives, annotations_of
from fusegen.unsaid import NotKnownYet, current_call

NUMBERS = (bool, int, float, str)  # what a call may give in the place of a tensor: a constant


def operand_of(parameter: str) -> str:
    """What the chain calls the operand that a function has as this parameter, behind the first."""
    return f"{parameter}_" if parameter in RESERVED else parameter


def parameters_of(
    function: Callable[..., Any], name: str, given: Container[str]
) -> tuple[str, dict[str, Placement | None]]:
    """The input's name; and each operand with the placement that its annotation asks for."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise ChainError(f"{name}: not a function that can be traced: {error}") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise ChainError(f"{name}: the first parameter of a chain's function is its input, as f(x)")
    if parameters[0].name == "self":
        raise ChainError(
            f"{name}: a chain is a function of tensors alone, not a method; leave out self, and "
            f"call it as self.{name}(x)"
        )
    hints = annotations_of(function)
    placements: dict[str, Placement | None] = {}
    for parameter in parameters[1:]:
        is_given = parameter.name in given or operand_of(parameter.name) in given
        is_taken = parameter.name in RESERVED and current_call() is None
        if parameter.default is not parameter.empty and not is_given:
            if is_taken and parameter.default is None:
                raise NotKnownYet(f"{name}: whether {parameter.name!r} is given only a call tells")
            continue  # a constant of the chain: Python fills it in
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ChainError(f"{name}: {parameter}: a chain's function lists its operands by name")
        if parameter.kind == parameter.POSITIONAL_ONLY:
            raise ChainError(f"{name}: {parameter.name!r} cannot be positional-only")
        if is_taken:
            raise NotKnownYet(
                f"{name}: the first parameter is the input, whatever its name, and no operand can "
                f"be called {parameter.name!r}; put it first, or call it something else"
            )
        if operand_of(parameter.name) in map(operand_of, placements):
            raise ChainError(f"{name}: {parameter.name!r} and another one have nearly one name")
        annotated = parameter.name in hints
        placement = _placement(hints[parameter.name]) if annotated else None
        if annotated and placement is None and not is_given:
            waits = hints[parameter.name] in NUMBERS and current_call() is None
            raise (NotKnownYet if waits else ChainError)(
                f"{name}: the parameter {parameter.name!r} must be a tensor (Expr, Channel or "
                f"Trailing); for a constant give it a default, {parameter.name}=0.1"
            )
        placements[parameter.name] = placement
    return parameters[0].name, placements


def _placement(annotation: object) -> Placement | None:
    try:
        placement, constants = alternatives(annotation)
    except (ValueError, TypeError):
        return None
    return None if constants else placement
