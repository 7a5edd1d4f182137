"""Decisions whose figures are computed by hand: a block takes a second to be computed, if nothing else is said."""

from __future__ import annotations

import math

import pytest

from paddle_kv.offload.decision import HALVINGS, Decision, Prompt, decide
from paddle_kv.offload.rates import RateSnapshot

LINK_S, TIER_S = 0.01, 0.03


def decided(
    host: tuple[int, int],
    tier: tuple[int, int],
    *,
    link_s: float = LINK_S,
    tier_s: float = TIER_S,
    end_blocks: int = 1,
    block_s: float = 1.0,
    num_layers: int = 1,
    wait_s: float = 0.0,
    link_wait_s: float = 0.0,
    tier_wait_s: float = 0.0,
) -> Decision:
    """The end of the prompt is computed in one pass."""
    rates = RateSnapshot(link_s, tier_s, block_s / 16, 0.0, 16)
    found = max(host[1], tier[1]) * 16
    return decide(
        rates,
        Prompt(host, tier, found, found + 16 * end_blocks),
        chunk_tokens=16 * end_blocks,
        num_layers=num_layers,
        wait_s=wait_s,
        link_wait_s=link_wait_s,
        tier_wait_s=tier_wait_s,
    )


@pytest.mark.parametrize(
    ("end_blocks", "tier_s", "tier_wait_s", "link_wait_s", "expected_s"),
    [
        # Three blocks of host memory from 1 on and four of the tier, four layers. A block takes 0.01 s.
        (8, 0.03, 0.0, 0.0, 4 * 0.03 + 0.01 + 0.02),  # the tier's last block, the link for it, and the last layer
        (80, 0.03, 0.0, 0.0, (4 * 0.03 + 0.01) / 4 + 0.8),  # the tier's first layer, then all of the end
        (80, 0.03, 0.1, 0.0, 0.1 + (4 * 0.03 + 0.01) / 4 + 0.8),  # and what stands before at the tier
        (80, 0.01, 0.0, 0.0, 7 * 0.01 / 4 + 0.8),  # the link's part of the first layer, for both
        (80, 0.01, 0.0, 0.5, 0.5 + 7 * 0.01 / 4 + 0.8),  # and what stands before at the link
        (4, 0.01, 0.0, 0.5, 0.5 + 7 * 0.01 + 0.01),  # all over the link
        (8, 0.03, 0.2, 0.0, 0.2 + 4 * 0.03 + 0.01 + 0.02),
    ],
)
def test_what_it_takes_to_load_all(
    end_blocks: int, tier_s: float, tier_wait_s: float, link_wait_s: float, expected_s: float
) -> None:
    found = decided(
        (1, 4),
        (4, 8),
        tier_s=tier_s,
        end_blocks=end_blocks,
        block_s=0.01,
        num_layers=4,
        tier_wait_s=tier_wait_s,
        link_wait_s=link_wait_s,
    )
    assert found.load_s == pytest.approx(expected_s, rel=1e-12)
    assert found.compute_s == pytest.approx((7 + end_blocks) * 0.01, rel=1e-12)


def test_a_load_is_no_quicker_than_the_model_is_free_for() -> None:
    found = decided((2, 8), (8, 8), num_layers=4, wait_s=5.0)
    assert found.load_s == 5.0 + 1.0 and found.choice == "load"
    assert (found.host_first, found.tier_first, found.pass_s) == (2, 8, 5.0)


def test_the_queue_of_a_tier_that_has_nothing_of_it_does_not_count() -> None:
    found = decided((2, 8), (8, 8), tier_wait_s=100.0)
    assert found.load_s == pytest.approx(6 * LINK_S + 1.0, rel=1e-12) and found.choice == "load"
    assert (found.host_first, found.tier_first) == (2, 8)


@pytest.mark.parametrize("place", [0, 2, 5, 8, 20])
def test_where_an_empty_part_is_said_to_lie_does_not_matter(place: int) -> None:
    host, tier = decided((2, 8), (place, place)), decided((place, place), (2, 8))
    assert (host.choice, host.host_first, host.tier_first) == ("load", 2, place)
    assert (tier.choice, tier.host_first, tier.tier_first) == ("load", place, 2)
    assert host.load_s == pytest.approx(6 * LINK_S + 1.0) and host.compute_s == tier.compute_s == 7.0
    assert tier.load_s == pytest.approx(6 * TIER_S + LINK_S + 1.0)


def test_what_cannot_be_loaded_is_computed_and_the_alternatives_are_infinite() -> None:
    for found in (
        decided((0, 3), (3, 5), link_s=math.inf),
        decided((5, 5), (3, 5), tier_s=math.inf),
        decided((3, 3), (3, 3)),
    ):
        assert found.choice == "compute" and found.load_s == found.meet_s == math.inf
        assert found.pass_s == found.compute_s - 1.0  # the end is computed behind all the others
    assert decided((0, 3), (3, 5), link_s=math.inf).compute_s == 6.0


