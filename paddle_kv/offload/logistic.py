"""A logistic regression whose result is the same bits on every machine.

Sums of a linear algebra library, and functions like the exponential, round as the instructions of the processor have
it, and which of two runs goes first would depend on that. Here every sum is taken in one order, by operations whose
result IEEE 754 prescribes.
"""

from __future__ import annotations

from itertools import accumulate
from math import sqrt
from typing import Any

import numpy as np

RIDGE = 1.0
NEWTON_STEPS = 6
SAME = 1e-9  # of a value: what rounding makes of the spread of equal ones
MOST = 30.0  # of a logarithm of odds, either way
HALVINGS = 10  # of an exponent, before it is small enough for a few terms of the series
TERMS = 6
FEW = 256  # columns: so many of several tables are folded together

Array = Any  # of float64


def fitted(facts: Array, back: Array, shares: Array) -> list[float]:
    """The weights of the facts, by Newton's method.

    Args:
        facts: a row for each fact, with its value in each outcome.
        back: 1.0 for each outcome that is to be likely, 0.0 for the others.
        shares: how much each outcome counts, 1.0 on average.
    """
    count = facts.shape[1]
    mean = total(facts) / count
    spread = np.sqrt(total((facts - mean[:, None]) ** 2) / count)
    scale = np.where(spread > SAME * np.abs(facts).max(1), spread, 1.0)
    scaled = facts / scale[:, None]
    weights = [0.0] * len(facts)
    for _ in range(NEWTON_STEPS):
        chance = logistic(weighted(scaled, weights))
        bends = scaled * (shares * chance * (1 - chance))
        curve = [bends[: row + 1] * scaled[row] for row in range(len(scaled))]  # its lower half
        *curve, slope = totals([*curve, scaled * (shares * (back - chance))])
        for row, weight in enumerate(weights):
            slope[row] -= RIDGE * weight
            curve[row][row] += RIDGE
        weights = [weight + step for weight, step in zip(weights, solved(curve, slope), strict=True)]
    return [weight / size for weight, size in zip(weights, scale.tolist(), strict=True)]


def total(values: Array) -> Array:
    """The sum of each row, halves on each other: NumPy's own ``sum`` may take them in any order."""
    return folded_to(1, values)[..., 0]


def totals(tables: list[Array]) -> list[list[float]]:
    """:func:`total` of each of several tables with as many columns: their last halves together, which costs fewer
    calls."""
    sums = total(np.concatenate([folded_to(FEW, table) for table in tables])).tolist()
    ends = list(accumulate(map(len, tables)))
    return [sums[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def folded_to(few: int, values: Array) -> Array:
    """At most so many columns, whose sum is that of all."""
    while (count := values.shape[-1]) > few:
        half = count // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        if count % 2:
            folded[..., 0] += values[..., -1]
        values = folded
    return values


def weighted(facts: Array, weights: list[float]) -> Array:
    """Of each outcome the sum of its facts by their weights, from the first to the last."""
    found = np.zeros(facts.shape[1])
    for values, weight in zip(facts, weights, strict=True):
        found += values * weight
    return found


def logistic(odds: Array) -> Array:
    """The chance by the logarithm of the odds."""
    part = np.clip(odds, -MOST, MOST) * 0.5**HALVINGS
    power = np.ones_like(part)
    for term in range(TERMS, 0, -1):
        power = 1 + part / term * power
    for _ in range(HALVINGS):
        power = power * power
    return power / (1 + power)


def solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """By A. L. Cholesky's method: the lower half of a positive definite matrix, and what it shall give."""
    lower: list[list[float]] = []
    found: list[float] = []  # of the lower half alone
    for row, value in zip(matrix, right, strict=True):
        own: list[float] = []
        for above in lower:
            own.append((row[len(own)] - dot(own, above)) / above[-1])
        own.append(sqrt(row[len(own)] - dot(own, own)))
        lower.append(own)
        found.append((value - dot(own, found)) / own[-1])
    for at in range(len(found) - 1, -1, -1):
        found[at] /= lower[at][at]
        for before in range(at):
            found[before] -= lower[at][before] * found[at]
    return found


def dot(one: list[float], other: list[float]) -> float:
    """As far as the shorter one goes; ``sum`` rounds by the version of Python."""
    found = 0.0
    for left, right in zip(one, other, strict=False):
        found += left * right
    return found
