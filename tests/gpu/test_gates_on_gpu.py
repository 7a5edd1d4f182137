"""Layer waits and layer marks inside captured CUDA graphs: what a replay reads, and what is saved of it, byte for byte.

Each wait is seen to matter by gates that leave it out: then the replay has to read what it must not read.
"""

from __future__ import annotations

import time

import numpy as np
import paddle
import pytest

cupy = pytest.importorskip("cupy")

from cupy.cuda import runtime  # noqa: E402

from paddle_kv import CancelledError, CaptureError, ClosedError, TransferError, streams  # noqa: E402
from paddle_kv.backend import transfer_queue  # noqa: E402
from paddle_kv.backend.cuda_gates import CudaGates  # noqa: E402
from tests.gpu.scheduler_rig import (  # noqa: E402
    ONLOAD,
    WAIT_S,
    GpuRig,
    Watched,
    block,
    filled,
    is_equal,
)
from tests.schedule.rig import make_spec  # noqa: E402

LAYERS = 3
READ, WRITTEN = 3, 6  # device blocks of the graph
TIMEOUT_S = 20.0
NEW = 0x5A


class _OpenGates(CudaGates):
    """Lets every layer through at once."""

    def let_through(self, first_layer, turn, waits):
        super().let_through(first_layer, turn, [[] for _ in waits])


class _UnmarkedGates(CudaGates):
    """Records the events of marks without a wait for the marks."""

    def record_marks(self, turn, events):
        for of_layer in events:
            for event in of_layer:
                runtime.eventRecord(event, runtime.streamPerThread)


class _OneTurnGates(CudaGates):
    """The second replay has the turn of the first: its gates were opened by that one."""

    def arm(self, stream, load_turn, save_turn):
        super().arm(stream, min(load_turn, 1), save_turn)


class WithoutLoadWait(Watched):
    def create_gates(self, num_layers, timeout_s):
        return _OpenGates(0, num_layers, timeout_s)


class WithoutMarkWait(Watched):
    def create_gates(self, num_layers, timeout_s):
        return _UnmarkedGates(0, num_layers, timeout_s)


class WithoutTurns(Watched):
    def create_gates(self, num_layers, timeout_s):
        return _OneTurnGates(0, num_layers, timeout_s)


@pytest.fixture
def rig():
    return GpuRig(make_spec(num_layers=LAYERS))


def captured(rig, gates, *, stream=None, joined=False):
    """Each layer reads block READ aside and then fills block WRITTEN. Joined: one kernel marks and waits."""
    capturing = rig.compute if stream is None else stream
    capturing.begin_capture(runtime.streamCaptureModeGlobal)
    for layer in range(LAYERS):
        if layer == 0 or not joined:
            gates.wait(layer, stream=capturing)
        rig.read(READ, layers=[layer], stream=capturing.ptr)
        rig.write(WRITTEN, NEW, layers=[layer], stream=capturing.ptr)
        gates.mark_and_wait(layer, stream=capturing) if joined else gates.mark(layer, stream=capturing)
    graph = capturing.end_capture()
    graph.upload(capturing)
    runtime.deviceSynchronize()
    return graph


def late_load(rig, scheduler, backend):
    """Of host block 5."""
    rig.busy(backend.streams[ONLOAD])
    return scheduler.onload([5], [READ])


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("layers_per_event", [1, 2])
@pytest.mark.parametrize("backend_type", [Watched, WithoutLoadWait])
def test_a_replay_reads_what_its_load_brings(rig, backend_type, layers_per_event, joined):
    backend = backend_type()
    with rig.scheduler(backend, layers_per_event=layers_per_event) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = captured(rig, gates, joined=joined)
        graph.launch(rig.compute)
        assert is_equal(rig.what_was_read(), block(rig.device, READ))  # not armed: open
        load = late_load(rig, scheduler, backend)
        gates.arm(loads=[load])
        graph.launch(rig.compute)
        seen = rig.what_was_read()
        load.wait(WAIT_S)
        expected = block(rig.host if backend_type is Watched else rig.device, 5 if backend_type is Watched else READ)
        assert is_equal(seen, expected)
        graph.launch(rig.compute)  # the same graph without a load
        assert is_equal(rig.what_was_read(), block(rig.host, 5))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("backend_type", [Watched, WithoutTurns])
