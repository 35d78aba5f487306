"""Let a run go on for long with mock engines at full rate, and see whether a process grows.

    async-rl run arithmetic, mock engines ─► /proc/PID every few seconds ─► slope of resident memory, descriptors, books

    python scripts/soak.py --minutes 60 --out runs/soak

Exits non-zero when a process grows by 1 MB a minute or more after the warm-up, holds more and more descriptors, or the
books do not close.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn
from rich.table import Table

from async_rl.launch.children import descendants
from async_rl.runfolder import read_json

_PERIOD_S = 5.0
_MOST_MB_PER_MINUTE = 1.0
_MOST_NEW_DESCRIPTORS = 8
"""Connections come and go; a leak grows without end."""
_SETTINGS = (
    "steps=100000000",
    "actors.engine=mock",
    "actors.mock_speed=16000.0",
    "buffer.replace_zero_variance=false",
    "buffer.groups_per_step=16",
    "learner.lr=0",
    "checkpoint.every=200",
    "eval.every=0",
    "log.wandb=false",
    "log.tensorboard=false",
)


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    at_s: float
    rss_mb: float
    descriptors: int


@dataclass(frozen=True)
class Verdict:
    """What became of one process."""

    name: str
    pid: int
    first_mb: float
    last_mb: float
    mb_per_minute: float
    """Least squares over what came after the warm-up."""
    descriptors: tuple[int, int]
    """At the end of the warm-up, and at the end."""

    @property
    def grows(self) -> bool:
        """Whether it leaks."""
        more = self.descriptors[1] - self.descriptors[0]
        return self.mb_per_minute >= _MOST_MB_PER_MINUTE or more > _MOST_NEW_DESCRIPTORS


def main(
    minutes: Annotated[float, typer.Option(min=1)] = 60.0,
    warmup: Annotated[float, typer.Option(help="minutes that do not count")] = 5.0,
    out: Annotated[Path, typer.Option(help="folder, made if missing")] = Path("runs/soak"),
    preset: Annotated[str, typer.Option()] = "arithmetic",
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE of the run")] = None,
) -> None:
    """Run, watch, judge."""
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    folder = out.resolve() / "run"
    sets = [word for setting in (*_SETTINGS, *(settings or [])) for word in ("--set", setting)]
    with (out / "run.log").open("wb") as log:
        command = [sys.executable, "-m", "async_rl", "run", preset, "--out", str(folder), *sets]
        run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    samples: dict[tuple[str, int], list[Sample]] = {}
    began = time.monotonic()
    with Progress(*Progress.get_default_columns()[:2], TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("soaking", total=minutes * 60)
        while (passed := time.monotonic() - began) < minutes * 60 and run.poll() is None:
            look(run.pid, passed, samples)
            progress.update(bar, completed=passed)
            wait_for_exit(run, _PERIOD_S)
    early = run.poll()
    stop(run)
    verdicts = [judge(*key, rows, warmup * 60) for key, rows in samples.items() if rows[-1].at_s > warmup * 60]
    faults = [
        f"{v.name} grows by {v.mb_per_minute:.2f} MB a minute, descriptors {v.descriptors}" for v in verdicts if v.grows
    ]
    if early is not None:
        faults.append(f"the run ended by itself with exit code {early}; see {out / 'run.log'}")
    books = read_json(folder / "books.json")
    counts = books.get("books", {})
    if not counts or counts["issued"] != sum(counts.values()) - counts["issued"]:
        faults.append(f"the books do not close: {counts}")
    console.print(table(verdicts, (time.monotonic() - began) / 60))
    console.print(f"books: {counts}, largest age {books.get('staleness', {}).get('max')}")
    report = {"verdicts": [asdict(v) for v in verdicts], "books": counts, "step": books.get("step"), "faults": faults}
    (out / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    for fault in faults:
        console.print(f"[red]{fault}[/red]")
    raise typer.Exit(1 if faults else 0)


def look(root: int, at_s: float, samples: dict[tuple[str, int], list[Sample]]) -> None:
    """Add a sample of the launcher and of every process below it."""
    for pid in [root, *descendants(root)]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            continue  # it ended between the listing and the look
        resident = next((line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")), None)
        if resident is not None:
            key = (name_of(words) if pid != root else "launcher", pid)
            samples.setdefault(key, []).append(Sample(at_s, int(resident) / 1024, descriptors))


def name_of(words: list[str]) -> str:
    """A process by its module, and the name that it was given."""
    module = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
    given = words[words.index("--name") + 1] if "--name" in words else ""
    return f"{module} {given}".strip()


def judge(name: str, pid: int, rows: list[Sample], warmup_s: float) -> Verdict:
    """Slope and descriptors after the warm-up; a process that came later warms up by itself for as long."""
    steady = [row for row in rows if row.at_s >= rows[0].at_s + warmup_s] or rows[-1:]
    at, resident = np.array([r.at_s / 60 for r in steady]), np.array([r.rss_mb for r in steady])
    slope = float(np.polyfit(at, resident, 1)[0]) if len(steady) > 2 else 0.0
    ends = (steady[0].descriptors, steady[-1].descriptors)
    return Verdict(name, pid, steady[0].rss_mb, steady[-1].rss_mb, slope, ends)


def wait_for_exit(run: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for the end of the run, or until it is time to look again."""
    try:
        run.wait(limit_s)
    except subprocess.TimeoutExpired:
        return


def stop(run: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, and what follows if that is not heard."""
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
        wait_for_exit(run, 120.0)
        if run.poll() is None:
            run.kill()
            run.wait(10.0)


def table(verdicts: list[Verdict], minutes: float) -> Table:
    """A row per process."""
    shown = Table(
        "process", "MB after warm-up", "MB at the end", "MB per minute", "descriptors", title=f"{minutes:.0f} min"
    )
    for v in verdicts:
        ends = f"{v.descriptors[0]} → {v.descriptors[1]}"
        shown.add_row(v.name, f"{v.first_mb:.0f}", f"{v.last_mb:.0f}", f"{v.mb_per_minute:+.3f}", ends)
    return shown


if __name__ == "__main__":
    typer.run(main)
