"""Names of blocks outside of a process: what their content depends on, as bytes. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import KVCacheSpec

DIGEST_BYTES = 32
FORMAT_VERSION = 1
_PERSON = b"paddle_kv"


def joined(fields: Sequence[bytes]) -> bytes:
    """Injective: each field has its length in front."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def digest_of(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES, person=_PERSON).digest()


def spec_salt(spec: KVCacheSpec) -> bytes:
    """What the bytes of a block depend on: shapes, dtypes, layout."""
    fields = [str(spec.num_layers), spec.layout, str(spec.latent)]
    for name in spec.tensor_names:
        fields += [name, spec.tensor_dtype(name), "x".join(map(str, spec.block_shape(name)))]
    return joined([field.encode() for field in fields])


def spec_digest(spec: KVCacheSpec) -> bytes:
    """:func:`spec_salt` in 32 bytes, by which a directory and its movers know that they mean the same blocks.

    Raises:
        TypeError: not a spec.
    """
    if not hasattr(spec, "tensor_names"):
        raise TypeError(f"spec is {type(spec).__name__}; a KVCacheSpec is expected")
    return digest_of(spec_salt(spec))


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the blocks of a directory are blocks of.

    Attributes:
        model: what :func:`~paddle_kv.offload.cache_salt` made: the model with its revision, adapters, ranks.
        spec: digest of the cache's spec (:func:`~paddle_kv.offload.spec_digest`); empty: movers do not compare it.
        group: of layers with one kind of cache. There is one now, 0.

    Raises:
        TypeError: ``model`` or ``spec`` is not bytes, ``group`` no int.
        ValueError: a group that has no number.
    """

    model: bytes = b""
    spec: bytes = b""
    group: int = 0

    def __post_init__(self) -> None:
        for name, value in (("model", self.model), ("spec", self.spec)):
            if not isinstance(value, bytes):
                raise TypeError(f"{name} is {type(value).__name__}; bytes are expected")
        if type(self.group) is not int:
            raise TypeError(f"group = {self.group!r} is {type(self.group).__name__}; an int is expected")
        if not 0 <= self.group < 2**32:
            raise ValueError(f"group = {self.group} must be in [0, 2**32)")


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The full name of one rank's part of a block, for what outlives a process or is shared: files, stores.

    Example:
        >>> from paddle_kv.offload import BlockKey, Namespace
        >>> key = BlockKey(Namespace(b"model", b"spec", 0), 1, b"hash")
        >>> BlockKey.from_bytes(key.to_bytes()) == key
        True
    """

    space: Namespace
    rank: int
    hash: bytes

    def to_bytes(self) -> bytes:
        """Version, group, rank, then each of the three byte strings with its length in front; little-endian."""
        numbers = (FORMAT_VERSION, self.space.group, self.rank)
        strings = (self.space.model, self.space.spec, self.hash)
        return b"".join(
            [number.to_bytes(4, "little") for number in numbers]
            + [len(one).to_bytes(4, "little") + one for one in strings]
        )

    @classmethod
    def from_bytes(cls, text: bytes) -> BlockKey:
        """
        Raises:
            ValueError: another version, or not what :meth:`to_bytes` has made.
        """
        version, group, rank = (int.from_bytes(text[start : start + 4], "little") for start in (0, 4, 8))
        if version != FORMAT_VERSION:
            raise ValueError(f"the key has version {version}; {FORMAT_VERSION} is expected")
        strings, at = [], 12
        for _ in range(3):
            end = at + 4 + int.from_bytes(text[at : at + 4], "little")
            strings.append(text[at + 4 : end])
            at = end
        if at != len(text):
            raise ValueError(f"the key has {len(text)} bytes; its fields have {at}")
        return cls(Namespace(strings[0], strings[1], group), rank, strings[2])
