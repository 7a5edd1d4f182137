"""Passes over a ring: three layers in two layer buffers, so that the last one lies where the first one lay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from paddle_kv import DeviceCache, HostPool, Transfer, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.testing.simulator.device import SimulatedStream

from .scenarios import DEVICE_BLOCKS, HOST_BLOCKS, SPEC, Setting, refused

RING_LAYERS = 3


def ring(s: Setting, num_layers: int = RING_LAYERS) -> None:
    """The setting has a ring from now on."""
    spec = dataclasses.replace(SPEC, num_layers=num_layers)
    s.cache = DeviceCache(spec, DEVICE_BLOCKS, "cpu", layer_buffers=2)
    s.pool = HostPool(spec, HOST_BLOCKS)


def fill(s: Setting, block: int, version: str) -> None:
    for layer in range(s.pool.spec.num_layers):
        s.simulation.touch_on_host(writes=[(s.pool, block, layer)], version=f"{version} {layer}", label="fill")


def compute(
    s: Setting,
    layer: int,
    *,
    reads: int | None = None,
    writes: int | None = None,
    version: str = "",
    stream: SimulatedStream | None = None,
) -> Any:
    return s.simulation.compute(
        reads=[] if reads is None else [(s.cache, reads, layer)],
        writes=[] if writes is None else [(s.cache, writes, layer)],
        stream=stream,
        version=f"{version} {layer}",
        label=f"layer {layer}",
    )


def assert_seen(s: Setting, seen: Sequence[Any], block: int, version: str) -> None:
    s.simulation.run()
    for layer, computation in enumerate(seen):
        location = s.simulation.location(s.cache, block, layer)
        found = computation.saw(location)
        assert found == f"{version} {layer}", f"{location}: layer {layer} saw {found}, not {version}"


def assert_saved(s: Setting, block: int, version: str) -> None:
    s.simulation.run()
    for layer in range(s.pool.spec.num_layers):
        found = s.simulation.contents(s.pool, block, layer)
        assert found == f"{version} {layer}", f"host block {block}, layer {layer} holds {found}, not {version}"


def read(s: Setting, load: Transfer, block: int) -> list[Any]:
    """By hand."""
    seen = []
    for layer in range(load.num_layers):
        load.wait_layer(layer)
        seen.append(compute(s, layer, reads=block))
        load.mark_layer_read(layer)
    return seen


def ring_is_loaded_behind_its_readers(s: Setting) -> None:
    ring(s)
    fill(s, 3, "prefix")
    load = s.scheduler().onload([3], [1])
    assert_seen(s, read(s, load, 1), 1, "prefix")
    load.wait(1.0)


def ring_is_loaded_behind_the_save_of_its_pass(s: Setting) -> None:
    """The model writes to a block that the pass has loaded."""
    ring(s)
    fill(s, 3, "prefix")
    scheduler = s.scheduler()
    load = scheduler.onload([3], [1])
    save = scheduler.offload([1], [2], layerwise=True)
    seen = []
    with ForwardPass([load], [save]) as layers:
        for layer in range(RING_LAYERS):
            with layers.layer(layer):
                seen.append(compute(s, layer, reads=1, writes=1, version="answer"))
    save.wait(1.0)
    load.wait(1.0)
    assert_seen(s, seen, 1, "prefix")
    assert_saved(s, 2, "answer")


def ring_is_used_on_another_stream(s: Setting) -> None:
    """That of the pass, not that of the scheduler."""
    ring(s)
    fill(s, 3, "prefix")
    side = s.simulation.stream("side")
    scheduler = s.scheduler()
    load = scheduler.onload([3], [1])
    save = scheduler.offload([2], [4], layerwise=True)  # of other blocks: the load comes behind the marks alone
    seen = []
    with ForwardPass([load], [save], stream=side) as layers:
        for layer in range(RING_LAYERS):
            with layers.layer(layer):
                seen.append(compute(s, layer, reads=1, writes=2, version="answer", stream=side))
    save.wait(1.0)
    load.wait(1.0)
    assert_seen(s, seen, 1, "prefix")
    assert_saved(s, 4, "answer")


def ring_is_written_behind_its_save(s: Setting) -> None:
    ring(s)
    save = s.scheduler().offload([1], [2], layerwise=True)
    with ForwardPass([], [save]) as layers:
        for layer in range(RING_LAYERS):
            with layers.layer(layer):
                compute(s, layer, writes=1, version="prompt")
    save.wait(1.0)
    assert_saved(s, 2, "prompt")


def ring_is_written_behind_the_save_of_the_last_pass(s: Setting) -> None:
    """Nothing is loaded into the block: the caller waits."""
    ring(s)
    scheduler = s.scheduler()
    saves = []
    for host_block, version in ((2, "prompt"), (4, "next prompt")):
        if saves:
            saves[-1].wait_on()
        saves.append(scheduler.offload([1], [host_block], layerwise=True))
        with ForwardPass([], [saves[-1]]) as layers:
            for layer in range(RING_LAYERS):
                with layers.layer(layer):
                    compute(s, layer, writes=1, version=version)
    for save in saves:
        save.wait(1.0)
    assert_saved(s, 2, "prompt")
    assert_saved(s, 4, "next prompt")


def ring_is_loaded_behind_the_save_of_the_last_pass(s: Setting) -> None:
    ring(s)
    fill(s, 3, "prefix")
    scheduler = s.scheduler()
    save = scheduler.offload([1], [2], layerwise=True)
    with ForwardPass([], [save]) as layers:
        for layer in range(RING_LAYERS):
            with layers.layer(layer):
                compute(s, layer, writes=1, version="prompt")
    load = scheduler.onload([3], [1])
    seen = read(s, load, 1)
    load.wait(1.0)
    save.wait(1.0)
    assert_seen(s, seen, 1, "prefix")
    assert_saved(s, 2, "prompt")


def ring_is_loaded_behind_a_save_that_is_marked_from_its_end(s: Setting) -> None:
    ring(s)
    fill(s, 3, "prefix")
    scheduler = s.scheduler()
    save = scheduler.offload([1], [2], layerwise=True)
    for layer in reversed(range(RING_LAYERS)):
        if layer == 0:
            save.wait_layer(2)  # it lay in the same buffer
        compute(s, layer, writes=1, version="prompt")
        save.mark_layer_written(layer)
    load = scheduler.onload([3], [1])
    seen = read(s, load, 1)
    load.wait(1.0)
    save.wait(1.0)
    assert_seen(s, seen, 1, "prefix")
    assert_saved(s, 2, "prompt")


def ring_is_loaded_behind_a_save_that_breaks(s: Setting) -> None:
    """What was enqueued of it still reads the buffer."""
    ring(s)
    fill(s, 3, "prefix")
    scheduler = s.scheduler()
    load = scheduler.onload([3], [1])
    save = scheduler.offload([1], [2], layerwise=True)
    load.wait_layer(0)
    seen = [compute(s, 0, reads=1)]
    s.simulation.device.break_submission(1)
    refused(save.mark_layer_written, 0, error=TransferError)
    load.mark_layer_read(0)
    for layer in (1, 2):
        load.wait_layer(layer)
        seen.append(compute(s, layer, reads=1))
        load.mark_layer_read(layer)
    load.wait(1.0)
    save.wait_over(1.0)
    assert save.failed
    assert_seen(s, seen, 1, "prefix")
    s.pool.mark_rewritten([2])


def ring_is_loaded_behind_a_save_that_was_cancelled(s: Setting) -> None:
    """Its events are given back when it is over, and another save has them then."""
    ring(s, 4)
    fill(s, 3, "prefix")
    scheduler = s.scheduler()
    load = scheduler.onload([3], [1])
    save = scheduler.offload([1], [2], layerwise=True)
    seen = []
    for layer in range(4):
        load.wait_layer(layer)
        seen.append(compute(s, layer, reads=1))
        if layer < 2:
            save.mark_layer_written(layer)
        if layer == 1:
            s.simulation.run()
            save.cancel()
            save.wait_over(1.0)
            other = scheduler.offload([2], [4], layerwise=True)
        load.mark_layer_read(layer)
    load.wait(1.0)
    other.cancel()
    assert_seen(s, seen, 1, "prefix")
    s.pool.mark_rewritten([2, 4])


def ring_is_loaded_by_two_schedulers(s: Setting) -> None:
    ring(s)
    fill(s, 3, "prefix")
    fill(s, 4, "other")
    first = s.scheduler().onload([3], [1])
    for layer in range(RING_LAYERS):
        first.mark_layer_read(layer)  # nobody reads it
    load = s.scheduler().onload([4], [1])
    assert_seen(s, read(s, load, 1), 1, "other")
    load.wait(1.0)
    first.wait(1.0)


def ring_is_marked_as_read_out_of_order(s: Setting) -> None:
    ring(s, 5)
    fill(s, 3, "prefix")
    load = s.scheduler().onload([3], [1])
    load.mark_layer_read(2)
    load.mark_layer_read(0)
    load.wait_layer(4)
    seen = compute(s, 4, reads=1)
    load.mark_layer_read(1)
    load.wait(1.0)
    location = s.simulation.location(s.cache, 1, 4)
    assert seen.saw(location) == "prefix 4", f"layer 4 saw {seen.saw(location)}"


RING_SCENARIOS: dict[str, Callable[[Setting], None]] = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__module__", "") == __name__ and name.startswith("ring_is")
}
