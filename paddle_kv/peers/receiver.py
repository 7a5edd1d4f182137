"""The side that gives blocks out and loads what arrives in them."""

from __future__ import annotations

import functools
import os
import time
import weakref
from typing import Any

import numpy as np

from ..backend.work import TransferPlan
from ..checks import check_process
from ..errors import ClosedError, LeasedError
from ..ops import _arguments as arguments
from ..schedule import arriving
from ..schedule.at_exit import EXIT_TIMEOUT_S
from ..schedule.movement import State
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..timeouts import check_time, check_timeout
from ..tracking.alarms import Alarms
from ..tracking.group import change, wait_until
from ..tracking.keeper import Living
from ..values import check_bool, check_choice, check_methods
from .at_exit import endpoints
from .fabrics.remote_pool import RemotePool, check_described
from .grant import VERSION, Grant, check_grant, make_grant_id
from .granted import Granted, GrantedLoad, Peer
from .landing import landing_scheduler
from .messages import TO_RECEIVER, encode, heard

REVOKE_EVERY_S = 1.0  # until it is answered: a channel may lose messages
SETTLE_S = 2.0  # what a network may still bring of a sender that has stopped


class Receiver:
    """Gives blocks of its host pool to senders in other processes, and loads each layer when it is there. Or, with
    ``direct``, gives blocks of its device cache, into which they write by themselves.

    Any thread may call. Close it before the scheduler.

    Args:
        scheduler: its host pool is made with ``shared=True`` by this process; with ``direct`` its device cache is, or
            lies on a GPU.
        direct: senders write into the device cache, nothing goes through the host pool.
        remote: senders are on other hosts: what :func:`~paddle_kv.peers.fabrics.describe` returned for the host pool,
            which then need not be shared. What a network still holds of a sender that has failed or is gone may arrive
            late: its blocks are given out again ``SETTLE_S`` after that.

    Attributes:
        direct: as it was given.
        pool_id: names the memory of the pool or of the cache, in grants.

    Raises:
        TypeError: not a scheduler, not a bool, or not a description.
        ValueError: the pool, or the cache, is not in memory that can be shared; ``remote`` describes another pool.

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

    def __init__(
        self, scheduler: LayerwiseScheduler, *, direct: bool = False, remote: RemotePool | None = None
    ) -> None:
        check_scheduler(scheduler)
        check_bool(direct, "direct")
        self.direct = direct
        self._settle_s = 0.0 if remote is None else SETTLE_S
        if remote is not None:
            check_described(remote, scheduler.host_pool)
            if direct:
                raise ValueError("direct = True is for senders on this host; remote was given")
            self.pool_id = remote.pool_id
        else:
            self.pool_id = scheduler.device_cache.export().memory_id if direct else scheduler.host_pool.memory_id
        self.scheduler = scheduler
        self._loads = landing_scheduler(scheduler) if direct else scheduler
        self._granted: dict[str, Granted] = {}
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
        every = self.scheduler.device_cache.spec.num_kv_heads
        transfer, [grant] = self._grant(device_block_ids, [every], host_block_ids, timeout_s, urgent)
        return transfer, grant

    def grant_heads(
        self,
        device_block_ids: Any,
        num_heads: Any,
        *,
        host_block_ids: Any = None,
        timeout_s: float = 30.0,
        urgent: bool | None = None,
    ) -> tuple[Transfer, list[Grant]]:
        """:meth:`grant` to several senders, of which each has some of the heads: ranks of a larger tensor-parallel
        size. A layer is there when all of them have told it; if one fails, the load fails, and the others are told.

        Args:
            device_block_ids, host_block_ids, timeout_s, urgent: as of :meth:`grant`.
            num_heads: of each sender, in the order of the heads; together ``spec.num_kv_heads``.

        Returns:
            the load, and a grant for each sender, which writes through
            :func:`~paddle_kv.peers.heads_of` ``(..., grant.first_head, grant.num_heads)``.

        Raises:
            ValueError: ``num_heads`` is not that; a cache in which heads cannot be told apart (``spec.with_heads``).
            As :meth:`grant`.
        """
        spec, counts = self.scheduler.device_cache.spec, arguments.block_ids(num_heads, "num_heads")
        if min(counts, default=0) < 1 or sum(counts) != spec.num_kv_heads:
            raise ValueError(f"num_heads = {counts} must be positive, and {spec.num_kv_heads} together")
        for count in counts if len(counts) > 1 else ():
            spec.with_heads(count)
        return self._grant(device_block_ids, counts, host_block_ids, timeout_s, urgent)

    def _grant(
        self, device_block_ids: Any, counts: list[int], host_block_ids: Any, timeout_s: float, urgent: bool | None
    ) -> tuple[Transfer, list[Grant]]:
        timeout_s = check_time(timeout_s)
        check_choice(urgent, "urgent")
        ids = arguments.block_id_array(device_block_ids, "device_block_ids", self.scheduler.device_cache.num_blocks)
        if not len(ids):
            raise ValueError("device_block_ids is empty; at least one block is expected")
        given = None
        if host_block_ids is not None:
            given = arguments.block_id_array(host_block_ids, "host_block_ids", self.scheduler.host_pool.num_blocks)
        if self.direct and given is not None:
            raise ValueError("host_block_ids was given, but this receiver takes blocks straight into its device cache")
        compute = self.scheduler.compute_stream(None)
        if self.direct:
            section = functools.partial(self._grant_direct_here, ids, counts, timeout_s, compute)
        else:
            section = functools.partial(self._grant_here, ids, counts, given, timeout_s, compute, urgent)
        transfer, load = change(self.scheduler, section)
        return transfer, [part.grant for part in load.parts]

    def revoke(self, grant: Grant) -> None:
        """``transfer.cancel()``: what has not arrived is not wanted any more. One that has ended stays as it is.

        Raises:
            TypeError, ValueError: not a grant.
        """
        check_grant(grant)
        granted = self._granted.get(grant.grant_id)
        movement = None if granted is None else granted.load.movement
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
        return any(granted.peer == peer and not granted.over for granted in list(self._granted.values()))

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
        self,
        device_ids: np.ndarray,
        counts: list[int],
        host_ids: Any,
        timeout_s: float,
        compute: Any,
        urgent: bool | None,
    ) -> tuple[Transfer, GrantedLoad]:
        self._check_open()
        pool = self.scheduler.host_pool
        own = None if host_ids is not None else pool.allocate_here(len(device_ids)).take()
        try:
            plan = self.scheduler.plan("onload", device_ids, host_ids if own is None else own)
            return self._start(plan, counts, timeout_s, compute, urgent)
        finally:
            if own is not None:
                pool.free_here(own)  # it gives them out again when the transfer is over

    def _grant_direct_here(
        self, device_ids: np.ndarray, counts: list[int], timeout_s: float, compute: Any
    ) -> tuple[Transfer, GrantedLoad]:
        """Senders may write when a load of nothing into the same blocks is over: what used them before is then."""
        self._check_open()
        landing = self._loads.host_pool
        plan = self._loads.plan("onload", device_ids, device_ids)
        busy = landing.domain.busy(device_ids)
        if busy:
            raise LeasedError(f"block {busy[0]} of the device cache is granted already", busy)
        waiting_ids = device_ids + self._loads.device_cache.num_blocks
        wait = self._loads.start_here(self._loads.plan("onload", device_ids, waiting_ids), compute, False, False)
        # On the other stream, which never waits for compute: or a layer that is there would, behind a later grant.
        transfer, load = self._start(plan, counts, timeout_s, compute, True)
        load.wait = wait._movement
        if load.wait.over:  # the start of the load has looked at it
            self._may_write(load)
        else:
            load.wait.callbacks.append(functools.partial(self._may_write, load))
        return transfer, load

    def _check_open(self) -> None:
        check_process(self._process_id, "receiver")
        if self._closed:
            raise ClosedError("the receiver is closed")

    def _start(
        self, plan: TransferPlan, counts: list[int], timeout_s: float, compute: Any, urgent: bool | None
    ) -> tuple[Transfer, GrantedLoad]:
        deadline_s = time.monotonic() + timeout_s
        ids, first, grants = tuple(plan.host_ids.tolist()), 0, []
        for count in counts:
            made = Grant(VERSION, make_grant_id(), self.pool_id, ids, plan.num_layers, first, count, deadline_s)
            grants.append(made)
            first += count
        load = GrantedLoad(grants, self._stop_soon)
        transfer = arriving.start(self._loads, plan, compute, urgent, load)
        load.movement = transfer._movement
        self._granted.update((part.grant.grant_id, part) for part in load.parts)
        self._counts["granted"] += len(load.parts)
        self._alarms.add(deadline_s, functools.partial(self._late, load))
        return transfer, load

    def _take(self, peer: Peer, message: dict[str, Any] | None) -> tuple[bool, bytes | None]:
        """Whether it was one to act upon, and what to answer."""
        granted = None if message is None else self._granted.get(message["grant_id"])
        if message is not None and message["kind"] == "begin":
            return self._begin(peer, granted, message)
        if message is None or granted is None or not granted.is_written_by(peer, message["begin_id"]):
            return self._refuse()
        load, movement = granted.load, granted.load.movement
        assert movement is not None
        kind = message["kind"]
        if kind == "layers":
            if movement.failed or not granted.is_next(message["first"], message["end"]):
                return self._refuse()
            first = load.next_layer
            granted.next_layer = message["end"]
            arriving.mark(movement, range(first, load.next_layer))
        elif kind == "done":
            if not (movement.failed or granted.is_complete):
                return self._refuse()
            self._end(granted)
        else:
            self._fail(load, f"the sender failed: {message['reason']}")
            self._end_settled(granted)
        return True, None

    def _begin(self, peer: Peer, granted: Granted | None, message: dict[str, Any]) -> tuple[bool, bytes | None]:
        begin_id = message["begin_id"]
        if granted is not None and granted.is_begun_by(peer, begin_id):
            return self._refuse()  # doubled; it was answered
        why = None
        if granted is None or granted.load.movement is None or granted.load.movement.failed:
            why = "the grant is over, or not of this receiver"
        elif granted.peer is not None:
            why = "the sender has begun it before" if granted.peer == peer else "another sender has the grant"
        elif message["digest"] != granted.grant.digest:
            why = "the grant was changed on its way"
        if granted is None or why is not None:
            return self._refuse(encode("refused", message["grant_id"], begin_id, reason=why))
        granted.peer, granted.begin_id = peer, begin_id
        wait = granted.load.wait
        if wait is not None and wait.state is not State.DONE:
            return True, None  # answered when whatever used the blocks is through
        granted.answered = True
        return True, encode("accepted", message["grant_id"], begin_id)

    def _refuse(self, reply: bytes | None = None) -> tuple[bool, bytes | None]:
        self._counts["refused_messages"] += 1
        return False, reply

    def _lost_here(self, peer: Peer) -> list[Granted]:
        found = [one for one in self._granted.values() if one.peer == peer and not one.over]
        for granted in found:
            self._fail(granted.load, "the sender is gone")
        return found

    def _gone_here(self, peer: Peer) -> None:
        for granted in self._lost_here(peer):
            self._end_settled(granted)

    def _close_here(self) -> None:
        self._closed = True
        for granted in list(self._granted.values()):
            self._fail(granted.load, "the receiver was closed")

    def _fail(self, load: GrantedLoad, why: str) -> None:
        if load.movement is not None:
            arriving.fail(load.movement, f"{len(load.block_ids)} blocks were not handed over: {why}")

    def _end_settled(self, granted: Granted) -> None:
        """Nobody begins to write the blocks by this grant any more."""
        if not self._settle_s:
            self._end(granted)
        elif not granted.stopped:
            granted.stopped = True
            settled = functools.partial(change, self.scheduler, functools.partial(self._end, granted))
            self._alarms.add(time.monotonic() + self._settle_s, settled)

    def _end(self, granted: Granted) -> None:
        """Nobody writes the blocks by this grant any more."""
        granted.over = True
        load = granted.load
        if load.movement is None or not load.is_over:
            return
        movement, load.movement = load.movement, None
        self._counts["failed" if movement.failed else "done"] += len(load.parts)
        for part in load.parts:
            del self._granted[part.grant.grant_id]
        arriving.end(movement)
        self.scheduler.group.notify()

    def _may_write_here(self, load: GrantedLoad) -> list[Granted]:
        """Whose senders have asked before the blocks were free, and may write now."""
        assert load.wait is not None
        if load.wait.state is not State.DONE:
            self._fail(load, "what used the blocks before failed")  # and the senders are told to stop
        if load.movement is None or load.movement.failed:
            return []
        asked = [part for part in load.parts if part.peer is not None and not part.answered]
        for part in asked:
            part.answered = True
        return asked

    def _stop_soon(self, load: GrantedLoad) -> None:
        self.scheduler.group.host.post(functools.partial(self._stop, load))

    # ---- in threads of the library, in no section ----
    def _may_write(self, load: GrantedLoad) -> None:
        load.wait.group.host.post(functools.partial(self._answer, load))  # type: ignore[union-attr]

    def _answer(self, load: GrantedLoad) -> None:
        if self._process_id != os.getpid():
            return  # a forked child
        for part in change(self.scheduler, functools.partial(self._may_write_here, load)):
            _send(part.peer, encode("accepted", part.grant.grant_id, part.begin_id))

    def _late(self, load: GrantedLoad) -> None:
        change(self.scheduler, functools.partial(self._fail, load, "the time was over"))

    def _stop(self, load: GrantedLoad) -> None:
        """The load has failed: its senders are told, until they answer."""
        if self._process_id != os.getpid():
            return  # a forked child: the senders are the parent's
        for part in change(self.scheduler, functools.partial(self._stop_here, load)):
            _send(part.peer, encode("revoke", part.grant.grant_id, part.begin_id))

    def _stop_here(self, load: GrantedLoad) -> list[Granted]:
        for part in load.parts:
            if part.peer is None:
                self._end(part)  # nobody has begun, and nobody may any more
        if load.movement is None:
            return []
        self._alarms.add(time.monotonic() + REVOKE_EVERY_S, functools.partial(self._stop, load))
        return [part for part in load.parts if not (part.over or part.stopped)]


def check_peer(peer: Any) -> None:
    """TypeError unless messages can be left for it. None would be the peer of all grants that nobody has begun."""
    check_methods(peer, "peer", ("send",), "the way to a sender")


def check_receiver(receiver: Any) -> None:
    """TypeError unless it is one."""
    if not isinstance(receiver, Receiver):
        raise TypeError(f"receiver is {receiver!r}; a Receiver is expected")


receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


def _send(peer: Peer, data: bytes) -> None:
    with Living("a message could not be sent to a peer"):  # it is as if it was lost
        peer.send(data)
