"""The bytes of an object are those of docs/tiers.md, and no header, whatever is in it, does harm."""

from __future__ import annotations

import dataclasses
import os
import struct
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_kv import KVCacheSpec
from paddle_kv.offload import BlockKey, Namespace, spec_digest
from paddle_kv.testing.tiers.rig import ALIGNED, ODD
from paddle_kv.tiers import Tier, checksum
from paddle_kv.tiers.items import stages_of
from paddle_kv.tiers.object_format import Header, ObjectFormat, header_bytes_of, parse
from paddle_kv.tiers.protocol import Outcome

KEY = bytes(range(32))
SPEC_TEXT = [b"6", b"HND", b"False", b"key", b"float16", b"1x16x128", b"value", b"float16", b"1x16x128"]


def made(spec: KVCacheSpec = ALIGNED, key: bytes = KEY, **options: int) -> tuple[ObjectFormat, bytearray, bytes]:
    form = ObjectFormat(spec, b"model", **options)
    payload = np.random.default_rng(7).integers(0, 256, form.payload_bytes, np.uint8).tobytes()
    header = bytearray(b"\xee" * form.header_bytes)
    form.write_headers([(memoryview(header), key, memoryview(payload))])
    return form, header, payload


def test_the_bytes_as_they_are_written_down() -> None:
    form, header, payload = made(group=3, rank=5)
    layer = ALIGNED.block_bytes
    expected = struct.pack("<8sIIQIIII", b"PDKVTIER", 2, 4096, 6 * layer, 6, 3, 5, 1)
    text = b"".join(struct.pack("<Q", len(part)) + part for part in SPEC_TEXT)
    expected += blake2b(text, digest_size=32, person=b"paddle_kv").digest() + blake2b(b"model", digest_size=32).digest()
    expected += struct.pack("<II64s", 32, 3, KEY)
    piece = 2 * layer  # 16 KiB
    sums = [xxhash.xxh3_64_intdigest(payload[i * piece : (i + 1) * piece]) for i in range(3)]
    table = struct.pack("<9Q", *(i * piece for i in range(3)), *[piece] * 3, *sums)
    table += bytes(4096 - len(expected) - 8 - len(table))
    expected += struct.pack("<Q", xxhash.xxh3_64_intdigest(expected + table)) + table
    assert bytes(header) == expected
    assert form.read_header(memoryview(header), KEY) == struct.pack("<3Q", *sums)
    block = BlockKey(Namespace(expected[72:104], spec_digest(ALIGNED), 3), 5, KEY).to_bytes()
    assert form.name_of(KEY) == blake2b(bytes([2, 0, 0, 0]) + block, digest_size=16).digest()


@pytest.mark.parametrize("spec", [ALIGNED, ODD])
def test_a_header_says_what_was_put_in(spec: KVCacheSpec) -> None:
    form, header, payload = made(spec, group=1, rank=2)
    said = parse(bytes(header))
    assert isinstance(said, Header)
    assert (said.group, said.rank, said.key, said.payload_bytes) == (1, 2, KEY, len(payload))
    assert said.name == form.name_of(KEY)
    assert (said.version, said.spec_digest, header_bytes_of(header)) == (2, spec_digest(spec), form.header_bytes)
    ends = [0]
    for at, size, _ in said.pieces:  # whole layers, side by side, and 16 KiB of them as long as there are so many
        assert at == ends[-1]
        assert size % spec.block_bytes == 0
        ends.append(at + size)
    assert ends[-1] == form.payload_bytes
    assert all(16384 <= size < 16384 + spec.block_bytes for _, size, _ in said.pieces[:-1])


def test_many_layers_have_a_longer_header() -> None:
    spec = KVCacheSpec(num_layers=400, num_kv_heads=1, head_dim=8192, block_size=1, dtype="int8")
    form, header, _ = made(spec)
    assert len(header) == 12288
    assert isinstance(form.read_header(memoryview(header), KEY), bytes)
    assert parse(bytes(header)) is not None


@pytest.mark.parametrize("spec", [ALIGNED, ODD])
@pytest.mark.parametrize("aligned", [True, False])
def test_stages_begin_with_pieces(spec: KVCacheSpec, aligned: bool) -> None:
    for layers in (1, 2, 5, 6, 31, 32, 80):
        form = ObjectFormat(dataclasses.replace(spec, num_layers=layers), b"model")
        stages = stages_of(form, 0, layerwise=True, aligned=aligned)
        assert [layer for stage in stages for layer in stage] == list(range(layers))
        for stage in stages:
            assert stage.start % form.piece_layers == 0
            assert not aligned or stage.start * form.layer_bytes % 4096 == 0
        assert len(stages) > 2 or layers < 4 * form.piece_layers or aligned
    assert stages_of(form, 0, layerwise=False, aligned=aligned) == [range(80)]


