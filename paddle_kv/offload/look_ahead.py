"""What a server tells the manager of the future."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..tracking.group import change
from .books import Books
from .checks import checked_hashes
from .prefetch import Prefetch


class LookAhead:
    """Part of a :class:`~paddle_kv.offload.KVOffloadManager`."""

    _books: Books

    def expect(self, hashes: Sequence[bytes], in_seconds: float | None = None) -> Prefetch:
        """A prompt that begins with these blocks will be looked up: a request waits its turn, or a session will go on.
        Its blocks, also those that come later, are evicted after all others, and of all that is expected those that are
        due last go first. What of it lies in the tier is brought into host memory, as by :meth:`prefetch`: of all that
        is read ahead, what is due first comes first, and of one prompt the last blocks: a request in chunks can compute
        the first ones meanwhile. It takes the place of nothing that is due sooner: where host memory has no room, it
        waits until there is some. The time-out of a load counts for each part of it, from when the
        tier is asked for that.

        The expectation ends with the :meth:`lookup` of a prompt that contains the last of these blocks, or when four
        times the capacity was let in since. One that is wrong costs room until then, and nothing else. Counts as a use
        of the blocks that are there.

        Args:
            hashes: of :meth:`block_hashes`, from the first block on; those of the prompt, or as far as they are known.
            in_seconds: from now on; None: next, behind those that are expected already.

        Returns:
            What comes from the tier: ``cancel()`` it when the request is aborted or its turn has come. Its ``wait()``
            waits for room too, as long as the prompt is expected.

        Raises:
            TypeError: not a list of bytes, or not a number.
            ValueError: a time that is negative or not finite; with a tier also a hash that is not of 1 to 64 bytes.
            ClosedError: closed.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
            >>> from paddle_kv.offload import KVOffloadManager
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> scheduler = LayerwiseScheduler(DeviceCache(spec, 5, "cpu"), HostPool(spec, 2))
            >>> manager = KVOffloadManager(scheduler)
            >>> waiting, other = manager.block_hashes([1, 2, 3]), manager.block_hashes([4, 5, 6])
            >>> manager.save(waiting, [0]).wait(); manager.save(other, [1]).wait()
            >>> prefetch = manager.expect(waiting)  # a request with this prompt has come in
            >>> manager.save(manager.block_hashes([7, 8, 9]), [2]).wait()
            >>> manager.peek(waiting), manager.peek(other)
            (1, 0)
            >>> manager.close(); scheduler.close()
        """
        keys = checked_hashes(hashes)
        self._books.check_names(keys)
        expectation = change(self._books, functools.partial(self._books.expect, keys, in_seconds))
        return self._books.prefetch_expected(keys, expectation)

    def end(self, hashes: Sequence[bytes]) -> None:
        """The session of this prompt is over: its blocks are evicted before all others, from the end on. A block stays
        on which blocks of other prompts hang, and one that is used again. A hint that turns out to be wrong costs hits,
        and nothing else; the policy "survival" learns how far such hints can be trusted.

        Args:
            hashes: of :meth:`block_hashes`, from the first block on, with those of the answer if they were saved.

        Raises:
            TypeError: not a list of bytes.
            ClosedError: closed.
        """
        change(self._books, functools.partial(self._books.end_session, checked_hashes(hashes)))
