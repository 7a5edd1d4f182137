"""A job by itself: what its observer hears, in which order, and how it ends."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from paddle_kv.tiers import Job, Outcome
from paddle_kv.tiers.job import check_blocks, check_keys

STAGES = [range(0, 2), range(2, 4), range(4, 5)]


class Heard:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def layers_arrived(self, job: Job, layers: range) -> None:
        self.calls.append(layers)

    def settled(self, job: Job) -> None:
        self.calls.append(("settled", job.settled, job.over, list(job.outcomes)))

    def over(self, job: Job) -> None:
        self.calls.append(("over", job.settled, job.over))


def made(count: int, **options: Any) -> tuple[Job, Heard]:
    heard = Heard()
    return Job([b"%d" % number for number in range(count)], range(count), observer=heard, **options), heard


def test_a_job_before_and_when_it_begins() -> None:
    job, heard = made(2)
    other = Job([b"k"], np.array([3]), timeout_s=2, layerwise=False)
    assert (job.keys, job.block_ids, job.timeout_s, job.layerwise, job.observed) == (
        [b"0", b"1"],
        [0, 1],
        30.0,
        True,
        True,
    )
    assert (other.keys, other.block_ids, other.timeout_s, other.layerwise, other.observed) == (
        [b"k"],
        [3],
        2.0,
        False,
        False,
    )
    assert other.number == job.number + 1
    for one in (job, other):
        assert (one.outcomes, one.settled, one.over, one.cancelled) == ([None] * len(one.keys), False, False, False)
        assert (one.kind, one.started_s, one.deadline.left_s(), one.done) == ("", 0.0, None, False)
    before_s = time.monotonic()
    other.begin("load", 3, 5.5)
    assert (other.kind, other.started_s) == ("load", 5.5)
    assert 0.0 < (other.deadline.left_s() or 0.0) <= 2.0 - (time.monotonic() - before_s) + 1.0
    with pytest.raises(ValueError, match="was handed to a tier before; make another one"):
        other.begin("load", 3, 6.0)
    assert (other.kind, other.started_s) == ("load", 5.5)
    job.cancel()
    assert job.cancelled and not other.cancelled
    assert heard.calls == []


def test_its_tier_is_told_that_it_is_cancelled_until_it_is_over() -> None:
    job, _ = made(1)
    told: list[bool] = []
    job.begin("load", 1, 1.0, lambda: told.append(job.cancelled))
    job.cancel()
    assert told == [True]
    job.end([(0, Outcome.DROPPED)])
    job.settle()
    job.let_go()
    job.cancel()
    assert job.over and told == [True]


def test_its_tier_is_not_told_by_what_hears_that_it_is_over() -> None:
    """Which comes last: the tier may be closed by then."""
    job, heard = made(1)
    told: list[bool] = []
    heard.over = Job.cancel  # type: ignore[method-assign]
    job.begin("load", 1, 1.0, lambda: told.append(True))
    job.let_go()
    job.end([(0, Outcome.DONE)])
    job.settle()
    assert job.over and job.cancelled and told == []


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_told_when_all_blocks_have_them_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    job, heard = made(count)
    job.begin("load", len(STAGES), 1.0)
    arrived = [0] * len(STAGES)
    left = [stage for stage in range(len(STAGES)) for _ in range(count)]
    rng.shuffle(left)
    expected: list[Any] = []
    for stage in left:
        job.stage_arrived(stage, STAGES)
        arrived[stage] += 1
        while len(expected) < len(STAGES) and arrived[len(expected)] == count:
            expected.append(STAGES[len(expected)])
        assert heard.calls == expected
    assert heard.calls == STAGES


@pytest.mark.parametrize("count", [0, 1, 3])
def test_it_is_settled_once_and_over_when_all_is_let_go(count: int) -> None:
    job, heard = made(count)
    job.begin("store", 1, 1.0)
    for position in range(count):
        assert job.settle() is False
        outcome = Outcome.DONE if position else Outcome.MISSING
        assert job.end([(position, outcome)]) == [outcome]
        assert job.end([(position, Outcome.LATE)]) == []  # what is known stays
    outcomes = [Outcome.MISSING, Outcome.DONE, Outcome.DONE][:count]
    assert job.done == (count == 0)
    assert (job.settle(), job.settle()) == (True, False)
    settled = ("settled", True, False, outcomes)
    if count:
        assert heard.calls == [settled] and not job.over
        job.let_go(0)
        job.let_go()
        assert job.over == (count == 1)
        job.let_go(count - 1)
    assert heard.calls == [settled, ("over", True, True)]


def test_what_is_let_go_of_before_it_is_settled() -> None:
    job, heard = made(2)
    job.begin("load", 1, 1.0)
    job.let_go(2)
    assert job.end([(1, Outcome.DONE)]) == [Outcome.DONE]
    assert job.end([(0, Outcome.FAILED), (1, Outcome.FAILED)]) == [Outcome.FAILED]
    assert job.end((position, Outcome.LATE) for position in range(2)) == []
    assert heard.calls == [] and not job.over
    assert job.settle()
    assert heard.calls == [("settled", True, False, [Outcome.FAILED, Outcome.DONE]), ("over", True, True)]
    assert not job.done
    good, _ = made(2)
    assert good.end([(0, Outcome.DONE), (0, Outcome.LATE), (1, Outcome.DONE)]) == [Outcome.DONE] * 2 and good.done


def test_nobody_has_to_listen() -> None:
    job = Job([b"k"], [0])
    job.begin("load", 1, 1.0)
    job.stage_arrived(0, [range(5)])
    job.end([(0, Outcome.DONE)])
    assert job.settle()
    job.let_go()
    assert job.over


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (b"key", TypeError, "hashes is bytes; a list of bytes is expected"),
        ("key", TypeError, "hashes is str; a list of bytes is expected"),
        (5, TypeError, "hashes is int; a list of bytes is expected"),
        ([b"k", "l"], TypeError, r"hashes\[1\] is str; bytes are expected"),
        ([b"k", bytearray(b"l")], TypeError, r"hashes\[1\] is bytearray; bytes are expected"),
        ([b"k", b""], ValueError, r"hashes\[1\] has 0 bytes; 1 to 64 are expected"),
        ([bytes(65)], ValueError, r"hashes\[0\] has 65 bytes; 1 to 64 are expected"),
    ],
)
def test_what_are_no_keys(keys: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        check_keys(keys, "hashes")
    with pytest.raises(error, match="^" + message.replace("hashes", "keys")):
        check_blocks(keys, [0] * (len(keys) if isinstance(keys, list) else 1))


def test_keys_and_blocks() -> None:
    assert check_keys(iter([bytes(64), b"k"])) == [bytes(64), b"k"]
    assert check_blocks((b"k", b"l"), np.array([4, 2])) == ([b"k", b"l"], [4, 2])
    with pytest.raises(ValueError, match="keys has 1 entries, block_ids has 2; both need the same number"):
        check_blocks([b"k"], [0, 1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout_s": None}, TypeError, "timeout_s is None"),
        ({"layerwise": 1}, TypeError, "layerwise"),
        ({"observer": 5}, TypeError, "observer is 5; an object with layers_arrived, settled, over is expected"),
    ],
)
def test_what_is_no_job(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Job([b"k"], [0], **options)


def test_an_observer_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(Heard):
        def __getattribute__(self, name: str) -> Any:
            found = object.__getattribute__(self, name)
            if name in ("layers_arrived", "settled", "over"):
                return lambda *given: (found(*given), 1 // 0)
            return found

    heard = Raising()
    job = Job([b"k"], [0], observer=heard)
    job.begin("load", 1, 1.0)
    job.stage_arrived(0, STAGES[:1])
    job.end([(0, Outcome.DONE)])
    assert job.settle()
    job.let_go()
    assert heard.calls == [STAGES[0], ("settled", True, False, [Outcome.DONE]), ("over", True, True)]
    assert [record.getMessage() for record in caplog.records] == ["an error in the observer of a job"] * 3


@pytest.mark.parametrize(
    ("outcome", "lost", "withdrawn"),
    [
        (Outcome.DONE, 0, 0),
        (Outcome.DROPPED, 1, 0),
        (Outcome.LATE, 1, 1),
        (Outcome.MISSING, 1, 1),
        (Outcome.DAMAGED, 1, 1),
        (Outcome.FAILED, 1, 1),
    ],
)
def test_what_counts_as_lost(outcome: Outcome, lost: int, withdrawn: int) -> None:
    job = Job([b"a", b"b"], [3, 5])
    job.outcomes = [Outcome.DONE, outcome]
    assert job.num_lost == lost
    assert job.left_block_ids == ([] if outcome is Outcome.DONE else [5])
    job.cancel()
    assert job.num_lost == withdrawn