def test_a_tier_that_is_not_used_in_front_is_computed_and_what_is_behind_is_loaded() -> None:
    found = decided((2, 6), (0, 2), tier_s=math.inf)
    assert (found.choice, found.host_first, found.tier_first) == ("meet", 2, 2)
    assert found.load_s == math.inf and found.meet_s == pytest.approx(3.0, rel=1e-3) and found.pass_s == 2.0


def test_a_tier_that_is_not_used_behind_is_computed_and_what_is_in_front_is_loaded() -> None:
    found = decided((0, 2), (2, 6), tier_s=math.inf)
    assert (found.choice, found.host_first, found.tier_first) == ("meet", 0, 6)
    assert found.meet_s == pytest.approx(5.0, rel=1e-2) and found.pass_s == 4.0


def test_the_last_block_of_a_tier_goes_over_the_link_too() -> None:
    """One block: 1 + 0.5 s, and the end, beside two computed. Two: 2 + 0.5 s and the end, which is later."""
    found = decided((0, 0), (0, 3), link_s=0.5, tier_s=1.0)
    assert (found.choice, found.tier_first, found.meet_s) == ("meet", 2, pytest.approx(3.0, rel=1e-3))


def test_unless_it_is_said_nothing_stands_before() -> None:
    rates = RateSnapshot(LINK_S, TIER_S, 1 / 16, 0.0, 16)
    found = decide(rates, Prompt((0, 2), (2, 5), 80, 96), chunk_tokens=16, num_layers=1)
    assert found == decided((0, 2), (2, 5))
    assert found.load_s == pytest.approx(3 * TIER_S + LINK_S + 1.0) and found.compute_s == 6.0


def test_a_time_that_is_just_kept_is_possible() -> None:
    """Two blocks of one second each to load as to compute: one of each, and the end, are two seconds, the first time
    that is tried of those between one and three."""
    found = decided((0, 2), (2, 2), link_s=1.0)
    assert (found.choice, found.host_first, found.meet_s, found.pass_s) == ("meet", 1, 2.0, 1.0)


def test_a_gain_of_just_a_hundredth_is_taken() -> None:
    """A block of 96 s, an end of 4 s, and a load of 95 s: 99 s instead of 100."""
    rates = RateSnapshot(95.0, math.inf, 1.0, 0.0, 96)
    found = decide(rates, Prompt((0, 1), (1, 1), 96, 100), chunk_tokens=4, num_layers=1)
    assert (found.choice, found.compute_s, found.load_s) == ("load", 100.0, 99.0)
    later = decide(rates, Prompt((0, 1), (1, 1), 96, 100), chunk_tokens=4, num_layers=1, link_wait_s=0.001)
    assert (later.choice, later.host_first, later.pass_s) == ("compute", 1, 96.0)


@pytest.mark.parametrize("link_s", [0.3, 0.7, 0.9, 1.3, 3.0])
def test_the_time_is_found_up_to_a_part_of_what_can_be_gained(link_s: float) -> None:
    """An end of a second, which nothing can make shorter, and 64 blocks before it."""
    found = decided((0, 64), (64, 64), link_s=link_s)
    best_s = 1 + min(max(64 - loaded, loaded * link_s) for loaded in range(65))
    assert best_s <= found.meet_s <= best_s + max(64 / 2**HALVINGS, 1e-3 * best_s) * (1 + 1e-9)


@pytest.mark.parametrize("link_s", [0.3, 0.7, 0.9, 1.3])
def test_and_no_closer_than_a_thousandth(link_s: float) -> None:
    """An end of 1,000 s, and 64 blocks before it: a second is a thousandth of it."""
    found = decided((0, 64), (64, 64), link_s=link_s, end_blocks=1000)
    best_s = 1000 + min(max(64 - loaded, loaded * link_s) for loaded in range(65))
    assert best_s <= found.meet_s <= best_s * 1.001 and found.meet_s < found.compute_s - 20


def test_a_load_that_is_nearly_as_good_as_any_other_way_is_taken() -> None:
    """1,400 blocks of a millisecond: the model could compute two of them meanwhile, and so save a seven hundredth."""
    rates = RateSnapshot(0.001, math.inf, 0.69, 0.0, 1)
    found = decide(rates, Prompt((0, 1400), (0, 0), 1400, 1400), chunk_tokens=4, num_layers=1)
    assert (found.choice, found.host_first, found.pass_s) == ("load", 0, 0.0)
    assert found.meet_s < found.load_s == pytest.approx(1.4)


def test_of_few_blocks_no_more_than_a_layer_is_left_for_the_link_behind_the_tier() -> None:
    found = decided((0, 0), (0, 2), link_s=0.5, tier_s=1.0, num_layers=4)
    assert found.load_s == pytest.approx(2 * 1.0 + 2 * 0.5 / 4 + 1.0 / 4, rel=1e-12)
    many = decided((0, 0), (0, 6), link_s=0.5, tier_s=1.0, num_layers=4)
    assert many.load_s == pytest.approx(6 * 1.0 + 0.5 + 1.0 / 4, rel=1e-12)  # they can go on block by block, too
