"""One prompt that is computed chunk by chunk, from the front, while what was found of it comes from the back."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, get_args

from ..checks import check_ids
from ..errors import CancelledError, ClosedError, TransferError
from ..ops import _arguments as arguments
from ..ranges import count_of
from ..schedule.movement import Movement
from ..schedule.transfer import Transfer
from ..timeouts import check_timeout
from ..tracking.group import change
from ..tracking.keeper import Deadline
from .feeding import Meeting
from .found import BlockState
from .hashing import PrefixHasher
from .lease import Lease
from .passes import WholePass
from .pieces import Piece, cut
from .request import Request, full_table
from .waits import Step

LEAST_FULL = 9  # tenths, of passes that compute whole blocks

How = Literal["load", "compute", "sooner"]


class ChunkedRequest(Request):
    """What :meth:`KVOffloadManager.request` makes of ``chunk_tokens``. See :meth:`Request.next_chunk`."""

    def __init__(
        self,
        manager: Any,
        hashes: list[bytes],
        num_tokens: int,
        table: Sequence[int],
        block_size: int,
        how: str,
        chunk_tokens: int,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._meeting: Meeting | None = None
        self._lease: Lease | None = None
        self._ended = self._complete = False
        self._rest = range(0)  # of the chunk, where a call wanted less
        self._used: list[Transfer] = []  # loads whose blocks the model has read
        self._all_saves: list[Transfer] = []
        super().__init__(manager, hashes, num_tokens, table, block_size, how)

    def _begin(self, how: str) -> int:
        if how != "sooner":
            self._found = super()._begin(how)
            self._used += self.loads
            self._tail = self._found * self._block_size
            return self._found
        self._lease = self._manager._lookup(self.hashes, self._num_tokens, joins=True)
        self._found = found = self._lease.num_blocks
        self._tail = found * self._block_size  # the first token behind what was found, or computed together with it
        if found:
            books, compute = self._manager._books, self._manager._scheduler.compute_stream(None)
            pieces = cut(self._lease.states, self._chunk_tokens // self._block_size, books.rates)
            self._meeting = change(
                books,
                functools.partial(
                    books.begin_meeting,
                    self._lease,
                    self._table[:found],
                    pieces,
                    compute,
                    self._num_tokens,
                    self._chunk_tokens,
                ),
            )
        return 0

    def _save(self, found: int) -> None:
        """Chunk by chunk instead."""

    # ---- chunks ----
    def next_chunk(self, max_tokens: int | None = None, *, timeout_s: float | None = None) -> range | None:
        if max_tokens is not None and (max_tokens := arguments.integer(max_tokens, "max_tokens")) < 1:
            raise ValueError(f"max_tokens = {max_tokens} must be at least 1")
        check_timeout(timeout_s)
        if self._complete:
            return None
        if self._ended:  # what of the prefix did not come by then never does
            raise ClosedError("the request was cancelled, or its with block was left; make another one")
        deadline = Deadline(timeout_s)
        if self._handed_out is None:
            self._look_beside(min(max_tokens or self._chunk_tokens, self._chunk_tokens, self._num_tokens))
        self._note_computed()
        if any(load.failed for load in self._used):
            self.wait(deadline.left_s())
        while not self._rest:
            found = self._next_range(max_tokens, deadline)
            if found is not None:
                self._rest = found
            elif self.wait(deadline.left_s()):
                self._finish()
                self.loads, self.saves, self._complete = [], [], True
                return None
        tokens = self._rest if max_tokens is None else self._rest[:max_tokens]
        self._save_chunk(tokens)  # if that raises, the next call hands them out
        self._rest = self._rest[len(tokens) :]
        return self._hand_out(tokens)

    def _next_range(self, max_tokens: int | None, deadline: Deadline) -> range | None:
        most_blocks = None
        if max_tokens is not None and max_tokens < self._chunk_tokens:
            most_blocks = blocks_of_passes(max_tokens, self._block_size)
        piece = self._next_piece(most_blocks, deadline)
        if piece is not None:
            start, stop = piece.start * self._block_size, piece.stop * self._block_size
            if piece.stop == self._found:
                stop = self._tail = self._end_of_chunk(start)
            return range(start, stop)
        if self._tail >= self._num_tokens:
            return None
        start, self._tail = self._tail, self._end_of_chunk(self._tail)
        return range(start, self._tail)

    def _note_pass(self, tokens: range, whole: WholePass) -> None:
        if self._meeting is not None:
            self._meeting.share_passes(tokens, whole)

    def _look_beside(self, num_tokens: int) -> None:
        """The first pass, over so many tokens, begins with those of other prompts that have just begun."""
        if self._meeting is not None:
            self._note_pass(range(num_tokens), self._rates.begun_pass(num_tokens, time.monotonic()))

    def _end_of_chunk(self, token: int) -> int:
        return min((token // self._chunk_tokens + 1) * self._chunk_tokens, self._num_tokens)

    def _next_piece(self, most_blocks: int | None, deadline: Deadline) -> Piece | None:
        while self._meeting is not None:
            books = self._manager._books
            step: Step = change(books, functools.partial(self._meeting.next, books, most_blocks))
            if step.reading is not None:
                self._wait_for_reading(step, deadline)
            elif step.leaving is None:
                self.loads = [_handle(movement) for movement in step.loads]
                self._used += [load for load in self.loads if load not in self._used]
                return step.piece
            else:
                _handle(step.leaving).wait_over(deadline.left_s())
        return None

    def _wait_for_reading(self, step: Step, deadline: Deadline) -> None:
        """Of the tier, before the next chunk is known."""
        assert step.reading is not None and self._meeting is not None
        left_s = deadline.left_s()
        if step.reading.wait(step.left_s if left_s is None else min(step.left_s, left_s)):
            return
        if left_s is not None and left_s < step.left_s:
            raise TimeoutError("a piece of the prefix had not come from the tier within timeout_s; call again")
        change(self._manager._books, functools.partial(self._meeting.read_late, step.reading))

    def _save_chunk(self, tokens: range) -> None:
        """The blocks that it fills."""
        size, manager = self._block_size, self._manager
        full = range(tokens.start // size, min(tokens.stop // size, len(self.hashes)))
        wanted = [number for number in full if self._is_to_be_saved(number)] if manager.write_through else []
        self.saves = []
        if not wanted:
            self._note_written(tokens)
            return
        hashes, ids = [self.hashes[number] for number in wanted], [self._table[number] for number in wanted]
        compute = manager._scheduler.compute_stream(None)  # of this thread
        start = functools.partial(manager._books.save_chunk, self._blocks_of(tokens), hashes, ids, self._used, compute)
        save = change(manager._books, start)
        if save is not None:
            self.saves = [manager._scheduler.check_started(save)]
        self._all_saves += self.saves

    def _is_to_be_saved(self, number: int) -> bool:
        if self._meeting is None or self._lease is None or number >= self._found:
            return True
        return number in self._meeting.lost_blocks or self._lease.states[number] is not BlockState.PRESENT

    # ---- the end ----
    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether what was computed so far is valid. If not, a load has failed that was read: the chunks begin again
        with the first one that is not."""
        check_timeout(timeout_s)
        deadline = Deadline(timeout_s)
        try:
            for load in self._used:
                load.wait(deadline.left_s())
        except (TransferError, CancelledError):
            for transfer in [*self._used, *self._all_saves]:
                if transfer.unmarked_layers:
                    transfer.cancel()
                transfer.wait_over(deadline.left_s())
            self._begin_again()
            return False
        return True

    def _begin_again(self) -> None:
        if self._meeting is not None:
            self._tail = self._found * self._block_size
            change(self._manager._books, self._meeting.compute_again)
        else:
            lost = [i for load in self._used for i in self._manager.blocks_to_recompute(load)]
            self._tail = min(lost, default=0) * self._block_size
        self.loads, self._used, self._all_saves, self._rest = [], [], [], range(0)

    def _finish(self) -> None:
        self._ended = True
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            change(self._manager._books, functools.partial(self._manager._books.end_meeting, meeting))
        if self._lease is not None:
            self._lease.release()

    def cancel(self) -> None:
        self._end_early()
        super().cancel()

    def _end_early(self) -> None:
        """``loads`` and ``saves`` have all that may still touch the blocks."""
        meeting = self._meeting
        self._finish()  # until then more may begin
        self.loads = [*self._used, *map(_handle, meeting.under_way if meeting is not None else ())]
        self.saves = self._all_saves

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._ended:  # left by break, say
            if not self.saves:  # nothing says whether its last pass was run
                self._abort_pass()
            self._end_early()
        super().__exit__(kind, error, trace)


