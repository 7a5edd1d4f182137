"""Calls on the CPU that write so much that they write past the caches of the processor: rows and blocks at addresses
that are no multiple of a cache line, every byte of both sides and of the memory around compared."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import GuardedCache, GuardedHost, cpu_machine, random_bits
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


def by_slot(bits: np.ndarray, layout: str) -> np.ndarray:
    """[slots, heads, bytes of a row], a copy."""
    blocks = bits.reshape(len(bits), *SHAPES[layout][:2], ROW_BYTES)
    blocks = blocks.swapaxes(1, 2) if layout == "HND" else blocks
    return blocks.reshape(-1, HEADS, ROW_BYTES).copy()


def by_block(rows: np.ndarray, layout: str) -> np.ndarray:
    blocks = rows.reshape(BLOCKS, BLOCK_SIZE, HEADS, ROW_BYTES)
    blocks = blocks.swapaxes(1, 2) if layout == "HND" else blocks
    return blocks.reshape(BLOCKS, BLOCK_BYTES)


def rows_tensor(rows: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(np.ascontiguousarray(rows).view(np.float16))


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


def slots_of(table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The slot of each token, -1 without one."""
    sequence = np.repeat(np.arange(5), np.diff(lengths))
    position = np.arange(TOKENS) - lengths[sequence]
    block = table[sequence, position // BLOCK_SIZE]
    return np.where(block < 0, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)


@layouts
def test_reshape_and_cache(layout):
    assert TOKENS * HEADS * ROW_BYTES >= LEAST_BYTES
    keys, values = cache(layout, 1), cache(layout, 2)
    slots = np.random.default_rng(4).permutation(BLOCKS * BLOCK_SIZE)[:TOKENS]
    slots[::101] = -1
    rows = [random_bits(TOKENS, HEADS * ROW_BYTES, seed).reshape(TOKENS, HEADS, ROW_BYTES) for seed in (5, 6)]
    key, value = (rows_tensor(each) for each in rows)
    ops.reshape_and_cache(key, value, keys.tensor, values.tensor, paddle.to_tensor(slots), layout=layout)
    for guarded, written in zip((keys, values), rows, strict=True):
        expected = by_slot(guarded.bits, layout)
        expected[slots[slots >= 0]] = written[slots >= 0]
        guarded.check(by_block(expected, layout))


@layouts
def test_gather_cache(layout):
    keys = cache(layout, 1)
    table, lengths = sequences()
    slots = slots_of(table, lengths)
    gathered = ops.gather_cache(
        keys.tensor, paddle.to_tensor(table), paddle.to_tensor(lengths), total_tokens=TOKENS, layout=layout
    )
    expected = by_slot(keys.bits, layout)[slots]
    expected[slots < 0] = 0
    got = np.ascontiguousarray(gathered.numpy()).view(np.uint8).reshape(TOKENS, HEADS, ROW_BYTES)
    np.testing.assert_array_equal(got, expected)
    keys.check(keys.bits)


@layouts
def test_scatter_cache(layout):
    keys = cache(layout, 1)
    table, lengths = sequences()
    slots = slots_of(table, lengths)
    rows = random_bits(TOKENS, HEADS * ROW_BYTES, 7).reshape(TOKENS, HEADS, ROW_BYTES)
    ops.scatter_cache(rows_tensor(rows), keys.tensor, paddle.to_tensor(table), paddle.to_tensor(lengths), layout=layout)
    expected = by_slot(keys.bits, layout)
    expected[slots[slots >= 0]] = rows[slots >= 0]
    keys.check(by_block(expected, layout))


def test_copy_blocks():
    keys, values = cache("HND", 1), cache("HND", 2)
    order = np.random.default_rng(8).permutation(BLOCKS)
    sources, targets = order[: BLOCKS // 2], order[BLOCKS // 2 : BLOCKS // 2 * 2]
    assert 2 * len(sources) * BLOCK_BYTES >= LEAST_BYTES
    ops.copy_blocks([keys.tensor], [values.tensor], np.stack([sources, targets], axis=1))
    for guarded in (keys, values):
        expected = guarded.bits.copy()
        expected[targets] = guarded.bits[sources]
        guarded.check(expected)


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
