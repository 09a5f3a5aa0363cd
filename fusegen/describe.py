"""A chain as source text without tensors: shapes and types are told, or assumed where they are not.

What a module depends on is decided here from plain data, by the rules that the runtime follows for
tensors; so the text is the one that a call on such tensors builds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusegen import ir
from fusegen.codegen import Source
from fusegen.errors import ArgumentError
from fusegen.lower import FLOATING, Bound, Shape, bind, stages
from fusegen.ops import Chain, Op, Step, lookup
from fusegen.program import (
    Derivative,
    Program,
    Signature,
    derivative,
    forward,
    index_dtype,
    source,
)
from fusegen.target import TARGETS

LAYOUTS = ("contiguous", "channels_last")
_FEWEST_AXES = 4
_ASSUMED_SIZES = (2, 3, 8, 10, 12)  # of the first axes; those after them are as long as the last
# Where offsets have 32 bits, a row longer than this that shares the machine with too few others
# goes over many blocks, in passes.
_LONG_ROW = 1 << 16
_FEW_ROWS = 512


@dataclass(frozen=True)
class Situation:
    """What a chain is called with: shapes (assumed where None or left out), element type, layout."""

    shape: Shape | None = None
    operands: Mapping[str, Shape] = field(default_factory=dict)
    dtype: str = "float32"
    layout: str = "contiguous"


def sources(
    chain: Chain, target: str, situation: Situation, *, grad: bool
) -> tuple[Source, ...]:
    """The modules that a call builds: one, or two where pooling follows a reduction.

    With grad they hold the forward that saves what its backward wants, and the backward for x and
    every operand. Raises ArgumentError for a situation that the chain does not fit.
    """
    _check("target", target, tuple(TARGETS))
    _check("dtype", situation.dtype, FLOATING)
    _check("layout", situation.layout, LAYOUTS)
    shape, operands = assumed_shapes(chain, situation)
    found = []
    for stage in stages(chain):
        dtype = situation.dtype
        bound = bind(stage, (shape, dtype), {n: (operands[n], dtype) for n in stage.operands})
        order = _memory_order(len(bound.domain), situation.layout)
        program = forward(bound, is_training=grad)
        dtypes = element_types(program, bound, [dtype] * len(program.graph.inputs))
        programs = [program]
        if grad:
            found_derivative = derivative(program, range(len(program.graph.inputs)), (0,))
            programs.append(found_derivative.program)
            dtypes = with_derivative(program, found_derivative, dtypes)
        found.append(source(stage, programs, signature(target, order, programs, dtypes, bound)))
        shape = bound.result_shape
    return tuple(found)
