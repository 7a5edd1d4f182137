"""Replays a trace against the index and the policies of the manager, in simulated time. No bytes move.

At its turn a request looks its blocks up, then admits those that were absent: the calls that a server makes, with
transfers that arrive at once. A *hit* is a block of the longest prefix that is present at that moment. What the hits
are worth is worked out three times over, each time with a queue of its own, one prefill at a time in order of arrival:

recompute   all tokens are computed
whole       the hits are loaded, then the other tokens are computed
layerwise   a layer is computed as soon as it is loaded, while the next ones are on their way

The waiting time of a request is from its arrival to the end of its prefill.

With a tier below, what is saved is stored there too, the block used longest ago makes room, and a hit lies in either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...offload.index import BlockIndex
from ...offload.policies import make_policy
from .hints import Hints, told_ends
from .optimum import optimal_hits
from .trace import TOKENS_PER_BLOCK, Request

OPTIMUM = "optimum"
WAYS = ("recompute", "whole", "layerwise")
Progress = Callable[[int], None]
NO_HINTS = Hints()


@dataclass(frozen=True)
class Costs:
    """What time is made of.

    Attributes:
        block_bytes: one block, all layers, of one rank.
        num_layers: layers of the model, each an equal part of load and computation.
        link_bytes_per_s: host to device, of one rank.
        prefill_tokens_per_s: of all ranks together; the same for each token, wherever it stands in the prompt.
        tokens_per_block: what an id of the trace stands for.
        tier_bytes_per_s: out of a tier below host memory.
    """

    block_bytes: int
    num_layers: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    tokens_per_block: int = TOKENS_PER_BLOCK
    tier_bytes_per_s: float = 5e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} = {value} must be a finite number above 0")


@dataclass(slots=True)  # there are three of each request and run
class Prefill:
    """One request in one of the ways."""

    start_s: float
    load_s: float
    compute_s: float
    end_s: float


@dataclass
class Run:
    """One policy at one capacity.

    Attributes:
        hits: blocks found, for each request.
        tier_hits: those of them that came from the tier; empty without one.
        prefills: way -> one for each request.
    """

    policy: str
    capacity_blocks: int
    num_blocks: int
    hits: list[int]
    saved_blocks: int
    evicted_blocks: int
    prefills: dict[str, list[Prefill]] = field(default_factory=dict)
    tier_hits: list[int] = field(default_factory=list)
    tier_blocks: int = 0

    @property
    def hit_blocks(self) -> int:
        return sum(self.hits)

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / max(1, self.num_blocks)

    def waits_s(self, way: str, requests: Sequence[Request]) -> list[float]:
        return [done.end_s - request.arrival_s for done, request in zip(self.prefills[way], requests, strict=True)]

    @property
    def transfer_s(self) -> float:
        """Time that the link is loading."""
        return sum(done.load_s for done in self.prefills["layerwise"])

    @property
    def hidden_s(self) -> float:
        """The part of it, loading layer by layer, in which the model computes."""
        shown = sum(done.end_s - done.start_s - done.compute_s for done in self.prefills["layerwise"])
        return self.transfer_s - shown


def replay(
    requests: Sequence[Request],
    policy: str,
    capacity_blocks: int,
    costs: Costs,
    progress: Progress = lambda done: None,
    *,
    tier_blocks: int = 0,
    hints: Hints = NO_HINTS,
    warm_up: int = 0,
) -> Run:
    """One run; ``policy`` is one of the manager's or "optimum", which with a tier has the capacity of both.
    ``progress`` is told the number of requests done. Of the first ``warm_up`` requests nothing is counted but what was
    saved and evicted.

    Raises:
        ValueError: an unknown policy, or a capacity below 1.
    """
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks = {capacity_blocks} must be at least 1")
    num_blocks = sum(len(request.block_ids) for request in requests)
    if policy == OPTIMUM:
        best = optimal_hits(requests, capacity_blocks + tier_blocks, progress)
        run = Run(policy, capacity_blocks, num_blocks, *best)
    else:
        run = _run_policy(requests, policy, capacity_blocks, num_blocks, tier_blocks, progress, hints)
    run.tier_blocks = tier_blocks
    requests = requests[warm_up:]
    run.hits, run.tier_hits = run.hits[warm_up:], run.tier_hits[warm_up:]
    run.num_blocks = sum(len(request.block_ids) for request in requests)
    for way in WAYS:
        run.prefills[way] = _prefills(requests, run, costs, way)
    return run


def _run_policy(
    requests: Sequence[Request],
    policy: str,
    capacity_blocks: int,
    num_blocks: int,
    tier_blocks: int,
    progress: Progress,
    hints: Hints,
) -> Run:
    now_s = [0.0]
    made = make_policy(policy, capacity_blocks, lambda: now_s[0])
    index: BlockIndex[int] = BlockIndex(made, capacity_blocks)
    distinct = len({block for request in requests for block in request.block_ids})
    longest = max((len(request.block_ids) for request in requests), default=0)
    free_slots = list(range(min(capacity_blocks, distinct + longest)))  # more are never taken
    hits, saved = [], 0
    tier, tier_hits = _Tier(tier_blocks), []
    ends = told_ends(requests, hints.wrong_share) if hints.ends else []
    for queued in requests[: hints.queued_requests]:
        index.expect(queued.block_ids, queued.arrival_s)
    for number, request in enumerate(requests):
        now_s[0] = request.arrival_s
        if hints.queued_requests:
            for queued in requests[number + hints.queued_requests : number + hints.queued_requests + 1]:
                index.expect(queued.block_ids, queued.arrival_s)
        if tier_blocks:
            found, from_tier = _from_both(index, tier, request.block_ids, free_slots)
            tier_hits.append(from_tier)
        else:
            found = index.lookup(request.block_ids)
        admitted = index.admit(request.block_ids[found:], free_slots)
        tier.store(admitted)
        saved += len(admitted)
        hits.append(found)
        if ends and ends[number]:
            index.end(request.block_ids)
        progress(number + 1)
    return Run(policy, capacity_blocks, num_blocks, hits, saved, index.evicted_blocks, tier_hits=tier_hits)


class _Tier:
    """So many blocks; the one used longest ago makes room."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def store(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key not in self.blocks:
                self.blocks[key] = None
                if len(self.blocks) > self._num_blocks:
                    self.blocks.popitem(last=False)


