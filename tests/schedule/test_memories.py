"""Memory of which several pools have a part."""

from __future__ import annotations

import gc
import itertools

import pytest

from paddle_kv.tracking.memories import Extent, attach, buffer_as_layer, interleaved

BASE = 1 << 61  # no allocation lies there


class Owner:
    pass


def test_an_extent_ends_with_its_last_block():
    """Which may be shorter than the way from one to the next."""
    for last_bytes in (1, 15, 16):
        assert Extent(BASE, BASE + 2 * 16 + last_bytes, 16).num_blocks == 3
    assert Extent(BASE, BASE + 16, 16).num_blocks == 1


def test_a_buffer_is_no_layer():
    assert [buffer_as_layer(buffer) for buffer in range(4)] == [-2, -3, -4, -5]  # -1 is all layers


def test_memory_that_begins_like_one_pool_and_reaches_into_another_is_refused():
    low, high, both = Owner(), Owner(), Owner()
    attach(low, [Extent(BASE, BASE + 160, 16, 0)])
    attach(high, [Extent(BASE + 160, BASE + 320, 16, 0)])
    with pytest.raises(ValueError, match=rf"overlaps that of another pool at {BASE + 160:#x}"):
        attach(both, [Extent(BASE, BASE + 320, 16, 0)])


def test_the_order_in_which_the_tensors_are_told_does_not_matter():
    one, other = Owner(), Owner()
    tensors = [Extent(BASE + 1600, BASE + 1760, 16, 0), Extent(BASE + 1760, BASE + 1952, 16, 1)]
    domain, _ = attach(one, tensors)
    assert attach(other, tensors[::-1])[0] is domain
    assert domain.busy([11]) == []  # of the longer one


def extent(start: int, size: int, stride: int, num_blocks: int = 10) -> Extent:
    return Extent(start, start + (num_blocks - 1) * stride + size, stride, start)


def test_blocks_between_each_other_are_one_extent():
    for size in (1, 8):
        assert interleaved([extent(8, size, 16), extent(0, size, 16)]) == [Extent(0, 9 * 16 + 8 + size, 16, -1)]


@pytest.mark.parametrize(
    "apart",
    [
        [extent(0, 8, 16), extent(8, 8, 32)],  # another stride
        [extent(0, 8, 16), extent(8, 12, 16)],  # reaches into the next block
        [extent(0, 8, 16, 1), extent(8, 8, 16, 1)],  # of one block nothing lies between
        [extent(0, 16, 16), extent(160, 16, 16)],
    ],
)
def test_others_stay_apart(apart):
    for given in itertools.permutations(apart):
        assert interleaved(list(given)) == apart


def test_memory_of_a_pool_that_is_gone_may_be_cut_otherwise():
    owner, other = Owner(), Owner()
    assert extent(BASE + 3200, 8, 16).num_blocks == extent(BASE + 3200, 16, 16).num_blocks == 10
    attach(owner, [extent(BASE + 3200, 16, 16)])
    with pytest.raises(ValueError, match="overlaps that of another pool"):
        attach(other, [extent(BASE + 3200, 32, 32)])
    del owner
    gc.collect()
    attach(other, [extent(BASE + 3200, 32, 32)])
