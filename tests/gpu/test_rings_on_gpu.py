"""Layers that share buffers in turn, on a GPU: what each layer reads, and what is saved of it, byte for byte.

Each wait is seen to matter by a run that leaves it out: then a layer has to read, or to save, what it must not.
"""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from paddle_kv import CancelledError, DeviceCache, HostPool, LayerwiseScheduler, TransferError  # noqa: E402
from paddle_kv.integrations import ForwardPass  # noqa: E402
from paddle_kv.schedule import rings  # noqa: E402
from tests.gpu import delay  # noqa: E402
from tests.gpu.scheduler_rig import WAIT_S, Watched, WithoutComputeEvent, WithoutLayerWait, _view  # noqa: E402
from tests.schedule.rig import make_spec, pool_memory, random_bits, set_pool  # noqa: E402

SPEC = make_spec(num_layers=7)
DEVICE_BLOCKS, HOST_BLOCKS = 9, 11
POISON = 0xDE


class GpuRing:
    """``host`` is what the pool should hold. Compute reads with copies and writes with fills."""

    def __init__(self, layer_buffers, backend, **options):
        self.cache = DeviceCache(SPEC, DEVICE_BLOCKS, "gpu:0", layer_buffers=layer_buffers)
        self.pool = HostPool(SPEC, HOST_BLOCKS)
        self.host = random_bits(SPEC, HOST_BLOCKS, 2)
        set_pool(self.pool, self.host)
        self.compute = cupy.cuda.Stream(non_blocking=True)
        self.buffers = {
            name: [_view(self.cache.tensor(name, buffer), SPEC) for buffer in range(layer_buffers)]
            for name in SPEC.tensor_names
        }
        for arrays in self.buffers.values():
            for array in arrays:
                array.fill(POISON)
        delay.warm_up()
        runtime.deviceSynchronize()
        self.backend = backend()
        self.scheduler = LayerwiseScheduler(
            self.cache, self.pool, backend=self.backend, compute_stream=self.compute, **options
        )
        self.value = 0

    def run(self, reads, writes, *, busy_ms=4.0, late=(), late_ms=200.0):
        """``reads`` and ``writes``: device block -> host block. Returns what was read that should not have been.
        ``late``: positions of streams that are held for a while from the beginning of the pass."""
        seen = {
            (name, layer, device_id): cupy.full(SPEC.tensor_block_bytes(name), 1, cupy.uint8)
            for name in SPEC.tensor_names
            for layer in range(SPEC.num_layers)
            for device_id in reads
        }
        expected = {
            (name, layer, device_id): self.host[name][layer, reads[device_id]].copy() for name, layer, device_id in seen
        }
        runtime.deviceSynchronize()
        for stream in late:
            delay.busy(self.backend.streams[stream], late_ms)
        load = self.scheduler.onload(list(reads.values()), list(reads))
        save = self.scheduler.offload(list(writes), list(writes.values()), layerwise=True)
        with ForwardPass([load], [save], timeout_s=WAIT_S) as layers:
            for layer in range(SPEC.num_layers):
                with layers.layer(layer):
                    delay.busy(self.compute, busy_ms)
                    for name in SPEC.tensor_names:
                        self.touch(name, layer, reads, writes, seen)
        load.wait(WAIT_S)
        runtime.deviceSynchronize()
        return [key for key, array in seen.items() if not np.array_equal(array.get(), expected[key])]

    def touch(self, name, layer, reads, writes, seen):
        size_bytes = SPEC.tensor_block_bytes(name)
        first = self.buffers[name][layer % self.cache.layer_buffers].data.ptr
        stream = self.compute.ptr
        for device_id in reads:
            target = seen[name, layer, device_id].data.ptr
            source = first + device_id * size_bytes
            runtime.memcpyAsync(target, source, size_bytes, runtime.memcpyDeviceToDevice, stream)
        for device_id, host_id in writes.items():
            self.value = self.value % 251 + 1
            start = size_bytes // 2 if device_id in reads else 0  # a block that was partly filled
            runtime.memsetAsync(first + device_id * size_bytes + start, self.value, size_bytes - start, stream)
            self.host[name][layer, host_id, start:] = self.value

    def saved(self):
        self.scheduler.drain(WAIT_S)
        found = pool_memory(self.pool)
        return all(np.array_equal(found[name], self.host[name]) for name in SPEC.tensor_names)

    def untouched(self, used):
        others = [block for block in range(DEVICE_BLOCKS) if block not in used]
        return all(
            (array.get().reshape(DEVICE_BLOCKS, -1)[others] == POISON).all()
            for arrays in self.buffers.values()
            for array in arrays
        )

    def close(self):
        self.scheduler.close(WAIT_S)
        self.pool.close()


