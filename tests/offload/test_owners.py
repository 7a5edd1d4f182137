"""Which run a block is of, asked and changed by hand."""

from __future__ import annotations

import pytest

from paddle_kv.offload.owners import Owners
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
    for key in KEYS[:2]:
        owners.put(key, first)
    number = first.number
    owners.put(KEYS[2], second)
    owners.give([1, 2], first)
    assert first.number == number != second.number
    assert list(owners.of_slots([0, 1, 2])) == [first, first, first]
    owners.give([2], second)
    assert [owners.get(key) for key in KEYS] == [first, first, second, None]


def test_a_block_is_taken_out_once(owners: Owners[bytes]) -> None:
    owners.put(KEYS[1], run())
    assert owners.pop(KEYS[1]) is not None
    for key in (KEYS[1], KEYS[0]):
        with pytest.raises(KeyError):
            owners.pop(key)
    small: Owners[bytes] = Owners(1)
    small.attach({KEYS[0]: 0, KEYS[1]: 1})  # the second one lies behind all that have an owner
    with pytest.raises(KeyError):
        small.pop(KEYS[0])
    small.put(KEYS[0], run())
    with pytest.raises(KeyError):
        small.pop(KEYS[1])


def test_the_number_of_a_run_that_is_released_is_the_next_ones(owners: Owners[bytes]) -> None:
    first, second = run(), run()
    owners.put(KEYS[0], first)
    number = first.number
    owners.release(first)
    assert owners.get(KEYS[0]) is None  # nobody's, until it is another's
    owners.put(KEYS[1], second)
    assert second.number == number
    assert first.number != number
