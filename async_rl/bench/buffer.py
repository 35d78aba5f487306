"""``bench buffer``: how many trajectories a second the buffer server takes, and how long an actor waits for the answer.

    mock actors, mock learner (load.py, one thread here) ◄─ loopback TCP ─► the real server, journal on (served.py)
    as many DEALERs (load_bare.py, the same thread)      ◄─ loopback TCP ─► a bare ROUTER that acknowledges each message

A trajectory is one sequence of about ``--bytes`` bytes (13 a token: token, mask, log-probability, version). The server
is sent groups, each with a ticket and a row of an acknowledgement of its own, and is measured with groups of one
trajectory, where each pays for these, and with groups of the default size. What an actor has to send at one moment goes
as one message, as a client's thread sends it. *Sustained*: each ticket is answered
as soon as it comes, and the learner takes every step as soon as it is full and calls it trained. *Latency*: groups fall
due at random moments (Poisson) at half of the rate that is asked for, whatever the server does; from then to the
acknowledgement.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.bench.load import Load
from async_rl.bench.load_bare import BareLoad
from async_rl.bench.served import EchoProcess, ServerProcess
from async_rl.errors import AsyncRLError

BAR_RATE, BAR_P99_MS = 15_000.0, 5.0
"""Trajectories per second; milliseconds at half of that."""
GROUP_SIZES = (1, 8)
"""Trajectories of a group; the second is the default of ``sampling.group_size``."""
_STEP = 256
"""Trajectories of a learner step."""
_IN_FLIGHT = 512
"""Tickets that all actors hold together."""


def buffer(*, nbytes: int, actors: int, seconds: float, repeats: int = REPEATS, out: Path | None = None) -> None:
    """Measure, print, and write JSON.

    Args:
        nbytes: of a trajectory.
        actors: connections.
        seconds: of each measurement.
        repeats: measurements of each figure.
        out: the JSON file.
    """
    figures: list[Figure] = []
    for size in GROUP_SIZES:
        with _both(nbytes, actors, size) as (server, load, bare):
            figures += _measure(server, load, bare, size, seconds, repeats)
    show(
        f"buffer, {nbytes} bytes a trajectory, {actors} actors",
        figures,
        out,
        nbytes=nbytes,
        actors=actors,
        seconds=seconds,
        trajectories_per_step=_STEP,
    )


@contextmanager
def _both(nbytes: int, actors: int, size: int) -> Iterator[tuple[ServerProcess, Load, BareLoad]]:
    """The server under load, and the bare socket under the same."""
    stock = max(2, _IN_FLIGHT // actors)
    with (
        tempfile.TemporaryDirectory(prefix="async-rl-bench-") as folder,
        ServerProcess(Path(folder) / "s", groups_per_step=_STEP // size, group_size=size, max_staleness=2) as server,
        EchoProcess(Path(folder) / "e") as echo,
        Load(server, num_actors=actors, nbytes=nbytes, stock=stock) as load,
        BareLoad(
            echo.address, num_actors=actors, size=size, nbytes=nbytes, stock=stock, beside=load.keep_alive
        ) as bare,
    ):
        yield server, load, bare


def _measure(
    server: ServerProcess, load: Load, bare: BareLoad, size: int, seconds: float, repeats: int
) -> list[Figure]:
    cpu_us: list[float] = []

    def sustained() -> float:
        before = server.cpu_s()[0]
        rate, count = load.closed_loop(seconds)
        if not count:
            raise AsyncRLError(f"the server has acknowledged nothing in {seconds:g} s; raise --seconds")
        cpu_us.append(1e6 * (server.cpu_s()[0] - before) / (count * size))
        return rate * size

    def latency(seed: int) -> float:
        return 1e3 * float(np.quantile(load.open_loop(BAR_RATE / 2 / size, seconds, seed), 0.99))

    name = f"groups of {size}"
    ours, theirs = paired(sustained, lambda: bare.closed_loop(seconds)[0] * size, repeats)
    waits = tuple(latency(seed) for seed in range(repeats))
    return [
        Figure(f"{name}, sustained", "trajectories/s", ours, bar=BAR_RATE),
        Figure(f"{name}, beside a bare ROUTER", "trajectories/s", ours, "bare pyzmq", theirs),
        Figure(f"{name}, server's main thread", "µs CPU/trajectory", tuple(cpu_us[-repeats:])),
        Figure(f"{name}, p99 at {BAR_RATE / 2:,.0f}/s", "ms", waits, bar=BAR_P99_MS, at_most=True),
    ]
