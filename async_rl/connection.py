"""The I/O thread of a client: it owns the DEALER socket, beats, repeats and rejoins.

    hello ─► welcome ─► commands, beats ──────────────► bye
       ▲                     │ "hello first": the connection broke, we were taken for dead, or the server was restarted
       └─────────────────────┘ then the newest of each sticky message and what is unacknowledged again

What the server needs after a break is repeated by this thread, so the main thread does not notice one. A server that
is silent for a period is missed: messages wait here, beats go on and ask for it. Silence is counted in beats without an
answer, not in seconds, so that a client that was frozen does not blame the server.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from async_rl.curve import ClientKeys, secure_client
from async_rl.errors import DeadlineError, HandshakeError, StartAgainError, WireError
from async_rl.inbox import Inbox
from async_rl.outbox import Outbox, Payload
from async_rl.process import cpu_seconds, rss_bytes
from async_rl.protocol import BEATS_PER_PERIOD, SERVER_GONE_S, is_answer
from async_rl.route import speak_its_family
from async_rl.wire import (
    LIMITS,
    SCHEMA_VERSION,
    Frame,
    Header,
    encode_annotations,
    encode_groups,
    pack_header,
    receive_frames,
    send_frames,
    unpack_header,
)

_LINGER_MS = 1000
_JOIN_S = 5.0
_IDLE_S = 1.0
_DISMISSED = ("hello", "replaced", "ahead", "over", "forsaken")
_HELLO_AGAIN_S = 5.0
"""A first hello without an answer is said again: a server that died may have taken it with it."""
_STICKY = (
    *("credit", "live", "relay", "receives", "asleep", "next", "trained", "snapshot", "eval", "done", "stop"),
    "muster",
)
"""Messages whose newest one is sent again after a break; ``live`` ends ``asleep``. ``stop`` is the user's wish."""
_ANSWERS = {
    "shard": ("next",),
    "trained": ("trained",),
    "snapshot": ("snapshot",),
    "stop": ("next", "done"),
    "mustered": ("muster",),
}
"""Which of them an answer settles."""


@dataclass(slots=True)
class Unacked:
    """A group, an annotation, or word of an attempt that failed, which the server has not acknowledged."""

    kind: str
    fields: dict[str, Any]
    payload: Payload
    """The one thing, as it is sent; empty for ``fail``."""
    due: float
    """When it is sent again."""


