"""One process computes each prompt, another one answers it: python examples/prefill_decode.py

The prefill process runs the prompt through its model. Each layer of its KV cache is on its way to the decode process
while the next one is computed; the decode process begins with the answer as soon as the first layer is there, and the
prefill process is then at the next prompt. A prompt that does not come, since the other process has died, is computed
by the decode process itself. At the end all tokens, and all bytes of the KV cache, are compared with a run that
computes everything in one process. Exit code 1 if anything differs, or if not all prompts were handed over.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # a checkout in which the operators were built in place

import paddle  # noqa: E402
from model import Model, ModelConfig  # noqa: E402
from recompute import contiguous  # noqa: E402
from serving import TIMEOUT_S, blocks_for, nothing, run_chunk  # noqa: E402
from timeline import Recorder  # noqa: E402

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, PaddleKVError, Transfer, devices  # noqa: E402
from paddle_kv.peers import Grant, Listener, PeerBlocks, Receiver, connect  # noqa: E402

TEXTS = (ROOT / "README.md", ROOT / "LICENSE")
BLOCK_SIZE = 16
AHEAD = 2  # prompts that are with the prefill process while one is answered


@dataclass(frozen=True)
class Setting:
    """What both processes have to agree about before the first prompt."""

    config: ModelConfig
    blocks: int
    device: str
    direct: bool

    def make_cache(self, *, shared: bool = False) -> DeviceCache:
        return DeviceCache(self.config.cache_spec(BLOCK_SIZE), self.blocks, self.device, shared=shared)


# ---- the prefill process ----
def prefill(pipe: Connection, setting: Setting, exported: Any, path: str) -> None:
    """Computes prompts until the pipe ends. Answers each with the first token of the answer."""
    use_device(setting.device)
    model, cache = Model(setting.config), setting.make_cache()
    blocks = PeerBlocks(DeviceCache.attach(cache.spec, exported)) if setting.direct else attach_pool(cache, exported)
    with LayerwiseScheduler(cache, blocks) as scheduler, connect(scheduler, path) as sender:
        pipe.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                grant, tokens = pipe.recv()
                table = range(blocks_for(len(tokens), cache.spec))
                try:
                    save = sender.send(grant, table, timeout_s=TIMEOUT_S)
                    pipe.send(run(model, cache, table, 0, tokens, written=save.mark_layer_written))
                    save.wait(TIMEOUT_S)  # the next prompt takes the same blocks
                except PaddleKVError:  # the receiver has given this prompt up
                    pipe.send(None)


def attach_pool(cache: DeviceCache, exported: Any) -> HostPool:
    return HostPool.attach(cache.spec, exported)


class PrefillProcess:
    """The decode process's handle of it. Whatever it cannot do any more comes back as None."""

    def __init__(self, setting: Setting, exported: Any, path: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=prefill, args=(there, setting, exported, path), daemon=True)
        self.process.start()
        there.close()
        if self.first_token() != "ready":
            raise RuntimeError("the prefill process did not start")

    def ask(self, grant: Grant, tokens: Sequence[int]) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send((grant, list(tokens)))

    def first_token(self) -> Any:
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(TIMEOUT_S):
                return self._pipe.recv()
        return None

    def end(self) -> None:
        self._pipe.close()
        self.process.join(TIMEOUT_S)


# ---- the decode process ----
@dataclass
class Request:
    """A prompt, and what became of it.

    Attributes:
        passes: the tokens of each pass through a model; predictions: the next token after each.
        load: of what the prefill process sends.
        waited_ms: the model stood still for a layer of the prompt.
    """

    name: str
    prompt: list[int]
    table: list[int]
    passes: list[list[int]] = field(default_factory=list)
    predictions: list[int] = field(default_factory=list)
    load: Transfer | None = None
    handed_over: bool = False
    waited_ms: float = 0.0


