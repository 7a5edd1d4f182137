"""Blocks handed over between two processes of one host, layer by layer: through a host pool in shared memory, or
straight into the device cache of the other one."""

from ..memory.heads import heads_of
from ..memory.peer_blocks import PeerBlocks
from .grant import Grant
from .granted import Peer
from .receiver import Receiver
from .remote_sender import RemoteSender
from .sender import Sender
from .unix_socket import Listener, connect

__all__ = ["Grant", "Listener", "Peer", "PeerBlocks", "Receiver", "RemoteSender", "Sender", "connect", "heads_of"]
