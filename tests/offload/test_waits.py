"""Whether the model waits for a load or computes first, against what each takes, layer by layer."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest

from paddle_kv.offload.passes import WholePass
from paddle_kv.offload.pieces import Piece, PieceState
from paddle_kv.offload.rates import LINK, TIER, Rates, RateSnapshot
from paddle_kv.offload.waits import Waits

BLOCK_BYTES, SIZE = 1000, 16
LAYERS, CHUNK_BLOCKS = 64, 8


Known = tuple[Waits, RateSnapshot]


def waits_of(
    num_blocks: int,
    end_blocks: int,
    *,
    load_s: float = 0.5,
    tier_s: float = 1.0,
    aligned: bool = True,
    sharing: int = 1,
) -> Known:
    """A block takes a second to be computed. ``sharing``: prompts with a chunk each in the last pass."""
    rates = Rates(BLOCK_BYTES, SIZE, lambda: 0.0)
    rates.set_load(LINK, BLOCK_BYTES / load_s)
    rates.set_load(TIER, BLOCK_BYTES / tier_s)
    rates.set_prefill(1.0 / SIZE)
    waits = Waits(num_blocks, (num_blocks + end_blocks) * SIZE, CHUNK_BLOCKS * SIZE, LAYERS, aligned=aligned)
    waits.share_passes(range(SIZE, (CHUNK_BLOCKS + 1) * SIZE), WholePass(sharing * CHUNK_BLOCKS * SIZE, sharing))
    return waits, rates.snapshot()


def mean_s(sharing: int, own_s: float, others_s: float) -> float:
    """Of this prompt, which is over then, and the others of its passes, which are so much later."""
    return (own_s + (sharing - 1) * others_s) / sharing


def end_pass_s(num_blocks: int, end_blocks: int, aligned: bool) -> float:
    """Of the first pass behind the prefix."""
    room = CHUNK_BLOCKS - num_blocks % CHUNK_BLOCKS if aligned else CHUNK_BLOCKS
    return float(min(end_blocks, room))


def passed_s(compute_s: float, loads: list[tuple[float, float]]) -> float:
    """When a pass ends of which each layer begins when that layer of all loads is there; each has a beginning and an
    end."""
    now_s = 0.0
    for layer in range(1, LAYERS + 1):
        there_s = max((begin + (end - begin) * layer / LAYERS for begin, end in loads), default=0.0)
        now_s = max(now_s, there_s) + compute_s / LAYERS
    return now_s


@pytest.mark.parametrize("sharing", [1, 2, 5])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 16])
def test_it_waits_for_a_load_where_that_is_sooner(num_blocks: int, aligned: bool, sharing: int) -> None:
    """Within two layers of what going through all layers says, in the mean of the prompts of the pass."""
    beside_s = (sharing - 1) * CHUNK_BLOCKS

    def stop_of(block: int) -> int:
        return (block // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS if aligned else block + CHUNK_BLOCKS

    rng = random.Random(num_blocks)
    answers = set()
    for _ in range(2000):
        end_blocks, size = rng.randint(1, 20), rng.randint(1, 6)
        stop = rng.choice([num_blocks, num_blocks - 2])
        begin_s = rng.choice([0.0, rng.uniform(0, 10)])
        there_s = begin_s + rng.uniform(0, 12) * sharing
        others_s = rng.choice([0.0, rng.uniform(0, 12) * sharing])
        others = [(0.0, others_s)] if others_s else []
        total = num_blocks + end_blocks
        end_s = min(stop_of(num_blocks), total) - num_blocks
        over_s = passed_s(end_s + beside_s, [(begin_s, there_s), *others])
        waited_s = mean_s(sharing, over_s + end_blocks - end_s, over_s)
        pass_s, left = size, end_blocks
        if stop == num_blocks:  # with as much of the end as there is room for
            pass_s = max(num_blocks, min(stop_of(stop - size), total)) - (stop - size)
            left = total - (stop - size) - pass_s
        over_s = passed_s(pass_s + beside_s, others)
        computed_s = mean_s(sharing, over_s + beside_s + left, over_s)  # it needs a pass more
        waits, rates = waits_of(num_blocks, end_blocks, aligned=aligned, sharing=sharing)
        found = waits.for_one(rates, stop - size, stop, begin_s, there_s, others_s)
        answers.add(found)
        if abs(waited_s - computed_s) > 2 * 20 * sharing / LAYERS:
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
    sharing: int = 1

    @property
    def end_s(self) -> float:
        """What is said of the end, wherever it is: as if all of it took as long as chunks do."""
        return self.end_blocks * self.sharing

    def took_s(self, here: int, tier: int, computed_s: float) -> float:
        """``here`` and ``tier``: blocks that are loaded; the pass behind them begins at ``computed_s``."""
        pass_s = min(self.end_blocks, CHUNK_BLOCKS) + (self.sharing - 1) * CHUNK_BLOCKS
        tail_s = self.end_s - pass_s * (1 - 1 / LAYERS)
        ends, begins = [0.0], [0.0]
        if here or tier:
            ends.append(self.link_wait_s + (here + tier) * self.load_s)
            begins.append(self.link_wait_s + (here + tier) * self.load_s / LAYERS)
        if tier:
            read_s = tier * max(self.tier_s, self.load_s) + self.load_s
            ends.append(self.tier_wait_s + read_s)
            begins.append(self.tier_wait_s + read_s / LAYERS)
        return max(computed_s + self.end_s, max(ends) + tail_s, max(begins) + self.end_s)

    def best_s(self, most_here: int, least_here: int, begin_s: float) -> tuple[float, float]:
        """The model is there at ``begin_s``; what it computes of the tier's blocks follows what is loaded here. In the
        mean of the prompts of the passes: where it is soonest for this one, and the soonest."""
        found = []
        for here, tier in itertools.product(range(least_here, most_here + 1), range(self.tier_blocks + 1)):
            computed_s, left = begin_s + (most_here - here) * self.sharing, self.tier_blocks - tier
            if left and here:
                here_s = self.link_wait_s + here * self.load_s
                hidden_s = (left * self.sharing) * (1 - 1 / LAYERS)
                computed_s = max(computed_s, here_s / LAYERS, here_s - hidden_s)
            over_s = self.took_s(here, tier, computed_s + left * self.sharing)
            own_s = begin_s / self.sharing + most_here - here + left
            waited_s = over_s - self.end_s - begin_s - (most_here - here + left) * self.sharing
            found.append((round(over_s, 6), mean_s(self.sharing, over_s, own_s + waited_s)))
        return min(found)[1], min(mean for _, mean in found)


@pytest.mark.parametrize(
    ("tier_blocks", "behind_blocks", "sharing"),
    [
        (0, 0, 1),
        (4, 0, 1),
        (12, 0, 1),
        (0, 5, 1),
        (4, 5, 1),
        (12, 5, 1),
        (0, 0, 2),
        (0, 5, 2),
        (0, 0, 4),
        (0, 5, 4),
        (4, 0, 2),
        (12, 0, 3),
        (12, 5, 4),
    ],
)
def test_all_that_is_here_is_loaded_where_that_is_sooner(tier_blocks: int, behind_blocks: int, sharing: int) -> None:
    """Than to compute the first blocks and to load what is best then."""
    rng = random.Random(tier_blocks + behind_blocks)
    answers, clear = set(), 0
    clearly = 1.4 if tier_blocks and sharing > 1 else 1.18  # it weighs the two best ways, and not every one
    for _ in range(300):
        load_s, tier_s = rng.uniform(0.1, 2) * sharing, rng.uniform(0.1, 2) * sharing
        end_blocks, size, first = rng.randint(1, 8), rng.randint(4, 24), rng.randint(1, 4)
        link_wait_s, tier_wait_s = (
            rng.choice([0.0, rng.uniform(0, 5 * sharing)]),
            rng.choice([0.0, rng.uniform(0, 5 * sharing)]),
        )
        others_s = rng.choice([0.0, rng.uniform(0, 8)])
        rest = Rest(load_s, tier_s, link_wait_s, tier_wait_s, tier_blocks, end_blocks + behind_blocks, sharing)
        pass_s = first + (sharing - 1) * CHUNK_BLOCKS
        first_s = max(others_s / LAYERS + pass_s, others_s + pass_s / LAYERS)
        loaded, computed = rest.best_s(size, size, 0.0), rest.best_s(size - first, 0, first_s)
        waits, rates = waits_of(100, end_blocks, load_s=load_s, tier_s=tier_s, sharing=sharing)
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
        if min(loaded) > clearly * max(computed) or min(computed) > clearly * max(loaded):
            assert found == (loaded < computed), (loaded, computed)
            clear += 1
    assert answers == {True, False} and clear > 50


def test_of_a_model_of_which_nothing_is_known_nothing_is_awaited() -> None:
    rates = Rates(BLOCK_BYTES, SIZE, lambda: 0.0)
    rates.set_load(LINK, 1e9)
    waits, known = Waits(8, 200, CHUNK_BLOCKS * SIZE, LAYERS), rates.snapshot()
    assert not waits.for_one(known, 0, 4, 0.0, 0.0, 0.0)
    none = {"tier_blocks": 0, "behind_blocks": 0, "link_wait_s": 0.0, "tier_wait_s": 0.0, "others_s": 0.0}
    assert not waits.for_rest(known, 0, 4, 8, **none)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", [1, 3])
@pytest.mark.parametrize("aligned", [True, False])
def test_loads_that_fit_into_the_pass_behind_them_cost_next_to_nothing(aligned: bool, sharing: int) -> None:
    """Whatever of them is there when the pass begins: it ends a layer of the loads later than if all was."""
    rng = random.Random(5)
    answers = []
    for _ in range(500):
        num_blocks, end_blocks, load_s = rng.randint(1, 40), rng.randint(1, 12), rng.uniform(0.05, 1.5)
        load_s *= sharing
        waits, rates = waits_of(num_blocks, end_blocks, load_s=load_s, aligned=aligned, sharing=sharing)
        left = rng.randint(1, num_blocks)
        pass_s = end_pass_s(num_blocks, end_blocks, aligned) + (sharing - 1) * CHUNK_BLOCKS
        layer_s = left * load_s / LAYERS
        behind_s = passed_s(pass_s, [(-rng.uniform(0.0, left * load_s), left * load_s)])
        if left * load_s <= pass_s:
            assert waits.is_loaded_sooner(rates, num_blocks - left, num_blocks, 0.0)
            assert behind_s <= pass_s + layer_s + 1e-9
        answers.append(left * load_s <= pass_s)
    assert 100 < sum(answers) < 400


@pytest.mark.parametrize("sharing", [1, 2, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_load_of_all_that_is_left_is_sooner_than_to_compute_some_of_it_meanwhile(aligned: bool, sharing: int) -> None:
    """Where it takes longer than the pass: what is computed meanwhile is whole passes."""
    rng = random.Random(6)
    answers = []
    for _ in range(1000):
        num_blocks, end_blocks, load_s = rng.randint(1, 40), rng.randint(1, 12), rng.uniform(0.05, 1.5)
        load_s *= sharing
        waits, rates = waits_of(num_blocks, end_blocks, load_s=load_s, aligned=aligned, sharing=sharing)
        start, wait_s = rng.randint(0, num_blocks - 1), rng.choice([0.0, rng.uniform(0.0, 9.0)])
        pass_s = end_pass_s(num_blocks, end_blocks, aligned) + (sharing - 1) * CHUNK_BLOCKS
        all_s = (num_blocks - start) * load_s
        if all_s <= pass_s:
            continue
        over_s = passed_s(pass_s, [(wait_s, wait_s + all_s)])
        loaded_s = mean_s(sharing, over_s, over_s - pass_s)
        starts, at = [], start
        while at < num_blocks:
            at = min(num_blocks, (at // CHUNK_BLOCKS + 1) * CHUNK_BLOCKS if aligned else at + CHUNK_BLOCKS)
            starts.append(at)
        met = []
        for one in starts:
            begin_s = max((one - start) * sharing, wait_s + (num_blocks - one) * load_s)
            met.append(mean_s(sharing, begin_s + pass_s, begin_s - (one - start) * (sharing - 1)))
        meets_s = min(met)
        answer = waits.is_loaded_sooner(rates, start, num_blocks, wait_s)
        assert answer == (loaded_s <= meets_s), (start, num_blocks, load_s, pass_s, wait_s)
        answers.append(answer)
    assert 50 < sum(answers) < len(answers) - 50


def test_nothing_fits_where_the_model_is_not_known_or_the_link_is_not_trusted() -> None:
    waits, rates = waits_of(8, 8)
    assert waits.is_loaded_sooner(rates, 0, 8, 0.0)
    assert not waits.is_loaded_sooner(replace(rates, base_s=None), 0, 8, 0.0)
    assert not waits.is_loaded_sooner(replace(rates, link_waits=False), 0, 8, 0.0)


@dataclass(frozen=True)
class Left:
    """Pieces of a prompt that are not computed or loaded, and what else tier and link have to do."""

    sizes: list[int]
    below: list[int]
    reading: list[int]
    tier_s: float
    link_s: float
    tier_wait_s: float
    link_wait_s: float
    model_wait_s: float

    @property
    def pieces(self) -> list[Piece]:
        made, start = [], 0
        for size, below, reading in zip(self.sizes, self.below, self.reading, strict=True):
            piece = Piece(start, start + size)
            piece.tier_blocks = below + reading or size  # others may have brought it
            piece.state = PieceState.BELOW if below else PieceState.READING if reading else PieceState.WAITING
            made.append(piece)
            start += size
        return made

    def followed_s(self, pass_s: float) -> float:
        """A pass that follows all of it layer by layer."""
        begin_s = self.tier_wait_s + sum(self.reading) * self.tier_s
        moved_s = self.link_wait_s + sum(self.sizes) * self.link_s
        read_s = begin_s + sum(self.below) * self.tier_s
        others = (self.model_wait_s, self.model_wait_s)  # the model has none of its layers before
        return passed_s(pass_s, [(begin_s, read_s), (self.link_wait_s, moved_s), others])

    def met_s(self, count: int, *, only_tier: bool) -> float:
        """Until the model has computed the first pieces, or those of them that lie in the tier, and the others came."""
        numbers = range(len(self.sizes))
        computed = [at for at in numbers[:count] if self.below[at] or self.reading[at] or not only_tier]
        read = sum(self.below[at] + self.reading[at] for at in numbers if at not in computed)
        moved = sum(self.sizes[at] for at in numbers if at not in computed)
        there_s = self.tier_wait_s + read * self.tier_s, self.link_wait_s + moved * self.link_s
        return max(self.model_wait_s + sum(self.sizes[at] for at in computed), *there_s)


def some_left(rng: random.Random) -> Left:
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    kinds = [rng.choice(["below", "reading", "here"]) for _ in sizes]
    below, reading = (
        [rng.randint(1, size) if kind == what else 0 for size, kind in zip(sizes, kinds, strict=True)]
        for what in ("below", "reading")
    )
    rates = rng.uniform(0.05, 2.0), rng.choice([0.01, 0.3, 0.8])
    waits = (rng.choice([0.0, most]) for most in (3.0, 2.0, 4.0))
    return Left(sizes, below, reading, *rates, *waits)


@pytest.mark.parametrize("seed", range(4))
def test_the_tier_is_followed_where_that_is_sooner(seed: int) -> None:
    """Than the model computes some of what is left and follows nothing, within two layers."""
    rng, answers = random.Random(seed), []
    for left in (some_left(rng) for _ in range(1500)):
        if not any(left.below):
            continue
        end_blocks = rng.randint(1, 12)
        waits, rates = waits_of(sum(left.sizes), end_blocks, load_s=left.link_s, tier_s=left.tier_s, aligned=False)
        pass_s = min(end_blocks, CHUNK_BLOCKS)
        followed_s = left.followed_s(pass_s)
        counts = range(1, len(left.sizes) + 1)
        met_s = min(left.met_s(count, only_tier=only) for count in counts for only in (False, True)) + pass_s
        answer = waits.is_followed_sooner(
            rates,
            left.pieces,
            tier_wait_s=left.tier_wait_s,
            link_wait_s=left.link_wait_s,
            model_wait_s=left.model_wait_s,
        )
        answers.append(answer)
        slack_s = 2 * max(pass_s, followed_s) / LAYERS
        assert followed_s <= met_s + slack_s if answer else followed_s >= met_s - slack_s
    assert 0.2 < sum(answers) / len(answers) < 0.95


@pytest.mark.parametrize("seed", range(2))
def test_when_a_prompt_is_computed_of_which_all_is_there_or_comes(seed: int) -> None:
    """Within two layers of what going through all layers says, for loads that begin no later than the pass."""
    rng = random.Random(seed)
    for _ in range(300):
        end_blocks, begin_s = rng.randint(1, 12), rng.choice([0.0, rng.uniform(0.0, 20.0)])
        there_s = rng.choice([0.0, rng.uniform(0.0, 30.0)])
        waits, rates = waits_of(8, end_blocks)
        expected_s = passed_s(end_blocks, [(begin_s, begin_s), (min(begin_s, there_s), there_s)])
        assert waits.over_s(rates, begin_s, there_s) == pytest.approx(
            expected_s, abs=2 * max(there_s, end_blocks) / LAYERS
        )


@pytest.mark.parametrize(("others", "is_time"), [(3, True), (4, False), (0, True)])
def test_when_the_tier_is_to_be_followed(others: int, is_time: bool) -> None:
    """A pass of four blocks: what is left can still be read in it."""
    waits, rates = waits_of(2 * CHUNK_BLOCKS, 4, tier_s=1.0)
    assert waits.is_time_to_follow(rates, others) == is_time
    for untrusted in (replace(rates, link_waits=False), replace(rates, tier_waits=False), replace(rates, base_s=None)):
        assert not waits.is_time_to_follow(untrusted, others)
