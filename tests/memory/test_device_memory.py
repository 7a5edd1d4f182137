"""Device memory of another process, with a fake of CUDA's calls: what is opened how often, where, given back when."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import paddle
import pytest

from paddle_kv import AttachError, CudaError, DeviceCache, KVCacheSpec, devices
from paddle_kv.memory import device_cache, device_memory
from paddle_kv.memory.device_memory import (
    Allocation,
    DeviceHandle,
    allocations_around,
    is_device_handle,
    map_device,
    process_start,
)
from paddle_kv.memory.exported import Exported
from paddle_kv.memory.heads import heads_of
from paddle_kv.peers import PeerBlocks
from tests.schedule.rig import make_spec

BLOCKS = 5
GPU = "0123456789abcdef" * 2
FAR = 1 << 40  # where the fake maps what it opens


class FakeDriver:
    """Allocations are ranges of addresses; opened, each lies elsewhere."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.ranges = list(ranges)
        self.opened: dict[int, bytes] = {}
        self.calls: list[str] = []
        self.exportable = True
        self.refusal: CudaError | None = None
        self.missing_bytes = 0

    def uuid(self, device: int) -> str:
        return GPU if device == 0 else GPU[::-1]

    def address_range(self, device: int, address: int) -> tuple[int, int]:
        if address in self.opened:
            return address, self._size(self.opened[address]) - self.missing_bytes
        return next((first, size) for first, size in self.ranges if first <= address < first + size)

    def can_be_exported(self, device: int, address: int) -> bool:
        return self.exportable

    def export(self, device: int, base: int) -> bytes:
        self.calls.append("export")
        size = next(size for first, size in self.ranges if first == base)
        return b"%064d" % (base * 1_000_000 + size)

    def open(self, device: int, handle: bytes) -> int:
        self.calls.append("open")
        if self.refusal is not None:
            raise self.refusal
        address = FAR * (len(self.calls) + 1)
        self.opened[address] = handle
        return address

    def close(self, device: int, address: int) -> None:
        self.calls.append("close")
        del self.opened[address]

    @staticmethod
    def _size(handle: bytes) -> int:
        return int(handle) % 1_000_000


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    monkeypatch.setattr(device_memory, "driver", lambda: made)
    monkeypatch.setattr(device_cache, "_gpu_number", lambda device: 0)
    yield made
    gc.collect()
    assert made.opened == {}


