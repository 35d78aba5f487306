"""The run at a glance: a live panel in a terminal, a plain line every few steps elsewhere.

status message ─► Glance (a handful of numbers) ─► LiveDisplay | PlainDisplay
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from async_rl.config import RunConfig
from async_rl.units import format_seconds

PLAIN_LINES = 20
"""About how many lines a run writes where there is no terminal."""
PLAIN_WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What a ``status`` message says, as far as it is known."""

    step: int
    """Steps done."""
    reward: float | None
    """Mean reward of the last step's batch."""
    accuracy: float | None
    """Share of the last step's answers that earned the full reward."""
    evals: tuple[tuple[int, float], ...]
    """Held-out (version, accuracy), oldest first; in a control run (version, mean return)."""
    episode_return: float | None
    """Mean return of the last episodes (control)."""
    episode_length: float | None
    """Their mean length (control)."""
    env_steps: int | None
    """Environment steps trained so far; ``None`` in a run without environments."""
    age_mean: float | None
    age_max: int | None
    learner: float | None
    """Utilisation of the learner, 0 to 1."""
    actors: float | None
    """Utilisation of the actors, 0 to 1."""
    scorers: float | None
    """Utilisation of the scorers, 0 to 1; ``None`` without any."""
    notices: tuple[str, ...]
    """What holds the run up just now."""
    books: Mapping[str, int]
    clients: int
    """Processes that are connected, the launcher left out."""
    restarts: int
    """Processes of this machine that were started again."""

    @classmethod
    def from_status(cls, status: Mapping[str, Any]) -> Glance:
        """Read a message; what the server does not know yet is ``None``."""
        stats, staleness = status.get("stats") or {}, status.get("staleness") or {}
        utilization = status.get("utilization") or {}
        control = status.get("control") or {}
        score = "return" if control else "accuracy"
        evals = tuple((int(e["version"]), float(e["metrics"][score])) for e in status.get("evals") or [])
        return cls(
            step=int(status.get("step", 0)),
            reward=stats.get("reward"),
            accuracy=stats.get("accuracy"),
            evals=evals,
            episode_return=control.get("episode/return"),
            episode_length=control.get("episode/length"),
            env_steps=int((status.get("tokens") or {}).get("trained", 0)) if control else None,
            age_mean=staleness.get("mean"),
            age_max=staleness.get("max"),
            learner=utilization.get("learner"),
            actors=utilization.get("actors"),
            scorers=utilization.get("scorers"),
            notices=tuple(str(text) for text in status.get("notices") or ()),
            books=status.get("books") or {},
            clients=sum(c.get("role") != "monitor" for c in status.get("clients") or ()),
            restarts=int(status.get("restarts", 0)),
        )


class Pace:
    """Time left and speed, from what was done since the first step was seen.

    Args:
        clock: monotonic seconds; passed in by tests.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._first: tuple[int, int, float] | None = None
        self.env_steps_per_s: float | None = None
        """Environment steps trained per second; ``None`` before two different steps were seen."""

    def left_s(self, step: int, env_steps: int | None = None) -> float | None:
        """Seconds to the end at the present pace; ``None`` before two different steps were seen."""
        now = self._clock()
        if self._first is None:
            if step > 0:
                self._first = (step, env_steps or 0, now)
            return None
        done, seconds = step - self._first[0], now - self._first[2]
        if done <= 0:
            return None
        if env_steps is not None and seconds > 0:
            self.env_steps_per_s = (env_steps - self._first[1]) / seconds
        return (self._total - step) * seconds / done


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """A line for the first step, then every few, then the last; for logs and CI."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console, self._total = console, config.steps
        self._every = max(1, config.steps // PLAIN_LINES)
        self._shown, self._pace = 0, Pace(config.steps)
        self._noticed = 0

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, status: Mapping[str, Any]) -> None:
        """Write a line if one is due."""
        glance = Glance.from_status(status)
        left = self._pace.left_s(glance.step, glance.env_steps)
        passed = glance.step // self._every > self._shown // self._every
        due = self._shown == 0 or passed or glance.step == self._total
        if glance.step > self._shown and due:
            self._shown = glance.step
            line = one_line(glance, self._total, left, self._pace.env_steps_per_s)
            self._console.print(line, soft_wrap=True)
        if len(glance.notices) > self._noticed:  # once for each thing: their words change with the time that passes
            for text in glance.notices:
                self.note(text)
        self._noticed = len(glance.notices)

    def note(self, text: str) -> None:
        """Write one line."""
        self._console.print(text, soft_wrap=True, markup=False)


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A small panel that is redrawn in place."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._total, self._pace = config.steps, Pace(config.steps)
        self._live = Live(Text("starting"), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, status: Mapping[str, Any]) -> None:
        """Redraw."""
        glance = Glance.from_status(status)
        left = self._pace.left_s(glance.step, glance.env_steps)
        self._live.update(panel(glance, self._total, left, self._pace.env_steps_per_s))

    def note(self, text: str) -> None:
        """Write one line above the panel."""
        self._live.console.print(text, markup=False)


