"""Many threads call everything at random, copies fail, handles are lost, schedulers are closed and made anew.

A block holds one number in all layers, which says what was written there. Each thread has device blocks of its own,
allocates host blocks like the others, and knows what they hold unless they are poisoned.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from paddle_kv.backend import binding
from paddle_kv.errors import CancelledError, ClosedError, TransferError
from paddle_kv.integrations import CacheTransferManager
from paddle_kv.layout import KVCacheSpec
from paddle_kv.memory import DeviceCache, HostPool
from paddle_kv.offload import KVOffloadManager
from paddle_kv.schedule.movement import movements
from paddle_kv.schedule.scheduler import LayerwiseScheduler
from paddle_kv.tracking.group import change

LAYERS = 3
WAIT_S = 120.0  # for what has to happen
OWN_BLOCKS = 6  # device blocks of each thread
HOST_BLOCKS = 48
UNKNOWN = 0

SPEC = KVCacheSpec(num_layers=LAYERS, num_kv_heads=1, head_dim=4, block_size=2, dtype="int32", latent=True)
REFUSED = (CancelledError, TransferError, ClosedError, MemoryError)  # what a call may end with in between


class Stress:
    """What the threads share: a cache, a pool, two schedulers with a manager and an adapter each."""

    def __init__(self, num_threads: int, num_calls: int, seed: int) -> None:
        self.cache = DeviceCache(SPEC, num_threads * OWN_BLOCKS, "cpu")
        self.pool = HostPool(SPEC, HOST_BLOCKS, layout="block_first" if seed % 2 else "layer_first")
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.servers = [self._server(), self._server()]
        self._renewing = threading.Lock()
        self._copy, self._choose = binding.copy, random.Random(seed)
        self._clients = [Client(self, number, num_calls, seed) for number in range(num_threads)]

    def _server(self) -> tuple[LayerwiseScheduler, KVOffloadManager, CacheTransferManager]:
        scheduler = LayerwiseScheduler(self.cache, self.pool)
        manager = KVOffloadManager(scheduler, capacity_bytes=8 * SPEC.block_bytes * LAYERS)
        return scheduler, manager, CacheTransferManager(scheduler)

    def renew(self, number: int) -> None:
        """Closes one, under those who use it."""
        if self._renewing.acquire(blocking=False):
            try:
                self.servers[number][1].close()
                self.servers[number][0].close(WAIT_S)
                self.servers[number] = self._server()
            finally:
                self._renewing.release()

    def run(self) -> Counter[str]:
        """What was called, compared and found; the first thing that is wrong is raised."""
        binding.copy = self._unreliable
        threads = [threading.Thread(target=client.run, daemon=True) for client in self._clients]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            binding.copy = self._copy
        if self.failures:
            raise self.failures[0]
        for client in self._clients:
            client.free_all()
        for scheduler, manager, _ in self.servers:
            manager.close()
            scheduler.close(WAIT_S)
        held = {"host": self.pool.num_blocks - self.pool.num_free_blocks, "transfers": len(movements)}
        for name, pool in (("host", self.pool), ("device", self.cache)):
            held[name] = held.get(name, 0) + len(change(pool.domain, lambda p=pool: p.domain.busy(range(p.num_blocks))))
        self.pool.close()
        if any(held.values()):
            raise AssertionError(f"still held at the end: {held}")
        return self.counts

    def _unreliable(self, number: int, plan: Any, layers: range) -> None:
        chance = self._choose.random()
        if chance < 0.01:
            raise OSError("lost")
        if chance < 0.03:
            time.sleep(0.0005)
        self._copy(number, plan, layers)


class Client:
    """One thread. ``device`` and ``host`` say what its blocks hold if no transfer into them has failed."""

    def __init__(self, stress: Stress, number: int, num_calls: int, seed: int) -> None:
        self._stress, self._calls = stress, num_calls
        self._pool, self._cache = stress.pool, stress.cache
        self._choose = random.Random(1000 * seed + number)
        self._next = 1 + (number + 1) * 10_000_000  # content that nobody else writes
        self.device = dict.fromkeys(range(number * OWN_BLOCKS, (number + 1) * OWN_BLOCKS), UNKNOWN)
        self.host: dict[int, int] = {}
        self._open: list[Any] = []  # transfers whose handles it still has
        self._memory = [
            _array_at(self._cache.tensor("latent", layer).data_ptr(), self._cache.num_blocks) for layer in range(LAYERS)
        ]

    def run(self) -> None:
        try:
            at_random = self._choose.choices(CALLS, WEIGHTS, k=self._calls)
            for call in (*self._choose.sample(CALLS, len(CALLS)), *at_random):  # each at least once
                self._stress.counts[call.__name__.strip("_")] += 1  # a torn count would be no harm
                try:
                    call(self, *self._choose.choice(self._stress.servers))
                except (*REFUSED, RuntimeError) as error:
                    assert isinstance(error, REFUSED) or "closed" in str(error), error
                    self._stress.counts["refused"] += 1
                if self._stress.failures:
                    return
            for block in self.device:
                self._compare_device(block)
        except BaseException as error:  # noqa: BLE001  told by the main thread
            self._stress.failures.append(error)

    def free_all(self) -> None:
        self._open.clear()
        self._pool.free(list(self.host))

    # ---- calls ----
    def _allocate(self, *_: Any) -> None:
        if len(self.host) < 5:
            self.host.update(dict.fromkeys(self._pool.allocate(self._choose.randint(1, 3)), UNKNOWN))

    def _free(self, *_: Any) -> None:
        blocks = self._choose.sample(sorted(self.host), min(2, len(self.host)))
        self._pool.free(blocks)  # whatever still moves them
        for block in blocks:
            del self.host[block]

    def _offload(self, scheduler: Any, manager: Any, engine: Any) -> None:
        device, host = self._pairs()
        if self._choose.random() < 0.2:
            save = engine.evict_to_host_async(device, host, order_compute=False)
        else:
            save = scheduler.offload(device, host, layerwise=self._choose.random() < 0.4)
        self._started(save, {block: self.device[one] for one, block in zip(device, host, strict=True)}, self.host)

    def _onload(self, scheduler: Any, manager: Any, engine: Any) -> None:
        device, host = self._pairs()
        if self._choose.random() < 0.2:
            load = engine.load_layers_to_device_async(range(LAYERS), host, device)
        else:
            load = scheduler.onload(host, device, urgent=self._choose.choice([None, True, False]))
        self._started(load, {block: self.host[one] for block, one in zip(device, host, strict=True)}, self.device)

    def _save(self, scheduler: Any, manager: Any, engine: Any) -> None:
        keys, numbers = self._prompt()
        blocks = self._choose.sample(sorted(self.device), len(keys))
        for block, number in zip(blocks, numbers, strict=True):
            self._write(block, number)
        self._started(manager.save(keys, blocks, layerwise=self._choose.random() < 0.4), {}, self.device)

    def _load(self, scheduler: Any, manager: Any, engine: Any) -> None:
        keys, numbers = self._prompt()
        with manager.lookup(keys) as lease:
            blocks = self._choose.sample(sorted(self.device), lease.num_blocks)
            load = manager.onload(lease.hashes, blocks)
        self._started(load, dict(zip(blocks, numbers, strict=False)), self.device)

    def _evict(self, scheduler: Any, manager: Any, engine: Any) -> None:
        manager.evict(self._choose.randint(0, 3))

    def _mark(self, *_: Any) -> None:
        for save in self._open:
            left = save.unmarked_layers if save.layerwise else []
            if left and not save.failed:
                save.mark_layer_written(self._choose.choice(left))
                return

    def _cancel(self, *_: Any) -> None:
        if self._open:
            self._choose.choice(self._open).cancel()

    def _lose(self, *_: Any) -> None:
        if self._open:
            del self._open[self._choose.randrange(len(self._open))]

    def _wait(self, *_: Any) -> None:
        if self._open:
            transfer = self._choose.choice(self._open)
            self._mark_all()
            way = self._choose.randrange(4)
            if way == 0:
                transfer.wait(WAIT_S)
            elif way == 1:
                transfer.wait_layer(self._choose.randrange(LAYERS), timeout_s=WAIT_S)
            elif way == 2:
                transfer.wait_on(timeout_s=WAIT_S)
            else:
                transfer.add_done_callback(lambda _: None)

    def _ask(self, scheduler: Any, manager: Any, engine: Any) -> None:
        way = self._choose.randrange(5)
        if way == 0:
            assert scheduler.stats()["in_flight"] >= 0
        elif way == 1:
            assert 0 <= self._pool.num_free_blocks <= HOST_BLOCKS
        elif way == 2:
            scheduler.in_flight()
        elif way == 3:
            scheduler.record_event("onload")
        else:
            manager.stats()

    def _write_device(self, *_: Any) -> None:
        self._next += 1
        self._write(self._choose.choice(sorted(self.device)), self._next)

    def _compare(self, *_: Any) -> None:
        if self.host and self._choose.random() < 0.5:
            self._compare_host(self._choose.choice(sorted(self.host)))
        else:
            self._compare_device(self._choose.choice(sorted(self.device)))

    def _renew(self, *_: Any) -> None:
        self._stress.renew(self._choose.randrange(2))

    def _own_pool(self, *_: Any) -> None:
        """Another pool and scheduler on the same cache, whose groups are united while others call."""
        source, target = self._choose.sample(sorted(self.device), 2)
        self._settle(self._cache, source, target)
        with HostPool(SPEC, 2) as pool, LayerwiseScheduler(self._cache, pool) as scheduler:
            scheduler.offload([source], [1])
            scheduler.onload([1], [target])
            self.device[target] = self.device[source]

    # ---- helpers ----
    def _pairs(self) -> tuple[list[int], list[int]]:
        count = min(self._choose.randint(1, 3), len(self.host))
        return self._choose.sample(sorted(self.device), count), self._choose.sample(sorted(self.host), count)

    def _prompt(self) -> tuple[list[bytes], list[int]]:
        prompt, count = self._choose.randrange(4), self._choose.randint(1, 4)
        return [b"%d/%d" % (prompt, i) for i in range(count)], [1 + 10 * prompt + i for i in range(count)]

    def _started(self, transfer: Any, written: dict[int, int], side: dict[int, int]) -> None:
        side.update(written)
        self._open = [*self._open[-7:], transfer]

    def _mark_all(self) -> None:
        for save in self._open:
            try:
                for layer in save.unmarked_layers if save.layerwise else ():
                    save.mark_layer_written(layer)
            except REFUSED:
                pass

    def _settle(self, pool: Any, *blocks: int) -> None:
        """Nothing touches these blocks any more."""
        self._mark_all()
        end_s = time.monotonic() + WAIT_S
        while change(pool.domain, lambda: pool.domain.busy(blocks)):
            assert time.monotonic() < end_s, f"blocks {blocks} stay in use"
            time.sleep(0.0002)

    def _write(self, block: int, number: int) -> None:
        self._settle(self._cache, block)
        for layer in range(LAYERS):
            self._memory[layer][block] = number + 100 * layer
        self._cache.mark_rewritten([block])
        self.device[block] = number

    def _compare_device(self, block: int) -> None:
        self._settle(self._cache, block)
        if change(self._cache.domain, lambda: self._cache.domain.poisoned([block])):
            self.device[block] = UNKNOWN
        self._same([memory[block] for memory in self._memory], self.device[block], "device", block)

    def _compare_host(self, block: int) -> None:
        self._mark_all()
        write = self._choose.random() < 0.5
        with self._pool.lease([block], write=write, timeout_s=WAIT_S):
            if change(self._pool.domain, lambda: self._pool.domain.poisoned([block])):
                self.host[block] = UNKNOWN
            found = [self._pool.view("latent", layer, block) for layer in range(LAYERS)]
            self._same(found, self.host[block], "host", block)
            if write:
                self._next += 1
                for layer in range(LAYERS):
                    found[layer][...] = self._next + 100 * layer
                self._pool.mark_rewritten([block])
                self.host[block] = self._next

    def _same(self, found: list[np.ndarray], number: int, side: str, block: int) -> None:
        if number == UNKNOWN:
            return
        self._stress.counts["compared"] += 1
        for layer in range(LAYERS):
            if (found[layer] != number + 100 * layer).any():
                raise AssertionError(f"{side} block {block}, layer {layer}: {found[layer].ravel()} for {number}")


def _array_at(address: int, num_blocks: int) -> np.ndarray:
    elements = num_blocks * SPEC.tensor_block_bytes("latent") // 4
    return np.ctypeslib.as_array((ctypes.c_int32 * elements).from_address(address)).reshape(num_blocks, -1)


_OFTEN = {Client._offload: 16, Client._onload: 16, Client._allocate: 8, Client._free: 6, Client._mark: 10}
_SOMETIMES = {Client._save: 4, Client._load: 5, Client._cancel: 5, Client._lose: 4, Client._wait: 6, Client._ask: 6}
_SELDOM = {Client._evict: 1, Client._write_device: 6, Client._compare: 6, Client._renew: 0.05, Client._own_pool: 0.1}
CALLS, WEIGHTS = zip(*{**_OFTEN, **_SOMETIMES, **_SELDOM}.items(), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=100_000, help="of each thread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds until all threads are shown")
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.timeout, exit=True)
    sys.setswitchinterval(1e-4)
    logging.getLogger("paddle_kv").setLevel(logging.CRITICAL)
    print(dict(Stress(given.threads, given.calls, given.seed).run()))


if __name__ == "__main__":
    main()
