"""The clauses of docs/offload.md that speak of requests in chunks, and what each is broken by; run by
``test_contract.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle_kv.offload import books, chunks, feed, feeding, rates
from paddle_kv.tiers import FilesEngine
from paddle_kv.tracking.keeper import keeper, nothing
from tests.offload.chunk_rig import BLOCK_BYTES, SIZE, WAIT_S, ChunkRig, know, until
from tests.schedule.rig import SHORT_S, Copies

CHUNK = 2 * SIZE
TOKENS = list(range(4 * CHUNK + 1))
TABLE = [9, 2, 11, 5, 30, 31, 7, 8, 1]
OTHER = [40, 41, 42, 43, 44, 45, 46, 47, 48]
QUICK_S, HERE_S, AWAITED_S, SLOW_S = 1e-6, 1e-3, 1.0, 10.0  # a block


class Stalling(FilesEngine):
    """Reads only when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__({folder: 1 << 24}, threads_per_root=8)
        for root in self.roots:
            root.most_batched = 1
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0

    def read(self, items: Any) -> None:
        self.asked += len(items)
        super().read([_Stalled(item, self.gate) for item in items])  # type: ignore[misc]

    def close(self, timeout_s: float | None = None) -> None:
        self.gate.set()
        super().close(timeout_s)


class _Stalled:
    def __init__(self, item: Any, gate: threading.Event) -> None:
        self._item, self._gate = item, gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def buffers(self, *stage: int) -> Any:
        self._gate.wait(WAIT_S)
        return self._item.buffers(*stage)


class Case:
    def __init__(self, copies: Copies, folder: Path) -> None:
        self.copies, self._folder = copies, folder
        self.made: list[ChunkRig] = []

    def rig(self, *, tiered: bool = False, **options: Any) -> ChunkRig:
        """A server that has computed a prompt before."""
        made = ChunkRig(Stalling(self._folder) if tiered else None, **options)
        self.made.append(made)
        made.prefill(TOKENS, TABLE, chunk_tokens=5 * CHUNK)  # in one save: no save before it takes the link
        made.check_books()
        if tiered:
            made.manager.evict(100)
        know(made.manager, None, None)  # how long that took says something of this machine and its load alone
        return made

    def go_on_soon(self) -> None:
        """Behind the arrival of a copy that is held."""
        assert self.copies.arrived.acquire(timeout=WAIT_S)
        time.sleep(SHORT_S)
        self.copies.go_on()

    def close(self) -> None:
        self.copies.go_on()
        self.copies.heal()
        for rig in self.made:
            if isinstance(rig.engine, Stalling):
                rig.engine.gate.set()
            rig.close()


def clause_24(case: Case) -> None:
    rig = case.rig()
    know(rig.manager, QUICK_S, None)
    case.copies.hold("onload", 1)
    with rig.manager.request(TOKENS[: CHUNK + 1], OTHER, chunk_tokens=CHUNK) as request:
        assert case.copies.arrived.acquire(timeout=WAIT_S)
        threading.Timer(SHORT_S, case.copies.go_on).start()
        assert request.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
        rig.cache.tensor("key", 1)[OTHER[0]] = 0.0
        rig.cache.tensor("key", 2)[OTHER[0]] = 0.0
        until(lambda: not any(one.plan.direction == "onload" for one in rig.scheduler.in_flight()))
        for layer in (1, 2):
            assert not rig.layer_of(OTHER, layer, SIZE)[:, 0].any()
        request.cancel()
        request.saves[0].wait_over(WAIT_S)


def clause_25(case: Case) -> None:
    rig = case.rig()
    know(rig.manager, AWAITED_S, 1.2 * AWAITED_S)  # so it comes piece by piece: some is worth computing meanwhile
    rates: Any = rig.manager.rates
    case.copies.hold("onload", 1)
    copy = case.copies._copy

    def fail_first(number: int, plan: Any, layers: range) -> None:
        if plan.direction == "onload" and OTHER[0] in plan.device_ids.tolist() and 2 in layers:
            raise OSError("lost")
        copy(number, plan, layers)

    case.copies._copy = fail_first
    threading.Thread(target=case.go_on_soon, daemon=True).start()
    chunks = rig.prefill(TOKENS, OTHER, lambda: rates.set_prefill(SLOW_S / SIZE), chunk_tokens=CHUNK)
    assert chunks[0] == range(4 * CHUNK, len(TOKENS))  # with the loads
    assert chunks[1:] == [range(CHUNK), range(CHUNK, 2 * CHUNK), chunks[0]]  # the others have come
    case.copies._copy = copy
    rig.check_books()


def clause_26(case: Case) -> None:
    rig = case.rig(tiered=True)
    know(rig.manager, HERE_S, HERE_S, SLOW_S)  # a slow one: it is asked for the last piece, and not late yet
    rig.engine.gate.clear()  # type: ignore[union-attr]
    rig.pause = lambda tokens: keeper.call(nothing)  # what is to be read has been asked for
    rig.prefill(TOKENS, OTHER, chunk_tokens=CHUNK)
    assert rig.engine.asked > 0  # type: ignore[union-attr]
    rig.engine.gate.set()  # type: ignore[union-attr]
    rig.check_books()


