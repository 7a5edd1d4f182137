from __future__ import annotations

import copy
import dataclasses
import pickle

import numpy as np
import paddle
import pytest

from paddle_kv import KVCacheSpec
from paddle_kv.layout import differences

SIZES = {"num_layers": 3, "num_kv_heads": 5, "head_dim": 16, "block_size": 7, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("layout", "key", "value"),
    [
        ("HND", (5, 7, 16), (5, 7, 24)),
        ("NHD", (7, 5, 16), (7, 5, 24)),
        ("packed", (5, 2, 7, 8), (5, 24, 7)),
    ],
)
def test_block_shapes(layout, key, value):
    spec = KVCacheSpec(**SIZES, v_head_dim=24, layout=layout)
    assert spec.tensor_names == ("key", "value")
    assert (spec.block_shape("key"), spec.block_shape("value")) == (key, value)
    assert spec.tensor_block_bytes("key") == 5 * 7 * 16 * 2
    assert spec.tensor_block_bytes("value") == 5 * 7 * 24 * 2
    assert spec.block_bytes == 5 * 7 * 40 * 2


def test_values_are_as_wide_as_keys_unless_said_otherwise():
    assert KVCacheSpec(**SIZES).block_shape("value") == (5, 7, 16)


@pytest.mark.parametrize("layout", ["HND", "NHD", "packed"])
def test_latent_has_one_tensor_in_every_layout(layout):
    spec = KVCacheSpec(**{**SIZES, "num_kv_heads": 1, "head_dim": 27}, latent=True, layout=layout)
    assert spec.tensor_names == ("latent",)
    assert spec.block_shape("latent") == (7, 27)
    assert spec.block_bytes == 7 * 27 * 2


def test_extra_tensors_follow_in_their_order():
    spec = KVCacheSpec(**SIZES, extra={"zeta": ((5, 7), "float32"), "alpha": ((3,), "uint8")})
    assert spec.tensor_names == ("key", "value", "zeta", "alpha")
    sizes = [spec.tensor_block_bytes(name) for name in spec.tensor_names]
    assert sizes == [1120, 1120, 140, 3]
    assert [spec.tensor_offset_bytes(name) for name in spec.tensor_names] == [0, 1120, 2240, 2380]
    assert spec.block_bytes == 2383
    assert spec.tensor_dtype("zeta") == "float32"
    latent = KVCacheSpec(**SIZES, latent=True, extra={"scale": ((7,), "float32")})
    assert latent.tensor_names == ("latent", "scale")


@pytest.mark.parametrize(
    ("dtype", "item_bytes", "x", "numpy_dtype"),
    [
        ("bfloat16", 2, 8, "uint16"),
        ("float16", 2, 8, "float16"),
        ("float32", 4, 4, "float32"),
        ("float64", 8, 2, "float64"),
        ("int8", 1, 16, "int8"),
        ("uint8", 1, 16, "uint8"),
        ("int16", 2, 8, "int16"),
        ("int32", 4, 4, "int32"),
        ("int64", 8, 2, "int64"),
        ("bool", 1, 16, "bool"),
        ("float8_e4m3fn", 1, 16, "int8"),
        ("float8_e5m2", 1, 16, "int8"),
    ],
)
def test_every_dtype(dtype, item_bytes, x, numpy_dtype):
    spec = KVCacheSpec(**{**SIZES, "head_dim": 48, "dtype": dtype}, layout="packed")
    assert spec.block_bytes == 2 * 5 * 7 * 48 * item_bytes
    assert spec.block_shape("key") == (5, 48 // x, 7, x)
    assert spec.numpy_dtype("value") == numpy_dtype


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size", "v_head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", True])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=rf"{name} = {value!r} must be an integer of at least 1"):
        KVCacheSpec(**{**SIZES, name: value})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "half"}, ValueError, "dtype = 'half' must be one of bfloat16, float16"),
        ({"dtype": ["float16"]}, ValueError, r"dtype = \['float16'\] must be one of"),
        ({"layout": "HDN"}, ValueError, "layout = 'HDN' must be 'HND', 'NHD' or 'packed'"),
        (
            {"layout": "packed", "head_dim": 12},
            ValueError,
            "head_dim = 12 must be a multiple of 8 in the packed layout",
        ),
        ({"extra": {"key": ((1,), "int8")}}, ValueError, "extra names a tensor 'key'"),
        ({"extra": {"latent": ((1,), "int8")}}, ValueError, "extra names a tensor 'latent'"),
        ({"extra": {"scale": ((), "int8")}}, ValueError, r"extra\['scale'\] has block shape \(\)"),
        ({"extra": {"scale": ((3, 0), "int8")}}, ValueError, r"extra\['scale'\] has block shape \(3, 0\)"),
        ({"extra": {"scale": ((3, 1.5), "int8")}}, ValueError, r"extra\['scale'\] has block shape \(3, 1.5\)"),
        ({"extra": {"scale": ((3,), "float")}}, ValueError, r"dtype of extra\['scale'\] = 'float' must be one of"),
        ({"extra": {"scale": (3, "int8")}}, TypeError, r"extra\['scale'\] is \(3, 'int8'\)"),
        ({"extra": {"scale": ((3,),)}}, TypeError, r"extra\['scale'\] is \(\(3,\),\)"),
        ({"extra": {"scale": "float32"}}, TypeError, r"extra\['scale'\] is 'float32'"),
        ({"extra": [("scale", ((3,), "int8"))]}, TypeError, "extra is .* a mapping"),
    ],
)
def test_wrong_values_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        KVCacheSpec(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "ask", ["block_shape", "tensor_dtype", "tensor_block_bytes", "tensor_offset_bytes", "numpy_dtype"]
)
def test_unknown_tensor(ask):
    with pytest.raises(ValueError, match=r"name = 'scale' must be one of \('key', 'value'\)"):
        getattr(KVCacheSpec(**SIZES), ask)("scale")