def exported_by_another(fake: FakeDriver, spec: KVCacheSpec, chunks: int = 2) -> tuple[Exported, dict[str, list[int]]]:
    """As a process with a GPU would describe a cache of which the tensors lie in so many allocations of Paddle's; and
    the addresses there."""
    pointers: dict[str, list[int]] = {}
    places = [(name, layer) for layer in range(spec.num_layers) for name in spec.tensor_names]
    ends = [1000 * 512 * (chunk + 1) for chunk in range(chunks)]
    starts = list(ends)
    for number, (name, _) in enumerate(places):
        chunk = number % chunks
        pointers.setdefault(name, []).append(ends[chunk] + 256)
        ends[chunk] += 256 + -(-BLOCKS * spec.tensor_block_bytes(name) // 256) * 256
    fake.ranges = [(start, end - start + 512) for start, end in zip(starts, ends, strict=True)]
    cache = DeviceCache(spec, BLOCKS, "cpu")
    cache.device_id, cache._pointers = 0, pointers  # as if it were on a GPU
    exported = cache.export()
    assert cache.export() is exported
    assert cache.memory_id == exported.memory_id
    other = os.getppid()
    handles = [
        dataclasses.replace(one, process_id=other, process_start=process_start(other)) for one in exported.allocations
    ]
    return pickle.loads(pickle.dumps(dataclasses.replace(exported, allocations=tuple(handles)))), pointers


def test_each_allocation_is_described_and_opened_once(fake: FakeDriver) -> None:
    spec = make_spec()
    exported, pointers = exported_by_another(fake, spec, 3)
    assert fake.calls == ["export"] * 3
    assert exported.device == f"cuda:{GPU}"
    assert [(one.size_bytes, one.device) for one in exported.allocations] == [(size, GPU) for _, size in fake.ranges]
    cache = DeviceCache.attach(spec, exported)
    again = DeviceCache.attach(spec, exported)
    assert fake.calls == ["export"] * 3 + ["open"] * 3
    bases = {handle: address for address, handle in fake.opened.items()}
    for name, layers in pointers.items():
        for layer, there in enumerate(layers):
            first, size = next((first, size) for first, size in fake.ranges if first <= there < first + size)
            here = bases[b"%064d" % (first * 1_000_000 + size)] + there - first
            assert cache.pointer(name, layer) == again.pointer(name, layer) == here
    assert cache.domain is again.domain
    assert cache.memory_id == exported.memory_id
    del cache
    gc.collect()
    assert "close" not in fake.calls  # the other one has it
    del again
    gc.collect()
    assert fake.calls[-3:] == ["close"] * 3
    DeviceCache.attach(spec, exported)  # again from the beginning
    assert fake.calls.count("open") == 6


def test_blocks_of_a_peer_keep_the_mapping(fake: FakeDriver) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    blocks = PeerBlocks(DeviceCache.attach(spec, exported))
    gc.collect()
    assert len(fake.opened) == 2
    assert blocks.memory_id == exported.memory_id
    assert (blocks.num_free_blocks, blocks.pinned_bytes) == (0, 0)
    assert not blocks.in_host_memory
    with pytest.raises(NotImplementedError, match="cannot look into device memory"):
        blocks.view("key", 0, 0)
    with pytest.raises(ValueError, match="in memory of another process"):
        blocks.export()
    blocks.close()
    del blocks
    gc.collect()
    assert fake.opened == {}


@pytest.mark.parametrize("gpu", [0, 1])
def test_whether_the_memory_is_of_the_gpu_that_reaches_it(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, gpu: int
) -> None:
    spec = make_spec(extra={})
    exported, _ = exported_by_another(fake, spec)
    monkeypatch.setattr(device_cache, "_gpu_number", lambda device: gpu)
    cache = DeviceCache.attach(spec, exported)
    assert cache.device_id == gpu
    blocks = PeerBlocks(cache)
    part = heads_of(blocks, 0, 1)
    assert cache.on_other_gpu == blocks.on_other_gpu == part.on_other_gpu == bool(gpu)
    assert not blocks.in_host_memory and not part.in_host_memory


def test_memory_of_which_a_part_is_of_another_gpu(fake: FakeDriver) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    first, second = exported.allocations
    assert isinstance(second, DeviceHandle)
    handles = (first, dataclasses.replace(second, device=GPU[::-1]))
    assert DeviceCache.attach(spec, dataclasses.replace(exported, allocations=handles)).on_other_gpu


def test_a_cache_that_is_to_be_shared_is_refused_when_it_is_made(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when a peer asks for it: on a GPU Paddle's allocator decides."""
    zeros = device_cache._zeros
    monkeypatch.setattr(device_cache, "_place", lambda device: "of a GPU")
    monkeypatch.setattr(device_cache, "_zeros", lambda shape, dtype, place: zeros(shape, dtype, paddle.CPUPlace()))
    monkeypatch.setattr(device_cache, "_device_id", lambda tensor: 0)
    fake.ranges, fake.exportable = [(0, 1 << 48)], False
    assert DeviceCache(make_spec(), 2, "gpu").device_id == 0
    with pytest.raises(ValueError, match="did not come from cudaMalloc"):
        DeviceCache(make_spec(), 2, "gpu", shared=True)
    fake.exportable = True
    DeviceCache(make_spec(), 2, "gpu", shared=True)
    assert fake.calls == ["export"]


def test_a_cache_of_another_process_has_no_tensors(fake: FakeDriver) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    cache = DeviceCache.attach(spec, exported)
    with pytest.raises(NotImplementedError, match="is not a Paddle tensor here"):
        cache.tensor("key", 0)
    with pytest.raises(IndexError):
        cache.pointer("key", spec.num_layers)
    with pytest.raises(ValueError, match="name = 'nothing'"):
        cache.pointer("nothing", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process_start": 1}, "is gone"),
        ({"process_id": 2**22 + 5}, "is gone"),
        ({"size_bytes": 40}, "does not lie in the memory"),
        ({"size_bytes": -1}, "tuple of handles"),
        ({"process_start": True}, "tuple of handles"),
        ({"handle": b"short"}, "tuple of handles"),
        ({"handle": "0" * 64}, "tuple of handles"),
        ({"device": 7}, "tuple of handles"),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_handles_that_are_refused(fake: FakeDriver, changes: dict[str, Any], message: str) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    handles = tuple(dataclasses.replace(one, **changes) for one in exported.allocations)
    with pytest.raises(AttachError, match=message):
        DeviceCache.attach(spec, dataclasses.replace(exported, allocations=handles))
    assert "open" not in fake.calls


def test_a_handle_of_this_process_is_refused(fake: FakeDriver) -> None:
    """CUDA would say no more than that it does not open it."""
    own = DeviceHandle(os.getpid(), process_start(os.getpid()), GPU, b"%064d" % 900, 900)
    with pytest.raises(AttachError, match="is in this process"):
        map_device(own, 0)
    assert fake.calls == []


def test_a_process_of_another_user(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    owner = os.stat(f"/proc/{os.getppid()}").st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(AttachError, match=f"belongs to user {owner}, this process to {owner + 1}"):
        DeviceCache.attach(spec, exported)
    assert "open" not in fake.calls


def test_the_first_process_began_at_0() -> None:
    handle = DeviceHandle(1, 0, GPU, b"%064d" % 900, 900)
    assert is_device_handle(handle)
    assert not is_device_handle(dataclasses.replace(handle, process_start=-1))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_when_a_process_began() -> None:
    """A number of a process that is used again is another process."""
    starts = []
    for name in ("plain", "a) b (1 2", "plain"):
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            with open("/proc/self/comm", "w") as comm:
                comm.write(name)
            os.write(there, b"!")
            signal.pause()
        assert os.read(here, 1) == b"!"
        starts.append(process_start(child))
        assert process_start(child) == starts[-1]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with pytest.raises(FileNotFoundError):
            process_start(child)
        for descriptor in (here, there):
            os.close(descriptor)
        time.sleep(0.03)  # the kernel counts hundredths of seconds
    device_memory._own_start.cache_clear()  # as if nobody had asked yet
    assert process_start(os.getpid()) < starts[0] < starts[1] < starts[2] < starts[0] + 60 * os.sysconf("SC_CLK_TCK")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_mapping_alone(fake: FakeDriver) -> None:
    other = os.getppid()
    memory = map_device(DeviceHandle(other, process_start(other), GPU, b"%064d" % 900, 900), 0)
    child = os.fork()
    if child == 0:
        del memory
        gc.collect()
        os._exit("close" in fake.calls)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "close" not in fake.calls
    del memory
    gc.collect()
    assert fake.calls[-1] == "close"


def test_descriptions_that_are_refused(fake: FakeDriver) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    for changes in ({"host": "another"}, {"spec": make_spec(num_layers=4)}, {"version": 2}, {"kind": "host_pool"}):
        with pytest.raises(AttachError):
            DeviceCache.attach(spec, dataclasses.replace(exported, **changes))
    with pytest.raises(AttachError, match="tuple of handles"):  # host memory that calls itself a GPU's, and back
        in_ram = DeviceCache(spec, 5, "cpu", shared=True).export()
        DeviceCache.attach(spec, dataclasses.replace(in_ram, device="cuda:"))
    with pytest.raises(AttachError, match="tuple of handles"):
        DeviceCache.attach(spec, dataclasses.replace(exported, device="cpu"))
    with pytest.raises(AttachError, match="'cpu' is expected"):
        DeviceCache.attach(spec, dataclasses.replace(exported, device=None))  # type: ignore[arg-type]
    on_cpu = DeviceCache(spec, 5, "cpu", shared=True)
    for one in (exported, on_cpu.export()):  # every second block of the memory
        wide = {name: 2 * stride for name, stride in one.strides_bytes.items()}
        with pytest.raises(AttachError, match="blocks of a device cache are dense"):
            DeviceCache.attach(spec, dataclasses.replace(one, num_blocks=2, strides_bytes=wide))
    with pytest.raises(ValueError, match="in memory of the CPU"):
        DeviceCache.attach(spec, DeviceCache(spec, 5, "cpu", shared=True).export(), "gpu:0")


def test_what_cuda_refuses_is_told_and_nothing_stays_open(fake: FakeDriver) -> None:
    spec = make_spec()
    exported, _ = exported_by_another(fake, spec)
    fake.refusal = CudaError("CUDA_ERROR_INVALID_VALUE", 1, "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(AttachError, match="cannot be opened: cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE"):
        DeviceCache.attach(spec, exported)
    gc.collect()
    assert "close" not in fake.calls
    fake.refusal, fake.missing_bytes = None, 1
    with pytest.raises(AttachError, match="were described"):
        DeviceCache.attach(spec, exported)
    gc.collect()
    assert fake.opened == {}


def test_neighbouring_allocations_are_described_one_by_one(fake: FakeDriver) -> None:
    fake.ranges = [(4096, 512), (4608, 512)]
    found = allocations_around(0, [4100, 4096, 4607, 4608])
    assert [(one.address, one.size_bytes) for one in found] == fake.ranges
    assert fake.calls == ["export"] * 2


def test_memory_that_cuda_does_not_share(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.ranges, fake.exportable = [(4096, 8192)], False
    with pytest.raises(ValueError, match="did not come from cudaMalloc"):
        Allocation(0, 5000)
    fake.exportable = True

    def refuse(device: int, base: int) -> bytes:
        raise CudaError("CUDA_ERROR_NOT_SUPPORTED", 801, "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(fake, "export", refuse)
    with pytest.raises(ValueError, match="cannot be shared: cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"):
        allocations_around(0, [5000])


def test_one_handle_one_size(fake: FakeDriver) -> None:
    other = os.getppid()
    handle = DeviceHandle(other, process_start(other), GPU, b"%064d" % 900, 900)
    memory = map_device(handle, 0)
    assert map_device(handle, 0) is memory
    with pytest.raises(AttachError, match="has 900 bytes; 800 were described"):
        map_device(dataclasses.replace(handle, size_bytes=800), 0)


@pytest.mark.skipif(devices.has_gpu(), reason="there is a driver")
def test_without_a_driver() -> None:
    with pytest.raises(NotImplementedError, match="no CUDA driver"):
        device_memory.driver()
