"""Either side is killed at points of its work: no hang, no wrong byte that counts as loaded, all blocks back."""

from __future__ import annotations

import pytest

from tests.peers.kills import RECEIVER_POINTS, SENDER_POINTS, kill_a_receiver, kill_a_sender


@pytest.mark.parametrize("at", range(SENDER_POINTS + 1))
def test_a_sender_is_killed(at: int) -> None:
    ended = kill_a_sender(at)
    assert ended == "done" if at == SENDER_POINTS else ended in ("cancelled", "failed", "done")


@pytest.mark.parametrize("at", [*range(RECEIVER_POINTS), RECEIVER_POINTS + 9])
def test_a_receiver_is_killed(at: int) -> None:
    ended = kill_a_receiver(at)
    assert ended == "done" if at > RECEIVER_POINTS else ended in ("refused", "cancelled", "done")
