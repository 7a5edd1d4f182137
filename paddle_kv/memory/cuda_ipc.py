"""CUDA's calls for memory that two processes share, of the driver itself: CuPy lacks some of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from ..errors import CudaError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_CAN_BE_EXPORTED = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE


class _Handle(ctypes.Structure):  # the driver takes it by value
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """The calls of ``libcuda.so.1``. Devices are CUDA ordinals, addresses and sizes integers.

    Each raises CudaError with CUDA's name of what went wrong.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NotImplementedError(f"there is no CUDA driver here: {error}") from None
        self._call("cuInit", ctypes.c_uint(0))

    def uuid(self, device: int) -> str:
        """Which GPU it is, the same in each process: 32 hexadecimal digits."""
        found = (ctypes.c_uint8 * 16)()
        self._call("cuDeviceGetUuid_v2", found, ctypes.c_int(self._device(device)))
        return bytes(found).hex()

    def address_range(self, device: int, address: int) -> tuple[int, int]:
        """The allocation around an address: its first byte, and its size."""
        base, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._context(device):
            self._call(
                "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size_bytes), ctypes.c_uint64(address)
            )
        return int(base.value), int(size_bytes.value)

    def can_be_exported(self, device: int, address: int) -> bool:
        """Whether the memory came from cudaMalloc: no memory of a pool or of the virtual memory calls did."""
        found = ctypes.c_uint64()  # CUDA writes a byte, or four
        with self._context(device):
            self._call(
                "cuPointerGetAttribute", ctypes.byref(found), ctypes.c_int(_CAN_BE_EXPORTED), ctypes.c_uint64(address)
            )
        return bool(found.value)

    def export(self, device: int, base: int) -> bytes:
        """The handle of an allocation, by which other processes open it."""
        handle = _Handle()
        with self._context(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Maps the allocation for a device; its first byte here."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        with self._context(device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return int(address.value)

    def close(self, device: int, address: int) -> None:
        """Takes the mapping away."""
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _device(self, ordinal: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device.value

    @contextlib.contextmanager
    def _context(self, ordinal: int) -> Iterator[None]:
        """The context that CUDA's run-time uses on this device is current meanwhile, in whatever thread."""
        device, context = ctypes.c_int(self._device(ordinal)), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code:
            named = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(named))
            text = (named.value or b"an unknown error").decode()
            raise CudaError(text, code, f"{name}: {text}")


@functools.cache
def driver() -> Driver:
    """The one of this process."""
    return Driver()
