"""What a running request needs from the tier goes before what is read ahead, and takes over what was."""

from __future__ import annotations

import random
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.offload import BlockState, rates
from paddle_kv.testing.tiers import Fault, FaultyEngine
from paddle_kv.tiers import FilesEngine, Outcome
from tests.offload.chunk_rig import SIZE, WAIT_S, ChunkRig, contents, know, until
from tests.offload.urgency_rig import BLOCKS, CHUNK, PROMPTS, TABLE, UNDER_WAY, Server, ahead, from_back


# ---- the order of reads ----
def test_what_is_read_ahead_is_asked_for_in_small_parts(server: Server) -> None:
    prefetch = server.manager.expect(server.hashes[0])
    assert server.asked == from_back(0, UNDER_WAY)
    assert prefetch.num_blocks == BLOCKS
    assert server.manager.states(server.hashes[0])[-7:] == [BlockState.TIER] + [BlockState.ARRIVING] * UNDER_WAY
    assert server.manager.stats()["saving_blocks"] == UNDER_WAY  # the others have no place in host memory yet
    server.serve(2)
    assert server.asked == from_back(0, UNDER_WAY + 2)
    server.by_hand.open()
    assert prefetch.wait(WAIT_S) and prefetch.num_arrived == BLOCKS
    server.check_books()


def test_an_urgent_read_goes_before_what_waits_and_that_waits_for_it(server: Server) -> None:
    prefetches = [server.manager.expect(server.hashes[number]) for number in (0, 1)]
    with server.manager.request(PROMPTS[2], TABLE, chunk_tokens=CHUNK) as request:
        asked = server.asked
        assert asked[:UNDER_WAY] == from_back(0, UNDER_WAY)
        urgent = asked[UNDER_WAY:]
        assert urgent[:4] == [(2, 22), (2, 23), (2, 20), (2, 21)]  # from the back, in pieces
        assert {prompt for prompt, _ in urgent} == {2}
        server.serve(UNDER_WAY)
        assert {prompt for prompt, _ in server.asked[UNDER_WAY:]} == {2}  # nothing ahead while it waits
        server.by_hand.open()
        server.finish(request, PROMPTS[2])
    assert all(prefetch.wait(WAIT_S) for prefetch in prefetches)
    rest = [one for one in server.asked if one[0] != 2]
    assert rest == from_back(0, BLOCKS) + from_back(1, BLOCKS)  # in order, each once
    server.check_books()


def test_a_load_of_a_lease_goes_before_what_waits(server: Server) -> None:
    prefetch = server.manager.prefetch(server.hashes[0], timeout_s=WAIT_S)
    with server.manager.lookup(server.hashes[1]) as lease:
        load = server.manager.onload(lease.hashes, TABLE[:BLOCKS])
    assert server.asked == ahead(0, 0, UNDER_WAY) + ahead(1, 0, BLOCKS)
    server.serve(UNDER_WAY)
    assert len(server.asked) == UNDER_WAY + BLOCKS
    server.by_hand.open()
    load.wait(WAIT_S)
    assert prefetch.wait(WAIT_S) and prefetch.num_arrived == BLOCKS
    server.check_books()


def test_what_is_due_first_is_read_first(server: Server) -> None:
    first = server.manager.expect(server.hashes[0], in_seconds=600)
    assert server.asked == from_back(0, UNDER_WAY)  # the tier has nothing else to do
    server.manager.expect(server.hashes[1], in_seconds=60)
    server.manager.expect(server.hashes[2])
    server.manager.prefetch(server.hashes[3], timeout_s=WAIT_S)  # as one that is expected next
    server.by_hand.open()
    assert first.wait(WAIT_S)
    order = list(dict.fromkeys(prompt for prompt, _ in server.asked[UNDER_WAY:]))
    assert order == [2, 3, 1, 0]
    assert len(set(server.asked)) == len(server.asked) == 4 * BLOCKS
    server.check_books()


