"""When the decode process may start after the prefill process began: python tools/bench_decode_start.py --out FOLDER

Two processes on one GPU, or on two (`--sender-gpu 1`). The one computes layers (matrix products) and hands each layer's
scattered blocks of 32 KiB over into the cache of the other one, which waits for them layer by layer. A layer is
computed for as long as its blocks take beside computing, so that neither waits for the other one in the long run; or
its products have `--tokens` rows. The aim: the last layer is there after 1.03 of what the prefill takes without handing
anything over, and one layer more. All blocks are compared by checksums, after each round. Writes decode_start.csv and
decode_start.png of the median round. Exit code 1 if a byte is wrong.
"""

from __future__ import annotations

import argparse
import csv
import faulthandler
import json
import multiprocessing
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import cupy
import numpy as np
import paddle

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices
from paddle_kv.peers import Listener, PeerBlocks, Receiver, connect

WAIT_S = 30.0
LIFE_S = 120.0
LAYERS = 16
SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16")
POISON = 0xEE
HIDDEN, WIDE = 4096, 14336  # of the products of a layer
MOST_TOKENS, STEP = 16384, 128
AIM = 1.03


def begin(gpu: int) -> None:
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    paddle.set_device(devices.name_of(gpu))
    cupy.cuda.Device(gpu).use()


class Axis:
    """Events of a GPU on the clock of the host, which both processes have: some 10 us late."""

    def __init__(self, stream: Any) -> None:
        self._origin = cupy.cuda.Event()
        stream.synchronize()
        self._origin.record(stream)
        self._origin.synchronize()
        self.origin_ms = time.monotonic() * 1e3

    def ms(self, event: Any) -> float:
        return self.origin_ms + float(cupy.cuda.get_elapsed_time(self._origin, event))

    def ms_after(self, event: int) -> float:
        """When an earlier event was."""
        return self.origin_ms - float(cupy.cuda.runtime.eventElapsedTime(event, self._origin.ptr))


