"""Some of the points at which a side of a hand-over by a fabric can die; ``kills.py`` has all."""

from __future__ import annotations

import pytest

from paddle_kv.peers import receiver
from paddle_kv.peers.fabrics.shared_memory import SharedMemoryFabric
from tests.peers.fabrics.kills import RECEIVER_POINTS, SENDER_POINTS, kill_a_receiver, kill_a_sender
from tests.tiers.mooncake_cluster import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.parametrize("at", range(1, SENDER_POINTS + 4, 5))
def test_a_sender_is_killed(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "SETTLE_S", 0.05)
    assert kill_a_sender(SharedMemoryFabric, at) in ("cancelled", "failed", "done")


@pytest.mark.parametrize("at", range(0, RECEIVER_POINTS, 4))
def test_a_receiver_is_killed(at: int) -> None:
    assert kill_a_receiver(SharedMemoryFabric, at) in ("refused", "cancelled", "done")
