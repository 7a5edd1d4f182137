"""Every engine moves the same blocks, bit for bit, and records a group's event no earlier than its last byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from paddle_kv.backend import transfer_queue  # noqa: E402
from paddle_kv.backend.work import ENGINES  # noqa: E402
from tests.gpu.delay import busy, occupy  # noqa: E402
from tests.gpu.engine_rig import GUARD, TO_DEVICE, TO_HOST, Pools, Queue  # noqa: E402

LONG_MS = 100.0

engines = pytest.mark.parametrize("engine", ENGINES)
both_ways = pytest.mark.parametrize("direction", [TO_HOST, TO_DEVICE])
ORDERS = ["layer_first", "block_first", "page_first"]
layouts = pytest.mark.parametrize("order", ORDERS)


@pytest.fixture
def queue(machine, paddle_stream):
    queue = Queue()
    yield queue
    queue.close()


def check(queue: Queue, pools: Pools, direction: int, ids, **how) -> None:
    queue.submit(pools, direction, *ids, **how)
    queue.finish()
    pools.check(direction, *ids, how.get("layers"))


@engines
@both_ways
@layouts
@pytest.mark.parametrize("layers_per_event", [1, 3, 9])
def test_tensors_of_unlike_sizes(queue, engine, direction, order, layers_per_event):
    pools = Pools([4099, 24, 32768], order=order)
    check(queue, pools, direction, pools.ids(11), engine=engine, layers_per_event=layers_per_event)
    pools.close()


@engines
@both_ways
@layouts
@pytest.mark.parametrize("block_bytes", [1, 15, 16, 17, 2048, 4096, 8192, 8200, 16384, 65536 + 16, 1 << 20])
def test_block_sizes(queue, engine, direction, order, block_bytes):
    pools = Pools([block_bytes], layers=3, device_blocks=7, host_blocks=9, order=order)
    check(queue, pools, direction, pools.ids(5), engine=engine)
    pools.close()


@engines
@both_ways
@pytest.mark.parametrize("misalignment", [1, 2, 8, 16])
def test_addresses_that_are_not_aligned(queue, engine, direction, misalignment):
    pools = Pools([4096, 20_000], misalignment=misalignment)
    check(queue, pools, direction, pools.ids(9), engine=engine)
    pools.close()


@engines
@both_ways
@layouts
@pytest.mark.parametrize(
    "ids",
    [
        ([], []),
        ([12], [0]),
        (range(13), range(4, 17)),  # one run, at the end of both pools
        ([5, 0, 1, 2, 3, 4, 12, 11, 6], [9, 10, 11, 12, 13, 14, 0, 1, 16]),  # a run within
        ([12, 10, 8, 6, 4], [0, 1, 2, 3, 4]),  # contiguous on the host alone
        ([3, 4, 5, 6, 7], [16, 0, 8, 4, 12]),  # contiguous on the device alone
    ],
    ids=["none", "one", "run", "mixed", "host-run", "device-run"],
)
def test_runs(queue, engine, direction, order, ids):
    pools = Pools([4096, 272], order=order)
    check(queue, pools, direction, ids, engine=engine)
    pools.close()


@engines
@both_ways
@layouts
def test_a_long_run(queue, engine, direction, order):
    """So many rows that lie apart on the host are one strided copy."""
    pools = Pools([4096, 272], device_blocks=45, host_blocks=50, order=order)
    check(queue, pools, direction, (range(5, 45), range(3, 43)), engine=engine)
    pools.close()


@engines
def test_one_source_for_many_targets(queue, engine):
    pools = Pools([4096])
    check(queue, pools, TO_DEVICE, ([3, 0, 7, 12], [5, 5, 5, 1]), engine=engine)
    pools.refill()
    check(queue, pools, TO_HOST, ([3, 3, 7, 3], [5, 0, 2, 16]), engine=engine)
    pools.close()


@engines
@both_ways
@layouts
def test_more_pieces_than_any_call_takes(queue, engine, direction, order):
    pools = Pools([528, 32], layers=2, device_blocks=9001, host_blocks=9203, order=order)
    check(queue, pools, direction, pools.ids(8999), engine=engine)
    pools.close()


@engines
@both_ways
def test_more_bytes_than_one_call_takes(queue, engine, direction):
    """Calls that follow each other may overlap; the transfer behind them may not."""
    pools = Pools([1 << 18], layers=6, device_blocks=131, host_blocks=137)  # 32 MiB a layer
    device_ids, host_ids = pools.ids(129)
    queue.submit(pools, direction, device_ids[:128], host_ids[:128], engine=engine)
    queue.submit(pools, direction, device_ids[128:], host_ids[128:], engine="copy_engine")
    queue.finish()
    pools.check(direction, device_ids, host_ids)
    pools.close()


@engines
@both_ways
@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("contiguous", [False, True], ids=["scattered", "contiguous"])
def test_bands_that_are_longer_than_a_call(queue, engine, direction, order, contiguous):
    """Layers 3 to 18 of 20; staging moves several of them together, and not all blocks of these in one call."""
    pools = Pools([4096, 4096], layers=20, device_blocks=1250, host_blocks=1300, order=order)
    device_ids, host_ids = pools.ids(1201)
    host_ids = list(range(17, 1218)) if contiguous else host_ids
    check(queue, pools, direction, (device_ids, host_ids), engine=engine, layers=range(3, 19), layers_per_event=3)
    pools.close()


@engines
@both_ways
def test_a_part_of_the_layers(queue, engine, direction):
    pools = Pools([4096, 100], layers=7)
    check(queue, pools, direction, pools.ids(6), engine=engine, layers=range(2, 5), layers_per_event=2)
    pools.close()


@engines
@both_ways
def test_transfers_one_behind_the_other_with_different_blocks(queue, engine, direction):
    """Counters, slots and tables of one call must not be seen by the next."""
    pools = Pools([8192, 528], layers=5, device_blocks=60, host_blocks=70)
    all_ids = [pools.ids(count) for count in (50, 1, 33, 7)]
    used: set[int] = set()
    chosen = []
    for device_ids, host_ids in all_ids:  # each block once: the expected bytes are the union
        pairs = [(d, h) for d, h in zip(device_ids, host_ids, strict=True) if not {("d", d), ("h", h)} & used]
        used |= {("d", d) for d, _ in pairs} | {("h", h) for _, h in pairs}
        chosen.append(pairs)
        queue.submit(pools, direction, [d for d, _ in pairs], [h for _, h in pairs], engine=engine)
    queue.finish()
    pairs = list(itertools.chain.from_iterable(chosen))
    pools.check(direction, [d for d, _ in pairs], [h for _, h in pairs])
    pools.close()


@both_ways
def test_a_slot_of_the_ring_is_not_used_again_too_early(queue, direction):
    """What empties the slots is held up: nowhere to run for the scatter, or a copy engine that is busy with others."""
    pools = Pools([9 << 19], layers=1, device_blocks=20, host_blocks=20)  # one in a slot: more in flight than slots
    device_ids, _ = pools.ids(18)
    other = cupy.cuda.Stream(non_blocking=True)
    size = 512 << 20
    target, source = cupy.cuda.PinnedMemory(size), cupy.cuda.Memory(size)
    occupy(other, 0)
    runtime.deviceSynchronize()
    if direction == TO_DEVICE:
        occupy(other, 40)
    else:
        runtime.memcpyAsync(target.ptr, source.ptr, size, runtime.memcpyDeviceToHost, other.ptr)
    check(queue, pools, direction, (device_ids, list(range(1, 19))), engine="staging")
    pools.close()


@both_ways
def test_engines_take_turns_on_a_stream(queue, direction):
    pools = Pools([8192], layers=3, device_blocks=64, host_blocks=64)
    device_ids, host_ids = pools.ids(64)
    for part, engine in enumerate([*ENGINES, *reversed(ENGINES)]):
        some = slice(part * 8, part * 8 + 8)
        queue.submit(pools, direction, device_ids[some], host_ids[some], engine=engine)
    queue.finish()
    pools.check(direction, device_ids, host_ids)
    pools.close()


@engines
@both_ways
@pytest.mark.parametrize("blocks", [(2_200, 9), (9, 2_200)], ids=["device", "host"])
def test_beyond_two_gibibytes(queue, engine, direction, blocks):
    pools = Pools([1 << 20], layers=1, device_blocks=blocks[0], host_blocks=blocks[1], fill=False)
    device_ids, host_ids = ([count - 1, 0, count // 2, count - 2] for count in blocks)
    pools.fill_blocks(device_ids, host_ids)
    check(queue, pools, direction, (device_ids, host_ids), engine=engine)
    pools.close()


@engines
@pytest.mark.parametrize("order", ORDERS[:2])
def test_an_event_stands_for_all_bytes_of_its_layers(queue, engine, order):
    """A copy that waits for the event of a group alone sees that group's blocks; the last block is looked at, too."""
    sizes = [65536, 4096] if order == "layer_first" else [20480, 4096]  # of the latter a band is three layers
    pools = Pools(sizes, layers=6, device_blocks=200, host_blocks=200, order=order)
    for layers_per_event in (1, 2, 5):
        pools.refill()
        device_ids, host_ids = pools.ids(200)
        events = queue.submit(pools, TO_DEVICE, device_ids, host_ids, engine=engine, layers_per_event=layers_per_event)
        _, device = pools.expected(TO_DEVICE, device_ids, host_ids, range(pools.layers))
        reader = cupy.cuda.Stream(non_blocking=True)
        seen = []
        for group, event in enumerate(events):
            assert transfer_queue.wait_stream(0, reader.ptr, event.ptr, 10.0)
            for layer in range(group * layers_per_event, min((group + 1) * layers_per_event, pools.layers)):
                for tensor in range(2):
                    copy = cupy.empty_like(pools.device[layer][tensor])
                    copy.data.copy_from_device_async(pools.device[layer][tensor].data, copy.nbytes, reader)
                    seen.append((copy, device[layer][tensor]))
        reader.synchronize()
        for copy, expected in seen:
            np.testing.assert_array_equal(copy.get(), expected)
    pools.close()


