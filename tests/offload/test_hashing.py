from __future__ import annotations

import subprocess
import sys
from hashlib import blake2b

import numpy as np
import paddle
import pytest

from paddle_kv import LayerwiseScheduler
from paddle_kv.offload import BlockHasher, KVOffloadManager, cache_salt, hashing
from paddle_kv.offload.hashing import spec_salt
from tests.schedule.rig import Rig, make_spec


def test_one_hash_for_each_full_block() -> None:
    hasher = BlockHasher(4)
    assert [len(hasher(range(count))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    hasher = BlockHasher(2)
    one, other = hasher([1, 2, 3, 4, 5, 6]), hasher([9, 2, 3, 4, 5, 6])
    assert not set(one) & set(other)
    assert hasher([1, 2, 3, 4, 7, 8])[:2] == one[:2]
    assert len(set(hasher([5, 5] * 10))) == 10


def test_the_value_is_what_it_was() -> None:
    """Hashes may be kept or sent: they must not change with the version."""
    salt = (4).to_bytes(8, "little") + b"salt" + (0).to_bytes(8, "little")
    parent = blake2b(salt, digest_size=32, person=b"paddle_kv").digest()
    tokens = b"".join(token.to_bytes(8, "little") for token in (7, 300, 70000))
    expected = blake2b(parent + tokens, digest_size=32, person=b"paddle_kv").digest()
    assert BlockHasher(3, b"salt")([7, 300, 70000]) == [expected]


def test_another_process_agrees() -> None:
    code = "from paddle_kv.offload.hashing import BlockHasher; print(BlockHasher(3, b's')(range(6))[1].hex())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == BlockHasher(3, b"s")(range(6))[1].hex()


@pytest.mark.parametrize("kind", [tuple, np.array, lambda ids: np.array(ids, np.int32), paddle.to_tensor])
def test_tokens_of_any_kind(kind: object) -> None:
    assert BlockHasher(2)(kind([3, 4, 5, 6])) == BlockHasher(2)([3, 4, 5, 6])  # type: ignore[operator]


def test_salts_keep_apart() -> None:
    specs = [
        make_spec(),
        make_spec(layout="NHD"),
        make_spec(dtype="bfloat16"),
        make_spec(extra={}),
        make_spec(num_layers=4),
    ]
    salts = [spec_salt(spec) for spec in specs]
    salts += [
        cache_salt("m"),
        cache_salt("m", lora="a"),
        cache_salt("ma"),
        cache_salt("m", tp_rank=1),
        cache_salt("m", tp_size=2),
    ]
    hashes = {BlockHasher(1, salt)([0])[0] for salt in salts}
    hashes |= {BlockHasher(1, b"m")([0], request)[0] for request in (b"", b"a")}
    assert len(hashes) == len(salts) + 2


@pytest.mark.parametrize(
    ("tokens", "error"), [([1.5], TypeError), ([[1, 2]], ValueError), (["a"], TypeError), (5, ValueError)]
)
def test_what_is_not_tokens_is_refused(tokens: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="token_ids"):
        BlockHasher(1)(tokens)


def test_a_salt_is_bytes() -> None:
    with pytest.raises(TypeError, match="salt is str"):
        BlockHasher(1, "model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="request_salt is str"):
        BlockHasher(1)([1], "lora")  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [None, "text", b"text", (i for i in range(3))])
def test_what_is_no_sequence_is_named(tokens: object) -> None:
    with pytest.raises(TypeError, match=f"token_ids is {type(tokens).__name__}; a 1-D sequence of integers"):
        BlockHasher(1)(tokens)


def test_the_parts_of_a_salt_are_strings() -> None:
    with pytest.raises(TypeError, match="model is bytes"):
        cache_salt(b"model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lora is NoneType"):
        cache_salt("model", lora=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_that_grows_has_the_hashes_of_the_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens, hasher = random.integers(0, 1 << 17, 200), BlockHasher(7, b"s")
    cuts = np.sort(random.integers(0, 201, 12))
    prefix, fresh = hasher.prefix(b"r"), []
    for part in np.split(tokens, cuts):
        fresh += prefix.append(part)
    assert fresh == prefix.hashes == hasher(tokens, b"r")
    assert prefix.num_tokens == 200


def test_a_token_costs_no_block_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = BlockHasher(4).prefix()
    prefix.append(range(4 * 1000 + 3))
    digest, calls = hashing.digest_of, []
    monkeypatch.setattr(hashing, "digest_of", lambda content: calls.append(len(content)) or digest(content))
    prefix.append([5])
    assert calls == [32 + 4 * 8]


def test_what_is_refused_is_not_appended() -> None:
    prefix = BlockHasher(2).prefix()
    prefix.append([1])
    with pytest.raises(TypeError, match="token_ids"):
        prefix.append([2.5])
    prefix.append([2])
    assert (prefix.hashes, prefix.num_tokens) == (BlockHasher(2)([1, 2]), 2)


def test_the_manager_gives_the_hashes_of_a_prompt_that_grows() -> None:
    rig = Rig()
    with LayerwiseScheduler(rig.cache, rig.pool) as scheduler, KVOffloadManager(scheduler, salt=b"m") as manager:
        prefix = manager.prefix(request_salt=b"r")
        prefix.append(range(10))
        prefix.append(range(10, 30))
        assert prefix.hashes == manager.block_hashes(range(30), request_salt=b"r")
        assert prefix.hashes != manager.block_hashes(range(30))


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_a_token(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^block_size = {block_size} must be in \[1, 2\*\*63\)$"):
        BlockHasher(block_size)