# ---- requests that join ----
def test_a_request_reads_what_waits_for_it_at_once_and_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "LATE_S", WAIT_S)  # a loaded machine is late, and then it is asked for again
    prefetch = server.manager.expect(server.hashes[0])
    with server.manager.request(PROMPTS[0], TABLE, chunk_tokens=CHUNK) as request:
        assert request._lease.num_blocks == BLOCKS  # type: ignore[attr-defined]
        assert server.asked[UNDER_WAY:] == [(0, 16), (0, 17)]  # the three pieces behind it are on their way
        server.by_hand.open()
        assert server.finish(request, PROMPTS[0])[-1] == BLOCKS
    assert prefetch.wait(WAIT_S)
    asked = server.asked
    assert len(set(asked)) == len(asked)
    server.check_books()


def test_a_request_waits_for_what_is_being_read_for_it(server: Server) -> None:
    """All of it: nothing is read again, nor computed."""
    hashes = server.hashes[0][:UNDER_WAY]
    server.manager.expect(hashes)
    prompt = PROMPTS[0][: UNDER_WAY * SIZE + 1]
    know(server.manager, 0.1, 1e3, 1.0)
    with server.manager.request(prompt, TABLE, chunk_tokens=CHUNK) as request:
        with pytest.raises(TimeoutError):
            request.next_chunk(timeout_s=0.05)
        server.by_hand.open()
        assert server.finish(request, prompt) == [UNDER_WAY]  # its last token alone
    assert server.asked == from_back(0, UNDER_WAY, UNDER_WAY)
    server.check_books()


def test_two_requests_of_one_prompt_read_it_once(server: Server) -> None:
    know(server.manager, 0.1, 1e3, 1.0)
    prompt = PROMPTS[0][: 4 * SIZE + 1]
    other = list(range(4))
    first = server.manager.request(prompt, TABLE, chunk_tokens=CHUNK)
    with server.manager.request(prompt, [*other, 5], chunk_tokens=CHUNK) as second:
        with pytest.raises(TimeoutError):
            second.next_chunk(timeout_s=0.05)
        first.cancel()  # which does not take from the other one what it waits for
        server.by_hand.open()
        assert second.next_chunk(timeout_s=WAIT_S) == range(4 * SIZE, 4 * SIZE + 1)
        server.run_or_fail(second, range(4 * SIZE, 4 * SIZE + 1), [*other, 5], contents(prompt))
        assert second.next_chunk(timeout_s=WAIT_S) is None
    server.check([*other, 5], contents(prompt))
    assert sorted(server.asked) == ahead(0, 0, 4)
    server.check_books()


def test_a_request_does_not_wait_for_a_read_that_is_no_sooner(server: Server) -> None:
    server.manager.expect(server.hashes[0][:UNDER_WAY])
    know(server.manager, 1e-4, 1e-4, 1.0)
    prompt = PROMPTS[0][: UNDER_WAY * SIZE + 1]
    with server.manager.request(prompt, TABLE, chunk_tokens=CHUNK) as request:
        assert server.finish(request, prompt) == [0, 2, 4, 6]
    server.by_hand.open()
    server.check_books()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DAMAGED, Outcome.DROPPED])
def test_what_does_not_come_after_all_is_computed(server: Server, outcome: Outcome) -> None:
    server.manager.expect(server.hashes[0][:UNDER_WAY])
    know(server.manager, 0.1, 1e3, 1.0)
    prompt = PROMPTS[0][: UNDER_WAY * SIZE + 1]
    with server.manager.request(prompt, TABLE, chunk_tokens=CHUNK) as request:
        assert server.asked == from_back(0, UNDER_WAY, UNDER_WAY)
        for _ in range(2):
            server.by_hand.held.pop().ended(outcome)  # the first blocks
        server.by_hand.open()
        assert server.finish(request, prompt)[0] == 0
    server.check_books()


def test_what_is_late_is_computed_and_its_place_is_given_back_later(server: Server) -> None:
    server.manager.expect(server.hashes[0][:UNDER_WAY])
    know(server.manager, 1e-4, 1e3, 1e-3)
    prompt = PROMPTS[0][: UNDER_WAY * SIZE + 1]
    with server.manager.request(prompt, TABLE, chunk_tokens=CHUNK) as request:
        assert server.finish(request, prompt) == [0, 2, 4, 6]
    assert server.manager.rates.stats()["tier_late_loads"] > 0
    server.by_hand.open()
    server.check_books()


