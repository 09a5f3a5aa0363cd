"""A small transformer as language models have it now: a residual stream that is normalised by
rms_norm, rotary embeddings, and a gated projection; and the same with three fused chains.
"""

import sys
from functools import partial

import torch
from common import agree, forward, forward_backward, median_ms, options
from torch import Tensor, nn
from torch.nn import functional as F

import fusegen

WIDTH, HEADS, LAYERS = 256, 4, 2


class Block(nn.Module):
    """Attention and a projection, each of what is normalised of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))
        self.turned = nn.Linear(WIDTH, 2 * WIDTH, bias=False)  # queries and keys
        self.values = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gated = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)


class Model(nn.Module):
    """One torch operation after another."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.Parameter(torch.rand(WIDTH) + 0.5)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(tokens), 1e4 ** (-torch.arange(half) / half))
        # By token, for all heads, and for both halves of a head's values.
        angles = angles.view(tokens, 1, 1, half).expand(-1, -1, 2, -1)
        self.register_buffer("sine", angles.sin().contiguous())
        self.register_buffer("cosine", angles.cos().contiguous())
        self.register_buffer("is_second", torch.tensor([[False], [True]]))

    def norm(self, y: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What is normalised of y and the stream together, and the stream that goes on."""
        stream = y + stream
        return F.rms_norm(stream, (WIDTH,), weight), stream

    def turn(self, y: Tensor) -> Tensor:
        """Each pair of values, one of each half, turned by the angle of its token."""
        first, second = y.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return y * self.cosine.flatten(-2) + turned * self.sine.flatten(-2)

    def gate(self, y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return F.silu(first) * second

    def forward(self, x: Tensor) -> Tensor:
        y, stream = x, torch.zeros_like(x)
        by_head = (*x.shape[:-1], -1, WIDTH // HEADS)
        for block in self.blocks:
            y, stream = self.norm(y, stream, block.norms[0])
            both = self.turn(block.turned(y).view(by_head))
            queries, keys = both.transpose(1, 2).chunk(2, 1)
            values = block.values(y).view(by_head).transpose(1, 2)
            y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            y = block.out(y.transpose(1, 2).flatten(-2))
            y, stream = self.norm(y, stream, block.norms[1])
            y = block.down(self.gate(block.gated(y)))
        return self.norm(y, stream, self.last)[0]


@fusegen.compile
def norm(y, stream, weight):
    stream = y + stream
    return fusegen.rms_norm(stream, weight), stream


@fusegen.compile
def turn(y, cosine, is_second: fusegen.Mask, sine):
    halves = fusegen.unflatten(y, -1, (2, -1))
    first, second = (fusegen.select(halves, -2, i, keepdim=True) for i in (0, 1))
    turned = fusegen.masked_fill(-second, is_second, first)
    return fusegen.flatten(halves * cosine + turned * sine, -2)


@fusegen.compile
def gate(y):
    halves = fusegen.unflatten(y, -1, (2, -1))
    return fusegen.silu(fusegen.select(halves, -2, 0)) * fusegen.select(halves, -2, 1)


class FusedModel(Model):
    """The same parameters and the same state_dict; each chain is one kernel each way."""

    def norm(self, y: Tensor, stream: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm(y, stream, weight)

    def turn(self, y: Tensor) -> Tensor:
        return turn(y, self.cosine, self.is_second, self.sine)

    def gate(self, y: Tensor) -> Tensor:
        return gate(y)


def main() -> int:
    choice = options(__doc__)
    torch.manual_seed(0)
    tokens = 32 * choice.depth
    eager, fused = Model(tokens).to(choice.device), FusedModel(tokens).to(choice.device)
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(choice.batch, tokens, WIDTH, device=choice.device, requires_grad=True)

    for chain in (norm, turn, gate):
        print(chain.chain.text)
    print(f"on {choice.device}, x {tuple(x.shape)}")
    good = agree(eager, fused, x)
    print(f"\n{'median of ' + str(choice.repeats):34}{'eager':>12}{'fused':>12}{'ratio':>8}")
    for direction, run in (("forward", forward), ("forward + backward", forward_backward)):
        a, b = median_ms([partial(run, m, m, x) for m in (eager, fused)], choice.repeats)
        print(f"  {'model, ' + direction:32}{a:9.2f} ms{b:9.2f} ms{a / b:7.2f}x")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