@functools.lru_cache(maxsize=1024)
def blocks_of_passes(tokens: int, block_size: int) -> int:
    """That as few passes as can be compute, of so many tokens each: not much less than that.

    Example:
        >>> [blocks_of_passes(tokens, 16) for tokens in (64, 70, 40, 31, 1)]
        [4, 4, 5, 7, 1]
    """
    passes = 1
    while 10 * (blocks := passes * tokens // block_size) * block_size < LEAST_FULL * passes * tokens:
        passes += 1
    return blocks


def _handle(movement: Movement) -> Transfer:
    return movement.handle() or Transfer(movement)


def make_request(
    manager: Any, token_ids: Any, device_block_ids: Any, request_salt: bytes, chunk_tokens: Any, how: How | None
) -> Request:
    """See :meth:`KVOffloadManager.request`."""
    size = manager.device_cache.spec.block_size
    if how is None:
        how = "load" if chunk_tokens is None else "sooner"
    if how not in get_args(How):
        raise ValueError(f"how = {how!r} must be one of {', '.join(map(repr, get_args(How)))}")
    if chunk_tokens is not None:
        chunk_tokens = arguments.integer(chunk_tokens, "chunk_tokens")
        if chunk_tokens < 1 or chunk_tokens % size:
            raise ValueError(f"chunk_tokens = {chunk_tokens} must be a positive multiple of the block size, {size}")
        if manager.device_cache.is_ring:  # nothing of a chunk stays there for the next one
            raise ValueError(
                f"chunk_tokens = {chunk_tokens} must be None: the layers of the device cache share buffers; make a "
                "request for each part of the prompt, when the saves of the one before are over"
            )
    num_blocks = manager.device_cache.num_blocks
    ids = arguments.checked_block_ids(device_block_ids, "device_block_ids", num_blocks, distinct=True)
    if isinstance(token_ids, PrefixHasher):
        if request_salt:
            raise ValueError("request_salt must be empty with token_ids of prefix(), which takes one itself")
        hashes, num_tokens = list(token_ids.hashes), token_ids.num_tokens
    else:
        if isinstance(token_ids, range):
            full_table(ids, count_of(token_ids), size)  # before so many are hashed
        hashes, num_tokens = manager.block_hashes(token_ids, request_salt=request_salt), len(token_ids)
    table = full_table(ids, num_tokens, size)
    if chunk_tokens is None:
        return Request(manager, hashes, num_tokens, table, size, how)
    return ChunkedRequest(manager, hashes, num_tokens, table, size, how, chunk_tokens)


def checked_targets(device_block_ids: Any, num_hashes: int, num_blocks: int) -> list[int]:
    """One for each hash."""
    ids = arguments.block_ids(device_block_ids, "device_block_ids", num_blocks)
    if len(ids) != num_hashes:
        raise ValueError(f"hashes has {num_hashes} blocks, device_block_ids has {len(ids)}; both need the same number")
    check_ids(ids, "device_block_ids", num_blocks)
    return ids
