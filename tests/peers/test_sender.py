"""What a sender says, and what it makes of what it hears: the receiver is a function here."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paddle_kv import CancelledError, ClosedError, DeviceCache, HostPool, LayerwiseScheduler, PeerError
from paddle_kv.peers import Grant, Receiver, Sender
from paddle_kv.peers.grant import VERSION, make_grant_id
from paddle_kv.peers.messages import encode
from paddle_kv.schedule import layer_ends
from tests.peers.conftest import until
from tests.peers.prefill import BLOCKS, bits, context, own_a_pool
from tests.peers.test_messages import BEGIN_ID, damaged, forged, settle
from tests.schedule.rig import (
    SHORT_S,
    WAIT_S,
    Copies,
    Rig,
    assert_same,
    cache_memory,
    make_spec,
    moved,
    pool_memory,
    set_cache,
)


@pytest.fixture(scope="module")
def exported() -> Iterator[Any]:
    pipe, there = multiprocessing.Pipe()
    process = context.Process(target=own_a_pool, args=(there,), daemon=True)
    process.start()
    there.close()
    yield pipe.recv()
    pipe.close()
    process.join(WAIT_S)


class Ground:
    def __init__(self, exported: Any) -> None:
        spec = make_spec()
        self.cache, self.pool = DeviceCache(spec, BLOCKS, "cpu"), HostPool.attach(spec, exported)
        set_cache(self.cache, bits())
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.said: list[dict[str, Any]] = []
        self.hung_up = 0
        self.answer = "accepted"
        self.sender = Sender(self.scheduler, self.hear, hang_up=self.hang_up)
        self.host = pool_memory(self.pool)

    def hear(self, data: bytes) -> None:
        self.said.append(json.loads(data[8:]))
        if self.said[-1]["kind"] == "begin" and self.answer:
            values = {"reason": "why not"} if self.answer == "refused" else {}
            self.tell(self.answer, **values)

    def tell(self, kind: str, begun: dict[str, Any] | None = None, **values: Any) -> bool:
        """Of what was begun last, or of another beginning."""
        begun = begun or self.begun[-1]
        return self.sender.received(encode(kind, begun["grant_id"], begun["begin_id"], **values))

    def hang_up(self) -> None:
        self.hung_up += 1

    def grant(self, ids: tuple[int, ...] = (3,), **changes: Any) -> Grant:
        pool_id = self.pool.export().allocations[0].token
        values = {"pool_id": pool_id, "num_layers": 5, "first_head": 0, "num_heads": 2, **changes}
        values.setdefault("deadline_s", time.monotonic() + WAIT_S)
        return Grant(VERSION, make_grant_id(), host_block_ids=ids, **values)

    def until(self, kind: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        end_s = time.monotonic() + timeout_s
        while not self.said or self.said[-1]["kind"] != kind:
            assert time.monotonic() < end_s, self.said
            time.sleep(0.002)
        return self.said[-1]

    @property
    def begun(self) -> list[dict[str, Any]]:
        return [one for one in self.said if one["kind"] == "begin"]

    @property
    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.said]


@pytest.fixture
def ground(exported: Any) -> Iterator[Ground]:
    made = Ground(exported)
    yield made
    made.sender.close(WAIT_S)
    made.scheduler.close(WAIT_S)
    made.pool.close()
    assert made.hung_up == 1


def test_each_layer_is_told_once_in_order_and_only_when_it_is_there(ground: Ground, copies: Copies) -> None:
    copies.hold("offload", 1, 3)
    grant = ground.grant((3, 8, 0))
    save = ground.sender.send(grant, [1, 0, 5])
    names = {"grant_id": grant.grant_id, "begin_id": ground.said[0]["begin_id"]}
    assert ground.said == [{"kind": "begin", **names, "digest": grant.digest}]
    for layer in (0, 1, 2, 4, 3):
        save.mark_layer_written(layer)
    assert ground.until("layers") == {"kind": "layers", **names, "first": 0, "end": 1}
    time.sleep(SHORT_S)
    assert len(ground.said) == 2
    assert_same(pool_memory(ground.pool), moved(bits(), ground.host, [1, 0, 5], [3, 8, 0], [0]))
    copies.go_on("offload", 1)
    copies.go_on("offload", 3)
    ground.until("done")
    told = [layer for one in ground.said[1:-1] for layer in range(one["first"], one["end"])]
    assert told == [0, 1, 2, 3, 4]
    assert all(one.items() >= names.items() for one in ground.said)
    assert ground.kinds[1:-1] == ["layers"] * (len(ground.kinds) - 2)
    assert_same(pool_memory(ground.pool), moved(bits(), ground.host, [1, 0, 5], [3, 8, 0]))
    assert_same(cache_memory(ground.cache), bits())


def test_who_does_not_hear_of_the_layers_tells_them_at_the_end(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(*_: object) -> None:
        raise RuntimeError("no events")

    monkeypatch.setattr(layer_ends._LayerEnds, "submitted", deaf)
    save = ground.sender.send(ground.grant(), [1])
    for layer in range(5):
        save.mark_layer_written(layer)
    ground.until("done")
    assert ground.kinds == ["begin", "layers", "done"]
    assert (ground.said[1]["first"], ground.said[1]["end"]) == (0, 5)


def test_a_copy_that_fails_is_told_and_none_of_its_layers(ground: Ground, copies: Copies) -> None:
    copies.fail("offload", 2, OSError("lost"))
    save = ground.sender.send(ground.grant(), [1])
    for layer in range(5):
        save.mark_layer_written(layer) if not save.failed else None
    save.wait_over(WAIT_S)
    assert "offload failed" in ground.until("failed")["reason"]
    settle()
    assert max((one["end"] for one in ground.said if one["kind"] == "layers"), default=0) <= 2
    assert save.error is not None


def test_refused_or_not_answered_nothing_is_written(ground: Ground) -> None:
    ground.answer = "refused"
    with pytest.raises(PeerError, match="why not"):
        ground.sender.send(ground.grant(), [1])
    ground.answer = ""
    grant = ground.grant()
    with pytest.raises(TimeoutError):
        ground.sender.send(grant, [1], timeout_s=SHORT_S)
    names = {"grant_id": grant.grant_id, "begin_id": ground.begun[-1]["begin_id"]}
    assert ground.said[-1] == {"kind": "failed", **names, "reason": "it was not begun"}
    assert not ground.tell("accepted")  # late
    ground.said.clear()
    with pytest.raises(PeerError, match="over"):
        ground.sender.send(ground.grant(deadline_s=time.monotonic() - 1), [1])
    assert ground.said == []
    assert_same(pool_memory(ground.pool), ground.host)


def test_a_grant_that_was_refused_can_be_begun_again(ground: Ground) -> None:
    """Of one that was changed on its way the receiver says so; then the right one comes."""
    ground.answer, grant = "refused", ground.grant()
    with pytest.raises(PeerError, match="why not"):
        ground.sender.send(grant, [1])
    assert ground.kinds == ["begin"]  # there is nothing that the receiver would have to end
    ground.answer = "accepted"
    save = ground.sender.send(grant, [1])
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)


def test_an_answer_to_an_earlier_beginning_changes_nothing(ground: Ground) -> None:
    """Messages come twice: the grant was changed on its way, and the second word of that comes behind the right one."""
    grant = ground.grant()
    ground.answer = "refused"
    with pytest.raises(PeerError, match="why not"):
        ground.sender.send(replace(grant, host_block_ids=(4,)), [1])
    ground.answer = ""
    [earlier], late = ground.begun, []

    def again(data: bytes) -> None:
        ground.hear(data)
        if ground.kinds[-1] == "begin":
            late.append(ground.tell("refused", earlier, reason="late"))
            late.append(ground.tell("accepted"))

    ground.sender._send = again
    save = ground.sender.send(grant, [1])
    assert late == [False, True]
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)


def test_a_grant_that_was_used_is_not_begun_by_an_answer_that_comes_twice(ground: Ground) -> None:
    """The blocks are somebody else's by then."""
    grant = ground.grant()
    save = ground.sender.send(grant, [1])
    for layer in range(5):
        save.mark_layer_written(layer)
    until(lambda: not ground.sender._sendings)
    ground.answer, host = "", pool_memory(ground.pool)
    [earlier], late = ground.begun, []

    def again(data: bytes) -> None:
        ground.hear(data)
        if ground.kinds[-1] == "begin":
            late.append(ground.tell("accepted", earlier))
            late.append(ground.tell("refused", reason="the grant is over"))

    ground.sender._send = again
    with pytest.raises(PeerError, match="the grant is over"):
        ground.sender.send(grant, [2])
    assert late == [False, True]
    assert_same(pool_memory(ground.pool), host)


