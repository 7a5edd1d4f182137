"""What gather_topk_rows does, in NumPy: one request, and one token, after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class State:
    """What is resident, as the operator keeps it: integers int32, rows as bytes [batch, num_slots, bytes of a row]."""

    resident: np.ndarray
    slot_of_token: np.ndarray
    token_of_slot: np.ndarray
    lru_order: np.ndarray
    fresh: np.ndarray

    @classmethod
    def empty(cls, resident: np.ndarray, max_tokens: int) -> State:
        batch, num_slots = resident.shape[:2]
        order = np.tile(np.arange(num_slots, dtype=np.int32), (batch, 1))
        absent = np.full((batch, max_tokens), -1, np.int32)
        return cls(resident.copy(), absent, np.full_like(order, -1), order, np.zeros(batch, np.int32))


def gathered(
    state: State, token_ids: np.ndarray, block_table: np.ndarray, host: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """The rows [batch, k, bytes], and how many of each request came from the host; ``state`` is changed.

    ``host``: bytes [blocks, block_size, bytes of a row].
    """
    rows = np.zeros((*token_ids.shape, host.shape[2]), np.uint8)
    misses = [_of_request(state, b, ids.tolist(), block_table[b], host, rows[b]) for b, ids in enumerate(token_ids)]
    return rows, misses


def _of_request(state: State, b: int, ids: list[int], table: np.ndarray, host: np.ndarray, rows: np.ndarray) -> int:
    slots, tokens, order = state.slot_of_token[b], state.token_of_slot[b], state.lru_order[b]
    if state.fresh[b]:
        slots[:], tokens[:], order[:], state.fresh[b] = -1, -1, np.arange(len(order)), 0
    listed = [t for t in dict.fromkeys(ids) if 0 <= t < len(slots)]
    taken = {int(slots[t]) for t in listed if slots[t] >= 0}
    victims = iter([int(s) for s in order if s not in taken])
    used, misses = [], 0
    for token in listed:
        if slots[token] < 0:
            entry, position = divmod(token, host.shape[1])
            if entry >= len(table) or not 0 <= table[entry] < len(host):
                continue
            slot, misses = next(victims), misses + 1
            if tokens[slot] >= 0:
                slots[tokens[slot]] = -1
            tokens[slot], slots[token] = token, slot
            state.resident[b, slot] = host[table[entry], position]
        used.append(int(slots[token]))
    young = set(used)
    order[:] = [*(s for s in order if s not in young), *used]
    for i, token in enumerate(ids):
        if 0 <= token < len(slots) and slots[token] >= 0:
            rows[i] = state.resident[b, slots[token]]
    return misses
