"""Measuring: device time by CUDA events on a GPU, wall time on the CPU; host submission time beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs; ``host_us`` is how long the calling thread was held by one."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    host_us: float
    repeats: int

    @property
    def noise_percent(self) -> float:
        """Half the distance between the 10th and the 90th percentile, relative to the median."""
        return 50 * (self.p90_ms - self.p10_ms) / self.median_ms if self.median_ms else 0.0


class Clock(Protocol):
    """Times work that is enqueued on ``stream``."""

    stream: Any

    def time_ms(self, enqueue: Callable[[], None]) -> float: ...


class HostClock:
    """For builds without a GPU: the work is done when the call returns."""

    stream = None

    def time_ms(self, enqueue: Callable[[], None]) -> float:
        started = time.perf_counter()
        enqueue()
        return (time.perf_counter() - started) * 1e3


class CudaClock:
    """Events around the work, on a non-blocking stream of its own. Before each run the L2 cache is overwritten."""

    def __init__(self) -> None:
        import cupy

        from ..backend.cupy_backend import transfer_stream

        self.stream = transfer_stream()
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        l2_bytes = cupy.cuda.Device().attributes["L2CacheSize"]
        self._evict = cupy.empty(2 * l2_bytes, dtype="uint8")
        self._elapsed = cupy.cuda.get_elapsed_time

    def time_ms(self, enqueue: Callable[[], None]) -> float:
        with self.stream:
            self._evict.fill(0)  # also hides the latency of the first launch
        self._start.record(self.stream)
        enqueue()
        self._end.record(self.stream)
        self._end.synchronize()
        return float(self._elapsed(self._start, self._end))


def measure(clock: Clock, enqueue: Callable[[], None], *, warmups: int, repeats: int) -> Timing:
    """Median and spread of ``repeats`` runs after ``warmups``."""
    for _ in range(warmups):
        clock.time_ms(enqueue)
    host: list[float] = []

    def counted() -> None:
        started = time.perf_counter()
        enqueue()
        host.append((time.perf_counter() - started) * 1e6)

    times = sorted(clock.time_ms(counted) for _ in range(repeats))
    last = len(times) - 1
    return Timing(
        statistics.median(times),
        times[round(0.1 * last)],
        times[round(0.9 * last)],
        statistics.median(host),
        repeats,
    )
