"""The end of the interpreter: who is closed, and in which order."""

from __future__ import annotations

import weakref

import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.peers import Listener, Receiver, Sender, at_exit
from tests.schedule.rig import WAIT_S, Rig


class Closable:
    def __init__(self, name: str = "", told: list[tuple[str, float | None]] | None = None) -> None:
        self.name, self.told = name, told

    def close(self, timeout_s: float | None = None) -> None:
        assert self.told is not None
        self.told.append((self.name, timeout_s))
        if self.name == "stuck":
            raise TimeoutError


def test_endpoints_are_closed_before_their_channels_and_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float | None]] = []
    monkeypatch.setattr(at_exit, "endpoints", [Closable("stuck", told), Closable("sender", told)])
    monkeypatch.setattr(at_exit, "threads", [Closable("stuck", told), Closable("loop", told)])
    at_exit.close_all()
    names = ("stuck", "sender", "stuck", "loop")
    assert told == [(name, at_exit.EXIT_TIMEOUT_S) for name in names]  # without a time-out it might not end


@pytest.mark.parametrize("known", [at_exit.endpoints, at_exit.threads])
def test_what_nobody_refers_to_is_not_kept_until_then(known: weakref.WeakSet[at_exit.Closable]) -> None:
    one = Closable()
    known.add(one)
    gone = weakref.ref(one)
    del one
    assert gone() is None


def test_each_end_and_each_channel_is_closed_then() -> None:
    rig = Rig(shared=True)
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, Receiver(scheduler) as receiver:
        sender = Sender(scheduler, bool)
        listener = Listener(receiver)
        assert {receiver, sender} <= set(at_exit.endpoints)
        assert {listener, listener._loop} <= set(at_exit.threads)
        sender.close(WAIT_S)
        listener.close(WAIT_S)
    rig.pool.close()
