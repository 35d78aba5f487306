"""TRL's GRPOTrainer against `async-rl run` on two-digit sums: CPU and wall-clock seconds until 0.87 is reached.

    for each seed:  trl_side.py train (TRL's environment, one process) ─► rows ────────┐
                    async-rl run arithmetic ─► evals.jsonl ─► target reached, SIGINT ──┼─► table, JSON
                    /proc: CPU seconds of all processes of the run ────────────────────┘

    python scripts/compare_trl.py OUT --trl-python TRL/bin/python [--model FOLDER] [--seeds 0,1,2] [--out FILE.json]

The same for both: start checkpoint, problems to train on and held-out ones, reward, sampling temperature, longest
answer, evaluation (greedy, all held-out problems, every 5 steps), the target (mean of the last three evaluations), one
thread a process, 64 prompts × 8 a step at a rate of 3e-4. All else is each system's own: TRL's defaults, and ``OURS``
on top of the preset. The system that begins alternates with the seed.

* CPU seconds: user and system of all processes from the command on, with imports, evaluations and verifiers, until the
  evaluation that reaches the target is known. Seconds: the same span by the clock.
* Beside it, without a bar: TRL's training alone (its trainer's steps, no start, no evaluation) against all of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_control import CpuMeter

from async_rl.bench.figures import Figure, show
from async_rl.config import parse_config
from async_rl.models import resolve_model
from async_rl.tasks import load_task

ROOT = Path(__file__).resolve().parent.parent
OURS = {
    "sampling.group_size": "8",
    "learner.lr": "3e-4",
    "learner.warmup_steps": "0",
}
"""The preset ``arithmetic`` (64 prompts, those with equal rewards replaced) with TRL's group size and learning rate."""
TRL = {"groups": 64, "group_size": 8, "lr": 3e-4}
MAX_NEW = 16
EVALUATIONS = 3
DEADLINE_S = 1800.0
_POLL_S = 0.05
_MINUTES_A_SEED = 3
CPU_BAR, WALL_BAR = 1 / 3, 1 / 5


@dataclass(frozen=True)
class Run:
    """One run of either system until the target."""

    system: str
    seed: int
    cpu_s: float | None
    """None: the target was not reached."""
    wall_s: float | None
    steps: int
    """Of the last evaluation."""
    start_cpu_s: float
    """Until the first evaluation; part of ``cpu_s``."""
    training_cpu_s: float | None
    """Of TRL's steps alone; of ours, all."""
    training_wall_s: float | None
    curve: list[tuple[int, float]]
    """Step and accuracy."""


def main(
    work: Annotated[Path, typer.Argument(metavar="OUT", help="new folder for the runs")],
    trl_python: Annotated[Path, typer.Option(help="python of an environment that has trl")],
    model: Annotated[str, typer.Option(help="Hugging Face folder to start from; a copy of it is trained")] = "tiny",
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    target: Annotated[float, typer.Option(help="mean of the last three evaluations")] = 0.87,
    most_steps: Annotated[int, typer.Option(help="TRL's steps; ours are as many")] = 400,
    every: Annotated[int, typer.Option(help="steps between evaluations")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="of our run")] = None,
) -> None:
    """Run both for each seed, then print the table."""
    check_trl(trl_python)
    work.mkdir(parents=True)
    folder = work.resolve() / "model"
    shutil.copytree(resolve_model(model), folder)
    plan = TRL | {"model": str(folder), "max_new": MAX_NEW, "steps": most_steps, "eval_every": every, "target": target}
    numbers = [int(seed) for seed in seeds.split(",")]
    print(f"about {_MINUTES_A_SEED * len(numbers)} minutes on an idle machine", flush=True)
    runs: list[Run] = []
    for seed in numbers:
        turns = [
            lambda seed=seed: run_trl(trl_python, plan | problems(seed), seed, work),
            lambda seed=seed: run_ours(plan, seed, work, settings or []),
        ]
        for turn in turns if seed % 2 == 0 else reversed(turns):
            runs.append(turn())
            print(json.dumps(asdict(runs[-1]) | {"curve": runs[-1].curve[-EVALUATIONS:]}), flush=True)
    show("end to end", figures(runs, target), out, ours=OURS, trl=TRL, runs=[asdict(run) for run in runs])


