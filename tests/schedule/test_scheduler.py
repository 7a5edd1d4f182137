"""What a scheduler does with correct input: every byte of both sides, order, overlap, counts."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.memory.host_rows import rows_with_room
from paddle_kv.tracking.keeper import keeper
from tests.schedule.rig import (
    POISON,
    SHORT_S,
    WAIT_S,
    Rig,
    bytes_at,
    cache_memory,
    cpu_tensor,
    in_threads,
    make_spec,
    random_bits,
    set_cache,
    set_pool,
    settles,
)

LAYOUTS = [
    {"layout": "HND"},
    {"layout": "NHD"},
    {"layout": "packed", "head_dim": 16},
    {"latent": True},
    {"extra": {}},
    {"dtype": "bfloat16"},
    {"dtype": "float8_e4m3fn"},
    {"num_layers": 1},
]


@pytest.mark.parametrize("pool_layout", ["layer_first", "block_first", "page_first_direct", "with room"])
@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_every_byte_arrives_and_no_other_changes(changes, pool_layout):
    room = {"layout": "block_first", "room_bytes": 4096}
    rig = Rig(make_spec(**changes), **(room if pool_layout == "with room" else {"layout": pool_layout}))
    if pool_layout == "with room":
        rooms = rows_with_room(rig.pool)[:, :4096]
        rooms[:] = 0x5A
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        out = scheduler.offload([12, 0, 7], [3, 16, 0])
        out.wait(WAIT_S)
        rig.expect_offload([12, 0, 7], [3, 16, 0])
        rig.check()
        assert out.bytes == 3 * rig.spec.block_bytes * rig.spec.num_layers
        back = scheduler.onload([0, 3, 9], [5, 12, 1])
        back.wait(WAIT_S)
        rig.expect_onload([0, 3, 9], [5, 12, 1])
        rig.check()
        for transfer in (out, back):
            assert transfer.done()
            assert transfer.error is None
            assert transfer.elapsed_ms >= 0
    rig.check()
    assert pool_layout != "with room" or (rooms == 0x5A).all()


@pytest.mark.parametrize("layers_per_event", [1, 2, 3, 5, 8, 2**63 - 1, 2**64])
def test_layers_per_event_need_not_divide(rig, layers_per_event):
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=layers_per_event) as scheduler:
        out = scheduler.offload([1, 2], [4, 3], layerwise=True)
        assert out.plan.layers_per_event == min(layers_per_event, 5)  # backends count in 64 bits
        for layer in (4, 2, 0, 3, 1):
            out.mark_layer_written(layer)
        out.wait(WAIT_S)
        rig.expect_offload([1, 2], [4, 3])
        load = scheduler.onload([5, 3], [2, 9])
        for layer in range(5):
            load.wait_layer(layer, timeout_s=WAIT_S)
        load.wait(WAIT_S)
        rig.expect_onload([5, 3], [2, 9])
    rig.check()


@pytest.mark.parametrize(
    "ids",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64)[::1],
        lambda ids: cpu_tensor(np.array(ids, np.int32)),
        lambda ids: cpu_tensor(np.array(ids, np.int64)),
        lambda ids: [np.int64(i) for i in ids],
    ],
)
def test_every_kind_of_ids(rig, ids):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload(ids([3, 1]), ids([6, 2])).wait(WAIT_S)
    rig.expect_offload([3, 1], [6, 2])
    rig.check()


def test_ids_may_be_used_again_after_the_call(rig, copies):
    copies.hold("offload", 0)
    device_ids, host_ids = np.array([3, 1]), np.array([6, 2])
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload(device_ids, host_ids)
        device_ids[:], host_ids[:] = [8, 9], [11, 12]
        copies.go_on()
        save.wait(WAIT_S)
        rig.expect_offload([3, 1], [6, 2])
        rig.check()
        assert rig.pool.domain.busy(range(17)) == []


def test_ranges_and_one_source_for_many_targets(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload(range(2, 11, 4), range(5, 8)).wait(WAIT_S)
        rig.expect_offload([2, 6, 10], [5, 6, 7])
        scheduler.onload([8, 8, 8], [0, 11, 4]).wait(WAIT_S)
        rig.expect_onload([8, 8, 8], [0, 11, 4])
        scheduler.offload([3, 3], [1, 2]).wait(WAIT_S)
        rig.expect_offload([3, 3], [1, 2])
    rig.check()


@pytest.mark.parametrize("layerwise", [False, True])
def test_no_blocks_is_a_transfer_that_is_over(rig, layerwise):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        for transfer in (scheduler.offload([], [], layerwise=layerwise), scheduler.onload((), np.array([], np.int64))):
            assert transfer.elapsed_ms == 0.0, "it is over before anybody asks"
            assert transfer.done()
            assert transfer.bytes == 0
            transfer.wait_layer(4)
            transfer.wait_on()
            transfer.wait(0)
            transfer.cancel()
            assert transfer.error is None
            assert transfer.elapsed_ms == 0.0
    rig.check()


def test_what_is_ready_goes_by_one_call(rig, monkeypatch):
    """Also behind another transfer; and nothing to move is no call at all."""
    calls = []
    backend = CpuBackend()
    for name in ("copy_layers", "record"):
        inner = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, name=name, inner=inner: (calls.append(name), inner(*a)))
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        calls.clear()
        scheduler.offload([], [])
        assert calls == []
        first = scheduler.offload([1], [4], layerwise=True)
        scheduler.onload([4], [2])
        second = scheduler.offload([3], [4], layerwise=True)
        for layer in range(5):
            second.mark_layer_written(layer)
        calls.clear()
        first.cancel()
        assert calls == ["copy_layers"]
        second.wait(WAIT_S)
    rig.expect_offload([3], [4])
    rig.check()


@pytest.mark.parametrize("call", ["wait", "wait_layer", "wait_on"])
def test_a_time_out_is_that_of_the_whole_call(rig, copies, monkeypatch, call):
    """What it has taken until the layer was marked is gone."""
    left_s, begun = [], threading.Event()
    backend = CpuBackend()
    inner = backend.wait
    monkeypatch.setattr(backend, "wait", lambda event, timeout_s: left_s.append(timeout_s) or inner(event, timeout_s))
    park = keeper.park

    def watched(waiter, timeout_s):
        if timeout_s is not None:
            left_s.append(timeout_s)
            begun.set()
        return park(waiter, timeout_s)

    monkeypatch.setattr(keeper, "park", watched)
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        left_s.clear()
        copies.hold("offload", 0)
        save = scheduler.offload([1], [4], layerwise=True)

        def mark() -> None:
            assert begun.wait(WAIT_S)
            time.sleep(SHORT_S)
            left_s.clear()
            for layer in range(5):
                save.mark_layer_written(layer)
            while not left_s:
                time.sleep(0.001)
            copies.go_on()

        marks = threading.Thread(target=mark, daemon=True)
        marks.start()
        getattr(save, call)(*([0] if call == "wait_layer" else []), timeout_s=WAIT_S)
        marks.join(WAIT_S)
        assert left_s and all(0 < left <= WAIT_S - SHORT_S for left in left_s)


def test_more_than_ten_thousand_ids():
    spec = make_spec(num_layers=2, num_kv_heads=1, head_dim=1, v_head_dim=None, block_size=3, extra={})
    count = 12_345
    rig = Rig(spec, device_blocks=count + 7, host_blocks=count + 11)
    rng = np.random.default_rng(5)
    device_ids, host_ids = rng.permutation(count + 7)[:count], rng.permutation(count + 11)[:count]
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        scheduler.offload(device_ids, host_ids).wait(WAIT_S)
        for name in spec.tensor_names:
            rig.host[name][:, host_ids] = rig.device[name][:, device_ids]
        host_ids = rng.permutation(host_ids)
        scheduler.onload(host_ids, device_ids).wait(WAIT_S)
        for name in spec.tensor_names:
            rig.device[name][:, device_ids] = rig.host[name][:, host_ids]
    rig.check()


def test_nothing_around_adopted_memory_is_touched():
    """Guard blocks beside the cache tensors, guard bytes beside the host memory, odd addresses."""
    spec = make_spec()
    wholes, tensors, arrays, pointers = {}, {}, {}, {}
    for name in spec.tensor_names:
        block_bytes = spec.tensor_block_bytes(name)
        wholes[name] = [
            cpu_tensor(np.zeros((9 + 2, *spec.block_shape(name)), spec.numpy_dtype(name))) for _ in range(5)
        ]
        for whole in wholes[name]:
            bytes_at(whole.data_ptr(), 11 * block_bytes)[:] = POISON
        tensors[name] = [whole[1:10] for whole in wholes[name]]
        arrays[name] = [np.full(8 * block_bytes + 77, POISON, np.uint8) for _ in range(5)]
        pointers[name] = [array.ctypes.data + 33 for array in arrays[name]]
    cache, pool = DeviceCache.adopt(spec, tensors), HostPool.adopt(spec, pointers, 8)
    device, host = random_bits(spec, 9, 6), random_bits(spec, 8, 7)
    set_cache(cache, device)
    set_pool(pool, host)
    with LayerwiseScheduler(cache, pool) as scheduler:
        scheduler.onload([7, 0, 3], [0, 8, 4]).wait(WAIT_S)
        scheduler.offload([8, 1], [7, 0]).wait(WAIT_S)
    for name in spec.tensor_names:
        device[name][:, [0, 8, 4]] = host[name][:, [7, 0, 3]]
        host[name][:, [7, 0]] = device[name][:, [8, 1]]
        block_bytes = spec.tensor_block_bytes(name)
        for layer in range(5):
            whole = bytes_at(wholes[name][layer].data_ptr(), 11 * block_bytes).reshape(11, -1)
            np.testing.assert_array_equal(whole[1:10], device[name][layer])
            assert (whole[[0, 10]] == POISON).all()
            np.testing.assert_array_equal(arrays[name][layer][33:-44], host[name][layer].ravel())
            assert (arrays[name][layer][:33] == POISON).all()
            assert (arrays[name][layer][-44:] == POISON).all()


# ---- order ----
def test_a_layer_is_there_after_wait_layer_and_the_next_one_is_not_awaited(rig, copies):
    copies.hold("onload", 2)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([4, 9], [1, 0])
        for layer in (0, 1):
            load.wait_layer(layer, timeout_s=WAIT_S)
        assert copies.arrived.acquire(timeout=WAIT_S)
        rig.expect_onload([4, 9], [1, 0], layers=[0, 1])
        rig.check()
        assert not load.done()
        with pytest.raises(TimeoutError, match=r"timeout_s = 0.05"):
            load.wait_layer(2, timeout_s=SHORT_S)
        with pytest.raises(TimeoutError, match=r"timeout_s = 0.05"):
            load.wait(SHORT_S)
        copies.go_on()
        load.wait_layer(2, timeout_s=WAIT_S)
        load.wait(WAIT_S)
        rig.expect_onload([4, 9], [1, 0])
    rig.check()


def test_an_offload_sees_what_was_written_before_the_call(rig, copies):
    """Compute runs in the caller on this backend: what it has written before the call is what is saved, and the caller
    has to wait before it writes again (clause 5), which wait_layer says it may."""
    copies.hold("offload", 3)
    rig.write_device(6, value=0x11)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([6], [2])
        save.wait_layer(1, timeout_s=WAIT_S)
        rig.expect_offload([6], [2])
        rig.write_device(6, layers=[0, 1], value=0x22)
        copies.go_on()
        save.wait(WAIT_S)
    rig.check()


def test_layerwise_saves_a_layer_only_after_its_mark(rig, copies):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([6, 3], [2, 8], layerwise=True)
        time.sleep(SHORT_S)
        rig.check()
        for layer in (3, 0, 4, 1, 2):
            rig.write_device(6, layers=[layer], value=layer + 1)  # later than the call, earlier than the mark
            save.mark_layer_written(layer)
            save.wait_layer(layer, timeout_s=WAIT_S)
            rig.expect_offload([6, 3], [2, 8], layers=[layer])
            rig.check()
        save.wait(WAIT_S)
    assert [layer for _, _, layer in copies.done] == [3, 0, 4, 1, 2]


def test_a_group_waits_for_all_of_its_marks(rig, copies):
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        save = scheduler.offload([6], [2], layerwise=True)
        for layer in (4, 1, 2):
            save.mark_layer_written(layer)
        save.wait_layer(4, timeout_s=WAIT_S)
        for layer in (1, 2):
            with pytest.raises(TimeoutError, match=rf"layer {layer} was not submitted within timeout_s = 0.05"):
                save.wait_layer(layer, timeout_s=SHORT_S)
        assert [layer for _, _, layer in copies.done] == [4]
        save.mark_layer_written(3)
        save.mark_layer_written(0)
        save.wait(WAIT_S)
        rig.expect_offload([6], [2])
        assert [layer for _, _, layer in copies.done] == [4, 2, 3, 0, 1]
    rig.check()


def test_a_load_of_what_is_being_saved_follows_layer_by_layer(rig, copies):
    """Read after write on the host, across the two streams."""
    copies.hold("offload", 1)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([6], [2])
        load = scheduler.onload([2], [0])
        load.wait_layer(0, timeout_s=WAIT_S)
        rig.expect_offload([6], [2], layers=[0])
        rig.expect_onload([2], [0], layers=[0])
        rig.check()
        with pytest.raises(TimeoutError):
            load.wait_layer(1, timeout_s=SHORT_S)
        copies.go_on()
        load.wait(WAIT_S)
        assert save.done()
        rig.expect_offload([6], [2])
        rig.expect_onload([2], [0])
    rig.check()


def test_a_load_does_not_overwrite_what_is_being_saved(rig, copies):
    """Write after read on the device."""
    copies.hold("offload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([6], [2])
        load = scheduler.onload([9], [6])
        assert copies.arrived.acquire(timeout=WAIT_S)
        time.sleep(SHORT_S)
        rig.check()
        copies.go_on()
        load.wait(WAIT_S)
        save.wait(0)
        rig.expect_offload([6], [2])
        rig.expect_onload([9], [6])
    rig.check()


def test_a_save_does_not_overwrite_what_is_being_loaded(rig, copies):
    """Write after read on the host."""
    copies.hold("onload", 0)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([2], [6])
        save = scheduler.offload([9], [2])
        assert copies.arrived.acquire(timeout=WAIT_S)
        time.sleep(SHORT_S)
        rig.check()
        copies.go_on()
        save.wait(WAIT_S)
        load.wait(0)
        rig.expect_onload([2], [6])
        rig.expect_offload([9], [2])
    rig.check()


def test_a_save_of_what_is_being_loaded_follows(rig, copies):
    """Read after write on the device."""
    copies.hold("onload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([2], [6])
        save = scheduler.offload([6], [7])
        with pytest.raises(TimeoutError):
            save.wait(SHORT_S)
        copies.go_on()
        save.wait(WAIT_S)
        assert load.done()
        rig.expect_onload([2], [6])
        rig.expect_offload([6], [7])
    rig.check()


def test_two_writers_of_one_block_end_in_their_order(rig, copies):
    """Write after write: a layerwise save that is marked late, then another one to the same host block."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([6], [2], layerwise=True)
        second = scheduler.offload([7], [2])
        with pytest.raises(TimeoutError, match=r"a layer was not submitted within timeout_s = 0.05"):
            second.wait(SHORT_S)
        assert copies.done == []
        for layer in range(5):
            first.mark_layer_written(layer)
        second.wait(WAIT_S)
        first.wait(0)
        rig.expect_offload([6], [2])
        rig.expect_offload([7], [2])
    rig.check()


