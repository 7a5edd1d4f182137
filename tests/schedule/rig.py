"""A cache and a pool full of random bits, compared as whole buffers; and a hand on each copy of the CPU backend."""

from __future__ import annotations

import ctypes
import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.schedule.movement import movements
from paddle_kv.schedule.transfer import Transfer
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import Deadline, keeper

POISON = 0xDE
WAIT_S = 20.0  # for what has to happen: long enough for a loaded machine, short enough to fail
SHORT_S = 0.05  # for what must not happen

Bits = dict[str, np.ndarray]  # name -> [layers, blocks, bytes of a block]


def make_spec(**changes: Any) -> KVCacheSpec:
    """Sizes that differ from each other, tails everywhere, tensors of different dtypes."""
    values: dict[str, Any] = {
        "num_layers": 5,
        "num_kv_heads": 2,
        "head_dim": 3,
        "v_head_dim": 11,
        "block_size": 7,
        "dtype": "float16",
        "extra": {"scale": ((3,), "float32"), "flag": ((2, 5), "uint8")},
    }
    return KVCacheSpec(**{**values, **changes})


def bytes_at(address: int, size_bytes: int) -> np.ndarray:
    """RAM as an array that can be written."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def cache_memory(cache: DeviceCache) -> Bits:
    """The tensors' own memory (CPU tensors), one array for each layer."""
    spec = cache.spec
    return {
        name: np.array(
            [
                bytes_at(
                    cache.tensor(name, layer).data_ptr(), cache.num_blocks * spec.tensor_block_bytes(name)
                ).reshape(cache.num_blocks, -1)
                for layer in range(spec.num_layers)
            ]
        )
        for name in spec.tensor_names
    }


def set_cache(cache: DeviceCache, bits: Bits) -> None:
    for name in cache.spec.tensor_names:
        for layer in range(cache.spec.num_layers):
            tensor = cache.tensor(name, layer)
            bytes_at(tensor.data_ptr(), bits[name][layer].size)[:] = bits[name][layer].ravel()


def pool_memory(pool: HostPool) -> Bits:
    spec = pool.spec
    return {
        name: np.array(
            [
                [pool.view(name, layer, block).reshape(-1).view(np.uint8) for block in range(pool.num_blocks)]
                for layer in range(spec.num_layers)
            ]
        )
        for name in spec.tensor_names
    }


def set_pool(pool: HostPool, bits: Bits) -> None:
    for name in pool.spec.tensor_names:
        for layer in range(pool.spec.num_layers):
            for block in range(pool.num_blocks):
                pool.view(name, layer, block).reshape(-1).view(np.uint8)[:] = bits[name][layer, block]


def random_bits(spec: KVCacheSpec, num_blocks: int, seed: int) -> Bits:
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 256, (spec.num_layers, num_blocks, spec.tensor_block_bytes(name)), np.uint8)
        for name in spec.tensor_names
    }


def moved(source: Bits, target: Bits, source_ids: Any, target_ids: Any, layers: Any = None) -> Bits:
    """The target after a transfer of these layers (of all): block by block, in NumPy."""
    result = {name: array.copy() for name, array in target.items()}
    for name, array in result.items():
        for layer in range(len(array)) if layers is None else layers:
            for source_id, target_id in zip(source_ids, target_ids, strict=True):
                array[layer, target_id] = source[name][layer, source_id]
    return result


def assert_same(actual: Bits, expected: Bits) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


