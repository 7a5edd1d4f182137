"""Loads whose host blocks are being written while they run: from storage, say. In sections only.

Such a load writes both sides: it holds its host blocks as their writer, so that whoever reads them comes behind it
layer by layer, and they are poisoned if it fails. A layer is submitted once it is marked as readable. The load is over,
and its blocks are given back, only when :func:`end` has said that nobody touches them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

from ..backend.work import Stream, TransferPlan
from ..checks import check_distinct
from ..errors import LeasedError
from ..tracking import stamps
from . import settling, submission
from .movement import Failure, Movement, Reading, State
from .transfer import Transfer


def start(scheduler: Any, plan: TransferPlan, compute: Stream, urgent: bool | None, reading: Reading) -> Transfer:
    """The load of host blocks that nobody uses; nothing is submitted before :func:`mark`.

    Raises:
        LeasedError: a transfer or a lease has one of the blocks.
        ValueError: a host block is named twice.
    """
    check_distinct("host_block_ids", plan.host_ids)
    domain = scheduler.host_pool.domain
    for holder in domain.holders(plan.host_ids):
        holder.look()
    busy = domain.busy(plan.host_ids)
    if busy:
        raise LeasedError(f"block {busy[0]} of the host pool is in use; it cannot be read from storage now", busy)
    stamps.forget(domain, plan.host_ids)
    transfer: Transfer = scheduler.start_here(plan, compute, False, urgent, reading=reading)
    return transfer


def mark(movement: Movement, layers: Iterable[int]) -> None:
    """The bytes of these layers are in host memory, of all blocks."""
    if movement.over or movement.failed:
        return
    plan = movement.plan
    found = movement.unread.intersection(layers)
    movement.unread -= found
    for group in sorted({plan.group_of(layer) for layer in found}):
        if movement.unread.isdisjoint(plan.layers_of(group)):
            bisect.insort(movement.ready, group)
    settling.progress([movement])


def fail(movement: Movement, message: str) -> None:
    """Not all of the blocks come."""
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
