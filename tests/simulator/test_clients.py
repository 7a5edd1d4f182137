"""Threads of a server that share a manager and an adapter: random interleavings hold, and what is left out is found."""

from __future__ import annotations

import os
import re
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_kv.integrations import fastdeploy, layers
from paddle_kv.offload.books import Books
from paddle_kv.offload.index import BlockIndex
from paddle_kv.schedule.scheduler import LayerwiseScheduler
from paddle_kv.testing.simulator import OrderingError
from paddle_kv.testing.simulator.__main__ import main
from paddle_kv.testing.simulator.replay import play_clients
from paddle_kv.tracking import group as group_module

TRIES = 60  # runs until what was left out must have shown


# ---- what is left out is found ----
def without_users_of_given_blocks(patch: pytest.MonkeyPatch) -> None:
    """A save that moves nothing is over at once, whatever still reads its device blocks."""
    patch.setattr(Books, "users_of", lambda self, device_ids: [])


def without_hold_on_present_blocks(patch: pytest.MonkeyPatch) -> None:
    """A save may evict what it was given and has found present."""
    patch.setattr(BlockIndex, "_hold_present", lambda self, there, head: [])


def without_order_behind_evictions(patch: pytest.MonkeyPatch) -> None:
    """Work that follows ``evict_to_host_async`` does not wait for it; its result was the only order."""
    evict = fastdeploy.CacheTransferManager.evict_to_host_async

    def unordered(self: Any, *arguments: Any, order_compute: bool = True) -> Any:
        return evict(self, *arguments, order_compute=False)

    patch.setattr(fastdeploy.CacheTransferManager, "evict_to_host_async", unordered)


def without_events_of_threads(patch: pytest.MonkeyPatch) -> None:
    """All threads of the FastDeploy adapter have one event of the layer that is being submitted."""
    _of_all_threads(patch, fastdeploy.CacheTransferManager)


def without_passes_of_threads(patch: pytest.MonkeyPatch) -> None:
    """All threads have one pass through the hooked layers."""
    _of_all_threads(patch, layers.LayerHooks)


def _of_all_threads(patch: pytest.MonkeyPatch, kind: Any) -> None:
    init = kind.__init__

    def shared(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self._of_thread = types.SimpleNamespace()

    patch.setattr(kind, "__init__", shared)


def without_sections_of_the_adapter(patch: pytest.MonkeyPatch) -> None:
    """Threads change the adapter's list of transfers without a lock."""
    patch.setattr(fastdeploy, "change", lambda member, function: function())


def without_waiting_for_users_at_close(patch: pytest.MonkeyPatch) -> None:
    """Close does not wait for a ``record_event`` that was let in before."""
    patch.setattr(LayerwiseScheduler, "_is_unused", lambda self: True)


def without_lock_at_fork(patch: pytest.MonkeyPatch) -> None:
    """A fork takes no lock; the child replaces it."""
    groups, parent = group_module._groups, os.getpid()

    class Unlocked:
        def __iter__(self) -> Iterator[Any]:
            if os.getpid() == parent:
                return iter([])
            for group in groups:
                group.lock, group._inside = threading.RLock(), None
            return iter(groups)

        add = groups.add

    patch.setattr(group_module, "_groups", Unlocked())


# What is left out, with what it is searched for, from which seed on, and how it shows.
LEFT_OUT = [
    (without_users_of_given_blocks, {"prefer": ["evicted"]}, 0, "write after read"),
    (without_hold_on_present_blocks, {"prefer": ["save"]}, 0, "left out"),
    (without_order_behind_evictions, {}, 0, "write after read"),
    (without_events_of_threads, {"prefer": ["to_device"]}, 2, "read after write"),
    (without_passes_of_threads, {"prefer": ["pass"]}, 9, "running already|read after write|must hold"),
    (
        without_sections_of_the_adapter,
        {"prefer": ["to_host", "sync"], "lines": True, "faults": False},
        7,
        "read after write",
    ),
    (
        without_waiting_for_users_at_close,
        {"prefer": ["event", "renew"], "num_threads": 2, "num_steps": 120},
        6,
        "given back",
    ),
    (without_lock_at_fork, {"prefer": ["save"], "forks": 3}, 8, "forked child"),
]


def search(first: int, options: dict[str, Any]) -> tuple[int, str]:
    """The first seed that finds something, and what."""
    for seed in range(first, first + TRIES):
        try:
            play_clients(seed, **options)
        except OrderingError as error:
            return seed, str(error)
    raise AssertionError(f"{TRIES} runs went well")


@pytest.mark.parametrize(
    ("leave_out", "options", "first", "shown"), LEFT_OUT, ids=[left_out.__name__ for left_out, *_ in LEFT_OUT]
)
def test_what_is_left_out_is_found(
    leave_out: Any, options: dict[str, Any], first: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        leave_out(patch)
        seed, found = search(first, options)
    assert re.search(shown, found), found
    for held in range(first, seed + 1):
        play_clients(held, **options)


# ---- with all of it, it holds ----
@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("faults", [True, False])
def test_random_threads(first: int, faults: bool) -> None:
    moves = sum(play_clients(seed, faults=faults).moves for seed in range(first, first + 10))
    assert moves > 100


def test_random_threads_left_at_any_line() -> None:
    for seed in range(4):
        play_clients(seed, lines=True)


def test_random_threads_beside_forks() -> None:
    for seed in range(3):
        assert play_clients(seed, forks=2, num_threads=2).trace.count("fork") == 2


def test_a_run_repeats() -> None:
    one, two, other = (play_clients(seed) for seed in (5, 5, 6))
    assert one.trace == two.trace and one.simulation.device.history == two.simulation.device.history
    assert one.trace != other.trace


def test_failure_repeats_by_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without_passes_of_threads(monkeypatch)
    _, found = search(0, {"prefer": ["pass"]})
    command = found.splitlines()[-1]
    assert command.startswith("repeat: python -m paddle_kv.testing.simulator --seed")
    assert main(command.split()[4:]) == 1
    without_sites = [
        [line for line in text.splitlines() if " at " not in line] for text in (found, capsys.readouterr().out)
    ]
    assert without_sites[0] == without_sites[1]


def test_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--threads", "2", "--steps", "5", "--lines", "--forks", "1", "--no-faults", "--trace"]
    assert main(options) == 0
    told = capsys.readouterr().out
    assert "fork" in told.splitlines() and "no problem found" in told
    with pytest.raises(SystemExit):
        main(["--threads", "2", "--drop", "wait-layer"])


def test_a_call_that_fails_without_a_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was cancelled, closed or made to fail, no call may fail."""
    monkeypatch.setattr(Books, "evict", lambda self, num_blocks: self.cancel_all() or 0)
    _, found = search(0, {"faults": False, "prefer": ["evict"]})
    assert "nothing was cancelled" in found


def test_the_table_of_what_is_left_out_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    for leave_out, *_ in LEFT_OUT:
        assert sum(line.startswith(f"| `{leave_out.__name__}` |") for line in text.splitlines()) == 1
