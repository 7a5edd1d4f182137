"""Blocks from the GPU cache of one process straight into that of another one: CUDA IPC, every byte, and every end."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from paddle_kv import (  # noqa: E402
    AttachError,
    CancelledError,
    CudaError,
    DeviceCache,
    HostPool,
    LayerwiseScheduler,
    LeasedError,
    PaddleKVError,
    TransferError,
    devices,
)
from paddle_kv.memory import device_memory  # noqa: E402
from paddle_kv.memory.host_memory import can_page_lock  # noqa: E402
from paddle_kv.peers import PeerBlocks, Receiver, connect  # noqa: E402
from tests.gpu import delay  # noqa: E402
from tests.gpu.peer_rig import (  # noqa: E402
    ANY_KIND,
    ENGINES,
    SEED,
    SPECS,
    GpuDecode,
    Process,
    bits_of,
    decode,
    end_spares,
    ended,
    hand_over,
    prefill,
    set_cache,
    until,
    use_gpu,
)
from tests.memory.test_heads import with_heads_moved  # noqa: E402
from tests.schedule.rig import SHORT_S, WAIT_S, assert_same, make_spec, moved, random_bits  # noqa: E402

pytestmark = pytest.mark.skipif(not can_page_lock(), reason="needs a GPU and operators built for it")
KILLS = 4


@dataclass(frozen=True)
class Gpus:
    """Of the two processes."""

    sender: int
    receiver: int


WAYS = {"one-gpu": Gpus(0, 0), "0-to-1": Gpus(0, 1), "1-to-0": Gpus(1, 0)}


@pytest.fixture(params=WAYS)
def gpus(request: pytest.FixtureRequest) -> Iterator[Gpus]:
    found = WAYS[request.param]
    if devices.gpu_count() <= max(found.sender, found.receiver):
        pytest.skip("there is one GPU")
    yield found
    use_gpu(0)


@pytest.fixture(scope="module", autouse=True)
def spares() -> Iterator[None]:
    yield
    end_spares()


@contextlib.contextmanager
def both(gpus: Gpus, kind: str) -> Iterator[tuple[GpuDecode, Process]]:
    """The receiver here, the sender in a process of its own."""
    use_gpu(gpus.receiver)
    here = GpuDecode(gpus.receiver, kind)
    there = Process(prefill, gpus.sender, kind, here.cache.export(), here.listener.path)
    try:
        yield here, there
    finally:
        there.kill()
        here.close()


def theirs(kind: str) -> dict[str, np.ndarray]:
    spec, blocks, _ = SPECS[kind]
    return random_bits(spec, blocks, SEED)


@pytest.mark.parametrize("kind", ["odd sizes", "4 KiB", "32 KiB", "256 KiB"])
def test_every_byte_with_permuted_ids_and_several_in_flight(gpus: Gpus, kind: str) -> None:
    rng = random.Random(5)
    with both(gpus, kind) as (here, there):
        spec, sources, targets = SPECS[kind]
        for engine in ENGINES:
            free = rng.sample(range(targets), targets)
            loads = []
            for number in range(3):
                count = (targets - 1) // 4
                target, free = free[:count], free[count:]
                source = [rng.randrange(sources) for _ in target]
                loads.append((hand_over(here, there, f"s{number}", source, target, engine), source, target))
            for number, (load, source, target) in enumerate(loads):
                for layer in range(spec.num_layers):
                    load.wait_layer(layer, timeout_s=WAIT_S)
                load.wait(WAIT_S)
                assert there.ask("wait", f"s{number}") == "done"
                here.device = moved(theirs(kind), here.device, source, target)
            assert_same(bits_of(here.cache), here.device)  # also what must not be touched
            here.device = random_bits(spec, targets, rng.randrange(1000))
            set_cache(here.cache, here.device)
        assert_same(there.ask("bits"), theirs(kind))
        assert here.num_held == 0
        # One mapping for each allocation, and the same one for whoever attaches again.
        opened = there.ask("opened")
        assert opened == len(here.cache.export().allocations) <= spec.num_layers * len(spec.tensor_names)
        assert there.ask("again")
        assert there.ask("opened") == opened
        assert there.ask("close") == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["32 KiB", "NHD"])
def test_two_ranks_hand_over_to_one(gpus: Gpus, kind: str, engine: str) -> None:
    """Of twice their tensor-parallel size; the second one is on the receiver's GPU."""
    use_gpu(gpus.receiver)
    here = GpuDecode(gpus.receiver, kind)
    spec, sources, targets = SPECS[kind]
    half, rng = spec.num_kv_heads // 2, random.Random(6)
    target = rng.sample(range(targets), 20)
    exported, path = here.cache.export(), here.listener.path
    ranks = {
        first: Process(prefill, gpu, kind, exported, path, (first, half))
        for first, gpu in ((0, gpus.sender), (half, gpus.receiver))
    }
    try:
        load, grants = here.receiver.grant_heads(target, [half, half], timeout_s=WAIT_S)
        for (first, there), grant in zip(ranks.items(), grants, strict=True):
            source = [rng.randrange(sources) for _ in target]
            there.ask("send", "a", grant.to_json(), source, engine)
            there.ask("mark", "a", list(range(spec.num_layers)))
            bits, moved_ids = random_bits(spec.with_heads(half), sources, SEED + first), (source, target)
            here.device = with_heads_moved(spec.with_heads(half), bits, spec, here.device, moved_ids, (0, first), half)
        for layer in range(spec.num_layers):
            load.wait_layer(layer, timeout_s=WAIT_S)
        load.wait(WAIT_S)
        assert [there.ask("wait", "a") for there in ranks.values()] == ["done", "done"]
        assert_same(bits_of(here.cache), here.device)
        until(lambda: here.num_held == 0)
    finally:
        for there in ranks.values():
            there.kill()
        here.close()


