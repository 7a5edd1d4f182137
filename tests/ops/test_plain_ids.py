"""Ids that the library looks through in one call: it says what Python's checks say, or nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import checks
from paddle_kv.ops import _arguments as arguments
from paddle_kv.ops import _library

BOUND = 9
SOME = st.lists(st.integers(-2, BOUND + 1) | st.integers(-(2**70), 2**70), max_size=6)
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda ids: np.array(ids, np.int64),
    lambda ids: array("q", ids),
]


def checked(ids: Any, *, distinct: bool) -> list[int] | None:
    """By the checks that find the words."""
    try:
        found = arguments.block_id_array(ids, "ids")
        checks.check_ids(found, "ids", BOUND)
        if distinct:
            checks.check_distinct("ids", found)
    except (TypeError, ValueError, IndexError):
        return None
    return found.tolist()


@pytest.mark.parametrize("form", FORMS)
@given(ids=SOME, distinct=st.booleans())
def test_it_says_what_the_checks_say(form: Callable[[list[int]], Any], ids: list[int], distinct: bool) -> None:
    try:
        made = form(ids)
    except OverflowError:
        return
    found = arguments.plain_id_array(made, BOUND, distinct=distinct)
    assert (None if found is None else found.tolist()) == checked(made, distinct=distinct)


@given(st.integers(-3, 12), st.integers(-3, 12), st.integers(-4, 4).filter(bool), st.booleans())
def test_ranges(start: int, stop: int, step: int, distinct: bool) -> None:
    ids = range(start, stop, step)
    found = arguments.plain_id_array(ids, BOUND, distinct=distinct)
    assert (None if found is None else found.tolist()) == checked(ids, distinct=distinct)


def test_the_array_is_the_callers_own() -> None:
    given = np.arange(5)
    for ids in (given, given.tolist()):
        found = arguments.plain_id_array(ids, BOUND, distinct=True)
        assert found is not None
        assert found.dtype == np.int64 and found.flags.c_contiguous and found.flags.aligned and found.flags.writeable
        found[:] = 7
    assert given.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_ids_of_large_pools(count: int, distinct: bool) -> None:
    bound = 10_000_000
    ids = random.Random(count).sample(range(bound), count)
    found = arguments.plain_id_array(ids, bound, distinct=distinct)
    assert found is not None and found.tolist() == ids
    assert (arguments.plain_id_array([*ids, *ids], bound, distinct=distinct) is None) == (distinct and count > 0)


class OwnInt(int):
    pass


class OwnList(list[int]):
    def __iter__(self) -> Any:
        raise AssertionError("somebody looks into it")


NONSENSE = [
    None, 7, 1.5, "12", b"12345678", bytearray(8), memoryview(bytes(16)), {1: 2}, {1}, iter([1]), object(), int,
    [True], [np.int64(1)], [OwnInt(1)], [1.0], [None], ["1"], [[1]], [b"1"], (1, False), OwnList([1]),
    [2**63], [-(2**63)], [2**64 + 1], range(2**63), range(-1, 2**70), range(10**9),
    np.array(1), np.zeros((2, 2), np.int64), np.arange(8)[::2], np.zeros(2), np.zeros(2, bool), np.zeros(2, ">i8"),
    np.zeros(2, np.int32), np.zeros(2, np.uint64), np.zeros(2, object), np.zeros(2, "M8[s]"), np.zeros(2, "i8,i8"),
    np.array([-1]), np.array([BOUND]), paddle.to_tensor([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("ids", NONSENSE, ids=lambda ids: type(ids).__name__)
def test_of_nonsense_and_of_what_is_rare_it_says_nothing(ids: Any, distinct: bool) -> None:
    assert arguments.plain_id_array(ids, BOUND, distinct=distinct) is None


@pytest.mark.parametrize("bound", [None, "9", 2**80, 1.5])
def test_a_nonsense_bound_is_an_error_of_python(bound: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        arguments.plain_id_array([1], bound, distinct=True)


def test_nonsense_counts_of_arguments_are_errors_of_python() -> None:
    plain_ids = _library.id_functions()["plain_ids"]
    for wrong in ((), ([1],), ([1], 9), ([1], 9, True, None)):
        with pytest.raises(TypeError, match=f"plain_ids takes 3 arguments; {len(wrong)} were given"):
            plain_ids(*wrong)


@pytest.mark.parametrize("bound", [0, -1, -(2**63)])
def test_a_pool_without_blocks(bound: int) -> None:
    assert arguments.plain_id_array([0], bound, distinct=True) is None
    found = arguments.plain_id_array([], bound, distinct=True)
    assert found is not None and found.size == 0


def test_random_lists_of_anything_are_nonsense() -> None:
    """As much of the memory is read as there is."""
    chance = random.Random(5)
    strange = [1, 2**62, -1, 2**200, True, None, 1.0, "x", [1], np.int64(1), object()]
    for _ in range(3000):
        ids = chance.choices(strange[: chance.randrange(1, len(strange))], k=chance.randrange(40))
        form = chance.choice([list, tuple])
        found = arguments.plain_id_array(form(ids), chance.choice([1, 2, 2**62, 2**63 - 1]), distinct=False)
        assert found is None or found.tolist() == ids
