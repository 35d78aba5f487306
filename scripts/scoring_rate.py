"""Groups per second that reward scorers score: with one, then with a second one that joins the same run.

    mock actor ──groups──► buffer ──lease──► scorers: a verifier that takes DELAY s per group is the bottleneck

    python scripts/scoring_rate.py [--delay 0.05] [--groups 100] [--set KEY=VALUE ...]

The rates are the server's own count: groups annotated over the seconds in which some scorer had work.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.client import Client
from async_rl.config import Config, load_config, to_toml
from async_rl.runfolder import read_json

SETTINGS = {
    "steps": 1_000_000,
    "actors.engine": "mock",
    "actors.mock_speed": 16000.0,
    "reward.placement": "scorer",
    "task.verifier": "scoring_rate:slow",
    "sampling.group_size": 2,
    "buffer.groups_per_step": 16,
    "buffer.replace_zero_variance": "false",
    "buffer.heartbeat_s": 1.0,
    "eval.every": 0,
    "eval.problems": 1,
    "checkpoint.every": 0,
    "log.wandb": "false",
    "log.tensorboard": "false",
}
DELAY_VARIABLE = "SCORING_RATE_DELAY_S"
HELD = 2
"""Groups that a reward scorer with one verifier process holds: one in work, one next."""
WAIT_S = 120.0
"""Longest wait for the start of a process and for the groups of one measurement."""


def slow(completions: Sequence[str], **columns: Any) -> list[float]:
    """A verifier that takes its time, like a rule that compiles and runs what it is given."""
    time.sleep(float(os.environ[DELAY_VARIABLE]))
    return [float(len(text) % 2) for text in completions]


class Run:
    """A run of the command line, seen through the status that its server sends.

    Args:
        config: of the run.
        out: run folder; it does not exist yet.
        delay_s: of the verifier.
    """

    def __init__(self, config: Config, out: Path, delay_s: float) -> None:
        self._config, self._out = config, out
        search = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        self._env = {**os.environ, DELAY_VARIABLE: str(delay_s), "PYTHONPATH": os.pathsep.join(filter(None, search))}
        file = out.with_suffix(".toml")
        file.write_text(to_toml(config))
        self._log = out.with_suffix(".log").open("w")
        self._processes = [self._start("async_rl", "run", str(file), "--out", str(out))]
        deadline = time.monotonic() + WAIT_S
        while not (found := read_json(out / "server.json")).get("address"):
            self._check(deadline, "the server's start")
            time.sleep(0.05)  # a file that another process writes: there is no event to wait for
        self._address = str(found["address"])
        self._line = Client(self._address, "monitor", "scoring-rate", config.contract_hash())
        self._line.connect(WAIT_S)

    def add_scorer(self, name: str) -> None:
        """Start one more scorer that joins the run."""
        config = str(self._out / "config.toml")
        arguments = ("--role", "reward", "--connect", self._address, "--name", name)
        self._processes.append(self._start("actors.scorers.main", config, *arguments))

    def rate(self, scorers: int, groups: int) -> float:
        """Groups per second over the next ``groups``, once ``scorers`` are at work.

        Raises:
            TimeoutError: they did not come in time.
        """
        deadline = time.monotonic() + WAIT_S
        first = self._stage(lambda stage: stage["leased"] > HELD * (scorers - 1), deadline)
        settled = self._stage(lambda stage: stage["annotated"] >= first["annotated"] + groups / 4, deadline)
        last = self._stage(lambda stage: stage["annotated"] >= settled["annotated"] + groups, deadline)
        return float((last["annotated"] - settled["annotated"]) / (last["seconds"] - settled["seconds"]))

    def close(self) -> None:
        """Ask the run to stop; what has not left after a while is killed."""
        self._line.send("stop", reason="measured")
        self._line.close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._log.close()

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=self._env)

    def _stage(self, condition: Any, deadline: float) -> dict[str, Any]:
        """The reward stage's figures, at the first status that meets the condition."""
        while True:
            for header, _ in self._line.receive(1.0):
                if header["type"] == "status" and condition(header["stages"]["reward"]):
                    return dict(header["stages"]["reward"])
            self._check(deadline, "the next groups")

    def _check(self, deadline: float, what: str) -> None:
        ended = [process.args for process in self._processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            why = f"{ended[0]!r} ended" if ended else f"not within {WAIT_S:g} s"
            raise TimeoutError(f"waiting for {what}: {why}; see {self._log.name}")


def main() -> None:
    """Measure with one scorer, add one, measure again, print both."""
    parser = argparse.ArgumentParser(description="scored groups per second with one and two reward scorers")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds that the verifier takes for a group")
    parser.add_argument("--groups", type=int, default=100, help="groups of each measurement")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    config = load_config("arithmetic", [*(f"{k}={v}" for k, v in SETTINGS.items()), *args.overrides])
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder) / "run", args.delay)
        try:
            one = run.rate(1, args.groups)
            print(f"1 scorer:  {one:.1f} groups/s", flush=True)
            run.add_scorer("reward-extra")
            two = run.rate(2, args.groups)
        finally:
            run.close()
    print(f"2 scorers: {two:.1f} groups/s, {two / one:.2f} times as many (the verifier takes {args.delay:g} s a group)")


if __name__ == "__main__":
    main()
