"""What graphs are made of: scalar primitives, how many arguments each takes, and the kinds of
reductions and of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["number", "truth", "whole", "index", "noise"]

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
CONNECTIVES = ("logical_and", "logical_or", "logical_not")
_BY_ARITY = {
    1: "neg abs sign floor ceil round trunc exp exp2 expm1 log log2 log10 log1p sqrt rsqrt erf "
    "erfc sigmoid sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh detach logical_not",
    2: "add sub mul div pow fmod atan2 minimum maximum lt le gt ge eq ne logical_and logical_or",
    3: "where",
}
# What rounds to an element type, and stays a number; a quantised type is stored, never read.
CASTS = {f"to_{t}": t for t in ("float16", "bfloat16", "float32", "float64")}
# What makes of integers those that a narrower type holds.
WRAPS = {f"wrap_{t}": t for t in ("uint8", "int8", "int16", "int32")}
QUANTISING_CASTS = {f"to_{t}": t for t in ("int8", "float8_e4m3fn", "float8_e5m2")}
# How often an integer has a written one in it, cut off behind the point.
QUOTIENT = "cut_div"
# What makes integers of numbers or places, cut off behind the point, and places of integers.
MADE: Mapping[str, Kind] = {"to_int64": "whole", "to_index": "index"}
# Scalar primitives and how many arguments each takes. Everything a chain computes is made of these.
ARITY: Mapping[str, int] = {
    **{op: n for n, ops in _BY_ARITY.items() for op in ops.split()},
    **dict.fromkeys((*CASTS, *WRAPS, *QUANTISING_CASTS, *MADE), 1),
    QUOTIENT: 2,
}
# What gives integers of integers alone.
OF_WHOLES = ("add", "sub", "mul", "neg", "where", "detach", QUOTIENT, *WRAPS)
# What `reduce` can do along axes. argmax gives the position, in index order, of the first maximum
# (a NaN counts as one). max gives its gradient to that one, amax to all that are as large in equal
# shares, and bound, of which the result must not depend, to none.
MAXIMA = ("max", "amax", "bound")
# Reductions whose results follow the order of summation.
MOMENTS = ("mean", "variance")
SUMS = ("sum", *MOMENTS)
REDUCE_KINDS = (*SUMS, *MAXIMA, "argmax", "pick")