def test_what_comes_after_what(gpus: Gpus) -> None:
    kind = "32 KiB"
    with both(gpus, kind) as (here, there):
        layers = range(here.spec.num_layers)
        size_bytes = here.spec.tensor_block_bytes("key")
        stream = cupy.cuda.Stream(non_blocking=True)
        seen = cupy.zeros((2, len(layers), size_bytes), cupy.uint8)
        delay.warm_up()
        stream.synchronize()
        cupy.cuda.runtime.deviceSynchronize()

        def read(row: int, layer: int, block: int) -> None:
            source = here.cache.pointer("key", layer) + block * size_bytes
            cupy.cuda.runtime.memcpyAsync(seen[row, layer].data.ptr, source, size_bytes, ANY_KIND, stream.ptr)

        # The receiver's model still reads block 3 when it grants it; the sender's computes what it marks.
        with stream:
            delay.busy(stream, 150.0)
            for layer in layers:
                read(0, layer, 3)
            load, grant = here.receiver.grant([3], timeout_s=WAIT_S)
        began_s = time.monotonic()
        there.ask("send", "a", grant.to_json(), [7])
        assert time.monotonic() - began_s > 0.05  # it was let in when the block was free
        there.ask("busy", 100.0)
        there.ask("write", 7, 0x5A, list(layers))
        there.ask("mark", "a", list(layers))
        for layer in layers:  # no host wait in between: the stream waits
            load.wait_layer(layer, stream=stream, timeout_s=WAIT_S)
            read(1, layer, 3)
        stream.synchronize()
        found = seen.get()
        np.testing.assert_array_equal(found[0], here.device["key"][:, 3])
        np.testing.assert_array_equal(found[1], np.full_like(found[1], 0x5A))
        load.wait(WAIT_S)


def test_a_block_is_granted_once_and_revoked_in_the_middle(gpus: Gpus) -> None:
    kind = "long"
    with both(gpus, kind) as (here, there):
        target = list(range(5, 305))
        load, grant = here.receiver.grant(target, timeout_s=WAIT_S)
        with pytest.raises(LeasedError, match="is granted already"):
            here.receiver.grant([9], timeout_s=WAIT_S)
        there.ask("send", "a", grant.to_json(), list(range(300)))
        there.ask("mark", "a", [0, 1, 2])
        load.wait_layer(2, timeout_s=WAIT_S)
        there.ask("busy", 150.0)
        there.ask("mark", "a", [3])  # submitted, and it waits for compute
        time.sleep(SHORT_S)
        here.receiver.revoke(grant)
        with pytest.raises(CancelledError):
            load.wait_layer(3)
        there.ask("wait", "a")
        load.wait_over(WAIT_S)
        until(lambda: here.num_held == 0)
        now = bits_of(here.cache)
        expected = moved(theirs(kind), here.device, list(range(300)), target, [0, 1, 2])
        for name in now:
            np.testing.assert_array_equal(now[name][:3], expected[name][:3])
            np.testing.assert_array_equal(now[name][4:], here.device[name][4:])
            np.testing.assert_array_equal(now[name][3][:5], here.device[name][3][:5])
            np.testing.assert_array_equal(now[name][3][305:], here.device[name][3][305:])
        with pytest.raises(TransferError):  # poisoned
            here.scheduler.offload([5], [0])
        time.sleep(0.3)
        assert_same(bits_of(here.cache), now)  # nobody writes after the end
        assert there.ask("sendings") == 0


