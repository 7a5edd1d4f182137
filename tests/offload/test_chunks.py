"""Prompts that are computed from the front while what was found of them comes from the back."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.offload.chunk_rig import SIZE, WAIT_S, ChunkRig, Rates, contents
from tests.schedule.rig import Copies

CHUNK = 2 * SIZE
TOKENS = list(range(5 * CHUNK + 3))
TABLE = [9, 2, 11, 5, 30, 31, 7, 8, 1, 12, 20]


@pytest.fixture
def rig() -> Iterator[ChunkRig]:
    made = ChunkRig()
    yield made
    made.close()


def test_without_anything_found_each_chunk_is_computed_once(rig: ChunkRig) -> None:
    chunks = rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    assert chunks == [range(start, min(start + CHUNK, len(TOKENS))) for start in range(0, len(TOKENS), CHUNK)]
    rig.check_books()
    assert rig.manager.stats()["saved_blocks"] == 10


def test_what_is_there_is_not_computed(rig: ChunkRig) -> None:
    rig.prefill(TOKENS, TABLE, chunk_tokens=CHUNK)
    rig.scheduler.drain(WAIT_S)
    rig.pause = lambda tokens: time.sleep(0.02)
    chunks = rig.prefill(TOKENS, TABLE[::-1], chunk_tokens=CHUNK)
    print(chunks)
    assert chunks[0].start == 0
    assert len(chunks) <= 3
    rig.check_books()
