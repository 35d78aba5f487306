"""Whether a buffer server can be reached, and would let us in: asked before anything is started on this host.

address ─► connects? ─► greets as ZeroMQ? ─► has keys, as we have? ─► knows our key, and has the one that we expect?

What may be otherwise in a minute (nobody listens yet) is a sentence; what will not (keys) is an error.
"""

from __future__ import annotations

import socket
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from async_rl.curve import ClientKeys, secure_client
from async_rl.errors import ConfigError
from async_rl.route import parted, speak_its_family

_GREETING = 64
"""Bytes of a ZeroMQ greeting: signature (10), version (2), mechanism (20), as-server (1), filler."""
_OURS = b"\xff" + 8 * b"\x00" + b"\x7f" + b"\x03\x00"
"""Signature and version; with our mechanism a peer that has another one would leave before it has said its own."""
_SIGNATURE = 10
_MECHANISM = slice(12, 32)
_END = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def unreachable(address: str, timeout_s: float) -> str | None:
    """Why no server of ours seems to listen there; ``None`` if one does.

    Args:
        address: ``tcp://HOST:PORT``.
        timeout_s: longest wait.
    """
    try:
        greeting = _greeting(address, timeout_s)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:  # a wrong name, port or network
        return error.strerror or str(error)
    return None if _is_signature(greeting) else "what listens there is no buffer server"


def check_entry(address: str, keys: ClientKeys | None, folder: str, timeout_s: float) -> None:
    """Check that a server which can be reached would let us in.

    Args:
        address: of a server that :func:`unreachable` has found.
        keys: ours.
        folder: where they lie.
        timeout_s: longest wait; a server that is slow is not judged.

    Raises:
        ConfigError: one side has keys and the other none, or they do not know each other.
    """
    try:
        mechanism = _greeting(address, timeout_s)[_MECHANISM].rstrip(b"\x00")
    except OSError:
        return
    if mechanism == b"CURVE" and keys is None:
        raise ConfigError(
            f"the server at {address} lets in only those whose keys it knows: name ours with --keys DIR; it holds "
            "client.key, and the server.pub of the learner host"
        )
    if mechanism == b"NULL" and keys is not None:
        raise ConfigError(
            f"the server at {address} has no keys, but we expect one that has (buffer.keys = {folder!r}): start it "
            "with --keys, or leave --keys away here in a network that you trust"
        )
    if keys is not None and (why := _refusal(address, keys, timeout_s)):
        raise ConfigError(f"the server at {address} and the keys in {folder} do not fit: {why}")


def _greeting(address: str, timeout_s: float) -> bytes:
    """What listens there says first; a ZeroMQ peer says 64 bytes, the most of them once it knows that we are one, too.

    Raises:
        OSError: nothing can be connected to, or it says nothing in time.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection(parted(address), timeout_s) as line:
        greeting = _read(line, _SIGNATURE, deadline)
        if _is_signature(greeting):
            line.sendall(_OURS)
            greeting += _read(line, _GREETING - _SIGNATURE, deadline)
    return greeting


def _read(line: socket.socket, size: int, deadline: float) -> bytes:
    """So many bytes, fewer if the other side ends."""
    read = b""
    while len(read) < size:
        line.settimeout(max(0.01, deadline - time.monotonic()))
        if not (part := line.recv(size - len(read))):
            break
        read += part
    return read


def _is_signature(greeting: bytes) -> bool:
    return len(greeting) >= _SIGNATURE and greeting[0] == 0xFF and greeting[_SIGNATURE - 1] == 0x7F


def _refusal(address: str, keys: ClientKeys, timeout_s: float) -> str:
    """Why the handshake with keys fails; empty if it succeeds, or nothing is known in time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as probe:
        probe.set(zmq.LINGER, 0)
        secure_client(probe, keys)
        monitor = probe.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _END)
        try:
            speak_its_family(probe, address)
            probe.connect(address)
            if not monitor.poll(int(timeout_s * 1000)):
                return ""
            event = recv_monitor_message(monitor)
        finally:
            probe.disable_monitor()
            monitor.close(0)
    if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return ""
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return (
            "it does not know our client.key: put our client.pub into the clients/ of the learner host's folder and "
            "start the server again, or copy the client.key and client.pub of that folder here"
        )
    return "its key is not that of our server.pub: copy server.pub from the learner host again"
