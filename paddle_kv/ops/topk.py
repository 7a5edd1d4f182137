"""Rows of the tokens that sparse attention picks, out of host memory."""

from __future__ import annotations

from typing import Any

from .._paddle import private
from . import _arguments as arguments
from ._arguments import Tensor
from ._library import call
from ._tracing import dygraph_only

_empty = private("_C_ops", "empty")


@dygraph_only
def gather_topk_rows(
    token_ids: Tensor,
    block_table: Tensor,
    host_pointer: int,
    num_host_blocks: int,
    block_stride_bytes: int,
    block_size: int,
    resident: Tensor,
    slot_of_token: Tensor,
    token_of_slot: Tensor,
    lru_order: Tensor,
    fresh: Tensor,
    scratch: Tensor,
    *,
    out: Tensor | None = None,
    stream: Any = None,
) -> Tensor:
    """The rows of k tokens for each request: those that are resident from the device, the others from host memory, from
    where they become resident.

    Each request has ``num_slots`` resident rows. A token that is not among them is read from host memory, once however
    often the list names it, and takes the slot whose token was named longest ago; a token that is in the list itself
    keeps its slot. With as many slots as tokens in a list, or more, all rows of a call are resident behind it. Nothing
    is decided by the host, so that a CUDA graph can capture the call: a replay gathers what is in ``token_ids`` then.
    :class:`paddle_kv.ResidentRows` makes the tensors and keeps them.

    The state behind a call is the same on the CPU and on a GPU, and does not depend on which thread comes first: the
    missed tokens, in the order of their first appearance in the list, take the slots that no token of the list has, in
    the order of ``lru_order``. Then the slots of the list go to the end of ``lru_order``, in the order of first
    appearance, and the others keep theirs.

    A negative id is padding. Its row becomes zeros, and so does the row of a token that is neither resident nor in host
    memory: one of ``max_tokens`` and more, one whose entry in the table is negative, beyond the host blocks, or not
    there. Nothing outside of the tensors is read or written, whatever they hold.

    Ordered after the work on ``stream`` (for None see :mod:`paddle_kv.streams`) and after nothing else. All tensors and
    the host memory must stay alive, and nobody may write them, until the stream has passed the call; of a captured
    call, as long as the graph is replayed. Rows in host memory must be there before, so a save of them has to be over.
    A row that changes in host memory afterwards stays as it was where it is resident: make the request fresh. Call it
    once before a capture, with tensors of the same shapes: the first call loads the kernels.

    A small set of device rows per request, in LRU order, that a kernel fills from host memory is the scheme of HiSparse
    (SGLang, 2026).

    Args:
        token_ids: ``[batch, k]``, int32, as is each tensor of integers here: positions in the sequence of the request.
            Slots and lists of one request are apart from those of the others.
        block_table: ``[batch, blocks of a request]``: token t lies in host block ``block_table[b, t // block_size]``,
            at position ``t % block_size``.
        host_pointer: address of host block 0: ``HostPool.pointer(name, layer)``. Page-locked if the tensors are on a
            GPU.
        num_host_blocks: host blocks that fit behind the address.
        block_stride_bytes: from one host block to the next: ``HostPool.stride_bytes(name)``. The rows of a block lie
            together, as those of an MLA cache ``[blocks, block_size, width]`` do.
        block_size: tokens of a host block.
        resident: ``[batch, num_slots, row elements]``, any dtype. ``num_slots`` is at least k.
        slot_of_token: ``[batch, max_tokens]``: the slot of each token, -1 where it is not resident.
        token_of_slot: ``[batch, num_slots]``: the inverse, -1 for a slot without a token.
        lru_order: ``[batch, num_slots]``: the slots, the one to be taken next first. At the beginning 0, 1, 2, ...
        fresh: ``[batch]``: where it is not 0 the request begins anew, with nothing resident and the order 0, 1, 2, ...
            Behind the call it is 0.
        scratch: ``[batch, num_slots + 5 * k]``, or more columns; what it holds is of no meaning.
        out: where the rows are written: ``[batch, k, row elements]`` of the dtype of ``resident``. None: a new tensor,
            of Paddle's current stream; a captured call needs one of the caller's.
        stream: see above.

    Returns:
        ``out``, or the new tensor.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, fewer slots than tokens in a list, a tensor that is not
            contiguous, tensors that overlap, host memory that the GPU cannot reach.
        IndexError: with ``PADDLE_KV_CHECK=1``, a token or a block that is too large. Not while a graph is captured.
        TypeError: wrong type of an argument.
        CudaError: CUDA reported a failure.
        NotImplementedError: while a program is traced.

    In each case nothing has been written.

    Example:
        >>> import numpy as np, paddle
        >>> from paddle_kv import ops
        >>> paddle.set_device("cpu")
        Place(cpu)
        >>> host = np.arange(6, dtype="float32").reshape(3, 2, 1)  # 3 blocks of 2 tokens, rows of one element
        >>> table, resident = paddle.to_tensor([[2, 0]], "int32"), paddle.zeros([1, 2, 1])
        >>> slot_of_token, token_of_slot = paddle.full([1, 4], -1, "int32"), paddle.full([1, 2], -1, "int32")
        >>> lru_order, fresh = paddle.to_tensor([[0, 1]], "int32"), paddle.zeros([1], "int32")
        >>> state = resident, slot_of_token, token_of_slot, lru_order, fresh, paddle.zeros([1, 12], "int32")
        >>> for picked in ([3, 0], [1, 3]):  # 0 makes room for 1
        ...     ids = paddle.to_tensor([picked], "int32")
        ...     rows = ops.gather_topk_rows(ids, table, host.ctypes.data, 3, 8, 2, *state)
        ...     print(rows.numpy().ravel().tolist(), token_of_slot.tolist(), lru_order.tolist())
        [1.0, 4.0] [[3, 0]] [[0, 1]]
        [5.0, 1.0] [[3, 1]] [[1, 0]]
    """
    tensors = {"token_ids": token_ids, "block_table": block_table, "resident": resident, "slot_of_token": slot_of_token,
               "token_of_slot": token_of_slot, "lru_order": lru_order, "fresh": fresh, "scratch": scratch}  # fmt: skip
    for name, tensor in tensors.items():
        arguments.readable(tensor, name)
    numbers = {"host_pointer": host_pointer, "num_host_blocks": num_host_blocks,
               "block_stride_bytes": block_stride_bytes, "block_size": block_size}  # fmt: skip
    integers = [arguments.integer(number, name) for name, number in numbers.items()]
    if out is not None:
        arguments.readable(out, "out")
    _check_elements(tensors, out)
    if out is None:
        out = _empty([*token_ids.shape, resident.shape[2]], resident.dtype, resident.place)
    call("gather_topk_rows", *tensors.values(), out, *integers, arguments.handle(stream, resident))
    return out


def _check_elements(tensors: dict[str, Tensor], out: Tensor | None) -> None:
    """ValueError for what the operator cannot see: Paddle 2.6 takes no input without elements, and a result needs two
    ranks that are right."""
    for name, tensor in (*tensors.items(), ("out", out)):
        if tensor is not None and 0 in tensor.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; a tensor with elements is expected")
    for name, rank, meaning in (("token_ids", 2, "[batch, k]"), ("resident", 3, "[batch, num_slots, row elements]")):
        if tensors[name].ndim != rank:
            raise ValueError(f"{name} has shape {list(tensors[name].shape)}; {meaning} is expected")
