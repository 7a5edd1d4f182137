"""One prompt whose found prefix is loaded from the back while the model computes from the front. No I/O, no clock:
whoever drives it says what has happened, and asks what comes next.

A part of the prefix lies in one place, host memory or a tier. Of each part the model takes blocks from the front and
loads take them from the back; what is between is decided anew before each chunk, by the rates as they are known then.
So a load that is slower than expected moves the place where they meet, and nobody waits for it.

A load that the model would have to wait for is awaited only if its source is trusted, and if it should be there before
its blocks could have been computed; else it is cancelled, and its blocks are computed. An awaited one has a deadline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...offload.decision import Decision, Prompt, best_way
from ...offload.pieces import Piece, PieceState
from ...offload.rates import LINK, TIER, RateSnapshot
from ...offload.waits import Waits

WAITING, LOADING, LOADED, COMPUTED, LOST = range(5)  # of a block; a lost one is computed


@dataclass(eq=False, slots=True)
class Load:
    """Blocks ``[start, stop)`` of the prompt that come together.

    Attributes:
        place: where they are: "onload" (host memory, over the link) or "tier".
        layerwise: all that is left of its place, which the pass awaits: its layers come beside those of others, and
            out of a tier one by one. Others come one behind the other, and out of a tier as a whole. Of all of them a
            pass needs the first layer when it begins.
        due_s, late_s: when it should be there; when it is not awaited any more. By the clock of whoever drives.
        cancelled: nobody wants it any more.
    """

    place: str
    start: int
    stop: int
    layerwise: bool = False
    due_s: float = math.inf
    late_s: float = math.inf
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the model computes in one pass: tokens ``[start_token, stop_token)``.

    Attributes:
        start, stop: their blocks of the prefix; those of the end of the prompt do not count.
        awaits: loads that it needs, layer by layer.
        last: with it the prompt is done.
    """

    start_token: int
    stop_token: int
    start: int
    stop: int
    awaits: tuple[Load, ...]
    last: bool


@dataclass(slots=True)
class _Part:
    """Blocks ``[front, back)`` are neither computed nor being loaded; those from ``first`` on are to be loaded."""

    place: str
    front: int
    back: int
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.back


