"""Found prefixes that come from the back while the model computes them from the front. In sections only.

The prefix is cut into pieces. The last ones are loaded first, few at a time, so that what is on its way ends soon; the
model takes the first one that is neither there nor on its way. A piece that lies in a tier is read into host memory
before a load of it begins: nothing on the device ever waits for storage. The server does, before a pass, where a tier
that is trusted should bring the piece sooner than the model could compute it, and until that is late.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable, Sequence

from ..backend.work import Stream
from ..errors import ClosedError, ForkedError
from ..schedule import settling, submission
from ..schedule.movement import Movement, State
from ..schedule.resources import Events
from ..tracking.group import change
from ..tracking.keeper import log
from .feed import Owner
from .found import BlockState
from .pieces import Line, Piece, PieceState
from .prefetch import Prefetch
from .rates import LINK, TIER, Rates
from .waits import Step, Waits
from .weighing import weigh

MOST_READING = 4  # pieces of one prompt that are read from the tier at a time


class Meeting:
    """Of one prompt.

    Args:
        keys: of the found prefix, which a lease holds.
        device_ids: as many.
        states: where the blocks were found.
        pieces: of the prefix, from the first one on.
        rates: as they are measured.
        compute: the loads come behind what was submitted to this stream so far, and behind nothing that comes later.
        num_tokens: of the whole prompt.
        chunk_tokens: that the model computes in one pass.

    Attributes:
        keys: as given.
        lost_blocks: positions of blocks that did not come.
        num_computed_blocks: of the prefix.
    """

    def __init__(
        self,
        books: Owner,
        keys: Sequence[bytes],
        device_ids: Sequence[int],
        states: Sequence[BlockState],
        pieces: Sequence[Piece],
        rates: Rates,
        compute: Stream,
        num_tokens: int,
        chunk_tokens: int,
    ) -> None:
        self.line = Line(pieces)
        self.moving: dict[Piece, Movement] = {}
        self.begun = self.ended = False
        self._is_beside = False  # the model waits for what is loaded next together with what is under way
        self.num_computed_blocks = 0
        self._keys, self._device_ids = list(keys), list(device_ids)
        self.keys = frozenset(keys)
        self._rates = rates
        self._front = 0  # pieces before it are done
        self.lost_blocks: set[int] = set()
        num_layers = books.scheduler.device_cache.spec.num_layers
        self._waits = Waits(len(keys), num_tokens, chunk_tokens, num_layers)
        worth = weigh(rates, states, num_tokens=num_tokens, chunk_tokens=chunk_tokens, num_layers=num_layers)
        for piece in pieces:
            if BlockState.TIER in states[piece.start : piece.stop]:
                self.line.set(piece, PieceState.BELOW)
        self._is_loaded = worth.choice != "compute"
        self._whole: Piece | None = None  # of what is left, begun before the model came to it
        self._here = [piece for piece in pieces if piece.state is PieceState.WAITING]
        self._below = [piece for piece in pieces if piece.state is PieceState.BELOW]
        if not math.isinf(rates.snapshot().tier_s):  # else one of them may be a probe
            self._below = [one for one in self._below if one.stop > worth.tier_first] or self._below[-1:]
        if worth.choice == "compute" and not math.isinf(worth.load_s):
            self._here = self._here[-1:]  # now and then, so that it is heard of when the link is quicker again
        self._reading: dict[Piece, Prefetch] = {}
        self._asked_until_s = 0.0  # when the tier should have done with all that it was asked for
        self._read: list[Piece] = []
        self._has_joined = False
        self._behind: Events | None = books.scheduler.resources.take_events(1)
        for event in self._behind:
            books.scheduler.backend.record(event, compute)
        self._feed = books.feed
        self._feed.add(self)

    # ---- the back ----
    def look(self) -> None:
        """Books what has ended."""
        for piece, movement in [*self.moving.items()]:
            if not movement.over:
                continue
            del self.moving[piece]
            if movement.state is State.DONE:
                self.line.set(piece, PieceState.LOADED)
            else:
                self._lose(piece)
        self._look_at_reading()

    def _lose(self, piece: Piece) -> None:
        if piece is self._whole and piece.state is not PieceState.LOADING and not piece.awaited:
            self._part(piece)
        elif piece.parts:
            self.line.part(piece, PieceState.LOST)
        else:
            self.line.set(piece, PieceState.LOST)

    def _part(self, whole: Piece) -> None:
        """The model does not wait for it: its pieces come one by one, as if it had never been begun."""
        is_begun = whole.state is PieceState.CANCELLED
        self._whole, self._is_loaded = None, False
        self._here = list(whole.parts)
        self.line.part(whole, PieceState.WAITING)
        if not is_begun:
            self.line.set(self._here[-1], PieceState.LOST)  # it cannot begin, whatever the reason

    def _look_at_reading(self) -> None:
        for piece in [piece for piece, prefetch in self._reading.items() if prefetch.done]:
            del self._reading[piece]
            self.line.set(piece, PieceState.WAITING)
            self._read.append(piece)
            for one in self._reading:
                if one.begin_s <= piece.begin_s:  # the tier has done this one first
                    one.late_s += self._rates.late_s(piece.size, TIER)
        for piece in [piece for piece in self._reading if time.monotonic() > piece.late_s]:
            self._tell_late(piece, TIER)
            self._leave(piece, PieceState.LOST)

    def _tell_late(self, piece: Piece, source: str) -> None:
        num_bytes = piece.num_blocks * self._rates.block_bytes
        self._rates.observe_late(source, num_bytes, time.monotonic() - piece.begin_s)

    def _leave(self, piece: Piece, state: PieceState) -> None:
        """Does not read it any more."""
        self.line.set(piece, state)
        prefetch = self._reading.pop(piece, None)
        if prefetch is not None and not piece.is_probe:
            prefetch.cancel()

    @property
    def next_load(self) -> Piece | None:
        """What is in host memory, from the back, if it comes in time."""
        for pieces in (self._read, self._here):
            while pieces and pieces[-1].state is not PieceState.WAITING:
                pieces.pop()
            if pieces:
                return pieces[-1] if self._comes_in_time(pieces[-1]) else None
        return None

    def _comes_in_time(self, piece: Piece) -> bool:
        """Whether it is there before the model, if that begins now, could have computed all up to its end. Else the
        model would have to wait until it has been taken back; that costs as much as a call of an engine takes, and is
        done to hear of a link that nothing else uses."""
        rates, start = self._rates, self.line.pieces[self._front].start
        load_s, compute_s = rates.load_s(piece.size, LINK), rates.compute_s(start, piece.stop)
        if load_s is None:
            return not self.moving  # the first one tells
        if piece.is_probe or compute_s is None:
            return True
        if max(0.0, self._feed.free_s - time.monotonic()) + load_s > compute_s:
            piece.is_probe = rates.take_probe(LINK)
            return piece.is_probe
        return True

    @property
    def blocks_left(self) -> tuple[bool, int]:
        """Until the model comes to what is to be loaded next. Who has not begun to compute comes behind all others."""
        piece = self.next_load
        assert piece is not None
        return not self.begun, piece.start - self.line.pieces[self._front].start

    def load_next(self, books: Owner, *, whole: bool) -> bool:
        """Whether it comes. ``whole``: it may be all that is left."""
        piece = self.next_load
        assert piece is not None
        return self._load(books, self._rest_until(piece, books) if whole else piece)

    def _rest_until(self, last: Piece, books: Owner) -> Piece:
        """All that is left of the prefix, as one, if it comes within the pass behind the prefix: whenever that begins,
        nothing is sooner than to load it layer by layer. Else the last piece of it."""
        left = self.line.num_to_compute
        start = last.stop - left
        first = self.line.at(start)
        if (
            not self._is_loaded
            or not self._waits.fits_pass(self._rates.snapshot(), left)
            or self.line.pieces[first].start != start
            or self.line.waiting_stop(start) != last.stop
        ):
            return last
        number = self.line.at(last.start) + 1
        if not all(self._is_here(piece, books) for piece in self.line.pieces[first:number]):
            return last
        self._whole = self.line.join(first, number)
        return self._whole

    def _load(self, books: Owner, piece: Piece) -> bool:
        keys, ids = self._keys[piece.start : piece.stop], self._device_ids[piece.start : piece.stop]
        if not self._is_here(piece, books):
            self._lose(piece)  # the tier has not brought it, or another one is about to
            return False
        try:
            transfer = books.onload(keys, ids, self._events(books), urgent=self._is_beside or None)
        except Exception as error:  # noqa: BLE001  whatever it is: it is computed
            log.debug("a part of a prefix is computed and not loaded: %s", error)
            self._lose(piece)
            return False
        movement: Movement = transfer._movement
        self.line.set(piece, PieceState.LOADING)
        piece.expect(len(keys), self._rates, LINK, books.feed.free_s)
        if self._is_beside:
            piece.begin_s = time.monotonic()
        books.feed.free_s = piece.due_s
        self.moving[piece] = movement
        tell = functools.partial(_look, weakref.ref(books))
        if movement.over:
            books.group.host.tell(tell)
        else:
            movement.callbacks.append(tell)
        return True

    def _is_here(self, piece: Piece, books: Owner) -> bool:
        """Whether host memory has all of it."""
        slots, arriving = books.index.slots, books.index.arriving
        return all(key in slots and key not in arriving for key in self._keys[piece.start : piece.stop])

    def _events(self, books: Owner) -> Events:
        """What a load has to wait for on the device: nothing, as soon as that is known to be over."""
        backend, resources = books.scheduler.backend, books.scheduler.resources
        if self._behind is not None and all(backend.is_complete(event) for event in self._behind):
            self._behind = None
        found: Events = resources.take_events(0) if self._behind is None else self._behind
        return found

    def read_next(self, books: Owner) -> None:
        """From the tier into host memory, from the back."""
        while self._below and len(self._reading) < MOST_READING:
            piece = self._below[-1]
            if piece.state in (PieceState.BELOW, PieceState.WAITING):
                if math.isinf(self._rates.snapshot().tier_s):
                    piece.is_probe = self._rates.take_probe(TIER)
                    if not piece.is_probe:
                        return
                self._read_piece(piece, books)
            self._below.pop()
        self._join(books)

    def _join(self, books: Owner) -> None:
        """What somebody has asked the tier for, before this prompt came, is awaited as what is read for it: also what
        it would not have asked for itself, at the front."""
        if self._has_joined:
            return
        self._has_joined = True
        for piece in self.line.pieces:
            if piece.state is PieceState.BELOW and books.is_read(self._keys[piece.start : piece.stop]):
                self._read_piece(piece, books)

    def _read_piece(self, piece: Piece, books: Owner) -> None:
        try:
            prefetch = books.read_soon(self._keys[piece.start : piece.stop])
        except Exception as error:  # noqa: BLE001  of a policy; it may be another prompt that has come here
            log.warning("a part of a prefix is computed and not read from the tier: %r", error)
            self.line.set(piece, PieceState.LOST)
            return
        self.line.set(piece, PieceState.READING)
        self._reading[piece] = prefetch
        piece.expect(prefetch.blocks_until, self._rates, TIER)
        self._asked_until_s = max(self._asked_until_s, piece.due_s)
        self._look_at_reading()

    @property
    def under_way(self) -> list[Movement]:
        """Loads that are not over."""
        return list(self.moving.values())

    # ---- the front ----
    def next(self, books: Owner) -> Step:
        """What is computed now; nothing of it is, or comes to be, under way to the device behind ``leaving``."""
        self.begun, self._is_beside = True, False
        self.look()
        loads: list[Movement] = []
        others_s = 0.0  # when these should be there
        number = self._front
        while number < len(self.line.pieces):
            piece = self.line.pieces[number]
            if stop := self._quicker_rest(piece, books, others_s):
                self._is_beside = bool(loads)
                self._load(books, self.line.join(number, self.line.at(stop)))
                self._is_beside = False
                piece = self.line.pieces[number]
            if piece.state is PieceState.LOADING and not self._is_worth_waiting(piece, others_s):
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
                self._take(piece)
                return self._with(Step(piece, tuple(loads)))
            number += 1
            if not loads:
                self._front = number
        return self._with(Step(None, tuple(loads)))

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
        from_tier = 0
        if rates.tier_waits:
            below = max(0, self._below[-1].stop - max(stop, self._below[0].start)) if self._below else 0
            from_tier = min(reading + below, behind)
        return self._waits.for_rest(
            rates,
            first.start,
            first.stop,
            stop,
            tier_blocks=from_tier,
            behind_blocks=behind - from_tier,
            link_wait_s=max(0.0, books.feed.free_s - now_s),
            tier_wait_s=max(0, books.num_reading_blocks - reading) * rates.tier_s if from_tier else 0.0,
            others_s=max(0.0, others_s - now_s),
        )

    def _with(self, step: Step) -> Step:
        for piece, movement in self.moving.items():
            piece.awaited |= movement in step.loads
        return step

    def _take(self, piece: Piece) -> None:
        if piece.state is PieceState.LOST:
            self.lost_blocks.update(range(piece.start, piece.stop))
        self.num_computed_blocks += piece.size
        self._leave(piece, PieceState.COMPUTED)

    def _is_worth_waiting(self, piece: Piece, others_s: float) -> bool:
        """Whether its load is there in time, as far as anybody knows. ``others_s``: when the loads are that a pass over
        it has to wait for."""
        if piece.awaited:
            return True
        now_s = time.monotonic()
        if now_s > piece.late_s:
            self._tell_late(piece, LINK)
            return False
        rates = self._rates.snapshot()
        # All of the rest was begun while the link was trusted: until it is late it is worth more than to begin again.
        waits = rates.link_waits or (piece is self._whole and not math.isinf(rates.link_s))
        if not waits or self.moving[piece].num_unsubmitted:
            return False
        return self._comes_sooner(piece, piece.begin_s, piece.due_s, others_s)

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
        lost = (number for number, one in enumerate(pieces) if one.awaited and one.state is PieceState.LOST)
        first = next(lost, 0)
        for piece in pieces[first:]:
            if piece.state is PieceState.COMPUTED:
                self.line.set(piece, PieceState.LOST)
        for piece in pieces:
            piece.awaited &= piece.state is not PieceState.LOST
        self._front = first

    def end(self) -> None:
        """Nothing more of it begins; what is under way is dropped."""
        self.ended, self._behind = True, None
        for prefetch in self._reading.values():
            prefetch.cancel()
        for movement in self.moving.values():
            settling.progress(submission.cancel(movement))


def _look(books: Callable[[], Owner | None]) -> None:
    """A load is over. Not in a section."""
    found = books()
    if found is not None:
        with contextlib.suppress(ClosedError, ForkedError):
            change(found, functools.partial(found.feed.fill, found))
