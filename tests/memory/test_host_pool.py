from __future__ import annotations

import functools
import gc
import itertools
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_kv import HostPool, KVCacheSpec
from paddle_kv.memory import host_memory
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import POISON, SHORT_S, WAIT_S, bytes_at, make_spec, pool_memory, random_bits, set_pool

LAYOUTS = ["layer_first", "block_first", "page_first_direct"]


@pytest.fixture(params=LAYOUTS)
def pool(request):
    made = HostPool(make_spec(), 11, layout=request.param)
    yield made
    made.close()


def intervals(pool: HostPool) -> list[tuple[int, int]]:
    spec = pool.spec
    return sorted(
        (pool.pointer(name, layer) + block * pool.stride_bytes(name), spec.tensor_block_bytes(name))
        for name in spec.tensor_names
        for layer in range(spec.num_layers)
        for block in range(pool.num_blocks)
    )


# ---- memory ----
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"latent": True}, {"layout": "NHD", "extra": {}}, {"num_layers": 1}])
def test_exactly_the_bytes_of_the_blocks_none_shared_none_left(layout, changes):
    spec = make_spec(**changes)
    pool = HostPool(spec, 11, layout=layout)
    assert pool.pinned_bytes == 11 * spec.num_layers * spec.block_bytes
    by_layout = {"layer_first": spec.num_layers, "block_first": 1, "page_first_direct": len(spec.tensor_names)}
    pieces = by_layout[layout]
    placed = intervals(pool)
    assert sum(size for _, size in placed) == pool.pinned_bytes
    gaps = [after[0] - (before[0] + before[1]) for before, after in itertools.pairwise(placed)]
    assert min(gaps, default=0) >= 0
    assert sum(gap != 0 for gap in gaps) < pieces
    pool.close()


def test_block_first_keeps_a_block_together():
    spec = make_spec()
    pool = HostPool(spec, 4, layout="block_first")
    start = pool.pointer("key", 0)
    for layer in range(spec.num_layers):
        for name in spec.tensor_names:
            assert pool.pointer(name, layer) == start + layer * spec.block_bytes + spec.tensor_offset_bytes(name)
            assert pool.stride_bytes(name) == spec.num_layers * spec.block_bytes


def test_page_first_direct_keeps_the_layers_of_a_block_of_a_tensor_together():
    """``[blocks, layers, ...]`` for each name."""
    spec = make_spec()
    pool = HostPool(spec, 4, layout="page_first_direct")
    for name in spec.tensor_names:
        own, start = spec.tensor_block_bytes(name), pool.pointer(name, 0)
        assert pool.stride_bytes(name) == spec.num_layers * own
        assert [pool.pointer(name, layer) - start for layer in range(spec.num_layers)] == [
            layer * own for layer in range(spec.num_layers)
        ]
    pool.close()


def test_views_are_the_pool(pool):
    bits = random_bits(pool.spec, pool.num_blocks, 3)
    set_pool(pool, bits)
    for (address, size), (name, layer, block) in zip(
        intervals(pool),
        sorted(
            (
                (name, layer, block)
                for name in pool.spec.tensor_names
                for layer in range(pool.spec.num_layers)
                for block in range(pool.num_blocks)
            ),
            key=lambda key: pool.pointer(key[0], key[1]) + key[2] * pool.stride_bytes(key[0]),
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(bytes_at(address, size), bits[name][layer, block])
    view = pool.view("value", 2, 3)
    assert (view.shape, view.dtype) == ((2, 7, 11), np.float16)
    view[:] = 1.5
    assert (pool.view("value", 2, 3) == 1.5).all()
    bits["value"][2, 3] = np.full((2, 7, 11), 1.5, np.float16).reshape(-1).view(np.uint8)
    for name, expected in bits.items():
        np.testing.assert_array_equal(pool_memory(pool)[name], expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("scale2", 0, 0), ValueError, "name = 'scale2' must be one of"),
        (("key", 5, 0), IndexError, r"layer = 5 must be in \[0, 5\)"),
        (("key", -1, 0), IndexError, r"layer = -1 must be in \[0, 5\)"),
        (("key", 1.0, 0), TypeError, "layer is 1.0"),
        (("key", 0, 11), IndexError, r"block_id\[0\] = 11 must be in \[0, 11\)"),
        (("key", 0, -1), IndexError, r"block_id\[0\] = -1 must be in \[0, 11\)"),
        (("key", 0, 1.5), TypeError, "block_id is 1.5"),
    ],
)
def test_view_of_what_is_not_there(pool, arguments, error, message):
    with pytest.raises(error, match=message):
        pool.view(*arguments)


