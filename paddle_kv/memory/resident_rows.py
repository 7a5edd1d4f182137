"""Device rows of tokens whose cache is in host memory, kept from one step of decoding to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from .. import ops
from ..layout import check_positive
from ..ops import _arguments as arguments
from ..ops._arguments import Tensor
from .device_cache import _place, _zeros


class ResidentRows:
    """The state of :func:`paddle_kv.ops.gather_topk_rows` for one tensor of one layer, allocated once.

    A row of the batch is one request; when another request takes the row, :meth:`reset` it. Of each request the device
    holds ``num_slots`` rows, and ``4 * (max_tokens + 3 * num_slots + 5 * top_k)`` bytes of state.

    Nothing is allocated after the constructor, and nothing is decided by the host: :meth:`gather` into a tensor of the
    caller's, and :meth:`reset`, can be captured into a CUDA graph.

    Args:
        batch: requests at a time.
        top_k: tokens that are picked for a request.
        num_slots: resident rows of a request, at least ``top_k``. Two to four times as many catch what one step picks
            and the next one does not.
        row_elements: of a row.
        dtype: of a row: ``"bfloat16"``, ``"uint8"``, ..., or Paddle's dtype object.
        max_tokens: of the longest sequence.
        device: as for :class:`paddle_kv.DeviceCache`.

    Raises:
        MemoryError: the device has not so much memory.
        TypeError: a number or a device of a wrong type.
        ValueError: a number below 1, fewer slots than tokens, a device that is not here.

    Attributes:
        resident: ``[batch, num_slots, row_elements]``; as below see :func:`paddle_kv.ops.gather_topk_rows`.
        slot_of_token: ``[batch, max_tokens]``, int32.
        token_of_slot: ``[batch, num_slots]``, int32.
        lru_order: ``[batch, num_slots]``, int32.
        fresh: ``[batch]``, int32. A server that fills the inputs of a graph by itself may write it as one of them.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ResidentRows
        >>> rows = ResidentRows(1, 2, 4, row_elements=3, dtype="float32", max_tokens=8, device="cpu")
        >>> host = np.arange(24, dtype="float32").reshape(4, 2, 3)  # 4 blocks of 2 tokens
        >>> table = paddle.to_tensor(np.array([[3, 1, -1, -1]], "int32"), place=paddle.CPUPlace())
        >>> picked = paddle.to_tensor(np.array([[2, 1]], "int32"), place=paddle.CPUPlace())
        >>> rows.gather(picked, table, host.ctypes.data, 4, 24, 2).numpy().tolist()
        [[[6.0, 7.0, 8.0], [21.0, 22.0, 23.0]]]
        >>> rows.token_of_slot.tolist()
        [[2, 1, -1, -1]]
    """

    def __init__(
        self,
        batch: int,
        top_k: int,
        num_slots: int,
        *,
        row_elements: int,
        dtype: Any,
        max_tokens: int,
        device: str | None = None,
    ) -> None:
        batch, top_k = check_positive(batch, "batch"), check_positive(top_k, "top_k")
        num_slots, max_tokens = check_positive(num_slots, "num_slots"), check_positive(max_tokens, "max_tokens")
        if num_slots < top_k:
            raise ValueError(f"num_slots = {num_slots} must be at least top_k = {top_k}")
        place = _place(device)

        def integers(filling: Any, *shape: int) -> Tensor:
            tensor: Tensor = paddle.to_tensor(np.array(np.broadcast_to(filling, shape), np.int32), place=place)
            return tensor

        self.resident = _zeros((batch, num_slots, check_positive(row_elements, "row_elements")), dtype, place)
        self.slot_of_token = integers(-1, batch, max_tokens)
        self.token_of_slot = integers(-1, batch, num_slots)
        self.lru_order = integers(np.arange(num_slots), batch, num_slots)
        self.fresh = integers(0, batch)
        self._ones = integers(1, batch)
        self._scratch = integers(0, batch, num_slots + 5 * top_k)

    def gather(
        self,
        token_ids: Tensor,
        block_table: Tensor,
        host_pointer: int,
        num_host_blocks: int,
        block_stride_bytes: int,
        block_size: int,
        *,
        out: Tensor | None = None,
        stream: Any = None,
    ) -> Tensor:
        """:func:`paddle_kv.ops.gather_topk_rows` with this state: ordering, arguments and errors as there.

        The calls must follow one another: name the same stream for all of them, or let the streams wait.

        Example:
            >>> import numpy as np, paddle
            >>> from paddle_kv import ResidentRows
            >>> rows = ResidentRows(1, 1, 1, row_elements=1, dtype="int8", max_tokens=2, device="cpu")
            >>> host = np.array([5, 6], "int8")  # 2 blocks of one token
            >>> table = paddle.to_tensor(np.array([[1, 0]], "int32"), place=paddle.CPUPlace())
            >>> picked = paddle.to_tensor(np.array([[0]], "int32"), place=paddle.CPUPlace())
            >>> rows.gather(picked, table, host.ctypes.data, 2, 1, 1).numpy().ravel().tolist()
            [6]
        """
        host = (host_pointer, num_host_blocks, block_stride_bytes, block_size)
        state = (self.resident, self.slot_of_token, self.token_of_slot, self.lru_order, self.fresh, self._scratch)
        return ops.gather_topk_rows(token_ids, block_table, *host, *state, out=out, stream=stream)

    def reset(self, requests: Sequence[int], *, stream: Any = None) -> None:
        """The next :meth:`gather` begins anew for these rows of the batch: nothing is resident there.

        Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`); the gather has to come behind it.

        Raises:
            IndexError: a row that the batch has not.
            ValueError: a row is named twice.
            TypeError: no list of integers.

        Example:
            >>> from paddle_kv import ResidentRows
            >>> rows = ResidentRows(3, 1, 1, row_elements=1, dtype="int8", max_tokens=2, device="cpu")
            >>> rows.reset([0, 2])
            >>> rows.fresh.tolist()
            [1, 0, 1]
        """
        ids = arguments.block_ids(requests, "requests", batch := self.fresh.shape[0])
        for position, request in enumerate(ids):
            if not 0 <= request < batch:
                raise IndexError(f"requests[{position}] = {request} must be in [0, {batch})")
        if len(set(ids)) < len(ids):
            raise ValueError(f"requests = {ids} names a row of the batch twice")
        if ids:
            item_bytes = self.fresh.element_size()
            sources, targets = ([tensor.data_ptr() + item_bytes * request for request in ids]
                                for tensor in (self._ones, self.fresh))  # fmt: skip
            ops.vectorized_copy(sources, targets, item_bytes, stream=stream)