@engines
@pytest.mark.parametrize("order", ORDERS[:2])
def test_the_host_sees_all_bytes_behind_an_event(queue, engine, order):
    sizes = [65536, 4096] if order == "layer_first" else [20480, 4096]
    pools = Pools(sizes, layers=6, device_blocks=200, host_blocks=200, order=order)
    device_ids, host_ids = pools.ids(200)
    events = queue.submit(pools, TO_HOST, device_ids, host_ids, engine=engine)
    expected, _ = pools.expected(TO_HOST, device_ids, host_ids, range(pools.layers))
    for layer, event in enumerate(events):
        while not transfer_queue.query(0, event.ptr):
            pass
        for t, size in enumerate(pools.block_bytes):
            blocks = [slice(first := pools.offsets[layer][t] + i * pools.strides[t], first + size) for i in range(200)]
            np.testing.assert_array_equal(
                [pools.host[block] for block in blocks], [expected[block] for block in blocks]
            )
    queue.finish()
    pools.check(TO_HOST, device_ids, host_ids)
    pools.close()


@engines
@both_ways
def test_groups_wait_for_their_own_events_only(queue, engine, direction):
    """Layer 2 waits for a busy stream: layers 0 and 1 arrive before it, 2 and 3 behind."""
    pools = Pools([32768, 528])
    ids = pools.ids(9)
    producer, gate = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    check(queue, pools, direction, ids, engine=engine)  # whatever has to be made once is made
    pools.refill()
    busy(producer, LONG_MS)
    gate.record(producer)
    events = queue.submit(pools, direction, *ids, engine=engine, waits=[[], [], [gate], []])
    while not transfer_queue.query(0, events[1].ptr):
        pass
    assert not gate.done, "the delay is too short to show anything"
    if direction == TO_HOST:
        host, _ = pools.expected(direction, *ids, [0, 1])
        np.testing.assert_array_equal(pools.host, host)
    assert not transfer_queue.query(0, events[2].ptr)
    queue.finish()
    assert gate.done
    pools.check(direction, *ids)
    pools.close()


