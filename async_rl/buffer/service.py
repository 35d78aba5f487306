"""The server without its socket: messages in, messages out, the clock passed in.

handle(identity, frames) ─► desk of the sender ─► ledger        pump() ─► shards, tickets
tick() ─► silent clients, leases, watchdog, deadlines           post.take() ─► what to send

phase   running ─ stop ─► stopping ─ done ─► closing ─► ended
           └──── done ─► evaluating ─ last eval ─┘        fatal, dead learner, watchdog: ─► closing, failed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from async_rl.buffer.account import Account
from async_rl.buffer.actor_desk import ActorDesk
from async_rl.buffer.alarms import hung_learner_text, overdue_text
from async_rl.buffer.door import refusal
from async_rl.buffer.fields import number, numbers, spans, take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.learner_desk import LearnerDesk
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.post import Post
from async_rl.buffer.records import Overdue
from async_rl.buffer.roster import Roster, Session
from async_rl.buffer.scorer_desk import ScorerDesk
from async_rl.buffer.versions import Versions
from async_rl.config import RunConfig
from async_rl.errors import WeightsError, WireError
from async_rl.protocol import MISSED_BEATS, ROLES, Role
from async_rl.weights.manifest import Manifest
from async_rl.wire import Frame, Header, unpack_header

FINAL_EVAL_S = 300.0
"""The run waits so long for the evaluation of its last version."""
STOP_S = 300.0
"""The learner has so long for its last step and checkpoint after a stop."""
GOODBYE_S = 5.0
"""Clients have so long to leave after the end."""

_MOST_GAPS = 1 << 53
_TRAINING = ("next", "trained", "snapshot")

Phase = Literal["running", "stopping", "evaluating", "closing", "ended"]
Status = Literal["completed", "stopped", "failed"]


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
        ledger: fresh, or restored.
        files: run folder.
        weights: serves published versions to other hosts.
        run_id: names this life of the server.
        now: the clock.
        wake: makes the socket loop turn; called from other threads.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        files: RunFiles,
        weights: Weights,
        run_id: str,
        now: float,
        wake: Callable[[], None],
    ) -> None:
        self.config = config
        self.phase: Phase = "running"
        self.ledger = ledger
        self.roster = Roster()
        self.post = Post()
        self.refused: Counter[str] = Counter()
        self.versions = Versions(config)
        self.account = Account(ledger, self.roster, self.versions, self.refused, run_id)
        self._files = files
        self._weights = weights
        self._run_id = run_id
        self._began = now
        self._learner_heard = now  # of its work, not of its beats: those come from a thread of their own
        self._deadline = 0.0
        self._actors = ActorDesk(
            ledger, self.roster, self.post, self.versions, files, self.refused, colocated=config.actors.colocated
        )
        self._scorers = ScorerDesk(ledger, self.roster, self.post, files, self.refused)
        self._learners = LearnerDesk(
            ledger, self.roster, self.post, files, config.split_minibatches, self.account.shard_stats, wake
        )
        self._handlers: dict[
            str, tuple[tuple[Role, ...], Callable[[Session, Header, Sequence[Frame], float], None]]
        ] = {
            "credit": (("actor", "scorer"), lambda s, h, f, now: s.take_credit(h)),
            "submit": (("actor",), self._actors.submit),
            "annotate": (("scorer",), self._scorers.annotate),
            "fail": (("actor", "scorer"), self._fail),
            "asleep": (("actor",), lambda s, h, f, now: self._actors.asleep(s)),
            "live": (("actor", "evaluator"), lambda s, h, f, now: self._actors.live(s, h)),
            "next": (("learner",), lambda s, h, f, now: self._learners.next(s, h)),
            "trained": (("learner",), lambda s, h, f, now: self._trained(s, h, now)),
            "snapshot": (("learner",), lambda s, h, f, now: self._learners.snapshot(s, h)),
            "done": (("learner",), lambda s, h, f, now: self._done(h, now)),
            "eval": (("evaluator",), lambda s, h, f, now: self._eval(h, now)),
            "dead": (("monitor",), lambda s, h, f, now: self._dead(h, now)),
            "stop": (("monitor",), lambda s, h, f, now: self.wind_down(take(h, "reason", str), now)),
            "beat": (ROLES, lambda s, h, f, now: self._beat(s, h, now)),
            "fatal": (ROLES, lambda s, h, f, now: self.fail(take(h, "reason", str), now)),
            "bye": (ROLES, lambda s, h, f, now: self._leave(s, "bye", now)),
        }

    # ------------------------------------------------------------------ messages

    def handle(self, identity: bytes, frames: Sequence[Frame], now: float) -> None:
        """One message. Whatever is wrong with it is counted and answered; nothing raises."""
        try:
            header = unpack_header(frames[0] if frames else b"")
            if header["type"] == "hello":
                self._hello(identity, header, now)
            else:
                self._dispatch(identity, header, frames[1:], now)
        except WireError as error:
            self.refused[error.reason] += 1
            self.post.send(identity, "refused", reason=str(error), code=error.reason)

    def unreachable(self, identity: bytes, now: float) -> None:
        """The socket has no route to this client any more, or the client does not read."""
        session = self.roster.find(identity)
        if session is not None:
            self._leave(session, "unreachable", now)

    def pump(self, now: float) -> None:
        """Hand out whatever has become possible."""
        if self.phase == "running":
            self._actors.rest()
            delivery = self._learners.deliver(new_steps=not self._actors.in_use())
            if delivery is not None:
                self._actors.cancel(delivery.lost)
            self._actors.issue(now)
            self._actors.wake()
            self._scorers.lease(now)
        elif self.phase == "stopping":
            self._learners.deliver(new_steps=False)
            self._learners.release(self.account.reason)

    def tick(self, now: float, *, all_heard: bool) -> None:
        """What time does: silent clients, watchdog, leases, deadlines, files.

        Args:
            now: the clock.
            all_heard: no message waits, so that who was not heard is silent.
        """
        silence_s = MISSED_BEATS * self.config.buffer.heartbeat_s
        for session in self.roster if all_heard else ():
            if now - session.heard > silence_s:
                self._leave(session, "silent", now)
        if self.phase == "running":
            overdue = self.ledger.watch(now, step_waits=self._learners.step_waits)
            if overdue is not None:
                self._bark(overdue, now)
            self._check_learner(now)
            self._notice(now)
        self._actors.cancel(self.ledger.expire(now))
        self._learners.finish_snapshots()
        self._files.flush()
        self._end_phase(now)

    def close(self) -> None:
        """Last words: the final books, all files on disk."""
        self._learners.close()
        self._write_books()
        self._files.close()

    # ------------------------------------------------------------------ the end

    def wind_down(self, reason: str, now: float) -> None:
        """Stop in order: the learner ends its step, writes a checkpoint and says ``done``; then all end."""
        if self.phase == "evaluating":  # the checkpoint is written, only the last evaluation is awaited
            why = f"was not waited for: {reason}"
            self._finish("completed", f"all steps are trained; the last evaluation {why}", now)
        if self.phase != "running":
            return
        print(f"stopping: {reason}", flush=True)
        self.phase, self.account.reason, self._deadline = "stopping", reason, now + STOP_S
        if not self.roster.of("learner"):
            self._finish("stopped", reason, now)

    def fail(self, reason: str, now: float) -> None:
        """End the run with an error."""
        if self.phase not in ("closing", "ended"):
            print(f"the run failed: {reason}", flush=True)
            self._finish("failed", reason, now)

    def _done(self, header: Header, now: float) -> None:
        if self.phase not in ("running", "stopping"):
            return
        stopped = take(header, "stopped", bool, False)
        self.post.send_all(self.roster.of("actor", "scorer"), "stop", reason="the learner is done", error=False)
        self.ledger.close("run_ended")
        if stopped:
            self._finish("stopped", self.account.reason or "the learner was asked to stop", now)
        elif self._final_eval_is_in():
            self._finish("completed", "all steps are trained", now)
        elif not self.roster.of("evaluator"):
            why = "is missing: no evaluator is connected"
            self._finish("completed", f"all steps are trained; the last evaluation {why}", now)
        else:
            self.phase, self._deadline = "evaluating", now + FINAL_EVAL_S

    def _final_eval_is_in(self) -> bool:
        return any(e["version"] == self.config.steps for e in self.account.evals)

    def _finish(self, status: Status, reason: str, now: float) -> None:
        self.phase, self._deadline = "closing", now + GOODBYE_S
        self.account.status, self.account.reason = status, reason
        self.ledger.close("run_ended")
        self._tell_monitors()
        self.post.send_all(self.roster, "stop", reason=reason, error=status == "failed")
        self._write_books()

    def _end_phase(self, now: float) -> None:
        late = now > self._deadline
        if self.phase == "evaluating" and (late or not self.roster.of("evaluator")):
            why = f"was not in after {FINAL_EVAL_S:.0f} s" if late else "is missing: the evaluator has left"
            self._finish("completed", f"all steps are trained; the last evaluation {why}", now)
        elif self.phase == "stopping" and late:
            self.fail(f"the learner did not stop within {STOP_S:.0f} s ({self.account.reason})", now)
        elif self.phase == "closing" and (late or not self.roster.of("actor", "scorer", "evaluator", "learner")):
            self.phase = "ended"

    # ------------------------------------------------------------------ clients

    def _dispatch(self, identity: bytes, header: Header, frames: Sequence[Frame], now: float) -> None:
        session = self.roster.find(identity)
        if session is None:
            raise WireError("hello_first", f"{header['type']} before hello")
        if header["type"] not in self._handlers:
            raise WireError("unknown_type", header["type"][:60])
        roles, handler = self._handlers[header["type"]]
        if session.role not in roles:
            raise WireError("wrong_role", f"{header['type'][:60]} from a {session.role}")
        seq = take(header, "seq", int, session.seq + 1)
        session.gaps = min(session.gaps + max(0, seq - session.seq - 1), _MOST_GAPS)
        session.heard, session.seq = now, seq
        if session.role == "learner" and header["type"] in _TRAINING and self.phase not in ("running", "stopping"):
            raise WireError("run_over", f"{header['type']} after the end of the run")
        if header["type"] in _TRAINING:
            self._learner_heard = now
        handler(session, header, frames, now)

    def _hello(self, identity: bytes, header: Header, now: float) -> None:
        why = refusal(header, self.config, [s.world for s in self.roster.of("learner")])
        if not why and self.phase not in ("running", "stopping") and header["role"] != "monitor":
            why = f"the run is over ({self.account.status}: {self.account.reason})"
        if why:
            self.refused["hello"] += 1
            print(f"refused {str(header.get('name'))[:60]!r}: {why}", flush=True)
            self.post.send(identity, "refused", reason=why, code="hello")
            return
        session = Session.from_hello(identity, header, now)
        before = self.roster.last(session.name)
        if before is not None and session.is_same_process(before):  # its connection broke, its device did not change
            session.worked, session.asleep, session.life = before.worked, before.asleep, before.life
        elif before is not None:
            session.life = before.life + 1
        self._replace(session, now)
        self.roster.join(session)
        print(
            f"{session.name} ({session.role}) joined, pid {session.pid} on {session.host.partition('/')[0]}", flush=True
        )
        self.post.send(
            session,
            "welcome",
            run_id=self._run_id,
            heartbeat_s=self.config.buffer.heartbeat_s,
            next_step=self.ledger.version,
            life=session.life,
            start_version=self.versions.start,
            manifest=self.versions.evaluated_wire if session.role == "evaluator" else self.versions.wire,
            weights_address=self._weights.address,
        )

    def _replace(self, session: Session, now: float) -> None:
        """A reconnecting name takes the place of its old session, whose tickets return."""
        for old in (self.roster.named(session.name), self.roster.find(session.identity)):
            if old is None or old.gone:
                continue
            same = session.is_same_process(old)
            if not same and old.identity != session.identity:
                reason = f"another client took the name {old.name!r}: give each client its own"
                self.post.send(old, "refused", reason=reason, code="replaced")
            self._leave(old, "reconnected" if same else "replaced", now)

    def _leave(self, session: Session, why: str, now: float) -> None:
        self.roster.leave(session, why)
        lost = self.ledger.lose(session.name) if session.role == "actor" else []
        leased = self._scorers.leave(session, why) if session.role == "scorer" else 0
        if why != "bye":
            print(f"{session.name} is gone ({why}); {len(lost) + leased} tickets return", flush=True)
        if lost:  # it may only have been slow: then it must not go on with what others now do
            self.post.send(session, "cancel", tickets=[[x.ordinal, x.attempt] for x in lost])
        # On the way out the other ranks may leave before rank 0, which still writes the checkpoint.
        missed = session.role == "learner" and why != "reconnected" and (why != "bye" or session.rank == 0)
        if missed and self.phase in ("running", "stopping"):
            self.fail(
                f"learner rank {session.rank} ({session.name}) is gone ({why}) at step {self.ledger.version}", now
            )
        self._tell_monitors()

    def _dead(self, header: Header, now: float) -> None:
        session = self.roster.named(take(header, "name", str))
        if session is not None:
            self._leave(session, "dead", now)

    def _beat(self, session: Session, header: Header, now: float) -> None:
        timer = take(header, "timer", dict, {})
        session.state = take(timer, "state", str, session.state)[:40]
        session.report(numbers(timer.get("seconds")), numbers(header.get("info")))
        session.cpu_s, session.rss_bytes = number(header, "cpu_s"), number(header, "rss_bytes")
        session.in_flight = len(take(header, "in_flight", list, []))
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
        if manifest is None:
            return
        self.account.learner_stats = numbers(header.get("stats")) or self.account.learner_stats
        self.account.last = self._learners.last
        self.versions.announce(manifest, now, self.account.learner_stats.get("publish_s"))
        try:
            self._weights.serve(manifest)
        except WeightsError as error:
            self.fail(f"version {manifest.version} cannot be served to the actors: {error}", now)
            return
        self._actors.announce()
        self.post.send_all(self.roster.of("evaluator"), "version", manifest=self.versions.wire)
        self._tell_monitors()
        self._write_books()

    def _eval(self, header: Header, now: float) -> None:
        version, samples = take(header, "version", int), take(header, "samples", list, [])
        self.account.evaluated(version, numbers(header.get("metrics")))
        row = {**self.account.evals[-1], "wall_s": round(now - self._began, 3), "samples": samples}
        if version == self.versions.start:  # a resumed run evaluates once more what it starts from
            self._files.keep("evals", lambda before: before.get("version") != version)
        self._files.append("evals", row)
        self._tell_monitors()
        if self.phase == "evaluating" and self._final_eval_is_in():
            self._finish("completed", "all steps are trained", now)

    def _check_learner(self, now: float) -> None:
        """End a run whose learner is at work on one step for too long; waiting for data is the watchdog's business."""
        limit_s = self.config.learner.step_deadline_s
        if not self._learners.step_waits and now - self._learner_heard > limit_s:
            self.fail(hung_learner_text(self.ledger.version, limit_s, self.roster), now)

    def _notice(self, now: float) -> None:
        """Say once, and show as long as it lasts, what holds the run up."""
        notices = self._scorers.notices(now)
        if len(notices) > len(self.account.notices):
            print("\n".join(notices), flush=True)
        self.account.notices = notices

    def _bark(self, overdue: Overdue, now: float) -> None:
        awake = [f"{name} has not given its device back: it never said asleep" for name in self._actors.in_use()]
        text = f"watchdog: {overdue_text(overdue, self.ledger, self.roster, [*self.account.notices, *awake])}"
        print(text, flush=True)
        self._actors.cancel(overdue.lost)
        if overdue.exhausted:
            self.fail(text, now)

    def _tell_monitors(self) -> None:
        self.post.send_all(self.roster.of("monitor"), "status", **self.account.glance())

    def _write_books(self) -> None:
        self._files.flush()
        self._files.replace("books", self.account.books())
