"""A slab: a file of slots of one size, and beside it the table of what is in them.

The table is written through the page cache, which outlives the process: it never names an object that is not complete.
The bytes of a table are written down in docs/tiers.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from . import object_file
from .object_format import ALIGN_BYTES, NAME_BYTES

MAGIC = b"PDKVSLAB"
VERSION = 1
SLAB_NAME = re.compile(r"([0-9]{10})-([0-9]{1,18})\.slab")
ENTRY_BYTES = 32  # of the head and of each record: none lies across two pages
MOST_SLOTS = 1 << 28
_HEAD = struct.Struct("<8sIQQ")  # magic, version, bytes of a slot, slots
_RECORD = struct.Struct(f"<{NAME_BYTES}sQI")  # name, when it was stored, bytes of the object
_SUM = struct.Struct("<I")  # CRC-32 of what is before it
_RECORDS = np.dtype([("name", f"V{NAME_BYTES}"), ("stored", "<u8"), ("bytes", "<u4"), ("sum", "<u4")])

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass
class Table:
    """What a table says: slots with an object, each with its name and when it was stored; slots without one; and those
    of which it says nothing that could be believed."""

    slots: list[int]
    names: list[bytes]
    stored: np.ndarray
    sizes: np.ndarray
    empty: list[int]
    unknown: list[int]


class Slab:
    """One file of slots, open. What changes without a system call is the business of its folder, under its lock."""

    def __init__(self, folder: int, number: int, slot_bytes: int, num_slots: int, descriptor: int) -> None:
        self.number = number
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.descriptor = descriptor
        self.buffered = -1
        self.names = bytearray(NAME_BYTES * num_slots)
        self.used = np.zeros(num_slots, np.int64)  # when each object was used; 0: there is none
        self.free = array("I")  # slots that have their bytes on the disk
        self.holes = array("I")  # and those that have none
        self.reading: dict[int, int] = {}
        self.leaving: set[int] = set()  # free as soon as nobody reads them
        self.num_charged = 0  # slots that may have bytes on the disk
        self.gone = False
        self._folder = folder
        self.path, self.table_path = paths(number, slot_bytes)

    def name_at(self, slot: int) -> bytes:
        return bytes(self.names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])

    def set_name(self, slot: int, name: bytes) -> None:
        self.names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = name

    # ---- calls of the system ----
    def file(self, *, direct: bool) -> int:
        """The descriptor to read and write with."""
        if direct:
            return self.descriptor
        if self.buffered < 0:
            descriptor = object_file.open_file(self._folder, self.path, os.O_RDWR)
            self.buffered, again = descriptor, self.buffered
            if again >= 0:  # two threads at once: neither may lose the other's
                self.buffered = again
                os.close(descriptor)
        return self.buffered

    def write_records(self, slots: Sequence[int], records: Sequence[tuple[bytes, int, int]]) -> None:
        """These objects are complete. Each record is name, age and bytes of the object. The slots ascend."""
        said = b"".join([with_sum(_RECORD.pack(*record)) for record in records])
        entries, at = [], 0
        for first, count in runs(slots):
            entries.append((first, said[at : (at := at + count * ENTRY_BYTES)]))
        self._write_table(entries, self.descriptor)

    def clear_records(self, slots: Iterable[int]) -> None:
        """There is no object any more."""
        self._write_table([(first, bytes(count * ENTRY_BYTES)) for first, count in runs(slots)])

    def _write_table(self, entries: Iterable[tuple[int, bytes]], slab: int = -1) -> None:
        at = [((first + 1) * ENTRY_BYTES, content) for first, content in entries]
        code = object_file.write_table(self._folder, self.table_path.encode(), slab, at)
        if code != object_file.ALL_MOVED:
            raise OSError(code, os.strerror(code), self.table_path)

    def punch(self, slots: Iterable[int]) -> None:
        """Gives their bytes back to the file system. Raises OSError."""
        for first, count in runs(slots):
            at, size = first * self.slot_bytes, count * self.slot_bytes
            _fallocate(self.descriptor, _KEEP_SIZE | _PUNCH_HOLE, at, size)

    def there(self) -> bool:
        """Whether nobody has deleted its files."""
        try:
            os.stat(self.table_path, dir_fd=self._folder, follow_symlinks=False)
            return os.fstat(self.descriptor).st_nlink > 0
        except OSError:
            return False

    def unlink(self) -> None:
        for path in (self.path, self.table_path):
            with contextlib.suppress(OSError):
                os.unlink(path, dir_fd=self._folder)

    def descriptors(self) -> list[int]:
        return [one for one in (self.descriptor, self.buffered) if one >= 0]


def paths(number: int, slot_bytes: int) -> tuple[str, str]:
    """Of the slab and of its table."""
    return f"{number:010d}-{slot_bytes}.slab", f"{number:010d}-{slot_bytes}.table"


def create(folder: int, number: int, slot_bytes: int, num_slots: int, *, direct: bool, allocate: bool) -> Slab:
    """Makes an empty one; its slots have bytes on the disk if ``allocate`` is set and works. Raises OSError."""
    path, table_path = paths(number, slot_bytes)
    _create_table(folder, table_path, slot_bytes, num_slots)
    try:
        descriptor = object_file.open_file(folder, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=direct)
    except BaseException:
        os.unlink(table_path, dir_fd=folder)
        raise
    slab = Slab(folder, number, slot_bytes, num_slots, descriptor)
    try:
        os.ftruncate(descriptor, num_slots * slot_bytes)
        if allocate:
            with contextlib.suppress(OSError):
                _fallocate(descriptor, 0, 0, num_slots * slot_bytes)
                slab.free.extend(range(num_slots - 1, -1, -1))
    except BaseException:
        os.close(descriptor)
        slab.unlink()
        raise
    if not slab.free:
        slab.holes.extend(range(num_slots - 1, -1, -1))
    return slab


def open_slab(folder: int, number: int, slot_bytes: int, *, direct: bool) -> tuple[Slab, Table]:
    """One that is there, and what its table says. Raises OSError, ValueError."""
    path, table_path = paths(number, slot_bytes)
    if not slot_bytes or slot_bytes % ALIGN_BYTES:
        raise ValueError(f"{path}: slots of {slot_bytes} bytes; a multiple of {ALIGN_BYTES} is expected")
    content = read_table(folder, table_path)
    descriptor = object_file.open_file(folder, path, os.O_RDWR, direct=direct)
    try:
        said = os.fstat(descriptor)
        if not stat.S_ISREG(said.st_mode):
            raise ValueError(f"{path} is no file")
        num_slots = slots_of(content, slot_bytes)
        if not num_slots:
            num_slots = min(said.st_size // slot_bytes, MOST_SLOTS)
            if not num_slots:
                raise ValueError(f"{path} has not one slot")
            _renew_table(folder, table_path, slot_bytes, num_slots)
            table = Table([], [], np.zeros(0, np.int64), np.zeros(0, np.uint32), [], list(range(num_slots)))
        else:
            table = parse_table(content, slot_bytes)
        slab = Slab(folder, number, slot_bytes, num_slots, descriptor)
        on_disk_bytes = said.st_blocks * 512
        if on_disk_bytes >= num_slots * slot_bytes:
            slab.free.extend(reversed(table.empty))
        else:
            slots = slab.holes
            if on_disk_bytes > (len(table.slots) + len(table.unknown)) * slot_bytes:
                try:
                    slab.punch(table.empty)  # of which some, it is not known which, have bytes
                except OSError:
                    slots = slab.free  # and keep them: all count
            slots.extend(reversed(table.empty))
        return slab, table
    except BaseException:
        os.close(descriptor)
        raise


def _renew_table(folder: int, path: str, slot_bytes: int, num_slots: int) -> None:
    """An empty one in the place of one that cannot be believed."""
    with contextlib.suppress(OSError):
        os.unlink(path, dir_fd=folder)
    _create_table(folder, path, slot_bytes, num_slots)


def _create_table(folder: int, path: str, slot_bytes: int, num_slots: int) -> None:
    """With all its blocks on the disk: no record finds that full later."""
    descriptor = object_file.open_file(folder, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        content = with_sum(_HEAD.pack(MAGIC, VERSION, slot_bytes, num_slots)) + bytes(num_slots * ENTRY_BYTES)
        object_file.write_range(descriptor, 0, [memoryview(content)])
    except BaseException:
        os.unlink(path, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def read_table(folder: int, path: str) -> bytes:
    """Nothing if it cannot be read."""
    try:
        with open(object_file.open_file(folder, path, os.O_RDONLY), "rb") as file:
            return file.read((MOST_SLOTS + 1) * ENTRY_BYTES)
    except OSError:
        return b""


def slots_of(content: bytes, slot_bytes: int) -> int:
    """How many a table describes; 0 if it is none of this version for slots of this size."""
    head = content[:ENTRY_BYTES]
    if len(head) < ENTRY_BYTES or head != with_sum(head[: _HEAD.size]):
        return 0
    magic, version, said_bytes, num_slots = _HEAD.unpack_from(head)
    right = (magic, version, said_bytes) == (MAGIC, VERSION, slot_bytes)
    return int(num_slots) if right and len(content) == (num_slots + 1) * ENTRY_BYTES else 0


def parse_table(content: bytes, slot_bytes: int) -> Table:
    """Of a table that ``slots_of`` has found right."""
    records = np.frombuffer(content, _RECORDS, offset=ENTRY_BYTES)
    view, size = memoryview(content), _RECORD.size
    starts = range(ENTRY_BYTES, len(content), ENTRY_BYTES)
    sums = np.fromiter((crc32(view[at : at + size]) for at in starts), np.uint32, len(records))
    stored, sizes = records["stored"], records["bytes"]
    right = (sums == records["sum"]) & (stored - np.uint64(1) < np.uint64(1 << 62))
    right &= (sizes > 0) & (sizes <= slot_bytes)
    some = np.frombuffer(content, np.uint64, offset=ENTRY_BYTES).reshape(-1, ENTRY_BYTES // 8).any(axis=1)
    slots: list[int] = np.flatnonzero(right).tolist()
    names = [content[at : at + NAME_BYTES] for at in ((slot + 1) * ENTRY_BYTES for slot in slots)]
    empty, unknown = np.flatnonzero(~some).tolist(), np.flatnonzero(some & ~right).tolist()
    return Table(slots, names, stored[right].astype(np.int64), sizes[right], empty, unknown)


def with_sum(content: bytes) -> bytes:
    return content + _SUM.pack(crc32(content))


def runs(slots: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbours together: the first of them, and how many."""
    first, count = -1, 0
    for slot in sorted(slots):
        if slot == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = slot, 1
    if count:
        yield first, count


def _fallocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    if _libc.fallocate(descriptor, mode, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
