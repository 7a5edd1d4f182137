"""Calls on the CPU that write so much that they write past the caches of the processor: rows and blocks at addresses
that are no multiple of a cache line, every byte of both sides and of the memory around compared."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import GuardedCache, GuardedHost, cpu_machine, random_bits
from tests.reference import cache_convert as reference
from tests.reference.cache_convert import from_layout, to_layout
from tests.reference.cache_insert import inserted
from tests.reference.copy import copied
from tests.reference.swap import TO_DEVICE, TO_HOST, swapped

HEADS, HEAD_SIZE, BLOCK_SIZE = 3, 92, 5  # rows of 184 bytes
ROW_BYTES = 2 * HEAD_SIZE
TOKENS = 17_003
BLOCKS = 3_500
SHAPES = {"HND": (HEADS, BLOCK_SIZE, HEAD_SIZE), "NHD": (BLOCK_SIZE, HEADS, HEAD_SIZE)}
BLOCK_BYTES = HEADS * BLOCK_SIZE * ROW_BYTES
LEAST_BYTES = 8 << 20

layouts = pytest.mark.parametrize("layout", ["HND", "NHD"])


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    before = paddle.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(before)


def cache(layout: str, seed: int) -> GuardedCache:
    return GuardedCache(cpu_machine(), random_bits(BLOCKS, BLOCK_BYTES, seed), SHAPES[layout], "float16")


def hnd(bits: np.ndarray, layout: str) -> np.ndarray:
    """The bytes of a cache as elements, in the layout of the references."""
    return from_layout(bits.view(np.uint16).reshape(len(bits), *SHAPES[layout]), layout)


def check(guarded: GuardedCache, expected: np.ndarray, layout: str) -> None:
    guarded.check(to_layout(expected, layout, "key").view(np.uint8).reshape(BLOCKS, BLOCK_BYTES))


def random_rows(seed: int) -> np.ndarray:
    return random_bits(TOKENS, HEADS * ROW_BYTES, seed).view(np.uint16).reshape(TOKENS, HEADS, HEAD_SIZE)


def rows_tensor(rows: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(rows.view(np.float16))


def sequences() -> tuple[np.ndarray, np.ndarray]:
    """(table, cumulative lengths): five sequences in shuffled blocks, one block missing."""
    lengths = np.array([0, 4_001, 4_001, 9_013, 9_014, TOKENS])
    counts = -(-np.diff(lengths) // BLOCK_SIZE)
    table = np.full((5, int(counts.max())), -1, np.int64)
    ids = iter(np.random.default_rng(3).permutation(BLOCKS).tolist())
    for row, count in zip(table, counts, strict=True):
        row[:count] = [next(ids) for _ in range(count)]
    table[2, 7] = -1
    return table, lengths


@layouts
def test_reshape_and_cache(layout):
    assert TOKENS * HEADS * ROW_BYTES >= LEAST_BYTES
    keys, values = cache(layout, 1), cache(layout, 2)
    slots = np.random.default_rng(4).permutation(BLOCKS * BLOCK_SIZE)[:TOKENS]
    slots[::101] = -1
    rows = [random_rows(seed) for seed in (5, 6)]
    key, value = (rows_tensor(each) for each in rows)
    ops.reshape_and_cache(key, value, keys.tensor, values.tensor, paddle.to_tensor(slots), layout=layout)
    for guarded, written in zip((keys, values), rows, strict=True):
        check(guarded, inserted(written, hnd(guarded.bits, layout), slots), layout)


@layouts
def test_gather_cache(layout):
    keys = cache(layout, 1)
    table, lengths = sequences()
    gathered = ops.gather_cache(
        keys.tensor, paddle.to_tensor(table), paddle.to_tensor(lengths), total_tokens=TOKENS, layout=layout
    )
    rows = gathered.numpy().view(np.uint16)
    np.testing.assert_array_equal(rows, reference.gathered(hnd(keys.bits, layout), table, lengths, TOKENS))
    keys.check(keys.bits)


@layouts
def test_scatter_cache(layout):
    keys = cache(layout, 1)
    table, lengths = sequences()
    rows = random_rows(7)
    ops.scatter_cache(rows_tensor(rows), keys.tensor, paddle.to_tensor(table), paddle.to_tensor(lengths), layout=layout)
    check(keys, reference.scattered(rows, hnd(keys.bits, layout), table, lengths), layout)


def test_copy_blocks():
    keys, values = cache("HND", 1), cache("HND", 2)
    order = np.random.default_rng(8).permutation(BLOCKS)
    sources, targets = order[: BLOCKS // 2], order[BLOCKS // 2 : BLOCKS // 2 * 2]
    assert 2 * len(sources) * BLOCK_BYTES >= LEAST_BYTES
    ops.copy_blocks([keys.tensor], [values.tensor], np.stack([sources, targets], axis=1))
    for guarded in (keys, values):
        guarded.check(copied(guarded.bits, zip(sources, targets, strict=True)))


@pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])
@pytest.mark.parametrize("misalignment", [0, 1, 63])
def test_swap_cache_per_layer(mode, misalignment):
    keys = cache("NHD", 1)
    host = GuardedHost(cpu_machine(), random_bits(BLOCKS + 7, BLOCK_BYTES, 9), misalignment)
    random = np.random.default_rng(10)
    device_ids = random.permutation(BLOCKS)[:3_100].tolist()
    host_ids = random.permutation(BLOCKS + 7)[:3_100].tolist()
    assert len(device_ids) * BLOCK_BYTES >= LEAST_BYTES
    ops.swap_cache_per_layer(keys.tensor, host.address, BLOCKS + 7, device_ids, host_ids, 0, mode)
    expected_device, expected_host = swapped(keys.bits, host.bits, device_ids, host_ids, mode)
    keys.check(expected_device)
    host.check(expected_host)
