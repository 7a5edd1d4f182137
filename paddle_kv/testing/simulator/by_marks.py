"""What the library's queue does for layerwise saves, by calls of a backend: see ``submit_by_marks`` of the protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...backend.protocol import Backend
from ...backend.work import Event, LayerWork, Stream


@dataclass(eq=False)
class _Save:
    """``marked``: layers that are, or are about to be; ``recorded``: those that are."""

    binding: Any
    work: LayerWork
    starts: Sequence[Event]
    stream: Stream
    marked: set[int] = field(default_factory=set)
    recorded: set[int] = field(default_factory=set)
    enqueued: list[int] = field(default_factory=list)
    is_ended: bool = False


class MarksAtBackend:
    """For a backend that is around another one, ``inner``: its ``record`` and ``copy_layers`` do the work.

    Attributes:
        undivided: makes contexts in which no other thread of the simulated host comes first. As ``inner`` has it.
        takes_marks: whether it takes such saves. The same.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self._saves: dict[int, _Save] = {}
        self._lock = threading.RLock()

    @property
    def undivided(self) -> Any:
        return getattr(self.inner, "undivided", contextlib.nullcontext)

    @property
    def takes_marks(self) -> bool:
        return bool(getattr(self.inner, "takes_marks", True))

    def submit_by_marks(self, binding: Any, work: LayerWork, starts: Sequence[Event], stream: Stream) -> bool:
        if self.takes_marks:
            self._saves[work.number] = _Save(binding, work, starts, stream)
        return self.takes_marks

    def mark_layer(self, number: int, layer: int, stream: Stream) -> bool | None:
        save = self._saves.get(number)
        if save is None or save.is_ended:
            return False
        plan, work = save.work.plan, save.work
        if layer in save.marked:
            return True
        save.marked.add(layer)
        group = plan.group_of(layer)
        layers = plan.layers_of(group)
        try:
            self.record(work.waits[group][layer - layers.start], stream)  # type: ignore[attr-defined]
        except BaseException:
            save.marked.remove(layer)
            raise
        with self._lock, self.undivided():
            save.recorded.add(layer)
            if save.is_ended or not save.recorded.issuperset(layers):
                return True
            part = dataclasses.replace(
                work,
                first_group=group,
                end_group=group + 1,
                waits=[work.waits[group]],
                start=save.starts[group],
                records=[work.records[group]],
            )
            try:
                self.copy_layers(save.binding, part, save.stream)  # type: ignore[attr-defined]
            except Exception:  # noqa: BLE001  a section tries again
                save.is_ended = True
                return None
            save.enqueued.append(group)
        return True

    def take_enqueued(self, number: int, known: int, num_groups: int, ends: bool) -> list[int]:
        with self._lock:
            save = self._saves.get(number)
            if save is None:
                return []
            if ends or len(save.enqueued) == num_groups:
                save.is_ended = True
                del self._saves[number]
            return save.enqueued[known:]
