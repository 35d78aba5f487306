"""Run control presets, or variants of them, with several seeds, one after the other; print their ends and curves.

    python scripts/compare_control.py OUT cartpole "cartpole eta 4: cartpole buffer.max_staleness=4" [--seeds 0,1,2]

A variant is ``LABEL: PRESET [KEY=VALUE]...``; a bare preset is its own label.
OUT/LABEL-SEED ─► evals.jsonl (a metric by version and time), metrics.jsonl, summary.json ─► Markdown, OUT/runs.json

Runs that are in OUT already are read, not repeated. Seconds are wall-clock from the server's start to the evaluation's
end; the evaluation runs beside the training, so it lags a little.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

_POINTS = 7
"""Points of a printed curve."""


@dataclass(frozen=True)
class Run:
    """What one run showed."""

    label: str
    seed: int
    status: str
    curve: list[tuple[int, int, float]]
    """Evaluated version, environment steps trained by then, and the metric."""
    wall_s: float
    env_steps: int
    """Trained in all."""
    env_steps_per_s: float | None
    cpu_s: float
    largest_age: int


def main(
    out: Annotated[Path, typer.Argument(help="folder of the runs")],
    variants: Annotated[
        list[str], typer.Argument(metavar="VARIANT...", help="PRESET, or 'LABEL: PRESET KEY=VALUE...'")
    ],
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    metric: Annotated[str, typer.Option(help="of the evaluation: return or success")] = "return",
) -> None:
    """Run what is missing, then print the tables."""
    runs = []
    for variant in variants:
        label, preset, settings = parse(variant)
        for seed in seeds.split(","):
            folder = out / f"{re.sub(r'[^a-z0-9]+', '-', label.lower())}-{seed}"
            if not (folder / "summary.json").is_file():
                launch(preset, folder, [*settings, f"seed={seed}"])
            runs.append(read(folder, label, int(seed), metric))
            print(runs[-1], file=sys.stderr, flush=True)
    (out / "runs.json").write_text(json.dumps([asdict(r) for r in runs], indent=1) + "\n")
    print(table(runs))
    print()
    print(curves(runs))


def parse(variant: str) -> tuple[str, str, list[str]]:
    """Label, preset and settings of ``LABEL: PRESET [KEY=VALUE]...``."""
    label, colon, rest = variant.partition(":")
    preset, *settings = (rest if colon else label).split()
    return label.strip(), preset, settings


def launch(preset: str, folder: Path, settings: Sequence[str]) -> None:
    """One run; a failed one is in its summary."""
    command = [sys.executable, "-m", "async_rl", "run", preset, "--out", str(folder)]
    command += [
        part for setting in ("log.wandb=false", "log.tensorboard=false", *settings) for part in ("--set", setting)
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False)


def read(folder: Path, label: str, seed: int, metric: str) -> Run:
    """The figures of one run folder."""
    summary = json.loads((folder / "summary.json").read_text())
    evals, rows = _rows(folder / "evals.jsonl"), _rows(folder / "metrics.jsonl")
    trained = {int(r["step"]) + 1: int(r["env_steps/trained"]) for r in rows if "env_steps/trained" in r}
    return Run(
        label=label,
        seed=seed,
        status=summary["status"],
        curve=[(int(e["version"]), trained.get(int(e["version"]), 0), float(e["metrics"][metric])) for e in evals],
        wall_s=summary["wall_s"],
        env_steps=max(trained.values(), default=0),
        env_steps_per_s=summary["throughput"]["env_steps_per_s"],
        cpu_s=sum(summary["cpu_s"].values()),
        largest_age=summary["staleness"]["max"],
    )


def table(runs: Sequence[Run]) -> str:
    """Markdown: a row per variant, the seeds side by side."""
    lines = [
        "| run | at the start | at the end | steps | steps/s | whole run, s | largest age |",
        "|---|---|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(r.label for r in runs):
        mine = [r for r in runs if r.label == label]
        rates = [r.env_steps_per_s for r in mine if r.env_steps_per_s is not None]
        rate = f"{statistics.median(rates):,.0f}" if rates else "–"
        lines.append(
            f"| {label} | {_join(_short(r.curve[0][2]) for r in mine if r.curve)} "
            f"| {_join(_short(r.curve[-1][2]) for r in mine if r.curve)} "
            f"| {statistics.median(r.env_steps for r in mine):,.0f} | {rate} "
            f"| {statistics.median(r.wall_s for r in mine):.0f} | {max(r.largest_age for r in mine)} |"
        )
    return "\n".join(lines)


def curves(runs: Sequence[Run]) -> str:
    """Markdown: the median over the seeds at some of the evaluated versions, with the lowest and highest seed."""
    lines = ["| run | evaluated at (thousand steps): median over seeds (lowest to highest) |", "|---|---|"]
    for label in dict.fromkeys(r.label for r in runs):
        mine = [{v: (steps, value) for v, steps, value in r.curve} for r in runs if r.label == label and r.curve]
        shared = sorted(set.intersection(*(set(c) for c in mine))) if mine else []
        shown = shared[:: max(1, len(shared) // _POINTS)]
        points = [
            f"{statistics.median(c[version][0] for c in mine) / 1000:,.0f}: {_spread([c[version][1] for c in mine])}"
            for version in dict.fromkeys([*shown, *shared[-1:]])
        ]
        lines.append(f"| {label} | {', '.join(points)} |")
    return "\n".join(lines)


def _rows(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _spread(values: Sequence[float]) -> str:
    middle = _short(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_short(min(values))} to {_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2f}"


def _join(parts: Iterable[str]) -> str:
    return " / ".join(parts)


if __name__ == "__main__":
    typer.run(main)
