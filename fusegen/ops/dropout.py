"""Dropout of every kind. Each call draws a seed from torch's generator of the device; the mask is a
function of the seed and of each element's place, worked out again wherever it is needed.
"""

from __future__ import annotations

import math

from fusegen.errors import ChainError
from fusegen.ir import Expr, primitive
from fusegen.ops.registry import op
from fusegen.ops.schema import ChannelNoise, Noise

_GRAINS = 1 << 24  # noise is a multiple of 1 / _GRAINS
# What selu tends to for very negative x, without its sign.
_SATURATION = 1.7580993408473766


def _problem(p: float, training: bool) -> str | None:
    return None if 0 <= p <= 1 else f"p wants a probability between 0 and 1, got {p}"


def _draws(p: float, training: bool) -> bool:
    return training and 0 < p < 1


def _is_kept(p: float, noise: Expr | None) -> Expr:
    if noise is None:
        raise ChainError("dropout draws noise for each call, so it must be a step of a chain")
    return primitive("ge", noise, math.ceil(p * _GRAINS) / _GRAINS)


def _dropped(x: Expr, p: float, training: bool, noise: Expr | None) -> Expr:
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    return primitive("where", _is_kept(p, noise), x * (1.0 / (1.0 - p)), 0.0)


def _alpha_dropped(x: Expr, p: float, training: bool, noise: Expr | None) -> Expr:
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    scale = 1.0 / math.sqrt((_SATURATION**2 * p + 1) * (1 - p))
    shift = _SATURATION * scale * p
    kept = x * scale + shift
    return primitive("where", _is_kept(p, noise), kept, shift - _SATURATION * scale)


_SAMPLES = ((0.5, False), (0.0,), (1.0,))


@op(
    reference="torch.nn.functional.dropout",
    samples=_SAMPLES,
    ulp=0,
    check=_problem,
    draws=_draws,
)
def dropout(x: Expr, p: float = 0.5, training: bool = True, noise: Noise | None = None) -> Expr:
    """x / (1 - p), or 0 with probability p; x as it is where training is False.

    Each call draws another mask, from torch's generator of x's device: torch.manual_seed brings it
    back. Two steps with noise of one name drop the same elements.
    """
    return _dropped(x, p, training, noise)


@op(
    reference="torch.nn.functional.alpha_dropout",
    samples=_SAMPLES,
    check=_problem,
    draws=_draws,
)
def alpha_dropout(
    x: Expr, p: float = 0.5, training: bool = True, noise: Noise | None = None
) -> Expr:
    """Dropout that keeps mean and variance of what selu gives: to its limit, not to 0."""
    return _alpha_dropped(x, p, training, noise)


@op(
    reference="torch.nn.functional.feature_alpha_dropout",
    samples=_SAMPLES,
    check=_problem,
    draws=_draws,
)
def feature_alpha_dropout(
    x: Expr, p: float = 0.5, training: bool = True, noise: ChannelNoise | None = None
) -> Expr:
    """alpha_dropout of whole channels."""
    return _alpha_dropped(x, p, training, noise)


@op(
    reference="torch.nn.functional.dropout1d",
    samples=_SAMPLES[:1],
    ulp=0,
    channel_axes=1,
    check=_problem,
    draws=_draws,
)
def dropout1d(
    x: Expr, p: float = 0.5, training: bool = True, noise: ChannelNoise | None = None
) -> Expr:
    """Dropout of whole channels of one axis."""
    return _dropped(x, p, training, noise)


@op(
    reference="torch.nn.functional.dropout2d",
    samples=_SAMPLES[:1],
    ulp=0,
    channel_axes=2,
    check=_problem,
    draws=_draws,
)
def dropout2d(
    x: Expr, p: float = 0.5, training: bool = True, noise: ChannelNoise | None = None
) -> Expr:
    """Dropout of whole channels of two axes."""
    return _dropped(x, p, training, noise)


@op(
    reference="torch.nn.functional.dropout3d",
    samples=_SAMPLES[:1],
    ulp=0,
    channel_axes=3,
    check=_problem,
    draws=_draws,
)
def dropout3d(
    x: Expr, p: float = 0.5, training: bool = True, noise: ChannelNoise | None = None
) -> Expr:
    """Dropout of whole channels of three axes."""
    return _dropped(x, p, training, noise)
