"""The schedules of the ledger's properties with two faults more: the server dies, the learner loses its newest steps.

server dies: after any event, or within the write of one ─► what recovers is the living ledger, at the last whole event
learner dies: rewind to any step ─► the books close, nothing void is left, nothing is trained too often
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_helpers import annotation, answer, rules
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_ledger_properties import ACTORS, RARELY, Schedule, task_of

from async_rl.buffer import event_log
from async_rl.buffer.curriculum import Curriculum
from async_rl.buffer.journal import Frozen, freeze, restore, thaw
from async_rl.buffer.journaled import JournaledLedger, start
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.replay import recover
from async_rl.buffer.undo import undone


class Watched(JournaledLedger):
    """Remembers what it was after each event, by the size of the log."""

    trace: list[tuple[int, int, Frozen]]

    def _record(self, event: str, result: object, *args: Any, **kwargs: Any) -> None:
        super()._record(event, result, *args, **kwargs)
        if self._log is not None:
            self.trace.append((self._log._number, self._log._size, freeze(self)))

    def _record_issues(self) -> None:
        has_issued = bool(self._issues)
        super()._record_issues()
        if has_issued and self._log is not None:
            self.trace.append((self._log._number, self._log._size, freeze(self)))

    def start(self, folder: Path) -> None:
        start(self, folder)
        self.trace = [(0, len(event_log._MAGIC), freeze(self))]


def assert_same(one: Ledger, other: Ledger) -> None:
    """All that decides what they do next is the same."""
    a, b = freeze(one), freeze(other)
    assert a.fields.keys() == b.fields.keys()
    for name in a.fields:
        assert json.dumps(a.fields[name]) == json.dumps(b.fields[name]), name
    for g, h in zip(a.groups, b.groups, strict=True):
        assert g.arrays.keys() == h.arrays.keys()
        assert all(np.array_equal(g.arrays[name], h.arrays[name]) for name in g.arrays)
        np.testing.assert_array_equal(g.rewards, h.rewards)
    assert (one.held_bytes, +one.leases, one.outstanding) == (other.held_bytes, +other.leases, other.outstanding)
    assert list(one.open) == list(other.open)
    assert [o for o, *_ in sorted(one.retry)] == [o for o, *_ in sorted(other.retry)]


class Faults(Schedule):
    def fresh_ledger(self) -> Ledger:
        self.folder = tempfile.TemporaryDirectory()
        self.lives = 0
        ledger = Watched(self.rules, task_of)
        ledger.start(self.journal)
        return ledger

    @property
    def journal(self) -> Path:
        """Each life of the server reads a copy of what the one before has left."""
        return Path(self.folder.name) / str(self.lives)

    def resumed(self, frozen: Frozen) -> Ledger:
        self.ledger.detach(remove=True)
        self.lives += 1
        ledger = Watched(self.rules, task_of)
        restore(frozen, ledger, self.now, keep_open=False)
        ledger.start(self.journal)
        return ledger

    # -------------------------------------------------------------- the server

    @rule()
    def compact(self):
        self.ledger.compact()

    @rule(name=st.sampled_from("xy"), value=st.integers(0, 9))
    def note(self, name, value):
        self.ledger.note(name, {"value": value})

    @rule(clock=st.sampled_from([0.0, 3.0, 20.0]))
    def server_dies(self, clock):
        """Whatever was answered is on record."""
        living, trace = self.ledger, self.ledger.trace
        left = self.left_behind()
        self.now += clock
        self.ledger = recover(left, self.rules, task_of, None, self.now)
        self.ledger.__class__, self.ledger.trace = Watched, trace
        Ledger.rejoin(living, self.now)
        assert_same(living, self.ledger)
        for stage in self.rules.stages:
            assert self.ledger.scoring.queues[stage].leases.total() == 0
        scored = {e.ordinal for e in self.ledger.scoring.values()}
        self.annotated = [(s, a) for s, a in self.annotated if a.ordinal not in scored]  # its answers are forgotten

    @rule(data=st.data(), chance=st.booleans())
    def server_dies_while_it_writes(self, data, chance):
        """A record that is not whole was not answered: the ledger is as before it."""
        if not chance:
            return
        living = self.ledger
        before = self.journal
        left = self.left_behind()
        newest = max(left.glob("events-*.bin"), key=lambda p: int(p.stem.partition("-")[2]))
        number = int(newest.stem.partition("-")[2])
        sizes = [size for n, size, _ in living.trace if n == number]
        first = sizes[-8:][0] if sizes else len(event_log._MAGIC)
        cut = data.draw(st.integers(first, newest.stat().st_size))
        os.truncate(newest, cut)
        expected = [frozen for n, size, frozen in living.trace if n < number or (n == number and size <= cut)][-1]
        back = recover(left, self.rules, task_of, None, self.now)
        back.detach(remove=True)
        wanted = thaw(expected, self.rules, task_of, None, self.now, keep_open=True)
        wanted.rejoin(self.now)
        assert_same(wanted, back)
        self.lives -= 1  # the living one goes on
        assert self.journal == before

    def left_behind(self) -> Path:
        """What a dead server leaves, as a folder of its own."""
        self.ledger._log.flush()
        before = self.journal
        self.lives += 1
        shutil.copytree(before, self.journal, dirs_exist_ok=True)
        return self.journal

    # -------------------------------------------------------------- the learner

    @rule(data=st.data(), chance=RARELY)
    def learner_dies(self, data, chance):
        if chance > 1:
            return
        books, old = self.ledger, self.ledger.version
        step, epoch, books_before = data.draw(st.integers(0, old)), books.epoch, books.books()
        holders = {(e.actor, *e.key) for e in books.open.values()}
        lost = books.rewind(step, undone(self.rows, step))
        assert (books.version, books.next_step, books.epoch) == (step, step, epoch + (step < old))
        assert {(x.actor, x.ordinal, x.attempt) for x in lost} == (holders if step < old else set())
        self.batches = {}
        if step == old:
            books_before["ready"], books_before["delivered"] = books_before["ready"] + books_before["delivered"], 0
            assert books.books() == books_before
            return
        self.rows = [row for row in self.rows if row["step"] < step]
        self.live = dict.fromkeys(ACTORS, step)
        assert not any((e.payload.arrays["versions"] > step).any() for e in self.entries())
        if self.checkpoint.fields["version"] > step:
            self.checkpoint = self.plain()

    @rule(data=st.data(), count=st.integers(2, 4))
    def some_steps(self, data, count):
        """So that there is something to lose."""
        for _ in range(count):
            self.go_on(data, 4, data.draw(st.sampled_from(ACTORS)))

    @invariant()
    def what_was_trained_is_what_the_rows_say(self):
        trained = {key for row in self.rows for key in zip(row["ordinals"], row["attempts"], strict=True)}
        assert len({ordinal for ordinal, _ in trained}) == len(trained)  # one attempt of an ordinal, if any
        used = Counter(key for row in self.rows for key in zip(row["ordinals"], row["attempts"], strict=True))
        alive = {e.key: e.uses for e in self.entries() if e.uses}
        assert all(used[key] == uses for key, uses in alive.items())
        assert self.ledger.trained == len(trained) - len(alive)

    @invariant()
    def what_is_trained_is_counted(self):
        """Two sequences of one or two tokens a group."""
        tally, uses = self.ledger.tally, self.uses.total()
        assert tally.sequences["trained"] == 2 * uses
        assert tally.ages.total() == tally.tokens["trained"]
        assert 2 * uses <= tally.tokens["trained"] <= 4 * uses
        assert max(tally.ages, default=0) <= self.rules.max_staleness

    @invariant()
    def nothing_is_of_a_version_that_does_not_exist(self):
        held = [e for e in self.entries() if e.group is not None]
        assert all(e.payload.arrays["versions"].max() <= self.ledger.version for e in held)
        assert all(e.version <= self.ledger.version for e in self.entries())

    def teardown(self):
        super().teardown()
        if hasattr(self, "folder"):
            self.ledger.detach(remove=True)
            self.folder.cleanup()


class AtOnce(Executor):
    """No thread, so that a schedule is the same each time."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