def test_a_grant_that_was_given_up_can_be_begun_again(ground: Ground) -> None:
    """What the receiver hears and says of the first time, also behind the second beginning, is not of that one."""
    ground.answer, grant = "", ground.grant()
    with pytest.raises(TimeoutError):
        ground.sender.send(grant, [1], timeout_s=SHORT_S)
    ground.answer = "accepted"
    save = ground.sender.send(grant, [1])
    first, second = ground.begun
    assert first["begin_id"] != second["begin_id"]
    ended = {"kind": "failed", "grant_id": grant.grant_id, "begin_id": first["begin_id"]}
    assert ground.said[1] == {**ended, "reason": "it was not begun"}
    assert ground.tell("revoke", first)  # it has heard of that one, and has not heard of its end
    assert ground.said[-1] == {**ended, "reason": "it was revoked"}
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)
    assert ground.until("done")["begin_id"] == second["begin_id"]


def test_a_revoke_of_an_earlier_beginning_leaves_who_waits_for_an_answer(ground: Ground) -> None:
    ground.answer, grant = "", ground.grant()
    with pytest.raises(TimeoutError):
        ground.sender.send(grant, [1], timeout_s=SHORT_S)
    [first] = ground.begun

    def revoked(data: bytes) -> None:
        ground.hear(data)
        if ground.kinds[-1] == "begin":
            assert ground.tell("revoke", first)
            assert ground.tell("refused", reason="begun before")

    ground.sender._send = revoked
    with pytest.raises(PeerError, match="begun before"):
        ground.sender.send(grant, [1])
    assert [(one["kind"], one["begin_id"] == first["begin_id"]) for one in ground.said[2:]] == [
        ("begin", False),
        ("failed", True),
    ]


