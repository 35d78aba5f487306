"""Who comes and who goes: hello, goodbye, silence, death, and the return of all after a restart of the server.

hello ─► fits? ─► learner of a new life? ─► rewind ─► welcome        bye | dead | silent | unreachable ─► leases return
restart ─► clients are AWAY, with their leases ─► hello: theirs again        nothing within REJOIN_PERIODS: lost
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from async_rl.buffer.account import Account
from async_rl.buffer.actor_desk import ActorDesk
from async_rl.buffer.door import refusal
from async_rl.buffer.ending import Ending
from async_rl.buffer.fields import take
from async_rl.buffer.files import RunFiles
from async_rl.buffer.journaled import JournaledLedger
from async_rl.buffer.learner_desk import LearnerDesk
from async_rl.buffer.muster import Muster
from async_rl.buffer.post import Post
from async_rl.buffer.roster import AWAY, Roster, Session
from async_rl.buffer.run_lines import batch_rows, keep_lines
from async_rl.buffer.scorer_desk import ScorerDesk
from async_rl.buffer.undo import undone
from async_rl.buffer.versions import Versions
from async_rl.config import RunConfig
from async_rl.runfolder import RunFolder
from async_rl.wire import Header

EVALUATOR_BACK_S = 60.0
"""An evaluator that died is started again: the last evaluation may wait so long for it."""
REJOIN_PERIODS = 3
"""After a restart of the server clients have so many heartbeat periods to say hello again."""


class Reception:
    """Lets clients in and out.

    Args:
        config: the run.
        run_id: of the run.
        weights_address: where receivers pull from.
        ledger: the books.
        roster: the clients.
        post: where messages go.
        refused: counts by reason.
        versions: of the weights.
        account: what monitors see.
        files: run folder.
        actors: their desk.
        scorers: their desk.
        learners: their desk.
        muster: where ranks wait for each other.
        ending: the phase of the run.
        publish: tells the monitors and writes the books.
        tell_monitors: only that.
        base: checksum of the model to which an adapter is trained, which all must have; empty: none is trained.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run_id: str,
        weights_address: str,
        ledger: JournaledLedger,
        roster: Roster,
        post: Post,
        refused: Counter[str],
        versions: Versions,
        account: Account,
        files: RunFiles,
        actors: ActorDesk,
        scorers: ScorerDesk,
        learners: LearnerDesk,
        muster: Muster,
        ending: Ending,
        publish: Callable[[], None],
        tell_monitors: Callable[[], None],
        base: str = "",
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._weights_address = weights_address
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._refused = refused
        self._versions = versions
        self._account = account
        self._files = files
        self._actors = actors
        self._scorers = scorers
        self._learners = learners
        self._muster = muster
        self._ending = ending
        self._publish = publish
        self._tell_monitors = tell_monitors
        self._base = base
        self._period_s = config.buffer.heartbeat_s
        self._restarted_at: float | None = None
        """When this server took over from one that died; ``None``: long ago, or never."""
        self.newer: Path | None = None
        """A checkpoint beyond the ledger, of which a learner has told: the journal was lost while it was written."""

    def expect_all(self, now: float) -> float:
        """The server was restarted: who was connected may say hello again; returns until when."""
        self._restarted_at = now
        return now + REJOIN_PERIODS * self._period_s

    # ------------------------------------------------------------------ in

    def hello(self, identity: bytes, header: Header, now: float) -> None:
        """A client wants in.

        Raises:
            WireError: a field is missing or of the wrong type.
        """
        code, why = self._refusal(header)
        if why:
            self._refused["hello"] += 1
            print(f"refused {str(header.get('name'))[:60]!r}: {why}", flush=True)
            self._post.send(identity, "refused", reason=why, code=code)
            if code == "ahead":
                self._look_for_newer(f"step_{header['step']}")
            return
        session = Session.from_hello(identity, header, now)
        self._replace(session, now)
        if session.role == "learner" and session.group != self._learners.group and self._ending.trains:
            self._begin_life(session.group, take(header, "step", int), now)
        self._roster.join(session)
        self._ledger.note("clients", self._roster.to_note())
        host = session.host.partition("/")[0]
        print(f"{session.name} ({session.role}) joined, pid {session.pid} on {host}", flush=True)
        self._post.send(
            session,
            "welcome",
            run_id=self._run_id,
            heartbeat_s=self._period_s,
            next_step=self._ledger.version,
            epoch=self._ledger.epoch,
            life=session.life,
            start_version=self._versions.start,
            manifest=self._versions.evaluated_wire if session.role == "evaluator" else self._versions.wire,
            weights_address=self._weights_address,
        )
        if not self._ending.trains and self._ending.phase != "evaluating":  # it missed the stop of the server before
            is_error = self._account.status == "failed"
            self._post.send(session, "stop", reason=self._account.reason, error=is_error)

    def _refusal(self, header: Header) -> tuple[str, str]:
        """Code and sentence; both empty for a client that may come in."""
        group = header.get("group")
        worlds = [s.world for s in self._roster.of("learner") if s.group == group]
        why = refusal(header, self._config, worlds, self._base)
        if why:
            return "hello", why
        before = self._roster.last(header["name"])
        comes_back = before is not None and before.is_process(header.get("pid"), header.get("host"))
        welcome = self._ending.trains or header["role"] == "monitor" or comes_back
        if not welcome and not (self._ending.phase == "evaluating" and header["role"] == "evaluator"):
            return self._over()
        return self._learners.refusal(header) if header["role"] == "learner" else ("", "")

    def _look_for_newer(self, name: str) -> None:
        found = (c for c in RunFolder(self._files.out).checkpoints() if c.name == name)
        self.newer = next(found, None)

    def _over(self) -> tuple[str, str]:
        if self._ending.phase == "evaluating":
            return "over", "the run is over: all steps are trained, only the last evaluation is awaited"
        why = f"the run is over ({self._account.status}: {self._account.reason})"
        return "hello" if self._account.status == "failed" else "over", why

    def _replace(self, session: Session, now: float) -> None:
        """A name that comes again takes the place of its old session.

        What that held returns; but the same process keeps what it had when the server died, or if it only said hello
        more than once, as one does that waits for a server to come back.
        """
        before = self._roster.last(session.name)
        if before is not None:
            session.take_over(before)
        if before is not None and before.gone == AWAY and not session.is_same_process(before):
            self.leave(before, "dead", now)
        for old in (self._roster.named(session.name), self._roster.find(session.identity)):
            if old is None or old.gone:
                continue
            same = session.is_same_process(old)
            if same and old.identity == session.identity:  # its hello was said twice, the connection never broke
                continue
            if not same and old.identity != session.identity:
                reason = f"another client took the name {old.name!r}: give each client its own"
                self._post.send(old, "refused", reason=reason, code="replaced")
            self.leave(old, "reconnected" if same else "replaced", now)

    def _begin_life(self, group: str, step: int, now: float) -> None:
        """The learner has lost what came after its checkpoint: the run goes back there, and its versions are void."""
        for old in self._roster.of("learner"):
            self.dismiss(old, "replaced", "another life of the learner group has taken over", now)
        was, epoch = self._ledger.version, self._ledger.epoch
        lost = self._ledger.rewind(step, undone(batch_rows(self._files), step))
        self._learners.begin_life(group, now)
        self._versions.withdraw(step, self._ledger.epoch)
        keep_lines(self._files, self._ledger)
        if self._ledger.epoch != epoch:
            self._account.rewind(step)
            self._actors.leave_void(step)
            print(f"the learner begins again at step {step}: what came after it, up to {was}, is void", flush=True)
        self._actors.cancel(lost)
        self._account.group = group
        self._ledger.note("versions", self._versions.to_note())
        self._publish()

    # ------------------------------------------------------------------ out

    def dismiss(self, session: Session, code: str, why: str, now: float) -> None:
        """Tell a client that it is to end, and let it go."""
        self._post.send(session, "refused", reason=why, code=code)
        self.leave(session, "replaced", now)

    def leave(self, session: Session, why: str, now: float) -> None:
        """A client is gone; what it held returns."""
        self._roster.leave(session, why)
        self._ledger.note("clients", self._roster.to_note())
        lost = self._ledger.lose(session.name) if session.role == "actor" else []
        leased = self._scorers.leave(session, why) if session.role == "scorer" else 0
        if session.role == "recruit":
            self._muster.leave(session)
        if why != "bye":
            print(f"{session.name} is gone ({why}); {len(lost) + leased} tickets return", flush=True)
        if lost and session.identity:  # it may only have been slow: then it must not go on with what others now do
            self._post.send(session, "cancel", tickets=[[x.ordinal, x.attempt] for x in lost])
        if session.role == "learner":
            self._learners.left(now)
            # On the way out the other ranks may leave before rank 0, which still writes the checkpoint.
            if session.rank == 0 and why in ("bye", "dead"):
                self._ending.learner_left(now)
        if session.role == "evaluator" and why not in ("bye", "reconnected", "replaced"):
            self._ending.expect("evaluator", now + EVALUATOR_BACK_S)
        self._tell_monitors()

    def dead(self, name: str, now: float) -> None:
        """The launcher says that this client's process has ended."""
        session = self._roster.last(name)
        if session is None:
            return
        if session.gone in ("", AWAY):
            self.leave(session, "dead", now)
        elif session.gone in ("silent", "unreachable"):
            session.gone = "dead"
            if session.role == "learner" and session.rank == 0:
                self._ending.learner_left(now)

    def tick(self, now: float, *, all_heard: bool) -> None:
        """Let go who was silent for a period, and who did not come back after a restart.

        Args:
            now: the clock.
            all_heard: no message waits, so that who was not heard is silent.
        """
        for session in self._roster if all_heard else ():
            if now - session.heard > self._period_s:
                self.leave(session, "silent", now)
        if self._restarted_at is not None and now - self._restarted_at > REJOIN_PERIODS * self._period_s:
            self._close_restart(self._restarted_at, now)
            self._restarted_at = None

    def _close_restart(self, restarted_at: float, now: float) -> None:
        """Take back what nobody has: tickets of those that stayed away, and those that were lost on their way."""
        for session in self._roster.away():
            self.leave(session, "silent", now)
        open_now = list(self._ledger.open.values())
        for name in {entry.actor for entry in open_now}:
            actor = self._roster.named(name)
            if actor is not None and actor.held is None:  # it does not tell
                continue
            has = actor.held or () if actor is not None else ()
            newer = [e.key for e in open_now if e.actor == name and (e.key in has or e.issued_at >= restarted_at)]
            self._actors.cancel(self._ledger.lose(name, kept=newer if actor is not None else ()))