@pytest.mark.parametrize(("layout", "count"), [("layer_first", 5), ("block_first", 1), ("page_first_direct", 4)])
def test_close_gives_the_memory_back(layout, count):
    pool = HostPool(make_spec(), 11, layout=layout)
    pieces = [weakref.ref(memory) for memory in pool._memory]
    pool.close()
    gc.collect()
    assert pool.pinned_bytes == 0
    assert pool.closed
    assert [piece() for piece in pieces] == [None] * count
    pool.close()


def test_a_view_keeps_the_memory_beyond_close():
    pool = HostPool(make_spec(), 11)
    view = pool.view("key", 1, 2)
    view[:] = 3.0
    pool.close()
    gc.collect()
    assert pool.pinned_bytes == 0
    assert (view == 3.0).all()


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_byte_at_either_end_keeps_its_piece_beyond_close(pool, end):
    pieces = [weakref.ref(memory) for memory in pool._memory]
    offsets = [0 if end == "first" else memory.size_bytes - 1 for memory in pool._memory]
    kept = [pool.bytes_at(piece().address + offset, 1) for piece, offset in zip(pieces, offsets, strict=True)]
    pool.close()
    gc.collect()
    assert len(kept) == len(pieces)
    assert None not in [piece() for piece in pieces]


def test_pieces_that_lie_side_by_side_are_told_apart():
    memory = np.arange(8, dtype=np.uint8)
    pieces = [
        SimpleNamespace(address=half.ctypes.data, size_bytes=4, array=functools.partial(np.asarray, half))
        for half in (memory[:4], memory[4:])
    ]
    assert host_memory.bytes_at(memory.ctypes.data + 4, 3, pieces).tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.allocate(1),
        lambda pool: pool.free([0]),
        lambda pool: pool.view("key", 0, 0),
        lambda pool: pool.pointer("key", 0),
        lambda pool: pool.lease([0]).__enter__(),
    ],
)
def test_a_closed_pool_says_so(call):
    pool = HostPool(make_spec(), 3)
    pool.close()
    with pytest.raises(RuntimeError, match=r"the host pool is closed"):
        call(pool)


def test_a_pool_that_does_not_fit_is_refused_whole(monkeypatch):
    """Each layer would fit by itself."""
    spec = make_spec()
    free_bytes = 3 * 11 * spec.block_bytes
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free_bytes)
    HostPool(make_spec(num_layers=3), 11).close()
    asked_bytes = 5 * 11 * spec.block_bytes
    with pytest.raises(MemoryError, match=rf"^{asked_bytes} bytes of .* {free_bytes} bytes are available"):
        HostPool(spec, 11)


def test_a_number_of_blocks_that_no_machine_has():
    started_s = time.thread_time()
    with pytest.raises(MemoryError, match=r"bytes are available"):
        HostPool(make_spec(), 10**13)
    assert time.thread_time() - started_s < 5


@pytest.mark.parametrize("num_blocks", [0, -1, 1.0, "3", True, None])
def test_number_of_blocks(num_blocks):
    with pytest.raises(ValueError, match=r"num_blocks = .* must be an integer of at least 1"):
        HostPool(make_spec(), num_blocks)


@pytest.mark.parametrize("room", [-4096, 1, 4095, 4097])
def test_a_room_that_is_no_multiple(room):
    with pytest.raises(ValueError, match=rf"room_bytes = {room} must be 0 or a multiple of 4096"):
        HostPool(make_spec(), 3, layout="block_first", room_bytes=room)


