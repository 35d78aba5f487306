"""rsl_rl against `async-rl run` on the same batched worlds, back to back: steps per second, time to a goal.

    for each repetition:  bench_rsl_rl.py (rsl_rl's own runner, one process) ─► rows ┐
                          async-rl run CONFIG.toml ─► metrics.jsonl ─────────► rows ┴─► Figures ─► table, results.json
                          /proc: CPU seconds of all processes of the run ─────────────┘

    python scripts/bench_control.py OUT [--worlds cartpole,pendulum] [--repeats 3] [--rsl-python PATH]

Both train the same network (64-64 ELU, Gaussian) with the same PPO settings on `num_envs` × `horizon` steps an
iteration, 2,048 environments in all; ours shares them out over its actors. Ours collects and trains in turns, too
(η = 0; `--set buffer.max_staleness=1` overlaps them). The system that begins alternates.
Definitions, the same for both:

* steps/s: environment steps between the first iteration after `warmup` ones and the last, over the wall-clock between;
* steps per CPU second: the same steps over what all processes of the run used meanwhile, user and system, from /proc;
* seconds to the goal: from the moment at which the first environment steps are asked for (imports and process starts
  lie before it) to the end of the iteration in which the mean return of the last 100 episodes has reached it.
"""

from __future__ import annotations

import bisect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

GOALS = {"cartpole": 475.0, "pendulum": -250.0}
GAMMAS = {"cartpole": 0.99, "pendulum": 0.95}
CLASSES = {"cartpole": "cartpole:BatchedCartPole", "pendulum": "pendulum:BatchedPendulum"}
SAMPLE_S = 0.2
DEADLINE_S = 900.0
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """One iteration of either system."""

    time: float
    """Epoch seconds of its end."""
    steps: float
    """Environment steps trained so far."""
    mean_return: float | None


@dataclass(frozen=True)
class Figures:
    """What one run showed."""

    system: str
    world: str
    seed: int
    steps_per_s: float
    steps_per_cpu_s: float
    seconds_to_goal: float | None
    steps_to_goal: float | None
    cores: float
    """CPU seconds per second in the steady state."""
    start_s: float
    """From the start of the process to the first environment step."""


@dataclass(frozen=True)
class Plan:
    """What both systems are asked for."""

    num_envs: int
    horizon: int
    iterations: int
    warmup: int
    hidden: tuple[int, ...] = (64, 64)
    epochs: int = 5
    minibatches: int = 4


class CpuMeter:
    """CPU seconds of a process and everything below it, over time; what a process used stays counted after its end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used: dict[tuple[int, int], float] = {}
        self._times: list[float] = []
        self._totals: list[float] = []

    def sample(self) -> None:
        """Look at /proc once."""
        now, found = time.time(), _processes()
        children: dict[int, list[int]] = {}
        for pid, (parent, _, _) in found.items():
            children.setdefault(parent, []).append(pid)
        pending = [self._pid]
        while pending:
            pid = pending.pop()
            pending += children.get(pid, [])
            if pid in found:
                _, began, used = found[pid]
                self._used[pid, began] = used
        self._times.append(now)
        self._totals.append(sum(self._used.values()))

    def at(self, moment: float) -> float:
        """CPU seconds used until then, interpolated between two samples."""
        right = min(max(bisect.bisect(self._times, moment), 1), len(self._times) - 1)
        (t0, t1), (c0, c1) = self._times[right - 1 : right + 1], self._totals[right - 1 : right + 1]
        return c0 + (c1 - c0) * min(max((moment - t0) / (t1 - t0), 0.0), 1.0)


def _processes() -> dict[int, tuple[int, int, float]]:
    """By pid: parent, start time, CPU seconds."""
    ticks, found = os.sysconf("SC_CLK_TCK"), {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            fields = text[text.rindex(")") + 2 :].split()
            found[int(entry)] = int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / ticks
    return found


def watch(command: Sequence[str], log: Path) -> tuple[float, CpuMeter]:
    """Run a command to its end; returns when it began and what it used.

    Raises:
        RuntimeError: it failed or took longer than its deadline.
    """
    began = time.time()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment) as process:
        meter = CpuMeter(process.pid)
        try:
            while process.poll() is None:
                meter.sample()
                if time.time() - began > DEADLINE_S:
                    raise RuntimeError(f"{' '.join(command)} took longer than {DEADLINE_S:.0f} s, see {log}")
                try:
                    process.wait(SAMPLE_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.terminate()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}, see {log}")
    return began, meter


def run_rsl_rl(world: str, seed: int, plan: Plan, folder: Path, python: str) -> Figures:
    """One run of rsl_rl."""
    spec = asdict(plan) | {"world": world, "seed": seed, "gamma": GAMMAS[world]}
    rows_file = folder / "rows.jsonl"
    command = [python, str(ROOT / "scripts/bench_rsl_rl.py"), json.dumps(spec), str(rows_file)]
    began, meter = watch(command, folder / "log.txt")
    lines = [json.loads(line) for line in rows_file.read_text().splitlines()]
    rows = [Row(line["time"], line["steps"], line["mean_return"]) for line in lines]
    return figures("rsl_rl", world, seed, rows, plan, began, meter)


def run_ours(world: str, seed: int, plan: Plan, folder: Path, settings: Sequence[str], actors: int) -> Figures:
    """One run of `async-rl run`."""
    config = folder / "bench.toml"
    config.write_text(toml(world, seed, plan, actors))
    command = [sys.executable, "-m", "async_rl", "run", str(config), "--out", str(folder / "run")]
    began, meter = watch(command + [part for s in settings for part in ("--set", s)], folder / "log.txt")
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "env_steps/trained" in line]
    start = Row(lines[0]["time"] - lines[0]["time/step_s"], 0, None)
    rows = [start] + [Row(line["time"], line["env_steps/trained"], line["episode/return"]) for line in lines]
    return figures("async_rl", world, seed, rows, plan, began, meter)


def toml(world: str, seed: int, plan: Plan, actors: int) -> str:
    """Our configuration with rsl_rl's settings; nothing is evaluated or saved but at the ends."""
    return f"""domain = "control"
name = "bench-{world}"
seed = {seed}
steps = {plan.iterations}
policy = {{ hidden = {list(plan.hidden)} }}
buffer = {{ groups_per_step = {actors}, max_staleness = 0 }}
actors = {{ count = {actors} }}
eval = {{ every = 0, episodes = 1 }}
checkpoint = {{ every = 0 }}
log = {{ wandb = false, tensorboard = false }}

[env]
id = "actors.control.worlds.{CLASSES[world]}"
num_envs = {plan.num_envs // actors}
horizon = {plan.horizon}

[algorithm]
gamma = {GAMMAS[world]}
entropy_coef = 0.0
epochs = {plan.epochs}
minibatches = {plan.minibatches}
"""