def test_replays_in_flight_read_each_its_own_load(rig, backend_type, joined):
    backend = backend_type()
    aside = {name: [cupy.empty_like(one) for one in arrays] for name, arrays in rig.seen.items()}
    with rig.scheduler(backend) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = captured(rig, gates, joined=joined)
        loads = []
        for host in (5, 8):
            rig.busy(backend.streams[ONLOAD], 400.0)  # far longer than the host takes for both
            loads.append(scheduler.onload([host], [READ]))
            transfer_queue.flush(backend.streams[ONLOAD].ptr)  # or the second delay could come before the first load
            gates.arm(loads=loads[-1:])
            graph.launch(rig.compute)
            if host == 5:
                for name, arrays in rig.seen.items():
                    for one, other in zip(arrays, aside[name], strict=True):
                        runtime.memcpyAsync(
                            other.data.ptr, one.data.ptr, one.nbytes, runtime.memcpyDeviceToDevice, rig.compute.ptr
                        )
        second = rig.what_was_read()
        first = {name: np.stack([array.get() for array in arrays]) for name, arrays in aside.items()}
        for load in loads:
            load.wait(WAIT_S)
        assert is_equal(first, block(rig.host, 5))
        assert is_equal(second, block(rig.host, 8 if backend_type is Watched else 5))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("backend_type", [Watched, WithoutMarkWait])
def test_a_save_has_what_the_replay_wrote(rig, backend_type, joined):
    backend = backend_type()
    with rig.scheduler(backend) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = captured(rig, gates, joined=joined)
        saves = [scheduler.offload([WRITTEN], [host], layerwise=True) for host in (7, 9)]
        gates.arm(saves=saves)
        rig.busy(None)
        graph.launch(rig.compute)
        for save in saves:
            save.wait(WAIT_S)
        for host in (7, 9):
            right = filled(rig.device, NEW) if backend_type is Watched else block(rig.device, WRITTEN)
            assert is_equal(block(rig.host_now(), host), right)


def test_a_graph_is_launched_before_its_load_is_submitted(rig):
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = captured(rig, gates)
        save = scheduler.offload([4], [10], layerwise=True)  # the load reads what it will bring
        load = scheduler.onload([10], [READ])
        gates.arm(loads=[load])
        graph.launch(rig.compute)
        side = cupy.cuda.Stream(non_blocking=True)
        time.sleep(0.05)
        assert not rig.compute.done
        for layer in range(LAYERS):
            save.mark_layer_written(layer, stream=side)
        seen = rig.what_was_read()
        load.wait(WAIT_S)
        assert is_equal(seen, block(rig.device, 4))


@pytest.mark.parametrize("joined", [False, True])
def test_several_graphs_loads_and_a_save_in_one_replay(rig, joined):
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graphs = [captured(rig, gates, joined=joined) for _ in range(2)]
        for turn, host in enumerate((5, 2, 8, 0)):
            loads = [scheduler.onload([host], [READ]), scheduler.onload([1], [7])]
            save = scheduler.offload([WRITTEN], [7], layerwise=True)
            gates.arm(loads=loads, saves=[save])
            graphs[turn % 2].launch(rig.compute)
            for transfer in (*loads, save):
                transfer.wait(WAIT_S)
            assert is_equal(rig.what_was_read(), block(rig.host, host))
            assert is_equal(block(rig.device_now(), 7), block(rig.host, 1))
            assert is_equal(block(rig.host_now(), 7), filled(rig.device, NEW))


