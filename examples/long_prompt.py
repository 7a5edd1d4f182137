"""A text whose KV cache does not fit on the device: python examples/long_prompt.py

All layers share a few buffers on the device in turn; the cache of the whole text is in host memory only. While a layer
computes, the next ones come in and what the last ones have written leaves. At the end all tokens, and all bytes of the
KV cache, are compared with a run that has a buffer for each layer. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # a checkout in which the operators were built in place

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from model import Model, ModelConfig  # noqa: E402
from recompute import contiguous  # noqa: E402
from serving import TIMEOUT_S, blocks_for, nothing, run_chunk  # noqa: E402
from timeline import Recorder  # noqa: E402

from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler, devices  # noqa: E402
from paddle_kv.integrations import ForwardPass  # noqa: E402

TEXT = ROOT / "README.md"
BLOCK_SIZE = 16
MIB = 2**20


@dataclass
class Pass:
    """One run through the layers."""

    start: int
    tokens: list[int]
    prediction: int
    onload_bytes: int
    offload_bytes: int
    seconds: float


@dataclass
class LongText:
    """One text on a ring of layer buffers."""

    model: Model
    num_tokens: int
    layer_buffers: int
    device: str = "cpu"
    passes: list[Pass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = self.model.config.cache_spec(BLOCK_SIZE)
        self.num_blocks = blocks_for(self.num_tokens, self.spec)
        self.cache = DeviceCache(self.spec, self.num_blocks, self.device, layer_buffers=self.layer_buffers)
        self.host = HostPool(self.spec, self.num_blocks)
        self.scheduler = LayerwiseScheduler(self.cache, self.host)

    @property
    def length(self) -> int:
        return sum(len(one.tokens) for one in self.passes)

    @property
    def device_bytes(self) -> int:
        """Of the cache on the device."""
        return self.num_blocks * self.layer_buffers * self.spec.block_bytes

    @property
    def context_bytes(self) -> int:
        """Of the cache of the whole text."""
        return self.num_blocks * self.spec.num_layers * self.spec.block_bytes

    def run(self, tokens: list[int]) -> int:
        """These tokens behind those before: what is cached comes in, layer by layer, and what is new leaves."""
        started = time.perf_counter()
        start, end = self.length, self.length + len(tokens)
        cached, full, after = blocks_for(start, self.spec), start // BLOCK_SIZE, blocks_for(end, self.spec)
        blocks = list(range(self.num_blocks))  # of host memory; and of the device, in the other direction
        table = blocks[::-1]
        load = self.scheduler.onload(blocks[:cached], table[:cached])
        save = self.scheduler.offload(table[full:after], blocks[full:after], layerwise=True)
        recorder = Recorder(time.perf_counter)
        with ForwardPass([load], [save], timeout_s=TIMEOUT_S) as layers:
            prediction = run_chunk(
                self.model, self.cache, table, start, tokens, recorder, layers.before, nothing, layers.after
            )
        load.wait(TIMEOUT_S)
        seconds = time.perf_counter() - started
        self.passes.append(Pass(start, tokens, prediction, load.bytes, save.bytes, seconds))
        return prediction

    def differences(self) -> Iterator[str]:
        """One sentence for each way in which it differs from a run with a buffer for each layer."""
        self.scheduler.drain(TIMEOUT_S)
        expected = DeviceCache(self.spec, self.num_blocks, self.device)
        table, recorder = range(self.num_blocks), Recorder(time.perf_counter)
        for number, one in enumerate(self.passes):
            again = run_chunk(self.model, expected, table, one.start, one.tokens, recorder)
            if again != one.prediction:
                yield f"the token behind pass {number} is {one.prediction}, with all layers on the device {again}"
        for layer in range(self.spec.num_layers):
            for name in self.spec.tensor_names:
                wrong = int((self.saved(name, layer) != contiguous(expected, name, layer, table, self.length)).sum())
                if wrong:
                    yield f"{name} of layer {layer} differs in {wrong} bytes"

    def saved(self, name: str, layer: int) -> np.ndarray:
        """The bytes of one tensor's tokens in host memory."""
        pages = np.array([self.host.view(name, layer, block) for block in range(self.num_blocks)])
        tokens = pages.swapaxes(1, 2).reshape(-1, *pages.shape[1::2])[: self.length]
        return np.ascontiguousarray(tokens).view(np.uint8)

    def close(self) -> None:
        self.scheduler.close(TIMEOUT_S)
        self.host.close()


def serve(text: LongText, prompt: bytes, *, chunk_tokens: int, answer_tokens: int) -> None:
    """The prompt in chunks, then the answer token by token."""
    for start in range(0, len(prompt), chunk_tokens):
        prediction = text.run(list(prompt[start : start + chunk_tokens]))
        print_pass(text.passes[-1])
    for _ in range(answer_tokens - 1):
        prediction = text.run([prediction])
        print_pass(text.passes[-1])


def print_pass(one: Pass) -> None:
    print(
        f"tokens {one.start} to {one.start + len(one.tokens) - 1}: {one.onload_bytes / MIB:.2f} MiB in, "
        f"{one.offload_bytes / MIB:.2f} MiB out, {one.seconds:.2f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "gpu" and not devices.has_gpu():
        raise SystemExit("long_prompt: this Paddle sees no GPU")
    paddle.set_device(options.device if options.device == "cpu" else devices.name_of(0))
    prompt = TEXT.read_bytes()[: options.prompt]
    model = Model(ModelConfig(num_layers=options.layers))
    text = LongText(model, len(prompt) + options.answer - 1, options.layer_buffers, options.device)
    print(
        f"{options.layers} layers on {options.layer_buffers} buffers: a context of {text.context_bytes / MIB:.1f} MiB, "
        f"{text.device_bytes / MIB:.1f} MiB of it on the device at a time.\n",
        flush=True,
    )
    serve(text, prompt, chunk_tokens=options.chunk_tokens, answer_tokens=options.answer)
    print("\nChecking against a run with a buffer for each layer ...", flush=True)
    found = list(text.differences())
    text.close()
    if options.json:
        result = {
            "context_bytes": text.context_bytes,
            "device_bytes": text.device_bytes,
            "identical": not found,
            "differences": found,
            "passes": [asdict(one) for one in text.passes],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if found:
        print("\nFAILED\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    tokens = f"All {options.answer} generated tokens and the keys and values of all {text.length} cached tokens"
    print(f"{tokens} are identical.")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=1024, metavar="BYTES")
    parser.add_argument("--answer", type=int, default=8, metavar="TOKENS", help="tokens generated behind it")
    parser.add_argument("--chunk-tokens", type=int, default=200, metavar="N", help="of the prompt in one pass")
    parser.add_argument("--layers", type=int, default=ModelConfig.num_layers)
    parser.add_argument("--layer-buffers", type=int, default=2, metavar="R", help="that they share")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where model and buffers are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the passes as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
