"""An engine over neighbours into which the suite can store: what it is given a lender in this process lends."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_kv import HostPool
from paddle_kv.memory.host_rows import block_rows
from paddle_kv.testing.tiers.rig import WAIT_S
from paddle_kv.tiers import Outcome, Write
from paddle_kv.tiers.neighbours import Lender, NeighbourEngine
from tests.peers.conftest import until


class Written(NeighbourEngine):
    """``lender`` is made for the first object, and has room for objects of its size; those stored first make room."""

    def __init__(self, capacity_bytes: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="paddle_kv-")
        super().__init__([Path(self.folder) / "lender"])
        self.capacity_bytes = capacity_bytes
        self.lender: Lender | None = None
        self._writing = threading.Lock()
        self._order: dict[bytes, int] = {}  # key -> block

    def write(self, items: Sequence[Write]) -> None:
        for item in items:
            found = None if self._closed else item.buffers()
            if found is None:
                item.ended(Outcome.DROPPED)
                continue
            header, payload = (bytes(buffer) for buffer in found)
            with self._writing:
                self._lend(item, header, payload)
            item.ended(Outcome.DONE)

    def _lend(self, item: Any, header: bytes, payload: bytes) -> None:
        if self.lender is None:
            self._make_lender(item._tier.pool.spec, item.size_bytes)
        lender, key = self.lender, item.key
        assert lender is not None
        if key in self._order:
            block = self._order.pop(key)
            lender.take_back([key])
            until(lambda: item.name not in self._neighbours[0].names)  # else what is waited for below would be there
        elif len(self._order) < lender.pool.num_blocks:
            block = len(self._order)
        else:
            oldest = next(iter(self._order))
            block = self._order.pop(oldest)
            lender.take_back([oldest])
        with lender.pool.lease([block], write=True, timeout_s=WAIT_S):
            block_rows(lender.pool)[block] = bytearray(payload)
        self._order[key] = block
        lender.lend([key], [block])
        made = bytearray(len(header))
        lender._form.write_headers([(memoryview(made), key, memoryview(payload))])
        if bytes(made) != header:  # it was spoiled on the way: as memory that decays behind its checksums
            one = lender._lent.objects[item.name]
            one.has_header = True
            lender._lent._header(block)[:] = header
        until(lambda: item.name in self._neighbours[0].names)

    def _make_lender(self, spec: Any, object_bytes: int) -> None:
        pool = HostPool(spec, self.capacity_bytes // object_bytes, layout="block_first", shared=True)
        self.lender = Lender(pool, model=b"model", path=Path(self.folder) / "lender")
        self._loop.post(self._neighbours[0].call)
        self.wait_connected(WAIT_S)

    def close(self, timeout_s: float | None = None) -> None:
        super().close(timeout_s)
        if self.lender is not None and not self.lender.pool.closed:
            until(lambda: not self.lender or not self.lender.stats()["leased_blocks"])  # nothing is left
            self.lender.close(timeout_s)
            self.lender.pool.close()
        shutil.rmtree(self.folder, ignore_errors=True)
