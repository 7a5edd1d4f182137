"""Times to the first token while other prompts are expected, with real bytes on the CPU backend.

``python -m tests.offload.urgent_times``: link and tier are throttled, and the model is a sleep for each layer. All
prompts lie in the tier. First an urgent prompt comes right behind ``expect`` of ten others, and without; then ten
prompts come one behind the other that were all expected before, and without. All bytes are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paddle_kv.offload.rates import Rates
from tests.offload.chunk_rig import BLOCK_BYTES, SIZE, WAIT_S
from tests.offload.real_times import Server, Shape

EXPECTED = 10  # prompts
LINK = 50  # times as quick as the model


class Queue:
    """A server with prompts of which all lie in the tier."""

    def __init__(self, folder: Path, block_s: float, tier: float, host_blocks: int | None = None) -> None:
        """``tier``: times as quick as the model."""
        self.server = Server(folder, block_s, EXPECTED + 1, host_blocks=host_blocks)
        self.tier_s, self.link_s = block_s / tier, block_s / LINK
        self.prefetches: list[Any] = []

    def begin(self, *, expects: bool) -> None:
        server = self.server
        rig = server.rig
        server.link.block_s = server.tier.block_s = 0.0
        for prefetch in self.prefetches:
            prefetch.cancel()
            assert prefetch.wait(WAIT_S)
        rig.check_books()
        rig.manager.evict(1 << 20)
        rates = Rates(BLOCK_BYTES, SIZE)
        for name, seconds in (("onload", self.link_s), ("tier", self.tier_s)):
            rates.set_load(name, BLOCK_BYTES / seconds, spread=0.3)  # of a machine that has other work
        rates.set_prefill(server.block_s / SIZE)
        rig.manager._books.rates = rates
        server.link.block_s, server.tier.block_s = self.link_s, self.tier_s
        expected = server.prompts[1:] if expects else ()
        self.prefetches = [rig.manager.expect(rig.manager.block_hashes(prompt)) for prompt in expected]

    def first_token_s(self, number: int) -> float:
        return self.server.serve(number, "sooner")

    def urgent_s(self, *, expects: bool) -> float:
        self.begin(expects=expects)
        return self.first_token_s(0)

    def all_s(self, *, expects: bool, between_s: float = 0.0) -> float:
        """``between_s``: behind each of them the server does something else."""
        self.begin(expects=expects)
        taken_s = 0.0
        for number in range(1, EXPECTED + 1):
            taken_s += self.first_token_s(number)
            time.sleep(between_s)
        return taken_s

    def close(self) -> None:
        self.server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-ms", type=float, default=10.0, help="that the model needs")
    parser.add_argument("--tier", type=float, nargs="+", default=[2.0, 4.0], help="times as quick as the model")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--host-blocks", type=int, help="by default for all prompts")
    parser.add_argument("--between-ms", type=float, default=0.0, help="behind each prompt: of other work")
    chosen = parser.parse_args()
    shape, computed_s = Shape(), Shape().total * chosen.block_ms / 1e3
    print(f"prompts of {shape.total} blocks in chunks of {shape.chunk}, computed in {computed_s:.2f} s")
    print(
        "tier: s to the first token of an urgent prompt, alone and beside what is expected; s for all, not expected and"
    )
    print("expected")
    for tier in chosen.tier:
        with tempfile.TemporaryDirectory() as folder:
            queue = Queue(Path(folder), chosen.block_ms / 1e3, tier, chosen.host_blocks)
            for _ in range(chosen.times):
                ways = (False, True)
                urgent = [queue.urgent_s(expects=expects) for expects in ways]
                every = [queue.all_s(expects=expects, between_s=chosen.between_ms / 1e3) for expects in ways]
                print(f"{tier:4.1f} | {urgent[0]:.3f} {urgent[1]:.3f} | {every[0]:.3f} {every[1]:.3f}", flush=True)
            queue.close()


if __name__ == "__main__":
    sys.exit(main())
