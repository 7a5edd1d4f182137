"""Figures that are measured while serving: how long bytes take, and how long tokens take. Exponentially weighted."""

from __future__ import annotations

import math

WEIGHT = 0.1  # of a new observation; of the first ones more: 1, 1/2, 1/3, ...
BAD_WEIGHT = 0.5  # of one that is far slower than expected
FIRST_SPREAD = 0.2  # of a figure that was observed once
BAND_SPREADS = 4.0  # what lies farther from the figure is far
LEAST_BAND = math.log(1.5)
MOST_BAND = math.log(4.0)  # of a source that stalls now and then too: whoever waits for it waits no longer
MOST_GOOD = math.log(4.0)  # a single observation counts for no more than four times as quick
QUICK = 0.5  # of what is expected of a pass: two that are quicker than that are no noise


class Pace:
    """Seconds a byte. Bad news is learned at once, good news slowly.

    It is kept as a logarithm: rates spread by factors, and a stall of ten seconds is a large factor and not the end of
    all averages.

    Attributes:
        spread: mean distance of an observation from the figure, as a logarithm: 0.1 is about 10 %.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self.spread = FIRST_SPREAD
        self.observations = 0

    @property
    def s_per_byte(self) -> float | None:
        """None if nothing was observed."""
        return math.exp(self._log) if self.observations else None

    @property
    def band(self) -> float:
        """As a logarithm; what lies farther from the figure is no noise."""
        return min(max(BAND_SPREADS * self.spread, LEAST_BAND), MOST_BAND)

    def observe(self, s_per_byte: float, good_weight: float = WEIGHT) -> None:
        found = math.log(max(s_per_byte, 1e-18))
        self.observations += 1
        if self.observations == 1:
            self._log = found
            return
        off, band = found - self._log, self.band
        weight = max(good_weight, 1.0 / self.observations)
        if off > band:
            self._log += max(BAD_WEIGHT, weight) * off
        else:
            self._log += weight * max(off, -MOST_GOOD)
        self.spread += weight * (min(abs(off), band) - self.spread)

    def at_least(self, s_per_byte: float) -> None:
        """It took longer than this, and nobody knows how much: twice this, unless more is known."""
        found = math.log(max(2 * s_per_byte, 1e-18))
        self._log = max(self._log, found) if self.observations else found
        self.observations += 1

    def set(self, s_per_byte: float, spread: float) -> None:
        self._log, self.spread = math.log(s_per_byte), spread
        self.observations = max(self.observations, round(1 / WEIGHT))


class Prefill:
    """Seconds a token = ``base_s`` + ``slope_s`` * its position, since each attends to all before it: weighted least
    squares, in which older observations count for less.

    Nothing makes a model quicker than it is, and much makes a pass slower: kernels that are compiled, a pause, others
    beside it. So two passes that were far quicker than expected, one behind the other, are believed: who believes that
    computing is slow loads, and never hears of it.

    Attributes:
        is_doubted: the last pass was far quicker than expected, and the one before it was not.
    """

    def __init__(self) -> None:
        self.base_s: float | None = None  # None if nothing was observed
        self.slope_s = 0.0
        self.spread = FIRST_SPREAD
        self.observations = 0
        self._sums = [0.0] * 5  # of the weights, and with x, y, x x and x y: x the middle position, y seconds a token
        self._quick_tokens = 0  # of the last pass, if it was far quicker than expected

    @property
    def is_doubted(self) -> bool:
        return self._quick_tokens > 0

    def seconds(self, start: int, stop: int) -> float:
        """Of these tokens; something must have been observed."""
        assert self.base_s is not None
        return (stop - start) * (self.base_s + self.slope_s * (start + stop) / 2)

    def observe(self, start: int, num_tokens: int, seconds: float) -> None:
        x, y = start + num_tokens / 2, seconds / num_tokens
        if self.base_s is not None:
            y = self._compared(num_tokens, y, self.seconds(start, start + num_tokens) / num_tokens)
        self.observations += 1
        keep = 1 - WEIGHT / 4 if self.observations > 8 else 1.0
        for i, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[i] = keep * self._sums[i] + num_tokens * value
        self._fit()

    def _compared(self, num_tokens: int, found: float, expected: float) -> float:
        """What of the seconds a token that were found counts."""
        is_quick = found < QUICK * expected
        if is_quick and (self._quick_tokens or (self.observations == 1 and num_tokens >= self._sums[0] / 2)):
            self._scale(found / expected, num_tokens)
            return found
        if is_quick or 2 * num_tokens >= self._quick_tokens:  # of few tokens each takes longer: that says nothing
            self._quick_tokens = num_tokens if is_quick else 0
        off = math.log(max(found, 1e-18) / max(expected, 1e-18))
        weight = max(WEIGHT, 1.0 / (self.observations + 1))
        self.spread += weight * (min(abs(off), 1.0) - self.spread)
        return min(found, 2 * expected) if self.observations >= 3 else found  # a pause of the process is not the model

    def _scale(self, ratio: float, num_tokens: int) -> None:
        """All that was observed takes so many times as long, and counts no more than a pass over so many tokens."""
        keep = min(1.0, num_tokens / self._sums[0])
        self._sums = [keep * value * (ratio if i in (2, 4) else 1.0) for i, value in enumerate(self._sums)]
        self._quick_tokens, self.spread = 0, FIRST_SPREAD

    def _fit(self) -> None:
        weight, x, y, xx, xy = self._sums
        mean_x, mean_y = x / weight, y / weight
        variance = xx / weight - mean_x * mean_x
        slope = self.slope_s
        if variance > 0.01 * mean_x * mean_x:  # else all of them stand at one place, which tells no slope
            slope = (xy / weight - mean_x * mean_y) / variance
        slope = min(max(slope, 0.0), mean_y / max(mean_x, 1.0))  # neither part is negative
        self.slope_s, self.base_s = slope, max(mean_y - slope * mean_x, 0.01 * mean_y)

    def set(self, base_s: float, slope_s: float) -> None:
        """As if it had been observed, over positions up to 100,000."""
        self.base_s, self.slope_s, self._quick_tokens = base_s, slope_s, 0
        self._sums = [0.0] * 5
        for x in (1_000.0, 30_000.0, 100_000.0):
            y = base_s + slope_s * x
            for i, value in enumerate((1.0, x, y, x * x, x * y)):
                self._sums[i] += 10_000 * value
        self.observations = max(self.observations, 8)