def _from_both(index: BlockIndex[int], tier: _Tier, keys: Sequence[int], free_slots: list[int]) -> tuple[int, int]:
    """As the manager with a tier: the prefix that is found, and how much of it came from there."""
    found, wanted = 0, list[int]()
    room = index.capacity_blocks - sum(key in index.slots for key in set(keys))
    for key in keys:
        if key not in index.slots and key not in wanted:
            if key not in tier.blocks or len(wanted) == room:
                break
            wanted.append(key)
        found += 1
    index.lookup([key for key in keys[:found] if key in index.slots], keys)
    index.pin(keys[:found])
    index.admit(wanted, free_slots)
    index.unpin(keys[:found])
    for key in wanted:
        tier.blocks.move_to_end(key)
    return found, len(wanted)


def _prefills(requests: Sequence[Request], run: Run, costs: Costs, way: str) -> list[Prefill]:
    slower = min(costs.link_bytes_per_s, costs.tier_bytes_per_s)
    done: list[Prefill] = []
    idle_from_s = 0.0
    below = run.tier_hits or [0] * len(run.hits)
    for request, found, from_tier in zip(requests, run.hits, below, strict=True):
        loaded = 0 if way == "recompute" else found
        read = 0 if way == "recompute" else from_tier
        # The last token is always computed: its result is the first token of the answer.
        tokens = max(1, request.input_tokens - loaded * costs.tokens_per_block)
        load_s = costs.block_bytes * ((loaded - read) / costs.link_bytes_per_s + read / slower)
        compute_s = tokens / costs.prefill_tokens_per_s
        start_s = max(request.arrival_s, idle_from_s)
        if way == "layerwise":
            # Two stages in a row: the slower one sets the pace, the other shows for one layer.
            taken_s = max(load_s, compute_s) + min(load_s, compute_s) / costs.num_layers
        else:
            taken_s = load_s + compute_s
        idle_from_s = start_s + taken_s
        done.append(Prefill(start_s, load_s, compute_s, idle_from_s))
    return done
