"""Two servers that share the memory of a Mooncake Store: what one has computed, the other one loads.

    mooncake_master --rpc_port=50051 &
    python examples/two_servers.py 127.0.0.1:50051

Each server is a process with a cache, a pool and a manager, and lends the store memory of its own. The model is a
pattern: what a block holds follows from all tokens up to its end, so that every byte in the cache can be compared with
a recomputation.
Mooncake listens on all interfaces: try it in a network of its own (`unshare -n`, then `ip link set lo up`).
"""

from __future__ import annotations

import multiprocessing
import sys
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

TIMEOUT_S = 60.0
SEGMENT_BYTES = 64 << 20
LAYERS, BLOCK_TOKENS, DEVICE_BLOCKS, HOST_BLOCKS = 4, 16, 64, 128


@dataclass(frozen=True)
class Served:
    """One prompt: blocks that came from the store, blocks that were computed, and bytes that are not as recomputed."""

    loaded: int
    computed: int
    wrong: int


def block_bits(tokens: np.ndarray, block: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    """What the model writes for a block: of all tokens up to its end."""
    seed = zlib.crc32(tokens[: (block + 1) * BLOCK_TOKENS].astype(np.int64).tobytes())
    return np.random.default_rng([seed, layer]).standard_normal(shape, dtype=np.float32)


def run_server(connection: Any, master: str, prefix: str) -> None:
    """Serves prompts until the connection ends."""
    from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler
    from paddle_kv.offload import KVOffloadManager
    from paddle_kv.tiers import Tier
    from paddle_kv.tiers.mooncake import MooncakeEngine

    spec = KVCacheSpec(num_layers=LAYERS, num_kv_heads=2, head_dim=32, block_size=BLOCK_TOKENS, dtype="float32")
    cache, pool = DeviceCache(spec, DEVICE_BLOCKS, "cpu"), HostPool(spec, HOST_BLOCKS, layout="block_first")
    engine = MooncakeEngine(master, segment_bytes=SEGMENT_BYTES, prefix=prefix, answer_s=1.0)
    tier = Tier(engine, pool, model=b"pattern@1")
    with LayerwiseScheduler(cache, pool) as scheduler, engine, tier, KVOffloadManager(scheduler, tier=tier) as manager:
        connection.send("ready")
        while (prompt := connection.recv()) is not None:
            connection.send(serve(cache, scheduler, manager, np.asarray(prompt)))


def serve(cache: Any, scheduler: Any, manager: Any, tokens: np.ndarray) -> Served:
    """A prefill, and a look at every byte."""
    from paddle_kv.integrations import ForwardPass

    blocks = len(tokens) // BLOCK_TOKENS
    table = [3 * block % DEVICE_BLOCKS for block in range(blocks + 1)]  # one more for the rest
    with manager.request(tokens, table) as request:
        while True:
            computed = range(request.start // BLOCK_TOKENS, blocks)
            with ForwardPass(request.loads, request.saves, timeout_s=TIMEOUT_S) as layers:
                for layer in range(LAYERS):
                    with layers.layer(layer):
                        for name in cache.spec.tensor_names:
                            pages = cache.tensor(name, layer)
                            for block in computed:
                                pages[table[block]] = block_bits(tokens, block, layer, tuple(pages.shape[1:]))
            if request.wait(timeout_s=TIMEOUT_S):
                break  # else something did not come from the store: once more, with more to compute
    scheduler.drain(timeout_s=TIMEOUT_S)
    manager.flush(timeout_s=TIMEOUT_S)
    wrong = 0
    for layer in range(LAYERS):
        for name in cache.spec.tensor_names:
            pages = cache.tensor(name, layer).numpy()
            for block in range(blocks):
                expected = block_bits(tokens, block, layer, pages.shape[1:])
                wrong += int((pages[table[block]].view(np.uint8) != expected.view(np.uint8)).sum())
    return Served(blocks - len(computed), len(computed), wrong)


def start_server(master: str, prefix: str) -> tuple[Any, Any]:
    """The process, and the connection to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_server, args=(theirs, master, prefix), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def ask(connection: Any, prompt: Any = None) -> Any:
    """What the server answers; EOFError if it has died."""
    if prompt is not None:
        connection.send(prompt)
    if not connection.poll(TIMEOUT_S):
        raise TimeoutError("the server did not answer")
    return connection.recv()


def main(master: str, prefix: str = "two_servers/") -> dict[str, Served]:
    """A system prompt that all share, then what two conversations make of it, each at the other server than before."""
    rng = np.random.default_rng(7)
    system, first, second = (rng.integers(0, 32000, count * BLOCK_TOKENS + 1) for count in (12, 6, 9))
    servers = [start_server(master, prefix) for _ in range(2)]
    try:
        for _, connection in servers:
            assert ask(connection) == "ready"
        (_, one), (_, two) = servers
        found = {
            "one computes the system prompt": ask(one, system),
            "two loads it": ask(two, system),
            "two computes a conversation": ask(two, np.concatenate([system[:-1], first])),
            "one loads that": ask(one, np.concatenate([system[:-1], first])),
            "one computes another": ask(one, np.concatenate([system[:-1], second])),
            "two loads that": ask(two, np.concatenate([system[:-1], second])),
        }
        for process, connection in servers:
            connection.send(None)
            process.join(TIMEOUT_S)
    finally:
        for process, _ in servers:
            process.kill()
            process.join()
    return found


if __name__ == "__main__":
    for what, served in main(*sys.argv[1:2]).items():
        print(f"{what}: {served.loaded} blocks loaded, {served.computed} computed, {served.wrong} wrong bytes")
