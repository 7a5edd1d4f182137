"""Host memory of an exact size: page-locked where there is a GPU, plain RAM where there is none."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
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
        MemoryError: there is not so much.
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.size_bytes = size_bytes
        owner: Any = _pinned(size_bytes) if pinned else _pageable(size_bytes)
        self._owner = owner
        self.address: int = owner.ptr if pinned else ctypes.addressof(ctypes.c_char.from_buffer(owner))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def array(self) -> np.ndarray:
        """The bytes as a writable array that keeps the memory alive."""
        return np.asarray(self)


def allocate(sizes_bytes: Sequence[int], *, pinned: bool) -> list[HostMemory]:
    """Pieces of memory, all or none.

    Raises:
        MemoryError: names the bytes asked for in all, and those available.
    """
    total_bytes = sum(sizes_bytes)
    # Linux promises more memory than it has, and ends the process when the pages are touched.
    if total_bytes > available_bytes():
        raise MemoryError(_message(total_bytes, pinned, "more than is free"))
    pieces: list[HostMemory] = []
    try:
        for size_bytes in sizes_bytes:
            pieces.append(HostMemory(size_bytes, pinned=pinned))
    except MemoryError as error:
        pieces.clear()  # now: the exception keeps this frame, and with it the pieces, as long as it is handled
        raise MemoryError(_message(total_bytes, pinned, str(error))) from None
    return pieces


def has_gpu() -> bool:
    """Whether Paddle can use a GPU here. Asked before any GPU place is made: 2.6 ends the process otherwise."""
    return bool(paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0)


def _pinned(size_bytes: int) -> Any:
    # CuPy's pinned pool rounds up to a power of two; this class does not use it.
    import cupy

    try:
        return cupy.cuda.PinnedMemory(size_bytes, _PORTABLE)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(str(error)) from None


def _pageable(size_bytes: int) -> mmap.mmap:
    try:
        # Python's default is memory that a forked child would share.
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(str(error)) from None


def available_bytes() -> int:
    """Memory that the host can still give to this process."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _message(size_bytes: int, pinned: bool, reason: str) -> str:
    kind = "page-locked host" if pinned else "host"
    return f"{size_bytes} bytes of {kind} memory were asked for, {available_bytes()} bytes are available ({reason})"
