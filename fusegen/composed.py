"""Composed: torch's functions that are several operations of a chain, in torch's own formulas."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fusegen import ir
from fusegen.asked import held
from fusegen.errors import ChainError
from fusegen.ir import Expr
from fusegen.ops import lookup
from fusegen.unsaid import NotKnownYet, current_call, told_of


def _item(x: Any, key: object) -> Expr:
    """x[key], as a function has it: expressions are like tensors there."""
    found: Expr = x[key]
    return found


def _distance(
    x: Expr, other: Expr, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Expr:
    return lookup("norm")(x - other + eps, p, -1, keepdim=keepdim)


def _of_all(loss: Expr, reduction: str) -> Expr:
    return loss if reduction == "none" else lookup(reduction)(loss)


def _triplet(
    anchor: Expr,
    positive: Expr,
    negative: Expr,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Expr:
    """How much nearer the positive one is to lie than the negative one, as far as it does not."""
    near, far = _distance(anchor, positive, p, eps), _distance(anchor, negative, p, eps)
    if swap:
        far = lookup("minimum")(far, _distance(positive, negative, p, eps))
    return _of_all(lookup("clamp")(margin + near - far, min=0.0), reduction)


def _by_cosine(
    x: Expr,
    other: Expr,
    target: Expr,
    margin: float = 0.0,
    reduction: str = "mean",
) -> Expr:
    """1 less the cosine where target is 1, and how far that is above the margin where it is -1."""
    dot, own, others = (lookup("sum")(v, -1) for v in (x * other, x * x, other * other))
    cosine = dot / lookup("sqrt")((own + 1e-12) * (others + 1e-12))
    apart = lookup("clamp")(cosine - margin, min=0.0)
    alike = lookup("where")(ir.primitive("eq", target, 1.0), 1.0 - cosine, 0.0)
    return _of_all(alike + lookup("where")(ir.primitive("eq", target, -1.0), apart, 0.0), reduction)


def _of_labels(
    x: Expr,
    target: Expr,
    weight: Expr | None = None,
    reduction: str = "mean",
) -> Expr:
    """The mean over classes of the binary cross entropies."""
    log = lookup("logsigmoid")
    loss = -(target * log(x) + (1.0 - target) * log(-x))
    loss = loss if weight is None else loss * weight
    return _of_all(lookup("mean")(loss, -1), reduction)


def _of_margins(
    x: Expr, target: Expr, p: int = 1, margin: float = 1.0, reduction: str = "mean"
) -> Expr:
    """How far each other class comes within a margin of the target's, averaged over classes."""
    own = lookup("gather")(x, -1, lookup("unsqueeze")(target, -1))
    within = lookup("clamp")(margin - (own - x), min=0.0) ** p  # exactly the margin of its own
    classes = told_of(x, "torch's multi_margin_loss: x.shape is not known before a call").shape[-1]
    return _of_all(lookup("mean")(within, -1) - max(margin, 0.0) ** p / classes, reduction)


def _cross_entropy(x: Expr, target: Expr, *args: Any, **kwargs: Any) -> Expr:
    """By labels an operation; by probabilities of the classes, where the call says they are."""
    call = current_call()
    if call is None or not isinstance(target, Expr) or not call.of(target).dtype.is_floating_point:
        return lookup("cross_entropy")(x, target, *args, **kwargs)
    return _by_probabilities(x, target, call.of(x).shape, *args, **kwargs)


