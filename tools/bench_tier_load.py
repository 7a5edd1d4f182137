"""Loads from a tier in files to the GPU beside a model of matrix products: python tools/bench_tier_load.py FOLDER

For each load of the model (how long its products take beside what the files deliver) five ways are measured in turn:
computing alone, files to host memory alone, host memory to the device alone, files to the device alone, and files to
the device layer by layer beside the model. The bar is 1.10 x the longest of computing, files and link, plus one layer.
What each layer has seen is compared in each run beside the model, and all bytes on the device at the end.

Files that the system has just written lie in its page cache; on a file system with direct I/O they come from the disk.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import sys
import tempfile
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import cupy
import numpy as np
from gpu_pipeline import Model, device_words, host_words

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Transfer
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.tiers import FilesEngine, Job, Tier, load

WAIT_S = 120.0
BAR = 1.10


@dataclass(frozen=True)
class Row:
    """Medians. ``slowed``: how much longer the layers of the model took beside the load, without their waits."""

    products: int
    object_bytes: int
    total_bytes: int
    compute_ms: float
    files_ms: float
    link_ms: float
    files_to_device_ms: float
    together_ms: float
    together_ms_most: float
    bar_ms: float
    slowed: float


class Bench:
    """Pool and cache are overwritten before each run: nothing stands there from the one before."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.spec = KVCacheSpec(
            num_layers=options.layers,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            block_size=options.block_size,
            dtype="float16",
        )
        blocks = options.prefix // options.block_size
        random = np.random.default_rng(5)
        self.host_ids, self.device_ids = (random.permutation(blocks + 1)[:blocks].tolist() for _ in range(2))
        fresh = sorted(set(range(blocks + 1)) - set(self.device_ids))
        self.keys = [number.to_bytes(16, "little") for number in range(blocks)]
        self.device = DeviceCache(self.spec, blocks + 1, "gpu:0")
        self.pool = HostPool(self.spec, blocks + 1, layout="block_first")
        for words in host_words(self.pool, self.host_ids):
            words[:] = random.integers(0, 2**16, words.shape, np.uint16)
        self.expected = {
            (name, layer): np.stack([self.pool.view(name, layer, block_id) for block_id in self.host_ids])
            for name in self.spec.tensor_names
            for layer in range(options.layers)
        }
        self.sums = [
            [int(self.expected[name, layer].view(np.uint16).sum(dtype=np.uint64)) for name in self.spec.tensor_names]
            for layer in range(options.layers)
        ]
        object_bytes = options.layers * self.spec.block_bytes
        self.engine = FilesEngine({folder: 2 * blocks * object_bytes + (1 << 30)}, threads_per_root=options.threads)
        self.tier = Tier(self.engine, self.pool, model=b"bench", max_store_bytes=2 * blocks * object_bytes)
        self.tier.store([Job(self.keys, self.host_ids, timeout_s=WAIT_S)])
        self.tier.drain(WAIT_S)
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.scheduler = LayerwiseScheduler(self.device, self.pool, compute_stream=self.compute)
        self._model_of = functools.partial(Model, self.device, self.device_ids, fresh)
        self.model = self._model_of(options)

    def use_model(self, options: argparse.Namespace) -> None:
        self.model = self._model_of(options)

    def computing(self) -> tuple[float, float]:
        """How long it takes, and the layers of it."""
        return self._beside(None)

    def files(self) -> float:
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

    def files_to_device(self) -> float:
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
        self.engine.close(WAIT_S)
        self.pool.close()


def measure(bench: Bench, options: argparse.Namespace, products: int) -> Row:
    options.products = products
    bench.use_model(options)
    ways = (bench.files, bench.link, bench.files_to_device)
    rounds: list[list[float]] = []
    for _ in range(1 + options.repetitions):  # the first one warms up
        rounds.append([*bench.computing(), *bench.together(), *(way() for way in ways)])
    bench.check()
    columns = list(zip(*rounds[1:], strict=True))
    alone, of_layers, together, beside, files, link, through = map(statistics.median, columns)
    total = len(bench.keys) * options.layers * bench.spec.block_bytes
    bar = BAR * max(alone, files, link) + max(alone, files, link) / options.layers
    return Row(
        products, total // len(bench.keys), total, alone, files, link, through, together, max(columns[2]), bar,
        beside / of_layers - 1,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--products", type=int, nargs="+", default=[1, 2, 4, 8], help="pairs a layer, one model each")
    parser.add_argument("--threads", type=int, help="calls of the system at once; else the engine's own")
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
    options.folder.mkdir(parents=True, exist_ok=True)
    rows, options.products, products = [], 1, options.products
    with tempfile.TemporaryDirectory(dir=options.folder) as inside:
        bench = Bench(options, Path(inside))
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
