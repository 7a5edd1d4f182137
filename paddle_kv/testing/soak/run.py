"""A whole run: pools, server, time, checkpoints, report."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ...layout import KVCacheSpec
from ...memory import DeviceCache, HostPool
from ...schedule.scheduler import LayerwiseScheduler
from . import meters
from .compute import Compute, CpuCompute
from .mismatch import SoakFailure
from .traffic import Server, Traffic

FLUSH_STEPS = 16  # a difference on a GPU is told at most so many steps late


@dataclass(frozen=True)
class Setup:
    """What moves where.

    Attributes:
        block_bytes: of one block of one layer's keys; the values' are 16 bytes longer.
        checkpoint_steps: after so many steps all transfers are ended and all blocks compared.
    """

    device: str = "cpu"
    layers: int = 8
    block_bytes: int = 64
    device_blocks: int = 384
    host_blocks: int = 1024
    pool_layout: Any = "layer_first"  # of the host pool
    engine: str = "auto"
    layers_per_event: int = 1
    checkpoint_steps: int = 1000
    traffic: Traffic = field(default_factory=Traffic)


@dataclass
class Report:
    """What a run did. ``failure`` is empty where all was as it must be."""

    setup: dict[str, Any]
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    moves_per_s: float = 0.0
    mismatches: int = 0
    failure: str = ""
    mismatch: dict[str, Any] | None = None
    samples: list[dict[str, int]] = field(default_factory=list)


class Soak:
    """One run. A context manager: leaving it closes all that it made.

    Args:
        setup: sizes, device and traffic.
        backend: of the schedulers, see :class:`~paddle_kv.LayerwiseScheduler`; a function makes one for each.
    """

    def __init__(self, setup: Setup, make_backend: Callable[[], Any] = lambda: "auto") -> None:
        self.setup = setup
        spec = KVCacheSpec(
            num_layers=setup.layers,
            num_kv_heads=1,
            head_dim=setup.block_bytes,
            v_head_dim=setup.block_bytes + 16,
            block_size=1,
            dtype="uint8",
        )
        self.cache = DeviceCache(spec, setup.device_blocks, setup.device)
        self.pool = HostPool(spec, setup.host_blocks, layout=setup.pool_layout)

        def make_scheduler(compute: Compute) -> LayerwiseScheduler:
            return LayerwiseScheduler(
                self.cache,
                self.pool,
                compute_stream=compute.stream,
                backend=make_backend(),
                engine=setup.engine,
                layers_per_event=setup.layers_per_event,
            )

        self.server = Server(setup.traffic, self.cache, self.pool, self._make_compute, make_scheduler)
        self.report = Report(asdict(setup))

    def _make_compute(self, describe: Callable[[int], str]) -> Compute:
        if self.cache.device_id is None:
            return CpuCompute(self.cache, self.pool, describe)
        from .gpu_compute import GpuCompute

        return GpuCompute(self.cache, self.pool, describe)

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.scheduler.close(60.0)
        self.pool.close()

    def run(
        self, *, minutes: float, max_moves: int | None = None, show: Callable[[Soak], None] = lambda soak: None
    ) -> Report:
        """Traffic for so long, or until so many block moves are made, or until the first failure.

        Args:
            show: called about every second.
        """
        started = shown = time.monotonic()
        report, counts = self.report, self.server.counts
        try:
            while True:
                self.server.step()
                if counts["steps"] % FLUSH_STEPS == 0:
                    self.server.compute.flush()
                    now = time.monotonic()
                    report.seconds = now - started
                    if now - shown > 1.0:
                        shown = now
                        show(self)
                    if report.seconds > 60 * minutes or (max_moves is not None and counts["moves"] >= max_moves):
                        break
                if counts["steps"] % self.setup.checkpoint_steps == 0:
                    self.checkpoint()
            self.checkpoint()
            if grown := meters.growth(report.samples):
                raise SoakFailure("; ".join(grown))
        except SoakFailure as failure:
            report.failure = str(failure)
            if failure.mismatch is not None:
                report.mismatches = 1
                report.mismatch = asdict(failure.mismatch)
        except KeyboardInterrupt:  # a run of hours has a report all the same; its last steps were not compared
            checked = len(report.samples) * self.setup.checkpoint_steps
            report.failure = f"interrupted at step {counts['steps']}; up to step {checked} all was compared"
        except Exception as error:  # noqa: BLE001  whatever it is, it must not happen, and the report has to come out
            report.failure = f"step {counts['steps']} raised {type(error).__name__}: {error}"
        report.seconds = time.monotonic() - started
        report.counts = dict(counts)
        report.moves_per_s = counts["moves"] / max(report.seconds, 1e-9)
        return report

    def checkpoint(self) -> None:
        """All transfers end, all blocks are compared, and what the process holds is noted; now and then, a new
        scheduler."""
        self.server.finish()
        gc.collect()  # the traffic's own records refer to each other; what grows nevertheless is kept by somebody
        stats = self.server.scheduler.stats()
        if stats["in_flight"]:
            raise SoakFailure(f"{stats['in_flight']} transfers are in flight after all have been waited for")
        self.report.samples.append(
            {
                **meters.process(),
                **{name: stats[name] for name in ("events", "streams", "pinned_bytes")},
                **self.server.compute.handles(),
            }
        )
        if len(self.report.samples) % 4 == 0:
            self.server.restart()


def run(setup: Setup, **options: Any) -> Report:
    """A run with all that it needs, closed at its end."""
    with contextlib.ExitStack() as stack:
        return stack.enter_context(Soak(setup)).run(**options)
