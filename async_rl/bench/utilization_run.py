"""One run of ``async-rl bench utilization``: the real server, launcher and actors, mock engines, a learner that waits.

    Scenario ─► config.toml ─► launcher ─► server, actors.main × N, learner.bench.waiting
                                  │ status, each step                  timeline.jsonl
                                  ▼                                        ▼
               Watch: slot-seconds of each actor, enough? ─► stop ─► training spans ─► Measured

Only what lies between the ends of two steps in the steady state counts. *Busy* is meant strictly: a learner is busy for
the given time of a step, times the steps that it made; an actor by the share of its slots' time in which they generated
(a slot that is idle while others run is not busy). What the timers say stands beside it.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from async_rl.config import Config, parse_config, to_toml
from async_rl.errors import AsyncRLError
from async_rl.lengths import Lengths, request_rng
from async_rl.report.trace import roles, spans_by_process
from async_rl.report.usage import seconds_per_state
from async_rl.runfolder import RunFolder, write_atomically
from async_rl.timer import utilization

Mode = Literal["synchronous", "one_step_off", "drained", "in_flight"]
MODES: tuple[Mode, ...] = ("synchronous", "one_step_off", "drained", "in_flight")
STALENESS: Mapping[Mode, int] = {"synchronous": 0, "one_step_off": 1}
"""η of the modes that are defined by it; the others take the scenario's."""
HEARTBEAT_S = 3.0
"""So that actors tell of their slots once a second."""
SLOW_STEPS = 2
"""Steps of the start that take twice as long, so that a balanced run begins with its buffer half full. Its level is a
random walk between empty and full that needs thousands of steps to forget where it began: at an empty buffer the few
steps that are measured would show the start and not the steady state."""
_MOST_START_S = 120.0
_MODEL = "tiny"
_SEED = 0
_PROMPT = 32
"""Room for the prompt in the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What one run is to be.

    With ratio r all actors together, all slots full, need ``step_s / r`` for the tokens of a batch.
    """

    mode: Mode
    ratio: float
    """Speed of all actors together over that of the learner; 1 is balanced."""
    lengths: str
    """``constant``, ``lognormal`` or a file, see :meth:`async_rl.lengths.Lengths.parse`."""
    seconds: float
    """Measured, at least."""
    actors: int = 2
    slots: int = 16
    group_size: int = 4
    groups_per_step: int = 32
    step_s: float = 0.5
    """Of the learner."""
    max_staleness: int = 4
    """η of the asynchronous modes."""
    median: int = 64
    longest: int = 1024
    """Longer answers are cut."""
    least_steps: int = 10
    """Measured, at least."""

    @property
    def distribution(self) -> Lengths:
        """Of the answers' lengths."""
        return Lengths.parse(self.lengths, median=self.median, longest=self.longest)

    @property
    def staleness(self) -> int:
        """η."""
        return STALENESS.get(self.mode, self.max_staleness)

    @property
    def warmup_steps(self) -> int:
        """Steps that are not measured: the buffer fills, and the longest answers of the start come in."""
        return self.staleness + 4

    @property
    def batch(self) -> int:
        """Answers of a batch."""
        return self.group_size * self.groups_per_step

    def tokens_per_s(self) -> float:
        """Speed of one slot, from the mean of the very lengths that the first steps will draw."""
        steps = self.warmup_steps + max(
            self.least_steps, round(self.seconds / max(self.step_s, self.step_s / self.ratio))
        )
        drawn = [
            self.distribution.draw(request_rng((_SEED, ordinal, 0)), self.group_size)
            for ordinal in range(steps * self.groups_per_step)
        ]
        per_batch = float(np.concatenate(drawn).mean()) * self.batch
        return per_batch / (self.actors * self.slots * self.step_s / self.ratio)

    def config(self, model: Path) -> Config:
        """Of the run."""
        actors: dict[str, Any] = {
            "engine": "mock",
            "count": self.actors,
            "slots": self.slots,
            "mock_lengths": self.lengths,
            "mock_speed": self.tokens_per_s(),
        }
        if self.lengths in ("constant", "lognormal"):
            actors["mock_tokens"] = self.median
        if self.mode in ("one_step_off", "drained"):
            actors["weight_updates"] = "drained"
        return parse_config(
            {
                "name": f"{self.mode}-{self.ratio:g}",
                "seed": _SEED,
                "steps": 1_000_000,
                "model": {"path": str(model), "device": "cpu"},
                "sampling": {"group_size": self.group_size, "max_new_tokens": self.longest},
                "actors": actors,
                "buffer": {
                    "groups_per_step": self.groups_per_step,
                    "max_staleness": self.staleness,
                    "heartbeat_s": HEARTBEAT_S,
                },
                "eval": {"every": 0},
                "checkpoint": {"every": 0},
                "log": {"wandb": False, "tensorboard": False},
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the steady state of a run was, in equal parts of its time."""

    scenario: Scenario
    steps: int
    seconds: float
    tokens_per_step: float
    generation_s: float
    """Time that all slots need for the tokens of a step."""
    steps_per_s: tuple[float, ...]
    learner: tuple[float, ...]
    """Busy: steps times their given time, over time."""
    actors: tuple[float, ...]
    """Busy: slot-seconds in use, over all slots' time."""
    states: Mapping[str, Mapping[str, float]]
    """By role: what its timers say, as shares of its time."""
    timers: Mapping[str, float]
    """By role: utilisation by its timers."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def ideal(self) -> float:
        """Ideal speed-up over taking turns: (T_gen + T_train) / max(T_gen, T_train)."""
        train_s = self.scenario.step_s
        return (self.generation_s + train_s) / max(self.generation_s, train_s)


@dataclass(slots=True)
class Watch:
    """A :class:`async_rl.launch.interfaces.Display` that notes what the server says, and says when it is enough."""

    scenario: Scenario
    interrupts: Any
    """Whose ``count`` asks the launcher to stop."""
    began: float = field(default_factory=time.monotonic)
    warm_at: float | None = None
    warm_step: int = 0
    slots: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By actor: (clock, seconds of slots in use)."""
    notes: list[str] = field(default_factory=list)

    def update(self, status: Mapping[str, Any]) -> None:
        """One ``status`` message."""
        now, step = time.monotonic(), int(status["step"])
        for client in status["clients"]:
            if client["role"] == "actor" and "slot_s" in client["info"]:
                point = (client["info"]["clock_s"], client["info"]["slot_s"])
                points = self.slots.setdefault(client["name"], [])
                if not points or points[-1][0] < point[0]:
                    points.append(point)
        if self.warm_at is None and step >= self.scenario.warmup_steps:
            self.warm_at, self.warm_step = now, step
        late = self.warm_at is None and now - self.began > _MOST_START_S
        # beats of the actors must reach beyond the last measured step
        seconds = self.scenario.seconds + HEARTBEAT_S / 2
        enough = (
            self.warm_at is not None
            and now - self.warm_at >= seconds
            and step - self.warm_step >= self.scenario.least_steps
        )
        if (late or enough) and not self.interrupts.count:
            self.interrupts.count = 1

    def note(self, text: str) -> None:
        """Kept for the message of a run that failed."""
        self.notes.append(text)


def measure(scenario: Scenario, folder: Path, parts: int) -> Measured:
    """Run it in a new folder and look at its steady state.

    Args:
        scenario: the run.
        folder: run folder, which does not exist.
        parts: of the measured time, each of which gives a value.

    Raises:
        AsyncRLError: the run failed, or never came so far.
    """
    folder.mkdir(parents=True)
    watch = _launch(scenario, folder)
    return evaluate(scenario, RunFolder(folder), watch.slots, parts)


def evaluate(
    scenario: Scenario, run: RunFolder, slots: Mapping[str, Sequence[tuple[float, float]]], parts: int
) -> Measured:
    """What the files of a run, and what its actors said of their slots, amount to.

    Args:
        scenario: the run.
        run: its folder.
        slots: by actor: (monotonic clock, seconds of slots in use), rising.
        parts: of the measured time.

    Raises:
        AsyncRLError: too few steps were made.
    """
    timeline = run.timeline
    role_of, spans = roles(timeline), spans_by_process(timeline)
    offset = time.time() - time.monotonic()
    learner = next((s for name, s in spans.items() if role_of[name] == "learner"), [])
    last_beat = min((points[-1][0] for points in slots.values() if points), default=0.0) + offset
    ends = np.asarray([stop for state, _, stop in learner if state == "training" and stop <= last_beat])
    ends = ends[scenario.warmup_steps - 1 :]
    if len(ends) <= parts or len(slots) < scenario.actors:
        raise AsyncRLError(f"{scenario.mode}: only {len(ends)} steps in the steady state; raise --seconds")
    edges = np.linspace(ends[0], ends[-1], parts + 1)
    width = (ends[-1] - ends[0]) / parts
    steps = np.diff(np.interp(edges, ends, np.arange(len(ends)))) / width
    used = sum(np.diff(np.interp(edges, *_rising(points, offset))) for points in slots.values())
    seconds = float(ends[-1] - ends[0])
    rows = [row for row in run.metrics if row["step"] >= scenario.warmup_steps][: len(ends) - 1]
    tokens = float(np.mean([row["tokens/step"] for row in rows]))
    capacity = scenario.actors * scenario.slots
    states = {role: _shares(spans, role_of, role, ends[0], ends[-1]) for role in ("learner", "actor")}
    return Measured(
        scenario=scenario,
        steps=len(ends) - 1,
        seconds=seconds,
        tokens_per_step=tokens,
        generation_s=tokens / (capacity * scenario.tokens_per_s()),
        steps_per_s=tuple(steps.tolist()),
        learner=tuple((steps * scenario.step_s).tolist()),
        actors=tuple((used / (capacity * width)).tolist()),
        states=states,
        timers={role: utilization(dict(shares)) for role, shares in states.items()},
    )


def _rising(points: Sequence[tuple[float, float]], offset: float) -> tuple[Any, Any]:
    clock, used = np.asarray(points, np.float64).T
    return clock + offset, used


def _shares(spans: Any, role_of: Mapping[str, str], role: str, begin: float, end: float) -> dict[str, float]:
    """Share of each state in the role's time between two moments."""
    clipped = [
        (state, max(start, begin), min(stop, end))
        for name, of in spans.items()
        if role_of[name] == role
        for state, start, stop in of
        if stop > begin and start < end
    ]
    seconds = seconds_per_state(clipped)
    total = sum(seconds.values()) or 1.0
    return {state: round(value / total, 4) for state, value in sorted(seconds.items(), key=lambda kv: -kv[1])}


def make_model(folder: Path, context: int) -> Path:
    """Tokeniser and configuration of the tiny model with a context that long answers fit; nobody needs its weights.

    Raises:
        AsyncRLError: the tiny model could not be built.
    """
    import os

    from async_rl.launch.preflight import child_environment, ensure_folder

    env = child_environment(os.environ, Path.cwd())
    source = ensure_folder(
        _MODEL, "model.path", env, folder.parent / "warmup.log", lambda text: print(text, flush=True)
    )
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context + _PROMPT}))
    return folder


