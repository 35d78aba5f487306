"""How a run ends: the phases, each with its deadline; they survive a restart of the server by a note in the journal.

running ─ stop ─► stopping ─ done ─► closing ─► ended
   └──── done ─► evaluating ─ last eval ─┘        fatal, missing learner, watchdog: ─► closing, failed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from async_rl.buffer.account import Account
from async_rl.buffer.journaled import JournaledLedger
from async_rl.buffer.post import Post
from async_rl.buffer.roster import Roster
from async_rl.protocol import Role

FINAL_EVAL_S = 300.0
"""The run waits so long for the evaluation of its last version."""
STOP_S = 300.0
"""The learner has so long for its last step and checkpoint after a stop."""
GOODBYE_S = 8.0
"""Clients have so long to leave after the end."""

Phase = Literal["running", "stopping", "evaluating", "closing", "ended"]
Status = Literal["completed", "stopped", "failed"]
_CLIENTS: tuple[Role, ...] = ("actor", "scorer", "evaluator", "learner")


class Ending:
    """The phase of the run.

    Args:
        ledger: the books, closed at the end.
        roster: the clients.
        post: where messages go.
        account: status and reason; evaluations.
        steps: of the run.
        publish: tells the monitors and writes the books.
    """

    def __init__(
        self,
        ledger: JournaledLedger,
        roster: Roster,
        post: Post,
        account: Account,
        steps: int,
        publish: Callable[[], None],
    ) -> None:
        self.phase: Phase = "running"
        self._ledger = ledger
        self._roster = roster
        self._post = post
        self._account = account
        self._steps = steps
        self._publish = publish
        self._deadline = 0.0
        self._expected_until: dict[Role, float] = {}

    @property
    def trains(self) -> bool:
        """The learner still has, or ends, a step."""
        return self.phase in ("running", "stopping")

    def restore(self, note: Mapping[str, Any], now: float, expected_until: float) -> None:
        """A restarted server goes on where it was, with the same deadlines: who waits for the end has one, too.

        Args:
            note: of the journal.
            now: the clock.
            expected_until: clients that have not said hello again may still do so until then.

        Raises:
            KeyError, ValueError: it is none.
        """
        if note["phase"] not in get_args(Phase):
            raise ValueError(f"there is no phase {note['phase']!r}")
        self.phase = note["phase"] if note["phase"] != "ended" else "closing"
        self._account.status, self._account.reason = note["status"], note["reason"]
        waits_s = {"stopping": STOP_S, "evaluating": FINAL_EVAL_S, "closing": GOODBYE_S}
        latest = now + waits_s.get(self.phase, 0.0)  # the clock may have begun anew, at another boot
        self._deadline = max(min(latest, float(note["until"])), expected_until)
        for role in _CLIENTS:
            self.expect(role, expected_until)

    def expect(self, role: Role, until: float) -> None:
        """Who is missing may come back: nothing ends for want of them before then."""
        self._expected_until[role] = max(self._expected_until.get(role, until), until)

    def wind_down(self, reason: str, now: float) -> None:
        """Stop in order: the learner ends its step, writes a checkpoint and says ``done``; then all end."""
        if self.phase == "evaluating":  # the checkpoint is written, only the last evaluation is awaited
            why = f"was not waited for: {reason}"
            self._finish("completed", f"all steps are trained; the last evaluation {why}", now)
        if self.phase != "running":
            return
        print(f"stopping: {reason}", flush=True)
        self._account.reason = reason
        self._enter("stopping", now + STOP_S)
        comes_back = any(session.role == "learner" for session in self._roster.away())  # to a server that was restarted
        if not comes_back and not self._has(("learner",), now):
            self._finish("stopped", reason, now)

    def fail(self, reason: str, now: float) -> None:
        """End the run with an error."""
        if self.phase not in ("closing", "ended"):
            print(f"the run failed: {reason}", flush=True)
            self._finish("failed", reason, now)

    def learner_left(self, now: float) -> None:
        """In the middle of a stop there is nothing to wait for any more."""
        if self.phase == "stopping":
            why = "the learner was gone before its last checkpoint: a resumed run continues from the one before"
            self._finish("stopped", f"{self._account.reason} ({why})", now)

    def done(self, now: float, *, stopped: bool) -> None:
        """The learner has made its last step; said again, it changes nothing."""
        if not self.trains:
            return
        self._post.send_all(self._roster.of("actor", "scorer"), "stop", reason="the learner is done", error=False)
        self._ledger.close("run_ended")
        if stopped:
            self._finish("stopped", self._account.reason or "the learner was asked to stop", now)
        elif self._final_eval_is_in():
            self._finish("completed", "all steps are trained", now)
        elif not self._has(("evaluator",), now):
            why = "is missing: no evaluator is connected"
            self._finish("completed", f"all steps are trained; the last evaluation {why}", now)
        else:
            self._enter("evaluating", now + FINAL_EVAL_S)

    def evaluated(self, now: float) -> None:
        """An evaluation has come in."""
        if self.phase == "evaluating" and self._final_eval_is_in():
            self._finish("completed", "all steps are trained", now)

    def tick(self, now: float) -> None:
        """What time ends."""
        late = now > self._deadline
        if self.phase == "evaluating" and (late or not self._has(("evaluator",), now)):
            why = f"was not in after {FINAL_EVAL_S:.0f} s" if late else "is missing: the evaluator has left"
            self._finish("completed", f"all steps are trained; the last evaluation {why}", now)
        elif self.phase == "stopping" and late:
            self.fail(f"the learner did not stop within {STOP_S:.0f} s ({self._account.reason})", now)
        elif self.phase == "closing" and (late or not self._has(_CLIENTS, now)):
            self._enter("ended", now)

    def _has(self, roles: tuple[Role, ...], now: float) -> bool:
        """One of them is connected, or expected back."""
        return bool(self._roster.of(*roles)) or any(now < self._expected_until.get(role, now) for role in roles)

    def _final_eval_is_in(self) -> bool:
        return any(e["version"] == self._steps for e in self._account.evals)

    def _finish(self, status: Status, reason: str, now: float) -> None:
        self._account.status, self._account.reason = status, reason
        self._ledger.close("run_ended")
        self._enter("closing", now + GOODBYE_S)
        self._publish()
        self._post.send_all(self._roster, "stop", reason=reason, error=status == "failed")

    def _enter(self, phase: Phase, deadline: float) -> None:
        self.phase, self._deadline = phase, deadline
        account = self._account
        self._ledger.note(
            "phase", {"phase": phase, "until": deadline, "status": account.status, "reason": account.reason}
        )
