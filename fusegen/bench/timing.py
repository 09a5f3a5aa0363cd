"""Timing: rivals interleaved in one process, on data in rotation, out of a cold cache.

On the GPU the times are the device's, between events, and the host's work is hidden: a pause goes
ahead of each measurement, long enough for the host to queue all of it. On the CPU a time includes
the release of the result, as it does in use.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20  # five times the H200's L2
# 1.6 ms at 1.9 GHz: to queue an eager forward and backward took the host up to 0.85 ms.
_PAUSE_CYCLES = 3_000_000
_MOST_ROUNDS = 100
_WARM_UP_ROUNDS = 2

Run = Callable[[int], object]  # of one call, told which of the data in rotation to use


@dataclass(frozen=True)
class Sample:
    """One call: seconds on the device, and of the host until it had queued all of it."""

    device_s: float
    host_s: float


Timer = Callable[[Run, int], Sample]


def cpu_timer(run: Run, turn: int) -> Sample:
    """Wall-clock time of one call, which is device and host at once."""
    start = time.perf_counter()
    run(turn)
    seconds = time.perf_counter() - start
    return Sample(seconds, seconds)


class CudaTimer:
    """The device's time of one call behind another like it, with no line of its tensors in L2.

    Some 40 MB of lines that were written and are not in memory yet are in L2 before a call, and
    have to go there to make room. The call before is the same one on other data, so that each pays
    for as many as it leaves. Behind anything that writes, a work that only reads would pay for
    writes that are not its own: 44.7 us instead of 37.2 for 134 MB on the H200. Behind anything
    that only reads, what a work leaves would be nobody's.
    """

    def __init__(self) -> None:
        self.flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        cuda: Any = torch.cuda  # torch gives no types for what follows
        self.start, self.end = (cuda.Event(enable_timing=True) for _ in range(2))
        self.pause = cuda._sleep

    def __call__(self, run: Run, turn: int) -> Sample:
        self.flush.zero_()
        before = run(turn + 1)  # what it gives stays, so that the call has other memory for that
        self.pause(_PAUSE_CYCLES)
        self.start.record()
        started = time.perf_counter()
        result = run(turn)
        host_s = time.perf_counter() - started
        self.end.record()
        self.end.synchronize()
        del before, result
        return Sample(float(self.start.elapsed_time(self.end)) / 1e3, host_s)


def timer_of(device: str) -> Timer:
    """The timer of a device."""
    return CudaTimer() if device == "cuda" else cpu_timer


def measure(
    timer: Timer, rivals: Mapping[str, Run], budget_s: float, least: int
) -> dict[str, list[Sample]]:
    """Each rival's samples, one a round; a round's number picks the data and who begins.

    It ends after `budget_s` seconds, but not before `least` rounds.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in rivals}
    names = list(rivals)
    for warm_up in range(_WARM_UP_ROUNDS):
        for run in rivals.values():
            timer(run, warm_up)
    started, rounds = time.perf_counter(), 0
    while rounds < least or (time.perf_counter() - started < budget_s and rounds < _MOST_ROUNDS):
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(timer(rivals[name], rounds))
        rounds += 1
    return samples


def median_s(samples: Sequence[Sample]) -> float:
    """The median of the device's seconds."""
    return statistics.median(s.device_s for s in samples)


def median_host_s(samples: Sequence[Sample]) -> float:
    """The median of the host's seconds."""
    return statistics.median(s.host_s for s in samples)


def multiple(samples: Mapping[str, Sequence[Sample]], name: str, unit: str = "copy") -> float:
    """How many times the unit a rival takes: the median over rounds, so that drift cancels."""
    pairs = zip(samples[name], samples[unit], strict=True)
    return statistics.median(a.device_s / b.device_s for a, b in pairs)


def spread(samples: Sequence[Sample]) -> float:
    """The interquartile range as a fraction of the median."""
    low, middle, high = statistics.quantiles([s.device_s for s in samples], n=4)
    return (high - low) / middle


def host_microseconds(rivals: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Host time of one call of each rival, in a tight loop, none waiting for the device."""
    found: dict[str, list[float]] = {name: [] for name in rivals}
    for batch in range(9):
        for name, run in rivals.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if batch >= 2:
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}
