"""Times the operators on CPU tensors beside NumPy's take and fancy assignment.

    python tools/bench_cpu_ops.py [--repeats 25] [--output out/bench_cpu_ops]

On one core (the process is bound to it) and on two, where NumPy's work is cut in two for a pool of threads: NumPy alone
uses one. The two are timed in turn, so that both meet the same noise; medians. Caches and tokens of both are memory of
Paddle's: NumPy's own may have larger pages, which is no merit of its loops. GB/s counts bytes read and bytes written
once. What the operator wrote is compared with what NumPy wrote in the same run.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

from paddle_kv import ops

HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 128, 16
BLOCK_SHAPES: dict[Any, tuple[int, int, int]] = {
    "HND": (HEADS, BLOCK_SIZE, HEAD_SIZE),
    "NHD": (BLOCK_SIZE, HEADS, HEAD_SIZE),
}

# Work on a range of its items: the whole for one thread, halves for two.
Ranged = Callable[[slice], Any]


@dataclass
class Figure:
    operator: str
    case: str
    cores: int
    mib: float  # read plus written
    numpy_us: float
    operator_us: float
    operator_gb_per_s: float
    times_numpy: float  # above 1: the operator takes less time


@dataclass
class Case:
    operator: str
    name: str
    num_bytes: int
    items: int
    numpy: Ranged
    run: Callable[[], Any]
    same: Callable[[Any], bool]  # given what `run` returned
    allocate: Callable[[], Any] = lambda: None  # what NumPy writes, where the operator returns new memory


@contextmanager
def cores(count: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    yield
    os.sched_setaffinity(0, before)


def elapsed_us(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def measure(case: Case, count: int, repeats: int) -> Figure:
    parts = [slice(case.items * i // count, case.items * (i + 1) // count) for i in range(count)]
    with cores(count), ThreadPoolExecutor(count) as pool:

        def by_numpy() -> None:
            case.allocate()
            list(map(case.numpy, parts) if count == 1 else pool.map(case.numpy, parts))

        by_numpy()
        assert case.same(case.run()), f"{case.operator}, {case.name}"
        times = [(elapsed_us(by_numpy), elapsed_us(case.run)) for _ in range(repeats)]
    numpy_us, operator_us = (statistics.median(column) for column in zip(*times, strict=True))
    return Figure(
        case.operator, case.name, count, case.num_bytes / 2**20, numpy_us, operator_us,
        case.num_bytes / operator_us / 1e3, numpy_us / operator_us,
    )  # fmt: skip


def on_cpu(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(array, place=paddle.CPUPlace())


def random_halves(*shape: int) -> np.ndarray:
    tensor = on_cpu(np.random.default_rng(len(shape)).integers(0, 2**16, shape, np.uint16).view(np.float16))
    memory = (ctypes.c_uint16 * int(np.prod(shape))).from_address(tensor.data_ptr())
    memory.tensor = tensor  # keeps it alive
    return np.ctypeslib.as_array(memory).view(np.float16).reshape(shape)


def same_bits(tensor: paddle.Tensor, array: np.ndarray) -> bool:
    return bool(np.array_equal(tensor.numpy().view(np.uint16), array.view(np.uint16)))


def bench_copy_blocks(blocks: int) -> Case:
    count = blocks // 2
    ids = np.random.default_rng(1).permutation(blocks)
    pairs = np.stack([ids[:count], ids[count:]], axis=1)
    cache = random_halves(blocks, *BLOCK_SHAPES["HND"])
    tensor = on_cpu(cache)

    def assign(part: slice) -> None:
        cache[pairs[part, 1]] = cache[pairs[part, 0]]

    return Case("copy_blocks", f"{count} blocks", 2 * cache[:count].nbytes, count, assign,
                partial(ops.copy_blocks, tensor, None, pairs), lambda _: same_bits(tensor, cache))  # fmt: skip


def bench_swap(blocks: int, to_host: bool) -> Case:
    device_ids, host_ids = (np.random.default_rng(seed).permutation(blocks) for seed in (1, 2))
    cache, host = (random_halves(blocks, *BLOCK_SHAPES["HND"]) for _ in range(2))
    tensor, memory = on_cpu(cache), host.copy()
    name = f"swap_cache_per_layer, {'to the host' if to_host else 'from the host'}"

    def assign(part: slice) -> None:
        if to_host:
            host[host_ids[part]] = cache[device_ids[part]]
        else:
            cache[device_ids[part]] = host[host_ids[part]]

    def run() -> None:
        ops.swap_cache_per_layer(tensor, memory.ctypes.data, blocks, device_ids, host_ids, 0, 0 if to_host else 1)

    def same(_: Any) -> bool:
        return same_bits(tensor, cache) and bool(np.array_equal(memory.view(np.uint16), host.view(np.uint16)))

    return Case(name, f"{blocks} blocks", 2 * cache.nbytes, blocks, assign, run, same)


def bench_gather(tokens: int, layout: Any) -> Case:
    blocks = tokens // BLOCK_SIZE
    table = np.random.default_rng(1).permutation(blocks)
    cache = random_halves(blocks, *BLOCK_SHAPES[layout])
    result: list[np.ndarray] = []

    def allocate() -> None:
        result[:] = [np.empty((blocks, BLOCK_SIZE, HEADS, HEAD_SIZE), np.float16)]

    def take(part: slice) -> None:
        rows = result[0]
        if layout == "NHD":
            np.take(cache, table[part], axis=0, out=rows[part], mode="clip")
        else:
            rows[part] = cache[table[part]].swapaxes(1, 2)

    run = partial(ops.gather_cache, on_cpu(cache), on_cpu(table[None]), on_cpu(np.array([0, tokens])),
                  total_tokens=tokens, layout=layout)  # fmt: skip
    return Case("gather_cache", f"{tokens} tokens, {layout}", 2 * cache.nbytes, blocks, take, run,
                lambda rows: same_bits(rows, result[0].reshape(tokens, HEADS, HEAD_SIZE)), allocate)  # fmt: skip


def bench_insert(tokens: int, layout: Any) -> Case:
    blocks = -(-tokens // BLOCK_SIZE)
    slots = np.random.default_rng(1).permutation(blocks * BLOCK_SIZE)[:tokens]
    key, value = random_halves(tokens, HEADS, HEAD_SIZE), random_halves(tokens, HEADS, HEAD_SIZE)
    caches = [random_halves(blocks, *BLOCK_SHAPES[layout]) for _ in "kv"]
    tensors = [on_cpu(cache) for cache in caches]

    def assign(part: slice) -> None:
        for cache, tokens_of in zip(caches, (key, value), strict=True):
            at = slots[part]
            if layout == "NHD":
                cache.reshape(-1, HEADS, HEAD_SIZE)[at] = tokens_of[part]
            else:
                cache[at // BLOCK_SIZE, :, at % BLOCK_SIZE] = tokens_of[part]

    run = partial(ops.reshape_and_cache, on_cpu(key), on_cpu(value), *tensors, on_cpu(slots), layout=layout)
    return Case("reshape_and_cache", f"{tokens} tokens, {layout}", 4 * key.nbytes, tokens, assign, run,
                lambda _: all(map(same_bits, tensors, caches)))  # fmt: skip


def all_cases() -> Iterator[Case]:
    for blocks in (16, 256, 2048):
        yield bench_copy_blocks(blocks)
        yield bench_swap(blocks, True)
        yield bench_swap(blocks, False)
    for tokens in (256, 4096, 16384):
        for layout in BLOCK_SHAPES:
            yield bench_gather(tokens, layout)
            yield bench_insert(tokens, layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--output", type=Path, default=Path("out/bench_cpu_ops"), help="without suffix: .csv")
    given = parser.parse_args()
    paddle.set_device("cpu")
    figures = []
    for case in all_cases():
        for count in (1, 2):
            figures.append(made := measure(case, count, given.repeats))
            print(f"{made.operator:38} {made.case:22} {count} cores  {made.mib:7.1f} MiB   "
                  f"NumPy {made.numpy_us:9.1f}   operator {made.operator_us:9.1f} us  "
                  f"{made.operator_gb_per_s:5.1f} GB/s   {made.times_numpy:5.2f} x", flush=True)  # fmt: skip
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(made) for made in figures]
    with given.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
