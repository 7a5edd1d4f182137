"""The bytes of the pools move for real: exactly, in pieces, and nothing else."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
from paddle_kv.testing.simulator import POISON, LateChooser, RandomChooser, Simulation
from paddle_kv.testing.simulator.chooser import Chooser
from paddle_kv.testing.simulator.memory import POISON_BYTE

LAYERS = 3
SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=3, head_dim=5, block_size=7, dtype="float16", v_head_dim=2)
DEVICE_BLOCKS, HOST_BLOCKS = 11, 13


def filled(layout: str) -> tuple[DeviceCache, HostPool]:
    random = np.random.default_rng(5)

    def bits(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float16)

    tensors = {
        name: [paddle.to_tensor(bits(DEVICE_BLOCKS, *SPEC.block_shape(name))) for _ in range(LAYERS)]
        for name in SPEC.tensor_names
    }
    cache, pool = DeviceCache.adopt(SPEC, tensors), HostPool(SPEC, HOST_BLOCKS, layout=layout)
    for name in SPEC.tensor_names:
        for layer in range(LAYERS):
            for block in range(HOST_BLOCKS):
                pool.view(name, layer, block)[...] = bits(*SPEC.block_shape(name))
    return cache, pool


def contents(cache: DeviceCache, pool: HostPool, name: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    host = np.stack([pool.view(name, layer, block) for block in range(HOST_BLOCKS)])
    return cache.tensor(name, layer).numpy().copy(), host


@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
@pytest.mark.parametrize("chooser", [LateChooser(), RandomChooser(3)], ids=["late", "random"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_bytes_are_moved_exactly(layout: str, chooser: Chooser, pieces: int) -> None:
    cache, pool = filled(layout)
    before = {(n, i): contents(cache, pool, n, i) for n in SPEC.tensor_names for i in range(LAYERS)}
    simulation = Simulation(chooser, pieces=pieces)
    with LayerwiseScheduler(cache, pool, backend=simulation.backend()) as scheduler:
        scheduler.offload([7, 2, 9], [4, 12, 0])
        scheduler.onload([12, 6, 12], [10, 3, 5]).wait()
    simulation.verify()
    for key, (device, host) in before.items():
        host[[4, 12, 0]] = device[[7, 2, 9]]
        device[[10, 3, 5]] = host[[12, 6, 12]]
        after = contents(cache, pool, *key)
        assert after[0].tobytes() == device.tobytes() and after[1].tobytes() == host.tobytes()
    pool.close()


def test_block_is_half_poison_while_it_is_copied() -> None:
    cache, pool = filled("layer_first")
    name = SPEC.tensor_names[0]
    simulation = Simulation()
    stop_after(simulation, steps=1)
    with LayerwiseScheduler(cache, pool, backend=simulation.backend()) as scheduler:
        save = scheduler.offload([7], [4])
        assert not save.done()
        source = cache.tensor(name, 0)[7].numpy().tobytes()
        seen = pool.view(name, 0, 4).tobytes()
        half = len(source) // 2
        assert seen[:half] == source[:half] and set(seen[half:]) == {POISON_BYTE}
        assert simulation.contents(pool, 4, 0) == POISON
        save.wait()
        assert pool.view(name, 0, 4).tobytes() == source
    pool.close()


def stop_after(simulation: Simulation, steps: int) -> None:
    """The device makes that many steps when it may, then none before it must."""

    class Stopping(LateChooser):
        left = steps

        def choose(self, options):  # type: ignore[no-untyped-def]
            if self.left and any(not option.is_host for option in options):
                self.left -= 1
                return options[0]
            return super().choose(options)

    simulation.device.chooser = Stopping()
