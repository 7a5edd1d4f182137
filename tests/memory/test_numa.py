from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_device_is_what_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, node: int | None
) -> None:
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path)
    if text is not None:
        (tmp_path / "0000:4f:00.0").mkdir()
        (tmp_path / "0000:4f:00.0" / "numa_node").write_text(text)
    assert numa.node_of_pci_device("0000:4F:00.0\0") == node


class Kernel:
    """One that lets a process choose among its nodes: policy of the thread, and where pages lie."""

    def __init__(self) -> None:
        self.mode, self.mask, self.refuses = 3, [5] + [0] * 15, ""
        self.pages = {0x3000: 2, 0x4000: 0, 0x5000: -2, 0x6000: 2}  # -2: never touched

    def __call__(self, number: int, *arguments: Any) -> int:
        get, put, move = numa._SYSCALLS[platform.machine()]
        if self.refuses == {get: "get", put: "set", move: "move"}[number]:
            return -1
        if number == get:
            mode, mask, bits, address, flags = arguments
            assert (bits, address, flags) == (1024, None, 0)
            mode._obj.value, mask[:] = self.mode, self.mask
        elif number == put:
            mode, mask, bits = arguments
            assert bits == 1024
            self.mode, self.mask = mode, list(mask)
        else:
            process, count, pages, target, nodes, flags = arguments
            assert (process, target, flags) == (0, None, 0) and count == len(pages) == len(nodes)
            nodes[:] = [self.pages[page] for page in pages]
        return 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(numa, "_SYSCALLS", {platform.machine(): (1, 2, 3)})
    monkeypatch.setattr(numa, "_call", made)
    return made


@pytest.mark.parametrize(("node", "word", "bit"), [(0, 0, 0), (1, 0, 1), (63, 0, 63), (64, 1, 0), (1000, 15, 40)])
def test_a_node_is_preferred_inside_and_the_policy_before_is_back_behind(
    kernel: Kernel, node: int, word: int, bit: int
) -> None:
    with numa.prefer_node(node) as applied:
        assert applied
        assert kernel.mode == 1  # MPOL_PREFERRED
        assert kernel.mask == [1 << bit if at == word else 0 for at in range(16)]
    assert (kernel.mode, kernel.mask) == (3, [5] + [0] * 15)


@pytest.mark.parametrize("refuses", ["get", "set"])
def test_a_policy_that_cannot_be_put_back_is_not_changed(kernel: Kernel, refuses: str) -> None:
    kernel.refuses = refuses
    with numa.prefer_node(1) as applied:
        assert not applied
    with numa.prefer_node(None) as applied:
        assert not applied
    assert (kernel.mode, kernel.mask) == (3, [5] + [0] * 15)


def test_pages_are_counted_from_the_one_that_the_range_begins_in(kernel: Kernel) -> None:
    assert numa.pages_by_node(0x3FFF, 0x2002) == {2: 2, 0: 1}
    assert numa.pages_by_node(0x4000, 0x1000) == {0: 1}
    assert numa.pages_by_node(0x5000, 0x1000) == {}
    kernel.refuses = "move"
    assert numa.pages_by_node(0x4000, 0x1000) == {}


@pytest.mark.parametrize("text", [str, str.encode])
def test_the_node_of_a_gpu_is_that_of_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Callable[[str], Any]
) -> None:
    asked = []
    runtime = SimpleNamespace(deviceGetPCIBusId=lambda device: asked.append(device) or text("0000:4F:00.0"))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path)
    (tmp_path / "0000:4f:00.0").mkdir()
    (tmp_path / "0000:4f:00.0" / "numa_node").write_text("0\n")
    assert (numa.node_of_gpu(5), asked) == (0, [5])


def test_a_call_of_the_system_gives_its_result() -> None:
    number = {"x86_64": 39, "aarch64": 172}.get(platform.machine())
    if number is None:
        pytest.skip("no numbers for this machine")
    assert numa._call(number) == os.getpid()


@pytest.mark.parametrize(
    ("machine", "header"), [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")]
)
def test_the_numbers_of_the_calls_are_those_of_the_system(machine: str, header: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip("no headers of the kernel")
    numbers = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", path.read_text()))
    expected = tuple(int(numbers[name]) for name in ("get_mempolicy", "set_mempolicy", "move_pages"))
    assert numa._SYSCALLS[machine] == expected
