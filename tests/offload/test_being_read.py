"""What counts as being read from the tier, who holds it, and what comes before it."""

from __future__ import annotations

from paddle_kv.offload import BlockState
from paddle_kv.offload.prefetch import Prefetch
from paddle_kv.tracking.group import change
from tests.offload.chunk_rig import WAIT_S
from tests.offload.urgency_rig import TABLE, Server, ahead

PRESENT, ARRIVING, TIER = BlockState.PRESENT, BlockState.ARRIVING, BlockState.TIER


def is_read(server: Server, keys: list[bytes]) -> bool:
    return bool(change(server.books, lambda: server.books.is_read(keys)))


def read_soon(server: Server, keys: list[bytes]) -> Prefetch:
    found: Prefetch = change(server.books, lambda: server.books.read_soon(keys))
    return found


def test_what_is_read_is_what_the_tier_brings_beside_what_is_there(server: Server) -> None:
    keys = server.hashes[0]
    first = server.manager.expect(keys[:2])
    server.serve(2)
    assert first.done
    server.manager.expect(keys[:4])
    assert server.manager.states(keys[:5]) == [PRESENT] * 2 + [ARRIVING] * 2 + [TIER]
    assert is_read(server, keys[2:4])
    assert is_read(server, keys[:4])  # with what is there
    assert not is_read(server, keys[:2])  # of which nothing is on its way
    assert not is_read(server, keys[2:5])  # the last one lies in the tier, and nobody has asked for it
    assert not is_read(server, keys[4:6])


def test_what_a_save_brings_is_not_read(server: Server) -> None:
    keys = server.hashes[0]
    server.manager.expect(keys[:2])
    save = server.manager.save(keys[2:4], TABLE[:2], layerwise=True)  # it waits for the model
    assert server.manager.states(keys[:4]) == [ARRIVING] * 4
    assert is_read(server, keys[:2])
    assert not is_read(server, keys[2:4])
    assert not is_read(server, keys[:4])  # some of it is
    save.cancel()
    server.by_hand.open()
    server.check_books()


def test_a_lookup_holds_what_arrives_and_what_lies_in_the_tier(server: Server) -> None:
    keys = server.hashes[0]
    first = server.manager.expect(keys[:1])
    server.serve(1)
    assert first.done
    with server.manager.lookup(keys[:3]) as found:
        load = server.manager.onload(found.hashes, TABLE[:3])
    lease = server.manager.lookup(keys[:4])
    assert lease.states == [PRESENT, ARRIVING, ARRIVING, TIER]
    server.by_hand.open()
    load.wait(WAIT_S)
    assert server.manager.peek(keys[:3]) == 3
    assert server.books.index.pins == dict.fromkeys(keys[:4], 1)
    assert server.manager.evict(200) == 0
    lease.release()
    assert server.manager.evict(200) == 3
    server.check_books()


def test_who_waits_for_the_tier_counts_what_was_asked_for_before(server: Server) -> None:
    """And nothing that was asked for later."""
    server.manager.prefetch(server.hashes[0][:4], timeout_s=WAIT_S)
    own = read_soon(server, server.hashes[1][:3])
    assert own.blocks_until == 7
    joined = read_soon(server, server.hashes[0][:2])
    assert (joined.num_blocks, joined.blocks_until) == (2, 2)
    assert server.asked == ahead(0, 0, 4) + ahead(1, 0, 3)
    server.by_hand.open()
    assert own.wait(WAIT_S) and joined.wait(WAIT_S)
    server.check_books()
