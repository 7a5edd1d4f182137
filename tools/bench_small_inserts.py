"""Times inserts of a few tokens, and gathers, on a GPU beside plain kernels of the shape that others use.

    python tools/bench_small_inserts.py [--rounds 9] [--output out/bench_small_inserts]

Inserts: 8 heads of 128 in bfloat16, NHD caches, slots in no order, beside one CTA of 4 warps a token with the length of
a row as a constant, launched plainly and as a dependent launch, and beside one copy of as many bytes. Gathers: rows of
2,048 bytes (NHD) and of 1,152 (MLA, 576 of bfloat16), beside one CTA of 2 warps a token. All of a case take turns, in
each of the rounds; a figure is the median. "stream": many launches between two events, submitted while the stream is
held busy; "graph": replays of a CUDA graph of as many. What each writes is compared with NumPy's result first.
nvcc compiles the plain kernels (bench_small_inserts.cu).
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import paddle

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import devices, ops

HEADS, HEAD_SIZE, LATENT = 8, 128, 576
INSERT_CALLS, INSERT_SETS, INSERT_BLOCK = 64, 16, 16  # launches between two events, sets of buffers, tokens of a block
REPLAYS = 3

Call = Callable[[], Any]


@dataclass
class Figure:
    case: str
    mode: str
    variant: str
    beside: str  # the variant that the ratio is to
    median_us: float = 0.0
    ratio: float = 0.0
    gb_per_s: float = 0.0  # read plus written
    rounds_us: list[float] = field(default_factory=list)


def plain_kernels() -> ctypes.CDLL:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or f"{home}/bin/nvcc"
    capability = cupy.cuda.Device(0).compute_capability
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "plain.so"
        subprocess.run(
            [nvcc, "-O3", "-std=c++17", f"-arch=sm_{capability}", "-shared", "-Xcompiler", "-fPIC",
             str(Path(__file__).with_suffix(".cu")), "-o", str(library)],
            check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(library))


class Bench:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.plain = plain_kernels()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.handle = ctypes.c_void_p(self.stream.ptr)
        self.figures: list[Figure] = []

    def held_us(self, submit: Call, calls: int, hold_ns: int) -> float:
        """Device time of one of the calls that ``submit`` submits, while the stream is held busy."""
        while True:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            assert self.plain.spin(ctypes.c_ulonglong(hold_ns), self.handle) == 0
            start.record(self.stream)
            kept = submit()
            end.record(self.stream)
            held = not start.done  # else the host came late, and its time shows
            end.synchronize()
            del kept
            if held:
                return cupy.cuda.get_elapsed_time(start, end) * 1e3 / calls
            hold_ns *= 2

    def as_graph(self, calls: list[Call]) -> Call:
        with self.stream:
            self.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeRelaxed)
            for call in calls:
                call()
            graph = self.stream.end_capture()
        return lambda: [graph.launch(self.stream) for _ in range(REPLAYS)]

    def compare(
        self, case: str, variants: dict[str, list[Call]], beside: dict[str, str], num_bytes: int, graph: bool
    ) -> None:
        """``beside``: for each variant that is judged, by which other."""
        submits: dict[tuple[str, str], tuple[Call, int]] = {}
        for variant, calls in variants.items():
            submits["stream", variant] = (partial(lambda calls: [call() for call in calls], calls), len(calls))
            if graph:
                submits["graph", variant] = (self.as_graph(calls), len(calls) * REPLAYS)
        cupy.cuda.runtime.deviceSynchronize()
        holds, figures = {}, {}
        for (mode, variant), (submit, _) in submits.items():
            submit()  # loads kernels, fills pools of memory
            self.stream.synchronize()
            started = time.perf_counter()
            kept = submit()
            holds[mode, variant] = int((time.perf_counter() - started) * 1.5e9) + 100_000
            self.stream.synchronize()
            del kept
            figures[mode, variant] = Figure(case, mode, variant, beside.get(variant, ""))
        for _ in range(self.rounds):
            for (mode, variant), (submit, calls) in submits.items():
                figures[mode, variant].rounds_us.append(self.held_us(submit, calls, holds[mode, variant]))
        for figure in figures.values():
            figure.median_us = statistics.median(figure.rounds_us)
            figure.gb_per_s = num_bytes / figure.median_us / 1e3
        for (mode, _), figure in figures.items():
            ratio = ""
            if figure.beside:
                figure.ratio = figure.median_us / figures[mode, figure.beside].median_us
                ratio = f"{figure.ratio:6.3f} x {figure.beside}"
            spread = max(figure.rounds_us) - min(figure.rounds_us)
            print(
                f"{case:32} {mode:6} {figure.variant:15} {figure.median_us:8.3f} us  +-{spread / 2:6.3f}  "
                f"{figure.gb_per_s:7.0f} GB/s  {ratio}",
                flush=True,
            )
        self.figures += figures.values()

    def copies(self, buffers: list[Any], num_bytes: int, calls: int) -> list[Call]:
        """Copies of ``num_bytes``: the buffers have room for twice that."""
        copy = cupy.cuda.runtime.memcpyAsync
        return [
            partial(copy, b.data.ptr + num_bytes, b.data.ptr, num_bytes, 3, self.stream.ptr)
            for b in (buffers[i % len(buffers)] for i in range(calls))
        ]


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(count), np.uint8)


def tensor(array: np.ndarray) -> paddle.Tensor:
    """NumPy's uint16 is bfloat16 to Paddle."""
    return paddle.to_tensor(array, place=devices.place_of(0))


