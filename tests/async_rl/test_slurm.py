"""The batch script: its directives word by word, what the command line refuses, and the shell's own supervision."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slurm_fakes import install, job_environment

from async_rl.errors import ConfigError
from async_rl.launch.job import Job
from async_rl.launch.slurm import launch_scripts, limit_s
from async_rl.launch.slurm_script import Component, SlurmOptions, directive, scorer_guests, slurm_script


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
        extra=("--qos=high", "--requeue"),
    )
    learner, actor = directives(text)
    shared = ["--account=lab", "--time=12:00:00", "--signal=TERM@180", "--no-kill", "--qos=high", "--requeue"]
    own = ["--partition=big", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64"]
    assert learner[4:] == own + shared
    assert learner[0] == "--job-name=arithmetic"
    assert f'"--output={job.out}/job/slurm-%j.log"' in learner, "a blank in it is quoted"
    assert actor == ["--partition=small", "--nodes=5", "--ntasks-per-node=1", "--gpus-per-node=4", *shared]


def test_directives_stand_before_the_first_command(job):
    lines = script_of(job).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first = next(i for i, line in enumerate(lines) if i and not line.startswith("#SBATCH"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


@pytest.mark.parametrize("sign", ["\n", "\r"])
def test_a_line_break_in_an_option_is_refused(job, sign):
    with pytest.raises(ConfigError, match="line break"):
        script_of(job, account=f"lab{sign}#SBATCH --uid=0")


def words_of_slurm(line, quotes):
    """How sbatch takes a line apart: quotes keep blanks, a backslash takes the next sign as it is, # begins a remark.

    Older versions know one kind of quotes, and remarks inside of them.
    """
    words, word, quote, escaped = [], "", "", False
    for sign in line:
        if escaped:
            word, escaped = word + sign, False
        elif sign == "\\":
            escaped = True
        elif sign in quotes and quote in ("", sign):
            quote = "" if quote else sign
        elif sign == "#" and not (quote and len(quotes) > 1):
            break
        elif sign.isspace() and not quote:
            words, word = [*words, word], ""
        else:
            word += sign
    return [*words, word]


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab %'\"\\#$`;&|*?~()=\té"), min_size=1))
def test_every_version_of_slurm_reads_an_option_as_it_was_given(value):
    line = directive(f"--account={value}")
    assert words_of_slurm(line, '"') == words_of_slurm(line, "\"'") == [f"--account={value}"]


def test_slurm_takes_no_patterns_from_the_name_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job.of("arithmetic", [], tmp_path / "50%j", None)
    assert f"--output={tmp_path}/50%%j/job/slurm-%j.log" in directives(script_of(job))[0]


def test_the_job_has_keys_in_the_run_folder_that_only_its_user_can_read(job):
    job.make()
    job.write()
    assert job.config.buffer.keys == str(job.out / "job" / "keys")
    assert (job.out / "job" / "keys" / "server.key").stat().st_mode & 0o777 == 0o600
    before = (job.out / "job" / "keys" / "server.key").read_text()
    Job.of(None, [], None, job.out).make()
    assert (job.out / "job" / "keys" / "server.key").read_text() == before, "a resumed run keeps its keys"


def test_a_run_folder_in_use_is_refused(job):
    job.make()
    (job.out / "config.toml").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        job.make()


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("12:00:00", 43_200), ("2-12", 216_000), ("2-12:30", 217_800), ("1-0:0:9", None)],
)
def test_limits_in_the_forms_of_slurm(time, seconds):
    if seconds is None:
        with pytest.raises(ConfigError, match="HH:MM:SS"):
            limit_s(time)
    else:
        assert limit_s(time) == seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arithmetic"], "say where"),
        (["arithmetic", "--slurm", "--ray"], "say where"),
        (["--slurm"], "name a preset"),
        (["arithmetic", "--slurm", "--time", "soon"], "HH:MM:SS"),
        (["arithmetic", "--slurm", "--time", "5"], "ask for more than 6 minutes"),
        (["arithmetic", "--slurm", "--learner-nodes", "2"], "cannot be split"),
        (["arithmetic", "--slurm", "--learner-nodes", "2", "--set", "learner.ranks=2"], "--trusted-network"),
        (["arithmetic", "--slurm", "--trusted-network"], "no effect with one learner node"),
        (["arithmetic", "--slurm", "--learner-gpus", "1", "--set", "learner.ranks=2"], "ask for more GPUs"),
        (["arithmetic", "--slurm", "--learner-gpus", "8"], "the others would do nothing; raise learner.ranks"),
        (["arithmetic", "--ray", "--learner-gpus", "8"], "the others would do nothing; raise learner.ranks"),
        (["arithmetic", "--slurm", "--port", "80"], "choose one"),
        (["arithmetic", "--slurm", "--set", "actors.count=5"], "actors.count has no effect with async-rl launch"),
        (["arithmetic", "--slurm", "--set", "buffer.keys=mine"], "the keys are made for this run"),
        (["arithmetic", "--ray", "--set", "buffer.bind=tcp://1.2.3.4:5"], "the learner node that the cluster gives"),
        (["arithmetic", "--slurm", "--set", "buffer.insecure=true"], "the server has keys"),
        (["arithmetic", "--slurm", "--set", "model.path=absent"], "absent/config.json does not exist"),
        (["arithmetic", "--ray", "--set", "task.data=absent.jsonl"], "task.data = 'absent.jsonl'"),
        (["arithmetic", "--slurm", "--set", "task.verifier=absent:score"], "No module named 'absent'"),
        (["arithmetic", "--slurm", "--partition", ""], "--partition '' is empty"),
        (["arithmetic", "--slurm", "--account", " "], "--account ' ' is empty"),
        (["arithmetic", "--slurm", "--sbatch=qos=high"], "no option of sbatch"),
        (["arithmetic", "--slurm", "--set", "weights.path=broadcast"], "several learner nodes"),
        (["arithmetic", "--slurm", "--max-actors", "4"], "--max-actors goes with --ray: leave it away"),
        (["arithmetic", "--slurm"], "there is no sbatch on this host"),
        (["--slurm", "--resume", "absent"], "has prepared no run there"),
        (
            ["arithmetic", "--slurm", "--set", "actors.placement=colocated", "--set", "buffer.max_staleness=0"],
            "take turns on one device",
        ),
        (["arithmetic", "--ray", "--dry-run"], "--dry-run goes with --slurm: leave it away"),
        (["arithmetic", "--ray", "--min-actors", "3", "--max-actors", "2"], "is below"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, monkeypatch, arguments, message):
    from async_rl.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["async-rl", "launch", *arguments])
    told = []
    monkeypatch.setattr(sys, "stderr", type("Told", (), {"write": told.append, "flush": lambda self: None})())
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in "".join(told)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_script_asks_slurm_and_writes_nothing(tmp_path):
    env = install(tmp_path / "bin")
    work = tmp_path / "work"
    work.mkdir()
    done = launch("arithmetic", "--slurm", "--dry-run", "--actor-nodes", 3, cwd=work, env=env)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=3" in done.stdout
    cpus = re.findall(r"#SBATCH --cpus-per-task=(\d+)", done.stdout)
    assert cpus == ["2", "1"], "a rank and the server; an engine"
    assert "# checked: bash -n, sbatch --test-only: sbatch: Job 7 to start" in done.stdout
    assert list(work.iterdir()) == []
    done = launch("arithmetic", "--slurm", "--dry-run", "--partition", "nowhere", cwd=work, env=env)
    assert done.returncode == 1
    assert "invalid partition specified: nowhere" in done.stderr


def test_a_dry_run_refuses_the_folder_that_the_job_would_refuse(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.toml").touch()
    done = launch("arithmetic", "--slurm", "--dry-run", "--out", "used", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "used is not empty" in done.stderr


def test_a_job_that_waits_keeps_its_files_until_one_that_was_refused_has_none(tmp_path):
    env = install(tmp_path / "bin")
    command = ("arithmetic", "--slurm", "--out", "run")
    assert launch(*command, cwd=tmp_path, env=env).returncode == 0
    again = launch(*command, "--set", "steps=7", cwd=tmp_path, env=env)
    assert again.returncode == 2
    assert "was submitted for this run folder already" in again.stderr
    assert "steps = 7" not in (tmp_path / "run" / "job" / "config.toml").read_text()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho no such account >&2; exit 1\n")
    refused = launch(*command[:-1], "other", cwd=tmp_path, env=env)
    assert (refused.returncode, "no such account" in refused.stderr) == (1, True)
    assert not (tmp_path / "other" / "job" / "job.sbatch").exists(), "may be tried again"


def test_a_run_goes_on_with_what_it_has_learned_so_far_or_not_at_all(job):
    job.make()
    job.write()
    assert Job.of(None, ["seed=9"], None, job.out).config.seed == 9, "not begun yet"
    (job.out / "config.toml").write_text(job.config_file.read_text())
    assert Job.of(None, ["steps=9"], None, job.out).config.steps == 9
    with pytest.raises(ConfigError, match="seed must stay"):
        Job.of(None, ["seed=9"], None, job.out)


def test_a_dry_run_where_there_is_no_slurm_is_a_script_that_says_so(tmp_path):
    done = launch("arithmetic", "--slurm", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/usr/bin/env bash\n#SBATCH")
    assert "# checked: bash -n; sbatch was not found on this host" in done.stdout
    read = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")


def test_a_job_is_submitted_with_its_files_in_place(tmp_path):
    env = install(tmp_path / "bin")
    done = launch("arithmetic", "--slurm", "--out", "a run", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    script = tmp_path / "a run" / "job" / "job.sbatch"
    assert "job 7 is submitted" in done.stdout
    assert f"to go on with the run: sbatch '{script}'" in done.stdout
    assert (tmp_path / "bin" / "sbatch.log").read_text().splitlines() == ["--parsable", str(script)]
    assert (tmp_path / "a run" / "job" / "config.toml").is_file()


def test_scorers_that_compute_get_devices_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    placed = ["algorithm.name=ppo", "algorithm.kl_coef=0.1", "reference.placement=scorer", "reference.scorers=3"]
    job = Job.of("arithmetic", placed, tmp_path / "run", None)
    options = SlurmOptions(learner=Component(nodes=1), actor=Component(nodes=2, gpus=4))
    assert scorer_guests(job, options) == 2, "three scorers on two nodes"
    text = slurm_script(job, options, Path("/scripts"), "/python")
    # node 0 has two scorers and so two engines, node 1 has one and three
    (engines,) = re.findall(r"export engines=\$\(\((.*)\)\)", text)
    assert [eval(engines.replace("/", "//"), {"i": i}) for i in (0, 1)] == [2, 3]
    assert re.findall(r"gpus\[\$\{#gpus\[@\]\} - (\d)\]", text) == ["1", "1", "2"], "from the last one"
    assert re.findall(r'node="\$\{actors\[(\d)\]\}"', text) == ["0", "1", "0"]


# ---------------------------------------------------------------- the shell's part, with stand-ins for the two commands


def stand_ins(folder, learner, actor):
    """Scripts in place of ``launch_learner.sh`` and ``launch_actor.sh``."""
    folder.mkdir()
    (folder / "launch_learner.sh").write_text(f'echo "learner $@" >>"$FAKE/calls"\n{learner}\n')
    (folder / "launch_actor.sh").write_text(f'echo "actor $@" >>"$FAKE/calls"\n{actor}\n')
    return folder


def run_job(tmp_path, job, on_learner, on_actor, signal_when=None, told="script", folder="scripts", **options):
    """Run a job's script; its exit code, output and the calls of the two commands, in order of name."""
    scripts = stand_ins(tmp_path / folder, on_learner, on_actor)
    job.make()
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
        if told == "script":
            process.send_signal(signal.SIGTERM)
        for step in [] if told == "script" else (tmp_path / "bin").glob("tasks.*"):
            for task in step.read_text().split():
                os.kill(int(task), signal.SIGTERM)
    code = process.wait(20)
    calls = tmp_path / "bin" / "calls"
    return code, (tmp_path / "log").read_text(), sorted(calls.read_text().splitlines()) if calls.is_file() else []


