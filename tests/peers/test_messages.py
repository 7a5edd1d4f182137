"""What a receiver hears: each message at the wrong time, from the wrong one, damaged or made up changes nothing."""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from paddle_kv import ClosedError, HostPool, LayerwiseScheduler, LeasedError, TransferError
from paddle_kv.peers import Grant, Receiver
from paddle_kv.peers import receiver as receiver_module
from paddle_kv.peers.messages import MOST_BYTES, TO_RECEIVER, decode, encode
from paddle_kv.tracking.group import change
from paddle_kv.tracking.keeper import keeper
from tests.peers.conftest import until
from tests.schedule.rig import SHORT_S, WAIT_S, Rig, assert_same, cache_memory, pool_memory

BEGIN_ID = "be" * 16  # of whoever begins


class FakePeer:
    """Keeps what is sent to it."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send(self, data: bytes) -> None:
        self.heard.append(json.loads(data[8:]))

    @property
    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.heard]


class Ground:
    def __init__(self) -> None:
        self.rig = Rig(shared=True)
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool)
        self.receiver = Receiver(self.scheduler)
        self.peer, self.other = FakePeer(), FakePeer()

    def say(self, grant: Grant, kind: str, peer: FakePeer | None = None, **values: Any) -> bool:
        if kind == "begin":
            values.setdefault("digest", grant.digest)
        if kind == "failed":
            values.setdefault("reason", "why not")
        begin_id = values.pop("begin_id", BEGIN_ID)
        return self.receiver.received(peer or self.peer, encode(kind, grant.grant_id, begin_id, **values))

    @property
    def num_free(self) -> int:
        return self.rig.pool.num_free_blocks


@pytest.fixture
def ground() -> Iterator[Ground]:
    made = Ground()
    yield made
    made.receiver.gone(made.peer)
    made.receiver.gone(made.other)
    made.receiver.close(WAIT_S)
    made.scheduler.close(WAIT_S)
    assert made.num_free == made.rig.pool.num_blocks
    made.rig.pool.close()


def settle() -> None:
    """What the library's thread was given before has been done."""
    keeper.call(lambda: None)
    time.sleep(SHORT_S)


