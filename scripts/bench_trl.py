"""The token learner's forward and backward against TRL's own, on the same batch and model: speed and peak memory.

    groups (64 sums × 8 answers of the model) ─┬─► trl_side.py learner ─► CPU and wall-clock seconds ┐ in turns
                                               └─► Updater, here ───────► CPU and wall-clock seconds ┴─► JSON

    python scripts/bench_trl.py --trl-python TRL/bin/python [--model FOLDER] [--repeats 5] [--out FILE.json]

TRL's side is ``GRPOTrainer.training_step`` with the batch in place of its generation (already padded, its advantages
given), in a process of TRL's environment; ours begins with the groups as they come off the wire. Gradients are compared
first. One thread, float32, no optimiser step on either side; peak memory is that of a fresh process, above what it has
with model (and trainer) loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from compare_trl import ROOT, check_trl, environment

from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.data import Group
from async_rl.models import resolve_model
from learner.algorithms.group_relative import group_advantages
from learner.bench.batches import GROUP_SIZE, MAX_NEW, Case, load_case
from learner.bench.learner import compare, describe, peak_memory
from learner.bench.sides import make_pass

SPEED_BAR, MEMORY_BAR = 5.0, 0.6


class TrlSide:
    """TRL's process: one pass a line."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment()
        )
        self.read()

    def run(self) -> dict[str, float]:
        """CPU and wall-clock seconds of one pass."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, float]:
        """Its next answer; what else it prints is passed over.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])  # type: ignore[no-any-return]
        raise RuntimeError(f"TRL's process has ended, see {self._log.name}: {Path(self._log.name).read_text()[-500:]}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60.0)
        self._log.close()


def main(
    trl_python: Annotated[Path, typer.Option(help="python of an environment that has trl")],
    model: Annotated[str, typer.Option(help="Hugging Face folder of both")] = "tiny",
    sequences: Annotated[int, typer.Option(help="of the batch")] = 512,
    repeats: Annotated[int, typer.Option(min=1)] = REPEATS,
    out: Annotated[Path | None, typer.Option(help="JSON file")] = None,
) -> None:
    """Measure both in turns."""
    check_trl(trl_python)
    torch.set_num_threads(1)
    case = load_case("arithmetic", resolve_model(model))
    groups = case.draw(sequences)
    with tempfile.TemporaryDirectory(prefix="async-rl-trl-") as folder:
        work = Path(folder)
        plan = write_plan(case, groups, work)
        command = [str(trl_python), str(ROOT / "scripts/trl_side.py")]
        speed = measure_speed(case, groups, [*command, "learner", str(plan)], work, repeats)
        memory = measure_memory(case, groups, [*command, "memory", str(plan)], repeats)
    show("learner against TRL", [*speed, memory], out, **describe(case, groups))


def write_plan(case: Case, groups: list[Group], work: Path) -> Path:
    """The batch as lists, and what TRL's side is to do with it."""
    trajectories = [t for group in groups for t in group.trajectories]
    starts = [int(t.loss_mask.argmax()) for t in trajectories]
    rewards = torch.tensor([float(r) for group in groups for r in group.rewards])
    group_B = torch.repeat_interleave(torch.tensor([len(group) for group in groups]))
    batch = {
        "prompts": [t.tokens[:n].tolist() for t, n in zip(trajectories, starts, strict=True)],
        "completions": [t.tokens[n:].tolist() for t, n in zip(trajectories, starts, strict=True)],
        "advantages": group_advantages(rewards, group_B, True).tolist(),
    }
    (work / "batch.json").write_text(json.dumps(batch))
    plan = {
        "model": str(case.folder),
        "batch": str(work / "batch.json"),
        "gradients": str(work / "gradients.safetensors"),
        "scratch": str(work / "trainer"),
        "group_size": GROUP_SIZE,
        "max_new": MAX_NEW,
        "lr": 1e-4,
        "steps": 1,
        "seed": 0,
    }
    (work / "plan.json").write_text(json.dumps(plan))
    return work / "plan.json"


def measure_speed(case: Case, groups: list[Group], command: list[str], work: Path, repeats: int) -> list[Figure]:
    """Trained tokens per CPU second and per second.

    Raises:
        AsyncRLError: the two sides compute different gradients.
    """
    run, gradients = make_pass("ours", case, case.make_model())
    run(groups)
    trl = TrlSide(command, work / "trl.log")
    try:
        compare(gradients(), load_file(work / "gradients.safetensors"))
        tokens = sum(group.num_sampled for group in groups)
        clock: tuple[list[float], list[float]] = ([], [])

        def ours() -> float:
            began, cpu = time.perf_counter(), time.process_time()
            run(groups)
            used = time.process_time() - cpu
            clock[0].append(tokens / (time.perf_counter() - began))
            return tokens / used

        def theirs() -> float:
            used = trl.run()
            clock[1].append(tokens / used["wall_s"])
            return tokens / used["cpu_s"]

        per_cpu = paired(ours, theirs, repeats, warmup=0)
    finally:
        trl.close()
    what = f"forward and backward, {sum(map(len, groups))} sequences"
    return [
        Figure(f"{what}, CPU", "trained tokens/CPU s", per_cpu[0], "TRL", per_cpu[1], SPEED_BAR),
        Figure(f"{what}, clock", "trained tokens/s", tuple(clock[0]), "TRL", tuple(clock[1])),
    ]


def measure_memory(case: Case, groups: list[Group], command: list[str], repeats: int) -> Figure:
    """Peak memory of one pass."""

    def theirs() -> float:
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(), timeout=600.0)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("@"))
        return json.loads(line[1:])["bytes"] / 1e6  # type: ignore[no-any-return]

    ours: Callable[[], float] = lambda: peak_memory("ours", case, groups)  # noqa: E731
    values = paired(ours, theirs, repeats, warmup=0)
    return Figure("peak memory", "MB", values[0], "TRL", values[1], MEMORY_BAR, at_most=True)


if __name__ == "__main__":
    typer.run(main)
