"""One block as an object: a header that says what it is, and the bytes of all layers as they lie in the pool.

The bytes are written down in docs/tiers.md. Nothing of a header is trusted: all that has to be there is known before,
and compared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ..block_keys import BlockKey, Namespace, spec_digest
from ..layout import KVCacheSpec, check_spec
from ..ops import _arguments as arguments
from .checksum import SUM_BYTES, checksum_of, write_headers
from .protocol import Outcome

MAGIC = b"PDKVTIER"
VERSION = 2
CHECKSUM_XXH3_64 = 1
ALIGN_BYTES = 4096
NAME_BYTES = 16
MOST_KEY_BYTES = 64
LEAST_PIECE_BYTES = 16 << 10  # with a checksum of its own: below that the call costs more than the bytes

# magic, version, header bytes, payload bytes, layers, group, rank, checksum's kind, spec, model, key bytes, pieces, key
_FIXED = struct.Struct(f"<8sIIQIIII32s32sII{MOST_KEY_BYTES}s")
_KEY = struct.Struct(f"<II{MOST_KEY_BYTES}s")  # its end
_KEY_AT = _FIXED.size - _KEY.size
_SUM = struct.Struct("<Q")
_TABLE_AT = _FIXED.size + _SUM.size  # offsets, sizes and checksums of the pieces: three columns
_MOST_LAYERS = 65536


@dataclass(frozen=True)
class Header:
    """What a header says of its object, whoever has written it."""

    version: int
    payload_bytes: int
    group: int
    rank: int
    spec_digest: bytes
    model_digest: bytes
    key: bytes
    header_bytes: int
    pieces: Sequence[tuple[int, int, int]]  # offset in the payload, bytes, checksum

    @property
    def name(self) -> bytes:
        """Of the object, as :meth:`ObjectFormat.name_of`."""
        space = Namespace(self.model_digest, self.spec_digest, self.group)
        return _name_of(self.version, BlockKey(space, self.rank, self.key))


class ObjectFormat:
    """What the objects of one group of layers, of one rank, have in common.

    Args:
        spec: of the cache.
        model: whatever else the content of a block depends on, such as the model with its revision.
        group: of layers.
        rank: of this process.

    Raises:
        ValueError: a group or rank that is not in [0, 2**32), or more layers than a header holds.
    """

    def __init__(self, spec: KVCacheSpec, model: bytes, *, group: int = 0, rank: int = 0) -> None:
        check_spec(spec)
        for name, value in (("group", group), ("rank", rank)):
            if not 0 <= arguments.integer(value, name) < 2**32:
                raise ValueError(f"{name} = {value} must be in [0, {2**32})")
        if spec.num_layers > _MOST_LAYERS:
            raise ValueError(f"num_layers = {spec.num_layers} must be at most {_MOST_LAYERS}")
        self.num_layers = spec.num_layers
        self.layer_bytes = spec.block_bytes
        self.payload_bytes = self.num_layers * self.layer_bytes
        self.piece_layers = min(-(-LEAST_PIECE_BYTES // self.layer_bytes), self.num_layers)
        self.piece_bytes = self.piece_layers * self.layer_bytes
        self.num_pieces = -(-self.num_layers // self.piece_layers)
        self.header_bytes = _header_bytes(self.num_pieces)
        self.object_bytes = self.header_bytes + self.payload_bytes
        self._space, self._rank = Namespace(_digest(model), spec_digest(spec), group), rank
        front = BlockKey(self._space, self._rank, b"").to_bytes()[:-4]  # without the length of the key
        self._names = blake2b(VERSION.to_bytes(4, "little") + front, digest_size=NAME_BYTES)
        sizes = (self.header_bytes, self.payload_bytes, self.num_layers)
        known = (MAGIC, VERSION, *sizes, group, rank, CHECKSUM_XXH3_64, self._space.spec, self._space.model)
        self._front = _FIXED.pack(*known, 0, 0, b"")[:_KEY_AT]
        step = self.piece_bytes
        starts = range(0, self.payload_bytes, step)
        sizes_of_pieces = [min(step, self.payload_bytes - start) for start in starts]
        self._table = struct.pack(f"<{2 * self.num_pieces}Q", *starts, *sizes_of_pieces)
        self._sums_at = _TABLE_AT + len(self._table)
        self._sums_end = self._sums_at + SUM_BYTES * self.num_pieces
        common = (self._front.ljust(_TABLE_AT, b"\0") + self._table).ljust(self.header_bytes, b"\0")
        self._form = (common, _KEY_AT, _FIXED.size, self._sums_at, self.piece_bytes)

    def name_of(self, key: bytes) -> bytes:
        """The name of the object: a hash that tells nothing of what is in it."""
        name = self._names.copy()  # what all names begin with is hashed once: a lookup asks for a thousand
        name.update(len(key).to_bytes(4, "little") + key)
        return name.digest()

    def write_headers(self, objects: Sequence[tuple[memoryview, bytes, memoryview]]) -> None:
        """Fills the header of each object, which comes with its key and its payload."""
        pack, pieces = _KEY.pack, self.num_pieces
        write_headers(self._form, [(header, pack(len(key), pieces, key), payload) for header, key, payload in objects])

    def read_header(self, header: memoryview, key: bytes) -> bytes | Outcome:
        """The checksums of the pieces, 8 bytes each, or why this is not the object of the key."""
        if _SUM.unpack_from(header, _FIXED.size)[0] != _checksum_of_header(header):
            # One of another version may keep its checksum elsewhere.
            other = header[:8] == MAGIC and header[8:12] != VERSION.to_bytes(4, "little")
            return Outcome.MISSING if other else Outcome.DAMAGED
        if header[: _FIXED.size] != self._front + _KEY.pack(len(key), self.num_pieces, key):
            return Outcome.MISSING
        if header[_TABLE_AT : self._sums_at] != self._table:
            return Outcome.MISSING
        return bytes(header[self._sums_at : self._sums_end])

    def sums_of(self, layers: range, sums: bytes) -> bytes:
        """Those of the pieces of these layers, which begin with a piece."""
        first, stop = layers.start // self.piece_layers, -(-layers.stop // self.piece_layers)
        return sums[SUM_BYTES * first : SUM_BYTES * stop]


def parse(header: bytes | memoryview) -> Header | None:
    """What a header says, checked against its own checksum; None if it is none, or of a version that is not known."""
    header = memoryview(header)
    if len(header) < _TABLE_AT:
        return None
    magic, version, header_bytes, payload_bytes, layers, group, rank, kind, *rest = _FIXED.unpack_from(header)
    spec_digest, model_digest, key_bytes, pieces, key = rest
    if magic != MAGIC or version != VERSION or kind != CHECKSUM_XXH3_64:
        return None
    if not 0 < pieces <= layers <= _MOST_LAYERS or header_bytes != _header_bytes(pieces) or len(header) < header_bytes:
        return None
    header = header[:header_bytes]
    if key_bytes > MOST_KEY_BYTES or _SUM.unpack_from(header, _FIXED.size)[0] != _checksum_of_header(header):
        return None
    table = struct.unpack_from(f"<{3 * pieces}Q", header, _TABLE_AT)
    ranges = list(zip(table[:pieces], table[pieces : 2 * pieces], table[2 * pieces :], strict=True))
    if any(offset + size > payload_bytes for offset, size, _ in ranges):
        return None
    return Header(version, payload_bytes, group, rank, spec_digest, model_digest, key[:key_bytes], header_bytes, ranges)


def header_bytes_of(start: bytes | memoryview) -> int:
    """How long the header is, as far as its first bytes can be believed."""
    pieces = _FIXED.unpack_from(start)[-2] if len(start) >= _FIXED.size else 0
    return _header_bytes(min(pieces, _MOST_LAYERS))


def _name_of(version: int, key: BlockKey) -> bytes:
    return blake2b(version.to_bytes(4, "little") + key.to_bytes(), digest_size=NAME_BYTES).digest()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=32).digest()


def _header_bytes(pieces: int) -> int:
    return -(-(_TABLE_AT + 24 * pieces) // ALIGN_BYTES) * ALIGN_BYTES


def _checksum_of_header(header: memoryview) -> int:
    return checksum_of(header[: _FIXED.size], header[_TABLE_AT:])
