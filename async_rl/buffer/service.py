"""The server without its socket: messages in, messages out, the clock passed in.

handle(identity, frames) ─► desk of the sender ─► ledger        pump() ─► shards, tickets
tick() ─► silent clients, leases, watchdog, deadlines           post.take() ─► what to send

Who comes and goes is in reception.py, how the run ends in ending.py. A restarted server is given the ledger that its
journal tells of; what the service itself must know again lies in the ledger's notes: ``versions``, ``phase``,
``clients``, ``learner``, ``batches``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from async_rl.buffer.account import Account
from async_rl.buffer.actor_desk import ActorDesk
from async_rl.buffer.alarms import hung_learner_text, missing_learner_text, overdue_text
from async_rl.buffer.broadcasts import Broadcasts
from async_rl.buffer.ending import Ending
from async_rl.buffer.fields import natural, number, numbers, pairs, shown, spans, take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.journaled import JournaledLedger
from async_rl.buffer.learner_desk import LearnerDesk
from async_rl.buffer.muster import Muster
from async_rl.buffer.partners import Partners
from async_rl.buffer.post import Post
from async_rl.buffer.reception import Reception
from async_rl.buffer.records import Overdue
from async_rl.buffer.relays import Relays
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.run_lines import add_missing_batches
from async_rl.buffer.scorer_desk import ScorerDesk
from async_rl.buffer.versions import Versions
from async_rl.config import RunConfig
from async_rl.config.shared import shared_settings
from async_rl.errors import ConfigError, WeightsError, WireError
from async_rl.protocol import ROLES, Role
from async_rl.weights.manifest import Manifest
from async_rl.wire import Frame, Header, unpack_header

_NO_JOURNAL = (
    "the journal cannot be written, until the next checkpoint: a server that dies before goes on from the newest one"
)
_BOOKS_S, _BOOKS_AT_ONCE = 1.0, 8
"""For the sake of trained steps alone the books are written so often, in seconds; and so many times at once before."""
_MOST_GAPS = 1 << 53
_MOST_REASON = 4000
"""Characters of a sentence with which a client ends the run: it goes into the books."""
_TRAINING = ("next", "trained", "snapshot")


class Weights(Protocol):
    """The chunk server; :class:`async_rl.weights.server.WeightServer`."""

    @property
    def address(self) -> str:
        """Where receivers pull from."""

    def serve(self, manifest: Manifest) -> None:
        """Hold this version from now on."""


class Service:
    """One run's server.

    Args:
        config: the run.
        ledger: fresh, restored from a checkpoint, or recovered.
        files: run folder.
        weights: serves published versions to other hosts.
        run_id: names the run.
        now: the clock.
        wake: makes the socket loop turn; called from other threads.
        recovered: the ledger is the one of a server that died: its clients go on.
        disowned: group name of a learner that has steps which this ledger does not know, after the loss of a journal.
        base: checksum of the model to which an adapter is trained; empty: none is trained.

    Raises:
        ConfigError: the notes of a recovered ledger are not those of a service.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: JournaledLedger,
        files: RunFiles,
        weights: Weights,
        run_id: str,
        now: float,
        wake: Callable[[], None],
        *,
        recovered: bool = False,
        disowned: str | None = None,
        base: str = "",
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.roster = Roster()
        self.post = Post()
        self.refused: Counter[str] = Counter()
        self.versions = _versions(config, ledger, ledger.notes.get("versions") if recovered else None, now)
        self.account = Account(ledger, self.roster, self.versions, self.refused, run_id)
        self._files = files
        self._weights = weights
        self._began = now
        self._last_tick = now
        self._has_news = False
        self._books_due = False
        self._next_books = now - _BOOKS_AT_ONCE * _BOOKS_S
        self._num_waiting = 0
        self._actors = ActorDesk(
            ledger, self.roster, self.post, self.versions, files, self.refused, colocated=config.actors.colocated
        )
        self._scorers = ScorerDesk(ledger, self.roster, self.post, files, self.refused)
        self._broadcasts = Broadcasts(config.weights, self.roster, self.post, self.versions.broadcasts)
        self._learners = LearnerDesk(
            ledger,
            self.roster,
            self.post,
            files,
            self.versions,
            self._broadcasts,
            config.split_minibatches,
            self.account.shard_stats,
            wake,
            now,
        )
        self._muster = Muster(self.post, self.roster, shared_settings(config))
        self._partners = Partners(self.roster, config.buffer.heartbeat_s)
        self._relays = Relays(config.weights, self.roster, self.post, self.versions)
        self.ending = Ending(ledger, self.roster, self.post, self.account, config.steps, self._publish)
        self._reception = Reception(
            config=config,
            run_id=run_id,
            weights_address=weights.address,
            ledger=ledger,
            roster=self.roster,
            post=self.post,
            refused=self.refused,
            versions=self.versions,
            account=self.account,
            files=files,
            actors=self._actors,
            scorers=self._scorers,
            learners=self._learners,
            muster=self._muster,
            ending=self.ending,
            publish=self._publish,
            tell_monitors=self._tell_monitors,
            base=base,
        )
        if disowned is not None:
            self._learners.disown(disowned)
        if recovered:
            self._restore(now)
        self._handlers: dict[
            str, tuple[tuple[Role, ...], Callable[[Session, Header, Sequence[Frame], float], None]]
        ] = {
            "credit": (("actor", "scorer"), lambda s, h, f, now: s.take_credit(h)),
            "submit": (("actor",), self._actors.submit),
            "annotate": (("scorer",), self._scorers.annotate),
            "fail": (("actor", "scorer"), self._fail),
            "asleep": (("actor",), lambda s, h, f, now: self._actors.asleep(s)),
            "live": (("actor", "evaluator"), lambda s, h, f, now: self._actors.live(s, h)),
            "relay": (("actor",), lambda s, h, f, now: self._relays.register(s, h)),
            "receives": (("actor",), lambda s, h, f, now: self._broadcasts.register(s, h)),
            "broadcast": (("learner",), lambda s, h, f, now: self._broadcasts.hear(h)),
            "next": (("learner",), lambda s, h, f, now: self._learners.next(s, h)),
            "trained": (("learner",), lambda s, h, f, now: self._trained(s, h, now)),
            "snapshot": (("learner",), lambda s, h, f, now: self._learners.snapshot(s, h)),
            "trouble": (("learner",), lambda s, h, f, now: self._learners.take_trouble(h, now)),
            "done": (("learner",), lambda s, h, f, now: self._done(h, now)),
            "muster": (("recruit",), lambda s, h, f, now: self._muster.come(s, h, now)),
            "eval": (("evaluator",), lambda s, h, f, now: self._eval(s, h, now)),
            "dead": (("monitor",), lambda s, h, f, now: self._reception.dead(take(h, "name", str), now)),
            "stop": (
                ("monitor",),
                lambda s, h, f, now: self.ending.wind_down(take(h, "reason", str)[:_MOST_REASON], now),
            ),
            "beat": (ROLES, lambda s, h, f, now: self._beat(s, h, now)),
            "fatal": (ROLES, lambda s, h, f, now: self.ending.fail(_reason(h), now)),
            "bye": (ROLES, lambda s, h, f, now: self._reception.leave(s, "bye", now)),
        }

    # ------------------------------------------------------------------ messages

    def handle(self, identity: bytes, frames: Sequence[Frame], now: float) -> None:
        """One message. Whatever is wrong with it is counted and answered; nothing raises."""
        try:
            header = unpack_header(frames[0] if frames else b"")
            if header["type"] == "hello":
                self._reception.hello(identity, header, now)
            else:
                self._dispatch(identity, header, frames[1:], now)
        except WireError as error:
            self.refused[error.reason] += 1
            self.post.send(identity, "refused", reason=str(error), code=error.reason)

    def unreachable(self, identity: bytes, now: float) -> None:
        """The socket has no route to this client any more, or the client does not read."""
        session = self.roster.find(identity)
        if session is not None:
            self._reception.leave(session, "unreachable", now)

    def pump(self, now: float) -> None:
        """Hand out whatever has become possible."""
        self._relays.answer()
        if self.ending.phase == "running":
            self._actors.rest()
            delivery = self._learners.deliver(new_steps=not self._actors.in_use())
            if delivery is not None:
                self._actors.cancel(delivery.lost)
            self._actors.issue(now)
            self._actors.wake()
            self._scorers.lease(now)
        elif self.ending.phase == "stopping":
            self._learners.deliver(new_steps=False)
            self._learners.release(self.account.reason)

    def tell(self, now: float) -> None:
        """Let people know what the messages have changed."""
        if self._has_news:
            self._send_status()
        if self._books_due and now >= self._next_books:
            self._write_books()
            self._next_books = max(self._next_books, now - _BOOKS_AT_ONCE * _BOOKS_S) + _BOOKS_S

    def tick(self, now: float, *, all_heard: bool) -> None:
        """What time does: silent clients, watchdog, leases, deadlines, files.

        Args:
            now: the clock.
            all_heard: no message waits, so that who was not heard is silent.
        """
        if now - self._last_tick > self.config.buffer.heartbeat_s / 2:  # it is this process that was frozen
            self.roster.excuse(now)
        self._last_tick = now
        self._reception.tick(now, all_heard=all_heard)
        self._relays.update()
        if self.ending.phase == "running":
            overdue = self.ledger.watch(now, step_waits=self._learners.step_waits)
            if overdue is not None:
                self._bark(overdue, now)
            self._check_learner(now)
            self._dismiss_forsaken(now)
        self._actors.cancel(self.ledger.expire(now))
        self._muster.tick()
        self._learners.finish_snapshots()
        self._files.flush()
        self._notice(now)
        self.ending.tick(now)

    @property
    def newer(self) -> Path | None:
        """A checkpoint of the learner's that is newer than this ledger: the next server is to go on from it."""
        return self._reception.newer

    def close(self) -> None:
        """Last words: the final books, all files on disk. A journal of which nobody is to go on is removed."""
        self._learners.close()
        self.ledger.detach(remove=self.ending.phase == "ended" or self.newer is not None)
        self._write_books()
        self._files.close()

    # ------------------------------------------------------------------ clients

    def _dispatch(self, identity: bytes, header: Header, frames: Sequence[Frame], now: float) -> None:
        session = self.roster.find(identity)
        if session is None:
            raise WireError("hello_first", f"{shown(header['type'], 60)} before hello")
        if header["type"] not in self._handlers:
            raise WireError("unknown_type", shown(header["type"], 60))
        roles, handler = self._handlers[header["type"]]
        if session.role not in roles:
            raise WireError("wrong_role", f"{header['type'][:60]} from a {session.role}")
        seq = take(header, "seq", int, session.seq + 1)
        session.gaps = min(session.gaps + max(0, seq - session.seq - 1), _MOST_GAPS)
        session.heard, session.seq = now, seq
        if session.role == "learner" and header["type"] in _TRAINING and not self.ending.trains:
            raise WireError("run_over", f"{header['type']} after the end of the run")
        if header["type"] in _TRAINING:
            self._learners.heard = now
        handler(session, header, frames, now)

    def _beat(self, session: Session, header: Header, now: float) -> None:
        timer = take(header, "timer", dict, {})
        session.state = shown(take(timer, "state", str, session.state), 40)
        session.report(numbers(timer.get("seconds")), numbers(header.get("info")))
        session.cpu_s, session.rss_bytes = number(header, "cpu_s"), number(header, "rss_bytes")
        session.held = pairs(header["in_flight"]) if "in_flight" in header else None
        rows = spans(timer.get("spans"))
        if rows:
            self._files.append("timeline", {"name": session.name, "role": session.role, "spans": rows})
        self.post.send(session, "beat")
        if session.role == "monitor":
            self.post.send(session, "status", **self.account.glance())

    def _fail(self, session: Session, header: Header, frames: Sequence[Frame], now: float) -> None:
        if session.role == "scorer":
            self._scorers.fail(session, header, now)
        else:
            self._actors.fail(session, header)

    # ------------------------------------------------------------------ learning

    def _trained(self, session: Session, header: Header, now: float) -> None:
        manifest = self._learners.trained(session, header)
        if take(header, "step", int) >= 0:
            for rank in self.roster.of("learner"):
                rank.useful = True
        if manifest is None:
            return
        self.account.learner_stats = numbers(header.get("stats")) or self.account.learner_stats
        self.account.last = self._learners.last
        self.versions.announce(manifest, now, self.account.learner_stats.get("publish_s"))
        self.ledger.note("versions", self.versions.to_note())
        try:
            self._weights.serve(manifest)
        except WeightsError as error:
            self.ending.fail(f"version {manifest.version} cannot be served to the actors: {error}", now)
            return
        self._relays.update()
        self._actors.announce()
        self.post.send_all(self.roster.of("evaluator"), "version", manifest=self.versions.wire)
        self._send_status()
        self._books_due = True

    def _done(self, header: Header, now: float) -> None:
        stopped = take(header, "stopped", bool, False)
        if not stopped and self.ledger.version < self.config.steps:
            raise WireError("bad_step", f"done after step {self.ledger.version} of {self.config.steps}")
        self.ending.done(now, stopped=stopped)

    def _eval(self, session: Session, header: Header, now: float) -> None:
        """A finished evaluation; one of a void version, or repeated after a break, counts nothing."""
        version, samples = natural(header, "version"), take(header, "samples", list, [])
        metrics, epoch = numbers(header.get("metrics")), take(header, "epoch", int, 0)
        session.useful = True
        if self.versions.is_void(epoch, version):
            return
        if version > self.ledger.version:
            raise WireError(
                "version_from_the_future", f"an evaluation of {version}, the newest is {self.ledger.version}"
            )
        if not self.account.evaluated(version, metrics):
            return
        row = {**self.account.evals[-1], "epoch": epoch, "wall_s": round(now - self._began, 3), "samples": samples}
        if version == self.versions.start:  # a resumed run evaluates once more what it starts from
            self._files.keep("evals", lambda before: before.get("version") != version)
        self._files.append("evals", row)
        self._files.flush()
        self._tell_monitors()
        self.ending.evaluated(now)

    def _check_learner(self, now: float) -> None:
        """End a run whose learner is away, or at work on one step, for too long.

        Waiting for data is the watchdog's business.
        """
        limit_s = self.config.learner.step_deadline_s
        if self._learners.step_waits or now - self._learners.heard <= limit_s:
            return
        if self.roster.of("learner"):
            self.ending.fail(hung_learner_text(self.ledger.version, limit_s, self.roster), now)
        else:
            self.ending.fail(missing_learner_text(self.ledger.version, limit_s, self._muster.missing()), now)

    def _dismiss_forsaken(self, now: float) -> None:
        """Ranks whose partner has vanished wait for it; after the last step rank 0 waits for nobody."""
        for rank, why in self._partners.forsaken(self._learners.group, now):
            if rank.rank != 0 or self.ledger.version < self.config.steps:
                self._reception.dismiss(rank, "forsaken", why, now)

    def _notice(self, now: float) -> None:
        """Say once, and show as long as it lasts, what holds the run up, and what cannot be written."""
        waiting = [*self._scorers.notices(now), *self._muster.notices(now), *self._broadcasts.notices()]
        waiting = waiting if self.ending.phase == "running" else []
        if len(waiting) > self._num_waiting:
            print("\n".join(waiting), flush=True)
        self._num_waiting = len(waiting)
        unwritten = [] if self.ledger.is_recorded else [_NO_JOURNAL]
        unwritten += filter(None, (self._files.trouble, self._learners.trouble))
        self.account.notices = waiting + unwritten

    def _bark(self, overdue: Overdue, now: float) -> None:
        awake = [f"{name} has not given its device back: it never said asleep" for name in self._actors.in_use()]
        text = f"watchdog: {overdue_text(overdue, self.ledger, self.roster, [*self.account.notices, *awake])}"
        print(text, flush=True)
        self._actors.cancel(overdue.lost)
        if overdue.exhausted:
            self.ending.fail(text, now)

    # ------------------------------------------------------------------ what others see

    def _publish(self) -> None:
        self._send_status()
        self._write_books()

    def _tell_monitors(self) -> None:
        """At the next turn: thousands that leave at once are told of once."""
        self._has_news = True

    def _send_status(self) -> None:
        self._has_news = False
        monitors = self.roster.of("monitor")
        if monitors:
            self.post.send_all(monitors, "status", **self.account.glance())

    def _write_books(self) -> None:
        self._books_due = False
        self._files.flush()
        self._files.replace("books", self.account.books())

    # ------------------------------------------------------------------ a restart of the server

    def _restore(self, now: float) -> None:
        """Go on from the notes of the server that died; its clients are expected to say hello again."""
        notes = self.ledger.notes
        try:
            self.roster.restore(notes.get("clients", []), now)
            if "learner" in notes:
                self._learners.restore(notes["learner"])
            until = self._reception.expect_all(now)
            if "phase" in notes:
                self.ending.restore(notes["phase"], now, until)
            add_missing_batches(self._files, notes.get("batches", []), self.ledger)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the journal's notes are damaged: {error!r}") from None
        self.account.restore(self._files.rows("evals"))
        self.account.group = self._learners.group or ""
        if self.versions.newest is not None:
            try:
                self._weights.serve(self.versions.newest)
            except WeightsError as error:  # the learner that published it is gone, too; its next life publishes again
                print(f"version {self.versions.newest.version} is not served any more: {error}", flush=True)
        self._publish()


def _reason(header: Header) -> str:
    return take(header, "reason", str)[:_MOST_REASON]


def _versions(config: RunConfig, ledger: JournaledLedger, note: Mapping[str, Any] | None, now: float) -> Versions:
    """As noted. What an earlier epoch published beyond the ledger's step is void.

    The server may have died between a rewind and the note of it, or the journal may be lost with what came after.

    Raises:
        ConfigError: the note is damaged.
    """
    try:
        versions = Versions(config) if note is None else Versions.from_note(config, note, now)
    except (KeyError, TypeError, ValueError, WeightsError) as error:
        raise ConfigError(f"the journal's note of the versions is damaged: {error!r}") from None
    if ledger.epoch > versions.epoch:
        versions.withdraw(ledger.version, ledger.epoch)
    return versions
