"""What ran when, as a trace that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .transfer import Transfer


@dataclass(frozen=True)
class Span:
    """One bar: something that one lane did for one layer.

    Attributes:
        lane: the row, for example ``"model"``.
        layer: of what.
        start_ms: milliseconds since the scheduler was made.
        end_ms: the same.
    """

    lane: str
    layer: int
    start_ms: float
    end_ms: float


def spans_of(transfer: Transfer) -> list[Span]:
    """One span per layer of a transfer that is over, in the lane "onload" or "offload".

    Raises:
        ValueError: its times are not known: it is not over, or has failed, or its scheduler was made without
            ``record_layer_times=True``.
    """
    times = transfer.layer_times_ms
    plan = transfer.plan
    layers = [layer for group in plan.groups for layer in plan.layers_of(group)]
    if len(times) != len(layers):
        raise ValueError(
            "the transfer has no times: a scheduler with record_layer_times=True, and a transfer that is over and has "
            "not failed, are expected"
        )
    return [Span(plan.direction, layer, *time) for layer, time in zip(layers, times, strict=True)]


def write_trace(path: Path | str, transfers: Iterable[Transfer] = (), spans: Sequence[Span] = ()) -> None:
    """Writes transfers that are over, layer by layer, and further spans (such as the model's) as a trace.

    One row per lane. All times are on the axis of ``Transfer.layer_times_ms``: milliseconds since the scheduler was
    made, so take the transfers of one scheduler, and the times of other spans from ``LayerwiseScheduler.now_ms`` (CPU
    backend) or from events measured against ``LayerwiseScheduler.origin_event`` (GPU).

    Args:
        path: JSON file in Chrome's trace format; its folder is made.
        transfers: of a scheduler with ``record_layer_times=True``.
        spans: drawn in front of them, lanes in order of appearance.

    Raises:
        TypeError: ``transfers`` or ``spans`` holds something else.
        ValueError: a transfer's times are not known, see :func:`spans_of`: leave out those that have an ``error``, and
            those that are not ``done()``. Nothing is written.

    Example:
        >>> import json, tempfile, pathlib
        >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Span, write_trace
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace.json"
        >>> cache, pool = DeviceCache(spec, 5, "cpu"), HostPool(spec, 8)
        >>> with LayerwiseScheduler(cache, pool, record_layer_times=True) as scheduler:
        ...     save = scheduler.offload([2], [0])
        ...     save.wait()
        ...     write_trace(path, [save], [Span("model", 0, 0.0, scheduler.now_ms())])
        >>> [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        ['model layer 0', 'offload layer 0', 'offload layer 1']
    """
    if isinstance(transfers, Transfer):
        raise TypeError(f"transfers is {transfers!r}; a list of Transfer is expected")
    for name, items, kind in (("transfers", transfers := list(transfers), Transfer), ("spans", spans, Span)):
        for number, item in enumerate(items):
            if not isinstance(item, kind):
                raise TypeError(f"{name}[{number}] is {item!r}; a {kind.__name__} is expected")
    events = [_event(span, {}) for span in spans]
    for number, transfer in enumerate(transfers):
        facts = {"transfer": number, "transfer_bytes": transfer.bytes, "transfer_ms": transfer.elapsed_ms}
        events += [_event(span, facts) for span in spans_of(transfer)]
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(str(event["tid"]) for event in events))}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    for event in events:
        event["tid"] = lanes[str(event["tid"])]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))


def read_trace(path: Path | str) -> list[Span]:
    """The spans of a file that :func:`write_trace` has written."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [
        Span(
            lanes[event["tid"]],
            event["args"]["layer"],
            event["ts"] / 1000,
            (event["ts"] + event["dur"]) / 1000,
        )
        for event in events
        if event["ph"] == "X"
    ]


def _event(span: Span, facts: dict[str, float]) -> dict[str, object]:
    return {
        "name": f"{span.lane} layer {span.layer}",
        "ph": "X",
        "pid": 0,
        "tid": span.lane,
        "ts": span.start_ms * 1000,
        "dur": (span.end_ms - span.start_ms) * 1000,
        "args": {"layer": span.layer, **facts},
    }
