"""Hand-overs between simulated processes hold whatever happens to messages and senders; what they rely on is left out
one by one, and each time something is noticed. The table is in docs/simulator.md."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.peers import receiver as receiver_module
from paddle_kv.peers.grant import Grant
from paddle_kv.peers.granted import Granted, GrantedLoad
from paddle_kv.peers.messages import encode
from paddle_kv.peers.receiver import Receiver
from paddle_kv.peers.sender import Sender
from paddle_kv.schedule import arriving, layer_ends
from paddle_kv.testing.simulator.hand_over import LAYERS, play
from paddle_kv.tracking.domain import BlockDomain
from tests.schedule.conftest import nothing_left  # noqa: F401

pytestmark = pytest.mark.usefixtures("nothing_left")

SEEDS = range(60)
WRONG_BYTES = r"holds |held .* when it was read|without an edge between them"
NEVER_ENDS = r"never end|Deadlock|are not over|were not over|still have"


def test_hand_overs_hold() -> None:
    loaded = failed = 0
    for seed in SEEDS:
        made = play(seed)
        loaded += made.num_loaded
        failed += made.num_failed
    assert loaded > len(SEEDS)
    assert failed > len(SEEDS)


# ---- what is left out ----
def _register_without_asking(self: Sender, sending: Any) -> None:
    _register(self, sending)
    self._answer(sending, "accepted")


def _begin_whoever_asks(self: Receiver, peer: Any, granted: Any, message: Any) -> Any:
    if granted is None or granted.load.movement is None or granted.load.movement.failed:
        return _begin(self, peer, granted, message)
    granted.peer, granted.begin_id = peer, message["begin_id"]
    return True, encode("accepted", message["grant_id"], message["begin_id"])


def _begin_what_is_over(self: Receiver, peer: Any, granted: Any, message: Any) -> Any:
    taken, reply = _begin(self, peer, granted, message)
    refused = reply is not None and b'"the grant is over' in reply
    return (True, encode("accepted", message["grant_id"], message["begin_id"])) if refused else (taken, reply)


def _stop_and_give_back(self: Receiver, load: GrantedLoad) -> list[Granted]:
    stopped = _stop_here(self, load)
    for part in load.parts:
        self._end(part)
    return stopped


def _stop_once(self: Receiver, load: GrantedLoad) -> list[Granted]:
    added, self._alarms.add = self._alarms.add, lambda *_: None  # type: ignore[method-assign]
    try:
        return _stop_here(self, load)
    finally:
        self._alarms.add = added  # type: ignore[method-assign]


def _leave_but(kind: str) -> Callable[..., None]:
    def leave(self: Sender, said: str, *given: Any, **values: Any) -> None:
        if said != kind:
            _leave(self, said, *given, **values)

    return leave


def _ended_when_submitted(self: Any, movement: Any, groups: range) -> None:
    for group in groups:
        movement.group.host.post(functools.partial(self._ended, list(movement.plan.layers_of(group))))


def _tell_across(self: Sender, sending: Any, layers: Any) -> None:
    sending.there.update(layers)
    first, end = sending.next_layer, max(sending.there, default=-1) + 1
    if end > first:
        sending.next_layer = end
        self._leave("layers", sending, first=first, end=end)


def _take_no_revokes(self: Sender, message: Any) -> Any:
    return (True, None, None) if message["kind"] == "revoke" else _take(self, message)


def _take_and_say_failed_at_once(self: Sender, message: Any) -> Any:
    taken, reply, unwanted = _take(self, message)
    if unwanted is not None:
        reply = encode("failed", message["grant_id"], message["begin_id"], reason="it was revoked")
    return taken, reply, unwanted


def _take_nothing_unknown(self: Sender, message: Any) -> Any:
    known = message["grant_id"] in self._sendings
    taken, reply, unwanted = _take(self, message)
    return taken, reply if known else None, unwanted


def _start_with_all_layers(self: Receiver, *given: Any) -> Any:
    transfer, load = _start(self, *given)
    arriving.mark(load.movement, range(LAYERS))
    return transfer, load


def _heard_without_checks(data: bytes, kinds: Any) -> Any:
    try:
        found = json.loads(data[8:])
        return found if found["kind"] in kinds else None
    except (ValueError, TypeError, KeyError):
        return None


_register, _take, _leave = Sender._register, Sender._take, Sender._leave
_begin, _stop_here, _start = Receiver._begin, Receiver._stop_here, Receiver._start


def _nothing(*_: Any) -> None:
    pass


REMOVALS: dict[str, tuple[Any, str, Any, str]] = {
    "grant: a sender begins without asking": (Sender, "_register", _register_without_asking, WRONG_BYTES),
    "grant: a second sender is let in": (Receiver, "_begin", _begin_whoever_asks, f"{WRONG_BYTES}|{NEVER_ENDS}"),
    "grant: one that is over is good": (Receiver, "_begin", _begin_what_is_over, WRONG_BYTES),
    "grant: one that was changed is good": (Grant, "digest", "0", WRONG_BYTES),
    "grant: blocks go back when the load fails": (Receiver, "_stop_here", _stop_and_give_back, WRONG_BYTES),
    "grant: no deadline": (Receiver, "_late", _nothing, NEVER_ENDS),
    "layers: told when they are submitted": (layer_ends._LayerEnds, "submitted", _ended_when_submitted, WRONG_BYTES),
    "layers: told across those that are missing": (Sender, "_are_there", _tell_across, WRONG_BYTES),
    "layers: the load does not wait for them": (Receiver, "_start", _start_with_all_layers, WRONG_BYTES),
    "done: not told": (Sender, "_leave", _leave_but("done"), NEVER_ENDS),
    "done: taken before all layers were": (Granted, "is_complete", True, f"{WRONG_BYTES}|{NEVER_ENDS}"),
    "failed: not told": (Sender, "_leave", _leave_but("failed"), NEVER_ENDS),
    "failed: told while copies run": (Sender, "_take", _take_and_say_failed_at_once, WRONG_BYTES),
    "failed: what did not come counts as usable": (BlockDomain, "poison", _nothing, "are poisoned"),
    "revoke: not sent": (receiver_module, "_send", _nothing, NEVER_ENDS),
    "revoke: sent once": (Receiver, "_stop_here", _stop_once, NEVER_ENDS),
    "revoke: not heard": (Sender, "_take", _take_no_revokes, NEVER_ENDS),
    "revoke: of what is forgotten is not answered": (Sender, "_take", _take_nothing_unknown, NEVER_ENDS),
    "end of a sender: not heard": (Receiver, "gone", _nothing, NEVER_ENDS),
    "end of a sender: that of its connection counts": (Receiver, "lost", Receiver.gone, WRONG_BYTES),
    "messages: of any peer": (Granted, "is_written_by", lambda self, *_: self.peer is not None, "."),
}

DROPS = {
    "wait: the receiver's model does not wait for a layer": ("wait-layer", WRONG_BYTES),
    "wait: a load does not wait for the receiver's model": ("wait-compute-before-onload", WRONG_BYTES),
    "wait: a layer is saved before the sender's model has written it": ("wait-compute-before-offload", WRONG_BYTES),
    "wait: a copy counts as made before it is": ("completion", WRONG_BYTES),
    "wait: nobody hears that a copy was made": ("watch-report", NEVER_ENDS),
}


def found(removed: Callable[[int], object], expected: str) -> None:
    """One of the runs that hold without the removal does not hold with it."""
    for seed in SEEDS:
        try:
            removed(seed)
        except AssertionError as error:
            assert re.search(expected, str(error)), error
            return
    pytest.fail(f"nobody has noticed in {len(SEEDS)} runs")


@pytest.mark.parametrize("name", REMOVALS)
def test_what_is_left_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, instead, expected = REMOVALS[name]
    monkeypatch.setattr(where, attribute, instead)
    found(play, expected)


@pytest.mark.parametrize("name", DROPS)
def test_a_wait_that_is_left_out_is_found(name: str) -> None:
    removal, expected = DROPS[name]
    found(lambda seed: play(seed, drop=[removal]), expected)


def test_damaged_messages_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their check sum one of them is acted upon."""
    monkeypatch.setattr(receiver_module, "heard", _heard_without_checks)
    found(play, ".")


def test_the_table_is_complete() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "simulator.md").read_text()
    for name in (*REMOVALS, *DROPS):
        kind, what = name.split(": ", 1)
        assert f"| {kind} | {what} |" in text, name
