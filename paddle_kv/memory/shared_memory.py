"""Host memory that other processes of the same user on the same host can map: anonymous files (memfd).

Such a file has no name in any folder. The kernel frees it when the last process that maps or holds it is gone, however
that process ended, so nothing is left behind by a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import secrets
import threading
import weakref
from dataclasses import dataclass

from ..errors import AttachError
from .host_memory import HostMemory, PageLock

# The size is final: one process that shortens the file would end the others by SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class SharedHandle:
    """Where another process finds the memory: descriptor ``descriptor`` of process ``process_id``. ``token`` says which
    memory is meant: numbers of processes and of descriptors are used again."""

    process_id: int
    descriptor: int
    token: str
    size_bytes: int


class SharedMemory(HostMemory):
    """``size_bytes`` of zeroed memory, or, with ``handle``, that of another process.

    It is given back when nothing in any process refers to it.

    Args:
        size_bytes: exact.
        pinned: as :meth:`page_lock`.
        handle: of the memory that is mapped; use :func:`map_shared`, which maps each memory once.

    Raises:
        MemoryError: there is not so much.
        AttachError: the memory is gone, or is not what the handle says.
    """

    def __init__(self, size_bytes: int, *, pinned: bool = False, handle: SharedHandle | None = None) -> None:
        self._descriptor = -1
        self._page_lock: PageLock | None = None
        self.size_bytes = size_bytes
        if handle is None:
            self._token = secrets.token_hex(16)
            self._descriptor = _create(self._token, size_bytes)
        else:
            self._token = handle.token
            self._descriptor = _open(handle)
        try:
            self._owner = mmap.mmap(self._descriptor, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(str(error)) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._owner))
        if pinned:
            self.page_lock()
        _mapped[self._token] = self

    def page_lock(self) -> None:
        """Makes it reachable by the GPUs of this process; again: does nothing.

        Raises:
            MemoryError: CUDA refuses.
        """
        if self._page_lock is None:
            self._page_lock = PageLock(self.address, self.size_bytes)

    def handle(self) -> SharedHandle:
        """For other processes, as long as this memory is not given back here."""
        return SharedHandle(os.getpid(), self._descriptor, self._token, self.size_bytes)

    def __del__(self) -> None:
        self._page_lock = None  # before the memory is unmapped
        if self._descriptor >= 0:
            os.close(self._descriptor)


def map_shared(handle: SharedHandle, *, pinned: bool = False) -> SharedMemory:
    """The memory of the handle, at one address in this process, however often it is asked for and whoever made it.

    Args:
        handle: of :meth:`SharedMemory.handle`.
        pinned: as :meth:`SharedMemory.page_lock`.

    Raises:
        AttachError: the memory is gone, or is not what the handle says.
        MemoryError: it cannot be page-locked.
    """
    with _mapping:
        known = _mapped.get(handle.token)
        if known is None:
            return SharedMemory(handle.size_bytes, pinned=pinned, handle=handle)
        if known.size_bytes != handle.size_bytes:
            raise AttachError(f"the memory has {known.size_bytes} bytes; {handle.size_bytes} were described")
        if pinned:
            known.page_lock()
    return known


def mapped_at(address: int) -> SharedMemory | None:
    """The shared memory of this process that has the address."""
    with _mapping:
        known = list(_mapped.values())
    return next((one for one in known if one.address <= address < one.address + one.size_bytes), None)


# Mapped twice it would be two memories for the tracking of blocks.
_mapped: weakref.WeakValueDictionary[str, SharedMemory] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def _renew_lock() -> None:
    global _mapping
    _mapping = threading.Lock()  # another thread may have had it when the process forked


os.register_at_fork(after_in_child=_renew_lock)


@functools.cache
def host_identity() -> str:
    """Names the running kernel and the space of process numbers: where a handle can be resolved."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _create(token: str, size_bytes: int) -> int:
    try:
        descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise MemoryError(str(error)) from None
    try:
        os.fchmod(descriptor, 0o600)
        # Pages that are missing when they are touched end the process; so they are asked for now.
        os.posix_fallocate(descriptor, 0, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise MemoryError(str(error)) from None
        raise
    return descriptor


def _open(handle: SharedHandle) -> int:
    where = f"/proc/{handle.process_id}/fd/{handle.descriptor}"
    gone = f"process {handle.process_id} is gone, or has given back the memory that it described"
    try:
        # Before it is opened: opening whatever else has that number by now may have effects, or wait.
        if os.readlink(where) != _link(handle.token):
            raise AttachError(gone)
        descriptor = os.open(where, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise AttachError(gone) from None
    except OSError as error:
        raise AttachError(f"the memory of process {handle.process_id} cannot be opened: {error.strerror}") from None
    try:
        if os.readlink(f"/proc/self/fd/{descriptor}") != _link(handle.token):
            raise AttachError(gone)
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise AttachError(f"the memory belongs to user {found.st_uid}, this process to {os.geteuid()}")
        if found.st_size != handle.size_bytes:
            raise AttachError(f"the memory has {found.st_size} bytes; {handle.size_bytes} were described")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise AttachError("the size of the memory is not sealed")
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    return descriptor


def _name(token: str) -> str:
    return f"paddle_kv-{token}"


def _link(token: str) -> str:
    return f"/memfd:{_name(token)} (deleted)"
