"""What the policy that learns has learnt: chances beside plain counting, worths beside trying every time of keeping."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_kv.offload.returns import EDGES_S, HALVED_AT, NUM_PARTS, WIDTHS_S, Returns, gittins, part_of


def worth_by_trying(chances: list[float], start: int) -> float:
    """The best of all plans "keep until the end of that part, or its return"."""
    best = 0.0
    for end in range(start + 1, NUM_PARTS + 1):
        alive, returns, seconds = 1.0, 0.0, 0.0
        for part in range(start, end):
            returns += alive * chances[part]
            seconds += alive * WIDTHS_S[part] * (1 - chances[part] / 2)
            alive *= 1 - chances[part]
        best = max(best, returns / seconds)
    return best


@given(st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.0]), min_size=NUM_PARTS, max_size=NUM_PARTS))
def test_the_worth_is_the_best_of_all_times_of_keeping(chances: list[float]) -> None:
    alive = 1.0
    for start, found in enumerate(gittins(chances)):
        if alive < 1e-9:  # nobody comes here
            return
        lost = 4e-16 / (alive * WIDTHS_S[start])  # of chances that are summed up from the first part on
        assert found == pytest.approx(worth_by_trying(chances, start), rel=1e-6, abs=1e-12 + lost)
        alive *= 1 - chances[start]


def test_a_run_may_be_worth_more_later() -> None:
    """Who never comes within a minute is worth most right before."""
    chances = [0.0] * NUM_PARTS
    chances[part_of(60.0)] = 0.5
    found = gittins(chances)
    assert max(range(NUM_PARTS), key=found.__getitem__) == part_of(60.0)
    assert found[0] < found[part_of(30.0)] and found[-1] == 0.0


def test_ages_have_their_parts() -> None:
    assert part_of(0.0) == 0 and part_of(1e9) == NUM_PARTS - 1
    for part, (start_s, width_s) in enumerate(zip(EDGES_S, WIDTHS_S, strict=False)):
        assert part_of(start_s) == part_of(start_s + 0.99 * width_s) == part


def test_chances_are_those_of_what_was_counted() -> None:
    returns = Returns([0.05, 0.0], per_kind=4, per_group=2)
    rng = random.Random(1)
    true = [0.02 * (1 + part % 5) for part in range(NUM_PARTS)]
    for _ in range(4000):
        for part in range(NUM_PARTS):
            if rng.random() < true[part]:
                returns.came_back(1, part)
                break
            returns.survived[1][part] += 1
    found = returns.chances()
    for part in range(8):
        assert found[1][part] == pytest.approx(true[part], abs=0.02)
    assert found[0] == found[2] or abs(found[0][3] - true[3]) < 0.03  # of its group, nothing is known but that
    assert found[4] == found[7] == [0.0] * NUM_PARTS  # of the other kind nothing was seen


def test_what_was_long_ago_is_forgotten() -> None:
    returns = Returns([0.05], per_kind=1, per_group=1)
    for _ in range(3 * int(HALVED_AT)):
        returns.came_back(0, 3)
    assert sum(returns.returned[0]) <= HALVED_AT + 1


def test_nobody_lives_behind_a_part_from_which_all_come_back() -> None:
    assert gittins([1.0] + [0.5] * (NUM_PARTS - 1))[1:] == [0.0] * (NUM_PARTS - 1)


def test_a_class_leans_on_its_group_and_that_on_its_kind() -> None:
    returns = Returns([0.25, 0.5], per_kind=6, per_group=2)
    returns.returned[0][0], returns.survived[0][0] = 3.0, 5.0
    returns.returned[1][0] = 1.0  # all of them came back
    returns.survived[2][0] = 4.0  # none did
    found = returns.chances()
    kind = (4 + 2 * 0.25) / (4 + 9 + 2)
    groups = (4 + 8 * kind) / (4 + 5 + 8), (0 + 8 * kind) / (0 + 4 + 8)
    expected = [
        (3 + 8 * groups[0]) / (3 + 5 + 8),
        (1 + 8 * groups[0]) / (1 + 0 + 8),
        (0 + 8 * groups[1]) / (0 + 4 + 8),
        groups[1],
        kind,
        kind,
    ]
    assert [one[0] for one in found[:6]] == pytest.approx(expected)
    assert [one[1] for one in found[:6]] == pytest.approx([0.25] * 6)  # of this part nothing was seen
    assert found[4] is found[5] and found[6] is found[11]  # of those without runs it is one list
    assert found[6] == [0.5] * NUM_PARTS
    assert found[3] is not found[4]


def test_when_counts_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_kv.offload.returns.HALVED_AT", 4.0)
    returns = Returns([0.05, 0.05], per_kind=1, per_group=1)
    returns.survived[1][2] = 8.0
    seen = []
    for _ in range(8):
        returns.came_back(0, 3)
        seen.append((returns.returned[0][3], returns.survived[1][2]))
    #                                                  5 > 4             2.5 + 2 > 4              2.25 + 2 > 4
    assert seen == [(1, 8), (2, 8), (3, 8), (4, 8), (2.5, 4), (3.5, 4), (2.25, 2), (3.25, 2)]


def test_a_chance_for_each_part() -> None:
    for count in (NUM_PARTS - 1, NUM_PARTS + 1):
        with pytest.raises(ValueError, match=r"zip\(\) argument"):
            gittins([0.1] * count)
