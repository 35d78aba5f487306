"""The account of the run: what monitors see, what rank 0 hears with its shard, what ``books.json`` says.

ledger, roster, versions, evaluations ─► status (monitors) · stats (rank 0) · books.json (readers of the folder)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from async_rl.buffer.batch_stats import BatchStats, describe_ages
from async_rl.buffer.fields import numbers
from async_rl.buffer.ledger import Ledger
from async_rl.buffer.roster import Roster
from async_rl.buffer.versions import Versions


class Account:
    """Reads what the others keep, and keeps what nobody else does: evaluations and the learner's own figures."""

    def __init__(self, ledger: Ledger, roster: Roster, versions: Versions, refused: Counter[str], run_id: str) -> None:
        self._ledger = ledger
        self._roster = roster
        self._versions = versions
        self._refused = refused
        self._run_id = run_id
        self._utilization: dict[str, float | None] = {"learner": None, "actors": None}
        self._news: list[dict[str, Any]] = []
        self.notices: list[str] = []
        """What holds the run up just now, as sentences."""
        self.evals: list[dict[str, Any]] = []
        """``version`` and ``metrics``, in order of arrival."""
        self.learner_stats: dict[str, float] = {}
        """What rank 0 sent with its last step."""
        self.last: BatchStats | None = None
        """The newest trained batch."""
        self.group = ""
        """The life of the learner, see :class:`async_rl.buffer.learner_desk.LearnerDesk`."""
        self.status, self.reason = "running", ""

    def evaluated(self, version: int, metrics: dict[str, float]) -> bool:
        """A finished evaluation; False for a version that was evaluated before, whose repetition counts nothing."""
        if any(known["version"] == version for known in self.evals):
            return False
        self.evals.append({"version": version, "metrics": metrics})
        self._news.append(self.evals[-1])
        return True

    def restore(self, evals: Iterable[Mapping[str, Any]]) -> None:
        """The evaluations that a restarted server finds in the run's files; rank 0 hears of the newest once more."""
        known = [row for row in evals if type(row.get("version")) is int]
        self.evals = [{"version": row["version"], "metrics": numbers(row.get("metrics"))} for row in known]
        self._news = self.evals[-1:]

    def rewind(self, step: int) -> None:
        """Versions beyond ``step`` are void, and with them their evaluations."""
        self.evals = [known for known in self.evals if known["version"] <= step]
        self._news = [known for known in self._news if known["version"] <= step]

    def glance(self) -> dict[str, Any]:
        """The ``status`` message."""
        batch = self.last.to_plain() if self.last else {}
        return {
            "status": self.status,
            "step": self._ledger.version,
            "steps": self._ledger.rules.steps,
            "books": self._ledger.books(),
            "stats": {k: batch[k] for k in ("reward", "accuracy", "length") if k in batch} | self.learner_stats,
            "control": self._control(),
            "tokens": self._tokens(),
            "staleness": batch.get("age"),
            "utilization": self._utilization,
            "stages": self._stages(),
            "notices": self.notices,
            "evals": self.evals,
            "learner": bool(self._roster.of("learner")),
            "worked": [s.name for s in self._roster if s.useful],
            "silent": self._roster.silent(),
            "fenced": [s.name for s in self._roster.of("actor") if s.fenced],
            "clients": self._roster.glance(),
        }

    def shard_stats(self) -> dict[str, Any]:
        """What rank 0 hears with its shard, beside the batch's own figures; evaluations once each."""
        news, self._news = self._news, []
        self._utilization = {
            "learner": self._roster.utilization("learner"),
            "actors": self._roster.utilization("actor"),
        }
        if self._ledger.rules.stages:
            self._utilization["scorers"] = self._roster.utilization("scorer")
        return {
            "books": self._ledger.books(),
            "filtered": dict(self._ledger.filtered),
            "failed": dict(self._ledger.failed),
            "tokens": dict(self._ledger.tally.tokens),
            "lengths": self._lengths(),
            "control": self._control(),
            "utilization": self._utilization,
            "evals": news,
        }

    def books(self) -> dict[str, Any]:
        """The content of ``books.json``."""
        ledger, tally = self._ledger, self._ledger.tally
        return {
            "status": self.status,
            "reason": self.reason,
            "run_id": self._run_id,
            "step": ledger.version,
            "steps": ledger.rules.steps,
            "epoch": ledger.epoch,
            "group": self.group,
            "notices": self.notices,
            "books": ledger.books(),
            "tasks": ledger.tasks(),
            "filtered": dict(ledger.filtered),
            "failed": dict(ledger.failed),
            "refused": dict(self._refused),
            "staleness": {**describe_ages(tally.ages), "bound": ledger.rules.max_staleness},
            "tokens": self._tokens(),
            "control": self._control(),
            "lengths": self._lengths(),
            "stages": self._stages(),
            "weights": self._versions.to_plain(),
            "utilization": self._utilization,
            "clients": self._roster.to_plain(),
        }

    def _stages(self) -> dict[str, dict[str, Any]]:
        """By stage: what its queue counts, see :class:`async_rl.buffer.stage_queue.StageQueue`, and who works at it."""
        scorers = Counter(s.stage for s in self._roster.of("scorer"))
        return {stage: {**n, "scorers": scorers[stage]} for stage, n in self._ledger.scoring.to_plain().items()}

    def _tokens(self) -> dict[str, int]:
        """Tokens, or steps of environments, that were generated and trained."""
        return {fate: self._ledger.tally.tokens[fate] for fate in ("generated", "trained")}

    def _control(self) -> dict[str, float | None]:
        """A control run by the names of its metrics; nothing in other runs."""
        if self._ledger.rules.control is None:
            return {}
        episodes = self._ledger.tally.episodes
        return {
            "episode/return": episodes.mean_return,
            "episode/length": episodes.mean_length,
            "episode/count": float(episodes.count),
            "env_steps/generated": float(self._ledger.tally.tokens["generated"]),
            "fps/collect": self._roster.steps_per_s(),
        }

    def _lengths(self) -> dict[str, float | None]:
        """Mean sampled tokens per sequence by fate: losing the long ones would bias towards short answers.

        Nothing in a control run: all fragments are of the same length, and episodes are looked at in the window.
        """
        if self._ledger.rules.control is not None:
            return {}
        return {fate: self._ledger.tally.mean_length(fate) for fate in ("trained", "filtered", "lost")}