def test_a_grant_that_was_used_is_over_before_all_is_told(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def slow(data: bytes) -> None:
        ground.hear(data)
        if ground.kinds[-1] == "done":
            arrived.set()
            go_on.wait(WAIT_S)

    monkeypatch.setattr(ground.sender, "_send", slow)
    grant = ground.grant()
    save = ground.sender.send(grant, [1])
    with pytest.raises(ValueError, match="already"):
        ground.sender.send(grant, [1])
    for layer in range(5):
        save.mark_layer_written(layer)
    assert arrived.wait(WAIT_S)
    save.wait(WAIT_S)
    try:
        with pytest.raises(PeerError, match="over"):
            ground.sender.send(grant, [1])
    finally:
        go_on.set()


def test_an_answer_is_waited_for_as_long_as_the_caller_says(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []
    host = ground.scheduler.group.host
    park = host.park

    def noted(waiter: Any, timeout_s: float | None = None) -> bool:
        waited.append(timeout_s)
        return park(waiter, timeout_s)

    ground.answer = ""
    grant = ground.grant(deadline_s=time.monotonic() + 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(host, "park", noted)
        with pytest.raises(TimeoutError):
            ground.sender.send(grant, [1], timeout_s=0.0625)
    assert 0.0625 in waited


def test_no_answer_is_waited_for_beyond_the_deadline(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    host = ground.scheduler.group.host
    park = host.park

    def noted(waiter: Any, timeout_s: float | None) -> bool:
        if timeout_s is None:
            return park(waiter, None)
        waited.append(timeout_s)
        return False  # as if the time was over

    ground.answer = ""
    with monkeypatch.context() as patch:
        patch.setattr(host, "park", noted)
        with pytest.raises(TimeoutError):
            ground.sender.send(ground.grant(deadline_s=time.monotonic() + WAIT_S / 2), [1], timeout_s=WAIT_S)
    assert len(waited) == 1 and 0 < waited[0] <= WAIT_S / 2


def test_a_revoke_is_answered_when_nothing_is_written_any_more(ground: Ground, copies: Copies) -> None:
    copies.hold("offload", 1)
    grant = ground.grant()
    save = ground.sender.send(grant, [1])
    for layer in range(5):
        save.mark_layer_written(layer)
    assert copies.arrived.acquire(timeout=WAIT_S)
    assert ground.tell("revoke")
    assert ground.tell("revoke")  # again: it was not answered
    time.sleep(SHORT_S)
    assert "failed" not in ground.kinds
    copies.go_on()
    ground.until("failed")
    with pytest.raises(CancelledError):
        save.wait(WAIT_S)
    until(lambda: not ground.sender._sendings)
    count = ground.kinds.count("failed")
    assert ground.tell("revoke")  # it was lost: once more
    assert ground.kinds.count("failed") == count + 1 == 2


def test_a_revoke_before_it_has_begun(ground: Ground) -> None:
    ground.answer = "revoke"
    with pytest.raises(PeerError, match="revoked"):
        ground.sender.send(ground.grant(), [1])
    assert ground.kinds == ["begin", "failed"]
    assert ground.sender.received(encode("revoke", "0" * 32, BEGIN_ID))  # not known: it writes nothing there
    assert ground.kinds == ["begin", "failed", "failed"]


def test_the_end_of_the_receiver_ends_all_and_the_channel(ground: Ground, copies: Copies) -> None:
    copies.hold("offload", 0)
    first, second = (ground.sender.send(ground.grant((block,)), [block]) for block in (1, 2))
    first.mark_layer_written(0)
    assert copies.arrived.acquire(timeout=WAIT_S)
    ground.sender.gone()
    second.wait_over(WAIT_S)
    assert not first.done()
    assert ground.hung_up == 0  # the end of the channel says that nothing is written
    copies.go_on()
    first.wait_over(WAIT_S)
    for save in (first, second):
        assert save.state.value == "cancelled"
    settle()
    assert ground.hung_up == 1
    with pytest.raises(PeerError, match="gone"):
        ground.sender.send(ground.grant(), [1])


def test_close_waits_for_what_is_being_written(ground: Ground, copies: Copies) -> None:
    copies.hold("offload", 0)
    save = ground.sender.send(ground.grant(), [1])
    save.mark_layer_written(0)
    assert copies.arrived.acquire(timeout=WAIT_S)
    with pytest.raises(TimeoutError):
        ground.sender.close(SHORT_S)
    assert ground.hung_up == 0
    copies.go_on()
    ground.sender.close(WAIT_S)
    assert ground.hung_up == 1
    assert ground.kinds[-1] == "failed"
    with pytest.raises(ClosedError):
        ground.sender.send(ground.grant(), [1])


def test_close_waits_until_the_channel_has_ended(ground: Ground) -> None:
    """By another thread, which has the end of it in hand."""
    ending, go_on = threading.Event(), threading.Event()
    ground.sender._hang_up = lambda: (ground.hang_up(), ending.set(), go_on.wait(WAIT_S))
    other = threading.Thread(target=ground.sender.close, args=(WAIT_S,))
    other.start()
    assert ending.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        ground.sender.close(0.01)
    go_on.set()
    ground.sender.close(WAIT_S)
    other.join(WAIT_S)


def test_who_waits_for_an_answer_hears_of_the_end(ground: Ground) -> None:
    ground.answer = ""
    threading.Timer(SHORT_S, ground.sender.gone).start()
    with pytest.raises(PeerError, match="gone"):
        ground.sender.send(ground.grant(), [1], timeout_s=WAIT_S)


def test_damaged_and_forged_messages_change_nothing(ground: Ground) -> None:
    rng, grant = random.Random(7), ground.grant()
    save = ground.sender.send(grant, [1])
    begin_id = ground.begun[0]["begin_id"]
    for kind in ("accepted", "refused"):  # it has one answer already
        assert not ground.tell(kind, **({"reason": "x"} if kind == "refused" else {}))
    taken = 0
    for number in range(2000):
        message = {"kind": "revoke", "grant_id": grant.grant_id, "begin_id": begin_id}
        data = damaged(rng, encode(**message)) if number % 2 else forged(rng, message)
        taken += ground.sender.received(data)
    assert taken < 400  # those that revoke what there is not
    assert ground.kinds.count("failed") == taken
    assert not save.failed
    for layer in range(5):
        save.mark_layer_written(layer)
    save.wait(WAIT_S)


def test_a_channel_that_raises_does_not_begin(ground: Ground) -> None:
    def broken(data: bytes) -> None:
        raise OSError("broken")

    ground.sender._send = broken
    with pytest.raises(OSError, match="broken"):
        ground.sender.send(ground.grant(), [1])
    assert not ground.sender._sendings


def test_a_sender_beside_its_receiver_is_refused() -> None:
    rig = Rig(shared=True)
    other = DeviceCache(rig.spec, 4, "cpu")
    one, two = LayerwiseScheduler(rig.cache, rig.pool), LayerwiseScheduler(other, rig.pool)
    with one, two, Receiver(one) as receiver, Sender(two, print) as sender:
        load, grant = receiver.grant([3])
        with pytest.raises(ValueError, match="in this process"):
            sender.send(grant, [1])
        load.cancel()
        load.wait_over(WAIT_S)
    rig.pool.close()
    with pytest.raises(TypeError):
        Sender("scheduler", print)  # type: ignore[arg-type]