@pytest.mark.parametrize(
    "options", [{"layout": "layer_first"}, {"layout": "page_first_direct"}, {"layout": "block_first", "shared": True}]
)
def test_blocks_that_can_have_no_room_before_them(options):
    with pytest.raises(ValueError, match=r"room_bytes = 4096 needs layout='block_first' and shared=False"):
        HostPool(make_spec(), 3, room_bytes=4096, **options)
    with pytest.raises(TypeError, match="room_bytes"):
        HostPool(make_spec(), 3, layout="block_first", room_bytes="4096")


def test_room_before_each_block():
    spec = make_spec()
    with HostPool(spec, 3, layout="block_first", room_bytes=8192) as pool:
        name, size = spec.tensor_names[0], 8192 + spec.num_layers * spec.block_bytes
        assert (pool.room_bytes, pool.stride_bytes(name), pool.pinned_bytes) == (8192, size, 3 * size)
        assert pool.pointer(name, 0) == pool._memory[0].address + 8192
        assert pool.pointer(name, 1) == pool.pointer(name, 0) + spec.block_bytes
    with HostPool(spec, 3, layout="block_first") as pool:
        assert pool.room_bytes == 0


@pytest.mark.parametrize(
    ("changes", "adjacent"),
    [
        ({"head_dim": 255}, True),
        ({"head_dim": 256}, False),  # 48 KiB
        ({"head_dim": 256, "v_head_dim": 255}, True),  # on average
        ({"head_dim": 128, "v_head_dim": 320}, False),  # 42 KiB on average, but most bytes are in larger ones
        ({"head_dim": 260, "extra": {"scale": ((16,), "float32")}}, False),
        ({"head_dim": 1535, "latent": True}, True),
        ({"head_dim": 1536, "latent": True}, False),
    ],
)
def test_small_blocks_have_their_layers_side_by_side(changes, adjacent):
    """Unless another layout is asked for."""
    spec = KVCacheSpec(
        num_layers=3, num_kv_heads=1 if "latent" in changes else 6, block_size=16, dtype="float16", **changes
    )
    name = spec.tensor_names[0]
    with HostPool(spec, 5) as pool:
        assert pool.stride_bytes(name) == (3 * spec.block_bytes if adjacent else spec.tensor_block_bytes(name))
    with HostPool(spec, 5, layout="layer_first") as pool:
        assert pool.stride_bytes(name) == spec.tensor_block_bytes(name)


def test_room_in_the_order_that_a_pool_has_by_default():
    small = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=128, block_size=16, dtype="float16")
    with HostPool(small, 3, room_bytes=4096) as pool:
        assert pool.pinned_bytes == 3 * (4096 + 2 * small.block_bytes)
    large = KVCacheSpec(num_layers=2, num_kv_heads=16, head_dim=128, block_size=16, dtype="float16")
    with pytest.raises(ValueError, match=r"room_bytes = 4096 needs layout='block_first' and shared=False"):
        HostPool(large, 3, room_bytes=4096)
    with pytest.raises(ValueError, match=r"room_bytes = 4096 needs layout='block_first' and shared=False"):
        HostPool(small, 3, room_bytes=4096, shared=True)


def test_wrong_layout_and_spec():
    with pytest.raises(
        ValueError, match=r"layout = 'layers' must be 'layer_first', 'block_first', 'page_first_direct' or None"
    ):
        HostPool(make_spec(), 3, layout="layers")
    with pytest.raises(TypeError, match=r"spec is dict; a KVCacheSpec is expected"):
        HostPool({}, 3)
    with pytest.raises(TypeError, match=r"spec is NoneType; a KVCacheSpec is expected"):
        HostPool.adopt(None, {}, 3)


# ---- blocks ----
def test_allocate_until_empty_and_free(pool):
    first = pool.allocate(4)
    second = pool.allocate(7)
    assert sorted(first + second) == list(range(11))
    with pytest.raises(MemoryError, match=r"1 blocks were asked for, 0 of 11 are free"):
        pool.allocate(1)
    pool.free(np.array(first, np.int32))
    assert pool.num_free_blocks == 4
    with pytest.raises(MemoryError, match=r"5 blocks were asked for, 4 of 11 are free"):
        pool.allocate(5)
    assert pool.num_free_blocks == 4, "a refused call has taken blocks"
    assert sorted(pool.allocate(4)) == sorted(first)
    assert pool.allocate(0) == []


