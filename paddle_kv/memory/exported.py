"""The description by which another process attaches a pool or a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import AttachError
from ..layout import KVCacheSpec, check_spec, differences
from .device_memory import DeviceHandle, DeviceMemory, is_device_handle, map_device
from .shared_memory import SharedHandle, SharedMemory, host_identity, map_shared

VERSION = 1


@dataclass(frozen=True)
class Exported:
    """Where the blocks of a pool or cache lie, as plain data that can be pickled.

    Attributes:
        version: of this description.
        kind: ``"host_pool"`` or ``"device_cache"``.
        host: the running kernel and space of process numbers in which the handles mean something.
        device: where the memory is: ``"cpu"``, or ``"cuda:"`` and the UUID of a GPU.
        spec: of the pool.
        num_blocks: of the pool.
        allocations: the memory, one handle for each piece of it.
        tensors: name -> of each layer the number of the allocation, and the first byte of block 0 in it.
        strides_bytes: name -> bytes from a block to the next one.
        memory_id: names the memory.
    """

    version: int
    kind: str
    host: str
    device: str
    spec: KVCacheSpec
    num_blocks: int
    allocations: tuple[SharedHandle, ...] | tuple[DeviceHandle, ...]
    tensors: Mapping[str, tuple[tuple[int, int], ...]]
    strides_bytes: Mapping[str, int]

    @property
    def memory_id(self) -> str:
        return self.allocations[0].token

    @property
    def on_gpu(self) -> bool:
        """Whether it is device memory."""
        return isinstance(self.device, str) and self.device.startswith(_CUDA)


_CUDA = "cuda:"


class Piece(Protocol):
    """Memory that others can be told of."""

    address: int
    size_bytes: int

    def handle(self) -> Any: ...


def describe(
    kind: str,
    spec: KVCacheSpec,
    num_blocks: int,
    memory: Sequence[Piece],
    pointers: Mapping[str, Sequence[int]],
    strides_bytes: Mapping[str, int],
    device: str = "cpu",
) -> Exported:
    """Of tensors at these addresses, which lie in ``memory``; ``device``: "cpu", or the UUID of a GPU."""

    def place(address: int) -> tuple[int, int]:
        for number, piece in enumerate(memory):
            if piece.address <= address < piece.address + piece.size_bytes:
                return number, address - piece.address
        raise AssertionError(f"no allocation has the address {address:#x}")

    tensors = {name: tuple(place(address) for address in pointers[name]) for name in spec.tensor_names}
    handles = tuple(piece.handle() for piece in memory)
    strides = dict(strides_bytes)
    where = device if device == "cpu" else _CUDA + device
    return Exported(VERSION, kind, host_identity(), where, spec, num_blocks, handles, tensors, strides)


def resolve(
    exported: Exported, kind: str, spec: KVCacheSpec, *, pinned: bool
) -> tuple[list[SharedMemory], dict[str, list[int]]]:
    """Maps what is described: the memory, page-locked with ``pinned``, and the addresses of block 0, name -> one per
    layer.

    Raises:
        TypeError: not a description, or not a spec.
        AttachError: it was made on another host, of another version, of another kind of pool or spec, its parts do not
            fit each other, or the memory is gone.
        MemoryError: it cannot be page-locked.
    """
    _check(exported, kind, spec)
    if exported.device != "cpu":
        raise AttachError(f"the memory is on device {exported.device!r}; 'cpu' is expected")
    _check_places(exported, _is_handle)
    memory = [map_shared(handle, pinned=pinned) for handle in exported.allocations if isinstance(handle, SharedHandle)]
    return memory, _addresses(exported, memory)


def resolve_on_gpu(
    exported: Exported, kind: str, spec: KVCacheSpec, device: int
) -> tuple[list[DeviceMemory], dict[str, list[int]]]:
    """The same for device memory, mapped for a GPU of this process. Raises as :func:`resolve`."""
    _check(exported, kind, spec)
    _check_places(exported, is_device_handle)
    memory = [map_device(handle, device) for handle in exported.allocations if isinstance(handle, DeviceHandle)]
    return memory, _addresses(exported, memory)


def check_description(exported: Any) -> None:
    """TypeError unless it is one."""
    if not isinstance(exported, Exported):
        raise TypeError(f"exported is {type(exported).__name__}; what export() returned is expected")


def _addresses(exported: Exported, memory: Sequence[Piece]) -> dict[str, list[int]]:
    return {
        name: [memory[number].address + offset for number, offset in exported.tensors[name]]
        for name in exported.spec.tensor_names
    }


def _check(exported: Exported, kind: str, spec: KVCacheSpec) -> None:
    check_spec(spec)
    check_description(exported)
    if exported.version != VERSION:
        raise AttachError(f"the description has version {exported.version}; this process knows version {VERSION}")
    if exported.kind != kind:
        raise AttachError(f"the description is of a {exported.kind}; one of a {kind} is expected")
    if exported.host != host_identity():
        raise AttachError(
            f"the memory is on another host, or in another container: {exported.host!r}, and here {host_identity()!r}"
        )
    if not isinstance(exported.spec, KVCacheSpec):
        raise AttachError(f"the description has the spec {exported.spec!r}; a KVCacheSpec is expected")
    if exported.spec != spec:
        theirs, ours = differences(exported.spec, spec)
        raise AttachError(f"the description has the spec {theirs}; {ours} is expected")


@contextlib.contextmanager
def refuse_overlap() -> Iterator[None]:
    """AttachError where the tensors that are described share memory with each other, or with other ones of this
    process in another way."""
    try:
        yield
    except ValueError as error:
        raise AttachError(f"the description does not fit: {error}") from None


def _check_places(exported: Exported, is_handle: Callable[[object], bool]) -> None:
    """Each block has to lie in its allocation: nothing else would keep an access within the memory."""
    spec = exported.spec
    if not (_is_count(exported.num_blocks) and exported.num_blocks):
        raise AttachError(f"num_blocks = {exported.num_blocks!r} must be an integer of at least 1")
    last = exported.num_blocks - 1
    if not isinstance(exported.allocations, tuple) or not all(map(is_handle, exported.allocations)):
        raise AttachError(f"allocations = {exported.allocations!r} must be a tuple of handles")
    if not isinstance(exported.tensors, Mapping) or not isinstance(exported.strides_bytes, Mapping):
        raise AttachError("tensors and strides_bytes must be mappings of the names of tensors")
    if set(exported.tensors) != set(spec.tensor_names) or set(exported.strides_bytes) != set(spec.tensor_names):
        raise AttachError(f"the description does not have the tensors {spec.tensor_names}")
    for name, places in exported.tensors.items():
        own, stride = spec.tensor_block_bytes(name), exported.strides_bytes[name]
        if not _is_count(stride) or stride < own:
            raise AttachError(f"strides_bytes[{name!r}] = {stride!r} must be at least {own}, a block")
        if not isinstance(places, tuple) or len(places) != spec.num_layers:
            raise AttachError(f"tensors[{name!r}] = {places!r} must be a tuple of {spec.num_layers} layers")
        for layer, place in enumerate(places):
            if not isinstance(place, tuple) or len(place) != 2:
                raise AttachError(f"tensors[{name!r}][{layer}] = {place!r} must be an allocation and an offset")
            number, offset = place
            fits = _is_count(number) and number < len(exported.allocations) and _is_count(offset)
            if not fits or offset + last * stride + own > exported.allocations[number].size_bytes:
                raise AttachError(f"tensors[{name!r}][{layer}] does not lie in the memory that is described")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_handle(value: object) -> bool:
    if not isinstance(value, SharedHandle):
        return False
    numbers = (value.process_id, value.descriptor, value.size_bytes)
    return all(map(_is_count, numbers)) and isinstance(value.token, str)
