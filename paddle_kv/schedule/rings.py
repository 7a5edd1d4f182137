"""Device caches of which the layers share buffers in turn: what a layer waits for beyond the same layer of others.

Layer i of the model lies in buffer ``i % layer_buffers``. A load moves a layer into its buffer when the model has read
the layer that lay there before (:meth:`Transfer.mark_layer_read`), and when what the model had written there has been
saved. In sections only.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..backend.work import Event
from .movement import Movement


def shares_buffers(movement: Movement, before: Movement) -> bool:
    """Whether a load moves layers to where an earlier transfer has other ones. Those that meet in host blocks alone
    come behind the same layer as ever, and so does a save: its own pass has loaded what it reads."""
    if not before.ring:
        return False
    found = movement.sharing.get(before)
    if found is None:
        own, others = movement.plan.device_ids, before.plan.device_ids
        memory = before.target if before.direction == "onload" else before.source
        found = movement.sharing[before] = movement.target is memory and bool(np.isin(own, others).any())
    return found


def events_in_buffer(movement: Movement, before: Movement, layer: int) -> list[Event | None]:
    """Behind which layer ``layer`` of a load comes, of one that has used the buffer; None: not submitted yet."""
    if layer >= movement.ring:
        return []  # it comes behind the load's own layer there
    # All of them: they are marked in any order.
    return [before.events[one] for one in range(layer, before.plan.num_layers, before.ring)]


def is_behind_own(movement: Movement, layer: int, submitting: Collection[int]) -> bool:
    """Whether the layer of a load that lies in this buffer before it is submitted, or about to be. It may be marked as
    read by somebody who has not waited for it. The stream keeps the order of both: since this one waits for its mark,
    no call of an engine copies it together with earlier ones."""
    before = layer - movement.ring
    is_first = not movement.ring or movement.direction == "offload" or before < 0
    return is_first or movement.events[before] is not None or before in submitting


def note_savers(movement: Movement) -> None:
    """Of a load: the saves of what the model writes to its blocks. They were started behind it, and they have to be
    through with a buffer before it moves the next layer there."""
    for other in movement.target.holders(movement.plan.target_ids):
        if isinstance(other, Movement) and other.direction == "offload":  # it reads what was written since
            movement.savers[other] = None
            other.dependents[movement] = None


def saved_before(movement: Movement, layer: int) -> list[Event] | None:
    """Events of these saves behind which layer ``layer`` of the load comes; None while one is not submitted yet."""
    found = []
    for save in movement.savers if layer >= movement.ring else ():
        event = save.events[layer - movement.ring]
        if event is None and not save.failed:
            return None
        found += [one for one in (event, save.fence_event) if one is not None and not save.over]
    return found
