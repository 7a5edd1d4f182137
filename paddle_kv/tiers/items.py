"""One object of a job, as an engine sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from .checksum import checksums
from .job import Job
from .object_format import ALIGN_BYTES, ObjectFormat
from .protocol import Outcome

STAGE_GROWTH = 3  # of the layers before
MOST_STAGE_PARTS = 3  # a stage is at most this part of the layers: what computes meanwhile waits for whole stages
MOST_STAGE_BYTES = 1 << 20  # and no longer, since that is long enough


class Owner(Protocol):
    """The tier, as its items see it."""

    format: ObjectFormat
    aligned: bool

    def payload(self, block_id: int) -> memoryview:
        """The bytes of a block."""

    def items_ended(self, job: Job, ends: Sequence[tuple[Item, Outcome]]) -> None:
        """Nothing touches the blocks of these items of a job any more."""


class Item:
    """What storing and loading share. ``ended`` counts once, whatever the engine calls."""

    __slots__ = (
        "_ending",
        "_job",
        "_lent",
        "_open",
        "_payload",
        "_tier",
        "aligned",
        "block_id",
        "deadline",
        "header",
        "key",
        "name",
        "position",
        "size_bytes",
    )

    def __init__(self, tier: Owner, job: Job, position: int, header: memoryview) -> None:
        self.key = job.keys[position]
        self.name = tier.format.name_of(self.key)
        self.size_bytes = tier.format.object_bytes
        self.deadline = job.deadline
        self.aligned = tier.aligned
        self.header = header
        self._tier = tier
        self._job = job
        self.position = position
        self.block_id = job.block_ids[position]
        self._payload = tier.payload(self.block_id)
        self._open = True
        self._lent = False  # whether the engine has the addresses
        self._ending = threading.Lock()

    @property
    def _unwanted(self) -> bool:
        return self._job.cancelled or self.deadline.over

    def _lend(self) -> bool:
        """Whether the engine may have the addresses."""
        with self._ending:
            self._lent = self._open and not self._unwanted
            return self._lent

    def give_up(self) -> None:
        """The engine has raised: fails unless it has the addresses, and then it is for the engine to end that."""
        if self._close(unless_lent=True):
            self._tier.items_ended(self._job, [(self, self.checked(Outcome.FAILED))])

    def ended(self, outcome: Outcome) -> None:
        self.ended_together([(self, outcome)])

    @staticmethod
    def ended_together(ends: Sequence[tuple[Item, Outcome]]) -> None:
        """``ended`` of each."""
        by_job: dict[Job, list[tuple[Item, Outcome]]] = {}
        for item, outcome in ends:
            if item._close():
                by_job.setdefault(item._job, []).append((item, item.checked(outcome)))
        for job, found in by_job.items():
            found[0][0]._tier.items_ended(job, found)

    def _close(self, *, unless_lent: bool = False) -> bool:
        """Whether it was open until now."""
        with self._ending:
            was_open = self._open and not (unless_lent and self._lent)
            self._open = self._open and not was_open
            return was_open

    def checked(self, outcome: Outcome) -> Outcome:
        """What the engine says, and what is known here."""
        if self._unwanted and outcome is not Outcome.DONE:
            return Outcome.DROPPED if self._job.cancelled else Outcome.LATE
        return outcome


class WriteItem(Item):
    """See :class:`~paddle_kv.tiers.protocol.Write`."""

    __slots__ = ()

    def buffers(self) -> list[memoryview] | None:
        return self.buffers_together([self])[0]

    @staticmethod
    def buffers_together(items: Sequence[WriteItem]) -> list[list[memoryview] | None]:
        """``buffers`` of each: their headers, with the checksums, are made by one call for each tier."""
        found: list[list[memoryview] | None] = []
        objects: dict[ObjectFormat, list[tuple[memoryview, bytes, memoryview]]] = {}
        for item in items:
            if item._lend():
                objects.setdefault(item._tier.format, []).append((item.header, item.key, item._payload))
                found.append([item.header, item._payload])
            else:
                found.append(None)
        for form, some in objects.items():
            form.write_headers(some)
        return found


class ReadItem(Item):
    """See :class:`~paddle_kv.tiers.protocol.Read`."""

    __slots__ = ("_num_arrived", "_stages", "_sums", "_wrong", "num_stages")

    def __init__(self, tier: Owner, job: Job, position: int, header: memoryview, stages: Sequence[range]) -> None:
        super().__init__(tier, job, position, header)
        self.num_stages = len(stages)
        self._stages = stages
        self._num_arrived = 0
        self._sums = b""
        self._wrong: Outcome | None = None

    def stage_bytes(self, stage: int) -> int:
        return len(self._stages[stage]) * self._tier.format.layer_bytes + (0 if stage else len(self.header))

    def buffers(self, stage: int) -> tuple[int, list[memoryview]] | None:
        if not self._lend():
            return None
        part = self._part(stage)
        at = self._stages[stage].start * self._tier.format.layer_bytes
        return (0, [self.header, part]) if stage == 0 else (len(self.header) + at, [part])

    def _part(self, stage: int) -> memoryview:
        """Of the block."""
        layers, step = self._stages[stage], self._tier.format.layer_bytes
        return self._payload[layers.start * step : layers.stop * step]

    def arrived(self, stage: int) -> bool:
        return self.arrived_together([(self, stage)])[0]

    @staticmethod
    def arrived_together(reads: Sequence[tuple[ReadItem, int]]) -> list[bool]:
        """``arrived`` of each: their checksums are made by one call."""
        accepted = [item._accepts(stage) for item, stage in reads]
        asked = [
            (item._part(stage), item._tier.format.piece_bytes)
            for (item, stage), taken in zip(reads, accepted, strict=True)
            if taken
        ]
        sums = iter(checksums(asked))
        return [
            taken and item._compare(stage, next(sums)) for (item, stage), taken in zip(reads, accepted, strict=True)
        ]

    def _accepts(self, stage: int) -> bool:
        """Whether it is the next one. Not for an engine that says it twice, or too late."""
        with self._ending:
            if not self._open or stage != self._num_arrived or self._wrong is not None:
                return False
            self._num_arrived += 1
            return True

    def _compare(self, stage: int, found: bytes) -> bool:
        form = self._tier.format
        if stage == 0:
            sums = form.read_header(self.header, self.key)
            if isinstance(sums, Outcome):
                self._wrong = sums
                return False
            self._sums = sums
        if found != form.sums_of(self._stages[stage], self._sums):
            self._wrong = Outcome.DAMAGED
            return False
        self._job.stage_arrived(stage, self._stages)
        return not self._unwanted

    def checked(self, outcome: Outcome) -> Outcome:
        if self._wrong is not None:
            return self._wrong
        if outcome is Outcome.DONE and self._num_arrived < self.num_stages:
            outcome = Outcome.FAILED  # nothing is there that was not looked at
        return super().checked(outcome)


def stages_of(form: ObjectFormat, least_bytes: int, *, layerwise: bool, aligned: bool) -> list[range]:
    """Ranges of layers that are read at once: they grow, so that the first one is there early and few are needed. Each
    begins with a piece, and with ``aligned`` at a multiple of 4 KiB; all but the first have ``least_bytes``."""
    num_layers, size, step = form.num_layers, form.layer_bytes, form.piece_layers
    most = min(-(-num_layers // MOST_STAGE_PARTS), max(1, MOST_STAGE_BYTES // size))
    least = -(-least_bytes // size)
    stages: list[range] = []
    first = 0
    while first < num_layers:
        count = max(least, min(STAGE_GROWTH * first, most)) if first else 1
        stop = first + -(-count // step) * step
        while aligned and stop < num_layers and stop * size % ALIGN_BYTES:
            stop += step
        rest = num_layers - stop
        if not layerwise or rest < least or 2 * rest < count:  # no short one at the end: each costs a round of calls
            stop = num_layers
        stages.append(range(first, stop))
        first = stop
    return stages
