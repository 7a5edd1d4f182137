"""What is planned and never begun, and what is found and lost: nothing of it stays behind in a directory."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest

from paddle_kv.offload import BlockState, Directory, Hello, Result, SavePlan
from tests.offload.test_directory import KEYS, Clock, done, made, save


@pytest.mark.parametrize("told_first", [True, False])
def test_the_saves_that_were_computed_from_an_undone_load_end_with_it(told_first: bool) -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:2])
    load = directory.plan_load(KEYS[:2], [0, 1])
    job = directory.plan_save(KEYS[2:4], [2, 3], computed_from=[load.id]).job
    assert job is not None
    if told_first:
        assert done(directory, job) == []
        outcomes = directory.undo(load)
    else:
        assert directory.undo(load) == []
        assert directory.states(KEYS[2:3]) == [BlockState.ARRIVING]  # both ranks still save
        outcomes = done(directory, job)
    assert [(one.job_id, one.failed, one.late) for one in outcomes] == [(job.id, (0, 1), ())]
    assert "was computed" in outcomes[0].reason
    assert directory.states(KEYS[:4]) == [BlockState.PRESENT] * 2 + [BlockState.ABSENT] * 2
    good = directory.plan_load(KEYS[:1], [0])
    assert done(directory, good)
    for loads in ([load.id], [load.id, good.id], [good.id, load.id]):
        assert directory.plan_save(KEYS[2:4], [2, 3], computed_from=loads).left_out == (0, 1)
    assert (directory.index.pins, directory.stats()["jobs_in_flight"]) == ({}, 0)
    assert sorted(directory._slots.take(9)) == [2, 3, 4, 5, 6, 7]  # and no slot is lost


def test_a_save_that_is_undone_is_not_ended_again_by_its_load() -> None:
    directory = made()
    save(directory, KEYS[:1])
    load = directory.plan_load(KEYS[:1], [0])
    job = directory.plan_save(KEYS[1:2], [1], computed_from=[load.id]).job
    assert job is not None
    assert directory.undo(job) == []
    assert [one.job_id for one in done(directory, load, failed=(0,))] == [load.id]
    assert directory.index.pins == {}


@pytest.mark.parametrize("kind", ["load", "save"])
def test_what_is_over_already_is_undone_to_no_effect(kind: str) -> None:
    clock = Clock()
    directory = made(ranks=2, timeout_s=3.0, clock=clock)
    save(directory, KEYS[:2])
    for late in (False, True):
        job = directory.plan_load(KEYS[:2], [2, 3]) if kind == "load" else directory.plan_save(KEYS[2:4], [2, 3]).job
        assert job is not None
        if late:
            clock.now_s += 3.0
            assert [one.late for one in directory.complete()] == [(0, 1)]
        else:
            done(directory, job, failed=(0, 1))
        before = directory.stats() | {"jobs_in_flight": 0}
        outcomes = directory.undo(job)
        assert [(one.job_id, one.failed, one.late) for one in outcomes] == [(job.id, (0, 1), ())] * late
        assert (directory.stats(), directory.index.pins, directory.undo(job)) == (before, {}, [])
        clock.now_s += 30.0
        assert directory.complete() == []
        assert directory.ready


def test_of_a_look_up_that_is_lost_nothing_is_held() -> None:
    directory = made(3)
    save(directory, KEYS[:3])
    found = directory.lookup(KEYS[:2])
    held = directory.lookup(KEYS[:1])
    assert directory.evict(9) == 1
    found.keys.pop()  # the caller's list
    ring: list[Any] = [found]
    ring.append(ring)
    del found, ring
    gc.collect()
    assert directory.stats()["pinned_blocks"] == 1
    assert directory.evict(9) == 1
    held.release()
    held.release()
    assert directory.evict(9) == 1
    assert directory.index.pins == {}


@pytest.mark.parametrize("call", ["lookup", "plan_save", "plan_load", "evict", "stats"])
def test_each_call_that_asks_what_is_held_gives_back_what_was_lost(call: str) -> None:
    directory = made(3)
    save(directory, KEYS[:3])
    directory.tier_stored("disk", KEYS[4:5])
    lost = [directory.lookup(KEYS[:3])]
    thread = threading.Thread(target=lost.clear)
    thread.start()
    thread.join()
    if call == "lookup":
        directory.lookup([]).release()
        assert directory.index.pins == {}
    elif call == "plan_save":
        assert directory.plan_save(KEYS[5:8], [0, 1, 2], all_or_nothing=True).left_out == ()
    elif call == "plan_load":
        assert directory.plan_load(KEYS[4:5], [0], tier="disk").keys == (KEYS[4],)
    elif call == "evict":
        assert directory.evict(3) == 3
    else:
        assert directory.stats()["pinned_blocks"] == 0


def test_what_is_handed_over_is_not_given_back_by_the_look_up() -> None:
    directory = made()
    save(directory, KEYS[:2])
    found = directory.lookup(KEYS[:2])
    keys = found.hand_over()
    found.release()
    del found
    gc.collect()
    assert directory.evict(2) == 0
    directory.index.unpin(keys)
    assert directory.evict(2) == 2
    assert directory.lookup(KEYS[:1]).hand_over() == []


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (lambda load: load.id + 1, ValueError),
        (lambda load: load.id - 2, ValueError),
        (str, TypeError),
        (bool, TypeError),
    ],
)
def test_what_was_computed_from_no_load_of_the_directory_is_not_saved(number: Any, error: type[Exception]) -> None:
    directory = made()
    save(directory, KEYS[:2])
    load = directory.plan_load(KEYS[:2], [0, 1])
    before = directory.stats()
    with pytest.raises(error, match=r"computed_from\[1\] "):
        directory.plan_save(KEYS[2:3], [2], computed_from=[load.id, number(load)])
    assert directory.stats() == before
    assert directory.states(KEYS[2:3]) == [BlockState.ABSENT]


def test_what_was_computed_from_a_save_is_refused() -> None:
    directory = made()
    job = directory.plan_save(KEYS[:1], [0]).job
    assert job is not None
    with pytest.raises(ValueError, match=rf"computed_from\[0\] = {job.id} must be a load of this directory"):
        directory.plan_save(KEYS[1:2], [1], computed_from=[job.id])


def test_the_jobs_of_a_directory_that_was_before_are_not_those_of_this_one() -> None:
    """Its ranks live on, in the same life."""
    old, new = made(), made()
    save(old, KEYS[:1])
    load, left = old.plan_load(KEYS[:1], [0]), old.plan_save(KEYS[1:2], [1]).job
    jobs = [new.plan_save(KEYS[number : number + 1], [number]).job for number in range(3)]
    assert left is not None and None not in jobs
    assert new.complete([Result(load.id, 0, 5), Result(left.id, 0, 5)]) == []
    assert new.states(KEYS[:3]) == [BlockState.ARRIVING] * 3
    with pytest.raises(ValueError, match=rf"computed_from\[0\] = {load.id} must be a load of this directory"):
        new.plan_save(KEYS[3:4], [3], computed_from=[load.id])


def test_no_directory_counts_its_jobs_like_another() -> None:
    numbers = []
    for _ in range(8):
        directory = Directory(1)
        directory.join(Hello(0, 1, 1))
        numbers.append(directory.plan_load([], []).id)
    assert min(abs(one - other) for one in numbers for other in numbers if one is not other) > 1_000_000


def test_a_look_up_holds_until_the_end_of_its_block() -> None:
    directory = made()
    save(directory, KEYS[:2])
    with directory.lookup(KEYS[:2]) as found:
        assert set(directory.index.pins) == set(found.keys)
    assert directory.index.pins == {}


def test_a_job_that_is_undone_takes_no_block_that_another_brings() -> None:
    directory = made()
    first = directory.plan_save(KEYS[:2], [0, 1]).job
    directory.drop(KEYS[:1])
    second = directory.plan_save(KEYS[:1], [0]).job
    assert first is not None
    assert directory.undo(first) == []
    assert directory.states(KEYS[:2]) == [BlockState.ARRIVING, BlockState.ABSENT]
    done(directory, second)
    assert directory.peek(KEYS[:2]) == 1


def test_what_made_room_is_counted() -> None:
    directory = made(4, max_events=99)
    save(directory, KEYS[:4])
    with directory.lookup(KEYS[:1]):
        save(directory, KEYS[4:6])
    assert directory.evict(1) == 1
    assert directory.stats()["evicted_blocks"] == 3
    assert [len(event.keys) for event in directory.take_events() if event.kind == "removed"] == [2, 1]


def test_ranks_that_were_lost_are_named_until_they_join_again() -> None:
    clock = Clock()
    directory = Directory(8, num_ranks=3, timeout_s=3.0, clock=clock)
    assert directory.lost_ranks == set()  # nobody was there yet
    directory.lost(2)
    assert directory.lost_ranks == set()
    for rank in range(3):
        directory.join(Hello(rank, 5, 8))
    job = directory.plan_save(KEYS[:2], [0, 1]).job
    assert job is not None
    clock.now_s += 3.0
    assert [one.late for one in directory.complete([Result(job.id, 1, 5)])] == [(0, 2)]
    assert directory.lost_ranks == set()
    clock.now_s += 3.0
    assert [one.late for one in directory.complete()] == [()]
    assert (directory.lost_ranks, directory.ready) == ({0, 2}, False)
    directory.lost(1)
    directory.join(Hello(0, 6, 8))
    assert directory.lost_ranks == {1, 2}
    for rank in (1, 2):
        directory.join(Hello(rank, 6, 8))
    assert (directory.lost_ranks, directory.ready) == (set(), True)
    directory.join(Hello(1, 7, 8))  # what was there is lost, the rank is not
    assert directory.lost_ranks == set()


@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_directory_is_of_one_process_alone(again: Any) -> None:
    directory = made()
    save(directory, KEYS[:2])
    found, empty = directory.lookup(KEYS[:2]), directory.lookup(KEYS[5:6])
    for one, instead in ((directory, "snapshot.. and take_events.. to a Mirror"), (found, "keys"), (empty, "keys")):
        with pytest.raises(TypeError, match=f"cannot be pickled or copied: .* send its {instead}"):
            again(one)
    found.release()
    with pytest.raises(TypeError, match="a Directory cannot be pickled or copied"):
        again(directory)
    assert directory.evict(9) == 2


@pytest.mark.parametrize("timeout_s", [None, 3.0])
@pytest.mark.parametrize("was_there", [False, True])
def test_a_load_that_was_planned_for_no_rank_ends_as_a_miss_at_once(timeout_s: float | None, was_there: bool) -> None:
    """Nobody is asked, so nobody answers: without a time-out it would be in flight for ever."""
    clock = Clock()
    directory = Directory(8, num_ranks=2, timeout_s=timeout_s, clock=clock)
    if was_there:
        for rank in range(2):
            directory.join(Hello(rank, 4, 8))
            directory.lost(rank)
    directory.tier_stored("disk", KEYS[:2])
    jobs = [directory.plan_load(KEYS[:2], [0, 1], tier="disk"), directory.plan_load([], [])]
    assert [job.keys for job in jobs] == [(), ()]
    for rank in range(2):
        directory.join(Hello(rank, 5, 8))
    load = directory.plan_load(KEYS[:1], [2], tier="disk")  # of ranks that are there
    outcomes = directory.complete([Result(job.id, rank, 5) for job in jobs for rank in range(2)])
    assert [(one.job_id, one.keys, one.late) for one in outcomes] == [(job.id, (), ()) for job in jobs]
    assert {one.reason for one in outcomes} == {"no rank was there when it was planned"}
    assert [one.job_id for one in done(directory, load)] == [load.id]
    clock.now_s += 100.0
    assert directory.complete() == []
    assert (directory.stats()["jobs_in_flight"], directory.index.pins) == (0, {})
    assert (directory.lost_ranks, directory.states(KEYS[:2])) == (frozenset(), [BlockState.PRESENT, BlockState.TIER])


@pytest.mark.parametrize("policy", ["lru", "survival"])
def test_a_save_of_nothing_changes_nothing(policy: str) -> None:
    directory = Directory(4, policy=policy)
    directory.join(Hello(0, 5, 4))
    save(directory, KEYS[:4])
    before = directory.stats(), directory.snapshot(), list(directory.index.slots)
    for options in ({}, {"layerwise": True}, {"all_or_nothing": True}, {"min_uses": 2}):
        assert directory.plan_save([], [], **options) == SavePlan(None)  # type: ignore[arg-type]
    assert (directory.stats(), directory.snapshot(), list(directory.index.slots)) == before
    with pytest.raises(ValueError, match=r"computed_from\[0\] = 3 must be a load"):
        directory.plan_save([], [], computed_from=[3])


def test_a_saved_block_comes_from_the_device_block_that_was_named_for_it() -> None:
    directory = made(8)
    job = directory.plan_save([b"a", b"b", b"a"], [7, 8, 9]).job  # of one that is named twice, from the last
    assert job is not None and (job.keys, job.device_ids) == ((b"a", b"b"), (9, 8))
    job = directory.plan_save([b"a", b"c", b"b", b"d"], [1, 2, 3, 4]).job
    assert job is not None and (job.keys, job.device_ids) == ((b"c", b"d"), (2, 4))
    job = directory.plan_save([b"f", b"e"], [6, 5]).job
    assert job is not None and (job.keys, job.device_ids) == ((b"f", b"e"), (6, 5))