@pytest.fixture(autouse=True, scope="module")
def _small_logs():
    """New bases are written all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_log, "LEAST_BYTES", 3000)
        patch.setattr(event_log, "ThreadPoolExecutor", AtOnce)
        yield


Faults.TestCase.settings = settings(
    max_examples=35,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestFaults = Faults.TestCase


# ---------------------------------------------------------------------- a real process, killed


STEPS = 4000


def schedule(ledger: Ledger, acted: Any) -> None:
    """A run as it goes, with a curriculum and both stages; ``acted()`` after each answer, and the clock in tenths."""
    now = 0
    for step in range(STEPS):
        while (ticket := ledger.issue("ab"[now % 2], step, now / 10)) is not None:
            now += 1
            acted()
            if now % 11 == 0:
                ledger.fail("ab"[(now - 1) % 2], ticket.ordinal, ticket.attempt, "verifier", final=False)
            else:
                rewards = (0.0, float(ticket.task_index % 2))
                ledger.submit("ab"[(now - 1) % 2], answer(ticket, rewards=rewards), now / 10)
            acted()
            for stage in ledger.rules.stages:
                while (group := ledger.lease(stage, "s", now / 10)) is not None:
                    acted()
                    ledger.annotate("s", annotation(group, stage), now / 10)
                    acted()
        ledger.note("step", {"step": step})
        acted()
        ledger.deliver()
        acted()
        ledger.train(step)
        acted()
        if step % 50 == 49:
            ledger.rewind(step + 1, [])
            acted()


def scheduled(cls: type[Ledger]) -> Ledger:
    return cls(
        rules(steps=STEPS, max_staleness=1, stages=("reward", "reference"), max_uses=2),
        task_of,
        Curriculum(task_of, seed=3),
    )


class _Enough(Exception):
    pass


@pytest.mark.real
@pytest.mark.parametrize("answers", [37, 900, 2500])
def test_a_server_that_is_killed_at_any_moment_comes_back_with_all_that_it_answered(tmp_path, answers):
    command = [sys.executable, __file__, str(tmp_path / "journal")]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as child:
        assert child.stdout is not None
        told = child.stdout.read(answers)
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read()  # what it had answered by then
    assert answers <= len(told)
    fresh = scheduled(JournaledLedger)
    back = recover(tmp_path / "journal", fresh.rules, task_of, fresh.curriculum, 0.0)
    back.detach(remove=True)
    acted = 0
    expected = scheduled(Ledger)

    def act() -> None:
        nonlocal acted
        acted += 1
        # Killed between a record and the byte that tells of it, the ledger is one event ahead.
        if acted in (len(told), len(told) + 1):
            twin = thaw(freeze(expected), expected.rules, task_of, Curriculum(task_of, seed=3), keep_open=True)
            twin.rejoin(0.0)
            twins.append(twin)
        if acted > len(told):
            raise _Enough

    twins: list[Ledger] = []
    with pytest.raises(_Enough):
        schedule(expected, act)
    assert_same(next((t for t in twins if freeze(t).fields == freeze(back).fields), twins[0]), back)


if __name__ == "__main__":
    event_log.LEAST_BYTES = 30_000
    ledger = scheduled(JournaledLedger)
    start(ledger, Path(sys.argv[1]))
    schedule(ledger, lambda: os.write(1, b"."))
