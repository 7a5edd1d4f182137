"""The way up: from a tier into blocks of the host pool, and on to the device, as one transfer."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..schedule import arriving
from ..schedule.movement import Movement
from ..schedule.scheduler import LayerwiseScheduler, check_scheduler
from ..schedule.transfer import Transfer
from ..tracking.group import change, change_soon
from ..values import check_choice
from .job import Job
from .protocol import Outcome
from .tier import Tier


def load(
    tier: Tier,
    scheduler: LayerwiseScheduler,
    keys: Sequence[bytes],
    host_block_ids: Any,
    device_block_ids: Any,
    *,
    timeout_s: float = 30.0,
    urgent: bool | None = None,
) -> tuple[Transfer, Job]:
    """Reads blocks from the tier into the host pool, and loads each layer to the device as soon as it is there.

    ``wait_layer`` means what it means for every load. If a block is missing, damaged or late, the transfer fails, and
    ``job.outcomes`` says how it went with each block: those that are ``DONE`` are good on both sides when the transfer
    is over, the others hold no usable data on either. It is over only when the tier touches the host blocks no more.

    Args:
        tier: over the pool of the scheduler.
        scheduler: of the device.
        keys: one for each block.
        host_block_ids: as many, each once, that nobody uses: of ``pool.allocate``.
        device_block_ids: as many targets, each once.
        timeout_s: for the reading.
        urgent: as for ``scheduler.onload``.

    Raises:
        LeasedError: a host block is in use.
        As ``scheduler.onload`` and :class:`Job`.

    Example:
        >>> import tempfile
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.tiers import FilesEngine, Job, Tier, load
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 4, layout="block_first")
        >>> folder = tempfile.TemporaryDirectory()
        >>> engine = FilesEngine({folder.name: 1 << 20})
        >>> with LayerwiseScheduler(cache, pool) as scheduler, engine, Tier(engine, pool, model=b"m") as tier:
        ...     pool.view("key", 1, 0)[...] = 2.5
        ...     tier.store([Job([b"hash"], [0])])
        ...     tier.drain(timeout_s=10)
        ...     transfer, job = load(tier, scheduler, [b"hash"], [3], [4])
        ...     for layer in range(2):
        ...         transfer.wait_layer(layer, timeout_s=10)  # then compute with the layer
        ...     transfer.wait(timeout_s=10)
        >>> cache.tensor("key", 1)[4].numpy().max()
        np.float32(2.5)
    """
    check_scheduler(scheduler)
    check_choice(urgent, "urgent")
    if not isinstance(tier, Tier):
        raise TypeError(f"tier is {type(tier).__name__}; a Tier is expected")
    if scheduler.host_pool is not tier.pool:
        raise ValueError("the scheduler and the tier have different host pools")
    plan = scheduler.plan("onload", device_block_ids, host_block_ids)
    arrival = Arrival()
    job = Job(keys, plan.host_ids, timeout_s=timeout_s, observer=arrival)
    section = functools.partial(arriving.start, scheduler, plan, scheduler.compute_stream(None), urgent, job)
    # Both or none, whatever a signal handler raises.
    begin = functools.partial(_start, tier, scheduler, section, job, arrival)
    transfer: Transfer = scheduler.group.host.call(begin)
    return transfer, job


def _start(
    tier: Tier, scheduler: LayerwiseScheduler, section: Callable[[], Transfer], job: Job, arrival: Arrival
) -> Transfer:
    transfer: Transfer = change(scheduler, section)
    arrival.movement = transfer._movement
    read(tier, arrival.movement, job)
    return transfer


def read(tier: Tier, movement: Movement, job: Job) -> None:
    """What a load that was just started waits for, whose arrival the job tells. Not in a section."""
    try:
        tier.load([job])
    except BaseException as error:
        # Nothing was read, or what is read will be reported.
        change(movement, functools.partial(arriving.fail, movement, f"the tier could not be asked: {error}"))
        if not job.started_s:
            change(movement, functools.partial(arriving.end, movement))
        raise


class Arrival:
    """Tells the scheduler, out of threads of the tier."""

    movement: Movement

    def layers_arrived(self, job: Job, layers: range) -> None:
        change_soon(self.movement, functools.partial(arriving.mark, self.movement, layers))

    def settled(self, job: Job) -> None:
        if not job.done:
            ends = zip(job.block_ids, job.outcomes, strict=True)
            lost = [block_id for block_id, outcome in ends if outcome is not Outcome.DONE]
            counts = Counter(outcome.value for outcome in job.outcomes if outcome not in (None, Outcome.DONE))
            what = ", ".join(f"{count} {value}" for value, count in counts.items())
            message = f"{counts.total()} of {len(job.keys)} blocks did not come from the tier: {what}"
            change_soon(self.movement, functools.partial(arriving.lose, self.movement, lost, message))

    def over(self, job: Job) -> None:
        change_soon(self.movement, functools.partial(arriving.end, self.movement))
