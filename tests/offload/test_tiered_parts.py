"""What each call of a manager with a tier leaves behind: counts, holds, and what is believed to lie below."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import ForkedError, HostPool, LayerwiseScheduler, TransferError
from paddle_kv.offload import BlockState, KVOffloadManager, tier_queue
from paddle_kv.offload.below import Clearing
from paddle_kv.offload.jobs import Event, Job
from paddle_kv.offload.tiered import TieredBooks
from paddle_kv.schedule import arriving, settling, submission
from paddle_kv.tiers import FilesEngine, Outcome, saving
from paddle_kv.tracking.group import change
from tests.offload.test_manager_tiers import MakeRig, damage, make
from tests.offload.tiered_rig import KEYS, SHORT_S, SPEC, WAIT_S, TieredRig, until
from tests.schedule.rig import Copies

__all__ = ["make"]
PRESENT, ARRIVING, TIER, ABSENT = BlockState.PRESENT, BlockState.ARRIVING, BlockState.TIER, BlockState.ABSENT
BLOCK_BYTES = SPEC.num_layers * SPEC.block_bytes


def books_of(rig: TieredRig) -> Any:
    return rig.manager._books


def section(rig: TieredRig, function: Callable[..., Any], *arguments: Any) -> Any:
    return change(books_of(rig), lambda: function(*arguments))


def believed(rig: TieredRig) -> set[bytes]:
    return set(books_of(rig).directory._tiers)


def offers(rig: TieredRig, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[bytes]]]:
    """What is offered to the tier from now on."""
    found: list[tuple[str, list[bytes]]] = []
    below = books_of(rig).below
    offer = below.offer
    monkeypatch.setattr(below, "offer", lambda what, blocks: (found.append((what, list(blocks))), offer(what, blocks)))
    return found


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended is booked by the calls of the user alone."""
    monkeypatch.setattr(TieredBooks, "look", staticmethod(lambda books: None))


# ---- looking up ----
def test_what_a_lookup_counts_and_holds(make: MakeRig) -> None:
    make().save(KEYS[:5])
    rig = make()
    rig.save(KEYS[:2])
    before = rig.manager.stats()
    with rig.manager.lookup(KEYS[:7]) as lease:
        assert lease.states == [PRESENT] * 2 + [TIER] * 3
        assert books_of(rig).index.pins == dict.fromkeys(KEYS[:5], 1)
    assert books_of(rig).index.pins == {}
    after = rig.manager.stats()
    counted = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    del counted["hit_rate"]
    assert counted.pop("hit_bytes", 2 * BLOCK_BYTES) == 2 * BLOCK_BYTES
    assert {name: number for name, number in counted.items() if name.endswith("blocks") or name == "lookups"} == {
        "lookups": 1,
        "looked_up_blocks": 7,
        "hit_blocks": 2,
        "tier_hit_blocks": 3,
    }


def test_a_prompt_that_was_expected_has_come_though_its_end_lies_below(make: MakeRig) -> None:
    make().save(KEYS[:5])
    rig = make()
    rig.save(KEYS[:2])
    rig.manager.expect(KEYS[:5])
    rig.manager.lookup(KEYS[:5]).release()
    assert books_of(rig).index.expected.blocks == {}


def test_no_more_is_found_below_than_could_come(make: MakeRig) -> None:
    make(host_blocks=16).save(KEYS[:10])
    rig = make(capacity_bytes=6 * BLOCK_BYTES)
    assert rig.manager.peek(KEYS[:10]) == 6
    rig = make(host_blocks=12)
    mine = rig.pool.allocate(4)
    assert rig.manager.peek(KEYS[:10]) == 8
    rig.pool.free(mine)
    rig.save(KEYS[20:24])
    lease = rig.manager.lookup(KEYS[20:24])
    assert rig.manager.peek(KEYS[:10]) == 8
    assert rig.manager.drop(KEYS[20:24]) == 4
    assert rig.manager.peek(KEYS[:10]) == 10  # what was dropped takes no room, whoever holds it
    lease.release()
    rig.check_books()


