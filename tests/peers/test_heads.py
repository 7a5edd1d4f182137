"""Sides with different tensor-parallel sizes: each sender has some of the heads, or sends some of those that it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.peers import Listener, Receiver
from paddle_kv.peers.messages import encode
from tests.memory.test_heads import with_heads_moved
from tests.peers.conftest import until
from tests.peers.prefill import Cut, Prefill, attach, bits
from tests.peers.test_messages import BEGIN_ID, FakePeer
from tests.schedule.rig import SHORT_S, WAIT_S, Bits, Rig, assert_same, cache_memory, make_spec

LAYERS = range(5)
LOW, HIGH = 11, 12  # what is in the caches of the two senders


class Side:
    """A receiver with all or some of the heads."""

    def __init__(self, direct: bool, heads: int) -> None:
        self.direct = direct
        self.spec = make_spec(num_kv_heads=heads, extra={"scale": ((heads, 3), "float32")})
        self.rig = Rig(self.spec, shared_cache=True) if direct else Rig(self.spec, shared=True)
        self.exported = self.rig.cache.export() if direct else self.rig.pool.export()
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool)
        self.receiver = Receiver(self.scheduler, direct=direct)
        self.listener = Listener(self.receiver)

    def sent(
        self, num_heads: int, seed: int, source: list[int], target: list[int], own: int, at: int, count: int
    ) -> Any:
        spec = self.spec.with_heads(num_heads)
        return with_heads_moved(spec, bits(spec, seed), self.spec, self.rig.device, (source, target), (own, at), count)

    def check(self, expected: Bits) -> None:
        self.rig.device = expected
        assert_same(cache_memory(self.rig.cache), expected)

    def close(self) -> None:
        self.receiver.close(WAIT_S)
        self.listener.close(WAIT_S)
        self.scheduler.close(WAIT_S)
        assert self.rig.pool.num_free_blocks == self.rig.pool.num_blocks
        self.rig.pool.close()


class TwoRanks:
    """A receiver with three heads, and senders of ranks with two of them and one."""

    def __init__(self, direct: bool) -> None:
        self.side = Side(direct, 3)
        self.low = Prefill(self.side.exported, self.side.listener.path, cut=Cut(2, theirs=(0, 2), seed=LOW))
        self.high = Prefill(self.side.exported, self.side.listener.path, cut=Cut(1, theirs=(2, 1), seed=HIGH))

    def expected(self, source: list[int], target: list[int], other: list[int] | None = None) -> Bits:
        self.side.rig.device = self.side.sent(2, LOW, source, target, 0, 0, 2)
        return self.side.sent(1, HIGH, other or source, target, 0, 2, 1)  # type: ignore[no-any-return]

    def forget(self, blocks: list[int]) -> None:
        """They are poisoned; all others are as they were, and nothing is held any more."""
        side = self.side
        until(lambda: side.receiver.stats()["open"] == 0 and side.rig.pool.num_free_blocks == side.rig.pool.num_blocks)
        assert side.rig.cache.domain.poisoned(blocks) == blocks
        now = cache_memory(side.rig.cache)
        for name, array in side.rig.device.items():
            array[:, blocks] = now[name][:, blocks]
        side.check(side.rig.device)
        side.rig.cache.mark_rewritten(blocks)

    def close(self) -> None:
        self.low.end()
        self.high.end()
        self.side.close()


@pytest.fixture(scope="module", params=["through_the_pool", "direct"])
def ranks(request: pytest.FixtureRequest) -> Iterator[TwoRanks]:
    with contextlib.closing(TwoRanks(request.param == "direct")) as made:
        yield made


def test_a_layer_is_there_when_all_ranks_have_told_it(ranks: TwoRanks) -> None:
    side = ranks.side
    load, [low, high] = side.receiver.grant_heads([7, 2], [2, 1], timeout_s=WAIT_S)
    assert [(one.first_head, one.num_heads) for one in (low, high)] == [(0, 2), (2, 1)]
    ranks.low.ask("send", "a", low.to_json(), [4, 8])
    ranks.low.ask("mark", "a", LAYERS)
    assert ranks.low.ask("wait", "a") == "done"
    until(lambda: side.receiver._granted[low.grant_id].over)
    with pytest.raises(TimeoutError):
        load.wait_layer(0, timeout_s=SHORT_S)
    ranks.high.ask("send", "a", high.to_json(), [0, 3])  # blocks of its own
    ranks.high.ask("mark", "a", [0, 1])
    load.wait_layer(1, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        load.wait_layer(2, timeout_s=SHORT_S)
    assert side.receiver.stats()["open"] == 2
    ranks.high.ask("mark", "a", [2, 3, 4])
    load.wait(WAIT_S)
    until(lambda: side.receiver.stats()["open"] == 0)
    side.check(ranks.expected([4, 8], [7, 2], [0, 3]))


def test_ranks_in_turn_layer_by_layer(ranks: TwoRanks) -> None:
    side = ranks.side
    load, [low, high] = side.receiver.grant_heads([12, 0, 5], [2, 1], timeout_s=WAIT_S)
    ranks.high.ask("send", "b", high.to_json(), [1, 6, 2])
    ranks.low.ask("send", "b", low.to_json(), [1, 6, 2])
    for layer in LAYERS:
        (ranks.low if layer % 2 else ranks.high).ask("mark", "b", [layer])
        (ranks.high if layer % 2 else ranks.low).ask("mark", "b", [layer])
        load.wait_layer(layer, timeout_s=WAIT_S)
    load.wait(WAIT_S)
    side.check(ranks.expected([1, 6, 2], [12, 0, 5]))


@pytest.mark.parametrize("begun", [True, False])
def test_if_one_rank_fails_the_other_one_stops(ranks: TwoRanks, begun: bool) -> None:
    side, before = ranks.side, ranks.side.receiver.stats()
    load, [low, high] = side.receiver.grant_heads([3, 9], [2, 1], timeout_s=WAIT_S)
    ranks.low.ask("send", "c", low.to_json(), [5, 7])
    ranks.low.ask("mark", "c", [0, 1])
    if begun:
        ranks.high.ask("send", "c", high.to_json(), [5, 7])
        ranks.high.ask("mark", "c", [0])
        load.wait_layer(0, timeout_s=WAIT_S)
        ranks.high.ask("cancel", "c")
    else:
        load.cancel()
    assert ranks.low.ask("wait", "c") == "cancelled"
    with pytest.raises(TransferError if begun else CancelledError):
        load.wait(WAIT_S)
    until(lambda: load.done())
    until(lambda: side.receiver.stats()["open"] == 0)
    assert side.receiver.stats()["failed"] == before["failed"] + 2
    assert ranks.high.refused("send", "d", high.to_json(), [5, 7])[0] == "PeerError"
    ranks.forget([3, 9])


def test_other_heads_than_granted_are_refused(ranks: TwoRanks) -> None:
    side = ranks.side
    load, [_, high] = side.receiver.grant_heads([3], [2, 1], timeout_s=WAIT_S)
    kind, text = ranks.low.refused("send", "e", high.to_json(), [4])
    assert kind == "ValueError"
    assert "the grant is of heads 2 to 2; this sender writes heads 0 to 1" in text
    whole, grant = side.receiver.grant([5], timeout_s=WAIT_S)
    assert (grant.first_head, grant.num_heads) == (0, 3)
    assert ranks.high.refused("send", "e", grant.to_json(), [4])[0] == "ValueError"
    for one in (load, whole):
        one.cancel()
        one.wait_over(WAIT_S)
    side.rig.cache.mark_rewritten([3, 5])
    for wrong in ([], [2], [2, 2], [3, 0], [4, -1], [1.5, 1.5], "ab", None):
        with pytest.raises((ValueError, TypeError), match="num_heads"):
            side.receiver.grant_heads([3], wrong)


def test_a_rank_that_dies_is_not_waited_for(ranks: TwoRanks) -> None:
    side = ranks.side
    other = Prefill(side.exported, side.listener.path, cut=Cut(1, theirs=(2, 1), seed=HIGH))
    load, [low, high] = side.receiver.grant_heads([3, 9], [2, 1], timeout_s=WAIT_S)
    ranks.low.ask("send", "f", low.to_json(), [5, 7])
    other.ask("send", "f", high.to_json(), [5, 7])
    ranks.low.ask("mark", "f", [0, 1])
    other.ask("hold", 2)
    other.ask("mark", "f", LAYERS)
    other.ask("held")
    load.wait_layer(1, timeout_s=WAIT_S)
    other.kill()
    with pytest.raises(TransferError, match="the sender is gone"):
        load.wait(WAIT_S)
    assert ranks.low.ask("wait", "f") == "cancelled"
    ranks.forget([3, 9])


@pytest.mark.parametrize("direct", [False, True])
def test_a_sender_with_all_heads_and_receivers_with_some(direct: bool) -> None:
    with contextlib.ExitStack() as stack:
        for own, seed in ((0, LOW), (1, HIGH)):
            side = stack.enter_context(contextlib.closing(Side(direct, 2)))
            sender = Prefill(side.exported, side.listener.path, cut=Cut(3, own=(own, 2), seed=seed))
            stack.callback(sender.end)
            load, grant = side.receiver.grant([7, 2, 0], timeout_s=WAIT_S)
            sender.ask("send", "a", grant.to_json(), [8, 1, 4])
            sender.ask("mark", "a", LAYERS)
            load.wait(WAIT_S)
            side.check(side.sent(3, seed, [8, 1, 4], [7, 2, 0], own, 0, 2))
            sender.ask("close")


def test_some_of_the_heads_of_both() -> None:
    with contextlib.closing(Side(False, 3)) as side:
        first = Prefill(side.exported, side.listener.path, cut=Cut(4, own=(2, 2), theirs=(0, 2), seed=LOW))
        second = Prefill(side.exported, side.listener.path, cut=Cut(4, own=(0, 1), theirs=(2, 1), seed=HIGH))
        load, grants = side.receiver.grant_heads([7, 2], [2, 1], timeout_s=WAIT_S)
        for sender, grant in zip((first, second), grants, strict=True):
            sender.ask("send", "a", grant.to_json(), [8, 1])
            sender.ask("mark", "a", LAYERS)
        load.wait(WAIT_S)
        side.rig.device = side.sent(4, LOW, [8, 1], [7, 2], 2, 0, 2)
        side.check(side.sent(4, HIGH, [8, 1], [7, 2], 0, 2, 1))
        first.end()
        second.end()


def test_another_spec_is_refused_by_name() -> None:
    with contextlib.closing(Side(False, 2)) as side:
        for changes in ({"num_kv_heads": 3}, {"block_size": 14}, {"layout": "NHD"}, {"dtype": "bfloat16"}):
            other = make_spec(num_kv_heads=2, extra={"scale": ((2, 3), "float32")})
            wrong = make_spec(**{"num_kv_heads": 2, "extra": {"scale": ((2, 3), "float32")}, **changes})
            [name] = changes
            with pytest.raises(Exception, match=rf"the description has the spec {name} = .*; {name} = .* is expected"):
                type(side.rig.pool).attach(wrong, side.exported)
            assert attach(other, side.exported).num_blocks == 17


@pytest.mark.parametrize("direct", [False, True])
def test_a_sender_that_is_through_may_go_before_the_others(direct: bool) -> None:
    with contextlib.closing(Side(direct, 3)) as side:
        load, grants = side.receiver.grant_heads([4, 1], [2, 1], timeout_s=WAIT_S)
        peers = FakePeer(), FakePeer()
        for peer, grant in zip(peers, grants, strict=True):
            assert side.receiver.received(peer, encode("begin", grant.grant_id, BEGIN_ID, digest=grant.digest))
            until(lambda peer=peer: peer.kinds == ["accepted"])  # type: ignore[misc]
        for peer, grant in zip(peers, grants, strict=True):
            assert side.receiver.holds(peer)
            assert side.receiver.received(peer, encode("layers", grant.grant_id, BEGIN_ID, first=0, end=len(LAYERS)))
            assert side.receiver.received(peer, encode("done", grant.grant_id, BEGIN_ID))
            assert not side.receiver.holds(peer)
            side.receiver.lost(peer)
            side.receiver.gone(peer)
        load.wait(WAIT_S)