def test_other_blocks_overlap(rig, copies):
    """A load that touches nothing of a held save is done while that one hangs, and the other way round."""
    for direction in ("offload", "onload"):
        copies.hold(direction, 0)
        with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
            if direction == "offload":
                hanging, free = scheduler.offload([6], [2]), scheduler.onload([3], [7])
                rig.expect_onload([3], [7])
            else:
                hanging, free = scheduler.onload([3], [7]), scheduler.offload([6], [2])
                rig.expect_offload([6], [2])
            free.wait(WAIT_S)
            assert not hanging.done()
            rig.check()
            copies.go_on()
            hanging.wait(WAIT_S)
            if direction == "offload":
                rig.expect_offload([6], [2])
            else:
                rig.expect_onload([3], [7])
        rig.check()


def test_readers_of_one_block_overlap(rig, copies):
    """Two schedulers read one device block at once: neither waits for the other."""
    copies.hold("offload", 0)
    with (
        LayerwiseScheduler(rig.cache, rig.pool) as one,
        LayerwiseScheduler(rig.cache, rig.pool) as two,
    ):
        saves = [one.offload([6], [2]), two.offload([6], [3])]
        for _ in saves:
            assert copies.arrived.acquire(timeout=WAIT_S), "the second reader waits for the first"
        copies.go_on()
        for save in saves:
            save.wait(WAIT_S)
    rig.expect_offload([6, 6], [2, 3])
    rig.check()