class Meeting:
    """See above.

    Args:
        prompt: nothing of it was done so far.
        block_tokens: tokens a block.
        chunk_tokens: most tokens of a pass.
        piece_blocks: of a load that is not layer by layer.

    Example:
        >>> from paddle_kv.offload.decision import Prompt
        >>> from paddle_kv.testing.prefixes.meeting import Meeting
        >>> from paddle_kv.offload.rates import RateSnapshot
        >>> meeting = Meeting(Prompt((0, 4), (4, 4), 64, 70), block_tokens=16, chunk_tokens=32, num_layers=4)
        >>> rates = RateSnapshot(link_s=0.016, tier_s=float("inf"), base_s=0.001, slope_s=0.0, block_tokens=16)
        >>> meeting.plan(rates).choice
        'meet'
        >>> chunk = meeting.next_chunk(0.0, rates)
        >>> chunk.start_token, chunk.stop_token
        (0, 32)
        >>> load = meeting.next_load("onload", 0.0, 0.032, rates)
        >>> load.start, load.stop  # as one: it would be there as soon as one more block were computed
        (2, 4)
    """

    def __init__(
        self, prompt: Prompt, *, block_tokens: int, chunk_tokens: int, num_layers: int, piece_blocks: int = 1
    ) -> None:
        self._prompt = prompt
        self._block_tokens, self._chunk_tokens, self._num_layers = block_tokens, chunk_tokens, num_layers
        found = max(prompt.host[1], prompt.tier[1])
        self._waits = Waits(found, prompt.num_tokens, chunk_tokens, num_layers, aligned=False)
        self._chunk_blocks = max(1, chunk_tokens // block_tokens)
        self._piece_blocks = piece_blocks
        parts = [_Part(LINK, *prompt.host), _Part(TIER, *prompt.tier)]
        self._parts = sorted((one for one in parts if one.front < one.back), key=lambda one: one.front)
        self._of = {one.place: one for one in self._parts}
        self._found = max((one.back for one in self._parts), default=0)
        self._state = bytearray(self._found)
        self._front = 0  # blocks before it are computed or loaded
        self._end = prompt.end_tokens  # tokens of the end of the prompt before it are computed
        self._lost = 0
        self.loading: list[Load] = []

    @property
    def done(self) -> bool:
        return self._end >= self._prompt.num_tokens

    @property
    def num_computed(self) -> int:
        """Blocks of the prefix that were computed, and not loaded."""
        return self._state.count(COMPUTED)

    @property
    def met(self) -> bool:
        """Whether no block is left that is neither there nor on its way."""
        return WAITING not in self._state and LOST not in self._state

    # ---- what is to be done ----
    def plan(
        self, rates: RateSnapshot, *, wait_s: float = 0.0, link_wait_s: float = 0.0, tier_wait_s: float = 0.0
    ) -> Decision:
        """Decides about what is left, see :func:`~paddle_kv.offload.decision.decide`."""
        nowhere = (self._found, self._found)
        left = {one.place: (one.front, one.back) for one in self._parts}
        if self._lost:
            wait_s += self._lost * rates.prefill_s(
                self._front * self._block_tokens, (self._front + 1) * self._block_tokens
            )
        found = best_way(
            rates,
            Prompt(left.get(LINK, nowhere), left.get(TIER, nowhere), self._end, self._prompt.num_tokens),
            chunk_tokens=self._chunk_tokens,
            num_layers=self._num_layers,
            wait_s=wait_s,
            link_wait_s=link_wait_s,
            tier_wait_s=tier_wait_s,
        )
        self.load_from(found.host_first, found.tier_first)
        return found

    def load_from(self, host_first: int, tier_first: int) -> None:
        """What a decision says, or somebody else: from these blocks on the parts are loaded."""
        for part in self._parts:
            part.first = min(max(host_first if part.place == LINK else tier_first, part.front), part.back)

    def needed_s(self, place: str, begin_s: float, pass_s: float) -> float:
        """When the model should come to what is loaded from there: at ``begin_s``, when it begins, if nothing before
        that is computed; else at ``pass_s``, with the end of the prompt."""
        for part in self._parts:
            if self._lost or part.first > part.front:
                return pass_s
            if part.place == place:
                break
        return begin_s

    def next_load(
        self, place: str, now_s: float, pass_s: float, rates: RateSnapshot, *, alone: bool = True
    ) -> Load | None:
        """The next load from there, or None; it is under way from now on.

        ``pass_s``: when the model should come to what is behind the part, see :meth:`needed_s`. If what is left takes
        until then, or nothing of it is worth computing meanwhile, it comes as one load, layer by layer. From a tier the
        latter only ``alone``, where no prompt before this one needs the tier.
        """
        part = self._of.get(place)
        if part is None or part.first >= part.back:
            return None
        left = part.back - part.first
        block_s = rates.link_s if place == LINK else max(rates.tier_s, rates.link_s)
        layerwise = (rates.link_waits if place == LINK else rates.tier_waits) and (
            now_s + left * block_s / self._num_layers >= pass_s or self._comes_as_one(rates, pass_s - now_s, alone)
        )
        return self._load(part, left if layerwise else min(self._piece_blocks, left), layerwise)

    def _comes_as_one(self, rates: RateSnapshot, wait_s: float, alone: bool) -> bool:
        """Whether nothing of what is left is to be computed, nor worth computing while it comes."""
        if self._lost or any(one.first > one.front for one in self._parts):
            return False
        below = sum(one.back - one.front for one in self._parts if one.place == TIER)
        if not below:
            return self._waits.is_loaded_sooner(rates, self._of[LINK].front, self._of[LINK].back, 0.0)
        if not alone:
            return False
        pieces = []
        for one in self._parts:
            piece = Piece(one.front, one.back)
            if one.place == TIER:
                piece.tier_blocks, piece.state = one.back - one.front, PieceState.BELOW
            pieces.append(piece)
        return self._waits.is_time_to_follow(
            rates, max(0, below - self._piece_blocks)
        ) and self._waits.is_followed_sooner(
            rates, pieces, tier_wait_s=0.0, link_wait_s=0.0, model_wait_s=max(0.0, wait_s)
        )

    def can_probe(self, place: str) -> bool:
        """Whether a block is left there."""
        part = self._of.get(place)
        return part is not None and part.front < part.back

    def probe(self, place: str) -> Load:
        """One block from the back, whatever was decided. Without a time at which it is due, it is never awaited."""
        return self._load(self._of[place], 1, False)

    def _load(self, part: _Part, num_blocks: int, layerwise: bool) -> Load:
        load = Load(part.place, part.back - num_blocks, part.back, layerwise)
        part.back -= num_blocks
        part.first = min(part.first, part.back)
        self._state[load.start : load.stop] = bytes([LOADING]) * num_blocks
        self.loading.append(load)
        return load

    def next_chunk(self, now_s: float, rates: RateSnapshot) -> Chunk | None:
        """What the model computes now; None if the prompt is done. Loads that would hold it up are cancelled, see
        :attr:`Load.cancelled`. What was to be loaded, and has not begun when the model comes to it, is computed, unless
        its source is trusted: call :meth:`next_load` before."""
        if self.done:
            return None
        awaits: list[Load] = []
        position = self._front
        while position < self._found:
            state = self._state[position]
            if state == LOADING:
                load = next(one for one in self.loading if one.start <= position < one.stop)
                if not self._is_worth_waiting(load, now_s, rates, max((one.due_s for one in awaits), default=now_s)):
                    self.load_lost(load)
                    continue
                awaits.append(load)
                position = load.stop
                continue
            if state in (WAITING, LOST):
                return self._chunk_of_prefix(position, awaits)
            position += 1
            if not awaits:
                self._front = position
        stop = min(self._end + self._chunk_tokens, self._prompt.num_tokens)
        chunk = Chunk(self._end, stop, self._found, self._found, tuple(awaits), stop == self._prompt.num_tokens)
        self._end = stop
        return chunk

    def _chunk_of_prefix(self, position: int, awaits: list[Load]) -> Chunk:
        stop = position
        limit = min(position + self._chunk_blocks, self._found)
        part = next(one for one in self._parts if position < one.back or one is self._parts[-1])
        if position < part.first:
            limit = min(limit, part.first)  # behind it comes what is loaded
        while stop < limit and self._state[stop] in (WAITING, LOST):
            self._lost -= self._state[stop] == LOST
            self._state[stop] = COMPUTED
            stop += 1
        for part in self._parts:
            if part.front < stop and part.front >= position:
                part.front = min(stop, part.back)
                part.first = max(part.first, part.front)
        first_token, last_token = position * self._block_tokens, stop * self._block_tokens
        last = False
        if stop == self._found:  # the pass has room for the beginning of the end
            self._end = min(max(first_token + self._chunk_tokens, last_token), self._prompt.num_tokens)
            last_token, last = self._end, self._end == self._prompt.num_tokens
        return Chunk(first_token, last_token, position, stop, tuple(awaits), last)

    def _is_worth_waiting(self, load: Load, now_s: float, rates: RateSnapshot, others_s: float) -> bool:
        """Whether its blocks would be computed later, as far as anybody knows. ``others_s``: when all others are there
        that the same pass awaits."""
        if not (rates.link_waits if load.place == LINK else rates.tier_waits) or now_s >= load.late_s:
            return False
        block_s = max(rates.tier_s, rates.link_s) if load.layerwise and load.place == TIER else rates.link_s
        begin_s = load.due_s - (load.stop - load.start) * block_s
        if load.layerwise and others_s > now_s:
            begin_s = now_s  # beside these
        waits = max(0.0, begin_s - now_s), load.due_s - now_s, max(0.0, others_s - now_s)
        return self._waits.for_one(rates, load.start, load.stop, *waits)

    # ---- what has happened ----
    def load_done(self, load: Load) -> None:
        """It is on the device. One that was cancelled changes nothing."""
        if not load.cancelled:
            self.loading.remove(load)
            self._state[load.start : load.stop] = bytes([LOADED]) * (load.stop - load.start)

    def load_lost(self, load: Load) -> None:
        """It failed, is late, or is not wanted: its blocks are computed. A chunk that awaited it has failed."""
        if not load.cancelled:
            load.cancelled = True
            self.loading.remove(load)
            self._state[load.start : load.stop] = bytes([LOST]) * (load.stop - load.start)
            self._lost += load.stop - load.start
            self._front = min(self._front, load.start)

    def chunk_failed(self, chunk: Chunk) -> None:
        """What it awaited did not come: it is computed again."""
        self._state[chunk.start : chunk.stop] = bytes([LOST]) * (chunk.stop - chunk.start)
        self._lost += chunk.stop - chunk.start
        self._front = min([self._front, chunk.start, *(load.start for load in chunk.awaits)])
        if chunk.stop_token > self._prompt.end_tokens or chunk.stop == self._found:
            self._end = max(self._prompt.end_tokens, chunk.start_token)

    def late(self, now_s: float) -> list[Load]:
        """Loads whose time is over; each is to be given up with :meth:`load_lost`."""
        return [load for load in self.loading if now_s >= load.late_s]
