"""What the manager counts, and that it counts what has ended by then."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paddle_kv import CancelledError, ClosedError, LayerwiseScheduler, TransferError
from paddle_kv.offload import KVOffloadManager
from paddle_kv.offload.moving import Moving
from paddle_kv.schedule import starting
from paddle_kv.schedule.movement import State
from paddle_kv.tracking.group import change
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


# ---- books by themselves ----
def moving_of(kind: str, *, over: bool = False, unmarked: int = 0, count: int = 3, **fields: Any) -> Any:
    plan = SimpleNamespace(device_ids=range(count))
    movement = SimpleNamespace(over=over, unmarked=unmarked, plan=plan, **fields)
    jobs: Any = [SimpleNamespace(kind=kind, tier=fields.get("tier"))]
    return Moving(movement, jobs, follows=fields.get("follows", False))  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "takes"), [(None, True), (0.25, True), (0.2501, False)])
def test_saves_are_taken_while_those_on_their_way_are_soon_through(
    manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch, seconds: float | None, takes: bool
) -> None:
    books, asked = manager._books, []

    def load_s(num_blocks: int, name: str = "onload") -> float | None:
        asked.append((num_blocks, name))
        return seconds

    monkeypatch.setattr(books, "rates", SimpleNamespace(load_s=load_s))
    moving = [moving_of("save"), moving_of("load", count=100), moving_of("save", over=True, count=50)]
    moving += [moving_of("save", unmarked=2, count=20), moving_of("save", count=4)]
    monkeypatch.setattr(books.moves, "moving", moving)
    assert books.takes_saves(6) is takes
    assert asked == [(7, "offload")]
    assert books.counts["dropped_save_blocks"] == (0 if takes else 6)


@pytest.mark.parametrize("takes", [True, False])
def test_what_a_chunk_writes_is_usable_also_where_its_save_is_dropped(
    rig: Rig, manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    books, domain = manager._books, rig.cache.domain
    monkeypatch.setattr(books, "takes_saves", lambda num_blocks: takes and num_blocks == 2)
    domain._poisoned[[4, 1, 8, 3]] = True
    domain._why_poisoned.update(dict.fromkeys([4, 1, 8, 3], "lost"))
    load, compute = manager.onload([], []), manager._scheduler.compute_stream(None)
    save = change(books, lambda: books.save_chunk([4, 1, 8], hashes(2), [4, 1], [load], compute))
    assert domain.poisoned(range(9)) == [3]
    assert (save is not None) == takes
    if save is not None:
        assert save.layerwise and list(save.plan.device_ids) == [4, 1]
        assert save._movement.computed_from == (load._movement,)
        save.cancel()


def test_what_a_transfer_took_is_learned_once_it_is_known(
    manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    rates = SimpleNamespace(
        observe_save=lambda *what: said.append(("save", *what)),
        observe_load=lambda *what, shared: said.append(("load", *what, shared)),
        observe_failed=lambda *what: said.append(("failed", *what)),
    )
    monkeypatch.setattr(manager._books, "rates", rates)
    for kind, sample, state in (
        ("save", (1000, 0.5), State.DONE),
        ("load", (1000, 0.25), State.DONE),
        ("load", (2000, 0.75), State.DONE),
        ("load", (1000, 0.0), State.DONE),  # by a coarse clock
        ("load", None, State.DONE),
        ("load", None, State.FAILED),
    ):
        manager._books._measure(moving_of(kind, sample=sample, state=state, shares_link=sample == (2000, 0.75)))
    assert said.pop() == ("failed", "onload")
    manager._books._measure(moving_of("save", sample=None, state=State.FAILED))
    manager._books._measure(moving_of("load", sample=None, state=State.FAILED, follows=True))
    of_both = moving_of("load", sample=None, state=State.FAILED, tier="disk")
    manager._books._measure(of_both)
    of_both.jobs.append(SimpleNamespace(kind="load", tier=None))
    manager._books._measure(of_both)
    loads = [("load", "onload", 1000, 0.00025, False), ("load", "onload", 2000, 0.00075, True)]
    assert said == [("save", 1000, 0.0005), *loads]


def test_each_call_sees_what_has_ended_by_then(manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch) -> None:
    books, settled = manager._books, []
    monkeypatch.setattr(books, "settle", lambda: settled.append(1))
    calls: list[Callable[[], object]] = [
        lambda: books.lookup([], frozenset()),
        lambda: books.peek([], frozenset()),
        lambda: books.states([], frozenset()),
        lambda: books.evict(1),
        lambda: books.drop([]),
        books.clear,
        lambda: books.expect([], None),
        lambda: books.end_session([]),
        books.take_events,
        books.snapshot,
        books.stats,
    ]
    for number, call in enumerate(calls, 1):
        change(books, call)
        assert len(settled) == number
    books.closed = True
    for call in (books.take_events, books.stats):
        change(books, call)
    assert len(settled) == len(calls)
    books.closed = False


def test_the_end_of_a_meeting_is_counted_once_and_makes_room(
    manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    books, filled = manager._books, []
    monkeypatch.setattr(books.feed, "fill", filled.append)
    meeting: Any = SimpleNamespace(ended=False, num_computed_blocks=3)
    meeting.end = lambda: setattr(meeting, "ended", True)
    for _ in range(2):
        books.end_meeting(meeting)
    assert (filled, books.counts["recomputed_blocks"]) == ([books], 3)


def test_without_a_tier_nothing_comes_from_one(manager: KVOffloadManager, rig: Rig) -> None:
    books = manager._books
    assert (books.ask([b"a"]), books.load_s(3)) == (frozenset(), 0.0)
    prefetch = books.read_soon([b"a"])
    assert (prefetch.done, prefetch.num_blocks) == (True, 0)
    assert books.directory.timeout_s is None  # what moves is the scheduler's to end
    assert books.rates.block_bytes == rig.spec.block_bytes * rig.spec.num_layers
    assert "jobs_in_flight" not in manager.stats()


def test_behind_its_pool_a_manager_has_room_for_nothing(
    manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager._books.slots, "pool", SimpleNamespace(closed=True))
    assert manager.stats()["capacity_blocks"] == 0


def test_what_has_ended_is_measured(manager: KVOffloadManager, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(manager._books, "_measure", measured.append)
    save = manager.save(hashes(2), [4, 1])
    save.wait(WAIT_S)
    manager.stats()
    assert [moving.movement for moving in measured] == [save._movement]


class Ending:
    """A meeting."""

    ended = 0

    def end(self) -> None:
        self.ended += 1


def test_a_manager_that_is_closed_knows_of_no_block_and_no_transfer(manager: KVOffloadManager) -> None:
    manager.save(hashes(2), [4, 1]).wait(WAIT_S)
    lease = manager.lookup(hashes(2))
    books, load = manager._books, moving_of("load")
    books.index.arriving[b"other"] = 7
    meeting = Ending()
    books.feed.add(cast(Any, meeting))
    books.moves.moving.append(load)
    load.movement.over = True
    manager.close()
    index = books.index
    assert meeting.ended == 1
    assert (books.moves.moving, index.slots, index.arriving, index.pins) == ([], {}, {}, {})
    lease.release()


def test_all_saves_and_loads_are_dropped(copies: Copies) -> None:
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler) as manager:
        hashes = manager.block_hashes(range(3 * rig.spec.block_size))
        manager.save(hashes[:1], [0]).wait(WAIT_S)
        copies.hold("onload", 0)
        load = manager.onload(hashes[:1], [4])
        saves = [manager.save([one], [number], layerwise=True) for number, one in enumerate(hashes[1:], 1)]
        manager.cancel_all()
        copies.go_on()
        for transfer in (load, *saves):
            with pytest.raises(CancelledError):
                transfer.wait(WAIT_S)
        assert manager.peek(hashes) == 1  # what was there is there
        rig.cache.mark_rewritten([4])