@pytest.mark.parametrize("adopted", [False, True])
def test_two_schedulers_on_one_cache(rig, copies, adopted):
    """Pools are known by their memory: it is one cache, also where it was adopted twice."""
    other_cache, other_pool = rig.cache, HostPool(rig.spec, 5)
    if adopted:
        tensors = {name: [rig.cache.tensor(name, layer) for layer in range(5)] for name in rig.spec.tensor_names}
        other_cache = DeviceCache.adopt(rig.spec, tensors)
    other_bits = random_bits(rig.spec, 5, 8)
    set_pool(other_pool, other_bits)
    copies.hold("onload", 2)
    with (
        LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as one,
        LayerwiseScheduler(other_cache, other_pool, layers_per_event=3) as two,
    ):
        first = one.onload([9], [6])
        assert copies.arrived.acquire(timeout=WAIT_S)
        second = two.onload([4], [6])
        save = one.offload([6], [0])
        time.sleep(SHORT_S)
        assert not second.done()
        assert not save.done()
        copies.go_on()
        save.wait(WAIT_S)
        first.wait(0)
        second.wait(0)
    for name in rig.spec.tensor_names:
        rig.device[name][:, 6] = other_bits[name][:, 4]
    rig.expect_offload([6], [0])
    rig.check()


def test_two_pools_on_one_host_memory(rig, copies):
    spec = rig.spec
    arrays = {name: [np.zeros(4 * spec.tensor_block_bytes(name), np.uint8) for _ in range(5)] for name in rig.host}
    pointers = {name: [array.ctypes.data for array in layers] for name, layers in arrays.items()}
    pools = [HostPool.adopt(spec, pointers, blocks) for blocks in (4, 3)]
    cache = DeviceCache(spec, 3, "cpu")
    copies.hold("offload", 4)
    with (
        LayerwiseScheduler(rig.cache, pools[0]) as one,
        LayerwiseScheduler(cache, pools[1]) as two,
    ):
        one.offload([6], [2])
        load = two.onload([2], [1])
        with pytest.raises(TimeoutError):
            load.wait(SHORT_S)
        copies.go_on()
        load.wait(WAIT_S)
    for name, bits in cache_memory(cache).items():
        np.testing.assert_array_equal(bits[:, 1], rig.device[name][:, 6])


