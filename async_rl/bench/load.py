"""Load on a buffer server: many mock actors and a mock learner, on real sockets, in one thread of this process.

closed loop: each ticket is answered as soon as it comes       open loop: answers fall due at random moments (Poisson)
between them, while the thread does something else, keep_alive: nobody is taken for dead
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import zmq

from async_rl.bench.load_clients import Line, MockActor, MockLearner
from async_rl.bench.load_messages import Template
from async_rl.bench.served import ServerProcess
from async_rl.errors import DeadlineError
from async_rl.process import spare_what_is_loaded

SILENCE_S = 30.0
"""A server that says nothing for so long does not answer any more."""
_LOOK_MS = 50


class Load:
    """Mock actors and a learner on one server. Use as a context manager.

    Args:
        server: what is loaded.
        num_actors: connections of actors.
        nbytes: of a trajectory.
        stock: tickets that an actor holds at most.
    """

    def __init__(self, server: ServerProcess, *, num_actors: int, nbytes: int, stock: int) -> None:
        self._context = zmq.Context()
        template = Template(server.config.group_size, nbytes)
        self._learner = MockLearner(self._context, server)
        self._actors = [MockActor(self._context, server, f"a{i}", template, stock) for i in range(num_actors)]
        self._lines: list[Line] = [self._learner, *self._actors]
        self._poller = zmq.Poller()
        for line in self._lines:
            self._poller.register(line.socket, zmq.POLLIN)
        self._heard = 0.0
        """When something was acknowledged, or a loop began."""

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)

    def closed_loop(self, seconds: float) -> tuple[float, int]:
        """Each ticket is answered as soon as it comes; returns groups acknowledged per second, and in all.

        What is on its way at the end is waited for, and counts no more.
        """
        count = 0

        def heard(due: float) -> None:
            nonlocal count
            count += 1
            self._heard = now

        now = began = self._heard = time.monotonic()
        while now < began + seconds:
            self._wait(now, _LOOK_MS)
            now = time.monotonic()
            self._learner.turn()
            for actor in self._actors:
                actor.turn(heard)
                while actor.submit(now):
                    pass
                actor.flush()
                actor.offer()
        rate = count / (self._heard - began) if count else 0.0
        self._drain()
        return rate, count

    def open_loop(self, rate: float, seconds: float, seed: int) -> list[float]:
        """Answers fall due at random moments (Poisson), whatever the server does; returns seconds until each ack.

        What cannot be sent when it is due, because no ticket is there or this thread is late, counts from when it was
        due.
        """
        noise = np.random.default_rng(seed)
        gaps = noise.exponential(1 / rate, max(1, int(rate * seconds)))
        spare_what_is_loaded()  # or this thread looks through it now and then, and is late
        began = self._heard = time.monotonic()
        dues = (began + np.cumsum(gaps)).tolist()
        latencies: list[float] = []

        def heard(due: float) -> None:
            self._heard = time.monotonic()
            latencies.append(self._heard - due)

        sent = 0
        while len(latencies) < len(dues):
            now = time.monotonic()
            has_ticket = True
            while has_ticket and sent < len(dues) and dues[sent] <= now:
                has_ticket = self._submit(sent, dues[sent])
                sent += has_ticket
            for actor in self._actors:
                actor.flush()
            left_ms = 1000 * (dues[sent] - now) if sent < len(dues) and has_ticket else _LOOK_MS
            self._wait(now, max(0.0, left_ms))
            self._turn(heard)
        return latencies

    def keep_alive(self) -> None:
        """Beat, and take what has arrived; call it while this thread does something else."""
        now = time.monotonic()
        for line in self._lines:
            line.beat(now)
        self._turn(lambda due: None)

    def _submit(self, number: int, due: float) -> bool:
        """Answer a ticket of the actor whose turn it is, or of the next that has one."""
        first = number % len(self._actors)
        return any(actor.submit(due) for actor in (*self._actors[first:], *self._actors[:first]))

    def _drain(self) -> None:
        """Wait until all that was sent is acknowledged, so that it is not taken for what comes next."""
        while any(actor.sent for actor in self._actors):
            self._wait(time.monotonic(), _LOOK_MS)
            self._turn(lambda due: None)

    def _turn(self, heard: Callable[[float], None]) -> None:
        self._learner.turn()
        for actor in self._actors:
            actor.turn(heard)

    def _wait(self, now: float, most_ms: float) -> None:
        """Until something arrives.

        Raises:
            DeadlineError: nothing was acknowledged for :data:`SILENCE_S`.
        """
        if now - self._heard > SILENCE_S:
            raise DeadlineError(f"the server has acknowledged nothing for {SILENCE_S:g} s")
        for line in self._lines:
            line.beat(now)
        self._poller.poll(math.ceil(most_ms))
