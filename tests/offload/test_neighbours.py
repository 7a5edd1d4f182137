"""A manager lends what is in its host memory, and another one finds it there."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.offload import BlockState, KVOffloadManager
from paddle_kv.tiers import FilesEngine, Tier
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine
from paddle_kv.tracking.group import change
from tests.offload.tiered_rig import KEYS, POISON, SPEC, WAIT_S, StagedTier, TieredRig, until
from tests.tiers.neighbour_kills import Other
from tests.tiers.test_neighbours import Gate

PROMPT = [7 * token % 1000 for token in range(100)]
TABLE = [5, 9, 2, 20, 17, 8, 1]


class Lending(TieredRig):
    """A server without a tier, which lends."""

    def __init__(self, *, host_blocks: int = 12, device_blocks: int = 24, **options: Any) -> None:
        self.cache = DeviceCache(SPEC, device_blocks, "cpu")
        self.pool = HostPool(SPEC, host_blocks, layout="block_first", shared=True)
        self.rows = block_rows(self.pool)
        self.lender = Lender(self.pool, model=b"model")
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.manager = KVOffloadManager(self.scheduler, lender=self.lender, **options)

    def save(self, keys: Sequence[bytes], first_block: int = 0) -> None:
        blocks = list(range(first_block, first_block + len(keys)))
        self.fill(keys, blocks)
        self.manager.save(list(keys), blocks).wait(WAIT_S)

    @property
    def lent(self) -> dict[bytes, int]:
        return {one.key: one.block_id for one in self.lender._lent.objects.values()}

    def close(self) -> None:
        self.manager.close()
        self.lender.close(WAIT_S)
        self.scheduler.close(WAIT_S)
        assert self.pool.num_free_blocks == self.pool.num_blocks
        self.pool.close()


@pytest.fixture
def lending() -> Iterator[Lending]:
    with contextlib.closing(Lending()) as made:
        yield made


@pytest.fixture
def reading(lending: Lending) -> Iterator[TieredRig]:
    engine = NeighbourEngine([lending.lender.path])
    engine.wait_connected(WAIT_S)
    with contextlib.closing(TieredRig(engine)) as made:
        yield made


def test_a_prefix_of_the_other_one_is_loaded_bit_for_bit(lending: Lending, reading: TieredRig) -> None:
    lending.save(KEYS[:6])
    until(lambda: reading.manager.peek(KEYS) == 6)  # nobody has called the other manager meanwhile
    assert reading.manager.states(KEYS[:7]) == [BlockState.TIER] * 6 + [BlockState.ABSENT]
    reading.poison(range(24))
    reading.load(KEYS[:6], TABLE[:6]).wait(WAIT_S)
    assert reading.right(KEYS[:6], TABLE[:6]) == [True] * 6
    for block in set(range(24)) - set(TABLE[:6]):
        assert (reading.on_device(block) == POISON).all()
    stats = reading.manager.stats()
    assert (stats["tier_hit_blocks"], stats["tier_lost_blocks"]) == (6, 0)
    until(lambda: not lending.lender.stats()["leased_blocks"])
    assert not lending.manager._books.index.pins
    reading.check_books()


def test_layers_can_be_used_as_they_come(lending: Lending, reading: TieredRig) -> None:
    lending.save(KEYS[:4])
    until(lambda: reading.manager.peek(KEYS) == 4)
    load = reading.load(KEYS[:4], TABLE[:4])
    for layer in range(SPEC.num_layers):
        load.wait_layer(layer, timeout_s=WAIT_S)
        assert reading.right(KEYS[:4], TABLE[:4], slice(layer, layer + 1)) == [True] * 4
    load.wait(WAIT_S)


def test_what_is_evicted_dropped_or_cleared_is_not_lent(lending: Lending, reading: TieredRig) -> None:
    lending.save(KEYS[:8])
    until(lambda: reading.manager.peek(KEYS) == 8)
    lending.manager.drop(KEYS[2:3])
    until(lambda: reading.manager.peek(KEYS) == 2)
    lending.save(KEYS[10:18], 8)  # for which others make room
    until(lambda: len(lending.lent) == 12)
    assert lending.lent == lending.manager._books.index.slots
    assert lending.manager.evict(3) == 3
    assert len(lending.lent) == 9
    lending.manager.clear()
    assert lending.lent == {}
    until(lambda: reading.engine.stats()["objects"] == 0)


def lent_and_present(lending: Lending) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """In a section: a save may end meanwhile."""
    index = lending.manager._books.index
    return lending.lent, {key: slot for key, slot in index.slots.items() if key not in index.arriving}


@pytest.mark.parametrize("policy", ["lru", "survival", "arc", "s3fifo"])
def test_what_is_lent_is_what_is_present(policy: str) -> None:
    rng = random.Random(7)
    with contextlib.closing(Lending(policy=policy, max_events=100)) as lending:
        manager, books = lending.manager, lending.manager._books
        for _ in range(150):
            some = KEYS[(first := rng.randrange(36)) : first + rng.randrange(1, 5)]
            kind = rng.randrange(8)
            if kind < 4:
                save = manager.save(some, rng.sample(range(24), len(some)))
                if kind:
                    save.wait(WAIT_S)
                else:
                    save.cancel()
            elif kind == 4:
                manager.drop(some)
            elif kind == 5:
                manager.evict(rng.randrange(4))
            elif kind == 6:
                with manager.lookup(some) as lease:
                    manager.onload(lease.hashes, rng.sample(range(24), lease.num_blocks)).wait(WAIT_S)
            elif rng.random() < 0.2:
                manager.clear()
            manager.stats()  # settles
            lent, present = change(books, functools.partial(lent_and_present, lending))
            assert lent == present
        assert len(lending.lent) > 3


def test_a_block_that_is_read_is_not_evicted(
    lending: Lending, reading: TieredRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending.save(KEYS[:12])
    until(lambda: reading.manager.peek(KEYS) == 12)
    gate = Gate(monkeypatch)
    load = reading.load(KEYS[:3], TABLE[:3])
    assert gate.arrived.wait(WAIT_S)
    for first in range(20, 32, 3):
        lending.save(KEYS[first : first + 3], 12)  # the others make room
    until(lambda: lending.lent == lending.manager._books.index.slots)
    assert all(key in lending.lent for key in KEYS[:3])
    assert not any(key in lending.lent for key in KEYS[3:12])
    assert len(lending.lent) == 12
    assert lending.manager.drop(KEYS[:1]) == 1
    assert lending.pool.num_free_blocks == 0  # it is read to its end
    gate.opened.set()
    load.wait(WAIT_S)
    assert reading.right(KEYS[:3], TABLE[:3]) == [True] * 3
    until(lambda: lending.pool.num_free_blocks == 1)
    lending.save(KEYS[20:32], 12)
    lending.manager.evict(12)
    assert all(key not in lending.lent for key in KEYS[:3])


def test_what_the_tier_brings_up_is_lent_too(tmp_path: Any) -> None:
    pool = HostPool(SPEC, 12, layout="block_first", shared=True)
    rig = TieredRig(FilesEngine({tmp_path: 1 << 26}))
    rig.save(KEYS[:4])
    rig.forget()
    with (
        Lender(pool, model=b"model") as lender,
        StagedTier(rig.engine, pool, model=b"model") as tier,
        LayerwiseScheduler(rig.cache, pool) as scheduler,
        KVOffloadManager(scheduler, tier=tier, lender=lender) as manager,
    ):
        with manager.lookup(KEYS[:4]) as lease:
            manager.onload(lease.hashes, [0, 1, 2, 3]).wait(WAIT_S)
        until(lambda: len(lender._lent.objects) == 4)
        manager.evict(4)
        assert len(lender._lent.objects) == 0
        manager.prefetch(KEYS[:2], timeout_s=WAIT_S).wait(WAIT_S)
        until(lambda: len(lender._lent.objects) == 2)
        with NeighbourEngine([lender.path]) as engine:
            engine.wait_connected(WAIT_S)
            other = TieredRig(engine)
            other.load(KEYS[:2], [3, 4]).wait(WAIT_S)
            assert other.right(KEYS[:2], [3, 4]) == [True, True]
            other.close()
    rig.close()
    pool.close()


def test_a_lender_belongs_to_one_manager(lending: Lending) -> None:
    scheduler = lending.scheduler
    with pytest.raises(ValueError, match="another manager has"):
        KVOffloadManager(scheduler, lender=lending.lender)
    with pytest.raises(TypeError, match="lender is str"):
        KVOffloadManager(scheduler, lender="lender")  # type: ignore[arg-type]
    with (
        HostPool(SPEC, 2, layout="block_first", shared=True) as other,
        Lender(other, model=b"m") as lender,
        pytest.raises(ValueError, match="another host pool"),
    ):
        KVOffloadManager(scheduler, lender=lender)
    lending.save(KEYS[:2])
    lending.manager.close()
    assert lending.lent == {}
    lending.manager = KVOffloadManager(scheduler, lender=lending.lender)
    lending.save(KEYS[3:4])
    until(lambda: list(lending.lent) == KEYS[3:4])


def test_a_lender_that_another_manager_has_costs_no_tier(lending: Lending, reading: TieredRig, tmp_path: Path) -> None:
    with FilesEngine({tmp_path: 1 << 20}) as engine, Tier(engine, lending.pool, model=b"m") as tier:
        threads = threading.active_count()
        with pytest.raises(ValueError, match="lender is one that another manager has"):
            KVOffloadManager(lending.scheduler, tier=tier, lender=lending.lender)
        assert threading.active_count() == threads
        KVOffloadManager(lending.scheduler, tier=tier).close()
    lending.save(KEYS[:2])
    until(lambda: reading.manager.peek(KEYS) == 2)


def test_a_manager_that_is_closed_while_a_block_is_read(
    lending: Lending, reading: TieredRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending.save(KEYS[:3])
    until(lambda: reading.manager.peek(KEYS) == 3)
    gate = Gate(monkeypatch, first=1)
    load = reading.load(KEYS[:3], TABLE[:3])
    assert gate.arrived.wait(WAIT_S)
    lending.manager.close()
    assert lending.pool.num_free_blocks == 9
    gate.opened.set()
    load.wait(WAIT_S)
    assert reading.right(KEYS[:3], TABLE[:3]) == [True] * 3
    until(lambda: lending.pool.num_free_blocks == 12)


def test_a_manager_that_goes_on_without_its_lender(lending: Lending) -> None:
    lending.lender.close(WAIT_S)
    lending.save(KEYS[:4])
    lending.manager.clear()
    assert not lending.lender._changes  # nobody would take them


def test_hashes_that_fit_into_no_object_are_not_lent(lending: Lending) -> None:
    keys = [b"x" * 65, b"", b"y" * 64, b"z"]
    lending.save(keys)
    until(lambda: set(lending.lent) == set(keys[2:]))
    lending.manager.drop(keys)
    assert lending.lent == {}


def test_damage_costs_the_load_and_no_wrong_byte(lending: Lending, reading: TieredRig) -> None:
    lending.save(KEYS[:3])
    until(lambda: reading.manager.peek(KEYS) == 3)
    reading.load(KEYS[:3], TABLE[:3]).wait(WAIT_S)
    reading.forget()
    lending.rows[lending.lent[KEYS[1]], 1000] ^= 1
    load = reading.load(KEYS[:3], TABLE[:3])
    load.wait_over(WAIT_S)
    assert reading.manager.blocks_to_recompute(load) == [1]
    assert reading.right([KEYS[0], KEYS[2]], [TABLE[0], TABLE[2]]) == [True, True]
    until(lambda: reading.manager.peek(KEYS) == 1)  # nobody asks for it again


def serve_prompt(pipe: Connection) -> None:
    """The process that has computed the prompt."""
    lending = Lending(host_blocks=16)
    hashes = lending.manager.block_hashes(PROMPT)
    lending.save(hashes)
    pipe.send(lending.lender.path)
    with contextlib.suppress(EOFError):
        pipe.recv()


def test_two_processes() -> None:
    other = Other(serve_prompt)
    path = other.hear()
    engine = NeighbourEngine([path])
    engine.wait_connected(WAIT_S)
    rig = TieredRig(engine, tier_timeout_s=5.0)
    manager = rig.manager
    hashes = manager.block_hashes(PROMPT)
    until(lambda: manager.peek(hashes) == 6)
    rig.poison(range(24))
    with manager.request(PROMPT, TABLE) as request:
        assert request.start == 96  # of 100 tokens four are computed
        for load in request.loads:
            for layer in range(SPEC.num_layers):
                load.wait_layer(layer, timeout_s=WAIT_S)
                assert rig.right(hashes, TABLE[:6], slice(layer, layer + 1)) == [True] * 6
        for save in request.saves:
            for layer in range(SPEC.num_layers):
                save.mark_layer_written(layer)
        assert request.wait(timeout_s=WAIT_S)
    assert rig.right(hashes, TABLE[:6]) == [True] * 6
    rig.check_books()
    rig.forget()
    other.end()  # killed
    until(lambda: manager.peek(hashes) == 0)
    with manager.request(PROMPT, TABLE) as request:
        assert request.start == 0
        for save in request.saves:
            for layer in range(SPEC.num_layers):
                save.mark_layer_written(layer)
        assert request.wait(timeout_s=WAIT_S)
    rig.close()


def test_a_neighbour_that_dies_in_the_middle_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had said before counts; the rest is computed."""
    other = Other(serve_prompt)
    engine = NeighbourEngine([other.hear()])
    engine.wait_connected(WAIT_S)
    rig = TieredRig(engine)
    hashes = rig.manager.block_hashes(PROMPT)
    until(lambda: rig.manager.peek(hashes) == 6)
    ask = engine._neighbours[0].ask

    def kill(*given: Any) -> None:
        other.end()
        ask(*given)

    monkeypatch.setattr(engine._neighbours[0], "ask", kill)
    began_s = time.monotonic()
    load = rig.load(hashes, TABLE[:6])
    load.wait_over(WAIT_S)
    assert time.monotonic() - began_s < WAIT_S / 4
    lost = set(rig.manager.blocks_to_recompute(load))
    assert lost == set(range(6))
    assert rig.manager.stats()["tier_lost_blocks"] == 6
    rig.close()
