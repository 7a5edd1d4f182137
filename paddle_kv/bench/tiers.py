"""How fast a tier stores and loads, beside bare calls of the system or the store, and beside fio, in one run."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import TierError
from ..layout import KVCacheSpec
from ..memory import HostPool
from ..memory.host_rows import block_rows
from ..tiers import FilesEngine, Job, Outcome, Tier
from ..tiers.mooncake import MooncakeEngine
from ..tiers.root import BATCH_BYTES, MOST_BATCHED

NUM_LAYERS = 32
HEADER_BYTES = 4096
WAIT_S = 300.0


@dataclass(frozen=True)
class Case:
    """What is measured."""

    folder: Path | None  # None: a Mooncake Store
    num_objects: int
    object_bytes: int  # without the header
    threads: int
    repeats: int
    master: str = ""  # of a Mooncake Store

    @property
    def total_bytes(self) -> int:
        return self.num_objects * self.object_bytes


@dataclass(frozen=True)
class Row:
    """Medians of the repeats."""

    what: str
    mib_per_s: float
    cpu_s_per_gib: float | None = None
    first_layer: float | None = None  # share of the time after which layer 0 was usable


class Watch:
    """Hears of one job: when its first layer was there, and when it was over."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.end = threading.Event()

    def layers_arrived(self, job: Job, layers: range) -> None:
        if 0 in layers:
            self.first_s = time.perf_counter()

    def settled(self, job: Job) -> None:
        pass

    def over(self, job: Job) -> None:
        self.end.set()


def measure(case: Case, progress: Callable[[int, int, str], object]) -> list[Row]:
    """Each round runs every way once; the first round does not count."""
    pool = HostPool(spec_of(case.object_bytes), case.num_objects, layout="block_first", room_bytes=HEADER_BYTES)
    rows = block_rows(pool)
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)
    capacity = case.num_objects * (case.object_bytes + HEADER_BYTES)
    found: dict[str, list[tuple[float, float | None, float | None]]] = {}
    engine = _engine(case, capacity)
    with (
        frozen(),
        engine,
        Tier(engine, pool, model=b"bench", max_objects=case.num_objects, max_store_bytes=2 * capacity) as tier,
    ):
        for number in range(case.repeats + 1):
            progress(number, case.repeats + 1, "measuring")
            for what, result in (*_tier_round(case, tier, number), *_other_rounds(case, engine, rows)):
                if number:
                    found.setdefault(what, []).append(result)
    pool.close()
    return [
        Row(what, *(statistics.median(one) if None not in one else None for one in zip(*results, strict=True)))  # type: ignore[arg-type]
        for what, results in found.items()
    ]


def _engine(case: Case, capacity: int) -> FilesEngine | MooncakeEngine:
    if case.folder is None:
        return MooncakeEngine(case.master, prefix=f"paddle_kv-bench-{os.getpid()}/", threads=case.threads)
    case.folder.mkdir(parents=True, exist_ok=True)
    return FilesEngine({case.folder / "tier": capacity}, threads_per_root=case.threads)


def _other_rounds(case: Case, engine: FilesEngine | MooncakeEngine, rows: np.ndarray) -> Iterator[Result]:
    if isinstance(engine, MooncakeEngine):
        return _bare_store_round(case, engine, rows)
    assert case.folder is not None
    return itertools.chain(_bare_round(case, case.folder, rows), _fio_round(case, case.folder))


def _bare_store_round(case: Case, engine: MooncakeEngine, rows: np.ndarray) -> Iterator[Result]:
    """The same bytes in one call, without headers or checksums."""
    names = [f"{engine.prefix}bare-{i}" for i in range(case.num_objects)]
    starts, sizes = [int(row.ctypes.data) for row in rows], [case.object_bytes] * case.num_objects
    for what, call, wanted in (
        ("batch_put_from", engine.store.batch_put_from, 0),
        ("batch_get_into", engine.store.batch_get_into, case.object_bytes),
    ):
        codes: list[int] = []
        rate, cpu, _ = _timed(case, lambda call=call, codes=codes: codes.extend(call(names, starts, sizes)))  # type: ignore[misc]
        if set(codes) != {wanted}:
            raise TierError(f"{what}: {set(codes) - {wanted}}; {_needs(case)}")
        yield what, (rate, cpu, None)
    engine.store.batch_remove(names, True)


