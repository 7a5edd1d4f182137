"""What the operators on block stacks refuse. Each time nothing has been written."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_kv import ops
from tests.machine import Machine, tensor_of
from tests.ops.permute_conformance import Shape, Stack, dense

UNIVERSAL = ["universal_from_block", "block_from_universal"]
OPERATIONAL = ["operational_from_block", "block_from_operational"]
every_op = pytest.mark.parametrize("op", [*UNIVERSAL, *OPERATIONAL])


class Case:
    """A call of one operator that would work, and the check that it has not."""

    def __init__(self, machine: Machine, op: str, **sizes: Any) -> None:
        self.machine, self.op, self.shape = machine, op, Shape(blocks=2, layers=3, heads=4, tokens=5, width=6, **sizes)
        self.stack = Stack(machine, self.shape)
        size = self.shape.universal if op in UNIVERSAL else self.shape.operational
        self.dense = dense(machine, size, self.shape.dtype)

    def run(self, **changed: Any) -> None:
        chunks = changed.pop("chunks", self.stack.chunks)
        tensor = changed.pop("dense", self.dense.tensor)
        if self.op.endswith("from_block"):
            getattr(ops, self.op)(chunks, num_layers=changed.pop("num_layers", 3), out=tensor, **changed)
        else:
            getattr(ops, self.op)(tensor, chunks, **changed)

    def refuses(self, error: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            self.run(**changed)
        self.machine.synchronize()
        self.stack.check_untouched()
        self.dense.check(self.dense.bits)

    def zeros(self, shape: tuple[int, ...], dtype: str = "uint8") -> paddle.Tensor:
        size = np.zeros((shape[0], int(np.prod(shape[1:])) * (1 if dtype == "uint8" else 2)), np.uint8)
        return tensor_of(size, shape[1:], dtype, self.machine.place)


@every_op
def test_the_case_works_when_nothing_is_changed(machine: Machine, op: str) -> None:
    Case(machine, op).run()


@every_op
def test_number_of_chunks(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    case.refuses(ValueError, r"chunks has 11 entries; a multiple of .* = 6", chunks=case.stack.chunks[:-1])
    case.refuses(ValueError, r"(out|universal|operational) has shape \[2, .*; \[1, ", chunks=case.stack.chunks[:6])
    case.refuses(ValueError, r"has shape \[2, .*; \[0, |gives no shape|holds no memory", chunks=[])


@every_op
def test_types(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    case.refuses(TypeError, "chunks is Tensor", chunks=case.stack.chunks[0])
    case.refuses(TypeError, "chunks is NoneType", chunks=None)
    case.refuses(TypeError, r"chunks\[1\] is ndarray", chunks=[case.stack.chunks[0], np.zeros(3)])
    case.refuses(TypeError, "(out|universal|operational) is ndarray", dense=case.dense.tensor.numpy()[0])


@every_op
def test_shapes_and_dtypes_of_chunks(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    chunks = list(case.stack.chunks)
    case.refuses(
        ValueError, r"chunks\[7\] has shape \[5, 4, 7\]", chunks=[*chunks[:7], case.zeros((5, 4, 7)), *chunks[8:]]
    )
    wrong = case.zeros((5, 4, 6), "float16")
    case.refuses(
        ValueError,
        r"chunks\[7\] and chunks\[0\] differ in dtype \(float16, uint8\)",
        chunks=[*chunks[:7], wrong, *chunks[8:]],
    )
    case.refuses(ValueError, "differ in dtype", chunks=[wrong] * 12)


@every_op
def test_shape_and_dtype_of_the_dense_tensor(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    size = tuple(case.dense.tensor.shape)
    for i in range(len(size)):
        changed = (*size[:i], size[i] + 1, *size[i + 1 :])
        case.refuses(ValueError, r"has shape|chunks has 12 entries", dense=case.zeros(changed))
    case.refuses(ValueError, "has shape|rank", dense=case.zeros((2, 4)))
    case.refuses(ValueError, "differ in dtype", dense=case.zeros(size, "float16"))


@pytest.mark.parametrize("op", UNIVERSAL)
def test_layouts(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    case.refuses(ValueError, r"chunks\[0\] has shape \[5, 4, 6\]; \[4, 5, 6\]", inner_layout="HND")
    case.refuses(ValueError, "inner_layout is 'nhd'", inner_layout="nhd")
    case.refuses(ValueError, "inner_layout is None", inner_layout=None)


@pytest.mark.parametrize("op", ["universal_from_block", "operational_from_block"])
def test_counts(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    case.refuses(ValueError, "num_layers = 0", num_layers=0)
    case.refuses(ValueError, "num_outer = -1", num_outer=-1)
    case.refuses(TypeError, "num_layers", num_layers=3.0)
    case.refuses(ValueError, r"has shape \[2, .*; \[4, ", num_outer=1)
    with pytest.raises(ValueError, match="give out"):
        case.run(chunks=[], dense=None)
    with pytest.raises(ValueError, match="give out"):
        case.run(chunks=case.stack.addresses, dense=None)


@every_op
def test_tensors_that_are_not_contiguous(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    turned = case.zeros((4, 5, 6)).transpose([1, 0, 2])
    case.refuses(
        ValueError, r"chunks\[3\] is not contiguous", chunks=[*case.stack.chunks[:3], turned, *case.stack.chunks[4:]]
    )
    rank = len(case.dense.tensor.shape)
    turned = case.zeros(tuple(case.dense.tensor.shape)[::-1]).transpose(list(range(rank))[::-1])
    case.refuses(ValueError, "(out|universal|operational) is not contiguous", dense=turned)


@every_op
def test_memory_that_overlaps(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    chunks = list(case.stack.chunks)
    inside = case.dense.tensor.reshape([-1])[120:240].reshape([5, 4, 6])
    case.refuses(
        ValueError,
        r"chunks\[5\] and (out|universal|operational) share memory",
        chunks=[*chunks[:5], inside, *chunks[6:]],
    )
    if not op.endswith("from_block"):
        case.refuses(ValueError, "chunks: two of the memories to be written overlap", chunks=[*chunks[:11], chunks[0]])


@every_op
def test_addresses(machine: Machine, op: str) -> None:
    case = Case(machine, op)
    addresses = case.stack.addresses
    case.refuses(ValueError, r"chunks\[4\] = 0", chunks=[*addresses[:4], 0, *addresses[5:]])
    for nowhere in (-5, 2**63 - 20):  # a chunk has 240 bytes
        case.refuses(ValueError, rf"chunks\[4\] = {nowhere}\b", chunks=[*addresses[:4], nowhere, *addresses[5:]])
    case.refuses(TypeError, "chunks", chunks=[*addresses[:4], 1.5, *addresses[5:]])
    case.refuses(ValueError, "chunks has shape", chunks=np.array([addresses]))
    case.refuses(ValueError, "share memory", chunks=[*addresses[:5], case.dense.tensor.data_ptr() + 1, *addresses[6:]])


def test_out_of_the_right_size_but_without_memory(machine: Machine) -> None:
    case = Case(machine, "universal_from_block")
    case.refuses(
        ValueError, "holds no memory", chunks=[*case.stack.chunks[:6], paddle.Tensor(), *case.stack.chunks[7:]]
    )
