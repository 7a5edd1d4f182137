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
from paddle_kv.memory.host_memory import HostMemory, allocate, available_bytes, bytes_at
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


@pytest.mark.parametrize("first", [0, 1, 4095])
def test_bytes_keep_the_memory_in_which_they_lie(first):
    pieces = [HostMemory(4096, pinned=False) for _ in range(2)]
    alive = [weakref.ref(one) for one in pieces]
    pieces[1].array()[first] = 7
    part = bytes_at(pieces[1].address + first, 1, pieces)
    del pieces
    assert [one() is None for one in alive] == [True, False]
    assert part.tolist() == [7]
    del part
    assert alive[1]() is None


def test_bytes_of_somebody_else_are_seen_in_place():
    memory = np.array([9, 8, 7], np.uint8)
    part = bytes_at(memory.ctypes.data + 1, 2, [HostMemory(4096, pinned=False)])
    part[1] = 3
    assert part.tolist() == [8, 3]
    assert memory.tolist() == [9, 8, 3]


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

    def scarce(size_bytes, *, pinned):
        if len(taken) == 3:
            raise MemoryError("no more")
        taken.append((size_bytes, pinned))
        piece = HostMemory(size_bytes, pinned=False)
        pieces.append(weakref.ref(piece))
        return piece

    try:
        allocate([100, 200, 300, 400, 500], pinned=pinned, make=scarce)
    except MemoryError as error:
        assert "1500 bytes of " in str(error)
        assert "no more" in str(error)
        gc.collect()
        assert [piece() for piece in pieces] == [None] * 3, "kept while the error is handled: no smaller pool would fit"
    else:
        pytest.fail("no MemoryError")
    assert taken == [(100, pinned), (200, pinned), (300, pinned)]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_gpu_and_operators_without_cuda(monkeypatch):
    """They move nothing to the GPU, and cannot lock pages."""
    monkeypatch.setattr(host_memory, "has_gpu", lambda: True)
    monkeypatch.setattr(host_memory, "is_stub_build", lambda: True)
    pool = HostPool(KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=3, block_size=5, dtype="float16"), 7)
    pool.view("key", 1, 6)[...] = 9
    pool.close()
    monkeypatch.setattr(host_memory._library, "LIBRARY", "libc.so.6")
    host_memory._page_lock_functions.cache_clear()
    with pytest.raises(NotImplementedError, match=r"page-locked memory was asked for, but .* built without CUDA"):
        HostMemory(100, pinned=True)
    gc.collect()  # nothing was locked that could be given back
    host_memory._page_lock_functions.cache_clear()


@pytest.mark.parametrize(("gpu", "stub"), [(True, False), (True, True), (False, False)])
def test_memory_is_page_locked_where_a_gpu_and_its_operators_are(monkeypatch, gpu, stub):
    monkeypatch.setattr(host_memory, "has_gpu", lambda: gpu)
    monkeypatch.setattr(host_memory, "is_stub_build", lambda: stub)
    assert host_memory.can_page_lock() is (gpu and not stub)


def test_page_locked_memory_is_unlocked_once_and_before_it_is_unmapped(monkeypatch):
    locked = {}

    def unlock(address):
        assert mapped_bytes(address, address + locked.pop(address)) == 12_288
        return 0

    functions = (lambda address, size_bytes: locked.update({address: size_bytes}) or 0, unlock)
    monkeypatch.setattr(host_memory, "_page_lock_functions", lambda: functions)
    memory = HostMemory(12_288, pinned=True)
    assert locked == {memory.address: 12_288}
    array = memory.array()
    del memory
    assert len(locked) == 1
    del array
    assert locked == {}


def test_page_locked_memory_stays_out_of_a_forked_child_and_asks_for_huge_pages(monkeypatch):
    monkeypatch.setattr(host_memory, "_page_lock_functions", lambda: (lambda address, size_bytes: 0, lambda address: 0))
    memory = HostMemory(4 << 20, pinned=True)
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(address, 16) for address in line.split()[0].split("-"))
            inside = start <= memory.address < stop
        elif inside and line.startswith("VmFlags:"):
            flags += line.split()[1:]
    assert "dc" in flags  # not copied by a fork
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    child = os.fork()
    if child == 0:
        os._exit(mapped_bytes(memory.address, memory.address + memory.size_bytes) != 0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_memory_that_cuda_does_not_lock_is_given_back_and_not_unlocked(monkeypatch):
    unlocked, places = [], []
    runtime = SimpleNamespace(CUDARuntimeError=lambda code: f"cudaError {code}")
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", runtime)
    functions = (lambda address, size_bytes: places.append(address) or 2, unlocked.append)
    monkeypatch.setattr(host_memory, "_page_lock_functions", lambda: functions)
    with pytest.raises(MemoryError, match="cudaError 2"):
        HostMemory(1 << 30, pinned=True)
    gc.collect()
    assert unlocked == []
    assert mapped_bytes(places[0], places[0] + (1 << 30)) < 1 << 29


def test_functions_of_a_build_with_cuda_are_called_with_the_types_of_the_header(monkeypatch):
    declared = c_header.functions("common/page_locked.h")
    library = SimpleNamespace(**{name: SimpleNamespace(restype=ctypes.c_int) for name in declared})
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda path: library)
    assert list(declared) == ["paddle_kv_page_lock_add", "paddle_kv_page_lock_remove"]
    host_memory._page_lock_functions.cache_clear()
    try:
        found = host_memory._page_lock_functions()
    finally:
        host_memory._page_lock_functions.cache_clear()
    assert list(found) == list(vars(library).values())
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
