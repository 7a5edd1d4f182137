"""Messages, numbers and lists of the wrong form: refused as a whole, whatever stands before them in the same call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv.offload import Directory, Event, Hello, Job, Lru, Mirror, Result, Snapshot
from tests.offload.test_directory import KEYS, Clock, done, made, save

NAN = float("nan")


def state_of(directory: Directory) -> tuple[Any, ...]:
    return directory.stats(), directory.snapshot(), directory.lost_ranks, directory.states(KEYS[:6])


def busy() -> tuple[Directory, Job, Job]:
    """Two ranks, two blocks present, one in a tier; a load and a save in flight."""
    directory = made(ranks=2)
    save(directory, KEYS[:2])
    directory.tier_stored("disk", KEYS[4:5])
    pending = directory.plan_save(KEYS[2:4], [2, 3]).job
    assert pending is not None
    return directory, directory.plan_load(KEYS[:2], [4, 5]), pending


@pytest.mark.parametrize(
    ("field", "value"),
    [("job_id", one) for one in (True, None, 1.5, "x", [])]
    + [("rank", one) for one in (True, None, 1.0, "0", NAN)]
    + [("epoch", one) for one in (True, None, 5.0, "5", [])]
    + [(name, one) for name in ("failed", "damaged") for one in ([0], "0", None, 7, (True,), (0.5,), (NAN,), ("0",))]
    + [("reason", one) for one in (None, b"x", 5)],
)
def test_a_result_of_another_form_is_not_booked(field: str, value: Any) -> None:
    directory, load, pending = busy()
    before = state_of(directory)
    wrong = dataclasses.replace(Result(pending.id, 1, 5), **{field: value})
    with pytest.raises(TypeError, match=field):
        directory.complete([Result(load.id, 0, 5), Result(load.id, 1, 5), wrong])
    assert state_of(directory) == before
    assert [outcome.failed for outcome in done(directory, load)] == [()]


@pytest.mark.parametrize(
    ("field", "value"),
    [(name, one) for name in ("rank", "epoch", "capacity_blocks") for one in (True, None, 1.0, "1", NAN, [])]
    + [("spec", one) for one in (None, "x", 5)],
)
def test_a_hello_of_another_form_loses_nothing(field: str, value: Any) -> None:
    directory, _, _ = busy()
    before = state_of(directory)
    with pytest.raises(TypeError, match=field):
        directory.join(dataclasses.replace(Hello(1, 9, 8), **{field: value}))
    assert state_of(directory) == before


@pytest.mark.parametrize("version", [0, 2, None, "1", True, 1.0])
def test_another_version_is_refused_also_if_it_equals(version: Any) -> None:
    directory, load, _ = busy()
    before = state_of(directory)
    with pytest.raises(ValueError, match=r"Result has version .*; 1 is expected"):
        directory.complete([Result(load.id, 0, 5), Result(load.id, 1, 5, version=version)])
    with pytest.raises(ValueError, match=r"Hello has version .*; 1 is expected"):
        directory.join(Hello(1, 9, 8, version=version))
    assert state_of(directory) == before


@pytest.mark.parametrize(
    ("damaged", "error"),
    [
        *((one, TypeError) for one in (None, 5, "0", [True], [0.5])),
        *((one, ValueError) for one in ([2], [-1], [0, 2])),
    ],
)
def test_a_job_is_not_undone_with_positions_that_it_has_not(damaged: Any, error: type[Exception]) -> None:
    directory, load, _ = busy()
    before = state_of(directory)
    with pytest.raises(error, match="damaged"):
        directory.undo(load, damaged)
    assert state_of(directory) == before
    directory.undo(load, [0])
    assert directory.peek(KEYS[:2]) == 0


NONSENSE: list[tuple[Callable[[Directory], object], type[Exception], str]] = [
    *((lambda d, one=one: d.undo(one), TypeError, "Job is expected") for one in (None, 5, "x", [])),
    *((lambda d, one=one: d.lost(one), TypeError, "rank") for one in (True, None, 1.0, "0")),
    *((lambda d, one=one: d.evict(one), TypeError, "num_blocks") for one in (True, None, 1.5, NAN, "1")),
    (lambda d: d.evict(-1), ValueError, r"num_blocks = -1 must be in \[0"),
    *((lambda d, one=one: d.tier_stored(one, KEYS[:1]), TypeError, "tier is") for one in (None, 5, b"disk", [])),
    *((lambda d, one=one: d.tier_removed(one, KEYS[4:5]), TypeError, "tier is") for one in (None, 5, b"disk", [])),
    (lambda d: d.tier_removed("host", KEYS[4:5]), ValueError, "tier = 'host'"),
    *((lambda d, one=one: d.tiers_of(one), TypeError, "key") for one in (None, 5, "x", [b"a"])),
    *((lambda d, one=one: d.lookup(KEYS, prompt=one), TypeError, "prompt") for one in (5, "x", b"x", [1], {b"a"})),
    *(
        (lambda d, one=one: d.plan_save(KEYS[:1], [0], min_uses=one), TypeError, "min_uses")
        for one in (True, None, 1.5)
    ),
    *((lambda d, one=one: d.plan_save(KEYS[:1], [0], min_uses=one), ValueError, "min_uses") for one in (0, -1)),
    *((lambda d, one=one: d.plan_save(KEYS[4:5], one), TypeError, "device_block_ids") for one in (None, 5, b"0", "0")),
    *((lambda d, one=one: d.plan_load(KEYS[:1], one), TypeError, "device_block_ids") for one in (None, 5, b"0", "0")),
    (lambda d: d.plan_load(KEYS[:1], [2**63]), ValueError, r"device_block_ids names block \d+; it must be in \[0, 2"),
    *(
        (lambda d, one=one: d.plan_save(KEYS[4:5], [0], computed_from=one), TypeError, "computed_from")
        for one in (None, 5, b"0", [None], [True])
    ),
    *((lambda d, one=one: d.plan_load(KEYS[4:5], [0], tier=one), TypeError, "tier is") for one in (None, 5, [])),
    *((lambda d, one=one: d.plan_save(KEYS[4:5], [0], layerwise=one), TypeError, "layerwise") for one in (None, 1)),
    *((lambda d, one=one: d.plan_save(KEYS[4:5], [0], all_or_nothing=one), TypeError, "all_or_n") for one in (None, 1)),
    *((lambda d, one=one: d.lost(one), TypeError, "rank = ") for one in (None, True, "0")),
    *((lambda d, one=one: d.complete(one), TypeError, "results|Result is expected") for one in (None, 5, "x", [None])),
]


@pytest.mark.parametrize(("call", "error", "match"), NONSENSE)
def test_nonsense_is_named_and_changes_nothing(
    call: Callable[[Directory], object], error: type[Exception], match: str
) -> None:
    directory, _, _ = busy()
    before = state_of(directory)
    with pytest.raises(error, match=match):
        call(directory)
    assert state_of(directory) == before


@pytest.mark.parametrize(
    ("given", "error"),
    [({"max_events": one}, TypeError) for one in (True, None, 1.5, "x")]
    + [({"max_events": -1}, ValueError), ({"clock": 5}, TypeError), ({"clock": None}, TypeError)]
    + [({"space": 5}, TypeError), ({"space": b"x"}, TypeError), ({"num_ranks": 10**30}, ValueError)]
    + [({"slots": 5}, TypeError), ({"policy": 5}, TypeError), ({"policy": Lru}, TypeError)],
)
def test_a_directory_is_not_made_of_nonsense(given: dict[str, Any], error: type[Exception]) -> None:
    [name] = given
    with pytest.raises(error, match=name):
        Directory(8, **given)
    with pytest.raises(ValueError, match=r"capacity_blocks = \d+ must be below 2\*\*31"):
        Directory(2**31, policy="arc")
    assert Directory(2**31 - 1, policy="arc").index.capacity_blocks == 2**31 - 1


@pytest.mark.parametrize(
    "wrong",
    [Event(2, "stored", "host", (b"b",), version=2), Event(2, "weird", "host", (b"b",))]  # type: ignore[arg-type]
    + [Event(one, "stored", "host", (b"b",)) for one in (True, "2", None, 2.0)]  # type: ignore[arg-type]
    + [Event(2, "stored", one, (b"b",)) for one in (None, 5, [])]  # type: ignore[arg-type]
    + [Event(2, "stored", "host", one) for one in (None, "ab", [b"b"], (1,))]  # type: ignore[arg-type]
    + [5, None],
)
def test_of_events_of_which_one_is_wrong_none_is_applied(wrong: Any) -> None:
    mirror = Mirror()
    with pytest.raises((TypeError, ValueError), match=r"[Ee]vent"):
        mirror.apply([Event(1, "stored", "host", (b"a",)), wrong])
    assert (mirror.tiers, mirror.number) == ({"host": set()}, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        Snapshot(3, {"host": (b"a",)}, version=2),
        Snapshot("3", {}),  # type: ignore[arg-type]
        Snapshot(3, None),  # type: ignore[arg-type]
        Snapshot(3, {"host": "ab"}),  # type: ignore[dict-item]
        Snapshot(3, {5: (b"a",)}),  # type: ignore[dict-item]
        Snapshot(True, {}),
        None,
    ],
)
def test_a_snapshot_of_another_form_is_not_restored(wrong: Any) -> None:
    mirror = Mirror()
    mirror.apply([Event(1, "stored", "host", (b"a",))])
    with pytest.raises((TypeError, ValueError), match="Snapshot"):
        mirror.restore(wrong)
    assert (mirror.tiers, mirror.number) == ({"host": {b"a"}}, 1)


def test_what_a_late_rank_finds_damaged_is_dropped_too() -> None:
    clock = Clock()
    directory = made(ranks=3, clock=clock)
    save(directory, KEYS[:2])
    load = directory.plan_load(KEYS[:2], [2, 3], timeout_s=1.0)
    clock.now_s += 1.0
    assert [outcome.late for outcome in directory.complete([Result(load.id, 0, 5)])] == [(1, 2)]
    assert directory.complete([Result(load.id, 1, 5, (0, 1), (1,))]) == []
    assert directory.peek(KEYS[:2]) == 1
    assert directory.stats()["damaged_blocks"] == 1
    directory.complete([Result(load.id, 1, 5, (0, 1), (0,))])  # doubled, and it says something else: does not count
    assert directory.peek(KEYS[:2]) == 1


def test_all_or_nothing_evicts_nothing_also_beside_the_head_of_the_same_prompt() -> None:
    """Room for four: the head of the prompt, which its end may not evict, and two others."""
    directory = made(4, policy="lru", max_events=100)
    save(directory, KEYS[:2])
    save(directory, KEYS[6:8])
    directory.lookup(KEYS[:5]).release()
    directory.take_events()
    plan = directory.plan_save(KEYS[2:5], [2, 3, 4], all_or_nothing=True)
    assert (plan.job, plan.left_out) == (None, (0, 1, 2))
    assert directory.take_events() == []
    assert directory.peek(KEYS[6:8]) == 2
    plan = directory.plan_save(KEYS[2:4], [2, 3], all_or_nothing=True)  # for two there is
    assert plan.job is not None
    assert plan.left_out == ()


def test_what_two_ranks_find_damaged_is_dropped_of_both() -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:3])
    load = directory.plan_load(KEYS[:3], [2, 3, 4])
    directory.complete([Result(load.id, 0, 5, (0,), (0,)), Result(load.id, 1, 5, (2,), (2,))])
    assert [state.value for state in directory.states(KEYS[:3])] == ["absent", "present", "absent"]


def test_all_ranks_that_are_silent_are_lost_at_once_each_with_a_job_of_its_own() -> None:
    clock = Clock()
    directory = made(ranks=3, clock=clock)
    jobs = [directory.plan_save(KEYS[one : one + 1], [one], timeout_s=1.0).job for one in range(2)]
    for silent, job in enumerate(jobs):
        assert job is not None
        directory.complete([Result(job.id, rank, 5) for rank in range(3) if rank != silent])
    for _ in range(2):
        clock.now_s += 1.0
        directory.complete()
    assert directory.lost_ranks == {0, 1}


def test_blocks_behind_an_arriving_one_are_there_when_it_is() -> None:
    directory = made()
    save(directory, KEYS[:1])
    save(directory, KEYS[2:3])
    directory.plan_save(KEYS[1:2], [5])
    directory.plan_save(KEYS[4:5], [6])
    with directory.lookup(KEYS[:6]) as found:
        assert (found.keys, found.num_arriving) == (KEYS[:1], 2)  # KEYS[3] comes from nowhere
