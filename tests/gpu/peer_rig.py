"""A prefill or a decode process with a GPU: does what it is asked, and is killed. Spawned: CUDA survives no fork."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, PaddleKVError, devices
from paddle_kv.memory import device_memory
from paddle_kv.peers import Grant, Listener, PeerBlocks, Receiver, connect, heads_of
from tests.schedule.rig import WAIT_S, Bits, make_spec, random_bits

ANSWER_S = 60.0
ENGINES = ("auto", "copy_engine", "kernel")
LIFE_S = 110.0  # no process of a test is there for longer
ANY_KIND = 4  # cudaMemcpyDefault
SEED = 77
SPECS: dict[str, tuple[KVCacheSpec, int, int]] = {  # blocks of the sender, of the receiver
    "odd sizes": (make_spec(), 9, 13),
    "4 KiB": (KVCacheSpec(num_layers=3, num_kv_heads=1, head_dim=128, block_size=16, dtype="float16"), 70, 90),
    "32 KiB": (KVCacheSpec(num_layers=3, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16"), 40, 50),
    "NHD": (
        KVCacheSpec(num_layers=3, num_kv_heads=6, head_dim=64, block_size=16, dtype="float16", layout="NHD"),
        40,
        50,
    ),
    "256 KiB": (KVCacheSpec(num_layers=2, num_kv_heads=8, head_dim=128, block_size=128, dtype="float16"), 12, 14),
    "long": (KVCacheSpec(num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="float16"), 300, 340),
}


def set_cache(cache: DeviceCache, bits: Bits) -> None:
    import cupy

    for name, layers in bits.items():
        for layer, array in enumerate(layers):
            address = cache.pointer(name, layer)
            cupy.cuda.runtime.memcpy(address, np.ascontiguousarray(array).ctypes.data, array.size, ANY_KIND)
    cupy.cuda.runtime.deviceSynchronize()


def bits_of(cache: DeviceCache) -> Bits:
    import cupy

    spec, found = cache.spec, {}
    cupy.cuda.runtime.deviceSynchronize()
    for name in spec.tensor_names:
        array = np.empty((spec.num_layers, cache.num_blocks, spec.tensor_block_bytes(name)), np.uint8)
        for layer in range(spec.num_layers):
            address = cache.pointer(name, layer)
            cupy.cuda.runtime.memcpy(array[layer].ctypes.data, address, array[layer].size, ANY_KIND)
        found[name] = array
    return found


class GpuDecode:
    """A receiver that takes blocks in its cache on the GPU. ``device``: what should be in there."""

    def __init__(self, gpu: int, kind: str, path: str | None = None) -> None:
        self.spec, _, blocks = SPECS[kind]
        self.cache = DeviceCache(self.spec, blocks, devices.name_of(gpu))
        self.device = random_bits(self.spec, blocks, 1)
        set_cache(self.cache, self.device)
        self.pool = HostPool(self.spec, 4)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.receiver = Receiver(self.scheduler, direct=True)
        self.listener = Listener(self.receiver, path)

    @property
    def num_held(self) -> int:
        return len(self.receiver._loads.host_pool.domain.busy(range(self.cache.num_blocks)))

    def close(self) -> None:
        self.receiver.close(WAIT_S)
        self.listener.close(WAIT_S)
        self.scheduler.close(WAIT_S)
        self.pool.close()


def use_gpu(number: int) -> None:
    """What names no GPU lies on this one from now on."""
    import cupy
    import paddle

    paddle.set_device(devices.name_of(number))
    cupy.cuda.Device(number).use()


def begin(gpu: int) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    use_gpu(gpu)


def prefill(
    pipe: Connection, gpu: int, kind: str, exported: Any, path: str, heads: tuple[int, int] | None = None
) -> None:
    """A sender for each engine, until its pipe ends. ``heads``: the first one, and how many: a rank that has these."""
    begin(gpu)
    import cupy

    from tests.gpu import delay

    spec, blocks, _ = SPECS[kind]
    theirs: HostPool = PeerBlocks(DeviceCache.attach(spec, exported))
    if heads is not None:
        spec, theirs = spec.with_heads(heads[1]), heads_of(theirs, *heads)
    cache = DeviceCache(spec, blocks, devices.name_of(gpu))
    set_cache(cache, random_bits(spec, blocks, SEED + (heads[0] if heads else 0)))
    compute = cupy.cuda.Stream(non_blocking=True)
    schedulers = [LayerwiseScheduler(cache, theirs, compute_stream=compute, engine=engine) for engine in ENGINES]
    senders = dict(zip(ENGINES, [connect(scheduler, path) for scheduler in schedulers], strict=True))
    saves: dict[str, Any] = {}

    def send(name: str, text: str, ids: list[int], engine: str = "auto") -> None:
        saves[name] = senders[engine].send(Grant.from_json(text), ids, timeout_s=WAIT_S)

    def write(block: int, value: int, layers: list[int]) -> None:
        for name in spec.tensor_names:
            size_bytes = spec.tensor_block_bytes(name)
            for layer in layers:
                cupy.cuda.runtime.memsetAsync(
                    cache.pointer(name, layer) + block * size_bytes, value, size_bytes, compute.ptr
                )

    def close() -> int:
        nonlocal theirs
        saves.clear()
        while senders:
            senders.popitem()[1].close(WAIT_S)
        while schedulers:
            schedulers.pop().close(WAIT_S)
        theirs.close()
        del theirs
        gc.collect()
        return len(device_memory._mapped)

    orders: dict[str, Callable[..., Any]] = {
        "send": send,
        "mark": lambda name, layers: [saves[name].mark_layer_written(layer) for layer in layers] and None,
        "wait": lambda name: saves[name].wait_over(WAIT_S) or saves[name].state.value,
        "cancel": lambda name: saves[name].cancel(),
        "busy": lambda milliseconds: delay.busy(compute, milliseconds),
        "write": write,
        "opened": lambda: len(device_memory._mapped),
        "again": lambda: DeviceCache.attach(spec, exported).pointer("key", 0) == theirs.pointer("key", 0),
        "bits": lambda: bits_of(cache),
        "sendings": lambda: sum(len(sender._sendings) for sender in senders.values()),
        "close": close,
    }
    serve(pipe, orders)


def decode(pipe: Connection, gpu: int, kind: str, path: str) -> None:
    """A receiver in a process of its own."""
    begin(gpu)
    here = GpuDecode(gpu, kind, path)
    loads: list[Any] = []

    def grant(ids: list[int]) -> Any:
        load, given = here.receiver.grant(ids, timeout_s=WAIT_S)
        loads.append(load)
        return given

    serve(pipe, {"grant": grant, "exported": here.cache.export})


def serve(pipe: Connection, orders: dict[str, Callable[..., Any]]) -> None:
    while True:
        try:
            order, *given = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send(("ok", orders[order](*given)))
        except Exception as error:  # noqa: BLE001  the test looks at it
            pipe.send((type(error).__name__, str(error)))


def _idle(pipe: Connection) -> None:
    import cupy  # noqa: F401  as all that takes long and needs no GPU

    try:
        target, *arguments = pipe.recv()
    except EOFError:
        return
    target(pipe, *arguments)


def _start() -> tuple[Connection, Any]:
    pipe, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_idle, args=(there,), daemon=True)
    process.start()
    there.close()
    return pipe, process


_spares: list[tuple[Connection, Any]] = []  # importing Paddle takes longer than most tests: these do it beside them
SPARES = 4


def end_spares() -> None:
    while _spares:
        pipe, process = _spares.pop()
        process.kill()
        process.join(WAIT_S)
        pipe.close()


class Process:
    """The handle of one of these."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        _spares.extend(_start() for _ in range(SPARES + 1 - len(_spares)))
        self._pipe, self.process = _spares.pop(0)
        self._pipe.send((target, *arguments))

    def tell(self, *order: Any) -> None:
        """Without an answer; one that is dead does not hear it."""
        with contextlib.suppress(OSError):
            self._pipe.send(order)

    def answer(self) -> Any:
        """(``"ok"``, what was returned), or (the exception's type, its text); None: it is dead."""
        try:
            assert self._pipe.poll(ANSWER_S), "the other process does not answer"
            return self._pipe.recv()
        except (EOFError, OSError):
            return None

    def ask(self, *order: Any) -> Any:
        self.tell(*order)
        found = self.answer()
        assert found is not None, "the other process is dead"
        assert found[0] == "ok", f"{found[0]}: {found[1]}"
        return found[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self._pipe.close()


def hand_over(
    here: GpuDecode, there: Process, name: str, source: list[int], target: list[int], engine: str = "auto"
) -> Any:
    """The load of a grant that is being sent; every layer is marked."""
    load, grant = here.receiver.grant(target, timeout_s=WAIT_S)
    there.ask("send", name, grant.to_json(), source, engine)
    there.ask("mark", name, list(range(here.spec.num_layers)))
    return load


def ended(load: Any) -> str:
    with contextlib.suppress(PaddleKVError):
        load.wait(WAIT_S)
    load.wait_over(WAIT_S)
    return str(load.state.value)


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)
