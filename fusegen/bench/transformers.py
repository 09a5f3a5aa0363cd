"""Chains of transformers, as data for works: gates, residual streams and norms."""

from typing import Literal

Shape = tuple[int, ...]
Placement = int | Shape | Literal["labels"] | None  # along an axis of x, apart, by class, or as x
Row = tuple[str, str, Shape, Shape, tuple[Placement, ...], tuple[float, float]]

_GATE = (
    "unflatten(-1, (2, -1)) | keep(y) | select(-2, 0) | silu | keep(gate) | recall(y) | "
    "select(-2, 1) | mul(gate)"
)

# name, chain, x's shape on CUDA and on the CPU, where the operands lie, limits
ROWS: tuple[Row, ...] = (
    # Both halves of a projection: backward reads them and a gradient half as wide.
    (
        "swiglu",
        _GATE,
        (8192, 8192),
        (512, 4096),
        (),
        (0.75, 2.0),
    ),
    # The same behind a bias, before a norm and behind one: in pieces.
    ("gate-bias", f"add(p) | {_GATE}", (8192, 8192), (256, 8192), (-1,), (0.75, 2.0)),
    (
        "gate-rms_norm",
        f"{_GATE} | rms_norm(weight)",
        (8192, 8192),
        (256, 8192),
        ((4096,),),
        (0.75, 2.0),
    ),
    (
        "layernorm-gate",
        f"layernorm(weight, bias) | {_GATE}",
        (8192, 8192),
        (256, 8192),
        (-1, -1),
        (0.75, 2.0),
    ),
    # Queries turned by angles that have gradients too.
    (
        "rotary",
        "keep(y) | unflatten(-1, (2, -1)) | keep(h) | select(-2, 0) | keep(a) | recall(h) | "
        "select(-2, 1) | neg | stack(a, dim=-2) | flatten(-2) | mul(sin) | keep(r) | recall(y) | "
        "mul(cos) | add(r)",
        (8, 32, 2048, 128),
        (1, 2, 2048, 128),
        ((2048, 128), (2048, 128)),
        (1.0, 2.5),
    ),
    # The token by which a transformer of images tells them apart: x's gradient is zero elsewhere.
    (
        "layernorm-select",
        "layernorm(weight, bias) | select(1, 0)",
        (332, 197, 1024),
        (10, 197, 1024),
        (-1, -1),
        (0.00508, 0.5102),
    ),
    # The residual stream of a transformer: the sum goes on beside what is normalised, and backward
    # reads it and two gradients.
    (
        "residual-layernorm",
        "add(residual) | give(sum) | layernorm(weight, bias)",
        (8, 2048, 4096),
        (1, 512, 4096),
        (None, -1, -1),
        (2.0, 4.0),
    ),
    (
        "residual-rms_norm",
        "add(residual) | give(sum) | rms_norm(weight)",
        (8, 2048, 4096),
        (1, 512, 4096),
        (None, -1),
        (2.0, 4.0),
    ),
    (
        "rms_norm-silu-mul",
        "rms_norm(weight) | silu | mul(second)",
        (8, 2048, 4096),
        (1, 512, 4096),
        (-1, None),
        (1.5, 4.0),
    ),
)
