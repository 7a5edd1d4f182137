"""What the manager counts, and that it counts what has ended by then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from paddle_kv import ClosedError, LayerwiseScheduler, TransferError
from paddle_kv.offload import KVOffloadManager
from paddle_kv.schedule import starting
from tests.schedule.rig import WAIT_S, Copies, Rig, make_spec


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def manager(rig: Rig) -> Iterator[KVOffloadManager]:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler) as made:
        yield made


def hashes(count: int) -> list[bytes]:
    return [bytes([position]) for position in range(count)]


def test_a_save_is_of_new_blocks_of_such_as_are_there_and_of_such_as_find_no_room(
    rig: Rig, manager: KVOffloadManager
) -> None:
    room = rig.pool.allocate(rig.pool.num_blocks - 3)
    manager.save(hashes(2), [4, 1]).wait(WAIT_S)
    save = manager.save(hashes(5), [4, 1, 8, 3, 7])
    save.wait(WAIT_S)
    counts = manager.stats()
    assert [counts[f"{what}_blocks"] for what in ("saved", "deduplicated", "left_out")] == [3, 2, 2]
    assert manager.left_out(save) == [3, 4]
    rig.pool.free(room)


def test_what_has_arrived_is_counted_as_there(manager: KVOffloadManager) -> None:
    manager.save(hashes(3), [4, 1, 8]).wait(WAIT_S)
    counts = manager.stats()
    assert [counts[f"{what}blocks"] for what in ("", "saving_", "pinned_")] == [3, 0, 0]


def test_what_has_failed_is_not_there_to_be_dropped(manager: KVOffloadManager, copies: Copies) -> None:
    manager.save(hashes(1), [4]).wait(WAIT_S)
    copies.fail("offload", 2, RuntimeError("broken"))
    with pytest.raises(TransferError, match="broken"):
        manager.save(hashes(3), [4, 1, 8]).wait(WAIT_S)
    assert manager.clear() == 1
    assert manager.stats()["failed_saves"] == 1


def test_a_manager_that_was_left_is_closed(manager: KVOffloadManager) -> None:
    with manager:
        pass
    with pytest.raises(ClosedError):
        manager.lookup(hashes(1))


def test_a_block_that_is_full_is_saved_layer_by_layer_where_that_is_asked_for(manager: KVOffloadManager) -> None:
    assert not manager.blocks_full(hashes(1), [4]).layerwise
    save = manager.blocks_full(hashes(2), [4, 2], layerwise=True)
    assert save.layerwise
    save.cancel()


def test_the_last_token_of_a_prompt_is_computed_also_where_it_is_the_only_one() -> None:
    rig = Rig(make_spec(block_size=1))
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler) as manager:
        manager.save(hashes(2), [4, 1]).wait(WAIT_S)
        for num_tokens, expected in enumerate((0, 0, 1, 2)):
            with manager.lookup(hashes(min(num_tokens, 2)), num_tokens=num_tokens) as lease:
                assert lease.num_blocks == expected


def test_what_is_no_scheduler_and_what_is_no_list_of_hashes_is_named(manager: KVOffloadManager) -> None:
    with pytest.raises(TypeError, match="scheduler is int; a LayerwiseScheduler is expected"):
        KVOffloadManager(3)  # type: ignore[arg-type]
    for wrong in (b"ab", "ab", 3):
        with pytest.raises(TypeError, match=f"hashes is {type(wrong).__name__}"):
            manager.lookup(wrong)  # type: ignore[arg-type]


def test_what_is_to_be_known_of_a_manager_is_asked_for(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        block_bytes = rig.spec.block_bytes * rig.spec.num_layers
        plain = KVOffloadManager(scheduler)
        asked = KVOffloadManager(scheduler, max_events=1, salt=b"model", capacity_bytes=block_bytes)
        for manager in (plain, asked):
            manager.save(hashes(1), [4]).wait(WAIT_S)
            assert manager.peek(hashes(1)) == 1
        assert plain.take_events() == []
        assert [event.keys for event in asked.take_events()] == [tuple(hashes(1))]
        tokens = range(rig.spec.block_size)
        assert plain.block_hashes(tokens) != asked.block_hashes(tokens)
        before = asked.rates.stats()
        asked.observe_prefill(range(0, 512), 0.25)
        assert asked.rates.stats() != before
        for manager in (plain, asked):
            manager.close()


def test_a_load_that_nobody_refers_to_is_in_flight(manager: KVOffloadManager, copies: Copies) -> None:
    manager.save(hashes(1), [4]).wait(WAIT_S)
    copies.hold("onload", 1)
    manager.onload(hashes(1), [3])
    gc.collect()
    [load] = manager.in_flight()
    copies.go_on()
    load.wait(WAIT_S)
    assert manager.blocks_to_recompute(load) == []
    with pytest.raises(ValueError, match="load is not a transfer"):
        manager.blocks_to_recompute(3)  # type: ignore[arg-type]


def test_a_load_may_pass_others_and_a_save_never_does(
    manager: KVOffloadManager, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "URGENT_BESIDE_BYTES", 1)
    manager.save(hashes(9), list(range(9))).wait(WAIT_S)
    copies.hold("onload", 1)
    loads = [manager.onload(hashes(8), list(range(8)))]
    streams = manager._scheduler.resources.streams
    saves = [manager.save([b"another"], [9])]
    assert "urgent" not in streams
    loads.append(manager.onload(hashes(9)[8:], [10]))
    assert "urgent" in streams
    copies.go_on()
    for transfer in loads + saves:
        transfer.wait(WAIT_S)
