"""The pieces of a found prefix, and what is asked of them for each chunk: how many blocks are to be computed still, and
how far those in host memory reach. Both are kept up to date, so that no answer goes through all of a long prompt."""

from __future__ import annotations

import enum
import time
from bisect import bisect_left, insort
from collections.abc import Sequence

from .found import BlockState
from .rates import Rates


class PieceState(enum.Enum):
    """``BELOW``: in the tier. ``WAITING`` in host memory, to be loaded, or to be computed; ``READING`` from the tier;
    ``LOADING`` to the device; ``CANCELLED`` while that is under way; ``LOADED``; ``LOST``: does not come; ``COMPUTED``,
    or handed out for it."""

    BELOW = "below"
    WAITING = "waiting"
    READING = "reading"
    LOADING = "loading"
    CANCELLED = "cancelled"
    LOADED = "loaded"
    LOST = "lost"
    COMPUTED = "computed"


_TO_LOAD = frozenset({PieceState.BELOW, PieceState.WAITING, PieceState.READING})
_TO_COMPUTE = _TO_LOAD | {PieceState.LOST}


class Piece:
    """Blocks of a prompt that come together.

    Attributes:
        start, stop: their positions.
        state: changed by :meth:`Line.set` alone.
        awaited: the model has computed with it, or is about to.
        parts: those that come together as this one.
        tier_blocks: of it that lay in the tier.
        is_probe: it is to find out about the tier, also if the model does not need it any more, or about the link.
        begin_s: when its reading, or its load, should begin: set by :meth:`expect`, as the next three.
        num_blocks: that are moved from then on until it is there.
        due_s, late_s: when it should be there; when it is late.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.state = PieceState.WAITING
        self.parts: Sequence[Piece] = ()
        self.tier_blocks = 0
        self.awaited = self.is_probe = False
        self.begin_s: float
        self.num_blocks: int
        self.due_s: float
        self.late_s: float

    @property
    def size(self) -> int:
        """Blocks."""
        return self.stop - self.start

    def expect(self, num_blocks: int, rates: Rates, source: str, free_s: float = 0.0) -> None:
        """It is asked for, behind all that should be through at ``free_s`` and may be as late as it may itself."""
        now_s, self.num_blocks = time.monotonic(), num_blocks
        self.begin_s = max(now_s, free_s)
        self.due_s = self.begin_s + (rates.load_s(num_blocks, source) or 0.0)
        self.late_s = now_s + rates.late_s(num_blocks, source, self.begin_s - now_s)


LEAST_LEAD = 4  # of the link over the model: what it moves first stands before what the tier brings


def cut(states: Sequence[BlockState], chunk_blocks: int, rates: Rates) -> list[Piece]:
    """A prefix, into what the model computes in one pass. Blocks of host memory do not wait for those of the tier
    behind them in the same pass, where they are loaded far sooner than computed. Over a link that the model does not
    wait for, only what comes while it computes something else is loaded, and nothing would ever be heard of the link
    where one pass is all: so what comes in time of that is a piece by itself, at most half. And one block is, at the
    end, as long as nothing is known of the link."""
    num_blocks = len(states)
    pieces = [Piece(start, min(start + chunk_blocks, num_blocks)) for start in range(0, num_blocks, chunk_blocks)]
    if rates.snapshot().link_waits:
        _cut_at_tier(pieces, states, chunk_blocks, rates)
    elif pieces:
        last, load_s = pieces[-1], rates.load_s(1)
        if load_s is None or len(pieces) == 1:
            end = last.stop - (1 if load_s is None else _in_time(last, load_s, rates))
            if end > last.start:
                pieces[-1:] = [Piece(last.start, end), Piece(end, last.stop)]
    return pieces


def _in_time(piece: Piece, load_s: float, rates: Rates) -> int:
    """Blocks at its end that should come while the model computes the others, at least one and at most half.
    ``load_s``: of one block."""
    size, compute_s = piece.size, rates.compute_s(piece.start, piece.stop)
    num_blocks = size // 2
    if compute_s is not None:
        num_blocks = min(num_blocks, int(size * compute_s / (size * load_s + compute_s)))
    return max(1, num_blocks)


def _cut_at_tier(pieces: list[Piece], states: Sequence[BlockState], chunk_blocks: int, rates: Rates) -> None:
    if BlockState.TIER not in states:
        return
    first = states.index(BlockState.TIER)
    at = first // chunk_blocks
    start, stop = pieces[at].start, pieces[at].stop
    load_s, compute_s = rates.load_s(first - start), rates.compute_s(start, first)
    if load_s is not None and compute_s is not None and LEAST_LEAD * load_s < compute_s:
        pieces[at : at + 1] = [Piece(start, first), Piece(first, stop)]


class Line:
    """Pieces one behind the other, from block 0 on.

    Attributes:
        pieces: in order; changed by :meth:`join`, :meth:`part` and :meth:`split` alone.
        num_to_compute: blocks that are neither computed, nor loaded, nor on their way to the device.
        num_reading: those of them that are on their way from the tier.
        num_below: blocks of pieces that lie there, that do.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self.num_to_compute = self.num_reading = self.num_below = 0
        self._stop = pieces[-1].stop if pieces else 0
        self._ends: list[int] = []  # where pieces begin that do not wait in host memory, in order
        for piece in pieces:
            self._enter(piece)

    def _enter(self, piece: Piece) -> None:
        self._count(piece, 1)
        if piece.state is not PieceState.WAITING:
            insort(self._ends, piece.start)

    def _leave(self, piece: Piece) -> None:
        self._count(piece, -1)
        if piece.state is not PieceState.WAITING:
            del self._ends[bisect_left(self._ends, piece.start)]

    def _count(self, piece: Piece, sign: int) -> None:
        self.num_to_compute += sign * piece.size * (piece.state in _TO_COMPUTE)
        self.num_reading += sign * piece.size * (piece.state is PieceState.READING)
        self.num_below += sign * piece.tier_blocks * (piece.state is PieceState.BELOW)

    def set(self, piece: Piece, state: PieceState) -> None:
        """One of ``pieces``."""
        self._leave(piece)
        piece.state = state
        self._enter(piece)

    def at(self, block: int) -> int:
        """Which of the pieces begins there; as many as there are behind the last one."""
        return bisect_left(self.pieces, block, key=lambda piece: piece.start)

    def waiting_stop(self, block: int) -> int:
        """Where the pieces end that wait in host memory one behind the other, the first of which begins there."""
        at = bisect_left(self._ends, block)
        return self._ends[at] if at < len(self._ends) else self._stop

    def left(self) -> tuple[int, int]:
        """The pieces ``[first, stop)`` that are all that is to be computed, and none of them lost. The same number
        twice: there is something else between them, or one is lost."""
        first = next((at for at, piece in enumerate(self.pieces) if piece.state in _TO_COMPUTE), len(self.pieces))
        stop, blocks = first, 0
        while stop < len(self.pieces) and self.pieces[stop].state in _TO_LOAD:
            blocks += self.pieces[stop].size
            stop += 1
        return (first, stop) if blocks == self.num_to_compute else (first, first)

    def split(self, piece: Piece, stop: int, tier_blocks: int) -> Piece:
        """What of the piece lies before ``stop``, with so many blocks of the tier, becomes one by itself, in front of
        it, and is returned."""
        front = Piece(piece.start, stop)
        self._leave(piece)
        front.state, piece.start = piece.state, stop
        front.tier_blocks, piece.tier_blocks = tier_blocks, piece.tier_blocks - tier_blocks
        self.pieces.insert(self.at(stop), front)
        for one in (front, piece):
            self._enter(one)
        return front

    def join(self, first: int, stop: int) -> Piece:
        """Pieces ``[first, stop)``, which are to be loaded, become one that waits."""
        parts = self.pieces[first:stop]
        whole = Piece(parts[0].start, parts[-1].stop)
        whole.parts = parts
        for part in parts:
            self._leave(part)
            part.state = PieceState.LOADED  # as the whole one, for whoever has a list of them
        self._enter(whole)
        self.pieces[first:stop] = [whole]
        return whole

    def part(self, whole: Piece, state: PieceState) -> None:
        """Its parts stand for themselves again, in this state."""
        at = self.at(whole.start)
        self._leave(whole)
        self.pieces[at : at + 1] = whole.parts
        for part in whole.parts:
            part.state, part.awaited = state, whole.awaited
            self._enter(part)
