"""The side that gives blocks out and loads what arrives in them."""

from __future__ import annotations

import functools
import os
import time
import weakref
from typing import Any, Protocol

import numpy as np

from ..backend.work import TransferPlan
from ..checks import check_process
from ..errors import ClosedError, LeasedError
from ..ops import _arguments as arguments
from ..schedule import arriving
from ..schedule.at_exit import EXIT_TIMEOUT_S
from ..schedule.movement import Movement, State
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..timeouts import check_time, check_timeout
from ..tracking.alarms import Alarms
from ..tracking.group import change, wait_until
from ..tracking.keeper import log
from ..values import check_bool, check_choice, check_methods
from .at_exit import endpoints
from .grant import VERSION, Grant, check_grant, make_grant_id
from .landing import landing_scheduler
from .messages import TO_RECEIVER, encode, heard

REVOKE_EVERY_S = 1.0  # until it is answered: a channel may lose messages


class Peer(Protocol):
    """The way to one sender: an object of a channel. Two are the same peer if they are equal."""

    def send(self, data: bytes) -> object:
        """Leaves a message for it; waits for nothing. It may get lost, but not arrive at another one."""


class Receiver:
    """Gives blocks of its host pool to senders in other processes, and loads each layer when it is there. Or, with
    ``direct``, gives blocks of its device cache, into which they write by themselves.

    Any thread may call. Close it before the scheduler.

    Args:
        scheduler: its host pool is made with ``shared=True`` by this process; with ``direct`` its device cache is, or
            lies on a GPU.
        direct: senders write into the device cache, nothing goes through the host pool.

    Attributes:
        direct: as it was given.
        pool_id: names the memory of the pool or of the cache, in grants.

    Raises:
        TypeError: not a scheduler, or not a bool.
        ValueError: the pool, or the cache, is not in memory that can be shared.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.peers import Receiver
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 4, shared=True)
        >>> with LayerwiseScheduler(cache, pool) as scheduler, Receiver(scheduler) as receiver:
        ...     transfer, grant = receiver.grant([3, 1])
        ...     receiver.revoke(grant)  # the request was aborted
        ...     transfer.wait_over(timeout_s=10)
        ...     len(grant.host_block_ids), transfer.state.value, pool.num_free_blocks
        (2, 'cancelled', 4)
    """

    def __init__(self, scheduler: LayerwiseScheduler, *, direct: bool = False) -> None:
        check_scheduler(scheduler)
        check_bool(direct, "direct")
        self.direct = direct
        self.pool_id = scheduler.device_cache.export().memory_id if direct else scheduler.host_pool.memory_id
        self.scheduler = scheduler
        self._loads = landing_scheduler(scheduler) if direct else scheduler
        self._granted: dict[str, _Granted] = {}
        self._alarms = Alarms("paddle_kv-peers-deadlines")
        self._process_id = os.getpid()
        self._closed = False
        self._counts = {"granted": 0, "done": 0, "failed": 0, "refused_messages": 0}
        endpoints.add(self)
        receivers.add(self)

    # ---- what the user calls ----
    def grant(
        self, device_block_ids: Any, *, host_block_ids: Any = None, timeout_s: float = 30.0, urgent: bool | None = None
    ) -> tuple[Transfer, Grant]:
        """Starts a load of blocks that a sender will write, and says which ones it may write.

        ``wait_layer`` means what it means for every load. The transfer fails if not all was handed over when the time
        is over, when the sender fails or is gone, and its blocks then hold no usable data. It is over, and the host
        blocks are given back, only when the sender touches them no more.

        Args:
            device_block_ids: targets, at least one, each once.
            host_block_ids: as many, each once, that nobody uses, of ``pool.allocate``: they stay the caller's, and hold
                the data afterwards. None: the receiver takes free ones, and gives them back at the end; with ``direct``
                there are none.
            timeout_s: until all has to be there.
            urgent: as for ``scheduler.onload``; with ``direct`` there is nothing to be urgent with.

        Returns:
            the load, and what the sender needs. Give it to one sender, by any way that others do not read.

        Raises:
            MemoryError: there are not so many free host blocks.
            LeasedError: a host block is in use; with ``direct``, a device block is granted already.
            ClosedError, ForkedError: closed, or made before a fork.
            As ``scheduler.onload``.
        """
        timeout_s = check_time(timeout_s)
        check_choice(urgent, "urgent")
        ids = arguments.block_id_array(device_block_ids, "device_block_ids")
        if not len(ids):
            raise ValueError("device_block_ids is empty; at least one block is expected")
        given = None if host_block_ids is None else arguments.block_id_array(host_block_ids, "host_block_ids")
        if self.direct and given is not None:
            raise ValueError("host_block_ids was given, but this receiver takes blocks straight into its device cache")
        compute = self.scheduler.compute_stream(None)
        if self.direct:
            section = functools.partial(self._grant_direct_here, ids, timeout_s, compute)
        else:
            section = functools.partial(self._grant_here, ids, given, timeout_s, compute, urgent)
        transfer, grant = change(self.scheduler, section)
        return transfer, grant

    def revoke(self, grant: Grant) -> None:
        """``transfer.cancel()``: what has not arrived is not wanted any more. One that has ended stays as it is.

        Raises:
            TypeError, ValueError: not a grant.
        """
        check_grant(grant)
        granted = self._granted.get(grant.grant_id)
        movement = None if granted is None else granted.movement
        if movement is not None:
            (movement.handle() or Transfer(movement)).cancel()

    def stats(self) -> dict[str, int]:
        """``granted``, and of these ``done``, ``failed`` and ``open``; ``refused_messages``."""
        return {**self._counts, "open": len(self._granted)}

    def close(self, timeout_s: float | None = None) -> None:
        """Fails what is under way, and waits until no sender touches a block any more. Again: does nothing.

        Raises:
            TimeoutError: a sender that lives has not answered within ``timeout_s``.
        """
        check_timeout(timeout_s)
        if self._process_id != os.getpid():
            return
        change(self.scheduler, self._close_here)
        if not wait_until(self.scheduler, lambda: not self._granted, timeout_s):
            raise TimeoutError(f"senders still have {len(self._granted)} grants after timeout_s = {timeout_s}")
        self._alarms.close()
        if self.direct:
            self._loads.close(timeout_s)
            self._loads.host_pool.close()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(EXIT_TIMEOUT_S)

    # ---- what a channel calls ----
    def received(self, peer: Peer, data: bytes) -> bool:
        """A message of a sender. One that is wrong, late, doubled or out of order is counted and changes nothing.

        Returns:
            whether it was one to act upon.

        Raises:
            TypeError: not a peer.
        """
        check_peer(peer)
        taken, reply = change(self.scheduler, functools.partial(self._take, peer, heard(data, TO_RECEIVER)))
        if reply is not None:
            _send(peer, reply)
        return bool(taken)

    def holds(self, peer: Peer) -> bool:
        """Whether the peer may write to blocks now. TypeError: not a peer."""
        check_peer(peer)
        return any(granted.peer == peer for granted in list(self._granted.values()))

    def lost(self, peer: Peer) -> None:
        """Nothing more is heard of the peer, which may still be writing: its loads fail, its blocks are held.
        TypeError: not a peer."""
        check_peer(peer)
        change(self.scheduler, functools.partial(self._lost_here, peer))

    def gone(self, peer: Peer) -> None:
        """The peer is known to write no more, and says nothing any more: its process has ended. TypeError: not a
        peer."""
        check_peer(peer)
        change(self.scheduler, functools.partial(self._gone_here, peer))

    # ---- sections ----
    def _grant_here(
        self, device_ids: np.ndarray, host_ids: Any, timeout_s: float, compute: Any, urgent: bool | None
    ) -> tuple[Transfer, Grant]:
        self._check_open()
        pool = self.scheduler.host_pool
        own = None if host_ids is not None else pool.allocate_here(len(device_ids)).take()
        try:
            plan = self.scheduler.plan("onload", device_ids, host_ids if own is None else own)
            return self._start(plan, timeout_s, compute, urgent)
        finally:
            if own is not None:
                pool.free_here(own)  # it gives them out again when the transfer is over

    def _grant_direct_here(self, device_ids: np.ndarray, timeout_s: float, compute: Any) -> tuple[Transfer, Grant]:
        """The sender may write when a load of nothing into the same blocks is over: what used them before is then."""
        self._check_open()
        landing = self._loads.host_pool
        plan = self._loads.plan("onload", device_ids, device_ids)
        busy = landing.domain.busy(device_ids)
        if busy:
            raise LeasedError(f"block {busy[0]} of the device cache is granted already", busy)
        waiting_ids = device_ids + self._loads.device_cache.num_blocks
        wait = self._loads.start_here(self._loads.plan("onload", device_ids, waiting_ids), compute, False, False)
        # On the other stream, which never waits for compute: or a layer that is there would, behind a later grant.
        transfer, grant = self._start(plan, timeout_s, compute, True)
        granted = self._granted[grant.grant_id]
        granted.wait = wait._movement
        if granted.wait.over:  # the start of the load has looked at it
            self._may_write(granted)
        else:
            granted.wait.callbacks.append(functools.partial(self._may_write, granted))
        return transfer, grant

    def _check_open(self) -> None:
        check_process(self._process_id, "receiver")
        if self._closed:
            raise ClosedError("the receiver is closed")

    def _start(self, plan: TransferPlan, timeout_s: float, compute: Any, urgent: bool | None) -> tuple[Transfer, Grant]:
        deadline_s = time.monotonic() + timeout_s
        ids = tuple(plan.host_ids.tolist())
        grant = Grant(VERSION, make_grant_id(), self.pool_id, ids, plan.num_layers, deadline_s)
        granted = _Granted(self, grant)
        transfer = arriving.start(self._loads, plan, compute, urgent, granted)
        granted.movement = transfer._movement
        self._granted[grant.grant_id] = granted
        self._counts["granted"] += 1
        self._alarms.add(deadline_s, functools.partial(self._late, granted))
        return transfer, grant

    def _take(self, peer: Peer, message: dict[str, Any] | None) -> tuple[bool, bytes | None]:
        """Whether it was one to act upon, and what to answer."""
        granted = None if message is None else self._granted.get(message["grant_id"])
        if message is not None and message["kind"] == "begin":
            return self._begin(peer, granted, message)
        if message is None or granted is None or granted.peer is None or granted.peer != peer:
            return self._refuse()
        movement = granted.movement
        assert movement is not None
        kind = message["kind"]
        if kind == "layers":
            in_order = message["first"] == granted.next_layer < message["end"] <= granted.grant.num_layers
            if not in_order or movement.failed:
                return self._refuse()
            granted.next_layer = message["end"]
            arriving.mark(movement, range(message["first"], message["end"]))
        elif kind == "done":
            if granted.next_layer < granted.grant.num_layers and not movement.failed:
                return self._refuse()
            self._end(granted)
        else:
            self._fail(granted, f"the sender failed: {message['reason']}")
            self._end(granted)
        return True, None

    def _begin(self, peer: Peer, granted: _Granted | None, message: dict[str, Any]) -> tuple[bool, bytes | None]:
        if granted is not None and granted.peer == peer:
            return self._refuse()  # doubled; it was answered
        why = None
        if granted is None or granted.movement is None or granted.movement.failed:
            why = "the grant is over, or not of this receiver"
        elif granted.peer is not None:
            why = "another sender has the grant"
        elif message["digest"] != granted.grant.digest:
            why = "the grant was changed on its way"
        if granted is None or why is not None:
            return self._refuse(encode("refused", message["grant_id"], reason=why))
        granted.peer = peer
        if granted.wait is not None and granted.wait.state is not State.DONE:
            return True, None  # answered when whatever used the blocks is through
        return True, encode("accepted", message["grant_id"])

    def _refuse(self, reply: bytes | None = None) -> tuple[bool, bytes | None]:
        self._counts["refused_messages"] += 1
        return False, reply

    def _lost_here(self, peer: Peer) -> list[_Granted]:
        found = [one for one in self._granted.values() if one.peer == peer]
        for granted in found:
            self._fail(granted, "the sender is gone")
        return found

    def _gone_here(self, peer: Peer) -> None:
        for granted in self._lost_here(peer):
            self._end(granted)

    def _close_here(self) -> None:
        self._closed = True
        for granted in list(self._granted.values()):
            self._fail(granted, "the receiver was closed")

    def _fail(self, granted: _Granted, why: str) -> None:
        if granted.movement is not None:
            arriving.fail(granted.movement, f"{len(granted.block_ids)} blocks were not handed over: {why}")

    def _end(self, granted: _Granted) -> None:
        """Nobody writes the blocks any more."""
        movement, granted.movement = granted.movement, None
        if movement is None:
            return
        self._counts["failed" if movement.failed else "done"] += 1
        del self._granted[granted.grant.grant_id]
        arriving.end(movement)
        self.scheduler.group.notify()

    def _may_write_here(self, granted: _Granted) -> tuple[Peer | None, bytes]:
        """Who asked before the blocks were free, and the answer."""
        assert granted.wait is not None
        if granted.wait.state is not State.DONE:
            self._fail(granted, "what used the blocks before failed")  # and the sender is told to stop
        if granted.movement is None or granted.movement.failed:
            return None, b""
        return granted.peer, encode("accepted", granted.grant.grant_id)

    # ---- in threads of the library, in no section ----
    def _may_write(self, granted: _Granted) -> None:
        granted.wait.group.host.post(functools.partial(self._answer, granted))  # type: ignore[union-attr]

    def _answer(self, granted: _Granted) -> None:
        if self._process_id != os.getpid():
            return  # a forked child
        peer, reply = change(self.scheduler, functools.partial(self._may_write_here, granted))
        if peer is not None:
            _send(peer, reply)

    def _late(self, granted: _Granted) -> None:
        change(self.scheduler, functools.partial(self._fail, granted, "the time was over"))

    def _stop(self, granted: _Granted) -> None:
        """The load has failed: the sender is told, until it answers."""
        if self._process_id != os.getpid():
            return  # a forked child: the sender is the parent's
        peer = change(self.scheduler, functools.partial(self._stop_here, granted))
        if peer is not None:
            _send(peer, encode("revoke", granted.grant.grant_id))

    def _stop_here(self, granted: _Granted) -> Peer | None:
        if granted.peer is None:
            self._end(granted)  # nobody has begun, and nobody may any more
        if granted.movement is None:
            return None
        self._alarms.add(time.monotonic() + REVOKE_EVERY_S, functools.partial(self._stop, granted))
        return granted.peer


