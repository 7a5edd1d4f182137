"""One prompt from its lookup to its save, so that nothing has to be remembered by whoever computes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ..errors import CancelledError, TransferError
from ..ops import _arguments as arguments
from ..schedule.transfer import Transfer
from ..timeouts import check_timeout
from ..tracking.keeper import Deadline
from .found import BlockState
from .lease import Lease
from .passes import Begun, WholePass
from .weighing import is_load_sooner, to_bring


class Request:
    """What :meth:`KVOffloadManager.request` makes. Of one thread; a ``with`` block that raises cancels its transfers.

    Attributes:
        start: the first token to compute; those before it come from host memory. The last one is always computed.
        loads, saves: for the :class:`~paddle_kv.integrations.ForwardPass`, or the hooks, of the pass.
        hashes: of the full blocks.

    Example:
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
        >>> from paddle_kv.integrations import ForwardPass
        >>> from paddle_kv.offload import KVOffloadManager
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 9, "cpu"), HostPool(spec, 8))
        >>> manager = KVOffloadManager(scheduler)
        >>> def prefill(tokens, table):
        ...     computed = 0
        ...     with manager.request(tokens, table) as request:
        ...         while True:
        ...             with ForwardPass(request.loads, request.saves) as layers:
        ...                 for number in range(spec.num_layers):
        ...                     with layers.layer(number):
        ...                         pass  # compute tokens[request.start:]
        ...             computed += len(tokens) - request.start
        ...             if request.wait(timeout_s=10):  # else once more, from the first token on
        ...                 return computed
        >>> prefill(range(8), [0, 1, 2])
        8
        >>> scheduler.drain(); prefill(range(8), [5, 4, 3])
        2
        >>> scheduler.drain(); manager.close(); scheduler.close()
    """

    def __init__(
        self, manager: Any, hashes: list[bytes], num_tokens: int, table: Sequence[int], block_size: int, how: str
    ) -> None:
        """``manager``: a KVOffloadManager, which makes it; ``table`` and ``how``: checked."""
        self.hashes = hashes
        self._manager = manager
        self._num_tokens, self._table, self._block_size = num_tokens, list(table), block_size
        self._handed_out: range | None = None  # what the model computes now
        self._begun: Begun | None = None  # its pass, until what that takes is noted
        self._rates = manager._books.rates
        self.loads: list[Transfer] = []
        self.saves: list[Transfer] = []
        found = self._begin(how)
        self.start = found * block_size
        try:
            self._save(found)
        except BaseException:  # nobody gets the load, so nothing of it may touch the blocks any more
            self.cancel()
            for load in self.loads:
                load.wait_over()
            raise

    def _begin(self, how: str) -> int:
        """Starts what is loaded; returns how many blocks."""
        with self._manager.lookup(self.hashes, num_tokens=self._num_tokens) as lease:
            if how == "compute" or not lease.num_blocks:
                return 0
            if how == "load":
                return self._load(lease)
            rates, states = self._manager._books.rates, lease.states
            blocks, timeout_s = to_bring(rates, states)
            if blocks:  # beside the computation: nothing waits for it
                self._manager.prefetch(lease.hashes[:blocks], timeout_s=timeout_s)
            here = states.index(BlockState.TIER) if BlockState.TIER in states else len(states)
            num_layers = self._manager.device_cache.spec.num_layers
            if not is_load_sooner(rates, states[:here], self._num_tokens, num_layers):
                return 0
            lease.keep_first(here)
            return self._load(lease)

    def _load(self, lease: Lease) -> int:
        found = lease.num_blocks
        try:
            self.loads.append(self._manager.onload(lease.hashes, self._table[:found]))
        except TransferError:  # a block in host memory is damaged and dropped now, or no copy could begin
            return 0
        return found

    def _note_written(self, tokens: range) -> None:
        """The next pass writes their blocks, whatever a load has left in them: of this prompt, or of another one that
        had them before and was aborted."""
        self._manager.device_cache.mark_rewritten(self._blocks_of(tokens))

    def _blocks_of(self, tokens: range) -> list[int]:
        """On the device, also of some of their tokens alone."""
        return self._table[tokens.start // self._block_size : -(-tokens.stop // self._block_size)]

    def _save(self, found: int) -> None:
        self._note_written(range(found * self._block_size, self._num_tokens))
        full = len(self.hashes)
        save = self._manager.blocks_full(
            self.hashes[found:], self._table[found:full], layerwise=True, computed_from=self.loads
        )
        self.saves = [save] if save is not None else []

    def next_chunk(self, max_tokens: int | None = None, *, timeout_s: float | None = None) -> range | None:
        """The tokens to compute next, in a pass with ``loads`` and ``saves`` as they are then; None: all is there, and
        what was computed is valid. Each call says that what the call before has returned was computed, or at least
        submitted to the compute stream.

        Args:
            max_tokens: at most so many, for a prompt with ``chunk_tokens`` that shares a pass with others; None: the
                chunk. Of what was found the passes make whole blocks, and what is left of the chunk may be loaded.
            timeout_s: for what the host has to wait for: a load that is taken back, a piece that a tier brings sooner
                than it could be computed, and the loads at the end.

        Raises:
            TimeoutError: that was not over after ``timeout_s``. Call again.
            TypeError: not an integer, or not a time.
            ValueError: ``max_tokens`` is not positive, or the prompt is computed as a whole.
            ClosedError: of a prompt with ``chunk_tokens``: cancelled, or its ``with`` block was left, before None.
            As :meth:`KVOffloadManager.save`.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> from paddle_kv.integrations import ForwardPass
            >>> from paddle_kv.offload import KVOffloadManager
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 9, "cpu"), HostPool(spec, 8))
            >>> manager = KVOffloadManager(scheduler)
            >>> def prefill(tokens, table):
            ...     computed = []
            ...     with manager.request(tokens, table, chunk_tokens=3) as request:
            ...         while (chunk := request.next_chunk(timeout_s=10)) is not None:
            ...             with ForwardPass(request.loads, request.saves) as layers:
            ...                 for number in range(spec.num_layers):
            ...                     with layers.layer(number):
            ...                         pass  # compute tokens[chunk.start : chunk.stop]
            ...             computed.append((chunk.start, chunk.stop))
            ...     return computed
            >>> prefill(range(8), [0, 1, 2])
            [(0, 3), (3, 6), (6, 8)]
            >>> scheduler.drain(); prefill(range(8), [5, 4, 3])[-1]  # of the other chunks, some have come
            (6, 8)
            >>> scheduler.drain(); manager.close(); scheduler.close()
        """
        left = self._num_tokens - self.start
        if max_tokens is not None and arguments.integer(max_tokens, "max_tokens") < left:
            raise ValueError(f"max_tokens = {max_tokens} must be at least {left}: without chunk_tokens it is one pass")
        check_timeout(timeout_s)
        self._note_computed()
        # Of an empty prompt there is nothing to compute, so nothing is handed out.
        if (self._handed_out is not None or not self._num_tokens) and self.wait(timeout_s):
            return None
        return self._hand_out(range(self.start, self._num_tokens))

    def _hand_out(self, tokens: range) -> range:
        self.start, self._handed_out = tokens.start, tokens
        waits = any(load.failed or not load.done() for load in self.loads)
        self._begun = self._rates.begin_pass(len(tokens), time.monotonic(), waits=waits)
        return tokens

    def _note_computed(self) -> None:
        """What it took says how long others will take, unless the model had to wait for loads. Once: whoever calls
        again has done something else since."""
        begun, self._begun = self._begun, None
        if begun is None or self._handed_out is None:
            return
        seconds = time.monotonic() - begun.at_s
        share = self._rates.share_of(begun, len(self._handed_out), seconds) if seconds > 0 else None
        if share is not None:
            self._manager.observe_prefill(self._handed_out, seconds * share)
        self._note_pass(self._handed_out, self._rates.end_pass(begun, len(self._handed_out), seconds))

    def _note_pass(self, tokens: range, whole: WholePass) -> None:
        """It was over these tokens, and those of others."""

    def _abort_pass(self) -> None:
        """The server may have computed it, or some of it, or nothing."""
        if self._begun is not None:
            self._rates.abort_pass(self._begun)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Behind the pass: whether its result is valid. If not, the load has failed: ``start`` is the first token that
        did not come, ``loads`` is empty, ``saves`` are new ones, nothing of the old ones touches the blocks any more,
        and the pass is to be run again.

        Raises:
            TimeoutError: a transfer was not over after ``timeout_s``.
        """
        check_timeout(timeout_s)
        deadline = Deadline(timeout_s)
        try:
            for load in self.loads:
                load.wait(deadline.left_s())
        except (TransferError, CancelledError):
            for transfer in [*self.loads, *self.saves]:
                if transfer.unmarked_layers:
                    transfer.cancel()
                transfer.wait_over(deadline.left_s())
            lost = [i for load in self.loads for i in self._manager.blocks_to_recompute(load)]
            good = min(lost, default=0)
            self.start, self.loads = good * self._block_size, []
            self._handed_out = None  # so that next_chunk hands it out again
            self._save(good)
            return False
        return True

    def cancel(self) -> None:
        """Cancels what has not begun of its transfers: for a prompt that is aborted. Behind ``wait_over`` of each the
        blocks may go to somebody else: to another request as they are, and to others behind ``mark_rewritten`` of the
        device cache, which a request calls for all blocks that its passes write."""
        self._abort_pass()
        for transfer in [*self.loads, *self.saves]:
            transfer.cancel()

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.cancel()
            return
        for save in self.saves:
            if save.unmarked_layers:  # of a pass that was not run
                self._abort_pass()
                save.cancel()


def full_table(ids: list[int], num_tokens: int, block_size: int) -> list[int]:
    """ValueError unless each token has its block."""
    needed = -(-num_tokens // block_size)
    if len(ids) < needed:
        raise ValueError(f"device_block_ids has {len(ids)} blocks; {num_tokens} tokens need {needed}")
    return ids
