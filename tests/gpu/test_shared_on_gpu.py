"""A host pool in shared memory: two processes with a GPU each move its blocks, page-locked in both."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, devices
from paddle_kv.memory.host_memory import can_page_lock
from tests.schedule.rig import (
    WAIT_S,
    Bits,
    assert_same,
    make_spec,
    moved,
    pool_memory,
    random_bits,
    set_pool,
)

BLOCKS = 9
LOADS = ([7, 0, 4], [2, 8, 1])  # host, device
SAVES = ([2, 1], [6, 3])  # device, host
ANY_KIND = 4  # cudaMemcpyDefault
LAYOUTS = ["layer_first", "block_first", "page_first_direct"]


def set_cache(cache: DeviceCache, bits: Bits) -> None:
    for name, layers in bits.items():
        for layer, array in enumerate(layers):
            cupy.cuda.runtime.memcpy(cache.tensor(name, layer).data_ptr(), array.ctypes.data, array.size, ANY_KIND)


def bits_of(cache: DeviceCache) -> Bits:
    found = {name: np.empty_like(array) for name, array in random_bits(cache.spec, BLOCKS, 0).items()}
    cupy.cuda.runtime.deviceSynchronize()
    for name, layers in found.items():
        for layer, array in enumerate(layers):
            cupy.cuda.runtime.memcpy(array.ctypes.data, cache.tensor(name, layer).data_ptr(), array.size, ANY_KIND)
    return found


def serve(connection: Connection) -> None:
    """The other process: loads from the pool that it attaches into a cache of its own, and saves from that."""
    while True:
        exported = connection.recv()
        spec = make_spec()
        with HostPool.attach(spec, exported) as pool:
            cache = DeviceCache(spec, BLOCKS, devices.name_of(0))
            set_cache(cache, random_bits(spec, BLOCKS, 1))
            with LayerwiseScheduler(cache, pool) as scheduler:
                scheduler.onload(*LOADS).wait(WAIT_S)
                scheduler.offload(*SAVES).wait(WAIT_S)
            connection.send(bits_of(cache))


def start() -> tuple[Any, Connection]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


@pytest.mark.skipif(not can_page_lock(), reason="needs a GPU and operators built for it")
def test_two_processes_move_the_same_blocks() -> None:
    process, connection = start()
    spec = make_spec()
    for seed, layout in enumerate(LAYOUTS):
        pool = HostPool(spec, BLOCKS, layout=layout, shared=True)
        host = random_bits(spec, BLOCKS, 10 + seed)
        set_pool(pool, host)
        connection.send(pool.export())
        assert connection.poll(120)
        theirs = moved(host, random_bits(spec, BLOCKS, 1), *LOADS)
        assert_same(connection.recv(), theirs)
        assert_same(pool_memory(pool), moved(theirs, host, *SAVES))
        cache = DeviceCache(spec, BLOCKS, devices.name_of(0))  # and what it saved comes up in this process
        set_cache(cache, random_bits(spec, BLOCKS, 20))
        with LayerwiseScheduler(cache, pool) as scheduler:
            scheduler.onload([6, 3, 5], [0, 1, 2]).wait(WAIT_S)
        assert_same(bits_of(cache), moved(pool_memory(pool), random_bits(spec, BLOCKS, 20), [6, 3, 5], [0, 1, 2]))
        pool.close()
    os.kill(process.pid, signal.SIGKILL)
    process.join(WAIT_S)


@pytest.mark.skipif(not can_page_lock(), reason="needs a GPU and operators built for it")
def test_the_pages_are_unlocked_with_the_pool() -> None:
    runtime = cupy.cuda.runtime
    with HostPool(make_spec(), BLOCKS, layout="block_first", shared=True) as pool:
        address, size_bytes = pool.pointer("key", 0), pool.pinned_bytes
        with pytest.raises(runtime.CUDARuntimeError, match="AlreadyRegistered"):
            runtime.hostRegister(address, size_bytes, 0)
        kept = pool.bytes_at(address, size_bytes)
    with pytest.raises(runtime.CUDARuntimeError, match="AlreadyRegistered"):
        runtime.hostRegister(address, size_bytes, 0)  # the array has the memory
    del kept
    with HostPool(make_spec(), BLOCKS, layout="block_first", shared=True) as pool:
        assert pool.pinned_bytes == size_bytes
