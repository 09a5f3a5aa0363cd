"""The operations: each is one function of expressions, registered under its name."""

from fusegen.ops import (
    activation,
    arithmetic,
    cast,
    dropout,
    masking,
    normalisation,
    piecewise,
    pooling,
    primitives,
    reduction,
    reshaping,
)
from fusegen.ops.chain import RESERVED, Chain, keep, recall
from fusegen.ops.definition import ALIASES, OPS, Op, lookup
from fusegen.ops.registry import op
from fusegen.ops.schema import (
    Attribute,
    BadArgument,
    BadStep,
    Channel,
    Mask,
    Parameter,
    Placement,
    Slope,
    Trailing,
    nearest,
)
from fusegen.ops.step import COUNTER, RUNNING, STRUCTURAL, Definition, Step

__all__ = [
    "ALIASES",
    "COUNTER",
    "OPS",
    "RESERVED",
    "RUNNING",
    "STRUCTURAL",
    "Attribute",
    "BadArgument",
    "BadStep",
    "Chain",
    "Channel",
    "Definition",
    "Mask",
    "Op",
    "Parameter",
    "Placement",
    "Slope",
    "Step",
    "Trailing",
    "activation",
    "arithmetic",
    "cast",
    "dropout",
    "keep",
    "lookup",
    "masking",
    "nearest",
    "normalisation",
    "op",
    "piecewise",
    "pooling",
    "primitives",
    "recall",
    "reduction",
    "reshaping",
]
