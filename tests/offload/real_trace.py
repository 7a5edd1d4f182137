"""A trace of requests served with real bytes, on the CPU backend: without the library, and with it all computed, all
loaded, and as it decides.

``python -m tests.offload.real_trace [TRACE]``: link and tier are throttled and the model is a sleep for each layer, as
in :mod:`tests.offload.real_times`. Requests come when the trace says, are computed one behind the other, and up to
``--queue`` of those that wait may load ahead. What is found is what was kept of the requests before: the first ones,
``--warm-up``, are served without sleeps, and then nothing is known of any rate. All bytes are compared.
``--fault``: behind ``LEARNT`` requests that do not count the tier is ten times slower, holds each read for ten seconds,
or fails each, and what counts begins with the third request behind that, beside a server without the library.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from paddle_kv import CancelledError, TransferError
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload.rates import Rates
from paddle_kv.testing.prefixes.conversations import conversations
from paddle_kv.testing.prefixes.replay import Costs, replay
from paddle_kv.testing.prefixes.trace import TOKENS_PER_BLOCK, Request, read_trace
from tests.offload.chunk_rig import SIZE, SPEC, WAIT_S, ChunkRig
from tests.offload.real_times import GB_S_AS_COMPUTED, Channel, Slow, throttle

WAYS = ("without", "compute", "load", "sooner")
SERVED_TOKENS_S = 60_000.0  # at the beginning of a prompt, of the server that the rates are of
DOUBLES_AT_BLOCK = 50_000 / TOKENS_PER_BLOCK  # a block takes twice as long as the first one
FAULTS = ("slow", "stall", "fail")
LEARNT = 30
STALLED_S = 10.0
HOPELESS = 2.0  # all that is found takes so many times as long to be loaded as to be computed


@dataclass(frozen=True)
class Row:
    """One point, in seconds to the first token; NaN: not run. ``*_ratio``: to the better of "compute" and "load", or
    with a fault to "without"."""

    link_gbps: float
    tier_gbps: float
    without_mean_s: float
    without_p99_s: float
    compute_mean_s: float
    compute_p99_s: float
    load_mean_s: float
    load_p99_s: float
    sooner_mean_s: float
    sooner_p99_s: float
    mean_ratio: float
    p99_ratio: float


@dataclass(frozen=True)
class Setup:
    """``block_s``: of the first block of a prompt, computed; ``chunk_blocks``: of a pass."""

    block_s: float = TOKENS_PER_BLOCK / SERVED_TOKENS_S
    host_blocks: int = 1500
    tier_blocks: int = 20_000
    chunk_blocks: int = 8
    layers: int = 4
    head_dim: int = 512
    queue: int = 0

    @property
    def time_scale(self) -> float:
        return self.block_s * SERVED_TOKENS_S / TOKENS_PER_BLOCK


class Storage(Channel):
    """``fault``: one of ``FAULTS``, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: str | None = None
        self._closed = threading.Event()

    def move(self, blocks: float) -> None:
        if self.fault == "fail":
            raise OSError("a fault that was asked for")
        if self.fault == "stall":
            self._closed.wait(STALLED_S)
        super().move(blocks * (10 if self.fault == "slow" else 1))

    def close(self) -> None:
        self.block_s = 0.0
        self._closed.set()


