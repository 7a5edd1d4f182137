"""What a directory is told wrongly: it says so, and holds what it held before."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_kv.offload import BlockState, Directory, Hello, Mirror, Result
from tests.offload.test_directory import KEYS, Clock, done, made, save


@pytest.mark.parametrize("result", [{"failed": (-1,)}, {"failed": (2,)}, {"failed": (0,), "damaged": (-2,)}])
@pytest.mark.parametrize("kind", ["save", "load"])
def test_a_position_that_a_job_has_not_is_not_booked(kind: str, result: dict[str, Any]) -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:2])
    job = directory.plan_load(KEYS[:2], [2, 3]) if kind == "load" else directory.plan_save(KEYS[2:4], [2, 3]).job
    assert job is not None
    before, states = directory.stats(), directory.states(KEYS[:4])
    with pytest.raises(ValueError, match=r"rank 1 names position -?[12] of job \d+; it must be in \[0, 2\)"):
        directory.complete([Result(job.id, 0, 5), Result(job.id, 1, 5, **result)])
    assert (directory.stats(), directory.states(KEYS[:4])) == (before, states)
    [outcome] = done(directory, job)
    assert outcome.failed == ()


def test_a_life_that_was_lost_is_not_joined_again() -> None:
    directory = made(ranks=2)
    directory.lost(1)
    with pytest.raises(ValueError, match=r"rank 1 was lost in its life 5; restart\(\) of its mover begins another"):
        directory.join(Hello(1, 5, 8))
    assert not directory.ready
    directory.join(Hello(1, 6, 8))
    with pytest.raises(ValueError, match="rank 1 was lost in its life 5"):  # a message that comes late
        directory.join(Hello(1, 5, 8))
    assert directory.ready
    directory.join(Hello(1, 7, 8))
    for old in (5, 6):
        with pytest.raises(ValueError, match=f"rank 1 was lost in its life {old}"):
            directory.join(Hello(1, old, 8))
    assert directory.join(Hello(1, 7, 8)) == []
    assert directory.join(Hello(0, 6, 8)) == []  # of another rank it is just a number
    assert directory.plan_save(KEYS[:1], [0]).job is not None


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_there_is_not_cannot_be_lost(rank: int) -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:2])
    with pytest.raises(ValueError, match=rf"rank = {rank} must be in \[0, 2\)"):
        directory.lost(rank)
    assert directory.ready
    assert directory.peek(KEYS[:2]) == 2


@pytest.mark.parametrize(
    ("timeout_s", "error"),
    [("1", TypeError), (True, TypeError), (0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)],
)
def test_a_job_without_any_time_is_not_planned(timeout_s: Any, error: type[Exception]) -> None:
    directory = made()
    save(directory, KEYS[:2])
    directory.tier_stored("disk", KEYS[2:4])
    before = directory.stats()
    for call, keys, options in (
        (directory.plan_save, KEYS[4:6], {}),
        (directory.plan_load, KEYS[:2], {}),
        (directory.plan_load, KEYS[2:4], {"tier": "disk"}),
    ):
        with pytest.raises(error, match="timeout_s"):
            call(keys, [0, 1], timeout_s=timeout_s, **options)  # type: ignore[operator]
    assert directory.stats() == before
    with pytest.raises(error, match="timeout_s"):
        Directory(4, timeout_s=timeout_s)


@pytest.mark.parametrize("name", ["capacity_blocks", "num_ranks"])
@pytest.mark.parametrize("value", [True, 8.0, "8", None])
def test_a_number_that_is_no_int(name: str, value: Any) -> None:
    given: Any = {"capacity_blocks": 8, "num_ranks": 1, name: value}
    with pytest.raises(TypeError, match=rf"^{name} = {value!r} is {type(value).__name__}; an int is expected"):
        Directory(**given)
    with pytest.raises(ValueError, match=rf"^{name} = 0 must be at least 1"):
        Directory(**{**given, name: 0})


def test_what_is_wrong_is_named() -> None:
    directory: Any = made()
    with pytest.raises(TypeError, match=r"^prompt is str; a list of bytes is expected$"):
        directory.lookup(KEYS[:2], prompt="ab")
    with pytest.raises(TypeError, match=r"^computed_from\[0\] is str; the number of a load is expected$"):
        directory.plan_save(KEYS[:2], [0, 1], computed_from=("a load",))


def test_a_device_block_below_zero_is_sent_to_no_rank() -> None:
    directory = made()
    save(directory, KEYS[:2])
    for call in (directory.plan_save, directory.plan_load):
        with pytest.raises(ValueError, match="device_block_ids names block -1; it must not be negative"):
            call(KEYS[:2], [0, -1])


def test_loads_are_named_by_anything_that_can_be_gone_through() -> None:
    directory = made()
    save(directory, KEYS[:1])
    load = directory.plan_load(KEYS[:1], [0])
    job = directory.plan_save(KEYS[1:2], [1], computed_from=iter([load.id])).job  # type: ignore[arg-type]
    assert done(directory, job) == []
    done(directory, load, failed=(0,))
    assert directory.states(KEYS[1:2]) == [BlockState.ABSENT]


def test_of_a_tier_each_block_is_loaded_once() -> None:
    directory = made()
    directory.tier_stored("disk", KEYS[:2])
    with pytest.raises(ValueError, match="hashes names a block more than once"):
        directory.plan_load([KEYS[0], KEYS[0]], [0, 1], tier="disk")
    assert directory.stats()["saving_blocks"] == 0


def test_what_has_no_room_on_its_way_from_a_tier_is_where_it_was() -> None:
    directory = made(6)
    directory.tier_stored("disk", KEYS[:9])
    job = directory.plan_load(KEYS[:9], list(range(9)), tier="disk")
    assert job.keys == tuple(KEYS[:6])
    done(directory, job)
    assert directory.states(KEYS[:9]) == [BlockState.PRESENT] * 6 + [BlockState.TIER] * 3


def test_host_memory_is_no_tier_below_it() -> None:
    directory = made(max_events=9)
    with pytest.raises(ValueError, match="tier = 'host' must be one below host memory"):
        directory.tier_stored("host", KEYS[:2])
    assert directory.take_events() == []
    assert directory.snapshot().blocks == {"host": ()}


def test_a_job_that_was_planned_without_a_rank_does_not_wait_for_it() -> None:
    clock = Clock()
    directory = made(ranks=2, timeout_s=3.0, clock=clock)
    directory.tier_stored("disk", KEYS[:2])
    directory.lost(1)
    jobs = [directory.plan_load([], []), directory.plan_load(KEYS[:2], [0, 1], tier="disk")]
    assert [job.keys for job in jobs] == [(), ()]
    assert [one.job_id for one in directory.complete([Result(job.id, 0, 5) for job in jobs])] == [
        job.id for job in jobs
    ]
    directory.plan_load([], [])
    clock.now_s += 3.0
    assert [one.late for one in directory.complete()] == [(0,)]
    assert directory.lost(0)[0].late == ()
    directory.plan_load([], [])
    clock.now_s += 3.0
    assert [one.late for one in directory.complete()] == [()]
    assert directory.stats()["jobs_in_flight"] == 0


def test_what_is_arriving_is_not_loaded() -> None:
    directory = made()
    assert directory.plan_save(KEYS[:1], [0]).job is not None
    with pytest.raises(KeyError, match="is not present"):
        directory.plan_load(KEYS[:1], [1])


@pytest.mark.parametrize("result", [{}, {"failed": (0,)}])
def test_nobody_is_told_of_a_block_that_was_forgotten_on_its_way(result: dict[str, Any]) -> None:
    directory = made(max_events=9)
    for forget, events in ((directory.clear, ["cleared"]), (lambda: directory.drop(KEYS[:1]), [])):
        job = directory.plan_save(KEYS[:1], [0]).job
        forget()
        done(directory, job, **result)
        assert [event.kind for event in directory.take_events()] == events


def test_a_directory_without_a_spec_takes_ranks_of_any() -> None:
    directory = Directory(8)
    directory.join(Hello(0, 5, 8, b"spec"))
    assert directory.ready


def test_a_block_that_a_rank_calls_damaged_has_failed() -> None:
    directory = made()
    save(directory, KEYS[:2])
    [outcome] = done(directory, directory.plan_load(KEYS[:2], [0, 1]), damaged=(1,))
    assert outcome.failed == (1,)


def test_a_save_whose_time_is_over_does_not_end_again_with_its_load() -> None:
    clock = Clock()
    directory = made(clock=clock)
    save(directory, KEYS[:1])
    load = directory.plan_load(KEYS[:1], [0])
    job = directory.plan_save(KEYS[1:2], [1], computed_from=[load.id], timeout_s=1.0).job
    assert done(directory, job) == []
    clock.now_s += 1.0
    assert [one.failed for one in directory.complete()] == [(0,)]
    assert [one.job_id for one in done(directory, load)] == [load.id]


def test_a_lost_rank_ends_each_job_once_and_none_that_another_still_moves() -> None:
    clock = Clock()
    directory = made(ranks=2, timeout_s=3.0, clock=clock)
    save(directory, KEYS[:1])
    late = directory.plan_load(KEYS[:1], [0])
    clock.now_s += 3.0
    assert [one.late for one in directory.complete()] == [(0, 1)]
    load = directory.plan_load(KEYS[:1], [1])
    job = directory.plan_save(KEYS[1:2], [2], computed_from=[load.id]).job
    assert done(directory, job) == [] == directory.complete([Result(load.id, 0, 5)])
    assert [one.job_id for one in directory.lost(1)] == [load.id, load.id + 1]
    assert [(one.job_id, one.late) for one in directory.complete([Result(late.id, 0, 5)])] == [(late.id, ())]


def test_what_a_rank_has_said_of_a_job_counts_once() -> None:
    directory = made(ranks=2)
    job = directory.plan_save(KEYS[:2], [0, 1]).job
    assert job is not None
    good, again = Result(job.id, 0, 5), Result(job.id, 0, 5, (0,), reason="told twice")
    assert directory.complete([good, good]) == [] == directory.complete([again])
    assert [one.failed for one in directory.complete([Result(job.id, 1, 5)])] == [()]
    assert directory.complete([again]) == []
    assert directory.peek(KEYS[:2]) == 2


def test_a_result_that_comes_with_its_deadline_is_in_time() -> None:
    clock = Clock()
    directory = made(timeout_s=3.0, clock=clock)
    for late in (0.0, 0.001):
        job = directory.plan_save(KEYS[:1], [0]).job
        assert job is not None
        clock.now_s += 3.0 + late
        if late:
            assert [one.late for one in directory.complete()] == [(0,)]
        assert [one.failed for one in done(directory, job)] == [(0,) if late else ()]
        directory.clear()


def test_a_pause_of_the_directory_loses_no_rank() -> None:
    """Or its clock jumps."""
    clock = Clock()
    directory = made(ranks=2, timeout_s=3.0, clock=clock)
    save(directory, KEYS[:2])
    job = directory.plan_load(KEYS[:2], [0, 1])
    clock.now_s += 1000.0
    assert [one.late for one in directory.complete()] == [(0, 1)]
    clock.now_s += 2.9
    assert directory.complete() == []
    assert [one.late for one in directory.complete([Result(job.id, 0, 5)])] == []
    assert directory.peek(KEYS[:2]) == 2
    clock.now_s += 0.1
    assert [one.late for one in directory.complete()] == [()]
    assert directory.ranks.epochs == (5, None)


def test_only_messages_are_taken_for_messages() -> None:
    directory = made(max_events=9)
    plan = directory.plan_save(KEYS[:1], [0])
    for call, given, expected in (
        (directory.complete, [plan.job], "Result"),
        (directory.join, plan, "Hello"),
        (Mirror().apply, [plan], "Event"),
        (Mirror().restore, plan, "Snapshot"),
    ):
        with pytest.raises(TypeError, match=f"{expected} is expected"):
            call(given)  # type: ignore[operator]
    with pytest.raises(TypeError, match="keys is bytes"):
        directory.drop(KEYS[0])  # type: ignore[arg-type]
    assert directory.states(KEYS[:1]) == [BlockState.ARRIVING]
