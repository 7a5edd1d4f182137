"""What a ring of layer buffers relies on, left out in the scheduler: the simulator notices each time, in a small
program. The table is in docs/simulator.md; what the backend can leave out is in ``test_mutations.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddle_kv import Transfer
from paddle_kv.integrations import ForwardPass
from paddle_kv.schedule import rings
from paddle_kv.schedule.movement import Movement

from .ring_scenarios import RING_SCENARIOS
from .scenarios import SCENARIOS, play
from .test_mutations import RACE

SCENARIOS.update(RING_SCENARIOS)


def _marks_of_saves_alone(self: Movement, group: int) -> bool:
    return group in self.unread or (self.layerwise and self.marks[group] is None)


def _same_layer(movement: Movement, before: Movement, layer: int) -> list[Any]:
    return [before.events[layer]]


def _last_layer(movement: Movement, before: Movement, layer: int) -> list[Any]:
    in_buffer = range(layer % before.ring, before.plan.num_layers, before.ring)
    return [before.events[in_buffer[-1]]]


def _without_fences(movement: Movement, layer: int) -> list[Any] | None:
    if layer < movement.ring:
        return []
    found = [save.events[layer - movement.ring] for save in movement.savers]
    if any(event is None and not save.failed for event, save in zip(found, movement.savers, strict=True)):
        return None
    return [event for event, save in zip(found, movement.savers, strict=True) if event is not None and not save.over]


def _also_of_those_that_are_over(movement: Movement, layer: int) -> list[Any] | None:
    return [save.events[layer - movement.ring] for save in movement.savers] if layer >= movement.ring else []


REMOVALS: dict[str, tuple[Any, str, Callable[..., Any], str, str]] = {
    "without_marks_of_what_was_read": (
        Movement, "is_held_back", _marks_of_saves_alone, "ring_is_loaded_behind_its_readers", "read after write",
    ),
    "without_saves_of_the_pass": (
        rings, "note_savers", lambda movement: None, "ring_is_loaded_behind_the_save_of_its_pass", "write after read",
    ),
    "without_what_still_runs_of_a_save": (
        rings, "saved_before", _without_fences, "ring_is_loaded_behind_a_save_that_breaks", "write after read",
    ),
    "without_an_end_of_saves": (
        rings, "saved_before", _also_of_those_that_are_over, "ring_is_loaded_behind_a_save_that_was_cancelled",
        "for an event that is not recorded",
    ),
    "without_other_layers_of_saves": (
        rings, "events_in_buffer", _same_layer, "ring_is_loaded_behind_the_save_of_the_last_pass", "write after read",
    ),
    "without_other_layers_of_loads": (
        rings, "events_in_buffer", _same_layer, "ring_is_loaded_by_two_schedulers", "write after write",
    ),
    "without_all_layers_of_a_buffer": (
        rings, "events_in_buffer", _last_layer, "ring_is_loaded_behind_a_save_that_is_marked_from_its_end",
        "write after read",
    ),
    "without_telling_who_shares_buffers": (
        rings, "shares_buffers", lambda movement, before: False, "ring_is_loaded_behind_the_save_of_the_last_pass",
        "write after read",
    ),
    "without_the_order_of_own_layers": (
        rings, "is_behind_own", lambda *_: True, "ring_is_marked_as_read_out_of_order", "saw prefix 2",
    ),
    "without_waits_for_buffers": (
        ForwardPass, "_wait_for_buffer", lambda *_: None, "ring_is_written_behind_its_save", "write after read",
    ),
    "without_the_wait_between_passes": (
        Transfer, "wait_on", lambda self: None, "ring_is_written_behind_the_save_of_the_last_pass", "write after read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REMOVALS)
def test_what_is_left_out_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, instead, scenario, found = REMOVALS[name]
    play(scenario)
    monkeypatch.setattr(where, what, instead)
    with pytest.raises(AssertionError, match=found) as caught:
        play(scenario)
    assert RACE in str(caught.value) or " after " not in found


def test_table_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    for name, (*_, scenario, _) in REMOVALS.items():
        assert f"| `{name}` | " in text and f" | `{scenario}` |" in text
