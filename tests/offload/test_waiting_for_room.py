"""What is expected while host memory has no room for it: it waits, and takes the place of nothing due sooner."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.offload import POLICIES, reading
from tests.offload.chunk_rig import WAIT_S, contents, until
from tests.offload.urgency_rig import BLOCKS, CHUNK, PROMPTS, TABLE, Server, from_back

HALF = BLOCKS // 2


@pytest.fixture(autouse=True)
def nobody_looks_by_himself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told."""
    monkeypatch.setattr(reading, "LOOK_AGAIN_S", 10 * WAIT_S)


def in_host(server: Server) -> list[int]:
    """Blocks of each prompt."""
    slots = server.books.index.slots
    return [sum(key in slots for key in keys) for keys in server.hashes]


def expect_all(server: Server) -> tuple[list[Any], list[int]]:
    """There is room for two and a half prompts. Returns the prefetches, and the blocks that take the other room."""
    mine = server.pool.allocate(200 - 2 * BLOCKS - HALF)
    prefetches = [server.manager.expect(keys) for keys in server.hashes]
    server.by_hand.open()
    until(lambda: in_host(server) == [BLOCKS, BLOCKS, HALF, 0] and not server.books.index.arriving)
    return prefetches, mine


def serve(server: Server, number: int) -> None:
    with server.manager.request(PROMPTS[number], TABLE, chunk_tokens=CHUNK) as request:
        server.finish(request, PROMPTS[number])


@pytest.mark.parametrize("policy", POLICIES)
def test_each_prompt_is_there_when_its_turn_comes_and_each_block_is_read_once(tmp_path: Path, policy: str) -> None:
    server = Server(tmp_path, policy=policy)
    prefetches, mine = expect_all(server)
    assert [prefetch.done for prefetch in prefetches] == [True, True, False, False]
    for number, left in enumerate(([BLOCKS, BLOCKS, HALF, 0], [BLOCKS, BLOCKS, HALF], [BLOCKS, BLOCKS], [BLOCKS])):
        until(lambda number=number, left=left: in_host(server)[number:] == left)  # type: ignore[misc]
        until(lambda: not server.books.index.arriving)
        serve(server, number)
    assert all(prefetch.wait(WAIT_S) for prefetch in prefetches)
    assert [prefetch.num_arrived for prefetch in prefetches] == [BLOCKS] * 4
    assert server.asked == [block for number in range(4) for block in from_back(number, BLOCKS)]
    server.pool.free(mine)
    server.check_books()
    server.close()


@pytest.mark.parametrize("how", ["lease", "evict", "drop", "save", "expect"])
def test_it_goes_on_when_there_is_room(server: Server, how: str) -> None:
    prefetches, mine = expect_all(server)
    with server.manager.lookup(server.hashes[0]) as lease:  # its blocks are held, and it is not expected any more
        assert prefetches[2].wait(0.0) is False
        if how == "drop":
            server.manager.drop(server.hashes[1][HALF:])
    if how == "expect":
        server.pool.free(mine[:HALF])  # of which nobody tells the manager
    acts: dict[str, Callable[[], object]] = {
        "evict": lambda: server.manager.evict(1),
        "save": lambda: server.manager.save([b"another one"], [0]).wait(WAIT_S),
        "expect": lambda: server.manager.expect(server.hashes[1]),
    }
    acts.get(how, lambda: None)()
    until(lambda: prefetches[2].done)
    assert prefetches[2].num_arrived == BLOCKS
    server.pool.free(mine if how != "expect" else mine[HALF:])
    assert lease.num_blocks == BLOCKS
    server.check_books()


def test_a_save_that_held_its_blocks_leaves_room_behind(server: Server) -> None:
    """Without a lease that ends."""
    mine = server.pool.allocate(200 - BLOCKS)
    save = server.manager.save([b"%032d" % number for number in range(BLOCKS)], TABLE[:BLOCKS], layerwise=True)
    prefetch = server.manager.expect(server.hashes[0])
    server.by_hand.open()
    server.settle()
    assert in_host(server)[0] == 0
    assert not prefetch.wait(0.0)
    for layer in range(server.spec.num_layers):
        save.mark_layer_written(layer)
    assert prefetch.wait(WAIT_S)
    assert in_host(server)[0] == BLOCKS
    server.pool.free(mine)
    server.check_books()


def test_what_a_prefetch_asks_for_does_not_wait_behind_it(server: Server) -> None:
    """It makes room as a save does: by what is due last."""
    prefetches, mine = expect_all(server)
    other = server.manager.prefetch(server.hashes[3][:HALF], timeout_s=WAIT_S)
    assert other.wait(WAIT_S)
    assert other.num_arrived == HALF
    assert in_host(server)[:2] == [BLOCKS, BLOCKS]
    for prefetch in prefetches:
        prefetch.cancel()
    server.pool.free(mine)
    server.check_books()


