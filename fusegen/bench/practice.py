"""Chains that people really write behind a convolution or a matrix product, as data for works.

Limits are in multiples of a copy of x, as in `works`. A chain that only reduces reads x and writes
nearly nothing: 0.5. What is reduced over the whole batch is read twice, as it does not stay on a
chip, nor in its cache, but for channels that lie in runs (`ON_CHIP`). In the backward: a sum's two
gradients are one tensor; a gradient of each row's mean needs no x; and where one of many is chosen,
its index stands for x.

Dropout is left out: eager draws other noise, so nothing could be compared. The chains that `works`
measures under other names (A, B, C, LN-channel) are not repeated.
"""

from fusegen.bench.transformers import ROWS as OF_TRANSFORMERS
from fusegen.bench.transformers import Row

_TRAINED_NORM = "batch_norm(running_mean, running_var, weight, bias, training=True)"
_BATCH_NORM = "batch_norm(running_mean, running_var, weight, bias)"

# What a chain holds, and how near to its limit it is to come, each way. Chains of scalar functions
# alone, and what takes one of many places, are to be as fast as those of torch.compile.
_AIMS: tuple[tuple[tuple[str, ...], tuple[float, float] | None], ...] = (
    (("select(1",), None),
    (("_pool",), (1.1, 1.2)),
    (("logsumexp", "cross_entropy", "gather", "mean(", "min("), (1.1, 1.3)),
    (("group_norm", "instance_norm", "softmax", "training=True"), (1.15, 1.3)),
    (("layernorm", "rms_norm"), (1.1, 1.15)),
)