class Connection:
    """The thread and what it shares with the main thread.

    Args:
        address: of the server.
        hello: fields of the ``hello``.
        inbox: where messages for the main thread go.
        beat_info: fields of the next beat; called from the thread.
        keys: of a server that lets in only those whom it knows.
        dismissed: told when the server has let us go; called from the thread.
    """

    def __init__(
        self,
        address: str,
        hello: dict[str, Any],
        inbox: Inbox,
        beat_info: Callable[[], dict[str, Any]],
        keys: ClientKeys | None = None,
        dismissed: Callable[[HandshakeError], None] = lambda error: None,
    ) -> None:
        self._address = address
        self._keys = keys
        self._hello = hello
        self._inbox = inbox
        self._beat_info = beat_info
        self._dismissed = dismissed
        self.weights_address = ""
        """Of the chunk server, as the newest welcome said it."""
        self._outbox = Outbox()
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
        self._epoch = 0
        """Of the first welcome: what a learner publishes is of it."""
        self._seq = 0
        self._period_s = _IDLE_S
        self._next_beat = 0.0
        self._unanswered = 0
        self._missed = False

    # ------------------------------------------------------------------ main thread

    def start(self) -> None:
        """Connect and say hello."""
        self._thread.start()

    def put(self, kind: str, fields: dict[str, Any], payload: Payload) -> None:
        """Queue a message; groups, annotations and failed attempts are kept until acknowledged."""
        with self._lock:
            if kind == "credit":
                self._credit = int(fields["count"])
                fields = {**fields, "received": self._tickets}
            for i, item in enumerate(payload):
                self._unacked[item.ordinal, item.attempt] = Unacked(kind, fields, payload[i : i + 1], math.inf)
            if kind == "fail":
                self._unacked[fields["ordinal"], fields["attempt"]] = Unacked(kind, fields, (), math.inf)
        self._outbox.put((kind, fields, payload))

    def handed_over(self, num_tickets: int) -> None:
        """The main thread has taken tickets or leased groups: from now on its credit counts without them."""
        with self._lock:
            self._tickets += num_tickets
            self._credit = max(0, self._credit - num_tickets)

    @property
    def unacked(self) -> int:
        """Groups, annotations or failed attempts, not acknowledged yet."""
        return len(self._unacked)

    def close(self) -> None:
        """Say goodbye and end the thread."""
        self._closing.set()
        self._outbox.wake()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._outbox.close()

    # ------------------------------------------------------------------ I/O thread

    def _run(self) -> None:
        context = zmq.Context()
        try:
            self._socket = context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
            # Unlimited, so that sending never blocks: tickets bound what there is to send, silence ends it.
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.SNDTIMEO, 0)  # it would block if a failed handshake has ended the connection
            self._socket.setsockopt(zmq.MAXMSGSIZE, LIMITS.frame_bytes)
            if self._keys is not None:
                secure_client(self._socket, self._keys)
            speak_its_family(self._socket, self._address)
            self._socket.connect(self._address)
            self._serve()
        except zmq.Again:
            why = "wrong address, or keys (buffer.keys) that the server does not know"
            self._inbox.fail(HandshakeError(f"no answer from {self._address}: {why}"))
        except zmq.ZMQError as error:
            self._inbox.fail(HandshakeError(f"cannot use the address {self._address!r}: {error.strerror}"))
        except Exception as error:
            self._inbox.fail(error)  # raised in the main thread, at its next receive
        finally:
            context.destroy(_LINGER_MS)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._outbox, zmq.POLLIN)
        while not self._closing.is_set() and not self._over:
            self._outbox.clear()
            self._receive()
            self._obey()
            if not self._over:
                self._keep_alive(time.monotonic())
                poller.poll(max(0, math.ceil((self._next_beat - time.monotonic()) * 1000)))
        if self._joined and not self._over:
            self._receive()
            self._obey()
            self._beat()
            self._send("bye", {})

    def _receive(self) -> None:
        while True:
            try:
                head, *frames = receive_frames(self._socket)
            except zmq.Again:
                return
            header = unpack_header(head)
            self._unanswered = 0
            if self._missed:
                self._missed = False
                self._say(f"the server at {self._address} is back")
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
            for asked in _ANSWERS.get(kind, ()):
                if is_answer(self._sticky.get(asked, {}), header):
                    self._sticky.pop(asked, None)
            if kind == "shard":
                self._hello["step"] = int(header["step"]) + 1
            self._inbox.put((header, frames))

    def _join(self, welcome: Header) -> None:
        first, known = not self._run_id, self._run_id in ("", welcome["run_id"])
        self._run_id, self._period_s = str(welcome["run_id"]), float(welcome["heartbeat_s"])
        if not known:
            # such as the same one after --resume: on another host nobody but us starts us again
            self._end(StartAgainError(f"the server at {self._address} has begun another run; start this process again"))
            return
        epoch = int(welcome.get("epoch", 0))
        if first:
            self._epoch = epoch
        elif self._hello["role"] == "learner" and epoch != self._epoch:
            self._end(HandshakeError("the run has gone back to an earlier step without this learner", "ahead"))
            return
        self._joined, self._next_beat = True, 0.0
        self.weights_address = str(welcome["weights_address"])
        if first:
            self._inbox.put((welcome, []))
            return
        live, newest = self._sticky.get("live", {}), welcome["manifest"]
        if newest is not None and _order(newest) != _order(live):
            self._inbox.put(({"type": "version", "manifest": newest}, []))
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
        if code in _DISMISSED:
            error = HandshakeError(reason, code)
            self._dismissed(error)
            self._end(error)
        elif code != "hello_first":
            self._end(WireError(code, reason))
        elif self._joined:
            self._joined, self._next_beat = False, 0.0

    def _obey(self) -> None:
        """Send what the main thread has queued; before a welcome, or while the server is missed, it waits."""
        if not self._joined or self._missed:
            return
        for kind, fields, payload in self._outbox.take():
            if kind in _STICKY:
                self._sticky[kind] = fields
            if kind == "live":
                self._sticky.pop("asleep", None)
            self._send(kind, fields, payload)

    def _keep_alive(self, now: float) -> None:
        if now >= self._next_beat:
            self._look_for_server()
            if self._over:
                return
            if self._joined:
                self._beat()
            else:
                self._send("hello", self._hello)
            self._unanswered += bool(self._run_id)  # before the first welcome, connect() has the deadline
            self._next_beat = now + (self._period_s / BEATS_PER_PERIOD if self._run_id else _HELLO_AGAIN_S)
        if not self._joined or self._missed:
            return
        with self._lock:
            late = [item for item in self._unacked.values() if item.due <= now]
        for item in late:
            self._send(item.kind, item.fields, item.payload)

    def _look_for_server(self) -> None:
        """Say once that it is missed; give up when it stays away."""
        silent_s = self._unanswered * self._period_s / BEATS_PER_PERIOD
        patience_s = max(SERVER_GONE_S, self._period_s)
        if silent_s >= patience_s:
            self._end(DeadlineError(f"the server at {self._address} has been silent for {silent_s:g} s: is it alive?"))
        elif self._unanswered >= BEATS_PER_PERIOD and not self._missed:
            self._missed = True
            self._say(f"the server at {self._address} has not answered for {silent_s:g} s; trying for {patience_s:g} s")

    def _say(self, sentence: str) -> None:
        print(f"async-rl: warning: {self._hello['name']}: {sentence}", file=sys.stderr, flush=True)

    def _beat(self) -> None:
        self._send("beat", {"cpu_s": cpu_seconds(), "rss_bytes": rss_bytes(), **self._beat_info()})

    def _send(self, kind: str, fields: dict[str, Any], payload: Payload = ()) -> None:
        self._seq += 1
        keys = [(item.ordinal, item.attempt) for item in payload]
        if kind == "fail":
            keys = [(fields["ordinal"], fields["attempt"])]
        with self._lock:
            for unacked in (self._unacked[key] for key in keys if key in self._unacked):
                unacked.due = time.monotonic() + self._period_s
        if payload:
            encode: Callable[..., list[Frame]] = encode_annotations if kind == "annotate" else encode_groups
            send_frames(self._socket, encode(kind, payload, seq=self._seq, **fields))
        else:
            header = {**fields, "type": kind, "schema": SCHEMA_VERSION, "seq": self._seq}
            self._socket.send(pack_header(header))

    def _end(self, error: Exception) -> None:
        self._over = True
        self._inbox.fail(error)


def _order(version: Mapping[str, Any]) -> tuple[int, int]:
    """Of a manifest, or of what was called live; see :attr:`async_rl.weights.manifest.Manifest.order`."""
    return int(version.get("epoch", 0)), int(version.get("version", -1))
