"""A small decoder-only transformer with a paged KV cache: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Tokens are bytes and the weights are random with a fixed seed, so the text that it writes means nothing; but every token
depends on all cached keys and values, which is what the demo needs. Each layer is cut where a server has to act between
its parts: `project` needs nothing from the cache, `attend` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import functional

from paddle_kv import KVCacheSpec


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = 8
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    ffn_size: int = 704
    vocab_size: int = 256
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    seed: int = 7

    def cache_spec(self, block_size: int, dtype: str = "float32") -> KVCacheSpec:
        return KVCacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


@dataclass(frozen=True)
class Chunk:
    """What all layers need to know of the tokens that pass through them together.

    Attributes:
        positions: ``[tokens]``, where they stand in the conversation.
        cosine, sine: ``[tokens, 1, head_dim / 2]``, the rotations of RoPE.
        mask: ``[tokens, length]``, 0 where a token may look and very negative where it must not.
    """

    positions: Tensor
    cosine: Tensor
    sine: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        """Tokens of the conversation up to the end of the chunk."""
        return int(self.mask.shape[1])


class Layer:
    """The weights of one layer."""

    def __init__(self, config: ModelConfig, random: np.random.Generator) -> None:
        hidden, query_size, kv_size = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        # Sharp attention: scores with a spread of 3 pick few positions, so one wrong cached vector changes the tokens.
        self.query = _weight(random, hidden, query_size, gain=3.0)
        self.key = _weight(random, hidden, kv_size)
        self.value = _weight(random, hidden, kv_size)
        self.output = _weight(random, query_size, hidden)
        self.gate = _weight(random, hidden, config.ffn_size)
        self.up = _weight(random, hidden, config.ffn_size)
        self.down = _weight(random, config.ffn_size, hidden)
        self.attention_norm = paddle.ones([hidden])
        self.ffn_norm = paddle.ones([hidden])


class Model:
    def __init__(self, config: ModelConfig) -> None:
        random = np.random.default_rng(config.seed)
        self.config = config
        self.embedding = paddle.to_tensor(
            random.standard_normal((config.vocab_size, config.hidden_size), dtype=np.float32)
        )
        self.layers = [Layer(config, random) for _ in range(config.num_layers)]
        self.final_norm = paddle.ones([config.hidden_size])
        self.head = _weight(random, config.hidden_size, config.vocab_size)

    def chunk(self, position: int, count: int) -> Chunk:
        """``count`` tokens behind ``position`` earlier ones."""
        length, half = position + count, self.config.head_dim // 2
        positions = paddle.arange(position, length, dtype="int64")
        frequencies = self.config.rope_theta ** (-paddle.arange(half, dtype="float32") / half)
        angles = (positions.astype("float32").unsqueeze(1) * frequencies).unsqueeze(1)
        future = paddle.arange(length, dtype="int64").unsqueeze(0) > positions.unsqueeze(1)
        return Chunk(
            positions,
            paddle.cos(angles),
            paddle.sin(angles),
            future.astype("float32") * -1e30,
        )

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """``[tokens, hidden]``"""
        return functional.embedding(paddle.to_tensor(list(tokens), dtype="int64"), self.embedding)

    def project(self, layer: int, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[tokens, heads, head_dim]``, key and value ``[tokens, kv_heads, head_dim]``, rotated where needed."""
        config, weights = self.config, self.layers[layer]
        count = hidden.shape[0]
        normed = self._rms_norm(hidden, weights.attention_norm)
        query = (normed @ weights.query).reshape([count, config.num_heads, config.head_dim])
        key = (normed @ weights.key).reshape([count, config.num_kv_heads, config.head_dim])
        value = (normed @ weights.value).reshape([count, config.num_kv_heads, config.head_dim])
        return _rotate(query, chunk), _rotate(key, chunk), value

    def attend(
        self,
        layer: int,
        hidden: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chunk: Chunk,
    ) -> Tensor:
        """Attention over ``[kv_heads, length, head_dim]`` keys and values, then the SwiGLU block."""
        return self.finish(layer, hidden, self.attention(query, keys, values, chunk))

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, chunk: Chunk) -> Tensor:
        """``[tokens, heads * head_dim]``"""
        config = self.config
        count, groups = query.shape[0], config.num_heads // config.num_kv_heads
        scaled = (query / math.sqrt(config.head_dim)).transpose([1, 0, 2])
        scores = paddle.matmul(
            scaled.reshape([config.num_kv_heads, groups * count, config.head_dim]),
            keys,
            transpose_y=True,
        )
        scores = scores.reshape([config.num_heads, count, chunk.length]) + chunk.mask
        shares = functional.softmax(scores, axis=-1).reshape([config.num_kv_heads, groups * count, chunk.length])
        mixed = (shares @ values).reshape([config.num_heads, count, config.head_dim])
        return mixed.transpose([1, 0, 2]).reshape([count, -1])

    def finish(self, layer: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        """What a layer does with its attention: the output projection and the SwiGLU block."""
        weights = self.layers[layer]
        hidden = hidden + mixed @ weights.output
        normed = self._rms_norm(hidden, weights.ffn_norm)
        return hidden + (functional.silu(normed @ weights.gate) * (normed @ weights.up)) @ weights.down

    def logits(self, hidden: Tensor) -> Tensor:
        """``[tokens, vocabulary]``"""
        return self._rms_norm(hidden, self.final_norm) @ self.head

    def next_token(self, hidden: Tensor) -> int:
        """The most likely token after the last row of ``hidden``."""
        return int(paddle.argmax(self.logits(hidden[-1:])).item())

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        mean_square = (hidden * hidden).mean(axis=-1, keepdim=True)
        return hidden * paddle.rsqrt(mean_square + self.config.norm_epsilon) * weight


def read_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens of a conversation, ``[kv_heads, length, head_dim]``, from the blocks that it has.

    ``cache`` is ``[blocks, kv_heads, block_size, head_dim]``. Only the named blocks are touched: others may be
    in transfer meanwhile. On a GPU block_multihead_attention does this inside its kernel.
    """
    pages = paddle.gather(cache, block_table, axis=0)
    heads, head_dim = cache.shape[1], cache.shape[3]
    return pages.transpose([1, 0, 2, 3]).reshape([heads, -1, head_dim])[:, :length]


def _rotate(heads: Tensor, chunk: Chunk) -> Tensor:
    """RoPE with the two halves of a head as the rotated pairs."""
    half = heads.shape[-1] // 2
    left, right = heads[..., :half], heads[..., half:]
    return paddle.concat(
        [
            left * chunk.cosine - right * chunk.sine,
            right * chunk.cosine + left * chunk.sine,
        ],
        axis=-1,
    )


def _weight(random: np.random.Generator, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / math.sqrt(rows))
    return paddle.to_tensor(values)
