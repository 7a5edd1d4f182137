"""A made trace: people who go on talking about a long text. Most of each prompt is the one before it."""

from __future__ import annotations

import itertools
import random

from .trace import TOKENS_PER_BLOCK, Request


def conversations(
    num_requests: int,
    requests_per_s: float,
    *,
    seed: int = 0,
    most_first_blocks: int = 64,
    most_turns: int = 12,
    mean_pause_s: float = 60.0,
) -> list[Request]:
    """In order of arrival. A conversation begins with 4 to ``most_first_blocks`` blocks of 512 tokens, has 2 to
    ``most_turns`` turns, and each adds up to three blocks and what is left of one. Conversations begin at random."""
    rng, ids = random.Random(seed), itertools.count()
    requests: list[Request] = []
    begun_s = 0.0
    turns_a_conversation = (2 + most_turns) / 2
    while len(requests) < 2 * num_requests:  # the first ones in time are taken of more, else the end would be thin
        begun_s += rng.expovariate(requests_per_s / turns_a_conversation)
        when_s, blocks = begun_s, [next(ids) for _ in range(rng.randint(4, most_first_blocks))]
        for _ in range(rng.randint(2, most_turns)):
            rest = rng.randint(1, TOKENS_PER_BLOCK - 1)
            requests.append(Request(when_s, TOKENS_PER_BLOCK * len(blocks) + rest, list(blocks)))
            blocks += [next(ids) for _ in range(rng.randint(1, 3))]
            when_s += rng.expovariate(1 / mean_pause_s)
    return sorted(requests, key=lambda request: request.arrival_s)[:num_requests]