def rows_of(cache: DeviceCache, name: str, layer: int) -> Any:
    size_bytes = cache.num_blocks * SPEC.tensor_block_bytes(name)
    memory = cupy.cuda.UnownedMemory(cache.pointer(name, layer), size_bytes, cache)
    return cupy.ndarray(
        (cache.num_blocks, size_bytes // cache.num_blocks), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)
    )


def checksums(cache: DeviceCache, ids: list[int]) -> np.ndarray:
    """Of each block, ``[layers * tensors, blocks]``; words that change places change it."""
    found = []
    for layer in range(LAYERS):
        for name in SPEC.tensor_names:
            words = rows_of(cache, name, layer).view(cupy.uint64)
            weights = 2 * cupy.arange(words.shape[1], dtype=cupy.uint64) + 1
            found.append((words * weights).sum(axis=1)[cupy.asarray(ids)].get())
    return np.stack(found)


def prefill(pipe: Connection, gpu: int, blocks: int, exported: Any, path: str) -> None:
    begin(gpu)
    cache = DeviceCache(SPEC, 2 * blocks, devices.name_of(gpu))
    for layer in range(LAYERS):
        for name in SPEC.tensor_names:
            rows = rows_of(cache, name, layer)
            rows[:] = cupy.random.randint(0, 256, rows.shape, dtype=cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    theirs = PeerBlocks(DeviceCache.attach(SPEC, exported))
    scheduler = LayerwiseScheduler(cache, theirs, compute_stream=stream, record_layer_times=True)
    sender = connect(scheduler, path)
    shapes = ((MOST_TOKENS, HIDDEN), (HIDDEN, WIDE), (WIDE, HIDDEN))
    hidden, up, down = (cupy.random.random(one, dtype=cupy.float32).astype(cupy.float16) for one in shapes)
    wide, result = cupy.empty((MOST_TOKENS, WIDE), cupy.float16), cupy.empty_like(hidden)
    cupy.cuda.runtime.deviceSynchronize()

    def compute(tokens: int, mark: Any) -> tuple[Any, list[tuple[Any, Any]]]:
        """When the host began, and events around each layer."""
        around = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(LAYERS)]
        began_ms = time.monotonic() * 1e3
        with stream:
            for layer, (first, last) in enumerate(around):
                first.record(stream)
                cupy.matmul(hidden[:tokens], up, out=wide[:tokens])
                cupy.matmul(wide[:tokens], down, out=result[:tokens])
                last.record(stream)
                mark(layer)
        return began_ms, around

    def alone(tokens: int) -> float:
        """What the layers take without handing anything over."""
        _, around = compute(tokens, lambda layer: None)
        stream.synchronize()
        return float(cupy.cuda.get_elapsed_time(around[0][0], around[-1][1]))

    def send(grant: Any, ids: list[int], tokens: int) -> dict[str, Any]:
        axis = Axis(stream)
        save = sender.send(grant, ids)
        began_ms, around = compute(tokens, save.mark_layer_written)
        save.wait(WAIT_S)
        stream.synchronize()
        origin_ms = axis.ms_after(scheduler.origin_event)
        return {
            "began": began_ms,
            "computed": [(axis.ms(first), axis.ms(last)) for first, last in around],
            "copied": [(origin_ms + first, origin_ms + last) for first, last in save.layer_times_ms],
        }

    orders = {"alone": alone, "send": send, "checksums": lambda ids: checksums(cache, ids)}
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        pipe.send(orders[order[0]](*order[1:]))
    sender.close(WAIT_S)
    scheduler.close(WAIT_S)


@dataclass
class Round:
    """Milliseconds since the prefill began."""

    computed: list[tuple[float, float]]
    copied: list[tuple[float, float]]
    usable: list[float]
    over: float

    @property
    def start(self) -> float:
        """Of decode: all layers are there."""
        return max(self.usable)


class Decode:
    def __init__(self, given: argparse.Namespace) -> None:
        self.blocks = (given.mib_of_layer << 20) // SPEC.block_bytes
        rng = np.random.default_rng(0)
        self.sources, self.targets = (rng.permutation(2 * self.blocks)[: self.blocks].tolist() for _ in range(2))
        self.cache, self.pool = DeviceCache(SPEC, 2 * self.blocks, devices.name_of(0)), HostPool(SPEC, 1)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, compute_stream=self.stream)
        self.receiver = Receiver(self.scheduler, direct=True)
        self.listener = Listener(self.receiver)
        self.pipe, there = multiprocessing.Pipe()
        arguments = (there, given.sender_gpu, self.blocks, self.cache.export(), self.listener.path)
        self.process = multiprocessing.get_context("spawn").Process(target=prefill, args=arguments, daemon=True)
        self.process.start()
        there.close()
        self._answer()
        self.expected = self.ask("checksums", self.sources)

    def _answer(self) -> Any:
        assert self.pipe.poll(LIFE_S), "the other process does not answer"
        return self.pipe.recv()

    def ask(self, *order: Any) -> Any:
        self.pipe.send(order)
        return self._answer()

    def round(self, tokens: int) -> Round:
        for layer in range(LAYERS):
            for name in SPEC.tensor_names:
                rows_of(self.cache, name, layer).fill(POISON)
        cupy.cuda.runtime.deviceSynchronize()
        axis = Axis(self.stream)
        load, grant = self.receiver.grant(self.targets, timeout_s=WAIT_S)
        self.pipe.send(("send", grant, self.sources, tokens))
        there = [cupy.cuda.Event() for _ in range(LAYERS)]
        for layer, event in enumerate(there):
            load.wait_layer(layer, stream=self.stream, timeout_s=WAIT_S)
            event.record(self.stream)
        load.wait(WAIT_S)
        over_ms = time.monotonic() * 1e3
        self.stream.synchronize()
        found = self._answer()
        zero_ms = found["began"]
        computed, copied = ([(a - zero_ms, b - zero_ms) for a, b in found[name]] for name in ("computed", "copied"))
        np.testing.assert_array_equal(checksums(self.cache, self.targets), self.expected)
        others = sorted(set(range(self.cache.num_blocks)) - set(self.targets))
        for layer in range(LAYERS):
            for name in SPEC.tensor_names:
                assert bool((rows_of(self.cache, name, layer)[cupy.asarray(others)] == POISON).all())
        return Round(computed, copied, [axis.ms(event) - zero_ms for event in there], over_ms - zero_ms)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(WAIT_S)
        self.process.kill()
        for one in (self.receiver, self.listener, self.scheduler, self.pool):
            one.close()


