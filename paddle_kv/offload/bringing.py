"""What comes of a found prefix from the back, for :mod:`.feeding`. In sections only.

A piece that lies in a tier is read into host memory before a load of it begins. What the tier reads last is followed: a
pass that begins meanwhile has the more of it the longer it takes. So all that is left comes as one load then, of what
is in host memory and of what the tier is still to read, each layer as soon as all of it is there.
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
from ..schedule import arriving, settling, submission
from ..schedule.movement import Movement, State
from ..schedule.resources import Events
from ..tracking.group import change
from ..tracking.keeper import log
from .feed import Owner
from .found import BlockState
from .passes import WholePass
from .pieces import Line, Piece, PieceState
from .prefetch import Prefetch
from .rates import LINK, TIER, Rates
from .waits import Waits
from .weighing import weigh

MOST_READING = 4  # pieces of one prompt that are read from the tier at a time
LATE_S = 1e-3  # behind the time at which a load is late somebody looks


class Bringing:
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
        self._rates, self._states = rates, states
        self._front = 0  # pieces before it are done
        self.lost_blocks: set[int] = set()
        num_layers = books.scheduler.device_cache.spec.num_layers
        self._waits = Waits(len(keys), num_tokens, chunk_tokens, num_layers)
        own, running = min(chunk_tokens, num_tokens), rates.running_pass(time.monotonic())
        self.share_passes(range(own), WholePass(running.tokens + own, running.prompts + 1))
        worth, tier_blocks = weigh(
            rates, states, num_tokens=num_tokens, chunk_tokens=chunk_tokens, num_layers=num_layers
        )
        for piece in pieces:
            piece.tier_blocks = states[piece.start : piece.stop].count(BlockState.TIER)
            if piece.tier_blocks:
                self.line.set(piece, PieceState.BELOW)
        self._is_loaded = worth.choice != "compute"
        self._measured: Piece | None = None  # the model computes it, though to load it should be sooner
        if self._is_loaded and rates.take_measurement(pieces[0].start, pieces[0].stop):
            self._measured, self._is_loaded = pieces[0], False
        self._whole: Piece | None = None  # of what is left, begun before the model came to it
        self._followed: dict[Piece, Prefetch] = {}  # of what is loaded, and is still being read
        self._to_read: list[Piece] = []  # its parts that were not in host memory
        self._wrong_from = len(keys)  # what was computed from this block on saw what did not come
        self._here = [piece for piece in pieces if piece.state is PieceState.WAITING and piece is not self._measured]
        self._below = [piece for piece in pieces if piece.state is PieceState.BELOW and piece is not self._measured]
        if not math.isinf(rates.snapshot().tier_s):  # else one of them may be a probe
            self._below = _last_of(self._below, tier_blocks) or self._below[-1:]
        if worth.choice == "compute" and not math.isinf(worth.load_s):
            self._here = self._here[-1:]  # now and then, so that it is heard of when the link is quicker again
        self._reading: dict[Piece, Prefetch] = {}
        self._asked_until_s = 0.0  # when the tier should have done with all that it was asked for
        self._read: list[Piece] = []
        self._has_joined, self._follows = False, True
        self._behind: Events | None = books.scheduler.resources.take_events(1)
        for event in self._behind:
            books.scheduler.backend.record(event, compute)
        self._feed = books.feed
        self._feed.add(self)

    def share_passes(self, tokens: range, whole: WholePass) -> None:
        """See :meth:`Waits.share_passes`."""
        self._waits.share_passes(tokens, whole)

    def look(self) -> None:
        """Books what has ended."""
        for piece, movement in [*self.moving.items()]:
            prefetch = self._followed.get(piece)
            if prefetch is not None:
                self._look_at_followed(piece, movement, prefetch)
            if not movement.over:
                continue
            del self.moving[piece]
            self._followed.pop(piece, None)
            if movement.state is State.DONE:
                self.line.set(piece, PieceState.LOADED)
            elif prefetch is not None and piece.parts:
                self._part(piece)
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
        """Its pieces come one by one, as if it had never been begun."""
        is_begun = whole.state is not PieceState.WAITING
        self._whole, self._is_loaded = None, False
        self._here = list(whole.parts)
        self.line.part(whole, PieceState.WAITING)
        if whole.awaited:
            self._wrong_from = min(self._wrong_from, whole.start)
            for piece in whole.parts:
                piece.awaited = False
        if not is_begun:
            self.line.set(self._here[-1], PieceState.LOST)  # it cannot begin, whatever the reason
        for piece in self._to_read:
            self.line.set(piece, PieceState.BELOW)
        self._below, self._to_read = self._below + self._to_read, []

    def _look_at_followed(self, piece: Piece, movement: Movement, prefetch: Prefetch) -> None:
        if movement.unread and not movement.failed and time.monotonic() > piece.late_s:
            self._tell_late(piece, TIER)
            _end_late(movement)
        if movement.failed and not prefetch.cancelled:
            prefetch.cancel()

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
        """Whether it is there before the model, if that begins now, could have computed all up to its end, or, where
        the model does not wait for the link, up to its beginning; with what is computed beside, as far as its
        beginning. Else the model would have to wait until it has been taken back; that costs as much as a call of an
        engine takes, and is done to hear of a link that nothing else uses."""
        rates, start = self._rates, self.line.pieces[self._front].start
        load_s, before_s = rates.load_s(piece.size, LINK), rates.compute_s(start, piece.start)
        if load_s is None:
            return not self.moving  # the first one tells
        if piece.is_probe or before_s is None:
            return True
        come_s = before_s * self._waits.times_as_long
        if rates.snapshot().link_waits or self._is_first_sign():
            come_s += rates.compute_s(piece.start, piece.stop) or 0.0
        if max(0.0, self._feed.free_s - time.monotonic()) + load_s > come_s:
            piece.is_probe = rates.take_probe(LINK)
            return piece.is_probe
        return True

    def _is_first_sign(self) -> bool:
        """Of a prefix of one block nothing comes while the model computes something else, so a link of which nothing
        bad is known would never be heard of."""
        return len(self._keys) == 1 and self._rates.load_s(1) is not None and self._rates.is_unblamed(LINK)

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
        """All that is left of the prefix, as one, if it comes within the pass behind the prefix, which follows it layer
        by layer, or else sooner than the model could compute the first of it: whenever that begins. Else the last piece
        of it."""
        start = last.stop - self.line.num_to_compute
        first = self.line.at(start)
        if not self._is_loaded or self.line.pieces[first].start != start or self.line.waiting_stop(start) != last.stop:
            return last
        number = self.line.at(last.start) + 1
        link_wait_s = max(0.0, books.feed.free_s - time.monotonic())
        if not self._waits.is_loaded_sooner(self._rates.snapshot(), start, last.stop, link_wait_s):
            return last
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
        piece.expect(len(keys), self._rates, LINK, books.feed.free_s)
        if self._is_beside:
            piece.begin_s = time.monotonic()
        books.feed.free_s = piece.due_s
        self._note_load(piece, transfer._movement, books)
        return True

    def _note_load(self, piece: Piece, movement: Movement, books: Owner) -> None:
        self.line.set(piece, PieceState.LOADING)
        self.moving[piece] = movement
        tell = functools.partial(_look, weakref.ref(books))
        if movement.over:
            books.group.host.tell(tell)
        else:
            movement.callbacks.append(tell)

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

    def read_next(self, books: Owner, turn_s: Callable[[], float | None]) -> None:
        """From the tier into host memory, from the back. ``turn_s``: until the model comes to this prompt; None:
        something is still to be brought to others first."""
        while self._below and len(self._reading) < MOST_READING:
            piece = self._below[-1]
            if piece.state in (PieceState.BELOW, PieceState.WAITING):
                if self._follow_rest(piece, books, turn_s):
                    break
                if math.isinf(self._rates.snapshot().tier_s):
                    piece.is_probe = self._rates.take_probe(TIER)
                    if not piece.is_probe:
                        return
                self._read_piece(piece, books)
            self._below.pop()
        self._join(books)

    def _follow_rest(self, last: Piece, books: Owner, turn_s: Callable[[], float | None]) -> bool:
        """Whether what the tier still has to read is loaded while it reads it, from here on: together with all that is
        left, as one, or by itself if that is one piece. ``last``: the next one to be read."""
        line, rates = self.line, self._rates.snapshot()
        if not (self._is_loaded and self._follows and line.num_below and books.reads_layerwise):
            return False
        others = line.num_below - (last.tier_blocks if last.state is PieceState.BELOW else 0)
        if not self._waits.is_time_to_follow(rates, others):
            return False
        tier_wait_s = max(0, books.num_reading_blocks - line.num_reading) * rates.tier_s
        link_wait_s = max(0.0, books.feed.free_s - time.monotonic())
        model_wait_s = turn_s()
        first, stop = (0, 0) if model_wait_s is None else line.left()
        is_sooner = functools.partial(self._waits.is_followed_sooner, rates, model_wait_s=model_wait_s or 0.0)
        if first == stop or not is_sooner(line.pieces[first:stop], tier_wait_s=tier_wait_s, link_wait_s=link_wait_s):
            if others:
                return False
            first = line.at(last.start)
            stop = first + 1
            tier_wait_s += line.num_reading * rates.tier_s
            link_wait_s += line.num_reading * rates.link_s
            if not is_sooner([last], tier_wait_s=tier_wait_s, link_wait_s=link_wait_s):
                return False
        self._follows = False  # once is enough, whatever comes of it
        return self._follow(first, stop, books, link_wait_s)

    def _follow(self, first: int, stop: int, books: Owner, link_wait_s: float) -> bool:
        """Loads these pieces as one. ``link_wait_s``: until the link has done what comes before."""
        parts = self.line.pieces[first:stop]
        start, end = parts[0].start, parts[-1].stop
        try:
            transfer, prefetch = books.follow(self._keys[start:end], self._device_ids[start:end], self._events(books))
        except Exception as error:  # noqa: BLE001  whatever it is: it comes piece by piece
            log.debug("what is left of a prefix is loaded piece by piece: %s", error)
            return False
        self._below = []
        if len(parts) == 1:
            [piece] = parts
        else:
            self._to_read = [part for part in parts if part.state is not PieceState.WAITING]
            for part in self._to_read:
                self._reading.pop(part, None)
            self._whole = piece = self.line.join(first, stop)
        piece.expect(prefetch.blocks_until, self._rates, TIER)
        link_s = self._rates.load_s(piece.size, LINK) or 0.0
        piece.due_s = max(piece.due_s, piece.begin_s + link_wait_s + link_s)
        piece.late_s += self._rates.late_s(piece.size, LINK, link_wait_s)
        books.feed.free_s = max(books.feed.free_s, piece.begin_s) + link_s
        self._followed[piece] = prefetch
        movement: Movement = transfer._movement
        try:
            books.call_at(piece.late_s + LATE_S, functools.partial(_look_at_late, weakref.ref(books), movement))
        except RuntimeError as error:  # no thread: whoever comes by next looks
            log.warning("nobody may look at a load that is late: %s", error)
        self._note_load(piece, movement, books)
        return True

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

    def over_s(self, begin_s: float) -> float:
        """From now until the model has computed it, if it begins then, and all is there or on its way."""
        now_s = time.monotonic()
        there_s = max((piece.due_s - now_s for piece in self.moving), default=0.0)
        return self._waits.over_s(self._rates.snapshot(), begin_s, there_s)

    @property
    def num_on_link(self) -> int:
        """Loads that are, or are about to be: not those that wait for the tier."""
        return sum(not (piece in self._followed and one.unread) for piece, one in self.moving.items())

    @property
    def under_way(self) -> list[Movement]:
        """Loads that are not over."""
        return list(self.moving.values())

    def end(self) -> None:
        """Nothing more of it begins; what is under way is dropped."""
        self.ended, self._behind = True, None
        for prefetch in [*self._reading.values(), *self._followed.values()]:
            prefetch.cancel()
        for movement in self.moving.values():
            settling.progress(submission.cancel(movement))


def _last_of(pieces: Sequence[Piece], tier_blocks: int) -> list[Piece]:
    """Those in which the last so many blocks of the tier lie."""
    first = len(pieces)
    while first and tier_blocks > 0:
        first -= 1
        tier_blocks -= pieces[first].tier_blocks
    return list(pieces[first:])


def _look_at_late(books: Callable[[], Owner | None], movement: Movement) -> None:
    """It should be there. Not in a section."""
    found = books()
    if found is not None:
        _look(books)
        with contextlib.suppress(ClosedError, ForkedError):
            change(found, functools.partial(_end_late, movement))


def _end_late(movement: Movement) -> None:
    """It waits for storage no more, also if its prompt is gone."""
    if movement.unread and not (movement.failed or movement.over):
        movement.told = True  # what it does not bring is computed: no word in the log
        arriving.fail(movement, "the tier has not brought it in time")


def _look(books: Callable[[], Owner | None]) -> None:
    """A load is over. Not in a section."""
    found = books()
    if found is not None:
        with contextlib.suppress(ClosedError, ForkedError):
            change(found, functools.partial(found.feed.fill, found))
