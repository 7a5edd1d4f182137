"""Whatever happens to an object's file, its bytes are not served. PADDLE_KV_STRESS=10000 damages so many."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paddle_kv import KVCacheSpec
from paddle_kv.testing.tiers.rig import ALIGNED, ODD, Rig, keys
from paddle_kv.tiers import Outcome
from tests.tiers.conftest import MakeRig, objects

BATCH = 36
NUM_DAMAGED = int(os.environ.get("PADDLE_KV_STRESS", "0")) or 4 * BATCH
Damage = Callable[[Path, Path, np.random.Generator], object]


def flip(low: float, high: float) -> Damage:
    """One bit of a byte that lies within these parts of the file."""

    def damage(path: Path, other: Path, rng: np.random.Generator) -> None:
        content = bytearray(path.read_bytes())
        content[int(rng.integers(int(low * len(content)), int(high * len(content))))] ^= 1 << int(rng.integers(8))
        path.write_bytes(content)

    return damage


def truncate(path: Path, other: Path, rng: np.random.Generator) -> None:
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def extend(path: Path, other: Path, rng: np.random.Generator) -> None:
    os.truncate(path, path.stat().st_size + int(rng.choice([1, 4096, 10000])))


def swap(path: Path, other: Path, rng: np.random.Generator) -> None:
    path.write_bytes(other.read_bytes())


def swap_payload(path: Path, other: Path, rng: np.random.Generator) -> None:
    path.write_bytes(path.read_bytes()[:4096] + other.read_bytes()[4096:])


def swap_layers(path: Path, other: Path, rng: np.random.Generator) -> None:
    content, layer = path.read_bytes(), (path.stat().st_size - 4096) // 6
    first, second = content[4096 : 4096 + layer], content[4096 + layer : 4096 + 2 * layer]
    path.write_bytes(content[:4096] + second + first + content[4096 + 2 * layer :])


def empty(path: Path, other: Path, rng: np.random.Generator) -> None:
    os.truncate(path, 0)


def holes(path: Path, other: Path, rng: np.random.Generator) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def half_a_hole(path: Path, other: Path, rng: np.random.Generator) -> None:
    """As a write that lost its second half in a crash."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


KINDS = [
    flip(0, 200 / 53248),
    flip(184 / 53248, 0.07),
    flip(0.08, 1),
    truncate,
    extend,
    swap,
    swap_payload,
    empty,
    holes,
    half_a_hole,
]


def damage_all(rig: Rig, folder: Path, names: list[bytes], rng: np.random.Generator) -> None:
    """The file of each, by one of the kinds in turn, beside a few that stay as they are."""
    paths = {path.name: path for path in objects(folder)}
    mine = [paths[rig.tier.format.name_of(name).hex()] for name in names]
    healthy = mine.pop()
    for number, path in enumerate(mine):
        KINDS[number % len(KINDS)](path, healthy, rng)


@pytest.mark.parametrize("spec", [ALIGNED, ODD])
@pytest.mark.parametrize("layerwise", [True, False])
def test_all_damage_is_found(make_rig: MakeRig, tmp_path: Path, spec: KVCacheSpec, layerwise: bool) -> None:
    rig, rng = make_rig(spec), np.random.default_rng(int(layerwise))
    served, found = [], 0
    for batch in range(NUM_DAMAGED // (4 * BATCH)):
        names = keys(BATCH + 1, f"batch{batch}")
        assert rig.store(names).done
        damage_all(rig, tmp_path, names, rng)
        job = rig.load(names, layerwise=layerwise)
        served += [name for name, outcome in zip(names[:-1], job.outcomes, strict=False) if outcome is Outcome.DONE]
        found += sum(outcome in (Outcome.DAMAGED, Outcome.MISSING) for outcome in job.outcomes)
        assert job.outcomes[-1] is Outcome.DONE
        assert rig.wrong(job) == []
        # It is not found again, and comes anew with the next store.
        assert rig.tier.exists(names) == [False] * BATCH + [True]
        assert rig.store(names).done
        assert rig.load(names).done
        rig.tier.delete(names)
    assert served == []
    assert found == NUM_DAMAGED // (4 * BATCH) * BATCH


def test_layers_in_another_order(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.store(keys(1))
    swap_layers(objects(tmp_path)[0], Path(), np.random.default_rng(0))
    job = rig.load(keys(1))
    assert job.outcomes == [Outcome.DAMAGED]
    assert rig.tier.stats()["load_damaged"] == 1


def test_an_object_under_the_name_of_another_spec(make_rig: MakeRig, tmp_path: Path) -> None:
    """As after a collision of names, which the header decides."""
    other = KVCacheSpec(num_layers=6, num_kv_heads=2, head_dim=64, block_size=16, dtype="float16")
    rig = make_rig(other)
    rig.store(keys(1))
    [path] = objects(tmp_path)
    rig = make_rig()
    name = rig.tier.format.name_of(b"key-0")
    path.rename(path.with_name(name.hex()))
    rig = make_rig()
    assert rig.tier.exists(keys(1)) == [True]
    assert rig.load(keys(1)).outcomes == [Outcome.MISSING]
    assert rig.tier.exists(keys(1)) == [False]
    assert rig.tier.stats()["load_damaged"] == 0
