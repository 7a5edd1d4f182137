"""FastDeploy's calls of storage over a tier: what comes back after a restart, what does not, and who is told."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import (
    ClosedError,
    DeviceCache,
    ForkedError,
    HostPool,
    KVCacheSpec,
    LayerwiseScheduler,
    LeasedError,
    TransferError,
)
from paddle_kv.integrations import CacheTransferManager
from paddle_kv.testing.tiers import Fault, FaultyEngine
from paddle_kv.tiers import FilesEngine, Tier
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, bytes_at

LAYERS, DEVICE_BLOCKS, HOST_BLOCKS = 3, 7, 9
CALLS = ["prefetch_from_storage", "backup_device_to_storage", "backup_host_to_storage"]


@dataclass
class Metadata:
    """What of FastDeploy's ``StorageMetadata`` is read."""

    hash_values: list[Any] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    timeout: float = WAIT_S


def sha(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


class Server:
    """A worker: caches of random content, its manager, and the bytes of the device, role by role."""

    def __init__(self, folder: Path, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.caches = {}
        for layer in range(LAYERS):
            for role, shape in (("key_caches", [2, 3, 5]), ("value_caches", [2, 3, 5]), ("key_cache_scales", [2, 3])):
                content = random.integers(0, 256, [DEVICE_BLOCKS, *shape], np.uint8)
                self.caches[f"{role}_{layer}_rank1.device0"] = paddle.to_tensor(content)
        self.engine = FaultyEngine(FilesEngine({folder: 4 << 20}), [], share=0)
        self.manager = CacheTransferManager.from_maps(
            self.caches,
            num_host_blocks=HOST_BLOCKS,
            local_rank=1,
            make_tier=lambda pool: Tier(self.engine, pool, model=b"m", rank=1),
        )
        self.pool = self.manager.scheduler.host_pool

    def rows(self, block: int) -> list[bytes]:
        return [
            bytes_at(one.data_ptr(), one.numel().item()).reshape(DEVICE_BLOCKS, -1)[block].tobytes()
            for one in self.caches.values()
        ]

    def go_wrong(self, fault: Fault) -> None:
        self.engine._faults, self.engine._share = [fault], 1.0

    def close(self) -> None:
        self.manager.close()
        self.engine.close(WAIT_S)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, 1)
    yield made
    made.close()


def test_blocks_come_back_after_a_restart(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = server.manager.backup_device_to_storage([4, 0], Metadata([sha(0), sha(1)], [8, 2]))
    server.manager.evict_to_host_async([6, 1], [3, 5])
    backed = server.manager.backup_host_to_storage([5, 3], Metadata([sha(2), sha(3)]))
    assert saved.wait(WAIT_S) and saved.is_completed and saved.get_result() == [True, True] == backed.get_result()
    assert saved.error is None is backed.error
    expected = [server.rows(block) for block in (4, 0, 1, 6)]
    server.close()

    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    again = Server(tmp_path, 2)
    again.manager.evict_to_host_async([0, 1, 2, 3], [0, 7, 1, 4])  # checksums of what lies there before
    task = again.manager.prefetch_from_storage(Metadata([sha(number) for number in range(4)], [7, 1, 0, 4]))
    assert task.get_result() == [True] * 4
    events: dict[int, Any] = {}
    again.manager.load_layers_to_device_async(
        range(LAYERS),
        [7, 1, 0, 4],
        [5, 3, 1, 6],
        lambda layer: events.__setitem__(layer, again.manager.record_input_stream_event()),
    )
    for event in events.values():
        event.synchronize()
    assert [again.rows(block) for block in (5, 3, 1, 6)] == expected
    again.close()


def test_what_is_not_there_is_told(server: Server) -> None:
    server.manager.backup_device_to_storage([4], Metadata([sha(0)], [8])).get_result()
    task = server.manager.prefetch_from_storage(Metadata([sha(0), sha(1)], [1, 2]))
    with pytest.raises(RuntimeError, match="1 of 2 blocks were not loaded: 1 missing"):
        task.get_result()
    assert task.result == [True, False] and task.is_completed and not task.cancel()
    server.manager.evict_to_host_async([3], [2])  # nobody has the block any more
    assert server.manager.prefetch_from_storage(Metadata()).get_result() == []


def test_a_damaged_object_is_told(server: Server) -> None:
    server.manager.backup_device_to_storage([4], Metadata([sha(0)], [8])).get_result()
    server.go_wrong(Fault.WRONG)
    task = server.manager.prefetch_from_storage(Metadata([sha(0)], [1]))
    assert task.wait(WAIT_S) and task.result == [False]
    assert "damaged" in str(task.error)


def test_storage_that_never_answers_keeps_the_blocks(server: Server) -> None:
    server.manager.backup_device_to_storage([4], Metadata([sha(0)], [8])).get_result()
    server.go_wrong(Fault.LOST)
    task = server.manager.prefetch_from_storage(Metadata([sha(0)], [1], timeout=SHORT_S))
    assert task.wait(WAIT_S) and "late" in str(task.error)
    with pytest.raises(LeasedError, match="block 1 of the host pool"):
        server.manager.evict_to_host_async([0], [1])  # it may still be written
    with pytest.raises(TimeoutError, match="1 jobs of the tier were not over"):
        server.manager.close()
    assert not server.pool.closed
    server.engine.close(WAIT_S)
    server.manager.close()
    assert server.pool.closed


def test_a_call_goes_on_as_soon_as_another_one_lets_go_of_its_block(server: Server) -> None:
    server.manager.backup_device_to_storage([4], Metadata([sha(0)], [8])).get_result()
    server.engine.delay_s = SHORT_S
    server.go_wrong(Fault.LATE)
    first = server.manager.prefetch_from_storage(Metadata([sha(0)], [1]))
    second = server.manager.prefetch_from_storage(Metadata([sha(0)], [1], timeout=WAIT_S))
    assert first.wait(WAIT_S) and second.wait(WAIT_S / 6)  # and not when its time is over
    assert second.result == [True]


def test_a_save_that_fails_is_not_stored(server: Server, copies: Copies) -> None:
    server.manager.backup_device_to_storage([5], Metadata([sha(7)], [2])).get_result()
    expected = server.rows(5)
    copies.fail("offload", 1, OSError("lost"))
    with pytest.raises(TransferError, match="lost"):
        server.manager.backup_device_to_storage([4], Metadata([sha(0)], [8]))
    task = server.manager.backup_host_to_storage([8], Metadata([sha(0)]))
    assert task.wait(WAIT_S) and "block 8 of the host pool holds no usable data" in str(task.error)
    with pytest.raises(RuntimeError, match="missing"):
        server.manager.prefetch_from_storage(Metadata([sha(0)], [1])).get_result()
    server.manager.prefetch_from_storage(Metadata([sha(7)], [8])).get_result()  # it holds data again
    server.manager.load_layers_to_device_async(range(LAYERS), [8], [0]).wait(WAIT_S)
    assert server.rows(0) == expected


def test_a_store_waits_for_the_save_that_brings_the_block(server: Server, copies: Copies) -> None:
    expected = server.rows(4)
    copies.hold("offload", 2)
    server.manager.evict_to_host_async([4], [8], order_compute=False)
    task = server.manager.backup_host_to_storage([8], Metadata([sha(0)]))
    assert not task.wait(SHORT_S)
    late = server.manager.backup_host_to_storage([8], Metadata([sha(1)], timeout=SHORT_S))
    assert late.wait(WAIT_S) and "other transfers had the blocks" in str(late.error)
    copies.go_on()
    assert task.get_result() == [True]
    assert server.manager.prefetch_from_storage(Metadata([sha(0)], [1])).get_result() == [True]
    server.manager.load_layers_to_device_async(range(LAYERS), [1], [0]).wait(WAIT_S)
    assert server.rows(0) == expected


@pytest.mark.parametrize(
    ("hashes", "blocks", "error", "message"),
    [
        ([sha(0)], [HOST_BLOCKS], IndexError, r"host_block_ids\[0\] = 9 must be in \[0, 9\)"),
        ([sha(0), sha(1)], [1, 1], ValueError, "host_block_ids names block 1 more than once"),
        ([sha(0)], [1, 2], ValueError, "keys has 1 entries, block_ids has 2"),
        ([sha(0) + "0"], [1], ValueError, r"metadata.hash_values\[0\] has 65 bytes"),
        ([7], [1], TypeError, r"metadata.hash_values\[0\] is int"),
        ("ab", [1, 2], TypeError, "metadata.hash_values is str; a list"),  # and no two hashes of one letter
        (None, [1], TypeError, "metadata.hash_values is NoneType; a list"),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments_move_nothing(
    server: Server, call: str, hashes: Any, blocks: list[int], error: type[Exception], message: str
) -> None:
    given = {CALLS[1]: [list(range(len(blocks)))], CALLS[2]: [blocks]}.get(call, [])
    with pytest.raises(error, match=message):
        getattr(server.manager, call)(*given, Metadata(hashes, blocks))
    assert server.manager.get_stats()["offload_transfers"] == 0


@pytest.mark.parametrize("metadata", [None, [3], {"hash_values": []}])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_metadata_moves_nothing(server: Server, call: str, metadata: object) -> None:
    given = [] if call == CALLS[0] else [[0]]
    with pytest.raises(TypeError, match=f"metadata is {type(metadata).__name__}, without .*timeout is expected"):
        getattr(server.manager, call)(*given, metadata)
    assert server.manager.get_stats()["offload_transfers"] == 0


def begin(manager: CacheTransferManager, call: str) -> object:
    given = [] if call == CALLS[0] else [[0]]
    return getattr(manager, call)(*given, Metadata([sha(0)], [0]))


@pytest.mark.parametrize("call", CALLS)
def test_a_manager_that_is_closed_says_so_and_moves_nothing(tmp_path: Path, call: str) -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
    cache, pool = DeviceCache(spec, 2, "cpu"), HostPool(spec, 2, layout="block_first")
    with (
        FilesEngine({tmp_path: 1 << 20}) as engine,
        Tier(engine, pool, model=b"m") as tier,
        LayerwiseScheduler(cache, pool) as scheduler,
    ):
        manager = CacheTransferManager(scheduler, tier=tier)
        manager.close()
        with pytest.raises(ClosedError, match="the cache transfer manager is closed"):
            begin(manager, call)
        assert scheduler.stats()["offload_transfers"] == 0


def test_a_call_that_meets_close_says_so(server: Server) -> None:
    storage = server.manager._storage
    assert storage is not None
    task = storage.plan(Metadata([sha(0)], [0]), [0], write=False)
    server.manager.close()
    with pytest.raises(ClosedError, match="the cache transfer manager is closed"):
        storage.begin(task)


@pytest.mark.parametrize("call", CALLS)
def test_a_forked_child_is_told_that_nobody_would_serve_it(server: Server, call: str) -> None:
    server.manager.backup_device_to_storage([1], Metadata([sha(1)], [1])).get_result()  # its threads exist
    child = os.fork()
    if not child:
        try:
            begin(server.manager, call)
        except ForkedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("call", CALLS)
def test_without_a_tier_the_calls_raise(call: str) -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
    with LayerwiseScheduler(DeviceCache(spec, 3, "cpu"), HostPool(spec, 3)) as scheduler:
        manager = CacheTransferManager(scheduler)
        with pytest.raises(NotImplementedError, match=rf"{call} needs a storage below host memory.*make_tier="):
            getattr(manager, call)(*[[0]] * (call != CALLS[0]), Metadata())


def test_refuses_what_is_no_tier_of_its_pool(server: Server, tmp_path: Path) -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
    with LayerwiseScheduler(DeviceCache(spec, 3, "cpu"), HostPool(spec, 3)) as scheduler:
        with pytest.raises(TypeError, match="tier is str"):
            CacheTransferManager(scheduler, tier="files")  # type: ignore[arg-type]
        with Tier(server.engine, server.pool, model=b"m") as tier, pytest.raises(ValueError, match="different host"):
            CacheTransferManager(scheduler, tier=tier)
    with pytest.raises(ZeroDivisionError):  # nothing stays open
        CacheTransferManager.from_maps(server.caches, num_host_blocks=2, local_rank=1, make_tier=lambda pool: 1 / 0)
