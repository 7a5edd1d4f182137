"""Layerwise saves whose marks enqueue their layers: every byte on both sides, beside compute that writes them."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("cupy")

from paddle_kv import CancelledError, KVCacheSpec
from tests.gpu.scheduler_rig import WAIT_S, GpuRig
from tests.schedule.rig import make_spec, moved


@pytest.fixture(params=[1, 2], ids=["a_layer_an_event", "two_layers_an_event"])
def layers_per_event(request):
    return request.param


@pytest.fixture
def rig():
    return GpuRig(make_spec(num_layers=5))


def by_marks(save) -> bool:
    return save._movement.by_marks is not None


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]], ids=["in_order", "mixed"])
def test_each_layer_is_saved_behind_its_mark(rig, layers_per_event, order):
    with rig.scheduler(layers_per_event=layers_per_event) as scheduler:
        save = scheduler.offload([4, 1], [6, 9], layerwise=True)
        assert by_marks(save)
        for layer in order:
            rig.busy(milliseconds=5.0)
            rig.write(4, 0x40 + layer, layers=[layer])
            save.mark_layer_written(layer)
        for layer in order:
            save.wait_layer(layer)
            rig.write(4, 0x70 + layer, layers=[layer])  # behind the save of the layer
        save.wait(timeout_s=WAIT_S)
        rig.compute.synchronize()
    for name in rig.spec.tensor_names:
        for layer in order:
            rig.device[name][layer, 4] = 0x40 + layer
    rig.host = moved(rig.device, rig.host, [4, 1], [6, 9])
    for name in rig.spec.tensor_names:
        for layer in order:
            rig.device[name][layer, 4] = 0x70 + layer
    rig.check()


def test_a_load_behind_it_comes_as_it_is_marked(rig):
    with rig.scheduler() as scheduler:
        save = scheduler.offload([4], [6], layerwise=True)
        load = scheduler.onload([6], [2])
        for layer in range(5):
            save.mark_layer_written(layer)
            load.wait_layer(layer, timeout_s=WAIT_S)
        load.wait(timeout_s=WAIT_S)
        save.wait(timeout_s=WAIT_S)
    rig.host = moved(rig.device, rig.host, [4], [6])
    rig.device = moved(rig.host, rig.device, [6], [2])
    rig.check()


def test_a_cancel_leaves_what_is_not_marked(rig):
    with rig.scheduler() as scheduler:
        save = scheduler.offload([4], [6], layerwise=True)
        for layer in (0, 3):
            save.mark_layer_written(layer)
            save.wait_layer(layer, timeout_s=WAIT_S)
        rig.compute.synchronize()
        save.cancel()
        with pytest.raises(CancelledError):
            save.wait(timeout_s=WAIT_S)
        again = scheduler.offload([4], [6], layerwise=True)
        for layer in range(5):
            again.mark_layer_written(layer)
        again.wait(timeout_s=WAIT_S)
    rig.host = moved(rig.device, rig.host, [4], [6])
    rig.check()


def test_threads_that_mark_many_saves():
    spec = KVCacheSpec(num_layers=24, num_kv_heads=2, head_dim=16, block_size=4, dtype="float16")
    rig = GpuRig(spec, device_blocks=64, host_blocks=128)
    with rig.scheduler() as scheduler:
        for round_ in range(20):
            saves = [scheduler.offload([i, i + 8], [i + 16, i + 40], layerwise=True) for i in range(8)]
            assert all(map(by_marks, saves))

            def mark(first, saves=saves, round_=round_):
                for layer in range(spec.num_layers):
                    for save in saves[first::4]:
                        save.mark_layer_written((layer + round_) % spec.num_layers)

            threads = [threading.Thread(target=mark, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for save in saves:
                save.wait(timeout_s=WAIT_S)
    for i in range(8):
        rig.host = moved(rig.device, rig.host, [i, i + 8], [i + 16, i + 40])
    rig.check()
