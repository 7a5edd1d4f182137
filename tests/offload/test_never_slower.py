"""A tier that stalls, fails, or lies about its rate costs the time of a request or two, and no more. By a clock that
only the model moves: whoever waits for storage stands still for ever."""

from __future__ import annotations

import contextlib
import random
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import CancelledError, KVCacheSpec, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import below, bringing, feeding, loading, pieces, reading, request
from paddle_kv.offload.prefetch import Prefetch
from paddle_kv.schedule.transfer import Transfer
from paddle_kv.testing.tiers import Fault, FaultyEngine
from paddle_kv.tiers import Engine, FilesEngine
from tests.offload.chunk_rig import SIZE, SPEC, WAIT_S, ChunkRig, know

CHUNK = 4 * SIZE
NUM_CHUNKS = 20
TOKEN_S = 0.002  # of the model
BLOCK_S = SIZE * TOKEN_S
TIER_S = BLOCK_S / 10  # what the tier says of itself
REQUESTS = 6
SLOWER = 1.05


class Clock:
    """Seconds of the model."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ended = False
        self._moved = threading.Condition()

    def monotonic(self) -> float:
        return self.now_s

    def move(self, seconds: float, *, ended: bool = False) -> None:
        with self._moved:
            self.now_s += seconds
            self.ended |= ended
            self._moved.notify_all()

    def wait_until(self, until_s: float) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self.ended or self.now_s >= until_s)


class Slow(FilesEngine):
    """Each object takes ``block_s``, one behind the other: its first layers, or, with ``at_last``, its last ones."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__({folder: 1 << 24}, threads_per_root=1)
        self.roots[0].most_batched = 1
        self.clock, self.block_s = clock, 0.0
        self.at_last = False
        self._free_s = 0.0

    def read(self, items: Any) -> None:
        super().read([_SlowRead(item, self, self._end_s()) for item in items])  # type: ignore[misc]

    def _end_s(self) -> float:
        self._free_s = max(self._free_s, self.clock.now_s) + self.block_s
        return self._free_s


class _SlowRead:
    def __init__(self, item: Any, engine: Slow, end_s: float) -> None:
        self._item, self._engine, self._end_s = item, engine, end_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def arrived(self, stage: int) -> bool:
        if stage == (self._item.num_stages - 1 if self._engine.at_last else 0):
            self._engine.clock.wait_until(self._end_s)
        return bool(self._item.arrived(stage))