def damaged(rng: random.Random, data: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 2:
        return data + rng.randbytes(rng.randrange(1, 9))
    return rng.randbytes(rng.choice([0, 1, 40, MOST_BYTES, MOST_BYTES + 1]))


WRONG: list[Any] = [None, True, False, -1, 1.0, 1e999, 1 << 70, "", "1", [], [1], {}, "x" * 300, 6, 99]


def forged(rng: random.Random, message: dict[str, Any]) -> bytes:
    found = dict(message)
    kind = rng.randrange(5)
    name = rng.choice(list(found))
    if kind == 0:
        del found[name]
    elif kind == 1:
        found[rng.choice(["extra", "__class__", "digest2"])] = 1
    elif kind == 2 and name != "reason":
        found[name] = rng.choice(WRONG)
    elif kind == 3:
        name = "grant_id" if message["kind"] == "begin" else rng.choice(["grant_id", "begin_id"])  # or it is true
        found[name] = rng.choice([rng.randbytes(16).hex(), found[name].upper() + "0", "../x", "é" * 32])
    else:
        others = {"accepted", "revoke", "grant", "DONE", "layers\0", "refused"} - {message["kind"]}
        found["kind"] = rng.choice(sorted(others))
    text = json.dumps(found).encode() if rng.random() < 0.95 else b"[" * 3000
    return b"%08x" % zlib.crc32(text) + text


def test_ten_thousand_damaged_and_forged_messages(ground: Ground) -> None:
    rng = random.Random(5)
    begun, grant = ground.receiver.grant([3, 1], timeout_s=WAIT_S)
    asked, unused = ground.receiver.grant([4], timeout_s=WAIT_S)
    assert ground.say(grant, "begin")
    assert ground.say(grant, "layers", first=0, end=2)
    begun.wait_layer(1, timeout_s=WAIT_S)
    settle()
    device, host = cache_memory(ground.rig.cache), pool_memory(ground.rig.pool)
    true = [
        {"kind": "layers", "grant_id": grant.grant_id, "begin_id": BEGIN_ID, "first": 2, "end": 3},
        {"kind": "begin", "grant_id": unused.grant_id, "begin_id": BEGIN_ID, "digest": unused.digest},
        {"kind": "failed", "grant_id": grant.grant_id, "begin_id": BEGIN_ID, "reason": "x"},
    ]
    for number in range(10_000):
        message = rng.choice(true)
        data = damaged(rng, encode(**message)) if number % 2 else forged(rng, message)
        assert not ground.receiver.received(rng.choice([ground.peer, ground.other]), data), data
    stats = ground.receiver.stats()
    assert (stats["refused_messages"], stats["open"]) == (10_000, 2)
    assert not begun.failed
    assert not asked.failed
    with pytest.raises(TimeoutError):
        begun.wait_layer(2, timeout_s=SHORT_S)
    assert_same(cache_memory(ground.rig.cache), device)
    assert_same(pool_memory(ground.rig.pool), host)
    assert ground.say(grant, "layers", first=2, end=5)
    assert ground.say(grant, "done")
    begun.wait(WAIT_S)


@pytest.mark.parametrize(
    "values",
    [
        {"first": 0, "end": 1},  # doubled
        {"first": 1, "end": 3},
        {"first": 3, "end": 4},  # one before it is missing
        {"first": 2, "end": 2},
        {"first": 2, "end": 1},
        {"first": 2, "end": 6},
        {"first": -1, "end": 3},
        {"first": True, "end": 3},
        {"first": 2.0, "end": 3},
    ],
)
def test_layers_that_are_not_the_next_ones(ground: Ground, values: dict[str, Any]) -> None:
    load, grant = ground.receiver.grant([3, 1], timeout_s=WAIT_S)
    ground.say(grant, "begin")
    ground.say(grant, "layers", first=0, end=2)
    assert not ground.say(grant, "layers", **values)
    assert not ground.say(grant, "done")
    assert not load.failed
    with pytest.raises(TimeoutError):
        load.wait_layer(2, timeout_s=SHORT_S / 5)
    assert ground.say(grant, "layers", first=2, end=5)
    assert ground.say(grant, "done")
    load.wait(WAIT_S)
    assert not ground.say(grant, "done")
    assert not ground.say(grant, "failed")
    assert load.state.value == "done"


def test_nothing_counts_before_a_beginning(ground: Ground) -> None:
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    for kind, values in (("layers", {"first": 0, "end": 5}), ("done", {}), ("failed", {})):
        assert not ground.say(grant, kind, **values)
    assert not load.failed
    assert ground.peer.heard == []
    assert not ground.say(grant, "begin", digest="0" * 64)
    assert ground.peer.kinds == ["refused"]
    assert ground.say(grant, "begin")
    assert not ground.say(grant, "begin")  # doubled: one answer
    assert ground.peer.kinds == ["refused", "accepted"]


def test_a_grant_belongs_to_whoever_has_begun_with_it(ground: Ground) -> None:
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    ground.say(grant, "begin")
    assert not ground.say(grant, "begin", ground.other)
    assert ground.other.kinds == ["refused"]
    for kind, values in (("layers", {"first": 0, "end": 5}), ("done", {}), ("failed", {})):
        assert not ground.say(grant, kind, ground.other, **values)
    ground.receiver.gone(ground.other)
    assert not load.failed
    assert ground.receiver.holds(ground.peer)
    assert not ground.receiver.holds(ground.other)


def test_blocks_are_held_until_the_sender_has_answered(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "REVOKE_EVERY_S", 0.01)
    free = ground.num_free
    load, grant = ground.receiver.grant([3], timeout_s=1.0)
    assert ground.say(grant, "begin")
    with pytest.raises(TransferError, match="the time was over"):
        load.wait_layer(0, timeout_s=WAIT_S)
    until(lambda: ground.peer.kinds.count("revoke") >= 3)  # as often as it takes: a channel may lose it
    assert ground.num_free == free - 1
    assert not load.done()
    assert not ground.say(grant, "layers", first=0, end=5)  # late
    assert ground.num_free == free - 1
    assert ground.say(grant, "failed")
    assert ground.num_free == free
    load.wait_over(WAIT_S)
    assert not ground.say(grant, "begin")
    count = ground.peer.kinds.count("revoke")
    time.sleep(SHORT_S)
    assert ground.peer.kinds.count("revoke") <= count + 1


def test_done_after_a_revoke_frees_the_blocks_and_loads_nothing(ground: Ground) -> None:
    free = ground.num_free
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    ground.say(grant, "begin")
    ground.receiver.revoke(grant)
    assert ground.say(grant, "done")
    load.wait_over(WAIT_S)
    assert load.state.value == "cancelled"
    assert ground.num_free == free
    assert_same(cache_memory(ground.rig.cache), ground.rig.device)


def test_what_belongs_to_an_earlier_beginning_changes_nothing(ground: Ground) -> None:
    """The sender has asked, has given up, and asks again: what it said of the first time comes last."""
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    assert ground.say(grant, "begin", begin_id="ab" * 16)
    refused = ground.receiver.stats()["refused_messages"]
    earlier: list[tuple[str, dict[str, Any]]] = [("failed", {}), ("layers", {"first": 0, "end": 5}), ("done", {})]
    for kind, values in earlier:
        assert not ground.say(grant, kind, begin_id="ac" * 16, **values)
    assert not load.failed
    assert ground.receiver.holds(ground.peer)
    assert ground.receiver.stats()["refused_messages"] == refused + 3
    assert ground.say(grant, "layers", begin_id="ab" * 16, first=0, end=5)
    assert ground.say(grant, "done", begin_id="ab" * 16)
    load.wait(WAIT_S)


def test_each_answer_names_the_beginning_that_it_is_for(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "REVOKE_EVERY_S", WAIT_S)
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    ground.say(grant, "begin", begin_id="aa" * 16, digest="0" * 64)
    ground.say(grant, "begin", begin_id="bb" * 16)
    ground.say(grant, "begin", begin_id="bb" * 16)  # doubled: it has its answer
    ground.say(grant, "begin", begin_id="cc" * 16)  # what it was let in for may still come
    ground.say(grant, "begin", ground.other, begin_id="bb" * 16)
    ground.receiver.revoke(grant)
    until(lambda: "revoke" in ground.peer.kinds)
    said = [(one["kind"], one["begin_id"], one.get("reason")) for one in ground.peer.heard]
    assert said == [
        ("refused", "aa" * 16, "the grant was changed on its way"),
        ("accepted", "bb" * 16, None),
        ("refused", "cc" * 16, "the sender has begun it before"),
        ("revoke", "bb" * 16, None),
    ]
    assert [one["reason"] for one in ground.other.heard] == ["another sender has the grant"]
    assert ground.say(grant, "failed", begin_id="bb" * 16)
    load.wait_over(WAIT_S)


def test_a_dead_sender(ground: Ground) -> None:
    free = ground.num_free
    loads = [ground.receiver.grant([block], timeout_s=WAIT_S) for block in (3, 4, 5)]
    for (_, grant), peer in zip(loads, (ground.peer, ground.peer, ground.other), strict=True):
        ground.say(grant, "begin", peer)
    assert ground.num_free == free - 3
    ground.receiver.gone(ground.peer)
    for load, _ in loads[:2]:
        with pytest.raises(TransferError, match="the sender is gone"):
            load.wait(WAIT_S)
    assert not loads[2][0].failed
    assert ground.num_free == free - 1


def test_a_grant_that_failed_in_this_moment_is_refused(ground: Ground) -> None:
    _, grant = ground.receiver.grant([3, 4], timeout_s=WAIT_S)
    message = decode(encode("begin", grant.grant_id, BEGIN_ID, digest=grant.digest), TO_RECEIVER)

    def section() -> Any:
        ground.receiver._fail(ground.receiver._granted[grant.grant_id].load, "just now")
        return ground.receiver._take(ground.peer, message)

    assert not change(ground.scheduler, section)[0]


def test_a_grant_nobody_has_begun_with_ends_at_once(ground: Ground) -> None:
    free = ground.num_free
    load, grant = ground.receiver.grant([3, 4], timeout_s=WAIT_S)
    assert ground.num_free == free - 2
    load.cancel()
    load.wait_over(WAIT_S)
    assert ground.num_free == free
    assert not ground.say(grant, "begin")


def test_a_closed_receiver_of_direct_writes_has_closed_what_it_made() -> None:
    rig = Rig(shared_cache=True)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler:
        receiver = Receiver(scheduler, direct=True)
        load, _ = receiver.grant([1])
        receiver.close(WAIT_S)
        assert load.failed
        assert receiver._loads.host_pool.closed
        with pytest.raises(ClosedError, match="the scheduler is closed"):
            receiver._loads.check_open()
        scheduler.offload([2], rig.pool.allocate(1)).wait(WAIT_S)  # its own scheduler goes on
    rig.pool.close()


def test_a_receiver_that_is_closed_waits_for_its_senders(ground: Ground) -> None:
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    ground.say(grant, "begin")
    with pytest.raises(TimeoutError, match="1 grants"):
        ground.receiver.close(SHORT_S)
    assert load.failed
    with pytest.raises(ClosedError):
        ground.receiver.grant([4])
    settle()
    assert ground.peer.kinds == ["accepted", "revoke"]
    assert ground.say(grant, "failed")
    ground.receiver.close(WAIT_S)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_grants_of_its_parent_alone(ground: Ground) -> None:
    load, grant = ground.receiver.grant([1], timeout_s=WAIT_S)
    assert ground.say(grant, "begin")
    child = os.fork()
    if child == 0:
        try:
            ground.receiver.close(0.0)  # nothing of it is the child's
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ground.say(grant, "layers", first=0, end=5)
    assert ground.say(grant, "done")
    load.wait(WAIT_S)
    assert ground.peer.kinds == ["accepted"]


def test_a_channel_that_raises_is_one_that_loses_messages(ground: Ground) -> None:
    class Broken:
        def send(self, data: bytes) -> None:
            raise OSError("broken")

    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    broken = Broken()
    assert ground.receiver.received(broken, encode("begin", grant.grant_id, BEGIN_ID, digest=grant.digest))
    load.cancel()
    settle()
    assert ground.receiver.received(broken, encode("failed", grant.grant_id, BEGIN_ID, reason=""))
    load.wait_over(WAIT_S)


def test_bad_arguments(ground: Ground) -> None:
    receiver, free = ground.receiver, ground.num_free
    with pytest.raises(ValueError, match="empty"):
        receiver.grant([])
    with pytest.raises(MemoryError):
        receiver.grant(range(13), host_block_ids=None) and receiver.grant(range(13))
    for wrong in ([99], [-1]):
        with pytest.raises(IndexError):
            receiver.grant(wrong)
    with pytest.raises(ValueError, match="more than once"):
        receiver.grant([3, 3])
    with pytest.raises(TypeError, match="timeout_s"):
        receiver.grant([3], timeout_s=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        receiver.revoke("grant")  # type: ignore[arg-type]
    receiver.close(WAIT_S)
    until(lambda: ground.num_free >= free)
    with pytest.raises(TypeError):
        Receiver("scheduler")  # type: ignore[arg-type]
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, pytest.raises(ValueError, match="shared=True"):
        Receiver(scheduler)


def test_host_blocks_in_use_are_not_granted(ground: Ground) -> None:
    _, first = ground.receiver.grant([3], host_block_ids=[7], timeout_s=WAIT_S)
    with pytest.raises(LeasedError):
        ground.receiver.grant([4], host_block_ids=[7])
    ground.receiver.revoke(first)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "{", "[" * 100_000, '{"version":1}', b"\xff\xfe"])
