"""The paged cache on the device, one tensor per name and layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import paddle

from .. import devices
from ..errors import AttachError
from ..layout import KVCacheSpec, check_positive, check_spec
from ..ops import _arguments as arguments
from ..ops._arguments import Tensor
from ..tracking.group import change
from ..tracking.memories import Extent, attach, buffer_as_layer
from .device_memory import DeviceMemory, allocations_around
from .exported import Exported, check_description, describe, refuse_overlap, resolve, resolve_on_gpu
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
        shared: in memory that other processes can :meth:`attach`. Needed on the CPU; memory of a GPU can be shared as
            Paddle gives it, or not at all.
        layer_buffers: a ring: so many tensors of each name instead of one a layer. Layer i lies in buffer
            ``i % layer_buffers`` while the model is at it, and everything else in host memory (docs/ordering.md,
            "Rings of layer buffers"). None: each layer has its own.

    Raises:
        MemoryError: the device has not so much memory.
        TypeError: not a spec, or a device that is not a string.
        ValueError: fewer than one block, a device that is not here, shared memory of a GPU whose allocator gives
            memory that CUDA does not share, ``layer_buffers`` that are not in [2, spec.num_layers], or a ring that is
            to be shared.

    Attributes:
        spec: the spec.
        num_blocks: blocks per tensor.
        device_id: CUDA ordinal, None on the CPU.
        layer_buffers: tensors of each name; ``spec.num_layers`` unless it is a ring.
        is_ring: whether layers share their tensors in turn.

    Example:
        >>> from paddle_kv import DeviceCache, KVCacheSpec
        >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
        >>> DeviceCache(spec, 5, "cpu").tensor("key", 1).shape == [5, 1, 3, 4]
        True
    """

    _memory: Sequence[SharedMemory] | Sequence[DeviceMemory] = ()  # of a cache that is shared, on the CPU, or attached
    _exported: Exported | None = None
    is_part = False  # see :func:`~paddle_kv.memory.heads.heads_of`
    is_attached_on_gpu = False  # it lies in device memory of another process: there are addresses, and no tensors
    on_other_gpu = False  # that memory is not of the GPU that reaches it here

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        device: str | None = None,
        *,
        shared: bool = False,
        layer_buffers: int | None = None,
    ) -> None:
        check_spec(spec)
        num_blocks = check_positive(num_blocks, "num_blocks")
        layer_buffers = _check_buffers(spec, layer_buffers)
        if shared and layer_buffers < spec.num_layers:
            raise ValueError(f"layer_buffers = {layer_buffers} of {spec.num_layers} layers cannot be shared")
        place = _place(device)
        if not shared or not isinstance(place, paddle.CPUPlace):  # 2.6 has no is_cpu_place() of it
            tensors = {
                name: [
                    _zeros((num_blocks, *spec.block_shape(name)), spec.tensor_dtype(name), place)
                    for _ in range(layer_buffers)
                ]
                for name in spec.tensor_names
            }
            self._take(spec, tensors, layer_buffers)
            if shared:
                self.export()
            return
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
        cls,
        spec: KVCacheSpec,
        tensors: Mapping[str, Sequence[Tensor]],
        *,
        num_blocks: int | None = None,
        layer_buffers: int | None = None,
    ) -> DeviceCache:
        """A cache over the user's own tensors: name -> one tensor per layer. They are used in place and kept alive.

        Args:
            spec: what the tensors are: each ``[num_blocks, *spec.block_shape(name)]`` of ``spec.tensor_dtype(name)``
                (8-bit floats may be uint8), as many blocks in all of them.
            tensors: ``{"key": [one per layer], "value": [...]}``, or ``"latent"``, and what ``extra`` names.
            num_blocks: only the first so many blocks of each tensor, of which some may have more (the layers of a draft
                model). None: all, and all tensors have as many.
            layer_buffers: a ring, as of the class: there are so many tensors of each name.

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
        num_blocks = None if num_blocks is None else check_positive(num_blocks, "num_blocks")
        made._take(spec, tensors, layer_buffers, num_blocks)
        return made

    @classmethod
    def attach(cls, spec: KVCacheSpec, exported: Exported, device: str | None = None) -> DeviceCache:
        """A cache over the memory of a cache of another process, which has called :meth:`export`.

        Uses of a block are tracked in each process for itself, so the processes have to agree who touches which block
        when (docs/peers.md). In host memory the bytes live until the last process has given them back. Device memory
        belongs to the process that made it, which must keep it until the others have given it back. This process gives
        it back with the last reference to the cache and its tensors; transfers in flight have one.

        Device memory of another process has addresses here (:meth:`pointer`) and no Paddle tensors.

        Args:
            spec: which is expected.
            exported: what :meth:`export` returned in the other process.
            device: for device memory, the GPU of this process that reaches it; None is the current one.

        Raises:
            AttachError: the cache is on another host or in another container, has another spec, its process is gone or
                has given it back, or this process may not open its memory; device memory in the process that made it.
            TypeError: not a spec, or not a description.
            ValueError: ``device`` is not here, or was named for memory of the CPU.

        Example:
            >>> from paddle_kv import DeviceCache, KVCacheSpec
            >>> spec = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=4, block_size=3, dtype="float32")
            >>> cache = DeviceCache(spec, 5, "cpu", shared=True)
            >>> same = DeviceCache.attach(spec, cache.export())  # in another process
            >>> cache.tensor("key", 1)[2] = 1.5
            >>> same.tensor("key", 1)[2].numpy().max()
            np.float32(1.5)
        """
        check_description(exported)
        made = cls.__new__(cls)
        if not exported.on_gpu:
            if device is not None:
                raise ValueError(f"device = {device!r}, but the cache is in memory of the CPU")
            memory, pointers = resolve(exported, "device_cache", spec, pinned=False)
            _check_dense(exported)
            with refuse_overlap():
                made._take_shared(spec, exported.num_blocks, memory, pointers)
            return made
        device_id = _gpu_number(device)
        mapped, pointers = resolve_on_gpu(exported, "device_cache", spec, device_id)
        _check_dense(exported)
        made.is_attached_on_gpu = True
        made.on_other_gpu = any(one.on_other_gpu for one in mapped)
        made._memory = mapped
        with refuse_overlap():
            made._settle(spec, exported.num_blocks, device_id, pointers)
        return made

    def export(self) -> Exported:
        """What another process of the same user on this host needs to :meth:`attach` the cache. It can be pickled.

        It holds nothing: the cache and this process have to be there when it is used. Whoever attaches device memory
        can reach the whole allocations in which the tensors lie, and Paddle puts other tensors there too: describe it
        to processes that are trusted.

        Raises:
            ValueError: the cache is on the CPU and was made without ``shared=True``; on a GPU, in memory that CUDA does
                not share; or it is device memory of another process.
        """
        if self.is_attached_on_gpu:
            raise ValueError("the device cache lies in memory of another process, which can export it")
        if self.is_ring:
            raise ValueError(f"layer_buffers = {self.layer_buffers}: a ring cannot be shared")
        if self._exported is None:
            self._exported = self._describe()
        return self._exported

    def _describe(self) -> Exported:
        spec = self.spec
        memory: Sequence[Any] = self._memory
        where = "cpu"
        if self.device_id is not None:
            addresses = [address for name in spec.tensor_names for address in self._pointers[name]]
            memory = allocations_around(self.device_id, addresses)
            where = memory[0].handle().device
        elif not memory:
            raise ValueError("the device cache is not in shared memory; make it with shared=True")
        strides = {name: spec.tensor_block_bytes(name) for name in spec.tensor_names}
        return describe("device_cache", spec, self.num_blocks, memory, self._pointers, strides, where)

    @property
    def memory_id(self) -> str:
        """Names the memory, the same in each process that has it. Raises as :meth:`export`."""
        return self._memory[0].handle().token if self._memory else self.export().memory_id

    def _take_shared(
        self, spec: KVCacheSpec, num_blocks: int, memory: Sequence[HostMemory], pointers: Mapping[str, Sequence[int]]
    ) -> None:
        tensors = {
            name: [_over(memory, address, num_blocks, spec, name) for address in pointers[name]]
            for name in spec.tensor_names
        }
        self._take(spec, tensors)
        self._memory = [piece for piece in memory if isinstance(piece, SharedMemory)]

    def _take(
        self,
        spec: KVCacheSpec,
        tensors: Mapping[str, Sequence[Tensor]],
        layer_buffers: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        check_spec(spec)
        layer_buffers = _check_buffers(spec, layer_buffers)
        if not isinstance(tensors, Mapping):
            raise TypeError(f"tensors is {type(tensors).__name__}; a mapping name -> one tensor per layer is expected")
        if set(tensors) != set(spec.tensor_names):
            raise ValueError(f"tensors has the names {sorted(tensors)}; {sorted(spec.tensor_names)} are expected")
        first = None
        for name in spec.tensor_names:
            layers = arguments.caches(tensors[name], f"tensors[{name!r}]")
            if len(layers) != layer_buffers:
                raise ValueError(f"tensors[{name!r}] has {len(layers)} layers; {layer_buffers} are expected")
            for layer, tensor in enumerate(layers):
                label = f"tensors[{name!r}][{layer}]"
                first = tensor if first is None else first
                _check_tensor(spec, name, tensor, first, label, num_blocks)
        assert first is not None
        self._tensors = {name: tuple(tensors[name]) for name in spec.tensor_names}
        pointers = {name: [tensor.data_ptr() for tensor in layers] for name, layers in self._tensors.items()}
        self._settle(spec, int(first.shape[0]) if num_blocks is None else num_blocks, _device_id(first), pointers)

    def _settle(
        self, spec: KVCacheSpec, num_blocks: int, device_id: int | None, pointers: Mapping[str, Sequence[int]]
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.device_id = device_id
        self._pointers = {name: list(pointers[name]) for name in spec.tensor_names}
        self.layer_buffers = len(self._pointers[spec.tensor_names[0]])
        self.is_ring = self.layer_buffers < spec.num_layers
        self.domain, _ = attach(self, self.extents())

    def extents(self) -> list[Extent]:
        """Where the blocks of each tensor lie."""
        layers = [buffer_as_layer(i) if self.is_ring else i for i in range(self.layer_buffers)]
        return [
            Extent(start, start + self.num_blocks * stride_bytes, stride_bytes, layer)
            for name in self.spec.tensor_names
            for stride_bytes in [self.spec.tensor_block_bytes(name)]
            for layer, start in zip(layers, self._pointers[name], strict=True)
        ]

    def __reduce__(self) -> NoReturn:
        # A copy would have tensors of its own, of which the tracking of blocks knows nothing.
        raise TypeError("a DeviceCache cannot be pickled or copied; send its spec, and make or adopt one there")

    def tensor(self, name: str, layer: int) -> Tensor:
        """The tensor of a layer, ``[num_blocks, *spec.block_shape(name)]``; of a ring, that of the buffer in which it
        comes to lie.

        Raises:
            ValueError: ``name`` is not of ``spec.tensor_names``.
            IndexError: no such layer.
            NotImplementedError: the cache lies in device memory of another process.
        """
        layer = self._check_layer(name, layer)
        if self.is_attached_on_gpu:
            raise NotImplementedError("device memory of another process is not a Paddle tensor here; pointer() has it")
        return self._tensors[name][layer % self.layer_buffers]

    def pointer(self, name: str, layer: int) -> int:
        """Address of block 0 of a tensor of a layer; the blocks are dense. Raises ValueError and IndexError as
        :meth:`tensor`."""
        layer = self._check_layer(name, layer)
        return self._pointers[name][layer % self.layer_buffers]

    def stride_bytes(self, name: str) -> int:
        """Bytes from a block of a tensor to the next one. Raises ValueError as :meth:`tensor`."""
        return self.spec.tensor_block_bytes(name)

    def piece_stride_bytes(self, name: str) -> int:
        """In a block, bytes from a piece of ``spec.head_pieces`` to the next one."""
        return self.stride_bytes(name) // self.spec.head_pieces(name)

    def _check_layer(self, name: str, layer: int) -> int:
        if name not in self._pointers:
            raise ValueError(f"name = {name!r} must be one of {self.spec.tensor_names}")
        layer = arguments.integer(layer, "layer")
        if not 0 <= layer < self.spec.num_layers:
            raise IndexError(f"layer = {layer} must be in [0, {self.spec.num_layers})")
        return layer

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
        ids = arguments.checked_block_ids(block_ids, "block_ids", self.num_blocks, distinct=False)
        change(self.domain, functools.partial(self.domain.mark_rewritten, ids))


def _check_buffers(spec: KVCacheSpec, layer_buffers: int | None) -> int:
    if layer_buffers is None:
        return spec.num_layers
    layer_buffers = arguments.integer(layer_buffers, "layer_buffers")
    fewest = min(2, spec.num_layers)
    if not fewest <= layer_buffers <= spec.num_layers:
        raise ValueError(
            f"layer_buffers = {layer_buffers} must be in [{fewest}, {spec.num_layers}], the number of layers"
        )
    return layer_buffers


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


def _check_dense(exported: Exported) -> None:
    for name, stride in exported.strides_bytes.items():
        if stride != exported.spec.tensor_block_bytes(name):
            raise AttachError(f"strides_bytes[{name!r}] = {stride}; blocks of a device cache are dense")


def _place(device: str | None) -> Any:
    if device is None:
        device = "gpu" if devices.has_gpu() else "cpu"
    if not isinstance(device, str):
        raise TypeError(f"device is {device!r}; 'cpu', 'gpu', 'gpu:N' or None is expected")
    return paddle.CPUPlace() if device == "cpu" else devices.place_of(_gpu_number(device))


def _gpu_number(device: str | None) -> int:
    """Of a GPU that is here."""
    if device is not None and not isinstance(device, str):
        raise TypeError(f"device is {device!r}; 'gpu', 'gpu:N' or None is expected")
    kind, _, index = ("gpu" if device is None else device).partition(":")
    if kind not in ("gpu", devices.plugin()) or (index and not index.isdigit()):
        raise ValueError(f"device = {device!r} must be 'cpu', 'gpu' or 'gpu:N'")
    count = devices.gpu_count()
    if not count:
        raise ValueError(f"device = {device!r}, but Paddle sees no GPU here")
    number = int(index) if index else int(paddle.device.get_device().partition(":")[2] or 0)
    if number >= count:
        raise ValueError(f"device = {device!r} must name one of the {count} GPUs")
    return number


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
