"""What a transfer is asked to do, checked. Pure: no device, no Paddle, no CuPy."""

from __future__ import annotations

from collections.abc import Sequence

from ..backend.work import Direction, TransferPlan
from ..checks import Ids, check_distinct, check_ids


def check_blocks(
    direction: Direction,
    device_ids: Sequence[int] | Ids,
    host_ids: Sequence[int] | Ids,
    *,
    device_blocks: int,
    host_blocks: int,
) -> None:
    """
    Raises:
        IndexError: an id is outside its pool.
        ValueError: the lists differ in length, or a target occurs twice.
    """
    check_ids(device_ids, "device_block_ids", device_blocks)
    check_ids(host_ids, "host_block_ids", host_blocks)
    if len(device_ids) != len(host_ids):
        raise ValueError(
            f"device_block_ids has {len(device_ids)} ids, host_block_ids has {len(host_ids)}; both need the same number"
        )
    check_distinct(*(("host_block_ids", host_ids) if direction == "offload" else ("device_block_ids", device_ids)))


def make_plan(
    direction: Direction,
    device_ids: Sequence[int] | Ids,
    host_ids: Sequence[int] | Ids,
    *,
    num_layers: int,
    layers_per_event: int,
    layers: Sequence[int] | None = None,
) -> TransferPlan:
    """A plan of blocks that were checked (:func:`check_blocks`). int64 arrays are kept, not copied: nobody may change
    them afterwards.

    Raises:
        IndexError: a layer that there is not.
        ValueError: of layers that share an event only some.
    """
    plan = TransferPlan(direction, device_ids, host_ids, num_layers, layers_per_event)
    if layers is None:
        return plan
    check_ids(layers, "layers", num_layers)
    if not plan.num_groups:
        return plan
    left_out = _left_out(plan, layers)
    return TransferPlan(direction, plan.device_ids, plan.host_ids, num_layers, layers_per_event, left_out)


def _left_out(plan: TransferPlan, layers: Sequence[int]) -> frozenset[int]:
    wanted = frozenset(layers)
    for group in range(plan.num_groups):
        together = plan.layers_of(group)
        if 0 < len(wanted.intersection(together)) < len(together):
            raise ValueError(f"layers = {list(layers)} must name all or none of {list(together)}, which share an event")
    return frozenset(range(plan.num_groups)) - {plan.group_of(layer) for layer in wanted}
