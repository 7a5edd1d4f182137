"""What a domain keeps of leases, readers and poison, edge by edge."""

from __future__ import annotations

import pytest

from paddle_kv import LeasedError
from paddle_kv.tracking.domain import BlockDomain


@pytest.fixture
def domain() -> BlockDomain:
    return BlockDomain()


def test_a_lease_for_reading_that_ends_takes_nothing_from_a_later_one_for_writing(domain):
    assert domain.try_lease([3], write=False)
    domain.end_lease([3], write=False)
    assert domain.try_lease([3], write=True)
    with pytest.raises(LeasedError, match="block 3 of the host pool is leased") as caught:
        domain.check([1, 3], "host pool", writing=False)
    assert caught.value.block_ids == [3]
    domain.end_lease([3], write=True)
    domain.check([1, 3], "host pool", writing=True)