def test_a_long_chain_of_transfers_needs_no_deep_stack(rig):
    """Each depends on the one before, and none can start until the first is marked."""
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=5) as scheduler:
        first = scheduler.offload([0], [0], layerwise=True)
        chain = []
        for _ in range(700):
            chain += [scheduler.onload([0], [1]), scheduler.offload([1], [0])]
        for layer in range(5):
            first.mark_layer_written(layer)
        chain[-1].wait(WAIT_S)
        assert all(transfer.done() for transfer in chain)
        rig.expect_offload([0], [0])
        rig.expect_onload([0], [1])
    rig.check()


def test_a_long_chain_that_is_dropped_needs_no_deep_stack(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        first = scheduler.offload([0], [0], layerwise=True)
        chain = [scheduler.onload([0], [1]) if i % 2 else scheduler.offload([1], [0]) for i in range(1, 801)]
        first.cancel()
        with pytest.raises(RuntimeError, match=r"a transfer that failed"):
            chain[-1].wait(WAIT_S)
        assert len(str(chain[-1].error)) < 500
    rig.check()


# ---- the rest of the interface ----
def test_record_event_covers_what_was_submitted(rig, copies):
    copies.hold("onload", 3)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([1, 2], [3, 4])
        event, other = scheduler.record_event("onload"), scheduler.record_event("offload")
        assert other.wait(WAIT_S)
        assert not event.wait(SHORT_S)
        assert not event.done()
        copies.go_on()
        assert event.wait(WAIT_S)
        assert event.done()
        rig.expect_onload([1, 2], [3, 4])
        rig.check()
        load.wait(WAIT_S)
        with pytest.raises(ValueError, match=r"direction = 'up' must be 'onload' or 'offload'"):
            scheduler.record_event("up")


def test_drain_waits_for_all_and_only_its_own(rig, copies):
    copies.hold("onload", 0)
    other = Rig()
    with (
        LayerwiseScheduler(rig.cache, rig.pool) as scheduler,
        LayerwiseScheduler(other.cache, other.pool) as second,
    ):
        loads = [scheduler.onload([1], [1]), scheduler.onload([2], [2])]
        save = scheduler.offload([3], [3])
        second.drain(0)
        assert scheduler.record_event("offload").wait(WAIT_S)  # the save is over, and nobody has asked it
        with pytest.raises(TimeoutError, match=r"2 transfers were not over after timeout_s = 0.05"):
            scheduler.drain(SHORT_S)
        assert save.done()
        copies.go_on()
        scheduler.drain(WAIT_S)
        assert all(load.done() for load in loads)
        scheduler.drain(0)


def test_stats_count(rig):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        fresh = scheduler.stats()
        assert (fresh["streams"], fresh["in_flight"], fresh["pinned_bytes"]) == (2, 0, rig.pool.pinned_bytes)
        load, done = scheduler.onload([1, 2], [3, 4]), scheduler.offload([3], [5])
        load.wait(WAIT_S)
        done.wait(WAIT_S)
        save = scheduler.offload([3], [6], layerwise=True)
        assert scheduler.stats()["in_flight"] == 1
        save.cancel()
        one = rig.spec.block_bytes * 5
        assert settles(lambda: scheduler.stats()["events"] == fresh["events"])
        assert scheduler.stats() == {
            **fresh,
            "onload_transfers": 1,
            "offload_transfers": 2,
            "onload_bytes": 2 * one,
            "offload_bytes": 2 * one,
            "onload_us": round(load.elapsed_ms * 1e3),
            "offload_us": round(done.elapsed_ms * 1e3),  # the cancelled one has not arrived
            "cancelled": 1,
            "failed": 0,
        }
    after = scheduler.stats()
    assert [after[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]


def test_layer_times(rig, copies):
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True, layers_per_event=2) as scheduler:
        save = scheduler.offload([1], [2], layerwise=True)
        for layer in (4, 3, 2, 0, 1):
            save.mark_layer_written(layer)
        save.wait(WAIT_S)
        times = save.layer_times_ms
        assert len(times) == 5
        assert all(0 <= start <= end <= scheduler.now_ms() for start, end in times)
        assert times[0] == times[1]
        assert times[2] == times[3]
        assert times[4][1] <= times[2][1] <= times[0][1], "the order of the marks"
        assert save.elapsed_ms == pytest.approx(times[0][1] - times[4][0])
        copies.hold("onload", 0)
        load = scheduler.onload([1], [2])
        assert load.layer_times_ms == []  # it is not over
        copies.go_on()
        load.wait(WAIT_S)


def test_layer_times_wait_for_events_that_pass_late(rig, copies):
    """Those of a GPU's kernel engine lie on a stream of their own, but the last one."""

    class Late(CpuBackend):
        late = None

        def is_complete(self, *events):
            return self.late not in events and super().is_complete(*events)

        def elapsed_ms(self, start, end):
            assert self.is_complete(end), "CUDA would report cudaErrorNotReady"
            return super().elapsed_ms(start, end)

    backend = Late()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend, record_layer_times=True) as scheduler:
        copies.hold("onload", 0)
        load = scheduler.onload([5], [2])
        backend.late = load._movement.events[1]
        copies.go_on()
        assert load._movement.last_event.wait(WAIT_S)
        assert not load.done()
        with pytest.raises(TimeoutError):
            load.wait(SHORT_S)
        backend.late = None
        load.wait(WAIT_S)
        assert len(load.layer_times_ms) == 5
        assert load.elapsed_ms >= 0


