"""A manager with a tier: what it finds there, loads from there as one transfer, and hands down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, ClosedError, LeasedError, TransferError
from paddle_kv.offload import BlockState, KVOffloadManager
from paddle_kv.testing.tiers import Fault, FaultyEngine
from paddle_kv.tiers import FilesEngine, Outcome
from tests.offload.tiered_rig import KEYS, POISON, SHORT_S, SPEC, WAIT_S, Gated, TieredRig, content, until
from tests.tiers.conftest import Stored, objects

LAYERS = SPEC.num_layers
PRESENT, ARRIVING, TIER, ABSENT = BlockState.PRESENT, BlockState.ARRIVING, BlockState.TIER, BlockState.ABSENT
MakeRig = Callable[..., TieredRig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes a rig over one folder; again: over what the last one left there."""
    made: list[TieredRig] = []

    def new(**options: Any) -> TieredRig:
        while made:
            made.pop().close()
        made.append(TieredRig(Gated(tmp_path / "root"), **options))
        return made[-1]

    yield new
    while made:
        made.pop().close()


def damage(rig: TieredRig, key: bytes) -> None:
    mine = stored(rig, key)
    content = mine.read()
    mine.write(content[:-1] + bytes([content[-1] ^ 1]))


def stored(rig: TieredRig, key: bytes) -> Stored:
    name = rig.tier.format.name_of(key)
    [found] = [one for root in rig.engine.roots for one in objects(root.folder.path) if one.name == name]
    return found


# ---- found and loaded ----
def test_what_was_saved_is_found_by_the_next_manager(make: MakeRig) -> None:
    make().save(KEYS[:5])
    rig = make()
    assert rig.manager.states(KEYS[:7]) == [TIER] * 5 + [ABSENT] * 2
    assert rig.manager.peek(KEYS[:7]) == 5
    with rig.manager.lookup(KEYS[:7]) as lease:
        assert (lease.hashes, lease.num_below, lease.num_arriving) == (KEYS[:5], 5, 0)
        rig.poison(range(5))
        load = rig.manager.onload(lease.hashes, [4, 0, 3, 1, 2])
    load.wait(WAIT_S)
    assert all(rig.right(KEYS[:5], [4, 0, 3, 1, 2]))
    assert rig.manager.blocks_to_recompute(load) == []
    assert rig.manager.states(KEYS[:7]) == [PRESENT] * 5 + [ABSENT] * 2  # it stays in host memory too
    assert rig.manager.lookup(KEYS[:5]).load_s == 0.0
    rig.check_books()


def test_one_transfer_of_both_brings_layer_by_layer(make: MakeRig) -> None:
    make().save(KEYS[:8])
    rig = make()
    rig.save(KEYS[:3])  # the tier has them
    rig.save(KEYS[5:6])
    blocks = [7, 0, 5, 2, 4, 1, 9, 8]
    for gate in rig.engine.stages:
        gate.clear()
    with rig.manager.lookup(KEYS[:8]) as lease:
        assert lease.states == [PRESENT] * 3 + [TIER] * 2 + [PRESENT] + [TIER] * 2
        rig.poison(blocks)
        load = rig.manager.onload(lease.hashes, blocks)
    for stage in range(3):
        with pytest.raises(TimeoutError):
            load.wait_layer(2 * stage, timeout_s=SHORT_S)
        rig.engine.stages[stage].set()
        for layer in (2 * stage, 2 * stage + 1):
            load.wait_layer(layer, timeout_s=WAIT_S)
            assert all(rig.right(KEYS[:8], blocks, slice(layer, layer + 1)))
    load.wait(WAIT_S)
    assert all(rig.right(KEYS[:8], blocks))
    assert rig.engine.asked == 4
    rig.check_books()


