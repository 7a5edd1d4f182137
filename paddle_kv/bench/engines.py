"""Rates of the transfer engines through LayerwiseScheduler, alone and beside matrix products, from its own events.

Beside a load, the rate counts the layers that were copied while the load ran. The load is measured in turn without
anything, with one contiguous copy of the same bytes after the other, and with the transfers: what products take by
themselves moves by several percent where they fill the power limit.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import transfer_queue
from ..layout import KVCacheSpec
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from . import methods
from .clock import CudaClock, measure
from .load import ComputeLoad, beside
from .setup import Case, Pattern, Way, in_one_piece, make_case

LAYERS, HEAD_DIM, ITEM_BYTES = 16, 128, 2
TARGET_BYTES = 512 << 20  # of one transfer
SAMPLES = 64  # blocks whose bytes are checked
IN_FLIGHT = 2  # transfers beside a load: the next one is there when one ends
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
    "slowed_least",
    "slowed_most",
    "contiguous_gbps",
    "contiguous_slowed_percent",
    "noise_percent",
)
Row = dict[str, Any]


class EngineCase:
    """Blocks of one size, K and V, in 16 layers; the same ids for all engines. ``run_blocks``: so many blocks that
    follow each other on the host, wherever they are on the device."""

    def __init__(self, piece_bytes: int, pattern: Pattern, run_blocks: int = 1) -> None:
        tokens = piece_bytes // (HEAD_DIM * ITEM_BYTES)
        spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=HEAD_DIM, block_size=tokens, dtype="bfloat16")
        blocks = TARGET_BYTES // (spec.block_bytes * LAYERS)
        self.case = make_case(spec, pattern, "h2d", blocks, pinned=True, seed=1)
        if run_blocks > 1:
            runs = np.random.default_rng(2).permutation(blocks // run_blocks)[:, None] * run_blocks
            self.case.host_ids = (runs + np.arange(run_blocks)).ravel().tolist()
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

    def alone(self, scheduler: LayerwiseScheduler, way: str, repeats: int) -> tuple[float, float]:
        """(GB/s, noise in percent) with nothing else running."""
        times = []
        for _ in range(repeats + 1):
            transfer = self.submit(scheduler, way)
            transfer.wait(WAIT_S)
            times.append(transfer.elapsed_ms)
        times = sorted(times[1:])
        median = statistics.median(times)
        return self.bytes / median / 1e6, 50 * (times[-1] - times[0]) / median

    def while_it_runs(self, scheduler: LayerwiseScheduler, way: str, load: ComputeLoad) -> float:
        """GB/s of transfers while the load ran, which this starts."""
        import cupy

        past = cupy.cuda.Event()
        past.record(load.stream)
        load.start()
        transfers: list[Transfer] = []
        while not (transfers and load.span[1].done):
            # The stream of the model waits for a layer now and then: so the library knows that it is busy.
            transfer_queue.wait_stream(self.device_id, load.stream.ptr, past.ptr, None)
            if len(transfers) < IN_FLIGHT or transfers[-IN_FLIGHT].done():
                transfers.append(self.submit(scheduler, way))
            else:
                time.sleep(0.0005)
        for transfer in transfers:
            transfer.wait(WAIT_S)
        elapsed = cupy.cuda.runtime.eventElapsedTime
        started, ended = (float(elapsed(scheduler.origin_event, event.ptr)) for event in load.span)
        times = list(itertools.chain.from_iterable(transfer.layer_times_ms for transfer in transfers))
        began = max(started, times[0][0])
        return _moved(times, self.bytes / LAYERS, began, ended) / (ended - began) / 1e6


class Link:
    """Contiguous copies of as many bytes as one transfer has."""

    def __init__(self, case: Case, repeats: int) -> None:
        ways: tuple[Way, Way] = ("h2d", "d2h")
        self._clock = CudaClock()
        self._bytes = case.total_bytes
        self._copies: dict[str, methods.Enqueue] = {
            way: methods.contiguous(in_one_piece(case, way), way, self._clock.stream) for way in ways
        }
        timings = {way: measure(self._clock, copy, warmups=1, repeats=repeats) for way, copy in self._copies.items()}
        self.gbps: dict[str, float] = {way: self._bytes / timing.median_ms / 1e6 for way, timing in timings.items()}

    def beside(self, load: ComputeLoad, way: str, load_ms: float) -> float:
        """GB/s of copies while the load ran, which this starts."""
        import cupy

        copy, stream, elapsed = self._copies[way], self._clock.stream, cupy.cuda.get_elapsed_time
        load.start()
        marks = [stream.record()]
        for _ in range(max(2, round(2.4 * load_ms * self.gbps[way] * 1e6 / self._bytes))):
            copy()
            marks.append(stream.record())
        stream.synchronize()
        load.wait_ms()
        done = [mark for mark in marks[1:] if elapsed(mark, load.span[1]) >= 0] or marks[1:2]
        return len(done) * self._bytes / float(elapsed(marks[0], done[-1])) / 1e6


def beside_load(
    measured: EngineCase, scheduler: LayerwiseScheduler, way: str, load: ComputeLoad, link: Link, repeats: int
) -> Row:
    """Rates and slowdowns, the load without, with contiguous copies and with the transfers in turn."""
    measured.submit(scheduler, way).wait(WAIT_S)
    load.alone_ms()
    rates, slowed, contiguous, slowed_by_contiguous = [], [], [], []
    for _ in range(repeats):
        load.start()
        without_ms = load.wait_ms()
        contiguous.append(link.beside(load, way, without_ms))
        slowed_by_contiguous.append(100 * (load.wait_ms() / without_ms - 1))
        rates.append(measured.while_it_runs(scheduler, way, load))
        slowed.append(100 * (load.wait_ms() / without_ms - 1))
    return {
        "gbps": statistics.median(rates),
        "slowed_percent": round(statistics.median(slowed), 1),
        "slowed_least": round(min(slowed), 1),
        "slowed_most": round(max(slowed), 1),
        "contiguous_gbps": round(statistics.median(contiguous), 1),
        "contiguous_slowed_percent": round(statistics.median(slowed_by_contiguous), 1),
    }


def both_ways(piece_bytes: int, engine: str, repeats: int) -> tuple[float, float]:
    """GB/s of loads and saves together while both run: (two contiguous copies, the engine)."""
    import cupy

    first, second = (EngineCase(piece_bytes, "scattered") for _ in range(2))
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
    return _moved([*one, *other], size, begin, end) / (end - begin) / 1e6


def _moved(times: Sequence[tuple[float, float]], size: float, begin: float, end: float) -> float:
    """Of layers of equal size, each with its times, what was moved in between: of those that were under way at its
    begin or end the part of their time. Layers that arrive together have the same times, or one behind the other: those
    of a band, which the first one's times stand for, were all under way then."""
    shortest = sum(e - b for b, e in times) / len(times) / 10
    pieces: list[tuple[float, float, int]] = []  # with the number of layers
    for b, e in times:
        if pieces and e - b < shortest and b == pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], e, pieces[-1][2] + 1)
        else:
            pieces.append((b, e, 1))
    whole = sum(n for b, e, n in pieces if begin <= b and e <= end)
    parts = (piece for piece in pieces if piece[0] < piece[1] and not (begin <= piece[0] and piece[1] <= end))
    return size * (whole + sum(n * max(0.0, min(e, end) - max(b, begin)) / (e - b) for b, e, n in parts))