def view(of: paddle.Tensor, num_bytes: int) -> Any:
    memory = cupy.cuda.UnownedMemory(of.data_ptr(), num_bytes, of)
    return cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))


class InsertSet:
    """Tokens, and caches for the operator and for the plain kernel."""

    def __init__(self, tokens: int, seed: int) -> None:
        self.tokens = tokens
        row = HEADS * HEAD_SIZE
        blocks = max(32, -(-2 * tokens // INSERT_BLOCK))
        self.slots = np.random.default_rng(seed).permutation(blocks * INSERT_BLOCK)[:tokens].astype(np.int64)
        self.rows = [random_bytes(tokens * row * 2, seed + i).view(np.uint16).reshape(tokens, row) for i in range(2)]
        self.before = random_bytes(blocks * INSERT_BLOCK * row * 2, seed + 2).view(np.uint16).reshape(-1, row)
        self.sources = [tensor(rows.reshape(tokens, HEADS, HEAD_SIZE)) for rows in self.rows]
        shape = (blocks, INSERT_BLOCK, HEADS, HEAD_SIZE)
        self.caches = [tensor(self.before.reshape(shape)) for _ in range(2)]
        self.plain_caches = [tensor(self.before.reshape(shape)) for _ in range(2)]
        self.mapping = tensor(self.slots)

    def check(self, caches: list[paddle.Tensor], name: str) -> None:
        for cache, rows in zip(caches, self.rows, strict=True):
            expected = self.before.copy()
            expected[self.slots] = rows
            assert (view(cache, expected.nbytes).get().view(np.uint16).reshape(expected.shape) == expected).all(), name

    def reset(self) -> None:
        for cache in (*self.caches, *self.plain_caches):
            view(cache, self.before.nbytes).set(self.before.view(np.uint8).reshape(-1))
        cupy.cuda.runtime.deviceSynchronize()

    def operator(self, stream: int, **options: Any) -> Call:
        return partial(
            ops.reshape_and_cache, *self.sources, *self.caches, self.mapping, layout="NHD", stream=stream, **options
        )

    def plain(self, bench: Bench, dependent: bool) -> Call:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*self.sources, *self.plain_caches, self.mapping)]
        return partial(bench.plain.store_rows, *pointers, self.tokens, int(dependent), bench.handle)


def bench_insert(bench: Bench, tokens: int) -> None:
    count = INSERT_SETS if tokens <= 256 else 4
    sets = [InsertSet(tokens, 10 * i) for i in range(count)]
    stream = bench.stream.ptr
    making: dict[str, Callable[[InsertSet], Call]] = {
        "ours": lambda s: s.operator(stream),
        "plain": lambda s: s.plain(bench, False),
        "plain dependent": lambda s: s.plain(bench, True),
        "ours dependent": lambda s: s.operator(stream, dependent_launch=True),
    }
    beside = {"ours": "plain", "ours dependent": "plain dependent"}
    variants = {}
    for name, make in making.items():
        runs = [make(s) for s in sets]
        for s in sets:
            s.reset()
        for run in runs:
            run()
        cupy.cuda.runtime.deviceSynchronize()
        for s in sets[:2]:
            s.check(s.caches if name.startswith("ours") else s.plain_caches, f"{tokens} tokens, {name}")
        variants[name] = [runs[i % len(runs)] for i in range(INSERT_CALLS)]
    half = 2 * tokens * HEADS * HEAD_SIZE * 2
    buffers = [cupy.asarray(random_bytes(2 * half, i)) for i in range(count)]
    variants["copy"] = bench.copies(buffers, half, INSERT_CALLS)
    bench.compare(f"insert {tokens} tokens", variants, beside, 2 * half, graph=True)


