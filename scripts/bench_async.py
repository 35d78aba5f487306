"""A whole run with overlap against the same run in turns (max_staleness 0): steps per second, one core for each side.

    python scripts/bench_async.py OUT [--preset arithmetic] [--staleness 4] [--repeats 5] [--set KEY=VALUE]...

run ─► rollout side (actors, buffer server, their children): first core ─► metrics.jsonl ─► steps/s behind the
       all others (learner, launcher): second core                         first ones

Every step trains the same number of sequences in both modes. How balanced the load is, the states of the synchronous
runs tell: with shares g of generating and t of training the ideal speed-up is (g + t) / max(g, t).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.runfolder import read_json

SKIPPED = 15
"""First steps, which compile, fill caches and are alone on a core while others still start."""
_TURN_S = 0.2
_LONGEST_S = 1_800.0
_BALANCED = {"arithmetic": ("actors.slots=768",)}
"""What makes generating and training a step of a preset take about as long."""
_ROLLOUT = ("actors.", "async_rl.buffer.")
"""Modules of the processes on the first core."""
_WORK = {"actors": ("generating", "scoring"), "learner": ("training", "reducing", "publishing")}


def main(
    out: Annotated[Path, typer.Argument(help="folder of the runs")],
    preset: Annotated[str, typer.Option(help="preset or CONFIG.toml")] = "arithmetic",
    staleness: Annotated[int, typer.Option(min=1, help="max_staleness of the asynchronous runs")] = 4,
    steps: Annotated[int, typer.Option(min=SKIPPED + 10)] = 100,
    repeats: Annotated[int, typer.Option(min=1)] = REPEATS,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
) -> None:
    """Run both modes in turns and print the speed-up."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise typer.BadParameter("two cores are needed, one for the rollout side and one for the learner")
    settings = [
        "buffer.replace_zero_variance=false",  # else the work of a step varies
        "eval.every=0",
        "checkpoint.every=0",
        "log.tensorboard=false",
        f"steps={steps}",
        *_BALANCED.get(preset, ()),
        *(overrides or []),
    ]
    ideal: list[float] = []

    def rate(bound: int) -> float:
        folder = out / f"staleness-{bound}-{sum(1 for _ in out.glob(f'staleness-{bound}-*'))}"
        run(preset, [*settings, f"buffer.max_staleness={bound}"], folder, cores)
        states = read_json(folder / "summary.json")["states"]
        work = [sum(states[who].get(state, 0.0) for state in names) for who, names in _WORK.items()]
        if bound == 0:
            ideal.append(sum(work) / max(work))
        speed = steps_per_second(rows(folder / "metrics.jsonl"))
        print(f"{folder.name}: {speed:.3f} steps/s; actors worked {work[0]:.0%}, the learner {work[1]:.0%}", flush=True)
        return speed

    out.mkdir(parents=True, exist_ok=True)
    ours, baseline = paired(lambda: rate(staleness), lambda: rate(0), repeats, warmup=0)
    name = f"{preset}, max_staleness {staleness} against 0, one core each"
    figure = Figure(name, "steps/s", ours, "synchronous", baseline, bar=1.8)
    show("async", [figure], out / "async.json", ideal=statistics.median(ideal), steps=steps, settings=settings)
    print(f"ideal speed-up by the synchronous runs' own shares of work: {statistics.median(ideal):.2f}")


def run(preset: str, settings: Iterable[str], folder: Path, cores: list[int]) -> None:
    """Run to the end, each side bound to a core; raises ``SystemExit`` if the run fails."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "async_rl", "run", preset, *words, "--out", str(folder)]
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _LONGEST_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{folder} did not end within {_LONGEST_S:.0f} s: see {folder.with_suffix('.log')}")
            bind(process.pid, cores)
            time.sleep(_TURN_S)
    finally:
        process.terminate()
        process.wait(60)
    if process.returncode:
        raise SystemExit(f"the run failed: see {folder.with_suffix('.log')}")


def bind(launcher: int, cores: list[int]) -> None:
    """The rollout side with all that it started to the first core, every other process of the run to the second."""
    parents = {pid: parent for pid in pids() if (parent := parent_of(pid)) is not None}
    rollout = {pid for pid in parents if module_of(pid).startswith(_ROLLOUT)}
    for pid in parents:
        line = [pid]
        while line[-1] in parents and len(line) < 64:
            line.append(parents[line[-1]])
        if launcher not in line:
            continue
        core = cores[0] if rollout.intersection(line) else cores[1]
        for task in threads_of(pid):
            try:
                os.sched_setaffinity(task, {core})
            except OSError:
                continue  # it has ended


def pids() -> list[int]:
    """Of all processes."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def threads_of(pid: int) -> list[int]:
    """Of a process; none if it has ended."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def parent_of(pid: int) -> int | None:
    """``None`` if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def module_of(pid: int) -> str:
    """What ``python -m`` runs; empty if it is something else, or has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def rows(file: Path) -> list[Mapping[str, Any]]:
    """Of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_per_second(metrics: list[Mapping[str, Any]]) -> float:
    """Behind the first :data:`SKIPPED` steps, by the times at which steps ended."""
    times = [row["time"] for row in metrics if "time/step_s" in row]
    return (len(times) - 1 - SKIPPED) / (times[-1] - times[SKIPPED])


if __name__ == "__main__":
    typer.run(main)
