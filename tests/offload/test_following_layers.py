"""A prompt that is loaded while a tier still reads it: real bytes, by a storage that brings layers when it is let."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_kv import TransferError
from paddle_kv.offload import Request, reading
from paddle_kv.offload.rates import LINK, TIER, Rates
from paddle_kv.testing.tiers import Fault, FaultyEngine
from paddle_kv.tiers import FilesEngine, Outcome
from paddle_kv.tracking.group import change
from tests.offload.chunk_rig import POISON, SIZE, SPEC, WAIT_S, ChunkRig, contents, know, until
from tests.offload.tiered_rig import SHORT_S, Gated

LARGE = replace(SPEC, head_dim=512)  # a layer of a block has 16 KiB, and is read by itself
BLOCKS = 8
TOKENS = [1] * ((BLOCKS + 4) * SIZE)
TABLE = list(range(20))[::-1]
CHUNK = 4 * SIZE
EXPECTED = contents(TOKENS, LARGE)
END = range(BLOCKS * SIZE, len(TOKENS))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ChunkRig]:
    """The first blocks of the prompt lie in the tier, which is as quick as trusted; the model is slow."""
    made = ChunkRig(Gated(tmp_path), spec=LARGE, host_blocks=20)
    found = TOKENS[: BLOCKS * SIZE]
    made.prefill(found, TABLE, chunk_tokens=CHUNK)
    made.check_books()
    assert made.manager.evict(64) == BLOCKS
    trust(made, 1.0)
    yield made
    gates(made).open()
    made.close()


def gates(rig: ChunkRig) -> Any:
    return rig.engine


def trust(rig: ChunkRig, tier_s: float) -> None:
    """A pass over four blocks takes longer than to read all."""
    know(rig.manager, 1e-4, 1e3, tier_s)


def ask(rig: ChunkRig, stages: int) -> Request:
    """So many of three layers come at once."""
    for stage in gates(rig).stages[stages:]:
        stage.clear()
    rig.poison(TABLE)
    return rig.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK)


def finish(rig: ChunkRig, request: Request) -> list[range]:
    computed = []
    while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
        computed.append(chunk)
        rig.run_or_fail(request, chunk, TABLE, EXPECTED)
    rig.check(TABLE, EXPECTED)
    return computed


def layers_there(rig: ChunkRig) -> list[bool]:
    """Whether the first blocks are on the device, and that nothing else is."""
    found = []
    for layer in range(LARGE.num_layers):
        there = rig.layer_of(TABLE, layer, END.start)
        found.append(bool(np.array_equal(there, EXPECTED[: END.start, layer])))
        assert found[-1] or (there == POISON).all()
    assert (rig.layer_of(TABLE, 0, 20 * SIZE)[END.start :] == POISON).all()
    return found


def test_each_layer_comes_as_soon_as_the_tier_has_brought_it(rig: ChunkRig) -> None:
    with ask(rig, 1) as request:
        chunk = request.next_chunk(timeout_s=WAIT_S)
        assert chunk == END
        [load] = request.loads
        load.wait_layer(0, timeout_s=WAIT_S)
        assert layers_there(rig) == [True, False, False]
        with pytest.raises(TimeoutError, match="it is still being read into host memory"):
            load.wait_layer(1, timeout_s=SHORT_S)
        gates(rig).stages[1].set()
        load.wait_layer(1, timeout_s=WAIT_S)
        assert layers_there(rig) == [True, True, False]
        gates(rig).open()
        rig.run(request, chunk, TABLE, EXPECTED)
        assert finish(rig, request) == []
    rig.check_books()
    assert rig.manager.rates.stats()["tier_late_loads"] == 0


@pytest.mark.parametrize("in_host", [1, 4, 6])
def test_together_with_what_is_in_host_memory(rig: ChunkRig, in_host: int) -> None:
    rig.manager.prefetch(rig.manager.block_hashes(TOKENS)[:in_host], timeout_s=WAIT_S).wait(WAIT_S)
    rig.check_books()
    trust(rig, 1.0)
    with ask(rig, 0) as request:
        chunk = request.next_chunk(timeout_s=WAIT_S)
        assert chunk == END and len(request.loads) == 1
        with pytest.raises(TimeoutError):
            request.loads[0].wait_layer(0, timeout_s=SHORT_S)
        assert layers_there(rig) == [False] * 3
        gates(rig).open()
        rig.run(request, chunk, TABLE, EXPECTED)
        assert finish(rig, request) == []
    rig.check_books()


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_a_tier_that_stalls_in_the_middle_is_left_when_it_is_late(
    rig: ChunkRig, stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The storage holds its blocks of host memory meanwhile; the device, and the prompt, wait for nothing."""
    trust(rig, 0.005)
    with ask(rig, stages) as request:
        begun_s = time.monotonic()
        chunk = request.next_chunk(timeout_s=WAIT_S)
        if chunk == END:  # else it was late already
            [load] = request.loads
            with pytest.raises(TransferError, match="the tier has not brought it in time"):
                load.wait_layer(2, timeout_s=WAIT_S)
            rig.run_or_fail(request, chunk, TABLE, EXPECTED)
        finish(rig, request)
        assert time.monotonic() - begun_s < WAIT_S / 3
    assert not caplog.records
    assert rig.manager.rates.stats()["tier_late_loads"] == 1
    assert rig.manager.rates.stats()["onload_late_loads"] == rig.manager.rates.stats()["onload_failed_loads"] == 0
    assert not rig.cache.domain.busy(TABLE[:BLOCKS])
    books: Any = rig.manager._books
    held = [slot for slot in range(20) if rig.pool.domain._write_leases[slot]]
    assert len(held) == BLOCKS
    other = rig.manager.save([b"%d" % number for number in range(20)], [TABLE[0]] * 20)
    other.wait(WAIT_S)
    assert not set(other.plan.host_ids) & set(held)
    gates(rig).open()
    until(lambda: not books.queue.num_blocks)
    rig.check_books()


