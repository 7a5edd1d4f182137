"""What a found prefix is worth, by what is known of the rates now."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .decision import Decision, Prompt, best_way
from .found import BlockState
from .rates import LINK, TIER, Rates

LEAST_GAIN = 0.01  # of the time of computing
TRY_BLOCKS = 16
TRY_S = 30.0


def weigh(
    rates: Rates, states: Sequence[BlockState], *, num_tokens: int, chunk_tokens: int, num_layers: int
) -> tuple[Decision, int]:
    """Of the first blocks of a prompt, which were found there, and are not loaded yet; and how many blocks of the tier
    are to be loaded by that: the last ones, wherever they stand.

    Those of host memory and those of the tier count as if each were together, in the order in which the first ones are:
    where they alternate, that is not quite so.
    """
    stop, in_tier = len(states), states.count(BlockState.TIER)
    host, tier = (0, stop - in_tier), (stop - in_tier, stop)
    if states and states[0] is BlockState.TIER:
        host, tier = (in_tier, stop), (0, in_tier)
    worth = best_way(
        rates.snapshot(),
        Prompt(host, tier, stop * rates.block_tokens, num_tokens),
        chunk_tokens=chunk_tokens,
        num_layers=num_layers,
    )
    return worth, tier[1] - worth.tier_first


def is_load_sooner(rates: Rates, states: Sequence[BlockState], num_tokens: int, num_layers: int) -> bool:
    """Whether a model that computes the prompt in one pass should wait for these blocks of host memory."""
    worth, _ = weigh(rates, states, num_tokens=num_tokens, chunk_tokens=num_tokens, num_layers=num_layers)
    if worth.load_s < (1 - LEAST_GAIN) * worth.compute_s:
        return True
    # Nothing else would find out that a link which has failed works again.
    pace_s, compute_s = rates.load_s(len(states)), rates.compute_s(0, len(states))
    if not states or pace_s is None or compute_s is None or 2 * pace_s > compute_s:
        return False
    return math.isinf(rates.snapshot().link_s) and rates.take_probe(LINK)


def to_bring(rates: Rates, states: Sequence[BlockState]) -> tuple[int, float]:
    """How many of the first blocks to bring into host memory beside the computation, where they lie in the tier, and
    the time for it. Of a tier that is not known, or was late, a few: what comes in time is how it becomes known."""
    below = states.count(BlockState.TIER)
    if not below:
        return 0, 0.0
    if not math.isinf(rates.snapshot().tier_s):
        return len(states), min(rates.late_s(below, TIER), TRY_S)
    return min(len(states), states.index(BlockState.TIER) + TRY_BLOCKS) if rates.take_probe(TIER) else 0, TRY_S