def clause_27(case: Case) -> None:
    rig = case.rig()
    know(rig.manager, None, HERE_S)
    rig.manager.rates.observe_save(BLOCK_BYTES, QUICK_S)  # the link is known, and the model does not wait for it
    rig.manager.rates.observe_load = lambda *_, **__: None  # type: ignore[method-assign]  # of copies that are held
    case.copies.hold("onload", 0)
    third = [49, 50, 51, 52, 53, 54, 55, 56, 57]
    first = rig.manager.request(TOKENS, OTHER, chunk_tokens=CHUNK)
    second = rig.manager.request(TOKENS, third, chunk_tokens=CHUNK)
    assert case.copies.arrived.acquire(timeout=WAIT_S)
    assert len(rig.manager.in_flight()) == feed.MOST_LOADING
    assert second.next_chunk(timeout_s=WAIT_S) == range(CHUNK)
    case.copies.done.clear()

    def order() -> list[bool]:
        return [ids[0] in third for _, ids, layer in case.copies.done if layer == 0]

    case.copies.go_on()
    until(lambda: len(order()) >= 4)  # each is asked for when one before it ends: drain may be in between
    for request in (first, second):
        request.cancel()
        for transfer in [*request.loads, *request.saves]:
            transfer.wait_over(WAIT_S)
    assert order()[:2] == [False, False]  # they were under way
    assert order()[2:4] == [True, True]  # its model computes


def clause_28(case: Case) -> None:
    rig = case.rig()
    rig.manager.clear()
    rig.manager.rates.observe_save(BLOCK_BYTES, SLOW_S)
    case.copies.hold("offload", 0)
    save = rig.manager.save([b"other"], [60])
    assert case.copies.arrived.acquire(timeout=WAIT_S)
    rig.prefill(TOKENS, OTHER, chunk_tokens=CHUNK)
    assert rig.manager.in_flight() == [save]
    assert rig.manager.stats()["dropped_save_blocks"] == 8
    case.copies.go_on()


def clause_29(case: Case) -> None:
    rig = case.rig(tiered=True)
    know(rig.manager, HERE_S, HERE_S, QUICK_S, clock=lambda: 0.0)  # by which a rest never ends
    engine: Any = rig.engine
    engine.gate.clear()

    def pause(tokens: range) -> None:
        keeper.call(nothing)  # what is to be read has been asked for
        time.sleep(0.005)

    rig.pause = pause
    rig.prefill(TOKENS, OTHER, chunk_tokens=CHUNK)
    asked = engine.asked
    assert asked
    until(lambda: not rig.manager.in_flight())
    below: Any = rig.manager._books.below  # type: ignore[attr-defined]
    assert below.drain(WAIT_S)  # nothing but the reads holds a block
    rig.manager.evict(100)
    rig.prefill(TOKENS, OTHER, chunk_tokens=CHUNK)
    assert engine.asked == asked
    engine.gate.set()


def clause_30(case: Case) -> None:
    rig = case.rig()
    case.copies.hold("onload", 0)
    request = rig.manager.request(TOKENS, OTHER, chunk_tokens=CHUNK)
    assert case.copies.arrived.acquire(timeout=WAIT_S)
    meeting = request._meeting  # type: ignore[attr-defined]  # as the frame of an exception may
    request.cancel()
    case.copies.go_on()
    for transfer in [*request.loads, *request.saves]:
        transfer.wait_over(WAIT_S)
    assert rig.manager.in_flight() == []
    rig.check_books()
    assert rig.manager.evict(8) == 8
    del meeting


def give_up(self: Any, piece: Any) -> None:
    del self.moving[piece]
    self.line.set(piece, feeding.PieceState.LOST)


def is_done(self: Any, piece: Any) -> bool:
    return piece.state in (feeding.PieceState.LOADED, feeding.PieceState.COMPUTED, feeding.PieceState.READING)


CLAUSES: dict[int, Callable[[Case], None]] = {
    int(name.partition("_")[2]): run for name, run in list(globals().items()) if name.startswith("clause_")
}
MUTATIONS: dict[int, tuple[Any, str, Any]] = {
    24: (feeding.Meeting, "_give_up", give_up),
    25: (chunks.ChunkedRequest, "wait", lambda self, timeout_s=None: True),
    26: (feeding.Meeting, "_is_done", is_done),
    27: (feeding.Meeting, "blocks_left", property(lambda self: (False, 0))),
    28: (books.Books, "takes_saves", lambda self, num_blocks: True),
    29: (rates.Rates, "observe_late", lambda self, name, num_bytes, seconds: None),
    30: (feeding.Meeting, "end", lambda self: None),
}
