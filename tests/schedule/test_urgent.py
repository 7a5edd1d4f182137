"""Urgent loads: on a stream of their own, ordered behind others only where they share a block."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.schedule import starting as scheduling

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
WAIT_S = 20.0


class Gated(CpuBackend):
    """Copies on the ordinary streams wait for a gate."""

    def __init__(self) -> None:
        self.gate, self.urgent_streams = threading.Event(), []

    def create_stream(self, *, urgent: bool = False):
        stream = super().create_stream(urgent=urgent)
        if urgent:
            self.urgent_streams.append(stream)
        return stream

    def copy_layers(self, binding, work, stream):
        if stream not in self.urgent_streams:
            stream.submit(self.gate.wait)
        super().copy_layers(binding, work, stream)


class Rig:
    def __init__(self) -> None:
        self.cache, self.pool, self.backend = DeviceCache(SPEC, 20, "cpu"), HostPool(SPEC, 30), Gated()
        random = np.random.default_rng(1)
        for name in SPEC.tensor_names:
            for layer in range(SPEC.num_layers):
                for block in range(30):
                    self.pool.view(name, layer, block)[...] = random.standard_normal(SPEC.block_shape(name))
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, backend=self.backend)

    def holds(self, device_block: int, host_block: int) -> bool:
        return all(
            np.array_equal(
                self.cache.tensor(name, layer)[device_block].numpy(), self.pool.view(name, layer, host_block)
            )
            for name in SPEC.tensor_names
            for layer in range(SPEC.num_layers)
        )


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.backend.gate.set()
    rig.scheduler.close(WAIT_S)


def test_it_overtakes(rig):
    bulk = rig.scheduler.onload(range(10), range(10))
    urgent = rig.scheduler.onload([12], [12], urgent=True)
    urgent.wait(WAIT_S)
    assert rig.holds(12, 12)
    assert not bulk.done()
    rig.backend.gate.set()
    bulk.wait(WAIT_S)
    assert all(rig.holds(block, block) for block in range(10))


@pytest.mark.parametrize("host_block", [7, 25])
def test_it_stays_behind_those_that_touch_its_blocks(rig, host_block):
    """The same device block: whatever is asked for last has to be there in the end."""
    bulk = rig.scheduler.onload(range(10), range(10))
    urgent = rig.scheduler.onload([host_block], [3], urgent=True)
    with pytest.raises(TimeoutError):
        urgent.wait(0.05)
    rig.backend.gate.set()
    urgent.wait(WAIT_S)
    assert bulk.done()
    assert rig.holds(3, host_block)


def test_a_later_one_stays_behind_an_urgent_one(rig):
    rig.scheduler.onload([1], [1], urgent=True)
    load = rig.scheduler.onload([2], [1])
    rig.backend.gate.set()
    load.wait(WAIT_S)
    assert rig.holds(1, 2)


def test_small_beside_bulk_is_urgent_by_itself(rig, monkeypatch):
    monkeypatch.setattr(scheduling, "URGENT_BESIDE_BYTES", 1)
    first = rig.scheduler.onload(range(16), range(16))
    assert not rig.backend.urgent_streams
    rig.scheduler.onload([20, 21, 22], [17, 18, 19])  # three are more than an eighth of 16
    rig.scheduler.onload([20], [16], urgent=False)
    assert not rig.backend.urgent_streams
    rig.scheduler.onload([20, 21], [17, 18]).cancel()
    small = rig.scheduler.onload([23], [16])
    assert len(rig.backend.urgent_streams) == 1
    rig.backend.gate.set()
    small.wait(WAIT_S)
    assert rig.holds(16, 23)
    first.wait(WAIT_S)


def test_exactly_eight_times_its_bytes_and_exactly_the_least_are_enough(rig, monkeypatch):
    monkeypatch.setattr(scheduling, "URGENT_BESIDE_BYTES", 16 * SPEC.num_layers * SPEC.block_bytes)
    rig.scheduler.onload(range(16), range(16))
    rig.scheduler.onload([20, 21], [16, 17])
    assert len(rig.backend.urgent_streams) == 1


def test_of_some_layers_only_those_are_its_bytes(rig, monkeypatch):
    monkeypatch.setattr(scheduling, "URGENT_BESIDE_BYTES", 1)
    rig.scheduler.onload(range(16), range(16))
    rig.scheduler.onload([20, 21, 22, 23], [16, 17, 18, 19], layers=[1])  # the bytes of two blocks
    assert len(rig.backend.urgent_streams) == 1


def test_by_itself_only_beside_a_millisecond_of_the_link(rig):
    rig.scheduler.onload(range(16), range(16))
    rig.scheduler.onload([23], [16])
    assert not rig.backend.urgent_streams


def test_an_event_of_the_direction_covers_urgent_loads(rig):
    rig.backend.gate.set()
    done = threading.Event()
    rig.scheduler.onload([1], [1], urgent=True).wait(WAIT_S)
    [stream] = rig.backend.urgent_streams
    stream.submit(done.wait)
    urgent = rig.scheduler.onload([2], [2], urgent=True)
    event = rig.scheduler.record_event("onload")
    assert not event.wait(0.05)
    done.set()
    assert event.wait(WAIT_S)
    assert urgent.done()


def test_an_event_of_the_other_direction_has_nothing_to_do_with_them(rig, monkeypatch):
    orders = []
    rig.backend.gate.set()
    rig.scheduler.onload([1], [1], urgent=True).wait(WAIT_S)
    monkeypatch.setattr(rig.backend, "wait_on_stream", lambda *arguments: orders.append(arguments))
    assert rig.scheduler.record_event("offload").wait(WAIT_S)
    assert orders == []


def test_saves_do_not_make_a_load_urgent(rig, monkeypatch):
    """They run on another stream: nothing queues behind them."""
    monkeypatch.setattr(scheduling, "URGENT_BESIDE_BYTES", 1)
    rig.scheduler.offload(range(16), range(16))
    rig.scheduler.onload([23], [17])
    assert not rig.backend.urgent_streams


def test_nothing_is_left(rig):
    rig.backend.gate.set()
    rig.scheduler.onload([1], [1], urgent=True)
    rig.scheduler.close(WAIT_S)
    stats = rig.scheduler.stats()
    assert [stats[name] for name in ("in_flight", "events", "streams")] == [0, 0, 0]


def test_loads_that_share_the_link_are_known(rig):
    """Nor does a save on its own stream change that."""
    before = rig.scheduler.onload([20], [15])
    rig.backend.gate.set()
    before.wait(WAIT_S)
    rig.backend.gate.clear()
    bulk = rig.scheduler.onload(range(5), range(5))
    urgent = rig.scheduler.onload([12], [12], urgent=True)
    save = rig.scheduler.offload([18], [28])
    urgent.wait(WAIT_S)
    behind = rig.scheduler.onload([13], [13])  # nothing else is on its way but what it queues behind
    rig.backend.gate.set()
    for transfer in (bulk, save, behind):
        transfer.wait(WAIT_S)
    shared = [one._movement.shares_link for one in (before, bulk, urgent, save, behind)]
    assert shared == [False, True, True, False, False]


def test_a_load_beside_an_urgent_one_that_is_not_over_shares_the_link(rig):
    rig.scheduler.onload([1], [1], urgent=True).wait(WAIT_S)
    stream = rig.backend.urgent_streams[0]
    stream.submit(rig.backend.gate.wait)
    urgent = rig.scheduler.onload([2], [2], urgent=True)
    beside = rig.scheduler.onload([3], [3])
    assert urgent._movement.shares_link
    assert beside._movement.shares_link
    rig.backend.gate.set()
    for transfer in (urgent, beside):
        transfer.wait(WAIT_S)


def test_loads_of_another_device_have_a_link_of_their_own(rig):
    with LayerwiseScheduler(DeviceCache(SPEC, 20, "cpu"), rig.pool, backend="cpu") as other:
        bulk = rig.scheduler.onload(range(5), range(5))
        urgent = other.onload([12], [12], urgent=True)
        small = other.onload([13], [13])
        rig.backend.gate.set()
        for transfer in (bulk, urgent, small):
            transfer.wait(WAIT_S)
        assert not bulk._movement.shares_link
