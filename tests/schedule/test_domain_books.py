"""What a domain keeps of leases, readers and poison, edge by edge."""

from __future__ import annotations

import pytest

from paddle_kv import LeasedError
from paddle_kv.tracking.domain import BlockDomain


@pytest.fixture
def domain() -> BlockDomain:
    return BlockDomain(num_blocks=16)


def test_a_lease_for_reading_that_ends_takes_nothing_from_a_later_one_for_writing(domain):
    assert domain.try_lease([3], write=False)
    domain.end_lease([3], write=False)
    assert domain.try_lease([3], write=True)
    with pytest.raises(LeasedError, match="block 3 of the host pool is leased") as caught:
        domain.check([1, 3], "host pool", writing=False)
    assert caught.value.block_ids == [3]
    domain.end_lease([3], write=True)
    domain.check([1, 3], "host pool", writing=True)


class Moves:
    failed = False

    def __init__(self, number: int) -> None:
        self.number = number


def test_holders_are_told_in_order_of_submission(domain):
    """Also where a set of their numbers has another order."""
    transfers = [Moves(number) for number in (9, 16, 27, 40)]
    for block, transfer in enumerate(transfers):
        domain.write([block], transfer)
    assert domain.holders([3, 1, 0, 2]) == transfers
    assert domain.lone_holders([3, 1, 0, 2]) == transfers
    assert list({9, 16, 27, 40}) != [9, 16, 27, 40]


def test_there_is_room_for_the_largest_number_of_blocks_that_was_told(domain):
    for num_blocks, room in ((4, 16), (16, 16), (20, 20)):
        domain.grow(num_blocks)
        assert domain._writer.size == room
    assert domain.busy([19]) == []


def test_blocks_behind_the_last_one_have_no_users(domain):
    domain.write([15], Moves(1))
    assert [block for block, _, _ in domain.users([15, 16, 17], writing=True)] == [15]


def test_behind_a_write_nobody_asks_for_the_readers_before_it(domain):
    reader, writer, last = Moves(1), Moves(2), Moves(3)
    domain.read([1, 2], reader)
    assert domain.write([1], writer) == {reader}
    assert domain.write([1], last) == {writer}
    for transfer in (writer, last):
        domain.release(transfer, written=True)
    assert domain.busy([1, 2]) == [2]
    domain.release(reader, written=False)
    assert domain.busy([1, 2]) == []


def test_what_was_lost_stays_poisoned_where_the_rest_was_written(domain):
    failed, again = Moves(1), Moves(2)
    domain.write([1, 2, 3], failed)
    domain.poison([1, 2, 3], failed, "it failed")
    domain.release(failed, written=False)
    domain.write([1, 2, 3], again)
    domain.release(again, written=True, lost=[2])
    assert domain.poisoned([1, 2, 3]) == [2]
    domain.mark_rewritten([2])
    assert domain._why_poisoned == {}


def test_a_block_is_in_use_until_the_last_one_has_read_it(domain):
    first, second, third = (Moves(number) for number in (1, 2, 3))
    domain.read([3, 4], first)
    domain.read([3], second)
    domain.release(first, written=False)
    assert domain.busy([3, 4]) == [3]
    assert domain.holders([3, 4]) == [second]
    domain.read([3], third)
    assert domain.holders([3]) == [second, third]
    assert domain.write([3], Moves(4)) == {second, third}


def test_a_block_that_is_named_twice_was_rewritten_as_well(domain):
    transfer = Moves(1)
    domain.write([3, 5], transfer)
    domain.poison([3, 5], transfer, "it failed")
    domain.release(transfer, written=False)
    domain.mark_rewritten([3, 3])
    assert domain.poisoned([3, 5]) == [5]


def test_no_blocks(domain):
    domain.write([1], Moves(1))
    assert domain.try_lease([], write=True)
    domain.end_lease([], write=True)
    domain.mark_rewritten([])
    assert domain.lone_holders([]) == domain.holders([]) == []


def test_what_could_not_be_written_down_whole_leaves_nothing(domain, monkeypatch):
    """It is in use all the same, and free when it is over."""

    class Full:
        def __setitem__(self, ids, value):
            if not isinstance(ids, slice):
                raise MemoryError

    alone = Moves(7)
    domain.read([2, 3], alone)
    with monkeypatch.context() as patch:
        patch.setattr(domain, "_reader", Full())
        with pytest.raises(MemoryError):
            domain.busy([2])
    domain.release(alone, written=False)
    assert domain.busy(range(16)) == []
