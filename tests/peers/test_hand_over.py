"""Two processes: every byte, the order of the layers, and how it ends when one of the sides does not go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from paddle_kv import CancelledError, TransferError
from paddle_kv.peers import Grant
from tests.peers.conftest import Decode, until
from tests.peers.prefill import Prefill, bits
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, assert_same, cache_memory, moved, pool_memory

LAYERS = range(5)


@pytest.fixture(scope="module", params=["through_the_pool", "direct"])
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    with contextlib.closing(Decode(request.param == "direct")) as made:
        yield made


@pytest.fixture
def through_the_pool(decode: Decode) -> None:
    if decode.direct:
        pytest.skip("there are host blocks on the other way only")


def is_free(decode: Decode) -> bool:
    return decode.num_held == 0


def test_every_byte_with_permuted_ids(decode: Decode, prefill: Prefill) -> None:
    rig, source, target = decode.rig, [8, 0, 5, 3], [2, 12, 0, 7]
    host = None if decode.direct else [16, 3, 9, 0]
    transfer, grant = decode.receiver.grant(target, host_block_ids=host, timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), source)
    prefill.ask("mark", "a", LAYERS)
    transfer.wait(WAIT_S)
    assert prefill.ask("wait", "a") == "done"
    rig.host = moved(bits(), rig.host, source, host) if host else rig.host
    rig.device = moved(bits(), rig.device, source, target)
    rig.check()  # also what must not be touched
    assert transfer.bytes == 4 * rig.spec.num_layers * rig.spec.block_bytes


def test_one_block_into_several(decode: Decode, prefill: Prefill) -> None:
    transfer, grant = decode.receiver.grant([1, 4, 6], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [7, 7, 2])
    prefill.ask("mark", "a", LAYERS)
    transfer.wait(WAIT_S)
    decode.rig.device = moved(bits(), decode.rig.device, [7, 7, 2], [1, 4, 6])
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)
    decode.rig.host = pool_memory(decode.pool)
    assert is_free(decode)


def test_a_layer_is_usable_before_the_next_one_is_sent(decode: Decode, prefill: Prefill) -> None:
    rig = decode.rig
    transfer, grant = decode.receiver.grant([9, 10], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [1, 6])
    for layer in LAYERS:
        with pytest.raises(TimeoutError, match="still being read"):
            transfer.wait_layer(layer, timeout_s=SHORT_S)
        prefill.ask("mark", "a", [layer])
        transfer.wait_layer(layer, timeout_s=WAIT_S)
        rig.device = moved(bits(), rig.device, [1, 6], [9, 10], [layer])
        assert_same(cache_memory(rig.cache), rig.device)
    transfer.wait(WAIT_S)


def test_layers_that_are_marked_in_any_order_arrive_in_order(decode: Decode, prefill: Prefill) -> None:
    transfer, grant = decode.receiver.grant([9], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [4])
    prefill.ask("mark", "a", [3, 1])
    with pytest.raises(TimeoutError):
        transfer.wait_layer(1, timeout_s=SHORT_S)
    prefill.ask("mark", "a", [0])
    transfer.wait_layer(1, timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        transfer.wait_layer(3, timeout_s=SHORT_S)
    prefill.ask("mark", "a", [4, 2])
    transfer.wait(WAIT_S)
    decode.rig.device = moved(bits(), decode.rig.device, [4], [9])
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)


def test_several_senders_and_grants_at_once(decode: Decode, prefill: Prefill, another: Prefill) -> None:
    senders, grants = [prefill, another], []
    for number in range(6):
        target = [2 * number, 2 * number + 1]
        transfer, grant = decode.receiver.grant(target, timeout_s=WAIT_S)
        source = [number, 8 - number]
        senders[number % 2].ask("send", f"s{number}", grant.to_json(), source)
        grants.append((number, transfer, source, target))
    for layer in LAYERS:
        for number, *_ in reversed(grants):
            senders[number % 2].ask("mark", f"s{number}", [layer])
        for _, transfer, source, target in grants:
            transfer.wait_layer(layer, timeout_s=WAIT_S)
            decode.rig.device = moved(bits(), decode.rig.device, source, target, [layer])
        assert_same(cache_memory(decode.rig.cache), decode.rig.device)
    for _, transfer, *_ in grants:
        transfer.wait(WAIT_S)
    assert is_free(decode)


@pytest.mark.parametrize("how", ["revoke", "cancel"])
def test_a_revoked_grant_is_not_written_any_more(decode: Decode, prefill: Prefill, how: str) -> None:
    transfer, grant = decode.receiver.grant([3, 5], timeout_s=WAIT_S)
    prefill.ask("hold", 1)
    prefill.ask("send", "a", grant.to_json(), [4, 2])
    prefill.ask("mark", "a", LAYERS)
    transfer.wait_layer(0, timeout_s=WAIT_S)
    prefill.ask("held")
    decode.receiver.revoke(grant) if how == "revoke" else transfer.cancel()
    with pytest.raises(CancelledError):
        transfer.wait_layer(1)
    time.sleep(SHORT_S)
    # The copy of layer 1 is still under way in the other process.
    assert not transfer.done()
    assert decode.num_held == 2
    prefill.ask("go_on")
    assert prefill.ask("wait", "a") == "cancelled"
    transfer.wait_over(WAIT_S)
    until(lambda: is_free(decode))
    there = [0, 1] if decode.direct else [0]  # what was under way did arrive
    decode.rig.device = moved(bits(), decode.rig.device, [4, 2], [3, 5], there)
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)
    decode.forget([3, 5])
    decode.receiver.revoke(grant)  # again: nothing
    assert prefill.refused("send", "b", grant.to_json(), [4, 2])[0] == "PeerError"


def test_a_deadline_fails_the_load_and_holds_the_blocks_until_the_sender_is_through(
    decode: Decode, prefill: Prefill
) -> None:
    prefill.ask("hold", 2)
    transfer, grant = decode.receiver.grant([3, 5], timeout_s=2.0)  # enough for the sender to begin
    prefill.ask("send", "a", grant.to_json(), [4, 2])
    prefill.ask("mark", "a", LAYERS)
    prefill.ask("held")
    with pytest.raises(TransferError, match="the time was over"):
        transfer.wait_layer(4, timeout_s=WAIT_S)
    assert transfer.error is not None
    assert transfer.error.block_ids == [3, 5]
    with pytest.raises(TransferError):  # poisoned on the device
        decode.scheduler.offload([3], [0])
    assert decode.num_held == 2
    prefill.ask("go_on")
    until(lambda: is_free(decode))
    assert transfer.state.value == "failed"
    decode.forget([3, 5])


def test_a_grant_that_nobody_uses_ends_at_its_deadline(decode: Decode, prefill: Prefill) -> None:
    transfer, grant = decode.receiver.grant([3], timeout_s=0.05)
    with pytest.raises(TransferError, match="the time was over"):
        transfer.wait(WAIT_S)
    until(lambda: is_free(decode))
    kind, text = prefill.refused("send", "a", grant.to_json(), [4])
    assert (kind, "over" in text) == ("PeerError", True)
    decode.forget([3])


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_sender_that_gives_up(decode: Decode, prefill: Prefill, how: str) -> None:
    transfer, grant = decode.receiver.grant([3, 5], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [4, 2])
    prefill.ask("mark", "a", [0])
    prefill.ask(how, "a")
    with pytest.raises(TransferError, match="the sender failed: offload was cancelled before layer"):
        transfer.wait(WAIT_S)
    assert is_free(decode)
    decode.forget([3, 5])


@pytest.mark.usefixtures("through_the_pool")
def test_a_load_that_fails_here_stops_the_sender(decode: Decode, prefill: Prefill, copies: Copies) -> None:
    copies.fail("onload", 1, OSError("lost"))
    transfer, grant = decode.receiver.grant([3, 5], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [4, 2])
    prefill.ask("mark", "a", [0, 1])
    until(lambda: not transfer.done() and copies.done)
    prefill.ask("mark", "a", [2])
    with pytest.raises(TransferError):
        for layer in (1, 2):
            transfer.wait_layer(layer, timeout_s=WAIT_S)
    assert prefill.ask("wait", "a") == "cancelled"
    transfer.wait_over(WAIT_S)
    assert is_free(decode)
    copies.heal()
    decode.forget([3, 5])


def test_one_grant_is_used_once_and_by_one(decode: Decode, prefill: Prefill, another: Prefill) -> None:
    transfer, grant = decode.receiver.grant([3], timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [4])
    kind, text = another.refused("send", "b", grant.to_json(), [5])
    assert (kind, "another sender" in text) == ("PeerError", True)
    assert prefill.refused("send", "b", grant.to_json(), [5])[0] == "ValueError"
    prefill.ask("mark", "a", LAYERS)
    transfer.wait(WAIT_S)
    assert prefill.ask("wait", "a") == "done"  # else the sender may not know yet
    kind, text = prefill.refused("send", "b", grant.to_json(), [5])
    assert (kind, "over" in text) == ("PeerError", True)
    decode.rig.device = moved(bits(), decode.rig.device, [4], [3])
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)


def test_a_grant_that_was_changed_is_refused(decode: Decode, prefill: Prefill) -> None:
    host = None if decode.direct else [5]
    transfer, grant = decode.receiver.grant([3], host_block_ids=host, timeout_s=WAIT_S)
    before = pool_memory(decode.pool), cache_memory(decode.rig.cache)
    fields = vars(grant)
    changes = [
        {"host_block_ids": (6,)},
        {"host_block_ids": (*grant.host_block_ids, 6)},
        {"deadline_s": grant.deadline_s + 1},
        {"grant_id": "0" * 32},
    ]
    for change in changes:
        text = Grant(**{**fields, **change}).to_json()
        assert prefill.refused("send", "b", text, [4] * len({**fields, **change}["host_block_ids"]))[0] == "PeerError"
    for change in (
        {"pool_id": "0" * 32},
        {"num_layers": 4},
        {"version": 1},
        {"host_block_ids": ()},
        {"first_head": 1},
        {"num_heads": 1},
    ):
        assert prefill.refused("send", "b", Grant(**{**fields, **change}).to_json(), [4])[0] == "ValueError"
    assert prefill.refused("send", "b", Grant(**{**fields, "host_block_ids": (99,)}).to_json(), [4])[0] == "IndexError"
    assert prefill.refused("send", "b", grant.to_json(), [4, 5])[0] == "ValueError"
    assert prefill.ask("sendings") == 0
    assert_same(pool_memory(decode.pool), before[0])
    assert_same(cache_memory(decode.rig.cache), before[1])
    prefill.ask("send", "a", grant.to_json(), [4])  # it is there all the same
    prefill.ask("mark", "a", LAYERS)
    transfer.wait(WAIT_S)
    decode.rig.device = moved(bits(), decode.rig.device, [4], [3])
    assert_same(cache_memory(decode.rig.cache), decode.rig.device)


def test_a_sender_that_is_killed_while_it_closes(decode: Decode) -> None:
    prefill = Prefill(decode.exported, decode.listener.path)
    transfer, grant = decode.receiver.grant([3], timeout_s=WAIT_S)
    prefill.ask("hold", 0)
    prefill.ask("send", "a", grant.to_json(), [4])
    prefill.ask("mark", "a", LAYERS)
    prefill.ask("held")
    prefill.tell("close")
    time.sleep(SHORT_S)
    assert not is_free(decode)  # it still copies
    prefill.kill()
    with pytest.raises(TransferError, match="the sender is gone"):
        transfer.wait(WAIT_S)
    assert is_free(decode)
    decode.forget([3])


def test_figures_add_up(decode: Decode) -> None:
    stats = decode.receiver.stats()
    assert stats["open"] == 0
    assert stats["granted"] == stats["done"] + stats["failed"]
    assert stats["done"] >= 7


@pytest.mark.usefixtures("through_the_pool")
def test_what_the_caller_gives_stays_the_callers(decode: Decode, prefill: Prefill) -> None:
    host = decode.pool.allocate(2)
    transfer, grant = decode.receiver.grant([0, 1], host_block_ids=host, timeout_s=WAIT_S)
    prefill.ask("send", "a", grant.to_json(), [8, 3])
    prefill.ask("mark", "a", LAYERS)
    transfer.wait(WAIT_S)
    assert decode.pool.num_free_blocks == decode.pool.num_blocks - 2
    for name in decode.rig.spec.tensor_names:
        np.testing.assert_array_equal(pool_memory(decode.pool)[name][:, host], bits()[name][:, [8, 3]])
    decode.pool.free(host)
