"""Beam search over a paged KV cache: python examples/beam_search.py

The beams share the blocks of the prompt, and of whatever else they have in common. A block has a reference count;
before a beam writes into a block that others also hold, it takes a block of its own and has the old one copied: all
layers and all beams of a step in one call of `copy_blocks`. Where a server has a GPU, `block_multihead_attention`
writes the new tokens into the same cache tensors `[blocks, heads, block_size, head_dim]` and attends to them; its
kernel exists on GPUs only. On the CPU `reshape_and_cache` writes them, and the attention of the demo's model reads
them.

In the end each beam is computed again by itself, without a shared block and without a copy, and the results of its
attention are compared in every layer and step. Exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout in which the operators were built in place

import numpy as np
import paddle
from model import Model, ModelConfig, read_pages
from paddle import Tensor
from paddle.incubate.nn import functional as fused
from paddle.nn import functional

from paddle_kv import DeviceCache, devices, ops

PROMPT = b"The cache of a prompt is shared by all that is said after it."


class Blocks:
    """Block ids with a count of the beams that hold each."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self.references = [0] * count
        self.most_used = 0

    @property
    def used(self) -> int:
        return len(self.references) - len(self._free)

    def take(self) -> int:
        block = self._free.pop(0)
        self.references[block] = 1
        self.most_used = max(self.most_used, self.used)
        return block

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free.append(block)


@dataclass
class Beam:
    """``attention[step][layer]``: what attention returned for the token of that step, ``[heads * head_dim]``."""

    tokens: list[int]
    table: list[int]
    score: float = 0.0
    attention: list[list[np.ndarray]] = field(default_factory=list)


class DemoAttention:
    """Attention of the demo's model, one beam after the other: runs everywhere."""

    name = "the demo's attention"
    dtype = "float32"
    tolerance = 1e-4

    def __init__(self, model: Model, cache: DeviceCache) -> None:
        self.model, self.cache = model, cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, tables: Tensor, position: int) -> Tensor:
        """Writes one token of each beam at ``position`` and attends to it and all before: ``[beams, heads * dim]``."""
        keys, values = self.cache.tensor("key", layer), self.cache.tensor("value", layer)
        size = self.cache.spec.block_size
        slots = tables[:, position // size] * size + position % size
        ops.reshape_and_cache(key, value, keys, values, slots)
        chunk = self.model.chunk(position, 1)
        pages = [[read_pages(tensor, table, position + 1) for tensor in (keys, values)] for table in tables]
        return paddle.concat([self.model.attention(query[i : i + 1], *pages[i], chunk) for i in range(len(pages))])


class PaddleAttention:
    """Paddle's block_multihead_attention, which writes the tokens itself. GPU builds only; needs as many KV heads as
    heads. Written after its documentation: untested, as README's table says of Paddle 3 on a GPU."""

    name = "block_multihead_attention"
    dtype = "float16"
    tolerance = 2e-2

    def __init__(self, model: Model, cache: DeviceCache) -> None:
        self.cache = cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, tables: Tensor, position: int) -> Tensor:
        count = query.shape[0]
        encoded, lengths, ones = (paddle.full([count, 1], n, dtype="int32") for n in (0, position, 1))
        none = paddle.zeros([count], dtype="int32")
        starts = paddle.arange(count + 1, dtype="int32")
        options = {}
        if "max_enc_len_this_time" in inspect.signature(fused.block_multihead_attention).parameters:  # Paddle 3
            options = {
                "max_enc_len_this_time": paddle.zeros([1], dtype="int32").cpu(),
                "max_dec_len_this_time": paddle.full([1], position, dtype="int32").cpu(),
            }
        attended, *_ = fused.block_multihead_attention(
            paddle.concat([t.reshape([count, -1]) for t in (query, key, value)], axis=1),
            self.cache.tensor("key", layer), self.cache.tensor("value", layer),
            encoded, lengths, ones, none, none, starts, starts, tables.astype("int32"),
            max_seq_len=1, block_size=self.cache.spec.block_size, **options,
        )  # fmt: skip
        return attended


