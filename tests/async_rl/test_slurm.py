"""The batch script: its directives word by word, what the command line refuses, and the shell's own supervision."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_fakes import install, job_environment

from async_rl.errors import ConfigError
from async_rl.launch.job import Job
from async_rl.launch.slurm import launch_scripts
from async_rl.launch.slurm_script import Component, SlurmOptions, slurm_script


def launch(*arguments, cwd, env=None):
    return subprocess.run(
        [sys.executable, "-m", "async_rl", "launch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=env or os.environ,
    )


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Job.of("arithmetic", ["steps=3"], tmp_path / "a run", None)


def script_of(job, scripts=None, **options):
    given = {"learner": Component(nodes=1), "actor": Component(nodes=2)} | options
    return slurm_script(job, SlurmOptions(**given), scripts or Path("/scripts"), "/venv/bin/python")


def directives(text):
    """By component, the options of each."""
    lines = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    at = lines.index("hetjob")
    return lines[:at], lines[at + 1 :]


def test_each_component_asks_for_its_own_nodes(job):
    text = script_of(
        job,
        learner=Component(nodes=2, partition="big", gpus=8, cpus=64),
        actor=Component(nodes=5, partition="small", gpus=4),
        account="lab",
        time="12:00:00",
        trusted_network=True,
        extra=("--qos=high",),
    )
    learner, actor = directives(text)
    shared = ["--account=lab", "--time=12:00:00", "--signal=TERM@180", "--no-kill", "--qos=high"]
    own = ["--partition=big", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64"]
    assert learner[4:] == own + shared
    assert learner[0] == "--job-name=arithmetic"
    assert f"'--output={job.out}/job/slurm-%j.log'" in learner, "a blank in it is quoted"
    assert actor == ["--partition=small", "--nodes=5", "--ntasks-per-node=1", "--gpus-per-node=4", *shared]


def test_directives_stand_before_the_first_command(job):
    lines = script_of(job).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first = next(i for i, line in enumerate(lines) if i and not line.startswith("#SBATCH"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_a_line_break_in_an_option_is_refused(job):
    with pytest.raises(ConfigError, match="line break"):
        script_of(job, account="lab\n#SBATCH --uid=0")


def test_the_job_has_keys_in_the_run_folder_that_only_its_user_can_read(job):
    job.write()
    assert job.config.buffer.keys == str(job.out / "job" / "keys")
    assert (job.out / "job" / "keys" / "server.key").stat().st_mode & 0o777 == 0o600
    before = (job.out / "job" / "keys" / "server.key").read_text()
    Job.of(None, [], None, job.out).write()
    assert (job.out / "job" / "keys" / "server.key").read_text() == before, "a resumed run keeps its keys"


def test_a_run_folder_in_use_is_refused(job):
    job.write()
    (job.out / "config.toml").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        job.write()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arithmetic"], "say where"),
        (["arithmetic", "--slurm", "--ray"], "say where"),
        (["--slurm"], "name a preset"),
        (["arithmetic", "--slurm", "--time", "soon"], "HH:MM:SS"),
        (["arithmetic", "--slurm", "--learner-nodes", "2"], "cannot be split"),
        (["arithmetic", "--slurm", "--learner-nodes", "2", "--set", "learner.ranks=2"], "--trusted-network"),
        (["arithmetic", "--slurm", "--learner-gpus", "1", "--set", "learner.ranks=2"], "ask for more GPUs"),
        (["arithmetic", "--slurm", "--port", "80"], "choose one"),
        (["arithmetic", "--slurm"], "there is no sbatch on this host"),
        (["--slurm", "--resume", "absent"], "has prepared no run there"),
        (
            ["arithmetic", "--slurm", "--set", "actors.placement=colocated", "--set", "buffer.max_staleness=0"],
            "take turns on one device",
        ),
        (["arithmetic", "--ray", "--dry-run"], "goes with --slurm"),
        (["arithmetic", "--ray", "--min-actors", "3", "--max-actors", "2"], "is below"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, arguments, message):
    done = launch(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_script_asks_slurm_and_writes_nothing(tmp_path):
    env = install(tmp_path / "bin")
    work = tmp_path / "work"
    work.mkdir()
    done = launch("arithmetic", "--slurm", "--dry-run", "--actor-nodes", 3, cwd=work, env=env)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=3" in done.stdout
    assert "# checked: bash -n, sbatch --test-only: sbatch: Job 7 to start" in done.stdout
    assert list(work.iterdir()) == []
    done = launch("arithmetic", "--slurm", "--dry-run", "--partition", "nowhere", cwd=work, env=env)
    assert done.returncode == 1
    assert "invalid partition specified: nowhere" in done.stderr


def test_a_job_is_submitted_with_its_files_in_place(tmp_path):
    env = install(tmp_path / "bin")
    done = launch("arithmetic", "--slurm", "--out", "run", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "job 7 is submitted" in done.stdout
    script = tmp_path / "run" / "job" / "job.sbatch"
    assert (tmp_path / "bin" / "sbatch.log").read_text().split() == ["--parsable", str(script)]
    assert (tmp_path / "run" / "job" / "config.toml").is_file()


# ---------------------------------------------------------------- the shell's part, with stand-ins for the two commands


def stand_ins(folder, learner, actor):
    """Scripts in place of ``launch_learner.sh`` and ``launch_actor.sh``."""
    folder.mkdir()
    (folder / "launch_learner.sh").write_text(f'echo "learner $@" >>"$FAKE/calls"\n{learner}\n')
    (folder / "launch_actor.sh").write_text(f'echo "actor $@" >>"$FAKE/calls"\n{actor}\n')
    return folder


def run_job(tmp_path, job, on_learner, on_actor, signal_when=None, **options):
    """Run a job's script; its exit code, output and the calls of the two commands, in order of name."""
    scripts = stand_ins(tmp_path / "scripts", on_learner, on_actor)
    job.write()
    script = job.files / "job.sbatch"
    script.write_text(script_of(job, scripts, **options))
    env = job_environment(tmp_path / "bin", 4711)
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(["bash", str(script)], stdout=log, stderr=subprocess.STDOUT, env=env)
    if signal_when is not None:
        deadline = time.monotonic() + 20
        while not signal_when():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    code = process.wait(20)
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    return code, (tmp_path / "log").read_text(), sorted(calls)


