"""Continuations of requests that were made such that it is known how theirs may look."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path

import pytest

from tests.offload import continuations
from tests.offload.continuations import (
    FRESH_BLOCKS,
    GAP_SPREAD,
    TICK_S,
    Donor,
    Looks,
    Turn,
    continuation,
    kaplan_meier,
    turns_of,
)
from tests.offload.streams import Prompts

# Kinds of sessions by the blocks of their first turns, which are far from each other: when they go on, and by how much,
# in turns one way and the other.
RETURNS = {4: ((60.0, 3), (200.0, 9)), 64: ((200.0, 16), (200.0, 16))}
NEVER = 16
LENGTHS = (4, 64, NEVER)
COPIED = 7  # blocks of the long session before that every other long one begins with
BEGUN = 300


def made_trace() -> Prompts:
    """All begin with block 0; none has more than two turns."""
    fresh = count(1)
    prompts: Prompts = []
    longest: list[int] = []
    for number in range(BEGUN):
        begun_s, length = 3.0 * number, LENGTHS[number % 3]
        head = longest[:COPIED] if length == 64 and number % 2 else [0]
        prompt = head + [next(fresh) for _ in range(length - len(head))]
        longest = prompt if length == 64 else longest
        prompts.append((begun_s, prompt))
        if length in RETURNS:
            gap_s, growth = RETURNS[length][number // 3 % 2]
            prompts.append((begun_s + gap_s, prompt[:-1] + [next(fresh) for _ in range(growth + 1)]))
    return [one for one in sorted(prompts, key=lambda one: one[0]) if one[0] < 3.0 * BEGUN]


GIVEN = made_trace()
MADE = continuation(GIVEN, 1, 1200)


def test_it_begins_with_what_was_given_and_keeps_the_order_of_arrival() -> None:
    assert len(MADE) == 1200
    assert MADE[: len(GIVEN)] == GIVEN
    assert all(before[0] <= after[0] for before, after in pairwise(MADE))
    assert all(arrival_s % TICK_S == 0 for arrival_s, _ in MADE[len(GIVEN) :])
    assert MADE[len(GIVEN) :] == sorted(MADE[len(GIVEN) :])


def test_a_seed_makes_one_continuation() -> None:
    assert continuation(GIVEN, 1, 1200) == MADE
    assert continuation(GIVEN, 2, 1200) != MADE


def test_ids_stand_for_all_that_is_before_them() -> None:
    behind: dict[int, int] = {}
    for _, prompt in MADE:
        for before, block in pairwise(prompt):
            assert behind.setdefault(block, before) == before


def as_donor(turn: Turn, gap_s: float, growth: int) -> bool:
    return turn.growth == growth and abs(turn.gap_s - gap_s) < gap_s * 5 * GAP_SPREAD + TICK_S


def test_sessions_go_on_as_their_donors_did() -> None:
    turns = turns_of(MADE)
    end_s = MADE[-1][0]
    seen = dict.fromkeys(LENGTHS, 0)
    for turn in turns[: -len(GIVEN) // 4]:
        following = turn.following
        if turn.number > 1 or len(turn.prompt) == NEVER:
            assert following is None
        elif following is None:  # all have gone on after so long
            assert end_s - turn.arrival_s < 2 * 200
        else:
            assert any(as_donor(following, *one) for one in RETURNS[len(turn.prompt)])
        if turn.number == 1:
            seen[len(turn.prompt)] += 1
    assert min(seen.values()) > len(turns) / 8


def test_sessions_begin_as_given_ones_did() -> None:
    begun = [turn for turn in turns_of(MADE)[len(GIVEN) :] if turn.number == 1]
    per_s = len(begun) / (MADE[-1][0] - GIVEN[-1][0])
    assert per_s == pytest.approx(1 / 3, rel=0.25)
    assert {len(turn.prompt) for turn in begun} == set(LENGTHS)
    heads = {length: {turn.known_blocks for turn in begun if len(turn.prompt) == length} for length in LENGTHS}
    assert heads == {4: {1}, NEVER: {1}, 64: {1, COPIED}}
    assert any(
        turn.prompt[1] >= FRESH_BLOCKS for turn in begun if turn.known_blocks == COPIED
    )  # not of given ones only


@pytest.mark.parametrize("others", [1, 2])
def test_what_two_have_sent_is_taken_for_chance(others: int) -> None:
    given = [(0.0, [0, 1, 2, 10 * other, 10 * other + 1, 10 * other + 2]) for other in range(1, others + 1)]
    made = continuation([*given, (500.0, [0, 1, 2])], 1, 20)[others + 1 :]
    assert {tuple(prompt[:2]) for _, prompt in made} == {(0, 1)}
    assert {len(prompt) for _, prompt in made} == {3}
    assert len({prompt[2] for _, prompt in made}) == (len(made) if others == 1 else 1)


def test_a_turn_repeats_the_one_before_up_to_its_last_block() -> None:
    first, second, other, third = turns_of([(0, [0, 1, 2]), (5, [0, 1, 3, 4]), (6, [0, 9]), (9, [0, 1, 3, 4, 5])])
    assert first.following is second
    assert second.following is third
    assert (second.number, second.known_blocks, second.gap_s, second.growth) == (2, 2, 5, 1)
    assert (third.number, third.known_blocks, third.gap_s, third.growth) == (3, 4, 4, 1)
    assert other == Turn(6, [0, 9], known_blocks=1)


def test_later_turns_are_near_by_length_gap_and_growth() -> None:
    assert Looks.of(1, 3, 3.0, 7) == (2.0, 0.0, 0.0)
    assert Looks.of(2, 3, 3.0, 7) == (2.0, 1.0, 3.0)
    assert Looks.of(2, 3, 3.0, -2).growth == 0.0  # a turn may be shorter than the one before
    assert Looks(2.3, 0.2, 1.8).rounded() == (2.5, 0.0, 2.0)
    assert Looks(1.0, 2.0, 3.0).distance(Looks(2.0, 4.0, 6.0)) == 1 + 4 + 9


def test_who_was_watched_for_less_is_no_evidence() -> None:
    looks = Looks.of(1, 4, 0.0, 0)
    donors = [Donor(looks, 30.0, 2), Donor(looks, 20.0, None), Donor(looks, 10.0, 1), Donor(looks, 40.0, None)]
    assert kaplan_meier(donors) == [(10.0, 1, 0.25), (30.0, 2, pytest.approx(0.375))]


def test_the_command_has_means_over_the_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "rows.csv"
    lines = [f'{{"timestamp": {1000 * at:.0f}, "input_length": 1, "hash_ids": {ids}}}\n' for at, ids in GIVEN]
    trace.write_text("".join(lines))
    monkeypatch.setattr(continuations, "REQUESTS", 700)
    command = ["continuations", str(trace), "--seeds", "1", "2", "--capacity", "100", "100000", "--csv", str(file)]
    command += ["--told", "nothing", "ends"]
    monkeypatch.setattr("sys.argv", command)
    continuations.main()
    printed = capsys.readouterr().out.splitlines()
    rows = file.read_text().splitlines()
    assert rows[0] == "seed,told,capacity_blocks,lru,survival,optimum"
    cells = [row.split(",") for row in rows[1:]]
    assert [row[:3] for row in cells] == [
        [seed, told, capacity] for seed in "12" for capacity in ("100", "100000") for told in ("nothing", "ends")
    ]
    small, told, large = (line.split() for line in (*printed[1:3], printed[3]))
    found = [[float(row[4]) for row in cells[place::4]] for place in (0, 1)]
    for line, rates in zip((small, told), found, strict=True):
        assert float(line[4]) == pytest.approx(sum(rates) / 2, abs=0.06)
    assert found[0] != found[1]
    assert large[2] == large[4] == large[6]  # all fits
    assert large[-2] == "nan"
