"""One prompt held together: what is loaded, computed, saved, computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import KVOffloadManager, Request
from tests.schedule.rig import WAIT_S, Copies, Rig, assert_same, cache_memory
from tests.schedule.test_failures import FailingBackend

LAYERS, SIZE = 5, 7
TOKENS = list(range(3 * SIZE + 2))


class Server:
    def __init__(self, backend: Any = "auto", **options: Any) -> None:
        self.rig = Rig(host_blocks=12)
        self.scheduler = LayerwiseScheduler(self.rig.cache, self.rig.pool, backend=backend)
        self.manager = KVOffloadManager(self.scheduler, **options)
        self.computed: list[int] = []

    def run(self, request: Request, table: list[int]) -> None:
        """A pass that writes each block with what its layer and position say."""
        self.computed.append(request.start)
        with ForwardPass(request.loads, request.saves, timeout_s=WAIT_S) as layers:
            for layer in range(LAYERS):
                with layers.layer(layer):
                    for position in range(request.start // SIZE, len(table)):
                        self.rig.cache.tensor("key", layer)[table[position]] = float(10 * position + layer)

    def prefill(self, tokens: Any, table: list[int]) -> None:
        with self.manager.request(tokens, table) as request:
            while True:
                with contextlib.suppress(TransferError):
                    self.run(request, table)
                if request.wait(WAIT_S):
                    break
        self.scheduler.drain(WAIT_S)

    def check(self, table: list[int]) -> None:
        memory = cache_memory(self.rig.cache)["key"].view(np.float16)
        for position, block in enumerate(table):
            for layer in range(LAYERS):
                assert (memory[layer, block] == 10 * position + layer).all()

    def close(self) -> None:
        self.manager.close()
        self.scheduler.close(WAIT_S)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_a_prompt_is_computed_once_and_then_from_its_last_block_on(server: Server) -> None:
    server.prefill(TOKENS, [9, 2, 11, 5])
    server.prefill(TOKENS, [0, 1, 3, 4])
    server.prefill(TOKENS[: 3 * SIZE], [0, 1, 3])  # its last token is computed: so is its block
    server.check([0, 1, 3, 4])
    assert server.computed == [0, 3 * SIZE, 2 * SIZE]
    assert server.manager.stats()["pinned_blocks"] == 0


def test_a_prompt_that_grows_needs_no_new_hashes(server: Server) -> None:
    prefix = server.manager.prefix()
    prefix.append(TOKENS)
    server.prefill(prefix, [9, 2, 11, 5])
    prefix.append([1] * SIZE)
    with server.manager.request(prefix, [0, 1, 3, 4, 6]) as request:
        assert (request.start, request.hashes) == (3 * SIZE, server.manager.block_hashes([*TOKENS, *[1] * SIZE]))
        request.cancel()
    server.scheduler.drain(WAIT_S)


def test_a_load_that_fails_is_computed_and_what_was_computed_from_it_is_not_kept(
    server: Server, copies: Copies
) -> None:
    server.prefill(TOKENS[: 2 * SIZE + 1], [9, 2, 11])
    copies.fail("onload", 3, OSError("lost"))
    server.prefill(TOKENS, [0, 1, 3, 4])
    copies.heal()
    assert server.computed == [0, 2 * SIZE, 0]
    server.check([0, 1, 3, 4])
    server.prefill(TOKENS, [6, 7, 8, 10])
    server.check([6, 7, 8, 10])
    assert server.computed[-1] == 3 * SIZE


def failing(server: Server, copies: Copies) -> Request:
    """Of a prompt whose first two blocks were saved, and whose load fails."""
    server.prefill(TOKENS[: 2 * SIZE + 1], [9, 2, 11])
    copies.fail("onload", 3, OSError("lost"))
    request = server.manager.request(TOKENS, [0, 1, 3, 4])
    request.loads[0].wait_over(WAIT_S)
    copies.heal()
    return request


def test_what_was_computed_from_a_failed_load_is_saved_anew(server: Server, copies: Copies) -> None:
    request = failing(server, copies)
    for layer in range(LAYERS):  # a pass that has not noticed
        server.rig.cache.tensor("key", layer)[3] = 99.0
        request.saves[0].mark_layer_written(layer)
    request.saves[0].wait_over(WAIT_S)
    assert not request.wait(WAIT_S)
    server.run(request, [0, 1, 3, 4])
    assert request.wait(WAIT_S)
    server.scheduler.drain(WAIT_S)
    server.prefill(TOKENS, [6, 7, 8, 10])
    assert server.computed[-1] == 3 * SIZE
    server.check([6, 7, 8, 10])


def test_blocks_that_were_computed_after_a_failed_load_can_be_saved(server: Server, copies: Copies) -> None:
    request = failing(server, copies)
    assert not request.wait(WAIT_S)  # also of a pass that was not begun
    server.run(request, [0, 1, 3, 4])
    server.scheduler.drain(WAIT_S)
    server.manager.save([b"other", b"name"], [0, 1]).wait(WAIT_S)


def test_no_pass_begins_while_the_load_that_failed_still_moves(server: Server, copies: Copies) -> None:
    server.prefill(TOKENS[: 2 * SIZE + 1], [9, 2, 11])
    copies.hold("onload", 2)
    with server.manager.request(TOKENS, [0, 1, 3, 4]) as request:
        assert copies.arrived.acquire(timeout=WAIT_S)
        request.loads[0].cancel()
        with pytest.raises(TimeoutError):
            request.wait(0.05)
        copies.go_on()
        assert not request.wait(WAIT_S)
        assert request.start == 0
        request.cancel()
    server.scheduler.drain(WAIT_S)


def test_no_pass_begins_while_a_save_of_the_one_before_still_moves(server: Server, copies: Copies) -> None:
    request = failing(server, copies)
    copies.hold("offload", 1)
    for layer in range(2):
        request.saves[0].mark_layer_written(layer)
    assert copies.arrived.acquire(timeout=WAIT_S)
    with pytest.raises(TimeoutError):
        request.wait(0.05)
    assert request.saves[0].state.value == "arriving"  # of its other layers nothing is marked
    copies.go_on()
    assert not request.wait(WAIT_S)
    request.cancel()
    server.scheduler.drain(WAIT_S)


@pytest.mark.parametrize("chunk_tokens", [None, SIZE, 2 * SIZE])
def test_the_next_prompt_has_the_blocks_of_one_that_was_aborted(
    server: Server, copies: Copies, chunk_tokens: int | None
) -> None:
    """Its load has left nothing usable in them, and nobody but the next pass will write them."""
    server.prefill(TOKENS, [9, 2, 11, 5])
    table = [0, 1, 3, 4]
    copies.hold("onload", 2)
    request = server.manager.request(TOKENS, table, chunk_tokens=chunk_tokens, how="load")
    assert request.next_chunk(timeout_s=WAIT_S) == range(3 * SIZE, len(TOKENS))
    assert copies.arrived.acquire(timeout=WAIT_S)
    request.cancel()
    copies.go_on()
    for transfer in [*request.loads, *request.saves]:
        transfer.wait_over(WAIT_S)
    assert server.rig.cache.domain.poisoned(table) == [0, 1, 3]
    table = [1, 3, 4, 0]  # also where a block is not full
    others = [token + 100 for token in TOKENS]
    with server.manager.request(others, table, chunk_tokens=chunk_tokens) as following:
        while (chunk := following.next_chunk(timeout_s=WAIT_S)) is not None:
            server.run(following, table[: -(-chunk.stop // SIZE)])
    server.scheduler.drain(WAIT_S)
    server.check(table)
    assert server.rig.cache.domain.poisoned(range(server.rig.cache.num_blocks)) == []
    server.prefill(others, [6, 7, 8, 10])
    server.check([6, 7, 8, 10])
    assert server.computed[-1] == 3 * SIZE


def test_a_damaged_block_is_computed_without_a_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_KV_CHECKSUM", "1")
    server = Server()
    server.prefill(TOKENS, [9, 2, 11, 5])
    slot = server.manager._books.index.slots[server.manager.block_hashes(TOKENS)[1]]
    server.rig.pool.view("key", 2, slot)[...] = 1
    server.prefill(TOKENS, [0, 1, 3, 4])
    server.check([0, 1, 3, 4])
    assert server.computed == [0, 0]
    server.prefill(TOKENS, [0, 1, 3, 4])
    assert server.computed[-1] == 3 * SIZE
    server.close()


def test_a_prompt_that_raises_holds_and_keeps_nothing(server: Server) -> None:
    server.prefill(TOKENS[: SIZE + 1], [9, 2])
    with pytest.raises(ZeroDivisionError), server.manager.request(TOKENS, [0, 1, 3, 4]) as request:
        raise ZeroDivisionError
    with pytest.raises(CancelledError):
        request.saves[0].wait(WAIT_S)
    server.scheduler.drain(WAIT_S)
    assert server.manager.peek(request.hashes) == 1
    stats = server.manager.stats()
    assert (stats["pinned_blocks"], stats["saving_blocks"]) == (0, 0)


def test_a_request_whose_save_cannot_begin_leaves_no_load_behind(
    server: Server, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.prefill(TOKENS[: 2 * SIZE + 1], [9, 2, 11])

    def refuse(*given: Any, **options: Any) -> None:
        copies.go_on()
        raise ZeroDivisionError

    copies.hold("onload", 3)
    monkeypatch.setattr(server.manager, "blocks_full", refuse)
    with pytest.raises(ZeroDivisionError):
        server.manager.request(TOKENS, [0, 1, 3, 4])
    assert server.manager.in_flight() == []
    assert server.manager.stats()["pinned_blocks"] == 0


def test_a_load_that_cannot_begin_is_computed_and_saved() -> None:
    backend = FailingBackend()
    server = Server(backend=backend)
    server.prefill(TOKENS, [9, 2, 11, 5])
    backend.fail("copy_layers", 1, OSError("lost"))
    server.prefill(TOKENS, [0, 1, 3, 4])
    server.check([0, 1, 3, 4])
    assert server.computed == [0, 0]
    server.manager.save([b"other", b"name"], [0, 1]).wait(WAIT_S)
    server.close()


def test_with_write_back_it_saves_nothing(copies: Copies) -> None:
    server = Server(write_through=False)
    server.prefill(TOKENS, [9, 2, 11, 5])
    assert server.manager.stats()["saved_blocks"] == 0
    server.manager.blocks_evicted(server.manager.block_hashes(TOKENS), [9, 2, 11]).wait(WAIT_S)
    server.prefill(TOKENS, [0, 1, 3, 4])
    assert server.computed == [0, 3 * SIZE]
    server.close()


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [([0, 1, 2], ValueError, "device_block_ids has 3 blocks; 23 tokens need 4"), ([0, 1, 2, 13], IndexError, "13")],
)
def test_a_table_that_does_not_fit_moves_nothing(server: Server, table: Any, error: Any, message: str) -> None:
    server.prefill(TOKENS, [9, 2, 11, 5])
    before, stats = cache_memory(server.rig.cache), server.manager.stats()
    with pytest.raises(error, match=message):
        server.manager.request(TOKENS, table)
    assert_same(cache_memory(server.rig.cache), before)
    assert server.manager.stats() == stats


def test_a_prompt_whose_prefix_is_dropped_and_saved_anew_behind_its_lookup_is_computed(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    server.prefill(TOKENS, [0, 1, 2, 3])
    hashes = server.manager.block_hashes(TOKENS)
    lookup = KVOffloadManager.lookup

    def followed(self: KVOffloadManager, *arguments: Any, **options: Any) -> Any:
        lease = lookup(self, *arguments, **options)
        self.drop(hashes)  # another thread's
        copies.hold("offload", 1)
        self.save(hashes, [0, 1, 2])
        return lease

    with monkeypatch.context() as patch:
        patch.setattr(KVOffloadManager, "lookup", followed)
        request = server.manager.request(TOKENS, [4, 5, 6, 7])
    assert (request.start, request.loads) == (0, [])
    copies.go_on()
    server.run(request, [4, 5, 6, 7])
    assert request.wait(WAIT_S)
    server.scheduler.drain(WAIT_S)
    server.check([4, 5, 6, 7])
    server.close()
