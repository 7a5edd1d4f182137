"""Random passes over a ring of layer buffers, beside a cache with memory for each layer, and what every byte has to be.

Each byte that is computed names its layer, its tensor and the write that made it. What a load brings is compared when
the model is at the layer, at its beginning and at its end; what a save has brought, when it is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_kv import (
    BackendError,
    CancelledError,
    ClosedError,
    DeviceCache,
    HostPool,
    LayerwiseScheduler,
    Transfer,
    TransferError,
)
from paddle_kv.backend.cpu_backend import CpuBackend
from paddle_kv.integrations import ForwardPass
from paddle_kv.schedule.movement import State
from tests.schedule.rig import POISON, WAIT_S, bytes_at, make_spec, pool_memory, random_bits, set_pool

DEVICE_BLOCKS, HOST_BLOCKS = 6, 8  # of each worker
LONG_S = 0.002
ENDS = (TransferError, CancelledError, ClosedError, BackendError)
Rows = dict[str, np.ndarray]  # of a block: name -> [layers, bytes]


class Left(Exception):
    """The model leaves a pass."""


class Chance:
    """Dice that several threads may throw."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def of(self, share: float) -> bool:
        with self._lock:
            return bool(self._random.random() < share)


class Disturbed(CpuBackend):
    """Calls that fail: a submission before or behind what it has submitted, and what a mark records."""

    def __init__(self, chance: Chance, share: float) -> None:
        self._chance, self._share = chance, share

    def copy_layers(self, binding: int, work: Any, stream: Any) -> None:
        if self._chance.of(self._share):
            raise BackendError("nothing was submitted")
        super().copy_layers(binding, work, stream)
        if self._chance.of(self._share):
            raise BackendError("it was submitted, and failed")

    def record(self, event: Any, stream: Any) -> None:
        if stream is None and self._chance.of(self._share):
            raise BackendError("not recorded")
        super().record(event, stream)


class SlowCopies:
    """In place of the copy of the backend: some take long, some fail."""

    def __init__(self, copy: Callable[..., None], chance: Chance, slow: float, failing: float) -> None:
        self._copy, self._chance, self._slow, self._failing = copy, chance, slow, failing

    def __call__(self, number: int, plan: Any, layers: range) -> None:
        for layer in layers:
            if self._chance.of(self._slow):
                time.sleep(LONG_S)
            if self._chance.of(self._failing):
                raise OSError("a copy is lost")
            self._copy(number, plan, range(layer, layer + 1))


@dataclass(eq=False)
class Flight:
    """A transfer, and what was expected of it when it was started."""

    transfer: Transfer
    device_ids: list[int]
    wrong: list[str] = field(default_factory=list)  # of a load that ends well it must be empty
    rows: dict[int, Rows] = field(default_factory=dict)  # of a save: host block -> what it brings


