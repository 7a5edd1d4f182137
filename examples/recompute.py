"""Checks a served conversation against a run that computes all of it again and moves nothing.

Floats are compared bit for bit. That is fair because both runs do the same arithmetic in the same order: the recompute
feeds the same chunks, so every matrix has the same shape (a matrix product of 128 rows need not have the bits of 128
products of one row), and attention sees the same tokens in the same order, whatever blocks they were in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from serving import TIMEOUT_S, Conversation, Server, blocks_for, run_chunk
from timeline import Recorder

from paddle_kv import DeviceCache


def differences(server: Server, conversation: Conversation) -> Iterator[str]:
    """One sentence for each way in which the conversation differs from its recomputation."""
    expected, predictions = recompute(server, conversation)
    for index, (served, again) in enumerate(zip(conversation.predictions, predictions, strict=True)):
        if served != again:
            yield f"{conversation.name}: token {index} is {served}, recomputed {again}"
            break
    length = conversation.cached_tokens
    table = server.blocks.allocate(len(conversation.host_blocks))
    server.scheduler.onload(conversation.host_blocks, table).wait(TIMEOUT_S)
    for layer in range(server.spec.num_layers):
        for name in server.spec.tensor_names:
            served_bytes = contiguous(server.device, name, layer, table, length)
            again_bytes = contiguous(expected, name, layer, range(len(table)), length)
            wrong = int((served_bytes != again_bytes).sum())
            if wrong:
                yield f"{conversation.name}: {name} of layer {layer} differs in {wrong} of {served_bytes.size} bytes"
    server.blocks.release(table, [])


def recompute(server: Server, conversation: Conversation) -> tuple[DeviceCache, list[int]]:
    """The KV cache (block i of the conversation is block i) and the next token after each chunk."""
    table = range(blocks_for(conversation.cached_tokens, server.spec))
    device = server.device.device_id
    cache = DeviceCache(server.spec, len(table), "cpu" if device is None else f"gpu:{device}")
    recorder = Recorder(time.perf_counter)
    predictions: list[int] = []
    position = 0
    for chunk in conversation.chunks:
        predictions.append(run_chunk(server.model, cache, table, position, chunk, recorder))
        position += len(chunk)
    return cache, predictions


def contiguous(cache: DeviceCache, name: str, layer: int, table: list[int] | range, length: int) -> np.ndarray:
    """The bytes of one tensor's first ``length`` tokens: what lies behind them in the last block means nothing."""
    pages = cache.tensor(name, layer).numpy()[list(table)]
    tokens = pages.swapaxes(1, 2).reshape(-1, *pages.shape[1::2])[:length]
    return np.ascontiguousarray(tokens).view(np.uint8)
