"""What only a GPU shows of vectorized_copy and memcpy_batch: kinds of memory, modes, streams, graphs, long lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv import ops
from tests.gpu.delay import busy
from tests.machine import POISON, Machine, random_bits
from tests.ops.test_memcpy import OPS as CPU_OPS
from tests.ops.test_memcpy import Memory, scattered

OPS: dict[str, Any] = {
    **CPU_OPS,
    "memcpy_batch, batch": lambda *lists, **named: ops.memcpy_batch(*lists, mode="batch", **named),
}
every_op = pytest.mark.parametrize("op", OPS)


class Side:
    """Bytes on the device or in host memory."""

    def __init__(self, machine: Machine, kind: str, bits: np.ndarray) -> None:
        self.machine, self.kind = machine, kind
        self.host: Any = None
        if kind == "device":
            self.tensor = paddle.to_tensor(bits, place=machine.place)
        else:
            self.host = machine.allocate_host(bits.size) if kind == "pinned" else np.empty(bits.size, np.uint8)
            self.host[:] = bits

    @property
    def address(self) -> int:
        return int(self.host.ctypes.data if self.host is not None else self.tensor.data_ptr())

    def read(self) -> np.ndarray:
        return self.host if self.host is not None else self.tensor.numpy()


def check(
    machine: Machine, op: str, kinds: tuple[str, str], sizes: list[int], seed: int, wait: Any = None, **named: Any
) -> None:
    sources, targets, num_bytes = scattered(sizes, seed)
    before = random_bits(1, num_bytes, seed)[0]
    source = Side(machine, kinds[0], before)
    target = Side(machine, kinds[1], np.full(num_bytes, POISON, np.uint8))
    machine.synchronize()  # Paddle fills them on its own stream
    OPS[op]([source.address + o for o in sources], [target.address + o for o in targets], sizes, **named)
    (wait or machine.synchronize)()
    expected = np.full(num_bytes, POISON, np.uint8)
    for s, t, size in zip(sources, targets, sizes, strict=True):
        expected[t : t + size] = before[s : s + size]
    np.testing.assert_array_equal(target.read(), expected)
    np.testing.assert_array_equal(source.read(), before)


def mixed_sizes(count: int, seed: int = 0) -> list[int]:
    return (2 ** np.random.default_rng(seed).uniform(0, 14, count)).astype(int).tolist()


@every_op
@pytest.mark.parametrize(
    "kinds", [("device", "device"), ("device", "pinned"), ("pinned", "device"), ("pinned", "pinned")]
)
@pytest.mark.parametrize("count", [3, 160, 161, 700])
def test_directions(machine: Machine, op: str, kinds: tuple[str, str], count: int) -> None:
    check(machine, op, kinds, mixed_sizes(count, count), count)


@every_op
@pytest.mark.parametrize("count", [8191, 8192, 8193, 52000])
def test_long_lists(machine: Machine, op: str, count: int) -> None:
    """More copies than one batched call takes, and than some drivers stand."""
    check(machine, op, ("pinned", "device"), [64 + i % 5 for i in range(count)], 1)


@every_op
@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_default_stream(machine: Machine, op: str, handle: int) -> None:
    check(machine, op, ("device", "pinned"), mixed_sizes(50), 2, stream=handle)


@every_op
def test_a_named_stream(machine: Machine, op: str, other_stream: Any) -> None:
    """The copy waits for what is on the stream; the call does not wait, and the lists may be freed."""
    check(machine, op, ("device", "device"), mixed_sizes(300), 3, stream=other_stream)  # loads the kernels
    busy(other_stream, 100)
    sources, targets, num_bytes = scattered([100] * 300, 4)
    source = Side(machine, "pinned", random_bits(1, num_bytes, 4)[0])
    target = Side(machine, "device", np.zeros(num_bytes, np.uint8))
    OPS[op]([source.address + o for o in sources], [target.address + o for o in targets], 100, stream=other_stream)
    assert not other_stream.done, "the call has waited for the stream"
    source.host[:] = 7  # read in the order of the stream, that is later
    other_stream.synchronize()
    expected = np.zeros(num_bytes, np.uint8)
    for offset in targets:
        expected[offset : offset + 100] = 7
    np.testing.assert_array_equal(target.read(), expected)


@every_op
def test_inside_a_captured_graph(machine: Machine, op: str, other_stream: Any) -> None:
    sizes = mixed_sizes(300)
    check(machine, op, ("device", "device"), sizes, 5, stream=other_stream)
    sources, targets, num_bytes = scattered(sizes, 5)
    source = Side(machine, "pinned", np.zeros(num_bytes, np.uint8))
    target = Side(machine, "device", np.full(num_bytes, POISON, np.uint8))
    machine.synchronize()
    other_stream.begin_capture()
    OPS[op]([source.address + o for o in sources], [target.address + o for o in targets], sizes, stream=other_stream)
    graph = other_stream.end_capture()
    check(machine, op, ("device", "device"), sizes, 8, stream=other_stream)  # another list, perhaps in the same memory
    source.host[:] = before = random_bits(1, num_bytes, 6)[0]
    graph.launch(other_stream)
    other_stream.synchronize()
    expected = np.full(num_bytes, POISON, np.uint8)
    for s, t, size in zip(sources, targets, sizes, strict=True):
        expected[t : t + size] = before[s : s + size]
    np.testing.assert_array_equal(target.read(), expected)


@every_op
def test_beside_a_capture_on_another_stream(machine: Machine, op: str, other_stream: Any) -> None:
    """A long list is not refused, and does not break the capture."""
    import cupy

    sources, targets, num_bytes = scattered([100] * 40_000, 9)
    source = Side(machine, "pinned", random_bits(1, num_bytes, 9)[0])
    target = Side(machine, "pinned", np.zeros(num_bytes, np.uint8))
    machine.synchronize()
    captured = cupy.cuda.Stream(non_blocking=True)
    captured.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    OPS[op]([source.address + o for o in sources], [target.address + o for o in targets], 100, stream=other_stream)
    captured.end_capture()
    other_stream.synchronize()
    expected = np.zeros(num_bytes, np.uint8)
    for s, t in zip(sources, targets, strict=True):
        expected[t : t + 100] = source.host[s : s + 100]
    np.testing.assert_array_equal(target.read(), expected)


def test_more_lists_in_flight_than_memory_is_kept_for(machine: Machine, other_stream: Any) -> None:
    """Each is 1 MiB on its way to the kernel. None may overwrite another, and not until 16 MiB may a call wait."""
    count, calls = 43_690, 20
    source = Side(machine, "device", random_bits(1, count, 10)[0])
    target = Side(machine, "device", np.zeros(calls * count, np.uint8))
    orders = [np.random.default_rng(i).permutation(count) for i in range(calls)]
    for i, order in enumerate(orders):
        if i == 1:  # the first call allocates
            machine.synchronize()
            busy(other_stream, 2000)
        first = target.address + i * count
        ops.vectorized_copy(source.address + order, np.arange(first, first + count), 1, stream=other_stream)
        assert i > 14 or i == 0 or not other_stream.done, "a call has waited for the stream"
    other_stream.synchronize()
    np.testing.assert_array_equal(target.read(), np.concatenate([source.read()[order] for order in orders]))


@pytest.mark.parametrize("kinds", [("device", "pageable"), ("pageable", "device")])
def test_pageable_memory(machine: Machine, kinds: tuple[str, str]) -> None:
    """A kernel cannot reach it, the copy engine stages it."""
    for op in OPS:
        if op != "vectorized_copy":
            check(machine, op, kinds, mixed_sizes(40), 7)
    name = "source" if kinds[0] == "pageable" else "target"
    good = [Side(machine, kind, np.zeros(64, np.uint8)) for kind in ("device", "device")]
    pageable = Side(machine, "pageable", np.zeros(64, np.uint8))
    pointers = {"source": [good[0].address] * 2, "target": [good[1].address, good[1].address + 32]}
    pointers[name][1] = pageable.address
    with pytest.raises(ValueError, match=rf"{name}_pointers\[1\] = .* can reach"):
        ops.vectorized_copy(pointers["source"], pointers["target"], 16)
    machine.synchronize()
    assert not good[1].read().any()


@every_op
def test_the_first_device_address_decides(machine: Machine, op: str) -> None:
    """Pairs of host memory before it, which the GPU then copies too."""
    host = Side(machine, "pinned", random_bits(1, 64, 1)[0])
    target = Side(machine, "pinned", np.zeros(64, np.uint8))
    device = Side(machine, "device", random_bits(1, 64, 2)[0])
    OPS[op]([host.address, device.address], [target.address, target.address + 32], 20)
    machine.synchronize()
    expected = np.zeros(64, np.uint8)
    expected[:20], expected[32:52] = host.read()[:20], device.read()[:20]
    np.testing.assert_array_equal(target.read(), expected)


@every_op
def test_beyond_the_end_of_an_allocation(machine: Machine, op: str) -> None:
    host = machine.allocate_host(4096)
    target = Memory(machine, 100)
    with pytest.raises(
        ValueError, match=r"source_pointers\[0\].*(run past the end|overlap)|source_pointers\[0\] = .*can reach"
    ):
        OPS[op]([int(host.ctypes.data)], [target.tensor.data_ptr()], 1 << 40)


def test_modes(machine: Machine) -> None:
    assert ops.has_memcpy_batch_async() == ("memcpy_batch_async" in ops.build_info()["features"])
    assert not ops.is_stub_build() and "cuda" in ops.build_info()["features"]


@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(4000, 9000)), max_size=150),
    seed=st.integers(0, 2**20),
    op=st.sampled_from(list(OPS)),
    kinds=st.tuples(st.sampled_from(["device", "pinned"]), st.sampled_from(["device", "pinned"])),
)
def test_any_list(machine: Machine, sizes: list[int], seed: int, op: str, kinds: tuple[str, str]) -> None:
    check(machine, op, kinds, sizes, seed)
