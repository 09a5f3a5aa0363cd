"""From arguments to parameters: which of an op's each fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Literal, get_args, get_origin

from fusegen.ir import Expr
from fusegen.ops.schema import BadArgument, Parameter, nearest, show_value, signature_text, word_of


def gathered(parameters: Sequence[Parameter], args: Sequence[object]) -> Sequence[object]:
    """Arguments, with numbers made a tuple where that is all an operation takes: its numbers may
    stand one by one, as in torch's reshape(2, -1).
    """
    kinds = [get_origin(kind) for p in parameters for kind in (p.role, *p.accepts)]
    takes_only_a_tuple = kinds == [None, tuple] and parameters[0].role == "attribute"
    are_numbers = all(isinstance(a, Integral) and not isinstance(a, bool) for a in args)
    return (tuple(args),) if takes_only_a_tuple and args and are_numbers else args


def match(
    op_name: str,
    parameters: Sequence[Parameter],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> dict[str, object]:
    """What each parameter gets: tensors fill operands in order, constants fill attributes."""
    by_name = {p.name: p for p in parameters}
    for keyword in kwargs:
        if keyword not in by_name:
            guess = nearest(keyword, by_name)
            hint = f"did you mean {guess!r}?" if guess else _takes(op_name, parameters)
            raise BadArgument(f"{op_name}: no argument is called {keyword!r}; {hint}", keyword)
    given = dict(kwargs)
    args = gathered(parameters, args)
    names_tensors = any(p.takes_tensor for p in parameters)
    for position, value in enumerate(args):
        is_tensor = isinstance(value, Expr) or (isinstance(value, str) and names_tensors)
        # A word that one of the constants may be is that, and no tensor's name.
        word = next((p for p in parameters if _takes_word(p, value) and p.name not in given), None)
        if word is not None:
            given[word.name] = value
            continue
        for p in parameters:
            fits = p.takes_tensor if is_tensor else p.takes_constant
            if fits and not p.keyword_only and p.name not in given:
                given[p.name] = value
                break
        else:
            what = "tensor" if is_tensor else "constant"
            meant = (
                "; for a == b write fusegen.eq(a, b)"
                if any(isinstance(a, bool) for a in args)
                else ""
            )
            named = [p.name for p in parameters if p.keyword_only and bool in p.accepts]
            meant = f"; write {named[0]}={value}" if named and isinstance(value, bool) else meant
            raise BadArgument(
                f"{op_name}: no place for the {what} {show_value(value)}{meant}; "
                f"{_takes(op_name, parameters)}",
                position,
            )
    return given


def _takes_word(parameter: Parameter, value: object) -> bool:
    words = [w for k in parameter.accepts if get_origin(k) is Literal for w in get_args(k)]
    return not parameter.keyword_only and word_of(value) in words


def _takes(op_name: str, parameters: Sequence[Parameter]) -> str:
    return f"it is {signature_text(op_name, parameters)}"
