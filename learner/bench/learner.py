"""``async-rl bench learner``: the token learner's forward and backward beside a padded one of the same batch.

    groups ─┬─ packed, merged ─► ours ────┐  gradients (equal: checked first)
            └─ padded rows ────► padded ──┴► trained tokens per CPU second and per second, in turns; peak memory

Both begin with the groups as they were decoded and end with the gradient of every parameter; one thread, float32, no
optimiser step on either side. Peak memory is that of a fresh process from the loaded model to its gradients: ours
includes its flat vectors.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.data import Group
from async_rl.errors import AsyncRLError
from async_rl.process import run_guarded
from learner.bench.batches import Case, CaseName, load_case, write_groups
from learner.bench.padded import pad
from learner.bench.sides import Side, make_pass

SEQUENCES: dict[CaseName, int] = {"arithmetic": 512, "smollm2": 8}
"""Of a batch. The figure of ``smollm2`` is meant for 128, which take 16 times as long and have the same lengths."""
SPEED_BARS: dict[CaseName, float] = {"arithmetic": 5.0, "smollm2": 1.5}
MEMORY_BARS: dict[CaseName, float | None] = {"arithmetic": 0.6, "smollm2": None}
_TOLERANCE = 1e-4
_CHILD_S = 3_600.0


def main() -> None:
    """Measure one case or both."""
    parser = argparse.ArgumentParser(prog="python -m learner.bench.learner")
    parser.add_argument("--case", choices=sorted(SEQUENCES), help="default: both")
    parser.add_argument("--model", type=Path, help="Hugging Face folder to use instead of the case's own model")
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[Figure] = []
    facts: dict[str, Any] = {}
    names: list[CaseName] = [args.case] if args.case else list(SEQUENCES)
    for name in names:
        case = load_case(name, args.model)
        groups = case.draw(args.sequences or SEQUENCES[name])
        figures += measure(case, groups, args.repeats)
        facts[name] = describe(case, groups)
    show("learner", figures, args.out, **facts)


def measure(case: Case, groups: Sequence[Group], repeats: int) -> list[Figure]:
    """Speed by CPU time and by the clock, and memory.

    Raises:
        AsyncRLError: the two sides compute different gradients.
    """
    sides: tuple[Side, Side] = ("ours", "padded")
    passes = {side: make_pass(side, case, case.make_model()) for side in sides}
    for run, _ in passes.values():
        run(groups[: case.checked])
    compare(*(gradients() for _, gradients in passes.values()))
    tokens = sum(group.num_sampled for group in groups)
    clocks: dict[Side, list[float]] = {side: [] for side in sides}

    def timed(side: Side) -> Callable[[], float]:
        def run() -> float:
            began, cpu = time.perf_counter(), time.process_time()
            passes[side][0](groups)
            cpu_s = time.process_time() - cpu
            clocks[side].append(tokens / (time.perf_counter() - began))
            return tokens / cpu_s

        return run

    per_cpu = paired(timed("ours"), timed("padded"), repeats, warmup=0)
    what, against = f"{case.name}, {sum(len(g) for g in groups)} sequences", "padded"

    def used(side: Side) -> Callable[[], float]:
        return lambda: peak_memory(side, case, groups[: case.checked])

    # where nothing is promised, one pair: it takes as long as one of the others
    memory = paired(used("ours"), used("padded"), 1 if MEMORY_BARS[case.name] is None else repeats, warmup=0)
    bar, less = SPEED_BARS[case.name], MEMORY_BARS[case.name]
    clock = tuple(clocks["ours"]), tuple(clocks["padded"])
    return [
        Figure(f"{what}, CPU", "trained tokens/CPU s", per_cpu[0], against, per_cpu[1], bar),
        Figure(f"{what}, clock", "trained tokens/s", clock[0], against, clock[1]),
        Figure(f"{what}, peak memory", "MB", memory[0], against, memory[1], less, at_most=True),
    ]


def compare(ours: dict[str, torch.Tensor], padded: dict[str, torch.Tensor]) -> None:
    """Make sure that both sides computed the same.

    Raises:
        AsyncRLError: they did not; a figure would compare different work.
    """
    # torch's maximum is NaN where anything is
    scale = float(torch.stack([gradient.abs().max() for gradient in padded.values()]).max())
    worst = float(torch.stack([(ours[name] - gradient).abs().max() for name, gradient in padded.items()]).max())
    if not worst <= _TOLERANCE * scale:
        raise AsyncRLError(f"the gradients differ by {worst:.3g} (largest: {scale:.3g}): nothing can be compared")


def peak_memory(side: Side, case: Case, groups: Sequence[Group]) -> float:
    """Megabytes of one pass in a process of its own."""
    with tempfile.TemporaryDirectory() as work:
        batch = Path(work) / "batch"
        write_groups(batch, groups)
        model = ["--model", str(case.folder)] if case.folder else []
        command = [sys.executable, "-m", "learner.bench.sides", side, case.name, str(batch), *model]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_CHILD_S)
    return int(done.stdout) / 1e6


def describe(case: Case, groups: Sequence[Group]) -> dict[str, Any]:
    """The batch in numbers."""
    lengths = [n for group in groups for n in group.lengths]
    padded = pad(groups).inputs_BL
    return {
        "model": str(case.folder or "SmolLM2-135M's shape, random weights"),
        "sequences": len(lengths),
        "trained_tokens": sum(group.num_sampled for group in groups),
        "tokens": sum(lengths),
        "padded_tokens": padded.numel(),
    }


if __name__ == "__main__":
    run_guarded(main)