def test_text_that_is_no_grant(text: Any) -> None:
    with pytest.raises(ValueError, match="grant"):
        Grant.from_json(text)


def test_a_grant_is_checked_in_all_its_parts(ground: Ground) -> None:
    load, grant = ground.receiver.grant([3, 4], timeout_s=WAIT_S)
    fields = json.loads(grant.to_json())
    assert Grant.from_json(grant.to_json()) == grant
    for name in fields:
        for wrong in (None, True, 0, [], [1.5], [-1], ["a"], {}, -1, "é", float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"."):
                made = Grant.from_json(json.dumps({**fields, name: wrong}))
                if name in ("pool_id",) and isinstance(wrong, str):
                    raise ValueError(made.pool_id)  # any text is one
                if (name, wrong) == ("first_head", 0):
                    raise ValueError(made.first_head)  # what it is
                if name == "deadline_s" and isinstance(wrong, float):
                    raise AssertionError
    load.cancel()


@pytest.mark.parametrize("values", [{"first": False, "end": 1}, {"first": 0, "end": True}, {"first": 0.0, "end": 1}])
def test_a_layer_is_numbered_by_an_int_and_nothing_that_equals_one(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a field of the wrong type"):
        decode(encode("layers", "0" * 32, BEGIN_ID, **values), TO_RECEIVER)


def test_messages_are_what_they_were() -> None:
    long = encode("failed", "0" * 32, BEGIN_ID, reason="\U0001f600" * 5000)
    assert len(long) <= MOST_BYTES
    assert decode(long, TO_RECEIVER)["reason"] == "\U0001f600" * 200
    with pytest.raises(ValueError, match="more than"):
        decode(b" " * (MOST_BYTES + 1), TO_RECEIVER)


def test_the_pool_of_the_grant_is_that_of_the_receiver(ground: Ground) -> None:
    load, grant = ground.receiver.grant([3], timeout_s=WAIT_S)
    same = HostPool.attach(ground.rig.spec, ground.rig.pool.export())
    assert grant.pool_id == same.export().allocations[0].token
    load.cancel()