@pytest.mark.parametrize("how", ["cancel", "lookup", "lapse", "close"])
def test_it_ends_without_room_too(server: Server, how: str) -> None:
    prefetches, mine = expect_all(server)
    if how == "cancel":
        prefetches[2].cancel()
        prefetches[3].cancel()
    elif how == "lookup":  # they are not expected any more
        for keys in server.hashes[:1:-1]:
            with server.manager.lookup(keys):
                pass
    elif how == "lapse":
        server.books.index._admitted_blocks += 10_000
        server.books.index.expected.lapse(server.books.index._admitted_blocks)
        server.manager.evict(0)
    else:
        server.manager.close()
    for prefetch in prefetches:
        assert prefetch.wait(WAIT_S)
    if how != "close":
        server.pool.free(mine)
        server.check_books()


def test_of_a_prompt_that_has_come_no_block_goes_for_another_one(server: Server) -> None:
    prefetches, mine = expect_all(server)
    prefetches[3].cancel()
    leases = [server.manager.lookup(keys) for keys in server.hashes[:2]]  # all but what there is of the third
    server.manager.lookup(server.hashes[2]).release()
    assert prefetches[2].wait(WAIT_S)
    assert (prefetches[2].num_arrived, in_host(server)[2]) == (HALF, HALF)
    for lease in leases:
        lease.release()
    server.pool.free(mine)
    server.check_books()


def test_who_waits_for_it_hears_that_it_is_there(server: Server) -> None:
    prefetches, mine = expect_all(server)
    heard = threading.Event()
    threading.Thread(target=lambda: prefetches[3].wait(WAIT_S) and heard.set(), daemon=True).start()
    for number in range(2):
        serve(server, number)
    assert heard.wait(WAIT_S)
    server.pool.free(mine)
    server.check_books()


def test_blocks_that_prompts_share_count_for_the_sooner_one(tmp_path: Path) -> None:
    """The later one may go for them, if it has anything else."""
    server = Server(tmp_path)
    mine = server.pool.allocate(200 - BLOCKS)
    server.manager.expect(server.hashes[1][:HALF])
    server.by_hand.open()
    until(lambda: in_host(server)[1] == HALF and not server.books.index.arriving)
    near = server.manager.expect(server.hashes[0][:HALF], in_seconds=1.0)
    far = server.manager.expect(server.hashes[0], in_seconds=2.0)
    assert near.wait(WAIT_S)
    server.settle()
    assert in_host(server)[:2] == [HALF, HALF]
    assert not far.wait(0.0)
    asked = Counter(server.asked)
    assert set(asked.values()) == {1}
    far.cancel()
    server.pool.free(mine)
    server.check_books()
    server.close()


def test_bytes_are_right_whatever_had_room(server: Server) -> None:
    prefetches, mine = expect_all(server)
    for number in (3, 0, 2, 1):  # not in order
        serve(server, number)
        server.check(TABLE, contents(PROMPTS[number]))
    for prefetch in prefetches:
        prefetch.cancel()
    server.pool.free(mine)
    server.check_books()


def save_one(server: Server, name: bytes) -> None:
    server.manager.save([name], [0]).wait(WAIT_S)
    server.manager.flush(WAIT_S)


def test_rooms_that_are_smaller_than_a_part_are_used(server: Server) -> None:
    server.know(0.1, 10.0, 0.001)  # five blocks a part
    mine = server.pool.allocate(200 - BLOCKS - 7)
    first, second = server.manager.expect(server.hashes[0]), server.manager.expect(server.hashes[1])
    server.by_hand.open()
    assert first.wait(WAIT_S)
    until(lambda: in_host(server)[:2] == [BLOCKS, 7])
    assert not second.wait(0.0)
    server.pool.free(mine)
    server.manager.evict(0)
    assert second.wait(WAIT_S)
    assert in_host(server)[:2] == [BLOCKS, BLOCKS]
    assert sorted(server.asked) == sorted(from_back(0, BLOCKS) + from_back(1, BLOCKS))  # each once
    assert second.num_arrived == second.num_blocks == BLOCKS
    server.check_books()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_save_has_taken_from_is_read_again_and_goes_to_nobody_due_later(tmp_path: Path, policy: str) -> None:
    """The last prompt that is there as a whole: what is due behind it has no block to give."""
    server = Server(tmp_path, policy=policy)
    mine = server.pool.allocate(200 - 2 * BLOCKS)
    prefetches = [server.manager.expect(keys) for keys in server.hashes[:3]]
    server.by_hand.open()
    until(lambda: in_host(server)[:3] == [BLOCKS, BLOCKS, 0] and not server.books.index.arriving)
    save_one(server, b"one")
    until(lambda: in_host(server)[:3] == [BLOCKS, BLOCKS, 0] and not server.books.index.arriving)
    assert prefetches[1].wait(WAIT_S) and prefetches[1].num_arrived == prefetches[1].num_blocks == BLOCKS + 1
    assert not prefetches[2].wait(0.0)
    asked = Counter(prompt for prompt, _ in server.asked)
    assert (asked[0], asked[1], asked[2]) == (BLOCKS, BLOCKS + 1, 0)
    for number in range(3):
        until(lambda number=number: in_host(server)[number] == BLOCKS)  # type: ignore[misc]
        serve(server, number)
    server.pool.free(mine)
    server.check_books()
    server.close()


