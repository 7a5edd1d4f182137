"""``python -m paddle_kv.testing.simulator --seed N``: plays random traffic on the simulator, or repeats a run."""

from __future__ import annotations

import argparse
import sys
import time

from .clients import Clients
from .mutations import REMOVALS
from .replay import play, play_clients
from .simulation import OrderingError
from .traffic import Server


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
    parser.add_argument("--threads", type=count, help="so many threads that share a manager and an adapter")
    parser.add_argument("--lines", action="store_true", help="with --threads: they can be left at each line")
    parser.add_argument("--forks", type=int, default=0, help="with --threads: of the process, in each run")
    parser.add_argument("--prefer", action="append", default=[], help="with --threads: an action to take more often")
    given = parser.parse_args(arguments)
    if given.threads and given.drop:
        parser.error("--drop goes without --threads")
    started, moves = time.perf_counter(), 0
    for seed in range(given.seed, given.seed + given.runs):
        try:
            settings = {"num_steps": given.steps, "faults": not given.no_faults, "whole_trace": given.trace}
            if given.threads:
                threads = {"num_threads": given.threads, "forks": given.forks, "lines": given.lines}
                player: Server | Clients = play_clients(seed, prefer=given.prefer, **threads, **settings)
            else:
                player = play(seed, drop=given.drop, **settings)
        except OrderingError as error:
            print(error)
            return 1
        moves += player.moves
        if given.trace:
            print("\n".join([*player.trace, *player.simulation.device.history]))
    print(f"{given.runs} runs, {moves} blocks moved, no problem found, {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
