"""Shared memory is page-locked once in each process that has a GPU, and no longer when it is unmapped. CUDA's calls are
replaced; with CUDA: tests/gpu/test_shared_on_gpu.py."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest

from paddle_kv import DeviceCache, HostPool
from paddle_kv.memory import host_memory, host_pool
from tests.schedule.rig import make_spec

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Cuda:
    """What is page-locked, and which addition fails."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.failing = -1
        self.additions = 0

    def add(self, address: int, size_bytes: int) -> int:
        assert address % 4096 == 0
        self.additions += 1
        if self.additions - 1 == self.failing:
            return OUT_OF_MEMORY
        assert address not in self.locked
        self.locked[address] = size_bytes
        return 0

    def remove(self, address: int) -> int:
        with open("/proc/self/maps") as file:
            assert any(line.startswith(f"{address:x}-") for line in file), "unmapped while it was page-locked"
        del self.locked[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    monkeypatch.setattr(host_memory, "_page_lock_functions", lambda: (made.add, made.remove))
    monkeypatch.setattr(host_pool, "can_page_lock", lambda: True)
    yield made
    gc.collect()
    assert made.locked == {}


def test_a_pool_is_page_locked_from_end_to_end_until_it_is_closed(cuda: Cuda) -> None:
    spec = make_spec()
    pool = HostPool(spec, 5, shared=True)
    assert sum(cuda.locked.values()) == pool.pinned_bytes == 5 * spec.num_layers * spec.block_bytes
    for name in spec.tensor_names:
        for layer in range(spec.num_layers):
            address = pool.pointer(name, layer)
            assert any(start <= address < start + size for start, size in cuda.locked.items())
    view = pool.view("key", 0, 0)
    pool.close()
    assert len(cuda.locked) == 1  # that of the view
    del view


def test_what_is_attached_here_is_page_locked_once(cuda: Cuda) -> None:
    with HostPool(make_spec(), 5, shared=True, layout="block_first") as pool:
        with HostPool.attach(pool.spec, pool.export()), HostPool.attach(pool.spec, pool.export()):
            assert cuda.additions == len(cuda.locked) == 1
        assert len(cuda.locked) == 1


def test_what_was_made_without_is_page_locked_when_it_is_attached(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host_pool, "can_page_lock", lambda: False)
        pool = HostPool(make_spec(), 5, shared=True, layout="block_first")
    assert not cuda.locked
    with HostPool.attach(pool.spec, pool.export()):
        assert len(cuda.locked) == 1
    pool.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("failing", range(3))
def test_a_piece_that_cuda_refuses(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    cuda.failing = failing
    for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["cupy.cuda.runtime"], "CUDARuntimeError", RuntimeError, raising=False)
    with pytest.raises(MemoryError, match=r"bytes of page-locked host memory were asked for, .* \(2\)"):
        HostPool(make_spec(), 5, layout="layer_first", shared=True)
    assert cuda.additions == failing + 1
    gc.collect()  # what was refused is not given back


def test_a_cache_on_the_cpu_is_not_page_locked(cuda: Cuda) -> None:
    cache = DeviceCache(make_spec(), 5, "cpu", shared=True)
    same = DeviceCache.attach(cache.spec, cache.export())
    assert cuda.additions == 0
    del cache, same