def test_a_prompt_is_expected_as_a_whole_whoever_has_the_pool_now(server: Server) -> None:
    mine = server.pool.allocate(200 - 4)
    prefetch = server.manager.expect(server.hashes[0])
    assert prefetch.num_blocks == BLOCKS
    server.by_hand.open()
    until(lambda: in_host(server)[0] == 4)
    server.pool.free(mine)
    server.manager.evict(0)
    assert prefetch.wait(WAIT_S)
    assert server.asked == from_back(0, BLOCKS)
    server.check_books()


def test_what_was_cancelled_is_not_read_again(server: Server) -> None:
    mine = server.pool.allocate(200 - 2 * BLOCKS)
    prefetches = [server.manager.expect(keys) for keys in server.hashes[:3]]
    server.by_hand.open()
    until(lambda: in_host(server)[:3] == [BLOCKS, BLOCKS, 0] and not server.books.index.arriving)
    prefetches[1].cancel()
    save_one(server, b"one")
    until(lambda: in_host(server)[:3] == [BLOCKS, BLOCKS - 1, 1])  # in the place of what was saved
    assert (prefetches[1].num_blocks, prefetches[1].num_arrived, prefetches[1].done) == (BLOCKS, BLOCKS, True)
    prefetches[2].cancel()
    server.pool.free(mine)
    server.check_books()


def test_who_waits_looks_again_by_itself(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells that another owner of the pool has given back its blocks. Again and again, and once at a time."""
    monkeypatch.setattr(reading, "LOOK_AGAIN_S", 0.02)
    look, looks = server.books.look_for_room, []
    monkeypatch.setattr(server.books, "look_for_room", lambda: (looks.append(None), look()))
    prefetches, mine = expect_all(server)
    until(lambda: len(looks) > 3)
    for _ in range(50):
        server.manager.evict(0)  # each time it tries, in vain
        server.settle()
    before = len(looks)
    threading.Event().wait(0.2)
    assert len(looks) < before + 20
    server.pool.free(mine)
    assert prefetches[3].wait(WAIT_S)
    assert in_host(server) == [BLOCKS] * 4
    server.check_books()


def test_what_is_due_sooner_comes_first_though_its_thread_is_late(server: Server, monkeypatch: Any) -> None:
    """What is held and what is read is in one order."""
    read, slow = server.books.prefetch_expected, threading.Event()

    def late(keys: list[bytes], *what: Any) -> Any:
        if keys[0] == server.hashes[0][0]:
            slow.wait(WAIT_S)
        return read(keys, *what)

    monkeypatch.setattr(server.books, "prefetch_expected", late)
    thread = threading.Thread(target=server.manager.expect, args=(server.hashes[0],))
    thread.start()
    until(lambda: server.books.index.expected.blocks)
    server.manager.expect(server.hashes[1])
    slow.set()
    thread.join(WAIT_S)
    order = [prefetch.prefix[0] for *_, prefetch in sorted(server.books.queue._turns)]
    assert order == [server.hashes[0][0], server.hashes[1][0]]
    server.by_hand.open()


def test_a_save_asks_the_policy_once_however_many_wait(server: Server, monkeypatch: Any) -> None:
    """Those that hold no block have none to give."""
    _, mine = expect_all(server)
    for number in range(50):
        server.manager.expect([*server.hashes[3][:2], b"%032d" % number])
    server.settle()
    index, calls = server.books.index, []
    victim = index._policy.victim
    monkeypatch.setattr(index._policy, "victim", lambda *what: (calls.append(what), victim(*what))[1])
    index.take_out(1)
    assert len(calls) == 2  # nothing else may go, and then the farthest of what is there
    server.pool.free(mine)
