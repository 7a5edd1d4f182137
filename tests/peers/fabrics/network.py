"""Processes in a network that has loopback only: some fabrics listen on all interfaces."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.peers.prefill import context
from tests.tiers import mooncake_cluster
from tests.tiers.mooncake_cluster import CLONE_NEWNET, loopback_only


def start(function: Callable[..., object], *arguments: Any) -> Any:
    """Calls it in a process there, and returns that."""
    with loopback_only():
        network = f"/proc/{os.getpid()}/fd/{mooncake_cluster._network[0]}"
    process = context.Process(target=enter, args=(network, function, *arguments), daemon=True)
    process.start()
    return process


def enter(network: str, function: Callable[..., object], *arguments: Any) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    mooncake_cluster._checked(mooncake_cluster._libc.setns(descriptor, CLONE_NEWNET))
    os.close(descriptor)
    function(*arguments)
