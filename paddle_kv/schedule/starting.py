"""The section that starts a transfer: looks, checks, notes its hazards, submits what is ready."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..backend.work import Stream, TransferPlan
from ..checks import Ids
from ..tracking.group import Guard
from . import by_marks, settling, submission
from .movement import Failure, Movement, Owner, Reading, State, movements
from .resources import Events
from .statistics import Statistics
from .transfer import Transfer, let_go
from .uses import holding

URGENT_SHARE = 8
URGENT_BESIDE_BYTES = 64 << 20  # a millisecond of the link


def start(
    scheduler: Owner,
    plan: TransferPlan,
    compute: Stream | Events,
    statistics: Statistics,
    *,
    layerwise: bool,
    urgent: bool | None,
    behind: Collection[Movement],
    reading: Reading | None = None,
    leased: Sequence[int] = (),
) -> Transfer:
    """Behind what its blocks, and ``behind``, ask for. ``compute``: or events that were recorded on it before, for a
    load that does not wait for what was submitted since. ``urgent=None``: as the statistics say. ``reading``: the
    source blocks are being written, by the load itself; ``leased``: some are, by others; see :mod:`.arriving`."""
    to_host = plan.direction == "offload"
    source, target = (
        (scheduler.device_cache, scheduler.host_pool) if to_host else (scheduler.host_pool, scheduler.device_cache)
    )
    names = ("device cache", "host pool") if to_host else ("host pool", "device cache")
    # Nobody uses those that are being written: see :mod:`.arriving`.
    written = leased if reading is None else reading.block_ids
    read_ids = _but_for(written, plan.source_ids) if written else plan.source_ids
    if not (source.domain.is_quiet() and target.domain.is_quiet()):
        holders = [*source.domain.holders(read_ids, writing=False), *target.domain.holders(plan.target_ids)]
        for holder in dict.fromkeys(holders):  # in an order that repeats
            holder.look()  # one that has failed must be known of
        source.domain.check(read_ids, names[0], writing=False)
        target.domain.check(plan.target_ids, names[1], writing=True)
        if plan.left_out:  # the block is usable afterwards if it was before
            target.domain.check(plan.target_ids, names[1], writing=False)
    if scheduler.observer is not None and not to_host:
        scheduler.observer.check(read_ids)
    if urgent is None:
        moved_bytes = len(plan.device_ids) * scheduler.bytes_per_block // plan.num_layers * plan.num_moved_layers
        urgent = statistics.queued_bytes >= max(URGENT_SHARE * moved_bytes, URGENT_BESIDE_BYTES)
    resources = scheduler.resources
    stream = resources.urgent_stream() if urgent else resources.streams[plan.direction]
    movement = Movement(scheduler, plan, stream, layerwise=layerwise, reading=reading, follows=bool(leased))
    has_noted = False
    try:
        transfer = _prepare(movement, compute)
        has_noted = True
        _note_hazards(movement, behind)
        movements[movement.number] = movement
        movement.target.group.transfers[movement.number] = movement
        scheduler.note_start(movement)
        if not to_host and "urgent" in resources.streams:
            _note_shared_link(movement)
        if layerwise:
            by_marks.offer(movement)
        settling.begin(movement)
    except BaseException as error:
        movement.told = True
        if has_noted:
            _give_up(movement, error)
        else:
            movement.held, movement.report = (), None  # the exception keeps this frame
            if movement.guard is not None:
                movement.guard.cancel()
        raise
    movement.submission_failed = movement.failure is not None
    return transfer


def _note_shared_link(movement: Movement) -> None:
    """Of this scheduler alone: each GPU has a link of its own."""
    others: Any = movement.group.transfers.values()
    for one in others:
        is_beside = one.scheduler is movement.scheduler and one.stream is not movement.stream
        if is_beside and one.direction == "onload" and not one.over:
            one.shares_link = movement.shares_link = True


def _prepare(movement: Movement, compute: Stream | Events) -> Transfer:
    """Takes its events, and has that of compute recorded."""
    scheduler, plan = movement.scheduler, movement.plan
    if plan.num_groups:
        movement.hold_all_events()
    if isinstance(compute, Events):
        movement.held, movement.after = (*movement.held, compute), compute.events
    elif plan.num_groups and not movement.layerwise:
        movement.after = movement.hold_events(1)
        scheduler.backend.record(movement.after[0], compute)
    if plan.num_groups and movement.to_mark:
        movement.unmarked = dict(zip(movement.to_mark, movement.hold_events(len(movement.to_mark)), strict=True))
    if not scheduler.record_layer_times:  # else there is more to hear of than one event
        movement.report = settling.reporter(movement, movement.held)
    transfer = Transfer(movement)
    movement.handle = weakref.ref(transfer)
    movement.guard = Guard.over(transfer, movement, functools.partial(let_go, movement))
    return transfer


def _give_up(movement: Movement, error: BaseException) -> None:
    """Behind an error, of memory say, from the first hazard on. It has taken the places of others by then: so that who
    comes later keeps the order, it is a transfer that has failed, behind all that there are. Its targets are what they
    were if nothing of it was submitted."""
    for domain in (movement.source, movement.target):
        domain.rebuild()
    before: Any = movement.group.transfers.values()
    movement.depends_on.update(one for one in before if one is not movement)
    for one in movement.depends_on:
        one.dependents[movement] = None
    movements[movement.number] = movement
    movement.group.transfers[movement.number] = movement
    if not movement.over:
        movement.scheduler.note_start(movement)
    by_marks.end(movement)
    if not (movement.failed or movement.over):
        failure = Failure(State.FAILED, f"{movement.direction} failed at its start: {type(error).__name__}: {error}")
        if movement.starts:
            settling.progress(submission.fail(movement, failure))
        else:
            movement.failure = failure
            if movement.reading is not None:
                movement.reading.cancel()
    settling.progress_again(movement)


def _note_hazards(movement: Movement, behind: Collection[Movement]) -> None:
    plan, reading = movement.plan, movement.reading
    read_into = [] if reading is None else reading.block_ids
    read_ids = _but_for(read_into, plan.source_ids) if read_into else plan.source_ids
    reads_from: set[Any] = movement.source.read(read_ids, movement)
    if read_into:
        movement.source.write(read_into, movement)
    if plan.left_out:
        reads_from = {*reads_from, *movement.target.holders(plan.target_ids, writing=False)}
    others: set[Any] = movement.target.write(plan.target_ids, movement)
    if not (reads_from or others or behind):
        return
    # Of one that failed before, only blocks that were rewritten since are read: it gives the order, not the data.
    movement.reads_from = {before for before in reads_from if not before.failed}
    movement.depends_on = {*reads_from, *others, *behind}
    for before in movement.depends_on:
        before.dependents[movement] = None
    if movement.num_unsubmitted and movement.depends_on:
        submission.inherit(movement)


def _but_for(read_into: Sequence[int], ids: Ids) -> Ids:
    return ids[~np.isin(ids, read_into)]


@holding(lambda names: names["movement"].scheduler)
def hold(movement: Movement, compute: Stream) -> None:
    """Work submitted to the compute stream from now on runs behind what was submitted of the transfer."""
    held, event = movement.held, movement.last_event
    if event is None or movement.over:
        return
    backend = movement.scheduler.backend
    with contextlib.suppress(Exception):  # a second failure; the device is lost
        if compute is None:
            backend.wait(event, None)
        else:
            backend.wait_on_stream(compute, event, None)
    del held