def test_untouched_bytes_stay(rig):
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = captured(rig, gates)
        load, save = scheduler.onload([5], [READ]), scheduler.offload([WRITTEN], [2], layerwise=True)
        gates.arm(loads=[load], saves=[save])
        graph.launch(rig.compute)
        load.wait(WAIT_S)
        save.wait(WAIT_S)
    for bits, number, value in ((rig.device, READ, block(rig.host, 5)), (rig.device, WRITTEN, filled(rig.device, NEW))):
        for name, array in bits.items():
            array[:, number] = value[name]
    for array in rig.host.values():
        array[:, 2] = NEW
    rig.check()


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_gates_open_at_once_when_the_load_is_dropped(rig, how):
    scheduler = rig.scheduler()
    gates = scheduler.gates(timeout_s=TIMEOUT_S)
    graph = captured(rig, gates)
    took_ms = []
    for _ in range(5 if how == "cancel" else 1):
        save = scheduler.offload([4], [10], layerwise=True)
        load = scheduler.onload([10], [READ])  # comes only when the save was marked
        gates.arm(loads=[load])
        graph.launch(rig.compute)
        time.sleep(0.01)
        assert not rig.compute.done
        started = time.perf_counter()
        load.cancel() if how == "cancel" else scheduler.close(WAIT_S)
        rig.compute.synchronize()
        took_ms.append((time.perf_counter() - started) * 1e3)
        with pytest.raises((CancelledError, TransferError)):  # on close the save is cancelled first
            load.wait(WAIT_S)
        save.cancel()
    assert min(took_ms) < 10.0
    scheduler.close(WAIT_S)


def test_a_gate_gives_up_and_its_load_fails(rig):
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=0.3)
        graph = captured(rig, gates)
        save = scheduler.offload([4], [10], layerwise=True)
        load = scheduler.onload([10], [READ])
        gates.arm(loads=[load])
        started = time.perf_counter()
        graph.launch(rig.compute)
        rig.compute.synchronize()
        assert 0.25 < time.perf_counter() - started < 0.9  # one gate waits for the time, not each
        for layer in range(LAYERS):
            save.mark_layer_written(layer)
        with pytest.raises(TransferError, match=r"gate of layer 0 .* gave up after timeout_s = 0\.3"):
            load.wait(WAIT_S)
        with pytest.raises(TransferError, match=r"no usable data|gave up"):
            scheduler.offload([READ], [1])
        rig.cache.mark_rewritten([READ])
        load = scheduler.onload([5], [READ])  # the next turn is a new one
        gates.arm(loads=[load])
        graph.launch(rig.compute)
        load.wait(WAIT_S)
        assert is_equal(rig.what_was_read(), block(rig.host, 5))


def test_a_graph_that_is_never_launched(rig):
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=0.3)
        graph = captured(rig, gates)
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[save])
        behind = scheduler.offload([4], [8])  # on the same stream
        with pytest.raises(TransferError, match="no graph marked its layers"):
            save.wait(WAIT_S)
        behind.wait(WAIT_S)
        assert is_equal(block(rig.host_now(), 8), block(rig.device, 4))
        save = scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(saves=[save])
        graph.launch(rig.compute)
        save.wait(WAIT_S)
        assert is_equal(block(rig.host_now(), 7), filled(rig.device, NEW))


def test_closing_with_an_armed_save_ends_at_once(rig):
    scheduler = rig.scheduler()
    gates = scheduler.gates(timeout_s=TIMEOUT_S)
    save = scheduler.offload([WRITTEN], [7], layerwise=True)
    gates.arm(saves=[save])
    started = time.perf_counter()
    scheduler.close(WAIT_S)
    assert time.perf_counter() - started < 5.0
    with pytest.raises((TransferError, CancelledError)):
        save.wait(WAIT_S)
    with pytest.raises(ClosedError):
        gates.wait(0)


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_arming_a_stream_that_is_being_captured_is_refused(rig, mode):
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        load, save = scheduler.onload([5], [READ]), scheduler.offload([4], [6], layerwise=True)
        load.wait(WAIT_S)
        rig.compute.begin_capture(getattr(runtime, f"streamCaptureMode{mode}"))
        try:
            rig.write(1, NEW)
            with pytest.raises(CaptureError):
                gates.arm(loads=[load], saves=[save])
        finally:
            graph = rig.compute.end_capture()
        graph.launch(rig.compute)
        assert is_equal(block(rig.device_now(), 1), filled(rig.device, NEW))
        assert save.unmarked_layers == list(range(LAYERS))
        save.cancel()


def test_gates_follow_the_stream_of_the_surrounding_block(rig):
    with rig.scheduler(compute_stream=None) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        with rig.compute:
            rig.compute.begin_capture()
            for layer in range(LAYERS):
                gates.wait(layer)
                rig.read(READ, layers=[layer])
                gates.mark(layer)
            graph = rig.compute.end_capture()
        load = scheduler.onload([5], [READ])
        gates.arm(loads=[load], stream=rig.compute)
        graph.launch(rig.compute)
        load.wait(WAIT_S)
        assert is_equal(rig.what_was_read(), block(rig.host, 5))


