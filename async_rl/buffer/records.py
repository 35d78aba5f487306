"""The small types that go into and come out of the ledger, in the order in which a ticket's life meets them.

Rules ─► Ticket ─► Entry ─► Answer (to a submit) ─► Delivery (a step's batch)      Lost, Overdue: what went wrong
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from async_rl.buffer.control_rules import ControlRules
from async_rl.config import Config, RunConfig
from async_rl.data import Group

Outcome = Literal["accepted", "filtered", "failed", "late", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model, or the environment, of a run says about groups."""

    num_tasks: int = 1
    """Different tasks of the stream."""
    vocabulary: int | None = None
    """Token ids are below it; ``None``: any id."""
    context: int | None = None
    """Most tokens of a trajectory that the model can read; ``None``: any number."""
    control: ControlRules | None = None
    """What groups of a control run are measured against; ``None``: they hold tokens."""
    base: str = ""
    """Checksum of the model to which an adapter is trained; empty: none is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the ledger holds to; the meaning of each is in :class:`async_rl.config.BufferConfig`."""

    steps: int
    """Learner steps of the whole run."""
    groups_per_step: int
    group_size: int
    max_staleness: int
    """η, in learner versions."""
    max_new_tokens: int | None = None
    """Most sampled tokens of a trajectory; ``None``: any number."""
    vocabulary: int | None = None
    """Token ids are below it; ``None``: any id."""
    context: int | None = None
    """Most tokens of a trajectory that the model can read; ``None``: any number."""
    control: ControlRules | None = None
    """What groups of a control run are measured against; ``None``: they hold tokens."""
    stragglers: Literal["wait", "reissue"] = "wait"
    max_uses: int = 1
    replace_zero_variance: bool = False
    lease_s: float = 120.0
    watchdog_s: float = 120.0
    watchdog_rounds: int = 3
    max_bytes: int = 4 << 30
    stages: tuple[str, ...] = ()
    """Stages that must annotate a submitted group before it is ready."""

    @classmethod
    def from_config(cls, config: RunConfig, limits: Limits | None = None) -> Rules:
        """The rules of a run, with what its model or environment sets."""
        buffer, limits = config.buffer, limits or Limits()
        return cls(
            steps=config.steps,
            groups_per_step=buffer.groups_per_step,
            group_size=config.group_size,
            max_staleness=buffer.max_staleness,
            max_new_tokens=config.max_sampled if isinstance(config, Config) else None,
            vocabulary=limits.vocabulary,
            context=limits.context,
            control=limits.control,
            stragglers=buffer.stragglers,
            max_uses=buffer.max_uses,
            replace_zero_variance=buffer.replace_zero_variance,
            lease_s=buffer.lease_s,
            watchdog_s=buffer.watchdog_s,
            watchdog_rounds=buffer.watchdog_rounds,
            max_bytes=buffer.max_bytes,
            stages=config.stages,
        )


@dataclass(slots=True, kw_only=True)
class Entry:
    """One live attempt. Only the ledger changes it."""

    ordinal: int
    attempt: int
    task_index: int
    actor: str
    """Who holds, or held, the ticket; empty in a resumed run."""
    version: int
    """Live version of the holder at issue."""
    deadline: int
    """Last step that may train it: its oldest version (at first the version at issue) + η."""
    issued_at: float
    group: Group | None = None
    """``None`` while it is open."""
    nbytes: int = 0
    uses: int = 0
    """How often it was trained."""
    draw: int = 0
    """See :attr:`async_rl.protocol.Ticket.draw`."""

    @property
    def key(self) -> tuple[int, int]:
        """Identity of the attempt."""
        return self.ordinal, self.attempt

    @property
    def payload(self) -> Group:
        """The submitted group.

        Raises:
            RuntimeError: it is still open.
        """
        if self.group is None:
            raise RuntimeError(f"ordinal {self.ordinal} attempt {self.attempt} has no group yet")
        return self.group


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a submit, an annotation or a fail; given again, word for word, when the message is repeated."""

    outcome: Outcome
    reason: str = ""
    fresh: bool = False
    """True the first time only: what must be counted once is counted then."""

    def with_fresh(self, fresh: bool) -> Answer:
        """The same answer; few are different, so that thousands that are remembered are some objects."""
        return _answer(self.outcome, self.reason, fresh)


@lru_cache(maxsize=1024)
def _answer(outcome: Outcome, reason: str, fresh: bool) -> Answer:
    return Answer(outcome, reason, fresh)


@dataclass(frozen=True, slots=True)
class Lost:
    """An open attempt that was taken back from its holder."""

    actor: str
    ordinal: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """The batch of one step, in ordinal order."""

    step: int
    groups: tuple[Group, ...]
    lost: tuple[Lost, ...]
    """Open attempts that can no longer be trained in time now that this step is taken."""


@dataclass(frozen=True, slots=True)
class Stale:
    """A row of the watchdog's table."""

    actor: str
    ordinal: int
    attempt: int
    age_s: float
    """Seconds since its issue."""
    state: str
    """``open``, ``expired`` (its lease ran out), or ``scoring`` with the awaited stages and who has it."""

    def __str__(self) -> str:
        return f"{self.actor:<20} ordinal {self.ordinal} attempt {self.attempt} {self.state} for {self.age_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Overdue:
    """The watchdog barked: no group became ready for ``watchdog_s``."""

    round: int
    """How many times in a row."""
    exhausted: bool
    """The last permitted round: the run must end."""
    table: tuple[Stale, ...]
    """Oldest attempts first; empty when nobody holds a ticket although a step waits."""
    lost: tuple[Lost, ...]
    """Open attempts older than ``watchdog_s``: they go back into the queue."""