def _launch(scenario: Scenario, folder: Path) -> Watch:
    import os

    from async_rl.client import Client
    from async_rl.launch.commands import Commands
    from async_rl.launch.folder_lock import FolderLock
    from async_rl.launch.interrupts import Interrupts
    from async_rl.launch.janitor import Janitor
    from async_rl.launch.launcher import Launcher
    from async_rl.launch.preflight import child_environment
    from async_rl.weights.segment import unlink_run

    class Waiting(Commands):
        """The same processes, but for the learner."""

        def learner(self, address: str) -> list[str]:
            command = super().learner(address)
            command[command.index("learner.main")] = "learner.bench.waiting"
            return [*command, "--step-s", str(scenario.step_s), "--slow-steps", str(SLOW_STEPS)]

    config = scenario.config(make_model(folder / "model", scenario.longest))
    write_atomically(folder / "config.toml", to_toml(config))
    with Interrupts() as interrupts, FolderLock(folder, interrupts, print) as lock, Janitor([lock]) as janitor:
        janitor.watch(folder)
        watch = Watch(scenario, interrupts)
        outcome = Launcher(
            commands=Waiting(config=folder / "config.toml", out=folder, ranks=config.learner.ranks),
            env=janitor.environment(child_environment(os.environ, Path.cwd())),
            gpus={},
            actors=scenario.actors,
            evaluates=False,
            display=watch,
            interrupts=interrupts,
            monitor=lambda address: Client(address, "monitor", f"bench-{os.getpid()}", config.contract_hash()),
            cleanup=unlink_run,
            heartbeat_s=HEARTBEAT_S,
            spare=[janitor.pid],
        ).run()
        if interrupts.first is not None:
            sys.exit(interrupts.exit_code)
    if outcome.status == "failed" or watch.warm_at is None:
        raise AsyncRLError(f"{scenario.mode}, ratio {scenario.ratio:g}: {outcome.reason}; {' '.join(watch.notes)}")
    return watch