def test_elapsed_is_the_time_of_the_copies(rig, copies):
    copies.hold("onload", 4)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        started_s = time.perf_counter()
        load = scheduler.onload([1], [2])
        assert copies.arrived.acquire(timeout=WAIT_S)
        assert np.isnan(load.elapsed_ms)
        time.sleep(0.1)
        copies.go_on()
        load.wait(WAIT_S)
        assert 100 <= load.elapsed_ms <= (time.perf_counter() - started_s) * 1e3


def test_several_threads(rig):
    """Each thread works on blocks of its own, through one scheduler; all data is in place at the end."""
    rounds = 25

    def work(scheduler: LayerwiseScheduler, number: int) -> None:
        for i in range(rounds):
            scheduler.offload([number], [number]).wait(WAIT_S)
            load = scheduler.onload([number], [number + 5])
            for layer in range(5):
                load.wait_layer(layer, timeout_s=WAIT_S)
            load.wait(WAIT_S)
            save = scheduler.offload([number + 5], [number + 5], layerwise=True)
            for layer in range(5):
                save.mark_layer_written(layer)
            scheduler.stats()
            rig.pool.num_free_blocks  # noqa: B018  looks at all transfers
            (save.cancel if i % 3 == 0 else save.wait)()

    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        in_threads(*[functools.partial(work, scheduler, number) for number in range(5)])
        scheduler.drain(WAIT_S)
        assert scheduler.stats()["failed"] == 0
    for number in range(5):
        rig.expect_offload([number], [number])
        rig.expect_onload([number], [number + 5])
        rig.expect_offload([number + 5], [number + 5])
    rig.check()


