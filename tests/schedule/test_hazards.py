"""The tracker by itself: what depends on what, poison, leases, and which memory is one memory."""

from __future__ import annotations

import itertools

import pytest

from paddle_kv.errors import LeasedError, TransferError
from paddle_kv.tracking.domain import BlockDomain
from paddle_kv.tracking.memories import Extent, attach

NUMBERS = itertools.count(1)


class Moves:
    """A transfer as the tracker sees it."""

    spoiled = False

    def __init__(self) -> None:
        self.number = next(NUMBERS)

    def look(self) -> None: ...

    def abandon(self) -> None: ...

    def is_ordered_before(self, stream, layer) -> bool:
        return False


@pytest.fixture
def domain():
    return BlockDomain(num_blocks=16)


def test_a_read_depends_on_the_last_writer(domain):
    first, second, reader = Moves(), Moves(), Moves()
    assert domain.write([1, 2], first) == set()
    assert domain.write([2, 3], second) == {first}
    assert domain.read([1, 2, 3], reader) == {first, second}


def test_a_write_depends_on_all_readers_since_the_last_write(domain):
    writer, one, two, late = Moves(), Moves(), Moves(), Moves()
    domain.write([1], writer)
    domain.read([1], one)
    domain.read([1], two)
    assert domain.write([1], late) == {writer, one, two}
    assert domain.read([1], Moves()) == {late}


def test_reads_do_not_depend_on_each_other(domain):
    assert domain.read([1], Moves()) == set()
    assert domain.read([1], Moves()) == set()


def test_other_blocks_are_independent(domain):
    domain.write([1], Moves())
    assert domain.write([2], Moves()) == set()
    assert domain.read([3], Moves()) == set()


def test_release_forgets(domain):
    writer, reader = Moves(), Moves()
    domain.write([1, 2], writer)
    domain.read([2, 2], reader)
    assert domain.is_busy(1)
    domain.release(writer, written=True)
    assert not domain.is_busy(1)
    assert domain.is_busy(2)
    domain.release(reader, written=False)
    assert not domain.is_busy(2)


def test_release_leaves_a_later_writer(domain):
    first, second, reader = Moves(), Moves(), Moves()
    domain.write([1], first)
    domain.write([1], second)
    domain.release(first, written=True)
    assert domain.read([1], reader) == {second}


def test_poison_is_raised_until_rewritten(domain):
    failed, again = Moves(), Moves()
    domain.write([1, 2], failed)
    domain.poison([1, 2], failed, "broken")
    domain.release(failed, written=False)
    assert domain.poisoned([0, 1, 2]) == [1, 2]
    with pytest.raises(TransferError, match=r"block 1 of the pool holds no usable data .broken.") as error:
        domain.check([0, 1, 2], "pool", writing=False)
    assert error.value.block_ids == [1, 2]
    domain.check([1, 2], "pool", writing=True)
    domain.write([1], again)
    domain.check([1], "pool", writing=False)  # reads what the second one is going to write
    domain.release(again, written=True)
    domain.check([1], "pool", writing=False)
    domain.mark_rewritten([2])
    domain.check([1, 2], "pool", writing=False)


def test_a_failed_writer_that_still_runs_is_poison_already(domain):
    failed = Moves()
    domain.write([1], failed)
    domain.poison([1], failed, "broken")
    failed.spoiled = True
    with pytest.raises(TransferError, match=r"block 1 of the pool holds no usable data"):
        domain.check([1], "pool", writing=False)


def test_a_rewrite_that_fails_too_leaves_the_poison(domain):
    failed, again = Moves(), Moves()
    domain.write([1], failed)
    domain.poison([1], failed, "broken")
    domain.release(failed, written=False)
    domain.write([1], again)
    domain.release(again, written=False)
    assert domain.poisoned([1]) == [1]


def test_a_failure_does_not_poison_what_a_later_one_rewrites(domain):
    failed, later = Moves(), Moves()
    domain.write([1, 2], failed)
    domain.write([2], later)
    domain.poison([1, 2], failed, "broken")
    assert domain.poisoned([1, 2]) == [1]


def test_the_lease_that_ends_is_that_of_the_same_blocks():
    domain = BlockDomain(num_blocks=16)
    assert domain.try_lease([1, 2], write=False)
    assert domain.try_lease([3], write=False)
    domain.end_lease([3], write=False)
    assert domain.busy(range(4)) == [1, 2]
    domain.end_lease([2, 1], write=False)
    assert domain.busy(range(4)) == []


def test_leases_forbid_conflicting_transfers(domain):
    assert domain.try_lease([1], write=False)
    assert domain.try_lease([2], write=True)
    domain.check([1], "pool", writing=False)
    for ids, writing in (([0, 1], True), ([2], False), ([2], True)):
        with pytest.raises(LeasedError, match=rf"block {ids[-1]} of the pool is leased"):
            domain.check(ids, "pool", writing=writing)
    domain.end_lease([1], write=False)
    domain.end_lease([2], write=True)
    domain.check([1, 2], "pool", writing=True)
    assert not domain.is_busy(1)


def test_leases_and_transfers(domain):
    reader, writer = Moves(), Moves()
    domain.read([1], reader)
    domain.write([2], writer)
    assert domain.try_lease([1], write=False)
    assert not domain.try_lease([1], write=True)
    assert not domain.try_lease([3, 2], write=False)
    assert not domain.is_busy(3), "a refused lease holds blocks"


# ---- which memory is one memory ----
class Owner:
    pass


def extents(start, layers=2, blocks=10, stride=16, gap=1000, first_layer=0):
    return [Extent(start + i * gap, start + i * gap + blocks * stride, stride, first_layer + i) for i in range(layers)]


BASE = 1 << 60  # no allocation lies there


def test_same_memory_same_domain_whatever_the_number_of_blocks():
    one, two = Owner(), Owner()
    domain, _ = attach(one, extents(BASE))
    assert attach(two, extents(BASE, blocks=7))[0] is domain


@pytest.mark.parametrize("starts", [(BASE, BASE + 160), (BASE + 160, BASE)])
def test_other_memory_other_domain(starts):
    """One begins where the other one ends."""
    one, two = Owner(), Owner()
    first, second = map(extents, starts)
    assert attach(one, first)[0] is not attach(two, second)[0]


@pytest.mark.parametrize(
    "other",
    [
        extents(BASE + 16),
        extents(BASE, stride=8),
        extents(BASE, layers=1),
        extents(BASE, layers=3),
        extents(BASE + 1000, first_layer=0),
        extents(BASE, first_layer=1),
    ],
)
def test_overlapping_memory_of_another_shape_is_refused(other):
    one, two = Owner(), Owner()
    attach(one, extents(BASE))
    with pytest.raises(ValueError, match=r"overlaps that of another pool"):
        attach(two, other)
    attach(two, extents(BASE))


def test_memory_that_overlaps_itself_is_refused():
    with pytest.raises(ValueError, match=r"overlap; each name and layer needs memory of its own"):
        attach(Owner(), extents(BASE, gap=100))


def test_the_tie_ends_with_the_last_owner():
    one, two = Owner(), Owner()
    domain, end = attach(one, extents(BASE))
    attach(two, extents(BASE))
    end()
    end()
    assert attach(Owner(), extents(BASE))[0] is domain
    del two
    assert attach(one, extents(BASE))[0] is not domain
