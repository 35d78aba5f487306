"""Real runs through the command line: real processes, real sockets, a real (tiny, untrained) model."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from learner.warmup.main import build_model, build_tokenizer, save

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Path:
    """The tiny architecture with random weights, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "untrained"
    torch.manual_seed(0)
    save(build_model(), build_tokenizer(), folder)
    return folder


PPO = {"algorithm.name": "ppo", "algorithm.kl_coef": 0.05, "buffer.max_staleness": 0}
"""Without staleness a run is a function of its seed, whoever scores."""


def small_settings(model: Path) -> dict:
    """Settings of a run that takes seconds."""
    return {
        "model.path": str(model),
        "steps": 4,
        "seed": 3,
        "buffer.groups_per_step": 8,
        "sampling.group_size": 4,
        "sampling.max_new_tokens": 6,
        "buffer.replace_zero_variance": False,
        "task.verifier": "user_verifiers:digits",
        "task.holdout": 50,
        "eval.problems": 50,
        "eval.every": 2,
        "checkpoint.every": 0,
        "learner.lr": 1e-3,
        "learner.warmup_steps": 0,
        "actors.slots": 32,
        "log.wandb": False,
        "log.tensorboard": False,
    }


@pytest.fixture
def small(untrained):
    return small_settings(untrained)


@pytest.fixture(scope="session")
def inline_ppo(untrained, tmp_path_factory) -> Path:
    """The run folder of a PPO run whose actor scores and whose learner has the reference, made once."""
    out = tmp_path_factory.mktemp("inline") / "run"
    done = run("run", "arithmetic", *overrides(small_settings(untrained) | PPO), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "async_rl", *arguments]


def overrides(settings: dict) -> list[str]:
    def text(value) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return [part for key, value in settings.items() for part in ("--set", f"{key}={text(value)}")]


def environment() -> dict[str, str]:
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": search}


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment(), check=False
    )


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text())


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def trained_rows(out: Path) -> list[dict]:
    """The metrics of the trained steps; the last evaluation comes on a line of its own."""
    return [row for row in rows(out / "metrics.jsonl") if "reward/mean" in row]


def fresh_differences(out: Path) -> list[float]:
    """Log-probability differences of fresh sequences in the steps that had some, at least one."""
    found = [row["logp_diff/fresh"] for row in trained_rows(out)]
    assert any(difference is not None for difference in found)
    return [difference for difference in found if difference is not None]


def processes_of(out: Path) -> list[str]:
    """Command lines of the processes that belong to a run folder (its path is an argument of each)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(out) in line:
                found.append(line)
    return found


def assert_sound(out: Path, bound: int, steps: int) -> dict:
    """What must be true of every completed run: closed books, the bound, exact batches, nothing left behind."""
    summary = summary_of(out)
    ledger = summary["ledger"]
    assert summary["status"] == "completed"
    assert summary["steps"] == steps
    assert ledger["issued"] == sum(v for k, v in ledger.items() if k != "issued")
    assert all(ledger[k] == 0 for k in ("open", "scoring", "ready", "delivered"))
    assert summary["staleness"]["bound"] == bound
    assert summary["staleness"]["max"] <= bound
    batches = rows(out / "batches.jsonl")
    assert [b["step"] for b in batches] == list(range(steps))
    ordinals = [o for b in batches for o in b["ordinals"]]
    assert len(ordinals) == len(set(ordinals)) == ledger["trained"]
    assert 0 < summary["utilization"]["learner"] <= 1
    assert 0 <= summary["utilization"]["actors"] <= 1
    if steps > 8:  # actors may have made all of a shorter run before its first step, which is where measuring begins
        assert summary["utilization"]["actors"] > 0
    assert [r["step"] for r in trained_rows(out)] == list(range(steps))
    assert not processes_of(out)
    run_id = json.loads((out / "server.json").read_text())["run_id"]
    assert not list(Path("/dev/shm").glob(f"async_rl-{run_id}-*"))
    return summary


# ---------------------------------------------------------------- runs that are looked at while they go on


def start(*arguments: str, log: Path) -> subprocess.Popen:
    return subprocess.Popen(command(*arguments), stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment())


def wait_until(condition, what: str, timeout_s: float = 90.0):
    """Poll files that other processes write; there is no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)
    return found


def steps_of(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def server_of(out: Path) -> dict | None:
    file = out / "server.json"
    return json.loads(file.read_text()) if file.is_file() else None


def child_pids(pattern: str, out: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if pattern in line and str(out) in line and "torch.distributed" not in line:
                found.append(int(entry.name))
    return found


def ordinals_of(out: Path) -> list[int]:
    return sorted(o for batch in rows(out / "batches.jsonl") for o in batch["ordinals"])


def books_of(out: Path) -> dict:
    file = out / "books.json"
    return json.loads(file.read_text()) if file.is_file() else {"step": 0}
