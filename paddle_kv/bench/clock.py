"""Measuring: device time by CUDA events on a GPU, wall time on the CPU; time on the host beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

FEWEST_FOR_NOISE = 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs; ``host_us`` is how long the calling thread was held by one."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    host_us: float
    repeats: int

    @property
    def noise_percent(self) -> float | None:
        """Half the distance between the 10th and the 90th percentile, relative to the median.

        None of fewer than 5 runs: two that something else slowed down, and the median is one of them, with the other
        close by.
        """
        if self.repeats < FEWEST_FOR_NOISE:
            return None
        return 50 * (self.p90_ms - self.p10_ms) / self.median_ms if self.median_ms else 0.0


class Clock(Protocol):
    """Times work that is enqueued on ``stream``."""

    stream: Any

    def time_ms(self, enqueue: Callable[[], None], submission_us: float) -> float:
        """``submission_us``: how long ``enqueue`` is expected to hold the calling thread; that is not to be counted."""
        ...


class HostClock:
    """For builds without a GPU: the work is done when the call returns."""

    stream = None

    def time_ms(self, enqueue: Callable[[], None], submission_us: float) -> float:
        started = time.perf_counter()
        enqueue()
        return (time.perf_counter() - started) * 1e3


_BUSY = r"""
extern "C" __global__ void busy(unsigned long long duration_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < duration_ns);
}
"""


class CudaClock:
    """Events around the work, on a non-blocking stream of its own.

    Before each run the L2 cache is overwritten, and a kernel keeps the stream busy until the host has submitted the
    work: the events see the device alone.
    """

    def __init__(self) -> None:
        import cupy

        from ..backend.cupy_backend import transfer_stream

        self.stream = transfer_stream()
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        l2_bytes = cupy.cuda.Device().attributes["L2CacheSize"]
        self._evict = cupy.empty(2 * l2_bytes, dtype="uint8")
        self._busy = cupy.RawKernel(_BUSY, "busy")
        self._elapsed = cupy.cuda.get_elapsed_time

    def time_ms(self, enqueue: Callable[[], None], submission_us: float) -> float:
        with self.stream:
            self._evict.fill(0)
        self.occupy(self.stream, 1.5e-3 * submission_us + 0.02)
        self._start.record(self.stream)
        enqueue()
        self._end.record(self.stream)
        self._end.synchronize()
        return float(self._elapsed(self._start, self._end))

    def occupy(self, stream: Any, milliseconds: float) -> None:
        """A kernel of one thread that takes so long on the stream."""
        self._busy((1,), (1,), (np.uint64(1e6 * milliseconds),), stream=stream)


def measure(clock: Clock, enqueue: Callable[[], None], *, warmups: int, repeats: int) -> Timing:
    """Median and spread of ``repeats`` runs after ``warmups``."""
    host_us = [0.0]

    def counted() -> None:
        started = time.perf_counter()
        enqueue()
        host_us.append((time.perf_counter() - started) * 1e6)

    for _ in range(warmups):
        clock.time_ms(counted, 0.0)
    submission_us = host_us[-1]  # warm, and not yet behind a busy stream: a full queue would hold the caller too
    del host_us[:]
    times = sorted(clock.time_ms(counted, submission_us) for _ in range(repeats))
    last = len(times) - 1
    return Timing(
        statistics.median(times),
        times[round(0.1 * last)],
        times[round(0.9 * last)],
        statistics.median(host_us),
        repeats,
    )
