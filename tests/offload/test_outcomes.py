"""What became of the last prompts, in columns, against a list of them."""

from __future__ import annotations

import random

import pytest

from paddle_kv.offload.outcomes import Outcomes


@pytest.mark.parametrize("most", [1, 2, 7])
def test_the_last_ones_are_remembered_with_all_that_was_known(most: int) -> None:
    rng, made = random.Random(most), Outcomes(most)
    added: list[tuple[tuple[float, ...], int, bool, float]] = []
    for _ in range(5 * most + 3):
        one = (tuple(rng.random() for _ in range(3)), rng.randint(1, 9), rng.random() < 0.5, rng.uniform(0.0, 10.0))
        made.add(*one)
        added.append(one)
        limit_s = rng.uniform(0.0, 12.0)
        known = [last for last in added[-most:] if last[3] <= limit_s]
        facts, turns, back = made.until(limit_s)
        assert facts.shape == (3, len(known)) and facts.flags.c_contiguous
        assert facts.T.tolist() == [list(last[0]) for last in known]
        assert turns.tolist() == [last[1] for last in known]
        assert back.tolist() == [float(last[2]) for last in known] and back.dtype == float
        assert len(made._turns) <= 2 * most


def test_who_was_used_at_the_very_time_counts() -> None:
    made = Outcomes(4)
    made.add((1.0,), 1, True, 3.0)
    assert len(made.until(3.0)[2]) == 1 and len(made.until(2.999)[2]) == 0