def test_a_second_request_follows_a_load_from_the_tier(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    rig.engine.stages[2].clear()
    first = rig.load(KEYS[:3], [0, 1, 2])
    with rig.manager.lookup(KEYS[:3]) as lease:
        assert lease.states == [ARRIVING] * 3
        assert (lease.num_below, rig.manager.evict(9)) == (0, 0)
        rig.poison([5, 6, 7])
        second = rig.manager.onload(lease.hashes, [5, 6, 7])
    second.wait_layer(3, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        second.wait_layer(4, timeout_s=SHORT_S)
    rig.engine.open()
    second.wait(WAIT_S)
    first.wait(WAIT_S)
    assert all(rig.right(KEYS[:3] * 2, [0, 1, 2, 5, 6, 7]))
    assert rig.engine.asked == 3
    rig.check_books()


def test_a_request_that_looked_before_another_loaded(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    rig.engine.stages[0].clear()
    with rig.manager.lookup(KEYS[:3]) as lease:
        first = rig.load(KEYS[:2], [0, 1])
        second = rig.manager.onload(lease.hashes, [5, 6, 7])
    rig.engine.open()
    second.wait(WAIT_S)
    first.wait(WAIT_S)
    assert all(rig.right([*KEYS[:2], *KEYS[:3]], [0, 1, 5, 6, 7]))
    rig.check_books()


def test_a_prompt_that_host_memory_cannot_hold_is_found_as_far_as_it_can(make: MakeRig) -> None:
    rig = make(host_blocks=30)
    rig.save(KEYS[:20])
    rig = make(host_blocks=12)
    rig.save(KEYS[30:34])
    hold = rig.manager.lookup(KEYS[30:34])
    load = rig.load(KEYS[:20], range(8))
    load.wait(WAIT_S)
    assert len(load.plan.device_ids) == 8
    assert all(rig.right(KEYS[:8], range(8)))
    with rig.manager.lookup(KEYS[:20]) as lease:
        assert lease.num_blocks == 8
    hold.release()
    with rig.manager.lookup(KEYS[:20]) as lease:
        assert (lease.num_blocks, lease.num_below) == (12, 4)
        lease.keep_first(9)
        assert (lease.num_below, lease.states) == (1, [PRESENT] * 8 + [TIER])
    rig.check_books()


def test_host_memory_that_is_held_meanwhile(make: MakeRig) -> None:
    rig = make(host_blocks=30)
    rig.save(KEYS[:12])
    rig = make(host_blocks=12)
    rig.poison(range(12))
    with rig.manager.lookup(KEYS[:12]) as lease:
        assert lease.num_blocks == 12
        taken = rig.pool.allocate(3)
        with pytest.raises(TransferError, match="no room for 12 blocks"):
            rig.manager.onload(lease.hashes, range(12))
        assert (rig.on_device(0) == POISON).all()
        load = rig.manager.onload(lease.hashes[:9], range(9))
    load.wait(WAIT_S)
    rig.pool.free(taken)
    assert all(rig.right(KEYS[:9], range(9)))
    rig.check_books()


def test_keys_that_are_nowhere(make: MakeRig) -> None:
    rig = make()
    rig.save(KEYS[:2])
    rig.forget()
    with pytest.raises(KeyError, match="is not present"):
        rig.manager.onload(KEYS[:3], [0, 1, 2])
    with rig.manager.lookup(KEYS[:2]) as lease:
        rig.tier.delete(KEYS[:1])
        with pytest.raises(TransferError, match="was dropped or found damaged since the lookup"):
            rig.manager.onload(lease.hashes, [0, 1])
    rig.check_books()


def test_how_long_a_load_takes_is_learned(make: MakeRig) -> None:
    make().save(KEYS[:8])
    rig = make()
    with rig.manager.lookup(KEYS[:4]) as lease:
        assert lease.load_s == 0.0  # nobody knows yet
    rig.load(KEYS[:4], range(4)).wait(WAIT_S)
    rig.check_books()
    with rig.manager.lookup(KEYS[:8]) as lease:
        assert lease.num_below == 4
        alone = lease.load_s
        assert alone > 0.0
        rig.engine.stages[0].clear()
        load = rig.load(KEYS[4:6], [4, 5])
        assert lease.load_s == pytest.approx(alone * 6 / 4)
        rig.engine.open()
        load.wait(WAIT_S)


# ---- what does not come ----
@pytest.mark.parametrize("how", ["missing", "damaged", "late"])
def test_exactly_what_does_not_come_is_to_be_computed(make: MakeRig, how: str) -> None:
    make().save(KEYS[:6])
    rig = make(tier_timeout_s=1.0 if how == "late" else WAIT_S)
    rig.save(KEYS[:1])
    late = None
    if how == "missing":
        stored(rig, KEYS[3]).write(stored(rig, KEYS[4]).read())
    elif how == "damaged":
        damage(rig, KEYS[3])
    else:
        name = rig.tier.format.name_of(KEYS[3])
        read = rig.engine.read

        def all_but_one(items: Any) -> None:
            nonlocal late
            late = next((item for item in items if item.name == name), late)
            read([item for item in items if item.name != name])

        rig.engine.read = all_but_one  # type: ignore[method-assign]
    blocks = [9, 4, 7, 2, 5, 0]
    load = rig.load(KEYS[:6], blocks)
    with pytest.raises(TransferError, match="1 of 5 blocks did not come from the tier") as caught:
        load.wait_layer(LAYERS - 1, timeout_s=WAIT_S)
        load.wait(WAIT_S)
    assert caught.value.block_ids == [2]
    if late is not None:
        assert not load.done()
        late.ended(Outcome.FAILED)
    load.wait_over(WAIT_S)
    assert rig.manager.blocks_to_recompute(load) == [3]
    assert rig.right(KEYS[:6], blocks) == [True, True, True, False, True, True]
    with pytest.raises(TransferError, match="holds no usable data"):
        rig.manager.save([KEYS[30]], [2])
    states = rig.manager.states(KEYS[:6])
    assert states == [PRESENT] * 3 + [TIER if how == "late" else ABSENT] + [PRESENT] * 2
    assert rig.manager.stats()["tier_lost_blocks"] == 1
    rig.manager.device_cache.mark_rewritten([2])
    rig.save(KEYS[3:4], 2)  # computed
    assert rig.manager.states(KEYS[:6]) == [PRESENT] * 6
    if how == "late":
        rig.engine.read = read  # type: ignore[method-assign, possibly-undefined]
    rig.check_books()
    rig.forget()
    rig.load(KEYS[:6], blocks).wait(WAIT_S)  # the tier has it again
    assert all(rig.right(KEYS[:6], blocks))


def test_a_damaged_block_in_host_memory_comes_from_the_tier(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    make().save(KEYS[:4])
    rig = make()
    rig.save(KEYS[:2])
    rig.rows[rig.manager._books.index.slots[KEYS[1]]] ^= 1
    with pytest.raises(TransferError, match="do not hold what was saved to them"):
        rig.load(KEYS[:4], range(4))
    assert rig.manager.stats()["damaged_blocks"] == 1
    assert rig.manager.states(KEYS[:4]) == [PRESENT] + [TIER] * 3
    rig.load(KEYS[:4], range(4)).wait(WAIT_S)
    assert all(rig.right(KEYS[:4], range(4)))
    rig.check_books()


def test_who_follows_a_load_recomputes_only_what_did_not_come(make: MakeRig) -> None:
    make().save(KEYS[:4])
    rig = make()
    damage(rig, KEYS[1])
    rig.engine.stages[2].clear()
    first = rig.load(KEYS[:4], [0, 1, 2, 3])
    second = rig.load(KEYS[:4], [8, 7, 6, 5])
    third = rig.load(KEYS[:1], [9])
    rig.engine.open()
    for load in (first, second):
        load.wait_over(WAIT_S)
        assert rig.manager.blocks_to_recompute(load) == [1]
    third.wait(WAIT_S)
    assert rig.right(KEYS[:4], [8, 7, 6, 5]) == [True, False, True, True]
    assert all(rig.right(KEYS[:1], [9]))
    rig.manager.device_cache.mark_rewritten([1, 7])
    rig.check_books()


def test_a_load_that_is_cancelled_leaves_nothing(make: MakeRig) -> None:
    make().save(KEYS[:4])
    rig = make()
    rig.save(KEYS[:1])
    rig.engine.stages[1].clear()
    load = rig.load(KEYS[:4], [4, 5, 6, 7])
    assert rig.engine.reading.acquire(timeout=WAIT_S)
    load.cancel()
    with pytest.raises(CancelledError):
        load.wait_layer(0)
    rig.engine.open()
    load.wait_over(WAIT_S)
    assert rig.manager.blocks_to_recompute(load) == [0, 1, 2, 3]
    assert rig.manager.states(KEYS[:4]) == [PRESENT] + [TIER] * 3
    assert rig.manager.stats()["tier_lost_blocks"] == 0
    rig.check_books()
    rig.load(KEYS[:4], [4, 5, 6, 7]).wait(WAIT_S)
    assert all(rig.right(KEYS[:4], [4, 5, 6, 7]))


def test_a_save_that_was_computed_from_what_did_not_come_is_never_found(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    damage(rig, KEYS[2])
    rig.engine.stages[2].clear()
    load = rig.load(KEYS[:3], [0, 1, 2])
    save = rig.manager.save(KEYS[3:5], [3, 4], computed_from=[load])
    save.wait(WAIT_S)
    rig.engine.open()
    load.wait_over(WAIT_S)
    rig.settle()
    assert rig.manager.states(KEYS[:5]) == [PRESENT] * 2 + [ABSENT] * 3
    assert rig.tier.exists(KEYS[3:5]) == [False] * 2


def test_a_request_goes_on_behind_what_came(make: MakeRig) -> None:
    tokens = list(range(16 * 6 + 3))
    rig = make()
    hashes = rig.manager.block_hashes(tokens)
    rig.save(hashes)
    rig = make()
    damage(rig, hashes[4])
    table = [3, 8, 1, 0, 5, 6, 7]
    rig.poison(table)
    with rig.manager.request(tokens, table) as request:
        assert request.start == 6 * 16
        assert not request.wait(WAIT_S)
        assert (request.start, request.loads) == (4 * 16, [])
        assert all(rig.right(hashes[:4], table[:4]))
        rig.fill(hashes[4:], table[4:6])
        for save in request.saves:
            for layer in range(LAYERS):
                save.mark_layer_written(layer)
        assert request.wait(WAIT_S)
        for save in request.saves:
            save.wait(WAIT_S)
    assert rig.manager.states(hashes) == [PRESENT] * 6
    rig.check_books()
    rig.forget()
    rig.load(hashes, table[:6]).wait(WAIT_S)
    assert all(rig.right(hashes, table[:6]))


@pytest.mark.parametrize("how", ["load", "chunks", "prefetch"])
def test_what_an_engine_has_lost_holds_up_no_end(tmp_path: Path, how: str) -> None:
    """In the order of the documents. The blocks are held until the engine is closed."""
    engine = FaultyEngine(FilesEngine({tmp_path: 1 << 30}), [])
    rig = TieredRig(engine, tier_timeout_s=0.2)
    tokens = np.arange(4 * 16 + 5)
    hashes = rig.manager.block_hashes(tokens)
    rig.save(hashes)
    rig.forget()
    engine._faults, engine._share = [Fault.LOST], 1.0
    with rig.scheduler, closing(engine), rig.tier, rig.manager:
        if how == "load":
            load = rig.load(hashes, range(4))
            until(lambda: load.error is not None)
            assert not load.done()
        elif how == "prefetch":
            assert rig.manager.prefetch(hashes, timeout_s=0.2).wait(WAIT_S)
        else:
            with rig.manager.request(tokens, range(5), chunk_tokens=16) as request:
                while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
                    for save in request.saves:
                        for layer in range(LAYERS):
                            save.mark_layer_written(layer)
                    assert chunk
        until(lambda: engine.lost)
        until(lambda: rig.manager.stats()["tier_lost_blocks"] == len(engine.lost))
        rig.manager.close()
        rig.tier.close()
        assert rig.pool.num_free_blocks == rig.pool.num_blocks - len(engine.lost)
        with pytest.raises(LeasedError):
            rig.pool.close()
    assert rig.pool.num_free_blocks == rig.pool.num_blocks
    rig.pool.close()


def test_a_tier_that_is_closed_is_no_tier(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    with rig.manager.lookup(KEYS[:3]) as lease:
        rig.tier.close(WAIT_S)
        with pytest.raises(TransferError):
            rig.manager.onload(lease.hashes, [0, 1, 2])
    assert rig.manager.lookup(KEYS[:3]).num_blocks == 0
    rig.fill(KEYS[:3], [0, 1, 2])
    rig.manager.save(KEYS[:3], [0, 1, 2]).wait(WAIT_S)
    until(lambda: not rig.manager._books.below.held)  # type: ignore[attr-defined]
    assert rig.manager.lookup(KEYS[:3]).num_blocks == 3
    rig.manager.drop(KEYS[:1])
    assert rig.manager.peek(KEYS[:3]) == 0


@pytest.mark.parametrize("wrong", [b"", bytes(65)])
def test_a_hash_that_no_object_can_have_is_refused_before_others_are_dropped(make: MakeRig, wrong: bytes) -> None:
    rig = make()
    rig.save(KEYS[:3])
    with pytest.raises(ValueError, match=rf"^hashes\[1\] has {len(wrong)} bytes; 1 to 64 are expected"):
        rig.manager.drop([KEYS[0], wrong, KEYS[1]])
    assert rig.manager.states(KEYS[:3]) == [PRESENT] * 3
    assert rig.tier.exists(KEYS[:3]) == [True] * 3
    rig.check_books()


@pytest.mark.parametrize("wrong", [b"", bytes(65)])
@pytest.mark.parametrize("call", ["expect", "prefetch"])
def test_what_no_tier_can_bring_is_not_waited_for(make: MakeRig, call: str, wrong: bytes) -> None:
    rig = make()
    rig.save(KEYS[:3])
    rig.forget()
    before = rig.manager.stats()
    calls = {"expect": rig.manager.expect, "prefetch": lambda keys: rig.manager.prefetch(keys, timeout_s=WAIT_S)}
    with pytest.raises(ValueError, match=rf"^hashes\[1\] has {len(wrong)} bytes; 1 to 64 are expected"):
        calls[call]([KEYS[0], wrong, KEYS[1]])
    assert rig.manager.stats() == before
    books = rig.manager._books
    assert not books.index.expected.by_end and books.num_reading_blocks == 0
    rig.check_books()


def test_a_saver_is_free_when_its_manager_is_closed(make: MakeRig) -> None:
    rig = make()
    with pytest.raises(ValueError, match="tier is a Saver that another manager has"):
        KVOffloadManager(rig.scheduler, tier=rig.saver)
    rig.save(KEYS[:3])
    rig.manager.close()
    rig.manager = KVOffloadManager(rig.scheduler, tier=rig.saver)
    assert rig.manager.states(KEYS[:4]) == [TIER] * 3 + [ABSENT]
    rig.save(KEYS[3:5])
    assert rig.tier.exists(KEYS[:6]) == [True] * 5 + [False]
    rig.load(KEYS[:5], range(5)).wait(WAIT_S)
    assert all(rig.right(KEYS[:5], range(5)))
    rig.check_books()


def test_a_tier_that_closes_between_the_question_and_the_load(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    exists = rig.tier.exists

    def then_close(keys: Any) -> list[bool]:
        found = exists(keys)
        rig.tier.close(WAIT_S)
        return found

    rig.tier.exists = then_close  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="the tier could not be asked: the tier is closed"):
        rig.manager.onload(KEYS[:3], [0, 1, 2])
    rig.scheduler.drain(WAIT_S)
    assert rig.pool.domain.busy(range(12)) == []
    rig.manager.stats()
    assert rig.pool.num_free_blocks == 12
    assert rig.manager._books.below.rate.blocks_under_way == 0  # type: ignore[attr-defined]


def test_an_engine_that_cannot_say_what_it_has(make: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = make()
    rig.save(KEYS[:3])

    def fail(names: Any) -> list[bool]:
        raise OSError("no answer")

    assert rig.manager.lookup([KEYS[0], b""]).num_blocks == 1  # which no tier can have: none of this one's errors
    assert not caplog.records
    rig.engine.exists = fail  # type: ignore[method-assign]
    rig.forget()
    for _ in range(2):
        assert rig.manager.lookup(KEYS[:3]).num_blocks == 0
    assert [record.getMessage() for record in caplog.records].count(
        "the tier files could not be asked what it has (no answer); serving goes on"
    ) == 1
    del rig.engine.exists  # type: ignore[method-assign]
    assert rig.manager.lookup(KEYS[:3]).num_blocks == 3


def test_what_a_lookup_asks_of_the_tier(make: MakeRig) -> None:
    """What host memory has is not asked for, and nothing behind the first gap."""
    rig = make()
    rig.save(KEYS[:2])
    asked: list[list[bytes]] = []
    exists = rig.tier.exists
    rig.tier.exists = lambda keys: asked.append(list(keys)) or exists(keys)  # type: ignore[method-assign, func-returns-value]
    rig.manager.lookup(KEYS[:2])
    many = [b"%032d" % number for number in range(1000)]
    rig.manager.lookup([*KEYS[:2], *many])
    assert asked == [many[:64]]
    assert rig.engine.asked == 0


def test_content_is_a_function_of_the_key() -> None:
    assert not np.array_equal(content(KEYS[0]), content(KEYS[1]))


def test_a_prefetch_that_the_tier_refuses_is_over_and_brings_nothing(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().save(KEYS[:3])
    rig = make()

    def refuse(jobs: object) -> None:
        raise ClosedError("the tier is closed")

    with monkeypatch.context() as patched:
        patched.setattr(rig.tier, "load", refuse)
        prefetch = rig.manager.prefetch(KEYS[:3], timeout_s=WAIT_S)
    assert prefetch.wait(WAIT_S)
    assert (prefetch.num_blocks, prefetch.num_arrived) == (3, 0)
    assert rig.manager.states(KEYS[:3]) == [TIER] * 3
    assert rig.pool.num_free_blocks == rig.pool.num_blocks
    rig.check_books()
    rig.load(KEYS[:3], [0, 1, 2]).wait(WAIT_S)
    assert all(rig.right(KEYS[:3], [0, 1, 2]))
    assert rig.manager._books.below.rate.seconds(0) == 0.0  # none of them is waited for


def test_what_of_a_prefetch_has_not_come_is_not_counted(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    rig.engine.stages[0].clear()
    prefetch = rig.manager.prefetch(KEYS[:3], timeout_s=WAIT_S)
    assert prefetch.num_arrived == 0
    rig.engine.open()
    assert prefetch.wait(WAIT_S)
    assert prefetch.num_arrived == 3
