"""Whether the model waits for a load or computes first, against what each takes, layer by layer."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest

from paddle_kv.offload.rates import LINK, TIER, Rates, RateSnapshot
from paddle_kv.offload.waits import Waits

BLOCK_BYTES, SIZE = 1000, 16
LAYERS, CHUNK_BLOCKS = 64, 8


Known = tuple[Waits, RateSnapshot]


def waits_of(
    num_blocks: int, end_blocks: int, *, load_s: float = 0.5, tier_s: float = 1.0, aligned: bool = True
) -> Known:
    """A block takes a second to be computed."""
    rates = Rates(BLOCK_BYTES, SIZE, lambda: 0.0)
    rates.set_load(LINK, BLOCK_BYTES / load_s)
    rates.set_load(TIER, BLOCK_BYTES / tier_s)
    rates.set_prefill(1.0 / SIZE)
    waits = Waits(num_blocks, (num_blocks + end_blocks) * SIZE, CHUNK_BLOCKS * SIZE, LAYERS, aligned=aligned)
    return waits, rates.snapshot()


def passed_s(compute_s: float, loads: list[tuple[float, float]]) -> float:
    """When a pass ends of which each layer begins when that layer of all loads is there; each has a beginning and an
    end."""
    now_s = 0.0
    for layer in range(1, LAYERS + 1):
        there_s = max((begin + (end - begin) * layer / LAYERS for begin, end in loads), default=0.0)
        now_s = max(now_s, there_s) + compute_s / LAYERS
    return now_s


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 16])
def test_it_waits_for_a_load_where_that_is_sooner(num_blocks: int, aligned: bool) -> None:
    """Within two layers of what going through all layers says."""

    def stop_of(block: int) -> int:
        return (block // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS if aligned else block + CHUNK_BLOCKS

    rng = random.Random(num_blocks)
    answers = set()
    for _ in range(2000):
        end_blocks, size = rng.randint(1, 20), rng.randint(1, 6)
        stop = rng.choice([num_blocks, num_blocks - 2])
        begin_s = rng.choice([0.0, rng.uniform(0, 10)])
        there_s = begin_s + rng.uniform(0, 12)
        others_s = rng.choice([0.0, rng.uniform(0, 12)])
        others = [(0.0, others_s)] if others_s else []
        total = num_blocks + end_blocks
        end_s = min(stop_of(num_blocks), total) - num_blocks
        waited_s = passed_s(end_s, [(begin_s, there_s), *others]) + end_blocks - end_s
        if stop == num_blocks:  # with as much of the end as there is room for
            pass_s = max(num_blocks, min(stop_of(stop - size), total)) - (stop - size)
            computed_s = passed_s(pass_s, others) + total - (stop - size) - pass_s
        else:
            computed_s = passed_s(size, others) + end_blocks
        waits, rates = waits_of(num_blocks, end_blocks, aligned=aligned)
        found = waits.for_one(rates, stop - size, stop, begin_s, there_s, others_s)
        answers.add(found)
        if abs(waited_s - computed_s) > 2 * 20 / LAYERS:
            assert found == (waited_s < computed_s), (begin_s, there_s, others_s, size, stop, end_blocks)
    assert answers == {True, False}


@dataclass(frozen=True)
class Rest:
    """What is left of a prompt, of which each way to load a part of it can be tried."""

    load_s: float
    tier_s: float
    link_wait_s: float
    tier_wait_s: float
    tier_blocks: int
    end_blocks: int

    def took_s(self, here: int, tier: int, computed_s: float) -> float:
        """``here`` and ``tier``: blocks that are loaded; the pass behind them begins at ``computed_s``."""
        tail_s = self.end_blocks - min(self.end_blocks, CHUNK_BLOCKS) * (1 - 1 / LAYERS)
        ends, begins = [0.0], [0.0]
        if here or tier:
            ends.append(self.link_wait_s + (here + tier) * self.load_s)
            begins.append(self.link_wait_s + (here + tier) * self.load_s / LAYERS)
        if tier:
            read_s = tier * max(self.tier_s, self.load_s) + self.load_s
            ends.append(self.tier_wait_s + read_s)
            begins.append(self.tier_wait_s + read_s / LAYERS)
        return max(computed_s + self.end_blocks, max(ends) + tail_s, max(begins) + self.end_blocks)

    def best_s(self, most_here: int, least_here: int, begin_s: float) -> float:
        """The model is there at ``begin_s``; what it computes of the tier's blocks follows what is loaded here."""
        found = []
        for here, tier in itertools.product(range(least_here, most_here + 1), range(self.tier_blocks + 1)):
            computed_s, left = begin_s + most_here - here, self.tier_blocks - tier
            if left and here:
                here_s = self.link_wait_s + here * self.load_s
                computed_s = max(computed_s, here_s / LAYERS, here_s - left * (1 - 1 / LAYERS))
            found.append(self.took_s(here, tier, computed_s + left))
        return min(found)


