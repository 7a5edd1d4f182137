"""gather_topk_rows on a GPU: what runs on any device, CUDA graphs that are replayed with other tokens, and streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ResidentRows, devices
from tests.gpu.delay import busy
from tests.machine import Machine, bits_of

# The imported tests run here with this folder's `machine`.
from tests.ops.test_gather_topk_rows import *  # noqa: F403
from tests.ops.topk_rig import GuardedIntegers, Rig


def overwrite(tensor: paddle.Tensor, values: np.ndarray) -> None:
    """Other values into the memory of a tensor, when nothing runs."""
    from cupy.cuda import runtime

    array = np.ascontiguousarray(values, np.int32)
    runtime.deviceSynchronize()
    runtime.memcpy(tensor.data_ptr(), array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice)
    runtime.deviceSynchronize()


def put(guarded: GuardedIntegers, values: Any) -> None:
    guarded.values = np.ascontiguousarray(values, np.int32)
    overwrite(guarded.tensor, guarded.values)


GRAPHS: list[dict[str, Any]] = [
    {"dtype": "uint8", "row_elements": 7, "block_size": 3, "gap_bytes": 5, "misalignment": 1},
    {"dtype": "float32", "batch": 3, "k": 40, "num_slots": 41, "row_elements": 6, "max_tokens": 200, "blocks": 60},
    {"dtype": "bfloat16", "batch": 4, "k": 256, "num_slots": 700, "row_elements": 576, "block_size": 64, "blocks": 40,
     "host_blocks": 50, "max_tokens": 2500},
]  # fmt: skip


@pytest.mark.parametrize("sizes", GRAPHS)
def test_a_graph_is_replayed_with_other_tokens(machine: Machine, other_stream: Any, sizes: dict[str, Any]) -> None:
    rig = Rig(machine, **sizes)
    rig.step(rig.random_ids())  # loads the kernels: not while capturing
    with other_stream:
        other_stream.begin_capture()
        rig.call(stream=other_stream)
        graph = other_stream.end_capture()
    machine.synchronize()
    rig.check()
    for _ in range(40):
        put(rig.ids, rig.random_ids())
        if rig.random.random() < 0.3:
            put(rig.table, rig.random_table())
        if rig.random.random() < 0.2:
            rig.state.fresh[:] = rig.random.integers(0, 3, rig.batch)
            overwrite(rig.integers["fresh"].tensor, rig.state.fresh)
        graph.launch(other_stream)
        rig.expect()
        rig.check()


def test_a_graph_reads_host_memory_when_it_is_replayed(machine: Machine, other_stream: Any) -> None:
    rig = Rig(machine)
    rig.step([[3, 0, 7, 12, 23]] * 2)
    with other_stream:
        other_stream.begin_capture()
        rig.call(stream=other_stream)
        graph = other_stream.end_capture()
    for _ in range(3):
        rig.host_bits ^= 0x5A
        rig.host.bits[:] = rig.host_bits
        rig.host.refill()
        rig.state.fresh[:] = 1
        overwrite(rig.integers["fresh"].tensor, rig.state.fresh)
        graph.launch(other_stream)
        assert rig.expect() == [5, 5]
        rig.check()


def test_steps_of_several_layers_in_one_graph(machine: Machine, other_stream: Any) -> None:
    """Two layers with lists of their own, twice each, and a reset between: in the order of the stream."""
    rigs = [Rig(machine, seed=seed, k=32, num_slots=64, max_tokens=120, blocks=40) for seed in (1, 2)]
    layers = [ResidentRows(2, 32, 64, row_elements=3, dtype="float32", max_tokens=120) for _ in rigs]
    outs = [rig.out.tensor for rig in rigs]
    host = [list(rig.arguments.values())[2:6] for rig in rigs]

    def step() -> None:
        for rig, layer, out, where in zip(rigs, layers, outs, host, strict=True):
            layer.gather(rig.ids.tensor, rig.table.tensor, *where, out=out, stream=other_stream)
        layers[1].reset([1], stream=other_stream)
        layers[1].gather(rigs[1].ids.tensor, rigs[1].table.tensor, *host[1], out=outs[1], stream=other_stream)

    for rig in rigs:
        put(rig.ids, rig.random_ids())
    step()
    with other_stream:
        other_stream.begin_capture()
        step()
        graph = other_stream.end_capture()
    for replay in range(10):
        if replay:  # the first is the call before the capture
            for rig in rigs:
                put(rig.ids, rig.random_ids())
            graph.launch(other_stream)
        machine.synchronize()
        rigs[0].expect()
        rigs[1].expect()
        rigs[1].state.fresh[1] = 1
        rigs[1].expect()
        for rig, layer in zip(rigs, layers, strict=True):
            rig.out.check(rig.rows)
            for name in ("slot_of_token", "token_of_slot", "lru_order", "fresh"):
                np.testing.assert_array_equal(getattr(layer, name).numpy(), getattr(rig.state, name))


def test_the_stream_that_is_named(machine: Machine, other_stream: Any) -> None:
    rig = Rig(machine)
    rig.step([[3, 0, 7, 12, 23]] * 2)
    busy(other_stream, 150)
    before = rig.rows
    rig.put(ids=[[1, 2, 3, 4, 5]] * 2)
    rig.call(stream=other_stream)
    now = np.empty(before.nbytes, np.uint8)
    import cupy

    third = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.memcpyAsync(now.ctypes.data, rig.out.tensor.data_ptr(), now.nbytes, 2, third.ptr)
    third.synchronize()
    np.testing.assert_array_equal(now, before.ravel(), "the op did not wait for the stream that was named")
    other_stream.synchronize()
    rig.expect()
    rig.check()


def test_a_capture_is_not_disturbed_by_the_check_mode(
    machine: Machine, other_stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(machine)
    rig.step([[3, 0, 7, 12, 23]] * 2)
    monkeypatch.setenv("PADDLE_KV_CHECK", "1")
    with other_stream:
        other_stream.begin_capture()
        rig.call(stream=other_stream)
        graph = other_stream.end_capture()
    put(rig.ids, np.full((2, 5), 24))
    with pytest.raises(IndexError, match="token_ids"):
        rig.call()
    graph.launch(other_stream)
    rig.expect()
    rig.check()


def test_host_memory_that_the_gpu_cannot_reach(machine: Machine) -> None:
    rig = Rig(machine)
    pageable = np.zeros(9 * 48, np.uint8)
    with pytest.raises(ValueError, match=r"host_pointer: .* are not all host memory that the GPU can reach"):
        rig.call(host_pointer=pageable.ctypes.data)
    on_cpu = paddle.to_tensor(np.zeros((2, 5), np.int32), place=paddle.CPUPlace())
    with pytest.raises(ValueError, match="token_ids is on another device than resident"):
        rig.call(token_ids=on_cpu)
    with pytest.raises(ValueError, match="out is on another device than resident"):
        rig.call(out=paddle.to_tensor(np.zeros((2, 5, 3), np.float32), place=paddle.CPUPlace()))
    rig.check_state()


def test_the_sizes_of_deepseek(machine: Machine) -> None:
    """Top 2,048 rows of 1,152 bytes for 16 requests, step after step, against the same calls on the CPU."""
    batch, k, slots, tokens, width = 16, 2048, 4096, 20_000, 576
    random = np.random.default_rng(5)
    host_blocks = 400
    host = machine.allocate_host(host_blocks * 64 * 1152)
    host[:] = np.random.default_rng(6).integers(0, 256, host.size, np.uint8)
    table = random.integers(0, host_blocks, (batch, -(-tokens // 64))).astype(np.int32)
    where = (host.ctypes.data, host_blocks, 64 * 1152, 64)
    given = {"row_elements": width, "dtype": "bfloat16", "max_tokens": tokens}
    rows = {place: ResidentRows(batch, k, slots, device=place, **given) for place in (devices.name_of(0), "cpu")}
    places = {devices.name_of(0): machine.place, "cpu": paddle.CPUPlace()}
    ids = np.empty((batch, k), np.int32)
    for step in range(4):  # all miss, all hit, a third misses, most miss
        if step in (0, 3):
            ids = np.array([random.choice(tokens, k, replace=False) for _ in range(batch)], np.int32)
        elif step == 2:
            ids[:, ::3] = random.integers(0, tokens, ids[:, ::3].shape)
        results = []
        for place, layer in rows.items():
            given_here = [paddle.to_tensor(array, place=places[place]) for array in (ids, table)]
            results.append(layer.gather(*given_here, *where))
        machine.synchronize()
        np.testing.assert_array_equal(*map(bits_of, results))
        for name in ("slot_of_token", "token_of_slot", "lru_order", "resident"):
            np.testing.assert_array_equal(*(getattr(layer, name).numpy() for layer in rows.values()))
