from __future__ import annotations

import ctypes
import gc
import io
import os
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_kv import HostPool, KVCacheSpec
from paddle_kv.memory import host_memory
from paddle_kv.memory.host_memory import HostMemory, allocate, available_bytes
from tests import c_header


def mapped_bytes(first: int, end: int) -> int:
    """How much of the addresses belongs to the process. Of these alone: other threads take and give back memory."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(address, 16) for address in line.split()[0].split("-"))
        total += max(0, min(stop, end) - max(start, first))
    return total


def test_size_is_exact_and_writable():
    memory = HostMemory(12_345, pinned=False)
    array = memory.array()
    assert (array.nbytes, array.dtype, array.ctypes.data) == (12_345, np.uint8, memory.address)
    array[:] = 7
    assert (memory.array() == 7).all()


def test_an_array_keeps_the_memory():
    memory = HostMemory(5000, pinned=False)
    alive = weakref.ref(memory)
    part = memory.array()[100:200]
    part[:] = 9
    del memory
    assert alive() is not None
    assert (part == 9).all()
    del part
    gc.collect()
    assert alive() is None


def test_memory_goes_back_to_the_system():
    size_bytes = 1 << 30
    memory = HostMemory(size_bytes, pinned=False)
    place = memory.address, memory.address + size_bytes
    assert mapped_bytes(*place) == size_bytes
    del memory
    assert mapped_bytes(*place) < size_bytes // 2  # something small may lie there by now


def test_more_than_there_is_names_asked_and_available():
    asked = available_bytes() * 3
    with pytest.raises(MemoryError) as error:
        allocate([asked // 3 + 1] * 3, pinned=False)
    found = re.search(r"(\d+) bytes of host memory were asked for, (\d+) bytes are available", str(error.value))
    assert found
    assert int(found[1]) >= asked
    assert 0 < int(found[2]) < asked


def test_what_is_available_is_not_what_is_there(monkeypatch):
    text = "MemTotal:  100 kB\nMemFree: 3 kB\nMemAvailable:  7 kB\nSwapFree: 50 kB\n"
    monkeypatch.setattr(host_memory, "open", lambda path: io.StringIO(text), raising=False)
    assert available_bytes() == 7 * 1024


@pytest.mark.parametrize(("headroom", "expected"), [(None, 7168), (7167, 7167), (7169, 7168)])
def test_what_is_available_is_not_more_than_the_container_may_have(monkeypatch, headroom, expected):
    monkeypatch.setattr(host_memory, "open", lambda path: io.StringIO("MemAvailable: 7 kB\n"), raising=False)
    monkeypatch.setattr(host_memory, "headroom_bytes", lambda: headroom)
    assert available_bytes() == expected


def test_memory_that_the_system_does_not_give(monkeypatch):
    def refuse(*arguments, **named):
        raise OSError("no more maps")

    monkeypatch.setattr(host_memory.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"100 bytes of host memory were asked for, .*\(no more maps\)"):
        allocate([60, 40], pinned=False)


@pytest.mark.parametrize("pinned", [False, True])
def test_all_or_none(monkeypatch, pinned):
    taken, pieces = [], []

    def scarce(size_bytes):
        if len(taken) == 3:
            raise MemoryError("no more")
        taken.append(size_bytes)
        return memory_of(size_bytes)

    def init_without_address(self, size_bytes, *, pinned):
        self.size_bytes = size_bytes
        self._owner = (host_memory._PageLocked if pinned else host_memory._pageable)(size_bytes)
        pieces.append(weakref.ref(self))

    memory_of = host_memory._pageable
    monkeypatch.setattr(host_memory, "_PageLocked" if pinned else "_pageable", scarce)
    monkeypatch.setattr(host_memory.HostMemory, "__init__", init_without_address)
    try:
        allocate([100, 200, 300, 400, 500], pinned=pinned)
    except MemoryError as error:
        assert "1500 bytes of " in str(error)
        assert "no more" in str(error)
        gc.collect()
        assert [piece() for piece in pieces] == [None] * 3, "kept while the error is handled: no smaller pool would fit"
    else:
        pytest.fail("no MemoryError")
    assert taken == [100, 200, 300]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_gpu_and_operators_without_cuda(monkeypatch):
    """They move nothing to the GPU, and cannot lock pages."""
    monkeypatch.setattr(host_memory, "has_gpu", lambda: True)
    monkeypatch.setattr(host_memory, "is_stub_build", lambda: True)
    pool = HostPool(KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=3, block_size=5, dtype="float16"), 7)
    pool.view("key", 1, 6)[...] = 9
    pool.close()
    monkeypatch.setattr(host_memory._library, "LIBRARY", "libc.so.6")
    host_memory._page_locked_functions.cache_clear()
    with pytest.raises(NotImplementedError, match=r"page-locked memory was asked for, but .* built without CUDA"):
        HostMemory(100, pinned=True)
    gc.collect()  # nothing was taken that could be given back
    host_memory._page_locked_functions.cache_clear()


@pytest.mark.parametrize(("gpu", "stub"), [(True, False), (True, True), (False, False)])
def test_memory_is_page_locked_where_a_gpu_and_its_operators_are(monkeypatch, gpu, stub):
    monkeypatch.setattr(host_memory, "has_gpu", lambda: gpu)
    monkeypatch.setattr(host_memory, "is_stub_build", lambda: stub)
    assert host_memory.can_page_lock() is (gpu and not stub)


def test_page_locked_memory_is_given_back_once(monkeypatch):
    given, freed = np.zeros(100, np.uint8), []

    def take(size_bytes, address):
        assert size_bytes == 100
        address._obj.value = given.ctypes.data
        return 0

    monkeypatch.setattr(host_memory, "_page_locked_functions", lambda: (take, freed.append))
    memory = HostMemory(100, pinned=True)
    array = memory.array()
    array[:] = 7
    assert given.tolist() == [7] * 100
    del memory
    assert freed == []
    del array
    assert freed == [given.ctypes.data]


def test_page_locked_memory_that_there_is_not_is_not_given_back(monkeypatch):
    freed = []
    runtime = SimpleNamespace(CUDARuntimeError=lambda code: f"cudaError {code}")
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", runtime)
    monkeypatch.setattr(host_memory, "_page_locked_functions", lambda: (lambda size_bytes, address: 2, freed.append))
    with pytest.raises(MemoryError, match="cudaError 2"):
        HostMemory(100, pinned=True)
    gc.collect()
    assert freed == []


def test_functions_of_a_build_with_cuda_are_called_with_the_types_of_the_header(monkeypatch):
    declared = c_header.functions("common/page_locked.h")
    assert len(declared) == 4
    library = SimpleNamespace(**{name: SimpleNamespace(restype=ctypes.c_int) for name in declared})
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda path: library)
    names = [name.partition("paddle_kv_")[2] for name in declared]
    assert names == ["page_locked_allocate", "page_locked_free", "page_lock_add", "page_lock_remove"]
    for cached in (host_memory._page_locked_functions, host_memory._page_lock_functions):
        cached.cache_clear()
    try:
        found = [*host_memory._page_locked_functions(), *host_memory._page_lock_functions()]
    finally:
        for cached in (host_memory._page_locked_functions, host_memory._page_lock_functions):
            cached.cache_clear()
    assert found == list(vars(library).values())
    assert [(function.restype, function.argtypes) for function in found] == list(declared.values())


def test_a_forked_child_writes_to_a_copy():
    memory = HostMemory(64, pinned=False)
    memory.array()[:] = 1
    child = os.fork()
    if child == 0:
        memory.array()[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.array().tolist() == [1] * 64


def test_a_system_that_does_not_tell_what_is_available(monkeypatch):
    monkeypatch.setattr(host_memory, "open", lambda path: io.StringIO("MemTotal: 900 kB\n"), raising=False)
    assert available_bytes() == 0
