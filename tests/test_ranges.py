"""Ids in ranges and lists of any length: what is wrong with them is said before anything as long is made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, ops
from paddle_kv.checks import range_array
from paddle_kv.offload import BlockHasher, Directory, Hello, KVOffloadManager
from paddle_kv.ops import _arguments as arguments
from paddle_kv.ranges import check_ends, count_of
from paddle_kv.tiers import Job

NUM = 6  # blocks
LONG = range(1 << 20, 1 << 21)  # long enough to be seen, where a list is made of it first
ENDLESS = range(1 << 62, 1 << 65)
MOST_BYTES = 1 << 20
LARGEST = 2**63 - 1

ENDS = st.integers(-20, 20) | st.integers(LARGEST - 9, LARGEST + 9) | st.integers(-LARGEST - 9, -LARGEST + 9)


@given(ENDS, st.integers(-12, 12), st.integers(-9, 9).filter(bool) | st.integers(2**62, 2**65), st.integers(-3, 9))
@example(5, 9, -2, 9)
@example(6, 9, -2, 9)
@example(5, 9, 2, 9)
@example(4, 9, 2, 9)
def test_the_first_one_outside_is_named(start: int, size: int, step: int, high: int) -> None:
    ids = range(start, start + size * step, step)
    assert count_of(ids) == len(ids) == count_of(list(ids))
    wrong = [(position, value) for position, value in enumerate(ids) if not -2 <= value < high]
    if not wrong:
        check_ends(ids, "ids", -2, high)
        return
    with pytest.raises(IndexError) as caught:
        check_ends(ids, "ids", -2, high)
    assert str(caught.value) == f"ids[{wrong[0][0]}] = {wrong[0][1]} must be in [-2, {high})"


@given(ENDS, st.integers(-12, 12), st.integers(-9, 9).filter(bool) | st.integers(2**62, 2**65))
def test_a_range_in_64_bits_is_an_array(start: int, size: int, step: int) -> None:
    ids = range(start, start + size * step, step)
    if all(-LARGEST - 1 <= value <= LARGEST for value in ids):
        found = range_array(ids, "ids")
        assert found.dtype == np.int64 and found.tolist() == list(ids)
    else:
        with pytest.raises(IndexError, match=r"^ids\[\d+\] = "):
            range_array(ids, "ids")


def test_more_than_can_be_counted() -> None:
    assert (count_of(ENDLESS), count_of(range(0))) == (2**65 - 2**62, 0)
    with pytest.raises(IndexError, match=r"^ids\[0\] = an integer of 10001 bits must be in \[0, 6\)"):
        check_ends(range(2**10000, 2**10001), "ids", 0, NUM)
    with pytest.raises(ValueError, match=rf"^ids has {2**33} integers; at most {2**31} are expected"):
        range_array(range(2**33), "ids")


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
    cache, pool = DeviceCache(spec, NUM, "cpu"), HostPool(spec, NUM, layout="block_first")
    scheduler = LayerwiseScheduler(cache, pool)
    manager = KVOffloadManager(scheduler)
    directory = Directory(NUM)
    directory.join(Hello(0, 1, NUM))
    tensor = paddle.to_tensor(np.zeros((NUM, 1, 4, 4), "float32"), place=paddle.CPUPlace())
    yield SimpleNamespace(
        cache=cache, pool=pool, scheduler=scheduler, manager=manager, directory=directory, tensor=tensor
    )
    manager.close()
    scheduler.close()


KEYS = [b"a", b"b"]
DEVICE, HOST = r"^device_block_ids\[0\] = \d+ must be in \[0, 6\)", r"^host_block_ids\[0\] = \d+ must be in \[0, 6\)"
IDS, MAPPED = r"^block_ids\[0\] = \d+ must be in \[0, 6\)", r"^block_mapping\[0\]\[0\] = \d+ must be in \[0, 6\)"
Call = Callable[[Any, range], object]
CALLS: list[tuple[str, Call]] = [
    (DEVICE, lambda to, ids: to.manager.request([1] * 8, ids, chunk_tokens=8)),
    (DEVICE, lambda to, ids: to.manager.onload(KEYS, ids)),
    (DEVICE, lambda to, ids: to.manager.save(KEYS, ids)),
    (DEVICE, lambda to, ids: to.scheduler.onload([0, 1], ids)),
    (HOST, lambda to, ids: to.scheduler.onload(ids, [0, 1])),
    (DEVICE, lambda to, ids: to.scheduler.offload(ids, [0, 1])),
    (r"^layers\[0\] = \d+ must be in \[0, 2\)", lambda to, ids: to.scheduler.onload([0], [1], layers=ids)),
    (IDS, lambda to, ids: to.cache.mark_rewritten(ids)),
    (IDS, lambda to, ids: to.pool.mark_rewritten(ids)),
    (IDS, lambda to, ids: to.pool.free(ids)),
    (IDS, lambda to, ids: to.pool.lease(ids, write=True).__enter__()),
    (r"^keys has 2 entries, block_ids has \d+;", lambda to, ids: Job(KEYS, ids)),
    (r"^hashes has 2 blocks, device_block_ids has \d+;", lambda to, ids: to.directory.plan_load(KEYS, ids)),
    (r"^hashes has 2 blocks, device_block_ids has \d+;", lambda to, ids: to.directory.plan_save(KEYS, ids)),
    (MAPPED, lambda to, ids: ops.copy_blocks(to.tensor, None, {0: ids})),
    (MAPPED, lambda to, ids: ops.swap_blocks(to.tensor, None, {0: ids})),
    (MAPPED, lambda to, ids: ops.transfer_blocks(to.tensor, to.tensor, {0: ids})),
    (IDS, lambda to, ids: ops.universal_from_cache([to.tensor], [to.tensor], ids)),
    (
        r"^swap_block_ids_gpu\[0\] = \d+ must be in \[0, 6\)",
        lambda to, ids: ops.swap_cache_per_layer(to.tensor, 4096, NUM, ids, [0], 0, 0),
    ),
    (
        r"^swap_block_ids_cpu\[0\] = \d+ must be in \[0, 6\)",
        lambda to, ids: ops.swap_cache_all_layers([to.tensor], [4096], NUM, [0], ids, 0, 0),
    ),
    (
        r"^gpu_block_ids\[0\] = \d+ must be in \[0, 6\)",
        lambda to, ids: ops.swap_cache_layout([to.tensor], 4096, [NUM, 1, 4, 4], ids, [0], 0, 0),
    ),
]


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("text", "call"), CALLS)
def test_ids_of_no_block_are_refused_before_they_are_listed(made: Any, text: str, call: Call) -> None:
    def refused() -> None:
        with pytest.raises((IndexError, ValueError), match=text):
            call(made, LONG)

    assert peak_bytes(refused) < MOST_BYTES
    with pytest.raises((IndexError, ValueError), match=text):  # of which no list could be made
        call(made, ENDLESS)


@pytest.mark.parametrize("form", [list, tuple, np.array])
@pytest.mark.parametrize(
    "call",
    [
        lambda to, ids: to.manager.request([1] * 8, ids),
        lambda to, ids: to.pool.free(ids),
        lambda to, ids: to.pool.lease(ids, write=False).__enter__(),
    ],
)
def test_of_more_ids_than_blocks_some_are_looked_at(made: Any, form: Callable[[Any], Any], call: Call) -> None:
    ids = form([*range(NUM), *[0] * MOST_BYTES])

    def refused() -> None:
        with pytest.raises(ValueError, match=r"block_ids names block 0 more than once; each may occur only once"):
            call(made, ids)

    assert peak_bytes(refused) < MOST_BYTES


@given(st.lists(st.integers(-1, 7), max_size=9), st.booleans())
def test_a_list_is_refused_whatever_is_looked_at(ids: list[int], distinct: bool) -> None:
    """And one with one wrong id, however long it is, for what is wrong with it."""
    good = all(0 <= one < NUM for one in ids) and (not distinct or len(set(ids)) == len(ids))
    try:
        assert arguments.checked_block_ids(ids, "ids", NUM, distinct=distinct) == ids
        assert good
    except IndexError as error:
        position = next(i for i, one in enumerate(ids) if not 0 <= one < NUM)
        assert str(error) == f"ids[{position}] = {ids[position]} must be in [0, 6)"
    except ValueError:
        assert distinct and len(set(ids)) < len(ids)


def test_tokens_that_need_more_blocks_than_there_are_given_are_not_hashed(made: Any) -> None:
    for tokens in (LONG, range(1 << 70)):
        with pytest.raises(ValueError, match=rf"^device_block_ids has 6 blocks; {count_of(tokens)} tokens need"):
            made.manager.request(tokens, range(NUM))


def test_tokens_beyond_64_bits_are_named() -> None:
    hasher = BlockHasher(4)
    with pytest.raises(IndexError, match=rf"^token_ids\[{2**62}\] = {2**63} must be in \[-{2**63}, {2**63}\)"):
        hasher(ENDLESS)
    assert hasher(range(9)) == hasher(list(range(9)))
    assert hasher(range(9, 0, -1)) == hasher(list(range(9, 0, -1)))


@pytest.mark.parametrize(
    "ids",
    [range(0, 2**60 + 1, 2**50), range(7, -(2**62), -(3**30)), range(-(2**63), 2**63 - 1, 2**62 + 1), range(3, 3)],
)
def test_each_of_a_wide_range_is_there(ids: range) -> None:
    """NumPy counts what lies in a range in floating point."""
    assert range_array(ids, "ids").tolist() == list(ids)
