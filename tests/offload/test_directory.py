"""The directory alone: what it says of blocks, how the results of ranks are joined, its events, its deadlines."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from paddle_kv.errors import TransferError
from paddle_kv.offload import (
    BlockKey,
    BlockState,
    Directory,
    Event,
    Hello,
    Job,
    Lru,
    Mirror,
    Namespace,
    Outcome,
    Result,
    S3Fifo,
    SavePlan,
    Snapshot,
)
from paddle_kv.offload.joining import REMEMBERED_FAILURES
from paddle_kv.offload.slot_lru import SlotLru
from tests.offload.directory_model import Trial

KEYS = [b"%02d" % number for number in range(40)]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def made(capacity: int = 8, ranks: int = 1, **options: Any) -> Directory:
    directory = Directory(capacity, num_ranks=ranks, **options)
    for rank in range(ranks):
        directory.join(Hello(rank, 5, capacity))
    return directory


def done(directory: Directory, job: Job | None, **result: Any) -> list[Outcome]:
    assert job is not None
    ranks = range(len(directory.ranks.epochs))
    return directory.complete([Result(job.id, rank, 5, **result) for rank in ranks])


def save(directory: Directory, keys: list[bytes], **options: Any) -> None:
    done(directory, directory.plan_save(keys, list(range(len(keys))), **options).job)


def test_it_runs_without_paddle_and_numpy_and_starts_at_once() -> None:
    """In 0.2 s of a machine with nothing else to do: counted in modules, which no neighbour can slow down."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "from paddle_kv.offload import Directory, Hello, Mirror\n"
        "Directory(4).join(Hello(0, 1, 4))\n"
        "found = set(sys.modules) - before\n"
        "print(len(found), *sorted({name.partition('.')[0] for name in found} & {'paddle', 'numpy', 'ctypes'}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    number, *wrong = ran.stdout.split()
    assert wrong == []
    assert int(number) < 90


@pytest.mark.parametrize("seed", range(4))
def test_random_jobs_agree_with_a_model_of_lists(seed: int) -> None:
    trial = Trial(seed, capacity=(9, 24, 1, 24)[seed], num_ranks=1 + seed % 3)
    trial.run(1000)
    assert trial.good > 100


def test_all_that_is_sent_can_be_pickled_and_names_its_version() -> None:
    job = Job(3, "save", Namespace(b"m", b"s", 0), (b"k",), (4,), (5,), (6, 7), 1.5, True, "disk")
    for one in (
        job,
        Result(3, 1, 7, (0,), (0,), "why"),
        Hello(1, 7, 10, b"s"),
        Outcome(3, "save", (b"k",), (5,), (0,), (1,), "why"),
        SavePlan(job, (2,)),
        Event(1, "stored", "host", (b"k",)),
        Snapshot(4, {"host": (b"k",)}),
        BlockKey(Namespace(b"m", b"s", 2), 3, b"h"),
    ):
        assert pickle.loads(pickle.dumps(one)) == one


def test_what_has_another_version_is_refused() -> None:
    directory = made(max_events=9)
    job = directory.plan_save(KEYS[:1], [0]).job
    assert job is not None
    wrong = Result(job.id, 0, 5, version=2)
    with pytest.raises(ValueError, match="Result has version 2; 1 is expected"):
        directory.complete([Result(job.id, 0, 5), wrong])
    assert directory.states(KEYS[:1]) == [BlockState.ARRIVING]
    with pytest.raises(ValueError, match="Hello has version 3"):
        directory.join(Hello(0, 5, 8, version=3))
    with pytest.raises(ValueError, match="Event has version 2"):
        Mirror().apply([Event(1, "stored", "host", (), version=2)])
    with pytest.raises(ValueError, match="Snapshot has version 2"):
        Mirror().restore(Snapshot(1, {}, version=2))


