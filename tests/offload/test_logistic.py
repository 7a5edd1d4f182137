"""A logistic regression: what each of its parts reckons, and that the processor has no say in it."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from paddle_kv.offload.logistic import FEW, dot, fitted, logistic, solved, total, totals, weighted

# What an older processor would have of the linear algebra and of NumPy, and what a newer one.
MACHINES = (
    {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX2 FMA3 AVX512F"},
    {"OPENBLAS_CORETYPE": "Haswell"},
)
FIT = """
from tests.offload.test_score import outcomes, taught
made = [taught(outcomes(count, seed, turns=(1, 2, 3, 4, 6))) for seed, count in enumerate((512, 1500, 4096))]
print([[weight.hex() for weight in one._weights] for one in made])
print([[[limit.hex() for limit in limits] for limits in one._limits] for one in made])
"""


def test_a_fit_is_the_same_bits_whatever_the_processor_can_do() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", FIT], env={**os.environ, **machine}, capture_output=True, check=True
        ).stdout
        for machine in MACHINES
    ]
    assert found[0] == found[1]
    assert found[0].count(b"0x") > 3 * (9 + 2 * 5) - 10


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 999])
def test_the_sum_of_each_row(count: int) -> None:
    values = np.random.default_rng(count).normal(size=(3, 2, count))
    before = values.copy()
    assert total(values) == pytest.approx(np.array([[math.fsum(row) for row in rows] for rows in values]))
    assert (values == before).all()


def test_sums_are_taken_in_one_order() -> None:
    """Of an odd number the last one is added to the first; the halves of what is left are added to each other."""
    assert total(np.array([1e16, 0.25, 0.0, 0.75, -1e16])) == 1.0
    assert total(np.array([0.25, 1e16, 0.75, 0.0, -1e16])) == 0.0


@pytest.mark.parametrize("count", [1, 5, FEW - 1, FEW, FEW + 1, 3 * FEW + 1])
def test_tables_together_have_the_sums_that_each_has(count: int) -> None:
    tables = [np.random.default_rng(rows).normal(size=(rows, count)) for rows in (1, 4, 2)]
    assert totals(tables) == [total(table).tolist() for table in tables]


def test_the_chance_is_that_of_the_odds_as_far_as_they_go() -> None:
    odds = np.array([-40.0, -30.0, -3.5, -1e-9, 0.0, 0.7, 12.0, 30.0, 1e9])
    expected = [1 / (1 + math.exp(-min(30.0, max(-30.0, one)))) for one in odds]
    assert logistic(odds).tolist() == pytest.approx(expected, rel=1e-11)
    assert logistic(np.array([0.0])) == 0.5


def test_what_a_matrix_makes_of_the_solution_is_the_right_side() -> None:
    rng = np.random.default_rng(4)
    for size in range(1, 10):
        half = rng.normal(size=(size, size))
        matrix, right = half @ half.T + np.eye(size), rng.normal(size=size)
        lower = [matrix[row, : row + 1].tolist() for row in range(size)]
        before = [list(row) for row in lower]
        assert matrix @ np.array(solved(lower, right.tolist())) == pytest.approx(right)
        assert lower == before


def test_facts_are_weighed_as_a_prompt_that_comes_is() -> None:
    """The same bits, where ``sum`` adds one by one."""
    rng = random.Random(5)
    rows = [[rng.gauss(0, 9) for _ in range(50)] for _ in range(9)]
    weights = [rng.gauss(0, 1) for _ in rows]
    expected = [dot(list(column), weights) for column in zip(*rows, strict=True)]
    assert weighted(np.array(rows), weights).tolist() == expected


def test_dot_goes_as_far_as_the_shorter() -> None:
    assert dot([1.0, 2.0, 3.0], [4.0, 5.0]) == dot([4.0, 5.0], [1.0, 2.0, 3.0]) == 14.0
    assert dot([], [1.0]) == 0.0


def test_an_outcome_counts_as_its_share() -> None:
    """Two of the same count as one of twice the share."""
    rng = np.random.default_rng(6)
    facts = np.vstack([np.ones(40), rng.normal(size=(2, 40))])
    back = (rng.random(40) < 0.4) * 1.0
    doubled = fitted(np.hstack([facts, facts]), np.hstack([back, back]), np.ones(80))
    assert fitted(facts, back, np.full(40, 2.0)) == pytest.approx(doubled)
