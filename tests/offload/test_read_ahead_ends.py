"""The end of what waits for a tier: who hears of it, and what is of no use any more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from paddle_kv.tiers import Outcome
from tests.offload.chunk_rig import SIZE, WAIT_S, until
from tests.offload.urgency_rig import BLOCKS, CHUNK, PROMPTS, TABLE, UNDER_WAY, Server, ahead, from_back


def wakes(prefetch: Any, action: Callable[[], object]) -> bool:
    """Whether who waits for it without a time hears of it at once."""
    heard, looked = threading.Event(), threading.Event()
    books = prefetch._books

    def wait() -> None:
        if prefetch.wait():
            heard.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: books.group.waiters)
    looked.wait(0.05)  # until it is parked, or it would see that by itself
    action()
    return heard.wait(WAIT_S / 6)


@pytest.mark.parametrize("how", ["cancel", "drop", "clear", "close"])
def test_who_waits_without_a_time_hears_of_the_end(server: Server, how: str) -> None:
    server.manager.expect(server.hashes[0])
    second = server.manager.expect(server.hashes[1])
    actions: dict[str, Callable[[], object]] = {
        "cancel": second.cancel,
        "drop": lambda: server.manager.drop(server.hashes[1][:1]),
        "clear": server.manager.clear,
        "close": server.manager.close,
    }
    assert wakes(second, actions[how])
    server.by_hand.open()


def test_what_waits_behind_a_block_that_was_dropped_on_its_way_is_not_read(server: Server) -> None:
    prefetch = server.manager.prefetch(server.hashes[0], timeout_s=WAIT_S)
    server.manager.drop(server.hashes[0][2:3])
    server.by_hand.open()
    assert prefetch.wait(WAIT_S)
    assert server.asked == ahead(0, 0, UNDER_WAY)
    server.check_books()


def test_what_waits_behind_a_dropped_block_of_host_memory_is_not_read(server: Server) -> None:
    first = server.manager.expect(server.hashes[0][:2])
    server.serve(2)
    assert first.done
    server.manager.expect(server.hashes[1])
    second = server.manager.expect(server.hashes[0])
    server.manager.drop(server.hashes[0][1:2])
    server.by_hand.open()
    assert second.wait(WAIT_S)
    assert [one for one in server.asked if one[0] == 0] == from_back(0, 2, 2)
    server.check_books()


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.DAMAGED])
def test_what_waits_behind_a_block_that_the_tier_has_lost_is_not_read(server: Server, outcome: Outcome) -> None:
    prefetch = server.manager.prefetch(server.hashes[0], timeout_s=WAIT_S)
    server.by_hand.held.popleft().ended(outcome)
    server.settle()
    server.by_hand.open()
    assert prefetch.wait(WAIT_S)
    assert server.asked == ahead(0, 0, UNDER_WAY)
    server.check_books()


def test_an_error_of_a_policy_leaves_other_prompts_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt would have read from the tier is computed."""
    plan = server.books._plan_from_tier
    fails = [False]

    def failing(keys: list[bytes], device_ids: list[int]) -> Any:
        return 1 // 0 if fails[0] else plan(keys, device_ids)

    monkeypatch.setattr(server.books, "_plan_from_tier", failing)
    with server.manager.request(PROMPTS[0], TABLE, chunk_tokens=CHUNK) as request:
        fails[0] = True
        with server.manager.request(PROMPTS[1], list(range(BLOCKS + 1)), chunk_tokens=CHUNK) as other:
            other.cancel()
            server.by_hand.open()
            server.finish(request, PROMPTS[0])
    server.check_books()


@pytest.mark.parametrize("own", [False, True])
def test_what_no_request_waits_for_any_more_holds_up_nothing(server: Server, own: bool) -> None:
    """Though the storage does not answer: neither what the request has asked for, nor what it has joined."""
    prompt = PROMPTS[0][: 4 * SIZE + 1]
    if not own:
        server.manager.expect(server.hashes[0][:4])
    with server.manager.request(prompt, TABLE, chunk_tokens=CHUNK) as request:
        assert sorted(server.asked) == ahead(0, 0, 4)
        server.manager.expect(server.hashes[1])
        assert len(server.asked) == 4
        request.cancel()
        assert server.asked[4:] == from_back(1, UNDER_WAY - 4)
    server.by_hand.open()
    server.check_books()


def test_who_expects_what_others_have_asked_for_waits_for_that_too(server: Server) -> None:
    keys = server.hashes[0][: UNDER_WAY + 2]
    first = server.manager.prefetch(keys, timeout_s=WAIT_S)
    same, part = server.manager.expect(keys), server.manager.expect(keys[:4])
    cancelled = server.manager.prefetch(keys[:4], timeout_s=WAIT_S)
    cancelled.cancel()
    assert server.manager.prefetch(keys[:4], timeout_s=0.0).wait(0.0)  # its time is over
    assert (same.num_blocks, part.num_blocks) == (2, 0)
    assert [one.done for one in (first, same, part, cancelled)] == [False, False, False, True]
    server.serve(UNDER_WAY)
    assert [one.done for one in (first, same, part)] == [False, False, True]  # of the second one, its turn has come
    server.by_hand.open()
    assert same.wait(WAIT_S) and same.num_arrived == 0  # they count as the first one's
    assert server.manager.peek(keys) == len(keys)
    assert server.asked == ahead(0, 0, len(keys))
    server.check_books()


def test_who_waits_hears_that_the_tier_has_nothing_when_the_turn_comes(server: Server) -> None:
    assert server.tier is not None
    server.manager.expect(server.hashes[0][:UNDER_WAY])
    second = server.manager.expect(server.hashes[1])
    server.by_hand.gone.update(map(server.tier.format.name_of, server.hashes[1]))
    assert wakes(second, server.by_hand.open)
    assert second.num_arrived == 0
    server.check_books()


def test_what_is_being_read_at_the_front_is_joined_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the prompt comes; beside what it reads itself, from the back."""
    read_soon, calls = server.books.read_soon, []

    def spy(keys: list[bytes]) -> Any:
        calls.append(keys)
        return read_soon(keys)

    monkeypatch.setattr(server.books, "read_soon", spy)
    server.manager.expect(server.hashes[0][:UNDER_WAY])
    with server.manager.request(PROMPTS[0], TABLE, chunk_tokens=CHUNK) as request:
        reading = request._meeting._reading  # type: ignore[attr-defined]
        assert [piece.start for piece in reading] == [22, 20, 18, 16, 0, 2, 4]
        before = dict(reading)
        assert len(calls) == len(before)
        server.serve(1)
        assert {piece: reading[piece] for piece in reading} == before
        server.by_hand.open()
        server.finish(request, PROMPTS[0])
    assert len(set(server.asked)) == len(server.asked)
    server.check_books()