def rows(
    sizes_kib: Sequence[int],
    patterns: Sequence[Pattern],
    engines: Sequence[str],
    loads: Mapping[str, ComputeLoad],
    *,
    repeats: int,
    plain: bool = False,
) -> Iterator[Row]:
    """Everything measured, each case beside contiguous copies of the same bytes in the same run. ``plain``: also one
    cudaMemcpyAsync a block, and a kernel with one warp a block and 8-byte words over a full grid."""
    link: Link | None = None
    for pattern, size in itertools.product(patterns, sizes_kib):
        measured = EngineCase(size << 10, pattern)
        common = {"piece_kib": size, "pattern": pattern}
        link = link or Link(measured.case, repeats)
        for way, gbps in link.gbps.items():
            yield _row(common, way, "none", "contiguous", link, {"gbps": gbps})
        if plain:
            yield from _plain_rows(measured, common, loads, link, repeats)
        yield from engine_rows(measured, common, engines, loads, link, repeats)
        measured.case.close()


def engine_rows(
    measured: EngineCase,
    common: Row,
    engines: Sequence[str],
    loads: Mapping[str, ComputeLoad],
    link: Link,
    repeats: int,
) -> Iterator[Row]:
    """Of each engine on one case, alone and beside each load; the bytes are checked first."""
    for engine in engines:
        with measured.scheduler(engine) as scheduler:
            measured.check(scheduler)
            for way in ("h2d", "d2h"):
                gbps, noise = measured.alone(scheduler, way, repeats)
                yield _row(common, way, "none", engine, link, {"gbps": gbps, "noise_percent": round(noise)})
                for name, load in loads.items():
                    of_load = beside_load(measured, scheduler, way, load, link, repeats)
                    yield _row(common, way, name, engine, link, of_load)


def _plain_rows(
    measured: EngineCase, common: Row, loads: Mapping[str, ComputeLoad], link: Link, repeats: int
) -> Iterator[Row]:
    clock = CudaClock()
    ways: tuple[Way, Way] = ("h2d", "d2h")
    for way, name in itertools.product(ways, ("memcpy_loop", "full_grid_warps")):
        enqueue = methods.METHODS[name](measured.case, way, clock.stream)
        assert enqueue is not None
        timing = measure(clock, enqueue, warmups=1, repeats=min(3, repeats))
        yield _row(common, way, "none", name, link, {"gbps": measured.bytes / timing.median_ms / 1e6})
        for load_name, load in loads.items():
            ms, slowed = beside(load, enqueue, clock.stream, timing.median_ms)
            of_load = {"gbps": measured.bytes / ms / 1e6, "slowed_percent": round(slowed, 1)}
            yield _row(common, way, load_name, name, link, of_load)


def _row(common: Row, way: str, load: str, method: str, link: Link, more: Row) -> Row:
    gbps = more["gbps"]
    row = {**common, "way": way, "load": load, "method": method, **more}
    return {**row, "gbps": round(gbps, 1), "of_link_percent": round(100 * gbps / link.gbps[way])}
