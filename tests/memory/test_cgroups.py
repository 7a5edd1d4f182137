from __future__ import annotations

import io
from pathlib import Path

import pytest

from paddle_kv.memory import cgroups, host_memory

MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


class Machine:
    """Files as the kernel shows them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.membership = root / "membership"

    def member(self, *lines: str) -> None:
        self.membership.write_text("".join(f"{line}\n" for line in lines))

    def group(self, version: int, path: str, limit: object, used: int, files: int = 0) -> None:
        folder = self.root / "memory" / path if version == 1 else self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
        for name, value in zip(names, (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        own, prefix = files // 3, "total_" if version == 1 else ""
        stat = {"anon": 5, "file": 9 * files, "inactive_file": own, "active_file": files - own, "unevictable": 7}
        if version == 1:  # without the groups inside, which are not what the limit is compared with
            stat = {"inactive_file": 1, "active_file": 2} | {prefix + name: value for name, value in stat.items()}
        (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(cgroups, "_ROOT", made.root)
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", made.membership)
    return made


@pytest.mark.parametrize(("version", "line"), [(2, "0::/pod/box"), (1, "4:cpu,memory:/pod/box")])
@pytest.mark.parametrize(("inner", "outer"), [(500, 900), (900, 500)])
def test_the_least_of_all_groups_counts(machine: Machine, version: int, line: str, inner: int, outer: int) -> None:
    machine.member("7:cpuset:/elsewhere", line, "1:name=systemd:/pod/box")
    machine.group(version, "pod/box", inner * MIB, 100 * MIB)
    machine.group(version, "pod", outer * MIB, 100 * MIB)
    machine.group(version, "elsewhere", MIB, 0)
    assert cgroups.headroom_bytes() == 400 * MIB


@pytest.mark.parametrize(("version", "line"), [(2, "0::/dbus-:1.2@0"), (1, "4:memory:/dbus-:1.2@0")])
def test_a_group_with_a_colon_in_its_name(machine: Machine, version: int, line: str) -> None:
    machine.member(line)
    machine.group(version, "dbus-:1.2@0", 64 * MIB, 24 * MIB)
    assert cgroups.headroom_bytes() == 40 * MIB


@pytest.mark.parametrize(("version", "line"), [(2, "0::/"), (1, "4:memory:/")])
def test_a_group_that_sees_itself_as_the_root(machine: Machine, version: int, line: str) -> None:
    machine.member(line)
    machine.group(version, "", 64 * MIB, 24 * MIB)
    assert cgroups.headroom_bytes() == 40 * MIB


def test_folders_above_those_of_the_groups_are_none_of_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.member("0::/pod")
    monkeypatch.setattr(cgroups, "_ROOT", machine.root / "groups")
    machine.group(2, "groups/pod", 64 * MIB, 24 * MIB)
    machine.group(2, "", 8 * MIB, MIB)
    assert cgroups.headroom_bytes() == 40 * MIB
    machine.member("0::/../beside")
    machine.group(2, "beside", 8 * MIB, MIB)
    (machine.root / "groups" / "memory.max").write_text("max")
    assert cgroups.headroom_bytes() is None


@pytest.mark.parametrize(("version", "line"), [(2, "0::/docker/1f"), (1, "4:memory:/docker/1f"), (2, "0::/../1f")])
def test_a_path_outside_of_the_container(machine: Machine, version: int, line: str) -> None:
    machine.member(line)
    machine.group(version, "", 64 * MIB, 24 * MIB)
    assert cgroups.headroom_bytes() == 40 * MIB


@pytest.mark.parametrize(("version", "line"), [(2, "0::/box"), (1, "4:memory:/box")])
def test_pages_of_files_can_be_had_back(machine: Machine, version: int, line: str) -> None:
    machine.member(line)
    machine.group(version, "box", 64 * MIB, 60 * MIB, files=31 * MIB)
    assert cgroups.headroom_bytes() == 35 * MIB


def test_both_versions_on_one_machine(machine: Machine) -> None:
    machine.member("4:memory:/box", "0::/box")
    machine.group(1, "box", 64 * MIB, 4 * MIB)
    machine.group(2, "box", "max", 4 * MIB)
    assert cgroups.headroom_bytes() == 60 * MIB


def test_a_group_that_is_over_its_limit(machine: Machine) -> None:
    machine.member("0::/box")
    machine.group(2, "box", 64 * MIB, 65 * MIB)
    assert cgroups.headroom_bytes() == 0


def test_no_limit(machine: Machine) -> None:
    assert cgroups.headroom_bytes() is None, "there is no such file"
    machine.member("0::/box", "4:memory:/absent")
    machine.group(2, "box", "max", 3 * MIB)
    assert cgroups.headroom_bytes() is None
    (machine.root / "box" / "memory.current").unlink()
    assert cgroups.headroom_bytes() is None


@pytest.mark.parametrize(("limit", "expected"), [(64 * MIB, 60 * MIB), (UNLIMITED_V1, None)])
def test_what_is_available(machine: Machine, limit: int, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.member("4:memory:/box")
    machine.group(1, "box", limit, 4 * MIB)
    text = "MemTotal: 900000 kB\nMemAvailable: 102400 kB\n"
    monkeypatch.setattr(host_memory, "open", lambda path: io.StringIO(text), raising=False)
    assert host_memory.available_bytes() == (expected or 100 * MIB)
    with pytest.raises(MemoryError, match=f"{200 * MIB} bytes .*, {expected or 100 * MIB} bytes are available"):
        host_memory.allocate([200 * MIB], pinned=False)
