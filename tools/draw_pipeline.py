"""Draws docs/images/pipeline.png: what the streams do, with and without paddle_kv. python tools/draw_pipeline.py

A drawing, not a measurement: the times are made up. Measured ones are drawn by examples/timeline.py.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "pipeline.png"
LAYERS = 4
LOAD, COMPUTE, SAVE = 1.5, 2.0, 0.8  # lengths of one layer's bars
COLOURS = {"load": "#7aa6d8", "compute": "#9bc58b", "save": "#e8b26a"}


def bar(axes: Axes, lane: int, start: float, length: float, kind: str, text: str) -> float:
    """Returns where it ends."""
    axes.barh(lane, length, left=start, height=0.62, color=COLOURS[kind], edgecolor="white")
    axes.text(start + length / 2, lane, text, ha="center", va="center", fontsize=8)
    return start + length


def arrow(axes: Axes, time: tuple[float, float], lanes: tuple[int, int]) -> None:
    towards = 0.32 if lanes[1] > lanes[0] else -0.32
    axes.annotate(
        "",
        xy=(time[1], lanes[1] - towards),
        xytext=(time[0], lanes[0] + towards),
        arrowprops={"arrowstyle": "-|>", "color": "#444444", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0},
    )


def on_the_compute_stream(axes: Axes) -> None:
    now = 0.0
    for layer in range(LAYERS):
        now = bar(axes, 0, now, LOAD, "load", f"load {layer}")
    for layer in range(LAYERS):
        now = bar(axes, 0, now, COMPUTE, "compute", f"compute {layer}")
    for layer in range(LAYERS):
        now = bar(axes, 0, now, SAVE, "save", f"{layer}" if layer else "save 0")
    axes.set_yticks([0], ["compute stream"])
    axes.set_title("Copies on the compute stream: everything waits for everything", fontsize=10, loc="left")


def on_three_streams(axes: Axes) -> None:
    loaded, computed = 0.0, 0.0
    for layer in range(LAYERS):
        loaded = bar(axes, 0, loaded, LOAD, "load", f"load {layer}")
        start = max(loaded, computed)
        arrow(axes, (loaded, start + 0.06), (0, 1))
        computed = bar(axes, 1, start, COMPUTE, "compute", f"compute {layer}")
        arrow(axes, (computed, computed + 0.06), (1, 2))
        bar(axes, 2, computed, SAVE, "save", f"save {layer}")
    axes.set_yticks([0, 1, 2], ["onload stream", "compute stream", "offload stream"])
    axes.set_title("paddle_kv: layer i waits for layer i only (arrows: waits on the device)", fontsize=10, loc="left")


def main() -> None:
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, 4.2), dpi=110, height_ratios=(1, 3), sharex=True, layout="constrained"
    )
    on_the_compute_stream(above)
    on_three_streams(below)
    for axes in (above, below):
        axes.invert_yaxis()
        axes.tick_params(left=False)
        axes.set_xticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    below.set_xlim(0, LAYERS * (LOAD + COMPUTE + SAVE) + 0.2)
    below.set_xlabel("time", loc="right")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
