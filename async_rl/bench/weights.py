"""``bench weights``: from the learner's flat vector to bytes that each receiver has verified, in real processes.

    shm   learner.bench.publishing ──segment──► actors.bench.receiving           beside   one memcpy of the same bytes
    zmq   learner.bench.publishing ──segment──► WeightServer (here) ──loopback TCP──► actors.bench.receiving × N
                                                beside   ROUTER (here) ──the same frames──► DEALER that drops them

All times are wall-clock of one machine-wide clock: from the call of ``publish`` (shm), or from the announcement (zmq),
until the last receiver has verified every chunk. The memcpy goes into private memory that was written before; the
segment was written before as well, as it is from the third step of a run on. What the first version of a mapping costs
is a figure of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from async_rl.bench import weights_delta, weights_hosts
from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.bench.weights_stage import CHUNK_BYTES, Stage
from async_rl.errors import ConfigError

DEFAULT_BYTES = 500_000_000
BAR_SHM, BAR_ZMQ, BAR_TRANSFERS = 3.0, 0.6, 1.05
_MOST_RECEIVERS = 64
_WARMUP = 3
"""Two slots, and the copies of a host, are all touched after three versions."""


def weights(
    *,
    nbytes: int | None,
    receivers: str,
    relay: int = 0,
    delta: Path | None = None,
    repeats: int = REPEATS,
    out: Path | None = None,
) -> None:
    """Measure, print, and write JSON.

    Args:
        nbytes: of a version; rounded up to whole float32; None: what suits the measurement.
        receivers: numbers of processes that receive over TCP at the same time, with commas between.
        relay: instead of all else, let so many hosts send the weights on in trees of this fan-out.
        delta: instead of all else, send the difference of the two newest checkpoints of this run.
        repeats: measurements of each figure.
        out: the JSON file.

    Raises:
        ConfigError: ``receivers`` is something else.
    """
    counts = _parse(receivers)
    if delta is not None:
        show("weights, differences", weights_delta.differences(run=delta, repeats=repeats), out)
        return
    if relay:
        nbytes = nbytes or weights_hosts.DEFAULT_BYTES
        nbytes = -(-nbytes // 4) * 4
        told = [weights_hosts.hosts(nbytes=nbytes, count=count, fanout=relay, repeats=repeats) for count in counts]
        title = f"weights, relayed, {nbytes / 1e6:,.0f} MB"
        show(title, [*chain.from_iterable(told)], out, nbytes=nbytes, chunk_bytes=weights_hosts.CHUNK_BYTES)
        return
    nbytes = nbytes or DEFAULT_BYTES
    nbytes = -(-nbytes // 4) * 4
    with ExitStack() as stack:
        bench = Stage(stack, nbytes)
        figures = _shared_memory(bench, repeats)
        for count in counts:
            figures += _network(bench, count, repeats)
    show(f"weights, {nbytes / 1e6:,.0f} MB", figures, out, nbytes=nbytes, chunk_bytes=CHUNK_BYTES, warmup=_WARMUP)


def _parse(receivers: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in receivers.split(",")]
    if not all(1 <= count <= _MOST_RECEIVERS for count in counts):
        raise ConfigError(f"--receivers {receivers}: expected numbers from 1 to {_MOST_RECEIVERS}, such as 1,4")
    return counts


def _shared_memory(bench: Stage, repeats: int) -> list[Figure]:
    receiver = bench.receiver("shm")
    publish_ms: list[float] = []
    verify_ms: list[float] = []

    def ours() -> float:
        told, manifest = bench.publish()
        done = receiver.ask("fetch", manifest=manifest.to_wire())
        publish_ms.append(1e3 * told["publish_s"])
        verify_ms.append(1e3 * done["transfer_s"])
        return 1e3 * (float(told["publish_s"]) + float(done["transfer_s"]))

    def memcpy() -> float:
        return 1e3 * float(bench.publisher.ask("memcpy")["seconds"])

    whole, copies = paired(ours, memcpy, repeats, _WARMUP)
    receiver.close()
    name = "one memcpy into warm memory"
    return [
        Figure("shm: publish + map + verify", "ms", whole, name, copies, bar=BAR_SHM, at_most=True),
        Figure("shm: publish (copy, hash)", "ms", tuple(publish_ms[_WARMUP:]), name, copies),
        Figure("shm: map + verify", "ms", tuple(verify_ms[_WARMUP:]), name, copies),
        Figure("shm: map + verify, new mapping", "ms", tuple(verify_ms[:2])),
    ]


def _network(bench: Stage, count: int, repeats: int) -> list[Figure]:
    receivers = [bench.receiver("zmq") for _ in range(count)]
    raw_server, raw = bench.raw()
    transfers: list[float] = []
    cpu_ms: list[float] = []

    def ours() -> float:
        _, manifest = bench.publish()
        sent = bench.server.counts["bytes"]
        for receiver in receivers:
            receiver.say("fetch", manifest=manifest.to_wire())
        done = [receiver.hear() for receiver in receivers]
        transfers.append((bench.server.counts["bytes"] - sent) / bench.nbytes)
        cpu_ms.append(1e3 * sum(each["cpu_s"] for each in done))
        began = min(each["began"] for each in done)
        return bench.nbytes / 1e9 / (max(each["ended"] for each in done) - began)

    def baseline() -> float:
        return bench.nbytes / 1e9 / float(raw.ask("pull")["seconds"])

    rates, raw_rates = paired(ours, baseline, repeats, _WARMUP)
    for talker in (*receivers, raw):
        talker.close()
    raw_server.close()
    who = "1 receiver" if count == 1 else f"{count} receivers"
    until = "until it has verified" if count == 1 else "until all have verified"
    seconds = tuple(bench.nbytes / 1e9 / rate for rate in rates)
    return [
        Figure(f"zmq, {who}", "GB/s", rates, "raw pyzmq to one", raw_rates, bar=BAR_ZMQ if count == 1 else None),
        Figure(f"zmq, {who}: {until}", "s", seconds),
        Figure(f"zmq, {who}: bytes sent / payload", "×", tuple(transfers[_WARMUP:]), bar=BAR_TRANSFERS, at_most=True),
        Figure(f"zmq, {who}: CPU of all", "ms", tuple(cpu_ms[_WARMUP:])),
    ]
