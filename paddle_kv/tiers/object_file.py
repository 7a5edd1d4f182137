"""Reading and writing parts of files at once, also where the system does less than it was asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from ..ops._library import tier_functions

DIRECT = os.O_DIRECT
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def open_file(folder: int, path: str, flags: int, *, direct: bool = False) -> int:
    """For its user alone if it is made. Raises OSError."""
    return os.open(path, flags | _FLAGS | (DIRECT if direct else 0), 0o600, dir_fd=folder)


def names_in(folder: int, path: str = ".") -> list[str]:
    """By a descriptor of its own: a child that is forked meanwhile must not inherit the lock of the folder's."""
    descriptor = open_file(folder, path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def write_range(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """All of it. Raises OSError."""
    if not _all(os.pwritev, descriptor, buffers, offset):
        raise OSError(errno.EIO, "nothing was written")


def read_range(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> bool:
    """Whether all of it was there. Raises OSError."""
    return _all(os.preadv, descriptor, buffers, offset)


Range = tuple[int, int, list[memoryview]]  # descriptor, offset, buffers
ALL_MOVED, FILE_ENDED = 0, -1

# Many ranges in one call, without the interpreter's lock; those that lie side by side in a file by one call of the
# system. For each ALL_MOVED, FILE_ENDED if not all of it was there to be read, or the number of an error.
read_ranges: Callable[[list[Range]], list[int]] = tier_functions()["read_ranges"]
write_ranges: Callable[[list[Range]], list[int]] = tier_functions()["write_ranges"]

# (folder, path, slab, [(offset, content)]): entries into a table, again in one call. ALL_MOVED or the number of an
# error: ENOENT also if ``slab`` is the descriptor of a file that has been deleted; -1: that is not asked.
write_table: Callable[[int, bytes, int, list[tuple[int, bytes]]], int] = tier_functions()["write_table"]


def _all(
    call: Callable[[int, Sequence[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview], offset: int
) -> bool:
    left = sum(map(len, buffers))
    while left:
        done = call(descriptor, buffers, offset)
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
        os.close(open_file(folder, "lock", os.O_RDWR, direct=True))
    except OSError:
        return False
    return True
