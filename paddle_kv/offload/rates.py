"""What transfers and computing take here and now, as far as it was measured, and whether a source can be relied on.

Each source of loads (the link, a tier) has a pace and a standing:

new        nothing was loaded from it; one small load, which nobody waits for, may find out
probation  it is used, and nobody waits for it: what is not there when the model comes to it is computed; but for the
           only block of a prefix, over a link of which nothing bad is known
trusted    it has kept its time, and the model may wait for it, up to a deadline
resting    it was late, or failed: not used, longer each time; then one small load, which nobody waits for, asks again

So a source costs time at most once before its standing is lost.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..values import check_callable
from .checks import check_number, checked_count
from .figures import WEIGHT, Pace, Prefill
from .passes import NO_PASS, Begun, WholePass

LINK = "onload"
LINK_UP = "offload"
TIER = "tier"
FIRST_REST_S = 1.0
LONGEST_REST_S = 300.0
UNSEEN_S = 30.0  # a source that nobody has used for so long may have become quicker
PROBE_WEIGHT = 0.5  # of what a probe behind a rest finds: what was known is no more than a bound
FIRST_PROBATION = 3  # loads in time; twice as many after each fault
LONGEST_PROBATION = 200
LATE_FACTOR = 1.5  # a load is late behind so many times what was expected, or what the spread makes of it, ...
LATE_S = 0.005  # ... and so many seconds, which threads need to wake up
UNHEARD_PASSES = 128  # that waited for loads, one behind the other: none of them says what computing takes
FIRST_PASSES = 3  # of which one may have compiled the kernels of the model
MEASURED_SHARE = 0.01  # of the time, at most, to find out about it
TOGETHER = 0.1  # of the time of a pass: what began so shortly before it is computed with it
MOST_RUNNING = 4.0  # times what is expected of a pass, which may wait for loads, or stand far behind in its prompts
MOST_BEGUN = 256  # passes that are remembered
LEAST, MOST = 1e-30, 1e30  # of what is observed or set: nothing that follows from it overflows


class Standing(enum.Enum):
    """How far a source is relied on."""

    NEW = "new"
    PROBATION = "probation"
    TRUSTED = "trusted"
    RESTING = "resting"


class Source:
    """One of them. ``now_s`` are seconds of one clock, whichever."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.standing = Standing.NEW
        self.late_loads = self.failed_loads = self.probes = 0
        self._needed = FIRST_PROBATION  # loads in time until it is trusted
        self._probation = FIRST_PROBATION
        self._rest_s = FIRST_REST_S
        self._until_s = -math.inf  # of the rest, or of the probe on its way
        self._seen_s = -math.inf  # the last load that was in time
        self._probing = False

    def arrived(self, num_bytes: int, seconds: float, now_s: float) -> None:
        resting, self._seen_s = self.standing is Standing.RESTING, now_s
        expected = self.pace.s_per_byte
        slow = expected is not None and seconds > num_bytes * expected * math.exp(self.pace.band) + LATE_S
        self.pace.observe(seconds / num_bytes, PROBE_WEIGHT if resting else WEIGHT)
        if resting:
            if now_s < self._until_s and not self._probing:
                return  # was under way when the rest began
            self.standing, self._needed = Standing.PROBATION, self._probation
        elif self.standing is Standing.NEW:
            self.standing = Standing.PROBATION
        elif slow:  # nobody waited for it; the next one might be awaited
            self.standing, self._needed = Standing.PROBATION, self._probation
        elif self.standing is Standing.PROBATION:
            self._needed -= 1
            if self._needed <= 0:
                self.standing = Standing.TRUSTED
        else:
            self._needed -= 1
            if self._needed <= -4 * self._probation:  # kept its time for long: faults are forgotten one by one
                self._needed = 0
                self._probation = max(FIRST_PROBATION, self._probation // 2)
                self._rest_s = max(FIRST_REST_S, self._rest_s / 2)
        if self._probing:
            self._probing, self._until_s = False, -math.inf

    def fault(self, now_s: float) -> None:
        if self.standing is Standing.RESTING and not self._probing and now_s < self._until_s:
            return  # was under way when the rest began
        self.standing, self._probing = Standing.RESTING, False
        self._until_s = now_s + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        self._probation = min(2 * self._probation, LONGEST_PROBATION)

    def lacks_news(self, now_s: float) -> bool:
        """Whether a load that says little says more than nothing."""
        return self.standing is not Standing.TRUSTED or self._probing or now_s - self._seen_s >= UNSEEN_S

    def probe_due(self, now_s: float) -> bool:
        if now_s < self._until_s:
            return False
        return self.standing in (Standing.NEW, Standing.RESTING) or now_s - self._seen_s >= UNSEEN_S

    def begin_probe(self, now_s: float) -> None:
        """Of one that never ends the next one begins after a longest rest."""
        self._probing, self._until_s = True, now_s + LONGEST_REST_S
        self.probes += 1


@dataclass(frozen=True, slots=True)
class RateSnapshot:
    """The rates at one moment, for :func:`~paddle_kv.offload.decision.decide`. Unknown or not to be used: infinite.

    Attributes:
        link_s, tier_s: seconds a block, over the link, and out of the tier.
        base_s, slope_s: a token at position p is computed in ``base_s + slope_s * p``. None: unknown.
        block_tokens: tokens a block.
        link_waits, tier_waits: whether the model may wait for what comes from there.
        link_late, tier_late: a load is given up behind so many times what was expected of it.
    """

    link_s: float
    tier_s: float
    base_s: float | None
    slope_s: float
    block_tokens: int
    link_waits: bool = True
    tier_waits: bool = True
    link_late: float = LATE_FACTOR
    tier_late: float = LATE_FACTOR

    def prefill_s(self, start_token: int, stop_token: int) -> float:
        """Seconds to compute these tokens of a prompt; infinite where unknown."""
        if self.base_s is None:
            return math.inf
        return (stop_token - start_token) * (self.base_s + self.slope_s * (start_token + stop_token) / 2)


class Rates:
    """Measured while serving. Any thread may observe.

    Args:
        block_bytes: of one block, all layers.
        block_tokens: tokens a block.
        clock: seconds, only differences count.

    Raises:
        TypeError: a clock that cannot be called; bytes or tokens that are no integer.
        ValueError: bytes or tokens that are not in [1, 2**63).

    Sources have names: "onload" is the link to the device, "offload" the link from it, "tier" the tier below. Each call
    that takes one raises ValueError for another; numbers that are none, or not in their range, are a TypeError or a
    ValueError, and change nothing.

    Example:
        >>> from paddle_kv.offload.rates import Rates
        >>> rates = Rates(block_bytes=1_000_000, block_tokens=16)
        >>> rates.load_s(10) is None
        True
        >>> rates.observe_load("onload", num_bytes=4_000_000, seconds=0.002)
        >>> round(rates.load_s(10), 6)
        0.005
        >>> rates.observe_prefill(start_token=0, num_tokens=512, seconds=0.0512)
        >>> round(rates.compute_s(0, 10), 6)
        0.016
    """

    def __init__(self, block_bytes: int, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        check_callable(clock, "clock", "a function that gives seconds")
        self.block_bytes = checked_count(block_bytes, "block_bytes", least=1)
        self.block_tokens = checked_count(block_tokens, "block_tokens", least=1)
        self._clock = clock
        self._lock = threading.Lock()
        self._sources = {LINK: Source(), LINK_UP: Source(), TIER: Source()}
        self._prefill = Prefill()
        self._heard_s, self._unheard_passes = -math.inf, 0  # of the model
        self._measures = self._confirms = False  # the next pass; one more, since that was far quicker than expected
        self._begun: deque[Begun] = deque(maxlen=MOST_BEGUN)  # of all prompts
        self._begun_tokens = self._waiting_passes = 0  # the same
        self._snapshot: RateSnapshot | None = None

    # ---- what was seen ----
    def observe_load(self, name: str, num_bytes: int, seconds: float, *, shared: bool = False) -> None:
        """A load from ``name`` ("onload": the link, "tier") arrived in time; also a probe. ``shared``: others came
        beside it, so that it took longer than it would: it counts where nothing better is known.

        Raises:
            TypeError: not numbers.
            ValueError: no such source, or a number outside of [1e-30, 1e30].
        """
        _check_positive(num_bytes=num_bytes, seconds=seconds)
        source = self._source(name)
        with self._lock:
            now_s = self._clock()
            if not shared or source.lacks_news(now_s):
                source.arrived(num_bytes, seconds, now_s)
                self._snapshot = None

    def observe_save(self, num_bytes: int, seconds: float) -> None:
        """A save went over the link. Until a load has, it is what is expected of one."""
        _check_positive(num_bytes=num_bytes, seconds=seconds)
        with self._lock:
            self._sources[LINK_UP].pace.observe(seconds / num_bytes)
            self._snapshot = None

    def observe_late(self, name: str, num_bytes: int, seconds: float) -> None:
        """A load of so many bytes was not there after so many seconds, and was given up."""
        _check_positive(num_bytes=num_bytes, seconds=seconds)
        source = self._source(name)
        with self._lock:
            source.late_loads += 1
            source.pace.at_least(seconds / num_bytes)
            source.fault(self._clock())
            self._snapshot = None

    def observe_failed(self, name: str) -> None:
        """A load from there failed: an error, a wrong checksum, something missing."""
        source = self._source(name)
        with self._lock:
            source.failed_loads += 1
            source.fault(self._clock())
            self._snapshot = None

    def observe_prefill(self, start_token: int, num_tokens: int, seconds: float) -> None:
        """The model has computed these tokens of a prompt, and waited for nothing meanwhile."""
        start_token = checked_count(start_token, "start_token")
        _check_positive(num_tokens=num_tokens, seconds=seconds)
        with self._lock:
            self._prefill.observe(start_token, num_tokens, seconds)
            self._heard_s, self._unheard_passes = self._clock(), 0
            may_confirm = self._measures or self._prefill.observations <= FIRST_PASSES
            self._measures, self._confirms = False, may_confirm and self._prefill.is_doubted
            self._snapshot = None

    def begin_pass(self, num_tokens: int, now_s: float, *, waits: bool) -> Begun:
        """The model computes these tokens of a prompt next; ``waits``: for loads. What :meth:`share_of` takes."""
        with self._lock:
            begun = Begun(now_s, self._begun_tokens, self._waiting_passes)
            self._begun.append(begun)
            self._begun_tokens += num_tokens
            self._waiting_passes += waits
            self._unheard_passes += waits
            return begun

    def abort_pass(self, begun: Begun) -> None:
        """Its prompt is aborted, and passes that share their time with it say nothing of the model. What it takes of
        that depends on the server: one may not have come to it yet, or stop in the middle, or go on with it to the end
        of the pass. To guess wrong may make the others twice as quick, or as slow, as they are."""
        with self._lock:
            begun.is_aborted = True

    def share_of(self, begun: Begun, num_tokens: int, seconds: float) -> float | None:
        """What of the seconds since the pass over so many tokens began was that of the pass, and not of others that
        began since, or shortly before, and not just now: prompts may be computed in turns, or in one pass. None: one of
        them had to wait for loads, or was aborted."""
        first_tokens, first_waiting = begun.tokens, begun.waiting
        with self._lock:
            end_tokens, end_waiting, is_behind = self._begun_tokens, self._waiting_passes, True
            for one in reversed(self._begun):
                if one.at_s < begun.at_s - TOGETHER * seconds:
                    break
                is_behind &= one.at_s > begun.at_s + (1 - TOGETHER) * seconds
                if is_behind:
                    end_tokens, end_waiting = one.tokens, one.waiting
                elif one.is_aborted:
                    return None
                else:
                    first_tokens, first_waiting = min(first_tokens, one.tokens), min(first_waiting, one.waiting)
            return None if end_waiting != first_waiting else num_tokens / (end_tokens - first_tokens)

    def end_pass(self, begun: Begun, num_tokens: int, seconds: float) -> WholePass:
        """The pass over so many tokens took so long, or less: a prompt may pause behind it. Returns all of what it was,
        with those of other prompts that began together with it."""
        with self._lock:
            begun.over_s = begun.at_s + seconds
            return self._whole(begun.at_s, num_tokens, seconds, begun)

    def begun_pass(self, num_tokens: int, now_s: float) -> WholePass:
        """What a pass over so many tokens is with those that have just begun."""
        with self._lock:
            if self._prefill.base_s is None:
                return WholePass(num_tokens, 1)
            return self._whole(now_s, num_tokens, math.inf)

    def running_pass(self, now_s: float) -> WholePass:
        """The last one that is not over, unless nothing more of it is expected."""
        with self._lock:
            end_tokens = self._begun_tokens
            if self._prefill.base_s is None:
                return NO_PASS
            for last in reversed(self._begun):
                tokens, end_tokens = end_tokens - last.tokens, last.tokens
                if not last.is_aborted and math.isinf(last.over_s):
                    found = self._whole(last.at_s, tokens, math.inf, last, only_running=True)
                    end_s = last.at_s + MOST_RUNNING * self._prefill.seconds(0, found.tokens)
                    return found if now_s <= end_s else NO_PASS
            return NO_PASS

    def _whole(
        self, at_s: float, tokens: int, most_s: float, own: Begun | None = None, *, only_running: bool = False
    ) -> WholePass:
        """Of ``own``, so many tokens, which began then, with those of others that began shortly before or behind: the
        more of them there are, the longer it takes, and the farther from each other they may have begun. What was over
        by then was the pass before."""
        near: list[tuple[float, int, float]] = []
        known, end_tokens = self._prefill.base_s is not None, self._begun_tokens
        if known and self._begun:
            most_s = min(most_s, self._prefill.seconds(0, tokens + end_tokens - self._begun[0].tokens))
        for one in reversed(self._begun):
            num_tokens, end_tokens = end_tokens - one.tokens, one.tokens
            if one.at_s < at_s - TOGETHER * most_s:
                break
            is_other = one is not own and not one.is_aborted and not (only_running and one.over_s < math.inf)
            if is_other and one.at_s <= at_s + TOGETHER * most_s:
                near.append((abs(one.at_s - at_s), num_tokens, one.over_s))
        prompts = 1
        for distance_s, num_tokens, over_s in sorted(near):
            pass_s = min(most_s, self._prefill.seconds(0, tokens + num_tokens)) if known else most_s
            if distance_s > TOGETHER * pass_s:
                break
            if over_s > at_s + TOGETHER * pass_s:
                tokens, prompts = tokens + num_tokens, prompts + 1
        return WholePass(tokens, prompts)

    # ---- by hand ----
    def set_load(self, name: str, bytes_per_s: float, spread: float = 0.05) -> None:
        """As if it had been measured, and were trusted; what is observed later counts on top."""
        _check_positive(bytes_per_s=bytes_per_s, spread=spread)
        source = self._source(name)
        with self._lock:
            source.pace.set(1 / bytes_per_s, spread)
            source.standing = Standing.TRUSTED
            self._snapshot = None

    def set_prefill(self, base_s: float, slope_s: float = 0.0) -> None:
        """Seconds a token, and how much more for each position; what is observed later counts on top."""
        _check_positive(base_s=base_s)
        if slope_s != 0:
            _check_positive(slope_s=slope_s)
        with self._lock:
            self._prefill.set(base_s, slope_s)
            self._snapshot = None

    # ---- what follows ----
    def load_s(self, num_blocks: int, name: str = LINK) -> float | None:
        """Expected seconds of a load; None if unknown."""
        num_blocks, pace = checked_count(num_blocks, "num_blocks"), self._pace(name)
        return None if pace is None else num_blocks * self.block_bytes * pace

    def late_s(self, num_blocks: int, name: str = LINK, wait_s: float = 0.0) -> float:
        """A load is late behind so many seconds; infinite if unknown. ``wait_s``: what is expected of the queue before
        it, which may be as late as the load may."""
        expected = self.load_s(num_blocks, name)
        return math.inf if expected is None else self._late(name) * (wait_s + expected) + LATE_S

    def compute_s(self, start_block: int, stop_block: int) -> float | None:
        """Expected seconds to compute these blocks of a prompt; None if unknown."""
        start_block = checked_count(start_block, "start_block")
        stop_block = checked_count(stop_block, "stop_block", start_block)
        if self._prefill.base_s is None:
            return None
        return self._prefill.seconds(start_block * self.block_tokens, stop_block * self.block_tokens)

    def is_unblamed(self, name: str) -> bool:
        """Whether nothing that came from there was ever late or failed."""
        source = self._source(name)
        return not source.late_loads and not source.failed_loads

    def standing(self, name: str) -> Standing:
        return self._source(name).standing

    def take_probe(self, name: str) -> bool:
        """Whether a small load is to find out about it now, beside computing, and awaited by nobody. One at a time, and
        no more than one a rest. Whoever is told so makes it, and observes how it ends."""
        source = self._source(name)
        with self._lock:
            now_s = self._clock()
            if not source.probe_due(now_s):
                return False
            source.begin_probe(now_s)
            return True

    def take_measurement(self, start_block: int, stop_block: int) -> bool:
        """Whether these blocks are to be computed, though it should be sooner to load them: nothing else says whether
        the model has become quicker since. Seldom, and once more where that was far quicker than expected.
        Whoever is told so computes them, and waits for nothing meanwhile."""
        seconds = self.compute_s(start_block, stop_block)
        if seconds is None:
            return False
        with self._lock:
            now_s = self._clock()
            is_due = self._unheard_passes >= UNHEARD_PASSES
            is_due &= now_s - self._heard_s >= max(UNSEEN_S, seconds / MEASURED_SHARE)
            confirms, self._confirms = self._confirms, False
            if is_due:
                self._heard_s, self._unheard_passes, self._measures = now_s, 0, True
            return is_due or confirms

    def snapshot(self) -> RateSnapshot:
        """What is known now."""
        with self._lock:
            if self._snapshot is None:
                link, tier = self._sources[LINK], self._sources[TIER]
                self._snapshot = RateSnapshot(
                    self._block_s(LINK),
                    self._block_s(TIER),
                    self._prefill.base_s,
                    self._prefill.slope_s,
                    self.block_tokens,
                    link.standing is Standing.TRUSTED,
                    tier.standing is Standing.TRUSTED,
                    self._late(LINK),
                    self._late(TIER),
                )
            return self._snapshot

    def stats(self) -> dict[str, float]:
        """Figures for metrics: 0 where nothing is known; rates in bytes a second, spreads as parts of 1."""
        figures: dict[str, float] = {}
        with self._lock:
            for name, source in self._sources.items():
                pace = source.pace.s_per_byte
                figures[f"{name}_bytes_per_s"] = 0.0 if pace is None else 1 / pace
                figures[f"{name}_spread"] = source.pace.spread if source.pace.observations else 0.0
                figures[f"{name}_late_loads"] = source.late_loads
                figures[f"{name}_failed_loads"] = source.failed_loads
                figures[f"{name}_probes"] = source.probes
                figures[f"{name}_trusted"] = source.standing is Standing.TRUSTED
            base_s = self._prefill.base_s
            figures["prefill_tokens_per_s"] = 0.0 if base_s is None else 1 / base_s
            figures["prefill_s_per_token_and_position"] = self._prefill.slope_s
            figures["prefill_spread"] = 0.0 if base_s is None else self._prefill.spread
        return figures

    def _source(self, name: str) -> Source:
        found = self._sources.get(name) if isinstance(name, str) else None
        if found is None:
            raise ValueError(f"name = {name!r} must be one of {', '.join(map(repr, self._sources))}")
        return found

    def _late(self, name: str) -> float:
        return max(LATE_FACTOR, math.exp(self._sources[name].pace.band))

    def _pace(self, name: str) -> float | None:
        own = self._source(name).pace.s_per_byte
        return self._sources[LINK_UP].pace.s_per_byte if own is None and name == LINK else own

    def _block_s(self, name: str) -> float:
        """Infinite where it is not used."""
        source, pace = self._sources[name], self._pace(name)
        usable = source.standing in (Standing.PROBATION, Standing.TRUSTED)
        usable |= source.standing is Standing.NEW and name == LINK  # by what saves have shown
        return pace * self.block_bytes if usable and pace is not None else math.inf


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        check_number(value, name, LEAST, MOST)
