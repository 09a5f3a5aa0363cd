"""What the model examples share: two twins on one input, compared and timed."""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

# Twins differ by rounding alone: a few parts in 10^7 a step, more where many terms are added up.
TOLERANCE = 2e-5


def options(description: str) -> argparse.Namespace:
    """The command line: where to run, and how much of it; x is (batch, channels, depth, ...)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="default: 16 on a GPU, 2 on a CPU")
    parser.add_argument("--depth", type=int, help="default: 16 on a GPU, 8 on a CPU")
    parser.add_argument("--quick", action="store_true", help="a small x, and hardly any timing")
    found = parser.parse_args()
    is_cpu = found.device == "cpu"
    found.batch = found.batch or (1 if found.quick else 2 if is_cpu else 16)
    found.depth = found.depth or (4 if found.quick else 8 if is_cpu else 16)
    found.repeats = 2 if found.quick else 5 if is_cpu else 30
    return found


def agree(eager: nn.Module, fused: nn.Module, x: Tensor) -> bool:
    """Whether output and gradients are equal up to rounding; prints the largest differences."""
    # TF32 rounds what a convolution reads so coarsely that the last bit of an input can show.
    with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
        wanted, found = results(eager, x), results(fused, x)
    print(f"\nlargest difference from eager, as a part of the largest value; allowed {TOLERANCE:g}")
    errors = {
        name: ((found[name] - value).abs().max() / value.abs().max()).item()
        for name, value in wanted.items()
    }
    for name, error in errors.items():
        print(f"  {name:26}{error:10.1e}{'' if error <= TOLERANCE else '  TOO LARGE'}")
    return all(error <= TOLERANCE for error in errors.values())


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    inputs = {"x": x, **dict(model.named_parameters())}
    y = model(x)
    gradients = torch.autograd.grad(y, list(inputs.values()), cotangent_of(y))
    names = (f"gradient of {name}" for name in inputs)
    return {"output": y.detach(), **dict(zip(names, gradients, strict=True))}


def cotangent_of(y: Tensor) -> Tensor:
    """An incoming gradient: random, and the same for both twins."""
    generator = torch.Generator(y.device).manual_seed(1)
    return torch.randn(y.shape, generator=generator, device=y.device)


def print_times(eager: nn.Module, fused: nn.Module, x: Tensor, repeats: int) -> None:
    """Median times of the chain alone, on what the convolution gives, and of the whole model."""
    y = eager.conv(x).detach().requires_grad_()
    print(f"\n{'median of ' + str(repeats):34}{'eager':>12}{'fused':>12}{'ratio':>8}")
    for part, a, b, start in (
        ("chain", eager.chain, fused.chain, y),
        ("model", eager, fused, x),
    ):
        for direction, run in (("forward", forward), ("forward + backward", forward_backward)):
            runs = [partial(run, a, eager, start), partial(run, b, fused, start)]
            times = median_ms(runs, repeats)
            columns = "".join(f"{t:9.2f} ms" for t in times)
            print(f"  {part + ', ' + direction:32}{columns}{times[0] / times[1]:7.2f}x")


def forward(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        function(x)


def forward_backward(function: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    y = function(x)
    torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y), allow_unused=True)


def median_ms(runs: list[Callable[[], None]], repeats: int) -> list[float]:
    """Each run's median time; they take turns, so that a busy machine treats them alike."""
    times: list[list[float]] = [[] for _ in runs]
    for i in range(repeats + 2):  # the first two are warm-up
        for mine, run in zip(times, runs, strict=True):
            wait()
            start = time.perf_counter()
            run()
            wait()
            if i >= 2:
                mine.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(mine) for mine in times]


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