def test_a_key_says_all_that_a_block_depends_on() -> None:
    space = Namespace(b"model", b"spec", 3)
    key = BlockKey(space, 1, b"hash")
    assert BlockKey.from_bytes(key.to_bytes()) == key
    others = [
        replace(key, rank=2),
        replace(key, hash=b"has"),
        replace(key, space=replace(space, group=4)),
        replace(key, space=replace(space, model=b"models", spec=b"pec")),
    ]
    assert len({key.to_bytes(), *(one.to_bytes() for one in others)}) == 5
    with pytest.raises(ValueError, match="version 9"):
        BlockKey.from_bytes(b"\x09" + key.to_bytes()[1:])
    for broken in (key.to_bytes()[:-1], key.to_bytes() + b"x"):
        with pytest.raises(ValueError, match="bytes; its fields have"):
            BlockKey.from_bytes(broken)


def test_a_rank_that_does_not_fit_is_refused() -> None:
    directory = Directory(8, num_ranks=2, space=Namespace(b"", b"spec"))
    for hello, message in (
        (Hello(2, 1, 8), r"rank = 2 must be in \[0, 2\)"),
        (Hello(0, 1, 7), "rank 0 has 7 host blocks; 8 are expected"),
        (Hello(0, 1, 8, b"other"), "another spec"),
    ):
        with pytest.raises(ValueError, match=message):
            directory.join(hello)
    with pytest.raises(ValueError, match="rank = 5"):
        directory.complete([Result(1, 5, 1)])
    for options in ({"capacity_blocks": 0}, {"capacity_blocks": 1, "num_ranks": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            Directory(**options)
    with pytest.raises(ValueError, match="policy = 'mru'"):
        Directory(3, policy="mru")
    with pytest.raises(TypeError, match="policy is"):
        Directory(3, policy=Lru)  # type: ignore[arg-type]


def test_nothing_is_planned_before_all_ranks_are_there() -> None:
    directory = Directory(8, num_ranks=2)
    directory.join(Hello(1, 5, 8))
    assert not directory.ready
    assert directory.plan_save(KEYS[:2], [0, 1]) == SavePlan(None, (0, 1))
    directory.join(Hello(0, 5, 8))
    assert directory.ready
    assert directory.plan_save(KEYS[:2], [0, 1]).job is not None


def test_a_block_is_present_when_all_ranks_have_it_and_gone_when_one_has_not() -> None:
    directory = made(ranks=3)
    job = directory.plan_save(KEYS[:3], [7, 8, 9]).job
    assert job is not None
    assert (job.keys, job.device_ids, job.epochs) == (tuple(KEYS[:3]), (7, 8, 9), (5, 5, 5))
    assert directory.complete([Result(job.id, 0, 5), Result(job.id, 2, 5, (1,), reason="no")]) == []
    assert directory.states(KEYS[:4]) == [BlockState.ARRIVING] * 3 + [BlockState.ABSENT]
    [outcome] = directory.complete([Result(job.id, 1, 5)])
    assert (outcome.failed, outcome.late, outcome.reason) == ((1,), (), "rank 2: no")
    assert [state.value for state in directory.states(KEYS[:3])] == ["present", "absent", "present"]
    assert directory.stats()["failed_saves"] == 1


def test_a_load_holds_its_blocks_and_says_what_is_to_be_computed() -> None:
    directory = made(3, ranks=2)
    save(directory, KEYS[:3])
    with directory.lookup(KEYS[:3]) as found:
        job = directory.plan_load(found.keys[:2], [4, 5])
    found.release()
    assert directory.evict(9) == 1
    assert directory.plan_save(KEYS[3:6], [0, 1, 2]).left_out == (1, 2)
    [outcome] = done(directory, job, failed=(0, 1), damaged=(1,), reason="checksum")
    assert outcome == Outcome(job.id, "load", (KEYS[0], KEYS[1]), (4, 5), (0, 1), (), "rank 0: checksum")
    assert directory.peek(KEYS[:3]) == 1  # the other one stays: it may be loaded again
    assert directory.stats()["damaged_blocks"] == 1


def test_a_failed_load_fails_the_saves_that_were_computed_from_it() -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:2])
    good, bad = directory.plan_load(KEYS[:2], [0, 1]), directory.plan_load(KEYS[:2], [2, 3])
    first = directory.plan_save(KEYS[2:3], [4], computed_from=[good.id]).job
    second = directory.plan_save(KEYS[3:4], [5], computed_from=[bad.id, good.id]).job
    assert done(directory, first) == [] == done(directory, second)
    assert {one.job_id for one in done(directory, good)} == {good.id, first and first.id}
    assert [(one.job_id, one.failed) for one in done(directory, bad, failed=(0,))] == [
        (bad.id, (0,)),
        (second and second.id, (0,)),
    ]
    assert directory.states(KEYS[2:4]) == [BlockState.PRESENT, BlockState.ABSENT]
    late = directory.plan_save(KEYS[4:5], [6], computed_from=[bad.id])
    assert late == SavePlan(None, (0,))


