"""Each protection is left out in turn, by a switch in the backend: the checks must notice each time.

``MUTATIONS`` is the table of docs/simulator.md: clause of the ordering contract, what is removed, the scenario in which
that must be noticed, and how it must be noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_kv.testing.simulator import REMOVALS, OrderingError, explore

from .gate_scenarios import GATE_SCENARIOS
from .ring_scenarios import RING_SCENARIOS
from .scenarios import SCENARIOS, play

SCENARIOS.update(GATE_SCENARIOS)
SCENARIOS.update(RING_SCENARIOS)

RACE = "without an edge between them"

MUTATIONS = [
    (1, "wait-compute-before-offload", "offload_after_compute", RACE),
    (1, "wait-compute-before-offload", "layerwise_offload_after_marks", RACE),
    (1, "wait-compute-before-offload", "layerwise_offload_with_layers_sharing_an_event", RACE),
    (1, "record-compute", "offload_after_compute", RACE),
    (1, "record-compute", "layerwise_offload_after_marks", RACE),
    (1, "wait-compute-before-offload", "ring_is_written_behind_its_save", "read after write"),
    (2, "wait-compute-before-onload", "onload_after_readers", RACE),
    (2, "record-compute", "onload_after_readers", RACE),
    (2, "wait-compute-before-onload", "ring_is_loaded_behind_its_readers", "write after read"),
    (2, "record-compute", "ring_is_loaded_behind_its_readers", "write after read"),
    (3, "wait-layer", "wait_layer_before_attention", RACE),
    (3, "wait-layer", "wait_layer_on_another_stream", RACE),
    (3, "record-layer", "wait_layer_before_attention", RACE),
    (3, "record-before-copy", "wait_layer_before_attention", RACE),
    (3, "wait-layer", "ring_is_loaded_behind_its_readers", "read after write"),
    (3, "record-layer", "ring_is_loaded_behind_its_readers", "read after write"),
    (4, "wait-offload-before-onload", "onload_of_a_block_being_saved", "write after write|read after write"),
    (4, "wait-offload-before-onload", "onload_of_a_block_whose_save_is_not_marked", "read after write"),
    (4, "wait-offload-before-onload", "onload_over_a_block_being_saved", "write after read"),
    (4, "wait-onload-before-offload", "offload_of_a_block_being_loaded", "read after write"),
    (4, "wait-onload-before-offload", "offload_over_a_block_being_loaded", "write after read"),
    (4, "wait-offload-before-offload", "two_schedulers_save_to_one_block", "write after write"),
    (4, "wait-onload-before-onload", "two_schedulers_load_to_one_block", "write after write"),
    (4, "wait-offload-before-offload", "order_behind_the_writer_before_a_cancelled_one", "write after write"),
    (4, "wait-onload-before-offload", "order_behind_the_reader_before_a_cancelled_one", "write after read"),
    (4, "record-before-copy", "onload_over_a_block_being_saved", "write after read"),
    (4, "wait-offload-before-onload", "ring_is_loaded_behind_the_save_of_its_pass", "write after read"),
    (4, "wait-offload-before-onload", "ring_is_loaded_behind_the_save_of_the_last_pass", "write after read"),
    (4, "wait-offload-before-onload", "ring_is_loaded_behind_a_save_that_is_marked_from_its_end", "write after read"),
    (4, "wait-onload-before-onload", "ring_is_loaded_by_two_schedulers", "write after write"),
    (5, "wait-layer", "compute_overwrites_a_saved_block_behind_wait_on", "write after read"),
    (5, "wait-layer", "compute_overwrites_a_saved_block_behind_wait_layer", "write after read"),
    (5, "wait-layer", "compute_overwrites_a_block_that_another_save_brings", "write after read"),
    (5, "completion", "compute_overwrites_a_saved_block_behind_wait", RACE),
    (5, "completion", "compute_overwrites_a_saved_block_behind_done", "write after read"),
    (5, "wait-layer", "ring_is_written_behind_its_save", "write after read"),
    (6, "completion", "freed_host_block_stays_in_quarantine", "write after read"),
    (6, "completion", "freed_block_of_a_cancelled_save_stays_in_quarantine", "write after write"),
    (6, "completion", "pools_outlive_their_transfers", "memory of .* given back"),
    (6, "completion", "host_reads_under_a_lease", "read after write"),
    (6, "completion", "host_writes_under_a_lease", "write after read"),
    (6, "record-layer", "freed_host_block_stays_in_quarantine", "write after read"),
    (7, "copy-error", "copy_that_breaks", "holds .*poison"),
    (7, "copy-error", "reader_of_a_copy_that_breaks", "saw .*poison"),
    (7, "submission-error", "submission_that_breaks", "holds .*poison"),
    (7, "record-fence", "block_of_a_broken_submission_is_overwritten", "write after read"),
    (7, "record-fence", "freed_block_of_a_broken_submission_stays_in_quarantine", "write after write"),
    (7, "record-fence", "another_scheduler_behind_a_broken_submission", "write after read"),
    (7, "record-fence", "ring_is_loaded_behind_a_save_that_breaks", "write after read"),
    (7, "wait-layer", "compute_behind_a_broken_submission", "write after write"),
    (7, "cancel-told", "cancel_of_what_is_submitted", "holds|saw"),
    (8, "watch-report", "each_transfer_ends", "does not end"),
    (8, "completion-report", "each_transfer_ends", "does not end"),
    (9, "capture-check", "calls_on_a_captured_stream_are_refused", "was not refused"),
    (9, "wait-layer", "calls_on_a_captured_stream_are_refused", "read after write"),
    (9, "gate-wait", "replay_waits_for_its_load", "read after write"),
    (9, "gate-arm", "replay_waits_for_its_load", "read after write"),
    (9, "gate-arm", "replay_marks_the_layers_of_its_saves", "never ends"),
    (9, "gate-turn", "replays_in_flight_wait_each_for_its_load", "read after write"),
    (9, "let-through", "replay_waits_for_its_load", "never ends"),
    (9, "let-through-wait", "replay_waits_for_its_load", "read after write"),
    (9, "let-through-wait", "replay_is_launched_before_its_load_is_submitted", "read after write"),
    (9, "gate-mark", "replay_marks_the_layers_of_its_saves", "never ends"),
    (9, "gate-mark-wait", "replay_marks_the_layers_of_its_saves", "read after write|write after read"),
    (9, "pass-marks", "gates_open_when_the_scheduler_is_closed", "never ends"),
    (9, "given-up", "gate_that_gives_up_fails_its_load", "was not refused"),
    (10, "give-back-events", "nothing_is_left_after_close", "not given back"),
    (10, "give-back-streams", "nothing_is_left_after_close", "not given back"),
    (10, "give-back-binding", "nothing_is_left_after_close", "not given back"),
    (10, "completion", "nothing_is_left_after_close", RACE),
]


@pytest.mark.parametrize(
    ("clause", "removal", "scenario", "found"), MUTATIONS, ids=[f"{clause}-{r}-{s}" for clause, r, s, _ in MUTATIONS]
)
def test_removal_is_noticed(clause: int, removal: str, scenario: str, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        play(scenario, drop=[removal])


def test_table_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    for clause, removal, scenario, _ in MUTATIONS:
        assert f"| {clause} | `{removal}` | `{scenario}` |" in text
    for name, meaning in REMOVALS.items():
        assert f"| `{name}` | {meaning} |" in text


def test_table_is_complete() -> None:
    assert {removal for _, removal, _, _ in MUTATIONS} == set(REMOVALS)
    assert {clause for clause, *_ in MUTATIONS} == set(range(1, 11))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_holds_when_the_device_is_late(scenario: str) -> None:
    play(scenario)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_holds_in_every_order(scenario: str) -> None:
    result = explore(lambda chooser: play(scenario, chooser), max_runs=400)
    assert result.complete


def test_removal_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no-such"):
        play("offload_after_compute", drop=["no-such"])


def test_finding_names_both_call_sites() -> None:
    with pytest.raises(OrderingError) as caught:
        play("onload_after_readers", drop=["wait-compute-before-onload"])
    text = str(caught.value)
    assert text.count("scenarios.py:") >= 2 and "submission.py:" in text and "onload < scenarios.py:" in text
    assert "layer 0" in text
