"""The score of a prompt: what it is told, when it learns, and that what it has learnt is the fit that it says."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paddle_kv.offload import score
from paddle_kv.offload.returns import EDGES_S, part_of
from paddle_kv.offload.score import Facts, Score

HORIZON_S = EDGES_S[score.HORIZON_PART]
NUM_FACTS = 9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, 7, 0, 3.0), (1.0, 1.0, 0.0, 0.0, 3.0, 3.0, 0.0, 3.0, 2.0)),
        ((2, 3, 1, 0.0), (1.0, 0.0, 1.0, 1.0, 2.0, 0.0, 1 / 3, math.log2(3), 0.0)),
        ((4, 15, 12, 1.0), (1.0, 0.0, 0.0, 2.0, 4.0, 0.0, 0.8, 2.0, 1.0)),
        ((16, 1, 5, 7.0), (1.0, 0.0, 0.0, 4.0, 1.0, 0.0, 5.0, 0.0, 3.0)),  # grown by nothing, not by less
    ],
)
def test_facts(given: tuple[int, int, int, float], expected: Facts) -> None:
    assert Score.facts(*given) == pytest.approx(expected)


def test_before_it_has_learnt_all_are_in_the_middle_of_their_turn() -> None:
    classes = [Score().class_of(turn, Score.facts(turn, 10, 0, 1.0)) for turn in range(1, 12)]
    assert classes == [1, 4, 7, 10, 13, 13, 13, 13, 13, 13, 13]


def outcomes(count: int, seed: int, turns: tuple[int, ...] = (1, 2)) -> list[tuple[Facts, int, bool]]:
    """Long prompts come back rather than short ones, those of the second turn rather than of the first."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        turn, length = int(rng.choice(turns)), int(rng.integers(1, 200))
        facts = Score.facts(turn, length, int(rng.integers(0, length + 1)), float(rng.exponential(30.0)))
        back = rng.random() < 1 / (1 + math.exp(4.0 - math.log2(1 + length) * 0.6 - turn))
        found.append((facts, turn, bool(back)))
    return found


def taught(
    given: list[tuple[Facts, int, bool]], *, touched_s: float = 0.0, now_s: float = HORIZON_S, rounds: int = 1
) -> Score:
    made = Score()
    for _ in range(rounds):
        for facts, turn, back in given:
            made.learn(facts, turn, back, touched_s)
    made.fit(now_s)
    return made


def has_learnt(made: Score) -> bool:
    return bool(made._weights)


def test_when_it_learns() -> None:
    given = outcomes(512, 1)
    assert not has_learnt(taught(given[:511]))
    assert has_learnt(taught(given))
    assert not has_learnt(taught(given, now_s=HORIZON_S - 1e-6))  # what becomes of them is not known yet
    assert has_learnt(taught(given, touched_s=50.0, now_s=HORIZON_S + 50.0))


def test_outcomes_are_known_when_lru_would_not_have_kept_them_for_long() -> None:
    for stay_s, horizon_s in ((0.5, 30.0), (7.0, 30.0), (20.0, 80.0), (100.0, 400.0), (127.0, 508.0), (1e6, 512.0)):
        made = Score()
        part = made.look_ahead(stay_s)
        assert part == made.horizon_part == part_of(horizon_s)
        for after_s, learns in ((-1e-6, False), (0.0, True)):
            for facts, turn, back in outcomes(512, 1):
                made.learn(facts, turn, back, 0.0)
            made.fit(EDGES_S[part] + after_s)
            assert has_learnt(made) == learns
    assert Score().horizon_part == part_of(180.0)


def test_few_outcomes_that_are_known_are_not_enough() -> None:
    for known, learns in ((95, False), (96, True)):
        made = Score()
        for number, (facts, turn, back) in enumerate(outcomes(512, 2)):
            made.learn(facts, turn, back, 0.0 if number < known else 1.0)
        made.fit(HORIZON_S)
        assert has_learnt(made) == learns
        made._weights = []
        made.fit(HORIZON_S + 1.0)  # not before there are as many new ones
        assert not has_learnt(made)


def test_it_learns_anew_with_so_many_new_outcomes() -> None:
    made = taught(outcomes(512, 1))
    before = made._weights
    for learns, count in ((False, 511), (True, 1)):
        for facts, turn, back in outcomes(count, 13):
            made.learn(facts, turn, back, 0.0)
        made.fit(HORIZON_S)
        assert (made._weights != before) == learns


def test_only_the_last_outcomes_count() -> None:
    early, late = outcomes(600, 3), outcomes(4096, 4)
    assert taught(early + late)._weights == taught(late)._weights
    assert taught(early[:1] + late[1:])._weights != taught(late)._weights


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_are_where_the_penalised_likelihood_is_largest(seed: int) -> None:
    """There its slope is zero: that of the outcomes, each by its blocks, and that of a penalty of half the square of
    each weight of facts with spread one."""
    given = outcomes(1500, seed, turns=(1, 2, 3))
    made = taught(given)
    facts = np.array([one[0] for one in given])
    back = np.array([one[2] for one in given], float)
    spread = facts.std(0)
    scale = np.where(spread > 1e-6, spread, 1.0)
    weights = np.array(made._weights) * scale
    chance = 1 / (1 + np.exp(-(facts / scale) @ weights))
    blocks = 2 ** facts[:, 4]  # and one more
    slope = (facts / scale).T @ (blocks / blocks.mean() * (back - chance)) - weights
    assert np.abs(slope).max() < 1e-6 * len(given)
    assert chance[back == 1].mean() > chance[back == 0].mean() + 0.1


