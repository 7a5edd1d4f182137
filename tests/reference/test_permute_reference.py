"""The references of the permute and memcpy families against results worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import memcpy, permute

# Two layers, keys and values, two tokens, three heads, width 1. An element says where it belongs.
NHD = [
    np.array([[[111], [112], [113]], [[121], [122], [123]]]) + 1000 * (layer - 1) + 1000 * 10 * outer
    for layer in (1, 2)
    for outer in (0, 1)
]


def test_universal_from_nhd_chunks() -> None:
    universal = permute.universal_from_block(NHD, 2, 2, "NHD")
    assert universal.shape == (1, 3, 2, 2, 2, 1)
    assert universal.ravel().tolist() == [
        *(111, 121, 10111, 10121, 1111, 1121, 11111, 11121),  # head 1: layer 1 keys, values; layer 2 keys, values
        *(112, 122, 10112, 10122, 1112, 1122, 11112, 11122),
        *(113, 123, 10113, 10123, 1113, 1123, 11113, 11123),
    ]


def test_universal_from_hnd_chunks() -> None:
    chunk = np.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]])  # 2 heads, 3 tokens, width 2
    universal = permute.universal_from_block([chunk, chunk + 20], 1, 1, "HND")
    assert universal.shape == (2, 2, 1, 1, 3, 2)
    assert universal.ravel().tolist() == [*range(1, 13), *range(21, 33)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_block_from_universal(layout: str) -> None:
    universal = np.array([[[[[[1], [2], [3]]]], [[[[4], [5], [6]]]]]])  # 1 block, 2 heads, 1 layer, 1 outer, 3 tokens
    (chunk,) = permute.block_from_universal(universal, layout)
    expected = {"NHD": [[[1], [4]], [[2], [5]], [[3], [6]]], "HND": [[[1], [2], [3]], [[4], [5], [6]]]}
    assert chunk.tolist() == expected[layout]


def test_operational_from_block() -> None:
    chunks = [np.array([[[i, i + 1]], [[i + 2, i + 3]]]) for i in (0, 10, 20, 30)]
    operational = permute.operational_from_block(chunks, 1, 2)
    assert operational.tolist() == [[[[0, 1, 2, 3], [10, 11, 12, 13]]], [[[20, 21, 22, 23], [30, 31, 32, 33]]]]


def test_stack_of_cache() -> None:
    keys, values = [np.array([[1], [2], [3]]), np.array([[4], [5], [6]])], [np.array([[7], [8], [9]])] * 2
    assert [c.tolist() for c in permute.stack_of_cache(keys, values, [2, 0])] == [
        *([3], [9], [6], [9]),
        *([1], [7], [4], [7]),
    ]
    assert [c.tolist() for c in permute.stack_of_cache(keys, None, [1])] == [[2], [5]]


def test_reshard_universal() -> None:
    parts = [np.array([[[0], [1]], [[10], [11]]]), np.array([[[2], [3]], [[12], [13]]])]  # 2 blocks, 2 heads each
    assert [p[:, :, 0].tolist() for p in permute.reshard_universal(parts, 1)] == [[[0, 1, 2, 3], [10, 11, 12, 13]]]
    assert [p[:, :, 0].tolist() for p in permute.reshard_universal(parts, 4)] == [[[i], [10 + i]] for i in range(4)]


def test_copied() -> None:
    memory = np.arange(10)
    assert memcpy.copied(memory, [0, 7], [4, 0], [2, 3]).tolist() == [7, 8, 9, 3, 0, 1, 6, 7, 8, 9]
    assert memcpy.copied(memory, [1], [8], 1).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 1, 9]
    assert memory.tolist() == list(range(10))
