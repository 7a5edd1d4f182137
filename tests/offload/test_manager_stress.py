"""Several threads on one manager while copies fail, transfers are cancelled and blocks are evicted: what is loaded is
compared byte by byte with what its hash promises, and the books are checked all the time."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, ClosedError, LayerwiseScheduler, TransferError
from paddle_kv.backend import binding
from paddle_kv.offload import KVOffloadManager
from paddle_kv.offload.s3fifo import GHOST
from paddle_kv.tracking.group import change
from tests.schedule.rig import WAIT_S, Rig, bytes_at, in_threads

HOST_BLOCKS = 17
LAYERS = 5
THREADS = 4
BLOCKS_PER_THREAD = 6  # device blocks that only this thread uses
STEPS = 60
PROMPTS = 5


class Unreliable:
    """In front of each copy: now and then it takes longer, or fails."""

    def __init__(self, copy: Any, seed: int) -> None:
        self._copy = copy
        self._random = random.Random(seed)
        self.failed = 0

    def __call__(self, number: int, plan: Any, layers: range) -> None:
        for layer in layers:
            chance = self._random.random()
            if chance < 0.02:
                self.failed += 1
                raise OSError("lost")
            if chance < 0.1:
                time.sleep(0.001)
            self._copy(number, plan, range(layer, layer + 1))


def resident(policy: Any) -> set[bytes]:
    """What the policy believes to be there."""
    match type(policy).__name__:
        case "Lru":
            return set(policy._order)
        case "Arc":
            assert not set(policy._once) & set(policy._often)
            return set(policy._once) | set(policy._often)
        case _:
            there = {key for key, count in policy._counts.items() if count != GHOST}
            assert sorted([*policy._small, *policy._main]) == sorted(there)
            return there


def check_books(manager: KVOffloadManager, pool: Any) -> None:
    books = manager._books

    def compare() -> None:
        if books.closed:
            return
        books.settle()
        index = books.index
        slots = list(index.slots.values())
        assert len(set(slots)) == len(slots) <= HOST_BLOCKS
        assert index.arriving.keys() <= set(index.slots)
        assert set(index.pins) <= set(index.slots)
        assert resident(index._policy) == set(index.slots)
        assert pool._allocated == set(slots) == books.slots.taken
        saving = {key for one in books.moves.moving for job in one.jobs if job.kind == "save" for key in job.keys}
        assert index.arriving.keys() == saving
        stats = books.stats()
        assert stats["blocks"] + stats["saving_blocks"] == len(index.slots)
        assert 0 <= stats["hit_blocks"] <= stats["looked_up_blocks"]

    change(books, compare)


class Client:
    """One thread with its own device blocks."""

    def __init__(self, number: int, rig: Rig, manager: KVOffloadManager) -> None:
        self._random = random.Random(number)
        self._blocks = list(range(number * BLOCKS_PER_THREAD, (number + 1) * BLOCKS_PER_THREAD))
        self._rig = rig
        self._manager = manager
        self.asked = self.compared = 0

    def run(self) -> None:
        for _ in range(STEPS):
            count, prompt = self._random.randint(1, BLOCKS_PER_THREAD), self._random.randrange(PROMPTS)
            hashes = self._manager.block_hashes(np.arange(count * self._rig.spec.block_size) + 1000 * prompt)
            self._load(hashes)
            if self._random.random() < 0.3:
                self._manager.evict(self._random.randint(0, 4))
            self._save(hashes)
            check_books(self._manager, self._rig.pool)

    def _load(self, hashes: list[bytes]) -> None:
        try:
            with self._manager.lookup(hashes) as lease:
                if self._random.random() < 0.3:
                    lease.keep_first(self._random.randint(0, lease.num_blocks))
                table = self._random.sample(self._blocks, lease.num_blocks)
                load = self._manager.onload(lease.hashes, table)
                if self._random.random() < 0.2:
                    raise ZeroDivisionError  # in the middle of the server's own work
        except ZeroDivisionError:
            pass
        if self._random.random() < 0.1:
            load.cancel()
        try:
            load.wait(WAIT_S)
        except (TransferError, CancelledError):
            assert self._manager.blocks_to_recompute(load) == list(range(len(table)))
            return
        assert self._manager.blocks_to_recompute(load) == []
        for key, block in zip(hashes, table, strict=False):
            for actual, expected in zip(self._bytes_of(block), content(self._rig, key), strict=True):
                np.testing.assert_array_equal(actual, expected)
            self.compared += 1

    def _save(self, hashes: list[bytes]) -> None:
        table = self._random.sample(self._blocks, len(hashes))
        self._rig.cache.mark_rewritten(table)
        layerwise = self._random.random() < 0.5
        for key, block in zip(hashes, table, strict=True):
            for target, wanted in zip(self._bytes_of(block), content(self._rig, key), strict=True):
                target[:] = wanted
        save = self._manager.save(hashes, table, layerwise=layerwise)
        self.asked += len(hashes)
        with suppress(TransferError, CancelledError):
            for layer in range(LAYERS) if layerwise else ():
                if self._random.random() < 0.05:
                    save.cancel()
                save.mark_layer_written(layer)
        with suppress(TransferError, CancelledError):
            save.wait(WAIT_S)  # in any case: the device blocks are written again

    def _bytes_of(self, block: int) -> list[np.ndarray]:
        cache, spec = self._rig.cache, self._rig.spec
        return [
            bytes_at(
                cache.tensor(name, layer).data_ptr() + block * spec.tensor_block_bytes(name),
                spec.tensor_block_bytes(name),
            )
            for name in spec.tensor_names
            for layer in range(LAYERS)
        ]


def content(rig: Rig, key: bytes) -> list[np.ndarray]:
    """The bytes that the hash stands for, in all tensors and layers."""
    rng = np.random.default_rng(list(key))
    sizes = [rig.spec.tensor_block_bytes(name) for name in rig.spec.tensor_names for _ in range(LAYERS)]
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_threads_failures_and_evictions(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unreliable = Unreliable(binding.copy, 7)
    monkeypatch.setattr(binding, "copy", unreliable)
    rig = Rig(device_blocks=THREADS * BLOCKS_PER_THREAD, host_blocks=HOST_BLOCKS)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    manager = KVOffloadManager(scheduler, policy=policy)
    clients = [Client(number, rig, manager) for number in range(THREADS)]
    in_threads(*[client.run for client in clients], timeout_s=6 * WAIT_S)
    stats = manager.stats()
    assert stats["pinned_blocks"] == stats["saving_blocks"] == 0
    assert stats["blocks"] == HOST_BLOCKS - rig.pool.num_free_blocks
    moved_or_not = stats["saved_blocks"] + stats["deduplicated_blocks"] + stats["left_out_blocks"]
    assert moved_or_not == sum(client.asked for client in clients)
    # All of it did happen.
    assert unreliable.failed > 0
    assert min(stats["failed_saves"], stats["failed_loads"], stats["evicted_blocks"], stats["hit_blocks"]) > 0
    assert all(client.compared > 0 for client in clients)
    scheduler.close(WAIT_S)
    manager.close()
    assert rig.pool.num_free_blocks == HOST_BLOCKS


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_closing_while_threads_are_at_work(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "copy", Unreliable(binding.copy, 8))
    rig = Rig(device_blocks=THREADS * BLOCKS_PER_THREAD, host_blocks=HOST_BLOCKS)
    scheduler = LayerwiseScheduler(rig.cache, rig.pool)
    manager = KVOffloadManager(scheduler, policy=policy)
    ends: list[BaseException] = []

    def run(number: int) -> None:
        try:
            while True:
                Client(number, rig, manager).run()
        except BaseException as error:  # noqa: BLE001  told by the main thread
            ends.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    manager.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert [(type(end), str(end)) for end in ends] == [(ClosedError, "the offload manager is closed")] * THREADS
    scheduler.close(WAIT_S)
    assert rig.pool.num_free_blocks == HOST_BLOCKS
    assert manager.stats()["blocks"] == manager.stats()["pinned_blocks"] == 0
