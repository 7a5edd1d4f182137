"""Which run a block is of, asked and changed by hand."""

from __future__ import annotations

import pytest

from paddle_kv.offload.owners import NOBODY, Owners
from paddle_kv.offload.run import Run

KEYS = [b"a", b"b", b"c", b"d"]


def run() -> Run[bytes]:
    return Run(KEYS, None, KEYS[0], 0.0, 1, 0)


@pytest.fixture
def owners() -> Owners[bytes]:
    made: Owners[bytes] = Owners(8)
    made.attach({key: slot for slot, key in enumerate(KEYS)})
    return made


def test_a_run_has_one_number_for_all_its_blocks(owners: Owners[bytes]) -> None:
    first, second = run(), run()
    for slot in range(2):
        owners.put(slot, first)
    number = first.number
    owners.put(2, second)
    owners.give([1, 2], first)
    assert first.number == number != second.number
    assert list(owners.of_slots([0, 1, 2])) == [first, first, first]
    owners.give([2], second)
    assert [owners.get(key) for key in KEYS] == [first, first, second, None]


def test_a_path_ends_where_a_block_is_nobodys(owners: Owners[bytes]) -> None:
    first, second = run(), run()
    for slot, one in ((0, first), (1, first), (2, second)):
        owners.put(slot, one)
    assert owners.along(KEYS) == ([0, 1, 2], [(first, 2), (second, 1)])
    assert owners.along([KEYS[1], b"absent", KEYS[2]]) == ([1], [(first, 1)])
    owners.numbers[1] = NOBODY
    assert owners.along(KEYS) == ([0], [(first, 1)])
    assert owners.along([b"absent", *KEYS]) == ([], [])


def test_a_slot_behind_all_that_have_an_owner_has_none() -> None:
    small: Owners[bytes] = Owners(1)
    small.attach({KEYS[0]: 0, KEYS[1]: 1})
    assert small.get(KEYS[0]) is None
    one = run()
    small.put(0, one)
    assert small.get(KEYS[0]) is one
    assert small.get(KEYS[1]) is None


def test_the_number_of_a_run_that_is_released_is_the_next_ones(owners: Owners[bytes]) -> None:
    first, second = run(), run()
    owners.put(0, first)
    number = first.number
    owners.release(first)
    assert owners.get(KEYS[0]) is None  # nobody's, until it is another's
    owners.put(1, second)
    assert second.number == number
    assert first.number != number
