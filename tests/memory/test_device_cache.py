from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_kv import DeviceCache, devices
from paddle_kv.devices import has_gpu
from paddle_kv.memory import device_cache
from tests.schedule.rig import cache_memory, cpu_tensor, make_spec


def tensors(spec, num_blocks=6):
    return {
        name: [
            cpu_tensor(np.zeros((num_blocks, *spec.block_shape(name)), spec.numpy_dtype(name)))
            for _ in range(spec.num_layers)
        ]
        for name in spec.tensor_names
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "NHD"},
        {"layout": "packed", "head_dim": 16, "dtype": "float32"},
        {"latent": True},
        {"dtype": "bfloat16"},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "float8_e5m2"},
        {"dtype": "int8"},
    ],
)
def test_own_tensors(changes):
    spec = make_spec(**changes)
    cache = DeviceCache(spec, 4, "cpu")
    assert cache.device_id is None
    assert cache.num_blocks == 4
    addresses = set()
    for name in spec.tensor_names:
        for layer in range(spec.num_layers):
            tensor = cache.tensor(name, layer)
            assert list(tensor.shape) == [4, *spec.block_shape(name)]
            dtype = str(tensor.dtype).rsplit(".", 1)[-1]
            assert dtype == spec.tensor_dtype(name) or (dtype == "uint8" and not hasattr(paddle, spec.dtype))
            addresses.add(tensor.data_ptr())
    assert len(addresses) == spec.num_layers * len(spec.tensor_names)
    assert all((bits == 0).all() for bits in cache_memory(cache).values())


def test_adopted_tensors_are_the_users_own():
    spec = make_spec()
    given = tensors(spec)
    cache = DeviceCache.adopt(spec, given)
    assert cache.num_blocks == 6
    for name in spec.tensor_names:
        assert [cache.tensor(name, layer).data_ptr() for layer in range(5)] == [t.data_ptr() for t in given[name]]
        assert all(cache.tensor(name, layer) is given[name][layer] for layer in range(5))


@pytest.mark.parametrize("change", [tuple, lambda layers: layers])
def test_layers_may_be_a_list_or_a_tuple(change):
    spec = make_spec()
    DeviceCache.adopt(spec, {name: change(layers) for name, layers in tensors(spec).items()})


def transposed(given):
    """Fits in shape, but not contiguous (the key of layer 2)."""
    key = cpu_tensor(np.zeros((6, 7, 2, 3), np.float16)).transpose([0, 2, 1, 3])
    assert not key.is_contiguous()
    given["key"][2] = key


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("scale"), ValueError, r"tensors has the names \['flag', 'key', 'value'\]"),
        (lambda t: t.update(more=[]), ValueError, "tensors has the names"),
        (lambda t: t["key"].pop(), ValueError, r"tensors\['key'\] has 4 layers; 5 are expected"),
        (lambda t: t["key"].append(t["key"][0]), ValueError, r"tensors\['key'\] has 6 layers; 5 are expected"),
        (lambda t: t.update(key=[]), ValueError, r"tensors\['key'\] has 0 layers; 5 are expected"),
        (
            lambda t: t["key"].__setitem__(2, cpu_tensor(np.zeros((6, 2, 3, 7), np.float16))),
            ValueError,
            r"tensors\['key'\]\[2\] has shape \[6, 2, 3, 7\]; \[num_blocks, 2, 7, 3\] is expected",
        ),
        (
            lambda t: t["key"].__setitem__(2, cpu_tensor(np.zeros((5, 2, 7, 3), np.float16))),
            ValueError,
            r"tensors\['key'\]\[2\] has 5 blocks, the first tensor 6",
        ),
        (
            lambda t: t["scale"].__setitem__(2, cpu_tensor(np.zeros((7, *t["scale"][2].shape[1:]), np.float32))),
            ValueError,
            r"tensors\['scale'\]\[2\] has 7 blocks, the first tensor 6",
        ),
        (
            lambda t: t["key"].__setitem__(2, cpu_tensor(np.zeros((6, 2, 7, 3), np.int16))),
            ValueError,
            r"tensors\['key'\]\[2\] has dtype int16; float16 is expected",
        ),
        (transposed, ValueError, r"tensors\['key'\]\[2\] is not contiguous"),
        (lambda t: t["key"].__setitem__(2, np.zeros((6, 2, 7, 3))), TypeError, r"tensors\['key'\]\[2\] is ndarray"),
        (lambda t: t["key"].__setitem__(2, None), TypeError, r"tensors\['key'\]\[2\] is NoneType"),
        (
            lambda t: t.update(key=cpu_tensor(np.zeros((5, 6, 2, 7, 3), np.float16))),
            TypeError,
            r"tensors\['key'\] is .*Tensor; a list of paddle.Tensor is expected",
        ),
        (lambda t: t["key"].__setitem__(2, t["key"][1]), ValueError, "overlap; each name and layer needs memory"),
    ],
)
def test_adopt_refuses(change, error, message):
    spec = make_spec()
    given = tensors(spec)
    change(given)
    with pytest.raises(error, match=message):
        DeviceCache.adopt(spec, given)


