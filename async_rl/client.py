"""The other end of the line to the buffer server: used by actors, scorers, the evaluator, learner ranks, the launcher.

    main thread ── send, send_groups ──► queue ──► I/O thread ── DEALER ──► server
                ◄─ receive, request ─── inbox ◄── (beats, repeats what is not acknowledged, rejoins after a break)

The I/O thread owns the socket and beats by itself, so that a busy main thread is not taken for dead. Delivery: in order
while the connection lasts; groups are repeated until the server has acknowledged them, and the server counts them once.

A scorer: ``Client(..., "scorer", name, contract, stage="reward")``, then ``send("credit", count=n)`` with the groups
that it can take *now*, beside those it has. A ``lease`` arrives in :meth:`Client.receive` as ``(header, frames)`` for
:func:`async_rl.wire.decode_groups`; it lasts ``header["lease_s"]`` seconds. Each of its groups is answered with
:meth:`Client.send_annotations`, or with ``send("fail", ordinal=..., attempt=..., reason=..., detail=..., final=...)``:
final filters the task, else another scorer tries. The ``ack`` arrives in ``receive``; a scorer that is ``refused``
again and again is broken and should say so (``fatal``).
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from async_rl.connection import Connection
from async_rl.curve import ClientKeys
from async_rl.data import Annotation, Group
from async_rl.errors import DeadlineError, HandshakeError
from async_rl.inbox import Inbox, Message
from async_rl.process import host_id
from async_rl.protocol import PROTOCOL_VERSION, Role, is_answer
from async_rl.wire import SCHEMA_VERSION, Header

_LOOK_S = 0.5
"""A wait looks so often whether its deadline has passed; an arriving message ends it at once."""

_WORK = {"tickets": "tickets", "lease": "groups"}
"""Messages that use up credit, with the field that lists what they bring."""


class Stopped(Exception):
    """The server said stop while an answer was awaited."""

    def __init__(self, reason: str, error: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


class Client:
    """One connection. Use as a context manager; call everything but :meth:`fileno` from one thread.

    Args:
        address: of the server, ``tcp://HOST:PORT``.
        role: what this process is.
        name: unique in the run; a newcomer with the same name takes the place of the old client.
        contract: :meth:`async_rl.config.Config.contract_hash`.
        rank: of a learner.
        world: ranks of the learner group.
        stage: of a scorer: one of :data:`async_rl.protocol.STAGES`.
        step: that a learner continues with.
        group: of a learner: names this life of the group, the same on all its ranks.
        base: :func:`async_rl.base_checksum.base_of` the run.
        keys: of a server that lets in only those whom it knows.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        name: str,
        contract: str,
        *,
        rank: int = 0,
        world: int = 1,
        stage: str = "",
        step: int = 0,
        group: str = "",
        base: str = "",
        keys: ClientKeys | None = None,
    ) -> None:
        self.beat_info: Callable[[], dict[str, Any]] = dict
        """Called from the I/O thread: ``timer`` (:meth:`async_rl.timer.StateTimer.drain`), ``in_flight``, ``info``."""
        self.dismissed: Callable[[HandshakeError], None] = lambda error: None
        """Called from the I/O thread when the server has let us go: the main thread may be inside a collective."""
        self._address = address
        self._inbox = Inbox()
        self._held: deque[Message] = deque()
        self._closed = False
        hello = {
            "protocol": PROTOCOL_VERSION,
            "schema": SCHEMA_VERSION,
            "contract": contract,
            "role": role,
            "name": name,
            "pid": os.getpid(),
            "host": host_id(),
            "rank": rank,
            "world": world,
            "stage": stage,
            "step": step,
            "group": group,
            "base": base,
        }
        self._line = Connection(
            address, hello, self._inbox, lambda: self.beat_info(), keys, lambda error: self.dismissed(error)
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self, timeout_s: float, give_up: Callable[[], bool] = lambda: False) -> Header:
        """Say hello and return the ``welcome``.

        Args:
            timeout_s: longest wait.
            give_up: looked at meanwhile.

        Raises:
            Stopped: ``give_up`` says so.
            HandshakeError: the server refuses us; its own sentence.
            DeadlineError: nothing answered in time.
        """
        self._line.start()
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for header, frames in self._take(min(left_s, _LOOK_S)):
                if header["type"] == "welcome":
                    return {**header, "weights_address": self.weights_address}
                self._held.append((header, frames))
            if give_up():
                raise Stopped("this process was asked to end", False)
        raise DeadlineError(
            f"no answer from {self._address} within {timeout_s:g} s: the learner host is not running, the address is "
            "wrong, or the server has keys (buffer.keys) and does not know ours"
        )

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message without arrays."""
        self._line.put(kind, fields, [])

    def send_groups(self, groups: Sequence[Group], kind: str = "submit", /, **fields: Any) -> None:
        """Send groups; they are kept, and sent again, until the server has acknowledged them."""
        self._line.put(kind, fields, groups)

    def send_annotations(self, annotations: Sequence[Annotation]) -> None:
        """Send what a scorer's stage adds to leased groups; kept, and sent again, until the server has acknowledged it.

        The server answers each with ``ack`` [ordinal, attempt, outcome, reason]: ``accepted``; ``filtered`` (the group
        is of no use, e.g. ``zero_variance``); ``late`` (the group has moved on, or another scorer was faster);
        ``refused`` (wrong shape, not finite: counts as a failed try).
        """
        self._line.put("annotate", {}, annotations)

    @property
    def unacked(self) -> int:
        """Groups, annotations or failed attempts that the server has not acknowledged yet."""
        return self._line.unacked

    @property
    def weights_address(self) -> str:
        """Where versions are pulled from, by the server's newest word.

        A server that listens on all interfaces names no host: it is the one that we reached.
        """
        weights, host = self._line.weights_address, self._address.rpartition(":")[0]
        for everywhere in ("tcp://0.0.0.0", "tcp://*", "tcp://[::]"):
            if weights.startswith(everywhere + ":"):
                return host + weights.removeprefix(everywhere)
        return weights

    def receive(self, timeout_s: float) -> list[Message]:
        """What has arrived, at once if there is something, else after at most ``timeout_s``; possibly nothing.

        Raises:
            DeadlineError: the server has been silent for :data:`async_rl.protocol.SERVER_GONE_S`.
            HandshakeError: the server has let us go; its own sentence.
        """
        held = list(self._held)
        self._held.clear()
        return held + self._take(0.0 if held else timeout_s)

    def request(
        self,
        kind: str,
        answer: str,
        /,
        deadline_s: float | None = None,
        give_up: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> Message:
        """Send a message and wait for its answer, see :meth:`answer`; ``give_up`` is looked at before sending, too."""
        if give_up():
            raise Stopped("this process was asked to end", False)
        self.send(kind, **fields)
        return self.answer(kind, answer, deadline_s, give_up, **fields)

    def answer(
        self,
        kind: str,
        answer: str,
        /,
        deadline_s: float | None = None,
        give_up: Callable[[], bool] = lambda: False,
        **fields: Any,
    ) -> Message:
        """Wait for the answer to a message that was sent; what else arrives is kept for :meth:`receive`.

        The server may be started again meanwhile: what is asked for here is asked again.

        Args:
            kind: type of the message.
            answer: type of the answer.
            deadline_s: longest wait; ``None``: as long as the server lives, or comes back in time.
            give_up: looked at while the answer is awaited.
            fields: of the message.

        Raises:
            Stopped: the server says stop instead, or ``give_up`` does. A stop that names a step answers ``next`` alone.
            DeadlineError: no answer in time, or the server has gone silent.
            HandshakeError: the server has let us go.
        """
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        arrived: Sequence[Message] = [*self._held]
        self._held.clear()
        while True:
            found = None
            for header, frames in arrived:
                is_stop = header["type"] == "stop" and (kind == "next" or "step" not in header)
                if is_stop and is_answer(fields, header):
                    raise Stopped(str(header.get("reason", "")), bool(header.get("error", False)))
                if header["type"] != answer:
                    self._held.append((header, frames))
                elif is_answer(fields, header):  # another one is a repeated answer to an earlier question
                    found = (header, frames)
            if found is not None:
                return found
            if give_up():
                raise Stopped("this process was asked to end", False)
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"the server at {self._address} did not answer {kind!r} within {deadline_s:g} s")
            left_s = math.inf if deadline is None else deadline - time.monotonic()
            arrived = self._take(min(left_s, _LOOK_S))

    def fileno(self) -> int:
        """Readable while :meth:`receive` has something to return or to raise; for ``select`` with other sources."""
        return self._inbox.fileno()

    def close(self) -> None:
        """Say goodbye and free the socket; what is on its way has a moment to leave. Closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._line.close()
            self._inbox.close()

    def _take(self, timeout_s: float) -> list[Message]:
        messages = self._inbox.take(max(0.0, timeout_s))
        self._line.handed_over(sum(len(h.get(_WORK[h["type"]], ())) for h, _ in messages if h["type"] in _WORK))
        return messages
