"""A prompt whose cache does not fit on the device, on rings of layer buffers: python tools/bench_ring.py

The prompt is computed in chunks. A layer of a chunk reads the whole prefix (each of its 16-bit words is summed, so that
what is wrong or late shows), multiplies matrices, and writes the new blocks. Compared: all layers resident, nothing
moves (the floor, where computing takes longer than moving); and rings of R layer buffers, where every prefix comes from
host memory and every new block leaves, each chunk behind the one before it. The sums of all layers and chunks and the
saved bytes of the last ring are compared with those of the resident run.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import cupy
import numpy as np
from gpu_pipeline import device_words

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.integrations import ForwardPass

WAIT_S = 60.0


@dataclass(frozen=True)
class Row:
    """``device_mib``: of the cache. ``moved_mib``: both directions, of one prompt."""

    what: str
    device_mib: float
    moved_mib: float
    median_ms: float
    least_ms: float
    most_ms: float
    of_resident: float


class Prompt:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.spec = KVCacheSpec(
            num_layers=options.layers,
            num_kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            block_size=options.block_size,
            dtype="float16",
        )
        self.chunk_blocks = options.chunk_tokens // options.block_size
        self.num_blocks = options.chunks * self.chunk_blocks
        random = np.random.default_rng(5)
        self.table = random.permutation(self.num_blocks).tolist()  # device block of each block of the prompt
        self.host_ids = random.permutation(self.num_blocks).tolist()
        self.compute = cupy.cuda.Stream(non_blocking=True)
        shape = self.spec.block_shape("key")
        self.words = cupy.random.randint(0, 2**16, (self.num_blocks, *shape)).astype(cupy.uint16)
        self.gathered = cupy.empty((self.num_blocks, *shape), cupy.uint16)
        self.positions = cupy.array(self.table)
        tokens, hidden, ffn = options.chunk_tokens, options.hidden, options.ffn
        self.hidden = cupy.random.standard_normal((tokens, hidden), cupy.float32).astype(cupy.float16)
        self.result = cupy.empty_like(self.hidden)
        self.wide = cupy.empty((tokens, ffn), cupy.float16)
        self.up = (cupy.random.standard_normal((hidden, ffn), cupy.float32) / hidden**0.5).astype(cupy.float16)
        self.down = (cupy.random.standard_normal((ffn, hidden), cupy.float32) / ffn**0.5).astype(cupy.float16)
        cupy.cuda.Device().synchronize()

    def layer(self, cache: DeviceCache, chunk: int, layer: int, sums: cupy.ndarray) -> None:
        """Enqueues it on the stream."""
        first, stop = chunk * self.chunk_blocks, (chunk + 1) * self.chunk_blocks
        for number, name in enumerate(self.spec.tensor_names):
            words = self.views[id(cache)][name][layer % cache.layer_buffers]
            if first:
                cupy.take(words, self.positions[:first], axis=0, out=self.gathered[:first])
                sums[chunk, layer, number] = self.gathered[:first].sum(dtype=cupy.uint64)
        for _ in range(self.options.products):
            cupy.matmul(self.hidden, self.up, out=self.wide)
            cupy.matmul(self.wide, self.down, out=self.result)
        for number, name in enumerate(self.spec.tensor_names):
            words = self.views[id(cache)][name][layer % cache.layer_buffers]
            words[self.positions[first:stop]] = self.words[first:stop] + cupy.uint16(2 * layer + number)

    def watch(self, cache: DeviceCache) -> None:
        views = {
            name: [device_words(cache.tensor(name, buffer)) for buffer in range(cache.layer_buffers)]
            for name in self.spec.tensor_names
        }
        for of_name in views.values():
            for words in of_name:
                words.fill(0xDEDE)
        self.views = {id(cache): views}
        cupy.cuda.Device().synchronize()

    def run(self, cache: DeviceCache, scheduler: LayerwiseScheduler | None) -> tuple[float, np.ndarray]:
        """Milliseconds, and what each layer of each chunk has seen of its prefix."""
        spec = self.spec
        sums = cupy.zeros((self.options.chunks, spec.num_layers, len(spec.tensor_names)), cupy.uint64)
        cupy.cuda.Device().synchronize()
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record(self.compute)
        saves = []
        with self.compute:
            for chunk in range(self.options.chunks):
                cached, stop = chunk * self.chunk_blocks, (chunk + 1) * self.chunk_blocks
                if scheduler is None:
                    for layer in range(spec.num_layers):
                        self.layer(cache, chunk, layer, sums)
                    continue
                load = scheduler.onload(self.host_ids[:cached], self.table[:cached])
                save = scheduler.offload(self.table[cached:stop], self.host_ids[cached:stop], layerwise=True)
                saves.append(save)
                with ForwardPass([load], [save], stream=self.compute, timeout_s=WAIT_S) as layers:
                    for layer in range(spec.num_layers):
                        with layers.layer(layer):
                            self.layer(cache, chunk, layer, sums)
        for save in saves:
            save.wait_on(self.compute)
        last.record(self.compute)
        last.synchronize()
        for save in saves:
            save.wait(WAIT_S)
        return float(cupy.cuda.get_elapsed_time(first, last)), sums.get()


def measure(prompt: Prompt, ways: Sequence[int], repetitions: int) -> tuple[list[Row], list[str]]:
    spec = prompt.spec
    rows: list[Row] = []
    wrong: list[str] = []
    expected = None
    for buffers in ways:
        cache = DeviceCache(spec, prompt.num_blocks, "gpu:0", layer_buffers=buffers)
        prompt.watch(cache)
        pool = scheduler = None
        if cache.is_ring:
            pool = HostPool(spec, prompt.num_blocks)
            scheduler = LayerwiseScheduler(cache, pool, compute_stream=prompt.compute)
        prompt.run(cache, scheduler)
        times = []
        for _ in range(repetitions):
            taken_ms, sums = prompt.run(cache, scheduler)
            times.append(taken_ms)
            expected = sums if expected is None else expected
            if (sums != expected).any():
                wrong.append(f"{buffers} buffers: {int((sums != expected).sum())} layers saw another prefix")
        moved = 0
        if scheduler is not None and pool is not None:
            stats = scheduler.stats()
            moved = (stats["onload_bytes"] + stats["offload_bytes"]) // (repetitions + 1)
            wrong += saved_wrong(prompt, pool)
            scheduler.close(WAIT_S)
            pool.close()
        median = statistics.median(times)
        rows.append(
            Row(
                f"{buffers} layer buffers" if cache.is_ring else "resident",
                round(buffers * prompt.num_blocks * spec.block_bytes / 2**20, 1),
                round(moved / 2**20, 1),
                round(median, 2),
                round(min(times), 2),
                round(max(times), 2),
                round(median / (rows[0].median_ms if rows else median), 4),
            )
        )
        print(json.dumps(asdict(rows[-1])), flush=True)
        del cache
    return rows, wrong


def saved_wrong(prompt: Prompt, pool: HostPool) -> list[str]:
    words = prompt.words.get()
    found = []
    for layer in range(prompt.spec.num_layers):
        for number, name in enumerate(prompt.spec.tensor_names):
            for position, host_id in enumerate(prompt.host_ids):
                saved = pool.view(name, layer, host_id).view(np.uint16)
                if (saved != words[position] + np.uint16(2 * layer + number)).any():
                    found.append(f"{name} of layer {layer} in host block {host_id} is not what was written")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--buffers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--products", type=int, default=2, help="pairs of matrix products per layer")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args(arguments)
    rows, wrong = measure(Prompt(options), [options.layers, *options.buffers], options.repetitions)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"options": {**vars(options), "out": str(options.out)}, "rows": [asdict(row) for row in rows]}
    (options.out / "ring.json").write_text(json.dumps({**result, "wrong": wrong}, indent=2) + "\n")
    with (options.out / "ring.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print("\n".join(wrong[:10]) or "Every layer saw its prefix, and every saved byte is what was written.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