class _Granted:
    """What writes to the host blocks of a load: see :class:`~paddle_kv.schedule.movement.Reading`.

    Attributes:
        peer: who has begun to write; None: nobody.
        next_layer: the first one that was not told.
        movement: the load; None once nobody writes any more.
        wait: with ``direct``: it is over when the blocks may be written.
    """

    def __init__(self, receiver: Receiver, grant: Grant) -> None:
        self.grant = grant
        self.block_ids = list(grant.host_block_ids)
        self.peer: Peer | None = None
        self.next_layer = 0
        self.movement: Movement | None = None
        self.wait: Movement | None = None
        self._receiver = receiver

    def cancel(self) -> None:
        self._receiver.scheduler.group.host.post(functools.partial(self._receiver._stop, self))


def check_peer(peer: Any) -> None:
    """TypeError unless messages can be left for it. None would be the peer of all grants that nobody has begun."""
    check_methods(peer, "peer", ("send",), "the way to a sender")


def check_receiver(receiver: Any) -> None:
    """TypeError unless it is one."""
    if not isinstance(receiver, Receiver):
        raise TypeError(f"receiver is {receiver!r}; a Receiver is expected")


receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


def _send(peer: Peer, data: bytes) -> None:
    try:
        peer.send(data)
    except Exception:  # noqa: BLE001  it is as if the message was lost
        log.exception("a message could not be sent to a peer")
