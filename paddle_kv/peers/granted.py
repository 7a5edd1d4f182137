"""What a receiver remembers of the blocks that it has given out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..schedule.movement import Movement
from .grant import Grant


class Peer(Protocol):
    """The way to one sender: an object of a channel. Two are the same peer if they are equal."""

    def send(self, data: bytes) -> object:
        """Leaves a message for it; waits for nothing. It may get lost, but not arrive at another one."""


class GrantedLoad:
    """A load whose blocks senders write, each some of the heads: see :class:`~paddle_kv.schedule.movement.Reading`.

    Args:
        grants: one for each sender.
        stop: called once the load has failed.

    Attributes:
        parts: what was granted.
        movement: the load; None once nobody writes any more.
        wait: with ``direct``: it is over when the blocks may be written.
    """

    def __init__(self, grants: list[Grant], stop: Callable[[GrantedLoad], object]) -> None:
        self.parts = [Granted(self, grant) for grant in grants]
        self.block_ids = list(grants[0].host_block_ids)
        self.movement: Movement | None = None
        self.wait: Movement | None = None
        self._stop = stop

    @property
    def next_layer(self) -> int:
        """The first one of which not all senders have told that it is there."""
        return min(part.next_layer for part in self.parts)

    @property
    def is_over(self) -> bool:
        """Whether no sender writes any more."""
        return all(part.over for part in self.parts)

    def cancel(self) -> None:
        self._stop(self)


class Granted:
    """One grant.

    Attributes:
        load: which it is for.
        peer: who has begun to write; None: nobody.
        begin_id: names that beginning.
        answered: whether it was told that it may.
        next_layer: the first one that was not told.
        stopped: its sender begins no more.
        over: nobody writes by it any more.
    """

    def __init__(self, load: GrantedLoad, grant: Grant) -> None:
        self.load = load
        self.grant = grant
        self.peer: Peer | None = None
        self.begin_id = ""
        self.answered = False
        self.next_layer = 0
        self.stopped = False
        self.over = False

    def is_begun_by(self, peer: Peer, begin_id: str) -> bool:
        """Whether it is this sender's, by this beginning."""
        return self.peer is not None and self.peer == peer and self.begin_id == begin_id

    def is_written_by(self, peer: Peer, begin_id: str) -> bool:
        """Whether it is this sender's, which may still write by this beginning."""
        return self.is_begun_by(peer, begin_id) and not (self.stopped or self.over)

    def is_next(self, first: int, end: int) -> bool:
        """Whether these layers come behind those that were told."""
        return first == self.next_layer < end <= self.grant.num_layers

    @property
    def is_complete(self) -> bool:
        """Whether all layers were told."""
        return self.next_layer == self.grant.num_layers
