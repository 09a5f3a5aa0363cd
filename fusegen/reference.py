"""The reference: a chain run with torch's own eager operations, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusegen import arity, ir
from fusegen.errors import EmptyReductionError, UnsupportedError
from fusegen.inlining import walked
from fusegen.ir import Expr
from fusegen.layouts import dtype_name
from fusegen.ops import Chain, Op, Step
from fusegen.ops.reducing import class_axis

_TORCH: Mapping[str, Callable[..., Any]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "detach": torch.Tensor.detach,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "log10": torch.log10,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "pow": torch.pow,
    "fmod": lambda a, b: torch.fmod(*_tensors(a, b)),
    "atan2": lambda a, b: torch.atan2(*_tensors(a, b)),
    "minimum": lambda a, b: torch.minimum(*_tensors(a, b)),
    "maximum": lambda a, b: torch.maximum(*_tensors(a, b)),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "where": lambda c, a, b: (
        torch.where(c, *_tensors(a, b)) if isinstance(c, Tensor) else (a if c else b)
    ),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    **{op: lambda a, t=t: a.to(getattr(torch, t)) for op, t in arity.CASTS.items()},
}


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors; a number takes the other's type."""
    if not isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.full_like(b, a), b
    if not isinstance(b, Tensor) and isinstance(a, Tensor):
        return a, torch.full_like(a, b)
    return torch.as_tensor(a), torch.as_tensor(b)


def run_eagerly(chain: Chain, x: Tensor, operands: Mapping[str, Tensor]) -> Any:
    """Each step as a torch operation: the op's own reference, or its body evaluated with torch.

    The result, or a tuple of it and what is given.
    """
    return walked(chain, x, operands, _run_step)


def of_nothing(chain: Chain, x: Tensor, operands: Sequence[Tensor]) -> Any:
    """What torch gives where a reduction has no elements; what it refuses then is told."""
    try:
        return run_eagerly(chain, x, dict(zip(chain.operands, operands, strict=True)))
    except (RuntimeError, IndexError, ValueError) as error:
        raise EmptyReductionError(
            f"{chain.text}: reduces an axis without elements of a value of shape "
            f"{tuple(x.shape)}, which has no result: {error}"
        ) from error


def _run_step(step: Step, x: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    definition = step.definition
    assert isinstance(definition, Op)
    function = definition.resolve_reference()
    attributes = dict(step.attributes)
    if step.op != "where":  # whose numbers meet each other
        attributes = _as_given(attributes, (x, *operands.values()))
    if function is None:
        return _run_body(definition, x, operands, attributes)
    if x.dim() > 0:  # labels may lie in the shape that x's axes were made of
        classes = x.dim() + class_axis(x.dim(), attributes)
        wanted = [size for axis, size in enumerate(x.shape) if axis != classes]
        labels = {
            n: t for n, t in operands.items() if definition.parameter(n).placement == "labels"
        }
        apt = {n: t.reshape(wanted) for n, t in labels.items() if t.numel() == math.prod(wanted)}
        operands = {**operands, **apt}
    result: Tensor = function(x, **operands, **attributes)
    return result


def _as_given(attributes: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The numbers that a step is told: whole ones are integers where all that they meet is."""
    if any(tensor.is_floating_point() for tensor in tensors):
        return attributes
    whole = {k: int(v) for k, v in attributes.items() if isinstance(v, float) and v % 1 == 0}
    return attributes | whole


def _run_body(
    definition: Op, x: Tensor, operands: Mapping[str, Tensor], attributes: Mapping[str, Any]
) -> Tensor:
    leaves: dict[Expr, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Expr:
        node = ir.tensor(name, range(-tensor.dim(), 0), tensor.dim())
        leaves[node] = tensor
        return node

    seen: dict[str, Expr | str] = {}
    for name, tensor in operands.items():
        if definition.parameter(name).is_type:
            seen[name] = dtype_name(tensor.dtype)
            continue
        if definition.parameter(name).placement == "channel":
            shape = [1] * x.dim()
            shape[attributes.get("axis", 1)] = -1
            tensor = tensor.reshape(shape)
        seen[name] = leaf(f"operand {name}", tensor)
    root = definition.function(leaf("x", x), **seen, **attributes)
    values: dict[Expr, Any] = dict(leaves)
    for node in ir.topological([root]):
        if node not in values:
            values[node] = _evaluate(node, [values[a] for a in node.args], x)
    result = values[root]
    return result if isinstance(result, Tensor) else torch.full_like(x, result)


def _evaluate(node: Expr, args: list[Any], x: Tensor) -> Any:
    number = ir.constant(node)
    if number is not None:
        return number
    if node.op in _TORCH:
        if not any(isinstance(a, Tensor) for a in args):
            args = [torch.tensor(a, dtype=x.dtype, device=x.device) for a in args]
        return _TORCH[node.op](*args)
    if node.op == "count":
        return float(math.prod(x.shape[a] for a in ir.axes_of(node)))
    if node.op == "reduce":
        kind, axes = ir.reduction(node)
        dims = sorted(axes)
        if kind == "sum":
            return args[0].sum(dims, keepdim=True)
        if kind == "mean":
            return args[0].mean(dims, keepdim=True)
        if kind == "variance":
            return args[0].var(dims, correction=0, keepdim=True)
    raise UnsupportedError(
        f"{node.op} has no equal in torch that works on whole tensors; give the op a reference"
    )
