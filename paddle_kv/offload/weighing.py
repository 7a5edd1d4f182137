"""What a found prefix is worth, by what is known of the rates now."""

from __future__ import annotations

from collections.abc import Sequence

from .decision import Decision, Prompt, decide
from .found import BlockState
from .rates import Rates


def weigh(
    rates: Rates,
    states: Sequence[BlockState],
    *,
    start: int = 0,
    num_tokens: int,
    chunk_tokens: int,
    num_layers: int,
    link_wait_s: float = 0.0,
    tier_wait_s: float = 0.0,
) -> Decision:
    """Of the blocks from ``start`` on, which were found there, and are not loaded yet.

    Those of host memory and those of the tier count as if each were together, in the order in which the first ones are:
    where they alternate, that is not quite so.
    """
    stop = start + len(states)
    in_tier = sum(state is BlockState.TIER for state in states)
    if states and states[0] is BlockState.TIER:
        border = start + in_tier
        host, tier = (border, stop), (start, border)
    else:
        border = stop - in_tier
        host, tier = (start, border), (border, stop)
    prompt = Prompt(host, tier, stop * rates.block_tokens, num_tokens)
    return decide(
        rates.snapshot(),
        prompt,
        chunk_tokens=chunk_tokens,
        num_layers=num_layers,
        link_wait_s=link_wait_s,
        tier_wait_s=tier_wait_s,
    )
