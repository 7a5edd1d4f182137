"""On which stream the swap operators run, what they are ordered after, and what may be freed when.

A stream is kept busy for far longer than any copy here takes. What comes late then has waited for that stream.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.gpu.delay import busy, cupy_stream
from tests.gpu.paddle_gpu import PINNED, pinned_tensors
from tests.machine import Machine
from tests.ops.swap_conformance import ALL_LAYERS, PER_LAYER, Layer, call
from tests.reference.swap import TO_DEVICE, TO_HOST

LONG_MS = 150.0
ASYNC = [
    "swap_cache_per_layer_async",
    "swap_cache_all_layers_async",
    pytest.param("transfer_blocks", marks=pinned_tensors),
]
IDS = ([4, 0, 2], [1, 5, 3])


class Swap:
    """One asynchronous call whose result is seen on the host, without any stream being waited for."""

    def __init__(self, machine: Machine, op: str, block_bytes: int = 4099) -> None:
        self.op, self.layer = op, Layer(machine, 5, 6, (1, block_bytes), "uint8")
        if op == "transfer_blocks":
            pinned = self.layer.host_bits.reshape(6, 1, block_bytes)
            self.target = paddle.to_tensor(pinned, place=PINNED)
        self.run()  # loads the kernels
        machine.synchronize()
        self.landed()[:] = 0

    def run(self, **stream: Any) -> None:
        if self.op == "transfer_blocks":
            ops.transfer_blocks(self.layer.cache.tensor, self.target, list(zip(*IDS, strict=True)), **stream)
        else:
            call(self.op, [self.layer], *IDS, TO_HOST, **stream)

    def landed(self) -> np.ndarray:
        """The host blocks as they are now."""
        address = self.target.data_ptr() if self.op == "transfer_blocks" else self.layer.host.address
        block_bytes = self.layer.host_bits.shape[1]
        array_type = np.ctypeslib.ctypes.c_uint8 * (6 * block_bytes)
        return np.ctypeslib.as_array(array_type.from_address(address)).reshape(6, block_bytes)

    def has_landed(self) -> bool:
        expected = np.zeros_like(self.landed())
        expected[IDS[1]] = self.layer.cache_bits[IDS[0]]
        if (self.landed() == expected).all():
            return True
        assert not self.landed().any(), "half a copy"
        return False


def event_behind(stream: Any) -> Any:
    return (cupy_stream(stream) if isinstance(stream, int) else stream).record()


@pytest.mark.parametrize("op", ASYNC)
@pytest.mark.parametrize("form", ["cupy", "handle"])
@pytest.mark.parametrize("block_bytes", [4099, 300_000], ids=["kernel", "copy_engine"])
class TestNamedStream:
    def test_the_copy_waits_for_the_named_stream(
        self, machine: Machine, op: str, form: str, block_bytes: int, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, op, block_bytes)
        busy(other_stream, LONG_MS)
        swap.run(stream=other_stream if form == "cupy" else other_stream.ptr)
        behind = event_behind(other_stream)
        cupy_stream(paddle_stream).synchronize()
        time.sleep(0.01)
        assert not behind.done
        assert not swap.has_landed(), "it ran on another stream than the one named"
        other_stream.synchronize()
        assert swap.has_landed()

    @pytest.mark.concurrent_kernels
    def test_the_copy_does_not_wait_for_paddles_stream(
        self, machine: Machine, op: str, form: str, block_bytes: int, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, op, block_bytes)
        busy(paddle_stream, LONG_MS)
        behind_paddle = event_behind(paddle_stream)
        swap.run(stream=other_stream if form == "cupy" else other_stream.ptr)
        other_stream.synchronize()
        landed = swap.has_landed()
        assert not behind_paddle.done, "the delay is too short to show anything"
        assert landed
        machine.synchronize()


@pytest.mark.parametrize("op", ASYNC)
class TestNoStreamNamed:
    def test_it_runs_on_paddles_stream(self, machine: Machine, op: str, paddle_stream: int, other_stream: Any) -> None:
        swap = Swap(machine, op)
        busy(paddle_stream, LONG_MS)
        swap.run()
        other_stream.synchronize()
        time.sleep(0.01)
        assert not swap.has_landed()
        cupy_stream(paddle_stream).synchronize()
        assert swap.has_landed()

    @pytest.mark.concurrent_kernels
    def test_it_does_not_wait_for_another_stream(
        self, machine: Machine, op: str, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, op)
        busy(other_stream, LONG_MS)
        behind_other = event_behind(other_stream)
        swap.run()
        cupy_stream(paddle_stream).synchronize()
        landed = swap.has_landed()
        assert not behind_other.done, "the delay is too short to show anything"
        assert landed

    @pytest.mark.concurrent_kernels
    def test_inside_a_cupy_stream_it_runs_there(
        self, machine: Machine, op: str, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, op)
        with other_stream:
            busy(other_stream, LONG_MS)
            swap.run()
        cupy_stream(paddle_stream).synchronize()
        time.sleep(0.01)
        assert not swap.has_landed()
        other_stream.synchronize()
        assert swap.has_landed()

    def test_inside_a_cupy_stream_it_sees_what_paddles_stream_writes(
        self, machine: Machine, op: str, paddle_stream: int, other_stream: Any
    ) -> None:
        import cupy

        swap = Swap(machine, op)
        cache, bits = swap.layer.cache.tensor, swap.layer.cache_bits
        busy(paddle_stream, LONG_MS)
        cupy.cuda.runtime.memsetAsync(cache.data_ptr(), 0xA7, bits.size, paddle_stream)
        with other_stream:
            swap.run()
        other_stream.synchronize()
        bits[:] = 0xA7
        assert swap.has_landed()

    @pytest.mark.concurrent_kernels
    def test_a_stream_that_is_named_inside_a_cupy_stream_wins(
        self, machine: Machine, op: str, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, op)
        busy(other_stream, LONG_MS)
        behind_other = event_behind(other_stream)
        with other_stream:
            swap.run(stream=paddle_stream)
        cupy_stream(paddle_stream).synchronize()
        landed = swap.has_landed()
        assert not behind_other.done, "the delay is too short to show anything"
        assert landed


@pytest.mark.parametrize("op", ASYNC)
@pytest.mark.parametrize("kind", [list, lambda ids: np.array(ids, "int64")])
def test_ids_may_be_overwritten_and_freed_right_after_the_call(
    machine: Machine, op: str, kind: Any, paddle_stream: int, other_stream: Any
) -> None:
    swap = Swap(machine, op)
    layer = swap.layer
    device_ids, host_ids = kind(IDS[0]), kind(IDS[1])
    pairs = kind(np.stack([device_ids, host_ids], axis=1).tolist())
    busy(other_stream, LONG_MS)
    if op == "transfer_blocks":
        ops.transfer_blocks(layer.cache.tensor, swap.target, pairs, stream=other_stream)
    else:
        call(op, [layer], device_ids, host_ids, TO_HOST, stream=other_stream)
    device_ids[:], host_ids[:] = device_ids[::-1], host_ids[::-1]
    pairs[:] = pairs[::-1]
    device_ids[0], pairs[0] = 3, [3, 4] if isinstance(pairs, list) else np.array([3, 4])
    del device_ids, host_ids, pairs
    litter = [np.full(n, 3, np.int64) for n in range(1, 400)] + [[3] * n for n in range(1, 400)]
    assert not swap.has_landed()
    other_stream.synchronize()
    assert swap.has_landed()
    del litter


@pytest.mark.parametrize("op", [PER_LAYER[0], ALL_LAYERS[0]])
@pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])
def test_the_synchronous_operators_return_when_the_blocks_have_arrived(
    machine: Machine, op: str, mode: int, paddle_stream: int, other_stream: Any
) -> None:
    layer = Layer(machine, 5, 6, (1, 4099), "uint8")
    for stream in (paddle_stream, other_stream):
        started = time.perf_counter()
        busy(stream, LONG_MS)
        if stream is other_stream:
            with other_stream:
                call(op, [layer], *IDS, mode)
        else:
            call(op, [layer], *IDS, mode)
        assert time.perf_counter() - started > 0.9 * LONG_MS / 1000
        assert (cupy_stream(stream) if isinstance(stream, int) else stream).done
        layer.check(*IDS, mode)


@pytest.mark.parametrize("op", ASYNC)
def test_asynchronous_operators_do_not_block_the_caller(
    machine: Machine, op: str, paddle_stream: int, other_stream: Any
) -> None:
    swap = Swap(machine, op)
    swap.run(stream=other_stream)
    busy(other_stream, LONG_MS)
    behind = event_behind(other_stream)
    for _ in range(10):
        swap.run(stream=other_stream)
    assert not behind.done, "ten calls took as long as the delay"
    other_stream.synchronize()
    assert swap.has_landed()


class TestGraphCapture:
    """Ids are kernel parameters, copied into the graph: an asynchronous call on a named stream can be captured."""

    @pytest.mark.parametrize("op", ASYNC)
    @pytest.mark.parametrize("block_bytes", [4099, 300_000], ids=["kernel", "copy_engine"])
    def test_each_replay_copies_again(
        self, machine: Machine, op: str, block_bytes: int, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, op, block_bytes)
        other_stream.begin_capture()
        swap.run(stream=other_stream)
        graph = other_stream.end_capture()
        other_stream.synchronize()
        assert not swap.has_landed()
        for _ in range(2):
            swap.landed()[:] = 0
            graph.launch(other_stream)
            other_stream.synchronize()
            assert swap.has_landed()

    @pytest.mark.parametrize("op", [PER_LAYER[0], ALL_LAYERS[0]])
    @pytest.mark.parametrize("captured", ["cupy", "paddle"])
    def test_synchronous_operators_are_refused_and_the_capture_lives(
        self, machine: Machine, op: str, captured: str, paddle_stream: int, other_stream: Any
    ) -> None:
        swap = Swap(machine, f"{op}_async")
        stream = other_stream if captured == "cupy" else cupy_stream(paddle_stream)
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="captured into a CUDA graph"):
                if captured == "cupy":
                    with stream:
                        call(op, [swap.layer], *IDS, TO_HOST)
                else:
                    call(op, [swap.layer], *IDS, TO_HOST)
            swap.run(stream=stream.ptr)
        finally:
            graph = stream.end_capture()
        assert not swap.has_landed()
        graph.launch(stream)
        stream.synchronize()
        assert swap.has_landed()


def test_the_current_device_is_left_as_it_was(machine: Machine) -> None:
    import cupy

    devices = cupy.cuda.runtime.getDeviceCount()
    layer = Layer(machine, 5, 6, (1, 4099), "uint8")
    for device in range(devices):
        with cupy.cuda.Device(device):
            call(PER_LAYER[0], [layer], *IDS, TO_HOST)
            assert cupy.cuda.runtime.getDevice() == device
            with pytest.raises(IndexError):
                call(PER_LAYER[0], [layer], [5], [0], TO_HOST)
            assert cupy.cuda.runtime.getDevice() == device
    layer.check(*IDS, TO_HOST)


def test_an_error_is_not_reported_again_by_the_next_call(machine: Machine) -> None:
    import cupy

    layer = Layer(machine, 5, 6, (1, 4099), "uint8")
    with pytest.raises(ValueError, match="not all host memory"):
        call(PER_LAYER[0], [layer], *IDS, TO_HOST, pointers=[layer.host_bits.ctypes.data])
    assert cupy.cuda.runtime.runtimeGetVersion() > 0
    call(PER_LAYER[0], [layer], *IDS, TO_HOST)
    layer.check(*IDS, TO_HOST)