def test_specs_are_values():
    extra = {"scale": ((5, 7), "float32")}
    spec = KVCacheSpec(**SIZES, extra=extra)
    assert spec == KVCacheSpec(**SIZES, extra={"scale": ([5, 7], "float32")})
    assert hash(spec) == hash(KVCacheSpec(**SIZES, extra=extra))
    assert spec != KVCacheSpec(**SIZES)
    assert spec != KVCacheSpec(**SIZES, extra={"scale": ((5, 7), "float16")})
    assert dataclasses.replace(spec, block_size=9).block_shape("scale") == (5, 7)
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert twin == spec
        assert twin.block_bytes == spec.block_bytes


def test_a_spec_cannot_be_changed():
    extra = {"scale": ((5, 7), "float32")}
    spec = KVCacheSpec(**SIZES, extra=extra)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_layers = 4
    with pytest.raises(TypeError):
        spec.extra["scale"] = ((1,), "int8")
    extra["scale"] = ((1,), "int8")
    assert spec.block_shape("scale") == (5, 7)


def test_a_dtype_may_be_that_of_a_tensor():
    tensor = paddle.zeros([1], dtype="bfloat16")
    spec = KVCacheSpec(**{**SIZES, "dtype": tensor.dtype}, extra={"scale": ((5, 7), paddle.float16)})
    assert spec == KVCacheSpec(**SIZES, extra={"scale": ((5, 7), "float16")})
    assert (spec.dtype, spec.tensor_dtype("scale")) == ("bfloat16", "float16")
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_integers_may_be_those_of_numpy():
    sizes = {name: np.int32(size) if isinstance(size, int) else size for name, size in SIZES.items()}
    spec = KVCacheSpec(**sizes, v_head_dim=np.int64(24), extra={"scale": (np.array([5, 7]).tolist(), "int8")})
    assert spec == KVCacheSpec(**SIZES, v_head_dim=24, extra={"scale": ((5, 7), "int8")})
    assert {type(getattr(spec, name)) for name in ("num_layers", "head_dim", "v_head_dim")} == {int}
    assert {type(size) for size in spec.block_shape("value")} == {int}
    with pytest.raises(ValueError, match="num_layers = True"):
        KVCacheSpec(**{**SIZES, "num_layers": True})


def test_a_head_size_of_values_that_is_said_twice() -> None:
    """Whoever says that values are as wide as keys means the same cache as who says nothing."""
    spec, said = KVCacheSpec(**SIZES), KVCacheSpec(**SIZES, v_head_dim=SIZES["head_dim"])
    assert spec == said
    assert len({spec, said, pickle.loads(pickle.dumps(said))}) == 1
    assert spec != KVCacheSpec(**SIZES, v_head_dim=SIZES["head_dim"] + 1)
    assert KVCacheSpec(**SIZES, latent=True) == KVCacheSpec(**SIZES, latent=True, v_head_dim=3)
    assert spec != "spec"
    wider = dataclasses.replace(spec, head_dim=48)
    assert wider.block_shape("value")[-1] == 48
    assert differences(wider, said) == ("head_dim = 48, v_head_dim = 48", "head_dim = 16, v_head_dim = 16")
    assert differences(dataclasses.replace(said, dtype="int8"), spec) == ("dtype = 'int8'", "dtype = 'bfloat16'")
