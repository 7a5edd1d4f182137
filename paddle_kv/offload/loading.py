"""The books of a manager with a tier below host memory, as far as one transfer loads to the device what is in host
memory and what is read into it meanwhile."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

from ..errors import TransferError
from ..schedule import arriving
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from ..tiers import Job as TierJob
from ..tiers import loading
from ..tracking.alarms import Alarms
from ..tracking.group import change
from .below import Below, Timed
from .books import Books
from .jobs import Job
from .policy import Policy
from .tier_queue import TierQueue


class LoadingBooks(Books):
    """See the module.

    Args:
        below: the tier, with its policy.
        timeout_s: of a load.
    """

    def __init__(
        self,
        scheduler: LayerwiseScheduler,
        policy: str | Policy[bytes],
        capacity_blocks: int,
        max_events: int,
        below: Below,
        timeout_s: float,
    ) -> None:
        super().__init__(scheduler, policy, capacity_blocks, max_events)
        self.below, self.timeout_s, self.tier = below, timeout_s, below.tier
        self._has_events = max_events > 0
        self.queue = TierQueue()
        self._is_to_look = False
        self._alarms = Alarms("paddle_kv-alarms")
        self._end_alarms = weakref.finalize(self, self._alarms.stop)
        self.looks_at_ends = True  # what they bring goes down

    # ---- outside of sections ----
    def ask(self, keys: list[bytes]) -> Set[bytes]:
        slots, arriving = self.index.slots, self.index.arriving  # without the lock: it is a hint in any case
        return self.below.having([key for key in keys if key not in slots or key in arriving])

    def load_s(self, num_blocks: int) -> float:
        return self.below.rate.seconds(num_blocks)

    def start_load(self, keys: list[bytes], device_ids: list[int], compute: Any) -> Transfer:
        start = functools.partial(self._start_load, keys, device_ids, self.ask(keys), compute)
        started: Transfer = self.group.host.call(start)  # as a whole, whatever a signal handler raises
        return started

    def _start_load(self, keys: list[bytes], device_ids: list[int], below: Set[bytes], compute: Any) -> Transfer:
        start = functools.partial(self._onload_from, keys, device_ids, below, compute)
        transfer, asked = change(self, start)
        if asked is not None:
            job, timed = asked
            try:
                loading.read(self.below.tier, transfer._movement, job)
            except Exception as error:  # noqa: BLE001  the transfer has failed, and ends
                if not job.started_s:
                    timed.give_up()
                    change(self, functools.partial(self.read_ended, job))
                raise TransferError(f"the tier could not be asked: {error}") from None
        return transfer  # type: ignore[no-any-return]

    # ---- sections ----
    def call_at(self, at_s: float, function: Callable[[], object]) -> None:
        self._alarms.add(at_s, function)

    def _onload_from(
        self, keys: list[bytes], device_ids: list[int], below: Set[bytes], compute: Any
    ) -> tuple[Transfer, tuple[TierJob, Timed] | None]:
        """One transfer of what is in host memory and what is read into it meanwhile."""
        self.settle()
        below = self.below.not_forgotten(below)
        slots = self.index.slots
        coming = (self.index.arriving.keys() & keys) - self.directory.following
        if coming:  # of the tier when they were looked up, say
            raise TransferError(
                f"{len(coming)} of the blocks are being brought by a prefetch or a save; compute instead"
            )
        absent = [position for position, key in enumerate(keys) if key not in slots]
        there = [position for position, key in enumerate(keys) if key in slots]
        if not absent:
            return self.onload(keys, device_ids, compute), None
        gone = [keys[position] for position in absent if keys[position] not in below]
        if gone:
            self.directory.plan_load(gone, range(len(gone)))  # says why it cannot be loaded
        jobs: list[Job] = []
        timed = None
        wanted = [keys[position] for position in absent]
        self.index.pin(keys)  # none of them makes room for the others
        try:
            jobs.append(self._plan_from_tier(wanted, [device_ids[position] for position in absent]))
            if there:
                jobs.append(self.directory.plan_load([keys[i] for i in there], [device_ids[i] for i in there]))
            host_ids = [slots[key] for key in keys]
            arrival = loading.Arrival()
            timed = self.below.timed(arrival, len(wanted))
            reading = TierJob(wanted, list(jobs[0].host_slots), timeout_s=self.timeout_s, observer=timed)
            plan = self.scheduler.plan("onload", device_ids, host_ids)
            transfer = arriving.start(self.scheduler, plan, compute, None, reading)
        except BaseException as error:
            if timed is not None:
                timed.give_up()
            damaged = error.damaged_host_blocks if isinstance(error, TransferError) else ()
            for job in jobs:
                self.directory.undo(job, [i for i, slot in enumerate(job.host_slots) if slot in damaged])
            if not self._has_events:
                self._forget_tier(wanted)
            raise
        finally:
            self.index.unpin(keys)
        arrival.movement = transfer._movement
        self.queue.began(reading)
        self.directory.following.update(wanted)
        self.moves.add(transfer, jobs)
        self.loads.add(transfer._movement)
        self._look_at_its_end(transfer)
        return transfer, (reading, timed)

    def _plan_from_tier(self, keys: list[bytes], device_ids: list[int]) -> Job:
        self.directory.tier_stored(self.below.name, keys)
        job = self.directory.plan_load(keys, device_ids, tier=self.below.name)
        if len(job.keys) < len(keys):
            self._undo_from_tier(job, keys)
            raise TransferError(f"host memory has no room for {len(keys)} blocks of the tier: what is there is held")
        return job

    def _undo_from_tier(self, job: Job, keys: list[bytes]) -> None:
        self.directory.undo(job)
        if not self._has_events:  # else what a lookup has noted stays
            self._forget_tier(keys)

    def read_ended(self, job: TierJob) -> None:
        """It is known how it went with what the tier was asked for."""
        self.queue.ended(job)

    def count_lost(self, num_blocks: int) -> None:
        """That the tier was asked for and has not brought."""
        if not self.closed:
            self.counts["tier_lost_blocks"] += num_blocks

    def _forget_tier(self, keys: Sequence[bytes]) -> None:
        self.directory.tier_removed(self.below.name, keys)
