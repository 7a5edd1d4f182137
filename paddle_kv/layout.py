"""Shapes, strides and byte counts of a KV cache: the only place that knows them.

Layouts of one layer, with nb blocks, nh KV heads, bs tokens per block, hd head size (hv for values):

========  ==========================================  =====================
layout    key                                         value
========  ==========================================  =====================
HND       [nb, nh, bs, hd]                            [nb, nh, bs, hv]
NHD       [nb, bs, nh, hd]                            [nb, bs, nh, hv]
packed    [nb, nh, hd/x, bs, x], x = 16/element size  [nb, nh, hv, bs]
latent    [nb, bs, hd] (one tensor, as MLA keeps it)  none
========  ==========================================  =====================

HND is what ``paddle.incubate.nn.functional.block_multihead_attention`` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal

Layout = Literal["HND", "NHD", "packed"]
CacheDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2", "int8", "paddle_uint8", "fp8_ds_mla"]
ScaleLayout = Literal["HND", "NHD"]

# Bytes of one element, and the NumPy type as which paddle.Tensor.numpy() shows it.
_DTYPES = {
    "bfloat16": (2, "uint16"),
    "float16": (2, "float16"),
    "float32": (4, "float32"),
    "float64": (8, "float64"),
    "int8": (1, "int8"),
    "uint8": (1, "uint8"),
    "int16": (2, "int16"),
    "int32": (4, "int32"),
    "int64": (8, "int64"),
    "bool": (1, "bool"),
    "float8_e4m3fn": (1, "int8"),
    "float8_e5m2": (1, "int8"),
}
PACKED_BYTES = 16  # the innermost dimension of packed keys


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer's cache looks like, and how many layers there are.

    Args:
        num_layers: layers of the model.
        num_kv_heads: KV heads held by this rank (1 for a latent cache, whose shape has no heads).
        head_dim: head size of keys; for a latent cache the width of the one tensor (rank + rope).
        block_size: tokens per block.
        dtype: element type, as Paddle names it (``"bfloat16"``), or Paddle's dtype object (``key_cache.dtype``).
        v_head_dim: head size of values where it differs; a latent cache has none.
        layout: ``"HND"`` (as ``block_multihead_attention`` keeps it), ``"NHD"`` or ``"packed"``; the shape of one block
            is then (heads, tokens, head size), (tokens, heads, head size), or for packed keys (heads, head size / x,
            tokens, x) with x = 16 bytes of elements and for packed values (heads, head size, tokens). A latent block
            is (tokens, width).
        latent: one tensor per layer instead of keys and values (MLA).
        extra: further tensors that belong to each block, name -> (shape of one block, dtype), e.g. scales.

    Raises:
        TypeError: ``extra`` has another form.
        ValueError: a size below 1, an unknown dtype or layout, a packed head size that x does not divide.

    Example:
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16",
        ...                    extra={"scale": ((8, 16), "float32")})
        >>> spec.tensor_names, spec.block_bytes
        (('key', 'value', 'scale'), 66048)
        >>> spec.block_shape("key"), spec.tensor_dtype("scale"), spec.numpy_dtype("key")
        ((8, 16, 128), 'float32', 'uint16')
        >>> spec.tensor_block_bytes("value"), spec.tensor_offset_bytes("scale")
        (32768, 65536)
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    v_head_dim: int | None = None
    layout: Layout = "HND"
    latent: bool = False
    extra: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "v_head_dim"):
            value = getattr(self, name)
            if name == "v_head_dim" and value is None:
                continue
            object.__setattr__(self, name, check_positive(value, name))
        if self.layout not in ("HND", "NHD", "packed"):
            raise ValueError(f"layout = {self.layout!r} must be 'HND', 'NHD' or 'packed'")
        object.__setattr__(self, "dtype", _dtype(self.dtype, "dtype"))
        if self.layout == "packed" and not self.latent and self.head_dim % self._packed_x:
            raise ValueError(f"head_dim = {self.head_dim} must be a multiple of {self._packed_x} in the packed layout")
        if not isinstance(self.extra, Mapping):
            raise TypeError(f"extra is {self.extra!r}; a mapping name -> (shape of one block, dtype) is expected")
        copied = {}
        for name, entry in self.extra.items():
            if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not isinstance(entry[0], (tuple, list)):
                raise TypeError(f"extra[{name!r}] is {entry!r}; (shape of one block, dtype) is expected")
            shape, dtype = entry
            if name in ("key", "value", "latent"):
                raise ValueError(f"extra names a tensor {name!r}, which the cache itself has")
            if not shape or any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in shape):
                raise ValueError(f"extra[{name!r}] has block shape {shape!r}; integers of at least 1 are expected")
            copied[name] = (tuple(map(int, shape)), _dtype(dtype, f"dtype of extra[{name!r}]"))
        object.__setattr__(self, "extra", MappingProxyType(copied))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled, and a server sends its spec to its workers.
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return _rebuild, ({**values, "extra": dict(self.extra)},)

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, KVCacheSpec) else NotImplemented

    def _compared(self) -> dict[str, Any]:
        """What says how the cache lies in memory: the head size of values by its number, and none in a latent cache."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "v_head_dim": None if self.latent else self.v_head_dim or self.head_dim}

    def __hash__(self) -> int:
        return hash((self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype, self.layout))

    @property
    def _packed_x(self) -> int:
        return PACKED_BYTES // _DTYPES[self.dtype][0]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """``("key", "value", *extra)`` or ``("latent", *extra)``."""
        return (("latent",) if self.latent else ("key", "value")) + tuple(self.extra)

    def tensor_dtype(self, name: str) -> str:
        """Element type of a tensor.

        Raises:
            ValueError: ``name`` is not of :attr:`tensor_names`.
        """
        self._known(name)
        return self.extra[name][1] if name in self.extra else self.dtype

    def block_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one block of a tensor.

        Raises:
            ValueError: ``name`` is not of :attr:`tensor_names`.
        """
        self._known(name)
        if name in self.extra:
            return self.extra[name][0]
        heads, tokens = self.num_kv_heads, self.block_size
        width = self.v_head_dim or self.head_dim if name == "value" else self.head_dim
        if name == "latent":
            return (tokens, width)
        if self.layout == "HND":
            return (heads, tokens, width)
        if self.layout == "NHD":
            return (tokens, heads, width)
        if name == "key":
            return (heads, width // self._packed_x, tokens, self._packed_x)
        return (heads, width, tokens)

    def tensor_block_bytes(self, name: str) -> int:
        """Bytes of one block of one tensor of one layer.

        Raises:
            ValueError: ``name`` is not of :attr:`tensor_names`.
        """
        return math.prod(self.block_shape(name)) * _DTYPES[self.tensor_dtype(name)][0]

    def tensor_offset_bytes(self, name: str) -> int:
        """Bytes from the start of a block of one layer to the tensor, all tensors adjacent.

        Raises:
            ValueError: ``name`` is not of :attr:`tensor_names`.
        """
        self._known(name)
        names = self.tensor_names
        return sum(self.tensor_block_bytes(before) for before in names[: names.index(name)])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, all tensors."""
        return sum(self.tensor_block_bytes(name) for name in self.tensor_names)

    def head_axis(self, name: str) -> int:
        """Which dimension of a block counts the heads: the first one; in NHD the second one, behind the tokens.

        Tensors of ``extra`` are taken to lie as keys do.

        Raises:
            ValueError: ``name`` is not of :attr:`tensor_names`; a latent cache, which has no heads; a tensor of
                ``extra`` with another size than ``num_kv_heads`` in that dimension.
        """
        shape = self.block_shape(name)
        axis = 1 if self.layout == "NHD" else 0
        if self.latent:
            raise ValueError("a latent cache has no heads; each rank holds all of it")
        if len(shape) <= axis or shape[axis] != self.num_kv_heads:
            raise ValueError(
                f"extra[{name!r}] has block shape {shape}; num_kv_heads = {self.num_kv_heads} is expected in dimension "
                f"{axis}, where keys have it"
            )
        return axis

    def head_pieces(self, name: str) -> int:
        """In how many pieces a few neighbouring heads lie in a block: one, in NHD one for each token. Raises as
        :meth:`head_axis`."""
        return math.prod(self.block_shape(name)[: self.head_axis(name)])

    def with_heads(self, num_kv_heads: int) -> KVCacheSpec:
        """The same model with so many heads in this cache: that of a rank of another tensor-parallel size.

        Raises:
            ValueError: fewer than one head, or as :meth:`head_axis`.

        Example:
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16",
            ...                    extra={"scale": ((8, 16), "float32")})
            >>> half = spec.with_heads(4)
            >>> half.num_kv_heads, half.block_shape("scale"), half.block_bytes * 2 == spec.block_bytes
            (4, (4, 16), True)
        """
        num_kv_heads = check_positive(num_kv_heads, "num_kv_heads")
        for name in self.tensor_names:
            self.head_axis(name)
        extra = {}
        for name, (shape, dtype) in self.extra.items():
            axis = self.head_axis(name)
            extra[name] = ((*shape[:axis], num_kv_heads, *shape[axis + 1 :]), dtype)
        return replace(self, num_kv_heads=num_kv_heads, extra=extra)

    def numpy_dtype(self, name: str) -> str:
        """The NumPy type in which ``paddle.Tensor.numpy()`` shows the tensor (bfloat16 as uint16, fp8 as int8).

        Raises:
            ValueError: ``name`` is not of :attr:`tensor_names`.
        """
        return _DTYPES[self.tensor_dtype(name)][1]

    def _known(self, name: str) -> None:
        if name not in self.tensor_names:
            raise ValueError(f"name = {name!r} must be one of {self.tensor_names}")


