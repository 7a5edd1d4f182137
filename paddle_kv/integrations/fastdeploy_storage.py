"""What FastDeploy's calls of storage do, over a tier. The hashes and the host blocks are its scheduler's."""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..checks import check_distinct, check_ids, check_process
from ..errors import ClosedError
from ..lists import listed
from ..tiers import Job, Outcome, Tier
from ..tiers.job import check_keys
from ..tracking import stamps
from ..tracking.group import change_soon, wait_until

MOST_WAITING = 4  # calls whose blocks other transfers have: as many as FastDeploy's pool has threads
CLOSE_S = 30.0
CLOSED = "the cache transfer manager is closed"


def part_of(metadata: Any, name: str) -> Any:
    """TypeError unless FastDeploy's ``StorageMetadata``, or what has its attributes, is given."""
    try:
        return getattr(metadata, name)
    except AttributeError:
        raise TypeError(
            f"metadata is {type(metadata).__name__}, without {name}; "
            "an object with hash_values, block_ids and timeout is expected"
        ) from None


def keys_of(hash_values: Any) -> list[bytes]:
    """One string is no list of hashes, though its letters could pass for one: ``check_keys`` refuses it."""
    values = listed(hash_values)
    if values is None:
        return check_keys(hash_values, "metadata.hash_values")
    return check_keys([value.encode() if isinstance(value, str) else value for value in values], "metadata.hash_values")


class StorageTask:
    """How it goes with one call of storage; has what FastDeploy's ``AsyncTaskHandler`` has.

    Attributes:
        is_completed: it is known how it went.
        result: for each block whether it was stored, or loaded; None before.
        error: why not all were; None: all were.
    """

    def __init__(
        self, tier: Tier, hash_values: Iterable[Any], host_block_ids: Any, timeout_s: float, write: bool
    ) -> None:
        keys = keys_of(hash_values)
        self._job = Job(keys, host_block_ids, timeout_s=timeout_s, layerwise=False, observer=self)
        check_ids(self._job.block_ids, "host_block_ids", tier.pool.num_blocks)
        check_distinct("host_block_ids", self._job.block_ids)
        self.is_completed = False
        self.result: list[bool] | None = None
        self.error: str | None = None
        self._tier, self._domain, self._write = tier, tier.pool.domain, write
        self._known = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is known how it went; False: it was not within ``timeout`` seconds."""
        return self._known.wait(timeout)

    def get_result(self) -> list[bool]:
        """Blocks; then the result.

        Raises:
            RuntimeError: not all blocks were stored, or loaded.
        """
        self._known.wait()
        if self.error is not None:
            raise RuntimeError(self.error)
        assert self.result is not None
        return self.result

    def cancel(self) -> bool:
        """Drops what the storage has not begun. False: it was completed before."""
        self._job.cancel()
        return not self.is_completed

    # ---- in a thread of its own ----
    def run(self) -> None:
        """Takes the blocks as soon as no transfer has them, and hands them to the tier."""
        try:
            if not wait_until(self._domain, self._hold, self._job.timeout_s):
                self._complete("other transfers had the blocks")
                return
        except Exception as error:  # noqa: BLE001  it is told
            self._complete(str(error))
            return
        try:
            (self._tier.load if self._write else self._tier.store)([self._job])
        except Exception as error:  # noqa: BLE001  a tier that is closed, say
            if not self._job.started_s:
                change_soon(self._domain, functools.partial(self._let_go, str(error)))

    def _hold(self) -> bool:
        """In a section."""
        ids = self._job.block_ids
        for holder in self._domain.lone_holders(ids):
            holder.look()
        if not self._write:
            self._domain.check(ids, "host pool", writing=False)
        if not self._domain.try_lease(ids, write=self._write):
            return False
        if self._write:
            stamps.forget(self._domain, ids)
        return True

    # ---- what the tier tells ----
    def layers_arrived(self, job: Job, layers: range) -> None:
        pass

    def settled(self, job: Job) -> None:
        if Outcome.LATE in job.outcomes:  # the tier may never let go of these; else that comes next
            change_soon(self._domain, functools.partial(self._complete, ""))

    def over(self, job: Job) -> None:
        change_soon(self._domain, functools.partial(self._let_go, ""))

    def _let_go(self, error: str) -> None:
        ends = zip(self._job.block_ids, self._job.outcomes, strict=True)
        if self._write:
            self._domain.mark_rewritten([block_id for block_id, outcome in ends if outcome is Outcome.DONE])
        self._domain.end_lease(self._job.block_ids, write=self._write)
        self._domain.group.notify()
        self._complete(error)

    def _complete(self, error: str) -> None:
        if self.is_completed:
            return
        outcomes = self._job.outcomes
        self.result = [outcome is Outcome.DONE for outcome in outcomes]
        if error or not all(self.result):
            counts = Counter("not begun" if one is None else one.value for one in outcomes if one is not Outcome.DONE)
            why = error or ", ".join(f"{count} {value}" for value, count in counts.items())
            self.error = (
                f"{counts.total()} of {len(outcomes)} blocks were not {'loaded' if self._write else 'stored'}: {why}"
            )
        self.is_completed = True
        self._known.set()


class TierStorage:
    """Calls of storage over a tier. None of them waits for it."""

    def __init__(self, tier: Tier) -> None:
        if not isinstance(tier, Tier):
            raise TypeError(f"tier is {type(tier).__name__}; a paddle_kv.tiers.Tier is expected")
        self.tier = tier
        self._threads = ThreadPoolExecutor(MOST_WAITING, thread_name_prefix="paddle_kv_storage")
        self._process_id = os.getpid()
        self._closed = False

    def plan(self, metadata: Any, host_block_ids: Any, *, write: bool) -> StorageTask:
        """Checks all arguments. ``write``: a load."""
        check_process(self._process_id, "cache transfer manager")  # the threads are the parent's
        if self._closed:
            raise ClosedError(CLOSED)
        hash_values, timeout_s = part_of(metadata, "hash_values"), part_of(metadata, "timeout")
        return StorageTask(self.tier, hash_values, host_block_ids, timeout_s, write)

    def begin(self, task: StorageTask) -> StorageTask:
        try:
            self._threads.submit(task.run)
        except RuntimeError:  # closed meanwhile
            raise ClosedError(CLOSED) from None
        return task

    def close(self) -> None:
        """Waits until what was begun has been handed to the tier. Closing the tier is its owner's."""
        self._closed = True
        self._threads.shutdown()
