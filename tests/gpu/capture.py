"""A CUDA graph that is captured while something else is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def capture() -> Iterator[None]:
    """A capture in CUDA's strictest mode, which forbids most calls of all other threads; checked to be whole."""
    import cupy
    from cupy.cuda import runtime

    capturing = cupy.cuda.Stream(non_blocking=True)
    target = cupy.zeros(256, "uint8")
    runtime.deviceSynchronize()
    with capturing:
        capturing.begin_capture(mode=runtime.streamCaptureModeGlobal)
        yield
        runtime.memsetAsync(target.data.ptr, 7, 256, capturing.ptr)
        graph = capturing.end_capture()
    graph.launch(capturing)
    capturing.synchronize()
    assert (target.get() == 7).all()
