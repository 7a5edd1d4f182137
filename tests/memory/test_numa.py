from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from paddle_kv.memory import numa

PAGES = 37


def allocated(size_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory that has been touched, and its address."""
    memory = mmap.mmap(-1, size_bytes)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return memory, array.ctypes.data


def test_pages_are_where_they_were_asked_for() -> None:
    with numa.prefer_node(0) as applied:
        _memory, address = allocated(4096 * PAGES)
    found = numa.pages_by_node(address, 4096 * PAGES)
    if not applied or not found:
        pytest.skip("the system does not let a process choose its node")
    assert found == {0: PAGES}


def test_the_policy_before_is_back_also_after_an_exception() -> None:
    before = numa._policy()
    if before is None:
        pytest.skip("the system does not tell the memory policy")
    with pytest.raises(KeyError), numa.prefer_node(0) as applied:
        inside = numa._policy()
        raise KeyError
    after = numa._policy()
    assert inside is not None and after is not None
    assert (inside[0] == numa._PREFERRED) == applied
    assert (after[0], list(after[1])) == (before[0], list(before[1]))


def test_where_nothing_is_known_nothing_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = numa._policy()
    with numa.prefer_node(None) as applied:
        inside = numa._policy()
    assert not applied
    assert (inside and inside[0]) == (before and before[0])
    monkeypatch.setattr(numa, "_SYSCALLS", {})
    with numa.prefer_node(0) as applied:
        assert not applied
    assert numa.pages_by_node(4096, 4096) == {}
    with numa.near_gpu(12345) as applied:
        assert not applied


def test_a_node_that_does_not_exist_changes_nothing() -> None:
    with numa.prefer_node(1000) as applied:
        assert not applied


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_device_is_what_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, node: int | None
) -> None:
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path)
    if text is not None:
        (tmp_path / "0000:4f:00.0").mkdir()
        (tmp_path / "0000:4f:00.0" / "numa_node").write_text(text)
    assert numa.node_of_pci_device("0000:4F:00.0\0") == node
