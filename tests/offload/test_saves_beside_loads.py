"""Saves, however many, do not hold up a load: not even by the call of an engine that is under way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.offload.chunk_rig import SPEC, WAIT_S, ChunkRig
from tests.schedule.rig import SHORT_S, Copies

KEYS = [bytes([number]) for number in range(40)]


@pytest.fixture
def rig(copies: Copies) -> Iterator[ChunkRig]:
    made = ChunkRig()
    made.manager.save(KEYS[:4], [0, 1, 2, 3]).wait(WAIT_S)
    copies.done.clear()
    yield made
    copies.go_on()
    made.close()


def test_a_load_is_through_before_the_call_of_a_save_that_is_under_way(rig: ChunkRig, copies: Copies) -> None:
    copies.hold("offload", 0)
    saves = [rig.manager.save([KEYS[number]], [number]) for number in range(10, 40)]
    assert copies.arrived.acquire(timeout=WAIT_S)
    rig.manager.onload(KEYS[:4], [4, 5, 6, 7]).wait(WAIT_S)
    assert [one[0] for one in copies.done] == ["onload"] * SPEC.num_layers
    assert not any(save.done() for save in saves)


def test_a_load_into_blocks_that_are_being_saved_waits_for_that_save_alone(rig: ChunkRig, copies: Copies) -> None:
    """Layer by layer; those behind it in the queue it passes."""
    copies.hold("offload", 0, 1)
    saves = [rig.manager.save([KEYS[number]], [number]) for number in range(10, 40)]
    assert copies.arrived.acquire(timeout=WAIT_S)
    load = rig.manager.onload(KEYS[:1], [10])
    with pytest.raises(TimeoutError):
        load.wait(SHORT_S)
    copies.go_on("offload", 0)
    load.wait_layer(0, timeout_s=WAIT_S)
    before = [(direction, layer) for direction, _, layer in copies.done]
    assert before == [("offload", 0), ("onload", 0)]
    copies.go_on()
    load.wait(WAIT_S)
    saves[-1].wait(WAIT_S)
