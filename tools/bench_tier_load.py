"""Loads from a tier to the GPU beside a model of products: python tools/bench_tier_load.py FOLDER, or --neighbour

For each load of the model (how long its products take beside what the tier delivers) five ways are measured in turn:
computing alone, tier to host memory alone, host memory to the device alone, tier to the device alone, and tier to the
device layer by layer beside the model. The bar is 1.10 x the longest of computing, tier and link, plus one layer. What
each layer has seen is compared in each run beside the model, and all bytes on the device at the end.

The tier is files in FOLDER, or the host memory of another process. Files that the system has just written lie in its
page cache; on a file system with direct I/O they come from the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import multiprocessing
import statistics
import sys
import tempfile
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import cupy
import numpy as np
from gpu_pipeline import Model, device_words

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Transfer
from paddle_kv.bench.load import WORKSPACE_BYTES, Product
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.tiers import Engine, FilesEngine, Job, Tier, load
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine

WAIT_S = 120.0
MODEL = b"bench"
BAR = 1.10


@dataclass(frozen=True)
class Row:
    """Medians. ``slowed``: how much longer the layers of the model took beside the load, without their waits."""

    products: int
    object_bytes: int
    total_bytes: int
    compute_ms: float
    tier_ms: float
    link_ms: float
    tier_to_device_ms: float
    together_ms: float
    together_ms_most: float
    bar_ms: float
    slowed: float


def keys_of(num_blocks: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(num_blocks)]


def content(spec: KVCacheSpec, row: int) -> np.ndarray:
    """Of the block of a key."""
    return np.random.default_rng(row).integers(0, 256, object_bytes(spec), np.uint8)


def object_bytes(spec: KVCacheSpec) -> int:
    return spec.num_layers * spec.block_bytes


def lend(pipe: Connection, spec: KVCacheSpec, num_blocks: int) -> None:
    """The other process, until its pipe ends. Half of its pool at most can be read at a time."""
    pool = HostPool(spec, 2 * num_blocks, layout="block_first", shared=True)
    rows = block_rows(pool)
    for row in range(num_blocks):
        rows[row] = content(spec, row)
    with Lender(pool, model=MODEL) as lender, contextlib.suppress(EOFError):
        lender.lend(keys_of(num_blocks), range(num_blocks))
        pipe.send(lender.path)
        pipe.recv()


@contextlib.contextmanager
def neighbour(spec: KVCacheSpec, num_blocks: int, threads: int) -> Iterator[NeighbourEngine]:
    pipe, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=lend, args=(there, spec, num_blocks), daemon=True)
    other.start()
    there.close()
    with contextlib.closing(NeighbourEngine([pipe.recv()], threads=threads)) as engine:
        yield engine
    pipe.close()
    other.join(WAIT_S)


@contextlib.contextmanager
def files(spec: KVCacheSpec, num_blocks: int, options: argparse.Namespace) -> Iterator[FilesEngine]:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as inside:
        capacity = 2 * num_blocks * object_bytes(spec) + (1 << 30)
        with contextlib.closing(FilesEngine({inside: capacity}, threads_per_root=options.threads)) as engine:
            yield engine


class Replayed(Model):
    """Its products are one launch a layer, as a server's are that replays graphs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._graph: Any = None

    def _multiply(self, stream: cupy.cuda.Stream) -> None:
        if self._graph is None:
            self._workspace = cupy.empty(WORKSPACE_BYTES, "uint8")
            product = Product(stream, self._workspace)
            product(self._hidden, self._up, self._wide)  # kernels are loaded before they are captured
            stream.synchronize()
            stream.begin_capture()
            for _ in range(self._products):
                product(self._hidden, self._up, self._wide)
                product(self._wide, self._down, self._result)
            self._graph = stream.end_capture()
        self._graph.launch(stream)