def lose(rig: ChunkRig, name: bytes) -> None:
    """An object, when its first layers are asked for."""
    read = gates(rig).read

    def read_others(items: Any) -> None:
        read([item for item in items if item.name != name])
        gone = [item for item in items if item.name == name]
        for item in gone:
            gates(rig).stages[0].wait(WAIT_S)
            item.ended(Outcome.MISSING)

    gates(rig).read = read_others


@pytest.mark.parametrize("awaited", [False, True])
def test_what_the_tier_has_lost_is_computed(rig: ChunkRig, awaited: bool, caplog: pytest.LogCaptureFixture) -> None:
    tier: Any = rig.tier
    lost = tier.format.name_of(rig.manager.block_hashes(TOKENS)[5])
    lose(rig, lost)
    with ask(rig, 0) as request:
        if awaited:
            chunk = request.next_chunk(timeout_s=WAIT_S)
            assert chunk == END
        gates(rig).open()
        if awaited:
            rig.run_or_fail(request, END, TABLE, EXPECTED)
            with pytest.raises(TransferError, match="1 of 8 blocks did not come from the tier"):
                request.loads[0].wait(WAIT_S)
        else:
            until(lambda: not rig.manager._books.num_reading_blocks)
        computed = finish(rig, request)
        assert computed[0] == range(CHUNK, 2 * CHUNK)  # of the first one nothing was lost
    assert not caplog.records
    rig.check_books()


@pytest.mark.parametrize("how", ["cancel", "leave", "close"])
def test_a_request_that_ends_waits_for_no_storage(rig: ChunkRig, how: str) -> None:
    request = ask(rig, 1)
    with request:
        assert request.next_chunk(timeout_s=WAIT_S) == END
        [load] = request.loads
        load.wait_layer(0, timeout_s=WAIT_S)
        if how == "cancel":
            request.cancel()
        elif how == "close":
            rig.manager.close()
    for save in request.saves:
        save.cancel()  # nobody marks it
    load.wait_over(SHORT_S)
    assert load.failed
    assert not rig.cache.domain.busy(TABLE[:BLOCKS])
    assert any(rig.pool.domain._write_leases)
    gates(rig).open()
    until(lambda: not any(rig.pool.domain._write_leases))
    if how != "close":
        rig.cache.mark_rewritten(TABLE)
        rig.check_books()
        trust(rig, 1.0)
        with ask(rig, 3) as again:
            assert finish(rig, again) == [END]
        rig.check_books()


def test_others_find_what_is_being_followed_when_it_is_there(rig: ChunkRig) -> None:
    """And not before: its bytes are not there."""
    hashes = rig.manager.block_hashes(TOKENS)[:BLOCKS]
    with ask(rig, 1) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == END
        with rig.manager.lookup(hashes) as lease:
            assert lease.num_blocks == 0
        gates(rig).open()
        until(lambda: rig.manager.stats()["blocks"] == BLOCKS)
        other = [one + 20 for one in TABLE[:BLOCKS]]
        with rig.manager.lookup(hashes) as lease:
            assert lease.num_blocks == BLOCKS
            rig.manager.onload(lease.hashes, other).wait(WAIT_S)
        np.testing.assert_array_equal(rig.layer_of(other, 1, END.start), EXPECTED[: END.start, 1])
        rig.run(request, END, TABLE, EXPECTED)
        assert finish(rig, request) == []
    rig.check_books()


