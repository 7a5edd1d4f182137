"""Replays a trace against the index and the policies of the manager, in simulated time. No bytes move.

At its turn a request looks its blocks up, then admits those that were absent: the calls that a server makes, with
transfers that arrive at once. A *hit* is a block of the longest prefix that is present at that moment. What the hits
are worth is worked out three times over, each time with a queue of its own, one prefill at a time in order of arrival:

recompute   all tokens are computed
whole       the hits are loaded, then the other tokens are computed
layerwise   a layer is computed as soon as it is loaded, while the next ones are on their way

The waiting time of a request is from its arrival to the end of its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...offload.index import BlockIndex
from ...offload.policies import make_policy
from .optimum import optimal_hits
from .trace import TOKENS_PER_BLOCK, Request

OPTIMUM = "optimum"
WAYS = ("recompute", "whole", "layerwise")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Costs:
    """What time is made of.

    Attributes:
        block_bytes: one block, all layers, of one rank.
        num_layers: layers of the model, each an equal part of load and computation.
        link_bytes_per_s: host to device, of one rank.
        prefill_tokens_per_s: of all ranks together; the same for each token, wherever it stands in the prompt.
        tokens_per_block: what an id of the trace stands for.
    """

    block_bytes: int
    num_layers: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float
    tokens_per_block: int = TOKENS_PER_BLOCK

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
        prefills: way -> one for each request.
    """

    policy: str
    capacity_blocks: int
    num_blocks: int
    hits: list[int]
    saved_blocks: int
    evicted_blocks: int
    prefills: dict[str, list[Prefill]] = field(default_factory=dict)

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
    requests: Sequence[Request], policy: str, capacity_blocks: int, costs: Costs, progress: Progress = lambda done: None
) -> Run:
    """One run; ``policy`` is one of the manager's or "optimum". ``progress`` is told the number of requests done.

    Raises:
        ValueError: an unknown policy, or a capacity below 1.
    """
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks = {capacity_blocks} must be at least 1")
    num_blocks = sum(len(request.block_ids) for request in requests)
    if policy == OPTIMUM:
        run = Run(policy, capacity_blocks, num_blocks, *optimal_hits(requests, capacity_blocks, progress))
    else:
        run = _run_policy(requests, policy, capacity_blocks, num_blocks, progress)
    for way in WAYS:
        run.prefills[way] = _prefills(requests, run.hits, costs, way)
    return run


def _run_policy(
    requests: Sequence[Request], policy: str, capacity_blocks: int, num_blocks: int, progress: Progress
) -> Run:
    index: BlockIndex[int] = BlockIndex(make_policy(policy, capacity_blocks), capacity_blocks)
    distinct = len({block for request in requests for block in request.block_ids})
    longest = max((len(request.block_ids) for request in requests), default=0)
    free_slots = list(range(min(capacity_blocks, distinct + longest)))  # more are never taken
    hits, saved = [], 0
    for number, request in enumerate(requests):
        found = index.lookup(request.block_ids)
        saved += len(index.admit(request.block_ids[found:], free_slots))
        hits.append(found)
        progress(number + 1)
    return Run(policy, capacity_blocks, num_blocks, hits, saved, index.evicted_blocks)


def _prefills(requests: Sequence[Request], hits: Sequence[int], costs: Costs, way: str) -> list[Prefill]:
    done: list[Prefill] = []
    idle_from_s = 0.0
    for request, found in zip(requests, hits, strict=True):
        loaded = 0 if way == "recompute" else found
        # The last token is always computed: its result is the first token of the answer.
        tokens = max(1, request.input_tokens - loaded * costs.tokens_per_block)
        load_s = loaded * costs.block_bytes / costs.link_bytes_per_s
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
