"""The manager on the CPU backend: every byte of both sides compared, saves and loads held or failed at will."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, ClosedError, LayerwiseScheduler, TransferError
from paddle_kv.offload import KVOffloadManager, Lru
from paddle_kv.schedule.movement import Failure, State
from tests.schedule.rig import WAIT_S, Copies, Rig, assert_same, cache_memory, in_threads

HOST_BLOCKS = 17
LAYERS = 5


class Server:
    """A rig with its scheduler and manager."""

    def __init__(self, **options: Any) -> None:
        self.rig = Rig(host_blocks=HOST_BLOCKS)
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool)
        self.manager = KVOffloadManager(self.scheduler, **options)

    def hashes(self, count: int, prompt: int = 0) -> list[bytes]:
        return self.manager.block_hashes(np.arange(count * 7) + 1000 * prompt)

    def save(self, hashes: list[bytes], device_ids: Any) -> None:
        self.manager.save(hashes, device_ids).wait(WAIT_S)

    def present(self, hashes: list[bytes]) -> int:
        with self.manager.lookup(hashes) as lease:
            return lease.num_blocks

    @property
    def free(self) -> int:
        return self.rig.pool.num_free_blocks


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(**getattr(request, "param", {}))
    yield made
    made.scheduler.close(WAIT_S)
    made.manager.close()
    assert made.free == HOST_BLOCKS


def settle_failure(transfer: Any) -> Any:
    with pytest.raises((TransferError, CancelledError)) as caught:
        transfer.wait(WAIT_S)
    return caught.value


def test_what_was_saved_comes_back_bit_for_bit(server: Server) -> None:
    hashes, rig = server.hashes(4), server.rig
    server.save(hashes, [9, 2, 11, 5])
    with server.manager.lookup([*hashes, b"other"]) as lease:
        assert lease.hashes == hashes
        load = server.manager.onload(lease.hashes, [0, 7, 3, 12])
    load.wait(WAIT_S)
    for name in rig.spec.tensor_names:
        for source, target in zip([9, 2, 11, 5], [0, 7, 3, 12], strict=True):
            rig.device[name][:, target] = rig.device[name][:, source]
    assert_same(cache_memory(rig.cache), rig.device)
    assert server.manager.blocks_to_recompute(load) == []


def test_the_blocks_of_a_prompt_lie_side_by_side_in_order(server: Server) -> None:
    server.save(server.hashes(2, prompt=1), [11, 8])
    server.save(server.hashes(4), [3, 4, 5, 6])
    server.rig.expect_offload([11, 8, 3, 4, 5, 6], range(6))
    server.rig.check()


def test_a_block_is_found_only_when_all_of_its_bytes_are_there(server: Server, copies: Copies) -> None:
    copies.hold("offload", LAYERS - 1)
    hashes = server.hashes(3)
    save = server.manager.save(hashes, [4, 1, 8])
    assert copies.arrived.acquire(timeout=WAIT_S)
    assert server.present(hashes) == 0
    with pytest.raises(KeyError, match=r"hashes\[0\]"):
        server.manager.onload(hashes, [0, 2, 3])
    assert server.manager.stats()["saving_blocks"] == 3
    copies.go_on()
    save.wait(WAIT_S)
    assert server.present(hashes) == 3


def test_what_is_present_or_on_its_way_is_not_moved_again(server: Server, copies: Copies) -> None:
    hashes = server.hashes(5)
    server.save(hashes[:2], [0, 1])
    copies.hold("offload", 0)
    first = server.manager.save(hashes[:4], [0, 1, 2, 3])
    second = server.manager.save(hashes, range(5))
    block_bytes = server.rig.spec.block_bytes * LAYERS
    assert (first.bytes, second.bytes) == (2 * block_bytes, block_bytes)
    third = server.manager.save(hashes, range(5))
    assert third.bytes == 0
    assert not third.done()  # its device blocks are still being read
    copies.go_on()
    third.wait(WAIT_S)
    second.wait(WAIT_S)
    assert server.present(hashes) == 5
    assert server.free == HOST_BLOCKS - 5
    assert server.manager.stats()["deduplicated_blocks"] == 2 + 4 + 5


def test_a_failed_save_is_never_found_and_its_host_blocks_return(server: Server, copies: Copies) -> None:
    hashes = server.hashes(3)
    copies.fail("offload", 2, OSError("lost"))
    save = server.manager.save(hashes, [0, 1, 2])
    settle_failure(save)
    assert server.present(hashes) == 0
    assert server.free == HOST_BLOCKS
    copies.heal()
    server.save(hashes, [0, 1, 2])
    assert server.present(hashes) == 3
    assert server.manager.stats()["failed_saves"] == 1


def test_a_cancelled_save_is_never_found_and_its_host_blocks_return(server: Server) -> None:
    hashes = server.hashes(3)
    save = server.manager.save(hashes, [0, 1, 2], layerwise=True)
    save.mark_layer_written(0)
    save.cancel()
    settle_failure(save)
    assert server.present(hashes) == 0
    assert server.free == HOST_BLOCKS


def test_a_save_that_cannot_start_leaves_nothing_behind(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.scheduler, "start_here", broken)
    with pytest.raises(KeyboardInterrupt):
        server.manager.save(server.hashes(3), [0, 1, 2])
    assert server.free == HOST_BLOCKS
    assert server.manager.stats()["saving_blocks"] == 0


@pytest.mark.parametrize("where", ["on_insert", "victim"])
def test_a_policy_that_raises_in_a_save_leaves_nothing_behind(where: str) -> None:
    class Broken(Lru[bytes]):
        calls_left = 1 << 30

        def fail_at_last(self) -> None:
            self.calls_left -= 1
            if not self.calls_left:
                raise ZeroDivisionError

        def on_insert(self, key: bytes) -> None:
            if where == "on_insert":
                self.fail_at_last()
            super().on_insert(key)

        def victim(self, *arguments: Any) -> bytes | None:
            if where == "victim":
                self.fail_at_last()
            return super().victim(*arguments)

    policy: Any = Broken()
    made = Server(policy=policy)
    made.save(made.hashes(13), range(13))
    policy.calls_left = 3
    with pytest.raises(ZeroDivisionError):
        made.manager.save(made.hashes(8, 1), range(8))
    made.rig.expect_offload(range(13), range(13))
    made.rig.check()  # it had not begun
    gone = 0 if where == "on_insert" else 2  # in the save's free places, or evicted by it
    assert made.present(made.hashes(8, 1)) == 0
    assert made.present(made.hashes(13)) == 13 - gone
    assert made.free == HOST_BLOCKS - 13 + gone
    stats = made.manager.stats()
    assert (stats["saving_blocks"], stats["pinned_blocks"], stats["saved_blocks"]) == (0, 0, 13)
    made.save(made.hashes(8, 1), range(8))
    assert made.present(made.hashes(8, 1)) == 8
    made.scheduler.close(WAIT_S)
    made.manager.close()
    assert made.free == HOST_BLOCKS


def test_a_failed_load_says_what_to_recompute(server: Server, copies: Copies) -> None:
    hashes = server.hashes(3)
    server.save(hashes, [0, 1, 2])
    copies.fail("onload", 3, OSError("lost"))
    load = server.manager.onload(hashes[1:], [7, 5])
    error = settle_failure(load)
    assert sorted(error.block_ids) == [5, 7]
    assert server.manager.blocks_to_recompute(load) == [0, 1]
    assert server.present(hashes) == 3  # the copy in host memory is as good as before
    assert server.manager.stats()["failed_loads"] == 1
    assert server.manager.stats()["pinned_blocks"] == 0
    copies.heal()
    again = server.manager.onload(hashes[1:], [7, 5])
    again.wait(WAIT_S)
    assert server.manager.blocks_to_recompute(again) == []


def test_what_was_computed_from_a_failed_load_is_never_found(server: Server, copies: Copies) -> None:
    """The save itself arrives; its bytes are not what the hashes promise."""
    hashes = server.hashes(5)
    server.save(hashes[:2], [9, 2])
    copies.hold("onload", 3)
    copies.fail("onload", 3, OSError("lost"))
    load = server.manager.onload(hashes[:2], [0, 7])
    save = server.manager.save(hashes[2:4], [3, 4], computed_from=[load])
    other = server.manager.save(hashes[4:], [5])
    save.wait(WAIT_S)
    other.wait(WAIT_S)
    assert server.present(hashes) == 2
    assert server.manager.stats()["saving_blocks"] == 2  # it is not known yet
    copies.go_on()
    settle_failure(load)
    assert server.present(hashes) == 2
    assert server.present(hashes[4:]) == 1
    assert server.manager.stats()["failed_saves"] == 1
    assert server.free == HOST_BLOCKS - 3
    copies.heal()
    server.save(hashes[2:4], [3, 4])  # computed anew
    assert server.present(hashes) == 5


def test_what_was_computed_from_a_load_is_found_when_that_is_over(server: Server, copies: Copies) -> None:
    hashes = server.hashes(3)
    server.save(hashes[:1], [9])
    copies.hold("onload", 3)
    load = server.manager.onload(hashes[:1], [0])
    save = server.manager.blocks_full(hashes[1:], [3, 4], computed_from=[load])
    assert save is not None
    save.wait(WAIT_S)
    assert server.present(hashes) == 1
    copies.go_on()
    load.wait(WAIT_S)
    assert server.present(hashes) == 3


def test_a_cancelled_load_says_what_to_recompute(server: Server, copies: Copies) -> None:
    hashes = server.hashes(3)
    server.save(hashes, [9, 2, 11])
    host = server.rig.pool.allocate(1)
    save = server.scheduler.offload([1], host, layerwise=True)
    load = server.manager.onload(hashes, [0, 1, 3])  # its target 1 is being saved, layer by layer: it waits for marks
    load.cancel()
    save.cancel()
    settle_failure(load)
    settle_failure(save)
    assert server.manager.blocks_to_recompute(load) == [0, 1, 2]
    assert server.present(hashes) == 3
    server.rig.pool.free(host)


def test_a_lease_can_be_shortened(server: Server) -> None:
    hashes = server.hashes(4)
    server.save(hashes, [9, 2, 11, 5])
    lease = server.manager.lookup(hashes)
    with pytest.raises(ValueError, match=r"num_blocks = 5 must be in \[0, 4\]"):
        lease.keep_first(5)
    lease.keep_first(1)
    assert (lease.num_blocks, lease.hashes) == (1, hashes[:1])
    assert server.manager.evict(9) == 3
    lease.release()
    assert server.manager.evict(9) == 1


def test_a_shortened_lease_that_is_lost_lets_go_of_its_own_blocks_alone(server: Server) -> None:
    hashes = server.hashes(2)
    server.save(hashes, [9, 2])
    another, lost = server.manager.lookup(hashes), server.manager.lookup(hashes)
    lost.keep_first(1)
    assert server.manager.stats()["pinned_blocks"] == 2
    del lost
    gc.collect()
    assert server.manager.evict(9) == 0
    another.release()
    assert server.manager.evict(9) == 2


def test_a_transfer_of_somebody_else_is_refused(server: Server) -> None:
    save = server.manager.save([], [])
    with pytest.raises(ValueError, match="not a transfer"):
        server.manager.blocks_to_recompute(save)


def test_leased_blocks_stay(server: Server) -> None:
    hashes = server.hashes(4)
    server.save(hashes, range(4))
    lease = server.manager.lookup(hashes[:3])
    assert server.manager.evict(10) == 1
    assert server.manager.stats()["pinned_blocks"] == 3
    lease.release()
    lease.release()
    assert server.manager.evict(2) == 2
    assert server.manager.evict(2) == 1
    assert server.free == HOST_BLOCKS


def test_a_lease_that_is_forgotten_ends(server: Server) -> None:
    hashes = server.hashes(2)
    server.save(hashes, range(2))
    lease = server.manager.lookup(hashes)
    assert server.manager.evict(2) == 0
    del lease
    gc.collect()
    assert server.manager.evict(2) == 2


def test_blocks_that_a_load_reads_stay_until_it_is_over(server: Server, copies: Copies) -> None:
    hashes = server.hashes(3)
    server.save(hashes, range(3))
    copies.hold("onload", 4)
    load = server.manager.onload(hashes[:2], [6, 7])
    assert server.manager.evict(10) == 1
    copies.go_on()
    load.wait(WAIT_S)
    assert server.manager.evict(10) == 2


def test_room_is_made_by_evicting_the_oldest(server: Server) -> None:
    for prompt in range(4):
        server.save(server.hashes(5, prompt), range(5))  # 20 blocks into 17
    assert server.present(server.hashes(5, 0)) == 2  # its last three are gone
    assert [server.present(server.hashes(5, prompt)) for prompt in (1, 2, 3)] == [5, 5, 5]
    assert server.free == 0
    assert server.manager.stats()["evicted_blocks"] == 3


def test_a_prompt_beyond_the_pool_keeps_its_first_blocks(server: Server) -> None:
    hashes = server.hashes(HOST_BLOCKS + 3)
    save = server.manager.save(hashes, [position % 13 for position in range(len(hashes))])
    save.wait(WAIT_S)
    assert server.present(hashes) == HOST_BLOCKS
    assert server.manager.stats()["left_out_blocks"] == 3


def test_no_room_because_all_is_leased(server: Server) -> None:
    held = server.hashes(HOST_BLOCKS)
    server.save(held[:13], range(13))
    server.save(held[13:], range(4))
    with server.manager.lookup(held) as lease:
        assert lease.num_blocks == HOST_BLOCKS
        assert server.manager.save(server.hashes(2, 5), [0, 1]).bytes == 0
    server.save(server.hashes(2, 5), [0, 1])
    assert server.present(server.hashes(2, 5)) == 2


def test_blocks_of_the_pool_that_others_use_are_left_alone(server: Server) -> None:
    mine = server.rig.pool.allocate(12)
    server.save(server.hashes(9), range(9))
    assert server.present(server.hashes(9)) == 5
    server.rig.pool.free(mine)


def test_capacity_in_bytes() -> None:
    block_bytes = Rig().spec.block_bytes * LAYERS
    made = Server(capacity_bytes=3 * block_bytes + 1)
    assert (made.manager.capacity_blocks, made.manager.capacity_bytes) == (3, 3 * block_bytes)
    made.save(made.hashes(2), range(2))
    made.save(made.hashes(5), range(5))
    assert (made.present(made.hashes(5)), made.free) == (3, HOST_BLOCKS - 3)
    made.scheduler.close(WAIT_S)
    with pytest.raises(ValueError, match="capacity_bytes = 7"):
        KVOffloadManager(made.scheduler, capacity_bytes=7)


@pytest.mark.parametrize("server", [{"write_through": True}, {"write_through": False}], indirect=True)
def test_write_through_and_write_back(server: Server) -> None:
    hashes = server.hashes(2)
    filled = server.manager.blocks_full(hashes, [3, 4])
    assert (filled is not None) == server.manager.write_through
    if filled is not None:
        filled.wait(WAIT_S)
    assert server.present(hashes) == (2 if server.manager.write_through else 0)
    evicted = server.manager.blocks_evicted(hashes, [3, 4])
    assert bool(evicted.bytes) != server.manager.write_through
    evicted.wait(WAIT_S)
    assert server.present(hashes) == 2


@pytest.mark.parametrize(
    "server", [{"policy": name} for name in ("lru", "arc", "s3fifo")] + [{"policy": Lru()}], indirect=True
)
def test_every_policy_keeps_pool_and_index_in_step(server: Server) -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        prompt, count = int(rng.integers(6)), int(rng.integers(1, 9))
        hashes = server.hashes(count, prompt)
        with server.manager.lookup(hashes) as lease:
            server.manager.onload(lease.hashes, range(lease.num_blocks)).wait(WAIT_S)
            server.save(hashes[lease.num_blocks :], range(lease.num_blocks, count))
    stats = server.manager.stats()
    assert stats["blocks"] == HOST_BLOCKS - server.free
    assert stats["hit_blocks"] > 0
    assert stats["saving_blocks"] == stats["pinned_blocks"] == 0


def test_bad_arguments_are_named_and_change_nothing(server: Server) -> None:
    hashes = server.hashes(3)
    for call, error, text in [
        (lambda: server.manager.save(hashes, [0, 1]), ValueError, "hashes has 3 blocks, device_block_ids has 2"),
        (
            lambda: server.manager.save(hashes, [0, 1, 13]),
            IndexError,
            r"device_block_ids\[2\] = 13 must be in \[0, 13\)",
        ),
        (lambda: server.manager.save(["a"], [0]), TypeError, r"hashes\[0\] is str"),
        (lambda: server.manager.save([b"a", "b"], [0, 1]), TypeError, r"hashes\[1\] is str"),
        (lambda: server.manager.lookup(b"hash"), TypeError, "hashes is bytes"),
        (lambda: server.manager.lookup({b"hash"}), TypeError, "hashes is set"),
        (lambda: server.manager.save(hashes, [0, 1, 2], computed_from=[None]), TypeError, "computed_from is"),
        (
            lambda: server.manager.save(hashes, [0, 1, 2], computed_from=server.scheduler.onload([], [])),
            TypeError,
            "computed_from is",
        ),
        (lambda: server.manager.onload(hashes, [0, 1, 2]), KeyError, r"hashes\[0\]"),
        (lambda: server.manager.evict(-1), ValueError, "num_blocks = -1"),
        (lambda: KVOffloadManager(server.scheduler, policy="mru"), ValueError, "'mru'"),
        (lambda: KVOffloadManager(server.scheduler, policy=Lru), TypeError, "policy is"),
        (lambda: KVOffloadManager(server.scheduler, policy=object()), TypeError, "policy is"),
        (lambda: KVOffloadManager(server.scheduler, salt="m"), TypeError, "salt is str"),
        (lambda: KVOffloadManager(None), TypeError, "scheduler is NoneType"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert server.free == HOST_BLOCKS
    server.rig.check()


def test_a_wrong_block_id_evicts_nothing(server: Server) -> None:
    server.save(server.hashes(13), range(13))
    server.save(server.hashes(4, 1), range(4))
    with pytest.raises(IndexError, match=r"device_block_ids\[1\] = 13 must be in"):
        server.manager.save(server.hashes(2, 2), [0, 13])
    assert server.present(server.hashes(13)) == 13
    assert server.manager.stats()["evicted_blocks"] == 0


def test_close_gives_everything_back_and_ends_the_manager(server: Server, copies: Copies) -> None:
    hashes = server.hashes(4)
    server.save(hashes, range(4))
    lease = server.manager.lookup(hashes)
    unmarked = server.manager.save(server.hashes(2, 1), [5, 6], layerwise=True)
    server.manager.close()
    server.manager.close()
    assert server.free == HOST_BLOCKS
    settle_failure(unmarked)
    lease.release()
    for call in (lambda: server.manager.lookup(hashes), lambda: server.manager.save(hashes, range(4))):
        with pytest.raises(ClosedError, match="the offload manager is closed"):
            call()


def test_close_leaves_loads_alone(server: Server) -> None:
    """One that has to wait, since somebody still reads the device block that it writes."""
    hashes = server.hashes(1)
    server.save(hashes, [9])
    reader = server.scheduler.offload([2], server.rig.pool.allocate(1), layerwise=True)
    with server.manager.lookup(hashes) as lease:
        load = server.manager.onload(lease.hashes, [2])
    server.manager.close()
    reader.cancel()
    load.wait(WAIT_S)
    server.rig.pool.free([next(iter(server.rig.pool._allocated))])
    for name in server.rig.spec.tensor_names:
        server.rig.device[name][:, 2] = server.rig.device[name][:, 9]
    assert_same(cache_memory(server.rig.cache), server.rig.device)


def test_close_behind_that_of_the_pool() -> None:
    made = Server()
    made.save(made.hashes(2), [0, 1])
    made.scheduler.close(WAIT_S)
    made.rig.pool.close()
    made.manager.close()


def test_a_lease_that_is_over_cannot_be_shortened_twice(server: Server) -> None:
    hashes = server.hashes(3)
    server.save(hashes, [0, 1, 2])
    held, over = server.manager.lookup(hashes), server.manager.lookup(hashes)
    over.release()
    over.keep_first(1)
    assert server.manager.stats()["pinned_blocks"] == 3
    late = server.manager.lookup(hashes)
    server.manager.close()
    late.keep_first(0)
    held.release()


def test_a_shortened_lease_that_is_lost_holds_nothing(server: Server) -> None:
    hashes = server.hashes(3)
    server.save(hashes, [0, 1, 2])
    lease = server.manager.lookup(hashes)
    lease.keep_first(2)
    assert server.manager.stats()["pinned_blocks"] == 2
    del lease
    assert server.manager.stats()["pinned_blocks"] == 0


def test_stats_count_what_was_looked_up_and_loaded(server: Server) -> None:
    hashes = server.hashes(3)
    server.save(hashes, [0, 1, 2])
    with server.manager.lookup([*hashes, b"other"]) as lease:
        server.manager.onload(lease.hashes[:2], [3, 4]).wait(WAIT_S)
    stats, block_bytes = server.manager.stats(), LAYERS * server.rig.spec.block_bytes
    expected = {
        "lookups": 1,
        "looked_up_blocks": 4,
        "hit_blocks": 3,
        "hit_rate": 0.75,
        "saved_blocks": 3,
        "saved_bytes": 3 * block_bytes,
        "loaded_blocks": 2,
        "loaded_bytes": 2 * block_bytes,
        "failed_loads": 0,
        "used_bytes": 3 * block_bytes,
    }
    assert {name: stats[name] for name in expected} == expected


def test_threads_share_a_manager(server: Server) -> None:
    def serve(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            hashes = server.hashes(int(rng.integers(1, 7)), int(rng.integers(5)))
            with server.manager.lookup(hashes) as lease:
                load = server.manager.onload(lease.hashes, range(lease.num_blocks))
            load.wait(WAIT_S)
            server.manager.save(hashes, range(len(hashes))).wait(WAIT_S)

    in_threads(*[functools.partial(serve, seed) for seed in range(4)])
    stats = server.manager.stats()
    assert stats["pinned_blocks"] == stats["saving_blocks"] == 0
    assert stats["blocks"] == HOST_BLOCKS - server.free


def test_a_policy_is_an_object_and_not_its_class() -> None:
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        with pytest.raises(
            TypeError, match=r"policy is <class .*Lru'>; a name or an object with the methods of Policy"
        ):
            KVOffloadManager(scheduler, policy=Lru)  # type: ignore[arg-type]
        KVOffloadManager(scheduler, policy=Lru()).close()


@pytest.mark.parametrize("call", ["save", "blocks_full", "blocks_evicted"])
def test_loads_may_come_from_a_generator(server: Server, copies: Copies, call: str) -> None:
    """One that is read only to look at it would leave the save without its loads."""
    hashes = server.hashes(2)
    server.save(hashes[:1], [9])
    copies.hold("onload", 3)
    copies.fail("onload", 3, OSError("lost"))
    load = server.manager.onload(hashes[:1], [0])
    save = getattr(server.manager, call)(hashes[1:], [3], computed_from=(one for one in [load]))
    save.wait(WAIT_S)
    copies.go_on()
    settle_failure(load)
    assert server.present(hashes) == 1
    assert server.manager.stats()["failed_saves"] == 1
    with pytest.raises(TypeError, match="computed_from is None; a list of Transfer is expected"):
        getattr(server.manager, call)(hashes[1:], [3], computed_from=None)


def test_a_load_that_finds_damage_at_its_end_drops_the_block(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save was not over when the load was started, so it is compared behind it."""
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    made = Server()
    hashes = made.hashes(3)
    made.save(hashes, [0, 1, 2])
    copies.hold("onload", 4)
    load = made.manager.onload(hashes, [4, 5, 6])
    assert copies.arrived.acquire(timeout=WAIT_S)
    movement = load._movement
    slot = made.manager._books.index.slots[hashes[1]]
    monkeypatch.setattr(made.scheduler.observer, "over", lambda *_: Failure(State.FAILED, "wrong", damaged=(slot,)))
    copies.go_on()
    load.wait_over(WAIT_S)
    assert movement.failure is not None
    assert made.manager.blocks_to_recompute(load) == [0, 1, 2]
    assert made.present(hashes) == 1
    stats = made.manager.stats()
    assert (stats["damaged_blocks"], stats["failed_loads"], stats["pinned_blocks"]) == (1, 1, 0)
    assert made.free == HOST_BLOCKS - 2
    made.manager.close()
    made.scheduler.close(WAIT_S)


