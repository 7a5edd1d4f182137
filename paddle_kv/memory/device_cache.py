"""The paged cache on the device, one tensor per name and layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import paddle

from .. import devices
from ..checks import check_ids
from ..errors import AttachError
from ..layout import KVCacheSpec, check_positive, check_spec
from ..ops import _arguments as arguments
from ..ops._arguments import Tensor
from ..tracking.group import change
from ..tracking.memories import Extent, attach
from .exported import Exported, describe, refuse_overlap, resolve
from .host_memory import HostMemory, allocate
from .shared_memory import SharedMemory

_ALIGNMENT = 256  # bytes; of each tensor, as Paddle's allocator gives it


class DeviceCache:
    """Cache tensors of all layers, allocated here (zeroed) or adopted from the user.

    Args:
        spec: shapes and dtypes.
        num_blocks: blocks per tensor.
        device: a Paddle device ("gpu:0", "cpu", also a plugin's "cuda_like:0"); None is the current GPU, or the CPU
            where there is none.
        shared: in memory that other processes can :meth:`attach`; on the CPU only.

    Raises:
        MemoryError: the device has not so much memory.
        NotImplementedError: shared memory on a GPU.
        TypeError: not a spec, or a device that is not a string.
        ValueError: fewer than one block, or a device that is not here.

    Attributes:
        spec: the spec.
        num_blocks: blocks per tensor.
        device_id: CUDA ordinal, None on the CPU.

    Example:
        >>> from paddle_kv import DeviceCache, KVCacheSpec
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> DeviceCache(spec, 5, "cpu").tensor("key", 1).shape == [5, 1, 3, 4]
        True
    """

    _memory: Sequence[SharedMemory] = ()  # of a cache that is shared

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: str | None = None, *, shared: bool = False) -> None:
        check_spec(spec)
        num_blocks = check_positive(num_blocks, "num_blocks")
        place = _place(device)
        if not shared:
            tensors = {
                name: [
                    _zeros((num_blocks, *spec.block_shape(name)), spec.tensor_dtype(name), place)
                    for _ in range(spec.num_layers)
                ]
                for name in spec.tensor_names
            }
            self._take(spec, tensors)
            return
        if not isinstance(place, paddle.CPUPlace):  # 2.6 has no is_cpu_place() of it
            raise NotImplementedError(
                f"shared = True, but memory on {place} cannot be shared; device='cpu' is expected"
            )
        firsts, size_bytes = {}, 0
        for name in spec.tensor_names:
            tensor_bytes = num_blocks * spec.tensor_block_bytes(name)
            step = -(-tensor_bytes // _ALIGNMENT) * _ALIGNMENT
            firsts[name] = [size_bytes + layer * step for layer in range(spec.num_layers)]
            size_bytes += spec.num_layers * step
        [memory] = allocate([size_bytes], pinned=False, make=SharedMemory)
        pointers = {name: [memory.address + first for first in layers] for name, layers in firsts.items()}
        self._take_shared(spec, num_blocks, [memory], pointers)

    @classmethod
    def adopt(
        cls, spec: KVCacheSpec, tensors: Mapping[str, Sequence[Tensor]], *, num_blocks: int | None = None
    ) -> DeviceCache:
        """A cache over the user's own tensors: name -> one tensor per layer. They are used in place and kept alive.

        Args:
            spec: what the tensors are: each ``[num_blocks, *spec.block_shape(name)]`` of ``spec.tensor_dtype(name)``
                (8-bit floats may be uint8), as many blocks in all of them.
            tensors: ``{"key": [one per layer], "value": [...]}``, or ``"latent"``, and what ``extra`` names.
            num_blocks: only the first so many blocks of each tensor, of which some may have more (the layers of a draft
                model). None: all, and all tensors have as many.

        Raises:
            TypeError: not Paddle tensors, or no mapping of lists of them.
            ValueError: names, number, shapes, dtypes or devices do not fit the spec, a tensor is not contiguous, or two
                of them overlap.

        Example:
            >>> import paddle
            >>> from paddle_kv import DeviceCache, KVCacheSpec
            >>> keys, values = ([paddle.zeros([5, 1, 3, 4]) for _ in range(2)] for _ in range(2))
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype=keys[0].dtype)
            >>> cache = DeviceCache.adopt(spec, {"key": keys, "value": values})
            >>> cache.num_blocks, cache.tensor("value", 1) is values[1]
            (5, True)
        """
        made = cls.__new__(cls)
        made._take(spec, tensors, None if num_blocks is None else check_positive(num_blocks, "num_blocks"))
        return made

    @classmethod
    def attach(cls, spec: KVCacheSpec, exported: Exported) -> DeviceCache:
        """A cache over the memory of a cache of another process, which has called :meth:`export`.

        Uses of a block are tracked in each process for itself, so the processes have to agree who touches which block
        when (docs/peers.md). The memory lives until the last of them has given it back: this one with the last
        reference to the cache and its tensors.

        Args:
            spec: which is expected.
            exported: what :meth:`export` returned in the other process.

        Raises:
            AttachError: the cache is on another host or in another container, has another spec, its process is gone or
                has given it back, or this process may not open its memory.
            TypeError: not a spec, or not a description.

        Example:
            >>> from paddle_kv import DeviceCache, KVCacheSpec
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> cache = DeviceCache(spec, 5, "cpu", shared=True)
            >>> same = DeviceCache.attach(spec, cache.export())  # in another process
            >>> cache.tensor("key", 1)[2] = 1.5
            >>> same.tensor("key", 1)[2].numpy().max()
            np.float32(1.5)
        """
        memory, pointers = resolve(exported, "device_cache", spec, pinned=False)
        for name, stride in exported.strides_bytes.items():
            if stride != spec.tensor_block_bytes(name):
                raise AttachError(f"strides_bytes[{name!r}] = {stride}; blocks of a device cache are dense")
        made = cls.__new__(cls)
        with refuse_overlap():
            made._take_shared(spec, exported.num_blocks, memory, pointers)
        return made

    def export(self) -> Exported:
        """What another process of the same user on this host needs to :meth:`attach` the cache. It can be pickled.

        It holds nothing: the cache and this process have to be there when it is used.

        Raises:
            ValueError: the cache was made without ``shared=True``.
        """
        if not self._memory:
            raise ValueError("the device cache is not in shared memory; make it with shared=True")
        spec = self.spec
        pointers = {name: [tensor.data_ptr() for tensor in self._tensors[name]] for name in spec.tensor_names}
        strides = {name: spec.tensor_block_bytes(name) for name in spec.tensor_names}
        return describe("device_cache", spec, self.num_blocks, self._memory, pointers, strides)

    def _take_shared(
        self, spec: KVCacheSpec, num_blocks: int, memory: Sequence[HostMemory], pointers: Mapping[str, Sequence[int]]
    ) -> None:
        tensors = {
            name: [_over(memory, address, num_blocks, spec, name) for address in pointers[name]]
            for name in spec.tensor_names
        }
        self._take(spec, tensors)
        self._memory = [piece for piece in memory if isinstance(piece, SharedMemory)]

    def _take(self, spec: KVCacheSpec, tensors: Mapping[str, Sequence[Tensor]], num_blocks: int | None = None) -> None:
        check_spec(spec)
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors is {type(tensors).__name__}; a mapping name -> one tensor per layer is expected")
        if set(tensors) != set(spec.tensor_names):
            raise ValueError(f"tensors has the names {sorted(tensors)}; {sorted(spec.tensor_names)} are expected")
        first = None
        for name in spec.tensor_names:
            layers = arguments.caches(tensors[name], f"tensors[{name!r}]")
            if len(layers) != spec.num_layers:
                raise ValueError(f"tensors[{name!r}] has {len(layers)} layers; {spec.num_layers} are expected")
            for layer, tensor in enumerate(layers):
                label = f"tensors[{name!r}][{layer}]"
                first = tensor if first is None else first
                _check_tensor(spec, name, tensor, first, label, num_blocks)
        assert first is not None
        self.spec = spec
        self.num_blocks = int(first.shape[0]) if num_blocks is None else num_blocks
        self.device_id = _device_id(first)
        self._tensors = {name: tuple(tensors[name]) for name in spec.tensor_names}
        extents = []
        for name in spec.tensor_names:
            stride_bytes = spec.tensor_block_bytes(name)
            for layer, tensor in enumerate(self._tensors[name]):
                start = tensor.data_ptr()
                extents.append(Extent(start, start + self.num_blocks * stride_bytes, stride_bytes, layer))
        self.domain, _ = attach(self, extents)

    def __reduce__(self) -> NoReturn:
        # A copy would have tensors of its own, of which the tracking of blocks knows nothing.
        raise TypeError("a DeviceCache cannot be pickled or copied; send its spec, and make or adopt one there")

    def tensor(self, name: str, layer: int) -> Tensor:
        """The tensor of a layer, ``[num_blocks, *spec.block_shape(name)]``.

        Raises:
            ValueError: ``name`` is not of ``spec.tensor_names``.
            IndexError: no such layer.
        """
        if name not in self._tensors:
            raise ValueError(f"name = {name!r} must be one of {self.spec.tensor_names}")
        layer = arguments.integer(layer, "layer")
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"layer = {layer} must be in [0, {self.spec.num_layers})")
        return self._tensors[name][layer]

    def mark_rewritten(self, block_ids: Any) -> None:
        """Compute has rewritten these blocks: they may be read again although an onload into them failed.

        Call it when the work that writes them has been submitted, or right before: what is saved from then on is
        ordered behind it. Until then an offload of such a block raises :class:`TransferError`, also if the block was
        given to another request meanwhile: the cache does not see to whom a block belongs, nor what the model writes.
        So call it for the blocks of a load that has failed or was cancelled, before they are saved, whoever computes
        them. A load into the block that ends well does the same. Not while the failed load may still move.

        Args:
            block_ids: device blocks, also such as were never unusable.

        Raises:
            IndexError: an id is outside the cache.

        Example:
            >>> from paddle_kv import DeviceCache, HostPool, KVCacheSpec, LayerwiseScheduler, TransferError
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> cache = DeviceCache(spec, 5, "cpu")
            >>> with LayerwiseScheduler(cache, HostPool(spec, 8)) as scheduler:
            ...     hold = scheduler.offload([4], [0], layerwise=True)  # nothing is marked: block 4 waits for it
            ...     load = scheduler.onload([1], [4])
            ...     load.cancel(); hold.cancel()
            ...     try:
            ...         scheduler.offload([4], [2])
            ...     except TransferError as error:
            ...         print(str(error).partition(" (")[0])
            ...     cache.mark_rewritten([4])  # the model computes it again
            ...     scheduler.offload([4], [2]).wait()
            block 4 of the device cache holds no usable data
        """
        ids = arguments.block_ids(block_ids, "block_ids")
        check_ids(ids, "block_ids", self.num_blocks)
        change(self.domain, functools.partial(self.domain.mark_rewritten, ids))


def _device_id(tensor: Tensor) -> int | None:
    # Places of Paddle 2.6 do not compare equal to each other, so their numbers are compared.
    device = devices.device_of(tensor)
    return device if device >= 0 else None


def _check_tensor(
    spec: KVCacheSpec, name: str, tensor: Tensor, first: Tensor, label: str, num_blocks: int | None
) -> None:
    shape, expected = list(tensor.shape), list(spec.block_shape(name))
    if shape[1:] != expected or not shape[0]:
        raise ValueError(f"{label} has shape {shape}; [num_blocks, {', '.join(map(str, expected))}] is expected")
    if num_blocks is not None and shape[0] < num_blocks:
        raise ValueError(f"{label} has {shape[0]} blocks; num_blocks = {num_blocks} are expected at least")
    if num_blocks is None and shape[0] != first.shape[0]:
        raise ValueError(f"{label} has {shape[0]} blocks, the first tensor {first.shape[0]}; all must have as many")
    if _device_id(tensor) != _device_id(first):
        raise ValueError(f"{label} is on {tensor.place}, the first tensor on {first.place}; all must be on one device")
    if devices.device_of(tensor) == devices.PINNED:
        raise ValueError(f"{label} is on {tensor.place}; a tensor on a GPU or on the CPU is expected")
    dtype = str(tensor.dtype).rsplit(".", 1)[-1]
    allowed = {spec.tensor_dtype(name)} | ({"uint8"} if spec.tensor_dtype(name).startswith("float8") else set())
    if dtype not in allowed:
        raise ValueError(f"{label} has dtype {dtype}; {spec.tensor_dtype(name)} is expected")


def _place(device: str | None) -> Any:
    if device is None:
        device = "gpu" if devices.has_gpu() else "cpu"
    if not isinstance(device, str):
        raise TypeError(f"device is {device!r}; 'cpu', 'gpu', 'gpu:N' or None is expected")
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return paddle.CPUPlace()
    if kind not in ("gpu", devices.plugin()) or (index and not index.isdigit()):
        raise ValueError(f"device = {device!r} must be 'cpu', 'gpu' or 'gpu:N'")
    count = devices.gpu_count()
    if not count:
        raise ValueError(f"device = {device!r}, but Paddle sees no GPU here")
    number = int(index) if index else int(paddle.device.get_device().partition(":")[2] or 0)
    if number >= count:
        raise ValueError(f"device = {device!r} must name one of the {count} GPUs")
    return devices.place_of(number)


def _over(memory: Sequence[HostMemory], address: int, num_blocks: int, spec: KVCacheSpec, name: str) -> Tensor:
    """A tensor in a piece of memory, which it keeps."""
    [piece] = [one for one in memory if one.address <= address < one.address + one.size_bytes]
    first = address - piece.address
    rows = piece.array()[first : first + num_blocks * spec.tensor_block_bytes(name)]
    shape, dtype = (num_blocks, *spec.block_shape(name)), _paddle_dtype(spec.tensor_dtype(name))
    array = rows.view(_numpy_dtype(dtype)).reshape(shape)
    # Not by DLPack: Paddle has one deleter for an address there, and memory that is attached twice would never be given
    # back.
    tensor = paddle.Tensor(value=array, place=paddle.CPUPlace(), zero_copy=True)
    return tensor if _numpy_dtype(dtype) == dtype else tensor.view(dtype)  # type: ignore[no-any-return]


def _paddle_dtype(dtype: str) -> str:
    # The newest Paddle for CUDA 11 has no fp8 type: the same bits are kept as uint8.
    return "uint8" if dtype.startswith("float8") and not hasattr(paddle, dtype) else dtype


def _numpy_dtype(dtype: str) -> str:
    """Of elements as long, where NumPy has no such type: Paddle 2.6 can view only those as ``dtype``."""
    return {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "bfloat16": "int16"}.get(dtype, dtype)


def _zeros(shape: tuple[int, ...], dtype: str, place: Any) -> Tensor:
    dtype = _paddle_dtype(dtype)
    tensor = paddle.to_tensor(np.zeros(shape, _numpy_dtype(dtype)), place=place)
    return tensor if _numpy_dtype(dtype) == dtype else tensor.view(dtype)  # type: ignore[no-any-return]
