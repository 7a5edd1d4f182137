"""The side that writes blocks which another process has given out: a layerwise save into that process's pool."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..backend.work import Stream, TransferPlan
from ..checks import check_process
from ..errors import ClosedError, PeerError
from ..schedule import layer_ends
from ..schedule.at_exit import EXIT_TIMEOUT_S
from ..schedule.movement import Movement, State
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..timeouts import check_time, check_timeout
from ..tracking.group import change, wait_until
from ..tracking.keeper import Living, Waiter, log
from ..values import check_callable
from .at_exit import endpoints
from .grant import Grant, check_grant, make_grant_id
from .messages import TO_SENDER, encode, heard
from .receiver import receivers


class Sender:
    """Saves blocks into the pool of one receiver, and tells it of each layer that is there.

    Any thread may call. Close it before the scheduler. The receiver is in another process.

    Args:
        scheduler: of the own cache and the receiver's pool, ``HostPool.attach(...)``.
        send: leaves a message for the receiver, and waits for nothing. What the receiver says goes to :meth:`received`.
        hang_up: ends the channel; called once, when it is over and nothing is being written any more. To the receiver
            the end of the channel says that this process writes no more.

    Raises:
        TypeError: not a scheduler, or what cannot be called.
        ValueError: the pool is not in shared memory.
    """

    def __init__(
        self,
        scheduler: LayerwiseScheduler,
        send: Callable[[bytes], object],
        *,
        hang_up: Callable[[], object] = lambda: None,
    ) -> None:
        check_scheduler(scheduler)
        check_callable(send, "send", "a function of a message")
        check_callable(hang_up, "hang_up", "a function without arguments")
        self.scheduler = scheduler
        self._pool_id = self._find_pool_id()
        self._send = send
        self._hang_up: Callable[[], object] | None = hang_up
        self._sendings: dict[str, _Sending] = {}
        self._left: deque[Callable[[], object]] = deque()  # to be done in no section, in the order of the sections
        self._doing = threading.Lock()
        self._process_id = os.getpid()
        self._hung_up = False
        self._over = ""  # why nothing is sent any more
        endpoints.add(self)

    # ---- what the user calls ----
    def send(self, grant: Grant, device_block_ids: Any, *, timeout_s: float = 5.0) -> Transfer:
        """``scheduler.offload(..., layerwise=True)`` of ``device_block_ids[i]`` to the i-th block of the grant.

        Returns when the receiver has said that it may begin. Each layer starts at ``mark_layer_written``, and the
        receiver is told when it is in host memory, a layer behind all layers before it. The transfer is cancelled when
        the receiver revokes the grant or is gone, and, as every layerwise save, when nobody refers to it any more.

        Args:
            grant: of the receiver to which this sender belongs.
            device_block_ids: sources, as many as the grant has blocks.
            timeout_s: for the receiver's answer.

        Raises:
            PeerError: the receiver refuses it (it is over, revoked, changed, was begun before, or somebody else has it)
                or is gone.
            TimeoutError: no answer within ``timeout_s``; nothing was written, and nothing will be by this call. If the
                receiver has heard of it, the grant is over.
            TypeError, ValueError: not a grant, one of another pool, or being sent already.
            ClosedError, ForkedError: closed, or made before a fork.
            As ``scheduler.offload``.
        """
        check_grant(grant)
        timeout_s = check_time(timeout_s)
        if grant.pool_id != self._pool_id:
            raise ValueError(f"the grant is of pool {grant.pool_id!r}; this sender writes into {self._pool_id!r}")
        if self._pool_id in {receiver.pool_id for receiver in list(receivers)}:
            raise ValueError(
                "the receiver is in this process: here a load and a save of the same blocks follow each other"
            )
        num_layers = self.scheduler.device_cache.spec.num_layers
        if grant.num_layers != num_layers:
            raise ValueError(f"the grant has {grant.num_layers} layers; {num_layers} are expected")
        self._check_heads(grant)
        left_s = self._left_s(grant)
        if left_s <= 0:
            raise PeerError("the time of the grant is over")
        with self._planned(grant, device_block_ids) as plan:
            return self._begin(grant, plan, min(timeout_s, left_s))

    def _begin(self, grant: Grant, plan: TransferPlan, timeout_s: float) -> Transfer:
        compute = self.scheduler.compute_stream(None)
        sending = _Sending(grant)
        change(self.scheduler, functools.partial(self._register, sending))
        try:
            self._send(encode("begin", grant.grant_id, sending.begin_id, digest=grant.digest))
            self.scheduler.group.host.park(sending.answered, timeout_s)
            started: Transfer = change(self.scheduler, functools.partial(self._start, sending, plan, compute))
        except BaseException:
            if change(self.scheduler, functools.partial(self._give_up, sending)):
                self._tell(encode("failed", grant.grant_id, sending.begin_id, reason="it was not begun"))
            raise
        return self.scheduler.check_started(started)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels what is under way, waits until nothing is written any more, and ends the channel. Again: does
        nothing.

        Raises:
            TimeoutError: a save was not over after ``timeout_s``.
        """
        check_timeout(timeout_s)
        if self._process_id != os.getpid():
            return
        self._stop("the sender is closed")
        if not wait_until(self.scheduler, lambda: not self._sendings and self._hung_up, timeout_s):
            raise TimeoutError(f"{len(self._sendings)} saves were not over after timeout_s = {timeout_s}")

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(EXIT_TIMEOUT_S)

    # ---- where the blocks are: in memory that is mapped here ----
    def _find_pool_id(self) -> str:
        return self.scheduler.host_pool.memory_id

    def _check_heads(self, grant: Grant) -> None:
        granted, own = range(grant.first_head, grant.first_head + grant.num_heads), self.scheduler.host_pool.heads
        if granted != own:
            raise ValueError(
                f"the grant is of heads {granted.start} to {granted.stop - 1}; this sender writes heads {own.start} to "
                f"{own.stop - 1} of the receiver's blocks (heads_of takes some of them)"
            )

    def _left_s(self, grant: Grant) -> float:
        """Of the grant's time, on the clock that all processes of the host have."""
        return grant.deadline_s - time.monotonic()

    @contextlib.contextmanager
    def _planned(self, grant: Grant, device_block_ids: Any) -> Iterator[TransferPlan]:
        """The save; it was started, or will not be, at the end."""
        yield self.scheduler.plan("offload", device_block_ids, list(grant.host_block_ids))

    # ---- what a channel calls ----
    def received(self, data: bytes) -> bool:
        """A message of the receiver. One that is wrong, late or doubled changes nothing.

        Returns:
            whether it was one to act upon.
        """
        message = heard(data, TO_SENDER)
        if message is None:
            return False
        taken, reply, unwanted = change(self.scheduler, functools.partial(self._take, message))
        if reply is not None:
            self._tell(reply)
        if unwanted is not None:
            _cancel(unwanted)
        return bool(taken)

    def gone(self) -> None:
        """The receiver is gone, or the way to it."""
        self._stop("the receiver is gone")

    # ---- sections ----
    def _register(self, sending: _Sending) -> None:
        check_process(self._process_id, "sender")
        if self._over:
            raise (ClosedError if "closed" in self._over else PeerError)(self._over)
        other = self._sendings.get(sending.grant.grant_id)
        if other is not None and other.movement is not None and other.movement.over:
            raise PeerError("the grant is over: it was used here")  # the receiver would say so too
        if other is not None:
            raise ValueError("the grant is being sent already")
        self._sendings[sending.grant.grant_id] = sending

    def _start(self, sending: _Sending, plan: TransferPlan, compute: Stream) -> Transfer:
        if sending.answer is None:
            raise TimeoutError("the receiver has not answered in time")
        if sending.answer != "accepted":
            raise PeerError(f"the receiver refuses: {sending.answer}")
        ended, over = functools.partial(self._ended, sending), functools.partial(self._ended_all, sending)
        transfer = layer_ends.start(self.scheduler, plan, compute, ended, over)
        sending.movement = transfer._movement
        return transfer

    def _give_up(self, sending: _Sending) -> bool:
        """Whether the receiver has to be told: nothing of it was begun, and nothing will be."""
        if sending.movement is not None or self._sendings.get(sending.grant.grant_id) is not sending:
            return False
        del self._sendings[sending.grant.grant_id]
        self.scheduler.group.notify()
        return not sending.refused  # then there is nothing that the receiver would have to end

    def _take(self, message: dict[str, Any]) -> tuple[bool, bytes | None, Movement | None]:
        """Whether it was one to act upon, what to answer, and what to cancel."""
        grant_id, begin_id, kind = message["grant_id"], message["begin_id"], message["kind"]
        sending = self._sendings.get(grant_id)
        if sending is not None and sending.begin_id != begin_id:
            sending = None  # of an earlier beginning, which is over
        if kind == "revoke":
            if sending is not None and sending.movement is not None:
                return True, None, sending.movement  # answered at its end
            if sending is not None:
                self._answer(sending, "it was revoked")
                del self._sendings[grant_id]
            return True, encode("failed", grant_id, begin_id, reason="it was revoked"), None
        if sending is None or sending.answer is not None:
            return False, None, None
        sending.refused = kind != "accepted"
        self._answer(sending, "accepted" if kind == "accepted" else message["reason"] or "without a reason")
        return True, None, None

    def _answer(self, sending: _Sending, answer: str) -> None:
        if sending.answer is None:
            sending.answered.release()
        sending.answer = answer

    def _are_there(self, sending: _Sending, layers: Iterable[int]) -> None:
        """Tells of the layers that are there and were not told, as far as none before them is missing."""
        sending.there.update(layers)
        first = end = sending.next_layer
        while end in sending.there:
            end += 1
        sending.next_layer = end
        if end > first:
            self._leave("layers", sending, first=first, end=end)

    def _finish_here(self, sending: _Sending, movement: Movement) -> None:
        """It is over: what is still to be said of it."""
        if self._sendings.get(sending.grant.grant_id) is not sending:
            pass
        elif movement.state is not State.DONE:
            self._leave("failed", sending, reason="" if movement.failure is None else movement.failure.message)
        else:
            self._are_there(sending, range(sending.grant.num_layers))
            self._leave("done", sending)
        self._left.append(functools.partial(self._forget, sending))

    def _leave(self, kind: str, sending: _Sending, **values: Any) -> None:
        data = encode(kind, sending.grant.grant_id, sending.begin_id, **values)
        self._left.append(functools.partial(self._tell, data))

    def _forget_here(self, sending: _Sending) -> Callable[[], object] | None:
        self._sendings.pop(sending.grant.grant_id, None)
        self.scheduler.group.notify()
        return self._take_hang_up()

    def _take_hang_up(self) -> Callable[[], object] | None:
        if not self._over or self._sendings:
            return None
        hang_up, self._hang_up = self._hang_up, None
        return hang_up

    def _stop_here(self, why: str) -> tuple[list[Movement], Callable[[], object] | None]:
        self._over = self._over or why
        for sending in list(self._sendings.values()):
            if sending.movement is None:
                self._answer(sending, why)  # who waits for it forgets it
        under_way = [one.movement for one in self._sendings.values() if one.movement is not None]
        return under_way, self._take_hang_up()

    # ---- in threads of the library, in no section ----
    def _do_what_is_left(self) -> None:
        """Or leaves it to another thread that does so now, and looks once more behind that."""
        while self._left and self._doing.acquire(blocking=False):
            try:
                while self._left:
                    self._left.popleft()()
            except Exception:  # noqa: BLE001  of hanging up
                log.exception("an error of a sender to a peer")
            finally:
                self._doing.release()

    def _ended(self, sending: _Sending, layers: list[int]) -> None:
        change(self.scheduler, functools.partial(self._are_there, sending, layers))
        self._do_what_is_left()

    def _ended_all(self, sending: _Sending, movement: Movement) -> None:
        movement.group.host.post(functools.partial(self._finish, sending, movement))

    def _finish(self, sending: _Sending, movement: Movement) -> None:
        change(self.scheduler, functools.partial(self._finish_here, sending, movement))
        self._do_what_is_left()

    def _forget(self, sending: _Sending) -> None:
        self._end(change(self.scheduler, functools.partial(self._forget_here, sending)))

    def _stop(self, why: str) -> None:
        under_way, hang_up = change(self.scheduler, functools.partial(self._stop_here, why))
        for movement in under_way:
            _cancel(movement)
        self._end(hang_up)

    def _end(self, hang_up: Callable[[], object] | None) -> None:
        """Of the channel, if it is its time."""
        if hang_up is not None:
            try:
                hang_up()
            finally:
                self._hung_up = True
                self.scheduler.group.notify()

    def _tell(self, data: bytes) -> None:
        if self._process_id != os.getpid():
            return  # a forked child: the channel is the parent's
        with Living("a message could not be sent to a receiver"):  # it is as if it was lost
            self._send(data)


class _Sending:
    """A grant that is being used.

    Attributes:
        begin_id: names this beginning in all messages: 128 random bits, in hexadecimal.
        answer: of the receiver: "accepted", or why not.
        refused: whether the receiver has said so.
        movement: the save, once it has begun.
        there: layers in host memory.
        next_layer: the first one that was not told.
        pushes: what a fabric does with it, of a :class:`~paddle_kv.peers.RemoteSender`.
    """

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self.begin_id = make_grant_id()
        self.answer: str | None = None
        self.refused = False
        self.answered = Waiter()
        self.movement: Movement | None = None
        self.there: set[int] = set()
        self.next_layer = 0
        self.pushes: Any = None


def _cancel(movement: Movement) -> None:
    (movement.handle() or Transfer(movement)).cancel()
