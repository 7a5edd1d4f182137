"""``python -m paddle_kv.testing.simulator --seed N``: plays random traffic on the simulator, or repeats a run."""

from __future__ import annotations

import argparse
import sys
import time

from .mutations import REMOVALS
from .replay import play
from .simulation import OrderingError


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """0 if all runs were right, 1 after the first that was not."""
    parser = argparse.ArgumentParser(prog="python -m paddle_kv.testing.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=count, default=1, help="runs with consecutive seeds")
    parser.add_argument("--steps", type=count, default=60, help="actions of the server in each run")
    parser.add_argument("--drop", action="append", default=[], choices=sorted(REMOVALS), help="what to leave out")
    parser.add_argument("--no-faults", action="store_true", help="no copy and no submission breaks")
    parser.add_argument("--trace", action="store_true", help="print what the server did, and each step of the device")
    given = parser.parse_args(arguments)
    started, moves = time.perf_counter(), 0
    for seed in range(given.seed, given.seed + given.runs):
        try:
            settings = {"num_steps": given.steps, "drop": given.drop, "faults": not given.no_faults}
            server = play(seed, **settings, whole_trace=given.trace)
        except OrderingError as error:
            print(error)
            return 1
        moves += server.moves
        if given.trace:
            print("\n".join([*server.trace, *server.simulation.device.history]))
    print(f"{given.runs} runs, {moves} blocks moved, no problem found, {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