def test_two_prompts_follow_what_is_read_once(rig: ChunkRig) -> None:
    second = [one + 20 for one in TABLE]
    with ask(rig, 1) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == END
        until(lambda: gates(rig).asked == BLOCKS)
        with rig.manager.request(TOKENS, second, chunk_tokens=CHUNK) as other:
            threading.Timer(SHORT_S, gates(rig).open).start()
            while (chunk := other.next_chunk(timeout_s=WAIT_S)) is not None:
                rig.run_or_fail(other, chunk, second, EXPECTED)
            rig.check(second, EXPECTED)
        assert gates(rig).asked == BLOCKS
        rig.run(request, END, TABLE, EXPECTED)
        assert finish(rig, request) == []
    rig.check_books()


@pytest.mark.parametrize("keeps", ["nothing", "loads"])
def test_of_a_request_that_is_forgotten_the_load_ends_when_it_is_late(
    rig: ChunkRig, keeps: str, caplog: pytest.LogCaptureFixture
) -> None:
    trust(rig, 0.005)
    request: Any = ask(rig, 1)
    assert request.next_chunk(timeout_s=WAIT_S) == END
    [load], saves = request.loads, request.saves
    load.wait_layer(0, timeout_s=WAIT_S)
    for save in saves:
        save.cancel()
    kept = [load] if keeps == "loads" else []
    del request, load, saves
    gc.collect()
    until(lambda: not rig.cache.domain.busy(TABLE[:BLOCKS]))
    for load in kept:
        with pytest.raises(TransferError, match="has not brought it in time"):
            load.wait(WAIT_S)
    assert not caplog.records
    gates(rig).open()
    until(lambda: not any(rig.pool.domain._write_leases))
    rig.cache.mark_rewritten(TABLE)


def test_without_a_thread_for_the_deadline_it_comes_all_the_same(
    rig: ChunkRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*alarm: Any) -> None:
        raise RuntimeError("can't start new thread")

    books: Any = rig.manager._books
    monkeypatch.setattr(books, "call_at", refuse)
    with ask(rig, 3) as request:
        assert finish(rig, request) == [END]
    assert "can't start new thread" in caplog.text
    rig.check_books()


