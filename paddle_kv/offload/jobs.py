"""What a directory and its movers say to each other: plain, picklable, each with the version of its form."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from ..block_keys import BlockKey as BlockKey
from ..block_keys import Namespace as Namespace
from .slot_constructor import slot_constructor

FORMAT_VERSION = 1

Kind = Literal["load", "save"]
HOST = "host"  # the tier of the pools; what lies below it has names of its own


@dataclass(frozen=True, slots=True)
class Hello:
    """A mover says that it is there, with nothing in its pool.

    Attributes:
        epoch: a number of this life of the rank: another one means that what was there before is gone.
        capacity_blocks: host blocks that it has.
    """

    rank: int
    epoch: int
    capacity_blocks: int
    spec: bytes = b""
    version: int = FORMAT_VERSION


@slot_constructor
@dataclass(frozen=True, slots=True)
class Job:
    """Blocks that all ranks move, each its own part. ``keys[i]`` lies in host block ``host_slots[i]`` and in device
    block ``device_ids[i]``.

    The device blocks, of a save too, stay the job's own until an outcome of it without ``late`` has come: nobody else
    may get them before, even if the request that they belong to is over.

    Attributes:
        kind: the string "load" (host to device) or "save" (device to host).
        epochs: of the ranks at the time of planning, by rank; a rank of another one refuses.
        timeout_s: from its submission on; a mover cancels what is not over then. None: no bound.
        layerwise: a save whose layers will be marked one by one.
        tier: where a load comes from if not from host memory: it fills the host blocks too.
    """

    id: int
    kind: Kind
    space: Namespace
    keys: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    device_ids: tuple[int, ...]
    epochs: tuple[int, ...]
    timeout_s: float | None = None
    layerwise: bool = False
    tier: str | None = None
    version: int = FORMAT_VERSION

    @property
    def fills_host(self) -> bool:
        """Whether it brings the blocks to host memory."""
        return self.kind == "save" or self.tier is not None


@slot_constructor
@dataclass(frozen=True, slots=True)
class Result:
    """How a job ended on one rank; nothing of it touches memory there any more.

    Attributes:
        failed: positions in the job that were not moved; empty: all were.
        damaged: positions of a load whose bytes are not, or no longer, where the directory believes them.
        reason: why, for people.
    """

    job_id: int
    rank: int
    epoch: int
    failed: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    reason: str = ""
    version: int = FORMAT_VERSION


@slot_constructor
@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job on all ranks together.

    Attributes:
        job_id: of the :class:`Job`, as ``keys`` and ``device_ids``.
        kind: the string "load" or "save", as that of the :class:`Job`.
        failed: positions that are to be computed (of a load), or that are not kept (of a save); empty: all is well. The
            device blocks of these positions of a load hold no usable data: see
            :meth:`DeviceCache.mark_rewritten <paddle_kv.DeviceCache.mark_rewritten>`, to be called on each rank.
        late: ranks that may still move bytes of it: its device blocks (of a save, too) must not be given to anybody
            else. Another outcome of the job, without them, comes when they are done.
        reason: why it failed, for people.
    """

    job_id: int
    kind: Kind
    keys: tuple[bytes, ...]
    device_ids: tuple[int, ...]
    failed: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    reason: str = ""


@slot_constructor
@dataclass(frozen=True, slots=True)
class SavePlan:
    """What :meth:`Directory.plan_save` gives.

    Attributes:
        job: to be sent to all ranks; None: there is nothing to move.
        left_out: positions in the call's ``keys`` that are not kept, for want of room or of uses.
    """

    job: Job | None
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """A change of what is present: ``stored``, ``removed``, or ``cleared`` (all of the tier). ``number`` counts them
    without gaps."""

    number: int
    kind: Literal["stored", "removed", "cleared"]
    tier: str
    keys: tuple[bytes, ...] = ()
    version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is present, by tier, behind the event ``number``."""

    number: int
    blocks: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    version: int = FORMAT_VERSION


def new_life() -> int:
    """A number that belongs to one life of a rank or a directory, and to no other."""
    return int.from_bytes(os.urandom(7), "little")


def check_version(one: Any, kind: type[Any]) -> None:
    """TypeError unless it is such a message, ValueError unless it has the form of this release."""
    if not isinstance(one, kind):
        name = kind.__name__
        raise TypeError(f"{name.lower()} is {type(one).__name__}, no message that can stand here; {name} is expected")
    if type(one.version) is not int or one.version != FORMAT_VERSION:
        raise ValueError(f"{type(one).__name__} has version {one.version}; {FORMAT_VERSION} is expected")
