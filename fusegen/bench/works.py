"""What is measured: works by name with their shapes, limits and targets, and sweeps over sizes.

A limit is the bytes that must move, in multiples of a copy of x, which reads x and writes as much.
Forward alone reads x and writes the result: 1.0. The backward reads x and the incoming gradient and
writes x's: 1.5 more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from fusegen.bench import practice
from fusegen.bench.transformers import Placement
from fusegen.errors import ArgumentError
from fusegen.ops import nearest

MODES = ("forward", "forward+backward")
HOST_MODES = ("forward", "forward, with grad", "forward+backward")

Shape = tuple[int, ...]
Figures = tuple[float, float]  # one a mode
_LABELS: tuple[Placement, ...] = ("labels",)


@dataclass(frozen=True)
class Work:
    """A chain on a shape. `eager` names the function of `rivals` that a user would write in torch;
    where it is None, it is the chain's reference. Limits and targets are multiples of a copy of x.
    layout is one of a chain's, or "halves": of the rows of tensors twice as wide.
    """

    name: str
    chain: str
    eager: str | None
    cuda_shape: Shape
    cpu_shape: Shape
    operands: tuple[Placement, ...] = ()
    limits: Figures | None = (1.0, 2.5)
    targets: Figures | None = None
    dtype: str = "float32"
    layout: str = "contiguous"
    is_quick: bool = False

    def shape(self, device: str) -> Shape:
        """x's shape on a device."""
        return self.cuda_shape if device == "cuda" else self.cpu_shape

    def operand_shapes(self, device: str) -> tuple[Shape, ...]:
        """The operands' shapes on a device."""
        shape = self.shape(device)
        known: dict[Placement, Shape] = {i: (shape[i],) for i in range(-len(shape), len(shape))}
        known |= {None: shape, "labels": shape[:1] + shape[2:]}
        return tuple(p if isinstance(p, tuple) else known[p] for p in self.operands)


@dataclass(frozen=True)
class HostWork:
    """Chain A on a tensor so small that the host's microseconds decide; targets are theirs, one a
    mode.
    """

    name: str
    shape: Shape
    targets: tuple[float | None, ...]


@dataclass(frozen=True)
class Sweep:
    """One chain over many sizes of x."""

    name: str
    varied: Literal["elements", "row length"]
    chain: str
    eager: str
    operands: tuple[Placement, ...]
    cuda_shapes: tuple[Shape, ...]
    cpu_shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def points(self, device: str) -> list[tuple[int, Work]]:
        """(what is varied, the work there), by dtype and then by size."""
        shapes = self.cuda_shapes if device == "cuda" else self.cpu_shapes
        return [
            (
                _elements(shape) if self.varied == "elements" else shape[-1],
                Work(self.name, self.chain, self.eager, shape, shape, self.operands, dtype=dtype),
            )
            for dtype in self.dtypes
            for shape in shapes
        ]


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


CHAIN_A = "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
_LAYERNORM = "layernorm(weight, bias)"
_LAYERNORM_CHANNEL = "layernorm(weight, bias, axis=1)"
_CUDA_ELEMENTS, _CPU_ELEMENTS = 1 << 26, 1 << 21


def _chain_a() -> list[Work]:
    shape = (128, 64, 14, 62, 62), (4, 64, 14, 62, 62)
    a = Work("A", CHAIN_A, "chain_a", *shape, (1,), targets=(1.05, 2.65), is_quick=True)
    odd = (128, 64, 13, 61, 59), (4, 64, 13, 61, 59)
    return [
        a,
        Work("A-odd", CHAIN_A, "chain_a", *odd, (1,), targets=(1.08, 2.75)),
        replace(
            a, name="A-channels_last", layout="channels_last", targets=(1.08, 2.75), is_quick=False
        ),
        replace(a, name="A-bf16", dtype="bfloat16", targets=(1.15, 3.1), is_quick=False),
    ]