class Rig:
    """A cache and a pool with known, different content. ``device`` and ``host`` are what they should hold."""

    def __init__(
        self,
        spec: KVCacheSpec | None = None,
        *,
        device_blocks: int = 13,
        host_blocks: int = 17,
        shared_cache: bool = False,
        **pool: Any,
    ):
        self.spec = spec or make_spec()
        self.cache = DeviceCache(self.spec, device_blocks, "cpu", shared=shared_cache)
        self.pool = HostPool(self.spec, host_blocks, **{"layout": "layer_first", **pool})
        self.device = random_bits(self.spec, device_blocks, 1)
        self.host = random_bits(self.spec, host_blocks, 2)
        set_cache(self.cache, self.device)
        set_pool(self.pool, self.host)

    def expect_offload(self, device_ids: Any, host_ids: Any, layers: Any = None) -> None:
        self.host = moved(self.device, self.host, device_ids, host_ids, layers)

    def expect_onload(self, host_ids: Any, device_ids: Any, layers: Any = None) -> None:
        self.device = moved(self.host, self.device, host_ids, device_ids, layers)

    def write_device(self, block: int, layers: Any = None, value: int = POISON) -> None:
        """What compute would do, to the tensors and to what is expected."""
        for name in self.spec.tensor_names:
            for layer in range(self.spec.num_layers) if layers is None else layers:
                size_bytes = self.spec.tensor_block_bytes(name)
                start = self.cache.tensor(name, layer).data_ptr() + block * size_bytes
                bytes_at(start, size_bytes)[:] = value
                self.device[name][layer, block] = value

    def check(self) -> None:
        """Every byte of both sides."""
        assert_same(cache_memory(self.cache), self.device)
        assert_same(pool_memory(self.pool), self.host)


class Copies:
    """Stands in front of each copy of the CPU backend, layer by layer: records it, holds it, fails it."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self._held: dict[tuple[str, int], threading.Event] = {}
        self._failing: dict[tuple[str, int], BaseException] = {}
        self.done: list[tuple[str, tuple[int, ...], int]] = []  # direction, device ids, layer
        self.arrived = threading.Semaphore(0)  # released once for each copy that is held

    def hold(self, direction: str, *layers: int) -> None:
        for layer in layers:
            self._held[direction, layer] = threading.Event()

    def hold_a_save_and_a_load(self, scheduler: LayerwiseScheduler) -> tuple[Transfer, Transfer]:
        """Under way, apart from each other, each held before its last layer."""
        self.hold("offload", 4)
        self.hold("onload", 4)
        return scheduler.offload([3], [2]), scheduler.onload([4], [5])

    def go_on(self, direction: str | None = None, *layers: int) -> None:
        for (held_direction, layer), event in list(self._held.items()):
            if direction in (None, held_direction) and (not layers or layer in layers):
                event.set()

    def fail(self, direction: str, layer: int, error: BaseException) -> None:
        self._failing[direction, layer] = error

    def heal(self) -> None:
        self._failing.clear()

    def __call__(self, number: int, plan: Any, layers: range) -> None:
        for layer in layers:
            gate = self._held.get((plan.direction, layer))
            if gate is not None:
                self.arrived.release()
                assert gate.wait(WAIT_S), "a test has left a copy held"
            if (plan.direction, layer) in self._failing:
                raise self._failing[plan.direction, layer]
            self._copy(number, plan, range(layer, layer + 1))
            self.done.append((plan.direction, tuple(plan.device_ids), layer))


def collect() -> None:
    """Looks at all transfers in flight."""
    for movement in list(movements.values()):
        change(movement.target, movement.look)


def in_flight() -> list[Any]:
    """All transfers of the process that hold blocks."""
    return list(movements.values())


def threads_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """Those that run now and did not then; threads of other tests may end meanwhile."""
    return set(threading.enumerate()) - before


def in_threads(*works: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Runs them at once; whatever one raises is raised here."""
    failures: list[BaseException] = []
    started = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            started.wait(WAIT_S)
            work()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a thread does not end"
    if failures:
        raise failures[0]


def cpu_tensor(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(array, place=paddle.CPUPlace())


def settles(condition: Callable[[], object]) -> bool:
    """Whether it holds, as soon as threads of the library have let go of what they had in hand. They tell of the end of
    a transfer before they do, and may be far behind with what finalizers left to them."""
    deadline = Deadline(WAIT_S)
    while not condition():
        if deadline.over:
            return False
        keeper.call(list)
    return True


def are_collected(*references: weakref.ref[Any]) -> bool:
    """Whether nothing but garbage is left of them."""

    def look() -> bool:
        gc.collect()
        return all(reference() is None for reference in references)

    return settles(look)


def traced_bytes(scheduler: LayerwiseScheduler, most_bytes: int) -> int:
    """Memory that tracemalloc knows of, as soon as it is less than ``most_bytes``; else what it is after a while."""
    found = 0

    def look() -> bool:
        nonlocal found
        scheduler.stats()  # what finalizers left to the next section
        gc.collect()
        found = tracemalloc.get_traced_memory()[0]
        return found < most_bytes

    settles(look)
    return found
