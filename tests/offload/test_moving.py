"""How each of several jobs ended that one transfer has carried: by blocks of the pool, which are not their slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv.offload import Job, Namespace, Result
from paddle_kv.offload.moving import Moves, Moving
from paddle_kv.schedule.movement import Failure, State

BLOCKS = [5, 3, 0, 7, 1, 2]  # slot -> block of the pool
JOBS = [Job(number, "load", Namespace(), keys, slots, ids, (1,)) for number, keys, slots, ids in (
    (10, (b"a", b"b"), (1, 4), (6, 7)),
    (11, (b"c",), (0,), (8,)),
)]  # fmt: skip


def moving(failure: Failure | None, loss: Failure | None, lost: list[int], computed_from: Any = ()) -> Moving:
    host_ids = np.array([3, 1, 5])
    movement: Any = SimpleNamespace(
        failure=failure,
        loss=loss,
        failed=failure is not None,
        lost=np.isin(host_ids, lost),
        plan=SimpleNamespace(host_ids=host_ids),
        computed_from=computed_from,
        over=True,
    )
    return Moving(movement, JOBS)


def results(one: Moving) -> list[tuple[int, tuple[int, ...], tuple[int, ...], str]]:
    found = one.results(2, 1, BLOCKS)
    assert all(isinstance(result, Result) and (result.rank, result.epoch) == (2, 1) for result in found)
    return [(result.job_id, result.failed, result.damaged, result.reason) for result in found]


MISSING = Failure(State.FAILED, "not in the tier")
BROKEN = Failure(State.FAILED, "the copy failed")


def test_what_went_well() -> None:
    assert results(moving(None, None, [])) == [(10, (), (), ""), (11, (), (), "")]


@pytest.mark.parametrize(("lost", "failed"), [([1], [(1,), ()]), ([3, 5], [(0,), (0,)]), ([5], [(), (0,)])])
def test_blocks_that_did_not_come_are_the_only_ones_that_failed(lost: list[int], failed: list[tuple[int, ...]]) -> None:
    found = results(moving(MISSING, MISSING, lost))
    assert [one[1] for one in found] == failed


def test_what_failed_also_otherwise_has_failed_as_a_whole() -> None:
    """A copy that fails behind a block that did not come, or a cancel: none of the others is good."""
    assert [one[1] for one in results(moving(BROKEN, MISSING, [1]))] == [(0, 1), (0,)]


def test_damaged_blocks_are_named_by_their_place_in_the_job() -> None:
    failure = Failure(State.FAILED, "a checksum", damaged=(1, 2))  # block 2 is in slot 5, which no job has
    assert results(moving(failure, None, [])) == [(10, (0, 1), (1,), "a checksum"), (11, (0,), (), "a checksum")]


@pytest.mark.parametrize("wrong", ["failed", "arriving"])
def test_a_save_ends_with_the_loads_that_it_was_computed_from(wrong: str) -> None:
    well = SimpleNamespace(failed=False, over=True)
    other = SimpleNamespace(failed=wrong == "failed", over=wrong != "arriving")
    one = moving(None, None, [], (well, other))
    assert (one.over, one.failed) == (wrong == "failed", wrong == "failed")
    if one.failed:
        assert {result[3] for result in results(one)} == {"a load from which it was computed failed"}
        assert [result[1] for result in results(one)] == [(0, 1), (0,)]


def test_what_ends_while_it_is_asked_for_is_taken_once() -> None:
    class Ending:
        asked = 0

        @property
        def over(self) -> bool:
            self.asked += 1
            return self.asked > 1

    moves, one = Moves(SimpleNamespace()), Ending()  # type: ignore[arg-type]
    moves.moving = [one]  # type: ignore[list-item]
    assert moves.take_over() == []
    assert moves.take_over() == [one]
    assert moves.moving == []
