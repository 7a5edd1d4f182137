from __future__ import annotations

import signal

from tests.offload.killed_ranks import run


def test_ranks_that_are_killed_anywhere_are_missed_and_the_others_go_on() -> None:
    assert run(4, seed=3, timeout_s=5.0).kills == 4


def test_a_rank_that_is_stopped_is_lost_after_its_time_and_replaced() -> None:
    assert run(1, seed=1, timeout_s=0.5, number=signal.SIGSTOP).kills == 1