def test_facts_that_are_always_the_same_weigh_next_to_nothing() -> None:
    """0.1 has a spread of rounding; divided by that a weight would be what it likes."""
    rng = np.random.default_rng(5)
    given = [((1.0, 0.1, float(x)) + (0.1,) * 6, 1, bool(x > 0.5)) for x in rng.random(700)]
    made = taught(given)
    weights = made._weights
    assert np.isfinite(weights).all() and max(abs(weight) for weight in weights[3:]) < 1.0
    assert weights[2] > 1.0


def test_what_is_told_apart_exactly_does_not_overflow() -> None:
    given = [((1.0, float(x), 0, 0, 0, 0, 0, 0, 0), 1, x >= 350) for x in range(700)]
    with np.errstate(all="raise"):
        made = taught(given)
    scores = [sum(f * w for f, w in zip(facts, made._weights, strict=True)) for facts, _, _ in given]
    assert scores == sorted(scores)


def test_the_levels_are_thirds_of_a_turn_by_score() -> None:
    given = outcomes(1201, 6)
    made = taught(given)
    for turn in (1, 2):
        own = [facts for facts, of, _ in given if of == turn]
        assert len(own) % 3 != 1  # else a limit is the score of one of them, and rounding decides about it
        scores = [float(np.dot(facts, made._weights)) for facts in own]
        levels = [made.class_of(turn, facts) - 3 * (turn - 1) for facts in own]
        assert sorted(set(levels)) == [0, 1, 2]
        for level in range(3):
            assert abs(levels.count(level) - len(own) / 3) <= 1
        assert [level for _, level in sorted(zip(scores, levels, strict=True))] == sorted(levels)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_that_look_the_same_stay_in_the_middle(seed: int) -> None:
    """First turns of one block each, of which nothing was seen before: rounding put all of them at the top or at the
    bottom, anew with each fit."""
    rng = random.Random(seed)
    first = [(Score.facts(1, 1, 0, 0.0), 1, rng.random() < 0.3) for _ in range(700)]
    made = taught(first + outcomes(500, seed, turns=(2, 3)))
    assert made._limits[0] == [-math.inf, math.inf]
    assert {made.class_of(1, facts) for facts, _, _ in first} == {1}


@pytest.mark.parametrize(
    ("counts", "levels"),
    [
        ((100, 100, 100), (0, 1, 2)),
        ((30, 200, 70), (0, 1, 2)),
        ((160, 140), (0, 2)),  # the one edge is the nearest to both
        ((60, 240), (0, 1)),
        ((240, 60), (1, 2)),
        ((200, 100), (1, 2)),
        ((300,), (1,)),
        ((50, 50, 50, 50, 50, 50), (0, 0, 1, 1, 2, 2)),
    ],
)
def test_a_level_takes_scores_that_are_the_same_as_a_whole(counts: tuple[int, ...], levels: tuple[int, ...]) -> None:
    rng = random.Random(7)
    scores = sorted(0.5 * which + rng.uniform(0, 1e-9) for which, count in enumerate(counts) for _ in range(count))
    made = Score()
    made._weights, made._limits = [1.0], [Score._thirds(np.array(scores))] * score.TURNS
    assert tuple(made.class_of(1, (0.5 * which,)) for which in range(len(counts))) == levels
    assert tuple(made.class_of(1, (0.5 * which + 0.2,)) for which in range(len(counts))) == levels


@pytest.mark.parametrize(("of_the_third", "levels"), [(95, {1}), (96, {0, 1, 2})])
def test_a_turn_with_few_outcomes_has_one_level(of_the_third: int, levels: set[int]) -> None:
    third = outcomes(of_the_third, 8, turns=(3,))
    made = taught(outcomes(1000, 7) + third)
    assert {made.class_of(3, facts) - 6 for facts, _, _ in third} == levels


def test_turns_behind_the_last_one_are_one_group() -> None:
    made = taught(outcomes(1200, 9, turns=(4, 5, 6, 30)))
    late = [one for one in outcomes(300, 10, turns=(5, 12, 40))]
    assert {made.class_of(turn, facts) // 3 for facts, turn, _ in late} == {4}
    assert len(made._limits) == 5 and [bool(limits) for limits in made._limits] == [False] * 3 + [True, True]
    for turn in (5, 31):
        assert {made.class_of(turn, facts) for facts, _, _ in late} == {12, 13, 14}


def test_levels_go_when_a_turn_is_not_seen_any_more() -> None:
    made = taught(outcomes(1000, 11))
    assert made._limits[0]
    for facts, turn, back in outcomes(4096, 12, turns=(2,)):
        made.learn(facts, turn, back, 0.0)
    made.fit(HORIZON_S)
    assert made._limits[0] == [] and made._limits[1]


def test_the_classes_are_all_levels_of_all_turns() -> None:
    made = Score()
    made._weights = [1.0]
    made._limits = [[0.0, 1.0] for _ in range(score.TURNS)]
    found = [made.class_of(turn, (value,)) for turn in range(1, 2 * score.TURNS) for value in (-0.5, 0.5, 1.5)]
    assert sorted(set(found)) == list(range(score.CLASSES))
