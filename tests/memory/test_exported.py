"""Descriptions that do not fit are refused with what is wrong in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_kv import AttachError, HostPool
from paddle_kv.memory.exported import Exported, describe
from tests.schedule.rig import make_spec

SPEC = make_spec()
OWN = SPEC.tensor_block_bytes("key")


@pytest.fixture
def exported() -> Iterator[Exported]:
    with HostPool(SPEC, 5, shared=True, layout="block_first") as pool:
        yield pool.export()


def handle(**changes: Any) -> Callable[[Exported], dict[str, Any]]:
    return lambda one: {"allocations": (dataclasses.replace(one.allocations[0], **changes),)}


def stride(value: Any) -> Callable[[Exported], dict[str, Any]]:
    return lambda one: {"strides_bytes": {**one.strides_bytes, "key": value}}


def places(change: Callable[[Any], Any]) -> Callable[[Exported], dict[str, Any]]:
    return lambda one: {"tensors": {**one.tensors, "key": change(one.tensors["key"])}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda one: {"allocations": list(one.allocations)}, "must be a tuple of handles"),
        (lambda one: {"allocations": (*one.allocations, "memory")}, "must be a tuple of handles"),
        (lambda one: {"num_blocks": 0}, "num_blocks = 0 must be an integer of at least 1"),
        (lambda one: {"num_blocks": -1}, "num_blocks = -1 must be an integer of at least 1"),
        (lambda one: {"num_blocks": True}, "num_blocks = True must be an integer of at least 1"),
        (lambda one: {"num_blocks": 5.0}, "num_blocks = 5.0 must be an integer of at least 1"),
        (handle(process_id=-1), "must be a tuple of handles"),
        (handle(descriptor=True), "must be a tuple of handles"),
        (handle(size_bytes=1.5), "must be a tuple of handles"),
        (handle(token=5), "must be a tuple of handles"),
        (lambda one: {"tensors": list(one.tensors)}, "must be mappings of the names of tensors"),
        (lambda one: {"strides_bytes": list(one.strides_bytes)}, "must be mappings of the names of tensors"),
        (stride(OWN - 1), rf"strides_bytes\['key'\] = {OWN - 1} must be at least {OWN}, a block"),
        (stride(float(OWN)), rf"strides_bytes\['key'\] = {OWN}.0 must be at least {OWN}, a block"),
        (stride("wide"), r"strides_bytes\['key'\] = 'wide' must be at least"),
        (places(list), r"tensors\['key'\] = \[.*\] must be a tuple of 5 layers"),
        (places(lambda layers: layers[:4]), r"tensors\['key'\] = .* must be a tuple of 5 layers"),
        (places(lambda layers: 7), r"tensors\['key'\] = 7 must be a tuple of 5 layers"),
        (places(lambda layers: (*layers[:4], list(layers[4]))), r"\['key'\]\[4\] = \[.*\] must be an allocation"),
        (places(lambda layers: (*layers[:4], (0,))), r"\['key'\]\[4\] = \(0,\) must be an allocation and an offset"),
        (places(lambda layers: (*layers[:4], 7)), r"\['key'\]\[4\] = 7 must be an allocation and an offset"),
    ],
)
def test_what_is_wrong_is_named(
    exported: Exported, changes: Callable[[Exported], dict[str, Any]], message: str
) -> None:
    with pytest.raises(AttachError, match=message):
        HostPool.attach(SPEC, dataclasses.replace(exported, **changes(exported)))


def test_an_address_lies_in_the_piece_that_begins_there() -> None:
    pieces: Any = [
        SimpleNamespace(address=start, size_bytes=100, handle=lambda start=start: f"handle {start}")
        for start in (1000, 1100, 1300)
    ]
    addresses = {name: (1000, 1099, 1100, 1300, 1399) for name in SPEC.tensor_names}
    strides = dict.fromkeys(SPEC.tensor_names, 10)
    found = describe("host_pool", SPEC, 5, pieces, addresses, strides)
    assert set(found.tensors.values()) == {((0, 0), (0, 99), (1, 0), (2, 0), (2, 99))}
    assert found.allocations == ("handle 1000", "handle 1100", "handle 1300")
    for outside in (999, 1200, 1299, 1400):
        with pytest.raises(AssertionError, match=f"no allocation has the address {outside:#x}"):
            describe("host_pool", SPEC, 5, pieces, {**addresses, "value": (outside,)}, strides)
