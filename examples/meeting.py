"""Serves prompts whose prefix comes from the back while the model computes it from the front, and compares every byte.

Each text is computed once, which saves it, and then served again on an empty device. Chunks are cut in the same places
each time, so all of it can be compared bit for bit with a run that computes everything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from model import Model
from recompute import contiguous
from serving import TIMEOUT_S, blocks_for, run_chunk
from timeline import Recorder

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
from paddle_kv.integrations import ForwardPass
from paddle_kv.offload import KVOffloadManager


@dataclass(frozen=True)
class Meeting:
    """How a prompt was served the second time.

    Attributes:
        computed_tokens: of the prefix that was found; the others came.
        differences: sentences; none where all is the same.
    """

    found_tokens: int
    computed_tokens: int
    differences: list[str]


class MeetingServer:
    """One prompt at a time, from block 0 of the device on."""

    def __init__(self, model: Model, *, block_size: int, blocks: int, chunk_tokens: int, device: str = "cpu") -> None:
        self.model, self.chunk_tokens = model, chunk_tokens
        self.spec = model.config.cache_spec(block_size)
        self.cache = DeviceCache(self.spec, blocks, device)
        self.host = HostPool(self.spec, blocks)
        self.scheduler = LayerwiseScheduler(self.cache, self.host)
        self.manager = KVOffloadManager(self.scheduler)

    def prefill(self, tokens: Sequence[int]) -> tuple[int, list[range]]:
        """The token behind the prompt, and what was computed for it."""
        table = range(blocks_for(len(tokens), self.spec))
        computed = []
        with self.manager.request(list(tokens), list(table), chunk_tokens=self.chunk_tokens) as request:
            while (chunk := request.next_chunk(timeout_s=TIMEOUT_S)) is not None:
                with ForwardPass(request.loads, request.saves, timeout_s=TIMEOUT_S) as layers:
                    prediction = self.run(self.cache, table, tokens, chunk, layers)
                computed.append(chunk)
        return prediction, computed

    def run(
        self, cache: DeviceCache, table: Sequence[int], tokens: Sequence[int], chunk: range, layers: ForwardPass
    ) -> int:
        recorder = Recorder(time.perf_counter)
        part = list(tokens[chunk.start : chunk.stop])
        return run_chunk(self.model, cache, table, chunk.start, part, recorder, layers.before, layers.after)

    def serve_twice(self, tokens: Sequence[int]) -> Meeting:
        """Once to save it, and once to load some of it."""
        self.prefill(tokens)
        self.scheduler.drain(TIMEOUT_S)
        for layer in range(self.spec.num_layers):
            for name in self.spec.tensor_names:
                self.cache.tensor(name, layer)[:] = float("nan")  # what does not come again shows
        prediction, computed = self.prefill(tokens)
        found = max(0, len(tokens) - 1) // self.spec.block_size * self.spec.block_size
        done = sum(len(range(chunk.start, min(chunk.stop, found))) for chunk in computed)
        return Meeting(found, done, self.differences(tokens, prediction))

    def differences(self, tokens: Sequence[int], prediction: int) -> list[str]:
        """From a run that computes all and moves nothing."""
        table = range(blocks_for(len(tokens), self.spec))
        device = self.cache.device_id
        expected = DeviceCache(self.spec, len(table), "cpu" if device is None else f"gpu:{device}")
        again = 0
        for start in range(0, len(tokens), self.chunk_tokens):
            chunk = range(start, min(start + self.chunk_tokens, len(tokens)))
            again = self.run(expected, table, tokens, chunk, ForwardPass())
        found = [] if prediction == again else [f"the next token is {prediction}, recomputed {again}"]
        for layer in range(self.spec.num_layers):
            for name in self.spec.tensor_names:
                served, right = (contiguous(one, name, layer, table, len(tokens)) for one in (self.cache, expected))
                if not np.array_equal(served, right):
                    found.append(f"{name} of layer {layer} differs in {(served != right).sum()} of {served.size} bytes")
        return found

    def close(self) -> None:
        self.manager.close()
        self.scheduler.close(TIMEOUT_S)
        self.host.close()


def check_meetings(
    model: Model, prompts: Sequence[bytes], *, block_size: int, chunk_tokens: int, device: str
) -> list[str]:
    """Serves each prompt twice, and says how; returns what differs."""
    spec = model.config.cache_spec(block_size)
    blocks = sum(blocks_for(len(prompt), spec) for prompt in prompts)
    server = MeetingServer(model, block_size=block_size, blocks=blocks, chunk_tokens=chunk_tokens, device=device)
    found = []
    for number, prompt in enumerate(prompts):
        met = server.serve_twice(prompt)
        print(
            f"Prompt {number + 1}: of {met.found_tokens} tokens that were found {met.computed_tokens} were computed "
            f"from the front, and {met.found_tokens - met.computed_tokens} came from the back",
            flush=True,
        )
        found += [f"prompt {number + 1}: {line}" for line in met.differences]
    server.close()
    return found
