"""Which objects a folder holds, and where: names and sizes are in the names of files and folders, so that a restart
reads directories and no file.

``<root>/<number>-<object bytes>/<name>``: a *shelf* is a folder of at most ``SHELF_OBJECTS`` objects of one size, and
shelves are numbered as they were begun: that is the order of age after a restart. A name that begins with ``_`` is of
an object that is not complete; nobody reads it, and a restart deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
from collections import OrderedDict
from pathlib import Path

from ..errors import TierError

SHELF_OBJECTS = 256  # ext4 is several times slower with thousands of files in a folder
SHELF_NAME = re.compile(r"([0-9]{10})-([0-9]{1,18})")
OBJECT_NAME = re.compile(r"[0-9a-f]{32}")
TRIMMED_PER_STORE = 32  # objects beyond a capacity that has become smaller


class Shelf:
    """A folder of objects of one size."""

    __slots__ = ("count", "number", "path", "size_bytes")

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.count = 0  # objects, and those on their way
        self.path = f"{number:010d}-{size_bytes}"


class Place:
    """Where an object is about to be written. ``temporary`` may be there already, as the file of an evicted one."""

    __slots__ = ("final", "name", "shelf", "temporary")

    def __init__(self, name: bytes, shelf: Shelf) -> None:
        self.name = name
        self.shelf = shelf
        self.final = f"{shelf.path}/{name.hex()}"
        self.temporary = f"{shelf.path}/_{name.hex()}"


class Folder:
    """One root, held by this process alone. All paths are relative to ``descriptor``.

    Raises:
        TierError: another process has it, or it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int) -> None:
        self.path = Path(path).absolute()
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evicted = 0
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, Shelf] = OrderedDict()  # those used last are at the end
        self._arriving: dict[bytes, Shelf] = {}
        self._reading: dict[bytes, int] = {}
        self._open_shelves: dict[int, Shelf] = {}  # by size: the one that is filled
        self._next_number = 0
        self._old_descriptors: list[int] = []
        self.descriptor = -1
        self._lock_descriptor = -1
        try:
            self._open()
        except OSError as error:
            raise TierError(f"the folder {self.path} cannot be used: {error}") from None

    def _open(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock_descriptor = os.open(
                "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor
            )
            try:
                fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TierError(
                    f"the folder {self.path} is in use by another engine; give each process a folder of its own"
                ) from None
            self._scan()
        except BaseException:
            self._close([])
            raise

    def close(self) -> None:
        self._close(self._old_descriptors)
        self._old_descriptors = []

    def _close(self, others: list[int]) -> None:
        for descriptor in (self._lock_descriptor, self.descriptor, *others):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock_descriptor = self.descriptor = -1

    def _scan(self) -> None:
        found = (match for match in map(SHELF_NAME.fullmatch, os.listdir(self.descriptor)) if match)
        for match in sorted(found, key=lambda match: int(match[1])):
            shelf = Shelf(int(match[1]), int(match[2]))
            self._next_number = shelf.number + 1
            descriptor = os.open(
                shelf.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor
            )
            try:
                self._scan_shelf(shelf, os.listdir(descriptor))
            finally:
                os.close(descriptor)
            if not shelf.count:
                self._remove_shelf(shelf)

    def _scan_shelf(self, shelf: Shelf, names: list[str]) -> None:
        for text in names:
            if OBJECT_NAME.fullmatch(text):
                name = bytes.fromhex(text)
                older = self._objects.pop(name, None)
                if older is not None:
                    self._unlink(f"{older.path}/{text}")
                    self._left(older)
                    self.used_bytes -= older.size_bytes
                self._objects[name] = shelf
                shelf.count += 1
                self.used_bytes += shelf.size_bytes
            elif text.startswith("_"):
                self._unlink(f"{shelf.path}/{text}")

    def check(self) -> bool:
        """Somebody may have removed the folder, or what is in it: begins anew then. Whether it had to."""
        with self._lock:
            with contextlib.suppress(OSError):
                ours, there = os.fstat(self.descriptor), os.stat(self.path)
                if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
                    self._open_shelves.clear()
                    return False
            self._objects.clear()
            self._open_shelves.clear()
            self.used_bytes = sum(shelf.size_bytes for shelf in self._arriving.values())
            # Other threads may be about to use them: the numbers must not become those of other files.
            self._old_descriptors += [one for one in (self.descriptor, self._lock_descriptor) if one >= 0]
            self.descriptor = self._lock_descriptor = -1
            try:
                self._open()
            except TierError as error:
                raise OSError(errno.EBUSY, str(error)) from None
            return True

    # ---- asked ----
    def __contains__(self, name: bytes) -> bool:
        return name in self._objects or name in self._arriving

    def __len__(self) -> int:
        return len(self._objects)

    def present(self, name: bytes) -> bool:
        return name in self._objects

    def names(self) -> list[bytes]:
        """Of all objects, those used longest ago first."""
        with self._lock:
            return list(self._objects)

    # ---- reading ----
    def begin_read(self, name: bytes) -> str | None:
        """The path of the object, which nobody evicts until ``end_read``; None if it is not there."""
        with self._lock:
            shelf = self._objects.get(name)
            if shelf is None:
                return None
            self._objects.move_to_end(name)
            self._reading[name] = self._reading.get(name, 0) + 1
            return f"{shelf.path}/{name.hex()}"

    def end_read(self, name: bytes) -> None:
        with self._lock:
            left = self._reading.pop(name) - 1
            if left:
                self._reading[name] = left

    # ---- writing ----
    def begin_write(self, name: bytes, size_bytes: int) -> Place | None:
        """Makes room; None if the object is there or arriving, or has no room. What is evicted gives its file."""
        with self._lock:
            if self.descriptor < 0:
                raise FileNotFoundError(errno.ENOENT, "the folder is gone", str(self.path))
            if name in self or size_bytes > self.capacity_bytes:
                return None
            for trimmed in range(TRIMMED_PER_STORE + 1):
                if self.used_bytes + size_bytes <= self.capacity_bytes:
                    return self._place(name, size_bytes)
                victim = self._victim()
                if victim is None:
                    return None
                old, shelf = victim
                self.used_bytes -= shelf.size_bytes
                self.evicted += 1
                last = self.used_bytes + size_bytes <= self.capacity_bytes or trimmed == TRIMMED_PER_STORE
                path = f"{shelf.path}/{old.hex()}"
                if last and shelf.size_bytes == size_bytes:
                    return self._recycled(name, shelf, path)
                self._unlink(path)
                self._left(shelf)
            return None

    def _recycled(self, name: bytes, old_shelf: Shelf, path: str) -> Place:
        """A file that has its blocks on the disk already costs neither a deletion nor an allocation."""
        try:
            place = self._place(name, old_shelf.size_bytes)
        except OSError:
            self._unlink(path)
            self._left(old_shelf)
            raise
        try:
            os.rename(path, place.temporary, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            self._unlink(path)
        self._left(old_shelf)
        return place

    def _victim(self) -> tuple[bytes, Shelf] | None:
        for name, shelf in self._objects.items():
            if name not in self._reading:
                del self._objects[name]
                return name, shelf
        return None

    def _place(self, name: bytes, size_bytes: int) -> Place:
        shelf = self._open_shelves.get(size_bytes)
        if shelf is None or shelf.count >= SHELF_OBJECTS:
            shelf = Shelf(self._next_number, size_bytes)
            os.mkdir(shelf.path, 0o700, dir_fd=self.descriptor)
            self._next_number += 1
            before, self._open_shelves[size_bytes] = self._open_shelves.get(size_bytes), shelf
            if before is not None and not before.count:
                self._remove_shelf(before)
        shelf.count += 1
        self.used_bytes += size_bytes
        self._arriving[name] = shelf
        return Place(name, shelf)

    def end_write(self, place: Place, *, complete: bool) -> None:
        """Makes the object visible, or gives up what was made of it.

        Raises:
            OSError: it could not be made visible, and is given up.
        """
        renamed = False
        try:
            if complete:
                os.rename(place.temporary, place.final, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
                renamed = True
        finally:
            if not renamed:
                self._unlink(place.temporary)
            with self._lock:
                kept = renamed and self._arriving.get(place.name) is place.shelf
                self._arriving.pop(place.name, None)
                if kept:
                    self._objects[place.name] = place.shelf
                else:
                    self.used_bytes -= place.shelf.size_bytes
                    self._left(place.shelf)

    def path_of(self, name: bytes) -> Path | None:
        """Where an object is, for those who look at it by other means."""
        shelf = self._objects.get(name)
        return None if shelf is None else self.path / shelf.path / name.hex()

    def delete(self, name: bytes) -> None:
        if name not in self._objects:
            return  # not behind those who hold the lock while the system works
        with self._lock:
            shelf = self._objects.pop(name, None)
            if shelf is not None:
                self.used_bytes -= shelf.size_bytes
                self._unlink(f"{shelf.path}/{name.hex()}")
                self._left(shelf)

    def _left(self, shelf: Shelf) -> None:
        """One object less."""
        shelf.count -= 1
        if not shelf.count and self._open_shelves.get(shelf.size_bytes) is not shelf:
            self._remove_shelf(shelf)

    def _remove_shelf(self, shelf: Shelf) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(shelf.path, dir_fd=self.descriptor)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path, dir_fd=self.descriptor)
