"""Host memory of an exact size: page-locked where there is a GPU, plain RAM where there is none."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import paddle

_PORTABLE = 1  # cudaHostAllocPortable: page-locked for every GPU of the process


class HostMemory:
    """``size_bytes`` of zeroed or undefined memory, given back when the last reference (or array on it) is gone.

    Args:
        size_bytes: exact; nothing is rounded up but to whole pages.
        pinned: page-locked, reachable by every GPU.

    Raises:
        MemoryError: names the bytes asked for and the bytes available.
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self.address = 0
        self._owner: Any = None
        if size_bytes == 0:
            return
        self._owner = _pinned(size_bytes) if pinned else _pageable(size_bytes)
        self.address = self._owner.ptr if pinned else ctypes.addressof(ctypes.c_char.from_buffer(self._owner))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def array(self) -> np.ndarray:
        """The bytes as a writable array that keeps the memory alive."""
        return np.asarray(self)


def has_gpu() -> bool:
    """Whether Paddle can use a GPU here. Asked before any GPU place is made: 2.6 ends the process otherwise."""
    return bool(paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0)


def _pinned(size_bytes: int) -> Any:
    # CuPy's pinned pool rounds up to a power of two; this class does not use it.
    import cupy

    try:
        return cupy.cuda.PinnedMemory(size_bytes, _PORTABLE)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(_message(size_bytes, "page-locked ", str(error))) from error


def _pageable(size_bytes: int) -> mmap.mmap:
    # Linux promises more memory than it has, and ends the process when the pages are touched.
    if size_bytes > available_bytes():
        raise MemoryError(_message(size_bytes, "", "more than is free"))
    try:
        return mmap.mmap(-1, size_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(_message(size_bytes, "", str(error))) from error


def available_bytes() -> int:
    """Memory that the host can still give to this process."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _message(size_bytes: int, kind: str, reason: str) -> str:
    return f"{size_bytes} bytes of {kind}host memory were asked for, {available_bytes()} bytes are available ({reason})"
