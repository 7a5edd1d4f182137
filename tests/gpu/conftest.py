"""The machine of the GPU tests: caches on the first GPU, host memory page-locked by CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import devices, streams
from tests.gpu import delay
from tests.machine import Machine


@pytest.fixture(scope="module", autouse=True)
def default_device() -> Iterator[None]:
    before = paddle.get_device()
    paddle.set_device(devices.name_of(0))
    yield
    paddle.set_device(before)


@pytest.fixture(scope="session")
def machine() -> Machine:
    import cupy

    def allocate_pinned(num_bytes: int) -> np.ndarray:
        pinned = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(num_bytes), 0)
        return np.frombuffer(pinned, np.uint8, num_bytes)

    return Machine(devices.place_of(0), allocate_pinned, lambda: cupy.cuda.runtime.deviceSynchronize())


@pytest.fixture
def paddle_stream() -> int:
    """The handle of Paddle's current stream, on which nothing is running."""
    import cupy

    delay.warm_up()
    cupy.cuda.runtime.deviceSynchronize()
    return streams.paddle_stream(0)


@pytest.fixture
def other_stream() -> Iterator[Any]:
    """A CuPy stream that waits for no other."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()
