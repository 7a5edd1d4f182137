"""CUDA's calls for shared memory, over a stand-in for its driver that keeps allocations and contexts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv import CudaError
from paddle_kv.memory import cuda_ipc
from paddle_kv.memory.cuda_ipc import HANDLE_BYTES, Driver

HANDLE = bytes(range(HANDLE_BYTES))  # a zero in it, first of all
BASE, SIZE_BYTES = (5 << 40) + 512, 6 << 32
HERE = 7 << 41  # where an opened allocation lies
LAZY_PEER_ACCESS, IS_LEGACY_CUDA_IPC_CAPABLE = 1, 10  # of cuda.h
NAMES = {1: b"CUDA_ERROR_INVALID_VALUE"}


class FakeCuda:
    """Device 3 has the handle 103 and the context 203; one allocation lies there."""

    def __init__(self) -> None:
        self.initialised: list[int] = []
        self.retained: list[int] = []
        self.current: list[int] = []
        self.opened: list[int] = []
        self.exportable = 1
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = getattr(type(self), f"do_{name}")
        return lambda *given: self.codes.get(name) or call(self, *given) or 0

    def do_cuInit(self, flags: ctypes.c_uint) -> None:
        self.initialised.append(flags.value)

    def do_cuDeviceGet(self, device: Any, ordinal: ctypes.c_int) -> None:
        device._obj.value = 100 + ordinal.value

    def do_cuDeviceGetUuid_v2(self, uuid: Any, device: ctypes.c_int) -> None:
        uuid[:] = bytes([device.value, *range(15)])

    def do_cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> None:
        context._obj.value = 100 + device.value
        self.retained.append(device.value)

    def do_cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> None:
        assert not self.current
        self.retained.remove(device.value)

    def do_cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        assert context.value is not None
        self.current.append(context.value)

    def do_cuCtxPopCurrent_v2(self, context: Any) -> None:
        context._obj.value = self.current.pop()

    def do_cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        assert self.current == [203]
        if not BASE <= address.value < BASE + SIZE_BYTES:
            return 1
        base._obj.value, size._obj.value = BASE, SIZE_BYTES
        return 0

    def do_cuPointerGetAttribute(self, found: Any, attribute: ctypes.c_int, address: ctypes.c_uint64) -> None:
        assert self.current == [203]
        assert (attribute.value, address.value) == (IS_LEGACY_CUDA_IPC_CAPABLE, BASE + 1)
        found._obj.value = self.exportable

    def do_cuIpcGetMemHandle(self, handle: Any, base: ctypes.c_uint64) -> None:
        assert self.current == [203]
        assert base.value == BASE
        ctypes.memmove(ctypes.byref(handle._obj), HANDLE, HANDLE_BYTES)

    def do_cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> None:
        assert self.current == [203]
        assert (bytes(handle), flags.value) == (HANDLE, LAZY_PEER_ACCESS)
        address._obj.value = HERE
        self.opened.append(HERE)

    def do_cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> None:
        assert self.current == [203]
        self.opened.remove(address.value)

    def do_cuGetErrorName(self, code: ctypes.c_int, name: Any) -> int:
        name._obj.value = NAMES.get(code.value)
        return 0 if code.value in NAMES else 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """As each test leaves it: nothing is current, nothing retained."""
    fake = FakeCuda()
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": fake}.__getitem__)
    yield fake
    assert (fake.current, fake.retained) == ([], [])


def test_what_cuda_is_asked(cuda: FakeCuda) -> None:
    driver = Driver()
    assert cuda.initialised == [0]
    assert driver.uuid(3) == "67" + bytes(range(15)).hex()
    assert driver.address_range(3, BASE + 5) == (BASE, SIZE_BYTES)
    assert driver.can_be_exported(3, BASE + 1) is True
    cuda.exportable = 0
    assert driver.can_be_exported(3, BASE + 1) is False
    assert driver.export(3, BASE) == HANDLE
    assert driver.open(3, HANDLE) == HERE
    assert cuda.opened == [HERE]
    driver.close(3, HERE)
    assert cuda.opened == []


@pytest.mark.parametrize(
    ("call", "ask"),
    [
        ("cuMemGetAddressRange_v2", lambda driver: driver.address_range(3, BASE)),
        ("cuIpcGetMemHandle", lambda driver: driver.export(3, BASE)),
        ("cuIpcOpenMemHandle_v2", lambda driver: driver.open(3, HANDLE)),
        ("cuCtxPushCurrent_v2", lambda driver: driver.close(3, HERE)),
        ("cuDeviceGet", lambda driver: driver.uuid(3)),
    ],
)
@pytest.mark.parametrize(("code", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (4711, "an unknown error")])
def test_what_cuda_refuses_has_its_name(
    cuda: FakeCuda, call: str, ask: Callable[[Driver], object], code: int, name: str
) -> None:
    driver = Driver()
    cuda.codes[call] = code
    with pytest.raises(CudaError, match=f"^{call}: {name}$") as raised:
        ask(driver)
    assert (raised.value.name, raised.value.code) == (name, code)
    cuda.codes.clear()
    driver.export(3, BASE)  # the next call is not hurt


def test_a_process_asks_for_its_driver_once(cuda: FakeCuda) -> None:
    cuda_ipc.driver.cache_clear()
    try:
        assert cuda_ipc.driver() is cuda_ipc.driver()
        assert cuda.initialised == [0]
    finally:
        cuda_ipc.driver.cache_clear()
