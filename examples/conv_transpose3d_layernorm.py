"""ConvTranspose3d, layernorm over the last axis, gelu, scale; and the same with a fused chain."""

import sys

import torch
from common import agree, options, print_times
from torch import Tensor, nn
from torch.nn import functional as F

import fusegen

# nn.LayerNorm normalises the last axis, here W, which the transposed convolution doubles from 32.
WIDTH = 64


class Model(nn.Module):
    """One torch operation after another."""

    def __init__(self, in_channels: int, out_channels: int, scale: float) -> None:
        super().__init__()
        # Without a bias: the layernorm, which stays within one channel, would take it out again.
        self.conv = nn.ConvTranspose3d(
            in_channels, out_channels, 4, stride=2, padding=1, bias=False
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = scale
        # A trained model's weights are not the ones and zeros that LayerNorm begins with.
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def chain(self, y: Tensor) -> Tensor:
        return F.gelu(self.norm(y)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.conv(x))


class FusedModel(Model):
    """The same parameters and the same state_dict; the chain is one kernel each way."""

    def __init__(self, in_channels: int, out_channels: int, scale: float) -> None:
        super().__init__(in_channels, out_channels, scale)
        self.fused = fusegen.compile(
            fusegen.layernorm("weight", "bias", eps=self.norm.eps)
            | fusegen.gelu()
            | fusegen.mul(scale)
        )

    def chain(self, y: Tensor) -> Tensor:
        return self.fused(y, self.norm.weight, self.norm.bias)


def main() -> int:
    choice = options(__doc__)
    torch.manual_seed(0)
    eager = Model(32, 64, scale=0.5).to(choice.device)
    fused = FusedModel(32, 64, scale=0.5).to(choice.device)
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(
        choice.batch, 32, choice.depth, 32, 32, device=choice.device, requires_grad=True
    )

    print(f"{fused.fused.chain.text}\non {choice.device}, x {tuple(x.shape)}")
    good = agree(eager, fused, x)
    print_times(eager, fused, x, choice.repeats)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