WAITS = "exec sleep 15"
WAITER = """\
sleep 15 & s=$!
trap 'kill $s; echo checkpoint >>"$FAKE/calls"; sleep 0.2; exit 143' TERM
echo up >>"$FAKE/calls"
wait
"""
"""A learner that writes a checkpoint when it is asked to stop."""


def ends_after(calls):
    """A learner that ends well once so many commands were started."""
    return f'until [ "$(grep -c . "$FAKE/calls")" -ge {calls} ]; do sleep 0.05; done; exit 0'


@pytest.mark.real
def test_learner_and_actors_are_started_by_the_commands_by_hand(tmp_path, job):
    code, log, calls = run_job(tmp_path, job, ends_after(3), WAITS)
    assert code == 0, log
    config = f"{job.out}/job/config.toml"
    port = 20000 + 4711
    assert calls == [
        *[f"actor {config} --connect tcp://localhost:{port}"] * 2,
        f"learner {config} --out {job.out} --bind 0.0.0.0:{port}",
    ]
    assert "the learner ended with exit code 0" in log


@pytest.mark.real
def test_each_learner_node_gets_its_number_and_the_address_of_the_first(tmp_path, job, monkeypatch):
    monkeypatch.setenv("FAKE_LEARNERS", "2")
    options = {"learner": Component(nodes=2), "trusted_network": True, "port": 6000, "engines": 4}
    code, log, calls = run_job(tmp_path, job, ends_after(4), WAITS, **options)
    assert code == 0, log
    group = "--nnodes 2 --node-rank {} --rendezvous localhost:6000 --trusted-network"
    where = f"learner {job.out}/job/config.toml --out {job.out} "
    assert calls[2:] == [where + group.format(0), where + group.format(1)]
    assert calls[0].endswith("--connect tcp://localhost:6000 --engines 4")


@pytest.mark.real
def test_the_exit_code_of_the_job_is_the_learners(tmp_path, job):
    code, log, _ = run_job(tmp_path, job, "exit 3", WAITS)
    assert code == 3, log


@pytest.mark.real
def test_a_learner_without_any_actor_is_asked_to_stop(tmp_path, job):
    fails = 'until grep -q up "$FAKE/calls"; do sleep 0.05; done; exit 1'
    code, log, calls = run_job(tmp_path, job, WAITER, fails)
    assert code == 143, log
    assert "checkpoint" in calls
    assert "every actor step has failed" in log


@pytest.mark.real
def test_actors_that_ended_well_are_no_reason_to_stop(tmp_path, job):
    code, log, _ = run_job(tmp_path, job, "sleep 0.7; exit 0", "exit 0")
    assert code == 0
    assert "failed" not in log


@pytest.mark.real
def test_a_signal_reaches_the_learner_and_is_waited_for(tmp_path, job):
    calls_file = tmp_path / "bin" / "calls"

    def is_up():
        return calls_file.is_file() and "up" in calls_file.read_text().split()

    code, log, calls = run_job(tmp_path, job, WAITER, WAITS, signal_when=is_up)
    assert code == 143, log
    assert "checkpoint" in calls


@pytest.mark.real
def test_submitted_again_the_run_is_resumed(tmp_path, job):
    job.write()
    (job.out / "config.toml").touch()
    code, _, calls = run_job(tmp_path, Job.of(None, [], None, job.out), "exit 0", WAITS)
    assert code == 0
    assert f"--resume {job.out}" in calls[-1]


def test_the_scripts_of_both_hosts_are_where_the_job_looks_for_them():
    assert (launch_scripts() / "launch_actor.sh").is_file()