def test_a_load_that_failed_long_ago_is_not_taken_for_a_good_one() -> None:
    directory = made()
    save(directory, KEYS[:1])
    loads = []
    for _ in range(REMEMBERED_FAILURES + 2):
        loads.append(directory.plan_load(KEYS[:1], [0]))
        done(directory, loads[-1], failed=(0,))
    assert directory.plan_save(KEYS[1:2], [1], computed_from=[loads[0].id]).job is None
    assert directory.plan_save(KEYS[1:2], [1], computed_from=[loads[-1].id]).job is None
    good = directory.plan_load(KEYS[:1], [0])
    done(directory, good)
    assert directory.plan_save(KEYS[1:2], [1], computed_from=[good.id]).job is not None


def test_what_is_late_is_a_miss_for_all_and_its_device_blocks_are_named() -> None:
    clock = Clock()
    directory = made(ranks=2, timeout_s=3.0, clock=clock)
    job = directory.plan_save(KEYS[:2], [4, 5]).job
    assert job is not None
    assert directory.complete([Result(job.id, 0, 5)]) == []
    clock.now_s += 3.0
    [outcome] = directory.complete()
    assert (outcome.failed, outcome.late, outcome.device_ids) == ((0, 1), (1,), (4, 5))
    assert directory.states(KEYS[:1]) == [BlockState.ABSENT]
    [outcome] = directory.complete([Result(job.id, 1, 5)])
    assert (outcome.failed, outcome.late) == ((0, 1), ())
    assert directory.peek(KEYS[:2]) == 0
    assert directory.ready


def test_a_rank_that_does_not_end_its_job_in_twice_the_time_is_lost() -> None:
    clock = Clock()
    directory = made(ranks=2, timeout_s=3.0, clock=clock)
    save(directory, KEYS[:2])
    job = directory.plan_load(KEYS[:2], [0, 1], timeout_s=1.0)
    directory.complete([Result(job.id, 0, 5)])
    clock.now_s += 1.0
    assert [one.late for one in directory.complete()] == [(1,)]
    assert directory.ready
    clock.now_s += 1.0
    assert [one.late for one in directory.complete()] == [()]
    assert not directory.ready
    assert directory.stats()["blocks"] == directory.stats()["jobs_in_flight"] == 0


