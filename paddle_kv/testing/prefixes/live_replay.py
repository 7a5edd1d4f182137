"""Replays a trace with real transfers: through the manager and the scheduler, on the GPU or on the CPU backend.

What :mod:`.replay` works out, this does: each request looks up its blocks, loads what is found and saves the rest, in
the three ways. The model is a sleep for each layer. Trace, model and blocks are shrunk together: time by
``time_scale``, and the bytes of a block by whoever chooses the costs.

One prefill runs at a time, and its save is awaited before the next lookup, so that the policies see what they see in
the simulation. Neither that nor the call that saves counts as waiting: beside a model that is shrunk it would be far
too long.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices import has_gpu
from ...integrations.layers import ForwardPass
from ...layout import KVCacheSpec
from ...memory import DeviceCache, HostPool
from ...offload.manager import KVOffloadManager
from ...schedule.scheduler import LayerwiseScheduler
from ...schedule.transfer import Transfer
from .replay import WAYS, Costs, Prefill, Progress, Run
from .trace import Request

if TYPE_CHECKING:
    from ...tiers import Tier

TIER_HEADER_BYTES = 4096
ELEMENT_BYTES = 2
TENSORS = 2  # key and value
TIMEOUT_S = 60.0


def spec_of(costs: Costs) -> KVCacheSpec:
    """A cache whose blocks have as many layers and bytes as the costs say.

    Raises:
        ValueError: the bytes of a block are not a multiple of 4 for each layer.
    """
    elements, rest = divmod(costs.block_bytes, costs.num_layers * TENSORS * ELEMENT_BYTES)
    if rest or not elements:
        raise ValueError(
            f"block_bytes = {costs.block_bytes} must be a multiple of {costs.num_layers * TENSORS * ELEMENT_BYTES}"
        )
    return KVCacheSpec(num_layers=costs.num_layers, num_kv_heads=1, head_dim=elements, block_size=1, dtype="float16")


def shrunk(requests: Sequence[Request], time_scale: float) -> list[Request]:
    """The requests as they arrive in a live replay."""
    return [replace(request, arrival_s=request.arrival_s * time_scale) for request in requests]


def live_replay(
    requests: Sequence[Request],
    policy: str,
    capacity_blocks: int,
    costs: Costs,
    time_scale: float,
    progress: Progress = lambda done: None,
    *,
    tier_blocks: int = 0,
    tier_folder: Path | None = None,
) -> Run:
    """One run with real transfers; its times are measured, in the time of :func:`shrunk` requests.

    ``costs.link_bytes_per_s`` is not used: the link is the one of this machine. ``progress`` is told the number of
    requests done, of ``len(WAYS) * len(requests)``. ``tier_folder``: where a tier of ``tier_blocks`` has its files, in
    a folder of its own that is deleted at the end.

    Raises:
        ValueError: an unknown policy, a capacity below 1, ``time_scale`` not above 0, or see :func:`spec_of`.
        MemoryError: the pool or the cache does not fit.
    """
    if not 0 < time_scale < float("inf"):
        raise ValueError(f"time_scale = {time_scale} must be a finite number above 0")
    if capacity_blocks < 1:
        raise ValueError(f"capacity_blocks = {capacity_blocks} must be at least 1")
    run = Run(policy, capacity_blocks, sum(len(request.block_ids) for request in requests), [], 0, 0)
    for number, way in enumerate(WAYS):
        with (
            tempfile.TemporaryDirectory(dir=tier_folder) as folder,
            _Server(requests, policy, capacity_blocks, costs, time_scale, tier_blocks, folder) as server,
        ):
            services = []
            for position, request in enumerate(requests):
                services.append(server.prefill(request, way))
                progress(number * len(requests) + position + 1)
            run.prefills[way] = _queued(shrunk(requests, time_scale), services)
            if way == "layerwise":
                figures = server.manager.stats()
                run.hits, run.tier_hits, run.tier_blocks = server.hits, server.tier_hits, tier_blocks
                run.saved_blocks, run.evicted_blocks = int(figures["saved_blocks"]), int(figures["evicted_blocks"])
    return run


def link_bytes_per_s(run: Run, block_bytes: int) -> float:
    """What the loads of a live run have reached; 1 where nothing was loaded."""
    return run.hit_blocks * block_bytes / run.transfer_s if run.transfer_s else 1.0


def _queued(requests: Sequence[Request], services: Sequence[Prefill]) -> list[Prefill]:
    """One prefill at a time in order of arrival; the measured ones start at 0."""
    done: list[Prefill] = []
    idle_from_s = 0.0
    for request, service in zip(requests, services, strict=True):
        start_s = max(request.arrival_s, idle_from_s)
        idle_from_s = start_s + service.end_s
        done.append(Prefill(start_s, service.load_s, service.compute_s, idle_from_s))
    return done


class _Server:
    """The smallest server: no tokens, only blocks."""

    def __init__(
        self,
        requests: Sequence[Request],
        policy: str,
        capacity_blocks: int,
        costs: Costs,
        time_scale: float,
        tier_blocks: int,
        folder: str,
    ) -> None:
        spec = spec_of(costs)
        longest = max(1, max(len(request.block_ids) for request in requests))
        self._costs = costs
        self._time_scale = time_scale
        self._num_layers = spec.num_layers
        self.hits: list[int] = []
        self.tier_hits: list[int] = []
        with ExitStack() as made:  # what is made is closed, also if a later part cannot be made
            layout: Any = "block_first" if tier_blocks else None
            pool = made.enter_context(closing(HostPool(spec, capacity_blocks, layout=layout)))
            tier = _tier(made, pool, tier_blocks, folder) if tier_blocks else None
            self._stream = _gpu_stream() if has_gpu() else None
            cache = DeviceCache(spec, longest, "gpu:0" if has_gpu() else "cpu")
            scheduler = made.enter_context(closing(LayerwiseScheduler(cache, pool, compute_stream=self._stream)))
            self.manager = made.enter_context(closing(KVOffloadManager(scheduler, policy=policy, tier=tier)))
            self._made = made.pop_all()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *error: Any) -> None:
        self._made.close()

    def prefill(self, request: Request, way: str) -> Prefill:
        """Measured, from the lookup to the end of the last layer; all but waiting for the load counts as computing."""
        keys = [b"%d" % block_id for block_id in request.block_ids]
        table = list(range(len(keys)))
        started = time.perf_counter()
        if way == "recompute":
            self._compute(request, 0, _not_waiting)
            taken_s = _since(started)
            return Prefill(0.0, 0.0, taken_s, taken_s)
        layerwise = way == "layerwise"
        with self.manager.lookup(keys) as lease:
            found, below = lease.num_blocks, lease.num_below
            if layerwise and not below:
                # A server saves behind the load, and says that it is computed from it. Here the load must not gain
                # from the time that is not counted.
                looked_up_s = _since(started)
                save = self.manager.save(keys[found:], table[found:], layerwise=True)
                started = time.perf_counter() - looked_up_s
            load = self.manager.onload(lease.hashes, table[:found])
            if layerwise and below:  # what comes from the tier takes its room first; then the save counts
                save = self.manager.save(keys[found:], table[found:], layerwise=True)
        if layerwise:
            with ForwardPass([load], [save], timeout_s=TIMEOUT_S) as running:
                waited_s = self._compute(request, found, running.layer)
        else:
            load.wait(TIMEOUT_S)
            waited_s = _since(started)
            self._compute(request, found, _not_waiting)
        taken_s = _since(started)
        if not layerwise:
            save = self.manager.save(keys[found:], table[found:], computed_from=[load])
        self._finish(load, save)
        self.hits.append(found)
        if self.manager.tier is not None:
            self.tier_hits.append(below)
        return Prefill(0.0, load.elapsed_ms / 1e3, taken_s - waited_s, taken_s)

    def _compute(self, request: Request, found: int, around: Callable[[int], AbstractContextManager[None]]) -> float:
        """Sleeps in each layer; how long it has waited to begin with them."""
        tokens = max(1, request.input_tokens - found * self._costs.tokens_per_block)
        layer_s = tokens / self._costs.prefill_tokens_per_s * self._time_scale / self._num_layers
        waited_s = 0.0
        for layer in range(self._num_layers):
            begun = time.perf_counter()
            with around(layer):
                if self._stream is not None:
                    self._stream.synchronize()  # the host plays the model: it waits as the stream does
                waited_s += _since(begun)
                time.sleep(layer_s)
        return waited_s

    def _finish(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            transfer.wait(TIMEOUT_S)
        self.manager.flush(TIMEOUT_S)


def _tier(made: ExitStack, pool: HostPool, num_blocks: int, folder: str) -> Tier:
    from ...tiers import FilesEngine, Tier
    from ...tiers.space import slot_bytes_of

    spec = pool.spec
    room = num_blocks * slot_bytes_of(TIER_HEADER_BYTES + spec.num_layers * spec.block_bytes)
    engine = made.enter_context(FilesEngine({folder: room}))
    return made.enter_context(Tier(engine, pool, model=b"replay"))


def _not_waiting(layer: int) -> AbstractContextManager[None]:
    return nullcontext()


def _since(started: float) -> float:
    return time.perf_counter() - started


def _gpu_stream() -> Any:
    import cupy

    return cupy.cuda.Stream(non_blocking=True)
