"""ConvTranspose3d, leaky_relu, factor, leaky_relu, max_pool3d; and the same with a fused chain."""

import sys

import torch
from common import agree, options, print_times
from torch import Tensor, nn
from torch.nn import functional as F

import fusegen
from fusegen import Channel, Expr


class Model(nn.Module):
    """One torch operation after another."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(
            in_channels, out_channels, 3, stride=2, padding=1, output_padding=1
        )
        self.factor = nn.Parameter(torch.randn(out_channels, 1, 1, 1))

    def chain(self, y: Tensor) -> Tensor:
        y = F.leaky_relu(y, 0.2)
        y = y * self.factor
        y = F.leaky_relu(y, 0.2)
        return F.max_pool3d(y, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.conv(x))


@fusegen.chain
def chain(y: Expr, factor: Channel) -> Expr:
    scaled = fusegen.leaky_relu(y, 0.2) * factor
    return fusegen.max_pool3d(fusegen.leaky_relu(scaled, 0.2), 2)


class FusedModel(Model):
    """The same parameters and the same state_dict; the unpooled result is never written."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels)
        self.fused = fusegen.compile(chain)

    def chain(self, y: Tensor) -> Tensor:
        return self.fused(y, self.factor)


def main() -> int:
    choice = options(__doc__)
    torch.manual_seed(0)
    eager = Model(16, 32).to(choice.device)
    fused = FusedModel(16, 32).to(choice.device)
    fused.load_state_dict(eager.state_dict())
    x = torch.randn(
        choice.batch, 16, choice.depth, 32, 32, device=choice.device, requires_grad=True
    )

    print(f"{fused.fused.chain.text}\non {choice.device}, x {tuple(x.shape)}")
    good = agree(eager, fused, x)
    print_times(eager, fused, x, choice.repeats)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
