"""A model beside the transfers: matrix products on a stream of their own, to see how much either slows the other."""

from __future__ import annotations

from typing import Any, Literal

LoadName = Literal["none", "gemm", "gemv"]
LOADS: tuple[LoadName, ...] = ("none", "gemm", "gemv")
_SHAPES = {"gemm": (4096, 8192, 8192, 60), "gemv": (16, 8192, 8192, 900)}  # m, n, k, products


class ComputeLoad:
    """``gemm``: 60 products 4096x8192x8192; ``gemv``: 900 of 16x8192x8192; both float16 on random data."""

    def __init__(self, name: LoadName) -> None:
        import cupy

        m, n, k, self._products = _SHAPES[name]
        self.stream = cupy.cuda.Stream(non_blocking=True)
        rng = cupy.random.default_rng(0)
        self._a = rng.standard_normal((m, k), dtype="float32").astype("float16")
        # More weights than the L2 holds, as the layers of a model are.
        self._b = [rng.standard_normal((k, n), dtype="float32").astype("float16") for _ in range(4)]
        self._c = cupy.empty((m, n), "float16")
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._matmul, self._elapsed = cupy.matmul, cupy.cuda.get_elapsed_time
        cupy.cuda.Device().synchronize()

    @property
    def span(self) -> tuple[Any, Any]:
        """The events around the products that were started last."""
        return self._start, self._end

    def start(self) -> None:
        with self.stream:
            self._start.record(self.stream)
            for i in range(self._products):
                self._matmul(self._a, self._b[i % len(self._b)], out=self._c)
            self._end.record(self.stream)

    def wait_ms(self) -> float:
        """Duration of the products that were started."""
        self._end.synchronize()
        return float(self._elapsed(self._start, self._end))

    def alone_ms(self) -> float:
        """Median of three runs with nothing else on the GPU."""
        times = []
        for _ in range(4):
            self.start()
            times.append(self.wait_ms())
        return sorted(times[1:])[1]


def beside(load: ComputeLoad, enqueue: Any, stream: Any, transfer_ms: float) -> tuple[float, float]:
    """(milliseconds of one transfer, slowdown of the load in percent) while both run. Transfers outlast the load."""
    import cupy

    alone_ms = load.alone_ms()  # just before: clocks differ between a GPU that has idled and one that has not
    repeats = max(2, round(1.5 * alone_ms / transfer_ms))
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