def check_trl(python: Path) -> None:
    """Say what is missing.

    Raises:
        typer.Exit: there is no TRL behind this python.
    """
    command = [str(python), "-c", "import importlib.metadata; print(importlib.metadata.version('trl'))"]
    found = subprocess.run(command, capture_output=True, text=True, check=False) if python.is_file() else None
    if found is None or found.returncode:
        print(
            f"--trl-python {python}: {'trl is not installed there' if found else 'no such file'}; make an environment "
            "for it: python -m venv trl && trl/bin/pip install torch trl==1.16.0, and give trl/bin/python",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def problems(seed: int) -> dict[str, Any]:
    """The task's problems, as our run has them."""
    config = parse_config({"task": {"name": "addition", "digits": 2, "holdout": 500}})
    data = load_task(config.task, seed)  # type: ignore[union-attr]
    rows = {"train": data.train, "heldout": data.heldout}
    return {name: [{"prompt": p.prompt, **p.columns} for p in listed] for name, listed in rows.items()}


def reached(accuracies: list[float], target: float) -> int | None:
    """Index of the first evaluation at which the mean of the last three is at least ``target``."""
    for last in range(EVALUATIONS, len(accuracies) + 1):
        if round(statistics.fmean(accuracies[last - EVALUATIONS : last]), 9) >= target:
            return last - 1
    return None


def run_trl(python: Path, plan: dict[str, Any], seed: int, work: Path) -> Run:
    """TRL's training until the target."""
    file, rows = work / f"trl-{seed}.plan.json", work / f"trl-{seed}.jsonl"
    scratch = work / f"trl-{seed}"
    more = {"seed": seed, "evaluations": EVALUATIONS, "scratch": str(scratch), "began": time.time()}
    file.write_text(json.dumps(plan | more))
    command = [str(python), str(ROOT / "scripts/trl_side.py"), "train", str(file), str(rows)]
    with (work / f"trl-{seed}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, env=environment(), timeout=DEADLINE_S, check=True)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    last = reached([row["accuracy"] for row in found], plan["target"])
    hit = None if last is None else found[last]
    return Run(
        system="TRL",
        seed=seed,
        cpu_s=hit and hit["whole_cpu_s"],
        wall_s=hit and hit["whole_wall_s"],
        steps=found[-1]["step"],
        start_cpu_s=found[0]["start_cpu_s"],
        training_cpu_s=hit and hit["cpu_s"],
        training_wall_s=hit and hit["wall_s"],
        curve=[(row["step"], row["accuracy"]) for row in found],
    )


def run_ours(plan: dict[str, Any], seed: int, work: Path, settings: list[str]) -> Run:
    """Our run until the target; it is stopped then."""
    folder = work.resolve() / f"ours-{seed}"
    given = OURS | {
        "model.path": plan["model"],
        "task.verifier": "sums_reward:score",
        "sampling.max_new_tokens": str(plan["max_new"]),
        "steps": str(plan["steps"]),
        "eval.every": str(plan["eval_every"]),
        "checkpoint.every": "0",
        "log.wandb": "false",
        "log.tensorboard": "false",
        "seed": str(seed),
    }
    given |= dict(setting.partition("=")[::2] for setting in settings)
    command = [sys.executable, "-m", "async_rl", "run", "arithmetic", "--out", str(folder)]
    command += [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    began, curve, start_cpu_s = time.time(), list[tuple[int, float]](), 0.0
    cpu_s = wall_s = None
    with (
        folder.with_suffix(".log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment()) as process,
    ):
        meter = CpuMeter(process.pid)
        while process.poll() is None and cpu_s is None:
            meter.sample()
            now, before = time.time(), len(curve)
            curve = read_evaluations(folder)
            if curve and not before:
                start_cpu_s = meter.at(now)
            if reached([accuracy for _, accuracy in curve], plan["target"]) is not None:
                cpu_s, wall_s = meter.at(now), now - began
            if cpu_s is not None or now - began > DEADLINE_S:
                process.send_signal(signal.SIGINT)
                break
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        process.wait(60.0)
    steps = curve[-1][0] if curve else 0
    return Run("ours", seed, cpu_s, wall_s, steps, start_cpu_s, cpu_s, wall_s, curve)


def read_evaluations(folder: Path) -> list[tuple[int, float]]:
    """Version and accuracy of each finished evaluation of a run; a line that is being written is left out."""
    file = folder / "evals.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(int(row["version"]), float(row["metrics"]["accuracy"])) for row in rows]


def environment() -> dict[str, str]:
    """Of both: one thread a process, the scripts (for the reward) and this project importable."""
    paths = [str(ROOT / "scripts"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def figures(runs: list[Run], target: float) -> list[Figure]:
    """Both systems side by side, the seeds that both solved."""
    by_seed: dict[int, dict[str, Run]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, {})[run.system] = run
    pairs = [p for p in by_seed.values() if all(run.cpu_s is not None for run in p.values())]
    if not pairs:
        return []

    def figure(name: str, unit: str, of: str, bar: float | None) -> Figure:
        ours, theirs = (tuple(getattr(pair[s], of) for pair in pairs) for s in ("ours", "TRL"))
        return Figure(f"{name} {target:g}", unit, ours, "TRL", theirs, bar, at_most=True)

    return [
        figure("all CPU time until", "s", "cpu_s", CPU_BAR),
        figure("wall-clock until", "s", "wall_s", WALL_BAR),
        figure("all CPU time against TRL's steps alone, until", "s", "training_cpu_s", None),
        figure("wall-clock against TRL's steps alone, until", "s", "training_wall_s", None),
        figure("CPU time of the start, for", "s", "start_cpu_s", None),
        figure("steps until", "steps", "steps", None),
    ]


if __name__ == "__main__":
    typer.run(main)