def test_a_rank_that_is_lost_takes_all_blocks_with_it_and_comes_back_empty() -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:3])
    found = directory.lookup(KEYS[:3])
    job = directory.plan_load(KEYS[:2], [0, 1])
    half = directory.plan_save(KEYS[5:6], [3]).job
    assert half is not None
    directory.complete([Result(half.id, 1, 5)])
    outcomes = directory.lost(1)
    assert [(one.job_id, one.failed, one.late) for one in outcomes] == [
        (job.id, (0, 1), (0,)),
        (half.id, (0,), (0,)),
    ]
    assert directory.lost(1) == []
    with pytest.raises(TransferError, match="was dropped"):
        directory.plan_load(found.keys, [0, 1, 2])
    assert directory.complete([Result(job.id, 1, 5)]) == []  # of its earlier life
    assert [one.late for one in directory.complete([Result(job.id, 0, 5), Result(half.id, 0, 5)])] == [(), ()]
    assert directory.join(Hello(1, 6, 8)) == []
    assert directory.states(KEYS[:1]) == [BlockState.ABSENT]
    plan = directory.plan_save(KEYS[:3], [0, 1, 2])
    assert plan.job is not None and plan.job.epochs == (5, 6)


def test_a_rank_that_was_away_unnoticed_is_lost_when_it_says_hello() -> None:
    directory = made(ranks=2)
    save(directory, KEYS[:3])
    assert directory.join(Hello(0, 5, 8)) == []
    assert directory.peek(KEYS[:3]) == 3
    job = directory.plan_load(KEYS[:1], [0])
    assert [one.late for one in directory.join(Hello(0, 6, 8))] == [(1,)]
    assert directory.peek(KEYS[:3]) == 0
    assert directory.ready
    assert directory.complete([Result(job.id, 0, 5), Result(job.id, 0, 6)]) == []


def test_a_result_of_another_life_of_the_rank_does_not_count() -> None:
    directory = made()
    job = directory.plan_save(KEYS[:1], [0]).job
    assert job is not None
    assert directory.complete([Result(job.id, 0, 4)]) == []
    assert directory.states(KEYS[:1]) == [BlockState.ARRIVING]
    assert len(directory.complete([Result(job.id, 0, 5)] * 2)) == 1


def test_a_policy_that_raises_costs_no_slot() -> None:
    class Raising(Lru[bytes]):
        def on_insert(self, key: bytes) -> None:
            if key == KEYS[1]:
                raise ZeroDivisionError
            super().on_insert(key)

    directory = made(4, policy=Raising())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            directory.plan_save(KEYS[:4], [0, 1, 2, 3])
    plan = directory.plan_save(KEYS[2:6], [0, 1, 2, 3])
    assert plan.job is not None and sorted(plan.job.host_slots) == [0, 1, 2, 3]


def test_the_list_of_slots_forgets_a_block_that_the_index_gave_up_without_a_word() -> None:
    slots: dict[bytes, int] = {}
    policy: SlotLru[bytes] = SlotLru(3)
    policy.attach(slots)
    for slot, key in enumerate(KEYS[:3]):
        slots[key] = slot
        policy.on_insert(key)
    del slots[KEYS[1]]
    slots[KEYS[5]] = 1
    policy.on_insert(KEYS[5])
    assert [policy.victim(None, ()) for _ in range(4)] == [KEYS[0], KEYS[2], KEYS[5], None]


def test_all_or_nothing_evicts_nothing_for_what_would_not_fit() -> None:
    directory = made(6)
    save(directory, KEYS[:6])
    with directory.lookup(KEYS[:3]):
        plan = directory.plan_save(KEYS[10:14], [0, 1, 2, 3], all_or_nothing=True)
        assert plan == SavePlan(None, (0, 1, 2, 3))
        assert directory.peek(KEYS[:6]) == 6
        plan = directory.plan_save([KEYS[4], KEYS[11], KEYS[12]], [9, 1, 2], all_or_nothing=True)
        assert plan.job is not None and plan.job.keys == (KEYS[11], KEYS[12])
        assert directory.plan_save(KEYS[20:24], [0, 1, 2, 3]).left_out == (1, 2, 3)


def test_all_or_nothing_holds_for_a_policy_that_refuses_blocks() -> None:
    directory = Directory(20, policy=S3Fifo(20))
    directory.join(Hello(0, 5, 20))
    save(directory, KEYS[:20])
    for _ in range(2):
        directory.lookup(KEYS[:20]).release()
    plan = directory.plan_save(KEYS[20:40], list(range(20)), all_or_nothing=True)
    assert plan.job is None and len(plan.left_out) == 20
    assert directory.stats()["saving_blocks"] == 0


