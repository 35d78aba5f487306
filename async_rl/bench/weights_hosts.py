"""``bench weights --relay K``: many hosts that send a version on to each other, beside one that pulls it alone.

    learner.bench.publishing ─► WeightServer ─► link ─┬─► host 0 ─► link ─┬─► ...       a process each, links paced
                                                      └─► host 1          └─► ...       trees: async_rl/weights/tree.py

A link carries :data:`LINK_BYTES_S` out of its host, so slow that sixteen of them together are no load for this machine:
what is measured is what the links carry, not how fast loopback is.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from async_rl.bench.figures import Figure, paired
from async_rl.bench.weights_parts import Talker
from async_rl.bench.weights_stage import Stage
from async_rl.weights.tree import addressed, parents

LINK_BYTES_S = 20e6
CHUNK_BYTES = 256 << 10
DEFAULT_BYTES = 20_000_000
BAR_LEARNER, BAR_TIME = 5.0, 2.0
_WARMUP = 2


def hosts(*, nbytes: int, count: int, fanout: int, repeats: int) -> list[Figure]:
    """Measure.

    Args:
        nbytes: of a version.
        count: hosts.
        fanout: of the trees, as ``weights.relay``.
        repeats: measurements of each figure.
    """
    with ExitStack() as stack:
        stage = Stage(stack, nbytes, chunk_bytes=CHUNK_BYTES)
        links = stage.start("async_rl.bench.links", str(LINK_BYTES_S))
        [learner] = links.ask("open", addresses=[stage.server.address])["addresses"]
        alone = stage.host("alone", learner)
        others = [stage.host(f"host{number}", learner) for number in range(count)]
        addresses = links.ask("open", addresses=[host.ask("address")["address"] for host in others])["addresses"]
        rows = [[[p.address, p.depth] for p in addressed(row, addresses)] for row in parents(count, fanout)]
        return _measure(stage, alone, others, rows, repeats)


def _measure(
    stage: Stage, alone: Talker, others: list[Talker], rows: list[list[list[Any]]], repeats: int
) -> list[Figure]:
    out_of_learner: list[float] = []

    def ours() -> float:
        _, manifest = stage.publish()
        sent = stage.server.counts["bytes"]
        for host, row in zip(others, rows, strict=True):
            host.say("fetch", manifest=manifest.to_wire(), parents=row)
        done = [host.hear() for host in others]
        out_of_learner.append((stage.server.counts["bytes"] - sent) / stage.nbytes)
        return float(max(each["ended"] for each in done) - min(each["began"] for each in done))

    def one() -> float:
        done = alone.ask("fetch", manifest=stage.publish()[1].to_wire())
        return float(done["ended"] - done["began"])

    all_s, one_s = paired(ours, one, repeats, _WARMUP)
    name = f"{len(others)} hosts, fan-out {len(rows[0])}, {LINK_BYTES_S / 1e6:g} MB/s out of each"
    return [
        Figure(f"{name}: until all have verified", "s", all_s, "one alone", one_s, bar=BAR_TIME, at_most=True),
        Figure(
            f"{name}: bytes out of the learner / payload",
            "×",
            tuple(out_of_learner[_WARMUP:]),
            bar=BAR_LEARNER,
            at_most=True,
        ),
    ]
