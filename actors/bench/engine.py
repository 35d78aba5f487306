"""``async-rl bench engine``: the embedded engine beside vLLM's CPU build and a plain loop, on the same requests.

    ours ──┐
    vllm ──┼─ a process each, started once, on the same core; they decode the load in turns ─► tokens per second
    loop ──┘

One thread, float32, temperature 1, log-probabilities of the sampled tokens from each. There are more sequences than
slots, so that slots are refilled. Before anything is measured the log-probabilities of each are held against a plain
forward of the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from actors.bench.load import CaseName, Side
from async_rl.bench.figures import REPEATS, Figure, paired, show
from async_rl.errors import AsyncRLError
from async_rl.models import cached_model
from async_rl.process import run_guarded

SLOTS = (256, 1024)
REFILLS = 3
"""Sequences are so many times the slots."""
BAR = 1.6
"""Our tokens per second over vLLM's."""
TOLERANCE = 1e-3
"""Largest error of a log-probability, float32."""
_END_S = 30.0
_BUILD_S = 600.0
_ANSWER_S = 1_800.0


class Process:
    """One engine in a child process; a context manager that ends it."""

    def __init__(self, side: Side, case: CaseName, folder: Path, slots: int, sequences: int) -> None:
        command = [sys.executable, "-m", "actors.bench.child", side, case, "--model", str(folder)]
        command += ["--slots", str(slots), "--sequences", str(sequences)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.side, self._runs, self.clock = side, 0, list[float]()
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stdin and self._child.stdin.close()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(_END_S)

    def ready(self) -> dict[str, Any]:
        """Wait until it may run; what it says of its load.

        Raises:
            AsyncRLError: it does not start, or its log-probabilities are not those of the model.
        """
        facts = self._answer()
        if not facts["error"] <= TOLERANCE:
            raise AsyncRLError(f"{self.side}: log-probabilities are off by {facts['error']:.3g}: nothing to compare")
        return facts

    def run(self) -> float:
        """Decode the load once: tokens per CPU second; those per second are kept in ``clock``."""
        assert self._child.stdin is not None
        print(self._runs, file=self._child.stdin)
        self._runs += 1
        done = self._answer()
        self.clock.append(done["tokens"] / done["wall_s"])
        return float(done["tokens"] / done["cpu_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], _ANSWER_S)[0]:  # one line an answer: none is in the buffer
            raise AsyncRLError(
                f"the process of {self.side} has not answered for {_ANSWER_S:.0f} s: use fewer sequences"
            )
        line = self._child.stdout.readline()
        if not line:
            raise AsyncRLError(f"the process of {self.side} ended with exit code {self._child.wait(_END_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Measure the cases, each with each number of slots, against each baseline."""
    parser = argparse.ArgumentParser(prog="python -m actors.bench.engine")
    parser.add_argument("--case", choices=get_args(CaseName), help="default: both")
    parser.add_argument("--baseline", choices=("vllm", "loop"), help="default: vllm where it is installed, else loop")
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the one of the preset arithmetic")
    parser.add_argument("--slots", type=int, help=f"default: {SLOTS}")
    parser.add_argument("--sequences", type=int, help=f"default: {REFILLS} times the slots")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    baseline: Side = args.baseline or ("vllm" if has_vllm else "loop")
    note = "" if has_vllm else "vllm is not installed: no figure beside it (bash scripts/install_vllm_cpu.sh)"
    if baseline == "vllm" and not has_vllm:
        raise AsyncRLError(note)
    folder = args.model or _tiny()
    figures: list[Figure] = []
    facts: dict[str, Any] = {}
    cases: list[CaseName] = [args.case] if args.case else list(get_args(CaseName))
    for case in cases:
        for slots in [args.slots] if args.slots else SLOTS:
            sequences = args.sequences or REFILLS * slots
            found, facts[f"{case} {slots}"] = measure(case, baseline, folder, slots, sequences, args.repeats)
            figures += found
    show("engine", figures, args.out, model=str(folder), loads=facts, note=note)
    if note:
        print(note)


def measure(
    case: CaseName, baseline: Side, folder: Path, slots: int, sequences: int, repeats: int
) -> tuple[list[Figure], dict[str, Any]]:
    """Tokens per CPU second and per second of ours and of a baseline, and what is to be known of the load."""
    with (
        Process("ours", case, folder, slots, sequences) as ours,
        Process(baseline, case, folder, slots, sequences) as other,
    ):
        facts = [side.ready() for side in (ours, other)]
        per_cpu = paired(ours.run, other.run, repeats)
        clocks = [tuple(side.clock[-repeats:]) for side in (ours, other)]
        what, bar = f"{case}, {slots} slots, {sequences} sequences", BAR if baseline == "vllm" else None
        figures = [
            Figure(f"{what}, CPU", "tokens/CPU s", per_cpu[0], baseline, per_cpu[1], bar),
            Figure(f"{what}, clock", "tokens/s", clocks[0], baseline, clocks[1], bar),
        ]
        return figures, facts[0] | {"error": {"ours": facts[0]["error"], baseline: facts[1]["error"]}}


def _tiny() -> Path:
    folder = cached_model("tiny")
    if not (folder / "config.json").is_file():
        # the learner's package makes it; nothing of it is imported here
        command = [sys.executable, "-m", "learner.warmup.main", "tiny", "--out", str(folder)]
        subprocess.run(command, check=True, timeout=_BUILD_S, stdout=subprocess.DEVNULL)
    return folder


if __name__ == "__main__":
    run_guarded(main)
