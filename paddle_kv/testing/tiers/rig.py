"""A pool whose blocks say which key they belong to, and a tier below it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...layout import KVCacheSpec
from ...memory import HostPool
from ...memory.host_rows import block_rows
from ...tiers import Engine, Job, Outcome, Tier

WAIT_S = 60.0
POISON = 0xA5

# Several stages by direct I/O; and sizes that fit nothing.
ALIGNED = KVCacheSpec(num_layers=6, num_kv_heads=1, head_dim=128, block_size=16, dtype="float16")
ODD = KVCacheSpec(num_layers=5, num_kv_heads=1, head_dim=1733, block_size=3, dtype="int8")
SPECS = (ALIGNED, ODD)


class StagedTier(Tier):
    least_stage_bytes = 0  # the blocks are small, and come in stages as large ones do


class Rig:
    """Blocks 0.. are written by :meth:`fill`; all other bytes are poison until a load writes them."""

    def __init__(self, engine: Engine, spec: KVCacheSpec = ALIGNED, *, num_blocks: int = 40, model: bytes = b"model",
                 room_bytes: int = 0, **options: Any) -> None:  # fmt: skip
        self.pool = HostPool(spec, num_blocks, layout="block_first", room_bytes=room_bytes)
        self.rows = block_rows(self.pool)
        self.rows[:] = POISON
        self.tier = StagedTier(engine, self.pool, model=model, **options)

    def content(self, key: bytes) -> np.ndarray:
        """What the block of a key holds."""
        size = self.rows.shape[1]
        return np.asarray(np.random.default_rng(zlib.crc32(key)).integers(0, 256, size, np.uint8))

    def store(self, keys: Sequence[bytes], blocks: Iterable[int] | None = None, **options: float) -> Job:
        """Fills blocks and stores them; returns when the job is over."""
        ids = list(range(len(keys)) if blocks is None else blocks)
        for key, block_id in zip(keys, ids, strict=True):
            self.rows[block_id] = self.content(key)
        job = Job(keys, ids, **{"timeout_s": WAIT_S, **options})  # type: ignore[arg-type]
        self.tier.store([job])
        self.tier.drain(WAIT_S)
        return job

    def load(self, keys: Sequence[bytes], blocks: Iterable[int] | None = None, **options: float) -> Job:
        """Poisons the blocks and loads them; returns when the job is over."""
        ids = list(range(len(keys)) if blocks is None else blocks)
        self.rows[ids] = POISON
        job = Job(keys, ids, **{"timeout_s": WAIT_S, **options})  # type: ignore[arg-type]
        self.tier.load([job])
        self.tier.drain(WAIT_S)
        return job

    def wrong(self, job: Job) -> list[bytes]:
        """Keys that count as loaded, and whose block does not hold their bytes."""
        return [
            key
            for key, block_id, outcome in zip(job.keys, job.block_ids, job.outcomes, strict=True)
            if outcome is Outcome.DONE and not np.array_equal(self.rows[block_id], self.content(key))
        ]

    def close(self) -> None:
        self.tier.close(WAIT_S)


def keys(count: int, prefix: str = "key") -> list[bytes]:
    return [f"{prefix}-{number}".encode() for number in range(count)]
