"""The manager and the passes around layers on a GPU: what was saved comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, devices
from paddle_kv.integrations import CacheTransferManager, ForwardPass
from paddle_kv.offload import KVOffloadManager

WAIT_S = 20.0
BLOCKS = 13
SPEC = KVCacheSpec(num_layers=5, num_kv_heads=3, head_dim=8, block_size=7, dtype="float16")


class Server:
    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.bits = {
            name: [rng.integers(0, 30000, (BLOCKS, *SPEC.block_shape(name)), np.uint16) for _ in range(SPEC.num_layers)]
            for name in SPEC.tensor_names
        }
        self.tensors = {
            name: [paddle.to_tensor(array.view(np.float16), place=devices.place_of(0)) for array in arrays]
            for name, arrays in self.bits.items()
        }
        self.pool = HostPool(SPEC, 17)
        self.scheduler = LayerwiseScheduler(DeviceCache.adopt(SPEC, self.tensors), self.pool)

    def expect(self, source_ids: list[int], target_ids: list[int]) -> None:
        for arrays in self.bits.values():
            for array in arrays:
                array[target_ids] = array[source_ids]

    def check(self) -> None:
        for name, arrays in self.bits.items():
            for layer, array in enumerate(arrays):
                found = self.tensors[name][layer].numpy().view(np.uint16)
                np.testing.assert_array_equal(found, array, err_msg=f"{name} {layer}")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.scheduler.close(WAIT_S)
    made.pool.close()


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_was_saved_comes_back(server: Server, layerwise: bool) -> None:
    manager = KVOffloadManager(server.scheduler, policy="s3fifo")
    hashes = manager.block_hashes(np.arange(4 * SPEC.block_size))
    save = manager.save(hashes, [9, 2, 11, 5], layerwise=layerwise)
    with ForwardPass(saves=[save] if layerwise else []) as layers:
        for layer in range(SPEC.num_layers):
            with layers.layer(layer):
                pass
    save.wait(WAIT_S)
    with manager.lookup(hashes) as lease:
        assert lease.num_blocks == 4
        load = manager.onload(lease.hashes, [0, 7, 3, 12])
    with ForwardPass([load]) as layers:
        for layer in range(SPEC.num_layers):
            layers.before(layer)
    load.wait(WAIT_S)
    server.expect([9, 2, 11, 5], [0, 7, 3, 12])
    server.check()
    manager.close()
    assert server.pool.num_free_blocks == 17


def test_the_adapter_moves_blocks_behind_saves_whose_result_is_dropped(server: Server) -> None:
    manager = CacheTransferManager(server.scheduler)
    manager.evict_to_host_async([4, 9], [11, 2])
    events: list[object] = []
    load = manager.load_layers_to_device_async(
        range(SPEC.num_layers), [2, 11], [0, 1], lambda layer: events.append(manager.record_input_stream_event())
    )
    for event in events:
        event.synchronize()  # type: ignore[attr-defined]
    manager.record_input_stream_event().synchronize()
    load.wait(WAIT_S)
    manager.load_layers_to_device_async(range(SPEC.num_layers), [11], [6])
    manager.sync_input_stream()
    paddle.device.synchronize()
    server.expect([9, 4, 4], [0, 1, 6])
    server.check()
