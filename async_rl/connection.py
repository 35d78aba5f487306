"""The I/O thread of a client: it owns the DEALER socket, beats, repeats and rejoins.

    hello ─► welcome ─► commands, beats ──────────────► bye
       ▲                     │ "hello first" (the connection broke, or we were taken for dead)
       └─────────────────────┘ then credit, live version, waiting or trained step and what is unacknowledged again

What the server needs after a break is repeated by this thread, so the main thread does not notice one.
"""

from __future__ import annotations

import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from async_rl.data import Annotation, Group
from async_rl.errors import DeadlineError, HandshakeError, WireError
from async_rl.process import cpu_seconds, rss_bytes
from async_rl.protocol import MISSED_BEATS
from async_rl.wire import (
    LIMITS,
    SCHEMA_VERSION,
    Frame,
    Header,
    encode_annotations,
    encode_groups,
    pack_header,
    unpack_header,
)

Message = tuple[Header, list[Frame]]
Payload = Sequence[Group | Annotation]
_LINGER_MS = 1000
_JOIN_S = 5.0
_IDLE_S = 1.0
_COPY_BELOW = 65_536
"""Frames smaller than this are copied out of the socket's buffers; larger ones are used in place."""
_STICKY = ("credit", "live", "asleep", "next", "trained")
"""Messages whose newest one is sent again after a break; ``live`` ends ``asleep``."""


