"""What an expression graph means, in numpy: the evaluator that everything else is compared with.

A graph is evaluated over a domain that gives each axis a size: negative axes are the tensor's,
positive ones the positions within pooling windows, the larger the outer. An array has one dimension
for every axis of the domain, in the domain's order, and size one where it does not vary. Below it,
a hypothesis strategy for random graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from fusegen import arity, ir
from fusegen.ir import Expr

Array = np.ndarray[Any, Any]
Domain = Mapping[int, int]  # axis -> size, in the order of an array's dimensions

_erf = np.frompyfunc(math.erf, 1, 1)
_erfc = np.frompyfunc(math.erfc, 1, 1)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "erf": lambda x: np.asarray(_erf(x)).astype(x.dtype),
    "erfc": lambda x: np.asarray(_erfc(x)).astype(x.dtype),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    "detach": lambda x: x,
    "exp2": np.exp2,
    "log2": np.log2,
    "log10": np.log10,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sign": lambda x: np.nan_to_num(np.sign(x)),
    "pow": np.power,
    "fmod": np.fmod,
    "atan2": np.arctan2,
    "minimum": np.minimum,  # these two hand NaN on, as torch's do
    "maximum": np.maximum,
    "where": np.where,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
}


def _rounded(dtype: str) -> Callable[[Array], Array]:
    kind = getattr(torch, dtype)
    return lambda x: np.asarray(torch.from_numpy(np.array(x)).to(kind).double())


NUMPY |= {op: lambda a, t=t: a.astype(np.int64).astype(t) for op, t in arity.WRAPS.items()}
NUMPY[arity.QUOTIENT] = lambda a, b: np.trunc(a / b)
NUMPY |= {op: lambda a: np.asarray(a).astype(np.int64) for op in arity.MADE}
NUMPY |= {op: _rounded(t) for op, t in {**arity.CASTS, **arity.QUANTISING_CASTS}.items()}


def shape_of(extent: Iterable[int], domain: Domain) -> tuple[int, ...]:
    """The shape of an array that varies along these axes."""
    extent = frozenset(extent)
    return tuple(size if a in extent else 1 for a, size in domain.items())


def evaluate(
    roots: Sequence[Expr],
    values: Mapping[str, Array],
    domain: Domain,
    dtype: type[np.floating[Any]] = np.float64,
) -> list[Array]:
    """The roots' values, given the inputs' by name; each step is rounded to dtype."""
    known = evaluate_all(roots, values, domain, dtype)
    return [known[root] for root in roots]


def evaluate_all(
    roots: Sequence[Expr],
    values: Mapping[str, Array],
    domain: Domain,
    dtype: type[np.floating[Any]] = np.float64,
) -> dict[Expr, Array]:
    """The value of every node below the roots."""
    known: dict[Expr, Array] = {}
    with np.errstate(all="ignore"):
        for node in ir.topological(roots):
            array = _value(node, [known[a] for a in node.args], values, domain, dtype)
            expected = shape_of(node.extent, domain)
            assert array.shape == expected, f"{node}: {array.shape}, extent says {expected}"
            known[node] = array
    return known


def _value(
    node: Expr,
    args: list[Array],
    values: Mapping[str, Array],
    domain: Domain,
    dtype: type[np.floating[Any]],
) -> Array:
    everywhere = (1,) * len(domain)
    if node.op == "input":
        kinds: Mapping[str, Any] = {"number": dtype, "truth": np.bool_, "index": np.int64}
        return np.asarray(values[ir.name_of(node)], kinds[node.kind])
    if node.op == "const":
        number = ir.constant(node)
        return np.full(everywhere, number, np.int64 if node.kind == "index" else dtype)
    if node.op == "count":
        return np.full(everywhere, math.prod(domain[a] for a in ir.axes_of(node)), dtype)
    if node.op == "position":
        return _positions(ir.axes_of(node), domain)
    if node.op == "reduce":
        return _reduced(node, args, domain)
    result: Array = np.asarray(NUMPY[node.op](*args))
    return result.astype(dtype) if node.kind == "number" else result


def _positions(axes: Sequence[int], domain: Domain) -> Array:
    order = list(domain)
    result = np.zeros((1,) * len(order), np.int64)
    for axis in axes:  # outermost first
        along = np.arange(domain[axis]).reshape([-1 if a == axis else 1 for a in order])
        result = result * domain[axis] + along
    return result


def _reduced(node: Expr, args: list[Array], domain: Domain) -> Array:
    kind, axes = ir.reduction(node)
    order = list(domain)
    dims = tuple(order.index(a) for a in axes)
    value = args[0]
    if kind == "sum":
        return value.sum(dims, keepdims=True)
    if kind == "mean":
        return value.mean(dims, keepdims=True)
    if kind == "variance":
        return value.var(dims, keepdims=True)
    if kind in arity.MAXIMA:
        return value.max(dims, keepdims=True)
    # The rest know positions: the axes go last, outermost first, and become one.
    positions = _positions(ir.axes_of(ir.position(axes, 0)), domain)
    length = math.prod(domain[a] for a in axes)
    shape = np.broadcast_shapes(positions.shape, *(a.shape for a in args))
    outermost_first = [order.index(a) for a in ir.axes_of(ir.position(axes, 0))]
    others = [d for d in range(len(order)) if d not in outermost_first]
    kept = [shape[d] for d in others]

    def flat(array: Array) -> Array:
        whole = np.broadcast_to(array, shape).transpose(others + outermost_first)
        return whole.reshape([*kept, length])

    if kind == "argmax":
        result = flat(value).argmax(-1)  # numpy's, too, stops at the first NaN
    else:
        index = flat(args[1])[..., :1]
        result = np.take_along_axis(flat(value), index.astype(int), -1)[..., 0]
    return result.reshape([1 if d in dims else shape[d] for d in range(len(order))])


# --- random graphs ---

DOMAIN: Domain = {-3: 2, -2: 3, -1: 4}
NAMES: Mapping[str, frozenset[int]] = {
    "x": frozenset({-3, -2, -1}),
    "y": frozenset({-3, -2, -1}),
    "channel": frozenset({-2}),
    "row": frozenset({-1}),
    "column": frozenset({-3, -2}),
    "scalar": frozenset(),
}
LEAVES = tuple(ir.tensor(name, extent, 3) for name, extent in NAMES.items())
CONSTANTS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.2, -0.5, 3.0)
_NUMERIC = tuple(
    op
    for op in arity.ARITY
    if op not in (*arity.COMPARISONS, *arity.CONNECTIVES, "where", "pow")
    and op not in (*arity.CASTS, *arity.QUANTISING_CASTS, *arity.WRAPS, *arity.MADE, arity.QUOTIENT)
)
# The common ones more often, so that rules meet what they look for.
OPERATIONS = (
    *_NUMERIC,
    *("add", "sub", "mul", "div", "neg") * 3,
    *("where",) * 5,
    "pow",
    "pow_number",
    *("sum", "mean", "variance", "max") * 2,
)
AXES = tuple(frozenset(a) for a in ((-1,), (-2,), (-3,), (-1, -2), (-2, -3), (-3, -2, -1)))


@dataclass(frozen=True)
class Recipe:
    """Small numbers from which a graph is built; hypothesis shrinks them."""

    steps: tuple[tuple[int, int, int, int, int], ...]
    seed: int


recipes = st.builds(
    Recipe,
    st.lists(st.tuples(*[st.integers(0, 255)] * 5), min_size=1, max_size=12).map(tuple),
    st.integers(0, 2**32 - 1),
)


def build(recipe: Recipe, operations: Sequence[str] = OPERATIONS) -> list[Expr]:
    """The numbers and reductions that a recipe describes, in the order they are made."""
    pool: list[Expr] = [*LEAVES, *map(ir.const, CONSTANTS)]
    conditions: list[Expr] = [LEAVES[0] > 0, LEAVES[0] > LEAVES[1]]
    for op_code, *picks in recipe.steps:
        op = operations[op_code % len(operations)]
        # Counted from the end, so that small numbers build on what was made last.
        a, b, c = (pool[-1 - i % len(pool)] for i in picks[:3])
        if op in arity.REDUCE_KINDS:
            node = ir.reduce(op, AXES[picks[1] % len(AXES)], a)
        elif op == "where":
            if picks[3] % 3 == 0:
                compare = arity.COMPARISONS[picks[3] % len(arity.COMPARISONS)]
                conditions.append(ir.primitive(compare, b, c))
            if picks[3] % 7 == 0:
                connective = arity.CONNECTIVES[picks[3] % 3]
                count = arity.ARITY[connective]
                conditions.append(ir.primitive(connective, *conditions[-count:]))
            node = ir.primitive("where", conditions[-1 - picks[2] % len(conditions)], a, b)
        elif op == "pow_number":
            node = ir.primitive("pow", a, (0.0, 1.0, 2.0, 3.0, -1.0, 0.5)[picks[1] % 6])
        else:
            node = ir.primitive(op, *(a, b, c)[: arity.ARITY[op]])
        pool.append(node)
    return pool[len(LEAVES) + len(CONSTANTS) :]


KINKS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0)
HARD = (*KINKS, math.nan, math.inf, -math.inf, 1e-40, 3e38)


def numbers(seed: int, extra: Sequence[float] = KINKS) -> dict[str, Array]:
    """A value for every leaf: half of them drawn from `extra`, half normal."""
    random = np.random.default_rng(seed)
    result = {}
    for leaf in LEAVES:
        shape = shape_of(leaf.extent, DOMAIN)
        plain = random.normal(size=shape)
        result[ir.name_of(leaf)] = np.where(
            random.random(shape) < 0.5, plain, random.choice(extra, size=shape)
        )
    return result
