"""A Slurm job on this machine: the very script that would be submitted; only Slurm's own commands are stand-ins."""

import os
import signal
import subprocess

import pytest
from slurm_fakes import job_environment

from tests.system.conftest import (
    assert_sound,
    environment,
    overrides,
    processes_of,
    run,
    steps_of,
    summary_of,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def submit(tmp_path, script, number):
    env = environment() | job_environment(tmp_path / "bin", number, actors=1)
    env["PYTHONPATH"] = environment()["PYTHONPATH"]
    log = tmp_path / f"job-{number}.log"
    process = subprocess.Popen(
        ["bash", str(script)], stdout=log.open("w"), stderr=subprocess.STDOUT, env=env, cwd=tmp_path
    )
    return process, log


def test_a_job_writes_a_checkpoint_before_its_limit_and_goes_on_when_it_is_submitted_again(
    tmp_path, small, monkeypatch
):
    monkeypatch.setenv("PATH", job_environment(tmp_path / "bin", 1)["PATH"])
    monkeypatch.setenv("FAKE", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "a run"
    small |= {"steps": 12, "eval.every": 0, "eval.problems": 1, "actors.engine": "mock", "actors.mock_speed": 1000}
    prepared = run("launch", "arithmetic", "--slurm", *overrides(small), "--out", str(out))
    assert prepared.returncode == 0, prepared.stderr
    script = out / "job" / "job.sbatch"

    process, log = submit(tmp_path, script, 77)
    try:
        wait_until(lambda: steps_of(out), "a step", 90)
        tasks = [(tmp_path / "bin" / f"tasks.{group}").read_text() for group in "01"]
        for task in " ".join(tasks).split():  # as Slurm does, three minutes before the limit
            os.kill(int(task), signal.SIGTERM)
        assert process.wait(60) == 143, log.read_text()
    finally:
        process.kill()
    assert summary_of(out)["status"] == "stopped"
    wait_until(lambda: not processes_of(out), "the end of all processes", 30)

    process, log = submit(tmp_path, script, 79)
    assert process.wait(90) == 0, log.read_text()
    assert "the learner ended with exit code 0" in log.read_text()
    assert_sound(out, bound=2, steps=12)
    wait_until(lambda: not processes_of(out), "the end of all processes", 30)