def test_adopt_refuses_layers_that_overlap_in_part():
    spec = make_spec(num_layers=1, v_head_dim=None, extra={})
    whole = cpu_tensor(np.zeros((9, 2, 7, 3), np.float16))
    with pytest.raises(ValueError, match=r"overlap"):
        DeviceCache.adopt(spec, {"key": [whole[:6]], "value": [whole[3:]]})
    DeviceCache.adopt(spec, {"key": [whole[:4]], "value": [whole[5:]]})


def test_adopt_refuses_an_empty_cache():
    spec = make_spec(num_layers=1, latent=True, extra={})
    with pytest.raises(ValueError, match=r"holds no memory|has shape"):
        DeviceCache.adopt(spec, {"latent": [cpu_tensor(np.zeros((0, 7, 3), np.float16))]})


@pytest.mark.skipif(has_gpu(), reason="there is one")
@pytest.mark.parametrize("device", ["gpu", "gpu:", "gpu:0"])
def test_a_gpu_that_is_not_there(device):
    with pytest.raises(ValueError, match=f"device = '{device}', but Paddle sees no GPU here"):
        DeviceCache(make_spec(), 3, device)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, 3, "cpu"), TypeError, "spec is NoneType; a KVCacheSpec is expected"),
        ((make_spec(), 0, "cpu"), ValueError, "num_blocks = 0 must be an integer of at least 1"),
        ((make_spec(), True, "cpu"), ValueError, "num_blocks = True"),
        ((make_spec(), 2.0, "cpu"), ValueError, "num_blocks = 2.0"),
        ((make_spec(), 3, "xpu"), ValueError, "device = 'xpu' must be 'cpu', 'gpu' or 'gpu:N'"),
        ((make_spec(), 3, "cpu:1"), ValueError, "device = 'cpu:1' must be"),
        ((make_spec(), 3, "gpu:x"), ValueError, "device = 'gpu:x' must be 'cpu', 'gpu' or 'gpu:N'"),
        ((make_spec(), 3, "gpu:-1"), ValueError, "device = 'gpu:-1' must be 'cpu', 'gpu' or 'gpu:N'"),
        ((make_spec(), 3, 0), TypeError, "device is 0; 'cpu', 'gpu', 'gpu:N' or None is expected"),
        ((make_spec(), 3, "gpu:99"), ValueError, "device = 'gpu:99'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        DeviceCache(*arguments)


def test_the_gpu_that_reaches_memory_of_another_one(monkeypatch):
    spec = make_spec()
    cache = DeviceCache(spec, 3, "cpu", shared=True)
    elsewhere = dataclasses.replace(cache.export(), device="cuda:0123")
    with pytest.raises(TypeError, match=r"device is 0; 'gpu', 'gpu:N' or None is expected"):
        DeviceCache.attach(spec, elsewhere, 0)
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    with pytest.raises(ValueError, match="device = None, but Paddle sees no GPU here"):
        DeviceCache.attach(spec, elsewhere)


def test_a_tensor_lies_in_the_piece_that_begins_where_another_ends():
    spec = make_spec(extra={})
    own = spec.tensor_block_bytes("key")
    halves = np.zeros((2, own), np.uint8)
    pieces = [
        SimpleNamespace(address=half.ctypes.data, size_bytes=own, array=lambda half=half: half) for half in halves
    ]
    for piece in pieces:
        assert device_cache._over(pieces, piece.address, 1, spec, "key").data_ptr() == piece.address


def test_adopt_wants_a_spec_and_a_mapping():
    with pytest.raises(TypeError, match=r"spec is NoneType; a KVCacheSpec is expected"):
        DeviceCache.adopt(None, {})
    with pytest.raises(TypeError, match=r"tensors is list; a mapping"):
        DeviceCache.adopt(make_spec(), [])


@pytest.mark.parametrize(
    ("name", "layer", "error", "message"),
    [
        ("keys", 0, ValueError, "name = 'keys' must be one of"),
        ("key", 5, IndexError, r"layer = 5 must be in \[0, 5\)"),
        ("key", -1, IndexError, r"layer = -1 must be in \[0, 5\)"),
        ("key", 1.0, TypeError, "layer is 1.0"),
    ],
)
def test_unknown_tensor(name, layer, error, message):
    with pytest.raises(error, match=message):
        DeviceCache(make_spec(), 3, "cpu").tensor(name, layer)


def test_mark_rewritten_checks_its_ids():
    cache = DeviceCache(make_spec(), 3, "cpu")
    with pytest.raises(IndexError, match=r"block_ids\[1\] = 3 must be in \[0, 3\)"):
        cache.mark_rewritten([0, 3])
    cache.mark_rewritten(range(3))


def test_caches_on_the_same_tensors_are_one_memory():
    spec = make_spec()
    given = tensors(spec)
    first, second = DeviceCache.adopt(spec, given), DeviceCache.adopt(spec, given)
    other = DeviceCache.adopt(spec, tensors(spec))
    assert first.domain is second.domain
    assert first.domain is not other.domain


def test_caches_on_some_of_the_same_tensors_are_refused():
    """Layer 0 of one would be layer 2 of the other: their transfers could not be ordered layer by layer."""
    spec = make_spec()
    given = tensors(spec)
    first = DeviceCache.adopt(spec, given)
    part = {name: layers[2:] for name, layers in given.items()}
    with pytest.raises(ValueError, match=r"overlaps that of another pool.*give both pools the same tensors"):
        DeviceCache.adopt(make_spec(num_layers=3), part)
    with pytest.raises(ValueError, match=r"overlaps that of another pool"):
        DeviceCache.adopt(spec, {name: [t[1:] for t in layers] for name, layers in given.items()})
    del first
    gc.collect()
    DeviceCache.adopt(make_spec(num_layers=3), part)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_idle_cache_cannot_be_sent_or_copied(copied) -> None:
    """Nothing has been moved, and so nothing in it stands in the way of that. Of a copy the tracking would not know."""
    with pytest.raises(TypeError, match="a DeviceCache cannot be pickled or copied; send its spec"):
        copied(DeviceCache(make_spec(), 3, "cpu"))


@pytest.mark.parametrize(("number", "device_id"), [(-1, None), (0, 0), (3, 3)])
def test_the_gpu_of_a_cache_is_that_of_its_tensors(monkeypatch, number, device_id):
    spec = make_spec()
    given = tensors(spec)
    monkeypatch.setattr(devices, "device_of", lambda tensor: number)
    assert DeviceCache.adopt(spec, given).device_id == device_id


@pytest.mark.parametrize(
    ("other", "message"), [(2, "all must be on one device"), (devices.PINNED, "a tensor on a GPU or on the CPU is exp")]
)
def test_adopt_refuses_tensors_elsewhere(monkeypatch, other, message):
    spec = make_spec()
    given = tensors(spec)
    last = given[spec.tensor_names[-1]][-1] if other == 2 else None
    monkeypatch.setattr(devices, "device_of", lambda tensor: other if last is None or tensor is last else 1)
    with pytest.raises(ValueError, match=message):
        DeviceCache.adopt(spec, given)


@pytest.mark.parametrize(("dtype", "fits"), [("float8_e4m3fn", True), ("float8_e5m2", True), ("float16", False)])
def test_bytes_stand_for_floats_of_eight_bits_alone(dtype, fits):
    spec = make_spec(dtype=dtype, extra={})
    given = {
        name: [cpu_tensor(np.zeros((6, *spec.block_shape(name)), np.uint8)) for _ in range(spec.num_layers)]
        for name in spec.tensor_names
    }
    if fits:
        assert DeviceCache.adopt(spec, given).num_blocks == 6
    else:
        with pytest.raises(ValueError, match="has dtype uint8; float16 is expected"):
            DeviceCache.adopt(spec, given)


@pytest.mark.parametrize(
    ("device", "current", "number"),
    [(None, "gpu:1", 1), ("gpu", "gpu:1", 1), ("gpu", "cpu", 0), ("gpu:0", "gpu:1", 0), ("gpu:1", "gpu:0", 1)],
)
def test_which_gpu_a_cache_is_made_on(monkeypatch, device, current, number):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    monkeypatch.setattr(devices, "place_of", lambda number: ("the place of", number))
    monkeypatch.setattr(paddle.device, "get_device", lambda: current)
    assert device_cache._place(device) == ("the place of", number)
    with pytest.raises(ValueError, match="device = 'gpu:2' must name one of the 2 GPUs"):
        device_cache._place("gpu:2")
