"""Out of the host memory of another process onto the GPU: every byte, each layer when it is said to be there, kills."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, PaddleKVError, devices  # noqa: E402
from paddle_kv.memory.host_memory import can_page_lock  # noqa: E402
from paddle_kv.offload import KVOffloadManager  # noqa: E402
from paddle_kv.testing.tiers.rig import StagedTier  # noqa: E402
from paddle_kv.tiers import load  # noqa: E402
from paddle_kv.tiers.neighbours import NeighbourEngine  # noqa: E402
from tests.gpu.lending import MODEL, lend  # noqa: E402
from tests.gpu.peer_rig import SEED, SPECS, Process, bits_of, end_spares, set_cache, until, use_gpu  # noqa: E402
from tests.schedule.rig import WAIT_S, assert_same, moved, random_bits  # noqa: E402

pytestmark = pytest.mark.skipif(not can_page_lock(), reason="needs a GPU and operators built for it")
KILLS = 12


@pytest.fixture(scope="module", autouse=True)
def spares() -> Iterator[None]:
    yield
    end_spares()


def keys_of(count: int) -> list[bytes]:
    return [b"block %d" % number for number in range(count)]


class Reading:
    """The process that loads. ``device``: what should be in its cache."""

    def __init__(self, path: str, kind: str) -> None:
        use_gpu(0)
        self.spec, _, blocks = SPECS[kind]
        self.cache = DeviceCache(self.spec, blocks, devices.name_of(0))
        self.device = random_bits(self.spec, blocks, 1)
        set_cache(self.cache, self.device)
        self.pool = HostPool(self.spec, blocks, layout="block_first")
        self.engine = NeighbourEngine([path])
        self.engine.wait_connected(WAIT_S)
        self.tier = StagedTier(self.engine, self.pool, model=MODEL)
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, compute_stream=self.compute)

    def know(self, keys: Sequence[bytes]) -> None:
        until(lambda: all(self.tier.exists(keys)))

    def seen_by_compute(self, layer: int) -> dict[str, Any]:
        """The layer as work on the compute stream finds it now: the host does not wait."""
        found = {}
        for name in self.spec.tensor_names:
            size_bytes = self.cache.num_blocks * self.spec.tensor_block_bytes(name)
            with self.compute:
                found[name] = cupy.empty(size_bytes, cupy.uint8)
            source = self.cache.pointer(name, layer)
            cupy.cuda.runtime.memcpyAsync(found[name].data.ptr, source, size_bytes, 3, self.compute.ptr)
        return found

    def right(self, target: int, source: int, theirs: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> bool:
        return all((actual[name][:, target] == theirs[name][:, source]).all() for name in self.spec.tensor_names)

    def close(self) -> None:
        self.scheduler.close(WAIT_S)
        self.tier.close(WAIT_S)
        self.engine.close(WAIT_S)
        self.pool.close()


@contextlib.contextmanager
def both(kind: str) -> Iterator[tuple[Reading, Process]]:
    there = Process(lend, 0, kind)
    try:
        with contextlib.closing(Reading(there.ask("path"), kind)) as here:
            yield here, there
    finally:
        there.kill()


@pytest.mark.parametrize("kind", ["odd sizes", "4 KiB", "32 KiB", "256 KiB"])
def test_every_byte_and_each_layer_for_the_compute_stream(kind: str) -> None:
    rng = random.Random(8)
    spec, sources, targets = SPECS[kind]
    theirs, keys, at = random_bits(spec, sources, SEED), keys_of(sources), rng.sample(range(sources), sources)
    with both(kind) as (here, there):
        there.ask("save", keys, at)
        here.know(keys)
        count = min(sources, targets) // 3
        free, wanted = (rng.sample(range(n), n) for n in (targets, sources))
        host = rng.sample(here.pool.allocate(targets), targets)
        loads = []
        for number in range(3):  # in flight together
            first = number * count
            some, target = wanted[first : first + count], free[first : first + count]
            asked = [keys[one] for one in some]
            ids = host[first : first + count]
            loads.append((*load(here.tier, here.scheduler, asked, ids, target), [at[one] for one in some], target))
        for transfer, job, source, target in loads:
            seen = []
            for layer in range(spec.num_layers):
                transfer.wait_layer(layer, timeout_s=WAIT_S)
                seen.append(here.seen_by_compute(layer))
            transfer.wait(WAIT_S)
            assert job.done
            here.compute.synchronize()
            for layer, found in enumerate(seen):
                for name, array in found.items():
                    rows = array.get().reshape(here.cache.num_blocks, -1)
                    assert (rows[target] == theirs[name][layer, source]).all(), f"{name} of layer {layer}"
            here.device = moved(theirs, here.device, source, target)
        assert_same(bits_of(here.cache), here.device)  # also what must not be touched
        until(lambda: not there.ask("stats")["leased_blocks"])
        assert there.ask("stats")["read_blocks"] == 3 * count


def test_two_managers() -> None:
    """A prefix that one server has computed and saved, another one looks up and loads, until it is evicted there."""
    kind = "32 KiB"
    spec, sources, _ = SPECS[kind]
    theirs, keys = random_bits(spec, sources, SEED), keys_of(12)
    at, target = [30, 2, 17, 9, 1, 39, 22, 5, 12, 0, 33, 8], [4, 40, 7, 1, 22, 13, 49, 0, 31, 11, 3, 18]
    with both(kind) as (here, there):
        there.ask("save", keys, at)
        manager = KVOffloadManager(here.scheduler, tier=here.tier)
        until(lambda: manager.peek(keys) == len(keys))
        with manager.lookup(keys) as lease:
            assert lease.num_blocks == len(keys)
            manager.onload(lease.hashes, target).wait(WAIT_S)
        assert_same(bits_of(here.cache), moved(theirs, here.device, at, target))
        assert manager.stats()["tier_hit_blocks"] == len(keys)
        manager.evict(here.pool.num_blocks)
        assert there.ask("evict", 2 * sources) == len(keys)
        until(lambda: manager.peek(keys) == 0)
        manager.close()


def test_a_lender_that_is_killed_costs_blocks_and_no_wrong_byte() -> None:
    lost = [_num_lost_by_a_kill(seed) for seed in range(KILLS)]
    assert any(0 < one < SPECS["long"][1] for one in lost), f"none came in the midst of a load: {lost} blocks were lost"


def _num_lost_by_a_kill(seed: int) -> int:
    rng = random.Random(seed)
    kind = "long"
    spec, sources, targets = SPECS[kind]
    theirs, keys, at = random_bits(spec, sources, SEED), keys_of(sources), rng.sample(range(sources), sources)
    with both(kind) as (here, there):
        there.ask("save", keys, at)
        manager = KVOffloadManager(here.scheduler, tier=here.tier)
        until(lambda: manager.peek(keys) == len(keys))
        target = rng.sample(range(targets), sources)
        with manager.lookup(keys) as lease:
            began_s = time.monotonic()
            transfer = manager.onload(lease.hashes, target)
        time.sleep(rng.random() * 0.06)
        there.kill()
        for layer in range(spec.num_layers):
            with contextlib.suppress(PaddleKVError):
                transfer.wait_layer(layer, timeout_s=WAIT_S)
        with contextlib.suppress(PaddleKVError):
            transfer.wait(WAIT_S)
        transfer.wait_over(WAIT_S)
        assert time.monotonic() - began_s < WAIT_S
        lost = set(manager.blocks_to_recompute(transfer))
        actual = bits_of(here.cache)
        for number, (source, block) in enumerate(zip(at, target, strict=True)):
            assert number in lost or here.right(block, source, theirs, actual)
        untouched = sorted(set(range(targets)) - set(target))
        for name in spec.tensor_names:
            np.testing.assert_array_equal(actual[name][:, untouched], here.device[name][:, untouched])
        until(lambda: manager.peek(keys) <= len(keys) - len(lost))
        manager.evict(here.pool.num_blocks)
        until(lambda: here.pool.num_free_blocks == here.pool.num_blocks)
        manager.close()
        return len(lost)
