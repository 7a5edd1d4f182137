"""The layouts of a block stack, written out index by index; slow on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def chunk_index(block: int, layer: int, outer: int, num_layers: int, num_outer: int) -> int:
    """Where the chunk is in the list of a block stack."""
    return (block * num_layers + layer) * num_outer + outer


def _positions(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return np.ndindex(*shape)


def universal_from_block(chunks: Sequence[np.ndarray], num_layers: int, num_outer: int, layout: str) -> np.ndarray:
    """[blocks, heads, layers, outer, tokens, width]"""
    first, second, width = chunks[0].shape
    tokens, heads = (first, second) if layout == "NHD" else (second, first)
    num_blocks = len(chunks) // (num_layers * num_outer)
    universal = np.empty((num_blocks, heads, num_layers, num_outer, tokens, width), chunks[0].dtype)
    for block, head, layer, outer, token in _positions(universal.shape[:5]):
        chunk = chunks[chunk_index(block, layer, outer, num_layers, num_outer)]
        universal[block, head, layer, outer, token] = chunk[token, head] if layout == "NHD" else chunk[head, token]
    return universal


def block_from_universal(universal: np.ndarray, layout: str) -> list[np.ndarray]:
    num_blocks, heads, num_layers, num_outer, tokens, width = universal.shape
    shape = (tokens, heads, width) if layout == "NHD" else (heads, tokens, width)
    chunks = [np.empty(shape, universal.dtype) for _ in range(num_blocks * num_layers * num_outer)]
    for block, head, layer, outer, token in _positions(universal.shape[:5]):
        chunk = chunks[chunk_index(block, layer, outer, num_layers, num_outer)]
        chunk[(token, head) if layout == "NHD" else (head, token)] = universal[block, head, layer, outer, token]
    return chunks


def operational_from_block(chunks: Sequence[np.ndarray], num_layers: int, num_outer: int) -> np.ndarray:
    """[blocks, layers, outer, elements of a chunk]"""
    num_blocks = len(chunks) // (num_layers * num_outer)
    operational = np.empty((num_blocks, num_layers, num_outer, chunks[0].size), chunks[0].dtype)
    for block, layer, outer in _positions(operational.shape[:3]):
        chunk = chunks[chunk_index(block, layer, outer, num_layers, num_outer)]
        for position, index in enumerate(_positions(chunk.shape)):
            operational[block, layer, outer, position] = chunk[index]
    return operational


def stack_of_cache(
    key_caches: Sequence[np.ndarray], value_caches: Sequence[np.ndarray] | None, block_ids: Sequence[int]
) -> list[np.ndarray]:
    """The blocks of layer caches as a block stack; a cache is [blocks, ...]."""
    stack = []
    for block in block_ids:
        for layer, keys in enumerate(key_caches):
            stack.append(keys[block])
            if value_caches is not None:
                stack.append(value_caches[layer][block])
    return stack


def reshard_universal(parts: Sequence[np.ndarray], target_tp: int) -> list[np.ndarray]:
    """Heads are numbered through all parts; rank r of the result has the r-th part of them."""
    head_of = [(part, head) for part in parts for head in range(part.shape[1])]
    assert len(head_of) % target_tp == 0
    per_rank = len(head_of) // target_tp
    result = []
    for rank in range(target_tp):
        mine = head_of[rank * per_rank : (rank + 1) * per_rank]
        result.append(np.stack([part[:, head] for part, head in mine], axis=1))
    return result
