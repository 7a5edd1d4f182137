"""The sweep: every combination of the axes, each method checked and then timed, against the ceiling of the same run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..devices import has_gpu
from ..layout import KVCacheSpec
from ..memory.host_memory import available_bytes
from . import methods, models
from .check import moves_the_bytes
from .clock import Clock, CudaClock, HostClock, Timing, measure
from .load import ComputeLoad, LoadName, beside
from .setup import SPARE, Case, Operation, Pattern, Way, in_one_piece, make_case


@dataclass(frozen=True)
class Axes:
    """What is swept. Combinations to which a method does not apply are left out."""

    model: str = "Llama-3.1-8B"
    tp: int = 1
    num_layers: int | None = None
    op: Operation = "swap"
    tokens_per_block: Sequence[int] = (16,)
    num_blocks: Sequence[int] = (256,)
    directions: Sequence[Way] = ("h2d", "d2h")  # "d2d" alone for all operations but swap
    patterns: Sequence[Pattern] = ("scattered",)
    backends: Sequence[str] = tuple(methods.METHODS)
    alignments: Sequence[int] = (16,)
    load: LoadName = "none"
    pinned: bool = True
    warmups: int = 2
    repeats: int = 7
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One measurement. Rates count each byte once, in 10^9 bytes per second."""

    model: str
    tp: int
    op: str
    tokens_per_block: int
    num_blocks: int
    pattern: str
    direction: str
    memory: str
    alignment: int
    load: str
    backend: str
    total_bytes: int
    inner_bytes: int
    copy_size: int
    num_copies: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    noise_percent: float | None  # None of fewer than 5 runs; beside a load transfers are timed together
    host_us: float
    bandwidth_gbps: float
    percent_of_peak: float
    load_slowdown_percent: float | None
    bytes_checked: bool


@dataclass
class Result:
    """All rows, and where they were measured."""

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": [asdict(row) for row in self.rows]}


class WrongBytes(RuntimeError):
    """A method did not move what it should have: its time means nothing."""


def sweep(axes: Axes, machine: dict[str, Any], progress: Callable[[int, int, str], None]) -> Result:
    """Measures; ``progress(done, total, what)`` is called before each case.

    Raises:
        WrongBytes: a method left other bytes than it should have.
        MemoryError: the case does not fit into host memory.
    """
    result = Result(machine)
    load = ComputeLoad(axes.load) if axes.load != "none" else None
    cases = list(
        itertools.product(axes.tokens_per_block, axes.num_blocks, axes.patterns, axes.directions, axes.alignments)
    )
    for done, (tokens, blocks, pattern, way, alignment) in enumerate(cases):
        what = f"{axes.op}, {tokens} tokens x {blocks} blocks, {pattern}, {way}"
        progress(done, len(cases), what)
        spec = models.model_spec(axes.model, tp=axes.tp, tokens_per_block=tokens, num_layers=axes.num_layers)
        ways: list[Way] = ["h2d", "d2h"] if way == "both" else [way]
        _check_memory(spec, blocks * len(ways), axes.op, what)
        given: dict[str, Any] = {"pinned": axes.pinned, "seed": axes.seed, "op": axes.op, "alignment": alignment}
        made = [make_case(spec, pattern, one, blocks, **given) for one in ways]
        clock: Clock = CudaClock() if has_gpu() else HostClock()
        bench = _Bench(axes, what, ways, clock, [clock.stream, _second_stream()][: len(ways)])
        pieces = [in_one_piece(*each) for each in zip(made, ways, strict=True)]
        ceiling = bench.measure("contiguous", methods.contiguous, pieces, None)
        assert ceiling is not None
        peak_rate = _rate(made, ceiling[0])
        result.rows.append(_row(axes, made, way, "contiguous", ceiling[0], peak_rate, None))
        del pieces, ceiling
        for name in axes.backends:
            measured = bench.measure(name, methods.METHODS[name], made, load)
            if measured is not None:
                result.rows.append(_row(axes, made, way, name, measured[0], peak_rate, measured[1]))
        for case in made:
            case.close()
    progress(len(cases), len(cases), "done")
    return result