@pytest.mark.parametrize("behind_blocks", [0, 5])
@pytest.mark.parametrize("tier_blocks", [0, 4, 12])
def test_all_that_is_here_is_loaded_where_that_is_sooner(tier_blocks: int, behind_blocks: int) -> None:
    """Than to compute the first blocks and to load what is best then."""
    rng = random.Random(tier_blocks + behind_blocks)
    answers = set()
    for _ in range(300):
        load_s, tier_s = rng.uniform(0.1, 2), rng.uniform(0.1, 2)
        end_blocks, size, first = rng.randint(1, 8), rng.randint(4, 24), rng.randint(1, 4)
        link_wait_s, tier_wait_s = rng.choice([0.0, rng.uniform(0, 5)]), rng.choice([0.0, rng.uniform(0, 5)])
        others_s = rng.choice([0.0, rng.uniform(0, 8)])
        rest = Rest(load_s, tier_s, link_wait_s, tier_wait_s, tier_blocks, end_blocks + behind_blocks)
        first_s = max(others_s / LAYERS + first, others_s + first / LAYERS)
        loaded_s, computed_s = rest.best_s(size, size, 0.0), rest.best_s(size - first, 0, first_s)
        waits, rates = waits_of(100, end_blocks, load_s=load_s, tier_s=tier_s)
        found = waits.for_rest(
            rates,
            40,
            40 + first,
            40 + size,
            tier_blocks=tier_blocks,
            behind_blocks=behind_blocks,
            link_wait_s=link_wait_s,
            tier_wait_s=tier_wait_s,
            others_s=others_s,
        )
        answers.add(found)
        if abs(loaded_s - computed_s) > 0.15 * max(loaded_s, computed_s):
            assert found == (loaded_s < computed_s), (loaded_s, computed_s)
    assert answers == {True, False}


def test_of_a_model_of_which_nothing_is_known_nothing_is_awaited() -> None:
    rates = Rates(BLOCK_BYTES, SIZE, lambda: 0.0)
    rates.set_load(LINK, 1e9)
    waits, known = Waits(8, 200, CHUNK_BLOCKS * SIZE, LAYERS), rates.snapshot()
    assert not waits.for_one(known, 0, 4, 0.0, 0.0, 0.0)
    none = {"tier_blocks": 0, "behind_blocks": 0, "link_wait_s": 0.0, "tier_wait_s": 0.0, "others_s": 0.0}
    assert not waits.for_rest(known, 0, 4, 8, **none)  # type: ignore[arg-type]