def _rows(length: int, elements: int) -> Shape:
    return max(1, elements // length), length


def _layernorms() -> list[Work]:
    """Rows of many lengths, about 64 Mi elements on the GPU, alone and between two other steps."""
    works = []
    between = f"add(residual) | {_LAYERNORM} | gelu"
    for prefix, chain, eager, operands, (limit, training_limit) in (
        ("LN-", _LAYERNORM, "layernorm", (-1, -1), (1.0, 2.5)),
        # The sum's two gradients are one tensor, so backward writes only one.
        ("LN-add-gelu-", between, "add_layernorm_gelu", (None, -1, -1), (1.5, 3.5)),
    ):
        for length in (768, 1024, 4096, 8192, 16384):
            for dtype, ending in (("float32", ""), ("bfloat16", "-bf16")):
                works.append(
                    Work(
                        f"{prefix}{length}{ending}",
                        chain,
                        eager,
                        _rows(length, _CUDA_ELEMENTS),
                        _rows(length, _CPU_ELEMENTS),
                        operands,
                        (limit, training_limit),
                        (1.1 * limit, 1.15 * training_limit),
                        dtype,
                    )
                )
    for length in (65536, 262144):
        shapes = _rows(length, _CUDA_ELEMENTS), _rows(length, _CPU_ELEMENTS)
        targets = (1.15, 1.3 * 2.5)
        works.append(
            Work(f"LN-{length}", _LAYERNORM, "layernorm", *shapes, (-1, -1), targets=targets)
        )
    return works


def _channel_layernorms() -> list[Work]:
    works = []
    for name, cuda_shape, cpu_shape in (
        ("LN-channel", (256, 96, 56, 56), (16, 96, 56, 56)),
        ("LN-channel-512", (64, 512, 28, 28), (8, 512, 28, 28)),
    ):
        for layout, ending in (("contiguous", ""), ("channels_last", "-channels_last")):
            works.append(
                Work(
                    name + ending,
                    _LAYERNORM_CHANNEL,
                    "channel_layernorm",
                    cuda_shape,
                    cpu_shape,
                    (1, 1),
                    targets=(1.15, 3.0),
                    layout=layout,
                    is_quick=name + ending == "LN-channel",
                )
            )
    return works


def _vocabularies() -> list[Work]:
    """Rows as long as a language model's vocabulary: of whole packs, and of an odd length."""
    return [
        Work(
            f"{op}-{length}{ending}",
            chain,
            None,
            _rows(length, _CUDA_ELEMENTS),
            _rows(length, _CPU_ELEMENTS),
            operands,
            limits,
            practice.targets(op, limits),
            dtype,
        )
        for op, chain, operands, limits in (
            ("softmax", "softmax(-1)", (), (1.0, 2.5)),
            ("log_softmax", "log_softmax(-1)", (), (1.0, 2.5)),
            ("cross_entropy", "cross_entropy(target)", _LABELS, (0.5, 1.5)),
            ("gather", "log_softmax(-1) | gather(-1, target)", _LABELS, (0.5, 1.5)),
        )
        for length in (32000, 50257)
        for dtype, ending in (("float32", ""), ("bfloat16", "-bf16"))
    ]


def _halves() -> list[Work]:
    """Tensors that are half of each row of a larger one, as `chunk` gives them."""
    # name, chain, width, operands, limits
    gate = "halves-silu-mul-bf16", "silu | mul(up)", 8192, (None,), (1.5, 4.0)
    norm = "halves-rms_norm-bf16", "rms_norm(weight)", 4096, (-1,), (1.0, 2.5)
    return [
        Work(
            *(name, chain, None, _rows(width, _CUDA_ELEMENTS), _rows(width, _CPU_ELEMENTS)),
            operands,
            limits,
            practice.targets(chain, limits),
            "bfloat16",
            "halves",
        )
        for name, chain, width, operands, limits in (gate, norm)
    ]


def _channels_last() -> list[Work]:
    """Norms as mixed-precision models run them: two bytes, channels innermost."""
    batch = "batch_norm(running_mean, running_var, weight, bias, training=True)"
    groups = "keep(y) | group_norm(16, weight, bias) | tanh | hardswish | add(y) | logsumexp(1)"
    added = "add(residual) | relu"
    images, features, frames = (80, 256, 56, 56), (64, 320, 64, 64), (64, 64, 126, 126)
    # name, chain, x's shape, operands, limits
    rows: tuple[tuple[str, str, Shape, tuple[Placement, ...], Figures], ...] = (
        ("batch_norm-relu", f"{batch} | relu", images, (1, 1, 1, 1), (1.5, 4.0)),
        ("batch_norm-residual", f"{batch} | {added}", images, (1, 1, 1, 1, None), (2.0, 5.5)),
        ("group_norm-silu", "group_norm(32, weight, bias) | silu", features, (1, 1), (1.0, 2.5)),
        ("group_norm-logsumexp", groups, frames, (1, 1), (0.5078125, 1.515625)),
    )
    return [
        Work(
            *(f"channels_last-{name}-bf16", chain, None, shape, (2, *shape[1:]), operands, limits),
            practice.targets(chain, limits),
            "bfloat16",
            "channels_last",
        )
        for name, chain, shape, operands, limits in rows
    ]


WORKS: tuple[Work, ...] = (
    *_chain_a(),
    Work(
        "B",
        f"{_LAYERNORM} | gelu | mul(0.5)",
        "chain_b",
        (32, 64, 32, 64, 64),
        (4, 64, 16, 32, 64),
        (-1, -1),
        targets=(1.05, 2.7),
        is_quick=True,
    ),
    *_layernorms(),
    Work(
        "B'",
        "layernorm(normalized_shape=(64, 32, 64, 64)) | gelu | mul(0.5)",
        "chain_b_whole",
        (32, 64, 32, 64, 64),
        (2, 64, 32, 64, 64),
        targets=(1.2, 3.4),
    ),
    # Forward writes an eighth of x; with the backward in view a sixteenth more, the winners.
    Work(
        "C",
        "leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)",
        "chain_c",
        (128, 32, 32, 64, 64),
        (8, 32, 16, 32, 32),
        (1,),
        (0.5625, 1.28),
        (0.60, 1.45),
        is_quick=True,
    ),
    *_channel_layernorms(),
    *(
        Work(
            f"bias-{n}x{c}",
            "add_channel | gelu",
            "bias_gelu",
            (n, c),
            (max(1, min(n, _CPU_ELEMENTS // c)), c),
            (-1,),
            targets=(1.1, 2.75),
            is_quick=c == 256,
        )
        for n, c in ((65536, 256), (16384, 4096), (8192, 8192))
    ),
    *_vocabularies(),
    *_halves(),
    *_channels_last(),
    *(
        Work(
            *(f"chain-{name}", chain, None, cuda_shape, cpu_shape, operands),
            practice.ON_CHIP.get(name, limits),
            targets=practice.targets(chain, limits),
        )
        for name, chain, cuda_shape, cpu_shape, operands, limits in practice.ROWS
    ),
)

HOST_WORKS = (
    HostWork("small-1024", (1, 4, 4, 8, 8), (6.0, 12.0, None)),
    HostWork("small-65536", (4, 16, 4, 16, 16), (6.0, 12.0, None)),
)


def _pointwise_shapes(largest: int) -> tuple[Shape, ...]:
    """Powers of two from 2^16, and between two of them a size that is a multiple of nothing."""
    shapes: list[Shape] = []
    for exponent in range(16, largest + 1):
        shapes.append((1 << (exponent - 14), 64, 256))
        if exponent < largest:
            shapes.append(((3 << exponent) // 2 // (61 * 251), 61, 251))
    return tuple(shapes)


_ROW_LENGTHS = (
    *(63, 64, 65, 100, 257, 768, 1000, 1023, 1024, 1025, 3000, 4095, 4096, 5000, 8191, 8192),
    *(12289, 16384, 16385, 40000),
)

SWEEPS = (
    Sweep(
        "sweep-pointwise",
        "elements",
        CHAIN_A,
        "chain_a",
        (1,),
        _pointwise_shapes(28),
        _pointwise_shapes(21),
    ),
    Sweep(
        "sweep-layernorm",
        "row length",
        _LAYERNORM,
        "layernorm",
        (-1, -1),
        tuple(_rows(length, _CUDA_ELEMENTS) for length in _ROW_LENGTHS),
        tuple(_rows(length, 1 << 20) for length in _ROW_LENGTHS),
    ),
)

Item = Work | HostWork | Sweep

_ITEMS: tuple[Item, ...] = (*WORKS, *HOST_WORKS, *SWEEPS)
BY_NAME: dict[str, Item] = {item.name: item for item in _ITEMS}


def select(patterns: Sequence[str], *, quick: bool) -> list[Item]:
    """The works that the patterns match, in the table's order; with none, all, or the quick ones.

    Raises ArgumentError for a pattern that matches nothing.
    """
    if not patterns:
        return [w for w in WORKS if w.is_quick] if quick else list(BY_NAME.values())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in BY_NAME):
            if "|" in pattern or "(" in pattern:
                raise ArgumentError(
                    f"no work is called {pattern!r}; a chain needs its --shape as well"
                )
            by_lower_case = {name.lower(): name for name in BY_NAME}
            guess = by_lower_case.get(nearest(pattern, by_lower_case) or "")
            hint = f"did you mean {guess!r}?" if guess else "`fusegen bench --list` names them"
            raise ArgumentError(f"no work is called {pattern!r}; {hint}")
    return [
        item
        for name, item in BY_NAME.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def listing() -> str:
    """The table of works, sweeps and host works, one a line, for `--list`."""
    lines = []
    for work in WORKS:
        assert work.limits is not None
        figures = "  ".join(f"{limit:.4g}" for limit in work.limits)
        if work.targets is not None:
            pairs = zip(work.limits, work.targets, strict=True)
            figures = "  ".join(f"{limit:g} -> {target:.4g}" for limit, target in pairs)
        where = f"{'x'.join(map(str, work.cuda_shape))} {work.dtype} {work.layout}"
        lines.append(f"{work.name:28} {where:42} {figures:34} {work.chain}")
    for host in HOST_WORKS:
        aims = "  ".join(f"{target:g} us" for target in host.targets if target)
        lines.append(f"{host.name:28} {'x'.join(map(str, host.shape)):42} {aims:34} {CHAIN_A}")
    for sweep in SWEEPS:
        dtypes = ", ".join(sweep.dtypes)
        what = f"over {sweep.varied}; {dtypes}"
        lines.append(f"{sweep.name:28} {what:42} {'':34} {sweep.chain}")
    return "\n".join(line.rstrip() for line in lines)
