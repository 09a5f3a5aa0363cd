"""Autocast: the chain that torch.autocast would make of a chain's steps.

torch runs some operations in fp32 there, whatever they are given, and one in the narrow type; all
others have the type of what they meet. So casts are put in front of the former, and the chain that
comes of it is compiled like any other. The tables are torch's own (autocast_mode.h and .cpp); an
operation of the user's own has no place in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusegen.ops import Chain, Step, lookup
from fusegen.promotion import Shape
from fusegen.segments import bind_any

_NARROW = ("float16", "bfloat16")
# By kind of device, what is computed in fp32 there.
_WIDENED: Mapping[str, frozenset[str]] = {
    "cuda": frozenset(
        (
            *("acos", "asin", "cosh", "sinh", "tan"),
            *("exp", "expm1", "log", "log10", "log1p", "log2", "softplus"),
            *("pow", "rpow", "reciprocal", "rsqrt", "square"),
            *("layernorm", "rms_norm", "group_norm", "normalize", "norm"),
            "cosine_similarity",
            *("softmax", "softmin", "log_softmax", "logsumexp", "sum"),
            *("lp_pool1d", "lp_pool2d", "lp_pool3d", "nll_loss", "cross_entropy"),
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
            *("binary_cross_entropy_with_logits", "soft_margin_loss", "hinge_embedding_loss"),
            *("margin_ranking_loss", "poisson_nll_loss"),
            *("binary_cross_entropy", "gaussian_nll_loss"),
        )
    ),
    "cpu": frozenset(
        (
            *("avg_pool3d", "max_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d"),
            "lp_pool3d",
            *("nll_loss", "cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
            *("kl_div", "binary_cross_entropy_with_logits", "soft_margin_loss"),
            *("hinge_embedding_loss", "margin_ranking_loss", "poisson_nll_loss"),
            "binary_cross_entropy",
        )
    ),
}
_NARROWED = frozenset({"prelu"})


def is_sensitive(chain: Chain) -> bool:
    """Whether autocast on some device changes a step of the chain."""
    return any(_is_changed(step, device) for step in chain.steps for device in _WIDENED)


def under_autocast(
    chain: Chain,
    x: tuple[Shape, str],
    operands: Mapping[str, tuple[Shape, str]],
    device: str,
    narrow: str,
) -> Chain:
    """The chain with the casts that autocast to the type `narrow` does on a kind of device.

    x and operands are (shape, dtype name), as for bind, which tells what is wrong with them.
    """
    bind_any(chain, x, operands)
    written: list[Step] = []
    for step in chain.steps:
        if _is_changed(step, device):
            wanted = narrow if step.op in _NARROWED else "float32"
            made = _without_names(written)
            found = bind_any(Chain(made), x, operands)[-1].dtype if made else x[1]
            if found in (*_NARROW, "float32") and found != wanted:
                written.append(lookup("to").step((wanted,), {}))
        written.append(step)
    return Chain((*chain.head, *written))


def _without_names(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that make the running value, which may be one that was kept."""
    while steps and steps[-1].is_structural and steps[-1].taken_up is None:
        last = steps[-1]
        steps = steps[:-1]
        while last.op == "recall" and not (steps[-1].is_naming and steps[-1].names == last.names):
            steps = steps[:-1]
    return tuple(steps)


def _is_changed(step: Step, device: str) -> bool:
    if step.definition is None or not step.definition.is_builtin:
        return False
    if step.op == "rdiv":  # by a number, torch multiplies with the reciprocal
        return device == "cuda" and not step.operands
    return step.op in _NARROWED or step.op in _WIDENED.get(device, ())