@pytest.mark.parametrize("aligned", [True, False])
def test_loads_that_fit_into_the_pass_behind_them_cost_next_to_nothing(aligned: bool) -> None:
    """Whatever of them is there when the pass begins: it ends a layer of the loads later than if all was."""
    rng = random.Random(5)
    answers = []
    for _ in range(500):
        num_blocks, end_blocks, load_s = rng.randint(1, 40), rng.randint(1, 12), rng.uniform(0.05, 1.5)
        waits, rates = waits_of(num_blocks, end_blocks, load_s=load_s, aligned=aligned)
        left = rng.randint(1, num_blocks)
        room = CHUNK_BLOCKS - num_blocks % CHUNK_BLOCKS if aligned else CHUNK_BLOCKS
        pass_s, layer_s = float(min(end_blocks, room)), left * load_s / LAYERS
        behind_s = passed_s(pass_s, [(-rng.uniform(0.0, left * load_s), left * load_s)])
        fits = waits.fits_pass(rates, left)
        assert fits == (left * load_s <= pass_s)
        if fits:
            assert behind_s <= pass_s + layer_s + 1e-9
        answers.append(fits)
    assert 100 < sum(answers) < 400


def test_nothing_fits_where_the_model_is_not_known_or_the_link_is_not_trusted() -> None:
    waits, rates = waits_of(8, 8)
    assert waits.fits_pass(rates, 8)
    assert not waits.fits_pass(replace(rates, base_s=None), 8)
    assert not waits.fits_pass(replace(rates, link_waits=False), 8)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_pass_that_follows_the_tier_ends_as_soon_as_any(aligned: bool) -> None:
    """Of all the ways to read the last so many blocks layer by layer, and those behind them by themselves before."""
    rng, followed = random.Random(3), set()
    for _ in range(500):
        num_blocks, end_blocks, piece = 2 * CHUNK_BLOCKS, rng.randint(1, 12), rng.randint(1, 6)
        tier_s, tier_blocks = rng.uniform(0.05, 0.9), rng.randint(1, num_blocks)
        waits, rates = waits_of(num_blocks, end_blocks, load_s=0.001, tier_s=tier_s, aligned=aligned)
        pass_s = min(end_blocks, CHUNK_BLOCKS)

        def ends_s(left: int, total: int = tier_blocks, tier_s: float = tier_s, pass_s: float = pass_s) -> float:
            """Of a pass that follows the last ``left`` of them."""
            before_s = (total - left) * tier_s
            return passed_s(pass_s, [(before_s, before_s + left * tier_s)]) if left else before_s + pass_s

        left = tier_blocks
        while left and not waits.follows_tier(rates, left, max(0, left - piece)):
            left = max(0, left - piece)
        followed.add(left)
        best_s = min(ends_s(other) for other in range(tier_blocks % piece, tier_blocks + 1, piece))
        assert ends_s(left) <= best_s + 2 * max(pass_s, tier_blocks * tier_s) / LAYERS
    assert len(followed) > 8 and 0 not in followed


@pytest.mark.parametrize(
    ("tier_s", "blocks", "others", "queue", "follows"),
    [
        (0.99, 5, 3, 0, True),
        (1.0, 5, 4, 0, False),  # a pass of four blocks: they can still be read in it
        (0.99, 5, 0, 0, True),
        (1.01, 5, 0, 0, False),  # slower than the model, and longer than the pass
        (1.01, 3, 0, 0, True),
        (0.499, 5, 3, 5, True),
        (0.5, 5, 3, 6, False),
    ],
)
def test_when_the_tier_is_followed(tier_s: float, blocks: int, others: int, queue: int, follows: bool) -> None:
    waits, rates = waits_of(2 * CHUNK_BLOCKS, 4, tier_s=tier_s)
    assert waits.follows_tier(rates, blocks, others, queue) == follows
    for untrusted in (replace(rates, link_waits=False), replace(rates, tier_waits=False), replace(rates, base_s=None)):
        assert not waits.follows_tier(untrusted, blocks, others, queue)


def test_the_link_keeps_up_with_the_tier_or_the_pass() -> None:
    waits, rates = waits_of(2 * CHUNK_BLOCKS, 4, load_s=0.499, tier_s=1.0)
    assert waits.link_keeps_up(rates, 8, 0) and not waits.link_keeps_up(rates, 9, 0)
    assert waits.link_keeps_up(rates, 12, 6) and not waits.link_keeps_up(rates, 13, 6)
