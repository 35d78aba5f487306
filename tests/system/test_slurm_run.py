"""A Slurm job on this machine: the very script that would be submitted; only `srun` and `scontrol` are stand-ins."""

import subprocess

import pytest
from slurm_fakes import job_environment

from tests.system.conftest import assert_sound, environment, overrides, run, summary_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def submit(tmp_path, script, number, seconds=120):
    env = environment() | job_environment(tmp_path / "bin", number)
    env["PYTHONPATH"] = environment()["PYTHONPATH"]
    return subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, timeout=seconds, env=env, check=False, cwd=tmp_path
    )


def test_a_job_trains_and_goes_on_when_it_is_submitted_again(tmp_path, small, monkeypatch):
    monkeypatch.setenv("PATH", job_environment(tmp_path / "bin", 1)["PATH"])
    monkeypatch.setenv("FAKE", str(tmp_path / "bin"))
    out = tmp_path / "run"
    prepared = run("launch", "arithmetic", "--slurm", "--actor-nodes", "2", *overrides(small), "--out", str(out))
    assert prepared.returncode == 0, prepared.stderr
    done = submit(tmp_path, out / "job" / "job.sbatch", number=77)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_sound(out, bound=2, steps=4)
    assert {client["role"] for client in summary_clients(out)} >= {"actor", "learner"}
    assert sum(client["role"] == "actor" for client in summary_clients(out)) == 2, "one on each node"
    again = submit(tmp_path, out / "job" / "job.sbatch", number=78)
    assert again.returncode == 2
    assert "all 4 steps are done" in again.stderr
    assert summary_of(out)["status"] == "completed"


def summary_clients(out):
    """Who took part, by the last books."""
    import json

    return json.loads((out / "books.json").read_text())["clients"]