# name, chain, x's shape on CUDA and on the CPU, where the operands lie, limits
ROWS: tuple[Row, ...] = (
    (
        "relu-add",
        "relu | add(p)",
        (32, 128, 126, 126),
        (1, 128, 126, 126),
        ((128, 1, 1),),
        (1.0, 2.5),
    ),
    (
        "clamps",
        "add(p) | clamp(0, 1) | mul(2) | clamp(0, 1) | div(2)",
        (16, 64, 256, 256),
        (1, 64, 256, 128),
        ((64, 1, 1),),
        (1.0, 2.5),
    ),
    ("mish-mish", "mish | mish", (32, 128, 126, 126), (1, 128, 126, 126), (), (1.0, 2.5)),
    (
        "activations-add",
        "relu | leaky_relu(0.01) | gelu | sigmoid | add(p)",
        (18, 32, 30, 62, 62),
        (1, 32, 16, 62, 62),
        ((32, 1, 1, 1),),
        (1.0, 2.5),
    ),
    (
        "layernorm-avg_pool3d",
        "add(p) | layernorm(weight, bias) | avg_pool3d(2) | gelu",
        (8, 64, 32, 64, 64),
        (1, 64, 8, 64, 64),
        (-1, -1, -1),
        (0.5625, 1.625),
    ),
    (
        "residuals",
        "keep(y) | add(p) | add(y) | mul(y) | add(y)",
        (8, 64, 32, 64, 64),
        (1, 64, 8, 64, 64),
        ((64, 1, 1, 1),),
        (1.0, 2.5),
    ),
    (
        "add-hardswish-mul",
        "add(second) | keep(y) | hardswish | mul(y)",
        (32, 64, 32, 32, 32),
        (1, 64, 32, 32, 32),
        (None,),
        (1.5, 3.5),
    ),
    (
        "mul-tanh-mul-sigmoid",
        "mul(p) | tanh | mul(q) | sigmoid",
        (76, 16, 14, 62, 62),
        (2, 16, 14, 62, 62),
        ((16, 1, 1, 1), (16, 1, 1, 1)),
        (1.0, 2.5),
    ),
    (
        "gelu-group_norm",
        "gelu | group_norm(8, weight, bias)",
        (240, 64, 66, 66),
        (8, 64, 66, 66),
        (1, 1),
        (1.0, 2.5),
    ),
    (
        "sigmoid-group_norm",
        "add(p) | mul(q) | sigmoid | group_norm(8, weight, bias)",
        (32, 32, 254, 254),
        (1, 32, 254, 254),
        ((32, 1, 1), (32, 1, 1), 1, 1),
        (1.0, 2.5),
    ),
    (
        "silu-group_norm",
        "silu | group_norm(4, weight, bias) | hardswish",
        (34, 16, 31, 63, 63),
        (1, 16, 31, 63, 63),
        (1, 1),
        (1.0, 2.5),
    ),
    (
        "group_norm-rows",
        "silu | add(p) | group_norm(64, weight, bias)",
        (16384, 4096),
        (512, 4096),
        (1, 1, 1),
        (1.0, 2.5),
    ),
    (
        "layernorm-modulated",
        "layernorm | mul(scale) | add(shift)",
        (16, 4096, 1024),
        (16, 128, 1024),
        ((16, 1, 1024), (16, 1, 1024)),
        (1.0, 2.5),
    ),
    (
        "softmax-mean",
        "hardswish | relu | softmax(1) | mean((2, 3, 4))",
        (384, 16, 13, 29, 29),
        (16, 16, 13, 29, 29),
        (),
        (0.5, 1.5),
    ),
    (
        "batch_norm-gelu-relu",
        f"{_TRAINED_NORM} | gelu | relu",
        (16384, 4096),
        (512, 4096),
        (1, 1, 1, 1),
        (1.5, 4.0),
    ),
    (
        "softplus-batch_norm",
        f"softplus | tanh | keep(y) | mul(y) | {_TRAINED_NORM}",
        (32, 128, 126, 126),
        (2, 128, 64, 126),
        (1, 1, 1, 1),
        (1.5, 4.0),
    ),
    (
        "tanh-batch_norm",
        f"keep(y) | tanh | mul(y) | {_TRAINED_NORM}",
        (32, 128, 126, 126),
        (2, 128, 64, 126),
        (1, 1, 1, 1),
        (1.5, 4.0),
    ),
    # A quarter is pooled, of which the winners and where they stand are saved too.
    (
        "batch_norm-max_pool2d",
        f"{_TRAINED_NORM} | relu | max_pool2d(2)",
        (84, 64, 112, 112),
        (6, 64, 112, 112),
        (1, 1, 1, 1),
        (1.125, 2.6875),
    ),
    # The same of windows that share elements.
    (
        "batch_norm-stem",
        f"{_TRAINED_NORM} | relu | max_pool2d(3, 2, 1)",
        (84, 64, 112, 112),
        (6, 64, 112, 112),
        (1, 1, 1, 1),
        (1.125, 2.6875),
    ),
    (
        "instance_norm-div",
        "instance_norm | div(2)",
        (32, 128, 126, 126),
        (1, 128, 126, 126),
        (),
        (1.0, 2.5),
    ),
    (
        "softmax-channels",
        "softmax(1) | add(p) | mul(2) | sigmoid",
        (124, 128, 65, 65),
        (4, 128, 65, 65),
        ((128, 1, 1),),
        (1.0, 2.5),
    ),
    (
        "min-channels",
        "min(1, keepdim=True) | tanh | tanh",
        (16, 64, 254, 254),
        (1, 64, 180, 180),
        (),
        (0.5078125, 1.03125),
    ),
    (
        "gelu-mean",
        "gelu | mean((2, 3))",
        (16, 64, 254, 254),
        (1, 64, 180, 180),
        (),
        (0.5, 1.5),
    ),
    (
        "logsumexp-gelus",
        "logsumexp(1, keepdim=True) | leaky_relu | leaky_relu | gelu | gelu",
        (8192, 8192),
        (256, 8192),
        (),
        (0.5, 1.5),
    ),
    (
        "mean-logsumexp-add",
        "keep(y) | sub(p) | mean(1, keepdim=True) | logsumexp(1, keepdim=True) | gelu | add(y)",
        (8192, 8192),
        (256, 8192),
        (-1,),
        (1.0, 2.0),
    ),
    (
        "max_pool3d-logsumexp",
        "max_pool3d(2) | logsumexp(1, keepdim=True) | relu",
        (2, 64, 32, 128, 128),
        (1, 64, 8, 64, 64),
        (),
        (0.501, 1.158),
    ),
    (
        "group_norm-logsumexp",
        "keep(y) | group_norm(16, weight, bias) | tanh | hardswish | add(y) | logsumexp(1)",
        (64, 64, 126, 126),
        (2, 64, 126, 126),
        (1, 1),
        (0.5078125, 1.515625),
    ),
    (
        "tanh-logsumexp",
        "keep(y) | group_norm(16, weight, bias) | tanh | add(y) | logsumexp(1, keepdim=True)",
        (64, 64, 126, 126),
        (2, 64, 126, 126),
        (1, 1),
        (0.5078125, 1.515625),
    ),
    (
        "layernorm-mean",
        "layernorm(weight, bias) | mean(1)",
        (84, 1024, 768),
        (16, 128, 768),
        (-1, -1),
        (0.5, 1.5),
    ),
    # A quarter is pooled; what is there and where it stands are saved.
    (
        "max_pool2d-mean",
        "max_pool2d(2) | hardtanh | mean((2, 3), keepdim=True) | tanh",
        (84, 64, 112, 112),
        (6, 64, 112, 112),
        (),
        (0.5, 1.3125),
    ),
    (
        "min-softmax",
        "min(2) | softmax(1)",
        (42, 64, 24, 32, 32),
        (2, 64, 24, 24, 24),
        (),
        (0.5208, 1.04),
    ),
    (
        "positions-layernorm",
        "add(p) | layernorm(weight, bias)",
        (440, 197, 768),
        (8, 197, 768),
        ((197, 768), -1, -1),
        (1.0, 2.5),
    ),
    # The residual's gradient is what the norm's is made of.
    (
        "batch_norm-residual",
        f"{_TRAINED_NORM} | add(residual) | relu",
        (80, 256, 56, 56),
        (2, 256, 56, 56),
        (1, 1, 1, 1, None),
        (2.0, 5.5),
    ),
    ("softmax-rows", "softmax(-1)", (4096, 16384), (128, 16384), (), (1.0, 2.5)),
    (
        "add-layernorm",
        "add(residual) | layernorm(weight, bias)",
        (8, 2048, 4096),
        (1, 512, 4096),
        (None, -1, -1),
        (1.5, 3.5),
    ),
    # Losses over a vocabulary: against other probabilities, and of how even these are.
    (
        "cross_entropy",
        "log_softmax(-1) | mul(t) | sum(-1) | neg | mean",
        (2097, 32000),
        (66, 32000),
        (None,),
        (1.0, 3.0),
    ),
    # What each pixel shows: a label's eight bytes for 19 numbers.
    (
        "cross_entropy-pixels",
        "cross_entropy(target)",
        (13, 19, 512, 530),
        (1, 19, 256, 448),
        ("labels",),
        (0.553, 1.605),
    ),
    (
        "entropy",
        "log_softmax(-1) | keep(y) | exp | mul(y) | sum(-1) | neg",
        (2097, 32000),
        (66, 32000),
        (),
        (0.5, 1.5),
    ),
    (
        "batch_norm-add-relu",
        f"{_BATCH_NORM} | add(residual) | relu",
        (80, 256, 56, 56),
        (2, 256, 56, 56),
        (1, 1, 1, 1, None),
        (1.5, 4.0),
    ),
    *OF_TRANSFORMERS,
)


# Limits of chains whose channels stay on a chip; they are aimed at as if they were read twice.
ON_CHIP = {
    "softplus-batch_norm": (1.0, 2.5),
    "tanh-batch_norm": (1.0, 2.5),
    "batch_norm-residual": (1.5, 4.0),
}


def targets(chain: str, limits: tuple[float, float]) -> tuple[float, float] | None:
    """What is aimed at on CUDA, in multiples of a copy of x; None where only rivals count."""
    for words, ratios in _AIMS:
        if any(word in chain for word in words):
            return None if ratios is None else (limits[0] * ratios[0], limits[1] * ratios[1])
    return None
