"""A model beside the transfers: matrix products in a CUDA graph, to see how much either slows the other.

Products that are launched one by one wait for the driver's lock, which copies take too; servers replay graphs.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Literal

LoadName = Literal["none", "gemm", "gemv"]
LOADS: tuple[LoadName, ...] = ("none", "gemm", "gemv")
_SHAPES = {"gemm": (4096, 8192, 8192, 60), "gemv": (16, 8192, 8192, 900)}  # m, n, k, products
WORKSPACE_BYTES = 64 << 20  # of cuBLAS: in a graph it would be allocated for each product
_FLOAT16, _COMPUTE_FLOAT32 = 2, 68  # of CUDA's and cuBLAS's enumerations


class ComputeLoad:
    """``gemm``: 60 products 4096x8192x8192; ``gemv``: 900 of 16x8192x8192; both float16 on random data."""

    def __init__(self, name: LoadName) -> None:
        import cupy

        m, n, k, products = _SHAPES[name]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        rng = cupy.random.default_rng(0)
        self._a = rng.standard_normal((m, k), dtype="float32").astype("float16")
        # More weights than the L2 holds, as the layers of a model are.
        self._b = [rng.standard_normal((k, n), dtype="float32").astype("float16") for _ in range(4)]
        self._c = cupy.empty((m, n), "float16")
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._elapsed = cupy.cuda.get_elapsed_time
        self._workspace = cupy.empty(WORKSPACE_BYTES, "uint8")
        product = Product(self.stream, self._workspace)
        product(self._a, self._b[0], self._c)  # kernels are loaded before they are captured
        expected = cupy.matmul(self._a[:8], self._b[0])
        cupy.cuda.Device().synchronize()
        if not cupy.allclose(self._c[:8], expected, rtol=0.05, atol=1.0):
            raise RuntimeError("cuBLAS and CuPy differ in a product of matrices")
        self.stream.begin_capture()
        for i in range(products):
            product(self._a, self._b[i % len(self._b)], self._c)
        self._graph = self.stream.end_capture()
        self._graph.upload(self.stream)
        cupy.cuda.Device().synchronize()

    @property
    def span(self) -> tuple[Any, Any]:
        """The events around the products that were started last."""
        return self._start, self._end

    def start(self) -> None:
        """Twice, and the second time counts: behind a pause the products run at another clock than behind others."""
        self._graph.launch(self.stream)
        self._start.record(self.stream)
        self._graph.launch(self.stream)
        self._end.record(self.stream)

    def wait_ms(self) -> float:
        """Duration of the products that were started and count."""
        self._end.synchronize()
        return float(self._elapsed(self._start, self._end))

    def alone_ms(self) -> float:
        """Median of three runs with nothing else on the GPU."""
        times = []
        for _ in range(3):
            self.start()
            times.append(self.wait_ms())
        return sorted(times)[1]


class Product:
    """c = a @ b by cuBLAS, on one stream. CuPy's own call refuses to be captured."""

    def __init__(self, stream: Any, workspace: Any) -> None:
        self._library, self._handle = _cublas(), ctypes.c_void_p()
        self._call("Create_v2", ctypes.byref(self._handle))
        self._call("SetStream_v2", self._handle, ctypes.c_void_p(stream.ptr))
        size = ctypes.c_size_t(workspace.nbytes)
        self._call("SetWorkspace_v2", self._handle, ctypes.c_void_p(workspace.data.ptr), size)

    def __call__(self, a: Any, b: Any, c: Any) -> None:
        (m, k), n = a.shape, b.shape[1]
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        at = [ctypes.c_void_p(matrix.data.ptr) for matrix in (b, a, c)]
        # cuBLAS counts by columns: the transposed of c is the product of the transposed of b and a.
        self._call("GemmEx", self._handle, 0, 0, n, m, k, ctypes.byref(one), at[0], _FLOAT16, n, at[1], _FLOAT16, k,
                   ctypes.byref(zero), at[2], _FLOAT16, n, _COMPUTE_FLOAT32, -1)  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"cublas{name}")(*arguments)
        if status != 0:
            raise RuntimeError(f"cublas{name} returned {status}")


@functools.cache
def _cublas() -> ctypes.CDLL:
    """The library that CuPy has loaded."""
    import cupy

    cupy.matmul(*(cupy.zeros((16, 16), "float16"),) * 2)
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublas.so" in line]
    if not paths:
        raise RuntimeError("CuPy has loaded no libcublas.so")
    return ctypes.CDLL(paths[0])


def beside(load: ComputeLoad, enqueue: Any, stream: Any, transfer_ms: float) -> tuple[float, float]:
    """(milliseconds of one transfer, slowdown of the load in percent) while both run. Transfers outlast the load."""
    import cupy

    alone_ms = load.alone_ms()  # just before: clocks differ between a GPU that has idled and one that has not
    repeats = max(2, round(2.5 * alone_ms / transfer_ms))
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    load.start()
    start.record(stream)
    marks = []
    for _ in range(repeats):
        enqueue()
        mark = cupy.cuda.Event()
        mark.record(stream)
        marks.append(mark)
    end.record(stream)
    load_ms = load.wait_ms()
    end.synchronize()
    elapsed = [float(cupy.cuda.get_elapsed_time(start, mark)) for mark in marks]
    done_beside = sum(ms <= load_ms for ms in elapsed) or 1  # those that ran while the load did
    return elapsed[done_beside - 1] / done_beside, 100 * (load_ms / alone_ms - 1)