def test_a_sender_is_killed_at_random_points(gpus: Gpus) -> None:
    rng, kind, ends = random.Random(11), "long", []
    use_gpu(gpus.receiver)
    here = GpuDecode(gpus.receiver, kind)
    try:
        for number in range(KILLS):
            there = Process(prefill, gpus.sender, kind, here.cache.export(), here.listener.path)
            assert there.ask("sendings") == 0  # it is there
            target = list(range(300))
            load, grant = here.receiver.grant(target, timeout_s=WAIT_S)
            there.ask("send", "a", grant.to_json(), target, "copy_engine")  # which takes some milliseconds
            if number % 2:
                there.ask("busy", 30.0)  # it dies while its GPU has work
            there.tell("mark", "a", list(range(here.spec.num_layers)))
            time.sleep(rng.uniform(0.0, 0.01))
            began_s = time.monotonic()
            there.kill()
            ends.append(ended(load))
            assert time.monotonic() - began_s < WAIT_S / 2
            assert here.num_held == 0
            if ends[-1] == "done":
                here.device = moved(theirs(kind), here.device, target, target)
                assert_same(bits_of(here.cache), here.device)
            else:
                assert here.cache.domain.poisoned(target) == target
            # Whatever ran there runs no more: what is written now stays.
            here.device = random_bits(here.spec, here.cache.num_blocks, number)
            set_cache(here.cache, here.device)
            here.cache.mark_rewritten(target)
            time.sleep(0.1)
            assert_same(bits_of(here.cache), here.device)
        print("ends:", ends)
        assert set(ends) <= {"done", "failed"}
        with LayerwiseScheduler(here.cache, here.pool) as scheduler:  # the GPU is well
            scheduler.offload([5], [0]).wait(WAIT_S)
    finally:
        here.close()


def test_a_receiver_is_killed_at_random_points(gpus: Gpus, tmp_path: Path) -> None:
    rng, kind, ends = random.Random(12), "long", []
    spec, blocks, _ = SPECS[kind]
    use_gpu(gpus.sender)
    cache = DeviceCache(spec, blocks, devices.name_of(gpus.sender))
    set_cache(cache, theirs(kind))
    delay.warm_up()
    os.chmod(tmp_path, 0o700)
    for number in range(KILLS // 2):
        path = str(tmp_path / f"r{number}")
        there = Process(decode, gpus.receiver, kind, path)
        exported, grant = there.ask("exported"), there.ask("grant", list(range(300)))
        blocks_there = PeerBlocks(DeviceCache.attach(spec, exported))
        use_gpu(gpus.sender)  # again: Paddle 2.6 makes another one current where tensors of that one end
        compute = cupy.cuda.Stream(non_blocking=True)
        with LayerwiseScheduler(cache, blocks_there, compute_stream=compute, engine="copy_engine") as scheduler:
            sender = connect(scheduler, path)
            save = sender.send(grant, list(range(300)), timeout_s=WAIT_S)
            if number % 2:
                delay.busy(compute, 30.0)
            for layer in range(spec.num_layers):
                save.mark_layer_written(layer)
            time.sleep(rng.uniform(0.0, 0.01))
            there.kill()
            save.wait_over(WAIT_S)
            ends.append(save.state.value)
            with contextlib.suppress(PaddleKVError):
                # Its memory is mapped here: copies into it harm nobody.
                scheduler.offload([3, 1], [0, 1]).wait(WAIT_S)
            sender.close(WAIT_S)
        blocks_there.close()
        del blocks_there, scheduler, sender, save, exported
        gc.collect()
    print("ends:", ends)
    assert set(ends) <= {"done", "cancelled"}
    assert_same(bits_of(cache), theirs(kind))
    with HostPool(spec, 2) as pool, LayerwiseScheduler(cache, pool) as scheduler:  # the GPU is well
        scheduler.offload([5], [0]).wait(WAIT_S)
    assert len(device_memory._mapped) == 0


def test_what_is_refused() -> None:
    spec = make_spec()
    cache = DeviceCache(spec, 5, devices.name_of(0), shared=True)
    exported = pickle.loads(pickle.dumps(cache.export()))
    assert exported.device.startswith("cuda:")
    assert len({handle.handle for handle in exported.allocations}) == len(exported.allocations)
    with pytest.raises(AttachError, match="is in this process"):
        DeviceCache.attach(spec, exported)
    pooled = cupy.cuda.malloc_async(1 << 20)
    with pytest.raises(ValueError, match="did not come from cudaMalloc"):
        device_memory.Allocation(0, pooled.ptr)
    driver = device_memory.driver()
    handle = exported.allocations[0].handle
    with pytest.raises(CudaError) as caught:  # CUDA itself: the exporting process cannot open its own memory
        driver.open(0, handle)
    print("the driver says:", caught.value)
    with LayerwiseScheduler(cache, HostPool(spec, 3)) as scheduler, Receiver(scheduler, direct=True) as receiver:
        with pytest.raises(ValueError, match="straight into its device cache"):
            receiver.grant([1], host_block_ids=[0])
        load, grant = receiver.grant([1], timeout_s=0.05)
        with pytest.raises(TransferError, match="the time was over"):
            load.wait(WAIT_S)
        assert grant.pool_id == cache.memory_id