def test_the_blocks_of_one_call_are_neighbours_where_possible(pool):
    first, second, third = pool.allocate(3), pool.allocate(2), pool.allocate(4)
    pool.free(first[::-1])
    assert pool.allocate(2) == [9, 10], "the smallest run that holds them"
    pool.free(third)
    assert pool.allocate(3) == first
    pool.free(second)
    assert pool.allocate(6) == sorted(second + third), "the runs have merged"


def test_a_freed_run_that_fits_is_taken_before_blocks_that_were_never_used(pool):
    first, _ = pool.allocate(2), pool.allocate(3)
    pool.free(first)
    assert pool.allocate(2) == first


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (-1, ValueError, "count = -1 must not be negative"),
        (1.0, TypeError, "count is 1.0"),
        ("1", TypeError, "count is '1'"),
        (True, TypeError, "count is True"),
    ],
)
def test_allocate_of_what_is_no_count(pool, count, error, message):
    with pytest.raises(error, match=message):
        pool.allocate(count)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 0, 1], ValueError, "block_ids names block 1 more than once"),
        ([1, 7], ValueError, r"block_ids\[1\] = 7 is not allocated"),
        ([1, 11], IndexError, r"block_ids\[1\] = 11 must be in \[0, 11\)"),
        ([1, -1], IndexError, r"block_ids\[1\] = -1 must be in \[0, 11\)"),
        ([2**70], IndexError, r"must be in \[0, "),
        ([1.0], TypeError, "block_ids"),
        (None, TypeError, "block_ids"),
    ],
)
def test_free_of_what_cannot_be_freed_frees_nothing(pool, ids, error, message):
    pool.allocate(3)
    with pytest.raises(error, match=message):
        pool.free(ids)
    assert pool.num_free_blocks == 8


def test_double_free(pool):
    ids = pool.allocate(3)
    pool.free(ids[:1])
    with pytest.raises(ValueError, match=r"block_ids\[0\] = 0 is not allocated"):
        pool.free(ids[:1])
    assert pool.num_free_blocks == 9
    assert len(set(pool.allocate(9))) == 9, "a block was given out twice"


def test_freeing_nothing(pool):
    pool.free([])
    assert pool.num_free_blocks == 11


def test_mark_rewritten_checks_its_ids(pool):
    with pytest.raises(IndexError, match=r"block_ids\[0\] = 11 must be in \[0, 11\)"):
        pool.mark_rewritten([11])
    pool.mark_rewritten([10])


# ---- leases ----
def test_a_freed_block_is_not_given_out_while_leased(pool):
    ids = pool.allocate(11)
    with pool.lease(ids[3:5]):
        pool.free(ids)
        assert pool.num_free_blocks == 9
        with pytest.raises(MemoryError, match=r"10 blocks were asked for, 9 of 11 are free"):
            pool.allocate(10)
        assert not set(pool.allocate(9)) & {3, 4}
    assert sorted(pool.allocate(2)) == [3, 4]


def test_read_leases_share_a_write_lease_does_not(pool):
    with pool.lease([1, 2]), pool.lease([2, 3]):
        with pytest.raises(TimeoutError, match=r"blocks \[3, 4\] were still in use after timeout_s = 0.01"):
            pool.lease([3, 4], write=True, timeout_s=0.01).__enter__()
        with pool.lease([4], write=True):
            pass
    with pool.lease([1], write=True):
        for write in (False, True):
            with pytest.raises(TimeoutError), pool.lease([1], write=write, timeout_s=0):
                pass
    with pool.lease([1, 2, 3, 4], write=True, timeout_s=0):
        pass


def test_a_lease_that_was_refused_holds_nothing(pool):
    with pool.lease([2]):
        with pytest.raises(TimeoutError), pool.lease([1, 2, 3], write=True, timeout_s=0.01):
            pass
        with pool.lease([1, 3], write=True, timeout_s=0):
            pass


