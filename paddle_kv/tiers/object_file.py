"""Reading and writing one file at once, also where the system does less than it was asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

DIRECT = os.O_DIRECT
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def write_file(folder: int, path: str, buffers: Sequence[memoryview], *, direct: bool) -> None:
    """Makes the file, or overwrites one of the same size. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | _FLAGS | (DIRECT if direct else 0)
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        if not _all(os.pwritev, descriptor, buffers, 0):
            raise OSError(errno.EIO, "nothing was written", path)
    finally:
        os.close(descriptor)


def open_file(folder: int, path: str, *, direct: bool) -> int:
    return os.open(path, os.O_RDONLY | _FLAGS | (DIRECT if direct else 0), dir_fd=folder)


def read_range(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> bool:
    """Whether all of it was there. Raises OSError."""
    return _all(os.preadv, descriptor, buffers, offset)


def _all(call: object, descriptor: int, buffers: Sequence[memoryview], offset: int) -> bool:
    left = sum(map(len, buffers))
    while left:
        done = call(descriptor, buffers, offset)  # type: ignore[operator]
        if not done:
            return False  # the end of the file
        left -= done
        if left:
            offset += done
            buffers = _behind(buffers, done)
    return True


def _behind(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        rest.append(buffer[min(done, len(buffer)) :])
        done = max(0, done - len(buffer))
    return [buffer for buffer in rest if len(buffer)]


def takes_direct_io(folder: int) -> bool:
    """Whether the file system has direct I/O."""
    try:
        descriptor = os.open("lock", os.O_RDWR | _FLAGS | DIRECT, dir_fd=folder)
    except OSError:
        return False
    os.close(descriptor)
    return True
