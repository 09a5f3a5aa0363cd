"""One work measured: right first, then fast; in multiples of a copy of x."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusegen.bench import timing
from fusegen.bench.precision import precision
from fusegen.bench.rivals import (
    Function,
    compiled,
    eager_of,
    fused_of,
    gradients_of,
    inputs,
    leaves_of,
    limits_of,
    results_of,
)
from fusegen.bench.timing import Run, Sample, Timer
from fusegen.bench.works import CHAIN_A, HOST_MODES, MODES, HostWork, Sweep, Work

Row = dict[str, Any]

_ROTATION_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # several times what a cache holds
_HOST_CALLS = 500


@dataclass(frozen=True)
class Effort:
    """How long to measure, and which of torch.compile's modes stand beside."""

    seconds: float  # for one row, all rivals together
    rounds: int  # at least
    compile_modes: tuple[str, ...] = ()  # of "compile" and "max_autotune"
    times_builds: bool = True  # torch.compile's first calls build, and are not from its cache


class Bench:
    """A work's data in rotation, and each rival's call on it in both modes."""

    def __init__(self, work: Work, device: str, functions: dict[str, Function]) -> None:
        first = inputs(work, device, 0)
        bytes_of_x = max(first[0].nbytes, 1)
        count = min(8, max(2, -(-_ROTATION_BYTES[device] // bytes_of_x)))
        self.inputs = [first, *(inputs(work, device, seed) for seed in range(1, count))]
        with torch.no_grad():
            results = results_of(functions["fusegen"], first)
        self.cotangents = [[torch.randn_like(r) for r in results] for _ in self.inputs]
        # Where x has gaps, what is copied has none.
        dense = [x if work.layout != "halves" else x.clone() for x, *_ in self.inputs]
        self.copies = [(x, torch.empty_like(x)) for x in dense]
        self.leaves = [leaves_of(work, tensors) for tensors in self.inputs]
        self.functions = functions

    def copy(self, turn: int) -> Tensor:
        """The unit: x read and as much written."""
        source, copy = self.copies[turn % len(self.inputs)]
        return copy.copy_(source)

    def runs(self, mode: str) -> dict[str, Run]:
        """Every rival's call in a mode."""
        make = self._forward if mode == MODES[0] else self._training
        return {name: make(function) for name, function in self.functions.items()}

    def held_bytes(self, mode: str) -> int:
        """What one call is given: x, the operands and, for the backward, the gradient."""
        held = sum(t.nbytes for t in self.inputs[0])
        return held + sum(t.nbytes for t in self.cotangents[0] if mode == MODES[1])

    def _forward(self, function: Function) -> Run:
        def run(turn: int) -> object:
            with torch.no_grad():
                return function(*self.inputs[turn % len(self.inputs)])

        return run

    def _training(self, function: Function) -> Run:
        def run(turn: int) -> object:
            i = turn % len(self.inputs)
            return gradients_of(function, self.leaves[i], self.cotangents[i])

        return run


def rows(work: Work, device: str, timer: Timer, effort: Effort) -> list[Row]:
    """The work's rows, one a mode."""
    fused, eager = fused_of(work), eager_of(work)
    checked = precision(work, fused, eager, device)
    _release(device)
    functions: dict[str, Function] = {"eager": eager, "fusegen": fused}
    functions |= compiled(work, device, effort.compile_modes)
    bench = Bench(work, device, functions)
    found = []
    for i, mode in enumerate(MODES):
        runs = bench.runs(mode)
        first_call_s, refusals = {}, {}
        for name in effort.compile_modes:
            started = time.perf_counter()
            try:
                runs[name](0)
            except Exception as error:  # whatever torch.compile may raise is its own result
                refusals[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                del runs[name]
            else:
                _wait(device)
                if effort.times_builds:
                    first_call_s[name] = time.perf_counter() - started
        peak_gib = _peaks(runs, bench.held_bytes(mode), device)
        samples = timing.measure(timer, {"copy": bench.copy} | runs, effort.seconds, effort.rounds)
        limit = limits_of(work, device)[i]
        copy_s = timing.median_s(samples["copy"])
        copied = 2 * bench.inputs[0][0].nbytes
        row: Row = {
            "work": work.name,
            "chain": work.chain,
            "shape": list(work.shape(device)),
            "dtype": work.dtype,
            "layout": work.layout,
            "mode": mode,
            "limit": limit,
            # The targets are the H200's.
            "target": work.targets[i] if work.targets and device == "cuda" else None,
            "eager": timing.multiple(samples, "eager"),
            "compile": None,
        }
        row |= {
            name: timing.multiple(samples, name) for name in effort.compile_modes if name in runs
        }
        row |= {
            "fusegen": timing.multiple(samples, "fusegen"),
            "spread": timing.spread(samples["fusegen"]),
            "rounds": len(samples["copy"]),
            "copy_ms": copy_s * 1e3,
            "copy_gbps": copied / copy_s / 1e9,
            "moved_bytes": round(limit * copied),
            "of_copy_bandwidth": limit / timing.multiple(samples, "fusegen"),
            "peak_gib": peak_gib,
            "host_us": _host_us(samples, device),
            "compile_first_call_s": first_call_s,
            "max_error": max(checked.ours.values()),
            "eager_error": max(checked.eager.values()),
            "errors": {n: [e, checked.eager[n]] for n, e in checked.ours.items()},
            "is_right": checked.is_right,
        }
        found.append(row | ({"refused": refusals} if refusals else {}))
    del bench
    _release(device)
    return found


def points(sweep: Sweep, device: str, timer: Timer, effort: Effort) -> list[Row]:
    """A sweep's points: bytes that must move, a second, beside the copy's, in both modes."""
    found = []
    for at, work in sweep.points(device):
        fused = fused_of(work)
        is_right = precision(work, fused, eager_of(work), device).is_right
        bench = Bench(work, device, {"fusegen": fused})
        for mode, limit in zip(MODES, limits_of(work, device), strict=True):
            runs = {"copy": bench.copy} | bench.runs(mode)
            samples = timing.measure(timer, runs, effort.seconds, effort.rounds)
            copied = 2 * bench.inputs[0][0].nbytes
            found.append(
                {
                    "at": at,
                    "shape": list(work.shape(device)),
                    "dtype": work.dtype,
                    "mode": mode,
                    "copy_gbps": copied / timing.median_s(samples["copy"]) / 1e9,
                    "gbps": limit * copied / timing.median_s(samples["fusegen"]) / 1e9,
                    "fusegen": timing.multiple(samples, "fusegen"),
                    "spread": timing.spread(samples["fusegen"]),
                    "is_right": is_right,
                }
            )
        del bench
        _release(device)
    return found


def host(work: HostWork, device: str, effort: Effort) -> list[Row]:
    """Microseconds of host time for one call of chain A, in a tight loop."""
    channels = work.shape[1]
    chain = Work(work.name, CHAIN_A, "chain_a", work.shape, work.shape, ((channels,),))
    tensors = inputs(chain, device, 0)
    functions: dict[str, Function] = {"eager": eager_of(chain), "fusegen": fused_of(chain)}
    functions |= compiled(chain, device, effort.compile_modes[:1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # eager's own way to wake others would be measured instead
    found = []
    try:
        for mode, target in zip(HOST_MODES, work.targets, strict=True):
            leaves = [t.detach().requires_grad_(mode != HOST_MODES[0]) for t in tensors]
            call = _call_with_backward if mode == HOST_MODES[2] else _call
            calls = {"one eager operation": call(torch.relu, leaves[:1])}
            calls |= {name: call(function, leaves) for name, function in functions.items()}
            entry: Row = {"work": work.name, "mode": mode}
            entry["target"] = target if device == "cuda" else None
            found.append(entry | timing.host_microseconds(calls, _HOST_CALLS))
    finally:
        torch.set_num_threads(threads)
    return found


def _host_us(samples: dict[str, list[Sample]], device: str) -> dict[str, float]:
    """The host's share of each rival's call, which on the CPU is all of it."""
    if device == "cpu":
        return {}
    return {n: timing.median_host_s(s) * 1e6 for n, s in samples.items() if n != "copy"}


def _call(function: Function, tensors: list[Tensor]) -> Callable[[], object]:
    return lambda: function(*tensors)


def _call_with_backward(function: Function, leaves: list[Tensor]) -> Callable[[], object]:
    cotangent = torch.ones_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, cotangent)


def _peaks(runs: dict[str, Run], held_bytes: int, device: str) -> dict[str, float]:
    """GiB at the peak of each rival's call, its inputs included; torch counts them on CUDA only."""
    if device != "cuda":
        return {}
    found = {}
    for name, run in runs.items():
        run(0)  # what only a first call allocates is not a call's
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(0)
        torch.cuda.synchronize()
        own_bytes = torch.cuda.max_memory_allocated() - before
        found[name] = (held_bytes + own_bytes) / 2**30
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