def test_what_cannot_be_followed_holds_nothing(rig: ChunkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(*given: Any) -> None:
        tried.append("follow")
        raise OSError("no memory")

    monkeypatch.setattr(reading.arriving, "follow", refuse)
    with ask(rig, 3) as request:
        assert finish(rig, request) == [END]
    assert tried == ["follow"]
    rig.check_books()


def test_what_others_have_brought_meanwhile_is_loaded_at_once(rig: ChunkRig) -> None:
    """Between the lookup and the load."""
    books: Any = rig.manager._books
    hashes = rig.manager.block_hashes(TOKENS)[:BLOCKS]
    rig.manager.prefetch(hashes, timeout_s=WAIT_S).wait(WAIT_S)
    rig.poison(TABLE)
    compute = rig.scheduler.compute_stream(None)
    transfer, prefetch = change(books, lambda: books.follow(hashes, TABLE[:BLOCKS], compute))
    transfer.wait(WAIT_S)
    assert prefetch.done and prefetch.blocks_until == 0
    assert layers_there(rig) == [True] * 3
    rig.check_books()


def test_what_is_read_ahead_is_urgent_when_it_is_followed(rig: ChunkRig) -> None:
    for stage in gates(rig).stages:
        stage.clear()
    ahead = rig.manager.prefetch(rig.manager.block_hashes(TOKENS)[:BLOCKS], timeout_s=WAIT_S)
    with ask(rig, 0) as request:
        books: Any = rig.manager._books
        [movement] = [one for one in rig.manager.in_flight()]
        assert movement._movement in books.loads
        fetching = list(books.queue._by_job.values())
        assert len(fetching) > 1 and all(one.urgent for one in fetching)
        assert [one.reading.layerwise for one in fetching].count(True) == 1
        gates(rig).open()
        assert finish(rig, request) == [END]
    assert ahead.wait(WAIT_S)
    rig.check_books()


def test_who_follows_hears_before_the_lease_ends(rig: ChunkRig) -> None:
    """And no more behind that; layers may be told in any order."""
    books: Any = rig.manager._books
    heard: list[Any] = []
    with ask(rig, 0) as request:
        [fetching] = books.queue._by_job.values()
        until(lambda: fetching.followers)
        fetched = books.fetched
        fetching.followers.append(lambda: heard.append(fetching.num_layers))
        books.fetched = lambda *given: (heard.append("fetched"), fetched(*given))
        change(books, lambda: fetching._layers_are_there(2))
        change(books, lambda: fetching._layers_are_there(1))
        assert heard == [2, 2]
        heard.clear()
        gates(rig).open()
        assert finish(rig, request) == [END]
        assert heard[-2:] == [3, "fetched"] and fetching.followers == []
    books.fetched = fetched
    rig.check_books()


def test_its_time_says_little_of_the_link(rig: ChunkRig) -> None:
    said: list[bool] = []
    books: Any = rig.manager._books
    books.rates.observe_load = lambda name, *what, shared=False: said.append(shared) if name == LINK else None
    with ask(rig, 3) as request:
        assert finish(rig, request) == [END]
    rig.check_books()
    assert said == [True]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_tier_does_no_wrong_byte_is_served(tmp_path: Path, seed: int) -> None:
    """Requests that are cancelled, blocks that are dropped and evicted, two threads, and a tier with faults."""
    faults = [Fault.LATE, Fault.TORN, Fault.WRONG] if seed % 2 else []
    engine = FaultyEngine(FilesEngine({tmp_path: 1 << 28}), faults, share=0.1, seed=seed, delay_s=0.01)
    rig = ChunkRig(engine, spec=LARGE, host_blocks=60, device_blocks=48, tier_timeout_s=2.0)
    prompts = [[0] * (6 * SIZE) + [number] * (10 * SIZE + 1) for number in range(3)]
    expected = [contents(prompt, LARGE) for prompt in prompts]
    errors: list[BaseException] = []
    followed: list[int] = []
    books: Any = rig.manager._books
    follow = books.follow
    books.follow = lambda keys, *given: (followed.append(len(keys)), follow(keys, *given))[1]

    def serve(thread: int) -> None:
        own, table = random.Random(10 * seed + thread), list(range(20 * thread, 20 * thread + 17))
        try:
            for _ in range(10):
                know(rig.manager, own.choice([1e-4, 1e-3]), own.choice([1e-3, 1.0]), own.choice([1e-4, 2e-3, 1e-2]))
                number = own.randrange(len(prompts))
                if own.random() < 0.3:
                    rig.manager.drop(rig.manager.block_hashes(prompts[number])[own.randrange(16) :])
                if own.random() < 0.6:
                    rig.manager.evict(60)
                rig.poison(table)
                rig.cache.mark_rewritten(table)
                saves: list[Any] = []
                with rig.manager.request(
                    prompts[number], table, chunk_tokens=own.choice([CHUNK, 2 * CHUNK])
                ) as request:
                    leaves = own.random() < 0.2
                    while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
                        saves += request.saves
                        if leaves:
                            request.cancel()
                            break
                        rig.run_or_fail(request, chunk, table, expected[number])
                for transfer in [*request.loads, *saves]:
                    transfer.wait_over(WAIT_S)
                if not leaves:
                    rig.check(table, expected[number])
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert followed or faults  # a tier that has failed rests
    until(lambda: not books.queue.num_blocks and rig.manager.stats() and books.queue.next(None) is None)
    rig.check_books()
    rig.close()


@pytest.mark.parametrize(("spec", "layerwise"), [(LARGE, True), (SPEC, False)])
def test_a_tier_whose_objects_come_at_once_is_not_followed(tmp_path: Path, spec: Any, layerwise: bool) -> None:
    rig = ChunkRig(FilesEngine({tmp_path: 1 << 26}), spec=spec, host_blocks=20)
    assert rig.tier is not None and rig.tier.reads_layerwise == layerwise
    rig.prefill(TOKENS[: BLOCKS * SIZE], TABLE, chunk_tokens=CHUNK)
    rig.check_books()
    rig.manager.evict(64)
    block_bytes = spec.block_bytes * spec.num_layers
    rates = Rates(block_bytes, SIZE)
    rates.set_load(LINK, block_bytes / 1e-4)
    rates.set_load(TIER, block_bytes / 1.0)
    rates.set_prefill(1e3)
    books: Any = rig.manager._books
    books.rates = rates
    followed: list[int] = []
    follow = books.follow
    books.follow = lambda keys, *given: (followed.append(len(keys)), follow(keys, *given))[1]
    assert rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK) == [END]
    assert followed == [BLOCKS] * layerwise
    rig.close()