def test_of_blocks_that_are_there_each_takes_its_own_room(make: MakeRig) -> None:
    """Those behind the last one that has room may go: they are held by nobody."""
    make(host_blocks=16).save(KEYS[:10])
    rig = make(host_blocks=12)
    mine = rig.pool.allocate(4)
    rig.save(KEYS[7:10])
    assert rig.manager.states(KEYS[:10]) == [TIER] * 7 + [PRESENT] * 3
    with rig.manager.lookup(KEYS[9:10]):
        assert rig.manager.peek(KEYS[:10]) == 7  # one of those behind is held
    assert rig.manager.peek(KEYS[:10]) == 8
    with rig.manager.lookup(KEYS[:10]) as lease:
        assert lease.num_blocks == 8
        rig.manager.onload(lease.hashes, list(range(8))).wait(WAIT_S)
        assert all(rig.right(KEYS[:8], list(range(8))))
    rig.pool.free(mine)
    rig.check_books()


@pytest.mark.parametrize("when", ["write_back", "exclusive"])
def test_what_is_expected_leaves_what_is_kept_free_for_saves(make: MakeRig, when: str) -> None:
    """Else that would be taken from those that are due sooner, again and again."""
    make(host_blocks=40).save(KEYS[:24])
    rig = make(when=when, host_blocks=16)
    prompts = [KEYS[start : start + 6] for start in (0, 6, 12, 18)]
    prefetches = [rig.manager.expect(keys) for keys in prompts]
    books = books_of(rig)

    def in_host() -> list[int]:
        return [sum(key in books.index.slots for key in keys) for keys in prompts]

    until(lambda: in_host() == [6, 6, 2, 0] and not books.index.arriving)
    rig.settle()
    assert [prefetch.wait(SHORT_S) for prefetch in prefetches] == [True, True, False, False]
    assert (in_host(), rig.engine.asked) == ([6, 6, 2, 0], 14)
    for number, there in ((0, [6, 6, 0]), (1, [6, 6]), (2, [6])):
        with rig.manager.lookup(prompts[number]) as lease:
            assert lease.num_blocks == 6
        until(lambda number=number, there=there: in_host()[number + 1 :] == there)  # type: ignore[misc]
        rig.settle()
    assert all(prefetch.wait(WAIT_S) for prefetch in prefetches)
    assert rig.engine.asked == 24
    rig.check_books()


def test_what_is_arriving_is_asked_for_too(make: MakeRig) -> None:
    """It may have been given up before the answer is used."""
    make().save(KEYS[:4])
    rig = make()
    rig.save(KEYS[:1])
    rig.engine.stages[0].clear()
    prefetch = rig.manager.prefetch(KEYS[:2], timeout_s=WAIT_S)
    assert prefetch.num_blocks == 1
    assert books_of(rig).ask(KEYS[:4]) == set(KEYS[1:4])
    rig.engine.open()
    assert prefetch.wait(WAIT_S)


@pytest.mark.usefixtures("nobody_looks")
@pytest.mark.parametrize("what", ["lookup", "peek", "onload", "evict", "flush", "prefetch"])
def test_each_call_sees_what_has_ended_before_it(make: MakeRig, what: str) -> None:
    make().save(KEYS[2:3])
    rig = make()
    rig.fill(KEYS[:2], [0, 1])
    rig.manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
    if what == "lookup":
        assert rig.manager.lookup(KEYS[:2]).num_blocks == 2
    elif what == "peek":
        assert rig.manager.peek(KEYS[:2]) == 2
    elif what == "onload":
        rig.manager.onload(KEYS[:2], [5, 4]).wait(WAIT_S)
        assert rig.right(KEYS[:2], [5, 4]) == [True, True]
    elif what == "evict":
        books_of(rig).below.wants = lambda kind: False  # nothing holds them for the tier
        assert rig.manager.evict(9) == 2
    elif what == "flush":
        rig.manager.flush(WAIT_S)
        assert rig.tier.exists(KEYS[:2]) == [True, True]
    else:
        assert rig.manager.prefetch(KEYS[:3], timeout_s=WAIT_S).num_blocks == 1


# ---- what is believed to lie below ----
def test_one_event_is_enough_to_tell_what_lies_below(make: MakeRig) -> None:
    make().save(KEYS[:2])
    rig = make(max_events=1)
    rig.manager.lookup(KEYS[:2]).release()
    assert rig.manager.take_events() == [Event(1, "stored", "files", tuple(KEYS[:2]))]


