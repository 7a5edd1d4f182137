"""Ids that one call of the library looks through: it says yes to what the slow way says yes to, and to nothing else."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.checks import check_distinct, check_ids
from paddle_kv.ops import _arguments, _library
from paddle_kv.schedule import scheduler as scheduling

packed_ids = _library.ids["packed_ids"]
BLOCKS = 100


class Number(enum.IntEnum):
    ONE = 1


GOOD: list[Any] = [
    [],
    (),
    [0],
    [BLOCKS - 1, 0, 7],
    (3, 4),
    list(range(BLOCKS)),
    list(range(32)),
    list(range(33)),
    np.arange(50)[::-1].copy(),
    np.zeros(0, np.int64),
]
UNKNOWN: list[Any] = [
    None,
    5,
    "12",
    b"12345678",
    [True],
    [Number.ONE],
    [1.0],
    [np.int64(3)],
    [2**63],
    [-(2**63) - 1],
    range(3),
    {1, 2},
    np.arange(4, dtype=np.int32),
    np.arange(4, dtype=np.uint64),
    np.arange(4.0),
    np.arange(8)[::2],
    np.arange(4).reshape(2, 2),
    np.array(3),
    paddle.to_tensor([1, 2]),
    type,
]


def slow(ids: Any, distinct: bool) -> bytes:
    array = _arguments.block_id_array(ids, "ids")
    check_ids(array, "ids", BLOCKS)
    if distinct:
        check_distinct("ids", array)
    return array.tobytes()


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("ids", GOOD, ids=repr)
def test_good_ids(ids: Any, distinct: bool) -> None:
    assert packed_ids(ids, BLOCKS, distinct) == slow(ids, distinct)


@pytest.mark.parametrize("ids", UNKNOWN, ids=repr)
def test_it_says_nothing_of_what_it_does_not_know(ids: Any) -> None:
    assert packed_ids(ids, BLOCKS, False) is None


@pytest.mark.parametrize("position", [0, 1, 40])
@pytest.mark.parametrize("wrong", [-1, BLOCKS, -(2**63), 2**63 - 1])
def test_ids_that_are_no_blocks(position: int, wrong: int) -> None:
    ids = list(range(41))
    ids[position] = wrong
    for given in (ids, tuple(ids), np.array(ids)):
        assert packed_ids(given, BLOCKS, False) is None
        with pytest.raises(IndexError):
            slow(given, False)


@pytest.mark.parametrize("count", [2, 32, 33, 80])
def test_ids_that_occur_twice(count: int) -> None:
    for first, second in ((0, 1), (0, count - 1), (count - 2, count - 1)):
        ids = list(range(count))
        ids[second] = ids[first]
        assert packed_ids(ids, BLOCKS, True) is None
        assert packed_ids(ids, BLOCKS, False) == slow(ids, False)
        with pytest.raises(ValueError, match="more than once"):
            slow(ids, True)


def test_wrong_calls() -> None:
    for wrong in ((), ([],), ([], 3), ([], 3, True, 4), ([], "3", True), ([], 2**70, True)):
        with pytest.raises((TypeError, OverflowError)):
            packed_ids(*wrong)


def test_a_plan_is_the_same_either_way(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = [4, 9, 4], np.array([3, 1, 2])
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        quick = scheduler.plan("onload", device, host)
        monkeypatch.setattr(scheduling, "_packed_ids", scheduling._unknown)
        slowly = scheduler.plan("onload", device, host)
    for name, value in vars(quick).items():
        assert np.array_equal(value, vars(slowly)[name]), name
    device[:] = 0  # the ids were copied
    assert quick.device_ids.tolist() == slowly.device_ids.tolist() == [3, 1, 2]