def go_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's time is that of the model, and passes while a request waits for the tier."""
    for module in (below, bringing, feeding, pieces, request):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    wait = Prefetch.wait

    def wait_by_clock(self: Prefetch, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None
        end_s = clock.now_s + timeout_s
        while not wait(self, 0.005):
            if clock.now_s >= end_s:
                return False
            clock.move(TIER_S / 2)
        return True

    monkeypatch.setattr(Prefetch, "wait", wait_by_clock)
    alarms: list[tuple[float, Callable[[], object]]] = []
    monkeypatch.setattr(loading.LoadingBooks, "call_at", lambda self, *alarm: alarms.append(alarm))
    wait_layer = Transfer._wait_layer

    def wait_layer_by_clock(self: Transfer, layer: int, stream: Any, timeout_s: float | None) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                return wait_layer(self, layer, stream, 0.005)
            clock.move(TIER_S / 2)
            for alarm in [alarm for alarm in alarms if alarm[0] <= clock.now_s]:
                alarms.remove(alarm)
                alarm[1]()

    monkeypatch.setattr(Transfer, "_wait_layer", wait_layer_by_clock)


def stall(slow: Slow, engine: Any) -> None:
    slow.block_s = 10.0


def fail(slow: Slow, engine: Any) -> None:
    engine.dead = True


def damage(slow: Slow, engine: Any) -> None:
    engine._faults = [Fault.WRONG]


def lie(slow: Slow, engine: Any) -> None:
    slow.block_s = 10 * TIER_S


def first_token_s(
    rig: ChunkRig, clock: Clock, tokens: Sequence[int], table: Sequence[int], chunk_tokens: int | None
) -> float:
    begin_s = clock.now_s
    with rig.manager.request(tokens, table, chunk_tokens=chunk_tokens, how="sooner") as asked:
        while (chunk := asked.next_chunk(timeout_s=WAIT_S)) is not None:
            with (
                contextlib.suppress(TransferError, CancelledError),
                ForwardPass(asked.loads, asked.saves, timeout_s=WAIT_S) as layers,
            ):
                for layer in range(rig.spec.num_layers):
                    with layers.layer(layer):
                        clock.move(len(chunk) * TOKEN_S / rig.spec.num_layers)
                        threading.Event().wait(0.0005)  # others come to what they do
    return clock.now_s - begin_s


def times(
    folder: Path,
    clock: Clock,
    worsen: Callable[[Slow, Any], None],
    chunk_tokens: int | None,
    spec: KVCacheSpec = SPEC,
    num_chunks: int = NUM_CHUNKS,
    end_tokens: int = 0,
    link_s: float | None = None,
) -> list[float]:
    """Of each request, as a part of the time without. ``end_tokens``: more, that are found nowhere."""
    num_tokens = num_chunks * CHUNK + 1
    slow = Slow(folder, clock)
    engine: Engine = FaultyEngine(slow, [], share=0.3)
    rig = ChunkRig(engine, host_blocks=600, device_blocks=100, tier_timeout_s=WAIT_S, spec=spec)
    rng = random.Random(1)
    tables = [rng.sample(range(100), num_chunks * CHUNK // SIZE + 1) for _ in range(REQUESTS)]
    prompts = [[number] * num_tokens for number in range(REQUESTS)]
    try:
        for prompt, table in zip(prompts, tables, strict=True):
            rig.prefill(prompt, table, chunk_tokens=CHUNK)
            rig.check_books()
        assert rig.manager.evict(600) == REQUESTS * (len(tables[0]) - 1)
        know(rig.manager, link_s, BLOCK_S, TIER_S, clock=clock.monotonic)
        worsen(slow, engine)
        found = []
        for prompt, table in zip(prompts, tables, strict=True):
            asked = prompt + [100] * end_tokens
            whole_table = table + [one for one in range(100) if one not in table][: end_tokens // SIZE]
            found.append(first_token_s(rig, clock, asked, whole_table, chunk_tokens) / (len(asked) * TOKEN_S))
        return found
    finally:
        clock.move(0.0, ended=True)
        rig.close()


@pytest.mark.parametrize(
    ("worsen", "chunk_tokens"),
    [(stall, CHUNK), (fail, CHUNK), (damage, CHUNK), (lie, CHUNK), (stall, None), (lie, None)],
)
def test_from_the_third_request_on_it_is_not_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worsen: Callable[[Slow, Any], None], chunk_tokens: int | None
) -> None:
    clock = Clock()
    go_by(clock, monkeypatch)
    found = times(tmp_path, clock, worsen, chunk_tokens)
    assert max(found[2:]) <= SLOWER


LARGE = replace(SPEC, head_dim=512)  # a layer of a block has 16 KiB, and is read by itself


@pytest.mark.parametrize("at_last", [False, True])
@pytest.mark.parametrize("worsen", [stall, fail, damage, lie])
def test_where_the_tier_brings_layers_it_is_not_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worsen: Callable[[Slow, Any], None], at_last: bool
) -> None:
    """The model follows the tier layer by layer, and may be in the middle of a pass when that stalls."""
    clock = Clock()
    go_by(clock, monkeypatch)
    followed: list[int] = []
    follow = reading.ReadingBooks.follow
    monkeypatch.setattr(
        reading.ReadingBooks, "follow", lambda *given: (followed.append(len(given[1])), follow(*given))[1]
    )

    def late(slow: Slow, engine: Any) -> None:
        slow.at_last = at_last
        worsen(slow, engine)

    found = times(tmp_path, clock, late, CHUNK, LARGE, 8, CHUNK - 1, TIER_S / 100)
    assert followed or worsen is fail  # of a storage that is dead nothing is found
    assert max(found[2:]) <= SLOWER


def test_a_tier_that_keeps_its_word_is_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    go_by(clock, monkeypatch)
    found = times(tmp_path, clock, lambda slow, engine: setattr(slow, "block_s", TIER_S), CHUNK)
    assert max(found) <= SLOWER
    assert min(found) < 0.5  # its first reads look late by a clock that moves in steps
