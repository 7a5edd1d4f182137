"""Pools and caches in shared memory: attached by another process, and given back however the processes end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from paddle_kv import AttachError, ClosedError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from tests.schedule.rig import (
    WAIT_S,
    assert_same,
    cache_memory,
    make_spec,
    moved,
    pool_memory,
    random_bits,
    set_cache,
    set_pool,
)

BLOCKS = 5
KINDS = {"host_pool": HostPool, "device_cache": DeviceCache}


def make(kind: str, spec: KVCacheSpec | None = None) -> Any:
    spec = spec or make_spec()
    return (
        DeviceCache(spec, BLOCKS, "cpu", shared=True) if kind == "device_cache" else HostPool(spec, BLOCKS, shared=True)
    )


def bits_of(memory: Any) -> dict[str, np.ndarray]:
    return cache_memory(memory) if isinstance(memory, DeviceCache) else pool_memory(memory)


def set_bits(memory: Any, bits: dict[str, np.ndarray]) -> None:
    (set_cache if isinstance(memory, DeviceCache) else set_pool)(memory, bits)


def memfds() -> int:
    """Descriptors and mappings of shared memory in this process."""
    with open("/proc/self/maps") as file:
        mapped = sum("memfd:paddle_kv-" in line for line in file)
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found += "memfd:paddle_kv-" in os.readlink(f"/proc/self/fd/{name}")
    return mapped + found


@pytest.fixture(autouse=True)
def _all_is_given_back() -> Iterator[None]:
    gc.collect()  # what other tests have left
    before = memfds()
    yield
    assert memfds() == before


def serve(connection: Connection) -> None:
    """The other process: attaches, writes, tells, makes, as it is asked."""
    kept: list[Any] = []
    while True:
        order, kind, *rest = connection.recv()
        if order == "attach":
            kept.append(KINDS[kind].attach(make_spec(), rest[0]))
            connection.send(bits_of(kept[-1]))
        elif order == "write":
            set_bits(kept[-1], random_bits(make_spec(), BLOCKS, rest[0]))
            connection.send(None)
        elif order == "make":
            kept.append(make(kind))
            set_bits(kept[-1], random_bits(make_spec(), BLOCKS, rest[0]))
            connection.send(kept[-1].export())
        elif order == "forget":
            kept.clear()
            connection.send(memfds())


class Other:
    """A process that has nothing of this one but what is sent to it."""

    def __init__(self) -> None:
        self.here, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def ask(self, *order: Any) -> Any:
        self.here.send(order)
        assert self.here.poll(60)
        return self.here.recv()

    def kill(self) -> None:
        assert self.process.pid
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    found = Other()
    yield found
    found.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_see_every_byte(other: Other, kind: str) -> None:
    memory = make(kind)
    bits = random_bits(memory.spec, BLOCKS, 1)
    set_bits(memory, bits)
    assert_same(other.ask("attach", kind, memory.export()), bits)
    other.ask("write", kind, 2)
    assert_same(bits_of(memory), random_bits(memory.spec, BLOCKS, 2))
    assert other.ask("forget", kind) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_has_one_name(kind: str) -> None:
    memory, another = make(kind), make(kind)
    attached = KINDS[kind].attach(make_spec(), memory.export())
    assert attached.memory_id == memory.memory_id == memory.export().memory_id
    assert another.memory_id != memory.memory_id


@pytest.mark.parametrize("layout", ["layer_first", "block_first", "page_first_direct"])
def test_every_layout_of_a_pool(other: Other, layout: Any) -> None:
    pool = HostPool(make_spec(), BLOCKS, layout=layout, shared=True)
    set_pool(pool, random_bits(pool.spec, BLOCKS, 3))
    assert_same(other.ask("attach", "host_pool", pool.export()), random_bits(pool.spec, BLOCKS, 3))
    other.ask("forget", "host_pool")
    pool.close()


def test_every_dtype_of_a_cache() -> None:
    for dtype in ("bfloat16", "float16", "float32", "int8", "uint8", "float8_e4m3fn", "bool"):
        spec = make_spec(dtype=dtype, extra={"flag": ((3,), "bool"), "scale": ((2, 5), "bfloat16")})
        plain, shared = DeviceCache(spec, BLOCKS, "cpu"), DeviceCache(spec, BLOCKS, "cpu", shared=True)
        for name in spec.tensor_names:
            assert shared.tensor(name, 1).dtype == plain.tensor(name, 1).dtype
            assert shared.tensor(name, 1).shape == plain.tensor(name, 1).shape
            assert shared.tensor(name, 1).data_ptr() % 64 == 0
        assert_same(cache_memory(shared), cache_memory(plain))  # zeros


def test_transfers_between_memories_of_two_processes(other: Other) -> None:
    there = random_bits(make_spec(), BLOCKS, 4)
    cache = DeviceCache.attach(make_spec(), other.ask("make", "device_cache", 4))
    pool = make("host_pool")
    with LayerwiseScheduler(cache, pool) as scheduler:
        scheduler.offload([4, 1], [0, 3]).wait(WAIT_S)
    zeros = {name: np.zeros_like(array) for name, array in there.items()}
    assert_same(pool_memory(pool), moved(there, zeros, [4, 1], [0, 3]))
    pool.close()
    other.ask("forget", "device_cache")


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_lives_as_long_as_one_process_has_it(kind: str) -> None:
    other = Other()
    mine = KINDS[kind].attach(make_spec(), exported := other.ask("make", kind, 5))
    other.kill()
    assert_same(bits_of(mine), random_bits(mine.spec, BLOCKS, 5))
    same = KINDS[kind].attach(make_spec(), exported)  # it is here
    assert same.domain is mine.domain
    del mine, same
    with pytest.raises(AttachError, match="is gone"):
        KINDS[kind].attach(make_spec(), exported)


def test_memory_that_the_other_one_held_when_it_was_killed(other: Other) -> None:
    victim, memory = Other(), make("host_pool")
    victim.ask("attach", "host_pool", memory.export())
    victim.ask("write", "host_pool", 6)
    victim.kill()
    assert_same(pool_memory(memory), random_bits(memory.spec, BLOCKS, 6))
    assert_same(other.ask("attach", "host_pool", memory.export()), random_bits(memory.spec, BLOCKS, 6))
    other.ask("forget", "host_pool")
    memory.close()


def test_a_cache_of_which_the_tensors_lie_in_two_memories() -> None:
    caches = [make("device_cache") for _ in range(2)]
    bits = [random_bits(make_spec(), BLOCKS, seed) for seed in (10, 11)]
    for cache, its_bits in zip(caches, bits, strict=True):
        set_bits(cache, its_bits)
    first, second = (cache.export() for cache in caches)
    values = tuple((1, first_byte) for _, first_byte in second.tensors["value"])
    both = dataclasses.replace(
        first, allocations=first.allocations + second.allocations, tensors={**first.tensors, "value": values}
    )
    tensors = [cache.tensor("key", 0) for cache in caches]  # the memory, but no cache that has it
    del caches, cache
    assert_same(bits_of(DeviceCache.attach(make_spec(), both)), {**bits[0], "value": bits[1]["value"]})
    del tensors


def test_a_tensor_keeps_the_memory() -> None:
    cache = make("device_cache")
    tensor = cache.tensor("key", 2)
    tensor[3] = 2.5
    before = memfds()
    del cache
    assert memfds() == before
    assert tensor.numpy()[3].min() == 2.5
    del tensor


def test_the_blocks_of_an_attached_pool_are_given_out_by_its_maker(other: Other) -> None:
    pool = HostPool.attach(make_spec(), other.ask("make", "host_pool", 7))
    assert pool.num_free_blocks == 0
    assert pool.pinned_bytes == 0
    with pytest.raises(MemoryError):
        pool.allocate(1)
    pool.close()
    other.ask("forget", "host_pool")


def test_a_closed_pool_describes_nothing_and_cannot_be_attached() -> None:
    pool = make("host_pool")
    exported = pool.export()
    pool.close()
    with pytest.raises(ClosedError):
        pool.export()
    with pytest.raises(AttachError, match="given back"):
        HostPool.attach(make_spec(), exported)


def test_memory_that_is_not_shared_cannot_be_exported() -> None:
    for memory in (HostPool(make_spec(), BLOCKS), DeviceCache(make_spec(), BLOCKS, "cpu")):
        with pytest.raises(ValueError, match="shared=True"):
            memory.export()


def test_another_spec_host_kind_or_version_is_refused() -> None:
    pool = make("host_pool")
    exported = pool.export()
    with pytest.raises(AttachError, match="block_size"):
        HostPool.attach(make_spec(block_size=8), exported)
    with pytest.raises(AttachError, match="another host"):
        HostPool.attach(make_spec(), dataclasses.replace(exported, host="elsewhere"))
    with pytest.raises(AttachError, match="of a host_pool"):
        DeviceCache.attach(make_spec(), exported)
    with pytest.raises(AttachError, match="version"):
        HostPool.attach(make_spec(), dataclasses.replace(exported, version=2))
    with pytest.raises(AttachError, match="cpu"):
        HostPool.attach(make_spec(), dataclasses.replace(exported, device="gpu:0"))
    with pytest.raises(TypeError, match="export"):
        HostPool.attach(make_spec(), "forged")
    with pytest.raises(TypeError):
        HostPool.attach("spec", exported)
    pool.close()


WRONG: list[Any] = [-1, 0, 1, 2, 3, True, 1 << 40, 1 << 70, "", "0", "../self", "a\0b", None, 1.5, (), [], {}, (1, 2)]


def forge(value: Any, rng: random.Random) -> Any:
    """One leaf of the description, or a branch of it, is another one."""
    if rng.random() < 0.2:
        return rng.choice(WRONG)
    if dataclasses.is_dataclass(value) and not isinstance(value, (KVCacheSpec, type)):
        name = rng.choice([one.name for one in dataclasses.fields(value)])
        return dataclasses.replace(value, **{name: forge(getattr(value, name), rng)})
    if isinstance(value, dict) and value:
        name = rng.choice(list(value))
        return {**value, name: forge(value[name], rng)}
    if isinstance(value, tuple) and value:
        place = rng.randrange(len(value))
        return (*value[:place], forge(value[place], rng), *value[place + 1 :])
    if isinstance(value, int):
        return rng.choice([value + rng.randrange(-9, 10), rng.choice(WRONG)])
    return rng.choice(WRONG)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forged_description_is_refused_or_lies_within_the_memory(kind: str) -> None:
    memory, rng, refused = make(kind), random.Random(1), 0
    exported = pickle.loads(pickle.dumps(memory.export()))
    bits = random_bits(memory.spec, BLOCKS, 8)
    set_bits(memory, bits)
    for _ in range(2000):
        forged = forge(exported, rng)
        try:
            found = KINDS[kind].attach(memory.spec, forged)
        except (AttachError, TypeError):
            refused += 1
            continue
        bits_of(found)  # reads all of it: what lies outside would end the process
        del found
    assert refused > 1000
    assert_same(bits_of(memory), bits)
    if kind == "host_pool":
        memory.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_block_lies_one_byte_outside_the_memory(kind: str) -> None:
    memory = make(kind)
    exported = memory.export()
    for name, places in exported.tensors.items():
        for layer, (number, offset) in enumerate(places):
            size_bytes = exported.allocations[number].size_bytes
            used_bytes = (BLOCKS - 1) * exported.strides_bytes[name] + memory.spec.tensor_block_bytes(name)
            for wrong in (-1, size_bytes - used_bytes + 1, 1 << 40):
                moved_places = (*places[:layer], (number, wrong), *places[layer + 1 :])
                forged = dataclasses.replace(exported, tensors={**exported.tensors, name: moved_places})
                with pytest.raises(AttachError, match="does not lie in the memory"):
                    KINDS[kind].attach(memory.spec, forged)
            assert offset + used_bytes <= size_bytes
    with pytest.raises(AttachError, match="does not lie in the memory"):
        KINDS[kind].attach(memory.spec, dataclasses.replace(exported, num_blocks=1000))
    if kind == "host_pool":
        memory.close()


def test_the_size_of_the_memory_is_final() -> None:
    """Shortened, it would end every process that touches what is missing."""
    pool = make("host_pool")
    handle = pool.export().allocations[0]
    for size_bytes in (0, handle.size_bytes + 4096):
        with pytest.raises(PermissionError):  # whoever opens it
            os.ftruncate(handle.descriptor, size_bytes)
    pool.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_the_same_memory() -> None:
    pool, bits = make("host_pool"), random_bits(make_spec(), BLOCKS, 9)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        set_pool(pool, bits)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(pool_memory(pool), bits)
    pool.close()
