"""What to do with a prefix that was found: load it, compute it, or load from its back while computing from its front
until the two meet (the idea: S. Jin et al., "Compute Or Load KV Cache? Why Not Both?", arXiv 2410.03065).

The first token comes when the last layer of the prompt's end has been computed. With ``k`` blocks computed from the
front, and the others loaded, layer by layer where the end of the prompt already waits for them::

    first token = max(wait + compute(k blocks) + end,  link's queue + load(the others) + end's last layers)

The first part grows with k, the second falls: loading all and computing all are its two ends, and the best k is where
the two are equal. Since blocks of a prefix may lie in host memory and in a tier, which is slower, there are two ks.
They are found by halving the interval in which the time of the first token lies: a time is possible if what can be
loaded until then leaves no more to compute than fits. So a decision takes the same time for any number of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .checks import LISTS, check_number, checked_count
from .rates import RateSnapshot

Choice = Literal["compute", "load", "meet"]
HALVINGS = 12  # the first token's time is found up to 1/4096 of what can be gained
CLOSE = 1.001  # what takes no longer than that is as good
LEAST_GAIN = 0.01  # of the time of computing: for less nothing is moved
LEAST_S, MOST_S = 1e-100, 1e100  # of what a caller gives: nothing that follows from it overflows


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be computed or loaded still, in blocks of the prompt: ``[start, stop)``.

    Attributes:
        host: found in host memory.
        tier: found in a tier below. One of the two lies behind the other; an empty one anywhere.
        end_tokens: where what was found ends, and the end of the prompt begins, which is always computed.
        num_tokens: of the prompt.
    """

    host: tuple[int, int]
    tier: tuple[int, int]
    end_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Which blocks are loaded, and what each alternative is expected to take, in seconds from now to the first token.

    Attributes:
        choice: "meet" also where only some of what was found is loaded.
        host_first, tier_first: blocks of the prompt from there on, of those in host memory or in the tier, are loaded;
            those before are computed.
        compute_s, load_s, meet_s: of the alternatives; infinite where a rate is unknown or a source is not used.
        pass_s: when the model should begin with the end of the prompt.
    """

    choice: Choice
    host_first: int
    tier_first: int
    compute_s: float
    load_s: float
    meet_s: float
    pass_s: float

    @property
    def expected_s(self) -> float:
        """Of what was chosen."""
        return {"compute": self.compute_s, "load": self.load_s, "meet": self.meet_s}[self.choice]


def decide(
    rates: RateSnapshot,
    prompt: Prompt,
    *,
    chunk_tokens: int,
    num_layers: int,
    wait_s: float = 0.0,
    link_wait_s: float = 0.0,
    tier_wait_s: float = 0.0,
) -> Decision:
    """The quickest way to the first token of a prompt.

    Args:
        chunk_tokens: tokens that the model computes in one pass.
        wait_s: until the model is free for this prompt.
        link_wait_s, tier_wait_s: until the link and the tier have done what stands before.

    Where nothing is known of the model, or of the sources of what was found, all is computed.

    Raises:
        TypeError: not a snapshot, a prompt, or numbers.
        ValueError: a number out of its range: counts of at least 1, rates that are positive (infinite ones of sources
            too), waits that are finite and not negative; parts of the prompt that go backwards, overlap, or go on
            behind its end.

    Example:
        >>> from paddle_kv.offload.decision import Prompt, decide
        >>> from paddle_kv.offload.rates import RateSnapshot
        >>> rates = RateSnapshot(link_s=0.010, tier_s=float("inf"), base_s=0.001, slope_s=0.0, block_tokens=10)
        >>> found = decide(rates, Prompt((0, 100), (0, 0), 1000, 1010), chunk_tokens=512, num_layers=10)
        >>> found.choice, found.host_first, round(found.compute_s, 2), round(found.load_s, 2), round(found.meet_s, 2)
        ('meet', 50, 1.01, 1.0, 0.51)
    """
    _check_rates(rates)
    _check_prompt(prompt, rates.block_tokens)
    checked_count(chunk_tokens, "chunk_tokens", 1)
    checked_count(num_layers, "num_layers", 1)
    for name, seconds in (("wait_s", wait_s), ("link_wait_s", link_wait_s), ("tier_wait_s", tier_wait_s)):
        check_number(seconds, name, 0, MOST_S)
    return best_way(rates, prompt, chunk_tokens, num_layers, wait_s, link_wait_s, tier_wait_s)


def _check_rates(rates: RateSnapshot) -> None:
    if not isinstance(rates, RateSnapshot):
        raise TypeError(f"rates is {rates!r}; a RateSnapshot is expected")
    check_number(rates.link_s, "rates.link_s", LEAST_S, math.inf)
    check_number(rates.tier_s, "rates.tier_s", LEAST_S, math.inf)
    if rates.base_s is not None:
        check_number(rates.base_s, "rates.base_s", LEAST_S, MOST_S)
    check_number(rates.slope_s, "rates.slope_s", 0, MOST_S)
    checked_count(rates.block_tokens, "rates.block_tokens", 1)


def _check_prompt(prompt: Prompt, block_tokens: int) -> None:
    if not isinstance(prompt, Prompt):
        raise TypeError(f"prompt is {prompt!r}; a Prompt is expected")
    for name, part in (("prompt.host", prompt.host), ("prompt.tier", prompt.tier)):
        if not isinstance(part, LISTS) or len(part) != 2:
            raise TypeError(f"{name} is {part!r}; (start, stop) in blocks is expected")
        checked_count(part[1], f"{name}[1]", checked_count(part[0], f"{name}[0]"))
    if max(prompt.host[0], prompt.tier[0]) < min(prompt.host[1], prompt.tier[1]):
        raise ValueError(f"prompt.host = {prompt.host} overlaps prompt.tier = {prompt.tier}; each block is in one")
    found = max((stop for start, stop in (prompt.host, prompt.tier) if start < stop), default=0)
    end_tokens = checked_count(prompt.end_tokens, "prompt.end_tokens", found * block_tokens)
    checked_count(prompt.num_tokens, "prompt.num_tokens", end_tokens)


def best_way(
    rates: RateSnapshot,
    prompt: Prompt,
    chunk_tokens: int,
    num_layers: int,
    wait_s: float = 0.0,
    link_wait_s: float = 0.0,
    tier_wait_s: float = 0.0,
) -> Decision:
    """:func:`decide` of what the library has made itself: unchecked, as it is asked for many times a request."""
    host, tier = prompt.host, prompt.tier
    # In order of position: (start, stop, seconds a block from its source, the source's queue, what comes behind it).
    link_s = rates.link_s
    in_host = (host[0], host[1], link_s, link_wait_s, 0.0)
    in_tier = (tier[0], tier[1], max(rates.tier_s, link_s), tier_wait_s, link_s)
    first, second = (in_host, in_tier) if host[0] <= tier[0] else (in_tier, in_host)
    a_start, a_stop, a_s, a_wait, a_more = first
    b_start, b_stop, b_s, b_wait, b_more = second
    a_size, b_size, tokens = a_stop - a_start, b_stop - b_start, rates.block_tokens
    base_s, half_slope = rates.base_s, rates.slope_s / 2
    if base_s is None:
        return Decision("compute", host[1], tier[1], math.inf, math.inf, math.inf, wait_s)
    end_s = rates.prefill_s(prompt.end_tokens, prompt.num_tokens)
    first_pass = min(prompt.end_tokens + chunk_tokens, prompt.num_tokens)
    tail_s = end_s - rates.prefill_s(prompt.end_tokens, first_pass) * (1 - 1 / num_layers)
    base_s, slope_s = base_s * tokens, half_slope * tokens * tokens  # a block, and for each block before it
    least_s = wait_s + end_s  # nothing of what was found is computed
    all_computed_s = a_size * (base_s + slope_s * (a_start + a_stop)) + b_size * (base_s + slope_s * (b_start + b_stop))
    compute_s = least_s + all_computed_s
    if min(a_s if a_size else math.inf, b_s if b_size else math.inf) == math.inf:
        return Decision("compute", host[1], tier[1], compute_s, math.inf, math.inf, compute_s - end_s)
    load_s = _all_s(first, second, link_s, link_wait_s, tail_s, least_s, end_s, num_layers)
    low, high = least_s, min(compute_s, load_s)
    meet_s, loaded, busy_s = high, (0, 0), compute_s  # if it stays so, all is loaded or computed
    for _ in range(HALVINGS):
        if high <= low * CLOSE:  # or all is loaded, or computed, and nothing is better by as much
            break
        seconds = (low + high) / 2
        # If the first token comes then: how much of each part can be loaded, and how long the model computes.
        until_s = seconds - tail_s
        room = max(0, int((until_s - link_wait_s) / link_s))
        b_load = max(0, min(b_size, room, int((until_s - b_wait - b_more) / b_s)))
        left = b_size - b_load
        needed_s = least_s + left * (base_s + slope_s * (b_start + b_stop - b_load))
        if left:
            until_s = seconds - needed_s + wait_s
        a_load = max(0, min(a_size, room - b_load, int((until_s - a_wait - a_more) / a_s)))
        needed_s += (a_size - a_load) * (base_s + slope_s * (a_start + a_stop - a_load))
        if needed_s <= seconds:
            high = meet_s = seconds
            loaded, busy_s = (a_load, b_load), needed_s
        else:
            low = seconds
    choice: Choice = "meet"
    if meet_s > (1 - LEAST_GAIN) * compute_s:
        choice, loaded, busy_s = "compute", (0, 0), compute_s
    elif load_s <= meet_s * CLOSE:
        choice, loaded, busy_s = "load", (a_size, b_size), least_s
    starts = (a_stop - loaded[0], b_stop - loaded[1])
    host_first, tier_first = starts if first is in_host else starts[::-1]
    return Decision(choice, host_first, tier_first, compute_s, load_s, meet_s, busy_s - end_s)


def _all_s(
    first: tuple[int, int, float, float, float],
    second: tuple[int, int, float, float, float],
    link_s: float,
    link_wait_s: float,
    tail_s: float,
    ready_s: float,
    end_s: float,
    num_layers: int,
) -> float:
    """The first token if all is loaded, layer by layer."""
    size = first[1] - first[0] + second[1] - second[0]
    done_s, begun_s = link_wait_s + size * link_s, link_wait_s + size * link_s / num_layers
    for start, stop, source_s, source_wait_s, more_s in (first, second):
        if start < stop:
            blocks = stop - start  # a layer of them goes on while their source brings the next one
            taken_s = blocks * source_s + min(more_s, blocks * more_s / num_layers)
            done_s = max(done_s, source_wait_s + taken_s)
            begun_s = max(begun_s, source_wait_s + taken_s / num_layers)
    return max(ready_s, done_s + tail_s, begun_s + end_s)
