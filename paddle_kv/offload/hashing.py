"""Names of blocks by content: a hash of the block's tokens and of everything before them.

Two blocks have the same hash exactly if all their tokens up to the end of the block agree, and the salt. BLAKE2b of the
standard library: it is cryptographic (a collision would hand one user's cache to another), does not depend on
PYTHONHASHSEED or the machine, and hashes a block of 512 tokens in a few microseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block_keys import digest_of, joined
from ..block_keys import spec_digest as spec_digest
from ..block_keys import spec_salt as spec_salt
from ..checks import range_array
from .checks import checked_count

TOKEN_BYTES = 8


def cache_salt(model: str, *, lora: str = "", tp_rank: int = 0, tp_size: int = 1) -> bytes:
    """A salt that keeps apart what must not be mixed: models (name them with their revision), adapters, shards.

    Args:
        model: name and revision.
        lora: the adapter, if all requests of the server use it; else see ``request_salt`` of
            :meth:`KVOffloadManager.block_hashes`.
        tp_rank: tensor-parallel rank of this process, from 0.
        tp_size: tensor-parallel ranks.

    Raises:
        TypeError: ``model`` or ``lora`` is not a string, or a number no integer.
        ValueError: a negative rank, or none at all.

    Example:
        >>> cache_salt("llama@r1", tp_rank=0, tp_size=2) == cache_salt("llama@r1", tp_rank=1, tp_size=2)
        False
    """
    for name, value in (("model", model), ("lora", lora)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is {type(value).__name__}; a string is expected")
    tp_rank, tp_size = checked_count(tp_rank, "tp_rank"), checked_count(tp_size, "tp_size", least=1)
    return joined([model.encode(), lora.encode(), str(tp_rank).encode(), str(tp_size).encode()])


class BlockHasher:
    """Hashes of the full blocks of a prompt.

    Args:
        block_size: tokens per block.
        salt: whatever else the content of a block depends on.

    Raises:
        TypeError: the salt is not bytes, or the size no integer.
        ValueError: less than one token.

    Example:
        >>> hasher = BlockHasher(2, b"model")
        >>> first, second = hasher([7, 8, 9, 10, 11])  # the fifth token does not fill a block
        >>> first == hasher([7, 8])[0], second == hasher([0, 8, 9, 10])[1]
        (True, False)
    """

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        if not isinstance(salt, (bytes, bytearray)):
            raise TypeError(f"salt is {type(salt).__name__}; bytes are expected")
        self._block_size = checked_count(block_size, "block_size", least=1)
        self._salt = bytes(salt)

    def __call__(self, token_ids: Any, request_salt: bytes = b"") -> list[bytes]:
        """One hash for each full block.

        Raises:
            TypeError: ``token_ids`` does not hold integers, or ``request_salt`` is not bytes.
            ValueError: ``token_ids`` is not 1-D.
            IndexError: a range that does not fit in 64 bits.
        """
        prefix = self.prefix(request_salt)
        prefix.append(token_ids)
        return prefix.hashes

    def prefix(self, request_salt: bytes = b"") -> PrefixHasher:
        """The hashes of a prompt that grows: an answer costs its own blocks, not those before it.

        Raises:
            TypeError: ``request_salt`` is not bytes.
        """
        if not isinstance(request_salt, (bytes, bytearray)):
            raise TypeError(f"request_salt is {type(request_salt).__name__}; bytes are expected")
        return PrefixHasher(self._block_size, digest_of(joined([self._salt, bytes(request_salt)])))


class PrefixHasher:
    """What :meth:`BlockHasher.prefix` makes. Of one thread.

    Attributes:
        hashes: of the full blocks so far; do not change it.
        num_tokens: appended so far.

    Example:
        >>> hasher = BlockHasher(2, b"model")
        >>> prefix = hasher.prefix()
        >>> len(prefix.append([7, 8, 9])), len(prefix.append([10])), prefix.num_tokens
        (1, 1, 4)
        >>> prefix.hashes == hasher([7, 8, 9, 10])
        True
    """

    def __init__(self, block_size: int, parent: bytes) -> None:
        self.hashes: list[bytes] = []
        self.num_tokens = 0
        self._step = TOKEN_BYTES * block_size
        self._parent = parent
        self._rest = b""  # tokens that do not fill a block yet

    def append(self, token_ids: Any) -> list[bytes]:
        """The hashes of the blocks that these tokens fill.

        Raises:
            TypeError: ``token_ids`` does not hold integers.
            ValueError: ``token_ids`` is not 1-D.
            IndexError: a range that does not fit in 64 bits. Nothing was appended.
        """
        added = _content(token_ids)
        content, step, parent = self._rest + added, self._step, self._parent
        full = len(content) // step * step
        hashes = []
        for start in range(0, full, step):
            parent = digest_of(parent + content[start : start + step])
            hashes.append(parent)
        self._parent, self._rest = parent, content[full:]
        self.num_tokens += len(added) // TOKEN_BYTES
        self.hashes += hashes
        return hashes


def _content(token_ids: Any) -> bytes:
    tokens = range_array(token_ids, "token_ids") if isinstance(token_ids, range) else np.asarray(token_ids)
    if tokens.ndim == 0 and tokens.dtype.kind not in "iu":  # None, text, a generator
        raise TypeError(f"token_ids is {type(token_ids).__name__}; a 1-D sequence of integers is expected")
    if tokens.ndim != 1:
        raise ValueError(f"token_ids has shape {list(tokens.shape)}; a 1-D sequence of integers is expected")
    if tokens.size and tokens.dtype.kind not in "iu":
        raise TypeError(f"token_ids has dtype {tokens.dtype}; integers are expected")
    return tokens.astype("<i8").tobytes()
