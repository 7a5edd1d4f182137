"""Prompts that are computed from the front while what was found of them comes from the back."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError
from paddle_kv.offload import chunks
from paddle_kv.testing.tiers import Fault, FaultyEngine
from paddle_kv.tiers import FilesEngine
from paddle_kv.tracking.group import MemoryGroup
from tests.offload.chunk_clauses import Stalling
from tests.offload.chunk_rig import SIZE, SPEC, WAIT_S, ChunkRig, contents, know, until
from tests.schedule.rig import Copies

CHUNK = 2 * SIZE
TOKENS = list(range(5 * CHUNK + 3))
TABLE = [9, 2, 11, 5, 30, 31, 7, 8, 1, 12, 20]


@pytest.fixture
def rig() -> Iterator[ChunkRig]:
    made = ChunkRig()
    yield made
    made.close()


def test_without_anything_found_each_chunk_is_computed_once(rig: ChunkRig) -> None:
    chunks = rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    assert chunks == [range(start, min(start + CHUNK, len(TOKENS))) for start in range(0, len(TOKENS), CHUNK)]
    rig.check_books()
    assert rig.manager.stats()["saved_blocks"] == 10


def test_a_chunk_with_its_save_is_one_section(rig: ChunkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one takes as long as a tenth of all that a chunk takes."""
    sections: list[Any] = []
    run = MemoryGroup.run

    def counted(group: MemoryGroup, function: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            sections.append(function)
        return run(group, function)

    monkeypatch.setattr(MemoryGroup, "run", counted)
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK) as request:
        for start in (0, CHUNK):
            sections.clear()
            assert request.next_chunk(timeout_s=WAIT_S) == range(start, start + CHUNK)
            assert len(sections) == 1 and len(request.saves) == 1
            request.saves[0].cancel()


def test_with_write_back_a_chunk_saves_nothing() -> None:
    rig = ChunkRig(write_through=False)
    domain = rig.cache.domain
    domain._poisoned[TABLE] = True
    domain._why_poisoned.update(dict.fromkeys(TABLE, "lost"))
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        assert request.saves == []
        assert domain.poisoned(TABLE) == TABLE[2:]
    rig.check_books()
    rig.close()


