"""What a start leaves for later: slots of which no table tells, and the files of former versions."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Callable

from .folder import Folder
from .object_file import names_in, read_range
from .object_format import ALIGN_BYTES, header_bytes_of, parse
from .slab import Slab

_FORMER_SHELF = re.compile(r"[0-9]{10}-[0-9]{1,18}")
_FORMER_OBJECT = re.compile(r"_.*|[0-9a-f]{32}")


def recover(folder: Folder, ended: Callable[[], bool]) -> None:
    """Reads the headers of unknown slots one by one, and deletes what a former version left, until ``ended()``."""
    while not ended() and _recover_one(folder):
        pass
    for shelf in filter(_FORMER_SHELF.fullmatch, names_in(folder.descriptor)):
        with contextlib.suppress(OSError):
            _delete_former(folder.descriptor, shelf, ended)


def _recover_one(folder: Folder) -> bool:
    """Whether there was one."""
    with folder.looking:
        if not folder.unknown:
            return False
        slab, slot = folder.unknown.pop()
        try:
            found = _look(slab, slot, direct=folder.direct)
        except OSError:
            found = None  # what cannot be read is overwritten some day
        with contextlib.suppress(OSError):
            folder.adopt(slab, slot, *(found or (None, 0)))
        return True


def _look(slab: Slab, slot: int, *, direct: bool) -> tuple[bytes, int] | None:
    """Name and bytes of the object, as far as its header is right."""
    size = ALIGN_BYTES
    while size <= slab.slot_bytes:
        memory = mmap.mmap(-1, size)  # not closed here: an error that is on its way still refers to it
        if not read_range(slab.file(direct=direct), slot * slab.slot_bytes, [memoryview(memory)]):
            return None
        content = memory[:]
        if size == (needed := header_bytes_of(content)):
            header = parse(content)
            object_bytes = 0 if header is None else header.header_bytes + header.payload_bytes
            return (header.name, object_bytes) if header and object_bytes <= slab.slot_bytes else None
        size = needed
    return None


def _delete_former(folder: int, shelf: str, ended: Callable[[], bool]) -> None:
    for name in filter(_FORMER_OBJECT.fullmatch, names_in(folder, shelf)):
        if ended():
            return
        os.unlink(f"{shelf}/{name}", dir_fd=folder)
    os.rmdir(shelf, dir_fd=folder)
