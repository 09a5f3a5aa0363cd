"""Signatures: what a module depends on beyond its programs, from plain data.

The rules are the same for tensors and for a chain of which only the text is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegen import ir
from fusegen.lower import Bound
from fusegen.program import Derivative, Program
from fusegen.target import TARGETS

# Where offsets have 32 bits, a row longer than this that shares the machine with too few others
# goes over many blocks, in passes.
_LONG_ROW = 1 << 16
_FEW_ROWS = 512


@dataclass(frozen=True)
class Signature:
    """What a module depends on beyond its programs."""

    target: str
    order: tuple[int, ...]  # axes, outermost in memory first
    dtypes: tuple[tuple[str, str], ...]  # of every input and output by name
    index_bits: int
    allow_fused: bool

    def text(self, programs: Sequence[Program]) -> str:
        """A line for the banner."""
        kinds = ", ".join(f"{name} {dtype}" for name, dtype in self.dtypes)
        return f"{'+'.join(p.name for p in programs)}: {kinds}; {self.index_bits}-bit offsets"


def index_dtype(windows: Sequence[tuple[int, int]]) -> str:
    """The smallest element type that holds a position in the window."""
    return "uint8" if math.prod(size for _, size in windows) <= 256 else "int32"


def element_types(program: Program, bound: Bound, input_types: Sequence[str]) -> dict[str, str]:
    """The element type of each tensor of a forward program, by name."""
    types = dict(zip(program.input_names, input_types, strict=True))
    for name in program.output_names:
        picked = types.get(name.removeprefix("picked_"))
        types[name] = bound.dtype if name == "out" else picked or index_dtype(bound.windows)
    return types


def with_derivative(
    program: Program, found: Derivative, dtypes: Mapping[str, str]
) -> dict[str, str]:
    """With the derivative's tensors: a cotangent has the type of what it belongs to."""
    result = dict(dtypes)
    for leaf, (pool, i) in zip(found.program.graph.inputs, found.sources, strict=True):
        name = program.input_names[i] if pool == "input" else program.output_names[i]
        result[ir.name_of(leaf)] = dtypes[name]
    for name, i in zip(found.program.output_names, found.targets, strict=True):
        result[name] = dtypes[program.input_names[i]]
    return result


def signature(
    target: str,
    order: tuple[int, ...],
    programs: Sequence[Program],
    dtypes: Mapping[str, str],
    bound: Bound,
) -> Signature:
    """What the module of these programs depends on."""
    mentioned = {name for p in programs for name in (*p.input_names, *p.output_names)}
    return Signature(
        target,
        order,
        tuple(sorted((name, dtype) for name, dtype in dtypes.items() if name in mentioned)),
        64 if TARGETS[target].is_wide or math.prod(bound.domain) >= 1 << 31 else 32,
        _allows_fused(programs[0], bound),
    )


def _allows_fused(program: Program, bound: Bound) -> bool:
    for node in ir.topological(program.graph.roots):
        if node.op == "reduce":
            _, axes = ir.reduction(node)
            length = math.prod(bound.domain[a] for a in axes if a < 0)
            rows = math.prod(bound.domain) // max(1, length)
            if length > _LONG_ROW and rows < _FEW_ROWS:
                return False
    return True