class Server:
    """Serves one prompt at a time. Device blocks are given out again when nothing moves in them any more."""

    def __init__(self, folder: Path, setup: Setup, device_blocks: int) -> None:
        self.link, self.tier, self.setup = Channel(), Storage(), setup
        self.spec = spec = replace(SPEC, num_layers=setup.layers, head_dim=setup.head_dim)
        self.asleep = True
        self._unthrottle = throttle(self.link, spec.num_layers)
        room = 2 * setup.tier_blocks * spec.block_bytes * spec.num_layers
        self.rig = ChunkRig(
            Slow(folder, self.tier, room),
            host_blocks=setup.host_blocks,
            device_blocks=device_blocks,
            pause=self._compute,
            spec=spec,
        )
        self._free = list(range(device_blocks))
        self._used: deque[tuple[list[int], list[Any]]] = deque()

    def _compute(self, tokens: range) -> None:
        if not self.asleep:
            blocks = len(tokens) / SIZE * (1 + (tokens.start + tokens.stop) / 2 / SIZE / DOUBLES_AT_BLOCK)
            time.sleep(blocks * self.setup.block_s / self.spec.num_layers)

    def contents(self, prompt: Request) -> np.ndarray:
        """uint8 [blocks, layers, tensors, tokens, bytes of a token]; of the block of the last token alone, too."""
        size = self.spec.num_layers, len(self.spec.tensor_names), SIZE, self.spec.tensor_block_bytes("key") // SIZE
        made = [
            np.frombuffer(np.random.Generator(np.random.SFC64(one)).bytes(int(np.prod(size))), np.uint8)
            for one in [*prompt.block_ids, 1 << 40]
        ]
        return np.stack(made).reshape(-1, *size)

    def _table(self, num_blocks: int) -> list[int]:
        while len(self._free) < num_blocks:
            table, transfers = self._used.popleft()
            for transfer in transfers:
                transfer.wait_over(WAIT_S)
            self._free += table
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        self.rig.poison(taken)
        return taken

    def forget_rates(self) -> None:
        self.rig.scheduler.drain(WAIT_S)
        books: Any = self.rig.manager._books
        books.rates = Rates(self.spec.block_bytes * self.spec.num_layers, SIZE)

    def run(self, requests: Sequence[Request], way: str) -> list[float]:
        """Seconds from the arrival of each to its first token."""
        begun_s, opened, taken_s = time.monotonic(), {}, []
        arrivals_s = [begun_s + (one.arrival_s - requests[0].arrival_s) * self.setup.time_scale for one in requests]
        for number, prompt in enumerate(requests):
            if not self.asleep:
                time.sleep(max(0.0, arrivals_s[number] - time.monotonic()))
            if number not in opened:
                opened[number] = self._open(prompt, way)

            def look_ahead(first: int = number + 1) -> None:
                for later in range(first, min(first + self.setup.queue, len(requests))):
                    if later not in opened and arrivals_s[later] <= time.monotonic() and not self.asleep:
                        opened[later] = self._open(requests[later], way)

            table, expected, request = opened.pop(number)
            transfers = self._prefill(prompt, table, expected, request, look_ahead)
            taken_s.append(time.monotonic() - arrivals_s[number])
            for layer in range(self.spec.num_layers):
                self._check(table, expected, layer, range(len(prompt.block_ids)))
            self._used.append((table, transfers))
        return taken_s

    def _open(self, prompt: Request, way: str) -> tuple[list[int], np.ndarray, Any]:
        table, expected = self._table(len(prompt.block_ids) + 1), self.contents(prompt)
        if way == "without":
            return table, expected, None
        tokens = [*np.repeat(prompt.block_ids, SIZE).tolist(), 0]
        chunk_tokens = self.setup.chunk_blocks * SIZE
        return table, expected, self.rig.manager.request(tokens, table, chunk_tokens=chunk_tokens, how=way)

    def _prefill(self, prompt: Request, table: list[int], expected: np.ndarray, request: Any, after: Any) -> list[Any]:
        """``after`` is called behind each chunk; returns the transfers."""
        num_layers, transfers = self.spec.num_layers, []
        if request is None:
            total, size = len(prompt.block_ids) * SIZE + 1, self.setup.chunk_blocks * SIZE
            for first in range(0, total, size):
                for layer in range(num_layers):
                    self._layer(range(first, min(first + size, total)), table, expected, layer)
                after()
            return transfers
        with request:
            while (chunk := request.next_chunk(timeout_s=WAIT_S)) is not None:
                transfers += [*request.loads, *request.saves]
                layers = ForwardPass(request.loads, request.saves, timeout_s=WAIT_S)
                with suppress(TransferError, CancelledError), layers:  # the next chunk is what did not come
                    for layer in range(num_layers):
                        with layers.layer(layer):
                            self._layer(chunk, table, expected, layer)
                after()
        return transfers

    def _layer(self, chunk: range, table: list[int], expected: np.ndarray, layer: int) -> None:
        self._compute(chunk)
        first, last = chunk.start // SIZE, -(-chunk.stop // SIZE)
        if first:  # all are compared behind the last chunk
            self._check(table, expected, layer, range(first - 1, first))
            self._check(table, expected, layer, range(1))
        for number, view in enumerate(self.rig._views[layer]):
            view[table[first:last]] = expected[first:last, layer, number]

    def _check(self, table: list[int], expected: np.ndarray, layer: int, blocks: range) -> None:
        for number, view in enumerate(self.rig._views[layer]):
            there = view[table[blocks.start : blocks.stop]]
            assert np.array_equal(there, expected[blocks.start : blocks.stop, layer, number]), (layer, blocks)

    def close(self) -> None:
        self.link.block_s = 0.0
        self.tier.close()
        self.rig.close()
        self._unthrottle()