def figures(
    system: str, world: str, seed: int, rows: Sequence[Row], plan: Plan, began: float, meter: CpuMeter
) -> Figures:
    """Reduce a run; ``rows`` begins with the moment at which the first environment steps were asked for."""
    first, last = rows[plan.warmup], rows[-1]
    seconds, cpu_s = last.time - first.time, meter.at(last.time) - meter.at(first.time)
    goal = next((row for row in rows if row.mean_return is not None and row.mean_return >= GOALS[world]), None)
    return Figures(
        system=system,
        world=world,
        seed=seed,
        steps_per_s=(last.steps - first.steps) / seconds,
        steps_per_cpu_s=(last.steps - first.steps) / cpu_s,
        seconds_to_goal=goal.time - rows[0].time if goal else None,
        steps_to_goal=goal.steps if goal else None,
        cores=cpu_s / seconds,
        start_s=rows[0].time - began,
    )


def table(runs: Sequence[Figures]) -> str:
    """Markdown: medians of both systems and how many times better ours is."""
    lines = [
        "| world | figure | rsl_rl | async_rl | ratio |",
        "|---|---|---|---|---|",
    ]
    columns: Mapping[str, Callable[[Figures], float | None]] = {
        "environment steps/s": lambda f: f.steps_per_s,
        "environment steps per CPU s": lambda f: f.steps_per_cpu_s,
        "s to the goal": lambda f: f.seconds_to_goal,
        "environment steps to the goal": lambda f: f.steps_to_goal,
        "cores used": lambda f: f.cores,
        "s until the first step": lambda f: f.start_s,
    }
    for world in dict.fromkeys(run.world for run in runs):
        for name, value in columns.items():
            theirs, ours = (
                _median([value(run) for run in runs if run.world == world and run.system == system])
                for system in ("rsl_rl", "async_rl")
            )
            ratio = "–" if theirs is None or ours is None else f"{ours / theirs:.2f}"
            lines.append(f"| {world} | {name} | {_text(theirs)} | {_text(ours)} | {ratio} |")
    return "\n".join(lines)


def _median(values: Sequence[float | None]) -> float | None:
    """None where half of the runs or more never got there."""
    known = sorted(value if value is not None else float("inf") for value in values)
    middle = statistics.median(known) if known else float("inf")
    return middle if middle < float("inf") else None


def _text(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def main(
    out: Annotated[Path, typer.Argument(help="folder for the runs, their logs and results.json")],
    worlds: Annotated[str, typer.Option()] = "cartpole,pendulum",
    repeats: Annotated[int, typer.Option(help="runs of each system; the seed is the repetition")] = 3,
    rsl_python: Annotated[str, typer.Option(help="python of an environment with rsl-rl-lib")] = sys.executable,
    actors: Annotated[int, typer.Option(help="our actors; the environments are shared out over them")] = 1,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="for our runs")] = None,
    iterations: Annotated[int, typer.Option()] = 110,
    num_envs: Annotated[int, typer.Option(help="in all")] = 2048,
    horizon: Annotated[int, typer.Option()] = 24,
    warmup: Annotated[int, typer.Option(help="iterations before the rates are measured")] = 10,
) -> None:
    """Run everything, one run at a time, and print the table."""
    plan = Plan(num_envs=num_envs, horizon=horizon, iterations=iterations, warmup=warmup)
    runs: list[Figures] = []
    for world in worlds.split(","):
        for seed in range(repeats):
            systems: list[tuple[str, Callable[[Path], Figures]]] = [
                ("rsl_rl", lambda f, w=world, s=seed: run_rsl_rl(w, s, plan, f, rsl_python)),  # type: ignore[misc]
                ("async_rl", lambda f, w=world, s=seed: run_ours(w, s, plan, f, overrides or [], actors)),  # type: ignore[misc]
            ]
            for name, run in systems if seed % 2 == 0 else reversed(systems):
                folder = out.resolve() / f"{world}-{seed}-{name}"
                folder.mkdir(parents=True)
                runs.append(run(folder))
                print(runs[-1], file=sys.stderr, flush=True)
    results: dict[str, Any] = {
        "plan": asdict(plan),
        "actors": actors,
        "set": overrides or [],
        "runs": [asdict(r) for r in runs],
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    typer.run(main)
