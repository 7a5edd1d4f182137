"""``PADDLE_KV_CHECKSUM=1``: a save stamps each host block with a checksum of its bytes, a load compares.

The stamp is made when the save is over. It is compared when the load is submitted, before anything moves, or, where
the save was not over then, when the load is over. Whoever else may write a block (a new owner of it, a lease for
writing, ``mark_rewritten``) takes its stamp away.

What the last transfers were is kept too; a mismatch writes that to a file and names it.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..memory import HostPool
from ..memory.host_rows import host_rows
from ..tracking.stamps import stamps
from .movement import Failure, Movement, State

KEPT_TRANSFERS = 256
KEPT_FILES = 8  # of a process; the oldest are deleted
SHOWN_IDS = 64  # of each transfer, in the file
SHOWN_TRANSFERS = 4  # in the text of the error

_recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=KEPT_TRANSFERS)
_numbers = itertools.count(1)
_file_numbers = itertools.count(1)
_files: collections.deque[Path] = collections.deque()


def enabled() -> bool:
    return os.environ.get("PADDLE_KV_CHECKSUM") == "1"


class ChecksumObserver:
    """What a scheduler tells about its transfers, in sections."""

    def __init__(self, pool: HostPool) -> None:
        self._rows = host_rows(pool)
        self._stamps = stamps.setdefault(pool.domain, {})
        self._records: weakref.WeakKeyDictionary[Movement, dict[str, Any]] = weakref.WeakKeyDictionary()
        self._late: weakref.WeakKeyDictionary[Movement, list[int]] = weakref.WeakKeyDictionary()

    def check(self, host_ids: Iterable[int]) -> None:
        """A load of these blocks is about to be submitted.

        Raises:
            TransferError: the bytes of a block are not those that were saved. ``block_ids`` names all such blocks.
        """
        failure, wrong = self._mismatch(host_ids)
        if failure is not None:
            raise failure.exception(wrong)

    def started(self, transfer: Movement) -> None:
        plan = transfer.plan
        host_ids = [int(block_id) for block_id in plan.host_ids]
        if plan.direction == "offload":
            self._stamps.update(dict.fromkeys(host_ids, transfer))
        else:
            late = {block_id for block_id in host_ids if not isinstance(self._stamps.get(block_id, 0), int)}
            if late:
                self._late[transfer] = sorted(late)
        self._records[transfer] = record = {
            "number": next(_numbers),
            "direction": plan.direction,
            "num_blocks": len(host_ids),
            "device_ids": [int(block_id) for block_id in plan.device_ids[:SHOWN_IDS]],
            "host_ids": host_ids[:SHOWN_IDS],
            "stream": str(getattr(transfer.stream, "ptr", transfer.stream)),
            "started_s": time.time(),
            "over_s": None,
            "error": None,
        }
        _recent.append(record)

    def over(self, transfer: Movement, failure: Failure | None) -> Failure | None:
        """All that was submitted of it is done. Returns what is wrong with the blocks that it has read."""
        plan = transfer.plan
        mismatch = None
        if plan.direction == "offload":
            for block_id in map(int, plan.host_ids):
                if self._stamps.get(block_id) is not transfer:
                    continue  # a later save, or a new owner
                if failure is None:
                    self._stamps[block_id] = self._checksum(block_id)
                else:
                    del self._stamps[block_id]
        elif failure is None and transfer in self._late:
            mismatch, _ = self._mismatch(self._late.pop(transfer))
        told = failure or mismatch
        record = self._records.pop(transfer)
        record["over_s"] = time.time()
        record["error"] = None if told is None else told.message.partition("\n")[0]
        return mismatch

    def _checksum(self, block_id: int) -> int:
        checksum = 0
        for layer in self._rows:
            for tensor in layer:
                checksum = zlib.crc32(tensor[block_id], checksum)
        return checksum

    def _mismatch(self, host_ids: Iterable[int]) -> tuple[Failure | None, list[int]]:
        wrong = []
        for block_id in dict.fromkeys(map(int, host_ids)):  # one source may have many targets
            stamp = self._stamps.get(block_id)
            if isinstance(stamp, int) and self._checksum(block_id) != stamp:
                wrong.append(block_id)
        if not wrong:
            return None, []
        last = [_line(record) for record in list(_recent)[-SHOWN_TRANSFERS:]]
        message = (
            f"{len(wrong)} blocks of the host pool do not hold what was saved to them: {wrong[:8]}. Something else has "
            f"written to that memory. The last {len(_recent)} transfers are in {_dump(wrong)}; the latest:\n"
            + "\n".join(last)
        )
        return Failure(State.FAILED, message, damaged=tuple(wrong)), wrong


def _line(record: dict[str, Any]) -> str:
    state = "in flight" if record["over_s"] is None else record["error"] or "done"
    return (
        f"  {record['number']}: {record['direction']} of {record['num_blocks']} blocks, device "
        f"{record['device_ids'][:8]}, host {record['host_ids'][:8]}, stream {record['stream']}: {state}"
    )


def _dump(wrong: list[int]) -> str:
    path = Path(tempfile.gettempdir()) / f"paddle_kv-transfers-{os.getpid()}-{next(_file_numbers)}.json"
    try:
        path.write_text(json.dumps({"wrong_host_blocks": wrong, "transfers": list(_recent)}, indent=1) + "\n")
        _files.append(path)
        while len(_files) > KEPT_FILES:
            _files.popleft().unlink(missing_ok=True)
    except OSError as error:  # the mismatch is what has to be told
        return f"no file ({error})"
    return str(path)