def make_console() -> Console:
    """The terminal, or lines that are wide enough not to be cut when the output goes elsewhere.

    What stands in brackets is text, such as an IPv6 address, or a path in what a process has said last.
    """
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PLAIN_WIDTH)


def make_display(console: Console, config: RunConfig) -> LiveDisplay | PlainDisplay:
    """The panel in a terminal, lines elsewhere."""
    return LiveDisplay(console, config) if console.is_terminal else PlainDisplay(console, config)


def one_line(glance: Glance, total: int, left_s: float | None, env_steps_per_s: float | None = None) -> str:
    """The numbers in one line, unknown ones left out."""
    parts = [
        f"step {glance.step}/{total}",
        *(_control_parts(glance, env_steps_per_s) if glance.env_steps is not None else _token_parts(glance)),
        f"age {glance.age_mean:.2f}/{glance.age_max}" if glance.age_mean is not None else "",
        _part("learner", glance.learner, ".0%"),
        _part("actors", glance.actors, ".0%"),
        _part("scorers", glance.scorers, ".0%"),
        f"restarts {glance.restarts}" if glance.restarts else "",
        f"{format_seconds(left_s)} left" if left_s is not None and glance.step < total else "",
    ]
    return "  ".join(part for part in parts if part)


def _token_parts(glance: Glance) -> list[str]:
    last = f"{glance.evals[-1][1]:.3f} at {glance.evals[-1][0]}" if glance.evals else None
    return [
        _part("reward", glance.reward, ".3f"),
        _part("accuracy", glance.accuracy, ".3f"),
        f"held out {last}" if last else "",
    ]


def _control_parts(glance: Glance, env_steps_per_s: float | None) -> list[str]:
    last = f"{glance.evals[-1][1]:.4g} at {glance.evals[-1][0]}" if glance.evals else None
    return [
        _part("return", glance.episode_return, ".4g"),
        _part("length", glance.episode_length, ".0f"),
        f"evaluated {last}" if last else "",
        f"{env_steps_per_s:,.0f} steps/s" if env_steps_per_s is not None else "",
    ]


def panel(glance: Glance, total: int, left_s: float | None, env_steps_per_s: float | None = None) -> RenderableType:
    """The panel: a bar, the learning curve's numbers, utilisation, the ledger."""
    left = f"{format_seconds(left_s)} left" if left_s is not None else "starting" if glance.step == 0 else ""
    head = Table.grid(padding=(0, 2))
    head.add_row(f"step {glance.step}/{total}", ProgressBar(total=total, completed=glance.step, width=40), left)
    table = Table.grid(padding=(0, 3))
    is_control = glance.env_steps is not None
    spec = ".4g" if is_control else ".3f"
    evals = "  ".join(f"{score:{spec}} at {version}" for version, score in glance.evals[-4:]) or "none yet"
    age = "" if glance.age_mean is None else f"{glance.age_mean:.2f} mean, {glance.age_max} max"
    if is_control:
        table.add_row("return", _value(glance.episode_return, spec), "length", _value(glance.episode_length, ".0f"))
        table.add_row("steps", f"{glance.env_steps:,}", "steps/s", _value(env_steps_per_s, ",.0f"))
    else:
        table.add_row("reward", _value(glance.reward, spec), "accuracy", _value(glance.accuracy, spec))
    table.add_row("learner", _value(glance.learner, ".0%"), "actors", _value(glance.actors, ".0%"))
    table.add_row("age", age or "–", "clients", str(glance.clients))
    if glance.scorers is not None:
        table.add_row("scorers", _value(glance.scorers, ".0%"))
    if glance.restarts:
        table.add_row("restarts", str(glance.restarts))
    books = "  ".join(f"{name} {count:,}" for name, count in glance.books.items())
    notices = [Text(text, style="yellow") for text in glance.notices]
    return Group(
        head,
        table,
        Text(f"{'evaluated' if is_control else 'held out '} {evals}"),
        Text(f"tickets   {books}", style="dim"),
        *notices,
    )


def _value(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)


def _part(name: str, value: float | None, spec: str) -> str:
    return "" if value is None else f"{name} {value:{spec}}"
