"""Ours and the baseline behind one interface: groups in, gradients out; and how much memory that took.

python -m learner.bench.sides ours|padded CASE BATCH [--model DIR]        peak memory of one pass, in a fresh process
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from async_rl.data import Group
from async_rl.process import rss_bytes
from async_rl.timer import StateTimer
from learner.bench.batches import Case, load_case, one_rank, read_groups
from learner.bench.padded import Padded
from learner.group import LearnerGroup, Placement
from learner.networks import Networks
from learner.updater import Updater

Side = Literal["ours", "padded"]
Pass = Callable[[Sequence[Group]], None]


def make_pass(side: Side, case: Case, model: Any) -> tuple[Pass, Callable[[], dict[str, torch.Tensor]]]:
    """Forward and backward of a batch of groups, and the gradients of the last one by name."""
    if side == "padded":
        return Padded(case, model).gradient, lambda: {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }
    group = LearnerGroup(Placement(0, 1, torch.device("cpu")), timeout_s=60.0)
    networks = Networks(model, temperature=case.config.sampling.temperature)
    updater = Updater(case.config, networks, group, StateTimer())

    def gradient(groups: Sequence[Group]) -> None:
        (prepared,) = updater.prepare([one_rank(groups)], version=0)
        updater.gradient(prepared)

    return gradient, lambda: {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def peak_bytes(run: Callable[[], None]) -> int:
    """Most resident memory while ``run`` runs, above what there was before."""
    before = rss_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at what is resident now
    run()
    status = Path("/proc/self/status").read_text()
    (peak,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
    return peak - before


def main() -> None:
    """Print the peak of one side in bytes: from a loaded model to its gradients."""
    parser = argparse.ArgumentParser(prog="python -m learner.bench.sides")
    parser.add_argument("side", choices=("ours", "padded"))
    parser.add_argument("case", choices=("arithmetic", "smollm2"))
    parser.add_argument("batch", type=Path)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    case, groups = load_case(args.case, args.model), read_groups(args.batch)
    model = case.make_model()
    print(peak_bytes(lambda: make_pass(args.side, case, model)[0](groups)))


if __name__ == "__main__":
    main()
