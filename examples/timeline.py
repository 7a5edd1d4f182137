"""Records what ran when, and draws it: one lane per stream, one bar per layer.

    python examples/timeline.py trace.json picture.png        draws a trace that a demo has written

The trace is in Chrome's format: ui.perfetto.dev and chrome://tracing open it.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LANES = ("onload", "compute", "wait", "offload")
LANE_TITLES = {
    "onload": "onload\n(host to device)",
    "compute": "model",
    "offload": "offload\n(device to host)",
}
WAIT_COLOUR = "crimson"
LABEL_MIN_SHARE = 0.012  # narrower bars have no room for their layer's number


@dataclass(frozen=True)
class Span:
    lane: str
    layer: int
    start_ms: float
    end_ms: float


class Recorder:
    """Collects spans, read from one clock."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self.spans: list[Span] = []

    @contextmanager
    def span(self, lane: str, layer: int) -> Iterator[None]:
        start_ms = self._now_ms()
        yield
        self.spans.append(Span(lane, layer, start_ms, self._now_ms()))


def transfer_spans(lane: str, layer_times_ms: Iterable[tuple[float, float]]) -> list[Span]:
    """The spans of a finished transfer, from ``Transfer.layer_times_ms``."""
    return [Span(lane, layer, start_ms, end_ms) for layer, (start_ms, end_ms) in enumerate(layer_times_ms)]


def total_ms(spans: Iterable[Span]) -> float:
    return sum(span.end_ms - span.start_ms for span in spans)


def overlap_ms(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """How much of ``spans`` passed while one of ``others`` ran. Spans of one list must not overlap each other."""
    if not spans or not others:
        return 0.0
    starts, ends = np.array([(span.start_ms, span.end_ms) for span in spans]).T
    other_starts, other_ends = np.array([(span.start_ms, span.end_ms) for span in others]).T
    shared = np.minimum(ends[:, None], other_ends) - np.maximum(starts[:, None], other_starts)
    return float(np.clip(shared, 0.0, None).sum())


def write_trace(spans: Iterable[Span], path: Path) -> None:
    """Chrome's trace format: complete events in microseconds, one thread per lane."""
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(LANES)
    ]
    events = [
        {
            "name": f"{span.lane} layer {span.layer}",
            "ph": "X",
            "pid": 0,
            "tid": LANES.index(span.lane),
            "ts": span.start_ms * 1000,
            "dur": (span.end_ms - span.start_ms) * 1000,
            "args": {"layer": span.layer},
        }
        for span in spans
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))


def read_trace(path: Path) -> list[Span]:
    return [
        Span(
            LANES[event["tid"]],
            event["args"]["layer"],
            event["ts"] / 1000,
            (event["ts"] + event["dur"]) / 1000,
        )
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]


def draw(spans: Sequence[Span], path: Path, title: str = "") -> None:
    """One lane per stream as a PNG; bars carry their layer's number and colour, waits of the model are red."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    origin_ms = min(span.start_ms for span in spans)
    length_ms = max(span.end_ms for span in spans) - origin_ms
    num_layers = max(span.layer for span in spans) + 1
    colours = pyplot.get_cmap("viridis")
    lanes = list(LANE_TITLES)
    figure, axes = pyplot.subplots(figsize=(12, 3.6), dpi=120, layout="constrained")
    for span in spans:
        height = lanes.index("compute" if span.lane == "wait" else span.lane)
        colour = WAIT_COLOUR if span.lane == "wait" else colours(0.25 + 0.7 * span.layer / max(1, num_layers - 1))
        edge = 0.8 if span.lane in ("onload", "offload") else 0  # short copies stay visible, short waits do not matter
        left_ms, width_ms = span.start_ms - origin_ms, span.end_ms - span.start_ms
        axes.barh(
            height,
            width_ms,
            left=left_ms,
            height=0.7,
            color=colour,
            edgecolor=colour,
            linewidth=edge,
        )
    for span in _longest_of_each_layer(spans):
        if span.end_ms - span.start_ms > LABEL_MIN_SHARE * length_ms:
            middle_ms = (span.start_ms + span.end_ms) / 2 - origin_ms
            axes.text(
                middle_ms,
                lanes.index(span.lane),
                str(span.layer),
                ha="center",
                va="center",
                fontsize=7,
            )
    axes.set_yticks(range(len(lanes)), [LANE_TITLES[lane] for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, length_ms)
    axes.set_xlabel("ms (the number in a bar is its layer)")
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    if any(span.lane == "wait" for span in spans):
        waiting = Patch(color=WAIT_COLOUR, label="the model waits for a layer")
        figure.legend(handles=[waiting], loc="outside upper right", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _longest_of_each_layer(spans: Iterable[Span]) -> list[Span]:
    """The bars that carry a number: one for each lane and layer."""
    longest: dict[tuple[str, int], Span] = {}
    for span in spans:
        best = longest.get((span.lane, span.layer))
        if span.lane != "wait" and (best is None or span.end_ms - span.start_ms > best.end_ms - best.start_ms):
            longest[span.lane, span.layer] = span
    return list(longest.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws a trace that a demo has written.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    draw(read_trace(options.trace), options.picture, options.title)


if __name__ == "__main__":
    main()