@pytest.fixture
def made():
    rigs = []

    def make(*arguments, **options):
        rigs.append(GpuRing(*arguments, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def prompt(rig, late=()):
    """Three passes; a block that was partly filled is read, written on, and saved once more. What was read wrong."""
    wrong = []
    for reads, writes in (({}, {4: 3, 0: 7}), ({4: 3, 0: 7}, {0: 7, 6: 1}), ({0: 3, 6: 7, 4: 1}, {4: 1, 2: 9})):
        wrong += rig.run(reads, writes, busy_ms=0.1 if late else 4.0, late=late, late_ms=60.0)
    return wrong


@pytest.mark.parametrize("engine", ["copy_engine", "kernel", "staging"])
@pytest.mark.parametrize(("layer_buffers", "late"), [(2, (1,)), (2, (0,)), (3, ()), (6, (0, 1))])
def test_every_byte_of_a_prompt_in_passes(made, layer_buffers, late, engine):
    rig = made(layer_buffers, Watched, engine=engine)
    assert prompt(rig, late) == []
    assert rig.saved()
    assert rig.untouched({0, 2, 4, 6})


def test_a_layer_waits_until_the_one_in_its_buffer_was_read(made):
    rig = made(2, WithoutComputeEvent)
    rig.run({}, {4: 3, 0: 7})
    assert rig.run({4: 3, 0: 7}, {6: 1}, busy_ms=30.0) != []


def test_a_layer_is_read_behind_its_load(made):
    rig = made(2, WithoutLayerWait)
    assert rig.run({4: 3}, {6: 1}, busy_ms=0.1, late=[0]) != []


def test_a_layer_comes_behind_the_save_of_what_the_model_wrote_to_its_blocks(made, monkeypatch):
    rig = made(2, Watched)
    monkeypatch.setattr(rings, "note_savers", lambda movement: None)
    rig.run({4: 3}, {4: 3}, busy_ms=0.1, late=[1])
    assert not rig.saved()


def test_compute_writes_behind_the_save_of_the_layer_in_the_buffer(made, monkeypatch):
    rig = made(2, Watched)
    monkeypatch.setattr(ForwardPass, "_wait_for_buffer", lambda *_: None)
    rig.run({}, {4: 3}, busy_ms=0.1, late=[1])
    assert not rig.saved()


def test_a_pass_that_is_left_ends_and_the_next_one_is_right(made):
    rig = made(3, Watched)
    before = {name: array.copy() for name, array in rig.host.items()}
    load = rig.scheduler.onload([3, 5], [1, 4])
    save = rig.scheduler.offload([6], [8], layerwise=True)
    with pytest.raises(KeyError), ForwardPass([load], [save], timeout_s=WAIT_S) as layers:
        with layers.layer(0):
            pass
        raise KeyError
    load.wait_over(WAIT_S)
    save.wait_over(WAIT_S)
    with pytest.raises((CancelledError, TransferError)):
        load.wait(WAIT_S)
    rig.pool.mark_rewritten([8])
    rig.cache.mark_rewritten([1, 4])
    found = pool_memory(rig.pool)
    for name, array in before.items():
        array[:, 8] = found[name][:, 8]  # of which nobody knows what it holds
    rig.host = before
    assert prompt(rig) == []
    assert rig.saved()
