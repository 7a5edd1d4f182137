"""The debug mode: an operator that touches a block in flight, on a stream that has not waited for it, raises."""

from __future__ import annotations

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.ops import copy_blocks
from paddle_kv.testing.simulator import Simulation
from paddle_kv.tracking import memories
from tests.schedule.rig import WAIT_S, Rig

LAYERS = 5
MESSAGE = "is used while a transfer is"


def access(pool, block: int, layer: int, *, writing: bool, stream: object = None, name: str = "key") -> None:
    """What an operator asks that gets the tensor of a layer."""
    address = pool.tensor(name, layer).data_ptr()
    memories.check_access(address, [block], writing, stream)


def refused(*arguments: object, verb: str, **named: object) -> None:
    with pytest.raises(RuntimeError, match=f"block {arguments[1]} of layer {arguments[2]} {MESSAGE} {verb} it"):
        access(*arguments, **named)


def test_an_operator_asks(rig, copies, monkeypatch):
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    layer = [rig.cache.tensor("key", 3)], [rig.cache.tensor("value", 3)]
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("onload", 3)
        load = scheduler.onload([4], [1])
        for pairs in ([(1, 2)], [(2, 1)]):
            with pytest.raises(RuntimeError, match=f"block 1 of layer 3 {MESSAGE} writing it"):
                copy_blocks(*layer, pairs)
        copy_blocks(*layer, [(2, 6)])
        copies.go_on()
        load.wait(WAIT_S)
        copy_blocks(*layer, [(1, 2)])


@pytest.mark.parametrize("name", ["key", "value", "flag"])
def test_layer_by_layer_behind_the_waits(rig, copies, name):
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        copies.hold("onload", 2, 4)
        load = scheduler.onload([4, 5], [1, 7])
        for layer in range(LAYERS):
            refused(rig.cache, 7, layer, writing=False, verb="writing", name=name)
            access(rig.cache, 2, layer, writing=True, name=name)
        load.wait_layer(1, timeout_s=WAIT_S)
        for layer, waited_for in enumerate([True, True, False, False, False]):
            if waited_for:
                access(rig.cache, 7, layer, writing=True, name=name)
            else:
                refused(rig.cache, 7, layer, writing=True, verb="writing", name=name)
        copies.go_on()
        load.wait_on(timeout_s=WAIT_S)
        for layer in range(LAYERS):
            access(rig.cache, 7, layer, writing=True, name=name)


def test_what_is_being_saved_may_be_read(rig, copies):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("offload", 0)
        save = scheduler.offload([1], [4])
        access(rig.cache, 1, 4, writing=False)
        refused(rig.cache, 1, 4, writing=True, verb="reading")
        copies.go_on()
        save._scheduler.backend.wait(save._movement.last_event, WAIT_S)
        access(rig.cache, 1, 4, writing=True)  # over, though nobody has asked


def test_a_layer_that_is_not_marked_yet_may_be_written(rig, copies):
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("offload", 2)
        save = scheduler.offload([1], [4], layerwise=True)
        save.mark_layer_written(2)
        for layer in (0, 1, 3, 4):
            access(rig.cache, 1, layer, writing=True)
        refused(rig.cache, 1, 2, writing=True, verb="reading")
        copies.go_on()
        save.cancel()


def test_memory_without_layers():
    """Where the layers of a block lie together, all of them count."""
    rig = Rig(layout="block_first")
    simulation = Simulation()
    with LayerwiseScheduler(rig.cache, rig.pool, backend=simulation.backend()) as scheduler:
        load = scheduler.onload([4], [1])
        address = rig.pool.pointer("key", 1)
        memories.check_access(address, [3], True, None)
        memories.check_access(address, [4], False, None)
        with pytest.raises(RuntimeError, match=f"block 4 of layer -1 {MESSAGE} reading it"):
            memories.check_access(address, [4], True, None)
        load.wait_layer(1)
        with pytest.raises(RuntimeError, match=MESSAGE):
            memories.check_access(address, [4], True, simulation.compute_stream)
        load.wait_on()
        memories.check_access(address, [4], True, simulation.compute_stream)
        save = scheduler.offload([2], [6], layerwise=True)
        with pytest.raises(RuntimeError, match=f"block 6 of layer -1 {MESSAGE} writing it"):
            memories.check_access(address, [6], False, simulation.compute_stream)
        save.cancel()


def test_each_stream_waits_for_itself(rig):
    simulation = Simulation()
    side = simulation.stream("side")
    with LayerwiseScheduler(rig.cache, rig.pool, backend=simulation.backend()) as scheduler:
        load = scheduler.onload([4], [1])
        load.wait_layer(2)
        load.wait_layer(3)
        load.wait_layer(3, stream=side)
        for stream, layers in ((simulation.compute_stream, (2, 3)), (side, (3,)), (None, ())):
            for layer in range(LAYERS):
                if layer in layers:
                    access(rig.cache, 1, layer, writing=True, stream=stream)
                else:
                    refused(rig.cache, 1, layer, writing=True, stream=stream, verb="writing")


def test_views_that_begin_at_a_later_block(rig, copies):
    """A tensor that shows only the last blocks of a cache: its block 0 is another one of the pool's."""
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        copies.hold("onload", 0)
        scheduler.onload([4], [5])
        start = rig.cache.tensor("key", 0).data_ptr()
        stride_bytes = rig.spec.tensor_block_bytes("key")
        memories.check_access(start + 3 * stride_bytes, [5], True, None)
        with pytest.raises(RuntimeError, match="block 5 of layer 0"):
            memories.check_access(start + 3 * stride_bytes, [2], True, None)
        memories.check_access(start + 13 * stride_bytes, [5 - 13], True, None)  # behind the tensor
        copies.go_on()
