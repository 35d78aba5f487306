"""Kills at random, short: the script that docs/reliability.md names finds nothing lost, in either domain."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.conftest import environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chaos.py"
SMALL = {
    "arithmetic": ("buffer.groups_per_step=8", "sampling.group_size=4", "task.holdout=50", "eval.problems=50"),
    "cartpole": ("env.num_envs=8", "env.horizon=64", "eval.episodes=4"),
}


@pytest.mark.parametrize(("preset", "roles"), [("arithmetic", ""), ("cartpole", "server,learner,actor")])
def test_nothing_is_lost_whoever_is_killed(preset, roles, tmp_path):
    arguments = ["--preset", preset, "--kills", "5", "--seed", "3", "--steps", "40", "--roles", roles, "--no-baseline"]
    settings = [word for setting in SMALL[preset] for word in ("--set", setting)]
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(tmp_path), *settings]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=390, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    told = json.loads((tmp_path / f"chaos-{preset}-3.json").read_text())
    assert len(told["faults"]) == 5
    assert all(fault["recovered_s"] > 0 for fault in told["faults"])
    assert told["losses"] == []
    assert told["largest_age"] <= told["bound"]
