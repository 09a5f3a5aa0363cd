"""A small network trained twice from one initial state, eager and fused: the loss curves agree.

It learns to tell which of four ways the stripes in a noisy picture run.
"""

import argparse
import math
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusegen

SIZE = 16
DIRECTIONS = 4
LEAST_ACCURACY = 0.9
# Rounding differs in the last bit, and each step of training works on what the last one left.
TOLERANCE = 1e-3


class Network(nn.Module):
    """One torch operation after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.factor = nn.Parameter(torch.ones(16, 1, 1))
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32 * (SIZE // 2) ** 2, DIRECTIONS)

    def stem(self, y: Tensor) -> Tensor:
        return F.max_pool2d(F.leaky_relu(y, 0.1) * self.factor, 2)

    def body(self, y: Tensor) -> Tensor:
        channels_last = y.movedim(1, -1)
        y = self.norm(channels_last).movedim(-1, 1)
        return y * torch.sigmoid(y)

    def forward(self, pictures: Tensor) -> Tensor:
        y = self.body(self.second(self.stem(self.first(pictures))))
        return self.last(y.flatten(1))


class FusedNetwork(Network):
    """The same parameters and the same state_dict; a kernel each for stem and body."""

    def __init__(self) -> None:
        super().__init__()
        self.fused_stem = fusegen.compile("leaky_relu(0.1) | mul_channel | max_pool2d(2)")
        self.fused_body = fusegen.compile(
            "layernorm(weight, bias, axis=1) | keep(y) | sigmoid | mul(y)"
        )

    def stem(self, y: Tensor) -> Tensor:
        return self.fused_stem(y, self.factor)

    def body(self, y: Tensor) -> Tensor:
        return self.fused_body(y, self.norm.weight, self.norm.bias)


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy pictures (count, 1, SIZE, SIZE) of stripes, and which way they run, of DIRECTIONS."""
    labels = torch.randint(DIRECTIONS, (count,), generator=generator)
    angle = labels[:, None, None] * math.pi / DIRECTIONS
    phase, width = torch.rand(2, count, 1, 1, generator=generator)
    axis = torch.arange(SIZE, dtype=torch.float32)
    along = axis[:, None] * angle.cos() + axis[None, :] * angle.sin()
    stripes = torch.sin(2 * math.pi * (along / (4 + 2 * width) + phase))
    noise = 1.1 * torch.randn(count, SIZE, SIZE, generator=generator)
    return (stripes + noise)[:, None], labels


def train(model: Network, device: str, steps: int) -> tuple[list[float], float, float]:
    """(the loss at each step, the accuracy on new pictures, seconds)."""
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        x, labels = (t.to(device) for t in pictures(32, generator))
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    elapsed_s = time.perf_counter() - start
    x, labels = (t.to(device) for t in pictures(512, generator))
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == labels).float().mean().item()
    return losses, accuracy, elapsed_s


def print_curves(eager: list[float], fused: list[float]) -> None:
    print(f"\n{'step':>5}{'eager':>12}{'fused':>12}   loss")
    for step in range(0, len(eager), max(1, len(eager) // 20)):
        bar = "#" * round(30 * eager[step] / max(eager))
        print(f"{step:5}{eager[step]:12.6f}{fused[step]:12.6f}   {bar}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    # What is compared is the chain's rounding, not the convolution's coarser one.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True

    torch.manual_seed(0)
    eager, fused = Network().to(options.device), FusedNetwork().to(options.device)
    fused.load_state_dict(eager.state_dict())
    print(f"{fused.fused_stem.chain.text}\n{fused.fused_body.chain.text}\non {options.device}")
    losses, accuracy, elapsed_s = train(eager, options.device, options.steps)
    fused_losses, fused_accuracy, fused_elapsed_s = train(fused, options.device, options.steps)

    print_curves(losses, fused_losses)
    difference = max(abs(a - b) for a, b in zip(losses, fused_losses, strict=True))
    print(f"\nlargest difference of the losses  {difference:.1e}; allowed {TOLERANCE:g}")
    print(f"accuracy on new pictures          eager {accuracy:.1%}, fused {fused_accuracy:.1%}")
    print(f"time, with the fused build        {elapsed_s:.1f} s, {fused_elapsed_s:.1f} s")
    is_good = difference <= TOLERANCE and min(accuracy, fused_accuracy) >= LEAST_ACCURACY
    print("the curves agree" if is_good else "THE CURVES DO NOT AGREE, or too little was learnt")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