def test_gates_may_wait_without_a_graph(rig):
    """The same code runs eagerly, as servers warm up before they capture."""
    backend = Watched()
    with rig.scheduler(backend) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        rig.busy(backend.streams[ONLOAD])
        load, save = scheduler.onload([5], [READ]), scheduler.offload([WRITTEN], [7], layerwise=True)
        gates.arm(loads=[load], saves=[save])
        for layer in range(LAYERS):
            gates.wait(layer)
            rig.read(READ, layers=[layer])
            rig.write(WRITTEN, NEW, layers=[layer])
            gates.mark(layer)
        save.wait(WAIT_S)
        assert is_equal(rig.what_was_read(), block(rig.host, 5))
        assert is_equal(block(rig.host_now(), 7), filled(rig.device, NEW))


def test_nothing_is_left_after_close(rig):
    runtime.deviceSynchronize()
    for _ in range(3):  # what the library makes once
        with rig.scheduler() as scheduler:
            scheduler.gates(timeout_s=TIMEOUT_S)
    free_bytes = runtime.memGetInfo()[0]
    for _ in range(200):
        with rig.scheduler() as scheduler:
            gates = scheduler.gates(timeout_s=TIMEOUT_S)
            load = scheduler.onload([5], [READ])
            gates.arm(loads=[load])
            gates.wait(0)
    runtime.deviceSynchronize()
    assert runtime.memGetInfo()[0] > free_bytes - (8 << 20)


@pytest.mark.parametrize("joined", [False, True])
def test_random_replays(rig, joined):
    """Loads, saves, cancels and replays without either, many in flight; each byte that was read is looked at."""
    rng = np.random.default_rng(11)
    with rig.scheduler() as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = captured(rig, gates, joined=joined)
        current = block(rig.device, READ)
        for _ in range(150):
            host = int(rng.integers(0, 6))
            with_load, with_save, cancelled = rng.random(3) < (0.7, 0.5, 0.15)
            loads = [scheduler.onload([host], [READ])] if with_load else []
            target = int(rng.integers(7, 11))
            saves = [scheduler.offload([WRITTEN], [target], layerwise=True)] if with_save else []
            gates.arm(loads=loads, saves=saves)
            graph.launch(rig.compute)
            if loads and cancelled:
                loads[0].cancel()
            seen = rig.what_was_read()
            for save in saves:
                save.wait(WAIT_S)
                assert is_equal(block(rig.host_now(), target), filled(rig.device, NEW))
            try:
                for load in loads:
                    load.wait(WAIT_S)
                    current = block(rig.host, host)
            except CancelledError:
                rig.cache.mark_rewritten([READ])
                load = scheduler.onload([0], [READ])
                load.wait(WAIT_S)
                current = block(rig.host, 0)
                continue
            assert is_equal(seen, current)


def test_a_graph_of_paddle(rig):
    """Captured and launched by Paddle, on its current stream."""
    if not paddle.is_compiled_with_cuda():
        pytest.skip("the device of this Paddle is a plugin, for which it has no CUDA graphs")
    from paddle.device.cuda.graphs import CUDAGraph

    stream = streams.paddle_stream(0)
    with rig.scheduler(compute_stream=stream) as scheduler:
        gates = scheduler.gates(timeout_s=TIMEOUT_S)
        graph = CUDAGraph(mode="thread_local")
        graph.capture_begin()
        for layer in range(LAYERS):
            gates.wait(layer)
            rig.read(READ, layers=[layer], stream=stream)
            rig.write(WRITTEN, NEW, layers=[layer], stream=stream)
            gates.mark(layer)
        graph.capture_end()
        for host in (5, 8):
            load, save = scheduler.onload([host], [READ]), scheduler.offload([WRITTEN], [7], layerwise=True)
            gates.arm(loads=[load], saves=[save])
            graph.replay()
            load.wait(WAIT_S)
            save.wait(WAIT_S)
            assert is_equal(rig.what_was_read(), block(rig.host, host))
            assert is_equal(block(rig.host_now(), 7), filled(rig.device, NEW))