def bench_gather(bench: Bench, tokens: int, block_size: int, latent: bool) -> None:
    """Sequences of nearly equal, odd lengths; blocks in no order."""
    sequences = 16
    row_bytes = 2 * (LATENT if latent else HEADS * HEAD_SIZE)
    num_bytes = tokens * row_bytes
    random = np.random.default_rng(1)
    ends = np.linspace(0, tokens, sequences + 1).astype(np.int32)
    ends[1:-1] += random.integers(-40, 40, sequences - 1, dtype=np.int32)
    lengths = np.diff(ends)
    of_sequence = -(-int(lengths.max()) // block_size)
    blocks = sequences * of_sequence
    table = random.permutation(blocks).astype(np.int32).reshape(sequences, of_sequence)
    content = random_bytes(blocks * block_size * row_bytes, 3).view(np.uint16).reshape(blocks * block_size, -1)
    token_to_seq = np.repeat(np.arange(sequences, dtype=np.int32), lengths)
    positions = np.arange(tokens) - ends[token_to_seq]
    slots = table[token_to_seq, positions // block_size].astype(np.int64) * block_size + positions % block_size
    expected = content[slots]

    shape = (blocks, block_size, LATENT) if latent else (blocks, block_size, HEADS, HEAD_SIZE)
    count = 2 if tokens > 16384 else 10  # together several times the L2 cache
    caches = [tensor(content.reshape(shape)) for _ in range(count)]
    outputs = [cupy.zeros(num_bytes, cupy.uint8) for _ in range(count)]
    on_gpu = [tensor(array) for array in (table, ends, token_to_seq)]
    options = {"total_tokens": tokens, "layout": "NHD", "stream": bench.stream.ptr}
    ours = [partial(ops.gather_cache, cache, *on_gpu[:2], **options) for cache in caches]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in on_gpu]
    plain = [
        partial(
            bench.plain.gather_rows, ctypes.c_void_p(cache.data_ptr()), ctypes.c_void_p(out.data.ptr), *pointers,
            tokens, row_bytes, block_size, ctypes.c_int64(of_sequence), bench.handle,
        )
        for cache, out in zip(caches, outputs, strict=True)
    ]  # fmt: skip
    name = f"gather {tokens} {'MLA' if latent else 'NHD'}, block {block_size}"
    cupy.cuda.runtime.deviceSynchronize()
    got = ours[0]()
    plain[0]()
    cupy.cuda.runtime.deviceSynchronize()
    for result in (view(got, num_bytes), outputs[0]):
        assert (result.get().view(np.uint16).reshape(expected.shape) == expected).all(), name
    calls = 6 if tokens > 16384 else 20
    buffers = [cupy.asarray(random_bytes(2 * num_bytes, 4)) for _ in range(count)]
    variants = {
        "ours": [ours[i % count] for i in range(calls)],
        "plain": [plain[i % count] for i in range(calls)],
        "copy": bench.copies(buffers, num_bytes, calls),
    }
    bench.compare(name, variants, {"ours": "plain"}, 2 * num_bytes, graph=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["insert", "gather"])
    parser.add_argument("--output", type=Path, default=Path("out/bench_small_inserts"), help="without suffix: .csv")
    given = parser.parse_args()
    paddle.set_device(devices.name_of(0))
    bench = Bench(given.rounds)
    if given.only in (None, "insert"):
        for tokens in (1, 16, 64, 256, 2048, 8192):
            bench_insert(bench, tokens)
    if given.only in (None, "gather"):
        for tokens in (4096, 65536):
            for latent in (False, True):
                for block_size in (16, 64):
                    bench_gather(bench, tokens, block_size, latent)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    with given.output.with_suffix(".csv").open("w", newline="") as file:
        rows = [asdict(figure) for figure in bench.figures]
        for row in rows:
            row["rounds_us"] = " ".join(f"{us:.3f}" for us in row["rounds_us"])
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
