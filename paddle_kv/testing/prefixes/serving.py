"""A server in simulated time, event by event: a model that serves one prompt at a time in chunks, a link and a tier
that all loads share, and a library that knows only the rates that it has measured, which are noisy.

Three ways to serve the same requests, over the same machine:

compute    nothing is loaded
load       all that was found is loaded, layer by layer, at whatever price
decide     rates and decisions of :mod:`paddle_kv.offload`, as they are; meetings and queues are of the simulation

What is found for a request is given, and the same in all ways. A tier may stall, fail, or be slower than it says.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...offload.decision import Decision, Prompt
from ...offload.rates import LINK, TIER, Rates, RateSnapshot
from .channel import Channel, Faults, no_faults
from .link_queue import Urgency
from .meeting import Chunk, Load, Meeting
from .replay import Costs
from .trace import Request

COMPUTE, LOAD, DECIDE = "compute", "load", "decide"
PARTS = 16  # of a load that comes layer by layer: what else is asked of the link comes between
MOST_LOADING = 2  # pieces of a prompt at a source: when one ends, the next one is there
PROBE_LATE_S = 1.0


@dataclass(frozen=True)
class Machine:
    """What is served on.

    Attributes:
        costs: rates and sizes; prefill at the beginning of a prompt.
        attention_doubles_at: position at which a token takes twice as long as the first one.
        chunk_tokens: most tokens of one pass of the model.
        queue: so many prompts that wait their turn may load already.
        noise: of each load, and of the model for each prompt, as a logarithm; 0.1 is about 10 %.
        faults: of the tier.
    """

    costs: Costs
    attention_doubles_at: float = 50_000.0
    chunk_tokens: int = 4096
    queue: int = 0
    noise: float = 0.1
    faults: Faults = no_faults

    @property
    def exact(self) -> RateSnapshot:
        """The true rates."""
        costs = self.costs
        base_s = 1 / costs.prefill_tokens_per_s
        return RateSnapshot(
            costs.block_bytes / costs.link_bytes_per_s,
            costs.block_bytes / costs.tier_bytes_per_s,
            base_s,
            base_s / self.attention_doubles_at,
            costs.tokens_per_block,
        )


@dataclass(slots=True)
class Served:
    """One request.

    Attributes:
        first_token_s: from its arrival.
        decision: the first one; None where nothing was decided.
        loaded_blocks: that came in time.
        faults: loads of it that were late or failed while the model waited for them.
    """

    first_token_s: float = 0.0
    decision: Decision | None = None
    found_blocks: int = 0
    loaded_blocks: int = 0
    faults: int = 0


@dataclass(eq=False, slots=True)
class _Turn:
    """A request on its way through the server."""

    number: int
    request: Request
    served: Served
    meeting: Meeting
    pace: float  # of the model for this prompt: the same however it is cut into passes
    loads: random.Random
    begin_s: float = 0.0  # when the model should be free for its next pass
    pass_s: float = 0.0  # when the model should come to the end of the prompt
    expected_s: float = 0.0  # that the model needs for it
    queued: dict[str, int] = field(default_factory=lambda: {LINK: 0, TIER: 0})
    jobs: dict[Load, _Job] = field(default_factory=dict)  # that are not over
    chunk: Chunk | None = None
    missing: set[Load] = field(default_factory=set)
    pass_end_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Job:
    """A load at one of the two channels, in ``place``: one out of the tier goes on over the link."""

    turn: _Turn
    load: Load
    num_blocks: int
    place: str
    probe: bool = False
    parts: int = 1  # where it is, as the next three
    parts_left: int = 0  # 0: it has not begun
    part_s: float = 0.0
    moved_s: float = 0.0  # the parts before
    first_layer_s: float = 0.0
    read_s: float = 0.0  # when its tier has begun
    link_s: float = 0.0  # for how long the link had moved something when this one began


def serve(requests: Sequence[Request], found: Sequence[tuple[int, int]], machine: Machine, way: str) -> list[Served]:
    """All requests, in order of arrival. ``found``: of each, its first blocks in host memory, and those behind them in
    the tier.

    Raises:
        ValueError: an unknown way.
    """
    if way not in (COMPUTE, LOAD, DECIDE):
        raise ValueError(f"way = {way!r} must be one of {COMPUTE!r}, {LOAD!r}, {DECIDE!r}")
    return _Server(requests, found, machine, way).run()


class _Server:
    def __init__(
        self, requests: Sequence[Request], found: Sequence[tuple[int, int]], machine: Machine, way: str
    ) -> None:
        self._machine, self._way = machine, way
        self._exact, self._costs = machine.exact, machine.costs
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.rates = Rates(int(machine.costs.block_bytes), machine.costs.tokens_per_block, lambda: self._now_s)
        self._channels: dict[str, Channel[_Job]] = {LINK: Channel(), TIER: Channel()}
        self._reads = 0
        self._probing: set[_Job] = set()
        self._waiting: list[_Turn] = []  # first come, first served
        self._serving: _Turn | None = None
        self._model_free_s = 0.0  # expected
        self._turns = [self._turn(number, *one) for number, one in enumerate(zip(requests, found, strict=True))]

    def _turn(self, number: int, request: Request, found: tuple[int, int]) -> _Turn:
        size = self._costs.tokens_per_block
        num_tokens = max(1, request.input_tokens)
        usable = min(sum(found), (num_tokens - 1) // size)  # at least one token is computed
        of_host = min(found[0], usable)
        if self._way == COMPUTE:
            usable = of_host = 0
        meeting = Meeting(
            Prompt((0, of_host), (of_host, usable), usable * size, num_tokens),
            block_tokens=size,
            chunk_tokens=self._machine.chunk_tokens,
            num_layers=self._costs.num_layers,
        )
        served = Served(found_blocks=usable)
        pace = self._noise(random.Random(2 * number))
        return _Turn(number, request, served, meeting, pace, random.Random(2 * number + 1))

    def run(self) -> list[Served]:
        for turn in self._turns:
            self._at(turn.request.arrival_s, lambda turn=turn: self._arrive(turn))  # type: ignore[misc]
        while self._events:
            self._now_s, _, act = heapq.heappop(self._events)
            act()
        return [turn.served for turn in self._turns]

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self._now_s), next(self._numbers), act))

    # ---- the model ----
    def _arrive(self, turn: _Turn) -> None:
        self._waiting.append(turn)
        if self._serving is None:
            self._next_turn()
        else:
            self._fill()

    def _next_turn(self) -> None:
        self._serving = self._waiting.pop(0) if self._waiting else None
        if self._serving is not None:
            for channel in self._channels.values():  # else what it asks for from now on would go before that
                channel.queue.hurry(lambda job: self._urgency(job) is Urgency.URGENT)
            self._step(self._serving)

    def _step(self, turn: _Turn) -> None:
        """The model is free for this prompt."""
        meeting, rates = turn.meeting, self._snapshot()
        self._decide(turn, rates, 0.0)
        if self._way == DECIDE:
            self._probe(turn)
        self._fill()
        if self._way == DECIDE:
            self._expect(turn)
        chunk = meeting.next_chunk(self._now_s, rates)
        if chunk is None:
            turn.served.first_token_s = self._now_s - turn.request.arrival_s
            self._next_turn()
            return
        if self._way == DECIDE:
            expected_s = rates.prefill_s(chunk.start_token, chunk.stop_token)
            if expected_s < math.inf:
                turn.begin_s = self._now_s + expected_s
                if chunk.stop < turn.served.found_blocks:
                    turn.pass_s = max(turn.pass_s, turn.begin_s)
        self._fill()
        compute_s = self._exact.prefill_s(chunk.start_token, chunk.stop_token) * turn.pace
        turn.chunk, turn.missing, turn.pass_end_s = chunk, set(chunk.awaits), self._now_s + compute_s
        if not chunk.awaits:
            self._at(turn.pass_end_s, lambda: self._pass_done(turn, chunk, compute_s))
            return
        for load in chunk.awaits:
            if load.late_s < math.inf:
                self._at(load.late_s, lambda load=load: self._late(turn, turn.jobs.get(load)))  # type: ignore[misc]

    def _pass_done(self, turn: _Turn, chunk: Chunk, compute_s: float) -> None:
        turn.chunk = None
        if compute_s:
            self.rates.observe_prefill(chunk.start_token, chunk.stop_token - chunk.start_token, compute_s)
        self._step(turn)

    def _awaited(self, turn: _Turn, job: _Job, layer_s: float) -> None:
        """A load that a pass waits for has ended: layer by layer the pass follows it."""
        turn.missing.discard(job.load)
        chunk = turn.chunk
        assert chunk is not None
        compute_s = self._exact.prefill_s(chunk.start_token, chunk.stop_token) * turn.pace
        last_s = compute_s / self._costs.num_layers
        turn.pass_end_s = max(turn.pass_end_s, self._now_s + last_s)
        turn.pass_end_s = max(turn.pass_end_s, job.first_layer_s + compute_s)
        if not turn.missing:
            self._at(turn.pass_end_s, lambda: self._pass_done(turn, chunk, 0.0))

    def _late(self, turn: _Turn, job: _Job | None) -> None:
        """If the model still waits for it, and what moves now where it is has taken too long."""
        if job is None or job.load not in turn.missing:
            return
        if self._now_s < (late_s := self._late_s(job)):  # another one moves now
            self._at(late_s, lambda: self._late(turn, turn.jobs.get(job.load)))
            return
        channel = self._channels[job.place]
        moving = channel.moving
        assert moving is not None
        taken_s = moving.moved_s + self._now_s - channel.begun_s
        self.rates.observe_late(job.place, self._bytes(moving), max(1e-6, taken_s))
        self._lost(turn, job.load)

    def _lost(self, turn: _Turn, load: Load) -> None:
        turn.meeting.load_lost(load)
        if load in turn.missing:
            turn.served.faults += 1
            chunk, turn.chunk, turn.missing = turn.chunk, None, set()
            assert chunk is not None
            turn.meeting.chunk_failed(chunk)
            self._step(turn)

    # ---- the library ----
    def _snapshot(self) -> RateSnapshot:
        return self.rates.snapshot() if self._way == DECIDE else self._exact

    def _decide(self, turn: _Turn, rates: RateSnapshot, wait_s: float) -> None:
        if self._way != DECIDE:
            turn.meeting.load_from(0, 0)
            turn.begin_s = turn.pass_s = self._now_s
            return
        waits = [self._wait_s(place, turn.number) for place in (LINK, TIER)]
        found = turn.meeting.plan(rates, wait_s=wait_s, link_wait_s=waits[0], tier_wait_s=waits[1])
        turn.begin_s, turn.pass_s = self._now_s + wait_s, self._now_s + min(found.pass_s, 1e9)
        turn.expected_s = max(0.0, min(found.expected_s - wait_s, 1e9))
        if turn is self._serving:
            self._model_free_s = self._now_s + turn.expected_s
        if turn.served.decision is None and turn is self._serving:
            turn.served.decision = found

    def _probe(self, turn: _Turn) -> None:
        for place in (LINK, TIER):
            if turn.meeting.can_probe(place) and self.rates.take_probe(place):
                load = turn.meeting.probe(place)
                job = _Job(turn, load, 1, place, probe=True)
                self._begin(job)
                self._at(self._now_s + PROBE_LATE_S, lambda job=job: self._probe_late(job))  # type: ignore[misc]

    def _probe_late(self, job: _Job) -> None:
        if job in self._probing:
            self._probing.discard(job)
            self.rates.observe_late(job.load.place, int(self._costs.block_bytes), PROBE_LATE_S)
            self._lost(job.turn, job.load)

    def _fill(self) -> None:
        """Gives the channels what they can take: first for the prompt that is served, then for those that wait."""
        if self._way == COMPUTE:
            return
        rates = self._snapshot()
        wait_s = max(0.0, self._model_free_s - self._now_s)
        alone = True  # nobody before needs anything
        for turn in ([self._serving] if self._serving else []) + self._waiting[: self._machine.queue]:
            if turn is not self._serving:
                self._decide(turn, rates, wait_s)
                wait_s += turn.expected_s
            for place in (LINK, TIER):
                trusted = rates.link_waits if place == LINK else rates.tier_waits
                needed_s = turn.meeting.needed_s(place, turn.begin_s, turn.pass_s)
                now = trusted and turn is self._serving and needed_s <= self._now_s  # all of it: the model is there
                while now or turn.queued[place] < MOST_LOADING:
                    load = turn.meeting.next_load(place, self._now_s, needed_s, rates, alone=alone)
                    if load is None:
                        break
                    self._begin(_Job(turn, load, load.stop - load.start, place))
            alone = alone and turn.meeting.met

    def _begin(self, job: _Job) -> None:
        turn, load = job.turn, job.load
        turn.queued[job.place] += 1
        turn.jobs[load] = job
        if self._way == LOAD:
            load.due_s = self._now_s  # awaited, whatever it takes
        if job.probe:
            self._probing.add(job)
        self._put(job)

    # ---- what the library expects ----
    def _expect(self, turn: _Turn) -> None:
        """Says when the loads of a prompt should be there. What goes before them changes as long as they wait."""
        for load, job in turn.jobs.items():
            if job.probe:
                continue
            load.late_s = self._late_s(job)
            load.due_s = self._now_s + self._there_s(LINK, job)
            if job.place == TIER:
                block_s = self._expected_s(LINK, job) / job.num_blocks  # what is left for the link then
                load.due_s = max(load.due_s, self._now_s + self._there_s(TIER, job) + block_s)

    def _there_s(self, place: str, job: _Job) -> float:
        """Until it has moved there."""
        if job is self._channels[place].moving:
            return self._left_s(place)
        return self._wait_s(place, job.turn.number, job) + self._expected_s(place, job)

    def _late_s(self, job: _Job) -> float:
        """When nobody waits for it any more: what waits for others is as late as the one of them that moves."""
        channel = self._channels[job.place]
        moving = channel.moving
        if moving is None:
            return math.inf
        return channel.begun_s - moving.moved_s + self.rates.late_s(moving.num_blocks, job.place)

    def _wait_s(self, place: str, number: int, own: _Job | None = None) -> float:
        """Until it has done what goes before this one, or before whatever else comes for the prompt of this number."""
        is_between = own is not None and not own.load.layerwise  # the parts of others
        seconds = self._left_s(place, is_between)
        for job in self._channels[place].queue.loads():
            if job is own or job.turn.number > number:
                break
            if not job.load.cancelled:
                parts = (job.parts_left or self._parts_of(place, job)) if is_between else 1
                seconds += self._expected_s(place, job) / parts
        return seconds

    def _left_s(self, place: str, is_between: bool = False) -> float:
        """Of what moves there now; or of its part, for what comes between these."""
        channel = self._channels[place]
        moving = channel.moving
        if moving is None:
            return 0.0
        expected_s = self._expected_s(place, moving) / (moving.parts_left if is_between else 1)
        return max(0.0, channel.begun_s + expected_s - self._now_s)

    def _expected_s(self, place: str, job: _Job) -> float:
        """Of one that moves there."""
        expected_s = self.rates.load_s(job.num_blocks, place)
        if expected_s is None:
            return 0.0
        return expected_s * job.parts_left / job.parts if job.parts_left and place == job.place else expected_s

    # ---- link and tier ----
    def _urgency(self, job: _Job) -> Urgency:
        return Urgency.URGENT if job.turn is self._serving and not job.probe else Urgency.BULK

    def _bytes(self, job: _Job) -> int:
        return job.num_blocks * int(self._costs.block_bytes)

    def _put(self, job: _Job) -> None:
        self._channels[job.place].queue.add(job, self._bytes(job), self._urgency(job), float(job.turn.number))
        self._take(job.place)

    def _take(self, place: str) -> None:
        channel = self._channels[place]
        while channel.moving is None:
            job = channel.queue.take()
            if job is None:
                return
            if job.load.cancelled and not job.probe:
                self._gone(job)
                continue
            fails = job.parts_left == 0 and self._start(place, job)
            channel.begin(job, self._now_s)
            self._at(self._now_s + job.part_s, lambda job=job, fails=fails: self._moved(place, job, fails))  # type: ignore[misc]

    def _start(self, place: str, job: _Job) -> bool:
        """Whether it will fail."""
        if place == job.load.place:
            job.read_s, job.link_s = self._now_s, self._channels[LINK].busy_s(self._now_s)
        seconds, fails = self._taken_s(place, job)
        job.parts = job.parts_left = self._parts_of(place, job)
        job.part_s, job.moved_s = seconds / job.parts, 0.0
        return fails

    @staticmethod
    def _parts_of(place: str, job: _Job) -> int:
        return PARTS if place == job.load.place == LINK and job.load.layerwise else 1

    def _taken_s(self, place: str, job: _Job) -> tuple[float, bool]:
        noise, layers = self._noise(job.turn.loads), self._costs.num_layers
        link_s, tier_s = job.num_blocks * self._exact.link_s, job.num_blocks * self._exact.tier_s
        if place == LINK and (job.load.place == LINK or not job.load.layerwise):
            job.first_layer_s = self._now_s + link_s * noise / layers
            return link_s * noise, False
        if place == LINK:  # layer by layer it has followed the tier, while nothing else was moved
            idle_s = self._now_s - job.read_s - (self._channels[LINK].busy_s(self._now_s) - job.link_s)
            return max(link_s / layers, link_s - idle_s) * noise, False
        self._reads += 1
        fault = self._machine.faults(self._reads, self._now_s, job.num_blocks)
        if fault.fails:
            return min(0.01, tier_s), True
        taken_s = tier_s * fault.factor * noise + fault.stall_s
        job.first_layer_s = self._now_s + (taken_s + link_s) / layers
        return taken_s, False

    def _moved(self, place: str, job: _Job, fails: bool) -> None:
        load = job.load
        job.moved_s += self._channels[place].end(self._now_s)
        job.parts_left -= 1
        if job.parts_left:
            self._put(job)
            return
        size, taken_s = self._bytes(job), job.moved_s
        if fails:
            self._probing.discard(job)
            self.rates.observe_failed(load.place)
        elif not job.probe or job in self._probing or place == LINK != load.place:
            if place == load.place:
                self._probing.discard(job)
                if load.cancelled and taken_s > self.rates.late_s(job.num_blocks, place) and not job.probe:
                    self.rates.observe_late(place, size, taken_s)
                else:
                    self.rates.observe_load(place, size, max(taken_s, 1e-9))
            elif not load.layerwise:
                self.rates.observe_load(place, size, max(taken_s, 1e-9))
        if fails:
            self._gone(job)
            self._lost(job.turn, load)
        elif place == TIER:
            job.place = LINK
            self._put(job)
        else:
            self._arrived(job)
        self._take(place)
        self._fill()

    def _arrived(self, job: _Job) -> None:
        turn, load = job.turn, job.load
        self._gone(job)
        if load.cancelled:
            return
        turn.meeting.load_done(load)
        turn.served.loaded_blocks += job.num_blocks
        if load in turn.missing:
            self._awaited(turn, job, self._now_s)

    def _gone(self, job: _Job) -> None:
        job.turn.queued[job.load.place] -= 1
        del job.turn.jobs[job.load]

    def _noise(self, rng: random.Random) -> float:
        return math.exp(rng.gauss(0, self._machine.noise)) if self._machine.noise else 1.0