class Decoder:
    """Answers what another process has prefilled."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = Model(setting.config)
        self.cache = setting.make_cache(shared=setting.direct)
        self.pool = HostPool(self.cache.spec, setting.blocks, shared=True)
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.receiver = Receiver(self.scheduler, direct=setting.direct)
        self.listener = Listener(self.receiver)
        exported = self.cache.export() if setting.direct else self.pool.export()
        self.prefill = PrefillProcess(setting, exported, self.listener.path)

    def serve(self, requests: Sequence[Request], answer_tokens: int) -> None:
        for number in range(len(requests) + AHEAD):
            if number < len(requests):
                self.begin(requests[number])
            if number >= AHEAD:
                self.answer(requests[number - AHEAD], answer_tokens)

    def begin(self, request: Request) -> None:
        used = request.table[: blocks_for(len(request.prompt), self.cache.spec)]
        request.load, grant = self.receiver.grant(used, timeout_s=TIMEOUT_S)
        self.prefill.ask(grant, request.prompt)

    def answer(self, request: Request, answer_tokens: int) -> None:
        first, load = self.prefill.first_token(), request.load
        assert load is not None
        try:
            if first is not None:
                self.decode(request, first, answer_tokens, load)
                load.wait(TIMEOUT_S)  # raises what wait_layer could not know yet: only now are the tokens good
                request.handed_over = True
                return
        except PaddleKVError as error:
            print(f"  {request.name} did not come: {error}", flush=True)
        load.cancel()
        load.wait_over(TIMEOUT_S)  # nobody writes its blocks any more
        self.cache.mark_rewritten(request.table)
        first = run(self.model, self.cache, request.table, 0, request.prompt)
        self.decode(request, first, answer_tokens)

    def decode(self, request: Request, first: int, answer_tokens: int, load: Transfer | None = None) -> None:
        request.passes, request.predictions = [request.prompt], [first]
        recorder = Recorder(self.scheduler.now_ms)
        for number in range(answer_tokens - 1):
            position, token = sum(map(len, request.passes)), request.predictions[-1]

            def wait_layer(layer: int, first: bool = number == 0) -> None:
                if first and load is not None:
                    load.wait_layer(layer, timeout_s=TIMEOUT_S)

            request.predictions.append(
                run_chunk(self.model, self.cache, request.table, position, [token], recorder, wait_layer)
            )
            request.passes.append([token])
        request.waited_ms = sum(span.end_ms - span.start_ms for span in recorder.spans if span.lane == "wait")

    def differences(self, request: Request) -> Iterator[str]:
        """One sentence for each way in which the answer differs from one of a single process."""
        expected, table, position = self.setting.make_cache(), range(len(request.table)), 0
        for number, (tokens, served) in enumerate(zip(request.passes, request.predictions, strict=True)):
            again = run(self.model, expected, table, position, tokens)
            position += len(tokens)
            if again != served:
                yield f"{request.name}: token {number} is {served}, computed again {again}"
        for layer in range(self.cache.spec.num_layers):
            for name in self.cache.spec.tensor_names:
                there = contiguous(self.cache, name, layer, request.table, position)
                wrong = int((there != contiguous(expected, name, layer, table, position)).sum())
                if wrong:
                    yield f"{request.name}: {name} of layer {layer} differs in {wrong} of {there.size} bytes"

    def close(self) -> None:
        self.prefill.end()
        for one in (self.receiver, self.listener, self.scheduler):
            one.close(TIMEOUT_S)
        self.pool.close()


def run(
    model: Model, cache: DeviceCache, table: Sequence[int], position: int, tokens: Sequence[int], written: Any = nothing
) -> int:
    """Tokens through the model; the next one."""
    return run_chunk(model, cache, table, position, tokens, Recorder(time.perf_counter), layer_written=written)


def use_device(device: str) -> None:
    paddle.set_device(device if device == "cpu" else devices.name_of(0))


def make_requests(options: argparse.Namespace, spec: KVCacheSpec) -> list[Request]:
    """Prompts of different lengths, each with blocks of its own, which do not lie side by side."""
    requests, next_block = [], 0
    sizes = [options.prompt - 13 * (number % 3) for number in range(options.prompts)]
    total = sum(blocks_for(size + options.answer, spec) for size in sizes)
    order = sorted(range(total), key=lambda block: block * 7919 % (total + 1))
    for number, size in enumerate(sizes):
        text = TEXTS[number % len(TEXTS)].read_bytes()[97 * number :]
        if len(text) < size:
            raise SystemExit(f"{TEXTS[number % len(TEXTS)].name} is too short for a prompt of {size} bytes")
        count = blocks_for(size + options.answer, spec)
        table = order[next_block : next_block + count]
        requests.append(Request(f"prompt {number + 1}", list(text[:size]), table))
        next_block += count
    return requests


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "gpu" and not devices.has_gpu():
        raise SystemExit("prefill_decode: this Paddle sees no GPU")
    use_device(options.device)
    config = ModelConfig(num_layers=options.layers)
    requests = make_requests(options, config.cache_spec(BLOCK_SIZE))
    setting = Setting(config, sum(len(one.table) for one in requests), options.device, options.direct)
    way = "straight into the other cache" if options.direct else "through host memory"
    print(f"{len(requests)} prompts go from a prefill to a decode process, {way}.", flush=True)
    decoder = Decoder(setting)
    try:
        decoder.serve(requests, options.answer)
        found = [line for request in requests for line in decoder.differences(request)]
    finally:
        decoder.close()
    for one in requests:
        how = f"handed over, the model waited {one.waited_ms:.1f} ms for it" if one.handed_over else "computed here"
        print(f"  {one.name}: {len(one.prompt)} tokens {how}", flush=True)
        found += [] if one.handed_over else [f"{one.name} was not handed over"]
    if found:
        print("FAILED\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    tokens, cached = len(requests) * options.answer, sum(len(tokens) for one in requests for tokens in one.passes)
    print(f"All {tokens} tokens and the keys and values of all {cached} cached tokens are those of a single process.")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4, metavar="N")
    parser.add_argument("--prompt", type=int, default=300, metavar="BYTES", help="length of the longest one")
    parser.add_argument("--answer", type=int, default=8, metavar="TOKENS")
    parser.add_argument("--layers", type=int, default=ModelConfig.num_layers)
    parser.add_argument("--direct", action="store_true", help="straight into the other cache, not through host memory")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where models and caches are")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
