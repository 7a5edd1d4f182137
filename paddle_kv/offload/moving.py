"""Jobs on the way: each transfer carries one job or several, and tells how each of them ended. In sections only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..backend.work import Direction, Stream
from ..schedule.movement import Movement
from ..schedule.scheduler import LayerwiseScheduler
from ..schedule.transfer import Transfer
from .jobs import Job, Result


class Moving:
    """A load or save in flight, and its jobs. Not the handle: that one is the user's, and a layerwise save whose handle
    is lost is cancelled.

    Attributes:
        follows: it is a load of what a tier is still bringing.
    """

    def __init__(self, movement: Movement, jobs: Sequence[Job], *, follows: bool = False) -> None:
        self.movement = movement
        self.jobs, self.follows = jobs, follows

    @property
    def is_of_link(self) -> bool:
        """Whether it is a load that nothing but the link may make fail."""
        return not self.follows and all(job.kind == "load" and job.tier is None for job in self.jobs)

    @property
    def over(self) -> bool:
        """Whether it is known what has become of it."""
        return self.movement.over and all(load.over for load in self.movement.computed_from or ())

    @property
    def failed(self) -> bool:
        """A save fails with the loads that it was computed from."""
        return self.movement.failed or any(load.failed for load in self.movement.computed_from or ())

    def results(self, rank: int, epoch: int, blocks: Sequence[int]) -> list[Result]:
        """One for each job. ``blocks[slot]`` is the block of the pool."""
        failure = self.movement.failure
        reason = "" if failure is None else failure.message
        if self.failed and not reason:
            reason = "a load from which it was computed failed"
        damaged = set(failure.damaged if failure is not None else ())
        lost = None  # all that failed
        if failure is not None and failure is self.movement.loss:
            lost = set(self.movement.plan.host_ids[self.movement.lost].tolist())
        found = []
        for job in self.jobs:
            positions = tuple(range(len(job.keys))) if self.failed else ()
            if lost is not None:
                positions = tuple(i for i in positions if blocks[job.host_slots[i]] in lost)
            wrong = tuple(i for i in positions if blocks[job.host_slots[i]] in damaged)
            found.append(Result(job.id, rank, epoch, positions, wrong, reason))
        return found


class Moves:
    """The transfers of jobs whose end nobody has taken yet."""

    def __init__(self, scheduler: LayerwiseScheduler) -> None:
        self.scheduler = scheduler
        self.moving: list[Moving] = []

    def start(
        self,
        direction: Direction,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
        compute: Stream,
        *,
        layerwise: bool = False,
        urgent: bool | None = None,
        behind: Collection[Movement] = (),
    ) -> Transfer:
        plan = self.scheduler.plan(direction, list(device_ids), list(host_ids))
        urgent = urgent if direction == "onload" else False
        return self.scheduler.start_here(plan, compute, layerwise, urgent, behind)

    def add(self, transfer: Transfer, jobs: Sequence[Job], *, follows: bool = False) -> None:
        self.moving.append(Moving(transfer._movement, jobs, follows=follows))

    def take_over(self) -> list[Moving]:
        """Those that are over, once."""
        known = [(one, one.over) for one in self.moving]
        self.moving = [one for one, over in known if not over]
        return [one for one, over in known if over]
