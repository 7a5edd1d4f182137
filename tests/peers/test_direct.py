"""Straight into the device cache of the other process: what differs from the way through a host pool."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, LeasedError, TransferError
from paddle_kv.peers import Receiver
from paddle_kv.peers.granted import GrantedLoad
from paddle_kv.peers.messages import encode
from tests.peers.conftest import Decode, until
from tests.peers.kills import RECEIVER_POINTS, SENDER_POINTS, kill_a_receiver, kill_a_sender
from tests.peers.prefill import Prefill, bits
from tests.peers.test_messages import BEGIN_ID, FakePeer, settle
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig, assert_same, cache_memory, make_spec, moved, pool_memory

LAYERS = range(5)


@pytest.fixture(scope="module")
def decode() -> Iterator[Decode]:
    with contextlib.closing(Decode(direct=True)) as made:
        yield made


def test_a_sender_is_let_in_when_nobody_uses_the_blocks_any_more(
    decode: Decode, prefill: Prefill, copies: Copies
) -> None:
    rig = decode.rig
    copies.hold("offload", 2)
    save = decode.scheduler.offload([3, 8], [0, 1])  # it reads block 3
    assert copies.arrived.acquire(timeout=WAIT_S)
    load, grant = decode.receiver.grant([3, 9], timeout_s=WAIT_S)
    prefill.tell("send", "a", grant.to_json(), [4, 2])
    time.sleep(SHORT_S)
    assert prefill._pipe.poll(0) is False
    assert_same(cache_memory(rig.cache), rig.device)
    copies.go_on()
    assert prefill.answer() == ("ok", None)
    prefill.ask("mark", "a", LAYERS)
    load.wait(WAIT_S)
    save.wait(WAIT_S)
    rig.host = moved(rig.device, rig.host, [3, 8], [0, 1])
    rig.device = moved(bits(), rig.device, [4, 2], [3, 9])
    rig.check()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_sender_hears_while_the_blocks_are_in_use(decode: Decode, copies: Copies, is_cancelled: bool) -> None:
    copies.hold("offload", 2)
    save = decode.scheduler.offload([3, 8], [0, 1])
    assert copies.arrived.acquire(timeout=WAIT_S)
    load, grant = decode.receiver.grant([3], timeout_s=WAIT_S)
    wait = decode.receiver._granted[grant.grant_id].load.wait
    assert wait is not None
    peer = FakePeer()
    assert decode.receiver.received(peer, encode("begin", grant.grant_id, BEGIN_ID, digest=grant.digest))
    assert peer.kinds == []  # what could be said at once has been said
    if is_cancelled:
        load.cancel()
        until(lambda: peer.kinds)
    copies.go_on()
    save.wait(WAIT_S)
    until(lambda: wait.over)
    if is_cancelled:
        settle()
        assert set(peer.kinds) == {"revoke"}
    else:
        until(lambda: peer.kinds == ["accepted"])
    decode.receiver.gone(peer)
    load.wait_over(WAIT_S)
    decode.forget([3])
    decode.rig.host = pool_memory(decode.pool)


def test_a_sender_that_asks_as_the_blocks_get_free_is_answered_once(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, answered, peer = decode.receiver._answer, threading.Event(), FakePeer()

    def asked_before(load: GrantedLoad) -> None:
        [part] = load.parts
        decode.receiver.received(peer, encode("begin", part.grant.grant_id, BEGIN_ID, digest=part.grant.digest))
        answer(load)
        answered.set()

    monkeypatch.setattr(decode.receiver, "_answer", asked_before)
    decode.receiver.grant([3], timeout_s=WAIT_S)
    assert answered.wait(WAIT_S)
    assert peer.kinds == ["accepted"]
    decode.receiver.gone(peer)
    until(lambda: decode.num_held == 0)
    decode.forget([3])


def test_a_save_behind_the_grant_saves_what_was_sent(decode: Decode, prefill: Prefill) -> None:
    rig = decode.rig
    load, grant = decode.receiver.grant([3, 9], timeout_s=WAIT_S)
    save = decode.scheduler.offload([9], [5])
    prefill.ask("send", "a", grant.to_json(), [1, 6])
    prefill.ask("mark", "a", LAYERS)
    save.wait(WAIT_S)
    load.wait(WAIT_S)
    rig.device = moved(bits(), rig.device, [1, 6], [3, 9])
    rig.host = moved(rig.device, rig.host, [9], [5])
    rig.check()


def test_a_block_that_is_granted_is_not_granted_again(decode: Decode, prefill: Prefill) -> None:
    load, grant = decode.receiver.grant([3, 5], timeout_s=WAIT_S)
    with pytest.raises(LeasedError, match="block 5 of the device cache is granted already") as caught:
        decode.receiver.grant([7, 5], timeout_s=WAIT_S)
    assert caught.value.block_ids == [5]
    decode.receiver.revoke(grant)
    load.wait_over(WAIT_S)
    until(lambda: decode.num_held == 0)
    load, grant = decode.receiver.grant([7, 5], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [0, 8])
    prefill.ask("mark", "a", LAYERS)
    load.wait(WAIT_S)
    decode.rig.device = moved(bits(), decode.rig.device, [0, 8], [7, 5])
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)
    with pytest.raises(TransferError):  # of the grant that was revoked
        decode.scheduler.offload([3], [0])
    decode.rig.cache.mark_rewritten([3])


def test_what_used_the_blocks_before_fails(decode: Decode, prefill: Prefill, copies: Copies) -> None:
    copies.fail("onload", 1, OSError("lost"))  # the wait for the blocks is a load of nothing
    load, grant = decode.receiver.grant([3, 5], timeout_s=WAIT_S)
    with pytest.raises(TransferError, match="what used the blocks before failed"):
        load.wait(WAIT_S)
    assert prefill.refused("send", "a", grant.to_json(), [4, 2])[0] == "PeerError"
    until(lambda: decode.num_held == 0)
    copies.heal()
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)
    decode.forget([3, 5])


def test_the_host_pool_is_left_alone(decode: Decode, prefill: Prefill) -> None:
    with pytest.raises(ValueError, match="straight into its device cache"):
        decode.receiver.grant([1], host_block_ids=[0])
    before = pool_memory(decode.pool)
    load, grant = decode.receiver.grant([1], timeout_s=WAIT_S)
    assert decode.pool.num_free_blocks == decode.pool.num_blocks
    assert grant.pool_id == decode.rig.cache.memory_id == decode.exported.memory_id
    prefill.ask("send", "a", grant.to_json(), [3])
    prefill.ask("mark", "a", LAYERS)
    load.wait(WAIT_S)
    decode.rig.device = moved(bits(), decode.rig.device, [3], [1])
    assert_same(pool_memory(decode.pool), before)


def test_a_cache_that_cannot_be_shared() -> None:
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, pytest.raises(ValueError, match="shared=True"):
        Receiver(scheduler, direct=True)
    rig.pool.close()


def test_a_checksum_looks_at_host_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    spec = make_spec()
    cache = DeviceCache(spec, 4, "cpu", shared=True)
    with (
        HostPool(spec, 2) as pool,
        LayerwiseScheduler(cache, pool) as scheduler,
        Receiver(scheduler, direct=True) as receiver,
    ):
        load, _ = receiver.grant([1], timeout_s=0.01)
        load.wait_over(WAIT_S)
        assert receiver.stats()["failed"] == 1


@pytest.mark.parametrize("at", range(1, SENDER_POINTS + 1, 5))
def test_a_sender_is_killed(at: int) -> None:
    assert kill_a_sender(at, direct=True) in ("cancelled", "failed", "done")


@pytest.mark.parametrize("at", [*range(0, RECEIVER_POINTS, 4), RECEIVER_POINTS + 20])
def test_a_receiver_is_killed(at: int) -> None:
    assert kill_a_receiver(at, direct=True) in ("refused", "cancelled", "done")
