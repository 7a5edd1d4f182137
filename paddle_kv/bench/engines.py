"""Rates of the transfer engines through LayerwiseScheduler, alone and beside matrix products, from its own events.

Beside a load, the rate counts the layers that were copied while the load ran.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..backend import transfer_queue
from ..layout import KVCacheSpec
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from . import methods
from .clock import CudaClock, measure
from .load import ComputeLoad, beside
from .setup import Way, in_one_piece, make_case

LAYERS, HEAD_DIM, ITEM_BYTES = 16, 128, 2
TARGET_BYTES = 512 << 20  # of one transfer
SAMPLES = 64  # blocks whose bytes are checked
WAIT_S = 60.0
COLUMNS = (
    "piece_kib",
    "pattern",
    "way",
    "load",
    "method",
    "gbps",
    "of_link_percent",
    "slowed_percent",
    "noise_percent",
)
Row = dict[str, Any]


class EngineCase:
    """Blocks of one size, K and V, in 16 layers; the same ids for all engines."""

    def __init__(self, piece_bytes: int, pattern: str, loads: dict[str, ComputeLoad], repeats: int) -> None:
        self.piece_bytes, self.pattern, self.loads, self.repeats = piece_bytes, pattern, loads, repeats
        tokens = piece_bytes // (HEAD_DIM * ITEM_BYTES)
        spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=HEAD_DIM, block_size=tokens, dtype="bfloat16")
        blocks = TARGET_BYTES // (spec.block_bytes * LAYERS)
        self.case = make_case(spec, pattern, "h2d", blocks, pinned=True, seed=1)  # type: ignore[arg-type]
        assert self.case.device_cache is not None and self.case.host_pool is not None
        self.cache, self.pool = self.case.device_cache, self.case.host_pool
        self.bytes = self.case.total_bytes
        assert self.cache.device_id is not None
        self.device_id = self.cache.device_id

    def scheduler(self, engine: str) -> LayerwiseScheduler:
        import cupy

        return LayerwiseScheduler(
            self.cache,
            self.pool,
            engine=engine,
            record_layer_times=True,
            compute_stream=cupy.cuda.Stream(non_blocking=True),
        )

    def submit(self, scheduler: LayerwiseScheduler, way: str) -> Transfer:
        if way == "h2d":
            return scheduler.onload(self.case.host_ids, self.case.device_ids)
        return scheduler.offload(self.case.device_ids, self.case.host_ids)

    def check(self, scheduler: LayerwiseScheduler) -> None:
        """Loads known bytes, wipes the host and saves them again. Raises AssertionError."""
        random = np.random.default_rng(3)
        views = self._sample()
        for view in views:
            view[...] = random.integers(0, 256, view.shape, np.uint8)
        before = [view.copy() for view in views]
        self.submit(scheduler, "h2d").wait(WAIT_S)
        for view in views:
            view[...] = 0
        self.submit(scheduler, "d2h").wait(WAIT_S)
        for got, want in zip(views, before, strict=True):
            np.testing.assert_array_equal(got, want)

    def _sample(self) -> list[np.ndarray]:
        some = self.case.host_ids[:: max(1, len(self.case.host_ids) // SAMPLES)]
        return [
            self.pool.view(name, layer, host_id).view(np.uint8)
            for layer in (0, LAYERS - 1)
            for name in self.pool.spec.tensor_names
            for host_id in some
        ]

    def alone(self, scheduler: LayerwiseScheduler, way: str) -> tuple[float, float]:
        """(GB/s, noise in percent) with nothing else running."""
        times = []
        for _ in range(self.repeats + 1):
            transfer = self.submit(scheduler, way)
            transfer.wait(WAIT_S)
            times.append(transfer.elapsed_ms)
        times = sorted(times[1:])
        median = statistics.median(times)
        return self.bytes / median / 1e6, 50 * (times[-1] - times[0]) / median

    def beside(self, scheduler: LayerwiseScheduler, way: str, load_name: str) -> tuple[float, float]:
        """(GB/s while the load ran, percent by which the load was slowed)."""
        import cupy

        load, elapsed = self.loads[load_name], cupy.cuda.runtime.eventElapsedTime
        rates, slowed = [], []
        past = cupy.cuda.Event()
        past.record(load.stream)
        self.submit(scheduler, way).wait(WAIT_S)
        for _ in range(self.repeats):
            alone_ms = load.alone_ms()
            count = max(2, round(2.5 * alone_ms * 55e6 / self.bytes))  # they outlast the load
            load.start()
            # The stream of the model waits for a layer now and then: so the library knows that it is busy.
            transfer_queue.wait_stream(self.device_id, load.stream.ptr, past.ptr, None)
            transfers = [self.submit(scheduler, way) for _ in range(count)]
            while not load.span[1].done:
                transfer_queue.wait_stream(self.device_id, load.stream.ptr, past.ptr, None)
                time.sleep(0.002)
            load_ms = load.wait_ms()
            for transfer in transfers:
                transfer.wait(WAIT_S)
            started, ended = (elapsed(scheduler.origin_event, event.ptr) for event in load.span)
            times = list(itertools.chain.from_iterable(transfer.layer_times_ms for transfer in transfers))
            inside = [(begin, end) for begin, end in times if begin >= started and end <= ended]
            copied = len(inside) * self.bytes / LAYERS
            rates.append(copied / (inside[-1][1] - inside[0][0]) / 1e6 if inside else 0.0)
            slowed.append(100 * (load_ms / alone_ms - 1))
        return statistics.median(rates), statistics.median(slowed)


def both_ways(piece_bytes: int, engine: str, repeats: int) -> tuple[float, float]:
    """GB/s of loads and saves together while both run: (two contiguous copies, the engine)."""
    import cupy

    first, second = (EngineCase(piece_bytes, "scattered", {}, repeats) for _ in range(2))
    with first.scheduler(engine) as loader, second.scheduler(engine) as saver:
        rates = []
        for _ in range(repeats + 1):
            transfers = [first.submit(loader, "h2d") for _ in range(4)] + [
                second.submit(saver, "d2h") for _ in range(4)
            ]
            for transfer in transfers:
                transfer.wait(WAIT_S)
            between = cupy.cuda.runtime.eventElapsedTime(loader.origin_event, saver.origin_event)
            loads = [time for transfer in transfers[:4] for time in transfer.layer_times_ms]
            saves = [(b + between, e + between) for transfer in transfers[4:] for b, e in transfer.layer_times_ms]
            rates.append(_rate_while_both(loads, saves, first.bytes / LAYERS))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    ways: tuple[Way, Way] = ("h2d", "d2h")
    copies = [
        methods.contiguous(in_one_piece(case.case, way), way, stream)
        for case, way, stream in zip((first, second), ways, streams, strict=True)
    ]
    link = []
    for _ in range(repeats + 1):
        marks = [[stream.record()] for stream in streams]
        for _ in range(4):
            for copy, stream, events in zip(copies, streams, marks, strict=True):
                copy()
                events.append(stream.record())
        for stream in streams:
            stream.synchronize()
        ends = [[cupy.cuda.get_elapsed_time(marks[0][0], event) for event in events[1:]] for events in marks]
        spans = [list(itertools.pairwise([0.0, *times])) for times in ends]
        link.append(_rate_while_both(spans[0], spans[1], first.bytes))
    first.case.close()
    second.case.close()
    return statistics.median(link[1:]), statistics.median(rates[1:])


def _rate_while_both(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], size: float) -> float:
    """Pieces of equal size with their times: the rate while both sides were at work, parts of pieces counted."""
    begin, end = max(one[0][0], other[0][0]), min(one[-1][1], other[-1][1])
    moved = sum(size * max(0.0, min(e, end) - max(b, begin)) / (e - b) for b, e in (*one, *other) if e > b)
    return moved / (end - begin) / 1e6


def rows(
    sizes_kib: Sequence[int],
    patterns: Sequence[str],
    engines: Sequence[str],
    loads: dict[str, ComputeLoad],
    *,
    repeats: int,
    plain: bool = False,
) -> Iterator[Row]:
    """Everything measured, each case beside one contiguous copy of the same bytes in the same run. ``plain``: also one
    cudaMemcpyAsync a block, and a kernel with one warp a block and 8-byte words over a full grid."""
    clock = CudaClock()
    for pattern, size in itertools.product(patterns, sizes_kib):
        measured = EngineCase(size << 10, pattern, loads, repeats)
        link: dict[str, float] = {}

        def row(way: str, load: str, method: str, gbps: float, **more: float) -> Row:
            percent = 100 * gbps / link.setdefault(way, gbps)  # noqa: B023  used in this turn only
            common = {"piece_kib": size, "pattern": pattern, "way": way, "load": load, "method": method}  # noqa: B023
            return {**common, "gbps": round(gbps, 1), "of_link_percent": round(percent), **more}

        way: Way
        for way in ("h2d", "d2h"):
            whole = methods.contiguous(in_one_piece(measured.case, way), way, clock.stream)
            timing = measure(clock, whole, warmups=1, repeats=repeats)
            yield row(way, "none", "contiguous", measured.bytes / timing.median_ms / 1e6)
            for name in ("memcpy_loop", "full_grid_warps") if plain else ():
                enqueue = methods.METHODS[name](measured.case, way, clock.stream)
                assert enqueue is not None
                timing = measure(clock, enqueue, warmups=1, repeats=3)
                yield row(way, "none", name, measured.bytes / timing.median_ms / 1e6)
                for load_name, load in loads.items():
                    ms, slowed = beside(load, enqueue, clock.stream, timing.median_ms)
                    yield row(way, load_name, name, measured.bytes / ms / 1e6, slowed_percent=round(slowed, 1))
        for engine in engines:
            with measured.scheduler(engine) as scheduler:
                measured.check(scheduler)
                for way in ("h2d", "d2h"):
                    gbps, noise = measured.alone(scheduler, way)
                    yield row(way, "none", engine, gbps, noise_percent=round(noise))
                    for load_name in loads:
                        gbps, slowed = measured.beside(scheduler, way, load_name)
                        yield row(way, load_name, engine, gbps, slowed_percent=round(slowed, 1))
        measured.case.close()
