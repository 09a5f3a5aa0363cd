"""The workloads: a chain, what a user would write in torch for it, and shapes for each device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, leaky_relu, max_pool3d

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """One workload. The limits are the bytes that must move, in multiples of a copy of x."""

    name: str
    chain: str
    eager: Callable[..., Tensor]
    cuda_shape: Shape
    cpu_shape: Shape
    operand_axes: tuple[int, ...]  # the axis of x that each operand lies along
    forward_limit: float = 1.0
    training_limit: float = 2.5
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    is_quick: bool = False

    def inputs(self, device: str, seed: int) -> tuple[Tensor, ...]:
        """x and the operands, random, different for each seed."""
        generator = torch.Generator(device).manual_seed(seed)

        def random(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

        shape = self.shape(device)
        x = random(shape)
        if self.layout == "channels_last":
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            x = x.contiguous(memory_format=formats[x.dim()])
        return x, *(random((shape[axis],)) for axis in self.operand_axes)

    def shape(self, device: str) -> Shape:
        return self.cuda_shape if device == "cuda" else self.cpu_shape


def _chain_a(x: Tensor, bias: Tensor) -> Tensor:
    return gelu(torch.clamp(leaky_relu(x, 0.2) + bias.view(-1, 1, 1, 1), -1, 1))


def _chain_b(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return gelu(layer_norm(x, x.shape[-1:], weight, bias)) * 0.5


def _chain_c(x: Tensor, scale: Tensor) -> Tensor:
    return max_pool3d(leaky_relu(leaky_relu(x, 0.2) * scale.view(-1, 1, 1, 1), 0.2), 2)


def _channel_layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As ConvNeXt's authors write it."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    normal = (x - mean) / torch.sqrt(variance + 1e-5)
    return normal * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return gelu(x + bias)


CHAIN_A = "leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu"
_A = ("A", CHAIN_A, _chain_a, (128, 64, 14, 62, 62), (4, 64, 14, 62, 62), (1,))
_LAYERNORM = "layernorm(weight, bias, axis=1)"

WORKS = (
    Work(*_A, is_quick=True),
    Work("A-odd", CHAIN_A, _chain_a, (128, 64, 13, 61, 59), (4, 64, 13, 61, 59), (1,)),
    Work("A-channels_last", *_A[1:], layout="channels_last"),
    Work("A-bf16", *_A[1:], dtype=torch.bfloat16),
    Work(
        "B",
        "layernorm(weight, bias) | gelu | mul(0.5)",
        _chain_b,
        (32, 64, 32, 64, 64),
        (4, 64, 16, 32, 64),
        (-1, -1),
        is_quick=True,
    ),
    # Forward writes an eighth of x; with the backward in view a sixteenth more, the winners.
    Work(
        "C",
        "leaky_relu(0.2) | mul_channel | leaky_relu(0.2) | max_pool3d(2)",
        _chain_c,
        (128, 32, 32, 64, 64),
        (8, 32, 16, 32, 32),
        (1,),
        forward_limit=0.5625,
        training_limit=1.28,
        is_quick=True,
    ),
    Work(
        "LN-channel",
        _LAYERNORM,
        _channel_layernorm,
        (256, 96, 56, 56),
        (16, 96, 56, 56),
        (1, 1),
        is_quick=True,
    ),
    Work(
        "bias-65536x256",
        "add(bias) | gelu",
        _bias_gelu,
        (65536, 256),
        (65536, 256),
        (-1,),
        is_quick=True,
    ),
)
