"""The side that writes blocks of a receiver on another host: saves into own host memory, and pushes each layer on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..backend.work import Stream, TransferPlan
from ..ops import _arguments as arguments
from ..schedule import settling, submission
from ..schedule.movement import Failure, Follower, Movement, State
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..timeouts import check_time
from ..tracking.group import change
from ..tracking.keeper import Deadline
from .fabrics import Fabric, RemotePool, Write
from .fabrics.remote_pool import check_fabric, check_remote, pieces
from .grant import Grant
from .sender import Sender, _Sending


class RemoteSender(Sender):
    """As :class:`Sender`, where the receiver's pool cannot be mapped: each layer goes into free blocks of the own host
    pool, and from there through a fabric.

    The transfer that :meth:`send` returns is over when all is in the receiver's memory, or nothing is written there any
    more; a failure of the fabric is one of the transfer. ``wait_layer`` and ``wait_on`` mean what they mean for each
    save: the device blocks may be written again, whatever the network does.

    Args:
        scheduler: of the own cache and an own pool, whose memory the fabric knows
            (:func:`~paddle_kv.peers.fabrics.register`).
        remote: what the receiver has described.
        fabric: of the same kind as the receiver's.
        send, hang_up: as of :class:`Sender`.
        write_timeout_s: until a layer that was saved has to be there.

    Raises:
        TypeError: not what is expected.
        AttachError: another spec, fabric or version. The number of heads may differ, see ``Receiver.grant_heads``.
        PeerError: the receiver cannot be reached.
    """

    def __init__(
        self,
        scheduler: LayerwiseScheduler,
        remote: RemotePool,
        fabric: Fabric,
        send: Callable[[bytes], object],
        *,
        hang_up: Callable[[], object] = lambda: None,
        write_timeout_s: float = 30.0,
    ) -> None:
        check_scheduler(scheduler)
        check_fabric(fabric)
        check_remote(remote, scheduler.device_cache.spec, fabric.name)
        self._remote = remote
        self._write_timeout_s = check_time(write_timeout_s, "write_timeout_s")
        super().__init__(scheduler, send, hang_up=hang_up)
        self._sink = fabric.connect(remote.address)

    def close(self, timeout_s: float | None = None) -> None:
        super().close(timeout_s)
        self._sink.close(timeout_s)

    def _find_pool_id(self) -> str:
        return self._remote.pool_id

    def _check_heads(self, grant: Grant) -> None:
        own, most = self.scheduler.device_cache.spec.num_kv_heads, self._remote.spec.num_kv_heads
        if grant.num_heads != own or grant.first_head + own > most:
            raise ValueError(
                f"the grant is of {grant.num_heads} heads from {grant.first_head} on; this sender has {own}, and the "
                f"receiver {most}"
            )
        highest = max(grant.host_block_ids)
        if highest >= self._remote.num_blocks:
            raise IndexError(f"host_block_ids names block {highest}; the receiver has {self._remote.num_blocks}")

    def _left_s(self, grant: Grant) -> float:
        return float("inf")  # the receiver's clock is not ours; it says by itself when the time is over

    @contextlib.contextmanager
    def _planned(self, grant: Grant, device_block_ids: Any) -> Iterator[TransferPlan]:
        ids = arguments.block_id_array(device_block_ids, "device_block_ids", self.scheduler.device_cache.num_blocks)
        if len(ids) != len(grant.host_block_ids):
            raise ValueError(
                f"device_block_ids has {len(ids)} ids, the grant {len(grant.host_block_ids)} blocks; both need the same"
            )
        pool = self.scheduler.host_pool
        own = pool.allocate(len(ids))
        try:
            yield self.scheduler.plan("offload", ids, own)
        finally:
            pool.free(own)  # it gives them out again when the transfer is over

    # ---- sections ----
    def _start(self, sending: _Sending, plan: TransferPlan, compute: Stream) -> Transfer:
        transfer = super()._start(sending, plan, compute)
        sending.pushes = _Pushes(plan.num_layers)
        transfer._movement.followers.append(sending.pushes)
        return transfer

    def _begin_push(self, sending: _Sending) -> Movement | None:
        movement = sending.movement
        assert movement is not None and sending.pushes is not None
        if movement.failed:
            return None
        sending.pushes.under_way += 1
        return movement

    def _end_push(self, sending: _Sending, layers: list[int], why: str) -> None:
        movement, pushes = sending.movement, sending.pushes
        assert movement is not None and pushes is not None
        pushes.under_way -= 1
        if why:
            first = min(layers)
            failure = Failure(State.FAILED, f"layer {first} did not reach the receiver: {why}", first)
            settling.progress(submission.fail(movement, failure))
        else:
            pushes.left -= len(layers)
            self._are_there(sending, layers)
        settling.look(movement)

    # ---- in threads of the library, in no section ----
    def _ended(self, sending: _Sending, layers: list[int]) -> None:
        """These layers are in own host memory."""
        movement = change(self.scheduler, functools.partial(self._begin_push, sending))
        if movement is None:
            return
        pool, grant = self.scheduler.host_pool, sending.grant
        there = np.array(grant.host_block_ids, np.int64)
        moved = pieces(pool, movement.plan.host_ids, self._remote, there, layers, grant.first_head)
        deadline = Deadline(self._write_timeout_s)
        ended = functools.partial(self._pushed, sending, layers)
        self._sink.write(Write(*moved, deadline, ended, wanted=lambda: not movement.failed))

    def _pushed(self, sending: _Sending, layers: list[int], why: str) -> None:
        self.scheduler.group.host.post(functools.partial(self._note_push, sending, layers, why))

    def _note_push(self, sending: _Sending, layers: list[int], why: str) -> None:
        change(self.scheduler, functools.partial(self._end_push, sending, layers, why))
        self._do_what_is_left()


class _Pushes(Follower):
    """What a fabric does with a save.

    Attributes:
        left: layers that are not there.
        under_way: writes that have not ended.
    """

    def __init__(self, num_layers: int) -> None:
        self.left = num_layers
        self.under_way = 0

    def holds(self, movement: Movement) -> bool:
        return self.under_way > 0 if movement.failed else self.left > 0
