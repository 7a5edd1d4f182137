"""What is expected costs an urgent prompt, and a queue of prompts, little: times of a server with throttled storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.offload.urgent_times import Queue

TRIES = 4  # of a machine that may have other work


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    """The tier is twice as quick as the model."""
    made = Queue(tmp_path, 0.01, 2.0)
    yield made
    made.close()


def least(measure: Callable[[], float], most_s: float) -> float:
    """Of several tries, until one is as quick as that."""
    found = measure()
    for _ in range(TRIES - 1):
        if found <= most_s:
            break
        found = min(found, measure())
    return found


def test_an_urgent_prompt_beside_expected_ones(queue: Queue) -> None:
    """Behind all that is expected it took 2.7 times as long as alone."""
    alone_s = min(queue.urgent_s(expects=False) for _ in range(2))
    assert least(lambda: queue.urgent_s(expects=True), 1.7 * alone_s) <= 1.7 * alone_s


def test_a_queue_of_expected_prompts(queue: Queue) -> None:
    """While they computed what was just being read for them, they took 1.26 times as long as if nobody expected them,
    and 1.12 while they were read from the front."""
    unexpected_s = min(queue.all_s(expects=False) for _ in range(2))
    assert least(lambda: queue.all_s(expects=True), 1.13 * unexpected_s) <= 1.13 * unexpected_s