def measure(
    requests: Sequence[Request],
    warm_up: int,
    setup: Setup,
    rates: tuple[float, float],
    way: str,
    fault: str | None = None,
) -> np.ndarray:
    """Seconds to the first tokens that count; ``rates``: of link and tier in GB/s."""
    longest = max(len(one.block_ids) + 1 for one in requests)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), setup, (setup.queue + 3) * longest)
        try:
            server.run(requests[:warm_up], "sooner")
            server.forget_rates()
            server.asleep = False
            server.link.block_s, server.tier.block_s = (setup.block_s * GB_S_AS_COMPUTED / rate for rate in rates)
            if fault is None:
                return np.array(server.run(requests[warm_up:], way))
            server.run(requests[warm_up : warm_up + LEARNT], way)
            server.tier.fault = fault
            return np.array(server.run(requests[warm_up + LEARNT :], way)[2:])
        finally:
            server.close()


def is_hopeless(requests: Sequence[Request], warm_up: int, setup: Setup, rates: tuple[float, float]) -> bool:
    """Whether to load all takes so much longer that nobody would wait for the figures."""
    run = replay(requests, "lru", setup.host_blocks, Costs(1, 1, 1.0, 1.0), tier_blocks=setup.tier_blocks)
    found, below = sum(run.hits[warm_up:]), sum(run.tier_hits[warm_up:])
    link, tier = rates
    return max(found * GB_S_AS_COMPUTED / link, below * GB_S_AS_COMPUTED / tier) > HOPELESS * found


def row_of(
    requests: Sequence[Request], warm_up: int, setup: Setup, link: float, tier: float, fault: str | None = None
) -> Row:
    found = {way: (float("nan"),) * 2 for way in WAYS}
    others = ("without",) if fault else ("compute", "load")
    for way in ("without", "sooner") if fault else WAYS:
        if way == "load" and is_hopeless(requests, warm_up, setup, (link, tier)):
            continue
        taken_s = measure(requests, warm_up, setup, (link, tier), way, fault)
        found[way] = float(taken_s.mean()), float(np.percentile(taken_s, 99))
    ratios = [found["sooner"][i] / np.nanmin([found[way][i] for way in others]) for i in range(2)]
    return Row(link, tier, *(figure for way in WAYS for figure in found[way]), *ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", help="as Mooncake publishes them; default: made conversations")
    parser.add_argument("--requests", type=int, default=150, help="that count")
    parser.add_argument("--warm-up", type=int, default=600)
    parser.add_argument("--requests-per-s", type=float, default=1.5, help="of made conversations")
    parser.add_argument("--link-gbps", type=float, nargs="+", default=[0.1, 1.0, 3.0, 10.0, 50.0])
    parser.add_argument("--tier-gbps", type=float, nargs="+", default=[0.05, 0.5, 1.5, 5.0])
    parser.add_argument("--block-ms", type=float, default=1e3 * Setup.block_s, help="that the model needs")
    parser.add_argument("--host-blocks", type=int, default=Setup.host_blocks)
    parser.add_argument("--tier-blocks", type=int, default=Setup.tier_blocks)
    parser.add_argument("--chunk-blocks", type=int, default=Setup.chunk_blocks)
    parser.add_argument("--queue", type=int, default=0, help="waiting prompts that may load ahead")
    parser.add_argument("--fault", choices=FAULTS, help="of the tier")
    parser.add_argument("--csv", type=Path)
    chosen = parser.parse_args(arguments)
    gc.collect()
    gc.freeze()  # else a full collection goes through all of Paddle's objects, and takes as long as a load
    total = chosen.warm_up + chosen.requests + (LEARNT + 2 if chosen.fault else 0)
    requests = read_trace(chosen.trace, total) if chosen.trace else conversations(total, chosen.requests_per_s)
    blocks = chosen.host_blocks, chosen.tier_blocks, chosen.chunk_blocks
    setup = Setup(chosen.block_ms / 1e3, *blocks, queue=chosen.queue)
    rows = []
    print("link, tier in GB/s | mean, p99 in s: without, computed, loaded, decided | decided / better")
    for link in chosen.link_gbps:
        for tier in chosen.tier_gbps:
            rows.append(row := row_of(requests, chosen.warm_up, setup, link, tier, chosen.fault))
            values = [f"{getattr(row, field.name):.3f}" for field in fields(Row)[2:]]
            parts = [" ".join(values[first : first + 2]) for first in range(0, len(values), 2)]
            print(f"{link:5.1f} {tier:5.2f} | {' | '.join(parts)}", flush=True)
    if chosen.csv:
        with chosen.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
