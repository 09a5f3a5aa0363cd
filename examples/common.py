"""What the model examples share: two twins on one input, compared and timed."""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

# Twins differ by rounding alone: a few parts in 10^7 a step, more where many terms are added up.
TOLERANCE = 2e-5


def options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="how many samples; the rest of the shape is fixed")
    parser.add_argument("--quick", action="store_true", help="one sample, and hardly any timing")
    found = parser.parse_args()
    if found.batch is None:
        found.batch = 1 if found.quick else 16 if found.device.startswith("cuda") else 2
    return found


def compare(eager: nn.Module, fused: nn.Module, x: Tensor) -> bool:
    """Print the largest error of the output and of every gradient, relative to the largest value."""
    # TF32 rounds what a convolution reads so coarsely that the last bit of an input can show.
    with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
        wanted, found = results(eager, x), results(fused, x)
    print(f"\nlargest error against eager, relative to the largest value (allowed: {TOLERANCE:.0e})")
    good = True
    for name, value in wanted.items():
        error = ((found[name] - value).abs().max() / value.abs().max()).item()
        is_good = error <= TOLERANCE
        good = good and is_good
        print(f"  {name:24} {error:8.1e}{'' if is_good else '  TOO LARGE'}")
    return good


def results(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = model(x)
    inputs = {"x": x, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(y, list(inputs.values()), cotangent_of(y))
    return {"output": y.detach()} | {
        f"gradient of {name}": g for name, g in zip(inputs, gradients, strict=True)
    }


def cotangent_of(y: Tensor) -> Tensor:
    """Random, and the same for both twins."""
    generator = torch.Generator(y.device).manual_seed(1)
    return torch.randn(y.shape, generator=generator, device=y.device)


def print_times(eager: nn.Module, fused: nn.Module, x: Tensor, *, quick: bool) -> None:
    """Print median times of the chain alone, on what the first layer gives, and of the whole model."""
    middle = eager.conv(x).detach().requires_grad_()
    print(f"\n{'median time':28}{'eager':>12}{'fused':>12}{'ratio':>8}")
    for what, steps, start in (
        ("the chain", (eager.chain, fused.chain), middle),
        ("the whole model", (eager, fused), x),
    ):
        for pass_name, timed in (("forward", forward), ("forward + backward", both)):
            a, b = (median_ms(timed(step, start), 0.01 if quick else 0.5) for step in steps)
            print(f"{what + ', ' + pass_name:36}"[:36] + f"{a:8.2f} ms{b:9.2f} ms{a / b:7.2f}x")


def forward(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            function(x)

    return run


def both(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """Every gradient that training would take: x's and the parameters'."""
    owner = function if isinstance(function, nn.Module) else function.__self__
    y = function(x)
    cotangent = cotangent_of(y)
    inputs = [x, *owner.parameters()]

    def run() -> None:
        torch.autograd.grad(function(x), inputs, cotangent, allow_unused=True)

    return run


def median_ms(run: Callable[[], object], least_s: float) -> float:
    """Of runs that together take at least so many seconds; the device is waited for."""
    run()
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=least_s).median * 1e3