def test_damage_is_found_once_and_a_lease_on_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests, one damaged block: the first load fails, and no lookup counts it as a hit again."""
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    made = Server()
    hashes = made.hashes(3)
    made.save(hashes, [0, 1, 2])
    made.rig.pool.view("key", 2, made.manager._books.index.slots[hashes[0]])[...] = 1
    leases = [made.manager.lookup(hashes) for _ in range(2)]
    for lease in leases:
        with pytest.raises(TransferError):
            made.manager.onload(lease.hashes, [4, 5, 6])
        lease.release()
    before = made.manager.stats()
    assert (before["damaged_blocks"], before["pinned_blocks"], before["loaded_blocks"]) == (1, 0, 0)
    for _ in range(10):
        assert made.present(hashes) == 0
    assert made.manager.stats()["hit_blocks"] == before["hit_blocks"] == 6
    made.save(hashes, [0, 1, 2])
    assert made.present(hashes) == 3
    made.manager.close()
    made.scheduler.close(WAIT_S)


def test_the_capacity_leaves_out_what_others_have(server: Server) -> None:
    mine = server.rig.pool.allocate(12)
    server.save(server.hashes(2), [0, 1])
    stats = server.manager.stats()
    assert (stats["capacity_blocks"], server.manager.capacity_blocks) == (HOST_BLOCKS - 12, HOST_BLOCKS)
    assert stats["capacity_bytes"] == (HOST_BLOCKS - 12) * LAYERS * server.rig.spec.block_bytes
    server.rig.pool.free(mine)
    assert server.manager.stats()["capacity_blocks"] == HOST_BLOCKS


def test_a_lookup_tells_what_is_arriving(server: Server, copies: Copies) -> None:
    """Requests with one prompt at once: the later ones may wait for the save of the first."""
    hashes = server.hashes(5)
    server.save(hashes[:1], [0])
    copies.hold("offload", 2)
    save = server.manager.save(hashes[:4], [0, 1, 2, 3])
    with server.manager.lookup(hashes) as lease:
        assert (lease.num_blocks, lease.num_arriving) == (1, 3)
    copies.go_on()
    save.wait(WAIT_S)
    with server.manager.lookup(hashes) as lease:
        assert (lease.num_blocks, lease.num_arriving) == (4, 0)


def test_a_peek_is_no_use(server: Server) -> None:
    server.save(server.hashes(2), [0, 1])
    server.save(server.hashes(2, 1), [2, 3])
    assert server.manager.peek([*server.hashes(2), b"other"]) == 2
    assert server.manager.evict(2) == 2
    assert server.manager.peek(server.hashes(2)) == 0  # it was still the oldest
    assert server.manager.peek(server.hashes(2, 1)) == 2
    stats = server.manager.stats()
    assert stats["lookups"] == stats["looked_up_blocks"] == 0


def test_all_in_flight_can_be_cancelled(server: Server, copies: Copies) -> None:
    hashes = server.hashes(4)
    server.save(hashes[:1], [0])
    copies.hold("onload", 0)
    load = server.manager.onload(hashes[:1], [5])
    save = server.manager.save(hashes[1:], [1, 2, 3], layerwise=True)
    other = server.scheduler.offload([7], server.rig.pool.allocate(1), layerwise=True)
    assert server.manager.in_flight() == [load, save]
    server.manager.cancel_all()
    assert save.failed and not other.failed
    copies.go_on()
    settle_failure(save)
    load.wait_over(WAIT_S)
    assert server.manager.in_flight() == []
    assert server.present(hashes) == 1
    server.rig.pool.free(other.plan.host_ids)
    other.cancel()


def test_what_was_not_left_out_is_an_empty_list(server: Server) -> None:
    save = server.manager.save(server.hashes(2), [0, 1])
    save.wait(WAIT_S)
    assert server.manager.left_out(save) == []
    with pytest.raises(ValueError, match="not a transfer"):
        server.manager.left_out(server.manager.onload(server.hashes(2), [3, 4]))


def test_num_tokens_have_to_fit_the_hashes(server: Server) -> None:
    with pytest.raises(ValueError, match="num_tokens = 13 must be at least 14, the tokens of 2 blocks"):
        server.manager.lookup(server.hashes(2), num_tokens=13)
    with pytest.raises(TypeError, match="num_tokens"):
        server.manager.lookup(server.hashes(2), num_tokens=1.5)  # type: ignore[arg-type]
    assert server.manager.lookup([], num_tokens=0).num_blocks == 0


def test_a_save_that_is_dropped_half_way_keeps_nothing_of_another(server: Server, copies: Copies) -> None:
    """The first save fails behind a second one of the same block: the block is the second one's."""
    hashes = server.hashes(1)
    first = server.manager.save(hashes, [0], layerwise=True)
    assert server.manager.drop(hashes) == 1
    second = server.manager.save(hashes, [1])
    first.cancel()
    second.wait(WAIT_S)
    assert server.present(hashes) == 1
    assert server.free == HOST_BLOCKS - 1
    assert server.manager.stats()["failed_saves"] == 1