def test_a_lease_ends_with_an_exception(pool):
    with pytest.raises(KeyError), pool.lease([1], write=True):
        raise KeyError
    with pool.lease([1], write=True, timeout_s=0):
        pass


def test_a_lease_waits_for_the_one_before(pool):
    entered = threading.Event()

    def second():
        with pool.lease([1], write=True, timeout_s=WAIT_S):
            entered.set()

    with pool.lease([1]):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(SHORT_S)
    assert entered.wait(WAIT_S)
    thread.join(WAIT_S)


def test_close_waits_for_nobody(pool):
    with pool.lease([1, 4]):
        with pytest.raises(RuntimeError, match=r"2 blocks \(first: 1\) are held by transfers or leases"):
            pool.close()
        assert pool.pinned_bytes > 0
        assert not pool.closed
    pool.close()


@pytest.mark.parametrize(
    ("ids", "timeout_s", "error", "message"),
    [
        ([11], None, IndexError, r"block_ids\[0\] = 11"),
        ([1, 1], None, ValueError, "block_ids names block 1 more than once"),
        ([1], "1", TypeError, "timeout_s is '1'"),
        ([1], float("inf"), ValueError, "timeout_s = inf"),
        ([1], float("nan"), ValueError, "timeout_s = nan"),
    ],
)
def test_lease_arguments(pool, ids, timeout_s, error, message):
    with pytest.raises(error, match=message), pool.lease(ids, timeout_s=timeout_s):
        pass
    with pool.lease([1], write=True, timeout_s=0):
        pass


# ---- adopted memory ----
def guarded(spec: KVCacheSpec, num_blocks: int) -> tuple[dict[str, list[np.ndarray]], dict[str, list[int]]]:
    """Memory for each name and layer between guards, at odd addresses."""
    arrays = {
        name: [
            np.full(num_blocks * spec.tensor_block_bytes(name) + 131, POISON, np.uint8) for _ in range(spec.num_layers)
        ]
        for name in spec.tensor_names
    }
    return arrays, {name: [array.ctypes.data + 65 for array in layers] for name, layers in arrays.items()}


def test_adopted_memory_is_used_in_place():
    spec = make_spec()
    arrays, pointers = guarded(spec, 6)
    pool = HostPool.adopt(spec, pointers, 6)
    assert pool.pinned_bytes == 0
    bits = random_bits(spec, 6, 4)
    set_pool(pool, bits)
    for name in spec.tensor_names:
        for layer in range(spec.num_layers):
            expected = np.full_like(arrays[name][layer], POISON)
            expected[65:-66] = bits[name][layer].ravel()
            np.testing.assert_array_equal(arrays[name][layer], expected)
    assert pool.allocate(6) == list(range(6))
    pool.close()
    assert (arrays["key"][0][65:-66] == bits["key"][0].ravel()).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda p: p.pop("scale"), ValueError, r"pointers has the names .*; \['flag', 'key', 'scale', 'value'\]"),
        (lambda p: p.update(more=[1]), ValueError, "pointers has the names"),
        (lambda p: p["key"].pop(), ValueError, r"pointers\['key'\] has 4 layers; 5 are expected"),
        (lambda p: p["key"].__setitem__(2, 0), ValueError, r"pointers\['key'\]\[2\] = 0 must be the address"),
        (lambda p: p["key"].__setitem__(2, -8), ValueError, r"pointers\['key'\]\[2\] = -8 must be the address"),
        (lambda p: p["key"].__setitem__(2, 1.5), TypeError, r"pointers\['key'\]"),
        (lambda p: p.update(key=17), (TypeError, ValueError), r"pointers\['key'\]"),
        (lambda p: p["key"].__setitem__(2, p["value"][1] + 3), ValueError, "overlap"),
        (lambda p: p["key"].__setitem__(2, p["key"][1]), ValueError, "overlap"),
    ],
)
def test_adopt_refuses(change, error, message):
    spec = make_spec()
    arrays, pointers = guarded(spec, 6)
    change(pointers)
    with pytest.raises(error, match=message):
        HostPool.adopt(spec, pointers, 6)
    assert all((array == POISON).all() for layers in arrays.values() for array in layers)


