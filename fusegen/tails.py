"""erfc as a power of two: log2(erfc(z)) is a polynomial of few coefficients for z >= 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fusegen.ir import Expr, const, primitive
from fusegen.rewriting import operation

# log2(erfc(z)) for z >= 0, lowest power first, the leading coefficient negative, so that it falls
# for ever. Fitted for the least error of erfc relative to max(erfc, 1e-4), or 1e-6 for float16:
# below, the absolute error is at most 6e-9, where eager's 1 + erff(a) is off by 3e-8.
# bfloat16: relative error 2^-14.0, half an ulp being 2^-9; float16: 2^-17.7 of 2^-12.
LOG2_ERFC: Mapping[str, tuple[float, ...]] = {
    "bfloat16": (
        *(-8.72267761e-05, -1.62584444, -0.926178942),
        *(-0.13863339, 0.0242496317, -0.00195212552),
    ),
    "float16": (
        *(4.06858937e-06, -1.62809224, -0.917053586, -0.152373159),
        *(0.033801887, -0.00515758805, 0.000468866939, -1.86755866e-05),
    ),
}
# The same for the least error of 1 - erfc relative to erf: 2^-20.4.
LOG2_ERFC_IN_ERF = (
    *(0.0, -1.6279082, -0.918376552),
    *(-0.148936753, 0.0297970511, -0.00299602841),
)
# Up to here erf is its series to the third power, off by 1.1e-5 of itself; from here on the
# difference of 1 and erfc is off by 2^-22.5 / 0.11.
ERF_SERIES_END = 0.1
ERF_SERIES = (2.0 / math.sqrt(math.pi), -2.0 / (3.0 * math.sqrt(math.pi)))
# The same for single precision: erfc within 6e-8 of 1, and within 3e-4 of itself down to 1e-8.
LOG2_ERFC_WIDE = (
    *(0.0, -1.6279090642929077, -0.9184182286262512, -0.1484183371067047, 0.027949824929237366),
    *(-0.00014213791291695088, -0.0021781667601317167, 0.0008588993223384023),
    *(-0.0001790586393326521, 2.0664692783611827e-05, -1.0380076673754957e-06),
)


def polynomial(x: Expr, coefficients: Iterable[float]) -> Expr:
    """A polynomial of x, lowest power first."""
    return operation("polynomial", x, *map(const, coefficients))


def erfc_of_size(x: Expr, factor: float, scale: float, log2_erfc: Sequence[float]) -> Expr:
    """scale * erfc(factor * |x|); what is below 2^-126 is zero."""
    first, *others = (c * factor**power for power, c in enumerate(log2_erfc))
    exponent = polynomial(primitive("abs", x), (first + math.log2(scale), *others))
    return operation("exp2_flushed", exponent)