def test_a_lookup_forgets_the_block_at_which_it_ends_if_the_tier_lacks_it(
    make: MakeRig, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().save(KEYS[:6])
    rig = make(max_events=100, host_blocks=4)
    rig.manager.lookup(KEYS[:6]).release()
    assert believed(rig) == set(KEYS[:6])  # room ends behind the fourth, which says nothing of the tier
    rig.tier.delete([KEYS[1]])
    rig.manager.lookup(KEYS[:6]).release()
    assert believed(rig) == {KEYS[0], *KEYS[2:6]}
    books = books_of(rig)
    monkeypatch.setattr(books, "ask", lambda keys: frozenset(KEYS[:1]))  # nobody has asked for those behind the gap
    rig.manager.lookup([KEYS[0], KEYS[30], *KEYS[2:6]]).release()
    assert believed(rig) == {KEYS[0], *KEYS[2:6]}
    rig.manager.lookup(KEYS[:1]).release()
    assert believed(rig) == {KEYS[0], *KEYS[2:6]}


def test_stores_that_are_over_are_believed_unless_they_were_forgotten(make: MakeRig) -> None:
    for max_events in (10, 0):
        rig = make(max_events=max_events)
        books: Any = books_of(rig)
        job: Any = SimpleNamespace(keys=KEYS[:4], outcomes=[Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.DONE])
        books.below.forgotten |= {KEYS[1]}
        books.below.storing |= {*KEYS[:4], KEYS[5]}
        assert section(rig, books.stored, job) == [KEYS[1]]
        assert believed(rig) == ({KEYS[0], KEYS[3]} if max_events else set())
        assert (books.below.storing, books.below.held) == ({KEYS[5]}, set())
        books.below.forgotten.clear()
        rig.manager.close()
        job.keys = KEYS[6:10]
        assert section(rig, books.stored, job) == []
        assert believed(rig) == ({KEYS[0], KEYS[3]} if max_events else set())  # who has closed believes no more


def test_what_the_tier_did_not_take_is_let_go_of(make: MakeRig) -> None:
    rig = make()
    rig.save(KEYS[10:12])
    books: Any = books_of(rig)
    books.index.pin(KEYS[10:12])
    books.below.held |= {*KEYS[10:12]}
    books.below.storing |= {*KEYS[10:14]}
    books.below.forgotten |= {KEYS[11], KEYS[13]}
    blocks = dict.fromkeys([KEYS[10], KEYS[11], KEYS[12], KEYS[13]], 0)
    section(rig, books.end_offer, blocks, frozenset([KEYS[10], KEYS[13]]))
    assert books.below.storing == {KEYS[10], KEYS[13]}
    assert books.below.held == {KEYS[10]}
    assert books.below.forgotten == {KEYS[13]}
    assert books.index.pins == {KEYS[10]: 1}
    section(rig, books.end_offer, dict.fromkeys([KEYS[10], KEYS[13]], 0), frozenset())
    rig.check_books()


# ---- loads ----
@pytest.mark.parametrize("max_events", [0, 10])
def test_a_load_that_does_not_start_leaves_all_as_it_was(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, max_events: int
) -> None:
    make().save(KEYS[:4])
    rig = make(max_events=max_events)
    rig.save(KEYS[:2])
    lease = rig.manager.lookup(KEYS[:4])
    before, states = believed(rig), rig.manager.states(KEYS[:4])
    monkeypatch.setattr(arriving, "start", lambda *_: pytest.fail("as a stream would"))
    with pytest.raises(pytest.fail.Exception, match="as a stream would"):
        rig.manager.onload(lease.hashes, [0, 1, 2, 3])
    assert (rig.manager.states(KEYS[:4]), believed(rig)) == (states, before)
    assert books_of(rig).index.pins == dict.fromkeys(KEYS[:4], 1)
    lease.release()
    rig.check_books()


@pytest.mark.parametrize("max_events", [0, 100])
def test_a_load_for_which_the_room_has_gone(make: MakeRig, max_events: int) -> None:
    make(host_blocks=16).save(KEYS[:10])
    rig = make(max_events=max_events)
    lease = rig.manager.lookup(KEYS[:10])
    before = believed(rig)
    mine = rig.pool.allocate(8)
    with pytest.raises(TransferError, match="host memory has no room for 10 blocks of the tier: what is there is held"):
        rig.manager.onload(lease.hashes, range(10))
    assert believed(rig) == before == (set(KEYS[:10]) if max_events else set())
    lease.release()
    rig.pool.free(mine)
    rig.check_books()
    rig.load(KEYS[:10], range(10)).wait(WAIT_S)
    assert all(rig.right(KEYS[:10], range(10)))


def test_what_came_up_is_deleted_below_without_another_call(make: MakeRig) -> None:
    make(when="exclusive", host_blocks=24).save(KEYS[:6])
    rig = make(when="exclusive", host_blocks=24)
    rig.save(KEYS[:6])
    rig.manager.flush(WAIT_S)
    rig = make(when="exclusive", host_blocks=24)
    rig.load(KEYS[:4], range(4)).wait(WAIT_S)
    until(lambda: rig.tier.exists(KEYS[:6]) == [False] * 4 + [True] * 2)


def test_a_save_that_is_over_at_once_is_booked_without_another_call(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    books = books_of(rig)
    start = books.moves.start

    def start_and_cancel(*arguments: Any, **named: Any) -> Any:
        transfer = start(*arguments, **named)
        settling.progress(submission.cancel(transfer._movement))
        return transfer

    monkeypatch.setattr(books.moves, "start", start_and_cancel)
    save = rig.manager.save(KEYS[:2], [0, 1], layerwise=True)
    until(lambda: not books.index.arriving)
    assert save.state.value == "cancelled"
    rig.check_books()


@pytest.mark.parametrize("how", ["cancelled", "done"])
def test_a_load_that_brought_nothing_is_no_use(make: MakeRig, copies: Copies, how: str) -> None:
    rig = make(when="nth_use", saver={"uses": 2})
    rig.save(KEYS[:2])
    copies.hold("onload", 0)
    load = rig.load(KEYS[:2], [4, 5])
    assert copies.arrived.acquire(timeout=WAIT_S)
    if how == "cancelled":
        load.cancel()
    copies.go_on()
    load.wait_over(WAIT_S)
    rig.settle()
    assert rig.tier.exists(KEYS[:2]) == [how == "done"] * 2
    rig.manager.device_cache.mark_rewritten([4, 5])


# ---- what is offered ----
def test_each_block_is_offered_once_while_it_goes_down(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    rig.engine.writes.clear()
    offered = offers(rig, monkeypatch)
    for start, stop in ((0, 5), (0, 5), (5, 10), (10, 11)):
        rig.fill(KEYS[start:stop], range(start, stop))
        rig.manager.save(KEYS[start:stop], range(start, stop)).wait(WAIT_S)
        rig.manager.stats()
    assert offered == [("saved", KEYS[:5]), ("saved", KEYS[5:9])]  # nine of twelve may be on their way
    assert books_of(rig).index.pins == dict.fromkeys(KEYS[:9], 1)
    assert rig.manager.stats()["tier_dropped_blocks"] == 2
    rig.load(KEYS[:9], range(12, 21)).wait(WAIT_S)  # which holds nobody up who reads them
    rig.manager.drop(KEYS[:1])
    rig.manager.save(KEYS[:1], [0]).wait(WAIT_S)
    rig.manager.stats()
    assert len(offered) == 2  # it would be deleted when the first one is there
    rig.engine.open()
    rig.check_books()
    assert rig.tier.exists(KEYS[:10]) == [False] + [True] * 8 + [False]


def test_a_block_that_leaves_twice_while_it_goes_down(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(when="write_back", host_blocks=16, max_events=100)
    rig.save(KEYS[:2])
    rig.engine.writes.clear()
    offered = offers(rig, monkeypatch)
    for _ in range(2):
        assert rig.manager.evict(9) == 2
        rig.fill(KEYS[:2], [0, 1])
        rig.manager.save(KEYS[:2], [0, 1]).wait(WAIT_S)
        rig.manager.stats()
    rig.manager.drop(KEYS[:1])
    rig.manager.save(KEYS[:1], [0]).wait(WAIT_S)
    assert rig.manager.evict(9) == 2
    assert rig.manager.evict(9) == 0
    assert [(what, set(keys)) for what, keys in offered] == [("evicting", set(KEYS[:2]))]
    told = [(one.kind, one.tier, set(one.keys)) for one in rig.manager.take_events() if one.tier == "host"]
    gone, come = ("removed", "host", set(KEYS[:2])), ("stored", "host", set(KEYS[:2]))
    assert told == [come, gone, come, gone, come, ("removed", "host", {KEYS[0]}), ("stored", "host", {KEYS[0]}), gone]
    rig.engine.open()
    rig.check_books()


@pytest.mark.parametrize(("host_blocks", "held"), [(1, 1), (2, 1), (3, 2)])
def test_small_host_memory_is_not_held_as_a_whole(make: MakeRig, host_blocks: int, held: int) -> None:
    rig = make(host_blocks=host_blocks)
    rig.engine.writes.clear()
    rig.fill(KEYS[:host_blocks], range(host_blocks))
    rig.manager.save(KEYS[:host_blocks], range(host_blocks)).wait(WAIT_S)
    assert rig.manager.stats()["pinned_blocks"] == held
    rig.engine.open()
    rig.check_books()


@pytest.mark.parametrize(
    ("host_blocks", "capacity", "taken", "saved", "left"),
    [
        (16, 16, 6, (8, 1), (8, 8)),  # two places are kept free, of those that the pool has
        (16, 8, 0, (7, 1), (7, 7)),  # one of eight, though the pool has more
        (4, 4, 0, (3, 1), (3, 3)),
    ],
)
def test_how_many_places_are_kept_free(
    make: MakeRig, host_blocks: int, capacity: int, taken: int, saved: tuple[int, ...], left: tuple[int, ...]
) -> None:
    rig = make(when="write_back", host_blocks=host_blocks, capacity_bytes=capacity * BLOCK_BYTES)
    rig.pool.allocate(taken)
    start = 0
    for count, stay in zip(saved, left, strict=True):
        rig.save(KEYS[start : start + count], start)
        start += count
        assert rig.manager.stats()["blocks"] == stay


def test_what_is_lost_for_want_of_room_is_added_up(make: MakeRig) -> None:
    rig = make(when="write_back", host_blocks=16)
    rig.save(KEYS[:14])
    for start, lost in ((20, 3), (25, 6), (30, 9)):
        rig.save(KEYS[start : start + 5])
        assert rig.manager.stats()["tier_dropped_blocks"] == lost
    rig = make(host_blocks=4)
    rig.save(KEYS[:4])
    rig.save(KEYS[4:8])
    assert rig.manager.stats()["tier_dropped_blocks"] == 2  # only what was not offered: others are written over unasked


# ---- flushing ----
def test_flush_waits_for_what_has_left_host_memory(make: MakeRig) -> None:
    rig = make(when="write_back", host_blocks=16)
    rig.save(KEYS[:6])
    rig.engine.writes.clear()
    assert rig.manager.evict(6) == 6
    with pytest.raises(TimeoutError):
        rig.manager.flush(SHORT_S)
    rig.engine.open()
    rig.manager.flush(WAIT_S)
    assert all(rig.tier.exists(KEYS[:6]))
    rig.check_books()


def test_flush_offers_as_much_at_a_time_as_may_be_held(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(when="write_back", host_blocks=16)
    rig.save(KEYS[:14])
    offered = offers(rig, monkeypatch)
    rig.manager.flush(WAIT_S)
    assert [len(keys) for _, keys in offered] == [12, 2]
    assert sorted(key for _, keys in offered for key in keys) == KEYS[:14]
    assert all(rig.tier.exists(KEYS[:14]))
    rig.check_books()


def test_flush_goes_on_when_the_manager_knows_of_what_is_stored(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the tier is held up before it tells; another one looks at the job meanwhile. What counts as still
    being stored would leave no room for the rest, which would be dropped."""
    rig = make(when="write_back", host_blocks=16)
    rig.save(KEYS[:14])
    over = saving._Lease.over

    def late(lease: Any, job: Any) -> None:
        rig.tier._look(job)
        time.sleep(2 * SHORT_S)
        over(lease, job)

    monkeypatch.setattr(saving._Lease, "over", late)
    rig.manager.flush(WAIT_S)
    assert rig.manager.stats()["tier_dropped_blocks"] == 0
    assert all(rig.tier.exists(KEYS[:14]))
    rig.check_books()


def test_flush_leaves_out_what_is_arriving_and_what_went_meanwhile(make: MakeRig, copies: Copies) -> None:
    rig = make(when="write_back", host_blocks=16)
    rig.save(KEYS[:3])
    copies.hold("offload", 0)
    rig.fill(KEYS[10:12], [10, 11])
    save = rig.manager.save(KEYS[10:12], [10, 11])
    assert copies.arrived.acquire(timeout=WAIT_S)
    section(rig, books_of(rig)._offer_here, [KEYS[30]])
    rig.manager.flush(WAIT_S)
    assert rig.tier.exists([*KEYS[:3], *KEYS[10:12]]) == [True] * 3 + [False] * 2
    copies.go_on()
    save.wait(WAIT_S)
    rig.check_books()


@pytest.mark.parametrize("left", ["drain", "tier"])
def test_a_flush_that_runs_out_of_time(make: MakeRig, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    rig = make()
    if left == "drain":
        monkeypatch.setattr(books_of(rig).below, "drain", lambda timeout_s: False)
        with pytest.raises(TimeoutError, match=r"blocks were not handed to the tier after timeout_s = 0\.05"):
            rig.manager.flush(SHORT_S)
    else:
        given: list[Any] = []
        monkeypatch.setattr(rig.tier, "drain", given.append)
        rig.manager.flush(WAIT_S)
        assert len(given) == 1 and 0 < given[0] <= WAIT_S
        monkeypatch.undo()


# ---- forgetting ----
def test_what_is_dropped_while_it_comes_up_may_not_be_followed(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    rig.engine.stages[0].clear()
    load = rig.load(KEYS[:3], [0, 1, 2])
    books = books_of(rig)
    assert books.directory.following == set(KEYS[:3])
    rig.manager.drop(KEYS[1:2])
    assert books.directory.following == {KEYS[0], KEYS[2]}
    rig.manager.clear()
    assert books.directory.following == set()
    rig.engine.open()
    load.wait_over(WAIT_S)
    rig.manager.device_cache.mark_rewritten([0, 1, 2])
    rig.check_books()


def test_an_engine_that_cannot_clear_is_asked_before_host_memory_is(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    rig.save(KEYS[:2])
    monkeypatch.delattr(FilesEngine, "clear")
    with pytest.raises(NotImplementedError, match="the engine files cannot delete all"):
        rig.manager.clear()
    assert rig.manager.states(KEYS[:2]) == [PRESENT, PRESENT]
    assert not books_of(rig).below._clearing


def test_what_is_cleared_lies_nowhere_and_may_come_again(make: MakeRig) -> None:
    rig = make()
    rig.save(KEYS[:3])
    below = books_of(rig).below
    assert rig.tier.exists(KEYS[:3]) == [True] * 3
    assert rig.manager.clear() == 3
    assert rig.tier.exists(KEYS[:3]) == [False] * 3
    assert not below._clearing
    rig.save(KEYS[:2])
    assert rig.tier.exists(KEYS[:3]) == [True, True, False]
    rig.check_books()


def test_host_memory_is_cleared_where_the_tier_is_the_parents(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    rig.save(KEYS[:2])

    def refuse() -> None:
        raise ForkedError("the tier is the parent's")

    monkeypatch.setattr(rig.tier, "clear", refuse)
    assert rig.manager.clear() == 2
    assert not books_of(rig).below._clearing


def test_a_tier_lies_over_the_pool_of_the_scheduler(make: MakeRig) -> None:
    rig = make()
    other = LayerwiseScheduler(rig.cache, HostPool(rig.cache.spec, 3))
    with other, pytest.raises(ValueError, match="tier is over another host pool than that of the scheduler"):
        KVOffloadManager(other, tier=rig.tier)


def test_clearing_where_nothing_lies_below(make: MakeRig) -> None:
    rig = make(max_events=10)
    assert section(rig, books_of(rig)._clear, Clearing()) == 0
    assert [(one.kind, one.tier) for one in rig.manager.take_events()] == [("cleared", "host")]


# ---- prefetches ----
def fetching_in_parts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(tier_queue, "blocks_of_part", lambda _: size)


@pytest.mark.parametrize("max_events", [0, 100])
def test_a_prefetch_ends_at_a_part_that_somebody_holds(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, max_events: int
) -> None:
    make().save(KEYS[:6])
    rig = make(max_events=max_events)
    fetching_in_parts(monkeypatch, 2)
    domain = rig.pool.domain
    try_lease, asked = domain.try_lease, []

    def the_second_is_held(block_ids: Any, *, write: bool) -> bool:
        asked.append(write)
        return len(asked) != 2 and bool(try_lease(block_ids, write=write))

    monkeypatch.setattr(domain, "try_lease", the_second_is_held)
    prefetch = rig.manager.prefetch(KEYS[:6], timeout_s=WAIT_S)
    assert prefetch.wait(WAIT_S)
    assert (prefetch.num_blocks, prefetch.num_arrived, asked) == (6, 2, [True, True])
    monkeypatch.undo()
    assert believed(rig) == (set(KEYS[:4]) if max_events else set())
    assert rig.manager.states(KEYS[:6]) == [PRESENT] * 2 + [TIER] * 4
    rig.check_books()


def test_a_prefetch_brings_what_there_is_room_for(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save(KEYS[:6])
    rig = make()
    fetching_in_parts(monkeypatch, 2)
    mine = rig.pool.allocate(9)  # of twelve
    prefetch = rig.manager.prefetch(KEYS[:6], timeout_s=WAIT_S)
    assert prefetch.wait(WAIT_S) and prefetch.num_blocks == 3
    assert believed(rig) == set()
    rig.pool.free(mine)
    rig.check_books()


@pytest.mark.parametrize(
    ("error", "at", "brought"),
    [(TransferError("no room"), 0, 0), (TransferError("no room"), 1, 2), (ValueError("policy"), 1, 2)],
)
def test_a_prefetch_brings_what_was_planned_before_an_error(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, error: Exception, at: int, brought: int
) -> None:
    make().save(KEYS[:6])
    rig = make()
    fetching_in_parts(monkeypatch, 2)
    books: Any = books_of(rig)
    plan, calls = books._plan_from_tier, []

    def failing(keys: list[bytes], device_ids: list[int]) -> Job:
        calls.append(keys)
        if len(calls) == at + 1:
            raise error
        found: Job = plan(keys, device_ids)
        return found

    monkeypatch.setattr(books, "_plan_from_tier", failing)
    prefetch = rig.manager.prefetch(KEYS[:6], timeout_s=WAIT_S)
    assert prefetch.wait(WAIT_S)
    assert (prefetch.num_blocks, prefetch.num_arrived) == (6, brought)
    assert rig.manager.states(KEYS[:6]) == [PRESENT] * brought + [TIER] * (6 - brought)
    rig.check_books()


def test_a_policy_that_raises_before_anything_of_a_prefetch_was_planned(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().save(KEYS[:2])
    rig = make()
    monkeypatch.setattr(books_of(rig), "_plan_from_tier", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        rig.manager.prefetch(KEYS[:2], timeout_s=WAIT_S)
    rig.check_books()


def test_what_a_prefetch_lost_is_counted_and_asked_for_anew(make: MakeRig) -> None:
    make().save(KEYS[:3])
    rig = make()
    damage(rig, KEYS[1])
    prefetch = rig.manager.prefetch(KEYS[:3], timeout_s=WAIT_S)
    assert prefetch.wait(WAIT_S)
    stats = rig.manager.stats()
    assert (stats["prefetched_blocks"], stats["tier_lost_blocks"]) == (2, 1)
    assert (rig.manager.states(KEYS[:3]), believed(rig)) == ([PRESENT, ABSENT, PRESENT], set())
    rig.check_books()


def test_what_was_withdrawn_is_not_lost(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save(KEYS[:3])
    rig = make()
    held: list[Any] = []
    read = rig.engine.read
    monkeypatch.setattr(rig.engine, "read", held.extend)
    needed = section(rig, books_of(rig).read_soon, KEYS[:3])
    until(lambda: len(held) == 3)
    [fetching] = needed.fetching
    needed.cancel()
    read(held)
    until(lambda: fetching.known)
    assert fetching.reading.outcomes == [Outcome.DROPPED] * 3
    rig.check_books()
    assert rig.manager.stats()["tier_lost_blocks"] == 0
    assert rig.manager.states(KEYS[:3]) == [TIER] * 3


def test_a_tier_that_drops_what_is_wanted_has_lost_it(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    make().save(KEYS[:3])
    rig = make()
    monkeypatch.setattr(rig.engine, "read", lambda items: [item.ended(Outcome.DROPPED) for item in items])
    assert rig.manager.prefetch(KEYS[:3], timeout_s=WAIT_S).wait(WAIT_S)
    assert rig.manager.stats()["tier_lost_blocks"] == 3
    with pytest.raises(TransferError):
        rig.load(KEYS[:2], [0, 1]).wait(WAIT_S)
    rig.check_books()
    assert rig.manager.stats()["tier_lost_blocks"] == 5


# ---- what a manager is made of ----
def test_a_tier_without_a_policy_is_written_through(make: MakeRig) -> None:
    rig = make()
    rig.manager.close()
    rig.manager = KVOffloadManager(rig.scheduler, tier=rig.tier)
    rig.save(KEYS[:2])
    assert rig.tier.exists(KEYS[:2]) == [True, True]
