"""What is read ahead, and what goes before it, where the tier refuses, or something else comes between."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from paddle_kv import TransferError
from paddle_kv.offload import BlockState
from paddle_kv.tiers import Outcome
from tests.offload.chunk_rig import SIZE, WAIT_S, know, until
from tests.offload.urgency_rig import BLOCKS, CHUNK, PROMPTS, TABLE, UNDER_WAY, Server, ahead, from_back


@pytest.mark.parametrize("kind", ["piece", "load"])
def test_others_turn_comes_when_the_tier_refuses_what_is_urgent(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Though all that was under way has ended before."""
    assert server.tier is not None
    load, urgent, refused = server.tier.load, set(server.hashes[1]), []

    def refuse(jobs: Any) -> None:
        if not urgent.intersection(jobs[0].keys):
            return load(jobs)
        refused.extend(jobs)
        known = server.num_known
        server.by_hand.serve(UNDER_WAY)
        until(lambda: server.num_known == known + UNDER_WAY and server.books.num_reading_blocks == 2)
        raise OSError("refused")

    monkeypatch.setattr(server.tier, "load", refuse)
    server.manager.expect(server.hashes[0])
    if kind == "piece":
        request = server.manager.request(PROMPTS[1][: 2 * SIZE + 1], TABLE, chunk_tokens=CHUNK)
        until(lambda: refused)
        request.cancel()
    else:
        with server.manager.lookup(server.hashes[1][:2]) as lease, pytest.raises(TransferError):
            server.manager.onload(lease.hashes, TABLE[:2])
    until(lambda: server.asked == from_back(0, 2 * UNDER_WAY))
    assert server.books.below.rate.blocks_under_way == UNDER_WAY  # the refused ones stand before nothing
    server.by_hand.open()
    server.check_books()


def test_each_host_block_is_given_back_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    domain = server.pool.domain
    end_lease, ended = domain.end_lease, Counter[int]()

    def spy(block_ids: Any, *, write: bool) -> None:
        ended.update(block_ids if write else ())
        end_lease(block_ids, write=write)

    monkeypatch.setattr(domain, "end_lease", spy)
    prefetch = server.manager.expect(server.hashes[0][:UNDER_WAY])
    for outcome in (Outcome.FAILED, Outcome.DAMAGED):
        server.by_hand.held.popleft().ended(outcome)
    server.by_hand.open()
    assert prefetch.wait(WAIT_S) and prefetch.num_arrived == UNDER_WAY - 2
    until(lambda: ended.total() >= UNDER_WAY)
    assert set(ended.values()) == {1}
    server.check_books()


def test_the_tier_hears_how_long_a_part_may_take(server: Server) -> None:
    server.manager.prefetch(server.hashes[0][:1], timeout_s=77.0)
    server.manager.expect(server.hashes[1][:1])
    first, second = (job.timeout_s for job in server.books.queue._under_way)
    assert 70.0 < first <= 77.0
    assert second == server.books.timeout_s
    server.by_hand.open()


def test_only_who_can_wait_for_what_is_being_read_finds_it(server: Server) -> None:
    server.manager.expect(server.hashes[0])
    with server.manager.lookup(server.hashes[0]) as lease:
        assert (lease.num_blocks, lease.num_arriving) == (BLOCKS - UNDER_WAY, UNDER_WAY)
    with server.manager._lookup(server.hashes[0], None, joins=True) as lease:
        assert lease.num_blocks == BLOCKS
    server.by_hand.open()


def test_what_was_cancelled_while_the_tier_was_asked_what_it_has_is_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch = server.manager.expect(server.hashes[0])
    ask = server.books.ask

    def cancels(keys: list[bytes]) -> Any:
        prefetch.cancel()
        return ask(keys)

    monkeypatch.setattr(server.books, "ask", cancels)
    server.serve(1)
    assert server.asked == from_back(0, UNDER_WAY)
    server.by_hand.open()
    assert prefetch.wait(WAIT_S) and prefetch.num_arrived == UNDER_WAY
    server.check_books()


def test_blocks_that_wait_are_held_for_a_request_that_joins(server: Server) -> None:
    """Those that are on their way stay in host memory from when they come."""
    server.manager.expect(server.hashes[0][:UNDER_WAY])
    know(server.manager, 0.1, 1e3, 1.0)
    prompt = PROMPTS[0][: UNDER_WAY * SIZE + 1]
    with server.manager._lookup(server.hashes[0][:UNDER_WAY], len(prompt), joins=True) as lease:
        server.by_hand.open()
        until(lambda: server.manager.peek(lease.hashes) == UNDER_WAY and not server.books.index.arriving)
        assert server.manager.evict(200) == 0
    assert server.manager.evict(200) == UNDER_WAY
    server.check_books()


def test_what_would_be_late_behind_others_is_not_asked_for(server: Server) -> None:
    """Nor what is behind it."""
    first = server.manager.prefetch(server.hashes[0][:3], timeout_s=WAIT_S)  # two seconds a block
    second = server.manager.prefetch(server.hashes[1], timeout_s=8.5)
    assert (second.done, server.asked) == (False, [*ahead(0, 0, 3), *ahead(1, 0, 1)])
    assert not second.waits
    server.by_hand.open()
    assert first.wait(WAIT_S) and second.wait(WAIT_S)
    assert second.num_arrived == 1


@pytest.mark.parametrize("expected", [False, True])
def test_of_a_part_what_has_room_comes(server: Server, expected: bool) -> None:
    """When its turn comes, and nothing behind it; of what is expected, the last blocks of the part, and none before."""
    server.know(0.1, 10.0, 0.0026)  # two blocks a part
    manager, keys = server.manager, server.hashes[0]
    prefetch = manager.expect(keys) if expected else manager.prefetch(keys, timeout_s=WAIT_S)
    asked = ahead(0, 0, 2 * UNDER_WAY)
    if expected:
        parts = (ahead(0, stop - 2, stop) for stop in range(BLOCKS, BLOCKS - 2 * UNDER_WAY, -2))
        asked = [block for part in parts for block in part]
    assert server.asked == asked
    mine = server.pool.allocate(200 - 2 * UNDER_WAY - 3)
    server.by_hand.open()
    room = 2 * UNDER_WAY + 3
    until(lambda: prefetch.num_arrived == room)
    assert prefetch.wait(0.0 if expected else WAIT_S) is not expected  # what is expected waits for room
    states = manager.states(keys)
    there = states[BLOCKS - room :] if expected else states[:room]
    assert there == [BlockState.PRESENT] * room
    assert states.count(BlockState.PRESENT) == room
    server.pool.free(mine)
    server.check_books()
