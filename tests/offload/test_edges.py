"""Small parts of the offload package, edge by edge: rates, prefetches, jobs, ranks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paddle_kv.errors import ClosedError, ForkedError
from paddle_kv.offload import below, joining
from paddle_kv.offload.below import Below, Clearing, Rate, Timed
from paddle_kv.offload.checks import check_seconds, checked_device_ids
from paddle_kv.offload.events import Mirror
from paddle_kv.offload.fetching import BLOCKS_PER_JOB, TierFetching, parts_of
from paddle_kv.offload.hashing import BlockHasher, cache_salt
from paddle_kv.offload.jobs import HOST, Event, Job, Result, Snapshot
from paddle_kv.offload.joining import Pending, Ranks
from paddle_kv.offload.prefetch import Prefetch
from paddle_kv.offload.run import Run
from paddle_kv.tiers import Job as TierJob
from paddle_kv.tiers import Outcome


def test_a_rate_is_that_of_the_first_load_and_follows_the_later_ones() -> None:
    rate = Rate()
    assert rate.began(4) == 4
    assert rate.began(6) == 10
    assert rate.seconds(5) == 0.0  # nothing is known
    rate.ended(4, 4, 2.0)
    assert rate.seconds(4) == pytest.approx(10 * 0.5)  # behind those under way
    assert rate.seconds(0) == 0.0
    rate.ended(6, 10, 15.0)
    assert rate.seconds(1) == pytest.approx(0.5 + 0.2 * (1.5 - 0.5))
    rate.began(3)
    rate.ended(3, 3, None)
    assert rate.seconds(1) == pytest.approx(0.5 + 0.2 * (1.5 - 0.5))


def test_a_prefetch_is_read_in_parts_and_counts_over_them() -> None:
    keys = [b"%d" % number for number in range(2 * BLOCKS_PER_JOB + 5)]
    parts = list(parts_of(keys))
    assert [len(part) for part in parts] == [BLOCKS_PER_JOB, BLOCKS_PER_JOB, 5]
    assert [key for part in parts for key in part] == keys
    fetching = [SimpleNamespace(num_blocks=count, num_arrived=count - 1, known=count > 1) for count in (3, 1)]
    prefetch = Prefetch(SimpleNamespace(), fetching)  # type: ignore[arg-type]
    assert (prefetch.num_blocks, prefetch.num_arrived, prefetch.done) == (4, 2, False)
    fetching[1].known = True
    assert prefetch.done


def test_who_waits_for_the_slots_of_a_prefetch_hears_of_its_end() -> None:
    said: list[Any] = []
    group = SimpleNamespace(notify=lambda: said.append("heard"))
    fetching: Any = TierFetching.__new__(TierFetching)
    fetching._left = [3, 5]
    fetching._domain = SimpleNamespace(group=group, end_lease=lambda slots, write: said.append((slots, write)))
    fetching._end()
    assert said == [([3, 5], True), "heard"]


def below_of(said: list[Any], forgotten: set[bytes]) -> Below:
    """The side of a tier whose books are gone."""
    host = SimpleNamespace(call=lambda function: function())
    group = SimpleNamespace(notify=lambda: said.append("heard"), host=host)
    domain = SimpleNamespace(end_lease=lambda slots, write: said.append(("lease", slots, write)), group=group)
    engine = SimpleNamespace(name="files", delete=lambda names: said.append(("delete", names)))
    tier = SimpleNamespace(
        engine=engine,
        pool=SimpleNamespace(domain=domain),
        format=SimpleNamespace(name_of=bytes.hex),
        begin=lambda books: said.append(("begin", books)),
        end=lambda books: said.append(("end", books)),
    )
    saver: Any = SimpleNamespace(told=None, tier=tier, when="write_through")
    saver.saved = lambda keys, slots: said.append(("saved", keys, slots))
    made: Any = Below(saver)
    made._books, made.forgotten = lambda: None, forgotten
    return cast(Below, made)


def test_of_what_a_lost_manager_has_stored_what_was_forgotten_is_deleted() -> None:
    said: list[Any] = []
    job: Any = SimpleNamespace(keys=[b"a", b"b"])
    below_of(said, {b"b"})._end_store(job)
    assert said == [("delete", [b"b".hex()])]


def test_what_was_forgotten_before_its_turn_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(below, "change", lambda books, function: function())
    below_of(said, {b"b"})._offer("saved", {b"a": 3, b"b": 5, b"c": 7})
    assert said == [("saved", [b"a", b"c"], [3, 7]), ("lease", [3, 5, 7], False), "heard"]


def test_a_tier_is_asked_in_growing_parts_up_to_its_first_gap() -> None:
    made: Any = below_of([], set())
    sizes: list[int] = []
    gap = 1000

    def exists(part: list[int]) -> list[bool]:
        sizes.append(len(part))
        return [key != gap for key in part]

    made.tier.exists = exists
    assert (made.having(range(400)), sizes) == (set(range(400)), [64, 256, 80])
    sizes.clear()
    gap = 63
    assert (made.having(range(400)), sizes) == (set(range(63)), [64])


def test_what_was_dropped_is_not_loaded_until_it_is_deleted() -> None:
    made: Any = below_of([], {b"b"})
    keys = {b"a", b"b", b"c"}
    assert made.not_forgotten(keys) == {b"a", b"c"}
    made.forget([b"c"])
    assert made.not_forgotten(keys) == {b"a"}
    made.deleted([b"c"])
    made.storing.add(b"a")
    call = Clearing()
    made.forget_all(call)
    assert (made.not_forgotten(keys), made.forgotten) == (set(), {b"a", b"b"})
    made.cleared(call)
    assert made.not_forgotten(keys) == {b"c"}


def test_a_policy_takes_what_it_wants_and_a_forked_child_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = below_of([], set())
    wanted = {}
    for when in ("write_through", "nth_use", "write_back", "exclusive"):
        made.when = when
        wanted[when] = [made.wants(what) for what in ("saved", "used", "evicting", "else")]
    assert wanted == {
        "write_through": [True, False, False, False],
        "nth_use": [True, True, False, False],
        "write_back": [False, False, True, False],
        "exclusive": [False, False, True, False],
    }
    joined: list[float] = []
    made._end, made._thread = lambda: None, None
    made.close()  # before it has begun
    made._thread = SimpleNamespace(join=joined.append)
    made.close()
    monkeypatch.setattr(below.os, "getpid", lambda: -1)
    made.close()
    assert joined == [below.END_S]
    made.when = "write_through"
    assert (made.wants("saved"), made.drain(0.0)) == (False, True)


def test_what_goes_to_a_tier_keeps_no_process_alive() -> None:
    class Owner:
        pass

    said: list[Any] = []
    made, owner = below_of(said, set()), Owner()
    made.begin(cast(Any, owner))
    thread = made._thread
    assert thread is not None
    assert (thread.name, thread.daemon) == ("paddle_kv-below", True)
    made.close()
    assert not thread.is_alive()
    assert said == [("begin", owner), ("end", owner)]


def test_a_device_block_that_is_named_twice_is_named() -> None:
    with pytest.raises(ValueError, match="names block 7 more than once"):
        checked_device_ids([b"a", b"b", b"c"], [3, 7, 7])
    checked_device_ids([b"a", b"b"], [7, 7], distinct=False)


def test_a_time_from_now_on_is_finite() -> None:
    assert [check_seconds(seconds, "in_seconds") for seconds in (None, 0, 0.5, 7)] == [0.0, 0.0, 0.5, 7.0]
    for wrong in (float("inf"), float("nan"), -0.1):
        with pytest.raises(ValueError, match=f"in_seconds = {wrong} must be"):
            check_seconds(wrong, "in_seconds")


def test_a_mirror_compares_the_first_keys() -> None:
    mirror = Mirror()
    mirror.apply([Event(1, "stored", HOST, (b"a", b"b", b"d"))])
    asked = ([b"a", b"b", b"c", b"d"], [b"a", b"b"], [b"x"], [])
    assert [mirror.longest_prefix(keys) for keys in asked] == [2, 2, 0, 0]
    assert mirror.longest_prefix([b"a"], "disk") == 0


def test_a_server_without_shards_is_its_only_one() -> None:
    assert cache_salt("m") == cache_salt("m", tp_rank=0, tp_size=1)


def test_each_token_counts() -> None:
    prefix = BlockHasher(1, b"").prefix()
    assert len(prefix.append(range(9))) == prefix.num_tokens == 9


def job(number: int, kind: str = "load", timeout_s: float | None = 1.0) -> Job:
    return Job(number, kind, None, (b"a", b"b"), (0, 1), (2, 3), (5,), timeout_s)  # type: ignore[arg-type]


def test_what_messages_hold_unless_it_is_said() -> None:
    assert not job(1).layerwise
    assert Snapshot(3).blocks == {}


def test_a_job_keeps_the_first_reason_and_tells_in_order() -> None:
    late = {9, 16, 27, 40}
    assert list(late) != sorted(late)
    pending = Pending(job(1), set(late))
    pending.fail("first")
    pending.fail("second")
    pending.failed = set(late)
    outcome = pending.outcome()
    assert (outcome.reason, outcome.late, outcome.failed) == ("first", (9, 16, 27, 40), (9, 16, 27, 40))


def test_failed_loads_are_remembered_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REMEMBERED_FAILURES", 2)
    clock_s = [0.0]
    ranks = Ranks(1, lambda: clock_s[0], lambda pending: None, lambda job, positions: None)
    assert not ranks.has_failed(1)
    ranks.begin(0, 5)
    ranks.add(job(7, timeout_s=None))
    ranks.add(job(99, "save"))
    for number in (10, 11, 12):
        ranks.add(job(number))
        clock_s[0] += 1.5
        ranks.expire()
        expected = {9: number == 12, 10: True, number: True, 7: False}
        assert {asked: ranks.has_failed(asked) for asked in expected} == expected
    assert list(ranks._failed) == [11, 12]


def test_a_load_that_is_not_remembered_may_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REMEMBERED_FAILURES", 1)
    ranks = Ranks(1, lambda: 0.0, lambda pending: None, lambda job, positions: None)
    ranks.begin(0, 5)
    for number in (10, 11):
        ranks.add(job(number))
        ranks.take([Result(number, 0, 5, (0,))])
    ranks.add(job(12))
    ranks.take([Result(12, 0, 5)])
    assert [ranks.has_failed(number) for number in (9, 10, 11, 12)] == [True, True, True, False]


def test_the_ranks_that_let_their_time_pass_are_told_in_order() -> None:
    clock_s = [0.0]
    ranks = Ranks(9, lambda: clock_s[0], lambda pending: None, lambda job, positions: None)
    for rank in range(9):
        ranks.begin(rank, 5)
    ranks.add(job(10))
    ranks.take([Result(10, rank, 5) for rank in range(9) if rank not in (1, 8)])
    silent = []
    for now_s in (1.5, 3.0):
        clock_s[0] = now_s
        silent.append(ranks.expire()[1])
    assert silent == [[], [1, 8]]


def test_a_load_of_nothing_has_lost_nothing() -> None:
    clock_s = [0.0]
    ranks = Ranks(1, lambda: clock_s[0], lambda pending: None, lambda job, positions: None)
    ranks.begin(0, 5)
    ranks.add(replace(job(10), keys=(), host_slots=(), device_ids=()))
    clock_s[0] = 1.5
    [[outcome], _] = ranks.expire()
    assert (outcome.late, ranks.has_failed(10)) == ((0,), False)


def test_a_save_waits_for_loads_that_are_not_decided() -> None:
    clock_s = [0.0]
    ranks = Ranks(1, lambda: clock_s[0], lambda pending: None, lambda job, positions: None)
    ranks.begin(0, 5)
    ranks.add(job(10))
    ranks.add(job(11, timeout_s=None))
    clock_s[0] = 1.5
    [late], stuck = ranks.expire()
    assert (late.job_id, late.late, stuck) == (10, (0,), [])  # decided, and still under way
    ranks.add(job(12, "save"), [10, 11, 99])
    assert ranks.pending[12].after == {11}


def test_a_run_begins_young_and_with_nothing_there() -> None:
    run = Run([b"a", b"b"], None, b"a", 3.0, 1, 5)
    assert (run.length, run.live, run.end, run.part) == (2, 0, 2, 0)
    assert (run.watched, run.leaf, run.head, run.facts) == (False, False, False, None)


@pytest.mark.parametrize(
    ("outcomes", "seconds", "expected"),
    [
        ([Outcome.DONE, Outcome.DONE], 0.5, [("load", "tier", 5000, 0.5)]),
        ([Outcome.DONE, Outcome.DONE], 0.0, []),  # by a coarse clock
        ([Outcome.DONE, Outcome.MISSING], 0.5, [("failed", "tier"), ("lost", [b"b"]), ("counted", 1)]),
        ([Outcome.DAMAGED, Outcome.LATE], 0.5, [("failed", "tier"), ("lost", [b"a"]), ("counted", 2)]),
        ([Outcome.FAILED, Outcome.DONE], 0.5, [("failed", "tier"), ("counted", 1)]),
        ([Outcome.DONE, Outcome.LATE], 0.5, [("late", "tier", 5000, 0.5), ("counted", 1)]),
        ([Outcome.DROPPED, Outcome.DROPPED], 0.5, [("counted", 2)]),
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_what_a_load_of_the_tier_says_of_it(
    outcomes: list[Outcome], seconds: float, expected: list[Any], lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    clock = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=100.0)
    monkeypatch.setattr(below, "time", clock)
    monkeypatch.setattr(below, "change_soon", lambda books, function: function())
    rates = SimpleNamespace(
        block_bytes=1000,
        observe_load=lambda *what: said.append(("load", *what)),
        observe_failed=lambda *what: said.append(("failed", *what)),
        observe_late=lambda *what: said.append(("late", *what)),
    )
    books: Any = SimpleNamespace(rates=rates, lost_below=lambda keys: said.append(("lost", keys)))
    books.count_lost = lambda num_blocks: said.append(("counted", num_blocks))
    books.read_ended = lambda job: said.append("ended")

    def settled(job: TierJob) -> None:
        said.append("settled")
        job.cancel()  # as a load does that fails by it

    observer: Any = SimpleNamespace(settled=settled)
    rate = Rate()
    rate.began(3)
    timed = Timed(observer, 2, rate, lambda: None if lost else books)
    clock.now_s += seconds
    done = outcomes == [Outcome.DONE] * 2
    job = TierJob([b"a", b"b"], [0, 1])
    job.outcomes = [*outcomes]
    timed.settled(job)
    assert said == (["settled"] if lost else [*expected, "settled", "ended"])
    assert rate.seconds(2) == pytest.approx(seconds if done else 0.0)  # behind the three


def test_the_thread_of_a_tier_outlives_its_tasks_and_keeps_none(caplog: pytest.LogCaptureFixture) -> None:
    class Task:
        def __init__(self, error: type[Exception] | None) -> None:
            self.error = error

        def __call__(self) -> None:
            if self.error is not None:
                raise self.error("gone")

    tasks = [Task(error) for error in (ClosedError, ForkedError, ZeroDivisionError, None)]
    last = weakref.ref(tasks[-1])

    def get() -> Any:
        assert (last() is None) == (not tasks)
        return tasks.pop(0) if tasks else None

    below._serve(cast(Any, SimpleNamespace(get=get)))
    assert [record.message for record in caplog.records] == ["an error while blocks went to a tier"]
