"""Does it work here? Each check says in one line what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, ops
from ..backend import calibration
from ..backend.work import ENGINES
from ..bench import methods
from ..bench.check import moves_the_bytes
from ..bench.clock import CudaClock, HostClock
from ..bench.setup import OPERATIONS, Way, make_case
from ..devices import has_gpu
from ..memory.host_memory import available_bytes, can_page_lock
from .calibrate import copy_engine_from

PINNED_TRIAL_BYTES = 64 << 20
ROUND_TRIP_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One check: its name, whether it passed, what was seen (and, if it failed, how to mend it).

    ``passed`` is None where this machine has nothing to check.
    """

    name: str
    passed: bool | None
    text: str


class NothingToCheck(Exception):
    """What a check raises where the machine does not have what it is about."""


def examine() -> Iterator[Finding]:
    """Runs the checks one after another."""
    for name, check in (
        ("build", _build),
        ("GPU", _gpu),
        ("host memory", _host_memory),
        *((f"engine {engine}", _round_trip(engine)) for engine in ENGINES),
        ("engine costs", _engine_costs),
        ("tier in files", _tier),
        ("tier in a Mooncake Store", _mooncake),
        *((f"method {method}", _method(method)) for method in methods.METHODS),
    ):
        try:
            yield Finding(name, True, check())
        except NothingToCheck as reason:
            yield Finding(name, None, str(reason))
        except Exception as error:  # noqa: BLE001  what is wrong is the result
            yield Finding(name, False, f"{type(error).__name__}: {error}")


def _build() -> str:
    info = ops.build_info()
    return ", ".join(f"{key} {value}" for key, value in info.items())


def _gpu() -> str:
    if not has_gpu():
        if not ops.is_stub_build():
            return "none seen: the operators have CUDA code, Paddle runs on the CPU"
        return "none: everything runs on the CPU"
    if ops.is_stub_build():
        raise RuntimeError(
            "Paddle sees a GPU, the operators have no CUDA code; rebuild with nvcc: python setup_ops.py build"
        )
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return f"{properties['name'].decode()}, architecture {properties['major']}{properties['minor']}"


