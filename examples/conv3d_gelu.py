"""Conv3d, leaky_relu, a per-channel bias, clamp and gelu; and the same with a fused chain."""

import sys

import torch
from common import agree, options, print_times
from torch import Tensor, nn
from torch.nn import functional as F

import fusegen


class Model(nn.Module):
    """One torch operation after another."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size=3)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1, 1))

    def chain(self, y: Tensor) -> Tensor:
        y = F.leaky_relu(y, 0.2)
        y = y + self.bias
        y = torch.clamp(y, -1, 1)
        return F.gelu(y)

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.conv(x))


class FusedModel(Model):
    """The same parameters and the same state_dict; the chain is one kernel each way."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.fused = fusegen.compile("leaky_relu(0.2) | add_channel | clamp(-1, 1) | gelu")

    def chain(self, y: Tensor) -> Tensor:
        return self.fused(y, self.bias)


def main() -> int:
    choice = options(__doc__)
    torch.manual_seed(0)
    eager = Model(8, 64).to(choice.device)
    fused = FusedModel(8, 64).to(choice.device)
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(choice.batch, 8, choice.depth, 64, 64, device=choice.device, requires_grad=True)

    print(f"{fused.fused.chain.text}\non {choice.device}, x {tuple(x.shape)}")
    good = agree(eager, fused, x)
    print_times(eager, fused, x, choice.repeats)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
