"""A prompt that is loaded to a GPU while a tier still reads it: each layer as soon as the storage has brought it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError, devices
from paddle_kv.offload import KVOffloadManager
from paddle_kv.offload.rates import Rates
from paddle_kv.testing.tiers.rig import StagedTier
from tests.offload.chunk_rig import until
from tests.offload.tiered_rig import SHORT_S, Gated

WAIT_S = 20.0
SIZE, FOUND, BLOCKS = 16, 8, 24
SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=128, block_size=SIZE, dtype="float16")
CHUNK = 4 * SIZE
TOKENS = list(range((FOUND + 4) * SIZE))
SOURCES, TARGETS = [3, 17, 5, 21, 0, 9, 2, 11], [23, 4, 12, 7, 20, 1, 15, 8]
TABLE = [*TARGETS, 6, 10, 13, 14]


class Server:
    """What was found of the prompt lies in the tier alone."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(4)
        self.bits = {
            name: [rng.integers(0, 30000, (BLOCKS, *SPEC.block_shape(name)), np.uint16) for _ in range(SPEC.num_layers)]
            for name in SPEC.tensor_names
        }
        self.tensors = {
            name: [paddle.to_tensor(array.view(np.float16), place=devices.place_of(0)) for array in arrays]
            for name, arrays in self.bits.items()
        }
        self.storage = Gated(folder)
        self.pool = HostPool(SPEC, 16, layout="block_first")
        self.tier = StagedTier(self.storage, self.pool, model=b"model")
        self.scheduler = LayerwiseScheduler(DeviceCache.adopt(SPEC, self.tensors), self.pool)
        self.manager = KVOffloadManager(self.scheduler, tier=self.tier)
        self.books: Any = self.manager._books
        self.manager.save(self.manager.block_hashes(TOKENS)[:FOUND], SOURCES).wait(WAIT_S)
        self.manager.flush(WAIT_S)
        assert self.manager.evict(16) == FOUND

    def trust(self, tier_s: float) -> None:
        block_bytes = SPEC.block_bytes * SPEC.num_layers
        self.books.rates = rates = Rates(block_bytes, SIZE)
        rates.set_load("onload", block_bytes / 1e-3)
        rates.set_load("tier", block_bytes / tier_s)
        rates.set_prefill(1e3)

    def layers_right(self) -> list[bool]:
        """Of the targets, and that every other block is what it was."""
        pytest.importorskip("cupy").cuda.runtime.deviceSynchronize()
        found = []
        for layer in range(SPEC.num_layers):
            right = True
            for name in SPEC.tensor_names:
                there, was = self.tensors[name][layer].numpy().view(np.uint16), self.bits[name][layer]
                right = right and np.array_equal(there[TARGETS], was[SOURCES])
                others = np.delete(np.arange(BLOCKS), TARGETS)
                np.testing.assert_array_equal(there[others], was[others])
                if not right:
                    np.testing.assert_array_equal(there[TARGETS], was[TARGETS])
            found.append(right)
        return found

    def close(self) -> None:
        self.storage.open()
        self.manager.close()
        self.scheduler.close(WAIT_S)
        self.tier.close(WAIT_S)
        self.storage.close(WAIT_S)
        self.pool.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def test_each_layer_comes_when_the_storage_has_brought_it(server: Server) -> None:
    server.trust(1.0)
    for stage in server.storage.stages[1:]:
        stage.clear()
    with server.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == range(FOUND * SIZE, len(TOKENS))
        [load] = request.loads
        for layer in range(SPEC.num_layers):
            load.wait_layer(layer, timeout_s=WAIT_S)
            assert server.layers_right() == [True] * (layer + 1) + [False] * (SPEC.num_layers - layer - 1)
            if layer + 1 < SPEC.num_layers:
                with pytest.raises(TimeoutError):
                    load.wait_layer(layer + 1, timeout_s=SHORT_S)
                server.storage.stages[layer + 1].set()
        load.wait(WAIT_S)
        request.cancel()
    until(lambda: not server.pool.domain.busy(range(16)))


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_a_storage_that_stalls_is_left_when_it_is_late(server: Server, stages: int) -> None:
    server.trust(0.02)
    for stage in server.storage.stages[stages:]:
        stage.clear()
    with server.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == range(FOUND * SIZE, len(TOKENS))
        [load] = request.loads
        with pytest.raises(TransferError, match="the tier has not brought it in time"):
            load.wait_layer(2, timeout_s=WAIT_S)
        load.wait_over(WAIT_S)
        assert server.layers_right() == [True] * stages + [False] * (SPEC.num_layers - stages)
        assert request.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        assert any(server.pool.domain._write_leases)
        request.cancel()
    assert not server.scheduler.device_cache.domain.busy(TARGETS)
    server.storage.open()
    until(lambda: not server.pool.domain.busy(range(16)))
