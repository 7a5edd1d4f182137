"""Shared memory by itself: what is refused when it is made or mapped, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddle_kv import AttachError
from paddle_kv.memory import shared_memory
from paddle_kv.memory.shared_memory import SharedHandle, SharedMemory, map_shared, mapped_at

SIZE_BYTES = 8192
FINAL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if "memfd:paddle_kv-" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(name)
    return found


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    gc.collect()  # what other tests have left
    before = descriptors()
    yield
    assert descriptors() == before


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a destructor raises."""
    found: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", found.append)
    return found


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The addresses and sizes that are page-locked."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(shared_memory, "PageLock", lambda *place: found.append(place) or place)
    return found


@contextlib.contextmanager
def unmapped(*, seals: int = FINAL, size_bytes: int = SIZE_BYTES, token: str = "1234") -> Iterator[SharedHandle]:
    """Memory as another process would describe it: not mapped here."""
    descriptor = os.memfd_create(f"paddle_kv-{token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield SharedHandle(os.getpid(), descriptor, "1234", SIZE_BYTES)
    finally:
        os.close(descriptor)


def raises(kind: type[BaseException], *described: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        raise kind(*described)

    return call


def test_only_its_user_may_open_it() -> None:
    descriptor = SharedMemory(SIZE_BYTES)
    assert os.fstat(descriptor.handle().descriptor).st_mode & 0o777 == 0o600


def test_it_is_page_locked_where_that_is_asked_for(locked: list[tuple[int, int]]) -> None:
    memory = SharedMemory(SIZE_BYTES)
    assert map_shared(memory.handle()) is memory
    with unmapped() as handle:
        mapped = map_shared(handle)
        assert locked == []
        for _ in range(2):  # once is enough
            assert map_shared(memory.handle(), pinned=True) is memory
        assert map_shared(handle, pinned=True) is mapped
        assert locked == [(memory.address, SIZE_BYTES), (mapped.address, SIZE_BYTES)]
        del mapped
        again = map_shared(handle, pinned=True)
        assert locked[2:] == [(again.address, SIZE_BYTES)]


def test_memory_is_found_by_each_of_its_addresses() -> None:
    pieces = [SharedMemory(SIZE_BYTES) for _ in range(3)]
    for one in pieces:
        assert mapped_at(one.address) is mapped_at(one.address + SIZE_BYTES - 1) is one
        for outside in (one.address - 1, one.address + SIZE_BYTES):
            assert mapped_at(outside) is not one


@pytest.mark.parametrize("call", ["memfd_create", "posix_fallocate"])
def test_memory_that_there_is_not(call: str, monkeypatch: pytest.MonkeyPatch, unraisable: list[Any]) -> None:
    monkeypatch.setattr(os, call, raises(OSError, errno.ENOSPC, "No space left on device"))
    with pytest.raises(MemoryError, match="No space left on device"):
        SharedMemory(SIZE_BYTES)
    assert unraisable == []


def test_no_room_for_the_mapping(monkeypatch: pytest.MonkeyPatch, unraisable: list[Any]) -> None:
    monkeypatch.setattr("mmap.mmap", raises(OSError, errno.ENOMEM, "Cannot allocate memory"))
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        SharedMemory(SIZE_BYTES)
    assert unraisable == []


def test_an_interrupt_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raises(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        SharedMemory(SIZE_BYTES)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, FINAL & ~fcntl.F_SEAL_SHRINK])
def test_memory_that_its_maker_can_still_shorten_is_refused(seals: int) -> None:
    with unmapped(seals=seals) as handle, pytest.raises(AttachError, match="is not sealed"):
        map_shared(handle)


def test_another_size_than_was_described() -> None:
    message = f"has {2 * SIZE_BYTES} bytes; {SIZE_BYTES} were described"
    with unmapped(size_bytes=2 * SIZE_BYTES) as handle, pytest.raises(AttachError, match=message):
        map_shared(handle)
    memory = SharedMemory(SIZE_BYTES)  # mapped here already
    with pytest.raises(AttachError, match=f"has {SIZE_BYTES} bytes; 4096 were described"):
        map_shared(dataclasses.replace(memory.handle(), size_bytes=4096))


def test_memory_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    message = f"belongs to user {owner}, this process to {owner + 1}"
    with unmapped() as handle, pytest.raises(AttachError, match=message):
        map_shared(handle)


def test_memory_that_may_not_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with unmapped() as handle:
        monkeypatch.setattr(os, "open", raises(PermissionError, errno.EACCES, "Permission denied"))
        with pytest.raises(AttachError, match="cannot be opened: Permission denied"):
            map_shared(handle)


def test_what_has_the_descriptor_by_now_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", raises(AssertionError, "opened"))
    with unmapped(token="other") as handle, pytest.raises(AttachError, match="is gone, or has given back"):
        map_shared(handle)


def in_child(body: Callable[[], bool]) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        done = False
        try:
            done = body()
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_forked_while_memory_was_mapped_maps_too() -> None:
    with unmapped() as handle, shared_memory._mapping:
        in_child(lambda: map_shared(handle).size_bytes == SIZE_BYTES)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_descriptor_0_is_given_back_as_well() -> None:
    """It is free where standard input is closed."""

    def body() -> bool:
        os.close(0)
        memory = SharedMemory(SIZE_BYTES)
        assert memory.handle().descriptor == 0
        del memory
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
        return True

    in_child(body)
