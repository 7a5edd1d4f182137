"""Found prefixes that come from the back while the model computes them from the front. In sections only.

The prefix is cut into pieces. The last ones are loaded first, few at a time, so that what is on its way ends soon
(:mod:`.bringing`); the model takes the first one that is neither there nor on its way. Where a tier that is trusted
should bring a piece sooner than the model could compute it, the server waits for it before a pass, until it is late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ..schedule import settling, submission
from ..schedule.movement import Movement
from .bringing import Bringing
from .feed import Owner
from .found import BlockState
from .pieces import Piece, PieceState
from .prefetch import Prefetch
from .rates import LINK, TIER
from .waits import Step

_UNDER_WAY = (PieceState.LOADING, PieceState.CANCELLED)
EARLY_SHARE = 0.25  # of the time in which the tier should have read it


class Meeting(Bringing):
    """Of one prompt: what the model does next."""

    def next(self, books: Owner, most_blocks: int | None = None) -> Step:
        """What is computed now; nothing of it is, or comes to be, under way to the device behind ``leaving``. Of a
        piece at most ``most_blocks``: what is left of it may be loaded."""
        self._most_blocks = len(self._keys) if most_blocks is None else most_blocks
        self.begun, self._is_beside = True, False
        self.look()
        loads: list[Movement] = []
        others_s = 0.0  # when these should be there
        number, just_begun = self._front, None
        while number < len(self.line.pieces):
            piece = self.line.pieces[number]
            if piece is self._measured:
                self._measured = None
                if piece.state not in _UNDER_WAY and not self._is_done(piece):  # nobody else has brought it
                    return Step(self._take(piece))
            if stop := self._quicker_rest(piece, books, others_s):
                self._is_beside = bool(loads)
                self._load(books, self.line.join(number, self.line.at(stop)))
                self._is_beside = False
                piece = just_begun = self.line.pieces[number]
            if piece.state is PieceState.LOADING and not self._is_worth_waiting(piece, others_s, piece is just_begun):
                self._give_up(piece)
                continue
            if piece.state is PieceState.CANCELLED:
                return Step(leaving=self.moving[piece])
            if (read := self._worth_reading(piece, books, others_s)) is not None:
                self._is_beside = bool(loads)
                return Step(reading=self._reading[read], left_s=max(0.0, read.late_s - time.monotonic()))
            if piece.state is PieceState.LOADING:
                loads.append(self.moving[piece])
                others_s = max(others_s, piece.due_s)
            elif not self._is_done(piece):
                if (early := self._too_early(piece, loads)) is not None:
                    return early
                return self._with(Step(self._take(piece), tuple(loads)))
            number += 1
            if not loads:
                self._front = number
        return self._too_early(None, loads) or self._with(Step(None, tuple(loads)))

    def _too_early(self, piece: Piece | None, loads: Sequence[Movement]) -> Step | None:
        """A pass over the piece, or over what comes behind the prefix, that follows the tier begins when that is so far
        that the pass goes through without waiting: it ends no sooner if it begins before, and until then the server may
        compute others. A part of the time earlier, since the tier may be quicker."""
        now_s = time.monotonic()
        for followed, prefetch in self._followed.items():
            movement = self.moving[followed]
            if movement in loads and movement.unread and not movement.failed:
                taken = piece and Piece(piece.start, self._stop_of(piece))
                pass_s = self._waits.pass_s(self._rates.snapshot(), taken)
                early_s = EARLY_SHARE * (followed.due_s - followed.begin_s)
                left_s = min(followed.due_s - pass_s - early_s, followed.late_s) - now_s
                if left_s > 0.0:
                    return Step(reading=prefetch, left_s=left_s)
        return None

    def _is_done(self, piece: Piece) -> bool:
        return piece.state in (PieceState.LOADED, PieceState.COMPUTED)

    def _give_up(self, piece: Piece) -> None:
        """Its load, which may have written some of it, and is over before anybody else does."""
        movement = self.moving[piece]
        self.line.set(piece, PieceState.CANCELLED)
        settling.progress(submission.cancel(movement))
        settling.look(movement)
        self.look()

    def _quicker_rest(self, piece: Piece, books: Owner, others_s: float) -> int:
        """Where it ends, if the model should wait for all that is in host memory from this piece on, layer by layer,
        rather than compute the piece first; else 0. It is asked for each chunk, so it does not go through the rest
        before all of that is about to be loaded."""
        while self._rates.snapshot().link_waits:
            self._look_below(piece.start, books)
            if piece.state is not PieceState.WAITING:
                break
            stop = self.line.waiting_stop(piece.start)
            if not self._is_quicker(piece, stop, books, others_s):
                break
            run = self.line.pieces[self.line.at(piece.start) : self.line.at(stop)]
            gone = [one for one in run if not self._is_here(one, books)]
            if not gone:
                return stop
            for one in gone:  # somebody has dropped it
                self._lose(one)
        return 0

    def _look_below(self, start: int, books: Owner) -> None:
        """Others may have brought into host memory what comes behind the pieces that wait there."""
        while (at := self.line.at(self.line.waiting_stop(start))) < len(self.line.pieces):
            piece = self.line.pieces[at]
            if piece.state is not PieceState.BELOW or not self._is_here(piece, books):
                break
            self.line.set(piece, PieceState.WAITING)

    def _is_quicker(self, first: Piece, stop: int, books: Owner, others_s: float) -> bool:
        now_s, rates, reading = time.monotonic(), self._rates.snapshot(), self.line.num_reading
        behind = self.line.num_to_compute - (stop - first.start)  # before it nothing is to be computed
        from_tier, tier_wait_s = 0, 0.0
        if rates.tier_waits:
            below = max(0, self._below[-1].stop - max(stop, self._below[0].start)) if self._below else 0
            from_tier = min(reading + below, behind)
        if from_tier:
            tier_wait_s = max(0, books.num_reading_blocks - reading) * rates.tier_s
            if not below:  # what others have asked for since stands behind it
                tier_wait_s = min(tier_wait_s, max(0.0, self._asked_until_s - now_s - reading * rates.tier_s))
        return self._waits.for_rest(
            rates,
            first.start,
            self._stop_of(first),
            stop,
            tier_blocks=from_tier,
            behind_blocks=behind - from_tier,
            link_wait_s=max(0.0, books.feed.free_s - now_s),
            tier_wait_s=tier_wait_s,
            others_s=max(0.0, others_s - now_s),
        )

    def _with(self, step: Step) -> Step:
        for piece, movement in self.moving.items():
            piece.awaited |= movement in step.loads
        return step

    def _stop_of(self, piece: Piece) -> int:
        """Of what the model computes of it in this pass."""
        return min(piece.stop, piece.start + self._most_blocks)

    def _take(self, piece: Piece) -> Piece:
        stop = self._stop_of(piece)
        if stop < piece.stop and not piece.parts:
            piece = self.line.split(piece, stop, self._states[piece.start : stop].count(BlockState.TIER))
        if piece.state is PieceState.LOST:
            self.lost_blocks.update(range(piece.start, piece.stop))
        self.num_computed_blocks += piece.size
        self._leave(piece, PieceState.COMPUTED)
        return piece

    def _is_worth_waiting(self, piece: Piece, others_s: float, is_sooner: bool = False) -> bool:
        """Whether its load is there in time, as far as anybody knows. ``others_s``: when the loads are that a pass over
        it has to wait for; ``is_sooner``: it should come sooner than the model would compute it."""
        if piece.awaited:
            return True
        if self.moving[piece].failed:  # whose fault that is was told
            return False
        now_s = time.monotonic()
        if now_s > piece.late_s:
            self._tell_late(piece, LINK)
            return False
        rates = self._rates.snapshot()
        if piece in self._followed:  # from the first layer on
            block_s = max(rates.link_s, rates.tier_s)
            waits = not math.isinf(block_s)
            return waits and self._comes_sooner(piece, piece.due_s - piece.size * block_s, piece.due_s, others_s)
        # All of the rest was begun while the link was trusted: until it is late it is worth more than to begin again.
        waits = rates.link_waits or (piece is self._whole and not math.isinf(rates.link_s))
        if not (waits or self._is_first_sign()) or self.moving[piece].num_unsubmitted:
            return False
        return is_sooner or self._comes_sooner(piece, piece.begin_s, piece.due_s, others_s)

    def _comes_sooner(self, piece: Piece, begin_s: float, there_s: float, others_s: float) -> bool:
        """Than the model would compute it; ``begin_s``: its load."""
        now_s = time.monotonic()
        from_now = max(0.0, begin_s - now_s), there_s - now_s, max(0.0, others_s - now_s)
        return self._waits.for_one(self._rates.snapshot(), piece.start, piece.stop, *from_now)

    def _worth_reading(self, piece: Piece, books: Owner, others_s: float) -> Piece | None:
        """What is to come from the tier next, if this piece comes from there, and over the link, in time."""
        rates = self._rates.snapshot()
        if not self._reading or not (rates.tier_waits and rates.link_waits):
            return None
        now_s = time.monotonic()
        if piece.state is PieceState.READING:
            read, due_s = piece, piece.due_s
            if due_s < now_s:  # the tier does others first, perhaps some that nobody wants any more
                due_s = max(now_s, self._asked_until_s)
        elif piece.state is PieceState.BELOW and self._below and self._below[0].start <= piece.start:
            read = next(iter(self._reading))
            before = books.num_reading_blocks + self._below[-1].stop - piece.start  # they are read from the back
            due_s = now_s + before * rates.tier_s
        else:
            return None
        begin_s = max(due_s, books.feed.free_s)
        there_s = begin_s + piece.size * rates.link_s
        if others_s:
            begin_s = due_s  # beside these
        if not now_s <= read.late_s < math.inf:  # or it was asked for when nothing was known of the tier
            return None
        return read if self._comes_sooner(piece, begin_s, there_s, others_s) else None

    def read_late(self, reading: Prefetch) -> None:
        """The model has waited for it until its time was over."""
        self._look_at_reading()
        for piece, prefetch in [*self._reading.items()]:
            if prefetch is reading and time.monotonic() >= piece.late_s:
                self._tell_late(piece, TIER)
                self._leave(piece, PieceState.LOST)

    def compute_again(self) -> None:
        """Behind a load that has failed: what was computed with it is not what it should be."""
        self.look()
        pieces = self.line.pieces
        wrong_from, self._wrong_from = self._wrong_from, len(self._keys)
        lost = (
            number
            for number, one in enumerate(pieces)
            if (one.awaited and one.state is PieceState.LOST) or one.stop > wrong_from
        )
        first = next(lost, 0)
        for piece in pieces[first:]:
            if piece.state is PieceState.COMPUTED:
                self.line.set(piece, PieceState.LOST)
        for piece in pieces:
            piece.awaited &= piece.state is not PieceState.LOST
        self._front = first
