"""Loads of some of the layers: what they leave alone, what waits for them, what they wait for, how they fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_kv import CancelledError, LayerwiseScheduler, TransferError
from paddle_kv.schedule.trace import spans_of
from tests.schedule.rig import SHORT_S, WAIT_S, Copies, Rig

LAYERS = 5


@pytest.fixture
def scheduler(rig: Rig) -> Iterator[LayerwiseScheduler]:
    with LayerwiseScheduler(rig.cache, rig.pool, record_layer_times=True) as made:
        yield made


@pytest.mark.parametrize("layers", [[0], [4], [1, 3], [3, 1], range(1, 4), range(5), []])
def test_only_these_layers_move(rig: Rig, scheduler: LayerwiseScheduler, layers: list[int]) -> None:
    load = scheduler.onload([2, 11, 7], [0, 1, 4], layers=layers)
    load.wait(WAIT_S)
    rig.expect_onload([2, 11, 7], [0, 1, 4], layers)
    rig.check()
    assert load.bytes == 3 * rig.spec.block_bytes * len(layers) == scheduler.stats()["onload_bytes"]
    assert [span.layer for span in spans_of(load)] == sorted(layers)
    for layer in range(LAYERS):
        load.wait_layer(layer, timeout_s=WAIT_S)


def test_a_layer_that_is_left_out_is_not_waited_for(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    copies.hold("onload", 1)
    load = scheduler.onload([3], [0], layers=[1, 4])
    for layer in (0, 2, 3):
        load.wait_layer(layer, timeout_s=SHORT_S)
    with pytest.raises(TimeoutError):
        load.wait_layer(4, timeout_s=SHORT_S)
    copies.go_on()
    load.wait_on(timeout_s=WAIT_S)
    load.wait(WAIT_S)
    rig.expect_onload([3], [0], [1, 4])
    rig.check()


def test_who_reads_the_block_waits_for_the_load_before_it_too(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies
) -> None:
    """The layers that the second load leaves out come from the first one, which is still under way."""
    with LayerwiseScheduler(rig.cache, rig.pool) as other:  # streams of its own
        copies.hold("onload", 3)
        first = scheduler.onload([3], [0])
        second = other.onload([4], [0], layers=[0, 1])
        save = other.offload([0], [9])
        second.wait_layer(1, timeout_s=WAIT_S)
        with pytest.raises(TimeoutError):
            save.wait(SHORT_S)
        copies.go_on()
        save.wait(WAIT_S)
        first.wait(WAIT_S)
    rig.expect_onload([3], [0])
    rig.expect_onload([4], [0], [0, 1])
    rig.expect_offload([0], [9])
    rig.check()


def test_who_reads_the_block_waits_for_a_load_that_is_not_submitted(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies
) -> None:
    copies.hold("onload", 0)
    first = scheduler.offload([7], [4], layerwise=True)
    scheduler.onload([4], [0], layers=[0, 1])
    save = scheduler.offload([0], [9])
    for layer in range(LAYERS):
        first.mark_layer_written(layer)
    with pytest.raises(TimeoutError):
        save.wait(SHORT_S)
    copies.go_on()
    save.wait(WAIT_S)
    rig.expect_offload([7], [4])
    rig.expect_onload([4], [0], [0, 1])
    rig.expect_offload([0], [9])
    rig.check()


def test_a_load_of_some_layers_does_not_heal_a_block(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    copies.fail("onload", 3, OSError("lost"))
    with pytest.raises(TransferError):
        scheduler.onload([3], [0]).wait(WAIT_S)
    copies.heal()
    with pytest.raises(TransferError, match="block 0 of the device cache holds no usable data"):
        scheduler.onload([3], [0], layers=[0, 1])
    rig.cache.mark_rewritten([0])
    scheduler.onload([3], [0], layers=[0, 1]).wait(WAIT_S)
    scheduler.offload([0], [9]).wait(WAIT_S)


def test_a_load_behind_one_that_heals_the_block(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    copies.fail("onload", 3, OSError("lost"))
    with pytest.raises(TransferError):
        scheduler.onload([3], [0]).wait(WAIT_S)
    copies.heal()
    copies.hold("onload", 4)
    scheduler.onload([5], [0])
    second = scheduler.onload([4], [0], layers=[0, 1])
    copies.go_on()
    second.wait(WAIT_S)
    scheduler.offload([0], [9]).wait(WAIT_S)


def test_who_writes_the_block_waits_for_those_that_read_the_other_layers(
    rig: Rig, scheduler: LayerwiseScheduler
) -> None:
    save = scheduler.offload([0], [9], layerwise=True)
    for layer in (0, 1):
        save.mark_layer_written(layer)
    scheduler.onload([4], [0], layers=[0, 1]).wait(WAIT_S)
    load = scheduler.onload([3], [0])
    with pytest.raises(TimeoutError):
        load.wait(SHORT_S)
    for layer in (2, 3, 4):
        save.mark_layer_written(layer)
    load.wait(WAIT_S)
    rig.expect_offload([0], [9])
    rig.expect_onload([3], [0])
    rig.check()


def test_a_layer_that_is_left_out_holds_nobody(rig: Rig, scheduler: LayerwiseScheduler, copies: Copies) -> None:
    copies.hold("onload", 4)
    load = scheduler.onload([3], [0], layers=[0, 4])
    save = scheduler.offload([0], [9])
    save.wait_layer(3, timeout_s=WAIT_S)
    assert [load._movement.is_ordered_before(None, layer) for layer in (1, 4, -1)] == [True, False, False]
    copies.go_on()
    save.wait(WAIT_S)
    rig.expect_onload([3], [0], [0, 4])
    rig.expect_offload([0], [9])
    rig.check()


def test_a_load_fails_with_the_one_whose_layers_it_leaves(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies
) -> None:
    copies.hold("onload", 3)
    copies.fail("onload", 3, OSError("lost"))
    first = scheduler.onload([3], [0])
    second = scheduler.onload([4], [0], layers=[0, 1])
    copies.go_on()
    for load in (first, second):
        with pytest.raises(TransferError, match="lost"):
            load.wait(WAIT_S)
    with pytest.raises(TransferError, match="block 0 of the device cache holds no usable data"):
        scheduler.offload([0], [9])


def test_a_cancelled_load_names_a_layer_that_it_would_have_moved(
    rig: Rig, scheduler: LayerwiseScheduler, copies: Copies
) -> None:
    save = scheduler.offload([0], [9], layerwise=True)
    load = scheduler.onload([4], [0], layers=[2, 4])
    load.cancel()
    with pytest.raises(CancelledError, match="before layer 2 was moved"):
        load.wait(WAIT_S)
    save.cancel()


def test_layers_that_share_an_event_go_together(rig: Rig) -> None:
    with LayerwiseScheduler(rig.cache, rig.pool, layers_per_event=2) as scheduler:
        with pytest.raises(ValueError, match=r"layers = \[1, 2, 3\] must name all or none of \[0, 1\]"):
            scheduler.onload([3], [0], layers=[1, 2, 3])
        scheduler.onload([3], [0], layers=[4, 2, 3]).wait(WAIT_S)
    rig.expect_onload([3], [0], [2, 3, 4])
    rig.check()


@pytest.mark.parametrize("blocks", [[3], []])
@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ([5], IndexError, r"layers\[0\] = 5 must be in \[0, 5\)"),
        ([-1], IndexError, "layers"),
        (1.0, TypeError, "layers"),
    ],
)
def test_wrong_layers(
    rig: Rig, scheduler: LayerwiseScheduler, layers: object, error: type, text: str, blocks: list[int]
) -> None:
    with pytest.raises(error, match=text):
        scheduler.onload(blocks, blocks, layers=layers)
    rig.check()


def test_what_comes_behind_it_is_behind_what_the_left_out_layers_were_behind(
    rig: Rig, scheduler: LayerwiseScheduler
) -> None:
    """Also when it is over long before."""
    save = scheduler.offload([0], [5], layerwise=True)
    load = scheduler.onload([3], [0], layers=[1])
    save.mark_layer_written(1)
    load.wait(WAIT_S)
    whole = scheduler.onload([4], [0])
    with pytest.raises(TimeoutError):
        whole.wait_layer(0, timeout_s=SHORT_S)
    rig.expect_offload([0], [5])
    for layer in (0, 2, 3, 4):
        save.mark_layer_written(layer)
    whole.wait(WAIT_S)
    save.wait(WAIT_S)
    rig.expect_onload([4], [0])
    rig.check()
