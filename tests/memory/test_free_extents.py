"""The allocator of block ids against a set of free ones that is searched block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from paddle_kv.memory.free_extents import FreeExtents


def runs_of(ids):
    """Lengths of the runs of neighbours, in ascending order of the ids."""
    lengths = []
    last = None
    for block_id in sorted(ids):
        if last is not None and block_id == last + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
        last = block_id
    return lengths


def fewest_pieces(count, extents):
    """Pieces that ``count`` blocks need at least."""
    pieces, held = 0, 0
    for size in sorted(extents, reverse=True):
        if held >= count:
            break
        held += size
        pieces += 1
    return pieces


class Machine(RuleBasedStateMachine):
    owned = Bundle("owned")

    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks):
        self.num_blocks = num_blocks
        self.real = FreeExtents(num_blocks)
        self.free_ids = set(range(num_blocks))

    @rule(target=owned, data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, len(self.free_ids)))
        extents = runs_of(self.free_ids)
        taken = self.real.allocate(count)
        assert len(taken) == count
        assert taken == sorted(set(taken))
        assert self.free_ids.issuperset(taken), "a block that is in use was given out"
        self.free_ids.difference_update(taken)
        assert len(runs_of(taken)) == fewest_pieces(count, extents)
        holding = [size for size in extents if size >= count]
        if count and holding:  # the smallest that fits: of the others not one has changed
            left = runs_of(self.free_ids)
            expected = extents.copy()
            expected.remove(min(holding))
            assert sorted(left) == sorted([*expected, *([min(holding) - count] if min(holding) > count else [])])
        return taken

    @rule(ids=consumes(owned), data=st.data())
    def free(self, ids, data):
        given_back = data.draw(st.permutations(ids))
        self.real.free(given_back)
        self.free_ids.update(ids)

    @rule(target=owned, ids=consumes(owned), data=st.data())
    def free_some(self, ids, data):
        kept = set(data.draw(st.lists(st.sampled_from(ids), unique=True))) if ids else set()
        given_back = [block_id for block_id in ids if block_id not in kept]
        self.real.free(given_back)
        self.free_ids.update(given_back)
        return sorted(kept)

    @invariant()
    def counts(self):
        assert len(self.real) == len(self.free_ids)


TestMachine = Machine.TestCase


def test_the_smallest_extent_that_fits_is_taken():
    free = FreeExtents(20)
    free.allocate(20)
    free.free([2, 3, 4, 8, 9, 14, 15, 16, 17])
    assert free.allocate(2) == [8, 9]
    assert free.allocate(4) == [14, 15, 16, 17]
    assert free.allocate(2) == [2, 3]
    assert free.allocate(1) == [4]


def test_no_extent_fits_the_largest_first():
    free = FreeExtents(20)
    free.allocate(20)
    free.free([1, 3, 4, 5, 9, 10, 12])
    assert free.allocate(4) == [1, 3, 4, 5]
    assert free.allocate(3) == [9, 10, 12]


def test_neighbours_merge_on_both_sides():
    free = FreeExtents(9)
    free.allocate(9)
    free.free([0, 1, 2, 6, 7, 8])
    free.free([5, 3, 4])
    assert free.allocate(9) == list(range(9))


def test_nothing_is_left_of_an_extent_that_fits():
    free = FreeExtents(9)
    free.allocate(4)
    free.allocate(5)
    assert (free._by_size, free._end_of, free._start_of) == ([], {}, {})


@pytest.mark.parametrize("halves", [([0, 1], [2, 3]), ([2, 3], [0, 1])])
def test_halves_merge_with_what_lies_before_and_behind(halves):
    free = FreeExtents(9)
    free.allocate(9)
    for half in ([6, 7, 8], *halves):
        free.free(half)
    assert free.allocate(4) == [0, 1, 2, 3], "two pieces where one would do"


@given(st.permutations(range(12)), st.integers(1, 12))
def test_whatever_the_order_of_freeing_all_is_one_extent_again(order, at_once):
    free = FreeExtents(12)
    free.allocate(12)
    for first in range(0, 12, at_once):
        free.free(order[first : first + at_once])
    assert free._by_size == [(12, 0)]


@pytest.mark.parametrize("count", [0, 3])
def test_nothing_is_no_piece(count):
    free = FreeExtents(3)
    free.allocate(count)
    assert free.allocate(0) == []
    free.free([])
    assert len(free) == 3 - count
