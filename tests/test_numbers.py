"""Every operation of the table against eager torch: result and gradients, in every element type."""

import math

import pytest
import torch
from numeric import assert_as_accurate, assert_same_bits, compiled, outcome

from fusegen import ir
from fusegen.dsl import chain
from fusegen.ops import OPS, Chain, lookup
from fusegen.runtime import Fused

SHAPE = (2, 3, 4, 6, 5)
EVERYWHERE = frozenset(range(-len(SHAPE), 0))
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def kind_of(example: Chain) -> tuple[bool, bool]:
    """Whether a one-step chain wants conditions instead of numbers, and whether it gives one."""
    (step,) = example.steps
    for wants_truth in (False, True):
        x = ir.tensor("x", EVERYWHERE | {1, 2, 3}, len(SHAPE), "truth" if wants_truth else "number")
        for operand_kind in ("number", "truth"):
            operands = {p: ir.tensor(p, EVERYWHERE, len(SHAPE), operand_kind) for p, _ in step.operands}
            try:
                result = lookup(step.op).function(x, **operands, **dict(step.attributes))
            except Exception:
                continue
            return wants_truth, result.kind == "truth"
    raise AssertionError(f"{example} works on neither numbers nor conditions")


def whole(example: Chain) -> Chain | None:
    """The example between steps that make a condition of its input, and numbers of its result.

    None for what needs two conditions, which no chain can pass it: operands are numbers.
    """
    wants_truth, gives_truth = kind_of(example)
    if wants_truth and example.operands and example.steps[0].op.startswith("logical_"):
        example = chain(f"keep(number) | lt(0.3) | keep(condition) | recall(number) | gt(-0.4)") | Chain(
            chain(f"keep(unused) | {example.steps[0].op}(condition)").written[1:]
        )
        return example | chain("where(yes, no)")
    if wants_truth:
        example = chain("gt(0)") | example
    return example | chain("where(yes, no)") if gives_truth else example


EXAMPLES = [(name, i, whole(e)) for name, op in OPS.items() for i, e in enumerate(op.examples)]


def cases():
    for name, i, example in EXAMPLES:
        for dtype in DTYPES:
            # Attributes do not change how a type is read, computed in and written: one sample shows that.
            if dtype == "fp32" or i == 0:
                yield pytest.param(name, example, DTYPES[dtype], id=f"{example.text}-{dtype}")


each_case = pytest.mark.parametrize(("name", "example", "dtype"), cases())


def operand_shapes(example: Chain) -> list[tuple[int, ...]]:
    shapes = []
    for operand in example.operands:
        step, parameter = example.uses(operand)[0]
        axis = dict(step.attributes).get("axis")
        sizes = {
            "broadcast": SHAPE,
            "channel": (SHAPE[axis if axis is not None else 1],),
            "trailing": (SHAPE[axis if axis is not None else -1],),
        }
        shapes.append(sizes[parameter.placement])
    return shapes


def is_pointwise(name: str) -> bool:
    return OPS[name].ulp is not None and OPS[name].window_axes == 0


@each_case
def test_an_op_is_as_accurate_as_eager(name, example, dtype, device):
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in (SHAPE, *operand_shapes(example))]
    tensors = [t.to(device, dtype).requires_grad_() for t in tensors]
    fused = Fused(example)
    ours = outcome(fused, tensors)
    eager = outcome(fused.reference, tensors)
    exact = outcome(fused.reference, tensors, dtype=torch.float64)
    assert_as_accurate(ours, eager, exact)
    if OPS[name].ulp == 0 and dtype == torch.float32:
        torch.testing.assert_close(ours.result, eager.result, rtol=0, atol=0, equal_nan=True)


def special_values(example: Chain, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, NaN, infinities, the largest and the smallest, and every kink of the attributes."""
    limits = torch.finfo(dtype)
    values = [0.0, -0.0, math.nan, math.inf, -math.inf, limits.max, -limits.max, limits.tiny, -limits.tiny]
    values += [limits.eps, 1 - limits.eps, 1 + limits.eps, 3.0, 100.0, 1e-3]
    for step in example.steps:
        for _, value in step.attributes:
            if isinstance(value, float):
                values += [value, 1 / value if value else 1.0]
    values += [-v for v in values]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


@each_case
def test_special_values_come_out_as_in_eager(name, example, dtype, device):
    if not is_pointwise(name):
        pytest.skip("a NaN spreads along a row: see the tests of rows and windows below")
    values = special_values(example, dtype)
    n = len(values)
    x = values.repeat_interleave(n).reshape(1, 1, n, n)
    tensors = [x]
    for i, shape in enumerate(operand_shapes(example)):
        # The first operand meets every value of x with every special value of its own.
        operand = torch.randn(x.shape).to(dtype) if i else values.repeat(n).reshape(x.shape)
        tensors.append(operand if len(shape) == len(SHAPE) else torch.tensor([0.75]).to(dtype))
    tensors = [t.to(device).requires_grad_() for t in tensors]
    fused = Fused(example)
    ours = outcome(fused, tensors)
    eager = outcome(fused.reference, tensors)
    is_exact = OPS[name].ulp == 0 and dtype == torch.float32
    close = 0 if is_exact else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.result, eager.result, rtol=close, atol=close, equal_nan=True)
    for a, b in zip(ours.gradients, eager.gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close, equal_nan=True)
