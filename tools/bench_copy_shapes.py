"""The kernels that copy scattered blocks between caches, by the shape of their CTAs: python tools/bench_copy_shapes.py

512 MiB of scattered blocks of 32 tensors, on one GPU, and pushed to a second one where there is one: beside nothing,
and beside matrix products of either GPU. Every way is compared with NumPy's result once. Medians of 5, bytes counted
once. What the shapes of custom_ops/transfer/cuda/copy_segments.cu have is chosen by this. nvcc compiles the kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

TENSORS = 32
WORDS = -1
RINGS = {  # as bench_copy_shapes.cu numbers them
    WORDS: "words, 1024 threads",
    0: "4 warps x 4 x 8 KiB, 2 out",
    1: "4 warps x 6 x 8 KiB, 3 out",
    2: "4 warps x 3 x 16 KiB, 1 out",
    3: "2 warps x 4 x 8 KiB, 2 out",
    4: "1 warp x 4 x 4 KiB, 1 out",
    5: "1 warp x 4 x 4 KiB, 2 out",
    6: "1 warp x 8 x 4 KiB, 4 out",
    7: "1 warp x 8 x 2 KiB, 4 out",
    8: "1 warp x 4 x 8 KiB, 2 out",
    9: "1 warp x 8 x 8 KiB, 4 out",
}
CTAS = (8, 16, 32, 64, 132, 264)
BESIDE = {
    WORDS: (2, 8, 32),
    0: (2, 4, 8, 16, 64),
    4: (8, 32, 64, 132),
    5: (8, 16, 32, 64, 132),
    6: (8, 16, 32, 64, 132),
    7: (8, 16, 32, 64, 132),
    8: (8, 16, 32, 64),
    9: (4, 8, 16, 32),
}
PRODUCTS = {"3072 x 3072 x 3072": (3072, 3072, 3072), "4096 x 14336 x 4096": (4096, 14336, 4096)}
ANY_KIND = 4  # cudaMemcpyDefault


def compiled() -> ctypes.CDLL:
    nvcc = shutil.which("nvcc") or os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc"
    source = Path(__file__).with_suffix(".cu")
    include = source.parent.parent / "custom_ops" / "include"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "shapes.so"
        subprocess.run(
            [nvcc, "-O3", "-std=c++17", "-w", f"-arch=sm_{cupy.cuda.Device(0).compute_capability}", "-shared",
             "-Xcompiler", "-fPIC", f"-I{include}", str(source), "-o", str(library)],
            check=True,
        )  # fmt: skip
        found = ctypes.CDLL(str(library))
    pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    found.prepare.argtypes = [integer, pointer, pointer, integer, long, long, pointer]
    found.run.argtypes = [integer, integer, integer, pointer, integer, pointer, pointer, pointer]
    found.run_pieces.argtypes = [pointer, pointer, long, long, pointer, pointer]
    found.reach.argtypes = [integer, integer]
    return found


def checked(code: int) -> None:
    assert code == 0, f"CUDA's error {code}"


def milliseconds(first: Any, last: Any) -> float:
    return float(cupy.cuda.get_elapsed_time(first, last))


class Products:
    """Matrix products of a GPU, as a model would run."""

    def __init__(self, gpu: int, rows: int, columns: int, depth: int) -> None:
        self.gpu = gpu
        with cupy.cuda.Device(gpu):
            shapes = ((rows, depth), (depth, columns))
            self._a, self._b = (cupy.random.random(one, dtype=cupy.float32).astype(cupy.float16) for one in shapes)
            self._c = cupy.empty((rows, columns), cupy.float16)
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self.run(10)
        self.count = max(4, int(15.0 / self.run(20) * 20))

    def start(self, count: int) -> tuple[Any, Any]:
        with cupy.cuda.Device(self.gpu), self.stream:
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(self.stream)
            for _ in range(count):
                cupy.matmul(self._a, self._b, out=self._c)
            last.record(self.stream)
        return first, last

    def run(self, count: int) -> float:
        first, last = self.start(count)
        last.synchronize()
        return milliseconds(first, last)


class Blocks:
    """The same number of blocks of each tensor, from a buffer of the sender to one of the receiver."""

    def __init__(self, library: ctypes.CDLL, kib: int, mib: int, sender: int, receiver: int) -> None:
        self._library, self.block_bytes = library, kib << 10
        self.pairs = (mib << 20) // TENSORS // self.block_bytes
        self.sender, self.receiver = sender, receiver
        self.bytes = self.pairs * TENSORS * self.block_bytes
        rng = np.random.default_rng(kib)
        self.source_ids, self.target_ids = (rng.permutation(2 * self.pairs)[: self.pairs] for _ in range(2))
        with cupy.cuda.Device(receiver):
            self.target = cupy.zeros((TENSORS, 2 * self.pairs, self.block_bytes), cupy.uint8)
            cupy.cuda.Device().synchronize()
        cupy.cuda.Device(sender).use()
        self.source = cupy.random.randint(0, 256, self.target.shape, dtype=cupy.uint8)
        self.ids = [cupy.asarray(ids.astype(np.int64)) for ids in (self.source_ids, self.target_ids)]
        self.segments = cupy.zeros(TENSORS * 128, cupy.uint8)
        self.stream = cupy.cuda.Stream(non_blocking=True, priority=-5)
        cupy.cuda.Device().synchronize()

    def prepare(self, ring: int) -> None:
        of_tensor = 2 * self.pairs * self.block_bytes
        first, last = (np.arange(TENSORS) * of_tensor + one.data.ptr for one in (self.source, self.target))
        first, last = first.astype(np.int64), last.astype(np.int64)
        checked(
            self._library.prepare(
                ring, first.ctypes.data, last.ctypes.data, TENSORS, self.block_bytes, self.pairs, self.segments.data.ptr
            )
        )

    def copy(self, ring: int, ctas: int, tensors: int = TENSORS) -> None:
        ids = [one.data.ptr for one in self.ids]
        segments = self.segments.data.ptr
        checked(self._library.run(ring, ctas, 1024, segments, tensors, *ids, self.stream.ptr))

    def contiguous(self) -> None:
        target, source = self.target.data.ptr, self.source.data.ptr
        cupy.cuda.runtime.memcpyAsync(target, source, self.bytes, ANY_KIND, self.stream.ptr)

    def pieces(self, kib: int) -> None:
        count = self.bytes // (kib << 10)
        places = np.random.default_rng(kib).permutation(count)
        target, source = self.target.data.ptr, self.source.data.ptr
        checked(self._library.run_pieces(target, source, kib << 10, count, places.ctypes.data, self.stream.ptr))

    def gb_per_s(self, work: Callable[[], None]) -> float:
        return self.bytes / self.median_ms(work) / 1e6

    def median_ms(self, work: Callable[[], None]) -> float:
        times = []
        for number in range(7):
            first, last = cupy.cuda.Event(), cupy.cuda.Event()
            first.record(self.stream)
            work()
            last.record(self.stream)
            last.synchronize()
            times += [milliseconds(first, last)] if number >= 2 else []
        return float(np.median(times))

    def check(self, ring: int, ctas: int) -> None:
        with cupy.cuda.Device(self.receiver):
            self.target.fill(0xEE)
            cupy.cuda.Device().synchronize()
        self.copy(ring, ctas)
        self.stream.synchronize()
        expected = cupy.full_like(self.source, 0xEE)
        expected[:, self.ids[1]] = self.source[:, self.ids[0]]
        found = cupy.empty_like(self.source)
        cupy.cuda.runtime.memcpy(found.data.ptr, self.target.data.ptr, found.nbytes, ANY_KIND)
        assert bool((found == expected).all()), f"{RINGS[ring]}, {ctas} CTAs: wrong bytes"

    def beside(self, products: Products, ring: int, ctas: int) -> tuple[float, float]:
        """How much longer the products take, and the rate of the copies meanwhile: of an eighth of the tensors each."""
        work = functools.partial(self.copy, ring, ctas, TENSORS // 8)
        alone_ms = float(np.median([products.run(products.count) for _ in range(3)]))
        once_ms = self.median_ms(work)
        most = int(3 * alone_ms / once_ms) + 4
        ends: list[Any] = []
        first = cupy.cuda.Event()

        def copy_on() -> None:
            work()
            ends.append(cupy.cuda.Event())
            ends[-1].record(self.stream)

        cupy.cuda.Device(self.sender).use()
        first.record(self.stream)
        copy_on()
        copy_on()  # the copies run when the products begin
        around = products.start(products.count)
        while len(ends) < most and not around[1].done:
            copy_on()
        around[1].synchronize()
        self.stream.synchronize()
        took_ms = milliseconds(*around)
        # Events of two GPUs do not compare; there the copies begin just before the products.
        begun_ms = milliseconds(first, around[0]) if self.sender == products.gpu else 0.0
        done = [milliseconds(first, end) for end in ends]
        inside = [end_ms for end_ms in done if begun_ms <= end_ms <= begun_ms + took_ms]
        rate = (len(inside) - 1) * self.bytes / 8 / (inside[-1] - inside[0]) / 1e6 if len(inside) > 1 else 0.0
        return took_ms / alone_ms - 1, rate


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--kib", type=int, nargs="+", default=[4, 32, 128])
    options.add_argument("--mib", type=int, default=512)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    library = compiled()
    rows: list[dict[str, Any]] = []

    def tell(**row: Any) -> None:
        rows.append(row)
        print(
            "  ".join(
                f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            ),
            flush=True,
        )

    ways = [(0, 0)]
    if cupy.cuda.runtime.getDeviceCount() > 1:
        checked(library.reach(1, 0))
        ways.append((1, 0))
    cupy.cuda.Device(0).use()
    for sender, receiver in ways:
        way = "one GPU" if sender == receiver else "NVLink"
        for kib in given.kib:
            blocks = Blocks(library, kib, given.mib, sender, receiver)
            ceiling = blocks.gb_per_s(blocks.contiguous)
            tell(way=way, KiB=kib, what="contiguous", GBps=ceiling)
            for piece_kib in (128, 512, 2048, 8192, 32768) if kib == given.kib[0] else ():
                rate = blocks.gb_per_s(functools.partial(blocks.pieces, piece_kib))
                tell(way=way, KiB=piece_kib, what="copy engine, a call a piece", GBps=rate, of_copy=rate / ceiling)
            for ring, name in RINGS.items():
                blocks.prepare(ring)
                blocks.check(ring, 16)
                for ctas in CTAS:
                    rate = blocks.gb_per_s(functools.partial(blocks.copy, ring, ctas))
                    tell(way=way, KiB=kib, what=name, CTAs=ctas, GBps=rate, of_copy=rate / ceiling)
            for gpu in dict.fromkeys((sender, receiver)) if kib == 32 else ():
                whose = "sender" if gpu == sender else "receiver"
                for shape, sizes in PRODUCTS.items():
                    products = Products(gpu, *sizes)
                    for ring, all_ctas in BESIDE.items() if gpu == sender else ((0, (8, 64)),):
                        blocks.prepare(ring)
                        for ctas in all_ctas:
                            slowed, rate = blocks.beside(products, ring, ctas)
                            what = {"what": RINGS[ring], "CTAs": ctas, "beside": f"{shape} of the {whose}"}
                            tell(way=way, KiB=kib, **what, GBps=rate, slowed=slowed)
    if given.json:
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
