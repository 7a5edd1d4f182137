"""A model that runs on a ring of layer buffers: it checks what it reads, writes what nobody has seen before, and knows
what each host block has to hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Transfer
from paddle_kv.integrations import ForwardPass
from tests.schedule.rig import POISON, WAIT_S, bytes_at, make_spec, pool_memory, random_bits, set_pool

DEVICE_BLOCKS, HOST_BLOCKS = 13, 17
SPEC = make_spec(num_layers=7)


class RingRig:
    def __init__(self, layer_buffers: int, spec: KVCacheSpec = SPEC, *, seed: int = 5) -> None:
        self.spec = spec
        self.cache = DeviceCache(spec, DEVICE_BLOCKS, "cpu", layer_buffers=layer_buffers)
        self.pool = HostPool(spec, HOST_BLOCKS)
        self.host = random_bits(spec, HOST_BLOCKS, 2)
        set_pool(self.pool, self.host)
        self.random = np.random.default_rng(seed)
        self.wrong: list[str] = []
        self.touched: set[int] = set()
        self.earlier: list[Transfer] = []  # of the passes so far
        for buffer in range(layer_buffers):
            for name in spec.tensor_names:
                self.rows(name, buffer)[:] = POISON
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)

    def rows(self, name: str, layer: int) -> np.ndarray:
        """``[blocks, bytes of a block]``, where the layer lies."""
        size_bytes = self.spec.tensor_block_bytes(name)
        memory = bytes_at(self.cache.tensor(name, layer).data_ptr(), DEVICE_BLOCKS * size_bytes)
        return memory.reshape(DEVICE_BLOCKS, size_bytes)

    def compute(self, layer: int, reads: dict[int, int], writes: dict[int, int]) -> None:
        """``reads`` and ``writes``: device block -> host block. Of a block that is in both the first half stays."""
        for name in self.spec.tensor_names:
            rows = self.rows(name, layer)
            for device_id, host_id in reads.items():
                if (rows[device_id] != self.host[name][layer, host_id]).any():
                    self.wrong.append(f"{name} of layer {layer} in block {device_id}")
            for device_id, host_id in writes.items():
                new = self.random.integers(0, 256, rows.shape[1], np.uint8)
                if device_id in reads:
                    half = len(new) // 2
                    new[:half] = rows[device_id, :half]
                rows[device_id] = self.host[name][layer, host_id] = new

    def run(self, reads: dict[int, int], writes: dict[int, int]) -> None:
        """A pass of the model."""
        self.touched |= {*reads, *writes}
        self.wait_for_earlier([one for one in writes if one not in reads])
        load = self.scheduler.onload(list(reads.values()), list(reads))
        self.earlier.append(load)
        save = self.scheduler.offload(list(writes), list(writes.values()), layerwise=True)
        self.earlier.append(save)
        with ForwardPass([load], [save], timeout_s=WAIT_S) as layers:
            for layer in range(self.spec.num_layers):
                with layers.layer(layer):
                    self.compute(layer, reads, writes)
        load.wait(WAIT_S)

    def wait_for_earlier(self, device_ids: list[int], timeout_s: float = WAIT_S) -> None:
        """Compute is about to write blocks that the pass does not load: what earlier passes move of them has to be over
        (clause 5). Their last layers may be on their way while the pass is at its first ones, in the same buffers."""
        self.earlier = [one for one in self.earlier if not one.done()]
        for transfer in self.earlier:
            if np.isin(transfer.plan.device_ids, device_ids).any():
                transfer.wait_over(timeout_s)

    def table(self, host_ids: Sequence[int]) -> dict[int, int]:
        """These host blocks in device blocks of any order."""
        ids = self.random.permutation(DEVICE_BLOCKS - 2)[: len(host_ids)].tolist()
        return dict(zip(ids, host_ids, strict=True))

    def check(self) -> None:
        """All bytes of the pool, and those of the cache that nobody was to touch."""
        self.scheduler.drain(WAIT_S)
        assert not self.wrong, self.wrong
        found = pool_memory(self.pool)
        for name in self.spec.tensor_names:
            np.testing.assert_array_equal(found[name], self.host[name], err_msg=name)
            for buffer in range(self.cache.layer_buffers):
                others = [one for one in range(DEVICE_BLOCKS) if one not in self.touched]
                assert (self.rows(name, buffer)[others] == POISON).all()

    def close(self) -> None:
        self.scheduler.close(WAIT_S)
        self.pool.close()


def chunks(rig: RingRig, steps: Sequence[tuple[int, int]]) -> None:
    """A prompt in passes: each reads blocks ``[0, start)`` of the host and writes ``[start - overlap, stop)``; a step
    is (overlap, stop). An overlap is a block that was partly filled."""
    start = 0
    for overlap, stop in steps:
        table = rig.table(range(stop))
        on_host = {host_id: device_id for device_id, host_id in table.items()}
        reads = {on_host[one]: one for one in range(start)}
        writes = {on_host[one]: one for one in range(max(0, start - overlap), stop)}
        rig.run(reads, writes)
        start = stop
