"""The benchmark: fusegen beside eager torch and torch.compile, in multiples of a copy of x.

    python -m benchmarks.run [--device cpu|cuda] [--quick] [--work A,B] [--json PATH]

Every workload is checked against float64 before it is timed; where one is wrong, the status is 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusegen
from benchmarks.timing import (
    CudaTimer,
    Timer,
    cpu_seconds,
    host_microseconds,
    measure,
    multiple,
    spread,
)
from benchmarks.workloads import CHAIN_A, WORKS, Work

ROOT = Path(__file__).resolve().parent.parent
MODES = ("forward", "forward+backward")
_ROTATION_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # several times what a cache holds
_CHECKED_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 40}
_BUILD = """
import json, sys, time
import torch
device = sys.argv[1]
torch.zeros(1, device=device).exp()
start = time.perf_counter()
import fusegen
imported = time.perf_counter()
x = torch.randn(2, 4, 4, 8, 8, device=device, requires_grad=True)
bias = torch.randn(4, device=device, requires_grad=True)
result = fusegen.compile(sys.argv[2])(x, bias)
torch.autograd.grad(result.sum(), [x, bias])[1].cpu()
print(json.dumps([imported - start, time.perf_counter() - imported]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 where a result was wrong."""
    options = _options(arguments)
    device = options.device
    timer: Timer = CudaTimer() if device == "cuda" else cpu_seconds
    with_compile = not (options.no_compile or options.quick)
    rows: list[dict[str, Any]] = []
    copies: list[float] = []
    print(_HEADER)
    for work in _chosen(options):
        for row, gbps in _rows(work, device, timer, options.quick, with_compile):
            rows.append(row)
            copies.append(gbps)
            print(_line(row), flush=True)
    host = _host(device, with_compile)
    for entry in host:
        rivals = ", ".join(f"{k} {v:.1f}" for k, v in entry.items() if isinstance(v, float))
        print(f"host us, 1,024 elements, {entry['mode']}: {rivals}", flush=True)
    build = _build(device)
    print(
        f"build of A, forward + backward: cold {build['cold']:.2f} s; from the cache "
        f"{build['warm'] * 1e3:.0f} ms, {build['warm_import'] * 1e3:.0f} ms of it import fusegen"
    )
    if options.json:
        report = _facts(device, options.commit) | {
            "copy_gbps": max(copies, default=0.0),
            "rows": rows,
            "host_us": host,
            "build_s": build,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = sorted({row["work"] for row in rows if not row["is_right"]})
    if wrong:
        print(f"less accurate than eager: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--quick", action="store_true", help="few workloads, no torch.compile")
    parser.add_argument(
        "--work", help="names, comma-separated: " + ", ".join(w.name for w in WORKS)
    )
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Work]:
    if options.work is None:
        return [w for w in WORKS if w.is_quick or not options.quick]
    by_name = {w.name: w for w in WORKS}
    names = options.work.split(",")
    unknown = [n for n in names if n not in by_name]
    if unknown:
        raise SystemExit(f"no workload is called {unknown[0]!r}; there are {', '.join(by_name)}")
    return [by_name[n] for n in names]


def _rows(
    work: Work, device: str, timer: Timer, is_quick: bool, with_compile: bool
) -> list[tuple[dict[str, Any], float]]:
    """A workload's rows, one a mode, and the copy's bandwidth in each."""
    fused = fusegen.compile(work.chain)
    functions: dict[str, Callable[..., Tensor]] = {"eager": work.eager, "fusegen": fused}
    if with_compile:
        torch.compiler.reset()
        functions["compile"] = torch.compile(work.eager)
    max_error, eager_error, is_right = _errors(work, fused, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    first = work.inputs(device, 0)
    count = min(8, max(2, -(-_ROTATION_BYTES[device] // first[0].nbytes)))
    inputs = [first, *(work.inputs(device, seed) for seed in range(1, count))]
    cotangents = [torch.randn_like(fused(*tensors)) for tensors in inputs]
    copies = [torch.empty_like(x) for x, *_ in inputs]

    def copy(i: int) -> Tensor:
        return copies[i % count].copy_(inputs[i % count][0])

    def forward(function: Callable[..., Tensor]) -> Callable[[int], object]:
        def run(i: int) -> object:
            with torch.no_grad():
                return function(*inputs[i % count])

        return run

    def training(function: Callable[..., Tensor]) -> Callable[[int], object]:
        def run(i: int) -> object:
            result = function(*leaves[i % count])
            return torch.autograd.grad(result, leaves[i % count], cotangents[i % count])

        return run

    leaves = [[t.detach().requires_grad_() for t in tensors] for tensors in inputs]
    found = []
    for mode, make in zip(MODES, (forward, training), strict=True):
        rivals = {"copy": copy} | {name: make(f) for name, f in functions.items()}
        seconds = measure(timer, rivals, 1.0 if is_quick else 2.0, 4 if is_quick else 9)
        row = {
            "work": work.name,
            "shape": list(work.shape(device)),
            "dtype": str(work.dtype).removeprefix("torch."),
            "layout": work.layout,
            "mode": mode,
            "limit": work.forward_limit if mode == MODES[0] else work.training_limit,
            "eager": multiple(seconds, "eager"),
            "compile": multiple(seconds, "compile") if with_compile else None,
            "fusegen": multiple(seconds, "fusegen"),
            "spread": spread(seconds["fusegen"]),
            "max_error": max_error,
            "eager_error": eager_error,
            "is_right": is_right,
            "copy_ms": statistics.median(seconds["copy"]) * 1e3,
        }
        found.append((row, 2 * first[0].nbytes / statistics.median(seconds["copy"]) / 1e9))
    return found


def _errors(work: Work, fused: Callable[..., Tensor], device: str) -> tuple[float, float, bool]:
    """The largest errors of ours and of eager's against float64, over the result and every
    gradient, each in units of its largest value; and whether ours are no larger.
    """
    tensors = work.inputs(device, 0)
    rows = max(1, _CHECKED_ELEMENTS[device] // tensors[0][0].numel())
    inputs = [tensors[0][:rows], *tensors[1:]]
    generator = torch.Generator(device).manual_seed(1)

    def outcome(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        result = function(*leaves)
        generator.manual_seed(1)
        cotangent = torch.randn(result.shape, generator=generator, device=device, dtype=work.dtype)
        gradients = torch.autograd.grad(result, leaves, cotangent.to(dtype))
        return [result.detach(), *gradients]

    exact = outcome(work.eager, torch.float64)

    def error(function: Callable[..., Tensor]) -> list[float]:
        pairs = zip(outcome(function, work.dtype), exact, strict=True)
        return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]

    ours, eager = error(fused), error(work.eager)
    slack = 8 * torch.finfo(work.dtype).eps
    is_right = all(a <= 2 * b + slack for a, b in zip(ours, eager, strict=True))
    return max(ours), max(eager), is_right


def _host(device: str, with_compile: bool) -> list[dict[str, Any]]:
    """Microseconds of host time for one call at 1,024 elements."""
    work = WORKS[0]
    x = torch.randn(1, 4, 4, 8, 8, device=device)
    bias = torch.randn(4, device=device)
    fused = fusegen.compile(work.chain)
    functions = {"eager": work.eager, "fusegen": fused}
    if with_compile:
        torch.compiler.reset()
        functions["compile"] = torch.compile(work.eager)
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # eager's own way to wake others would be measured instead
    for mode, needs_grad in (("forward", False), ("forward, with grad", True)):
        leaves = [t.detach().requires_grad_(needs_grad) for t in (x, bias)]

        def calls(
            function: Callable[..., Tensor], leaves: list[Tensor] = leaves
        ) -> Callable[[], object]:
            return lambda: function(*leaves)

        rivals = {"one eager operation": lambda leaves=leaves: torch.relu(leaves[0])}
        rivals |= {name: calls(f) for name, f in functions.items()}
        found.append({"work": work.name, "mode": mode} | host_microseconds(rivals, 500))
    torch.set_num_threads(threads)
    return found


def _build(device: str) -> dict[str, float]:
    """Seconds beyond `import torch` to the first gradients of A in a new process: with an empty
    cache, then with a full one.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"FUSEGEN_CACHE_DIR": cache}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        command = [sys.executable, "-c", _BUILD, device, CHAIN_A]

        def seconds() -> tuple[float, float]:
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            imported, ran = json.loads(answer.stdout.splitlines()[-1])
            return imported, ran

        cold = sum(seconds())
        warm_import, warm_run = sorted(seconds() for _ in range(3))[1]
    return {"cold": cold, "warm": warm_import + warm_run, "warm_import": warm_import}


def _facts(device: str, commit: str | None) -> dict[str, Any]:
    is_cuda = device == "cuda"
    driver = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name() if is_cuda else _cpu_name(),
        "torch": str(torch.__version__),
        "driver": driver.splitlines()[0] if is_cuda and driver else None,
        "threads": torch.get_num_threads(),
        "commit": commit or _answer("git", "-C", str(ROOT), "rev-parse", "HEAD") or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
    }


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_HEADER = (
    f"{'work':16} {'shape':18} {'dtype':9} {'mode':16} {'copy ms':>8} {'limit':>6} {'eager':>6} "
    f"{'compile':>7} {'fusegen':>7} {'spread':>6} {'error':>8} {'eager err':>9}"
)


def _line(row: dict[str, Any]) -> str:
    compiled = f"{row['compile']:7.2f}" if row["compile"] else f"{'-':>7}"
    shape = "x".join(map(str, row["shape"]))
    return (
        f"{row['work']:16} {shape:18} {row['dtype']:9} {row['mode']:16} {row['copy_ms']:8.3f} "
        f"{row['limit']:6.2f} {row['eager']:6.2f} {compiled} {row['fusegen']:7.2f} "
        f"{row['spread']:6.1%} {row['max_error']:8.1e} {row['eager_error']:9.1e}"
    ) + ("" if row["is_right"] else "  WRONG")


if __name__ == "__main__":
    sys.exit(main())
