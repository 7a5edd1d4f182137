"""Device memory that other processes of the same user on the same host can map, by CUDA's handles (CUDA IPC).

A handle names a whole allocation of ``cudaMalloc``. Paddle's allocator cuts tensors out of large ones, so tensors are
described by the allocation and their place in it, and each allocation is opened once, however many tensors lie in it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import AttachError, CudaError
from .cuda_ipc import HANDLE_BYTES, driver


@dataclass(frozen=True)
class DeviceHandle:
    """Where another process finds an allocation of device memory.

    Attributes:
        process_id: of whoever made it.
        process_start: when that process began, in ticks of the kernel: numbers of processes are used again.
        device: UUID of the GPU, 32 hexadecimal digits.
        handle: CUDA's.
        size_bytes: of the allocation.
    """

    process_id: int
    process_start: int
    device: str
    handle: bytes
    size_bytes: int

    @property
    def token(self) -> str:
        """Names the memory."""
        told = f"{self.process_id} {self.process_start} {self.device} {self.handle.hex()}"
        return hashlib.sha256(told.encode()).hexdigest()[:32]


class Allocation:
    """An allocation of this process, as others are told of it."""

    def __init__(self, device: int, address: int) -> None:
        """The one around an address.

        Raises:
            ValueError: CUDA does not share such memory.
        """
        try:
            if not driver().can_be_exported(device, address):
                raise ValueError(
                    f"the memory at {address:#x} did not come from cudaMalloc (a memory pool, or virtual memory as of "
                    "expandable segments), which CUDA IPC does not share; switch such an allocator off"
                )
            self.address, self.size_bytes = driver().address_range(device, address)
            handle = driver().export(device, self.address)
            uuid = driver().uuid(device)
        except CudaError as error:
            raise ValueError(f"the memory at {address:#x} cannot be shared: {error}") from error
        self._handle = DeviceHandle(os.getpid(), process_start(os.getpid()), uuid, handle, self.size_bytes)

    def handle(self) -> DeviceHandle:
        """For other processes, as long as the memory and this process are there."""
        return self._handle


def allocations_around(device: int, addresses: Iterable[int]) -> list[Allocation]:
    """Those in which the addresses lie, each once. Raises as :class:`Allocation`."""
    found: list[Allocation] = []
    for address in addresses:
        if not any(one.address <= address < one.address + one.size_bytes for one in found):
            found.append(Allocation(device, address))
    return found


class DeviceMemory:
    """An allocation of another process, mapped for a device of this one until the last reference is gone.

    Use :func:`map_device`, which maps each allocation once.

    Attributes:
        on_other_gpu: the memory is not that of the device for which it is mapped.

    Raises:
        AttachError: the memory is gone, or CUDA does not open it here.
    """

    def __init__(self, handle: DeviceHandle, device: int) -> None:
        self.address = 0
        self.size_bytes = handle.size_bytes
        self.device = device
        self._handle = handle
        self._process_id = os.getpid()
        _check_owner(handle)
        try:
            self.on_other_gpu = driver().uuid(device) != handle.device
            self.address = driver().open(device, handle.handle)
            base, size_bytes = driver().address_range(device, self.address)
        except CudaError as error:
            raise AttachError(f"the device memory of process {handle.process_id} cannot be opened: {error}") from error
        if base + size_bytes - self.address < handle.size_bytes:
            raise AttachError(f"the device memory has {size_bytes} bytes; {handle.size_bytes} were described")

    def handle(self) -> DeviceHandle:
        """By which it was opened. It is the other process's to give it to others."""
        return self._handle

    def __del__(self) -> None:
        if self.address and self._process_id == os.getpid():  # CUDA does not survive a fork
            with contextlib.suppress(Exception):  # a lost device; the driver takes it back with the process
                driver().close(self.device, self.address)


def map_device(handle: DeviceHandle, device: int) -> DeviceMemory:
    """The memory of the handle, at one address for each device of this process, however often it is asked for.

    Raises:
        AttachError: it is in this process, gone, or CUDA does not open it here.
    """
    with _mapping:
        known = _mapped.get((handle.token, device))
        if known is None:
            known = _mapped[handle.token, device] = DeviceMemory(handle, device)
        if known.size_bytes != handle.size_bytes:
            raise AttachError(f"the memory has {known.size_bytes} bytes; {handle.size_bytes} were described")
    return known


_mapped: weakref.WeakValueDictionary[tuple[str, int], DeviceMemory] = weakref.WeakValueDictionary()
_mapping = threading.Lock()


def _renew_lock() -> None:
    global _mapping
    _mapping = threading.Lock()  # another thread may have had it when the process forked


os.register_at_fork(after_in_child=_renew_lock)


def is_device_handle(value: object) -> bool:
    """Unpickled it may hold anything."""
    if not isinstance(value, DeviceHandle):
        return False
    numbers = (value.process_id, value.process_start, value.size_bytes)
    if not all(type(one) is int and one >= 0 for one in numbers) or not isinstance(value.device, str):
        return False
    return type(value.handle) is bytes and len(value.handle) == HANDLE_BYTES


def process_start(process_id: int) -> int:
    """When a process began, in ticks of the kernel. FileNotFoundError: it is gone."""
    return _own_start(process_id) if process_id == os.getpid() else _read_start(process_id)


def _read_start(process_id: int) -> int:
    with open(f"/proc/{process_id}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])  # the name before may have spaces in it


@functools.cache
def _own_start(process_id: int) -> int:
    return _read_start(process_id)


def _check_owner(handle: DeviceHandle) -> None:
    gone = f"process {handle.process_id} is gone"
    try:
        if process_start(handle.process_id) != handle.process_start:
            raise AttachError(gone)
        user = os.stat(f"/proc/{handle.process_id}").st_uid
    except (FileNotFoundError, ProcessLookupError):
        raise AttachError(gone) from None
    if handle.process_id == os.getpid():
        raise AttachError(
            "the cache is in this process, and CUDA does not open memory where it was made; use the cache itself"
        )
    if user != os.geteuid():
        raise AttachError(f"the memory belongs to user {user}, this process to {os.geteuid()}")
