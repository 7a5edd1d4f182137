"""What the index asks of an eviction policy."""

from __future__ import annotations

from collections.abc import Container, Hashable
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Policy(Protocol[Key]):
    """Which block goes when room is needed. One object serves one index; calls are serialised by its owner.

    The index tells it every event, so the policy knows exactly the blocks that are resident. It may remember more
    (ghosts). Of blocks that are used together, those of a prompt, it hears the last one first: whoever goes by the
    order of use lets go of a prompt from its end. One that raises is told anew of all that is resident.

    A request for an absent block with a full index is ``victim(block)``, then ``on_insert(block)``, unless no victim
    was found. A class may define a fifth method, ``replace(block, pinned)``, which does both in one call and returns
    the victim; the index then calls that instead, for speed. Subclasses do not inherit it. A victim that is the block
    itself is a refusal: that block is not let in. Likewise ``replace_all(blocks, pinned)``, for blocks that all are
    absent: it may serve only the first of them, or none, and refuses none; each gets the slot of its victim; with it
    ``also_refused(blocks, pinned)``: how many of the first of these it would refuse, asked right behind a refusal; and
    ``on_use(blocks)``, which is ``on_access`` of each, the last one first.

    Three more methods are called where a class has them: ``on_prompt(keys)`` with the whole prompt of a look-up, before
    the uses, of which it is not told if it returns True: then it has counted those up to the first absent block itself;
    ``on_save(keys)`` with what is about to be inserted; ``on_end(keys)`` with a prompt whose session is over.

    Example:
        >>> from paddle_kv.offload import BlockIndex
        >>> class Fifo:  # a policy of one's own: KVOffloadManager(scheduler, policy=Fifo())
        ...     def __init__(self):
        ...         self.blocks = {}
        ...     def on_insert(self, key):
        ...         self.blocks[key] = None
        ...     def on_access(self, key):
        ...         pass
        ...     def on_remove(self, key):
        ...         del self.blocks[key]
        ...     def victim(self, incoming, pinned):
        ...         found = next((key for key in self.blocks if key not in pinned), None)
        ...         self.blocks.pop(found, None)
        ...         return found
        >>> index = BlockIndex(Fifo(), capacity_blocks=2)
        >>> slots = index.admit(["a", "b"], [0, 1])
        >>> index.lookup(["a"]), index.admit(["c"], []), index.lookup(["a"]), index.lookup(["b", "c"])
        (1, {'c': 1}, 1, 0)
    """

    def on_insert(self, key: Key) -> None:
        """The block, absent until now, is resident."""

    def on_access(self, key: Key) -> None:
        """A resident block was used."""

    def on_remove(self, key: Key) -> None:
        """A resident block is gone for another reason than ``victim`` (its save failed, or it was dropped)."""

    def victim(self, incoming: Key | None, pinned: Container[Key]) -> Key | None:
        """Takes out the resident block that makes room for ``incoming`` (None: for nothing in particular).

        Never one of ``pinned``; None if there is no other.
        """
