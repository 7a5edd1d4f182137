"""swap_cache_per_layer and swap_cache_per_layer_async against the reference, on the whole of both memories."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.machine import DTYPES, Machine, cpu_machine
from tests.ops.swap_conformance import PER_LAYER, Layer, check_swap, shuffled_ids
from tests.reference.swap import TO_DEVICE, TO_HOST

every_op = pytest.mark.parametrize("op", PER_LAYER)
both_ways = pytest.mark.parametrize("mode", [TO_HOST, TO_DEVICE])


@every_op
@both_ways
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_shape", [(5, 3), (3, 5, 7), (2, 3, 5, 4)], ids=["rank3", "rank4", "rank5"])
def test_dtypes_and_ranks(machine: Machine, op: str, mode: int, dtype: str, block_shape: tuple[int, ...]) -> None:
    layer = Layer(machine, 11, 13, block_shape, dtype)
    check_swap(op, [layer], *shuffled_ids(7, 11, 13), mode)


@every_op
@both_ways
@pytest.mark.parametrize("misalignment", [0, 1, 2, 4, 8, 15])
@pytest.mark.parametrize("block_bytes", [1, 3, 7, 15, 17, 33, 255, 4099])
def test_odd_block_sizes_and_misaligned_addresses(
    machine: Machine, op: str, mode: int, misalignment: int, block_bytes: int
) -> None:
    layer = Layer(machine, 6, 9, (1, block_bytes), "uint8", misalignment)
    check_swap(op, [layer], *shuffled_ids(5, 6, 9), mode)


@every_op
@both_ways
@pytest.mark.parametrize("block_bytes", [3, 1 << 20])
def test_every_block(machine: Machine, op: str, mode: int, block_bytes: int) -> None:
    """With 1 MiB blocks the copy is split over threads."""
    layer = Layer(machine, 7, 7, (1, block_bytes), "uint8")
    check_swap(op, [layer], *shuffled_ids(7, 7, 7), mode)


@both_ways
def test_neighbours_in_ascending_and_descending_order(machine: Machine, mode: int) -> None:
    ids = [2, 3, 4, 9, 8, 7, 0]
    check_swap("swap_cache_per_layer", [Layer(machine, 10, 10, (2, 5), "int8")], ids, ids, mode)


@both_ways
def test_one_source_many_targets(machine: Machine, mode: int) -> None:
    sources, targets = [3, 3, 1, 3], [0, 5, 2, 4]
    device_ids, host_ids = (sources, targets) if mode == TO_HOST else (targets, sources)
    check_swap("swap_cache_per_layer", [Layer(machine, 6, 6, (2, 5), "float16")], device_ids, host_ids, mode)


@every_op
@both_ways
def test_an_empty_list_moves_nothing(machine: Machine, op: str, mode: int) -> None:
    for none in ([], (), range(0), np.array([]), np.zeros(0, "int32"), paddle.to_tensor(np.zeros(0, "int64"))):
        layer = Layer(machine, 3, 4, (2, 5), "float32")
        cache, address = layer.cache.tensor, layer.host.address
        assert getattr(ops, op)(cache, address, 4, none, none, 0, mode) is cache
        layer.check_untouched()


@every_op
@both_ways
@pytest.mark.parametrize("address", [0, 4096, -1, "its own"])
def test_an_empty_list_with_any_address(machine: Machine, op: str, mode: int, address: Any) -> None:
    """A server that has nothing to move may have no pool yet."""
    layer = Layer(machine, 3, 4, (2, 5), "float32")
    cache = layer.cache.tensor
    assert getattr(ops, op)(cache, cache.data_ptr() if address == "its own" else address, 4, [], [], 0, mode) is cache
    with pytest.raises(ValueError, match="mode = 2 must be 0"):
        getattr(ops, op)(cache, 0, 4, [], [], 0, 2)
    layer.check_untouched()


def test_a_pool_of_no_blocks(machine: Machine) -> None:
    layer = Layer(machine, 3, 1, (2, 5), "float32")
    ops.swap_cache_per_layer(layer.cache.tensor, layer.host.address, 0, [], [], 0, TO_HOST)
    layer.check_untouched()


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda ids: np.array(ids, "int32"),
        lambda ids: np.array(ids, "int64"),
        lambda ids: np.array(ids, "uint64"),
        lambda ids: np.repeat(ids, 2)[::2],
        lambda ids: paddle.to_tensor(ids, dtype="int32"),
        lambda ids: paddle.to_tensor(ids, dtype="int64"),
        lambda ids: [np.int32(i) for i in ids],
        lambda ids: tuple(np.int64(i) for i in ids),
        lambda ids: range(ids[0], ids[-1] + 1, ids[1] - ids[0]),
    ],
)
def test_forms_of_ids(machine: Machine, form) -> None:
    layer = Layer(machine, 8, 8, (2, 5), "float32")
    cache, address = layer.cache.tensor, layer.host.address
    ops.swap_cache_per_layer(cache, address, 8, form([1, 4, 7]), form([0, 3, 6]), 0, TO_DEVICE)
    layer.check([1, 4, 7], [0, 3, 6], TO_DEVICE)


def test_numpy_integers_as_scalars_and_any_rank(machine: Machine) -> None:
    """The incumbent passes its device id as ``rank``: whatever it is, it is ignored."""
    for rank in (0, -1, 7, None, 2**70):
        layer = Layer(machine, 3, 4, (2, 5), "float32")
        address, count, mode = np.int64(layer.host.address), np.int32(4), np.uint8(TO_HOST)
        ops.swap_cache_per_layer(layer.cache.tensor, address, count, [2], [3], rank, mode)
        layer.check([2], [3], TO_HOST)


@pytest.mark.parametrize("stream", [None, 0, "ignored"])
def test_the_cpu_ignores_the_stream(machine: Machine, stream: object) -> None:
    check_swap("swap_cache_per_layer_async", [Layer(machine, 3, 4, (2, 5), "int8")], [2], [3], TO_HOST, stream=stream)


def test_a_cache_that_requires_a_gradient(machine: Machine) -> None:
    layer = Layer(machine, 3, 4, (2, 5), "float32")
    layer.cache.tensor.stop_gradient = False
    ops.swap_cache_per_layer(layer.cache.tensor, layer.host.address, 4, [2], [3], 0, TO_DEVICE)
    layer.check([2], [3], TO_DEVICE)


@given(data=st.data())
def test_random_swaps(data: st.DataObject) -> None:
    device_blocks = data.draw(st.integers(1, 12), "device_blocks")
    host_blocks = data.draw(st.integers(1, 12), "host_blocks")
    mode = data.draw(st.sampled_from([TO_HOST, TO_DEVICE]), "mode")
    source_blocks, target_blocks = (device_blocks, host_blocks) if mode == TO_HOST else (host_blocks, device_blocks)
    targets = data.draw(st.lists(st.integers(0, target_blocks - 1), unique=True), "targets")
    source_ids = st.integers(0, source_blocks - 1)
    sources = data.draw(st.lists(source_ids, min_size=len(targets), max_size=len(targets)), "sources")
    block_shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=4), "block_shape"))
    layer = Layer(
        cpu_machine(),
        device_blocks,
        host_blocks,
        block_shape,
        data.draw(st.sampled_from(DTYPES), "dtype"),
        data.draw(st.integers(0, 255), "misalignment"),
        data.draw(st.integers(0, 1000), "seed"),
    )
    device_ids, host_ids = (sources, targets) if mode == TO_HOST else (targets, sources)
    check_swap(data.draw(st.sampled_from(PER_LAYER), "op"), [layer], device_ids, host_ids, mode)


def test_offsets_beyond_two_gib() -> None:
    """3 GiB on both sides, of which only the pages of the moved blocks are ever touched."""
    block_bytes, blocks, last = 1 << 20, 3072, 3071
    host = np.empty((blocks, 1, block_bytes), np.uint8)
    device = np.empty((blocks, 1, block_bytes), np.uint8)
    core = paddle.base.core
    cache = core.eager.Tensor(
        value=device, place=core.CPUPlace(), persistable=False, zero_copy=True, name=None, stop_gradient=True
    )
    assert cache.data_ptr() == device.ctypes.data
    device[last], device[5], host[2500] = 7, 1, 9
    ops.swap_cache_per_layer(cache, host.ctypes.data, blocks, [last, 5], [last, 2049], 0, TO_HOST)
    ops.swap_cache_per_layer(cache, host.ctypes.data, blocks, [2600], [2500], 0, TO_DEVICE)
    assert (host[last] == 7).all()
    assert (host[2049] == 1).all()
    assert (device[2600] == 9).all()


def test_many_threads_at_once(machine: Machine) -> None:
    """Operators run without the GIL, so their checks and copies really do run at once."""
    layers = [Layer(machine, 9, 9, (3, 1000 + 7 * t), "uint8", misalignment=t, seed=t) for t in range(6)]
    ids = [shuffled_ids(6, 9, 9, seed=t) for t in range(6)]
    failures: list[BaseException] = []

    def work(t: int) -> None:
        try:
            for _ in range(100):
                ops.swap_cache_per_layer(layers[t].cache.tensor, layers[t].host.address, 9, *ids[t], 0, TO_HOST)
                with pytest.raises(IndexError, match=rf"\[0\] = {9 + t} must be in \[0, 9\)"):
                    ops.swap_cache_per_layer(
                        layers[t].cache.tensor, layers[t].host.address, 9, [9 + t], [0], 0, TO_HOST
                    )
        except BaseException as error:  # noqa: BLE001  a thread has to hand its failure over, pytest's too
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for layer, (device_ids, host_ids) in zip(layers, ids, strict=True):
        layer.check(device_ids, host_ids, TO_HOST)


def test_the_gil_is_released_while_blocks_are_copied() -> None:
    """Python never switches threads by itself here, so another thread can run between the two marks only if the
    operator lets go of the interpreter."""
    host = np.zeros((96, 1, 1 << 20), np.uint8)
    cache = paddle.zeros([96, 1, 1 << 20], "uint8")
    inside, seen_inside = False, False
    finished = threading.Event()

    def swap() -> None:
        nonlocal inside
        for _ in range(500):
            if seen_inside:
                break
            inside = True
            ops.swap_cache_per_layer(cache, host.ctypes.data, 96, range(96), range(96), 0, TO_HOST)
            inside = False
        finished.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker = threading.Thread(target=swap)
        worker.start()
        while not finished.wait(0.001):
            seen_inside = seen_inside or inside
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen_inside