WAITS = "exec sleep 15"
WAITER = """\
hurry() { echo hurried >>"$FAKE/calls"; exit 1; }
sleep 15 & s=$!
trap 'trap hurry TERM; kill $s; echo checkpoint >>"$FAKE/calls"; sleep 0.5; exit 143' TERM
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
    port = 10000 + 4711
    assert calls == [
        *[f"actor {config} --connect tcp://localhost:{port}"] * 2,
        f"learner {config} --out {job.out} --set buffer.bind=tcp://0.0.0.0:{port}",
    ]
    assert "the learner ended with exit code 0" in log
    assert "forcing" not in log, "actors are asked to leave"
    assert "failed" not in log


@pytest.mark.real
def test_each_learner_node_gets_its_number_and_the_address_of_the_first(tmp_path, job):
    code, log, calls = run_job(tmp_path, job, ends_after(4), WAITS, learner=Component(nodes=2), port=6000, engines=4)
    assert code == 0, log
    group = "--trusted-network --nnodes 2 --node-rank {} --rendezvous localhost:6000"
    where = f"learner {job.out}/job/config.toml --out {job.out} "
    assert calls[2:] == [where + group.format(0), where + group.format(1)]
    assert calls[0].endswith("--connect tcp://localhost:6000 --engines 4")


@pytest.mark.real
@pytest.mark.parametrize("name", ['it\'s "odd"', "50% $HOME", "a\\b #1; exit 9"])
def test_odd_names_arrive_as_they_are(tmp_path, monkeypatch, name):
    place = tmp_path / name
    place.mkdir()
    monkeypatch.chdir(place)
    job = Job.of("arithmetic", [], place / f"run {name}", None)
    code, log, calls = run_job(tmp_path, job, ends_after(3), WAITS, folder=f"scripts {name}")
    assert code == 0, log
    assert calls[2].startswith(f"learner {job.out}/job/config.toml --out {job.out} --set")


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
@pytest.mark.parametrize("told", ["script", "steps"])
def test_a_signal_reaches_the_learner_once_and_is_waited_for(tmp_path, job, told):
    calls_file = tmp_path / "bin" / "calls"

    def is_up():
        return calls_file.is_file() and "up" in calls_file.read_text().split()

    code, log, calls = run_job(tmp_path, job, WAITER, WAITS, signal_when=is_up, told=told)
    assert code == 143, log
    assert calls.count("checkpoint") == 1
    assert "hurried" not in calls, "asked once more it would end without a checkpoint"
    assert "failed" not in log, "actors that were asked to end have not failed"
    assert "forcing" not in log, "srun itself was not told, or it would have killed the learner"


@pytest.mark.real
def test_nodes_that_do_not_see_the_run_folder_say_so(tmp_path, job, monkeypatch):
    monkeypatch.setattr(Job, "config_file", property(lambda job: Path("/absent/config.toml")))
    monkeypatch.setattr(Job, "write", lambda job: None)
    code, log, calls = run_job(tmp_path, job, "exit 0", "exit 0")
    assert code == 1
    assert calls == []
    assert "/absent/config.toml is not there on node" in log
    assert "the run folder must lie on a file system that all nodes share" in log


@pytest.mark.real
def test_submitted_again_the_run_is_resumed(tmp_path, job):
    job.make()
    job.write()
    (job.out / "config.toml").write_text(job.config_file.read_text())
    code, _, calls = run_job(tmp_path, Job.of(None, [], None, job.out), "exit 0", WAITS)
    assert code == 0
    assert f"--resume {job.out}" in calls[-1]


def test_the_scripts_of_both_hosts_are_where_the_job_looks_for_them():
    assert (launch_scripts() / "launch_actor.sh").is_file()