class Bench:
    """Pool and cache are overwritten before each run: nothing stands there from the one before."""

    def __init__(self, options: argparse.Namespace, spec: KVCacheSpec, engine: Engine) -> None:
        """An engine that has no objects yet stores them."""
        self.spec, self.engine = spec, engine
        blocks = options.prefix // options.block_size
        random = np.random.default_rng(5)
        self.host_ids, self.device_ids = (random.permutation(blocks + 1)[:blocks].tolist() for _ in range(2))
        fresh = sorted(set(range(blocks + 1)) - set(self.device_ids))
        self.keys = keys_of(blocks)
        self.device = DeviceCache(self.spec, blocks + 1, "gpu:0")
        self.pool = HostPool(self.spec, blocks + 1, layout="block_first")
        for row, block_id in enumerate(self.host_ids):
            block_rows(self.pool)[block_id] = content(spec, row)
        self.expected = {
            (name, layer): np.stack([self.pool.view(name, layer, block_id) for block_id in self.host_ids])
            for name in self.spec.tensor_names
            for layer in range(options.layers)
        }
        self.sums = [
            [int(self.expected[name, layer].view(np.uint16).sum(dtype=np.uint64)) for name in self.spec.tensor_names]
            for layer in range(options.layers)
        ]
        self.tier = Tier(engine, self.pool, model=MODEL, max_store_bytes=2 * blocks * object_bytes(spec))
        if not options.neighbour:
            self.tier.store([Job(self.keys, self.host_ids, timeout_s=WAIT_S)])
            self.tier.drain(WAIT_S)
        end_s = time.monotonic() + WAIT_S
        while not all(self.tier.exists(self.keys)):
            assert time.monotonic() < end_s, "the tier has not all blocks"
            time.sleep(0.01)
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.scheduler = LayerwiseScheduler(self.device, self.pool, compute_stream=self.compute)
        self._model_of = functools.partial(Replayed if options.graphs else Model, self.device, self.device_ids, fresh)
        self.model = self._model_of(options)

    def use_model(self, options: argparse.Namespace) -> None:
        self.model = self._model_of(options)

    def computing(self) -> tuple[float, float]:
        """How long it takes, and the layers of it."""
        return self._beside(None)

    def from_tier(self) -> float:
        self._empty()
        began_s = time.perf_counter()
        job = Job(self.keys, self.host_ids, timeout_s=WAIT_S, layerwise=True)
        self.tier.load([job])
        self.tier.drain(WAIT_S)
        taken_s = time.perf_counter() - began_s
        assert job.done, job.outcomes
        return taken_s * 1e3

    def link(self) -> float:
        began_s = time.perf_counter()
        self.scheduler.onload(self.host_ids, self.device_ids).wait(WAIT_S)
        return (time.perf_counter() - began_s) * 1e3

    def tier_to_device(self) -> float:
        self._empty()
        began_s = time.perf_counter()
        self._load().wait(WAIT_S)
        return (time.perf_counter() - began_s) * 1e3

    def together(self) -> tuple[float, float]:
        """How long it took, and the layers of the model in it, without their waits."""
        self._empty()
        taken = self._beside(self._load)
        assert self.model.seen.get().tolist() == self.sums, "a layer has not seen all of its prefix"
        return taken

    def _load(self) -> Transfer:
        return load(self.tier, self.scheduler, self.keys, self.host_ids, self.device_ids, timeout_s=WAIT_S)[0]

    def _beside(self, start: Callable[[], Transfer] | None) -> tuple[float, float]:
        around = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(self.spec.num_layers)]
        self.compute.synchronize()
        began_s = time.perf_counter()
        transfer = start() if start else None
        for layer, (before, after) in enumerate(around):
            if transfer:
                transfer.wait_layer(layer, stream=self.compute, timeout_s=WAIT_S)
            before.record(self.compute)
            self.model.layer(layer, self.compute)
            after.record(self.compute)
        self.compute.synchronize()
        taken_ms = (time.perf_counter() - began_s) * 1e3
        if transfer:
            transfer.wait(WAIT_S)
        return taken_ms, sum(cupy.cuda.get_elapsed_time(*pair) for pair in around)

    def _empty(self) -> None:
        block_rows(self.pool)[:] = 0xDE
        with self.compute:
            for name, layer in self.expected:
                device_words(self.device.tensor(name, layer))[...] = 0xDEDE
            self.model.seen.fill(0)
        self.compute.synchronize()

    def check(self) -> None:
        for (name, layer), expected in self.expected.items():
            found = device_words(self.device.tensor(name, layer))[cupy.array(self.device_ids)].get()
            assert found.tobytes() == expected.tobytes(), f"{name} of layer {layer} is wrong"

    def close(self) -> None:
        self.scheduler.close(WAIT_S)
        self.tier.close(WAIT_S)
        self.pool.close()


def measure(bench: Bench, options: argparse.Namespace, products: int) -> Row:
    options.products = products
    bench.use_model(options)
    ways = (bench.from_tier, bench.link, bench.tier_to_device)
    rounds: list[list[float]] = []
    for _ in range(1 + options.repetitions):  # the first one warms up
        rounds.append([*bench.computing(), *bench.together(), *(way() for way in ways)])
    bench.check()
    columns = list(zip(*rounds[1:], strict=True))
    alone, of_layers, together, beside, tier, link, through = map(statistics.median, columns)
    total = len(bench.keys) * options.layers * bench.spec.block_bytes
    bar = BAR * max(alone, tier, link) + max(alone, tier, link) / options.layers
    return Row(
        products, total // len(bench.keys), total, alone, tier, link, through, together, max(columns[2]), bar,
        beside / of_layers - 1,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--neighbour", action="store_true", help="no files: the host memory of another process")
    parser.add_argument("--products", type=int, nargs="+", default=[1, 2, 4, 8], help="pairs a layer, one model each")
    parser.add_argument("--graphs", action="store_true", help="the products of a layer are launched as one graph")
    parser.add_argument("--threads", type=int, default=8, help="of the engine")
    parser.add_argument("--prefix", type=int, default=16384, help="tokens that come back")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a block")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048, help="new tokens")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    if options.neighbour == (options.folder is not None):
        parser.error("a folder or --neighbour")
    spec = KVCacheSpec(
        num_layers=options.layers,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        block_size=options.block_size,
        dtype="float16",
    )
    rows, options.products, products = [], 1, options.products
    blocks = options.prefix // options.block_size
    with neighbour(spec, blocks, options.threads) if options.neighbour else files(spec, blocks, options) as engine:
        bench = Bench(options, spec, engine)
        for pairs in products:
            rows.append(measure(bench, options, pairs))
            print("  ".join(f"{name} {value:.4g}" for name, value in asdict(rows[-1]).items()), flush=True)
        bench.close()
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
