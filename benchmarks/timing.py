"""Timing: rivals interleaved in one process, on data in rotation, out of a cold cache.

On the GPU the times are the device's, between events, and the host's work is hidden: a pause goes
ahead of each measurement, long enough for the host to queue all of it. Host time has a measurement
of its own. On the CPU a time includes the release of the result, as it does in use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

_FLUSH_BYTES = 256 << 20  # five times the H200's L2
_PAUSE_CYCLES = 1_500_000  # 0.8 ms at 1.9 GHz

Work = Callable[[int], object]
Timer = Callable[[Work, int], float]


def cpu_seconds(work: Work, turn: int) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    work(turn)
    return time.perf_counter() - start


class CudaTimer:
    """Seconds of the device's time in one call."""

    def __init__(self) -> None:
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def __call__(self, work: Work, turn: int) -> float:
        self.flush.zero_()
        torch.cuda._sleep(_PAUSE_CYCLES)
        self.start.record()
        result = work(turn)
        self.end.record()
        self.end.synchronize()
        del result
        return self.start.elapsed_time(self.end) / 1e3


def measure(
    timer: Timer, rivals: Mapping[str, Work], budget_s: float, least: int
) -> dict[str, list[float]]:
    """Seconds of each rival in each round, by whose number it picks its data."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for warm_up in range(min(3, least - 2)):
        for work in rivals.values():
            timer(work, warm_up)
    started, rounds = time.perf_counter(), 0
    while rounds < least or (time.perf_counter() - started < budget_s and rounds < 100):
        for name, work in rivals.items():
            seconds[name].append(timer(work, rounds))
        rounds += 1
    return seconds


def multiple(seconds: Mapping[str, list[float]], name: str, unit: str = "copy") -> float:
    """How many times the unit a rival takes: the median over rounds, so that drift cancels."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[unit], strict=True))


def spread(seconds: list[float]) -> float:
    """The interquartile range as a fraction of the median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def host_microseconds(rivals: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Host time of one call of each rival, none waiting for the device."""
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for batch in range(9):
        for name, work in rivals.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                work()
            if batch >= 2:
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}