def test_adopt_refuses_what_is_no_mapping():
    with pytest.raises(TypeError, match=r"pointers is list; a mapping"):
        HostPool.adopt(make_spec(), [1, 2], 3)


def test_adopted_twice_shares_its_leases():
    spec = make_spec()
    _arrays, pointers = guarded(spec, 6)
    first, second = (HostPool.adopt(spec, pointers, 6) for _ in range(2))
    assert first.domain is second.domain
    with first.lease([2]), pytest.raises(TimeoutError), second.lease([2], write=True, timeout_s=0):
        pass
    first.close()
    second.close()


def test_a_pool_that_is_closed_again_asks_nobody():
    """Another pool on the same memory goes on."""
    spec = make_spec()
    _arrays, pointers = guarded(spec, 6)
    first, second = (HostPool.adopt(spec, pointers, 6) for _ in range(2))
    first.close()
    with second.lease([2]):
        first.close()
    second.close()


def test_a_pool_that_is_closed_while_somebody_waits_for_a_lease(pool):
    refused = []

    def wait() -> None:
        try:
            with pool.lease([2], write=True):
                pass
        except RuntimeError as error:
            refused.append(str(error))

    held = pool.lease([2])
    held.__enter__()
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(SHORT_S)

    def close() -> None:
        with pool.domain.group.lock:  # both at once, as he sees it
            held.__exit__(None, None, None)
            pool.close()

    closer = threading.Thread(target=close)
    closer.start()
    closer.join(WAIT_S)
    thread.join(WAIT_S)
    assert refused == ["the host pool is closed"]


def test_adopted_by_halves_is_refused():
    """Two pools that overlap at different blocks cannot be ordered against each other."""
    spec = make_spec()
    _arrays, pointers = guarded(spec, 6)
    first = HostPool.adopt(spec, pointers, 6)
    shifted = {
        name: [address + spec.tensor_block_bytes(name) for address in layers] for name, layers in pointers.items()
    }
    with pytest.raises(ValueError, match=r"overlaps that of another pool"):
        HostPool.adopt(spec, shifted, 5)
    other_layers = {name: layers[2:] for name, layers in pointers.items()}
    with pytest.raises(ValueError, match=r"other blocks or layers"):
        HostPool.adopt(make_spec(num_layers=3), other_layers, 6)
    first.close()
    HostPool.adopt(spec, shifted, 5).close()


def test_a_pool_that_is_gone_leaves_its_memory_to_others():
    spec = make_spec()
    _arrays, pointers = guarded(spec, 6)
    first = HostPool.adopt(spec, pointers, 6)
    del first
    gc.collect()
    HostPool.adopt(make_spec(num_layers=3), {name: layers[2:] for name, layers in pointers.items()}, 6).close()


def test_the_stride_of_what_is_not_there() -> None:
    pool = HostPool(make_spec(), 3)
    with pytest.raises(ValueError, match="name = 'nothing' must be one of"):
        pool.stride_bytes("nothing")
    pool.close()


def test_blocks_that_did_not_reach_their_caller_come_back_from_a_cycle_too(pool):
    """As of an exception that refers to itself by its frames."""
    cycle = [change(pool.domain, functools.partial(pool.allocate_here, 2))]
    cycle.append(cycle)
    assert pool.num_free_blocks == pool.num_blocks - 2
    del cycle
    gc.collect()
    keeper.call(list)  # the thread to which the finalizer has left it
    assert pool.num_free_blocks == pool.num_blocks


def test_a_pool_is_closed_by_the_end_of_its_block():
    made = HostPool(make_spec(), 3)
    with made as pool:
        assert pool is made and not pool.closed
    assert made.closed


def test_a_lease_that_is_ended_again_ends_no_other():
    """As in a forked child, where those of lost threads are ended and their frames go later."""
    with HostPool(make_spec(), 3) as pool:
        lease = change(pool.domain, functools.partial(pool._try_lease, [1], False, 5))
        for _ in range(2):
            change(pool.domain, lease.end)
        with pool.lease([1]), pytest.raises(TimeoutError), pool.lease([1], write=True, timeout_s=0.0):
            pass
