"""A server is killed half-way and started again as a new process: python examples/restart.py

The KV cache of its conversations is in host memory and, block by block, in a folder. The second process finds it there
and goes on with every conversation where the first one stopped. At the end all tokens, and all bytes of the KV cache,
are compared with a run that computes everything. Exit code 1 if anything differs, or if nothing came from the folder.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import zlib  # noqa: F401  Paddle 2.6 exports its own deflate: zlib has to be loaded first
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # a checkout in which the operators were built in place

TEXTS = (ROOT / "README.md", ROOT / "LICENSE")
BLOCK_SIZE = 16
FOLDER_BYTES = 1 << 30
TIMEOUT_S = 60.0


@dataclass
class Conversation:
    """What was said: what a server keeps in its database.

    Attributes:
        tokens: that have been through the model.
        passes: position of the first token, tokens, next token of each pass through the model.
    """

    name: str
    prompts: list[str]
    turns: int = 0
    tokens: list[int] = field(default_factory=list)
    passes: list[tuple[int, list[int], int]] = field(default_factory=list)


class Server:
    """A model, its device cache, host memory, and the folder."""

    def __init__(self, folder: Path, layers: int, device: str, blocks: int) -> None:
        from model import Model, ModelConfig

        from paddle_kv import DeviceCache, HostPool, LayerwiseScheduler
        from paddle_kv.offload import KVOffloadManager
        from paddle_kv.tiers import FilesEngine, Tier

        config = ModelConfig(num_layers=layers)
        self.model, self.spec = Model(config), config.cache_spec(BLOCK_SIZE)
        self.cache = DeviceCache(self.spec, blocks, device)
        self.pool = HostPool(self.spec, 8 * blocks, layout="block_first")
        self.engine = FilesEngine({folder: FOLDER_BYTES})
        self.tier = Tier(self.engine, self.pool, model=repr(config).encode())
        self.scheduler = LayerwiseScheduler(self.cache, self.pool)
        self.manager = KVOffloadManager(self.scheduler, salt=repr(config).encode(), tier=self.tier)

    def turn(self, conversation: Conversation, answer_tokens: int) -> int:
        """Answers the next prompt; how many tokens were not computed."""
        last = [next_token for _, _, next_token in conversation.passes[-1:]]
        prompt = last + list(conversation.prompts[conversation.turns].encode())
        conversation.turns += 1
        conversation.tokens += prompt
        prefix = self.manager.prefix()
        prefix.append(conversation.tokens)
        table = list(range(-(-(len(conversation.tokens) + answer_tokens - 1) // BLOCK_SIZE)))
        with self.manager.request(prefix, table) as request:
            while True:
                next_token = self._run(table, request.start, conversation.tokens[request.start :], request)
                if request.wait(TIMEOUT_S):
                    break
            conversation.passes.append((request.start, conversation.tokens[request.start :], next_token))
            for save in request.saves:
                save.wait(TIMEOUT_S)
        full = len(prefix.hashes)
        for _ in range(answer_tokens - 1):
            position = len(conversation.tokens)
            conversation.tokens.append(next_token)
            prefix.append([next_token])
            tokens, next_token = [next_token], self._run(table, position, [next_token])
            conversation.passes.append((position, tokens, next_token))
        self.manager.save(prefix.hashes[full:], table[full : len(prefix.hashes)]).wait(TIMEOUT_S)
        return request.start

    def _run(self, table: Sequence[int], position: int, tokens: Sequence[int], request: Any = None) -> int:
        def wait_layer(layer: int) -> None:
            for load in request.loads if request is not None else ():
                load.wait_layer(layer, timeout_s=TIMEOUT_S)

        def layer_written(layer: int) -> None:
            for save in request.saves if request is not None else ():
                save.mark_layer_written(layer)

        return run(self.model, self.cache, table, position, tokens, wait_layer, layer_written)

    def differences(self, conversation: Conversation) -> Iterator[str]:
        """One sentence for each way in which the conversation differs from computing it all."""
        from paddle_kv import DeviceCache

        table = range(-(-len(conversation.tokens) // BLOCK_SIZE))
        device = self.cache.device_id
        expected = DeviceCache(self.spec, len(table), "cpu" if device is None else f"gpu:{device}")
        for number, (position, tokens, next_token) in enumerate(conversation.passes):
            again = run(self.model, expected, table, position, tokens)
            if again != next_token:
                yield f"{conversation.name}: pass {number} led to token {next_token}, computed again to {again}"
        hashes = self.manager.block_hashes(conversation.tokens)
        with self.manager.lookup(hashes) as lease:
            if lease.num_blocks < len(hashes):
                yield f"{conversation.name}: of {len(hashes)} blocks {lease.num_blocks} are there"
            self.manager.onload(lease.hashes, table[: lease.num_blocks]).wait(TIMEOUT_S)
        for layer in range(self.spec.num_layers):
            for name in self.spec.tensor_names:
                served, again_bytes = (
                    cache.tensor(name, layer).numpy()[: lease.num_blocks].view("uint8")
                    for cache in (self.cache, expected)
                )
                wrong = int((served != again_bytes).sum())
                if wrong:
                    yield f"{conversation.name}: {name} of layer {layer} differs in {wrong} of {served.size} bytes"

    def close(self) -> None:
        self.manager.close()
        self.tier.close(TIMEOUT_S)
        self.engine.close(TIMEOUT_S)
        self.scheduler.close(TIMEOUT_S)  # behind the engine: a load is over when that has let go of its blocks
        self.pool.close()


def run(model: Any, cache: Any, table: Sequence[int], position: int, tokens: Sequence[int], *calls: Any) -> int:
    """Tokens through the model; the next one."""
    from serving import run_chunk
    from timeline import Recorder

    return run_chunk(model, cache, table, position, tokens, Recorder(time.perf_counter), *calls)


# ---- the process of the server ----
def serve(options: argparse.Namespace) -> int:
    """Its conversations, up to a number of turns; then it waits to be killed, or checks everything and ends."""
    import paddle

    from paddle_kv import devices

    paddle.set_device(options.device if options.device == "cpu" else devices.name_of(0))
    state = options.folder / "conversations.json"
    conversations = [Conversation(**one) for one in json.loads(state.read_text())]
    size = options.first_prompt + (options.turns - 1) * options.next_prompts + options.turns * options.answer
    server = Server(options.folder / "blocks", options.layers, options.device, -(-size // BLOCK_SIZE))
    for conversation in conversations:
        while conversation.turns < options.serve:
            reused = server.turn(conversation, options.answer)
            print(f"  {conversation.name}, turn {conversation.turns}: {reused} tokens were not computed", flush=True)
    server.manager.flush(TIMEOUT_S)
    state.write_text(json.dumps([asdict(one) for one in conversations]))
    if options.serve < options.turns:
        print(READY, flush=True)
        sys.stdin.read()  # until somebody kills it
    loaded = server.manager.stats()["tier_hit_blocks"]
    print(f"{loaded} blocks came from the folder.", flush=True)
    found = [line for conversation in conversations for line in server.differences(conversation)]
    found += [] if loaded else ["nothing came from the folder"]
    server.close()
    if found:
        print("FAILED\n  " + "\n  ".join(found), file=sys.stderr)
        return 1
    tokens, blocks = (sum(map(size_of, conversations)) for size_of in (num_passes, num_blocks))
    print(f"All {tokens} generated tokens and the keys and values of all {blocks} blocks are identical.", flush=True)
    return 0


READY = "stopped"


def num_passes(conversation: Conversation) -> int:
    return len(conversation.passes)


def num_blocks(conversation: Conversation) -> int:
    return len(conversation.tokens) // BLOCK_SIZE


# ---- who starts it ----
def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    if options.serve is not None:
        return serve(options)
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "conversations.json").write_text(json.dumps([asdict(one) for one in split_texts(options)]))
        command = [sys.executable, __file__, *given, f"--folder={folder}"]
        half = options.turns // 2
        print(f"A server answers {half} of {options.turns} turns of {options.conversations} conversations.", flush=True)
        with subprocess.Popen(
            [*command, f"--serve={half}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as first:
            assert first.stdout is not None
            for line in first.stdout:
                if line.strip() == READY:
                    first.kill()  # no time to say goodbye
                    break
                print(line, end="", flush=True)
        if first.returncode != -signal.SIGKILL:
            return 1
        print("It was killed. A new process goes on with the same folder.", flush=True)
        return subprocess.run([*command, f"--serve={options.turns}"], stdin=subprocess.DEVNULL).returncode


def split_texts(options: argparse.Namespace) -> list[Conversation]:
    sizes = [options.first_prompt] + [options.next_prompts] * (options.turns - 1)
    found = []
    for number in range(options.conversations):
        text, start, prompts = TEXTS[number % len(TEXTS)].read_text(errors="ignore"), 1000 * (number // len(TEXTS)), []
        ascii_text = text.encode("ascii", "ignore").decode()
        for size in sizes:
            prompts.append(ascii_text[start : start + size])
            start += size
        found.append(Conversation(f"{TEXTS[number % len(TEXTS)].stem} {number // len(TEXTS) + 1}", prompts))
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=3, metavar="N")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="turns of each conversation")
    parser.add_argument("--first-prompt", type=int, default=256, metavar="BYTES")
    parser.add_argument("--next-prompts", type=int, default=48, metavar="BYTES")
    parser.add_argument("--answer", type=int, default=4, metavar="TOKENS", help="tokens generated per turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where model and cache are")
    parser.add_argument("--folder", type=Path, help="where the blocks are kept; default: a temporary folder")
    parser.add_argument("--serve", type=int, metavar="TURNS", help=argparse.SUPPRESS)  # the process of the server
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