@pytest.mark.parametrize(
    ("object_kib", "expected"),
    [
        (128, [32]),
        (256, [2, 30]),
        (512, [1, 8, 11, 12]),
        (1024, [1, 4, 11, 16]),
        (8192, [1, 3, *[4] * 7]),
        (65536, [1] * 32),
    ],
)
def test_stages_grow_and_are_neither_short_nor_long(object_kib: int, expected: list[int]) -> None:
    spec = KVCacheSpec(num_layers=32, num_kv_heads=1, head_dim=16 * object_kib, block_size=1, dtype="int8")
    form = ObjectFormat(spec, b"model")
    stages = stages_of(form, Tier.least_stage_bytes, layerwise=True, aligned=True)
    assert [len(stage) for stage in stages] == expected


def test_every_byte_of_a_header_counts() -> None:
    form, header, _ = made()
    for at in range(len(header)):
        header[at] ^= 0x10
        assert isinstance(form.read_header(memoryview(header), KEY), Outcome), at
        assert parse(bytes(header)) is None, at
        header[at] ^= 0x10
    assert form.read_header(memoryview(header), KEY) is not Outcome.DAMAGED


def test_objects_of_others_are_missing_not_damaged() -> None:
    form, header, _ = made()
    for other in (
        made(rank=1),
        made(group=1),
        made(ODD),
        made(KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=128, block_size=16, dtype="float16")),
        (None, made(key=b"other key")[1], b""),
    ):
        strange = bytes(other[1][: form.header_bytes]).ljust(form.header_bytes, b"\0")
        assert form.read_header(memoryview(strange), KEY) is Outcome.MISSING
    newer = bytearray(header)
    newer[8] = 3  # with a checksum of its own
    newer[100:] = bytes(len(newer) - 100)
    assert form.read_header(memoryview(newer), KEY) is Outcome.MISSING
    assert parse(bytes(newer)) is None


@settings(max_examples=int(os.environ.get("PADDLE_KV_STRESS", "300")), deadline=None)
@given(st.binary(max_size=300), st.integers(0, 4096), st.booleans())
def test_fuzz(noise: bytes, at: int, signed: bool) -> None:
    """Also where the header's own checksum is right: then somebody else wrote it."""
    form, header, _ = made()
    original = bytes(header)
    header[at : at + len(noise)] = noise
    del header[4096:]
    header.extend(bytes(4096 - len(header)))
    if signed:
        header[176:184] = xxhash.xxh3_64_digest(bytes(header[:176] + header[184:]))[::-1]
    found = form.read_header(memoryview(header), KEY)
    assert isinstance(found, Outcome) or header[:472] == original[:472] or signed
    said = parse(bytes(header))
    assert said is None or all(offset + size <= said.payload_bytes for offset, size, _ in said.pieces)
    assert parse(noise) is None
    header_bytes_of(noise)


@pytest.mark.parametrize(("name", "value"), [("group", -1), ("rank", 2**32)])
def test_what_no_header_can_hold(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} = {value} must be in \[0, 4294967296\)$"):
        ObjectFormat(ALIGNED, b"model", **{name: value})


@pytest.mark.parametrize(
    ("change", "value"),
    [(0, b"short"), (1, 4096 - 71), (1, 0), (2, 4089), (3, 4096), (3, -8), (3, 1 << 62), (4, 0), (4, -1), (4, 1)],
)
def test_a_form_into_which_an_object_does_not_fit_writes_nothing(change: int, value: Any) -> None:
    form = [bytes(4096), 104, 176, 184, 16384]
    header, payload = bytearray(b"\xa5" * 4096), bytes(65536)
    checksum.write_headers(tuple(form), [(memoryview(header), bytes(72), memoryview(payload))])  # type: ignore[arg-type]
    header[:] = b"\xa5" * 4096
    form[change] = value
    with pytest.raises(ValueError, match="form of"):
        checksum.write_headers(tuple(form), [(memoryview(header), bytes(72), memoryview(payload))])  # type: ignore[arg-type]
    assert header == b"\xa5" * 4096


@pytest.mark.parametrize("piece_bytes", [0, -1])
def test_pieces_of_nothing(piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        checksum.checksums([(memoryview(b"abc"), piece_bytes)])
