"""Host memory of an exact size: page-locked where there is a GPU, plain RAM where there is none."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..devices import has_gpu
from ..ops import _library
from ..ops.memcpy import is_stub_build
from .cgroups import headroom_bytes


class HostMemory:
    """``size_bytes`` of zeroed or undefined memory, given back when the last reference (or array on it) is gone.

    Args:
        size_bytes: exact; nothing is rounded up but to whole pages.
        pinned: page-locked, reachable by every GPU.

    Raises:
        MemoryError: there is not so much.
        NotImplementedError: page-locked, by operators that were built without CUDA.
    """

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        self.size_bytes = size_bytes
        self._page_lock: PageLock | None = None
        self._owner = _pageable(size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._owner))
        if pinned:
            # A forked child cannot use it, and the pages that a GPU writes have to stay the parent's.
            self._owner.madvise(mmap.MADV_DONTFORK)
            with contextlib.suppress(OSError):  # a system without huge pages
                self._owner.madvise(mmap.MADV_HUGEPAGE)
            self._page_lock = PageLock(self.address, size_bytes)

    def __del__(self) -> None:
        self._page_lock = None  # before the memory is unmapped

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def array(self) -> np.ndarray:
        """The bytes as a writable array that keeps the memory alive."""
        return np.asarray(self)


def allocate(
    sizes_bytes: Sequence[int], *, pinned: bool, make: Callable[..., HostMemory] = HostMemory
) -> list[HostMemory]:
    """Pieces of memory, all or none; each made by ``make(size_bytes, pinned=pinned)``.

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
            pieces.append(make(size_bytes, pinned=pinned))
    except MemoryError as error:
        pieces.clear()  # now: the exception keeps this frame, and with it the pieces, as long as it is handled
        raise MemoryError(_message(total_bytes, pinned, str(error))) from None
    return pieces


def can_page_lock() -> bool:
    """Whether there is a GPU, and operators that were built for it."""
    return has_gpu() and not is_stub_build()


@functools.cache
def _page_lock_functions() -> tuple[Any, Any]:
    add, remove = _functions("paddle_kv_page_lock_add", "paddle_kv_page_lock_remove")
    add.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    remove.argtypes = [ctypes.c_void_p]
    return add, remove


def _functions(*names: str) -> list[Any]:
    library = ctypes.CDLL(str(_library.LIBRARY))  # loaded already: the same one
    try:
        return [getattr(library, name) for name in names]
    except AttributeError:
        raise NotImplementedError(
            "page-locked memory was asked for, but these operators were built without CUDA"
        ) from None


class PageLock:
    """Makes memory that is mapped already page-locked, as long as this object lives.

    Args:
        address: of whole pages.
        size_bytes: of them.

    Raises:
        MemoryError: CUDA refuses.
        NotImplementedError: the operators were built without CUDA.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address = 0
        add, self._remove = _page_lock_functions()
        _check(add(address, size_bytes))
        self._address = address

    def __del__(self) -> None:
        if self._address:
            self._remove(self._address)


def _check(code: int) -> None:
    if code:
        from cupy.cuda.runtime import CUDARuntimeError

        raise MemoryError(str(CUDARuntimeError(code)))


def _pageable(size_bytes: int) -> mmap.mmap:
    try:
        # Python's default is memory that a forked child would share.
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(str(error)) from None


def available_bytes() -> int:
    """Memory that the host, and the control groups of a container, can still give to this process."""
    headroom = headroom_bytes()
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                return available if headroom is None else min(available, headroom)
    return 0


def _message(size_bytes: int, pinned: bool, reason: str) -> str:
    kind = "page-locked host" if pinned else "host"
    return f"{size_bytes} bytes of {kind} memory were asked for, {available_bytes()} bytes are available ({reason})"


class _Foreign:
    """Memory that somebody else owns, as NumPy wants to see it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__ = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def bytes_at(address: int, size_bytes: int, owned: Sequence[HostMemory]) -> np.ndarray:
    """Memory as a writable array; where it lies in one of ``owned``, the array keeps it alive."""
    for memory in owned:
        if memory.address <= address < memory.address + memory.size_bytes:
            offset = address - memory.address
            return memory.array()[offset : offset + size_bytes]
    return np.asarray(_Foreign(address, size_bytes))
