"""Loads of which some or all host blocks are being written while they run: from storage, say. In sections only.

Such a load writes both sides: it holds these host blocks as their writer, so that whoever reads them comes behind it
layer by layer, and they are poisoned if it fails. A layer is submitted once it is marked as readable. The load is over,
and its blocks are given back, only when :func:`end` has said that nobody touches them.

If some blocks do not come (:func:`lose`), the load fails, and moves the others all the same: only the lost ones are
poisoned, on both sides.

A load may also follow what others write under a lease of theirs (:func:`follow`). It only reads these blocks, and is
over as any other, whoever still writes them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..backend.work import Stream, TransferPlan
from ..checks import check_distinct
from ..errors import LeasedError
from ..tracking import stamps
from . import settling, submission
from .movement import Failure, Movement, Reading, State
from .resources import Events
from .transfer import Transfer


def start(scheduler: Any, plan: TransferPlan, compute: Stream, urgent: bool | None, reading: Reading) -> Transfer:
    """The load of host blocks of which nobody uses those that ``reading`` writes; nothing is submitted before
    :func:`mark`.

    Raises:
        LeasedError: a transfer or a lease has one of these blocks.
        ValueError: one of them is named twice.
    """
    check_distinct("host_block_ids", reading.block_ids)
    domain = scheduler.host_pool.domain
    for holder in domain.holders(reading.block_ids):
        holder.look()
    busy = domain.busy(reading.block_ids)
    if busy:
        raise LeasedError(f"block {busy[0]} of the host pool is in use; it cannot be read from storage now", busy)
    stamps.forget(domain, reading.block_ids)
    transfer: Transfer = scheduler.start_here(plan, compute, False, urgent, reading=reading)
    return transfer


def follow(
    scheduler: Any, plan: TransferPlan, compute: Stream | Events, urgent: bool | None, leased: Sequence[int]
) -> Transfer:
    """The load of host blocks of which somebody writes those that are ``leased``, under a lease of his own: he marks
    what is there. Nothing is submitted before."""
    transfer: Transfer = scheduler.start_here(plan, compute, False, urgent, leased=leased)
    return transfer


def mark(movement: Movement, layers: Iterable[int]) -> None:
    """The bytes of these layers are in host memory, of all blocks."""
    if movement.over or movement.failed:
        return
    plan = movement.plan
    found = movement.unread.intersection(layers)
    movement.unread -= found
    for group in sorted({plan.group_of(layer) for layer in found}):
        if not movement.is_held_back(group):
            bisect.insort(movement.ready, group)
    settling.progress([movement])


def lose(movement: Movement, host_ids: Iterable[int], message: str) -> None:
    """These host blocks do not come; all others are there. On a ring of layer buffers the load is lost with them: a
    pass that fails has left no layer of the others on the device, and marks no more."""
    if movement.over or movement.failed:
        return
    lost = np.isin(movement.plan.host_ids, list(host_ids))
    if lost.all() or movement.ring:
        fail(movement, message)
        return
    settling.progress(_lose(movement, lost, Failure(State.FAILED, message)))
    mark(movement, range(movement.plan.num_layers))  # blocks that are lost hold nothing: whatever is copied there


def _lose(movement: Movement, lost: np.ndarray, loss: Failure) -> list[Movement]:
    """With the loads that read what is lost; whatever else reads it fails. Returns what has to be advanced."""
    plan = movement.plan
    movement.loss = movement.loss or loss
    movement.lost = lost if movement.lost is None else movement.lost | lost
    movement.target.poison(plan.target_ids[lost], movement, loss.message)
    movement.source.poison(plan.source_ids[lost], movement, loss.message)  # those that were read into
    movement.notify()
    failed: list[Movement] = []
    for one in list(movement.dependents):
        if movement in one.reads_from and not one.failed:
            ids = plan.host_ids if one.direction == "onload" else plan.device_ids
            wrong = np.isin(one.plan.source_ids, ids[lost])
            message = f"it reads blocks of a transfer that failed ({loss.message})"
            if wrong.any() and one.direction == "onload" and not one.ring:
                failed += _lose(one, wrong, Failure(State.FAILED, message, reason=loss.message))
            elif wrong.any():
                failed += submission.fail(one, Failure(State.FAILED, message, reason=loss.message))
    return failed


def fail(movement: Movement, message: str) -> None:
    """None of the blocks comes, or nobody can say which."""
    settling.progress(submission.fail(movement, Failure(State.FAILED, message)))
    settling.look(movement)


def end(movement: Movement) -> None:
    """Nobody writes to the host blocks any more."""
    movement.reading = None
    dependents = list(movement.dependents)
    for one in dependents if movement.dropped else ():
        if one.num_unsubmitted and not one.failed:
            submission.inherit(one)
    settling.progress([movement, *dependents])
    settling.look(movement)