def test_threads_wait_on_one_transfer(rig, copies):
    copies.hold("onload", 0, 3)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        load = scheduler.onload([1], [2])
        passed = []
        calls = [lambda: load.wait(WAIT_S), lambda: load.wait_layer(4, timeout_s=WAIT_S), load.wait_on]
        threads = [threading.Thread(target=lambda call=call: passed.append(call())) for call in calls * 3]
        for thread in threads:
            thread.start()
        copies.go_on()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(passed) == 9
        scheduler.drain(WAIT_S)
        assert settles(lambda: scheduler.stats()["events"] == 1)


def one_event(layer: int, layers_per_event: int) -> range:
    """Layers that share the event of this one."""
    first = layer // layers_per_event * layers_per_event
    return range(first, first + layers_per_event)


class SmallSpec:
    spec = make_spec(num_layers=3, num_kv_heads=1, head_dim=1, v_head_dim=2, block_size=3, extra={})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["onload", "offload", "layerwise", "some layers"]),
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4),
        ),
        max_size=12,
    ),
    layers_per_event=st.integers(1, 4),
    order=st.permutations(range(3)),
    some=st.sets(st.integers(0, 2)),
)
def test_any_sequence_ends_as_if_one_after_the_other(steps, layers_per_event, order, some):
    """Both directions on few blocks, all in flight at once; each layerwise save is marked at the very end."""
    rig = Rig(SmallSpec.spec, device_blocks=5, host_blocks=6)
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=layers_per_event) as scheduler:
        saves, transfers = [], []
        for kind, pairs in steps:
            target = 1 if kind in ("offload", "layerwise") else 0
            pairs = list({pair[target]: pair for pair in pairs}.values())  # a target only once
            device_ids, host_ids = [p[0] for p in pairs], [p[1] for p in pairs]
            if kind == "onload":
                transfers.append(scheduler.onload(host_ids, device_ids))
                rig.expect_onload(host_ids, device_ids)
            elif kind == "some layers":
                together = [layer for layer in range(3) if some & set(one_event(layer, layers_per_event))]
                transfers.append(scheduler.onload(host_ids, device_ids, layers=together))
                rig.expect_onload(host_ids, device_ids, together)
            else:
                transfers.append(scheduler.offload(device_ids, host_ids, layerwise=kind == "layerwise"))
                saves += transfers[-1:] if kind == "layerwise" else []
                rig.expect_offload(device_ids, host_ids)
        for layer in order:
            for save in saves:
                save.mark_layer_written(layer)
        for transfer in transfers:
            transfer.wait(WAIT_S)
        assert scheduler.stats()["in_flight"] == 0
        assert settles(lambda: scheduler.stats()["events"] == 1)
    rig.check()


