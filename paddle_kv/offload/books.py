"""What a manager keeps book of: which blocks it has, and what moves them. Changes in sections of the group of its
scheduler alone (:mod:`paddle_kv.tracking.group`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..backend.work import Stream
from ..errors import ClosedError, TransferError
from ..schedule import settling, submission
from ..schedule.movement import Movement
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from ..tracking.group import MemoryGroup
from .index import BlockIndex

_COUNTERS = (
    "lookups",
    "looked_up_blocks",
    "hit_blocks",
    "saved_blocks",
    "deduplicated_blocks",
    "left_out_blocks",
    "loaded_blocks",
    "damaged_blocks",
    "failed_saves",
    "failed_loads",
)


class Moving:
    """A load or save in flight, and the blocks that it holds. Not the handle: that one is the user's, and a layerwise
    save whose handle is lost is cancelled."""

    def __init__(self, movement: Movement, keys: Sequence[bytes], *, saving: bool) -> None:
        self.movement = movement
        self.keys = keys
        self.saving = saving
        # Those that are in the index because of it, or that it reads there; not such as were dropped meanwhile.
        self.slots = dict(zip(keys, movement.plan.host_ids.tolist(), strict=True))

    @property
    def over(self) -> bool:
        """Whether it is known what has become of it."""
        return self.movement.over and all(load.over for load in self.movement.computed_from or ())

    @property
    def failed(self) -> bool:
        """A save fails with the loads that it was computed from."""
        return self.movement.failed or any(load.failed for load in self.movement.computed_from or ())


class Books:
    """See the module.

    Attributes:
        taken: blocks of the pool that are the manager's.
        moving: loads and saves of which the end is not booked.
        loads: those that :meth:`onload` has started, as long as anybody refers to them.
        left_out: save -> positions of its blocks for which there was no room.
    """

    def __init__(self, scheduler: LayerwiseScheduler, index: BlockIndex[bytes]) -> None:
        self.scheduler = scheduler
        self.pool = scheduler.host_pool
        self.index = index
        self.taken: set[int] = set()
        self.moving: list[Moving] = []
        self.loads: weakref.WeakSet[Movement] = weakref.WeakSet()
        self.left_out: weakref.WeakKeyDictionary[Movement, list[int]] = weakref.WeakKeyDictionary()
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.closed = False

    @property
    def group(self) -> MemoryGroup:
        """The lock under which all of this changes."""
        return self.scheduler.group

    # ---- sections ----
    def lookup(self, keys: list[bytes]) -> tuple[list[bytes], int]:
        """The prefix that is there, pinned, and how many blocks behind it are arriving."""
        self.settle()
        found = keys[: self.index.lookup(keys)]
        self.index.pin(found)
        self.counters["lookups"] += 1
        self.counters["looked_up_blocks"] += len(keys)
        self.counters["hit_blocks"] += len(found)
        coming = next((i for i, key in enumerate(keys) if key not in self.index.slots), len(keys))
        return found, coming - len(found)

    def peek(self, keys: list[bytes]) -> int:
        self.settle()
        return self.index.peek(keys)

    def onload(self, keys: list[bytes], device_ids: list[int], compute: Stream) -> Transfer:
        self.settle()
        slots = self.index.slots
        for position, key in enumerate(keys):
            if key not in slots and key in self.index.pins:
                raise TransferError(f"hashes[{position}] = {key.hex()} was dropped or found damaged since the lookup")
            if key not in slots or key in self.index.arriving:
                raise KeyError(f"hashes[{position}] = {key.hex()} is not present; load what lookup() has found")
        plan = self.scheduler.plan("onload", device_ids, [slots[key] for key in keys])
        try:
            transfer = self.scheduler.start_here(plan, compute, False, None)
        except TransferError as error:
            self.drop_damaged({key: slots[key] for key in keys}, error.damaged_host_blocks)
            raise
        self.index.pin(keys)
        self.moving.append(Moving(transfer._movement, keys, saving=False))
        self.loads.add(transfer._movement)
        self.counters["loaded_blocks"] += len(keys)
        return transfer

    def save(
        self, keys: list[bytes], device_ids: list[int], loads: list[Transfer], layerwise: bool, compute: Stream
    ) -> Transfer:
        self.settle()
        index, source = self.index, dict(zip(keys, device_ids, strict=True))
        free_slots = self._take_slots(sum(key not in index.slots for key in source))
        admitted: dict[bytes, int] = {}
        try:
            admitted = index.admit(list(source), free_slots)
            plan = self.scheduler.plan("offload", [source[key] for key in admitted], list(admitted.values()))
            transfer = self.scheduler.start_here(plan, compute, layerwise, False, self.users_of(device_ids))
        except BaseException:  # also of a policy of the user: nothing may seem to be there
            self._give_back([index.remove(key) for key in admitted])
            raise
        finally:
            self._give_back(free_slots)
        movement = transfer._movement
        movement.computed_from = tuple(load._movement for load in loads)
        if admitted:
            index.arriving.update(admitted)
            index.pin(admitted)
            self.moving.append(Moving(movement, list(admitted), saving=True))
        self.left_out[movement] = [position for position, key in enumerate(keys) if key not in index.slots]
        left_out = sum(key not in index.slots for key in source)
        self.counters["saved_blocks"] += len(admitted)
        self.counters["deduplicated_blocks"] += len(source) - len(admitted) - left_out
        self.counters["left_out_blocks"] += left_out
        return transfer

    def evict(self, num_blocks: int) -> int:
        self.settle()
        slots = self.index.evict(num_blocks)
        self._give_back(slots)
        return len(slots)

    def drop_now(self, keys: list[bytes]) -> int:
        self.settle()
        return self.drop(keys)

    def drop(self, keys: Iterable[bytes]) -> int:
        """Forgets those of the blocks that are there or arriving, whoever holds them; how many."""
        found = [key for key in dict.fromkeys(keys) if key in self.index.slots]
        for moving in self.moving:
            for key in found:
                moving.slots.pop(key, None)
        self._give_back([self.index.remove(key) for key in found])
        return len(found)

    def clear(self) -> int:
        self.settle()
        for moving in self.moving:
            moving.slots.clear()
        slots = self.index.clear()
        self._give_back(slots)
        return len(slots)

    def cancel_all(self) -> None:
        for moving in list(self.moving):
            settling.progress(submission.cancel(moving.movement))

    def in_flight(self) -> list[Movement]:
        return [moving.movement for moving in self.moving if not moving.movement.over]

    def unpin(self, keys: Iterable[bytes]) -> None:
        if not self.closed:
            self.index.unpin(keys)

    def stats(self) -> dict[str, int]:
        if not self.closed:
            self.settle()
        index = self.index
        free = 0 if self.pool.closed else self.pool.count_free_here()
        return {
            **self.counters,
            "evicted_blocks": index.evicted_blocks,
            "blocks": len(index.slots) - len(index.arriving),
            "saving_blocks": len(index.arriving),
            "pinned_blocks": sum(key in index.slots for key in index.pins),
            "capacity_blocks": min(index.capacity_blocks, len(self.taken) + free),
        }

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for moving in self.moving:
            if moving.saving:
                settling.progress(submission.cancel(moving.movement))
        self.moving.clear()
        for blocks in (self.index.slots, self.index.arriving, self.index.pins):
            blocks.clear()
        self._give_back(list(self.taken))

    # ---- inside of them ----
    def settle(self) -> None:
        """Books what has ended: what has arrived becomes visible, what failed is forgotten."""
        if self.closed:
            raise ClosedError("the offload manager is closed")
        known = [(moving, moving.over) for moving in self.moving]
        self.moving = [moving for moving, over in known if not over]
        for moving in [moving for moving, over in known if over]:
            failed = moving.failed
            self.unpin(moving.keys)
            self.counters["failed_saves" if moving.saving else "failed_loads"] += failed
            if moving.saving:
                self.index.arriving.difference_update(moving.slots)
                if failed:
                    self.drop(moving.slots)
            elif moving.movement.failure is not None:
                self.drop_damaged(moving.slots, moving.movement.failure.damaged)

    def users_of(self, device_ids: list[int]) -> list[Any]:
        """The transfers in flight that touch these device blocks: of other saves of the same blocks, for example."""
        return self.scheduler.device_cache.domain.holders(device_ids)

    def drop_damaged(self, slots: dict[bytes, int], damaged: Iterable[int]) -> None:
        """A checksum has found that these blocks of the pool do not hold what was saved to them."""
        wrong = set(damaged)
        if wrong:
            self.counters["damaged_blocks"] += self.drop([key for key, slot in slots.items() if slot in wrong])

    def _take_slots(self, num_absent: int) -> list[int]:
        room = self.index.capacity_blocks - len(self.index.slots)
        count = max(0, min(num_absent, room, self.pool.count_free_here()))
        slots = self.pool.allocate_here(count).take() if count else []
        self.taken.update(slots)
        return slots  # ascending: neighbours of a prompt become neighbours here, in the same order

    def _give_back(self, slots: list[int]) -> None:
        self.taken.difference_update(slots)
        if slots and not self.pool.closed:
            self.pool.free_here(slots)