def test_a_block_that_comes_once_is_not_kept_if_so_asked() -> None:
    directory = made()
    assert directory.plan_save(KEYS[:3], [0, 1, 2], min_uses=3).left_out == (0, 1, 2)
    assert directory.plan_save(KEYS[:2], [0, 1], min_uses=3).job is None
    plan = directory.plan_save(KEYS[:3], [0, 1, 2], min_uses=3)
    assert plan.job is not None
    assert (plan.job.keys, plan.job.device_ids, plan.left_out) == (tuple(KEYS[:2]), (0, 1), (2,))
    done(directory, plan.job)
    directory.plan_save([KEYS[30]], [0], min_uses=2)
    for number in range(31, 38):
        directory.plan_save([KEYS[number]], [0], min_uses=2)
    assert directory.plan_save([KEYS[30]], [0], min_uses=2).job is not None
    for number in range(9, 30):  # what comes once does not push out the count for ever, and is forgotten itself
        directory.plan_save([KEYS[number]], [0], min_uses=2)
    assert directory.plan_save([KEYS[10]], [0], min_uses=2).job is None
    assert directory.plan_save([KEYS[29]], [0], min_uses=2).job is not None


def test_what_is_dropped_or_saved_anew_is_not_found_by_an_earlier_job() -> None:
    directory = made()
    first = directory.plan_save(KEYS[:2], [0, 1]).job
    assert directory.drop([*KEYS[:2], KEYS[0], KEYS[7]]) == 2
    second = directory.plan_save(KEYS[:2], [0, 1]).job
    done(directory, first)
    assert directory.states(KEYS[:2]) == [BlockState.ARRIVING] * 2
    done(directory, second)
    assert directory.peek(KEYS[:2]) == 2
    third = directory.plan_save(KEYS[2:4], [0, 1]).job
    assert directory.clear() == 4
    done(directory, third)
    assert directory.states(KEYS[:4]) == [BlockState.ABSENT] * 4
    plan = directory.plan_save(KEYS[:8], list(range(8)))
    assert plan.job is not None and sorted(plan.job.host_slots) == list(range(8))


def test_neighbours_of_a_prompt_are_neighbours_in_host_memory() -> None:
    directory = made(8)
    for start in (0, 4):
        plan = directory.plan_save(KEYS[start : start + 4], [0, 1, 2, 3])
        assert plan.job is not None
        assert list(plan.job.host_slots) == list(range(start, start + 4))
        done(directory, plan.job)
    directory.drop(KEYS[2:6])
    plan = directory.plan_save(KEYS[10:14], [0, 1, 2, 3])
    assert plan.job is not None and plan.job.host_slots == (2, 3, 4, 5)


def test_a_tier_below_is_believed_and_a_load_from_it_stays_in_host_memory() -> None:
    directory = made(4, max_events=99)
    directory.tier_stored("disk", KEYS[:3])
    directory.tier_stored("peer", KEYS[:1])
    assert directory.states(KEYS[:4]) == [BlockState.TIER] * 3 + [BlockState.ABSENT]
    assert directory.peek(KEYS[:3]) == 0
    job = directory.plan_load(KEYS[:3], [4, 5, 6], tier="disk")
    assert (job.tier, job.host_slots, job.kind) == ("disk", (0, 1, 2), "load")
    assert directory.states(KEYS[:1]) == [BlockState.ARRIVING]
    done(directory, job, failed=(2,), damaged=(2,), reason="checksum")
    assert directory.states(KEYS[:3]) == [BlockState.PRESENT, BlockState.PRESENT, BlockState.ABSENT]
    with pytest.raises(KeyError, match=r"hashes\[0\]"):
        directory.plan_load(KEYS[:1], [4], tier="disk")
    directory.tier_removed("disk", KEYS[:3])
    assert directory.tiers_of(KEYS[0]) == ("peer",)
    mirror = Mirror()
    assert mirror.apply(directory.take_events())
    assert mirror.tiers == {"host": set(KEYS[:2]), "disk": set(), "peer": {KEYS[0]}}