def _host_memory() -> str:
    kind = "page-locked" if can_page_lock() else "pageable"
    pool = HostPool(_spec(64), PINNED_TRIAL_BYTES // (64 * 1024))
    held = pool.pinned_bytes
    pool.close()
    return f"{held >> 20} MiB {kind} allocated and given back; {available_bytes() >> 20} MiB available"


def _spec(kib: int) -> KVCacheSpec:
    """One layer whose block has that many KiB."""
    return KVCacheSpec(num_layers=1, num_kv_heads=kib, head_dim=16, block_size=16, dtype="float16")


def _round_trip(engine: str) -> Callable[[], str]:
    return lambda: _moved_by(engine)


def _moved_by(engine: str) -> str:
    """Host, device, host, with a checksum."""
    if not has_gpu() and engine != "auto":
        raise NothingToCheck("not on this machine")
    spec = _spec(64)
    blocks = ROUND_TRIP_BYTES // spec.block_bytes
    cache, pool = DeviceCache(spec, blocks), HostPool(spec, 2 * blocks)
    there, back = pool.allocate(blocks), pool.allocate(blocks)
    rng = np.random.default_rng(0)
    for block_id in there:
        for name in spec.tensor_names:
            block = pool.view(name, 0, block_id).view("uint8")
            block[...] = rng.integers(0, 256, block.shape, dtype="uint8")
    with LayerwiseScheduler(cache, pool, engine=engine) as scheduler:
        scheduler.onload(there, range(blocks)).wait(30)
        scheduler.offload(range(blocks), back).wait(30)
    sent, received = (_checksum(pool, spec, ids) for ids in (there, back))
    pool.close()
    if sent != received:
        raise RuntimeError(f"checksum {received:08x} came back for {sent:08x}; the device or the link corrupts data")
    return f"{ROUND_TRIP_BYTES} bytes to the device and back, checksum {sent:08x}"


def _tier() -> str:
    """Through a folder and back."""
    try:
        from ..tiers import FilesEngine
    except ImportError as error:
        raise NothingToCheck(str(error)) from None
    with tempfile.TemporaryDirectory() as folder, FilesEngine({folder: 1 << 20}) as engine:
        direct = engine.roots[0].folder.direct
        _there_and_back(engine)
    return f"stored and loaded by {'direct I/O' if direct else 'buffered I/O: no direct I/O here'}"


def _mooncake() -> str:
    """Through the store of ``MOONCAKE_MASTER``, if there is one."""
    try:
        from ..mooncake_bounds import set_bounds
        from ..tiers.mooncake import MooncakeEngine
        from ..tiers.mooncake_store import BOUNDS

        set_bounds(BOUNDS)
        from mooncake.store import MooncakeDistributedStore  # noqa: F401
    except ImportError as error:
        raise NothingToCheck(f"{error}; pip install 'paddle_kv[mooncake]' where one is wanted") from None
    name = importlib.metadata.packages_distributions()["mooncake"][0]  # there is one for each kind of GPU
    version = f"{name} {importlib.metadata.version(name)}"
    master = os.environ.get("MOONCAKE_MASTER")
    if not master:
        raise NothingToCheck(f"{version} is installed; MOONCAKE_MASTER=HOST:PORT names a master to try it with")
    with MooncakeEngine(master, prefix=f"paddle_kv-doctor-{os.getpid()}/") as engine:
        _there_and_back(engine)
    return f"stored and loaded by {version}, master {master}"


def _there_and_back(engine: Any) -> None:
    from ..tiers import Job, Tier

    pool = HostPool(_spec(64), 2, layout="block_first")
    pool.view("key", 0, 0)[...] = 1.5
    with Tier(engine, pool, model=b"doctor") as tier:
        for job, start in ((Job([b"key"], [0]), tier.store), (Job([b"key"], [1]), tier.load)):
            start([job])
            tier.drain(30)
            if not job.done:
                raise RuntimeError(f"an object was {job.outcomes[0].value}; see the log")  # type: ignore[union-attr]
        if not np.array_equal(pool.view("key", 0, 0), pool.view("key", 0, 1)):
            raise RuntimeError("wrong bytes came back")
        tier.delete([b"key"])
    pool.close()


def _engine_costs() -> str:
    if not has_gpu():
        raise NothingToCheck("of no use on the CPU")
    from ..backend.cupy_backend import device_name

    costs = calibration.load(device_name(0))
    where = (
        f"measured ({calibration.path_of(device_name(0))})"
        if costs
        else "built in; paddle-kv bench --calibrate measures"
    )
    known = costs or calibration.EngineCosts()
    each = ", ".join(
        f"{way} {copy_engine_from(known, way, 'alone')}, beside compute {copy_engine_from(known, way, 'beside')}"
        for way in ("d2h", "h2d")
    )
    return f"{where}: copy engine for scattered pieces from {each}"


def _checksum(pool: HostPool, spec: KVCacheSpec, ids: list[int]) -> int:
    value = 0
    for block_id in ids:
        for name in spec.tensor_names:
            value = zlib.crc32(pool.view(name, 0, block_id).tobytes(), value)
    return value


def _method(name: str) -> Callable[[], str]:
    def check() -> str:
        clock = CudaClock() if has_gpu() else HostClock()
        done = []
        ways: tuple[Way, ...] = ("d2d",) if name in OPERATIONS else ("h2d", "d2h")
        for way in ways:
            op: Any = name if name in OPERATIONS else "swap"
            case = make_case(_spec(16), "scattered", way, 32, pinned=True, seed=0, op=op)
            enqueue = methods.METHODS[name](case, way, clock.stream)
            if enqueue is None:
                case.close()
                raise NothingToCheck("not on this machine")
            if not moves_the_bytes(case, way, enqueue, clock.stream):
                raise RuntimeError(
                    f"moved wrong bytes ({way}); please report this with the output of paddle-kv env --json"
                )
            case.close()
            done.append(way)
        return f"right bytes: {', '.join(done)}"

    return check