@engines
@both_ways
def test_later_work_on_the_stream_comes_behind(queue, engine, direction):
    pools = Pools([1 << 20], layers=2, device_blocks=40, host_blocks=40)
    device_ids, host_ids = pools.ids(40)
    queue.submit(pools, direction, device_ids, host_ids, engine=engine)
    transfer_queue.flush(queue.stream.ptr)
    if direction == TO_DEVICE:
        copy = cupy.empty_like(pools.device[1][0])
        copy.data.copy_from_device_async(pools.device[1][0].data, copy.nbytes, queue.stream)
        queue.stream.synchronize()
        np.testing.assert_array_equal(copy.get(), pools.expected(direction, device_ids, host_ids, [0, 1])[1][1][0])
    else:
        for tensor in pools.device:
            cupy.cuda.runtime.memsetAsync(tensor[0].data.ptr + GUARD, 0, tensor[0].nbytes - 2 * GUARD, queue.stream.ptr)
        queue.stream.synchronize()
        host, _ = pools.expected(direction, device_ids, host_ids, [0, 1])
        np.testing.assert_array_equal(pools.host, host)
    pools.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_transfer(data, machine, paddle_stream):
    queue = Queue()
    pools = Pools(
        data.draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=3)),
        layers=data.draw(st.integers(1, 5)),
        device_blocks=data.draw(st.integers(1, 40)),
        host_blocks=data.draw(st.integers(1, 40)),
        order=data.draw(st.sampled_from(ORDERS)),
        misalignment=data.draw(st.integers(0, 20)),
        seed=data.draw(st.integers(0, 1 << 30)),
    )
    count = data.draw(st.integers(0, min(pools.device_blocks, pools.host_blocks)))
    how = {
        "engine": data.draw(st.sampled_from(ENGINES)),
        "layers_per_event": data.draw(st.integers(1, 6)),
    }
    check(queue, pools, data.draw(st.sampled_from([TO_HOST, TO_DEVICE])), pools.ids(count), **how)
    pools.close()
    queue.close()