def draw(found: Round, aim_ms: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(12, 3), dpi=120, layout="constrained")
    colours = pyplot.get_cmap("viridis")
    for lane, spans in enumerate((found.computed, found.copied)):
        for layer, (first, last) in enumerate(spans):
            axes.barh(lane, last - first, left=first, height=0.7, color=colours(0.25 + 0.7 * layer / LAYERS))
    axes.scatter(found.usable, [2] * LAYERS, c=[colours(0.25 + 0.7 * layer / LAYERS) for layer in range(LAYERS)])
    axes.axvline(aim_ms, color="crimson", linewidth=0.8)
    axes.set_yticks(range(3), ["prefill computes", "blocks on their way", "decode may use"])
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    axes.set_xlabel(f"ms since the prefill began; red: {AIM} of the prefill and one layer")
    figure.savefig(path)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--sender-gpu", type=int, default=0, help="the receiver is on GPU 0")
    options.add_argument("--mib-of-layer", type=int, default=256)
    options.add_argument("--tokens", type=int, help=f"of a layer's products, {STEP} to {MOST_TOKENS}")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path, default=Path("out"))
    given = options.parse_args()
    begin(0)
    decode = Decode(given)
    tokens = given.tokens or MOST_TOKENS // 2
    for _ in range(0 if given.tokens else 4):  # until a layer is computed as long as its blocks take beside that
        copy_ms = float(np.median([last - first for first, last in decode.round(tokens).copied]))
        decode.ask("alone", tokens)
        layer_ms = min(decode.ask("alone", tokens) for _ in range(3)) / LAYERS
        tokens = min(MOST_TOKENS, max(STEP, round(tokens * copy_ms / layer_ms / STEP) * STEP))
    alone_ms, rounds = [], []
    for _ in range(given.rounds):  # in turns: the clock of the GPU changes
        alone_ms.append(decode.ask("alone", tokens))
        rounds.append(decode.round(tokens))
    rounds.sort(key=lambda one: one.start)
    prefill_ms = float(np.median(alone_ms))
    decode.close()
    found = rounds[len(rounds) // 2]
    layer_ms = prefill_ms / LAYERS
    aim_ms = AIM * prefill_ms + layer_ms
    copy_ms = float(np.median([last - first for first, last in found.copied]))
    print(f"{LAYERS} layers of {given.mib_of_layer} MiB, {tokens} tokens of a model")
    gb_per_s = (given.mib_of_layer << 20) / copy_ms / 1e6
    print(f"a layer: {layer_ms:.3f} ms computed, {copy_ms:.3f} ms copied ({gb_per_s:.0f} GB/s)")
    print(
        f"prefill alone: {prefill_ms:.2f} ms; with the hand-over: {found.computed[-1][1] - found.computed[0][0]:.2f} ms"
    )
    print(
        f"decode may start: {found.start:.2f} ms after prefill began ({rounds[0].start:.2f} to {rounds[-1].start:.2f})"
    )
    print(f"the aim, {AIM} of prefill alone and a layer: {aim_ms:.2f} ms; the load was over after {found.over:.2f} ms")
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "decode_start.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["layer", "computed_from_ms", "computed_until_ms", "copied_from_ms", "copied_until_ms", "usable_ms"]
        )
        for layer, (computed, copied, usable) in enumerate(
            zip(found.computed, found.copied, found.usable, strict=True)
        ):
            writer.writerow([layer, *(f"{value:.4f}" for value in (*computed, *copied, usable))])
    summary = {
        "alone_ms": alone_ms,
        "tokens": tokens,
        "layer_ms": layer_ms,
        "copy_ms": copy_ms,
        "aim_ms": aim_ms,
        "start_ms": [one.start for one in rounds],
    }
    (given.out / "decode_start.json").write_text(json.dumps(summary))
    draw(found, aim_ms, given.out / "decode_start.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
