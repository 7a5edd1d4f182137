"""Ranks that are killed or stopped at any moment, while an engine with two of them serves prompts.

    python -m tests.offload.killed_ranks --kills 100 --seed 0

The engine is that of examples/two_ranks.py: each block that is called loaded is compared on each rank.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

from examples.two_ranks import Engine, Sizes, prompts, start_process

SIZES = Sizes(device_blocks=40, host_blocks=24, block_elements=4096)
MOST_S = 60.0


@dataclass
class Figures:
    kills: int = 0
    prompts: int = 0
    loaded_blocks: int = 0
    longest_s: float = 0.0


def warm_start() -> Any:
    """Ranks are forks of a process that has imported Paddle already."""
    import multiprocessing

    multiprocessing.set_forkserver_preload(["paddle_kv.offload.mover", "paddle_kv.integrations", "examples.two_ranks"])
    return functools.partial(start_process, sizes=SIZES, method="forkserver")


def run(kills: int, seed: int, *, timeout_s: float, number: int = signal.SIGKILL) -> Figures:
    chooser, figures = random.Random(seed), Figures()
    engine = Engine(warm_start(), SIZES, timeout_s=timeout_s)
    try:
        while figures.kills < kills:
            engine.wait_until_ready(MOST_S)
            victim = chooser.choice(engine.processes)
            timer = threading.Timer(chooser.uniform(0, 0.05), os.kill, (victim.pid, number))
            timer.start()
            before = engine.loaded_blocks
            deadline_s = time.monotonic() + MOST_S
            while victim in engine.processes:  # another one may have taken its place before a prompt is served
                serve(engine, chooser, figures)
                assert time.monotonic() < deadline_s, "a rank that is dead was not missed"
            timer.join()
            serve(engine, chooser, figures)  # the others go on
            figures.kills += 1
            figures.loaded_blocks += engine.loaded_blocks - before
            assert engine.wrong == 0
        engine.wait_until_ready(MOST_S)
        for keys in prompts(7) * 2:
            engine.serve(keys)
            engine.settle()
        assert engine.loaded_blocks > before, "those that came back are not used"
        assert engine.wrong == 0
    finally:
        engine.close()
    return figures


def serve(engine: Engine, chooser: random.Random, figures: Figures) -> None:
    start = time.monotonic()
    engine.serve(chooser.choice(prompts(7)))
    if chooser.random() < 0.5:
        engine.settle()  # so that the next one finds what this one has saved
    figures.prompts += 1
    figures.longest_s = max(figures.longest_s, time.monotonic() - start)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--timeout-s", type=float, default=2.0)
    options.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    given = options.parse_args()
    number = signal.SIGSTOP if given.stop else signal.SIGKILL
    found = run(given.kills, given.seed, timeout_s=given.timeout_s, number=number)
    print(
        f"{found.kills} ranks killed, {found.prompts} prompts served, {found.loaded_blocks} blocks loaded, "
        f"the longest prompt took {found.longest_s:.2f} s, 0 wrong bytes"
    )


if __name__ == "__main__":
    main()