def test_a_backend_can_be_given(rig):
    backend = CpuBackend()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=backend) as scheduler:
        scheduler.offload([1], [2]).wait(WAIT_S)
    rig.expect_offload([1], [2])
    rig.check()


def test_stream_arguments_are_ignored_on_the_cpu(rig):
    with LayerwiseScheduler(rig.cache, rig.pool, compute_stream=17) as scheduler:
        save = scheduler.offload([1], [2], layerwise=True)
        for layer in range(5):
            save.mark_layer_written(layer, stream=23)
        save.wait_layer(0, stream=29)
        save.wait_on(stream=31)
        save.wait(WAIT_S)


def test_works_under_no_grad_and_on_paddle_tensors_written_by_paddle(rig):
    cache = DeviceCache(rig.spec, 3, "cpu")
    pool = HostPool(rig.spec, 3)
    with paddle.no_grad(), LayerwiseScheduler(cache, pool) as scheduler:
        cache.tensor("scale", 4)[2] = 2.5
        scheduler.offload([2], [1]).wait(WAIT_S)
        assert (pool.view("scale", 4, 1) == 2.5).all()
        with pool.lease([1], write=True):
            pool.view("scale", 4, 1)[:] = 3.5
        scheduler.onload([1], [0]).wait(WAIT_S)
        assert cache.tensor("scale", 4)[0].numpy().tolist() == [3.5] * 3


