"""A server's memories above a folder: what a block holds follows from its key, and all else is poison."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.offload import KVOffloadManager
from paddle_kv.testing.tiers.rig import StagedTier
from paddle_kv.tiers import Engine, FilesEngine, Read, Saver, Write

WAIT_S = 60.0
SHORT_S = 0.05
POISON = 0xA5
SPEC = KVCacheSpec(num_layers=6, num_kv_heads=1, head_dim=128, block_size=16, dtype="float16")  # stages 2, 2, 2
KEYS = [b"key %028d" % number for number in range(40)]


def content(key: bytes) -> np.ndarray:
    """uint8 [layers, bytes of a layer's block]."""
    size = (SPEC.num_layers, SPEC.block_bytes)
    return np.asarray(np.random.default_rng(zlib.crc32(key)).integers(0, 256, size, np.uint8))


class Gated(FilesEngine):
    """Writes and the stages of reads wait until they are let through."""

    def __init__(self, folder: Path, capacity_bytes: int = 1 << 30) -> None:
        super().__init__({folder: capacity_bytes}, threads_per_root=24)
        for root in self.roots:
            root.most_batched = 1  # a thread for each object, so that each waits for itself
        self.writes = threading.Event()
        self.stages = [threading.Event() for _ in range(3)]
        self.reading = threading.Semaphore(0)
        self.writing = threading.Semaphore(0)
        self.asked = 0  # objects
        self.open()

    def open(self) -> None:
        for gate in (self.writes, *self.stages):
            gate.set()

    def write(self, items: Sequence[Write]) -> None:
        super().write([_Held(item, self) for item in items])  # type: ignore[misc]

    def read(self, items: Sequence[Read]) -> None:
        self.asked += len(items)
        super().read([_Held(item, self) for item in items])  # type: ignore[misc]


class _Held:
    def __init__(self, item: Any, engine: Gated) -> None:
        self._item, self._engine = item, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def buffers(self, *stage: int) -> Any:
        if not stage:
            self._engine.writing.release()
            self._engine.writes.wait(WAIT_S)
        return self._item.buffers(*stage)

    def arrived(self, stage: int) -> bool:
        self._engine.reading.release()
        self._engine.stages[stage].wait(WAIT_S)
        return bool(self._item.arrived(stage))


class TieredRig:
    def __init__(
        self,
        engine: Engine,
        *,
        when: str = "write_through",
        host_blocks: int = 12,
        device_blocks: int = 24,
        tier: dict[str, Any] | None = None,
        saver: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine
        self.cache = DeviceCache(SPEC, device_blocks, "cpu")
        self.pool = HostPool(SPEC, host_blocks, layout="block_first")
        self.rows = block_rows(self.pool)
        self.rows[:] = POISON
        self.tier = StagedTier(engine, self.pool, model=b"model", **(tier or {}))
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.saver = Saver(self.tier, when, **(saver or {}))  # type: ignore[arg-type]
        self.manager = KVOffloadManager(self.scheduler, tier=self.saver, **options)

    # ---- the device ----
    def fill(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """What the model would compute."""
        for key, block in zip(keys, blocks, strict=True):
            self._set(block, content(key))

    def poison(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._set(block, np.full((SPEC.num_layers, SPEC.block_bytes), POISON, np.uint8))

    def _set(self, block: int, value: np.ndarray) -> None:
        assert 0 <= block < self.cache.num_blocks
        for layer in range(SPEC.num_layers):
            at = 0
            for name in SPEC.tensor_names:
                size = SPEC.tensor_block_bytes(name)
                self._layer(name, layer, block)[:] = value[layer, at : at + size]
                at += size

    def _layer(self, name: str, layer: int, block: int) -> np.ndarray:
        from tests.schedule.rig import bytes_at

        size = SPEC.tensor_block_bytes(name)
        return bytes_at(self.cache.tensor(name, layer).data_ptr() + block * size, size)

    def on_device(self, block: int) -> np.ndarray:
        return np.array(
            [
                np.concatenate([self._layer(name, layer, block) for name in SPEC.tensor_names])
                for layer in range(SPEC.num_layers)
            ]
        )

    def right(self, keys: Sequence[bytes], blocks: Sequence[int], layers: slice = slice(None)) -> list[bool]:
        return [
            np.array_equal(self.on_device(block)[layers], content(key)[layers])
            for key, block in zip(keys, blocks, strict=True)
        ]

    # ---- the manager ----
    def save(self, keys: Sequence[bytes], first_block: int = 0) -> None:
        """Computed, saved, and gone down as the policy says."""
        blocks = range(first_block, first_block + len(keys))
        self.fill(keys, blocks)
        self.manager.save(list(keys), list(blocks)).wait(WAIT_S)
        self.settle()

    def settle(self) -> None:
        """Nothing is on its way down."""
        until(lambda: self.manager._books.below.drain(WAIT_S) and not self.manager.in_flight())  # type: ignore[attr-defined]
        self.manager.stats()
        self.manager._books.below.drain(WAIT_S)  # type: ignore[attr-defined]
        self.tier.drain(WAIT_S)

    def load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Any:
        self.poison(blocks)
        with self.manager.lookup(list(keys)) as lease:
            return self.manager.onload(lease.hashes, list(blocks)[: lease.num_blocks])

    def forget(self) -> None:
        """Host memory is empty, as after a restart."""
        books = self.manager._books
        assert self.manager.evict(1000) >= 0
        assert not books.index.slots, books.index.pins

    def check_books(self) -> None:
        """Nothing is held, lost or leaked."""
        self.settle()
        until(lambda: not self.pool.domain.busy(range(self.pool.num_blocks)))
        books: Any = self.manager._books
        slots = list(books.index.slots.values())
        assert len(set(slots)) == len(slots)
        assert set(slots) == books.slots.taken
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(slots)
        assert not books.index.arriving and not books.index.pins, (books.index.arriving, books.index.pins)
        assert not books.below.storing and not books.below.held and not books.below.forgotten
        assert not books.directory.following and not books.directory.ranks.pending
        assert self.pool.domain._num_leases == 0
        assert books.below.rate.blocks_under_way == 0

    def close(self) -> None:
        if isinstance(self.engine, Gated):
            self.engine.open()
        self.manager.close()
        self.tier.close(WAIT_S)
        self.engine.close(WAIT_S)
        self.scheduler.close(WAIT_S)
        self.pool.close()


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)
