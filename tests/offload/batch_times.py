"""Times to the first token where several prompts share each pass of the model, with real bytes on the CPU backend.

``python -m tests.offload.batch_times``: some prompts of which nothing is found are being computed, and others come one
by one that are found: in host memory, then in the tier. Each pass is over a chunk of every prompt, or over so many
blocks of all of them together. Link and tier are throttled, and the model is a sleep for each layer; all bytes are
compared. All computed, all loaded, and the library.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.offload.chunk_rig import SIZE, SPEC, WAIT_S
from tests.offload.real_times import Server, Shape

WAYS = ("compute", "load", "sooner")


@dataclass(frozen=True)
class Batch:
    """Prompts of one round.

    Attributes:
        new: of which nothing is found, there from the beginning.
        found: that come so many passes one behind the other.
        passes_between: the first of them comes behind so many too.
        pass_blocks: of all prompts together, shared equally; None: a chunk of each.
    """

    new: int = 3
    found: int = 3
    passes_between: int = 2
    pass_blocks: int | None = 8

    @property
    def total(self) -> int:
        return self.new + self.found


class BatchServer:
    def __init__(self, folder: Path, block_s: float, shape: Shape, batch: Batch) -> None:
        self.server, self.batch = Server(folder, block_s, batch.total, shape, at_once=batch.total), batch

    def first_tokens_s(self, way: Any) -> list[float]:
        """Of each prompt, since it came."""
        batch, server = self.batch, self.server
        every = range(batch.total)
        server.place(every[batch.new :], new=every[: batch.new])
        for table in server.tables:
            server.rig.poison(table)
        waiting, came_s, taken_s, left, passes = list(every), [0.0] * batch.total, [0.0] * batch.total, {}, 0
        with contextlib.ExitStack() as stack:
            while waiting or left:
                while waiting and passes >= batch.passes_between * (waiting[0] - batch.new + 1):
                    number = waiting.pop(0)
                    came_s[number] = time.monotonic()
                    left[number] = stack.enter_context(self._request(number, way))
                for number, chunk in self._run_pass(left).items():
                    if chunk is None:
                        taken_s[number] = time.monotonic() - came_s[number]
                        del left[number]
                passes += 1
        for number in every:
            server.rig.check(server.tables[number], server.expected[number])
        return taken_s

    def _request(self, number: int, way: Any) -> Any:
        server = self.server
        chunk_tokens = server.shape.chunk * SIZE
        prompt, table = server.prompts[number], server.tables[number]
        return server.rig.manager.request(prompt, table, chunk_tokens=chunk_tokens, how=way)

    def _run_pass(self, requests: dict[int, Any]) -> dict[int, range | None]:
        blocks, server = self.batch.pass_blocks, self.server
        most = None if blocks is None or not requests else max(1, blocks * SIZE // len(requests))
        chunks = {number: request.next_chunk(most, timeout_s=WAIT_S) for number, request in requests.items()}
        work = [
            (requests[number], chunk, server.tables[number], server.expected[number])
            for number, chunk in chunks.items()
            if chunk is not None
        ]
        if work:
            server.rig.run_pass(work)
        return chunks

    def close(self) -> None:
        self.server.close()


def measure(made: BatchServer, before: int, rounds: int, ways: Sequence[str] = WAYS) -> dict[str, np.ndarray]:
    """[rounds, prompts], in seconds; behind so many rounds in which the library measures."""
    taken: dict[str, list[list[float]]] = {way: [] for way in ways}
    for number, way in itertools.product(range(before + rounds), ways):  # in turns
        found = made.first_tokens_s(way)
        if number >= before:
            taken[way].append(found)
    return {way: np.array(found) for way, found in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-ms", type=float, default=4.0, help="that the model needs")
    parser.add_argument("--new", type=int, default=3, help="prompts of which nothing is found")
    parser.add_argument("--found", type=int, default=3, help="prompts that come one by one")
    parser.add_argument("--passes-between", type=int, default=2)
    parser.add_argument("--pass-blocks", type=int, default=8, help="of all prompts together; 0: a chunk of each")
    parser.add_argument("--link", type=float, nargs="+", default=[3.0, 1.0, 0.3], help="times as quick as the model")
    parser.add_argument("--tier", type=float, nargs="+", default=[1.0], help="times as quick as the model")
    parser.add_argument("--host-blocks", type=int, default=24)
    parser.add_argument("--tier-blocks", type=int, default=0)
    parser.add_argument("--end-blocks", type=int, default=0, help="that are found nowhere")
    parser.add_argument("--chunk-blocks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--head-dim", type=int, default=SPEC.head_dim, help="512: a tier reads layer by layer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--before", type=int, default=4, help="in which the library measures")
    chosen = parser.parse_args()
    gc.collect()
    gc.freeze()  # else a full collection goes through all of Paddle's objects, and takes as long as a load
    blocks = chosen.host_blocks, chosen.tier_blocks, chosen.end_blocks, chosen.chunk_blocks
    shape = Shape(*blocks, chosen.layers, chosen.head_dim)
    batch = Batch(chosen.new, chosen.found, chosen.passes_between, chosen.pass_blocks or None)
    print("link and tier, times as quick as the model; s to the first token: mean of all, and of those that are found,")
    print("computed | loaded | decided; the mean of all, of the better")
    for link, tier in itertools.product(chosen.link, chosen.tier):
        with tempfile.TemporaryDirectory() as folder:
            made = BatchServer(Path(folder), chosen.block_ms / 1e3, shape, batch)
            made.server.link.block_s, made.server.tier.block_s = (made.server.block_s / times for times in (link, tier))
            taken = measure(made, chosen.before, chosen.rounds)
            made.close()
        means = {way: found.mean() for way, found in taken.items()}
        texts = [f"{means[way]:.3f} {found[:, batch.new :].mean():.3f}" for way, found in taken.items()]
        ratio = means["sooner"] / min(means["compute"], means["load"])
        print(f"{link:5.2f} {tier:5.2f} | {' | '.join(texts)} | {ratio:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