class Inbox:
    """Messages for the main thread, with a descriptor that is readable while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[Message] = []
        self._error: Exception | None = None
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def put(self, message: Message) -> None:
        """Add a message."""
        with self._lock:
            self._messages.append(message)
            os.eventfd_write(self._descriptor, 1)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` from now on, once the messages are taken. The first one stays."""
        with self._lock:
            self._error = self._error or error
            os.eventfd_write(self._descriptor, 1)

    def take(self, timeout_s: float) -> list[Message]:
        """All messages; waits for the first at most ``timeout_s``."""
        self._poll.poll(math.ceil(timeout_s * 1000))
        with self._lock:
            messages, self._messages = self._messages, []
            if not messages and self._error is not None:
                raise self._error
            if self._error is None and messages:
                os.eventfd_read(self._descriptor)
            return messages

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Free the descriptor."""
        os.close(self._descriptor)


@dataclass(slots=True)
class Unacked:
    """A group, or an annotation, that the server has not acknowledged."""

    kind: str
    fields: dict[str, Any]
    payload: Payload
    """The one thing, as it is sent."""
    due: float
    """When it is sent again."""


class Connection:
    """The thread and what it shares with the main thread.

    Args:
        address: of the server.
        hello: fields of the ``hello``.
        inbox: where messages for the main thread go.
        beat_info: fields of the next beat; called from the thread.
    """

    def __init__(
        self, address: str, hello: dict[str, Any], inbox: Inbox, beat_info: Callable[[], dict[str, Any]]
    ) -> None:
        self._address = address
        self._hello = hello
        self._inbox = inbox
        self._beat_info = beat_info
        self._commands: queue.SimpleQueue[tuple[str, dict[str, Any], Payload]] = queue.SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._unacked: dict[tuple[int, int], Unacked] = {}
        self._tickets = 0
        self._credit = 0
        self._sticky: dict[str, dict[str, Any]] = {}
        # The rest belongs to the thread.
        self._socket: zmq.Socket[bytes]
        self._joined = False
        self._over = False
        self._run_id = ""
        self._seq = 0
        self._heartbeat_s = _IDLE_S
        self._next_beat = 0.0
        self._unanswered = 0

    # ------------------------------------------------------------------ main thread

    def start(self) -> None:
        """Connect and say hello."""
        self._thread.start()

    def put(self, kind: str, fields: dict[str, Any], payload: Payload) -> None:
        """Queue a message; groups and annotations are kept until acknowledged."""
        with self._lock:
            if kind == "credit":
                self._credit = int(fields["count"])
                fields = {**fields, "received": self._tickets}
            for i, item in enumerate(payload):
                self._unacked[item.ordinal, item.attempt] = Unacked(kind, fields, payload[i : i + 1], math.inf)
        self._commands.put((kind, fields, payload))
        os.eventfd_write(self._wakeup, 1)

    def handed_over(self, num_tickets: int) -> None:
        """The main thread has taken tickets or leased groups: from now on its credit counts without them."""
        with self._lock:
            self._tickets += num_tickets
            self._credit = max(0, self._credit - num_tickets)

    @property
    def unacked(self) -> int:
        """Groups, or annotations, not acknowledged yet."""
        return len(self._unacked)

    def close(self) -> None:
        """Say goodbye and end the thread."""
        self._closing.set()
        os.eventfd_write(self._wakeup, 1)
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            os.close(self._wakeup)

    # ------------------------------------------------------------------ I/O thread

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._socket = context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
            # Unlimited, so that sending never blocks: tickets bound what there is to send, silence ends it.
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, LIMITS.frame_bytes)
            self._socket.connect(self._address)
            self._serve()
        except zmq.ZMQError as error:
            self._inbox.fail(HandshakeError(f"cannot use the address {self._address!r}: {error.strerror}"))
        except Exception as error:
            self._inbox.fail(error)  # raised in the main thread, at its next receive
        finally:
            context.destroy(_LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        self._send("hello", self._hello)
        while not self._closing.is_set() and not self._over:
            wait_s = self._next_beat - time.monotonic() if self._run_id else _IDLE_S
            poller.poll(max(0, math.ceil(wait_s * 1000)))
            self._clear_wakeup()
            self._receive()
            self._obey()
            if self._run_id and not self._over:
                self._keep_alive(time.monotonic())
        if self._joined and not self._over:
            self._obey()
            self._beat()
            self._send("bye", {})

    def _receive(self) -> None:
        while True:
            try:
                head, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            header = unpack_header(head.bytes)
            frames: list[Frame] = [p.bytes if len(p) < _COPY_BELOW else p.buffer for p in parts]
            self._unanswered = 0
            self._sort(header, frames)

    def _sort(self, header: Header, frames: list[Frame]) -> None:
        """Keep what is for this thread, pass on the rest."""
        kind = header["type"]
        if kind == "welcome":
            self._join(header)
        elif kind == "refused":
            self._refused(header)
        elif kind != "beat":
            if kind == "ack":
                with self._lock:
                    for ordinal, attempt, *_ in header["results"]:
                        self._unacked.pop((ordinal, attempt), None)
            if kind in ("shard", "stop"):
                self._sticky.pop("next", None)
            elif kind == "trained":
                self._sticky.pop("trained", None)
            self._inbox.put((header, frames))

    def _join(self, welcome: Header) -> None:
        first, known = not self._run_id, self._run_id in ("", welcome["run_id"])
        self._run_id, self._heartbeat_s = str(welcome["run_id"]), float(welcome["heartbeat_s"])
        if not known:
            self._end(HandshakeError(f"the server at {self._address} has begun another run; start this process again"))
            return
        self._joined, self._next_beat = True, 0.0
        if first:
            self._inbox.put((welcome, []))
            return
        known_version = self._sticky.get("live", {}).get("version")
        if welcome["manifest"] is not None and welcome["manifest"]["version"] != known_version:
            self._inbox.put(({"type": "version", "manifest": welcome["manifest"]}, []))
        with self._lock:
            self._tickets = 0
            if "credit" in self._sticky:
                self._sticky["credit"] = {"count": self._credit, "received": 0}
            for item in self._unacked.values():
                if item.due < math.inf:
                    item.due = 0.0
        for kind, fields in self._sticky.items():
            self._send(kind, fields)

    def _refused(self, header: Header) -> None:
        code, reason = str(header.get("code")), str(header.get("reason"))
        if code != "hello_first":
            self._end(HandshakeError(reason) if code in ("hello", "replaced") else WireError(code, reason))
        elif self._joined:
            self._joined, self._next_beat = False, 0.0

    def _obey(self) -> None:
        """Send what the main thread has queued; before a welcome it waits."""
        while self._joined:
            try:
                kind, fields, payload = self._commands.get_nowait()
            except queue.Empty:
                return
            if kind in _STICKY:
                self._sticky[kind] = fields
            if kind == "live":
                self._sticky.pop("asleep", None)
            self._send(kind, fields, payload)

    def _keep_alive(self, now: float) -> None:
        if now >= self._next_beat:
            if self._unanswered >= MISSED_BEATS:
                silent_s = self._unanswered * self._heartbeat_s
                self._end(
                    DeadlineError(f"the server at {self._address} has been silent for {silent_s:g} s: is it alive?")
                )
                return
            if self._joined:
                self._beat()
            else:
                self._send("hello", self._hello)
            self._unanswered += 1
            self._next_beat = now + self._heartbeat_s
        with self._lock:
            late = [item for item in self._unacked.values() if item.due <= now and self._joined]
        for item in late:
            self._send(item.kind, item.fields, item.payload)

    def _beat(self) -> None:
        self._send("beat", {"cpu_s": cpu_seconds(), "rss_bytes": rss_bytes(), **self._beat_info()})

    def _send(self, kind: str, fields: dict[str, Any], payload: Payload = ()) -> None:
        self._seq += 1
        if payload:
            due = time.monotonic() + MISSED_BEATS * self._heartbeat_s
            with self._lock:
                for item in payload:
                    unacked = self._unacked.get((item.ordinal, item.attempt))
                    if unacked is not None:
                        unacked.due = due
            encode: Callable[..., list[Frame]] = encode_annotations if kind == "annotate" else encode_groups
            self._socket.send_multipart(encode(kind, payload, seq=self._seq, **fields), copy=False)
        else:
            header = {**fields, "type": kind, "schema": SCHEMA_VERSION, "seq": self._seq}
            self._socket.send(pack_header(header))

    def _end(self, error: Exception) -> None:
        self._over = True
        self._inbox.fail(error)

    def _clear_wakeup(self) -> None:
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return
