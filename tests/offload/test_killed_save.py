"""A process dies in the middle of a save into memory that others see, or of a load from it. What it was not writing
stays as it was."""

from __future__ import annotations

import mmap
import multiprocessing
import signal
import threading
from itertools import permutations
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from paddle_kv import HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.backend import binding
from paddle_kv.offload import KVOffloadManager
from tests.schedule.rig import (
    WAIT_S,
    Bits,
    Rig,
    assert_same,
    cache_memory,
    make_spec,
    moved,
    pool_memory,
    random_bits,
    set_pool,
)

HOST_BLOCKS = 17
GUARD_BYTES = 4096
HELD_LAYER = 3
DEVICE_IDS = [9, 2, 11]
SPEC: KVCacheSpec = make_spec()
PROCESSES = multiprocessing.get_context("spawn")


def size_bytes() -> int:
    return 2 * GUARD_BYTES + HOST_BLOCKS * SPEC.num_layers * SPEC.block_bytes


def pool_in(path: Path) -> tuple[HostPool, np.ndarray]:
    """A pool over the file between two guards, and all of its bytes."""
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size_bytes()), np.uint8)
    address = memory.ctypes.data + GUARD_BYTES
    pointers: dict[str, list[int]] = {name: [] for name in SPEC.tensor_names}
    for _ in range(SPEC.num_layers):
        for name in SPEC.tensor_names:
            pointers[name].append(address)
            address += HOST_BLOCKS * SPEC.tensor_block_bytes(name)
    return HostPool.adopt(SPEC, pointers, HOST_BLOCKS), memory


def save_and_hang(path: Path, arrived: Event, direction: str = "offload") -> None:
    """The process that is killed: it never gets beyond the middle of its save, or of the load behind it."""
    rig = Rig(SPEC)
    copy = binding.copy

    def hanging(number: int, plan: object, layers: range) -> None:
        for layer in layers:
            if layer == HELD_LAYER and plan.direction == direction:  # type: ignore[attr-defined]
                arrived.set()
                threading.Event().wait()
            copy(number, plan, range(layer, layer + 1))  # type: ignore[arg-type]

    binding.copy = hanging
    pool, _ = pool_in(path)
    manager = KVOffloadManager(LayerwiseScheduler(rig.cache, pool))
    hashes = hashes_of(manager)
    manager.save(hashes, DEVICE_IDS).wait()
    manager.onload(hashes, DEVICE_IDS[::-1]).wait()


def hashes_of(manager: KVOffloadManager) -> list[bytes]:
    return manager.block_hashes(range(len(DEVICE_IDS) * SPEC.block_size))


def written_blocks(before: Bits, after: Bits) -> list[int]:
    differs = np.zeros(HOST_BLOCKS, bool)
    for name in before:
        differs |= (before[name] != after[name]).any(axis=(0, 2))
    return np.flatnonzero(differs).tolist()


def killed_in(path: Path, direction: str) -> tuple[HostPool, np.ndarray, Bits]:
    """The memory that a process leaves that was killed in the middle; and what the pool held before."""
    path.write_bytes(b"\xa5" * size_bytes())
    pool, memory = pool_in(path)
    before = random_bits(SPEC, HOST_BLOCKS, 5)
    set_pool(pool, before)

    arrived = PROCESSES.Event()
    process = PROCESSES.Process(target=save_and_hang, args=(path, arrived, direction))
    process.start()
    try:
        assert arrived.wait(3 * WAIT_S)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    return pool, memory, before


def test_a_load_that_is_killed_leaves_the_host_blocks_alone(tmp_path: Path) -> None:
    pool, memory, before = killed_in(tmp_path / "pool", "onload")
    after = pool_memory(pool)
    targets = written_blocks(before, after)  # by the save in front of it, which was over
    assert len(targets) == len(DEVICE_IDS)
    device = random_bits(SPEC, 13, 1)  # the content of a Rig
    assert any(_same(moved(device, before, DEVICE_IDS, order), after) for order in permutations(targets))
    assert set(memory[:GUARD_BYTES]) == set(memory[-GUARD_BYTES:]) == {0xA5}
    pool.close()


def test_a_save_that_is_killed_touches_its_own_blocks_only(tmp_path: Path) -> None:
    pool, memory, before = killed_in(tmp_path / "pool", "offload")

    after = pool_memory(pool)
    targets = written_blocks(before, after)
    assert len(targets) == len(DEVICE_IDS)  # it had begun, and it wrote nothing else
    device = random_bits(SPEC, 13, 1)  # the content of a Rig
    orders = [
        order
        for order in permutations(targets)
        if _same(moved(device, before, DEVICE_IDS, order, range(HELD_LAYER)), after)
    ]
    assert len(orders) == 1  # whole layers up to the one in which it died, none behind
    assert set(memory[:GUARD_BYTES]) == set(memory[-GUARD_BYTES:]) == {0xA5}

    # The next process starts with nothing, on the same memory.
    rig = Rig(SPEC)
    with LayerwiseScheduler(rig.cache, pool) as scheduler:
        manager = KVOffloadManager(scheduler)
        hashes = hashes_of(manager)
        with manager.lookup(hashes) as lease:
            assert lease.num_blocks == 0
        manager.save(hashes, DEVICE_IDS).wait(WAIT_S)
        with manager.lookup(hashes) as lease:
            assert lease.num_blocks == len(DEVICE_IDS)
            manager.onload(lease.hashes, [0, 5, 7]).wait(WAIT_S)
        rig.device = moved(rig.device, rig.device, DEVICE_IDS, [0, 5, 7])
        assert_same(cache_memory(rig.cache), rig.device)
        manager.close()
    pool.close()


def _same(some: Bits, others: Bits) -> bool:
    return all(np.array_equal(some[name], others[name]) for name in some)
