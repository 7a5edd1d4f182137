"""Jobs on several ranks, one call at a time: what is decided when, for which reason, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paddle_kv.offload import joining
from paddle_kv.offload.jobs import Job, Outcome, Result
from paddle_kv.offload.joining import Pending, Ranks

EPOCH = 7


class Joined:
    """Nine ranks: 1 and 8 come out of a set of integers in the wrong order."""

    def __init__(self, num_ranks: int = 9) -> None:
        self.now_s = 100.0
        self.settled: list[Pending] = []
        self.dropped: list[tuple[int, tuple[int, ...]]] = []
        self.ranks = Ranks(num_ranks, lambda: self.now_s, self.settled.append, self.drop)
        for rank in range(num_ranks):
            self.ranks.begin(rank, EPOCH)

    def drop(self, job: Job, positions: Sequence[int]) -> None:
        self.dropped.append((job.id, tuple(positions)))

    def job(self, kind: Any = "load", *, keys: int = 9, timeout_s: float | None = None, computed_from: Any = ()) -> Job:
        numbers = tuple(range(keys))
        names = tuple(bytes([number]) for number in numbers)
        epochs = (EPOCH,) * len(self.ranks.epochs)
        made = Job(self.ranks.next_id(), kind, "", names, numbers, numbers, epochs, timeout_s)  # type: ignore[arg-type]
        self.ranks.add(made, computed_from)
        return made

    def done(self, job: Job, ranks: Sequence[int] | None = None, **what: Any) -> list[Outcome]:
        ranks = range(len(self.ranks.epochs)) if ranks is None else ranks
        return self.ranks.take([Result(job.id, rank, EPOCH, **what) for rank in ranks])


@pytest.fixture
def joined() -> Joined:
    return Joined()


def test_positions_and_late_ranks_are_told_in_order(joined: Joined) -> None:
    job = joined.job(timeout_s=1.0)
    joined.done(job, [0, 2, 3, 4, 5, 6, 7], failed=(8, 1), reason="torn")
    joined.now_s += 1.0
    (outcome,), stuck = joined.ranks.expire()
    assert (outcome.late, outcome.failed, stuck) == ((1, 8), tuple(range(9)), [])
    assert outcome.reason == "rank 0: torn"  # the first one that was given
    joined.now_s += 1.0
    assert joined.ranks.expire() == ([], [1, 8])
    other = joined.job()
    assert joined.done(other, failed=(8, 1))[0].failed == (1, 8)


def test_a_save_fails_for_the_first_load_that_did(joined: Joined) -> None:
    loads = [joined.job() for _ in range(2)]
    save = joined.job("save", computed_from=[load.id for load in loads])
    for load in loads:
        joined.done(load, failed=(0,))
    (outcome,) = joined.done(save)
    assert outcome.reason == f"load {loads[0].id}, from which it was computed, failed"


def test_nobody_waits_for_a_load_of_which_it_is_decided_how_it_ends(joined: Joined) -> None:
    load = joined.job(timeout_s=1.0)
    joined.now_s += 1.0
    assert joined.ranks.expire()[0][0].late  # not over on any rank
    save = joined.job("save", computed_from=[load.id])
    assert [one.job_id for one in joined.done(save)] == [save.id]


def test_which_loads_have_failed(joined: Joined) -> None:
    assert not joined.ranks.has_failed(1)
    late, empty, torn = joined.job(timeout_s=1.0), joined.job(keys=0, timeout_s=1.0), joined.job()
    assert not any(joined.ranks.has_failed(job.id) for job in (late, empty, torn))  # nothing is decided
    joined.now_s += 1.0
    joined.ranks.expire()
    assert joined.ranks.has_failed(late.id)
    assert not joined.ranks.has_failed(empty.id)  # nothing of it is missing
    joined.done(torn, failed=(3,))
    assert joined.ranks.has_failed(torn.id)
    save = joined.job("save")
    joined.done(save, failed=(3,))
    assert not joined.ranks.has_failed(save.id)  # it is no load
    undone = joined.job("save")
    joined.ranks.undo(joined.ranks.pending[undone.id])
    assert not joined.ranks.has_failed(undone.id)


def test_failures_are_remembered_to_a_bound(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "REMEMBERED_FAILURES", 2)
    jobs = [joined.job() for _ in range(6)]  # well, failed, failed, well, failed, well
    ends = [(), (0,), (0,), (), (0,), ()]
    seen = []
    for job, failed in zip(jobs, ends, strict=True):
        joined.done(job, failed=failed)
        seen.append([joined.ranks.has_failed(one.id) for one in jobs[: len(seen) + 1]])
    assert seen[2] == [False, True, True]
    # Of those up to the oldest failure nobody knows any more; of the others all is known.
    assert seen[5] == [True, True, True, False, True, False]
    assert len(joined.ranks._failed) == 2


def test_the_first_job_of_a_directory_is_one_of_it(joined: Joined) -> None:
    first = joined.job()
    joined.ranks.check_loads([first.id])
    for number in (first.id - 1, first.id + 1):
        with pytest.raises(ValueError, match=rf"computed_from\[0\] = {number} must be a load"):
            joined.ranks.check_loads([number])


@pytest.mark.parametrize("positions", [{"failed": (9,)}, {"damaged": (9,)}, {"failed": (0,), "damaged": (-1,)}])
def test_a_position_that_a_job_has_not_is_refused(joined: Joined, positions: Any) -> None:
    job = joined.job()
    with pytest.raises(ValueError, match=r"rank 3 names position (9|-1) of job \d+; it must be in \[0, 9\)"):
        joined.ranks.check_result(Result(job.id, 3, EPOCH, **positions))
    joined.ranks.check_result(Result(job.id, 3, EPOCH, failed=(8,), damaged=(0,)))


@pytest.mark.parametrize("given", [("x", "y", 5), ("x", "y", "z"), (1.0, 2, 3), (1.0, 2.0, 3.0)])
def test_a_result_has_whole_numbers(joined: Joined, given: Any) -> None:
    with pytest.raises(TypeError, match=r"job_id of a Result .* an int is expected"):
        joined.ranks.check_result(Result(*given))