def check_spec(spec: Any) -> None:
    """TypeError unless it is a spec."""
    if not isinstance(spec, KVCacheSpec):
        raise TypeError(f"spec is {type(spec).__name__}; a KVCacheSpec is expected")


def differences(spec: KVCacheSpec, other: KVCacheSpec) -> tuple[str, str]:
    """What two specs do not have in common, each as ``num_layers = 3, dtype = 'int8'``."""
    ours, theirs = spec._compared(), other._compared()
    names = [name for name in ours if ours[name] != theirs[name]]

    def text(one: dict[str, Any]) -> str:
        values = {name: one[name] for name in names}
        return ", ".join(f"{name} = {dict(v) if isinstance(v, Mapping) else v!r}" for name, v in values.items())

    return text(ours), text(theirs)


def _rebuild(values: dict[str, Any]) -> KVCacheSpec:
    return KVCacheSpec(**values)


def _dtype(dtype: object, name: str) -> str:
    """The name of a dtype that is given by it or as Paddle's object, whose text is ``paddle.float16``."""
    found = str(dtype).removeprefix("paddle.")
    if found not in _DTYPES:
        raise ValueError(f"{name} = {dtype!r} must be one of {', '.join(_DTYPES)}")
    return found


def check_positive(value: object, name: str) -> int:
    """The value as an int; ValueError unless it is an integer (NumPy's too) of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} = {value!r} must be an integer of at least 1")
    return int(value)