def test_a_time_out_names_the_layers_that_were_not_marked(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([5], [2], layerwise=True)
        save.mark_layer_written(1)
        load = scheduler.onload([2], [7])
        for wait in (save.wait, lambda timeout_s: save.wait_on(timeout_s=timeout_s)):
            with pytest.raises(TimeoutError, match=r"mark_layer_written was not called for layers 0, 2, 3, 4$"):
                wait(SHORT_S)
        with pytest.raises(TimeoutError, match=r"mark_layer_written was not called for layer 3$"):
            save.wait_layer(3, timeout_s=SHORT_S)
        with pytest.raises(TimeoutError, match="it waits for a layerwise offload of the same blocks"):
            load.wait_layer(0, timeout_s=SHORT_S)
        save.cancel()


def test_a_transfer_tells_what_it_is(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        save = scheduler.offload([5, 6], [2, 3], layerwise=True)
        size = f"{2 * rig.cache.spec.num_layers * rig.cache.spec.block_bytes} bytes"
        save.mark_layer_written(0)
        save.wait_layer(0, timeout_s=WAIT_S)
        assert repr(save) == f"<Transfer: offload of 2 blocks, {size}; in flight, 4 of 5 parts to be submitted>"
        save.cancel()
        assert repr(save) == f"<Transfer: offload of 2 blocks, {size}; offload was cancelled before layer 1 was moved>"
        load = scheduler.onload([7, 8], [0, 1])
        load.wait(WAIT_S)
        assert repr(load) == f"<Transfer: onload of 2 blocks, {size}; done>"
