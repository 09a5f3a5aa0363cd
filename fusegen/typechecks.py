"""Which element types a step takes, or the error."""

from __future__ import annotations

from typing import NoReturn

from fusegen.errors import ArgumentError, UnsupportedError
from fusegen.ops import Chain, Step
from fusegen.promotion import FLOATING, INTEGERS, NARROW, QUANTISED, WHOLE


def check_element_type(name: str, dtype: str) -> None:
    """Raise ArgumentError for a tensor of a type that no kernel reads."""
    if dtype not in (*FLOATING, *INTEGERS, "bool"):
        raise ArgumentError(
            f"argument {name!r}: got a tensor of {dtype}, wanted one of {', '.join(FLOATING)}, of "
            f"bool for conditions, or of integers; convert it first, for example {name}.float()"
        )


def check_mask(step: Step, name: str, dtype: str) -> None:
    """Raise ArgumentError where conditions are wanted and something else is given."""
    if dtype != "bool":
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {dtype}, wanted bool: it says where a condition "
            f"holds; compare it with a number first, for example {name} != 0"
        )


def check_labels(step: Step, name: str, dtype: str) -> None:
    """Raise ArgumentError where the numbers of classes are wanted and something else is given."""
    if dtype != WHOLE:
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {dtype}, wanted {WHOLE}: it says which class is "
            f"right; convert it first, for example {name}.long(), or of probabilities write "
            f"log_softmax(1) | mul({name}) | sum(1) | neg"
        )


def check_named_type(step: Step, name: str, dtype: str) -> None:
    """Raise ArgumentError where a type is wanted that numbers are computed in."""
    if dtype not in FLOATING:
        raise ArgumentError(
            f"{step.text}: {name!r} is {dtype}, wanted one of {', '.join(FLOATING)}, since it says "
            "what x is rounded to; name a tensor of such a type, or write to('float32')"
        )


def check_same_type(step: Step, name: str, dtype: str, other: str) -> None:
    """Raise ArgumentError for two types that are not mixed in this operation.

    fp32 is, with a narrower type: parameters are fp32 where activations are narrow. torch does so
    in layer_norm on CPUs, and under autocast.
    """
    is_mixed = "float32" in (other, dtype) and {other, dtype} <= {*FLOATING} - {"float64"}
    if other != dtype and not is_mixed:
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {other} but the value it meets is {dtype}, a mix "
            f"that is not taken here; convert one of them, for example {name}.to(torch.{dtype})"
        )


def check_parameter_type(step: Step, name: str, dtype: str, other: str) -> None:
    """Raise ArgumentError for a parameter that is neither of the value's type nor, where that has
    16 bits, of fp32.
    """
    if other not in (dtype, "float32" if dtype in NARROW else dtype):
        raise ArgumentError(
            f"{step.text}: operand {name!r} is {other} but the value it meets is {dtype}, a mix "
            f"that torch refuses here; convert one of them, for example {name}.to(torch.{dtype})"
        )


def refuse_final(step: Step, dtype: str) -> NoReturn:
    """Raise ArgumentError for a step that works on what a quantising one gives."""
    raise ArgumentError(
        f"{step.text}: got a value of {dtype}, which only a result can be; let the step that "
        "makes it be the last of the chain"
    )


def refuse_gradients(chain: Chain, dtype: str) -> None:
    """Raise UnsupportedError where a result of this type is to be differentiated."""
    if dtype in QUANTISED:
        raise UnsupportedError(
            f"{chain.steps[-1].text}: a result of {dtype} has no gradient, but some argument needs "
            "one; call it under torch.no_grad(), or detach the arguments"
        )


def check_type(step: Step, parameter: str, name: str, dtype: str, running: str) -> None:
    """Raise ArgumentError for an operand of a type that its parameter does not take, or not beside
    a value of the running one.
    """
    definition = step.definition
    assert definition is not None
    if definition.parameter(parameter).is_type:
        check_named_type(step, name, dtype)
        return
    wanted = definition.parameter(parameter).kind
    if wanted == "index":
        check_labels(step, name, dtype)
        return
    check_element_type(name, dtype)
    if wanted == "truth":
        check_mask(step, name, dtype)
    if running not in FLOATING:
        return  # refused, or made numbers, by the body
    if definition.keeps_dtype:
        check_parameter_type(step, name, running, dtype)
    elif definition.same_dtype:
        check_same_type(step, name, running, dtype)