class Search:
    """The beams, their blocks, and one cache for all of them."""

    def __init__(self, model: Model, attention: type, *, width: int, block_size: int, num_blocks: int) -> None:
        self.model, self.width = model, width
        spec = model.config.cache_spec(block_size, dtype=attention.dtype)
        self.cache = DeviceCache(spec, num_blocks, device=paddle.get_device())
        self.attention = attention(model, self.cache)
        self.blocks = Blocks(num_blocks)
        self.copied_blocks = 0

    def start(self, prompt: Sequence[int]) -> list[Beam]:
        """Runs the prompt once, all but its last token, and gives its blocks to each beam."""
        size, earlier = self.cache.spec.block_size, list(prompt[:-1])
        table = [self.blocks.take() for _ in range(-(-len(earlier) // size))]
        slots = paddle.to_tensor([table[p // size] * size + p % size for p in range(len(earlier))])
        chunk, hidden = self.model.chunk(0, len(earlier)), self.model.embed(earlier)
        for layer in range(self.model.config.num_layers):
            query, key, value = self.model.project(layer, hidden, chunk)
            cached = (self.cache.tensor(name, layer) for name in ("key", "value"))
            ops.reshape_and_cache(key.astype(self.attention.dtype), value.astype(self.attention.dtype), *cached, slots)
            by_head = (tensor.transpose([1, 0, 2]) for tensor in (key, value))
            hidden = self.model.attend(layer, hidden, query, *by_head, chunk)
        return [Beam(list(prompt), table)]

    def step(self, beams: list[Beam]) -> list[Beam]:
        """Computes the last token of each beam, and returns the best continuations."""
        position = len(beams[0].tokens) - 1
        self.make_writable(beams, position)
        hidden = self.model.embed([beam.tokens[-1] for beam in beams])
        chunk = self.model.chunk(position, 1)
        tables = paddle.to_tensor([beam.table for beam in beams], dtype="int64")
        results = []
        for layer in range(self.model.config.num_layers):
            projected = (t.astype(self.attention.dtype) for t in self.model.project(layer, hidden, chunk))
            attended = self.attention(layer, *projected, tables, position).astype("float32")
            results.append(attended.numpy())
            hidden = self.model.finish(layer, hidden, attended)
        for i, beam in enumerate(beams):
            beam.attention.append([result[i] for result in results])
        return self.continuations(beams, functional.log_softmax(self.model.logits(hidden)).numpy())

    def make_writable(self, beams: list[Beam], position: int) -> None:
        """Gives each beam a block of its own at ``position``: a new one, or a copy of the one that others hold too."""
        index = position // self.cache.spec.block_size
        pairs = []
        for beam in beams:
            if index == len(beam.table):
                beam.table.append(self.blocks.take())
            elif self.blocks.references[beam.table[index]] > 1:
                own = self.blocks.take()
                pairs.append((beam.table[index], own))
                self.blocks.release([beam.table[index]])
                beam.table[index] = own
        layers = range(self.model.config.num_layers)
        keys, values = ([self.cache.tensor(name, layer) for layer in layers] for name in ("key", "value"))
        ops.copy_blocks(keys, values, pairs)
        self.copied_blocks += len(pairs)

    def continuations(self, beams: list[Beam], scores: np.ndarray) -> list[Beam]:
        totals = scores + np.array([[beam.score] for beam in beams])
        best = np.argsort(-totals, axis=None, kind="stable")[: self.width]
        chosen = []
        for parent, token in zip(*np.unravel_index(best, totals.shape), strict=True):
            beam = beams[parent]
            self.blocks.share(beam.table)
            tokens = [*beam.tokens, int(token)]
            chosen.append(Beam(tokens, list(beam.table), float(totals[parent, token]), list(beam.attention)))
        for beam in beams:
            self.blocks.release(beam.table)
        return chosen


def recomputed(model: Model, beam: Beam, prompt_tokens: int) -> list[list[np.ndarray]]:
    """The attention of all steps of one beam, with all of its keys and values in one piece."""
    count = len(beam.tokens) - 1
    chunk, hidden = model.chunk(0, count), model.embed(beam.tokens[:count])
    layers = []
    for layer in range(model.config.num_layers):
        query, key, value = model.project(layer, hidden, chunk)
        attended = model.attention(query, key.transpose([1, 0, 2]), value.transpose([1, 0, 2]), chunk)
        layers.append(attended.numpy()[prompt_tokens - 1 :])
        hidden = model.finish(layer, hidden, attended)
    return [[layer[step] for layer in layers] for step in range(count - prompt_tokens + 1)]


def largest_error(got: list[list[np.ndarray]], want: list[list[np.ndarray]]) -> float:
    """Over steps and layers, relative to the norm of what was expected."""
    pairs = [(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=16)
    given = parser.parse_args()

    paddle.set_device(devices.name_of(0) if devices.has_gpu() else "cpu")
    # Paddle's own kernel is in its CUDA build alone.
    attention = PaddleAttention if paddle.is_compiled_with_cuda() and devices.has_gpu() else DemoAttention
    model = Model(ModelConfig(num_layers=4, num_kv_heads=8))
    per_beam = -(-(len(PROMPT) + given.steps) // given.block_size)
    search = Search(
        model, attention, width=given.beams, block_size=given.block_size, num_blocks=2 * given.beams * per_beam
    )
    why = "" if attention is PaddleAttention else " (block_multihead_attention is in Paddle's CUDA build alone)"
    print(f"{given.beams} beams, {given.steps} steps, prompt of {len(PROMPT)} tokens, {attention.name}{why}")

    beams = search.start(PROMPT)
    for _ in range(given.steps):
        beams = search.step(beams)
    errors = [largest_error(beam.attention, recomputed(model, beam, len(PROMPT))) for beam in beams]
    used, apart = search.blocks.used, given.beams * per_beam
    print(f"blocks: {used} held, {search.blocks.most_used} at most; {apart} if nothing were shared")
    print(f"copied before writing: {search.copied_blocks} blocks in each of {model.config.num_layers} layers")
    print("beam  score    error    blocks (in brackets: shared)")
    for i, (beam, error) in enumerate(zip(beams, errors, strict=True)):
        held = " ".join(f"[{b}]" if search.blocks.references[b] > 1 else str(b) for b in beam.table)
        print(f"{i:4}  {beam.score:7.2f}  {error:.1e}  {held}")
    for beam in beams:
        search.blocks.release(beam.table)
    if search.blocks.used or not max(errors) <= attention.tolerance:
        print("wrong: the attention of a beam differs from its recomputation, or a block was not given back")
        return 1
    print("every beam's attention is what it is without sharing, and all blocks were given back")
    return 0


if __name__ == "__main__":
    sys.exit(main())