def spec_of(object_bytes: int) -> KVCacheSpec:
    """Of blocks of so many bytes, in 32 layers."""
    width = object_bytes // NUM_LAYERS // 2
    if width * 2 * NUM_LAYERS != object_bytes or not width:
        raise ValueError(f"an object of {object_bytes} bytes must be a multiple of {2 * NUM_LAYERS}")
    return KVCacheSpec(num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=width, block_size=1, dtype="int8")


Result = tuple[str, tuple[float, float | None, float | None]]


def _timed(case: Case, run: Callable[[], object]) -> tuple[float, float, float]:
    """MiB/s, seconds of processor for a GiB, and when it began."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    run()
    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return case.total_bytes / 2**20 / took_s, cpu_s / (case.total_bytes / 2**30), start_s


def _tier_round(case: Case, tier: Tier, number: int) -> Iterator[Result]:
    keys = [b"%d-%d" % (number, i) for i in range(case.num_objects)]
    for what, start, layerwise in (
        ("tier store", tier.store, False),
        ("tier load", tier.load, False),
        ("tier load, layer by layer", tier.load, True),
    ):
        watch = Watch()
        job = Job(keys, range(case.num_objects), timeout_s=WAIT_S, layerwise=layerwise, observer=watch)

        def run(start: Callable[[list[Job]], None] = start, job: Job = job, watch: Watch = watch) -> None:
            start([job])
            watch.end.wait(WAIT_S)

        rate, cpu, start_s = _timed(case, run)
        _check(what, job, case)
        took_s = case.total_bytes / 2**20 / rate
        yield what, (rate, cpu, (watch.first_s - start_s) / took_s if layerwise else None)
    if case.folder is None:
        tier.delete(keys)


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """As in a server that calls gc.freeze(): to look at all of Paddle takes as long as a fifth of a round."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(what: str, job: Job, case: Case) -> None:
    ends = Counter(outcome.value for outcome in job.outcomes if outcome not in (None, Outcome.DONE))
    if ends:
        told = ", ".join(f"{count} {end}" for end, count in ends.items())
        raise TierError(f"{what}: of {len(job.keys)} objects {told}; {_needs(case)}")


def _needs(case: Case) -> str:
    if case.folder is not None:
        return f"is there room in {case.folder}?"
    return f"has the store of {case.master} a node, with room for {2 * case.total_bytes} bytes?"


def _bare_round(case: Case, inside: Path, rows: np.ndarray) -> Iterator[Result]:
    """The same calls of the system with nothing around them: header and block of neighbours, in one file."""
    header = memoryview(mmap.mmap(-1, HEADER_BYTES))
    descriptor = os.open(inside / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    batch = max(1, min(BATCH_BYTES // (case.object_bytes + HEADER_BYTES), MOST_BATCHED))
    for what, call in (("bare calls, store", os.pwritev), ("bare calls, load", os.preadv)):

        def run(call: Callable[[int, list[memoryview], int], int] = call) -> None:
            def part(number: int) -> None:
                for first in range(number * batch, case.num_objects, case.threads * batch):
                    buffers = [one for row in rows[first : first + batch] for one in (header, memoryview(row))]
                    call(descriptor, buffers, first * (case.object_bytes + HEADER_BYTES))

            threads = [threading.Thread(target=part, args=[number]) for number in range(case.threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        rate, cpu, _ = _timed(case, run)
        yield what, (rate, cpu, None)
    os.close(descriptor)


def _fio_round(case: Case, inside: Path) -> Iterator[Result]:
    fio = shutil.which("fio")
    folder = inside / "fio"
    folder.mkdir(exist_ok=True)
    for way in ("write", "read") if fio else ():
        for engine, jobs, depth in (("psync", case.threads, 1), ("libaio", 1, 16)):
            command = f"{fio} --name=kv --directory={folder} --ioengine={engine} --iodepth={depth} --numjobs={jobs}"
            command += f" --thread --direct=1 --rw={way} --bs={case.object_bytes} --filesize={case.object_bytes}"
            command += f" --nrfiles={case.num_objects // jobs} --openfiles=64 --file_service_type=sequential"
            command += " --filename_format=$jobname.$jobnum.$filenum --group_reporting --output-format=json"
            ran = subprocess.run(command.split(), capture_output=True, text=True, check=True, timeout=WAIT_S)
            told = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][way]
            yield f"fio {engine}, {way}", (told["io_bytes"] / 2**20 / (told["runtime"] / 1000), None, None)
