"""Times to the first token with real bytes, on the CPU backend: all computed, all loaded, and the library.

``python -m tests.offload.real_times``: link and tier are throttled, and the model is a sleep for each layer, so that a
block takes as many times as long to be loaded as to be computed as on a server (Llama-3.1-70B on 8 ranks, 60,000 tokens
a second). One request at a time, which may come some time before its turn, or several that come at once and are
computed one behind the other: the first blocks of each lie in host memory, the next ones in the tier, and the last ones
nowhere; all bytes are compared. Loading all is not run where it takes more than three times as long by its rates.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paddle_kv.backend import binding
from paddle_kv.offload.rates import Rates
from paddle_kv.tiers import FilesEngine
from tests.offload.chunk_rig import SIZE, SPEC, WAIT_S, ChunkRig, contents

GB_S_AS_COMPUTED = 512 * 40_960 / (512 / 60_000) / 1e9  # a link of so many is as quick as the model
NOT_RUN = 3.0
OVERSLEPT_S = 1e-3
SLICE_S = 0.5e-3  # then it is the turn of another


@dataclass(frozen=True)
class Shape:
    """Blocks of a prompt, by where they are, and of a pass of the model, its layers, and elements of a head of its only
    one: a tier reads an object layer by layer if a layer of it has 16 KiB, so from 512 on. One token comes behind all.
    """

    host: int = 20
    tier: int = 20
    end: int = 0
    chunk: int = 4
    layers: int = SPEC.num_layers
    head_dim: int = SPEC.head_dim

    @property
    def total(self) -> int:
        return self.host + self.tier + self.end


class Channel:
    """Each block takes so many seconds; what moves at the same time shares it. What comes right behind another one is
    not later by what the thread before it overslept."""

    def __init__(self) -> None:
        self.block_s = self._free_s = 0.0
        self._lock = threading.Lock()

    def move(self, blocks: float) -> None:
        left_s = blocks * self.block_s
        while left_s > 0.0:
            with self._lock:
                now_s = time.monotonic()
                begin_s = self._free_s if now_s < self._free_s + OVERSLEPT_S else now_s
                self._free_s = end_s = begin_s + min(left_s, SLICE_S)
            left_s -= SLICE_S
            time.sleep(max(0.0, end_s - time.monotonic()))


def throttle(link: Channel, num_layers: int) -> Callable[[], None]:
    """From now on whatever the CPU backend loads takes its time on ``link``; returns what ends that."""
    copy = binding.copy

    def slow_copy(number: int, plan: Any, layers: range) -> None:
        if plan.direction == "onload":
            link.move(len(plan.device_ids) * len(layers) / num_layers)
        copy(number, plan, layers)

    def restore() -> None:
        binding.copy = copy

    binding.copy = slow_copy
    return restore


class Slow(FilesEngine):
    def __init__(self, folder: Path, channel: Channel, room_bytes: int = 1 << 28) -> None:
        super().__init__({folder: room_bytes}, threads_per_root=4)
        self.roots[0].most_batched = 1
        self._channel = channel

    def read(self, items: Any) -> None:
        super().read([_SlowRead(item, self._channel) for item in items])  # type: ignore[misc]


class _SlowRead:
    def __init__(self, item: Any, channel: Channel) -> None:
        self._item, self._channel = item, channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)

    def arrived(self, stage: int) -> bool:
        self._channel.move(self._item.stage_bytes(stage) / self._item.size_bytes)
        return bool(self._item.arrived(stage))


class Server:
    def __init__(
        self,
        folder: Path,
        block_s: float,
        num_prompts: int,
        shape: Shape = Shape(),
        ahead_s: float = 0.0,
        host_blocks: int | None = None,
        at_once: int = 1,
    ) -> None:
        """``host_blocks``: None: for all. ``at_once``: prompts that come at once, at most."""
        self.link, self.tier, self.block_s, self.shape, self._ahead_s = Channel(), Channel(), block_s, shape, ahead_s
        self.spec = spec = replace(SPEC, num_layers=shape.layers, head_dim=shape.head_dim)
        self.asleep = True
        self._unthrottle = throttle(self.link, spec.num_layers)
        size = shape.total + 1
        self.tables = [list(range(first, first + size)) for first in range(0, at_once * size, size)]
        self.rig = ChunkRig(
            Slow(folder, self.tier),
            host_blocks=host_blocks or 64 * num_prompts,
            device_blocks=max(64, at_once * size),
            pause=self._compute,
            spec=spec,
        )
        self.prompts = [[number] * (shape.total * SIZE + 1) for number in range(num_prompts)]
        self.expected = [contents(prompt, spec) for prompt in self.prompts]
        for prompt in self.prompts:
            self.rig.prefill(prompt, self.tables[0], chunk_tokens=shape.chunk * SIZE)
            self.rig.check_books()
        books: Any = self.rig.manager._books
        books.rates = self._unknown()
        self.asleep = False

    def _compute(self, tokens: range) -> None:
        if not self.asleep:
            time.sleep(len(tokens) / SIZE * self.block_s / self.spec.num_layers)

    def _unknown(self) -> Rates:
        return Rates(self.spec.block_bytes * self.spec.num_layers, SIZE)

    def first_token_s(self, number: int, how: Any) -> float:
        [taken_s] = self.first_tokens_s([number], how)
        return taken_s

    def first_tokens_s(self, numbers: Sequence[int], how: Any) -> list[float]:
        """Of prompts that come at once."""
        self.place(numbers)
        return self.serve_all(numbers, how)

    def place(self, numbers: Sequence[int], new: Sequence[int] = ()) -> None:
        """The blocks of these prompts where they belong; of ``new`` ones nothing is found."""
        rig, shape = self.rig, self.shape
        books: Any = rig.manager._books
        known, books.rates = books.rates, self._unknown()  # what follows says nothing of link and tier
        speeds = self.link.block_s, self.tier.block_s
        self.link.block_s = self.tier.block_s = 0.0
        rig.check_books()
        rig.manager.evict(1 << 20)
        for number in numbers:
            hashes = rig.manager.block_hashes(self.prompts[number])
            rig.manager.drop(hashes[shape.host + shape.tier :])  # what the last request has computed of it
            rig.manager.prefetch(hashes[: shape.host], timeout_s=WAIT_S).wait(WAIT_S)
        for number in new:
            rig.manager.drop(rig.manager.block_hashes(self.prompts[number]))
        rig.check_books()
        self.link.block_s, self.tier.block_s = speeds
        books.rates = known

    def serve(self, number: int, how: Any) -> float:
        [taken_s] = self.serve_all([number], how)
        return taken_s

    def serve_all(self, numbers: Sequence[int], how: Any) -> list[float]:
        """Seconds from the turn of the first one to each first token, after all was compared."""
        rig, chunk_tokens = self.rig, self.shape.chunk * SIZE
        served = [(self.prompts[number], table) for number, table in zip(numbers, self.tables, strict=False)]
        for _, table in served:
            rig.poison(table)
        begun, taken_s = time.monotonic() + self._ahead_s, []
        requests = [rig.manager.request(*one, chunk_tokens=chunk_tokens, how=how) for one in served]
        if self._ahead_s:
            time.sleep(max(0.0, begun - time.monotonic()))  # others are computed
        for number, request, (_, table) in zip(numbers, requests, served, strict=True):
            with request:
                while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
                    rig.run_or_fail(request, chunk, table, self.expected[number])
            taken_s.append(time.monotonic() - begun)
        for number, (_, table) in zip(numbers, served, strict=True):
            rig.check(table, self.expected[number])
        return taken_s

    def close(self) -> None:
        self.link.block_s = self.tier.block_s = 0.0
        self.rig.close()
        self._unthrottle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-ms", type=float, default=10.0, help="that the model needs")
    parser.add_argument("--requests", type=int, default=10, help="that count, of each way")
    parser.add_argument("--before", type=int, default=6, help="in which the library measures")
    parser.add_argument("--link-gbps", type=float, nargs="+", default=[0.1, 1.0, 2.5, 10.0, 50.0])
    parser.add_argument("--tier-gbps", type=float, nargs="+", default=[0.05, 0.5, 5.0])
    parser.add_argument("--host-blocks", type=int, default=20)
    parser.add_argument("--tier-blocks", type=int, default=20)
    parser.add_argument("--end-blocks", type=int, default=0, help="that are found nowhere")
    parser.add_argument("--chunk-blocks", type=int, default=4, help="of a pass")
    parser.add_argument("--layers", type=int, default=SPEC.num_layers)
    parser.add_argument("--head-dim", type=int, default=SPEC.head_dim, help="512: a tier reads layer by layer")
    parser.add_argument("--ahead-blocks", type=float, default=0.0, help="that are computed of others before its turn")
    parser.add_argument("--at-once", type=int, default=1, help="requests that come together")
    chosen = parser.parse_args()
    gc.collect()
    gc.freeze()  # else a full collection goes through all of Paddle's objects, and takes as long as a load
    blocks = chosen.host_blocks, chosen.tier_blocks, chosen.end_blocks, chosen.chunk_blocks
    shape = Shape(*blocks, chosen.layers, chosen.head_dim)
    print("link and tier in GB/s; s to the first token, mean and most: computed, loaded, decided; decided / better")
    for link, tier in itertools.product(chosen.link_gbps, chosen.tier_gbps):
        with tempfile.TemporaryDirectory() as folder:
            block_s = chosen.block_ms / 1e3
            num_prompts = max(4, 2 * chosen.at_once)
            server = Server(
                Path(folder), block_s, num_prompts, shape, chosen.ahead_blocks * block_s, at_once=chosen.at_once
            )
            server.link.block_s, server.tier.block_s = (
                server.block_s * GB_S_AS_COMPUTED / rate for rate in (link, tier)
            )
            whole_s = max(server.link.block_s * (shape.host + shape.tier), server.tier.block_s * shape.tier)
            slow = whole_s > NOT_RUN * server.block_s * (shape.host + shape.tier)
            ways = ("compute", "sooner") if slow else ("compute", "load", "sooner")
            found: dict[str, list[float]] = {way: [] for way in ways}
            for first in range(chosen.before + chosen.requests):
                numbers = [(first * chosen.at_once + number) % num_prompts for number in range(chosen.at_once)]
                for way in ways:  # in turns
                    found[way].append(float(np.mean(server.first_tokens_s(numbers, way))))
            server.close()
        figures = {}
        for way, taken in found.items():
            values = np.array(taken[chosen.before :])
            figures[way] = (values.mean(), values.max())
        best = [min(figures[way][i] for way in ways[:-1]) for i in range(2)]
        ratios = [figures["sooner"][i] / best[i] for i in range(2)]
        columns = [figures.get(way, ("-", "-")) for way in ("compute", "load", "sooner")] + [ratios]
        texts = [" ".join(f"{one:.3f}" if one != "-" else one for one in column) for column in columns]
        print(f"{link:5.1f} {tier:5.2f} | {' | '.join(texts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