class Worker:
    """One thread of a server, with device and host blocks of its own in pools that it shares."""

    def __init__(self, traffic: RingTraffic, number: int, scheduler: LayerwiseScheduler, seed: int) -> None:
        self.traffic = traffic
        self.random = np.random.default_rng(seed)
        self.device_ids = [DEVICE_BLOCKS * number + one for one in range(DEVICE_BLOCKS)]
        self.host_ids = [HOST_BLOCKS * number + one for one in range(HOST_BLOCKS)]
        self.scheduler = scheduler
        self.flights: list[Flight] = []
        self.last_save: dict[int, Flight] = {}
        self.unknown: set[int] = set()  # host blocks whose save came to nothing
        self.num_writes = 0
        self.ends: dict[State, int] = dict.fromkeys(State, 0)

    def chosen(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def some(self, ids: list[int], most: int) -> list[int]:
        count = int(self.random.integers(0, min(most, len(ids)) + 1))
        return self.random.permutation(ids)[:count].tolist()

    # ---- a pass ----
    def run(self) -> None:
        reads = self.reads()
        writes = self.writes(reads)
        self.free([one for one in writes if one not in reads])
        begun: list[Flight] = []
        try:
            loads = [self.load(part, begun) for part in self.parts(reads)]
            saves = [self.save(part, reads, begun) for part in self.parts(writes)]
        except ENDS:
            self.cancel(begun)
            return
        expected = {one: self.rows(host_id) for one, host_id in reads.items()}
        new = {one: self.computed(one, expected) for one in writes}
        for flight in saves:
            for device_id, host_id in zip(flight.device_ids, flight.transfer.plan.host_ids.tolist(), strict=True):
                flight.rows[host_id] = new[device_id]
        try:
            run = self.by_hand if self.chosen(0.3) else self.by_pass
            run(loads, saves, lambda layer: self.compute(layer, loads, expected, new))
        except (*ENDS, Left):
            self.cancel(begun)
        for flight in saves:
            for host_id, rows in flight.rows.items():
                self.traffic.set_rows(host_id, rows)
                self.last_save[host_id] = flight
                self.unknown.discard(host_id)

    def reads(self) -> dict[int, int]:
        known = [one for one in self.host_ids if one not in self.unknown]
        host_ids = self.some(known, 4)
        return dict(zip(self.random.permutation(self.device_ids)[: len(host_ids)].tolist(), host_ids, strict=True))

    def writes(self, reads: dict[int, int]) -> dict[int, int]:
        """A block that is read may be saved to where it came from, or elsewhere."""
        device_ids = self.some(self.device_ids, 3)
        targets = self.random.permutation(self.host_ids).tolist()
        found = {one: reads[one] for one in device_ids if one in reads and self.chosen(0.6)}
        left = [one for one in targets if one not in found.values()]
        return {one: found[one] if one in found else left.pop() for one in device_ids}

    def parts(self, table: dict[int, int]) -> list[dict[int, int]]:
        """In up to two transfers."""
        items = list(table.items())
        cut = int(self.random.integers(0, len(items) + 1)) if self.chosen(0.4) else len(items)
        return [dict(part) for part in (items[:cut], items[cut:]) if part or self.chosen(0.1)]

    def load(self, table: dict[int, int], begun: list[Flight]) -> Flight:
        urgent = [None, True, False][self.random.integers(3)]
        transfer = self.scheduler.onload(list(table.values()), list(table), urgent=urgent)
        return self.began(Flight(transfer, list(table)), begun)

    def save(self, table: dict[int, int], reads: dict[int, int], begun: list[Flight]) -> Flight:
        transfer = self.scheduler.offload(list(table), list(table.values()), layerwise=True)
        return self.began(Flight(transfer, list(table)), begun)

    def began(self, flight: Flight, begun: list[Flight]) -> Flight:
        begun.append(flight)
        self.flights.append(flight)
        return flight

    def rows(self, host_id: int) -> Rows:
        return {name: self.traffic.host[name][:, host_id].copy() for name in self.traffic.spec.tensor_names}

    def computed(self, device_id: int, expected: dict[int, Rows]) -> Rows:
        """What the model makes of a block: of one that was read the first half stays."""
        self.num_writes += 1
        found: Rows = {}
        for number, name in enumerate(self.traffic.spec.tensor_names):
            size_bytes = self.traffic.spec.tensor_block_bytes(name)
            stamps = [[layer, number, device_id, self.num_writes % 256] for layer in range(self.traffic.num_layers)]
            found[name] = np.array([np.resize(np.array(stamp, np.uint8), size_bytes) for stamp in stamps])
            if device_id in expected:
                found[name][:, : size_bytes // 2] = expected[device_id][name][:, : size_bytes // 2]
        return found

    def compute(self, layer: int, loads: list[Flight], expected: dict[int, Rows], new: dict[int, Rows]) -> None:
        self.look(layer, loads, expected)
        if self.chosen(0.1):
            time.sleep(LONG_S)
            self.look(layer, loads, expected)
        for device_id, rows in new.items():
            for name, values in rows.items():
                first = values.shape[1] // 2 if device_id in expected else 0
                self.traffic.device_rows(name, layer)[device_id, first:] = values[layer, first:]

    def look(self, layer: int, loads: list[Flight], expected: dict[int, Rows]) -> None:
        for flight in loads:
            for device_id in flight.device_ids:
                for name, rows in expected[device_id].items():
                    found = self.traffic.device_rows(name, layer)[device_id]
                    if (found != rows[layer]).any():
                        flight.wrong.append(f"{name} of layer {layer} in block {device_id}: {found[:6].tolist()}")

    def by_pass(self, loads: list[Flight], saves: list[Flight], compute: Callable[[int], None]) -> None:
        given = [flight.transfer for flight in loads], [flight.transfer for flight in saves]
        with ForwardPass(*given, timeout_s=WAIT_S) as layers:
            for layer in range(self.traffic.num_layers):
                with layers.layer(layer):
                    compute(layer)
                    self.disturb([*loads, *saves])

    def by_hand(self, loads: list[Flight], saves: list[Flight], compute: Callable[[int], None]) -> None:
        """Marks in any order that the contract allows; what was read is marked before it is marked as written."""
        ring = self.traffic.layer_buffers
        late: list[Callable[[], None]] = []
        for layer in range(self.traffic.num_layers):
            for call in self.random.permutation(np.array(late, object)).tolist():
                call()
            late = []
            for flight in loads:
                flight.transfer.wait_layer(layer, timeout_s=WAIT_S)
            for flight in saves if layer >= ring else ():
                flight.transfer.wait_layer(layer - ring, timeout_s=WAIT_S)
            compute(layer)
            self.disturb([*loads, *saves])
            for flight in saves:
                late.append(lambda flight=flight, layer=layer: flight.transfer.mark_layer_written(layer))
            for flight in loads if self.traffic.cache.is_ring else ():
                late.append(lambda flight=flight, layer=layer: flight.transfer.mark_layer_read(layer))
            if self.chosen(0.7):
                for call in late:
                    call()
                late = []
        for call in late:
            call()

    def disturb(self, flights: list[Flight]) -> None:
        if not self.traffic.disturbed or not flights or not self.chosen(0.02):
            return
        what = int(self.random.integers(4))
        if what == 0:
            raise Left
        if what == 1 and self.traffic.own_schedulers:
            self.scheduler.close(WAIT_S)
            self.scheduler = self.traffic.open(self.traffic.cache)
        else:
            flights[int(self.random.integers(len(flights)))].transfer.cancel()

    # ---- the ends ----
    def cancel(self, flights: list[Flight]) -> None:
        for flight in flights:
            flight.transfer.cancel()

    def free(self, device_ids: list[int]) -> None:
        """Compute is about to write blocks that the pass does not load: what uses them has to be over (clause 5)."""
        if any(set(device_ids) & set(flight.device_ids) for flight in self.flights):
            self.settle()

    def settle(self) -> None:
        for flight in self.flights:
            transfer = flight.transfer
            transfer.wait_over(WAIT_S)
            self.ends[transfer.state] += 1
            if transfer.state is State.DONE:
                assert not flight.wrong, flight.wrong
                continue
            for host_id in flight.rows:
                if self.last_save.get(host_id) is flight:
                    self.unknown.add(host_id)
            if transfer.plan.direction == "offload" and not flight.rows:
                self.unknown.update(transfer.plan.host_ids.tolist())  # its pass has not begun
        failed = [one for flight in self.flights if flight.transfer.error is not None for one in flight.device_ids]
        self.traffic.cache.mark_rewritten(failed)
        self.flights = []
        poisoned = set(self.traffic.pool.domain.poisoned(self.host_ids))
        assert poisoned <= self.unknown, "what a save that ended well has brought is not usable"


class RingTraffic:
    """A server of random sizes."""

    def __init__(self, seed: int, *, num_workers: int = 1, failing: float = 0.0) -> None:
        random = np.random.default_rng(seed)
        self.num_layers = int(random.integers(2, 9))
        self.layer_buffers = int(random.integers(2, self.num_layers + 1))
        self.spec = make_spec(num_layers=self.num_layers, extra={"scale": ((3,), "float32")})
        self.chance = Chance(seed)
        self.failing = failing
        self.disturbed = failing > 0
        self.own_schedulers = num_workers == 1 or bool(random.integers(2))
        device_blocks = DEVICE_BLOCKS * num_workers + 1
        self.cache = DeviceCache(self.spec, device_blocks, "cpu", layer_buffers=self.layer_buffers)
        self.pool = HostPool(self.spec, HOST_BLOCKS * num_workers)
        self.host = random_bits(self.spec, HOST_BLOCKS * num_workers, seed)
        set_pool(self.pool, self.host)
        self._buffers = {
            (name, buffer): self._memory(name, buffer)
            for name in self.spec.tensor_names
            for buffer in range(self.layer_buffers)
        }
        for rows in self._buffers.values():
            rows[:] = POISON
        shared = self.open(self.cache)
        self.workers = [
            Worker(
                self, number, shared if number == 0 or not self.own_schedulers else self.open(self.cache), seed + number
            )
            for number in range(num_workers)
        ]

    def _memory(self, name: str, buffer: int) -> np.ndarray:
        size_bytes = self.spec.tensor_block_bytes(name)
        memory = bytes_at(self.cache.tensor(name, buffer).data_ptr(), self.cache.num_blocks * size_bytes)
        return memory.reshape(self.cache.num_blocks, size_bytes)

    def open(self, cache: DeviceCache, **options: Any) -> LayerwiseScheduler:
        return LayerwiseScheduler(cache, self.pool, backend=Disturbed(self.chance, self.failing / 4), **options)

    def device_rows(self, name: str, layer: int) -> np.ndarray:
        return self._buffers[name, layer % self.layer_buffers]

    def set_rows(self, host_id: int, rows: Rows) -> None:
        for name, values in rows.items():
            self.host[name][:, host_id] = values

    def check(self) -> None:
        """All bytes of the pool that are known, and of the cache those that nobody was to touch."""
        for worker in self.workers:
            worker.settle()
        unknown = [one for worker in self.workers for one in worker.unknown]
        known = [one for one in range(self.pool.num_blocks) if one not in unknown]
        found = pool_memory(self.pool)
        for name in self.spec.tensor_names:
            np.testing.assert_array_equal(found[name][:, known], self.host[name][:, known], err_msg=name)
        assert all((rows[-1] == POISON).all() for rows in self._buffers.values())

    def close(self) -> None:
        for worker in self.workers:
            worker.scheduler.close(WAIT_S)
        self.pool.close()
