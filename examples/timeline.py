"""Records what ran when, and draws it: one lane per stream, one bar per layer.

    python examples/timeline.py trace.json picture.png        draws a trace that a demo has written

The trace is in Chrome's format: ui.perfetto.dev and chrome://tracing open it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import numpy as np

from paddle_kv.schedule.trace import Span, read_trace

LANE_TITLES = {
    "onload": "onload\n(host to device)",
    "compute": "model",
    "offload": "offload\n(device to host)",
}
WAIT_COLOUR = "crimson"
LABEL_MIN_SHARE = 0.012  # narrower bars have no room for their layer's number


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
