"""What a manager keeps: how much, what goes, what others are told of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..ops import _arguments as arguments
from ..timeouts import check_timeout
from ..tracking.group import change
from .books import Books
from .checks import checked_hashes
from .jobs import Event, Snapshot

_BYTES = {
    "saved_bytes": ["saved_blocks"],
    "loaded_bytes": ["loaded_blocks"],
    "used_bytes": ["blocks", "saving_blocks"],
    "capacity_bytes": ["capacity_blocks"],
}


class Keeping:
    """The part of :class:`~paddle_kv.offload.KVOffloadManager` that is about all blocks, whosever they are."""

    _books: Books
    _block_bytes: int

    # ---- room ----
    def evict(self, num_blocks: int) -> int:
        """Lets go of up to ``num_blocks`` blocks, in the order of the policy, and gives them back to the pool. Returns
        how many; blocks that leases or transfers hold stay.

        Raises:
            TypeError: not an integer.
            ValueError: negative.
            ClosedError: closed.
        """
        num_blocks = arguments.integer(num_blocks, "num_blocks")
        if num_blocks < 0:
            raise ValueError(f"num_blocks = {num_blocks} must not be negative")
        return int(change(self._books, functools.partial(self._books.evict, num_blocks)))

    def drop(self, hashes: Sequence[bytes]) -> int:
        """Forgets these blocks, also such as are arriving or held: no lookup finds them until they are saved again.
        Loads in flight go on. Returns how many there were in host memory. Those in the tier are not found any
        more when this returns, which may wait for its storage; what is on its way there is deleted when it is there.
        A storage that cannot write that down counts an error and says so in the log: the next process finds them again.

        Raises:
            TypeError: not a list of bytes.
            ValueError: with a tier, a hash that none can have: empty, or of more than 64 bytes. Nothing was dropped.
            ClosedError: closed.
        """
        return self._books.forget(checked_hashes(hashes))

    def clear(self) -> int:
        """:meth:`drop` of all blocks: for weights that have changed. What is being saved now is never found. The engine
        of the tier deletes all its objects, also those of other tiers.

        Raises:
            NotImplementedError: the engine of the tier cannot do that. Nothing was dropped.
            ClosedError: closed.
        """
        return self._books.forget_all()

    @property
    def capacity_blocks(self) -> int:
        """Blocks that are kept at the same time, at most."""
        return self._books.index.capacity_blocks

    @property
    def capacity_bytes(self) -> int:
        """Bytes of host memory that they take."""
        return self.capacity_blocks * self._block_bytes

    def flush(self, timeout_s: float | None = None) -> None:
        """Blocks until what has been saved so far is in the tier, as far as its policy and its queue take it; with
        "write_back" and "exclusive" all that is in host memory goes there: before a server ends.

        Raises:
            TimeoutError: not after ``timeout_s``.
            ClosedError: closed.
        """
        check_timeout(timeout_s)
        self._books.flush(timeout_s)

    # ---- for others ----
    def take_events(self) -> list[Event]:
        """What came and went since the last call, in ``"host"`` memory and in the tier (the name of its engine), for a
        :class:`~paddle_kv.offload.Mirror`. What a tier finds or evicts by itself is told when a lookup asks for it."""
        return list(change(self._books, self._books.take_events))

    def snapshot(self) -> Snapshot:
        """All that is known to be there, for a :class:`~paddle_kv.offload.Mirror` that begins or has missed events."""
        found: Snapshot = change(self._books, self._books.snapshot)
        return found

    def stats(self) -> dict[str, int | float]:
        """Counts since the manager was made (blocks, calls, bytes), and what it holds now: the names are in
        ``docs/offload.md``. Works after :meth:`close`."""
        found: dict[str, int | float] = change(self._books, self._books.stats)
        found["hit_rate"] = found["hit_blocks"] / max(1, found["looked_up_blocks"])
        for name, blocks in _BYTES.items():
            found[name] = sum(found[one] for one in blocks) * self._block_bytes
        return found
