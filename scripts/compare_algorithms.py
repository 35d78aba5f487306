"""Run one preset with several algorithms and seeds, one run after the other, and print how fast each learned.

    python scripts/compare_algorithms.py OUT [--algorithms grpo,ppo] [--seeds 0,1,2] [--set KEY=VALUE]...

OUT/ALGORITHM-SEED ─► evals.jsonl (accuracy by version and time), summary.json ─► a Markdown table, OUT/runs.json

Runs that are in OUT already are read, not repeated. Time is wall-clock from the server's start to the evaluation's end:
the evaluation runs beside the training, so it lags a little.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

GOAL = 0.90
CLEAR = ("algorithm.clip_low=", "algorithm.clip_high=")
SETTINGS: dict[str, tuple[str, ...]] = {
    "decoupled_ppo": ("algorithm.name=decoupled_ppo", "buffer.max_staleness=8", "learner.lr=1e-4"),
    "importance": ("algorithm.loss=importance", *CLEAR),
}
"""What an entry means where it is not just ``algorithm.name``."""


@dataclass(frozen=True)
class Run:
    """What one run showed."""

    algorithm: str
    seed: int
    status: str
    start: float
    """Held-out accuracy at the start."""
    end: float
    steps_to_goal: int | None
    seconds_to_goal: float | None
    wall_s: float
    mean_age: float
    max_age: int


def main(
    out: Annotated[Path, typer.Argument(help="folder of the runs")],
    preset: Annotated[str, typer.Option(help="preset or CONFIG.toml")] = "arithmetic",
    algorithms: Annotated[str, typer.Option()] = "grpo,dr_grpo,rloo,ppo,gspo,cispo,decoupled_ppo",
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
) -> None:
    """Run what is missing, then print the table."""
    runs = []
    for algorithm in algorithms.split(","):
        for seed in seeds.split(","):
            folder = out / f"{algorithm}-{seed}"
            settings = [*SETTINGS.get(algorithm, (f"algorithm.name={algorithm}",)), f"seed={seed}", *(overrides or [])]
            if not (folder / "summary.json").is_file():
                launch(preset, folder, settings)
            runs.append(read(folder, algorithm, int(seed)))
            print(runs[-1], file=sys.stderr, flush=True)
    (out / "runs.json").write_text(json.dumps([asdict(r) for r in runs], indent=1) + "\n")
    print(table(runs))


def launch(preset: str, folder: Path, settings: list[str]) -> None:
    """One run; a failed one is in its summary."""
    command = [sys.executable, "-m", "async_rl", "run", preset, "--out", str(folder)]
    command += [
        part for setting in ("log.wandb=false", "log.tensorboard=false", *settings) for part in ("--set", setting)
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False)


def read(folder: Path, algorithm: str, seed: int) -> Run:
    """The figures of one run folder."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    first = next((r for r in rows if r["metrics"]["accuracy"] >= GOAL), None)
    return Run(
        algorithm=algorithm,
        seed=seed,
        status=summary["status"],
        start=rows[0]["metrics"]["accuracy"],
        end=rows[-1]["metrics"]["accuracy"],
        steps_to_goal=first["version"] if first else None,
        seconds_to_goal=first["wall_s"] if first else None,
        wall_s=summary["wall_s"],
        mean_age=summary["staleness"]["mean"],
        max_age=summary["staleness"]["max"],
    )


def table(runs: list[Run]) -> str:
    """Markdown: a row per algorithm, the seeds side by side."""
    lines = [
        "| algorithm | held-out at the end | steps to 0.90 | seconds to 0.90 | whole run, s | age mean / max |",
        "|---|---|---|---|---|---|",
    ]
    for algorithm in dict.fromkeys(r.algorithm for r in runs):
        mine = [r for r in runs if r.algorithm == algorithm]
        lines.append(
            f"| {algorithm} | {_join(f'{r.end:.3f}' for r in mine)} "
            f"| {_join('never' if r.steps_to_goal is None else str(r.steps_to_goal) for r in mine)} "
            f"| {_join('–' if r.seconds_to_goal is None else f'{r.seconds_to_goal:.0f}' for r in mine)} "
            f"| {statistics.median(r.wall_s for r in mine):.0f} "
            f"| {statistics.mean(r.mean_age for r in mine):.1f} / {max(r.max_age for r in mine)} |"
        )
    return "\n".join(lines)


def _join(parts: Iterable[str]) -> str:
    return " / ".join(parts)


if __name__ == "__main__":
    typer.run(main)
