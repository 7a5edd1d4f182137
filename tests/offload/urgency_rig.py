"""A server whose tier is served by hand: what is read ahead, and what a request needs, is seen as it is asked for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_kv.tiers import FilesEngine, Outcome
from paddle_kv.tracking.keeper import keeper
from tests.offload.chunk_rig import SIZE, WAIT_S, ChunkRig, contents, know, until

CHUNK = 2 * SIZE
BLOCKS = 24  # of a prompt
TABLE = list(range(30, 30 + BLOCKS + 1))
UNDER_WAY = 6  # blocks that are read ahead at a time
PROMPTS = [[number] * (BLOCKS * SIZE + 1) for number in range(4)]


class ByHand(FilesEngine):
    """Reads are asked for, and each is served when the test says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__({folder: 1 << 26}, threads_per_root=8)
        for root in self.roots:
            root.most_batched = 1
        self.held: deque[Any] = deque()  # in the order in which they were asked for
        self.asked: list[bytes] = []  # names
        self.holds = self.raises = False
        self.gone: set[bytes] = set()
        self._guard = threading.Lock()

    def read(self, items: Sequence[Any]) -> None:
        if self.raises:
            raise OSError("no storage")
        with self._guard:
            self.asked += [item.name for item in items]
            if self.holds:
                self.held.extend(items)
                return
        super().read(items)

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [there and name not in self.gone for name, there in zip(names, super().exists(names), strict=True)]

    def serve(self, count: int = 1) -> None:
        """The first ones."""
        super().read([self.held.popleft() for _ in range(count)])

    def open(self) -> None:
        with self._guard:
            self.holds = False
            held, self.held = list(self.held), deque()
        super().read(held)

    def close(self, timeout_s: float | None = None) -> None:
        self.open()
        super().close(timeout_s)


class Server(ChunkRig):
    """Four prompts, of which all lies in the tier."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.by_hand = ByHand(folder)
        super().__init__(self.by_hand, host_blocks=200, **options)
        # Two reads that are held take as long as each other or not, as it comes: more or less would be under way.
        self.books.queue._room.came = lambda *_: None
        self.hashes = [self.manager.block_hashes(prompt) for prompt in PROMPTS]
        for prompt in PROMPTS:
            self.prefill(prompt, TABLE, chunk_tokens=CHUNK)
            self.check_books()
        assert self.manager.evict(200) == len(PROMPTS) * BLOCKS
        self.know(0.1, 10.0, 2.0)  # seconds a block: the back is worth reading
        self.by_hand.asked.clear()
        self.by_hand.holds = True
        assert self.tier is not None
        name_of = self.tier.format.name_of
        self._number_of = {
            name_of(key): (prompt, number) for prompt, keys in enumerate(self.hashes) for number, key in enumerate(keys)
        }

    @property
    def books(self) -> Any:
        return self.manager._books

    @property
    def asked(self) -> list[tuple[int, int]]:
        """(prompt, block), in the order in which the engine was asked for them."""
        self.settle()
        return [self._number_of[name] for name in list(self.by_hand.asked)]

    def know(self, *seconds: float) -> None:
        """See :func:`know`. What is held says nothing of the tier, or parts would grow in the midst of a test."""
        know(self.manager, *seconds)
        self.books.rates.observe_load = lambda *_, **__: None

    def settle(self) -> None:
        """What is told to be asked for has been."""
        for _ in range(3):
            waiter = threading.Event()
            keeper.tell(waiter.set)
            assert waiter.wait(WAIT_S)

    def serve(self, count: int) -> None:
        """So many, and what follows from it."""
        before = self.num_known
        self.by_hand.serve(count)
        until(lambda: self.num_known >= before + count)
        self.settle()

    @property
    def num_known(self) -> int:
        assert self.tier is not None
        stats = self.tier.stats()
        return sum(stats[f"load_{outcome.value}"] for outcome in Outcome)

    def finish(self, request: Any, prompt: Sequence[int]) -> list[int]:
        """Computes what is handed out, and compares all; the first blocks of the chunks."""
        expected, computed = contents(prompt), []
        while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
            computed.append(chunk.start // SIZE)
            self.run_or_fail(request, chunk, TABLE, expected)
        self.check(TABLE, expected)
        return computed

    def close(self) -> None:
        self.by_hand.open()
        super().close()


def ahead(prompt: int, start: int, stop: int) -> list[tuple[int, int]]:
    return [(prompt, number) for number in range(start, stop)]


def from_back(prompt: int, count: int, of: int = BLOCKS) -> list[tuple[int, int]]:
    """So many of the first ``of`` blocks, the last one first, as what is expected is read."""
    return [(prompt, number) for number in reversed(range(of - count, of))]
