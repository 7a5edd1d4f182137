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
    assert list({9, 16, 27, 40}) != [9, 16, 27, 40]