def _check_memory(spec: KVCacheSpec, num_blocks: int, op: Operation, what: str) -> None:
    """RAM is taken page by page: too much of it ends the process, not the call. At least so much is needed."""
    sides_in_ram = (op == "swap") + (not has_gpu())
    needed = sides_in_ram * (SPARE + 1) * num_blocks * spec.num_layers * spec.block_bytes  # and one piece beside them
    if needed > available_bytes():
        raise MemoryError(
            f"{what}: {needed} bytes of host memory are needed, {available_bytes()} are available; "
            "take fewer layers or blocks"
        )


@dataclass(frozen=True)
class _Bench:
    """Where and how the methods of one case are measured."""

    axes: Axes
    what: str
    ways: list[Way]
    clock: Clock
    streams: list[Any]

    def measure(
        self, name: str, method: methods.Method, cases: list[Case], load: ComputeLoad | None
    ) -> tuple[Timing, float | None] | None:
        """Checks, then times. Returns the slowdown of the load too; None where the method does not apply."""
        calls = [method(*each) for each in zip(cases, self.ways, self.streams, strict=True)]
        enqueues = [call for call in calls if call is not None]
        if len(enqueues) < len(calls):
            return None
        for case, way, enqueue, stream in zip(cases, self.ways, enqueues, self.streams, strict=True):
            if not moves_the_bytes(case, way, enqueue, stream):
                raise WrongBytes(f"{name} moved wrong bytes: {self.what}")
        timing = _time(self.clock, self.axes, enqueues, self.streams)
        if load is None or len(enqueues) > 1:
            return timing, None
        beside_ms, slowdown = beside(load, enqueues[0], self.streams[0], timing.median_ms)
        return Timing(beside_ms, beside_ms, beside_ms, timing.host_us, 1), slowdown


def _second_stream() -> Any:
    if not has_gpu():
        return None
    from ..backend.cupy_backend import transfer_stream

    return transfer_stream()


def _time(clock: Clock, axes: Axes, enqueues: list[methods.Enqueue], streams: list[Any]) -> Timing:
    """Both directions at once are timed from before the first to behind the last of them."""
    if len(enqueues) == 1:
        return measure(clock, enqueues[0], warmups=axes.warmups, repeats=axes.repeats)

    def together() -> None:
        if has_gpu():
            streams[1].wait_event(streams[0].record())
        for enqueue in enqueues:
            enqueue()
        if has_gpu():
            streams[0].wait_event(streams[1].record())

    return measure(clock, together, warmups=axes.warmups, repeats=axes.repeats)


def _rate(cases: list[Case], timing: Timing) -> float:
    return sum(case.total_bytes for case in cases) / timing.median_ms / 1e6


def _row(
    axes: Axes,
    cases: list[Case],
    way: Way,
    name: str,
    timing: Timing,
    peak_rate: float,
    slowdown: float | None,
) -> Row:
    case, rate = cases[0], _rate(cases, timing)
    return Row(
        model=axes.model,
        tp=axes.tp,
        op=case.op,
        tokens_per_block=case.spec.block_size,
        num_blocks=case.num_blocks,
        pattern=case.pattern,
        direction=way,
        memory="pinned" if axes.pinned and has_gpu() else "pageable",
        alignment=case.alignment,
        load=axes.load if slowdown is not None else "none",
        backend=name,
        total_bytes=sum(one.total_bytes for one in cases),
        inner_bytes=case.spec.tensor_block_bytes(case.spec.tensor_names[0]),
        copy_size=case.copy_bytes,
        num_copies=sum(one.num_copies for one in cases),
        median_ms=timing.median_ms,
        p10_ms=timing.p10_ms,
        p90_ms=timing.p90_ms,
        noise_percent=timing.noise_percent,
        host_us=timing.host_us,
        bandwidth_gbps=rate,
        percent_of_peak=100 * rate / peak_rate,
        load_slowdown_percent=slowdown,
        bytes_checked=True,  # a method that moves other bytes has no row
    )