def test_what_a_running_request_computes_is_not_read_ahead(server: Server) -> None:
    """Of a tier that is slow the last piece is worth it, which is being read already, and nothing else is."""
    prefetch = server.manager.expect(server.hashes[0])
    know(server.manager, 1e-4, 1e-4, 1.0)
    with server.manager.request(PROMPTS[0], TABLE, chunk_tokens=CHUNK) as request:
        server.by_hand.open()
        assert prefetch.wait(WAIT_S) and prefetch.num_arrived == UNDER_WAY
        assert server.asked == from_back(0, UNDER_WAY)
        server.finish(request, PROMPTS[0])
    server.check_books()


def test_what_is_read_says_how_long_a_request_waits_for_the_tier(server: Server) -> None:
    server.manager.expect(server.hashes[0])
    assert server.books.num_reading_blocks == UNDER_WAY
    server.by_hand.open()


# ---- the end of what waits ----
def test_cancel_drops_what_waits_and_gives_back_nothing_later(server: Server) -> None:
    first, second = (server.manager.expect(server.hashes[number]) for number in (0, 1))
    first.cancel()
    assert not first.done
    server.by_hand.open()
    assert first.wait(WAIT_S) and first.num_arrived == UNDER_WAY
    assert second.wait(WAIT_S) and second.num_arrived == BLOCKS
    assert server.asked == from_back(0, UNDER_WAY) + from_back(1, BLOCKS)
    assert server.manager.stats()["blocks"] == UNDER_WAY + BLOCKS
    server.check_books()


def test_who_waits_hears_that_it_was_cancelled(server: Server) -> None:
    server.manager.expect(server.hashes[0])
    second = server.manager.expect(server.hashes[1])
    threading.Timer(0.05, second.cancel).start()
    assert second.wait(WAIT_S) and second.num_arrived == 0
    server.by_hand.open()


@pytest.mark.parametrize("how", ["drop", "clear"])
def test_what_was_forgotten_is_not_read(server: Server, how: str) -> None:
    prefetch = server.manager.prefetch(server.hashes[0], timeout_s=WAIT_S)
    other = server.manager.expect(server.hashes[1])
    if how == "drop":
        server.manager.drop(server.hashes[0][12:13])
    else:
        server.manager.clear()
    server.by_hand.open()
    assert prefetch.wait(WAIT_S) and other.wait(WAIT_S)
    brought = 12 if how == "drop" else UNDER_WAY
    assert [one for one in server.asked if one[0] == 0] == ahead(0, 0, brought)
    assert other.num_arrived == (BLOCKS if how == "drop" else 0)
    assert server.manager.peek(server.hashes[0]) == (12 if how == "drop" else 0)
    server.check_books()


def test_close_drops_what_waits(server: Server) -> None:
    prefetch = server.manager.expect(server.hashes[0])
    server.manager.close()
    server.by_hand.open()
    assert prefetch.wait(WAIT_S)
    assert server.asked == from_back(0, UNDER_WAY)
    until(lambda: server.pool.num_free_blocks == 200)


@pytest.mark.parametrize("how", ["raises", "closed"])
def test_a_tier_that_cannot_be_asked_ends_what_waits(server: Server, how: str) -> None:
    prefetches = [server.manager.expect(server.hashes[number]) for number in (0, 1)]
    assert server.tier is not None
    if how == "raises":
        server.by_hand.raises = True
    else:
        server.tier._closed = True
    with server.by_hand._guard:
        held, server.by_hand.held = list(server.by_hand.held), deque()
    FilesEngine.read(server.by_hand, held)
    for prefetch in prefetches:
        assert prefetch.wait(WAIT_S)
    assert sum(prefetch.num_arrived for prefetch in prefetches) == UNDER_WAY
    server.tier._closed = False
    server.check_books()


