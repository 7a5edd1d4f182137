"""The bytes of a block depend on all that they must depend on."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_kv.testing.soak.pattern import expected_bytes


@pytest.mark.parametrize("block_bytes", [1, 7, 8, 9, 64, 1000])
def test_no_two_blocks_are_alike(block_bytes):
    contents = np.array([1, 2, 3, 1 << 40])
    rows = [expected_bytes(contents, row, block_bytes) for row in range(3)]
    assert all(array.shape == (4, block_bytes) and array.dtype == np.uint8 for array in rows)
    blocks = np.concatenate(rows)
    if block_bytes >= 8:
        assert len(np.unique(blocks, axis=0)) == 12
    np.testing.assert_array_equal(rows[1], expected_bytes(contents, 1, 1000)[:, :block_bytes])


def test_words_of_a_block_differ():
    words = expected_bytes(np.arange(1, 50), 5, 8000).view(np.uint64)
    assert len(np.unique(words)) == words.size