def _by_probabilities(
    x: Expr,
    target: Expr,
    shape: tuple[int, ...],
    weight: Expr | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Expr:
    """Averaged over samples and positions, whatever their weights."""
    if ignore_index != -100:
        raise ChainError("torch's cross_entropy: ignore_index is for labels, not for probabilities")
    classes = min(len(shape) - 1, 1)
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / shape[classes]
    if weight is not None:
        for _ in shape[classes + 1 :]:
            weight = lookup("unsqueeze")(weight, -1)
        target = target * weight
    loss = -lookup("sum")(lookup("log_softmax")(x, classes) * target, classes)
    return _of_all(loss, reduction)


def _without_nan(name: str) -> Callable[..., Expr]:
    """The sum, or the mean, of what is a number."""

    def found(x: Expr, dim: Any = None, keepdim: bool = False) -> Expr:
        is_none = lookup("isnan")(x)
        total: Expr = lookup("sum")(lookup("masked_fill")(x, is_none, 0.0), dim, keepdim=keepdim)
        return total if name == "sum" else total / lookup("sum")(~is_none, dim, keepdim=keepdim)

    return found


def _count(x: Expr, dim: Any = None) -> Expr:
    """How many are not 0, as int64."""
    found: Expr = lookup("sum")(x if x.kind == "truth" else ir.primitive("ne", x, 0.0), dim)
    return found


def _close(x: Expr, other: Any, rtol: float = 1e-5, atol: float = 1e-8) -> Expr:
    """Whether two are equal, or nearly."""
    bound = abs(other) * rtol + atol
    distance = ir.primitive("abs", x - other)
    is_near = ir.primitive("le", distance, bound)
    is_number = ir.primitive("lt", distance, math.inf)
    return ir.primitive("eq", x, other) | (is_near & is_number)


def _softmax_with_gumbel(
    logits: Expr, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Expr:
    """A sample of categories; where it is hard their one-hot, with the gradient of the sample."""
    own = told_of(logits, "torch's gumbel_softmax: logits.shape is not known before a call")
    torch = sys.modules["torch"]
    like = torch.empty(own.shape, dtype=own.dtype, device=own.device)  # dense, as torch draws them
    noise = held(-like.exponential_().log())
    soft: Expr = lookup("softmax")((logits + noise) / tau, dim)
    if not hard:
        return soft
    place = lookup("argmax")(soft, dim, keepdim=True)
    shape = [1] * len(own.shape)
    shape[dim] = own.shape[dim]
    classes = held(torch.arange(own.shape[dim], device=own.device).view(shape))
    one: Expr = lookup("type_as")(ir.primitive("eq", place, classes), soft)
    return one - lookup("detach")(soft) + soft


def _validated(*_: Any) -> Any:
    raise (ChainError if current_call() else NotKnownYet)(
        "torch.distributions checks values, of which a chain has none before a call; give the "
        "distribution validate_args=False"
    )


def _divided(x: Any, other: Any, *, rounding_mode: str | None = None) -> Expr:
    """A quotient, rounded if that is asked for."""
    ways = {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}
    found: Expr = lookup(ways[rounding_mode])(x, other)
    return found


def _rounded(x: Expr, *, decimals: int = 0) -> Expr:
    """x rounded to so many places behind the point, or before it."""
    if decimals == 0:
        return ir.primitive("round", x)
    by = 10.0 ** abs(decimals)
    if decimals > 0:
        return ir.primitive("round", x * by) / by
    return ir.primitive("round", x / by) * by


def _over_neighbours(
    x: Expr, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Expr:
    """x by a power of the mean square of the channels around each: windows along axis 1."""
    told = told_of(x, "torch's local_response_norm: x.shape is not known before a call")
    batch, channels, *spatial = told.shape
    if size % 2 == 0:
        raise ChainError(
            f"torch's local_response_norm: got size={size}, wanted an odd one, whose windows reach "
            "as far to both sides"
        )
    squares = lookup("reshape")(x * x, (batch, channels, math.prod(spatial)))
    window, reach = (size, 1), (size // 2, 0)
    mean = lookup("avg_pool2d")(squares, window, stride=1, padding=reach)
    mean = lookup("reshape")(mean, (batch, channels, *spatial))
    found: Expr = x / (mean * alpha + k) ** beta
    return found


def _is_negative(x: Expr) -> Expr:
    """Whether a number's sign is minus, 0's too."""
    if x.kind != "number":
        return ir.primitive("lt", x, 0)
    is_zero = ir.primitive("eq", x, 0.0)
    return ir.primitive("lt", x, 0.0) | (is_zero & ir.primitive("lt", 1.0 / x, 0.0))


def _with_sign(x: Expr, other: Any) -> Expr:
    size = ir.primitive("abs", x)
    if isinstance(other, Expr):
        return lookup("where")(_is_negative(lookup("detach")(other)), -size, size)
    return -size if math.copysign(1.0, other) < 0 else size


def _hypotenuse(x: Expr, other: Expr) -> Expr:
    """The root of the sum of squares, of numbers whose squares may be too large or too small."""
    size = ir.primitive("detach", ir.primitive("maximum", abs(x), abs(other)))
    is_apt = ir.primitive("gt", size, 0.0) & ir.primitive("lt", size, math.inf)
    size = ir.primitive("where", is_apt, size, 1.0)
    a, b = x / size, other / size
    is_endless = ir.primitive("eq", abs(x), math.inf) | ir.primitive("eq", abs(other), math.inf)
    root = ir.primitive("sqrt", a * a + b * b) * size
    return ir.primitive("where", is_endless, math.inf, root)


def _step(x: Expr, values: Any) -> Expr:
    """1 where x is above 0, 0 below it, and a value at it; no gradient."""
    zero = ir.primitive("where", ir.primitive("lt", x, x), x, 0.0)
    step = ir.primitive("where", ir.primitive("gt", x, 0.0), 1.0, zero)
    found = lookup("where")(ir.primitive("eq", x, 0.0), values, step)
    return ir.primitive("detach", found)


def _sine_by_angle(x: Expr) -> Expr:
    """sin(pi x) / (pi x), and 1 at 0."""
    is_zero = ir.primitive("eq", x, 0.0)
    angle = ir.primitive("where", is_zero, 1.0, x * math.pi)
    return ir.primitive("where", is_zero, 1.0, ir.primitive("sin", angle) / angle)


def _outer(x: Expr, other: Any) -> Expr:
    """Products of each element of one vector with each of another."""
    found: Expr = lookup("unsqueeze")(x, -1) * other
    return found


def _steps_along(x: Expr, n: int = 1, dim: int = -1) -> Expr:
    """How much larger each element along an axis is than the one before it."""
    if n != 1:
        raise ChainError(f"torch's diff: got n={n}, wanted 1; take the differences of differences")
    whole = slice(None)
    before, behind = ((whole,) * dim, ()) if dim >= 0 else ((...,), (whole,) * (-dim - 1))
    later, sooner = ((*before, cut, *behind) for cut in (slice(1, None), slice(None, -1)))
    return _item(x, later) - _item(x, sooner)


def _as_if_quantised(x: Expr, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Expr:
    """x rounded to the steps of a quantised type, with the gradient of x as far as those reach."""
    if isinstance(zero_point, Expr):
        zero_point = lookup("type_as")(zero_point, x)
    steps = ir.primitive("round", x * (1.0 / scale) + zero_point)
    is_within = (steps >= float(quant_min)) & (steps <= float(quant_max))
    nearest = lookup("clamp")(steps, float(quant_min), float(quant_max))
    value = ir.primitive("detach", (nearest - zero_point) * scale)
    return value + ir.primitive("where", is_within, x - ir.primitive("detach", x), 0.0)


def _times_log1p(x: Expr, other: Expr) -> Expr:
    """x log(1 + other), 0 where x is 0 and other a number."""
    is_none = ir.primitive("le", other, -1.0) | ir.primitive("eq", other, math.inf)
    is_none = ir.primitive("eq", x, 0.0) & is_none
    return ir.primitive("where", is_none, 0.0, x * ir.primitive("log1p", other))


COMPOSED: Mapping[str, Callable[..., Any]] = {
    "pairwise_distance": _distance,
    "triplet_margin_loss": _triplet,
    "cosine_embedding_loss": _by_cosine,
    "multilabel_soft_margin_loss": _of_labels,
    "multi_margin_loss": _of_margins,
    "cross_entropy": _cross_entropy,
    "nansum": _without_nan("sum"),
    "nanmean": _without_nan("mean"),
    "count_nonzero": _count,
    "isclose": _close,
    "gumbel_softmax": _softmax_with_gumbel,
    "is_all_true": _validated,
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "rad2deg": lambda x: x * (180.0 / math.pi),
    "positive": lambda x: x,
    "div": _divided,
    "round": _rounded,
    "local_response_norm": _over_neighbours,
    **dict.fromkeys(("outer", "ger"), _outer),
    "diff": _steps_along,
    "fake_quantize_per_tensor_affine": _as_if_quantised,
    "signbit": _is_negative,
    "copysign": _with_sign,
    "hypot": _hypotenuse,
    "heaviside": _step,
    "sinc": _sine_by_angle,
    "xlog1py": _times_log1p,
    "ndtr": lambda x: ir.primitive("erfc", x * -math.sqrt(0.5)) * 0.5,
    "logaddexp2": lambda x, other: (
        lookup("logaddexp")(x * math.log(2.0), other * math.log(2.0)) / math.log(2.0)
    ),
    "float_power": lambda x, exponent: ir.primitive("pow", lookup("to")(x, "float64"), exponent),
    "isposinf": lambda x: ir.primitive("eq", x, math.inf),
    "isneginf": lambda x: ir.primitive("eq", x, -math.inf),
    "dist": lambda x, other, p=2.0: lookup("norm")(x - other, p),
    "data": lambda x: lookup("detach")(x),
}
