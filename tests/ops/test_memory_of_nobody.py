"""Addresses that are not this process's to read or write: without a check the process ends there."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from paddle_kv import ops

PAGE = mmap.PAGESIZE
PAGES = 6
NOWHERE = 0x1000
TO_HOST, TO_DEVICE = 0, 1
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Pages:
    """Six pages of this process, each of which can be taken away."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.address = libc.mmap(None, PAGES * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert self.address != ctypes.c_void_p(-1).value
        self.write(np.arange(PAGES * PAGE, dtype=np.uint32).view(np.uint8)[: PAGES * PAGE])

    def write(self, content: np.ndarray) -> None:
        ctypes.memmove(self.address, content.tobytes(), content.nbytes)

    def protect(self, page: int, access: int) -> None:
        assert libc.mprotect(self.address + page * PAGE, PAGE, access) == 0

    def unmap(self, page: int) -> None:
        assert libc.munmap(self.address + page * PAGE, PAGE) == 0

    def make(self, trouble: str, page: int) -> None:
        if trouble == "hole":
            self.unmap(page)
        else:
            self.protect(page, {"guard": 0, "read only": mmap.PROT_READ}[trouble])

    def bytes_of(self, page: int) -> bytes:
        return ctypes.string_at(self.address + page * PAGE, PAGE)


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    libc.munmap(made.address, PAGES * PAGE)


def cache_of(pages: int) -> paddle.Tensor:
    return paddle.zeros([pages, 1, 1, PAGE], "uint8")


def swap(op: str, cache: paddle.Tensor, address: int, blocks: int, ids: list[int], mode: int) -> None:
    if op == "swap_cache_per_layer":
        ops.swap_cache_per_layer(cache, address, blocks, ids, ids, 0, mode)
    elif op == "swap_cache_layout":
        ops.swap_cache_layout([cache], address, [blocks, 1, 1, PAGE], ids, ids, 0, mode)
    else:
        ops.swap_cache_all_layers([cache], [address], blocks, ids, ids, 0, mode)


# The first, the last and one in between; a block that is not swapped is the pool's all the same.
@pytest.mark.parametrize("page", [0, 2, PAGES - 1])
@pytest.mark.parametrize(
    ("trouble", "mode"),
    [("hole", TO_HOST), ("hole", TO_DEVICE), ("guard", TO_HOST), ("guard", TO_DEVICE), ("read only", TO_HOST)],
)
@pytest.mark.parametrize("op", ["swap_cache_per_layer", "swap_cache_all_layers", "swap_cache_layout"])
def test_swaps(pages: Pages, op: str, trouble: str, mode: int, page: int) -> None:
    cache, ids = cache_of(PAGES), list(range(PAGES))
    swap(op, cache, pages.address, PAGES, ids, TO_DEVICE)  # all is well, and known to be
    expected = cache.numpy()
    swap(op, cache, pages.address, PAGES, ids, TO_HOST)
    cache.zero_()
    kept = {other: pages.bytes_of(other) for other in ids if other != page}
    pages.make(trouble, page)
    with pytest.raises(ValueError, match=f"may {'write' if mode == TO_HOST else 'read'}"):
        swap(op, cache, pages.address, PAGES, ids, mode)
    assert not cache.numpy().any()
    for other, content in kept.items():
        assert pages.bytes_of(other) == content
    if trouble == "read only":
        swap(op, cache, pages.address, PAGES, ids, TO_DEVICE)  # to read it is all right
        np.testing.assert_array_equal(cache.numpy(), expected)


def test_memory_that_has_come_back_is_used_again(pages: Pages) -> None:
    cache, ids = cache_of(PAGES), list(range(PAGES))
    pages.protect(2, mmap.PROT_READ)
    with pytest.raises(ValueError, match="may write"):
        swap("swap_cache_per_layer", cache, pages.address, PAGES, ids, TO_HOST)
    pages.protect(2, mmap.PROT_READ | mmap.PROT_WRITE)
    swap("swap_cache_per_layer", cache, pages.address, PAGES, ids, TO_HOST)
    assert not any(pages.bytes_of(2))


@pytest.mark.parametrize("op", ["vectorized_copy", "memcpy_batch"])
def test_lists_of_addresses(pages: Pages, op: str) -> None:
    copy = getattr(ops, op)
    here = np.full(3 * PAGE, 7, np.uint8)
    start = here.ctypes.data
    for troubled in (NOWHERE, 2**46):
        with pytest.raises(ValueError, match=rf"source_pointers\[1\] = {troubled}: the 64 bytes .* may read"):
            copy([start, troubled], [pages.address, pages.address + PAGE], 64)
        with pytest.raises(ValueError, match=rf"target_pointers\[1\] = {troubled}: the 64 bytes .* may write"):
            copy([start, start + PAGE], [pages.address, troubled], 64)
    pages.protect(1, mmap.PROT_READ)
    pages.unmap(4)
    before = pages.bytes_of(0)
    with pytest.raises(ValueError, match=r"target_pointers\[1\].* may write"):
        copy([start, start + 64], [pages.address, pages.address + 2 * PAGE - 64], 64)
    with pytest.raises(ValueError, match=r"source_pointers\[0\].* may read"):
        copy([pages.address + 3 * PAGE + 1], [start], PAGE)
    with pytest.raises(ValueError, match=r"target_pointers\[0\].* may write"):
        copy([start], [pages.address + 3 * PAGE], 2 * PAGE)
    assert pages.bytes_of(0) == before
    assert (here == 7).all()
    copy([pages.address + PAGE, 0], [start, NOWHERE], [PAGE, 0])  # read only, and nothing at all
    assert here[:PAGE].tobytes() == pages.bytes_of(1)


def test_chunks_at_addresses(pages: Pages) -> None:
    blocks = paddle.zeros([2, 1, 1, 1, PAGE // 2, 2], "uint8")
    good = [pages.address, pages.address + PAGE]
    for chunks in ([good[0], NOWHERE], [NOWHERE, good[0]]):
        where = rf"chunks\[{chunks.index(NOWHERE)}\] = {NOWHERE}: the {PAGE} bytes"
        with pytest.raises(ValueError, match=f"{where}.* may read"):
            ops.universal_from_block(chunks, num_layers=1, num_outer=1, out=blocks)
        with pytest.raises(ValueError, match=f"{where}.* may write"):
            ops.block_from_universal(blocks, chunks)
        operational = paddle.zeros([2, 1, 1, PAGE], "uint8")
        with pytest.raises(ValueError, match=f"{where}.* may"):
            ops.operational_from_block(chunks, num_layers=1, num_outer=1, out=operational)
        with pytest.raises(ValueError, match=f"{where}.* may write"):
            ops.block_from_operational(operational, chunks)
    assert not blocks.numpy().any()
    ops.universal_from_block(good, num_layers=1, num_outer=1, out=blocks)
    assert blocks.numpy().tobytes() == pages.bytes_of(0) + pages.bytes_of(1)
