"""One lender, as the engine knows it. All but what is looked up happens in the thread of the engine's channel."""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import AttachError, PeerError
from ...memory.shared_memory import SharedHandle, SharedMemory, host_identity, map_shared
from ...peers.connection import Line, Loop
from ...peers.unix_socket import check_user
from ...tracking.keeper import log
from ..protocol import Read
from .messages import ABSENT, BUSY, TO_READER, VERSION, encode, heard

FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0  # until it is called again
ANSWER_S = 2.0  # what has not been answered by then is not waited for


class Memory:
    """What a lender has: its blocks, and a header for each of them. Lives as long as anybody refers to it."""

    def __init__(self, blocks: SharedMemory, headers: SharedMemory, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.header_bytes = headers.size_bytes // num_blocks
        block_bytes = blocks.size_bytes // num_blocks
        self.object_bytes = self.header_bytes + block_bytes
        self._blocks = blocks.array().reshape(num_blocks, block_bytes)
        self._headers = headers.array().reshape(num_blocks, self.header_bytes)

    def copy(self, block_id: int, offset: int, targets: Sequence[memoryview]) -> None:
        """Bytes of the object in a block, from ``offset`` on, into the targets, one behind the other. None of them has
        bytes of both header and block."""
        for target in targets:
            in_block = offset - self.header_bytes
            row, start = (self._headers, offset) if in_block < 0 else (self._blocks, in_block)
            source = row[block_id, start : start + len(target)]
            if len(source) != len(target):
                raise ValueError(f"{len(target)} bytes from {offset} on are not all in the header, or in the block")
            np.copyto(np.frombuffer(target, np.uint8), source)  # without the interpreter's lock
            offset += len(target)


@dataclass(eq=False)
class Answer:
    """What a lender has said to a question.

    Attributes:
        found: objects with their blocks, which may be read until ``done`` is called.
        absent: those that are not there.
        busy: those that cannot be read now.
    """

    memory: Memory
    found: list[tuple[Read, int]]
    absent: list[Read]
    busy: list[Read]
    done: Callable[[], object]


@dataclass(eq=False)
class _Question:
    items: list[Read]
    answered: Callable[[Answer | None], object]


class Neighbour:
    """Args:
        loop: of the engine.
        path: of the lender.
        changed: is called when :attr:`told` is set.

    Attributes:
        names: of what it lends; a hint.
        num_reading: answers of which objects are being read.
        busy: what could not be read beside these.
        told: whether it has said all that it lent when it was reached.
        removed: how many it has told that were not lent any more.
        silent: whether a question was not answered within two seconds. Until it says anything it is not asked again.
    """

    def __init__(self, loop: Loop, path: str, changed: Callable[[], object]) -> None:
        self.path = path
        self.names: set[bytes] = set()
        self.memory: Memory | None = None
        self.silent = self.told = False
        self.num_reading = 0
        self.busy: list[Read] = []
        self.removed = self.refused = self.errors = 0
        self._loop, self._changed = loop, changed
        self._line: Line | None = None
        self._retry_s = FIRST_RETRY_S
        self._complaint: str | None = None
        self._questions: dict[int, _Question] = {}
        self._num_asked = 0
        self._num_heard = 0
        self._closed = False

    @property
    def asked(self) -> bool:
        """Whether it is there, and answers."""
        return self.memory is not None and not self.silent

    # ---- in the thread of the loop ----
    def call(self) -> None:
        """Connects; later again, if nobody is there."""
        if self._closed or self._line is not None:
            return
        connecting = None
        try:
            connecting = socket.socket(socket.AF_UNIX)
            connecting.setblocking(False)  # a lender that is stopped takes no connections
            connecting.connect(self.path)
            line = Line(self._loop, connecting, self._heard, self._ended)
            check_user(line, self.path)
        except (OSError, PeerError) as error:
            if connecting is not None:
                connecting.close()
            if getattr(error, "errno", None) not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                self._complain(f"the neighbour at {self.path} cannot be reached: {error}")
            self._call_later()
            return
        self._line = line
        line.start()
        line.send(encode("join", version=VERSION))

    def ask(self, items: list[Read], timeout_s: float, answered: Callable[[Answer | None], object]) -> None:
        """Whether these can be read for so long. ``answered`` is called once; None: it has not answered."""
        assert self._line is not None
        number = self._num_asked
        self._num_asked += 1
        self._questions[number] = _Question(items, answered)
        names = [item.name for item in items]
        self._line.send(encode("read", number=number, names=names, timeout_ms=int(timeout_s * 1000)))
        wait_s = min(timeout_s, ANSWER_S)
        self._loop.later(wait_s, functools.partial(self._give_up, number, self._line, ANSWER_S - wait_s))

    def close(self) -> None:
        self._closed = True
        self._hang_up()

    def _complain(self, text: str) -> None:
        """Once, though it is called again and again."""
        if text != self._complaint:
            self._complaint = text
            log.warning("%s", text)

    def _call_later(self) -> None:
        self._loop.later(self._retry_s, self.call)
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)

    def _give_up(self, number: int, line: Line, rest_s: float) -> None:
        question = self._questions.pop(number, None)
        if question is not None:
            if rest_s > 0:  # those who asked could not wait longer; others may
                self._loop.later(rest_s, functools.partial(self._leave_alone, self._num_heard))
            else:
                self.silent = True
            self.errors += 1
            line.send(encode("done", number=number))  # if it is only slow
            question.answered(None)

    def _leave_alone(self, num_heard: int) -> None:
        """Unless it has said anything since."""
        if num_heard == self._num_heard:
            self.silent = True

    def _ended(self, line: Line) -> None:
        if line is self._line:
            self._hang_up()
            self._call_later()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        self.memory, self.names = None, set()
        self.silent = self.told = False
        questions, self._questions = self._questions, {}
        if line is not None:
            line._close()
        for question in questions.values():
            self.errors += 1
            question.answered(None)

    def _heard(self, line: Line, data: bytes) -> None:
        if line is not self._line:
            return
        self.silent = False
        self._num_heard += 1
        message = heard(data, TO_READER)
        if message is None or not getattr(self, "_" + message.pop("kind"))(line, **message):
            self.refused += 1

    # ---- messages: whether they make sense ----
    def _hello(
        self,
        line: Line,
        version: int,
        host: str,
        num_blocks: int,
        block_bytes: int,
        header_bytes: int,
        blocks: list[Any],
        headers: list[Any],
    ) -> bool:
        if self.memory is not None or version != VERSION:
            return False
        try:
            if host != host_identity():
                raise AttachError(f"it is on another host, or in another container: {host!r}")
            sizes = num_blocks * block_bytes, num_blocks * header_bytes
            there, above = [
                map_shared(_handle(given, line.process_id, size))
                for given, size in zip((blocks, headers), sizes, strict=True)
            ]
        except (AttachError, MemoryError) as error:
            self._complain(f"the memory of the neighbour at {self.path} cannot be used: {error}")
            self._ended(line)  # it may be for want of descriptors, of which there are more later
            return False
        self._complaint = None
        self.memory = Memory(there, above, num_blocks)
        self._retry_s = FIRST_RETRY_S
        line.send(encode("more"))
        return True

    def _news(self, line: Line, added: list[bytes], removed: list[bytes], is_all: bool) -> bool:
        if self.memory is None or len(self.names) > 2 * self.memory.num_blocks:
            return False
        self.names.difference_update(removed)
        self.names.update(added)
        self.removed += len(removed)
        line.send(encode("more"))
        if is_all and not self.told:
            self.told = True
            self._changed()
        return True

    def _lent(self, line: Line, number: int, blocks: list[Any]) -> bool:
        question = self._questions.get(number)
        if question is None:
            return number < self._num_asked  # given up meanwhile
        memory = self.memory
        assert memory is not None  # of whom has been asked
        if len(blocks) != len(question.items):
            return False
        if not all(type(one) is int and BUSY <= one < memory.num_blocks for one in blocks):
            return False
        del self._questions[number]
        pairs = list(zip(question.items, blocks, strict=True))
        absent = [item for item, block in pairs if block == ABSENT]
        self.names.difference_update(item.name for item in absent)
        found = [(item, block) for item, block in pairs if block >= 0]
        busy = [item for item, block in pairs if block == BUSY]
        done = functools.partial(line.send, encode("done", number=number))
        question.answered(Answer(memory, found, absent, busy, done))
        return True


def _handle(given: list[Any], process_id: int, size_bytes: int) -> SharedHandle:
    """AttachError unless it is one of that process, and of so many bytes."""
    kinds = [type(one) for one in given]
    if kinds != [int, int, str, int] or given[0] != process_id or given[3] != size_bytes:
        raise AttachError(f"{given!r} is no memory of {size_bytes} bytes of process {process_id}")
    return SharedHandle(*given)
