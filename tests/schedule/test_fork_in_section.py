"""A fork while another thread changes state: the child finds it changed as a whole, and no lock held."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import Any

import pytest

from paddle_kv.tracking import group as group_module
from paddle_kv.tracking.group import MemoryGroup, change
from tests.schedule.rig import WAIT_S, Rig


def child_status(rig: Rig, state: list[int], forked: threading.Event) -> int:
    """0 if the child finds both halves and can change state itself."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        whole = state[0] == state[1] and change(rig.pool.domain, lambda: True)
        os._exit(0 if whole else 1)
    forked.set()
    return os.waitpid(pid, 0)[1]


def fork_beside_a_section(rig: Rig, forked_by_main: bool, held_up_s: float) -> int:
    state, inside, forked, found = [0, 0], threading.Event(), threading.Event(), []

    def section() -> None:
        state[0] = 1
        inside.set()
        forked.wait(held_up_s)
        state[1] = 1

    def fork() -> None:
        assert inside.wait(WAIT_S)
        found.append(child_status(rig, state, forked))

    tasks = (lambda: change(rig.pool.domain, section), fork)
    other, main = tasks if forked_by_main else tasks[::-1]
    thread = threading.Thread(target=other)
    thread.start()
    main()
    thread.join(WAIT_S)
    return found[0]


@pytest.mark.parametrize("forked_by_main", [True, False])
@pytest.mark.parametrize("locked", [True, False])
def test_fork_beside_a_section(forked_by_main: bool, locked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    if not locked:  # as if the fork took no lock: that is noticed
        monkeypatch.setattr(group_module, "_groups", weakref.WeakSet())
    # A fork that waits for the section comes behind it; one that does not wait comes before its end, however late.
    held_up_s = 0.1 if locked else WAIT_S
    assert (fork_beside_a_section(rig, forked_by_main, held_up_s) == 0) == locked


class Pausing:
    """A host that notes where it lets other threads come first, and whether they could."""

    def __init__(self, group: MemoryGroup) -> None:
        self._group, self._host = group, group.host
        self.held: list[bool] = []

    def pause(self) -> None:
        self.held.append(self._group.lock._is_owned())  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


def test_others_may_come_first_before_a_fork_holds_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    group = rig.pool.domain.group
    host: Any = Pausing(group)
    monkeypatch.setattr(group, "host", host)
    assert child_status(rig, [0, 0], threading.Event()) == 0
    assert host.held and not any(host.held)