def test_what_is_there_is_not_computed(rig: ChunkRig, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    rig.scheduler.drain(WAIT_S)
    know(rig.manager, 1e-3, 1e-3)
    monkeypatch.setattr(rig.manager.rates, "observe_load", lambda *_, **__: None)  # of a busy machine
    copies.hold("onload", 0)  # until the model computes, or all might have come before

    def pause(tokens: range) -> None:
        """The model takes as long as most of the loads."""
        copies.go_on()
        until(lambda: len(copies.done) >= 3 * SPEC.num_layers and not rig.scheduler.in_flight())

    copies.done.clear()
    rig.pause = pause
    chunks = rig.prefill(TOKENS, TABLE[::-1], chunk_tokens=CHUNK)
    assert chunks[0].start == 0
    assert len(chunks) <= 3
    rig.check_books()


def test_a_prefix_of_one_pass_is_loaded_as_soon_as_the_link_is_known(
    rig: ChunkRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is not, a part comes beside the computing of the other one: nothing else would ever measure the link."""
    tokens, everything = TOKENS[: 8 * SIZE + 3], len(TABLE) * SIZE
    computed = [sum(map(len, rig.prefill(tokens, TABLE, chunk_tokens=everything)))]
    rig.scheduler.drain(WAIT_S)
    know(rig.manager, None, 1.0)
    rates = rig.manager.rates
    observe, num_bytes = rates.observe_load, rates.block_bytes
    monkeypatch.setattr(rates, "observe_load", lambda name, *_, **__: observe(name, num_bytes, 0.1))  # of any machine
    monkeypatch.setattr(rates, "observe_prefill", lambda *_: None)
    rig.pause = lambda _: until(lambda: not any(one.plan.direction == "onload" for one in rig.scheduler.in_flight()))
    for _ in range(30):
        computed.append(sum(map(len, rig.prefill(tokens, TABLE, chunk_tokens=everything))))
        rig.scheduler.drain(WAIT_S)
    assert computed[0] == len(tokens)
    assert computed[-1] < len(tokens) // 2, computed
    rig.check_books()


def test_a_block_in_host_memory_that_is_computed_all_the_same_is_not_saved(rig: ChunkRig) -> None:
    rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    rig.scheduler.drain(WAIT_S)
    know(rig.manager, 10.0, 1e-6)
    with rig.manager.request(TOKENS, TABLE[::-1], chunk_tokens=CHUNK) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        assert request.saves == []
        rig.cache.mark_rewritten(TABLE)


def test_a_with_block_that_raises_cancels_what_has_not_begun(rig: ChunkRig) -> None:
    with pytest.raises(ZeroDivisionError), rig.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        raise ZeroDivisionError
    with pytest.raises(CancelledError):
        request.saves[0].wait(WAIT_S)
    rig.check_books()


def test_of_a_with_block_that_is_left_all_loads_are_named(rig: ChunkRig, copies: Copies) -> None:
    """By break: whoever waits for them may give the blocks to somebody else."""
    rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    rig.scheduler.drain(WAIT_S)
    know(rig.manager, 2.0, 1.0)
    copies.hold("onload", 1)
    with rig.manager.request(TOKENS, TABLE[::-1], chunk_tokens=CHUNK) as request:
        assert request.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        under_way = [one._movement for one in rig.scheduler.in_flight()]
        assert request.loads == [] and {one.direction for one in under_way} == {"onload"}
    assert [load._movement for load in request.loads] == under_way
    copies.go_on()
    for transfer in [*request.loads, *request.saves]:
        transfer.wait_over(WAIT_S)
    assert not rig.cache.domain.busy(TABLE)
    rig.cache.mark_rewritten(TABLE)
    rig.check_books()


@pytest.mark.parametrize("chunk_tokens", [None, CHUNK])
@pytest.mark.parametrize("num_passes", [0, 1])
def test_of_a_with_block_that_is_left_before_a_pass_its_save_is_cancelled(
    rig: ChunkRig, chunk_tokens: int | None, num_passes: int
) -> None:
    """Nobody would mark its layers any more."""
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=chunk_tokens) as request:
        for number in range(num_passes + (chunk_tokens is not None)):
            chunk = request.next_chunk(timeout_s=WAIT_S)
            if chunk is not None and number < num_passes:
                rig.run(request, chunk, TABLE, contents(TOKENS))
    whole = num_passes if chunk_tokens is None else 0
    for number, save in enumerate(request.saves):
        save.wait_over(WAIT_S)
        assert (save.state.value == "done") == (number < num_passes or whole > 0)
    assert request.saves
    rig.check_books()


@pytest.mark.parametrize("together", [False, True])
def test_prompts_in_turns_measure_the_model_and_not_each_other(together: bool) -> None:
    """A pass of one or of all: else a link that is slower than the model would seem to be quicker."""
    block_s, num = 8e-3, 4
    rig = ChunkRig(device_blocks=64, pause=lambda chunk: time.sleep(len(chunk) / SIZE * block_s / SPEC.num_layers))
    prompts = [[number] * (8 * SIZE) for number in range(num)]
    tables = [list(range(8 * number, 8 * number + 8)) for number in range(num)]
    with contextlib.ExitStack() as stack:
        requests = [
            stack.enter_context(rig.manager.request(*one, chunk_tokens=CHUNK))
            for one in zip(prompts, tables, strict=True)
        ]
        expected = [contents(prompt) for prompt in prompts]
        for _ in range(8 * SIZE // CHUNK):
            chunks = []
            for number, request in enumerate(requests):
                chunk = request.next_chunk(timeout_s=WAIT_S)
                assert chunk is not None
                chunks.append(chunk)
                if not together:
                    rig.run(request, chunk, tables[number], expected[number])
            for number, chunk in enumerate(chunks if together else ()):
                rig.run(requests[number], chunk, tables[number], expected[number])
        assert [request.next_chunk(timeout_s=WAIT_S) for request in requests] == [None] * num
    found_s = rig.manager.rates.compute_s(0, 1)
    assert found_s is not None and 0.5 * block_s < found_s < 2.5 * block_s
    rig.close()


def test_a_prompt_that_was_loaded_as_a_whole_does_not_keep_others_from_measuring_the_model(rig: ChunkRig) -> None:
    block_s = 8e-3
    rig.prefill(TOKENS[: 2 * CHUNK + 1], TABLE, chunk_tokens=CHUNK)
    rig.scheduler.drain(WAIT_S)
    know(rig.manager, None, None)
    rig.pause = lambda chunk: time.sleep(len(chunk) / SIZE * block_s / SPEC.num_layers)
    prompts, tables = [TOKENS, [99] * (3 * CHUNK)], [range(20, 40), range(40, 60)]
    with contextlib.ExitStack() as stack:
        requests = [
            stack.enter_context(rig.manager.request(tokens, table, chunk_tokens=CHUNK, how="load"))
            for tokens, table in zip(prompts, tables, strict=True)
        ]
        for load in requests[0].loads:
            load.wait(WAIT_S)
        assert requests[0].loads
        for _ in range(3):
            for request, tokens, table in zip(requests, prompts, tables, strict=True):
                chunk = request.next_chunk(timeout_s=WAIT_S)
                assert chunk is not None
                rig.run(request, chunk, table, contents(tokens))
    found_s = rig.manager.rates.compute_s(0, 1)
    assert found_s is not None and 0.5 * block_s < found_s < 2.5 * block_s


def test_a_load_that_several_chunks_read_is_waited_for_once(rig: ChunkRig, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig.manager.request(TOKENS, TABLE, chunk_tokens=CHUNK) as request:
        made: Any = request
        for _ in range(2):
            movement = SimpleNamespace(handle=lambda: "load", failed=False)
            step = SimpleNamespace(piece="piece", loads=[movement], leaving=None, reading=None)
            made._meeting = SimpleNamespace(next=print)
            monkeypatch.setattr(chunks, "change", lambda books, call, step=step: step)
            assert made._next_piece(None, None) == "piece"
        assert (made.loads, made._used) == (["load"], ["load"])
        made._meeting, made._used, made.loads = None, [], []
        monkeypatch.undo()


@pytest.fixture
def below(tmp_path: Path) -> Iterator[ChunkRig]:
    """All of the prompt lies in the tier, which reads nothing before it is let. It is trusted, and the model slow."""
    rig = ChunkRig(Stalling(tmp_path))
    rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    rig.check_books()
    assert rig.manager.evict(64) == 10
    know(rig.manager, 0.1, 1e3, 1.0)
    rig.engine.gate.clear()  # type: ignore[union-attr]
    yield rig
    rig.close()


def test_a_chunk_waits_for_a_tier_that_is_quicker(below: ChunkRig) -> None:
    expected = contents(TOKENS)
    with below.manager.request(TOKENS, TABLE[::-1], chunk_tokens=CHUNK) as request:
        for _ in range(2):
            with pytest.raises(TimeoutError, match="from the tier within timeout_s"):
                request.next_chunk(timeout_s=0.01)
        below.engine.gate.set()  # type: ignore[union-attr]
        while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
            assert chunk == range(10 * SIZE, len(TOKENS))
            below.run(request, chunk, TABLE[::-1], expected)
    below.check(TABLE[::-1], expected)
    below.check_books()


def test_what_is_in_host_memory_does_not_wait_for_the_tier_in_the_same_chunk(below: ChunkRig) -> None:
    expected, table, there = contents(TOKENS), TABLE[::-1], 3 * SIZE
    below.engine.gate.set()  # type: ignore[union-attr]
    below.manager.prefetch(below.manager.block_hashes(TOKENS)[:3], timeout_s=WAIT_S).wait(WAIT_S)
    below.check_books()
    know(below.manager, 0.1, 1e3, 1.0)
    below.engine.gate.clear()  # type: ignore[union-attr]
    below.poison(table)
    with below.manager.request(TOKENS, table, chunk_tokens=CHUNK) as request:
        until(lambda: np.array_equal(below.layer_of(table, SPEC.num_layers - 1, there), expected[:there, -1]))
        with pytest.raises(TimeoutError, match="from the tier within timeout_s"):
            request.next_chunk(timeout_s=0.01)
        below.engine.gate.set()  # type: ignore[union-attr]
        while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
            assert chunk == range(10 * SIZE, len(TOKENS))
            below.run(request, chunk, table, expected)
    below.check(table, expected)
    below.check_books()


def test_a_chunk_does_not_wait_for_a_tier_that_is_late(below: ChunkRig) -> None:
    know(below.manager, 0.1, 1e3, 1e-3)
    computed = below.prefill(TOKENS, TABLE[::-1], chunk_tokens=CHUNK)
    assert computed[0] == range(CHUNK) and len(computed) == -(-len(TOKENS) // CHUNK)
    assert below.manager.rates.stats()["tier_late_loads"] > 0
    below.engine.gate.set()  # type: ignore[union-attr]
    below.check_books()


@pytest.mark.parametrize("seed", range(12))
def test_random_rates_failures_and_cancels_leave_no_wrong_byte(seed: int, copies: Copies) -> None:
    rng = random.Random(seed)
    rig = ChunkRig(host_blocks=rng.choice([12, 40, 200]), policy=rng.choice(["lru", "arc", "s3fifo"]))
    rig.pause = lambda tokens: time.sleep(rng.choice([0, 0, 0.001]))
    for _ in range(12):
        know(rig.manager, rng.choice([None, 1e-4, 10.0]), rng.choice([None, 1e-4, 10.0]))
        tokens = TOKENS[: rng.randrange(1, len(TOKENS) + 1)] + [rng.randrange(3)] * rng.randrange(6)
        copies.heal()
        if rng.random() < 0.4:
            copies.fail(rng.choice(["onload", "offload"]), rng.randrange(3), OSError("lost"))
        table = rng.sample(range(64), -(-len(tokens) // SIZE))
        most = rng.choice([None, lambda: rng.randrange(1, 2 * CHUNK)])
        chunk_tokens = rng.choice([SIZE, CHUNK, 3 * SIZE, 64 * SIZE])
        if rng.random() < 0.2:
            with rig.manager.request(tokens, table, chunk_tokens=chunk_tokens) as request:
                chunk = request.next_chunk(timeout_s=WAIT_S)
                if rng.random() < 0.5 and chunk is not None:
                    rig.run_or_fail(request, chunk, table, contents(tokens))
                    request.next_chunk(timeout_s=WAIT_S)
                request.cancel()
            for transfer in [*request.loads, *request.saves]:
                transfer.wait_over(WAIT_S)
        else:
            canceller = threading.Timer(rng.random() * 0.005, rig.manager.cancel_all)
            if rng.random() < 0.3:
                canceller.start()
            rig.prefill(tokens, table, most, chunk_tokens=chunk_tokens, how=rng.choice(["sooner", "load", "compute"]))
            canceller.cancel()
        rig.check_books()
    copies.heal()
    rig.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_tier_with_faults_serves_no_wrong_byte(seed: int, tmp_path: Path, copies: Copies) -> None:
    rng = random.Random(seed)
    faults = [Fault.LATE, Fault.TORN, Fault.WRONG, Fault.TWICE]
    engine = FaultyEngine(FilesEngine({tmp_path: 1 << 24}), faults, share=0.2, seed=seed, delay_s=0.004)
    rig = ChunkRig(engine, host_blocks=rng.choice([9, 24, 64]), tier_timeout_s=0.5)
    rig.pause = lambda tokens: time.sleep(rng.choice([0, 0.001]))
    brought = rounds = 0
    while rounds < 10 or (not brought and rounds < 200):  # on a busy machine the tier is late more often
        rounds += 1
        know(rig.manager, rng.choice([None, 1e-4]), rng.choice([None, 1e-3]), rng.choice([1e-4, 1e-4, 10.0, None]))
        tokens = TOKENS[: rng.randrange(CHUNK, len(TOKENS) + 1)] + [rng.randrange(2)] * rng.randrange(6)
        table = rng.sample(range(64), -(-len(tokens) // SIZE))
        engine.dead = rng.random() < 0.1
        chunk_tokens = rng.choice([SIZE, CHUNK, 3 * SIZE])
        rig.prefill(tokens, table, chunk_tokens=chunk_tokens, how=rng.choice(["sooner", "sooner", "load"]))
        engine.dead = False
        rig.check_books()
        brought += rig.manager.stats()["prefetched_blocks"] > 0
        rig.manager.evict(rng.choice([0, 5, 64]))
    assert brought
    rig.close()
