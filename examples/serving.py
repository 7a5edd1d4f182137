"""Serves conversations whose KV cache does not fit on the device, one turn at a time.

A conversation that is not running has its blocks in host memory. When it comes back:

1. its prefix is onloaded, and the model starts at once: layer i waits for layer i of the prefix only;
2. blocks that the prompt fills are offloaded layer by layer, while the next layers compute;
3. blocks that the answer fills are offloaded when it is complete, while the next conversation already runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import paddle
from model import Model, read_pages
from timeline import Recorder

from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, Span, Transfer, ops

TIMEOUT_S = 60.0


@dataclass
class Conversation:
    """What was said, and where its KV cache is while nobody talks.

    Attributes:
        chunks: the tokens of each pass through the model; together the tokens that have a place in the KV cache.
        predictions: the next token after each pass. The last one is not in the cache yet: it opens the next turn.
    """

    name: str
    prompts: list[bytes]
    chunks: list[list[int]] = field(default_factory=list)
    predictions: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    turns: int = 0

    @property
    def cached_tokens(self) -> int:
        return sum(map(len, self.chunks))


@dataclass
class Turn:
    conversation: str
    number: int
    reused_tokens: int
    prompt_tokens: int
    answer: bytes
    onload: Transfer
    offloads: list[Transfer]
    spans: list[Span]


class DeviceBlocks:
    """Hands out device blocks, the longest-free first."""

    def __init__(self, count: int) -> None:
        self._free: deque[tuple[int, list[Transfer]]] = deque((block_id, []) for block_id in range(count))

    def allocate(self, count: int) -> list[int]:
        """Blocks that the model may write: it is made to wait for offloads that still read them."""
        if count > len(self._free):
            raise MemoryError(f"{count} device blocks asked for, {len(self._free)} free")
        taken = [self._free.popleft() for _ in range(count)]
        for transfer in {id(t): t for _, offloads in taken for t in offloads}.values():
            transfer.wait_on()
        return [block_id for block_id, _ in taken]

    def release(self, block_ids: Sequence[int], offloads: list[Transfer]) -> None:
        """Gives blocks back at once, although ``offloads`` may still read them."""
        self._free.extend((block_id, offloads) for block_id in block_ids)


class Server:
    """The caches, the scheduler and the book-keeping of blocks."""

    def __init__(
        self, model: Model, *, block_size: int, device_blocks: int, host_blocks: int, device: str = "cpu"
    ) -> None:
        self.model = model
        self.spec = model.config.cache_spec(block_size)
        self.device = DeviceCache(self.spec, device_blocks, device)
        self.host = HostPool(self.spec, host_blocks)
        self.scheduler = LayerwiseScheduler(self.device, self.host, record_layer_times=True)
        self.blocks = DeviceBlocks(device_blocks)

    def turn(self, conversation: Conversation, answer_tokens: int) -> Turn:
        """Answers the conversation's next prompt with ``answer_tokens`` tokens."""
        prompt = conversation.predictions[-1:] + list(conversation.prompts[conversation.turns])
        conversation.turns += 1
        reused = conversation.cached_tokens
        after_prompt = reused + len(prompt)
        block_count = blocks_for(after_prompt + answer_tokens - 1, self.spec)
        recorder = Recorder(self.scheduler.now_ms)

        table = self.blocks.allocate(block_count)
        saved = len(conversation.host_blocks)
        onload = self.scheduler.onload(conversation.host_blocks, table[:saved])
        conversation.host_blocks += self.host.allocate(block_count - saved)

        # Full blocks never change again. The last block of the prefix may be partly filled: from there on all is new.
        changed, full = (
            reused // self.spec.block_size,
            after_prompt // self.spec.block_size,
        )
        offload = self.scheduler.offload(table[changed:full], conversation.host_blocks[changed:full], layerwise=True)

        def advance(tokens: list[int], wait_layer: LayerCall, layer_written: LayerCall) -> None:
            position = conversation.cached_tokens
            prediction = run_chunk(
                self.model,
                self.device,
                table,
                position,
                tokens,
                recorder,
                wait_layer,
                layer_written,
            )
            conversation.chunks.append(tokens)
            conversation.predictions.append(prediction)

        try:
            advance(
                prompt,
                lambda layer: onload.wait_layer(layer, timeout_s=TIMEOUT_S),
                offload.mark_layer_written,
            )
        except BaseException:
            offload.cancel()  # or it would wait for the missing layers forever
            raise
        for _ in range(answer_tokens - 1):
            advance(conversation.predictions[-1:], nothing, nothing)

        rest = self.scheduler.offload(table[full:], conversation.host_blocks[full:])
        onload.wait(TIMEOUT_S)  # raises what wait_layer could not know yet: only now are the results valid
        self.blocks.release(table, [offload, rest])
        answer = bytes(conversation.predictions[-answer_tokens:])
        return Turn(
            conversation.name,
            conversation.turns,
            reused,
            len(prompt),
            answer,
            onload,
            [offload, rest],
            recorder.spans,
        )

    def close(self) -> None:
        self.scheduler.close(TIMEOUT_S)
        self.host.close()


LayerCall = Callable[[int], None]


def nothing(layer: int) -> None:
    """For chunks whose whole prefix is on the device, and whose blocks are offloaded later."""


def run_chunk(
    model: Model,
    cache: DeviceCache,
    block_table: Sequence[int],
    position: int,
    tokens: Sequence[int],
    recorder: Recorder,
    wait_layer: LayerCall = nothing,
    layer_written: LayerCall = nothing,
    layer_read: LayerCall = nothing,
) -> int:
    """Runs ``tokens`` through the model behind ``position`` cached tokens and returns the most likely next token.

    Args:
        block_table: the device blocks of the conversation, in order.
        wait_layer: called before a layer's cache is touched, be it to write the tokens or to read the prefix: the block
            in which the prefix ends belongs to both.
        layer_written: called when the tokens are in that layer's cache.
        layer_read: called when that layer's cache is not needed any more.
    """
    block_size = cache.spec.block_size
    with recorder.span("compute", 0):
        chunk = model.chunk(position, len(tokens))
        table = paddle.to_tensor(list(block_table[: blocks_for(chunk.length, cache.spec)]), dtype="int64")
        slots = paddle.gather(table, chunk.positions // block_size) * block_size + chunk.positions % block_size
        hidden = model.embed(tokens)
    for layer in range(model.config.num_layers):
        keys, values = cache.tensor("key", layer), cache.tensor("value", layer)
        with recorder.span("compute", layer):
            query, key, value = model.project(layer, hidden, chunk)
        with recorder.span("wait", layer):
            wait_layer(layer)
        with recorder.span("compute", layer):
            ops.reshape_and_cache(key, value, keys, values, slots)
            layer_written(layer)
            prefix = (
                read_pages(keys, table, chunk.length),
                read_pages(values, table, chunk.length),
            )
            hidden = model.attend(layer, hidden, query, *prefix, chunk)
            layer_read(layer)
    return model.next_token(hidden)


def blocks_for(tokens: int, spec: KVCacheSpec) -> int:
    return -(-tokens // spec.block_size)
