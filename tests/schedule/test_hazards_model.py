"""The tracker against one that keeps a writer, a list of readers and the leases of each block by itself."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from paddle_kv.errors import LeasedError, TransferError
from paddle_kv.tracking.domain import BlockDomain

BLOCKS = range(7)
some = st.lists(st.sampled_from(BLOCKS), max_size=5)
distinct = st.lists(st.sampled_from(BLOCKS), max_size=5, unique=True)
as_given = st.sampled_from([list, tuple, lambda ids: np.array(ids, np.int64)])


@dataclass(eq=False)
class Move:
    """A transfer, as the tracker and as this test see it."""

    ids: list[int]
    writes: bool
    spoiled: bool = False
    number: int = field(default_factory=itertools.count(1).__next__)


@dataclass
class Block:
    writer: Move | None = None
    readers: set[Move] = field(default_factory=set)
    read_leases: int = 0
    write_lease: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.writer or self.readers or self.read_leases or self.write_lease)


class Machine(RuleBasedStateMachine):
    moves = Bundle("moves")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.domain = BlockDomain(num_blocks=16)
        self.blocks: dict[int, Block] = defaultdict(Block)
        self.poison: set[int] = set()
        self.live: set[Move] = set()
        self.met: set[Move] = set()  # those that were beside another one

    def refusal(self, ids: list[int], writes: bool) -> tuple[type[Exception], str] | None:
        for block_id in ids:
            block = self.blocks[block_id]
            if block.write_lease or (writes and block.read_leases):
                return LeasedError, f"block {block_id} of the pool is leased"
        for block_id in ids:
            block = self.blocks[block_id]
            if not writes and block_id in self.poison and (block.writer is None or block.writer.spoiled):
                return TransferError, f"block {block_id} of the pool holds no usable data"
        return None

    @rule(target=moves, ids=some, form=as_given)
    def read(self, ids: list[int], form: Any) -> Move:
        move = self.begun(Move(ids, writes=False))
        writers = {self.blocks[i].writer for i in ids} - {None}
        assert self.domain.read(form(ids), move) == writers
        for block_id in ids:
            self.blocks[block_id].readers.add(move)
        return move

    @rule(target=moves, ids=distinct, form=as_given)
    def write(self, ids: list[int], form: Any) -> Move:
        move = self.begun(Move(ids, writes=True))
        before = {self.blocks[i].writer for i in ids} - {None}
        before.update(*(self.blocks[i].readers for i in ids))
        assert self.domain.write(form(ids), move) == before
        for block_id in ids:
            self.blocks[block_id].writer = move
            self.blocks[block_id].readers = set()
        return move

    @rule(ids=some, writes=st.booleans(), form=as_given)
    def check(self, ids: list[int], writes: bool, form: Any) -> None:
        expected = self.refusal(ids, writes)
        if expected is None:
            self.domain.check(form(ids), "pool", writing=writes)
            return
        with pytest.raises(expected[0], match=expected[1]) as raised:
            self.domain.check(form(ids), "pool", writing=writes)
        if expected[0] is TransferError:
            assert raised.value.block_ids == [i for i in ids if i in self.poison]

    @rule(move=moves)
    def fail(self, move: Move) -> None:
        if not move.writes:
            return
        move.spoiled = True
        self.domain.poison(move.ids, move, "broken")
        self.poison.update(i for i in move.ids if self.blocks[i].writer is move)

    def begun(self, move: Move) -> Move:
        if self.live:
            self.met |= {*self.live, move}
        self.live.add(move)
        return move

    @rule(move=consumes(moves))
    def release(self, move: Move) -> None:
        self.live.discard(move)
        written = move.writes and not move.spoiled
        self.domain.release(move, written=written)
        for block_id, block in self.blocks.items():
            block.readers.discard(move)
            if block.writer is move:
                block.writer = None
                if written:
                    self.poison.discard(block_id)

    @rule(ids=some)
    def mark_rewritten(self, ids: list[int]) -> None:
        self.domain.mark_rewritten(ids)
        self.poison.difference_update(ids)

    @rule(target=leases, ids=distinct, write=st.booleans())
    def lease(self, ids: list[int], write: bool) -> tuple[list[int], bool]:
        blocks = [self.blocks[i] for i in ids]
        refused = any(b.writer or b.write_lease or (write and (b.readers or b.read_leases)) for b in blocks)
        assert self.domain.try_lease(ids, write=write) == (not refused)
        if refused:
            return [], write
        for block in blocks:
            block.write_lease |= write
            block.read_leases += not write
        return ids, write

    @rule(lease=consumes(leases))
    def end_lease(self, lease: tuple[list[int], bool]) -> None:
        ids, write = lease
        if not ids:
            return
        self.domain.end_lease(ids[::-1], write=write)
        for block_id in ids:
            self.blocks[block_id].write_lease &= not write
            self.blocks[block_id].read_leases -= not write

    @rule(ids=some)
    def holders(self, ids: list[int]) -> None:
        expected = {move for i in ids for move in [*self.blocks[i].readers, self.blocks[i].writer] if move}
        assert self.domain.holders(ids) == sorted(expected, key=lambda move: move.number)

    @rule(ids=distinct, writing=st.booleans())
    def users(self, ids: list[int], writing: bool) -> None:
        found = {(move, is_writer) for _, move, is_writer in self.domain.users(ids, writing=writing)}
        expected = {(self.blocks[i].writer, True) for i in ids if self.blocks[i].writer}
        if writing:
            expected |= {(reader, False) for i in ids for reader in self.blocks[i].readers}
        assert found == expected

    @rule()
    def holds_what_it_should(self) -> None:
        """Not behind each step: who asks makes the tracker write down what it left for later."""
        busy = [i for i in BLOCKS if self.blocks[i].busy]
        assert self.domain.busy(BLOCKS) == busy
        assert [i for i in BLOCKS if self.domain.is_busy(i)] == busy
        assert self.domain.poisoned(BLOCKS) == sorted(self.poison)

    @rule(ids=distinct)
    def lone_holders(self, ids: list[int]) -> None:
        found = self.domain.lone_holders(ids)
        assert [move.number for move in found] == sorted(move.number for move in found)
        writers = {self.blocks[i].writer for i in ids} - {None}
        readers = {reader for i in ids for reader in self.blocks[i].readers}
        assert writers <= set(found) <= writers | readers
        if not self.live & self.met:  # of one that reads beside others, the last one to end will be heard of
            assert set(found) == writers | readers

    def teardown(self) -> None:
        self.holds_what_it_should()


TestMachine = Machine.TestCase
