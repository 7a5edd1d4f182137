"""A kernel that keeps a stream busy for a given time: what waits for the stream comes late, what does not is early."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np

SOURCE = r"""
__device__ unsigned long long now_ns() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
extern "C" __global__ void delay(unsigned long long duration_ns) {
  const unsigned long long start = now_ns();
  while (now_ns() - start < duration_ns) __nanosleep(1000);
}
"""


def _kernel() -> Any:
    import cupy

    return _kernel_on(cupy.cuda.Device().id)


@functools.cache
def _kernel_on(gpu: int) -> Any:
    """Of the current GPU: a kernel is loaded for each."""
    import cupy

    kernel = cupy.RawModule(code=SOURCE).get_function("delay")
    kernel((1,), (1,), (np.uint64(0),))  # loading a kernel may wait for the whole device: not in the middle of a test
    cupy.cuda.Device().synchronize()
    return kernel


def cupy_stream(handle: int) -> Any:
    """A CuPy stream object for a stream that somebody else owns."""
    import cupy

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # its successor needs an object, of which Paddle 2.6 has none
        return cupy.cuda.ExternalStream(handle)


def warm_up() -> None:
    """Loads the kernel."""
    _kernel()


def busy(stream: Any, milliseconds: float) -> None:
    """Occupies ``stream`` (a CuPy stream or a handle) from now on; returns at once."""
    kernel = _kernel()
    with cupy_stream(stream) if isinstance(stream, int) else stream:
        kernel((1,), (1,), (np.uint64(milliseconds * 1e6),))


def occupy(stream: Any, milliseconds: float) -> None:
    """Takes all multiprocessors from now on: other kernels, of whatever priority, do not run meanwhile; copies do."""
    import cupy

    attributes = cupy.cuda.Device().attributes
    ctas = attributes["MultiProcessorCount"] * attributes["MaxThreadsPerMultiProcessor"] // 1024
    with stream:
        _kernel()((ctas,), (1024,), (np.uint64(milliseconds * 1e6),))
