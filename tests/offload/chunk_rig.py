"""A model whose keys and values follow from the tokens before them: a wrong byte makes all behind it wrong too."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paddle_kv import CancelledError, DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import KVOffloadManager, Request
from paddle_kv.offload.rates import Rates
from paddle_kv.testing.tiers.rig import StagedTier
from paddle_kv.tiers import Engine
from tests.schedule.rig import bytes_at

WAIT_S = 30.0
POISON = 0xA5
WRONG = 0xEE
SIZE = 4  # tokens of a block
SPEC = KVCacheSpec(num_layers=3, num_kv_heads=1, head_dim=16, block_size=SIZE, dtype="float32")


BLOCK_BYTES = SPEC.block_bytes * SPEC.num_layers


def know(
    manager: KVOffloadManager,
    load_s: float | None,
    compute_s: float | None,
    tier_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """As if it had been measured, in seconds a block; None: nothing was."""
    manager._books.rates = rates = Rates(BLOCK_BYTES, SIZE, clock)
    for name, seconds in (("onload", load_s), ("tier", tier_s)):
        if seconds is not None:
            rates.set_load(name, BLOCK_BYTES / seconds)
    if compute_s is not None:
        rates.set_prefill(compute_s / SIZE)


def token_bytes(spec: KVCacheSpec) -> int:
    """Of a tensor of a layer."""
    return spec.tensor_block_bytes("key") // spec.block_size


def contents(tokens: Sequence[int], spec: KVCacheSpec = SPEC) -> np.ndarray:
    """uint8 [tokens, layers, tensors, bytes of a token]."""
    found, state = [], 0
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(8, "little"), state)
        size = (spec.num_layers, len(spec.tensor_names), token_bytes(spec))
        found.append(np.random.default_rng(state).integers(0, 256, size, np.uint8))
    return np.array(found)


class ChunkRig:
    """A server. ``pause(tokens)`` is called in each layer of each chunk: what the model would take."""

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        host_blocks: int = 64,
        device_blocks: int = 64,
        pause: Callable[[range], object] = lambda tokens: None,
        backend: Any = "auto",
        spec: KVCacheSpec = SPEC,
        **options: Any,
    ) -> None:
        self.engine, self.spec = engine, spec
        self.cache = DeviceCache(spec, device_blocks, "cpu")
        self.pool = HostPool(spec, host_blocks, layout="block_first")
        self.tier = StagedTier(engine, self.pool, model=b"model") if engine is not None else None
        self.scheduler = LayerwiseScheduler(self.cache, self.pool, backend=backend)
        self.manager = KVOffloadManager(self.scheduler, tier=self.tier, **options)
        self.pause = pause
        self.computed: list[range] = []
        self._views = [
            [
                bytes_at(
                    self.cache.tensor(name, layer).data_ptr(), device_blocks * spec.tensor_block_bytes(name)
                ).reshape(device_blocks, SIZE, token_bytes(spec))
                for name in spec.tensor_names
            ]
            for layer in range(spec.num_layers)
        ]
        self.poison(range(device_blocks))

    def poison(self, blocks: Sequence[int]) -> None:
        for layer in self._views:
            for view in layer:
                view[list(blocks)] = POISON

    def layer_of(self, table: Sequence[int], layer: int, num_tokens: int) -> np.ndarray:
        """uint8 [tokens, tensors, bytes of a token]."""
        size = token_bytes(self.spec)
        found = [view[list(table)].reshape(-1, size)[:num_tokens] for view in self._views[layer]]
        return np.stack(found, axis=1)

    def run(self, request: Request, chunk: range, table: Sequence[int], expected: np.ndarray) -> None:
        """A pass: writes what belongs there if all before it is right, and else what is wrong."""
        self.run_pass([(request, chunk, table, expected)])

    def run_pass(self, work: Sequence[tuple[Request, range, Sequence[int], np.ndarray]]) -> None:
        """Over a chunk of each of these prompts."""
        self.computed += [chunk for _, chunk, _, _ in work]
        loads = list(dict.fromkeys(load for request, *_ in work for load in request.loads))
        saves = [save for request, *_ in work for save in request.saves]
        right = [True] * len(work)
        with ForwardPass(loads, saves, timeout_s=WAIT_S) as layers:
            for layer in range(self.spec.num_layers):
                with layers.layer(layer):
                    for at, (_, chunk, table, expected) in enumerate(work):
                        self.pause(chunk)
                        before = self.layer_of(table, layer, chunk.start)
                        right[at] = right[at] and np.array_equal(before, expected[: chunk.start, layer])
                        self._write(layer, chunk, table, expected if right[at] else None)

    def _write(self, layer: int, chunk: range, table: Sequence[int], expected: np.ndarray | None) -> None:
        for token in chunk:
            block, at = table[token // SIZE], token % SIZE
            for number, view in enumerate(self._views[layer]):
                view[block, at] = WRONG if expected is None else expected[token, layer, number]

    def run_or_fail(self, request: Request, chunk: range, table: Sequence[int], expected: np.ndarray) -> None:
        """As a server does: what has become of it, the request knows."""
        with contextlib.suppress(TransferError, CancelledError):
            self.run(request, chunk, table, expected)

    def prefill(self, tokens: Sequence[int], table: Sequence[int], most: Any = None, **options: Any) -> list[range]:
        """The chunks that were computed, after the whole of the prompt was compared."""
        expected = contents(tokens, self.spec)
        self.computed.clear()
        self.poison(table)
        with self.manager.request(tokens, table, **options) as request:
            while (chunk := request.next_chunk(most and most(), timeout_s=WAIT_S)) is not None:
                self.run_or_fail(request, chunk, table, expected)
        self.check(table, expected)
        return list(self.computed)

    def check(self, table: Sequence[int], expected: np.ndarray) -> None:
        for layer in range(self.spec.num_layers):
            np.testing.assert_array_equal(self.layer_of(table, layer, len(expected)), expected[:, layer])

    def check_books(self) -> None:
        """Nothing is held, lost or leaked."""
        self.scheduler.drain(WAIT_S)
        books: Any = self.manager._books
        if self.tier is not None:
            until(lambda: books.below.drain(WAIT_S) and not self.manager.in_flight())
            self.manager.stats()
            books.below.drain(WAIT_S)
            self.tier.drain(WAIT_S)
        self.manager.stats()
        until(lambda: not self.pool.domain.busy(range(self.pool.num_blocks)))
        slots = list(books.index.slots.values())
        assert len(set(slots)) == len(slots)
        assert set(slots) == books.slots.taken
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(slots)
        assert not books.index.arriving
        assert not books.index.pins
        assert not self.cache.domain.busy(range(self.cache.num_blocks))
        assert not [one for one in books.feed.meetings.values() if not one.ended]

    def close(self) -> None:
        self.manager.close()
        self.scheduler.close(WAIT_S)
        if self.tier is not None and self.engine is not None:
            self.tier.close(WAIT_S)
            self.engine.close(WAIT_S)
        self.pool.close()


def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    waiting = threading.Event()
    while not condition():
        assert time.monotonic() < end_s
        waiting.wait(0.001)
