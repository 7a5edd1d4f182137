"""What a directory and its movers say to each other: plain, picklable, each with the version of its form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FORMAT_VERSION = 1

Kind = Literal["load", "save"]
HOST = "host"  # the tier of the pools; what lies below it has names of its own


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the blocks of a directory are blocks of.

    Attributes:
        model: what :func:`~paddle_kv.offload.cache_salt` made: the model with its revision, adapters, ranks.
        spec: digest of the cache's spec (:func:`~paddle_kv.offload.spec_digest`); empty: movers do not compare it.
        group: of layers with one kind of cache. There is one now, 0.
    """

    model: bytes = b""
    spec: bytes = b""
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The full name of one rank's part of a block, for what outlives a process or is shared: files, stores.

    Example:
        >>> from paddle_kv.offload import BlockKey, Namespace
        >>> key = BlockKey(Namespace(b"model", b"spec", 0), 1, b"hash")
        >>> BlockKey.from_bytes(key.to_bytes()) == key
        True
    """

    space: Namespace
    rank: int
    hash: bytes

    def to_bytes(self) -> bytes:
        """Version, group, rank, then each of the three byte strings with its length in front; little-endian."""
        numbers = (FORMAT_VERSION, self.space.group, self.rank)
        strings = (self.space.model, self.space.spec, self.hash)
        return b"".join(
            [number.to_bytes(4, "little") for number in numbers]
            + [len(one).to_bytes(4, "little") + one for one in strings]
        )

    @classmethod
    def from_bytes(cls, text: bytes) -> BlockKey:
        """
        Raises:
            ValueError: another version, or not what :meth:`to_bytes` has made.
        """
        version, group, rank = (int.from_bytes(text[start : start + 4], "little") for start in (0, 4, 8))
        if version != FORMAT_VERSION:
            raise ValueError(f"the key has version {version}; {FORMAT_VERSION} is expected")
        strings, at = [], 12
        for _ in range(3):
            end = at + 4 + int.from_bytes(text[at : at + 4], "little")
            strings.append(text[at + 4 : end])
            at = end
        if at != len(text):
            raise ValueError(f"the key has {len(text)} bytes; its fields have {at}")
        return cls(Namespace(strings[0], strings[1], group), rank, strings[2])


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


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks that all ranks move, each its own part. ``keys[i]`` lies in host block ``host_slots[i]`` and in device
    block ``device_ids[i]``.

    Attributes:
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job on all ranks together.

    Attributes:
        failed: positions that are to be computed (of a load), or that are not kept (of a save); empty: all is well.
        late: ranks that may still move bytes of it: its device blocks must not be given to anybody else. Another
            outcome of the job, without them, comes when they are done.
    """

    job_id: int
    kind: Kind
    keys: tuple[bytes, ...]
    device_ids: tuple[int, ...]
    failed: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    reason: str = ""


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


def check_version(one: Hello | Job | Result | Event | Snapshot) -> None:
    """ValueError unless it has the form of this release."""
    if one.version != FORMAT_VERSION:
        raise ValueError(f"{type(one).__name__} has version {one.version}; {FORMAT_VERSION} is expected")