def test_what_the_tier_has_lost_meanwhile_is_no_fault_of_it(server: Server) -> None:
    prefetch = server.manager.expect(server.hashes[0])
    assert server.tier is not None
    server.by_hand.gone.add(server.tier.format.name_of(server.hashes[0][10]))
    server.by_hand.open()
    assert prefetch.wait(WAIT_S)
    assert (prefetch.num_arrived, server.asked) == (BLOCKS - 1, from_back(0, BLOCKS - 11) + from_back(0, 10, 10))
    assert server.manager.rates.stats()["tier_failed_loads"] == 0
    server.check_books()


def test_a_policy_that_raises_holds_up_nobody_else(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = server.books._plan_from_tier

    def failing(keys: list[bytes], device_ids: list[int]) -> Any:
        return 1 // 0 if server.hashes[1][-1] in keys else plan(keys, device_ids)

    monkeypatch.setattr(server.books, "_plan_from_tier", failing)
    prefetches = [server.manager.expect(server.hashes[number]) for number in range(3)]
    server.by_hand.open()
    assert [prefetch.wait(WAIT_S) for prefetch in prefetches] == [True] * 3
    assert [prefetch.num_arrived for prefetch in prefetches] == [BLOCKS, 0, BLOCKS]
    assert "blocks that are expected stay in the tier: ZeroDivisionError" in caplog.text
    with pytest.raises(ZeroDivisionError):
        server.manager.expect(server.hashes[1])
    server.check_books()


def test_what_others_are_about_to_read_ends_no_prefix(server: Server) -> None:
    """Two prompts that begin with the same blocks."""
    first = server.manager.expect(server.hashes[0][:12])
    second = server.manager.expect(server.hashes[0])
    assert (first.num_blocks, second.num_blocks) == (12, BLOCKS - UNDER_WAY)
    server.by_hand.open()
    assert first.wait(WAIT_S) and second.wait(WAIT_S)
    assert server.asked == from_back(0, 12, 12) + from_back(0, BLOCKS - 12)
    assert second.num_arrived <= BLOCKS - UNDER_WAY
    server.check_books()


def test_a_part_that_the_tier_refuses_holds_up_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    prefetches = [server.manager.expect(server.hashes[number]) for number in range(2)]
    assert server.tier is not None
    load, refused = server.tier.load, []

    def refuse(jobs: Any) -> None:
        if len(refused) < UNDER_WAY:  # all that is under way
            refused.extend(jobs)
            raise OSError
        load(jobs)

    monkeypatch.setattr(server.tier, "load", refuse)
    server.by_hand.open()
    assert all(prefetch.wait(WAIT_S) for prefetch in prefetches)
    assert [prefetch.num_arrived for prefetch in prefetches] == [BLOCKS - sum(len(job.keys) for job in refused), BLOCKS]
    server.check_books()


def test_what_has_come_stands_before_nothing_any_more(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, left = server.books.fetched, []

    def spy(*what: Any) -> None:
        left.append(server.books.num_reading_blocks)
        fetched(*what)

    monkeypatch.setattr(server.books, "fetched", spy)
    server.manager.expect(server.hashes[0][:2])
    server.serve(1)
    server.serve(1)
    assert left == [1, 0]
    server.check_books()


def test_an_error_before_a_part_is_planned_ends_its_prefetch(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    prefetches = [server.manager.expect(server.hashes[number]) for number in range(2)]
    settle, errors = server.books.settle, [0]

    def failing() -> None:
        if errors and server.books.queue.num_blocks < UNDER_WAY:
            errors.pop()
            raise ZeroDivisionError
        settle()

    with server.by_hand._guard:
        monkeypatch.setattr(server.books, "settle", failing)
    server.by_hand.open()
    assert all(prefetch.wait(WAIT_S) for prefetch in prefetches)
    assert (errors, prefetches[1].num_arrived) == ([], BLOCKS)
    server.check_books()


# ---- times ----
def test_the_time_of_a_prefetch_counts_from_its_call(server: Server) -> None:
    """Also of what waits: it is over without an answer of the storage."""
    server.know(1e-4, 10.0, 0.02)
    first = server.manager.expect(server.hashes[0])
    prefetch = server.manager.prefetch(server.hashes[1], timeout_s=0.1)
    assert prefetch.wait(WAIT_S) and prefetch.num_arrived == 0
    server.by_hand.open()
    assert first.wait(WAIT_S) and first.num_arrived == BLOCKS
    assert server.asked == from_back(0, BLOCKS)
    server.check_books()


def test_what_would_come_too_late_is_not_asked_for(server: Server) -> None:
    prefetch = server.manager.prefetch(server.hashes[0], timeout_s=1.0)  # a block takes two
    assert prefetch.done and server.asked == []
    server.by_hand.open()


def test_the_time_of_what_is_expected_counts_from_when_the_tier_is_asked(tmp_path: Path) -> None:
    server = Server(tmp_path, tier_timeout_s=1.0)
    server.know(1e-4, 10.0, 0.02)
    first = server.manager.prefetch(server.hashes[0], timeout_s=WAIT_S * 20)
    second = server.manager.expect(server.hashes[1])
    threading.Event().wait(1.2)
    server.by_hand.open()
    assert first.wait(WAIT_S) and second.wait(WAIT_S)
    assert (first.num_arrived, second.num_arrived) == (BLOCKS, BLOCKS)
    server.check_books()
    server.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_no_wrong_byte_is_served(tmp_path: Path, seed: int) -> None:
    """Threads that expect, cancel, prefetch, drop and compute prompts that begin alike, over a tier with faults."""
    faults = [Fault.LATE, Fault.TORN, Fault.WRONG] if seed % 2 else []
    engine = FaultyEngine(FilesEngine({tmp_path: 1 << 26}), faults, share=0.1, seed=seed, delay_s=0.01)
    rig = ChunkRig(engine, host_blocks=60, device_blocks=64, tier_timeout_s=2.0)
    prompts = [[0] * (6 * SIZE) + [number] * (10 * SIZE + 1) for number in range(5)]
    hashes = [rig.manager.block_hashes(prompt) for prompt in prompts]
    expected = [contents(prompt) for prompt in prompts]
    errors: list[BaseException] = []

    def serve(thread: int) -> None:
        own, table = random.Random(10 * seed + thread), list(range(20 * thread, 20 * thread + 17))
        try:
            for _ in range(12):
                know(rig.manager, 1e-4, own.choice([1e-4, 5e-3]), own.choice([None, 1e-4, 2e-3]))
                number = own.randrange(len(prompts))
                ahead = [rig.manager.expect(hashes[own.randrange(5)], own.choice([None, 1.0])) for _ in range(3)]
                ahead.append(rig.manager.prefetch(hashes[number], timeout_s=own.choice([0.01, 1.0])))
                if own.random() < 0.3:
                    rig.manager.drop(hashes[number][own.randrange(16) :])
                if own.random() < 0.3:
                    rig.manager.evict(60)
                if own.random() < 0.5:
                    own.choice(ahead).cancel()
                rig.poison(table)
                rig.cache.mark_rewritten(table)
                with rig.manager.request(prompts[number], table, chunk_tokens=own.choice([SIZE, CHUNK])) as request:
                    saves = []
                    while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
                        saves += request.saves
                        rig.run_or_fail(request, chunk, table, expected[number])
                rig.check(table, expected[number])
                for transfer in saves:
                    transfer.wait_over(WAIT_S)
                if own.random() < 0.2:
                    assert all(prefetch.wait(WAIT_S) for prefetch in ahead)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    books: Any = rig.manager._books
    until(lambda: not books.queue.num_blocks and rig.manager.stats() and books.queue.next(None) is None)
    rig.check_books()
    rig.close()


def test_a_forked_child_reads_nothing_and_waits_for_nothing(server: Server) -> None:
    from tests.offload.disorder import in_child

    prefetch = server.manager.expect(server.hashes[0])

    def child() -> None:
        assert not prefetch.waits
        assert server.manager.expect(server.hashes[0]).done
        server.manager.request(PROMPTS[0], TABLE, chunk_tokens=CHUNK)

    in_child(child)
    server.by_hand.open()
    assert prefetch.wait(WAIT_S) and prefetch.num_arrived == BLOCKS