def test_a_load_from_a_tier_takes_the_first_blocks_for_which_there_is_room() -> None:
    directory = made(4)
    save(directory, KEYS[10:12])
    directory.tier_stored("disk", KEYS[:4])
    with directory.lookup(KEYS[10:12]):
        job = directory.plan_load(KEYS[:4], [4, 5, 6, 7], tier="disk")
    assert (job.keys, job.device_ids) == (tuple(KEYS[:2]), (4, 5))


def test_a_mirror_that_missed_an_event_starts_from_a_snapshot() -> None:
    directory = made(4, max_events=2)
    mirror = Mirror()
    for number in range(6):
        save(directory, KEYS[number : number + 1])
    assert not mirror.apply(directory.take_events())
    assert mirror.tiers["host"] == set()
    directory.tier_stored("disk", KEYS[:1])
    mirror.restore(directory.snapshot())
    assert mirror.tiers == {"host": set(KEYS[2:6]), "disk": {KEYS[0]}}
    save(directory, KEYS[6:7])
    assert not mirror.apply([Event(99, "stored", "host", (b"x",))])
    mirror.restore(directory.snapshot())
    assert mirror.longest_prefix(KEYS[3:8]) == 4
    assert mirror.longest_prefix(KEYS[:1], "disk") == 1


def test_a_mirror_passes_over_what_its_snapshot_has() -> None:
    directory = made(4, max_events=20)
    save(directory, KEYS[:2])
    mirror = Mirror()
    mirror.restore(directory.snapshot())
    directory.drop(KEYS[:1])
    assert mirror.apply(directory.take_events())
    assert mirror.tiers["host"] == {KEYS[1]}
    directory.clear()
    assert mirror.apply(directory.take_events())
    assert mirror.tiers["host"] == set()


def test_a_plan_that_was_never_begun_is_undone() -> None:
    directory = made(4)
    save(directory, KEYS[:2])
    before = directory.stats()
    job = directory.plan_save(KEYS[2:4], [0, 1]).job
    assert job is not None
    directory.undo(job)
    load = directory.plan_load(KEYS[:2], [0, 1])
    directory.undo(load)
    assert directory.stats() == before
    directory.undo(directory.plan_load(KEYS[:2], [0, 1]), damaged=[1])
    assert directory.peek(KEYS[:2]) == 1
    assert directory.plan_save(KEYS[1:4], [0, 1, 2]).left_out == ()


@pytest.mark.parametrize(
    ("keys", "ids", "error", "message"),
    [
        (b"abc", [0, 1, 2], TypeError, "hashes is bytes"),
        (["a"], [0], TypeError, r"hashes\[0\] is str"),
        ([b"a", b"b"], [0], ValueError, "hashes has 2 blocks, device_block_ids has 1"),
        ([b"a"], [0.5], TypeError, "device_block_ids holds something else than int"),
    ],
)
def test_bad_arguments_change_nothing(keys: Any, ids: Any, error: type[Exception], message: str) -> None:
    directory = made()
    before = directory.stats()
    for call in (directory.plan_save, directory.plan_load):
        with pytest.raises(error, match=message):
            call(keys, ids)
    assert directory.stats() == before


def test_a_device_block_is_loaded_to_once() -> None:
    directory = made()
    save(directory, KEYS[:3])
    with pytest.raises(ValueError, match="device_block_ids names block 3 more than once"):
        directory.plan_load(KEYS[:3], [4, 3, 3])
    with pytest.raises(KeyError, match=r"hashes\[1\] = 3039 is not present"):
        directory.plan_load([KEYS[0], KEYS[9]], [3, 4])
