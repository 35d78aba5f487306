"""A run that a server is to recover: its start, one step of it, what must hold of its books."""

from __future__ import annotations

from pathlib import Path

from service_helpers import Bench

from async_rl.config import Config

HEARTBEAT_S = 5.0


def started(settings: Config, out: Path) -> Bench:
    """A learner and an actor at the start version."""
    bench = Bench(settings, out)
    bench.learner()
    bench.join("actor", "a")
    bench.live("a", 0)
    return bench


def run_step(bench, step, epoch=0):
    """One actor makes what a step needs, the learner trains it, the actor follows."""
    bench.submit("a", bench.tickets("a", 2))
    assert bench.shard(step)
    bench.train(step, epoch)
    bench.live("a", step + 1, epoch)


def kinds(headers):
    return [h["type"] for h in headers]


def closes(ledger):
    books = ledger.books()
    return books["issued"] == sum(books.values()) - books["issued"]
